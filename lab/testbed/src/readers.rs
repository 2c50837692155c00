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
    pub gate: RwLock<()>,
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
///
/// # Errors
/// With a remedy, if they cannot be had.
pub fn requesters<'a>(io: Io, file: Option<&'a TestFile>) -> Result<Vec<Requester<'a>>> {
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
pub fn read(
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
pub fn compute(stage: &Stage, there: Sender<u32>, done: &Count) {
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

/// Runs a cell.
///
/// # Errors
/// If a ring or thread cannot be had, if a request fails; if interrupted.
pub fn measure(
    (io, compute_threads, seed): (Option<Io>, usize, u64),
    file: Option<&TestFile>,
    costs: Costs,
    window: Duration,
    interrupted: &Interrupted,
) -> Result<Measured> {
    let requesters = io.map(|io| requesters(io, file)).transpose()?.unwrap_or_default();
    let tokens = Arc::new(Tokens::new().context("no tokens without /proc (mount it)")?);
    let (reads, counts) = (Count::some(requesters.len()), Count::some(compute_threads));
    let stage = Stage::new(true);
    std::thread::scope(|scope| {
        // Whatever happens, the threads are let go (the gate, which is dropped first) and end.
        let end = stage.phase.ended_by_drop();
        let gate = stage.gate.write();
        let mut readers = Vec::new();
        let (there, readers_there) = channel();
        for (index, (requester, done)) in requesters.into_iter().zip(&reads).enumerate() {
            let Some(io) = io else { break };
            let seed = seed << 32 | index as u64;
            let (tokens, stage, there) = (&tokens, &stage, there.clone());
            let body = move || -> Result<(Histogram<u64>, u64)> {
                let mut latencies = latencies()?;
                let mut spun = 0;
                let record = |_: Instant, took: Duration, ended: Ended| {
                    latencies.saturating_record(took.as_nanos() as u64);
                    spun += u64::from(ended == Ended::Spun);
                };
                read(&requester, (io, seed), (tokens, costs), (stage, there), done, record)?;
                Ok((latencies, spun))
            };
            readers.push(spawn(scope, format!("read-{index}"), body)?);
        }
        drop(there);
        let (there, computers_there) = channel();
        for (index, done) in counts.iter().enumerate() {
            let (stage, there) = (&stage, there.clone());
            spawn(scope, format!("compute-{index}"), move || compute(stage, there, done))?;
        }
        drop(there);
        let io_threads: BTreeSet<u32> = readers_there.iter().collect();
        let computing: BTreeSet<u32> = computers_there.iter().collect();
        drop(gate);
        let mut observed =
            observe(&stage, (&reads, &counts), (&io_threads, &computing), window, interrupted);
        drop(end);
        for reader in readers {
            // What a thread says of its end tells more than that it has ended.
            let (latencies, spun) =
                reader.join().map_err(|_| anyhow!("an I/O thread failed"))??;
            if let Ok(observed) = &mut observed {
                observed.latencies.add(&latencies)?;
                observed.spun += spun;
            }
        }
        observed
    })
}

/// A thread of a scope.
///
/// # Errors
/// If the kernel has none left.
pub fn spawn<'scope, T: Send + 'scope>(
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
    (reads, counts): (&[Count], &[Count]),
    (io_threads, compute_threads): (&BTreeSet<u32>, &BTreeSet<u32>),
    window: Duration,
    interrupted: &Interrupted,
) -> Result<Measured> {
    stage.phase.warm_up(WARM_UP, interrupted)?;
    let me = std::process::id();
    let (watch, cpu) = (Watch::start()?, ProcessCpu::of(me)?);
    stage.phase.count();
    let before = (Count::sum(reads), Count::sum(counts));
    let counted = stage.phase.counted(window, interrupted);
    let after = (Count::sum(reads), Count::sum(counts));
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
            io: cpu_seconds(io_threads),
            compute: cpu_seconds(compute_threads),
            process: now.since(&cpu) as f64 / 1e9,
        },
        machine,
        canary: canary_summary(&canary),
    })
}
