//! `rtvirtio doctor`.

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};
use rtvirtio_host::doctor::{Finding, Status, probe};

use crate::{Outcome, input};

/// Arguments of `doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let findings = probe(&input::host());
    if args.json {
        input::print_json(&findings)?;
    } else {
        println!("{}", table(&findings));
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
