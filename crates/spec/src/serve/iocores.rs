//! `[iocores]`: what decides how many IOThreads there are and which queue goes where.

use rtvirtio_units::CpuId;

use super::check::{Misplaced, at, in_range};
use super::error::Fault;
use super::wire::{self, Policy};
use super::{MAX_CPU, MAX_IOTHREADS};

/// What decides, and within which bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoCores {
    /// What decides.
    pub policy: Policy,
    /// Where IOThreads may be added, each CPU once, in the order in which they are taken. Some, if
    /// the policy adds any.
    pub cpus: Vec<CpuId>,
    /// Fewest IOThreads, 1 to `most`.
    pub least: u32,
    /// Most IOThreads, no more than `cpus` has.
    pub most: u32,
    /// Whether CPUs may be taken from vCPUs for IOThreads, and given back.
    pub borrow: bool,
}

impl Default for IoCores {
    /// Nobody decides.
    fn default() -> Self {
        Self { policy: Policy::Static, cpus: Vec::new(), least: 1, most: 1, borrow: false }
    }
}

impl IoCores {
    /// Checks them. What `raw` leaves out is as in `before`; with other CPUs, `least` and `most` are 1
    /// and as many as those.
    ///
    /// # Errors
    /// [`Fault`]: which rule they break.
    pub fn new(raw: wire::IoCores, before: Self) -> Result<Self, Fault> {
        Self::located(raw, before).map_err(|(_, fault)| fault)
    }

    pub(super) fn located(raw: wire::IoCores, before: Self) -> Result<Self, Misplaced> {
        let policy = raw.policy.unwrap_or(before.policy);
        let (cpus, least, most) = match raw.cpus {
            None => (before.cpus, before.least, before.most),
            Some(cpus) => {
                at(&["cpus"], in_range("CPUs", cpus.len() as u64, 1, MAX_IOTHREADS as u64))?;
                let most = cpus.len() as u32;
                (cpus, 1, most)
            }
        };
        if let Some(bad) = cpus.iter().find(|cpu| cpu.get() > MAX_CPU) {
            return Err((&["cpus"], Fault::BadCpu(*bad)));
        }
        let twice = cpus.iter().enumerate().find(|(place, cpu)| cpus[..*place].contains(cpu));
        if let Some((_, cpu)) = twice {
            return Err((&["cpus"], Fault::DuplicateCpu(*cpu)));
        }
        if cpus.is_empty() && policy.needs_cpus() {
            return Err((&["policy"], Fault::NoCpus(policy)));
        }
        let most = raw.most.unwrap_or(most);
        let high = cpus.len().max(1) as u64;
        at(&["most"], in_range("most", most.into(), 1, high))?;
        let least = raw.least.unwrap_or(least);
        at(&["least"], in_range("least", least.into(), 1, most.into()))?;
        let borrow = raw.borrow.unwrap_or(before.borrow);
        Ok(Self { policy, cpus, least, most, borrow })
    }
}
