//! Predictions against what was measured.

use maud::{Markup, html};
use rtvirtio_spec::run::{Cell, TaskResult};
use serde::Serialize;

use super::group::{SchemeCells, groups};
use crate::plot::{Chart, legend};
use crate::stats::{Spread, distinct, ms, rate, sig3, wilson};
use crate::table::Table;

/// One prediction with its outcome, ms.
struct Pair<'a> {
    result: &'a TaskResult,
    scheme: &'a str,
    measured: f64,
    predicted: f64,
    bound: f64,
    paper: Option<f64>,
    paper_bound: Option<f64>,
}

impl<'a> Pair<'a> {
    /// `None` without a prediction, its bound, a measured tail, or one percentile for both.
    fn new(scheme: &'a str, result: &'a TaskResult) -> Option<Self> {
        let (judged, prediction) = (result.judged?, result.prediction.as_ref()?);
        let bound = prediction.bound?;
        (judged.percentile == prediction.percentile).then(|| Self {
            result,
            scheme,
            measured: judged.value.as_millis_f64(),
            predicted: prediction.predicted.as_millis_f64(),
            bound: bound.as_millis_f64(),
            paper: prediction.paper.map(|p| p.as_millis_f64()),
            paper_bound: prediction.paper_bound.map(|p| p.as_millis_f64()),
        })
    }
}

/// Plot and table; nothing where no scheme predicts.
pub(super) fn section<'a>(schemes: impl Iterator<Item = &'a SchemeCells<'a>>) -> Markup {
    let pairs: Vec<Pair<'_>> =
        schemes.flat_map(|s| s.results().filter_map(|r| Pair::new(s.name, r))).collect();
    if pairs.is_empty() {
        return html! {};
    }
    html! {
        h3 { "Predictions against measurements" }
        p.caption {
            "Each task of each run, at its judged percentile. A bound holds if it lies on or above the diagonal. \
             In the table, medians of ratios."
        }
        div.halves {
            div { (scatter(&pairs)) }
            (table(&agreements(&pairs)).html(|_| None))
        }
    }
}

fn scatter(pairs: &[Pair<'_>]) -> Markup {
    let (title, y) = ("predicted against measured latency", "predicted or bound, ms");
    let chart = Chart::new(title, "measured, ms", y, (578.0, 400.0)).log_x().log_y().diagonal();
    let chart = pairs.iter().fold(chart, |chart, pair| {
        let values = [(Some(pair.predicted), 0), (Some(pair.bound), 1), (pair.paper, 4)];
        let known = values.into_iter().filter_map(|(value, colour)| Some((value?, colour)));
        known.fold(chart, |chart, (value, colour)| {
            let point = (pair.measured, Spread::new(value, value, value));
            chart.points((hint(pair), colour), 3.0, [point])
        })
    });
    let mut names = vec![("predicted", 0), ("bound", 1)];
    if pairs.iter().any(|pair| pair.paper.is_some()) {
        names.push(("the paper's model", 4));
    }
    html! { (chart.draw().figure(html! {})) (legend(names)) }
}

fn hint(pair: &Pair<'_>) -> String {
    let Pair { scheme, result, predicted, bound, .. } = pair;
    let judged = result.judged.map_or_else(String::new, |q| ms(q.value));
    format!(
        "{scheme}, {} {}: measured {judged} ms, predicted {} ms, bound {} ms",
        result.vm,
        result.task,
        sig3(*predicted),
        sig3(*bound)
    )
}

/// How predictions of one scheme's task-runs agree with what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    /// The scheme.
    pub scheme: String,
    /// Task-runs with a judged tail and a prediction for that percentile.
    pub n: usize,
    /// Bounds that held.
    pub held: usize,
    /// Wilson's 95 % interval of the fraction that held.
    pub interval: (f64, f64),
    /// Median of bound over measured.
    pub bound: Option<f64>,
    /// Median of predicted over measured.
    pub predicted: Option<f64>,
    /// Median of the paper's model over measured, where it speaks.
    pub paper: Option<f64>,
    /// Task-runs with a bound on top of the paper's model.
    pub paper_n: usize,
    /// Those of them that held.
    pub paper_held: usize,
    /// Median of that bound over measured.
    pub paper_bound: Option<f64>,
}

/// The agreement of each scheme that predicts, over all cells.
#[must_use]
pub fn agreement(cells: &[Cell]) -> Vec<Agreement> {
    let groups = groups(cells);
    let pairs: Vec<Pair<'_>> = groups
        .iter()
        .flat_map(|g| &g.schemes)
        .flat_map(|s| s.results().filter_map(|r| Pair::new(s.name, r)))
        .collect();
    agreements(&pairs)
}

fn agreements(pairs: &[Pair<'_>]) -> Vec<Agreement> {
    let of_scheme = |scheme: &str| {
        let of: Vec<_> = pairs.iter().filter(|p| p.scheme == scheme).collect();
        let ratio = |value: fn(&Pair<'_>) -> Option<f64>| {
            let ratios = of.iter().filter_map(|p| Some(value(p)? / p.measured));
            Spread::of(ratios).map(|spread| spread.value)
        };
        let held = of.iter().filter(|p| p.measured <= p.bound).count();
        let paper = of.iter().filter_map(|p| Some((p.measured, p.paper_bound?)));
        Agreement {
            scheme: scheme.to_owned(),
            n: of.len(),
            held,
            interval: wilson(held as u64, of.len() as u64),
            bound: ratio(|p| Some(p.bound)),
            predicted: ratio(|p| Some(p.predicted)),
            paper: ratio(|p| p.paper),
            paper_n: paper.clone().count(),
            paper_held: paper.filter(|(measured, bound)| measured <= bound).count(),
            paper_bound: ratio(|p| p.paper_bound),
        }
    };
    distinct(pairs.iter().map(|p| p.scheme)).into_iter().map(of_scheme).collect()
}

/// A row for each scheme.
pub(super) fn table(agreements: &[Agreement]) -> Table<'_, Agreement> {
    Table::of(agreements)
        .text("Scheme", |of| &of.scheme)
        .shown("Bounds that hold", |of| Some(rate(of.held, of.n)))
        .shown("bound / measured", |of| of.bound.map(sig3))
        .shown("predicted / measured", |of| of.predicted.map(sig3))
        .shown("paper / measured", |of| of.paper.map(sig3))
        .shown("Paper's bounds", |of| Some(rate(of.paper_held, of.paper_n)))
        .shown("/ measured", |of| of.paper_bound.map(sig3))
}
