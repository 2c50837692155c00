//! A plan, for people.

use comfy_table::{CellAlignment, Table, presets};
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::settings::Scheduler;

pub use crate::iothreads::start_with;
use crate::{iothreads, output};

/// A plan for people: changes, promises, cost, what is unmet and why.
#[must_use]
pub fn describe(plan: &Plan) -> String {
    let mut text = String::new();
    if plan.changes.is_empty() {
        text += "Nothing to change.\n";
    } else {
        let mut table = table(["knob", "old", "new"]);
        for c in &plan.changes {
            let old = c.old.as_deref().unwrap_or("-").to_owned();
            table.add_row([c.knob.to_string(), old, c.new.clone()]);
        }
        text += &format!("Changes\n{table}\n");
    }
    let headers =
        ["task", "percentile", "target", "predicted", "bound", "confidence", "rate", "", "model"];
    let mut promises = table(headers);
    for column in 2..7 {
        if let Some(column) = promises.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for t in &plan.tasks {
        promises.add_row([
            format!("{}/{}", t.vm, t.task),
            format!("p{}", t.percentile),
            t.target.to_string(),
            t.predicted.to_string(),
            t.bound.map_or_else(|| "unknown".to_owned(), |b| b.to_string()),
            t.confidence.to_string(),
            format!("{:.0} %", (t.delivered * 100.0).floor()),
            match (&t.unmet, t.bound) {
                (None, _) => "met",
                (Some(_), None) => "not promised",
                (Some(_), Some(_)) => "UNMET",
            }
            .to_owned(),
            t.model.to_string(),
        ]);
    }
    text += &format!("\nTasks (the bounds of a VM's tasks hold together)\n{promises}\n");
    let fallbacks: Vec<_> =
        plan.tasks.iter().filter_map(|t| Some((t, t.fallback.as_ref()?))).collect();
    if !fallbacks.is_empty() {
        text += "\nWhere another model stands in\n";
        for (t, why) in fallbacks {
            text += &format!("  {}/{}: {why}\n", t.vm, t.task);
        }
    }
    text += "\nCost\n";
    for c in &plan.cost {
        text += &format!("  {}: declared loads use {:.0} % of it", c.device, c.utilisation * 100.0);
        if c.background_alone.get() > 0 {
            text +=
                &format!("; background gets {} of {}", c.background_planned, c.background_alone);
        }
        text += "\n";
    }
    for b in &plan.background {
        let of_device = plan.settings.0.get(&b.device);
        let is_weighed = of_device.is_some_and(|d| matches!(d.scheduler, Scheduler::IoCost(_)));
        let free = if is_weighed {
            "no cap: iocost gives it what the others leave"
        } else {
            "needs no cap"
        };
        let cap = b.cap.map_or_else(|| free.to_owned(), |c| format!("capped at {c}"));
        let held =
            b.binding_constraint.as_ref().map_or_else(String::new, |h| format!(", held by {h}"));
        // A cap on bytes is not all: what is not declared is held to as many requests as its block size makes of it.
        let limits = of_device.and_then(|device| device.vms.get(&b.vm));
        let requests = limits.and_then(|vm| vm.limits.read_iops.zip(vm.limits.write_iops));
        let requests = requests.map_or_else(String::new, |(reads, writes)| {
            format!(", {reads} reads and {writes} writes a second (a task that declares its load is held to bytes alone)")
        });
        text += &format!("  {} on {}: {cap}{requests}{held}\n", b.vm, b.device);
    }
    text += &iothreads::describe(&plan.iothreads);
    text += "\nHow\n";
    for reason in &plan.reasons {
        text += &format!("  {reason}\n");
    }
    let unmet: Vec<_> = plan.tasks.iter().filter(|t| t.unmet.is_some()).collect();
    if !unmet.is_empty() {
        text += "\nUnmet\n";
        for t in unmet {
            let reason = t.why_unmet().unwrap_or_default();
            text += &format!("  {}/{}: {reason}\n", t.vm, t.task);
        }
    }
    output::visible(&text)
}

/// A table without rules.
#[must_use]
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}
