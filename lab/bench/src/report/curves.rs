//! Latency distributions and timelines.

use maud::{Markup, html};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::{Cell, TaskResult};
use rtvirtio_units::{Nanos, VmName};

use super::group::{Group, SchemeCells};
use super::svg::{Plot, Scale, legend, line_class};

/// Points that a timeline keeps: the largest latency of each of as many parts of the window.
const TIMELINE_POINTS: usize = 150;

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
    let targets: Vec<f64> = group.targets(&of).iter().map(|t| t.as_millis_f64()).collect();
    let curves: Vec<(&SchemeCells<'_>, Points)> = group
        .schemes
        .iter()
        .map(|s| (s, exceedance(s.results().filter(|r| of(r)).map(|r| &r.histogram))))
        .collect();
    let points = || curves.iter().flat_map(|(_, points)| points);
    let xs = points().map(|p| p.0).chain(targets.iter().copied());
    let (low, high) = xs.fold((f64::INFINITY, 0.0_f64), |(l, h), x| (l.min(x), h.max(x)));
    let least = points().map(|p| p.1).fold(1.0, f64::min);
    let plot = Plot {
        width: 578.0,
        height: 330.0,
        x: Scale::log(low, high, 58.0, 566.0),
        y: Scale::log(least.min(0.1), 1.0, 292.0, 10.0),
    };
    html! {
        figure {
            figcaption { b { (title) } }
            (plot.draw(&format!("latency distributions: {title}"), html! {
                (plot.x_axis("latency, ms"))
                (plot.y_axis("share of requests at least this slow"))
                (plot.target_lines(&targets))
                // rtvirtio last, so that it lies above the others.
                @for (scheme, points) in curves.iter().rev() {
                    path class=(line_class(scheme.colour)) d=(plot.curve(points.iter().copied())) {
                        title { (scheme.name) }
                    }
                }
            }))
        }
    }
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
    let end = points().map(|p| p.0).chain(windows.filter(|w| w.is_finite())).fold(0.0, f64::max);
    let ys = points().map(|p| p.1).chain(strictest);
    let (low, high) = ys.fold((f64::INFINITY, 0.0_f64), |(l, h), y| (l.min(y), h.max(y)));
    let plot = Plot {
        width: 380.0,
        height: 180.0,
        x: Scale::linear(0.0, end, 50.0, 370.0),
        y: Scale::log(low, high, 144.0, 8.0),
    };
    html! {
        h3 { "Timelines of " (vm) }
        p.caption {
            "Largest latency of " (vm) " in each interval. The dashed line is its strictest target"
            @if lines.iter().any(|(_, runs)| runs.len() > 1) { "; pale lines are further repetitions" }
            "."
        }
        div.panels {
            @for (scheme, runs) in &lines {
                figure {
                    figcaption { b { (scheme.name) } }
                    (plot.draw(&format!("largest latency of {vm} over time under {}", scheme.name), html! {
                        (plot.x_axis("time, s"))
                        (plot.y_axis("latency, ms"))
                        @for run in runs.iter().skip(1) {
                            path class=(format!("{} pale", line_class(scheme.colour))) d=(plot.curve(run.iter().copied())) {}
                        }
                        @if let Some(run) = runs.first() {
                            path class=(format!("{} thin", line_class(scheme.colour))) d=(plot.curve(run.iter().copied())) {}
                        }
                        @if let Some(target) = strictest {
                            path.target d=(plot.curve([(0.0, target), (end, target)])) {}
                        }
                    }))
                }
            }
        }
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
