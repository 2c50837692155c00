//! What a demo comes to.
//!
//! A scheme is *behind the hand setting* on a task that the hand setting meets and the scheme misses
//! beyond its interval: its tail's interval lies above the target and above the hand setting's, or
//! its rate's below what passes. Where the machine was as late as the miss is long, nothing can be said of
//! the task. Where that, or too few requests, leaves a scheme no task that the hand setting meets, it is not
//! compared at all, and there is no verdict unless another one is behind. A part of the demo that failed is an error,
//! whatever the others came to.
//!
//! Properties (tests of the same name): `scheme_that_misses_what_hand_meets_is_behind`,
//! `miss_within_the_interval_is_not_behind`, `without_a_target_that_hand_meets_nothing_is_judged`,
//! `scheme_without_a_cell_is_not_judged`, `scheme_of_which_nothing_is_known_meets_nothing`,
//! `part_that_failed_is_an_error_whatever_the_others_came_to`.

use std::time::Duration;

use anyhow::{Error, Result};
use rtvirtio_bench::campaign::DATA_PLANE;
use rtvirtio_bench::verdict::{Standing, standing};
use rtvirtio_cases::Scheme;
use rtvirtio_cli::progress::human;
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::run::{Cell, TaskResult};
use serde::Serialize;

use crate::Outcome;

/// What a demo comes to.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    /// Each scheme, in the order of the cells.
    schemes: Vec<SchemeVerdict>,
    /// Whether the plan promises all targets.
    promised: bool,
    /// Bounds of the plan that were held against a measured tail of the same percentile, and those of
    /// them that held.
    bounds: (usize, usize),
    /// Tasks of the plan with a bound, and all.
    bounded: (usize, usize),
    /// Length of the calibration, s.
    calibration_seconds: f64,
    /// Length of the whole demo, s.
    seconds: f64,
    /// Schemes whose cell was measured while the machine was late.
    late: Vec<String>,
}

/// How a scheme did.
#[derive(Debug, Serialize)]
pub(super) struct SchemeVerdict {
    scheme: String,
    tasks: usize,
    met: usize,
    within_interval: usize,
    machine_late: usize,
    not_judged: usize,
    missed: usize,
    /// Tasks that the hand setting meets.
    hand_meets: usize,
    /// Of them, those on which this scheme is behind it.
    behind_hand: usize,
    /// Of them, those of which nothing can be said.
    unknown: usize,
    /// What the background VM moved, MB/s.
    background_mb: f64,
    /// p99 of the canary, ms.
    canary_ms: f64,
    /// CPUs busy, of the machine.
    busy_cores: f64,
}

impl Verdict {
    pub(super) fn of(cells: &[Cell], plan: &Plan, calibration: Duration, whole: Duration) -> Self {
        let hand = find(cells, &Scheme::Hand.to_string());
        let ours = find(cells, &Scheme::Rtvirtio.to_string());
        let held = ours.iter().flat_map(|cell| &cell.tasks).filter_map(|task| {
            let same =
                |p: &&rtvirtio_spec::plan::TaskPromise| (&p.vm, &p.task) == (&task.vm, &task.task);
            let promise = plan.tasks.iter().find(same)?;
            let judged = task.judged.filter(|q| q.percentile == promise.percentile)?;
            Some(judged.value <= promise.bound?)
        });
        let held: Vec<bool> = held.collect();
        let bounded = plan.tasks.iter().filter(|p| p.bound.is_some()).count();
        let late = cells.iter().filter(|c| c.disturbed.is_some());
        Self {
            schemes: cells.iter().map(|cell| SchemeVerdict::of(cell, hand)).collect(),
            promised: plan.meets_all(),
            bounds: (held.len(), held.iter().filter(|held| **held).count()),
            bounded: (bounded, plan.tasks.len()),
            calibration_seconds: calibration.as_secs_f64(),
            seconds: whole.as_secs_f64(),
            late: late.map(|c| c.key.scheme.clone()).collect(),
        }
    }

    fn scheme(&self, name: &str) -> Option<&SchemeVerdict> {
        self.schemes.iter().find(|s| s.scheme == name)
    }

    /// rtvirtio's plan, and the data plane if it was measured.
    fn ours(&self) -> impl Iterator<Item = &SchemeVerdict> {
        [Scheme::Rtvirtio.to_string().as_str(), DATA_PLANE]
            .into_iter()
            .filter_map(|name| self.scheme(name))
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// What the schemes come to.
    pub(super) fn outcome(&self) -> Outcome {
        let hand_meets = self.scheme(&Scheme::Hand.to_string()).map_or(0, |hand| hand.met);
        if hand_meets == 0 || self.ours().next().is_none() {
            return Outcome::NotJudged;
        }
        if self.ours().any(|s| s.behind_hand > 0) {
            return Outcome::Unmet;
        }
        if self.ours().all(SchemeVerdict::is_known) { Outcome::Done } else { Outcome::NotJudged }
    }

    /// How the demo ends; `failure` is why the data plane was not measured in the guests. Nobody who looks at the exit code
    /// alone is to believe that all of it was tried.
    pub(super) fn end(&self, failure: Option<Error>) -> Result<Outcome> {
        match failure {
            None => Ok(self.outcome()),
            Some(error) => Err(error.context("the data plane failed in the guests")),
        }
    }

    /// For people: a line for each scheme that matters, what the machine did, and what to do.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let hand = self.scheme(&Scheme::Hand.to_string());
        let hand_mb = hand.map_or(0.0, |hand| hand.background_mb);
        if let Some(hand) = hand {
            lines.push(format!(
                "hand: meets {} of {} targets; the background VM gets {:.1} MB/s",
                hand.met, hand.tasks, hand.background_mb
            ));
        }
        for s in self.ours() {
            let mut line = format!("{}: meets {} of {} targets", s.scheme, s.met, s.tasks);
            if s.within_interval > 0 {
                line += &format!(", misses {} within the interval", s.within_interval);
            }
            if s.machine_late > 0 {
                line += &format!(
                    ", misses {} by no more than the machine itself was late (canary p99 {:.1} ms)",
                    s.machine_late, s.canary_ms
                );
            }
            if s.not_judged > 0 {
                line += &format!(", {} have too few requests to judge", s.not_judged);
            }
            line += &match (s.hand_meets, s.behind_hand) {
                (0, _) => "; the hand setting meets none".to_owned(),
                (_, 0) => "; not behind the hand setting on any".to_owned(),
                (_, n) => format!("; BEHIND the hand setting on {n}"),
            };
            line += &format!(
                "; the background VM gets {:.1} MB/s, {:.1} × the hand setting's; {:.1} CPUs busy",
                s.background_mb,
                s.background_mb / hand_mb.max(1e-3),
                s.busy_cores
            );
            lines.push(line);
        }
        let (bounded, tasks) = self.bounded;
        let (compared, held) = self.bounds;
        let promise =
            if self.promised { "promises all targets" } else { "does not promise all targets" };
        lines.push(format!(
            "The plan {promise}; {bounded} of {tasks} tasks have a bound, {held} of {compared} bounds held. \
             Calibration took {}.",
            human(Duration::from_secs_f64(self.calibration_seconds))
        ));
        if !self.late.is_empty() {
            lines.push(format!(
                "The machine was late by itself under: {}. Tails there are longer than the disk makes them.",
                self.late.join(", ")
            ));
        }
        let whole = human(Duration::from_secs_f64(self.seconds));
        lines.push(match self.outcome() {
            Outcome::Done => {
                // In guests it may have failed.
                let ours = match self.scheme(DATA_PLANE) {
                    Some(_) => "rtvirtio and the data plane meet",
                    None => "the data plane was not measured, and rtvirtio meets",
                };
                format!("Verdict after {whole}: {ours} what the hand setting meets.")
            }
            Outcome::Unmet => format!(
                "Verdict after {whole}: a target that the hand setting meets is missed, as said above."
            ),
            _ => {
                let unknown = self.ours().filter(|s| !s.is_known()).map(|s| s.scheme.as_str());
                let unknown: Vec<&str> = unknown.collect();
                let of = match unknown.is_empty() {
                    true => String::new(),
                    false => format!(" of {}", unknown.join(" and ")),
                };
                format!(
                    "No verdict after {whole}: there was nothing to compare{of}. Run it again with less \
                     else on this machine (what: top), or longer: --full."
                )
            }
        });
        lines
    }
}

impl SchemeVerdict {
    /// Whether something can be said of a task that the hand setting meets.
    const fn is_known(&self) -> bool {
        self.unknown < self.hand_meets
    }

    fn of(cell: &Cell, hand: Option<&Cell>) -> Self {
        let count = |of: Standing| cell.tasks.iter().filter(|t| standing(cell, t) == of).count();
        let met_by_hand = |task: &&TaskResult| {
            hand.and_then(|hand| same_task(hand, task)).is_some_and(|t| t.passed)
        };
        let compared: Vec<&TaskResult> = cell.tasks.iter().filter(met_by_hand).collect();
        let is_unknown = |task: &&&TaskResult| {
            matches!(standing(cell, task), Standing::MachineLate | Standing::NotJudged)
        };
        let is_behind = |task: &&&TaskResult| {
            let hand = hand.and_then(|hand| same_task(hand, task));
            let overlaps = task.judged.zip(hand.and_then(|t| t.judged));
            let overlaps = overlaps.is_some_and(|(ours, hand)| ours.low <= hand.high);
            let rate_holds = rtvirtio_bench::verdict::rate_may_hold(task);
            standing(cell, task) == Standing::Missed && !(overlaps && rate_holds)
        };
        Self {
            scheme: cell.key.scheme.clone(),
            tasks: cell.tasks.len(),
            met: count(Standing::Met),
            within_interval: count(Standing::WithinInterval),
            machine_late: count(Standing::MachineLate),
            not_judged: count(Standing::NotJudged),
            missed: count(Standing::Missed),
            hand_meets: compared.len(),
            behind_hand: compared.iter().filter(is_behind).count(),
            unknown: compared.iter().filter(is_unknown).count(),
            background_mb: cell.background.values().map(|b| b.as_megabytes_f64()).sum(),
            canary_ms: cell.canary.p99.as_millis_f64(),
            busy_cores: cell.machine.busy_cores,
        }
    }
}

fn find<'a>(cells: &'a [Cell], scheme: &str) -> Option<&'a Cell> {
    cells.iter().find(|cell| cell.key.scheme == scheme)
}

fn same_task<'a>(cell: &'a Cell, task: &TaskResult) -> Option<&'a TaskResult> {
    cell.tasks.iter().find(|t| (&t.vm, &t.task) == (&task.vm, &task.task))
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::latency::{Histogram, Quantile};
    use rtvirtio_spec::run::{Canary, CellKey, Machine, MeasuredAt};
    use rtvirtio_units::{BytesPerSecond, Nanos, Percentile, TaskName, VmName};

    use super::*;

    /// A cell with one task of 100 requests a second, whose p99 is `ms` ± `half` against 10 ms.
    fn cell(scheme: &str, ms: u64, half: u64) -> Cell {
        let (value, p99) = (Nanos::from_millis(ms), Percentile::new(99.0).unwrap());
        let judged = Quantile {
            percentile: p99,
            value,
            low: Nanos::from_millis(ms - half),
            high: Nanos::from_millis(ms + half),
            n: 1_100,
            beyond: 11,
        };
        let mut histogram = Histogram::new();
        histogram.record(value, 1_100);
        let task = TaskResult {
            vm: VmName::new("vm0").unwrap(),
            task: TaskName::new("light").unwrap(),
            measured_at: MeasuredAt::Host,
            requested_iops: 100.0,
            delivered_iops: 100.0,
            judged: Some(judged),
            target: Some(Nanos::from_millis(10)),
            prediction: None,
            passed: ms <= 10,
            histogram,
            timeline: Vec::new(),
        };
        let late = Nanos::from_micros(100);
        Cell {
            version: 1,
            key: CellKey {
                case: "1xL".to_owned(),
                tier: "strict".to_owned(),
                neighbour: "writer".to_owned(),
                scheme: scheme.to_owned(),
                repetition: 0,
            },
            started: String::new(),
            device: "ref-4x250".to_owned(),
            window_s: 11.0,
            settings: Default::default(),
            ioprio: Default::default(),
            tasks: vec![task],
            background: [(VmName::new("background").unwrap(), BytesPerSecond::from_megabytes(10))]
                .into(),
            canary: Canary { n: 1, p50: late, p99: late, p999: late, max: late },
            machine: Machine { load1: 0.0, busy_cores: 0.5, steal_cores: 0.0 },
            passed: ms <= 10,
            noise_floor: None,
            attempts: 1,
            rounds: 3,
            disturbed: None,
        }
    }

    fn verdict(cells: &[Cell]) -> Verdict {
        let plan = Plan {
            version: rtvirtio_spec::plan::PLAN_VERSION,
            devices: Vec::new(),
            vms: Vec::new(),
            settings: Default::default(),
            guests: Default::default(),
            data_plane: None,
            observed: Default::default(),
            changes: Vec::new(),
            tasks: Vec::new(),
            background: Vec::new(),
            cost: Vec::new(),
            iothreads: Default::default(),
            reasons: Vec::new(),
        };
        Verdict::of(cells, &plan, Duration::from_secs(50), Duration::from_secs(150))
    }

    #[test]
    fn scheme_that_misses_what_hand_meets_is_behind() {
        let of = |ours, plane| {
            let cells = [cell("hand", 3, 1), cell("rtvirtio", ours, 1), cell(DATA_PLANE, plane, 1)];
            verdict(&cells).outcome()
        };
        assert_eq!(of(5, 2), Outcome::Done);
        assert_eq!(of(12, 2), Outcome::Unmet);
        assert_eq!(of(5, 12), Outcome::Unmet);
        let lines = verdict(&[cell("hand", 3, 1), cell("rtvirtio", 12, 1)]).lines().join("\n");
        assert!(lines.contains("BEHIND the hand setting on 1"), "{lines}");
    }

    #[test]
    fn miss_within_the_interval_is_not_behind() {
        let of = |hand, ours| verdict(&[cell("hand", hand, 1), ours]).outcome();
        assert_eq!(of(3, cell("rtvirtio", 12, 2)), Outcome::Done);
        assert_eq!(of(3, cell("rtvirtio", 12, 1)), Outcome::Unmet);
        // hand's interval reaches 11 ms, and so does ours.
        assert_eq!(of(10, cell("rtvirtio", 12, 1)), Outcome::Done);
    }

    #[test]
    fn without_a_target_that_hand_meets_nothing_is_judged() {
        let cells = [cell("hand", 20, 1), cell("rtvirtio", 3, 1)];
        assert_eq!(verdict(&cells).outcome(), Outcome::NotJudged);
        assert!(verdict(&cells).lines().join("\n").contains("No verdict"));
        // Where the machine was late by as much as the miss is long, nothing is known of the task.
        let mut late = cell("rtvirtio", 14, 1);
        late.disturbed = Some("canary".to_owned());
        late.canary.p99 = Nanos::from_millis(5);
        assert_eq!(verdict(&[cell("hand", 3, 1), late]).outcome(), Outcome::NotJudged);
    }

    #[test]
    fn scheme_of_which_nothing_is_known_meets_nothing() {
        let late = |scheme| {
            let mut late = cell(scheme, 14, 1);
            late.disturbed = Some("canary".to_owned());
            late.canary.p99 = Nanos::from_millis(5);
            late
        };
        let with = |ours, plane| verdict(&[cell("hand", 3, 1), ours, plane]);
        let found = with(cell("rtvirtio", 3, 1), late(DATA_PLANE));
        assert_eq!(found.outcome(), Outcome::NotJudged);
        let last = found.lines().pop().unwrap();
        assert!(last.contains(&format!("nothing to compare of {DATA_PLANE}. ")), "{last}");
        // A miss is one, whatever is not known of the other.
        let found = with(cell("rtvirtio", 12, 1), late(DATA_PLANE));
        assert_eq!(found.outcome(), Outcome::Unmet);
    }

    #[test]
    fn part_that_failed_is_an_error_whatever_the_others_came_to() {
        for ours in [3, 12] {
            let found = verdict(&[cell("hand", 3, 1), cell("rtvirtio", ours, 1)]);
            let failure = anyhow::anyhow!("vm0 does not answer");
            let error = format!("{:#}", found.end(Some(failure)).unwrap_err());
            assert_eq!(error, "the data plane failed in the guests: vm0 does not answer");
        }
        let whole = [cell("hand", 3, 1), cell("rtvirtio", 3, 1), cell(DATA_PLANE, 3, 1)];
        assert_eq!(verdict(&whole).end(None).unwrap(), Outcome::Done);
    }

    #[test]
    fn data_plane_without_a_cell_is_not_said_to_meet_anything() {
        let cells = [cell("hand", 3, 1), cell("rtvirtio", 3, 1), cell(DATA_PLANE, 3, 1)];
        let last = |cells: &[Cell]| verdict(cells).lines().pop().unwrap();
        assert!(
            last(&cells).ends_with("rtvirtio and the data plane meet what the hand setting meets.")
        );
        assert!(last(&cells[..2]).contains("the data plane was not measured"));
    }

    #[test]
    fn scheme_without_a_cell_is_not_judged() {
        assert_eq!(verdict(&[]).outcome(), Outcome::NotJudged);
        assert_eq!(verdict(&[cell("hand", 3, 1)]).outcome(), Outcome::NotJudged);
    }
}
