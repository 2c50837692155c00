//! An operator's host: three libvirt domains whose disks are a qcow2 file, a raw file and a
//! partition of one disk. From nothing written down to an applied plan, by three commands.
//!
//! libvirt and its namespaces are those of `libvirt`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::{Agent, Monitor, QemuProcess};
use rtvirtio_host::{Host, Topology};
use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::specification;
use rtvirtio_units::Iops;
use serde_json::Value;

use crate::in_guest::image;
use crate::libvirt::{Cgroups, ENTER, target};
use crate::scratch_disk::{Disk, RTVIRTIO, can_run, eventually, left_behind, rtvirtio, said};

const TEST: &str = "host_with_libvirt_domains_gets_a_plan_by_three_commands";
/// Set within the namespaces: the scratch disk's node.
const DEVICE: &str = "RTVIRTIO_TEST_OPERATORS_DISK";
/// Names that no operator's domain has, and that `Cgroups` clears away.
const VMS: [&str; 3] = ["rtvirtio-test-plc", "rtvirtio-test-web", "rtvirtio-test-backup"];
/// Names a file to which the three commands are recorded as an operator would run them, with their
/// defaults, in the place of the test's tour (`make bench EXPERIMENT=three-commands`).
const RECORDING: &str = "RTVIRTIO_RECORDING";
const ENOUGH: Duration = Duration::from_secs(60);
/// Guests are emulated, on a machine that may be busy.
const BOOT: Duration = Duration::from_secs(180);
/// Sectors of the scratch disk's partitions.
const PARTITIONS: [(u64, u64); 2] = [(2048, 2 << 20), (2048 + (2 << 20), 1 << 20)];

#[test]
fn host_with_libvirt_domains_gets_a_plan_by_three_commands() {
    if let Some(device) = std::env::var_os(DEVICE) {
        return Site::new(Path::new(&device)).tour();
    }
    let Some(_host) = can_run(TEST) else { return };
    if image(TEST).is_none() {
        return;
    }
    let skip = |why: &str| {
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {why}");
    };
    let libvirt = target("libvirt");
    if !libvirt.join("stamp").exists() {
        return skip("no libvirt (make it with scripts/libvirt)");
    }
    for tool in ["addpart", "mkfs.ext4", "qemu-img"] {
        if Command::new(tool).stdin(Stdio::null()).output().is_err() {
            return skip(&format!("no {tool}"));
        }
    }
    drop(Cgroups); // of a run that was killed
    let cgroups = Cgroups;
    let disk = Disk::start();
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--mount-proc"])
        .args(["--kill-child=KILL", "sh", "-c", ENTER, "sh"])
        .args([&libvirt, directory.path()])
        .arg(std::env::current_exe().unwrap())
        .args([&format!("operator::{TEST}"), "--exact", "--nocapture"])
        .env(DEVICE, &disk.node)
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    for number in ["1", "2"] {
        let _ = Command::new("delpart").arg(&disk.node).arg(number).output();
    }
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("1 passed"), "{}", said(&output));
    let runs = |p: &QemuProcess| p.name.as_deref().is_some_and(|name| VMS.contains(&name));
    assert!(!Host::new("/").qemu_processes().unwrap().iter().any(runs));
    drop((cgroups, disk));
    assert_eq!(left_behind(), [""; 0]);
}

/// The host within the namespaces.
struct Site {
    directory: PathBuf,
    device: PathBuf,
    images: PathBuf,
}

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", said(&output));
    output
}

impl Site {
    fn new(device: &Path) -> Self {
        let directory = std::env::current_dir().unwrap();
        let site = Self { images: directory.join("images"), directory, device: device.to_owned() };
        let node = site.device.to_str().unwrap();
        for (number, (start, length)) in (1..).zip(PARTITIONS) {
            run(
                "addpart",
                &[node, &format!("{number}"), &format!("{start}"), &format!("{length}")],
            );
        }
        let first = format!("{node}p1");
        run("mkfs.ext4", &["-q", "-E", "nodiscard", &first]);
        std::fs::create_dir(&site.images).unwrap();
        run("mount", &[&first, site.images.to_str().unwrap()]);
        let image = |name: &str| site.images.join(name).display().to_string();
        // Written out: what is not is read without the disk.
        for (format, name) in [("qcow2", "db.qcow2"), ("raw", "web.img")] {
            let (image, full) = (image(name), "preallocation=full");
            run("qemu-img", &["create", "-q", "-f", format, "-o", full, &image, "256M"]);
        }
        // Somebody's data.
        let precious: Vec<u8> = (0..4_u32 << 20).map(|i| ((i * 31) >> 7) as u8).collect();
        std::fs::write(image("precious"), precious).unwrap();
        site
    }

    fn virsh(&self, arguments: &[&str]) -> Output {
        let all = [&["--quiet", "--connect", "qemu:///system"], arguments].concat();
        Command::new("virsh").args(all).stdin(Stdio::null()).output().unwrap()
    }

    fn virsh_does(&self, arguments: &[&str]) {
        let output = self.virsh(arguments);
        assert!(output.status.success(), "virsh {arguments:?}: {}", said(&output));
    }

    /// Runs the binary; what it printed.
    fn rtvirtio(&self, code: i32, arguments: &[&str]) -> String {
        let output = rtvirtio(&self.directory.join("state"), arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
        said(&output)
    }

    fn define(&self, number: usize, kind: &str, format: &str, source: &Path) {
        let guest = target("guest");
        let source_attribute = if kind == "block" { "dev" } else { "file" };
        let xml = format!(
            "<domain type='qemu'><name>{}</name>
             <uuid>6ba7b810-9dad-11d1-80b4-00c04fd430d{number}</uuid>
             <memory unit='MiB'>384</memory><vcpu>1</vcpu>
             <os><type arch='x86_64' machine='q35'>hvm</type>
               <kernel>{}</kernel><initrd>{}</initrd>
               <cmdline>console=ttyS0 quiet panic=1 random.trust_cpu=on mitigations=off</cmdline></os>
             <cpu mode='maximum'/>
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
               <disk type='{kind}' device='disk'><driver name='qemu' type='{format}' cache='none'/>
                 <source {source_attribute}='{}'/><target dev='vda' bus='virtio'/></disk>
               <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
               <memballoon model='none'/>
             </devices></domain>",
            VMS[number],
            guest.join("kernel").display(),
            guest.join("initramfs").display(),
            source.display()
        );
        let file = self.directory.join("domain.xml");
        std::fs::write(&file, xml).unwrap();
        self.virsh_does(&["define", "--validate", file.to_str().unwrap()]);
    }

    /// Has a guest do something for ever.
    fn work(&self, domain: &str, script: &str) {
        let mut agent = Agent::libvirt(domain);
        let start = Instant::now();
        while let Err(error) = agent.time(ENOUGH) {
            assert!(start.elapsed() < BOOT, "{domain}: {error}");
            std::thread::sleep(Duration::from_millis(500));
        }
        let script = format!("while :; do {script}; done");
        agent.exec("/bin/sh", &["-c", &script], ENOUGH).unwrap();
    }

    fn tour(&self) {
        let start = Instant::now();
        while !self.virsh(&["version"]).status.success() {
            assert!(start.elapsed() < ENOUGH);
            std::thread::sleep(Duration::from_millis(100));
        }
        let partition = PathBuf::from(format!("{}p2", self.device.display()));
        self.define(0, "file", "qcow2", &self.images.join("db.qcow2"));
        self.define(1, "file", "raw", &self.images.join("web.img"));
        self.define(2, "block", "raw", &partition);
        let precious = || std::fs::read(self.images.join("precious")).unwrap();
        let before = precious();
        let none = self.rtvirtio(1, &["init", "--observe", "2"]);
        assert!(none.contains("no VM runs here"), "{none}");
        for domain in VMS {
            self.virsh_does(&["start", domain]);
        }
        if let Some(path) = std::env::var_os(RECORDING) {
            self.record(Path::new(&path));
            VMS.iter().for_each(|domain| drop(self.virsh(&["destroy", domain])));
            run("umount", &[self.images.to_str().unwrap()]);
            return;
        }
        let reads = "dd if=/dev/vda of=/dev/null bs=4k count=2000 iflag=direct";
        self.work(VMS[0], reads);
        self.work(VMS[1], reads);
        self.work(VMS[2], "dd if=/dev/zero of=/dev/vda bs=128k count=2000 oflag=direct");

        self.top();
        self.somebody_elses_histogram_is_left_alone();
        self.histogram_that_vanishes_is_set_again();
        self.histogram_of_a_killed_one_goes();
        self.calibration_beside_the_vms();
        self.plan_and_back();
        assert!(precious() == before, "somebody's data has changed");
        VMS.iter().for_each(|domain| drop(self.virsh(&["destroy", domain])));
        run("umount", &[self.images.to_str().unwrap()]);
    }

    /// Without a word of configuration each disk is there with what it does and lies on.
    fn top(&self) {
        let looks = self.rtvirtio(0, &["top", "--json", "--count", "2", "--interval", "3"]);
        let look: Value = looks.lines().rev().find_map(|l| serde_json::from_str(l).ok()).unwrap();
        let disk = self.device.file_name().unwrap().to_str().unwrap();
        for (vm, (storage, format)) in VMS.iter().zip([
            (format!("ext4 at {}", self.images.display()), "qcow2"),
            (format!("ext4 at {}", self.images.display()), "raw"),
            (format!("partition {disk}p2"), "raw"),
        ]) {
            let row = look["disks"].as_array().unwrap().iter().find(|row| row["vm"] == *vm);
            let row = row.unwrap_or_else(|| panic!("{look}"));
            assert_eq!((row["disk"].as_str(), row["format"].as_str()), (Some("vda"), Some(format)));
            let words = row["storage"].as_str().unwrap();
            assert!(words.contains(&storage) && words.contains(disk), "{words}");
            let rate = row["read_iops"].as_f64().unwrap() + row["write_iops"].as_f64().unwrap();
            assert!(rate > 1.0 && row["p50"].is_number(), "{row}");
            // In the host's block layer too, whatever the format: the disk's part of it.
            let (at_qemu, on_host) = (row["p50"].as_u64(), row["host_p50"].as_u64());
            assert!(on_host.is_some_and(|time| time > 0 && Some(time) <= at_qemu), "{row}");
            let names: Vec<&str> =
                row["names"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            assert!(names.contains(&"virtio-disk0"), "{names:?}");
        }
        assert!(look["devices"][disk]["iops"].as_f64().unwrap() > 1.0, "{look}");
        let table = self.rtvirtio(0, &["top", "-n", "1", "--sort", "name"]);
        assert!(table.contains("VM/disk") && table.contains("plc/vda"), "{table}");
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
        // QEMU counts no longer than somebody looks.
        let mut monitor = Monitor::libvirt(VMS[0]);
        let path = monitor.blocks(ENOUGH).unwrap().remove(0).qom_path.unwrap();
        assert!(monitor.latency_histograms(&path, ENOUGH).unwrap().read.is_none());
    }

    fn somebody_elses_histogram_is_left_alone(&self) {
        use rtvirtio_units::Nanos;
        let mut monitor = Monitor::libvirt(VMS[0]);
        let path = monitor.blocks(ENOUGH).unwrap().remove(0).qom_path.unwrap();
        let coarse = [1, 10, 100].map(Nanos::from_millis);
        monitor.set_latency_histogram(&path, &coarse, ENOUGH).unwrap();
        self.rtvirtio(0, &["top", "-n", "1"]);
        let there = monitor.latency_histograms(&path, ENOUGH).unwrap().read.unwrap();
        assert_eq!(there.boundaries, coarse);
        monitor.set_latency_histogram(&path, &[], ENOUGH).unwrap();
    }

    /// As when another rtvirtio that looked at the VM ends, and clears what it had set.
    fn histogram_that_vanishes_is_set_again(&self) {
        let mut top = Command::new(RTVIRTIO)
            .args(["top", "-n", "4", "--json"])
            .env("RTVIRTIO_STATE_DIR", self.directory.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut monitor = Monitor::libvirt(VMS[0]);
        let path = monitor.blocks(ENOUGH).unwrap().remove(0).qom_path.unwrap();
        let is_set = || {
            let found = Monitor::libvirt(VMS[0]).latency_histograms(&path, ENOUGH);
            found.unwrap().read.is_some()
        };
        eventually("the first histogram", ENOUGH, is_set);
        monitor.set_latency_histogram(&path, &[], ENOUGH).unwrap();
        eventually("another histogram", ENOUGH, is_set);
        assert!(top.wait().unwrap().success());
        assert!(!is_set());
    }

    fn histogram_of_a_killed_one_goes(&self) {
        let mut top = Command::new(RTVIRTIO)
            .args(["top", "--json"])
            .env("RTVIRTIO_STATE_DIR", self.directory.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let path = Monitor::libvirt(VMS[0]).blocks(ENOUGH).unwrap().remove(0).qom_path.unwrap();
        let is_set = || {
            let found = Monitor::libvirt(VMS[0]).latency_histograms(&path, ENOUGH);
            found.unwrap().read.is_some()
        };
        eventually("a histogram", ENOUGH, is_set);
        top.kill().unwrap();
        top.wait().unwrap();
        eventually("its end", ENOUGH, || !is_set());
    }

    /// The disk is measured beside VMs that work, and nothing of it is left.
    fn calibration_beside_the_vms(&self) {
        let images = self.images.to_str().unwrap();
        let profile = self.directory.join("beside.json");
        let entries = || std::fs::read_dir(&self.images).unwrap().count();
        let before = entries();
        // A target that would keep nobody is a mistake.
        for target in ["nothing=p99:5ms".to_owned(), format!("{}/sdz=p99:5ms", VMS[0])] {
            let wrong = ["calibrate", "--in", images, "-o", "/nonexistent/p", "--target", &target];
            let said = self.rtvirtio(1, &wrong);
            assert!(said.contains("no VM that runs has a disk on"), "{said}");
        }
        // Guests that are emulated on two CPUs are disturbed by less than a probe.
        let manners = ["--size", "256", "--limit", "1", "--share", "1", "--tolerate", "1000"];
        let arguments =
            [&["calibrate", "--in", images, "-o", profile.to_str().unwrap()], &manners[..]];
        self.rtvirtio(0, &arguments.concat());
        let text = std::fs::read_to_string(profile).unwrap();
        let found: rtvirtio_spec::profile::Profile = serde_json::from_str(&text).unwrap();
        assert!(found.capacity.iops_4k > 100.0, "{:?}", found.capacity);
        assert_eq!(entries(), before);
    }

    /// What a terminal shows of the three commands, beside two guests that use some of the disk. The third, a
    /// backup, is idle: what it may do later has to be held.
    fn record(&self, path: &Path) {
        let reads = "dd if=/dev/vda of=/dev/null bs=4k count=20 iflag=direct; sleep 0.5";
        self.work(VMS[0], reads);
        self.work(VMS[1], reads);
        let mut recording = String::new();
        let begin = Instant::now();
        let images = self.images.to_str().unwrap();
        let mut run = |code: i32, arguments: &[&str]| {
            let start = Instant::now();
            let output = rtvirtio(&self.directory.join("state"), arguments);
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            let mut shown = text(&output.stderr);
            // Of the steps the first and the last.
            let steps: Vec<&str> = shown.lines().filter(|line| line.starts_with('[')).collect();
            if let [first, .., last] = steps[..] {
                let others = shown.lines().filter(|line| !line.starts_with('['));
                shown =
                    [first, "...", last].into_iter().chain(others).collect::<Vec<_>>().join("\n")
                        + "\n";
            }
            shown =
                (shown + &text(&output.stdout)).replace(self.directory.to_str().unwrap(), "/srv");
            let command = arguments.join(" ").replace(self.directory.to_str().unwrap(), "/srv");
            let took = start.elapsed().as_secs_f64();
            recording += &format!("# rtvirtio {command}\n{shown}({took:.0} s)\n\n");
            std::fs::write(path, &recording).unwrap();
            assert_eq!(output.status.code(), Some(code), "{recording}");
        };
        let target = format!("{}/vda=p99.9:20ms", VMS[0]);
        let profiles = self.directory.join("profiles");
        std::fs::create_dir(&profiles).unwrap();
        let profiles = profiles.to_str().unwrap();
        run(0, &["init", &target, "-o", "site.toml", "--profiles", profiles]);
        let text = std::fs::read_to_string("site.toml").unwrap();
        let written = specification::parse("site.toml", &text).unwrap();
        let profile = written.devices[0].profile.to_str().unwrap();
        let limits = ["--size", "256", "--target", "p99:100ms"];
        run(0, &[&["calibrate", "--in", images, "-o", profile], &limits[..]].concat());
        run(0, &["plan", "site.toml", "-o", "site.plan", "--apply"]);
        let took = begin.elapsed().as_secs_f64();
        let plan: Plan = serde_json::from_slice(&std::fs::read("site.plan").unwrap()).unwrap();
        assert!(!plan.changes.is_empty(), "a plan that changes nothing shows little");
        run(0, &["verify", "site.plan"]);
        run(0, &["rollback"]);
        recording += &format!("From running VMs to an applied plan: {took:.0} s\n");
        std::fs::write(path, recording).unwrap();
        assert!(took < 360.0, "{took} s");
    }

    fn plan_and_back(&self) {
        let wrong = self.rtvirtio(1, &["init", "nothing=p99:5ms"]);
        assert!(wrong.contains(VMS[0]) && wrong.contains("no VM of the name"), "{wrong}");
        let wrong = self.rtvirtio(1, &["init", &format!("{}/sdz=p99:5ms", VMS[0])]);
        assert!(wrong.contains("vda = virtio-disk0"), "{wrong}");
        let profiles = self.directory.join("profiles");
        let site = self.directory.join("site.toml");
        let (site, target) = (site.to_str().unwrap(), format!("{}/vda=p99.9:10ms", VMS[0]));
        let arguments = [
            "init",
            &target,
            "--observe",
            "6",
            "-o",
            site,
            "--profiles",
            profiles.to_str().unwrap(),
        ];
        let printed = self.rtvirtio(0, &arguments);
        let next = format!("next: rtvirtio calibrate --in {} -o ", self.images.display());
        assert!(printed.contains(&next), "{printed}");
        assert!(self.rtvirtio(1, &arguments).contains("is there already"));
        let text = std::fs::read_to_string(site).unwrap();
        let written = specification::parse("site.toml", &text).unwrap();
        assert_eq!(written.vms.len(), 3, "{text}");
        assert_eq!(written.devices.len(), 1, "{text}");
        let task = |vm: &str| {
            let vm = written.vms.iter().find(|found| found.name.as_str() == vm).unwrap();
            vm.tasks[0].clone()
        };
        assert!(task(VMS[0]).target.is_some() && task(VMS[0]).load.read_fraction > 0.9, "{text}");
        let backup = task(VMS[2]);
        assert!(backup.target.is_none() && backup.load.block_size.get() > 64 << 10, "{text}");
        assert!(backup.load.iops.map_or(0.0, Iops::get) > 1.0, "{text}");

        std::fs::create_dir(&profiles).unwrap();
        let profile = include_str!("ref-4x250.json");
        std::fs::write(&written.devices[0].profile, profile).unwrap();
        let plan = self.directory.join("site.plan");
        let plan = plan.to_str().unwrap();
        // As it is, what they do fits; a backup that may do anything has to be held.
        self.rtvirtio(0, &["plan", site]);
        let mut edited = written.clone();
        edited
            .vms
            .iter_mut()
            .filter(|vm| vm.name.as_str() == VMS[2])
            .for_each(|vm| vm.tasks.clear());
        std::fs::write(site, specification::to_toml(&edited)).unwrap();
        self.rtvirtio(2, &["plan", site, "-o", plan]);
        let parsed: Plan = serde_json::from_slice(&std::fs::read(plan).unwrap()).unwrap();
        let knobs = || Host::new("/").observe(&Topology::of_plan(&parsed)).unwrap();
        let before = knobs();
        self.rtvirtio(0, &["apply", plan]);
        self.rtvirtio(0, &["verify", plan]);
        assert_ne!(knobs(), before);
        // One is switched off: neither keeps the others from being planned for and verified.
        self.virsh_does(&["destroy", VMS[2]]);
        let verified = self.rtvirtio(0, &["verify", plan]);
        assert!(verified.contains(&format!("VM {} does not run", VMS[2])), "{verified}");
        self.rtvirtio(0, &["rollback"]);
        let planned = self.rtvirtio(2, &["plan", site, "-o", plan]);
        assert!(planned.contains(&format!("VM {} does not run", VMS[2])), "{planned}");
        self.rtvirtio(0, &["apply", plan]);
        self.rtvirtio(0, &["rollback"]);
        // `watch` takes the name that the operator uses.
        let looks = self.rtvirtio(0, &["watch", site, "--json", "--duration", "3"]);
        assert!(looks.contains(&format!("{}: watched at QEMU", VMS[0])), "{looks}");
    }
}
