//! Processor time that a disk's requests cost beyond their own: for benchmarks of what is slow.

use std::time::Duration;

use rustix::time::ClockId;

use crate::{Operation, Request};

/// Processor time of a request, burnt on the thread that starts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Of each request.
    pub request: Duration,
    /// And of each KiB that it reads or writes.
    pub kib: Duration,
}

impl From<Duration> for Cost {
    /// The same for each request.
    fn from(request: Duration) -> Self {
        Self { request, kib: Duration::ZERO }
    }
}

impl Cost {
    /// What a request of so many bytes costs.
    fn of(self, bytes: u64) -> Duration {
        let kib = self.kib.as_nanos() * u128::from(bytes) / 1024;
        self.request.saturating_add(Duration::from_nanos(kib.min(u64::MAX.into()) as u64))
    }

    /// Burns what a request costs.
    pub(crate) fn burn(self, request: &Request<'_>) {
        if self == Self::default() {
            return;
        }
        let moves = matches!(request.operation, Operation::Read | Operation::Write { .. });
        burn(self.of(if moves { request.length } else { 0 }));
    }
}

/// Burns processor time, which is less than the time that passes if the thread is preempted. A look at it is a
/// system call: of the looks that it takes, one and a half are outside what they see, on average.
fn burn(cpu: Duration) {
    let first = thread_time();
    let (mut now, mut look) = (first, Duration::from_secs(1));
    loop {
        let last = std::mem::replace(&mut now, thread_time());
        // One that an interrupt made longer says nothing.
        look = look.min(now - last);
        if now - first + look * 3 / 2 >= cpu {
            return;
        }
        std::hint::spin_loop();
    }
}

fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_that_of_the_request_and_of_its_kib() {
        let cost = Cost { request: Duration::from_micros(20), kib: Duration::from_nanos(40) };
        assert_eq!(cost.of(0), Duration::from_micros(20));
        // 4 and 256 KiB.
        assert_eq!(cost.of(4_096), Duration::from_nanos(20_160));
        assert_eq!(cost.of(262_144), Duration::from_nanos(30_240));
        assert_eq!(cost.of(512), Duration::from_nanos(20_020));
        assert_eq!(Cost::from(Duration::from_micros(7)).of(1 << 20), Duration::from_micros(7));
        assert_eq!(Cost::default().of(1 << 20), Duration::ZERO);
    }

    #[test]
    fn burning_takes_that_much_of_the_threads_time() {
        let cost = Cost { request: Duration::from_micros(500), kib: Duration::from_micros(100) };
        let before = thread_time();
        burn(cost.of(5 * 1_024));
        let burnt = thread_time() - before;
        assert!(burnt >= Duration::from_millis(1), "{burnt:?}");
    }
}
