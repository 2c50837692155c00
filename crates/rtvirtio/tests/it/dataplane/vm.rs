//! A QEMU guest with its disk on the data plane.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_host::qemu::Agent;
use rtvirtio_testbed::guests::Restarts;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::qmp::Qmp;
use super::server::Server;
use crate::in_guest::{Said, image, image_directory};
use crate::scratch_disk::alone;

/// A boot takes 4 s of an idle core.
const BOOT: Duration = Duration::from_secs(120);
/// For one question to the agent.
const ENOUGH: Duration = Duration::from_secs(30);
const COMMAND_LINE: &str =
    "console=ttyS0 quiet panic=1 random.trust_cpu=on tsc=reliable clocksource=tsc mitigations=off";

/// Whether guests can run here, one test at a time; if not, says so by name.
pub(crate) fn can_run(test: &str) -> Option<MutexGuard<'static, ()>> {
    image(test)?;
    has_io_uring().then(alone)
}

/// The shell in a guest, through its agent.
pub(crate) struct Shell {
    agent: Agent,
}

impl Shell {
    /// Once the agent answers; none if `goes_on` says in the meantime that it never will.
    pub(crate) fn connect(
        agent: impl Fn() -> Option<Agent>,
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<Self> {
        let start = Instant::now();
        loop {
            if let Some(agent) = agent() {
                return Some(Self { agent });
            }
            if !goes_on() {
                return None;
            }
            assert!(start.elapsed() < BOOT, "the guest does not boot");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a script as root.
    #[track_caller]
    pub(crate) fn run(&mut self, script: &str, timeout: Duration) -> Said {
        let output = self.agent.run("/bin/sh", &["-c", script], timeout);
        let output = output.unwrap_or_else(|e| panic!("{script}: {e}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { code: output.code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// What a script prints that succeeds.
    #[track_caller]
    pub(crate) fn expect(&mut self, script: &str) -> String {
        let Said { code, stdout, stderr } = self.run(script, Duration::from_secs(120));
        assert_eq!(code, Some(0), "{script}\n{stdout}\n{stderr}");
        stdout
    }

    /// A file's content; none if it is not there.
    pub(crate) fn read(&mut self, path: &str) -> Option<String> {
        let bytes = self.agent.read_file(path, 4 << 20, ENOUGH).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn write(&mut self, path: &str, text: &str) {
        self.agent.write_file(path, text, ENOUGH).unwrap();
    }

    /// Requests of the disk that have ended: reads, writes, discards, flushes
    /// (`Documentation/block/stat.rst`).
    #[track_caller]
    pub(crate) fn completed(&mut self) -> u64 {
        let text = self.read("/sys/block/vda/stat").expect("the guest has the disk");
        let fields: Vec<u64> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
        [0, 4, 11, 15].map(|field| fields[field]).iter().sum()
    }

    /// Requests of the disk that have not ended (`Documentation/ABI/stable/sysfs-block`).
    pub(crate) fn in_flight(&mut self) -> u64 {
        let text = self.read("/sys/block/vda/inflight").expect("the guest has the disk");
        text.split_whitespace().map(|n| n.parse::<u64>().unwrap()).sum()
    }
}

/// What the front end asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Disk {
    pub(crate) packed: bool,
    pub(crate) queue_size: u16,
}

impl Default for Disk {
    fn default() -> Self {
        // QEMU's own.
        Self { packed: false, queue_size: 128 }
    }
}

/// Whose process QEMU is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner {
    /// A user, and a group, of no account.
    pub(crate) id: u32,
    /// The group that may connect to the server.
    pub(crate) group: u32,
}

/// QEMU's process; killed when dropped.
struct Process {
    child: Child,
    /// Its sockets and logs.
    directory: TempDir,
}

/// A running guest with 4 vCPUs.
pub(crate) struct Vm {
    process: Process,
    pub(crate) qmp: Qmp,
    socket: PathBuf,
    disk: Disk,
    owner: Option<Owner>,
    shell: Option<Shell>,
    restarts: Restarts,
}

impl Vm {
    /// Starts QEMU and waits until the guest's agent answers.
    #[track_caller]
    pub(crate) fn boot(server: &Server, disk: Disk) -> Self {
        Self::boot_as(None, server, disk)
    }

    /// The same as another user; root starts it.
    #[track_caller]
    pub(crate) fn boot_as(owner: Option<Owner>, server: &Server, disk: Disk) -> Self {
        let mut vm = Self::launch(&server.socket(), disk, owner, &[]);
        vm.wait_for_boot();
        vm
    }

    /// Starts QEMU to receive a guest; where from is told later.
    pub(crate) fn receive(server: &Server, disk: Disk) -> Self {
        Self::launch(&server.socket(), disk, None, &["-incoming", "defer"])
    }

    fn launch(socket: &Path, disk: Disk, owner: Option<Owner>, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name).display().to_string();
        let mut image = image_directory();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(Owner { id, group }) = owner {
            command.args([format!("--reuid={id}"), format!("--regid={id}")]);
            command.arg(format!("--groups={group}"));
            // Where the image was made may be closed to others.
            for name in ["kernel", "initramfs"] {
                std::fs::copy(image.join(name), file(name)).unwrap();
            }
            image = directory.path().to_owned();
            std::os::unix::fs::chown(&image, Some(id), Some(id)).unwrap();
        }
        // With a thread for each vCPU, QEMU 10's TCG uses freed memory regions or loses a vCPU's timer now
        // and then, more often the less time the machine has.
        command
            .arg("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", "tcg,thread=single"])
            .args(["-machine", "q35,memory-backend=memory", "-cpu", "max", "-smp", "4"])
            .args(["-m", "512"])
            .args(["-object", "memory-backend-memfd,id=memory,size=512M,share=on"])
            .arg("-kernel")
            .arg(image.join("kernel"))
            .arg("-initrd")
            .arg(image.join("initramfs"))
            .args(["-append", COMMAND_LINE])
            .args(["-serial", &format!("file:{}", file("console"))])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", file("qmp"))])
            .args([
                "-chardev",
                &format!("socket,id=agent,path={},server=on,wait=off", file("agent")),
            ])
            .args(["-device", "virtio-serial-pci,max_ports=2"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
            // Only a port takes a device that comes later.
            .args(["-device", "pcie-root-port,id=bay,chassis=1"])
            .args([
                "-chardev",
                &format!("socket,id=server0,path={},reconnect-ms=20", socket.display()),
            ])
            .args(["-device", &device(disk, 0).to_string()])
            .args(arguments);
        let errors = std::fs::File::create(file("err")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn();
        let child = child.unwrap();
        let process = Process { child, directory };
        let qmp = Qmp::connect(&process.directory.path().join("qmp"));
        Self {
            process,
            qmp,
            socket: socket.to_owned(),
            disk,
            owner,
            shell: None,
            restarts: Restarts::default(),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.child.id()
    }

    pub(crate) fn directory(&self) -> &Path {
        self.process.directory.path()
    }

    /// The end of what the guest's kernel and QEMU said.
    pub(crate) fn said(&self) -> String {
        self.process.said()
    }

    /// Its shell; waits until the guest can be asked.
    #[track_caller]
    pub(crate) fn shell(&mut self) -> &mut Shell {
        assert!(self.connect(), "QEMU ended: {}", self.said());
        self.shell.as_mut().unwrap()
    }

    /// Waits for the agent; whether it answers, or QEMU has ended or failed.
    fn connect(&mut self) -> bool {
        if self.shell.is_none() {
            let (path, console) =
                (self.directory().join("agent"), self.directory().join("console"));
            let child = &mut self.process.child;
            let runs = || {
                let text = std::fs::read(&console).unwrap_or_default();
                let stuck = String::from_utf8_lossy(&text).contains(Restarts::TIMER_LOST);
                !stuck && child.try_wait().unwrap().is_none()
            };
            let agent = || Agent::connect(&path, Duration::from_secs(2)).ok();
            self.shell = Shell::connect(agent, runs);
        }
        self.shell.is_some()
    }

    /// Waits until the guest has booted; starts it anew if QEMU died of its own fault.
    #[track_caller]
    fn wait_for_boot(&mut self) {
        while !self.connect() {
            let said = self.said();
            assert!(self.restarts.may("test", &said), "QEMU ended: {said}");
            let Self { process, qmp, .. } = Self::launch(&self.socket, self.disk, self.owner, &[]);
            (self.process, self.qmp) = (process, qmp);
        }
    }

    /// Resets the machine; returns when its next boot is done.
    #[track_caller]
    pub(crate) fn reset(&mut self) {
        // A boot's own number tells the next from this one, whose agent may still answer.
        let boot = |vm: &mut Self| {
            vm.wait_for_boot();
            vm.shell().read("/proc/sys/kernel/random/boot_id")
        };
        let before = boot(self).unwrap();
        self.shell = None;
        self.qmp.run("system_reset", json!({}));
        let start = Instant::now();
        while boot(self).is_none_or(|now| now == before) {
            self.shell = None;
            assert!(start.elapsed() < BOOT, "no boot after a reset");
        }
    }

    /// Takes the disk out; returns when the guest has let go of it.
    #[track_caller]
    pub(crate) fn unplug(&mut self) {
        self.qmp.run("device_del", json!({"id": "disk"}));
        assert!(self.qmp.event("DEVICE_DELETED", Duration::from_secs(60)), "{}", self.said());
    }

    /// Gives it to the guest again, by the connection of number `old` or, if another is
    /// given, a new one.
    #[track_caller]
    pub(crate) fn plug(&mut self, old: u32, new: u32) {
        if new != old {
            self.qmp.run("chardev-remove", json!({"id": format!("server{old}")}));
            let address = json!({"type": "unix", "data": {"path": self.socket}});
            let backend = json!({"addr": address, "server": false, "reconnect-ms": 20});
            let backend = json!({"type": "socket", "data": backend});
            self.qmp.run("chardev-add", json!({"id": format!("server{new}"), "backend": backend}));
        }
        let device = device(self.disk, new);
        self.qmp.run("device_add", device);
        self.shell().expect(
            "for i in $(seq 100); do [ -b /dev/vda ] && exit 0; usleep 100000; done; exit 1",
        );
    }
}

/// The disk, by the connection of this number.
fn device(disk: Disk, connection: u32) -> Value {
    json!({
        "driver": "vhost-user-blk-pci", "id": "disk", "bus": "bay",
        "chardev": format!("server{connection}"),
        "num-queues": Server::QUEUES, "queue-size": disk.queue_size, "packed": disk.packed,
    })
}

impl Process {
    /// The end of what the guest's kernel and QEMU said.
    fn said(&self) -> String {
        let mut all = String::new();
        for file in ["console", "err"] {
            let text = std::fs::read(self.directory.path().join(file)).unwrap_or_default();
            let text = &text[text.len().saturating_sub(2000)..];
            all += &format!("{file}: {}\n", String::from_utf8_lossy(text).trim());
        }
        all
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
    }
}
