//! What a task or a disk did in the last minute, and since the start.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rtvirtio_spec::latency::{Histogram, Quantile, beyond};
use rtvirtio_units::Percentile;

/// How far back the tails shown reach.
pub const RECENT: Duration = Duration::from_secs(60);
/// The percentiles shown.
pub const PERCENTILES: [f64; 4] = [50.0, 99.0, 99.9, 99.99];
/// Samples beyond a percentile without which it is not shown.
const MIN_BEYOND: u64 = 10;

/// p50, p99, p99.9, p99.99; `None`: too few samples.
pub type Tails = [Option<Quantile>; 4];

/// What a task did between two looks. QEMU counts by disk: tasks that share one have all of its
/// requests each.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Its latencies, each at the upper end of the counter's bin.
    pub histogram: Histogram,
    /// Those above the target.
    pub misses: u64,
    /// How long that took, s.
    pub seconds: f64,
}

/// Samples of the last minute, and counts of all.
#[derive(Debug, Default)]
pub struct History {
    pub(crate) recent: VecDeque<(Instant, Sample)>,
    /// All requests.
    pub requests: u64,
    /// Of these, above the target.
    pub misses: u64,
}

/// Tails and rate of the last minute.
#[derive(Debug, Clone, Copy)]
pub struct Recent {
    /// Its tails.
    pub tails: Tails,
    /// Requests a second.
    pub iops: f64,
}

impl History {
    /// Adds what was seen at `now`.
    pub fn add(&mut self, now: Instant, sample: Sample) {
        self.requests = self.requests.saturating_add(sample.histogram.count());
        self.misses = self.misses.saturating_add(sample.misses);
        self.recent.push_back((now, sample));
        while self.recent.front().is_some_and(|(at, _)| now - *at > RECENT) {
            self.recent.pop_front();
        }
    }

    /// The last minute before `now`.
    #[must_use]
    pub fn recent(&self, now: Instant) -> Recent {
        // Old samples leave with the next one, which does not come while nothing is measured.
        let kept = || self.recent.iter().filter(|(at, _)| now - *at <= RECENT);
        let mut recent = Histogram::new();
        kept().for_each(|(_, sample)| recent.merge(&sample.histogram));
        let seconds: f64 = kept().map(|(_, sample)| sample.seconds).sum();
        let tails = PERCENTILES.map(|p| {
            let percentile = Percentile::new(p).ok()?;
            let enough = beyond(recent.count(), percentile) >= MIN_BEYOND;
            enough.then(|| recent.quantile(percentile)).flatten()
        });
        Recent { tails, iops: recent.count() as f64 / seconds.max(1e-3) }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn tail_and_rate_end_with_the_minute_whether_or_not_others_follow() {
        let (start, mut history) = (Instant::now(), History::default());
        let at = |s| start + Duration::from_secs(s);
        for (s, ms) in [(0, 8), (30, 2)] {
            let mut histogram = Histogram::new();
            histogram.record(Nanos::from_millis(ms), 1000);
            history.add(at(s), Sample { histogram, misses: 0, seconds: 10.0 });
        }
        let median = |s| history.recent(at(s)).tails[0].map(|found| (found.n, found.value));
        assert_eq!(median(60), Some((2000, Nanos::from_millis(2))));
        assert_eq!(median(61), Some((1000, Nanos::from_millis(2))));
        assert_eq!(history.recent(at(61)).iops, 100.0);
        assert_eq!(median(91), None);
        assert_eq!(history.recent(at(91)).iops, 0.0);
    }
}
