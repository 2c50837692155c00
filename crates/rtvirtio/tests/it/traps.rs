//! What users of the first versions stumbled over, each with what it says now. Others are where their
//! subject is: `operator` (names of disks and VMs, VMs that are off, somebody else's histogram), `lifecycle`
//! (profiles of other devices, calibration of a disk in use), `host::error` (cgroups as systemd writes them).

use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::scratch_disk::{RTVIRTIO, can_run, eventually, lab, rtvirtio, said};

const ENOUGH: Duration = Duration::from_secs(60);

#[test]
fn calibrate_of_a_disk_that_is_in_use_names_the_way_that_overwrites_nothing() {
    let Some(_host) =
        can_run("calibrate_of_a_disk_that_is_in_use_names_the_way_that_overwrites_nothing")
    else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let output = rtvirtio(directory.path(), &["calibrate", "/dev/null"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("a disk in use: calibrate --in DIRECTORY"), "{}", said(&output));
}

/// A loop device of a file that is not a scratch disk's.
struct LoopDevice(String);

impl LoopDevice {
    fn of(file: &std::path::Path) -> Self {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// As QEMU has a VM's disk open: not exclusively.
#[test]
fn calibrate_overwrites_nothing_that_a_process_has_open() {
    let Some(_host) = can_run("calibrate_overwrites_nothing_that_a_process_has_open") else {
        return;
    };
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = directory.path().join("disk");
    let data = vec![0x5a; 16 << 20];
    std::fs::write(&file, &data).unwrap();
    let device = LoopDevice::of(&file);
    let disk = std::fs::File::open(&device.0).unwrap();
    let mut vm = Command::new("sleep").arg("60").stdin(disk).spawn().unwrap();
    for arguments in [&["calibrate"][..], &["calibrate", "--in"]] {
        let overwrite = "--overwrite-all-data-on-device";
        let arguments = [arguments, &[&device.0, overwrite, "-o", "/nonexistent/p"]].concat();
        let output = rtvirtio(directory.path(), &arguments);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        let why = format!("is in use: process {} (sleep) has it open", vm.id());
        assert!(said(&output).contains(&why), "{}", said(&output));
    }
    vm.kill().unwrap();
    vm.wait().unwrap();
    drop(device);
    assert!(std::fs::read(&file).unwrap() == data, "its data has changed");
}

/// The kernel has a loop device's file open, and no process.
#[test]
fn calibrate_overwrites_nothing_that_a_loop_device_lies_on() {
    let Some(_host) = can_run("calibrate_overwrites_nothing_that_a_loop_device_lies_on") else {
        return;
    };
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = directory.path().join("disk");
    let data = vec![0x5a; 16 << 20];
    std::fs::write(&file, &data).unwrap();
    let below = LoopDevice::of(&file);
    let above = LoopDevice::of(std::path::Path::new(&below.0));
    let profile = directory.path().join("profile.json");
    let arguments =
        ["calibrate", &below.0, "--overwrite-all-data-on-device", "-o", profile.to_str().unwrap()];
    let output = rtvirtio(directory.path(), &arguments);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let why = format!("is in use: the loop device {} lies on it", above.0);
    assert!(said(&output).contains(&why), "{}", said(&output));
    drop(above);
    drop(below);
    assert!(std::fs::read(&file).unwrap() == data, "its data has changed");
}

#[test]
fn cgroup_may_be_pasted_as_proc_and_systemctl_print_it() {
    let text = r"version = 1
[device.d]
path = '/dev/d'
profile = 'p'
[[vm]]
name = 'db'
cgroup = '/machine.slice/machine-qemu\x2d1\x2ddb.scope/libvirt/emulator'
[[vm.disk]]
name = 'vda'
device = 'd'
";
    let parsed = rtvirtio_spec::specification::parse("site.toml", text).unwrap();
    let expected = r"machine.slice/machine-qemu\x2d1\x2ddb.scope";
    assert_eq!(parsed.vms[0].cgroup.to_str(), Some(expected));
}

#[test]
fn rollback_of_nothing_is_one_line() {
    let Some(_host) = can_run("rollback_of_nothing_is_one_line") else { return };
    let directory = tempfile::tempdir().unwrap();
    let output = rtvirtio(directory.path(), &["rollback"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "apply: nothing to roll back\n");
}

/// What a host lacks is said by `serve --check`, and by `serve` beside the kernel's word for it.
#[test]
fn serve_names_cpus_directories_and_images_that_are_not_here() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    let text = "version = 1
[control]
socket = '/nonexistent/control.sock'
[[iothread]]
name = 'iot0'
cpus = [1023]
[[device]]
name = 'root'
vm = 'db'
socket = '/nonexistent/root.sock'
engine = { type = 'file', path = '/nonexistent/db.raw' }
";
    std::fs::write(&path, text).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(RTVIRTIO);
        command.arg("serve").args(arguments).arg(&path).stdin(Stdio::null()).output().unwrap()
    };
    for (arguments, code) in [(&["--check"][..], 2), (&["--no-sandbox"], 1)] {
        let output = run(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(code), "{said}");
        for wanted in [
            "CPU 1023 is not online here",
            "mkdir -p /nonexistent",
            "its image /nonexistent/db.raw is not there",
        ] {
            assert!(said.contains(wanted), "{arguments:?}: {wanted}: {said}");
        }
    }
}

#[test]
fn scratch_disk_whose_owner_only_signals_it_goes_too() {
    let Some(_host) = can_run("scratch_disk_whose_owner_only_signals_it_goes_too") else { return };
    let mut scratch = Command::new(lab())
        .args(["scratch", "--json", "--size-mib", "64"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = scratch.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
    let device: serde_json::Value = serde_json::from_str(&line).unwrap();
    let name = device["device"].as_str().unwrap().trim_start_matches("/dev/").to_owned();
    kill_process(Pid::from_child(&scratch), Signal::TERM).unwrap();
    let end = std::time::Instant::now() + ENOUGH;
    while scratch.try_wait().unwrap().is_none() {
        assert!(std::time::Instant::now() < end, "it ignores SIGTERM");
        std::thread::sleep(Duration::from_millis(20));
    }
    let backing = format!("/sys/block/{name}/loop/backing_file");
    eventually("the end of its loop device", ENOUGH, || !std::path::Path::new(&backing).exists());
}
