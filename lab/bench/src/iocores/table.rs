//! For a terminal, and what cores bring and how a trace went as plots.

use rtvirtio_sim::scenario::PhaseKind;

use super::Campaign;
use super::cell::{Cell, POINT_S, Phase, PolicyConfig};
use super::judge::{Row, name, rows};
use super::simulated::{self, Compared};
use crate::plot::{Chart, Drawing, Weight, sheet};
use crate::stats::{Spread, distinct, range};
use crate::table::Table;
use crate::verdict::{self, Verdict};

/// A row for each phase and policy, what is in doubt, and what came of each mark.
pub(super) fn table(
    campaign: &Campaign,
    compared: Option<&[Compared]>,
    verdicts: &[Verdict],
) -> String {
    let Campaign { cells, alone } = campaign;
    let mut text = medians(&rows(cells)).to_string();
    let again = rows(alone);
    if !again.is_empty() {
        text += &format!("Alone, for their p99:\n{}", medians(&again));
    }
    text.push('\n');
    for cell in cells.iter().chain(alone) {
        let key = cell.key;
        let label = format!("{}, repetition {}", key.label(), key.repetition);
        if let Some(why) = &cell.failed {
            text += &format!("FAILED {label}: {why}\n");
        } else if let Some(why) = &cell.doubt {
            let machine = &cell.machine;
            text += &format!(
                "In doubt: {label}: {why}; load {:.2}, {:.2} CPUs busy, {:.3} stolen\n",
                machine.load1, machine.busy_cores, machine.steal_cores
            );
        }
    }
    if let Some(compared) = compared {
        text += &format!("\nThe simulator beside it:\n{}\n", simulated::table(compared));
    }
    text + &verdict::lines(verdicts)
        + "\nMedians of runs. n: the least. 95 %: the interval of the p99's rank in a run. cores: IOThreads, mean; ran: what they had of CPUs. \
           compute, of: CPUs' worth of it, and what the VMs would have alone. rest: after the phase's \
           start, until throughput was within 5 % of its second half. utility: I/O and compute as parts \
           of the best run's on that seed, less 0.2 a core. In doubt: a thread that slept woke late, \
           which full CPUs can do too; such cells count.\n"
}

/// Medians of each policy in each phase.
pub(super) fn medians<'a>(rows: &'a [Row<'a>]) -> Table<'a, Row<'a>> {
    let latency =
        |of: fn(&Phase) -> f64| move |row: &Row<'_>| (row.n() > 0).then(|| row.median(of));
    Table::of(rows)
        .text("phase", |row| name(row.kind))
        .text("policy", |row| row.policy)
        .figure("runs", 0, |row| row.runs.len())
        .figure("n", 0, Row::n)
        .figure("IOPS", 0, |row| row.median(Phase::iops))
        .figure("cores", 2, |row| row.median(|phase| phase.io_cores))
        .figure("ran", 2, |row| row.median(|phase| phase.io_ran))
        .figure("IOPS/core", 0, |row| row.median(Phase::iops_per_core))
        .figure("p50 us", 0, latency(|phase| phase.p50_us))
        .figure("p99 us", 0, latency(|phase| phase.p99_us))
        .shown("95 %", |row| {
            let low = latency(|phase| phase.p99_interval_us[0])(row)?;
            Some(format!("{low:.0}–{:.0}", row.median(|phase| phase.p99_interval_us[1])))
        })
        .figure("compute", 2, |row| row.median(|phase| phase.computed))
        .figure("of", 2, |row| row.median(|phase| phase.compute_wanted))
        .figure("vCPU wait", 2, |row| row.median(|phase| phase.vcpus_waited))
        .figure("moves", 0, |row| row.median(|phase| phase.moves.into()))
        .figure("add", 0, |row| row.median(|phase| phase.added.into()))
        .figure("rem", 0, |row| row.median(|phase| phase.removed.into()))
        .figure("rest ms", 0, Row::rest_ms)
        .figure("utility", 3, Row::utility)
}

/// The project's own stands out.
const fn colour(policy: PolicyConfig) -> usize {
    match policy {
        PolicyConfig::Dynamic => 0,
        PolicyConfig::Static1 => 1,
        PolicyConfig::Static2 => 2,
        PolicyConfig::Iocm => 3,
        PolicyConfig::Spdk => 4,
    }
}

fn policies() -> Vec<(&'static str, usize)> {
    PolicyConfig::ALL.into_iter().map(|policy| (policy.name(), colour(policy))).collect()
}

/// Utility against I/O cores, a panel for each phase: up and to the left is better.
pub(super) fn pareto(rows: &[Row<'_>]) -> String {
    let panel = |kind: Option<PhaseKind>| {
        let here = || rows.iter().filter(|row| row.kind == kind);
        let all = here().flat_map(|row| row.runs.iter().map(|(.., utility)| *utility));
        let (low, high) = range(all);
        let room = 0.1 * (high - low).max(0.1);
        let chart = Chart::new(name(kind), "I/O cores", "utility", (250.0, 190.0));
        let chart = chart.x_range(0.8, 2.2).y_range(low - room, high + room);
        let of_row = |chart: Chart<'static>, row: &Row<'_>| {
            let cores = row.median(|phase| phase.io_cores);
            let point = |utility: f64| (cores, Spread::new(utility, utility, utility));
            let of = (row.policy.name(), colour(row.policy));
            let runs = row.runs.iter().map(|(.., utility)| point(*utility));
            chart.points(of, 2.0, runs).points(of, 5.0, [point(row.utility())])
        };
        here().fold(chart, of_row).draw()
    };
    let kinds = distinct(rows.iter().map(|row| row.kind));
    sheet(&policies(), 5, &kinds.into_iter().map(panel).collect::<Vec<_>>())
}

/// IOPS, cores and moves over the first seed's trace, policies over one another.
pub(super) fn timelines(cells: &[Cell]) -> String {
    let seed = cells.iter().map(|cell| cell.key.seed).min();
    let is_shown =
        |cell: &&Cell| Some(cell.key.seed) == seed && cell.key.repetition == 0 && cell.is_good();
    let shown: Vec<&Cell> = cells.iter().filter(is_shown).collect();
    let phases = shown.first().map_or(&[] as &[_], |cell| &cell.phases);
    let panel = |title, of: &dyn Fn(&Cell) -> Vec<f64>| -> Drawing {
        let mut chart = Chart::new(title, "time, s", title, (1_100.0, 150.0));
        let mut start = 0.0;
        for phase in phases {
            chart = chart.vertical(start, &[name(phase.kind)]);
            start += phase.seconds;
        }
        let of_cell = |chart: Chart<'static>, cell: &&Cell| {
            let points = of(cell).into_iter().enumerate();
            let points = points.map(|(at, value)| ((at as f64 + 0.5) * POINT_S, value));
            chart.line((cell.key.policy.name(), colour(cell.key.policy)), Weight::Thin, points)
        };
        shown.iter().fold(chart.x_range(0.0, start), of_cell).draw()
    };
    let counts = |of: &[u32], by: f64| of.iter().map(|&n| f64::from(n) / by).collect();
    let panels = [
        panel("IOPS", &|cell| counts(&cell.timeline.requests, POINT_S)),
        panel("I/O cores", &|cell| cell.timeline.io_cores.iter().map(|&n| n.into()).collect()),
        panel("moves / 100 ms", &|cell| counts(&cell.timeline.moves, 1.0)),
    ];
    sheet(&policies(), 1, &panels)
}
