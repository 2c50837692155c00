//! Apply, rollback, verify, confirm and cgroups on the kernel in memory, with a VM on real sockets.

mod crash;
mod groups;
mod guests;
mod interrupted;
mod machine;
mod promises;
mod reapply;
mod refusal;
mod unwritable;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rtvirtio_spec::guests::{GuestScheduler, GuestSettings, Guests};
use rtvirtio_spec::settings::{
    Bfq, Change, DeviceSettings, IoCost, Knob, Knobs, Limit, Limits, Scheduler, Settings,
    VmSettings, diff,
};
use rtvirtio_units::{BytesPerSecond, DeviceName, DiskName, IoThreadName, Nanos, VmName, Weight};
use tempfile::TempDir;

use crate::fake::FakeSysfs;
use crate::sysfs::{DeviceNumber, Sysfs as _};
use crate::{
    Applied, ApplyOptions, GuestTopology, Host, HostError, JournalStatus, RollbackOutcome,
    Topology, WatchdogOutcome,
};

use machine::Machine;

const DISK: DeviceNumber = DeviceNumber::new(8, 0);

struct Bed {
    fake: Arc<FakeSysfs>,
    host: Host,
    topology: Topology,
    state: TempDir,
    machine: Option<Machine>,
}

fn device() -> DeviceName {
    DeviceName::new("data").unwrap()
}

fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

fn group(name: &str) -> String {
    format!("machine.slice/{name}.scope")
}

impl Bed {
    /// A disk under `scheduler`, or iocost, with parameters that are not the defaults, two VMs of
    /// rtvirtio and a foreign one, each with knobs of its own.
    fn new(v2: bool, scheduler: &str) -> Self {
        let fake = if v2 { FakeSysfs::v2() } else { FakeSysfs::v1() };
        fake.add_disk("sda", DISK, 1 << 20);
        let queue = Path::new("/sys/block/sda/queue");
        let set = |file: &str, text: &str| fake.write(&queue.join(file), text).unwrap();
        set("scheduler", if scheduler == "iocost" { "none" } else { scheduler });
        match scheduler {
            "bfq" => {
                set("iosched/strict_guarantees", "1");
                set("iosched/slice_idle_us", "2500");
                set("iosched/back_seek_max", "77");
            }
            "mq-deadline" => set("iosched/read_expire", "99"),
            _ => {}
        }
        set("nr_requests", "64");
        for name in ["plc", "backup", "foreign"] {
            fake.add_cgroup(&group(name));
        }
        let mount = if v2 { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/blkio" };
        let weight = if v2 { "io.bfq.weight" } else { "blkio.bfq.weight_device" };
        let (limit, text) = if v2 {
            ("io.max", "8:0 wbps=5000 riops=7")
        } else {
            ("blkio.throttle.write_bps_device", "8:0 5000")
        };
        let write = |name: &str, file: &str, text: &str| {
            fake.write(&Path::new(mount).join(group(name)).join(file), text).unwrap();
        };
        if scheduler == "bfq" {
            write("plc", weight, "8:0 300");
            write("foreign", weight, "8:0 900");
        }
        if scheduler == "iocost" {
            let root = |file: &str, text: String| {
                fake.write(&Path::new(mount).join(file), &format!("8:0 {text}")).unwrap();
            };
            root("io.cost.model", format!("ctrl=user model=linear {}", FOREIGN.model()));
            root("io.cost.qos", format!("enable=1 ctrl=user {}", FOREIGN.qos()));
            write("plc", "io.weight", "8:0 300");
            write("foreign", "io.weight", "8:0 900");
        }
        write("backup", limit, text);
        let vms = ["plc", "backup"];
        let topology = Topology {
            devices: BTreeMap::from([(device(), "/dev/sda".into())]),
            vms: vms.map(|name| (vm(name), group(name).into())).into(),
            uses: vms.map(|name| (vm(name), BTreeSet::from([device()]))).into(),
            identities: BTreeMap::new(),
            guests: BTreeMap::new(),
            data_plane: None,
        };
        let state = tempfile::tempdir().unwrap();
        let fake = Arc::new(fake);
        let host = Host::with_sysfs(state.path(), fake.clone());
        Self { fake, host, topology, state, machine: None }
    }

    /// The same, where the VM `plc` runs in a QEMU.
    fn with_guest(v2: bool, scheduler: &str) -> Self {
        let mut bed = Self::new(v2, scheduler);
        let machine = Machine::start(&bed.fake, "plc", 4242);
        bed.topology.guests.extend([machine.topology()]);
        bed.machine = Some(machine);
        bed
    }

    /// All that can be set.
    fn snapshot(&self) -> String {
        self.fake.snapshot() + &self.machine.as_ref().map(Machine::snapshot).unwrap_or_default()
    }

    fn observe(&self) -> Knobs {
        self.host.observe(&self.topology).unwrap()
    }

    fn changes_to(&self, wanted: &Knobs) -> (Knobs, Vec<Change>) {
        let observed = self.observe();
        let changes = diff(&observed, wanted);
        (observed, changes)
    }

    fn apply_with(&self, wanted: &Knobs, options: ApplyOptions) -> Result<Applied, HostError> {
        let (observed, changes) = self.changes_to(wanted);
        self.host.apply(&self.topology, &observed, &changes, options)
    }

    fn apply(&self, wanted: &Knobs) -> Result<Applied, HostError> {
        self.apply_with(wanted, ApplyOptions::default())
    }

    fn drift(&self, wanted: &Knobs) -> usize {
        self.host.verify(&self.topology, wanted).unwrap().len()
    }
}

/// bfq without idling, weights 500 and 50, the second VM capped.
fn wanted() -> Knobs {
    wanted_with(Scheduler::Bfq(Bfq {
        slice_idle_us: 0,
        timeout_sync_ms: 32,
        low_latency: false,
        max_budget: 64,
    }))
}

fn wanted_with(scheduler: Scheduler) -> Knobs {
    let of = |weight, limits| VmSettings { weight: Weight::new(weight).unwrap(), limits };
    let vms = BTreeMap::from([
        (vm("plc"), of(500, Limits::default())),
        (vm("backup"), of(50, Limits::bps(BytesPerSecond::from_megabytes(10)))),
    ]);
    Settings(BTreeMap::from([(device(), DeviceSettings { scheduler, vms })])).knobs()
}

/// The same, with the guest's scheduler, without idling if it is bfq, and no polling.
fn with_guest(mut wanted: Knobs, scheduler: &str) -> Knobs {
    let scheduler = match scheduler {
        "bfq" => GuestScheduler::Bfq { slice_idle_us: 0, low_latency: false },
        _ => GuestScheduler::None,
    };
    let disks = [(DiskName::new("root").unwrap(), scheduler)].into();
    let poll_max = [(IoThreadName::new("io0").unwrap(), Nanos::ZERO)].into();
    let settings = GuestSettings { disks, poll_max };
    wanted.extend(Guests([(vm("plc"), settings)].into()).knobs());
    wanted
}

const STARTS: [(bool, &str); 6] = [
    (false, "none"),
    (false, "bfq"),
    (false, "mq-deadline"),
    (true, "bfq"),
    (true, "kyber"),
    (true, "iocost"),
];

/// As somebody else has set iocost.
const FOREIGN: IoCost = IoCost {
    bps: BytesPerSecond::new(1 << 30),
    iops: 50_000,
    read_latency_us: 7_000,
    write_latency_us: 7_000,
    vrate: IoCost::ANY_SCALE,
};
/// As a plan sets it.
const OWN: IoCost = IoCost {
    bps: BytesPerSecond::new(1 << 28),
    iops: 14_500,
    read_latency_us: 2_000,
    write_latency_us: 2_000,
    vrate: IoCost::ANY_SCALE,
};

fn short() -> ApplyOptions {
    ApplyOptions { confirm_timeout: Some(Duration::from_millis(30)) }
}

fn long() -> ApplyOptions {
    ApplyOptions { confirm_timeout: Some(Duration::from_secs(3600)) }
}

#[test]
fn observe_shows_the_formats_of_settings() {
    let bed = Bed::new(true, "bfq");
    let knobs = bed.observe();
    let text = |knob: Knob| knobs.get(&knob).cloned();
    let weight = |name| Knob::Weight { device: device(), vm: vm(name) };
    let limit = |limit| Knob::Limit { device: device(), vm: vm("backup"), limit };
    assert_eq!(text(Knob::Scheduler { device: device() }).as_deref(), Some("bfq"));
    assert_eq!(text(weight("plc")).as_deref(), Some("300"));
    assert_eq!(text(weight("backup")).as_deref(), Some("100"));
    assert_eq!(text(limit(Limit::WriteBps)).as_deref(), Some("5000"));
    assert_eq!(text(limit(Limit::ReadBps)).as_deref(), Some("max"));
    assert_eq!(text(limit(Limit::ReadIops)).as_deref(), Some("7"));
    // iocost is there, and off.
    let qos = Knob::CostQos { device: device() };
    assert_eq!(text(qos.clone()).as_deref(), Some("off"));
    assert_eq!(knobs.len(), 1 + 4 + 2 + 2 + 8);

    let bed = Bed::new(true, "iocost");
    let knobs = bed.observe();
    assert_eq!(knobs[&qos], FOREIGN.qos());
    assert_eq!(knobs[&Knob::CostModel { device: device() }], FOREIGN.model());
    assert_eq!(knobs[&Knob::CostWeight { device: device(), vm: vm("plc") }], "300");
    assert_eq!(knobs[&Knob::CostWeight { device: device(), vm: vm("backup") }], "100");

    let bed = Bed::new(false, "none");
    assert_eq!(bed.observe().len(), 1 + 8, "no bfq parameter and no weight under none");
}

#[test]
fn apply_then_verify_then_rollback_returns_to_the_start() {
    for (v2, scheduler) in STARTS {
        let bed = Bed::new(v2, scheduler);
        let before = bed.fake.snapshot();
        let wanted = wanted();
        assert!(bed.drift(&wanted) > 0);
        assert!(bed.apply(&wanted).unwrap().written > 0);
        assert_eq!(bed.drift(&wanted), 0);
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Applied);
        let outcome = bed.host.rollback().unwrap();
        assert!(matches!(outcome, RollbackOutcome::RolledBack(r) if r.skipped.is_empty()));
        assert_eq!(bed.fake.snapshot(), before, "v2={v2} {scheduler}");
        assert_eq!(bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
    }
}

#[test]
fn iocost_is_applied_and_rolled_back_whatever_was_there() {
    for (v2, scheduler) in STARTS.into_iter().filter(|(v2, _)| *v2) {
        let bed = Bed::new(v2, scheduler);
        let before = bed.snapshot();
        let own = wanted_with(Scheduler::IoCost(OWN));
        bed.apply(&own).unwrap();
        assert_eq!(bed.drift(&own), 0);
        let knobs = bed.observe();
        assert_eq!(knobs[&Knob::CostQos { device: device() }], OWN.qos());
        assert_eq!(knobs[&Knob::CostWeight { device: device(), vm: vm("plc") }], "500");
        // Another plan without it turns it off.
        bed.apply(&wanted()).unwrap();
        assert_eq!(bed.observe()[&Knob::CostQos { device: device() }], "off");
        bed.host.rollback().unwrap();
        assert_eq!(bed.snapshot(), before, "{scheduler}");
    }
    let (observed, changes) =
        Bed::new(false, "none").changes_to(&wanted_with(Scheduler::IoCost(OWN)));
    let bed = Bed::new(false, "none");
    let refused = bed.host.apply(&bed.topology, &observed, &changes, ApplyOptions::default());
    // cgroup v1 has none, and nothing is changed.
    assert!(refused.is_err());
    assert_eq!(bed.snapshot(), Bed::new(false, "none").snapshot());
}

#[test]
fn switch_away_from_bfq_and_back_keeps_foreign_weights() {
    for v2 in [false, true] {
        let bed = Bed::new(v2, "bfq");
        let before = bed.fake.snapshot();
        bed.apply(&wanted_with(Scheduler::Kyber)).unwrap();
        assert!(!bed.fake.snapshot().contains("900"), "the switch dropped the foreign weight");
        bed.apply(&wanted()).unwrap();
        bed.host.rollback().unwrap();
        assert_eq!(bed.fake.snapshot(), before);
    }
}

#[test]
fn second_apply_keeps_the_original_values() {
    for (v2, scheduler) in STARTS {
        let bed = Bed::new(v2, scheduler);
        let before = bed.fake.snapshot();
        bed.apply(&wanted()).unwrap();
        bed.apply(&wanted_with(Scheduler::MqDeadline)).unwrap();
        bed.apply(&wanted_with(Scheduler::Bfq(Bfq::DEFAULT))).unwrap();
        bed.host.rollback().unwrap();
        assert_eq!(bed.fake.snapshot(), before, "v2={v2} {scheduler}");
    }
}

#[test]
fn nothing_to_change_leaves_no_journal() {
    let bed = Bed::new(false, "bfq");
    let observed = bed.observe();
    assert_eq!(bed.apply(&observed).unwrap().written, 0);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
}

#[test]
fn unconfirmed_apply_is_reverted_by_the_watchdog() {
    let bed = Bed::new(false, "mq-deadline");
    let before = bed.fake.snapshot();
    assert!(bed.apply_with(&wanted(), short()).unwrap().awaits_confirmation);
    assert_ne!(bed.fake.snapshot(), before);
    let outcome = bed.host.revert_unless_confirmed().unwrap();
    assert!(matches!(outcome, WatchdogOutcome::Reverted(_)));
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn confirmed_apply_is_left_alone_by_the_watchdog() {
    let bed = Bed::new(false, "none");
    assert!(matches!(bed.host.confirm(), Err(HostError::NothingToConfirm)));
    bed.apply_with(&wanted(), long()).unwrap();
    bed.host.confirm().unwrap();
    assert_eq!(bed.host.revert_unless_confirmed().unwrap(), WatchdogOutcome::Settled);
    assert_eq!(bed.drift(&wanted()), 0);
}

#[test]
fn expired_apply_is_reverted_by_the_next_command() {
    let expire = || std::thread::sleep(Duration::from_millis(40));
    for command in 0..4 {
        let bed = Bed::new(false, "bfq");
        let before = bed.fake.snapshot();
        let start = bed.observe();
        bed.apply_with(&wanted(), short()).unwrap();
        expire();
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Unfinished);
        match command {
            0 => drop(bed.host.rollback().unwrap()),
            1 => assert_eq!(bed.drift(&start), 0),
            2 => assert!(matches!(bed.host.confirm(), Err(HostError::ConfirmedTooLate))),
            _ => {
                let options = ApplyOptions::default();
                let applied = bed.host.apply(&bed.topology, &start, &[], options).unwrap();
                assert!(applied.recovered.is_some());
            }
        }
        assert_eq!(bed.fake.snapshot(), before, "command {command}");
    }
}

#[test]
fn revert_returns_to_the_apply_before() {
    let bed = Bed::new(true, "kyber");
    let before = bed.fake.snapshot();
    bed.apply(&wanted()).unwrap();
    let first = bed.fake.snapshot();
    bed.apply_with(&wanted_with(Scheduler::None), short()).unwrap();
    bed.host.revert_unless_confirmed().unwrap();
    assert_eq!(bed.fake.snapshot(), first);
    bed.host.rollback().unwrap();
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn journal_is_kept_while_it_is_not_known_which_boot_this_is() {
    let bed = Bed::new(false, "none");
    let before = bed.fake.snapshot();
    bed.apply(&wanted()).unwrap();
    bed.fake.remove("/proc/sys/kernel/random/boot_id");
    assert!(matches!(bed.host.rollback(), Err(HostError::Read { .. })));
    assert!(bed.host.journal_status().is_err());
    assert!(bed.state.path().join("journal.json").exists());
    bed.fake.put("/proc/sys/kernel/random/boot_id", "first\n");
    bed.host.rollback().unwrap();
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn journal_of_another_boot_is_void() {
    let bed = Bed::new(false, "none");
    bed.apply(&wanted()).unwrap();
    bed.fake.put("/proc/sys/kernel/random/boot_id", "second\n");
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
    assert_eq!(bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
    let observed = bed.observe();
    bed.apply(&observed).unwrap();
    assert!(!bed.state.path().join("journal.json").exists());
}
