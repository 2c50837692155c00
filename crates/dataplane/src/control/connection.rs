//! A connection whose bytes may come with file descriptors (SCM_RIGHTS).

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rtvirtio_spec::control::ErrorBody;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};

use super::MAX_FDS;

/// How long a peer may read nothing of an answer.
const WRITE_TIME: Duration = Duration::from_secs(10);
/// How long it may take to read all of one: a place is kept from others meanwhile.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// How often is looked whether a peer that will send nothing more still reads.
const HALF_CLOSED_PERIOD: Duration = Duration::from_millis(100);

/// The descriptors that have come with a connection's request.
#[derive(Debug, Clone, Default)]
pub(super) struct Fds(Arc<Mutex<Vec<OwnedFd>>>);

impl Fds {
    /// Adds one, or closes it if there are enough.
    fn add(&self, fd: OwnedFd) {
        let mut fds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if fds.len() < MAX_FDS {
            fds.push(fd);
        }
    }

    /// Takes all, in the order in which they came.
    pub(super) fn take(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Connections whose requests have not come whole, by number: those that were accepted first come first.
#[derive(Debug, Clone, Default)]
pub(super) struct Incomplete(Arc<Mutex<ByNumber>>);

/// Since when each is incomplete, and what tells it to end.
type ByNumber = BTreeMap<u64, (Instant, Arc<Notify>)>;

/// One of these.
#[derive(Debug, Clone)]
pub(super) struct Coming {
    among: Incomplete,
    number: u64,
    /// Whether its head was read, and is that of a request.
    heard: Arc<AtomicBool>,
    /// Whether its answer goes on for as long as it is read.
    endless: Arc<AtomicBool>,
}

impl Incomplete {
    fn all(&self) -> MutexGuard<'_, ByNumber> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection with a number above all earlier ones, and what tells it to end.
    pub(super) fn add(&self, number: u64) -> (Coming, Arc<Notify>) {
        let end = Arc::new(Notify::new());
        self.all().insert(number, (Instant::now(), Arc::clone(&end)));
        let (heard, endless) = Default::default();
        (Coming { among: self.clone(), number, heard, endless }, end)
    }

    /// When the one began that has been incomplete for longest.
    pub(super) fn since(&self) -> Option<Instant> {
        self.all().first_key_value().map(|(_, (since, _))| *since)
    }

    /// Tells that one to end.
    pub(super) fn end_longest(&self) {
        if let Some((_, (_, end))) = self.all().pop_first() {
            end.notify_one();
        }
    }
}

impl Coming {
    /// The request is whole, or has ended.
    pub(super) fn has_come(&self) {
        self.among.all().remove(&self.number);
    }

    /// Its head was that of a request.
    pub(super) fn is_heard(&self) {
        self.heard.store(true, Relaxed);
    }

    /// Its answer may take any time.
    pub(super) fn goes_on(&self) {
        self.endless.store(true, Relaxed);
    }

    fn is_incomplete(&self) -> bool {
        self.among.all().contains_key(&self.number)
    }
}

/// A stream that puts descriptors aside and gives up on a peer that does not read.
pub(super) struct Connection {
    stream: UnixStream,
    fds: Fds,
    coming: Coming,
    /// Since when nothing could be written.
    stuck: Option<Pin<Box<Sleep>>>,
    /// By when the answer has to be read.
    read_by: Option<Instant>,
    /// Of a peer that sends nothing more: when to look again whether it still reads.
    half_closed: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, fds: Fds, coming: Coming) -> Self {
        Self { stream, fds, coming, stuck: None, read_by: None, half_closed: None }
    }

    /// Ready when a peer that will send nothing more is one that does not read either, or has left its request incomplete:
    /// to hyper the end of what is sent is the end of the connection, and such a peer may wait for its answer.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let next = || Box::pin(tokio::time::sleep(HALF_CLOSED_PERIOD));
            ready!(self.half_closed.get_or_insert_with(next).as_mut().poll(context));
            self.half_closed = None;
            let mut state = [PollFd::new(&self.stream, PollFlags::empty())];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if self.coming.is_incomplete() || poll(&mut state, Some(&now)) != Ok(0) {
                return Poll::Ready(());
            }
        }
    }

    /// What is no request hyper answers by itself, with this head and no body: it gets one as all errors have it.
    fn poll_refuse(&mut self, context: &mut Context<'_>, head: &[u8]) -> Poll<io::Result<usize>> {
        let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        // Behind "HTTP/1.1 ".
        let error = format!("this is no HTTP request: {}", line.get(9..).unwrap_or_default());
        let body = serde_json::to_string(&ErrorBody { error, hint: None }).unwrap_or_default();
        let length = body.len();
        let answer = format!(
            "{line}\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        // It is the first that the peer is sent, and fits into the socket's buffer.
        let sent = Pin::new(&mut self.stream).poll_write(context, answer.as_bytes());
        sent.map_ok(|_| head.len())
    }
}

fn receive(stream: &UnixStream, buffer: &mut [u8], fds: &Fds) -> io::Result<usize> {
    // Room for what is allowed: the kernel closes what does not fit.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [IoSliceMut::new(buffer)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(stream, &mut buffers, &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            rights.for_each(|fd| fds.add(fd));
        }
    }
    Ok(received.bytes)
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.half_closed.is_some() {
            return self.poll_end(context).map(Ok);
        }
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let read = || receive(&self.stream, buffer.initialize_unfilled(), &self.fds);
            match self.stream.try_io(Interest::READABLE, read) {
                Ok(0) => return self.poll_end(context).map(Ok),
                Ok(bytes) => {
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.coming.heard.load(Relaxed) {
            return self.poll_refuse(context, bytes);
        }
        // Before the request is whole there is a word to go on with at most.
        if self.read_by.is_none() && !self.coming.is_incomplete() {
            self.read_by = Some(Instant::now() + ANSWER_TIME);
        }
        let is_late = self.read_by.is_some_and(|read_by| Instant::now() > read_by);
        if is_late && !self.coming.endless.load(Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_write(context, bytes) {
            self.stuck = None;
            return Poll::Ready(result);
        }
        let late = || Box::pin(tokio::time::sleep_until(Instant::now() + WRITE_TIME));
        match self.stuck.get_or_insert_with(late).as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
