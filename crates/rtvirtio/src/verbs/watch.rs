//! `rtvirtio watch`: each task's tail as it happens, on a terminal, as lines or as metrics, and the closed
//! loop. What is watched, and when another plan is made, is [`rtvirtio_controller`]'s.

mod display;
mod metrics;

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rtvirtio_cli::log::{self, Level};
use rtvirtio_controller::look::Look;
use rtvirtio_controller::{Loop, Planner};
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_spec::specification::Specification;

use super::plan::{ModelChoice, plan_host, profile_of};
use crate::{Outcome, input, output};

/// Arguments of `watch`.
#[derive(clap::Args)]
#[command(after_help = "A disk's NAME in the specification is the device with the id NAME or \
    ua-NAME in QEMU; in libvirt <alias name='ua-NAME'/> in its <disk> gives it that id.\n\
    --control sets the host's knobs alone, no guest's and no IOThread's.\n\
    SIGHUP has the specification read again, unless a terminal shows it. Ctrl-C ends it; settings that it applied stay until `rtvirtio rollback`.")]
pub(crate) struct Args {
    /// The specification (TOML)
    specification: PathBuf,
    /// Plan again and apply when VMs come or go, or a target is at risk
    #[arg(long)]
    control: bool,
    /// Seconds between two looks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=60))]
    interval: u64,
    /// End after this many seconds
    #[arg(long, value_name = "SECONDS")]
    duration: Option<u64>,
    /// Serve Prometheus metrics on this address, such as 127.0.0.1:9477
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Control socket of the data plane whose devices are shown too; without, the usual one if it
    /// is there
    #[arg(long, value_name = "SOCKET")]
    dataplane: Option<PathBuf>,
    /// Print a JSON line at each look
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    // A service has no reader of its looks: what happens goes to the journal too.
    if log::is_journal() {
        log::start(Level::Info);
    }
    let metrics = args.listen.map(metrics::Server::start).transpose()?;
    let is_terminal = std::io::stdout().is_terminal();
    let reload = Arc::new(AtomicBool::new(false));
    if !is_terminal {
        signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(&reload))
            .context("install a handler for SIGHUP")?;
    }
    // The host alone is planned for: the monitors serve one client, which is the loop.
    let planner = args.control.then(|| -> Box<Planner> {
        Box::new(|specification, doubts| plan_host(specification, doubts, &ModelChoice::Structural))
    });
    let specification = read(&args.specification)?;
    if args.control {
        // Now, and not when the first VM starts.
        for device in &specification.devices {
            profile_of(device)?;
        }
    }
    let mut watched = Loop::new(input::host(), specification, args.dataplane.clone(), planner)?;
    let is_table = !args.json && is_terminal;
    let mut display = is_table.then(display::Display::start).transpose()?;
    let start = Instant::now();
    loop {
        let mut events = Vec::new();
        if reload.swap(false, Ordering::Relaxed) {
            match read(&args.specification) {
                Ok(specification) => {
                    watched.replace(specification)?;
                    events.push("the specification was read again".to_owned());
                }
                Err(error) => events.push(format!(
                    "the specification cannot be read again, and the old one holds: {error:#}"
                )),
            }
        }
        let look = watched.look(events);
        if let Some(metrics) = &metrics {
            metrics.publish(&look);
        }
        if let Some(display) = &mut display {
            if display.draw(&look)? {
                return Ok(Outcome::Done);
            }
        } else {
            print(&look, args.json)?;
        }
        if args.duration.is_some_and(|s| start.elapsed() >= Duration::from_secs(s)) {
            return Ok(Outcome::Done);
        }
        // Ctrl-C is how it ends.
        if let Err(InterruptedError) = wait(Duration::from_secs(args.interval), interrupted) {
            return Ok(Outcome::Done);
        }
    }
}

/// The specification, with the VMs where they are.
fn read(path: &Path) -> Result<Specification> {
    let mut specification = input::specification(path)?;
    input::host().locate_vms(&mut specification)?;
    Ok(specification)
}

fn print(look: &Look, json: bool) -> Result<()> {
    let text = if json { serde_json::to_string(look)? } else { display::text(look) };
    output::line(&text);
    Ok(())
}
