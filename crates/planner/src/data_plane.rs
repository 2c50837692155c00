//! The plan of a device whose VMs the data plane serves: a schedule, a promise for each disk, or the
//! reason why there can be none.
//!
//! A task that its guest marks with an I/O priority has a promise of its own. The others of a disk
//! have one together, with the strictest of their targets, and tasks that are marked and have no target are among
//! these: the data plane knows a priority by its promise alone. VMs are heard by urgency; one gets all that its
//! tasks need, or nothing: then it shares what promises leave, as VMs without a target do.
//!
//! Properties (tests of the same name): `service_curve_of_a_profile_is_the_device_that_it_is_of`,
//! `each_vm_gets_a_promise_as_long_as_they_fit`, `what_does_not_fit_is_refused_with_what_would`.

use std::collections::BTreeSet;

use rtvirtio_qos::admission::{self, Curve, Fit, Refusal, Wish};
use rtvirtio_qos::{Device, MAX_TRANSFER};
use rtvirtio_spec::control::ScheduleCurve;
use rtvirtio_spec::plan::data_plane::DataPlane;
use rtvirtio_spec::plan::{
    BackgroundShare, Broken, Cause, DeviceCost, PredictedBy, Reason, TaskPromise, Unmet,
};
use rtvirtio_spec::profile::{Capacity, Response, StallFit};
use rtvirtio_spec::serve::{self, IoPriority, MAX_TASKS, Promise, Qos, Rate, wire};
use rtvirtio_spec::specification::{Load, Recognise, Target, Task, Vm};
use rtvirtio_units::{Bytes, BytesPerSecond, DiskName, Iops, Name, Nanos, VmName, Weight};

use crate::{Problem, ProblemVm, probed_percentile};

/// The least bandwidth that the data plane promises.
const MIN_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(512);

/// What is planned for one device.
pub(crate) struct Choice {
    pub(crate) promises: Vec<TaskPromise>,
    pub(crate) background: Vec<BackgroundShare>,
    pub(crate) cost: DeviceCost,
    pub(crate) reasons: Vec<Reason>,
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
    // A cache may end large writes sooner than the device serves small requests. They hold a channel as long all the same:
    // in parts of what is left of their response beside the overhead, which may be none, tails would be any number.
    let service_large = (mean_large - overhead).max(cost_small);
    let tail_large = capacity.response_128k.p999.as_secs_f64() - overhead;
    let spread = (tail_large / service_large).max(1.0);
    let jitter = capacity.response_4k.p999.as_secs_f64() - overhead - cost_small * spread;
    let decade = |of: &Response| of.p999.saturating_sub(of.p99).as_secs_f64();
    let spread_decade = decade(&capacity.response_128k) / service_large;
    let jitter_decade = decade(&capacity.response_4k) - cost_small * spread_decade;
    let seconds = |s: f64| Nanos::from_secs_f64(s.max(0.0));
    let device = Device {
        channels: channels as u32,
        request: seconds(request),
        kib: seconds(kib),
        flush: seconds(cost_small),
    };
    Curve {
        device,
        spread,
        spread_decade,
        overhead: seconds(overhead),
        jitter: seconds(jitter),
        jitter_decade: seconds(jitter_decade),
    }
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
        iops: Some(Iops::new(iops).ok()?),
        bandwidth: Some(BytesPerSecond::new(bandwidth.ceil() as u64)),
        // One that was late is followed by the next at once.
        burst: depth.saturating_mul(2).clamp(1, 65_536),
    })
}

/// A rate as the data plane takes it: whole requests, and no fewer bytes than its least.
fn rounded_up(rate: Rate) -> Rate {
    Rate {
        iops: rate.iops.and_then(|iops| Iops::new(iops.get().ceil()).ok()),
        bandwidth: rate.bandwidth.map(|bandwidth| bandwidth.max(MIN_BANDWIDTH)),
        ..rate
    }
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
fn wanted<'a>(disk: &'a DiskName, tasks: &[&'a Task]) -> Result<Vec<Wanted<'a>>, Cause> {
    let of_disk = || tasks.iter().copied().filter(move |task| task.disk == *disk);
    let with_target = of_disk().filter(|task| task.target.is_some());
    let promised: BTreeSet<IoPriority> = with_target.filter_map(marked).collect();
    if promised.len() > MAX_TASKS {
        return Err(Cause::TooManyPriorities { disk: disk.clone(), max: MAX_TASKS });
    }
    let groups = std::iter::once(None).chain(promised.iter().copied().map(Some));
    let wanted = groups.filter_map(|group| {
        // Requests of a priority without a promise are served, and count, as those that are not marked.
        let is_one =
            |task: &&'a Task| marked(task).filter(|ioprio| promised.contains(ioprio)) == group;
        let of_group: Vec<&'a Task> = of_disk().filter(is_one).collect();
        wanted_by(disk, group, &of_group)
    });
    wanted.collect()
}

/// What tasks of a disk want that cannot be told apart; none if none of them has a target.
fn wanted_by<'a>(
    disk: &'a DiskName,
    ioprio: Option<IoPriority>,
    tasks: &[&'a Task],
) -> Option<Result<Wanted<'a>, Cause>> {
    let tasks = || tasks.iter().copied();
    let deadline = tasks().filter_map(|task| Some(task.target?.latency)).min()?;
    let deadline = Nanos::from_micros((deadline.get() / 1_000).clamp(1, 60_000_000));
    let Some(all) = rate(tasks().map(|task| task.load)) else {
        return Some(Err(Cause::NoRate { disk: disk.clone() }));
    };
    let wish = |task: &'a Task| {
        let own = rate(std::iter::once(task.load))?;
        let promise = rtvirtio_qos::Promise {
            deadline,
            rate: rtvirtio_qos::Rate { iops: own.iops, bandwidth: own.bandwidth, burst: own.burst },
        };
        let percentile = task.target.map(|target| target.percentile);
        Some((task, Wish { promise, depth: Some(task.load.queue_depth), percentile }))
    };
    let tasks = tasks().filter_map(wish).collect();
    Some(Ok(Wanted { disk, ioprio, promise: Promise { deadline, rate: rounded_up(all) }, tasks }))
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
    let heard = hear(problem, &curve);
    for vm in &heard {
        let settings = |disk: &&DiskName| ((*disk).clone(), vm.settings(disk, &schedule));
        into.disks.extend(vm.disks.iter().map(settings));
    }
    describe(problem, &curve, &heard)
}

/// A VM, what it wants of the device, and what came of that.
struct Heard<'a> {
    vm: &'a Vm,
    tasks: &'a [&'a Task],
    is_background: bool,
    /// On the device.
    disks: Vec<&'a DiskName>,
    wanted: Result<Vec<Wanted<'a>>, Cause>,
    /// Of `wanted`, in its order, and what the admission test says of each.
    wishes: Vec<Wish>,
    fits: Vec<Fit>,
    /// Why it gets no promise, if it gets none.
    refused: Option<Cause>,
}

/// Hears the VMs, the most urgent first.
fn hear<'a>(problem: &'a Problem<'_>, curve: &Curve) -> Vec<Heard<'a>> {
    let mut order: Vec<_> = problem.vms.iter().collect();
    order.sort_by_key(|vm| (vm.urgency.is_none(), vm.urgency));
    let hear = |vm: &&'a ProblemVm<'_>| {
        let on_device = vm.vm.disks.iter().filter(|disk| disk.device == problem.device.name);
        let disks: Vec<_> = on_device.map(|disk| &disk.name).collect();
        let wanted: Result<Vec<Vec<_>>, _> =
            disks.iter().map(|disk| wanted(disk, &vm.tasks)).collect();
        let wanted = wanted.map(|of_disks| of_disks.into_iter().flatten().collect::<Vec<_>>());
        let of_all = wanted.iter().flatten().flat_map(|one| &one.tasks);
        Heard {
            vm: vm.vm,
            tasks: &vm.tasks,
            is_background: vm.urgency.is_none(),
            disks,
            wishes: of_all.map(|(_, wish)| *wish).collect(),
            fits: Vec::new(),
            refused: wanted.as_ref().err().cloned(),
            wanted,
        }
    };
    let mut heard: Vec<Heard<'_>> = order.iter().map(hear).collect();
    let wishes: Vec<_> = heard.iter().map(|vm| &vm.wishes[..]).collect();
    let names: Vec<_> = heard.iter().map(|vm| &vm.vm.name).collect();
    let fits = curve.admit(&wishes);
    let refusal = |fits: &Vec<Fit>| fits.iter().find_map(|fit| fit.refusal);
    let refusals: Vec<_> = fits.iter().map(|fits| Some(cause(refusal(fits)?, &names))).collect();
    for (vm, (fits, refusal)) in heard.iter_mut().zip(fits.into_iter().zip(refusals)) {
        vm.fits = fits;
        vm.refused = vm.refused.take().or(refusal);
    }
    heard
}

/// A refusal, with the VM's name in the place of its number.
fn cause(refusal: Refusal, names: &[&VmName]) -> Cause {
    match refusal {
        Refusal::Overload { needed, most } => {
            Cause::Overload { needed, usable: admission::USABLE, fits: most }
        }
        Refusal::Rate { depth, most } => Cause::RateOutOfReach { depth, max: most },
        Refusal::Deadline { least } => Cause::Deadline { min: least },
        Refusal::Other { vm, broken } => {
            let broken = match broken {
                admission::Broken::Rate => Broken::Rate,
                admission::Broken::Deadline => Broken::Deadline,
            };
            Cause::OtherPromise { vm: names[vm].clone(), broken }
        }
    }
}

impl Heard<'_> {
    /// One of its disks' part of the device.
    fn settings(&self, disk: &DiskName, schedule: &Name) -> wire::Qos {
        let is_promised = |one: &&Wanted<'_>| one.disk == disk && self.refused.is_none();
        let promised = || self.wanted.iter().flatten().filter(is_promised);
        let marked = promised().filter_map(|one| Some((one.ioprio?, one.promise.clone())));
        let qos = Qos {
            schedule: schedule.clone(),
            weight: Weight::default(),
            promise: promised().find(|one| one.ioprio.is_none()).map(|one| one.promise.clone()),
            limit: None,
            tasks: marked.map(|(ioprio, promise)| serve::Task { ioprio, promise }).collect(),
        };
        wire::Qos::from(&qos)
    }

    /// Of the device's channels, what it wishes to have.
    fn share(&self, device: &Device) -> f64 {
        let channels = self.wishes.iter().map(|wish| wish.promise.rate.channels(device));
        channels.sum::<f64>() / f64::from(device.channels)
    }
}

/// The plan in words and figures.
fn describe(problem: &Problem<'_>, curve: &Curve, heard: &[Heard<'_>]) -> Choice {
    let device = &curve.device;
    let mut reasons = vec![Reason::ServiceCurve {
        device: problem.device.name.clone(),
        channels: device.channels,
        request: device.request,
        kib: device.kib,
        overhead: curve.overhead,
    }];
    reasons.extend(caveats(problem));
    let share = |vm: &Heard<'_>| vm.share(device);
    let is_promised = |vm: &&Heard<'_>| !vm.is_background && vm.refused.is_none();
    let used: f64 = heard.iter().filter(is_promised).map(share).sum();
    let background: Vec<_> = heard
        .iter()
        .filter(|vm| vm.is_background)
        .map(|of| {
            let (vm, device) = (of.vm.name.clone(), problem.device.name.clone());
            BackgroundShare { vm, device, cap: None, binding_constraint: None }
        })
        .collect();
    let (mut alone, mut planned) = (BytesPerSecond::default(), BytesPerSecond::default());
    if !background.is_empty() {
        alone = problem.profile.capacity.write_throughput;
        planned = BytesPerSecond::new(((1.0 - used).max(0.0) * alone.get() as f64) as u64);
    }
    Choice {
        promises: heard
            .iter()
            .flat_map(|vm| promises(vm, problem.profile.structural.stalls))
            .collect(),
        background,
        cost: DeviceCost {
            device: problem.device.name.clone(),
            background_alone: alone,
            background_planned: planned,
            utilisation: heard.iter().map(share).sum(),
        },
        reasons,
    }
}

/// Whether a device's stalls meet more of a task's requests than the target's percentile leaves out.
///
/// A stall meets the requests that are under way and those that are issued while it lasts, of which a task that
/// waits for its requests has no more than its depth.
fn stalls_show(StallFit { per_second, length }: StallFit, task: &Task, target: Target) -> bool {
    let Some(iops) = task.load.iops.map(Iops::get) else { return false };
    let met = f64::from(task.load.queue_depth).min(iops * length.as_secs_f64());
    per_second * met / iops > 1.0 - target.percentile.fraction()
}

/// What each of a VM's tasks with a target can count on, on a device that stalls.
fn promises(of: &Heard<'_>, stalls: Option<StallFit>) -> Vec<TaskPromise> {
    let promise = |((task, wish), fit): (&(&Task, Wish), &Fit)| {
        let target = task.target?;
        // Its own reason before its VM's.
        let own = fit.refusal.filter(|r| !matches!(r, Refusal::Other { .. }));
        let own = own.map(|own| cause(own, &[]));
        let unmet = of.refused.as_ref().map(|of_vm| own.unwrap_or_else(|| of_vm.clone()));
        let bound = unmet.is_none().then(|| fit.bound(wish.promise.deadline));
        let mut promise = told(of.vm, task, target, (fit.least, bound), unmet);
        if promise.unmet.is_none()
            && let Some(stalls) = stalls
            && stalls_show(stalls, task, target)
        {
            let StallFit { length, per_second } = stalls;
            let stalled = fit.least.saturating_add(length);
            promise.bound = promise.bound.map(|bound| bound.max(stalled));
            if target.latency < stalled {
                // The promise is made all the same: it holds but for the stalls.
                promise.unmet = Some(Cause::Stalls { length, per_second }.into());
            }
        }
        Some(promise)
    };
    // Nobody has looked at what a VM without a declared rate could have.
    let undeclared = |task: &&Task| {
        let target = task.target?;
        let why = of.wanted.as_ref().err()?;
        Some(told(of.vm, task, target, (target.latency, None), Some(why.clone())))
    };
    let wanted = of.wanted.iter().flatten().flat_map(|one| &one.tasks).zip(&of.fits);
    wanted.filter_map(promise).chain(of.tasks.iter().filter_map(undeclared)).collect()
}

fn told(
    vm: &Vm,
    task: &Task,
    target: Target,
    (predicted, bound): (Nanos, Option<Nanos>),
    unmet: Option<Cause>,
) -> TaskPromise {
    TaskPromise {
        vm: vm.name.clone(),
        task: task.name.clone(),
        percentile: target.percentile,
        target: target.latency,
        predicted,
        bound,
        confidence: target.confidence,
        delivered: if unmet.is_none() { 1.0 } else { 0.0 },
        unmet: unmet.map(Unmet::from),
        model: PredictedBy::DataPlane,
        fallback: None,
    }
}

/// Where the bounds say more than was measured.
fn caveats(problem: &Problem<'_>) -> Vec<Reason> {
    let device = || problem.device.name.clone();
    let mut caveats = Vec::new();
    for v in &problem.vms {
        for task in v.tasks.iter().filter(|task| task.target.is_some()) {
            let (vm, name) = (v.vm.name.clone(), task.name.clone());
            let percentile = probed_percentile();
            if task.target.is_some_and(|t| t.percentile > percentile) {
                caveats.push(Reason::ExtrapolatesPercentile {
                    device: device(),
                    vm: vm.clone(),
                    task: name.clone(),
                    percentile,
                });
            }
            if parts(task.load.block_size) > 1 {
                let part = MAX_TRANSFER;
                caveats.push(Reason::SplitRequests { device: device(), vm, task: name, part });
            }
        }
    }
    caveats
}

#[cfg(test)]
mod tests;
