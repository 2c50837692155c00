//! What decides how many IOThreads there are, what it has decided, and what came of it.

use rtvirtio_units::{CpuId, DiskName, IoThreadName, Nanos};
use serde::{Deserialize, Serialize};

use crate::serve::{IoCores, Policy, wire};

/// `GET /v1/policy`, and the answer to [`SetPolicy`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyState {
    /// What is in force.
    pub policy: Policy,
    /// Where IOThreads may be added, in the order in which CPUs are taken.
    pub cpus: Vec<CpuId>,
    /// Fewest IOThreads.
    pub min_iothreads: u32,
    /// Most IOThreads.
    pub max_iothreads: u32,
    /// Whether CPUs may be taken from vCPUs.
    #[serde(default)]
    pub borrow: bool,
    /// Whether it is at work: `static` has nothing to do, and one that failed has ended.
    pub running: bool,
    /// Why it has ended by itself. The data plane serves on, and whatever it did stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Number of the last decision; 0: none yet.
    pub last_decision: u64,
}

impl PolicyState {
    /// Of settings that are in force.
    #[must_use]
    pub fn new(settings: &IoCores) -> Self {
        let IoCores { policy, cpus, min_iothreads, max_iothreads, borrow } = settings.clone();
        let (running, failure, last_decision) = (false, None, 0);
        Self { policy, cpus, min_iothreads, max_iothreads, borrow, running, failure, last_decision }
    }
}

/// `PUT /v1/policy`. What is left out stays as it is; with other `cpus`, `min_iothreads` and `max_iothreads` are 1
/// and as many as those if nothing says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct SetPolicy(pub wire::IoCores);

/// A queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueName {
    /// The device.
    pub device: DiskName,
    /// Its queue, from 0.
    pub queue: u16,
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum PolicyAction {
    /// A further IOThread.
    AddIothread {
        /// Its name; none: it does not start, or was only advised.
        iothread: Option<IoThreadName>,
        /// Where it runs.
        cpu: CpuId,
        /// What it gets: the first of these.
        queues: Vec<QueueName>,
        /// How many these are.
        count: u32,
    },
    /// An IOThread ends.
    RemoveIothread {
        /// Its name.
        iothread: IoThreadName,
        /// What leaves it before: the first of these.
        queues: Vec<QueueName>,
        /// How many these are.
        count: u32,
    },
    /// A queue goes to another IOThread.
    MoveQueue {
        /// The queue.
        #[serde(flatten)]
        queue: QueueName,
        /// Where it was.
        from: IoThreadName,
        /// Where it goes.
        to: IoThreadName,
    },
    /// The CPUs of all vCPUs change.
    SetVcpuCpus {
        /// To these.
        cpus: Vec<CpuId>,
    },
    /// vCPUs go to CPUs, once.
    PlaceVcpus {
        /// How many.
        count: u32,
        /// To these.
        cpus: Vec<CpuId>,
    },
    /// It named what is no longer there.
    Gone,
}

impl PolicyAction {
    /// How it is written in `kind`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::AddIothread { .. } => "add_iothread",
            Self::RemoveIothread { .. } => "remove_iothread",
            Self::MoveQueue { .. } => "move_queue",
            Self::SetVcpuCpus { .. } => "set_vcpu_cpus",
            Self::PlaceVcpus { .. } => "place_vcpus",
            Self::Gone => "gone",
        }
    }
}

impl std::fmt::Display for PolicyAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AddIothread { iothread: Some(name), cpu, count, .. } => {
                write!(f, "add {name} on CPU {cpu} for {count} queues")
            }
            Self::AddIothread { iothread: None, cpu, count, .. } => {
                write!(f, "add an IOThread on CPU {cpu} for {count} queues")
            }
            Self::RemoveIothread { iothread, count, .. } => {
                write!(f, "remove {iothread}, moving {count} queues away")
            }
            Self::MoveQueue { queue: QueueName { device, queue }, from, to } => {
                write!(f, "move {device}:{queue} from {from} to {to}")
            }
            Self::SetVcpuCpus { cpus } => {
                write!(f, "let vCPUs run on {}", crate::plan::qemu::cpuset(cpus))
            }
            Self::PlaceVcpus { count, cpus } => {
                write!(f, "have {count} vCPUs go to {}", crate::plan::qemu::cpuset(cpus))
            }
            Self::Gone => f.write_str("something that is no longer there"),
        }
    }
}

/// What became of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was carried out.
    Done,
    /// It was carried out in part, or not at all.
    Failed,
    /// It was only logged: the policy is `advise`.
    Advised,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Advised => "advised",
        })
    }
}

/// What all queues and IOThreads did, on average over a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Load {
    /// Requests a second.
    pub iops: f64,
    /// What a request waited for its IOThread.
    pub wait_ns: Nanos,
    /// CPUs that IOThreads kept busy, polling among it.
    pub cores: f64,
}

/// A decision: an entry of `GET /v1/decisions?after=N`, which has those with higher numbers, of the
/// last 1,000.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Decision {
    /// From 1, in order.
    pub number: u64,
    /// When, since 1970, UTC.
    pub time_ns: Nanos,
    /// Who decided.
    pub policy: Policy,
    /// What.
    pub action: PolicyAction,
    /// Why, in its words. It names IOThreads and queues by their `id`.
    pub reason: String,
    /// What became of it.
    pub outcome: Outcome,
    /// Why not all of it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How long that took.
    pub took_ns: Nanos,
    /// What all did in the second before; in less, if the policy is younger.
    pub before: Load,
    /// What all did in the second after; none: that is not over, or the policy ended before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Load>,
}
