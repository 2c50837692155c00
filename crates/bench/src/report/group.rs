//! Cells sorted for the report: groups, schemes, and each task over its repetitions.

use rtvirtio_cases::judge::LAX_DELIVERED;
use rtvirtio_spec::latency::Quantile;
use rtvirtio_spec::run::{Cell, TaskResult};
use rtvirtio_units::{Nanos, TaskName, VmName};

use super::Discarded;

/// The scheme that every other is compared with.
pub(super) const RTVIRTIO: &str = "rtvirtio";
const HAND: &str = "hand";

/// All cells of one case, tier and neighbour.
pub(super) struct Group<'a> {
    pub(super) case: &'a str,
    pub(super) tier: &'a str,
    pub(super) neighbour: &'a str,
    /// rtvirtio, hand, then the others in the order of the cells.
    pub(super) schemes: Vec<SchemeCells<'a>>,
}

/// One scheme's cells of a group, by repetition.
pub(super) struct SchemeCells<'a> {
    pub(super) name: &'a str,
    /// Position among all schemes of the report: its colour.
    pub(super) colour: usize,
    pub(super) counted: Vec<&'a Cell>,
    /// Discarded, whether they count or not.
    pub(super) discarded: Vec<&'a Cell>,
}

/// A task within a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskId<'a> {
    pub(super) vm: &'a VmName,
    pub(super) task: &'a TaskName,
}

/// A task's results over a scheme's runs; at least one.
pub(super) struct TaskRuns<'a>(Vec<&'a TaskResult>);

/// The distinct values of `items` in order of first appearance.
pub(super) fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    items.fold(Vec::new(), |mut seen, item| {
        if !seen.contains(&item) {
            seen.push(item);
        }
        seen
    })
}

/// Whether more than a fifth of all measurements were discarded, repeated ones too: what is left
/// is then a choice of the machine's good moments, and none counts.
pub(super) fn is_withheld(cells: &[Cell]) -> bool {
    let measured: u64 = cells.iter().map(|c| u64::from(c.attempts)).sum();
    let kept = cells.iter().filter(|c| c.discarded.is_none()).count() as u64;
    (measured - kept.min(measured)) * 5 > measured
}

/// Sorts `cells` into groups, in order of first appearance.
pub(super) fn groups(cells: &[Cell], discarded: Discarded) -> Vec<Group<'_>> {
    let counts = |cell: &Cell| match discarded {
        Discarded::Count => true,
        Discarded::LeaveOut => cell.discarded.is_none() && !is_withheld(cells),
    };
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
            .filter_map(|(colour, &name)| {
                scheme_cells(name, colour + first_colour, &members, &counts)
            })
            .collect();
        Group { case: &first.case, tier: &first.tier, neighbour: &first.neighbour, schemes }
    };
    distinct(cells.iter().map(key)).into_iter().map(group_of).collect()
}

fn scheme_order(cells: &[Cell]) -> Vec<&str> {
    let mut names = distinct(cells.iter().map(|c| c.key.scheme.as_str()));
    // Stable: the rest keeps its order.
    names.sort_by_key(|&name| match name {
        RTVIRTIO => 0,
        HAND => 1,
        _ => 2,
    });
    names
}

fn scheme_cells<'a>(
    name: &'a str,
    colour: usize,
    members: &[&'a Cell],
    counts: &dyn Fn(&Cell) -> bool,
) -> Option<SchemeCells<'a>> {
    let mut cells: Vec<&Cell> = members.iter().copied().filter(|c| c.key.scheme == name).collect();
    cells.sort_by_key(|c| c.key.repetition);
    let discarded = cells.iter().copied().filter(|c| c.discarded.is_some()).collect();
    let counted = cells.iter().copied().filter(|c| counts(c)).collect();
    (!cells.is_empty()).then_some(SchemeCells { name, colour, counted, discarded })
}

impl<'a> Group<'a> {
    pub(super) fn title(&self) -> String {
        format!("Case {}, {} targets, neighbour: {}", self.case, self.tier, self.neighbour)
    }

    /// Every cell, by scheme and repetition, whether it counts or not.
    pub(super) fn cells(&self) -> Vec<&'a Cell> {
        let mut all = Vec::new();
        for scheme in &self.schemes {
            let left_out = scheme.discarded.iter().filter(|c| !scheme.counts(c));
            let mut cells: Vec<&Cell> = scheme.counted.iter().chain(left_out).copied().collect();
            cells.sort_by_key(|c| c.key.repetition);
            all.append(&mut cells);
        }
        all
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
    /// Whether `cell` is among those that count.
    pub(super) fn counts(&self, cell: &Cell) -> bool {
        self.counted.iter().any(|&c| std::ptr::eq(c, cell))
    }

    /// Runs that passed.
    pub(super) fn passed(&self) -> usize {
        self.counted.iter().filter(|c| c.passed).count()
    }

    /// Runs that would pass at the laxer rate.
    pub(super) fn passed_lax(&self) -> usize {
        let holds = |r: &TaskResult| {
            let tail = r.judged.zip(r.target).is_some_and(|(q, target)| q.value <= target);
            tail && delivered(r).is_some_and(|d| d >= LAX_DELIVERED)
        };
        self.counted.iter().filter(|c| !c.tasks.is_empty() && c.tasks.iter().all(holds)).count()
    }

    /// Results of every task of every run that counts.
    pub(super) fn results(&self) -> impl Iterator<Item = &'a TaskResult> + '_ {
        self.counted.iter().flat_map(|c| &c.tasks)
    }

    /// One task over the runs; `None` if none has it.
    pub(super) fn task(&self, id: TaskId<'_>) -> Option<TaskRuns<'a>> {
        let runs: Vec<_> =
            self.results().filter(|r| r.vm == *id.vm && r.task == *id.task).collect();
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
    pub(super) fn least_delivered(&self) -> Option<f64> {
        self.results().filter_map(delivered).min_by(f64::total_cmp)
    }

    /// MB/s of all background VMs together, the mean of the runs; `None` without background.
    pub(super) fn background_mb(&self) -> Option<f64> {
        let total = |c: &&Cell| c.background.values().map(|b| b.as_megabytes_f64()).sum::<f64>();
        let runs: Vec<f64> =
            self.counted.iter().filter(|c| !c.background.is_empty()).map(total).collect();
        (!runs.is_empty()).then(|| runs.iter().sum::<f64>() / runs.len() as f64)
    }
}

impl TaskRuns<'_> {
    /// The judged quantile of every run that has one, by value.
    pub(super) fn judged(&self) -> Vec<Quantile> {
        let mut all: Vec<_> = self.0.iter().filter_map(|r| r.judged).collect();
        all.sort_by_key(|q| q.value);
        all
    }

    /// The median run's, with an interval that spans those of all runs.
    pub(super) fn tail(&self) -> Option<Quantile> {
        let all = self.judged();
        let mut tail = *all.get(all.len() / 2)?;
        tail.low = all.iter().map(|q| q.low).min()?;
        tail.high = all.iter().map(|q| q.high).max()?;
        Some(tail)
    }

    pub(super) fn target(&self) -> Option<Nanos> {
        self.0.iter().find_map(|r| r.target)
    }

    /// Whether it passed in every run.
    pub(super) fn passed(&self) -> bool {
        self.0.iter().all(|r| r.passed)
    }

    /// The least delivered fraction.
    pub(super) fn delivered(&self) -> Option<f64> {
        self.0.iter().filter_map(|r| delivered(r)).min_by(f64::total_cmp)
    }
}

/// Delivered fraction of the requested rate; `None` for a task without a rate.
pub(super) fn delivered(result: &TaskResult) -> Option<f64> {
    (result.requested_iops > 0.0).then(|| result.delivered_iops / result.requested_iops)
}
