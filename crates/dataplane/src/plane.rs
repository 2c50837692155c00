//! The data plane as an operator sees it: IOThreads and devices by name.
//!
//! [`Plane`] is all that the control API can do; the registry over the pool and the session server
//! implements it. A method that changes something returns when it is done, and may wait for
//! requests in flight; [`Plane::observe`] never waits.

mod clients;
mod engines;
mod host;
pub(crate) mod iothreads;
mod mapped;
mod nic_host;
mod nics;
mod opened;
mod positions;
mod promises;
mod registry;
mod watchdog;

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rtvirtio_qos::admission::Refusal;
use rtvirtio_qos::{Account, Kind, Stall};
use rtvirtio_spec::control::{
    Activity, Consumption, Decision, Demand, DeviceState, DeviceUsage, Event, Had, IoThreadState,
    NicState, Outcome, PolicyState, QosState, QueueDirection, QueueState, ScheduleState,
    SlotsState, Snapshot, StallState, StallsState,
};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::mapping::{Entry, Mapping, MappingError};
use rtvirtio_spec::serve::{
    Configuration, Fault, IoThread, Network, NicRate, Policy, Qos, Schedule, wire,
};
use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, Nanos, VmName};
use rtvirtio_vhost::session::Ended;
use rustix::io::Errno;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::iothread::PinError;
use crate::schedule::{ClassStatus, ScheduleStatus};
use crate::stats::QueueStats;

pub use engines::check_image;
pub use opened::Opened;
pub use positions::PositionsError;
pub use registry::Registry;

/// What an operator should know about a device.
#[derive(Debug, Clone, Copy)]
pub enum Notice<'a> {
    /// A session has ended in an error or with refused requests.
    Ended(&'a Ended),
    /// Guest memory is not registered with the rings, although that is wanted where it is
    /// possible. Said once.
    NoFixedBuffers(Errno),
    /// Where the packed rings of a network device are is not kept: its guest loses the network when
    /// this process is killed.
    NoPositions(&'a PositionsError),
    /// A driver kicks, and its ring stays empty. Said once a session.
    EmptyRing {
        /// Of its queues, from 0.
        queue: u16,
    },
    /// A TAP's queue is to be kept under this name by a service manager, so that the link stays up while this
    /// process is down.
    KeepTap {
        /// The name.
        name: &'a str,
        /// The queue.
        queue: BorrowedFd<'a>,
    },
    /// A TAP's queue of this name is of no device any more: whoever keeps it keeps it busy.
    ReleaseTap {
        /// The name.
        name: &'a str,
    },
}

/// Is told of devices by their names, from whichever thread notices.
pub type Report = dyn Fn(&str, Notice<'_>) + Send + Sync;

/// Hears events until the data plane ends; of those that came too fast it hears how many there were.
pub fn follow(mut events: broadcast::Receiver<Event>, mut heard: impl FnMut(&Event)) {
    loop {
        match events.blocking_recv() {
            Ok(event) => heard(&event),
            Err(RecvError::Lagged(count)) => heard(&Event::EventsLost { count }),
            Err(RecvError::Closed) => return,
        }
    }
}

/// What can be done with a data plane.
pub trait Plane: Send + Sync {
    /// Starts an IOThread.
    ///
    /// # Errors
    /// The name is taken, there are too many, or the thread does not start.
    fn add_iothread(&self, iothread: IoThread) -> Result<(), PlaneError>;

    /// Ends an IOThread that serves no queue.
    ///
    /// # Errors
    /// It is not there, or a mapping names it.
    fn remove_iothread(&self, iothread: &IoThreadName) -> Result<(), PlaneError>;

    /// Lets an IOThread run on these CPUs only; on any if there are none.
    ///
    /// # Errors
    /// It is not there, or the kernel refuses.
    fn pin_iothread(&self, iothread: &IoThreadName, cpus: &[CpuId]) -> Result<(), PlaneError>;

    /// Says whether policy leaves an IOThread's queues alone.
    ///
    /// # Errors
    /// It is not there.
    fn lock_iothread(&self, iothread: &IoThreadName, locked: bool) -> Result<(), PlaneError>;

    /// Adds a device; unchecked, for only the plane knows its IOThreads.
    ///
    /// # Errors
    /// The device breaks a rule, its name or socket is taken, or its image cannot be used.
    fn add_device(&self, device: wire::Device, handed: HandedFds) -> Result<(), PlaneError>;

    /// Disconnects a device's front end and removes the device.
    ///
    /// # Errors
    /// It is not there.
    fn remove_device(&self, device: &DiskName) -> Result<(), PlaneError>;

    /// Adds a network device; unchecked likewise. A TAP's queues have to be handed over.
    ///
    /// # Errors
    /// It breaks a rule, its name, socket or address is taken, an IOThread could not keep what it is promised,
    /// or its link cannot be had.
    fn add_nic(&self, nic: wire::Nic, handed: HandedFds) -> Result<(), PlaneError>;

    /// Disconnects a network device's front end and removes the device.
    ///
    /// # Errors
    /// It is not there.
    fn remove_nic(&self, nic: &DiskName) -> Result<(), PlaneError>;

    /// Makes a network.
    ///
    /// # Errors
    /// The name is taken, or there are too many.
    fn add_network(&self, network: Network) -> Result<(), PlaneError>;

    /// Removes a network.
    ///
    /// # Errors
    /// It is not there, or a device is in it.
    fn remove_network(&self, network: &Name) -> Result<(), PlaneError>;

    /// Looks at a device's size again, or changes it, and tells the front end. The new size.
    ///
    /// # Errors
    /// It is not there, cannot have that size, or would be smaller, unless `shrink` says that it may.
    fn resize_device(
        &self,
        device: &DiskName,
        size: Option<Bytes>,
        shrink: bool,
    ) -> Result<Bytes, PlaneError>;

    /// The IOThreads of a device's queues.
    ///
    /// # Errors
    /// It is not there.
    fn mapping(&self, device: &DiskName) -> Result<Mapping, PlaneError>;

    /// Moves a device's queues to where `entries` say; they are checked first, so all of them or
    /// none.
    ///
    /// # Errors
    /// The device is not there, or the entries are no mapping for it.
    fn set_mapping(&self, device: &DiskName, entries: &[Entry]) -> Result<(), PlaneError>;

    /// Moves one queue and says how long nobody served it.
    ///
    /// # Errors
    /// Device, queue or IOThread is not there, or the queue is on its way already.
    fn move_queue(
        &self,
        device: &DiskName,
        queue: u16,
        to: &IoThreadName,
    ) -> Result<Nanos, PlaneError>;

    /// Makes a schedule, or changes the service curve of one while its disks' I/O runs. Whether it
    /// is new.
    ///
    /// # Errors
    /// There are too many.
    fn set_schedule(&self, schedule: Schedule) -> Result<bool, PlaneError>;

    /// Removes a schedule.
    ///
    /// # Errors
    /// It is not there, or a device is in it.
    fn remove_schedule(&self, schedule: &Name) -> Result<(), PlaneError>;

    /// Gives a device another promise, weight or limit, joins it to a schedule or takes it out of
    /// one, while I/O runs. Within one schedule, and with the same tasks, nothing waits for it; else
    /// each queue pauses until what it has in flight has ended.
    ///
    /// # Errors
    /// The device or the schedule is not there.
    fn set_qos(
        &self,
        device: &DiskName,
        qos: Option<Qos>,
        admission: Admission,
    ) -> Result<(), PlaneError>;

    /// Limits a direction of a network device to another rate, or to none, and promises what that says, while frames flow. The
    /// new limit begins with a full burst.
    ///
    /// # Errors
    /// The device is not there, or an IOThread could not keep the promise: nothing is changed.
    fn set_nic_rate(
        &self,
        nic: &DiskName,
        direction: QueueDirection,
        rate: Option<NicRate>,
    ) -> Result<(), PlaneError>;

    /// Has another policy decide how many IOThreads there are and which queue goes where. What the
    /// one before has changed stays.
    ///
    /// # Errors
    /// The settings break a rule.
    fn set_policy(&self, settings: wire::IoCores) -> Result<(), PlaneError>;

    /// What is served now, as the configuration that would have it served after the next start.
    fn configuration(&self) -> Configuration;

    /// The policy in force.
    fn policy(&self) -> PolicyState;

    /// What policies have decided after the decision of this number, of the last
    /// [`DECISIONS_KEPT`](crate::monitor::DECISIONS_KEPT).
    fn decisions(&self, after: u64) -> Vec<Decision>;

    /// All there is, by name. Does not wait for any IOThread.
    fn observe(&self) -> Observation;

    /// What happens from now on.
    fn events(&self) -> broadcast::Receiver<Event>;
}

/// How many events a slow reader may be behind before it loses some.
pub const EVENTS_KEPT: usize = 256;

/// What was handed over with a device.
#[derive(Debug, Default)]
pub struct HandedFds {
    /// The image, open.
    pub image: Option<OwnedFd>,
    /// A listening socket.
    pub socket: Option<OwnedFd>,
    /// A TAP's queues, one for each pair.
    pub taps: Vec<OwnedFd>,
}

/// Whether a promise has to fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is refused if it does not.
    Test,
    /// Somebody else has seen to that, or wants it all the same.
    Forced,
}

/// Everything at one time.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// When the data plane started, since 1970, UTC.
    pub started: Nanos,
    /// By name.
    pub iothreads: Vec<IoThreadState>,
    /// By name.
    pub devices: Vec<ObservedDevice>,
    /// By name.
    pub nics: Vec<ObservedNic>,
    /// By name.
    pub schedules: Vec<ScheduleState>,
    /// The policy in force.
    pub policy: Policy,
    /// What policies have decided, by kind and outcome.
    pub decisions: BTreeMap<(&'static str, Outcome), u64>,
    /// Queues that have gone to another IOThread, by a policy or an operator.
    pub moves: u64,
}

/// A network device at one time.
#[derive(Debug, Clone)]
pub struct ObservedNic {
    /// As the control API says it.
    pub state: NicState,
    /// What its queues have done; they go on.
    pub stats: Vec<Arc<QueueStats>>,
}

/// A device at one time.
#[derive(Debug, Clone)]
pub struct ObservedDevice {
    /// Its name.
    pub name: DiskName,
    /// Its VM.
    pub vm: VmName,
    /// Its socket's path, if it has one.
    pub socket: Option<PathBuf>,
    /// Whether a front end is connected.
    pub connected: bool,
    /// Its size.
    pub capacity: Bytes,
    /// Whether writes are refused.
    pub read_only: bool,
    /// From queue 0.
    pub queues: Vec<ObservedQueue>,
    /// Its part of the physical device.
    pub qos: Option<QosState>,
    /// Processes that use it by slots, if it has a socket for them.
    pub slots: Option<SlotsState>,
}

/// A virtqueue at one time; its statistics go on.
#[derive(Debug, Clone)]
pub struct ObservedQueue {
    /// Its number, which no other one ever has.
    pub id: u32,
    /// Its IOThread.
    pub iothread: IoThreadName,
    /// What it is doing.
    pub activity: Activity,
    /// What it has done.
    pub stats: Arc<QueueStats>,
}

impl ObservedQueue {
    fn state(&self, index: u16) -> QueueState {
        let stats = self.stats.snapshot();
        QueueState {
            index,
            id: self.id,
            iothread: self.iothread.clone(),
            state: self.activity,
            in_flight: stats.in_flight,
            operations: stats.operations,
            read_bytes: stats.read_bytes,
            written_bytes: stats.written_bytes,
            errors: stats.errors,
            kicks: stats.kicks,
            calls: stats.calls,
            busy_ns: stats.busy,
            wait: stats.wait.summary(),
            service: stats.service.summary(),
            response: stats.response.summary(),
        }
    }
}

impl ObservedDevice {
    /// Responses of all queues.
    fn responses(&self) -> Histogram {
        let mut all = Histogram::new();
        for queue in &self.queues {
            for (end, count) in queue.stats.responses().buckets() {
                all.record(end, count);
            }
        }
        all
    }
}

impl Observation {
    /// As the control API says it, at `time` since 1970.
    #[must_use]
    pub fn snapshot(&self, time: Nanos) -> Snapshot {
        let devices = self.devices.iter().map(|device| DeviceState {
            name: device.name.clone(),
            vm: device.vm.clone(),
            socket: device.socket.clone(),
            connected: device.connected,
            capacity: device.capacity,
            read_only: device.read_only,
            queues: (0..).zip(&device.queues).map(|(index, queue)| queue.state(index)).collect(),
            responses: device.responses(),
            qos: device.qos.clone(),
            slots: device.slots.clone(),
        });
        Snapshot {
            time_ns: time,
            started_ns: self.started,
            iothreads: self.iothreads.clone(),
            devices: devices.collect(),
            nics: self.nics.iter().map(|nic| nic.state.clone()).collect(),
            schedules: self.schedules.clone(),
        }
    }
}

impl ScheduleStatus {
    fn state(&self, name: Name) -> ScheduleState {
        ScheduleState {
            name,
            channels: self.device.channels,
            request_ns: self.device.request,
            kib_ns: self.device.kib,
            flush_ns: self.device.flush,
            waiting: self.waiting as u64,
            running: self.running,
            background: self.background,
            background_bound: self.background_bound,
            withheld_ns: self.withheld,
            usage: DeviceUsage {
                used_ns: Nanos::new(self.usage.used),
                cost_ns: Nanos::new(self.usage.cost),
                requests: self.usage.requests,
                flushes: self.usage.flushes,
                alone: self.usage.alone,
            },
            stalls: StallsState {
                count: self.stalls.count,
                time_ns: Nanos::new(self.stalls.time),
                longest_ns: Nanos::new(self.stalls.longest),
                last: self.stalls.last.map(stall),
                ongoing_ns: self.stalled,
            },
        }
    }
}

/// A stall by the time of day.
pub(crate) fn stall(Stall { begin, length, in_flight }: Stall) -> StallState {
    let ago = Nanos::new(crate::clock::now()).saturating_sub(begin);
    let time = Nanos::from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
    StallState { begin_ns: time.saturating_sub(ago), length_ns: length, in_flight }
}

impl ClassStatus {
    pub(crate) const fn demand(&self) -> Demand {
        match self.demand {
            rtvirtio_qos::Demand::Unknown => Demand::Unknown,
            rtvirtio_qos::Demand::Tried => Demand::Tried,
            rtvirtio_qos::Demand::More => Demand::More,
            rtvirtio_qos::Demand::NoMore => Demand::NoMore,
        }
    }

    pub(crate) fn had(&self) -> Had {
        let of = |kind: Kind| {
            let Account { requests, bytes, cost } = self.accounts[kind as usize];
            Consumption { requests, bytes: Bytes::new(bytes), cost_ns: Nanos::new(cost) }
        };
        Had {
            reads: of(Kind::Read),
            writes: of(Kind::Write),
            flushes: of(Kind::Flush),
            discards: of(Kind::Discard),
            kept: self.responses.in_time,
            late: self.responses.late,
            late_in_stalls: self.responses.late_in_stalls,
        }
    }
}

/// Why a change is refused. Nothing has changed then, unless the text says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaneError {
    /// No such device.
    #[error("there is no device \"{0}\"")]
    NoDevice(DiskName),
    /// No such network device.
    #[error("there is no nic \"{0}\"")]
    NoNic(DiskName),
    /// No such IOThread.
    #[error("there is no iothread \"{0}\"")]
    NoIoThread(IoThreadName),
    /// No such schedule.
    #[error("there is no schedule \"{0}\"")]
    NoSchedule(Name),
    /// The schedule is used.
    #[error("schedule \"{schedule}\" is that of device \"{device}\"")]
    ScheduleInUse {
        /// The schedule.
        schedule: Name,
        /// The first device in it.
        device: DiskName,
    },
    /// CPUs that this process does not have.
    #[error("{what}: {source}")]
    Cpus {
        /// What they were for.
        what: String,
        /// Which, and those that it has.
        source: PinError,
    },
    /// What is to be promised does not fit beside what is promised already.
    #[error("device \"{device}\" cannot be promised that: {reason}")]
    NotAdmitted {
        /// The device.
        device: DiskName,
        /// Why.
        reason: Refusal,
    },
    /// No such queue.
    #[error("device \"{device}\" has {queues} queues, and no queue {queue}")]
    NoQueue {
        /// The device.
        device: DiskName,
        /// Its queues.
        queues: u16,
        /// What was asked for.
        queue: u16,
    },
    /// The name of a device is taken.
    #[error("there is a device \"{0}\" already")]
    DeviceExists(DiskName),
    /// No such network.
    #[error("there is no network \"{0}\"")]
    NoNetwork(Name),
    /// The name of a network is taken.
    #[error("there is a network \"{0}\" already")]
    NetworkExists(Name),
    /// Devices are in the network.
    #[error("network \"{network}\" has {ports} nics")]
    NetworkInUse {
        /// The network.
        network: Name,
        /// How many.
        ports: usize,
    },
    /// The name of an IOThread is taken.
    #[error("there is an iothread \"{0}\" already")]
    IoThreadExists(IoThreadName),
    /// A device listens there.
    #[error("socket {} is that of device \"{device}\"", socket.display())]
    SocketInUse {
        /// The socket.
        socket: PathBuf,
        /// Whose it is.
        device: DiskName,
    },
    /// What was handed over cannot be what the device needs.
    #[error("{0}")]
    Handed(String),
    /// The IOThread has queues.
    #[error("iothread \"{iothread}\" has {queues} queues")]
    IoThreadInUse {
        /// The IOThread.
        iothread: IoThreadName,
        /// How many queues are mapped to it.
        queues: u32,
    },
    /// There is no other IOThread.
    #[error("iothread \"{0}\" is the only one, and a configuration needs one")]
    LastIoThread(IoThreadName),
    /// A queue is on its way.
    #[error("queue {queue} of device \"{device}\" is being moved or stopped")]
    QueueBusy {
        /// The device.
        device: DiskName,
        /// The queue.
        queue: u16,
    },
    /// What lies behind its new end would be lost.
    #[error("{device} has {from}: what lies behind {to} would be lost")]
    Shrinks {
        /// The device.
        device: DiskName,
        /// Its size.
        from: Bytes,
        /// The size that was asked for.
        to: Bytes,
    },
    /// There are as many as there may be.
    #[error("there are {limit} {what} already")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        limit: usize,
    },
    /// A device or IOThread breaks a rule.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Entries that are no mapping.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The kernel, or a file, does not allow it.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl PlaneError {
    /// What to do about it, in one line, if that is known.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NoDevice(_) => "list them: rtvirtio ctl device list".to_owned(),
            Self::NoNic(_) => "list them: rtvirtio ctl nic list".to_owned(),
            Self::NoIoThread(_) => "list them: rtvirtio ctl iothread list".to_owned(),
            Self::Cpus { .. } => {
                "name others, bring them online (chcpu --enable N), or let the service have them \
                 (AllowedCPUs= in a drop-in of its unit)"
                    .to_owned()
            }
            Self::NoSchedule(name) => format!(
                "make it: rtvirtio ctl schedule set {name} --channels N --request-ns NS --kib-ns NS"
            ),
            Self::NotAdmitted { .. } => {
                "ask for what would fit, take a promise from another device, or promise it all the \
                 same: rtvirtio ctl qos --force"
                    .to_owned()
            }
            Self::ScheduleInUse { device, .. } => {
                format!("take it out first: rtvirtio ctl qos {device} --off")
            }
            Self::NoQueue { queues, .. } => {
                format!("queues count from 0 to {}", queues.saturating_sub(1))
            }
            Self::DeviceExists(_) | Self::IoThreadExists(_) | Self::NetworkExists(_) => {
                "choose another name".to_owned()
            }
            Self::NoNetwork(_) => "list them: rtvirtio ctl network list".to_owned(),
            Self::NetworkInUse { .. } => {
                "remove them first: rtvirtio ctl nic remove NAME".to_owned()
            }
            Self::SocketInUse { .. } => "choose another socket".to_owned(),
            Self::Handed(_) => {
                "rtvirtio ctl hands over what a device needs: ctl nic add, ctl device add"
                    .to_owned()
            }
            Self::IoThreadInUse { .. } => {
                "move them first: rtvirtio ctl mapping move DEVICE QUEUE IOTHREAD".to_owned()
            }
            Self::LastIoThread(_) => {
                "make another one first: rtvirtio ctl iothread create NAME".to_owned()
            }
            Self::QueueBusy { .. } => "try again".to_owned(),
            Self::Shrinks { device, to, .. } => format!(
                "if that is what you want: rtvirtio ctl device resize {device} {} --shrink",
                to.get()
            ),
            Self::TooMany { .. } => "remove one first".to_owned(),
            Self::Fault(fault) => fault.hint(),
            Self::Mapping(error) => error.hint(),
            Self::Io { .. } => return None,
        })
    }
}

#[cfg(test)]
mod tests;

/// Rights of a device's socket: the service's user and group. A VMM of another user joins the
/// group, or the socket is handed over.
const SOCKET_MODE: u32 = 0o660;

fn io(what: impl Into<String>, source: std::io::Error) -> PlaneError {
    PlaneError::Io { what: what.into(), source }
}

fn refused(what: String, error: impl std::error::Error + Send + Sync + 'static) -> PlaneError {
    io(what, std::io::Error::other(error))
}
