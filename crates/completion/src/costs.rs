//! What waiting costs on this machine, measured at start.

use std::time::Duration;

use rtvirtio_units::Nanos;

use crate::clock::now;
use crate::slot::{Slot, Wakes};

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
    /// Measures them: takes about 10 ms and, for as long, a thread that sleeps most of the time.
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

/// The median of what a wake-up takes, ns; `None`: a thread cannot be had.
///
/// Both sides sleep between two wake-ups, so both CPUs are as after a wait. The median, since now and
/// then a wake-up finds its CPU awake, or taken.
fn wake() -> Option<u64> {
    let slot: Slot = Slot::new();
    let end = now() + WAKES_NS;
    let mut times = Vec::with_capacity(WAKES);
    std::thread::scope(|scope| {
        let (to_sleeper, tickets) = std::sync::mpsc::channel();
        let (to_waker, woken) = std::sync::mpsc::channel();
        let slot = &slot;
        std::thread::Builder::new()
            .name("calibration".to_owned())
            .stack_size(128 << 10)
            .spawn_scoped(scope, move || {
                while let Ok(ticket) = tickets.recv() {
                    // A second: of a waker that ended, which it does not.
                    let _ = slot.wait(ticket, Some(Duration::from_secs(1)));
                    let _ = to_waker.send(now());
                }
            })
            .ok()?;
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
        Some(())
    })?;
    times.sort_unstable();
    times.get(times.len() / 2).copied()
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
}
