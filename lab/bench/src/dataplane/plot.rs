//! Bars of IOPS and of CPU per request, one SVG that stands alone.

use maud::{Markup, html};

use super::marks::{Medians, rows};
use super::server::ServerKind;
use super::{Case, Cell};
use crate::report::svg::{Plot, Scale, px};

const WIDTH: f64 = 760.0;
const LEFT: f64 = 170.0;
const ROW: f64 = 11.0;
const GAP: f64 = 8.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 40.0;
const STYLE: &str = "svg{font:10px sans-serif;background:#fff}.grid{stroke:#ccc;fill:none}\
    .minor{stroke:#eee;fill:none}.axis,.tick,.name{fill:#333}";

/// Colours that differ for colour-blind readers too (Okabe and Ito).
const fn colour(server: ServerKind) -> &'static str {
    match server {
        ServerKind::Rtvirtio => "#0072b2",
        ServerKind::RtvirtioFixed => "#56b4e9",
        ServerKind::Qsd => "#d55e00",
        ServerKind::Socket => "#cc79a7",
        ServerKind::File => "#999999",
    }
}

/// The drawing.
pub(super) fn render(cells: &[Cell]) -> String {
    let rows = rows(cells);
    let bars: Vec<_> = rows
        .iter()
        .map(|(case, servers)| (*case, servers.iter().map(|(key, m)| (*key, m)).collect()))
        .collect();
    let height: f64 = bars.iter().map(|(_, b): &(Case, Vec<_>)| ROW * b.len() as f64 + GAP).sum();
    let panel = |index: usize, title: &str, of: &dyn Fn(&Medians) -> Option<f64>| {
        let (left, right) = if index == 0 { (LEFT, 450.0) } else { (480.0, WIDTH - 20.0) };
        let values: Vec<f64> =
            bars.iter().flat_map(|(_, b)| b).filter_map(|(_, m)| of(m)).collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(0.0, f64::max);
        let bottom = TOP + height;
        let plot = Plot {
            width: WIDTH,
            height: bottom + BOTTOM,
            x: Scale::log(low / 1.5, high, left, right),
            y: Scale::linear(0.0, 1.0, bottom, TOP),
        };
        html! { (plot.x_axis(title)) (draw(&plot, &bars, of)) }
    };
    let drawn = html! {
        style { (STYLE) }
        (legend())
        (names(&bars))
        (panel(0, "IOPS", &|m| Some(m.iops)))
        (panel(1, "server CPU per request, us", &|m| m.cpu_us))
    };
    let total = TOP + height + BOTTOM;
    html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox=(format!("0 0 {WIDTH} {}", px(total)))
            width=(WIDTH) height=(px(total)) { (drawn) }
    }
    .into_string()
}

type Bars<'a> = Vec<(Case, Vec<((ServerKind, usize), &'a Medians)>)>;

/// The top of each case.
fn tops(bars: &Bars<'_>) -> Vec<f64> {
    let mut y = TOP;
    let top = |(_, servers): &(Case, Vec<_>)| {
        let here = y;
        y += ROW * servers.len() as f64 + GAP;
        here
    };
    bars.iter().map(top).collect()
}

fn draw(plot: &Plot, bars: &Bars<'_>, of: &dyn Fn(&Medians) -> Option<f64>) -> Markup {
    html! {
        @for ((_, servers), top) in bars.iter().zip(tops(bars)) {
            @for (index, ((server, _), medians)) in servers.iter().enumerate() {
                @if let Some(value) = of(medians) {
                    rect x=(px(plot.x.from())) y=(px(top + ROW * index as f64)) height=(px(ROW - 2.0))
                        width=(px(plot.x.at(value) - plot.x.from())) fill=(colour(*server)) {
                        title { (server.name()) ": " (format!("{value:.1}")) }
                    }
                }
            }
        }
    }
}

fn names(bars: &Bars<'_>) -> Markup {
    html! {
        @for ((case, servers), top) in bars.iter().zip(tops(bars)) {
            text.name x=(px(LEFT - 6.0)) y=(px(top + ROW * servers.len() as f64 / 2.0 + 2.0))
                text-anchor="end" { (case.name()) }
        }
    }
}

fn legend() -> Markup {
    let servers = [
        ServerKind::Rtvirtio,
        ServerKind::RtvirtioFixed,
        ServerKind::Qsd,
        ServerKind::Socket,
        ServerKind::File,
    ];
    html! {
        @for (index, server) in servers.into_iter().enumerate() {
            @let x = LEFT + 110.0 * index as f64;
            rect x=(px(x)) y="12" width="10" height="10" fill=(colour(server)) {}
            text.name x=(px(x + 14.0)) y="21" { (server.name()) }
        }
    }
}
