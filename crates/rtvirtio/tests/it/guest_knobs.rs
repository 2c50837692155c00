//! A real guest's own knobs: its schedulers through its agent, its QEMU's IOThread through the
//! monitor, planned, applied, verified and rolled back.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::{Agent, Monitor};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::in_guest::{image, image_directory};
use crate::scratch_disk::{Disk, Groups, can_run, rtvirtio, said};

/// More than any answer takes, on a machine that emulates its guests.
const ENOUGH: Duration = Duration::from_secs(60);
/// What the verbs may take while a guest hangs: 2 s for its answer, the rest for a slow machine.
const BOUND: Duration = Duration::from_secs(20);

/// A guest with the disks `root` and `log` and the IOThread `io0`, whose sockets are free. Killed
/// when dropped.
struct Qemu {
    child: Child,
    directory: PathBuf,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    fn boot(directory: &Path, disk: &Path) -> Self {
        let file = |name: &str| directory.join(name).display().to_string();
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35"])
            .args(["-accel", "tcg", "-cpu", "max", "-m", "384", "-name", "guest=plc"])
            .arg("-kernel")
            .arg(image_directory().join("kernel"))
            .arg("-initrd")
            .arg(image_directory().join("initramfs"))
            .args(["-append", "quiet panic=1 mitigations=off", "-object", "iothread,id=io0"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", file("qmp"))])
            .args(["-device", "virtio-serial-pci,max_ports=2"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
            .arg("-chardev")
            .arg(format!("socket,id=agent,path={},server=on,wait=off", file("agent")));
        for (name, offset) in [("root", 0), ("log", 64 << 20)] {
            let blockdev = json!({
                "driver": "raw", "node-name": name, "offset": offset, "size": 64 << 20,
                "file": {"driver": "host_device", "filename": disk, "locking": "off"},
            });
            // The guest has no udev, which would tell it the serial number of `log`.
            let serial = if name == "log" { "log-1" } else { "" };
            let device = json!({
                "driver": "virtio-blk-pci", "id": name, "drive": name, "iothread": "io0",
                "num-queues": 1, "serial": serial,
            });
            command.args(["-blockdev", &blockdev.to_string(), "-device", &device.to_string()]);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        Self { child, directory: directory.to_owned() }
    }

    fn agent(&self) -> Agent {
        let start = Instant::now();
        loop {
            match Agent::connect(self.directory.join("agent"), Duration::from_secs(2)) {
                Ok(agent) => return agent,
                Err(error) => assert!(start.elapsed() < ENOUGH, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The selected schedulers of both disks, with `slice_idle_us` if it is bfq, and how long `io0`
    /// polls.
    fn knobs(&self) -> (String, String, u64) {
        let mut agent = self.agent();
        let mut read = |node: &str, file: &str| {
            let file = format!("/sys/block/{node}/queue/{file}");
            String::from_utf8(agent.read_file(&file, 4096, ENOUGH).unwrap()).unwrap()
        };
        let mut scheduler = |node: &str| {
            let text = read(node, "scheduler");
            let selected = text.split_whitespace().find_map(|w| w.strip_prefix('['));
            match selected.unwrap().trim_end_matches(']') {
                "bfq" => format!("bfq {}", read(node, "iosched/slice_idle_us").trim()),
                other => other.to_owned(),
            }
        };
        let mut monitor = Monitor::connect(self.directory.join("qmp"), ENOUGH).unwrap();
        let threads = monitor.iothreads(ENOUGH).unwrap();
        (scheduler("vda"), scheduler("vdb"), threads[0].poll_max.get())
    }

    fn write(&self, file: &str, text: &str) {
        let file = format!("/sys/block/vda/queue/{file}");
        self.agent().write_file(&file, text, ENOUGH).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

#[test]
fn guests_own_knobs_are_planned_applied_verified_rolled_back() {
    const NAME: &str = "guests_own_knobs_are_planned_applied_verified_rolled_back";
    let Some(_host) = can_run(NAME) else { return };
    if image(NAME).is_none() {
        return;
    }
    let disk = Disk::start();
    let groups = Groups::make(&["plc", "backup"]);
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let mut qemu = Qemu::boot(directory.path(), &disk.node);
    let text = format!(
        r#"
version = 1
[device.data]
path = "{}"
profile = "profile.json"
[[vm]]
name = "plc"
cgroup = "{}"
guest_agent = true
disk = [{{ name = "root", device = "data" }}, {{ name = "log", device = "data" }}]
task = [
    {{ name = "control", disk = "root", iops = 100, target = {{ percentile = 99.9, latency_ms = 20 }} }},
    {{ name = "events", disk = "log", iops = 10 }},
    {{ name = "trace", disk = "log", iops = 10 }},
]
[[vm]]
name = "backup"
cgroup = "{}"
disk = [{{ name = "root", device = "data" }}]
"#,
        disk.node.display(),
        groups.path("plc"),
        groups.path("backup"),
    );
    std::fs::write(path("spec.toml"), text).unwrap();
    std::fs::write(path("profile.json"), include_str!("ref-4x250.json")).unwrap();
    let (spec, plan) = (path("spec.toml"), path("plan.json"));
    let run = |code: i32, arguments: &[&str]| {
        let start = Instant::now();
        let output = rtvirtio(&directory.path().join("state"), arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
        assert!(start.elapsed() < BOUND, "{arguments:?}: {:?}", start.elapsed());
        said(&output)
    };

    // Nobody's default: what comes back is what was there.
    qemu.write("scheduler", "bfq");
    qemu.write("iosched/slice_idle_us", "3000");
    let before = qemu.knobs();
    assert_eq!((before.0.as_str(), before.2), ("bfq 3000", 32_768));
    assert!(!before.1.starts_with("bfq"), "{before:?}");
    let said = run(2, &["plan", &spec, "-o", &plan]);
    assert!(said.contains("plc/root: guest scheduler"), "{said}");
    assert!(said.contains("plc/log: bfq within the guest: 2 tasks share the disk"), "{said}");
    assert_eq!(qemu.knobs(), before);
    run(2, &["verify", &plan]);
    run(0, &["apply", &plan]);
    assert_eq!(qemu.knobs(), ("none".to_owned(), "bfq 0".to_owned(), 0));
    run(0, &["verify", &plan]);
    qemu.write("scheduler", "bfq");
    let said = run(2, &["verify", &plan]);
    assert!(said.contains("plc/root: guest scheduler: wanted none, found bfq"), "{said}");
    run(0, &["rollback"]);
    assert_eq!(qemu.knobs(), before);

    // Applied to what is found, as at a boot.
    run(0, &["apply", &plan, "--reapply"]);
    assert_eq!(qemu.knobs(), ("none".to_owned(), "bfq 0".to_owned(), 0));
    run(0, &["rollback"]);
    assert_eq!(qemu.knobs(), before);

    // A VM that hangs: its sockets take a connection and nothing answers.
    qemu.signal(Signal::STOP);
    let said = run(1, &["apply", &plan]);
    assert!(said.contains("VM plc") && said.contains(&path("qmp")), "{said}");
    assert!(said.contains("hint: "), "{said}");
    let alone = path("alone.json");
    let said = run(2, &["plan", &spec, "-o", &alone]);
    assert!(said.contains("plc: planned for on the host alone"), "{said}");
    assert!(!said.contains("guest scheduler"), "{said}");
    run(0, &["apply", &alone]);
    run(0, &["rollback"]);
    let said = run(0, &["apply", &plan, "--reapply"]);
    assert!(said.contains("VM plc is set on the host alone: "), "{said}");
    run(0, &["rollback"]);
    qemu.signal(Signal::CONT);
    assert_eq!(qemu.knobs(), before);

    // One that ends between apply and rollback took its knobs with it.
    run(0, &["apply", &plan]);
    qemu.child.kill().unwrap();
    qemu.child.wait().unwrap();
    let said = run(0, &["rollback"]);
    assert!(said.contains("gone since, nothing to restore: the QEMU of VM plc"), "{said}");
    assert!(run(0, &["rollback"]).contains("apply: nothing to roll back"));
}
