//! The tail of every task as a bar, one panel per scheme (the paper's Fig. 7).

use maud::{Markup, html};
use rtvirtio_cases::judge::MIN_DELIVERED;

use super::group::{Group, SchemeCells, TaskId, TaskRuns};
use crate::plot::{Bar, Bars};
use crate::stats::{Spread, distinct, ms, percent_down, range};
use crate::table::mark;
use crate::verdict::Standing;

/// The panels of all schemes on one common axis.
pub(super) fn section(group: &Group<'_>) -> Markup {
    let tasks = group.tasks();
    let ends = ends(group, &tasks);
    let panel = |scheme: &SchemeCells<'_>| {
        let rows = tasks.iter().map(|&id| row(scheme, id)).collect();
        let (title, ends) = (scheme.name.to_owned(), ends.clone());
        let bars = Bars { title, x: "latency, ms", is_log: true, ends, width: 380.0, rows };
        let (passed, n) = (scheme.passed(), scheme.cells.len());
        bars.draw().figure(html! {
            " " (mark(Standing::of(n > 0 && passed == n))) " " (passed) "/" (n) " runs passed"
        })
    };
    html! {
        h3 { "Tail latency of each task" }
        p.caption {
            "Judged percentile: " (percentiles(group)) "; values in ms. The dark mark is the target: left of it is \
             passing, right of it failing. Whiskers are the interval of the percentile. A rate is shown where less than "
            (MIN_DELIVERED) " of it was delivered."
            @if group.schemes.iter().any(|s| s.cells.len() > 1) {
                " Dots are the repetitions, the bar is their median; ✓ means that all passed."
            }
        }
        div.panels { @for scheme in &group.schemes { (panel(scheme)) } }
    }
}

/// Smallest and largest latency to draw, ms.
fn ends(group: &Group<'_>, tasks: &[TaskId<'_>]) -> Vec<f64> {
    let runs: Vec<TaskRuns<'_>> =
        group.schemes.iter().flat_map(|s| tasks.iter().filter_map(|&id| s.task(id))).collect();
    let tails = runs.iter().filter_map(TaskRuns::tail).flat_map(|q| [q.low, q.high]);
    let values = tails.chain(runs.iter().filter_map(TaskRuns::target));
    let (low, high) = range(values.map(|t| t.as_millis_f64()).filter(|v| *v > 0.0));
    // A bar needs some length even where it is the shortest.
    vec![low / 2.0, high * 1.2]
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

fn row(scheme: &SchemeCells<'_>, id: TaskId<'_>) -> Bar {
    let runs = scheme.task(id);
    let tail = runs.as_ref().and_then(TaskRuns::tail);
    let passed = runs.as_ref().is_some_and(TaskRuns::passed);
    let short = runs.as_ref().and_then(TaskRuns::delivered).filter(|&d| d < MIN_DELIVERED);
    let rate = short.map_or(String::new(), |rate| format!(" rate {}%", percent_down(rate)));
    let text = match (&runs, tail) {
        (None, _) => "–".to_owned(),
        (_, None) => "too few samples".to_owned(),
        (_, Some(q)) => format!("{} {}{rate}", ms(q.value), Standing::of(passed).mark()),
    };
    let hint = tail.map_or(String::new(), |q| {
        let [value, low, high] = [q.value, q.low, q.high].map(ms);
        format!("p{}: {value} ms, interval {low}–{high} ms", q.percentile)
    });
    let value = tail.map(|q| {
        let [value, low, high] = [q.value, q.low, q.high].map(|t| t.as_millis_f64());
        Spread::new(value, low, high)
    });
    let judged = runs.iter().flat_map(TaskRuns::judged);
    Bar {
        name: format!("{} {}", id.vm, id.task),
        colour: usize::from(!passed),
        value,
        dots: judged.map(|q| q.value.as_millis_f64()).collect(),
        target: runs.as_ref().and_then(TaskRuns::target).map(|t| t.as_millis_f64()),
        text,
        hint,
        ..Bar::default()
    }
}
