//! A thread that sleeps 1 ms at a time and notes how late it wakes: what CPU
//! starvation does to a task, without any I/O.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::Canary;
use rtvirtio_units::{Nanos, Percentile};

const SLEEP: Duration = Duration::from_millis(1);

/// Sleeps and notes until it is stopped.
pub struct CanaryThread {
    stop: Arc<AtomicBool>,
    /// Until it has ended.
    thread: Option<JoinHandle<Histogram>>,
}

impl CanaryThread {
    /// Starts the thread.
    #[must_use]
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut histogram = Histogram::new();
            while !stopped.load(Ordering::Relaxed) {
                let before = Instant::now();
                std::thread::sleep(SLEEP);
                let late = Nanos::from(before.elapsed().saturating_sub(SLEEP));
                // To 10 µs: a bin for each value would be a map of thousands.
                histogram.record(Nanos::from_micros(late.get() / 10_000 * 10), 1);
            }
            histogram
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends it, and says how late it was.
    pub fn stop(self) -> Canary {
        summary(&self.lateness())
    }

    /// Ends it; how late it was, each time.
    pub fn lateness(mut self) -> Histogram {
        self.end().unwrap_or_default()
    }

    fn end(&mut self) -> Option<Histogram> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()
    }
}

impl Drop for CanaryThread {
    fn drop(&mut self) {
        // A load that fails or is stopped never asks what it noted, and the next ones are not to run beside it.
        self.end();
    }
}

/// What results keep of a canary.
pub fn summary(late: &Histogram) -> Canary {
    let at = |p: f64| {
        let quantile = Percentile::new(p).ok().and_then(|p| late.quantile(p));
        quantile.map_or(Nanos::ZERO, |q| q.value)
    };
    Canary { n: late.count(), p50: at(50.0), p99: at(99.0), p999: at(99.9), max: late.max() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_ends_with_a_load_that_does_not_ask_it() {
        let canary = CanaryThread::start();
        let stop = Arc::clone(&canary.stop);
        drop(canary);
        assert!(stop.load(Ordering::Relaxed));
        // The thread had another one.
        assert_eq!(Arc::strong_count(&stop), 1);
    }
}
