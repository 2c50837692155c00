//! `rtvirtio-lab bench path`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rtvirtio_bench::campaign;
use rtvirtio_bench::path::{Costs, agreement, compare, repeated, table};
use rtvirtio_cli::progress::Progress;
use rtvirtio_units::Nanos;
use serde_json::json;

use crate::{Outcome, input};

/// About how long a cell takes to simulate.
const CELL: Duration = Duration::from_millis(500);

/// Arguments of `bench path`.
#[derive(clap::Args)]
#[command(after_help = "\
Tails agree within 25 %, 1 ms or 1.5 times the disagreement of two repetitions, whichever is largest; rates \
within 5 %. The percentile is the one that the cell judged. Simulated: the median of 5 seeds, each of the cell's \
window. Below stand real runs in the simulation's place: the second of a condition for the first, excused by no \
disagreement, and a third by that of the two before. Cells that do not count are left out.

The simulator leaves out CPU time (each request takes --software-us longer, whoever else runs), merging, buffered \
writes, flushes, the order of sectors under mq-deadline, the virtqueue's limit of requests, and more than one hardware \
queue. docs/simulator.md says what decides tails in this path.")]
pub(crate) struct Args {
    /// Directories of campaigns (with a cells.jsonl each)
    #[arg(required = true)]
    campaigns: Vec<PathBuf>,
    /// What a request takes between scheduler and device and back, µs
    #[arg(long, default_value_t = 85.0)]
    transport_us: f64,
    /// What it takes beside that (system calls, wake-ups), mean, µs
    #[arg(long, default_value_t = 40.0)]
    software_us: f64,
    /// Leave out cells whose repetition (of `bench --conditions`: the condition) is below this number
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u32,
    /// Where table.txt and rows.json go [default: nowhere]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print rows and agreements as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let time = |name, us: f64| {
        ensure!((0.0..=1e6).contains(&us), "{name} is 0 to 1,000,000");
        Ok(Nanos::from_secs_f64(us * 1e-6))
    };
    let costs = Costs {
        transport: time("--transport-us", args.transport_us)?,
        software: time("--software-us", args.software_us)?,
    };
    let mut cells = Vec::new();
    for directory in &args.campaigns {
        cells.extend(campaign::read(directory)?);
    }
    cells.retain(|cell| cell.key.repetition >= args.from);
    let counted = cells.iter().filter(|c| c.disturbed.is_none()).count();
    let mut progress = Progress::new(counted, CELL * counted as u32);
    let rows = compare(&cells, costs, |label| {
        progress.finish(CELL);
        progress.start(label, CELL);
    })?;
    progress.finish(CELL);
    let agreements = agreement(&rows, &repeated(&cells)?);
    let json = json!({ "agreements": agreements, "rows": rows });
    let text = table(&agreements);
    if let Some(out) = &args.out {
        std::fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
        std::fs::write(out.join("table.txt"), &text)?;
        std::fs::write(out.join("rows.json"), serde_json::to_string_pretty(&json)?)?;
        super::note_command(out)?;
    }
    if args.json {
        input::print_json(&json)?;
    } else {
        print!("{text}");
    }
    Ok(Outcome::Done)
}
