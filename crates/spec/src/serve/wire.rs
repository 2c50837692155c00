//! The tables as they are written, in TOML or JSON: known keys of the right type, checked no
//! further.

use std::fmt;
use std::path::PathBuf;

use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, VmName};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::IoPriority;
use crate::mapping::Entry;

/// The whole file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a serve configuration")]
pub struct Configuration {
    /// The format's version: 1.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub version: i64,
    /// Whose rights it keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
    /// Where it is controlled; without it, nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<Control>,
    /// What decides how many IOThreads there are; without it, nobody but the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iocores: Option<IoCores>,
    /// IOThreads, 0 to 64; at least one where there are devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub iothread: Vec<IoThread>,
    /// Schedules of physical devices, 0 to 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedule: Vec<Schedule>,
    /// Disks, 0 to 1024.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device: Vec<Device>,
    /// Networks between network devices, 0 to 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<Network>,
    /// Network devices, 0 to 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nic: Vec<Nic>,
}

/// `[[network]]`: a switch between network devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[network]]")]
pub struct Network {
    /// Its name.
    pub name: Name,
    /// Frames per second that each pair of a device's queues may send to more than one device: broadcasts,
    /// multicasts, and frames to addresses that nobody has; 1,000 if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 100_000_000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_broadcast: Option<u64>,
}

/// `[[nic]]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[nic]]")]
pub struct Nic {
    /// Its name.
    pub name: Name,
    /// Its VM.
    pub vm: VmName,
    /// Path of the socket.
    pub socket: PathBuf,
    /// Name of the host's TAP; or `stream`, `dgram` or `network`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Path of a unix stream socket at which somebody listens for frames with their lengths, such as passt or QEMU's
    /// `-netdev stream`; or one of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<PathBuf>,
    /// Two unix datagram sockets, of which each datagram is a frame, as QEMU's `-netdev dgram` has them; or one of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dgram: Option<Dgram>,
    /// Name of a `[[network]]`; or one of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Name>,
    /// Its VLAN in the network, of which the guest sees no tag.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 4094)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Its VLANs in the network, whose tags the guest sends and receives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trunk: Option<Vec<u16>>,
    /// Whether it sends to the network under its own address only; true if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anti_spoofing: Option<bool>,
    /// Its address, for front ends that ask for it; made of the names if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Bytes of the longest packet; the TAP's, or 1500 without one, if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 68, max = 65535)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Pairs of queues; 1 if nothing says. More need a TAP with `multi_queue`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 8)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u32>,
    /// Its trust domain, as of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<Name>,
    /// Most guest memory that its front end may share; what the host has, if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<Size>,
    /// As of a device: virtqueue 2 i receives and 2 i + 1 transmits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapping: Option<Vec<Entry>>,
    /// The most that goes to the guest; anything if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rx: Option<NicRate>,
    /// The most that comes from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tx: Option<NicRate>,
}

/// `dgram = { local = ..., remote = ... }`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table { local = ..., remote = ... }")]
pub struct Dgram {
    /// Path of the socket that is made here, which the peer sends to.
    pub local: PathBuf,
    /// Path of the peer's, which frames are sent to, and from which alone they are taken.
    pub remote: PathBuf,
}

/// `rx = { ... }`, `tx = { ... }`: of all pairs of queues together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table { max_frames = ..., max_mbit = ... }")]
pub struct NicRate {
    /// Frames per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_frames: Option<u64>,
    /// 10^6 bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_mbit: Option<u64>,
    /// How far ahead of the rate one may be that was silent, ms; 5 if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_ms: Option<u64>,
    /// Promise: how long frames within the rate wait for their IOThread at most, us; nothing is promised if nothing
    /// says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within_us: Option<u64>,
}

/// `[service]`
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [service]")]
pub struct Service {
    /// Name of the user to become.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Name of that user's group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Whether capabilities and system calls are given up.
    #[serde(default = "yes")]
    pub sandbox: bool,
}

/// `[control]`
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [control]")]
pub struct Control {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Number of a group that may use it too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
}

/// `[iocores]`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [iocores]")]
pub struct IoCores {
    /// What decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Where IOThreads may be added, in the order in which CPUs are taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<CpuId>>,
    /// Fewest IOThreads; 1 if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_iothreads: Option<u32>,
    /// Most IOThreads; as many as `cpus` if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_iothreads: Option<u32>,
    /// Whether CPUs may be taken from vCPUs and given back; no if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub borrow: Option<bool>,
}

/// What decides how many IOThreads there are and which queue goes where.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Nobody but the operator.
    #[default]
    Static,
    /// Queues are spread evenly over the IOThreads that there are.
    RoundRobin,
    /// Both follow the load.
    Dynamic,
    /// As `dynamic`, but its decisions are only logged.
    Advise,
    /// IOcm's published policy, for comparison.
    Iocm,
    /// SPDK's dynamic scheduler, likewise.
    Spdk,
}

impl Policy {
    /// All.
    pub const ALL: [Self; 6] =
        [Self::Static, Self::RoundRobin, Self::Dynamic, Self::Advise, Self::Iocm, Self::Spdk];

    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::RoundRobin => "round-robin",
            Self::Dynamic => "dynamic",
            Self::Advise => "advise",
            Self::Iocm => "iocm",
            Self::Spdk => "spdk",
        }
    }

    /// Whether it adds IOThreads, so that it must know where.
    #[must_use]
    pub const fn needs_cpus(self) -> bool {
        !matches!(self, Self::Static | Self::RoundRobin)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Policy {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str =
            "not a policy: write static, round-robin, dynamic, advise, iocm or spdk";
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or(WRONG)
    }
}

/// How an IOThread waits for drivers and disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Completion {
    /// It sleeps until it is woken.
    Interrupt,
    /// It polls all the time, whatever that costs others.
    Poll,
    /// It polls while that pays and a CPU is idle, else it sleeps.
    #[default]
    Adaptive,
}

impl Completion {
    /// All.
    pub const ALL: [Self; 3] = [Self::Interrupt, Self::Poll, Self::Adaptive];

    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Completion {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "no way to wait: write interrupt, poll or adaptive";
        Self::ALL.into_iter().find(|completion| completion.name() == text).ok_or(WRONG)
    }
}

/// Whose an adaptive IOThread's CPU is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CorePolicy {
    /// Its own: it polls all the time.
    Dedicated,
    /// Everybody's: it polls for as long as it has learned, while there is an idle CPU.
    #[default]
    Shared,
    /// Its own while nobody else wants it and what it waits for comes soon enough for polling to pay,
    /// else everybody's.
    Auto,
}

impl CorePolicy {
    /// All.
    pub const ALL: [Self; 3] = [Self::Dedicated, Self::Shared, Self::Auto];

    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dedicated => "dedicated",
            Self::Shared => "shared",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for CorePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for CorePolicy {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "not a core's policy: write dedicated, shared or auto";
        Self::ALL.into_iter().find(|core| core.name() == text).ok_or(WRONG)
    }
}

/// `[[iothread]]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[iothread]]")]
pub struct IoThread {
    /// Its name.
    pub name: IoThreadName,
    /// CPUs that it may run on; none: any.
    #[serde(default)]
    pub cpus: Vec<CpuId>,
    /// How it waits; adaptive if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion: Option<Completion>,
    /// Whose its CPU is, if it is adaptive; everybody's if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<CorePolicy>,
    /// The longest that it polls, µs.
    #[cfg_attr(feature = "schema", schemars(range(max = 1000000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_max_us: Option<u64>,
    /// Factor of growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_grow: Option<u32>,
    /// Divisor; 0: at once to nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_shrink: Option<u32>,
    /// Trust domain of the devices that it serves; none: those that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<Name>,
}

/// `[[schedule]]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[schedule]]")]
pub struct Schedule {
    /// Its name.
    pub name: Name,
    /// Requests that the device serves at a time.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 65536)))]
    pub channels: u32,
    /// What a read or write takes of a channel before its bytes, ns.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 10000000000u64)))]
    pub request_ns: u64,
    /// What each KiB takes further, ns.
    #[cfg_attr(feature = "schema", schemars(range(max = 10000000000u64)))]
    pub kib_ns: u64,
    /// What a flush or discard takes, ns; as long as `request_ns` if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 10000000000u64)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush_ns: Option<u64>,
}

/// `[[device]]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table [[device]]")]
pub struct Device {
    /// Its name.
    pub name: DiskName,
    /// Its VM.
    pub vm: VmName,
    /// Path of the socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Name of a listening socket that systemd hands over, instead of `socket`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_activation: Option<Name>,
    /// Path of a socket for processes of this host that use the disk by slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<PathBuf>,
    /// Virtqueues; 1 if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 64)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u32>,
    /// Whether writes are refused.
    #[serde(default)]
    pub read_only: bool,
    /// What GET_ID answers; the name's first 20 bytes if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Whether the guest is offered a write cache.
    #[serde(default = "yes")]
    pub write_cache: bool,
    /// Whether guest memory is registered with the rings.
    #[serde(default)]
    pub fixed_buffers: FixedBuffers,
    /// Its trust domain: it shares IOThreads with devices of the same one only, whatever a policy does. None:
    /// that of all devices that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<Name>,
    /// Most guest memory that its front end may share; what the host has, if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<Size>,
    /// Where its data lies.
    pub engine: Engine,
    /// QEMU's `iothread-vq-mapping`; round robin over all IOThreads if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapping: Option<Vec<Entry>>,
    /// Its part of the physical device; none: its requests start as they come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qos: Option<Qos>,
}

/// `qos = { schedule = "...", ... }`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table { schedule = \"...\" }")]
pub struct Qos {
    /// Name of the physical device's schedule.
    pub schedule: Name,
    /// Its part of what promises leave; 100 if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Promised: how long a request within the rate may take, µs.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 60000000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_us: Option<u64>,
    /// Promised: requests a second.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 100000000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Promised: bytes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Promised: requests that may come at once; 1 if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 65536)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
    /// Limit: requests a second, promised ones among them; no less than is promised.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 100000000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_iops: Option<u64>,
    /// Limit: bytes a second, promised ones among them; no less than is promised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bandwidth: Option<Size>,
    /// Limit: requests that may come at once; 1 if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 65536)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_burst: Option<u32>,
    /// Tasks of the guest that it tells apart, each with a promise of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<Task>,
}

/// `tasks = [{ ioprio = "rt/0", ... }]`: requests that a guest marks with this priority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table { ioprio = \"rt/0\" }")]
pub struct Task {
    /// What the guest marks them with.
    pub ioprio: IoPriority,
    /// Promised: how long a request within the rate may take, µs.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 60000000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_us: Option<u64>,
    /// Promised: requests a second.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 100000000)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Promised: bytes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Size>,
    /// Promised: requests that may come at once; 1 if nothing says.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 65536)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
}

const fn yes() -> bool {
    true
}

/// `engine = { type = "...", ... }`: the keys of all types; which belong to which is checked later.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, expecting = "a table { type = \"file\", path = \"...\" }")]
pub struct Engine {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: EngineKind,
    /// file: the image or block device; nvme: the namespace's generic device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// file: O_DIRECT; yes if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
    /// file: bytes of a logical block: 512, 1024, 2048 or 4096; a block device's own, or 512 of a file, if
    /// nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// file: raw is all there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// file: how requests reach the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aio: Option<Aio>,
    /// nvme: whether the device is polled; no if nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll: Option<bool>,
    /// file, nvme: when it is locked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lock: Option<ImageLock>,
    /// file, nvme: the first byte of the part that is the disk, whose size is `size`; all of it if
    /// nothing says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<Size>,
    /// ram, ssd: its size; file, nvme: that of the part at `offset`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// ram, ssd: CPU time of each request, µs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_us: Option<u32>,
    /// ram, ssd: and of each KiB of it, ns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_kib_ns: Option<u32>,
    /// ssd: the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ssd: Option<String>,
    /// ssd: seed of its service times.
    #[cfg_attr(feature = "schema", schemars(range(max = 9223372036854775807u64)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// ssd: what goes wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<Faults>,
}

/// The types of engines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// A raw image or a block device.
    #[default]
    File,
    /// A namespace of an NVMe device.
    Nvme,
    /// RAM.
    Ram,
    /// An emulated solid-state disk.
    Ssd,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::File => "file",
            Self::Nvme => "nvme",
            Self::Ram => "ram",
            Self::Ssd => "ssd",
        })
    }
}

/// Formats of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// A disk's bytes as they are.
    Raw,
}

/// How a file's requests are handed to the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// By io_uring where the kernel allows it, else by threads.
    #[default]
    Auto,
    /// By io_uring or not at all.
    IoUring,
    /// By a pool of threads.
    Threads,
}

/// When an image is locked, as QEMU locks it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ImageLock {
    /// As long as the device exists.
    #[default]
    Always,
    /// While a front end is connected: a guest can migrate between two daemons on one image.
    Session,
    /// Never: somebody else sees to it that nobody else writes, as between parts of one image.
    Off,
}

/// Whether guest memory is registered with the rings as fixed buffers, which pins it. A guest that gives pages back, by a balloon
/// or by free page reporting, gets others in their place later, and what is read into those that are registered does not reach it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum FixedBuffers {
    /// Where it is possible; if not, that is said once.
    Auto,
    /// Or the front end is refused.
    On,
    /// Not; as by default.
    #[default]
    Off,
}

/// Faults of an emulated disk; 0: none of the kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields, expecting = "a table { error_every = 1000 }")]
pub struct Faults {
    /// Each request of that number fails with EIO.
    pub error_every: u32,
    /// Each write of that number fails with ENOSPC.
    pub no_space_every: u32,
    /// Each request of that number is short once: half of it is done at first.
    pub short_every: u32,
    /// Each request of that number waits for `stall_ms`.
    pub stall_every: u32,
    /// How long a stall takes, ms.
    pub stall_ms: u32,
}

/// A number of bytes: a whole number, or a text such as `"64M"` (K, M, G, T: powers of 1024).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub Bytes);

impl std::str::FromStr for Size {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "not a size: write \"64M\" (K, M, G, T) or bytes";
        let (digits, shift) = match text.as_bytes().last() {
            Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
            Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
            Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
            Some(b't' | b'T') => (&text[..text.len() - 1], 40),
            _ => (text, 0),
        };
        // `parse` alone would take a sign.
        let number = Some(digits).filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
        let number = number.and_then(|d| d.parse::<u64>().ok());
        let bytes = number.and_then(|n| n.checked_mul(1 << shift)).ok_or(WRONG)?;
        Ok(Self(Bytes::new(bytes)))
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Size {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "oneOf": [
                { "type": "integer", "minimum": 0 },
                { "type": "string", "pattern": "^[0-9]+[kKmMgGtT]?$" }
            ]
        })
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = Size;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"64M\" or a number of bytes")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Size, E> {
        Ok(Size(Bytes::new(bytes)))
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
        let found = de::Unexpected::Signed(bytes);
        u64::try_from(bytes)
            .map(|b| Size(Bytes::new(b)))
            .map_err(|_| E::invalid_value(found, &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}
