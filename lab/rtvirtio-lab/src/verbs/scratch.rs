//! `rtvirtio-lab scratch`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_testbed::scratch::{Backing, serve};
use rtvirtio_units::Bytes;

use crate::Outcome;

/// Arguments of `scratch`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    backing: BackingArgs,
    /// Size in MiB
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    size_mib: u64,
    /// Seed of the emulated SSD's service times
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the device as JSON, and stop when standard input ends too
    #[arg(long)]
    json: bool,
}

/// What lies under a scratch disk.
#[derive(clap::Args)]
#[group(required = false, multiple = false)]
pub(crate) struct BackingArgs {
    /// Emulated SSD: ref-4x250 (default), ref-8x80 or ref-stall; needs FUSE
    #[arg(long, value_name = "NAME")]
    ssd: Option<String>,
    /// Plain file in this directory, as fast and as noisy as the disk it lies on
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "/var/tmp")]
    raw: Option<PathBuf>,
}

impl BackingArgs {
    pub(crate) fn backing(&self) -> Result<Backing> {
        if let Some(directory) = &self.raw {
            ensure!(directory.is_dir(), "{} is not a directory", directory.display());
            return Ok(Backing::Raw(directory.clone()));
        }
        Backing::ssd(self.ssd.as_deref().unwrap_or("ref-4x250"))
    }
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let backing = args.backing.backing()?;
    let size = Bytes::new(args.size_mib << 20);
    serve(&backing, size, args.seed, args.json, interrupted)?;
    Ok(Outcome::Done)
}
