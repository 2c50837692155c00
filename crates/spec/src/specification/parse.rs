//! TOML to [`Specification`].
//!
//! Four steps, each of which sees only what the one before let through:
//! size; depth of dotted keys (a pass of the TOML lexer); TOML to raw tables,
//! where unknown keys are refused; raw tables to checked types.
//!
//! The depth matters because the TOML parser's tree is dropped recursively. It
//! bounds nested brackets and the parts of one key by 80 each, but not their
//! product, and 80 brackets around keys of 80 parts overflow a stack of 2 MiB.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use rtvirtio_units::{
    Bytes, Confidence, DeviceName, DiskName, Iops, NameError, Nanos, Percentile, QuantityError,
    TaskName, VmName,
};
use serde::Deserialize;
use toml::Spanned;
use toml::de::DeTable;
use toml_parser::lexer::TokenKind;

use super::error::{
    CgroupFault, Kind, Label, PathFault, Problem, SpecificationError, Subject, Wanted,
};
use super::raw::{
    RawDataPlane, RawDevice, RawDisk, RawSpecification, RawTarget, RawTask, RawVm, Scalar, Value,
};
use super::{Backend, Device, Disk, Load, Recognise, Specification, Target, Task, Vm};

/// Largest file that is read.
pub const MAX_FILE_BYTES: usize = 4 << 20;

/// Most VMs of one file.
pub const MAX_VMS: usize = 10_000;

/// Most disks of one VM.
pub const MAX_DISKS_PER_VM: usize = 64;

/// Most tasks of one VM.
pub const MAX_TASKS_PER_VM: usize = 64;

/// Most virtual CPUs of one VM.
pub const MAX_VCPUS: u32 = 512;

/// Most virtqueues of one disk: QEMU aborts beyond (include/hw/virtio/virtio.h, `VIRTIO_QUEUE_MAX`).
pub const MAX_QUEUES: u32 = 1024;

/// Most parts of a dotted key; `device.NAME.path` has three.
pub const MAX_KEY_PARTS: usize = 8;

/// Linux `PATH_MAX` less its terminator.
const MAX_PATH_BYTES: usize = 4095;

/// Linux `NAME_MAX`.
const MAX_COMPONENT_BYTES: usize = 255;

const SECTOR_BYTES: u64 = 512;
const MAX_BLOCK_BYTES: u64 = 16 << 20;

/// One nanosecond, the least that a latency can be.
const MIN_LATENCY_MS: f64 = 1e-6;
/// One hour.
const MAX_LATENCY_MS: f64 = 3_600_000.0;

/// Parses and checks `text`, named `file` in errors.
///
/// # Errors
/// [`SpecificationError`] says where, what and what to do. The first problem ends the parse.
pub fn parse(file: &str, text: &str) -> Result<Specification, SpecificationError> {
    let scope = Scope { file, text, subject: Subject::File, span: 0..0 };
    if text.len() > MAX_FILE_BYTES {
        return Err(scope.fail(Problem::TooLarge { bytes: text.len() }));
    }
    check_key_depth(&scope)?;
    let table = DeTable::parse(text).map_err(|e| toml_error(&scope, &e))?;
    // Before the unknown keys: a file of a later version must not be called misspelt.
    let found = table.get_ref().get("version").cloned();
    if let Some(value) = found {
        let span = value.span();
        let scalar = Scalar::deserialize(toml::de::ValueDeserializer::from(value))
            .map_err(|e| toml_error(&scope, &e))?;
        check_version(&scope, &Spanned::new(span, scalar))?;
    }
    let raw = RawSpecification::deserialize(toml::Deserializer::from(table))
        .map_err(|e| toml_error(&scope, &e))?;
    specification(&scope, raw)
}

/// Line and column in characters, both from 1, of the byte at `offset`.
pub(crate) fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(offset)];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.bytes().filter(|&b| b == b'\n').count() + 1;
    (line, before[line_start..].chars().count() + 1)
}

/// Where the conversion is: the file, and the entry to which a problem belongs.
struct Scope<'a> {
    file: &'a str,
    text: &'a str,
    subject: Subject,
    /// The entry's place in the text, for what is missing from it.
    span: Range<usize>,
}

impl<'a> Scope<'a> {
    fn of(&self, subject: Subject, span: Range<usize>) -> Scope<'a> {
        Scope { file: self.file, text: self.text, subject, span }
    }

    /// A problem of the entry as a whole.
    fn fail(&self, problem: Problem) -> SpecificationError {
        self.fail_at(self.span.clone(), problem)
    }

    /// A problem of the entry at `span`.
    fn fail_at(&self, span: Range<usize>, problem: Problem) -> SpecificationError {
        let (line, column) = position(self.text, span.start);
        SpecificationError {
            file: self.file.to_owned(),
            line,
            column,
            subject: Box::new(self.subject.clone()),
            problem: Box::new(problem),
        }
    }

    fn wrong_type(&self, key: &'static str, wanted: Wanted, value: &Value) -> SpecificationError {
        let found = value.get_ref().found();
        self.fail_at(value.span(), Problem::WrongType { key, wanted, found })
    }

    fn required<'v>(
        &self,
        key: &'static str,
        value: Option<&'v Value>,
    ) -> Result<&'v Value, SpecificationError> {
        value.ok_or_else(|| self.fail(Problem::MissingKey { key }))
    }

    fn text<'v>(&self, key: &'static str, value: &'v Value) -> Result<&'v str, SpecificationError> {
        match value.get_ref() {
            Scalar::Text(text) => Ok(text),
            _ => Err(self.wrong_type(key, Wanted::Text, value)),
        }
    }

    /// `true` or `false`; nothing is `false`.
    fn flag(&self, key: &'static str, value: Option<&Value>) -> Result<bool, SpecificationError> {
        match value.map(|value| (value, value.get_ref())) {
            None => Ok(false),
            Some((_, Scalar::Boolean(flag))) => Ok(*flag),
            Some((value, _)) => Err(self.wrong_type(key, Wanted::Flag, value)),
        }
    }

    fn number(&self, key: &'static str, value: &Value) -> Result<f64, SpecificationError> {
        match *value.get_ref() {
            Scalar::Integer(number) => Ok(number as f64),
            Scalar::Float(number) => Ok(number),
            _ => Err(self.wrong_type(key, Wanted::Number, value)),
        }
    }

    /// A whole number of `range`, if there is one.
    fn whole(
        &self,
        key: &'static str,
        value: Option<&Value>,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, SpecificationError> {
        let Some(value) = value else {
            return Ok(None);
        };
        let Scalar::Integer(number) = *value.get_ref() else {
            return Err(self.wrong_type(key, Wanted::WholeNumber, value));
        };
        let whole = u32::try_from(number).ok().filter(|n| range.contains(n));
        whole.map(Some).ok_or_else(|| {
            let (low, high) = (f64::from(*range.start()), f64::from(*range.end()));
            self.out_of_range(key, value, low, high)
        })
    }

    /// A number that is a `T`.
    fn quantity<T>(
        &self,
        key: &'static str,
        value: &Value,
        new: impl Fn(f64) -> Result<T, QuantityError>,
    ) -> Result<T, SpecificationError> {
        new(self.number(key, value)?).map_err(|QuantityError::OutOfRange { low, high, .. }| {
            self.out_of_range(key, value, low, high)
        })
    }

    fn out_of_range(
        &self,
        key: &'static str,
        value: &Value,
        low: f64,
        high: f64,
    ) -> SpecificationError {
        let found = value.get_ref().found();
        self.fail_at(value.span(), Problem::OutOfRange { key, found, low, high })
    }

    /// A name, checked by `new`.
    fn name<T>(
        &self,
        kind: Kind,
        value: Option<&Value>,
        new: impl Fn(&str) -> Result<T, NameError>,
    ) -> Result<(T, Range<usize>), SpecificationError> {
        let value = self.required("name", value)?;
        let text = self.text("name", value)?;
        match new(text) {
            Ok(name) => Ok((name, value.span())),
            Err(reason) => {
                let problem = Problem::BadName { kind, name: text.to_owned(), reason };
                Err(self.fail_at(value.span(), problem))
            }
        }
    }

    /// A path of the host.
    fn path(
        &self,
        key: &'static str,
        value: Option<&Value>,
        absolute: bool,
    ) -> Result<PathBuf, SpecificationError> {
        let value = self.required(key, value)?;
        let text = self.text(key, value)?;
        let fault = match path_fault(text) {
            None if absolute && !text.starts_with('/') => Some(PathFault::Relative),
            fault => fault,
        };
        match fault {
            None => Ok(PathBuf::from(text)),
            Some(fault) => {
                let problem = Problem::BadPath { key, path: text.to_owned(), fault };
                Err(self.fail_at(value.span(), problem))
            }
        }
    }

    fn at_most(&self, kind: Kind, count: usize, limit: usize) -> Result<(), SpecificationError> {
        if count <= limit {
            return Ok(());
        }
        Err(self.fail(Problem::TooMany { kind, count, limit }))
    }
}

fn path_fault(text: &str) -> Option<PathFault> {
    if text.is_empty() {
        Some(PathFault::Empty)
    } else if text.len() > MAX_PATH_BYTES {
        Some(PathFault::TooLong)
    } else {
        text.chars().find(|c| c.is_control()).map(PathFault::ControlCharacter)
    }
}

/// The cgroup of a VM, from that of one of its processes or threads: libvirt moves them into groups
/// below the VM's own (`libvirt/emulator`, `libvirt/vcpu0`).
#[must_use]
pub fn vm_group(path: &Path) -> &Path {
    let numbered = |name: &str, prefix: &str| {
        let number = name.strip_prefix(prefix);
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let is_below = |path: &Path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| {
            ["libvirt", "emulator"].contains(&name)
                || numbered(name, "vcpu")
                || numbered(name, "iothread")
        })
    };
    let mut group = path;
    while let (true, Some(parent)) = (is_below(group), group.parent()) {
        if parent.as_os_str().is_empty() {
            break;
        }
        group = parent;
    }
    group
}

fn cgroup_fault(text: &str) -> Option<CgroupFault> {
    if let Some(fault) = path_fault(text) {
        return Some(CgroupFault::Path(fault));
    }
    text.split('/').find_map(|component| match component {
        "" => Some(CgroupFault::EmptyComponent),
        "." | ".." => Some(CgroupFault::DotComponent),
        long if long.len() > MAX_COMPONENT_BYTES => Some(CgroupFault::LongComponent),
        _ => None,
    })
}

/// Refuses a dotted key of more than [`MAX_KEY_PARTS`] parts.
fn check_key_depth(scope: &Scope<'_>) -> Result<(), SpecificationError> {
    match deep_key(scope.text) {
        None => Ok(()),
        Some(span) => Err(scope.fail_at(span, Problem::KeyTooDeep)),
    }
}

/// Where a text has a dotted key of more than [`MAX_KEY_PARTS`] parts.
///
/// Only `=`, `,` and brackets end a count. A line's end does not, for a broken
/// key that spans lines; nor do a float's dots matter, at one for each `=` or `,`.
pub(crate) fn deep_key(text: &str) -> Option<Range<usize>> {
    let mut parts = 1;
    for token in toml_parser::Source::new(text).lex() {
        match token.kind() {
            TokenKind::Dot => {
                parts += 1;
                if parts > MAX_KEY_PARTS {
                    let span = token.span();
                    return Some(span.start()..span.end());
                }
            }
            TokenKind::Equals
            | TokenKind::Comma
            | TokenKind::LeftSquareBracket
            | TokenKind::RightSquareBracket
            | TokenKind::LeftCurlyBracket
            | TokenKind::RightCurlyBracket => parts = 1,
            _ => {}
        }
    }
    None
}

/// The TOML parser's error, with an unknown key taken out of serde's words.
fn toml_error(scope: &Scope<'_>, error: &toml::de::Error) -> SpecificationError {
    let message = error.message();
    let problem =
        unknown_key(message).unwrap_or_else(|| Problem::Toml { message: message.to_owned() });
    scope.fail_at(error.span().unwrap_or(0..0), problem)
}

fn unknown_key(message: &str) -> Option<Problem> {
    let (key, expected) = unknown_field(message)?;
    Some(Problem::UnknownKey { key, expected })
}

/// Reads "unknown field `X`, expected `A` or `B`" and "..., expected one of `A`, `B`, `C`".
pub(crate) fn unknown_field(message: &str) -> Option<(String, Vec<String>)> {
    let rest = message.strip_prefix("unknown field `")?;
    // From the right: X is the user's and may hold anything, the keys are ours.
    let (key, keys) = rest.rsplit_once("`, expected ")?;
    let expected = keys.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    Some((key.to_owned(), expected))
}

fn check_version(scope: &Scope<'_>, value: &Value) -> Result<(), SpecificationError> {
    match *value.get_ref() {
        Scalar::Integer(1) => Ok(()),
        Scalar::Integer(found) => {
            Err(scope.fail_at(value.span(), Problem::UnknownVersion { found }))
        }
        _ => Err(scope.wrong_type("version", Wanted::WholeNumber, value)),
    }
}

fn specification(
    scope: &Scope<'_>,
    raw: RawSpecification,
) -> Result<Specification, SpecificationError> {
    check_version(scope, scope.required("version", raw.version.as_ref())?)?;
    if raw.device.is_empty() {
        return Err(scope.fail(Problem::NoDevice));
    }
    if raw.vm.is_empty() {
        return Err(scope.fail(Problem::NoVm));
    }
    scope.at_most(Kind::Vm, raw.vm.len(), MAX_VMS)?;
    let devices = devices(scope, &raw)?;
    let known: BTreeSet<&DeviceName> = devices.iter().map(|d| &d.name).collect();
    let mut names = BTreeSet::new();
    let mut vms = Vec::with_capacity(raw.vm.len());
    for (index, entry) in raw.vm.iter().enumerate() {
        let (vm, name_span) = vm(scope, index, entry, &devices, &known)?;
        if !names.insert(vm.name.clone()) {
            let name = vm.name.as_str().to_owned();
            return Err(scope.fail_at(name_span, Problem::DuplicateName { kind: Kind::Vm, name }));
        }
        vms.push(vm);
    }
    check_cgroups(scope, &raw.vm, &vms)?;
    let data_plane = data_plane(scope, raw.data_plane.as_ref())?;
    check_backends(scope, &raw.vm, &vms, data_plane.is_some())?;
    Ok(Specification { data_plane, devices, vms })
}

/// The data plane's control socket.
fn data_plane(
    scope: &Scope<'_>,
    entry: Option<&Spanned<RawDataPlane>>,
) -> Result<Option<PathBuf>, SpecificationError> {
    let Some(entry) = entry else { return Ok(None) };
    let scope = scope.of(Subject::File, entry.span());
    scope.path("control", entry.get_ref().control.as_ref(), true).map(Some)
}

/// Refuses a VM of the data plane where there is none, a second disk of one name there, and a device
/// with VMs of both backends.
fn check_backends(
    scope: &Scope<'_>,
    raw: &[Spanned<RawVm>],
    vms: &[Vm],
    has_data_plane: bool,
) -> Result<(), SpecificationError> {
    let mut users: BTreeMap<&DeviceName, &Vm> = BTreeMap::new();
    let mut served = BTreeSet::new();
    for (vm, entry) in vms.iter().zip(raw) {
        let label = Label::Name(vm.name.as_str().to_owned());
        let value = entry.get_ref().backend.as_ref();
        let scope = scope.of(Subject::Vm(label), value.map_or_else(|| entry.span(), Spanned::span));
        if vm.backend == Backend::VhostUser {
            if !has_data_plane {
                return Err(scope.fail(Problem::NoDataPlane));
            }
            if let Some(disk) = vm.disks.iter().find(|disk| !served.insert(&disk.name)) {
                let name = disk.name.as_str().to_owned();
                return Err(scope.fail(Problem::ServedTwice { name }));
            }
        }
        for device in vm.disks.iter().map(|disk| &disk.device) {
            let first = users.entry(device).or_insert(vm);
            if first.backend != vm.backend {
                let (device, other) = (device.clone(), first.name.clone());
                return Err(scope.fail(Problem::MixedBackends { device, other }));
            }
        }
    }
    Ok(())
}

/// The devices in order of the file.
fn devices(scope: &Scope<'_>, raw: &RawSpecification) -> Result<Vec<Device>, SpecificationError> {
    let mut entries: Vec<(&Spanned<String>, &Spanned<RawDevice>)> = raw.device.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut devices = Vec::with_capacity(entries.len());
    let mut paths: BTreeMap<PathBuf, DeviceName> = BTreeMap::new();
    for (key, entry) in entries {
        let text = key.get_ref();
        let subject = Subject::Device(Label::Name(text.clone()));
        let scope = scope.of(subject, key.span());
        let name = DeviceName::new(text.as_str()).map_err(|reason| {
            scope.fail(Problem::BadName { kind: Kind::Device, name: text.clone(), reason })
        })?;
        let raw = entry.get_ref();
        let path = scope.path("path", raw.path.as_ref(), true)?;
        if let Some(other) = paths.insert(path.clone(), name.clone()) {
            let span = raw.path.as_ref().map_or_else(|| key.span(), Spanned::span);
            let path = path.to_string_lossy().into_owned();
            return Err(scope.fail_at(span, Problem::DuplicatePath { path, other }));
        }
        let profile = scope.path("profile", raw.profile.as_ref(), false)?;
        devices.push(Device { name, path, profile });
    }
    Ok(devices)
}

/// One VM, with the place of its name.
fn vm(
    scope: &Scope<'_>,
    index: usize,
    entry: &Spanned<RawVm>,
    devices: &[Device],
    known: &BTreeSet<&DeviceName>,
) -> Result<(Vm, Range<usize>), SpecificationError> {
    let raw = entry.get_ref();
    let numbered = scope.of(Subject::Vm(Label::Number(index + 1)), entry.span());
    let (name, name_span) = numbered.name(Kind::Vm, raw.name.as_ref(), |t| VmName::new(t))?;
    let label = Label::Name(name.as_str().to_owned());
    let scope = scope.of(Subject::Vm(label.clone()), entry.span());

    let backend = backend(&scope, raw.backend.as_ref())?;
    let cgroup = cgroup(&scope, &name, raw.cgroup.as_ref())?;
    let vcpus = scope.whole("vcpus", raw.vcpus.as_ref(), 1..=MAX_VCPUS)?;
    let guest_agent = scope.flag("guest_agent", raw.guest_agent.as_ref())?;
    if raw.disk.is_empty() {
        return Err(scope.fail(Problem::NoDisk));
    }
    scope.at_most(Kind::Disk, raw.disk.len(), MAX_DISKS_PER_VM)?;
    scope.at_most(Kind::Task, raw.task.len(), MAX_TASKS_PER_VM)?;

    let mut disks: Vec<Disk> = Vec::with_capacity(raw.disk.len());
    for (index, entry) in raw.disk.iter().enumerate() {
        let subject = |disk| Subject::Disk { vm: label.clone(), disk };
        let numbered = scope.of(subject(Label::Number(index + 1)), entry.span());
        let name = entry.get_ref().name.as_ref();
        let (name, span) = numbered.name(Kind::Disk, name, |t| DiskName::new(t))?;
        if disks.iter().any(|d| d.name == name) {
            let name = name.as_str().to_owned();
            return Err(scope.fail_at(span, Problem::DuplicateName { kind: Kind::Disk, name }));
        }
        let named = subject(Label::Name(name.as_str().to_owned()));
        disks.push(disk(&scope.of(named, entry.span()), entry.get_ref(), name, devices, known)?);
    }

    let mut tasks: Vec<Task> = Vec::with_capacity(raw.task.len());
    for (index, entry) in raw.task.iter().enumerate() {
        let subject = |task| Subject::Task { vm: label.clone(), task };
        let numbered = scope.of(subject(Label::Number(index + 1)), entry.span());
        let name = entry.get_ref().name.as_ref();
        let (name, span) = numbered.name(Kind::Task, name, |t| TaskName::new(t))?;
        if tasks.iter().any(|t| t.name == name) {
            let name = name.as_str().to_owned();
            return Err(scope.fail_at(span, Problem::DuplicateName { kind: Kind::Task, name }));
        }
        let named = subject(Label::Name(name.as_str().to_owned()));
        let scope = scope.of(named, entry.span());
        tasks.push(task(&scope, entry.get_ref(), name, &disks, backend)?);
    }
    Ok((Vm { name, backend, cgroup, vcpus, guest_agent, disks, tasks }, name_span))
}

fn backend(scope: &Scope<'_>, value: Option<&Value>) -> Result<Backend, SpecificationError> {
    let Some(value) = value else {
        return Ok(Backend::Kernel);
    };
    let problem = match scope.text("backend", value)? {
        "kernel" => return Ok(Backend::Kernel),
        "vhost-user" => return Ok(Backend::VhostUser),
        other => Problem::UnknownBackend { backend: other.to_owned() },
    };
    Err(scope.fail_at(value.span(), problem))
}

fn cgroup(
    scope: &Scope<'_>,
    vm: &VmName,
    value: Option<&Value>,
) -> Result<PathBuf, SpecificationError> {
    let Some(value) = value else {
        return Ok(PathBuf::from(format!("rtvirtio/{vm}")));
    };
    let text = scope.text("cgroup", value)?;
    // As /proc/PID/cgroup and systemctl print it.
    let below = text.strip_prefix('/').unwrap_or(text);
    match cgroup_fault(below) {
        None => Ok(vm_group(Path::new(below)).to_owned()),
        Some(fault) => {
            let problem = Problem::BadCgroup { cgroup: text.to_owned(), fault };
            Err(scope.fail_at(value.span(), problem))
        }
    }
}

fn disk(
    scope: &Scope<'_>,
    raw: &RawDisk,
    name: DiskName,
    devices: &[Device],
    known: &BTreeSet<&DeviceName>,
) -> Result<Disk, SpecificationError> {
    let value = scope.required("device", raw.device.as_ref())?;
    let text = scope.text("device", value)?;
    // A text that is no name is no device's name.
    let device = DeviceName::new(text).ok().filter(|device| known.contains(device));
    let device = device.ok_or_else(|| {
        let known = devices.iter().map(|d| d.name.clone()).collect();
        let problem = Problem::DanglingDevice { device: text.to_owned(), known };
        scope.fail_at(value.span(), problem)
    })?;
    let queues = scope.whole("queues", raw.queues.as_ref(), 1..=MAX_QUEUES)?;
    Ok(Disk { name, device, queues })
}

fn task(
    scope: &Scope<'_>,
    raw: &RawTask,
    name: TaskName,
    disks: &[Disk],
    backend: Backend,
) -> Result<Task, SpecificationError> {
    let disk = task_disk(scope, raw.disk.as_ref(), disks)?;
    let recognise = recognise(scope, raw.recognise.as_ref(), backend)?;
    let iops =
        raw.iops.as_ref().map(|value| scope.quantity("iops", value, Iops::new)).transpose()?;
    let block_size = block_size(scope, raw.block_size.as_ref())?;
    let read_percent =
        scope.whole("read_percent", raw.read_percent.as_ref(), 0..=100)?.unwrap_or(70);
    let queue_depth = scope.whole("queue_depth", raw.queue_depth.as_ref(), 1..=1024)?.unwrap_or(1);
    let target = raw.target.as_ref().map(|entry| target(scope, entry)).transpose()?;
    let read_fraction = f64::from(read_percent) / 100.0;
    let load = Load { iops, block_size, read_fraction, queue_depth };
    Ok(Task { name, disk, recognise, load, target })
}

fn task_disk(
    scope: &Scope<'_>,
    value: Option<&Value>,
    disks: &[Disk],
) -> Result<DiskName, SpecificationError> {
    let known = || disks.iter().map(|d| d.name.clone()).collect();
    match (value, disks) {
        (None, [only]) => Ok(only.name.clone()),
        (None, _) => Err(scope.fail(Problem::AmbiguousDisk { known: known() })),
        (Some(value), _) => {
            let text = scope.text("disk", value)?;
            let disk = disks.iter().find(|d| d.name.as_str() == text);
            disk.map(|d| d.name.clone()).ok_or_else(|| {
                let problem = Problem::DanglingDisk { disk: text.to_owned(), known: known() };
                scope.fail_at(value.span(), problem)
            })
        }
    }
}

fn recognise(
    scope: &Scope<'_>,
    value: Option<&Value>,
    backend: Backend,
) -> Result<Recognise, SpecificationError> {
    let Some(value) = value else {
        return Ok(Recognise::Unrecognised);
    };
    let text = scope.text("recognise", value)?;
    let problem = match text {
        "disk" => return Ok(Recognise::Disk),
        _ if text.starts_with("ioprio") && backend == Backend::Kernel => {
            Problem::GuestIoprio { recognise: text.to_owned() }
        }
        _ if text.starts_with("ioprio:") => match text["ioprio:".len()..].parse() {
            Ok(ioprio) => return Ok(Recognise::Ioprio(ioprio)),
            Err(reason) => Problem::BadIoprio { recognise: text.to_owned(), reason },
        },
        _ => Problem::UnknownRecognise { recognise: text.to_owned() },
    };
    Err(scope.fail_at(value.span(), problem))
}

fn block_size(scope: &Scope<'_>, value: Option<&Value>) -> Result<Bytes, SpecificationError> {
    let Some(value) = value else {
        return Ok(Bytes::from_kib(4));
    };
    let bytes = match value.get_ref() {
        Scalar::Integer(bytes) => u64::try_from(*bytes).ok(),
        Scalar::Text(text) => size(text),
        _ => return Err(scope.wrong_type("block_size", Wanted::Size, value)),
    };
    let allowed =
        |b: &u64| b.is_multiple_of(SECTOR_BYTES) && (SECTOR_BYTES..=MAX_BLOCK_BYTES).contains(b);
    bytes.filter(allowed).map(Bytes::new).ok_or_else(|| {
        let found = value.get_ref().found();
        scope.fail_at(value.span(), Problem::BadBlockSize { found })
    })
}

/// `"512"`, `"4k"`, `"1m"`; the letter may be a capital.
fn size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 1 << 10),
        b'm' | b'M' => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    // `parse` alone would take a sign.
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn target(scope: &Scope<'_>, entry: &Spanned<RawTarget>) -> Result<Target, SpecificationError> {
    let scope = scope.of(scope.subject.clone(), entry.span());
    let raw = entry.get_ref();
    let default = |number| Spanned::new(entry.span(), Scalar::Float(number));
    let percentile = raw.percentile.clone().unwrap_or_else(|| default(99.99));
    let percentile = scope.quantity("percentile", &percentile, Percentile::new)?;
    let value = scope.required("latency_ms", raw.latency_ms.as_ref())?;
    let milliseconds = scope.number("latency_ms", value)?;
    if !(MIN_LATENCY_MS..=MAX_LATENCY_MS).contains(&milliseconds) {
        return Err(scope.out_of_range("latency_ms", value, MIN_LATENCY_MS, MAX_LATENCY_MS));
    }
    let latency = Nanos::new((milliseconds * 1e6).round() as u64);
    let confidence = raw.confidence.clone().unwrap_or_else(|| default(0.95));
    let confidence = scope.quantity("confidence", &confidence, Confidence::new)?;
    Ok(Target { percentile, latency, confidence })
}

/// Refuses two VMs in one cgroup and a VM's cgroup inside another's.
///
/// A weight or limit on the outer group would act on both. In the order of
/// paths by component, all that lies inside a group follows it directly, so
/// neighbours are enough.
fn check_cgroups(
    scope: &Scope<'_>,
    raw: &[Spanned<RawVm>],
    vms: &[Vm],
) -> Result<(), SpecificationError> {
    let mut order: Vec<usize> = (0..vms.len()).collect();
    order.sort_by(|&a, &b| vms[a].cgroup.cmp(&vms[b].cgroup).then(a.cmp(&b)));
    for pair in order.windows(2) {
        let (outer, inner) = (pair[0], pair[1]);
        if !vms[inner].cgroup.starts_with(&vms[outer].cgroup) {
            continue;
        }
        // The later of the two in the file is the one to complain about.
        let (first, second) = (outer.min(inner), outer.max(inner));
        let text = |index: usize| vms[index].cgroup.to_string_lossy().into_owned();
        let (cgroup, other) = (text(second), vms[first].name.clone());
        let problem = if vms[inner].cgroup == vms[outer].cgroup {
            Problem::CgroupShared { cgroup, other }
        } else {
            Problem::CgroupNested { cgroup, other_cgroup: text(first), other }
        };
        let entry = &raw[second];
        let span = entry.get_ref().cgroup.as_ref().map_or_else(|| entry.span(), Spanned::span);
        let label = Label::Name(vms[second].name.as_str().to_owned());
        return Err(scope.of(Subject::Vm(label), span).fail(problem));
    }
    Ok(())
}
