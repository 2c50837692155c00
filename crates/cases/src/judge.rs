//! The pass rule.
//!
//! A task passes when its judged percentile is within its target **and** it
//! delivered at least 0.95 of its rate: the latency of a synchronous task says
//! nothing of requests that it never came to issue. The judged percentile is
//! the highest of p99, p99.9 and p99.99 with at least [`MIN_BEYOND`] samples
//! beyond it. A task with too few samples for p99 does not pass.

use std::fmt;

use rtvirtio_spec::latency::{Histogram, Quantile};
pub use rtvirtio_spec::latency::{MIN_BEYOND, highest_percentile, judged_percentile};
use rtvirtio_units::{Iops, Nanos, Percentile};

/// Fraction of the requested rate that a task must deliver.
pub const MIN_DELIVERED: f64 = 0.95;

/// The laxer fraction that is printed beside it.
pub const LAX_DELIVERED: f64 = 0.9;

fn percentile(value: f64) -> Percentile {
    Percentile::new(value).expect("the judged percentiles are percentiles")
}

pub(crate) fn p99() -> Percentile {
    percentile(99.0)
}

/// What is wrong with a task's run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Miss {
    /// Too few samples to judge p99.
    TooFewSamples {
        /// How many there are.
        n: u64,
    },
    /// The judged percentile exceeds the target.
    Tail {
        /// The judged percentile.
        percentile: Percentile,
        /// Its value.
        value: Nanos,
        /// The target.
        target: Nanos,
    },
    /// Too little of the requested rate was delivered.
    Rate {
        /// The delivered fraction.
        delivered: f64,
    },
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooFewSamples { n } => {
                write!(f, "too few samples: {n} leave fewer than {MIN_BEYOND} beyond p99")
            }
            Self::Tail { percentile, value, target } => {
                write!(f, "p{percentile} of {value} exceeds the target of {target}")
            }
            Self::Rate { delivered } => {
                write!(f, "delivered {delivered:.3} of its rate, less than {MIN_DELIVERED}")
            }
        }
    }
}

/// How a task did in a window.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The judged percentile; `None` with too few samples for p99.
    pub judged: Option<Quantile>,
    /// Requests completed, as a fraction of those that it was to issue.
    pub delivered_fraction: f64,
    /// Whether the judged percentile is within the target.
    pub passed_tail: bool,
    /// Whether at least 0.95 of the rate was delivered.
    pub passed_rate: bool,
    /// Whether at least 0.9 of the rate was delivered.
    pub passed_rate_90: bool,
    /// Why the task does not pass; empty if it does.
    pub misses: Vec<Miss>,
}

impl Judgement {
    /// Whether tail and rate both hold.
    #[must_use]
    pub const fn passed(&self) -> bool {
        self.passed_tail && self.passed_rate
    }

    /// Why the task does not pass, in one line.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        let reasons: Vec<_> = self.misses.iter().map(Miss::to_string).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// Judges one task: the latencies of its requests in a window of `window_s` seconds.
///
/// A window that is not a positive, finite length delivers nothing, and does not pass.
#[must_use]
pub fn judge(histogram: &Histogram, window_s: f64, requested: Iops, target: Nanos) -> Judgement {
    let n = histogram.count();
    let delivered_fraction = if window_s.is_finite() && window_s > 0.0 {
        n as f64 / (window_s * requested.get())
    } else {
        0.0
    };
    let judged = judged_percentile(n).and_then(|p| histogram.quantile(p));
    let passed_tail = judged.is_some_and(|q| q.value <= target);
    let passed_rate = delivered_fraction >= MIN_DELIVERED;

    let mut misses = Vec::new();
    match judged {
        None => misses.push(Miss::TooFewSamples { n }),
        Some(q) if !passed_tail => {
            misses.push(Miss::Tail { percentile: q.percentile, value: q.value, target });
        }
        Some(_) => {}
    }
    if !passed_rate {
        misses.push(Miss::Rate { delivered: delivered_fraction });
    }
    Judgement {
        judged,
        delivered_fraction,
        passed_tail,
        passed_rate,
        passed_rate_90: delivered_fraction >= LAX_DELIVERED,
        misses,
    }
}

/// Wilson's 95 % interval of a proportion; (0, 1) without a sample.
///
/// Unlike the normal interval it keeps to 0..1 and has a width at 0 and at `n`
/// successes, where most schemes are.
#[must_use]
pub fn wilson_interval(successes: u64, n: u64) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    const Z: f64 = 1.959_964; // The normal law's 97.5 % point.
    let n = n as f64;
    let p = (successes as f64 / n).min(1.0);
    let scale = 1.0 + Z * Z / n;
    let centre = (p + Z * Z / (2.0 * n)) / scale;
    let half = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt() / scale;
    ((centre - half).max(0.0), (centre + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW_S: f64 = 30.0;

    /// `n` requests of 1 ms, the slowest `slow` of them of 12 ms.
    fn histogram(n: u64, slow: u64) -> Histogram {
        let mut h = Histogram::new();
        h.record(Nanos::from_millis(1), n - slow);
        h.record(Nanos::from_millis(12), slow);
        h
    }

    fn judge_light(n: u64, slow: u64) -> Judgement {
        let requested = Iops::new(100.0).unwrap();
        judge(&histogram(n, slow), WINDOW_S, requested, Nanos::from_millis(10))
    }

    #[test]
    fn judged_percentile_needs_ten_samples_beyond() {
        let judged = |n| judged_percentile(n).map(Percentile::get);
        assert_eq!(judged(0), None);
        assert_eq!(judged(999), None);
        assert_eq!(judged(1_000), Some(99.0));
        assert_eq!(judged(9_999), Some(99.0));
        assert_eq!(judged(10_000), Some(99.9));
        assert_eq!(judged(99_999), Some(99.9));
        assert_eq!(judged(100_000), Some(99.99));
    }

    #[test]
    fn task_with_tail_and_rate_passes() {
        let j = judge_light(3_000, 0);
        assert!(j.passed() && j.passed_rate_90);
        assert_eq!(j.delivered_fraction, 1.0);
        assert_eq!(j.judged.unwrap().percentile.get(), 99.0);
        assert_eq!(j.reason(), None);
    }

    #[test]
    fn rate_of_exactly_095_passes_and_one_request_less_does_not() {
        // 30 s × 100 IOPS = 3,000 requests; 0.95 of them are 2,850 and 0.9 are 2,700.
        assert!(judge_light(2_850, 0).passed());
        let j = judge_light(2_849, 0);
        assert!(!j.passed() && j.passed_rate_90 && j.passed_tail);
        assert!(matches!(j.misses[..], [Miss::Rate { .. }]));
        assert!(judge_light(2_700, 0).passed_rate_90);
        assert!(!judge_light(2_699, 0).passed_rate_90);
    }

    #[test]
    fn tail_is_the_judged_percentile_and_not_the_largest_sample() {
        // p99 of 3,000 is the 2,970th: 30 slow ones lie beyond it, 31 reach it.
        assert!(judge_light(3_000, 30).passed());
        let j = judge_light(3_000, 31);
        assert!(!j.passed_tail && j.passed_rate && !j.passed());
        assert_eq!(j.reason().unwrap(), "p99 of 12.00 ms exceeds the target of 10.00 ms");
    }

    #[test]
    fn tail_equal_to_the_target_passes() {
        let requested = Iops::new(100.0).unwrap();
        let j = judge(&histogram(3_000, 3_000), WINDOW_S, requested, Nanos::from_millis(12));
        assert!(j.passed());
    }

    #[test]
    fn too_few_samples_never_pass_silently() {
        // 9.99 s at 100 IOPS: the full rate and no slow request, but p99 cannot be judged.
        let requested = Iops::new(100.0).unwrap();
        let j = judge(&histogram(999, 0), 9.99, requested, Nanos::from_millis(10));
        assert!(j.passed_rate && !j.passed_tail && !j.passed());
        assert_eq!(j.misses, [Miss::TooFewSamples { n: 999 }]);
        assert!(j.reason().unwrap().starts_with("too few samples: 999 "));
    }

    #[test]
    fn window_without_a_length_does_not_pass() {
        let requested = Iops::new(100.0).unwrap();
        for window_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let j = judge(&histogram(3_000, 0), window_s, requested, Nanos::from_millis(10));
            assert!(!j.passed_rate && !j.passed_rate_90);
        }
    }

    #[test]
    fn wilson_interval_matches_textbook_values() {
        let close = |(low, high): (f64, f64), l: f64, h: f64| {
            assert!((low - l).abs() < 5e-4 && (high - h).abs() < 5e-4, "{low} {high}");
        };
        // z² = 3.8415. 10 of 10: low = 10 / 13.8415. 0 of 10: high = 3.8415 / 13.8415.
        close(wilson_interval(10, 10), 0.7225, 1.0);
        close(wilson_interval(0, 10), 0.0, 0.2775);
        // Symmetric at a half: 0.5 ± 1.96 × √(0.025 + 0.0096) / 1.38415.
        close(wilson_interval(5, 10), 0.2366, 0.7634);
        assert_eq!(wilson_interval(0, 0), (0.0, 1.0));
    }
}
