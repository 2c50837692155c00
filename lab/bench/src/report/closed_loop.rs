//! The page of a closed-loop trial: each VM's latencies over time with what happened, and what the
//! background VM moved.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::svg::{Plot, Scale, px};
use crate::closed_loop::Record;

/// Renders the record as one HTML file; `notes` say how it was made.
#[must_use]
pub fn page(record: &Record, notes: &[String]) -> String {
    let vms = super::group::distinct(record.tasks.iter().map(|t| &t.vm));
    let end = record.tasks.iter().flat_map(|t| &t.timeline).map(|p| p.0).fold(1.0, f64::max);
    let complaints = record.complaints();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "The closed loop" }
                style { (PreEscaped(super::STYLE)) }
            }
            body {
                h1 { "The closed loop: a background VM starts in mid-run" }
                @for note in notes { p.note { (note) } }
                p.rule {
                    @if complaints.is_empty() { span.pass { "✓ all held" } } @else {
                        @for c in &complaints { span.fail { "✗ " (c) } " " }
                    }
                }
                p.caption {
                    "Largest latency of all tasks of a VM in each quarter of a second, taken in the guest; the \
                     dashed line is the VM's strictest target. Scale factor s = " (record.scale)
                    ". Vertical lines: 1 the background VM starts"
                    @if let Some(delay) = record.delay() { " (new plan after " (format!("{delay:.1}")) " s)" }
                    ", 2 it begins to write, 3 watch is killed and its changes are rolled back."
                }
                div.panels {
                    @for vm in vms { (latencies(record, vm.as_str(), end)) }
                    (throughput(record, end))
                }
                h3 { "Changes" }
                ul { @for (at, c) in &record.changes { li {
                    (format!("{at:.1}")) " s: " (c.reason) ": "
                    @match &c.failed {
                        Some(why) => { "not changed: " (why) },
                        None => { (c.written) " knobs changed, " (c.unmet) " targets unmet" },
                    }
                    @for (vm, cap) in &c.caps {
                        @if let Some(cap) = cap { "; " (vm) " capped at " (cap) }
                    }
                } } }
                h3 { "From the new plan until watch was killed, seen at QEMU" }
                table {
                    thead { tr { th { "Task" } th { "Target, ms" } th { "Requests" } th { "Above it" } th { "Allowed" } } }
                    tbody { @for t in &record.tasks { tr {
                        th scope="row" { (t.vm) " " (t.task) }
                        td { (t.target.as_millis_f64()) }
                        td { (t.requests) }
                        td { (super::tables::mark(t.met())) " " (t.misses) }
                        td { (format!("{:.1}", t.allowed * t.requests as f64)) }
                    } } }
                }
            }
        }
    };
    page.into_string()
}

fn latencies(record: &Record, vm: &str, end: f64) -> Markup {
    let tasks: Vec<_> = record.tasks.iter().filter(|t| t.vm.as_str() == vm).collect();
    let target = tasks.iter().map(|t| t.target.as_millis_f64()).fold(f64::INFINITY, f64::min);
    let all: Vec<(f64, f64)> = record.tasks.iter().flat_map(|t| t.timeline.clone()).collect();
    let (low, high) =
        all.iter().fold((target, target), |(l, h), p| (l.min(p.1.max(0.1)), h.max(p.1)));
    // Of all tasks, the largest in each quarter of a second.
    let mut slots = std::collections::BTreeMap::new();
    for (at, ms) in tasks.iter().flat_map(|t| &t.timeline) {
        let slot: &mut f64 = slots.entry((at * 4.0) as u64).or_insert(0.0);
        *slot = slot.max(*ms);
    }
    let points = slots.into_iter().map(|(slot, ms)| (slot as f64 / 4.0, ms));
    let plot = Plot {
        width: 580.0,
        height: 200.0,
        x: Scale::linear(0.0, end, 50.0, 570.0),
        y: Scale::log(low, high, 164.0, 14.0),
    };
    html! {
        figure {
            figcaption { b { (vm) } }
            (plot.draw(&format!("largest latency of {vm} over time"), html! {
                (plot.x_axis("time, s"))
                (plot.y_axis("latency, ms"))
                (events(&plot, record))
                path class="line s1 thin" d=(plot.curve(points)) {}
                path.target d=(plot.curve([(0.0, target), (end, target)])) {}
            }))
        }
    }
}

fn throughput(record: &Record, end: f64) -> Markup {
    let high = record.background.iter().map(|p| p.1).fold(1.0, f64::max);
    let plot = Plot {
        width: 580.0,
        height: 200.0,
        x: Scale::linear(0.0, end, 50.0, 570.0),
        y: Scale::linear(0.0, high, 164.0, 14.0),
    };
    html! {
        figure {
            figcaption { b { "background VM" } }
            (plot.draw("what the background VM moved over time", html! {
                (plot.x_axis("time, s"))
                (plot.y_axis("MB/s"))
                (events(&plot, record))
                path class="line s2 thin" d=(plot.curve(record.background.iter().copied())) {}
            }))
        }
    }
}

fn events(plot: &Plot, record: &Record) -> Markup {
    let events = [record.vm_started, record.load_started, record.rolled_back];
    html! {
        @for (number, at) in events.iter().enumerate() {
            path.target d=(format!("M{} {}V{}", px(plot.x.at(*at)), px(plot.y.to()), px(plot.y.from()))) {}
            text.tick x=(px(plot.x.at(*at) + 2.0)) y=(px(plot.y.to() + 8.0)) { (number + 1) }
        }
    }
}
