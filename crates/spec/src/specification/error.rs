//! Why a file is not a specification: where, of what, which rule, and a remedy.

use std::fmt;

use rtvirtio_units::{DeviceName, DiskName, NameError, VmName};

use super::parse::{MAX_FILE_BYTES, MAX_KEY_PARTS};

/// Longest piece of the user's text that a message repeats, in characters.
const MAX_QUOTED: usize = 60;

/// Why a file is not a specification. Displays as `file:line:column: vm "plc": what is wrong`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{file}:{line}:{column}: {subject}{problem}")]
pub struct SpecificationError {
    /// The file as the caller named it.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What the problem belongs to.
    pub subject: Box<Subject>,
    /// What is wrong.
    pub problem: Box<Problem>,
}

impl SpecificationError {
    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        self.problem.hint()
    }
}

/// An entry by its name, or by its number in the file (from 1) while it has no valid name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Label {
    /// By name.
    Name(String),
    /// By number.
    Number(usize),
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "{}", Quoted(name)),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

/// What a problem belongs to. Displays as a prefix of the message, empty for the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The file as a whole.
    File,
    /// A device.
    Device(Label),
    /// A VM.
    Vm(Label),
    /// A disk of a VM.
    Disk {
        /// The VM.
        vm: Label,
        /// The disk.
        disk: Label,
    },
    /// A task of a VM.
    Task {
        /// The VM.
        vm: Label,
        /// The task.
        task: Label,
    },
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::Device(device) => write!(f, "device {device}: "),
            Self::Vm(vm) => write!(f, "vm {vm}: "),
            Self::Disk { vm, disk } => write!(f, "vm {vm}: disk {disk}: "),
            Self::Task { vm, task } => write!(f, "vm {vm}: task {task}: "),
        }
    }
}

/// The kinds of entries that a specification lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `[device.NAME]`
    Device,
    /// `[[vm]]`
    Vm,
    /// `[[vm.disk]]`
    Disk,
    /// `[[vm.task]]`
    Task,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Device => "device",
            Self::Vm => "vm",
            Self::Disk => "disk",
            Self::Task => "task",
        })
    }
}

/// What a key's value must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// An integer or a float.
    Number,
    /// An integer.
    WholeNumber,
    /// A string.
    Text,
    /// A size such as `"4k"`.
    Size,
    /// A boolean.
    Flag,
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Number => "a number",
            Self::WholeNumber => "a whole number",
            Self::Text => "a text in quotes",
            Self::Size => "a size",
            Self::Flag => "true or false",
        })
    }
}

/// What a key's value is.
#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    /// An integer.
    Integer(i128),
    /// A float.
    Float(f64),
    /// A string.
    Text(String),
    /// `true` or `false`.
    Boolean(bool),
    /// An array.
    List,
    /// A table or a date.
    Table,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            // Beyond this, digits say less than an exponent.
            Self::Float(value) if value.is_finite() && value.abs() >= 1e15 => {
                write!(f, "{value:e}")
            }
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{}", Quoted(text)),
            Self::Boolean(value) => write!(f, "{value}"),
            Self::List => f.write_str("a list"),
            Self::Table => f.write_str("a table or a date"),
        }
    }
}

/// What is wrong with a path of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathFault {
    /// No text.
    #[error("is empty")]
    Empty,
    /// A control character, NUL for one.
    #[error("contains the control character {0:?}")]
    ControlCharacter(char),
    /// Longer than the kernel takes.
    #[error("is longer than 4095 bytes")]
    TooLong,
    /// A device's path that depends on the current directory.
    #[error("is not absolute")]
    Relative,
}

/// What is wrong with a cgroup's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CgroupFault {
    /// It fails as a path.
    #[error("{0}")]
    Path(PathFault),
    /// `//`, or `/` at the end.
    #[error("has an empty component")]
    EmptyComponent,
    /// `.` or `..`.
    #[error("has a component '.' or '..'")]
    DotComponent,
    /// A component that no directory can be named.
    #[error("has a component longer than 255 bytes")]
    LongComponent,
}

/// Which rule a file breaks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Problem {
    /// More bytes than [`MAX_FILE_BYTES`].
    #[error("the file has {bytes} bytes, more than {MAX_FILE_BYTES}")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// A dotted key of more parts than [`MAX_KEY_PARTS`].
    #[error("a dotted key has more than {MAX_KEY_PARTS} parts")]
    KeyTooDeep,
    /// Not TOML, or a table where a list belongs; the TOML parser's own words.
    #[error("{}", Plain(message))]
    Toml {
        /// What the TOML parser says.
        message: String,
    },
    /// A key that its table does not have.
    #[error("unknown key {}", Quoted(key))]
    UnknownKey {
        /// The key.
        key: String,
        /// The table's keys.
        expected: Vec<String>,
    },
    /// A required key is absent.
    #[error("the key `{key}` is missing")]
    MissingKey {
        /// The key.
        key: &'static str,
    },
    /// A value of the wrong type.
    #[error("{key} is {found}, not {wanted}")]
    WrongType {
        /// The key.
        key: &'static str,
        /// What it must be.
        wanted: Wanted,
        /// What it is.
        found: Found,
    },
    /// A number out of range, NaN and infinities among them.
    #[error("{key} is {found}, outside {low} to {high}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The number.
        found: Found,
        /// Smallest allowed.
        low: f64,
        /// Largest allowed.
        high: f64,
    },
    /// A specification of another version.
    #[error("version is {found}, and this program reads version 1")]
    UnknownVersion {
        /// The file's version.
        found: i128,
    },
    /// A text that is not a name.
    #[error("{} is not a name of a {kind}: {reason}", Quoted(name))]
    BadName {
        /// Of what.
        kind: Kind,
        /// The text.
        name: String,
        /// Which rule it breaks.
        reason: NameError,
    },
    /// A path that no host has.
    #[error("{key} {} {fault}", Quoted(path))]
    BadPath {
        /// The key.
        key: &'static str,
        /// The text.
        path: String,
        /// Which rule it breaks.
        fault: PathFault,
    },
    /// A cgroup path that is not one or that leaves the mount.
    #[error("cgroup {} {fault}", Quoted(cgroup))]
    BadCgroup {
        /// The text.
        cgroup: String,
        /// Which rule it breaks.
        fault: CgroupFault,
    },
    /// A block size that is no multiple of 512 bytes from 512 to 16 MiB.
    #[error("block_size is {found}, not a multiple of 512 bytes from 512 to 16 MiB")]
    BadBlockSize {
        /// The value.
        found: Found,
    },
    /// A backend that nobody knows.
    #[error("unknown backend {}", Quoted(backend))]
    UnknownBackend {
        /// The text.
        backend: String,
    },
    /// A VM of the data plane, and nothing says where that is.
    #[error("backend is \"vhost-user\", and there is no [data_plane]")]
    NoDataPlane,
    /// Two disks of the data plane's VMs have one name.
    #[error("a second disk {} of the data plane", Quoted(name))]
    ServedTwice {
        /// The name.
        name: String,
    },
    /// VMs of both backends on one device.
    #[error("its disk is on {}, where \"{other}\" has the other backend", Quoted(device.as_str()))]
    MixedBackends {
        /// The device.
        device: DeviceName,
        /// A VM before it.
        other: VmName,
    },
    /// A way of recognition that nobody knows.
    #[error("unknown way to recognise a task: {}", Quoted(recognise))]
    UnknownRecognise {
        /// The text.
        recognise: String,
    },
    /// Recognition by ioprio on the kernel path.
    #[error("recognise is {}, and the kernel path cannot see a guest's ioprio", Quoted(recognise))]
    GuestIoprio {
        /// The text.
        recognise: String,
    },
    /// A text after `ioprio:` that is no I/O priority.
    #[error("recognise is {}: {reason}", Quoted(recognise))]
    BadIoprio {
        /// The text.
        recognise: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// A name given twice.
    #[error("a second {kind} is named {}", Quoted(name))]
    DuplicateName {
        /// Of what.
        kind: Kind,
        /// The name.
        name: String,
    },
    /// Two devices with one path.
    #[error("path {} is the path of device \"{other}\" too", Quoted(path))]
    DuplicatePath {
        /// The path.
        path: String,
        /// The first device with it.
        other: DeviceName,
    },
    /// A disk on a device that is not there.
    #[error("there is no device {}", Quoted(device))]
    DanglingDevice {
        /// The reference.
        device: String,
        /// The devices there are.
        known: Vec<DeviceName>,
    },
    /// A task on a disk that is not there.
    #[error("the vm has no disk {}", Quoted(disk))]
    DanglingDisk {
        /// The reference.
        disk: String,
        /// The VM's disks.
        known: Vec<DiskName>,
    },
    /// A task of a VM with several disks that names none.
    #[error("the vm has {} disks and the task names none", known.len())]
    AmbiguousDisk {
        /// The VM's disks.
        known: Vec<DiskName>,
    },
    /// No device in the file.
    #[error("there is no device")]
    NoDevice,
    /// No VM in the file.
    #[error("there is no vm")]
    NoVm,
    /// A VM without a disk.
    #[error("the vm has no disk")]
    NoDisk,
    /// More entries than allowed.
    #[error("{count} entries of kind {kind}, more than {limit}")]
    TooMany {
        /// Of what.
        kind: Kind,
        /// How many there are.
        count: usize,
        /// The most allowed.
        limit: usize,
    },
    /// Two VMs in one cgroup.
    #[error("cgroup {} is the cgroup of vm \"{other}\" too", Quoted(cgroup))]
    CgroupShared {
        /// The cgroup.
        cgroup: String,
        /// The first VM in it.
        other: VmName,
    },
    /// A VM's cgroup inside another's.
    #[error(
        "cgroup {} and cgroup {} of vm \"{other}\" lie one inside the other",
        Quoted(cgroup),
        Quoted(other_cgroup)
    )]
    CgroupNested {
        /// The cgroup.
        cgroup: String,
        /// The other's cgroup.
        other_cgroup: String,
        /// The other VM.
        other: VmName,
    },
}

impl Problem {
    /// What to do about it, in one line.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::TooLarge { .. } => {
                format!("split it: a specification has at most {MAX_FILE_BYTES} bytes (4 MiB)")
            }
            Self::KeyTooDeep => {
                "the deepest key of a specification is device.NAME.path, of 3 parts".to_owned()
            }
            Self::Toml { message } => toml_hint(message).to_owned(),
            Self::UnknownKey { key, expected } => unknown_key_hint(key, expected),
            Self::MissingKey { key } | Self::WrongType { key, .. } => format!("write {}", example(key)),
            Self::OutOfRange { key, low, high, .. } => {
                format!("write {} (from {low} to {high})", example(key))
            }
            Self::UnknownVersion { .. } => "write version = 1".to_owned(),
            Self::BadName { kind: Kind::Vm, .. } => {
                "name the vm with 1 to 64 letters and digits of any script, spaces between them, '_', '-', '+', '@', \
                 '.', '(', ')' or '#', and start with a letter, a digit or '_'"
                    .to_owned()
            }
            Self::BadName { kind, .. } => format!(
                "name the {kind} with 1 to 64 letters, digits, '_', '-', '+', '@' or '.', and start with a letter, a digit or '_'"
            ),
            Self::BadPath { key, .. } => format!("write {}", example(key)),
            Self::BadCgroup { .. } => format!(
                "write {}, relative to the io controller's mount and without '.' or '..'",
                example("cgroup")
            ),
            Self::BadBlockSize { .. } => {
                "write block_size = \"4k\" (or \"128k\", \"1m\", or bytes such as 512)".to_owned()
            }
            Self::UnknownBackend { .. } => {
                "write backend = \"kernel\" (QEMU's virtio-blk on a host device) or \"vhost-user\" \
                 (rtvirtio serve)"
                    .to_owned()
            }
            Self::NoDataPlane => {
                "name the control socket of rtvirtio serve: [data_plane], then control = \"/run/...\""
                    .to_owned()
            }
            Self::ServedTwice { .. } => {
                "a disk has the name of its device on the data plane, which has one of each name"
                    .to_owned()
            }
            Self::MixedBackends { .. } => {
                "give both VMs one backend: what shares a device needs one schedule".to_owned()
            }
            Self::UnknownRecognise { .. } | Self::GuestIoprio { .. } => {
                "write recognise = \"disk\" and give the task a disk of its own, or leave it out: \
                 then the vm's strictest target applies to all it does"
                    .to_owned()
            }
            Self::BadIoprio { .. } => {
                "write recognise = \"ioprio:rt/0\": what ionice -c 1 -n 0 gives the task in its guest"
                    .to_owned()
            }
            Self::DuplicateName { kind, .. } => format!("rename or remove one {kind}"),
            Self::DuplicatePath { other, .. } => {
                format!("remove this device and refer to \"{other}\"")
            }
            Self::DanglingDevice { device, known } => {
                let known: Vec<&str> = known.iter().map(DeviceName::as_str).collect();
                reference_hint(device, &known, "add the table [device.NAME]")
            }
            Self::DanglingDisk { disk, known } => {
                let known: Vec<&str> = known.iter().map(DiskName::as_str).collect();
                reference_hint(disk, &known, "add a [[vm.disk]]")
            }
            Self::AmbiguousDisk { known } => {
                let known: Vec<&str> = known.iter().map(DiskName::as_str).collect();
                format!("write disk = \"NAME\" with one of {}", listed(&known))
            }
            Self::NoDevice => {
                "add [device.data] with path = \"/dev/disk/by-id/...\" and profile = \"profiles/data.json\""
                    .to_owned()
            }
            Self::NoVm => "add [[vm]] with name = \"plc\" and a [[vm.disk]]".to_owned(),
            Self::NoDisk => {
                "add [[vm.disk]] with name = \"root\" and device = \"data\" below the [[vm]]".to_owned()
            }
            Self::TooMany { kind, limit, .. } => match kind {
                Kind::Device | Kind::Vm => format!("keep at most {limit} in one file"),
                Kind::Disk | Kind::Task => format!("keep at most {limit} in one vm"),
            },
            Self::CgroupShared { .. } | Self::CgroupNested { .. } => {
                "give each vm a cgroup of its own, such as cgroup = \"machine.slice/plc.scope\", \
                 or leave it out: rtvirtio/NAME"
                    .to_owned()
            }
        }
    }
}

/// A line that would be right for `key`.
fn example(key: &str) -> &'static str {
    match key {
        "version" => "version = 1",
        "path" => "path = \"/dev/disk/by-id/...\"",
        "profile" => "profile = \"profiles/data.json\" (`rtvirtio calibrate` makes the file)",
        "name" => "name = \"...\"",
        "backend" => "backend = \"kernel\"",
        "cgroup" => "cgroup = \"machine.slice/plc.scope\"",
        "vcpus" => "vcpus = 4",
        "guest_agent" => "guest_agent = true",
        "queues" => "queues = 4",
        "device" => "device = \"data\" for a table [device.data]",
        "disk" => "disk = \"root\"",
        "recognise" => "recognise = \"disk\"",
        "iops" => "iops = 100",
        "block_size" => "block_size = \"4k\"",
        "read_percent" => "read_percent = 70",
        "queue_depth" => "queue_depth = 1",
        "percentile" => "percentile = 99.99",
        "latency_ms" => "latency_ms = 20",
        "confidence" => "confidence = 0.95",
        _ => "a value of the right type",
    }
}

fn toml_hint(message: &str) -> &'static str {
    if message.contains("duplicate key") {
        "a key, a device's name for one, stands once in its table: rename or remove one"
    } else if message.contains("recurs") {
        "a specification needs no more than four levels of tables and lists"
    } else if message.contains("invalid type") {
        "write [device.NAME] for a device, [[vm]], [[vm.disk]] and [[vm.task]] for an entry of a \
         list, and target = { percentile = 99.99, latency_ms = 20 }"
    } else {
        "check the quotes, brackets and `key = value` of this line"
    }
}

fn unknown_key_hint(key: &str, expected: &[String]) -> String {
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    // A key of a parent that follows a child's header belongs to the child: TOML's usual trap.
    let home = match key {
        "version" => Some("the top of the file, before the first table"),
        "path" | "profile" => Some("[device.NAME]"),
        "backend" | "cgroup" | "vcpus" | "guest_agent" => {
            Some("[[vm]], before its first [[vm.disk]]")
        }
        "queues" => Some("[[vm.disk]]"),
        "iops" | "block_size" | "read_percent" | "queue_depth" | "recognise" | "target" => {
            Some("[[vm.task]]")
        }
        "percentile" | "latency_ms" | "confidence" => {
            Some("the task's target = { percentile = 99.99, latency_ms = 20 }")
        }
        _ => None,
    };
    let lead = match (nearest(key, &expected), home) {
        (Some(near), _) => format!("did you mean `{near}`? "),
        (None, Some(home)) => format!("`{key}` belongs in {home}; "),
        (None, None) => String::new(),
    };
    format!("{lead}the keys of this table are {}", listed(&expected))
}

fn reference_hint(name: &str, known: &[&str], add: &str) -> String {
    let lead = nearest(name, known).map_or_else(String::new, |n| format!("did you mean \"{n}\"? "));
    format!("{lead}{add} or use one of {}", listed(known))
}

/// At most eight of `names`, with commas.
pub(crate) fn listed(names: &[&str]) -> String {
    const MAX: usize = 8;
    let shown = names[..names.len().min(MAX)].join(", ");
    if names.len() > MAX { format!("{shown}, ... ({} in all)", names.len()) } else { shown }
}

/// The one of `known` within a third of its length in edits, if any.
pub(crate) fn nearest<'a>(text: &str, known: &[&'a str]) -> Option<&'a str> {
    // No name is longer than 64 bytes, and a hostile one must not cost time.
    if text.len() > 64 {
        return None;
    }
    known
        .iter()
        .map(|&candidate| (edits(text, candidate), candidate))
        .filter(|&(distance, candidate)| distance <= (candidate.len() / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance in bytes.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The user's text in quotes: control characters escaped, a long one cut.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(MAX_QUOTED) {
            None => write!(f, "{:?}", self.0),
            Some((end, _)) => write!(f, "{:?}...", &self.0[..end]),
        }
    }
}

/// A parser's message on one line: control characters escaped, a long one cut.
pub(crate) struct Plain<'a>(pub(crate) &'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX: usize = 240;
        for c in self.0.trim_end().chars().take(MAX) {
            if c.is_control() {
                write!(f, "{}", c.escape_debug())?;
            } else {
                write!(f, "{c}")?;
            }
        }
        if self.0.chars().nth(MAX).is_some() { f.write_str("...") } else { Ok(()) }
    }
}
