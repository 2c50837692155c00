//! What cells come to: a row for each case, tier, neighbour and scheme.
//!
//! Intervals are 95 %: Wilson's for runs that passed, the order statistic's for a percentile of one
//! run, Poisson's for a rate that was delivered; over runs they span all of them. Of a cell that was
//! measured again because it was disturbed, the repetition counts.

use std::fmt;

use rtvirtio_cases::wilson_interval;
use rtvirtio_spec::run::{Cell as KernelCell, TaskResult};
use rtvirtio_units::{Nanos, Percentile};

use super::cell::{Cell, CellKey, Scheme, Task};
use super::clients::Between;
use super::neighbour::Neighbour;

/// A value and its interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bounded {
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Bounded {
    /// The median of runs, and their range.
    fn median(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (&low, &high) = (values.first()?, values.last()?);
        Some(Self { value: values[values.len() / 2], low, high })
    }

    fn over(self, by: f64) -> Self {
        Self { value: self.value / by, low: self.low / by, high: self.high / by }
    }
}

impl fmt::Display for Bounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        let Self { value, low, high } = self;
        write!(f, "{value:.digits$} ({low:.digits$}–{high:.digits$})")
    }
}

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
    pub(super) tail: Option<Bounded>,
    /// The worst p99 of VM 0's tasks and runs, ms.
    pub(super) urgent: Option<Bounded>,
    /// The least of all tasks and runs.
    pub(super) delivered: Option<Bounded>,
    /// Of the neighbour, MB/s: the median of runs and their range.
    pub(super) background: Option<Bounded>,
    /// `background` of what the neighbour moves alone.
    pub(super) share: Option<Bounded>,
    /// Of what was left over.
    pub(super) left: Option<f64>,
    /// p99, ms.
    pub(super) canary: Option<f64>,
    pub(super) busy: Option<f64>,
}

/// What one task did in one run, from whichever path.
struct Run {
    is_urgent: bool,
    tail: Option<Bounded>,
    p99_ms: Option<Bounded>,
    delivered: Bounded,
}

impl Run {
    fn of_task(task: &Task) -> Self {
        let [low, high] = task.tail_interval_us.unwrap_or([task.tail_us; 2]);
        let tail = Bounded { value: task.tail_us, low, high }.over(task.target_us);
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
        let bounded = |q: rtvirtio_spec::latency::Quantile| Bounded {
            value: ms(q.value),
            low: ms(q.low),
            high: ms(q.high),
        };
        let p99 = Percentile::new(99.0).ok().and_then(|p99| result.histogram.quantile(p99));
        let fraction = result.delivered_iops / result.requested_iops;
        Some(Self {
            is_urgent: result.vm.to_string() == "vm0",
            tail: result.judged.map(|q| bounded(q).over(target)),
            p99_ms: p99.map(bounded),
            delivered: delivered(result.histogram.count(), fraction),
        })
    }
}

fn p99_ms(task: &Task) -> Option<Bounded> {
    task.p99_us.map(|[value, low, high]| Bounded { value, low, high }.over(1e3))
}

/// More than 1 where requests of the warm-up were late.
fn delivered(n: u64, fraction: f64) -> Bounded {
    let half = 1.96 * fraction / (n.max(1) as f64).sqrt();
    Bounded { value: fraction, low: (fraction - half).max(0.0), high: fraction + half }
}

fn worst(values: impl Iterator<Item = Bounded>) -> Option<Bounded> {
    values.max_by(|a, b| a.value.total_cmp(&b.value))
}

impl Row {
    fn new(group: Group, scheme: String, passed: Vec<bool>, tasks: &[Run]) -> Self {
        let tails: Option<Vec<Bounded>> = tasks.iter().map(|task| task.tail).collect();
        let urgent = tasks.iter().filter(|task| task.is_urgent).filter_map(|task| task.p99_ms);
        let delivered = tasks.iter().map(|task| task.delivered);
        Self {
            group,
            scheme,
            runs: passed.len(),
            passed: passed.into_iter().filter(|passed| *passed).count(),
            tail: tails.and_then(|tails| worst(tails.into_iter())),
            urgent: worst(urgent),
            delivered: delivered.min_by(|a, b| a.value.total_cmp(&b.value)),
            background: None,
            share: None,
            left: None,
            canary: None,
            busy: None,
        }
    }

    fn of_cells(group: Group, scheme: Scheme, cells: &[&Cell], alone: Option<f64>) -> Self {
        let tasks: Vec<Run> = cells.iter().flat_map(|c| &c.tasks).map(Run::of_task).collect();
        let passed = cells.iter().map(|cell| cell.passed()).collect();
        let median = |of: &dyn Fn(&Cell) -> f64| {
            Bounded::median(cells.iter().map(|cell| of(cell)).collect())
        };
        let background = median(&|cell| cell.background / 1e6);
        let left =
            alone.and_then(|alone| median(&|c| c.background / 1e6 / (alone * (1.0 - c.needed))));
        Self {
            background,
            share: background.zip(alone).map(|(background, alone)| background.over(alone)),
            left: left.map(|left| left.value),
            canary: median(&|cell| cell.canary.p99.as_millis_f64()).map(|canary| canary.value),
            busy: median(&|cell| cell.busy).map(|busy| busy.value),
            ..Self::new(group, scheme.name().to_owned(), passed, &tasks)
        }
    }

    fn of_kernel(group: Group, scheme: &str, cells: &[&KernelCell], alone: Option<f64>) -> Self {
        let results = cells.iter().flat_map(|cell| &cell.tasks);
        let tasks: Vec<Run> = results.filter_map(Run::of_result).collect();
        let passed = cells.iter().map(|cell| cell.passed).collect();
        let moved = |cell: &&KernelCell| -> f64 {
            cell.background.values().map(|rate| rate.as_megabytes_f64()).sum()
        };
        let background = Bounded::median(cells.iter().map(moved).collect());
        let canary = cells.iter().map(|cell| cell.canary.p99.as_millis_f64()).collect();
        Self {
            background,
            share: background.zip(alone).map(|(background, alone)| background.over(alone)),
            canary: Bounded::median(canary).map(|canary| canary.value),
            ..Self::new(group, format!("kernel {scheme}"), passed, &tasks)
        }
    }

    /// `3/3 44–100 %`.
    pub(super) fn rate(&self) -> String {
        rate(self.passed, self.runs)
    }
}

fn rate(passed: usize, runs: usize) -> String {
    let (low, high) = wilson_interval(passed as u64, runs as u64);
    format!("{passed}/{runs} {:.0}–{:.0} %", low * 100.0, high * 100.0)
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
pub(super) fn alone(cells: &[Cell], neighbour: Neighbour) -> Option<Bounded> {
    let is_alone = |cell: &&Cell| {
        let key = &cell.key;
        key.scheme == Scheme::Alone && key.neighbour == neighbour
    };
    Bounded::median(
        counted(cells).into_iter().filter(is_alone).map(|cell| cell.background / 1e6).collect(),
    )
}

/// The rows of all schemes, group by group in the order of the cells; those of the kernel path
/// (`beside`) last, where they are of the same case, tier, neighbour and device.
pub(super) fn rows(cells: &[Cell], beside: &[KernelCell]) -> Vec<Row> {
    let counted = counted(cells);
    let mut groups: Vec<Group> = Vec::new();
    for cell in counted.iter().filter(|cell| cell.key.scheme != Scheme::Alone) {
        let group = Group::of(&cell.key);
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let mut rows = Vec::new();
    for group in groups {
        let alone = alone(cells, group.neighbour).map(|alone| alone.value);
        let here: Vec<&Cell> =
            counted.iter().copied().filter(|cell| Group::of(&cell.key) == group).collect();
        for scheme in [Scheme::None, Scheme::Qos, Scheme::Throttle] {
            let same: Vec<&Cell> =
                here.iter().copied().filter(|cell| cell.key.scheme == scheme).collect();
            if !same.is_empty() {
                rows.push(Row::of_cells(group.clone(), scheme, &same, alone));
            }
        }
        if group.neighbour != Neighbour::DeepWriter {
            continue;
        }
        let is_here = |cell: &&KernelCell| {
            cell.key.case == group.case
                && cell.key.tier == group.tier
                && cell.key.neighbour == rtvirtio_cases::Neighbour::Writer.to_string()
                && here.iter().any(|ours| ours.device == cell.device)
        };
        let mut kernel: Vec<&KernelCell> = beside.iter().filter(is_here).collect();
        kernel.sort_by(|a, b| a.key.scheme.cmp(&b.key.scheme));
        for same in kernel.chunk_by(|a, b| a.key.scheme == b.key.scheme) {
            rows.push(Row::of_kernel(group.clone(), &same[0].key.scheme, same, alone));
        }
    }
    rows
}

/// The rows of one scheme beside one neighbour, over cases.
#[derive(Debug)]
pub(super) struct Total {
    pub(super) scheme: String,
    pub(super) neighbour: Neighbour,
    pub(super) rate: String,
    /// The least and the largest of the rows'; none if a row has none.
    pub(super) tail: Option<[f64; 2]>,
    pub(super) delivered: Option<f64>,
    /// Of the rows' medians, MB/s.
    pub(super) background: Option<[f64; 2]>,
    /// The least of the rows'.
    pub(super) left: Option<f64>,
}

pub(super) fn totals(rows: &[Row]) -> Vec<Total> {
    let mut keys: Vec<(Neighbour, &str)> = Vec::new();
    for row in rows {
        let key = (row.group.neighbour, row.scheme.as_str());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    // Neighbour by neighbour, schemes in the order of the rows.
    keys.sort_by_key(|key| Neighbour::ALL.iter().position(|neighbour| *neighbour == key.0));
    let ends = |values: Vec<f64>| {
        let low = values.iter().copied().fold(f64::MAX, f64::min);
        (!values.is_empty()).then(|| [low, values.into_iter().fold(0.0, f64::max)])
    };
    let total = |(neighbour, scheme): (Neighbour, &str)| {
        let same = || {
            rows.iter().filter(move |row| row.group.neighbour == neighbour && row.scheme == scheme)
        };
        let tails: Option<Vec<f64>> = same().map(|row| Some(row.tail?.value)).collect();
        let delivered = same().filter_map(|row| row.delivered).map(|delivered| delivered.value);
        let moved = same().filter_map(|row| row.background).map(|background| background.value);
        Total {
            scheme: scheme.to_owned(),
            neighbour,
            rate: rate(same().map(|row| row.passed).sum(), same().map(|row| row.runs).sum()),
            tail: tails.and_then(ends),
            delivered: delivered.min_by(f64::total_cmp),
            background: ends(moved.collect()),
            left: same().filter_map(|row| row.left).min_by(f64::total_cmp),
        }
    };
    keys.into_iter().map(total).collect()
}

/// Tasks that a schedule made worse: its whole interval, over all runs, is beyond that without one.
pub(super) fn worse_with_a_schedule(cells: &[Cell]) -> Vec<String> {
    let mut groups: Vec<(Group, &str)> = Vec::new();
    let counted = counted(cells);
    let counted = || counted.iter().copied();
    for cell in counted().filter(|cell| cell.key.scheme == Scheme::Qos) {
        for task in &cell.tasks {
            let group = (Group::of(&cell.key), task.name.as_str());
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
    }
    let mut found = Vec::new();
    for (group, name) in groups {
        let over_runs = |scheme, of: &dyn Fn(&Task) -> Option<Bounded>| {
            let runs = counted().filter(|c| c.key.scheme == scheme && Group::of(&c.key) == group);
            let tasks = runs.flat_map(|cell| &cell.tasks).filter(|task| task.name == name);
            let values: Vec<Bounded> = tasks.filter_map(of).collect();
            let mut over = Bounded::median(values.iter().map(|v| v.value).collect())?;
            over.low = values.iter().map(|v| v.low).fold(over.low, f64::min);
            over.high = values.iter().map(|v| v.high).fold(over.high, f64::max);
            Some(over)
        };
        let both = |of: &dyn Fn(&Task) -> Option<Bounded>| {
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
