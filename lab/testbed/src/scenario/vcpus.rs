//! The threads that stand for vCPUs: where they run, how long they ran and waited, and those that compute.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rtvirtio_sim::scenario::Burner;
use rtvirtio_units::{CpuId, Nanos};
use rustix::time::ClockId;

use crate::cpu::run_on;

/// A compute thread's period, as the simulator's.
const PERIOD: Duration = Duration::from_millis(10);
/// Between the periods of one and the next: the golden section, as the simulator's.
const APART: Duration = Duration::from_nanos(6_180_340);
/// Longest sleep without a look at whether to stop.
const NAP: Duration = Duration::from_millis(50);

/// The time of a trial: 0 when its scenario begins.
#[derive(Debug)]
pub struct Clock {
    begin: Instant,
    /// Everybody ends, whatever is left.
    stop: AtomicBool,
}

impl Clock {
    /// Begins so long from now.
    #[must_use]
    pub fn after(lead: Duration) -> Self {
        Self { begin: Instant::now() + lead, stop: AtomicBool::new(false) }
    }

    /// Now; 0 before it begins.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.at(Instant::now())
    }

    /// The time of an instant; 0 if it was before.
    #[must_use]
    pub fn at(&self, instant: Instant) -> Nanos {
        Nanos::from(instant.saturating_duration_since(self.begin))
    }

    /// When a time is.
    #[must_use]
    pub fn instant(&self, at: Nanos) -> Instant {
        self.begin + Duration::from(at)
    }

    /// Has everybody end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether everybody is to end.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sleeps until then; whether that time came before the stop.
    pub fn sleep_until(&self, at: Nanos) -> bool {
        let until = self.instant(at);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.is_stopped() {
                return false;
            }
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(NAP));
        }
    }
}

/// What a vCPU is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Io,
    Compute,
}

/// Time of threads, as the scheduler counts it (`Documentation/scheduler/sched-stats.rst`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// On a CPU.
    pub ran: Nanos,
    /// Ready, and waiting for one.
    pub waited: Nanos,
    /// Of what ran, that which computed.
    pub computed: Nanos,
}

impl Times {
    fn add(&mut self, of: Use, (ran, waited): (u64, u64)) {
        self.ran = self.ran.saturating_add(Nanos::new(ran));
        self.waited = self.waited.saturating_add(Nanos::new(waited));
        if of == Use::Compute {
            self.computed = self.computed.saturating_add(Nanos::new(ran));
        }
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct Vcpus {
    cpus: Vec<CpuId>,
    threads: Mutex<Threads>,
}

#[derive(Debug, Default)]
struct Threads {
    /// Of those that have ended.
    gone: Times,
    live: Vec<(u64, Use, File)>,
    next: u64,
}

impl Vcpus {
    pub(super) fn new(cpus: Vec<CpuId>) -> Self {
        Self { cpus, threads: Mutex::default() }
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes this thread one of them until it drops what it gets.
    pub(super) fn enter(&self, of: Use) -> Result<Vcpu<'_>> {
        // The data plane knows vCPUs by their names.
        rustix::thread::set_name(c"vcpu")?;
        run_on(&self.cpus)?;
        // Without it a sleep is up to 50 µs too long.
        rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
        let file = File::open("/proc/thread-self/schedstat").context("open a schedstat")?;
        let mut threads = self.threads();
        threads.next += 1;
        let number = threads.next;
        threads.live.push((number, of, file));
        Ok(Vcpu { all: self, number })
    }

    /// Times of all there are and were.
    pub(super) fn times(&self) -> Times {
        let threads = self.threads();
        let mut times = threads.gone;
        for (_, of, file) in &threads.live {
            times.add(*of, schedstat(file));
        }
        times
    }
}

/// A thread that is one.
pub(super) struct Vcpu<'a> {
    all: &'a Vcpus,
    number: u64,
}

impl Drop for Vcpu<'_> {
    fn drop(&mut self) {
        let mut threads = self.all.threads();
        if let Some(at) = threads.live.iter().position(|(number, ..)| *number == self.number) {
            let (_, of, file) = threads.live.swap_remove(at);
            threads.gone.add(of, schedstat(&file));
        }
    }
}

/// On a CPU and waiting for one, ns; zero of a thread that is gone.
fn schedstat(file: &File) -> (u64, u64) {
    let mut text = [0; 96];
    let read = file.read_at(&mut text, 0).unwrap_or(0);
    let text = str::from_utf8(&text[..read]).unwrap_or_default();
    let mut fields = text.split_ascii_whitespace().map(|ns| ns.parse().unwrap_or(0));
    (fields.next().unwrap_or(0), fields.next().unwrap_or(0))
}

/// A VM's compute threads, so that no two of one thread are at once.
pub(super) fn lanes(burners: &[Burner]) -> Vec<Vec<Burner>> {
    let mut sorted = burners.to_vec();
    sorted.sort_by_key(|burner| burner.span.start);
    let mut lanes: Vec<Vec<Burner>> = Vec::new();
    for burner in sorted {
        let is_free = |lane: &&mut Vec<Burner>| {
            lane.last().is_none_or(|last| last.span.stop <= burner.span.start)
        };
        match lanes.iter_mut().find(is_free) {
            Some(lane) => lane.push(burner),
            None => lanes.push(vec![burner]),
        }
    }
    lanes
}

/// Computes as told: of every 10 ms so much, then it sleeps. Whoever is late works on into the next
/// period, and has lost the rest of it.
pub(super) fn compute(lane: &[Burner], number: u32, clock: &Clock, vcpus: &Vcpus) -> Result<()> {
    let _vcpu = vcpus.enter(Use::Compute)?;
    // Not all at once, whose waits would be for each other.
    let first = Duration::from_nanos((APART * number).as_nanos() as u64 % PERIOD.as_nanos() as u64);
    for burner in lane {
        let burst = PERIOD.mul_f64(burner.share.min(1.0));
        let mut due = clock.instant(burner.span.start) + first;
        let stop = clock.instant(burner.span.stop);
        while due < stop {
            if !clock.sleep_until(clock.at(due)) {
                return Ok(());
            }
            let until = thread_time() + burst;
            while thread_time() < until && Instant::now() < stop {
                work();
            }
            let late = Instant::now().saturating_duration_since(due);
            let periods = late.as_nanos() / PERIOD.as_nanos() + 1;
            due += PERIOD * periods.min(1_000_000) as u32;
        }
    }
    Ok(())
}

/// Some µs of it.
fn work() {
    let mut x = 1_u64;
    for _ in 0..2_000 {
        x = std::hint::black_box(x.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(7));
    }
}

fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use rtvirtio_sim::scenario::Span;

    use super::*;

    fn burner(start: u64, stop: u64, share: f64) -> Burner {
        let ms = Nanos::from_millis;
        Burner { span: Span { start: ms(start), stop: ms(stop) }, share }
    }

    #[test]
    fn burners_that_overlap_have_a_thread_each() {
        let all =
            [burner(0, 10, 0.5), burner(10, 20, 0.5), burner(5, 15, 1.0), burner(15, 20, 1.0)];
        let lanes = lanes(&all);
        let starts = |lane: &[Burner]| -> Vec<u64> {
            lane.iter().map(|burner| burner.span.start.get() / 1_000_000).collect()
        };
        assert_eq!(lanes.iter().map(|lane| starts(lane)).collect::<Vec<_>>(), [[0, 10], [5, 15]]);
    }

    #[test]
    fn burner_computes_its_share_and_is_counted_when_it_is_gone() {
        let vcpus = Vcpus::new(crate::cpu::usable().unwrap());
        if vcpus.cpus.is_empty() {
            return rtvirtio_engine::testing::skipped("there is one CPU");
        }
        let clock = Clock::after(Duration::ZERO);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| compute(&[burner(0, 200, 0.2)], 1, &clock, &vcpus));
            thread.join().unwrap().unwrap();
        });
        let Times { ran, computed, .. } = vcpus.times();
        assert_eq!(ran, computed);
        // 20 periods of 2 ms each; a busy machine gives less.
        assert!((4.0..60.0).contains(&computed.as_millis_f64()), "{computed}");
        assert!(vcpus.threads().live.is_empty());
    }
}
