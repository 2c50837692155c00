//! What an operator wants: devices, VMs, their disks and tasks, and targets.
//!
//! A specification arrives as hostile TOML. [`parse`] turns it into a
//! [`Specification`] in which every name is checked and unique, every
//! reference resolves and every number is in range, or into an error with
//! file, line and a hint. Nothing else builds one from text. [`to_toml`] writes
//! one that [`parse`] reads back as it was.

mod error;
mod parse;
mod raw;
mod write;

#[cfg(test)]
mod tests;

/// The schema of the file, into whose generator its tables go.
#[cfg(feature = "schema")]
pub(crate) fn schema(generator: schemars::SchemaGenerator) -> schemars::Schema {
    generator.into_root_schema_for::<raw::RawSpecification>()
}

use std::path::PathBuf;

use crate::serve::IoPriority;
use rtvirtio_units::{
    Bytes, Confidence, DeviceName, DiskName, Iops, Nanos, Percentile, TaskName, VmName,
};

pub use error::{
    CgroupFault, Found, Kind, Label, PathFault, Problem, SpecificationError, Subject, Wanted,
};
pub(crate) use error::{Plain, Quoted, listed, nearest};
pub use parse::{
    MAX_DISKS_PER_VM, MAX_FILE_BYTES, MAX_KEY_PARTS, MAX_QUEUES, MAX_TASKS_PER_VM, MAX_VCPUS,
    MAX_VMS, parse, vm_group,
};
pub(crate) use parse::{deep_key, position, unknown_field};
pub use write::to_toml;

/// A checked specification.
#[derive(Debug, Clone, PartialEq)]
pub struct Specification {
    /// Control socket of the data plane; there if a VM is served by it.
    pub data_plane: Option<PathBuf>,
    /// Shared block devices, at least one.
    pub devices: Vec<Device>,
    /// VMs in order of the file, at least one.
    pub vms: Vec<Vm>,
}

/// A shared block device of the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// Its name in this specification.
    pub name: DeviceName,
    /// Its node, such as `/dev/disk/by-id/…`.
    pub path: PathBuf,
    /// Its profile file, made by `rtvirtio calibrate`.
    pub profile: PathBuf,
}

/// How a VM's disks are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// QEMU's virtio-blk on a host block device; the kernel's knobs apply.
    Kernel,
    /// The data plane (`rtvirtio serve`), whose devices have the names of the VM's disks.
    VhostUser,
}

/// A VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Vm {
    /// Unique name.
    pub name: VmName,
    /// How its disks are served.
    pub backend: Backend,
    /// Its cgroup below the io controller's mount, such as `machine.slice/plc.scope`.
    pub cgroup: PathBuf,
    /// Its virtual CPUs, 1 to [`MAX_VCPUS`]; `None`: not said.
    pub vcpus: Option<u32>,
    /// Whether the schedulers within its guest are set too, through the guest's agent.
    pub guest_agent: bool,
    /// Its disks, at least one.
    pub disks: Vec<Disk>,
    /// Its tasks; a VM without a task is a background VM of unknown load.
    pub tasks: Vec<Task>,
}

/// A VM's disk.
#[derive(Debug, Clone, PartialEq)]
pub struct Disk {
    /// Unique within its VM.
    pub name: DiskName,
    /// The device that it lies on.
    pub device: DeviceName,
    /// Its virtqueues, 1 to [`MAX_QUEUES`]; `None`: QEMU's default ([`Vm::queues_of`]).
    pub queues: Option<u32>,
}

/// How the host tells a task's requests from others of its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recognise {
    /// Not at all: the VM's strictest target applies to all it does.
    Unrecognised,
    /// By its disk.
    Disk,
    /// By the I/O priority with which its guest marks its requests; on the data plane.
    Ioprio(IoPriority),
}

/// What one task does and how late its slowest request may be.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// Unique within its VM.
    pub name: TaskName,
    /// One of its VM's disks.
    pub disk: DiskName,
    /// How it is recognised.
    pub recognise: Recognise,
    /// What it does.
    pub load: Load,
    /// Its target; none makes it background load.
    pub target: Option<Target>,
}

/// A task's declared load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Requests per second that it issues; `None`: as many as it can.
    pub iops: Option<Iops>,
    /// Request size, 512 bytes to 16 MiB in whole sectors.
    pub block_size: Bytes,
    /// Fraction of reads, 0 to 1.
    pub read_fraction: f64,
    /// Requests in flight, 1 to 1024.
    pub queue_depth: u32,
}

/// A latency target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Target {
    /// Which percentile of the task's latency.
    pub percentile: Percentile,
    /// How long that percentile may take.
    pub latency: Nanos,
    /// How sure the bound must be.
    pub confidence: Confidence,
}

impl Vm {
    /// The device that `task` of this VM works on.
    ///
    /// # Panics
    /// If `task` is not of this VM: a checked specification has no such task.
    #[must_use]
    pub fn device_of(&self, task: &Task) -> &DeviceName {
        let disk = self.disks.iter().find(|d| d.name == task.disk);
        &disk.expect("a checked task names a disk of its VM").device
    }

    /// The virtqueues of `disk`, a disk of this VM; `None` if it says neither these nor its vCPUs.
    #[must_use]
    pub fn queues_of(&self, disk: &Disk) -> Option<u32> {
        // QEMU's default is a queue for each vCPU (hw/virtio/virtio-pci.c,
        // virtio_pci_optimal_num_queues).
        disk.queues.or(self.vcpus)
    }

    /// Whether no task of this VM has a target.
    #[must_use]
    pub fn is_background(&self) -> bool {
        self.tasks.iter().all(|t| t.target.is_none())
    }
}
