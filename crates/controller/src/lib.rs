//! The closed loop of `watch`: what each task does as it happens, and another plan when that is needed.
//!
//! A task's latency is taken where QEMU serves the guest's request, from its latency histograms
//! (`sources`); a VM without a monitor that answers is left out. Beside it, each disk's latency in the
//! host's block layer ([`HostLatency`]): the loop goes by QEMU's alone. Devices of the data plane, which
//! no QEMU sees, are known by what it tells of them (`data_plane`). What each look brought is kept for a
//! minute ([`history`]), so that tails are those of the last minute.
//!
//! When to plan again is decided by [`rtvirtio_planner::control`], which hears nothing of tasks that the plan in
//! force does not promise anything. A plan is made by who calls ([`Planner`]), for the host alone, and applied
//! through the host's journal.
//!
//! Walk: [`Loop::look`] → `Sources::refresh` → `Sources::sample` → `Controller::step` → `act` →
//! `Host::apply`.

#![deny(unsafe_code)]

mod data_plane;
pub mod history;
pub mod look;
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_host::{ApplyOptions, Host, JournalStatus, Topology};
use rtvirtio_observe::host_latency::HostLatency;
use rtvirtio_planner::control::{Controller, Decision, Doubts, TaskObservation};
use rtvirtio_spec::plan::{Cause, Plan, TaskPromise};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::Knobs;
use rtvirtio_spec::specification::{Backend, Specification, Target, Task, Vm};
use rtvirtio_units::{DiskName, Iops, Nanos, TaskName, VmName};
use tracing::{info, warn};

use data_plane::DataPlane;
use history::{History, Recent, Sample};
use look::{Change, DiskRow, Look, Row, RowTarget};
use sources::Sources;

/// Makes a plan of the host alone for a specification.
pub type Planner = dyn Fn(&Specification, &Doubts) -> Result<Plan>;

/// What is known of one task.
struct TaskState {
    vm: VmName,
    task: TaskName,
    target: Option<Target>,
    wanted_iops: Option<f64>,
    history: History,
}

/// The VMs of a specification, watched and, with a [`Planner`], kept within their targets.
pub struct Loop {
    host: Host,
    /// The data plane's control socket, if somebody named it.
    socket: Option<PathBuf>,
    planner: Option<Box<Planner>>,
    specification: Specification,
    tasks: Vec<TaskState>,
    sources: Sources,
    on_host: HostLatency<(VmName, DiskName)>,
    disks: BTreeMap<(VmName, DiskName), History>,
    data_plane: DataPlane,
    controller: Option<Controller>,
    /// Tasks of which the plan in force says that nothing promises their targets.
    unpromised: BTreeSet<(VmName, TaskName)>,
    /// Whether the specification's VMs have been looked at.
    has_looked: bool,
    start: Instant,
}

impl Loop {
    /// Begins to watch. With a `planner`, what a dead apply left is put back first: that may need the
    /// monitors that are taken here.
    ///
    /// # Errors
    /// The host has no io controller, or what was left cannot be put back.
    pub fn new(
        host: Host,
        specification: Specification,
        socket: Option<PathBuf>,
        planner: Option<Box<Planner>>,
    ) -> Result<Self> {
        if planner.is_some() {
            host.verify(&Topology::default(), &Knobs::new())?;
        }
        let sources = Sources::new(&specification, host.clone())?;
        let on_host = HostLatency::new(host.clone(), |(vm, disk)| format!("{vm}/{disk}"));
        let data_plane = DataPlane::new(&specification, socket.as_deref());
        Ok(Self {
            host,
            socket,
            planner,
            tasks: states(&specification),
            specification,
            sources,
            on_host,
            disks: BTreeMap::new(),
            data_plane,
            controller: None,
            unpromised: BTreeSet::new(),
            has_looked: false,
            start: Instant::now(),
        })
    }

    /// Watches the VMs of another specification from now on.
    ///
    /// # Errors
    /// The host has no io controller.
    pub fn replace(&mut self, specification: Specification) -> Result<()> {
        self.sources.let_go();
        self.sources = Sources::new(&specification, self.host.clone())?;
        self.tasks = states(&specification);
        self.disks.clear();
        self.data_plane = DataPlane::new(&specification, self.socket.as_deref());
        self.controller = None;
        self.unpromised.clear();
        self.has_looked = false;
        self.specification = specification;
        Ok(())
    }

    /// Looks at all of them, and acts if that is asked for and needed. `events` have happened already. VMs that
    /// are not reached when the user interrupts it are left out.
    pub fn look(&mut self, mut events: Vec<String>, interrupted: &Interrupted) -> Look {
        events.extend(self.sources.refresh(interrupted));
        let now = Instant::now();
        for (disk, (histogram, seconds)) in self.on_host.take(now, &mut events) {
            let sample = Sample { histogram, misses: 0, seconds };
            self.disks.entry(disk).or_default().add(now, sample);
        }
        self.on_host.follow(self.sources.parts(), &mut events);
        let devices = self.data_plane.take(Instant::now(), &mut events);
        let mut observed = self.take(now, &mut events);
        let mut present = self.sources.present().clone();
        let (served, of_served) = self.data_plane.observed(&devices);
        present.extend(served);
        observed.extend(of_served);
        if !std::mem::replace(&mut self.has_looked, true) {
            let absent = self.specification.vms.iter().filter(|vm| !present.contains(&vm.name));
            let absent: Vec<&str> = absent.map(|vm| vm.name.as_str()).collect();
            if !absent.is_empty() {
                events.push(format!("not running: {}", absent.join(", ")));
            }
        }
        events.iter().for_each(|event| info!("{event}"));
        let change = self.control(now, &present, &observed);
        events.extend(change.iter().map(ToString::to_string));
        let disks = self.disks.iter().map(|((vm, disk), history)| disk_row(vm, disk, history, now));
        Look {
            at_s: (now - self.start).as_secs_f64(),
            tasks: self.tasks.iter().map(|task| task.row(now)).collect(),
            disks: disks.collect(),
            host_records_lost: self.on_host.lost(),
            data_plane: devices,
            present,
            change,
            events,
        }
    }

    /// Takes what each task did since the last look.
    fn take(&mut self, now: Instant, events: &mut Vec<String>) -> Vec<TaskObservation> {
        let mut observed = Vec::new();
        let (mut samples, lost) = self.sources.sample();
        events.extend(lost);
        for state in &mut self.tasks {
            let key = (state.vm.clone(), state.task.clone());
            let Some(sample) = samples.remove(&key) else { continue };
            let (requests, misses) = (sample.histogram.count(), sample.misses);
            state.history.add(now, sample);
            if let Some(target) = state.target {
                observed.push(TaskObservation {
                    vm: state.vm.clone(),
                    task: state.task.clone(),
                    percentile: target.percentile,
                    requests,
                    misses,
                });
            }
        }
        observed
    }

    /// Decides, and acts on it. `None`: there is nothing to change, or nothing is to be changed.
    fn control(
        &mut self,
        now: Instant,
        present: &BTreeSet<VmName>,
        observed: &[TaskObservation],
    ) -> Option<Change> {
        let planner = self.planner.as_ref()?;
        let clock = Nanos::from_secs_f64((now - self.start).as_secs_f64());
        let is_promised = |task: &&TaskObservation| {
            !self.unpromised.contains(&(task.vm.clone(), task.task.clone()))
        };
        let observed: Vec<_> = observed.iter().filter(is_promised).cloned().collect();
        let decision = match &mut self.controller {
            Some(controller) => {
                controller.step(clock, present, &observed, &self.data_plane.speeds())
            }
            None => {
                self.controller = Some(Controller::new(clock, present.clone()));
                let doubts = Doubts::default();
                Decision::Plan { margin: 1.0, doubts, reason: "start".to_owned() }
            }
        };
        let Decision::Plan { margin, doubts, reason } = decision else { return None };
        if self.host.journal_status().is_ok_and(|s| s == JournalStatus::Unfinished) {
            self.sources.let_go();
        }
        let wanted = tightened(&self.specification, present, margin);
        let (done, promises) = act(&self.host, &**planner, &wanted, &doubts, reason);
        if let Some(promises) = promises {
            self.unpromised = unpromised(&promises, &self.specification);
        }
        if done.failed.is_some() || done.unmet > 0 {
            warn!("{done}");
        } else {
            info!("{done}");
        }
        if let (Some(controller), Some(_)) = (&mut self.controller, &done.failed) {
            controller.failed(&done.reason);
        }
        Some(done)
    }
}

fn states(specification: &Specification) -> Vec<TaskState> {
    let of_vm = |vm: &Vm| {
        let name = vm.name.clone();
        vm.tasks.clone().into_iter().map(move |task| TaskState {
            vm: name.clone(),
            task: task.name,
            target: task.target,
            wanted_iops: task.load.iops.map(Iops::get),
            history: History::default(),
        })
    };
    // The data plane tells of its VMs' disks, and no QEMU does.
    sources::kernel_path(specification).flat_map(of_vm).collect()
}

impl TaskState {
    fn row(&self, now: Instant) -> Row {
        let Recent { tails, iops } = self.history.recent(now);
        Row {
            vm: self.vm.clone(),
            task: self.task.clone(),
            measured_at: MeasuredAt::Qemu,
            tails,
            target: self.target.map(|t| RowTarget { percentile: t.percentile, latency: t.latency }),
            misses: self.history.misses,
            requests: self.history.requests,
            iops,
            wanted_iops: self.wanted_iops,
        }
    }
}

/// A disk's line.
#[must_use]
pub fn disk_row(vm: &VmName, disk: &DiskName, history: &History, now: Instant) -> DiskRow {
    let Recent { tails, iops } = history.recent(now);
    let (vm, disk, requests) = (vm.clone(), disk.clone(), history.requests);
    DiskRow { vm, disk, measured_at: MeasuredAt::Host, tails, requests, iops }
}

/// The VMs that run, with targets tightened by `margin`.
fn tightened(
    specification: &Specification,
    present: &BTreeSet<VmName>,
    margin: f64,
) -> Specification {
    let mut wanted = specification.clone();
    wanted.vms.retain(|vm| present.contains(&vm.name));
    // A deadline is kept by the data plane itself: a shorter one would only be refused.
    let of_kernel = wanted.vms.iter_mut().filter(|vm| vm.backend == Backend::Kernel);
    for task in of_kernel.flat_map(|vm| &mut vm.tasks) {
        if let Some(target) = &mut task.target {
            target.latency = target.latency.scale(1.0 / margin);
        }
    }
    wanted
}

/// Tasks whose targets are not promised, and not because the plan's own targets are tighter. That they miss them says nothing against the models,
/// and tighter targets would help none of them, but cost others theirs: those would miss then, too, and the margin
/// never shrink again.
fn unpromised(
    promises: &[TaskPromise],
    specification: &Specification,
) -> BTreeSet<(VmName, TaskName)> {
    let tasks = specification.vms.iter().flat_map(|vm| vm.tasks.iter().map(move |t| (vm, t)));
    let target = |(vm, task): (&Vm, &Task)| {
        Some(((vm.name.clone(), task.name.clone()), task.target?.latency))
    };
    let targets: BTreeMap<(VmName, TaskName), Nanos> = tasks.filter_map(target).collect();
    let unmet = promises.iter().filter_map(|promise| {
        let cause = &promise.unmet.as_ref()?.cause;
        let task = (promise.vm.clone(), promise.task.clone());
        // The target of the plan is tightened: that of the specification may be promised.
        let is_within = targets.get(&task).zip(promise.bound).is_some_and(|(t, b)| b <= *t);
        (*cause != Cause::AboveTarget || !is_within).then_some(task)
    });
    unmet.collect()
}

/// Plans, and applies what changes; what is promised then, if that was done.
fn act(
    host: &Host,
    planner: &Planner,
    wanted: &Specification,
    doubts: &Doubts,
    reason: String,
) -> (Change, Option<Vec<TaskPromise>>) {
    let is_idle = wanted.vms.is_empty();
    let caps = BTreeMap::new();
    let mut change = Change { reason, written: 0, unmet: 0, caps, failed: None, is_idle };
    if is_idle {
        return (change, None);
    }
    let mut promises = None;
    let mut apply = || -> Result<()> {
        let plan = planner(wanted, doubts)?;
        change.unmet = plan.tasks.iter().filter(|t| t.unmet.is_some()).count();
        change.caps = plan.background.iter().map(|b| (b.vm.clone(), b.cap)).collect();
        let (topology, options) = (Topology::of_plan(&plan), ApplyOptions::default());
        change.written = host.apply(&topology, &plan.observed, &plan.changes, options)?.written;
        promises = Some(plan.tasks);
        Ok(())
    };
    change.failed = apply().err().map(|error| format!("{error:#}"));
    (change, promises)
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::plan::{PredictedBy, Unmet};
    use rtvirtio_spec::specification::parse;
    use rtvirtio_units::{Confidence, Percentile};

    use super::*;

    const SPECIFICATION: &str = r#"
version = 1
[data_plane]
control = "/run/x.sock"
[device.ssd]
path = "/dev/sda"
profile = "p.json"
[device.hdd]
path = "/dev/sdb"
profile = "q.json"
[[vm]]
name = "plc"
backend = "vhost-user"
[[vm.disk]]
name = "root"
device = "ssd"
[[vm.task]]
name = "read"
disk = "root"
[[vm]]
name = "web"
[[vm.disk]]
name = "root"
device = "hdd"
[[vm.task]]
name = "read"
disk = "root"
"#;

    /// Tasks in the place of the first one's name.
    const TASKS: &str = r#"name = "near"
target = { percentile = 99.9, latency_ms = 20 }
[[vm.task]]
name = "far"
target = { percentile = 99.9, latency_ms = 20 }
[[vm.task]]
name = "victim"
target = { percentile = 99.9, latency_ms = 20 }
[[vm.task]]
name = "fast"
target = { percentile = 99.9, latency_ms = 20 }
[[vm.task]]
name = "read""#;

    #[test]
    fn tasks_whose_disks_the_data_plane_serves_have_no_row_at_qemu() {
        let tasks = states(&parse("test", SPECIFICATION).unwrap());
        assert_eq!(tasks.iter().map(|task| task.vm.as_str()).collect::<Vec<_>>(), ["web"]);
    }

    #[test]
    fn task_that_no_margin_would_have_promised_is_no_risk() {
        let text = SPECIFICATION.replacen("name = \"read\"", TASKS, 1);
        let specification = parse("test", &text).unwrap();
        let ms = Nanos::from_millis;
        // Planned for with targets of 10 ms, half of those of the specification.
        let promise = |task: &str, bound: Option<Nanos>, cause: Option<Cause>| TaskPromise {
            vm: VmName::new("plc").unwrap(),
            task: TaskName::new(task).unwrap(),
            percentile: Percentile::new(99.9).unwrap(),
            target: ms(10),
            predicted: ms(5),
            bound,
            confidence: Confidence::new(0.95).unwrap(),
            delivered: 1.0,
            unmet: cause.map(Unmet::from),
            model: PredictedBy::Structural,
            fallback: None,
        };
        let promises = [
            promise("read", Some(ms(9)), None),
            promise("near", Some(ms(15)), Some(Cause::AboveTarget)),
            promise("far", Some(ms(25)), Some(Cause::AboveTarget)),
            promise("victim", Some(ms(9)), Some(Cause::MoreUrgentVms)),
            promise("fast", None, Some(Cause::RateNotDelivered)),
        ];
        let found = unpromised(&promises, &specification);
        let found: Vec<&str> = found.iter().map(|(_, task)| task.as_str()).collect();
        assert_eq!(found, ["far", "fast", "victim"]);
    }
}
