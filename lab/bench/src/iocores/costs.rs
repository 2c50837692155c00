//! The costs with which the simulator does what this machine does.
//!
//! A *row* is a load (`load`): requests a second, and CPU time of server and clients for each. The same
//! rows are simulated. The error of a row is the sum of the squares of the logarithms of simulated / measured, of
//! its three figures. A *round* has each row once; what several say is their median, so that rounds between the
//! cells of a campaign say what the machine was like in it, which is not what it was before.
//!
//! Costs are found in stages: each has the rows that show its own costs, once those of the stages before are
//! known. All at once they would stand in for each other, since a wake-up on the same CPU, on an idle one and on
//! one that gives way differ most of all. Within a stage each is made larger and smaller by a factor, by turns,
//! and what brings the rows nearer is kept.
//!
//! What a message costs comes from the pause of queues that move, less a wake-up; a kick is taken for as dear as a
//! call, both are a write to an eventfd. No row shows `poll` and `turn` alone, nor `reap`, which needs a device:
//! these keep their defaults.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_sim::{Costs, Interrupt};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use super::load::{Beside, Figures, Row};
use crate::dataplane::BLOCK;
use crate::dataplane::moves::{self, Moves};
use crate::stats::median;
use crate::table::Table;
use rtvirtio_cli::progress::Progress;

/// Length of a measured window.
const WINDOW: Nanos = Nanos::from_millis(1_000);
/// How long queues are moved in a round, and how often a second.
const MOVING: (Duration, f64) = (Duration::from_secs(1), 500.0);
/// How long a round takes.
pub(crate) const ROUND: Duration = Duration::from_secs(32);
/// Rounds of a calibration on its own.
const ROUNDS: usize = 5;
/// Bytes of a request.
const SMALL: u64 = BLOCK as u64;
const LARGE: u64 = 64 << 10;
/// Factors in turn, and rounds with each at most.
const FACTORS: [f64; 4] = [1.15, 1.5, 1.15, 1.04];
const PASSES: usize = 12;

/// What a stage's rows are, and the costs that they show.
struct Stage {
    rows: Range<usize>,
    costs: &'static [fn(&mut Costs) -> &mut Nanos],
}

const STAGES: [Stage; 6] = [
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
    // Full queues whose requests cost more than to copy.
    Stage {
        rows: 16..20,
        costs: &[
            |costs| &mut costs.apart,
            |costs| &mut costs.apart_kib,
            |costs| &mut costs.client_apart,
            |costs| &mut costs.client_apart_kib,
        ],
    },
];

const ROWS: [Row; 20] = [
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
    row((4, 16, SMALL), Beside::Rest, 0, 20),
    row((4, 16, SMALL), Beside::IoThread, 0, 20),
    row((4, 16, SMALL), Beside::All, 1, 20),
    row((4, 4, LARGE), Beside::All, 1, 20),
];

const fn row(
    (queues, depth, block): (u16, u16, u64),
    vcpus: Beside,
    burners: u16,
    cpu_us: u32,
) -> Row {
    Row { queues, depth, block, vcpus, burners, cpu_us }
}

/// All rows once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// By what the row is.
    rows: BTreeMap<String, Figures>,
    /// Half of the queues that were moved rested no longer, µs.
    pause_us: f64,
    /// Half of the threads that another one woke meanwhile ran after, µs.
    wake_us: f64,
    /// When it ended.
    at: String,
}

impl Round {
    /// Measures it; `program` is the `rtvirtio` that serves.
    ///
    /// # Errors
    /// If there are fewer than two CPUs; if a server fails, or does not do what it is told; if interrupted.
    pub(crate) fn measure(program: &Path, interrupted: &Interrupted) -> Result<Self> {
        let measure = |row: &Row| {
            let label = row.to_string();
            let figures = row.measure(program, WINDOW, interrupted);
            figures.with_context(|| label.clone()).map(|figures| (label, figures))
        };
        let rows = ROWS.iter().map(measure).collect::<Result<_>>()?;
        let directory = tempfile::Builder::new().prefix("rtvirtio-costs-").tempdir()?;
        let ((time, rate), program) = (MOVING, Some(program.to_owned()));
        let disk_directory = directory.path().to_owned();
        let mover = Moves { program, disk_directory, time, rate, seed: 1 };
        let shown = mover.run(moves::Stage::Light, interrupted)?;
        let (pause_us, wake_us) = (shown.pause.p50_us, shown.wake.p50_us);
        Ok(Self { rows, pause_us, wake_us, at: jiff::Timestamp::now().to_string() })
    }
}

/// Some rounds, one after the other.
///
/// # Errors
/// As those of a round.
pub fn measure(program: &Path, interrupted: &Interrupted) -> Result<Vec<Round>> {
    let mut progress = Progress::new(ROUNDS, ROUND * ROUNDS as u32);
    let mut round = |number| {
        progress.start(&format!("costs, round {}", number + 1), ROUND);
        let round = Round::measure(program, interrupted);
        progress.finish(ROUND);
        round
    };
    (0..ROUNDS).map(&mut round).collect()
}

/// Reads costs, as [`find`]'s are kept.
///
/// # Errors
/// The file cannot be read, or has something else.
pub fn read(path: &Path) -> Result<Costs> {
    let text = rtvirtio_cli::input::read(path, 1 << 16)?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// The costs that bring the simulator nearest to what was measured, and a table of both.
///
/// # Errors
/// If there is no round, or one of other rows than these; if the simulator refuses a row.
pub fn find(rounds: &[Round]) -> Result<(Costs, String)> {
    ensure!(!rounds.is_empty(), "costs were not measured");
    let of = |row: &Row| -> Result<Figures> {
        let label = row.to_string();
        let figures = |round: &Round| round.rows.get(&label).copied();
        let all: Option<Vec<Figures>> = rounds.iter().map(figures).collect();
        let all = all.with_context(|| format!("a round has no row `{label}`: measure anew"))?;
        Ok(std::array::from_fn(|figure| median(all.iter().map(|of| of[figure]))))
    };
    let measured = ROWS.iter().map(of).collect::<Result<Vec<_>>>()?;
    let pause = median(rounds.iter().map(|round| round.pause_us));
    let wake = median(rounds.iter().map(|round| round.wake_us));
    let mut costs = start();
    costs.message = Nanos::from_secs_f64((pause - wake).max(0.1) / 1e6);
    search(&mut costs, &measured)?;
    let simulated = ROWS.iter().map(|row| row.simulate(&costs)).collect::<Result<Vec<_>>>()?;
    let rows: Vec<_> = ROWS.iter().zip(measured.iter().zip(&simulated)).collect();
    let mut table = Table::of(&rows).text("load", |(row, _)| row);
    for (figure, title) in ["IOPS", "server ns", "client ns"].into_iter().enumerate() {
        table = table.figure(title, 0, |(_, (real, _))| real[figure]).figure(
            "simulated",
            0,
            |(_, (_, simulated))| simulated[figure],
        );
    }
    let n = rounds.len();
    let text = format!(
        "{table}Medians of {n} rounds. Moves: pause {pause:.1} us at p50, a wake-up {wake:.1} us\n"
    );
    Ok((costs, text))
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
        apart: Nanos::new(500),
        apart_kib: Nanos::new(5),
        client_apart: Nanos::new(500),
        client_apart_kib: Nanos::new(5),
        resume: Nanos::new(1_000),
        far: Nanos::new(2_000),
        idle: interrupt,
        busy: interrupt,
        ..Costs::default()
    }
}

fn error(costs: &Costs, rows: Range<usize>, measured: &[Figures]) -> Result<f64> {
    let mut sum = 0.0;
    for (row, real) in ROWS.iter().zip(measured).skip(rows.start).take(rows.len()) {
        let simulated = row.simulate(costs)?;
        let ratios = real.iter().zip(simulated).map(|(real, simulated)| simulated / real);
        sum += ratios.map(|ratio| ratio.max(1e-3).ln().powi(2)).sum::<f64>();
    }
    Ok(sum)
}

/// Brings the costs as near to what was measured as they come, one stage after the other.
fn search(costs: &mut Costs, measured: &[Figures]) -> Result<()> {
    // What later stages find changes a little of what full queues show.
    for Stage { rows, costs: searched } in STAGES.iter().chain(&STAGES[..1]) {
        let error = |of: &Costs| error(of, rows.clone(), measured).context("simulate a load");
        let mut least = error(costs)?;
        for factor in FACTORS {
            for _ in 0..PASSES {
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
            apart: Nanos::new(900),
            apart_kib: Nanos::new(8),
            client_apart: Nanos::new(100),
            client_apart_kib: Nanos::new(20),
            ..Costs::default()
        };
        let measured: Vec<Figures> = ROWS.iter().map(|row| row.simulate(&real).unwrap()).collect();
        let mut found = start();
        let first = error(&found, 0..ROWS.len(), &measured).unwrap();
        search(&mut found, &measured).unwrap();
        let last = error(&found, 0..ROWS.len(), &measured).unwrap();
        assert!(last < first / 50.0, "{first} to {last}: {found:?}");
        for (row, real) in ROWS.iter().zip(&measured) {
            let iops = row.simulate(&found).unwrap()[0];
            assert!((iops / real[0] - 1.0).abs() < 0.1, "{row:?}: {iops} of {}", real[0]);
        }
    }
}
