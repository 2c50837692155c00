//! One load in the terms of two crates: the simulator's condition, the models' load, a specification
//! under settings.

use std::collections::BTreeMap;

use rtvirtio_model::paper::GuestBfq;
use rtvirtio_model::{DeviceLoad, Stream, VmLoad};
use rtvirtio_sim::path::{Condition, Length, Priority, Service, Task, Vm};
use rtvirtio_spec::settings::{DeviceSettings, Scheduler, VmSettings};
use rtvirtio_spec::specification::Specification;
use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{DeviceName, Nanos, VmName};

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
/// caller to say. A VM that declares nothing there is what the models take it for. A target is its task's
/// deadline, which the data plane alone minds.
pub(crate) fn condition_of(
    specification: &Specification,
    settings: &DeviceSettings,
    name: &DeviceName,
    rest: Rest,
) -> Condition {
    let on_device =
        specification.vms.iter().filter(|vm| vm.disks.iter().any(|d| d.device == *name));
    let vms = on_device.map(|vm| {
        let task = |s: Stream, deadline| Task {
            iops: s.iops,
            block_size: s.block_size,
            read_fraction: s.read_fraction,
            queue_depth: s.depth,
            deadline,
        };
        let here = vm.tasks.iter().filter(|t| vm.device_of(t) == name);
        let mut tasks: Vec<Task> =
            here.map(|t| task(Stream::from(t.load), t.target.map(|t| t.latency))).collect();
        if tasks.is_empty() {
            tasks.extend(Stream::UNDECLARED.into_iter().map(|s| task(s, None)));
        }
        let set = settings.vms.get(&vm.name).copied().unwrap_or_default();
        Vm {
            weight: set.weight,
            limits: set.limits,
            priority: rest.priorities.get(&vm.name).copied(),
            guest: None,
            tasks,
        }
    });
    let vms = vms.collect();
    let Rest { device, data_plane, nesting, transport, software, warm_up, length, seed, .. } = rest;
    let service = match data_plane {
        true => Service::DataPlane,
        false => Service::Kernel { scheduler: settings.scheduler },
    };
    let seasoned = false;
    Condition {
        device,
        service,
        nesting,
        seasoned,
        transport,
        software,
        vms,
        warm_up,
        length,
        seed,
    }
}

/// What a specification does not say of a simulation.
pub(crate) struct Rest {
    /// The device.
    pub(crate) device: SsdConfig,
    /// The data plane's schedule before it, instead of the kernel's.
    pub(crate) data_plane: bool,
    /// I/O priorities of VMs' processes.
    pub(crate) priorities: BTreeMap<VmName, Priority>,
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
