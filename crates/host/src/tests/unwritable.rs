//! A state directory to which nothing can be written, as on a `/run` that is full.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::crash::for_every_step;
use super::*;
use crate::Step;

impl Bed {
    /// No journal can be written while this is there: it is written beside its place first.
    fn obstacle(&self) -> PathBuf {
        self.state.path().join("journal.json.tmp")
    }

    /// From now on no journal can be written, though it can be removed.
    fn fill(&self) {
        fs::create_dir(self.obstacle()).unwrap();
    }
}

fn wanted() -> Knobs {
    with_guest(super::wanted(), "bfq")
}

#[test]
fn rollback_restores_where_nothing_can_be_written() {
    for (v2, scheduler) in STARTS {
        let bed = Bed::with_guest(v2, scheduler);
        let before = bed.snapshot();
        bed.apply(&wanted()).unwrap();
        bed.fill();
        // Nothing is set that could not be put back.
        let applied = bed.snapshot();
        let refused = bed.apply(&with_guest(super::wanted_with(Scheduler::None), "none"));
        assert!(matches!(refused, Err(HostError::State { .. })), "{refused:?}");
        assert_eq!(bed.snapshot(), applied);
        let outcome = bed.host.rollback().unwrap();
        assert!(matches!(outcome, RollbackOutcome::RolledBack(_)), "{outcome:?}");
        assert_eq!(bed.snapshot(), before, "v2={v2} {scheduler}");
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
    }
}

#[test]
fn rollback_where_nothing_can_be_written_crashing_at_any_step_restores() {
    let work = |bed: &Bed, host: &Host| {
        bed.apply(&wanted())?;
        bed.fill();
        host.rollback().map(drop)
    };
    let steps = for_every_step(true, "kyber", work, |bed, before, step| {
        bed.host.rollback().unwrap();
        assert_eq!(bed.snapshot(), before, "step {step}");
        assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean, "step {step}");
    });
    assert!(steps > 10, "{steps}");
}

#[test]
fn expired_apply_is_reverted_where_nothing_can_be_written() {
    let expired = ApplyOptions { confirm_timeout: Some(Duration::ZERO) };
    let bed = Bed::with_guest(false, "bfq");
    let before = bed.snapshot();
    bed.apply_with(&wanted(), expired).unwrap();
    bed.fill();
    assert!(bed.drift(&wanted()) > 0);
    assert_eq!(bed.snapshot(), before);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);

    // Of an apply after another one a journal is left, which cannot be written: it is said, and told once it can be.
    fs::remove_dir(bed.obstacle()).unwrap();
    bed.apply(&wanted()).unwrap();
    let first = bed.snapshot();
    let second = with_guest(super::wanted_with(Scheduler::Kyber), "none");
    bed.apply_with(&second, expired).unwrap();
    bed.fill();
    let error = bed.host.verify(&bed.topology, &wanted()).unwrap_err();
    let HostError::RestoreIncomplete { failures, done } = &error else { panic!("{error}") };
    assert!(failures.len() == 1 && failures[0].contains("journal.json.tmp"), "{failures:?}");
    assert!(!done.restored.is_empty());
    assert_eq!(bed.snapshot(), first);
    fs::remove_dir(bed.obstacle()).unwrap();
    assert_eq!(bed.drift(&wanted()), 0);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Applied);
    bed.host.rollback().unwrap();
    assert_eq!(bed.snapshot(), before);
}

#[test]
fn apply_that_cannot_settle_its_journal_is_undone() {
    let bed = Bed::with_guest(true, "none");
    let before = bed.snapshot();
    let (observed, changes) = bed.changes_to(&wanted());
    let obstacle = bed.obstacle();
    let host = bed.host.clone().with_observer(Arc::new(move |step| {
        if matches!(step, Step::BeforeWrite { .. }) {
            // It is there already at the second write.
            let _ = fs::create_dir(&obstacle);
        }
        ControlFlow::Continue(())
    }));
    let options = ApplyOptions::default();
    let error = host.apply(&bed.topology, &observed, &changes, options).unwrap_err();
    assert!(matches!(error, HostError::State { .. }), "{error}");
    assert_eq!(bed.snapshot(), before);
    assert_eq!(bed.host.journal_status().unwrap(), JournalStatus::Clean);
}
