//! What is printed, who reads it, and what becomes of it if it cannot be written.
//!
//! `rtvirtio VERB | head` ends when `head` does: the first write that nobody reads unwinds, so that what the
//! verb has set up is taken down, and the process ends with [`EXIT_SIGPIPE`]. The standard library's own
//! macros panic where they cannot print, so this crate has others of the same names in their place:
//! these keep the first other failure (a full disk, say) for [`failure`], and the verb goes on. What it does on
//! the host must not depend on whether it can be told: a verb that changes it goes on without a reader too
//! (`outlive_reader`), since half of its work would be left, or all of it under an exit code that denies it.

use std::any::Any;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code: who read the output has gone (128 + SIGPIPE).
pub const EXIT_SIGPIPE: u8 = 141;

/// The first failure to write standard output that was not for want of a reader.
static FAILURE: Mutex<Option<String>> = Mutex::new(None);

/// Whether a write that nobody reads is a failure as any other.
static OUTLIVES_READER: AtomicBool = AtomicBool::new(false);

/// From now on what prints goes on when nobody reads it any more; [`failure`] tells.
pub(crate) fn outlive_reader() {
    OUTLIVES_READER.store(true, Ordering::Relaxed);
}

/// What a write unwinds with that nobody reads.
struct Unread;

/// What `work` returns; none if it ended because nobody reads what it prints any more.
pub fn catch_broken_pipe<T>(work: impl FnOnce() -> T) -> Option<T> {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !is_broken_pipe(info.payload()) {
            usual(info);
        }
    }));
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(payload) if is_broken_pipe(&*payload) => None,
        Err(payload) => panic::resume_unwind(payload),
    }
}

/// Whether something unwound for want of a reader: a write here, or `print!` of a library.
fn is_broken_pipe(payload: &(dyn Any + Send)) -> bool {
    let of_print =
        |text: &String| text.starts_with("failed printing to ") && text.contains("os error 32");
    payload.is::<Unread>() || payload.downcast_ref::<String>().is_some_and(of_print)
}

/// Why standard output could not be written, if it could not.
pub fn failure() -> Option<String> {
    // What the last lines still wait for.
    note(io::stdout().flush());
    FAILURE.lock().ok()?.clone()
}

fn note(result: io::Result<()>) {
    match result {
        Err(error)
            if error.kind() == ErrorKind::BrokenPipe
                && !OUTLIVES_READER.load(Ordering::Relaxed) =>
        {
            panic::panic_any(Unread)
        }
        Err(error) => {
            if let Ok(mut failure) = FAILURE.lock() {
                failure.get_or_insert_with(|| error.to_string());
            }
        }
        Ok(()) => {}
    }
}

/// A text as a terminal may have it: of what it would obey, but for tabs and the ends of lines, there is the escape. Names
/// and files are written by others.
#[must_use]
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && !matches!(c, '\n' | '\t') {
            shown.extend(c.escape_debug());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// To standard output.
pub fn print(text: fmt::Arguments<'_>) {
    note(io::stdout().lock().write_fmt(text));
}

/// To standard error; there is nobody to tell if that fails.
pub fn complain(text: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// A line to standard output that must be there at once.
pub fn line(text: &str) {
    let mut out = io::stdout().lock();
    note(writeln!(out, "{text}").and_then(|()| out.flush()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown_by_its_escape() {
        let text = "disk é\t1\n\u{1b}[2J\r\u{7f}\u{9b}";
        assert_eq!(visible(text), "disk é\t1\n\\u{1b}[2J\\r\\u{7f}\\u{9b}");
    }
}
