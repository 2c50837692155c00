//! The tail of every task as a bar, one panel per scheme (the paper's Fig. 7).

use maud::{Markup, html};
use rtvirtio_cases::judge::MIN_DELIVERED;

use super::group::{Group, SchemeCells, TaskId, TaskRuns, distinct};
use super::stats::{ms, percent_down, short};
use super::svg::{Plot, Scale, cut, px};

const WIDTH: f64 = 380.0;
const LEFT: f64 = 84.0;
/// Room for the value, the mark and the delivered fraction.
const RIGHT: f64 = 112.0;
const ROW: f64 = 17.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 34.0;

/// The panels of all schemes on one common axis.
pub(super) fn section(group: &Group<'_>) -> Markup {
    let tasks = group.tasks();
    let (low, high) = range(group, &tasks);
    let bottom = TOP + ROW * tasks.len() as f64;
    let plot = Plot {
        width: WIDTH,
        height: bottom + BOTTOM,
        x: Scale::log(low, high, LEFT, WIDTH - RIGHT),
        y: Scale::linear(0.0, tasks.len() as f64, bottom, TOP),
    };
    html! {
        h3 { "Tail latency of each task" }
        p.caption {
            "Judged percentile: " (percentiles(group)) ". The dark mark is the target: left of it is passing, \
             right of it failing. Whiskers are the interval of the percentile. A rate is shown where less than "
            (MIN_DELIVERED) " of it was delivered."
            @if group.schemes.iter().any(|s| s.cells.len() > 1) {
                " Dots are the repetitions, the bar is their median; ✓ means that all passed."
            }
        }
        div.panels {
            @for scheme in &group.schemes {
                figure {
                    figcaption {
                        b { (scheme.name) } " "
                        @let (passed, n) = (scheme.passed(), scheme.cells.len());
                        @if n > 0 && passed == n { span.pass { "✓" } } @else { span.fail { "✗" } }
                        " " (passed) "/" (n) " runs passed"
                    }
                    (plot.draw(&format!("tail latency of each task under {}", scheme.name), html! {
                        @for (row, id) in tasks.iter().enumerate() {
                            (bar(&plot, scheme, *id, TOP + ROW * row as f64))
                        }
                        (plot.x_axis("latency, ms"))
                        @for (row, id) in tasks.iter().enumerate() {
                            (marks(&plot, scheme, *id, TOP + ROW * row as f64))
                        }
                        text.tick x=(px(WIDTH - RIGHT + 6.0)) y="10" { "ms" }
                    }))
                }
            }
        }
    }
}

/// Smallest and largest latency to draw, ms.
fn range(group: &Group<'_>, tasks: &[TaskId<'_>]) -> (f64, f64) {
    let runs: Vec<TaskRuns<'_>> =
        group.schemes.iter().flat_map(|s| tasks.iter().filter_map(|&id| s.task(id))).collect();
    let tails = runs.iter().filter_map(TaskRuns::tail);
    let targets = runs.iter().filter_map(TaskRuns::target);
    let values = tails.flat_map(|q| [q.low, q.high]).chain(targets).map(|t| t.as_millis_f64());
    let (low, high) = values
        .filter(|v| *v > 0.0)
        .fold((f64::INFINITY, 0.0_f64), |(low, high), v| (low.min(v), high.max(v)));
    // A bar needs some length even where it is the shortest.
    (low / 2.0, high * 1.2)
}

/// `L p99, M p99.9 or p99`: the judged percentiles by task name.
fn percentiles(group: &Group<'_>) -> String {
    let results = group.schemes.iter().flat_map(SchemeCells::results);
    let judged: Vec<_> =
        results.filter_map(|r| Some((r.task.as_str(), r.judged?.percentile))).collect();
    let of = |task: &str| {
        let each = distinct(judged.iter().filter(|j| j.0 == task).map(|j| j.1));
        let texts: Vec<String> = each.iter().map(|p| format!("p{p}")).collect();
        format!("{task} {}", texts.join(" or "))
    };
    let tasks: Vec<String> = distinct(judged.iter().map(|j| j.0)).into_iter().map(of).collect();
    if tasks.is_empty() { "none (too few samples)".to_owned() } else { tasks.join(", ") }
}

/// The row's regions, bar and texts, beneath the grid.
fn bar(plot: &Plot, scheme: &SchemeCells<'_>, id: TaskId<'_>, y: f64) -> Markup {
    let name = format!("{} {}", id.vm, id.task);
    let runs = scheme.task(id);
    let target = runs.as_ref().and_then(TaskRuns::target).map(|t| plot.x.at(t.as_millis_f64()));
    let (left, right) = (plot.x.from(), plot.x.to());
    let rect = |class: &str, from: f64, to: f64, inset: f64| {
        html! {
            rect class=(class) x=(px(from)) y=(px(y + inset)) width=(px((to - from).max(0.0)))
                height=(px(ROW - 2.0 * inset)) {}
        }
    };
    html! {
        text.label x=(px(LEFT - 6.0)) y=(px(y + 12.5)) text-anchor="end" {
            (cut(&name, 12)) title { (name) }
        }
        @if let Some(target) = target {
            (rect("region-pass", left, target, 0.5))
            (rect("region-fail", target, right, 0.5))
        } @else {
            (rect("region-none", left, right, 0.5))
        }
        @match runs.as_ref().and_then(|r| Some((r, r.tail()?))) {
            Some((runs, tail)) => {
                (rect(if runs.passed() { "bar-pass" } else { "bar-fail" }, left,
                    plot.x.at(tail.value.as_millis_f64()), 4.0))
                (verdict(runs, &ms(tail.value), y))
            },
            None => text.value x=(px(right + 6.0)) y=(px(y + 12.5)) {
                @match runs { Some(_) => "too few samples", None => "–" }
            },
        }
    }
}

/// Value, mark and, where it is short, the delivered rate, beside the row.
fn verdict(runs: &TaskRuns<'_>, value: &str, y: f64) -> Markup {
    let class = if runs.passed() { "value pass" } else { "value fail" };
    html! {
        text class=(class) x=(px(WIDTH - RIGHT + 6.0)) y=(px(y + 12.5)) {
            (value) @if runs.passed() { " ✓" } @else { " ✗" }
            @if let Some(rate) = runs.delivered().filter(|&d| d < MIN_DELIVERED) {
                " rate " (percent_down(rate)) "%"
            }
        }
    }
}

/// Target, whisker and repetitions, above the grid.
fn marks(plot: &Plot, scheme: &SchemeCells<'_>, id: TaskId<'_>, y: f64) -> Markup {
    let Some(runs) = scheme.task(id) else { return html! {} };
    let judged = runs.judged();
    let middle = y + ROW / 2.0;
    html! {
        @if let Some(target) = runs.target() {
            path.mark d=(format!("M{} {}v{}", px(plot.x.at(target.as_millis_f64())), px(y + 1.0), px(ROW - 2.0))) {
                title { "target " (short(target.as_millis_f64())) " ms" }
            }
        }
        @if let Some(tail) = runs.tail() {
            @let (low, high) = (plot.x.at(tail.low.as_millis_f64()), plot.x.at(tail.high.as_millis_f64()));
            path.whisker d=(format!("M{low} {top}v6M{low} {mid}H{high}M{high} {top}v6",
                low = px(low), high = px(high), mid = px(middle), top = px(middle - 3.0))) {
                title { "p" (tail.percentile) ": " (ms(tail.value)) " ms, interval " (ms(tail.low)) "–" (ms(tail.high)) " ms" }
            }
        }
        @if judged.len() > 1 {
            @for q in &judged {
                circle.dot cx=(px(plot.x.at(q.value.as_millis_f64()))) cy=(px(middle)) r="1.7" {}
            }
        }
    }
}
