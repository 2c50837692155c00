//! A real QEMU, and a real guest with its agent.
//!
//! Needs qemu-system-x86_64, and for the agent the guests' image that `make test`
//! has made; without them each test says that it is skipped, and why.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_host::Host;
use rtvirtio_host::qemu::{Agent, Fault, MappedQueues, Monitor, QemuError, QemuProcess, Throttle};
use rtvirtio_units::{BytesPerSecond, Nanos};
use tempfile::TempDir;

/// More than any answer takes, on a machine that emulates its guests.
const ENOUGH: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(200);
const DISK: &str = "/machine/peripheral/d0/virtio-backend";

/// Killed when dropped.
struct Qemu {
    child: Child,
    directory: TempDir,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn skipped(test: &str, reason: &str) {
    // Not println: what a passing test prints is hidden.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {reason}");
}

impl Qemu {
    /// With a disk `d0`, an IOThread `io0`, a throttle group `tg0` and an agent's port.
    fn start(test: &str, more: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name).display().to_string();
        fs::write(file("disk"), vec![0; 1 << 20]).unwrap();
        let socket = |name: &str| format!("path={},server=on,wait=off", file(name));
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35"])
            .args(["-accel", "tcg", "-cpu", "max", "-m", "384", "-name", "guest=plc,debug-threads=on"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", file("qmp"))])
            .args(["-chardev", &format!("socket,id=agent,{}", socket("agent"))])
            .args(["-device", "virtio-serial-pci"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
            .args(["-object", "iothread,id=io0", "-object", "throttle-group,id=tg0"])
            .args(["-blockdev", &format!("raw,node-name=root,file.driver=file,file.filename={}", file("disk"))])
            .args(["-device", r#"{"driver":"virtio-blk-pci","id":"d0","drive":"root","iothread":"io0","serial":"root"}"#])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        match child {
            Ok(child) => Some(Self { child, directory }),
            Err(error) => {
                skipped(test, &format!("qemu-system-x86_64: {error}"));
                None
            }
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The monitor, once QEMU listens: its socket is there a little before.
    fn monitor(&self) -> Monitor {
        let start = Instant::now();
        loop {
            match Monitor::connect(self.file("qmp"), ENOUGH) {
                Err(QemuError { fault: Fault::Connect(_), .. }) if start.elapsed() < ENOUGH => {
                    thread::sleep(Duration::from_millis(10));
                }
                monitor => return monitor.unwrap(),
            }
        }
    }
}

fn is_late<T>(result: Result<T, QemuError>) -> bool {
    matches!(result, Err(QemuError { fault: Fault::Late { .. }, .. }))
}

#[test]
fn real_qemu_is_found_and_controlled() {
    let mapped = [
        "-S",
        "-blockdev",
        r#"{"driver":"null-co","node-name":"null","size":1048576,"read-zeroes":true}"#,
        "-device",
        r#"{"driver":"virtio-blk-pci","id":"d1","drive":"null","num-queues":2,"iothread-vq-mapping":[{"iothread":"io0","vqs":[0,1]}]}"#,
    ];
    let Some(qemu) = Qemu::start("real_qemu_is_found_and_controlled", &mapped) else { return };
    let mut monitor = qemu.monitor();
    let found = Host::new("/").qemu_processes().unwrap();
    let process: &QemuProcess = found.iter().find(|p| p.pid == qemu.child.id()).unwrap();
    assert_eq!((process.name.as_deref(), &process.libvirt_domain), (Some("plc"), &None));
    assert_eq!(process.monitors, [qemu.file("qmp")]);
    assert_eq!(process.agent, Some(qemu.file("agent")));
    assert_eq!(process.iothreads, ["io0"]);
    assert_eq!(process.disks[0].file, Some(qemu.file("disk")));

    assert!(monitor.version(ENOUGH).unwrap().major >= 6);
    assert_eq!(monitor.status(ENOUGH).unwrap().status, "prelaunch");
    monitor.set_poll_max("io0", Nanos::new(12_345), ENOUGH).unwrap();
    let iothread = monitor.iothreads(ENOUGH).unwrap().remove(0);
    assert_eq!((iothread.id.as_str(), iothread.poll_max), ("io0", Nanos::new(12_345)));
    let task = format!("/proc/{}/task/{}", process.pid, iothread.thread_id);
    assert!(Path::new(&task).exists());
    let vcpus = monitor.vcpu_threads(ENOUGH).unwrap();
    assert_eq!(vcpus.len(), 1);
    assert!(Path::new(&format!("/proc/{}/task/{}", process.pid, vcpus[0])).exists());
    let missing = monitor.set_poll_max("io1", Nanos::ZERO, ENOUGH).unwrap_err();
    assert!(matches!(missing.fault, Fault::Refused { .. }), "{missing}");

    assert_eq!(monitor.serial("d0", ENOUGH).unwrap().as_deref(), Some("root"));
    let block = monitor.blocks(ENOUGH).unwrap().remove(0);
    assert_eq!((block.qom_path.as_deref(), block.node.as_deref()), (Some(DISK), Some("root")));
    assert_eq!(block.file.as_deref(), qemu.file("disk").to_str());
    let mapping = MappedQueues { iothread: "io0".to_owned(), vqs: vec![0, 1] };
    let mapped = "/machine/peripheral/d1/virtio-backend";
    assert_eq!(monitor.queue_mapping(mapped, ENOUGH).unwrap(), [mapping]);
    assert_eq!(monitor.queue_mapping(DISK, ENOUGH).unwrap(), []);
    assert_eq!(monitor.reads_completed(DISK, ENOUGH).unwrap(), 0);
    assert!(monitor.reads_completed("/machine", ENOUGH).is_err());
    let throttle =
        Throttle { bandwidth: Some(BytesPerSecond::from_megabytes(10)), iops: Some(500) };
    monitor.set_throttle(DISK, throttle, ENOUGH).unwrap();
    monitor.set_throttle(DISK, Throttle::default(), ENOUGH).unwrap();
    monitor.set_throttle_group("tg0", throttle, ENOUGH).unwrap();
    let boundaries = [Nanos::from_millis(1), Nanos::from_millis(10)];
    monitor.set_latency_histogram(DISK, &boundaries, ENOUGH).unwrap();
    let histograms = monitor.latency_histograms(DISK, ENOUGH).unwrap();
    assert_eq!(histograms.read.unwrap().boundaries, boundaries);
    assert_eq!(histograms.flush.unwrap().bins, [0, 0, 0]);
    monitor.set_latency_histogram(DISK, &[], ENOUGH).unwrap();
    assert_eq!(monitor.latency_histograms(DISK, ENOUGH).unwrap().write, None);

    // QEMU takes another client's connection, and serves it when the first is gone.
    assert!(is_late(Monitor::connect(qemu.file("qmp"), SHORT)));
    assert!(is_late(Agent::connect(qemu.file("agent"), SHORT)));
    drop(monitor);
    qemu.monitor().status(ENOUGH).unwrap();
}

#[test]
fn real_guest_is_read_written_and_run() {
    const NAME: &str = "real_guest_is_read_written_and_run";
    if std::env::var_os("RTVIRTIO_TEST_WITHOUT_GUESTS").is_some() {
        let _ = writeln!(io::stderr(), "LEFT TO make test-guests: {NAME}");
        return;
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let image = |name: &str| target.join("guest").join(name).display().to_string();
    if !Path::new(&image("initramfs")).exists() {
        return skipped(NAME, &format!("no {} (scripts/guest makes it)", image("initramfs")));
    }
    let (kernel, initramfs) = (image("kernel"), image("initramfs"));
    let boot = ["-kernel", &kernel, "-initrd", &initramfs, "-append", "quiet panic=1"];
    let Some(qemu) = Qemu::start(NAME, &boot) else { return };
    let mut monitor = qemu.monitor();
    let start = Instant::now();
    let mut agent = loop {
        match Agent::connect(qemu.file("agent"), Duration::from_secs(2)) {
            Ok(agent) => break agent,
            Err(error) => assert!(start.elapsed() < ENOUGH, "{error}"),
        }
    };

    let enabled = agent.enabled_commands(ENOUGH).unwrap();
    assert!(enabled.contains("guest-exec") && enabled.contains("guest-file-open"));
    let scheduler = "/sys/block/vda/queue/scheduler";
    agent.write_file(scheduler, "bfq", ENOUGH).unwrap();
    let text = agent.read_file(scheduler, 4096, ENOUGH).unwrap();
    assert!(String::from_utf8_lossy(&text).contains("[bfq]"), "{text:?}");
    let refused = agent.write_file(scheduler, "bogus", ENOUGH).unwrap_err();
    assert!(matches!(refused.fault, Fault::Refused { .. }), "{refused}");
    assert_eq!(refused.command, "guest-file-flush");
    let missing = agent.read_file("/sys/missing", 10, ENOUGH).unwrap_err();
    assert_eq!(missing.command, "guest-file-open");

    let long = "0123456789abcdef".repeat(100_000);
    agent.write_file("/run/long", &long, ENOUGH).unwrap();
    assert_eq!(agent.read_file("/run/long", long.len(), ENOUGH).unwrap(), long.as_bytes());
    let larger = agent.read_file("/run/long", long.len() - 1, ENOUGH).unwrap_err();
    assert!(matches!(larger.fault, Fault::TooLong { .. }), "{larger}");
    // Every file was closed: the agent holds none.
    let script = "ls -l /proc/$(cat /run/qga.pid)/fd | grep -c -e /run/long -e /sys/ || true";
    let open = agent.run("/bin/sh", &["-c", script], ENOUGH).unwrap();
    assert_eq!(open.stdout, b"0\n", "{open:?}");

    let output = agent.run("/bin/sh", &["-c", "echo out; echo err >&2; exit 3"], ENOUGH).unwrap();
    assert_eq!((output.code, output.stdout), (Some(3), b"out\n".to_vec()));
    assert_eq!(output.stderr, b"err\n");
    assert!(agent.exec("/bin/missing", &[], ENOUGH).is_err());
    let now = Duration::from_nanos(agent.time(ENOUGH).unwrap() as u64);
    let date = agent.run("/bin/date", &["+%s"], ENOUGH).unwrap().stdout;
    let date: u64 = String::from_utf8(date).unwrap().trim().parse().unwrap();
    assert!(date.abs_diff(now.as_secs()) <= 30, "{date}, {now:?}");
    match agent.disks(ENOUGH) {
        Ok(disks) => {
            let disk = disks.iter().find(|d| d.node == "/dev/vda").unwrap();
            assert_eq!(disk.pci, Some(monitor.pci_devices(ENOUGH).unwrap()["d0"]), "{disks:?}");
        }
        Err(error) => assert!(matches!(error.fault, Fault::Disabled { .. }), "{error}"),
    }

    // Late: a program that runs on, then a guest that does not run at all.
    assert!(is_late(agent.run("/bin/sleep", &["600"], SHORT)));
    monitor.execute(&qapi::qmp::stop {}, ENOUGH).unwrap();
    assert!(is_late(agent.write_file("/run/late", "1", SHORT)));
    assert!(is_late(agent.read_file(scheduler, 4096, SHORT)));
    monitor.execute(&qapi::qmp::cont {}, ENOUGH).unwrap();
    assert_eq!(agent.read_file("/run/long", long.len(), ENOUGH).unwrap(), long.as_bytes());
}
