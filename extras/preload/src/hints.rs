//! Which descriptors are likely not worth a question: a table of hints, never of facts.
//!
//! Each entry counts down the calls that stay plain before the kernel is asked again. A descriptor that was
//! not for the ring, or a request that the ring did not answer, doubles that number; an answer of the ring
//! sets it back. Entries belong to descriptor numbers, and numbers that are equal in their low bits
//! share one: a wrong hint costs some plain calls.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::short::Direction;

/// Descriptor numbers with an entry of their own.
const NUMBERS: usize = 1024;

/// Most calls that stay plain before the next question, which costs a system call or two.
const MAX_PLAIN_CALLS: u16 = 63;

/// For each number, for reads and for writes: calls left in the low byte, calls of the last round in the high.
static HINTS: [[AtomicU16; 2]; NUMBERS] = [const { [const { AtomicU16::new(0) }; 2] }; NUMBERS];

fn entry(fd: c_int, direction: Direction) -> Option<&'static AtomicU16> {
    let pair = HINTS.get(fd as usize % NUMBERS)?;
    pair.get(direction as usize)
}

/// Whether this call may ask.
pub(crate) fn may_ask(fd: c_int, direction: Direction) -> bool {
    let Some(entry) = entry(fd, direction) else { return false };
    let value = entry.load(Ordering::Relaxed);
    if value & 0xff == 0 {
        return true;
    }
    // Threads that count at the same time count once: a hint may be late.
    entry.store(value - 1, Ordering::Relaxed);
    false
}

/// The ring is not for this descriptor, or did not answer.
pub(crate) fn back_off(fd: c_int, direction: Direction) {
    if let Some(entry) = entry(fd, direction) {
        let last = entry.load(Ordering::Relaxed) >> 8;
        // The first time no call is left out: 0, 1, 3, 7, ...
        entry.store(((last * 2 + 1).min(MAX_PLAIN_CALLS) << 8) | last, Ordering::Relaxed);
    }
}

/// The ring answered.
pub(crate) fn answered(fd: c_int, direction: Direction) {
    if let Some(entry) = entry(fd, direction)
        && entry.load(Ordering::Relaxed) != 0
    {
        entry.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls that stay plain before the next question.
    fn plain_calls(fd: c_int) -> usize {
        (0..1000).take_while(|_| !may_ask(fd, Direction::Read)).count()
    }

    #[test]
    fn questions_get_rarer_until_the_ring_answers() {
        let fd = 1001;
        assert_eq!(plain_calls(fd), 0);
        let mut left_out = Vec::new();
        for _ in 0..9 {
            back_off(fd, Direction::Read);
            left_out.push(plain_calls(fd));
        }
        assert_eq!(left_out, [0, 1, 3, 7, 15, 31, 63, 63, 63]);
        back_off(fd, Direction::Read);
        answered(fd, Direction::Read);
        assert_eq!(plain_calls(fd), 0);
    }

    #[test]
    fn writes_that_fail_leave_reads_alone() {
        let fd = 1002;
        for _ in 0..5 {
            back_off(fd, Direction::Write);
        }
        assert!(!may_ask(fd, Direction::Write));
        assert!(may_ask(fd, Direction::Read));
    }

    #[test]
    fn numbers_beyond_the_table_share_its_entries() {
        for fd in [-1, c_int::MAX, c_int::MIN, 5000] {
            assert!(may_ask(fd, Direction::Write), "{fd}");
        }
    }
}
