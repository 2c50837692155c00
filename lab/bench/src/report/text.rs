//! The report's text twin, for a terminal of 120 columns.
//!
//! For each group a matrix of tasks × schemes, each entry `tail rate mark`
//! (ms, percent of the requested rate), then how late the machine itself was
//! under each scheme and a line per scheme. A cell that the machine disturbed
//! is listed with the reason; it counts like any other.

use std::fmt::Write as _;

use rtvirtio_spec::run::Cell;

use super::group::{Group, SchemeCells, TaskId, groups};
use super::predictions::agreement;
use super::stats::{ms, percent_down, rate, short, sig3};
use crate::verdict::Standing;

const WIDTH: usize = 120;
/// ` 12300 100%✓`: a space, the tail, the rate and the mark.
const ENTRY: usize = 12;
const TARGET: usize = 7;

/// Each task's tail, delivered rate and verdict per scheme, as plain text.
/// Control characters in names are replaced. No cells, no text.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let blocks: Vec<String> = groups(cells).iter().map(|g| group_text(g)).collect();
    let mut out = blocks.join("\n");
    for a in agreement(cells) {
        let number = |v: Option<f64>| v.map_or_else(|| "–".to_owned(), sig3);
        let _ = writeln!(
            out,
            "predictions {:<12} bound held in {} task-runs; over measured, median: bound {}, predicted {}, paper {}",
            clean(&a.scheme),
            rate(a.held, a.n),
            number(a.bound),
            number(a.predicted),
            number(a.paper)
        );
    }
    out
}

fn group_text(group: &Group<'_>) -> String {
    let tasks = group.tasks();
    let names: Vec<String> = tasks.iter().map(|t| format!("{} {}", t.vm, t.task)).collect();
    let label = names.iter().map(String::len).max().unwrap_or(0).max(4);
    let columns = ((WIDTH.saturating_sub(label + TARGET)) / ENTRY).max(1);
    let mut out = format!("{}\n", clean(&group.title()));
    let known = "tail latency, ms; delivered rate; ✓ both held in every run, ✗ not";
    let marks = [
        (Standing::WithinInterval, "~ missed within the 95 % interval"),
        (Standing::MachineLate, "m missed by no more than the machine itself was late"),
        (Standing::NotJudged, "? too few requests to judge"),
    ];
    let shown = |standing: Standing| {
        let mut runs = group.schemes.iter().flat_map(|s| tasks.iter().filter_map(|t| s.task(*t)));
        runs.any(|runs| runs.standing() == standing)
    };
    out.push_str(known);
    for (_, text) in marks.into_iter().filter(|(standing, _)| shown(*standing)) {
        out.push('\n');
        out.push_str(text);
    }
    out.push_str("\n\n");
    for schemes in group.schemes.chunks(columns) {
        let _ = write!(out, "{:<label$}{:>TARGET$}", "task", "target");
        for scheme in schemes {
            let _ = write!(out, " {:>11.11}", clean(scheme.name));
        }
        out.push('\n');
        for (id, name) in tasks.iter().zip(&names) {
            let target = group.targets(|r| r.vm == *id.vm && r.task == *id.task);
            let target = target.first().map_or("–".to_owned(), |t| short(t.as_millis_f64()));
            let _ = write!(out, "{name:<label$}{target:>TARGET$}");
            for scheme in schemes {
                out.push_str(&entry(scheme, *id));
            }
            out.push('\n');
        }
        let _ = write!(out, "{:<label$}{:>TARGET$}", "canary", "");
        for scheme in schemes {
            let late = scheme.lateness().map_or("–".to_owned(), ms);
            let mark = if scheme.disturbed().next().is_some() { "late " } else { "     " };
            let _ = write!(out, " {late:>5} {mark}");
        }
        out.push_str("\n\n");
    }
    for scheme in &group.schemes {
        out.push_str(&verdict(scheme));
    }
    out.push_str("canary: how late a thread woke up that only sleeps, p99, ms\n");
    for cell in group.schemes.iter().flat_map(SchemeCells::disturbed) {
        let reason = cell.disturbed.as_deref().unwrap_or_default();
        let key = format!("{} repetition {}", cell.key.scheme, cell.key.repetition);
        let _ = writeln!(out, "the machine was late: {}: {}", clean(&key), clean(reason));
    }
    out
}

/// One task under one scheme, [`ENTRY`] characters.
fn entry(scheme: &SchemeCells<'_>, id: TaskId<'_>) -> String {
    let Some(runs) = scheme.task(id) else { return format!(" {:>11}", "–") };
    let tail = match runs.tail() {
        Some(q) if q.value.as_millis_f64() < 0.01 => "<0.01".to_owned(),
        Some(q) => ms(q.value),
        None => "few".to_owned(),
    };
    let rate = runs.delivered().map_or("–".to_owned(), |d| format!("{}%", percent_down(d)));
    format!(" {tail:>5} {rate:>4}{}", runs.standing().mark())
}

/// How a scheme did, in a line.
fn verdict(scheme: &SchemeCells<'_>) -> String {
    let (passed, n) = (scheme.passed(), scheme.cells.len());
    let name = clean(scheme.name);
    let mark = scheme.standing().unwrap_or(Standing::NotJudged).mark();
    let dash = || "–".to_owned();
    let ratio = scheme.worst_ratio().map_or_else(dash, |r| format!("{}x", sig3(r)));
    let least = scheme.min_delivered().map_or_else(dash, |d| format!("{}%", percent_down(d)));
    let background = scheme.background_mb().map_or_else(dash, |b| format!("{} MB/s", sig3(b)));
    format!(
        "{name:<12} {mark} {:<16} passed ({} at 0.9)  worst tail/target {ratio:>7}  least rate {least:>4}  background {background}\n",
        rate(passed, n),
        scheme.passed_lax()
    )
}

/// `text` without control characters, which a terminal would obey.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
