//! `rtvirtio-lab bench qos-admission`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_bench::qos::admission::{Benchmark, SETS, table};
use rtvirtio_host::interrupt::Interrupted;

use crate::{Outcome, rtvirtio};

/// Arguments of `bench qos-admission`.
#[derive(clap::Args)]
#[command(
    after_help = "Results go to OUT as JSON lines (cells.jsonl) and table.txt; the same OUT \
    continues where it was. Needs root (FUSE, loop) and 5 GiB of memory."
)]
pub(crate) struct Args {
    /// The first so many of the 60 sets
    #[arg(long, default_value_t = SETS, value_parser = clap::value_parser!(u32).range(1..=i64::from(SETS)))]
    sets: u32,
    /// Length of a window in seconds; 20 is the least that judges the lowest rates
    #[arg(long, default_value_t = 20.0)]
    window: f64,
    /// Emulated SSD: ref-4x250 or ref-8x80
    #[arg(long, default_value = "ref-4x250")]
    ssd: String,
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-qos-admission")]
    out: PathBuf,
    /// Print cells as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let window = args.window;
    ensure!((1.0..=3600.0).contains(&window), "--window is {window}, outside 1 to 3600 s");
    let program = rtvirtio()?;
    let benchmark = Benchmark {
        sets: args.sets,
        window: Duration::from_secs_f64(window),
        ssd: args.ssd.clone(),
        program: &program,
        out: &args.out,
    };
    let cells = benchmark.run(interrupted)?;
    let text = table(&cells);
    super::told(&args.out, &cells, &text, args.json)
}
