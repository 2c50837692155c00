//! The report of a benchmark: one self-contained HTML file, and its text twin for a terminal.
//!
//! A *group* is one case under one tier of targets beside one neighbour; each
//! group has its own tables and plots, one column, line or panel per scheme.
//! The file loads nothing: style and plots are inline, there is no script.
//! Times are milliseconds, rates MB/s (10^6 bytes per second), and numbers
//! carry three significant digits.
//!
//! Terms: a scheme's *runs* are its cells of one group, one for each
//! repetition. Where a plot shows one value for several repetitions it is
//! their median (of an even number, the larger of the two in the middle, so
//! that it is a value that was measured), and the whisker spans all of
//! their intervals.
//!
//! Properties: whatever text a cell or the context carries is escaped; every
//! cell counts, and one that the machine disturbed is marked and listed with
//! the reason; rtvirtio comes first, then the data plane, then `hand`, then
//! the other baselines.

mod across;
mod bars;
pub mod closed_loop;
mod curves;
mod group;
mod predictions;
mod tables;

#[cfg(test)]
pub(crate) mod tests;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use rtvirtio_cases::judge::MIN_DELIVERED;
use rtvirtio_spec::run::Cell;

use crate::plot;
use group::Group;

pub use predictions::{Agreement, agreement};
pub use tables::table;

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// There is nothing to report on.
    #[error("there is no cell to report on")]
    NoCells,
}

/// What a report says of the campaign beside its cells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Context {
    /// Heading.
    pub title: String,
    /// When the report was made, RFC 3339.
    pub generated: String,
    /// The machine, in a line.
    pub machine: String,
    /// The device, in a line.
    pub device: String,
    /// Version of rtvirtio.
    pub version: String,
    /// What a reader must know, a paragraph each.
    pub notes: Vec<String>,
}

/// A page: one self-contained HTML file.
pub(crate) fn page(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(include_str!("report/style.css"))) (PreEscaped(plot::STYLE)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// Renders `cells` as one HTML file.
///
/// # Errors
/// [`ReportError::NoCells`] without any cell.
pub fn render(cells: &[Cell], context: &Context) -> Result<String, ReportError> {
    if cells.is_empty() {
        return Err(ReportError::NoCells);
    }
    let groups = group::groups(cells);
    let body = html! {
        (header(cells, context))
        @if groups.len() > 1 {
            (contents(&groups))
            (across::section(&groups))
        }
        @for (index, group) in groups.iter().enumerate() {
            section.group id=(format!("group-{index}")) { (group_sections(group)) }
        }
    };
    Ok(page(&context.title, &body))
}

fn header(cells: &[Cell], context: &Context) -> Markup {
    let disturbed = cells.iter().filter(|c| c.disturbed.is_some()).count();
    html! {
        header {
            h1 { (context.title) }
            dl.facts {
                div { dt { "Generated" } dd { (context.generated) } }
                div { dt { "rtvirtio" } dd { (context.version) } }
                div { dt { "Machine" } dd { (context.machine) } }
                div { dt { "Device" } dd { (context.device) } }
                div { dt { "Cells" } dd {
                    (cells.len())
                    @if disturbed > 0 { ", of them " (disturbed) " while the machine was late (marked)" }
                } }
            }
            @for note in &context.notes { p.note { (note) } }
            p.rule {
                "A run passes when every task's tail is within its target and every task delivers at least "
                (MIN_DELIVERED) " of its rate. The tail is the highest of p99, p99.9 and p99.99 with at least \
                 10 samples beyond it. "
                span.pass { "✓ blue" } " passes, " span.fail { "✗ orange" } " fails, "
                span.unsure { "~" } " misses within the interval, " span.unsure { "m" }
                " misses by no more than the machine itself was late. Intervals are 95 %."
            }
        }
    }
}

fn contents(groups: &[Group<'_>]) -> Markup {
    html! {
        nav {
            a href="#across" { "Across cases" }
            @for (index, group) in groups.iter().enumerate() {
                " " a href=(format!("#group-{index}")) {
                    (group.case) ", " (group.tier) ", " (group.neighbour)
                }
            }
        }
    }
}

fn group_sections(group: &Group<'_>) -> Markup {
    html! {
        h2 { (group.title()) }
        (tables::summary_section(group))
        (bars::section(group))
        (curves::distributions(group))
        (curves::timelines(group))
        (tables::settings(group))
        (tables::machine(group))
        (predictions::section(group.schemes.iter()))
    }
}
