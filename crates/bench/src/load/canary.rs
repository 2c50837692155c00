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

pub(crate) struct CanaryThread {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Histogram>,
}

impl CanaryThread {
    pub(crate) fn start() -> Self {
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
        Self { stop, thread }
    }

    pub(crate) fn stop(self) -> Canary {
        self.stop.store(true, Ordering::Relaxed);
        let histogram = self.thread.join().unwrap_or_default();
        let at = |p: f64| {
            let quantile = Percentile::new(p).ok().and_then(|p| histogram.quantile(p));
            quantile.map_or(Nanos::ZERO, |q| q.value)
        };
        Canary { n: histogram.count(), p50: at(50.0), p99: at(99.0), max: histogram.max() }
    }
}
