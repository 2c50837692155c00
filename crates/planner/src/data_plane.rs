//! The plan of a device whose VMs the data plane serves: a schedule, a promise for each disk, or the
//! reason why there can be none.
//!
//! A task that its guest marks with an I/O priority has a promise of its own. The others of a disk
//! have one together, with the strictest of their targets. VMs are heard by urgency; one gets all that its tasks need, or nothing: then it
//! shares what promises leave, as VMs without a target do.
//!
//! Properties (tests of the same name): `service_curve_of_a_profile_is_the_device_that_it_is_of`,
//! `each_vm_gets_a_promise_as_long_as_they_fit`, `what_does_not_fit_is_refused_with_what_would`.

use std::collections::BTreeSet;

use rtvirtio_qos::admission::{Curve, Fit, Refusal, Wish};
use rtvirtio_qos::{Device, MAX_TRANSFER};
use rtvirtio_spec::control::ScheduleCurve;
use rtvirtio_spec::plan::data_plane::DataPlane;
use rtvirtio_spec::plan::{BackgroundShare, DeviceCost, TaskPromise};
use rtvirtio_spec::profile::Capacity;
use rtvirtio_spec::serve::{self, IoPriority, MAX_TASKS, Promise, Qos, Rate, wire};
use rtvirtio_spec::specification::{Load, Recognise, Task, Vm};
use rtvirtio_units::{Bytes, BytesPerSecond, DiskName, Iops, Name, Nanos, Weight};

use crate::{PROBED_PERCENTILE, Problem};

/// What is planned for one device.
pub(crate) struct Choice {
    pub(crate) promises: Vec<TaskPromise>,
    pub(crate) background: Vec<BackgroundShare>,
    pub(crate) cost: DeviceCost,
    pub(crate) reasons: Vec<String>,
}

/// The service curve that a device has by what calibration saw of it.
///
/// What `m` channels do is `m` over the cost of a request, and a response alone is overhead and
/// cost: small and large requests give two equations each.
#[must_use]
pub fn service_curve(capacity: &Capacity) -> Curve {
    let large = MAX_TRANSFER.get() as f64;
    let (small, large) = (capacity.iops_4k, capacity.write_throughput.get() as f64 / large);
    let [mean_small, mean_large] =
        [&capacity.response_4k, &capacity.response_128k].map(|r| r.mean.as_secs_f64());
    let overhead = (small * mean_small - large * mean_large) / (small - large);
    let overhead = if overhead.is_finite() { overhead.clamp(0.0, mean_small / 2.0) } else { 0.0 };
    let channels = (small * (mean_small - overhead)).clamp(1.0, 65_536.0).floor();
    let [cost_small, cost_large] = [channels / small, channels / large];
    let kib = ((cost_large - cost_small) / 124.0).max(0.0);
    let request = (cost_small - 4.0 * kib).max(1e-9);
    let tail_large = capacity.response_128k.p999.as_secs_f64() - overhead;
    let spread = (tail_large / (mean_large - overhead)).max(1.0);
    let jitter = capacity.response_4k.p999.as_secs_f64() - overhead - cost_small * spread;
    let seconds = |s: f64| Nanos::from_secs_f64(s.max(0.0));
    let device = Device {
        channels: channels as u32,
        request: seconds(request),
        kib: seconds(kib),
        flush: seconds(cost_small),
    };
    Curve { device, spread, overhead: seconds(overhead), jitter: seconds(jitter) }
}

/// What of a transfer is one request to the device, and how many of these it is.
fn parts(block: Bytes) -> u64 {
    block.get().div_ceil(MAX_TRANSFER.get()).max(1)
}

/// What tasks ask for together, if they say how much.
fn rate(loads: impl Iterator<Item = Load>) -> Option<Rate> {
    let (mut iops, mut bandwidth, mut depth) = (0.0, 0.0, 0);
    for load in loads {
        let requests = load.iops?.get();
        iops += requests * parts(load.block_size) as f64;
        bandwidth += requests * load.block_size.get() as f64;
        depth += load.queue_depth;
    }
    Some(Rate {
        iops: Some(Iops::new(iops.ceil()).ok()?),
        bandwidth: Some(BytesPerSecond::new(bandwidth.ceil() as u64)),
        // One that was late is followed by the next at once.
        burst: depth.saturating_mul(2).clamp(1, 65_536),
    })
}

/// Tasks of a VM's disk that cannot be told apart, some with a target, and what they need.
struct Wanted<'a> {
    disk: &'a DiskName,
    ioprio: Option<IoPriority>,
    promise: Promise,
    tasks: Vec<(&'a Task, Wish)>,
}

const fn marked(task: &Task) -> Option<IoPriority> {
    match task.recognise {
        Recognise::Ioprio(ioprio) => Some(ioprio),
        Recognise::Unrecognised | Recognise::Disk => None,
    }
}

/// What each of a disk's groups of tasks wants.
fn wanted<'a>(disk: &'a DiskName, tasks: &[&'a Task]) -> Result<Vec<Wanted<'a>>, String> {
    let of_disk = tasks.iter().filter(|task| task.disk == *disk);
    let groups: BTreeSet<_> = of_disk.map(|task| marked(task)).collect();
    if groups.len() > MAX_TASKS {
        return Err(format!("its disk {disk} has tasks of more than {MAX_TASKS} I/O priorities"));
    }
    groups.into_iter().filter_map(|group| wanted_by(disk, group, tasks)).collect()
}

fn wanted_by<'a>(
    disk: &'a DiskName,
    ioprio: Option<IoPriority>,
    tasks: &[&'a Task],
) -> Option<Result<Wanted<'a>, String>> {
    let is_one = |task: &&&Task| task.disk == *disk && marked(task) == ioprio;
    let tasks = || tasks.iter().filter(is_one).copied();
    let deadline = tasks().filter_map(|task| Some(task.target?.latency)).min()?;
    let deadline = Nanos::from_micros((deadline.get() / 1_000).clamp(1, 60_000_000));
    let Some(all) = rate(tasks().map(|task| task.load)) else {
        let why = "declares no iops: only a declared rate can be promised";
        return Some(Err(format!("a task of its disk {disk} {why}")));
    };
    let wish = |task: &'a Task| {
        let own = rate(std::iter::once(task.load))?;
        let promise = rtvirtio_qos::Promise {
            deadline,
            rate: rtvirtio_qos::Rate { iops: own.iops, bandwidth: own.bandwidth, burst: own.burst },
        };
        Some((task, Wish { promise, depth: Some(task.load.queue_depth) }))
    };
    let tasks = tasks().filter_map(wish).collect();
    Some(Ok(Wanted { disk, ioprio, promise: Promise { deadline, rate: all }, tasks }))
}

pub(crate) fn plan(problem: &Problem<'_>, into: &mut DataPlane) -> Choice {
    let curve = service_curve(&problem.profile.capacity);
    // Both are names; a device's is checked alike.
    let schedule = Name::from(problem.device.name.clone());
    let of_device = ScheduleCurve {
        channels: curve.device.channels,
        request_ns: curve.device.request.get().max(1),
        kib_ns: curve.device.kib.get(),
        flush_ns: Some(curve.device.flush.get().max(1)),
    };
    into.schedules.insert(schedule.clone(), of_device);

    let mut order: Vec<usize> = (0..problem.vms.len()).collect();
    order.sort_by_key(|&i| (problem.vms[i].urgency.is_none(), problem.vms[i].urgency, i));
    let disks = |vm: &Vm| {
        let on_device =
            move |d: &&rtvirtio_spec::specification::Disk| d.device == problem.device.name;
        vm.disks.iter().filter(on_device).map(|disk| disk.name.clone()).collect::<Vec<_>>()
    };
    let of_vms: Vec<(usize, Vec<DiskName>)> =
        order.iter().map(|&i| (i, disks(problem.vms[i].vm))).collect();
    let all: Vec<(usize, Result<Vec<Wanted<'_>>, String>)> = of_vms
        .iter()
        .map(|(i, disks)| {
            let tasks = &problem.vms[*i].tasks;
            let of_disks: Result<Vec<_>, String> =
                disks.iter().map(|disk| wanted(disk, tasks)).collect();
            (*i, of_disks.map(|of_disks| of_disks.into_iter().flatten().collect()))
        })
        .collect();
    let wishes: Vec<Vec<Wish>> = all
        .iter()
        .map(|(_, wanted)| {
            let disks = wanted.iter().flatten();
            disks.flat_map(|disk| disk.tasks.iter().map(|(_, wish)| *wish)).collect()
        })
        .collect();
    let fits = curve.admit(&wishes);

    let mut choice = Choice {
        promises: Vec::new(),
        background: Vec::new(),
        cost: DeviceCost {
            device: problem.device.name.clone(),
            background_alone: BytesPerSecond::default(),
            background_planned: BytesPerSecond::default(),
            utilisation: 0.0,
        },
        reasons: vec![format!(
            "service curve: {} at a time, {} and {}/KiB each; overhead {}",
            curve.device.channels, curve.device.request, curve.device.kib, curve.overhead
        )],
    };
    let (mut used, mut needed) = (0.0, 0.0);
    let channels = f64::from(curve.device.channels);
    for (((i, wanted), (_, names)), (wishes, fits)) in
        all.iter().zip(&of_vms).zip(wishes.iter().zip(&fits))
    {
        let vm = &problem.vms[*i];
        let share = wishes.iter().map(|w| w.promise.rate.channels(&curve.device)).sum::<f64>();
        needed += share / channels;
        let refused = refusal(problem, &all, wanted, fits);
        for disk in names {
            let is_promised = |w: &&Wanted<'_>| w.disk == disk && refused.is_none();
            let promised = || wanted.iter().flatten().filter(is_promised);
            let own = promised().find(|w| w.ioprio.is_none()).map(|w| w.promise.clone());
            let marked = promised().filter_map(|w| Some((w.ioprio?, w.promise.clone())));
            let qos = Qos {
                schedule: schedule.clone(),
                weight: Weight::default(),
                promise: own,
                limit: None,
                tasks: marked.map(|(ioprio, promise)| serve::Task { ioprio, promise }).collect(),
            };
            into.disks.insert(disk.clone(), wire::Qos::from(&qos));
        }
        if vm.urgency.is_none() {
            let (vm, device) = (vm.vm.name.clone(), problem.device.name.clone());
            choice.background.push(BackgroundShare { vm, device, cap: None, held_by: None });
        } else if refused.is_none() {
            used += share / channels;
        }
        let heard = wanted.iter().flatten().flat_map(|disk| &disk.tasks).zip(fits);
        choice.promises.extend(promises(vm.vm, heard, refused.as_deref()));
        if let Err(why) = wanted {
            choice.promises.extend(undeclared(vm.vm, &vm.tasks, why));
        }
    }
    if !choice.background.is_empty() {
        let alone = problem.profile.capacity.write_throughput;
        choice.cost.background_alone = alone;
        let left = (1.0 - used).max(0.0) * alone.get() as f64;
        choice.cost.background_planned = BytesPerSecond::new(left as u64);
    }
    choice.cost.utilisation = needed;
    choice.reasons.extend(caveats(problem));
    choice
}

/// Why a VM gets no promise, if it gets none.
fn refusal(
    problem: &Problem<'_>,
    all: &[(usize, Result<Vec<Wanted<'_>>, String>)],
    wanted: &Result<Vec<Wanted<'_>>, String>,
    fits: &[Fit],
) -> Option<String> {
    if let Err(why) = wanted {
        return Some(why.clone());
    }
    let refusal = fits.iter().find_map(|fit| fit.refusal)?;
    Some(match refusal {
        Refusal::Other { vm, broken } => {
            let name = &problem.vms[all[vm].0].vm.name;
            format!("beside it, {broken} of the more urgent {name} would not be kept")
        }
        other => other.to_string(),
    })
}

fn promises<'a>(
    vm: &'a Vm,
    heard: impl Iterator<Item = (&'a (&'a Task, Wish), &'a Fit)>,
    refused: Option<&str>,
) -> Vec<TaskPromise> {
    let promise = |((task, wish), fit): (&(&Task, Wish), &Fit)| {
        let target = task.target?;
        // Its own reason before its VM's.
        let own = fit.refusal.filter(|r| !matches!(r, Refusal::Other { .. }));
        let unmet = refused.map(|of_vm| own.map_or_else(|| of_vm.to_owned(), |r| r.to_string()));
        let bound = fit.bound(wish.promise.deadline);
        Some(TaskPromise {
            vm: vm.name.clone(),
            task: task.name.clone(),
            percentile: target.percentile,
            target: target.latency,
            predicted: fit.least,
            bound: unmet.is_none().then_some(bound),
            confidence: target.confidence,
            delivered: if unmet.is_none() { 1.0 } else { 0.0 },
            unmet,
        })
    };
    heard.filter_map(promise).collect()
}

/// The tasks with a target of a VM one of whose tasks declares no rate.
fn undeclared(vm: &Vm, tasks: &[&Task], why: &str) -> Vec<TaskPromise> {
    let promise = |task: &&Task| {
        let target = task.target?;
        Some(TaskPromise {
            vm: vm.name.clone(),
            task: task.name.clone(),
            percentile: target.percentile,
            target: target.latency,
            predicted: target.latency,
            bound: None,
            confidence: target.confidence,
            delivered: 0.0,
            unmet: Some(why.to_owned()),
        })
    };
    tasks.iter().filter_map(promise).collect()
}

/// Where the bounds say more than was measured.
fn caveats(problem: &Problem<'_>) -> Vec<String> {
    let mut caveats = Vec::new();
    for v in &problem.vms {
        for task in v.tasks.iter().filter(|task| task.target.is_some()) {
            let name = format!("{}/{}", v.vm.name, task.name);
            if task.target.is_some_and(|t| t.percentile.get() > PROBED_PERCENTILE) {
                caveats.push(format!(
                    "{name}: bounds are of p{PROBED_PERCENTILE}; beyond it they extrapolate"
                ));
            }
            if parts(task.load.block_size) > 1 {
                caveats.push(format!(
                    "{name}: requests above {MAX_TRANSFER} are split; the bound is of each part"
                ));
            }
        }
    }
    caveats
}

#[cfg(test)]
mod tests;
