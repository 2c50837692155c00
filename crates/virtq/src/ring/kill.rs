//! Kills a simulated server between any two of its stores to shared memory.

use std::cell::Cell;

thread_local! {
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Lets this thread make so many more stores; the rest are lost. `None`: all of them.
pub(super) fn after(stores: Option<u64>) {
    LEFT.set(stores);
}

/// Whether the limit has been reached.
pub(super) fn dead() -> bool {
    LEFT.get() == Some(0)
}

/// Counts a store; whether it still happens.
pub(super) fn alive() -> bool {
    match LEFT.get() {
        None => true,
        Some(0) => false,
        Some(left) => {
            LEFT.set(Some(left - 1));
            true
        }
    }
}
