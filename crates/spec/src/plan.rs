//! A plan: the settings chosen for a specification, what they change, what
//! they promise and what they cost.

pub mod data_plane;
pub mod qemu;
mod reason;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use rtvirtio_units::{
    BytesPerSecond, Confidence, CpuId, DeviceName, DiskName, IoThreadId, Nanos, Percentile,
    TaskName, VmName,
};
use serde::{Deserialize, Serialize};

use crate::guests::Guests;
use crate::profile::DeviceIdentity;
use crate::settings::{Change, Knobs, Settings};

pub use reason::{
    BindingConstraint, Broken, Cause, Fallback, FallbackOf, GuestRule, NoAnswer, Reason, Unmet,
    WhyNoPolling,
};

/// The plan format that this version writes and reads.
pub const PLAN_VERSION: u32 = 7;

/// A saved plan (`rtvirtio plan -o`). Holds all that `apply` needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// The devices it is for.
    pub devices: Vec<PlannedDevice>,
    /// The VMs it is for.
    pub vms: Vec<PlannedVm>,
    /// The chosen settings.
    pub settings: Settings,
    /// What is set within the VMs that answered: their guests' schedulers, their IOThreads' polling.
    pub guests: Guests,
    /// What is set on the data plane, if it serves VMs of the specification.
    pub data_plane: Option<data_plane::DataPlane>,
    /// The knobs found when the plan was made; `apply` refuses if they have changed.
    #[serde(with = "crate::settings::knob_list")]
    pub observed: Knobs,
    /// What must change, in order of application.
    pub changes: Vec<Change>,
    /// Each task with a target: prediction and bound under `settings`.
    pub tasks: Vec<TaskPromise>,
    /// What each background VM gets.
    pub background: Vec<BackgroundShare>,
    /// Throughput that the settings give up, per device.
    pub cost: Vec<DeviceCost>,
    /// IOThreads for the VMs' next start; `apply` leaves them alone, for QEMU takes them at a
    /// guest's start only.
    pub iothreads: IoThreads,
    /// How the settings were found, and what to know about them.
    pub reasons: Vec<Reason>,
}

/// A device of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedDevice {
    /// Its name in the specification.
    pub name: DeviceName,
    /// Its node.
    pub path: PathBuf,
    /// What it must still be when the plan is applied.
    pub identity: DeviceIdentity,
}

/// A VM of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedVm {
    /// Its name.
    pub name: VmName,
    /// Its cgroup below the io controller's mount.
    pub cgroup: PathBuf,
}

/// What the plan promises one task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskPromise {
    /// The task's VM.
    pub vm: VmName,
    /// The task.
    pub task: TaskName,
    /// The percentile that target, prediction and bound refer to.
    pub percentile: Percentile,
    /// The target.
    pub target: Nanos,
    /// The expected value of the percentile.
    pub predicted: Nanos,
    /// The percentiles of all the VM's tasks stay below their bounds with `confidence`; `None` if
    /// the profile holds too few runs to say.
    pub bound: Option<Nanos>,
    /// The bound's confidence.
    pub confidence: Confidence,
    /// Expected fraction of the declared rate that is delivered, 0 to 1.
    pub delivered: f64,
    /// Why the target cannot be met, if it cannot.
    pub unmet: Option<Unmet>,
    /// What predicted.
    pub model: PredictedBy,
    /// Where the structural model stands in for the one that was asked, and why.
    pub fallback: Option<Fallback>,
}

/// What a prediction comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PredictedBy {
    /// The structural model.
    Structural,
    /// The paper's model, refit.
    Analytical,
    /// A model in an ONNX file.
    Learned,
    /// The data plane's admission test.
    DataPlane,
}

impl fmt::Display for PredictedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Structural => "structural",
            Self::Analytical => "analytical",
            Self::Learned => "learned",
            Self::DataPlane => "data plane",
        })
    }
}

/// What a VM without a target gets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackgroundShare {
    /// The VM.
    pub vm: VmName,
    /// The device.
    pub device: DeviceName,
    /// Its cap; `None` if it needs none.
    pub cap: Option<BytesPerSecond>,
    /// What keeps the cap from being larger; none: there is no cap.
    pub binding_constraint: Option<BindingConstraint>,
}

/// What the settings give up on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCost {
    /// The device.
    pub device: DeviceName,
    /// Background throughput without any target to keep.
    pub background_alone: BytesPerSecond,
    /// Background throughput under the plan.
    pub background_planned: BytesPerSecond,
    /// Fraction of the device that the declared loads use, 0 to 1 (more is an overload).
    pub utilisation: f64,
}

/// Which IOThread serves each virtqueue, and where IOThreads and vCPUs run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoThreads {
    /// CPUs that the vCPUs have to themselves, ascending; empty if no IOThread is pinned.
    pub vcpu_cpus: Vec<CpuId>,
    /// The VMs whose queues are known.
    pub vms: Vec<VmIoThreads>,
}

/// The IOThreads of one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmIoThreads {
    /// The VM.
    pub vm: VmName,
    /// Its virtual CPUs, if it says.
    pub vcpus: Option<u32>,
    /// Its IOThreads, ascending.
    pub threads: Vec<IoThread>,
    /// Its disks whose queues are known.
    pub disks: Vec<DiskIoThreads>,
}

/// One IOThread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoThread {
    /// Its id within its VM.
    pub id: IoThreadId,
    /// The CPU to pin it to; `None`: no CPU is left for it.
    pub cpu: Option<CpuId>,
}

/// The IOThread of each queue of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskIoThreads {
    /// The disk.
    pub disk: DiskName,
    /// The IOThread of queue 0, 1, 2, …
    pub queues: Vec<IoThreadId>,
}

impl DiskIoThreads {
    /// The queues of each IOThread that serves the disk, ascending.
    #[must_use]
    pub fn by_thread(&self) -> BTreeMap<IoThreadId, Vec<usize>> {
        let mut threads: BTreeMap<IoThreadId, Vec<usize>> = BTreeMap::new();
        for (queue, &thread) in self.queues.iter().enumerate() {
            threads.entry(thread).or_default().push(queue);
        }
        threads
    }
}

impl Plan {
    /// Every knob that the plan sets.
    #[must_use]
    pub fn knobs(&self) -> Knobs {
        let mut knobs = self.settings.knobs();
        knobs.extend(self.guests.knobs());
        knobs.extend(self.data_plane.iter().flat_map(data_plane::DataPlane::knobs));
        knobs
    }

    /// Whether every target is met.
    #[must_use]
    pub fn meets_all(&self) -> bool {
        self.tasks.iter().all(|t| t.unmet.is_none())
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::IoThreadName;

    use super::*;
    use crate::guests::{GuestScheduler, GuestSettings};
    use crate::profile::Regime;
    use crate::settings::{Bfq, Scheduler};

    fn guests() -> Guests {
        let disks = [(DiskName::new("root").unwrap(), GuestScheduler::None)].into();
        let poll_max = [(IoThreadName::new("io0").unwrap(), Nanos::ZERO)].into();
        Guests([(VmName::new("plc").unwrap(), GuestSettings { disks, poll_max })].into())
    }

    fn promise() -> TaskPromise {
        TaskPromise {
            vm: VmName::new("plc").unwrap(),
            task: TaskName::new("control").unwrap(),
            percentile: Percentile::new(99.9).unwrap(),
            target: Nanos::from_millis(20),
            predicted: Nanos::from_millis(10),
            bound: Some(Nanos::from_millis(15)),
            confidence: Confidence::new(0.95).unwrap(),
            delivered: 1.0,
            unmet: None,
            model: PredictedBy::Learned,
            fallback: Some(Fallback { of: FallbackOf::Bound, why: NoAnswer::TooFewScores }),
        }
    }

    fn unmet() -> TaskPromise {
        let unmet = Unmet {
            cause: Cause::TooFewRuns { regime: Regime::Flooded, has: 3, needs: 19, tasks: 2 },
            overload: Some(1.2),
            background: None,
        };
        TaskPromise { unmet: Some(unmet), bound: None, ..promise() }
    }

    fn plan() -> Plan {
        let thread = IoThread { id: IoThreadId::new(1), cpu: Some(CpuId::new(3)) };
        let disk = DiskIoThreads {
            disk: DiskName::new("root").unwrap(),
            queues: vec![IoThreadId::new(1); 2],
        };
        let vm = VmName::new("plc").unwrap();
        let vm = VmIoThreads { vm, vcpus: Some(2), threads: vec![thread], disks: vec![disk] };
        Plan {
            version: PLAN_VERSION,
            devices: Vec::new(),
            vms: Vec::new(),
            settings: Settings::default(),
            guests: guests(),
            data_plane: None,
            observed: Knobs::new(),
            changes: Vec::new(),
            tasks: vec![promise(), unmet()],
            background: vec![BackgroundShare {
                vm: VmName::new("backup").unwrap(),
                device: DeviceName::new("data").unwrap(),
                cap: Some(BytesPerSecond::new(1_000_000)),
                binding_constraint: Some(BindingConstraint::Target { promise: Box::new(unmet()) }),
            }],
            cost: Vec::new(),
            iothreads: IoThreads { vcpu_cpus: vec![CpuId::new(0)], vms: vec![vm] },
            reasons: vec![
                Reason::VmOff { vm: VmName::new("off").unwrap() },
                Reason::GuestScheduler {
                    vm: VmName::new("plc").unwrap(),
                    disk: DiskName::new("root").unwrap(),
                    rule: GuestRule::Bfq { tasks: 2 },
                },
                Reason::Scheduler {
                    device: DeviceName::new("data").unwrap(),
                    scheduler: Scheduler::Bfq(Bfq::DEFAULT),
                },
            ],
        }
    }

    #[test]
    fn plan_is_read_back_as_it_was() {
        let text = serde_json::to_string(&plan()).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan());
    }
}
