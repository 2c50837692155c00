//! Simulated runs for people.

use rtvirtio_bench::table::Table;
use rtvirtio_iocores::utility::{Progress, Reference, Weights};
use rtvirtio_sim::PhaseOutcome;
use rtvirtio_sim::scenario::PhaseKind;
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
    let phases = 0..runs.first().map_or(0, |run| run.utility.len());
    let row = |phase| move |run| Some((run, parts(run).nth(phase)?, run.utility[phase]));
    let rows: Vec<(&Run, &PhaseOutcome, f64)> =
        phases.flat_map(|phase| runs.iter().filter_map(row(phase))).collect();
    let latency = |of: &PhaseOutcome, time: Nanos| (of.requests > 0).then_some(time);
    let table = Table::of(&rows)
        .text("phase", |(_, of, _)| of.kind.map_or("whole", PhaseKind::name))
        .text("policy", |(run, ..)| run.policy)
        .figure("IOPS", 0, |(_, of, _)| of.iops)
        .figure("cores", 2, |(_, of, _)| of.io_cores)
        .figure("IOPS/core", 0, |(_, of, _)| of.iops_per_core)
        .shown("mean", |(_, of, _)| latency(of, of.mean))
        .shown("p50", |(_, of, _)| latency(of, of.p50))
        .shown("p99", |(_, of, _)| latency(of, of.p99))
        .shown("p99.9", |(_, of, _)| latency(of, of.p999))
        .figure("compute", 2, |(_, of, _)| of.computed)
        .figure("vCPU wait", 2, |(_, of, _)| of.vcpus_waited)
        .shown("moves", |(_, of, _)| Some(of.moves))
        .figure("settled, ms", 0, |(_, of, _)| Some(of.settled?.as_millis_f64()))
        .figure("utility", 3, |(.., utility)| *utility);
    format!(
        "{table}\nutility: I/O and compute, each in CPUs' worth or, if there is less of it, as part \
         of the most, less 0.2 a core.\nstatic IOThreads are there whether they work or not.\n"
    )
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
