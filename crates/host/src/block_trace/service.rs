//! How a device serves what it has: by how many requests are under way.
//!
//! While `n` requests are under way, a device with `c` channels of equal speed completes
//! min(n, c) / service time a second; so completions in each state over the time spent in it tell
//! what the device can do, as far as it has been used, without a request of one's own.

use rtvirtio_spec::latency::Histogram;
use rtvirtio_units::Nanos;

/// States that are told apart; what is more counts as the last.
pub const MAX_UNDER_WAY: usize = 64;
/// Requests longer than this, in sectors, are large.
const LARGEST_SMALL: u64 = (16 << 10) / 512;

/// What requests of one class of sizes did.
#[derive(Debug, Clone, Default)]
pub struct SizeClass {
    /// Latencies.
    pub all: Histogram,
    /// Latencies of those that found nothing else under way.
    pub alone: Histogram,
    /// Bytes.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
}

impl SizeClass {
    fn add(&mut self, latency: Nanos, found: usize, is_read: bool, sectors: u64) {
        self.all.record(latency, 1);
        if found == 0 {
            self.alone.record(latency, 1);
        }
        self.bytes += sectors * 512;
        self.reads += u64::from(is_read);
    }

    fn merge(&mut self, other: &Self) {
        self.all.merge(&other.all);
        self.alone.merge(&other.alone);
        self.bytes += other.bytes;
        self.reads += other.reads;
    }
}

/// How a device served what it had.
#[derive(Debug, Clone)]
pub struct Service {
    /// Time with so many requests under way.
    pub time: [Nanos; MAX_UNDER_WAY + 1],
    /// Requests completed in that time.
    pub done: [u64; MAX_UNDER_WAY + 1],
    /// Requests of up to 16 KiB.
    pub small: SizeClass,
    /// Larger ones.
    pub large: SizeClass,
    under_way: usize,
    since: Option<Nanos>,
}

impl Default for Service {
    fn default() -> Self {
        Self {
            time: [Nanos::ZERO; MAX_UNDER_WAY + 1],
            done: [0; MAX_UNDER_WAY + 1],
            small: SizeClass::default(),
            large: SizeClass::default(),
            under_way: 0,
            since: None,
        }
    }
}

impl Service {
    fn advance(&mut self, at: Nanos) {
        if let Some(since) = self.since {
            let time = &mut self.time[self.under_way.min(MAX_UNDER_WAY)];
            *time = time.saturating_add(at.saturating_sub(since));
        }
        self.since = Some(at);
    }

    /// A request is queued; how many it found under way.
    pub(super) fn queued(&mut self, at: Nanos) -> usize {
        self.advance(at);
        let found = self.under_way;
        self.under_way += 1;
        found
    }

    /// A request is done that found so many.
    pub(super) fn done(
        &mut self,
        at: Nanos,
        latency: Nanos,
        found: usize,
        (is_read, sectors): (bool, u64),
    ) {
        self.advance(at);
        self.done[self.under_way.min(MAX_UNDER_WAY)] += 1;
        self.under_way = self.under_way.saturating_sub(1);
        let class = if sectors <= LARGEST_SMALL { &mut self.small } else { &mut self.large };
        class.add(latency, found, is_read, sectors);
    }

    /// A request is gone that was not served.
    pub(super) fn gone(&mut self, at: Nanos) {
        self.advance(at);
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// Nothing that was under way is known of any more.
    pub(super) fn forget(&mut self) {
        (self.under_way, self.since) = (0, None);
    }

    /// What was seen since the last time.
    pub(super) fn take(&mut self) -> Self {
        let fresh = Self { under_way: self.under_way, since: self.since, ..Self::default() };
        std::mem::replace(self, fresh)
    }

    /// Adds what was seen later.
    pub fn merge(&mut self, later: &Self) {
        for (sum, time) in self.time.iter_mut().zip(later.time) {
            *sum = sum.saturating_add(time);
        }
        for (sum, done) in self.done.iter_mut().zip(later.done) {
            *sum += done;
        }
        self.small.merge(&later.small);
        self.large.merge(&later.large);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_their_time_and_their_completions() {
        let us = Nanos::from_micros;
        let mut service = Service::default();
        let first = service.queued(us(100));
        let second = service.queued(us(150));
        service.done(us(200), us(100), first, (true, 8));
        service.done(us(300), us(150), second, (false, 256));
        service.queued(us(1000));
        assert_eq!((first, second), (0, 1));
        let seen = service.take();
        assert_eq!(seen.time[..3], [us(700), us(150), us(50)]);
        assert_eq!(seen.done[..3], [0, 1, 1]);
        assert_eq!((seen.small.all.count(), seen.small.alone.count(), seen.small.reads), (1, 1, 1));
        assert_eq!((seen.large.all.count(), seen.large.alone.count()), (1, 0));
        assert_eq!(seen.large.bytes, 128 << 10);
        // The one that is under way stays so.
        service.done(us(1200), us(200), 0, (true, 8));
        assert_eq!(service.take().done[1], 1);
    }

    #[test]
    fn after_a_loss_no_time_is_counted_until_something_happens() {
        let us = Nanos::from_micros;
        let mut service = Service::default();
        service.queued(us(0));
        service.forget();
        service.queued(us(500));
        service.gone(us(600));
        // Hostile order: more ends than beginnings.
        service.gone(us(700));
        service.done(us(650), us(1), 9, (true, 1));
        let seen = service.take();
        assert_eq!(seen.time[1], us(100));
        assert_eq!(seen.time.iter().map(|time| time.get()).sum::<u64>(), us(200).get());
    }
}
