//! One guest's QEMU process.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};

use anyhow::{Context, Result, anyhow, bail};
use rtvirtio_calibrate::confine::confine;
use rtvirtio_units::DiskName;
use serde_json::json;

use super::{Accelerator, GuestImage, Restarts};

/// Guest memory, MiB: the initramfs takes 100 and may take half of what is left, fio 100.
pub const MEMORY_MIB: u32 = 512;

/// The guest's kernel command line. Under TCG a clock other than the TSC is an exit for each look
/// at it, and mitigations guard against a processor that is not there.
pub const COMMAND_LINE: &str =
    "console=ttyS0 quiet panic=1 random.trust_cpu=on tsc=reliable clocksource=tsc mitigations=off";

/// A part of the device under test, as a disk whose name is QEMU's id for it.
#[derive(Debug, Clone)]
pub(super) struct Slice {
    pub(super) disk: DiskName,
    pub(super) offset: u64,
    pub(super) size: u64,
}

/// What a guest starts with.
#[derive(Clone)]
pub struct Start<'a> {
    /// What it boots from.
    pub image: &'a GuestImage,
    /// What runs its instructions.
    pub accelerator: Accelerator,
    /// Where its sockets and logs go.
    pub directory: &'a Path,
    /// Its own.
    pub name: &'a str,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The `cgroup.procs` to enter; none: its starter's.
    pub procs: Option<&'a Path>,
    /// What QEMU gets beside its own, such as disks.
    pub arguments: Vec<String>,
}

impl<'a> Start<'a> {
    /// One vCPU and no disk.
    pub fn new(
        image: &'a GuestImage,
        accelerator: Accelerator,
        directory: &'a Path,
        name: &'a str,
    ) -> Self {
        let (vcpus, procs, arguments) = (1, None, Vec::new());
        Self { image, accelerator, directory, name, vcpus, procs, arguments }
    }
}

/// QEMU's arguments for a virtio-blk disk for each slice of `node_under_test`.
pub(super) fn disks(
    node_under_test: &Path,
    slices: &[Slice],
    accelerator: Accelerator,
) -> Vec<String> {
    let mut disks = Vec::new();
    if accelerator == Accelerator::Kvm {
        disks.extend(["-object".to_owned(), "iothread,id=io0".to_owned()]);
    }
    for slice in slices {
        let node = format!("node-{}", slice.disk);
        let blockdev = json!({
            "driver": "raw", "node-name": node, "offset": slice.offset, "size": slice.size,
            "cache": {"direct": true},
            "file": {
                "driver": "host_device", "filename": node_under_test, "aio": "native",
                // The guests share the device, each within its slice.
                "locking": "off", "cache": {"direct": true},
            },
        });
        let mut device = json!({
            "driver": "virtio-blk-pci", "id": slice.disk, "drive": node,
            "num-queues": 1, "share-rw": true,
        });
        if accelerator == Accelerator::Kvm {
            // Under TCG an interrupt goes through the main loop: an IOThread is one more hop.
            device["iothread"] = "io0".into();
        }
        let arguments = ["-blockdev", &blockdev.to_string(), "-device", &device.to_string()];
        disks.extend(arguments.map(str::to_owned));
    }
    disks
}

/// A running QEMU; dropping it kills it.
pub struct Process {
    qemu: Mutex<Qemu>,
    name: String,
    directory: PathBuf,
}

struct Qemu {
    command: Command,
    child: Child,
    restarts: Restarts,
}

impl Process {
    /// Starts a guest.
    pub(super) fn start(start: &Start<'_>) -> Result<Self> {
        let Start { image, accelerator, directory, name, procs, .. } = *start;
        let file = |kind: &str| directory.join(format!("{name}.{kind}"));
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-name", &format!("guest={name},debug-threads=on")])
            .args(["-machine", "q35", "-accel", accelerator.name()])
            .args(["-smp", &start.vcpus.to_string()])
            .args(["-cpu", if accelerator == Accelerator::Kvm { "host" } else { "max" }])
            .args(["-m", &MEMORY_MIB.to_string()])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initramfs)
            .args(["-append", COMMAND_LINE])
            .arg("-serial")
            .arg(format!("file:{}", file("console").display()))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", file("qmp").display()))
            .arg("-chardev")
            .arg(format!("socket,id=agent,path={},server=on,wait=off", file("agent").display()))
            // Each port costs the main loop two descriptors to poll.
            .args(["-device", "virtio-serial-pci,max_ports=2"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
            .args(&start.arguments);
        File::create(file("err"))?;
        let errors = File::options().append(true).open(file("err"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        confine(&mut command, procs).with_context(|| format!("VM {name}"))?;
        let child = command.spawn().map_err(|e| {
            let missing = e.kind() == io::ErrorKind::NotFound;
            let hint = if missing { " (install it: apt-get install qemu-system-x86)" } else { "" };
            anyhow!("start qemu-system-x86_64 for {name}: {e}{hint}")
        })?;
        let restarts = Restarts::default();
        Ok(Self {
            qemu: Mutex::new(Qemu { command, child, restarts }),
            name: name.to_owned(),
            directory: directory.to_owned(),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    fn lock(&self) -> Result<MutexGuard<'_, Qemu>> {
        self.qemu.lock().map_err(|_| anyhow!("a lock is poisoned"))
    }

    pub(super) fn id(&self) -> Result<u32> {
        Ok(self.lock()?.child.id())
    }

    pub(super) fn monitor_socket(&self) -> PathBuf {
        self.directory.join(format!("{}.qmp", self.name))
    }

    pub(super) fn agent_socket(&self) -> PathBuf {
        self.directory.join(format!("{}.agent", self.name))
    }

    /// An error if QEMU has ended.
    pub(super) fn check(&self) -> Result<()> {
        match self.lock()?.child.try_wait()? {
            None => Ok(()),
            Some(status) => {
                bail!("QEMU of {} ended ({status}): {}", self.name, self.complaints().trim())
            }
        }
    }

    /// The same while the guest boots, when some deaths are QEMU's own: then it boots anew.
    pub(super) fn check_boot(&self) -> Result<()> {
        let Err(error) = self.check() else { return Ok(()) };
        let mut qemu = self.lock()?;
        if !qemu.restarts.may(&self.name, &self.complaints()) {
            return Err(error);
        }
        File::create(self.complaints_file())?;
        qemu.child = qemu.command.spawn()?;
        Ok(())
    }

    fn complaints_file(&self) -> PathBuf {
        self.directory.join(format!("{}.err", self.name))
    }

    /// What QEMU said on standard error.
    fn complaints(&self) -> String {
        std::fs::read_to_string(self.complaints_file()).unwrap_or_default()
    }

    /// The end of what the guest's kernel said.
    pub(super) fn console(&self) -> String {
        let path = self.directory.join(format!("{}.console", self.name));
        let text = std::fs::read(&path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[text.len().saturating_sub(400)..]).into_owned();
        if text.trim().is_empty() {
            "its console is silent".to_owned()
        } else {
            format!("its console ends with: {}", text.trim())
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(Qemu { child, .. }) = self.qemu.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
