//! `rtvirtio watch`: each task's tail as it happens, on a terminal, as lines or as metrics, and the closed
//! loop. What is watched, and when another plan is made, is [`rtvirtio_controller`]'s.

mod display;
mod metrics;

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use rtvirtio_cli::log::{self, Level};
use rtvirtio_controller::look::Look;
use rtvirtio_controller::{Loop, Planner};
use rtvirtio_host::interrupt::{Interrupted, wait};
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
    // The host alone is planned for: the monitors serve one client, which is the loop.
    let planner = args.control.then(|| -> Box<Planner> {
        Box::new(|specification, doubts| plan_host(specification, doubts, &ModelChoice::Structural))
    });
    let specification = read(args)?;
    let mut watched = Loop::new(input::host(), specification, args.dataplane.clone(), planner)?;
    let is_table = !args.json && is_terminal;
    let mut display = is_table.then(display::Display::start).transpose()?;
    let start = Instant::now();
    loop {
        let mut events: Vec<String> = metrics.iter().filter_map(metrics::Server::event).collect();
        if rtvirtio_cli::is_to_reload() {
            match read(args) {
                Ok(specification) => {
                    watched.replace(specification)?;
                    events.push("the specification was read again".to_owned());
                }
                Err(error) => events.push(format!(
                    "the specification cannot be read again, and the old one holds: {error:#}"
                )),
            }
        }
        let look = watched.look(events, interrupted);
        if let Some(metrics) = &metrics {
            metrics.publish(&look);
        }
        match &mut display {
            Some(display) => display.draw(&look)?,
            None => print(&look, args.json)?,
        }
        if args.duration.is_some_and(|s| start.elapsed() >= Duration::from_secs(s)) {
            return Ok(Outcome::Done);
        }
        // Ctrl-C is how it ends.
        let interval = Duration::from_secs(args.interval);
        let is_over = match &mut display {
            Some(display) => display.wait(interval, interrupted)?,
            None => wait(interval, interrupted).is_err(),
        };
        if is_over {
            return Ok(Outcome::Done);
        }
    }
}

/// The specification, with the VMs where they are. One that is to be planned for has its profiles.
fn read(args: &Args) -> Result<Specification> {
    let mut specification = input::specification(&args.specification)?;
    if args.control {
        // Now, and not when the first VM starts.
        for device in &specification.devices {
            profile_of(device)?;
        }
    }
    input::host().locate_vms(&mut specification)?;
    Ok(specification)
}

fn print(look: &Look, json: bool) -> Result<()> {
    let text = if json { serde_json::to_string(look)? } else { display::text(look) };
    output::line(&text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specification_to_plan_by_has_its_profiles_at_the_start_and_when_it_is_read_again() {
        const SPECIFICATION: &str = "version = 1\n[device.ssd]\npath = \"/dev/null\"\n\
            profile = \"absent.json\"\n[[vm]]\nname = \"plc\"\n[[vm.disk]]\nname = \"root\"\n\
            device = \"ssd\"\n";
        let directory = tempfile::tempdir().unwrap();
        let specification = directory.path().join("spec.toml");
        std::fs::write(&specification, SPECIFICATION).unwrap();
        let args = Args {
            specification,
            control: true,
            interval: 1,
            duration: None,
            listen: None,
            dataplane: None,
            json: false,
        };
        let error = format!("{:#}", read(&args).unwrap_err());
        assert!(error.contains("make its profile: rtvirtio calibrate"), "{error}");
    }
}
