//! How threads learn that their I/O has ended, measured beside threads that compute.
//!
//! T I/O threads read at random offsets, one request at a time each; C threads beside them count.
//! Polling is best while CPUs are idle and ruins both sides while they are not, sleeping is the
//! reverse; a way to wait is good if it is near the better one everywhere (UniCom's claim).
//!
//! # Targets
//! - *File*: 4 or 128 KiB of a file that has no name, direct, of a disk with all its noise.
//! - *Emulated*: a request ends 8 µs after it was submitted and moves no data. From then on whoever
//!   looks sees it, as if a device had written to memory: a look is one at the clock. Who sleeps is
//!   woken by a timer's interrupt (`clock_nanosleep`, slack 1 ns), as by a device's. No thread of the
//!   device's own takes CPU time from those that are measured. It has no queue: any number of requests
//!   are served at once. For `sqpoll` it is `IORING_OP_TIMEOUT`: a kernel thread has to find something.
//!
//! # Modes
//! | mode | submits by | learns by |
//! | --- | --- | --- |
//! | `pread` | `pread`, `clock_nanosleep` | sleeping in the call |
//! | `peek-spin` | a ring of the thread's own, or the clock | looking at its completion queue for ever |
//! | `sqpoll` | shared memory; a kernel thread for each ring polls it | sleeping in `io_uring_enter` |
//! | `sqpoll-shared` | the same, one kernel thread for all rings | the same |
//! | `interrupt`, `poll`, `adaptive` | a ring of the thread's own, or the clock | `rtvirtio_completion::Spinner` |
//!
//! Rings have the file and the buffer registered. `interrupt` submits and sleeps in one system call.
//! `adaptive` uses the plain call where it may not spin: that is the cheapest way to sleep, and what
//! the preload library does.
//!
//! # Cells
//! A *cell* is one mode with T and C on one target for one window. In each repetition the places
//! (target, T, C) come in an order of their own, by the seed, and within a place the modes do, one
//! directly after the other: what changes slowly on the machine meets all of them alike. Ratios are
//! of two cells of one place and repetition. What C threads compute alone is measured once in each
//! repetition. All threads of a cell start together.
//!
//! What the threads do is [`rtvirtio_testbed::readers`]'s.
//!
//! - `live`: whether `adaptive` follows a load that comes and goes.
//! - `judge`, `table`, `page`: what it comes to, for a terminal, for a page.
//!
//! Properties (tests of the same name): `every_mode_reads_on_both_targets_and_leaves_nothing`,
//! `order_is_the_seeds_and_keeps_modes_together`.

mod judge;
mod live;
mod matrix;
mod page;
mod table;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_completion::Costs;
use rtvirtio_spec::run::{Canary, Machine};
use rtvirtio_testbed::cpu::usable;
use rtvirtio_testbed::readers::{
    AROUND, CpuSeconds, Io, Measured, Mode, Target, TestFile, Threads, WARM_UP,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::experiment::{self, Experiment, Report, Run, seconds};
use crate::lines::Lines;
use matrix::{Extent, Matrix};

/// Names a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellKey {
    /// None: compute threads alone.
    pub io: Option<Io>,
    /// Compute threads.
    pub compute: usize,
    /// From 0.
    pub repetition: u32,
}

impl fmt::Display for CellKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.io {
            None => write!(f, "C{} alone", self.compute),
            Some(Io { target, mode, threads }) => {
                write!(f, "{target} T{threads} C{} {mode}", self.compute)
            }
        }
    }
}

/// The highest percentile with at least 10 samples beyond it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// 99, 99.9 or 99.99.
    pub percentile: f64,
    /// Its latency, µs.
    pub us: f64,
}

/// What the I/O threads had.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IoResult {
    /// Requests that ended in the window.
    pub n: u64,
    /// A second.
    pub iops: f64,
    /// From one request's submission to the thread's seeing its end, µs.
    pub mean_us: f64,
    /// Half of the requests are quicker.
    pub p50_us: f64,
    /// 99 %.
    pub p99_us: f64,
    /// 99.9 %.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// The one that can be judged; none with fewer than 1,000 requests.
    pub judged: Option<Judged>,
    /// Of all requests, the share whose end was seen by looking.
    pub spun: f64,
}

/// What a cell measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    #[serde(flatten)]
    pub key: CellKey,
    /// Length of the window as asked for, s.
    pub window_s: f64,
    /// As it was, s.
    pub seconds: f64,
    /// None: there were no I/O threads.
    pub result: Option<IoResult>,
    /// Iterations of all compute threads a second; none: there were none.
    pub compute_rate: Option<f64>,
    /// Who used the CPUs.
    pub cpu: CpuSeconds,
    /// CPUs that the threads could use.
    pub cpus: usize,
    /// The machine in the window.
    pub machine: Machine,
    /// Lateness of a thread that sleeps, beside them.
    pub canary: Canary,
    /// When it ended.
    pub at: String,
}

impl Cell {
    fn new(key: CellKey, window: Duration, cpus: usize, measured: &Measured) -> Self {
        let seconds = measured.seconds;
        let result = key.io.map(|_| {
            let latencies = &measured.latencies;
            let us = |ns: u64| ns as f64 / 1e3;
            let at = |quantile| us(latencies.value_at_quantile(quantile));
            let judged = rtvirtio_cases::judged_percentile(latencies.len());
            let judged = judged.map(|percentile| {
                let percentile = percentile.get();
                Judged { percentile, us: at(percentile / 100.0) }
            });
            IoResult {
                n: latencies.len(),
                iops: measured.requests as f64 / seconds,
                mean_us: latencies.mean() / 1e3,
                p50_us: at(0.5),
                p99_us: at(0.99),
                p999_us: at(0.999),
                max_us: us(latencies.max()),
                judged,
                spun: measured.spun as f64 / latencies.len().max(1) as f64,
            }
        });
        Self {
            key,
            window_s: window.as_secs_f64(),
            seconds,
            result,
            compute_rate: (key.compute > 0).then(|| measured.iterations as f64 / seconds),
            cpu: measured.cpu,
            cpus,
            machine: measured.machine,
            canary: measured.canary,
            at: jiff::Timestamp::now().to_string(),
        }
    }
}

/// Seconds with a load in a run of `--live`, and as many without.
const CYCLES: u32 = 5;

/// Arguments of `bench completion`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "T I/O threads read at random offsets, one request at a time each, beside C threads that \
    count; n is the number of CPUs that the command may use.\n\n\
    Targets: emulated, a request that ends 8 us after it was submitted, by a timer's interrupt for who sleeps; file-4k \
    and file-128k, direct reads of a file of 512 MiB that is made in --directory and has no name, so \
    nothing of it stays.\n\n\
    Modes: pread (clock_nanosleep on the emulated device); peek-spin, a ring that is looked at for ever; \
    sqpoll, a kernel thread for each ring; sqpoll-shared, one for all; and the project's interrupt, poll \
    and adaptive.\n\n\
    Results go to OUT as JSON lines (cells.jsonl, live.jsonl), table.txt and report.html; the same OUT \
    continues where it was. Wants a machine on which nothing else runs."
)]
pub struct Benchmark {
    /// Every T of 1 to 32, C of 0, n/2, n, 2n, target and mode, not only what the acceptance asks
    #[arg(long)]
    full: bool,
    /// Instead of cells: a load that comes and goes each second, and whether adaptive follows
    #[arg(long, conflicts_with_all = ["full", "on", "modes", "threads", "compute"])]
    live: bool,
    /// Only these targets: emulated, file-4k, file-128k
    #[arg(long, value_delimiter = ',')]
    on: Vec<Target>,
    /// Only these modes
    #[arg(long, value_delimiter = ',')]
    modes: Vec<Mode>,
    /// Only these numbers of I/O threads T
    #[arg(long, value_delimiter = ',', value_name = "T")]
    threads: Vec<usize>,
    /// Only these numbers of compute threads C
    #[arg(long, value_delimiter = ',', value_name = "C")]
    compute: Vec<usize>,
    /// Repetitions of each cell; runs of --live
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a cell's window in seconds
    #[arg(long, default_value = "3", value_parser = seconds::<100, 600_000>)]
    window: Duration,
    /// Where the file is made: on the disk that is measured
    #[arg(long, default_value = "/var/tmp")]
    directory: PathBuf,
    /// Seed of the order
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Benchmark {
    /// The cells that the arguments ask for, if not for a live load.
    fn matrix(&self) -> Result<Matrix> {
        let extent = if self.full { Extent::Full } else { Extent::Acceptance };
        let mut matrix = Matrix::new(extent, usable()?.len());
        let is_asked = |io: &Io, compute: usize| {
            (self.on.is_empty() || self.on.contains(&io.target))
                && (self.modes.is_empty() || self.modes.contains(&io.mode))
                && (self.threads.is_empty() || self.threads.contains(&io.threads))
                && (self.compute.is_empty() || self.compute.contains(&compute))
        };
        matrix.retain(is_asked);
        ensure!(
            !matrix.is_empty(),
            "no cell of the matrix is on what --on, --modes, --threads and --compute name (--full has T of 1, \
             2, 4, 8, 16, 32 and C of 0, n/2, n, 2n)"
        );
        Ok(matrix)
    }
}

impl Experiment for Benchmark {
    type Key = CellKey;
    type Cell = Cell;
    type Setup = (Option<TestFile>, Costs);

    const OUT: &'static str = "rtvirtio-bench-completion";

    fn keys(&self) -> Result<Vec<CellKey>> {
        let matrix = self.matrix()?;
        let repetitions = if self.live { 0 } else { self.repetitions };
        Ok(matrix.keys(repetitions, self.seed))
    }

    fn is_of(cell: &Cell, key: &CellKey) -> bool {
        cell.key == *key
    }

    fn label(&self, key: &CellKey) -> String {
        format!("{key}, repetition {}", key.repetition + 1)
    }

    fn expected(&self, _: &CellKey) -> Duration {
        WARM_UP + self.window + AROUND
    }

    fn foreign(&self, cell: &Cell) -> Option<&'static str> {
        let (cpus, window_s) = (usable().ok()?.len(), self.window.as_secs_f64());
        let is_same = cell.cpus == cpus && (cell.window_s - window_s).abs() < 1e-6;
        // Where nothing is measured, what is there may be of any window.
        (!is_same && !self.live).then_some("another window or number of CPUs")
    }

    fn set_up(&self, missing: &[CellKey], run: &Run<'_>) -> Result<Self::Setup> {
        let reads_file = missing.iter().any(|key| key.io.is_some_and(|io| io.target.is_file()));
        let file =
            reads_file.then(|| TestFile::make(&self.directory, run.interrupted)).transpose()?;
        Ok((file, Costs::calibrate()))
    }

    fn measure(
        &self,
        (file, costs): &mut Self::Setup,
        key: &CellKey,
        run: &Run<'_>,
    ) -> Result<Cell> {
        let (seed, file) = (key.repetition.into(), file.as_ref());
        let threads = Threads { io: key.io, compute: key.compute, seed, file, costs: *costs };
        let measured = threads.measure(self.window, run.interrupted)?;
        Ok(Cell::new(*key, self.window, usable()?.len(), &measured))
    }

    /// Also what an earlier command left of the other kind.
    fn report(&self, cells: &[Cell], run: &Run<'_>) -> Result<Report> {
        let live = Lines::open(&run.out.join(live::Benchmark::FILE))?.into_all();
        let commands = std::fs::read_to_string(run.out.join("commands.txt")).unwrap_or_default();
        let verdicts = judge::verdicts(cells, (!live.is_empty()).then(|| live::verdict(&live)));
        let page = page::render(cells, &live, &verdicts, commands.lines());
        let text = table::render(cells, &verdicts);
        let json = json!({ "cells": cells, "live": live, "verdicts": verdicts });
        Ok(Report::of(text, json).with("report.html", page))
    }

    fn run(&self, run: &Run<'_>) -> Result<Vec<Cell>> {
        if self.live {
            live::Benchmark { repetitions: self.repetitions, cycles: CYCLES }.run(run)?;
        }
        experiment::complete(self, run)
    }
}
