//! How late a thread wakes that another one wakes by an eventfd, once a millisecond.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use rustix::event::{EventfdFlags, eventfd};

use crate::window::durations;

const EVERY: Duration = Duration::from_millis(1);

/// Two threads, of which one wakes the other.
pub struct Wakes {
    shared: Arc<Shared>,
    wakes: JoinHandle<()>,
    sleeps: JoinHandle<Histogram<u64>>,
}

struct Shared {
    bell: OwnedFd,
    begun: Instant,
    /// When it was rung, ns from `begun`; 0: heard.
    rung: AtomicU64,
    stop: AtomicBool,
}

impl Shared {
    fn now(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn wake(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(EVERY);
            // One that has not woken yet is not called again: it is as late as it is.
            let now = self.now();
            if self.rung.compare_exchange(0, now, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.ring();
            }
        }
        self.ring();
    }

    fn sleep(&self, mut late: Histogram<u64>) -> Histogram<u64> {
        while rustix::io::read(&self.bell, &mut [0; 8]).is_ok() {
            let rung = self.rung.swap(0, Ordering::AcqRel);
            if rung > 0 {
                late.saturating_record(self.now() - rung);
            }
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        late
    }
}

impl Wakes {
    /// Begins.
    ///
    /// # Errors
    /// If the kernel has no eventfd left.
    pub fn start() -> Result<Self> {
        let shared = Arc::new(Shared {
            bell: eventfd(0, EventfdFlags::CLOEXEC)?,
            begun: Instant::now(),
            rung: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let (waker, sleeper, late) = (Arc::clone(&shared), Arc::clone(&shared), durations()?);
        let wakes = std::thread::spawn(move || waker.wake());
        let sleeps = std::thread::spawn(move || sleeper.sleep(late));
        Ok(Self { shared, wakes, sleeps })
    }

    /// Ends; how late the one woke each time, ns.
    #[must_use]
    pub fn stop(self) -> Histogram<u64> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.wakes.join();
        // It is rung for the last time by then.
        self.sleeps.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wakes_are_counted_and_end() {
        let wakes = Wakes::start().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let late = wakes.stop();
        assert!(late.len() >= 2 && late.min() > 0, "{} wakes", late.len());
    }
}
