//! For a terminal, and tails and the neighbour's share as a plot.

use std::collections::BTreeSet;

use rtvirtio_cases::wilson_interval;
use rtvirtio_spec::run::Cell as KernelCell;
use rtvirtio_testbed::neighbour::Neighbour;

use super::cell::{Cell, Scheme};
use super::rows::{Row, alone, rows, worse_with_a_schedule};
use crate::plot::{Bar, Bars, Shape, sheet};
use crate::stats::{Runs, distinct, median, range, rate, runs};
use crate::table::Table;

/// A row for each case, neighbour and scheme, what schemes come to, and what was disturbed. `beside`
/// are cells of the kernel path.
pub(super) fn table(cells: &[Cell], beside: &[KernelCell]) -> String {
    let rows = rows(cells, beside);
    let mut text = Table::of(&rows)
        .text("case", |row| row.group.case())
        .text("neighbour", |row| row.group.neighbour.name())
        .text("scheme", |row| &row.scheme)
        .text("passed", |row| rate(row.passed, row.runs))
        .shown("tail/target", |row| row.tail)
        .shown("VM 0 p99, ms", |row| row.urgent)
        .shown("delivered", |row| row.delivered.map(|delivered| format!("{delivered:.3}")))
        .shown("neighbour, MB/s", |row| row.background.map(|moved| format!("{moved:.1}")))
        .figure("x left", 2, |row| row.left)
        .figure("canary ms", 1, |row| row.canary)
        .figure("busy", 2, |row| row.busy)
        .to_string();
    text += &format!("\n{}\n", totals(&rows));
    for neighbour in Neighbour::ALL {
        if let Some(alone) = alone(cells, neighbour) {
            text += &format!("Alone {} moves {alone:.1} MB/s.\n", neighbour.name());
        }
    }
    let has = |scheme| cells.iter().any(|cell| cell.key.scheme == scheme);
    if has(Scheme::Qos) && has(Scheme::None) {
        let worse = worse_with_a_schedule(cells);
        text += &format!("Tasks worse with a schedule, beyond intervals: {}\n", worse.len());
        text.extend(worse.iter().map(|worse| format!("  {worse}\n")));
    }
    text += &bounds(cells);
    for cell in cells {
        if let Some(reason) = &cell.discarded {
            let (key, repetition) = (cell.key.label(), cell.key.repetition);
            text += &format!("Disturbed: {key}, repetition {repetition}: {reason}\n");
        }
    }
    text + "passed: runs, and Wilson's interval. tail/target: the worst of all tasks and runs, at the \
            judged percentile; -: a task had too few requests to judge. VM 0: the worst of its tasks and \
            runs. delivered: the least. neighbour, x left (of what the VMs left over), canary (its p99), \
            busy (CPUs): medians of runs. In brackets 95 % intervals, for the neighbour the range of runs.\n"
}

/// The rows of one scheme beside one neighbour, over cases: neighbour by neighbour, schemes in the order of the rows.
fn totals(rows: &[Row]) -> String {
    let mut all = runs(rows, |row| (row.group.neighbour, row.scheme.clone()));
    all.sort_by_key(|runs| runs.key.0);
    type Total<'a> = Runs<'a, (Neighbour, String), Row>;
    let sum = |of: &Total<'_>, value: fn(&Row) -> usize| of.cells.iter().map(|r| value(r)).sum();
    let ends = |values: Vec<f64>, digits: usize| {
        let (low, high) = range(values);
        (low <= high).then(|| format!("{low:.digits$}–{high:.digits$}"))
    };
    let least = |of: &Total<'_>, value: &dyn Fn(&Row) -> Option<f64>| {
        range(of.cells.iter().filter_map(|row| value(row))).0
    };
    Table::of(&all)
        .text("neighbour", |of| of.key.0.name())
        .text("scheme", |of| &of.key.1)
        .text("passed", |of| rate(sum(of, |row| row.passed), sum(of, |row| row.runs)))
        .shown("tail/target", |of| {
            let tails: Option<Vec<f64>> = of.cells.iter().map(|r| Some(r.tail?.value)).collect();
            ends(tails?, 2)
        })
        .figure("delivered", 3, |of| least(of, &|row| Some(row.delivered?.value)))
        .shown("neighbour, MB/s", |of| {
            ends(of.cells.iter().filter_map(|row| Some(row.background?.value)).collect(), 1)
        })
        .figure("x left", 2, |of| least(of, &|row| row.left))
        .to_string()
}

/// How many of the plans' bounds held, by judged percentile, and how tight they were.
fn bounds(cells: &[Cell]) -> String {
    let counted = cells.iter().filter(|cell| cell.discarded.is_none());
    let tasks = counted.flat_map(|cell| &cell.tasks).filter(|task| task.percentile > 0.0);
    let bounded = tasks.filter(|task| task.bound_us.is_some());
    let mut by_percentile = runs(bounded, |task| task.percentile);
    by_percentile.sort_by(|a, b| a.key.total_cmp(&b.key));
    let line = |of: &Runs<'_, f64, super::cell::Task>| {
        let ratios = of.cells.iter().filter_map(|task| Some(task.bound_us? / task.tail_us));
        let ratios: Vec<f64> = ratios.collect();
        let (held, n) = (ratios.iter().filter(|&&ratio| ratio >= 1.0).count(), ratios.len());
        let (low, high) = wilson_interval(held as u64, n as u64);
        let (low, high) = (100.0 * low, 100.0 * high);
        format!(
            "Bounds of p{}: {held} of {n} task-runs ({low:.0}–{high:.0} %), median {:.2} times the tail, least {:.2}\n",
            of.key,
            median(ratios.iter().copied()),
            range(ratios.iter().copied()).0
        )
    };
    by_percentile.iter().map(line).collect()
}

/// Tails and the neighbour's share, scheme beside scheme: filled dots are schemes of which all runs passed. A
/// scheme of the kernel path that passed nowhere is left out.
pub(super) fn plot(cells: &[Cell], beside: &[KernelCell]) -> String {
    let mut rows = rows(cells, beside);
    let passed: BTreeSet<String> =
        rows.iter().filter(|row| row.passed > 0).map(|row| row.scheme.clone()).collect();
    rows.retain(|row| !row.scheme.starts_with("kernel") || passed.contains(&row.scheme));
    // The same colours in every campaign.
    let ours = [Scheme::Qos, Scheme::None, Scheme::Throttle].map(Scheme::name);
    let schemes = distinct(ours.into_iter().chain(rows.iter().map(|row| row.scheme.as_str())));
    let colour = |row: &Row| schemes.iter().position(|scheme| *scheme == row.scheme).unwrap_or(0);
    let bar = |row: &Row| Bar {
        name: format!("{}, {}", row.group.case(), row.group.neighbour.name()),
        colour: colour(row),
        hint: format!("{}: {}", row.scheme, rate(row.passed, row.runs)),
        ..Bar::default()
    };
    let tail = |row: &Row| Bar {
        value: row.tail,
        target: Some(1.0),
        text: match (row.tail, row.delivered) {
            (None, Some(rate)) => format!("too few: {:.0} % of a rate", rate.value * 100.0),
            _ => String::new(),
        },
        shape: Shape::Dot { is_filled: row.passed == row.runs },
        ..bar(row)
    };
    let share = |row: &Row| Bar { value: row.share, ..bar(row) };
    let panel = |x, is_log, ends, width, rows| {
        Bars { title: String::new(), x, is_log, ends, width, rows }.draw()
    };
    let tails = rows.iter().map(tail).collect();
    let shares = rows.iter().map(share).collect();
    let legend: Vec<(&str, usize)> = schemes.iter().copied().zip(0..).collect();
    sheet(
        &legend,
        2,
        &[
            panel("worst tail / target, its 95 % interval", true, vec![0.5, 1.5], 640.0, tails),
            panel("neighbour, of what it moves alone", false, vec![1.0], 640.0, shares),
        ],
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
        assert!(row.starts_with("1xH   deep-writer  qos     2/2 (34–100 %)"), "{row}");
        assert!(row.contains("0.60 (0.54–0.66)") && row.contains("6.00 (5.40–6.60)"), "{row}");
        assert!(row.contains("200.0 (200.0–200.0)    0.50"), "{row}");
        assert!(text.contains("Disturbed: 1xH strict, deep-writer, qos, repetition 1: canary"));
        assert!(!text.contains("Tasks worse"));
        // One that was disturbed each time is in the table all the same.
        let text = table(&[disturbed(0, 40.0), disturbed(0, 5.0)], &[]);
        assert!(text.lines().nth(1).unwrap().contains("1/1 (21–100 %)"), "{text}");
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
            "  1xH, deep-writer, vm0.heavy: p99 of 7.40 (6.66–8.14) ms with it, 5.50 (4.50–6.60) ms without"
        );
        assert!(found[1].contains("0.667 (0.657–0.676) delivered with it"), "{found:?}");
    }
}
