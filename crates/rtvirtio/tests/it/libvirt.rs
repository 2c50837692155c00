//! Real libvirt domains of type qemu: discovered, planned, applied, verified, rolled back; and the
//! XML that `plan --qemu` prints, accepted and live.
//!
//! libvirt is the one of `scripts/libvirt`. It wants its paths to be the packages' (`/usr/sbin`,
//! `/usr/share/libvirt`, `/run/libvirt`), so the test starts itself again in a mount namespace where
//! overlays put it there, and in a PID namespace, with which libvirtd and all QEMUs end. What
//! outlives that are cgroups, which are the host's; the first of the two processes removes them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::{Agent, ExecStatus, Monitor, QemuProcess};
use rtvirtio_host::{Host, Topology};
use rtvirtio_spec::plan::{DiskIoThreads, IoThread, Plan, VmIoThreads, qemu};
use rtvirtio_spec::specification;
use rtvirtio_units::{CpuId, DiskName, IoThreadId, Nanos, VmName};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::in_guest::image;
use crate::scratch_disk::{Disk, RTVIRTIO, can_run, left_behind, rtvirtio, said};

const TEST: &str = "libvirt_domain_is_planned_applied_rolled_back_and_takes_the_printed_xml";
const HISTOGRAM_TEST: &str = "histograms_that_a_domains_xml_asks_for_come_from_libvirt";
/// Set within the namespaces: the scratch disk's node.
const DEVICE: &str = "RTVIRTIO_TEST_DEVICE";
/// Names that no operator's domain has.
pub(crate) const VM: &str = "rtvirtio-test-plc";
const BACKGROUND: &str = "rtvirtio-test-backup";

/// Where the bins of a domain's own histogram begin: no other histogram's do.
const BINS: [Nanos; 2] = [Nanos::from_micros(7_777), Nanos::from_millis(77_777)];
const READ: [&str; 4] = ["if=/dev/vda", "of=/dev/null", "bs=4k", "iflag=direct"];

const ENOUGH: Duration = Duration::from_secs(60);
/// Guests are emulated, on a machine that may be busy.
const BOOT: Duration = Duration::from_secs(120);

/// Puts libvirt ($1) over /usr, gives it an /etc, /var and /run of its own below $2, starts its
/// daemon and runs the rest. As process 1 it reaps what is left to it: a killed QEMU that nobody
/// waits for would still be there for libvirt.
pub(crate) const ENTER: &str = r#"
set -eu
libvirt=$1 own=$2/own
shift 2
mkdir "$own"
mount -t tmpfs libvirt-test "$own"
mkdir "$own/etc" "$own/etc-work" "$own/var" "$own/var-work"
mount -t overlay libvirt-test -o "lowerdir=$libvirt/libvirt/usr:/usr:$libvirt/libraries/usr" /usr
mount -t overlay libvirt-test -o "lowerdir=/etc,upperdir=$own/etc,workdir=$own/etc-work" /etc
mount -t overlay libvirt-test -o "lowerdir=/var,upperdir=$own/var,workdir=$own/var-work" /var
mount -t tmpfs libvirt-test /run
# Debian's packages make this user; QEMU needs it in no way.
echo 'libvirt-qemu:x:64055:64055::/nonexistent:/usr/sbin/nologin' >>/etc/passwd
echo 'libvirt-qemu:x:64055:' >>/etc/group
mkdir -p /etc/libvirt
echo 'auth_unix_rw = "none"' >/etc/libvirt/libvirtd.conf
# libvirt must not change the owner of the disk and of the guests' image, which are not its own.
printf '%s\n' 'user = "root"' 'group = "root"' 'dynamic_ownership = 0' 'security_driver = "none"' \
    'stdio_handler = "file"' >/etc/libvirt/qemu.conf
libvirtd &
"$@"
exit $?
"#;

#[test]
fn libvirt_domain_is_planned_applied_rolled_back_and_takes_the_printed_xml() {
    beside_libvirt(TEST, "libvirt", within);
}

#[test]
fn histograms_that_a_domains_xml_asks_for_come_from_libvirt() {
    beside_libvirt(HISTOGRAM_TEST, "libvirt-12", histograms);
}

/// Runs `within` beside the libvirt that `make libvirt` has unpacked as `name`, with a scratch
/// disk's node, in the process that is this test started again.
fn beside_libvirt(test: &str, name: &str, within: fn(&Path)) {
    if let Some(device) = std::env::var_os(DEVICE) {
        return within(Path::new(&device));
    }
    let Some(_host) = can_run(test) else { return };
    if image(test).is_none() {
        return;
    }
    let libvirt = target(name);
    if !libvirt.join("stamp").exists() {
        let why = format!("no {name} (make it with make libvirt)");
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
        return;
    }
    drop(Cgroups); // of a run that was killed
    let cgroups = Cgroups;
    let disk = Disk::start();
    let directory = tempfile::tempdir().unwrap();
    // Whatever ends this process ends `unshare`, that ends the namespaces' first process, and that
    // ends all of them.
    let output = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--mount-proc"])
        .args(["--kill-child=KILL", "sh", "-c", ENTER, "sh"])
        .args([&libvirt, directory.path()])
        .arg(std::env::current_exe().unwrap())
        .args([&format!("libvirt::{test}"), "--exact", "--nocapture"])
        .env(DEVICE, &disk.node)
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("1 passed"), "{}", said(&output));
    let runs = |p: &QemuProcess| p.name.as_deref().is_some_and(|n| [VM, BACKGROUND].contains(&n));
    assert!(!Host::new("/").qemu_processes().unwrap().iter().any(runs));
    drop((cgroups, disk));
    assert_eq!(left_behind(), [""; 0]);
}

/// What `make test` has made beside what cargo builds.
pub(crate) fn target(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join(name)
}

/// A domain whose XML has libvirt count latencies: `top` reads them from libvirt and asks QEMU's
/// monitor for none. Of a domain without them, QEMU counts.
fn histograms(device: &Path) {
    let t = Domains::beside_libvirtd(device);
    let bins = BINS.map(|start| format!("<bin start='{}'/>", start.get())).concat();
    let driver = format!(
        "<driver name='qemu'><statistics><latency-histogram type='read'><bin start='0'/>{bins}\
         </latency-histogram></statistics></driver>"
    );
    t.define(&t.xml(VM, "<vcpu>1</vcpu>", &[&driver]));
    t.define(&t.xml(BACKGROUND, "<vcpu>1</vcpu>", &[""]));
    // Which virsh is asked for.
    let [vm, background] = [VM, BACKGROUND].map(|domain| t.start(domain).uuid.unwrap());
    let start = Instant::now();
    for domain in [VM, BACKGROUND] {
        let mut agent = Agent::libvirt(domain);
        while agent.time(ENOUGH).is_err() {
            assert!(start.elapsed() < BOOT);
            std::thread::sleep(Duration::from_millis(500));
        }
        agent.exec("/bin/dd", &READ, ENOUGH).unwrap();
    }
    // A virsh of the test's own notes what it is asked.
    let programs = t.directory.join("bin");
    std::fs::create_dir(&programs).unwrap();
    let (virsh, asked) = (programs.join("virsh"), t.directory.join("asked"));
    let script =
        format!("#!/bin/sh\necho \"$*\" >>'{}'\nexec /usr/bin/virsh \"$@\"\n", asked.display());
    std::fs::write(&virsh, script).unwrap();
    std::fs::set_permissions(&virsh, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = Command::new(RTVIRTIO)
        .args(["top", "--json", "--count", "2", "--interval", "3"])
        .env("PATH", format!("{}:{}", programs.display(), std::env::var("PATH").unwrap()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let last = String::from_utf8_lossy(&output.stdout).lines().last().unwrap().to_owned();
    let look: serde_json::Value = serde_json::from_str(&last).unwrap();
    for (domain, is_libvirts) in [(VM, true), (BACKGROUND, false)] {
        let row = look["disks"].as_array().unwrap().iter().find(|row| row["vm"] == domain).unwrap();
        assert!(row["read_iops"].as_f64().unwrap() > 10.0, "{look}");
        let p50 = row["p50"].as_u64().unwrap();
        assert_eq!(BINS.iter().any(|end| end.get() == p50), is_libvirts, "{look}");
    }
    let asked = std::fs::read_to_string(asked).unwrap();
    let count = |what: &str, uuid: &str| {
        asked.lines().filter(|line| line.contains(what) && line.contains(uuid)).count()
    };
    // Whether libvirt counts is asked once for each disk; then each look asks the one that does.
    assert!(count("domstats", &vm) >= 3 && count("query-blockstats", &vm) == 0, "{asked}");
    assert!(count("domstats", &background) == 1, "{asked}");
    assert!(count("query-blockstats", &background) >= 3, "{asked}");
    let mut monitor = Monitor::libvirt(VM);
    let path = monitor.blocks(ENOUGH).unwrap().remove(0).qom_path.unwrap();
    let left = monitor.latency_histograms(&path, ENOUGH).unwrap().read.unwrap();
    assert_eq!(left.boundaries, BINS);
    t.destroy(VM);
    t.destroy(BACKGROUND);
}

/// The test itself, beside libvirtd.
fn within(device: &Path) {
    let t = Domains::beside_libvirtd(device);

    // As libvirt makes it, but for the alias of one disk; the other goes by libvirt's own.
    t.define(&t.xml(VM, "<vcpu>1</vcpu>", &["<alias name='ua-root'/>", ""]));
    t.define(&t.xml(BACKGROUND, "<vcpu>1</vcpu>", &[""]));
    let process = t.start(VM);
    let background = t.start(BACKGROUND);
    assert!(cgroup(&process).starts_with("machine"), "{}", cgroup(&process));
    assert_eq!(process.libvirt_domain.as_deref(), Some(VM));
    let ids: Vec<_> = process.disks.iter().map(|d| d.id.as_deref().unwrap()).collect();
    assert_eq!(ids, ["ua-root", "virtio-disk1"]);
    assert!(process.disks.iter().all(|d| d.file.as_deref() == Some(device)), "{process:?}");
    t.specify(&process, &background);
    t.run(2, &["plan", "spec.toml", "-o", "first.plan"]);
    let plan = t.plan("first.plan");
    let its = |c: &&rtvirtio_spec::settings::Change| c.knob.to_string().contains(BACKGROUND);
    assert!(plan.changes.iter().any(|c| its(&c)), "{:?}", plan.changes);
    let knobs = || Host::new("/").observe(&Topology::of_plan(&plan)).unwrap();
    let before = knobs();
    t.run(0, &["apply", "first.plan"]);
    assert!(plan.changes.iter().all(|c| knobs().get(&c.knob) == Some(&c.new)), "{:?}", knobs());
    t.run(0, &["verify", "first.plan"]);
    t.run(0, &["rollback"]);
    assert_eq!(knobs(), before);
    t.run(2, &["verify", "first.plan"]);
    let printed = t.run(2, &["plan", "spec.toml", "--qemu"]);

    // What was printed, in the domain.
    t.destroy(VM);
    let gone = t.run(2, &["plan", "spec.toml"]);
    assert!(gone.contains(&format!("VM {VM} does not run")), "{gone}");
    let planned = &plan.iothreads.vms[0];
    let disks: Vec<_> = planned.disks.iter().map(|d| Printed::disk(&printed, &d.disk)).collect();
    let disks: Vec<_> = disks.iter().map(String::as_str).collect();
    t.define(&t.xml(VM, &Printed::domain(&printed), &disks));
    let process = t.start(VM);
    // Its cgroup has another number now, and is found.
    t.run(2, &["plan", "spec.toml"]);
    t.specify(&process, &background);
    let mut monitor = Monitor::libvirt(VM);
    t.is_live(planned, &process, &mut monitor);

    t.guest_is_watched(&mut monitor);
    t.destroy(VM);

    // One disk for several IOThreads, pinned, where this host may have CPUs for none: the same text.
    let allowed = sched_getaffinity(None).unwrap();
    let mut cpus =
        (0..CpuSet::MAX_CPU).filter(|&c| allowed.is_set(c)).map(|c| CpuId::new(c as u32));
    let vcpu_cpus = [cpus.next().unwrap()];
    let cpu = Some(cpus.next_back().unwrap_or(vcpu_cpus[0]));
    let threads = (1..=3).map(|id| IoThread { id: IoThreadId::new(id), cpu }).collect();
    let queues = [1, 2, 1, 2].map(IoThreadId::new).to_vec();
    let disk = |name, queues| DiskIoThreads { disk: DiskName::new(name).unwrap(), queues };
    let several = VmIoThreads {
        vm: VmName::new(VM).unwrap(),
        vcpus: Some(4),
        threads,
        disks: vec![disk("root", queues), disk("log", vec![IoThreadId::new(3)])],
    };
    let domain = qemu::domain_xml(&several, &vcpu_cpus);
    let disks: Vec<_> = several.disks.iter().map(qemu::disk_xml).collect();
    t.define(&t.xml(VM, &domain, &[&disks[0], &disks[1]]));
    let process = t.start(VM);
    t.is_live(&several, &process, &mut monitor);
    t.destroy(VM);
    t.destroy(BACKGROUND);
}

/// What `plan --qemu` printed for libvirt.
struct Printed;

impl Printed {
    /// The elements of `<domain>`.
    fn domain(text: &str) -> String {
        Self::after(text, &format!("{VM}: libvirt 10.0 or later, in its <domain>\n"))
    }

    /// The elements of a disk's `<disk>`.
    fn disk(text: &str, disk: &DiskName) -> String {
        Self::after(text, &format!("{VM}: in the <disk> of {disk}; "))
    }

    /// The indented lines after the line that begins so.
    fn after(text: &str, heading: &str) -> String {
        let (_, rest) = text.split_once(heading).unwrap_or_else(|| panic!("{heading}: {text}"));
        let lines = rest.lines().skip(usize::from(!heading.ends_with('\n')));
        lines.take_while(|l| l.starts_with("  ")).map(|l| format!("{l}\n")).collect()
    }
}

struct Domains {
    directory: PathBuf,
    device: PathBuf,
}

impl Domains {
    /// Waits for libvirtd.
    fn beside_libvirtd(device: &Path) -> Self {
        let t = Self { directory: std::env::current_dir().unwrap(), device: device.to_owned() };
        let version = || t.virsh(&["version"]);
        let start = Instant::now();
        while !version().status.success() {
            assert!(start.elapsed() < ENOUGH, "{}", said(&version()));
            std::thread::sleep(Duration::from_millis(100));
        }
        t
    }

    fn virsh(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", "qemu:///system"]).args(arguments);
        command.current_dir(&self.directory).stdin(Stdio::null()).output().unwrap()
    }

    fn virsh_does(&self, arguments: &[&str]) {
        let output = self.virsh(arguments);
        assert!(output.status.success(), "virsh {arguments:?}: {}", said(&output));
    }

    /// Runs the binary; what it printed.
    fn run(&self, code: i32, arguments: &[&str]) -> String {
        let output = rtvirtio(&self.directory.join("state"), arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
        said(&output)
    }

    fn plan(&self, file: &str) -> Plan {
        serde_json::from_slice(&std::fs::read(self.directory.join(file)).unwrap()).unwrap()
    }

    /// A domain of type qemu that boots the guests' image; `domain` and each of `disks` are
    /// elements of its own. A printed `<driver>` gets the attributes that a disk of this kind has.
    fn xml(&self, name: &str, domain: &str, disks: &[&str]) -> String {
        const MIB: usize = 1 << 20;
        const DRIVER: &str = "<driver name='qemu'";
        let attributes = format!("{DRIVER} type='raw' cache='none' io='native'");
        let image = target("guest");
        // A domain with this name is the same one only with the same UUID.
        let first = if name == VM { 0 } else { 2 };
        let disk = |(index, elements): (usize, &&str)| {
            let elements = match elements.contains(DRIVER) {
                true => elements.replace(DRIVER, &attributes),
                false => format!("{attributes}/>{elements}"),
            };
            // Slices of one device: each domain's own, and no lock on the whole.
            let (offset, size) = ((first + index) * 256 * MIB, 256 * MIB);
            let target = ["vda", "vdb"][index];
            format!(
                "<disk type='block' device='disk'><source dev='{}'><slices>\
                 <slice type='storage' offset='{offset}' size='{size}'/></slices></source>\
                 <target dev='{target}' bus='virtio'/><shareable/>{elements}</disk>",
                self.device.display()
            )
        };
        let disks: String = disks.iter().enumerate().map(disk).collect();
        format!(
            "<domain type='qemu'><name>{name}</name>
             <uuid>6ba7b810-9dad-11d1-80b4-00c04fd430c{first}</uuid><memory unit='MiB'>384</memory>{domain}
             <os><type arch='x86_64' machine='q35'>hvm</type>
               <kernel>{}</kernel><initrd>{}</initrd>
               <cmdline>console=ttyS0 quiet panic=1 random.trust_cpu=on mitigations=off</cmdline></os>
             <cpu mode='maximum'/>
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{disks}
               <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
               <memballoon model='none'/>
             </devices></domain>",
            image.join("kernel").display(),
            image.join("initramfs").display()
        )
    }

    /// libvirt takes it, by its schema too.
    fn define(&self, xml: &str) {
        std::fs::write(self.directory.join("domain.xml"), xml).unwrap();
        self.virsh_does(&["define", "--validate", "domain.xml"]);
    }

    /// Starts a domain; its process as discovery sees it.
    fn start(&self, domain: &str) -> QemuProcess {
        self.virsh_does(&["start", domain]);
        let processes = Host::new("/").qemu_processes().unwrap();
        let its = |p: &QemuProcess| p.name.as_deref() == Some(domain);
        processes.into_iter().find(its).expect("discovery finds the domain")
    }

    fn destroy(&self, domain: &str) {
        self.virsh_does(&["destroy", domain]);
    }

    /// The specification of both domains, in the cgroups that libvirt made for them.
    fn specify(&self, process: &QemuProcess, background: &QemuProcess) {
        let text = format!(
            "version = 1
[device.data]
path = '{}'
profile = 'profile.json'
[[vm]]
name = '{VM}'
cgroup = '{}'
vcpus = 1
disk = [{{ name = 'root', device = 'data', queues = 2 }}, {{ name = 'virtio-disk1', device = 'data' }}]
[[vm.task]]
name = 'control'
disk = 'root'
iops = 500
target = {{ percentile = 99.9, latency_ms = 10 }}
[[vm]]
name = '{BACKGROUND}'
cgroup = '{}'
disk = [{{ name = 'root', device = 'data' }}]
",
            self.device.display(),
            cgroup(process),
            cgroup(background),
        );
        specification::parse("spec.toml", &text).unwrap();
        std::fs::write(self.directory.join("spec.toml"), text).unwrap();
        let profile = include_str!("ref-4x250.json");
        std::fs::write(self.directory.join("profile.json"), profile).unwrap();
    }

    /// QEMU has the IOThreads and the mapping, on the CPUs, as planned.
    fn is_live(&self, planned: &VmIoThreads, process: &QemuProcess, monitor: &mut Monitor) {
        let iothreads = monitor.iothreads(ENOUGH).unwrap();
        for thread in &planned.threads {
            let name = qemu::name(thread.id);
            let live = iothreads.iter().find(|t| t.id == name).expect("the IOThread");
            let status = format!("/proc/{}/task/{}/status", process.pid, live.thread_id);
            let status = std::fs::read_to_string(status).unwrap();
            let Some(cpu) = thread.cpu else { continue };
            assert!(status.contains(&format!("Cpus_allowed_list:\t{cpu}\n")), "{status}");
        }
        assert_eq!(iothreads.len(), planned.threads.len());
        let blocks = monitor.blocks(ENOUGH).unwrap();
        let paths: Vec<_> = blocks.into_iter().filter_map(|b| b.qom_path).collect();
        for (disk, found) in planned.disks.iter().zip(&process.disks) {
            let path = paths.iter().find(|p| qemu::is_device_of(&disk.disk, p)).expect("the disk");
            let by_thread = disk.by_thread();
            let expected: serde_json::Value = by_thread
                .iter()
                .map(|(&id, vqs)| serde_json::json!({"iothread": qemu::name(id), "vqs": vqs}))
                .collect();
            assert_eq!(self.qom(path, "iothread-vq-mapping"), expected);
            assert_eq!(self.qom(path, "num-queues"), disk.queues.len());
            let names: Vec<_> = by_thread.keys().map(|&id| qemu::name(id)).collect();
            assert_eq!(found.iothreads, names);
        }
    }

    /// A property of an object of QEMU's.
    fn qom(&self, path: &str, property: &str) -> serde_json::Value {
        let arguments = serde_json::json!({"path": path, "property": property});
        let request = serde_json::json!({"execute": "qom-get", "arguments": arguments});
        let output = self.virsh(&["qemu-monitor-command", VM, &request.to_string()]);
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["return"].clone()
    }

    /// The guest does I/O at its agent's word; `watch` sees it at QEMU.
    fn guest_is_watched(&self, monitor: &mut Monitor) {
        assert!(monitor.status(ENOUGH).unwrap().running);
        let mut agent = Agent::libvirt(VM);
        let start = Instant::now();
        while let Err(error) = agent.time(ENOUGH) {
            assert!(error.hint().is_some_and(|h| h.contains("org.qemu.guest_agent.0")), "{error}");
            assert!(start.elapsed() < BOOT, "{error}");
            std::thread::sleep(Duration::from_millis(500));
        }
        let sectors = agent.read_file("/sys/block/vda/size", 4096, ENOUGH).unwrap();
        assert_eq!(String::from_utf8(sectors).unwrap(), format!("{}\n", (256 << 20) / 512));
        let pid = agent.exec("/bin/dd", &READ, ENOUGH).unwrap();
        let looks = self.run(0, &["watch", "spec.toml", "--json", "--duration", "4"]);
        let looks = looks.lines().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok());
        let looks: Vec<_> = looks.collect();
        let event = format!("{VM}: watched at QEMU");
        let events = looks[0]["events"].as_array().unwrap();
        assert!(events.iter().any(|e| *e == event), "{looks:?}");
        // Each disk is a slice of the device: QEMU's words for libvirt's slices tell where.
        let unknown = |e: &serde_json::Value| e.as_str().unwrap().contains(": not measured");
        assert!(!events.iter().any(unknown), "{looks:?}");
        let requests = looks.last().unwrap()["tasks"][0]["requests"].as_u64().unwrap();
        assert!(requests > 100, "{looks:?}");
        let root = root(monitor);
        assert!(monitor.latency_histograms(&root, ENOUGH).unwrap().read.is_none());
        let kill = agent.run("/bin/kill", &[&pid.to_string()], ENOUGH).unwrap();
        assert_eq!(kill.code, Some(0), "{kill:?}");
        let ended = |agent: &mut Agent| agent.exec_status(pid, ENOUGH).unwrap();
        while ended(&mut agent) == ExecStatus::Running {
            assert!(start.elapsed() < BOOT);
        }
        // A refusal of the agent's comes through as one.
        let error = agent.exec("/nonexistent", &[], ENOUGH).unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }
}

/// The cgroup of a domain, below the io controller's mount: the one with the domain's name.
fn cgroup(process: &QemuProcess) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap();
    // cgroups(7): hierarchy, controllers, path; v2 has no controllers.
    let line = |wanted: &str| {
        let line = text
            .lines()
            .find(|l| l.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == wanted)))?;
        line.splitn(3, ':').nth(2)
    };
    let path = line("blkio").or_else(|| line("")).unwrap();
    let name = process.name.as_deref().unwrap();
    let end = path.find(name).map(|at| path[at..].find('/').map_or(path.len(), |n| at + n));
    let end = end.unwrap_or_else(|| panic!("{path} has no {name}"));
    path[1..end].to_owned()
}

/// The QOM path of the disk `root`.
fn root(monitor: &mut Monitor) -> String {
    let name = DiskName::new("root").unwrap();
    let blocks = monitor.blocks(ENOUGH).unwrap();
    let paths = blocks.into_iter().filter_map(|b| b.qom_path);
    paths.into_iter().find(|p| qemu::is_device_of(&name, p)).unwrap()
}

/// The domains' cgroups, in each hierarchy: removed when dropped, as is what libvirt puts them in.
pub(crate) struct Cgroups;

impl Drop for Cgroups {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        let mounts = mounts.lines().filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (mount, kind) = (fields.next()?, fields.next()?);
            kind.starts_with("cgroup").then(|| Path::new(mount).join("machine"))
        });
        let its = |group: &&PathBuf| {
            let name = group.to_string_lossy();
            name.ends_with(".libvirt-qemu") && name.contains("-rtvirtio-test-")
        };
        for machine in mounts {
            for group in children(&machine).iter().filter(its) {
                for part in children(group).iter().chain([group]) {
                    let _ = std::fs::remove_dir(part);
                }
            }
            // Only if it is empty, so no other domain is in it; libvirt makes it again.
            let _ = std::fs::remove_dir(machine);
        }
    }
}

/// The directories in a directory; none if there is no such.
fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|e| e.path()).filter(|p| p.is_dir()).collect()
}
