//! A real systemd, on cgroup v2 with bfq, in a guest: VMs' scopes, the unit for the boot, and the
//! data plane's units.

mod data_plane;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::{Agent, Output};
use rtvirtio_spec::plan::{IoThreads, PLAN_VERSION, Plan, PlannedDevice, PlannedVm};
use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::settings::{
    Bfq, DeviceSettings, Knob, Knobs, Limit, Limits, Scheduler, Settings, VmSettings, diff,
};
use rtvirtio_units::{Bytes, BytesPerSecond, DeviceName, VmName, Weight};

use crate::in_guest::leaves_guests;
use crate::scratch_disk::{built, rtvirtio, said};

/// Under TCG; systemd and the agent are there after 5 s on an idle machine.
const BOOT: Duration = Duration::from_secs(90);
const COMMAND: Duration = Duration::from_secs(60);
const DISK_SIZE: u64 = 1 << 30;
/// `/dev/vda` and `/dev/vdb`.
const DISK: &str = "254:0";
const OTHER_DISK: &str = "254:16";
/// As libvirt names a VM's scope: backslashes, and the number of the start.
const PLC: &str = r"machine-qemu\x2d1\x2dplc.scope";
const PLC_AGAIN: &str = r"machine-qemu\x2d2\x2dplc.scope";
const BACKUP: &str = "backup.scope";

/// A guest with systemd; killed when dropped.
struct Guest {
    qemu: Child,
    agent: Agent,
    directory: tempfile::TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Guest {
    /// Boots with `files` beside the binary; `None` where it cannot, with the reason by name.
    fn boot(test: &str, files: &[(&str, Vec<u8>)]) -> Option<Self> {
        if leaves_guests(test) {
            return None;
        }
        let skip = |why: &str| {
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
            None
        };
        let image = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("guest");
        let archives = [image.join("initramfs"), image.join("systemd")];
        if let Some(missing) = archives.iter().find(|a| !a.is_file()) {
            return skip(&format!("{} is not there (make guest)", missing.display()));
        }
        for program in ["qemu-system-x86_64", "setpriv", "strip"] {
            if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
                return skip(&format!("needs {program}"));
            }
        }
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let stripped = |name: &'static str| {
            let strip = Command::new("strip").arg("-o").arg(path(name)).arg(built(name)).status();
            assert!(strip.unwrap().success());
            std::fs::read(path(name)).unwrap()
        };
        let binaries = [
            ("usr/bin/rtvirtio", stripped("rtvirtio")),
            ("usr/bin/rtvirtio-lab", stripped("rtvirtio-lab")),
        ];
        let mut initrd = archives.map(|a| std::fs::read(a).unwrap()).concat();
        append_archive(&mut initrd, &[&binaries, files].concat());
        std::fs::write(path("initrd"), initrd).unwrap();

        // Killed with its starter, whatever becomes of it.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-machine", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "768"])
            .arg("-kernel")
            .arg(image.join("kernel"))
            .arg("-initrd")
            .arg(path("initrd"))
            .args([
                "-append",
                "console=ttyS0 quiet panic=1 random.trust_cpu=on mitigations=off \
                    tsc=reliable clocksource=tsc rdinit=/init-systemd systemd.log_target=console",
            ])
            .arg("-serial")
            .arg(format!("file:{}", path("console").display()))
            .arg("-chardev")
            .arg(format!("socket,id=agent,path={},server=on,wait=off", path("agent").display()))
            .args(["-device", "virtio-serial-pci,max_ports=2"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"]);
        for serial in ["first", "second"] {
            let node = format!("driver=null-co,node-name={serial},size={DISK_SIZE},read-zeroes=on");
            let device = format!("virtio-blk-pci,drive={serial},serial={serial},num-queues=1");
            command.args(["-blockdev", &node, "-device", &device]);
        }
        let mut qemu = command.stdin(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        let agent = loop {
            // QEMU accepts before the guest has booted: the answer counts.
            match Agent::connect(path("agent"), Duration::from_secs(2)) {
                Ok(agent) => break agent,
                Err(error) if start.elapsed() > BOOT || qemu.try_wait().unwrap().is_some() => {
                    let _ = qemu.kill();
                    let console = std::fs::read(path("console")).unwrap_or_default();
                    panic!("no boot: {error}\n{}", String::from_utf8_lossy(&console));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        };
        Some(Self { qemu, agent, directory })
    }

    /// The end of what its kernel and systemd said.
    fn console(&self) -> String {
        let text = std::fs::read(self.directory.path().join("console")).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]).into_owned()
    }

    fn run(&mut self, script: &str) -> Output {
        let script = format!("export PATH=/bin:/usr/bin:/usr/sbin; {script}");
        self.agent.run("/bin/sh", &["-c", &script], COMMAND).unwrap()
    }

    /// What the script prints, once it has ended with `code`.
    fn expect(&mut self, code: i64, script: &str) -> String {
        let output = self.run(script);
        let said = [output.stdout, output.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
        assert_eq!(output.code, Some(code), "{script}: {}", said.concat());
        said.concat()
    }

    /// Starts a scope in `machine.slice` that reads the disk now and then.
    fn start_vm(&mut self, scope: &str, properties: &str) {
        let io =
            "while :; do dd if=/dev/vda of=/dev/null bs=64k count=4 iflag=direct; sleep 0.5; done";
        self.expect(
            0,
            &format!(
                "systemd-run --scope --slice=machine.slice --unit='{scope}' {properties} \
                 sh -c '{io}' >/dev/null 2>&1 </dev/null &
                 for try in $(seq 50); do
                     grep -q '^{DISK} ' '/sys/fs/cgroup/machine.slice/{scope}/io.stat' && exit 0
                     sleep 0.2
                 done; exit 1"
            ),
        );
    }

    /// The lines about the disk: what the kernel shows and what the unit says.
    fn knobs(&mut self, scope: &str) -> Vec<String> {
        let text = self.expect(
            0,
            &format!(
                "cd '/sys/fs/cgroup/machine.slice/{scope}'; cat io.bfq.weight io.max; \
                 systemctl show '{scope}' -p IODeviceWeight -p IOReadBandwidthMax \
                 -p IOWriteBandwidthMax -p IOReadIOPSMax -p IOWriteIOPSMax"
            ),
        );
        let about = |l: &&str| {
            l.starts_with(&format!("{DISK} "))
                || l.contains("/vda")
                || l.contains(&format!("/{DISK}"))
        };
        text.lines().filter(about).map(str::to_owned).collect()
    }
}

/// Appends an archive of regular files in the format "newc"
/// (kernel `Documentation/driver-api/early-userspace/buffer-format.rst`).
fn append_archive(to: &mut Vec<u8>, files: &[(&str, Vec<u8>)]) {
    let pad = |to: &mut Vec<u8>| to.resize(to.len().next_multiple_of(4), 0);
    for (name, data) in files.iter().chain([&("TRAILER!!!", Vec::new())]) {
        let (executable, regular) = (0o755, 0o100_000);
        pad(to);
        let fields =
            [0, regular | executable, 0, 0, 1, 0, data.len(), 0, 0, 0, 0, name.len() + 1, 0];
        to.extend(b"070701");
        fields.iter().for_each(|f| to.extend(format!("{f:08X}").bytes()));
        to.extend(name.bytes().chain([0]));
        pad(to);
        to.extend(data);
    }
    pad(to);
}

fn device() -> DeviceName {
    DeviceName::new("data").unwrap()
}

fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

/// bfq without idling; plc weighs 700, backup 37 with caps; `late` is a VM that never runs.
fn plan(with_late: bool) -> Plan {
    let settings = |weight, limits| VmSettings { weight: Weight::new(weight).unwrap(), limits };
    let capped = Limits {
        write_bps: Some(BytesPerSecond::new(5_000_001)),
        read_iops: Some(333),
        ..Limits::default()
    };
    let mut vms = vec![
        ("plc", PLC, settings(700, Limits::default())),
        ("backup", BACKUP, settings(37, capped)),
    ];
    if with_late {
        vms.push(("late", "late.scope", settings(500, Limits::default())));
    }
    let scheduler = Scheduler::Bfq(Bfq { slice_idle_us: 0, low_latency: false, ..Bfq::DEFAULT });
    let of_vms = vms.iter().map(|(name, _, settings)| (vm(name), *settings)).collect();
    let settings = Settings([(device(), DeviceSettings { scheduler, vms: of_vms })].into());
    // As the guest comes up: no scheduler, no limit but backup's own.
    let mut observed = Knobs::from([(Knob::Scheduler { device: device() }, "none".to_owned())]);
    for (name, ..) in &vms {
        for limit in [Limit::ReadBps, Limit::WriteBps, Limit::ReadIops, Limit::WriteIops] {
            let own = (*name, limit) == ("backup", Limit::ReadIops);
            let text = if own { "900" } else { "max" };
            observed.insert(Knob::Limit { device: device(), vm: vm(name), limit }, text.to_owned());
        }
    }
    let identity = DeviceIdentity {
        kind: "vd".to_owned(),
        model: "vd".to_owned(),
        serial: Some("first".to_owned()),
        size: Bytes::new(DISK_SIZE),
        rotational: true,
    };
    let path = PathBuf::from("/dev/vda");
    Plan {
        version: PLAN_VERSION,
        devices: vec![PlannedDevice { name: device(), path, identity }],
        vms: vms
            .iter()
            .map(|(name, scope, _)| PlannedVm {
                name: vm(name),
                cgroup: Path::new("machine.slice").join(scope),
            })
            .collect(),
        changes: diff(&observed, &settings.knobs()),
        settings,
        observed,
        guests: rtvirtio_spec::guests::Guests::default(),
        data_plane: None,
        tasks: Vec::new(),
        background: Vec::new(),
        cost: Vec::new(),
        iothreads: IoThreads::default(),
        reasons: Vec::new(),
    }
}

/// What [`plan`] makes of plc and backup. 6700 is 100 + (700 − 100) · 11.
fn planned_plc() -> Vec<String> {
    [format!("{DISK} 700"), format!("IODeviceWeight=/dev/block/{DISK} 6700")].to_vec()
}

fn planned_backup() -> Vec<String> {
    [
        format!("{DISK} 37"),
        format!("{DISK} rbps=max wbps=5000001 riops=333 wiops=max"),
        // The path by which the unit names the disk already.
        "IODeviceWeight=/dev/vda 37".to_owned(),
        "IOReadIOPSMax=/dev/vda 333".to_owned(),
        "IOWriteBandwidthMax=/dev/vda 5000001".to_owned(),
    ]
    .to_vec()
}

fn sorted(mut lines: Vec<String>) -> Vec<String> {
    lines.sort();
    lines
}

#[test]
fn systemd_keeps_what_is_applied_and_gives_back_what_was_there() {
    let test = "systemd_keeps_what_is_applied_and_gives_back_what_was_there";
    let files = [("plan.json", false), ("boot.json", true)]
        .map(|(name, late)| (name, serde_json::to_vec(&plan(late)).unwrap()));
    let Some(mut guest) = Guest::boot(test, &files) else { return };

    // As libvirt makes a VM's scope, and one with a limit of its own, which weighs on another disk.
    guest.expect(0, "echo bfq >/sys/block/vdb/queue/scheduler");
    guest.start_vm(PLC, "-p Delegate=yes");
    guest.start_vm(BACKUP, "-p IOReadIOPSMax='/dev/vda 900' -p IODeviceWeight='/dev/vdb 50'");
    // Another disk's weight, and the default, written by hand past systemd.
    let [weights, of_backup] =
        [PLC, BACKUP].map(|scope| format!("/sys/fs/cgroup/machine.slice/{scope}/io.bfq.weight"));
    guest.expect(
        0,
        &format!(
            "echo default 90 >'{weights}'; echo '{OTHER_DISK} 250' >'{weights}'; \
             echo default 80 >{of_backup}; echo '{OTHER_DISK} 50' >{of_backup}"
        ),
    );
    let before = [PLC, BACKUP].map(|scope| guest.knobs(scope));

    guest.expect(2, "rtvirtio verify /plan.json");
    guest.expect(0, "rtvirtio apply /plan.json");
    let by_hand = guest.expect(0, &format!("sort '{weights}'"));
    let kept = format!("{DISK} 700\n{OTHER_DISK} 250\ndefault 90\n");
    assert_eq!(by_hand, kept, "what was written by hand stays");
    let both = guest.expect(0, &format!("sort {of_backup}"));
    let kept = format!("{DISK} 37\n{OTHER_DISK} 50\ndefault 80\n");
    assert_eq!(both, kept, "and so does what systemd sets itself");

    // systemd writes all of a unit's knobs again; another property of it changes as well.
    guest.expect(0, "systemctl daemon-reload");
    guest.expect(0, &format!("systemctl set-property --runtime '{PLC}' IOWeight=200"));
    guest.expect(
        0,
        &format!("systemctl set-property --runtime {BACKUP} IOWriteIOPSMax='/dev/vdb 77'"),
    );
    let by_systemd = guest.expect(0, &format!("sort '{weights}'"));
    assert_eq!(by_systemd, format!("{DISK} 700\ndefault 109\n"), "systemd takes back the rest");
    assert_eq!(sorted(guest.knobs(PLC)), sorted(planned_plc()));
    assert_eq!(sorted(guest.knobs(BACKUP)), sorted(planned_backup()));
    let verified = guest.expect(0, "rtvirtio verify /plan.json");
    let own = format!("IODeviceWeight=/dev/block/{DISK}");
    assert!(!verified.contains(&own), "rtvirtio is no other writer: {verified}");

    guest.expect(0, "rtvirtio rollback");
    assert_eq!([PLC, BACKUP].map(|scope| guest.knobs(scope)), before);
    let other = guest.expect(0, &format!("systemctl show {BACKUP} -p IOWriteIOPSMax --value"));
    assert_eq!(other, "/dev/vdb 77\n", "another disk's limit is not rtvirtio's");
    assert_eq!(guest.expect(0, &format!("sort '{weights}'")), "default 109\n");
    let of_others = guest.expect(0, &format!("sort {of_backup}"));
    assert_eq!(of_others, format!("{OTHER_DISK} 50\ndefault 100\n"), "since the apply");
    guest.expect(0, "systemctl daemon-reload");
    assert_eq!([PLC, BACKUP].map(|scope| guest.knobs(scope)), before);

    // The next start of plc has another number; `late` has never been started.
    guest.expect(0, &format!("systemctl stop '{PLC}'"));
    guest.start_vm(PLC_AGAIN, "-p Delegate=yes");
    guest.expect(0, "rtvirtio boot /boot.json");
    assert_eq!(guest.expect(0, "systemctl is-enabled rtvirtio"), "enabled\n");
    assert!(!guest.knobs(PLC_AGAIN).contains(&format!("{DISK} 700")), "nothing is applied yet");
    guest.expect(0, "systemctl start rtvirtio");
    assert_eq!(guest.expect(0, "systemctl is-active rtvirtio"), "active\n");
    assert_eq!(sorted(guest.knobs(PLC_AGAIN)), sorted(planned_plc()));
    assert_eq!(sorted(guest.knobs(BACKUP)), sorted(planned_backup()));
    let again = guest.expect(0, "rtvirtio apply /etc/rtvirtio/plan.json --reapply");
    assert!(again.contains("VM late does not run") && again.contains("0 knobs"), "{again}");

    guest.expect(0, "rtvirtio rollback");
    guest.expect(0, "rtvirtio boot --remove");
    guest.expect(0, "! systemctl is-enabled rtvirtio && ! ls -d /etc/rtvirtio");
    let left = guest.expect(0, "find /etc/systemd/system /run/rtvirtio-host -name '*rtvirtio*.*'");
    assert_eq!(left, "");
    assert!(guest.expect(0, "rtvirtio boot --remove").contains("nothing to remove"));
}

#[test]
fn boot_without_systemd_is_refused() {
    if Path::new("/run/systemd/system").exists() {
        let why = "SKIPPED boot_without_systemd_is_refused: systemd runs here";
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("plan.json");
    std::fs::write(&file, serde_json::to_vec(&plan(false)).unwrap()).unwrap();
    for arguments in [&["boot", file.to_str().unwrap()][..], &["boot", "--remove"]] {
        let output = rtvirtio(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("--reapply"), "{}", said(&output));
        assert!(!Path::new("/etc/rtvirtio").exists());
    }
}
