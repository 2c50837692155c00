//! What a look says.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rtvirtio_spec::control::Promises;
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_units::{BytesPerSecond, DiskName, IoThreadName, Nanos, Percentile, TaskName, VmName};
use serde::Serialize;

use crate::history::Tails;

/// A target as it is shown.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RowTarget {
    /// Which percentile.
    pub percentile: Percentile,
    /// At most so long.
    pub latency: Nanos,
}

/// One task's line.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Its VM.
    pub vm: VmName,
    /// The task.
    pub task: TaskName,
    /// Where its latencies were taken.
    pub measured_at: MeasuredAt,
    /// Of the last minute.
    pub tails: Tails,
    /// Its target, if it has one.
    pub target: Option<RowTarget>,
    /// Requests above the target, since the start.
    pub misses: u64,
    /// All requests since the start.
    pub requests: u64,
    /// Requests per second over the last minute.
    pub iops: f64,
    /// Declared requests per second.
    pub wanted_iops: Option<f64>,
}

/// What the closed loop did.
#[derive(Debug, Clone, Serialize)]
pub struct Change {
    /// Why it planned again.
    pub reason: String,
    /// Knobs written.
    pub written: usize,
    /// Targets that the plan leaves unmet.
    pub unmet: usize,
    /// Each background VM's cap, if it has one.
    pub caps: BTreeMap<VmName, Option<BytesPerSecond>>,
    /// Why nothing was applied.
    pub failed: Option<String>,
    /// Whether no VM of the specification runs, so that nothing was planned.
    pub is_idle: bool,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reason, written, unmet, .. } = self;
        if let Some(failed) = &self.failed {
            return write!(f, "{reason}: not changed: {failed}");
        }
        if self.is_idle {
            return write!(f, "{reason}: no VM of the specification runs: nothing is planned");
        }
        write!(f, "{reason}: planned; {written} knobs changed, {unmet} targets unmet")?;
        for (vm, cap) in &self.caps {
            match cap {
                Some(cap) => write!(f, "; {vm} capped at {cap}")?,
                None => write!(f, "; {vm} has no cap")?,
            }
        }
        Ok(())
    }
}

/// One disk's line: the reads and writes of all tasks on it.
#[derive(Debug, Clone, Serialize)]
pub struct DiskRow {
    /// Its VM.
    pub vm: VmName,
    /// The disk.
    pub disk: DiskName,
    /// Where its latencies were taken.
    pub measured_at: MeasuredAt,
    /// Of the last minute.
    pub tails: Tails,
    /// All requests since the start, as the block layer counts them: after QEMU has merged or
    /// split the guest's.
    pub requests: u64,
    /// Requests per second over the last minute.
    pub iops: f64,
}

/// One device's line.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceRow {
    /// Its VM.
    pub vm: VmName,
    /// The device.
    pub device: DiskName,
    /// Where its latencies were taken.
    pub measured_at: MeasuredAt,
    /// Of the last minute.
    pub tails: Tails,
    /// The strictest target of the tasks on it, if the specification has one.
    pub target: Option<RowTarget>,
    /// Requests above the target, since the start.
    pub misses: u64,
    /// All requests since the start.
    pub requests: u64,
    /// Requests per second over the last minute.
    pub iops: f64,
    /// Requests that it has now.
    pub in_flight: u64,
    /// The IOThreads of its queues, each once.
    pub iothreads: Vec<IoThreadName>,
    /// Whether a front end is connected.
    pub connected: bool,
    /// How its promises were kept since it got them; `None`: nothing is promised, or asked for.
    pub promises: Option<Promises>,
}

/// What one look says.
#[derive(Debug, Clone, Serialize)]
pub struct Look {
    /// Seconds since the start.
    pub at_s: f64,
    /// Tasks on disks that QEMU serves, in the order of the specification.
    pub tasks: Vec<Row>,
    /// Disks of VMs that are measured on the host.
    pub disks: Vec<DiskRow>,
    /// Records of the block layer that were lost since the start: requests that no disk's line has.
    pub host_records_lost: u64,
    /// Devices of the data plane.
    pub data_plane: Vec<DeviceRow>,
    /// VMs that run.
    pub present: BTreeSet<VmName>,
    /// What `--control` did.
    pub change: Option<Change>,
    /// What happened: the change, monitors lost and found.
    pub events: Vec<String>,
}
