//! One end of a conversation in lines, whose other end is not trusted.
//!
//! Terms: a *link* carries bytes, in production a Unix socket; a *deadline*
//! holds for a whole request, however many reads and writes it takes; the user's
//! signal ends it before.
//!
//! Properties: `endless_line_is_refused_at_the_limit`, `peer_that_hangs_keeps_the_deadline`,
//! `peer_that_drips_keeps_the_deadline`, `peer_that_does_not_read_keeps_the_deadline`,
//! `full_backlog_keeps_the_deadline`, `signal_ends_the_wait_for_a_peer_that_hangs`.

use std::fmt;
use std::io::{self, Read, Write};
use std::mem;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::Fault;
use crate::interrupt::Interrupt;
use crate::unix_socket;

/// The most bytes of one message. The largest that rtvirtio asks for, 1 MiB of a
/// guest's file in base64 or a program's output, stay below it.
pub const LARGEST_MESSAGE: usize = 16 << 20;

/// What one read takes at most.
const CHUNK: usize = 16 << 10;
/// No request is given longer than this: an `Instant` cannot hold every sum.
const LONGEST: Duration = Duration::from_hours(24);

/// When a request must be answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout.min(LONGEST), timeout }
    }

    /// What is left, never nothing.
    pub(crate) fn left(self) -> Result<Duration, Fault> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Fault::Late { timeout: self.timeout }) } else { Ok(left) }
    }

    /// The same, as far as the user's signal lets the next wait go.
    fn bounded(self, interrupt: &mut Interrupt) -> Result<Duration, Fault> {
        let left = self.left()?;
        interrupt.bound(self.at, left).map_err(|_| Fault::Interrupted)
    }
}

/// Carries bytes. A call that lasts longer than `within` is an error `WouldBlock`.
pub(super) trait Link: fmt::Debug + Send {
    fn read(&mut self, buffer: &mut [u8], within: Duration) -> io::Result<usize>;
    fn write(&mut self, bytes: &[u8], within: Duration) -> io::Result<usize>;
    fn close(&mut self);
}

impl Link for UnixStream {
    fn read(&mut self, buffer: &mut [u8], within: Duration) -> io::Result<usize> {
        self.set_read_timeout(Some(within))?;
        Read::read(self, buffer)
    }

    fn write(&mut self, bytes: &[u8], within: Duration) -> io::Result<usize> {
        self.set_write_timeout(Some(within))?;
        Write::write(self, bytes)
    }

    fn close(&mut self) {
        // It fails only where the connection is gone already.
        let _ = self.shutdown(Shutdown::Both);
    }
}

/// The other end.
#[derive(Debug)]
pub(super) struct Peer {
    link: Box<dyn Link>,
    /// What was read and not yet used.
    buffer: Vec<u8>,
    /// What ends its waits before their deadlines.
    pub(super) interrupt: Interrupt,
}

impl Peer {
    pub(super) fn over(link: impl Link + 'static) -> Self {
        Self { link: Box::new(link), buffer: Vec::new(), interrupt: Interrupt::default() }
    }

    /// Connects to the Unix socket at `path`; `interrupt` ends this, and later waits.
    pub(super) fn connect(
        path: &Path,
        deadline: Deadline,
        interrupt: &Interrupt,
    ) -> Result<Self, Fault> {
        let mut interrupt = interrupt.clone();
        let connected = unix_socket::connect(path, || deadline.bounded(&mut interrupt))?;
        let stream = connected.map_err(Fault::Connect)?;
        Ok(Self { interrupt, ..Self::over(stream) })
    }

    /// How long the next wait of a request may take.
    pub(super) fn left(&mut self, deadline: Deadline) -> Result<Duration, Fault> {
        deadline.bounded(&mut self.interrupt)
    }

    /// Sends all of `bytes` after the user's signal too, for what must not be left undone.
    pub(super) fn send_anyway(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), Fault> {
        let interrupt = mem::take(&mut self.interrupt);
        let sent = self.send(bytes, deadline);
        self.interrupt = interrupt;
        sent
    }

    /// Sends all of `bytes`. A part of a request would spoil the next one, so
    /// the connection is closed after it.
    pub(super) fn send(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), Fault> {
        let mut rest = bytes;
        let sent = self.write(&mut rest, deadline);
        if sent.is_err() && rest.len() < bytes.len() {
            self.link.close();
        }
        sent
    }

    fn write(&mut self, rest: &mut &[u8], deadline: Deadline) -> Result<(), Fault> {
        while !rest.is_empty() {
            let left = self.left(deadline)?;
            match self.link.write(rest, left) {
                Ok(written) => *rest = &rest[written..],
                Err(error) => keep_on(error, deadline)?,
            }
        }
        Ok(())
    }

    /// The next line, with its newline.
    pub(super) fn line(&mut self, deadline: Deadline) -> Result<Vec<u8>, Fault> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.buffer[searched..].iter().position(|b| *b == b'\n') {
                let rest = self.buffer.split_off(searched + at + 1);
                return Ok(mem::replace(&mut self.buffer, rest));
            }
            searched = self.buffer.len();
            self.fill(deadline)?;
        }
    }

    /// Drops all up to and with the next `byte`, at most [`LARGEST_MESSAGE`].
    pub(super) fn skip_past(&mut self, byte: u8, deadline: Deadline) -> Result<(), Fault> {
        let mut skipped = 0;
        loop {
            if let Some(at) = self.buffer.iter().position(|b| *b == byte) {
                self.buffer.drain(..=at);
                return Ok(());
            }
            skipped += self.buffer.len();
            self.buffer.clear();
            if skipped > LARGEST_MESSAGE {
                return Err(Fault::TooLong { limit: LARGEST_MESSAGE });
            }
            self.fill(deadline)?;
        }
    }

    /// All that comes until the other end closes.
    pub(super) fn rest(&mut self, deadline: Deadline) -> Result<Vec<u8>, Fault> {
        loop {
            match self.fill(deadline) {
                Ok(()) => {}
                Err(Fault::Closed) => return Ok(mem::take(&mut self.buffer)),
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Reads once into the buffer, which holds [`LARGEST_MESSAGE`] and no more.
    fn fill(&mut self, deadline: Deadline) -> Result<(), Fault> {
        let left = self.left(deadline)?;
        let old = self.buffer.len();
        if old >= LARGEST_MESSAGE {
            self.buffer = Vec::new();
            return Err(Fault::TooLong { limit: LARGEST_MESSAGE });
        }
        self.buffer.resize((old + CHUNK).min(LARGEST_MESSAGE), 0);
        let read = self.link.read(&mut self.buffer[old..], left);
        self.buffer.truncate(old + *read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => Err(Fault::Closed),
            Ok(_) => Ok(()),
            Err(error) => keep_on(error, deadline),
        }
    }
}

/// Nothing if the call is to be made again, else the fault.
fn keep_on(error: io::Error, deadline: Deadline) -> Result<(), Fault> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        // A socket's timeout counts ticks, and may end one too early.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => deadline.left().map(drop),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(Fault::Closed),
        _ => Err(Fault::Connection(error)),
    }
}

/// A peer that says `bytes`, whatever it is asked, and closes.
#[cfg(any(test, feature = "test-utils"))]
#[derive(Debug)]
pub(super) struct Replay(pub(super) io::Cursor<Vec<u8>>);

#[cfg(any(test, feature = "test-utils"))]
impl Link for Replay {
    fn read(&mut self, buffer: &mut [u8], _: Duration) -> io::Result<usize> {
        self.0.read(buffer)
    }

    fn write(&mut self, bytes: &[u8], _: Duration) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn close(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::Interrupted;
    use crate::qemu::tests::{SHORT, keeps_deadline};
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::thread;

    fn pair() -> (Peer, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Peer::over(ours), theirs)
    }

    /// Sees that `f` fails for being late.
    fn late<T: fmt::Debug>(f: impl FnOnce(Deadline) -> Result<T, Fault>) {
        let start = Instant::now();
        let result = keeps_deadline(|| f(Deadline::after(SHORT)));
        assert!(matches!(result, Err(Fault::Late { timeout: SHORT })), "{result:?}");
        assert!(start.elapsed() >= SHORT);
    }

    #[test]
    fn endless_line_is_refused_at_the_limit() {
        let (mut peer, mut theirs) = pair();
        let writer = thread::spawn(move || while theirs.write_all(&[b'x'; 1 << 16]).is_ok() {});
        let result = peer.line(Deadline::after(Duration::from_secs(60)));
        assert!(matches!(result, Err(Fault::TooLong { limit: LARGEST_MESSAGE })), "{result:?}");
        assert_eq!(peer.buffer.capacity(), 0);
        drop(peer);
        writer.join().unwrap();
    }

    #[test]
    fn largest_message_is_taken() {
        let mut bytes = vec![b'x'; LARGEST_MESSAGE - 1];
        bytes.push(b'\n');
        let mut peer = Peer::over(Replay(io::Cursor::new(bytes)));
        assert_eq!(peer.line(Deadline::after(SHORT * 100)).unwrap().len(), LARGEST_MESSAGE);
    }

    #[test]
    fn peer_that_hangs_keeps_the_deadline() {
        let (mut peer, _theirs) = pair();
        late(|deadline| peer.line(deadline));
        late(|deadline| peer.skip_past(0xff, deadline));
        late(|deadline| peer.rest(deadline));
    }

    #[test]
    fn peer_that_drips_keeps_the_deadline() {
        let (mut peer, mut theirs) = pair();
        let writer = thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        late(|deadline| peer.line(deadline));
        drop(peer);
        writer.join().unwrap();
    }

    #[test]
    fn peer_that_does_not_read_keeps_the_deadline() {
        let (mut peer, mut theirs) = pair();
        let bytes = vec![b'x'; 8 << 20];
        late(|deadline| peer.send(&bytes, deadline));
        // A part was sent: the connection is over.
        theirs.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).unwrap();
        assert!(!sent.is_empty());
        let result = peer.send(b"next\n", Deadline::after(SHORT));
        assert!(matches!(result, Err(Fault::Closed)), "{result:?}");
    }

    #[test]
    fn full_backlog_keeps_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let none = Interrupt::default();
        let _waits = Peer::connect(&path, Deadline::after(SHORT), &none).unwrap();
        late(|deadline| Peer::connect(&path, deadline, &none));
        let waits = Peer::connect(&path, Deadline::after(LONGEST), &interrupted_soon());
        assert!(matches!(waits, Err(Fault::Interrupted)), "{waits:?}");
    }

    /// The signal of a user who waits for a short while.
    fn interrupted_soon() -> Interrupt {
        let interrupted = Arc::new(Interrupted::new(false));
        let interrupt = Interrupt::new(Some(Arc::clone(&interrupted)), Duration::ZERO);
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            interrupted.store(true, Ordering::Relaxed);
        });
        interrupt
    }

    #[test]
    fn signal_ends_the_wait_for_a_peer_that_hangs() {
        let (mut peer, mut theirs) = pair();
        let deadline = Deadline::after(LONGEST);
        peer.interrupt = interrupted_soon();
        let bytes = vec![b'x'; 8 << 20];
        let sent = peer.send(&bytes, deadline);
        assert!(matches!(sent, Err(Fault::Interrupted)), "{sent:?}");

        let (mut peer, mut listens) = pair();
        peer.interrupt = interrupted_soon();
        let line = peer.line(deadline);
        assert!(matches!(line, Err(Fault::Interrupted)), "{line:?}");
        assert!(matches!(peer.send(b"a\n", deadline), Err(Fault::Interrupted)));
        // What must not be left undone is said all the same, and no request after it.
        peer.send_anyway(b"b\n", deadline).unwrap();
        assert!(matches!(peer.send(b"c\n", deadline), Err(Fault::Interrupted)));
        drop(peer);
        let mut heard = String::new();
        listens.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "b\n");
        // A part was sent: the connection is over.
        theirs.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        theirs.read_to_end(&mut Vec::new()).unwrap();
    }

    #[test]
    fn skip_past_keeps_what_follows() {
        let bytes = b"{\"return\": 1}\n\xff{\"return\": 2}\nnext\n".to_vec();
        let mut peer = Peer::over(Replay(io::Cursor::new(bytes)));
        let deadline = Deadline::after(SHORT);
        peer.skip_past(0xff, deadline).unwrap();
        assert_eq!(peer.line(deadline).unwrap(), b"{\"return\": 2}\n");
        assert_eq!(peer.line(deadline).unwrap(), b"next\n");
        assert!(matches!(peer.line(deadline), Err(Fault::Closed)));
    }
}
