//! `rtvirtio-lab bench qos-cost`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_bench::qos::cost::{Benchmark, VMS, table};
use rtvirtio_host::interrupt::Interrupted;

use crate::{Outcome, rtvirtio};

/// Arguments of `bench qos-cost`.
#[derive(clap::Args)]
#[command(
    after_help = "Results go to OUT as JSON lines (cells.jsonl) and table.txt; the same OUT \
    continues where it was. Wants a machine on which nothing else runs, with 2 CPUs an IOThread."
)]
pub(crate) struct Args {
    /// Numbers of IOThreads that share the schedule
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    iothreads: Vec<usize>,
    /// Pairs of each, with and without a schedule
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a window in seconds
    #[arg(long, default_value_t = 3.0)]
    window: f64,
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-qos-cost")]
    out: PathBuf,
    /// Print cells as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let window = args.window;
    ensure!((0.1..=600.0).contains(&window), "--window is {window}, outside 0.1 to 600 s");
    let threads = &args.iothreads;
    ensure!(threads.iter().all(|n| (1..=VMS).contains(n)), "--iothreads is outside 1 to {VMS}");
    let program = rtvirtio()?;
    let benchmark = Benchmark {
        iothreads: threads.clone(),
        repetitions: args.repetitions,
        window: Duration::from_secs_f64(window),
        program: &program,
        out: &args.out,
    };
    let cells = benchmark.run(interrupted)?;
    let text = table(&cells);
    super::told(&args.out, &cells, &text, args.json)
}
