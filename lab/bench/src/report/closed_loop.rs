//! The page of a closed-loop trial: each VM's latencies over time with what happened, and what the
//! background VM moved.

use std::collections::BTreeMap;

use maud::{Markup, html};

use crate::closed_loop::Record;
use crate::plot::{Chart, Drawing, Weight};
use crate::stats::{distinct, range};
use crate::table::{Table, mark};
use crate::verdict::Standing;

/// Renders the record as one HTML file; `notes` say how it was made.
#[must_use]
pub fn page(record: &Record, notes: &[String]) -> String {
    let vms = distinct(record.tasks.iter().map(|t| t.vm.as_str()));
    let end = record.tasks.iter().flat_map(|t| &t.timeline).map(|p| p.0).fold(1.0, f64::max);
    let complaints = record.complaints();
    let body = html! {
        h1 { "The closed loop: a background VM starts in mid-run" }
        @for note in notes { p.note { (note) } }
        p.rule {
            @if complaints.is_empty() { span.pass { "✓ all held" } } @else {
                @for c in &complaints { (mark(Standing::Missed)) " " (c) " " }
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
            @for vm in vms { (latencies(record, vm, end).figure(html! {})) }
            (throughput(record, end).figure(html! {}))
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
        (tasks(record))
    };
    super::page("The closed loop", &body)
}

fn tasks(record: &Record) -> Markup {
    Table::of(&record.tasks)
        .text("Task", |task| format!("{} {}", task.vm, task.task))
        .figure("Target, ms", 1, |task| task.target.as_millis_f64())
        .figure("Requests", 0, |task| task.requests)
        .marked("Above it", |task| Some((Standing::of(task.met()), task.misses)))
        .figure("Allowed", 1, |task| task.allowed * task.requests as f64)
        .html(|_| None)
}

fn latencies(record: &Record, vm: &str, end: f64) -> Drawing {
    let tasks: Vec<_> = record.tasks.iter().filter(|t| t.vm.as_str() == vm).collect();
    let target = range(tasks.iter().map(|t| t.target.as_millis_f64())).0;
    let all = record.tasks.iter().flat_map(|t| &t.timeline);
    let (low, high) = range(all.map(|point| point.1.max(0.1)));
    // Of all tasks, the largest in each quarter of a second.
    let mut slots = BTreeMap::new();
    for (at, ms) in tasks.iter().flat_map(|t| &t.timeline) {
        let slot: &mut f64 = slots.entry((at * 4.0) as u64).or_insert(0.0);
        *slot = slot.max(*ms);
    }
    let points = slots.into_iter().map(|(slot, ms)| (slot as f64 / 4.0, ms));
    let chart = over_time(record, vm, "latency, ms", end).log_y().y_range(low, high);
    chart.line((vm, 1), Weight::Thin, points).horizontal(target).draw()
}

fn throughput(record: &Record, end: f64) -> Drawing {
    let points = record.background.iter().copied();
    let chart = over_time(record, "background VM", "MB/s", end);
    chart.line(("background VM", 2), Weight::Thin, points).draw()
}

fn over_time<'a>(record: &Record, title: &str, y: &'a str, end: f64) -> Chart<'a> {
    let chart = Chart::new(title, "time, s", y, (580.0, 200.0)).x_range(0.0, end);
    let events = [record.vm_started, record.load_started, record.rolled_back];
    let number = |chart: Chart<'a>, (at, name): (f64, &str)| chart.vertical(at, &[name]);
    events.into_iter().zip(["1", "2", "3"]).fold(chart, number)
}
