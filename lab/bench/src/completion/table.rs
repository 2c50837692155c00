//! Medians of all cells for a terminal, and the verdicts.

use super::judge::{Place, at, compute_ratio, places};
use super::{Cell, IoResult, Mode};
use crate::stats::{Runs, range};
use crate::table::{NOTHING, Table};
use crate::verdict::{self, Outcome, Verdict};

/// The cells of a mode at a place.
type Row<'a> = Runs<'a, (Place, Mode), Cell>;

/// The median of what readers had.
fn io(row: &Row<'_>, value: fn(&IoResult) -> f64) -> Option<f64> {
    row.known(|cell| cell.result.as_ref().map(value))
}

fn least_requests(row: &Row<'_>) -> u64 {
    row.cells.iter().filter_map(|cell| Some(cell.result.as_ref()?.n)).min().unwrap_or(0)
}

/// A percentile's median, if it can be told of each run.
fn tail(row: &Row<'_>, percentile: f64, value: fn(&IoResult) -> f64) -> Option<f64> {
    let highest = rtvirtio_cases::judged_percentile(least_requests(row))?.get();
    if percentile > highest { None } else { io(row, value) }
}

fn others(cell: &Cell) -> f64 {
    (cell.machine.busy_cores - cell.cpu.process / cell.seconds).max(0.0)
}

/// The table.
pub(super) fn render(cells: &[Cell], verdicts: &[Verdict]) -> String {
    let mut text = String::new();
    if !cells.is_empty() {
        let row = |place| move |mode| Row { key: (place, mode), cells: at(cells, place, mode) };
        let all = places(cells).into_iter().flat_map(|place| Mode::ALL.map(row(place)));
        let rows: Vec<Row<'_>> = all.filter(|row| !row.cells.is_empty()).collect();
        let max = |row: &Row<'_>| {
            range(row.cells.iter().filter_map(|cell| Some(cell.result.as_ref()?.max_us))).1
        };
        let compute = |row: &Row<'_>| row.known(|cell| compute_ratio(cells, cell));
        let table = Table::of(&rows)
            .text("target", |row| row.key.0.target)
            .figure("C", 0, |row| row.key.0.compute)
            .figure("T", 0, |row| row.key.0.threads)
            .text("mode", |row| row.key.1)
            .figure("runs", 0, Runs::n)
            .figure("kIOPS", 2, |row| io(row, |result| result.iops / 1e3))
            .figure("mean us", 1, |row| io(row, |result| result.mean_us))
            .figure("p50", 1, |row| io(row, |result| result.p50_us))
            .figure("p99", 1, |row| tail(row, 99.0, |result| result.p99_us))
            .figure("p99.9", 1, |row| tail(row, 99.9, |result| result.p999_us))
            .figure("max", 0, max)
            .figure("n", 0, least_requests)
            .figure("compute", 3, compute)
            .figure("spun", 2, |row| io(row, |result| result.spun))
            .figure("io s", 2, |row| row.median(|cell| cell.cpu.io))
            .figure("comp s", 2, |row| row.median(|cell| cell.cpu.compute))
            .figure("all s", 2, |row| row.median(|cell| cell.cpu.process))
            .figure("others", 2, |row| row.median(others))
            .figure("steal", 2, |row| row.median(|cell| cell.machine.steal_cores))
            .figure("load", 2, |row| row.median(|cell| cell.machine.load1))
            .figure("canary", 2, |row| row.median(|cell| cell.canary.p99.as_millis_f64()));
        let cpus = cells.iter().map(|cell| cell.cpus).max().unwrap_or(0);
        text = format!(
            "{table}\nMedians of so many runs on {cpus} CPUs. T, C: threads that read and that compute; n: \
             the fewest requests of a run, and {NOTHING} a percentile with fewer than 10 of these beyond it; \
             max: of all runs; compute: rate of C alone in the same repetition; spun: of all \
             requests, the share whose end was seen by looking; io, comp, all s: CPU s of I/O threads, \
             compute threads, the process, of {:.1} s; others: CPUs that were busy with something else; \
             steal: CPUs that the hypervisor took; canary: p99 lateness of a sleeping thread, ms.\n\n",
            range(cells.iter().map(|cell| cell.seconds)).1
        );
    }
    text += &verdict::lines(verdicts);
    let count = |wanted| verdicts.iter().filter(|verdict| verdict.outcome == wanted).count();
    if !verdicts.is_empty() {
        let [passed, lost, not_judged] =
            [Outcome::Passed, Outcome::Lost, Outcome::NotJudged].map(count);
        text += &format!("{passed} pass, {lost} LOST, {not_judged} not judged\n");
    }
    text
}
