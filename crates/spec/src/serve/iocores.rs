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
    /// Fewest IOThreads, 1 to `max_iothreads`.
    pub min_iothreads: u32,
    /// Most IOThreads, no more than `cpus` has.
    pub max_iothreads: u32,
    /// Whether CPUs may be taken from vCPUs for IOThreads, and given back.
    pub borrow: bool,
}

impl Default for IoCores {
    /// Nobody decides.
    fn default() -> Self {
        Self {
            policy: Policy::Static,
            cpus: Vec::new(),
            min_iothreads: 1,
            max_iothreads: 1,
            borrow: false,
        }
    }
}

impl IoCores {
    /// Checks them. What `raw` leaves out is as in `before`; with other CPUs, `min_iothreads` and `max_iothreads` are 1
    /// and as many as those.
    ///
    /// # Errors
    /// [`Fault`]: which rule they break.
    pub fn new(raw: wire::IoCores, before: Self) -> Result<Self, Fault> {
        Self::located(raw, before).map_err(|(_, fault)| fault)
    }

    pub(super) fn located(raw: wire::IoCores, before: Self) -> Result<Self, Misplaced> {
        let policy = raw.policy.unwrap_or(before.policy);
        let (cpus, min_iothreads, max_iothreads) = match raw.cpus {
            None => (before.cpus, before.min_iothreads, before.max_iothreads),
            Some(cpus) => {
                at(&["cpus"], in_range("CPUs", cpus.len() as u64, 1, MAX_IOTHREADS as u64))?;
                let max_iothreads = cpus.len() as u32;
                (cpus, 1, max_iothreads)
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
        let max_iothreads = raw.max_iothreads.unwrap_or(max_iothreads);
        let high = cpus.len().max(1) as u64;
        at(&["max_iothreads"], in_range("max_iothreads", max_iothreads.into(), 1, high))?;
        let min_iothreads = raw.min_iothreads.unwrap_or(min_iothreads);
        at(
            &["min_iothreads"],
            in_range("min_iothreads", min_iothreads.into(), 1, max_iothreads.into()),
        )?;
        let borrow = raw.borrow.unwrap_or(before.borrow);
        Ok(Self { policy, cpus, min_iothreads, max_iothreads, borrow })
    }
}
