//! The process's slots at a data plane, for the one disk that this serves.
//!
//! Where `rtvirtio-run` names a socket, the first direct call of the process connects to it and maps the slots.
//! A call on the very file or block device of the disk is then a line of shared memory and a copy of its bytes:
//! the data plane's thread, which polls for all processes, does the rest. Whoever has no token sleeps on the
//! line; the thread that polls wakes it.
//!
//! The plain call is the authority here too: whatever is not answered with all bytes is asked again. That may be
//! twice the same read or write, of which the first has ended before the second begins: it has, if the data plane
//! says that it is over or has not begun it; if it was killed, the kernel may still be at what it had begun, as
//! after the end of any process that writes.
//!
//! Of the descriptors a connection needs, one stays: the socket, under a high number, by whose end the data plane
//! learns that the process has gone. It is never read or written, only asked for its state, so a program that has
//! something else under that number is not disturbed. A program that closes it loses its slots. A forked child
//! closes its copy (else it would keep its parent's slots), does not have its parent's slots mapped, and gets its
//! own when it needs some. A child by vfork shares everything with its parent until it calls exec, the slots too.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rtvirtio_completion::slots::{Direction as SlotDirection, Offer, SLOT_BYTES, SlotMemory};
use rtvirtio_completion::{Slot, Ticket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, Resource, getrlimit, test_kill_process};

use crate::identity::File;
use crate::short::{Call, Direction};
use crate::signals::Signals;
use crate::thread::Thread;

/// How long the data plane may take to answer a process that connects: longer than it waits for the image's lock, which the
/// requests of a server that was killed hold for a moment.
const ANSWER: Duration = Duration::from_secs(3);
/// How often who sleeps looks whether the data plane is still there.
const ALIVE: Duration = Duration::from_millis(100);
/// The same of who spins without end, in looks.
const ALIVE_LOOKS: u32 = 1 << 16;
/// The socket's number is at least this, or half of what the process may have.
const APART: u64 = 1_000;

/// Zero in a forked child.
const NEW: u32 = 0;
const CONNECTING: u32 = 1;
const READY: u32 = 2;
/// There are no slots to be had, or no more.
const WITHOUT: u32 = 3;

/// The process's socket, for children: number, and what it is.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static SOCKET_DEVICE: AtomicU64 = AtomicU64::new(0);
static SOCKET_INODE: AtomicU64 = AtomicU64::new(0);

/// The process that may connect: the one that has loaded the library, or a child that fork(3) has made of it.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Notes the calling process as the one that may connect.
pub(crate) fn own() {
    OWNER.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Relaxed);
}

/// Where a connection lies: on the page that a forked child gets as zeroes.
pub(crate) struct Place {
    state: AtomicU32,
    /// Set if `state` is or was [`READY`].
    connection: UnsafeCell<MaybeUninit<Connection>>,
}

/// A connection to a data plane.
pub(crate) struct Connection {
    memory: SlotMemory,
    offer: Offer,
    /// `None` in tests.
    socket: Option<Apart>,
    /// The data plane's process; 0: it cannot be seen from here.
    poller: libc::pid_t,
}

/// The data plane has gone.
struct Gone;

/// How a call went that took a slot.
pub(crate) struct Answer {
    /// Bytes that were transferred, if it was all that was asked for.
    pub(crate) bytes: Option<usize>,
    pub(crate) parked: bool,
}

impl Place {
    /// The process's slots, asked for if they have not been.
    pub(crate) fn connection(
        &'static self,
        address: &SocketAddrUnix,
    ) -> Option<&'static Connection> {
        match self.state.load(Ordering::Acquire) {
            READY => {}
            NEW => self.connect(address)?,
            _ => return None,
        }
        // SAFETY: written before the state was READY, and not again.
        let connection = unsafe { &*self.connection.get() };
        // SAFETY: as above.
        Some(unsafe { connection.assume_init_ref() })
    }

    /// Connects, unless a thread is at it.
    fn connect(&self, address: &SocketAddrUnix) -> Option<()> {
        // A child by vfork has its parent's memory and descriptors of its own: the connection would be the parent's, and end with
        // the child.
        if OWNER.load(Ordering::Relaxed) != rustix::process::getpid().as_raw_nonzero().get() {
            return None;
        }
        // A handler that jumps away would leave it half done, and so would the end of the thread, if it is
        // cancelled: the C library's close(2), for one, looks.
        let _blocked = Signals::block();
        let _uncancelled = Uncancelled::new();
        let (relaxed, order) = (Ordering::Relaxed, Ordering::Acquire);
        self.state.compare_exchange(NEW, CONNECTING, order, relaxed).ok()?;
        let connection = Connection::new(address);
        let state = if connection.is_some() { READY } else { WITHOUT };
        if let Some(connection) = connection {
            // SAFETY: whoever made the state CONNECTING is alone here until it is READY.
            let place = unsafe { &mut *self.connection.get() };
            place.write(connection);
        }
        self.state.store(state, Ordering::Release);
        (state == READY).then_some(())
    }

    /// The data plane has gone: calls take other ways.
    fn leave(&self) {
        self.state.store(WITHOUT, Ordering::Relaxed);
    }
}

unsafe extern "C" {
    /// pthread_setcancelstate(3), which the crate libc leaves out for glibc.
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_DISABLE of glibc's pthread.h.
const DISABLE: c_int = 1;

/// The calling thread is not cancelled until this is dropped.
struct Uncancelled(c_int);

impl Uncancelled {
    fn new() -> Self {
        let mut old = 0;
        // SAFETY: `old` takes the state that was.
        unsafe { pthread_setcancelstate(DISABLE, &mut old) };
        Self(old)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: as before.
        unsafe { pthread_setcancelstate(self.0, &mut 0) };
    }
}

/// In a forked child: lets go of its copy of the parent's socket.
pub(crate) fn forked() {
    own();
    let number = SOCKET.swap(-1, Ordering::Relaxed);
    let parents = (SOCKET_DEVICE.load(Ordering::Relaxed), SOCKET_INODE.load(Ordering::Relaxed));
    if number >= 0 && identity(number) == Some(parents) {
        // SAFETY: it is the library's, as of before the fork; the child has one thread.
        unsafe { rustix::io::close(number) };
    }
}

/// What is under a number, as far as it tells a socket from others.
fn identity(number: RawFd) -> Option<(u64, u64)> {
    // SAFETY: only asked about, whosever it is.
    let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) }).ok()?;
    Some((status.st_dev, status.st_ino))
}

/// The process's socket under its high number: closed when dropped, unless the program has put something else there.
struct Apart {
    number: RawFd,
    identity: (u64, u64),
}

impl Apart {
    /// From here on a forked child lets go of it. Made before anything is waited for: a low number is the program's to close
    /// and to reuse at any time.
    fn new() -> Option<Self> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let low = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).ok()?;
        let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let number = APART.min(most / 2) as RawFd;
        let identity = identity(low.as_raw_fd())?;
        let number = rustix::io::fcntl_dupfd_cloexec(&low, number).ok()?.into_raw_fd();
        SOCKET_DEVICE.store(identity.0, Ordering::Relaxed);
        SOCKET_INODE.store(identity.1, Ordering::Relaxed);
        SOCKET.store(number, Ordering::Relaxed);
        Some(Self { number, identity })
    }
}

impl AsFd for Apart {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the number is the library's own; if the program changes that, a stranger is asked, and refuses.
        unsafe { BorrowedFd::borrow_raw(self.number) }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        SOCKET.store(-1, Ordering::Relaxed);
        if identity(self.number) == Some(self.identity) {
            // SAFETY: it is still the one that was made here.
            unsafe { rustix::io::close(self.number) };
        }
    }
}

impl Connection {
    fn new(address: &SocketAddrUnix) -> Option<Self> {
        let socket = Apart::new()?;
        for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&socket, direction, Some(ANSWER)).ok()?;
        }
        rustix::net::connect(&socket, address).ok()?;
        let (offer, memory) = receive(&socket)?;
        let memory = SlotMemory::map(memory).ok()?;
        memory.keep_from_children().ok()?;
        let poller = peer(&socket);
        Some(Self { memory, offer, socket: Some(socket), poller })
    }

    /// Whether a call can go by a slot: on that disk, in a way in which the plain call would do it, too.
    ///
    /// # Safety
    /// The call's segments can be read.
    pub(crate) unsafe fn takes(&self, file: &File, call: &Call) -> bool {
        let block = u64::from(self.offer.block);
        let is_write = call.direction == Direction::Write;
        if file.identity != self.offer.file || !file.is_open_for || is_write && self.offer.read_only
        {
            return false;
        }
        let (mut bytes, mut places) = (0_usize, call.offset as u64);
        // SAFETY: by the caller's promise.
        unsafe {
            call.each_segment(|at, length| {
                bytes = bytes.saturating_add(length);
                places |= at.addr() as u64 | length as u64;
            });
        }
        if !(1..=SLOT_BYTES).contains(&bytes) || !places.is_multiple_of(block) {
            return false;
        }
        // A process's limit on the size of files acts on writes within them.
        let end = (call.offset as u64).saturating_add(bytes as u64);
        !is_write
            || file.identity.block
            || getrlimit(Resource::Fsize).current.is_none_or(|limit| end <= limit)
    }

    /// Sends a call that [`Self::takes`] by a slot, and waits. `None`: all slots are taken, or the data plane has
    /// gone. The thread's signals are blocked.
    ///
    /// # Safety
    /// The call's memory is what the program passed, and as when it was asked about.
    pub(crate) unsafe fn transfer(
        &self,
        place: &Place,
        thread: &mut Thread,
        call: &Call,
    ) -> Option<Answer> {
        let slots = self.memory.slots();
        let (index, ticket) = slots.claim(thread.slot)?;
        let slot = slots.get(index)?;
        thread.slot = index;
        let data = self.memory.data(index);
        // SAFETY: by the caller's promise; the slot's data is this request's until the slot is free.
        let length = unsafe { copy(call, data, None) };
        let Some(length) = length else {
            // The program has changed its segments meanwhile.
            slot.reclaim();
            return None;
        };
        let way = match call.direction {
            Direction::Read => SlotDirection::Read,
            Direction::Write => SlotDirection::Write,
        };
        slots.tell(index, way, call.offset as u64, length);
        let (mut parked, mut looks) = (false, 0_u32);
        let result = thread.slot_spinner.wait(
            || {
                looks = looks.wrapping_add(1);
                let over = looks.is_multiple_of(ALIVE_LOOKS) && self.is_gone();
                slot.look(ticket).map(Ok).or_else(|| over.then_some(Err(Gone)))
            },
            || {
                parked = true;
                self.park(slot, ticket)
            },
        );
        let Ok(result) = result else {
            place.leave();
            return None;
        };
        let is_whole = u32::try_from(result) == Ok(length);
        if is_whole && call.direction == Direction::Read {
            // SAFETY: as above.
            unsafe { copy(call, data, Some(length)) };
        }
        // Now it is free for another thread.
        let _ = slot.take(ticket);
        Some(Answer { bytes: is_whole.then_some(length as usize), parked })
    }

    /// Sleeps until the request has ended.
    fn park<T>(&self, slot: &Slot<true, T>, ticket: Ticket) -> Result<i32, Gone> {
        loop {
            if let Some(result) = slot.watch(ticket, Some(ALIVE)) {
                return Ok(result);
            }
            if self.is_gone() {
                // It may have ended just before.
                return slot.look(ticket).ok_or(Gone);
            }
        }
    }

    /// Whether the data plane serves the slots no more, and nothing of them is in flight there.
    fn is_gone(&self) -> bool {
        if self.memory.slots().has_ended() {
            return true;
        }
        let socket = self.socket.as_ref();
        if let Some(socket) = socket.filter(|own| identity(own.number) == Some(own.identity)) {
            let mut state = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::empty())];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let over = PollFlags::HUP | PollFlags::ERR;
            // It hangs up when it has drained what it had, or dies.
            return poll(&mut state, Some(&now)) == Ok(1) && state[0].revents().intersects(over);
        }
        // The program has closed it. The data plane drains, and says when it has, unless it dies meanwhile.
        let poller = Pid::from_raw(self.poller);
        poller.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// Copies a call's bytes: those of a write into the slot, of a read, which has `answered`, out of it. How many
/// there are; `None`: none, or too many.
///
/// # Safety
/// The call's memory is what the program passed, and `data` has room for [`SLOT_BYTES`].
unsafe fn copy(call: &Call, data: NonNull<u8>, answered: Option<u32>) -> Option<u32> {
    let most = answered.map_or(SLOT_BYTES, |length| length as usize);
    let mut done = 0_usize;
    let each = |at: *mut u8, length: usize| {
        let fits = length.min(most.saturating_sub(done));
        // SAFETY: `done` is at most SLOT_BYTES here, or nothing fits.
        let inside = unsafe { data.as_ptr().add(done.min(most)) };
        match (call.direction, answered) {
            // SAFETY: the program's memory, as it says, and the slot's, which are apart.
            (Direction::Write, None) => unsafe { inside.copy_from_nonoverlapping(at, fits) },
            // SAFETY: as above.
            (Direction::Read, Some(_)) => unsafe { inside.copy_to_nonoverlapping(at, fits) },
            _ => {}
        }
        done = done.saturating_add(length);
    };
    // SAFETY: by the caller's promise.
    unsafe { call.each_segment(each) };
    (1..=most).contains(&done).then_some(done as u32)
}

/// The offer and the memory's descriptor.
fn receive(socket: &Apart) -> Option<(Offer, OwnedFd)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; Offer::BYTES];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut control, flags).ok()?;
    let memory = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })?;
    (received.bytes == Offer::BYTES).then_some(())?;
    Some((Offer::from_bytes(&bytes)?, memory))
}

/// The process at the other end; 0: it cannot be seen from here.
fn peer(socket: &Apart) -> libc::pid_t {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // Not rustix's: its type has no room for the 0 of a process in another PID name space.
    // SAFETY: the kernel writes at most `length` bytes to a structure of that size.
    unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    peer.pid
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use rtvirtio_completion::slots::FileIdentity;

    use super::*;
    use crate::short::Memory;

    const DISK: FileIdentity = FileIdentity { block: true, device: 0x801, inode: 0 };

    fn connection(read_only: bool) -> Connection {
        let (memory, _) = SlotMemory::create().unwrap();
        let offer = Offer { file: DISK, read_only, block: 512 };
        Connection { memory, offer, socket: None, poller: 0 }
    }

    fn call(direction: Direction, at: usize, bytes: usize, offset: i64) -> Call {
        let memory = Memory::Buffer(null_mut::<u8>().wrapping_add(at).cast(), bytes);
        Call { direction, fd: 3, memory, offset }
    }

    #[test]
    fn call_takes_a_slot_only_where_the_plain_call_would_do_it() {
        let file = File { identity: DISK, is_open_for: true };
        let takes = |connection: &Connection, file: File, call: Call| {
            // SAFETY: a buffer, which is not read.
            unsafe { connection.takes(&file, &call) }
        };
        let writable = connection(false);
        for direction in [Direction::Read, Direction::Write] {
            assert!(takes(&writable, file, call(direction, 4096, 512, 0)));
            assert!(takes(&writable, file, call(direction, 512, 128 << 10, 1 << 40)));
            // Too long; then address, length and offset that direct I/O refuses.
            for (at, bytes, offset) in
                [(512, (128 << 10) + 512, 0), (513, 512, 0), (512, 513, 0), (512, 512, 256)]
            {
                assert!(
                    !takes(&writable, file, call(direction, at, bytes, offset)),
                    "{at} {bytes}"
                );
            }
            let good = call(direction, 512, 512, 0);
            assert!(!takes(&writable, File { is_open_for: false, ..file }, good));
            for other in [
                FileIdentity { device: 0x802, ..DISK },
                FileIdentity { block: false, ..DISK },
                FileIdentity { inode: 1, ..DISK },
            ] {
                assert!(!takes(&writable, File { identity: other, ..file }, good), "{other:?}");
            }
        }
        let read_only = connection(true);
        assert!(takes(&read_only, file, call(Direction::Read, 512, 512, 0)));
        assert!(!takes(&read_only, file, call(Direction::Write, 512, 512, 0)));
    }

    /// What a program's other thread does to its segments meanwhile, nobody can know.
    #[test]
    fn segments_are_copied_in_order_and_never_more_than_a_slot_holds() {
        let connection = connection(false);
        let data = connection.memory.data(62);
        let mut parts = [vec![1_u8; 512], vec![2; 1024], vec![3; 512]];
        let segments = parts
            .each_mut()
            .map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() });
        let memory = Memory::Segments(segments.as_ptr(), 3);
        let write = Call { direction: Direction::Write, fd: 3, memory, offset: 0 };
        // SAFETY: the segments are there, and so is the slot's data.
        assert_eq!(unsafe { copy(&write, data, None) }, Some(2048));
        // SAFETY: the slot's first bytes.
        let copied = unsafe { std::slice::from_raw_parts(data.as_ptr(), 2048) };
        assert_eq!(
            [copied[511], copied[512], copied[1535], copied[1536], copied[2047]],
            [1, 2, 2, 3, 3]
        );

        // SAFETY: the slot's first bytes.
        unsafe { data.write_bytes(9, 2048) };
        let read = Call { direction: Direction::Read, ..write };
        // Fewer were asked for than there is room for now.
        // SAFETY: as above.
        assert_eq!(unsafe { copy(&read, data, Some(1024)) }, None);
        assert_eq!((parts[0][511], parts[1][511], parts[1][512], parts[2][0]), (9, 9, 2, 3));

        let mut large = vec![0; 2 * SLOT_BYTES];
        let memory = Memory::Buffer(large.as_mut_ptr().cast(), large.len());
        let write = Call { memory, ..write };
        // SAFETY: as above.
        assert_eq!(unsafe { copy(&write, data, None) }, None);
    }
}
