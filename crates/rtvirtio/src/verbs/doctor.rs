//! `rtvirtio doctor`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use comfy_table::{ContentArrangement, Table, presets};
use rtvirtio_host::dataplane::{ControlClient, DEFAULT_SOCKET};
use rtvirtio_host::doctor::{Finding, Status, io_uring, nics, probe};
use rtvirtio_spec::control::IoThreadState;

use crate::{Outcome, input, output};

/// How long the data plane may take to answer.
const ANSWER: Duration = Duration::from_millis(500);

/// Arguments of `doctor`.
#[derive(clap::Args)]
#[command(
    after_help = "With PATHs it says instead what each is made of, down to the disks whose schedulers and limits \
    count."
)]
pub(crate) struct Args {
    /// Images, devices or directories
    paths: Vec<PathBuf>,
    /// The data plane's control socket, for advice on interrupts that disturb its IOThreads
    /// [default: /run/rtvirtio/control.sock if it is there]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    if !args.paths.is_empty() {
        return storage(args);
    }
    let host = input::host();
    let mut findings = probe(&host);
    findings.push(io_uring(&host, rtvirtio_dataplane::try_ring()));
    findings.extend(nics::probe(&host, iothreads(args.socket.as_deref())?.as_deref()));
    if args.json {
        input::print_json(&findings)?;
    } else {
        println!("{}", table(&findings));
    }
    Ok(Outcome::Done)
}

/// The data plane's IOThreads; `None`: there is no data plane, or none that answers where nobody named one.
fn iothreads(socket: Option<&Path>) -> Result<Option<Vec<IoThreadState>>> {
    let path = socket.unwrap_or(Path::new(DEFAULT_SOCKET));
    if socket.is_none() && !path.exists() {
        return Ok(None);
    }
    match ControlClient::new(path).with_timeout(ANSWER).get("/v1/iothreads") {
        Ok(iothreads) => Ok(Some(iothreads)),
        Err(error) if socket.is_some() => Err(error.into()),
        Err(error) => {
            eprintln!("warning: data plane: {:#}", anyhow::Error::from(error));
            Ok(None)
        }
    }
}

fn storage(args: &Args) -> Result<Outcome> {
    let mut found = Vec::new();
    for path in &args.paths {
        // Its links are followed where no server that may be gone has to be asked.
        let whole = std::path::absolute(path).with_context(|| format!("{}", path.display()))?;
        let stack = input::host().storage(&whole)?;
        if !args.json {
            println!("{}", output::visible(&format!("{}: {stack}", path.display())));
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
