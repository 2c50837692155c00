//! `rtvirtio-lab bench dataplane`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use rtvirtio_bench::dataplane::Benchmark;
use rtvirtio_bench::dataplane::footprint::{self, Footprint};
use rtvirtio_bench::dataplane::moves::{Moves, Shown, Stage};
use rtvirtio_bench::dataplane::verify::Verify;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_testbed::server::rtvirtio;

use super::Of;
use crate::{Outcome, input};

/// Arguments of `bench dataplane`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    #[command(flatten)]
    all: Of<Benchmark>,
}

#[derive(clap::Subcommand)]
enum Other {
    /// Random writes, reads, write-zeroes, discards and flushes whose content is checked. The
    /// disk's content is lost
    Verify(Verify),
    /// Random queues change their IOThread all the time, under a load whose content is checked
    Moves(MovesArgs),
    /// Time to start, memory, and CPU when idle, of `rtvirtio serve` with many disks
    Footprint(FootprintArgs),
}

#[derive(clap::Args)]
struct MovesArgs {
    /// Loads: light (one queue at depth 1), heavy (4 at depth 32, an emulated SSD), ram, disk
    /// (heavy on a file, direct), disconnects, memory and reset (heavy, racing those)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "light,heavy,ram,disk,disconnects,memory,reset"
    )]
    stages: Vec<Stage>,
    #[command(flatten)]
    moves: Moves,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct FootprintArgs {
    /// How many disks: sparse files in the temporary directory
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    devices: Vec<u16>,
    /// Queues of each
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// The rtvirtio that serves; without, the one beside this program
    #[arg(long)]
    program: Option<PathBuf>,
}

pub(super) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    match &args.other {
        Some(Other::Verify(args)) => {
            input::print_json(&args.run(interrupted)?)?;
            Ok(Outcome::Done)
        }
        Some(Other::Footprint(args)) => footprint(args, interrupted),
        Some(Other::Moves(args)) => moved(args, interrupted),
        None => args.all.run(interrupted),
    }
}

fn moved(args: &MovesArgs, interrupted: &Interrupted) -> Result<Outcome> {
    let mut all = Vec::new();
    for &stage in &args.stages {
        let shown = args.moves.run(stage, interrupted).with_context(|| stage.name().to_string())?;
        if !args.json {
            println!("{shown}");
        }
        all.push(shown);
    }
    if args.json {
        input::print_json(&all)?;
    }
    Ok(if all.iter().all(Shown::passed) { Outcome::Done } else { Outcome::Unmet })
}

fn footprint(args: &FootprintArgs, interrupted: &Interrupted) -> Result<Outcome> {
    let program = args.program.clone().map_or_else(rtvirtio, Ok)?;
    let measure = |devices: &u16| {
        footprint::measure(usize::from(*devices), args.queues.into(), &program, interrupted)
    };
    let rows: Vec<_> = args.devices.iter().map(measure).collect::<Result<_>>()?;
    print!("{}", footprint::render(&rows));
    Ok(if rows.iter().all(Footprint::is_within) { Outcome::Done } else { Outcome::Unmet })
}
