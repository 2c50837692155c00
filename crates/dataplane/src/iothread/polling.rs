//! How long an IOThread polls before it waits.

use std::time::Duration;

/// How long a thread polls before it waits (QEMU's IOThread properties of the same names).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Polling {
    /// At most so long; zero: never (`poll-max-ns`). Half of it where a disk is waited for.
    pub max: Duration,
    /// Factor by which it grows; zero counts as 2 (`poll-grow`).
    pub grow: u32,
    /// Divisor by which it shrinks; zero: to none (`poll-shrink`).
    pub shrink: u32,
}

impl Default for Polling {
    /// QEMU's values (`max` for disks, 32,768), but for `shrink` (there 0): a driver that was late
    /// once is met halfway, not woken four times until polling pays again.
    fn default() -> Self {
        Self { max: Duration::from_nanos(65_536), grow: 2, shrink: 2 }
    }
}

impl Polling {
    /// The first polling time, as QEMU's.
    const FIRST_NS: u64 = 4_000;

    /// What follows `poll` ns, at most `max`, when the thread polled and waited for `blocked` ns in
    /// all.
    pub(super) fn adjust(self, poll: u64, max: u64, blocked: u64) -> u64 {
        if blocked <= poll {
            poll
        } else if blocked > max {
            poll.checked_div(u64::from(self.shrink)).unwrap_or(0)
        } else if poll == 0 {
            Self::FIRST_NS.min(max)
        } else {
            let grow = if self.grow == 0 { 2 } else { u64::from(self.grow) };
            poll.saturating_mul(grow).min(max)
        }
    }
}
