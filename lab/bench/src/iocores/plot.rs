//! What cores bring, and how a trace went: SVGs that stand alone.

use maud::{Markup, html};
use rtvirtio_sim::scenario::PhaseKind;

use super::cell::{Cell, POINT_S, PolicyConfig};
use super::judge::{Row, name};
use crate::report::svg::{Plot, Scale, px};

const STYLE: &str = "svg{font:11px sans-serif;background:#fff}.grid{stroke:#ccc;fill:none}\
    .minor{stroke:#eee;fill:none}.axis,.tick,.name{fill:#333}.line{fill:none;stroke-width:1.1}\
    .event{stroke:#999;fill:none;stroke-dasharray:3 3}.head{font-size:13px;font-weight:bold}";
/// Colours that differ for colour-blind readers too (Okabe and Ito).
const COLOURS: [&str; 5] = ["#999999", "#56b4e9", "#009e73", "#d55e00", "#e69f00"];
/// A phase's panel of the first drawing.
const PANEL: (f64, f64) = (250.0, 190.0);
const COLUMNS: usize = 5;
const TOP: f64 = 40.0;
/// A panel of the second.
const WIDTH: f64 = 1_100.0;
const HEIGHT: f64 = 90.0;

/// What a panel shows.
type Of = fn(&Cell) -> Vec<f64>;

fn colour(policy: PolicyConfig) -> &'static str {
    let place = PolicyConfig::ALL.iter().position(|other| *other == policy).unwrap_or(0);
    COLOURS[place]
}

fn drawing(width: f64, height: f64, content: &Markup) -> String {
    html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox=(format!("0 0 {} {}", px(width), px(height)))
            width=(px(width)) height=(px(height)) {
            style { (STYLE) }
            (content)
        }
    }
    .into_string()
}

fn legend() -> Markup {
    html! {
        @for (index, policy) in PolicyConfig::ALL.into_iter().enumerate() {
            @let x = 60.0 + 110.0 * index as f64;
            circle cx=(px(x)) cy="18" r="5" fill=(colour(policy)) {}
            text.name x=(px(x + 10.0)) y="22" { (policy) }
        }
    }
}

/// Utility against I/O cores, a panel for each phase: up and to the left is better.
pub(super) fn pareto(rows: &[Row]) -> String {
    let mut kinds: Vec<Option<PhaseKind>> = rows.iter().map(|row| row.kind).collect();
    kinds.dedup();
    let (width, height) = PANEL;
    let panels = kinds.iter().enumerate().map(|(index, &kind)| {
        let (left, top) = ((index % COLUMNS) as f64 * width, (index / COLUMNS) as f64 * height);
        panel(rows, kind, left, TOP + top)
    });
    let content = html! { (legend()) @for panel in panels { (panel) } };
    let lines = kinds.len().div_ceil(COLUMNS) as f64;
    drawing(width * COLUMNS as f64, TOP + lines * height, &content)
}

fn panel(rows: &[Row], kind: Option<PhaseKind>, left: f64, top: f64) -> Markup {
    let here: Vec<&Row> = rows.iter().filter(|row| row.kind == kind).collect();
    let all = || here.iter().flat_map(|row| row.utilities.iter().map(|(_, utility)| *utility));
    let low = all().fold(f64::INFINITY, f64::min);
    let high = all().fold(f64::NEG_INFINITY, f64::max);
    let room = 0.1 * (high - low).max(0.1);
    let (width, height) = PANEL;
    let plot = Plot {
        width,
        height,
        x: Scale::linear(0.8, 2.2, left + 48.0, left + width - 12.0),
        y: Scale::linear(low - room, high + room, top + height - 44.0, top + 18.0),
    };
    html! {
        text.head x=(px(left + 48.0)) y=(px(top + 10.0)) { (name(kind)) }
        (plot.x_axis("I/O cores"))
        (plot.y_axis("utility"))
        @for row in &here {
            @let x = plot.x.at(row.io_cores);
            @for (_, utility) in &row.utilities {
                circle cx=(px(x)) cy=(px(plot.y.at(*utility))) r="2" fill=(colour(row.policy)) fill-opacity="0.5" {}
            }
            circle cx=(px(x)) cy=(px(plot.y.at(row.utility))) r="5" fill=(colour(row.policy)) {
                title { (row.policy) ": " (format!("{:.3} on {:.2} cores", row.utility, row.io_cores)) }
            }
        }
    }
}

/// IOPS, cores and moves over the first seed's trace, policies over one another.
pub(super) fn timelines(cells: &[Cell]) -> String {
    let seed = cells.iter().map(|cell| cell.key.seed).min();
    let shown: Vec<&Cell> = cells
        .iter()
        .filter(|cell| Some(cell.key.seed) == seed && cell.key.repetition == 0 && cell.is_good())
        .collect();
    let length = shown.first().and_then(|cell| cell.whole.as_ref()).map_or(1.0, |all| all.seconds);
    let most = |of: &dyn Fn(&Cell) -> f64| shown.iter().map(|cell| of(cell)).fold(1.0, f64::max);
    let most_of = |of: &[u32]| f64::from(of.iter().copied().max().unwrap_or(0));
    let iops = most(&|cell| most_of(&cell.timeline.requests) / POINT_S);
    let moves = most(&|cell| most_of(&cell.timeline.moves));
    let panels: [(&str, f64, Of); 3] = [
        ("IOPS", iops, |cell| {
            cell.timeline.requests.iter().map(|&n| f64::from(n) / POINT_S).collect()
        }),
        ("I/O cores", 2.2, |cell| cell.timeline.io_cores.iter().map(|&n| n.into()).collect()),
        ("moves / 100 ms", moves, |cell| cell.timeline.moves.iter().map(|&n| n.into()).collect()),
    ];
    let content = html! {
        (legend())
        @for (index, (title, most, of)) in panels.iter().enumerate() {
            @let top = TOP + 14.0 + (HEIGHT + 46.0) * index as f64;
            @let plot = Plot {
                width: WIDTH,
                height: HEIGHT,
                x: Scale::linear(0.0, length, 60.0, WIDTH - 14.0),
                y: Scale::linear(0.0, *most, top + HEIGHT, top),
            };
            (plot.x_axis("time, s"))
            (plot.y_axis(title))
            (boundaries(&plot, shown.first().copied(), index == 0))
            @for cell in &shown {
                @let points = of(cell).into_iter().enumerate()
                    .map(|(at, value)| ((at as f64 + 0.5) * POINT_S, value));
                path.line stroke=(colour(cell.key.policy)) d=(plot.curve(points)) {}
            }
        }
    };
    drawing(WIDTH, TOP + 14.0 + 3.0 * (HEIGHT + 46.0), &content)
}

/// Where phases begin, with their names above the first panel.
fn boundaries(plot: &Plot, cell: Option<&Cell>, is_named: bool) -> Markup {
    let mut at = 0.0;
    let mut marks = Vec::new();
    for phase in cell.iter().flat_map(|cell| &cell.phases) {
        marks.push((at, name(phase.kind)));
        at += phase.seconds;
    }
    html! {
        @for (at, kind) in marks {
            @let x = plot.x.at(at);
            path.event d=(format!("M{} {}V{}", px(x), px(plot.y.to()), px(plot.y.from()))) {}
            @if is_named { text.name x=(px(x + 2.0)) y=(px(plot.y.to() - 3.0)) { (kind) } }
        }
    }
}
