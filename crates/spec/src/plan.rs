//! A plan: the settings chosen for a specification, what they change, what
//! they promise and what they cost.

use std::path::PathBuf;

use rtvirtio_units::{BytesPerSecond, Confidence, DeviceName, Nanos, Percentile, TaskName, VmName};
use serde::{Deserialize, Serialize};

use crate::profile::DeviceIdentity;
use crate::settings::{Change, Knobs, Settings};

/// The plan format that this version writes and reads.
pub const PLAN_VERSION: u32 = 1;

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
    /// The knobs found on the host when the plan was made; `apply` refuses if they have changed.
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
    /// How the settings were found, for people.
    pub reasons: Vec<String>,
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
    pub unmet: Option<String>,
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
    /// Which task holds the cap down, and at which bound, for people.
    pub held_by: Option<String>,
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

impl Plan {
    /// Whether every target is met.
    #[must_use]
    pub fn meets_all(&self) -> bool {
        self.tasks.iter().all(|t| t.unmet.is_none())
    }
}
