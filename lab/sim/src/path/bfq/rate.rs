//! What bfq learns of the device's rate, which budgets and the time of raised weights follow.

use super::MS;
use super::queue::LONG;

/// The reference rate of flash, and what a device is first taken for, sectors/s.
pub(super) const REFERENCE_RATE: f64 = 503_540.0;
const FIRST_RATE: f64 = REFERENCE_RATE * 2.0 / 3.0;
/// An observation of the rate takes so long at least and at most, and has so many requests, ns.
const OBSERVATION: (u64, u64) = (300 * MS, 1_000 * MS);
const OBSERVED: u32 = 32;
/// A pause that ends an observation, ns.
const OBSERVATION_PAUSE: u64 = 100 * MS;

/// What is known of it, and the observation that goes on.
#[derive(Debug)]
pub(super) struct Rate {
    pub(super) sectors_per_second: f64,
    began: u64,
    last: u64,
    requests: u32,
    long: u32,
    sectors: u64,
}

impl Rate {
    pub(super) const fn new() -> Self {
        Self { sectors_per_second: FIRST_RATE, began: 0, last: 0, requests: 0, long: 0, sectors: 0 }
    }

    fn restart(&mut self, now: u64) {
        *self = Self {
            sectors_per_second: self.sectors_per_second,
            began: now,
            last: now,
            requests: 0,
            long: 0,
            sectors: 0,
        };
    }

    /// A request goes to the device. Returns whether the rate is another one now.
    pub(super) fn note(&mut self, now: u64, sectors: u64, in_device: u32) -> bool {
        let pauses = in_device == 0 && now > self.last + OBSERVATION_PAUSE;
        let is_over = pauses || now >= self.began + OBSERVATION.1;
        let changed = self.requests > 0 && is_over && self.learn();
        if self.requests == 0 || is_over {
            self.restart(now);
        }
        self.requests += 1;
        self.long += u32::from(sectors >= u64::from(LONG));
        self.sectors += sectors;
        self.last = now;
        changed
    }

    /// Ends an observation. Long requests show what the device can do; short ones that it can do at least this.
    fn learn(&mut self) -> bool {
        let time = self.last - self.began;
        if self.requests < OBSERVED || time < OBSERVATION.0 {
            return false;
        }
        let seconds = time as f64 / 1e9;
        let rate = self.sectors as f64 / seconds;
        let part = f64::from(self.long) / f64::from(self.requests);
        if part < 0.75 && rate <= self.sectors_per_second {
            return false;
        }
        let gain = 1.0 / (10.0 - (9.0 * part * seconds).min(8.0));
        self.sectors_per_second += (rate - self.sectors_per_second) * gain;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_requests_show_the_rate_and_short_ones_that_it_is_no_less() {
        let observe = |rate: &mut Rate, sectors: u64, from: u64| {
            (0..4_000).filter(|n| rate.note(from + n * MS, sectors, 1)).count()
        };
        let mut rate = Rate::new();
        // 8 sectors a ms are less than is known.
        assert_eq!(observe(&mut rate, 8, 0), 0);
        assert_eq!(rate.sectors_per_second, FIRST_RATE);
        assert!(observe(&mut rate, 256, 5_000 * MS) >= 3);
        let learned = rate.sectors_per_second;
        assert!((250_000.0..FIRST_RATE).contains(&learned), "{learned}");
    }
}
