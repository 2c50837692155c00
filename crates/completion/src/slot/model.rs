//! Models of a slot, every interleaving of which loom runs (`make loom`).
//!
//! The slot is the real one; a futex is a lock under which the word is compared and a condition.
//! loom reports a waiter that nobody wakes as a deadlock, and what is read without having been handed
//! over as a race.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::{NotPending, Slot, Ticket, Wakes};

fn complete(slot: &Slot, ticket: Ticket, result: i32) -> Result<(), NotPending> {
    Wakes::default().complete(slot, ticket, result)
}

#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let slots = Arc::new([Slot::new(), Slot::new()]);
        let tickets = [slots[0].submit().unwrap(), slots[1].submit().unwrap()];
        let completed = Arc::clone(&slots);
        let completer = thread::spawn(move || {
            let mut wakes: Wakes<'_> = Wakes::default();
            wakes.complete(&completed[0], tickets[0], 7).unwrap();
            wakes.complete(&completed[1], tickets[1], -5).unwrap();
            wakes.issue();
        });
        assert_eq!(slots[0].wait(tickets[0], None), Some(7));
        assert_eq!(slots[1].wait(tickets[1], None), Some(-5));
        completer.join().unwrap();
    });
}

/// What the completer wrote before is seen by a waiter that spun once and by one that slept.
#[test]
fn result_is_seen_after_done() {
    struct Shared {
        slot: Slot,
        data: UnsafeCell<u32>,
    }
    // SAFETY: loom fails the model if two threads are in the cell at a time.
    unsafe impl Sync for Shared {}
    // SAFETY: as above.
    unsafe impl Send for Shared {}
    loom::model(|| {
        let shared = Arc::new(Shared { slot: Slot::new(), data: UnsafeCell::new(0) });
        let ticket = shared.slot.submit().unwrap();
        let other = Arc::clone(&shared);
        let completer = thread::spawn(move || {
            // SAFETY: loom fails the model if the waiter reads already.
            other.data.with_mut(|data| unsafe { *data = 42 });
            complete(&other.slot, ticket, 1).unwrap();
        });
        let result = shared.slot.take(ticket).or_else(|| shared.slot.wait(ticket, None));
        assert_eq!(result, Some(1));
        // SAFETY: loom fails the model if the completer writes yet.
        assert_eq!(shared.data.with(|data| unsafe { *data }), 42);
        completer.join().unwrap();
    });
}

#[test]
fn request_is_completed_once() {
    loom::model(|| {
        let slot = Arc::new(Slot::new());
        let ticket = slot.submit().unwrap();
        let first = Arc::new(AtomicUsize::new(0));
        let completers: Vec<_> = (1..=2)
            .map(|result| {
                let (slot, first) = (Arc::clone(&slot), Arc::clone(&first));
                thread::spawn(move || {
                    if complete(&slot, ticket, result).is_ok() {
                        assert_eq!(first.swap(result as usize, Ordering::AcqRel), 0);
                    }
                })
            })
            .collect();
        let result = slot.wait(ticket, None).unwrap();
        for completer in completers {
            completer.join().unwrap();
        }
        assert_eq!(first.load(Ordering::Acquire), result as usize);
        assert_eq!(slot.take(ticket), None);
    });
}

/// A completion that comes a second time meets the next request, which sleeps or not, and leaves it
/// alone.
#[test]
fn late_completion_is_refused_after_reuse() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let slot = Arc::new(Slot::new());
        let first = slot.submit().unwrap();
        let second = Ticket { generation: first.generation + 4 };
        let other = Arc::clone(&slot);
        let completer = thread::spawn(move || {
            complete(&other, first, 1).unwrap();
            assert_eq!(complete(&other, first, 2), Err(NotPending));
            // Until the waiter has submitted again.
            while complete(&other, second, 3).is_err() {
                thread::yield_now();
            }
        });
        assert_eq!(slot.wait(first, None), Some(1));
        assert_eq!(slot.submit(), Some(second));
        assert_eq!(slot.wait(second, None), Some(3));
        completer.join().unwrap();
    });
}
