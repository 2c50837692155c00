//! What the control API of the data plane says and takes (JSON).
//!
//! `_ns` fields are nanoseconds. A reader must ignore fields that it does not know: they are added
//! without a new version; what is under `/v1` changes in no other way. A body that the server
//! reads is refused when it has an unknown key.

use std::path::PathBuf;

use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, Nanos, VmName};
use serde::{Deserialize, Serialize};

use crate::latency::{Histogram, upper_limit};
use crate::mapping::Entry;
use crate::serve::{Completion, CorePolicy, IoPriority, Policy, Polling, wire};

mod policy;

pub use policy::{Decision, Load, Outcome, PolicyAction, PolicyState, QueueName, SetPolicy};

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

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NicState {
    /// Its name.
    pub name: Name,
    /// Its VM.
    pub vm: VmName,
    /// Its socket's path.
    pub socket: PathBuf,
    /// Whether a front end is connected.
    pub connected: bool,
    /// What its frames go to: a TAP such as `tap0`, the path of a socket, or a network of the data plane's own, such as `lan vlan 10`.
    pub link: String,
    /// Its address, such as `52:54:00:12:34:56`.
    pub mac: String,
    /// The longest packet, bytes.
    pub mtu: u16,
    /// Its queues, from queue 0.
    pub queues: Vec<NicQueueState>,
}

/// Which way frames go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum QueueDirection {
    /// To the guest.
    Receive,
    /// From the guest.
    Transmit,
}

/// A virtqueue of a network device. Counters are since the device's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NicQueueState {
    /// Which.
    pub index: u16,
    /// Its number, which no other queue ever has.
    #[serde(default)]
    pub id: u32,
    /// Which way its frames go.
    pub direction: QueueDirection,
    /// Its IOThread.
    pub iothread: IoThreadName,
    /// Frames that were handed on.
    pub frames: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Frames that were not.
    pub dropped: u64,
    /// The same by their reasons.
    #[serde(default)]
    pub drops: DropCounts,
    /// Frames within the rate of a promise that were handed on within its time, and later; none: nothing is promised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<PromisedFrames>,
    /// Kicks by the driver.
    pub kicks: u64,
    /// Calls of the driver.
    pub calls: u64,
    /// What of its IOThread's time was for it.
    pub busy_ns: Nanos,
    /// From when its IOThread found that there were frames to the turn that took them.
    #[serde(default)]
    pub wait: LatencySummary,
    /// From there to when they had been handed on; where another device of a network receives them, until that has them.
    #[serde(default)]
    pub service: LatencySummary,
}

/// How what is promised to a virtqueue of a network device was kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PromisedFrames {
    /// How long a frame was to wait for its IOThread at most.
    pub within_ns: Nanos,
    /// Frames that did not wait longer.
    pub kept: u64,
    /// Frames that may have: of frames that were handed on together all count as the first.
    pub late: u64,
}

impl PromisedFrames {
    /// The share that was kept, at least, at 95 % confidence. `None`: there was no promised frame.
    #[must_use]
    pub fn kept_at_least(&self) -> Option<f64> {
        kept_at_least(self.kept, self.late)
    }
}

/// As a table shows it: `3 of 20000 over 300 µs, ≥ 99.961 % kept`.
impl std::fmt::Display for PromisedFrames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { within_ns, kept, late } = self;
        write!(f, "{late} of {} over {} µs", kept + late, within_ns.get() / 1_000)?;
        match self.kept_at_least() {
            Some(kept) => write!(f, ", ≥ {:.3} % kept", 100.0 * kept),
            None => Ok(()),
        }
    }
}

/// Why frames were not handed on. Each was counted where that was found: at the sender's transmit queue, or at
/// the receiver's receive queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DropCounts {
    /// It was no frame, or its header asked for what was not negotiated or cannot be.
    pub malformed: u64,
    /// Its sender's address was another's.
    pub spoofed: u64,
    /// It was of a VLAN that its port is not in.
    pub vlan: u64,
    /// Its sender had sent too many to all.
    pub broadcast: u64,
    /// Nobody had its address.
    pub no_receiver: u64,
    /// Its receiver's driver had no buffers, or no queue that was served.
    pub no_buffers: u64,
    /// Its receiver's buffers, or its MTU, were too small for it.
    pub too_long: u64,
    /// Its receiver's limit on a rate let it wait for too long.
    pub limit: u64,
    /// The host's TAP, or the peer of its socket, did not take it.
    pub link: u64,
}

impl DropCounts {
    /// By name.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u64); 9] {
        [
            ("malformed", self.malformed),
            ("spoofed", self.spoofed),
            ("vlan", self.vlan),
            ("broadcast", self.broadcast),
            ("no_receiver", self.no_receiver),
            ("no_buffers", self.no_buffers),
            ("too_long", self.too_long),
            ("limit", self.limit),
            ("link", self.link),
        ]
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }
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

/// The schedule of a physical device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ScheduleState {
    /// Its name.
    pub name: Name,
    /// Requests that the device serves at a time.
    pub channels: u32,
    /// What a read or write takes of a channel before its bytes.
    pub request_ns: Nanos,
    /// What each KiB takes further.
    pub kib_ns: Nanos,
    /// What a flush or discard takes.
    pub flush_ns: Nanos,
    /// Requests that wait for their time.
    pub waiting: u64,
    /// Requests on the device.
    pub running: u32,
    /// Of those, requests that nothing promises.
    pub background: u32,
    /// How many of these may be there while promises are to be kept: fewer, the harder that is.
    pub background_bound: u32,
    /// How long these were withheld so far, to find out whether promised rates are wanted.
    #[serde(default)]
    pub withheld_ns: Nanos,
    /// What the device did since the schedule began, and how long it took.
    #[serde(default)]
    pub usage: DeviceUsage,
    /// Times in which it ended nothing of what it had.
    #[serde(default)]
    pub stalls: StallsState,
}

/// Times of 50 ms and more in which a device, or the host, ended nothing of what the device had: none of it is the
/// schedule's doing. A device whose requests take longer than 5 ms stalls from ten times that on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StallsState {
    /// How many there were.
    pub count: u64,
    /// How long all of them were.
    pub time_ns: Nanos,
    /// How long the longest was.
    pub longest_ns: Nanos,
    /// The last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<StallState>,
    /// How long nothing has ended by now; none: the device works, or has nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ongoing_ns: Option<Nanos>,
}

/// A stall.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StallState {
    /// When it began, since 1970, UTC.
    pub begin_ns: Nanos,
    /// How long it took.
    pub length_ns: Nanos,
    /// Requests that were on the device.
    pub in_flight: u32,
}

/// What a physical device did, and how long it took: both grow alike while it is as fast as its
/// service curve.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceUsage {
    /// Time that channels had a request, summed over channels.
    pub used_ns: Nanos,
    /// What the requests that have ended took of a channel, by the service curve.
    pub cost_ns: Nanos,
    /// Requests that have ended; a transfer of more than 128 KiB counts as several.
    pub requests: u64,
    /// Of these, flushes and discards.
    pub flushes: u64,
    /// Those that ended while none waited for a channel: their channel was held for all of their
    /// response, not for the service alone.
    pub alone: u64,
}

/// A device's part of the physical device, and what came of it since it got that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QosState {
    /// What is in force.
    pub settings: wire::Qos,
    /// Whether what no task of it asks for would be more if requests were served sooner.
    #[serde(default)]
    pub demand: Demand,
    /// What it has had, its tasks' requests among it.
    #[serde(flatten)]
    pub had: Had,
    /// What its tasks have had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskState>,
}

/// What the requests that a guest marks with a priority have had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TaskState {
    /// The priority.
    pub ioprio: IoPriority,
    /// Whether the task would ask for more if its requests were served sooner.
    #[serde(default)]
    pub demand: Demand,
    /// What they have had.
    #[serde(flatten)]
    pub had: Had,
}

/// Whether who has less than the promised rate would ask for more if requests were served sooner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Demand {
    /// Nobody knows: the rate comes about, or hardly anything is asked for.
    #[default]
    Unknown,
    /// Requests that nothing promises are withheld now and then to find out.
    Tried,
    /// It would: requests that nothing promises give way.
    More,
    /// It would not.
    NoMore,
}

/// What requests have had of a physical device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Had {
    /// Reads.
    pub reads: Consumption,
    /// Writes.
    pub writes: Consumption,
    /// Flushes.
    pub flushes: Consumption,
    /// Discards, and ranges that were zeroed.
    pub discards: Consumption,
    /// Requests within the promised rate that ended before the deadline.
    pub kept: u64,
    /// Those that did not.
    pub late: u64,
    /// Of these, those that would have, had the device not stalled meanwhile.
    #[serde(default)]
    pub late_in_stalls: u64,
}

impl Had {
    /// The share of requests within the promised rate that ended before the deadline, at least: at 95 %
    /// confidence, if each may be late by itself. `None`: there were none.
    #[must_use]
    pub fn kept_at_least(&self) -> Option<f64> {
        kept_at_least(self.kept, self.late)
    }

    /// How promises were kept, in short. `None`: nothing was promised, or asked for.
    #[must_use]
    pub fn promises(&self) -> Option<Promises> {
        let kept_at_least = self.kept_at_least()?;
        let (late, late_in_stalls) = (self.late, self.late_in_stalls);
        Some(Promises { promised: self.kept + late, late, late_in_stalls, kept_at_least })
    }
}

fn kept_at_least(kept: u64, late: u64) -> Option<f64> {
    let promised = (kept + late) as f64;
    (promised > 0.0).then(|| (1.0 - upper_limit(late) / promised).max(0.0))
}

/// How the requests within a promised rate ended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Promises {
    /// How many there were.
    pub promised: u64,
    /// Those that ended after the deadline.
    pub late: u64,
    /// Of these, those that a stall of the device alone made late.
    pub late_in_stalls: u64,
    /// [`Had::kept_at_least`].
    pub kept_at_least: f64,
}

impl std::fmt::Display for Promises {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { promised, late, late_in_stalls, kept_at_least } = self;
        write!(f, "{late} of {promised} promised requests late")?;
        if *late_in_stalls > 0 {
            write!(f, " ({late_in_stalls} by stalls)")?;
        }
        write!(f, ", ≥ {:.3} % kept", 100.0 * kept_at_least)
    }
}

/// What requests of a kind have had. A transfer of more than 128 KiB counts as several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Consumption {
    /// Requests that have ended.
    pub requests: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// What they took of a channel, by the schedule's service curve.
    pub cost_ns: Nanos,
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

/// What a file descriptor sent along is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Handed {
    /// The image file or block device, open as the device needs it.
    Image,
    /// A listening unix socket.
    Socket,
}

/// `POST /v1/devices`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AddDevice {
    /// The device, as in a configuration.
    pub device: wire::Device,
    /// What the descriptors that come with the request are for, in their order.
    #[serde(default)]
    pub fds: Vec<Handed>,
}

/// `PATCH /v1/devices/{device}`: looks at the size again, or changes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// The new size; none: what the file now has.
    #[serde(default)]
    pub size: Option<wire::Size>,
    /// Whether it may be smaller: what is cut off is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shrink: bool,
}

/// The answer to [`Resize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Resized {
    /// The size, bytes.
    pub capacity: Bytes,
}

/// `PUT /v1/schedules/{name}`: makes a schedule, or changes the service curve of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ScheduleCurve {
    /// Requests that the device serves at a time.
    pub channels: u32,
    /// What a read or write takes of a channel before its bytes, ns.
    pub request_ns: u64,
    /// What each KiB takes further, ns.
    pub kib_ns: u64,
    /// What a flush or discard takes, ns; as long as `request_ns` if nothing says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_ns: Option<u64>,
}

impl ScheduleCurve {
    /// As in a configuration.
    #[must_use]
    pub fn named(self, name: Name) -> wire::Schedule {
        let Self { channels, request_ns, kib_ns, flush_ns } = self;
        wire::Schedule { name, channels, request_ns, kib_ns, flush_ns }
    }
}

/// `PUT /v1/devices/{device}/qos`: joins a schedule, or changes what holds there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct SetQos(pub wire::Qos);

/// `POST /v1/iothreads`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct AddIoThread(pub wire::IoThread);

/// `PUT /v1/iothreads/{iothread}/cpus`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PinIoThread {
    /// The CPUs; none: any.
    pub cpus: Vec<CpuId>,
}

/// `PUT /v1/iothreads/{iothread}/lock`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Whether policy leaves its queues alone.
    pub locked: bool,
}

/// A device's mapping: `PUT /v1/mapping/{device}`, and the answer to `GET`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SetMapping {
    /// QEMU's `iothread-vq-mapping`.
    pub mapping: Vec<Entry>,
}

/// `PUT /v1/mapping/{device}/{queue}`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveQueue {
    /// Where to.
    pub iothread: IoThreadName,
}

/// The answer to [`MoveQueue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Moved {
    /// How long nobody served the queue.
    pub pause_ns: Nanos,
}

/// The body of an answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ErrorBody {
    /// What is wrong.
    pub error: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promised_frames_are_told_with_what_was_kept_at_least() {
        let mut promised =
            PromisedFrames { within_ns: Nanos::from_micros(300), kept: 19_997, late: 3 };
        // 7.75 of 20,000 may be late (Poisson).
        assert_eq!(promised.to_string(), "3 of 20000 over 300 µs, ≥ 99.961 % kept");
        (promised.kept, promised.late) = (0, 0);
        assert_eq!(promised.to_string(), "0 of 0 over 300 µs");
        assert_eq!(promised.kept_at_least(), None);
    }
}
