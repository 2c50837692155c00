//! The host that is simulated.

use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{CpuId, Nanos};

use crate::costs::Costs;

/// Most CPUs.
pub const MAX_CPUS: u16 = 128;

/// What the disks are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Backend {
    /// A request ends when the IOThread has done its part.
    Null,
    /// Emulated SSDs, shared by the VMs.
    Ssd {
        /// Each of them.
        config: SsdConfig,
        /// So many, 1 to 1024; the VMs take turns.
        devices: u16,
        /// Whether `rtvirtio_qos` decides what a device does next; each VM is a flow of one weight.
        schedule: bool,
    },
}

/// A host.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// 1 to [`MAX_CPUS`].
    pub cpus: u16,
    /// CPU of each IOThread that is there at the start; at least one.
    pub threads: Vec<CpuId>,
    /// Where vCPUs run at the start; at least one.
    pub vcpus: Vec<CpuId>,
    /// How long IOThreads poll at most.
    pub polling: Nanos,
    /// What things cost: 1 s each at most.
    pub costs: Costs,
    /// What the disks are.
    pub backend: Backend,
}

impl Machine {
    /// So many CPUs (1 to [`MAX_CPUS`], or [`Simulation::new`](crate::Simulation::new) refuses it). The
    /// last `threads` have an IOThread each, the vCPUs the others; if none is left, the vCPUs run on all.
    #[must_use]
    pub fn new(cpus: u16, threads: u16) -> Self {
        let id = |cpu: u16| CpuId::new(u32::from(cpu));
        let first = cpus.saturating_sub(threads);
        let vcpus = if first == 0 { 0..cpus } else { 0..first };
        Self {
            cpus,
            threads: (first..cpus).rev().map(id).collect(),
            vcpus: vcpus.map(id).collect(),
            // The data plane's own value.
            polling: Nanos::new(65_536),
            costs: Costs::default(),
            backend: Backend::Null,
        }
    }

    /// The CPUs in the order in which IOThreads take them: the last first, as the first has most of the
    /// host's interrupts.
    #[must_use]
    pub fn io_cpus(&self) -> Vec<CpuId> {
        (0..self.cpus).rev().map(|cpu| CpuId::new(u32::from(cpu))).collect()
    }

    /// The slice of the fair scheduler: Linux's 0.7 ms, longer by the logarithm of the CPUs (8 at most).
    pub(crate) fn slice(&self) -> Nanos {
        Nanos::from_micros(700 * (1 + u64::from(self.cpus.clamp(1, 8).ilog2())))
    }
}

/// Why nothing is simulated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimError {
    /// The machine has no or too many CPUs.
    #[error("{0} CPUs: 1 to {MAX_CPUS} can be simulated")]
    Cpus(u16),
    /// There is no IOThread, or no CPU for the vCPUs.
    #[error("at the start there is no {0}")]
    Nothing(&'static str),
    /// A CPU that the machine does not have.
    #[error("there is no CPU {0}")]
    NoCpu(CpuId),
    /// Something costs too much.
    #[error("a cost of {0}: 1 s at most can be simulated")]
    Cost(Nanos),
    /// No or too many devices.
    #[error("{0} devices: 1 to 1024 can be simulated")]
    Devices(u16),
    /// The device cannot be.
    #[error("emulated SSD: {0}")]
    Ssd(#[from] rtvirtio_ssd::SsdError),
    /// The scenario is refused.
    #[error("scenario: {0}")]
    Scenario(#[from] crate::scenario::ScenarioError),
}
