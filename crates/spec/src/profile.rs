//! A device's profile: who it is, what was measured of it, and the models
//! fitted to that. The `model` room says what the fitted numbers mean.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rtvirtio_units::{Bytes, BytesPerSecond, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::run::MeasuredAt;
use crate::settings::{IoCost, Scheduler};

/// The profile format that this version writes and reads.
pub const PROFILE_VERSION: u32 = 1;

/// What identifies a device across boots. A profile is of the device with this identity, and refused
/// for any other; [`Profile::of_model`] and [`Profile::for_device`] take it to another one of its model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceIdentity {
    /// Kernel driver family: `loop`, `nvme`, `sd`, `vd`, …
    pub kind: String,
    /// Model, or the backing file's name for a loop device.
    pub model: String,
    /// Serial number or WWID, if it has one; a loop device has none.
    pub serial: Option<String>,
    /// Size.
    pub size: Bytes,
    /// Whether the kernel takes it for a rotational disk.
    pub rotational: bool,
}

/// How much sizes of one model's devices of one class may differ.
const SIZE_CLASS: f64 = 1.1;

impl DeviceIdentity {
    /// Whether both are of one model and size class: a model's larger devices are faster ones.
    #[must_use]
    pub fn is_of_same_model(&self, other: &Self) -> bool {
        let (a, b) = (self.size.get() as f64, other.size.get() as f64);
        let has_size = a.max(b) <= SIZE_CLASS * a.min(b);
        let model = |of: &Self| (of.kind.clone(), of.model.clone(), of.rotational);
        has_size && model(self) == model(other)
    }
}

impl std::fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, model, serial, size, rotational } = self;
        write!(f, "{kind} {model:?} of {size}")?;
        if let Some(serial) = serial {
            write!(f, ", serial {serial:?}")?;
        }
        f.write_str(if *rotational { ", rotational" } else { "" })
    }
}

/// How a profile was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileSource {
    /// By measuring a device that nobody else used.
    #[default]
    Alone,
    /// By measuring it beside others: bounds are wider, and no writer without a cap was there.
    BesideOthers,
    /// By watching others use it: capacity is the least that it can be, and only their load has a bound.
    Observed,
}

/// A profile file (`rtvirtio calibrate`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`PROFILE_VERSION`].
    pub version: u32,
    /// Whose profile it is.
    pub device: DeviceIdentity,
    /// Kernel release during calibration.
    pub kernel: String,
    /// Where the latencies of its probes were taken: on the host, or in guests.
    #[serde(default = "on_host")]
    pub measured_at: MeasuredAt,
    /// When it was made, RFC 3339, UTC.
    pub date: String,
    /// The device alone.
    pub capacity: Capacity,
    /// Parameters of the structural model.
    pub structural: StructuralFit,
    /// λ of the paper's model.
    pub paper: PaperFit,
    /// What the models left unexplained, for the bound.
    pub residuals: Residuals,
    /// What the fits come from.
    pub probes: Vec<Probe>,
    /// How it was made.
    #[serde(default)]
    pub source: ProfileSource,
    /// The device's firmware when it was measured, if it tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<String>,
    /// The device that was measured, if it was another one of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_on: Option<DeviceIdentity>,
    /// The ONNX file of the device's learned model, relative to the profile; `None`: the profile's
    /// name with the extension `onnx`, if that is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<PathBuf>,
}

/// Profiles were all of the host before guests could be measured.
const fn on_host() -> MeasuredAt {
    MeasuredAt::Host
}

/// Why a profile is not usable: it was damaged or edited.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// The version is not [`PROFILE_VERSION`].
    #[error("profile version {0}, this rtvirtio reads {PROFILE_VERSION}")]
    Version(u32),
    /// A number is not one that calibration writes.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
}

/// A profile is of another model than a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the profile is of {profile}, and the device is {device}: another model or size class")]
pub struct OtherModel {
    /// Whose profile it is.
    profile: Box<DeviceIdentity>,
    /// What it was to be taken for.
    device: Box<DeviceIdentity>,
}

/// No time in a profile is longer.
const LONGEST: Nanos = Nanos::from_millis(3_600_000);

impl Profile {
    /// The same without what tells its device from others of the model, to be given away.
    #[must_use]
    pub fn of_model(&self) -> Self {
        let anonymous = |device: &DeviceIdentity| DeviceIdentity { serial: None, ..device.clone() };
        Self {
            device: anonymous(&self.device),
            measured_on: self.measured_on.as_ref().map(anonymous),
            ..self.clone()
        }
    }

    /// The same as the profile of another device of the model, which names the one that was measured.
    ///
    /// # Errors
    /// [`OtherModel`].
    pub fn for_device(&self, device: DeviceIdentity) -> Result<Self, OtherModel> {
        if self.device == device {
            return Ok(self.clone());
        }
        if !self.device.is_of_same_model(&device) {
            let (profile, device) = (Box::new(self.device.clone()), Box::new(device));
            return Err(OtherModel { profile, device });
        }
        let measured_on = self.measured_on.clone().unwrap_or_else(|| self.device.clone());
        // The learned model is of the device that was measured.
        Ok(Self { device, measured_on: Some(measured_on), learned: None, ..self.clone() })
    }

    /// Checks what the models rely on: finite, positive numbers, a base, sorted residuals.
    ///
    /// # Errors
    /// [`ProfileError`] names the first field that is not as it must be.
    pub fn check(&self) -> Result<(), ProfileError> {
        if self.version != PROFILE_VERSION {
            return Err(ProfileError::Version(self.version));
        }
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let factor = |x: &f64| (0.001..=1000.0).contains(x);
        let time = |t: Nanos| t > Nanos::ZERO && t <= LONGEST;
        let response =
            |r: &Response| [r.mean, r.p50, r.p99, r.p999].into_iter().all(time) && r.p99 <= r.p999;
        let s = &self.structural;
        let base = |p: &BasePoint| {
            (0.0..1.0).contains(&p.utilisation) && [p.mean, p.p99, p.p999].into_iter().all(time)
        };
        let rising = s.base.is_sorted_by(|a, b| a.utilisation < b.utilisation);
        let stalls =
            |f: StallFit| f.per_second.is_finite() && f.per_second >= 0.0 && time(f.length);
        let controlled = |f: &IoCostFit| {
            let has_rates = f.setting.bps.get() > 0 && f.setting.iops > 0;
            let (min, max) = f.setting.vrate;
            let is_range = 1 <= min && min <= max && max <= IoCost::ANY_SCALE.1;
            has_rates
                && is_range
                && (0.0..=1.0).contains(&f.utilisation)
                && f.setting.read_latency_us > 0
                && f.setting.write_latency_us > 0
                && time(f.wait)
                && (0.0..=1.0).contains(&f.left)
        };
        let scores = |v: &Vec<f64>| v.iter().all(|x| x.is_finite()) && v.is_sorted();
        let residuals = &self.residuals;
        let checks = [
            ("capacity.iops_4k", positive(self.capacity.iops_4k)),
            ("capacity.write_throughput", self.capacity.write_throughput.get() > 0),
            ("capacity.response_4k", response(&self.capacity.response_4k)),
            ("capacity.response_128k", response(&self.capacity.response_128k)),
            ("structural.base", !s.base.is_empty() && rising && s.base.iter().all(base)),
            ("structural.scheduler_factor", s.scheduler_factor.values().all(factor)),
            ("structural.burst", time(s.burst)),
            ("structural.stalls", s.stalls.is_none_or(stalls)),
            ("structural.regime_factor", s.regime_factor.values().all(factor)),
            ("structural.iocost", s.iocost.iter().all(controlled)),
            ("paper.weight", positive(self.paper.weight)),
            ("paper.throughput", self.paper.throughput.get() > 0),
            ("residuals.structural", residuals.structural.values().all(scores)),
            ("residuals.structural_vms", residuals.structural_vms.values().all(scores)),
            ("residuals.as_measured", residuals.as_measured.values().all(scores)),
            ("residuals.as_measured_vms", residuals.as_measured_vms.values().all(scores)),
            ("residuals.lateness", residuals.lateness.values().all(|t| *t <= LONGEST)),
            ("residuals.paper", residuals.paper.values().all(scores)),
        ];
        match checks.into_iter().find(|(_, holds)| !holds) {
            Some((field, _)) => Err(ProfileError::OutOfRange(field)),
            None => Ok(()),
        }
    }
}

/// What the device does for one user.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// 4 KiB requests per second, 70 % reads, at depth 64.
    pub iops_4k: f64,
    /// Bytes written per second in 128 KiB requests at depth 64.
    pub write_throughput: BytesPerSecond,
    /// 4 KiB at depth 1, as the submitter sees it.
    pub response_4k: Response,
    /// 128 KiB writes at depth 1.
    pub response_128k: Response,
}

impl Capacity {
    /// Of the same device if it takes `factor` times as long, 1 or more.
    #[must_use]
    pub fn slower(self, factor: f64) -> Self {
        let throughput = self.write_throughput.get() as f64 / factor;
        Self {
            iops_4k: self.iops_4k / factor,
            write_throughput: BytesPerSecond::new(throughput as u64),
            response_4k: self.response_4k.slower(factor),
            response_128k: self.response_128k.slower(factor),
        }
    }
}

impl Response {
    fn slower(self, factor: f64) -> Self {
        let Self { mean, p50, p99, p999 } = self;
        let [mean, p50, p99, p999] = [mean, p50, p99, p999].map(|time| time.scale(factor));
        Self { mean, p50, p99, p999 }
    }
}

/// Response time at depth 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    /// Mean.
    pub mean: Nanos,
    /// Median.
    pub p50: Nanos,
    /// 99th percentile.
    pub p99: Nanos,
    /// 99.9th percentile.
    pub p999: Nanos,
}

/// Parameters of the structural model; see `rtvirtio_model::structural`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StructuralFit {
    /// Tails of depth-1 requests without a deep neighbour, by rising utilisation; at least one.
    pub base: Vec<BasePoint>,
    /// Factor on the base tails for each scheduler's name, 1 or more. Of one that is not here it is the largest.
    pub scheduler_factor: BTreeMap<String, f64>,
    /// How much of a cap is released at once, as a time: bytes = cap × this.
    pub burst: Nanos,
    /// Times in which the device serves nothing, if it has them.
    pub stalls: Option<StallFit>,
    /// Factor of each regime but bursting and controlled, which `burst` and `iocost` fit: median of
    /// measured over modelled.
    pub regime_factor: BTreeMap<Regime, f64>,
    /// What was measured under iocost, where that was tried: the settings that kept the tasks' rates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub iocost: Vec<IoCostFit>,
}

impl StructuralFit {
    /// What is known of iocost, so set, where declared loads use this part of the device; `None`: nothing.
    #[must_use]
    pub fn iocost(&self, setting: IoCost, utilisation: f64) -> Option<&IoCostFit> {
        let known = self.iocost.iter();
        let known = known.filter(|fit| fit.setting == setting && fit.covers(utilisation));
        known.min_by(|a, b| a.utilisation.total_cmp(&b.utilisation))
    }
}

/// A device under iocost, beside a deep queue without a limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoCostFit {
    /// How it was set.
    pub setting: IoCost,
    /// The part of the device that declared loads used meanwhile, 0 to 1.
    pub utilisation: f64,
    /// What a tail has beyond the base response.
    pub wait: Nanos,
    /// What the deep queue moved of what the declared loads left of the device, 0 to 1.
    pub left: f64,
}

impl IoCostFit {
    /// Whether it says something of loads that use this part of the device: those that use less wait no longer.
    #[must_use]
    pub fn covers(&self, utilisation: f64) -> bool {
        utilisation <= 1.05 * self.utilisation
    }

    /// What the deep queue is left beside loads that use this part of the device: a part of its write throughput.
    #[must_use]
    pub fn background(&self, utilisation: f64) -> f64 {
        (1.0 - utilisation).max(0.0) * self.left
    }
}

/// Base tails at one utilisation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BasePoint {
    /// Fraction of the device in use, 0 to 1.
    pub utilisation: f64,
    /// Mean response.
    pub mean: Nanos,
    /// 99th percentile.
    pub p99: Nanos,
    /// 99.9th percentile.
    pub p999: Nanos,
}

/// Stalls as the calibration saw them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StallFit {
    /// Stalls per second, upper 95 % limit.
    pub per_second: f64,
    /// The longest seen.
    pub length: Nanos,
}

/// What dominates a tail; each regime has its own law and its own residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regime {
    /// The scheduler does not idle and no deep queue is unlimited.
    Flowing,
    /// As flowing, and a cap holds a VM back: what it sends comes in bursts.
    Bursting,
    /// The scheduler does not idle; an unlimited deep queue fills the device.
    Flooded,
    /// bfq idles between the requests of a queue.
    Idling,
    /// bfq idles and an unlimited deep queue is there.
    IdlingFlooded,
    /// iocost holds a queue without a limit back.
    Controlled,
}

impl Regime {
    /// All.
    pub const ALL: [Self; 6] = [
        Self::Flowing,
        Self::Bursting,
        Self::Flooded,
        Self::Idling,
        Self::IdlingFlooded,
        Self::Controlled,
    ];
}

/// λ of the paper's model (Table III), host part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperFit {
    /// λ^φ, influence of the weight.
    pub weight: f64,
    /// λ^TS of the host.
    pub timeout_sync: f64,
    /// λ^SI of the host.
    pub slice_idle: f64,
    /// T_agg of the host.
    pub throughput: BytesPerSecond,
}

/// Logarithms of measured over predicted tails, sorted, of the calibration's task-runs. The measured ones have the
/// machine's own lateness in their probe on top, where nothing else is said.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Of the structural model.
    pub structural: BTreeMap<Regime, Vec<f64>>,
    /// Of the structural model, the largest of each VM's tasks in a probe.
    #[serde(default)]
    pub structural_vms: BTreeMap<Regime, Vec<f64>>,
    /// Of the structural model, tails as they were measured. None in profiles that were made before these were kept.
    #[serde(default)]
    pub as_measured: BTreeMap<Regime, Vec<f64>>,
    /// The same, the largest of each VM's tasks in a probe.
    #[serde(default)]
    pub as_measured_vms: BTreeMap<Regime, Vec<f64>>,
    /// The longest lateness of the machine in a probe of the regime ([`Probe::canary`]).
    #[serde(default)]
    pub lateness: BTreeMap<Regime, Nanos>,
    /// Of the paper's model.
    pub paper: BTreeMap<Regime, Vec<f64>>,
}

/// One calibration cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// What was set.
    pub scheduler: Scheduler,
    /// Competing VMs, each with the tasks L, M and H.
    pub vms: u32,
    /// Whether a deep writer competed.
    pub writer: bool,
    /// Its cap.
    pub cap: Option<BytesPerSecond>,
    /// Bytes per second that it got.
    pub writer_throughput: BytesPerSecond,
    /// Measured tails.
    pub tails: Vec<ProbeTail>,
    /// Delay of a sleeping thread, 99th percentile.
    pub canary: Nanos,
}

/// One task's tail in a probe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeTail {
    /// Which VM, from 0.
    pub vm: u32,
    /// Requested rate.
    pub iops: f64,
    /// Delivered fraction.
    pub delivered: f64,
    /// Which percentile.
    pub percentile: Percentile,
    /// Its value.
    pub tail: Nanos,
}
