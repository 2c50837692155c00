//! For a terminal.

use std::collections::BTreeMap;

use rtvirtio_cases::wilson_interval;
use rtvirtio_spec::run::Cell as KernelCell;

use super::cell::{Cell, Scheme};
use super::neighbour::Neighbour;
use super::rows::{Row, Total, alone, rows, totals, worse_with_a_schedule};

/// A row for each case, neighbour and scheme, what schemes come to, and what was disturbed. `beside`
/// are cells of the kernel path.
#[must_use]
pub fn table(cells: &[Cell], beside: &[KernelCell]) -> String {
    let rows = rows(cells, beside);
    let mut text = format!(
        "{:<13} {:<12} {:<19} {:<15} {:>18} {:>20} {:>20} {:>20} {:>6} {:>9} {:>5}\n",
        "case",
        "neighbour",
        "scheme",
        "passed",
        "tail/target",
        "VM 0 p99, ms",
        "delivered",
        "neighbour, MB/s",
        "x left",
        "canary",
        "busy"
    );
    text.extend(rows.iter().map(line));
    text += &format!(
        "\n{:<12} {:<19} {:<17} {:>12} {:>9} {:>16} {:>6}\n",
        "neighbour", "scheme", "passed", "tail/target", "delivered", "neighbour, MB/s", "x left"
    );
    text.extend(totals(&rows).iter().map(total));
    text.push('\n');
    for neighbour in Neighbour::ALL {
        if let Some(alone) = alone(cells, neighbour) {
            text += &format!("Alone {} moves {alone:.1} MB/s.\n", neighbour.name());
        }
    }
    if cells.iter().any(|cell| cell.key.scheme == Scheme::Qos)
        && cells.iter().any(|cell| cell.key.scheme == Scheme::None)
    {
        let worse = worse_with_a_schedule(cells);
        text += &format!("Tasks worse with a schedule, beyond intervals: {}\n", worse.len());
        text.extend(worse.iter().map(|worse| format!("  {worse}\n")));
    }
    text += &bounds(cells).unwrap_or_default();
    let disturbed = cells.iter().filter_map(|cell| Some((cell, cell.discarded.as_ref()?)));
    for (cell, reason) in disturbed {
        let (key, repetition) = (cell.key.label(), cell.key.repetition);
        text += &format!("Disturbed: {key}, repetition {repetition}: {reason}\n");
    }
    text += "passed: runs, and Wilson's interval. tail/target: the worst of all tasks and runs, at the \
             judged percentile; -: a task had too few requests to judge. VM 0: the worst of its tasks and \
             runs. delivered: the least. neighbour, x left (of what the VMs left over), canary (its p99), \
             busy (CPUs): medians of runs. In brackets 95 % intervals, for the neighbour the range of runs.\n";
    text
}

/// How many of the plans' bounds held, by judged percentile, and how tight they were.
fn bounds(cells: &[Cell]) -> Option<String> {
    let counted = cells.iter().filter(|cell| cell.discarded.is_none());
    let mut ratios: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for task in counted.flat_map(|cell| &cell.tasks).filter(|task| task.percentile > 0.0) {
        if let Some(bound) = task.bound_us {
            // Percentiles have up to two digits behind the point.
            let percentile = (task.percentile * 100.0).round() as u64;
            ratios.entry(percentile).or_default().push(bound / task.tail_us);
        }
    }
    let line = |(percentile, mut ratios): (u64, Vec<f64>)| {
        ratios.sort_by(f64::total_cmp);
        let (held, n) = (ratios.iter().filter(|&&ratio| ratio >= 1.0).count(), ratios.len());
        let (low, high) = wilson_interval(held as u64, n as u64);
        let (low, high) = (100.0 * low, 100.0 * high);
        format!(
            "Bounds of p{}: {held} of {n} task-runs ({low:.0}–{high:.0} %), median {:.2} times the tail, least {:.2}\n",
            percentile as f64 / 100.0,
            ratios[n / 2],
            ratios[0]
        )
    };
    (!ratios.is_empty()).then(|| ratios.into_iter().map(line).collect())
}

fn or_dash<T>(value: Option<T>, text: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), text)
}

fn line(row: &Row) -> String {
    format!(
        "{:<13} {:<12} {:<19} {:<15} {:>18} {:>20} {:>20} {:>20} {:>6} {:>9} {:>5}\n",
        row.group.case(),
        row.group.neighbour.name(),
        row.scheme,
        row.rate(),
        or_dash(row.tail, |tail| format!("{tail:.2}")),
        or_dash(row.urgent, |urgent| format!("{urgent:.2}")),
        or_dash(row.delivered, |delivered| format!("{delivered:.3}")),
        or_dash(row.background, |background| format!("{background:.1}")),
        or_dash(row.left, |left| format!("{left:.2}")),
        or_dash(row.canary, |canary| format!("{canary:.1} ms")),
        or_dash(row.busy, |busy| format!("{busy:.2}")),
    )
}

fn total(total: &Total) -> String {
    format!(
        "{:<12} {:<19} {:<17} {:>12} {:>9} {:>16} {:>6}\n",
        total.neighbour.name(),
        total.scheme,
        total.rate,
        or_dash(total.tail, |[low, high]| format!("{low:.2}–{high:.2}")),
        or_dash(total.delivered, |delivered| format!("{delivered:.3}")),
        or_dash(total.background, |[low, high]| format!("{low:.1}–{high:.1}")),
        or_dash(total.left, |left| format!("{left:.2}")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::cell::CellKey;

    fn cell(scheme: Scheme, repetition: u32, tail_ms: f64, n: u64) -> Cell {
        let line = format!(
            r#"{{"case":"1xH","scheme":"{}","repetition":{repetition},"device":"ref-4x250",
            "seconds":20.0,"tasks":[{{"name":"vm0.heavy","n":{n},"percentile":99.9,
            "tail_us":{tail},"tail_interval_us":[{low},{high}],"p99_us":[{tail},{low},{high}],
            "target_us":10000.0,"delivered":{delivered},"passed":{passed}}}],"background":200e6,
            "needed":0.0,"canary":{{"n":1,"p50":1,"p99":1000000,"max":1}},"busy":0.4,"at":""}}"#,
            scheme.name(),
            tail = tail_ms * 1e3,
            low = tail_ms * 900.0,
            high = tail_ms * 1100.0,
            delivered = n as f64 / 30_000.0,
            passed = tail_ms <= 10.0,
        );
        serde_json::from_str(&line).unwrap()
    }

    fn alone(cell: Cell) -> Cell {
        let key = CellKey { scheme: Scheme::Alone, ..cell.key };
        Cell { key, tasks: Vec::new(), background: 400e6, ..cell }
    }

    #[test]
    fn table_counts_runs_and_of_a_disturbed_one_its_repetition() {
        let disturbed = |repetition, tail| Cell {
            discarded: Some("canary".to_owned()),
            ..cell(Scheme::Qos, repetition, tail, 30_000)
        };
        // The second run was disturbed once.
        let cells = [
            cell(Scheme::Qos, 0, 5.0, 30_000),
            disturbed(1, 50.0),
            cell(Scheme::Qos, 1, 6.0, 30_000),
            alone(cell(Scheme::Qos, 0, 1.0, 1)),
        ];
        let text = table(&cells, &[]);
        let row = text.lines().nth(1).unwrap();
        // Wilson's interval of 2 of 2: low = 2 / (2 + 3.8415).
        assert!(row.starts_with("1xH           deep-writer  qos                 2/2 34–100 %"));
        assert!(row.contains("0.60 (0.54–0.66)") && row.contains("6.00 (5.40–6.60)"), "{row}");
        assert!(row.contains("200.0 (200.0–200.0)   0.50"), "{row}");
        assert!(text.contains("Disturbed: 1xH strict, deep-writer, qos, repetition 1: canary"));
        assert!(!text.contains("Tasks worse"));
        // One that was disturbed each time is in the table all the same.
        let text = table(&[disturbed(0, 40.0), disturbed(0, 5.0)], &[]);
        assert!(text.lines().nth(1).unwrap().contains("1/1 21–100 %"), "{text}");
    }

    #[test]
    fn table_says_how_many_bounds_held() {
        let mut cells = [5.0, 6.0, 7.0].map(|tail| cell(Scheme::Qos, 0, tail, 30_000));
        assert!(!table(&cells, &[]).contains("Bounds"));
        for cell in &mut cells {
            cell.tasks.iter_mut().for_each(|task| task.bound_us = Some(6_600.0));
        }
        let text = table(&cells, &[]);
        // Of 5, 6 and 7 ms.
        let line = text.lines().find(|line| line.starts_with("Bounds of p99.9: 2 of 3")).unwrap();
        assert!(line.ends_with("median 1.10 times the tail, least 0.94"), "{line}");
    }

    #[test]
    fn task_is_worse_only_beyond_the_intervals_of_all_runs() {
        let none = [cell(Scheme::None, 0, 5.0, 30_000), cell(Scheme::None, 1, 6.0, 30_000)];
        // 1.1 × 6 ms is 6.6; 0.9 × 7.2 ms is below, 0.9 × 7.4 ms above.
        let with = |tail, n| {
            let text = table(&[&none[..], &[cell(Scheme::Qos, 0, tail, n)]].concat(), &[]);
            text.lines().filter(|line| line.starts_with("  1xH")).map(str::to_owned).collect()
        };
        let found: Vec<String> = with(7.2, 29_800);
        assert_eq!(found, [""; 0]);
        let found: Vec<String> = with(7.4, 20_000);
        assert_eq!(
            found[0],
            "  1xH, deep-writer, vm0.heavy: p99 of 7.40 (6.66–8.14) ms with it, 6.00 (4.50–6.60) ms without"
        );
        assert!(found[1].contains("0.667 (0.657–0.676) delivered with it"), "{found:?}");
    }
}
