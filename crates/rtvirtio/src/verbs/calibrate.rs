//! `rtvirtio calibrate`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_calibrate::calibration::{
    self, Depth, FULL, IN_USE_LIMIT, calibrate_to, missing, summary,
};
use rtvirtio_calibrate::device;
use rtvirtio_calibrate::in_use::{DiskInUse, Location, Manners};
use rtvirtio_calibrate::neighbours::NeighbourTarget;
use rtvirtio_calibrate::observed::{disk_of, observe};
use rtvirtio_calibrate::testbed::{DeviceUnderTest, Testbed};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::profile::Profile;
use rtvirtio_units::Bytes;

use crate::wish::{Wish, goal};
use crate::{Outcome, input};

/// Arguments of `calibrate`.
#[derive(clap::Args)]
#[command(
    after_help = "Takes about 3 minutes, 5 with --in or where the host has iocost: probes go on until there are enough runs for the bounds \
    of a plan, or the limit is reached; what is missing then is said. A busy machine makes bounds wider. An \
    interrupted calibration of a DEVICE goes on where it was when it is started again with the same -o.\n\
    --in measures the disk that LOCATION lies on beside those who use it: for a directory, or a file, which is not \
    touched, in a file of its own in that directory, of which nothing is left; for a partition or volume that \
    holds nothing, in that one (--overwrite-all-data-on-device). The disk's scheduler and knobs stay as they \
    are. VMs on the disk are watched at their QEMUs, and all its users in the host's block layer: a probe that breaks a --target, or without one pushes a tail beyond twice \
    its normal (--tolerate), is stopped, and tried again twice. Loads of probes are cut to what the others leave; \
    what they do is taken into account, and makes bounds wider.\n\
    --observe issues no request: capacity is then the most that the disk was seen to do, the least that it can do, \
    and only the load that was there has a bound."
)]
pub(crate) struct Args {
    /// The block device; its data is overwritten
    #[arg(required_unless_present = "location", conflicts_with = "location")]
    device: Option<PathBuf>,
    /// Measure the disk that this directory, file, or empty volume lies on, beside those who use it
    #[arg(long = "in", value_name = "LOCATION")]
    location: Option<PathBuf>,
    /// MiB that are used there; without, 2 GiB, a quarter of the free space, or all of the volume
    #[arg(long, value_name = "MIB", requires = "location",
          value_parser = clap::value_parser!(u64).range(256..=1 << 24))]
    size: Option<u64>,
    /// Share of the disk's time that is taken while others use it, from 0.001 to 1
    #[arg(long, requires = "location", default_value_t = 0.2, value_parser = share)]
    share: f64,
    /// How long requests of a VM may take meanwhile, such as db=p99.9:5ms; without a VM, all on the disk
    #[arg(long = "target", requires = "location", value_name = "[VM[/DISK]=]pPERCENTILE:TIME", value_parser = target)]
    targets: Vec<NeighbourTarget>,
    /// How many times its normal the tail of a user of the disk without a target may be
    #[arg(long, requires = "location", default_value_t = 2.0, value_name = "FACTOR", value_parser = factor)]
    tolerate: f64,
    /// Change the disk's scheduler and knobs for probes, journalled, and put them back
    #[arg(long, requires = "location")]
    probe_schedulers: bool,
    /// Issue no request, but watch for so many minutes what others have the disk do
    #[arg(long, value_name = "MINUTES", requires = "location",
          value_parser = clap::value_parser!(u64).range(1..=1440),
          conflicts_with_all = ["size", "probe_schedulers", "targets", "limit"])]
    observe: Option<u64>,
    /// Where to write the profile
    #[arg(short, long, default_value = "profile.json")]
    output: PathBuf,
    /// Begin no further probe after so many seconds [default: 360; 240 with --in]
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Overwrite a device, or a volume that --in names; a disk of `rtvirtio-lab scratch` needs no such word
    #[arg(long)]
    overwrite_all_data_on_device: bool,
    /// Print the profile as JSON
    #[arg(long)]
    json: bool,
}

fn target(text: &str) -> Result<NeighbourTarget, String> {
    if text.contains('=') {
        let Wish { vm, disk, percentile, latency } = text.parse()?;
        return Ok(NeighbourTarget { vm: Some(vm), disk, percentile, latency });
    }
    let form = || format!("{text:?} is not [VM[/DISK]=]pPERCENTILE:TIME, such as p99.9:5ms");
    let (percentile, latency) = goal(text)?.ok_or_else(form)?;
    Ok(NeighbourTarget { vm: None, disk: None, percentile, latency })
}

/// The smallest share. A probe is followed by hours of rest then; with a share near zero by more than a clock holds.
const MIN_SHARE: f64 = 0.001;

fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (MIN_SHARE..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err(format!("from {MIN_SHARE} to 1"))
    }
}

fn factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (1.0..=1000.0).contains(&factor) { Ok(factor) } else { Err("from 1 to 1000".to_owned()) }
}

/// Makes the directory of the profile, once it is clear that there will be one.
fn make_directory(output: &Path) -> Result<()> {
    let Some(directory) = output.parent().filter(|path| !path.as_os_str().is_empty()) else {
        return Ok(());
    };
    std::fs::create_dir_all(directory)
        .with_context(|| format!("make {} for the profile", directory.display()))
}

/// Calibrates, and writes the profile. What is kept of it until then lies beside the profile only if that is a regular file:
/// beside `/dev/stdout` are devices.
fn calibrate(
    device: &dyn DeviceUnderTest,
    limit: Duration,
    output: &Path,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let Some(directory) = input::work_directory(output)? else {
        return calibrate_to(device, (Depth::Full, limit), output, interrupted);
    };
    let file = directory.path().join("profile.json");
    let profile = calibrate_to(device, (Depth::Full, limit), &file, interrupted)?;
    calibration::write(&profile, output)?;
    Ok(profile)
}

pub(crate) fn run(args: &Args, interrupted: &Interrupted) -> Result<Outcome> {
    // A calibration takes minutes, and what it overwrites is gone: its profile is to have a place.
    input::check_output_with_directory(&args.output)?;
    let usual = if args.location.is_some() { IN_USE_LIMIT } else { FULL.1 };
    let limit = args.limit.map_or(usual, Duration::from_secs);
    let profile = match (&args.location, &args.device) {
        (Some(location), _) => {
            let location = Location::find(location)?;
            if let Some(minutes) = args.observe {
                let (host, time) = (input::host(), Duration::from_secs(60 * minutes));
                let disk = disk_of(&host, location.path())?;
                make_directory(&args.output)?;
                let profile = observe(&host, &disk, time, interrupted)?;
                for missing in missing(&profile, Depth::Full) {
                    eprintln!("calibrate: missing: {missing}");
                }
                calibration::write(&profile, &args.output)?;
                return print(args, &profile);
            }
            if let Location::Volume(path) = &location {
                ensure!(
                    args.overwrite_all_data_on_device,
                    "{} is a volume, whose data would be overwritten: name a directory on the same disk, or, if \
                     the volume holds nothing, say so with --overwrite-all-data-on-device",
                    path.display()
                );
            }
            let size = args.size.map(|mib| Bytes::new(mib << 20));
            let manners = Manners {
                share: args.share,
                tolerated: args.tolerate,
                targets: args.targets.clone(),
                probes_schedulers: args.probe_schedulers,
            };
            let mut events = Vec::new();
            let disk =
                DiskInUse::new(input::host(), &location, size, manners, interrupted, &mut events);
            events.iter().for_each(|event| eprintln!("calibrate: {event}"));
            let disk = disk?;
            eprintln!("calibrate: {}", disk.describe());
            make_directory(&args.output)?;
            calibrate(&disk, limit, &args.output, interrupted)?
        }
        (None, Some(device)) => {
            let path = input::canonicalize(device)
                .with_context(|| format!("device {}", device.display()))?;
            if !device::is_scratch(&path) && !args.overwrite_all_data_on_device {
                bail!(
                    "{} is not a scratch disk, and calibration overwrites it (a disk in use: calibrate --in \
                     DIRECTORY; an empty one: --overwrite-all-data-on-device)",
                    path.display()
                );
            }
            let _claim = device::claim_disk(&path)?;
            let testbed = Testbed::new(&path, "device")?;
            make_directory(&args.output)?;
            calibrate(&testbed, limit, &args.output, interrupted)?
        }
        (None, None) => bail!("name a device, or --in LOCATION"),
    };
    print(args, &profile)
}

fn print(args: &Args, profile: &Profile) -> Result<Outcome> {
    if args.json {
        input::print_json(profile)?;
    } else {
        println!("{}", summary(profile));
        println!("profile written to {}", args.output.display());
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_that_leaves_more_rest_than_a_clock_holds_is_refused() {
        for good in ["0.001", "0.2", "1"] {
            share(good).unwrap();
        }
        for bad in ["0", "-0.1", "1e-20", "1.01", "nan", "inf", "much"] {
            assert!(share(bad).is_err(), "{bad}");
        }
    }
}
