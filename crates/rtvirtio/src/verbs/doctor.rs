//! `rtvirtio doctor`.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use comfy_table::{ContentArrangement, Table, presets};
use rtvirtio_host::doctor::{Finding, Status, probe};

use crate::{Outcome, input};

/// Arguments of `doctor`.
#[derive(clap::Args)]
#[command(
    after_help = "With PATHs it says instead what each is made of, down to the disks whose schedulers and limits \
    count."
)]
pub(crate) struct Args {
    /// Images, devices or directories
    paths: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    if !args.paths.is_empty() {
        return storage(args);
    }
    let findings = probe(&input::host());
    if args.json {
        input::print_json(&findings)?;
    } else {
        println!("{}", table(&findings));
    }
    Ok(Outcome::Done)
}

fn storage(args: &Args) -> Result<Outcome> {
    let mut found = Vec::new();
    for path in &args.paths {
        let whole = std::fs::canonicalize(path).with_context(|| format!("{}", path.display()))?;
        let stack = input::host().storage(&whole)?;
        if !args.json {
            println!("{}: {stack}", path.display());
        }
        found.push(serde_json::json!({ "path": path, "storage": stack }));
    }
    if args.json {
        input::print_json(&found)?;
    }
    Ok(Outcome::Done)
}

fn table(findings: &[Finding]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["", "what", "found", "remedy"]);
    for f in findings {
        let mark = match f.status {
            Status::Ok => "ok",
            Status::Degraded => "limited",
            Status::Missing => "missing",
        };
        table.add_row([mark, f.name, &f.detail, f.remedy.as_deref().unwrap_or("")]);
    }
    table
}
