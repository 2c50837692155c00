//! The schemes that are compared, and the settings of each baseline.
//!
//! A VM's urgency is its strictest target: the smaller, the more urgent; equal
//! ones keep the order of the specification. A VM without any target is
//! background and comes after all others.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use rtvirtio_spec::settings::{Bfq, DeviceSettings, Limits, Scheduler, Settings, VmSettings};
use rtvirtio_spec::specification::{Specification, Vm};
use rtvirtio_units::{BytesPerSecond, DeviceName, Iops, Nanos, VmName, Weight};

use crate::CasesError;
use crate::scale::Scale;

/// Fraction of the device's capacity that mimic RT-Xen hands out as budgets.
const RT_XEN_UTILISATION: f64 = 0.85;

/// The hand setting's weights by urgency; further VMs get the last.
const HAND_WEIGHTS: [u32; 4] = [1000, 700, 500, 300];

/// The hand setting's weight of a background VM. Its cap is what holds it
/// back; the weight settles who waits while the writer is within that cap, and
/// 10 keeps it a factor of 30 below the least urgent VM.
const HAND_BACKGROUND_WEIGHT: u32 = 10;

/// The hand setting's cap on a background VM, each way.
const HAND_BACKGROUND_CAP: BytesPerSecond = BytesPerSecond::from_megabytes(10);

/// A way to share the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    /// bfq with the kernel's defaults.
    Bfq,
    /// Default bfq; the most urgent VM in the real-time class, the others best-effort by urgency.
    Ionice,
    /// Default bfq under an IOPS budget for each VM, as RT-Xen's periodic servers would give.
    MimicRtXen,
    /// No scheduler.
    None,
    /// mq-deadline with the kernel's defaults.
    MqDeadline,
    /// kyber with the kernel's defaults.
    Kyber,
    /// What an expert sets: bfq that does not idle, weights by urgency, background at 10 MB/s.
    Hand,
    /// The planner's settings.
    Rtvirtio,
}

impl Scheme {
    /// All, in the order of reports.
    pub const ALL: [Self; 8] = [
        Self::Bfq,
        Self::Ionice,
        Self::MimicRtXen,
        Self::None,
        Self::MqDeadline,
        Self::Kyber,
        Self::Hand,
        Self::Rtvirtio,
    ];

    const fn label(self) -> &'static str {
        match self {
            Self::Bfq => "bfq",
            Self::Ionice => "ionice",
            Self::MimicRtXen => "rt-xen",
            Self::None => "none",
            Self::MqDeadline => "mq-deadline",
            Self::Kyber => "kyber",
            Self::Hand => "hand",
            Self::Rtvirtio => "rtvirtio",
        }
    }

    /// The baseline's settings for `specification` on devices of `capacity`
    /// requests of 4 KiB per second, all as slow as `scale` says; `None` for [`Scheme::Rtvirtio`], whose
    /// settings come from a plan.
    #[must_use]
    pub fn baseline_settings(
        self,
        specification: &Specification,
        capacity: Iops,
        scale: Scale,
    ) -> Option<SchemeSettings> {
        let ranked = Ranked::new(specification);
        let bfq = Scheduler::Bfq(Bfq::DEFAULT);
        let settings = match self {
            Self::Bfq | Self::Ionice => {
                ranked.settings(specification, bfq, |_, _| VmSettings::default())
            }
            Self::MimicRtXen => ranked.settings(specification, bfq, |device, vm| VmSettings {
                limits: ranked.rt_xen_limits(device, vm, capacity),
                ..VmSettings::default()
            }),
            Self::None => {
                ranked.settings(specification, Scheduler::None, |_, _| VmSettings::default())
            }
            Self::MqDeadline => {
                ranked.settings(specification, Scheduler::MqDeadline, |_, _| VmSettings::default())
            }
            Self::Kyber => {
                ranked.settings(specification, Scheduler::Kyber, |_, _| VmSettings::default())
            }
            Self::Hand => {
                let scheduler =
                    Scheduler::Bfq(Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT });
                ranked.settings(specification, scheduler, |_, vm| ranked.hand(vm, scale))
            }
            Self::Rtvirtio => return None,
        };
        let ioprio = if self == Self::Ionice { ranked.ioprio() } else { BTreeMap::new() };
        Some(SchemeSettings { settings, ioprio })
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl FromStr for Scheme {
    type Err = CasesError;
    fn from_str(text: &str) -> Result<Self, CasesError> {
        const NAMES: &str = "bfq, ionice, rt-xen, none, mq-deadline, kyber, hand or rtvirtio";
        let unknown = || CasesError::unknown("scheme", text, NAMES);
        Self::ALL.into_iter().find(|s| s.label() == text).ok_or_else(unknown)
    }
}

/// The I/O priority of a VM's processes, as `ionice` sets it. Level 0 is the most urgent of 0..=7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IoPriority {
    /// The real-time class.
    RealTime(u8),
    /// The best-effort class.
    BestEffort(u8),
}

impl IoPriority {
    /// The least urgent level of a class (kernel `IOPRIO_NR_LEVELS` − 1).
    pub const LAST_LEVEL: u8 = 7;

    /// The class's number for `ionice -c` and `ioprio_set`.
    #[must_use]
    pub const fn class(self) -> u8 {
        match self {
            Self::RealTime(_) => 1,
            Self::BestEffort(_) => 2,
        }
    }

    /// The level within the class, 0 to 7.
    #[must_use]
    pub const fn level(self) -> u8 {
        match self {
            Self::RealTime(level) | Self::BestEffort(level) => level,
        }
    }
}

impl fmt::Display for IoPriority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = match self {
            Self::RealTime(_) => "rt",
            Self::BestEffort(_) => "be",
        };
        f.pad(&format!("{class}/{}", self.level()))
    }
}

/// All that a scheme sets.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SchemeSettings {
    /// The host's knobs.
    pub settings: Settings,
    /// Each VM's I/O priority; empty if the scheme sets none.
    pub ioprio: BTreeMap<VmName, IoPriority>,
}

/// The VMs of a specification by urgency.
struct Ranked<'a> {
    /// VMs with a target, most urgent first.
    urgent: Vec<(&'a Vm, Nanos)>,
    /// VMs without.
    background: Vec<&'a Vm>,
}

impl<'a> Ranked<'a> {
    fn new(specification: &'a Specification) -> Self {
        let mut ranked = Self { urgent: Vec::new(), background: Vec::new() };
        for vm in &specification.vms {
            match vm.tasks.iter().filter_map(|t| Some(t.target?.latency)).min() {
                Some(strictest) => ranked.urgent.push((vm, strictest)),
                None => ranked.background.push(vm),
            }
        }
        ranked.urgent.sort_by_key(|&(_, strictest)| strictest);
        ranked
    }

    /// The same scheduler on every device, and what `each` says for each VM that has a disk on it.
    fn settings(
        &self,
        specification: &Specification,
        scheduler: Scheduler,
        each: impl Fn(&DeviceName, &Vm) -> VmSettings,
    ) -> Settings {
        let devices = specification.devices.iter().map(|device| {
            let on_device = specification.vms.iter().filter(|vm| uses(vm, &device.name));
            let vms = on_device.map(|vm| (vm.name.clone(), each(&device.name, vm))).collect();
            (device.name.clone(), DeviceSettings { scheduler, vms })
        });
        Settings(devices.collect())
    }

    fn rank(&self, vm: &Vm) -> Option<usize> {
        self.urgent.iter().position(|(other, _)| other.name == vm.name)
    }

    fn ioprio(&self) -> BTreeMap<VmName, IoPriority> {
        let last = IoPriority::LAST_LEVEL;
        let urgent = self.urgent.iter().enumerate().map(|(rank, (vm, _))| {
            let priority = match u8::try_from(rank) {
                Ok(0) => IoPriority::RealTime(0),
                Ok(rank) => IoPriority::BestEffort((rank - 1).min(last)),
                Err(_) => IoPriority::BestEffort(last),
            };
            (vm.name.clone(), priority)
        });
        let background =
            self.background.iter().map(|vm| (vm.name.clone(), IoPriority::BestEffort(last)));
        urgent.chain(background).collect()
    }

    fn hand(&self, vm: &Vm, scale: Scale) -> VmSettings {
        let weight = |w| Weight::new(w).expect("the hand weights are weights");
        match self.rank(vm) {
            Some(rank) => {
                let rank = rank.min(HAND_WEIGHTS.len() - 1);
                VmSettings { weight: weight(HAND_WEIGHTS[rank]), limits: Limits::default() }
            }
            None => VmSettings {
                weight: weight(HAND_BACKGROUND_WEIGHT),
                limits: Limits::bps(scale.throughput(HAND_BACKGROUND_CAP)),
            },
        }
    }

    /// A VM's budget on `device`: 0.85 × capacity × share, share ∝ 1 / target.
    ///
    /// A background VM has no target and takes the share of the loosest. The
    /// interface has a limit for reads and one for writes, so the budget is
    /// divided by the VM's declared mix; a request counts as one whatever its
    /// size, as the scheme's description has it.
    fn rt_xen_limits(&self, device: &DeviceName, vm: &Vm, capacity: Iops) -> Limits {
        let here = || self.urgent.iter().filter(|(vm, _)| uses(vm, device));
        // Without any target all shares are equal, whatever the value.
        let loosest = here().map(|&(_, t)| t).max().unwrap_or(Nanos::from_millis(1));
        let urgency = |target: Nanos| 1.0 / target.get().max(1) as f64;
        let background = self.background.iter().filter(|vm| uses(vm, device)).count();
        let total =
            here().map(|&(_, t)| urgency(t)).sum::<f64>() + background as f64 * urgency(loosest);
        let target = self.rank(vm).map_or(loosest, |rank| self.urgent[rank].1);

        let budget = RT_XEN_UTILISATION * capacity.get() * urgency(target) / total;
        let reads = read_fraction(vm, device);
        // The kernel refuses a limit of 0.
        let limit = |iops: f64| Some((iops.round() as u64).max(1));
        Limits {
            read_iops: limit(budget * reads),
            write_iops: limit(budget * (1.0 - reads)),
            ..Limits::default()
        }
    }
}

fn uses(vm: &Vm, device: &DeviceName) -> bool {
    vm.disks.iter().any(|disk| disk.device == *device)
}

/// Fraction of reads among the requests that `vm` declares for `device`.
///
/// A task without a rate counts as much as the mean of those with one; a VM
/// without a task there counts as half and half.
fn read_fraction(vm: &Vm, device: &DeviceName) -> f64 {
    let loads = || vm.tasks.iter().filter(|t| vm.device_of(t) == device).map(|t| &t.load);
    let rates: Vec<f64> = loads().filter_map(|l| l.iops.map(Iops::get)).collect();
    let unknown =
        if rates.is_empty() { 1.0 } else { rates.iter().sum::<f64>() / rates.len() as f64 };
    let (reads, all) = loads().fold((0.0, 0.0), |(reads, all), load| {
        let rate = load.iops.map_or(unknown, Iops::get);
        (reads + rate * load.read_fraction, all + rate)
    });
    if all > 0.0 { reads / all } else { 0.5 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::specification::tests::strict;
    use crate::tier::Neighbour;

    fn baseline(scheme: Scheme, case: &str, neighbour: Neighbour) -> SchemeSettings {
        let capacity = Iops::new(10_000.0).unwrap();
        scheme.baseline_settings(&strict(case, neighbour), capacity, Scale::ONE).unwrap()
    }

    fn device(settings: &SchemeSettings) -> &DeviceSettings {
        &settings.settings.0[&DeviceName::new("scratch").unwrap()]
    }

    fn of<'a>(settings: &'a SchemeSettings, vm: &str) -> &'a VmSettings {
        &device(settings).vms[&VmName::new(vm).unwrap()]
    }

    #[test]
    fn scheme_names_round_trip() {
        for scheme in Scheme::ALL {
            assert_eq!(scheme.to_string().parse(), Ok(scheme));
        }
        assert!("rtxen".parse::<Scheme>().is_err());
    }

    #[test]
    fn plain_baselines_set_the_scheduler_and_nothing_else() {
        let schedulers = [
            (Scheme::Bfq, "bfq"),
            (Scheme::None, "none"),
            (Scheme::MqDeadline, "mq-deadline"),
            (Scheme::Kyber, "kyber"),
        ];
        for (scheme, name) in schedulers {
            let s = baseline(scheme, "2xM", Neighbour::Writer);
            assert_eq!(device(&s).scheduler.name(), name);
            assert_eq!(device(&s).vms.len(), 3);
            assert!(device(&s).vms.values().all(|v| *v == VmSettings::default()));
            assert!(s.ioprio.is_empty());
        }
        let s = baseline(Scheme::Bfq, "2xM", Neighbour::Writer);
        assert_eq!(device(&s).scheduler, Scheduler::Bfq(Bfq::DEFAULT));
    }

    #[test]
    fn rtvirtio_has_no_baseline() {
        let capacity = Iops::new(10_000.0).unwrap();
        let specification = strict("1xL", Neighbour::None);
        assert_eq!(Scheme::Rtvirtio.baseline_settings(&specification, capacity, Scale::ONE), None);
    }

    #[test]
    fn ionice_orders_vms_by_target_and_puts_the_background_last() {
        let s = baseline(Scheme::Ionice, "4xL+M+H", Neighbour::Writer);
        let texts: Vec<_> = s.ioprio.iter().map(|(vm, p)| format!("{vm} {p}")).collect();
        assert_eq!(texts, ["background be/7", "vm0 rt/0", "vm1 be/0", "vm2 be/1", "vm3 be/2"]);
        assert_eq!(device(&s).scheduler, Scheduler::Bfq(Bfq::DEFAULT));
    }

    #[test]
    fn urgency_is_the_strictest_target_and_not_the_order_of_the_file() {
        let mut specification = strict("3xH", Neighbour::None);
        specification.vms.reverse();
        let capacity = Iops::new(10_000.0).unwrap();
        let s = Scheme::Ionice.baseline_settings(&specification, capacity, Scale::ONE).unwrap();
        assert_eq!(s.ioprio[&VmName::new("vm0").unwrap()], IoPriority::RealTime(0));
        assert_eq!(s.ioprio[&VmName::new("vm2").unwrap()], IoPriority::BestEffort(1));
    }

    #[test]
    fn rt_xen_shares_are_inverse_to_targets() {
        // Targets 10 and 15 ms: shares 0.6 and 0.4 of 8,500 IOPS: 5,100 and 3,400, 70 % reads.
        let s = baseline(Scheme::MimicRtXen, "2xM+H", Neighbour::None);
        let iops = |vm| (of(&s, vm).limits.read_iops, of(&s, vm).limits.write_iops);
        assert_eq!(iops("vm0"), (Some(3_570), Some(1_530)));
        assert_eq!(iops("vm1"), (Some(2_380), Some(1_020)));
        assert_eq!(of(&s, "vm0").limits.write_bps, None);
        assert_eq!(device(&s).scheduler, Scheduler::Bfq(Bfq::DEFAULT));
    }

    #[test]
    fn rt_xen_background_takes_the_share_of_the_loosest_target() {
        // 1/10 + 1/15 + 1/15 = 7/30: shares 3/7, 2/7, 2/7 of 8,500 IOPS. The writer never
        // reads, so all of its 2,428.6 are writes.
        let s = baseline(Scheme::MimicRtXen, "2xH", Neighbour::Writer);
        let iops = |vm| (of(&s, vm).limits.read_iops, of(&s, vm).limits.write_iops);
        assert_eq!(iops("vm0"), (Some(2_550), Some(1_093)));
        assert_eq!(iops("vm1"), (Some(1_700), Some(729)));
        assert_eq!(iops("background"), (Some(1), Some(2_429)));
    }

    #[test]
    fn rt_xen_uses_the_strictest_target_of_a_vm() {
        // L alone would have 15 and 22.5 ms, the same ratio; the mix is led by M at 10 and 15.
        let s = baseline(Scheme::MimicRtXen, "2xL+M", Neighbour::None);
        assert_eq!(of(&s, "vm0").limits.read_iops, Some(3_570));
    }

    #[test]
    fn hand_does_not_idle_weighs_by_urgency_and_caps_the_background() {
        let s = baseline(Scheme::Hand, "4xH", Neighbour::Writer);
        let Scheduler::Bfq(bfq) = device(&s).scheduler else { panic!("hand is bfq") };
        assert_eq!((bfq.slice_idle_us, bfq.low_latency), (0, false));
        assert_eq!((bfq.timeout_sync_ms, bfq.max_budget), (124, 0));
        let weights: Vec<_> =
            ["vm0", "vm1", "vm2", "vm3", "background"].map(|vm| of(&s, vm).weight.get()).into();
        assert_eq!(weights, [1000, 700, 500, 300, 10]);
        assert_eq!(of(&s, "vm0").limits, Limits::default());
        let limits = of(&s, "background").limits;
        assert_eq!(limits.write_bps.unwrap().get(), 10_000_000);
        assert_eq!(limits.read_bps.unwrap().get(), 10_000_000);
        assert!(s.ioprio.is_empty());
    }
}
