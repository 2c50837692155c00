//! `rtvirtio-lab bench --closed-loop`: a background VM starts while `watch --control` runs.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rtvirtio_bench::closed_loop;
use rtvirtio_bench::report::closed_loop::page;
use rtvirtio_calibrate::testbed::DeviceUnderTest as _;
use rtvirtio_cases::{Case, Mix, Neighbour, Tier};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::specification::to_toml;
use rtvirtio_testbed::device::Testbed;
use rtvirtio_testbed::server::rtvirtio;
use rtvirtio_units::Nanos;

use super::Args;
use crate::{Outcome, input};

/// Four VMs and one that writes. `profile` is the file of the testbed's profile.
pub(super) fn run(
    args: &Args,
    testbed: &mut Testbed,
    profile: &Path,
    interrupted: &Interrupted,
) -> Result<Outcome> {
    ensure!(testbed.guests_run(), "--closed-loop needs guests (--guests qemu)");
    let case = Case::new(4, Mix::LightMediumHeavy)?;
    let window = Nanos::from_millis(args.window * 1000);
    let specification = testbed.specification(case, Tier::Strict, Neighbour::Writer, window);
    // The specification names its profile by this name, beside it.
    let beside = args.out.join("profile.json");
    if profile != beside {
        std::fs::copy(profile, &beside).with_context(|| format!("{}", profile.display()))?;
    }
    let file = args.out.join("specification.toml");
    input::write(&file, &to_toml(&specification))?;
    let program = rtvirtio()?;
    let record = closed_loop::run(testbed, &program, &specification, &file, interrupted)?;
    let notes = super::note_command(&args.out)?;
    let json = serde_json::to_string(&record)?;
    input::write(&args.out.join("closed-loop.json"), &json)?;
    let html = args.out.join("closed-loop.html");
    input::write(&html, &page(&record, &notes))?;
    if args.json {
        println!("{json}");
    } else {
        for (at, change) in &record.changes {
            println!("{at:6.1} s  {}: {} knobs changed", change.reason, change.written);
        }
        match record.delay() {
            Some(s) => println!("the background VM was planned for {s:.1} s after its start"),
            None => println!("the background VM was not planned for"),
        }
        println!("Plot: {}", html.display());
    }
    let complaints = record.complaints();
    for complaint in &complaints {
        eprintln!("missed: {complaint}");
    }
    Ok(if complaints.is_empty() { Outcome::Done } else { Outcome::Unmet })
}
