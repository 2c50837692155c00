//! What is printed, and who reads it: `rtvirtio VERB | head` ends when `head` does.
//!
//! The standard library ignores SIGPIPE and panics where it cannot print. A panic unwinds, so that what a
//! verb has set up is taken down; it is only not to look like a fault.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

/// Exit code: who read the output has gone (128 + SIGPIPE).
pub(crate) const NOBODY_READS: u8 = 141;

/// What `work` returns; none if it ended because nobody reads what it prints any more.
pub(crate) fn while_it_is_read<T>(work: impl FnOnce() -> T) -> Option<T> {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !is_unread(info.payload()) {
            usual(info);
        }
    }));
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(payload) if is_unread(&*payload) => None,
        Err(payload) => panic::resume_unwind(payload),
    }
}

/// Whether `print!` panicked with this, for its reader has gone.
fn is_unread(payload: &(dyn Any + Send)) -> bool {
    payload
        .downcast_ref::<String>()
        .is_some_and(|text| text.starts_with("failed printing to ") && text.contains("os error 32"))
}
