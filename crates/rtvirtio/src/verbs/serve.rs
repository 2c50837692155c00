//! `rtvirtio serve`.

use std::collections::HashMap;
use std::error::Error;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use comfy_table::{Table, presets};
use rtvirtio_bench::load::Interrupted;
use rtvirtio_dataplane::control::ControlServer;
use rtvirtio_dataplane::plane::{Plane, Registry};
use rtvirtio_spec::serve::{self, Configuration, Engine, Listen};
use rtvirtio_spec::specification::MAX_FILE_BYTES;

use crate::{Outcome, input};

/// How soon a signal is seen.
const POLL: Duration = Duration::from_millis(50);

/// Arguments of `serve`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to serve (TOML)
    configuration: PathBuf,
    /// Only check the configuration, and print what would be served
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let text = input::read(&args.configuration, MAX_FILE_BYTES as u64)?;
    let configuration = serve::parse(&args.configuration.display().to_string(), &text)?;
    if args.check {
        print!("{}", describe(&configuration));
        return Ok(Outcome::Done);
    }
    start(&configuration, interrupted)
}

/// Serves until a signal comes; what is in flight then is finished first.
fn start(configuration: &Configuration, interrupted: &Interrupted) -> Result<Outcome> {
    let registry = Registry::new(Box::new(|device, ended| {
        if let Some(error) = ended.error.as_ref().or(ended.first_refused.as_ref()) {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            eprintln!("{}: front end: {error}{cause}", device.name());
        }
    }))?;
    let registry = Arc::new(registry);
    let mut handed: HashMap<String, OwnedFd> = HashMap::new();
    for (fd, name) in sd_notify::listen_fds_with_names()? {
        // SAFETY: systemd made it for this process, and sd_notify gives each out once.
        handed.insert(name, unsafe { OwnedFd::from_raw_fd(fd) });
    }
    registry.add_all(configuration, &mut handed)?;
    let control = configuration.control.as_ref();
    let control = control.map(|c| ControlServer::start(c, Arc::clone(&registry) as Arc<dyn Plane>));
    let control = control.transpose()?;
    eprintln!("serving {} devices", configuration.devices.len());
    // Without systemd there is nobody to tell.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    while !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(POLL);
    }
    drop(control);
    drop(registry);
    Ok(Outcome::Done)
}

/// What would be served, for people.
fn describe(configuration: &Configuration) -> String {
    let mut text = String::new();
    if let Some(control) = &configuration.control {
        text += &format!("control API: {}\n\n", control.socket.display());
    }
    let mut iothreads = table(["iothread", "cpus", "polls"]);
    for iothread in &configuration.iothreads {
        let polls = match iothread.polling.max.get() {
            0 => "never".to_owned(),
            _ => format!("up to {}", iothread.polling.max),
        };
        let cpus = match iothread.cpus.as_slice() {
            [] => "any".to_owned(),
            cpus => rtvirtio_spec::plan::qemu::cpuset(cpus),
        };
        iothreads.add_row([iothread.name.to_string(), cpus, polls]);
    }
    let mut devices = table(["device", "vm", "queues", "iothreads", "data", "socket"]);
    for device in &configuration.devices {
        let iothreads: Vec<&str> = device.mapping.by_queue().iter().map(|n| n.as_str()).collect();
        let socket = match &device.listen {
            Listen::Path(path) => path.display().to_string(),
            Listen::Activated(name) => format!("systemd: {name}"),
        };
        devices.add_row([
            device.name.to_string(),
            device.vm.to_string(),
            device.queues().to_string(),
            iothreads.join(" "),
            data(&device.engine) + if device.read_only { ", read-only" } else { "" },
            socket,
        ]);
    }
    text + &format!("{iothreads}\n\n{devices}\n")
}

fn data(engine: &Engine) -> String {
    match engine {
        Engine::File(file) => file.path.display().to_string(),
        Engine::Ram { size, .. } => format!("RAM, {size}"),
        Engine::Ssd(ssd) => format!("emulated {}, {}", ssd.model, ssd.size),
    }
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}
