//! A client of the data plane's control API: one request a connection, over a unix socket.
//!
//! The server is not trusted to answer well or at all: every call has a deadline, an answer has a
//! limit, and its words are shown escaped and cut short. Requests are HTTP/1.0, so an answer ends
//! with the connection.
//!
//! Properties (tests of the same name): `answer_without_end_is_refused_at_the_limit`,
//! `server_that_drips_keeps_the_deadline`, `interrupted_request_ends_at_once_and_none_is_begun_later`,
//! `request_that_puts_back_has_its_time_after_a_signal`,
//! `words_of_a_refusal_are_escaped_and_cut_short`.

use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rtvirtio_spec::control::{ErrorBody, Event, Snapshot};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::interrupt::{Interrupted, STEP};
use crate::unix_socket;

/// Where the control API listens unless it is told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/rtvirtio/control.sock";
/// Largest answer: a snapshot of 1,024 devices of 64 queues has some 80 MB.
const MAX_ANSWER: usize = 128 << 20;
/// Largest head of an answer.
const MAX_HEAD: usize = 16 << 10;
/// What one read takes at most.
const CHUNK: usize = 16 << 10;
/// Longest event.
const MAX_EVENT: u64 = 64 << 10;
/// How long a request may take, a change that drains a queue among them.
const REQUEST_TIME: Duration = Duration::from_secs(35);
/// Longest silence of an event stream, whose server speaks every 15 s.
const SILENCE: Duration = Duration::from_secs(60);
/// Longest piece of the server's words that is shown, in characters.
const MAX_WORDS: usize = 400;

/// Why the data plane did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlFault {
    /// Nobody is there.
    #[error("cannot connect to the data plane at {}", socket.display())]
    Connect {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection failed.
    #[error("the connection to the data plane failed")]
    Connection(#[source] io::Error),
    /// The deadline passed. What was asked may have been done, or may be later.
    #[error("no answer of the data plane within {0:?}")]
    Late(Duration),
    /// The user did not want to wait for it. What was asked may have been done, or may be later.
    #[error("interrupted")]
    Interrupted,
    /// The answer is too long.
    #[error("an answer of the data plane is longer than {0} bytes")]
    TooLong(usize),
    /// The answer is no HTTP, or not what was asked for.
    #[error("an answer that is not the control API's: {}", Words(.0))]
    Malformed(String),
    /// The data plane refuses.
    #[error("{}", Words(error))]
    Refused {
        /// HTTP's number for it.
        status: u16,
        /// What it says.
        error: String,
        /// What it says about a remedy.
        hint: Option<String>,
    },
}

impl ControlFault {
    /// Whether what was asked may have been done all the same, or may be later.
    #[must_use]
    pub const fn is_uncertain(&self) -> bool {
        match self {
            Self::Connect { .. } => false,
            // HTTP's 504: the change takes too long, and may have been begun.
            Self::Refused { status, .. } => *status == 504,
            Self::Connection(_)
            | Self::Late(_)
            | Self::Interrupted
            | Self::TooLong(_)
            | Self::Malformed(_) => true,
        }
    }

    /// What to do about it, in one line, if that is known.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Connect { source, .. } => Some(
                match source.kind() {
                    io::ErrorKind::PermissionDenied => {
                        "run it as root, as the service's user, or as a member of its `group`"
                    }
                    _ => "start it: rtvirtio serve CONFIG; or name its socket: --socket PATH",
                }
                .to_owned(),
            ),
            Self::Late(_) => Some("see what has happened: rtvirtio ctl snapshot".to_owned()),
            Self::Connection(_) => {
                Some("is it running, and may this user use it? See its log".to_owned())
            }
            Self::Refused { hint, .. } => hint.as_ref().map(|hint| Words(hint).to_string()),
            Self::Interrupted | Self::TooLong(_) | Self::Malformed(_) => None,
        }
    }
}

/// The server's words on one line.
struct Words<'a>(&'a str);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars().take(MAX_WORDS) {
            if c.is_control() { write!(f, "{}", c.escape_debug())? } else { write!(f, "{c}")? }
        }
        if self.0.chars().nth(MAX_WORDS).is_some() { f.write_str("...") } else { Ok(()) }
    }
}

/// A data plane's control API.
#[derive(Debug, Clone)]
pub struct ControlClient {
    socket: PathBuf,
    timeout: Duration,
    interrupted: Option<Arc<Interrupted>>,
    grace: Duration,
}

impl ControlClient {
    /// The one at this socket. Connects at each request.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            timeout: REQUEST_TIME,
            interrupted: None,
            grace: Duration::ZERO,
        }
    }

    /// With another deadline for each request.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// With requests that end within 100 ms of a signal; none is begun after it.
    #[must_use]
    pub fn with_interrupt(self, interrupted: Option<Arc<Interrupted>>) -> Self {
        Self { interrupted, ..self }
    }

    /// With requests that put things back: they are begun after a signal too, and each has this long from then on.
    pub(crate) fn with_grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Everything at one time.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn snapshot(&self) -> Result<Snapshot, ControlFault> {
        self.get("/v1/snapshot")
    }

    /// What is at `path`.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ControlFault> {
        json(&self.request("GET", path, &[], &[])?)
    }

    /// The text at `path`.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn text(&self, path: &str) -> Result<String, ControlFault> {
        let body = self.request("GET", path, &[], &[])?;
        String::from_utf8(body).map_err(|e| ControlFault::Malformed(e.to_string()))
    }

    /// Asks for a change, and hands descriptors over with it.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn change<B: Serialize>(
        &self,
        method: &str,
        path: &str,
        body: &B,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ControlFault> {
        self.request(method, path, &to_json(body)?, fds).map(drop)
    }

    /// Asks for a change that has an answer.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn ask<B: Serialize, T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &B,
    ) -> Result<T, ControlFault> {
        json(&self.request(method, path, &to_json(body)?, &[])?)
    }

    /// Removes what is at `path`.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn delete(&self, path: &str) -> Result<(), ControlFault> {
        self.request("DELETE", path, &[], &[]).map(drop)
    }

    /// What happens from now on.
    ///
    /// # Errors
    /// [`ControlFault`].
    pub fn events(&self) -> Result<Events, ControlFault> {
        let deadline = self.deadline();
        let stream = self.connect(&deadline)?;
        send(&stream, &head("GET", "/v1/events", 0), &[], &[], &deadline)?;
        let mut read = Vec::new();
        let head = loop {
            if let Some(head) = parse_head(&read)? {
                break head;
            }
            if !receive(&stream, &mut read, MAX_HEAD + CHUNK, &deadline)? {
                return Err(ControlFault::Malformed("it ends early".to_owned()));
            }
        };
        if head.status != 200 {
            while receive(&stream, &mut read, MAX_ANSWER, &deadline)? {}
            return Err(refusal(head.status, &read[head.length..]));
        }
        stream.set_read_timeout(Some(SILENCE)).map_err(ControlFault::Connection)?;
        let begun = io::Cursor::new(read.split_off(head.length));
        Ok(Events(Box::new(BufReader::new(begun.chain(stream)))))
    }

    fn request(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, ControlFault> {
        let deadline = self.deadline();
        let stream = self.connect(&deadline)?;
        send(&stream, &head(method, path, body.len()), body, fds, &deadline)?;
        let mut answer = Vec::new();
        while receive(&stream, &mut answer, MAX_ANSWER, &deadline)? {}
        let head = parse_head(&answer)?;
        let head = head.ok_or_else(|| ControlFault::Malformed("it ends early".to_owned()))?;
        let body = answer.split_off(head.length);
        if head.body.is_some_and(|length| length != body.len()) {
            return Err(ControlFault::Malformed("it ends early".to_owned()));
        }
        if !(200..300).contains(&head.status) {
            return Err(refusal(head.status, &body));
        }
        Ok(body)
    }

    /// When a request that is begun now must be answered.
    fn deadline(&self) -> Deadline<'_> {
        Deadline {
            end: Cell::new((Instant::now() + self.timeout, self.timeout)),
            interrupted: Cell::new(self.interrupted.as_deref()),
            grace: self.grace,
        }
    }

    fn connect(&self, deadline: &Deadline<'_>) -> Result<UnixStream, ControlFault> {
        let connected = unix_socket::connect(&self.socket, || deadline.left())?;
        connected.map_err(|source| ControlFault::Connect { socket: self.socket.clone(), source })
    }
}

/// When a request must be answered, and what ends it before.
struct Deadline<'a> {
    /// The end, and how long that was when it was set.
    end: Cell<(Instant, Duration)>,
    /// `None` once the signal has been heard.
    interrupted: Cell<Option<&'a Interrupted>>,
    /// How much longer a request may take from the signal on.
    grace: Duration,
}

impl Deadline<'_> {
    /// How long the next wait may take, never nothing: a signal may come during it.
    fn left(&self) -> Result<Duration, ControlFault> {
        let now = Instant::now();
        if self.interrupted.get().is_some_and(|interrupted| interrupted.load(Ordering::Relaxed)) {
            if self.grace.is_zero() {
                return Err(ControlFault::Interrupted);
            }
            self.interrupted.set(None);
            self.end.set(self.end.get().min((now + self.grace, self.grace)));
        }
        let (end, timeout) = self.end.get();
        let left = end.saturating_duration_since(now);
        if left.is_zero() {
            return Err(ControlFault::Late(timeout));
        }
        Ok(if self.interrupted.get().is_some() { left.min(STEP) } else { left })
    }
}

/// Whether to try again: an interrupted call, or one whose own time is over (the deadline knows).
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

fn head(method: &str, path: &str, length: usize) -> String {
    format!(
        "{method} {path} HTTP/1.0\r\nHost: rtvirtio\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    )
}

/// Sends head and body, with the descriptors at the first byte.
fn send(
    mut stream: &UnixStream,
    head: &str,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: &Deadline<'_>,
) -> Result<(), ControlFault> {
    // A socket, and a queue of a TAP for each pair.
    const MAX_FDS: usize = 1 + rtvirtio_spec::serve::MAX_PAIRS as usize;
    let bytes = [head.as_bytes(), body].concat();
    let mut rest = bytes.as_slice();
    let mut fds = &fds[..fds.len().min(MAX_FDS)];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(deadline.left()?)).map_err(ControlFault::Connection)?;
        let sent = if fds.is_empty() {
            stream.write(rest)
        } else {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            sendmsg(stream, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL)
                .map_err(io::Error::from)
        };
        match sent {
            Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
            Err(e) if is_passing(&e) => {}
            // A server that refuses before it has read all has said why.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            Err(e) => return Err(ControlFault::Connection(e)),
        }
    }
    Ok(())
}

/// Reads more; `false` at the end.
fn receive(
    mut stream: &UnixStream,
    answer: &mut Vec<u8>,
    limit: usize,
    deadline: &Deadline<'_>,
) -> Result<bool, ControlFault> {
    let mut chunk = [0; CHUNK];
    loop {
        stream.set_read_timeout(Some(deadline.left()?)).map_err(ControlFault::Connection)?;
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(false),
            Ok(n) if answer.len() + n > limit => return Err(ControlFault::TooLong(limit)),
            Ok(n) => {
                answer.extend_from_slice(&chunk[..n]);
                return Ok(true);
            }
            Err(e) if is_passing(&e) => {}
            // After an answer: it closed with our bytes unread.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset && !answer.is_empty() => {
                return Ok(false);
            }
            Err(e) => return Err(ControlFault::Connection(e)),
        }
    }
}

struct Head {
    status: u16,
    /// Bytes of the head itself.
    length: usize,
    /// Bytes of the body, if it says.
    body: Option<usize>,
}

/// The head of an answer; `None` while it is not there whole.
fn parse_head(answer: &[u8]) -> Result<Option<Head>, ControlFault> {
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let head = &answer[..answer.len().min(MAX_HEAD)];
    let malformed = |e: httparse::Error| ControlFault::Malformed(e.to_string());
    let httparse::Status::Complete(length) = response.parse(head).map_err(malformed)? else {
        return if answer.len() < MAX_HEAD {
            Ok(None)
        } else {
            Err(ControlFault::TooLong(MAX_HEAD))
        };
    };
    let named = |name: &str| response.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name));
    let number = named("content-length").and_then(|h| std::str::from_utf8(h.value).ok());
    let body = number.and_then(|text| text.parse().ok());
    Ok(Some(Head { status: response.code.unwrap_or_default(), length, body }))
}

fn refusal(status: u16, body: &[u8]) -> ControlFault {
    match serde_json::from_slice(body) {
        Ok(ErrorBody { error, hint }) => ControlFault::Refused { status, error, hint },
        Err(_) => {
            let error = format!("HTTP status {status}: {}", String::from_utf8_lossy(body));
            ControlFault::Refused { status, error, hint: None }
        }
    }
}

fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ControlFault> {
    serde_json::from_slice(body).map_err(|e| ControlFault::Malformed(e.to_string()))
}

fn to_json<B: Serialize>(body: &B) -> Result<Vec<u8>, ControlFault> {
    serde_json::to_vec(body).map_err(|e| ControlFault::Malformed(e.to_string()))
}

/// What happens in a data plane, as it happens.
pub struct Events(Box<dyn BufRead + Send>);

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Iterator for Events {
    type Item = Result<Event, ControlFault>;

    /// Waits for the next event; `None`: the data plane has ended.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut line = Vec::new();
            match (&mut self.0).take(MAX_EVENT).read_until(b'\n', &mut line) {
                Ok(0) => return None,
                Ok(_) if line.last() != Some(&b'\n') => {
                    return Some(Err(ControlFault::TooLong(MAX_EVENT as usize)));
                }
                Ok(_) => {}
                Err(e) if is_passing(&e) => return Some(Err(ControlFault::Late(SILENCE))),
                Err(e) => return Some(Err(ControlFault::Connection(e))),
            }
            // Other lines are comments that keep the connection alive, and the ends of events.
            if let Some(data) = line.strip_prefix(b"data:") {
                return Some(json(data));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// A server that does `serve` with its first connection.
    fn client(
        serve: impl FnOnce(UnixStream) + Send + 'static,
    ) -> (ControlClient, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || serve(listener.accept().unwrap().0));
        (ControlClient::new(socket).with_timeout(Duration::from_millis(500)), directory)
    }

    fn answer(text: impl Into<Vec<u8>>) -> (ControlClient, tempfile::TempDir) {
        let text = text.into();
        client(move |mut stream| {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(&text);
        })
    }

    #[test]
    fn snapshot_is_read() {
        let text =
            "HTTP/1.0 200 OK\r\n\r\n{\"time_ns\":7,\"iothreads\":[],\"devices\":[],\"new\":1}";
        let (client, _directory) = answer(text);
        assert_eq!(client.snapshot().unwrap().time_ns.get(), 7);
    }

    #[test]
    fn answer_that_is_no_http_or_ends_early_is_refused() {
        for text in [
            "",
            "HTTP/1.0 200 OK\r\n",
            "nonsense\r\n\r\n",
            "HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}",
            "HTTP/1.0 200 OK\r\n\r\n{}",
        ] {
            let (client, _directory) = answer(text);
            let fault = client.snapshot().unwrap_err();
            assert!(matches!(fault, ControlFault::Malformed(_)), "{text:?}: {fault:?}");
        }
    }

    #[test]
    fn answer_without_end_is_refused_at_the_limit() {
        let head = format!("HTTP/1.0 200 OK\r\nX: {}\r\n\r\n", "a".repeat(20_000));
        let (client, _directory) = answer(head);
        assert!(matches!(client.snapshot(), Err(ControlFault::TooLong(MAX_HEAD))));
        let (client, _directory) = answer(vec![b'a'; MAX_ANSWER + 1]);
        let fault = client.with_timeout(Duration::from_secs(60)).snapshot().unwrap_err();
        assert!(matches!(fault, ControlFault::TooLong(MAX_ANSWER)), "{fault:?}");
    }

    #[test]
    fn server_that_drips_keeps_the_deadline() {
        let (client, _directory) = client(|mut stream| {
            while stream.write_all(b"H").is_ok() {
                thread::sleep(Duration::from_millis(50));
            }
        });
        let begun = Instant::now();
        assert!(matches!(client.snapshot(), Err(ControlFault::Late(_))));
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn interrupted_request_ends_at_once_and_none_is_begun_later() {
        let (client, interrupted, listener, _directory) = silent();
        let begun = Instant::now();
        let fault = thread::scope(|scope| {
            let asking = scope.spawn(|| client.snapshot().unwrap_err());
            // The server takes the connection, and says nothing.
            let _kept = listener.accept().unwrap();
            interrupted.store(true, Ordering::Relaxed);
            asking.join().unwrap()
        });
        assert!(matches!(fault, ControlFault::Interrupted), "{fault:?}");
        assert!(begun.elapsed() < REQUEST_TIME / 2, "{:?}", begun.elapsed());
        assert!(matches!(client.snapshot(), Err(ControlFault::Interrupted)));
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn request_that_puts_back_has_its_time_after_a_signal() {
        let (client, interrupted, _listener, _directory) = silent();
        let grace = Duration::from_millis(150);
        let client = client.with_grace(grace);
        let begun = Instant::now();
        interrupted.store(true, Ordering::Relaxed);
        let late = client.snapshot().unwrap_err();
        assert!(matches!(late, ControlFault::Late(time) if time == grace), "{late:?}");
        assert!(grace <= begun.elapsed() && begun.elapsed() < REQUEST_TIME / 2);
    }

    /// A client whose server says nothing.
    fn silent() -> (ControlClient, Arc<Interrupted>, UnixListener, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let interrupted = Arc::new(Interrupted::new(false));
        let client = ControlClient::new(socket).with_interrupt(Some(Arc::clone(&interrupted)));
        (client, interrupted, listener, directory)
    }

    #[test]
    fn words_of_a_refusal_are_escaped_and_cut_short() {
        let body = format!("{{\"error\":\"\\u001b[2J{}\",\"hint\":\"a\\nb\"}}", "x".repeat(500));
        let (client, _directory) = answer(format!("HTTP/1.0 409 Conflict\r\n\r\n{body}"));
        let fault = client.snapshot().unwrap_err();
        assert!(fault.to_string().starts_with("\\u{1b}[2Jxxx"), "{fault}");
        assert!(fault.to_string().len() < 420, "{fault}");
        assert_eq!(fault.hint().unwrap(), "a\\nb");
    }

    #[test]
    fn words_of_an_answer_that_is_none_are_escaped_and_cut_short() {
        let body = format!("{{\"event\":\"\\u001b[2J{}\"}}", "x".repeat(500));
        let (client, _directory) = answer(format!("HTTP/1.0 200 OK\r\n\r\n{body}"));
        let fault = client.get::<Event>("/").unwrap_err();
        assert!(matches!(fault, ControlFault::Malformed(_)), "{fault:?}");
        assert!(fault.to_string().contains("\\u{1b}[2Jxxx"), "{fault}");
        assert!(fault.to_string().len() < 500, "{fault}");
    }

    #[test]
    fn events_are_read_between_comments_and_end_with_the_server() {
        let (client, _directory) = answer(
            "HTTP/1.0 200 OK\r\n\r\n: ready\n\ndata: {\"event\":\"device_added\",\"device\":\"a\"}\n\n:\n\n",
        );
        let events: Vec<_> = client.events().unwrap().map(Result::unwrap).collect();
        let device = rtvirtio_units::DiskName::new("a").unwrap();
        assert_eq!(events, [Event::DeviceAdded { device }]);
        let (client, _directory) = answer("HTTP/1.0 503 No\r\n\r\n{\"error\":\"too many\"}");
        assert_eq!(client.events().unwrap_err().to_string(), "too many");
    }

    #[test]
    fn absent_server_is_named_with_a_hint() {
        let fault = ControlClient::new("/nonexistent/s").snapshot().unwrap_err();
        assert_eq!(fault.to_string(), "cannot connect to the data plane at /nonexistent/s");
        assert!(fault.hint().unwrap().contains("rtvirtio serve"));
    }
}
