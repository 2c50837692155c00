//! The results as one HTML file: for each target and number of compute threads, IOPS, latency and
//! compute rate over the number of I/O threads, a line for each mode; and the switched load over time.
//! It loads nothing.

use maud::{Markup, html};

use super::judge::{Place, at, compute_ratio, iops, places};
use super::live::Run;
use super::{Cell, Mode, Target};
use crate::plot::{Chart, Drawing, Weight, legend};
use crate::report;
use crate::stats::{Spread, range};
use crate::verdict::{Outcome, Verdict};

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
pub(super) fn render<'a>(
    cells: &[Cell],
    live: &[Run],
    verdicts: &[Verdict],
    facts: impl Iterator<Item = &'a str>,
) -> String {
    let targets = Target::ALL.into_iter().filter(|target| {
        cells.iter().any(|cell| cell.key.io.is_some_and(|io| io.target == *target))
    });
    let body = html! {
        h1 { "How threads learn that their I/O has ended" }
        @for fact in facts { p.note { (fact) } }
        @for target in targets { (section(cells, target)) }
        @for run in live { (timeline(run)) }
        (judged(verdicts))
    };
    report::page("Completion", &body)
}

fn judged(verdicts: &[Verdict]) -> Markup {
    html! {
        h2 { "Verdicts" }
        ul {
            @for Verdict { mark, outcome, why } in verdicts {
                li {
                    @match outcome {
                        Outcome::Passed => span.pass { "✓ " },
                        Outcome::Lost => span.fail { "✗ " },
                        Outcome::NotJudged => "not judged: ",
                        Outcome::Beside => {},
                    }
                    (mark) ": " (why)
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
                @for drawing in MEASURES.iter().filter_map(|of| panel(cells, places, &modes, of)) {
                    (drawing.figure(html! {}))
                }
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

/// Lines over T, with the range of all repetitions; none without a value.
fn panel(cells: &[Cell], places: &[Place], modes: &[Mode], measure: &Measure) -> Option<Drawing> {
    let names = places.iter().map(|place| place.threads.to_string()).collect();
    let mut chart = Chart::new(measure.name, "I/O threads T", measure.name, (380.0, 196.0));
    chart = if measure.linear { chart } else { chart.log_y() };
    let mut high = 1.05;
    // The project's own last, so that it lies above the others.
    for &mode in modes {
        let points = line(cells, places, mode, measure);
        high = range(points.iter().map(|(_, spread)| spread.high).chain([high])).1;
        let medians = points.iter().map(|(x, spread)| (*x, spread.value));
        let of = (mode.name(), colour(mode));
        chart = chart.line(of, Weight::Normal, medians).points(of, 2.2, points.iter().copied());
    }
    chart = if measure.linear { chart.y_range(0.0, high) } else { chart };
    (!chart.is_empty()).then(|| chart.named_x(names).draw())
}

/// The share of waits that ended spinning while a load comes and goes.
fn timeline(run: &Run) -> Markup {
    let end = run.bins.len() as f64 * 0.01;
    let bins = run.bins.iter().enumerate();
    let shares = bins.filter_map(|(index, bin)| Some(((index as f64 + 0.5) * 0.01, bin.share()?)));
    let title = "share of waits that ended spinning over time";
    let mut chart = Chart::new(title, "time, s", "share that spun", (1150.0, 196.0));
    let ends = run.switches.iter().skip(1).map(|switch| switch.at_s).chain([end]);
    for (switch, end) in run.switches.iter().zip(ends).filter(|(switch, _)| switch.load) {
        chart = chart.shade(switch.at_s, end);
    }
    let chart = chart.line((title, 1), Weight::Thin, shares).x_range(0.0, end).y_range(0.0, 1.0);
    html! {
        h2 { "Load on and off, run " (run.repetition + 1) }
        p.caption {
            "Of the waits that ended within 10 ms, the share that ended spinning: one thread on the \
             emulated device. Shaded: " (run.compute) " threads compute on " (run.cpus) " CPUs."
        }
        (chart.draw().figure(html! {}))
    }
}
