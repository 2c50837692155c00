//! Tails and the neighbour's share, scheme beside scheme, one SVG that stands alone.

use maud::{Markup, html};

use super::cell::Scheme;
use super::rows::{Bounded, Group, Row};
use crate::report::svg::{Plot, Scale, px};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 190.0;
const MIDDLE: f64 = 520.0;
const ROW: f64 = 12.0;
const GAP: f64 = 10.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 40.0;
const STYLE: &str = "svg{font:10px sans-serif;background:#fff}.grid{stroke:#ccc;fill:none}\
    .minor{stroke:#eee;fill:none}.axis,.tick,.name{fill:#333}.target{stroke:#c00;fill:none}\
    .none{fill:#777;stroke:#fff;stroke-width:3px;paint-order:stroke}";
/// Colours that differ for colour-blind readers too (Okabe and Ito); the eighth starts over.
const COLOURS: [&str; 7] =
    ["#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// The drawing: filled dots are schemes of which all runs passed. A scheme of the kernel path that passed nowhere is left out.
pub(super) fn render(rows: &[Row]) -> String {
    let passed = |scheme: &str| rows.iter().any(|row| row.scheme == scheme && row.passed > 0);
    let rows: Vec<&Row> =
        rows.iter().filter(|r| !r.scheme.starts_with("kernel") || passed(&r.scheme)).collect();
    // The same colours in every campaign.
    let ours = [Scheme::None, Scheme::Qos, Scheme::Throttle].map(Scheme::name);
    let mut schemes: Vec<&str> = ours.to_vec();
    for row in &rows {
        if !schemes.contains(&row.scheme.as_str()) {
            schemes.push(&row.scheme);
        }
    }
    let colour = |row: &Row| {
        let index = schemes.iter().position(|scheme| *scheme == row.scheme).unwrap_or(0);
        COLOURS[index % COLOURS.len()]
    };
    let places = places(&rows);
    let bottom = places.last().map_or(TOP, |(_, y)| y + ROW + GAP);
    let plot = |x| Plot {
        width: WIDTH,
        height: bottom + BOTTOM,
        x,
        y: Scale::linear(0.0, 1.0, bottom, TOP),
    };
    let tails = plot(tail_scale(&rows));
    let shares = plot(Scale::linear(0.0, 1.0, MIDDLE, WIDTH - 20.0));
    let drawn = html! {
        style { (STYLE) }
        @for (index, scheme) in schemes.iter().enumerate() {
            @let x = LEFT + 105.0 * index as f64;
            rect x=(px(x)) y="10" width="10" height="10" fill=(COLOURS[index % COLOURS.len()]) {}
            text.name x=(px(x + 14.0)) y="19" { (scheme) }
        }
        (tails.x_axis("worst tail / target, its 95 % interval"))
        path.target d=(format!("M{} {}V{}", px(tails.x.at(1.0)), px(TOP), px(bottom))) {}
        (shares.x_axis("neighbour, of what it moves alone"))
        (names(&places))
        @for (row, y) in &places {
            (tail(&tails, row, *y, colour(row)))
            (share(&shares, row, *y, colour(row)))
        }
    };
    html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox=(format!("0 0 {WIDTH} {}", px(bottom + BOTTOM)))
            width=(WIDTH) height=(px(bottom + BOTTOM)) { (drawn) }
    }
    .into_string()
}

/// Each row with its top.
fn places<'a>(rows: &[&'a Row]) -> Vec<(&'a Row, f64)> {
    let mut y = TOP;
    let mut last: Option<&Group> = None;
    let place = |row: &&'a Row| {
        if last.is_some_and(|group| *group != row.group) {
            y += GAP;
        }
        last = Some(&row.group);
        let here = y;
        y += ROW;
        (*row, here)
    };
    rows.iter().map(place).collect()
}

/// Holds the target and all intervals.
fn tail_scale(rows: &[&Row]) -> Scale {
    let tails = || rows.iter().filter_map(|row| row.tail);
    let low = tails().map(|tail| tail.low).filter(|low| *low > 0.0).fold(0.5, f64::min);
    let high = tails().map(|tail| tail.high).fold(1.5, f64::max);
    Scale::log(low, high, LEFT, MIDDLE - 40.0)
}

fn names(places: &[(&Row, f64)]) -> Markup {
    let groups: Vec<_> = places.chunk_by(|a, b| a.0.group == b.0.group).collect();
    html! {
        @for rows in groups {
            @let (row, top) = rows[0];
            @let y = top + ROW * rows.len() as f64 / 2.0 + 2.0;
            text.name x=(px(LEFT - 8.0)) y=(px(y)) text-anchor="end" {
                (row.group.case()) ", " (row.group.neighbour.name())
            }
        }
    }
}

/// A dot with its interval.
fn tail(plot: &Plot, row: &Row, top: f64, colour: &str) -> Markup {
    let y = top + ROW / 2.0;
    let Some(Bounded { value, low, high }) = row.tail else {
        return html! {
            text.none x=(px(plot.x.to())) y=(px(y + 3.0)) text-anchor="end" {
                "too few requests: " (row.delivered.map_or(String::new(), |d| format!("{:.0} %", d.value * 100.0)))
                " of a rate"
            }
        };
    };
    html! {
        path d=(format!("M{} {}H{}", px(plot.x.at(low)), px(y), px(plot.x.at(high)))) stroke=(colour) {}
        circle cx=(px(plot.x.at(value))) cy=(px(y)) r="3.5" stroke=(colour)
            fill=(if row.passed == row.runs { colour } else { "#fff" }) {
            title { (row.scheme) ": " (row.rate()) }
        }
    }
}

/// A bar with the range of its runs.
fn share(plot: &Plot, row: &Row, top: f64, colour: &str) -> Markup {
    let Some(Bounded { value, low, high }) = row.share else { return html! {} };
    let (from, y) = (plot.x.from(), top + ROW / 2.0);
    html! {
        rect x=(px(from)) y=(px(top + 1.0)) height=(px(ROW - 2.0)) width=(px(plot.x.at(value) - from))
            fill=(colour) {
            title { (row.scheme) ": " (format!("{value:.2}")) }
        }
        path d=(format!("M{} {}H{}", px(plot.x.at(low)), px(y), px(plot.x.at(high)))) stroke="#000" {}
    }
}
