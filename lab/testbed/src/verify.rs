//! Whether a server keeps what it acknowledged: random requests whose content
//! tells where and when it was written, through disconnects and kills.
//!
//! What is promised, and checked at each connection and at each read:
//! - an acknowledged write, write-zeroes or discard is there, also after the
//!   server was killed (SIGKILL leaves the page cache);
//! - a request that was in flight when the connection or the server went is done
//!   wholly or not at all, block by block, and no later than the next connection
//!   is served;
//! - nothing else changes, no request fails, none waits for 10 s.
//!
//! - `block`: content. - `model`: what may be where.
//!
//! Properties (tests of the same name): `block_changed_behind_its_back_is_found`,
//! `swapped_blocks_are_found`.

mod block;
mod model;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::builder::TypedValueParser as _;
use rtvirtio_host::interrupt::{Interrupted, wait};
use serde::Serialize;

use crate::client::{Client, ClientError, Ended, Endpoint, MAX_DEPTH, Queue, Shape, capacity};
use crate::load::BLOCK;
use crate::random::Random;
use crate::server::Server;
use model::{Change, Part, Pending, Violation};

/// Largest request, blocks.
const LARGEST: usize = 8;
/// How long a server may complete nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a queue without completions looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

/// Memory that is shared and taken back, and how long it rests in between.
const CHURNED: usize = 64 << 10;
const BETWEEN_CHURNS: Duration = Duration::from_millis(2);

/// Do requests.
const RUN: u8 = 0;
/// Start none, wait for those in flight.
const DRAIN: u8 = 1;
/// Leave those in flight behind.
const ABANDON: u8 = 2;

/// A promise was broken.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The client cannot go on.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A request failed.
    #[error("{operation} of {blocks} blocks from block {first} failed: {error}")]
    Request {
        /// What it was.
        operation: &'static str,
        /// Its first block.
        first: u64,
        /// Its blocks.
        blocks: usize,
        /// The errno.
        error: std::io::Error,
    },
    /// Requests do not end.
    #[error("{flying} requests of a queue have waited for {} s", PATIENCE.as_secs())]
    Hung {
        /// How many.
        flying: usize,
    },
    /// A completion names a request that is not in flight.
    #[error("a request was completed twice, or was never made (slot {0})")]
    Repeated(usize),
    /// A block holds what it may not.
    #[error(transparent)]
    Content(#[from] Box<Violation>),
}

/// How to load a server.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The server's socket
    #[arg(long)]
    pub socket: PathBuf,
    /// Queues
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u16).range(1..=64).map(usize::from))]
    pub queues: usize,
    /// Queues among them that rest.
    #[arg(skip)]
    pub idle: usize,
    /// Requests in flight of each queue
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u16).range(1..=64).map(usize::from))]
    pub depth: usize,
    /// Whether memory is shared with the server and taken back all the time, beside the load.
    #[arg(skip)]
    pub churn: bool,
    /// How much of the disk, MiB from its start
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub mebibytes: u32,
    /// Seed of order and content, which no earlier run on this disk had; without, the time
    // Content of an earlier run with the same seed would be taken for this one's, and so for misplaced.
    #[arg(long, default_value_t = unique(), hide_default_value = true)]
    pub seed: u64,
}

impl Options {
    const fn bytes(&self) -> u64 {
        (self.mebibytes as u64) << 20
    }
}

/// What no earlier run had: the time.
pub fn unique() -> u64 {
    jiff::Timestamp::now().as_nanosecond() as u64
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Reads in the load.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Write-zeroes.
    pub zeroes: u64,
    /// Discards.
    pub discards: u64,
    /// Flushes.
    pub flushes: u64,
    /// Blocks whose content was judged.
    pub checked: u64,
    /// Requests that were in flight when a connection went.
    pub abandoned: u64,
    /// Times that memory was shared and taken back.
    pub churns: u64,
    /// Connections, with those that only read the capacity.
    pub connections: u64,
    /// The longest time from a disconnect or a kill to the next completion.
    pub longest_pause: Duration,
}

impl Report {
    fn add(&mut self, queue: &Self) {
        self.reads += queue.reads;
        self.writes += queue.writes;
        self.zeroes += queue.zeroes;
        self.discards += queue.discards;
        self.flushes += queue.flushes;
        self.checked += queue.checked;
        self.abandoned += queue.abandoned;
    }
}

/// A load that remembers what it was told.
pub struct Verifier {
    options: Options,
    parts: Vec<(Part, Random)>,
    random: Random,
    report: Report,
    /// When the last connection or the server went.
    gone: Option<Instant>,
}

impl Verifier {
    /// Nothing is known of the disk yet.
    ///
    /// # Errors
    /// If the queues have too little room to share.
    pub fn new(options: Options) -> Result<Self> {
        let (bytes, busy) = (options.bytes(), options.queues.saturating_sub(options.idle));
        let count = (bytes / BLOCK as u64) as usize / busy.max(1);
        ensure!(count >= 4 * LARGEST, "{bytes} bytes are too few to verify with");
        ensure!((1..=MAX_DEPTH).contains(&options.depth), "depth is 1 to {MAX_DEPTH}");
        let part = |queue: usize| {
            let start = (queue * count) as u64;
            (Part::new(start, count, options.seed), Random::new(options.seed ^ (start + 1)))
        };
        let parts = (0..busy).map(part).collect();
        let random = Random::new(options.seed);
        Ok(Self { options, parts, random, report: Report::default(), gone: None })
    }

    /// What was done so far.
    #[must_use]
    pub const fn report(&self) -> &Report {
        &self.report
    }

    /// Reads everything, then loads for some time, and waits for what is in flight.
    ///
    /// # Errors
    /// If a promise is broken; if interrupted.
    pub fn load(&mut self, time: Duration, interrupted: &Interrupted) -> Result<()> {
        self.session(|stop| {
            let waited = wait(time, interrupted);
            stop.store(DRAIN, Ordering::Relaxed);
            Ok(waited?)
        })
    }

    /// Reads everything.
    ///
    /// # Errors
    /// If a promise was broken.
    pub fn check(&mut self) -> Result<()> {
        self.session(|stop| {
            stop.store(DRAIN, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Drops the connection in mid-I/O `count` times, and is back at once each time; then
    /// another client that only looks at the capacity.
    ///
    /// # Errors
    /// If a promise is broken; if interrupted.
    pub fn disconnects(&mut self, count: u32, interrupted: &Interrupted) -> Result<()> {
        for turn in 0..count {
            let time = Duration::from_millis(5 + self.random.below(60));
            let lost = self.session(|stop| {
                let waited = wait(time, interrupted);
                stop.store(ABANDON, Ordering::Relaxed);
                Ok(waited?)
            });
            lost.with_context(|| format!("disconnect {}", turn + 1))?;
            self.gone = Some(Instant::now());
            if turn % 2 == 1 {
                capacity(&self.options.socket)?;
                self.report.connections += 1;
            }
        }
        self.check()
    }

    /// Kills the server (SIGKILL) at a random moment under load `count` times, starts it anew
    /// with `start` and checks what is there. It must end well at last (SIGTERM).
    ///
    /// # Errors
    /// If a promise is broken, the server fails or ends by itself; if interrupted.
    pub fn kills(
        &mut self,
        mut start: impl FnMut() -> Result<Server>,
        count: u32,
        interrupted: &Interrupted,
    ) -> Result<()> {
        let mut server = start()?;
        for turn in 0..count {
            let time = Duration::from_millis(30 + self.random.below(300));
            let mut killed = None;
            let lost = self.session(|stop| {
                let waited =
                    wait(time, interrupted).map_err(Into::into).and_then(|()| server.kill());
                killed = Some(Instant::now());
                stop.store(ABANDON, Ordering::Relaxed);
                waited
            });
            lost.with_context(|| format!("kill {}", turn + 1))?;
            self.gone = killed;
            server = start()?;
        }
        self.check()?;
        server.terminate()
    }

    /// One connection: each queue reads its blocks, then loads until `control`, which is called
    /// in this thread, tells it to end.
    fn session(&mut self, control: impl FnOnce(&AtomicU8) -> Result<()>) -> Result<()> {
        let Options { socket, queues, depth, churn, .. } = &self.options;
        let bytes = self.options.bytes();
        let shape = Shape { queues: *queues, depth: *depth, buffer: LARGEST * BLOCK };
        let mut client = Client::connect(Endpoint::Socket(socket), shape)?;
        self.report.connections += 1;
        ensure!(client.capacity() >= bytes, "the disk has {} bytes only", client.capacity());
        let stop = AtomicU8::new(RUN);
        let parts = &mut self.parts;
        let (queues, controlled) = std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let work = |queue: &mut Queue, (part, random): &mut (Part, Random)| {
                    let mut work = Work::new(queue, part, random, &stop);
                    let result = work.run();
                    if result.is_err() {
                        stop.store(ABANDON, Ordering::Relaxed);
                    }
                    (result, work.report, work.first)
                };
                client.run_beside(parts.iter_mut(), work, |memory| {
                    let mut churns = 0;
                    while *churn && stop.load(Ordering::Relaxed) == RUN {
                        memory
                            .churn(CHURNED)
                            .inspect_err(|_| stop.store(ABANDON, Ordering::Relaxed))?;
                        churns += 1;
                        std::thread::sleep(BETWEEN_CHURNS);
                    }
                    Ok::<u64, ClientError>(churns)
                })
            });
            let controlled = control(&stop);
            if controlled.is_err() {
                stop.store(ABANDON, Ordering::Relaxed);
            }
            (load.join(), controlled)
        });
        let Ok((queues, churned)) = queues else { bail!("a queue's thread failed") };
        let first = queues.iter().filter_map(|(.., first)| *first).min();
        if let (Some(gone), Some(first)) = (self.gone.take(), first) {
            let pause = first.saturating_duration_since(gone);
            self.report.longest_pause = self.report.longest_pause.max(pause);
        }
        queues.iter().for_each(|(_, report, _)| self.report.add(report));
        let mut broken = None;
        for (result, ..) in queues {
            match result {
                // Wrong content says more than what follows from it.
                Err(error @ VerifyError::Content(_)) => broken = Some(error),
                Err(error) => broken = broken.or(Some(error)),
                Ok(()) => {}
            }
        }
        if let Some(error) = broken {
            return Err(error.into());
        }
        self.report.churns += churned?;
        controlled
    }
}

/// One queue at work.
struct Work<'a> {
    queue: &'a mut Queue,
    part: &'a mut Part,
    random: &'a mut Random,
    stop: &'a AtomicU8,
    pending: [Option<Pending>; MAX_DEPTH],
    report: Report,
    first: Option<Instant>,
    /// The block from which on nothing was read since the connection.
    unread: usize,
}

impl<'a> Work<'a> {
    fn new(
        queue: &'a mut Queue,
        part: &'a mut Part,
        random: &'a mut Random,
        stop: &'a AtomicU8,
    ) -> Self {
        let report = Report::default();
        Self {
            queue,
            part,
            random,
            stop,
            pending: [None; MAX_DEPTH],
            report,
            first: None,
            unread: 0,
        }
    }

    fn run(&mut self) -> Result<(), VerifyError> {
        let result = self.requests();
        // Whatever happened: what is in flight now may have been done or not.
        for request in self.pending.iter_mut().filter_map(Option::take) {
            self.part.abandoned(&request);
            self.report.abandoned += 1;
        }
        result
    }

    fn requests(&mut self) -> Result<(), VerifyError> {
        let mut moved = Instant::now();
        loop {
            let stop = self.stop.load(Ordering::Relaxed);
            if stop == ABANDON {
                return Ok(());
            }
            for slot in 0..self.queue.depth() {
                if self.pending[slot].is_some() {
                    continue;
                }
                // What is there is judged before anything is overwritten.
                if self.unread < self.part.len() {
                    self.read_next(slot);
                } else if stop == RUN {
                    self.anything(slot);
                }
            }
            if self.queue.flying() == 0 {
                return Ok(());
            }
            let mut ended = [None; MAX_DEPTH];
            let mut count = 0;
            self.queue.wait(LOOK, |_, request| {
                ended[count] = Some(request);
                count += 1;
            })?;
            if count > 0 {
                moved = Instant::now();
                self.first.get_or_insert(moved);
            } else if moved.elapsed() > PATIENCE {
                return Err(VerifyError::Hung { flying: self.queue.flying() });
            }
            for request in ended.into_iter().flatten() {
                self.ended(request)?;
            }
        }
    }

    fn ended(&mut self, ended: Ended) -> Result<(), VerifyError> {
        let slot = ended.slot;
        let pending = self.pending.get_mut(slot).and_then(Option::take);
        let request = pending.ok_or(VerifyError::Repeated(slot))?;
        if ended.result != 0 {
            // It may have been done in part.
            self.part.abandoned(&request);
            return Err(VerifyError::Request {
                operation: name(request.change),
                first: self.part.number(request.first),
                blocks: request.count,
                error: std::io::Error::from_raw_os_error(-ended.result),
            });
        }
        self.part.acknowledged(&request);
        if request.change == Change::Read {
            let blocks = self.queue.buffer(slot).chunks_exact(BLOCK).take(request.count);
            for (index, block) in blocks.enumerate() {
                self.part.saw(request.first + index, block::look(block))?;
                self.report.checked += 1;
            }
        }
        Ok(())
    }

    /// Reads the next blocks that were not read since the connection.
    fn read_next(&mut self, slot: usize) {
        let count = LARGEST.min(self.part.len() - self.unread);
        if self.submit(slot, Change::Read, self.unread, count) {
            self.unread += count;
        }
    }

    /// A random request on random blocks that are free.
    fn anything(&mut self, slot: usize) {
        let (discards, zeroes) = self.queue.takes();
        let change = match self.random.below(100) {
            0..45 => Change::Write,
            45..50 if zeroes => Change::Zero,
            50..55 if discards => Change::Discard,
            55..60 => Change::Flush,
            _ => Change::Read,
        };
        let count = 1 + self.random.below(LARGEST as u64) as usize;
        for _ in 0..4 {
            let first = self.random.below((self.part.len() - count + 1) as u64) as usize;
            if self.submit(slot, change, first, count) {
                break;
            }
        }
    }

    fn submit(&mut self, slot: usize, change: Change, first: usize, count: usize) -> bool {
        let Some(request) = self.part.begin(change, first, count) else { return false };
        let (offset, length) = (self.part.number(first) * BLOCK as u64, count * BLOCK);
        match change {
            Change::Read => {
                // What is not read must not look as if it were.
                self.queue.buffer(slot)[..length].fill(0xA5);
                self.queue.read(slot, offset, length);
                self.report.reads += 1;
            }
            Change::Write => {
                let blocks = self.queue.buffer(slot).chunks_exact_mut(BLOCK).take(count);
                for (index, block) in blocks.enumerate() {
                    self.part.tag(&request, index).fill(block);
                }
                self.queue.write(slot, offset, length);
                self.report.writes += 1;
            }
            Change::Zero => {
                self.queue.write_zeroes(slot, offset, length);
                self.report.zeroes += 1;
            }
            Change::Discard => {
                self.queue.discard(slot, offset, length);
                self.report.discards += 1;
            }
            Change::Flush => {
                self.queue.flush(slot);
                self.report.flushes += 1;
            }
        }
        self.pending[slot] = Some(request);
        true
    }
}

const fn name(change: Change) -> &'static str {
    match change {
        Change::Read => "read",
        Change::Write => "write",
        Change::Zero => "write-zeroes",
        Change::Discard => "discard",
        Change::Flush => "flush",
    }
}

#[cfg(test)]
mod tests;
