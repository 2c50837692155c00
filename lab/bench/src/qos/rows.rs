//! What cells come to: a row for each case, tier, neighbour and scheme.
//!
//! Intervals are 95 %: Wilson's for runs that passed, the order statistic's for a percentile of one
//! run, Poisson's for a rate that was delivered; over runs they span all of them. Of a cell that was
//! measured again because it was disturbed, the repetition counts.

use rtvirtio_spec::latency::Quantile;
use rtvirtio_spec::run::{Cell as KernelCell, TaskResult};
use rtvirtio_testbed::neighbour::Neighbour;
use rtvirtio_testbed::tasks::Between;
use rtvirtio_units::{Nanos, Percentile};

use super::cell::{Cell, CellKey, Scheme, Task};
use crate::stats::{Runs, Spread, distinct, runs};

/// Whose disk it is that cells are beside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) case: String,
    pub(super) tier: String,
    pub(super) neighbour: Neighbour,
    pub(super) between: Between,
}

impl Group {
    fn of(key: &CellKey) -> Self {
        let CellKey { case, tier, neighbour, between, .. } = key.clone();
        Self { case, tier, neighbour, between }
    }

    /// The case, the tier if it is not strict, and the guests' own time if there is one.
    pub(super) fn case(&self) -> String {
        let mut case = self.case.clone();
        if self.tier != "strict" {
            case = format!("{case} {}", self.tier);
        }
        match self.between {
            Between::Nothing => case,
            between => format!("{case} {between}"),
        }
    }
}

/// The runs of one scheme in one group.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) group: Group,
    /// `qos`, or `kernel hand`.
    pub(super) scheme: String,
    pub(super) runs: usize,
    pub(super) passed: usize,
    /// The worst of all tasks and runs at the judged percentile; none if a task had too few requests.
    pub(super) tail: Option<Spread>,
    /// The worst p99 of VM 0's tasks and runs, ms.
    pub(super) urgent: Option<Spread>,
    /// The least of all tasks and runs.
    pub(super) delivered: Option<Spread>,
    /// Of the neighbour, MB/s: the median of runs and their range.
    pub(super) background: Option<Spread>,
    /// `background` of what the neighbour moves alone.
    pub(super) share: Option<Spread>,
    /// Of what was left over.
    pub(super) left: Option<f64>,
    /// p99, ms.
    pub(super) canary: f64,
    /// CPUs; the kernel path's cells do not say.
    pub(super) busy: Option<f64>,
}

/// What one task did in one run, from whichever path.
struct Run {
    is_urgent: bool,
    tail: Option<Spread>,
    p99_ms: Option<Spread>,
    delivered: Spread,
}

impl Run {
    fn of_task(task: &Task) -> Self {
        let [low, high] = task.tail_interval_us.unwrap_or([task.tail_us; 2]);
        let tail = Spread::new(task.tail_us, low, high).over(task.target_us);
        Self {
            is_urgent: task.name.starts_with("vm0."),
            tail: (task.percentile > 0.0).then_some(tail),
            p99_ms: p99_ms(task),
            delivered: delivered(task.n, task.delivered),
        }
    }

    fn of_result(result: &TaskResult) -> Option<Self> {
        let ms = |time: Nanos| time.as_millis_f64();
        let target = ms(result.target?);
        let spread = |q: Quantile| Spread::new(ms(q.value), ms(q.low), ms(q.high));
        let p99 = Percentile::new(99.0).ok().and_then(|p99| result.histogram.quantile(p99));
        let fraction = result.delivered_iops / result.requested_iops;
        Some(Self {
            is_urgent: result.vm.to_string() == "vm0",
            tail: result.judged.map(|q| spread(q).over(target)),
            p99_ms: p99.map(spread),
            delivered: delivered(result.histogram.count(), fraction),
        })
    }
}

fn p99_ms(task: &Task) -> Option<Spread> {
    task.p99_us.map(|[value, low, high]| Spread::new(value, low, high).over(1e3))
}

/// More than 1 where requests of the warm-up were late.
fn delivered(n: u64, fraction: f64) -> Spread {
    let half = 1.96 * fraction / (n.max(1) as f64).sqrt();
    Spread::new(fraction, (fraction - half).max(0.0), fraction + half)
}

fn worst(values: impl Iterator<Item = Spread>) -> Option<Spread> {
    values.max_by(|a, b| a.value.total_cmp(&b.value))
}

impl Row {
    /// What both paths have: `moved` is what the neighbour moves in a run and alone, MB/s.
    fn of<C>(
        runs: &Runs<'_, (Group, String), C>,
        tasks: &[Run],
        passed: impl Fn(&C) -> bool,
        (moved, alone): (impl Fn(&C) -> f64, Option<f64>),
        canary: impl Fn(&C) -> Nanos,
    ) -> Self {
        let tails: Option<Vec<Spread>> = tasks.iter().map(|task| task.tail).collect();
        let urgent = tasks.iter().filter(|task| task.is_urgent).filter_map(|task| task.p99_ms);
        let delivered = tasks.iter().map(|task| task.delivered);
        let background = runs.spread(moved);
        let (group, scheme) = runs.key.clone();
        Self {
            group,
            scheme,
            runs: runs.n(),
            passed: runs.cells.iter().filter(|cell| passed(cell)).count(),
            tail: tails.and_then(|tails| worst(tails.into_iter())),
            urgent: worst(urgent),
            delivered: delivered.min_by(|a, b| a.value.total_cmp(&b.value)),
            background,
            share: background.zip(alone).map(|(background, alone)| background.over(alone)),
            left: None,
            canary: runs.median(|cell| canary(cell).as_millis_f64()),
            busy: None,
        }
    }

    fn of_cells(runs: &Runs<'_, (Group, String), Cell>, alone: Option<f64>) -> Self {
        let tasks: Vec<Run> = runs.cells.iter().flat_map(|c| &c.tasks).map(Run::of_task).collect();
        let moved = |cell: &Cell| cell.background / 1e6;
        let left = |alone: f64| runs.median(|c| moved(c) / (alone * (1.0 - c.needed)));
        Self {
            left: alone.map(left),
            busy: Some(runs.median(|cell| cell.busy)),
            ..Self::of(runs, &tasks, Cell::passed, (moved, alone), |cell| cell.canary.p99)
        }
    }

    fn of_kernel(runs: &Runs<'_, (Group, String), KernelCell>, alone: Option<f64>) -> Self {
        let results = runs.cells.iter().flat_map(|cell| &cell.tasks);
        let tasks: Vec<Run> = results.filter_map(Run::of_result).collect();
        let moved = |cell: &KernelCell| -> f64 {
            cell.background.values().map(|rate| rate.as_megabytes_f64()).sum()
        };
        Self::of(runs, &tasks, |cell| cell.passed, (moved, alone), |cell| cell.canary.p99)
    }
}

/// The cells that count: of several with one key the last, so that a machine that disturbs each of them
/// empties no row.
fn counted(cells: &[Cell]) -> Vec<&Cell> {
    let is_last = |&(index, cell): &(usize, &Cell)| {
        let later = &cells[index + 1..];
        cell.discarded.is_none() || later.iter().all(|other| other.key != cell.key)
    };
    cells.iter().enumerate().filter(is_last).map(|(_, cell)| cell).collect()
}

/// What each neighbour moves alone, MB/s: the median of runs.
pub(super) fn alone(cells: &[Cell], neighbour: Neighbour) -> Option<Spread> {
    let of = (Scheme::Alone, neighbour);
    let is_alone = |cell: &&Cell| (cell.key.scheme, cell.key.neighbour) == of;
    Spread::of(counted(cells).into_iter().filter(is_alone).map(|cell| cell.background / 1e6))
}

/// The rows of all schemes, group by group in the order of the cells; those of the kernel path
/// (`beside`) last, where they are of the same case, tier, neighbour and device.
pub(super) fn rows(cells: &[Cell], beside: &[KernelCell]) -> Vec<Row> {
    let mut counted = counted(cells);
    counted.retain(|cell| cell.key.scheme != Scheme::Alone);
    let mut rows = Vec::new();
    for here in runs(counted, |cell| Group::of(&cell.key)) {
        let group = &here.key;
        let alone = alone(cells, group.neighbour).map(|alone| alone.value);
        let mut own = here.cells.clone();
        own.sort_by_key(|cell| cell.key.scheme);
        let own = runs(own, |cell| (group.clone(), cell.key.scheme.name().to_owned()));
        rows.extend(own.iter().map(|runs| Row::of_cells(runs, alone)));
        if group.neighbour != Neighbour::DeepWriter {
            continue;
        }
        let is_here = |cell: &&KernelCell| {
            cell.key.case == group.case
                && cell.key.tier == group.tier
                && cell.key.neighbour == rtvirtio_cases::Neighbour::Writer.to_string()
                && here.cells.iter().any(|ours| ours.device == cell.device)
        };
        let mut kernel: Vec<&KernelCell> = beside.iter().filter(is_here).collect();
        kernel.sort_by(|a, b| a.key.scheme.cmp(&b.key.scheme));
        let kernel = runs(kernel, |cell| (group.clone(), format!("kernel {}", cell.key.scheme)));
        rows.extend(kernel.iter().map(|runs| Row::of_kernel(runs, alone)));
    }
    rows
}

/// Tasks that a schedule made worse: its whole interval, over all runs, is beyond that without one.
pub(super) fn worse_with_a_schedule(cells: &[Cell]) -> Vec<String> {
    let counted = counted(cells);
    let counted = || counted.iter().copied();
    let with = counted().filter(|cell| cell.key.scheme == Scheme::Qos);
    let groups =
        distinct(with.flat_map(|cell| {
            cell.tasks.iter().map(|task| (Group::of(&cell.key), task.name.as_str()))
        }));
    let mut found = Vec::new();
    for (group, name) in groups {
        let over_runs = |scheme, of: &dyn Fn(&Task) -> Option<Spread>| {
            let runs = counted().filter(|c| c.key.scheme == scheme && Group::of(&c.key) == group);
            let tasks = runs.flat_map(|cell| &cell.tasks).filter(|task| task.name == name);
            let values: Vec<Spread> = tasks.filter_map(of).collect();
            let mut over = Spread::of(values.iter().map(|v| v.value))?;
            over.low = values.iter().map(|v| v.low).fold(over.low, f64::min);
            over.high = values.iter().map(|v| v.high).fold(over.high, f64::max);
            Some(over)
        };
        let both = |of: &dyn Fn(&Task) -> Option<Spread>| {
            over_runs(Scheme::Qos, of).zip(over_runs(Scheme::None, of))
        };
        let who = format!("{}, {}, {name}", group.case(), group.neighbour.name());
        if let Some((qos, none)) = both(&p99_ms)
            && qos.low > none.high
        {
            found.push(format!("{who}: p99 of {qos:.2} ms with it, {none:.2} ms without"));
        }
        if let Some((qos, none)) = both(&|task| Some(delivered(task.n, task.delivered)))
            && qos.high < none.low
        {
            found.push(format!("{who}: {qos:.3} delivered with it, {none:.3} without"));
        }
    }
    found
}
