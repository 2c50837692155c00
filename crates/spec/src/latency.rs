//! A mergeable latency histogram and its percentiles.
//!
//! Bins are the load generator's own (fio: 64 per power of two, so a value is
//! known to within 1/64); merging adds counts. A percentile comes with the
//! order-statistic interval of its rank, which needs no distribution.

use std::collections::BTreeMap;

use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

/// Latencies by bin: nanoseconds → requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Histogram(BTreeMap<u64, u64>);

/// A measured percentile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantile {
    /// Which percentile.
    pub percentile: Percentile,
    /// The measured value.
    pub value: Nanos,
    /// Lower end of the 95 % interval.
    pub low: Nanos,
    /// Upper end of the 95 % interval; the largest sample if the rank's interval leaves the data.
    pub high: Nanos,
    /// Samples in all.
    pub n: u64,
    /// Samples beyond the percentile: n × (1 − p).
    pub beyond: u64,
}

/// A latency's bin: its upper end to 7 binary digits, so at most 1/64 above.
#[must_use]
pub fn round_up(latency: Nanos) -> Nanos {
    let ns = latency.get();
    let digits = (u64::BITS - ns.leading_zeros()).saturating_sub(7);
    Nanos::new(ns.div_ceil(1 << digits).saturating_mul(1 << digits))
}

impl Histogram {
    /// An empty histogram.
    #[must_use]
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Adds `count` requests of one latency.
    pub fn record(&mut self, latency: Nanos, count: u64) {
        if count > 0 {
            let bin = self.0.entry(latency.get()).or_default();
            // Counts may be those that another program tells.
            *bin = bin.saturating_add(count);
        }
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (&ns, &count) in &other.0 {
            self.record(Nanos::new(ns), count);
        }
    }

    /// What was added since `earlier`, a state of the same histogram; all of it if it has been
    /// started anew since.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let has = |(ns, count): (&u64, &u64)| self.0.get(ns).is_some_and(|now| now >= count);
        if !earlier.0.iter().all(has) {
            return self.clone();
        }
        let mut new = Self::new();
        for (&ns, &count) in &self.0 {
            new.record(Nanos::new(ns), count - earlier.0.get(&ns).copied().unwrap_or(0));
        }
        new
    }

    /// The same with each latency [rounded up](round_up): no more bins than a file should have.
    #[must_use]
    pub fn coarse(&self) -> Self {
        let mut coarse = Self::new();
        self.bins().for_each(|(latency, count)| coarse.record(round_up(latency), count));
        coarse
    }

    /// Requests in all.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.values().fold(0, |sum, &count| sum.saturating_add(count))
    }

    /// Mean, or zero without samples.
    #[must_use]
    pub fn mean(&self) -> Nanos {
        let n = self.count();
        if n == 0 {
            return Nanos::ZERO;
        }
        let sum: f64 = self.0.iter().map(|(&ns, &c)| ns as f64 * c as f64).sum();
        Nanos::new((sum / n as f64).round() as u64)
    }

    /// The largest sample, or zero without samples.
    #[must_use]
    pub fn max(&self) -> Nanos {
        Nanos::new(self.0.last_key_value().map_or(0, |(&ns, _)| ns))
    }

    /// Bins in rising order: (latency, requests).
    pub fn bins(&self) -> impl Iterator<Item = (Nanos, u64)> {
        self.0.iter().map(|(&ns, &count)| (Nanos::new(ns), count))
    }

    /// The sample of `rank` (1 is the smallest); clamps to the data.
    fn at_rank(&self, rank: u64) -> Nanos {
        let mut seen = 0;
        for (&ns, &count) in &self.0 {
            seen = u64::saturating_add(seen, count);
            if seen >= rank {
                return Nanos::new(ns);
            }
        }
        self.max()
    }

    /// The `percentile` (nearest rank) with its interval; `None` without samples.
    ///
    /// The interval is ranks ±1.96·√(n·p·(1−p)) about n·p: the normal
    /// approximation of the binomial law of the number of samples below.
    #[must_use]
    pub fn quantile(&self, percentile: Percentile) -> Option<Quantile> {
        let n = self.count();
        if n == 0 {
            return None;
        }
        let p = percentile.fraction();
        let rank = n as f64 * p;
        let half = 1.96 * (n as f64 * p * (1.0 - p)).sqrt();
        Some(Quantile {
            percentile,
            // The nudge keeps 10,000 × 0.999 at rank 9,990.
            value: self.at_rank((rank - 1e-6).ceil().max(1.0) as u64),
            low: self.at_rank((rank - half).floor().max(1.0) as u64),
            high: self.at_rank((rank + half).ceil() as u64 + 1),
            n,
            beyond: beyond(n, percentile),
        })
    }
}

/// Samples beyond `percentile` among `n`, rounded down.
#[must_use]
pub fn beyond(n: u64, percentile: Percentile) -> u64 {
    // 1 − p loses digits at p = 99.99 %; a tiny nudge keeps 10,000 × 0.001 at 10.
    (n as f64 * (1.0 - percentile.fraction()) + 1e-6).floor() as u64
}

/// The upper 95 % limit of the rate of events of which `count` were seen (Byar's approximation of the
/// Poisson distribution's, within 1 % of it).
#[must_use]
pub fn upper_limit(count: u64) -> f64 {
    let n = count as f64 + 1.0;
    n * (1.0 - 1.0 / (9.0 * n) + 1.645 / (3.0 * n.sqrt())).powi(3)
}

/// Samples that a judged percentile has beyond it, at least.
pub const MIN_BEYOND: u64 = 10;

/// The highest of p99, p99.9 and p99.99 with [`MIN_BEYOND`] of `n` samples beyond it.
#[must_use]
pub fn judged_percentile(n: u64) -> Option<Percentile> {
    highest_percentile(n, MIN_BEYOND)
}

/// The highest of p99, p99.9 and p99.99 with `at_least` of `n` samples beyond it.
///
/// # Panics
/// Never: all three are percentiles.
#[must_use]
pub fn highest_percentile(n: u64, at_least: u64) -> Option<Percentile> {
    let percentile = |p| Percentile::new(p).expect("the judged percentiles are percentiles");
    [99.99, 99.9, 99.0].map(percentile).into_iter().find(|&p| beyond(n, p) >= at_least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(n: u64) -> Histogram {
        let mut h = Histogram::new();
        for i in 1..=n {
            h.record(Nanos::new(i), 1);
        }
        h
    }

    #[test]
    fn rounding_is_upwards_by_a_64th_at_most() {
        for ns in [0, 1, 63, 127, 128, 129, 1_000_000, 1_000_003, u64::MAX >> 1] {
            let rounded = round_up(Nanos::new(ns)).get();
            assert!(rounded >= ns && rounded - ns <= ns / 64, "{ns} {rounded}");
        }
        assert_eq!(round_up(Nanos::new(129)), Nanos::new(130));
    }

    #[test]
    fn coarse_histogram_has_the_requests_in_few_bins() {
        let all = ramp(1_000_000);
        let coarse = all.coarse();
        assert_eq!(coarse.count(), all.count());
        assert!(coarse.bins().count() < 1_000);
        let p = Percentile::new(99.0).unwrap();
        let (exact, found) = (all.quantile(p).unwrap().value, coarse.quantile(p).unwrap().value);
        assert!(found >= exact && found.get() - exact.get() <= exact.get() / 64);
    }

    #[test]
    fn quantile_of_a_ramp_is_its_rank() {
        let q = ramp(10_000).quantile(Percentile::new(99.9).unwrap()).unwrap();
        assert_eq!(q.value, Nanos::new(9990));
        assert_eq!(q.beyond, 10);
        assert!(q.low < q.value && q.high > q.value);
    }

    #[test]
    fn quantile_of_one_sample_is_that_sample() {
        let q = ramp(1).quantile(Percentile::new(99.0).unwrap()).unwrap();
        assert_eq!((q.low, q.value, q.high), (Nanos::new(1), Nanos::new(1), Nanos::new(1)));
    }

    #[test]
    fn quantile_without_samples_is_none() {
        assert_eq!(Histogram::new().quantile(Percentile::new(99.0).unwrap()), None);
    }

    #[test]
    fn merge_adds_counts_and_keeps_the_mean() {
        let mut a = ramp(3);
        a.merge(&ramp(3));
        assert_eq!(a.count(), 6);
        assert_eq!(a.mean(), Nanos::new(2));
    }

    #[test]
    fn difference_is_what_came_since_and_all_of_it_after_a_new_start() {
        let mut now = ramp(3);
        now.merge(&ramp(2));
        assert_eq!(now.since(&ramp(3)), ramp(2));
        assert_eq!(now.since(&now), Histogram::new());
        assert_eq!(ramp(2).since(&ramp(3)), ramp(2));
    }

    #[test]
    fn upper_limit_is_that_of_poisson() {
        // 2.996: none is seen in 5 % of cases.
        for (count, exact) in [(0, 2.996), (1, 4.744), (10, 16.962), (100, 118.08)] {
            let limit = upper_limit(count);
            assert!((limit / exact - 1.0).abs() < 0.015, "{count}: {limit}");
        }
    }

    #[test]
    fn beyond_counts_exactly_at_round_numbers() {
        assert_eq!(beyond(10_000, Percentile::new(99.9).unwrap()), 10);
        assert_eq!(beyond(9_999, Percentile::new(99.9).unwrap()), 9);
        assert_eq!(beyond(100_000, Percentile::new(99.99).unwrap()), 10);
    }
}
