//! What tests need of a machine. Where it lacks that, they are skipped by name, and do not fail.

use std::fmt::Display;
use std::io::Write as _;

use io_uring::IoUring;

/// Whether the kernel gives this process a ring; if not, says that the test that asks is skipped.
///
/// The seccomp filter of a container refuses it, as does `kernel.io_uring_disabled`, and a kernel may have been built
/// without. Any other error is a failure, which the test meets by itself.
#[must_use]
pub fn has_io_uring() -> bool {
    let Err(error) = IoUring::new(1) else { return true };
    let refused = [libc::EPERM, libc::EACCES, libc::ENOSYS];
    let is_refused = error.raw_os_error().is_some_and(|error| refused.contains(&error));
    if is_refused {
        skipped(format_args!("needs io_uring: {error}"));
    }
    !is_refused
}

/// Says why the test that this thread runs is skipped: the harness names the thread after its test.
///
/// Written past the harness, which hides what a test prints that passes.
pub fn skipped(why: impl Display) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "SKIPPED {}: {why}", thread.name().unwrap_or("a test"));
}
