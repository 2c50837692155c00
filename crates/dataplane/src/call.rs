//! How a driver is called: the fd of SET_VRING_CALL.
//!
//! A front end is hostile, and the IOThread that calls its driver serves others too. Two things keep it from
//! paying for a front end's fd:
//!
//! - Only what cannot block is taken: eventfds, and sockets of the UNIX family, which User Mode Linux passes.
//!   Writing to a pipe or a TCP socket waits, whatever its flags, for a lock that its owner may hold for ever.
//! - A write wakes everybody who waits for the fd, and the front end decides how many those are: 40,000
//!   epoll instances take 76 ms. The time of each call is looked at, and a device whose calls are dear is
//!   called by a thread of its own from then on ([`Caller`]).
//!
//! An eventfd blocks when its counter is full, which takes 2^64 - 2 calls or malice; [`Call::make_room`] frees
//! whoever is stuck in it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Relaxed, Release},
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

use rtvirtio_engine::AbortOnPanic;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, sockopt};
use rustix::time::{ClockId, clock_gettime};

use crate::clock::now;
use crate::key::QUEUES_MAX;

/// Why an fd cannot be used to call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Its kind could not be found out.
    #[error("the fd cannot be examined")]
    Examine(#[source] Errno),
    /// It is neither of the two kinds.
    #[error("the fd is neither an eventfd nor a UNIX socket")]
    Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Event,
    Socket,
    Pipe,
}

impl Kind {
    fn of(fd: &OwnedFd) -> Result<Self, CallError> {
        let stat = rustix::fs::fstat(fd).map_err(CallError::Examine)?;
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Socket => Self::Socket,
            FileType::Fifo => Self::Pipe,
            _ if is_eventfd(fd) => Self::Event,
            _ => return Err(CallError::Kind),
        })
    }
}

/// Whether an fd is of a kind that the kernel polls without asking anybody else: a file of FUSE,
/// for one, may take for ever.
pub(crate) fn is_signal(fd: &OwnedFd) -> bool {
    Kind::of(fd).is_ok()
}

/// A call that took an IOThread so long is looked into, ns. Its thread may have been without a CPU meanwhile,
/// most of all behind the write, which wakes the driver.
const SUSPECT: u64 = 200_000;
/// A call that takes so much CPU time is dear, ns.
const DEAR: u64 = 100_000;
/// How long a device is watched after a suspicious call: CPU time is measured then, which takes two more system
/// calls. Twice as long with each further one, 2^[`MAX_WATCHES`] times at most.
const WATCH: u64 = 1_000_000_000;
const MAX_WATCHES: u32 = 10;
/// How long a device is called aside after a dear call: four times as long with each further one.
const ASIDE: u64 = 100_000_000;
const MAX_STRIKES: u32 = 8;
/// After so long without another, one is forgotten.
const FORGET: u64 = 60_000_000_000;
/// A write that has held up a device's thread for so long is looked into by whoever calls next, ns.
const HELD_UP: u64 = 5_000_000;

/// Calls of a device that may be due: each of its queues has two descriptors, and one of each may just have been
/// replaced. The channel has room for them from the start, so that an IOThread allocates nothing.
const DUE: usize = 4 * QUEUES_MAX as usize;

/// How often something happened lately.
#[derive(Debug, Default)]
struct Record {
    times: AtomicU32,
    until: AtomicU64,
}

impl Record {
    fn holds(&self, now: u64) -> bool {
        now < self.until.load(Relaxed)
    }

    /// It happened again: it holds for as long as `time` says.
    fn again(&self, now: u64, most: u32, time: impl Fn(u32) -> u64) {
        let before = self.times.load(Relaxed);
        let forgotten = now.saturating_sub(self.until.load(Relaxed)) / FORGET;
        let before = before.saturating_sub(forgotten.try_into().unwrap_or(u32::MAX));
        self.until.store(now.saturating_add(time(before)), Relaxed);
        self.times.store((before + 1).min(most), Relaxed);
    }
}

/// Calls one device's drivers aside from its IOThreads, on a thread of its own: what is no eventfd, an eventfd
/// that has not been called yet, and all of them while the device's calls are dear. A device is known by what
/// its earlier front ends did.
#[derive(Debug, Default)]
pub struct Caller {
    /// None if there is no thread to be had.
    thread: OnceLock<Option<mpsc::SyncSender<Arc<Inner>>>>,
    watched: Record,
    aside: Record,
    /// Since when the thread has been writing, ns; 0: it is not.
    since: AtomicU64,
    /// What it is writing to.
    writing: Mutex<Option<Call>>,
}

impl Caller {
    fn thread(&self) -> Option<&mpsc::SyncSender<Arc<Inner>>> {
        let start = || {
            let (sender, due) = mpsc::sync_channel::<Arc<Inner>>(DUE);
            let thread = std::thread::Builder::new().name("call".to_owned()).stack_size(128 << 10);
            let thread = thread.spawn(move || {
                let _fatal = AbortOnPanic::new();
                while let Ok(call) = due.recv() {
                    call.call_aside();
                }
            });
            thread.is_ok().then_some(sender)
        };
        self.thread.get_or_init(start).as_ref()
    }

    fn suspect(&self, now: u64) {
        self.watched.again(now, MAX_WATCHES, |times| WATCH << times);
    }

    /// A call was dear.
    fn strike(&self, now: u64) {
        self.aside.again(now, MAX_STRIKES, |times| ASIDE << (2 * times));
    }

    /// The thread is about to write to this; `None`: it has written.
    fn set_writing(&self, call: Option<Call>) {
        let mut writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.since.store(if call.is_some() { now() } else { 0 }, Relaxed);
        *writing = call;
    }

    /// Frees the thread if it is held up: a front end may fill a counter once the thread has looked at it, and would keep
    /// the device's later front ends from being called, too. Does not wait. Looked at with each call, and by the watchdog: behind
    /// the last one there may be a driver that waits for what is due.
    pub(crate) fn free_thread(&self) {
        let since = self.since.load(Relaxed);
        if since == 0 || now().saturating_sub(since) < HELD_UP {
            return;
        }
        if let Ok(writing) = self.writing.try_lock()
            && let Some(call) = &*writing
        {
            call.make_room();
        }
    }

    /// Whether one of the device's calls was found dear. How long that counts is not asked: a busy machine may
    /// keep the one who asks from its CPU for longer.
    #[cfg(test)]
    pub(crate) fn has_strikes(&self) -> bool {
        self.aside.times.load(Relaxed) > 0
    }
}

#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    kind: Kind,
    caller: Arc<Caller>,
    /// Whether it was called once, and what that took is known.
    is_tried: AtomicBool,
    /// Whether the thread is about to call it.
    is_due: AtomicBool,
}

/// An fd that wakes the driver.
#[derive(Debug, Clone)]
pub struct Call(Arc<Inner>);

impl Call {
    /// Takes an fd of a front end of the device whose drivers `caller` calls.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn new(fd: OwnedFd, caller: &Arc<Caller>) -> Result<Self, CallError> {
        let kind = Kind::of(&fd)?;
        let is_unix = || sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX);
        if kind == Kind::Pipe || kind == Kind::Socket && !is_unix() {
            return Err(CallError::Kind);
        }
        // Not by an IOThread, whose CPUs and priority it would inherit.
        let has_thread = caller.thread().is_some();
        Ok(Self(Arc::new(Inner {
            fd,
            kind,
            caller: Arc::clone(caller),
            is_tried: AtomicBool::new(!has_thread),
            is_due: AtomicBool::new(false),
        })))
    }

    /// Calls the driver. A front end that does not listen any more is no error: its session ends.
    pub(crate) fn signal(&self) {
        let Inner { kind, caller, is_tried, .. } = &*self.0;
        let began = now();
        if *kind != Kind::Event || !is_tried.load(Relaxed) || caller.aside.holds(began) {
            return self.signal_aside();
        }
        if caller.watched.holds(began) {
            self.0.measured();
            return;
        }
        self.0.write();
        let ended = now();
        if ended - began > SUSPECT {
            caller.suspect(ended);
        }
    }

    /// The same by the device's own thread.
    pub(crate) fn signal_aside(&self) {
        self.0.caller.free_thread();
        // Who calls for what is due already calls for both.
        if self.0.is_due.swap(true, AcqRel) {
            return;
        }
        let sent =
            self.0.caller.thread().is_some_and(|due| due.try_send(Arc::clone(&self.0)).is_ok());
        if !sent {
            self.0.is_due.store(false, Release);
            self.0.write();
        }
    }

    /// Empties an eventfd's counter if it is full, so that a write that waits for room in it
    /// returns, and calls the driver after all. One that is not full makes nobody wait: what it
    /// counts are calls that the driver has not seen yet, and nothing would repeat them.
    pub(crate) fn make_room(&self) {
        let Inner { fd, kind, caller, .. } = &*self.0;
        if *kind != Kind::Event || !is_full(fd) {
            return;
        }
        caller.strike(now());
        // Without waiting: its front end may have emptied it in between.
        let _ = rustix::io::preadv2(
            fd,
            &mut [std::io::IoSliceMut::new(&mut [0; 8])],
            // The current position: an eventfd has none.
            u64::MAX,
            rustix::io::ReadWriteFlags::NOWAIT,
        );
    }
}

impl Inner {
    fn write(&self) {
        let one = 1u64.to_ne_bytes();
        let _ = match self.kind {
            Kind::Event => rustix::io::write(&self.fd, &one),
            Kind::Socket | Kind::Pipe => {
                rustix::net::send(&self.fd, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
            }
        };
    }

    /// The same, and remembers if it was dear.
    fn measured(&self) {
        let before = cpu_time();
        self.write();
        if cpu_time() - before > DEAR {
            self.caller.strike(now());
        }
    }

    fn call_aside(self: &Arc<Self>) {
        // Before the write: who comes later finds what is to be called for.
        self.is_due.store(false, Release);
        // A driver with a full counter has a call that it has not seen, and means harm: an IOThread is not to
        // meet that.
        if self.kind == Kind::Event && is_full(&self.fd) {
            self.caller.strike(now());
        } else {
            self.write_aside();
        }
        self.is_tried.store(true, Relaxed);
    }

    fn write_aside(self: &Arc<Self>) {
        self.caller.set_writing(Some(Call(Arc::clone(self))));
        self.measured();
        self.caller.set_writing(None);
    }
}

/// Whether an eventfd's counter is full.
fn is_full(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN | PollFlags::OUT)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut fds, Some(&zero)) != Ok(1) {
        return false;
    }
    let ready = fds[0].revents();
    ready.contains(PollFlags::IN) && !ready.contains(PollFlags::OUT)
}

/// Of this thread, ns.
fn cpu_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Whether the fd is an eventfd: what `poll` and `read` do with it is then bounded.
fn is_eventfd(fd: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::readlink(link, Vec::new())
        .is_ok_and(|target| target.as_bytes() == b"anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, epoll, eventfd};

    use super::*;

    /// Counts calls until there are so many.
    #[track_caller]
    fn counted(fd: &OwnedFd, calls: u64) {
        let began = Instant::now();
        let mut found = 0;
        while found < calls {
            let mut count = [0; 8];
            if rustix::io::read(fd, &mut count) == Ok(8) {
                found += u64::from_ne_bytes(count);
            }
            assert!(began.elapsed() < Duration::from_secs(20), "{found} of {calls} calls");
        }
        assert_eq!(found, calls);
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn eventfd_and_unix_socket_are_signalled_and_what_may_block_is_refused() {
        let caller = Arc::default();
        let event = event();
        let call = Call::new(event.try_clone().unwrap(), &caller).unwrap();
        for _ in 0..3 {
            call.signal();
            counted(&event, 1);
        }

        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        Call::new(ours.into(), &caller).unwrap().signal();
        assert_eq!(rustix::io::read(&theirs, &mut [0; 8]), Ok(8));

        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let file = std::fs::File::open("/dev/zero").unwrap();
        for fd in [writer, tcp.into(), listener.into(), file.into()] {
            assert!(matches!(Call::new(fd, &caller), Err(CallError::Kind)));
        }
    }

    #[test]
    fn full_socket_does_not_block_the_caller() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let call = Call::new(ours.into(), &Arc::default()).unwrap();
        // A socket holds some 200 KiB.
        (0..20_000).for_each(|_| call.0.call_aside());
    }

    #[test]
    fn eventfd_whose_calls_are_dear_is_called_aside_and_so_are_those_that_follow_it() {
        let caller = Arc::default();
        let event = event();
        let call = Call::new(event.try_clone().unwrap(), &caller).unwrap();
        call.signal();
        counted(&event, 1);
        while !call.0.is_tried.load(Relaxed) {
            std::thread::yield_now();
        }
        assert!(!caller.has_strikes());
        // Each instance that waits for it is woken by each call.
        const WAITING: u64 = 15_000;
        let limit = rustix::process::Rlimit {
            current: Some(WAITING + 2_000),
            maximum: Some(WAITING + 2_000),
        };
        let limited = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        if limited.current.is_some_and(|most| most < WAITING + 2_000)
            && rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).is_err()
        {
            let why = format!("needs {WAITING} descriptors (ulimit -n)");
            return rtvirtio_engine::testing::skipped(why);
        }
        let waiting: Vec<_> = (0..WAITING)
            .map(|_| {
                let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
                let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
                epoll::add(&epoll, &event, data, flags).unwrap();
                epoll
            })
            .collect();
        // The first one is suspicious and the second is measured, unless the machine is so busy that too much
        // time passes between the two.
        let dear = |_: &u64| {
            call.signal();
            caller.has_strikes()
        };
        let calls = (1..=20).find(dear).unwrap_or_else(|| {
            let before = cpu_time();
            call.0.write();
            panic!("a call takes {} ns", cpu_time() - before)
        });
        counted(&event, calls);
        drop(waiting);
        let next = Call::new(event.try_clone().unwrap(), &caller).unwrap();
        next.signal();
        counted(&event, 1);
    }

    #[test]
    fn record_of_what_happened_grows_and_is_forgotten() {
        let record = Record::default();
        let time = |times: u32| 100_u64 << times;
        record.again(1_000, 3, time);
        assert!(record.holds(1_099) && !record.holds(1_100));
        for _ in 0..5 {
            record.again(2_000, 3, time);
        }
        assert!(record.holds(2_799) && !record.holds(2_800));
        // One is forgotten each minute, and the clock does not wrap.
        record.again(2_800 + 2 * FORGET, 3, time);
        assert!(!record.holds(2_800 + 2 * FORGET + 200));
        record.again(u64::MAX - 10, 3, time);
        assert!(record.holds(u64::MAX - 1));
    }

    #[test]
    fn call_that_the_driver_has_not_seen_is_not_taken_away() {
        let event = event();
        let call = Call::new(event.try_clone().unwrap(), &Arc::default()).unwrap();
        let mut count = [0; 8];
        for counted in [1, 3, u64::MAX - 2] {
            rustix::io::write(&event, &counted.to_ne_bytes()).unwrap();
            call.make_room();
            rustix::io::read(&event, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), counted);
        }
    }

    #[test]
    fn full_eventfd_is_freed_by_making_room_and_calls_and_is_called_aside_then() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let caller = Arc::default();
        let call = Call::new(event.try_clone().unwrap(), &caller).unwrap();
        // The thread waits for nobody.
        call.0.call_aside();
        let stuck = call.clone();
        let thread = std::thread::spawn(move || stuck.0.write());
        std::thread::sleep(Duration::from_millis(20));
        call.make_room();
        thread.join().unwrap();
        let mut count = [0; 8];
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(caller.has_strikes());
    }

    /// What the thread had looked at before was not full.
    #[test]
    fn thread_that_a_full_eventfd_holds_up_is_freed_by_the_next_call() {
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let caller = Arc::default();
        let held_up = Call::new(full, &caller).unwrap();
        let next = Call::new(event(), &caller).unwrap();
        // It is of no use to the device's own thread, in whose place there is another one.
        next.0.is_due.store(true, Relaxed);
        let thread = std::thread::spawn(move || held_up.0.write_aside());
        let began = Instant::now();
        while !thread.is_finished() {
            next.signal_aside();
            std::thread::sleep(Duration::from_millis(1));
            assert!(began.elapsed() < Duration::from_secs(20), "the thread is held up");
        }
        thread.join().unwrap();
        assert!(caller.has_strikes());
    }

    /// As the watchdog looks, though no call follows.
    #[test]
    fn thread_that_is_held_up_is_freed_by_a_look() {
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let caller = Arc::default();
        let held_up = Call::new(full, &caller).unwrap();
        let thread = std::thread::spawn(move || held_up.0.write_aside());
        let began = Instant::now();
        while !thread.is_finished() {
            caller.free_thread();
            std::thread::sleep(Duration::from_millis(1));
            assert!(began.elapsed() < Duration::from_secs(20), "the thread is held up");
        }
        thread.join().unwrap();
    }
}
