//! The results as one HTML file: for each target and number of compute threads, IOPS, latency and
//! compute rate over the number of I/O threads, a line for each mode; and the switched load over time.
//! It loads nothing.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::judge::{Outcome, Place, Spread, Verdict, at, compute_ratio, iops, places};
use super::live::Run;
use super::{Cell, Mode, Target};
use crate::report::STYLE;
use crate::report::svg::{Plot, Scale, legend, line_class, px};

/// What a panel shows: its name, of which cell what, and whether from 0 to 1 at least or over decades.
struct Measure {
    name: &'static str,
    value: fn(&[Cell], &Cell) -> Option<f64>,
    linear: bool,
}

const MEASURES: [Measure; 4] = [
    Measure { name: "kIOPS", value: |_, cell| iops(cell).map(|iops| iops / 1e3), linear: false },
    Measure {
        name: "mean latency, us",
        value: |_, cell| cell.result.as_ref().map(|result| result.mean_us),
        linear: false,
    },
    Measure {
        name: "p99.9, us",
        // Only where it can be told.
        value: |_, cell| {
            let result = cell.result.as_ref()?;
            result.judged.filter(|judged| judged.percentile >= 99.9).map(|_| result.p999_us)
        },
        linear: false,
    },
    Measure { name: "compute rate of C alone", value: compute_ratio, linear: true },
];

/// Renders what there is; `facts` say how it was made.
#[must_use]
pub fn render(cells: &[Cell], live: &[Run], verdicts: &[Verdict], facts: &[String]) -> String {
    let targets = Target::ALL.into_iter().filter(|target| {
        cells.iter().any(|cell| cell.key.io.is_some_and(|io| io.target == *target))
    });
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Completion" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "How threads learn that their I/O has ended" }
                @for fact in facts { p.note { (fact) } }
                @for target in targets { (section(cells, target)) }
                @for run in live { (timeline(run)) }
                (judged(verdicts))
            }
        }
    };
    page.into_string()
}

fn judged(verdicts: &[Verdict]) -> Markup {
    html! {
        h2 { "Verdicts" }
        ul {
            @for Verdict { outcome, text } in verdicts {
                li {
                    @match outcome {
                        Outcome::Pass => span.pass { "✓ " },
                        Outcome::Miss => span.fail { "✗ " },
                        Outcome::NotJudged => "not judged: ",
                        Outcome::Beside => {},
                    }
                    (text)
                }
            }
        }
    }
}

/// The class of a mode's lines: the project's own stands out.
fn colour(mode: Mode) -> usize {
    match mode {
        Mode::Adaptive => 0,
        _ => 1 + Mode::ALL.iter().position(|&one| one == mode).unwrap_or(0),
    }
}

fn section(cells: &[Cell], target: Target) -> Markup {
    let all: Vec<Place> =
        places(cells).into_iter().filter(|place| place.target == target).collect();
    let modes: Vec<Mode> = Mode::ALL
        .into_iter()
        .filter(|&mode| all.iter().any(|&place| !at(cells, place, mode).is_empty()))
        .collect();
    html! {
        h2 { (target) }
        (legend(modes.iter().map(|&mode| (mode.name(), colour(mode)))))
        p.caption {
            "Medians over repetitions, with the range of all, by the number of I/O threads T. Latencies \
             run from submission to the moment at which the thread knows. p99.9 is left out where fewer \
             than 10 requests are beyond it."
        }
        @for places in all.chunk_by(|a, b| a.compute == b.compute) {
            h3 { (places[0].compute) " compute threads" }
            div.panels {
                @for measure in &MEASURES { (panel(cells, places, &modes, measure)) }
            }
        }
    }
}

/// A mode's line: (index of T, values).
fn line(cells: &[Cell], places: &[Place], mode: Mode, measure: &Measure) -> Vec<(f64, Spread)> {
    let point = |(index, &place): (usize, &Place)| {
        let values = at(cells, place, mode);
        let values = values.iter().filter_map(|cell| (measure.value)(cells, cell));
        Some((index as f64, Spread::of(values)?))
    };
    places.iter().enumerate().filter_map(point).collect()
}

fn panel(cells: &[Cell], places: &[Place], modes: &[Mode], measure: &Measure) -> Markup {
    let lines: Vec<(Mode, Vec<(f64, Spread)>)> =
        modes.iter().map(|&mode| (mode, line(cells, places, mode, measure))).collect();
    let spreads = || lines.iter().flat_map(|(_, points)| points.iter().map(|(_, spread)| spread));
    if spreads().next().is_none() {
        return html! {};
    }
    let low = spreads().map(|spread| spread.low).fold(f64::INFINITY, f64::min);
    let high = spreads().map(|spread| spread.high).fold(0.0, f64::max);
    let (top, bottom) = (14.0, 160.0);
    let plot = Plot {
        width: 380.0,
        height: 196.0,
        x: Scale::linear(-0.2, places.len() as f64 - 0.8, 50.0, 370.0),
        y: if measure.linear {
            Scale::linear(0.0, high.max(1.05), bottom, top)
        } else {
            Scale::log(low, high, bottom, top)
        },
    };
    let label = format!("{} over T, {} C{}", measure.name, places[0].target, places[0].compute);
    html! {
        figure {
            figcaption { b { (measure.name) } }
            (plot.draw(&label, html! {
                (plot.y_axis(measure.name))
                @for (index, place) in places.iter().enumerate() {
                    text.tick x=(px(plot.x.at(index as f64))) y=(px(bottom + 13.0)) text-anchor="middle" {
                        (place.threads)
                    }
                }
                text.axis x=(px(f64::midpoint(plot.x.from(), plot.x.to()))) y=(px(bottom + 28.0))
                    text-anchor="middle" { "I/O threads T" }
                // The project's own last, so that it lies above the others.
                @for (mode, points) in &lines {
                    path class=(line_class(colour(*mode)))
                        d=(plot.curve(points.iter().map(|(x, spread)| (*x, spread.median)))) {
                        title { (mode) }
                    }
                    @for (x, spread) in points { (dot(&plot, *x, spread, *mode)) }
                }
            }))
        }
    }
}

/// A median with the range of all repetitions.
fn dot(plot: &Plot, x: f64, spread: &Spread, mode: Mode) -> Markup {
    let (x, low, high) = (plot.x.at(x), plot.y.at(spread.low), plot.y.at(spread.high));
    html! {
        path.whisker d=(format!("M{} {}V{}", px(x), px(low), px(high))) {}
        circle.dot cx=(px(x)) cy=(px(plot.y.at(spread.median))) r="2.2" {
            title { (mode) ": " (format!("{:.3}", spread.median)) }
        }
    }
}

/// The share of waits that ended spinning while a load comes and goes.
fn timeline(run: &Run) -> Markup {
    let end = run.bins.len() as f64 * 0.01;
    let plot = Plot {
        width: 1150.0,
        height: 196.0,
        x: Scale::linear(0.0, end, 50.0, 1140.0),
        y: Scale::linear(0.0, 1.0, 160.0, 14.0),
    };
    let shares = run
        .bins
        .iter()
        .enumerate()
        .filter_map(|(index, bin)| Some(((index as f64 + 0.5) * 0.01, bin.share()?)));
    let ends = run.switches.iter().skip(1).map(|switch| switch.at_s).chain([end]);
    html! {
        h2 { "Load on and off, run " (run.repetition + 1) }
        p.caption {
            "Of the waits that ended within 10 ms, the share that ended spinning: one thread on the \
             emulated device. Shaded: " (run.compute) " threads compute on " (run.cpus) " CPUs."
        }
        figure {
            (plot.draw("share of waits that ended spinning over time", html! {
                @for (switch, end) in run.switches.iter().zip(ends).filter(|(switch, _)| switch.load) {
                    @let (from, to) = (plot.x.at(switch.at_s), plot.x.at(end));
                    rect.region-fail x=(px(from)) y=(px(plot.y.to())) width=(px(to - from))
                        height=(px(plot.y.from() - plot.y.to())) {}
                }
                (plot.x_axis("time, s"))
                (plot.y_axis("share that spun"))
                path class="line s1 thin" d=(plot.curve(shares)) {}
            }))
        }
    }
}
