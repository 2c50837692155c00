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

use anyhow::{Result, bail, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_sim::scenario::PhaseKind;
use rtvirtio_spec::run::Machine;
use rtvirtio_units::Nanos;
use serde_json::json;

use crate::cell::{CANARY_LIMIT, canary_of};
use crate::experiment::{Experiment, Report};
use crate::lines::Lines;
use crate::qos::cell::disturbance;
use cell::{Cell, CellKey, PolicyConfig, Settings, Timeline};
use content::Unverified;
use costs::Round;
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

impl Experiment for Benchmark<'_> {
    type Key = CellKey;
    type Cell = Cell;
    /// Costs, if they are measured between the cells.
    type Setup = Option<Lines<Round>>;

    /// Policies take turns to be first, and phases alone follow the traces of their seed.
    fn keys(&self) -> Result<Vec<CellKey>> {
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
        Ok(keys)
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        key.label()
    }

    fn expected(&self, key: &CellKey) -> Duration {
        let scenario = self.settings(key.alone).scenario(key.seed);
        let round =
            if self.calibrate && key.alone.is_none() { costs::ROUND } else { Duration::ZERO };
        scenario.map_or(Duration::ZERO, |scenario| duration(&scenario)) + round
    }

    fn check(&self, cells: &[Cell], out: &Path) -> Result<()> {
        let out = out.display();
        ensure!(
            cells.iter().all(|cell| cell.settings == self.settings),
            "{out} has cells of other settings, such as another --seconds: name another --out"
        );
        // They would be in the medians.
        if let Some(other) = cells.iter().find(|cell| !self.seeds.contains(&cell.key.seed)) {
            let seed = other.key.seed;
            bail!("{out} has cells of seed {seed}, which is not asked for: name another --out");
        }
        Ok(())
    }

    fn set_up(&self, _: &[CellKey], _: &Interrupted) -> Result<Option<Lines<Round>>> {
        self.calibrate.then(|| self.rounds()).transpose()
    }

    /// A cell that fails its verification is kept as such, and the campaign goes on.
    fn measure(
        &self,
        rounds: &mut Option<Lines<Round>>,
        key: &CellKey,
        interrupted: &Interrupted,
    ) -> Result<Cell> {
        if let (Some(rounds), None) = (rounds, key.alone) {
            rounds.push(Round::measure(self.program, interrupted)?)?;
        }
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
            Ok(measured) => Ok(self.made(*key, Ok(measured))),
            Err(error) => error.downcast::<Unverified>().map(|error| {
                eprintln!("{}: {error}", key.label());
                self.made(*key, Err(error))
            }),
        }
    }
}

impl Benchmark<'_> {
    /// Runs what is not in `cells.jsonl` and `rounds.jsonl` yet, and returns all that is there.
    ///
    /// # Errors
    /// If the settings are refused or differ from those of the cells there, if there are cells of other seeds,
    /// if the server or a client fails, or if interrupted.
    pub fn campaign(&self, interrupted: &Interrupted) -> Result<Campaign> {
        // What is refused leaves no file.
        machine::cpus()?;
        self.settings.scenario(self.seeds.first().copied().unwrap_or_default())?;
        let before = self.rounds()?.len();
        let cells = self.run(self.out, interrupted)?;
        let mut rounds = self.rounds()?;
        if self.calibrate && (rounds.is_empty() || rounds.len() > before) {
            rounds.push(Round::measure(self.program, interrupted)?)?;
        }
        let is_alone = |cell: &Cell| cell.key.alone.is_some();
        let (alone, cells) = cells.into_iter().partition(is_alone);
        Ok(Campaign { cells, alone, rounds: rounds.into_all() })
    }

    fn rounds(&self) -> Result<Lines<Round>> {
        Lines::open(&self.out.join("rounds.jsonl"))
    }

    /// What a cell runs.
    fn settings(&self, alone: Option<PhaseKind>) -> Settings {
        let settings = self.settings.clone();
        match alone {
            None => settings,
            Some(kind) => Settings { phases: vec![kind], ..settings },
        }
    }

    fn made(&self, key: CellKey, measured: Result<Measured, Unverified>) -> Cell {
        let nothing = Cell {
            key,
            settings: self.settings.clone(),
            failed: None,
            phases: Vec::new(),
            whole: None,
            checked: 0,
            timeline: Timeline::default(),
            canary: canary_of(Nanos::ZERO),
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

/// A table of a campaign, and its plots.
#[must_use]
pub fn report(campaign: &Campaign, compared: Option<&[Compared]>) -> Report {
    let Campaign { cells, alone, .. } = campaign;
    let rows = judge::rows(cells);
    let mut verdicts = judge::judge(campaign);
    verdicts.extend(compared.map(simulated::judge));
    let json = json!({
        "rows": rows,
        "alone": judge::rows(alone),
        "verdicts": verdicts,
        "simulated": compared,
    });
    Report::of(table::table(campaign, compared), json)
        .with("pareto.svg", table::pareto(&rows))
        .with("timelines.svg", table::timelines(cells))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn benchmark(
        phases: Vec<PhaseKind>,
        policies: Vec<PolicyConfig>,
        seeds: Vec<u64>,
    ) -> Benchmark<'static> {
        let settings = Settings { phases, ..Settings::default() };
        let (program, out) = (Path::new("/bin/rtvirtio"), Path::new("/nowhere"));
        Benchmark { settings, policies, seeds, repetitions: 2, calibrate: false, program, out }
    }

    #[test]
    fn policies_take_turns_on_each_seed() {
        let policies = vec![PolicyConfig::Static1, PolicyConfig::Dynamic];
        let benchmark = benchmark(vec![PhaseKind::AllHot], policies, vec![7, 8]);
        let keys: Vec<_> =
            benchmark.keys().unwrap().iter().map(|key| (key.seed, key.policy.name())).collect();
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
        let benchmark = benchmark(PhaseKind::DISKS.to_vec(), PolicyConfig::ALL.to_vec(), vec![7]);
        let keys = benchmark.keys().unwrap();
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
