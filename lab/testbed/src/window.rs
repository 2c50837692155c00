//! What the threads of a measurement look at, what they count, and what is seen of the machine meanwhile.
//!
//! They warm up, count in a window, and end when it is over; one that ends early ends the others.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use rtvirtio_calibrate::load::{CanaryThread, MachineSample};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::latency::Histogram as Lateness;
use rtvirtio_spec::run::Machine;

const WARMING: u8 = 0;
const COUNTING: u8 = 1;
const OVER: u8 = 2;

/// The phase of a measurement.
#[derive(Debug)]
pub struct Phase(AtomicU8);

impl Phase {
    /// Before the window.
    #[must_use]
    #[expect(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self(AtomicU8::new(WARMING))
    }

    /// Whether threads are to end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.load(Relaxed) == OVER
    }

    /// Whether what ends now counts.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.0.load(Relaxed) == COUNTING
    }

    /// Ends it: threads end.
    pub fn end(&self) {
        self.0.store(OVER, Relaxed);
    }

    /// Ends it when what is returned is dropped, whatever happens.
    #[must_use]
    pub const fn ended_by_drop(&self) -> EndPhase<'_> {
        EndPhase(self)
    }

    /// Lets threads warm up.
    ///
    /// # Errors
    /// If one of them ends; if interrupted.
    pub fn warm_up(&self, time: Duration, interrupted: &Interrupted) -> Result<()> {
        wait(time, interrupted)?;
        ensure!(!self.is_over(), "a client ended in the warm-up");
        Ok(())
    }

    /// Begins the window, unless a thread has ended.
    pub fn count(&self) {
        let _ = self.0.compare_exchange(WARMING, COUNTING, Relaxed, Relaxed);
    }

    /// Lets the window be open for so long.
    ///
    /// # Errors
    /// If a thread ends; if interrupted.
    pub fn counted(&self, time: Duration, interrupted: &Interrupted) -> Result<()> {
        wait(time, interrupted)?;
        ensure!(self.counts(), "a client ended in the window");
        Ok(())
    }

    /// Ends the window, not the threads.
    pub fn close(&self) {
        let _ = self.0.compare_exchange(COUNTING, WARMING, Relaxed, Relaxed);
    }
}

/// Whatever happens, threads end.
pub struct EndPhase<'a>(&'a Phase);

impl Drop for EndPhase<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Looks at the machine while a window is open.
pub struct Watch {
    /// Until it is stopped.
    running: Option<(CanaryThread, MachineSample)>,
    begin: Instant,
}

/// What it saw.
#[derive(Debug, Clone)]
pub struct Watched {
    /// How long, s.
    pub seconds: f64,
    /// How late a sleeping thread woke up, each time.
    pub canary: Lateness,
    /// The machine.
    pub machine: Machine,
}

impl Watch {
    /// From now on.
    ///
    /// # Errors
    /// If the kernel does not say how the machine is.
    pub fn start() -> Result<Self> {
        let machine = MachineSample::now()?;
        Ok(Self { running: Some((CanaryThread::start(), machine)), begin: Instant::now() })
    }

    /// When it began.
    #[must_use]
    pub const fn begin(&self) -> Instant {
        self.begin
    }

    /// Until now.
    ///
    /// # Errors
    /// If the kernel does not say how the machine is.
    pub fn stop(mut self) -> Result<Watched> {
        let seconds = self.begin.elapsed().as_secs_f64();
        let (canary, machine) = self.running.take().context("it was stopped")?;
        let (machine, canary) = (machine.since(), canary.lateness());
        Ok(Watched { seconds, machine: machine?, canary })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Else its thread would go on.
        if let Some((canary, _)) = self.running.take() {
            let _ = canary.lateness();
        }
    }
}

/// What one thread counts; cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Count(pub AtomicU64);

impl Count {
    /// `number` counters, all 0.
    #[must_use]
    pub fn some(number: usize) -> Vec<Self> {
        (0..number).map(|_| Self::default()).collect()
    }

    /// What all of them come to.
    #[must_use]
    pub fn sum(counts: &[Self]) -> u64 {
        counts.iter().map(|count| count.0.load(Relaxed)).sum()
    }
}

/// Latencies from 100 ns to 100 s, to 1 %: counters that stay in the first-level cache.
///
/// # Errors
/// Never with these bounds.
pub fn latencies() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(100, 100_000_000_000, 2)?)
}

/// A quantile, µs.
#[must_use]
pub fn us(latencies: &Histogram<u64>, quantile: f64) -> f64 {
    latencies.value_at_quantile(quantile.min(1.0)) as f64 / 1e3
}

/// The p99, and the 95 % interval of its rank, µs.
#[must_use]
pub fn p99_us(latencies: &Histogram<u64>) -> [f64; 3] {
    let half = 1.96 * (0.99 * 0.01 / latencies.len().max(1) as f64).sqrt();
    [0.99, 0.99 - half, 0.99 + half].map(|quantile| us(latencies, quantile))
}

/// Durations from 1 ns to 10 s, to 1 %.
///
/// # Errors
/// Never with these bounds.
pub fn durations() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 10_000_000_000, 2)?)
}
