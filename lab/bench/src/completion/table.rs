//! Medians of all cells for a terminal, and the verdicts.

use super::judge::{Outcome, Place, Spread, Verdict, at, compute_ratio, places};
use super::{Cell, IoResult, Mode};

/// The table.
#[must_use]
pub fn render(cells: &[Cell], verdicts: &[Verdict]) -> String {
    let mut text = String::new();
    if !cells.is_empty() {
        text += &format!(
            "{:<9} {:>2} {:>2} {:<13} {:>4} {:>8} {:>8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>7} {:>5} \
             {:>6} {:>6} {:>6} {:>6} {:>6} {:>6} {:>7}\n",
            "target",
            "C",
            "T",
            "mode",
            "runs",
            "kIOPS",
            "mean us",
            "p50",
            "p99",
            "p99.9",
            "max",
            "n",
            "compute",
            "spun",
            "io s",
            "comp s",
            "all s",
            "others",
            "steal",
            "load",
            "canary"
        );
    }
    let mut last = None;
    for place in places(cells) {
        if last.is_some_and(|last: Place| last.target != place.target) {
            text.push('\n');
        }
        last = Some(place);
        for mode in Mode::ALL {
            let here = at(cells, place, mode);
            if !here.is_empty() {
                text += &row(cells, place, mode, &here);
            }
        }
    }
    if !cells.is_empty() {
        let cpus = cells.iter().map(|cell| cell.cpus).max().unwrap_or(0);
        text += &format!(
            "\nMedians of so many runs on {cpus} CPUs. T, C: threads that read and that compute; n: \
             the fewest requests of a run, and - a percentile with fewer than 10 of these beyond it; \
             max: of all runs; compute: rate of C alone in the same repetition; spun: of all \
             requests, the share whose end was seen by looking; io, comp, all s: CPU s of I/O threads, \
             compute threads, the process, of {:.1} s; others: CPUs that were busy with something else; \
             steal: CPUs that the hypervisor took; canary: p99 lateness of a sleeping thread, ms.\n\n",
            cells.iter().map(|cell| cell.seconds).fold(0.0, f64::max)
        );
    }
    for Verdict { outcome, text: question } in verdicts {
        text += &format!("{:<4} {question}\n", outcome.name());
    }
    let count = |wanted| verdicts.iter().filter(|verdict| verdict.outcome == wanted).count();
    if !verdicts.is_empty() {
        text += &format!(
            "{} pass, {} miss, {} not judged\n",
            count(Outcome::Pass),
            count(Outcome::Miss),
            count(Outcome::NotJudged)
        );
    }
    text
}

fn row(cells: &[Cell], place: Place, mode: Mode, here: &[&Cell]) -> String {
    let middle = |value: &dyn Fn(&Cell) -> Option<f64>| {
        Spread::of(here.iter().filter_map(|cell| value(cell))).map(|spread| spread.median)
    };
    let io = |value: fn(&IoResult) -> f64| {
        middle(&|cell| cell.result.as_ref().map(value)).unwrap_or(f64::NAN)
    };
    let results = || here.iter().filter_map(|cell| cell.result.as_ref());
    let n = results().map(|result| result.n).min().unwrap_or(0);
    let highest = rtvirtio_cases::judged_percentile(n).map_or(0.0, |p| p.get());
    let tail = |percentile: f64, value| {
        if percentile > highest { "-".to_owned() } else { format!("{:.1}", io(value)) }
    };
    let compute = middle(&|cell| compute_ratio(cells, cell));
    let others =
        middle(&|cell| Some((cell.machine.busy_cores - cell.cpu.process / cell.seconds).max(0.0)));
    let plain = |value: fn(&Cell) -> f64| middle(&|cell| Some(value(cell))).unwrap_or(f64::NAN);
    format!(
        "{:<9} {:>2} {:>2} {:<13} {:>4} {:>8.2} {:>8.1} {:>8.1} {:>8} {:>9} {:>9.0} {:>8} {:>7} \
         {:>5.2} {:>6.2} {:>6.2} {:>6.2} {:>6.2} {:>6.2} {:>6.2} {:>7.2}\n",
        place.target,
        place.compute,
        place.threads,
        mode,
        here.len(),
        io(|result| result.iops / 1e3),
        io(|result| result.mean_us),
        io(|result| result.p50_us),
        tail(99.0, |result| result.p99_us),
        tail(99.9, |result| result.p999_us),
        results().map(|result| result.max_us).fold(0.0, f64::max),
        n,
        compute.map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
        io(|result| result.spun),
        plain(|cell| cell.cpu.io),
        plain(|cell| cell.cpu.compute),
        plain(|cell| cell.cpu.process),
        others.unwrap_or(f64::NAN),
        plain(|cell| cell.machine.steal_cores),
        plain(|cell| cell.machine.load1),
        plain(|cell| cell.canary.p99.as_millis_f64()),
    )
}
