//! A unix stream socket as a link: frames of which each has its length before it, 32 bits in network order. So do QEMU
//! (`-netdev stream`, net/stream.c), passt and libkrun speak, and no right is needed for it.
//!
//! What a frame was cut off at, in either direction, is kept here: it outlives the session of a front end, and the
//! next frame follows it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rtvirtio_frames::ethernet::HEADER_BYTES;
use rtvirtio_frames::header::MAX_FRAME_BYTES;
use rtvirtio_virtq::Segment;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Bytes of a length.
const LENGTH: usize = 4;
/// What is received at once at most: some frames of the longest.
const BUFFER: usize = 256 << 10;

/// A socket, connected.
#[derive(Debug)]
pub(crate) struct Stream {
    fd: OwnedFd,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
}

/// What the socket has not taken of the frame that was sent last.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    rest: Vec<u8>,
    at: usize,
}

/// What was received and is not delivered.
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

impl Stream {
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

    /// A connected socket that does not block.
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let incoming = Incoming { buffer: vec![0; BUFFER].into(), begin: 0, end: 0 };
        Self { fd, outgoing: Mutex::default(), incoming: Mutex::new(incoming) }
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
    /// [`Errno::AGAIN`]: the socket takes no more now. Others: there is no peer.
    pub(crate) fn flush(&self, outgoing: &mut Outgoing) -> Result<(), Errno> {
        while outgoing.at < outgoing.rest.len() {
            let rest = &outgoing.rest[outgoing.at..];
            outgoing.at += rustix::net::send(&self.fd, rest, rustix::net::SendFlags::NOSIGNAL)?;
        }
        outgoing.discard();
        Ok(())
    }

    /// Sends a frame of `length` bytes, whose pieces stand behind the first part, which is for its length. What the
    /// socket does not take of it is kept.
    ///
    /// # Errors
    /// As of [`Self::flush`], which has to have been successful: nothing is sent then.
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
        if let Some(first) = parts.first_mut() {
            *first = Segment::new(prefix.as_mut_ptr(), LENGTH);
        }
        // SAFETY: all zeroes are a value of it.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr().cast();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: a segment is a `struct iovec`; the prefix is on the stack, and the caller vouches for the rest.
        let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        let sent = usize::try_from(sent).map_err(|_| last_error())?;
        let mut skip = sent;
        for part in parts {
            let mut part = *part;
            let skipped = skip.min(part.len());
            part.advance(skipped);
            skip -= skipped;
            let at = outgoing.rest.len();
            outgoing.rest.resize(at + part.len(), 0);
            // SAFETY: as above. A guest that changes it meanwhile changes its own frame.
            unsafe {
                std::ptr::copy(part.base(), outgoing.rest[at..].as_mut_ptr(), part.len());
            }
        }
        Ok(())
    }

    /// Receives what there is; whether there was something.
    ///
    /// # Errors
    /// [`Errno::AGAIN`]: there is nothing now. Others: there is no peer.
    pub(crate) fn receive(&self, incoming: &mut Incoming) -> Result<(), Errno> {
        incoming.buffer.copy_within(incoming.begin..incoming.end, 0);
        (incoming.begin, incoming.end) = (0, incoming.end - incoming.begin);
        let space = &mut incoming.buffer[incoming.end..];
        let (_, received) = rustix::net::recv(&self.fd, space, rustix::net::RecvFlags::empty())?;
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

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
