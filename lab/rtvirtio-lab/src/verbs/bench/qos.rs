//! `rtvirtio-lab bench qos`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_bench::qos::cell::Scheme;
use rtvirtio_bench::qos::clients::Between;
use rtvirtio_bench::qos::disk::On;
use rtvirtio_bench::qos::neighbour::Neighbour;
use rtvirtio_bench::qos::{Benchmark, write_report};
use rtvirtio_cases::Tier;
use rtvirtio_cli::input;
use rtvirtio_host::interrupt::Interrupted;

use crate::{Outcome, rtvirtio};

/// Arguments of `bench qos`.
#[derive(clap::Args)]
#[command(
    after_help = "Results go to OUT as JSON lines (cells.jsonl), table.txt and plot.svg; the same OUT \
    continues where it was. Needs root (FUSE, loop)."
)]
pub(crate) struct Args {
    /// Cases: strict8, all, or a list such as 1xL,4xL+M+H
    #[arg(long, default_value = "strict8")]
    cases: String,
    /// Targets: strict, paper
    #[arg(long, value_delimiter = ',', default_value = "strict")]
    tiers: Vec<Tier>,
    /// Background VMs: deep-writer, deep-reader, large-writer, flush-storm, burst, liar
    #[arg(long, value_delimiter = ',', default_value = "deep-writer")]
    neighbours: Vec<Neighbour>,
    /// Time that guests take between the end of a request and the next, µs: 0, 250, or exponential:250 with
    /// that mean. Tasks for which it leaves too little time ask for less
    #[arg(long, value_delimiter = ',', default_value = "0")]
    between: Vec<Between>,
    /// How VMs share the device: none, qos, throttle (qemu-storage-daemon, the background VM at 10 MB/s)
    #[arg(long, value_delimiter = ',', default_value = "none,qos")]
    schemes: Vec<Scheme>,
    /// Repetitions of each case under each scheme
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Length of a window in seconds
    #[arg(long, default_value_t = 20.0)]
    window: f64,
    /// Device: ssd:NAME, an emulated one (ref-4x250, ref-8x80), or file:DIRECTORY, a file of 1.25 GiB there
    #[arg(long, default_value = "ssd:ref-4x250")]
    on: On,
    /// The device's profile: its schedule is made by that, and the bounds of a plan are held against the tails
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Results of `rtvirtio-lab bench` to show beside, such as docs/results/strict
    #[arg(long)]
    beside: Option<PathBuf>,
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
    let program = rtvirtio()?;
    let profile = args.profile.as_deref().map(input::profile).transpose()?;
    let benchmark = Benchmark {
        cases: super::cases(&args.cases)?,
        tiers: args.tiers.clone(),
        neighbours: args.neighbours.clone(),
        between: args.between.clone(),
        schemes: args.schemes.clone(),
        repetitions: args.repetitions,
        window: Duration::from_secs_f64(window),
        on: args.on.clone(),
        profile: profile.as_ref(),
        program: &program,
        out: &args.out,
    };
    let cells = benchmark.run(interrupted)?;
    let text = write_report(&cells, args.beside.as_deref(), &args.out)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&cells)?);
    } else {
        print!("{text}");
    }
    Ok(Outcome::Done)
}
