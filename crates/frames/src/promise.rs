//! Promises: frames within a limit's rate are handed on within a time of being there, whatever other queues of their IOThread
//! do; and whether promises fit an IOThread before they are made.
//!
//! # Terms
//! A *promise* belongs to one virtqueue. Its *reservation* is what it needs of the IOThread: a share of its time, and the time
//! that a burst takes. Both follow from the limit and from what a frame costs ([`crate::cost`]). A frame has as
//! many bytes as the limit says if it has both rates, and else as a frame of the device's MTU has. Larger frames, and chains in many pieces, use the
//! reservation up sooner; what exceeds it is served as if nothing were promised.
//!
//! # The bound
//! An IOThread serves reserved queues between any two turns of others, each once at most, for what is left of its
//! reservation. So a frame within the rate waits for
//!
//! 1. the turn that has begun, of a queue without a promise, and its last frame or request, which is started whole;
//! 2. what the IOThread does between two turns: it calls drivers, submits requests and hears of those that have ended;
//! 3. the bursts of all reserved queues, its own among them, and one frame more of each,
//!
//! and for what is reserved anew meanwhile.
//!
//! The set on an IOThread is admitted if each `within` is no shorter than that, and if all reservations need no more than
//! [`RESERVABLE`] of its time. It is exact as far as the costs are, and takes an IOThread to have its CPU.
//!
//! This is no case of `qos::admission`: a disk's device has channels, service times that spread, and arrivals that nobody
//! holds back, so its test is a statistic of responses. Here there is one server, work that is held back by a limit,
//! and a sum.
//!
//! Properties (tests of the same name): `what_a_refusal_says_would_fit_does`, `what_fits_fits_without_some_of_it`.

use crate::cost::{NOTE_NS, QUANTUM_NS, pieces_ns, port_ns, tap_ns};
use crate::ethernet::HEADER_BYTES;
use crate::header::MAX_FRAME_BYTES;
use crate::limit::Rate;

/// The part of an IOThread's time that may be reserved. Frames may take 1.4 times what they are estimated to, and others
/// are to have a good part of the rest.
pub const RESERVABLE: f64 = 0.5;

/// Most pieces of one frame that are looked at.
const MAX_PIECES: usize = 1024;
/// Most ports that one frame is noted at.
const MAX_PORTS: i64 = 255;
/// Of showing a queue's ring to its driver and calling it.
const CALL_NS: i64 = 2_000;
/// Of a turn of requests: by io_uring these take some three times what a turn counts, in the system call that
/// starts them, and a part of one mebibyte is started whole.
const REQUESTS_TURN_NS: i64 = 4 * QUANTUM_NS + 102_400;
/// Of hearing of as many requests that have ended as a turn has.
const REQUESTS_ENDED_NS: i64 = QUANTUM_NS;

/// What a frame is handed on by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// A system call: of a TAP or socket.
    System,
    /// A copy: of a switch's port.
    Copy,
}

impl Medium {
    const fn frame_ns(self, bytes: usize) -> i64 {
        match self {
            Self::System => tap_ns(bytes),
            Self::Copy => port_ns(bytes) + NOTE_NS,
        }
    }

    /// The most that one frame takes, ns. One that a receiver cannot take as it is is copied twice; one for many is noted at each.
    const fn longest_frame_ns(self) -> i64 {
        let pieces = pieces_ns(MAX_PIECES);
        match self {
            Self::System => tap_ns(MAX_FRAME_BYTES) + pieces,
            Self::Copy => 2 * port_ns(MAX_FRAME_BYTES) + MAX_PORTS * NOTE_NS + pieces,
        }
    }
}

/// What is promised to a virtqueue.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promise {
    /// For frames within this rate.
    pub rate: Rate,
    /// How long a frame that is there and within the rate waits at most, ns.
    pub within: u64,
    /// Bytes of the device's longest packet, of frames of which nothing else says how long they are.
    pub mtu: u16,
    /// How they are handed on.
    pub medium: Medium,
}

/// What a virtqueue is promised of its IOThread's time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reservation {
    /// The share, 0 to 1.
    pub share: f64,
    /// What it may have at once, if it had nothing for long, ns.
    pub burst: i64,
    /// How long it waits for that at most, ns.
    pub within: u64,
}

impl Promise {
    /// Frames per second, and what one costs, ns.
    fn frames(&self) -> (f64, f64) {
        let usual = usize::from(self.mtu) + HEADER_BYTES;
        let bytes = match (self.rate.frames, self.rate.bits) {
            (Some(frames), Some(bits)) => ((bits / 8.0 / frames) as usize).min(usual),
            _ => usual,
        };
        let of_bits = self.rate.bits.map(|bits| bits / 8.0 / bytes.max(1) as f64);
        let frames =
            [self.rate.frames, of_bits].into_iter().flatten().fold(f64::INFINITY, f64::min);
        (frames, self.medium.frame_ns(bytes) as f64)
    }

    /// What it takes of its IOThread.
    #[must_use]
    pub fn reservation(&self) -> Reservation {
        let (frames, cost) = self.frames();
        // A limit lets one frame more pass than it has a burst of; rounding is to cost none.
        let at_once = frames * self.rate.burst as f64 / 1e9 + 2.0;
        Reservation {
            share: frames * cost / 1e9,
            burst: (at_once * cost) as i64,
            within: self.within,
        }
    }
}

/// What else an IOThread serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Virtqueues, those with a promise among them.
    pub queues: u32,
    /// Whether some are disks'.
    pub has_disks: bool,
}

/// Why promises cannot be kept on one IOThread, and what could be.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// They need too much of its time.
    #[error(
        "{:.0} % of its time would be promised, and {:.0} % can be: {most} frames/s would fit",
        needed * 100.0, RESERVABLE * 100.0
    )]
    Share {
        /// Of its time, what would be promised.
        needed: f64,
        /// What would fit of the last promise with its `within`, frames per second; 0: nothing.
        most: u64,
    },
    /// One of them is too short.
    #[error("{} µs is the shortest that can be kept there", least.div_ceil(1000))]
    Within {
        /// Which, in the order of the set.
        which: usize,
        /// The shortest that would fit, ns.
        least: u64,
    },
}

/// Whether all of these promises can be kept by one IOThread beside what else it serves.
///
/// # Errors
/// What cannot be kept, and what would fit.
pub fn admit(promises: &[Promise], load: Load) -> Result<(), Refusal> {
    let needed = share(promises);
    if needed > RESERVABLE {
        return Err(Refusal::Share { needed, most: most_frames(promises, load) });
    }
    let least = bound(promises, load);
    match promises.iter().position(|promise| promise.within < least) {
        Some(which) => Err(Refusal::Within { which, least }),
        None => Ok(()),
    }
}

/// The most frames per second of the last of these promises with which all of them can be kept; 0: none.
fn most_frames(promises: &[Promise], load: Load) -> u64 {
    let mut promises = promises.to_vec();
    let asked = promises.last().map_or(0.0, |last| last.frames().0);
    let mut fits = |frames: u64| {
        if let Some(last) = promises.last_mut() {
            last.rate.frames = Some(frames as f64);
        }
        let least = bound(&promises, load);
        share(&promises) <= RESERVABLE && promises.iter().all(|promise| promise.within >= least)
    };
    // What needs more of the IOThread's time waits longer, too: what is beyond a rate that does not fit does not either.
    let (mut most, mut beyond) = (0, (asked as u64).saturating_add(1));
    while beyond - most > 1 {
        let frames = most + (beyond - most) / 2;
        match fits(frames) {
            true => most = frames,
            false => beyond = frames,
        }
    }
    most
}

/// The part of an IOThread's time that all of these need.
fn share(promises: &[Promise]) -> f64 {
    promises.iter().map(|promise| promise.reservation().share).sum()
}

/// How long a frame within one of these promises waits at most, ns.
fn bound(promises: &[Promise], load: Load) -> u64 {
    let frames = QUANTUM_NS + Medium::Copy.longest_frame_ns();
    let (turn, ended) = match load.has_disks {
        true => (REQUESTS_TURN_NS.max(frames), REQUESTS_ENDED_NS),
        false => (frames, 0),
    };
    let reserved: i64 =
        promises.iter().map(|p| p.reservation().burst + p.medium.longest_frame_ns()).sum();
    let all = turn + ended + i64::from(load.queues) * CALL_NS + reserved;
    (all as f64 / (1.0 - share(promises).min(RESERVABLE))).ceil() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn promise(frames: f64, burst: u64, within_us: u64, medium: Medium) -> Promise {
        let rate = Rate { frames: Some(frames), bits: None, burst };
        Promise { rate, within: within_us * 1000, mtu: 1500, medium }
    }

    #[test]
    fn one_of_20_000_frames_within_300_us_fits_beside_a_dozen_ports() {
        let load = Load { queues: 26, has_disks: false };
        let both = [promise(20_000.0, 1_000_000, 300, Medium::Copy); 2];
        assert_eq!(admit(&both, load), Ok(()));
        // 20,000 frames of 125 + 88 + 60 ns.
        assert!(
            (both[0].reservation().share - 0.00546).abs() < 1e-5,
            "{:?}",
            both[0].reservation()
        );
        // 22 frames at once.
        assert_eq!(both[0].reservation().burst, 22 * 273);
        let with_disks = admit(&both, Load { has_disks: true, ..load });
        assert!(matches!(with_disks, Err(Refusal::Within { which: 0, .. })), "{with_disks:?}");
    }

    #[test]
    fn size_of_frames_is_what_both_rates_say() {
        let of = |frames, bits| {
            let rate = Rate { frames, bits, burst: 0 };
            Promise { rate, within: 0, mtu: 1500, medium: Medium::System }.frames()
        };
        assert_eq!(of(Some(1000.0), None), (1000.0, 1600.0 + 118.0));
        // 128 bytes each.
        assert_eq!(of(Some(1000.0), Some(1_024_000.0)), (1000.0, 1610.0));
        // Full ones: fewer than may be.
        let (frames, cost) = of(Some(1e6), Some(1e12));
        assert_eq!((frames, cost), (1e6, 1718.0));
        let (frames, _) = of(None, Some(1514.0 * 8.0 * 50.0));
        assert_eq!(frames, 50.0);
    }

    fn promises() -> impl Strategy<Value = Vec<Promise>> {
        let medium = prop_oneof![Just(Medium::Copy), Just(Medium::System)];
        let one = (100.0..200_000.0, 0..5_000_000_u64, 50..5_000_u64, medium)
            .prop_map(|(frames, burst, within, medium)| promise(frames, burst, within, medium));
        prop::collection::vec(one, 1..8)
    }

    proptest! {
        #[test]
        fn what_a_refusal_says_would_fit_does(
            mut promises in promises(), queues in 1..64_u32, has_disks: bool,
        ) {
            let load = Load { queues, has_disks };
            // Each refusal is answered by what it says; each kind of one is answered once for each promise.
            for _ in 0..2 * promises.len() {
                match admit(&promises, load) {
                    Ok(()) => break,
                    Err(Refusal::Share { most: 0, .. }) => {
                        promises.pop();
                    }
                    Err(Refusal::Share { most, .. }) => {
                        promises.last_mut().unwrap().rate.frames = Some(most as f64);
                        prop_assert_eq!(admit(&promises, load), Ok(()));
                    }
                    Err(Refusal::Within { which, least }) => {
                        promises[which].within = least;
                        let again = admit(&promises, load);
                        let is_same = matches!(again, Err(Refusal::Within { which: w, .. }) if w == which);
                        prop_assert!(!is_same, "{again:?}");
                    }
                }
            }
            prop_assert_eq!(admit(&promises, load), Ok(()));
        }

        #[test]
        fn what_fits_fits_without_some_of_it(
            promises in promises(), queues in 1..64_u32, has_disks: bool, out in 0..8_usize,
        ) {
            if admit(&promises, Load { queues, has_disks }).is_ok() {
                prop_assert_eq!(admit(&promises, Load { queues: queues - 1, has_disks: false }), Ok(()));
                let mut fewer = promises;
                fewer.remove(out % fewer.len());
                prop_assert_eq!(admit(&fewer, Load { queues, has_disks }), Ok(()));
            }
        }
    }
}
