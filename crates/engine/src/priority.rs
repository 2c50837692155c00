//! Real-time priority for threads that stand for hardware.

use std::io;

/// Gives the calling thread `SCHED_FIFO` at `priority` (1 to 99), which also
/// sets its timer slack to zero (kernel `kernel/time/hrtimer.c`).
///
/// # Errors
/// The kernel's: `EPERM` without `CAP_SYS_NICE`, `EINVAL` for a bad priority.
pub fn raise_thread_priority(priority: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: pid 0 is the calling thread; `param` outlives the call, which only reads it.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
