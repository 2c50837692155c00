//! The evaluation, pinned down: cases, tiers of targets, neighbours, the
//! schemes that are compared, and the rule by which a task passes.
//!
//! - [`case`]: 1 to 4 VMs, each with one of six mixes of tasks: 24 cases.
//! - [`tier`]: how late each VM's tasks may be.
//! - [`fn@specification`]: a case as the specification that the planner reads.
//! - [`scheme`]: the settings of each baseline.
//! - [`Scale`]: all of it, slower.
//! - [`mod@judge`]: which percentile is judged, when a task passes, and the
//!   interval of a pass rate.
//!
//! The room is pure, and none of it is fitted to a result: what is here was
//! fixed before the first comparison.

pub mod case;
pub mod judge;
mod scale;
pub mod scheme;
mod specification;
pub mod tier;

pub use case::{Case, Mix, TaskKind};
pub use judge::{Judgement, Miss, highest_percentile, judge, judged_percentile, wilson_interval};
pub use scale::Scale;
pub use scheme::{IoPriority, Scheme, SchemeSettings};
pub use specification::{BACKGROUND_VM, specification};
pub use tier::{Neighbour, Tier};

/// Why a text or a number names nothing here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CasesError {
    /// The text names no such thing.
    #[error("{text:?} is not a {what} (use {expected})")]
    Unknown {
        /// What was to be named.
        what: &'static str,
        /// What was given.
        text: String,
        /// What may be given.
        expected: &'static str,
    },
    /// A case has 1 to 4 VMs.
    #[error("a case has 1 to 4 VMs, not {0}")]
    VmCount(u8),
}

impl CasesError {
    fn unknown(what: &'static str, text: &str, expected: &'static str) -> Self {
        Self::Unknown { what, text: text.to_owned(), expected }
    }
}
