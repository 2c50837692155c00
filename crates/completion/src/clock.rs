//! The clocks of this room.

use rustix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC in ns: the same on every thread, and read without a system call.
pub(crate) fn now() -> u64 {
    ns(ClockId::Monotonic)
}

/// CPU time of the calling thread, ns.
pub(crate) fn cpu_time() -> u64 {
    ns(ClockId::ThreadCPUTime)
}

fn ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
