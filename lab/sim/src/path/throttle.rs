//! Limits of a cgroup on a device (`io.max`, `blkio.throttle`): bytes and requests, reads and writes.
//!
//! The kernel lets a limit through in windows of 100 ms, as its writers describe it (V. Goyal,
//! *blk-throttle*, linux-block) and as traces show: within a window all that it allows may go at once; what exceeds it
//! waits for the next one, and for as long as its excess takes at the limit's rate. What a window leaves is lost.

use std::collections::VecDeque;

use rtvirtio_spec::settings::Limits;
use rtvirtio_units::BytesPerSecond;

use super::request::Request;
use super::tick::{TICK, after};

/// A window, ns: 25 ticks.
const WINDOW: u64 = 25 * TICK;
const SECOND: u64 = 1_000_000_000;

/// What has gone in the window, of one limit.
#[derive(Debug)]
struct Account {
    /// What a window lets through.
    quota: f64,
    /// Below 0: what the first of those that wait has saved up.
    used: f64,
}

impl Account {
    /// How long after the end of the window `size` may go, ns; none: it may go now.
    fn excess(&self, size: f64) -> Option<u64> {
        let over = self.used + size - self.quota;
        (over > 0.0).then(|| (over / self.quota * WINDOW as f64) as u64)
    }
}

/// One direction of one cgroup.
#[derive(Debug)]
struct Direction {
    bytes: Option<Account>,
    requests: Option<Account>,
    waiting: VecDeque<Request>,
    window: u64,
    /// When the first of those that wait may go, ns.
    at: Option<u64>,
}

impl Direction {
    fn new(bytes: Option<BytesPerSecond>, requests: Option<u64>) -> Self {
        let account =
            |rate: u64| Account { quota: rate as f64 * WINDOW as f64 / SECOND as f64, used: 0.0 };
        Self {
            bytes: bytes.map(|rate| account(rate.get())),
            requests: requests.map(account),
            waiting: VecDeque::new(),
            window: 0,
            at: None,
        }
    }

    /// Each limit, and what a request of so many bytes is of it.
    fn accounts(&mut self, bytes: f64) -> impl Iterator<Item = (&mut Account, f64)> {
        let requests = self.requests.iter_mut().map(|account| (account, 1.0));
        self.bytes.iter_mut().map(move |account| (account, bytes)).chain(requests)
    }

    /// Windows that are over pay for what has gone in them, and while `bytes` wait for those. After a pause the next
    /// window begins now.
    fn renew(&mut self, now: u64, bytes: f64) {
        let now = now / TICK * TICK;
        let over = now.saturating_sub(self.window) / WINDOW;
        self.window += over * WINDOW;
        let waits = self.at.is_some();
        let mut is_paid = !waits;
        for (account, size) in self.accounts(bytes) {
            let least = if waits { -size } else { 0.0 };
            account.used =
                (account.used - over as f64 * account.quota).max(least.min(account.used));
            is_paid &= account.used <= 0.0;
        }
        if over > 0 && is_paid {
            self.window = now;
        }
    }

    /// When a request may go; none: now, and it is counted.
    fn wait(&mut self, now: u64, request: &Request) -> Option<u64> {
        let bytes = f64::from(request.sectors) * 512.0;
        self.renew(now, bytes);
        let end = self.window + WINDOW;
        let of_bytes = self.bytes.as_ref().and_then(|account| account.excess(bytes));
        // Requests are counted whole: the first of a window goes as it begins.
        let of_requests = self.requests.as_ref().and_then(|account| {
            account.excess(1.0).map(|time| if account.quota >= 1.0 { 0 } else { time })
        });
        if let Some(excess) = of_bytes.max(of_requests) {
            return Some(after(end, excess));
        }
        self.accounts(bytes).for_each(|(account, size)| account.used += size);
        None
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
        if direction.waiting.is_empty() {
            direction.at = direction.wait(now, &request);
            if direction.at.is_none() {
                return true;
            }
        }
        direction.waiting.push_back(request);
        false
    }

    /// When [`Throttle::release`] is to be called.
    pub(super) fn timer_at(&self) -> Option<u64> {
        self.0.iter().filter_map(|direction| direction.at).min()
    }

    /// The next request that may go now.
    pub(super) fn release(&mut self, now: u64) -> Option<Request> {
        for direction in &mut self.0 {
            if direction.at.is_none_or(|at| at > now) {
                continue;
            }
            let Some(first) = direction.waiting.front().copied() else {
                direction.at = None;
                continue;
            };
            if let Some(at) = direction.wait(now, &first) {
                direction.at = Some(at);
                continue;
            }
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
        let (mut now, mut n, mut max_at_once) = (0, 0, 0);
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
            max_at_once = max_at_once.max(at_once);
        }
        (n, max_at_once)
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
