//! A ring for commands: requests that the kernel hands to a device's driver as they are
//! (`IORING_OP_URING_CMD`).
//!
//! They take entries of twice the size, and results too, so they have a ring beside that for files. An
//! *interrupted* one is like any other: an end wakes whoever waits at its descriptor. A *polled* one
//! (`IORING_SETUP_IOPOLL`) has no such: the kernel looks at the device when it is entered, and only
//! then, so whoever has requests in flight there calls [`CommandRing::enter`] until they have ended.

use std::os::fd::{AsRawFd, RawFd};

use io_uring::cqueue::Entry32;
use io_uring::squeue::{Entry128, SubmissionQueue};
use io_uring::{Builder, IoUring};

use crate::Commands;

/// `IORING_ENTER_GETEVENTS` of linux/io_uring.h: run what the kernel has deferred to this thread, or
/// look at the device.
const GETEVENTS: u32 = 1;

/// A ring for commands, of the thread that makes it.
pub struct CommandRing {
    ring: IoUring<Entry128, Entry32>,
    is_polled: bool,
    in_flight: usize,
}

impl CommandRing {
    /// A ring whose submission queue has so many entries, and its completion queue `completions`.
    ///
    /// # Errors
    /// io_uring is forbidden, or older than Linux 5.19 (`EINVAL`).
    pub fn new(commands: Commands, entries: u32, completions: u32) -> std::io::Result<Self> {
        let is_polled = commands == Commands::Polled;
        let mut builder: Builder<Entry128, Entry32> = IoUring::builder();
        // Not DEFER_TASKRUN: a thread that waits at another ring would not hear of this one's ends.
        builder.setup_clamp().setup_cqsize(completions).setup_coop_taskrun().setup_taskrun_flag();
        if is_polled {
            builder.setup_iopoll();
        }
        Ok(Self { ring: builder.build(entries)?, is_polled, in_flight: 0 })
    }

    /// Where requests go; they start with the next [`Self::enter`].
    pub fn submission(&mut self) -> SubmissionQueue<'_, Entry128> {
        self.ring.submission()
    }

    /// Whether all that was pushed has been submitted.
    pub fn is_submitted(&mut self) -> bool {
        self.ring.submission().is_empty()
    }

    /// Requests that have been submitted and whose results have not been taken.
    #[must_use]
    pub const fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether requests are in flight that end only if somebody looks.
    #[must_use]
    pub const fn must_be_polled(&self) -> bool {
        self.is_polled && self.in_flight > 0
    }

    /// Whether there are results to take, after [`Self::enter`].
    pub fn has_ended(&mut self) -> bool {
        self.enter();
        !self.ring.completion().is_empty()
    }

    /// Submits, and has the kernel say what has ended as far as it does not by itself. Waits for
    /// nothing; without anything to do it is no system call.
    pub fn enter(&mut self) {
        let (waiting, is_called) = {
            let submission = self.ring.submission();
            (submission.len(), submission.taskrun() || submission.cq_overflow())
        };
        let looks = self.must_be_polled() && self.ring.completion().is_empty();
        if waiting > 0 || is_called || looks {
            // What fails now is submitted the next time.
            let _ = self.enter_for(0, waiting, is_called || self.is_polled);
        }
    }

    /// Submits, and waits until there is a result.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self) -> std::io::Result<()> {
        while self.ring.completion().is_empty() {
            let waiting = self.ring.submission().len();
            match self.enter_for(1, waiting, true) {
                Err(error) if error.kind() != std::io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn enter_for(&mut self, least: u32, waiting: usize, gets_events: bool) -> std::io::Result<()> {
        let flags = if gets_events { GETEVENTS } else { 0 };
        let submitter = self.ring.submitter();
        // SAFETY: no argument; entries refer to memory that lives until they complete.
        let submitted =
            unsafe { submitter.enter::<libc::sigset_t>(waiting as u32, least, flags, None) }?;
        self.in_flight += submitted.min(waiting);
        Ok(())
    }

    /// Takes a result: the request's user data, and what the driver said.
    pub fn take(&mut self) -> Option<(u64, i32)> {
        let entry = self.ring.completion().next()?;
        self.in_flight = self.in_flight.saturating_sub(1);
        Some((entry.user_data(), entry.result()))
    }
}

impl AsRawFd for CommandRing {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use io_uring::opcode::Nop;

    use super::*;

    #[test]
    fn results_for_which_there_is_no_room_are_taken_without_a_wait() {
        const ROOM: u32 = 8;
        if !crate::testing::has_io_uring() {
            return;
        }
        let mut ring = CommandRing::new(Commands::Interrupt, ROOM, ROOM).unwrap();
        for _ in 0..2 {
            for number in 0..u64::from(ROOM) {
                let nop = Entry128::from(Nop::new().build().user_data(number));
                // SAFETY: it refers to no memory.
                unsafe { ring.submission().push(&nop).unwrap() };
            }
            ring.enter();
        }
        assert!(ring.ring.submission().cq_overflow(), "there was room for all");
        let mut taken = Vec::new();
        while ring.has_ended() {
            taken.extend(std::iter::from_fn(|| ring.take()).map(|(number, _)| number));
        }
        assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6, 7].repeat(2));
        assert_eq!(ring.in_flight(), 0);
    }
}
