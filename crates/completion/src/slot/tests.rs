use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[test]
fn slot_goes_round_and_has_a_new_ticket_each_time() {
    let slot: Slot = Slot::new();
    let first = slot.submit().unwrap();
    assert_eq!(slot.submit(), None);
    assert_eq!(slot.take(first), None);
    let mut wakes = Wakes::default();
    assert_eq!(wakes.complete(&slot, first, -5), Ok(()));
    assert_eq!(wakes.complete(&slot, first, 4), Err(NotPending));
    assert_eq!(wakes.count, 0, "nobody sleeps");
    assert_eq!(slot.submit(), None, "the result is still there");
    assert_eq!(slot.take(first), Some(-5));
    assert_eq!(slot.take(first), None);
    let second = slot.submit().unwrap();
    assert_ne!(first, second);
    assert_eq!(wakes.complete(&slot, first, 1), Err(NotPending));
    assert_eq!(slot.wait(first, None), None, "it is not the slot's request");
    assert_eq!(wakes.complete(&slot, second, i32::MIN), Ok(()));
    assert_eq!(slot.wait(second, None), Some(i32::MIN));
}

#[test]
fn waiter_gives_up_after_its_time_and_may_come_again() {
    let slot: Slot = Slot::new();
    let ticket = slot.submit().unwrap();
    assert_eq!(slot.wait(ticket, Some(Duration::from_millis(2))), None);
    let mut wakes = Wakes::default();
    assert_eq!(wakes.complete(&slot, ticket, 9), Ok(()));
    assert_eq!(wakes.count, 1, "it counted as asleep");
    assert_eq!(slot.wait(ticket, Some(Duration::ZERO)), Some(9));
}

#[test]
fn generation_wraps_and_slots_go_on() {
    let slot: Slot = Slot::new();
    slot.word.store(u64::from(!STATE), Ordering::Relaxed);
    let ticket = slot.submit().unwrap();
    assert_eq!(ticket.generation, 0);
    assert_eq!(Wakes::default().complete(&slot, ticket, 1), Ok(()));
    assert_eq!(slot.take(ticket), Some(1));
}

#[test]
fn sleepers_of_a_batch_are_woken_after_it() {
    let slots: Arc<Vec<Slot>> = Arc::new((0..BATCH + 3).map(|_| Slot::new()).collect());
    let tickets: Vec<Ticket> = slots.iter().map(|slot| slot.submit().unwrap()).collect();
    let waiters: Vec<_> = (0..slots.len())
        .map(|at| {
            let (slots, ticket) = (Arc::clone(&slots), tickets[at]);
            std::thread::spawn(move || slots[at].wait(ticket, Some(Duration::from_secs(20))))
        })
        .collect();
    while slots.iter().any(|slot| slot.word.load(Ordering::Relaxed) as u32 & STATE != SLEEPING) {
        std::thread::sleep(Duration::from_millis(1));
    }
    {
        let mut wakes = Wakes::default();
        for (at, (slot, &ticket)) in slots.iter().zip(&tickets).enumerate() {
            wakes.complete(slot, ticket, at as i32).unwrap();
        }
    }
    let results: Vec<_> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
    assert_eq!(results, (0..slots.len() as i32).map(Some).collect::<Vec<_>>());
}

/// What either side may do to a slot, and what a hostile peer does beside it.
#[derive(Debug, Clone, Copy)]
enum Step {
    Submit,
    Complete,
    CompleteAgain,
    Take,
    Wait,
    Reclaim,
    Scribble(u64),
}

proptest! {
    /// Whatever a peer writes into the word: no call blocks or panics, and without scribbling each
    /// request has one result, its own.
    #[test]
    fn each_request_has_its_own_result_whatever_the_order(
        steps in prop::collection::vec(
            prop_oneof![
                4 => Just(Step::Submit),
                4 => Just(Step::Complete),
                2 => Just(Step::CompleteAgain),
                4 => Just(Step::Take),
                1 => Just(Step::Wait),
                1 => Just(Step::Reclaim),
                1 => any::<u64>().prop_map(Step::Scribble),
            ],
            1..60,
        ),
        honest in any::<bool>(),
    ) {
        let slot: Slot = Slot::new();
        let mut wakes = Wakes::default();
        let (mut ticket, mut old, mut number, mut completed) = (None, None, 0, None);
        for step in steps {
            match step {
                Step::Submit => {
                    let new = slot.submit();
                    if honest {
                        prop_assert_eq!(new.is_some(), ticket.is_none());
                    }
                    if new.is_some() {
                        (ticket, completed) = (new, None);
                        number += 1;
                    }
                }
                Step::Complete => if let Some(ticket) = ticket {
                    let done = wakes.complete(&slot, ticket, number);
                    if honest {
                        prop_assert_eq!(done.is_ok(), completed.is_none());
                    }
                    if done.is_ok() {
                        completed = Some(number);
                    }
                },
                Step::CompleteAgain => if let Some(old) = old {
                    let done = wakes.complete(&slot, old, -1);
                    if honest {
                        prop_assert_eq!(done, Err(NotPending));
                    }
                },
                Step::Take | Step::Wait => if let Some(now) = ticket {
                    let result = match step {
                        Step::Take => slot.take(now),
                        _ => slot.wait(now, Some(Duration::ZERO)),
                    };
                    if honest {
                        prop_assert_eq!(result, completed);
                    }
                    if result.is_some() {
                        (old, ticket, completed) = (ticket, None, None);
                    }
                },
                Step::Reclaim => {
                    slot.reclaim();
                    (old, ticket, completed) = (ticket.or(old), None, None);
                }
                Step::Scribble(word) if !honest => slot.word.store(word, Ordering::Relaxed),
                Step::Scribble(_) => {}
            }
        }
    }
}
