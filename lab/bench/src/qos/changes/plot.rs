//! A run over time: one SVG that stands alone, a column for each scheme.

use maud::{Markup, html};

use super::{Run, STEP, Task};
use crate::qos::cell::Scheme;
use crate::report::svg::{Plot, Scale, px};

const COLUMN: f64 = 560.0;
const HEIGHT: f64 = 150.0;
const TOP: f64 = 64.0;
const LEFT: f64 = 56.0;
/// Between two panels, for the axis of the upper one.
const GAP: f64 = 46.0;
/// Colours that differ for colour-blind readers too (Okabe and Ito).
const COLOURS: [&str; 3] = ["#009e73", "#0072b2", "#d55e00"];
const STYLE: &str = "svg{font:11px sans-serif;background:#fff}.grid{stroke:#ccc;fill:none}\
    .minor{stroke:#eee;fill:none}.axis,.tick,.name{fill:#333}.line{fill:none;stroke-width:1.2}\
    .target{fill:none;stroke:#666;stroke-dasharray:5 3}.event{stroke:#a00;stroke-width:1.2}\
    .head{font-size:14px;font-weight:bold}";

/// The first repetition of each scheme.
#[must_use]
pub fn plot(runs: &[Run]) -> String {
    let first = |scheme| runs.iter().find(|run| run.key.scheme == scheme);
    let columns: Vec<&Run> = [Scheme::None, Scheme::Qos].into_iter().filter_map(first).collect();
    let vms = columns.iter().flat_map(|run| &run.tasks).map(|task| task.vm + 1).max().unwrap_or(0);
    let height = TOP + (HEIGHT + GAP) * (vms + 1) as f64;
    let width = COLUMN * columns.len() as f64;
    let tasks = || columns.iter().flat_map(|run| &run.tasks);
    let largest = tasks().flat_map(|task| &task.largest_us).copied().max().unwrap_or(1);
    let largest = tasks().map(|task| task.target_us).fold(f64::from(largest), f64::max) / 1e3;
    let written = columns.iter().flat_map(|run| &run.written).copied().max().unwrap_or(0);
    let (largest, written) = (largest.max(1.0), megabytes(written).max(1.0));
    html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox=(format!("0 0 {} {}", px(width), px(height)))
            width=(px(width)) height=(px(height)) {
            style { (STYLE) }
            @for (index, run) in columns.iter().enumerate() {
                g transform=(format!("translate({} 0)", px(COLUMN * index as f64))) {
                    (head(run))
                    @for vm in 0..vms { (latencies(run, vm, height, largest)) }
                    (writer(run, vms, height, written))
                }
            }
        }
    }
    .into_string()
}

/// MB/s of the bytes of a step.
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6 / STEP.as_secs_f64()
}

fn head(run: &Run) -> Markup {
    let title = match run.key.scheme {
        Scheme::Qos => "with a schedule",
        _ => "without a schedule",
    };
    html! {
        text.head x=(px(LEFT)) y="18" { (title) }
        @for (index, name) in ["light", "medium", "heavy"].into_iter().enumerate() {
            @let x = LEFT + 150.0 + 80.0 * index as f64;
            path.line stroke=(COLOURS[index]) d=(format!("M{} 14h22", px(x))) {}
            text.name x=(px(x + 27.0)) y="18" { (name) }
        }
        path.target d=(format!("M{} 14h22", px(LEFT + 390.0))) {}
        text.name x=(px(LEFT + 417.0)) y="18" { "targets" }
    }
}

/// The box of a panel.
fn panel(run: &Run, index: usize, height: f64, y: impl Fn(f64, f64) -> Scale) -> Plot {
    let top = TOP + (HEIGHT + GAP) * index as f64;
    let x = Scale::linear(0.0, 4.0 * run.phase_s, LEFT, COLUMN - 14.0);
    Plot { width: COLUMN, height, x, y: y(top + HEIGHT, top) }
}

/// Vertical lines at the run's events, with their recoveries.
fn events(plot: &Plot, run: &Run) -> Markup {
    html! {
        @for event in &run.events {
            @let x = plot.x.at(event.at_s);
            path.event d=(format!("M{} {}V{}", px(x), px(plot.y.to()), px(plot.y.from()))) {
                title { (event.name) }
            }
        }
    }
}

fn latencies(run: &Run, vm: usize, height: f64, largest: f64) -> Markup {
    let plot = panel(run, vm, height, |bottom, top| Scale::log(0.2, largest, bottom, top));
    let tasks: Vec<&Task> = run.tasks.iter().filter(|task| task.vm == vm).collect();
    let mut targets: Vec<f64> = tasks.iter().map(|task| task.target_us / 1e3).collect();
    targets.dedup();
    let curve = |task: &Task| {
        let points = task.largest_us.iter().enumerate().filter(|&(_, &us)| us > 0);
        let middle = |(step, &us): (usize, &u32)| {
            ((step as f64 + 0.5) * STEP.as_secs_f64(), f64::from(us) / 1e3)
        };
        plot.curve(points.map(middle))
    };
    html! {
        (plot.x_axis("time, s"))
        (plot.y_axis(&format!("VM {}: largest latency, ms", vm + 1)))
        @for (task, colour) in tasks.iter().zip(COLOURS) {
            path.line stroke=(colour) d=(curve(task)) {}
        }
        @for target in targets {
            path.target d=(plot.curve([plot.x.ends().0, plot.x.ends().1].map(|x| (x, target)))) {}
        }
        (events(&plot, run))
        @if vm == 0 { (recoveries(&plot, run)) }
    }
}

/// What happened and how long it took to recover, above the first panel.
fn recoveries(plot: &Plot, run: &Run) -> Markup {
    html! {
        @for event in &run.events {
            @let x = plot.x.at(event.at_s) - 2.0;
            @let recovery = event.recovery_s
                .map_or("not met again".to_owned(), |s| format!("met again after {s:.1} s"));
            text.name x=(px(x)) y=(px(plot.y.to() - 19.0)) { (event.name) }
            text.name x=(px(x)) y=(px(plot.y.to() - 6.0)) { (recovery) }
        }
    }
}

fn writer(run: &Run, index: usize, height: f64, most: f64) -> Markup {
    let plot = panel(run, index, height, |bottom, top| Scale::linear(0.0, most, bottom, top));
    let points = run.written.iter().enumerate();
    let middle = |(step, &bytes): (usize, &u64)| {
        ((step as f64 + 0.5) * STEP.as_secs_f64(), megabytes(bytes))
    };
    html! {
        (plot.x_axis("time, s"))
        (plot.y_axis("deep writer, MB/s"))
        path.line stroke="#555" d=(plot.curve(points.map(middle))) {}
        (events(&plot, run))
    }
}
