//! What things cost on this machine, for the simulator ([`rtvirtio_sim::calibration`]).
//!
//! A *round* has each row once; what several say is their median, so that rounds between the
//! cells of a campaign say what the machine was like in it, which is not what it was before. What a message costs comes from
//! the pause of queues that move, less a wake-up.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_sim::Costs;
use rtvirtio_sim::calibration::{self, Figures, ROWS, Row};
use rtvirtio_testbed::scenario::{Trial, cpus};
use rtvirtio_testbed::work_directory::WorkDirectory;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use super::cell::{PolicyConfig, Settings};
use super::trial::{Measured, trial};
use crate::dataplane::moves::{self, Moves};
use crate::stats::median;
use crate::table::Table;

/// Length of a measured window.
const WINDOW: Nanos = Nanos::from_millis(1_000);
/// From the server's start to the load's: one VM connects.
const LEAD: Duration = Duration::from_millis(500);
/// How long queues are moved in a round, and how often a second.
const MOVING: (Duration, f64) = (Duration::from_secs(1), 500.0);
/// How long a round takes.
pub(crate) const ROUND: Duration = Duration::from_secs(32);
/// Rounds of a calibration on its own.
const ROUNDS: usize = 5;

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
            let figures = measured(row, program, interrupted);
            figures.with_context(|| label.clone()).map(|figures| (label, figures))
        };
        let rows = ROWS.iter().map(measure).collect::<Result<_>>()?;
        let directory = WorkDirectory::new()?;
        let ((time, rate), program) = (MOVING, Some(program.to_owned()));
        let disk_directory = directory.path().to_owned();
        let mover = Moves { program, disk_directory, time, rate, seed: 1 };
        let shown = mover.run(moves::Stage::Light, interrupted)?;
        let (pause_us, wake_us) = (shown.pause.p50_us, shown.wake.p50_us);
        Ok(Self { rows, pause_us, wake_us, at: jiff::Timestamp::now().to_string() })
    }
}

/// A row on a server of its own, verified.
fn measured(row: &Row, program: &Path, interrupted: &Interrupted) -> Result<Figures> {
    let settings =
        Settings { queues: row.queues, cpu_us: row.cpu_us, kib_ns: 0, ..Settings::default() };
    let (of, scenario, cpus) = (PolicyConfig::Static1, row.scenario(WINDOW), cpus()?);
    let vcpus = row.vcpus.places().map(|at| cpus[usize::from(at)]).collect();
    let trial = trial(program, &settings, &scenario, (of.kind().name(), of.threads()));
    let trial = Trial { vcpus: Some(vcpus), lead: LEAD, ..trial };
    let measured = Measured::of(&trial, interrupted, |_, _| Ok(()))?;
    let phase = measured.phases.first().context("there is no phase")?;
    let iops = phase.iops();
    let each = |cpus: f64| cpus * 1e9 / iops.max(1.0);
    Ok([iops, each(phase.io_ran), each(phase.vcpus_ran - phase.computed)])
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
    let message = Nanos::from_secs_f64((pause - wake).max(0.1) / 1e6);
    let (costs, simulated) = calibration::find(&measured, message)?;
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
