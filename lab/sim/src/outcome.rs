//! What came of a simulation.

use rtvirtio_iocores::QueueKind;
use rtvirtio_iocores::utility::{self, Progress};
use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::scenario::PhaseKind;
use crate::world::{Counts, Done};

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Of each phase.
    pub phases: Vec<PhaseOutcome>,
    /// Of all phases as one.
    pub whole: PhaseOutcome,
    /// What the policy decided; the first 100,000.
    pub decisions: Vec<Done>,
    /// Requests.
    #[serde(skip)]
    pub counts: Counts,
}

/// Of a phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseOutcome {
    /// Which; none: all.
    pub kind: Option<PhaseKind>,
    /// When it began.
    pub start: Nanos,
    /// How long it was.
    pub length: Nanos,
    /// Requests and frames whose end clients have seen.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of these, frames.
    pub frames: u64,
    /// And their bytes.
    pub frame_bytes: u64,
    /// Requests a second.
    pub iops: f64,
    /// IOThreads that there were, mean: each has a core.
    pub io_cores: f64,
    /// Requests for each of their seconds.
    pub iops_per_core: f64,
    /// IOThreads in turns with work, in CPUs.
    pub busy: f64,
    /// IOThreads polling in vain, in CPUs.
    pub polled: f64,
    /// IOThreads on a CPU, in CPUs.
    pub io_ran: f64,
    /// vCPUs on a CPU, in CPUs: clients and what computes.
    pub vcpus_ran: f64,
    /// vCPUs ready but not on a CPU, in CPUs.
    pub vcpus_waited: f64,
    /// What the VMs computed, in CPUs.
    pub computed: f64,
    /// What they would have computed alone on the host.
    pub compute_wanted: f64,
    /// Latencies as clients see them.
    pub mean: Nanos,
    /// Half of them are no longer.
    pub p50: Nanos,
    /// 99 %.
    pub p99: Nanos,
    /// 99.9 %.
    pub p999: Nanos,
    /// The longest.
    pub longest: Nanos,
    /// Queues that went to another IOThread.
    pub moves: u32,
    /// IOThreads that were added.
    pub added: u32,
    /// And removed.
    pub removed: u32,
    /// How long a move kept a queue from being served, 99 % of them.
    pub pause_p99: Option<Nanos>,
    /// After the phase began, when the requests a second were within 5 % of those of its second half for
    /// 300 ms; none where the load itself changes, or is small.
    pub settled: Option<Nanos>,
    /// Each 100 ms.
    pub timeline: Vec<Point>,
}

impl PhaseOutcome {
    /// As a utility is reckoned from it. Of compute the simulator knows what the VMs got done, and what they
    /// wanted to.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Self { requests, bytes, frames, frame_bytes, .. } = *self;
        let work = utility::work(QueueKind::Disk, requests - frames, bytes - frame_bytes)
            + utility::work(QueueKind::Link, frames, frame_bytes);
        Progress {
            io: work / self.length.as_secs_f64().max(1e-9),
            busy: self.busy,
            ran: self.computed,
            waited: (self.compute_wanted - self.computed).max(0.0),
            cores: self.io_cores,
        }
    }
}

/// 100 ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Point {
    /// Requests whose end clients have seen.
    pub requests: u32,
    /// IOThreads, mean.
    pub io_cores: f64,
    /// Queues that went to another IOThread.
    pub moves: u32,
}
