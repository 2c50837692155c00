//! `rtvirtio-lab bench completion`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_bench::completion::judge::verdicts;
use rtvirtio_bench::completion::{
    Benchmark, Extent, Io, Matrix, Mode, Target, live, page, table, usable_cpus,
};
use rtvirtio_bench::experiment::{Experiment as _, Report, seconds};
use rtvirtio_host::interrupt::Interrupted;
use serde_json::json;

use crate::Outcome;

/// Arguments of `bench completion`.
#[derive(clap::Args)]
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
pub(crate) struct Args {
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
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-completion")]
    out: PathBuf,
    /// Seed of the order
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print cells, runs of --live and verdicts as JSON
    #[arg(long)]
    json: bool,
}

/// Seconds with a load in a run of `--live`, and as many without.
const CYCLES: u32 = 5;

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let matrix = matrix(args)?;
    let benchmark = Benchmark {
        matrix,
        repetitions: args.repetitions,
        window: args.window,
        seed: args.seed,
        directory: &args.directory,
    };
    let live = live::Benchmark {
        repetitions: if args.live { args.repetitions } else { 0 },
        cycles: CYCLES,
    };
    // What an earlier command left in the directory is shown as well.
    let cells = benchmark.run(&args.out, interrupted)?;
    let runs = live.run(&args.out, interrupted)?;
    let facts = super::note_command(&args.out)?;
    let verdicts = verdicts(&cells, (!runs.is_empty()).then(|| live::verdict(&runs)));
    let text = table::render(&cells, &verdicts);
    let page = page::render(&cells, &runs, &verdicts, &facts);
    let json = json!({ "cells": cells, "live": runs, "verdicts": verdicts });
    let report = Report::of(text, json).with("report.html", page);
    super::told(&report, &args.out, args.json)
}

/// The cells that the arguments ask for: none with `--live`.
fn matrix(args: &Args) -> Result<Matrix> {
    let extent = if args.full { Extent::Full } else { Extent::Acceptance };
    let mut matrix = Matrix::new(extent, usable_cpus()?);
    let is_asked = |io: &Io, compute: usize| {
        (args.on.is_empty() || args.on.contains(&io.target))
            && (args.modes.is_empty() || args.modes.contains(&io.mode))
            && (args.threads.is_empty() || args.threads.contains(&io.threads))
            && (args.compute.is_empty() || args.compute.contains(&compute))
    };
    matrix.retain(is_asked);
    ensure!(
        !matrix.is_empty(),
        "no cell of the matrix is on what --on, --modes, --threads and --compute name (--full has T of 1, \
         2, 4, 8, 16, 32 and C of 0, n/2, n, 2n)"
    );
    if args.live {
        matrix.retain(|_, _| false);
    }
    Ok(matrix)
}
