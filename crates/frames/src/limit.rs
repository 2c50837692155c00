//! A limit on a rate of frames and of bits: the generic cell rate algorithm (ITU-T I.371), by virtual
//! scheduling, of each.
//!
//! A frame's size is known when it has been read, so it may pass when the ones before it have been paid
//! for, and is charged then: no more than one frame is on credit, of each queue that has the limit.
//!
//! Queues of one device share a limit from whichever threads they are on, so what has passed is kept in atomics: nobody waits for
//! another.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a limit lets through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Frames per second; none: any number.
    pub frames: Option<f64>,
    /// Bits per second, of the Ethernet frames without preamble and checksum; none: any number.
    pub bits: Option<f64>,
    /// How far ahead of the rate a sender may be that was silent, ns.
    pub burst: u64,
}

/// A rate and what has passed.
#[derive(Debug)]
pub struct Limit {
    rate: Rate,
    /// When all that has passed would have, at the rate of frames and of bits: the bits of an `f64`, ns.
    paid: [AtomicU64; 2],
}

impl Limit {
    /// A limit that nothing has passed.
    #[must_use]
    pub const fn new(rate: Rate) -> Self {
        // The bits of 0.0.
        Self { rate, paid: [const { AtomicU64::new(0) }; 2] }
    }

    /// When the next frame may pass, ns.
    #[must_use]
    #[inline]
    pub fn ready_at(&self) -> u64 {
        let [frames, bits] = self.paid.each_ref().map(|paid| f64::from_bits(paid.load(Relaxed)));
        let paid = frames.max(bits);
        (paid - self.rate.burst as f64).max(0.0).ceil() as u64
    }

    /// A frame of so many bytes has passed at `now`, ns.
    #[inline(never)]
    pub fn pass(&self, now: u64, bytes: usize) {
        let costs = [
            self.rate.frames.map_or(0.0, |rate| 1e9 / rate),
            self.rate.bits.map_or(0.0, |rate| 8e9 * bytes as f64 / rate),
        ];
        for (paid, cost) in self.paid.iter().zip(costs) {
            if cost > 0.0 {
                let add = |paid: u64| Some((f64::from_bits(paid).max(now as f64) + cost).to_bits());
                // It never fails: there is always a next value.
                let _ = paid.fetch_update(Relaxed, Relaxed, add);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Frames and bytes that pass within a second of a sender that always has one, looked at each `step`.
    fn passed(rate: Rate, bytes: usize, step: u64) -> (u64, u64) {
        let limit = Limit::new(rate);
        let (mut now, mut frames) = (1_000_000_000_000, 0);
        let end = now + 1_000_000_000;
        while now < end {
            while limit.ready_at() <= now {
                limit.pass(now, bytes);
                frames += 1;
            }
            now = limit.ready_at().max(now + step);
        }
        (frames, frames * bytes as u64)
    }

    const BURST: u64 = 5_000_000;

    #[test]
    fn rates_are_kept_within_three_per_cent_however_late_one_looks() {
        for frames in [1e3, 1e4, 1e5] {
            for step in [1, 50_000, 1_000_000] {
                let rate = Rate { frames: Some(frames), bits: None, burst: BURST };
                let found = passed(rate, 64, step).0 as f64 / (frames * (1.0 + BURST as f64 / 1e9));
                assert!((0.97..=1.03).contains(&found), "{frames}/s each {step} ns: {found}");
            }
        }
        for mbit in [10.0, 100.0, 1000.0] {
            for bytes in [64, 1514, 65_549] {
                let rate = Rate { frames: None, bits: Some(mbit * 1e6), burst: BURST };
                let moved = passed(rate, bytes, 50_000).1 as f64 * 8.0;
                let allowed = mbit * 1e6 * (1.0 + BURST as f64 / 1e9) + bytes as f64 * 8.0;
                assert!(moved <= allowed * 1.0001, "{mbit} {bytes}: {moved}");
                assert!(moved >= mbit * 1e6 * 0.97, "{mbit} {bytes}: {moved}");
            }
        }
    }

    #[test]
    fn stricter_of_both_holds() {
        let rate = Rate { frames: Some(1e3), bits: Some(1e9), burst: 0 };
        assert!(passed(rate, 64, 1).0 <= 1001);
        let rate = Rate { frames: Some(1e6), bits: Some(1e6), burst: 0 };
        assert!(passed(rate, 1250, 1).0 <= 101);
    }

    /// Whoever looks, and whenever: all of them together keep to the rate.
    #[test]
    fn queues_that_share_a_limit_share_the_rate() {
        let limit = Limit::new(Rate { frames: Some(1e6), bits: None, burst: 0 });
        let mut passed = [0; 3];
        let begin = 1_000_000_000;
        for now in (begin..begin + 20_000_000).step_by(500) {
            for (queue, passed) in (0..).zip(&mut passed) {
                // In turns, and one of them seldom.
                let looks = (now / 500) % (queue * queue + 1) == 0;
                if looks && limit.ready_at() <= now {
                    limit.pass(now, 64);
                    *passed += 1;
                }
            }
        }
        let all: u32 = passed.iter().sum();
        assert!((19_990..=20_001).contains(&all), "{passed:?}");
    }

    proptest! {
        /// Over any time no more passes than rate and burst allow, and one frame.
        #[test]
        fn nobody_gets_ahead(steps in prop::collection::vec((0_u64..5_000_000, 64_usize..65_000), 1..200)) {
            let rate = Rate { frames: Some(10_000.0), bits: Some(1e8), burst: BURST };
            let limit = Limit::new(rate);
            let start = 1_000_000_000;
            let (mut now, mut frames, mut bits, mut largest) = (start, 0.0, 0.0, 0.0_f64);
            for (wait, bytes) in steps {
                now += wait;
                if limit.ready_at() <= now {
                    limit.pass(now, bytes);
                    frames += 1.0;
                    bits += 8.0 * bytes as f64;
                    largest = largest.max(8.0 * bytes as f64);
                }
                let time = (now - start + BURST) as f64 / 1e9;
                prop_assert!(frames <= time * 10_000.0 + 1.001);
                prop_assert!(bits <= time * 1e8 + largest + 1.0);
            }
        }
    }
}
