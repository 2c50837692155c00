//! One thread's way to do its requests.
//!
//! What was found about rings. The interrupt does not write the completion but leaves it to the thread
//! that submitted, as task work: a timer's and a file's. A ring without flags interrupts that thread for
//! it even while it runs in user mode, so one that only looks at the completion queue sees it. With
//! `IORING_SETUP_DEFER_TASKRUN` it never does: that waits for a system call that asks for completions.
//! With `IORING_SETUP_COOP_TASKRUN` it is late (p90 13 µs more). Hence rings without flags; the test
//! `peeking_sees_completions_of_a_ring_without_flags` holds both ends. `IORING_OP_TIMEOUT` on the
//! thread's own ring is no device of 8 µs for one that spins, though: in a VM arming a timer costs exits,
//! and on 2 vCPUs the submission alone took 20.8 µs (median), with the completion there when it
//! returned, where an empty request took 0.43 µs. Spinning could save nothing there.

use std::cell::{RefCell, UnsafeCell};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use io_uring::{IoUring, opcode, squeue, types};
use rtvirtio_completion::{Costs, Spinner, Tokens};
use rtvirtio_units::Nanos;
use rustix::thread::{ClockId, clock_nanosleep_absolute};
use rustix::time::{Timespec, clock_gettime};

use super::{Mode, Target};

/// How long the emulated device takes, ns.
const EMULATED_NS: u32 = 8_000;
/// How long a kernel thread that polls for submissions goes on in vain, ms: longer than any request.
const POLLER_IDLE_MS: u32 = 100;
/// Requests that a ring holds: one is in flight.
const ENTRIES: u32 = 2;

/// Memory that direct I/O takes, and that the kernel writes to.
#[repr(C, align(4096))]
struct Page(UnsafeCell<[u8; 4096]>);

/// How a request's end was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By looking.
    Spun,
    /// Asleep.
    Parked,
}

/// One thread's ring and memory.
pub struct Requester<'a> {
    target: Target,
    mode: Mode,
    file: Option<&'a File>,
    // Before the memory: who drops a ring first never has the kernel write to what is gone.
    ring: Option<RefCell<IoUring>>,
    memory: Box<[Page]>,
    /// Where the kernel threads that poll rings read the emulated device's time from.
    time: Box<types::Timespec>,
}

impl<'a> Requester<'a> {
    /// `first` is the ring whose kernel thread the others share.
    ///
    /// # Errors
    /// If a ring cannot be had, or memory or file cannot be registered with it.
    pub fn new(
        target: Target,
        mode: Mode,
        file: Option<&'a File>,
        first: Option<RawFd>,
    ) -> Result<Self> {
        let pages = target.block() / size_of::<Page>();
        let memory: Box<[Page]> = (0..pages).map(|_| Page(UnsafeCell::new([0; 4096]))).collect();
        let by_clock = !target.is_file() && !matches!(mode, Mode::Sqpoll | Mode::SqpollShared);
        let ring = match mode {
            Mode::Pread => None,
            _ if by_clock => None,
            _ => Some(ring(mode, first)?),
        };
        if let (Some(ring), Some(file)) = (&ring, file) {
            ring.submitter().register_files(&[file.as_raw_fd()])?;
            let buffer = libc::iovec {
                iov_base: memory.as_ptr().cast_mut().cast(),
                iov_len: target.block(),
            };
            // SAFETY: the memory lives in this value, longer than the ring does.
            unsafe { ring.submitter().register_buffers(&[buffer]) }?;
        }
        let time = Box::new(types::Timespec::new().nsec(EMULATED_NS));
        let ring = ring.map(RefCell::new);
        Ok(Self { target, mode, file, ring, memory, time })
    }

    /// The ring, for others to share its kernel thread.
    pub fn ring(&self) -> Option<RawFd> {
        self.ring.as_ref().map(|ring| ring.borrow().as_raw_fd())
    }

    /// How the calling thread is to wait, where the project's room does that.
    pub fn spinner(&self, tokens: &Arc<Tokens>, costs: Costs) -> Option<Spinner> {
        let mode = match self.mode {
            Mode::Interrupt => rtvirtio_completion::Mode::Interrupt,
            Mode::Poll => rtvirtio_completion::Mode::Poll,
            Mode::Adaptive => rtvirtio_completion::Mode::Adaptive,
            Mode::Pread | Mode::PeekSpin | Mode::Sqpoll | Mode::SqpollShared => return None,
        };
        Some(Spinner::new(Arc::clone(tokens), mode, costs))
    }

    /// Does one request, from its submission to its end.
    ///
    /// # Errors
    /// If it fails, or reads less than a block.
    pub fn request(&self, mut spinner: Option<&mut Spinner>, offset: u64) -> Result<Ended> {
        let sleeps = match (self.mode, spinner.as_deref_mut()) {
            (Mode::Pread, _) => true,
            (Mode::Adaptive, Some(spinner)) => !spinner.may_spin(),
            _ => false,
        };
        if sleeps {
            let begin = Instant::now();
            self.call(offset)?;
            if let Some(spinner) = spinner {
                spinner.learn(Nanos::from(begin.elapsed()));
            }
            return Ok(Ended::Parked);
        }
        let Some(ring) = &self.ring else { return self.by_clock(spinner) };
        push(ring, &self.entry(offset))?;
        if matches!(self.mode, Mode::PeekSpin | Mode::Poll | Mode::Adaptive) {
            submit(ring)?;
        }
        let look = || peek(ring).map(|result| Ok((Ended::Spun, result)));
        let park = || park(ring).map(|result| (Ended::Parked, result));
        let (ended, result) = self.wait(spinner, look, park)?;
        self.check(result).map(|()| ended)
    }

    /// On the emulated device: its completion is there from a time on.
    fn by_clock(&self, spinner: Option<&mut Spinner>) -> Result<Ended> {
        let end = now() + u64::from(EMULATED_NS);
        let look = || (now() >= end).then_some(Ok(Ended::Spun));
        let park = || sleep_until(end).map(|()| Ended::Parked);
        self.wait(spinner, look, park)
    }

    /// Until what was submitted has ended.
    fn wait<T>(
        &self,
        spinner: Option<&mut Spinner>,
        mut look: impl FnMut() -> Option<Result<T>>,
        mut park: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match (spinner, self.mode) {
            (Some(spinner), _) => spinner.wait(look, park),
            (None, Mode::PeekSpin) => loop {
                if let Some(found) = look() {
                    return found;
                }
                std::hint::spin_loop();
            },
            (None, _) => park(),
        }
    }

    fn entry(&self, offset: u64) -> squeue::Entry {
        if self.file.is_none() {
            return opcode::Timeout::new(&raw const *self.time).build();
        }
        let (memory, length) = (self.memory.as_ptr().cast::<u8>(), self.target.block() as u32);
        opcode::ReadFixed::new(types::Fixed(0), memory.cast_mut(), length, 0).offset(offset).build()
    }

    fn check(&self, result: i32) -> Result<()> {
        let expected = if self.file.is_none() { -libc::ETIME } else { self.target.block() as i32 };
        match result {
            _ if result == expected => Ok(()),
            ..0 => Err(Error::from_raw_os_error(-result)),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    /// The plain call: it sleeps until the request has ended.
    fn call(&self, offset: u64) -> Result<()> {
        let Some(file) = self.file else {
            return sleep_until(now() + u64::from(EMULATED_NS));
        };
        let length = self.target.block();
        let memory = self.memory.as_ptr().cast_mut().cast();
        // SAFETY: the memory is this value's, as long as said, and nothing else reads or writes it: a
        // thread has one request at a time.
        let read = unsafe { libc::pread(file.as_raw_fd(), memory, length, offset as libc::off_t) };
        if read < 0 {
            return Err(Error::last_os_error());
        }
        self.check(read as i32)
    }
}

/// A ring without flags that put off task work: see the module's page.
fn ring(mode: Mode, first: Option<RawFd>) -> Result<IoUring> {
    let mut builder = IoUring::builder();
    if matches!(mode, Mode::Sqpoll | Mode::SqpollShared) {
        builder.setup_sqpoll(POLLER_IDLE_MS);
    }
    if let (Mode::SqpollShared, Some(first)) = (mode, first) {
        builder.setup_attach_wq(first);
    }
    builder.build(ENTRIES)
}

fn push(ring: &RefCell<IoUring>, entry: &squeue::Entry) -> Result<()> {
    let mut ring = ring.borrow_mut();
    // SAFETY: memory and time that it names live as long as the ring, and one request is in flight.
    let pushed = unsafe { ring.submission().push(entry) };
    pushed.map_err(|_| Error::other("a ring with nothing in flight is full"))
}

fn submit(ring: &RefCell<IoUring>) -> Result<()> {
    loop {
        match ring.borrow().submit() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn peek(ring: &RefCell<IoUring>) -> Option<i32> {
    ring.borrow_mut().completion().next().map(|entry| entry.result())
}

/// Submits what has not been, and sleeps until there is a completion.
fn park(ring: &RefCell<IoUring>) -> Result<i32> {
    loop {
        match ring.borrow().submit_and_wait(1) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        if let Some(result) = peek(ring) {
            return Ok(result);
        }
    }
}

/// CLOCK_MONOTONIC, ns.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Sleeps until then; a timer's interrupt ends that.
fn sleep_until(end: u64) -> Result<()> {
    let (seconds, ns) = (end / 1_000_000_000, end % 1_000_000_000);
    let until = Timespec { tv_sec: seconds.cast_signed(), tv_nsec: ns.cast_signed() };
    loop {
        match clock_nanosleep_absolute(ClockId::Monotonic, &until) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rtvirtio_engine::testing::{has_io_uring, skipped};

    use super::*;

    fn ended_within(ring: IoUring, time: Duration) -> bool {
        let ring = RefCell::new(ring);
        let delay = types::Timespec::new().nsec(EMULATED_NS);
        push(&ring, &opcode::Timeout::new(&raw const delay).build()).unwrap();
        submit(&ring).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < time {
            if let Some(result) = peek(&ring) {
                assert_eq!(result, -libc::ETIME);
                return true;
            }
        }
        assert_eq!(park(&ring).unwrap(), -libc::ETIME, "a system call finds it");
        false
    }

    #[test]
    fn peeking_sees_completions_of_a_ring_without_flags() {
        if !has_io_uring() {
            return;
        }
        let second = Duration::from_secs(1);
        assert!(ended_within(ring(Mode::Poll, None).unwrap(), second));
        // What the rings of this benchmark must not have.
        let deferred =
            IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(ENTRIES);
        match deferred {
            // Linux before 6.1 does not know the flags.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                skipped(format_args!("half of it needs IORING_SETUP_DEFER_TASKRUN: {error}"));
            }
            deferred => assert!(!ended_within(deferred.unwrap(), Duration::from_millis(20))),
        }
    }

    #[test]
    fn emulated_device_takes_its_time_and_short_reads_are_errors() {
        if !has_io_uring() {
            return;
        }
        rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)).unwrap();
        for mode in [Mode::Pread, Mode::PeekSpin, Mode::Sqpoll] {
            let requester = Requester::new(Target::Emulated, mode, None, None).unwrap();
            let ended = if mode == Mode::PeekSpin { Ended::Spun } else { Ended::Parked };
            let begin = Instant::now();
            (0..10).for_each(|_| assert_eq!(requester.request(None, 0).unwrap(), ended));
            assert!(begin.elapsed() >= Duration::from_micros(80), "{mode}");
            assert!(requester.check(0).is_err() && requester.check(-libc::EIO).is_err());
        }
    }
}
