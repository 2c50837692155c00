//! What was decided, and what came of it.

use std::collections::{BTreeMap, VecDeque};

use rtvirtio_spec::control::{Decision, Load, Outcome};
use rtvirtio_units::Nanos;

use super::sampler::{Sampler, Totals};

/// Decisions that are kept.
pub const DECISIONS_KEPT: usize = 1_000;
/// The time over which a decision's effect is measured, ns.
const WINDOW: u64 = 1_000_000_000;
/// Samples that are kept for it: of a window, and one to begin with.
const SAMPLES: usize = 102;

/// Decisions by kind and outcome.
pub(crate) type Counts = BTreeMap<(&'static str, Outcome), u64>;

/// Totals, ns of the monotonic clock.
type Sample = (u64, Totals);

/// The last decisions.
#[derive(Debug, Default)]
pub(super) struct Log {
    decisions: VecDeque<Decision>,
    last: u64,
    counts: Counts,
    samples: VecDeque<Sample>,
    /// Decisions whose effect is to be measured, and the sample they were made at.
    pending: VecDeque<(u64, Sample)>,
}

impl Log {
    /// The last decision's number; 0: there is none.
    pub(super) const fn last(&self) -> u64 {
        self.last
    }

    /// Those with higher numbers.
    pub(super) fn after(&self, number: u64) -> Vec<Decision> {
        let first = self.decisions.partition_point(|decision| decision.number <= number);
        self.decisions.range(first..).cloned().collect()
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts.clone()
    }

    /// Takes note of a sample. Decisions whose effect is known by it.
    pub(super) fn measure(&mut self, now: u64, sampler: &Sampler) -> Vec<u64> {
        self.note(now, sampler.totals(), sampler.is_first())
    }

    fn note(&mut self, now: u64, totals: Totals, is_first: bool) -> Vec<u64> {
        let mut measured = Vec::new();
        if is_first {
            // Another policy's: its totals began elsewhere.
            self.samples.clear();
            self.pending.clear();
        }
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back((now, totals));
        while let Some(&(number, from)) = self.pending.front()
            && now.saturating_sub(from.0) >= WINDOW
        {
            self.pending.pop_front();
            let at = self.decisions.binary_search_by_key(&number, |decision| decision.number);
            if let Some(decision) = at.ok().and_then(|at| self.decisions.get_mut(at)) {
                decision.after = Some(load(from, (now, totals)));
                measured.push(number);
            }
        }
        measured
    }

    /// Adds a decision, which is made of its number and the load before; the number.
    pub(super) fn add(&mut self, now: u64, make: impl FnOnce(u64, Load) -> Decision) -> u64 {
        let until = self.samples.back().copied().unwrap_or((now, Totals::default()));
        let from = self.samples.iter().find(|(at, _)| until.0 - at <= WINDOW);
        let before = load(from.copied().unwrap_or(until), until);
        self.last += 1;
        if self.decisions.len() == DECISIONS_KEPT {
            self.decisions.pop_front();
        }
        let decision = make(self.last, before);
        *self.counts.entry((decision.action.kind(), decision.outcome)).or_default() += 1;
        self.decisions.push_back(decision);
        if self.pending.len() == DECISIONS_KEPT {
            self.pending.pop_front();
        }
        self.pending.push_back((self.last, until));
        self.last
    }
}

fn load((begin, before): Sample, (end, after): Sample) -> Load {
    let time = end.saturating_sub(begin);
    if time == 0 {
        return Load::default();
    }
    let requests = after.requests - before.requests;
    let waited = after.waited - before.waited;
    Load {
        iops: requests as f64 * 1e9 / time as f64,
        wait_ns: Nanos::new(waited.checked_div(requests).unwrap_or(0)),
        cores: (after.ran - before.ran) as f64 / time as f64,
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::control::PolicyAction;
    use rtvirtio_spec::serve::Policy;

    use super::*;

    fn decide(log: &mut Log, now: u64) -> u64 {
        log.add(now, |number, before| Decision {
            number,
            time_ns: Nanos::ZERO,
            policy: Policy::Dynamic,
            action: PolicyAction::Gone,
            reason: String::new(),
            outcome: Outcome::Done,
            error: None,
            took_ns: Nanos::ZERO,
            before,
            after: None,
        })
    }

    fn totals(requests: u64, waited: u64, ran: u64) -> Totals {
        Totals { requests, waited, ran }
    }

    #[test]
    fn effect_is_that_of_a_second_before_and_after() {
        const MS: u64 = 1_000_000;
        let mut log = Log::default();
        // 100 requests in each 10 ms, each waits for 1 µs, on half a CPU; then twice of all.
        for i in 0..=150 {
            log.note(i * 10 * MS, totals(i * 100, i * 100_000, i * 5 * MS), i == 0);
        }
        assert_eq!(decide(&mut log, 1500 * MS), 1);
        for i in 1..=99 {
            let (n, at) = (150 + 2 * i, 1500 + i * 10);
            log.note(at * MS, totals(n * 100, n * 100_000, n * 5 * MS), false);
        }
        assert_eq!(log.after(0)[0].after, None);
        assert_eq!(log.note(2500 * MS, totals(35_000, 35_000_000, 1_750 * MS), false), [1]);
        let found = log.after(0).remove(0);
        let before = Load { iops: 10_000.0, wait_ns: Nanos::new(1_000), cores: 0.5 };
        let after = Load { iops: 20_000.0, wait_ns: Nanos::new(1_000), cores: 1.0 };
        assert_eq!((found.before, found.after), (before, Some(after)));
        assert!(log.after(1).is_empty());
    }

    #[test]
    fn effect_of_a_policy_that_ended_is_not_measured() {
        let mut log = Log::default();
        log.note(0, totals(0, 0, 0), true);
        decide(&mut log, 0);
        log.note(2 * WINDOW, totals(5, 0, 0), true);
        let found = log.after(0).remove(0);
        assert_eq!((found.before, found.after), (Load::default(), None));
    }

    #[test]
    fn log_keeps_the_last_thousand() {
        let mut log = Log::default();
        log.note(0, totals(0, 0, 0), true);
        for _ in 0..2_500 {
            decide(&mut log, 0);
        }
        let numbers: Vec<u64> = log.after(0).iter().map(|decision| decision.number).collect();
        assert_eq!((numbers.len(), numbers[0], numbers[999]), (1_000, 1_501, 2_500));
        assert_eq!(log.after(2_499).len(), 1);
        assert_eq!((log.after(u64::MAX).len(), log.last()), (0, 2_500));
        assert_eq!(log.counts(), [(("gone", Outcome::Done), 2_500)].into());
        // Effects of those that are gone are nobody's.
        log.note(WINDOW, totals(1, 1, 1), false);
        assert!(log.after(0).iter().all(|decision| decision.after.is_some()));
    }
}
