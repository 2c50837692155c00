//! `rtvirtio calibrate`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_calibrate::calibration::{Depth, calibrate_to, summary};
use rtvirtio_calibrate::device;
use rtvirtio_calibrate::testbed::Testbed;
use rtvirtio_host::interrupt::Interrupted;

use crate::{Outcome, input};

/// Arguments of `calibrate`.
#[derive(clap::Args)]
#[command(
    after_help = "Takes about 3 minutes: probes go on until there are enough runs for the bounds \
    of a plan, or the limit is reached; what is missing then is said. A busy machine makes bounds wider. An \
    interrupted calibration goes on where it was when it is started again with the same -o."
)]
pub(crate) struct Args {
    /// The block device; its data is overwritten
    device: PathBuf,
    /// Where to write the profile
    #[arg(short, long, default_value = "profile.json")]
    output: PathBuf,
    /// Begin no further probe after so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 360)]
    limit: u64,
    /// Overwrite a device that `rtvirtio-lab scratch` did not make
    #[arg(long)]
    overwrite_all_data_on_device: bool,
    /// Print the profile as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let path = std::fs::canonicalize(&args.device)
        .with_context(|| format!("device {}", args.device.display()))?;
    if !device::is_scratch(&path) && !args.overwrite_all_data_on_device {
        bail!(
            "{} is not a scratch disk, and calibration overwrites it (make one with `rtvirtio-lab \
             scratch`, or give --overwrite-all-data-on-device)",
            path.display()
        );
    }
    let _claim = device::claim(&path)?;
    let testbed = Testbed::new(&path, "device")?;
    let limit = Duration::from_secs(args.limit);
    let profile = calibrate_to(&testbed, (Depth::Full, limit), &args.output, interrupted)?;
    if args.json {
        input::print_json(&profile)?;
    } else {
        println!("{}", summary(&profile));
        println!("profile written to {}", args.output.display());
    }
    Ok(Outcome::Done)
}
