//! Limits of a cgroup on a device (kernel `block/blk-throttle.c`): bytes and requests, reads and writes.
//!
//! A limit is let through in slices of 100 ms: within a slice, all that it allows may go at once; what exceeds
//! it waits. Whole slices that are over are taken off the account, but for the last.

use std::collections::VecDeque;

use rtvirtio_spec::settings::Limits;
use rtvirtio_units::BytesPerSecond;

use super::bfq::JIFFY;
use super::request::Request;

/// Jiffies in a second.
const HZ: u64 = 1_000_000_000 / JIFFY;
/// `DFL_THROTL_SLICE`: HZ / 10.
const SLICE: u64 = HZ / 10;

/// One direction of one cgroup.
#[derive(Debug)]
struct Direction {
    bps: Option<u64>,
    iops: Option<u64>,
    waiting: VecDeque<Request>,
    slice_start: u64,
    slice_end: u64,
    bytes: u64,
    requests: u64,
    /// When the first of those that wait may go, ns.
    at: Option<u64>,
}

impl Direction {
    fn new(bps: Option<BytesPerSecond>, iops: Option<u64>) -> Self {
        Self {
            bps: bps.map(BytesPerSecond::get),
            iops,
            waiting: VecDeque::new(),
            slice_start: 0,
            slice_end: 0,
            bytes: 0,
            requests: 0,
            at: None,
        }
    }

    /// Jiffies that a request of `size` bytes has to wait (`tg_dispatch_time`).
    fn wait(&mut self, jiffy: u64, size: u64) -> u64 {
        if jiffy > self.slice_end && self.waiting.is_empty() {
            self.slice_start = jiffy;
            self.slice_end = jiffy + SLICE;
            self.bytes = 0;
            self.requests = 0;
        } else {
            self.slice_end = self.slice_end.max(jiffy + SLICE);
        }
        let elapsed = jiffy.saturating_sub(self.slice_start);
        let bytes = self.bps.map_or(0, |bps| {
            let rounded = elapsed.max(1).next_multiple_of(SLICE);
            let allowed = bps * rounded / HZ;
            match (self.bytes + size).checked_sub(allowed) {
                None | Some(0) => 0,
                Some(extra) => (extra * HZ / bps).max(1) + (rounded - elapsed),
            }
        });
        let requests = self.iops.map_or(0, |iops| {
            let rounded = (elapsed + 1).next_multiple_of(SLICE);
            let allowed = iops * rounded / HZ;
            if self.requests < allowed { 0 } else { (rounded - elapsed).max(HZ / iops + 1) }
        });
        let wait = bytes.max(requests);
        if wait > 0 {
            self.slice_end = self.slice_end.max((jiffy + wait).next_multiple_of(SLICE));
        }
        wait
    }

    /// Counts a request that goes, and forgets slices that are over (`throtl_trim_slice`).
    fn charge(&mut self, jiffy: u64, size: u64) {
        self.bytes += size;
        self.requests += 1;
        if jiffy > self.slice_end {
            return;
        }
        let elapsed = (jiffy.saturating_sub(self.slice_start) / SLICE) * SLICE;
        if elapsed < 2 * SLICE {
            return;
        }
        let past = elapsed - SLICE;
        self.bytes = self.bytes.saturating_sub(self.bps.unwrap_or(0) * past / HZ);
        self.requests = self.requests.saturating_sub(self.iops.unwrap_or(0) * past / HZ);
        self.slice_start += past;
    }
}

/// A cgroup's limits on a device.
#[derive(Debug)]
pub(super) struct Throttle([Direction; 2]);

impl Throttle {
    /// None if nothing is limited.
    pub(super) fn new(limits: Limits) -> Option<Self> {
        (limits != Limits::default()).then(|| {
            Self([
                Direction::new(limits.read_bps, limits.read_iops),
                Direction::new(limits.write_bps, limits.write_iops),
            ])
        })
    }

    /// A request comes: whether it may go on at once. If not, it waits here.
    pub(super) fn pass(&mut self, now: u64, request: Request) -> bool {
        let direction = &mut self.0[usize::from(request.write)];
        let jiffy = now / JIFFY;
        let size = u64::from(request.sectors) * 512;
        if direction.waiting.is_empty() {
            let wait = direction.wait(jiffy, size);
            if wait == 0 {
                direction.charge(jiffy, size);
                return true;
            }
            direction.at = Some((jiffy + wait) * JIFFY);
        }
        direction.waiting.push_back(request);
        false
    }

    /// When [`Throttle::release`] is to be called.
    pub(super) fn timer_at(&self) -> Option<u64> {
        self.0.iter().filter_map(|d| d.at).min()
    }

    /// The next request that may go now.
    pub(super) fn release(&mut self, now: u64) -> Option<Request> {
        let jiffy = now / JIFFY;
        for direction in &mut self.0 {
            if direction.at.is_none_or(|at| at > now) {
                continue;
            }
            let Some(first) = direction.waiting.front() else {
                direction.at = None;
                continue;
            };
            let size = u64::from(first.sectors) * 512;
            let wait = direction.wait(jiffy, size);
            if wait > 0 {
                direction.at = Some((jiffy + wait) * JIFFY);
                continue;
            }
            direction.charge(jiffy, size);
            return direction.waiting.pop_front();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes of 4 KiB that are asked for as fast as they go, in `seconds`.
    fn passed(limits: Limits, seconds: u64) -> (u64, usize) {
        let mut throttle = Throttle::new(limits).unwrap();
        let write = Request { id: 0, process: 0, position: 0, sectors: 8, write: true, at: 0 };
        let (mut now, mut n, mut most_at_once) = (0, 0, 0);
        while now < seconds * 1_000_000_000 {
            let mut at_once = 0;
            while throttle.pass(now, write) {
                at_once += 1;
            }
            now = throttle.timer_at().unwrap();
            while throttle.release(now).is_some() {
                at_once += 1;
            }
            n += at_once as u64;
            most_at_once = most_at_once.max(at_once);
        }
        (n, most_at_once)
    }

    #[test]
    fn limit_is_kept_on_average_and_let_through_in_slices() {
        // 4 MB/s are 976 writes of 4 KiB a second, 97 in a slice of 100 ms.
        let limits =
            Limits { write_bps: Some(BytesPerSecond::new(4_000_000)), ..Limits::default() };
        let (n, at_once) = passed(limits, 10);
        assert!((9_500..=10_000).contains(&n), "{n}");
        assert!((90..=200).contains(&at_once), "{at_once}");
        let (n, _) = passed(Limits { write_iops: Some(200), ..Limits::default() }, 10);
        assert!((1_900..=2_050).contains(&n), "{n}");
    }

    #[test]
    fn what_is_not_limited_passes() {
        assert!(Throttle::new(Limits::default()).is_none());
        let limits = Limits { write_iops: Some(1), ..Limits::default() };
        let mut throttle = Throttle::new(limits).unwrap();
        let read = Request { id: 0, process: 0, position: 0, sectors: 8, write: false, at: 0 };
        assert!((0..1000).all(|_| throttle.pass(0, read)));
        assert_eq!(throttle.timer_at(), None);
    }
}
