//! From a specification, profiles and the knobs found on the host to a plan,
//! or to the reason why there is none.
//!
//! Terms: a *candidate* is one setting of every knob of a device; its *worth*
//! orders candidates; a *victim* is a VM whose targets are given up so that
//! more urgent ones hold.
//!
//! Algorithm, for each device by itself (module `search`): a local search over
//! scheduler and bfq's parameters, and iocost where the profile knows it; weights follow urgency. Each candidate's caps on VMs
//! without targets are as high as the targets allow: the bound of every task
//! grows with them, so the largest is found by bisection. Score is, in this
//! order: tasks for which the model that was asked answers, targets met by
//! urgency, background throughput, little that keeps the device idle, few
//! changes from what is set. If a device cannot hold what is declared, the
//! least urgent VMs become victims, as few as that takes, each number by a search of its own.
//!
//! A target is met when its bound, not its prediction, is within it and the
//! declared rate is delivered; none is where the declared rates are more than the device can do. The bounds
//! of one VM's tasks hold together at the stated confidence, on whatever devices they are.
//!
//! Which model predicts and bounds, and what stands in for it: [`Model`].
//!
//! What is no knob of the host: a VM's IOThreads are [`iothreads`], what is set within a VM that
//! runs is [`guests`].
//!
//! What the data plane serves is planned by its own laws: `data_plane`.
//!
//! When a plan has to be made again: [`control`].
//!
//! Pure: same input, same plan.
//!
//! Properties (tests of the same name): `same_input_gives_same_plan`,
//! `largest_cap_is_found`, `impossible_target_is_named`,
//! `overload_sacrifices_the_least_urgent`.

mod asked;
pub mod control;
mod data_plane;
pub mod guests;
pub mod iothreads;
mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

pub use asked::Model;
pub use data_plane::service_curve;

use rtvirtio_model::conformal::{self, Together};
use rtvirtio_model::paper::{self, Reading};
use rtvirtio_model::structural::Structural;
use rtvirtio_model::{DeviceLoad, Stream, VmLoad};
use rtvirtio_spec::guests::Guests;
use rtvirtio_spec::plan::data_plane::DataPlane;
use rtvirtio_spec::plan::{
    Cause, IoThreads, PLAN_VERSION, Plan, PlannedDevice, PlannedVm, PredictedBy, Reason,
    TaskPromise, Unmet,
};
use rtvirtio_spec::profile::{DeviceIdentity, Profile, ProfileError, Regime};
use rtvirtio_spec::settings::{
    DeviceSettings, IoCost, Knob, Knobs, Scheduler, Settings, VmSettings, diff,
};
use rtvirtio_spec::specification::{Backend, Device, Specification, Task, Vm};
use rtvirtio_units::{Bytes, Confidence, DeviceName, Nanos, Percentile};

use asked::Question;

/// A whole device: a sum of rates may exceed it by what rounding does.
const WHOLE: f64 = 1.0 + 1e-9;
/// Fraction of the declared rate that a task must be given (DESIGN: the pass rule).
pub const DELIVERED: f64 = 0.95;

/// What calibration's tasks issue, and the highest percentile that it sees.
const PROBED_BLOCK: Bytes = Bytes::from_kib(4);
fn probed_percentile() -> Percentile {
    Percentile::new(99.9).expect("99.9 is a percentile")
}

/// Why there is no plan at all. (Targets that cannot be met are part of a plan.)
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The profile was made on another device.
    #[error("device {device}: the profile is of {profile}, the device is {found}")]
    OtherDevice {
        /// The device in the specification.
        device: DeviceName,
        /// Whose profile it is.
        profile: Box<DeviceIdentity>,
        /// What is there.
        found: Box<DeviceIdentity>,
    },
    /// No profile was given for a device.
    #[error("device {device}: no profile {path}")]
    NoProfile {
        /// The device.
        device: DeviceName,
        /// Where it was expected.
        path: PathBuf,
    },
    /// The profile is of another version of rtvirtio, or damaged.
    #[error("device {device}: its profile")]
    Profile {
        /// The device.
        device: DeviceName,
        /// What is wrong with it.
        #[source]
        source: ProfileError,
    },
}

impl PlanError {
    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::OtherDevice { device, profile, found } if profile.is_of_same_model(found) => {
                format!(
                    "both are of one model: rtvirtio profile import PROFILE --device PATH takes it for {device}"
                )
            }
            Self::OtherDevice { device, .. }
            | Self::NoProfile { device, .. }
            | Self::Profile { device, .. } => format!(
                "make a profile of {device}: rtvirtio calibrate --in DIRECTORY -o PROFILE, where it is in use"
            ),
        }
    }
}

/// A device of the specification as it was found.
#[derive(Debug, Clone)]
pub struct FoundDevice<'a> {
    /// Its profile.
    pub profile: &'a Profile,
    /// What it is.
    pub identity: DeviceIdentity,
    /// Who predicts its tails, but for what the data plane serves.
    pub model: Model<'a>,
    /// The kernel's names of the schedulers that the device can have on its host; `None`: any. An array of md has
    /// `none` alone, and a kernel without bfq's module has no bfq.
    pub schedulers: Option<Vec<String>>,
}

/// What the models say of one task.
#[derive(Debug, Clone, PartialEq)]
pub struct Predicted {
    /// The model that was asked, and its bound.
    pub promise: TaskPromise,
    /// The paper's model, refit, in the corrected reading, where bfq idles: it speaks of nothing else.
    pub paper: Option<Nanos>,
    /// A bound on top of it.
    pub paper_bound: Option<Nanos>,
}

/// Plans every device of `specification`.
///
/// `found` holds each device's profile and identity, `observed` the host's
/// knobs as they are now. The plan is of the host alone: IOThreads depend on the
/// host's CPUs ([`iothreads::assign`]), the rest on which VMs run ([`guests::add`]).
///
/// # Errors
/// [`PlanError`]: a profile is missing, foreign or of another version.
pub fn plan(
    specification: &Specification,
    found: &BTreeMap<DeviceName, FoundDevice<'_>>,
    observed: &Knobs,
) -> Result<Plan, PlanError> {
    let mut settings = Settings::default();
    let mut tasks = Vec::new();
    let mut background = Vec::new();
    let mut cost = Vec::new();
    let mut reasons = Vec::new();
    let mut devices = Vec::new();
    let mut data_plane = specification.data_plane.clone().map(|control| DataPlane {
        control,
        schedules: BTreeMap::new(),
        disks: BTreeMap::new(),
    });
    for device in &specification.devices {
        let there = check(device, found)?;
        let problem = Problem::of(specification, device, there);
        devices.push(PlannedDevice {
            name: device.name.clone(),
            path: device.path.clone(),
            identity: there.identity.clone(),
        });
        if let Some(on_data_plane) = &mut data_plane
            && problem.vms.iter().any(|v| v.vm.backend == Backend::VhostUser)
        {
            let choice = data_plane::plan(&problem, on_data_plane);
            tasks.extend(choice.promises);
            background.extend(choice.background);
            cost.push(choice.cost);
            reasons.extend(choice.reasons);
            if !matches!(there.model, Model::Structural) {
                reasons.push(Reason::NoModelAsked { device: device.name.clone() });
            }
            // The order is the data plane's: nothing behind it may change it.
            let none = DeviceSettings { scheduler: Scheduler::None, vms: BTreeMap::new() };
            settings.0.insert(device.name.clone(), none);
            continue;
        }
        let choice = search::search(&problem, observed);
        tasks.extend(choice.evaluation.promises.iter().cloned());
        background.extend(choice.shares(&problem));
        cost.push(choice.cost(&problem));
        reasons.extend(choice.reasons.iter().cloned());
        reasons.extend(problem.caveats(&choice.evaluation.promises));
        settings.0.insert(device.name.clone(), choice.settings(&problem));
    }
    let vms = specification
        .vms
        .iter()
        .filter(|vm| vm.backend == Backend::Kernel)
        .map(|vm| PlannedVm { name: vm.name.clone(), cgroup: vm.cgroup.clone() })
        .collect();
    let data_plane = data_plane.filter(|plane| !plane.disks.is_empty());
    let mut wanted = settings.knobs();
    wanted.extend(data_plane.iter().flat_map(DataPlane::knobs));
    let changes = diff(observed, &wanted);
    Ok(Plan {
        version: PLAN_VERSION,
        devices,
        vms,
        settings,
        guests: Guests::default(),
        data_plane,
        observed: observed.clone(),
        changes,
        tasks,
        background,
        cost,
        iothreads: IoThreads::default(),
        reasons,
    })
}

/// What the models say of each task under `settings`, whoever chose them. Each
/// bound is for its task alone.
///
/// # Errors
/// As [`plan`].
pub fn predict(
    specification: &Specification,
    found: &BTreeMap<DeviceName, FoundDevice<'_>>,
    settings: &Settings,
) -> Result<Vec<Predicted>, PlanError> {
    let mut predictions = Vec::new();
    for device in &specification.devices {
        let there = check(device, found)?;
        let problem = Problem::of(specification, device, there);
        let Some(of_device) = settings.0.get(&device.name) else { continue };
        let load = problem.load(of_device);
        let idles = matches!(of_device.scheduler, Scheduler::Bfq(b) if b.slice_idle_us > 0);
        let regime = problem.structural.situation(&load).regime();
        for promise in problem.evaluate(&load, &[], JointConfidence::No).promises {
            let vm = problem.vms.iter().position(|v| v.vm.name == promise.vm);
            let paper = vm
                .filter(|_| idles)
                .map(|vm| paper::host_part(&there.profile.paper, &load, vm, Reading::Corrected));
            let scores = there.profile.residuals.paper.get(&regime);
            let factor = scores.and_then(|s| conformal::factor(s, promise.confidence));
            let paper_bound = paper.zip(factor).map(|(predicted, factor)| predicted.scale(factor));
            predictions.push(Predicted { promise, paper, paper_bound });
        }
    }
    Ok(predictions)
}

fn check<'a>(
    device: &Device,
    found: &'a BTreeMap<DeviceName, FoundDevice<'a>>,
) -> Result<&'a FoundDevice<'a>, PlanError> {
    let there = found.get(&device.name).ok_or_else(|| PlanError::NoProfile {
        device: device.name.clone(),
        path: device.profile.clone(),
    })?;
    let bad = |source| PlanError::Profile { device: device.name.clone(), source };
    there.profile.check().map_err(bad)?;
    if there.profile.device != there.identity {
        return Err(PlanError::OtherDevice {
            device: device.name.clone(),
            profile: Box::new(there.profile.device.clone()),
            found: Box::new(there.identity.clone()),
        });
    }
    Ok(there)
}

/// One device, the VMs on it, and its model.
struct Problem<'a> {
    device: &'a Device,
    vms: Vec<ProblemVm<'a>>,
    profile: &'a Profile,
    structural: Structural<'a>,
    model: Model<'a>,
    schedulers: Option<Vec<String>>,
}

struct ProblemVm<'a> {
    vm: &'a Vm,
    streams: Vec<Stream>,
    /// Tasks on this device, in the order of `streams`.
    tasks: Vec<&'a Task>,
    /// The strictest target; `None` for a background VM.
    urgency: Option<Nanos>,
}

/// For how many tasks at once a bound is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JointConfidence {
    /// For each task alone.
    No,
    /// For all tasks of a VM.
    Vm,
}

/// What a candidate promises.
#[derive(Debug, Clone)]
struct Evaluation {
    promises: Vec<TaskPromise>,
    utilisation: f64,
}

impl Evaluation {
    /// Tasks whose prediction and bound are of the model that was asked.
    fn answered(&self) -> usize {
        self.promises.iter().filter(|p| p.fallback.is_none()).count()
    }
}

impl<'a> Problem<'a> {
    fn of(specification: &'a Specification, device: &'a Device, there: &FoundDevice<'a>) -> Self {
        let FoundDevice { profile, model, schedulers, .. } = there;
        let mut vms = Vec::new();
        for vm in &specification.vms {
            if !vm.disks.iter().any(|d| d.device == device.name) {
                continue;
            }
            let tasks: Vec<&Task> =
                vm.tasks.iter().filter(|t| *vm.device_of(t) == device.name).collect();
            let mut streams: Vec<Stream> = tasks.iter().map(|t| Stream::from(t.load)).collect();
            if tasks.is_empty() {
                // Nothing is declared on this device.
                streams.extend(Stream::UNDECLARED);
            }
            let urgency = tasks.iter().filter_map(|t| Some(t.target?.latency)).min();
            vms.push(ProblemVm { vm, streams, tasks, urgency });
        }
        let structural = Structural::new(&profile.structural, &profile.capacity);
        let schedulers = schedulers.clone();
        Self { device, vms, profile, structural, model: *model, schedulers }
    }

    /// Whether the device can have this scheduler on its host.
    fn can_have(&self, scheduler: Scheduler) -> bool {
        let offered = self.schedulers.as_ref();
        offered.is_none_or(|offered| offered.iter().any(|name| name == scheduler.name()))
    }

    /// iocost as the profile was made with it, if this host has it; nothing where nobody would be held
    /// back by it.
    fn iocost(&self, observed: &Knobs) -> BTreeSet<IoCost> {
        let is_there = observed.contains_key(&Knob::CostQos { device: self.device.name.clone() });
        let has_background = self.vms.iter().any(|v| v.urgency.is_none());
        let fits = self.profile.structural.iocost.iter().filter(|_| is_there && has_background);
        fits.map(|fit| fit.setting).collect()
    }

    /// Where the profile's probes say little of what is declared.
    fn caveats(&self, promises: &[TaskPromise]) -> Vec<Reason> {
        // A learned model answers within the range of its training only.
        let in_range = |vm: &Vm, task: &Task| {
            promises.iter().any(|p| {
                (&p.vm, &p.task, p.model) == (&vm.name, &task.name, PredictedBy::Learned)
                    && p.fallback.is_none()
            })
        };
        let device = || self.device.name.clone();
        let mut caveats = Vec::new();
        for v in &self.vms {
            if v.tasks.is_empty() {
                caveats.push(Reason::Undeclared {
                    device: device(),
                    vm: v.vm.name.clone(),
                    block_size: Stream::UNDECLARED_BLOCK,
                });
            }
            let with_target = v.tasks.iter().filter(|t| t.target.is_some());
            for task in with_target.filter(|t| !in_range(v.vm, t)) {
                let (vm, name) = (v.vm.name.clone(), task.name.clone());
                let load = task.load;
                if load.block_size != PROBED_BLOCK || load.queue_depth != 1 {
                    caveats.push(Reason::ExtrapolatesLoad {
                        device: device(),
                        vm: vm.clone(),
                        task: name.clone(),
                        block_size: PROBED_BLOCK,
                    });
                }
                if task.target.is_some_and(|t| t.percentile > probed_percentile()) {
                    caveats.push(Reason::ExtrapolatesPercentile {
                        device: device(),
                        vm,
                        task: name,
                        percentile: probed_percentile(),
                    });
                }
            }
        }
        caveats
    }

    /// The load under `settings`; a VM without settings has the defaults.
    fn load(&self, settings: &DeviceSettings) -> DeviceLoad {
        let of_vm = |v: &ProblemVm<'_>| settings.vms.get(&v.vm.name).copied().unwrap_or_default();
        self.load_in_order(settings.scheduler, self.vms.iter().map(of_vm))
    }

    /// The load under settings of each VM, in the order of `vms`.
    fn load_in_order(
        &self,
        scheduler: Scheduler,
        settings: impl Iterator<Item = VmSettings>,
    ) -> DeviceLoad {
        let vms = self.vms.iter().zip(settings);
        let vms = vms.map(|(v, settings)| VmLoad { streams: v.streams.clone(), settings });
        DeviceLoad { scheduler, vms: vms.collect() }
    }

    /// The runs that a bound on so many tasks together has and needs in a regime.
    fn runs(&self, regime: Regime, confidence: Confidence, together: usize) -> Runs {
        let has = self.profile.residuals.structural.get(&regime).map_or(0, Vec::len);
        Runs { regime, has, needs: conformal::needed(confidence, together) }
    }

    fn evaluate(
        &self,
        load: &DeviceLoad,
        sacrificed_vms: &[usize],
        together: JointConfidence,
    ) -> Evaluation {
        let situation = self.structural.situation(load);
        let mut is_victim = vec![false; self.vms.len()];
        sacrificed_vms.iter().for_each(|&i| is_victim[i] = true);
        let mut promises = Vec::new();
        for (i, v) in self.vms.iter().enumerate() {
            let together = match together {
                JointConfidence::No => Together::on_one_device(1),
                JointConfidence::Vm => Together {
                    all: v.vm.tasks.iter().filter(|t| t.target.is_some()).count(),
                    here: v.tasks.iter().filter(|t| t.target.is_some()).count(),
                },
            };
            for (place, (task, stream)) in v.tasks.iter().zip(&v.streams).enumerate() {
                let Some(target) = task.target else { continue };
                let estimate = self.structural.estimate(&situation, stream, target.percentile);
                let question = Question { load, vm: i, task: place, target, together };
                let answer = asked::ask(self.model, self.profile, &question, &estimate);
                // Where more comes than the device can do, what waits grows without end.
                let bound = answer.bound.filter(|_| situation.declared <= WHOLE);
                let facts = TargetCheck {
                    target: target.latency,
                    bound,
                    delivered: estimate.delivered,
                    utilisation: situation.utilisation,
                    declared: situation.declared,
                    runs: self.runs(estimate.regime, target.confidence, together.all),
                    tasks: together.all,
                    is_victim: is_victim[i],
                };
                promises.push(TaskPromise {
                    vm: v.vm.name.clone(),
                    task: task.name.clone(),
                    percentile: target.percentile,
                    target: target.latency,
                    predicted: answer.predicted,
                    bound,
                    confidence: target.confidence,
                    delivered: estimate.delivered,
                    unmet: facts.unmet(),
                    model: answer.by,
                    fallback: answer.fallback,
                });
            }
        }
        Evaluation { promises, utilisation: situation.utilisation }
    }
}

struct TargetCheck {
    target: Nanos,
    bound: Option<Nanos>,
    delivered: f64,
    utilisation: f64,
    /// Of that, what declared rates need.
    declared: f64,
    runs: Runs,
    tasks: usize,
    is_victim: bool,
}

/// The runs of a regime that a profile has, and those that a bound needs.
struct Runs {
    regime: Regime,
    has: usize,
    needs: usize,
}

impl TargetCheck {
    /// Why the target is not met, if it is not.
    fn unmet(&self) -> Option<Unmet> {
        let overload = (self.utilisation > 1.0).then_some(self.utilisation);
        let unmet = |cause| Some(Unmet { cause, overload, background: None });
        if self.is_victim {
            return unmet(Cause::MoreUrgentVms);
        }
        if self.declared > WHOLE {
            return unmet(Cause::RateNotDelivered);
        }
        let Some(bound) = self.bound else {
            let Runs { regime, has, needs } = self.runs;
            return Some(Cause::TooFewRuns { regime, has, needs, tasks: self.tasks }.into());
        };
        if self.delivered < DELIVERED {
            return unmet(Cause::RateNotDelivered);
        }
        if bound > self.target {
            return unmet(Cause::AboveTarget);
        }
        None
    }
}

#[cfg(test)]
mod tests;
