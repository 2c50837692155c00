//! `rtvirtio calibrate`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_bench::calibrate::Depth;
use rtvirtio_bench::cell::Testbed;
use rtvirtio_bench::{calibrate, scratch};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::profile::Profile;

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
    /// Overwrite a device that `rtvirtio scratch` did not make
    #[arg(long)]
    overwrite_all_data_on_device: bool,
    /// Print the profile as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    let device = std::fs::canonicalize(&args.device)
        .with_context(|| format!("device {}", args.device.display()))?;
    if !scratch::is_scratch(&device) && !args.overwrite_all_data_on_device {
        bail!(
            "{} is not a scratch disk, and calibration overwrites it (make one with `rtvirtio \
             scratch`, or give --overwrite-all-data-on-device)",
            device.display()
        );
    }
    let _claim = scratch::claim(&device)?;
    let testbed = Testbed::new(&device, "device")?;
    let limit = Duration::from_secs(args.limit);
    let profile = profile(&testbed, (Depth::Full, limit), &args.output, interrupted)?;
    if args.json {
        input::print_json(&profile)?;
    } else {
        println!("{}", summary(&profile));
        println!("profile written to {}", args.output.display());
    }
    Ok(Outcome::Done)
}

/// A whole calibration, and the time after which it begins no probe.
pub(crate) const FULL: (Depth, Duration) = (Depth::Full, Duration::from_secs(360));

/// Calibrates and writes the profile.
pub(crate) fn profile(
    testbed: &Testbed,
    (depth, limit): (Depth, Duration),
    output: &Path,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let partial = output.with_extension("partial");
    let date = jiff::Timestamp::now().to_string();
    let profile = calibrate::calibrate(testbed, depth, limit, &partial, date, interrupted)?;
    input::write(output, &serde_json::to_string_pretty(&profile)?)?;
    Ok(profile)
}

/// What a profile says, for people.
pub(crate) fn summary(profile: &Profile) -> String {
    let c = &profile.capacity;
    let s = &profile.structural;
    let mut text = format!(
        "device    {} {} ({}), kernel {}\n\
         capacity  {:.0} IOPS of 4 KiB, {} in 128 KiB writes\n\
         response  4 KiB: mean {}, p99 {}, p99.9 {}; 128 KiB: mean {}\n\
         bursts    a cap is released {} at a time\n",
        profile.device.kind,
        profile.device.model,
        profile.device.size,
        profile.kernel,
        c.iops_4k,
        c.write_throughput,
        c.response_4k.mean,
        c.response_4k.p99,
        c.response_4k.p999,
        c.response_128k.mean,
        s.burst,
    );
    if let Some(stalls) = s.stalls {
        text += &format!(
            "stalls    up to {} long, at most {:.2} a second\n",
            stalls.length, stalls.per_second
        );
    }
    text += "tails     VMs  writer      worst p99.9/p99 of a task  under\n";
    for p in &profile.probes {
        let worst = p.tails.iter().map(|t| t.tail).max();
        let writer = match (p.writer, p.cap) {
            (false, _) => "none".to_owned(),
            (true, Some(cap)) => cap.to_string(),
            (true, None) => "unlimited".to_owned(),
        };
        let tail = worst.map_or("too few requests".to_owned(), |t| t.to_string());
        text += &format!("          {:>3}  {writer:<10}  {tail:>24}  {}\n", p.vms, p.scheduler);
    }
    text
}
