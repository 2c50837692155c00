//! Targets by tier, and the neighbour.

use std::fmt;
use std::str::FromStr;

use rtvirtio_units::Nanos;

use crate::CasesError;
use crate::case::{Case, TaskKind};

/// A set of targets. VM 0 is always the most urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The paper's targets: 60 to 600 ms, by the number of VMs.
    Paper,
    /// 10, 15, 25 and 40 ms, whatever the number of VMs.
    Strict,
    /// The same for each task of each VM, ms.
    Each(u16),
}

impl Tier {
    /// The target of a `kind` task in VM `rank` (0 is the most urgent) of `case`;
    /// `None` if the case has no such VM.
    #[must_use]
    pub fn target(self, case: Case, rank: u8, kind: TaskKind) -> Option<Nanos> {
        let by_rank: &[u64] = match (self, case.vms()) {
            (Self::Each(ms), vms) => {
                return (rank < vms).then_some(Nanos::from_millis(ms.into()));
            }
            (Self::Paper, 1) => &[60],
            (Self::Paper, 2) => &[90, 250],
            (Self::Paper, 3) => &[150, 260, 400],
            (Self::Paper, _) => &[200, 320, 450, 600],
            (Self::Strict, vms) => &[10, 15, 25, 40][..usize::from(vms)],
        };
        let ms = *by_rank.get(usize::from(rank))?;
        // In tenths, so that × 1.2 and × 1.5 stay whole numbers.
        let tenths = match (self, kind) {
            (Self::Paper, TaskKind::Light) => 12,
            (Self::Strict, TaskKind::Light) => 15,
            (Self::Each(_), _) | (_, TaskKind::Medium | TaskKind::Heavy) => 10,
        };
        Some(Nanos::from_micros(ms * tenths * 100))
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paper => f.pad("paper"),
            Self::Strict => f.pad("strict"),
            Self::Each(ms) => f.pad(&format!("{ms}ms")),
        }
    }
}

impl FromStr for Tier {
    type Err = CasesError;
    fn from_str(text: &str) -> Result<Self, CasesError> {
        match text {
            "paper" => Ok(Self::Paper),
            "strict" => Ok(Self::Strict),
            _ => {
                let ms = text.strip_suffix("ms").and_then(|ms| ms.parse().ok());
                let ms = ms.filter(|ms| *ms > 0).map(Self::Each);
                ms.ok_or_else(|| {
                    CasesError::unknown("tier", text, "paper, strict, or such as 20ms")
                })
            }
        }
    }
}

/// What else uses the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Neighbour {
    /// Nothing.
    None,
    /// One more VM, `background`, without a target: 128 KiB writes at depth 64.
    Writer,
}

impl Neighbour {
    const fn label(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writer => "writer",
        }
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl FromStr for Neighbour {
    type Err = CasesError;
    fn from_str(text: &str) -> Result<Self, CasesError> {
        match text {
            "none" => Ok(Self::None),
            "writer" => Ok(Self::Writer),
            _ => Err(CasesError::unknown("neighbour", text, "none or writer")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Mix;

    fn row(tier: Tier, vms: u8, kind: TaskKind) -> Vec<u64> {
        let case = Case::new(vms, Mix::LightMediumHeavy).unwrap();
        let targets = (0..vms).map(|rank| tier.target(case, rank, kind).unwrap());
        targets.map(|t| t.get() / 1_000_000).collect()
    }

    #[test]
    fn paper_targets_are_the_table() {
        for kind in [TaskKind::Medium, TaskKind::Heavy] {
            assert_eq!(row(Tier::Paper, 1, kind), [60]);
            assert_eq!(row(Tier::Paper, 2, kind), [90, 250]);
            assert_eq!(row(Tier::Paper, 3, kind), [150, 260, 400]);
            assert_eq!(row(Tier::Paper, 4, kind), [200, 320, 450, 600]);
        }
        assert_eq!(row(Tier::Paper, 1, TaskKind::Light), [72]);
        assert_eq!(row(Tier::Paper, 2, TaskKind::Light), [108, 300]);
        assert_eq!(row(Tier::Paper, 3, TaskKind::Light), [180, 312, 480]);
        assert_eq!(row(Tier::Paper, 4, TaskKind::Light), [240, 384, 540, 720]);
    }

    #[test]
    fn strict_targets_do_not_depend_on_the_number_of_vms() {
        assert_eq!(row(Tier::Strict, 1, TaskKind::Heavy), [10]);
        assert_eq!(row(Tier::Strict, 2, TaskKind::Heavy), [10, 15]);
        assert_eq!(row(Tier::Strict, 3, TaskKind::Medium), [10, 15, 25]);
        assert_eq!(row(Tier::Strict, 4, TaskKind::Medium), [10, 15, 25, 40]);
        assert_eq!(row(Tier::Strict, 4, TaskKind::Light), [15, 22, 37, 60]);
    }

    #[test]
    fn strict_light_targets_keep_their_half_milliseconds() {
        let case = Case::new(4, Mix::Light).unwrap();
        let target = Tier::Strict.target(case, 1, TaskKind::Light);
        assert_eq!(target, Some(Nanos::from_micros(22_500)));
    }

    #[test]
    fn each_task_may_have_the_same_target() {
        for kind in [TaskKind::Light, TaskKind::Medium, TaskKind::Heavy] {
            assert_eq!(row(Tier::Each(30), 3, kind), [30, 30, 30]);
        }
    }

    #[test]
    fn target_of_a_vm_that_is_not_there_is_none() {
        let case = Case::new(2, Mix::Heavy).unwrap();
        assert_eq!(Tier::Strict.target(case, 2, TaskKind::Heavy), None);
        assert_eq!(Tier::Paper.target(case, 2, TaskKind::Heavy), None);
        assert_eq!(Tier::Each(10).target(case, 2, TaskKind::Heavy), None);
    }

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for tier in [Tier::Paper, Tier::Strict, Tier::Each(20)] {
            assert_eq!(tier.to_string().parse(), Ok(tier));
        }
        for text in ["0ms", "ms", "20", "-1ms", "99999ms"] {
            assert!(text.parse::<Tier>().is_err(), "{text}");
        }
        for neighbour in [Neighbour::None, Neighbour::Writer] {
            assert_eq!(neighbour.to_string().parse(), Ok(neighbour));
        }
        assert!("Strict".parse::<Tier>().is_err());
        assert!("".parse::<Neighbour>().is_err());
    }
}
