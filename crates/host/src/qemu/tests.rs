//! Monitor and agent against peers of every kind, on real sockets.

mod agent;
mod monitor;
mod virsh;

use std::fmt;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Fault, QemuError};

/// More than any answer here takes.
const ENOUGH: Duration = Duration::from_secs(20);
/// For peers that do not answer.
pub(super) const SHORT: Duration = Duration::from_millis(200);

/// What a peer has of its connection.
pub(crate) struct Wire {
    reader: BufReader<UnixStream>,
    stream: UnixStream,
}

impl Wire {
    pub(crate) fn over(stream: UnixStream) -> Self {
        Self { reader: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// The next request, without a sentinel; `None` at the end.
    pub(crate) fn hear(&mut self) -> Option<Value> {
        let mut line = Vec::new();
        self.reader.read_until(b'\n', &mut line).ok()?;
        let text = line.strip_prefix(b"\xff").unwrap_or(&line);
        serde_json::from_slice(text).ok()
    }

    /// Says `bytes`; a client that is gone does not matter.
    pub(crate) fn say(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref());
    }

    pub(crate) fn say_json(&mut self, value: &Value) {
        self.say(format!("{value}\r\n"));
    }

    /// Says `bytes` again and again until the client is gone.
    fn say_without_end(&mut self, bytes: impl AsRef<[u8]>) {
        while self.stream.write_all(bytes.as_ref()).is_ok() {}
    }
}

/// A socket in a directory that goes when this is dropped.
struct Place {
    _directory: TempDir,
    socket: PathBuf,
}

/// A peer that serves one client as `play` does.
fn peer(play: impl FnOnce(&mut Wire) + Send + 'static) -> Place {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        play(&mut Wire::over(stream));
    });
    Place { _directory: directory, socket }
}

/// Runs `f` and sees that it ends at most 1 s after a deadline of 200 ms. What a
/// thread that sleeps beside it is late does not count: the machine is starved then.
pub(super) fn keeps_deadline<T>(f: impl FnOnce() -> T) -> T {
    const NAP: Duration = Duration::from_millis(10);
    let is_over = AtomicBool::new(false);
    let start = Instant::now();
    let (result, elapsed, starved) = thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut late = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let asleep = Instant::now();
                thread::sleep(NAP);
                late += asleep.elapsed() - NAP;
            }
            late
        });
        let result = f();
        let elapsed = start.elapsed();
        is_over.store(true, Ordering::Relaxed);
        (result, elapsed, sleeper.join().unwrap())
    });
    let allowed = SHORT + Duration::from_secs(1) + starved;
    assert!(elapsed < allowed, "{elapsed:?}, {starved:?} of it starved");
    result
}

/// Sees that `f` fails for being late: after 200 ms, and at most 1 s after that.
fn late<T: fmt::Debug>(f: impl FnOnce(Duration) -> Result<T, QemuError>) {
    let start = Instant::now();
    let fault = keeps_deadline(|| f(SHORT)).unwrap_err().fault;
    assert!(matches!(fault, Fault::Late { timeout: SHORT }), "{fault:?}");
    assert!(start.elapsed() >= SHORT);
}

/// A refusal as a QMP or agent message.
pub(crate) fn refusal(class: &str, description: &str) -> Value {
    json!({"error": {"class": class, "desc": description}})
}
