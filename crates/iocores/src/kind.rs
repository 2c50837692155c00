//! Policies by name.

use std::fmt;
use std::str::FromStr;

use crate::dynamic::Dynamic;
use crate::fixed::{RoundRobin, Static};
use crate::iocm::Iocm;
use crate::spdk::Spdk;
use crate::utility::Weights;
use crate::{Limits, Policy};

/// A policy. (`advise` is none: it is [`Kind::Dynamic`], and its decisions are not carried out.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Nothing is changed.
    Static,
    /// Queues are spread evenly over the IOThreads there are.
    RoundRobin,
    /// Number and placement follow the load.
    Dynamic,
    /// IOcm's, as published.
    Iocm,
    /// SPDK's dynamic scheduler, as published.
    Spdk,
}

impl Kind {
    /// All.
    pub const ALL: [Self; 5] =
        [Self::Static, Self::RoundRobin, Self::Dynamic, Self::Iocm, Self::Spdk];

    /// The name that an operator writes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::RoundRobin => "round-robin",
            Self::Dynamic => "dynamic",
            Self::Iocm => "iocm",
            Self::Spdk => "spdk",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no policy is called {0:?}: static, round-robin, dynamic, iocm or spdk")]
pub struct UnknownKind(String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| UnknownKind(name.chars().take(32).collect()))
    }
}

/// A policy that has seen nothing yet.
#[must_use]
pub fn policy(kind: Kind, limits: Limits) -> Box<dyn Policy + Send> {
    match kind {
        Kind::Static => Box::new(Static),
        Kind::RoundRobin => Box::new(RoundRobin),
        Kind::Dynamic => Box::new(Dynamic::new(limits, Weights::default())),
        Kind::Iocm => Box::new(Iocm::new(limits)),
        Kind::Spdk => Box::new(Spdk::new(limits)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_each_kind_is_read_back() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("round-robin".parse(), Ok(Kind::RoundRobin));
    }

    #[test]
    fn name_that_is_unknown_is_refused_and_cut() {
        let error = "x".repeat(1_000).parse::<Kind>().unwrap_err();
        assert_eq!(error, UnknownKind("x".repeat(32)));
        assert!("Static".parse::<Kind>().is_err());
    }
}
