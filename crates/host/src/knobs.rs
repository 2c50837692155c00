//! One knob of the host: its value as the kernel shows it, and the write that sets it.
//!
//! Values are the texts of `rtvirtio_spec::settings`. Under a scheduler other
//! than bfq, bfq's parameters and weights do not exist. `timeout_sync` reads
//! as the kernel's tick allows (33 written at HZ=250 reads 36).
//!
//! Properties: `selected_scheduler_is_the_one_in_brackets`,
//! `value_that_the_kernel_would_truncate_is_refused`.

use std::path::{Path, PathBuf};

use rtvirtio_spec::settings::{BfqParameter, COST_AUTO, COST_OFF, Knob, Knobs, Limit};

use crate::cgroup::{CgroupVersion, CostFile, Write, read};
use crate::device::{Disk, directory};
use crate::sysfs::{DeviceNumber, Sysfs};
use crate::topology::Resolved;
use crate::{HostError, promises};

/// No limit.
pub(crate) const MAX: &str = "max";

/// `queue/scheduler`: what the kernel offers and which one is selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schedulers {
    pub(crate) offered: Vec<String>,
    pub(crate) selected: String,
    /// Whether the device has no requests to schedule, and so never another.
    pub(crate) is_fixed: bool,
}

impl Schedulers {
    pub(crate) fn read(sysfs: &dyn Sysfs, disk: &Disk) -> Result<Self, HostError> {
        Self::of_queue(sysfs, &directory(disk.number).join("queue"))
    }

    /// Those of the disk with this directory of queue attributes.
    pub(crate) fn of_queue(sysfs: &dyn Sysfs, queue: &Path) -> Result<Self, HostError> {
        let file = queue.join("scheduler");
        // Since Linux 6.9 a device without requests, such as an array of md, has no such file.
        if !sysfs.exists(&file) && sysfs.exists(&queue.join("rotational")) {
            let none = || "none".to_owned();
            return Ok(Self { offered: vec![none()], selected: none(), is_fixed: true });
        }
        let text = read(sysfs, &file)?;
        Self::parse(&text).ok_or_else(|| HostError::Format {
            file,
            found: text.trim().to_owned(),
            expected: "a list of schedulers with one in brackets",
        })
    }

    /// `none [mq-deadline] kyber bfq`; a device without a choice shows a bare `none`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let strip = |word: &str| word.trim_matches(['[', ']']).to_owned();
        let offered: Vec<String> = text.split_whitespace().map(strip).collect();
        let selected = text.split_whitespace().find(|w| w.starts_with('[')).map(strip);
        let only = || (offered.len() == 1).then(|| offered[0].clone());
        let is_fixed = selected.is_none();
        Some(Self { selected: selected.or_else(only)?, offered, is_fixed })
    }

    /// Those that the device can have, with those that the kernel loads when they are selected. Where its modules are not seen,
    /// `if_unknown` says which names to count among them.
    pub(crate) fn possible(
        self,
        sysfs: &dyn Sysfs,
        release: &str,
        if_unknown: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let Self { mut offered, is_fixed, .. } = self;
        for name in ["mq-deadline", "kyber", "bfq"] {
            let is_new = !is_fixed && offered.iter().all(|other| other != name);
            if is_new
                && has_module(sysfs, release, module(name)).unwrap_or_else(|| if_unknown(name))
            {
                offered.push(name.to_owned());
            }
        }
        offered
    }

    pub(crate) fn is_bfq(&self) -> bool {
        self.selected == "bfq"
    }
}

/// Whether there is a disk of this number, under bfq: only then it can have weight lines.
pub(crate) fn has_bfq(sysfs: &dyn Sysfs, disk: DeviceNumber) -> bool {
    let text = sysfs.read(&directory(disk).join("queue/scheduler"));
    text.is_ok_and(|t| Schedulers::parse(&t).is_some_and(|s| s.is_bfq()))
}

/// The module of a scheduler that may be built as one.
pub(crate) fn module(scheduler: &str) -> &str {
    if scheduler == "kyber" { "kyber-iosched" } else { scheduler }
}

/// Whether a module lies on disk (or in the kernel). `queue/scheduler` lists what is loaded only;
/// selecting a scheduler loads its module (kernel `block/elevator.c`). `None`: the kernel's modules are
/// not seen from here, as in a container, or lie elsewhere, as on NixOS; the kernel finds them all the same.
pub(crate) fn has_module(sysfs: &dyn Sysfs, release: &str, module: &str) -> Option<bool> {
    let modules = Path::new("/lib/modules").join(release);
    let read = |file: &str| sysfs.read(&modules.join(file)).ok();
    let indexes = [read("modules.dep"), read("modules.builtin")];
    let is_in = |index: &String| index.contains(&format!("/{module}.ko"));
    let is_any = indexes.iter().any(Option::is_some);
    is_any.then(|| indexes.iter().flatten().any(is_in))
}

const PARAMETERS: [BfqParameter; 4] = [
    BfqParameter::SliceIdleUs,
    BfqParameter::TimeoutSync,
    BfqParameter::LowLatency,
    BfqParameter::MaxBudget,
];
const LIMITS: [Limit; 4] = [Limit::ReadBps, Limit::WriteBps, Limit::ReadIops, Limit::WriteIops];

/// Every knob of the topology that exists, with its value.
pub(crate) fn observe(sysfs: &dyn Sysfs, resolved: &Resolved) -> Result<Knobs, HostError> {
    let mut wanted = Vec::new();
    let cost = resolved.version.as_ref().filter(|version| version.has_cost(sysfs));
    for (device, disk) in &resolved.devices {
        wanted.push(Knob::Scheduler { device: device.clone() });
        let is_on = match cost {
            Some(version) => {
                wanted.push(Knob::CostModel { device: device.clone() });
                wanted.push(Knob::CostQos { device: device.clone() });
                version.cost(sysfs, CostFile::Qos, disk.number)?.1 != COST_OFF
            }
            None => false,
        };
        let bfq = Schedulers::read(sysfs, disk)?.is_bfq();
        if bfq {
            let knob = |parameter| Knob::Bfq { device: device.clone(), parameter };
            wanted.extend(PARAMETERS.map(knob));
        }
        for (vm, _) in resolved.pairs.iter().filter(|(_, d)| d == device) {
            if bfq {
                wanted.push(Knob::Weight { device: device.clone(), vm: vm.clone() });
            }
            if is_on {
                wanted.push(Knob::CostWeight { device: device.clone(), vm: vm.clone() });
            }
            let knob = |limit| Knob::Limit { device: device.clone(), vm: vm.clone(), limit };
            wanted.extend(LIMITS.map(knob));
        }
    }
    let mut knobs = Knobs::new();
    for knob in wanted {
        let (_, text) = value(sysfs, resolved, &knob)?;
        knobs.insert(knob, text);
    }
    Ok(knobs)
}

/// The file and the value of a knob that exists.
pub(crate) fn value(
    sysfs: &dyn Sysfs,
    resolved: &Resolved,
    knob: &Knob,
) -> Result<(PathBuf, String), HostError> {
    let (disk, group) = resolved.of(knob)?;
    let write = write(resolved, knob, "0")?;
    let text = match (knob, group) {
        (Knob::Scheduler { .. }, _) => Schedulers::read(sysfs, disk)?.selected,
        (Knob::CostModel { .. } | Knob::CostQos { .. }, _) => {
            cost_version(resolved, knob)?.cost(sysfs, cost_file(knob), disk.number)?.1
        }
        (Knob::CostWeight { .. }, Some(g)) => g.cgroup.cost_weight(sysfs, disk.number)?,
        (Knob::Weight { .. }, Some(g)) => g.cgroup.weight(sysfs, disk.number)?,
        (Knob::Limit { limit, .. }, Some(g)) => {
            let limit = g.cgroup.limit(sysfs, disk.number, *limit)?;
            limit.unwrap_or_else(|| MAX.to_owned())
        }
        _ => read(sysfs, &write.file)?.trim().to_owned(),
    };
    Ok((write.file, text))
}

/// The write that sets `knob` to `text`.
pub(crate) fn write(resolved: &Resolved, knob: &Knob, text: &str) -> Result<Write, HostError> {
    let (disk, group) = resolved.of(knob)?;
    Ok(match (knob, group) {
        (Knob::CostModel { .. } | Knob::CostQos { .. }, _) => {
            cost_version(resolved, knob)?.cost_write(cost_file(knob), disk.number, text)
        }
        (Knob::CostWeight { .. }, Some(g)) => g.cgroup.cost_weight_write(disk.number, Some(text)),
        (Knob::Weight { .. }, Some(g)) => g.cgroup.weight_write(disk.number, Some(text)),
        (Knob::Limit { limit, .. }, Some(g)) => {
            g.cgroup.limit_write(disk.number, *limit, Some(text).filter(|t| *t != MAX))
        }
        (Knob::Bfq { parameter, .. }, _) => {
            let file = disk.queue("iosched").join(parameter.file());
            Write { file, text: text.to_owned() }
        }
        _ => Write { file: disk.queue("scheduler"), text: text.to_owned() },
    })
}

/// Which of iocost's files holds the knob.
pub(crate) const fn cost_file(knob: &Knob) -> CostFile {
    if matches!(knob, Knob::CostModel { .. }) { CostFile::Model } else { CostFile::Qos }
}

/// The hierarchy whose root has a knob of iocost's.
fn cost_version<'a>(resolved: &'a Resolved, knob: &Knob) -> Result<&'a CgroupVersion, HostError> {
    let unknown = || HostError::UnknownKnob { knob: Box::new(knob.clone()) };
    resolved.version.as_ref().ok_or_else(unknown)
}

/// Whether `text` is the pairs of these keys, in this order, each with a number that may have a point.
fn is_pairs(text: &str, keys: &[&str]) -> bool {
    let mut pairs = text.split(' ');
    let all = keys.iter().all(|key| {
        let number = pairs.next().and_then(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
    });
    all && pairs.next().is_none()
}

/// Refuses a text that the knob's file cannot hold, or that would be parsed as something else.
pub(crate) fn check(knob: &Knob, text: &str) -> Result<(), HostError> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = if digits { text.parse::<u64>().ok() } else { None };
    let within = |low: u64, high: u64| number.is_some_and(|n| (low..=high).contains(&n));
    let (good, expected) = match knob {
        // Whether it is offered is checked against the kernel's list.
        Knob::GuestScheduler { .. } | Knob::Scheduler { .. } => (
            !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'),
            "a scheduler's name",
        ),
        Knob::GuestBfq { parameter: BfqParameter::LowLatency, .. }
        | Knob::Bfq { parameter: BfqParameter::LowLatency, .. } => (within(0, 1), "0 or 1"),
        Knob::GuestBfq { .. } | Knob::Bfq { .. } => {
            (within(0, i32::MAX as u64), "a number from 0 to 2147483647")
        }
        // QEMU holds it in a signed number (iothread.c).
        Knob::PollMax { .. } => (within(0, i64::MAX as u64), "a number of ns below 2^63"),
        Knob::Schedule { .. } => (promises::check(knob, text), "a service curve in JSON"),
        Knob::Qos { .. } => (promises::check(knob, text), "what the control API takes, in JSON"),
        Knob::Weight { .. } => (within(1, 1000), "a number from 1 to 1000"),
        Knob::CostModel { .. } => {
            let keys = ["rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops"];
            (text == COST_AUTO || is_pairs(text, &keys), "auto, or the rates of io.cost.model")
        }
        Knob::CostQos { .. } => {
            let keys = ["rpct", "rlat", "wpct", "wlat", "min", "max"];
            (text == COST_OFF || is_pairs(text, &keys), "off, or the latencies of io.cost.qos")
        }
        Knob::CostWeight { .. } => (within(1, 10_000), "a number from 1 to 10000"),
        // The kernel cuts v1 IOPS limits to 32 bits and takes the largest value for no limit;
        // 0 removes a v1 limit.
        Knob::Limit { limit: Limit::ReadIops | Limit::WriteIops, .. } => (
            text == MAX || within(1, u64::from(u32::MAX - 1)),
            "max, or a number from 1 to 4294967294",
        ),
        Knob::Limit { .. } => {
            (text == MAX || within(1, u64::MAX - 1), "max, or a number from 1 below 2^64 - 1")
        }
    };
    // A leading zero would read back without it.
    let plain = text.len() == 1 || !text.starts_with('0');
    if good && plain {
        return Ok(());
    }
    Err(HostError::BadValue { knob: Box::new(knob.clone()), value: text.to_owned(), expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtvirtio_units::{DeviceName, VmName};

    #[test]
    fn selected_scheduler_is_the_one_in_brackets() {
        let found = Schedulers::parse("none mq-deadline kyber [bfq] \n").unwrap();
        assert_eq!(found.selected, "bfq");
        assert_eq!(found.offered, ["none", "mq-deadline", "kyber", "bfq"]);
        let fixed = Schedulers::parse("none\n").unwrap();
        assert!(fixed.selected == "none" && fixed.is_fixed && !found.is_fixed);
        assert_eq!(Schedulers::parse("\n"), None);
    }

    #[test]
    fn device_can_have_what_is_there_or_whose_module_is_unless_it_has_no_requests() {
        let sysfs = crate::fake::FakeSysfs::bare();
        sysfs.put("/lib/modules/6.12/modules.dep", "kernel/block/bfq.ko.xz:\n");
        sysfs.put("/lib/modules/6.12/modules.builtin", "kernel/block/kyber-iosched.ko\n");
        let possible = |text: &str, release: &str| {
            let found = Schedulers::parse(text).unwrap();
            found.possible(&sysfs, release, |name| name == "bfq")
        };
        let all = ["none", "mq-deadline", "kyber", "bfq"];
        assert_eq!(possible("[none] mq-deadline\n", "6.12"), all);
        assert_eq!(possible("[none] bfq\n", "6.12"), ["none", "bfq", "kyber"]);
        assert_eq!(possible("none\n", "6.12"), ["none"]);
        // Of another kernel there is no index: what the caller says holds, but for what has no requests.
        assert_eq!(possible("[none] mq-deadline\n", "6.13"), ["none", "mq-deadline", "bfq"]);
        assert_eq!(possible("none\n", "6.13"), ["none"]);
        // One index without the other says what there is.
        sysfs.put("/lib/modules/6.14/modules.builtin", "kernel/block/kyber-iosched.ko\n");
        assert_eq!(possible("[none] mq-deadline\n", "6.14"), ["none", "mq-deadline", "kyber"]);
    }

    #[test]
    fn value_that_the_kernel_would_truncate_is_refused() {
        let device = DeviceName::new("d").unwrap();
        let vm = VmName::new("v").unwrap();
        let limit = |limit| Knob::Limit { device: device.clone(), vm: vm.clone(), limit };
        assert!(check(&limit(Limit::ReadIops), "5000000000").is_err());
        assert!(check(&limit(Limit::ReadBps), "5000000000").is_ok());
        assert!(check(&limit(Limit::ReadBps), "max").is_ok());
        assert!(check(&limit(Limit::ReadBps), "0").is_err());
        assert!(check(&limit(Limit::ReadBps), "1 wbps=1").is_err());
        assert!(check(&limit(Limit::ReadBps), "01").is_err());
        let weight = Knob::Weight { device: device.clone(), vm: vm.clone() };
        assert!(check(&weight, "0").is_err());
        assert!(check(&weight, "1001").is_err());
        assert!(check(&weight, "default").is_err());
        let qos = Knob::CostQos { device: device.clone() };
        let text = "rpct=99.00 rlat=2000 wpct=99.00 wlat=2000 min=1.00 max=10000.00";
        assert!(check(&qos, "off").is_ok() && check(&qos, text).is_ok());
        for bad in ["", "auto", "rpct=99", &format!("{text} enable=0"), &text.replace("99.00", "x")]
        {
            assert!(check(&qos, bad).is_err(), "{bad}");
        }
        let model = Knob::CostModel { device: device.clone() };
        assert!(check(&model, "auto").is_ok() && check(&model, "off").is_err());
        assert!(
            check(&model, "rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6").is_ok()
        );
        assert!(check(&Knob::Scheduler { device }, "no\nne").is_err());
    }
}
