//! The 24 cases: {1, 2, 3, 4} VMs × six mixes of the paper's three tasks.

use std::fmt;
use std::str::FromStr;

use rtvirtio_spec::specification::Load;
use rtvirtio_units::{Bytes, Iops, TaskName};

use crate::CasesError;

/// One of the paper's tasks: 4 KiB random, 70 % reads, one request at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaskKind {
    /// L, 100 IOPS.
    Light,
    /// M, 500 IOPS.
    Medium,
    /// H, 1500 IOPS.
    Heavy,
}

impl TaskKind {
    /// The task's name in a specification.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Light => "light",
            Self::Medium => "medium",
            Self::Heavy => "heavy",
        }
    }

    /// The name as a checked one.
    ///
    /// # Panics
    /// Never: the three names are names.
    #[must_use]
    pub fn task_name(self) -> TaskName {
        TaskName::new(self.name()).expect("a task kind's name is a name")
    }

    /// Requests per second.
    ///
    /// # Panics
    /// Never: the three rates are in range.
    #[must_use]
    pub fn iops(self) -> Iops {
        let iops = match self {
            Self::Light => 100.0,
            Self::Medium => 500.0,
            Self::Heavy => 1500.0,
        };
        Iops::new(iops).expect("a task kind's rate is in range")
    }

    /// All that the task does.
    #[must_use]
    pub fn load(self) -> Load {
        Load {
            iops: Some(self.iops()),
            block_size: Bytes::from_kib(4),
            read_fraction: 0.7,
            queue_depth: 1,
        }
    }
}

/// Which tasks each VM runs. The paper has six sets; L+H is not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mix {
    /// L.
    Light,
    /// M.
    Medium,
    /// H.
    Heavy,
    /// L+M.
    LightMedium,
    /// M+H.
    MediumHeavy,
    /// L+M+H.
    LightMediumHeavy,
}

impl Mix {
    /// The six, in the paper's order.
    pub const ALL: [Self; 6] = [
        Self::Light,
        Self::Medium,
        Self::Heavy,
        Self::LightMedium,
        Self::MediumHeavy,
        Self::LightMediumHeavy,
    ];

    /// The tasks of the mix, lightest first.
    #[must_use]
    pub const fn kinds(self) -> &'static [TaskKind] {
        match self {
            Self::Light => &[TaskKind::Light],
            Self::Medium => &[TaskKind::Medium],
            Self::Heavy => &[TaskKind::Heavy],
            Self::LightMedium => &[TaskKind::Light, TaskKind::Medium],
            Self::MediumHeavy => &[TaskKind::Medium, TaskKind::Heavy],
            Self::LightMediumHeavy => &[TaskKind::Light, TaskKind::Medium, TaskKind::Heavy],
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Light => "L",
            Self::Medium => "M",
            Self::Heavy => "H",
            Self::LightMedium => "L+M",
            Self::MediumHeavy => "M+H",
            Self::LightMediumHeavy => "L+M+H",
        }
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl FromStr for Mix {
    type Err = CasesError;
    fn from_str(text: &str) -> Result<Self, CasesError> {
        let unknown = || CasesError::unknown("mix", text, "L, M, H, L+M, M+H or L+M+H");
        Self::ALL.into_iter().find(|m| m.label() == text).ok_or_else(unknown)
    }
}

/// A number of VMs, all with the same mix. Written `4xL+M+H`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Case {
    vms: u8,
    mix: Mix,
}

impl Case {
    /// Checks that there are 1 to 4 VMs.
    ///
    /// # Errors
    /// [`CasesError::VmCount`].
    pub const fn new(vms: u8, mix: Mix) -> Result<Self, CasesError> {
        if vms >= 1 && vms <= 4 { Ok(Self { vms, mix }) } else { Err(CasesError::VmCount(vms)) }
    }

    /// Number of VMs with targets, 1 to 4.
    #[must_use]
    pub const fn vms(self) -> u8 {
        self.vms
    }

    /// What each of them runs.
    #[must_use]
    pub const fn mix(self) -> Mix {
        self.mix
    }

    /// The 24 cases, by number of VMs, then by mix.
    #[must_use]
    pub fn all() -> Vec<Self> {
        (1..=4).flat_map(|vms| Mix::ALL.into_iter().map(move |mix| Self { vms, mix })).collect()
    }

    /// The eight that span the 24: every number of VMs and every mix but M alone,
    /// weighted towards the crowded end.
    #[must_use]
    pub const fn strict8() -> [Self; 8] {
        [
            Self { vms: 1, mix: Mix::Light },
            Self { vms: 1, mix: Mix::Heavy },
            Self { vms: 2, mix: Mix::MediumHeavy },
            Self { vms: 3, mix: Mix::LightMedium },
            Self { vms: 3, mix: Mix::LightMediumHeavy },
            Self { vms: 4, mix: Mix::LightMedium },
            Self { vms: 4, mix: Mix::Heavy },
            Self { vms: 4, mix: Mix::LightMediumHeavy },
        ]
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}x{}", self.vms, self.mix))
    }
}

impl FromStr for Case {
    type Err = CasesError;
    fn from_str(text: &str) -> Result<Self, CasesError> {
        let unknown = || CasesError::unknown("case", text, "1 to 4 VMs and a mix, as 4xL+M+H");
        let (vms, mix) = text.split_once('x').ok_or_else(unknown)?;
        // One digit, so that `+4` and `04`, which a number parser takes, have no second spelling.
        if vms.len() != 1 {
            return Err(unknown());
        }
        Self::new(vms.parse().map_err(|_| unknown())?, mix.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_24_distinct_cases_from_the_smallest_to_the_largest() {
        let all = Case::all();
        assert_eq!(all.len(), 24);
        assert_eq!(all[0].to_string(), "1xL");
        assert_eq!(all[9].to_string(), "2xL+M");
        assert_eq!(all[23].to_string(), "4xL+M+H");
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), 24);
    }

    #[test]
    fn case_text_round_trips() {
        for case in Case::all() {
            assert_eq!(case.to_string().parse::<Case>().unwrap(), case);
        }
    }

    #[test]
    fn strict8_is_the_fixed_list() {
        let names: Vec<_> = Case::strict8().iter().map(Case::to_string).collect();
        let fixed = ["1xL", "1xH", "2xM+H", "3xL+M", "3xL+M+H", "4xL+M", "4xH", "4xL+M+H"];
        assert_eq!(names, fixed);
    }

    #[test]
    fn case_outside_the_24_is_refused() {
        assert_eq!("5xL".parse::<Case>(), Err(CasesError::VmCount(5)));
        assert_eq!("0xL".parse::<Case>(), Err(CasesError::VmCount(0)));
        for text in ["", "x", "L", "4", "4xL+H", "4xM+L", "04xL", "+4xL", "4XL", "4xL "] {
            assert!(text.parse::<Case>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn tasks_are_those_of_the_paper() {
        let rates: Vec<f64> =
            Mix::LightMediumHeavy.kinds().iter().map(|k| k.iops().get()).collect();
        assert_eq!(rates, [100.0, 500.0, 1500.0]);
        let load = TaskKind::Heavy.load();
        assert_eq!((load.block_size.get(), load.queue_depth), (4096, 1));
        assert_eq!(load.read_fraction, 0.7);
    }
}
