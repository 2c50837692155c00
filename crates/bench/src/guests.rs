//! Guests: real virtual machines, booted once, whose tasks the guest agent starts.
//!
//! A *guest* is a QEMU process in its VM's cgroup, with a kernel and an
//! initramfs made of Debian packages (`scripts/guest`) and one virtio-blk disk
//! for each of the VM's tasks. A disk is a slice of the device under test, so
//! that the host's scheduler sees one device and its cgroups.
//!
//! The accelerator is KVM where a probe boot succeeds, TCG elsewhere: a
//! `/dev/kvm` that opens may still not run a guest. Under TCG a request costs
//! so much CPU that four loaded guests cannot issue the paper's rates on a small
//! machine; [`Scale`] is the one factor that makes them fit.
//!
//! Guests die with their starter (`PR_SET_PDEATHSIG`), and with their cgroup.

mod process;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rtvirtio_cases::{IoPriority, Scale};
use rtvirtio_host::qemu::{Agent, ExecStatus, Monitor};
use rtvirtio_spec::specification::{Disk, Specification};
use rtvirtio_units::{Bytes, DiskName, VmName};

use crate::load::{Interrupted, wait};
pub(crate) use process::Equipment;
use process::Process;

/// How long a boot may take: 3 s for one guest under TCG, and five share two cores.
const BOOT: Duration = Duration::from_secs(90);
/// How long a probe boot under KVM may take.
const PROBE_BOOT: Duration = Duration::from_secs(10);
/// How long the agent may take for one command that does not wait for a task.
const COMMAND: Duration = Duration::from_secs(10);
/// The most that is read of one of fio's files.
const LARGEST_FILE: usize = 8 << 20;

/// What guests boot from.
#[derive(Debug, Clone)]
pub struct GuestImage {
    kernel: PathBuf,
    initramfs: PathBuf,
}

impl GuestImage {
    /// The image that `scripts/guest` wrote to `directory`.
    ///
    /// # Errors
    /// If it is not there, with the remedy.
    pub fn find(directory: &Path) -> Result<Self> {
        let image =
            Self { kernel: directory.join("kernel"), initramfs: directory.join("initramfs") };
        for file in [&image.kernel, &image.initramfs] {
            ensure!(
                file.is_file(),
                "{} is not there (make it with scripts/guest {}, or run without guests: --guests \
                 cgroup)",
                file.display(),
                directory.display()
            );
        }
        Ok(image)
    }
}

/// What runs a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accelerator {
    /// KVM if a guest boots under it, else TCG.
    ///
    /// # Errors
    /// If QEMU cannot be started at all.
    pub fn probe(image: &GuestImage, interrupted: &Interrupted) -> Result<Self> {
        if !Path::new("/dev/kvm").exists() {
            return Ok(Self::Tcg);
        }
        let directory = tempfile::tempdir()?;
        let none = Equipment { vcpus: 1, disks: Vec::new() };
        let guest = Process::start(image, Self::Kvm, directory.path(), "probe", &none, None)?;
        match guest.agent(Instant::now() + PROBE_BOOT, interrupted) {
            Ok(_) => Ok(Self::Kvm),
            Err(error) if error.is::<crate::InterruptedError>() => Err(error),
            Err(_) => Ok(Self::Tcg),
        }
    }

    /// Its name for `-accel` and for reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    /// What it can carry.
    #[must_use]
    pub const fn scale(self) -> Scale {
        match self {
            Self::Kvm => Scale::ONE,
            Self::Tcg => Scale::new(TCG_SCALE),
        }
    }
}

/// Under TCG, fixed before the first comparison.
const TCG_SCALE: u32 = 4;

/// What guests are given of the host.
pub struct Place<'a> {
    /// The device under test.
    pub device: &'a Path,
    /// Its size.
    pub size: Bytes,
    /// Where the VMs' cgroups are.
    pub cgroup_mount: &'a Path,
    /// Where sockets and logs go.
    pub directory: &'a Path,
}

/// Running guests, one for each VM.
pub struct Guests {
    guests: BTreeMap<VmName, Guest>,
    accelerator: Accelerator,
}

/// One running guest.
pub(crate) struct Guest {
    // The agent first: its socket closes before QEMU goes.
    agent: Mutex<Agent>,
    process: Process,
    /// Node of each disk within the guest.
    disks: BTreeMap<DiskName, String>,
}

impl Guests {
    /// Boots a guest for each of the specification's VMs, all at once. The device is divided among
    /// all their disks.
    ///
    /// # Errors
    /// If QEMU fails or a guest's agent does not answer in time; all are gone then.
    pub fn boot(
        image: &GuestImage,
        accelerator: Accelerator,
        specification: &Specification,
        place: &Place<'_>,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let disks: usize = specification.vms.iter().map(|vm| vm.disks.len()).sum();
        // Whole MiB, so that slices are aligned for direct I/O.
        let slice = ((place.size.get() / disks.max(1) as u64) >> 20) << 20;
        ensure!(slice > 0, "{} is too small for {disks} disks", place.size);
        let mut offset = 0;
        let mut started = Vec::new();
        for vm in &specification.vms {
            let mut slices = Vec::new();
            let mut nodes = BTreeMap::new();
            for (disk, letter) in vm.disks.iter().zip('a'..='z') {
                slices.push(process::Slice {
                    name: disk.name.as_str(),
                    device: place.device,
                    offset,
                    size: slice,
                });
                nodes.insert(disk.name.clone(), format!("/dev/vd{letter}"));
                offset += slice;
            }
            let name = vm.name.as_str();
            let procs = place.cgroup_mount.join(&vm.cgroup).join("cgroup.procs");
            let directory = place.directory;
            let equipment = Equipment::slices(&slices, accelerator);
            let process =
                Process::start(image, accelerator, directory, name, &equipment, Some(&procs))?;
            started.push((vm.name.clone(), process, nodes));
        }
        let deadline = Instant::now() + BOOT;
        let mut guests = BTreeMap::new();
        for (name, process, disks) in started {
            let agent = process.agent(deadline, interrupted)?;
            guests.insert(name, Guest { agent: Mutex::new(agent), process, disks });
        }
        Ok(Self { guests, accelerator })
    }

    /// What runs them.
    #[must_use]
    pub const fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    pub(crate) fn guest(&self, vm: &VmName) -> Result<&Guest> {
        self.guests.get(vm).with_context(|| format!("there is no guest for VM {vm}"))
    }
}

/// One disk for each task, so that a task is recognised by its disk; a VM that declares none keeps
/// what it has.
#[must_use]
pub fn with_own_disks(mut specification: Specification) -> Specification {
    for vm in &mut specification.vms {
        let Some(first) = vm.disks.first().cloned() else { continue };
        if vm.tasks.is_empty() {
            continue;
        }
        vm.disks.clear();
        for task in &mut vm.tasks {
            let Ok(name) = DiskName::new(task.name.as_str()) else { continue };
            vm.disks.push(Disk { name: name.clone(), ..first.clone() });
            task.disk = name;
        }
    }
    specification
}

impl Guest {
    /// Boots one guest, in this process's cgroup.
    pub(crate) fn boot(
        image: &GuestImage,
        accelerator: Accelerator,
        directory: &Path,
        equipment: &Equipment,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let process = Process::start(image, accelerator, directory, "guest", equipment, None)?;
        let agent = process.agent(Instant::now() + BOOT, interrupted)?;
        Ok(Self { agent: Mutex::new(agent), process, disks: BTreeMap::new() })
    }

    /// QEMU's process id.
    pub(crate) fn process_id(&self) -> Result<u32> {
        self.process.id()
    }

    /// QEMU's monitor.
    pub(crate) fn monitor(&self) -> Result<Monitor> {
        Ok(Monitor::connect(self.process.monitor_socket(), COMMAND)?)
    }

    fn with_agent<T, E>(&self, f: impl FnOnce(&mut Agent) -> Result<T, E>) -> Result<T>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let mut agent = self.agent.lock().map_err(|_| anyhow!("the agent's lock is poisoned"))?;
        Ok(f(&mut agent)?)
    }

    /// The node of a disk within the guest, such as `/dev/vda`.
    pub(crate) fn node(&self, disk: &DiskName) -> Result<&str> {
        self.disks.get(disk).map(String::as_str).with_context(|| format!("no disk {disk}"))
    }

    /// Starts a program; returns its process id within the guest.
    pub(crate) fn spawn(&self, program: &str, arguments: &[&str]) -> Result<i64> {
        self.with_agent(|agent| agent.exec(program, arguments, COMMAND))
    }

    /// How a program ended; `None` while it runs.
    pub(crate) fn ended(&self, pid: i64) -> Result<Option<i64>> {
        match self.with_agent(|agent| agent.exec_status(pid, COMMAND))? {
            ExecStatus::Running => Ok(None),
            ExecStatus::Exited { code, .. } => Ok(Some(code.unwrap_or(-1))),
        }
    }

    /// Writes a file of the guest.
    pub(crate) fn write(&self, path: &str, text: &str) -> Result<()> {
        self.with_agent(|agent| agent.write_file(path, text, COMMAND))
    }

    /// Copies a file of the guest to `target`.
    pub(crate) fn fetch(&self, path: &str, target: &Path) -> Result<()> {
        let bytes = self
            .with_agent(|agent| agent.read_file(path, LARGEST_FILE, COMMAND))
            .with_context(|| format!("read {path} in the guest"))?;
        Ok(std::fs::write(target, bytes)?)
    }

    /// Sets the I/O priority of all of QEMU's threads (`ioprio_set(2)`), or none.
    pub(crate) fn set_io_priority(&self, priority: Option<&IoPriority>) -> Result<()> {
        // Class 0 is none: the default by the thread's nice value.
        let value = priority.map_or(0, |p| i64::from(p.class()) << 13 | i64::from(p.level()));
        for entry in std::fs::read_dir(format!("/proc/{}/task", self.process.id()?))? {
            let thread: i64 = entry?.file_name().to_string_lossy().parse()?;
            const WHO_PROCESS: i64 = 1;
            // SAFETY: ioprio_set takes three integers.
            let result = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, thread, value) };
            if result != 0 {
                let error = std::io::Error::last_os_error();
                // A thread may have ended in the meantime.
                ensure!(error.raw_os_error() == Some(libc::ESRCH), "ioprio_set: {error}");
            }
        }
        Ok(())
    }

    /// The guest's clock, since the epoch.
    pub(crate) fn now(&self) -> Result<Duration> {
        let ns = self.with_agent(|agent| agent.time(COMMAND))?;
        Ok(Duration::from_nanos(u64::try_from(ns).context("the guest's clock is before 1970")?))
    }

    /// Whether QEMU still runs.
    pub(crate) fn check(&self) -> Result<()> {
        self.process.check()
    }
}

impl Process {
    /// The agent, once it answers.
    fn agent(&self, deadline: Instant, interrupted: &Interrupted) -> Result<Agent> {
        loop {
            self.check()?;
            // The socket is QEMU's: it accepts before the guest has booted, so the answer counts.
            let tried = Agent::connect(self.agent_socket(), Duration::from_secs(2));
            let error = match tried {
                Ok(agent) => return Ok(agent),
                Err(error) => error,
            };
            if Instant::now() >= deadline {
                bail!("guest {} did not boot: {error}; {}", self.name(), self.console());
            }
            wait(Duration::from_millis(200), interrupted)?;
        }
    }
}
