//! A real guest: its disk planned, applied, verified and rolled back while it runs.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_bench::cell::{Testbed, plain};
use rtvirtio_bench::guests::{Accelerator, GuestImage};
use rtvirtio_cases::{Neighbour, Tier};
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::specification::to_toml;
use rtvirtio_units::Nanos;

use crate::scratch_disk::{Disk, can_run, left_behind, rtvirtio, said};

/// Where `make test` has the guests' image made: beside what cargo builds.
pub(crate) fn image_directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("guest")
}

/// The image; without it, or without QEMU, `test` is skipped by name.
pub(crate) fn image(test: &str) -> Option<GuestImage> {
    let found = GuestImage::find(&image_directory());
    let qemu = Command::new("qemu-system-x86_64").arg("--version").output();
    let why = match (&found, qemu) {
        (Err(error), _) => error.to_string(),
        (_, Err(error)) => format!("qemu-system-x86_64: {error}"),
        (Ok(_), Ok(_)) => return found.ok(),
    };
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
    None
}

#[test]
fn guests_are_planned_applied_verified_rolled_back() {
    const NAME: &str = "guests_are_planned_applied_verified_rolled_back";
    let Some(_host) = can_run(NAME) else { return };
    let Some(image) = image(NAME) else { return };
    let interrupted = AtomicBool::new(false);
    let accelerator = Accelerator::probe(&image, &interrupted).unwrap();
    let disk = Disk::start();
    let mut testbed = Testbed::new(&disk.node, "ref-4x250").unwrap();
    let case = "1xM".parse().unwrap();
    testbed.boot_guests(&image, accelerator, case, &interrupted).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let run = |code: i32, arguments: &[&str]| {
        let output = rtvirtio(&directory.path().join("state"), arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
    };
    let window = Nanos::from_millis(30_000);
    let mut specification = testbed.specification(case, Tier::Strict, Neighbour::Writer, window);
    specification.devices[0].profile = path("profile.json").into();
    std::fs::write(path("spec.toml"), to_toml(&specification)).unwrap();
    std::fs::write(path("profile.json"), include_str!("ref-4x250.json")).unwrap();
    let (spec, plan) = (path("spec.toml"), path("plan.json"));
    run(2, &["plan", &spec, "-o", &plan]);
    run(0, &["apply", &plan]);
    run(0, &["verify", &plan]);
    run(0, &["rollback"]);
    run(2, &["verify", &plan]);

    // The same settings under load: both guests do I/O, the one that writes within its cap.
    let planned: Plan = serde_json::from_str(&std::fs::read_to_string(&plan).unwrap()).unwrap();
    let cap = planned.background[0].cap.unwrap().as_megabytes_f64();
    let scheme = plain(planned.settings);
    let window = Duration::from_secs(3);
    let measured = testbed.measure(&specification, &scheme, window, &interrupted).unwrap();
    assert!(measured.tasks[0].histogram.count() > 100, "{:?}", measured.tasks);
    let wrote = measured.background.values().next().unwrap().as_megabytes_f64();
    assert!((0.1..1.2 * cap).contains(&wrote), "{wrote} of {cap} MB/s");

    drop(testbed);
    drop(disk);
    assert_eq!(left_behind(), [""; 0]);
}
