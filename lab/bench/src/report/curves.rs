//! Latency distributions and timelines.

use maud::{Markup, html};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::{Cell, TaskResult};
use rtvirtio_units::{Nanos, VmName};

use super::group::{Group, SchemeCells};
use crate::plot::{Chart, Weight, legend};
use crate::stats::{range, short};

/// Points that a timeline keeps: the largest latency of each of as many parts of the window.
const TIMELINE_POINTS: usize = 150;
/// Of two targets with a label the second is so many times the first at least.
const LABELS_APART: f64 = 1.25;

/// (x, y) in the units of the axes.
type Points = Vec<(f64, f64)>;

/// The complementary distributions of the most urgent VM and of all tasks.
pub(super) fn distributions(group: &Group<'_>) -> Markup {
    let urgent = group.most_urgent();
    html! {
        h3 { "Latency distributions" }
        p.caption {
            "Share of requests that took at least so long, all repetitions together; dashed lines are targets."
        }
        (legend(group.schemes.iter().map(|s| (s.name, s.colour))))
        div.halves {
            @if let Some(vm) = urgent {
                (distribution(group, &format!("{vm}, the most urgent VM"), |r| r.vm == *vm))
            }
            (distribution(group, "All tasks", |_| true))
        }
    }
}

fn distribution(group: &Group<'_>, title: &str, of: impl Fn(&TaskResult) -> bool) -> Markup {
    let y = "share of requests at least this slow";
    let mut chart = Chart::new(title, "latency, ms", y, (578.0, 340.0)).log_x().log_y();
    chart = chart.y_range(0.1, 1.0);
    let mut labelled = 0.0;
    for target in group.targets(&of).iter().map(|t| t.as_millis_f64()) {
        let label = format!("{} ms", short(target));
        let has_room = target >= labelled * LABELS_APART;
        labelled = if has_room { target } else { labelled };
        let labels = [label.as_str()];
        chart = chart.vertical(target, if has_room { &labels } else { &[] });
    }
    // rtvirtio last, so that it lies above the others.
    for scheme in group.schemes.iter().rev() {
        let results = scheme.results().filter(|r| of(r));
        let points = exceedance(results.map(|r| &r.histogram));
        chart = chart.line((scheme.name, scheme.colour), Weight::Normal, points);
    }
    chart.draw().figure(html! {})
}

/// (ms, share of samples at least this large), for every bin that has samples.
fn exceedance<'a>(histograms: impl Iterator<Item = &'a Histogram>) -> Points {
    let mut all = Histogram::new();
    histograms.for_each(|h| all.merge(h));
    let total = all.count();
    let mut below = 0;
    let point = |(latency, count): (Nanos, u64)| {
        let share = (total - below) as f64 / total as f64;
        below += count;
        (latency.as_millis_f64(), share)
    };
    all.bins().map(point).collect()
}

/// The largest latency of the most urgent VM over the window, a panel per scheme.
pub(super) fn timelines(group: &Group<'_>) -> Markup {
    let Some(vm) = group.most_urgent() else { return html! {} };
    let lines: Vec<(&SchemeCells<'_>, Vec<Points>)> = group
        .schemes
        .iter()
        .map(|s| (s, s.cells.iter().map(|c| timeline(c, vm)).collect()))
        .collect();
    let points = || lines.iter().flat_map(|(_, runs)| runs.iter().flatten());
    if points().next().is_none() {
        return html! {};
    }
    let strictest = group.targets(|r| r.vm == *vm).first().map(|t| t.as_millis_f64());
    let windows = group.schemes.iter().flat_map(|s| &s.cells).map(|c| c.window_s);
    let end = range(points().map(|p| p.0).chain(windows.filter(|w| w.is_finite()))).1;
    let (low, high) = range(points().map(|p| p.1).chain(strictest));
    let panel = |(scheme, runs): &(&SchemeCells<'_>, Vec<Points>)| {
        let chart = Chart::new(scheme.name, "time, s", "latency, ms", (380.0, 180.0));
        let mut chart = chart.log_y().x_range(0.0, end).y_range(low, high);
        for (repetition, run) in runs.iter().enumerate().rev() {
            let weight = if repetition == 0 { Weight::Thin } else { Weight::Pale };
            chart = chart.line((scheme.name, scheme.colour), weight, run.iter().copied());
        }
        strictest.into_iter().fold(chart, Chart::horizontal).draw().figure(html! {})
    };
    html! {
        h3 { "Timelines of " (vm) }
        p.caption {
            "Largest latency of " (vm) " in each interval. The dashed line is its strictest target"
            @if lines.iter().any(|(_, runs)| runs.len() > 1) { "; pale lines are further repetitions" }
            "."
        }
        div.panels { @for of in &lines { (panel(of)) } }
    }
}

/// (s, largest latency in ms) of all of the VM's tasks together.
fn timeline(cell: &Cell, vm: &VmName) -> Points {
    let tasks = || cell.tasks.iter().filter(|r| r.vm == *vm).flat_map(|r| &r.timeline);
    let last = tasks().map(|&(t, _)| t).max().unwrap_or(0);
    // Fewer intervals than parts leave parts empty, and those are not drawn.
    let part = last / TIMELINE_POINTS as u64 + 1;
    let mut parts: Vec<Option<(u64, Nanos)>> = vec![None; TIMELINE_POINTS + 1];
    for &(t, latency) in tasks().filter(|(_, latency)| *latency > Nanos::ZERO) {
        let slot = &mut parts[(t / part) as usize];
        if slot.is_none_or(|(_, most)| latency > most) {
            *slot = Some((t, latency));
        }
    }
    parts.into_iter().flatten().map(|(t, l)| (t as f64 / 1e3, l.as_millis_f64())).collect()
}
