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

mod data_plane;
mod load;
mod process;
mod restarts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rtvirtio_cases::{IoPriority, Scale};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_host::qemu::{Agent, ExecStatus, Monitor, Output};
use rtvirtio_spec::specification::{Disk, Specification};
use rtvirtio_units::{Bytes, DiskName, VmName};

use crate::work_directory::WorkDirectory;

use data_plane::DataPlane;
use process::Slice;

pub use data_plane::Scheduled;
pub use data_plane::Served;
pub use process::COMMAND_LINE;
pub use process::{MEMORY_MIB, Process, Start};
pub use restarts::Restarts;

/// How long a boot may take: 3 s for one guest under TCG, and five share two cores.
pub const BOOT: Duration = Duration::from_secs(90);
/// How long a probe boot under KVM may take.
const PROBE_BOOT: Duration = Duration::from_secs(10);
/// How long the agent may take for one command that does not wait for a task.
pub const COMMAND: Duration = Duration::from_secs(10);
/// The most that is read of one of fio's files.
const LARGEST_FILE: usize = 8 << 20;

/// What guests boot from.
#[derive(Debug, Clone)]
pub struct GuestImage {
    /// Its kernel.
    pub kernel: PathBuf,
    /// What that unpacks.
    pub initramfs: PathBuf,
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

/// Where the guests' kernel is, as an argument.
#[derive(Debug, Clone, clap::Args)]
pub struct ImageArgs {
    /// What guests boot from: the directory that scripts/guest wrote
    #[arg(long, value_name = "DIR", default_value = "target/guest")]
    pub guest_image: PathBuf,
}

impl ImageArgs {
    /// The image and what runs it.
    ///
    /// # Errors
    /// If it is not there, or QEMU cannot be started at all.
    pub fn find(&self, interrupted: &Interrupted) -> Result<(GuestImage, Accelerator)> {
        let image = GuestImage::find(&self.guest_image)?;
        let accelerator = Accelerator::probe(&image, interrupted)?;
        Ok((image, accelerator))
    }
}

named! {
    /// What runs a guest's instructions.
    pub enum Accelerator {
        /// The processor.
        Kvm = "kvm",
        /// QEMU's translator.
        Tcg = "tcg",
    }
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
        eprintln!("Seeing whether a guest boots under KVM: up to {} s", PROBE_BOOT.as_secs());
        let directory = WorkDirectory::new()?;
        let start = Start::new(image, Self::Kvm, directory.path(), "probe");
        let guest = Process::start(&start)?;
        match guest.agent(Instant::now() + PROBE_BOOT, interrupted) {
            Ok(_) => Ok(Self::Kvm),
            Err(error) if error.is::<rtvirtio_host::interrupt::InterruptedError>() => Err(error),
            Err(_) => Ok(Self::Tcg),
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
#[derive(Debug, Clone)]
pub struct Place {
    /// The device under test.
    pub device: PathBuf,
    /// Its size.
    pub size: Bytes,
    /// Where the VMs' cgroups are.
    pub cgroup_mount: PathBuf,
    /// Where sockets and logs go.
    pub directory: PathBuf,
}

/// Guests, one for each VM of a specification; those that run, and what the others start from.
pub struct Guests {
    // The guests first: a server that goes before them is missed.
    running: BTreeMap<VmName, Guest>,
    /// What serves their disks; none: their QEMUs.
    data_plane: Option<DataPlane>,
    accelerator: Accelerator,
    image: GuestImage,
    place: Place,
    /// Each VM's cgroup and disks.
    layout: BTreeMap<VmName, (PathBuf, Vec<Slice>)>,
}

/// One running guest; dropping it kills it.
pub struct Guest {
    // The agent first: its socket closes before QEMU goes.
    agent: Mutex<Agent>,
    process: Process,
    /// Node of each disk within the guest.
    disks: BTreeMap<DiskName, String>,
}

impl Guests {
    /// Divides the device among all disks of the specification's VMs. No guest runs yet.
    ///
    /// # Errors
    /// If the device is too small for so many disks.
    pub fn new(
        image: &GuestImage,
        accelerator: Accelerator,
        specification: &Specification,
        place: Place,
    ) -> Result<Self> {
        let disks: usize = specification.vms.iter().map(|vm| vm.disks.len()).sum();
        // Whole MiB, so that slices are aligned for direct I/O.
        let size = ((place.size.get() / disks.max(1) as u64) >> 20) << 20;
        ensure!(size > 0, "{} is too small for {disks} disks", place.size);
        let mut offset = 0;
        let mut layout = BTreeMap::new();
        for vm in &specification.vms {
            let mut slices = Vec::new();
            for disk in &vm.disks {
                slices.push(Slice { disk: disk.name.clone(), offset, size });
                offset += size;
            }
            layout.insert(vm.name.clone(), (vm.cgroup.clone(), slices));
        }
        let (running, data_plane) = (BTreeMap::new(), None);
        Ok(Self { running, data_plane, accelerator, image: image.clone(), place, layout })
    }

    /// From now on `program serve` serves the disks of guests that are started.
    ///
    /// # Errors
    /// If it does not start.
    pub fn serve_disks(
        &mut self,
        program: &Path,
        scheduled: &Scheduled<'_>,
        interrupted: &Interrupted,
    ) -> Result<()> {
        let layout = self.layout.iter().map(|(vm, (_, slices))| (vm, slices.as_slice()));
        let Place { device, directory, .. } = &self.place;
        let text = |control: &Path| scheduled.configured(control, device, directory, layout);
        self.data_plane = Some(DataPlane::start(program, directory, text, interrupted)?);
        Ok(())
    }

    /// What the data plane has done so far, if it serves the disks.
    pub fn served(&self) -> Result<Option<Served>> {
        self.data_plane.as_ref().map(DataPlane::served).transpose()
    }

    /// Boots a guest for each VM, all at once.
    ///
    /// # Errors
    /// If QEMU fails or a guest's agent does not answer in time; all are gone then.
    pub fn boot_all(&mut self, interrupted: &Interrupted) -> Result<()> {
        eprintln!(
            "Booting {} guests under {}: up to {} s",
            self.layout.len(),
            self.accelerator.name(),
            BOOT.as_secs()
        );
        let vms = self.layout.keys();
        let started = vms.map(|vm| self.boot(vm)).collect::<Result<Vec<_>>>()?;
        let deadline = Instant::now() + BOOT;
        for process in started {
            let guest = self.ready(process, deadline, interrupted)?;
            self.running.insert(guest.0, guest.1);
        }
        Ok(())
    }

    /// Ends a VM's guest.
    pub fn stop(&mut self, vm: &VmName) {
        self.running.remove(vm);
    }

    /// Starts a VM's guest, for [`Guests::ready`].
    pub fn boot(&self, vm: &VmName) -> Result<(VmName, Process)> {
        let (cgroup, slices) = self.layout.get(vm).with_context(|| format!("no VM {vm}"))?;
        let procs = self.place.cgroup_mount.join(cgroup).join("cgroup.procs");
        let (image, directory) = (&self.image, &self.place.directory);
        let start = Start {
            procs: Some(&procs),
            arguments: match &self.data_plane {
                Some(data_plane) => data_plane.disks(vm, slices),
                None => process::disks(&self.place.device, slices, self.accelerator),
            },
            ..Start::new(image, self.accelerator, directory, vm.as_str())
        };
        Ok((vm.clone(), Process::start(&start)?))
    }

    /// Waits until a guest's agent answers.
    pub fn ready(
        &self,
        (vm, process): (VmName, Process),
        deadline: Instant,
        interrupted: &Interrupted,
    ) -> Result<(VmName, Guest)> {
        let agent = process.agent(deadline, interrupted)?;
        let slices = self.layout.get(&vm).map(|(_, slices)| slices.as_slice()).unwrap_or_default();
        let node =
            |(slice, letter): (&Slice, char)| (slice.disk.clone(), format!("/dev/vd{letter}"));
        let disks = slices.iter().zip('a'..='z').map(node).collect();
        Ok((vm, Guest { agent: Mutex::new(agent), process, disks }))
    }

    /// What runs them.
    #[must_use]
    pub const fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// A VM's guest.
    ///
    /// # Errors
    /// If it does not run.
    pub fn guest(&self, vm: &VmName) -> Result<&Guest> {
        self.running.get(vm).with_context(|| format!("there is no guest for VM {vm}"))
    }
}

/// One disk for each task, so that a task is recognised by its disk; a VM that declares none keeps
/// what it has.
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
    /// Boots one guest on its own, in the cgroup of its starter, with `arguments` added to QEMU's.
    /// Sockets and logs of its `name` go to `directory`.
    ///
    /// # Errors
    /// If QEMU fails or the agent does not answer in time; it is gone then.
    pub fn boot(
        image: &GuestImage,
        accelerator: Accelerator,
        directory: &Path,
        name: &str,
        arguments: &[&str],
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let arguments = arguments.iter().map(|&a| a.to_owned()).collect();
        let start = Start { arguments, ..Start::new(image, accelerator, directory, name) };
        Self::boot_as(&start, interrupted)
    }

    /// Boots one guest.
    pub fn boot_as(start: &Start<'_>, interrupted: &Interrupted) -> Result<Self> {
        let process = Process::start(start)?;
        let agent = process.agent(Instant::now() + BOOT, interrupted)?;
        Ok(Self { agent: Mutex::new(agent), process, disks: BTreeMap::new() })
    }

    /// QEMU's process id.
    pub fn process_id(&self) -> Result<u32> {
        self.process.id()
    }

    /// QEMU's monitor.
    pub fn monitor(&self) -> Result<Monitor> {
        Ok(Monitor::connect(self.process.monitor_socket(), COMMAND)?)
    }

    /// Runs a program to its end.
    ///
    /// # Errors
    /// If it cannot be started or does not end in time; then it goes on running. How it ended is
    /// no error.
    pub fn run(&self, program: &str, arguments: &[&str], timeout: Duration) -> Result<Output> {
        self.with_agent(|agent| agent.run(program, arguments, timeout))
            .with_context(|| format!("run {program} in the guest; {}", self.process.console()))
    }

    fn with_agent<T, E>(&self, f: impl FnOnce(&mut Agent) -> Result<T, E>) -> Result<T>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let mut agent = self.agent.lock().map_err(|_| anyhow!("the agent's lock is poisoned"))?;
        Ok(f(&mut agent)?)
    }

    /// The node of a disk within the guest, such as `/dev/vda`.
    pub fn node(&self, disk: &DiskName) -> Result<&str> {
        self.disks.get(disk).map(String::as_str).with_context(|| format!("no disk {disk}"))
    }

    /// Starts a program; returns its process id within the guest.
    pub fn spawn(&self, program: &str, arguments: &[&str], timeout: Duration) -> Result<i64> {
        self.with_agent(|agent| agent.exec(program, arguments, timeout))
    }

    /// How a program ended; `None` while it runs.
    pub fn ended(&self, pid: i64) -> Result<Option<i64>> {
        match self.with_agent(|agent| agent.exec_status(pid, COMMAND))? {
            ExecStatus::Running => Ok(None),
            ExecStatus::Exited { code, .. } => Ok(Some(code.unwrap_or(-1))),
        }
    }

    /// Writes a file of the guest.
    ///
    /// # Errors
    /// If the guest refuses, or its agent does not answer.
    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        self.with_agent(|agent| agent.write_file(path, text, COMMAND))
    }

    /// Copies a file of the guest to `target`.
    pub fn fetch(&self, path: &str, target: &Path) -> Result<()> {
        let bytes = self
            .with_agent(|agent| agent.read_file(path, LARGEST_FILE, COMMAND))
            .with_context(|| format!("read {path} in the guest"))?;
        Ok(std::fs::write(target, bytes)?)
    }

    /// Sets the I/O priority of all of QEMU's threads (`ioprio_set(2)`), or none.
    pub fn set_io_priority(&self, priority: Option<&IoPriority>) -> Result<()> {
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
    pub fn now(&self) -> Result<Duration> {
        let ns = self.with_agent(|agent| agent.time(COMMAND))?;
        Ok(Duration::from_nanos(u64::try_from(ns).context("the guest's clock is before 1970")?))
    }

    /// Whether QEMU still runs.
    pub fn check(&self) -> Result<()> {
        self.process.check()
    }
}

impl Process {
    /// The agent, once it answers.
    fn agent(&self, deadline: Instant, interrupted: &Interrupted) -> Result<Agent> {
        loop {
            self.check_boot()?;
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
