//! Pass rates across cases, for each tier and neighbour.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::group::{Group, RTVIRTIO, SchemeCells, distinct};
use super::predictions;
use super::stats::{percent, wilson};
use super::svg::{Plot, Scale, cut, px};
use super::tables::mark;

const WIDTH: f64 = 380.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 92.0;
const ROW: f64 = 17.0;
const TOP: f64 = 4.0;

/// A scheme's runs over some groups.
struct Tally<'a> {
    scheme: &'a str,
    colour: usize,
    passed: usize,
    n: usize,
}

/// All of it; for more than one group.
pub(super) fn section(groups: &[Group<'_>]) -> Markup {
    let schemes = || groups.iter().flat_map(|g| &g.schemes);
    html! {
        section.group id="across" {
            h2 { "Across cases" }
            @for (tier, neighbour) in distinct(groups.iter().map(|g| (g.tier, g.neighbour))) {
                @let of: Vec<&Group<'_>> =
                    groups.iter().filter(|g| (g.tier, g.neighbour) == (tier, neighbour)).collect();
                (rates(&of, tier, neighbour))
            }
            (predictions::section(schemes()))
        }
    }
}

/// Pass rates of the cases of one tier and neighbour.
fn rates(groups: &[&Group<'_>], tier: &str, neighbour: &str) -> Markup {
    let vms: BTreeSet<u32> = groups.iter().filter_map(|g| parts(g.case).map(|p| p.0)).collect();
    let mixes = distinct(groups.iter().filter_map(|g| parts(g.case).map(|p| p.1)));
    let of = |keep: &dyn Fn((u32, &str)) -> bool| {
        tally(groups.iter().copied().filter(|g| parts(g.case).is_some_and(keep)))
    };
    html! {
        h3 { "Runs passed: " (tier) " targets, neighbour: " (neighbour) }
        p.caption { "Runs of all cases and repetitions together, with the interval of the rate." }
        div.panels {
            (panel("All cases", &tally(groups.iter().copied())))
            @if vms.len() > 1 {
                @for n in &vms {
                    (panel(&format!("{n} VM{}", if *n == 1 { "" } else { "s" }), &of(&|p| p.0 == *n)))
                }
            }
            @if mixes.len() > 1 {
                @for mix in &mixes { (panel(&format!("Tasks {mix}"), &of(&|p| p.1 == *mix))) }
            }
        }
        (matrix(groups))
    }
}

/// Number of VMs and mix of a case such as `4xL+M+H`.
fn parts(case: &str) -> Option<(u32, &str)> {
    let (vms, mix) = case.split_once('x')?;
    Some((vms.parse().ok()?, mix))
}

/// Runs by scheme, in the order of the schemes.
fn tally<'a>(groups: impl Iterator<Item = &'a Group<'a>>) -> Vec<Tally<'a>> {
    let mut all: Vec<Tally<'_>> = Vec::new();
    for scheme in groups.flat_map(|g| &g.schemes) {
        let (passed, n) = (scheme.passed(), scheme.cells.len());
        match all.iter_mut().find(|t| t.scheme == scheme.name) {
            Some(tally) => {
                tally.passed += passed;
                tally.n += n;
            }
            None => all.push(Tally { scheme: scheme.name, colour: scheme.colour, passed, n }),
        }
    }
    all.sort_by_key(|t| t.colour);
    all
}

fn panel(title: &str, tallies: &[Tally<'_>]) -> Markup {
    let bottom = TOP + ROW * tallies.len() as f64;
    let plot = Plot {
        width: WIDTH,
        height: bottom + 34.0,
        x: Scale::linear(0.0, 100.0, LEFT, WIDTH - RIGHT),
        y: Scale::linear(0.0, 1.0, bottom, TOP),
    };
    html! {
        figure {
            figcaption { b { (title) } }
            (plot.draw(&format!("runs passed: {title}"), html! {
                (plot.x_axis("runs passed, %"))
                @for (row, tally) in tallies.iter().enumerate() {
                    (bar(&plot, tally, TOP + ROW * row as f64))
                }
            }))
        }
    }
}

fn bar(plot: &Plot, tally: &Tally<'_>, y: f64) -> Markup {
    let share = tally.passed as f64 / tally.n.max(1) as f64;
    let (low, high) = wilson(tally.passed as u64, tally.n as u64);
    let at = |share: f64| plot.x.at(share * 100.0);
    let middle = y + ROW / 2.0;
    html! {
        text.label x=(px(LEFT - 6.0)) y=(px(y + 12.5)) text-anchor="end" {
            (cut(tally.scheme, 14)) title { (tally.scheme) }
        }
        rect class=(if tally.scheme == RTVIRTIO { "bar-pass" } else { "bar-other" }) x=(px(LEFT)) y=(px(y + 4.0))
            width=(px(at(share) - LEFT)) height=(px(ROW - 8.0)) {}
        @if tally.n > 0 {
            path.whisker d=(format!("M{low} {top}v6M{low} {mid}H{high}M{high} {top}v6",
                low = px(at(low)), high = px(at(high)), mid = px(middle), top = px(middle - 3.0))) {}
        }
        text.value x=(px(WIDTH - RIGHT + 8.0)) y=(px(y + 12.5)) {
            (tally.passed) "/" (tally.n)
            @if tally.n > 0 { " (" (percent(share)) " %)" }
        }
    }
}

/// Every case against every scheme.
fn matrix(groups: &[&Group<'_>]) -> Markup {
    let all = tally(groups.iter().copied());
    html! {
        div.scroll { table {
            thead { tr {
                th { "Case" }
                @for t in &all { th class=[(t.scheme == RTVIRTIO).then_some("ours")] { (t.scheme) } }
            } }
            tbody {
                @for group in groups {
                    tr {
                        th scope="row" { (group.case) }
                        @for t in &all {
                            td class=[(t.scheme == RTVIRTIO).then_some("ours")] {
                                @match group.schemes.iter().find(|s| s.name == t.scheme) {
                                    Some(scheme) => (outcome(scheme)),
                                    None => "–",
                                }
                            }
                        }
                    }
                }
            }
        } }
    }
}

fn outcome(scheme: &SchemeCells<'_>) -> Markup {
    let (passed, n) = (scheme.passed(), scheme.cells.len());
    html! {
        @if n == 0 { "–" } @else { (mark(passed == n)) " " (passed) "/" (n) }
    }
}
