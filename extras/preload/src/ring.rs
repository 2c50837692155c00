//! A thread's ring: one request at a time, in private memory, without a descriptor.
//!
//! The `io-uring` crate's rings have a descriptor and are shared with children; this one must have and be
//! neither, so it is made here, on two pages that the caller brings (`IORING_SETUP_NO_MMAP`) and under a
//! number in the task's own table (`IORING_SETUP_REGISTERED_FD_ONLY`; both since Linux 6.5). The kernel
//! frees it when the task ends or calls exec, and knows it in no other task.
//!
//! Completions are posted only while the thread is in the kernel for that (`IORING_SETUP_DEFER_TASKRUN`):
//! no interrupt is sent to a CPU whose thread looks by itself. A flag in the ring's memory tells that there
//! is something to post; only then does a look cost a system call.

use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::io_uring::{
    IoringEnterFlags, IoringSetupFlags, IoringSqFlags, io_uring_cqe, io_uring_enter,
    io_uring_params, io_uring_ptr, io_uring_setup, io_uring_sqe,
};

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Its number in the task's table of rings.
    number: RawFd,
    submission: NonNull<io_uring_sqe>,
    submission_head: NonNull<AtomicU32>,
    submission_tail: NonNull<AtomicU32>,
    submission_flags: NonNull<AtomicU32>,
    completions: NonNull<io_uring_cqe>,
    completion_mask: u32,
    completion_head: NonNull<AtomicU32>,
    completion_tail: NonNull<AtomicU32>,
}

/// A word that the kernel writes too.
fn word(at: &NonNull<AtomicU32>) -> &AtomicU32 {
    // SAFETY: in the ring's page, which lives as long as the ring, whose field `at` is.
    unsafe { at.as_ref() }
}

impl Ring {
    /// Makes a ring.
    ///
    /// # Errors
    /// The kernel's: it is too old, or io_uring is switched off for this process.
    ///
    /// # Safety
    /// `indices` and `entries` are each the start of a page of zeroes that is the ring's alone for as long as the
    /// calling task lives, or until it calls exec.
    pub(crate) unsafe fn new(indices: NonNull<u8>, entries: NonNull<u8>) -> Result<Self, Errno> {
        let mut params = io_uring_params::default();
        params.flags = IoringSetupFlags::NO_MMAP
            | IoringSetupFlags::REGISTERED_FD_ONLY
            | IoringSetupFlags::SINGLE_ISSUER
            | IoringSetupFlags::DEFER_TASKRUN
            | IoringSetupFlags::TASKRUN_FLAG;
        params.cq_off.user_addr = io_uring_ptr::new(indices.as_ptr().cast());
        params.sq_off.user_addr = io_uring_ptr::new(entries.as_ptr().cast());
        // SAFETY: no ring is attached to, and the memory is as the caller promises.
        let number = unsafe { io_uring_setup(1, &mut params) }?;
        // It is a number in another table: closing it would close a stranger's descriptor.
        let number = number.into_raw_fd();
        // SAFETY: the kernel's offsets lie within the ring's page.
        let at = |offset: u32| unsafe { indices.add(offset as usize) };
        let word_at = |offset: u32| at(offset).cast::<AtomicU32>();
        // The one entry of the array that maps places in the ring to entries is zero, which is right.
        let completion_mask = word(&word_at(params.cq_off.ring_mask)).load(Ordering::Relaxed);
        Ok(Self {
            number,
            submission: entries.cast(),
            submission_head: word_at(params.sq_off.head),
            submission_tail: word_at(params.sq_off.tail),
            submission_flags: word_at(params.sq_off.flags),
            completions: at(params.cq_off.cqes).cast(),
            completion_mask,
            completion_head: word_at(params.cq_off.head),
            completion_tail: word_at(params.cq_off.tail),
        })
    }

    fn enter(&self, submit: u32, complete: u32, flags: IoringEnterFlags) -> Result<u32, Errno> {
        // SAFETY: a number of the task's own table, which only `io_uring_enter` is given.
        let ring = unsafe { BorrowedFd::borrow_raw(self.number) };
        let flags = flags | IoringEnterFlags::REGISTERED_RING;
        // SAFETY: what the entry points to is the business of whoever submitted it.
        unsafe { io_uring_enter(ring, submit, complete, flags) }
    }

    /// Submits a request. If that fails nothing is in flight.
    ///
    /// # Errors
    /// The kernel's; EINVAL in a task that the ring is not of.
    ///
    /// # Safety
    /// No other request is in flight, and what `entry` points to stays as it is until this one's result
    /// is taken.
    pub(crate) unsafe fn submit(&self, entry: io_uring_sqe) -> Result<(), Errno> {
        let (head, tail) = (word(&self.submission_head), word(&self.submission_tail));
        let place = tail.load(Ordering::Relaxed);
        // SAFETY: the ring's one entry, which the kernel reads only during `enter`.
        unsafe { self.submission.write(entry) };
        tail.store(place.wrapping_add(1), Ordering::Release);
        let result = self.enter(1, 0, IoringEnterFlags::empty());
        if head.load(Ordering::Acquire) == place {
            // It was not taken, and must not be by a later call.
            tail.store(place, Ordering::Release);
            return Err(result.err().unwrap_or(Errno::AGAIN));
        }
        Ok(())
    }

    /// Takes the result of the request if it has ended: bytes, or a negated error number.
    pub(crate) fn peek(&self) -> Option<i32> {
        if let Some(result) = self.take() {
            return Some(result);
        }
        let flags = word(&self.submission_flags).load(Ordering::Relaxed);
        if !IoringSqFlags::from_bits_retain(flags).contains(IoringSqFlags::TASKRUN) {
            return None;
        }
        // An error is met again at the next look.
        let _ = self.enter(0, 0, IoringEnterFlags::GETEVENTS);
        self.take()
    }

    /// Sleeps until the request has ended. The thread's signals are blocked.
    pub(crate) fn wait(&self) -> i32 {
        loop {
            if let Some(result) = self.peek() {
                return result;
            }
            match self.enter(0, 1, IoringEnterFlags::GETEVENTS) {
                // Stopped and continued, or traced.
                Ok(_) | Err(Errno::INTR) => {}
                // A sandbox that another thread put on all of them during the call refuses it. The kernel
                // still has the program's memory, so there is nothing but to try again.
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    fn take(&self) -> Option<i32> {
        let (head, tail) = (word(&self.completion_head), word(&self.completion_tail));
        let place = head.load(Ordering::Relaxed);
        // Acquire: the kernel's store of the tail comes after the entry's.
        if tail.load(Ordering::Acquire) == place {
            return None;
        }
        // SAFETY: masked, the place is within the ring.
        let entry = unsafe { self.completions.add((place & self.completion_mask) as usize) };
        // SAFETY: the kernel has written the entry and does not touch it until it is given back.
        let result = unsafe { entry.as_ref() }.res;
        head.store(place.wrapping_add(1), Ordering::Release);
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::ptr::null_mut;

    use rustix::io_uring::IoringOp;
    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;

    /// A ring on pages that are never unmapped; without one the test is skipped by name.
    fn ring(test: &str) -> Option<Ring> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new memory.
        let pages = unsafe {
            rustix::mm::mmap_anonymous(null_mut(), 2 << 16, protection, MapFlags::PRIVATE)
        };
        let indices = NonNull::new(pages.unwrap()).unwrap().cast::<u8>();
        // SAFETY: within the memory.
        let entries = unsafe { indices.add(1 << 16) };
        // SAFETY: zeroes, and nobody else's.
        match unsafe { Ring::new(indices, entries) } {
            Ok(ring) => Some(ring),
            Err(error) => {
                // Past the test harness, which would hide it.
                let why = "needs a ring without a descriptor (Linux 6.5)";
                let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}: {error}");
                None
            }
        }
    }

    fn nothing() -> io_uring_sqe {
        io_uring_sqe { opcode: IoringOp::Nop, ..io_uring_sqe::default() }
    }

    #[test]
    fn requests_are_answered_one_after_the_other() {
        let Some(ring) = ring("requests_are_answered_one_after_the_other") else { return };
        assert_eq!(ring.peek(), None);
        for i in 0..100 {
            // SAFETY: points to nothing.
            unsafe { ring.submit(nothing()) }.unwrap();
            assert_eq!(if i % 2 == 0 { ring.wait() } else { ring.peek().unwrap() }, 0);
            assert_eq!(ring.peek(), None);
        }
    }

    #[test]
    fn another_task_cannot_submit_and_leaves_nothing_to_be_submitted_later() {
        let test = "another_task_cannot_submit_and_leaves_nothing_to_be_submitted_later";
        let Some(ring) = ring(test) else { return };
        struct Lent<'a>(&'a Ring);
        // SAFETY: the owner waits while it is lent.
        unsafe impl Send for Lent<'_> {}
        let lent = Lent(&ring);
        let refused = std::thread::scope(|scope| {
            // SAFETY: points to nothing.
            let stranger = scope.spawn(move || unsafe { { lent }.0.submit(nothing()) });
            stranger.join().unwrap()
        });
        assert_eq!(refused, Err(Errno::INVAL));
        // SAFETY: points to nothing.
        unsafe { ring.submit(nothing()) }.unwrap();
        assert_eq!(ring.wait(), 0);
        assert_eq!(ring.peek(), None, "one request, one answer");
    }

    #[test]
    fn ring_has_no_descriptor() {
        let count = || {
            std::fs::read_dir("/proc/self/fd")
                .unwrap()
                .filter(|entry| {
                    let target = std::fs::read_link(entry.as_ref().unwrap().path());
                    target.is_ok_and(|target| target.to_string_lossy().contains("io_uring"))
                })
                .count()
        };
        let Some(_ring) = ring("ring_has_no_descriptor") else { return };
        assert_eq!(count(), 0);
    }
}
