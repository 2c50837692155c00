//! A unix socket as a link, for which no right is needed, in either of QEMU's framings:
//!
//! - `-netdev stream` (net/stream.c), which passt and libkrun speak too: each frame has its length before it, 32 bits in
//!   network order. What a frame was cut off at, in either direction, is kept here: it outlives the session of a front
//!   end, and the next frame follows it.
//! - `-netdev dgram` (net/dgram.c): a datagram is a frame, from one path to another. The socket is not connected, since a
//!   connection would be to a peer's first life: frames would stay out, unnoticed, when it is started again. So the
//!   address of each datagram's sender is looked at, and no event says when a peer that was full has room again.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rtvirtio_frames::ethernet::HEADER_BYTES;
use rtvirtio_frames::header::MAX_FRAME_BYTES;
use rtvirtio_vhost::server::{Bound, ListenError, bind};
use rtvirtio_virtq::Segment;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::copy::copy;
use crate::stats::Dropped;
use crate::tap::{ATTACH_PAUSE, ATTACH_TIME};

/// Bytes of a length.
const LENGTH: usize = 4;
/// What is received at once at most: some frames of the longest.
const BUFFER: usize = 256 << 10;

/// A socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    framing: Framing,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

/// How frames are told apart.
#[derive(Debug)]
enum Framing {
    /// By their lengths, on a connection.
    Stream,
    /// As datagrams.
    Dgram {
        /// Where they go and come from.
        remote: SocketAddrAny,
        /// Where they arrive.
        _local: Bound,
    },
}

/// What the socket has not taken of the frame that was sent last: of a datagram it takes all or nothing.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    rest: Vec<u8>,
    at: usize,
}

/// What was received and is not delivered: frames, each behind its length.
#[derive(Debug)]
pub(crate) struct Incoming {
    buffer: Box<[u8]>,
    begin: usize,
    end: usize,
}

/// What the next bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// A frame of so many bytes.
    Frame(usize),
    /// Not all of one.
    Incomplete,
    /// A length that no frame has: where the next one begins is not known.
    Invalid,
}

impl Socket {
    /// Connects to the socket that is there.
    ///
    /// # Errors
    /// Nobody listens, or may not be connected to.
    pub(crate) fn connect(path: &Path) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self::new(fd))
    }

    /// A connected stream socket that does not block.
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self::with(fd, Framing::Stream)
    }

    /// A datagram socket at a path with these permissions, whose peer is at another, now or later.
    ///
    /// # Errors
    /// The path is in use, or cannot be bound.
    pub(crate) fn bind(local: &Path, remote: &Path, mode: u32) -> Result<Self, ListenError> {
        let address = SocketAddrUnix::new(remote);
        let remote = address.map_err(|_| ListenError::Path(PathBuf::from(remote)))?;
        let begun = Instant::now();
        let (fd, local) = loop {
            match bind(local, mode, SocketType::DGRAM) {
                // Of a process that was killed: the kernel lets go of what io_uring waited for a little later.
                Err(ListenError::InUse(_)) if begun.elapsed() < ATTACH_TIME => {
                    std::thread::sleep(ATTACH_PAUSE);
                }
                bound => break bound?,
            }
        };
        Ok(Self::with(fd, Framing::Dgram { remote: remote.into(), _local: local }))
    }

    fn with(fd: OwnedFd, framing: Framing) -> Self {
        let incoming = Incoming { buffer: vec![0; BUFFER].into(), begin: 0, end: 0 };
        Self { fd, framing, outgoing: Mutex::default(), incoming: Mutex::new(incoming) }
    }

    /// Whether the socket can be waited for when it takes no more. One that is not connected can be written to whatever
    /// its peer does.
    pub(crate) const fn says_when_writable(&self) -> bool {
        matches!(self.framing, Framing::Stream)
    }

    /// For a turn of the queue that transmits: nobody waits for it.
    pub(crate) fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same of the queue that receives.
    pub(crate) fn incoming(&self) -> MutexGuard<'_, Incoming> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what is left of the last frame.
    ///
    /// # Errors
    /// [`Errno::AGAIN`]: the socket takes no more now. [`is_short_of_memory`]: the kernel does not. Others: there is no peer.
    pub(crate) fn flush(&self, outgoing: &mut Outgoing) -> Result<(), Errno> {
        while outgoing.at < outgoing.rest.len() {
            let rest = &outgoing.rest[outgoing.at..];
            outgoing.at += rustix::net::send(&self.fd, rest, rustix::net::SendFlags::NOSIGNAL)?;
        }
        outgoing.discard();
        Ok(())
    }

    /// Sends a frame of `length` bytes, whose pieces stand behind the first part, which is for its length. What a
    /// stream does not take of it is kept.
    ///
    /// # Errors
    /// As of [`Self::flush`], which has to have been successful: nothing is sent then. Of a datagram they are of this
    /// one alone: the peer may be there when the next is sent.
    ///
    /// # Safety
    /// The segments are mapped.
    pub(crate) unsafe fn send(
        &self,
        outgoing: &mut Outgoing,
        parts: &mut [Segment],
        length: usize,
    ) -> Result<(), Errno> {
        let mut prefix = (length as u32).to_be_bytes();
        // SAFETY: all zeroes are a value of it.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        let first = match &self.framing {
            Framing::Stream => Segment::new(prefix.as_mut_ptr(), LENGTH),
            Framing::Dgram { remote, .. } => {
                // The kernel reads it.
                message.msg_name = remote.as_ptr().cast_mut().cast();
                message.msg_namelen = remote.addr_len();
                Segment::EMPTY
            }
        };
        if let Some(place) = parts.first_mut() {
            *place = first;
        }
        message.msg_iov = parts.as_mut_ptr().cast();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: a segment is a `struct iovec`; prefix and address outlive the call, and the caller vouches for the rest.
        let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        let sent = usize::try_from(sent).map_err(|_| last_error())?;
        let mut skip = sent;
        if let Framing::Dgram { .. } = self.framing {
            return Ok(());
        }
        for part in parts {
            let mut part = *part;
            let skipped = skip.min(part.len());
            part.advance(skipped);
            skip -= skipped;
            let at = outgoing.rest.len();
            outgoing.rest.resize(at + part.len(), 0);
            // SAFETY: as above. A guest that changes it meanwhile changes its own frame.
            unsafe { copy(part.base(), outgoing.rest[at..].as_mut_ptr(), part.len()) };
        }
        Ok(())
    }

    /// Receives some bytes of a stream, or a datagram. One that is no frame of the peer's is dropped, for a reason.
    ///
    /// # Errors
    /// [`Errno::AGAIN`]: there is nothing now. Others: there is no peer.
    pub(crate) fn receive(&self, incoming: &mut Incoming) -> Result<Option<Dropped>, Errno> {
        let Framing::Dgram { remote, .. } = &self.framing else {
            return self.receive_bytes(incoming).map(|()| None);
        };
        (incoming.begin, incoming.end) = (0, 0);
        let (prefix, space) = incoming.buffer.split_at_mut(LENGTH);
        // Of a longer one the length is said too. Descriptors that come with it are closed by the kernel.
        let (_, length, sender) = rustix::net::recvfrom(&self.fd, space, RecvFlags::TRUNC)?;
        // The kernel says a path as it was bound, with the NUL behind it (net/unix/af_unix.c, unix_mkname_bsd).
        if sender.as_ref() != Some(remote) {
            return Ok(Some(Dropped::Spoofed));
        }
        match length {
            0..HEADER_BYTES => return Ok(Some(Dropped::Malformed)),
            HEADER_BYTES..=MAX_FRAME_BYTES => {}
            _ => return Ok(Some(Dropped::TooLong)),
        }
        prefix.copy_from_slice(&(length as u32).to_be_bytes());
        incoming.end = LENGTH + length;
        Ok(None)
    }

    fn receive_bytes(&self, incoming: &mut Incoming) -> Result<(), Errno> {
        incoming.buffer.copy_within(incoming.begin..incoming.end, 0);
        (incoming.begin, incoming.end) = (0, incoming.end - incoming.begin);
        let space = &mut incoming.buffer[incoming.end..];
        let (_, received) = rustix::net::recv(&self.fd, space, RecvFlags::empty())?;
        incoming.end += received;
        if received == 0 { Err(Errno::PIPE) } else { Ok(()) }
    }
}

impl Outgoing {
    /// What is left of the last frame is not sent.
    pub(crate) fn discard(&mut self) {
        self.rest.clear();
        self.at = 0;
    }

    /// Whether nothing is left of the last frame.
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

impl Incoming {
    /// What is next.
    pub(crate) fn next(&self) -> Next {
        let bytes = &self.buffer[self.begin..self.end];
        let Some(prefix) = bytes.first_chunk::<LENGTH>() else { return Next::Incomplete };
        let length = u32::from_be_bytes(*prefix) as usize;
        match length {
            HEADER_BYTES..=MAX_FRAME_BYTES if bytes.len() >= LENGTH + length => Next::Frame(length),
            HEADER_BYTES..=MAX_FRAME_BYTES => Next::Incomplete,
            _ => Next::Invalid,
        }
    }

    /// The next frame, of so many bytes.
    pub(crate) fn frame(&self, length: usize) -> &[u8] {
        let begin = self.begin + LENGTH;
        self.buffer.get(begin..begin + length).unwrap_or_default()
    }

    /// It is done with.
    pub(crate) fn consume(&mut self, length: usize) {
        self.begin = (self.begin + LENGTH + length).min(self.end);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether it was the kernel that had no memory for what was sent, or the control group that allowed no more. Half a frame that
/// is given up makes the peer take what follows for the rest, so this is done only where there is no peer.
pub(crate) const fn is_short_of_memory(errno: Errno) -> bool {
    matches!(errno, Errno::NOBUFS | Errno::NOMEM)
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_that_is_gone_is_told_from_a_kernel_without_memory() {
        for errno in [Errno::NOBUFS, Errno::NOMEM] {
            assert!(is_short_of_memory(errno), "{errno}");
        }
        for errno in [Errno::AGAIN, Errno::PIPE, Errno::CONNRESET, Errno::NOTCONN] {
            assert!(!is_short_of_memory(errno), "{errno}");
        }
    }
}
