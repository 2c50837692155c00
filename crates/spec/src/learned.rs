//! What a learned model's file says of itself: the description in an ONNX file.
//!
//! An ONNX model has named text beside its graph (`metadata_props`). Under the
//! name [`DESCRIPTION`] stands one JSON object, a [`Description`]: in what
//! order the model takes which features, within which range it has seen them,
//! what its output means and how wrong it was on rows that it was not trained
//! on. `docs/learned-models.md` is the same for those who train.

use std::collections::BTreeMap;

use rtvirtio_units::BytesPerSecond;
use serde::{Deserialize, Serialize};

use crate::profile::{DeviceIdentity, Regime};

/// The name of the description among an ONNX model's `metadata_props`.
pub const DESCRIPTION: &str = "rtvirtio";

/// The description's version that is read.
pub const DESCRIPTION_VERSION: u32 = 1;

/// Most scores of a description: more say nothing new, and they are read at each plan.
pub const MAX_SCORES: usize = 100_000;

/// What the one number that a model gives for a row means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// The decimal logarithm of the tail in seconds: errors are then relative, as the scores are.
    #[default]
    #[serde(rename = "log10_s")]
    Log10Seconds,
    /// The tail in seconds.
    #[serde(rename = "s")]
    Seconds,
    /// The tail in milliseconds.
    #[serde(rename = "ms")]
    Milliseconds,
}

/// What a learned model says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// [`DESCRIPTION_VERSION`].
    pub version: u32,
    /// The features in the order in which the model takes them: `rtvirtio_model::features::FEATURES`.
    pub features: Vec<String>,
    /// The least value of each feature in training.
    pub minimum: Vec<f64>,
    /// The greatest.
    pub maximum: Vec<f64>,
    /// What the model's output means.
    pub output: Output,
    /// ln(measured / predicted) of rows that the model was not trained on, sorted, by regime
    /// (`rtvirtio_model::features::regime`). A regime without scores has no bound.
    #[serde(default)]
    pub scores: BTreeMap<Regime, Vec<f64>>,
    /// The device that it was trained on.
    pub device: DeviceIdentity,
    /// What that device wrote per second in 128 KiB requests at depth 64, as in its profile.
    pub write_throughput: BytesPerSecond,
}

/// Why a description cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    /// The version is not [`DESCRIPTION_VERSION`].
    #[error("description version {0}, this rtvirtio reads {DESCRIPTION_VERSION}")]
    Version(u32),
    /// A feature is another than this rtvirtio computes.
    #[error("feature {place} is {found:?}, this rtvirtio computes {expected:?} there")]
    Feature {
        /// Which, from 0.
        place: usize,
        /// In the file; empty if it has fewer.
        found: String,
        /// Here; empty if there are fewer.
        expected: &'static str,
    },
    /// The ranges are not finite, or not one for each feature, or empty.
    #[error("minimum and maximum are not a range for each feature")]
    Range,
    /// Scores are not finite, not sorted, or too many.
    #[error("scores are not at most {MAX_SCORES} sorted numbers")]
    Scores,
    /// The device's names are longer than 256 bytes or hold control characters.
    #[error("the device has a name that none has")]
    Device,
    /// A throughput of nothing.
    #[error("write_throughput is 0")]
    Throughput,
}

impl Description {
    /// Checks what a reader relies on, with the features that it computes.
    ///
    /// # Errors
    /// [`DescriptionError`] names the first thing that is not as it must be.
    pub fn check(&self, computed: &[&'static str]) -> Result<(), DescriptionError> {
        if self.version != DESCRIPTION_VERSION {
            return Err(DescriptionError::Version(self.version));
        }
        for place in 0..computed.len().max(self.features.len()) {
            let found = self.features.get(place).map_or("", String::as_str);
            let expected = computed.get(place).copied().unwrap_or_default();
            if found != expected {
                let found = found.chars().take(64).collect();
                return Err(DescriptionError::Feature { place, found, expected });
            }
        }
        let ends = self.minimum.iter().zip(&self.maximum);
        let is_range = |(a, b): (&f64, &f64)| a.is_finite() && b.is_finite() && a <= b;
        if [self.minimum.len(), self.maximum.len()] != [computed.len(); 2]
            || !ends.into_iter().all(is_range)
        {
            return Err(DescriptionError::Range);
        }
        let are_scores = |v: &Vec<f64>| v.iter().all(|s| s.abs() <= 100.0) && v.is_sorted();
        let count: usize = self.scores.values().map(Vec::len).sum();
        if count > MAX_SCORES || !self.scores.values().all(are_scores) {
            return Err(DescriptionError::Scores);
        }
        let DeviceIdentity { kind, model, serial, .. } = &self.device;
        let is_name = |s: &String| s.len() <= 256 && !s.chars().any(char::is_control);
        if ![kind, model].into_iter().chain(serial).all(is_name) {
            return Err(DescriptionError::Device);
        }
        if self.write_throughput.get() == 0 {
            return Err(DescriptionError::Throughput);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Bytes;

    use super::*;

    fn description() -> Description {
        Description {
            version: 1,
            features: vec!["vms".to_owned(), "task_iops".to_owned()],
            minimum: vec![1.0, 100.0],
            maximum: vec![4.0, 1500.0],
            output: Output::Log10Seconds,
            scores: [(Regime::IdlingFlooded, vec![-0.5, 0.0, 0.25])].into(),
            device: DeviceIdentity {
                kind: "loop".to_owned(),
                model: "ref-4x250".to_owned(),
                serial: None,
                size: Bytes::from_kib(1 << 20),
                rotational: false,
            },
            write_throughput: BytesPerSecond::from_megabytes(363),
        }
    }

    const COMPUTED: [&str; 2] = ["vms", "task_iops"];

    /// The document's example, and what training writes.
    #[test]
    fn description_is_the_documented_json() {
        let json = r#"{"version":1,"features":["vms","task_iops"],"minimum":[1.0,100.0],"maximum":[4.0,1500.0],"output":"log10_s","scores":{"idling-flooded":[-0.5,0.0,0.25]},"device":{"kind":"loop","model":"ref-4x250","serial":null,"size":1073741824,"rotational":false},"write_throughput":363000000}"#;
        assert_eq!(serde_json::to_string(&description()).unwrap(), json);
        assert_eq!(serde_json::from_str::<Description>(json).unwrap(), description());
        assert_eq!(description().check(&COMPUTED), Ok(()));
    }

    #[test]
    fn description_with_another_feature_is_refused_by_name() {
        let refused = |computed: &[&'static str]| description().check(computed).unwrap_err();
        assert_eq!(
            refused(&["vms", "vm_tasks"]).to_string(),
            "feature 1 is \"task_iops\", this rtvirtio computes \"vm_tasks\" there"
        );
        let missing =
            DescriptionError::Feature { place: 1, found: "task_iops".to_owned(), expected: "" };
        assert_eq!(refused(&["vms"]), missing);
    }

    #[test]
    fn description_without_a_range_or_with_wild_scores_is_refused() {
        let of = |change: fn(&mut Description)| {
            let mut d = description();
            change(&mut d);
            d.check(&COMPUTED)
        };
        assert_eq!(of(|d| d.version = 2), Err(DescriptionError::Version(2)));
        assert_eq!(of(|d| d.minimum[0] = 5.0), Err(DescriptionError::Range));
        assert_eq!(of(|d| d.maximum[1] = f64::NAN), Err(DescriptionError::Range));
        assert_eq!(of(|d| d.maximum.truncate(1)), Err(DescriptionError::Range));
        let score = |d: &mut Description| d.scores = [(Regime::Flowing, vec![1.0, 0.0])].into();
        assert_eq!(of(score), Err(DescriptionError::Scores));
        let score = |d: &mut Description| d.scores = [(Regime::Flowing, vec![f64::NAN])].into();
        assert_eq!(of(score), Err(DescriptionError::Scores));
        assert_eq!(of(|d| d.device.model = "\u{1b}[2J".to_owned()), Err(DescriptionError::Device));
        let none = |d: &mut Description| d.write_throughput = BytesPerSecond::default();
        assert_eq!(of(none), Err(DescriptionError::Throughput));
    }
}
