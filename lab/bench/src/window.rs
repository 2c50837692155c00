//! What the threads of a measurement look at, and what they count.
//!
//! They warm up, count in a window, and end when it is over; one that ends early ends the others.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use anyhow::Result;
use hdrhistogram::Histogram;

/// Before the window.
pub(crate) const WARMING: u8 = 0;
/// In it.
pub(crate) const COUNTING: u8 = 1;
/// After it: threads end.
pub(crate) const OVER: u8 = 2;

/// Whatever happens, threads end.
pub(crate) struct EndPhase<'a>(pub(crate) &'a AtomicU8);

impl Drop for EndPhase<'_> {
    fn drop(&mut self) {
        self.0.store(OVER, Ordering::Relaxed);
    }
}

/// What one thread counts; cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Count(pub(crate) AtomicU64);

impl Count {
    pub(crate) fn some(number: usize) -> Vec<Self> {
        (0..number).map(|_| Self::default()).collect()
    }

    pub(crate) fn sum(counts: &[Self]) -> u64 {
        counts.iter().map(|count| count.0.load(Ordering::Relaxed)).sum()
    }
}

/// Latencies from 100 ns to 100 s, to 1 %: counters that stay in the first-level cache.
///
/// # Errors
/// Never with these bounds.
pub(crate) fn latencies() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(100, 100_000_000_000, 2)?)
}

/// The p99, and the 95 % interval of its rank, µs.
pub(crate) fn p99_us(latencies: &Histogram<u64>) -> [f64; 3] {
    let at = |quantile: f64| latencies.value_at_quantile(quantile.min(1.0)) as f64 / 1e3;
    let half = 1.96 * (0.99 * 0.01 / latencies.len().max(1) as f64).sqrt();
    [at(0.99), at(0.99 - half), at(0.99 + half)]
}
