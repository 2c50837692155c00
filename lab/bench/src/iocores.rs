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
//! - [`judge`]: medians, utilities, marks. [`mod@table`]: for a terminal, and as plots.
//! - [`load`]: one VM on one IOThread, by which the simulator is calibrated. [`costs`]: how.
//! - [`simulated`]: the same in the simulator, beside.
//! - [`disturb`]: what a monitor that ends, a reader that does not read and hostile requests do to the
//!   data path. `awake`: CPUs that do not halt meanwhile.
//!
//! Where policies have the same IOThreads, p99s of two runs differ by more than the 5 % that are to be told: cells of one
//! phase *alone* repeat it, and its p99 is judged by them and the traces together.
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
pub mod simulated;
pub mod table;
mod trial;
mod vcpus;
mod watch;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_sim::scenario::PhaseKind;
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_units::Nanos;

use crate::cell::CANARY_LIMIT;
use crate::experiment::write_files;
use crate::lines::Lines;
use crate::qos::cell::disturbance;
use cell::{Cell, CellKey, PolicyConfig, Settings, Timeline};
use content::Unverified;
use costs::Round;
use rtvirtio_cli::progress::Progress;
use simulated::Compared;
use trial::{LEAD, Measured, Trial, duration};

/// Phases that are repeated alone, and the fixed number beside which: the one that is worth most there.
const ALONE: [(PhaseKind, PolicyConfig); 2] =
    [(PhaseKind::Idle, PolicyConfig::Static1), (PhaseKind::Flapping, PolicyConfig::Static2)];
/// How often, for each cell of a trace.
const TIMES: u32 = 3;

/// What a campaign measured.
#[derive(Debug, Default)]
pub struct Campaign {
    /// Policies on traces.
    pub cells: Vec<Cell>,
    /// Phases alone whose p99 a trace does not tell.
    pub alone: Vec<Cell>,
    /// Costs.
    pub rounds: Vec<Round>,
}

/// A campaign.
#[derive(Debug)]
pub struct Benchmark<'a> {
    /// What all cells have in common.
    pub settings: Settings,
    /// What is compared.
    pub policies: Vec<PolicyConfig>,
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
    /// If the settings are refused or differ from those of the cells there, if there are cells of other seeds,
    /// if the server or a client fails otherwise, or if interrupted.
    pub fn run(&self, interrupted: &Interrupted) -> Result<Campaign> {
        let first = self.seeds.first().copied().unwrap_or_default();
        let trace = duration(&self.settings.scenario(first)?);
        let alone = duration(&self.settings(Some(PhaseKind::Idle)).scenario(first)?);
        let expected = |key: &CellKey| if key.alone.is_some() { alone } else { trace };
        machine::cpus()?;
        let mut cells = Lines::<Cell>::open(&self.out.join("cells.jsonl"))?;
        let out = self.out.display();
        if cells.iter().any(|cell| cell.settings != self.settings) {
            bail!(
                "{out} has cells of other settings, such as another --seconds: name another --out"
            );
        }
        // They would be in the medians.
        if let Some(other) = cells.iter().find(|cell| !self.seeds.contains(&cell.key.seed)) {
            let seed = other.key.seed;
            bail!("{out} has cells of seed {seed}, which is not asked for: name another --out");
        }
        let is_missing = |key: &CellKey| cells.iter().all(|cell| cell.key != *key);
        let missing: Vec<CellKey> = self.keys().into_iter().filter(is_missing).collect();
        let mut rounds = Lines::<Round>::open(&self.out.join("rounds.jsonl"))?;
        let mut left = match self.calibrate {
            true if rounds.is_empty() || !missing.is_empty() => {
                missing.iter().filter(|key| key.alone.is_none()).count() + 1
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
            if key.alone.is_none() {
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
        let is_alone = |cell: &Cell| cell.key.alone.is_some();
        let (alone, cells) = cells.into_all().into_iter().partition(is_alone);
        Ok(Campaign { cells, alone, rounds: rounds.into_all() })
    }

    /// Every cell, in the order in which they run: policies take turns to be first, and phases alone follow the traces of
    /// their seed.
    fn keys(&self) -> Vec<CellKey> {
        let is_there = |(kind, fixed): &(PhaseKind, PolicyConfig)| {
            let policies = [*fixed, PolicyConfig::Dynamic];
            self.settings.phases.contains(kind)
                && policies.iter().all(|policy| self.policies.contains(policy))
        };
        let alone: Vec<_> = ALONE.into_iter().filter(is_there).collect();
        let mut keys = Vec::new();
        let mut add = |policies: &[PolicyConfig], first: usize, seed, repetition, alone| {
            let mut policies = policies.to_vec();
            let first = first % policies.len().max(1);
            policies.rotate_left(first);
            let key = |policy| CellKey { policy, seed, repetition, alone };
            keys.extend(policies.into_iter().map(key));
        };
        for repetition in 0..self.repetitions {
            for (turn, &seed) in self.seeds.iter().enumerate() {
                add(&self.policies, repetition as usize + turn, seed, repetition, None);
                for time in repetition * TIMES..(repetition + 1) * TIMES {
                    for &(kind, fixed) in &alone {
                        let policies = [fixed, PolicyConfig::Dynamic];
                        add(&policies, time as usize + turn, seed, time, Some(kind));
                    }
                }
            }
        }
        keys
    }

    /// What a cell runs.
    fn settings(&self, alone: Option<PhaseKind>) -> Settings {
        let settings = self.settings.clone();
        match alone {
            None => settings,
            Some(kind) => Settings { phases: vec![kind], ..settings },
        }
    }

    fn cell(&self, key: CellKey, interrupted: &Interrupted) -> Result<Cell> {
        let settings = self.settings(key.alone);
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
        let canary = Canary {
            n: 0,
            p50: Nanos::ZERO,
            p99: Nanos::ZERO,
            p999: Nanos::ZERO,
            max: Nanos::ZERO,
        };
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
    let (pareto, timelines) = (table::pareto(&judge::rows(cells)), table::timelines(cells));
    let files = [("table.txt", &text), ("pareto.svg", &pareto), ("timelines.svg", &timelines)];
    write_files(out, &files.map(|(name, text)| (name, text.as_str())))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_take_turns_on_each_seed() {
        let benchmark = Benchmark {
            settings: Settings { phases: vec![PhaseKind::AllHot], ..Settings::default() },
            policies: vec![PolicyConfig::Static1, PolicyConfig::Dynamic],
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
    fn phases_alone_are_of_the_policies_that_are_compared_and_each_cell_has_a_name_of_its_own() {
        let benchmark = Benchmark {
            settings: Settings::default(),
            policies: PolicyConfig::ALL.to_vec(),
            seeds: vec![7],
            repetitions: 2,
            calibrate: false,
            program: Path::new("/bin/rtvirtio"),
            out: Path::new("/nowhere"),
        };
        let keys = benchmark.keys();
        let of = |kind, policy| {
            keys.iter().filter(|key| (key.alone, key.policy) == (kind, policy)).count()
        };
        for policy in PolicyConfig::ALL {
            let is = |with| usize::from(policy == PolicyConfig::Dynamic || policy == with) * 6;
            assert_eq!(of(None, policy), 2);
            assert_eq!(of(Some(PhaseKind::Idle), policy), is(PolicyConfig::Static1));
            assert_eq!(of(Some(PhaseKind::Flapping), policy), is(PolicyConfig::Static2));
        }
        let mut distinct = keys.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(benchmark.settings(Some(PhaseKind::Idle)).phases, [PhaseKind::Idle]);
    }
}
