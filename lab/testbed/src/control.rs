//! Clients of a data plane's control API that ask for much: queues that move all the time, a monitor that ends, events that
//! nobody reads, requests that are none.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rtvirtio_host::dataplane::{ControlClient, ControlFault};
use rtvirtio_spec::control::{MoveQueue, Moved, SetPolicy};
use rtvirtio_spec::serve::{Policy, wire};
use rtvirtio_units::{IoThreadName, Nanos};

use crate::random::Random;
use crate::window::durations;

/// Queues of the disk whose queues move.
pub const QUEUES: usize = 4;
/// Threads that ask for moves.
const MOVERS: usize = 4;
/// How long an answer to a request that is none may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Requests for a move to the first IOThread, and to the second.
fn targets() -> Result<[MoveQueue; 2]> {
    let names = ["iot0", "iot1"].map(IoThreadName::new);
    let [Ok(first), Ok(second)] = names else { bail!("a bad name of an iothread") };
    Ok([first, second].map(|iothread| MoveQueue { iothread }))
}

/// What movers were answered.
pub struct Asked {
    /// Of queues that moved: how long nobody served them.
    pub pauses: Histogram<u64>,
    /// Requests that found the queue not started, or there already.
    pub idle: u64,
    /// Requests that were refused since the queue was being moved, edited or stopped.
    pub busy: u64,
}

impl Asked {
    fn new() -> Result<Self> {
        Ok(Self { pauses: durations()?, idle: 0, busy: 0 })
    }
}

/// Threads that ask for moves of random queues of a disk `disk` to the other one of two IOThreads.
pub struct Movers<'a> {
    control: &'a ControlClient,
    /// Where each queue is, or is being sent, or was sent last while it was stopped.
    at: [AtomicUsize; QUEUES],
    stop: AtomicBool,
    every: Duration,
}

impl<'a> Movers<'a> {
    /// So many moves a second.
    #[must_use]
    pub fn new(control: &'a ControlClient, rate: f64) -> Self {
        let (at, stop) = ([const { AtomicUsize::new(0) }; QUEUES], AtomicBool::new(false));
        Self { control, at, stop, every: Duration::from_secs_f64(MOVERS as f64 / rate) }
    }

    /// While `work` is done; what came of both.
    pub fn during<T>(&self, seed: u64, work: impl FnOnce() -> T) -> (Result<Asked>, T) {
        std::thread::scope(|scope| {
            let ask = |mover| scope.spawn(move || self.run(Random::new(seed ^ mover)));
            let threads: Vec<_> = (1..=MOVERS as u64).map(ask).collect();
            let done = work();
            self.stop.store(true, Ordering::Relaxed);
            let mut all = Asked::new();
            for thread in threads {
                let asked = thread.join();
                all = all.and_then(|mut all| {
                    let Ok(asked) = asked else { bail!("a thread that asks for moves failed") };
                    let asked = asked.context("move a queue")?;
                    all.pauses.add(asked.pauses)?;
                    all.idle += asked.idle;
                    all.busy += asked.busy;
                    Ok(all)
                });
            }
            (all, done)
        })
    }

    fn run(&self, mut random: Random) -> Result<Asked> {
        let bodies = targets()?;
        let mut asked = Asked::new()?;
        let mut next = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let first = random.below(QUEUES as u64) as usize;
            // One that is being stopped or edited is passed over: the others may move meanwhile.
            for queue in (first..first + QUEUES).map(|queue| queue % QUEUES) {
                // Said before it is asked, so that two movers of a queue ask for there and back.
                let to = self.at[queue].fetch_xor(1, Ordering::Relaxed) ^ 1;
                let path = format!("/v1/mapping/disk/{queue}");
                match self.control.ask::<_, Moved>("PUT", &path, &bodies[to]) {
                    Ok(Moved { pause_ns: Nanos::ZERO }) => asked.idle += 1,
                    Ok(Moved { pause_ns }) => asked.pauses.saturating_record(pause_ns.get()),
                    Err(ControlFault::Refused { status: 409, .. }) => {
                        asked.busy += 1;
                        self.at[queue].fetch_xor(1, Ordering::Relaxed);
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                }
                break;
            }
            // What was missed is made up for, but for a tenth of a second only.
            let now = Instant::now();
            next =
                (next + self.every).max(now.checked_sub(Duration::from_millis(100)).unwrap_or(now));
            std::thread::sleep(next.saturating_duration_since(now));
        }
        Ok(asked)
    }
}

/// Sends the first queue of `disk` to the second IOThread if `number` is even, else to the first.
///
/// # Errors
/// If the data plane refuses.
pub fn send_queue(control: &ControlClient, disk: &str, number: u64) -> Result<()> {
    let path = format!("/v1/mapping/{disk}/0");
    Ok(control.change("PUT", &path, &targets()?[1 - number as usize % 2], &[])?)
}

/// Has the monitor work, without a decision of its own, or ends it.
///
/// # Errors
/// If the data plane refuses.
pub fn switch_monitor(control: &ControlClient, works: bool) -> Result<()> {
    let policy = Some(if works { Policy::Advise } else { Policy::Static });
    let settings = wire::IoCores { policy, ..wire::IoCores::default() };
    Ok(control.change("PUT", "/v1/policy", &SetPolicy(settings), &[])?)
}

/// A client that follows the events, and reads none.
///
/// # Errors
/// If the data plane is not there.
pub fn never_read(control: &ControlClient) -> Result<UnixStream> {
    let mut reader = UnixStream::connect(control.socket()).context("follow events")?;
    reader.write_all(b"GET /v1/events HTTP/1.1\r\nHost: rtvirtio\r\n\r\n")?;
    Ok(reader)
}

/// Requests that no server should take, by turns.
const MALFORMED: [&[u8]; 8] = [
    b"\x00\xff\xfe\x16\x03\x01 not HTTP at all\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /v1/nothing HTTP/1.0\r\n\r\n",
    b"DELETE /v1/snapshot HTTP/1.0\r\n\r\n",
    b"PUT /v1/policy HTTP/1.0\r\nContent-Length: 20\r\n\r\n{\"policy\":\"fastest\"}",
    b"PUT /v1/policy HTTP/1.0\r\nContent-Length: 1000000\r\n\r\n{",
    b"POST /v1/devices HTTP/1.0\r\nContent-Length: 9\r\n\r\n{\"a\":[[[[",
    b"PUT /v1/mapping/vm0/99 HTTP/1.0\r\nContent-Length: 20\r\n\r\n{\"iothread\":\"iot99\"}",
];

/// Sends a request that is none, or asks for what is not there, another one for each number, and waits for what is said,
/// which is no success.
///
/// # Errors
/// It is; there is no answer.
pub fn ask_malformed(socket: &Path, number: u64) -> Result<()> {
    let request = MALFORMED[number as usize % MALFORMED.len()];
    let mut stream = UnixStream::connect(socket).context("connect to the control socket")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // A server that refuses before it has read all closes at once.
    let is_closed = |error: &std::io::Error| {
        matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
    };
    match stream.write_all(request).and_then(|()| stream.shutdown(std::net::Shutdown::Write)) {
        Err(error) if !is_closed(&error) && error.kind() != ErrorKind::NotConnected => {
            return Err(error).context("send a malformed request");
        }
        _ => {}
    }
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if !is_closed(&error) => {
            return Err(error).context("wait for the answer to a malformed request");
        }
        _ => {}
    }
    let text = String::from_utf8_lossy(&answer);
    let status = text.split_whitespace().nth(1).unwrap_or_default();
    ensure!(!status.starts_with('2'), "a malformed request had success: {text}");
    Ok(())
}
