//! Death at every step, of applies to a host and a guest on it.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// What is wanted of the host and of the guest on it.
fn wanted() -> Knobs {
    with_guest(super::wanted(), "bfq")
}

fn wanted_with(scheduler: Scheduler) -> Knobs {
    with_guest(super::wanted_with(scheduler), "none")
}

/// `host`, dying at step `n` counted from 0.
fn dying(host: &Host, n: usize) -> Host {
    let left = AtomicUsize::new(n);
    host.clone().with_observer(Arc::new(move |_| {
        let dies = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |l| l.checked_sub(1));
        if dies.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }))
}

/// Runs `work` on a host that dies at step 0, 1, … until it survives; calls
/// `after` for each death.
pub(super) fn for_every_step(
    v2: bool,
    scheduler: &str,
    work: impl Fn(&Bed, &Host) -> Result<(), HostError>,
    after: impl Fn(&Bed, &str, usize),
) -> usize {
    for step in 0.. {
        let bed = Bed::with_guest(v2, scheduler);
        let before = bed.snapshot();
        match work(&bed, &dying(&bed.host, step)) {
            Ok(()) => return step,
            Err(HostError::Interrupted { .. }) => after(&bed, &before, step),
            Err(other) => panic!("{other}"),
        }
    }
    0
}

fn apply_on(bed: &Bed, host: &Host) -> Result<(), HostError> {
    let (observed, changes) = bed.changes_to(&wanted());
    host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).map(drop)
}

#[test]
fn rollback_after_crash_at_any_step_restores() {
    for (v2, scheduler) in STARTS {
        let steps = for_every_step(v2, scheduler, apply_on, |bed, before, step| {
            bed.host.rollback().unwrap();
            assert_eq!(bed.snapshot(), before, "v2={v2} {scheduler} step {step}");
            assert_eq!(bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
        });
        // The host alone has more than 20, the guest's four knobs two each.
        assert!(steps > 28, "{steps}");
    }
}

#[test]
fn rollback_after_crash_at_any_step_of_iocost_restores() {
    let apply = |bed: &Bed, host: &Host| {
        let (observed, changes) = bed.changes_to(&wanted_with(Scheduler::IoCost(OWN)));
        host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).map(drop)
    };
    for scheduler in ["kyber", "iocost"] {
        for_every_step(true, scheduler, apply, |bed, before, step| {
            bed.host.rollback().unwrap();
            assert_eq!(bed.snapshot(), before, "{scheduler} step {step}");
        });
    }
}

#[test]
fn next_apply_after_crash_at_any_step_succeeds() {
    for (v2, scheduler) in STARTS {
        for_every_step(v2, scheduler, apply_on, |bed, before, step| {
            // The plan of before: valid again once the rest is put back, unless
            // the first had come to its end.
            let start = Bed::with_guest(v2, scheduler).observe();
            let changes = diff(&start, &wanted());
            let options = ApplyOptions::default();
            match bed.host.apply(&bed.topology, &start, &changes, options) {
                Ok(_) => {}
                Err(HostError::Stale { .. }) => {
                    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Applied);
                }
                Err(other) => panic!("{other}"),
            }
            assert_eq!(bed.drift(&wanted()), 0, "v2={v2} {scheduler} step {step}");
            bed.host.rollback().unwrap();
            assert_eq!(bed.snapshot(), before, "v2={v2} {scheduler} step {step}");
        });
    }
}

#[test]
fn verify_after_crash_at_any_step_restores_or_finds_all_applied() {
    for_every_step(false, "bfq", apply_on, |bed, before, step| {
        let drift = bed.drift(&wanted());
        assert!(drift == 0 || bed.snapshot() == before, "step {step}");
    });
}

#[test]
fn crash_of_a_second_apply_at_any_step_returns_to_the_first() {
    let work = |bed: &Bed, host: &Host| {
        if bed.host.journal_status()? == JournalStatus::Clean {
            bed.apply(&wanted())?;
        }
        let (observed, changes) = bed.changes_to(&wanted_with(Scheduler::None));
        host.apply(&bed.topology, &observed, &changes, ApplyOptions::default()).map(drop)
    };
    for (v2, scheduler) in STARTS {
        for_every_step(v2, scheduler, work, |bed, before, step| {
            bed.host.verify(&bed.topology, &wanted()).unwrap();
            let first = bed.drift(&wanted()) == 0;
            let second = bed.drift(&wanted_with(Scheduler::None)) == 0;
            assert!(first || second, "v2={v2} {scheduler} step {step}");
            bed.host.rollback().unwrap();
            assert_eq!(bed.snapshot(), before, "v2={v2} {scheduler} step {step}");
        });
    }
}

#[test]
fn rollback_itself_crashing_at_any_step_restores() {
    let work = |bed: &Bed, host: &Host| {
        bed.apply(&wanted())?;
        host.rollback().map(drop)
    };
    for (v2, scheduler) in STARTS {
        for_every_step(v2, scheduler, work, |bed, before, step| {
            // A journal that does not tell of the rollback has all knobs applied.
            if bed.host.journal_status().unwrap() == JournalStatus::Applied {
                let mut found = bed.observe();
                found.retain(|knob, _| wanted().contains_key(knob));
                assert_eq!(found, wanted(), "v2={v2} {scheduler} step {step}");
            }
            if step % 2 == 0 {
                bed.host.rollback().unwrap();
            } else {
                // A death before the journal says so leaves the apply in place.
                let _ = bed.drift(&wanted());
                if bed.host.journal_status().unwrap() == JournalStatus::Applied {
                    bed.host.rollback().unwrap();
                }
            }
            assert_eq!(bed.snapshot(), before, "v2={v2} {scheduler} step {step}");
        });
    }
}

#[test]
fn rollback_crashing_at_any_step_keeps_what_a_guest_refuses_for_the_next() {
    let work = |bed: &Bed, host: &Host| {
        bed.apply(&wanted())?;
        let kernel = &bed.machine.as_ref().unwrap().kernel;
        kernel.refuse("/sys/block/vda/queue/scheduler", rustix::io::Errno::PERM);
        match host.rollback() {
            Err(HostError::RestoreIncomplete { .. }) => Ok(()),
            other => other.map(|outcome| panic!("{outcome:?}")),
        }
    };
    let steps = for_every_step(false, "mq-deadline", work, |bed, before, step| {
        let error = bed.host.rollback().unwrap_err();
        assert!(matches!(error, HostError::RestoreIncomplete { .. }), "step {step}: {error}");
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Applied);
        assert!(before.starts_with(&bed.fake.snapshot()), "step {step}");
        bed.machine.as_ref().unwrap().kernel.heal();
        bed.host.rollback().unwrap();
        assert_eq!(bed.snapshot(), before, "step {step}");
        assert_eq!(bed.host.rollback().unwrap(), RollbackOutcome::Nothing);
    });
    assert!(steps > 15, "{steps}");
}

#[test]
fn apply_that_died_is_reverted_by_the_watchdog_at_once() {
    let work = |bed: &Bed, host: &Host| {
        let (observed, changes) = bed.changes_to(&wanted());
        host.apply(&bed.topology, &observed, &changes, long()).map(drop)
    };
    for_every_step(true, "bfq", work, |bed, before, step| {
        if matches!(bed.host.journal_status().unwrap(), JournalStatus::AwaitsConfirmation { .. }) {
            // It died when all was set: there is an hour to confirm it.
            bed.host.confirm().unwrap();
            assert_eq!(bed.drift(&wanted()), 0, "step {step}");
            return;
        }
        bed.host.revert_unless_confirmed().unwrap();
        assert_eq!(bed.snapshot(), before, "step {step}");
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean, "step {step}");
    });
}

#[test]
fn revert_of_an_unconfirmed_apply_crashing_at_any_step_is_finished() {
    let work = |bed: &Bed, host: &Host| {
        bed.apply_with(&wanted(), ApplyOptions { confirm_timeout: Some(Duration::ZERO) })?;
        host.revert_unless_confirmed().map(drop)
    };
    for_every_step(false, "bfq", work, |bed, before, step| {
        assert!(bed.drift(&wanted()) > 0);
        assert_eq!(bed.snapshot(), before, "step {step}");
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
    });
}
