//! What the control API of the data plane says and takes (JSON).
//!
//! `_ns` fields are nanoseconds. A reader must ignore fields that it does not know: they are added
//! without a new version; what is under `/v1` changes in no other way. A body that the server
//! reads is refused when it has an unknown key.

use std::path::PathBuf;

use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, Nanos, VmName};
use serde::{Deserialize, Serialize};

use crate::latency::Histogram;
use crate::serve::{Completion, CorePolicy, Policy, Polling};

mod nics;
mod policy;
mod requests;
mod schedules;

pub use nics::{DropCounts, NicQueueState, NicState, PromisedFrames, QueueDirection};
pub use policy::{Decision, Load, Outcome, PolicyAction, PolicyState, QueueName, SetPolicy};
pub use requests::{
    AddDevice, AddIoThread, AddNetwork, AddNic, ErrorBody, Handed, Lock, MoveQueue, Moved,
    PinIoThread, Resize, Resized, ScheduleCurve, SetMapping, SetNicRate, SetQos,
};
use schedules::kept_at_least;
pub use schedules::{
    Consumption, Demand, DeviceUsage, Had, Promises, QosState, ScheduleState, StallState,
    StallsState, TaskState,
};

/// Everything at one time: `GET /v1/snapshot`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Snapshot {
    /// Time since 1970, UTC.
    pub time_ns: Nanos,
    /// When the data plane started, likewise: another one's settings are its own.
    #[serde(default)]
    pub started_ns: Nanos,
    /// The IOThreads, by name.
    pub iothreads: Vec<IoThreadState>,
    /// The devices, by name.
    pub devices: Vec<DeviceState>,
    /// The network devices, by name.
    #[serde(default)]
    pub nics: Vec<NicState>,
    /// The schedules of physical devices, by name.
    #[serde(default)]
    pub schedules: Vec<ScheduleState>,
}

/// An IOThread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct IoThreadState {
    /// Its name.
    pub name: IoThreadName,
    /// Its number, which no other one ever has: a policy's word for it.
    #[serde(default)]
    pub id: u32,
    /// The CPUs that it is pinned to; none: any.
    pub cpus: Vec<CpuId>,
    /// Whether it gets and loses no queue by policy: an operator's word.
    pub locked: bool,
    /// The kernel's number of the thread.
    pub tid: i32,
    /// How it polls.
    pub polling: PollingState,
    /// How many queues it has.
    pub queues: u32,
    /// Time at work, since its start.
    pub busy_ns: Nanos,
    /// Of that, time in which it waited for schedules that other IOThreads had.
    #[serde(default)]
    pub lock_ns: Nanos,
    /// Time in polls that found nothing.
    pub poll_ns: Nanos,
    /// Times that it would have polled, or polled on, and others needed the CPUs.
    #[serde(default)]
    pub poll_refused: u64,
    /// Times that another task had its CPU while it polled.
    #[serde(default)]
    pub poll_gaps: u64,
    /// Time asleep.
    pub sleep_ns: Nanos,
    /// CPU time, as the kernel counts it.
    pub cpu_ns: Nanos,
    /// Time in which it could have run and had no CPU, likewise.
    #[serde(default)]
    pub runqueue_ns: Nanos,
}

/// How an IOThread polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PollingState {
    /// Whether it polls at all, or does nothing else.
    #[serde(default)]
    pub completion: Completion,
    /// Whose its CPU is, if it adapts.
    #[serde(default)]
    pub core: CorePolicy,
    /// The longest.
    pub max_ns: Nanos,
    /// Factor of growth.
    pub grow: u32,
    /// Divisor of shrinking; 0: at once to nothing.
    pub shrink: u32,
}

impl From<Polling> for PollingState {
    fn from(polling: Polling) -> Self {
        let Polling { completion, core, max, grow, shrink } = polling;
        Self { completion, core, max_ns: max, grow, shrink }
    }
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceState {
    /// Its name.
    pub name: DiskName,
    /// Its VM.
    pub vm: VmName,
    /// Its socket's path; none if it was handed over.
    pub socket: Option<PathBuf>,
    /// Whether a front end is connected.
    pub connected: bool,
    /// Its size, bytes.
    pub capacity: Bytes,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Its queues, from queue 0.
    pub queues: Vec<QueueState>,
    /// Responses of all its queues since its start, by bucket: the bucket's end, ns, which is up
    /// to 1/16 above the latency, and requests. The difference of two is what was between.
    #[serde(default)]
    pub responses: Histogram,
    /// Its part of the physical device; none: its requests start as they come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<QosState>,
    /// The processes of this host that use it by slots; none: it has no socket for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<SlotsState>,
}

/// The processes of this host that use a device by slots.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SlotsState {
    /// Those that were turned out since the device's start, for what they wrote to their slots.
    pub broken: u64,
    /// In the order in which they connected.
    pub clients: Vec<ClientState>,
}

/// A process that uses a device by slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ClientState {
    /// The process; none: it cannot be seen from the data plane.
    pub process: Option<i32>,
    /// The IOThread that polls its slots: that of queue 0.
    pub iothread: IoThreadName,
    /// Its slots.
    pub slots: u32,
    /// Of those, slots with a request that was taken and has not ended.
    pub in_flight: u64,
    /// Requests ended.
    #[serde(flatten)]
    pub operations: OperationCounts,
    /// Bytes read.
    pub read_bytes: Bytes,
    /// Bytes written.
    pub written_bytes: Bytes,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Times that it had to wake the IOThread.
    pub kicks: u64,
    /// Times that the IOThread had to wake threads of it.
    pub calls: u64,
}

/// What a queue is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// No front end has started it.
    #[default]
    Stopped,
    /// It is served.
    Running,
    /// It is on its way to another IOThread.
    Moving,
    /// What the driver wrote to its ring is not valid: it rests until it is set up anew.
    Broken,
}

/// A virtqueue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueState {
    /// Its index within the device.
    pub index: u16,
    /// Its number, which no other one ever has: a policy's word for it.
    #[serde(default)]
    pub id: u32,
    /// Its IOThread.
    pub iothread: IoThreadName,
    /// What it is doing.
    pub state: Activity,
    /// Requests taken and not ended.
    pub in_flight: u64,
    /// Requests ended.
    #[serde(flatten)]
    pub operations: OperationCounts,
    /// Bytes read.
    pub read_bytes: Bytes,
    /// Bytes written.
    pub written_bytes: Bytes,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Kicks by the driver.
    pub kicks: u64,
    /// Calls of the driver.
    pub calls: u64,
    /// What of its IOThreads' time at work was for it.
    #[serde(default)]
    pub busy_ns: Nanos,
    /// From the kick, or the poll that found it, to the start in the engine.
    pub wait: LatencySummary,
    /// From there to completion.
    pub service: LatencySummary,
    /// Both.
    pub response: LatencySummary,
}

/// Requests by operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OperationCounts {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Write-zeroes.
    pub write_zeroes: u64,
    /// Get-id, and what the device does not know.
    pub others: u64,
}

/// A latency histogram in short. Percentiles are exact to 1/16, never too low.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LatencySummary {
    /// Requests.
    pub count: u64,
    /// Mean.
    pub mean_ns: Nanos,
    /// Median.
    pub p50_ns: Nanos,
    /// 99 %.
    pub p99_ns: Nanos,
    /// 99.9 %.
    pub p999_ns: Nanos,
    /// 99.99 %.
    pub p9999_ns: Nanos,
    /// The longest.
    pub max_ns: Nanos,
}

/// Something that happened: a message of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A device is there.
    DeviceAdded {
        /// The device.
        device: DiskName,
    },
    /// A device is gone.
    DeviceRemoved {
        /// The device.
        device: DiskName,
    },
    /// A device has another size.
    DeviceResized {
        /// The device.
        device: DiskName,
        /// The new size, bytes.
        capacity: Bytes,
    },
    /// A front end has connected.
    FrontEndConnected {
        /// The device.
        device: DiskName,
    },
    /// A front end has left.
    FrontEndDisconnected {
        /// The device.
        device: DiskName,
    },
    /// A queue is served by another IOThread.
    QueueMoved {
        /// The device.
        device: DiskName,
        /// The queue.
        queue: u16,
        /// Where it was.
        from: IoThreadName,
        /// Where it is.
        to: IoThreadName,
        /// How long nobody served it.
        pause_ns: Nanos,
    },
    /// What the driver wrote to a ring is not valid.
    QueueBroken {
        /// The device.
        device: DiskName,
        /// The queue.
        queue: u16,
        /// Why.
        reason: String,
    },
    /// The device of a schedule, or the host, has ended nothing for a while of what the device had.
    DeviceStalled {
        /// The schedule.
        schedule: Name,
        /// The last stall since the last event of the kind.
        #[serde(flatten)]
        stall: StallState,
        /// How many there were since then.
        stalls: u64,
    },
    /// An IOThread is there.
    IothreadAdded {
        /// The IOThread.
        iothread: IoThreadName,
    },
    /// An IOThread is gone.
    IothreadRemoved {
        /// The IOThread.
        iothread: IoThreadName,
    },
    /// Another policy is in force.
    PolicySet {
        /// Which.
        policy: Policy,
    },
    /// A policy failed and has ended; the data plane serves on.
    PolicyFailed {
        /// Which.
        policy: Policy,
        /// Why.
        reason: String,
    },
    /// A policy has decided something.
    Decision {
        /// Its number: `GET /v1/decisions` has the rest.
        number: u64,
        /// What, for people.
        action: String,
        /// Why, likewise.
        reason: String,
        /// What became of it.
        outcome: Outcome,
    },
    /// A second is over since a decision was made: `GET /v1/decisions` has what came of it.
    DecisionMeasured {
        /// Its number.
        number: u64,
    },
    /// The reader was too slow: so many events are missing here.
    EventsLost {
        /// How many.
        count: u64,
    },
}
