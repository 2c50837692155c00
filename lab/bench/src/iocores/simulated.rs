//! The same scenarios on the same machine in the simulator, and how well it agrees.

use std::collections::BTreeMap;

use anyhow::Result;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_cli::progress::Progress;
use rtvirtio_engine::SsdConfig;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError};
use rtvirtio_iocores::{Kind, Limits, Policy, policy};
use rtvirtio_sim::calibration::CPUS;
use rtvirtio_sim::scenario::PhaseKind;
use rtvirtio_sim::{Backend, Costs, Machine, Outcome as Simulated, PhaseOutcome, Simulation};
use rtvirtio_testbed::scenario::Disk;
use rtvirtio_units::{CpuId, Nanos};
use serde::Serialize;

use super::cell::{Cell, CellKey, Phase, PolicyConfig, Settings};
use super::judge::{kinds, name};
use crate::stats::median;
use crate::table::Table;
use crate::verdict::Verdict;

/// What throughput and cores may differ by, of the real ones.
const MARGIN: f64 = 0.15;
/// Or so many times what two real runs differ by.
const TIMES: f64 = 1.5;
/// How often what a policy and a seed ran is simulated; the median of each figure counts: near a threshold of a
/// policy one run is chance.
const RUNS: u64 = 5;
/// How far, at most, a run's costs are from those that were found; the first run's are those.
const SPREAD: f64 = 0.05;
/// Simulated between two looks at whether to stop.
const STEP: Nanos = Nanos::from_millis(500);

/// A figure, really and simulated: medians.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Pair {
    /// Of real runs.
    pub real: f64,
    /// Of simulated ones.
    pub simulated: f64,
    /// What they may differ by, of the real one.
    pub allowed: f64,
}

impl Pair {
    /// What they differ by, of the real one.
    pub(super) fn differs(&self) -> f64 {
        difference(self.real, self.simulated)
    }

    /// Whether that is little enough.
    pub(crate) fn agrees(&self) -> bool {
        self.differs() <= self.allowed
    }
}

/// Of the first.
fn difference(first: f64, second: f64) -> f64 {
    if first == second { 0.0 } else { (second - first).abs() / first.abs() }
}

/// A policy in a phase, really and simulated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Compared {
    /// The phase; none: all.
    pub kind: Option<PhaseKind>,
    /// The policy.
    pub policy: PolicyConfig,
    /// Seeds.
    pub seeds: usize,
    /// Requests a second.
    pub iops: Pair,
    /// I/O cores.
    pub cores: Pair,
}

/// The costs of a run: each is larger or smaller, by a factor of its own.
fn varied(of: Costs, seed: u64, run: u64) -> Costs {
    if run == 0 {
        return of;
    }
    let mut rng = Pcg64Mcg::seed_from_u64(seed.wrapping_mul(RUNS).wrapping_add(run));
    of.scaled(|| rng.random_range(1.0 - SPREAD..=1.0 + SPREAD))
}

/// The same machine for the simulator.
fn machine(policy_config: PolicyConfig, disk: &Disk, vms: u16, costs: Costs) -> Result<Machine> {
    let mut machine = Machine::new(CPUS, policy_config.threads());
    machine.vcpus = (0..u32::from(CPUS)).map(CpuId::new).collect();
    machine.costs = costs;
    if let Disk::Ssd(name) = disk {
        let config = name.parse::<SsdConfig>()?;
        machine.backend = Backend::Ssd { config, devices: vms, schedule: false };
    }
    Ok(machine)
}

/// The same policy for the simulator.
fn borrowing(kind: Kind, machine: &Machine) -> Box<dyn Policy + Send> {
    let (min_iothreads, max_iothreads) = (1, CPUS.into());
    policy(kind, Limits { cpus: machine.io_cpus(), min_iothreads, max_iothreads, borrow: true })
}

/// Simulates what a cell ran.
///
/// # Errors
/// If the simulator refuses it; if interrupted.
fn simulate(
    settings: &Settings,
    key: CellKey,
    of: Costs,
    interrupted: &Interrupted,
) -> Result<Simulated> {
    let scenario = settings.scenario(key.seed)?;
    let request = Nanos::from_micros(settings.cpu_us.into());
    let of = of.with_work(request, Nanos::new(settings.kib_ns.into()));
    let machine = machine(key.policy, &settings.disk, settings.vms, of)?;
    let mut policy = borrowing(key.policy.kind(), &machine);
    let mut simulation = Simulation::new(&machine, &scenario, &mut *policy)?;
    while simulation.now() < scenario.length() {
        simulation.run_until(simulation.now().saturating_add(STEP));
        let is_interrupted = interrupted.load(std::sync::atomic::Ordering::Relaxed);
        anyhow::ensure!(!is_interrupted, InterruptedError);
    }
    Ok(simulation.finish())
}

/// Simulates what each policy and seed ran, and compares.
///
/// # Errors
/// If the simulator refuses it; if interrupted.
pub(super) fn compare(
    cells: &[Cell],
    of: Costs,
    interrupted: &Interrupted,
) -> Result<Vec<Compared>> {
    let good: Vec<&Cell> = cells.iter().filter(|cell| cell.is_good()).collect();
    let mut keys: Vec<CellKey> =
        good.iter().map(|cell| CellKey { repetition: 0, ..cell.key }).collect();
    keys.sort_unstable();
    keys.dedup();
    let each = std::time::Duration::from_secs(5);
    let mut progress = Progress::new(keys.len(), each * keys.len() as u32);
    let mut runs = Vec::new();
    for key in keys {
        progress.start(&format!("simulate {}", key.label()), each);
        let settings = good.iter().find(|cell| cell.key.seed == key.seed);
        if let Some(cell) = settings {
            for run in 0..RUNS {
                let costs = varied(of, key.seed, run);
                runs.push((key, simulate(&cell.settings, key, costs, interrupted)?));
            }
        }
        progress.finish(each);
    }
    Ok(compared(cells, &runs))
}

fn compared(cells: &[Cell], runs: &[(CellKey, Simulated)]) -> Vec<Compared> {
    let mut all = Vec::new();
    for kind in kinds(cells) {
        for policy in PolicyConfig::ALL {
            let mut simulated: BTreeMap<u64, Vec<&PhaseOutcome>> = BTreeMap::new();
            for (key, outcome) in runs.iter().filter(|(key, _)| key.policy == policy) {
                if let Some(phase) = part(outcome, kind) {
                    simulated.entry(key.seed).or_default().push(phase);
                }
            }
            let real: Vec<(CellKey, &Phase)> = cells
                .iter()
                .filter(|cell| cell.key.policy == policy)
                .filter_map(|cell| Some((cell.key, cell.phase(kind)?)))
                .collect();
            if real.is_empty() || simulated.is_empty() {
                continue;
            }
            let pair = |of_real: &dyn Fn(&Phase) -> f64, of_sim: fn(&PhaseOutcome) -> f64| Pair {
                real: median(real.iter().map(|(_, phase)| of_real(phase))),
                simulated: median(
                    simulated.values().map(|runs| median(runs.iter().map(|phase| of_sim(phase)))),
                ),
                allowed: MARGIN.max(TIMES * disagreement(&real, of_real)),
            };
            all.push(Compared {
                kind,
                policy,
                seeds: simulated.len(),
                iops: pair(&Phase::iops, |phase| phase.iops),
                cores: pair(&|phase| phase.io_cores, |phase| phase.io_cores),
            });
        }
    }
    all
}

fn part(outcome: &Simulated, kind: Option<PhaseKind>) -> Option<&PhaseOutcome> {
    match kind {
        None => Some(&outcome.whole),
        Some(_) => outcome.phases.iter().find(|phase| phase.kind == kind),
    }
}

/// What two repetitions of one seed differ by, median; 0 if there are none.
fn disagreement(real: &[(CellKey, &Phase)], of: &dyn Fn(&Phase) -> f64) -> f64 {
    let pairs = real.iter().filter(|(key, _)| key.repetition == 0).filter_map(|(key, first)| {
        let second =
            real.iter().find(|(other, _)| (other.seed, other.repetition) == (key.seed, 1))?;
        Some(difference(of(first), of(second.1)))
    });
    let all: Vec<f64> = pairs.collect();
    if all.is_empty() { 0.0 } else { median(all) }
}

/// Whether the simulator agrees everywhere.
pub(super) fn judge(all: &[Compared]) -> Verdict {
    let phases = || all.iter().filter(|of| of.kind.is_some());
    let mut off = Vec::new();
    for of in phases() {
        for (what, pair) in [("IOPS", &of.iops), ("cores", &of.cores)] {
            if !pair.agrees() {
                let by = 100.0 * pair.differs();
                off.push(format!("{} {} {what} {by:.0} %", name(of.kind), of.policy));
            }
        }
    }
    let n = 2 * phases().count();
    let why = format!("within 15 % or 1.5 x two real repetitions: {} of {n}", n - off.len());
    let why = if off.is_empty() { why } else { format!("{why}; not {}", off.join(", ")) };
    Verdict::of("4 simulator agrees", (n > 0).then_some(off.is_empty()), why)
}

/// A row for each phase and policy.
pub(super) fn table(all: &[Compared]) -> String {
    let by = |pair: &Pair| {
        Some(format!("{}{:.0}", if pair.agrees() { "" } else { "!" }, 100.0 * pair.differs()))
    };
    let table = Table::of(all)
        .text("phase", |of| name(of.kind))
        .text("policy", |of| of.policy)
        .figure("seeds", 0, |of| of.seeds)
        .figure("IOPS", 0, |of| of.iops.real)
        .figure("simulated", 0, |of| of.iops.simulated)
        .shown("by %", |of| by(&of.iops))
        .figure("may %", 0, |of| 100.0 * of.iops.allowed)
        .figure("cores", 2, |of| of.cores.real)
        .figure("sim.", 2, |of| of.cores.simulated)
        .shown("by %", |of| by(&of.cores))
        .figure("may %", 0, |of| 100.0 * of.cores.allowed);
    let spread = 100.0 * SPREAD;
    format!(
        "{table}Medians of seeds, each simulated {RUNS} times with costs that differ by up to {spread:.0} %; by: the \
         difference, of the real figure; may: what is allowed.\n"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn pair_agrees_within_what_is_allowed() {
        let pair = |simulated| Pair { real: 1_000.0, simulated, allowed: 0.15 };
        assert!(pair(1_150.0).agrees() && pair(850.0).agrees());
        assert!(!pair(1_151.0).agrees() && !pair(849.0).agrees());
        let nothing = Pair { real: 0.0, simulated: 0.0, allowed: 0.15 };
        assert!(nothing.agrees());
    }

    #[test]
    fn first_run_has_the_costs_that_were_found_and_others_are_near_them() {
        let own = Costs::default();
        assert_eq!(varied(own, 1, 0), own);
        let one = varied(own, 1, 1);
        assert_eq!(varied(own, 1, 1), one);
        assert!(one != own && one != varied(own, 1, 2) && one != varied(own, 2, 1));
        let ratio = one.busy.delay.get() as f64 / own.busy.delay.get() as f64;
        assert!((0.95..=1.05).contains(&ratio) && (ratio - 1.0).abs() > 1e-4, "{ratio}");
    }

    #[test]
    fn simulated_machine_shares_both_cpus_and_adds_costs_to_the_data_planes_own() {
        let own = Costs { request: Nanos::new(200), kib: Nanos::new(30), ..Costs::default() };
        let costs = own.with_work(Nanos::from_micros(20), Nanos::new(40));
        assert_eq!((costs.request.get(), costs.kib.get()), (20_200, 70));
        let two = machine(PolicyConfig::Static2, &Disk::Null, 4, costs).unwrap();
        assert_eq!((two.cpus, two.threads.len(), two.vcpus.len()), (2, 2, 2));
        let own = machine(PolicyConfig::Dynamic, &Disk::Null, 4, costs).unwrap();
        assert_eq!(own.threads, [CpuId::new(1)]);
    }

    #[test]
    fn policy_that_is_not_told_of_vcpus_adds_a_core_on_two_shared_cpus() {
        let phases = vec![PhaseKind::AllHot];
        let settings = Settings { phases, seconds: 2.0, ..Settings::default() };
        let interrupted = AtomicBool::new(false);
        let of = |policy| {
            let key = CellKey { policy, seed: 1, repetition: 0, alone: None };
            simulate(&settings, key, Costs::default(), &interrupted).unwrap().whole
        };
        let (one, own) = (of(PolicyConfig::Static1), of(PolicyConfig::Dynamic));
        assert!((one.io_cores - 1.0).abs() < 1e-9);
        assert!(own.io_cores > 1.5 && own.iops > 1.2 * one.iops, "{own:?}");
    }
}
