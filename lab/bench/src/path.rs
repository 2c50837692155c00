//! The simulated path beside the real one: conditions of cells that were measured, simulated.
//!
//! A cell's condition is its case, neighbour, settings and device; its repetitions are cells with the
//! same ones. Each is simulated `SEEDS` times for the cell's window, and the median of each
//! quantity is held against the measured one, at the percentile that was judged.
//!
//! *Agrees*: within 25 %, 1 ms, or 1.5 times the disagreement of two repetitions (that of the
//! condition's own, if it has them), whichever is largest; fixed before the first comparison.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use rtvirtio_cases::{Case, Neighbour, Scale, Tier};
use rtvirtio_sim::path::{Condition, Length, Outcome, Priority, Service, Task, Vm, run};
use rtvirtio_spec::run::{Cell, TaskResult};
use rtvirtio_spec::settings::{Scheduler, VmSettings};
use rtvirtio_spec::specification::{Device, Specification};
use rtvirtio_units::{DeviceName, Nanos, Percentile};
use serde::Serialize;

use crate::campaign::CONDITION;
use crate::stats::{median, range};
use crate::table::Table;

/// Simulations of a condition.
pub(crate) const SEEDS: u64 = 5;
/// Cgroups around the VMs': [`rtvirtio_calibrate::testbed::CGROUP_ROOT`] has two.
const NESTING: u8 = 2;
/// fio's settling time before the window, as [`rtvirtio_calibrate::load`] has it.
const WARM_UP: Nanos = Nanos::from_millis(1_000);
/// Tails agree within this part of the measured one, or this time.
const WITHIN: f64 = 0.25;
const OR_WITHIN_S: f64 = 1e-3;
/// Or so many times the disagreement of two repetitions.
const DISAGREEMENTS: f64 = 1.5;
/// Rates agree within this part.
const RATE_WITHIN: f64 = 0.05;

/// What a request takes beside schedulers and device ([`Condition::transport`], [`Condition::software`]).
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// Between the scheduler and the device and back.
    pub transport: Nanos,
    /// Beside that, mean.
    pub software: Nanos,
}

/// One task of one cell.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The cell's case.
    pub case: String,
    /// Its neighbour.
    pub neighbour: String,
    /// Its scheme and repetition.
    pub cell: String,
    /// The scheduler, and whether it idles.
    pub scheduler: String,
    /// VMs with targets.
    pub vms: u8,
    /// `vm/task`.
    pub task: String,
    /// The judged percentile.
    pub percentile: f64,
    /// Measured, ms.
    pub measured_ms: f64,
    /// Simulated, ms.
    pub simulated_ms: f64,
    /// Largest disagreement of two repetitions of the condition, ms; none with one alone.
    pub repetitions_ms: Option<f64>,
    /// Requests per second, measured.
    pub measured_iops: f64,
    /// Simulated.
    pub simulated_iops: f64,
    /// Whether the tails agree.
    pub agrees: bool,
    /// Whether the rates do.
    pub rate_agrees: bool,
}

/// The condition of a cell.
///
/// # Errors
/// If the cell's names are none that this version knows.
pub fn condition(cell: &Cell, costs: Costs, seed: u64) -> Result<Condition> {
    let (_, settings) = cell.settings.0.iter().next().context("a cell without a device")?;
    let device = cell.device.parse().with_context(|| format!("device {}", cell.device))?;
    let specification = specification(cell)?;
    let vms = specification.vms.iter().map(|vm| {
        let VmSettings { weight, limits } = settings.vms.get(&vm.name).copied().unwrap_or_default();
        let priority = cell.ioprio.get(&vm.name).map(|text| priority(text)).transpose()?;
        let tasks = vm.tasks.iter().map(|task| Task {
            iops: task.load.iops.map(rtvirtio_units::Iops::get),
            block_size: task.load.block_size,
            read_fraction: task.load.read_fraction,
            queue_depth: task.load.queue_depth,
            deadline: None,
        });
        Ok(Vm { weight, limits, priority, guest: None, tasks: tasks.collect() })
    });
    Ok(Condition {
        device,
        service: Service::Kernel { scheduler: settings.scheduler },
        nesting: NESTING,
        // Its campaign has bfq alone: one that goes on from cell to cell.
        seasoned: cell.key.scheme.starts_with(CONDITION),
        transport: costs.transport,
        software: costs.software,
        vms: vms.collect::<Result<_>>()?,
        warm_up: WARM_UP,
        length: Length::fixed(Nanos::from_secs_f64(cell.window_s)),
        seed,
    })
}

/// iocost is not.
fn is_simulated(cell: &Cell) -> bool {
    let schedulers = || cell.settings.0.values().map(|settings| settings.scheduler);
    !schedulers().any(|scheduler| matches!(scheduler, Scheduler::IoCost(_)))
}

fn specification(cell: &Cell) -> Result<Specification> {
    ensure!(!cell.device.contains('*'), "cells of slowed devices were measured in guests");
    let (case, tier): (Case, Tier) = (cell.key.case.parse()?, cell.key.tier.parse()?);
    let neighbour: Neighbour = cell.key.neighbour.parse()?;
    let device = Device {
        name: DeviceName::new("scratch")?,
        path: "/dev/null".into(),
        profile: "profile.json".into(),
    };
    let window = Nanos::from_secs_f64(cell.window_s);
    let root = std::path::Path::new("bench");
    Ok(rtvirtio_cases::specification(case, tier, neighbour, window, device, root, Scale::ONE))
}

fn priority(text: &str) -> Result<Priority> {
    let level = |level: &str| Ok::<u8, anyhow::Error>(level.parse()?);
    match text.split_once('/') {
        Some(("rt", l)) => Ok(Priority::RealTime(level(l)?)),
        Some(("be", l)) => Ok(Priority::BestEffort(level(l)?)),
        _ => anyhow::bail!("I/O priority {text:?}"),
    }
}

/// Rows of all tasks of `cells` that count and have a judged percentile. `progress` is told of each
/// cell before it is simulated.
///
/// # Errors
/// As [`condition`].
pub fn compare(cells: &[Cell], costs: Costs, mut progress: impl FnMut(&str)) -> Result<Vec<Row>> {
    let counted: Vec<&Cell> =
        cells.iter().filter(|c| c.disturbed.is_none() && is_simulated(c)).collect();
    let mut repetitions: BTreeMap<String, Vec<&Cell>> = BTreeMap::new();
    for cell in &counted {
        repetitions.entry(identity(cell)?).or_default().push(cell);
    }
    let mut rows = Vec::new();
    for cell in counted {
        progress(&format!("{} {} {}", cell.key.case, cell.key.scheme, cell.key.repetition));
        let simulated = (1..=SEEDS)
            .map(|seed| Ok(run(&condition(cell, costs, seed)?)?))
            .collect::<Result<Vec<Outcome>>>()?;
        let specification = specification(cell)?;
        let other = |task: &TaskResult, percentile| {
            let (vm, number) = place(&specification, task)?;
            let of = |o: &Outcome| {
                let t = &o.vms[vm][number];
                let quantile = t.quantiles.iter().find(|q| q.percentile == percentile);
                // A task that is starved has too few for a percentile: its largest.
                (quantile.map_or(t.max, |q| q.value).as_secs_f64(), t.delivered_iops)
            };
            let tail = median(simulated.iter().map(|o| of(o).0));
            Some((tail, median(simulated.iter().map(|o| of(o).1))))
        };
        rows.extend(cell_rows(cell, &repetitions[&identity(cell)?], other)?);
    }
    Ok(rows)
}

/// The noise floor: real runs in the simulation's place. Of conditions that were measured twice the second run beside the
/// first, which nothing excuses but `WITHIN`; of those measured three times the third beside the first and the second,
/// with what these differ by.
///
/// # Errors
/// If a cell's names are none that this version knows.
pub fn repeated(cells: &[Cell]) -> Result<[(&'static str, Vec<Row>); 2]> {
    let mut runs: BTreeMap<String, Vec<&Cell>> = BTreeMap::new();
    for cell in cells.iter().filter(|c| c.disturbed.is_none()) {
        runs.entry(identity(cell)?).or_default().push(cell);
    }
    let (mut second, mut third) = (Vec::new(), Vec::new());
    for runs in runs.values() {
        if let [first, again, ..] = runs[..] {
            second.extend(cell_rows(first, &[], measured(again))?);
        }
        if let [first, again, last, ..] = runs[..] {
            for cell in [first, again] {
                third.extend(cell_rows(cell, &[first, again], measured(last))?);
            }
        }
    }
    Ok([("a second real run", second), ("a third real run", third)])
}

/// What a cell's tasks had, for [`cell_rows`].
fn measured(cell: &Cell) -> impl Fn(&TaskResult, Percentile) -> Option<(f64, f64)> + '_ {
    |task, percentile| {
        let other = cell.tasks.iter().find(|t| t.vm == task.vm && t.task == task.task)?;
        let quantile = other.histogram.quantile(percentile);
        let tail = quantile.map_or(other.histogram.max(), |q| q.value);
        Some((tail.as_secs_f64(), other.delivered_iops))
    }
}

/// The numbers of a task's VM, and of the task in it.
fn place(specification: &Specification, task: &TaskResult) -> Option<(usize, usize)> {
    specification.vms.iter().enumerate().find_map(|(index, vm)| {
        let number = vm.tasks.iter().position(|t| t.name == task.task)?;
        (vm.name == task.vm).then_some((index, number))
    })
}

/// What two repetitions have in common.
fn identity(cell: &Cell) -> Result<String> {
    let key = (&cell.key.case, &cell.key.neighbour, &cell.device, &cell.settings, &cell.ioprio);
    Ok(serde_json::to_string(&key)?)
}

/// `other` is what a task is held against: a tail at the percentile, s, and a rate.
fn cell_rows(
    cell: &Cell,
    repetitions: &[&Cell],
    other: impl Fn(&TaskResult, Percentile) -> Option<(f64, f64)>,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for task in &cell.tasks {
        let Some(judged) = task.judged else { continue };
        let (tail, rate) =
            other(task, judged.percentile).with_context(|| format!("{}/{}", task.vm, task.task))?;
        // At this row's percentile, whichever another run judged.
        let others = repetitions.iter().filter_map(|c| measured(c)(task, judged.percentile));
        let tails = others.map(|(tail, _)| tail);
        let (least, most) = range(tails);
        let disagreement = (repetitions.len() > 1).then_some(most - least);
        let measured = judged.value.as_secs_f64();
        let allowed =
            (measured * WITHIN).max(OR_WITHIN_S).max(disagreement.unwrap_or(0.0) * DISAGREEMENTS);
        rows.push(Row {
            case: cell.key.case.clone(),
            neighbour: cell.key.neighbour.clone(),
            cell: format!("{} {}", cell.key.scheme, cell.key.repetition),
            scheduler: scheduler(cell),
            vms: cell.key.case.parse::<Case>()?.vms(),
            task: format!("{}/{}", task.vm, task.task),
            percentile: judged.percentile.fraction() * 100.0,
            measured_ms: measured * 1e3,
            simulated_ms: tail * 1e3,
            repetitions_ms: disagreement.map(|d| d * 1e3),
            measured_iops: task.delivered_iops,
            simulated_iops: rate,
            agrees: (tail - measured).abs() <= allowed,
            rate_agrees: (rate - task.delivered_iops).abs() <= RATE_WITHIN * task.delivered_iops,
        });
    }
    Ok(rows)
}

fn scheduler(cell: &Cell) -> String {
    match cell.settings.0.values().next().map(|s| s.scheduler) {
        Some(Scheduler::Bfq(bfq)) if bfq.slice_idle_us > 0 => "bfq, idling".to_owned(),
        Some(Scheduler::Bfq(_)) => "bfq".to_owned(),
        Some(other) => other.to_string(),
        None => "-".to_owned(),
    }
}

/// How rows agree.
#[derive(Debug, Clone, Serialize)]
pub struct Agreement {
    /// Which rows.
    pub of: String,
    /// How many.
    pub tasks: usize,
    /// Part whose tails agree.
    pub tails: f64,
    /// Part whose rates do.
    pub rates: f64,
    /// Spearman's rank correlation of the tails; none with fewer than three rows.
    pub rank_correlation: Option<f64>,
    /// Median of simulated over measured tail.
    pub ratio: f64,
}

/// All rows, by scheduler, by number of VMs, and by neighbour; those of [`repeated`] for themselves.
#[must_use]
pub fn agreement(rows: &[Row], repeated: &[(&str, Vec<Row>)]) -> Vec<Agreement> {
    let mut groups: BTreeMap<(u8, String), Vec<&Row>> = BTreeMap::new();
    for row in rows {
        for group in [
            (0, "all".to_owned()),
            (1, row.scheduler.clone()),
            (2, format!("{} VMs", row.vms)),
            (3, format!("neighbour {}", row.neighbour)),
        ] {
            groups.entry(group).or_default().push(row);
        }
    }
    let part = |rows: &[&Row], f: fn(&Row) -> bool| {
        rows.iter().filter(|r| f(r)).count() as f64 / rows.len() as f64
    };
    let agreement = |((_, of), rows): ((u8, String), Vec<&Row>)| Agreement {
        of,
        tasks: rows.len(),
        tails: part(&rows, |r| r.agrees),
        rates: part(&rows, |r| r.rate_agrees),
        rank_correlation: rank_correlation(&rows),
        ratio: median(rows.iter().map(|r| r.simulated_ms / r.measured_ms)),
    };
    for (name, rows) in repeated.iter().filter(|(_, rows)| !rows.is_empty()) {
        groups.insert((4, (*name).to_owned()), rows.iter().collect());
    }
    groups.into_iter().map(agreement).collect()
}

/// Spearman's: Pearson's of the ranks, equal values sharing theirs.
fn rank_correlation(rows: &[&Row]) -> Option<f64> {
    if rows.len() < 3 {
        return None;
    }
    let x = ranks(rows.iter().map(|r| r.measured_ms).collect());
    let y = ranks(rows.iter().map(|r| r.simulated_ms).collect());
    let mean = (rows.len() as f64 + 1.0) / 2.0;
    let products = |a: &[f64], b: &[f64]| -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - mean) * (b - mean)).sum()
    };
    let spread = (products(&x, &x) * products(&y, &y)).sqrt();
    (spread > 0.0).then(|| products(&x, &y) / spread)
}

fn ranks(values: Vec<f64>) -> Vec<f64> {
    let rank = |v: &f64| {
        let below = values.iter().filter(|o| *o < v).count() as f64;
        let equal = values.iter().filter(|o| *o == v).count() as f64;
        below + (equal + 1.0) / 2.0
    };
    values.iter().map(rank).collect()
}

/// The agreements as text.
#[must_use]
pub fn table(agreements: &[Agreement]) -> String {
    Table::of(agreements)
        .text("conditions", |of| &of.of)
        .figure("tasks", 0, |of| of.tasks)
        .figure("tails agree %", 0, |of| of.tails * 100.0)
        .figure("rates agree %", 0, |of| of.rates * 100.0)
        .figure("rank corr", 2, |of| of.rank_correlation)
        .figure("sim / real", 2, |of| of.ratio)
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_shared_by_equals() {
        assert_eq!(ranks(vec![3.0, 1.0, 3.0, 2.0]), [3.5, 1.0, 3.5, 2.0]);
    }

    #[test]
    fn cells_that_were_measured_are_conditions() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let cells =
            crate::campaign::read(&directory.join("../../docs/results/prediction")).unwrap();
        let costs = Costs { transport: Nanos::ZERO, software: Nanos::ZERO };
        let first = condition(&cells[0], costs, 1).unwrap();
        assert_eq!(first.service, Service::Kernel { scheduler: Scheduler::MqDeadline });
        // Four VMs with one task each, and the writer with its limit.
        assert_eq!(first.vms.len(), 5);
        assert_eq!(first.vms[0].tasks[0].iops, Some(1500.0));
        assert_eq!(first.vms[4].limits.write_bps.unwrap().get(), 59_643_002);
        first.check().unwrap();
    }

    #[test]
    fn real_runs_of_one_condition_are_held_against_each_other() {
        let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = directory.join("../../docs/results/conditions-2");
        let mut cells = crate::campaign::read(&path).unwrap();
        cells.truncate(2);
        let [(_, second), (_, third)] = repeated(&cells).unwrap();
        let judged = cells[0].tasks.iter().filter(|t| t.judged.is_some()).count();
        assert_eq!((second.len(), third.len()), (judged, 0));
        assert!(second.iter().all(|row| row.repetitions_ms.is_none()));
        // The first once more: it agrees with itself, and the second by what the two differ.
        cells.push(cells[0].clone());
        let [(_, second), (_, third)] = repeated(&cells).unwrap();
        assert_eq!((second.len(), third.len()), (judged, 2 * judged));
        assert!(third.iter().all(|row| row.agrees && row.repetitions_ms.is_some()));
    }
}
