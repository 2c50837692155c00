//! `rtvirtio simulate --calibrate`: the costs with which the simulator does what this machine does.
//!
//! A *row* is a load of `rtvirtio bench iocores`: a disk in memory that `rtvirtio serve` has on one IOThread,
//! and clients that make what they write and compare what they read, as a guest touches its data: requests a
//! second, and CPU time of server and clients for each. The same rows are simulated,
//! and costs are searched by turns: each is made larger and smaller by a factor, and what brings the rows
//! nearer is kept. Small factors first, since costs that stand in for each other, such as that of a request and
//! of its bytes, are else left far from where they belong by the first one's large step. The error of a row is the sum of the squares of the
//! logarithms of simulated / measured, of its three figures.
//!
//! What a letter costs comes from the pause of queues that move, less a wake-up. No row shows `poll`,
//! `turn` and `kick` alone, nor `reap`, which needs a device: these keep their defaults.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rtvirtio_bench::dataplane::BLOCK;
use rtvirtio_bench::dataplane::moves::{Moves, Stage};
use rtvirtio_bench::iocores::load::{Figures, Row};
use rtvirtio_bench::iocores::machine::CPUS;
use rtvirtio_bench::load::Interrupted;
use rtvirtio_bench::progress::Progress;
use rtvirtio_iocores::{Kind, Limits, policy};
use rtvirtio_sim::{Costs, Machine, Simulation};
use rtvirtio_units::{CpuId, Nanos};

use crate::input;

/// Length of a measured window, and how often each is measured.
const WINDOW: Nanos = Nanos::from_millis(2_000);
const REPETITIONS: usize = 3;
/// A large request.
const LARGE: u64 = 64 << 10;
/// Simulated for each row.
const SIMULATED: Nanos = Nanos::from_millis(50);
/// How long queues are moved, and how often a second.
const MOVING: (Duration, f64) = (Duration::from_secs(3), 500.0);
/// Factors in turn, and rounds with each at most.
const FACTORS: [f64; 4] = [1.15, 1.5, 1.15, 1.04];
const ROUNDS: usize = 12;

/// One queue and four, alone and full; and large requests, whose bytes cost.
const ROWS: [Row; 6] = [
    Row { queues: 1, depth: 1, block: BLOCK as u64 },
    Row { queues: 1, depth: 32, block: BLOCK as u64 },
    Row { queues: 4, depth: 1, block: BLOCK as u64 },
    Row { queues: 4, depth: 32, block: BLOCK as u64 },
    Row { queues: 1, depth: 32, block: LARGE },
    Row { queues: 4, depth: 4, block: LARGE },
];

/// The costs that are searched.
const SEARCHED: [fn(&mut Costs) -> &mut Nanos; 9] = [
    |costs| &mut costs.request,
    |costs| &mut costs.kib,
    |costs| &mut costs.client,
    |costs| &mut costs.client_kib,
    |costs| &mut costs.call,
    |costs| &mut costs.wake,
    |costs| &mut costs.switch,
    |costs| &mut costs.interrupt,
    |costs| &mut costs.wake_delay,
];

/// Measures, searches, and writes the costs.
pub(super) fn run(path: &Path, interrupted: &Interrupted) -> Result<()> {
    let program = std::env::current_exe()?;
    // Beside the window: the server's start and end, and the clients' connections.
    let each = Duration::from(WINDOW) + Duration::from_secs(3);
    let steps = ROWS.len() * REPETITIONS + 1;
    let mut progress = Progress::new(steps, each * steps as u32);
    let mut measured: Vec<Vec<Figures>> = vec![Vec::new(); ROWS.len()];
    for _ in 0..REPETITIONS {
        for (row, figures) in ROWS.iter().zip(&mut measured) {
            let Row { queues, depth, block } = row;
            progress.start(&format!("{queues} queues, depth {depth}, {block} B"), each);
            figures.push(row.measure(&program, WINDOW, interrupted)?);
            progress.finish(each);
        }
    }
    let measured: Vec<Figures> = measured.iter().map(|figures| medians(figures)).collect();
    progress.start("moves of queues", each);
    let directory = tempfile::Builder::new().prefix("rtvirtio-costs-").tempdir()?;
    let (time, rate) = MOVING;
    let moves = Moves { program: &program, disk_directory: directory.path(), time, rate, seed: 1 };
    let shown = moves.run(Stage::Light, interrupted)?;

    drop(progress);

    // What the search makes larger and smaller must not be nothing.
    let mut costs =
        Costs { client_kib: Nanos::new(50), interrupt: Nanos::new(1_000), ..Costs::default() };
    let letter = (shown.pause.p50_us - shown.wake.p50_us).max(0.1);
    costs.letter = Nanos::from_secs_f64(letter / 1e6);
    search(&mut costs, &measured)?;
    input::write(path, &(serde_json::to_string_pretty(&costs)? + "\n"))?;

    println!(
        "queues depth  KiB           IOPS  simulated    server ns  simulated    client ns  simulated"
    );
    for (row, real) in ROWS.iter().zip(&measured) {
        let simulated = simulate(row, &costs)?;
        print!("{:>6} {:>5} {:>4}", row.queues, row.depth, row.block >> 10);
        for (real, simulated) in real.iter().zip(simulated) {
            print!("   {real:>10.0} {simulated:>10.0}");
        }
        println!();
    }
    println!(
        "moves: pause {:.1} us at p50, a wake-up {:.1} us\nwrote {}",
        shown.pause.p50_us,
        shown.wake.p50_us,
        path.display()
    );
    Ok(())
}

fn medians(of: &[Figures]) -> Figures {
    std::array::from_fn(|figure| {
        let mut values: Vec<f64> = of.iter().map(|of| of[figure]).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    })
}

/// The same in the simulator: all threads may run on all CPUs, but that an IOThread stays.
fn simulate(row: &Row, costs: &Costs) -> Result<Figures> {
    let scenario = row.scenario(SIMULATED);
    let mut machine = Machine::new(CPUS, 1);
    machine.vcpus = (0..u32::from(CPUS)).map(CpuId::new).collect();
    machine.costs = *costs;
    let limits = Limits { cpus: Vec::new(), least: 1, most: 1, borrow: false };
    let mut fixed = policy(Kind::Static, limits);
    let mut simulation = Simulation::new(&machine, &scenario, &mut *fixed)?;
    simulation.run_until(SIMULATED);
    let whole = simulation.finish().whole;
    let each = |cpus: f64| cpus * 1e9 / whole.iops.max(1.0);
    Ok([whole.iops, each(whole.io_ran), each(whole.vcpus_ran)])
}

fn error(costs: &Costs, measured: &[Figures]) -> Result<f64> {
    let mut sum = 0.0;
    for (row, real) in ROWS.iter().zip(measured) {
        let simulated = simulate(row, costs)?;
        let ratios = real.iter().zip(simulated).map(|(real, simulated)| simulated / real);
        sum += ratios.map(|ratio| ratio.max(1e-3).ln().powi(2)).sum::<f64>();
    }
    Ok(sum)
}

/// Brings the costs as near to what was measured as they come.
fn search(costs: &mut Costs, measured: &[Figures]) -> Result<()> {
    let mut least = error(costs, measured)?;
    for factor in FACTORS {
        for _ in 0..ROUNDS {
            let before = least;
            for cost in SEARCHED {
                for by in [factor, 1.0 / factor] {
                    let mut tried = *costs;
                    let value = cost(&mut tried);
                    *value = Nanos::new((value.get() as f64 * by).round().max(1.0) as u64);
                    let error = error(&tried, measured).context("simulate a load")?;
                    if error < least {
                        (*costs, least) = (tried, error);
                        break;
                    }
                }
            }
            if least >= before {
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of known costs: the search, which begins elsewhere, finds what explains them.
    #[test]
    fn search_finds_costs_that_explain_what_was_measured() {
        let real = Costs {
            request: Nanos::new(420),
            kib: Nanos::new(25),
            client: Nanos::new(600),
            client_kib: Nanos::new(90),
            wake: Nanos::new(4_000),
            ..Costs::default()
        };
        let measured: Vec<Figures> = ROWS.iter().map(|row| simulate(row, &real).unwrap()).collect();
        let mut found = Costs { client_kib: Nanos::new(50), ..Costs::default() };
        let first = error(&found, &measured).unwrap();
        search(&mut found, &measured).unwrap();
        let last = error(&found, &measured).unwrap();
        assert!(last < first / 50.0, "{first} to {last}: {found:?}");
        for (row, real) in ROWS.iter().zip(&measured) {
            let iops = simulate(row, &found).unwrap()[0];
            assert!((iops / real[0] - 1.0).abs() < 0.1, "{row:?}: {iops} of {}", real[0]);
        }
    }
}
