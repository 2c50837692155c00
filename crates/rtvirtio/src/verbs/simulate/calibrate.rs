//! `rtvirtio simulate --calibrate`: the costs with which the simulator does what this machine does.
//!
//! A *row* is a load of `rtvirtio bench iocores`: a disk in memory that `rtvirtio serve` has on one IOThread,
//! and clients that make what they write and compare what they read, as a guest touches its data: requests a
//! second, and CPU time of server and clients for each. The same rows are simulated. The error of a row is the
//! sum of the squares of the logarithms of simulated / measured, of its three figures.
//!
//! Costs are found in stages: each has the rows that show its own costs, once those of the stages before are
//! known. All at once they would stand in for each other, since a wake-up on the same CPU, on an idle one and on
//! one that gives way differ most of all. Within a stage each is made larger and smaller by a factor, by turns,
//! and what brings the rows nearer is kept.
//!
//! What a letter costs comes from the pause of queues that move, less a wake-up; a kick is taken for as dear as a
//! call, both are a write to an eventfd. No row shows `poll` and `turn` alone, nor `reap`, which needs a device:
//! these keep their defaults.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rtvirtio_bench::dataplane::BLOCK;
use rtvirtio_bench::dataplane::moves::{self, Moves};
use rtvirtio_bench::iocores::load::{Beside, Figures, Row};
use rtvirtio_bench::iocores::machine::{self, CPUS};
use rtvirtio_bench::load::Interrupted;
use rtvirtio_bench::progress::Progress;
use rtvirtio_iocores::{Kind, Limits, policy};
use rtvirtio_sim::{Costs, Interrupt, Machine, Simulation};
use rtvirtio_units::{CpuId, Nanos};

use crate::input;

/// Length of a measured window, and how often each is measured.
const WINDOW: Nanos = Nanos::from_millis(2_000);
const REPETITIONS: usize = 3;
/// Bytes of a request.
const SMALL: u64 = BLOCK as u64;
const LARGE: u64 = 64 << 10;
/// Simulated for each row.
const SIMULATED: Nanos = Nanos::from_millis(50);
/// How long queues are moved, and how often a second.
const MOVING: (Duration, f64) = (Duration::from_secs(3), 500.0);
/// Factors in turn, and rounds with each at most.
const FACTORS: [f64; 4] = [1.15, 1.5, 1.15, 1.04];
const ROUNDS: usize = 12;

/// What a stage's rows are, and the costs that they show.
struct Stage {
    rows: Range<usize>,
    costs: &'static [fn(&mut Costs) -> &mut Nanos],
}

const STAGES: [Stage; 5] = [
    // Full queues: nobody sleeps.
    Stage {
        rows: 0..4,
        costs: &[
            |costs| &mut costs.request,
            |costs| &mut costs.kib,
            |costs| &mut costs.client,
            |costs| &mut costs.client_kib,
        ],
    },
    // One request at a time: driver and IOThread wake each other on one CPU,
    Stage {
        rows: 4..6,
        costs: &[|costs| &mut costs.call, |costs| &mut costs.wake, |costs| &mut costs.client_turn],
    },
    // where the IOThread has to give way for it,
    Stage { rows: 6..9, costs: &[|costs| &mut costs.resume] },
    // on two,
    Stage {
        rows: 9..12,
        costs: &[
            |costs| &mut costs.far,
            |costs| &mut costs.idle.sender,
            |costs| &mut costs.idle.delay,
            |costs| &mut costs.idle.receiver,
        ],
    },
    // and where a vCPU computes.
    Stage {
        rows: 12..16,
        costs: &[
            |costs| &mut costs.busy.sender,
            |costs| &mut costs.busy.delay,
            |costs| &mut costs.busy.receiver,
        ],
    },
];

const ROWS: [Row; 16] = [
    row((1, 32, SMALL), Beside::Rest, 0, 0),
    row((4, 32, SMALL), Beside::Rest, 0, 0),
    row((1, 32, LARGE), Beside::Rest, 0, 0),
    row((4, 4, LARGE), Beside::Rest, 0, 0),
    row((1, 1, SMALL), Beside::IoThread, 0, 0),
    row((4, 1, SMALL), Beside::IoThread, 0, 0),
    row((1, 1, SMALL), Beside::IoThread, 0, 20),
    row((2, 1, SMALL), Beside::IoThread, 0, 20),
    row((4, 1, SMALL), Beside::IoThread, 0, 20),
    row((1, 1, SMALL), Beside::Rest, 0, 0),
    row((4, 1, SMALL), Beside::Rest, 0, 0),
    // An IOThread that has no time to poll shows what its calls cost.
    row((4, 1, SMALL), Beside::Rest, 0, 20),
    row((1, 1, SMALL), Beside::Rest, 1, 0),
    row((1, 1, SMALL), Beside::Rest, 1, 20),
    row((4, 1, SMALL), Beside::Rest, 1, 20),
    row((4, 1, SMALL), Beside::Rest, 1, 40),
];

const fn row(
    (queues, depth, block): (u16, u16, u64),
    vcpus: Beside,
    burners: u16,
    cpu_us: u32,
) -> Row {
    Row { queues, depth, block, vcpus, burners, cpu_us }
}

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
            progress.start(&row.to_string(), each);
            figures.push(row.measure(&program, WINDOW, interrupted)?);
            progress.finish(each);
        }
    }
    let measured: Vec<Figures> = measured.iter().map(|figures| medians(figures)).collect();
    progress.start("moves of queues", each);
    let directory = tempfile::Builder::new().prefix("rtvirtio-costs-").tempdir()?;
    let (time, rate) = MOVING;
    let mover = Moves { program: &program, disk_directory: directory.path(), time, rate, seed: 1 };
    let shown = mover.run(moves::Stage::Light, interrupted)?;

    drop(progress);

    let mut costs = start();
    let letter = (shown.pause.p50_us - shown.wake.p50_us).max(0.1);
    costs.letter = Nanos::from_secs_f64(letter / 1e6);
    search(&mut costs, &measured)?;
    input::write(path, &(serde_json::to_string_pretty(&costs)? + "\n"))?;

    println!(
        "{:<62} {:>10} {:>10}   {:>10} {:>10}   {:>10} {:>10}",
        "load", "IOPS", "simulated", "server ns", "simulated", "client ns", "simulated"
    );
    for (row, real) in ROWS.iter().zip(&measured) {
        let simulated = simulate(row, &costs)?;
        print!("{:<60}", row.to_string());
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

/// Where the search begins: nothing would stay nothing.
fn start() -> Costs {
    let interrupt = Interrupt {
        sender: Nanos::from_micros(5),
        delay: Nanos::from_micros(8),
        receiver: Nanos::from_micros(1),
    };
    Costs {
        client_kib: Nanos::new(50),
        call: Nanos::new(1_000),
        wake: Nanos::new(1_000),
        client_turn: Nanos::new(1_000),
        resume: Nanos::new(1_000),
        far: Nanos::new(2_000),
        idle: interrupt,
        busy: interrupt,
        ..Costs::default()
    }
}

fn medians(of: &[Figures]) -> Figures {
    std::array::from_fn(|figure| {
        let mut values: Vec<f64> = of.iter().map(|of| of[figure]).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    })
}

/// The same in the simulator.
fn simulate(row: &Row, costs: &Costs) -> Result<Figures> {
    let scenario = row.scenario(SIMULATED);
    let mut machine = Machine::new(CPUS, 1);
    machine.vcpus = row.vcpus.places().map(|at| CpuId::new(at.into())).collect();
    machine.costs = machine::costs(*costs, row.cpu_us, 0);
    let limits = Limits { cpus: Vec::new(), least: 1, most: 1, borrow: false };
    let mut fixed = policy(Kind::Static, limits);
    let mut simulation = Simulation::new(&machine, &scenario, &mut *fixed)?;
    simulation.run_until(SIMULATED);
    let whole = simulation.finish().whole;
    let each = |cpus: f64| cpus * 1e9 / whole.iops.max(1.0);
    Ok([whole.iops, each(whole.io_ran), each(whole.vcpus_ran - whole.computed)])
}

fn error(costs: &Costs, rows: Range<usize>, measured: &[Figures]) -> Result<f64> {
    let mut sum = 0.0;
    for (row, real) in ROWS.iter().zip(measured).skip(rows.start).take(rows.len()) {
        let simulated = simulate(row, costs)?;
        let ratios = real.iter().zip(simulated).map(|(real, simulated)| simulated / real);
        sum += ratios.map(|ratio| ratio.max(1e-3).ln().powi(2)).sum::<f64>();
    }
    Ok(sum)
}

/// Brings the costs as near to what was measured as they come, one stage after the other.
fn search(costs: &mut Costs, measured: &[Figures]) -> Result<()> {
    // What a later stage finds changes a little of what an earlier one shows.
    for Stage { rows, costs: searched } in STAGES.iter().chain(&STAGES) {
        let error = |of: &Costs| error(of, rows.clone(), measured).context("simulate a load");
        let mut least = error(costs)?;
        for factor in FACTORS {
            for _ in 0..ROUNDS {
                let before = least;
                for cost in *searched {
                    for by in [factor, 1.0 / factor] {
                        let mut tried = *costs;
                        let value = cost(&mut tried);
                        *value = Nanos::new((value.get() as f64 * by).round().max(1.0) as u64);
                        tried.kick = tried.call;
                        let error = error(&tried)?;
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
        let mut found = start();
        let first = error(&found, 0..ROWS.len(), &measured).unwrap();
        search(&mut found, &measured).unwrap();
        let last = error(&found, 0..ROWS.len(), &measured).unwrap();
        assert!(last < first / 50.0, "{first} to {last}: {found:?}");
        for (row, real) in ROWS.iter().zip(&measured) {
            let iops = simulate(row, &found).unwrap()[0];
            assert!((iops / real[0] - 1.0).abs() < 0.1, "{row:?}: {iops} of {}", real[0]);
        }
    }
}
