//! What can go wrong on a host, with what an operator can do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::settings::Knob;
use rtvirtio_units::{DeviceName, DiskName, VmName};

use crate::dataplane::ControlFault;
use crate::interrupt::InterruptedError;
use crate::restoration::Restoration;
use crate::{Drift, GuestFault, Step};

/// An error of this room.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// A file could not be read.
    #[error("cannot read {}", file.display())]
    Read {
        /// Which file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file's text is not what its kernel interface promises.
    #[error("{} holds {found:?}, which is not {expected}", file.display())]
    Format {
        /// Which file.
        file: PathBuf,
        /// What it holds.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A device's node is not there.
    #[error("device {} is not there", path.display())]
    DeviceMissing {
        /// Its node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A path leads to something that is no block device.
    #[error("{} is not a block device", path.display())]
    NotABlockDevice {
        /// The path.
        path: PathBuf,
    },
    /// A file's data is not to be found on its device.
    #[error("the filesystem of {} does not tell where on one disk the file's data lies", path.display())]
    NoExtents {
        /// The file.
        path: PathBuf,
    },
    /// A device is not the one that the plan was made for.
    #[error("device {device} was replaced: the plan is for {expected}, found {found}")]
    DeviceReplaced {
        /// Which device.
        device: DeviceName,
        /// What the plan was made for.
        expected: Box<DeviceIdentity>,
        /// What is there.
        found: Box<DeviceIdentity>,
    },
    /// Two devices of a specification lie on one disk and so share every knob.
    #[error("devices {first} and {second} are the same disk {disk}")]
    SameDisk {
        /// One device.
        first: DeviceName,
        /// The other.
        second: DeviceName,
        /// The disk's `MAJOR:MINOR`.
        disk: String,
    },
    /// Two devices of a specification share a disk, as an array and one of its disks do.
    #[error("devices {first} and {second} share the disk {disk}")]
    SharedDisk {
        /// One device, an array.
        first: DeviceName,
        /// The other.
        second: DeviceName,
        /// The disk's kernel name.
        disk: String,
    },
    /// No cgroup hierarchy carries the io (v2) or blkio (v1) controller.
    #[error("no cgroup hierarchy carries the io controller")]
    NoIoController,
    /// A cgroup path leaves the hierarchy or is empty.
    #[error("{} is not a path below the io controller's mount", path.display())]
    BadCgroupPath {
        /// The path.
        path: PathBuf,
    },
    /// A VM's cgroup is not there.
    #[error("the cgroup of VM {vm} is not there: {}", path.display())]
    CgroupMissing {
        /// The VM.
        vm: VmName,
        /// The cgroup's directory.
        path: PathBuf,
    },
    /// A cgroup could not be made, changed or removed.
    #[error("cannot {action} cgroup {}", path.display())]
    Cgroup {
        /// `create`, `remove`, …
        action: &'static str,
        /// The cgroup's directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Processes in a cgroup did not end in time after SIGKILL.
    #[error("{count} processes in cgroup {} survive after {waited:?}", path.display())]
    CgroupBusy {
        /// The cgroup's directory.
        path: PathBuf,
        /// How many are left.
        count: usize,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The kernel does not offer the scheduler.
    #[error("{knob}: the kernel does not offer {wanted} (it offers {offered:?})")]
    SchedulerNotOffered {
        /// Which knob.
        knob: Box<Knob>,
        /// Which scheduler.
        wanted: String,
        /// What `queue/scheduler` lists.
        offered: Vec<String>,
    },
    /// A change is about a device or VM that the topology does not have.
    #[error("knob {knob} is of a device or VM that the plan does not list")]
    UnknownKnob {
        /// Which knob.
        knob: Box<Knob>,
    },
    /// A value that the knob's kernel file cannot hold.
    #[error("{value:?} is not a value of knob {knob}: {expected}")]
    BadValue {
        /// Which knob.
        knob: Box<Knob>,
        /// The value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// A bfq parameter or weight is to be set, but the scheduler will not be bfq.
    #[error("knob {knob} exists only under bfq, and the scheduler would be {scheduler}")]
    NotBfq {
        /// Which knob.
        knob: Box<Knob>,
        /// The scheduler it would be.
        scheduler: String,
    },
    /// The host's knobs differ from those that the plan was made on. Nothing was written.
    #[error("the plan is stale: {}", list(differences))]
    Stale {
        /// Each knob that differs: what the plan saw and what is there.
        differences: Vec<Drift>,
    },
    /// The kernel refused a write; all that was written before is undone.
    #[error("cannot set {knob} to {wanted:?} in {}; undone", file.display())]
    WriteRefused {
        /// Which knob.
        knob: Box<Knob>,
        /// Which file.
        file: PathBuf,
        /// The value.
        wanted: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel took a value and shows another; all is undone.
    #[error("{knob} was set to {wanted:?} in {} and reads {found:?}; undone", file.display())]
    ReadBackDiffers {
        /// Which knob.
        knob: Box<Knob>,
        /// Which file.
        file: PathBuf,
        /// What was written.
        wanted: String,
        /// What is read.
        found: String,
    },
    /// A VM's own knobs cannot be reached. Nothing was written.
    #[error("VM {vm}: {fault}")]
    Guest {
        /// Which VM.
        vm: VmName,
        /// Why.
        fault: Box<GuestFault>,
    },
    /// The data plane does not answer, or not as it should. Nothing was written.
    #[error("the data plane at {}: {fault}", control.display())]
    DataPlane {
        /// Its control socket.
        control: PathBuf,
        /// Why.
        fault: Box<ControlFault>,
    },
    /// The data plane does not have a disk. Nothing was written.
    #[error("the data plane at {} has no device {disk}", control.display())]
    NoDataPlaneDevice {
        /// Its control socket.
        control: PathBuf,
        /// The disk.
        disk: DiskName,
    },
    /// The data plane refused a change; all that was written before is undone.
    #[error("cannot set {knob} to {wanted}: {fault}; undone")]
    DataPlaneWriteFailed {
        /// Which knob.
        knob: Box<Knob>,
        /// What was to be set.
        wanted: String,
        /// Why.
        fault: Box<ControlFault>,
    },
    /// A guest or its QEMU refused a write or did not answer; all that was written before is undone.
    #[error("cannot set {knob} to {wanted:?} in {}: {fault}; undone", file.display())]
    GuestWriteFailed {
        /// Which knob.
        knob: Box<Knob>,
        /// Its place.
        file: PathBuf,
        /// The value.
        wanted: String,
        /// Why.
        fault: Box<GuestFault>,
    },
    /// An apply failed, and undoing it too; the journal keeps what is left.
    #[error("apply failed ({cause}), and so did undoing it: {}", list(failures))]
    UndoIncomplete {
        /// Why the apply failed.
        cause: Box<HostError>,
        /// What could not be restored.
        failures: Vec<String>,
    },
    /// Part of the old state could not be restored; the journal keeps it.
    #[error("could not restore: {}", list(failures))]
    RestoreIncomplete {
        /// What could not be restored, and why.
        failures: Vec<String>,
        /// What was.
        done: Box<Restoration>,
    },
    /// Another process is changing this host.
    #[error("another process{} is changing this host", pid.map(|p| format!(" ({p})")).unwrap_or_default())]
    Locked {
        /// Its process id, if it could be read.
        pid: Option<u32>,
    },
    /// A calibration or benchmark has set a device's scheduler or its knobs, and puts them back in the end.
    #[error("a calibration or benchmark{} has settings of its own on device {device}", pid.map(|p| format!(" (process {p})")).unwrap_or_default())]
    Measured {
        /// Which device.
        device: DeviceName,
        /// Its process, if it could be read.
        pid: Option<u32>,
    },
    /// An earlier apply still waits to be confirmed.
    #[error("an earlier apply waits to be confirmed for another {remaining:.0?}")]
    AwaitsConfirmation {
        /// Until it is reverted.
        remaining: Duration,
    },
    /// There is no apply that waits to be confirmed.
    #[error("no apply waits to be confirmed")]
    NothingToConfirm,
    /// The confirmation came after the deadline; the apply is reverted.
    #[error("the confirmation comes too late")]
    ConfirmedTooLate,
    /// The journal, the lock or their directory could not be used.
    #[error("cannot {action} {}", file.display())]
    State {
        /// `open`, `write`, …
        action: &'static str,
        /// Which file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The journal cannot be parsed.
    #[error("the journal {} is damaged", file.display())]
    JournalDamaged {
        /// Which file.
        file: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// The journal is of another version.
    #[error("the journal {} has version {found}, this program knows {known}", file.display())]
    JournalVersion {
        /// Which file.
        file: PathBuf,
        /// Its version.
        found: u32,
        /// The version that this program writes.
        known: u32,
    },
    /// The block layer's tracepoints cannot be used.
    #[error("cannot {action}")]
    Trace {
        /// `open …`, `read …`
        action: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A trace has ended because CPUs came or went.
    #[error("CPUs came or went, which ends the trace of the block layer")]
    TraceStale,
    /// systemd refused a request, or did not answer in time.
    #[error("cannot {action}")]
    Systemd {
        /// `ask systemd`, …
        action: &'static str,
        /// Why.
        source: zbus::Error,
    },
    /// systemd does not know a unit whose cgroup is there, or cannot be asked.
    #[error("systemd does not answer for {unit} on the system bus")]
    UnitUnknown {
        /// The unit.
        unit: String,
    },
    /// The user ended the work before anything was changed.
    #[error(transparent)]
    EndedByUser(#[from] InterruptedError),
    /// The observer stopped the work, as a crash would: nothing is undone.
    #[error("stopped at {step:?}")]
    Interrupted {
        /// Where.
        step: Box<Step>,
    },
}

fn load_module(scheduler: &str) -> String {
    format!(
        "load its module (bfq: `modprobe bfq`, kyber: `modprobe kyber-iosched`) or plan without {scheduler}"
    )
}

fn list<T: std::fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join("; ")
}

impl HostError {
    /// Whether the user ended the work, and nothing was changed or all is undone.
    #[must_use]
    pub fn is_of_user(&self) -> bool {
        match self {
            Self::DataPlane { fault, .. } | Self::DataPlaneWriteFailed { fault, .. } => {
                matches!(**fault, ControlFault::Interrupted)
            }
            Self::Guest { fault, .. } | Self::GuestWriteFailed { fault, .. } => fault.is_of_user(),
            Self::EndedByUser(_) => true,
            _ => false,
        }
    }

    /// Whether the kernel has no such scheduler, and none to load either (kernel `block/elevator.c`).
    #[must_use]
    pub fn lacks_scheduler(&self) -> bool {
        let Self::WriteRefused { knob, source, .. } = self else { return false };
        matches!(**knob, Knob::Scheduler { .. }) && source.kind() == io::ErrorKind::InvalidInput
    }

    /// What an operator can do about it.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let denied = |e: &io::Error| e.kind() == io::ErrorKind::PermissionDenied;
        Some(match self {
            Self::Read { source, .. }
            | Self::State { source, .. }
            | Self::Cgroup { source, .. }
            | Self::WriteRefused { source, .. }
                if denied(source) =>
            {
                "run as root".to_owned()
            }
            // A host's own root has no processes in its way, and is writable.
            Self::Cgroup { source, .. }
                if matches!(
                    source.kind(),
                    io::ErrorKind::ResourceBusy | io::ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                "a container's cgroups do not allow it: run on the host, or give the container the host's (`--cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup`)".to_owned()
            }
            Self::Trace { source, .. } if denied(source) => {
                "run as root; a kernel in lockdown mode refuses root too".to_owned()
            }
            Self::Trace { .. } => {
                "needs a kernel with CONFIG_EVENT_TRACING, CONFIG_PERF_EVENTS and tracefs".to_owned()
            }
            Self::TraceStale => "start another trace".to_owned(),
            Self::Read { file, source }
                if source.kind() == io::ErrorKind::NotFound
                    && file.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"io.")) =>
            {
                "enable the io controller for it: write +io to cgroup.subtree_control of each parent (systemd: set IOAccounting=yes on the unit)".to_owned()
            }
            Self::DeviceMissing { .. } => {
                "check the device's path; `ls -l /dev/disk/by-id` lists the stable ones".to_owned()
            }
            Self::NotABlockDevice { .. } => "name the block device, not a file on it".to_owned(),
            Self::DeviceReplaced { .. } => {
                "calibrate the new device and make a new plan".to_owned()
            }
            Self::SameDisk { first, .. } => format!(
                "a scheduler belongs to a whole disk: put the VMs of both under {first}"
            ),
            Self::SharedDisk { .. } => {
                "a plan for one does not know what the other takes: leave the VMs of one out".to_owned()
            }
            Self::NoIoController => {
                "mount cgroup2 with the io controller, or cgroup v1 blkio; `rtvirtio doctor` shows what is there".to_owned()
            }
            Self::BadCgroupPath { .. } => {
                "give the path below the mount, such as machine.slice/plc.scope".to_owned()
            }
            Self::CgroupMissing { path, .. }
                if path.iter().any(|part| part.as_encoded_bytes().starts_with(b"machine-qemu-")) =>
            {
                "systemd writes \\x2d for a - in a domain's scope, and TOML reads \\x2d in double quotes as -: \
                 write the path in single quotes"
                    .to_owned()
            }
            Self::CgroupMissing { .. } => {
                "start the VM first, or correct its `cgroup`: /proc/PID/cgroup of its QEMU shows it".to_owned()
            }
            Self::CgroupBusy { .. } => {
                "a process in uninterruptible I/O ends when its device answers; then remove the cgroup again".to_owned()
            }
            Self::SchedulerNotOffered { wanted, .. } => load_module(wanted),
            Self::WriteRefused { wanted, .. } if self.lacks_scheduler() => load_module(wanted),
            Self::UnknownKnob { .. } | Self::BadValue { .. } | Self::NotBfq { .. } => {
                "the plan was edited or is damaged: make a new one".to_owned()
            }
            Self::Stale { .. } => {
                "make a new plan; `rtvirtio verify` names other writers of these knobs".to_owned()
            }
            Self::ReadBackDiffers { knob, .. } => match **knob {
                Knob::Bfq { .. } | Knob::GuestBfq { .. } => {
                    "the kernel rounds times up to its tick (4 ms at HZ=250) and clamps ranges: plan a value that it can hold".to_owned()
                }
                _ => "another program may write the same knob: `rtvirtio verify` names it".to_owned(),
            },
            Self::Guest { fault, .. } | Self::GuestWriteFailed { fault, .. } => {
                fault.hint()?.to_owned()
            }
            Self::DataPlane { fault, .. } | Self::DataPlaneWriteFailed { fault, .. } => {
                fault.hint()?
            }
            Self::NoDataPlaneDevice { .. } => {
                "a disk of the specification has the name of its device there: `rtvirtio ctl show`"
                    .to_owned()
            }
            Self::UndoIncomplete { .. } | Self::RestoreIncomplete { .. } => {
                "remove the cause (a guest that does not answer: start its qemu-guest-agent or end `rtvirtio watch`, for QEMU serves one client of a socket at a time; or shut its VM down, whose own knobs go with it; a data plane that does not answer: see its log, or start it again, and what was set in it goes too) and run `rtvirtio rollback` again".to_owned()
            }
            Self::Systemd { .. } | Self::UnitUnknown { .. } => {
                "`busctl status org.freedesktop.systemd1` says whether systemd answers; set it right, then try again".to_owned()
            }
            Self::Locked { .. } => "wait for it to end, then try again".to_owned(),
            Self::Measured { .. } => {
                "wait for it to end, or interrupt it, then try again; what a killed one has left, `rtvirtio rollback` or the next calibration puts back".to_owned()
            }
            Self::AwaitsConfirmation { .. } => {
                "run `rtvirtio confirm` to keep it or `rtvirtio rollback` to undo it".to_owned()
            }
            Self::ConfirmedTooLate => "apply again with a longer --confirm-timeout".to_owned(),
            Self::JournalDamaged { file, .. } | Self::JournalVersion { file, .. } => format!(
                "note the old values in {} by hand, restore them, and remove the file",
                file.display()
            ),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use rustix::io::Errno;

    use super::*;
    use crate::Host;
    use crate::fake::FakeSysfs;

    #[test]
    fn cgroups_of_a_container_are_hinted_at() {
        for errno in [Errno::BUSY, Errno::ROFS] {
            let state = tempfile::tempdir().unwrap();
            let fake = FakeSysfs::v2();
            fake.refuse("/sys/fs/cgroup/cgroup.subtree_control", errno);
            let host = Host::with_sysfs(state.path(), Arc::new(fake));
            let error = host.create_cgroup(Path::new("rtvirtio/run/a")).unwrap_err();
            assert!(error.hint().unwrap().contains("--cgroupns=host"), "{error}");
        }
    }

    #[test]
    fn scope_whose_escapes_were_read_by_toml_is_hinted_at() {
        let hint = |path: &str| {
            let vm = VmName::new("plc").unwrap();
            HostError::CgroupMissing { vm, path: PathBuf::from(path) }.hint().unwrap()
        };
        let hinted = hint("/sys/fs/cgroup/machine.slice/machine-qemu-1-plc.scope");
        assert!(hinted.contains("single quotes") && hinted.contains("\\x2d"), "{hinted}");
        assert!(
            hint(r"/sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dplc.scope").contains("start")
        );
    }
}
