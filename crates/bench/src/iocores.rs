//! The data plane's policies of I/O cores on trial: scenarios of the simulator, played for real.
//!
//! A *trial* is one `rtvirtio serve` with a disk a VM, whose requests cost CPU, under one policy; VMs are
//! libblkio clients of this process with a thread for each queue, and threads that compute. All share two
//! CPUs ([`machine`] says how). A seed gives the order of phases, the bursts and the times of requests;
//! policies take turns on each seed. Every read is compared with what was written.
//!
//! - [`cell`]: what a cell holds, and what a campaign is made of.
//! - [`machine`]: where it runs, and the same for the simulator.
//! - `content`, `client`: requests that are verified; a disk that comes and goes.
//! - `vcpus`: where clients and what computes run, and what they had of the CPUs.
//! - `watch`: IOThreads and moves, by the server's events.
//! - `trial`: one server with its VMs for one scenario.
//! - [`judge`]: medians, utilities, marks. [`mod@table`], `plot`: for a terminal, for a page.
//! - [`load`]: one VM on one IOThread, by which the simulator is calibrated. [`costs`]: how.
//! - [`simulated`]: the same in the simulator, beside.
//! - [`disturb`]: what a monitor that ends, a reader that does not read and hostile requests do to the
//!   data path. `awake`: CPUs that do not halt meanwhile.
//!
//! What differs from the simulator: a disk takes some ms to connect; a queue has 64 requests in flight at
//! most; seven of ten requests read, and clients make and compare content; a queue's streams are drained
//! one before the next.

mod awake;
pub mod cell;
mod client;
mod content;
pub mod costs;
pub mod disturb;
pub mod judge;
pub mod load;
pub mod machine;
mod plot;
pub mod simulated;
pub mod table;
mod trial;
mod vcpus;
mod watch;

use std::path::Path;

use anyhow::{Context, Result, bail};
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_units::Nanos;

use crate::cell::CANARY_LIMIT;
use crate::lines::Lines;
use crate::load::Interrupted;
use crate::progress::Progress;
use crate::qos::cell::disturbance;
use cell::{Cell, CellKey, Contender, Settings, Timeline};
use content::Unverified;
use costs::Round;
use simulated::Compared;
use trial::{LEAD, Measured, Trial, duration};

/// A campaign.
#[derive(Debug)]
pub struct Benchmark<'a> {
    /// What all cells have in common.
    pub settings: Settings,
    /// What is compared.
    pub policies: Vec<Contender>,
    /// Scenarios.
    pub seeds: Vec<u64>,
    /// How often each.
    pub repetitions: u32,
    /// Whether to measure the simulator's costs too, before each cell and after the last.
    pub calibrate: bool,
    /// The `rtvirtio` that serves.
    pub program: &'a Path,
    /// Where cells go.
    pub out: &'a Path,
}

impl Benchmark<'_> {
    /// Runs what is not in `cells.jsonl` and `rounds.jsonl` yet, and returns all that is there. A cell that
    /// fails its verification is kept as such, and the campaign goes on.
    ///
    /// # Errors
    /// If the settings are refused or differ from those of the cells there, if the server or a client
    /// fails otherwise, or if interrupted.
    pub fn run(&self, interrupted: &Interrupted) -> Result<(Vec<Cell>, Vec<Round>)> {
        let first = self.seeds.first().copied().unwrap_or_default();
        let expected = duration(&self.settings.scenario(first)?);
        machine::cpus()?;
        let mut cells = Lines::<Cell>::open(&self.out.join("cells.jsonl"))?;
        if cells.iter().any(|cell| cell.settings != self.settings) {
            let out = self.out.display();
            bail!(
                "{out} has cells of other settings, such as another --seconds: name another --out"
            );
        }
        let is_missing = |key: &CellKey| cells.iter().all(|cell| cell.key != *key);
        let missing: Vec<CellKey> = self.keys().into_iter().filter(is_missing).collect();
        let mut rounds = Lines::<Round>::open(&self.out.join("rounds.jsonl"))?;
        let mut left = match self.calibrate {
            true if rounds.is_empty() || !missing.is_empty() => missing.len() + 1,
            _ => 0,
        };
        let steps = missing.len() + left;
        let planned = expected * missing.len() as u32 + costs::ROUND * left as u32;
        let mut progress = Progress::new(steps, planned);
        let mut round = |progress: &mut Progress| -> Result<()> {
            if left > 0 {
                left -= 1;
                progress.start("costs of the simulator", costs::ROUND);
                rounds.push(Round::measure(self.program, interrupted)?)?;
                progress.finish(costs::ROUND);
            }
            Ok(())
        };
        for key in missing {
            round(&mut progress)?;
            progress.start(&key.label(), expected);
            let cell = self.cell(key, interrupted).with_context(|| key.label())?;
            if let Some(why) = &cell.failed {
                progress.note(&format!("{}: {why}", key.label()));
            }
            cells.push(cell)?;
            progress.finish(expected);
        }
        round(&mut progress)?;
        Ok((cells.into_all(), rounds.into_all()))
    }

    /// Every cell, in the order in which they run: policies take turns to be first.
    fn keys(&self) -> Vec<CellKey> {
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            for (turn, &seed) in self.seeds.iter().enumerate() {
                let mut policies = self.policies.clone();
                policies.rotate_left((repetition as usize + turn) % self.policies.len().max(1));
                let key = |policy| CellKey { policy, seed, repetition };
                keys.extend(policies.into_iter().map(key));
            }
        }
        keys
    }

    fn cell(&self, key: CellKey, interrupted: &Interrupted) -> Result<Cell> {
        let scenario = self.settings.scenario(key.seed)?;
        let trial = Trial {
            program: self.program,
            settings: &self.settings,
            scenario: &scenario,
            policy: key.policy.kind().name(),
            threads: key.policy.threads(),
            vcpus: None,
            lead: LEAD,
        };
        match trial.run(interrupted) {
            Ok(measured) => Ok(self.made(key, Ok(measured))),
            Err(error) => match error.downcast::<Unverified>() {
                Ok(unverified) => Ok(self.made(key, Err(unverified))),
                Err(error) => Err(error),
            },
        }
    }

    fn made(&self, key: CellKey, measured: Result<Measured, Unverified>) -> Cell {
        let canary = Canary { n: 0, p50: Nanos::ZERO, p99: Nanos::ZERO, max: Nanos::ZERO };
        let nothing = Cell {
            key,
            settings: self.settings.clone(),
            failed: None,
            phases: Vec::new(),
            whole: None,
            checked: 0,
            timeline: Timeline::default(),
            canary,
            doubt: None,
            machine: Machine { load1: 0.0, busy_cores: 0.0, steal_cores: 0.0 },
            at: jiff::Timestamp::now().to_string(),
        };
        match measured {
            Err(unverified) => Cell { failed: Some(unverified.to_string()), ..nothing },
            Ok(Measured { phases, whole, timeline, checked, canary, machine, .. }) => Cell {
                phases,
                whole: Some(whole),
                checked,
                timeline,
                doubt: disturbance(CANARY_LIMIT, &canary, None),
                canary,
                machine,
                ..nothing
            },
        }
    }
}

/// Writes `table.txt`, `pareto.svg` and `timelines.svg` beside the cells; the table is returned.
///
/// # Errors
/// If they cannot be written.
pub fn write_report(cells: &[Cell], compared: Option<&[Compared]>, out: &Path) -> Result<String> {
    let text = table::table(cells, compared);
    let write = |name: &str, text: &str| {
        let path = out.join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    };
    write("table.txt", &text)?;
    write("pareto.svg", &plot::pareto(&judge::rows(cells)))?;
    write("timelines.svg", &plot::timelines(cells))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_take_turns_on_each_seed() {
        let benchmark = Benchmark {
            settings: Settings::default(),
            policies: vec![Contender::Static1, Contender::Dynamic],
            seeds: vec![7, 8],
            repetitions: 2,
            calibrate: false,
            program: Path::new("/bin/rtvirtio"),
            out: Path::new("/nowhere"),
        };
        let keys: Vec<_> =
            benchmark.keys().iter().map(|key| (key.seed, key.policy.name())).collect();
        assert_eq!(
            keys,
            [
                (7, "static:1"),
                (7, "dynamic"),
                (8, "dynamic"),
                (8, "static:1"),
                (7, "dynamic"),
                (7, "static:1"),
                (8, "static:1"),
                (8, "dynamic"),
            ]
        );
    }
}
