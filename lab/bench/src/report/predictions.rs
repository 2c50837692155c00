//! Predictions against what was measured.

use maud::{Markup, html};
use rtvirtio_spec::run::{Cell, TaskResult};
use serde::Serialize;

use super::group::{SchemeCells, distinct, groups};
use super::stats::{median, ms, rate, sig3, wilson};
use super::svg::{Plot, Scale, px};

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

    fn values(&self) -> impl Iterator<Item = f64> {
        [Some(self.measured), Some(self.predicted), Some(self.bound), self.paper]
            .into_iter()
            .flatten()
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
            "Each task of each run, at its judged percentile. A bound holds if it lies on or above the diagonal."
        }
        div.halves {
            figure { (scatter(&pairs)) }
            (table(&pairs))
        }
    }
}

/// Smallest and largest of the positive `values`.
fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let positive = values.filter(|v| *v > 0.0);
    positive.fold((f64::INFINITY, 0.0_f64), |(low, high), v| (low.min(v), high.max(v)))
}

fn scatter(pairs: &[Pair<'_>]) -> Markup {
    let (x_low, x_high) = span(pairs.iter().map(|p| p.measured));
    // Holds the measured values too, so that the diagonal fits.
    let (y_low, y_high) = span(pairs.iter().flat_map(Pair::values));
    let plot = Plot {
        width: 578.0,
        height: 400.0,
        x: Scale::log(x_low, x_high, 58.0, 566.0),
        y: Scale::log(y_low, y_high, 362.0, 10.0),
    };
    let (low, high) = plot.x.ends();
    html! {
        (plot.draw("predicted against measured latency", html! {
            (plot.x_axis("measured, ms"))
            (plot.y_axis("predicted or bound, ms"))
            path.diagonal d=(plot.curve([(low, low), (high, high)])) {}
            @for pair in pairs {
                @let x = plot.x.at(pair.measured);
                @if let Some(paper) = pair.paper {
                    @let y = plot.y.at(paper);
                    path.paper d=(format!("M{} {}l6 6m0 -6l-6 6", px(x - 3.0), px(y - 3.0))) { (hint(pair)) }
                }
                path.bound d=(format!("M{} {}l3.5 6h-7z", px(x), px(plot.y.at(pair.bound) - 4.0))) { (hint(pair)) }
                circle.predicted cx=(px(x)) cy=(px(plot.y.at(pair.predicted))) r="3" { (hint(pair)) }
            }
        }))
        p.legend {
            span { svg width="12" height="12" { circle.predicted cx="6" cy="6" r="3" {} } "predicted" }
            span { svg width="12" height="12" { path.bound d="M6 2l3.5 6h-7z" {} } "bound" }
            @if pairs.iter().any(|p| p.paper.is_some()) {
                span { svg width="12" height="12" { path.paper d="M3 3l6 6m0 -6l-6 6" {} } "the paper's model" }
            }
        }
    }
}

fn hint(pair: &Pair<'_>) -> Markup {
    let judged = pair.result.judged.map_or_else(String::new, |q| ms(q.value));
    html! {
        title {
            (pair.scheme) ", " (pair.result.vm) " " (pair.result.task) ": measured " (judged)
            " ms, predicted " (sig3(pair.predicted)) " ms, bound " (sig3(pair.bound)) " ms"
        }
    }
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
            median(of.iter().filter_map(|p| Some(value(p)? / p.measured)).collect())
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

fn table(pairs: &[Pair<'_>]) -> Markup {
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), sig3);
    html! {
        div.scroll { table {
            thead { tr {
                th { "Scheme" } th { "Bounds that hold" } th { "Median bound / measured" }
                th { "Median predicted / measured" } th { "Median paper / measured" }
                th { "Paper's bounds that hold" } th { "Median paper's bound / measured" }
            } }
            tbody {
                @for a in agreements(pairs) {
                    tr {
                        th scope="row" { (a.scheme) }
                        td { (rate(a.held, a.n)) }
                        td { (number(a.bound)) }
                        td { (number(a.predicted)) }
                        td { (number(a.paper)) }
                        td { (rate(a.paper_held, a.paper_n)) }
                        td { (number(a.paper_bound)) }
                    }
                }
            }
        } }
    }
}
