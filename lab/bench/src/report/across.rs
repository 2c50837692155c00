//! Pass rates across cases, for each tier and neighbour.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::group::{Group, RTVIRTIO, SchemeCells};
use super::predictions;
use crate::plot::{Bar, Bars};
use crate::stats::{Runs, Spread, distinct, runs, wilson};
use crate::table::Table;
use crate::verdict::Standing;

/// A scheme's cells over some groups, by its colour and name.
type Tally<'a> = Runs<'a, (usize, &'a str), SchemeCells<'a>>;

/// Runs that passed, of how many.
fn passed(tally: &Tally<'_>) -> (usize, usize) {
    let of =
        |(passed, n), scheme: &&SchemeCells<'_>| (passed + scheme.passed(), n + scheme.cells.len());
    tally.cells.iter().fold((0, 0), of)
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
    let mut all = runs(groups.flat_map(|g| &g.schemes), |scheme| (scheme.colour, scheme.name));
    all.sort_by_key(|tally| tally.key);
    all
}

fn panel(title: &str, tallies: &[Tally<'_>]) -> Markup {
    let row = |tally: &Tally<'_>| {
        let ((_, scheme), (passed, n)) = (tally.key, passed(tally));
        let percent = 100.0 * passed as f64 / n.max(1) as f64;
        let (low, high) = wilson(passed as u64, n as u64);
        Bar {
            name: scheme.to_owned(),
            colour: if scheme == RTVIRTIO { 0 } else { 7 },
            value: (n > 0).then(|| Spread::new(percent, 100.0 * low, 100.0 * high)),
            text: if n > 0 { format!("{passed}/{n} ({percent:.0} %)") } else { "0/0".to_owned() },
            ..Bar::default()
        }
    };
    let rows = tallies.iter().map(row).collect();
    let (title, ends) = (title.to_owned(), vec![100.0]);
    let bars = Bars { title, x: "runs passed, %", is_log: false, ends, width: 380.0, rows };
    bars.draw().figure(html! {})
}

/// Every case against every scheme.
fn matrix(groups: &[&Group<'_>]) -> Markup {
    let mut table = Table::of(groups).text("Case", |group| group.case);
    for Tally { key: (_, scheme), .. } in tally(groups.iter().copied()) {
        let outcome = |of: &SchemeCells<'_>| {
            let (passed, n) = (of.passed(), of.cells.len());
            (n > 0).then(|| (Standing::of(passed == n), format!("{passed}/{n}")))
        };
        let of =
            |group: &&Group<'_>| group.schemes.iter().find(|s| s.name == scheme).and_then(outcome);
        table = table.marked(scheme, of).ours(scheme == RTVIRTIO);
    }
    table.html(|_| None)
}
