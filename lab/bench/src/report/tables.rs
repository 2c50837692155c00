//! The tables of a group, and a text of them for a terminal of 120 columns.
//!
//! The text has for each group a matrix of tasks × schemes, each entry `tail rate mark` (ms, percent of the
//! requested rate), with how late the machine itself was, then a row per scheme. A cell that the machine disturbed is
//! listed with the reason; it counts like any other.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use maud::{Markup, html};
use rtvirtio_cases::judge::MIN_DELIVERED;
use rtvirtio_spec::run::Cell;

use super::group::{Group, RTVIRTIO, SchemeCells, TaskId, groups};
use super::predictions;
use crate::stats::{distinct, ms, percent_down, rate, short, sig3};
use crate::table::{NOTHING, Table, printable};
use crate::verdict::Standing;

const WIDTH: usize = 120;
/// Of a scheme's name, the tail, the rate and the mark, and of what is between two columns.
const ENTRY: usize = 11;
const BETWEEN: usize = 2;

/// Each task's tail, delivered rate and verdict per scheme, as plain text.
/// Control characters in names are replaced. No cells, no text.
#[must_use]
pub fn table(cells: &[Cell]) -> String {
    let blocks: Vec<String> = groups(cells).iter().map(|g| group_text(g)).collect();
    let agreement = predictions::agreement(cells);
    match agreement.is_empty() {
        true => blocks.join("\n"),
        false => {
            let predictions = predictions::table(&agreement);
            format!("{}\nPredictions against measurements:\n{predictions}", blocks.join("\n"))
        }
    }
}

fn group_text(group: &Group<'_>) -> String {
    let tasks = group.tasks();
    let label = tasks.iter().map(|id| name(*id).chars().count()).max().unwrap_or(0).max(6);
    let columns = (WIDTH - "target".len()).saturating_sub(label) / (ENTRY + BETWEEN);
    let mut out = format!("{}\n", printable(&group.title()));
    out += "tail latency, ms; delivered rate; ✓ both held in every run, ✗ not\n";
    let marks = [
        (Standing::WithinInterval, "~ missed within the 95 % interval\n"),
        (Standing::MachineLate, "m missed by no more than the machine itself was late\n"),
        (Standing::NotJudged, "? too few requests to judge\n"),
    ];
    let shown = |standing: Standing| {
        let mut runs = group.schemes.iter().flat_map(|s| tasks.iter().filter_map(|t| s.task(*t)));
        runs.any(|runs| runs.standing() == standing)
    };
    out.extend(marks.into_iter().filter(|(standing, _)| shown(*standing)).map(|(_, text)| text));
    // The last row is the machine's own.
    let rows: Vec<Option<TaskId<'_>>> = tasks.into_iter().map(Some).chain([None]).collect();
    for schemes in group.schemes.chunks(columns.max(1)) {
        let target = |id: TaskId<'_>| {
            let targets = group.targets(|r| r.vm == *id.vm && r.task == *id.task);
            targets.first().map(|t| short(t.as_millis_f64()))
        };
        let mut table = Table::of(&rows)
            .text("task", |row| row.map_or("canary".to_owned(), name))
            .shown("target", |row| row.map_or(Some(String::new()), target));
        for scheme in schemes {
            let name: String = scheme.name.chars().take(ENTRY).collect();
            table = table.shown(&name, |row| Some(entry(scheme, *row)));
        }
        let _ = write!(out, "\n{table}");
    }
    let _ = write!(out, "\n{}", summary(group));
    out.push_str("canary: how late a thread woke up that only sleeps, p99, ms\n");
    for cell in group.schemes.iter().flat_map(SchemeCells::disturbed) {
        let reason = cell.disturbed.as_deref().unwrap_or_default();
        let key = format!("{} repetition {}", cell.key.scheme, cell.key.repetition);
        let _ = writeln!(out, "the machine was late: {}: {}", printable(&key), printable(reason));
    }
    out
}

fn name(id: TaskId<'_>) -> String {
    format!("{} {}", id.vm, id.task)
}

/// One task under one scheme, or the canary, at most [`ENTRY`] characters.
fn entry(scheme: &SchemeCells<'_>, row: Option<TaskId<'_>>) -> String {
    let Some(id) = row else {
        let mark = if scheme.disturbed().next().is_some() { "late " } else { "     " };
        return format!("{} {mark}", scheme.lateness().map_or("–".to_owned(), ms));
    };
    let Some(runs) = scheme.task(id) else { return "–".to_owned() };
    let tail = match runs.tail() {
        Some(q) if q.value.as_millis_f64() < 0.01 => "<0.01".to_owned(),
        Some(q) => ms(q.value),
        None => "few".to_owned(),
    };
    let rate = runs.delivered().map_or("–".to_owned(), |d| format!("{}%", percent_down(d)));
    format!("{tail} {rate:>4}{}", runs.standing().mark())
}

/// Who passed, and by how much.
fn summary<'a>(group: &'a Group<'a>) -> Table<'a, SchemeCells<'a>> {
    let worst = |scheme: &SchemeCells<'_>| {
        let unjudged = match scheme.unjudged() {
            0 => String::new(),
            n => format!(" ({n} with too few samples)"),
        };
        match scheme.worst_ratio() {
            Some(ratio) => {
                let is_met = ratio <= 1.0 && unjudged.is_empty();
                Some((Standing::of(is_met), format!("{}{unjudged}", sig3(ratio))))
            }
            None if unjudged.is_empty() => None,
            None => Some((Standing::Missed, format!("{NOTHING}{unjudged}"))),
        }
    };
    let least = |scheme: &SchemeCells<'_>| {
        let least = scheme.min_delivered()?;
        Some((Standing::of(least >= MIN_DELIVERED), format!("{} %", percent_down(least))))
    };
    Table::of(&group.schemes)
        .text("Scheme", |scheme| scheme.name)
        .marked("Runs passed", |scheme| {
            let standing = scheme.standing().unwrap_or(Standing::NotJudged);
            Some((standing, rate(scheme.passed(), scheme.cells.len())))
        })
        .figure("at 0.9", 0, SchemeCells::passed_lax)
        .marked("Worst tail / target", worst)
        .marked("Least rate", least)
        .shown("Background, MB/s", |scheme| scheme.background_mb().map(sig3))
        .figure("Disturbed", 0, |scheme| scheme.disturbed().count())
}

/// All tables of a group but the predictions'.
pub(super) fn summary_section(group: &Group<'_>) -> Markup {
    html! {
        h3 { "Summary" }
        (summary(group).html(|scheme| (scheme.name == RTVIRTIO).then_some("ours")))
    }
}

/// Every knob that some scheme sets, a column per scheme.
pub(super) fn settings(group: &Group<'_>) -> Markup {
    let columns: Vec<BTreeMap<String, String>> = group.schemes.iter().map(knobs).collect();
    let mut rows = knob_order(group);
    // A limit of `max` under every scheme says nothing.
    rows.retain(|knob| columns.iter().any(|c| c.get(knob).is_some_and(|v| v != "max")));
    let mut table = Table::of(&rows).text("Knob", |knob| knob);
    for (scheme, column) in group.schemes.iter().zip(&columns) {
        let value = |knob: &String| column.get(knob).cloned();
        table = table.shown(scheme.name, value).ours(scheme.name == RTVIRTIO);
    }
    html! {
        h3 { "Settings in force" }
        p.caption {
            "In the kernel's units. - is a knob that the scheme does not have; limits that no scheme \
             sets are left out; a / b are values of different repetitions."
        }
        div.settings { (table.html(|_| None)) }
    }
}

/// The knobs of one cell, as texts, in their order of application.
fn cell_knobs(cell: &Cell) -> impl Iterator<Item = (String, String)> {
    let knobs = cell.settings.knobs().into_iter().map(|(knob, value)| (knob.to_string(), value));
    knobs.chain(cell.ioprio.iter().map(|(vm, class)| (format!("{vm}: ioprio"), class.clone())))
}

fn knobs(scheme: &SchemeCells<'_>) -> BTreeMap<String, String> {
    let all = distinct(scheme.cells.iter().flat_map(|c| cell_knobs(c)));
    all.into_iter().fold(BTreeMap::new(), |mut all, (knob, value)| {
        all.entry(knob).and_modify(|v: &mut String| *v = format!("{v} / {value}")).or_insert(value);
        all
    })
}

/// Knobs in their order of application; ioprio last.
fn knob_order(group: &Group<'_>) -> Vec<String> {
    let cells = group.cells();
    let mut knobs = distinct(cells.iter().flat_map(|c| c.settings.knobs().into_keys()));
    knobs.sort();
    let vms = distinct(cells.iter().flat_map(|c| c.ioprio.keys()));
    let ioprio = vms.into_iter().map(|vm| format!("{vm}: ioprio"));
    knobs.iter().map(ToString::to_string).chain(ioprio).collect()
}

/// How quiet the machine was in each cell, and which cells it disturbed.
pub(super) fn machine(group: &Group<'_>) -> Markup {
    let table = Table::of(&group.cells())
        .text("Scheme", |cell| &cell.key.scheme)
        .figure("Repetition", 0, |cell| cell.key.repetition)
        .shown("Started", |cell| Some(&cell.started))
        .marked("Passed", |cell| Some((Standing::of(cell.passed), "")))
        .shown("Late p50, ms", |cell| Some(ms(cell.canary.p50)))
        .shown("p99, ms", |cell| Some(ms(cell.canary.p99)))
        .shown("max, ms", |cell| Some(ms(cell.canary.max)))
        .shown("Load", |cell| Some(short(cell.machine.load1)))
        .shown("Busy cores", |cell| Some(short(cell.machine.busy_cores)))
        .shown("Steal, cores", |cell| Some(short(cell.machine.steal_cores)))
        .text("Disturbed", |cell| cell.disturbed.as_deref().unwrap_or_default())
        .html(|cell| cell.disturbed.is_some().then_some("disturbed"));
    html! {
        h3 { "State of the machine" }
        p.caption {
            "Lateness of a thread that sleeps for a fixed time, load and CPU time, in each cell's window."
        }
        (table)
    }
}
