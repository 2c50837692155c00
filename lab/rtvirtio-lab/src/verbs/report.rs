//! `rtvirtio-lab report`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rtvirtio_bench::stats::{Runs, runs};
use rtvirtio_bench::{campaign, report};
use rtvirtio_cases::wilson_interval;
use rtvirtio_spec::run::Cell;
use serde::Serialize;

use crate::{Outcome, input};

/// Arguments of `report`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A benchmark's directory
    run: PathBuf,
    /// Where to write the HTML file [default: RUN/report.html]
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Print each scheme's verdict as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let cells = campaign::read(&args.run)?;
    let output = args.output.clone().unwrap_or_else(|| args.run.join("report.html"));
    write(&cells, &output, "rtvirtio benchmark", &[])?;
    if args.json {
        input::print_json(&verdicts(&cells))?;
    } else {
        println!("{}", report::table(&cells));
        println!("{}", output.display());
    }
    Ok(Outcome::Done)
}

/// Renders `cells` to `output`.
pub(crate) fn write(cells: &[Cell], output: &Path, title: &str, notes: &[String]) -> Result<()> {
    let device: std::collections::BTreeSet<_> = cells.iter().map(|c| c.device.as_str()).collect();
    let context = report::Context {
        title: title.to_owned(),
        generated: jiff::Timestamp::now().to_string(),
        machine: machine(),
        device: device.into_iter().collect::<Vec<_>>().join(", "),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        notes: notes.to_vec(),
    };
    input::write(output, &report::render(cells, &context)?)
}

/// CPUs and kernel of this machine, in a line.
pub(crate) fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(": ").map(|(_, m)| m))
        .unwrap_or("unknown CPU");
    let cpus = rtvirtio_testbed::cpu::available();
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{cpus} × {model}, Linux {}", release.trim())
}

/// How a scheme did.
#[derive(Debug, Serialize)]
pub(crate) struct Verdict {
    scheme: String,
    runs: usize,
    passed: usize,
    /// Wilson's 95 % interval of the pass rate.
    interval: (f64, f64),
    /// Of them measured while the machine was late.
    disturbed: usize,
    by_case: BTreeMap<String, (usize, usize)>,
}

/// Each scheme's verdict over all cells, with (passed, runs) by case.
pub(crate) fn verdicts(cells: &[Cell]) -> Vec<Verdict> {
    let passed = |cells: &[&Cell]| cells.iter().filter(|cell| cell.passed).count();
    let verdict = |of: Runs<'_, String, Cell>| {
        let by_case = runs(of.cells.iter().copied(), |cell| cell.key.case.clone());
        let by_case =
            by_case.into_iter().map(|case| (case.key, (passed(&case.cells), case.cells.len())));
        let (n, passed) = (of.n(), passed(&of.cells));
        Verdict {
            runs: n,
            passed,
            interval: wilson_interval(passed as u64, n as u64),
            disturbed: of.cells.iter().filter(|cell| cell.disturbed.is_some()).count(),
            by_case: by_case.collect(),
            scheme: of.key,
        }
    };
    let mut by_scheme = runs(cells, |cell| cell.key.scheme.clone());
    by_scheme.sort_by(|a, b| a.key.cmp(&b.key));
    by_scheme.into_iter().map(verdict).collect()
}
