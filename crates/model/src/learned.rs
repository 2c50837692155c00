//! Learned models: any regressor in an ONNX file.
//!
//! The file is hostile until checked: its size, its structure (`protobuf`, `onnx`), its operators and
//! their attributes (`operators`, `trees`), the shapes of its input and output (`graph`), and its
//! description ([`rtvirtio_spec::learned`]). Then it answers, row by row and within a budget of
//! work, with a tail or with the reason why it has none: the row is out of the range of its training, or
//! the answer is no time.
//!
//! Rows are asked one by one: what a row gets cannot depend on the others, and a graph whose export
//! fixed one row works as well.
//!
//! A file may give two numbers: the tail, and a high quantile of it, to which its scores refer
//! (conformalised quantile regression: Romano et al. 2019).
//!
//! Properties (tests of the same name): `answers_are_those_of_the_trainings_runtime`,
//! `row_out_of_range_is_refused_by_feature`, `hostile_files_are_refused_without_a_panic`.

mod attributes;
mod graph;
mod onnx;
mod operators;
mod protobuf;
mod tensor;
mod trees;

use rtvirtio_spec::learned::{DESCRIPTION, Description, DescriptionError, Output};
use rtvirtio_units::{Confidence, Nanos};

pub use protobuf::Malformed;
pub use tensor::Fault;

use crate::conformal;
use crate::features::{self, FEATURES};
use graph::Graph;

/// Largest file that is read. In memory it takes up to eight times as much.
pub const MAX_MODEL_BYTES: usize = 32 << 20;

/// The longest tail that is taken for one, s.
const LONGEST: f64 = 3600.0;

/// How far beyond a range a value may lie, as a part of it: a percentile's logarithm is not exact.
const TOLERANCE: f64 = 1e-9;

/// Why a file is no model that can be asked.
#[derive(Debug, thiserror::Error)]
pub enum LearnedError {
    /// It is larger than [`MAX_MODEL_BYTES`].
    #[error("more than {MAX_MODEL_BYTES} bytes")]
    TooLarge,
    /// It is no ONNX file.
    #[error("not an ONNX model")]
    Malformed(#[from] Malformed),
    /// Its operator set is one in which operators mean something else.
    #[error("operator set {0}; 7 and later are read")]
    Opset(i64),
    /// An operator that is not supported.
    #[error("operator {operator} ({domain:?}) is not supported")]
    Operator {
        /// Which.
        operator: String,
        /// Its domain.
        domain: String,
    },
    /// An attribute, or its value, that is not supported.
    #[error("operator {operator}: attribute {attribute} is not supported, or damaged")]
    Attribute {
        /// Of which operator.
        operator: String,
        /// Which.
        attribute: String,
    },
    /// A tensor of another type than numbers, or whose elements are not as many as its shape says.
    #[error("tensor {name:?} is of an unsupported type, or damaged")]
    Tensor {
        /// Its name.
        name: String,
    },
    /// A value is used that nothing before has computed.
    #[error("value {name:?} is used before it is computed")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// Other than one input.
    #[error("{0} inputs, not one")]
    Inputs(usize),
    /// Other than one output.
    #[error("{0} outputs, not one")]
    Outputs(usize),
    /// The input is not of `float` or `double`.
    #[error("its input is of type {0}, neither float (1) nor double (11)")]
    InputType(i64),
    /// The input is not a row of features.
    #[error("its input has the shape {found:?}, not one open dimension and {features} features")]
    InputShape {
        /// Its shape; `None` is open.
        found: Vec<Option<i64>>,
        /// What is computed here.
        features: usize,
    },
    /// It has no answer even to a row within its range.
    #[error("it gives no answer to a row of its own range: {0}")]
    Silent(NoAnswer),
    /// The description is no JSON of a description's form.
    #[error("its metadata {DESCRIPTION:?} is no description: {0}")]
    Json(String),
    /// The description does not fit.
    #[error("its description")]
    Description(#[from] DescriptionError),
}

impl LearnedError {
    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Operator { .. } | Self::Attribute { .. } => {
                "linear models, perceptrons and trees are read, as skl2onnx and PyTorch export them"
            }
            Self::Json(_) | Self::Description(_) | Self::InputShape { .. } => {
                "docs/learned-models.md says which features in which order, and how to describe them"
            }
            _ => "docs/learned-models.md says what such a file holds",
        }
    }
}

/// Why a model has no answer for a row.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NoAnswer {
    /// The row is not like those of its training.
    #[error("{feature} is {}, its training had {} to {}", short(*.value), short(*.minimum), short(*.maximum))]
    OutOfRange {
        /// The first feature that is out of range.
        feature: &'static str,
        /// What it is.
        value: f64,
        /// The least in training.
        minimum: f64,
        /// The greatest.
        maximum: f64,
    },
    /// What it answers is not a time between 1 ns and an hour.
    #[error("its answer, {} s, is no latency", short(*.0))]
    NoLatency(f64),
    /// An operator fails.
    #[error("{operator}: {fault}")]
    Fault {
        /// Which operator.
        operator: String,
        /// How.
        fault: Fault,
    },
}

/// What a model answers to a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prediction {
    /// The tail that it expects.
    pub tail: Nanos,
    /// What its scores refer to: a high quantile of the tail where the file has one, else the tail.
    /// Two runs of one load may differ little or a hundredfold, and such a quantile knows which.
    pub high: Nanos,
}

/// A model that can be asked.
#[derive(Debug, Clone)]
pub struct Learned {
    graph: Graph,
    description: Option<Description>,
}

/// A number to four decimals.
fn short(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

/// Text of a file, short enough for an error.
fn clipped(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(120).collect()
}

impl Learned {
    /// Checks a file and asks it once.
    ///
    /// # Errors
    /// [`LearnedError`] names the first thing that is not as it must be.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, LearnedError> {
        if bytes.len() > MAX_MODEL_BYTES {
            return Err(LearnedError::TooLarge);
        }
        let model = onnx::Model::read(bytes)?;
        // A model of `ai.onnx.ml` alone imports no set of the default domain.
        if (1..7).contains(&model.opset) {
            return Err(LearnedError::Opset(model.opset));
        }
        let json = |e: serde_json::Error| LearnedError::Json(clipped(&e.to_string()));
        let text =
            model.metadata.iter().find(|(key, _)| *key == DESCRIPTION).map(|(_, text)| *text);
        let description: Option<Description> =
            text.map(serde_json::from_str).transpose().map_err(json)?;
        if let Some(description) = &description {
            description.check(&FEATURES)?;
        }
        let learned = Self { graph: Graph::new(&model.graph, FEATURES.len())?, description };
        learned.try_out()?;
        Ok(learned)
    }

    /// Asks for the middle of its range: operators that do not fit each other show at once.
    fn try_out(&self) -> Result<(), LearnedError> {
        let mut row = [1.0; FEATURES.len()];
        if let Some(d) = &self.description {
            let ends = d.minimum.iter().zip(&d.maximum);
            row.iter_mut().zip(ends).for_each(|(x, (a, b))| *x = f64::midpoint(*a, *b));
        }
        match self.predict(&row) {
            // Of a file that does not say for what it was trained, only that it works is known.
            Err(NoAnswer::NoLatency(_)) if self.description.is_none() => Ok(()),
            Err(why) => Err(LearnedError::Silent(why)),
            Ok(_) => Ok(()),
        }
    }

    /// What the file says of itself; `None`: nothing, so its range is unknown, its output is
    /// [`Output::default`] and it has no bound.
    #[must_use]
    pub const fn description(&self) -> Option<&Description> {
        self.description.as_ref()
    }

    /// What it predicts for a row of [`FEATURES`].
    ///
    /// # Errors
    /// [`NoAnswer`]: the row is out of range, or what it answers is no latency.
    pub fn predict(&self, row: &[f64; FEATURES.len()]) -> Result<Prediction, NoAnswer> {
        let ranges = self.description.iter().flat_map(|d| d.minimum.iter().zip(&d.maximum));
        for ((&value, feature), (&minimum, &maximum)) in row.iter().zip(FEATURES).zip(ranges) {
            let slack = TOLERANCE * minimum.abs().max(maximum.abs());
            if !(minimum - slack..=maximum + slack).contains(&value) {
                return Err(NoAnswer::OutOfRange { feature, value, minimum, maximum });
            }
        }
        let answer = self.graph.run(row);
        let answer = answer.map_err(|(operator, fault)| NoAnswer::Fault { operator, fault })?;
        let tail = self.latency(answer.0)?;
        let high = answer.1.map_or(Ok(tail), |high| self.latency(high))?;
        Ok(Prediction { tail, high })
    }

    /// A number of the output as the time that it means.
    fn latency(&self, number: f64) -> Result<Nanos, NoAnswer> {
        let seconds = match self.description.as_ref().map_or_else(Output::default, |d| d.output) {
            Output::Log10Seconds => 10_f64.powf(number),
            Output::Seconds => number,
            Output::Milliseconds => number / 1000.0,
        };
        if (1e-9..=LONGEST).contains(&seconds) {
            Ok(Nanos::from_secs_f64(seconds))
        } else {
            Err(NoAnswer::NoLatency(seconds))
        }
    }

    /// The bound on the tail of `row`, by [`conformal::shared`] and never below what it predicts; `None` if it
    /// has too few scores of the row's regime.
    #[must_use]
    pub fn bound(
        &self,
        row: &[f64; FEATURES.len()],
        predicted: Prediction,
        confidence: Confidence,
        tasks: usize,
    ) -> Option<Nanos> {
        let scores = self.description.as_ref()?.scores.get(&features::regime(row))?;
        let factor = conformal::shared(scores, confidence, tasks)?;
        Some(predicted.high.scale(factor).max(predicted.tail))
    }
}

#[cfg(test)]
mod tests;
