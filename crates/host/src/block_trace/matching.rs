//! From events to latencies: which completion ends which bio. Pure.
//!
//! A bio waits from its queueing until completions have covered all its sectors.
//! So it does not matter whether the block layer merged it with others into a
//! request, split it, had the device complete it in parts, or queued the request
//! again: a completion names its sectors, and each bio among them gets its share.
//!
//! Where two bios of one direction wait for the same sector, the younger one is
//! served first: if one of them is there only because its end was lost, it never
//! becomes a latency; if both are real, their sum is right and their tail errs
//! upwards.
//!
//! After a loss nothing that waits is trusted; a completion without a start is
//! of a bio that was queued before the trace began.
//!
//! Properties: each has a test of its name.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_spec::latency::round_up;
use rtvirtio_units::Nanos;

use super::format::{Direction, Event, Io, What};
use super::{Extent, Latencies, Service};
use crate::sysfs::DeviceNumber;

/// More bios than this do not wait at once: their ends are not seen. A virtqueue has at most 32768
/// entries, and commonly 256.
const MAX_WAITING: usize = 1 << 16;

#[derive(Debug)]
struct Waiting {
    io: Io,
    since: Nanos,
    /// Sectors that are not done.
    left: u64,
    extent: Extent,
    /// How many it found under way.
    found: usize,
}

/// Matches events of the disks in its extents.
#[derive(Debug)]
pub(super) struct Matcher {
    /// By disk and start; they do not overlap.
    extents: BTreeMap<(DeviceNumber, u64), Extent>,
    /// By device, first sector and a running number.
    waiting: BTreeMap<(DeviceNumber, u64, u64), Waiting>,
    number: u64,
    /// At least the sectors of the longest bio that waits.
    longest: u64,
    seen: Latencies,
    /// How the device serves, if that is asked for; all extents are of one device then.
    service: Option<Service>,
}

impl Matcher {
    pub(super) fn new(extents: &BTreeSet<Extent>) -> Self {
        Self {
            extents: extents.iter().map(|e| ((e.disk, e.start), *e)).collect(),
            waiting: BTreeMap::new(),
            number: 0,
            longest: 0,
            seen: Latencies::default(),
            service: None,
        }
    }

    /// The same, which sees how the one device of the extents serves too.
    pub(super) fn with_service(extents: &BTreeSet<Extent>) -> Self {
        Self { service: Some(Service::default()), ..Self::new(extents) }
    }

    /// What was seen since the last time.
    pub(super) fn take(&mut self) -> Latencies {
        let service = self.service.as_mut().map(Service::take);
        Latencies { service, ..std::mem::take(&mut self.seen) }
    }

    /// Events come in the order of their times.
    pub(super) fn step(&mut self, event: Event) {
        match event.what {
            What::Queued(io) => self.queue(event.at, io),
            What::Done(io) => self.done(event.at, io),
            What::Refused(io) => {
                if let Some(key) = self.youngest(&io, io.start) {
                    self.waiting.remove(&key);
                    if let Some(service) = &mut self.service {
                        service.gone(event.at);
                    }
                }
            }
            What::Lost(records) => {
                self.seen.lost += records;
                self.forget();
            }
        }
    }

    fn queue(&mut self, since: Nanos, io: Io) {
        let before = self.extents.range(..=(io.device, io.start)).next_back();
        let extent = before.map(|(_, e)| *e).filter(|e| e.holds(&io));
        let Some(extent) = extent else { return };
        if self.waiting.len() >= MAX_WAITING {
            self.seen.lost += self.waiting.len() as u64;
            self.forget();
        }
        let left = io.end - io.start;
        self.longest = if self.waiting.is_empty() { left } else { self.longest.max(left) };
        self.number += 1;
        let key = (io.device, io.start, self.number);
        let found = self.service.as_mut().map_or(0, |service| service.queued(since));
        self.waiting.insert(key, Waiting { io, since, left, extent, found });
    }

    /// Nothing that waits is trusted any more.
    fn forget(&mut self) {
        self.waiting.clear();
        if let Some(service) = &mut self.service {
            service.forget();
        }
    }

    fn done(&mut self, at: Nanos, io: Io) {
        let mut sector = io.start;
        while sector < io.end {
            let Some(key) = self.youngest(&io, sector) else {
                // Nobody waits for this sector: go on where somebody does.
                let next = (io.device, sector + 1, 0)..(io.device, io.end, 0);
                let Some((key, _)) = self.waiting.range(next).next() else { return };
                sector = key.1;
                continue;
            };
            let Some(bio) = self.waiting.get_mut(&key) else { return };
            let end = bio.io.end.min(io.end);
            bio.left = bio.left.saturating_sub(end - sector);
            if bio.left == 0 {
                let latency = round_up(at.saturating_sub(bio.since));
                self.seen.of.entry(bio.extent).or_default().record(latency, 1);
                if let Some(service) = &mut self.service {
                    let Io { direction, start, end, .. } = bio.io;
                    service.done(
                        at,
                        latency,
                        bio.found,
                        (direction == Direction::Read, end - start),
                    );
                }
                self.waiting.remove(&key);
            }
            sector = end;
        }
    }

    /// The youngest bio that waits for `sector` in the direction of `io`.
    fn youngest(&self, io: &Io, sector: u64) -> Option<(DeviceNumber, u64, u64)> {
        let first = sector.saturating_sub(self.longest);
        let near = self.waiting.range((io.device, first, 0)..=(io.device, sector, u64::MAX));
        let waits = near.filter(|(_, b)| b.io.end > sector && b.io.direction == io.direction);
        waits.map(|(key, _)| *key).max_by_key(|key| key.2)
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::latency::Histogram;

    use super::super::format::Direction::{Read, Write};
    use super::*;

    const DISK: DeviceNumber = DeviceNumber::new(8, 0);

    const fn extent(start: u64, end: u64) -> Extent {
        Extent { disk: DISK, start, end }
    }

    /// Of VM a: sectors 0 to 999. Of VM b: 1000 to 1999. Later ones are nobody's.
    const A: Extent = extent(0, 1000);
    const B: Extent = extent(1000, 2000);

    const fn io(direction: Direction, start: u64, sectors: u64) -> Io {
        Io { device: DISK, direction, start, end: start + sectors }
    }

    /// Latencies in µs of each extent after events at times in µs.
    fn play(events: &[(u64, What)]) -> (Vec<u64>, Vec<u64>, u64) {
        let mut matcher = Matcher::new(&BTreeSet::from([A, B]));
        for (at, what) in events {
            matcher.step(Event { at: Nanos::from_micros(*at), what: *what });
        }
        let seen = matcher.take();
        let of = |extent| {
            let bins = seen.of.get(&extent).into_iter().flat_map(Histogram::bins);
            // The bins are wide by 1/64: back to the hand-written figure.
            bins.flat_map(|(l, n)| vec![l.get() / 1000; n as usize]).collect::<Vec<_>>()
        };
        (of(A), of(B), seen.lost)
    }

    use What::{Done, Lost, Queued, Refused};

    #[test]
    fn each_extent_gets_its_own() {
        let (a, b, lost) = play(&[
            (0, Queued(io(Read, 8, 8))),
            (10, Queued(io(Write, 1992, 8))),
            (20, Queued(io(Read, 2000, 8))),
            (60, Done(io(Write, 1992, 8))),
            (64, Done(io(Read, 8, 8))),
            (70, Done(io(Read, 2000, 8))),
        ]);
        assert_eq!((a, b, lost), (vec![64], vec![50], 0));
    }

    #[test]
    fn merged_bios_end_with_their_request() {
        // Three bios become one request, across the border of two VMs; one read stays away.
        let (a, b, _) = play(&[
            (0, Queued(io(Write, 992, 8))),
            (4, Queued(io(Read, 992, 8))),
            (20, Queued(io(Write, 1000, 8))),
            (40, Queued(io(Write, 984, 8))),
            (60, Done(io(Write, 984, 24))),
        ]);
        assert_eq!((a, b), (vec![20, 60], vec![40]));
    }

    #[test]
    fn split_bio_ends_with_its_last_part() {
        let (a, _, _) = play(&[
            (0, Queued(io(Read, 0, 100))),
            (10, Done(io(Read, 60, 40))),
            (20, Done(io(Read, 0, 30))),
            (30, Done(io(Read, 30, 30))),
        ]);
        assert_eq!(a, [30]);
    }

    #[test]
    fn request_completed_in_parts_ends_each_bio_in_turn() {
        let (a, _, _) = play(&[
            (0, Queued(io(Write, 0, 8))),
            (0, Queued(io(Write, 8, 8))),
            (10, Done(io(Write, 0, 12))),
            (16, Done(io(Write, 12, 4))),
        ]);
        assert_eq!(a, [10, 16]);
    }

    #[test]
    fn request_queued_again_counts_once_and_from_the_start() {
        // The device returned half of it, the rest was queued again and done later.
        let (a, _, _) = play(&[
            (0, Queued(io(Read, 0, 16))),
            (5, Done(io(Read, 0, 8))),
            (64, Done(io(Read, 8, 8))),
            (70, Done(io(Read, 8, 8))),
        ]);
        assert_eq!(a, [64]);
    }

    #[test]
    fn completion_without_a_start_is_no_latency() {
        let (a, b, lost) = play(&[
            (0, Done(io(Read, 0, 8))),
            (1, Queued(io(Read, 16, 8))),
            // A request of which only the middle was queued within the trace.
            (31, Done(io(Read, 8, 24))),
        ]);
        assert_eq!((a, b, lost), (vec![30], vec![], 0));
    }

    #[test]
    fn other_direction_and_other_device_end_nothing() {
        let other = Io { device: DeviceNumber::new(8, 16), ..io(Read, 0, 8) };
        let (a, _, _) = play(&[
            (0, Queued(io(Read, 0, 8))),
            (10, Done(io(Write, 0, 8))),
            (20, Done(other)),
            (50, Done(io(Read, 0, 8))),
        ]);
        assert_eq!(a, [50]);
    }

    #[test]
    fn overlapping_bios_each_end_once() {
        let (a, _, _) = play(&[
            (0, Queued(io(Read, 0, 8))),
            (10, Queued(io(Read, 0, 8))),
            (30, Done(io(Read, 0, 8))),
            (40, Done(io(Read, 0, 8))),
            (50, Done(io(Read, 0, 8))),
        ]);
        assert_eq!(a, [20, 40]);
    }

    #[test]
    fn bio_over_the_border_is_nobodys() {
        let (a, b, _) = play(&[(0, Queued(io(Read, 996, 8))), (9, Done(io(Read, 996, 8)))]);
        assert_eq!((a, b), (vec![], vec![]));
    }

    #[test]
    fn loss_is_counted_and_ends_what_waits() {
        let (a, _, lost) = play(&[
            (0, Queued(io(Read, 0, 8))),
            (10, Lost(7)),
            // Its own start was before the loss: unknown which bio this is.
            (20, Done(io(Read, 0, 8))),
            (30, Queued(io(Read, 0, 8))),
            (62, Done(io(Read, 0, 8))),
        ]);
        assert_eq!((a, lost), (vec![32], 7));
    }

    #[test]
    fn refused_bio_counts_from_its_next_try() {
        let (a, _, lost) = play(&[
            (0, Queued(io(Write, 0, 8))),
            (1, Refused(io(Write, 0, 8))),
            (10, Queued(io(Write, 0, 8))),
            (50, Done(io(Write, 0, 8))),
        ]);
        assert_eq!((a, lost), (vec![40], 0));
    }

    #[test]
    fn bios_without_an_end_are_bounded_and_counted() {
        let mut matcher = Matcher::new(&BTreeSet::from([A]));
        for at in 0..=MAX_WAITING as u64 {
            let what = Queued(io(Read, at % 992, 8));
            matcher.step(Event { at: Nanos::from_micros(at), what });
        }
        assert_eq!(matcher.waiting.len(), 1);
        assert_eq!(matcher.take().lost, MAX_WAITING as u64);
    }
}
