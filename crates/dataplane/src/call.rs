//! How a driver is called: the fd of SET_VRING_CALL.
//!
//! A front end is hostile and the IOThread must not block on its fd. An eventfd blocks only when
//! its counter is full, which takes 2^64 - 2 calls or malice; [`Call::make_room`] frees whoever
//! is stuck in it. Sockets and pipes (User Mode Linux passes one) are written to without waiting.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::SendFlags;

/// Why an fd cannot be used to call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Its kind could not be found out.
    #[error("the fd cannot be examined")]
    Examine(#[source] Errno),
    /// It is none of the three kinds.
    #[error("the fd is neither an eventfd nor a pipe nor a socket")]
    Kind,
}

#[derive(Debug, Clone, Copy)]
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

/// An fd that wakes the driver.
#[derive(Debug, Clone)]
pub struct Call {
    fd: Arc<OwnedFd>,
    kind: Kind,
}

impl Call {
    /// Takes an fd of the front end.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn new(fd: OwnedFd) -> Result<Self, CallError> {
        let kind = Kind::of(&fd)?;
        Ok(Self { fd: Arc::new(fd), kind })
    }

    /// Calls the driver. A front end that does not listen any more is no error: its session ends.
    pub(crate) fn signal(&self) {
        let one = 1u64.to_ne_bytes();
        let _ = match self.kind {
            Kind::Event => rustix::io::write(&self.fd, &one),
            Kind::Socket => {
                rustix::net::send(&self.fd, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
            }
            Kind::Pipe => rustix::io::pwritev2(
                self.fd.as_fd(),
                &[std::io::IoSlice::new(&one)],
                // The current position: a pipe has none.
                u64::MAX,
                rustix::io::ReadWriteFlags::NOWAIT,
            ),
        };
    }

    /// Empties an eventfd's counter if it is full, so that a write that waits for room in it
    /// returns, and calls the driver after all. One that is not full makes nobody wait: what it
    /// counts are calls that the driver has not seen yet, and nothing would repeat them.
    pub(crate) fn make_room(&self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let mut fds = [PollFd::new(&*self.fd, PollFlags::IN | PollFlags::OUT)];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(self.kind, Kind::Event) || poll(&mut fds, Some(&zero)) != Ok(1) {
            return;
        }
        let ready = fds[0].revents();
        if ready.contains(PollFlags::IN) && !ready.contains(PollFlags::OUT) {
            // Without waiting: its front end may have emptied it in between.
            let _ = rustix::io::preadv2(
                &*self.fd,
                &mut [std::io::IoSliceMut::new(&mut [0; 8])],
                // The current position: an eventfd has none.
                u64::MAX,
                rustix::io::ReadWriteFlags::NOWAIT,
            );
        }
    }
}

/// Whether the fd is an eventfd: what `poll` and `read` do with it is then bounded.
fn is_eventfd(fd: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::readlink(link, Vec::new())
        .is_ok_and(|target| target.as_bytes() == b"anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn eventfd_pipe_and_socket_are_signalled_and_a_file_is_refused() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let call = Call::new(event.try_clone().unwrap()).unwrap();
        call.signal();
        call.signal();
        let mut count = [0; 8];
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);

        let (reader, writer) = rustix::pipe::pipe().unwrap();
        Call::new(writer).unwrap().signal();
        assert_eq!(rustix::io::read(&reader, &mut count), Ok(8));

        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        Call::new(ours.into()).unwrap().signal();
        assert_eq!(rustix::io::read(&theirs, &mut count), Ok(8));

        let file = std::fs::File::open("/dev/zero").unwrap();
        assert!(matches!(Call::new(file.into()), Err(CallError::Kind)));
    }

    #[test]
    fn full_pipe_does_not_block_the_caller() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let call = Call::new(writer).unwrap();
        // A pipe holds 64 KiB.
        (0..20_000).for_each(|_| call.signal());
    }

    #[test]
    fn call_that_the_driver_has_not_seen_is_not_taken_away() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let call = Call::new(event.try_clone().unwrap()).unwrap();
        let mut count = [0; 8];
        for counted in [1, 3, u64::MAX - 2] {
            rustix::io::write(&event, &counted.to_ne_bytes()).unwrap();
            call.make_room();
            rustix::io::read(&event, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), counted);
        }
    }

    #[test]
    fn full_eventfd_is_freed_by_making_room_and_calls() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let call = Call::new(event.try_clone().unwrap()).unwrap();
        let stuck = call.clone();
        let thread = std::thread::spawn(move || stuck.signal());
        std::thread::sleep(std::time::Duration::from_millis(20));
        call.make_room();
        thread.join().unwrap();
        let mut count = [0; 8];
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}
