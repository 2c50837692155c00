//! A load of one VM on one IOThread: what the simulator's costs are measured by.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_iocores::{Kind, Limits, policy};
use rtvirtio_sim::scenario::{Burner, Load, Phase, PhaseKind, Scenario, Span, Stream, Vm};
use rtvirtio_sim::{Costs, Machine, Simulation};
use rtvirtio_units::{Bytes, CpuId, Nanos};

use super::cell::{PolicyConfig, Settings};
use super::machine::{CPUS, cpus};
use super::trial::Trial;

/// From the server's start to the load's: one VM connects.
const LEAD: Duration = Duration::from_millis(500);
/// Simulated.
const SIMULATED: Nanos = Nanos::from_millis(50);

/// Where the vCPUs of a load run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    /// On the IOThread's.
    IoThread,
    /// On those that the IOThread leaves.
    Rest,
    /// On all.
    All,
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoThread => "beside the IOThread",
            Self::Rest => "elsewhere",
            Self::All => "anywhere",
        })
    }
}

impl Beside {
    /// These, of the CPUs of a trial; the last one is the IOThread's.
    pub(super) fn places(self) -> Range<u16> {
        match self {
            Self::IoThread => CPUS - 1..CPUS,
            Self::Rest => 0..CPUS - 1,
            Self::All => 0..CPUS,
        }
    }
}

/// All queues of a disk in memory full.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// Queues of the disk.
    pub queues: u16,
    /// Requests in flight of each.
    pub depth: u16,
    /// Bytes of each.
    pub block: u64,
    /// Where their drivers run.
    pub vcpus: Beside,
    /// vCPUs beside these that compute all the time.
    pub burners: u16,
    /// CPU that a request costs the IOThread on top, µs.
    pub cpu_us: u32,
}

/// Requests a second, and ns of CPU of the IOThread and of the drivers for each.
pub(super) type Figures = [f64; 3];

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queues, depth, block, vcpus, burners, cpu_us } = self;
        write!(f, "{queues} queues, depth {depth}, {} KiB, vCPUs {vcpus}", block >> 10)?;
        if *burners > 0 {
            write!(f, ", {burners} compute")?;
        }
        if *cpu_us > 0 { write!(f, ", +{cpu_us} us a request") } else { Ok(()) }
    }
}

impl Row {
    /// The load for so long.
    pub(super) fn scenario(&self, length: Nanos) -> Scenario {
        let span = Span { start: Nanos::ZERO, stop: length };
        let load = Load::Depth(self.depth);
        let stream = |queue| Stream { queue, span, block: Bytes::new(self.block), load };
        let streams = (0..self.queues).map(stream).collect();
        let burners = vec![Burner { span, share: 1.0 }; self.burners.into()];
        let vm = Vm { queues: self.queues, pairs: 0, plugged: vec![span], streams, burners };
        let phases = vec![Phase { kind: PhaseKind::AllHot, span }];
        Scenario { seed: 1, phases, vms: vec![vm] }
    }

    /// Runs it for so long on a server of its own, verified; `program` is the `rtvirtio` that serves.
    ///
    /// # Errors
    /// If there are fewer than two CPUs; if the server fails, or does not do what it is told; if interrupted.
    pub(super) fn measure(
        &self,
        program: &Path,
        length: Nanos,
        interrupted: &Interrupted,
    ) -> Result<Figures> {
        let settings =
            Settings { queues: self.queues, cpu_us: self.cpu_us, kib_ns: 0, ..Settings::default() };
        let of = PolicyConfig::Static1;
        let scenario = self.scenario(length);
        let (policy, threads) = (of.kind().name(), of.threads());
        let cpus = cpus()?;
        let vcpus: Vec<CpuId> = self.vcpus.places().map(|at| cpus[usize::from(at)]).collect();
        let (settings, scenario) = (&settings, &scenario);
        let vcpus = Some(vcpus);
        let trial = Trial { program, settings, scenario, policy, threads, vcpus, lead: LEAD };
        let measured = trial.run(interrupted)?;
        let phase = measured.phases.first().context("there is no phase")?;
        let iops = phase.iops();
        let each = |cpus: f64| cpus * 1e9 / iops.max(1.0);
        Ok([iops, each(phase.io_ran), each(phase.vcpus_ran - phase.computed)])
    }

    /// The same in the simulator.
    ///
    /// # Errors
    /// If it refuses it.
    pub(super) fn simulate(&self, costs: &Costs) -> Result<Figures> {
        let scenario = self.scenario(SIMULATED);
        let mut machine = Machine::new(CPUS, 1);
        machine.vcpus = self.vcpus.places().map(|at| CpuId::new(at.into())).collect();
        machine.costs = costs.with_work(Nanos::from_micros(self.cpu_us.into()), Nanos::ZERO);
        let limits = Limits { cpus: Vec::new(), min_iothreads: 1, max_iothreads: 1, borrow: false };
        let mut fixed = policy(Kind::Static, limits);
        let mut simulation = Simulation::new(&machine, &scenario, &mut *fixed)?;
        simulation.run_until(SIMULATED);
        let whole = simulation.finish().whole;
        let each = |cpus: f64| cpus * 1e9 / whole.iops.max(1.0);
        Ok([whole.iops, each(whole.io_ran), each(whole.vcpus_ran - whole.computed)])
    }
}
