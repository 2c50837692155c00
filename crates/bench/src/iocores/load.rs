//! A load of one VM on one IOThread: what the simulator's costs are measured by.

use std::path::Path;

use anyhow::{Context, Result};
use rtvirtio_sim::scenario::{Load, Phase, PhaseKind, Scenario, Span, Stream, Vm};
use rtvirtio_units::{Bytes, Nanos};

use super::cell::{Contender, Settings};
use super::trial::Trial;
use crate::load::Interrupted;

/// All queues of a disk in memory full; requests cost nothing beside what they do.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Queues of the disk.
    pub queues: u16,
    /// Requests in flight of each.
    pub depth: u16,
    /// Bytes of each.
    pub block: u64,
}

/// Requests a second, and ns of CPU of the IOThread and of the clients for each.
pub type Figures = [f64; 3];

impl Row {
    /// The load for so long.
    #[must_use]
    pub fn scenario(&self, length: Nanos) -> Scenario {
        let span = Span { start: Nanos::ZERO, stop: length };
        let load = Load::Depth(self.depth);
        let stream = |queue| Stream { queue, span, block: Bytes::new(self.block), load };
        let streams = (0..self.queues).map(stream).collect();
        let vm = Vm { queues: self.queues, plugged: vec![span], streams, burners: Vec::new() };
        let phases = vec![Phase { kind: PhaseKind::AllHot, span }];
        Scenario { seed: 1, phases, vms: vec![vm] }
    }

    /// Runs it for so long on a server of its own, verified; `program` is the `rtvirtio` that serves.
    ///
    /// # Errors
    /// If there are fewer than two CPUs; if the server fails, or does not do what it is told; if interrupted.
    pub fn measure(
        &self,
        program: &Path,
        length: Nanos,
        interrupted: &Interrupted,
    ) -> Result<Figures> {
        let settings =
            Settings { queues: self.queues, cpu_us: 0, kib_ns: 0, ..Settings::default() };
        let of = Contender::Static1;
        let scenario = self.scenario(length);
        let (policy, threads) = (of.kind().name(), of.threads());
        let trial = Trial { program, settings: &settings, scenario: &scenario, policy, threads };
        let measured = trial.run(interrupted)?;
        let phase = measured.phases.first().context("there is no phase")?;
        let iops = phase.iops();
        let each = |cpus: f64| cpus * 1e9 / iops.max(1.0);
        Ok([iops, each(phase.io_ran), each(phase.vcpus_ran)])
    }
}
