//! A real guest: its disk planned, applied, verified and rolled back while it runs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_calibrate::testbed::{DeviceUnderTest as _, plain};
use rtvirtio_cases::{Neighbour, Scheme, Tier};
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::specification::to_toml;
use rtvirtio_testbed::curve::Curve;
use rtvirtio_testbed::device::Testbed;
use rtvirtio_testbed::guests::Accelerator;
use rtvirtio_units::{Iops, Nanos};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::in_guest::image;
use crate::scratch_disk::{Disk, RTVIRTIO, can_run, eventually, left_behind, rtvirtio, said};

/// `rtvirtio watch` while the guests work.
struct Watch {
    child: Child,
    looks: PathBuf,
}

impl Watch {
    /// Returns once it watches.
    fn start(specification: &str, looks: &Path) -> Self {
        let child = Command::new(RTVIRTIO)
            .args(["watch", specification, "--json", "--duration", "120"])
            .stdin(Stdio::null())
            .stdout(File::create(looks).unwrap())
            .spawn()
            .unwrap();
        let watch = Self { child, looks: looks.to_owned() };
        eventually("watching on the host", Duration::from_secs(60), || {
            let text = std::fs::read_to_string(looks).unwrap();
            text.lines().any(|l| l.contains(r#""measured_at":"host""#))
        });
        watch
    }

    /// Two looks after the load, so that all of it is there.
    fn last_look(mut self) -> Value {
        std::thread::sleep(Duration::from_millis(2500));
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::INT).unwrap();
        assert!(self.child.wait().unwrap().success());
        let text = std::fs::read_to_string(&self.looks).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
    testbed.boot_guests(&(image, accelerator), case, None, &interrupted).unwrap();

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
    let watch = Watch::start(&spec, &directory.path().join("looks"));
    let measured = testbed.measure(&specification, &scheme, window, &interrupted).unwrap();
    assert!(measured.tasks[0].histogram.count() > 100, "{:?}", measured.tasks);
    let wrote = measured.background.values().next().unwrap().as_megabytes_f64();
    assert!((0.1..1.2 * cap).contains(&wrote), "{wrote} of {cap} MB/s");

    // What QEMU counted on the task's disk, the host did, and in less time; the writer has a line too.
    let look = watch.last_look();
    let task = &look["tasks"][0];
    let disks = look["disks"].as_array().unwrap();
    let (own, others): (Vec<_>, Vec<_>) = disks.iter().partition(|d| d["vm"] == task["vm"]);
    let ([own], [other]) = (&*own, &*others) else { panic!("{look}") };
    assert_eq!((&task["measured_at"], &own["measured_at"]), (&json!("qemu"), &json!("host")));
    assert_eq!(task["task"], own["disk"], "{look}");
    let requests = |row: &Value| row["requests"].as_f64().unwrap();
    assert!(requests(task) > 100.0, "{look}");
    assert!((requests(own) / requests(task) - 1.0).abs() < 0.02, "{look}");
    assert!(requests(other) > 10.0, "{look}");
    assert_eq!(look["host_records_lost"], 0);
    let p50 = |row: &Value| row["tails"][0]["value"].as_u64().unwrap() as f64;
    assert!(p50(own) <= p50(task) * 65.0 / 64.0, "{look}");

    drop(testbed);
    drop(disk);
    assert_eq!(left_behind(), [""; 0]);
}

#[test]
fn guests_on_the_data_plane_do_their_tasks_and_leave_nothing() {
    const NAME: &str = "guests_on_the_data_plane_do_their_tasks_and_leave_nothing";
    let Some(_host) = can_run(NAME) else { return };
    let Some(image) = image(NAME) else { return };
    let interrupted = AtomicBool::new(false);
    let accelerator = Accelerator::probe(&image, &interrupted).unwrap();
    let disk = Disk::start();
    let mut testbed = Testbed::new(&disk.node, "ref-4x250").unwrap();
    let (case, program) = ("1xM".parse().unwrap(), Path::new(RTVIRTIO));
    let curve = Curve::of_ssd("ref-4x250".parse().unwrap());
    let served = (program, curve);
    testbed.boot_guests(&(image, accelerator), case, Some(served), &interrupted).unwrap();
    let window = Nanos::from_millis(3_000);
    let specification = testbed.specification(case, Tier::Strict, Neighbour::Writer, window);
    let capacity = Iops::new(10_000.0).unwrap();
    let scheme = Scheme::None.baseline_settings(&specification, capacity, testbed.scale()).unwrap();
    let before = testbed.served().unwrap().unwrap();
    let measured =
        testbed.measure(&specification, &scheme, Duration::from_secs(3), &interrupted).unwrap();
    let after = testbed.served().unwrap().unwrap();
    let done = measured.tasks[0].histogram.count();
    assert!(done > 100, "{:?}", measured.tasks);
    let wrote = measured.background.values().next().unwrap().as_megabytes_f64();
    assert!(wrote > 0.1, "{wrote} MB/s");
    assert!(after.requests - before.requests > done, "{before:?} {after:?}");
    assert!(after.cpu_ns > before.cpu_ns);

    drop(testbed);
    drop(disk);
    assert_eq!(left_behind(), [""; 0]);
    // No server is left: nobody listens where it did.
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!sockets.contains("/run/rtvirtio-host/bench/guests/"), "{sockets}");
}
