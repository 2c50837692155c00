//! Threads that read, one request at a time each, beside threads that compute: for one window, and what they did.
//!
//! - `requester`: one thread's way to do its requests. `file`: what is read.

mod file;
mod requester;

use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, RwLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use rtvirtio_calibrate::load::canary_summary;
use rtvirtio_completion::{Costs, Tokens};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::run::{Canary, Machine};
use serde::{Deserialize, Serialize};

use crate::cpu::ProcessCpu;
use crate::random::Random;
use crate::window::{Count, Phase, Watch, Watched, latencies};

pub use file::TestFile;
pub use requester::{Ended, Requester};

named! {
    /// What is read.
    pub enum Target {
        /// A request of 8 µs that moves no data.
        Emulated = "emulated",
        /// 4 KiB of a file.
        File4k = "file-4k",
        /// 128 KiB of a file.
        File128k = "file-128k",
    }
}

impl Target {
    /// Bytes of a request.
    #[must_use]
    pub const fn block(self) -> usize {
        match self {
            Self::Emulated => 0,
            Self::File4k => 4 << 10,
            Self::File128k => 128 << 10,
        }
    }

    /// Whether it is of a file.
    #[must_use]
    pub const fn is_file(self) -> bool {
        self.block() > 0
    }
}

named! {
    /// How threads learn that their requests have ended.
    pub enum Mode {
        /// They sleep in a plain call.
        Pread = "pread",
        /// They look at a completion queue for ever.
        PeekSpin = "peek-spin",
        /// A kernel thread for each ring polls for submissions; they sleep.
        Sqpoll = "sqpoll",
        /// One kernel thread for all rings does.
        SqpollShared = "sqpoll-shared",
        /// The project's: they sleep.
        Interrupt = "interrupt",
        /// The project's: they look for ever.
        Poll = "poll",
        /// The project's: they look while that pays and a CPU is idle.
        Adaptive = "adaptive",
    }
}

/// The I/O side of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Io {
    /// What is read.
    pub target: Target,
    /// How threads learn of the end.
    pub mode: Mode,
    /// I/O threads, at least one.
    pub threads: usize,
}

/// CPU time in the window, s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CpuSeconds {
    /// Of the I/O threads.
    pub io: f64,
    /// Of the compute threads.
    pub compute: f64,
    /// Of the process: kernel threads that poll its rings among it.
    pub process: f64,
}

/// From the start of all threads to the window.
pub const WARM_UP: Duration = Duration::from_millis(250);
/// To set a cell up and to end it, about.
pub const AROUND: Duration = Duration::from_millis(60);
/// Iterations between two looks at the phase: about a microsecond.
const BATCH: u64 = 1024;

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// Length of the window, s.
    pub seconds: f64,
    /// Requests in the window.
    pub requests: u64,
    /// Their latencies, ns.
    pub latencies: Histogram<u64>,
    /// Of those, ended by looking.
    pub spun: u64,
    /// Of all compute threads.
    pub iterations: u64,
    /// Who used the CPUs.
    pub cpu: CpuSeconds,
    /// The machine meanwhile.
    pub machine: Machine,
    /// How late a sleeping thread woke.
    pub canary: Canary,
}

/// What the threads of a cell look at.
#[derive(Debug)]
pub struct Stage {
    /// Where the measurement is.
    pub phase: Phase,
    /// Whether compute threads compute.
    pub load: AtomicBool,
    /// Held for writing until all threads are to begin.
    gate: RwLock<()>,
}

impl Stage {
    /// Whether compute threads compute at first.
    #[must_use]
    pub const fn new(load: bool) -> Self {
        Self { phase: Phase::new(), load: AtomicBool::new(load), gate: RwLock::new(()) }
    }

    /// Says that the calling thread is there, and waits until all may begin.
    fn enter(&self, there: Sender<u32>) {
        let _ = there.send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
        // Who collects these waits for the last sender to go.
        drop(there);
        // Poisoned or not, the phase says what to do.
        drop(self.gate.read());
    }
}

/// Every I/O thread's ring and memory.
fn requesters<'a>(io: Io, file: Option<&'a TestFile>) -> Result<Vec<Requester<'a>>> {
    let file = file.filter(|_| io.target.is_file()).map(TestFile::file);
    ensure!(file.is_some() || !io.target.is_file(), "there is no file to read");
    let mut all: Vec<Requester<'a>> = Vec::new();
    for _ in 0..io.threads {
        let first = all.first().and_then(Requester::ring);
        let one = Requester::new(io.target, io.mode, file, first).context(
            "io_uring is not to be had: allow it (sysctl kernel.io_uring_disabled=0), let \
             the process lock 8 MiB (ulimit -l), or measure --modes pread alone",
        )?;
        all.push(one);
    }
    Ok(all)
}

/// Reads until the phase is over; `record` is told of each request of the window: when it ended, what
/// it took, and how its end was seen.
fn read(
    requester: &Requester<'_>,
    (io, seed): (Io, u64),
    (tokens, costs): (&Arc<Tokens>, Costs),
    (stage, there): (&Stage, Sender<u32>),
    done: &Count,
    mut record: impl FnMut(Instant, Duration, Ended),
) -> Result<()> {
    let _end = stage.phase.ended_by_drop();
    // Without it a sleep is up to 50 µs too long.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    let mut spinner = requester.spinner(tokens, costs);
    let mut random = Random::new(seed);
    let (block, blocks) = match io.target.block() {
        0 => (0, 1),
        block => (block as u64, TestFile::blocks(block)),
    };
    stage.enter(there);
    let mut before = Instant::now();
    let mut requests = 0;
    while !stage.phase.is_over() {
        let offset = random.below(blocks) * block;
        let ended = requester.request(spinner.as_mut(), offset).context("a request failed")?;
        // One look at the clock: the next request begins where this one ended.
        let now = Instant::now();
        requests += 1;
        done.0.store(requests, Ordering::Relaxed);
        if stage.phase.counts() {
            record(now, now - before, ended);
        }
        before = now;
    }
    Ok(())
}

/// Counts until the phase is over, and rests while there is to be no load.
fn compute(stage: &Stage, there: Sender<u32>, done: &Count) {
    stage.enter(there);
    let mut iterations = 0_u64;
    while !stage.phase.is_over() {
        if stage.load.load(Ordering::Relaxed) {
            for _ in 0..BATCH {
                iterations = black_box(iterations + 1);
            }
            done.0.store(iterations, Ordering::Relaxed);
        } else {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }
}

/// What is to run.
#[derive(Debug, Clone, Copy)]
pub struct Threads<'a> {
    /// Those that read; none: there are none.
    pub io: Option<Io>,
    /// How many compute.
    pub compute: usize,
    /// Of what is read.
    pub seed: u64,
    /// What is read, if it is of a file.
    pub file: Option<&'a TestFile>,
    /// Of waits.
    pub costs: Costs,
}

/// Threads that run.
pub struct Running<'a, 'scope> {
    reads: &'a [Count],
    counts: &'a [Count],
    io: BTreeSet<u32>,
    compute: BTreeSet<u32>,
    computers: Vec<ScopedJoinHandle<'scope, ()>>,
}

impl Running<'_, '_> {
    /// Has compute threads see what has changed for them.
    pub fn wake(&self) {
        self.computers.iter().for_each(|computer| computer.thread().unpark());
    }
}

impl Threads<'_> {
    /// Runs them while `observe` looks at them, and returns what it found and the readers' records: each has an `empty` one, in
    /// which `record` notes requests of the window.
    ///
    /// # Errors
    /// If a ring or thread cannot be had, if a request fails; those of `observe`.
    pub fn run<R: Send, T>(
        &self,
        stage: &Stage,
        empty: impl Fn() -> Result<R> + Sync,
        record: impl Fn(&mut R, Instant, Duration, Ended) + Sync,
        observe: impl FnOnce(&Running<'_, '_>) -> Result<T>,
    ) -> Result<(Vec<R>, T)> {
        let requesters = self.io.map(|io| requesters(io, self.file)).transpose()?;
        let requesters = requesters.unwrap_or_default();
        let tokens = Arc::new(Tokens::new().context("no tokens without /proc (mount it)")?);
        let (reads, counts) = (Count::some(requesters.len()), Count::some(self.compute));
        std::thread::scope(|scope| {
            // Whatever happens, the threads are let go (the gate, which is dropped first) and end.
            let end = stage.phase.ended_by_drop();
            let gate = stage.gate.write();
            let mut readers = Vec::new();
            let (there, readers_there) = channel();
            for (index, (requester, done)) in requesters.into_iter().zip(&reads).enumerate() {
                let Some(io) = self.io else { break };
                let seed = self.seed << 32 | index as u64;
                let (tokens, costs, there) = (&tokens, self.costs, there.clone());
                let (empty, record) = (&empty, &record);
                let body = move || -> Result<R> {
                    let mut into = empty()?;
                    let record = |now, took, ended| record(&mut into, now, took, ended);
                    read(&requester, (io, seed), (tokens, costs), (stage, there), done, record)?;
                    Ok(into)
                };
                readers.push(spawn(scope, format!("read-{index}"), body)?);
            }
            drop(there);
            let (mut computers, (there, computers_there)) = (Vec::new(), channel());
            for (index, done) in counts.iter().enumerate() {
                let there = there.clone();
                let body = move || compute(stage, there, done);
                computers.push(spawn(scope, format!("compute-{index}"), body)?);
            }
            drop(there);
            let (io, compute) = (readers_there.iter().collect(), computers_there.iter().collect());
            let running = Running { reads: &reads, counts: &counts, io, compute, computers };
            drop(gate);
            let observed = observe(&running);
            drop(end);
            // What a thread says of its end tells more than that it has ended.
            let records = readers
                .into_iter()
                .map(|reader| reader.join().map_err(|_| anyhow!("an I/O thread failed"))?);
            Ok((records.collect::<Result<_>>()?, observed?))
        })
    }

    /// Runs them for one window.
    ///
    /// # Errors
    /// As [`Threads::run`]; if interrupted.
    pub fn measure(&self, window: Duration, interrupted: &Interrupted) -> Result<Measured> {
        let record = |(latencies, spun): &mut (Histogram<u64>, u64), _, took: Duration, ended| {
            latencies.saturating_record(took.as_nanos() as u64);
            *spun += u64::from(ended == Ended::Spun);
        };
        let stage = Stage::new(true);
        let observe = |running: &Running<'_, '_>| observe(&stage, running, window, interrupted);
        let (records, mut measured) =
            self.run(&stage, || Ok((latencies()?, 0)), record, observe)?;
        for (latencies, spun) in records {
            measured.latencies.add(&latencies)?;
            measured.spun += spun;
        }
        Ok(measured)
    }
}

/// A thread of a scope.
fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    name: String,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    let builder = std::thread::Builder::new().name(name);
    builder
        .spawn_scoped(scope, body)
        .context("no further thread (raise ulimit -u, or lower T and C)")
}

/// Warms up, and sees what happens in the window. Latencies are the threads' to add.
fn observe(
    stage: &Stage,
    running: &Running<'_, '_>,
    window: Duration,
    interrupted: &Interrupted,
) -> Result<Measured> {
    stage.phase.warm_up(WARM_UP, interrupted)?;
    let me = std::process::id();
    let (watch, cpu) = (Watch::start()?, ProcessCpu::of(me)?);
    stage.phase.count();
    let sums = || (Count::sum(running.reads), Count::sum(running.counts));
    let before = sums();
    let counted = stage.phase.counted(window, interrupted);
    let after = sums();
    stage.phase.close();
    let now = ProcessCpu::of(me)?;
    let Watched { seconds, machine, canary } = watch.stop()?;
    counted?;
    let cpu_seconds =
        |threads: &BTreeSet<u32>| now.since_of(&cpu, |id| threads.contains(&id)) as f64 / 1e9;
    Ok(Measured {
        seconds,
        requests: after.0 - before.0,
        latencies: latencies()?,
        spun: 0,
        iterations: after.1 - before.1,
        cpu: CpuSeconds {
            io: cpu_seconds(&running.io),
            compute: cpu_seconds(&running.compute),
            process: now.since(&cpu) as f64 / 1e9,
        },
        machine,
        canary: canary_summary(&canary),
    })
}
