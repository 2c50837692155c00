//! What waiting costs on this machine, measured at start.

use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use rtvirtio_units::{CpuId, Nanos};
use rustix::thread::CpuSet;

use crate::clock::now;
use crate::slot::{Slot, Wakes};
use crate::tokens::allowed_cpus;

/// Longest that wake-ups are measured, ns: on a busy machine there are fewer of them then.
const WAKES_NS: u64 = 10_000_000;
/// Most wake-ups that are measured.
const WAKES: usize = 64;
/// Looks in one measurement, and measurements, of which the fastest counts: it was not disturbed.
const LOOKS: u32 = 400;
const MEASUREMENTS: u32 = 8;
/// The clock takes at most one part in so many of a spinning thread's time.
const CLOCK_PART: u64 = 8;

/// What waiting costs on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// Pauses between two looks at the clock: about 16 on most processors.
    pub pauses: u32,
    /// From one look at the clock to the next, if nothing disturbs.
    pub look: Nanos,
    /// What parking adds to a wait: from the completer's first step to wake a thread until that runs,
    /// on a CPU that was idle. Zero if it could not be measured: then nobody spins who adapts.
    pub wake: Nanos,
    /// A spinning thread that misses more than this was not on its CPU: as long as it takes to park
    /// and be woken, twice. An interrupt is shorter; any other thread's turn is longer.
    pub gap: Nanos,
}

impl Costs {
    /// Measures them: takes about 10 ms and, for as long, two threads that sleep most of the time.
    #[must_use]
    pub fn calibrate() -> Self {
        let clock = fastest(|| {
            now();
        });
        let pause = fastest(std::hint::spin_loop);
        let wake = wake().unwrap_or(0);
        Self::new(clock, pause, wake)
    }

    /// From what was measured; all ns.
    fn new(clock: u64, pause: u64, wake: u64) -> Self {
        let pauses = (CLOCK_PART * clock).div_ceil(pause.max(1)).clamp(4, 64);
        let look = clock + pauses * pause;
        Self {
            pauses: pauses as u32,
            look: Nanos::new(look),
            wake: Nanos::new(wake),
            gap: Nanos::new((2 * wake).max(8 * look)),
        }
    }
}

/// What an act takes, ns, at least 1.
fn fastest(mut act: impl FnMut()) -> u64 {
    let mut best = u64::MAX;
    for _ in 0..MEASUREMENTS {
        let began = now();
        for _ in 0..LOOKS {
            act();
        }
        best = best.min(now() - began);
    }
    (best / u64::from(LOOKS)).max(1)
}

/// The median of what a wake-up takes, ns; `None`: threads cannot be had.
///
/// Each side has a CPU of its own, since the scheduler likes to put two threads that wake each other on
/// one, where nothing has to be woken: there it takes a tenth of the time. Both sleep between two
/// wake-ups, so both CPUs are as after a wait. The median, since now and then a wake-up finds its CPU
/// awake, or taken.
fn wake() -> Option<u64> {
    let cpus = allowed_cpus().unwrap_or_default();
    let here = cpus.iter().position(|cpu| cpu.get() as usize == rustix::thread::sched_getcpu());
    // Of a single CPU, and if it is not known which there are: wherever they are put.
    let on = |offset: usize| cpus.get((here? + offset) % cpus.len()).copied();
    let sides = [on(0), on(1)];
    let slot: Slot = Slot::new();
    let slot = &slot;
    std::thread::scope(|scope| {
        let (to_sleeper, tickets) = std::sync::mpsc::channel();
        let (to_waker, woken) = std::sync::mpsc::channel();
        start(scope, sides[1], move || {
            while let Ok(ticket) = tickets.recv() {
                // A second: of a waker that ended, which it does not.
                let _ = slot.wait(ticket, Some(Duration::from_secs(1)));
                let _ = to_waker.send(now());
            }
        })?;
        let waker = start(scope, sides[0], move || {
            let end = now() + WAKES_NS;
            let mut times = Vec::with_capacity(WAKES);
            while times.len() < WAKES && (times.is_empty() || now() < end) {
                let ticket = slot.submit()?;
                to_sleeper.send(ticket).ok()?;
                // Time to fall asleep.
                std::thread::sleep(Duration::from_micros(30));
                let mut wakes = Wakes::default();
                let began = now();
                wakes.complete(slot, ticket, 0).ok()?;
                wakes.issue();
                times.push(woken.recv().ok()?.saturating_sub(began));
            }
            times.sort_unstable();
            times.get(times.len() / 2).copied()
        })?;
        waker.join().ok()?
    })
}

/// Starts one side of a measurement on its CPU.
fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    on: Option<CpuId>,
    act: impl FnOnce() -> T + Send + 'scope,
) -> Option<ScopedJoinHandle<'scope, T>> {
    let pinned = move || {
        if let Some(cpu) = on {
            let mut set = CpuSet::new();
            set.set(cpu.get() as usize);
            // Who may not choose has the scheduler choose.
            let _ = rustix::thread::sched_setaffinity(None, &set);
        }
        act()
    };
    let builder = std::thread::Builder::new().name("calibration".to_owned());
    builder.stack_size(128 << 10).spawn_scoped(scope, pinned).ok()
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use super::*;

    #[test]
    fn costs_are_derived_from_what_was_measured() {
        // A pause of 40 ns and a clock of 25: five pauses keep the clock to an eighth.
        let costs = Costs::new(25, 40, 20_000);
        assert_eq!(costs.pauses, 5);
        assert_eq!(costs.look, Nanos::new(225));
        assert_eq!(costs.gap, Nanos::new(40_000));
        // A clock that is slow, as in some VMs: still a look each 64 pauses, and no gap below eight.
        let slow = Costs::new(1_000, 10, 3_000);
        assert_eq!((slow.pauses, slow.look, slow.gap), (64, Nanos::new(1_640), Nanos::new(13_120)));
    }

    #[test]
    fn calibration_takes_less_than_20_ms_and_finds_plausible_costs() {
        // The least of three: others may have the CPU.
        let mut fastest = u64::MAX;
        for _ in 0..3 {
            let began = now();
            let costs = Costs::calibrate();
            fastest = fastest.min(now() - began);
            assert!((1..1_000_000).contains(&costs.look.get()), "{costs:?}");
            assert!(costs.wake.get() > 300, "less than a system call: {costs:?}");
            assert!(costs.gap > costs.wake && costs.gap > costs.look, "{costs:?}");
        }
        assert!(fastest < 20_000_000, "{fastest} ns");
    }

    #[test]
    fn a_side_runs_on_its_cpu_alone() {
        let cpu = *allowed_cpus().unwrap().last().unwrap();
        let seen = std::thread::scope(|scope| start(scope, Some(cpu), allowed_cpus)?.join().ok());
        assert_eq!(seen.unwrap().unwrap(), [cpu]);
        assert!(allowed_cpus().unwrap().contains(&cpu), "the caller's are as before");
    }
}
