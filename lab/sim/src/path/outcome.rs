//! What a simulated condition gave.

use rtvirtio_spec::latency::{Histogram, Quantile, judged_percentile};
use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

/// An outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// The measured window.
    pub window: Nanos,
    /// Requests that ended, those of the warm-up among them.
    pub requests: u64,
    /// Each VM's tasks, in the condition's order.
    pub vms: Vec<Vec<TaskOutcome>>,
}

/// What one task had in the window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskOutcome {
    /// Requests that ended, per second.
    pub delivered_iops: f64,
    /// Bytes of them, per second.
    pub delivered_bps: f64,
    /// Mean latency, from submission.
    pub mean: Nanos,
    /// The largest.
    pub max: Nanos,
    /// The highest of p99, p99.9 and p99.99 with ten samples beyond it; none with too few for p99.
    pub judged: Option<Quantile>,
    /// Median, p99, p99.9 and p99.99, as far as there are samples.
    pub quantiles: Vec<Quantile>,
}

impl TaskOutcome {
    pub(super) fn new(histogram: &Histogram, bytes: u64, window: Nanos) -> Self {
        let seconds = window.as_secs_f64();
        let percentile = |p| Percentile::new(p).expect("constants are percentiles");
        let quantile = |p| histogram.quantile(percentile(p));
        let judged = judged_percentile(histogram.count()).and_then(|p| histogram.quantile(p));
        Self {
            delivered_iops: histogram.count() as f64 / seconds,
            delivered_bps: bytes as f64 / seconds,
            mean: histogram.mean(),
            max: histogram.max(),
            judged,
            quantiles: [50.0, 99.0, 99.9, 99.99].into_iter().filter_map(quantile).collect(),
        }
    }
}
