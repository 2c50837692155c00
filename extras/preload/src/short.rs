//! The short path of one call.
//!
//! In order, each step cheaper than what it may save: the hint of the descriptor's number; the thread's
//! leave to spin; what the descriptor is; then, with the thread's signals blocked, submission and waiting.
//!
//! Where the process has slots at a data plane, what the descriptor is comes first: if it is their disk, the
//! call goes by a slot, with leave to spin or without.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use rustix::io::ReadWriteFlags;
use rustix::io_uring::{IoringOp, io_uring_ptr, io_uring_sqe};

use crate::process::Shared;
use crate::signals::Signals;
use crate::slots::Answer;
use crate::statistics::Way;
use crate::thread::{Page, Thread};
use crate::{hints, identity, process, thread};

unsafe extern "C-unwind" {
    /// pthread_testcancel(3): unwinds the thread, all frames of it, if it was cancelled.
    fn pthread_testcancel();
}

/// Linux transfers at most so many bytes in a call (`MAX_RW_COUNT`).
const MAX_BYTES: usize = 0x7fff_f000;
/// Linux takes at most so many segments in a call (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// Where they come from or go to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Memory {
    /// Address and bytes.
    Buffer(*mut c_void, usize),
    /// Address and number of segments. The program's: to be read only once the kernel has.
    Segments(*const libc::iovec, usize),
}

/// A positional call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) direction: Direction,
    pub(crate) fd: c_int,
    pub(crate) memory: Memory,
    pub(crate) offset: i64,
}

/// What became of a call here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All bytes were transferred, by the way that is named.
    Done(usize, Way),
    /// A write that the process's limit on file sizes forbids; the kernel has sent SIGXFSZ already.
    TooLarge,
    /// The plain call is to be made; what for is only for the statistics.
    Plain(Way),
}

impl Call {
    /// Whether a ring could take it. What is not usual is for the plain call to answer.
    fn is_usual(&self) -> bool {
        let some = match self.memory {
            Memory::Buffer(_, bytes) => (1..=MAX_BYTES).contains(&bytes),
            Memory::Segments(_, count) => (1..=MAX_SEGMENTS).contains(&count),
        };
        // To a ring the offset −1 is the file's position.
        some && self.offset >= 0
    }

    /// As a submission. The request may not wait for anything but the device: the kernel would
    /// hand it to a worker thread of its own, a new thread of the program.
    fn entry(&self) -> io_uring_sqe {
        let mut entry = io_uring_sqe::default();
        let (opcode, address, length) = match (self.direction, self.memory) {
            (Direction::Read, Memory::Buffer(at, bytes)) => (IoringOp::Read, at, bytes),
            (Direction::Write, Memory::Buffer(at, bytes)) => (IoringOp::Write, at, bytes),
            (Direction::Read, Memory::Segments(at, count)) => {
                (IoringOp::Readv, at.cast_mut().cast(), count)
            }
            (Direction::Write, Memory::Segments(at, count)) => {
                (IoringOp::Writev, at.cast_mut().cast(), count)
            }
        };
        entry.opcode = opcode;
        entry.fd = self.fd;
        entry.off_or_addr2.off = self.offset as u64;
        entry.addr_or_splice_off_in.addr = io_uring_ptr::new(address);
        entry.len.len = length as u32;
        entry.op_flags.rw_flags = ReadWriteFlags::NOWAIT;
        entry
    }

    /// Does something with each segment: its address and bytes.
    ///
    /// # Safety
    /// The segments can be read.
    pub(crate) unsafe fn each_segment(&self, mut act: impl FnMut(*mut u8, usize)) {
        match self.memory {
            Memory::Buffer(at, bytes) => act(at.cast(), bytes),
            Memory::Segments(at, count) => {
                for i in 0..count {
                    // SAFETY: by the caller's promise.
                    let segment = unsafe { at.add(i) };
                    // The program may have aligned them or not.
                    // SAFETY: by the caller's promise.
                    let segment = unsafe { segment.read_unaligned() };
                    act(segment.iov_base.cast(), segment.iov_len);
                }
            }
        }
    }

    /// Bytes that were asked for.
    ///
    /// # Safety
    /// The segments can be read: the kernel has done so.
    unsafe fn bytes(&self) -> usize {
        let mut sum = 0_usize;
        // SAFETY: by the caller's promise.
        unsafe { self.each_segment(|_, bytes| sum = sum.wrapping_add(bytes)) };
        sum
    }
}

/// Sends a call down the short path, or says why not.
///
/// # Safety
/// The call's memory is what the program passed to the function that this is for.
pub(crate) unsafe fn attempt(call: &Call) -> Outcome {
    let Some(shared) = process::armed() else { return Outcome::Plain(Way::Passed) };
    if !call.is_usual() || !hints::may_ask(call.fd, call.direction) {
        return Outcome::Plain(Way::Passed);
    }
    // The plain call is a cancellation point: a thread that was cancelled ends before it does anything. No
    // frame from here to the program has a destructor.
    // SAFETY: no conditions.
    unsafe { pthread_testcancel() };
    let page = match thread::page() {
        Some(page) => Some(page),
        // Only a thread that does direct I/O gets one.
        None if identity::is_for_the_ring(call.fd, call.direction) => thread::new_page(),
        None => {
            hints::back_off(call.fd, call.direction);
            None
        }
    };
    let Some(page) = page else { return Outcome::Plain(Way::Passed) };
    // As long as anything is used that a forked child gets as zeroes, and the page is occupied: a handler
    // that jumps away would leave that so, and the child of one that forks returns into this call.
    let blocked = Signals::block();
    // SAFETY: by the caller's promise.
    let outcome = unsafe { attempt_blocked(page, shared, call) };
    drop(blocked);
    outcome
}

/// The same, with the thread's signals blocked.
///
/// # Safety
/// As of [`attempt`].
unsafe fn attempt_blocked(page: &Page, shared: &Shared, call: &Call) -> Outcome {
    if let Some(address) = &shared.settings.slots
        && let Some(place) = process::slots()
        && let Some(slots) = place.connection(address)
    {
        let Some(file) = identity::look(call.fd, call.direction) else {
            hints::back_off(call.fd, call.direction);
            return Outcome::Plain(Way::Passed);
        };
        // SAFETY: by the caller's promise, or the program ends here: docs/run.md says so.
        if unsafe { slots.takes(&file, call) } {
            // SAFETY: as above.
            let outcome =
                with_thread(page, shared, |thread| unsafe { slots.transfer(place, thread, call) });
            if let Some(Answer { bytes, parked }) = outcome.flatten() {
                return answered(call, bytes, if parked { Way::SlotParked } else { Way::Slot });
            }
        }
    }
    let by_ring = |thread: &mut Thread| {
        if let Some(lasted) = page.lasted() {
            thread.spinner.learn(lasted);
        }
        if thread.ring.is_none() || !thread.spinner.may_spin() {
            return Outcome::Plain(Way::WithoutToken);
        }
        if !identity::is_for_the_ring(call.fd, call.direction) {
            hints::back_off(call.fd, call.direction);
            return Outcome::Plain(Way::Passed);
        }
        // SAFETY: by the caller's promise.
        unsafe { by_ring(thread, call) }
    };
    with_thread(page, shared, by_ring).unwrap_or(Outcome::Plain(Way::WithoutToken))
}

/// The plain call lasted so long in the place of a short one: what is known of the device follows, at the next
/// call.
pub(crate) fn learn(lasted: Duration) {
    if let (Some(_), Some(page)) = (process::armed(), thread::page()) {
        page.set_lasted(lasted.into());
    }
}

/// Does something with what the calling thread has; `None`: it has no ring, or is at it already, below a signal
/// handler. If that handler does not return, which is rare in so short a time, the thread's calls stay plain.
fn with_thread<R>(page: &Page, shared: &Shared, act: impl FnOnce(&mut Thread) -> R) -> Option<R> {
    if !page.occupy() {
        return None;
    }
    // SAFETY: occupied.
    let result = unsafe { page.thread(shared) }.map(act);
    page.vacate();
    result
}

/// Submits, and waits. The thread's signals are blocked.
///
/// # Safety
/// As of [`attempt`].
unsafe fn by_ring(thread: &mut Thread, call: &Call) -> Outcome {
    let mut parked = false;
    let Some(ring) = &thread.ring else { return Outcome::Plain(Way::Passed) };
    // SAFETY: this thread's only request, waited for below with the signals blocked, so that nothing takes
    // the program's memory away before; what a second thread does to it, it would do to the plain call too.
    let submitted = unsafe { ring.submit(call.entry()) };
    let result = submitted.map(|()| {
        thread.spinner.wait(
            || ring.peek(),
            || {
                parked = true;
                ring.wait()
            },
        )
    });
    if result == Ok(-libc::EFBIG) {
        return Outcome::TooLarge;
    }
    let bytes = result.ok().and_then(|result| usize::try_from(result).ok());
    // SAFETY: the kernel transferred something, so it could read the segments.
    let bytes = bytes.filter(|&bytes| bytes > 0 && bytes == unsafe { call.bytes() });
    answered(call, bytes, if parked { Way::Parked } else { Way::Spun })
}

/// The bytes of a call that was answered in full, by that way; or it was not.
fn answered(call: &Call, bytes: Option<usize>, way: Way) -> Outcome {
    match bytes {
        Some(bytes) => {
            hints::answered(call.fd, call.direction);
            Outcome::Done(bytes, way)
        }
        None => {
            hints::back_off(call.fd, call.direction);
            Outcome::Plain(Way::Refused)
        }
    }
}
