//! The user's signal while a VM or another process is waited for.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use rtvirtio_spec::plan::Plan;

use super::machine::Manner;
use super::reapply::plan_of;
use super::*;
use crate::interrupt::Interrupted;

/// The signal is looked for each 100 ms, and a slow machine takes some more; whoever does not hear it waits 2 s for an
/// answer.
const BOUND: Duration = Duration::from_millis(1_500);

/// Does `work` on a host whose user interrupts once `is_time`; gives what came of it, and how long it took after that.
fn interrupted<R: Send>(
    host: &Host,
    is_time: impl Fn() -> bool,
    work: impl FnOnce(&Host) -> R + Send,
) -> (R, Duration) {
    let signal = Arc::new(Interrupted::new(false));
    let host = host.clone().with_interrupt(Arc::clone(&signal));
    thread::scope(|scope| {
        let working = scope.spawn(|| work(&host));
        while !is_time() && !working.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        let at = Instant::now();
        signal.store(true, Ordering::Relaxed);
        (working.join().unwrap(), at.elapsed())
    })
}

/// A host with a VM, and what a plan for both would change.
fn planned() -> (Bed, Knobs, Vec<Change>) {
    let bed = Bed::with_guest(false, "mq-deadline");
    let (observed, changes) = bed.changes_to(&with_guest(wanted(), "bfq"));
    (bed, observed, changes)
}

/// A saved plan for the VM, its guest and its QEMU.
fn saved(bed: &Bed) -> Plan {
    let disks = [(DiskName::new("root").unwrap(), GuestScheduler::None)].into();
    let poll_max = [(IoThreadName::new("io0").unwrap(), Nanos::ZERO)].into();
    let guests = Guests([(vm("plc"), GuestSettings { disks, poll_max })].into());
    Plan { guests, ..plan_of(bed, "plc", 500) }
}

/// One of the commands that look at guests before they write.
fn fail(command: &str, host: &Host, bed: &Bed) -> HostError {
    let options = ApplyOptions::default();
    match command {
        "apply" => host.apply(&bed.topology, &Knobs::new(), &[], options).unwrap_err(),
        "reapply" => host.reapply(&saved(bed), options).unwrap_err(),
        _ => {
            let vms = BTreeMap::from([(vm("plc"), [DiskName::new("root").unwrap()].into())]);
            host.find_guests(&vms).unwrap_err()
        }
    }
}

#[test]
fn signal_ends_the_wait_for_a_guest_that_hangs() {
    for command in ["apply", "reapply", "plan"] {
        for agent_hangs in [true, false] {
            let (bed, ..) = planned();
            let before = bed.snapshot();
            let machine = bed.machine.as_ref().unwrap();
            if agent_hangs {
                machine.with(|s| s.agent = Manner::DeadFrom("guest-sync"));
            } else {
                machine.with(|s| s.monitor = Manner::DeadFrom("qmp_capabilities"));
            }
            let hangs = || machine.with(|s| [s.agent, s.monitor].contains(&Manner::DeadFrom("")));
            let (error, took) = interrupted(&bed.host, hangs, |host| fail(command, host, &bed));
            assert!(error.is_of_user(), "{command}: {error}");
            assert!(took < BOUND, "{command}: {took:?}");
            assert_eq!(bed.snapshot(), before);
            assert_eq!(machine.with(|s| s.written.clone()), [""; 0]);
            assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
        }
    }
}

#[test]
fn signal_during_a_guests_write_undoes_everything() {
    let (bed, observed, changes) = planned();
    let before = bed.snapshot();
    let machine = bed.machine.as_ref().unwrap();
    machine.with(|s| s.agent = Manner::MuteFrom("guest-file-flush"));
    let is_silent = || {
        let is_silent = machine.with(|s| s.agent) == Manner::MuteFrom("");
        if is_silent {
            // It answers again by the time of the undo.
            machine.with(|s| s.agent = Manner::Fair);
        }
        is_silent
    };
    let (applied, took) = interrupted(&bed.host, is_silent, |host| {
        host.apply(&bed.topology, &observed, &changes, ApplyOptions::default())
    });
    let error = applied.unwrap_err();
    assert!(matches!(error, HostError::GuestWriteFailed { .. }), "{error}");
    assert!(error.is_of_user(), "{error}");
    assert!(took < BOUND, "{took:?}");
    assert_eq!(bed.snapshot(), before);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
}

#[test]
fn signal_shortens_the_wait_for_a_guest_that_hangs_at_rollback() {
    let (bed, observed, changes) = planned();
    let (before, of_host) = (bed.snapshot(), bed.fake.snapshot());
    let machine = bed.machine.as_ref().unwrap();
    bed.host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).unwrap();
    machine.with(|s| s.agent = Manner::DeadFrom("guest-sync"));
    let hangs = || machine.with(|s| s.agent) == Manner::DeadFrom("");
    let (result, _) = interrupted(&bed.host, hangs, Host::rollback);
    let error = result.unwrap_err();
    let HostError::RestoreIncomplete { failures, .. } = &error else { panic!("{error}") };
    assert!(failures.len() == 1 && failures[0].contains("interrupted"), "{failures:?}");
    assert_eq!(bed.fake.snapshot(), of_host, "the host is back");
    machine.with(|s| s.agent = Manner::Fair);
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn signal_ends_the_wait_for_another_process_and_changes_nothing() {
    let (bed, ..) = planned();
    let (before, plan) = (bed.snapshot(), saved(&bed));
    let other = bed.host.state.lock().unwrap();
    let begun = Instant::now();
    let is_time = || begun.elapsed() > Duration::from_millis(50);
    let (error, took) = interrupted(&bed.host, is_time, |host| {
        host.reapply(&plan, ApplyOptions::default()).unwrap_err()
    });
    assert!(matches!(error, HostError::EndedByUser(_)) && error.is_of_user(), "{error}");
    assert!(took < BOUND, "{took:?}");
    drop(other);
    assert_eq!(bed.snapshot(), before);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
}

#[test]
fn signal_before_the_first_write_ends_an_apply_that_waits_for_nobody() {
    let bed = Bed::new(true, "none");
    let before = bed.snapshot();
    let (observed, changes) = bed.changes_to(&wanted());
    let host = bed.host.clone().with_interrupt(Arc::new(Interrupted::new(true)));
    let options = ApplyOptions::default();
    let error = host.apply(&bed.topology, &observed, &changes, options).unwrap_err();
    assert!(matches!(error, HostError::EndedByUser(_)), "{error}");
    assert_eq!(bed.snapshot(), before);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
}
