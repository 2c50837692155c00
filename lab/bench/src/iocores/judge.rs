//! What a campaign comes to: medians by phase and policy, and the marks.
//!
//! Cells of one seed and repetition ran the same scenario: they are a *group*, with one
//! [`Reference`], as in `rtvirtio-lab simulate`. A median is over groups. Cells of a phase alone make groups of
//! their own, by which the p99 of that phase is judged too.

use std::collections::BTreeMap;

use rtvirtio_iocores::utility::{Reference, Weights};
use rtvirtio_sim::scenario::PhaseKind;

use super::Campaign;
use super::cell::{Cell, CellKey, Phase, PolicyConfig, Rest};
use crate::stats::{median, range};
use crate::verdict::Verdict;

/// Of the best fixed number's utility, throughput and p99: what may be missing.
const MARGIN: f64 = 0.05;
/// Time to rest after a change, ms, and moves.
const REST_MS: f64 = 500.0;
const REST_MOVES: f64 = 5.0;
/// Time to give a core back, ms.
const BACK_MS: f64 = 2_500.0;
/// Moves a second under flapping: fewer.
const FLAPPING_MOVES: f64 = 10.0;
/// Requests behind a p99 that is judged: ten lie beyond it.
const MIN_FOR_P99: u64 = 1_000;

/// A policy in a phase.
#[derive(Debug, Clone)]
pub(super) struct Row<'a> {
    /// The phase; none: all.
    pub kind: Option<PhaseKind>,
    /// The policy.
    pub policy: PolicyConfig,
    /// At least one, each with its group and its utility.
    pub runs: Vec<Run<'a>>,
}

impl Row<'_> {
    /// The median of a figure.
    pub(super) fn median(&self, of: impl Fn(&Phase) -> f64) -> f64 {
        median(self.runs.iter().map(|(_, phase, _)| of(phase)))
    }

    /// The least requests of a run.
    pub(super) fn n(&self) -> u64 {
        self.runs.iter().map(|(_, phase, _)| phase.requests).min().unwrap_or(0)
    }

    /// Time to rest, ms; none: not judged in any run, or never.
    pub(crate) fn rest_ms(&self) -> Option<f64> {
        let rest = median(self.runs.iter().filter_map(|(_, phase, _)| rest_ms(phase)));
        rest.is_finite().then_some(rest)
    }

    /// The median of the utilities.
    pub(super) fn utility(&self) -> f64 {
        median(self.runs.iter().map(|(.., utility)| *utility))
    }
}

/// All phases in order, then the whole.
pub(crate) fn kinds(cells: &[Cell]) -> Vec<Option<PhaseKind>> {
    let is_there = |kind: &Option<PhaseKind>| cells.iter().any(|cell| cell.phase(*kind).is_some());
    PhaseKind::DISKS.into_iter().map(Some).chain([None]).filter(is_there).collect()
}

/// Seed, repetition, and what was alone.
pub(super) type Group = (u64, u32, Option<PhaseKind>);

/// A phase with its group and its utility.
pub(super) type Run<'a> = (Group, &'a Phase, f64);

/// By phase, then by policy.
pub(super) fn rows(cells: &[Cell]) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for kind in kinds(cells) {
        let mut groups: BTreeMap<Group, Vec<(PolicyConfig, &Phase)>> = BTreeMap::new();
        for cell in cells {
            if let Some(phase) = cell.phase(kind) {
                let CellKey { seed, repetition, alone, .. } = cell.key;
                let key = (seed, repetition, alone);
                groups.entry(key).or_default().push((cell.key.policy, phase));
            }
        }
        let mut by_policy: BTreeMap<PolicyConfig, Vec<Run<'_>>> = BTreeMap::new();
        for (key, group) in groups {
            let progress: Vec<_> = group.iter().map(|(_, phase)| phase.progress()).collect();
            let reference = Reference::of(&progress);
            for ((policy, phase), progress) in group.into_iter().zip(&progress) {
                let utility = Weights::default().utility(progress, &reference);
                by_policy.entry(policy).or_default().push((key, phase, utility));
            }
        }
        rows.extend(by_policy.into_iter().map(|(policy, runs)| Row { kind, policy, runs }));
    }
    rows
}

/// Infinite if throughput never came to rest; none if that is not judged.
const fn rest_ms(phase: &Phase) -> Option<f64> {
    match phase.rest {
        Rest::NotJudged => None,
        Rest::Never => Some(f64::INFINITY),
        Rest::AfterMs(ms) => Some(ms),
    }
}

pub(crate) fn name(kind: Option<PhaseKind>) -> &'static str {
    kind.map_or("whole", PhaseKind::name)
}

fn is_static(policy: PolicyConfig) -> bool {
    PolicyConfig::STATIC.contains(&policy)
}

/// All marks.
pub(super) fn judge(campaign: &Campaign) -> Vec<Verdict> {
    let Campaign { cells, alone } = campaign;
    let own = rows(cells);
    let all: Vec<Cell> = cells.iter().chain(alone).cloned().collect();
    let with_alone = rows(&all);
    let marks = Marks { cells, rows: &own };
    let tails = Marks { cells, rows: &with_alone };
    vec![
        marks.each_phase(),
        marks.whole(),
        marks.beside_static(
            "1 IOPS per I/O core",
            |_| true,
            |own, fixed| {
                let ratio = own.median(Phase::iops_per_core) / fixed.median(Phase::iops_per_core);
                (ratio >= 1.0 - MARGIN, format!("x {ratio:.3}"))
            },
        ),
        tails.beside_static(
            "1 p99",
            |row| row.n() >= MIN_FOR_P99,
            |own, fixed| {
                let ratio = own.median(|phase| phase.p99_us) / fixed.median(|phase| phase.p99_us);
                (ratio <= 1.0 + MARGIN, format!("x {ratio:.3}"))
            },
        ),
        marks.rest(),
        marks.rest_moves(),
        marks.given_back(),
        marks.flapping(),
        marks.flapping_moves(),
        verified(cells.iter().chain(alone)),
    ]
}

struct Marks<'a> {
    cells: &'a [Cell],
    rows: &'a [Row<'a>],
}

impl Marks<'_> {
    fn row(&self, kind: Option<PhaseKind>, policy: PolicyConfig) -> Option<&Row<'_>> {
        self.rows.iter().find(|row| (row.kind, row.policy) == (kind, policy))
    }

    /// The fixed number with most utility in a phase, of those that `counts`.
    fn best_static(
        &self,
        kind: Option<PhaseKind>,
        counts: impl Fn(&Row<'_>) -> bool,
    ) -> Option<&Row<'_>> {
        let fixed = self.rows.iter().filter(|row| row.kind == kind && is_static(row.policy));
        fixed.filter(|row| counts(row)).max_by(|a, b| a.utility().total_cmp(&b.utility()))
    }

    /// The phases of rtvirtio's own policy, one for each cell.
    fn own(&self) -> impl Iterator<Item = &Phase> {
        let own = self.cells.iter().filter(|cell| cell.key.policy == PolicyConfig::Dynamic);
        own.flat_map(|cell| &cell.phases)
    }

    fn each_phase(&self) -> Verdict {
        let mut parts = Vec::new();
        for kind in kinds(self.cells).into_iter().flatten() {
            let own = self.row(Some(kind), PolicyConfig::Dynamic);
            let best = self.best_static(Some(kind), |_| true);
            if let (Some(own), Some(best)) = (own, best) {
                let (own, of, best) = (own.utility(), best.policy, best.utility());
                let is_met = own >= best - MARGIN * best.abs();
                parts.push((is_met, format!("{kind} {own:.3} against {best:.3} of {of}")));
            }
        }
        let why = "utility >= 95 % of the best fixed number's in each phase";
        all("1 each phase", &parts, why)
    }

    fn whole(&self) -> Verdict {
        const MARK: &str = "1 whole trace";
        let others = self.rows.iter().filter(|row| row.kind.is_none());
        let others: Vec<&Row<'_>> =
            others.filter(|row| row.policy != PolicyConfig::Dynamic).collect();
        let Some(own) = self.row(None, PolicyConfig::Dynamic) else {
            return Verdict::of(MARK, None, "there is no cell of dynamic".to_owned());
        };
        if others.len() < PolicyConfig::ALL.len() - 1 {
            return Verdict::of(MARK, None, "policies to compare are missing".to_owned());
        }
        let listed: Vec<String> =
            others.iter().map(|row| format!("{} {:.3}", row.policy, row.utility())).collect();
        let is_ahead = others.iter().all(|row| own.utility() > row.utility());
        let why = format!("utility {:.3}, ahead of {}", own.utility(), listed.join(", "));
        Verdict::of(MARK, Some(is_ahead), why)
    }

    /// Beside the best fixed number that is worth as much or more; phases where none is pass.
    fn beside_static(
        &self,
        mark: &'static str,
        counts: impl Fn(&Row<'_>) -> bool,
        compare: impl Fn(&Row<'_>, &Row<'_>) -> (bool, String),
    ) -> Verdict {
        let mut parts = Vec::new();
        for kind in kinds(self.cells) {
            let Some(own) = self.row(kind, PolicyConfig::Dynamic).filter(|row| counts(row)) else {
                continue;
            };
            let Some(fixed) = self.best_static(kind, |row| row.utility() >= own.utility()) else {
                parts.push((true, String::new()));
                continue;
            };
            let (is_met, text) = compare(own, fixed);
            parts.push((is_met, format!("{} {text} of {}", name(kind), fixed.policy)));
        }
        let why = "within 5 % of the best fixed number of equal or better utility";
        all(mark, &parts, why)
    }

    fn rest(&self) -> Verdict {
        let times = self.own().filter_map(rest_ms).collect();
        of_values("2 rest after a change", times, "no phase can tell", |n, middle, longest| {
            let why =
                format!("median {middle:.0} ms of {n} changes (< {REST_MS}), longest {longest:.0}");
            (middle < REST_MS, why)
        })
    }

    fn rest_moves(&self) -> Verdict {
        let judged = self.own().filter(|phase| rest_ms(phase).is_some());
        let moves = judged.map(|phase| phase.moves_to_rest.into()).collect();
        of_values("2 moves until then", moves, "no phase can tell", |_, middle, most| {
            let why = format!("median {middle:.1} (<= {REST_MOVES}), most {most:.0}");
            (middle <= REST_MOVES, why)
        })
    }

    /// Where one IOThread is worth as much as two, a second one is no longer needed.
    fn given_back(&self) -> Verdict {
        let is_needless = |phase: &&Phase| {
            let of = |policy| self.row(phase.kind, policy).map(Row::utility);
            let [one, two] = PolicyConfig::STATIC.map(of);
            phase.kind.is_some_and(PhaseKind::is_steady)
                && one.zip(two).is_some_and(|(a, b)| a >= b)
        };
        let waits = self.own().filter(is_needless);
        let waits = waits.map(|phase| phase.to_one_ms.unwrap_or(f64::INFINITY));
        // One that began so had none to give back.
        let waits = waits.filter(|&ms| ms > 0.0).collect();
        let nothing = "no phase began with a core too many";
        of_values("2 core given back", waits, nothing, |n, middle, longest| {
            let why = format!("longest {longest:.0} ms of {n} (< {BACK_MS}), median {middle:.0}");
            (longest < BACK_MS, why)
        })
    }

    fn flapping(&self) -> Verdict {
        let kind = Some(PhaseKind::Flapping);
        let mut parts = Vec::new();
        if let Some(own) = self.row(kind, PolicyConfig::Dynamic) {
            for (group, _, utility) in &own.runs {
                let same = |row: &&Row<'_>| row.kind == kind && is_static(row.policy);
                let fixed = self.rows.iter().filter(same).flat_map(|row| &row.runs);
                let fixed = fixed.filter(|(key, ..)| key == group);
                let best = fixed.map(|(.., utility)| *utility).reduce(f64::max);
                if let Some(best) = best {
                    let text = format!("seed {}: {utility:.3} against {best:.3}", group.0);
                    parts.push((*utility >= best - MARGIN * best.abs(), text));
                }
            }
        }
        all("2 flapping", &parts, "utility never > 5 % below the best fixed number's")
    }

    fn flapping_moves(&self) -> Verdict {
        let flapping = self.own().filter(|phase| phase.kind == Some(PhaseKind::Flapping));
        let moves = flapping.map(|phase| phase.most_moves.into()).collect();
        of_values("2 moves under flapping", moves, "there is no such phase", |_, _, most| {
            let why = format!("{most} in the worst second (< {FLAPPING_MOVES})");
            (most < FLAPPING_MOVES, why)
        })
    }
}

/// Of values, by their number, their median and the largest; not judged without one, for which `nothing` is said.
fn of_values(
    mark: &'static str,
    values: Vec<f64>,
    nothing: &str,
    judge: impl Fn(usize, f64, f64) -> (bool, String),
) -> Verdict {
    let (n, most) = (values.len(), range(values.iter().copied()).1);
    if n == 0 {
        return Verdict::of(mark, None, nothing);
    }
    let (holds, why) = judge(n, median(values), most);
    Verdict::of(mark, Some(holds), why)
}

fn verified<'a>(cells: impl Iterator<Item = &'a Cell>) -> Verdict {
    let (mut n, mut checked, mut failed) = (0, 0, Vec::new());
    for cell in cells {
        n += 1;
        checked += cell.checked;
        failed.extend(cell.failed.as_ref().map(|why| format!("{}: {why}", cell.key.label())));
    }
    let why = match failed.is_empty() {
        true => format!("{n} cells, {checked} sectors read as written"),
        false => failed.join("; "),
    };
    Verdict::of("3 verified", (n > 0).then_some(failed.is_empty()), why)
}

/// Passed if all parts are; those that are not are named, else the first.
fn all(mark: &'static str, parts: &[(bool, String)], wanted: &str) -> Verdict {
    let missed: Vec<&str> =
        parts.iter().filter(|(is_met, _)| !is_met).map(|(_, text)| text.as_str()).collect();
    let outcome = (!parts.is_empty()).then_some(missed.is_empty());
    let why = match (parts.len(), missed.is_empty()) {
        (0, _) => format!("{wanted}: nothing to compare"),
        (n, true) => format!("{wanted}: {n} of {n}"),
        (n, false) => format!("{wanted}: not {} of {n}: {}", missed.len(), missed.join("; ")),
    };
    Verdict::of(mark, outcome, why)
}

#[cfg(test)]
mod tests;
