//! Whether what was done has helped.

use rtvirtio_units::{CpuId, Nanos};

use super::PERIOD;
use crate::sample::Sample;
use crate::utility::{Progress, Reference, Weights};
use crate::{QueueId, ThreadId};

/// Periods right after an action that show neither what was nor what comes.
const SETTLES: u32 = 1;

/// Periods that a verdict is made of, before and after, if nothing asks for it sooner.
pub(super) const ENOUGH: usize = 5;

/// Part of what was asked for before that must still be, for a period to count.
const STILL: f64 = 0.9;

/// What was asked for at the end of a period, of what was on average, or the other way round, if the load was there in
/// all of it.
const WHOLE: f64 = 0.75;

/// After this nothing is asked any more: the load was never again what it was.
const FORGOTTEN: Nanos = Nanos::from_millis(3_000);

/// Back-off after the first regret, in control periods, and at most.
const BACK_OFF: (u64, u64) = (20, 600);

/// What a regret is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Add,
    Remove,
    Move,
    Cpus,
    /// vCPUs went to the CPUs of their queues' IOThreads. Nothing is undone, but it is not done again soon.
    Gather,
    /// vCPUs were spread, which is not on trial: it is not done again soon whatever comes of it.
    Spread,
}

/// How it is undone.
#[derive(Debug, Clone)]
pub(super) enum Undo {
    /// The IOThreads on these CPUs go.
    Remove(Vec<CpuId>),
    /// So many IOThreads come back.
    Add(usize),
    /// Queues go back where they were.
    Move(Vec<(QueueId, ThreadId)>),
    /// vCPUs get these CPUs back.
    Cpus(Vec<CpuId>),
}

/// A load, as far as what holds for it is said to hold for another one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Situation {
    /// I/O progress.
    pub(super) io: f64,
    /// Queues with a load.
    pub(super) loaded: usize,
    /// Queues that stood: these ask for more than is done.
    pub(super) backlogged: usize,
    /// Whether the action was not just for what is busy.
    pub(super) urgent: bool,
}

impl Situation {
    /// Whether what held then is to be expected now: the same to within a quarter.
    pub(super) fn like(&self, then: &Self) -> bool {
        let near = |a: f64, b: f64| (a - b).abs() <= 0.25 * a.max(b);
        near(self.io, then.io)
            && near(self.loaded as f64, then.loaded as f64)
            && self.backlogged as f64 <= 1.25 * then.backlogged as f64
            && (then.urgent || !self.urgent)
    }
}

/// What was done in a control period.
#[derive(Debug, Clone, Copy)]
pub(super) struct Period {
    pub(super) progress: Progress,
    /// IOThreads in turns with work, in CPUs; also while these waited for their CPU.
    pub(super) demand: f64,
    /// IOThreads on a CPU, in CPUs; by another clock, which may be a period late.
    pub(super) ran: f64,
}

impl Period {
    pub(super) fn of(sample: &Sample) -> Self {
        let demand = sample.threads.iter().map(|thread| thread.busy).sum();
        let ran = sample.threads.iter().map(|thread| thread.ran).sum();
        Self { progress: Progress::of(sample), demand, ran }
    }

    /// What of the time with work IOThreads were on a CPU; where nobody says when they are, all.
    pub(super) fn on_cpu<'a>(of: impl Iterator<Item = &'a Self>) -> f64 {
        let (ran, demand) =
            of.fold((0.0, 0.0), |(ran, demand), of| (ran + of.ran, demand + of.demand));
        if ran > 0.0 && ran < demand { ran / demand } else { 1.0 }
    }

    pub(super) fn mean(of: &[Self]) -> Progress {
        Progress::mean(&of.iter().map(|of| of.progress).collect::<Vec<_>>())
    }
}

/// An action of which it is not known yet whether it helped.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) kind: Kind,
    pub(super) at: Nanos,
    pub(super) undo: Undo,
    pub(super) situation: Situation,
    before: Vec<Period>,
    /// What was asked for before.
    demand: f64,
    after: Vec<Period>,
    periods: u32,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) before: f64,
    pub(super) after: f64,
    /// Standard error of the difference.
    pub(super) sigma: f64,
}

impl Verdict {
    /// Whether utility rose (1) or fell (-1) by more than 3 % and more than 2 sigma.
    fn goes(&self, way: f64) -> bool {
        let by = way * (self.after - self.before);
        by > 0.03 * self.before.abs() && by > 2.0 * self.sigma
    }

    pub(super) fn harmed(&self) -> bool {
        self.goes(-1.0)
    }

    pub(super) fn helped(&self) -> bool {
        self.goes(1.0)
    }
}

impl Trial {
    pub(super) fn new(
        kind: Kind,
        at: Nanos,
        undo: Undo,
        situation: Situation,
        before: Vec<Period>,
    ) -> Self {
        let demand = before.iter().map(|of| of.demand).sum::<f64>() / before.len().max(1) as f64;
        Self { kind, at, undo, situation, before, demand, after: Vec::new(), periods: 0 }
    }

    /// A period after it, and the last samples of it. Only those count in which as much was asked for as before, or as
    /// much as the IOThreads that there are can show, so that the end of a load is not taken for the effect of an action;
    /// and which a load did not come or go in, for two IOThreads are as busy in half of a period as one is in all of it.
    pub(super) fn sample(&mut self, period: Period, end: Period) {
        self.periods += 1;
        let asked = self.demand.min(period.progress.cores);
        let is_whole = end.demand.min(period.demand) >= WHOLE * end.demand.max(period.demand);
        if self.periods > SETTLES && period.demand >= STILL * asked && is_whole && !self.due() {
            self.after.push(period);
        }
    }

    /// Whether a verdict can be made, if it is asked for.
    pub(super) fn ready(&self) -> bool {
        !self.before.is_empty() && !self.after.is_empty()
    }

    /// Whether it is due.
    pub(super) fn due(&self) -> bool {
        self.after.len() >= ENOUGH
    }

    /// Whether there will never be one.
    pub(super) fn forgotten(&self, now: Nanos) -> bool {
        now.saturating_sub(self.at) >= FORGOTTEN
    }

    /// What came of it.
    pub(super) fn verdict(&self, weights: &Weights) -> Verdict {
        let (mut before, mut after) = (Period::mean(&self.before), Period::mean(&self.after));
        let reference = Reference::of(&[before, after]);
        let of = |progress: &Progress| weights.utility(progress, &reference);
        let squares = |periods: &[Period], mean: &Progress| {
            periods.iter().map(|at| (of(&at.progress) - of(mean)).powi(2)).sum::<f64>()
        };
        let (n, m) = (self.before.len() as f64, self.after.len() as f64);
        let squares = squares(&self.before, &before) + squares(&self.after, &after);
        // vCPUs that ran as much have lost nothing, though they waited more: more I/O wakes them
        // more often.
        let (more, less) =
            if after.ran > before.ran { (&mut after, before) } else { (&mut before, after) };
        if less.ran > 0.0 {
            more.waited = more.waited.min(more.ran * less.waited / less.ran);
        }
        let (before, after) = (of(&before), of(&after));
        let sigma = (squares / (n + m - 2.0).max(1.0) * (1.0 / n + 1.0 / m)).sqrt();
        Verdict { before, after, sigma }
    }
}

/// Loads of which something is known. More than one: a load that flaps between two would else wipe
/// out what is known of either.
const REMEMBERED: usize = 4;

/// How long it is held for known at a load that an action was wrong there, or right: the longer the
/// more often it was seen in a row.
#[derive(Debug, Default)]
pub(super) struct BackOff {
    known: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    situation: Situation,
    periods: u64,
    until: Nanos,
}

impl BackOff {
    /// It was seen in this situation. For how many periods it holds.
    pub(super) fn seen(&mut self, now: Nanos, situation: Situation) -> u64 {
        let (first, most) = BACK_OFF;
        let known = self.known.iter().position(|of| situation.like(&of.situation));
        let periods = match known {
            Some(at) => (2 * self.known.remove(at).periods).min(most),
            None => first,
        };
        let until = now.saturating_add(Nanos::new(PERIOD.get() * periods));
        self.known.push(Known { situation, periods, until });
        if self.known.len() > REMEMBERED {
            self.known.remove(0);
        }
        periods
    }

    /// It was not so, in this situation.
    pub(super) fn not_seen(&mut self, situation: &Situation) {
        self.known.retain(|of| !situation.like(&of.situation));
    }

    /// Whether it holds in this situation.
    pub(super) fn holds(&self, now: Nanos, situation: &Situation) -> bool {
        self.known.iter().any(|of| now < of.until && situation.like(&of.situation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: Progress = Progress { io: 1_000.0, busy: 1.0, ran: 0.0, waited: 0.0, cores: 1.0 };

    const LOAD: Situation = Situation { io: 1_000.0, loaded: 8, backlogged: 2, urgent: false };

    fn period(progress: Progress) -> Period {
        Period { progress, demand: progress.busy, ran: progress.busy }
    }

    fn trial(before: &[Progress], after: &[Progress]) -> Trial {
        let before = before.iter().copied().map(period).collect();
        let mut trial = Trial::new(Kind::Add, Nanos::ZERO, Undo::Remove(Vec::new()), LOAD, before);
        // The first shows nothing.
        let nothing = period(Progress { io: 0.0, ..BEFORE });
        trial.sample(nothing, nothing);
        after.iter().for_each(|&after| trial.sample(period(after), period(after)));
        trial
    }

    #[test]
    fn core_that_brings_a_tenth_of_its_work_is_regretted() {
        let after = Progress { io: 1_100.0, busy: 1.1, cores: 2.0, ..BEFORE };
        let trial = trial(&[BEFORE; 5], &[after; 5]);
        assert!(trial.due());
        let verdict = trial.verdict(&Weights::default());
        // 1.0 - 0.2, then 1.1 - 0.4.
        assert!((verdict.before - 0.8).abs() < 1e-9 && (verdict.after - 0.7).abs() < 1e-9);
        assert!(verdict.harmed() && !verdict.helped());
    }

    #[test]
    fn core_that_brings_half_of_its_work_has_helped() {
        let after = Progress { io: 1_500.0, busy: 1.5, cores: 2.0, ..BEFORE };
        let verdict = trial(&[BEFORE; 5], &[after; 2]).verdict(&Weights::default());
        assert!(verdict.helped() && !verdict.harmed());
    }

    #[test]
    fn difference_within_the_noise_is_neither_harm_nor_help() {
        let io = |io: f64| Progress { io, ..BEFORE };
        let before = [900.0, 1_100.0, 950.0, 1_050.0, 1_000.0].map(io);
        let after = [850.0, 1_050.0, 900.0, 1_000.0, 950.0].map(io);
        let verdict = trial(&before, &after).verdict(&Weights::default());
        // Squares of 25,000 on either side: a variance of 6,250, and that × 2/5 of the difference.
        assert!((verdict.sigma - 0.05).abs() < 1e-9, "{verdict:?}");
        assert!(!verdict.harmed() && !verdict.helped());
    }

    #[test]
    fn vcpus_that_wait_more_have_lost_only_if_they_ran_less() {
        let before = Progress { ran: 0.5, waited: 0.1, ..BEFORE };
        let after = Progress { io: 1_600.0, busy: 1.6, cores: 2.0, ran: 0.6, waited: 0.6 };
        let of = |after| trial(&[before; 5], &[after; 5]).verdict(&Weights::default());
        // 1 + 1 - 0.2, and 1.6 + 1 - 0.4: 5/6 of the 1.2 CPUs that are wanted, both times.
        let same = of(after);
        assert!((same.before - 1.8).abs() < 1e-9 && (same.after - 2.2).abs() < 1e-9, "{same:?}");
        // A third of what they want, where they had 5/6 of it.
        let less = of(Progress { ran: 0.2, waited: 0.4, ..after });
        assert!(
            (less.before - 1.633).abs() < 1e-3 && (less.after - 1.533).abs() < 1e-3,
            "{less:?}"
        );
    }

    #[test]
    fn load_that_ends_is_no_verdict() {
        let after = Progress { io: 850.0, busy: 0.85, cores: 2.0, ..BEFORE };
        let trial = trial(&[BEFORE; 5], &[after; 100]);
        assert!(!trial.ready() && trial.forgotten(FORGOTTEN));
    }

    #[test]
    fn back_off_doubles_to_a_minute_and_does_not_hold_for_another_load() {
        let mut back_off = BackOff::default();
        let periods: Vec<_> = (0..6).map(|_| back_off.seen(Nanos::ZERO, LOAD)).collect();
        assert_eq!(periods, [20, 40, 80, 160, 320, 600]);
        assert!(back_off.holds(Nanos::from_millis(59_999), &LOAD));
        assert!(!back_off.holds(Nanos::from_millis(60_000), &LOAD));
        for other in [
            Situation { io: 2_000.0, ..LOAD },
            Situation { loaded: 4, ..LOAD },
            Situation { backlogged: 3, ..LOAD },
            Situation { urgent: true, ..LOAD },
        ] {
            assert!(!back_off.holds(Nanos::ZERO, &other), "{other:?}");
        }
        back_off.not_seen(&LOAD);
        assert_eq!(back_off.seen(Nanos::ZERO, LOAD), 20);
    }
}
