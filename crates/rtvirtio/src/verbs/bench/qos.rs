//! `rtvirtio bench qos`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_bench::load::Interrupted;
use rtvirtio_bench::qos::Benchmark;
use rtvirtio_bench::qos::table::table;
use rtvirtio_cases::Case;

use crate::Outcome;

/// Arguments of `bench qos`.
#[derive(clap::Args)]
#[command(
    after_help = "Results go to OUT as JSON lines (cells.jsonl) and table.txt; the same OUT \
    continues where it was. Needs root (FUSE, loop)."
)]
pub(crate) struct Args {
    /// Cases, such as 4xL+M+H; the first benchmark's eight if nothing says
    #[arg(long, value_delimiter = ',')]
    cases: Vec<Case>,
    /// Repetitions of each case under each scheme
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a window in seconds
    #[arg(long, default_value_t = 20.0)]
    window: f64,
    /// Emulated SSD: ref-4x250 or ref-8x80
    #[arg(long, default_value = "ref-4x250")]
    ssd: String,
    /// Where results go
    #[arg(long, default_value = "rtvirtio-bench-qos")]
    out: PathBuf,
    /// Print cells as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let window = args.window;
    ensure!((1.0..=3600.0).contains(&window), "--window is {window}, outside 1 to 3600 s");
    let cases = if args.cases.is_empty() { Case::strict8().into() } else { args.cases.clone() };
    let program = std::env::current_exe()?;
    let benchmark = Benchmark {
        cases,
        repetitions: args.repetitions,
        window: Duration::from_secs_f64(window),
        ssd: args.ssd.clone(),
        program: &program,
        out: &args.out,
    };
    let cells = benchmark.run(interrupted)?;
    let text = table(&cells);
    std::fs::write(args.out.join("table.txt"), &text)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&cells)?);
    } else {
        print!("{text}");
    }
    Ok(Outcome::Done)
}
