//! What a benchmark measured: one JSON record a cell, one line each (JSONL).
//!
//! A cell is one case under one scheme for one window of time. All times are
//! as the load generator saw them (`measured_at` says which layer).

use std::collections::BTreeMap;

use rtvirtio_units::{BytesPerSecond, Nanos, Percentile, TaskName, VmName};
use serde::{Deserialize, Serialize};

use crate::latency::{Histogram, Quantile};
use crate::settings::Settings;

/// The record format that this version writes and reads.
pub const RUN_VERSION: u32 = 1;

/// One cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// [`RUN_VERSION`].
    pub version: u32,
    /// What identifies the cell within its campaign.
    pub key: CellKey,
    /// When it started, RFC 3339, UTC.
    pub started: String,
    /// The device it ran on, such as `ref-4x250` or `raw`.
    pub device: String,
    /// Length of the measured window, s.
    pub window_s: f64,
    /// Settings in force.
    pub settings: Settings,
    /// ioprio class and level of each VM, if the scheme sets them, as `rt/0` or `be/4`.
    pub ioprio: BTreeMap<VmName, String>,
    /// Each task's result.
    pub tasks: Vec<TaskResult>,
    /// Background VMs: bytes per second within the tasks' window.
    pub background: BTreeMap<VmName, BytesPerSecond>,
    /// Lateness of a sleeping thread during the window.
    pub canary: Canary,
    /// State of the machine during the window.
    pub machine: Machine,
    /// Whether every task passed.
    pub passed: bool,
    /// The most urgent VM alone, where the disk is shared with the rest of the machine.
    pub noise_floor: Option<NoiseFloor>,
    /// How often it was measured; all but the last were disturbed.
    pub attempts: u32,
    /// How many windows it is made of, each interleaved with those of other schemes.
    #[serde(default = "one")]
    pub rounds: u32,
    /// What the machine did to it, if it was disturbed. The cell counts all the same, and is marked.
    /// (Earlier results left such a cell out, hence the key.)
    #[serde(rename = "discarded")]
    pub disturbed: Option<String>,
}

/// Cells were made of one window before rounds were counted.
const fn one() -> u32 {
    1
}

/// What identifies a cell.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellKey {
    /// Case, such as `4xL+M+H`.
    pub case: String,
    /// Tier of targets, such as `strict`.
    pub tier: String,
    /// Neighbour, such as `writer` or `none`.
    pub neighbour: String,
    /// Scheme, such as `bfq` or `rtvirtio`.
    pub scheme: String,
    /// Repetition, from 0.
    pub repetition: u32,
}

/// One task's result in a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskResult {
    /// Its VM.
    pub vm: VmName,
    /// The task.
    pub task: TaskName,
    /// Where the latency was taken: `guest`, `qemu`, `data-plane` or `host`.
    pub measured_at: MeasuredAt,
    /// Requests per second that it was to issue.
    pub requested_iops: f64,
    /// Requests per second completed in the window.
    pub delivered_iops: f64,
    /// The judged percentile; `None` with too few samples for p99.
    pub judged: Option<Quantile>,
    /// Its target at the judged percentile; `None` for a task without one.
    pub target: Option<Nanos>,
    /// What the scheme predicted for the judged percentile, if it predicts.
    pub prediction: Option<Prediction>,
    /// Whether tail and rate both held.
    pub passed: bool,
    /// Every request's latency.
    pub histogram: Histogram,
    /// Largest latency in each interval of the window: (ms since its start, latency).
    pub timeline: Vec<(u64, Nanos)>,
}

/// A layer at which latency is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MeasuredAt {
    /// In the guest.
    Guest,
    /// In QEMU's block layer.
    Qemu,
    /// In the data plane.
    DataPlane,
    /// On the host, by the load generator or the block layer.
    Host,
}

/// A prediction made before the cell ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// Percentile that it is for.
    pub percentile: Percentile,
    /// Expected value.
    pub predicted: Nanos,
    /// Bound for this task alone at 0.95; `None` if the profile holds too few runs to say.
    pub bound: Option<Nanos>,
    /// The paper's model, λ refit, corrected reading; where bfq idles, which is what it speaks of.
    pub paper: Option<Nanos>,
    /// A bound on top of it.
    pub paper_bound: Option<Nanos>,
}

/// The most urgent VM's worst tail over target when it is alone, `None` with too
/// few samples. Above 1, the disk itself misses the target.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoiseFloor {
    /// Right before the cell.
    pub before: Option<f64>,
    /// Right after it.
    pub after: Option<f64>,
}

/// Lateness of a thread that sleeps for a fixed time, over the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    /// Wake-ups.
    pub n: u64,
    /// Median lateness.
    pub p50: Nanos,
    /// 99th percentile.
    pub p99: Nanos,
    /// 99.9th percentile; zero in results from before it was kept.
    #[serde(default)]
    pub p999: Nanos,
    /// Largest.
    pub max: Nanos,
}

/// State of the machine during a window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// One-minute load average at its end.
    pub load1: f64,
    /// CPU time used, in cores, of the CPUs that the measuring process may use.
    pub busy_cores: f64,
    /// CPU time taken by the hypervisor, in cores, of the same CPUs.
    pub steal_cores: f64,
}
