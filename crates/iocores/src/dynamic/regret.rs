//! Whether what was done has helped.

use rtvirtio_units::{CpuId, Nanos};

use super::PERIOD;
use crate::utility::{Progress, Reference, Weights};
use crate::{QueueId, ThreadId};

/// Samples right after an action that show neither what was nor what comes.
const SETTLES: Nanos = PERIOD;

/// Samples that a verdict needs, before and after.
pub(super) const FEWEST: usize = 3;

/// Samples of the time after that a verdict is made of, if nothing asks for it sooner.
const ENOUGH: usize = 50;

/// After this nothing is asked any more: the load was never again what it was.
const FORGOTTEN: Nanos = Nanos::from_millis(3_000);

/// Back-off after the first regret, in control periods, and at most.
const BACK_OFF: (u64, u64) = (20, 100);

/// What a regret is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Add,
    Remove,
    Move,
    Cpus,
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
    pub(super) standing: usize,
    /// Whether the action was not just for what is busy.
    pub(super) urgent: bool,
}

impl Situation {
    /// Whether what held then is to be expected now: the same to within a quarter.
    pub(super) fn like(&self, then: &Self) -> bool {
        let near = |a: f64, b: f64| (a - b).abs() <= 0.25 * a.max(b);
        near(self.io, then.io)
            && near(self.loaded as f64, then.loaded as f64)
            && self.standing as f64 <= 1.25 * then.standing as f64
            && (then.urgent || !self.urgent)
    }
}

/// An action of which it is not known yet whether it helped.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) kind: Kind,
    pub(super) at: Nanos,
    pub(super) undo: Undo,
    pub(super) situation: Situation,
    before: Vec<Progress>,
    after: Vec<Progress>,
}

/// What came of it, with the figures.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) before: f64,
    pub(super) after: f64,
    pub(super) sigma: f64,
}

impl Trial {
    pub(super) fn new(
        kind: Kind,
        at: Nanos,
        undo: Undo,
        situation: Situation,
        before: Vec<Progress>,
    ) -> Self {
        Self { kind, at, undo, situation, before, after: Vec::new() }
    }

    /// A sample after it. Only those count in which there was about as much to do as before, so
    /// that the end of a load is not taken for the effect of an action.
    pub(super) fn sample(&mut self, now: Nanos, progress: Progress) {
        let settled = now.saturating_sub(self.at) > SETTLES;
        if settled && progress.busy >= 0.5 * Progress::mean(&self.before).busy {
            self.after.push(progress);
        }
    }

    /// Whether a verdict can be made, if it is asked for.
    pub(super) fn ready(&self) -> bool {
        self.before.len() >= FEWEST && self.after.len() >= 2 * FEWEST
    }

    /// Whether it is due.
    pub(super) fn due(&self) -> bool {
        self.ready() && self.after.len() >= ENOUGH
    }

    /// Whether there will never be one.
    pub(super) fn forgotten(&self, now: Nanos) -> bool {
        self.before.len() < FEWEST || now.saturating_sub(self.at) >= FORGOTTEN
    }

    /// Whether utility fell by more than 3 % and more than 2 sigma: the standard error of the mean
    /// of the samples before.
    pub(super) fn verdict(&self, weights: &Weights) -> Option<Verdict> {
        let reference = Reference::per_core(&Progress::mean(&self.before))?;
        let of = |progress: &Progress| weights.utility(progress, &reference);
        let (n, before) = (self.before.len() as f64, of(&Progress::mean(&self.before)));
        let after = of(&Progress::mean(&self.after));
        let squares: f64 = self.before.iter().map(|at| (of(at) - before).powi(2)).sum();
        let sigma = (squares / (n - 1.0).max(1.0) / n).sqrt();
        let fell = before - after;
        (fell > 0.03 * before.abs() && fell > 2.0 * sigma).then_some(Verdict {
            before,
            after,
            sigma,
        })
    }
}

/// Loads at which a kind of action was regretted. More than one: a load that flaps between two
/// would else wipe out what is known of either.
const REMEMBERED: usize = 4;

/// How long a kind of action is not tried again, after a regret, at that load.
#[derive(Debug, Default)]
pub(super) struct BackOff {
    regretted: Vec<Regretted>,
}

#[derive(Debug)]
struct Regretted {
    situation: Situation,
    periods: u64,
    until: Nanos,
}

impl BackOff {
    /// It was regretted; it was done in this situation. In periods: for how long not again.
    pub(super) fn regretted(&mut self, now: Nanos, situation: Situation) -> u64 {
        let (first, most) = BACK_OFF;
        let known = self.regretted.iter().position(|of| situation.like(&of.situation));
        let periods = match known {
            Some(at) => (2 * self.regretted.remove(at).periods).min(most),
            None => first,
        };
        let until = now.saturating_add(Nanos::new(PERIOD.get() * periods));
        self.regretted.push(Regretted { situation, periods, until });
        if self.regretted.len() > REMEMBERED {
            self.regretted.remove(0);
        }
        periods
    }

    /// It has helped, in this situation.
    pub(super) fn helped(&mut self, situation: &Situation) {
        self.regretted.retain(|of| !situation.like(&of.situation));
    }

    /// Whether it may be done in this situation.
    pub(super) fn allows(&self, now: Nanos, situation: &Situation) -> bool {
        !self.regretted.iter().any(|of| now < of.until && situation.like(&of.situation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: Progress = Progress { io: 1_000.0, busy: 1.0, ran: 0.0, waited: 0.0, cores: 1.0 };

    const LOAD: Situation = Situation { io: 1_000.0, loaded: 8, standing: 2, urgent: false };

    fn trial(after: Progress) -> Trial {
        let mut trial =
            Trial::new(Kind::Add, Nanos::ZERO, Undo::Remove(Vec::new()), LOAD, vec![BEFORE; 5]);
        for at in 0..100 {
            trial.sample(Nanos::from_millis(10 * at), after);
        }
        trial
    }

    #[test]
    fn core_that_brings_a_tenth_of_its_work_is_regretted() {
        let after = Progress { io: 1_100.0, busy: 1.1, cores: 2.0, ..BEFORE };
        let trial = trial(after);
        assert!(trial.due());
        let verdict = trial.verdict(&Weights::default()).unwrap();
        // 1.0 - 0.2, then 1.1 - 0.4.
        assert!((verdict.before - 0.8).abs() < 1e-9 && (verdict.after - 0.7).abs() < 1e-9);
    }

    #[test]
    fn core_that_brings_half_of_its_work_is_kept() {
        let after = Progress { io: 1_500.0, busy: 1.5, cores: 2.0, ..BEFORE };
        assert!(trial(after).verdict(&Weights::default()).is_none());
    }

    #[test]
    fn load_that_ends_is_no_verdict() {
        let after = Progress { io: 10.0, busy: 0.01, cores: 2.0, ..BEFORE };
        assert!(!trial(after).ready());
    }

    #[test]
    fn back_off_doubles_to_100_periods_and_does_not_hold_for_another_load() {
        let mut back_off = BackOff::default();
        let periods: Vec<_> = (0..4).map(|_| back_off.regretted(Nanos::ZERO, LOAD)).collect();
        assert_eq!(periods, [20, 40, 80, 100]);
        assert!(!back_off.allows(Nanos::from_millis(9_999), &LOAD));
        assert!(back_off.allows(Nanos::from_millis(10_000), &LOAD));
        for other in [
            Situation { io: 2_000.0, ..LOAD },
            Situation { loaded: 4, ..LOAD },
            Situation { standing: 3, ..LOAD },
            Situation { urgent: true, ..LOAD },
        ] {
            assert!(back_off.allows(Nanos::ZERO, &other), "{other:?}");
        }
        back_off.helped(&LOAD);
        assert_eq!(back_off.regretted(Nanos::ZERO, LOAD), 20);
    }
}
