//! Simulated runs for people.

use comfy_table::{CellAlignment, Table, presets};
use rtvirtio_iocores::utility::{Progress, Reference, Weights};
use rtvirtio_sim::PhaseOutcome;
use rtvirtio_units::Nanos;

use super::Run;

/// The phases of a run, then the whole.
fn parts(run: &Run) -> impl Iterator<Item = &PhaseOutcome> {
    run.outcome.phases.iter().chain([&run.outcome.whole])
}

/// Fills in each run's utility, by what all have in that phase.
pub(super) fn add_utility(runs: &mut [Run]) {
    let progress: Vec<Vec<Progress>> =
        runs.iter().map(|run| parts(run).map(PhaseOutcome::progress).collect()).collect();
    let phases = progress.first().map_or(0, Vec::len);
    for phase in 0..phases {
        let of: Vec<Progress> = progress.iter().map(|run| run[phase]).collect();
        let reference = Reference::of(&of);
        for (run, of) in runs.iter_mut().zip(&of) {
            run.utility.push(Weights::default().utility(of, &reference));
        }
    }
}

/// A row for each phase and policy.
pub(super) fn table(runs: &[Run]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "phase",
        "policy",
        "IOPS",
        "cores",
        "IOPS/core",
        "mean",
        "p50",
        "p99",
        "p99.9",
        "compute",
        "vCPU wait",
        "moves",
        "settled",
        "utility",
    ]);
    for column in 2..14 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let phases = runs.first().map_or(0, |run| run.utility.len());
    for phase in 0..phases {
        for run in runs {
            let Some(of) = parts(run).nth(phase) else { continue };
            table.add_row(row(run, of, run.utility[phase]));
        }
    }
    format!(
        "{table}\n\nutility: I/O and compute, each in CPUs' worth or, if there is less of it, as part \
         of the most, less 0.2 a core.\nstatic IOThreads are there whether they work or not.\n"
    )
}

fn row(run: &Run, of: &PhaseOutcome, utility: f64) -> [String; 14] {
    let latency = |ns: Nanos| if of.requests == 0 { "-".to_owned() } else { ns.to_string() };
    [
        of.kind.map_or_else(|| "whole".to_owned(), |kind| kind.to_string()),
        run.policy.to_string(),
        format!("{:.0}", of.iops),
        format!("{:.2}", of.io_cores),
        format!("{:.0}", of.iops_per_core),
        latency(of.mean),
        latency(of.p50),
        latency(of.p99),
        latency(of.p999),
        format!("{:.2}", of.computed),
        format!("{:.2}", of.vcpus_waited),
        of.moves.to_string(),
        of.settled.map_or_else(|| "-".to_owned(), |at| format!("{:.0} ms", at.as_millis_f64())),
        format!("{utility:.3}"),
    ]
}

/// How fast it went.
pub(super) fn speed(runs: &[Run]) -> String {
    let requests: u64 = runs.iter().map(|run| run.outcome.whole.requests).sum();
    let simulated: f64 = runs.iter().map(|run| run.outcome.whole.length.as_secs_f64()).sum();
    let took: f64 = runs.iter().map(|run| run.took_s).sum();
    format!(
        "simulated {simulated:.0} s and {requests} requests in {took:.1} s, {:.0} requests a second\n",
        requests as f64 / took.max(1e-9)
    )
}
