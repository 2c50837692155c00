//! `rtvirtio-lab bench qos-changes`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_bench::qos::changes::{Benchmark, plot, table};
use rtvirtio_host::interrupt::Interrupted;

use crate::{Outcome, rtvirtio};

/// Arguments of `bench qos-changes`.
#[derive(clap::Args)]
#[command(
    after_help = "Results go to OUT as JSON lines (changes.jsonl), table.txt and plot.svg; the same \
    OUT continues where it was. Needs root (FUSE, loop)."
)]
pub(crate) struct Args {
    /// Runs with a schedule, and as many without
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Time between two changes in seconds
    #[arg(long, default_value_t = 6.0)]
    phase: f64,
    /// Emulated SSD: ref-4x250 or ref-8x80
    #[arg(long, default_value = "ref-4x250")]
    ssd: String,
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-qos-changes")]
    out: PathBuf,
    /// Print runs as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let phase = args.phase;
    ensure!((1.5..=600.0).contains(&phase), "--phase is {phase}, outside 1.5 to 600 s");
    let program = rtvirtio()?;
    let benchmark = Benchmark {
        repetitions: args.repetitions,
        phase: Duration::from_secs_f64(phase),
        ssd: args.ssd.clone(),
        program: &program,
        out: &args.out,
    };
    let runs = benchmark.run(interrupted)?;
    let text = table(&runs);
    std::fs::write(args.out.join("plot.svg"), plot(&runs))?;
    super::told(&args.out, &runs, &text, args.json)
}
