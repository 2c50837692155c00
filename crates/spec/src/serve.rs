//! What the data plane serves: the configuration of `rtvirtio serve` (TOML).
//!
//! A configuration arrives as hostile text. [`parse`] turns it into a [`Configuration`] in which
//! every name and socket is unique, every number is in range and every queue has an IOThread, or
//! into an error with file, line and a hint. The same tables, as [`wire`] types, are what the
//! control API takes in JSON: [`Device::new`] and [`IoThread::new`] check them for both.
//!
//! Properties (tests of the same name): `example_is_read_as_written`,
//! `each_fault_is_named_with_its_line_and_a_hint`, `device_is_written_and_read_back`,
//! `configuration_is_written_and_read_back`.

mod check;
mod error;
mod iocores;
mod ioprio;
mod parse;
mod promises;
mod qos;
pub mod wire;
mod write;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, Nanos, VmName};

pub use error::{Fault, ServeError, Subject};
pub use iocores::IoCores;
pub use ioprio::IoPriority;
pub use parse::parse;
pub use promises::{NotKept, admit};
pub use qos::{MAX_CHANNELS, MAX_TASKS, Promise, Qos, Rate, Schedule, Task};
pub use wire::{Aio, Completion, CorePolicy, Faults, FixedBuffers, ImageLock, Policy};
pub use write::to_toml;

pub use crate::mapping::MAX_QUEUES;
use crate::mapping::Mapping;
pub use rtvirtio_frames::forwarding::{MAX_VLAN, Vlans};

/// Most devices of one data plane.
pub const MAX_DEVICES: usize = 1024;
/// Most network devices of one data plane.
pub const MAX_NICS: usize = 256;
/// Most networks of one data plane.
pub const MAX_NETWORKS: usize = 64;
/// Most pairs of queues of a network device.
pub const MAX_PAIRS: u16 = 8;
/// Longest name of a network device of the host (`IFNAMSIZ` less its terminator).
pub const MAX_TAP_BYTES: usize = 15;
/// Shortest MTU (RFC 791).
pub const MIN_MTU: u16 = 68;
/// Most schedules of one data plane.
pub const MAX_SCHEDULES: usize = 64;
/// Most IOThreads of one data plane.
pub const MAX_IOTHREADS: usize = 64;
/// Longest path of a unix socket (`sun_path` less its terminator).
pub const MAX_SOCKET_BYTES: usize = 107;
/// Longest name of a user or group (`LOGIN_NAME_MAX` less its terminator).
pub const MAX_USER_BYTES: usize = 255;
/// Longest serial number (`VIRTIO_BLK_ID_BYTES`).
pub const MAX_SERIAL_BYTES: usize = 20;
/// Highest CPU that can be named (`CPU_SETSIZE`).
pub const MAX_CPU: u32 = 1023;
/// Longest that an IOThread polls before it sleeps.
pub const MAX_POLL: Nanos = Nanos::from_millis(1_000);
/// Largest disk in RAM.
pub const MAX_RAM_BYTES: Bytes = Bytes::new(1 << 40);

/// A checked configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Configuration {
    /// What the process gives up before it serves.
    pub service: Service,
    /// The control API, if it is wanted.
    pub control: Option<Control>,
    /// What decides about IOThreads while it serves.
    pub iocores: IoCores,
    /// At least one.
    pub iothreads: Vec<IoThread>,
    /// Of the physical devices that disks share.
    pub schedules: Vec<Schedule>,
    /// In order of the file; there may be none yet.
    pub devices: Vec<Device>,
    /// Networks between network devices.
    pub networks: Vec<Network>,
    /// Network devices, likewise.
    pub nics: Vec<Nic>,
}

/// What the process gives up before it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// The user that it becomes if it was started by root.
    pub user: Option<String>,
    /// That user's group; the user's own if nothing says.
    pub group: Option<String>,
    /// Whether it gives up capabilities, and system calls that it does not need.
    pub sandbox: bool,
}

impl Default for Service {
    fn default() -> Self {
        Self { user: None, group: None, sandbox: true }
    }
}

/// Where the control API listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    /// An absolute path of at most [`MAX_SOCKET_BYTES`].
    pub socket: PathBuf,
    /// The group that may use it beside root and the service's own user.
    pub group: Option<u32>,
}

/// An IOThread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoThread {
    /// Unique name.
    pub name: IoThreadName,
    /// The CPUs that it may run on, ascending; none: any.
    pub cpus: Vec<CpuId>,
    /// How it polls.
    pub polling: Polling,
    /// Trust domain of the devices that it serves; none: those that name none.
    pub trust: Option<Name>,
}

impl IoThread {
    /// Whether it can be beside these, by what is dedicated to whom.
    ///
    /// # Errors
    /// [`Fault::DedicatedCpus`], [`Fault::CpuTaken`].
    pub fn fits<'a>(&self, others: impl IntoIterator<Item = &'a Self>) -> Result<(), Fault> {
        let owned = self.own_cpu()?;
        for other in others {
            let theirs = other.own_cpu()?;
            let taken = self.cpus.iter().find(|cpu| Some(**cpu) == theirs);
            let shared = owned.as_ref().filter(|cpu| other.cpus.contains(cpu));
            if let Some(&cpu) = taken.or(shared) {
                return Err(Fault::CpuTaken { cpu, other: other.name.clone() });
            }
        }
        Ok(())
    }

    /// The CPU that is dedicated to it.
    fn own_cpu(&self) -> Result<Option<CpuId>, Fault> {
        if self.polling.core != CorePolicy::Dedicated {
            return Ok(None);
        }
        match self.cpus[..] {
            [only] => Ok(Some(only)),
            _ => Err(Fault::DedicatedCpus(self.cpus.len())),
        }
    }
}

/// How an IOThread polls before it sleeps. Of one that adapts: QEMU's `poll-max-ns`, `poll-grow` and
/// `poll-shrink`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Polling {
    /// Whether it polls at all, or does nothing else.
    pub completion: Completion,
    /// Whose its CPU is, if it adapts.
    pub core: CorePolicy,
    /// The longest; zero: it does not poll. Half of it where a disk is waited for.
    pub max: Nanos,
    /// Factor by which the time grows when polling would have paid.
    pub grow: u32,
    /// Divisor by which it shrinks when it did not pay; 0: at once to nothing.
    pub shrink: u32,
}

impl Default for Polling {
    /// QEMU's (`max` for disks, 32,768 ns), but for `shrink` (there 0): one late event costs half of
    /// the time, not all of it.
    fn default() -> Self {
        let (completion, core) = (Completion::Adaptive, CorePolicy::Shared);
        Self { completion, core, max: Nanos::new(65_536), grow: 2, shrink: 2 }
    }
}

/// A disk of a VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// Unique name.
    pub name: DiskName,
    /// Whose it is; VMs have any number of disks.
    pub vm: VmName,
    /// Where its front end connects.
    pub listen: Listen,
    /// Where processes of this host connect that use it by slots: a path as of [`Listen::Path`]. Its data
    /// is a whole file or block device then.
    pub slots: Option<PathBuf>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What GET_ID answers: at most [`MAX_SERIAL_BYTES`] of printable ASCII.
    pub serial: String,
    /// Whether the guest is offered a write cache; without it each write is durable.
    pub write_cache: bool,
    /// Whether guest memory is registered with the rings.
    pub fixed_buffers: FixedBuffers,
    /// Its trust domain: it shares IOThreads with devices of the same one only. None: that of all devices that
    /// name none.
    pub trust: Option<Name>,
    /// Most guest memory that its front end may share; none: what the host has.
    pub max_memory: Option<Bytes>,
    /// Where its data lies.
    pub engine: Engine,
    /// Its queues and their IOThreads.
    pub mapping: Mapping,
    /// Its part of the physical device; none: its requests start as they come.
    pub qos: Option<Qos>,
}

impl Device {
    /// How many virtqueues it has, 1 to [`MAX_QUEUES`].
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.mapping.queues()
    }
}

/// A network between the data plane's own network devices: a switch, whose ports they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Unique name among networks.
    pub name: Name,
    /// Frames per second that each pair of queues may send to more than one port.
    pub max_broadcast: u64,
}

/// Where the frames of a network device go and come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicLink {
    /// A TAP of the host, of a name of at most [`MAX_TAP_BYTES`].
    Tap(String),
    /// A unix stream socket that somebody listens at: a path as of [`Listen::Path`].
    Stream(PathBuf),
    /// A unix datagram socket of the device's own, and the one that its frames go to and come from: two paths as of
    /// [`Listen::Path`].
    Dgram {
        /// What is bound here.
        local: PathBuf,
        /// What the peer has bound, or will have.
        remote: PathBuf,
    },
    /// A network of the data plane's own.
    Network(NetworkPort),
}

/// As a table shows it: `tap0`, `/run/passt.sock`, `lan`, `lan vlan 10`, `lan trunk 10,20`.
impl std::fmt::Display for NicLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tap(tap) => f.write_str(tap),
            Self::Stream(path) | Self::Dgram { remote: path, .. } => {
                write!(f, "{}", path.display())
            }
            Self::Network(NetworkPort { network, vlans, .. }) => match vlans {
                Vlans::Untagged => write!(f, "{network}"),
                Vlans::Access(vlan) => write!(f, "{network} vlan {vlan}"),
                Vlans::Trunk(vlans) => {
                    let vlans: Vec<String> = vlans.iter().map(u16::to_string).collect();
                    write!(f, "{network} trunk {}", vlans.join(","))
                }
            },
        }
    }
}

/// A network device's place in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkPort {
    /// The network.
    pub network: Name,
    /// The VLANs in it, 1 to [`MAX_VLAN`].
    pub vlans: Vlans,
    /// Whether the device sends under its own address only.
    pub anti_spoofing: bool,
}

/// A network device of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Unique name among all devices: mappings are asked for by it.
    pub name: Name,
    /// Whose it is.
    pub vm: VmName,
    /// Where its front end connects: a path as of [`Listen::Path`].
    pub socket: PathBuf,
    /// Where its frames go.
    pub link: NicLink,
    /// Its address: of one device, not of a group.
    pub mac: [u8; 6],
    /// Bytes of the longest packet, [`MIN_MTU`] to 65,535; none: the TAP's, or 1500 of others.
    pub mtu: Option<u16>,
    /// Pairs of queues, 1 to [`MAX_PAIRS`].
    pub pairs: u16,
    /// Its trust domain, as of a device.
    pub trust: Option<Name>,
    /// Most guest memory that its front end may share; none: what the host has.
    pub max_memory: Option<Bytes>,
    /// Its virtqueues, two for each pair, and their IOThreads.
    pub mapping: Mapping,
    /// The most that goes to the guest.
    pub rx: Option<NicRate>,
    /// The most that comes from it.
    pub tx: Option<NicRate>,
}

/// A limit on frames, and a promise of those within it: at least one of the two rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicRate {
    /// Per second.
    pub frames: Option<u64>,
    /// Bits per second.
    pub bits: Option<u64>,
    /// How far ahead of the rate one may be that was silent.
    pub burst: Nanos,
    /// How long frames within the rate wait for their IOThread at most; none: nothing is promised.
    pub within: Option<Nanos>,
}

/// An address as it is written: `52:54:00:12:34:56`.
#[must_use]
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Where a front end connects.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listen {
    /// A socket made there: an absolute path of at most [`MAX_SOCKET_BYTES`].
    Path(PathBuf),
    /// A listening socket handed over under this name: by systemd (`FileDescriptorName=`), or
    /// with the request to add the device.
    Activated(Name),
}

/// Where a disk's data lies.
#[derive(Debug, Clone, PartialEq)]
pub enum Engine {
    /// A raw image file or a block device.
    File(FileEngine),
    /// A namespace of an NVMe device, past the kernel's block layer.
    Nvme(NvmeEngine),
    /// RAM, lost at the end.
    Ram {
        /// Its size, in whole sectors.
        size: Bytes,
        /// What its requests cost on top.
        cpu: CpuCost,
    },
    /// RAM that answers when the model of a solid-state disk says so.
    Ssd(SsdEngine),
}

impl Engine {
    /// When what its data lies in is locked.
    #[must_use]
    pub const fn lock(&self) -> ImageLock {
        match self {
            Self::File(file) => file.lock,
            Self::Nvme(nvme) => nvme.lock,
            Self::Ram { .. } | Self::Ssd(_) => ImageLock::Off,
        }
    }
}

/// A raw image file or a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEngine {
    /// An absolute path.
    pub path: PathBuf,
    /// Whether the host's page cache is bypassed (O_DIRECT).
    pub direct: bool,
    /// How requests are handed to the kernel.
    pub aio: Aio,
    /// When the image is locked against other writers.
    pub lock: ImageLock,
    /// Whether the format was written out: what looks like another one is then not refused.
    pub raw: bool,
    /// Bytes of a logical block; none: a block device's own, 512 of a file.
    pub block_size: Option<u32>,
    /// The part of it that is the disk; none: all.
    pub slice: Option<Slice>,
}

/// A namespace of an NVMe device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeEngine {
    /// An absolute path, such as `/dev/ng0n1`.
    pub path: PathBuf,
    /// Whether the device is polled instead of interrupting.
    pub poll: bool,
    /// When it is locked against other users, by its block device.
    pub lock: ImageLock,
    /// The part of it that is the disk; none: all.
    pub slice: Option<Slice>,
}

/// A part of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Its first byte, in whole sectors.
    pub offset: Bytes,
    /// Its size, in whole sectors.
    pub size: Bytes,
}

/// CPU time that requests cost an IOThread beyond their own, for benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuCost {
    /// Of each request, in whole µs.
    pub request: Nanos,
    /// And of each KiB that it reads or writes.
    pub kib: Nanos,
}

/// An emulated solid-state disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SsdEngine {
    /// Its size, in whole sectors.
    pub size: Bytes,
    /// The name of a model, such as `ref-4x250`.
    pub model: String,
    /// Seed of its service times.
    pub seed: u64,
    /// What goes wrong on purpose.
    pub faults: Faults,
    /// What its requests cost on top.
    pub cpu: CpuCost,
}
