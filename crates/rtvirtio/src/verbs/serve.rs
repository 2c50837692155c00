//! `rtvirtio serve`: the data plane.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use rtvirtio_dataplane::plane::Registry;

use crate::Outcome;

/// Serves the disks of a configuration over vhost-user-blk.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The configuration (TOML).
    config: PathBuf,
}

pub(crate) fn run(args: &Args, interrupted: &AtomicBool) -> Result<Outcome> {
    let path = &args.config;
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let configuration =
        rtvirtio_spec::serve::parse(&path.display().to_string(), &text)?;
    let registry = Registry::new(Box::new(|device, ended| {
        eprintln!("{}: {:?}", device.name(), ended);
    }))?;
    registry.add_all(&configuration, &mut HashMap::new())?;
    eprintln!("serving {} devices", configuration.devices.len());
    while !interrupted.load(Ordering::Relaxed) {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    drop(registry);
    Ok(Outcome::Done)
}
