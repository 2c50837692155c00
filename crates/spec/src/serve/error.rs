//! Why a configuration is refused: where, of what, which rule, and a remedy.

use std::fmt;
use std::path::PathBuf;

use rtvirtio_units::{CpuId, DiskName, IoThreadName, Name};

use super::wire::{Completion, EngineKind, Policy};
use super::{
    IoPriority, MAX_CPU, MAX_DEVICES, MAX_IOTHREADS, MAX_NETWORKS, MAX_NICS, MAX_POLL, MAX_QUEUES,
    MAX_RAM_BYTES, MAX_SCHEDULES, MAX_SERIAL_BYTES, MAX_SOCKET_BYTES, MAX_TASKS, NotKept,
};
use crate::mapping::MappingError;
use crate::specification::{MAX_FILE_BYTES, MAX_KEY_PARTS, Plain, Quoted, listed, nearest};

/// Why a file is no configuration. Displays as `file:line:column: device "vm0-root": what is wrong`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{file}:{line}:{column}: {subject}{fault}")]
pub struct ServeError {
    /// The file as the caller named it.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What the fault belongs to.
    pub subject: Subject,
    /// What is wrong.
    pub fault: Box<Fault>,
}

impl ServeError {
    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        self.fault.hint()
    }
}

/// What a fault belongs to. Displays as a prefix of the message, empty for the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The file as a whole.
    File,
    /// An IOThread.
    IoThread(IoThreadName),
    /// A schedule.
    Schedule(Name),
    /// A device.
    Device(DiskName),
    /// A network.
    Network(Name),
    /// A network device.
    Nic(Name),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::IoThread(name) => write!(f, "iothread \"{name}\": "),
            Self::Schedule(name) => write!(f, "schedule \"{name}\": "),
            Self::Device(name) => write!(f, "device \"{name}\": "),
            Self::Network(name) => write!(f, "network \"{name}\": "),
            Self::Nic(name) => write!(f, "nic \"{name}\": "),
        }
    }
}

/// Which rule is broken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// More bytes than are read.
    #[error("the file has {0} bytes, more than {MAX_FILE_BYTES}")]
    TooLarge(usize),
    /// A dotted key without end.
    #[error("a dotted key has more than {MAX_KEY_PARTS} parts")]
    KeyTooDeep,
    /// Not TOML, or a value of the wrong type; the parser's own words.
    #[error("{}", Plain(.0))]
    Toml(String),
    /// A key that its table does not have.
    #[error("unknown key {}", Quoted(key))]
    UnknownKey {
        /// The key.
        key: String,
        /// The table's keys.
        expected: Vec<String>,
    },
    /// A configuration of another version.
    #[error("version is {0}, and this program reads version 1")]
    UnknownVersion(i64),
    /// No IOThread.
    #[error("there is no iothread")]
    NoIoThread,
    /// None that serves devices of this trust domain.
    #[error("there is no iothread {}", .0.as_ref().map_or("without trust".to_owned(), |of| format!("of trust = \"{of}\"")))]
    NoIoThreadOf(Option<Name>),
    /// An IOThread of another trust domain than the device.
    #[error("iothread {0} is of another trust domain")]
    OtherTrust(IoThreadName),
    /// A policy that moves queues between IOThreads, of which some are of trust domains.
    #[error("the policy {0} moves queues between iothreads, and some of these have a trust domain")]
    PolicyAcrossTrust(Policy),
    /// Too many of them.
    #[error("{0} iothreads, more than {MAX_IOTHREADS}")]
    TooManyIoThreads(usize),
    /// Too many of them.
    #[error("{0} devices, more than {MAX_DEVICES}")]
    TooManyDevices(usize),
    /// Too many of them.
    #[error("{0} nics, more than {MAX_NICS}")]
    TooManyNics(usize),
    /// Too many of them.
    #[error("{0} networks, more than {MAX_NETWORKS}")]
    TooManyNetworks(usize),
    /// None of `tap`, `stream`, `dgram` and `network`, or several.
    #[error("a nic has one of tap, stream, dgram and network")]
    WhichLink,
    /// A datagram socket whose frames would come back.
    #[error("local and remote are the same socket")]
    OwnPeer,
    /// A stream whose peer would be this data plane.
    #[error("{} is the socket of {other} of this data plane", Quoted(&socket.to_string_lossy()))]
    OwnSocket {
        /// The socket.
        socket: PathBuf,
        /// Whose it is.
        other: String,
    },
    /// A key of devices in a network, of one on a TAP.
    #[error("this is of a nic in a network, and not of others")]
    OfNetwork,
    /// No such network.
    #[error("there is no network \"{0}\"")]
    NoNetwork(Name),
    /// Both of `vlan` and `trunk`.
    #[error("a nic has one of vlan and trunk, or none")]
    WhichVlan,
    /// A trunk of no VLAN, or with one of them twice.
    #[error("a trunk is one or more VLANs, each once")]
    BadTrunk,
    /// An address of two devices in a network.
    #[error("mac {mac} is that of nic \"{other}\" too")]
    DuplicateMac {
        /// The address.
        mac: String,
        /// The first with it.
        other: Name,
    },
    /// Trust domains of two devices in a network that differ.
    #[error("nic \"{0}\" in the same network is of another trust domain")]
    NetworkAcrossTrust(Name),
    /// No name of a network device.
    #[error("{} is no name of a network device", Quoted(.0))]
    BadTap(String),
    /// No address, or that of a group.
    #[error("{} is no address of a device", Quoted(.0))]
    BadMac(String),
    /// A limit on nothing.
    #[error("{0} has neither max_frames nor max_mbit")]
    NoNicRate(&'static str),
    /// A promise to a network device that its IOThread could not keep.
    #[error(transparent)]
    NotKept(#[from] NotKept),
    /// A TAP of two devices.
    #[error("tap {} is that of nic \"{other}\" too", Quoted(tap))]
    DuplicateTap {
        /// The TAP.
        tap: String,
        /// The first with it.
        other: Name,
    },
    /// Too many of them.
    #[error("{0} schedules, more than {MAX_SCHEDULES}")]
    TooManySchedules(usize),
    /// No such schedule.
    #[error("there is no schedule \"{0}\"")]
    NoSchedule(Name),
    /// A promise of which a part is missing.
    #[error("a promise has deadline_us and one of iops and bandwidth")]
    HalfPromise,
    /// More is promised than the limit lets through.
    #[error("what is promised, {promised}, is more than {key} lets through, {limit}")]
    PromiseBeyondLimit {
        /// Of the limit.
        key: &'static str,
        /// What the disk and its tasks are promised together.
        promised: u64,
        /// The limit.
        limit: u64,
    },
    /// Too many of them.
    #[error("{0} tasks of a disk, more than {MAX_TASKS}")]
    TooManyTasks(usize),
    /// Two of one priority.
    #[error("a second task has ioprio \"{0}\"")]
    DuplicateTask(IoPriority),
    /// A burst of nothing.
    #[error("{0} is the burst of a rate, and there is none")]
    BurstAlone(&'static str),
    /// Two of one name.
    #[error("a second iothread, schedule, device or nic has this name")]
    DuplicateName,
    /// Two of one socket.
    #[error("socket {} is that of {other} too", Quoted(&socket.to_string_lossy()))]
    DuplicateSocket {
        /// The socket.
        socket: PathBuf,
        /// The first with it.
        other: String,
    },
    /// A socket's path that is relative, too long, or ends in no name.
    #[error("{} is no path of a socket", Quoted(&.0.to_string_lossy()))]
    BadSocket(PathBuf),
    /// A name that no user or group has.
    #[error("{} is no name of a user or group", Quoted(.0))]
    BadUser(String),
    /// A group without a user.
    #[error("a group is a user's: there is no user")]
    GroupAlone,
    /// Neither or both of `socket` and `socket_activation`.
    #[error("a device has one of socket and socket_activation")]
    WhichSocket,
    /// A socket for slots of a disk that is no whole file or block device.
    #[error("slots need a disk whose data is all of a file or block device")]
    SlotsWithoutFile,
    /// An image's path that is relative or holds a control character.
    #[error("{} is no absolute path", Quoted(&.path.to_string_lossy()))]
    BadPath {
        /// The path.
        path: PathBuf,
        /// Of what.
        kind: EngineKind,
    },
    /// A CPU that no host has.
    #[error("CPU {0} is beyond {MAX_CPU}")]
    BadCpu(CpuId),
    /// A CPU that is named twice.
    #[error("CPU {0} is named twice")]
    DuplicateCpu(CpuId),
    /// A key of IOThreads that adapt, for one that does not.
    #[error("an iothread with completion = \"{completion}\" has no key `{key}`")]
    NotAdaptive {
        /// The key.
        key: &'static str,
        /// How it waits.
        completion: Completion,
    },
    /// A dedicated core that is not one CPU.
    #[error("a dedicated core is one CPU, and cpus has {0}")]
    DedicatedCpus(usize),
    /// A CPU that would be dedicated, and another IOThread's.
    #[error("CPU {cpu} would be dedicated, and is that of iothread \"{other}\" too")]
    CpuTaken {
        /// The CPU.
        cpu: CpuId,
        /// The other one.
        other: IoThreadName,
    },
    /// A policy that adds IOThreads, and no place for them.
    #[error("policy \"{0}\" adds IOThreads, and there are no cpus for them")]
    NoCpus(Policy),
    /// CPUs of the vCPUs, without the guard that takes them and gives them back.
    #[error("CPUs cannot be borrowed: this data plane has given up its right to move vCPUs")]
    Borrow,
    /// A number out of range.
    #[error("{key} is {found}, outside {low} to {high}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The number.
        found: u64,
        /// Smallest allowed.
        low: u64,
        /// Largest allowed.
        high: u64,
    },
    /// A size that a disk is to be given, and cannot have.
    #[error(
        "a size of {size} bytes is no multiple of the disk's block of {block} from {block} to {max}"
    )]
    NewSize {
        /// Bytes.
        size: u64,
        /// Bytes that are written at a time.
        block: u32,
        /// The largest size.
        max: u64,
    },
    /// A size or an offset that is no multiple of a sector.
    #[error("{key} {value} is no multiple of 512")]
    NotInSectors {
        /// Which of them.
        key: &'static str,
        /// Its value, bytes.
        value: u64,
    },
    /// A serial number that is too long or not printable ASCII.
    #[error("serial {} is not 1 to {MAX_SERIAL_BYTES} characters of printable ASCII", Quoted(.0))]
    BadSerial(String),
    /// No block size that drivers take.
    #[error("block_size is {0}")]
    BadBlockSize(u32),
    /// A model's name that is none.
    #[error("{} is no name of a model", Quoted(.0))]
    BadModel(String),
    /// A key that the engine's type needs.
    #[error("an engine of type \"{kind}\" needs the key `{key}`")]
    MissingEngineKey {
        /// The type.
        kind: EngineKind,
        /// The key.
        key: &'static str,
    },
    /// A key that the engine's type does not have.
    #[error("an engine of type \"{kind}\" has no key `{key}`")]
    ForeignEngineKey {
        /// The type.
        kind: EngineKind,
        /// The key.
        key: &'static str,
    },
    /// Queues and IOThreads that do not fit.
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

impl Fault {
    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::TooLarge(_) => {
                format!("split it: a configuration has at most {MAX_FILE_BYTES} bytes")
            }
            Self::KeyTooDeep => "the deepest key of a configuration has 3 parts".to_owned(),
            Self::Toml(message) => toml_hint(message).to_owned(),
            Self::UnknownKey { key, expected } => {
                let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
                let near = nearest(key, &expected)
                    .map_or_else(String::new, |n| format!("did you mean `{n}`? "));
                format!("{near}the keys of this table are {}", listed(&expected))
            }
            Self::UnknownVersion(_) => "write version = 1".to_owned(),
            Self::BadUser(_) => "write the name that `getent passwd` or `group` shows".to_owned(),
            Self::GroupAlone => "add user = \"rtvirtio\"".to_owned(),
            Self::NoIoThread => "add [[iothread]] with name = \"iot0\"".to_owned(),
            Self::NoIoThreadOf(Some(of)) => {
                format!("add [[iothread]] with name = \"{of}-iot0\" and trust = \"{of}\"")
            }
            Self::NoIoThreadOf(None) => "add [[iothread]] with name = \"iot0\"".to_owned(),
            Self::OtherTrust(_) => "give device and iothread the same trust".to_owned(),
            Self::PolicyAcrossTrust(_) => "set policy = \"static\"".to_owned(),
            Self::TooManyIoThreads(_) => format!("keep at most {MAX_IOTHREADS}"),
            Self::TooManyDevices(_) => format!("keep at most {MAX_DEVICES}"),
            Self::TooManyNics(_) => format!("keep at most {MAX_NICS}"),
            Self::TooManyNetworks(_) => format!("keep at most {MAX_NETWORKS}"),
            Self::WhichLink => {
                "write tap = \"tap0\", or network = \"lan\" with a [[network]] of that name"
                    .to_owned()
            }
            Self::OwnSocket { .. } => {
                "name the socket of the program that the frames go to (QEMU, passt, libkrun); devices of one data plane \
                 meet in a [[network]]"
                    .to_owned()
            }
            Self::OwnPeer => {
                "let remote be the socket that the peer binds, and local one for this nic alone"
                    .to_owned()
            }
            Self::OfNetwork => {
                "remove it: what is behind a tap or socket has its own VLANs and filters".to_owned()
            }
            Self::NoNetwork(name) => format!(
                "add [[network]] with name = \"{name}\", or of a data plane that runs: rtvirtio ctl network add {name}"
            ),
            Self::WhichVlan => {
                "write vlan = 10 if the guest is to see no tag, trunk = [10, 20] if it has them"
                    .to_owned()
            }
            Self::BadTrunk => "write trunk = [10, 20]".to_owned(),
            Self::DuplicateMac { .. } => {
                "give each an address of its own, or none: then it is made of the names".to_owned()
            }
            Self::NetworkAcrossTrust(_) => {
                "give both the same trust, or each a network of its own".to_owned()
            }
            Self::BadTap(_) => "write tap = \"tap0\"".to_owned(),
            Self::BadMac(_) => "write mac = \"52:54:00:12:34:56\"".to_owned(),
            Self::NoNicRate(direction) => format!("write {direction} = {{ max_mbit = 100 }}"),
            Self::NotKept(not_kept) => not_kept.hint(),
            Self::DuplicateTap { .. } => "give each a TAP of its own".to_owned(),
            Self::TooManySchedules(_) => format!("keep at most {MAX_SCHEDULES}"),
            Self::NoSchedule(name) => format!(
                "add [[schedule]] with name = \"{name}\", channels = 4, request_ns = 200000, kib_ns = 9000"
            ),
            Self::HalfPromise => {
                "write deadline_us = 10000, iops = 1500, or none of a promise's keys".to_owned()
            }
            Self::PromiseBeyondLimit { key, promised, .. } => {
                format!("write {key} = {promised}, leave it out, or promise less")
            }
            Self::TooManyTasks(_) => format!("keep at most {MAX_TASKS}"),
            Self::DuplicateTask(_) => "remove one, or give it another ioprio".to_owned(),
            Self::BurstAlone(key) => format!("add a rate, or remove {key}"),
            Self::DuplicateName => "rename or remove one".to_owned(),
            Self::DuplicateSocket { .. } => "give each a socket of its own".to_owned(),
            Self::BadSocket(_) => format!(
                "write socket = \"/run/rtvirtio/vm0-root.sock\": absolute, at most {MAX_SOCKET_BYTES} bytes"
            ),
            Self::WhichSocket => {
                "write socket = \"/run/rtvirtio/vm0-root.sock\", or socket_activation = \"NAME\" \
                 with the FileDescriptorName= of a systemd socket unit"
                    .to_owned()
            }
            Self::SlotsWithoutFile => {
                "remove slots: processes find the disk by the file that they have opened".to_owned()
            }
            Self::BadPath { kind: EngineKind::Nvme, .. } => {
                "write path = \"/dev/ng0n1\"".to_owned()
            }
            Self::BadPath { .. } => "write path = \"/var/lib/rtvirtio/vm0-root.img\"".to_owned(),
            Self::BadCpu(_) => "write cpus = [0, 1] with CPUs of this host".to_owned(),
            Self::DuplicateCpu(_) => "name each CPU once: one IOThread is added on each".to_owned(),
            Self::NotAdaptive { key, .. } => {
                format!("remove `{key}`, or write completion = \"adaptive\"")
            }
            Self::DedicatedCpus(_) => {
                "write cpus = [2] with a CPU of its own, or core = \"auto\"".to_owned()
            }
            Self::CpuTaken { .. } => {
                "give each a CPU of its own, or write core = \"auto\"".to_owned()
            }
            Self::NoCpus(_) => "add cpus = [2, 3] with CPUs that no vCPU runs on".to_owned(),
            Self::Borrow => {
                "write borrow = true under [iocores], and start it again; or ask for borrow = false"
                    .to_owned()
            }
            Self::OutOfRange { key: "CPUs", .. } => {
                "write cpus = [2, 3], or leave it out".to_owned()
            }
            Self::OutOfRange { key, low, high, .. } => {
                format!("write {key} = {low}, or more up to {high}")
            }
            Self::NewSize { size, block, .. } if *size < u64::from(*block) => {
                "ask for what the disk is to have; to end it: rtvirtio ctl device remove NAME"
                    .to_owned()
            }
            Self::NewSize { size, block, max } => {
                let next = size.checked_next_multiple_of(u64::from(*block).max(1));
                format!("ask for {}", next.unwrap_or(*max).min(*max))
            }
            Self::NotInSectors { key, .. } => format!("write {key} = \"64M\""),
            Self::BadBlockSize(_) => "write 512, 1024, 2048 or 4096".to_owned(),
            Self::BadSerial(_) => "write serial = \"vm0-root\"".to_owned(),
            Self::BadModel(_) => "write ssd = \"ref-4x250\"".to_owned(),
            Self::MissingEngineKey { kind, .. } => engine_hint(*kind).to_owned(),
            Self::ForeignEngineKey { kind, key } => {
                format!("remove `{key}`, or change the type: {}", engine_hint(*kind))
            }
            Self::Mapping(MappingError::QueueCount(_)) => {
                format!("write queues = 4 (1 to {MAX_QUEUES})")
            }
            Self::Mapping(error) => error.hint(),
        }
    }
}

fn engine_hint(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::File => {
            "write engine = { type = \"file\", path = \"/var/lib/rtvirtio/vm0-root.img\" }"
        }
        EngineKind::Nvme => "write engine = { type = \"nvme\", path = \"/dev/ng0n1\" }",
        EngineKind::Ram => "write engine = { type = \"ram\", size = \"64M\" }",
        EngineKind::Ssd => "write engine = { type = \"ssd\", size = \"64M\", ssd = \"ref-4x250\" }",
    }
}

fn toml_hint(message: &str) -> &'static str {
    if message.contains("missing field") {
        "each [[iothread]] has a name; each [[device]] has name, vm, socket and engine"
    } else if message.contains("duplicate key") {
        "a key stands once in its table: remove one"
    } else if message.contains("name") {
        "a name has 1 to 64 letters, digits, '_', '-', '+', '@' or '.', and starts with a letter, \
         a digit or '_'; a VM's may have spaces, '(', ')', '#' and letters of any script too"
    } else if message.contains("unknown variant") {
        "use one of these values, in quotes"
    } else if message.contains("invalid") {
        "write [control], [iocores], [[iothread]], [[device]], and a value of the right type after each key"
    } else {
        "check the quotes, brackets and `key = value` of this line"
    }
}

// Stated here because the hints do: what they say must be what is checked.
const _: () = assert!(MAX_POLL.get() == 1_000_000_000 && MAX_RAM_BYTES.get() == 1 << 40);
