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
//! In a trace `idle` has too few requests to tell a p99 within 5 %: *quiet* cells have it alone, longer and more often, and
//! its p99 is judged by them.
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
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_sim::scenario::PhaseKind;
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

/// The phase that quiet cells have alone.
pub(crate) const QUIET: PhaseKind = PhaseKind::Idle;
/// Quiet cells of a policy for each of its cells.
const QUIET_CELLS: u32 = 4;
/// Their length, in phases of the campaign.
const QUIET_PHASES: f64 = 1.5;

/// What a campaign measured.
#[derive(Debug, Default)]
pub struct Campaign {
    /// Policies on traces.
    pub cells: Vec<Cell>,
    /// On the phase alone whose p99 a trace does not tell.
    pub quiet: Vec<Cell>,
    /// Costs.
    pub rounds: Vec<Round>,
}

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
    pub fn run(&self, interrupted: &Interrupted) -> Result<Campaign> {
        let first = self.seeds.first().copied().unwrap_or_default();
        let length =
            |is_quiet| Ok::<_, anyhow::Error>(duration(&self.settings(is_quiet).scenario(first)?));
        let lengths = [length(false)?, length(true)?];
        let expected = |key: &CellKey| lengths[usize::from(key.is_quiet)];
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
            true if rounds.is_empty() || !missing.is_empty() => {
                missing.iter().filter(|key| !key.is_quiet).count() + 1
            }
            _ => 0,
        };
        let steps = missing.len() + left;
        let planned = missing.iter().map(expected).sum::<Duration>() + costs::ROUND * left as u32;
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
            if !key.is_quiet {
                round(&mut progress)?;
            }
            let expected = expected(&key);
            progress.start(&key.label(), expected);
            let cell = self.cell(key, interrupted).with_context(|| key.label())?;
            if let Some(why) = &cell.failed {
                progress.note(&format!("{}: {why}", key.label()));
            }
            cells.push(cell)?;
            progress.finish(expected);
        }
        round(&mut progress)?;
        let (quiet, cells) = cells.into_all().into_iter().partition(|cell| cell.key.is_quiet);
        Ok(Campaign { cells, quiet, rounds: rounds.into_all() })
    }

    /// Every cell, in the order in which they run: policies take turns to be first, and quiet cells follow the others of
    /// their seed.
    fn keys(&self) -> Vec<CellKey> {
        let quiet = self.quiet_policies();
        let mut keys = Vec::new();
        for repetition in 0..self.repetitions {
            for (turn, &seed) in self.seeds.iter().enumerate() {
                let mut add = |policies: &[Contender], turn: usize, repetition, is_quiet| {
                    let mut policies = policies.to_vec();
                    let first = turn % policies.len().max(1);
                    policies.rotate_left(first);
                    let key = |policy| CellKey { policy, seed, repetition, is_quiet };
                    keys.extend(policies.into_iter().map(key));
                };
                add(&self.policies, repetition as usize + turn, repetition, false);
                for next in 0..QUIET_CELLS {
                    add(&quiet, next as usize + turn, repetition * QUIET_CELLS + next, true);
                }
            }
        }
        keys
    }

    /// Policies that have quiet cells: those whose p99s are held against each other. One IOThread is enough for the phase,
    /// so two are worth less.
    fn quiet_policies(&self) -> Vec<Contender> {
        let is_judged =
            |policy: &Contender| matches!(policy, Contender::Dynamic | Contender::Static1);
        match self.settings.phases.contains(&QUIET) {
            true => self.policies.iter().copied().filter(is_judged).collect(),
            false => Vec::new(),
        }
    }

    /// What a cell runs.
    fn settings(&self, is_quiet: bool) -> Settings {
        let settings = self.settings.clone();
        match is_quiet {
            false => settings,
            true => {
                let seconds = settings.seconds * QUIET_PHASES;
                Settings { phases: vec![QUIET], seconds, ..settings }
            }
        }
    }

    fn cell(&self, key: CellKey, interrupted: &Interrupted) -> Result<Cell> {
        let settings = self.settings(key.is_quiet);
        let scenario = settings.scenario(key.seed)?;
        let trial = Trial {
            program: self.program,
            settings: &settings,
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
pub fn write_report(
    campaign: &Campaign,
    compared: Option<&[Compared]>,
    out: &Path,
) -> Result<String> {
    let text = table::table(campaign, compared);
    let cells = &campaign.cells;
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
            settings: Settings { phases: vec![PhaseKind::AllHot], ..Settings::default() },
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

    #[test]
    fn quiet_cells_are_of_the_policies_that_are_compared_and_each_has_a_name_of_its_own() {
        let benchmark = Benchmark {
            settings: Settings::default(),
            policies: Contender::ALL.to_vec(),
            seeds: vec![7],
            repetitions: 2,
            calibrate: false,
            program: Path::new("/bin/rtvirtio"),
            out: Path::new("/nowhere"),
        };
        let keys = benchmark.keys();
        let quiet: Vec<&CellKey> = keys.iter().filter(|key| key.is_quiet).collect();
        // Two policies, four cells each, for two repetitions of five policies.
        assert_eq!((keys.len(), quiet.len()), (2 * 5 + 16, 16));
        assert!(quiet.iter().all(|key| key.policy != Contender::Iocm));
        let mut distinct = keys.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), keys.len());
        let settings = benchmark.settings(true);
        assert_eq!((settings.phases, settings.seconds), (vec![QUIET], 30.0));
    }
}
