//! VMs' own knobs, with VMs of every kind.

use std::path::PathBuf;
use std::time::Instant;

use rtvirtio_spec::plan::{IoThreads, PLAN_VERSION, PlannedDevice, PlannedVm};
use rtvirtio_units::{DiskName, IoThreadName};
use serde_json::json;

use super::machine::{Machine, Manner};
use super::*;
use crate::Skipped;
use crate::fake::FakeSysfs;

/// A peer that hangs does so for ever; one answer has a deadline of seconds, and a slow machine some more.
const BOUND: Duration = Duration::from_secs(30);

fn knob(scheduler: bool) -> Knob {
    let vm = vm("plc");
    if scheduler {
        Knob::GuestScheduler { vm, disk: DiskName::new("root").unwrap() }
    } else {
        Knob::PollMax { vm, iothread: IoThreadName::new("io0").unwrap() }
    }
}

/// A host with a VM, and a plan for both made while all was well.
struct Plan {
    bed: Bed,
    observed: Knobs,
    changes: Vec<Change>,
    before: String,
}

fn planned() -> Plan {
    let bed = Bed::with_guest(false, "mq-deadline");
    let (observed, changes) = bed.changes_to(&with_guest(wanted(), "bfq"));
    let before = bed.snapshot();
    Plan { bed, observed, changes, before }
}

impl Plan {
    fn machine(&self) -> &Machine {
        self.bed.machine.as_ref().unwrap()
    }

    fn apply(&self) -> Result<Applied, HostError> {
        let options = ApplyOptions::default();
        self.bed.host.apply(&self.bed.topology, &self.observed, &self.changes, options)
    }

    /// Sees that an apply fails within seconds and changes nothing; gives what it says.
    fn refused(&self) -> HostError {
        let start = Instant::now();
        let error = self.apply().unwrap_err();
        assert!(start.elapsed() < BOUND, "{:?}: {error}", start.elapsed());
        assert_eq!(self.bed.snapshot(), self.before, "{error}");
        assert_eq!(self.bed.host.journal_status().unwrap(), JournalStatus::Clean);
        assert_eq!(self.machine().with(|s| s.written.clone()), [""; 0]);
        error
    }

    fn rolled_back(&self) -> crate::Restoration {
        let RollbackOutcome::RolledBack(done) = self.bed.host.rollback().unwrap() else { panic!() };
        done
    }

    /// The host's own state.
    fn host_is_back(&self) -> bool {
        self.before.starts_with(&self.bed.fake.snapshot())
    }
}

#[test]
fn guests_knobs_are_applied_verified_and_rolled_back() {
    let plan = planned();
    assert_eq!(plan.observed[&knob(true)], "mq-deadline");
    assert_eq!(plan.observed[&knob(false)], "32768");
    let written = plan.apply().unwrap().written;
    assert_eq!(written, plan.changes.len());
    let wanted = with_guest(wanted(), "bfq");
    assert_eq!(plan.bed.drift(&wanted), 0);
    let kernel = &plan.machine().kernel;
    let text = kernel.read(Path::new("/sys/block/vda/queue/iosched/slice_idle_us")).unwrap();
    assert_eq!((text.as_str(), plan.machine().with(|s| s.poll_max)), ("0\n", 0));

    kernel.write(Path::new("/sys/block/vda/queue/iosched/low_latency"), "1").unwrap();
    plan.machine().with(|s| s.poll_max = 7);
    let drifts = plan.bed.host.verify(&plan.bed.topology, &wanted).unwrap();
    let shown: Vec<String> = drifts.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "plc/root: guest bfq low_latency: wanted 0, found 1",
            "plc: IOThread io0: poll-max-ns: wanted 0, found 7",
        ]
    );

    // The scheduler, and what its parameters were: the guest's read_expire and nr_requests too.
    let done = plan.rolled_back();
    assert_eq!(plan.bed.snapshot(), plan.before);
    let place = Path::new("plc:/sys/block/vda/queue/scheduler").to_owned();
    assert!(done.restored.contains(&(place, "mq-deadline".to_owned())), "{:?}", done.restored);
    assert_eq!(done.skipped, []);
}

#[test]
fn guests_knobs_come_before_the_hosts() {
    let plan = planned();
    let steps = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&steps);
    let host = plan.bed.host.clone().with_observer(Arc::new(move |step| {
        if let crate::Step::AfterWrite { file, .. } = step {
            seen.lock().unwrap().push(file.display().to_string().starts_with("plc:"));
        }
        std::ops::ControlFlow::Continue(())
    }));
    let options = ApplyOptions::default();
    host.apply(&plan.bed.topology, &plan.observed, &plan.changes, options).unwrap();
    let steps = steps.lock().unwrap();
    assert_eq!(steps.iter().filter(|is_guests| **is_guests).count(), 4);
    assert!(steps.is_sorted_by_key(|is_guests| !is_guests), "{steps:?}");
}

#[test]
fn second_apply_keeps_the_original_values_of_a_guest() {
    let plan = planned();
    plan.apply().unwrap();
    plan.bed.apply(&with_guest(wanted(), "none")).unwrap();
    plan.rolled_back();
    assert_eq!(plan.bed.snapshot(), plan.before);
}

#[test]
fn running_vm_shows_its_knobs() {
    let plan = planned();
    let backup = Machine::start(&plan.bed.fake, "backup", 77);
    backup.with(|s| s.poll_max = 9);
    let disks = |names: &[&str]| names.iter().map(|n| DiskName::new(*n).unwrap()).collect();
    let vms = BTreeMap::from([
        (vm("plc"), disks(&["root", "missing"])),
        (vm("backup"), disks(&[])),
        (vm("off"), disks(&["root"])),
        (vm("plain"), disks(&[])),
    ]);
    let found = plan.bed.host.find_guests(&vms).unwrap();
    assert_eq!(found.keys().map(VmName::as_str).collect::<Vec<_>>(), ["backup", "off", "plc"]);
    let plc = &found[&vm("plc")];
    let root = &plc.disks[&DiskName::new("root").unwrap()];
    assert_eq!(root.selected, "mq-deadline");
    assert_eq!(root.offered, ["none", "mq-deadline", "kyber", "bfq"]);
    assert_eq!((plc.disks.len(), plc.iothreads.len(), plc.unseen.len()), (1, 1, 1));
    assert!(plc.unseen[0].contains("missing"), "{:?}", plc.unseen);
    assert_eq!(found[&vm("backup")].knobs(&vm("backup")).values().collect::<Vec<_>>(), ["9"]);
    assert!(found[&vm("off")].unseen[0].contains("no QEMU of its name runs"));
}

#[test]
fn disk_is_found_by_serial_before_address() {
    let plan = planned();
    let machine = plan.machine();
    machine.kernel.add_disk("vdc", DeviceNumber::new(253, 32), 1 << 20);
    let mut claims = machine.with(|s| s.claims.clone());
    // The guest numbers its buses in another way, and cuts the serial number.
    claims[1]["address"]["pci-controller"]["slot"] = json!(9);
    let address = json!({"pci-controller": {"domain": 0, "bus": 0, "slot": 8, "function": 0},
        "serial": "a-serial-number-of-2"});
    let third = json!({"name": "/dev/vdc", "partition": false, "address": address});
    claims.as_array_mut().unwrap().push(third);
    machine.with(|s| (s.claims, s.serial) = (claims, "a-serial-number-of-21".to_owned()));
    plan.bed.apply(&with_guest(plan.bed.observe(), "bfq")).unwrap();
    let scheduler = |node: &str| {
        let file = format!("/sys/block/{node}/queue/scheduler");
        machine.kernel.read(Path::new(&file)).unwrap()
    };
    assert!(scheduler("vdc").contains("[bfq]") && scheduler("vda").contains("[mq-deadline]"));
}

#[test]
fn disk_whose_name_has_a_hyphen_is_put_back_from_the_journal() {
    let plan = planned();
    let machine = plan.machine();
    machine.kernel.add_disk("dm-0", DeviceNumber::new(252, 0), 1 << 20);
    let mut claims = machine.with(|s| s.claims.clone());
    claims[1]["name"] = json!("/dev/dm-0");
    machine.with(|s| s.claims = claims);
    plan.bed.apply(&with_guest(plan.bed.observe(), "bfq")).unwrap();
    let file = Path::new("/sys/block/dm-0/queue/scheduler");
    assert!(machine.kernel.read(file).unwrap().contains("[bfq]"));
    plan.rolled_back();
    assert!(machine.kernel.read(file).unwrap().contains("[none]"));
}

#[test]
fn disk_is_found_by_the_id_that_libvirt_makes_of_its_name() {
    for serial in ["", "a-serial-number"] {
        let plan = planned();
        let mut claims = plan.machine().with(|s| s.claims.clone());
        if !serial.is_empty() {
            claims[1]["address"] = json!({"serial": serial});
        }
        plan.machine().with(|s| {
            (s.id, s.serial, s.claims) = ("ua-root".to_owned(), serial.to_owned(), claims);
        });
        plan.apply().unwrap();
        let text = plan.machine().kernel.read(Path::new("/sys/block/vda/queue/scheduler")).unwrap();
        assert!(text.contains("[bfq]"), "{text}");
    }
    // No other device is taken for it.
    let plan = planned();
    plan.machine().with(|s| s.id = "ua-root2".to_owned());
    let error = plan.refused();
    assert!(error.to_string().contains("no disk with the id root or ua-root "), "{error}");
    assert!(error.hint().unwrap().contains("`ua-`"), "{error}");
}

#[test]
fn guest_that_lies_about_its_disks_gets_no_write() {
    let address = |slot: i64| json!({"domain": 0, "bus": 0, "slot": slot, "function": 0});
    let disk = |node: &str, slot| json!({"name": node, "partition": false, "address": {"pci-controller": address(slot)}});
    for (claims, expected) in [
        (json!([]), "0 disks in the guest have"),
        (json!([disk("/dev/vda", 4), disk("/dev/vdb", 4)]), "2 disks in the guest have"),
        (json!([disk("/dev/../../etc/passwd", 4)]), "is not a disk's node"),
        (json!([disk("/dev/vda/../../../x", 4)]), "is not a disk's node"),
        (json!([disk("/dev/\u{1b}[2J", 4)]), "is not a disk's node"),
        (json!({"disks": "many"}), "is not this command's answer"),
    ] {
        let plan = planned();
        plan.machine().with(|s| s.claims = claims);
        let error = plan.refused();
        let text = error.to_string();
        assert!(text.starts_with("VM plc: ") && text.contains(expected), "{text}");
        assert!(error.hint().is_some() && !text.contains('\u{1b}'));
    }
}

#[test]
fn guest_whose_files_hold_nonsense_gets_no_write() {
    for (file, text) in [
        ("/sys/block/vda/queue/scheduler", "\u{1b}[2J [none]"),
        ("/sys/block/vda/queue/scheduler", "none mq-deadline"),
        ("/proc/sys/kernel/random/boot_id", "../../x"),
    ] {
        let plan = planned();
        plan.machine().kernel.put(file, text);
        let error = plan.apply().unwrap_err();
        assert!(matches!(error, HostError::Guest { .. }), "{error}");
        assert!(!error.to_string().contains('\u{1b}') && plan.host_is_back());
        assert_eq!(plan.machine().with(|s| s.written.clone()), [""; 0]);
    }
}

#[test]
fn guest_that_hangs_fails_the_apply_before_any_write() {
    for word in ["guest-sync", "guest-get-disks"] {
        let plan = planned();
        plan.machine().with(|s| s.agent = Manner::DeadFrom(word));
        let error = plan.refused();
        let socket = format!("{:?}", plan.machine().socket("agent"));
        assert!(matches!(&error, HostError::Guest { vm, .. } if vm.as_str() == "plc"), "{error}");
        assert!(error.to_string().contains(&socket), "{error}");
        assert!(error.hint().unwrap().contains("qemu-guest-agent"), "{error}");
        // A plan made now leaves the guest alone and says so.
        let vms = BTreeMap::from([(vm("plc"), [DiskName::new("root").unwrap()].into())]);
        let found = plan.bed.host.find_guests(&vms).unwrap().remove(&vm("plc")).unwrap();
        assert!(found.disks.is_empty() && found.iothreads.len() == 1);
        let why = "planned for on the host alone, its guest is left as it is";
        assert!(found.unseen[0].starts_with(why) && found.unseen[0].contains(&socket));
    }
    let plan = planned();
    plan.machine().with(|s| s.monitor = Manner::DeadFrom("qmp_capabilities"));
    let error = plan.refused();
    assert!(error.to_string().contains(&format!("{:?}", plan.machine().socket("qmp"))), "{error}");
    let vms = BTreeMap::from([(vm("plc"), BTreeSet::new())]);
    let found = plan.bed.host.find_guests(&vms).unwrap().remove(&vm("plc")).unwrap();
    assert!(found.unseen[0].starts_with("planned for on the host alone: "), "{:?}", found.unseen);
    // Without an IOThread there was nothing to set, and nothing is said.
    let command_line = "/usr/bin/qemu-system-x86_64\0-name\0plc\0";
    plan.bed.fake.put("/proc/4242/cmdline", command_line);
    assert_eq!(plan.bed.host.find_guests(&vms).unwrap(), BTreeMap::new());
}

#[test]
fn guests_that_hang_are_waited_for_at_the_same_time() {
    let fake = Arc::new(FakeSysfs::v1());
    let state = tempfile::tempdir().unwrap();
    let host = Host::with_sysfs(state.path(), fake.clone());
    let start = |i: u32| {
        let machine = Machine::start(&fake, &format!("vm{i}"), 1000 + i);
        machine.with(|s| s.agent = Manner::DeadFrom(""));
        machine
    };
    let machines: Vec<Machine> = (0..20).map(start).collect();
    let vms = machines.iter().map(|m| {
        let (vm, topology) = m.topology();
        (vm, topology.disks)
    });
    let start = Instant::now();
    let found = host.find_guests(&vms.collect()).unwrap();
    assert!(found.values().all(|f| f.unseen.len() == 1 && f.disks.is_empty()));
    assert_eq!(found.len(), 20);
    assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
}

#[test]
fn guest_that_hangs_in_mid_apply_undoes_the_host_and_is_named() {
    // The write's fate is unknown, and stays so: done or not.
    for manner in [Manner::DeadFrom("guest-file-flush"), Manner::MuteFrom("guest-file-flush")] {
        let plan = planned();
        plan.machine().with(|s| s.agent = manner);
        let start = Instant::now();
        let error = plan.apply().unwrap_err();
        assert!(start.elapsed() < 2 * BOUND, "{:?}", start.elapsed());
        let HostError::UndoIncomplete { cause, failures } = &error else { panic!("{error}") };
        assert!(matches!(**cause, HostError::GuestWriteFailed { .. }), "{cause}");
        let named = failures[0].contains("plc:/sys/block/vda/queue");
        assert!(failures.len() == 1 && named, "{failures:?}");
        assert!(plan.host_is_back());
        assert_eq!(plan.bed.host.journal_status().unwrap(), JournalStatus::Applied);
        // It wakes up: a rollback finishes the job.
        plan.machine().with(|s| s.agent = Manner::Fair);
        plan.rolled_back();
        assert_eq!(plan.bed.snapshot(), plan.before);
        assert_eq!(plan.bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
    }
}

#[test]
fn guest_that_misses_one_answer_is_put_back_at_once() {
    let plan = planned();
    plan.machine().with(|s| s.agent = Manner::MuteFrom("guest-file-flush"));
    let machine = plan.machine();
    let applied = std::thread::scope(|scope| {
        let applying = scope.spawn(|| plan.apply());
        // It answers again by the time of the undo.
        while machine.with(|s| s.agent) != Manner::MuteFrom("") {
            std::thread::sleep(Duration::from_millis(5));
        }
        machine.with(|s| s.agent = Manner::Fair);
        applying.join().unwrap()
    });
    let error = applied.unwrap_err();
    assert!(matches!(error, HostError::GuestWriteFailed { .. }), "{error}");
    assert_eq!(plan.bed.snapshot(), plan.before);
    assert_eq!(plan.bed.host.journal_status().unwrap(), JournalStatus::Clean);
}

#[test]
fn write_that_a_guest_refuses_undoes_everything() {
    let plan = planned();
    let file = "/sys/block/vda/queue/iosched/low_latency";
    plan.machine().kernel.refuse(file, rustix::io::Errno::PERM);
    let error = plan.apply().unwrap_err();
    let HostError::GuestWriteFailed { file: place, .. } = &error else { panic!("{error}") };
    assert_eq!(place.display().to_string(), format!("plc:{file}"));
    assert_eq!(plan.bed.snapshot(), plan.before);

    let plan = planned();
    plan.machine().kernel.ignore("/sys/block/vda/queue/scheduler");
    let error = plan.apply().unwrap_err();
    let HostError::ReadBackDiffers { found, .. } = &error else { panic!("{error}") };
    assert_eq!((found.as_str(), plan.bed.snapshot()), ("mq-deadline", plan.before.clone()));
}

#[test]
fn hosts_failure_undoes_the_guest() {
    let plan = planned();
    let last = "/sys/fs/cgroup/blkio/machine.slice/backup.scope/blkio.throttle.read_bps_device";
    plan.bed.fake.refuse(last, rustix::io::Errno::IO);
    let error = plan.apply().unwrap_err();
    assert!(matches!(error, HostError::WriteRefused { .. }), "{error}");
    assert_eq!(plan.bed.snapshot(), plan.before);
    assert!(plan.machine().with(|s| s.written.len()) > 4, "it had been written to");
}

#[test]
fn guest_gone_before_the_apply_writes_nothing() {
    let plan = planned();
    plan.machine().end(&plan.bed.fake);
    let error = plan.refused();
    assert_eq!(error.to_string(), "VM plc: no QEMU of its name runs");
    assert!(error.hint().unwrap().contains("start the VM"));

    // Another one with its name: nobody can tell which is meant.
    let plan = planned();
    let _second = Machine::start(&plan.bed.fake, "plc", 5555);
    assert!(plan.refused().to_string().contains("more than one QEMU"));
}

#[test]
fn guest_changed_since_the_plan_makes_it_stale() {
    let plan = planned();
    let file = Path::new("/sys/block/vda/queue/scheduler");
    plan.machine().kernel.write(file, "none").unwrap();
    let error = plan.apply().unwrap_err();
    let HostError::Stale { differences } = &error else { panic!("{error}") };
    assert_eq!(differences[0].knob, knob(true));
    assert!(plan.host_is_back() && plan.machine().with(|s| s.written.is_empty()));
}

#[test]
fn edited_change_of_a_guest_is_refused() {
    let plan = planned();
    let refused = |knob: Knob, new: &str| {
        let change = Change { knob, old: None, new: new.to_owned() };
        let options = ApplyOptions::default();
        let bed = &plan.bed;
        bed.host.apply(&bed.topology, &plan.observed, &[change], options).unwrap_err()
    };
    let root = || DiskName::new("root").unwrap();
    let scheduler = |name, disk| Knob::GuestScheduler { vm: vm(name), disk };
    let bfq = || {
        let parameter = rtvirtio_spec::settings::BfqParameter::SliceIdleUs;
        Knob::GuestBfq { vm: vm("plc"), disk: root(), parameter }
    };
    assert!(matches!(refused(scheduler("nobody", root()), "none"), HostError::UnknownKnob { .. }));
    let log = DiskName::new("log").unwrap();
    assert!(matches!(refused(scheduler("plc", log), "none"), HostError::UnknownKnob { .. }));
    let found = refused(scheduler("plc", root()), "deadline");
    assert!(matches!(found, HostError::SchedulerNotOffered { .. }));
    assert!(matches!(refused(scheduler("plc", root()), "../x"), HostError::BadValue { .. }));
    assert!(matches!(refused(bfq(), "0"), HostError::NotBfq { .. }));
    assert!(matches!(refused(knob(false), "-1"), HostError::BadValue { .. }));
    assert_eq!(plan.bed.snapshot(), plan.before);
}

#[test]
fn guest_gone_before_the_rollback_is_skipped() {
    for again in [false, true] {
        let plan = planned();
        plan.apply().unwrap();
        plan.machine().end(&plan.bed.fake);
        if again {
            // Its process id belongs to another QEMU now.
            plan.machine().start_again(&plan.bed.fake);
        }
        let written = plan.machine().with(|s| s.written.len());
        let done = plan.rolled_back();
        assert_eq!(done.skipped, [Skipped::Vm { vm: vm("plc") }]);
        assert!(plan.host_is_back());
        assert_eq!(plan.machine().with(|s| s.written.len()), written);
        assert_eq!(plan.bed.host.journal_status().unwrap(), JournalStatus::Clean);
    }
}

#[test]
fn guest_that_was_saved_and_restored_is_put_back() {
    // Also after another apply, which found it in its other QEMU.
    for again in [false, true] {
        let mut plan = planned();
        plan.apply().unwrap();
        plan.bed.machine.as_mut().unwrap().resume_as(&plan.bed.fake, 4343);
        if again {
            plan.bed.apply(&with_guest(wanted(), "none")).unwrap();
        }
        assert_eq!(plan.rolled_back().skipped, []);
        assert_eq!(plan.bed.snapshot(), plan.before);
    }
}

#[test]
fn guest_rebooted_before_the_rollback_is_skipped() {
    let plan = planned();
    plan.apply().unwrap();
    plan.machine().reboot();
    let done = plan.rolled_back();
    assert_eq!(done.skipped, [Skipped::Guest { vm: vm("plc") }]);
    assert!(plan.host_is_back());
    let text = plan.machine().kernel.read(Path::new("/sys/block/vda/queue/scheduler")).unwrap();
    // Its QEMU is the same, and polls as before.
    assert!(text.contains("[kyber]") && plan.machine().with(|s| s.poll_max) == 32_768);
}

#[test]
fn guests_disk_replaced_before_the_rollback_is_skipped() {
    let plan = planned();
    plan.apply().unwrap();
    plan.machine().kernel.add_disk("vda", DeviceNumber::new(253, 0), 99);
    let done = plan.rolled_back();
    let expected = Skipped::GuestDisk { vm: vm("plc"), node: "vda".to_owned() };
    assert_eq!(done.skipped, [expected]);
    let text = plan.machine().kernel.read(Path::new("/sys/block/vda/queue/scheduler")).unwrap();
    assert!(text.contains("[none]") && plan.host_is_back());
}

#[test]
fn guest_that_hangs_at_rollback_does_not_keep_the_host_from_it() {
    for word in ["guest-sync", "guest-file-flush"] {
        let plan = planned();
        plan.apply().unwrap();
        plan.machine().with(|s| s.agent = Manner::DeadFrom(word));
        for _ in 0..2 {
            let start = Instant::now();
            let error = plan.bed.host.rollback().unwrap_err();
            assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
            let HostError::RestoreIncomplete { failures, .. } = &error else { panic!("{error}") };
            assert!(failures.len() == 1 && failures[0].starts_with("VM plc ("), "{failures:?}");
            let hint = error.hint().unwrap();
            assert!(hint.contains("qemu-guest-agent") && hint.contains("end `rtvirtio watch`"));
            assert!(plan.host_is_back());
            assert_eq!(plan.machine().with(|s| s.poll_max), 32_768);
            assert_eq!(plan.bed.host.journal_status().unwrap(), JournalStatus::Applied);
        }
        plan.machine().with(|s| s.agent = Manner::Fair);
        plan.rolled_back();
        assert_eq!(plan.bed.snapshot(), plan.before);
    }
}

/// Sees that the host takes another apply and gives it back while the guest hangs, and that all is
/// as before once the guest answers.
fn goes_on_without_the_guest(plan: &Plan) {
    assert_eq!(plan.bed.host.journal_status().unwrap(), JournalStatus::Applied);
    let alone = Topology { guests: BTreeMap::new(), ..plan.bed.topology.clone() };
    let observed = plan.bed.host.observe(&alone).unwrap();
    let changes = diff(&observed, &wanted_with(Scheduler::Kyber));
    let applied = plan.bed.host.apply(&alone, &observed, &changes, ApplyOptions::default());
    assert!(applied.unwrap().written > 0);
    let error = plan.bed.host.rollback().unwrap_err();
    let HostError::RestoreIncomplete { failures, .. } = &error else { panic!("{error}") };
    assert!(failures.len() == 1 && failures[0].starts_with("VM plc ("), "{failures:?}");
    assert!(plan.host_is_back());
    plan.machine().with(|s| s.agent = Manner::Fair);
    plan.rolled_back();
    assert_eq!(plan.bed.snapshot(), plan.before);
    assert_eq!(plan.bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
}

#[test]
fn guest_that_hangs_at_rollback_does_not_keep_the_host_from_later_applies() {
    let plan = planned();
    plan.apply().unwrap();
    plan.machine().with(|s| s.agent = Manner::DeadFrom(""));
    plan.bed.host.rollback().unwrap_err();
    goes_on_without_the_guest(&plan);
}

#[test]
fn guest_that_hangs_at_an_undo_does_not_keep_the_host_from_later_applies() {
    let plan = planned();
    // What is there before the apply that fails is another one's, which a rollback undoes too.
    plan.bed.apply(&with_guest(wanted(), "none")).unwrap();
    let first = plan.bed.fake.snapshot();
    let (observed, changes) =
        plan.bed.changes_to(&with_guest(wanted_with(Scheduler::MqDeadline), "bfq"));
    plan.machine().with(|s| s.agent = Manner::DeadFrom("guest-file-flush"));
    let options = ApplyOptions::default();
    let error = plan.bed.host.apply(&plan.bed.topology, &observed, &changes, options).unwrap_err();
    assert!(matches!(error, HostError::UndoIncomplete { .. }), "{error}");
    assert_eq!(plan.bed.fake.snapshot(), first);
    goes_on_without_the_guest(&plan);
}

#[test]
fn guest_that_hangs_after_a_death_does_not_keep_the_host_from_later_applies() {
    let plan = planned();
    let host = plan.bed.host.clone().with_observer(Arc::new(|step| match step {
        crate::Step::AfterWrite { file, .. } if !file.starts_with("plc:") => {
            std::ops::ControlFlow::Break(())
        }
        _ => std::ops::ControlFlow::Continue(()),
    }));
    let options = ApplyOptions::default();
    let died = host.apply(&plan.bed.topology, &plan.observed, &plan.changes, options);
    assert!(matches!(died, Err(HostError::Interrupted { .. })));
    assert!(!plan.host_is_back());
    plan.machine().with(|s| s.agent = Manner::DeadFrom(""));
    let error = plan.apply().unwrap_err();
    assert!(matches!(error, HostError::RestoreIncomplete { .. }), "{error}");
    assert!(plan.host_is_back());
    goes_on_without_the_guest(&plan);
}

#[test]
fn guest_that_takes_its_time_and_lies_keeps_the_deadline_of_a_disk() {
    let plan = planned();
    for file in ["iosched/read_expire", "nr_requests"] {
        plan.machine().kernel.ignore(format!("/sys/block/vda/queue/{file}"));
    }
    plan.apply().unwrap();
    plan.machine().with(|s| s.agent = Manner::Slow);
    let start = Instant::now();
    let error = plan.bed.host.rollback().unwrap_err();
    // The agent's sync and the boot id come before the disk's 6 s; all of it would take 20 s.
    assert!(start.elapsed() < 2 * BOUND, "{:?}", start.elapsed());
    let HostError::RestoreIncomplete { failures, .. } = &error else { panic!("{error}") };
    assert!(failures.len() == 1 && failures[0].contains("no answer within"), "{failures:?}");
    assert!(plan.host_is_back());
}

#[test]
fn plan_applied_again_leaves_out_what_does_not_run_or_answer() {
    let plan = planned();
    let backup = Machine::start(&plan.bed.fake, "backup", 77);
    let of_disk = [(DiskName::new("root").unwrap(), GuestScheduler::None)];
    let poll_max = [(IoThreadName::new("io0").unwrap(), Nanos::ZERO)];
    let own = GuestSettings { disks: of_disk.into(), poll_max: poll_max.into() };
    let names = ["plc", "backup", "off"];
    let weight = |name| {
        (vm(name), VmSettings { weight: Weight::new(500).unwrap(), ..VmSettings::default() })
    };
    let scheduler = Scheduler::Bfq(Bfq::DEFAULT);
    let path = PathBuf::from("/dev/sda");
    let identity = plan.bed.host.identity(&path).unwrap();
    let saved = rtvirtio_spec::plan::Plan {
        version: PLAN_VERSION,
        devices: vec![PlannedDevice { name: device(), path, identity }],
        vms: names.map(|name| PlannedVm { name: vm(name), cgroup: group(name).into() }).into(),
        settings: Settings(
            [(device(), DeviceSettings { scheduler, vms: names.map(weight).into() })].into(),
        ),
        guests: Guests(names.map(|name| (vm(name), own.clone())).into()),
        data_plane: None,
        observed: Knobs::new(),
        changes: Vec::new(),
        tasks: Vec::new(),
        background: Vec::new(),
        cost: Vec::new(),
        iothreads: IoThreads::default(),
        reasons: Vec::new(),
    };
    let host = &plan.bed.host;
    let again = || host.reapply(&saved, ApplyOptions::default()).unwrap();
    let before = backup.snapshot();
    // Its guest boots, or all of it does.
    for hangs in [Manner::DeadFrom("guest-sync"), Manner::DeadFrom("qmp_capabilities")] {
        backup.with(|s| (s.agent, s.monitor) = (hangs, hangs));
        let start = Instant::now();
        let (applied, left) = again();
        assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
        assert!(applied.written > 0);
        assert_eq!(left.absent, [vm("off")]);
        assert_eq!(left.unreached.keys().collect::<Vec<_>>(), [&vm("backup")]);
        let knobs = plan.bed.observe();
        assert_eq!((knobs[&knob(true)].as_str(), knobs[&knob(false)].as_str()), ("none", "0"));
        let weight = Knob::Weight { device: device(), vm: vm("backup") };
        assert_eq!(knobs[&weight], "500");
        assert_eq!(backup.snapshot(), before);
        plan.rolled_back();
        assert_eq!(plan.bed.snapshot(), plan.before);
    }
    backup.with(|s| (s.agent, s.monitor) = (Manner::Fair, Manner::Fair));
    assert!(again().1.unreached.is_empty());
    assert_eq!(backup.with(|s| s.poll_max), 0);
    plan.rolled_back();
    assert_eq!((plan.bed.snapshot(), backup.snapshot()), (plan.before.clone(), before));
}

#[test]
fn plan_is_applied_and_verified_without_vms_that_are_off() {
    let bed = Bed::new(true, "none");
    let path = PathBuf::from("/dev/sda");
    let identity = bed.host.identity(&path).unwrap();
    let names = ["plc", "backup", "off"];
    let weight = |name| {
        (vm(name), VmSettings { weight: Weight::new(500).unwrap(), ..VmSettings::default() })
    };
    let vms: BTreeMap<VmName, VmSettings> = names.map(weight).into();
    let scheduler = Scheduler::Bfq(Bfq::DEFAULT);
    let mut plan = rtvirtio_spec::plan::Plan {
        version: PLAN_VERSION,
        devices: vec![PlannedDevice { name: device(), path, identity }],
        vms: names.map(|name| PlannedVm { name: vm(name), cgroup: group(name).into() }).into(),
        settings: Settings([(device(), DeviceSettings { scheduler, vms })].into()),
        guests: Guests::default(),
        data_plane: None,
        observed: Knobs::new(),
        changes: Vec::new(),
        tasks: Vec::new(),
        background: Vec::new(),
        cost: Vec::new(),
        iothreads: IoThreads::default(),
        reasons: Vec::new(),
    };
    // As it is when the plan is made: one VM is off.
    let (running, absent) = bed.host.running(&Topology::of_plan(&plan)).unwrap();
    assert_eq!(absent, [vm("off")]);
    plan.observed = bed.host.observe(&running).unwrap();
    plan.changes = diff(&plan.observed, &plan.knobs());
    plan.changes.retain(|change| change.knob.vm() != Some(&vm("off")));
    // Then one starts, and one ends.
    bed.fake.add_cgroup(&group("off"));
    bed.fake.remove_cgroup(&group("backup"));
    let (applied, left) = bed.host.apply_plan(&plan, ApplyOptions::default()).unwrap();
    assert!(applied.written > 0);
    assert_eq!((left.absent, left.started), (vec![vm("backup")], vec![vm("off")]));
    let weight = |name| Knob::Weight { device: device(), vm: vm(name) };
    let (drift, absent) = bed.host.verify_plan(&plan).unwrap();
    assert_eq!(absent, [vm("backup")]);
    assert_eq!(drift.iter().map(|d| &d.knob).collect::<Vec<_>>(), [&weight("off")]);
    bed.host.reapply(&plan, ApplyOptions::default()).unwrap();
    assert_eq!(bed.host.verify_plan(&plan).unwrap().0, []);
    bed.host.rollback().unwrap();
}

#[test]
fn monitor_that_lies_half_applies_nothing() {
    let plan = planned();
    plan.machine().with(|s| s.monitor = Manner::KeepsPolling);
    let error = plan.apply().unwrap_err();
    assert!(matches!(error, HostError::GuestWriteFailed { .. }), "{error}");
    assert_eq!(plan.bed.snapshot(), plan.before);
    assert_eq!(plan.bed.host.journal_status().unwrap(), JournalStatus::Clean);

    // One that takes a value and denies it: what it really does nobody knows, and that is said.
    let plan = planned();
    plan.machine().with(|s| s.monitor = Manner::ReadsOtherwise);
    let error = plan.apply().unwrap_err();
    let HostError::UndoIncomplete { failures, .. } = &error else { panic!("{error}") };
    assert!(failures[0].contains("plc:/objects/io0/poll-max-ns"), "{failures:?}");
    assert!(plan.host_is_back());
    assert_eq!(plan.bed.snapshot(), plan.before);
    plan.machine().with(|s| s.monitor = Manner::Fair);
    plan.rolled_back();

    // And one that hangs between question and answer.
    let plan = planned();
    plan.machine().with(|s| s.monitor = Manner::MuteFrom("qom-set"));
    let error = plan.apply().unwrap_err();
    assert!(matches!(error, HostError::UndoIncomplete { .. }), "{error}");
    assert!(plan.host_is_back());
    plan.machine().with(|s| s.monitor = Manner::Fair);
    plan.rolled_back();
    assert_eq!(plan.bed.snapshot(), plan.before);
}
