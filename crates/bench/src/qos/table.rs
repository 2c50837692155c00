//! For a terminal.

use super::cell::{Cell, Scheme, Task};

/// A row for each case and scheme, and what it comes to.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let alone = cells.iter().filter(|c| c.key.scheme == Scheme::Alone).map(|c| c.background);
    let alone = median(alone.collect());
    let mut text = format!(
        "{:<9} {:<5} {:>6} {:>11} {:>9} {:>12} {:>10} {:>9} {:>9}\n",
        "case", "", "passed", "tail/target", "delivered", "writer MB/s", "x left", "canary", "busy"
    );
    let mut seen: Vec<(&str, Scheme)> = Vec::new();
    let (mut passed, mut kept) = ([0; 2], Vec::new());
    for cell in cells.iter().filter(|c| c.key.scheme != Scheme::Alone) {
        let row = (cell.key.case.as_str(), cell.key.scheme);
        if seen.contains(&row) {
            continue;
        }
        seen.push(row);
        let same = || cells.iter().filter(|c| (c.key.case.as_str(), c.key.scheme) == row);
        let tasks = |f: fn(&Task) -> f64| same().flat_map(move |c| c.tasks.iter().map(f));
        let tail = tasks(|t| t.tail_us / t.target_us).fold(0.0, f64::max);
        let is_judged = tasks(|t| t.percentile).all(|percentile| percentile > 0.0);
        let tail = if is_judged { format!("{tail:.2}") } else { "-".to_owned() };
        let delivered = tasks(|t| t.delivered).fold(f64::MAX, f64::min);
        let of_left = |c: &Cell| c.background / (alone * (1.0 - c.needed));
        let left = median(same().map(of_left).collect());
        let good = same().filter(|c| c.passed()).count();
        if row.1 == Scheme::Qos {
            passed[0] += good;
            passed[1] += same().count();
            kept.push(left);
        }
        text += &format!(
            "{:<9} {:<5} {:>3}/{:<2} {:>11} {:>9.3} {:>12.1} {:>10.2} {:>6.1} ms {:>9.2}\n",
            row.0,
            row.1.name(),
            good,
            same().count(),
            tail,
            delivered,
            median(same().map(|c| c.background / 1e6).collect()),
            left,
            median(same().map(|c| c.canary.p99.as_millis_f64()).collect()),
            median(same().map(|c| c.busy).collect()),
        );
    }
    let least = kept.iter().copied().fold(f64::MAX, f64::min);
    text += &format!(
        "\nqos: {} of {} runs passed; the writer kept at least {least:.2} of what was left (medians). \
         Alone it writes {:.1} MB/s.\n\
         tail/target: the worst of all tasks and runs, at the judged percentile; -: a task had too few \
         requests to judge. delivered: the least; x left, canary (its p99), busy: medians.\n",
        passed[0],
        passed[1],
        alone / 1e6
    );
    text
}
