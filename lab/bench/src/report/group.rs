//! Cells sorted for the report: groups, schemes, and each task over its repetitions.

use rtvirtio_cases::Scheme;
use rtvirtio_cases::judge::LAX_DELIVERED;
use rtvirtio_spec::latency::Quantile;
use rtvirtio_spec::run::{Cell, TaskResult};
use rtvirtio_units::{Nanos, TaskName, VmName};

use crate::stats::distinct;
use crate::verdict::{self, Standing};

/// The scheme that every other is compared with.
pub(super) const RTVIRTIO: &str = "rtvirtio";
const HAND: &str = "hand";
const DATA_PLANE: &str = "data-plane";

/// All cells of one case, tier and neighbour.
pub(super) struct Group<'a> {
    pub(super) case: &'a str,
    pub(super) tier: &'a str,
    pub(super) neighbour: &'a str,
    /// rtvirtio, the data plane, hand, then the other baselines in `Scheme`'s order.
    pub(super) schemes: Vec<SchemeCells<'a>>,
}

/// One scheme's cells of a group, by repetition.
pub(super) struct SchemeCells<'a> {
    pub(super) name: &'a str,
    /// Position among all schemes of the report: its colour.
    pub(super) colour: usize,
    pub(super) cells: Vec<&'a Cell>,
}

/// A task within a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskId<'a> {
    pub(super) vm: &'a VmName,
    pub(super) task: &'a TaskName,
}

/// A task's results over a scheme's runs; at least one.
pub(super) struct TaskRuns<'a>(Vec<(&'a Cell, &'a TaskResult)>);

/// Sorts `cells` into groups, in order of first appearance.
pub(super) fn groups(cells: &[Cell]) -> Vec<Group<'_>> {
    let key = |c: &Cell| (c.key.case.clone(), c.key.tier.clone(), c.key.neighbour.clone());
    let names = scheme_order(cells);
    // Colour 0 is rtvirtio's own.
    let first_colour = usize::from(names.first() != Some(&RTVIRTIO));
    let group_of = |wanted| {
        let members: Vec<&Cell> = cells.iter().filter(|&c| key(c) == wanted).collect();
        let first = &members[0].key;
        let schemes = names
            .iter()
            .enumerate()
            .filter_map(|(colour, &name)| scheme_cells(name, colour + first_colour, &members))
            .collect();
        Group { case: &first.case, tier: &first.tier, neighbour: &first.neighbour, schemes }
    };
    distinct(cells.iter().map(key)).into_iter().map(group_of).collect()
}

fn scheme_order(cells: &[Cell]) -> Vec<&str> {
    let mut names = distinct(cells.iter().map(|c| c.key.scheme.as_str()));
    // Baselines in the order of `Scheme`; stable: what is none keeps its order.
    let baseline = |name: &str| {
        let scheme = name.parse::<Scheme>().ok()?;
        Scheme::ALL.iter().position(|s| *s == scheme)
    };
    names.sort_by_key(|&name| match name {
        RTVIRTIO => (0, 0),
        DATA_PLANE => (1, 0),
        HAND => (2, 0),
        name => (3, baseline(name).unwrap_or(usize::MAX)),
    });
    names
}

fn scheme_cells<'a>(name: &'a str, colour: usize, members: &[&'a Cell]) -> Option<SchemeCells<'a>> {
    let mut cells: Vec<&Cell> = members.iter().copied().filter(|c| c.key.scheme == name).collect();
    cells.sort_by_key(|c| c.key.repetition);
    (!cells.is_empty()).then_some(SchemeCells { name, colour, cells })
}

impl<'a> Group<'a> {
    pub(super) fn title(&self) -> String {
        format!("Case {}, {} targets, neighbour: {}", self.case, self.tier, self.neighbour)
    }

    /// Every cell, by scheme and repetition.
    pub(super) fn cells(&self) -> Vec<&'a Cell> {
        self.schemes.iter().flat_map(|scheme| scheme.cells.iter().copied()).collect()
    }

    fn results(&self) -> impl Iterator<Item = &'a TaskResult> {
        self.cells().into_iter().flat_map(|c| &c.tasks)
    }

    /// Every task, in the order of the cells.
    pub(super) fn tasks(&self) -> Vec<TaskId<'a>> {
        distinct(self.results().map(|r| TaskId { vm: &r.vm, task: &r.task }))
    }

    /// The VM with the smallest target; the first of equals.
    pub(super) fn most_urgent(&self) -> Option<&'a VmName> {
        self.results().filter_map(|r| Some((r.target?, &r.vm))).min_by_key(|(t, _)| *t).map(|x| x.1)
    }

    /// The distinct targets of the tasks that `of` picks, rising.
    pub(super) fn targets(&self, of: impl Fn(&TaskResult) -> bool) -> Vec<Nanos> {
        let mut targets = distinct(self.results().filter(|r| of(r)).filter_map(|r| r.target));
        targets.sort_unstable();
        targets
    }
}

impl<'a> SchemeCells<'a> {
    /// Those that the machine disturbed.
    pub(super) fn disturbed(&self) -> impl Iterator<Item = &'a Cell> + '_ {
        self.cells.iter().copied().filter(|cell| cell.disturbed.is_some())
    }

    /// The latest canary of the runs, at p99.
    pub(super) fn lateness(&self) -> Option<Nanos> {
        self.cells.iter().map(|cell| cell.canary.p99).max()
    }

    /// The worst standing of all tasks and runs.
    pub(super) fn standing(&self) -> Option<Standing> {
        let runs = self.cells.iter().flat_map(|&cell| cell.tasks.iter().map(move |t| (cell, t)));
        verdict::over_runs(runs)
    }

    /// Runs that passed.
    pub(super) fn passed(&self) -> usize {
        self.cells.iter().filter(|c| c.passed).count()
    }

    /// Runs that would pass at the laxer rate.
    pub(super) fn passed_lax(&self) -> usize {
        let holds = |r: &TaskResult| {
            let tail = r.judged.zip(r.target).is_some_and(|(q, target)| q.value <= target);
            tail && delivered(r).is_some_and(|d| d >= LAX_DELIVERED)
        };
        self.cells.iter().filter(|c| !c.tasks.is_empty() && c.tasks.iter().all(holds)).count()
    }

    /// Results of every task of every run.
    pub(super) fn results(&self) -> impl Iterator<Item = &'a TaskResult> + '_ {
        self.cells.iter().flat_map(|c| &c.tasks)
    }

    /// One task over the runs; `None` if none has it.
    pub(super) fn task(&self, id: TaskId<'_>) -> Option<TaskRuns<'a>> {
        let runs = self.cells.iter().flat_map(|&cell| cell.tasks.iter().map(move |t| (cell, t)));
        let runs: Vec<_> = runs.filter(|(_, t)| t.vm == *id.vm && t.task == *id.task).collect();
        (!runs.is_empty()).then_some(TaskRuns(runs))
    }

    /// The worst of tail / target over all tasks and runs.
    pub(super) fn worst_ratio(&self) -> Option<f64> {
        self.results()
            .filter_map(|r| Some(r.judged?.value.as_millis_f64() / r.target?.as_millis_f64()))
            .max_by(f64::total_cmp)
    }

    /// Results with a target and too few samples for a tail.
    pub(super) fn unjudged(&self) -> usize {
        self.results().filter(|r| r.target.is_some() && r.judged.is_none()).count()
    }

    /// The least delivered fraction over all tasks and runs.
    pub(super) fn min_delivered(&self) -> Option<f64> {
        self.results().filter_map(delivered).min_by(f64::total_cmp)
    }

    /// MB/s of all background VMs together, the mean of the runs; `None` without background.
    pub(super) fn background_mb(&self) -> Option<f64> {
        let total = |c: &&Cell| c.background.values().map(|b| b.as_megabytes_f64()).sum::<f64>();
        let runs: Vec<f64> =
            self.cells.iter().filter(|c| !c.background.is_empty()).map(total).collect();
        (!runs.is_empty()).then(|| runs.iter().sum::<f64>() / runs.len() as f64)
    }
}

impl TaskRuns<'_> {
    /// The judged quantile of every run that has one, by value.
    pub(super) fn judged(&self) -> Vec<Quantile> {
        let mut all: Vec<_> = self.0.iter().filter_map(|(_, r)| r.judged).collect();
        all.sort_by_key(|q| q.value);
        all
    }

    /// The median run's, of an even number the mean of the two in the middle; with an interval that spans those of all
    /// runs.
    pub(super) fn tail(&self) -> Option<Quantile> {
        let all = self.judged();
        let mut tail = *all.get(all.len() / 2)?;
        let below = all[(all.len() - 1) / 2].value.get();
        tail.value = Nanos::new(u64::midpoint(below, tail.value.get()));
        tail.low = all.iter().map(|q| q.low).min()?;
        tail.high = all.iter().map(|q| q.high).max()?;
        Some(tail)
    }

    pub(super) fn target(&self) -> Option<Nanos> {
        self.0.iter().find_map(|(_, r)| r.target)
    }

    /// The worst of its runs.
    pub(super) fn standing(&self) -> Standing {
        verdict::over_runs(self.0.iter().copied()).unwrap_or(Standing::NotJudged)
    }

    /// Whether it passed in every run.
    pub(super) fn passed(&self) -> bool {
        self.0.iter().all(|(_, r)| r.passed)
    }

    /// The least delivered fraction.
    pub(super) fn delivered(&self) -> Option<f64> {
        self.0.iter().filter_map(|(_, r)| delivered(r)).min_by(f64::total_cmp)
    }
}

/// Delivered fraction of the requested rate; `None` for a task without a rate.
pub(super) fn delivered(result: &TaskResult) -> Option<f64> {
    (result.requested_iops > 0.0).then(|| result.delivered_iops / result.requested_iops)
}
