//! How long to spin for the next completion, by what waits have lasted.
//!
//! Four times the average wait, but not before parking costs as much as the spinning so far: so a
//! wait that was misjudged costs twice as much as it had to, at most. Not at all where parking is as
//! good: where a wake-up would make the wait longer by less than a tenth. CPU time counts, even that
//! of an idle CPU.
//!
//! The average is of the last 8 waits or so, spun and parked ones; of a parked one, what parking adds
//! is taken off. One wait that was held up for long counts as eight averages at most.

use crate::costs::Costs;

/// Spinning lasts for at most so many average waits.
const TIMES: u64 = 4;
/// Waits of more than so many wake-ups are parked.
const WORTH: u64 = 9;
/// Waits that are averaged.
const AVERAGED: u64 = 8;
/// One wait counts as so many averages at most.
const MAX_SAMPLE: u64 = 8;

/// What waits of a kind have lasted, and what follows.
#[derive(Debug, Clone)]
pub struct AdaptivePollTime {
    /// What parking adds to a wait, ns.
    wake: u64,
    /// The average wait, ns; 0: none yet.
    pub(crate) latency: u64,
}

impl AdaptivePollTime {
    /// Without experience.
    #[must_use]
    pub const fn new(costs: &Costs) -> Self {
        Self { wake: costs.wake.get(), latency: 0 }
    }

    /// How long to spin for the next completion, ns; 0: not at all.
    #[must_use]
    pub fn budget(&self) -> u64 {
        if self.latency > WORTH * self.wake { 0 } else { (TIMES * self.latency).max(self.wake) }
    }

    /// A wait has ended, after so many ns.
    pub fn learn(&mut self, lasted: u64) {
        let lasted = lasted.max(1);
        if self.latency == 0 {
            self.latency = lasted;
            return;
        }
        let most = MAX_SAMPLE * self.latency.max(self.wake);
        let sum = (AVERAGED - 1) * self.latency + lasted.min(most);
        self.latency = sum.div_ceil(AVERAGED);
    }

    /// The same, for one that was parked: what it would have lasted without.
    pub fn learn_parked(&mut self, lasted: u64) {
        self.learn(lasted.saturating_sub(self.wake));
    }
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use proptest::prelude::*;
    use rtvirtio_units::Nanos;

    use super::*;

    fn patience() -> AdaptivePollTime {
        let costs = Costs {
            pauses: 16,
            look: Nanos::new(665),
            wake: Nanos::from_micros(20),
            gap: Nanos::from_micros(40),
        };
        AdaptivePollTime::new(&costs)
    }

    #[test]
    fn budget_is_four_waits_and_at_least_one_wake_up() {
        let mut patience = patience();
        assert_eq!(patience.budget(), 20_000);
        for (latency, budget) in
            [(1, 20_000), (8_000, 32_000), (180_000, 720_000), (180_001, 0), (u64::MAX, 0)]
        {
            patience.latency = latency;
            assert_eq!(patience.budget(), budget, "{latency}");
        }
    }

    #[test]
    fn one_wait_that_was_held_up_counts_as_eight() {
        let mut patience = patience();
        patience.learn(40_000);
        patience.learn_parked(5_000_000);
        // (7 * 40 + 8 * 40) / 8 µs.
        assert_eq!(patience.latency, 75_000);
        patience.learn_parked(15_000);
        assert_eq!(patience.latency, 65_626, "shorter than a wake-up: as if it had been at once");
    }

    #[test]
    fn without_a_known_cost_nobody_spins() {
        let mut patience = AdaptivePollTime { wake: 0, latency: 0 };
        assert_eq!(patience.budget(), 0);
        patience.learn(1);
        assert_eq!(patience.budget(), 0);
    }

    proptest! {
        #[test]
        fn average_stays_among_its_waits(
            waits in prop::collection::vec(1_u64..100_000_000, 1..50),
        ) {
            let mut patience = patience();
            for &lasted in &waits {
                patience.learn(lasted);
            }
            let (least, most) = (*waits.iter().min().unwrap(), *waits.iter().max().unwrap());
            prop_assert!((least..=most).contains(&patience.latency), "{}", patience.latency);
        }
    }
}
