//! What came of what was asked: of a benchmark's marks, and of a task under a scheme.
//!
//! A [`Verdict`] is what came of a mark, a figure that was wanted before it was measured. A [`Standing`] is
//! how a task does under a scheme, with the noise of the machine allowed for.
//!
//! A miss is only as sure as its figures. A tail whose interval reaches down to the target, or a rate
//! whose interval reaches up to the least that passes, is a miss *within the interval*. A miss that is
//! no longer than the lateness of a thread that only sleeps (the canary, in the same window) is the
//! machine's: *the machine was late*. Neither counts as met.
//!
//! Properties (tests of the same name): `interval_that_reaches_the_target_makes_a_miss_unsure`,
//! `miss_within_the_canarys_lateness_is_the_machines`, `task_without_a_judged_tail_is_not_judged`,
//! `rate_that_the_disk_keeps_down_is_a_miss_whatever_the_machine_does`,
//! `worst_of_several_runs_counts`.

use std::fmt;

use rtvirtio_cases::judge::MIN_DELIVERED;
use rtvirtio_spec::run::{Cell, TaskResult};
use serde::Serialize;

/// What came of a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Reached.
    Passed,
    /// Missed.
    Lost,
    /// The cells cannot tell.
    NotJudged,
    /// Nothing was asked.
    Beside,
}

impl Outcome {
    /// Of what holds or does not.
    #[must_use]
    pub const fn of(passed: bool) -> Self {
        if passed { Self::Passed } else { Self::Lost }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Passed => "pass",
            Self::Lost => "LOST",
            Self::NotJudged => "not judged",
            Self::Beside => "",
        })
    }
}

/// A mark, what came of it, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The mark.
    pub mark: String,
    /// What came of it.
    pub outcome: Outcome,
    /// Measured and wanted.
    pub why: String,
}

impl Verdict {
    /// Of a mark.
    #[must_use]
    pub fn new(mark: impl Into<String>, outcome: Outcome, why: impl Into<String>) -> Self {
        Self { mark: mark.into(), outcome, why: why.into() }
    }

    /// Of a mark that holds or does not; `None`: the cells cannot tell.
    #[must_use]
    pub fn of(mark: impl Into<String>, holds: Option<bool>, why: impl Into<String>) -> Self {
        Self::new(mark, holds.map_or(Outcome::NotJudged, Outcome::of), why)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<10} {:<24} {}", self.outcome, self.mark, self.why)
    }
}

/// A line for each.
#[must_use]
pub fn lines(verdicts: &[Verdict]) -> String {
    verdicts.iter().map(|verdict| format!("{verdict}\n")).collect()
}

/// How a task stands; the worst of several runs is the largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Tail and rate hold.
    Met,
    /// It missed, and its interval reaches what would have held.
    WithinInterval,
    /// It missed, by no more than the machine itself was late.
    MachineLate,
    /// It had too few requests for a percentile to be judged.
    NotJudged,
    /// It missed.
    Missed,
}

impl Standing {
    /// Of what is met or missed for sure.
    #[must_use]
    pub const fn of(met: bool) -> Self {
        if met { Self::Met } else { Self::Missed }
    }

    /// One character for tables.
    #[must_use]
    pub const fn mark(self) -> char {
        match self {
            Self::Met => '✓',
            Self::WithinInterval => '~',
            Self::MachineLate => 'm',
            Self::NotJudged => '?',
            Self::Missed => '✗',
        }
    }
}

/// How a task of `cell` stands.
#[must_use]
pub fn standing(cell: &Cell, task: &TaskResult) -> Standing {
    if task.passed {
        return Standing::Met;
    }
    let rate_holds = rate_may_hold(task);
    // A task whose requests end soon enough for its rate waited for a CPU, not for the disk.
    let (mean, every) = (task.histogram.mean().as_secs_f64(), 1.0 / task.requested_iops);
    let is_late = cell.disturbed.is_some();
    let rate_is_the_machines = rate_holds || (is_late && mean < every);
    let Some((judged, target)) = task.judged.zip(task.target) else {
        return if rate_is_the_machines { Standing::NotJudged } else { Standing::Missed };
    };
    if judged.low <= target && rate_holds {
        return Standing::WithinInterval;
    }
    let lateness = match judged.percentile.get() {
        p if p > 99.0 => cell.canary.p999.max(cell.canary.p99),
        _ => cell.canary.p99,
    };
    if is_late && rate_is_the_machines && judged.low.saturating_sub(lateness) <= target {
        return Standing::MachineLate;
    }
    Standing::Missed
}

/// Whether the interval of a task's rate (Poisson's, of a count) reaches what passes.
#[must_use]
pub fn rate_may_hold(task: &TaskResult) -> bool {
    let n = task.histogram.count().max(1) as f64;
    let delivered = task.delivered_iops / task.requested_iops;
    delivered * (1.0 + 1.96 / n.sqrt()) >= MIN_DELIVERED
}

/// How a task stands over several runs; `None` without one.
pub(crate) fn over_runs<'a>(
    runs: impl Iterator<Item = (&'a Cell, &'a TaskResult)>,
) -> Option<Standing> {
    runs.map(|(cell, task)| standing(cell, task)).max()
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::latency::Histogram;
    use rtvirtio_units::Nanos;

    use super::*;
    use crate::report::tests::cell;

    /// A cell with one task whose p99 is `tail_ms` with an interval of ± `half_ms`, against 20 ms.
    fn with(tail_ms: u64, half_ms: u64, delivered: f64, canary_ms: u64) -> Cell {
        let mut cell = cell("2xM", "hand", 0, 10);
        let task = &mut cell.tasks[1];
        let judged = task.judged.as_mut().unwrap();
        judged.value = Nanos::from_millis(tail_ms);
        judged.low = Nanos::from_millis(tail_ms - half_ms);
        judged.high = Nanos::from_millis(tail_ms + half_ms);
        task.delivered_iops = delivered * task.requested_iops;
        task.passed = tail_ms <= 20 && delivered >= MIN_DELIVERED;
        cell.canary.p99 = Nanos::from_millis(canary_ms);
        cell.canary.p999 = Nanos::from_millis(canary_ms);
        cell.disturbed = (canary_ms > 1).then(|| "late".to_owned());
        cell
    }

    fn of(cell: &Cell) -> Standing {
        standing(cell, &cell.tasks[1])
    }

    #[test]
    fn interval_that_reaches_the_target_makes_a_miss_unsure() {
        assert_eq!(of(&with(20, 0, 1.0, 0)), Standing::Met);
        assert_eq!(of(&with(22, 2, 1.0, 0)), Standing::WithinInterval);
        assert_eq!(of(&with(23, 2, 1.0, 0)), Standing::Missed);
        // 2,000 requests: 1.96 / √2,000 = 4.4 %. 0.92 × 1.044 = 0.960, 0.90 × 1.044 = 0.939.
        assert_eq!(of(&with(10, 0, 0.92, 0)), Standing::WithinInterval);
        assert_eq!(of(&with(10, 0, 0.90, 0)), Standing::Missed);
    }

    #[test]
    fn miss_within_the_canarys_lateness_is_the_machines() {
        assert_eq!(of(&with(30, 0, 1.0, 10)), Standing::MachineLate);
        assert_eq!(of(&with(31, 0, 1.0, 10)), Standing::Missed);
        assert_eq!(of(&with(10, 0, 0.5, 10)), Standing::MachineLate);
        // A canary within its limit explains nothing.
        assert_eq!(of(&with(21, 0, 1.0, 1)), Standing::Missed);
    }

    #[test]
    fn task_without_a_judged_tail_is_not_judged() {
        let mut cell = with(30, 0, 1.0, 0);
        cell.tasks[1].judged = None;
        assert_eq!(of(&cell), Standing::NotJudged);
    }

    #[test]
    fn rate_that_the_disk_keeps_down_is_a_miss_whatever_the_machine_does() {
        // 100 requests a second that take 40 ms each.
        let mut cell = with(10, 0, 0.25, 10);
        cell.tasks[1].histogram = Histogram::new();
        cell.tasks[1].histogram.record(Nanos::from_millis(40), 25);
        assert_eq!(of(&cell), Standing::Missed);
        cell.tasks[1].judged = None;
        assert_eq!(of(&cell), Standing::Missed);
        // The same rate by requests that take 1 ms: the task itself came late.
        cell.tasks[1].histogram = Histogram::new();
        cell.tasks[1].histogram.record(Nanos::from_millis(1), 25);
        assert_eq!(of(&cell), Standing::NotJudged);
    }

    #[test]
    fn worst_of_several_runs_counts() {
        let cells = [with(10, 0, 1.0, 0), with(30, 0, 1.0, 0), with(30, 0, 1.0, 10)];
        let runs = |n: usize| over_runs(cells[..n].iter().map(|c| (c, &c.tasks[1])));
        assert_eq!(runs(0), None);
        assert_eq!(runs(1), Some(Standing::Met));
        assert_eq!(runs(3), Some(Standing::Missed));
    }
}
