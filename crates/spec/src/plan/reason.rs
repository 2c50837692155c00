//! Why a plan is as it is, as values that a program can read; each has a sentence for people.

use std::fmt;
use std::path::PathBuf;

use rtvirtio_units::{
    Bytes, BytesPerSecond, DeviceName, DiskName, IoThreadName, Iops, Nanos, Percentile, TaskName,
    VmName,
};
use serde::{Deserialize, Serialize};

use super::TaskPromise;
use crate::profile::{DeviceIdentity, ProfileSource, Regime};
use crate::settings::Scheduler;

/// Why a task's target cannot be promised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Unmet {
    /// Why.
    #[serde(flatten)]
    pub cause: Cause,
    /// What the declared loads need of the device where that is more than all of it, above 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overload: Option<f64>,
    /// The cap of background VMs with which it is so even then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub background: Option<BytesPerSecond>,
}

/// The cause of an [`Unmet`] target. Figures of the task itself are in its [`TaskPromise`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "kebab-case")]
pub enum Cause {
    /// The VM is given up so that more urgent ones are met.
    MoreUrgentVms,
    /// The profile has too few runs for a bound at the confidence that is asked for.
    TooFewRuns {
        /// Of this regime.
        regime: Regime,
        /// That it has.
        has: usize,
        /// That a bound needs.
        needs: usize,
        /// Tasks for which the bound is to hold together.
        tasks: usize,
    },
    /// Less than its rate would be delivered.
    RateNotDelivered,
    /// The bound is above the target.
    AboveTarget,
    /// A task of its disk declares no rate, and only a rate can be promised.
    NoRate {
        /// The disk.
        disk: DiskName,
    },
    /// Its disk has tasks of more I/O priorities than are told apart.
    TooManyPriorities {
        /// The disk.
        disk: DiskName,
        /// Priorities that are told apart.
        max: usize,
    },
    /// Promises would be more than the device has.
    Overload {
        /// What would be promised of the device.
        needed: f64,
        /// What can be.
        usable: f64,
        /// Of the VM's rates, what would fit, 0 to 1.
        fits: f64,
    },
    /// A task that waits for each request does not come to its rate.
    RateOutOfReach {
        /// Requests at a time.
        depth: u32,
        /// What it comes to.
        max: Iops,
    },
    /// The deadline is shorter than any that can be kept.
    Deadline {
        /// The shortest.
        min: Nanos,
    },
    /// The device stalls for longer than the target, and oftener than the percentile allows.
    Stalls {
        /// The longest that calibration saw.
        length: Nanos,
        /// Stalls a second, upper 95 % limit.
        per_second: f64,
    },
    /// Beside it, a promise to a more urgent VM would not be kept.
    OtherPromise {
        /// That VM.
        vm: VmName,
        /// What of its promise: `rate` or `deadline`.
        broken: Broken,
    },
}

/// What of a promise would not be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Broken {
    /// Its rate.
    Rate,
    /// Its deadline.
    Deadline,
}

impl From<Cause> for Unmet {
    fn from(cause: Cause) -> Self {
        Self { cause, overload: None, background: None }
    }
}

impl Unmet {
    /// The sentence, about the task that `promise` is of.
    fn sentence(&self, promise: &TaskPromise) -> String {
        let TaskPromise { percentile, target, predicted, bound, delivered, .. } = promise;
        let even = self
            .background
            .map_or_else(String::new, |cap| format!("even with background VMs at {cap} "));
        let overload = self.overload.map_or_else(String::new, |needed| {
            format!("; the declared loads need {:.0} % of the device", needed * 100.0)
        });
        let cause = match &self.cause {
            Cause::MoreUrgentVms => format!("given up for more urgent VMs{overload}"),
            Cause::TooFewRuns { regime, has, needs, tasks } => format!(
                "not promised: the profile has too few runs for a bound at this confidence on {tasks} tasks \
                 together, {has} with {} where {needs} are needed (predicted {predicted}); to have it promised, \
                 calibrate again or ask for a lower confidence",
                regime_name(*regime),
            ),
            Cause::RateNotDelivered => {
                let delivered = (delivered * 100.0).floor();
                format!("only {delivered:.0} % of its rate would be delivered{overload}")
            }
            Cause::AboveTarget => {
                let bound = bound.unwrap_or(*predicted);
                format!(
                    "p{percentile} is bounded by {bound} (predicted {predicted}), above {target}{overload}; \
                     a target of {bound} would be promised"
                )
            }
            Cause::NoRate { disk } => format!(
                "a task of its disk {disk} declares no iops: only a declared rate can be promised"
            ),
            Cause::TooManyPriorities { disk, max } => {
                format!("its disk {disk} has tasks of more than {max} I/O priorities")
            }
            Cause::Overload { needed, usable, fits } => format!(
                "{:.1} % of the device would be promised, and {:.0} % can be; {:.0} % of its rates would fit",
                needed * 100.0,
                usable * 100.0,
                (fits * 100.0).floor()
            ),
            Cause::RateOutOfReach { depth, max } => format!(
                "with {depth} at a time it comes to {:.0} requests a second at most",
                max.get()
            ),
            Cause::Deadline { min } => format!("the shortest deadline that can be kept is {min}"),
            Cause::Stalls { length, per_second } => format!(
                "the device stalls for up to {length}, up to {per_second:.2} times a second, which p{percentile} \
                 would see: no schedule can help; a target of {} or a lower percentile would be promised",
                bound.unwrap_or(*length)
            ),
            Cause::OtherPromise { vm, broken } => {
                let broken = match broken {
                    Broken::Rate => "a rate",
                    Broken::Deadline => "a deadline",
                };
                format!("beside it, {broken} of the more urgent {vm} would not be kept")
            }
        };
        even + &cause
    }
}

impl TaskPromise {
    /// Why the target cannot be promised, for people; none: it is.
    #[must_use]
    pub fn why_unmet(&self) -> Option<String> {
        self.unmet.as_ref().map(|unmet| unmet.sentence(self))
    }
}

/// A regime, as a profile's runs were made.
const fn regime_name(regime: Regime) -> &'static str {
    match regime {
        Regime::Flowing => "no background load",
        Regime::Bursting => "a background VM within a cap",
        Regime::Flooded => "a background VM without a cap",
        Regime::Idling => "bfq that idles",
        Regime::IdlingFlooded => "bfq that idles beside a background VM without a cap",
        Regime::Controlled => "a background VM without a cap under iocost",
    }
}

/// Where the structural model stands in for the one that was asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// Of what.
    pub of: FallbackOf,
    /// Why the other one has no answer.
    pub why: NoAnswer,
}

/// What is the structural model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FallbackOf {
    /// Prediction and bound.
    Prediction,
    /// The bound alone; the prediction, if that is more.
    Bound,
}

/// Why a model has no answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "kebab-case")]
pub enum NoAnswer {
    /// The paper's model speaks of bfq that idles only.
    NotIdling,
    /// No feature of the learned model tells of iocost.
    IoCost,
    /// The profile has too few runs under the paper's model.
    TooFewRuns {
        /// That it has.
        has: usize,
    },
    /// The learned model has too few scores.
    TooFewScores,
    /// The learned model's file does not describe itself.
    NotDescribed,
    /// The learned model is of another device.
    OtherDevice {
        /// The one of its training.
        trained: Box<DeviceIdentity>,
        /// The one here.
        found: Box<DeviceIdentity>,
    },
    /// The device has become faster or slower.
    OtherThroughput {
        /// At the model's training.
        then: BytesPerSecond,
        /// As calibrated.
        now: BytesPerSecond,
    },
    /// A feature is out of the range of its training, or its evaluation failed.
    Learned {
        /// What the model says.
        why: String,
    },
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.of {
            FallbackOf::Prediction => "the structural model: ",
            FallbackOf::Bound => "the bound is the structural model's: ",
        })?;
        match &self.why {
            NoAnswer::NotIdling => f.write_str("the analytical one speaks of bfq that idles only"),
            NoAnswer::IoCost => f.write_str("the learned one knows nothing of iocost"),
            NoAnswer::TooFewRuns { has } => {
                write!(f, "the profile has {has} runs under the analytical one for this, too few")
            }
            NoAnswer::TooFewScores => f.write_str("the learned one has too few scores for this"),
            NoAnswer::NotDescribed => {
                f.write_str("the file does not describe itself; nor is its range known")
            }
            NoAnswer::OtherDevice { trained, found } => {
                let name = |d: &DeviceIdentity| format!("{} {} of {}", d.kind, d.model, d.size);
                write!(f, "the learned one is of {}, not of {}", name(trained), name(found))
            }
            NoAnswer::OtherThroughput { then, now } => {
                write!(f, "its device wrote {then} at the model's training, {now} now")
            }
            NoAnswer::Learned { why } => f.write_str(why),
        }
    }
}

/// What keeps a cap from being larger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "kebab-case")]
pub enum BindingConstraint {
    /// A task's target: the promise with a cap one step larger.
    Target {
        /// The task, as it would be then.
        promise: Box<TaskPromise>,
    },
    /// A task whose target is not met: more than a careful operator would leave background beside it.
    Unmet {
        /// The task's VM.
        vm: VmName,
        /// The task.
        task: TaskName,
    },
    /// What the device can do.
    Throughput,
}

impl fmt::Display for BindingConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Target { promise } => {
                let why = promise.why_unmet().unwrap_or_default();
                write!(f, "{}/{}: {why}", promise.vm, promise.task)
            }
            Self::Unmet { vm, task } => {
                write!(f, "what is kept for {vm}/{task}, whose target is not met")
            }
            Self::Throughput => f.write_str("the device's throughput"),
        }
    }
}

/// How settings were found, and what to know about them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Reason {
    /// The scheduler that was chosen.
    Scheduler {
        /// The device.
        device: DeviceName,
        /// Its scheduler.
        scheduler: Scheduler,
    },
    /// VMs without a target are capped.
    Cap {
        /// The device.
        device: DeviceName,
        /// The cap of each.
        cap: BytesPerSecond,
        /// By how much it would be larger next.
        step: BytesPerSecond,
        /// Tasks whose targets hold with it.
        met: usize,
        /// Tasks that would miss without it.
        lost: usize,
        /// Tasks with a target.
        of: usize,
        /// What the next larger one would break.
        held_by: BindingConstraint,
    },
    /// A VM is given up so that more urgent ones are met.
    GivenUp {
        /// The device.
        device: DeviceName,
        /// The VM.
        vm: VmName,
    },
    /// A VM declares nothing on a device.
    Undeclared {
        /// The device.
        device: DeviceName,
        /// The VM.
        vm: VmName,
        /// The block size that is taken in its place.
        block_size: Bytes,
    },
    /// A task's load is unlike that of the probes.
    ExtrapolatesLoad {
        /// The device.
        device: DeviceName,
        /// The VM.
        vm: VmName,
        /// The task.
        task: TaskName,
        /// The block size of the probes.
        block_size: Bytes,
    },
    /// A task's percentile is beyond what probes reach.
    ExtrapolatesPercentile {
        /// The device.
        device: DeviceName,
        /// The VM.
        vm: VmName,
        /// The task.
        task: TaskName,
        /// What they reach.
        percentile: Percentile,
    },
    /// A task's requests are split.
    SplitRequests {
        /// The device.
        device: DeviceName,
        /// The VM.
        vm: VmName,
        /// The task.
        task: TaskName,
        /// Into parts of this size, to which the bound applies.
        part: Bytes,
    },
    /// What the data plane's schedule takes the device for.
    ServiceCurve {
        /// The device.
        device: DeviceName,
        /// Requests at a time.
        channels: u32,
        /// What each takes beside its bytes.
        request: Nanos,
        /// What a KiB takes.
        kib: Nanos,
        /// What a response takes beside the service.
        overhead: Nanos,
    },
    /// The data plane has bounds of its own.
    NoModelAsked {
        /// The device.
        device: DeviceName,
    },
    /// A VM is off.
    VmOff {
        /// The VM.
        vm: VmName,
    },
    /// A VM's cgroup was found by its QEMU.
    CgroupFound {
        /// The VM.
        vm: VmName,
        /// Below the io controller's mount.
        cgroup: PathBuf,
        /// Its QEMU.
        process: u32,
    },
    /// A profile was not made on an idle device.
    Profile {
        /// The device.
        device: DeviceName,
        /// How it was made.
        source: ProfileSource,
    },
    /// A profile is another device's.
    MeasuredOn {
        /// The device.
        device: DeviceName,
        /// The one that was measured.
        other: DeviceIdentity,
    },
    /// No CPU is left for IOThreads.
    NoCpuLeft {
        /// The host's CPUs.
        cpus: usize,
        /// The VMs' vCPUs.
        vcpus: usize,
    },
    /// Too few CPUs are left for IOThreads.
    TooFewCpus {
        /// The host's CPUs.
        cpus: usize,
        /// The VMs' vCPUs.
        vcpus: usize,
        /// What is left.
        left: usize,
        /// What an IOThread is given, requests a second.
        per_iothread: f64,
    },
    /// VMs do not say how many vCPUs they have.
    VcpusUnknown {
        /// How many.
        vms: usize,
        /// Of so many.
        of: usize,
    },
    /// A task declares no rate on a disk with a target.
    OpenRate {
        /// Its VM.
        vm: VmName,
        /// What it is taken for, requests a second.
        per_iothread: f64,
    },
    /// A VM gets fewer IOThreads than its rate asks for.
    FewerIoThreads {
        /// The VM.
        vm: VmName,
        /// Its rate, requests a second.
        iops: f64,
        /// IOThreads for that.
        wanted: usize,
        /// Its queues in use.
        queues: usize,
        /// CPUs left.
        left: usize,
        /// IOThreads that it gets.
        gets: usize,
    },
    /// Something of a running VM could not be seen.
    Unseen {
        /// The VM.
        vm: VmName,
        /// What, and why.
        why: String,
    },
    /// The scheduler of a disk within its guest.
    GuestScheduler {
        /// The VM.
        vm: VmName,
        /// The disk.
        disk: DiskName,
        /// What is done about it.
        rule: GuestRule,
    },
    /// An IOThread does not poll.
    NoPolling {
        /// The VM.
        vm: VmName,
        /// The IOThread.
        iothread: IoThreadName,
        /// Why.
        why: WhyNoPolling,
    },
}

/// What is done about the scheduler of a disk within its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "rule", rename_all = "kebab-case")]
pub enum GuestRule {
    /// The host schedules.
    None,
    /// The guest does not offer `none`.
    NoneNotOffered,
    /// Tasks share the disk.
    Bfq {
        /// How many.
        tasks: usize,
    },
    /// Tasks share it, and the guest does not offer bfq.
    BfqNotOffered {
        /// How many.
        tasks: usize,
    },
}

/// Why an IOThread does not poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhyNoPolling {
    /// Its VM has no target.
    NoTarget,
    /// The plan has no CPU of its own for it.
    NoOwnCpu,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheduler { device, scheduler } => write!(f, "{device}: scheduler: {scheduler}"),
            Self::Cap { device, cap, step, met, lost, of, held_by } => write!(
                f,
                "{device}: cap of {cap} on each VM without a target: the largest at which the bounds of {met} \
                 of {of} tasks hold, found by bisection; {step} more would break {held_by}; without a cap {lost} \
                 of {of} would miss"
            ),
            Self::GivenUp { device, vm } => {
                write!(f, "{device}: {vm} is given up so that more urgent VMs are met")
            }
            Self::Undeclared { device, vm, block_size } => write!(
                f,
                "{device}: {vm} declares nothing here: taken for deep {block_size} reads and writes"
            ),
            Self::ExtrapolatesLoad { device, vm, task, block_size } => write!(
                f,
                "{device}: {vm}/{task}: probes are of {block_size} at depth 1; its bound extrapolates"
            ),
            Self::ExtrapolatesPercentile { device, vm, task, percentile } => write!(
                f,
                "{device}: {vm}/{task}: probes reach p{percentile}; its bound extrapolates"
            ),
            Self::SplitRequests { device, vm, task, part } => write!(
                f,
                "{device}: {vm}/{task}: requests above {part} are split; the bound is of each part"
            ),
            Self::ServiceCurve { device, channels, request, kib, overhead } => write!(
                f,
                "{device}: service curve: {channels} at a time, {request} and {kib}/KiB each; overhead {overhead}"
            ),
            Self::NoModelAsked { device } => {
                write!(f, "{device}: on the data plane no model is asked")
            }
            Self::VmOff { vm } => write!(
                f,
                "VM {vm} does not run (its cgroup is not there): planned for, and set once it runs by \
                 `rtvirtio apply PLAN --reapply` or `rtvirtio watch --control`"
            ),
            Self::CgroupFound { vm, cgroup, process } => write!(
                f,
                "VM {vm} is in the cgroup {}, where its QEMU (process {process}) runs",
                cgroup.display()
            ),
            Self::Profile { device, source } => match source {
                ProfileSource::Alone => {
                    write!(f, "device {device}: its profile was made on the idle device")
                }
                ProfileSource::BesideOthers => write!(
                    f,
                    "device {device}: its profile was made beside others, which makes bounds wider; nothing \
                     beside a writer without a cap has one"
                ),
                ProfileSource::Observed => write!(
                    f,
                    "device {device}: its profile comes from watching others: its capacity is the least that it \
                     can be, and only loads such as were seen have a bound"
                ),
            },
            Self::MeasuredOn { device, other } => write!(
                f,
                "device {device}: its profile was measured on another device of its model ({other}): bounds are \
                 that one's (calibrate --in DIRECTORY makes one of its own)"
            ),
            Self::NoCpuLeft { cpus, vcpus } => write!(
                f,
                "IOThreads: {cpus} CPUs and {vcpus} vCPUs leave none for IOThreads: they are not pinned and \
                 compete with vCPUs"
            ),
            Self::TooFewCpus { cpus, vcpus, left, per_iothread } => write!(
                f,
                "IOThreads: {cpus} CPUs and {vcpus} vCPUs leave {left} for IOThreads, too few: some share a CPU \
                 with others beyond {per_iothread} requests/s, or with those of another kind"
            ),
            Self::VcpusUnknown { vms, of } => {
                write!(f, "IOThreads: VMs without vcpus count as one vCPU each: {vms} of {of}")
            }
            Self::OpenRate { vm, per_iothread } => write!(
                f,
                "IOThreads: {vm} has a task without iops on a disk with a target: taken for what one IOThread \
                 can do, {per_iothread} requests/s"
            ),
            Self::FewerIoThreads { vm, iops, wanted, queues, left, gets } => write!(
                f,
                "IOThreads: {vm} declares {iops:.0} requests/s, work for {wanted}; its {queues} queues in use and \
                 {left} CPUs left allow {gets}"
            ),
            Self::Unseen { vm, why } => write!(f, "{vm}: {why}"),
            Self::GuestScheduler { vm, disk, rule } => write!(f, "{vm}/{disk}: {rule}"),
            Self::NoPolling { vm, iothread, why } => {
                let why = match why {
                    WhyNoPolling::NoTarget => {
                        "its VM has no target, and polling takes CPU from VMs that have"
                    }
                    WhyNoPolling::NoOwnCpu => "the plan has no CPU of its own for it",
                };
                write!(f, "{vm}: IOThread {iothread} does not poll: {why}")
            }
        }
    }
}

impl fmt::Display for GuestRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str(
                "no scheduler within the guest: the host schedules, and a second one only adds waiting",
            ),
            Self::NoneNotOffered => f.write_str("its guest offers no scheduler none; left alone"),
            Self::Bfq { tasks } => write!(
                f,
                "bfq within the guest: {tasks} tasks share the disk, and the host cannot tell them apart"
            ),
            Self::BfqNotOffered { tasks } => write!(
                f,
                "{tasks} tasks share the disk and its guest offers no bfq; its scheduler is left alone"
            ),
        }
    }
}
