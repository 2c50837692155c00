//! `rtvirtio profile`: what a profile says, and how it is taken to another device of the model.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rtvirtio_calibrate::calibration::summary;
use rtvirtio_spec::profile::Profile;

use crate::{Outcome, input, output};

/// Arguments of `profile`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show what was measured
    Show {
        /// The profile
        profile: PathBuf,
    },
    /// Write a profile for others who have a device of the model: without its serial number
    Export {
        /// The profile
        profile: PathBuf,
        /// Where to write it
        #[arg(short, long)]
        output: PathBuf,
    },
    /// Take a profile for a device of the model that it was made of
    #[command(
        after_help = "Devices of one kind, model and size class (sizes within 10 %) do alike, and not the same: plans \
        say that the bounds are those of another device. `calibrate --in` makes a profile of this one."
    )]
    Import {
        /// The profile
        profile: PathBuf,
        /// The device
        #[arg(long)]
        device: PathBuf,
        /// Where to write it
        #[arg(short, long)]
        output: PathBuf,
    },
}

pub(crate) fn run(args: &Args) -> Result<Outcome> {
    match &args.action {
        Action::Show { profile } => {
            let profile = input::profile(profile)?;
            println!("{}", summary(&profile));
        }
        Action::Export { profile, output } => {
            write(output, &input::profile(profile)?.of_model())?;
            println!("written to {}", output.display());
        }
        Action::Import { profile, device, output } => {
            let profile = input::profile(profile)?;
            let host = input::host();
            let path = input::canonicalize(device)
                .with_context(|| format!("device {}", device.display()))?;
            let imported = profile.for_device(host.identity(&path)?)?;
            let firmware = host.firmware(&path);
            write(output, &imported)?;
            println!("written to {}", output.display());
            if profile.firmware != firmware {
                let name =
                    |of: &Option<String>| output::visible(of.as_deref().unwrap_or("unknown"));
                eprintln!(
                    "warning: the firmware differs: {} was measured, {} is there",
                    name(&profile.firmware),
                    name(&firmware)
                );
            }
        }
    }
    Ok(Outcome::Done)
}

/// A file that is there already is somebody's.
fn write(path: &Path, profile: &Profile) -> Result<()> {
    input::refuse_to_replace(path)?;
    input::write(path, &serde_json::to_string_pretty(profile)?)
}
