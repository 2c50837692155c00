//! The tables of a group: summary, settings in force, state of the machine.

use std::collections::BTreeMap;

use maud::{Markup, html};
use rtvirtio_cases::judge::MIN_DELIVERED;
use rtvirtio_spec::run::Cell;

use super::group::{Group, RTVIRTIO, SchemeCells, distinct};
use super::stats::{ms, percent_down, rate, short, sig3};
use crate::verdict::Standing;

const DASH: &str = "–";

fn or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| DASH.to_owned())
}

fn row_class(scheme: &str) -> Option<&'static str> {
    (scheme == RTVIRTIO).then_some("ours")
}

/// ✓ or ✗ with its colour.
pub(super) fn mark(passed: bool) -> Markup {
    html! {
        @if passed { span.pass { "✓" } } @else { span.fail { "✗" } }
    }
}

/// A standing's mark with its colour.
pub(super) fn standing_mark(standing: Option<Standing>) -> Markup {
    let standing = standing.unwrap_or(Standing::NotJudged);
    html! {
        @match standing {
            Standing::Met => { (mark(true)) },
            Standing::Missed => { (mark(false)) },
            other => { span.unsure { (other.mark()) } },
        }
    }
}

/// Who passed, and by how much.
pub(super) fn summary(group: &Group<'_>) -> Markup {
    html! {
        h3 { "Summary" }
        div.scroll { table {
            thead { tr {
                th { "Scheme" } th { "Runs passed (interval)" } th { "Worst tail / target" }
                th { "Least delivered rate" } th { "Background, MB/s" } th { "Cells disturbed" }
            } }
            tbody {
                @for scheme in &group.schemes {
                    tr class=[row_class(scheme.name)] {
                        th scope="row" { (scheme.name) }
                        td { (passed(scheme)) }
                        td { (worst(scheme)) }
                        td { (least(scheme)) }
                        td { (or_dash(scheme.background_mb().map(sig3))) }
                        td { (scheme.disturbed().count()) }
                    }
                }
            }
        } }
    }
}

fn passed(scheme: &SchemeCells<'_>) -> Markup {
    let (passed, n) = (scheme.passed(), scheme.cells.len());
    html! { (standing_mark(scheme.standing())) " " (rate(passed, n)) }
}

fn worst(scheme: &SchemeCells<'_>) -> Markup {
    let unjudged = scheme.unjudged();
    html! {
        @match scheme.worst_ratio() {
            Some(ratio) => { (mark(ratio <= 1.0)) " " (sig3(ratio)) },
            None => (DASH),
        }
        @if unjudged > 0 { " (" span.fail { "✗" } " " (unjudged) " with too few samples)" }
    }
}

fn least(scheme: &SchemeCells<'_>) -> Markup {
    html! {
        @match scheme.min_delivered() {
            Some(least) => { (mark(least >= MIN_DELIVERED)) " " (percent_down(least)) " %" },
            None => (DASH),
        }
    }
}

/// Every knob that some scheme sets, a column per scheme.
pub(super) fn settings(group: &Group<'_>) -> Markup {
    let columns: Vec<BTreeMap<String, String>> = group.schemes.iter().map(knobs).collect();
    let rows = knob_order(group);
    let value = |column: &BTreeMap<String, String>, knob: &str| column.get(knob).cloned();
    // A limit of `max` under every scheme says nothing.
    let telling =
        |knob: &&String| columns.iter().any(|c| value(c, knob).is_some_and(|v| v != "max"));
    let shown: Vec<&String> = rows.iter().filter(telling).collect();
    html! {
        h3 { "Settings in force" }
        p.caption {
            "In the kernel's units. " (DASH) " is a knob that the scheme does not have; limits that no scheme \
             sets are left out; a / b are values of different repetitions."
        }
        div.scroll { table.settings {
            thead { tr {
                th { "Knob" }
                @for scheme in &group.schemes { th class=[row_class(scheme.name)] { (scheme.name) } }
            } }
            tbody {
                @for knob in shown {
                    tr {
                        th scope="row" { (knob) }
                        @for (scheme, column) in group.schemes.iter().zip(&columns) {
                            td class=[row_class(scheme.name)] { (or_dash(value(column, knob))) }
                        }
                    }
                }
            }
        } }
    }
}

/// The knobs of one cell, as texts, in their order of application.
fn cell_knobs(cell: &Cell) -> impl Iterator<Item = (String, String)> {
    let knobs = cell.settings.knobs().into_iter().map(|(knob, value)| (knob.to_string(), value));
    knobs.chain(cell.ioprio.iter().map(|(vm, class)| (format!("{vm}: ioprio"), class.clone())))
}

fn scheme_knobs(scheme: &SchemeCells<'_>) -> Vec<(String, String)> {
    distinct(scheme.cells.iter().flat_map(|c| cell_knobs(c)))
}

fn knobs(scheme: &SchemeCells<'_>) -> BTreeMap<String, String> {
    scheme_knobs(scheme).into_iter().fold(BTreeMap::new(), |mut all, (knob, value)| {
        all.entry(knob).and_modify(|v: &mut String| *v = format!("{v} / {value}")).or_insert(value);
        all
    })
}

/// Knobs in their order of application; ioprio last.
fn knob_order(group: &Group<'_>) -> Vec<String> {
    let cells = group.cells();
    let settings = cells.iter().flat_map(|c| c.settings.knobs().into_keys());
    let mut knobs = distinct(settings);
    knobs.sort();
    let vms = distinct(cells.iter().flat_map(|c| c.ioprio.keys()));
    let ioprio = vms.into_iter().map(|vm| format!("{vm}: ioprio"));
    knobs.iter().map(ToString::to_string).chain(ioprio).collect()
}

/// How quiet the machine was in each cell, and which cells it disturbed.
pub(super) fn machine(group: &Group<'_>) -> Markup {
    html! {
        h3 { "State of the machine" }
        p.caption {
            "Lateness of a thread that sleeps for a fixed time, load and CPU time, in each cell's window."
        }
        div.scroll { table {
            thead { tr {
                th { "Scheme" } th { "Repetition" } th { "Started" } th { "Passed" }
                th { "Late p50, ms" } th { "p99, ms" } th { "max, ms" }
                th { "Load" } th { "Busy cores" } th { "Steal, cores" } th.text { "Disturbed" }
            } }
            tbody {
                @for cell in group.cells() {
                    tr class=[cell.disturbed.is_some().then_some("disturbed")] {
                        th scope="row" { (cell.key.scheme) }
                        td { (cell.key.repetition) }
                        td { (cell.started) }
                        td { (mark(cell.passed)) }
                        td { (ms(cell.canary.p50)) }
                        td { (ms(cell.canary.p99)) }
                        td { (ms(cell.canary.max)) }
                        td { (short(cell.machine.load1)) }
                        td { (short(cell.machine.busy_cores)) }
                        td { (short(cell.machine.steal_cores)) }
                        td.text { (cell.disturbed.as_deref().unwrap_or("")) }
                    }
                }
            }
        } }
    }
}
