//! The data plane's policies of I/O cores on trial: scenarios of the simulator, played for real.
//!
//! A *trial* is one `rtvirtio serve` with a disk a VM, whose requests cost CPU, under one policy; VMs are
//! libblkio clients of this process with a thread for each queue, and threads that compute. All share two
//! CPUs: vCPUs (clients and what computes) may run on both, and every policy may borrow either from them (the data plane's
//! `vcpus`), so what its IOThreads cost the vCPUs counts in the utility. A seed gives the order of phases, the bursts and the
//! times of requests; policies take turns on each seed. Every read is compared with what was written.
//!
//! - `cell`: what a cell holds, and what a campaign is made of.
//! - `trial`: one server with its VMs for one scenario ([`rtvirtio_testbed::scenario`]), as figures of each phase.
//! - `judge`: medians, utilities, marks. `table`: for a terminal, and as plots.
//! - [`costs`]: how the simulator is calibrated.
//! - `simulated`: the same in the simulator, beside.
//! - [`disturb`]: what a monitor that ends, a reader that does not read and hostile requests do to the
//!   data path.
//!
//! Where policies have the same IOThreads, p99s of two runs differ by more than the 5 % that are to be told: cells of one
//! phase *alone* repeat it, and its p99 is judged by them and the traces together.
//!
//! What differs from the simulator: a disk takes some ms to connect; a queue has 64 requests in flight at
//! most; seven of ten requests read, and clients make and compare content; a queue's streams are drained
//! one before the next.

mod cell;
pub mod costs;
pub mod disturb;
mod judge;
mod simulated;
mod table;
mod trial;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_sim::scenario::PhaseKind;
use rtvirtio_spec::run::Machine;
use rtvirtio_testbed::scenario::{Unverified, cpus};
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_units::Nanos;
use serde_json::json;

use crate::cell::{CANARY_LIMIT, canary_of};
use crate::experiment::{self, Experiment, Report, Run};
use crate::lines::Lines;
use crate::qos::cell::disturbance;
use cell::{Cell, CellKey, PolicyConfig, SEEDS, Settings, Timeline};
use costs::Round;
use trial::{Measured, duration, trial};

/// Phases that are repeated alone, and the fixed number beside which: the one that is worth most there.
const ALONE: [(PhaseKind, PolicyConfig); 2] =
    [(PhaseKind::Idle, PolicyConfig::Static1), (PhaseKind::Flapping, PolicyConfig::Static2)];
/// How often, for each cell of a trace.
const TIMES: u32 = 3;

/// Cells of a campaign.
#[derive(Debug, Default)]
pub struct Campaign {
    /// Policies on traces.
    pub cells: Vec<Cell>,
    /// Phases alone whose p99 a trace does not tell.
    pub alone: Vec<Cell>,
}

/// Arguments of `bench iocores`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A cell is one policy on one seed's scenario: a fresh `rtvirtio serve` on two CPUs with a disk a VM whose \
requests cost CPU, VMs as libblkio clients with a thread for each queue, and threads that compute. The seed \
gives the order of phases, bursts and times of requests. Policies take turns on each seed. Every read is \
compared with what was written; a request that is lost, repeated or misplaced fails its cell.

Policies:
  static:1, static:2  that many IOThreads, queues spread over them
  dynamic             rtvirtio's own: number and placement follow the load
  iocm, spdk          as published by IOcm and SPDK
vCPUs (clients and what computes) may run on both CPUs, and all policies may borrow either from them.

Phases (`rtvirtio-lab simulate --help` says what each is):
  idle, one-hot, all-hot, small-large, compute, mixed, bursts, hotplug, flapping

The table has medians over seeds. utility: I/O and compute as parts of the best run's on that seed, less 0.2 \
an I/O core. Below it a line for each mark: pass, LOST or not judged.

Where policies have the same IOThreads, p99s of two runs differ by more than the 5 % that are to be told. So idle (dynamic \
and static:1) and flapping (dynamic and static:2) are run three times more for each seed, alone, and their p99 \
is judged over all.

Results go to OUT: cells.jsonl (a cell a line, with its timeline each 100 ms), table.txt, pareto.svg, \
timelines.svg, commands.txt; of --compare-simulator rounds.jsonl, costs.json and costs.txt; of --disturb \
disturb.jsonl and disturb.txt. The same OUT continues where it was. The time is policies x seeds x repetitions x \
(phases x --seconds + 4 s), and 15 min for phases alone: an hour by default, 70 min with --compare-simulator. Wants a \
machine on which nothing else runs.

Examples:
  rtvirtio-lab bench iocores
  rtvirtio-lab bench iocores --seconds 3 --seeds 1 --policies static:1,dynamic --phases all-hot,idle
  rtvirtio-lab bench iocores --compare-simulator
  rtvirtio-lab bench iocores --disturb --seconds 10 --repetitions 5")]
pub struct Benchmark {
    /// Policies to compare
    #[arg(long, value_delimiter = ',', default_values_t = PolicyConfig::ALL)]
    policies: Vec<PolicyConfig>,
    #[command(flatten)]
    settings: Settings,
    /// How many seeds, 1 to 3
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    seeds: u8,
    /// Other seeds than the fixed ones: this and the next, such as to judge what was made by the fixed ones
    #[arg(long, value_name = "SEED")]
    first_seed: Option<u64>,
    /// Repetitions of each policy and seed; with --disturb, of each disturbance [default: 1, or 5]
    #[arg(long, default_value = "1", default_value_if("disturb", "true", "5"), hide_default_value = true,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Simulate what was run, and hold both against each other. What things cost the simulator is measured
    /// before each cell and after the last, in half a minute
    #[arg(long)]
    compare_simulator: bool,
    /// Simulate with these costs instead, JSON: those that it does not name keep their defaults
    #[arg(long, value_name = "FILE", requires = "compare_simulator")]
    costs: Option<PathBuf>,
    /// Instead of policies: p99 of the data path while the monitor is ended again and again, clients do
    /// not read their events, or 10,000 malformed control requests come
    #[arg(long, conflicts_with_all = ["policies", "phases", "seeds", "first_seed", "disk", "compare_simulator"])]
    disturb: bool,
}

impl Experiment for Benchmark {
    type Key = CellKey;
    type Cell = Cell;
    /// Costs, if they are measured between the cells.
    type Setup = Option<Lines<Round>>;

    const OUT: &'static str = "rtvirtio-bench-iocores";

    /// Policies take turns to be first, and phases alone follow the traces of their seed.
    fn keys(&self) -> Result<Vec<CellKey>> {
        let mut policies = self.policies.clone();
        policies.sort_unstable();
        policies.dedup();
        let is_there = |(kind, fixed): &(PhaseKind, PolicyConfig)| {
            self.settings.phases.contains(kind)
                && [*fixed, PolicyConfig::Dynamic].iter().all(|policy| policies.contains(policy))
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
            for (turn, seed) in self.seeds().into_iter().enumerate() {
                add(&policies, repetition as usize + turn, seed, repetition, None);
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
            if self.calibrates() && key.alone.is_none() { costs::ROUND } else { Duration::ZERO };
        scenario.map_or(Duration::ZERO, |scenario| duration(&scenario)) + round
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        match (cell.settings == self.settings, self.seeds().contains(&cell.key.seed)) {
            (true, true) => None,
            // They would be in the medians.
            (true, false) => Some("seeds that are not asked for"),
            (false, _) => Some("other settings, such as another --seconds"),
        }
    }

    fn set_up(&self, _: &[CellKey], run: &Run<'_>) -> Result<Self::Setup> {
        self.calibrates().then(|| rounds(run.out)).transpose()
    }

    /// A cell that fails its verification is kept as such, and the campaign goes on.
    fn measure(&self, rounds: &mut Self::Setup, key: &CellKey, run: &Run<'_>) -> Result<Cell> {
        let program = rtvirtio()?;
        if let (Some(rounds), None) = (rounds, key.alone) {
            rounds.push(Round::measure(&program, run.interrupted)?)?;
        }
        let settings = self.settings(key.alone);
        let scenario = settings.scenario(key.seed)?;
        let (policy, threads) = (key.policy.kind().name(), key.policy.threads());
        let trial = trial(&program, &settings, &scenario, (policy, threads));
        match Measured::of(&trial, run.interrupted, |_, _| Ok(())) {
            Ok(measured) => Ok(self.made(*key, Ok(measured))),
            Err(error) => error.downcast::<Unverified>().map(|error| {
                eprintln!("{}: {error}", key.label());
                self.made(*key, Err(error))
            }),
        }
    }

    /// A table of a campaign, and its plots.
    fn report(&self, cells: &[Cell], run: &Run<'_>) -> Result<Report> {
        let is_good = cells.iter().all(Cell::is_good);
        let (alone, cells) = cells.iter().cloned().partition(|cell| cell.key.alone.is_some());
        let campaign = Campaign { cells, alone };
        let mut found = None;
        let costs = match (self.compare_simulator, &self.costs) {
            (false, _) => None,
            (true, Some(path)) => Some(costs::read(path)?),
            (true, None) => Some(found.insert(costs::find(&rounds(run.out)?)?).0),
        };
        let compare = |costs| simulated::compare(&campaign.cells, costs, run.interrupted);
        let compared = costs.map(compare).transpose()?;
        let rows = judge::rows(&campaign.cells);
        let mut verdicts = judge::judge(&campaign);
        verdicts.extend(compared.as_deref().map(simulated::judge));
        let json = json!({
            "rows": table::medians(&rows).json(),
            "alone": table::medians(&judge::rows(&campaign.alone)).json(),
            "verdicts": verdicts,
            "simulated": compared,
        });
        let mut report = Report::of(table::table(&campaign, compared.as_deref(), &verdicts), json)
            .with("pareto.svg", table::pareto(&rows))
            .with("timelines.svg", table::timelines(&campaign.cells));
        if let Some((costs, text)) = found {
            let costs = serde_json::to_string_pretty(&costs)? + "\n";
            report = report.with("costs.json", costs).with("costs.txt", text);
        }
        let failure = "requests were lost, repeated or misplaced (see table.txt)";
        report.failure = (!is_good).then(|| failure.to_owned());
        Ok(report)
    }

    fn run(&self, run: &Run<'_>) -> Result<Vec<Cell>> {
        // What is refused leaves no file.
        cpus()?;
        self.settings.scenario(1)?;
        let before = rounds(run.out)?.len();
        let cells = experiment::complete(self, run)?;
        let mut rounds = rounds(run.out)?;
        if self.calibrates() && (rounds.is_empty() || rounds.len() > before) {
            rounds.push(Round::measure(&rtvirtio()?, run.interrupted)?)?;
        }
        Ok(cells)
    }
}

/// What was measured of costs between the cells of a directory.
fn rounds(out: &Path) -> Result<Lines<Round>> {
    Lines::open(&out.join("rounds.jsonl"))
}

impl Benchmark {
    /// What `--disturb` asks for instead.
    ///
    /// # Errors
    /// A number of seconds that is none.
    pub fn disturbed(&self) -> Result<Option<disturb::Benchmark>> {
        let seconds = self.settings.seconds;
        let is_whole = (2.0..=3_600.0).contains(&seconds) && seconds.fract() == 0.0;
        ensure!(
            is_whole || !self.disturb,
            "--seconds is {seconds}, with --disturb a whole number of 2 to 3600"
        );
        Ok(self.disturb.then_some(disturb::Benchmark {
            repetitions: self.repetitions,
            seconds: seconds as u32,
            cpu_us: self.settings.cpu_us,
        }))
    }

    fn seeds(&self) -> Vec<u64> {
        match self.first_seed {
            Some(first) => (0..self.seeds.into()).map(|next| first.wrapping_add(next)).collect(),
            None => SEEDS[..usize::from(self.seeds)].to_vec(),
        }
    }

    /// Whether to measure the simulator's costs too, before each cell and after the last.
    const fn calibrates(&self) -> bool {
        self.compare_simulator && self.costs.is_none()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::of;

    #[test]
    fn policies_take_turns_on_each_seed() {
        let arguments =
            "--policies dynamic,static:1 --phases all-hot --first-seed 7 --seeds 2 --repetitions 2";
        let benchmark: Benchmark = of(&arguments.split(' ').collect::<Vec<_>>());
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
        let benchmark: Benchmark = of(&["--first-seed=7", "--seeds=1", "--repetitions=2"]);
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

    #[test]
    fn defaults_are_those_of_the_settings_and_others_with_disturb() {
        let benchmark: Benchmark = of(&[]);
        assert_eq!(benchmark.settings, Settings::default());
        assert!(benchmark.repetitions == 1 && benchmark.disturbed().unwrap().is_none());
        let disturbed = of::<Benchmark>(&["--disturb"]).disturbed().unwrap().unwrap();
        assert_eq!((disturbed.repetitions, disturbed.seconds, disturbed.cpu_us), (5, 10, 20));
        assert!(of::<Benchmark>(&["--disturb", "--seconds=2.5"]).disturbed().is_err());
    }
}
