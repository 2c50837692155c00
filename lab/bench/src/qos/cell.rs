//! Cells: what was measured, a line of JSON each.

use anyhow::Result;
use rtvirtio_calibrate::load::canary_summary;
use rtvirtio_cases::judge::MIN_DELIVERED;
use rtvirtio_cases::{Tier, judge};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::Canary;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::named;
use rtvirtio_testbed::neighbour::Neighbour;
use rtvirtio_testbed::tasks::{Between, Plan};
use rtvirtio_testbed::trial::Trial;
use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

named! {
    /// How the device is shared.
    pub enum Scheme {
        /// The background VM alone.
        Alone = "alone",
        /// The data plane without a schedule: requests start as they come.
        None = "none",
        /// The data plane with one.
        Qos = "qos",
        /// qemu-storage-daemon whose throttle filter gives the background VM 10 MB/s.
        Throttle = "throttle",
    }
}

/// Names a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellKey {
    /// The case, such as `4xL+M+H`; the background VM's own has the first one's.
    pub case: String,
    /// The targets, `strict` or `paper`; the background VM's own has the first.
    #[serde(default = "strict")]
    pub tier: String,
    /// The background VM.
    #[serde(default)]
    pub neighbour: Neighbour,
    /// The guests' own time between two requests.
    #[serde(default)]
    pub between: Between,
    /// The scheme.
    pub scheme: Scheme,
    /// From 0.
    pub repetition: u32,
}

fn strict() -> String {
    Tier::Strict.to_string()
}

impl CellKey {
    /// For people.
    #[must_use]
    pub fn label(&self) -> String {
        let Self { case, tier, neighbour, between, scheme, .. } = self;
        let between = match between {
            Between::Nothing => String::new(),
            between => format!(", {between} between requests"),
        };
        format!("{case} {tier}{between}, {}, {}", neighbour.name(), scheme.name())
    }
}

/// A task in a window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// `vm0.heavy`, say.
    pub name: String,
    /// Requests completed.
    pub n: u64,
    /// The judged percentile; 0 with too few requests.
    pub percentile: f64,
    /// Its value, µs.
    pub tail_us: f64,
    /// Its 95 % interval, µs.
    #[serde(default)]
    pub tail_interval_us: Option<[f64; 2]>,
    /// p99 and its 95 % interval, µs, of however few requests.
    #[serde(default)]
    pub p99_us: Option<[f64; 3]>,
    /// The target for the judged percentile, µs.
    pub target_us: f64,
    /// What a plan says that it stays below, µs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_us: Option<f64>,
    /// Of the requested rate.
    pub delivered: f64,
    /// Whether both hold.
    pub passed: bool,
}

impl Task {
    /// What came of a VM's task in a window of `seconds`.
    fn of(vm: usize, plan: &Plan, histogram: &Histogram, seconds: f64) -> Self {
        let us = |time: Nanos| time.get() as f64 / 1e3;
        let p99 = Percentile::new(99.0).expect("99 is a percentile");
        let judgement = judge(histogram, seconds, plan.iops, plan.target);
        let (percentile, tail) =
            judgement.judged.map_or((0.0, Nanos::ZERO), |q| (q.percentile.get(), q.value));
        Self {
            name: format!("vm{vm}.{}", plan.name),
            n: histogram.count(),
            percentile,
            tail_us: us(tail),
            tail_interval_us: judgement.judged.map(|q| [us(q.low), us(q.high)]),
            p99_us: histogram.quantile(p99).map(|q| [us(q.value), us(q.low), us(q.high)]),
            target_us: us(plan.target),
            bound_us: None,
            delivered: judgement.delivered_fraction,
            passed: judgement.passed(),
        }
    }
}

/// What came of a trial.
pub(crate) struct Measured {
    pub(crate) tasks: Vec<Task>,
    /// Of the background VM, bytes a second.
    pub(crate) background: f64,
    /// Length of the window.
    pub(crate) seconds: f64,
    pub(crate) canary: Canary,
    /// CPUs busy, of the machine.
    pub(crate) busy: f64,
}

impl Measured {
    /// Runs it, and judges its tasks.
    pub(crate) fn of(trial: &Trial<'_>, interrupted: &Interrupted) -> Result<Self> {
        let recorded = trial.record(interrupted)?;
        let seconds = recorded.seconds;
        let vms = trial.vms.iter().zip(&recorded.tasks).enumerate();
        let tasks = vms.flat_map(|(vm, (plans, records))| {
            let tasks = plans.iter().zip(records);
            tasks.map(move |(plan, record)| Task::of(vm, plan, &record.histogram, seconds))
        });
        Ok(Self {
            tasks: tasks.collect(),
            background: recorded.background,
            seconds,
            canary: canary_summary(&recorded.canary),
            busy: recorded.machine.busy_cores,
        })
    }
}

/// A cell.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// The device, such as `ref-4x250`.
    pub device: String,
    /// Length of the window, s.
    pub seconds: f64,
    /// Its VMs' tasks.
    pub tasks: Vec<Task>,
    /// What the background VM moved, bytes a second.
    pub background: f64,
    /// Of the device's time, what the tasks' requests needed.
    pub needed: f64,
    /// The machine's health.
    pub canary: Canary,
    /// CPUs busy, of the machine.
    pub busy: f64,
    /// When it ran.
    pub at: String,
    /// What the schedule was told of the device.
    #[serde(default)]
    pub curve: Option<Curve>,
    /// The most urgent VM alone, before and after, where the disk is the machine's.
    #[serde(default)]
    pub floors: Option<[NoiseFloor; 2]>,
    /// Why the cell does not count, if it does not.
    #[serde(default)]
    pub discarded: Option<String>,
}

/// The most urgent VM alone on the device.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct NoiseFloor {
    /// The worst of its tasks' p99 / target.
    pub tail: f64,
    /// The least that one delivered of its rate.
    pub delivered: f64,
}

impl NoiseFloor {
    pub(crate) fn of(tasks: &[Task]) -> Self {
        let tail = |task: &Task| task.p99_us.map_or(f64::MAX, |[p99, ..]| p99 / task.target_us);
        let delivered = tasks.iter().map(|task| task.delivered);
        Self {
            tail: tasks.iter().map(tail).fold(0.0, f64::max),
            delivered: delivered.fold(f64::MAX, f64::min),
        }
    }

    /// Whether its targets and rates were met.
    pub(crate) fn is_met(&self) -> bool {
        self.tail <= 1.0 && self.delivered >= MIN_DELIVERED
    }
}

/// Why a cell does not count, if it does not: the machine had no time for it (its canary was later than
/// `limit`), or its disk was disturbed.
pub(crate) fn disturbance(
    limit: Nanos,
    canary: &Canary,
    floors: Option<&[NoiseFloor; 2]>,
) -> Option<String> {
    if canary.p99 > limit {
        return Some(format!("canary p99 {} above {limit}", canary.p99));
    }
    let bad = floors?.iter().zip(["before", "after"]).find(|(floor, _)| !floor.is_met());
    bad.map(|(floor, when)| {
        let NoiseFloor { tail, delivered } = floor;
        format!("VM 0 alone {when}: p99/target {tail:.2}, delivered {delivered:.3}")
    })
}

impl Cell {
    /// Whether every task met its target at its rate.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.tasks.iter().all(|task| task.passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::canary_of;

    #[test]
    fn cell_of_an_earlier_campaign_has_strict_targets_and_the_deep_writer() {
        let line = r#"{"case":"1xL","scheme":"none","repetition":0,"device":"ref-4x250",
            "seconds":12.0,"tasks":[{"name":"vm0.light","n":550,"percentile":0.0,"tail_us":0.0,
            "target_us":15000.0,"delivered":0.458,"passed":false}],"background":370548271.0,
            "needed":0.003,"canary":{"n":1,"p50":1,"p99":1,"max":1},"busy":0.4,"at":""}"#;
        let cell: Cell = serde_json::from_str(line).unwrap();
        assert_eq!(cell.key.label(), "1xL strict, deep-writer, none");
        assert!(cell.discarded.is_none() && cell.tasks[0].p99_us.is_none());
    }

    #[test]
    fn floor_that_misses_a_target_or_a_rate_and_a_late_canary_discard_their_cell() {
        let limit = Nanos::from_millis(1);
        let canary = |ms| canary_of(Nanos::from_millis(ms));
        let floor = |tail, delivered| NoiseFloor { tail, delivered };
        let good = floor(1.0, 0.95);
        assert_eq!(disturbance(limit, &canary(1), Some(&[good, good])), None);
        assert_eq!(disturbance(limit, &canary(1), None), None);
        let reason = |floors| disturbance(limit, &canary(1), Some(&floors)).unwrap();
        assert_eq!(
            reason([good, floor(1.01, 1.0)]),
            "VM 0 alone after: p99/target 1.01, delivered 1.000"
        );
        assert!(reason([floor(0.5, 0.94), good]).starts_with("VM 0 alone before"));
        assert!(disturbance(limit, &canary(2), None).unwrap().starts_with("canary"));
    }
}
