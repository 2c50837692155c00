//! A cell: its threads for one window, and what they did.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, RwLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use rtvirtio_completion::{Costs, Tokens};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::run::{Canary, Machine};

use super::requester::{Ended, Requester};
use super::target::TestFile;
use super::{CellKey, CpuSeconds, Io};
use crate::dataplane::cpu::ProcessCpu;
use crate::dataplane::load::Random;
use crate::window::{COUNTING, Count, EndPhase, OVER, WARMING, latencies};
use rtvirtio_calibrate::load::{CanaryThread, MachineSample};

/// From the start of all threads to the window.
pub(super) const WARM_UP: Duration = Duration::from_millis(250);
/// To set a cell up and to end it, about.
pub(super) const AROUND: Duration = Duration::from_millis(60);
/// Iterations between two looks at the phase: about a microsecond.
const BATCH: u64 = 1024;

/// What was measured.
#[derive(Debug)]
pub(super) struct Measured {
    /// Length of the window, s.
    pub(super) seconds: f64,
    /// Requests in the window.
    pub(super) requests: u64,
    /// Their latencies, ns.
    pub(super) latencies: Histogram<u64>,
    /// Of those, ended by looking.
    pub(super) spun: u64,
    /// Of all compute threads.
    pub(super) iterations: u64,
    pub(super) cpu: CpuSeconds,
    pub(super) machine: Machine,
    pub(super) canary: Canary,
}

/// What the threads of a cell look at.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) phase: AtomicU8,
    /// Whether compute threads compute.
    pub(super) load: AtomicBool,
    /// Held for writing until all threads are to begin.
    pub(super) gate: RwLock<()>,
}

impl Stage {
    pub(super) const fn new(load: bool) -> Self {
        Self { phase: AtomicU8::new(WARMING), load: AtomicBool::new(load), gate: RwLock::new(()) }
    }

    pub(super) fn is_over(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == OVER
    }

    pub(super) fn counts(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == COUNTING
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
pub(super) fn requesters<'a>(io: Io, file: Option<&'a TestFile>) -> Result<Vec<Requester<'a>>> {
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
pub(super) fn read(
    requester: &Requester<'_>,
    (io, seed): (Io, u64),
    (tokens, costs): (&Arc<Tokens>, Costs),
    (stage, there): (&Stage, Sender<u32>),
    done: &Count,
    mut record: impl FnMut(Instant, Duration, Ended),
) -> Result<()> {
    let _end = EndPhase(&stage.phase);
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
    while !stage.is_over() {
        let offset = random.below(blocks) * block;
        let ended = requester.request(spinner.as_mut(), offset).context("a request failed")?;
        // One look at the clock: the next request begins where this one ended.
        let now = Instant::now();
        requests += 1;
        done.0.store(requests, Ordering::Relaxed);
        if stage.counts() {
            record(now, now - before, ended);
        }
        before = now;
    }
    Ok(())
}

/// Counts until the phase is over, and rests while there is to be no load.
pub(super) fn compute(stage: &Stage, there: Sender<u32>, done: &Count) {
    stage.enter(there);
    let mut iterations = 0_u64;
    while !stage.is_over() {
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
pub(super) fn measure(
    key: CellKey,
    file: Option<&TestFile>,
    costs: Costs,
    window: Duration,
    interrupted: &Interrupted,
) -> Result<Measured> {
    let requesters = key.io.map(|io| requesters(io, file)).transpose()?.unwrap_or_default();
    let tokens = Arc::new(Tokens::new().context("no tokens without /proc (mount it)")?);
    let (reads, counts) = (Count::some(requesters.len()), Count::some(key.compute));
    let stage = Stage::new(true);
    std::thread::scope(|scope| {
        // Whatever happens, the threads are let go (the gate, which is dropped first) and end.
        let end = EndPhase(&stage.phase);
        let gate = stage.gate.write();
        let mut readers = Vec::new();
        let (there, readers_there) = channel();
        for (index, (requester, done)) in requesters.into_iter().zip(&reads).enumerate() {
            let Some(io) = key.io else { break };
            let seed = u64::from(key.repetition) << 32 | index as u64;
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
        let compute_threads: BTreeSet<u32> = computers_there.iter().collect();
        drop(gate);
        let mut observed = observe(
            &stage,
            (&reads, &counts),
            (&io_threads, &compute_threads),
            window,
            interrupted,
        );
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
pub(super) fn spawn<'scope, T: Send + 'scope>(
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
    wait(WARM_UP, interrupted)?;
    ensure!(!stage.is_over(), "an I/O thread ended in the warm-up");
    let me = std::process::id();
    let canary = CanaryThread::start();
    let machine = MachineSample::now()?;
    let cpu = ProcessCpu::of(me)?;
    stage.phase.store(COUNTING, Ordering::Relaxed);
    let before = (Count::sum(reads), Count::sum(counts));
    let begin = Instant::now();
    let waited = wait(window, interrupted);
    let after = (Count::sum(reads), Count::sum(counts));
    let seconds = begin.elapsed().as_secs_f64();
    let over = stage.phase.swap(WARMING, Ordering::Relaxed) == OVER;
    let now = ProcessCpu::of(me)?;
    let machine = machine.since()?;
    let canary = canary.stop();
    waited?;
    ensure!(!over, "an I/O thread ended in the window");
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
        canary,
    })
}
