//! One load in the terms of two rooms: the simulator's condition, the models' load, a specification
//! under settings.

use rtvirtio_model::paper::GuestBfq;
use rtvirtio_model::{DeviceLoad, Stream, VmLoad};
use rtvirtio_sim::path::{Condition, Length, Service, Task, Vm};
use rtvirtio_spec::settings::{DeviceSettings, Scheduler, VmSettings};
use rtvirtio_spec::specification::Specification;
use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{DeviceName, Nanos};

/// A condition as the models see it; to them the data plane is a device without a scheduler.
pub(crate) fn device_load(condition: &Condition) -> DeviceLoad {
    let scheduler = match condition.service {
        Service::Kernel { scheduler } => scheduler,
        Service::DataPlane => Scheduler::None,
    };
    let stream = |t: &Task| Stream {
        iops: t.iops,
        block_size: t.block_size,
        read_fraction: t.read_fraction,
        depth: t.queue_depth,
    };
    let vm = |v: &Vm| VmLoad {
        streams: v.tasks.iter().map(stream).collect(),
        settings: VmSettings { weight: v.weight, limits: v.limits },
    };
    DeviceLoad { scheduler, vms: condition.vms.iter().map(vm).collect() }
}

/// bfq in the VM's guest.
pub(crate) const fn guest_bfq(vm: &Vm) -> Option<GuestBfq> {
    match vm.guest {
        Some(Scheduler::Bfq(bfq)) => Some(GuestBfq {
            slice_idle_us: bfq.slice_idle_us,
            timeout_sync_ms: bfq.timeout_sync_ms,
        }),
        _ => None,
    }
}

/// The VMs of `specification` with tasks on device `name`, under `settings`; the rest is for the
/// caller to say. A VM that declares nothing there is what the models take it for.
pub(crate) fn condition_of(
    specification: &Specification,
    settings: &DeviceSettings,
    name: &DeviceName,
    rest: Rest,
) -> Condition {
    let on_device =
        specification.vms.iter().filter(|vm| vm.disks.iter().any(|d| d.device == *name));
    let vms = on_device.map(|vm| {
        let here = vm.tasks.iter().filter(|t| vm.device_of(t) == name);
        let mut streams: Vec<Stream> = here.map(|t| Stream::from(t.load)).collect();
        if streams.is_empty() {
            streams.extend(Stream::UNDECLARED);
        }
        let set = settings.vms.get(&vm.name).copied().unwrap_or_default();
        let task = |s: Stream| Task {
            iops: s.iops,
            block_size: s.block_size,
            read_fraction: s.read_fraction,
            queue_depth: s.depth,
            deadline: None,
        };
        Vm {
            weight: set.weight,
            limits: set.limits,
            priority: None,
            guest: None,
            tasks: streams.into_iter().map(task).collect(),
        }
    });
    let Rest { device, nesting, transport, software, warm_up, length, seed } = rest;
    let service = Service::Kernel { scheduler: settings.scheduler };
    let vms = vms.collect();
    Condition { device, service, nesting, transport, software, vms, warm_up, length, seed }
}

/// What a specification does not say of a simulation.
pub(crate) struct Rest {
    /// The device.
    pub(crate) device: SsdConfig,
    /// Cgroups around the VMs'.
    pub(crate) nesting: u8,
    /// What a request takes between scheduler and device and back.
    pub(crate) transport: Nanos,
    /// What it takes beside that.
    pub(crate) software: Nanos,
    /// I/O that does not count.
    pub(crate) warm_up: Nanos,
    /// How long.
    pub(crate) length: Length,
    /// Of all that is random.
    pub(crate) seed: u64,
}
