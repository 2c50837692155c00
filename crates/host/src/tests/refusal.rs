//! What is refused before the first write, and what fails after it.

use std::sync::Mutex;

use rustix::io::Errno;

use super::*;
use crate::journal::Lock;

const QUEUE: &str = "/sys/dev/block/8:0/queue";

/// Applies `wanted` with the plan of a healthy host, after `harm`.
fn refused(harm: impl FnOnce(&Bed)) -> (Bed, HostError, bool) {
    let mut bed = Bed::new(false, "mq-deadline");
    let identity = bed.host.identity(Path::new("/dev/sda")).unwrap();
    bed.topology.identities.insert(device(), identity);
    let (observed, changes) = bed.changes_to(&wanted());
    harm(&bed);
    let before = bed.fake.snapshot();
    let options = ApplyOptions::default();
    let error = bed.host.apply(&bed.topology, &observed, &changes, options).unwrap_err();
    let untouched = bed.fake.snapshot() == before;
    assert_ne!(bed.host.journal_status().unwrap(), JournalStatus::Applied);
    (bed, error, untouched)
}

#[test]
fn stale_plan_writes_nothing() {
    let (_, error, untouched) = refused(|bed| {
        bed.fake.write(Path::new("/sys/block/sda/queue/scheduler"), "kyber").unwrap();
    });
    assert!(matches!(&error, HostError::Stale { differences } if differences.len() == 1));
    assert!(error.to_string().contains("data: scheduler: wanted mq-deadline, found kyber"));
    assert!(untouched && error.hint().is_some());
}

#[test]
fn vanished_cgroup_is_named_and_nothing_written() {
    let (_, error, untouched) = refused(|bed| bed.fake.remove_cgroup(&group("plc")));
    assert!(matches!(&error, HostError::CgroupMissing { vm, .. } if vm.as_str() == "plc"));
    assert!(untouched);
}

#[test]
fn vanished_device_is_named_and_nothing_written() {
    let (_, error, _) = refused(|bed| bed.fake.remove_disk(DISK));
    assert!(
        matches!(&error, HostError::DeviceMissing { path, .. } if path == Path::new("/dev/sda"))
    );
}

#[test]
fn replaced_device_is_refused() {
    let (_, error, untouched) = refused(|bed| bed.fake.add_disk("sda", DISK, 77));
    assert!(matches!(error, HostError::DeviceReplaced { .. }) && untouched);
}

#[test]
fn scheduler_not_offered_is_refused_before_any_write() {
    let (_, error, untouched) = refused(|bed| {
        bed.fake.withhold(DISK, "bfq");
        bed.fake.put("/proc/sys/kernel/osrelease", "6.12\n");
        bed.fake.put("/lib/modules/6.12/modules.dep", "kernel/block/kyber-iosched.ko:\n");
    });
    assert!(matches!(error, HostError::SchedulerNotOffered { .. }) && untouched);
}

#[test]
fn scheduler_is_tried_where_modules_cannot_be_seen_and_a_refusal_changes_nothing() {
    let (bed, error, untouched) = refused(|bed| bed.fake.withhold(DISK, "bfq"));
    assert!(matches!(error, HostError::WriteRefused { .. }) && untouched, "{error}");
    assert!(error.lacks_scheduler() && error.hint().unwrap().contains("modprobe bfq"), "{error}");
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
    // Others refuse for other reasons.
    let (_, error, _) = refused(|bed| {
        bed.fake.refuse(format!("{QUEUE}/scheduler"), Errno::ROFS);
    });
    assert!(matches!(error, HostError::WriteRefused { .. }) && !error.lacks_scheduler(), "{error}");
}

#[test]
fn scheduler_whose_module_is_on_disk_is_tried() {
    let (_, error, untouched) = refused(|bed| {
        bed.fake.withhold(DISK, "bfq");
        bed.fake.put("/proc/sys/kernel/osrelease", "6.12\n");
        bed.fake.put("/lib/modules/6.12/modules.dep", "kernel/block/bfq.ko.xz:\n");
    });
    // This kernel does not load it, which it says at the write.
    assert!(matches!(error, HostError::WriteRefused { .. }) && untouched, "{error}");
}

#[test]
fn failed_write_undoes_everything() {
    let last = "/sys/fs/cgroup/blkio/machine.slice/backup.scope/blkio.throttle.read_bps_device";
    let (_, error, untouched) = refused(|bed| bed.fake.refuse(last, Errno::IO));
    let HostError::WriteRefused { file, wanted, .. } = error else { panic!("{error}") };
    assert_eq!((file.as_path(), wanted.as_str()), (Path::new(last), "10000000"));
    assert!(untouched);
}

#[test]
fn read_back_that_differs_undoes_everything() {
    let file = format!("{QUEUE}/iosched/slice_idle_us");
    let (_, error, untouched) = refused(|bed| bed.fake.ignore(&file));
    assert!(matches!(&error, HostError::ReadBackDiffers { found, .. } if found == "8000"));
    assert!(untouched);

    // HZ=250: 33 ms reads 36.
    let bed = Bed::new(true, "bfq");
    let before = bed.fake.snapshot();
    let rounded = Scheduler::Bfq(Bfq { timeout_sync_ms: 33, ..Bfq::DEFAULT });
    let error = bed.apply(&wanted_with(rounded)).unwrap_err();
    assert!(matches!(&error, HostError::ReadBackDiffers { found, .. } if found == "36"));
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn undo_that_fails_keeps_the_journal_for_rollback() {
    let bed = Bed::new(false, "bfq");
    let before = bed.fake.snapshot();
    let (observed, changes) = bed.changes_to(&wanted());
    let scope = "/sys/fs/cgroup/blkio/machine.slice/plc.scope";
    // The weight is written and then cannot be put back.
    let fake = bed.fake.clone();
    let weight = format!("{scope}/blkio.bfq.weight_device");
    let refuse = weight.clone();
    let host = bed.host.clone().with_observer(Arc::new(move |step| {
        if matches!(step, crate::Step::AfterWrite { file, .. } if *file == Path::new(&refuse)) {
            fake.refuse(&refuse, Errno::IO);
            fake.refuse(
                "/sys/fs/cgroup/blkio/machine.slice/backup.scope/blkio.throttle.read_bps_device",
                Errno::IO,
            );
        }
        std::ops::ControlFlow::Continue(())
    }));
    let options = ApplyOptions::default();
    let error = host.apply(&bed.topology, &observed, &changes, options).unwrap_err();
    let HostError::UndoIncomplete { failures, .. } = &error else { panic!("{error}") };
    assert!(failures.iter().any(|f| f.contains(&weight)));
    assert!(matches!(bed.host.rollback(), Err(HostError::RestoreIncomplete { .. })));
    bed.fake.heal();
    bed.host.rollback().unwrap();
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn rollback_skips_what_is_gone_and_restores_the_rest() {
    let bed = Bed::new(false, "bfq");
    bed.apply(&wanted()).unwrap();
    bed.fake.remove_cgroup(&group("plc"));
    // Another VM of the same name: not the one that was changed.
    bed.fake.remove_cgroup(&group("backup"));
    bed.fake.add_cgroup(&group("backup"));
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!(done.skipped.len(), 2);
    assert!(done.restored.iter().any(|(f, t)| f.ends_with("slice_idle_us") && t == "2500"));
    let weight = bed
        .fake
        .read(Path::new("/sys/fs/cgroup/blkio/machine.slice/backup.scope/blkio.bfq.weight_device"));
    assert_eq!(weight.unwrap(), "default 100\n");
}

#[test]
fn rollback_skips_cgroups_without_the_io_controller_and_ends() {
    let bed = Bed::new(true, "bfq");
    bed.apply(&wanted()).unwrap();
    let control = Path::new("/sys/fs/cgroup/machine.slice/cgroup.subtree_control");
    bed.fake.write(control, "-io").unwrap();
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!(done.skipped.len(), 2, "{:?}", done.skipped);
    assert!(done.restored.iter().any(|(f, t)| f.ends_with("slice_idle_us") && t == "2500"));
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
}

#[test]
fn cgroup_that_vanishes_while_weights_are_saved_is_left_out() {
    let bed = Bed::new(true, "bfq");
    let before = bed.fake.snapshot();
    // Its files are still read, and when its id is asked for it is gone.
    for (file, text) in [("cgroup.procs", ""), ("io.bfq.weight", "default 100\n8:0 700\n")] {
        bed.fake.put(&format!("/sys/fs/cgroup/vanishing.scope/{file}"), text);
    }
    bed.apply(&wanted_with(Scheduler::Kyber)).unwrap();
    bed.host.rollback().unwrap();
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn rollback_leaves_a_replaced_device_alone() {
    let bed = Bed::new(false, "none");
    bed.apply(&wanted()).unwrap();
    bed.fake.add_disk("sda", DISK, 1 << 20);
    let before = bed.fake.snapshot();
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!((done.restored.len(), done.skipped.len()), (0, 1));
    assert_eq!(bed.fake.snapshot(), before);
}

#[test]
fn rollback_restores_a_device_that_grew() {
    let bed = Bed::new(true, "bfq");
    bed.apply(&wanted()).unwrap();
    bed.fake.resize_disk(DISK, 1 << 21);
    bed.apply(&wanted_with(Scheduler::None)).unwrap();
    let RollbackOutcome::RolledBack(done) = bed.host.rollback().unwrap() else { panic!() };
    assert_eq!(done.skipped, []);
    let grown = Bed::new(true, "bfq");
    grown.fake.resize_disk(DISK, 1 << 21);
    assert_eq!(bed.fake.snapshot(), grown.fake.snapshot());
}

#[test]
fn second_apply_while_one_runs_names_its_process() {
    let bed = Bed::new(false, "none");
    let other = bed.host.clone();
    let (topology, observed) = (bed.topology.clone(), bed.observe());
    let host = bed.host.clone().with_observer(Arc::new(move |_| {
        let error = other.apply(&topology, &observed, &[], ApplyOptions::default()).unwrap_err();
        assert!(matches!(error, HostError::Locked { pid: Some(p) } if p == std::process::id()));
        std::ops::ControlFlow::Continue(())
    }));
    let (observed, changes) = bed.changes_to(&wanted());
    host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).unwrap();
}

#[test]
fn apply_while_another_waits_to_be_confirmed_is_refused() {
    let bed = Bed::new(false, "none");
    bed.apply_with(&wanted(), long()).unwrap();
    let error = bed.apply(&wanted_with(Scheduler::None)).unwrap_err();
    assert!(matches!(error, HostError::AwaitsConfirmation { .. }));
    bed.host.rollback().unwrap();
}

/// A calibration of the disk, which has set another scheduler, as long as the lock is kept.
fn calibrating(bed: &Bed) -> (Host, Lock) {
    let calibration = Host::with_sysfs(bed.state.path().join("bench"), bed.fake.clone());
    let lock = calibration.state.lock_within("in-use", Duration::ZERO, None).unwrap();
    let (observed, changes) = bed.changes_to(&wanted_with(Scheduler::Kyber));
    let options = ApplyOptions::default();
    assert!(calibration.apply(&bed.topology, &observed, &changes, options).unwrap().written > 0);
    (calibration, lock)
}

#[test]
fn device_that_is_measured_is_neither_set_nor_put_back() {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    bed.apply(&wanted()).unwrap();
    let applied = bed.snapshot();
    let (calibration, _lock) = calibrating(&bed);
    let measured = bed.snapshot();
    for error in [bed.apply(&wanted()).unwrap_err(), bed.host.rollback().unwrap_err()] {
        let HostError::Measured { device: found, pid } = &error else { panic!("{error}") };
        assert_eq!((found, *pid), (&device(), Some(std::process::id())));
        assert!(error.hint().unwrap().contains("interrupt it"), "{error}");
    }
    assert_eq!(bed.snapshot(), measured);
    // What it runs on its own device keeps its state within its own.
    let own = bed.host.clone().with_state_directory(bed.state.path().join("bench/guests"));
    assert_eq!(own.rollback().unwrap(), RollbackOutcome::Nothing);
    let (observed, changes) = bed.changes_to(&wanted());
    own.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).unwrap();
    own.rollback().unwrap();
    assert_eq!(bed.snapshot(), measured);

    calibration.rollback().unwrap();
    assert_eq!(bed.snapshot(), applied);
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

/// Whoever hangs with the lock, as a write to a device does that answers no more, keeps nobody from other devices.
#[test]
fn plan_is_applied_and_put_back_beside_a_measurement_that_hangs() {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    let directory = crate::journal::StateDirectory(bed.state.path().to_owned());
    let _hangs = directory.lock_within("devices.lock", std::time::Duration::ZERO, None).unwrap();
    let (observed, changes) = bed.changes_to(&wanted());
    bed.host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).unwrap();
    assert_eq!(bed.drift(&wanted()), 0);
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn calibration_does_not_begin_while_a_plan_is_applied() {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    let (observed, changes) = bed.changes_to(&wanted());
    let calibration = bed.host.clone().with_state_directory(bed.state.path().join("bench"));
    // It begins when the plan is checked and nothing of it is written, and has seen what was there.
    let begun = Arc::new(Mutex::new(None));
    let (seen, begins) = (Arc::clone(&begun), calibration.clone());
    let (topology, found) = (bed.topology.clone(), observed.clone());
    let host = bed.host.clone().with_observer(Arc::new(move |step| {
        let mut begun = seen.lock().unwrap();
        if !matches!(step, crate::Step::BeforeWrite { .. }) || begun.is_some() {
            return std::ops::ControlFlow::Continue(());
        }
        let (calibration, topology, found) = (begins.clone(), topology.clone(), found.clone());
        let applying = std::thread::spawn(move || {
            let changes = diff(&found, &wanted_with(Scheduler::Kyber));
            calibration.apply(&topology, &found, &changes, ApplyOptions::default())
        });
        let start = std::time::Instant::now();
        while !applying.is_finished() && start.elapsed() < Duration::from_millis(200) {
            std::thread::sleep(Duration::from_millis(5));
        }
        *begun = Some(applying);
        std::ops::ControlFlow::Continue(())
    }));
    let written = host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).unwrap();
    assert_eq!(written.written, changes.len());
    let applying = begun.lock().unwrap().take().unwrap();
    // What it had seen is not there any more.
    let error = applying.join().unwrap().unwrap_err();
    assert!(matches!(error, HostError::Stale { .. }), "{error}");
    assert_eq!(calibration.journal_status().unwrap(), JournalStatus::Clean);
    assert_eq!(bed.drift(&wanted()), 0);

    // Once it has begun the device is its own; when it has ended, nothing is left of either.
    let (observed, changes) = bed.changes_to(&wanted_with(Scheduler::Kyber));
    calibration.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).unwrap();
    calibration.rollback().unwrap();
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn device_whose_scheduler_a_calibration_leaves_alone_is_set_and_put_back() {
    let bed = Bed::new(true, "none");
    let (before, wanted) = (bed.snapshot(), wanted());
    let calibration = Host::with_sysfs(bed.state.path().join("bench"), bed.fake.clone());
    let (observed, mut changes) = bed.changes_to(&wanted);
    changes.retain(|change| matches!(change.knob, Knob::Limit { .. }));
    let options = ApplyOptions::default();
    assert!(calibration.apply(&bed.topology, &observed, &changes, options).unwrap().written > 0);
    assert!(bed.apply(&wanted).unwrap().written > 0);
    bed.host.rollback().unwrap();
    calibration.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn expired_apply_is_reverted_once_its_device_is_not_measured_any_more() {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    bed.apply_with(&wanted(), short()).unwrap();
    let (calibration, _lock) = calibrating(&bed);
    std::thread::sleep(Duration::from_millis(40));
    let measured = bed.snapshot();
    assert!(matches!(bed.host.confirm(), Err(HostError::Measured { .. })));
    bed.host.verify(&bed.topology, &Knobs::new()).unwrap();
    let outcome = std::thread::scope(|scope| {
        let watchdog = scope.spawn(|| bed.host.revert_unless_confirmed());
        // Long enough for it to look, and to look again.
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(bed.snapshot(), measured);
        calibration.rollback().unwrap();
        watchdog.join().unwrap().unwrap()
    });
    assert!(matches!(outcome, WatchdogOutcome::Reverted(_)));
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn what_a_calibration_that_has_died_left_is_put_back_first() {
    for reverts in [false, true] {
        let bed = Bed::new(true, "none");
        let before = bed.snapshot();
        bed.apply_with(&wanted(), if reverts { short() } else { ApplyOptions::default() }).unwrap();
        let applied = bed.snapshot();
        let (calibration, lock) = calibrating(&bed);
        drop(lock);
        if reverts {
            std::thread::sleep(Duration::from_millis(40));
            let outcome = bed.host.revert_unless_confirmed().unwrap();
            assert!(matches!(outcome, WatchdogOutcome::Reverted(_)));
        } else {
            // What this one had seen was the calibration's.
            let stale = bed.apply(&wanted()).unwrap_err();
            assert!(matches!(stale, HostError::Stale { .. }), "{stale}");
            assert_eq!(bed.snapshot(), applied);
            bed.host.rollback().unwrap();
        }
        assert_eq!(bed.snapshot(), before);
        assert_eq!(calibration.rollback().unwrap(), RollbackOutcome::Nothing);
    }
}

#[test]
fn edited_change_is_refused() {
    let bed = Bed::new(false, "none");
    let observed = bed.observe();
    let apply = |knob: Knob, new: &str| {
        let change = Change { knob, old: None, new: new.to_owned() };
        bed.host.apply(&bed.topology, &observed, &[change], ApplyOptions::default()).unwrap_err()
    };
    let weight = |name| Knob::Weight { device: device(), vm: vm(name) };
    assert!(matches!(apply(weight("nobody"), "5"), HostError::UnknownKnob { .. }));
    assert!(matches!(apply(weight("plc"), "5\n8:16 5"), HostError::BadValue { .. }));
    assert!(matches!(apply(weight("plc"), "5"), HostError::NotBfq { .. }));
}

#[test]
fn two_names_of_one_disk_are_refused() {
    let mut bed = Bed::new(false, "none");
    bed.fake.add_partition("sda1", DeviceNumber::new(8, 1), "sda", 5);
    bed.topology.devices.insert(DeviceName::new("part").unwrap(), "/dev/sda1".into());
    assert!(matches!(bed.host.observe(&bed.topology), Err(HostError::SameDisk { .. })));
}
