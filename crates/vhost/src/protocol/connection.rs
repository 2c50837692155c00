//! The socket: whole messages in, replies out, no file descriptor left over.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::{BODY_MAX, FDS_MAX, HEADER_SIZE, Header, Message, MessageError};

/// What ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The socket failed.
    #[error("the socket failed")]
    Socket(#[source] Errno),
    /// The front end left in the middle of a message.
    #[error("the front end left in the middle of a message")]
    Truncated,
    /// What came cannot be taken for a message.
    #[error(transparent)]
    Header(MessageError),
    /// More file descriptors than any message has, or some that belong to no message.
    #[error("file descriptors that belong to no message")]
    StrayFds,
}

/// A message with its file descriptors. Those are closed when it is dropped.
#[derive(Debug)]
pub struct Received {
    /// As it came.
    pub header: Header,
    /// What it means.
    pub message: Result<Message, MessageError>,
    /// As many as the message has, if it is one.
    pub fds: Vec<OwnedFd>,
}

/// A front end's connection. Another thread ends it by shutting the stream down.
#[derive(Debug)]
pub struct Connection {
    stream: Arc<UnixStream>,
    body: Box<[u8; BODY_MAX]>,
}

impl Connection {
    /// Over a connected stream socket that blocks.
    #[must_use]
    pub fn new(stream: Arc<UnixStream>) -> Self {
        Self { stream, body: Box::new([0; BODY_MAX]) }
    }

    /// Waits for the next message; `None` when the front end has left, or the stream was shut
    /// down.
    ///
    /// # Errors
    /// [`TransportError`]: the connection is of no use any more.
    pub fn receive(&mut self) -> Result<Option<Received>, TransportError> {
        let mut header = [0; HEADER_SIZE];
        let mut fds = Vec::new();
        let mut filled = 0;
        while filled < HEADER_SIZE {
            // File descriptors come with the first byte, but nothing forbids to send it alone.
            match self.receive_some(&mut header[filled..], &mut fds) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(TransportError::Truncated),
                Ok(bytes) => filled += bytes,
                Err(TransportError::Socket(Errno::CONNRESET)) if filled == 0 => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let header = Header::from_bytes(header);
        header.check().map_err(TransportError::Header)?;
        let body = &mut self.body[..header.size as usize];
        let mut filled = 0;
        while filled < body.len() {
            // Without room for control data the kernel closes what comes, and says so.
            let got =
                receive(&self.stream, &mut body[filled..], &mut RecvAncillaryBuffer::new(&mut []))?;
            if got == 0 {
                return Err(TransportError::Truncated);
            }
            filled += got;
        }
        let message = Message::parse(header, body, fds.len());
        if message.is_err() {
            fds.clear();
        }
        Ok(Some(Received { header, message, fds }))
    }

    fn receive_some(
        &self,
        bytes: &mut [u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<usize, TransportError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = receive(&self.stream, bytes, &mut control)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if fds.len() > FDS_MAX { Err(TransportError::StrayFds) } else { Ok(got) }
    }

    /// Answers a request.
    ///
    /// # Errors
    /// [`TransportError::Socket`]
    pub fn reply(
        &self,
        request: u32,
        body: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        let header = Header::reply(request, body.len() as u32).to_bytes();
        let mut message = Vec::with_capacity(HEADER_SIZE + body.len());
        message.extend_from_slice(&header);
        message.extend_from_slice(body);
        send(&self.stream, &message, fd, SendFlags::empty()).map_err(TransportError::Socket)
    }
}

/// One recvmsg. Control data that does not fit is an error: the kernel has closed it.
fn receive(
    stream: &UnixStream,
    bytes: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
) -> Result<usize, TransportError> {
    loop {
        match recvmsg(stream, &mut [IoSliceMut::new(bytes)], control, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) if got.flags.contains(ReturnFlags::CTRUNC) => {
                return Err(TransportError::StrayFds);
            }
            Ok(got) => return Ok(got.bytes),
            Err(Errno::INTR) => {}
            Err(error) => return Err(TransportError::Socket(error)),
        }
    }
}

/// Sends all of a message, a file descriptor with its first byte.
pub fn send(
    socket: impl AsFd,
    mut message: &[u8],
    mut fd: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> Result<(), Errno> {
    while !message.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = flags | SendFlags::NOSIGNAL;
        match sendmsg(socket.as_fd(), &[IoSlice::new(message)], &mut control, flags) {
            Ok(sent) => {
                message = &message[sent..];
                fd = None;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
