//! Every knob of the kernel path, twice: as typed [`Settings`], which models
//! and planner reason about, and as flat [`Knobs`] (knob → text), which a
//! host observes, compares and writes.
//!
//! Knob values are texts in the kernel's own unit (µs for `slice_idle_us`,
//! ms for `timeout_sync`, sectors for `max_budget`, bytes per second for limits;
//! `max` is no limit), so that what is read back compares equal.
//! Source: kernel `Documentation/block/bfq-iosched.rst`,
//! `Documentation/admin-guide/cgroup-v2.rst` (io.max, io.cost.model, io.cost.qos, io.weight).

use std::collections::BTreeMap;
use std::fmt;

use rtvirtio_units::{BytesPerSecond, DeviceName, DiskName, IoThreadName, Name, VmName, Weight};
use serde::{Deserialize, Serialize};

/// bfq's parameters that rtvirtio sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bfq {
    /// `slice_idle_us`: how long to wait for an empty queue's next request. Default 8000.
    pub slice_idle_us: u32,
    /// `timeout_sync`, ms: the most device time that one queue gets once selected. Default 124.
    pub timeout_sync_ms: u32,
    /// `low_latency`: boost interactive queues. Default true.
    pub low_latency: bool,
    /// `max_budget`, sectors served before another queue is selected; 0 tunes itself. Default 0.
    pub max_budget: u32,
}

impl Bfq {
    /// The kernel's defaults (`block/bfq-iosched.c`, at HZ = 1000 and HZ = 250 alike).
    pub const DEFAULT: Self =
        Self { slice_idle_us: 8000, timeout_sync_ms: 124, low_latency: true, max_budget: 0 };
}

/// The kernel's iocost on a device (cgroup v2): what a device can do, and how long its requests may
/// take before iocost has it do less.
///
/// Requests are charged by the device's rates, the same for reads and writes and for sequential and
/// random ones. A cgroup that is over its weight's share of that waits. The rates are scaled up and down
/// (`vrate`) within a range, so that 99 % of reads and of writes end within a latency each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoCost {
    /// Bytes per second of large requests (`rbps`, `wbps`).
    pub bps: BytesPerSecond,
    /// Requests per second of 4 KiB (`rseqiops` and the like).
    pub iops: u64,
    /// The 99th percentile of completion latencies of reads, µs (`rlat`).
    pub read_latency_us: u32,
    /// The same of writes (`wlat`).
    pub write_latency_us: u32,
    /// Between which percentages the rates are scaled (`min`, `max`), 1 to 10,000. A scale that is fixed leaves latencies no say.
    #[serde(default = "IoCost::any_scale", skip_serializing_if = "IoCost::is_any_scale")]
    pub vrate: (u32, u32),
}

impl IoCost {
    /// All that the kernel allows: latencies alone decide.
    pub const ANY_SCALE: (u32, u32) = (1, 10_000);

    const fn any_scale() -> (u32, u32) {
        Self::ANY_SCALE
    }

    fn is_any_scale(vrate: &(u32, u32)) -> bool {
        *vrate == Self::ANY_SCALE
    }

    /// As a knob's text: `io.cost.model` without the device and `ctrl`.
    #[must_use]
    pub fn model(&self) -> String {
        let Self { bps, iops, .. } = self;
        let of = |d| format!("{d}bps={bps} {d}seqiops={iops} {d}randiops={iops}", bps = bps.get());
        format!("{} {}", of('r'), of('w'))
    }

    /// As a knob's text: `io.cost.qos` without the device, `enable` and `ctrl`.
    #[must_use]
    pub fn qos(&self) -> String {
        let Self { read_latency_us: read, write_latency_us: write, vrate: (min, max), .. } = self;
        format!("rpct=99.00 rlat={read} wpct=99.00 wlat={write} min={min}.00 max={max}.00")
    }
}

/// A block device's I/O scheduler with its parameters, or what stands in for one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum Scheduler {
    /// First come first served, no scheduler.
    None,
    /// No scheduler below iocost, which holds requests back before they reach one.
    IoCost(IoCost),
    /// Deadlines per direction, sorted by sector.
    MqDeadline,
    /// Token domains with latency goals per direction.
    Kyber,
    /// Budget fair queueing.
    Bfq(Bfq),
}

impl Scheduler {
    /// The kernel's name, as in `/sys/block/D/queue/scheduler`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None | Self::IoCost(_) => "none",
            Self::MqDeadline => "mq-deadline",
            Self::Kyber => "kyber",
            Self::Bfq(_) => "bfq",
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bfq(b) => write!(
                f,
                "bfq slice_idle={}us timeout_sync={}ms low_latency={} max_budget={}",
                b.slice_idle_us,
                b.timeout_sync_ms,
                u8::from(b.low_latency),
                b.max_budget
            ),
            Self::IoCost(IoCost { vrate: (min, max), .. }) if min == max => {
                write!(f, "iocost vrate={max}%")
            }
            Self::IoCost(IoCost { read_latency_us: read, write_latency_us: write, .. }) => {
                write!(f, "iocost read={read}us write={write}us")
            }
            other => f.write_str(other.name()),
        }
    }
}

/// Limits of one cgroup on one device (`io.max`, `blkio.throttle.*`); `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Bytes read per second.
    pub read_bps: Option<BytesPerSecond>,
    /// Bytes written per second.
    pub write_bps: Option<BytesPerSecond>,
    /// Reads per second.
    pub read_iops: Option<u64>,
    /// Writes per second.
    pub write_iops: Option<u64>,
}

impl Limits {
    /// The same limit in bytes per second on reads and on writes.
    #[must_use]
    pub const fn bps(limit: BytesPerSecond) -> Self {
        Self { read_bps: Some(limit), write_bps: Some(limit), read_iops: None, write_iops: None }
    }
}

/// One VM's settings on one device.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSettings {
    /// Weight under bfq and iocost; other schedulers ignore it.
    pub weight: Weight,
    /// Limits, enforced above the scheduler.
    pub limits: Limits,
}

/// One device's settings: its scheduler and those of each VM that uses it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSettings {
    /// Scheduler and parameters.
    pub scheduler: Scheduler,
    /// Each VM's weight and limits on this device.
    pub vms: BTreeMap<VmName, VmSettings>,
}

/// Settings of every device.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Settings(pub BTreeMap<DeviceName, DeviceSettings>);

/// A bfq parameter's file under `queue/iosched/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BfqParameter {
    /// µs; writing it also sets `slice_idle` (ms).
    SliceIdleUs,
    /// ms.
    TimeoutSync,
    /// 0 or 1. Turned off before weights are relied on.
    LowLatency,
    /// Sectors (512 bytes) of service; 0 is automatic.
    MaxBudget,
}

impl BfqParameter {
    /// The file's name.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::SliceIdleUs => "slice_idle_us",
            Self::TimeoutSync => "timeout_sync",
            Self::LowLatency => "low_latency",
            Self::MaxBudget => "max_budget",
        }
    }
}

/// Which limit of a cgroup on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Bytes read per second.
    ReadBps,
    /// Bytes written per second.
    WriteBps,
    /// Reads per second.
    ReadIops,
    /// Writes per second.
    WriteIops,
}

/// One knob of a host or of a VM on it. The order is the order of application:
/// a scheduler before its parameters (a switch resets them), those before
/// weights; what is a VM's own first, for that is likeliest to fail, then the data
/// plane, a schedule before what uses it, and the host is not touched yet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "knob", rename_all = "snake_case", deny_unknown_fields)]
pub enum Knob {
    /// The scheduler of a disk within the guest.
    GuestScheduler {
        /// Which VM.
        vm: VmName,
        /// Which of its disks.
        disk: DiskName,
    },
    /// A parameter of that scheduler if it is bfq.
    GuestBfq {
        /// Which VM.
        vm: VmName,
        /// Which of its disks.
        disk: DiskName,
        /// Which parameter.
        parameter: BfqParameter,
    },
    /// The longest that an IOThread of the VM's QEMU polls before it sleeps, ns
    /// (`poll-max-ns`); 0: it does not poll.
    PollMax {
        /// Which VM.
        vm: VmName,
        /// Which IOThread.
        iothread: IoThreadName,
    },
    /// The service curve of a physical device on the data plane, JSON.
    Schedule {
        /// Its schedule's name.
        schedule: Name,
    },
    /// What a disk is promised there, JSON; absent if its requests start as they come.
    Qos {
        /// The disk: a device of the data plane.
        disk: DiskName,
    },
    /// A device's scheduler: `none`, `mq-deadline`, `kyber` or `bfq`.
    Scheduler {
        /// Which device.
        device: DeviceName,
    },
    /// A parameter of the device's bfq; absent under another scheduler.
    Bfq {
        /// Which device.
        device: DeviceName,
        /// Which parameter.
        parameter: BfqParameter,
    },
    /// What iocost takes the device to be able to do: [`IoCost::model`], or `auto`, the kernel's guess.
    CostModel {
        /// Which device.
        device: DeviceName,
    },
    /// Whether iocost controls the device, and by which latencies: [`IoCost::qos`], or `off`. Absent where
    /// there is no iocost (cgroup v1, or a kernel without it).
    CostQos {
        /// Which device.
        device: DeviceName,
    },
    /// A VM's weight under iocost on a device (`io.weight`).
    CostWeight {
        /// Which device.
        device: DeviceName,
        /// Which VM.
        vm: VmName,
    },
    /// A VM's bfq weight on a device.
    Weight {
        /// Which device.
        device: DeviceName,
        /// Which VM.
        vm: VmName,
    },
    /// A VM's limit on a device, a number or `max`.
    Limit {
        /// Which device.
        device: DeviceName,
        /// Which VM.
        vm: VmName,
        /// Which limit.
        limit: Limit,
    },
}

impl Knob {
    /// The device that the knob belongs to; `None`: it is a guest's, its QEMU's or the data plane's,
    /// and no file of the host.
    #[must_use]
    pub const fn device(&self) -> Option<&DeviceName> {
        match self {
            Self::GuestScheduler { .. }
            | Self::GuestBfq { .. }
            | Self::PollMax { .. }
            | Self::Schedule { .. }
            | Self::Qos { .. } => None,
            Self::Scheduler { device }
            | Self::Bfq { device, .. }
            | Self::CostModel { device }
            | Self::CostQos { device }
            | Self::CostWeight { device, .. }
            | Self::Weight { device, .. }
            | Self::Limit { device, .. } => Some(device),
        }
    }

    /// Whether it is set by the data plane's control API.
    #[must_use]
    pub const fn is_of_data_plane(&self) -> bool {
        matches!(self, Self::Schedule { .. } | Self::Qos { .. })
    }

    /// The VM that the knob belongs to, if it is not the device's own.
    #[must_use]
    pub const fn vm(&self) -> Option<&VmName> {
        match self {
            Self::Schedule { .. }
            | Self::Qos { .. }
            | Self::Scheduler { .. }
            | Self::CostModel { .. }
            | Self::CostQos { .. }
            | Self::Bfq { .. } => None,
            Self::GuestScheduler { vm, .. }
            | Self::GuestBfq { vm, .. }
            | Self::PollMax { vm, .. }
            | Self::CostWeight { vm, .. }
            | Self::Weight { vm, .. }
            | Self::Limit { vm, .. } => Some(vm),
        }
    }

    /// The scheduler that the knob is a parameter of.
    #[must_use]
    pub fn scheduler(&self) -> Option<Self> {
        match self {
            Self::GuestBfq { vm, disk, .. } => {
                Some(Self::GuestScheduler { vm: vm.clone(), disk: disk.clone() })
            }
            Self::Bfq { device, .. } | Self::Weight { device, .. } => {
                Some(Self::Scheduler { device: device.clone() })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::GuestScheduler { vm, disk } => format!("{vm}/{disk}: guest scheduler"),
            Self::GuestBfq { vm, disk, parameter } => {
                format!("{vm}/{disk}: guest bfq {}", parameter.file())
            }
            Self::PollMax { vm, iothread } => format!("{vm}: IOThread {iothread}: poll-max-ns"),
            Self::Schedule { schedule } => format!("{schedule}: schedule on the data plane"),
            Self::Qos { disk } => format!("{disk}: qos on the data plane"),
            Self::Scheduler { device } => format!("{device}: scheduler"),
            Self::Bfq { device, parameter } => format!("{device}: bfq {}", parameter.file()),
            Self::CostModel { device } => format!("{device}: iocost model"),
            Self::CostQos { device } => format!("{device}: iocost qos"),
            Self::CostWeight { device, vm } => format!("{device}: {vm}: iocost weight"),
            Self::Weight { device, vm } => format!("{device}: {vm}: weight"),
            Self::Limit { device, vm, limit } => {
                let what = match limit {
                    Limit::ReadBps => "read limit (B/s)",
                    Limit::WriteBps => "write limit (B/s)",
                    Limit::ReadIops => "read limit (IOPS)",
                    Limit::WriteIops => "write limit (IOPS)",
                };
                format!("{device}: {vm}: {what}")
            }
        };
        f.pad(&text)
    }
}

/// The text of [`Knob::CostQos`] of a device that iocost does not control.
pub const COST_OFF: &str = "off";
/// The text of [`Knob::CostModel`] of a device whose model the kernel chooses.
pub const COST_AUTO: &str = "auto";

/// Knob → value text. A knob that is not there has no entry.
pub type Knobs = BTreeMap<Knob, String>;

/// [`Knobs`] as a list of (knob, value): JSON has text keys only.
pub mod knob_list {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{Knob, Knobs};

    /// Writes the list.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<S: Serializer>(knobs: &Knobs, serializer: S) -> Result<S::Ok, S::Error> {
        knobs.iter().collect::<Vec<(&Knob, &String)>>().serialize(serializer)
    }

    /// Reads the list; the last of two values for one knob counts.
    ///
    /// # Errors
    /// The deserializer's.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Knobs, D::Error> {
        Ok(Vec::<(Knob, String)>::deserialize(deserializer)?.into_iter().collect())
    }
}

/// One line of a diff; `None` means the knob does not exist (yet).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Which knob.
    pub knob: Knob,
    /// Its value before.
    pub old: Option<String>,
    /// Its value after.
    pub new: String,
}

impl Settings {
    /// Every knob that these settings define.
    #[must_use]
    pub fn knobs(&self) -> Knobs {
        let mut knobs = Knobs::new();
        for (device, settings) in &self.0 {
            knobs.insert(
                Knob::Scheduler { device: device.clone() },
                settings.scheduler.name().to_owned(),
            );
            let is_bfq = if let Scheduler::Bfq(bfq) = settings.scheduler {
                let parameters = [
                    (BfqParameter::SliceIdleUs, bfq.slice_idle_us),
                    (BfqParameter::TimeoutSync, bfq.timeout_sync_ms),
                    (BfqParameter::LowLatency, u32::from(bfq.low_latency)),
                    (BfqParameter::MaxBudget, bfq.max_budget),
                ];
                for (parameter, value) in parameters {
                    let knob = Knob::Bfq { device: device.clone(), parameter };
                    knobs.insert(knob, value.to_string());
                }
                true
            } else {
                false
            };
            let cost = match settings.scheduler {
                Scheduler::IoCost(cost) => Some(cost),
                _ => None,
            };
            if let Some(cost) = cost {
                knobs.insert(Knob::CostModel { device: device.clone() }, cost.model());
                knobs.insert(Knob::CostQos { device: device.clone() }, cost.qos());
            }
            for (vm, v) in &settings.vms {
                if cost.is_some() {
                    let knob = Knob::CostWeight { device: device.clone(), vm: vm.clone() };
                    knobs.insert(knob, v.weight.to_string());
                }
                if is_bfq {
                    let knob = Knob::Weight { device: device.clone(), vm: vm.clone() };
                    knobs.insert(knob, v.weight.to_string());
                }
                let limits = [
                    (Limit::ReadBps, v.limits.read_bps.map(BytesPerSecond::get)),
                    (Limit::WriteBps, v.limits.write_bps.map(BytesPerSecond::get)),
                    (Limit::ReadIops, v.limits.read_iops),
                    (Limit::WriteIops, v.limits.write_iops),
                ];
                for (limit, value) in limits {
                    let text = value.map_or_else(|| "max".to_owned(), |v| v.to_string());
                    let knob = Knob::Limit { device: device.clone(), vm: vm.clone(), limit };
                    knobs.insert(knob, text);
                }
            }
        }
        knobs
    }
}

/// What must change to get from `current` to `wanted`, in order of application.
///
/// A scheduler that changes resets its parameters, so all parameters of a new
/// scheduler are listed, whatever `current` says of them. Of a device whose scheduler is wanted, iocost
/// is turned off unless it is wanted too: it would hold requests back above any scheduler.
#[must_use]
pub fn diff(current: &Knobs, wanted: &Knobs) -> Vec<Change> {
    let mut wanted = wanted.clone();
    for (knob, text) in current {
        if let Knob::CostQos { device } = knob
            && text != COST_OFF
            && wanted.contains_key(&Knob::Scheduler { device: device.clone() })
        {
            wanted.entry(knob.clone()).or_insert_with(|| COST_OFF.to_owned());
        }
    }
    let switched = |knob: &Knob| {
        let is_parameter = matches!(knob, Knob::Bfq { .. } | Knob::GuestBfq { .. });
        let scheduler = knob.scheduler().filter(|_| is_parameter);
        scheduler.is_some_and(|s| current.get(&s) != wanted.get(&s))
    };
    wanted
        .iter()
        .filter(|(knob, new)| switched(knob) || current.get(*knob) != Some(*new))
        .map(|(knob, new)| Change {
            knob: knob.clone(),
            old: current.get(knob).cloned(),
            new: new.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> DeviceName {
        DeviceName::new("data").unwrap()
    }

    fn settings(scheduler: Scheduler) -> Settings {
        let vm = VmName::new("a").unwrap();
        let limits = Limits { write_bps: Some(BytesPerSecond::new(5)), ..Limits::default() };
        let vms = [(vm, VmSettings { limits, ..VmSettings::default() })].into();
        Settings([(device(), DeviceSettings { scheduler, vms })].into())
    }

    #[test]
    fn knobs_of_bfq_have_parameters_and_weights_and_others_have_not() {
        let bfq = settings(Scheduler::Bfq(Bfq::DEFAULT)).knobs();
        // Scheduler, 4 parameters, weight, 4 limits.
        assert_eq!(bfq.len(), 10);
        assert_eq!(settings(Scheduler::None).knobs().len(), 5);
        let parameter = BfqParameter::SliceIdleUs;
        assert_eq!(bfq[&Knob::Bfq { device: device(), parameter }], "8000");
    }

    #[test]
    fn diff_to_itself_is_empty() {
        let knobs = settings(Scheduler::Bfq(Bfq::DEFAULT)).knobs();
        assert!(diff(&knobs, &knobs).is_empty());
    }

    #[test]
    fn diff_after_a_switch_lists_every_parameter() {
        let bfq = settings(Scheduler::Bfq(Bfq::DEFAULT)).knobs();
        let mut current = bfq.clone();
        current.insert(Knob::Scheduler { device: device() }, "none".to_owned());
        let changes = diff(&current, &bfq);
        // The scheduler first, then its four parameters, though their values look equal.
        assert_eq!(changes.len(), 5);
        assert!(matches!(changes[0].knob, Knob::Scheduler { .. }));
    }

    #[test]
    fn iocost_has_a_model_latencies_and_weights_and_is_off_under_other_schedulers() {
        let bps = BytesPerSecond::new(1000);
        let cost = IoCost {
            bps,
            iops: 7,
            read_latency_us: 1000,
            write_latency_us: 2000,
            vrate: IoCost::ANY_SCALE,
        };
        let knobs = settings(Scheduler::IoCost(cost)).knobs();
        // Scheduler, model, qos, weight, 4 limits.
        assert_eq!(knobs.len(), 8);
        assert_eq!(knobs[&Knob::Scheduler { device: device() }], "none");
        let model = "rbps=1000 rseqiops=7 rrandiops=7 wbps=1000 wseqiops=7 wrandiops=7";
        assert_eq!(knobs[&Knob::CostModel { device: device() }], model);
        let none = settings(Scheduler::None).knobs();
        let changes = diff(&knobs, &none);
        let off = Knob::CostQos { device: device() };
        assert_eq!(changes.len(), 1, "{changes:?}");
        assert_eq!((&changes[0].knob, changes[0].new.as_str()), (&off, COST_OFF));
        // The model comes before what turns iocost on.
        let mut found = none.clone();
        found.insert(off, COST_OFF.to_owned());
        assert!(diff(&found, &none).is_empty());
        let order: Vec<Knob> = diff(&found, &knobs).into_iter().map(|c| c.knob).collect();
        assert!(
            matches!(order[0], Knob::CostModel { .. }) && matches!(order[1], Knob::CostQos { .. })
        );
    }

    #[test]
    fn plan_with_knobs_survives_json() {
        #[derive(Serialize, Deserialize, PartialEq, Debug)]
        struct Holder(#[serde(with = "knob_list")] Knobs);
        let holder = Holder(settings(Scheduler::None).knobs());
        let json = serde_json::to_string(&holder).unwrap();
        assert_eq!(serde_json::from_str::<Holder>(&json).unwrap(), holder);
    }
}
