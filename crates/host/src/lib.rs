//! A host: its knobs observed, changed and put back, safely.
//!
//! [`Host`] is the entry. Its root is injected, and so is the kernel under it
//! ([`sysfs::Sysfs`]), so that every path is tested without root.
//!
//! - [`Host::observe`], [`Host::identity`], [`Host::cgroup_version`]: what is there;
//! - [`Host::apply`], [`Host::rollback`], [`Host::verify`], [`Host::confirm`]:
//!   changes, journalled before the first write;
//! - [`Host::reapply`]: a saved plan, applied to what runs now;
//! - [`Host::create_cgroup`], [`Host::remove_cgroup`]: a benchmark's VMs;
//! - [`Host::find_guests`]: the knobs that are the VMs' own, within their guests and QEMUs;
//! - [`Host::other_writers`]: udev rules, TuneD and units that set the same knobs;
//! - [`Host::qemu_processes`], [`qemu`]: the VMs that run, QEMU's monitor and the guests' agents;
//! - [`Host::storage`]: what a VM's disk is made of, down to the host's disks;
//! - [`Host::trace_block`], [`block_trace`]: latency in the host's block layer, by sectors;
//! - [`dataplane`]: a client of the data plane's control API;
//! - [`doctor`]: what this host can do.

#![deny(unsafe_code)]

mod apply;
pub mod block_trace;
mod cgroup;
pub mod dataplane;
mod device;
pub mod doctor;
mod error;
#[cfg(any(test, feature = "test-utils"))]
pub mod fake;
mod fiemap;
mod groups;
mod guests;
pub mod interrupt;
mod journal;
mod knobs;
mod mounts;
mod promises;
pub mod qemu;
mod reapply;
mod record;
mod restoration;
mod restore;
pub mod storage;
pub mod sysfs;
mod systemd;
#[cfg(test)]
mod tests;
mod topology;
mod unix_socket;
mod writers;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::settings::{Knob, Knobs};
use serde::Serialize;

pub use apply::{Applied, ApplyOptions, JournalStatus, RollbackOutcome, WatchdogOutcome};
pub use block_trace::{BlockTrace, Extent, Latencies};
pub use cgroup::CgroupVersion;
pub use error::HostError;
pub use guests::{GuestFault, GuestTopology};
pub use promises::DataPlaneTopology;
pub use reapply::SkippedVms;
pub use restoration::{Restoration, Skipped};
pub use topology::Topology;
pub use writers::{OtherWriter, WriterKind};

use dataplane::ControlClient;
use interrupt::{Interrupt, Interrupted, InterruptedError};
use journal::StateDirectory;
use sysfs::{RealSysfs, Sysfs};

/// A knob that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// Which knob.
    pub knob: Knob,
    /// What it should be; `None`: it should not exist.
    pub wanted: Option<String>,
    /// What it is; `None`: it does not exist.
    pub found: Option<String>,
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |v: &Option<String>| v.clone().unwrap_or_else(|| "absent".to_owned());
        write!(f, "{}: wanted {}, found {}", self.knob, text(&self.wanted), text(&self.found))
    }
}

/// A point of [`Host::apply`] or [`Host::rollback`] at which a process may die.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// The journal is about to be written.
    BeforeJournal,
    /// The new journal lies beside the old one.
    JournalStaged,
    /// The new journal is in its place.
    JournalCommitted,
    /// A knob is about to be written.
    BeforeWrite {
        /// Which file, of the host or a place of a VM's (`plc:/sys/block/vda/queue/scheduler`).
        file: PathBuf,
        /// With what.
        text: String,
    },
    /// A knob was written, or refused it.
    AfterWrite {
        /// Which file.
        file: PathBuf,
        /// With what.
        text: String,
    },
    /// The journal is about to be removed.
    BeforeJournalRemoval,
    /// The journal is removed.
    JournalRemoved,
}

/// Called at each step; `Break` stops the work as a crash would.
pub type Observer = Arc<dyn Fn(&Step) -> ControlFlow<()> + Send + Sync>;

/// A host.
#[derive(Clone)]
pub struct Host {
    sysfs: Arc<dyn Sysfs>,
    state: StateDirectory,
    /// Where calibrations and benchmarks have their journal and lock.
    measurements: StateDirectory,
    observer: Option<Observer>,
    /// The system bus's socket.
    bus: PathBuf,
    /// Ends waits for a data plane, for VMs and for a lock.
    interrupted: Option<Arc<Interrupted>>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("sysfs", &self.sysfs).field("state", &self.state).finish()
    }
}

impl Host {
    /// The host whose file tree is under `root`, `/` in production. Journal
    /// and lock lie in `run/rtvirtio-host` below it, those of measurements in `bench` there.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let (state, bus) =
            (root.join("run/rtvirtio-host"), root.join("run/dbus/system_bus_socket"));
        Self { bus, ..Self::with_sysfs(state, Arc::new(RealSysfs::new(root))) }
    }

    /// A host with another kernel, whose journal and lock lie in `state_directory`.
    #[must_use]
    pub fn with_sysfs(state_directory: impl Into<PathBuf>, sysfs: Arc<dyn Sysfs>) -> Self {
        let bus = PathBuf::from("/run/dbus/system_bus_socket");
        let state = StateDirectory(state_directory.into());
        let measurements = StateDirectory(state.0.join("bench"));
        Self { sysfs, state, measurements, observer: None, bus, interrupted: None }
    }

    /// The same host with journal and lock in another directory; those of measurements stay where they are.
    #[must_use]
    pub fn with_state_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.state = StateDirectory(directory.into());
        self
    }

    /// The same host, on which no data plane, VM or lock is waited for once `interrupted` is set.
    #[must_use]
    pub fn with_interrupt(mut self, interrupted: Arc<Interrupted>) -> Self {
        self.interrupted = Some(interrupted);
        self
    }

    /// The same host, whose steps `observer` sees.
    #[must_use]
    pub fn with_observer(mut self, observer: Observer) -> Self {
        self.observer = Some(observer);
        self
    }

    /// The cgroup version that carries block I/O.
    ///
    /// # Errors
    /// [`HostError::NoIoController`] if none does.
    pub fn cgroup_version(&self) -> Result<CgroupVersion, HostError> {
        CgroupVersion::find(&*self.sysfs)
    }

    /// What identifies the device at `device`; a partition has its disk's
    /// identity with its own size.
    ///
    /// # Errors
    /// If it is not there or no block device.
    pub fn identity(&self, device: &Path) -> Result<DeviceIdentity, HostError> {
        device::identity(&*self.sysfs, device)
    }

    /// Whether the device has no requests that a scheduler could order, as an array of md.
    ///
    /// # Errors
    /// If it is not there or no block device.
    pub fn has_no_scheduler(&self, device: &Path) -> Result<bool, HostError> {
        let disk = device::Disk::find(&*self.sysfs, device)?;
        Ok(knobs::Schedulers::read(&*self.sysfs, &disk)?.is_fixed)
    }

    /// The kernel's names of the schedulers that the device can have: those that are there, and those whose
    /// modules are, unless it has no requests. `if_unknown` says which ones are among them where the index of
    /// modules cannot be read, as in a container: the kernel may load one, which it shows when it is set.
    ///
    /// # Errors
    /// If it is not there or no block device.
    pub fn schedulers(
        &self,
        device: &Path,
        if_unknown: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, HostError> {
        let disk = device::Disk::find(&*self.sysfs, device)?;
        let found = knobs::Schedulers::read(&*self.sysfs, &disk)?;
        let release = self.kernel_release().unwrap_or_default();
        Ok(found.possible(&*self.sysfs, &release, if_unknown))
    }

    /// Whether the kernel's iocost can control the device: on cgroup v2, where it has requests.
    ///
    /// # Errors
    /// If the device is not there or no block device.
    pub fn has_iocost(&self, device: &Path) -> Result<bool, HostError> {
        let version = CgroupVersion::find(&*self.sysfs);
        let is_there = version.is_ok_and(|version| version.has_cost(&*self.sysfs));
        Ok(is_there && !self.has_no_scheduler(device)?)
    }

    /// The revision of a device's firmware, if it tells.
    #[must_use]
    pub fn firmware(&self, device: &Path) -> Option<String> {
        device::firmware(&*self.sysfs, device)
    }

    /// `/proc/sys/kernel/osrelease`, such as `6.12.1-amd64`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn kernel_release(&self) -> Result<String, HostError> {
        let text = cgroup::read(&*self.sysfs, Path::new("/proc/sys/kernel/osrelease"))?;
        Ok(text.trim().to_owned())
    }

    /// Every knob of the topology that exists, as the kernel, a guest or its
    /// QEMU shows it. A VM has a weight only on a device whose scheduler is bfq.
    ///
    /// # Errors
    /// If a device or a VM's cgroup is not there, a file cannot be read, or a VM
    /// whose own knobs are part of it does not answer.
    pub fn observe(&self, topology: &Topology) -> Result<Knobs, HostError> {
        let resolved = topology::Resolved::find(&*self.sysfs, topology)?;
        let mut knobs = knobs::observe(&*self.sysfs, &resolved)?;
        knobs.extend(guests::Connected::open(self, &topology.guests)?.knobs());
        let plane = promises::Plane::open(self, topology.data_plane.as_ref())?;
        knobs.extend(plane.iter().flat_map(promises::Plane::knobs));
        Ok(knobs)
    }

    /// The QEMU processes, by process id.
    ///
    /// # Errors
    /// If `/proc` cannot be listed.
    pub fn qemu_processes(&self) -> Result<Vec<qemu::QemuProcess>, HostError> {
        qemu::discover::processes(&*self.sysfs)
    }

    /// The kernel's files, for whoever reads counters.
    #[must_use]
    pub fn sysfs(&self) -> Arc<dyn Sysfs> {
        Arc::clone(&self.sysfs)
    }

    /// A path as a process means it: relative ones are below its current directory.
    #[must_use]
    pub fn path_of_process(&self, pid: u32, path: &Path) -> PathBuf {
        let directory = Path::new("/proc").join(pid.to_string()).join("cwd");
        match self.sysfs.link(&directory) {
            Ok(directory) => directory.join(path),
            Err(_) => path.to_owned(),
        }
    }

    /// Where on the host's devices the data of a disk, a partition, a file, or a part of one lies, now: a
    /// file may grow, and its filesystem may move it.
    ///
    /// # Errors
    /// It is not there, or lies on a filesystem that does not tell.
    pub fn extents(&self, part: &qemu::Part) -> Result<Vec<Extent>, HostError> {
        Extent::find(&*self.sysfs, part)
    }

    /// Starts to measure the latency of I/O within `extents`, no two of which may overlap.
    ///
    /// # Errors
    /// If this kernel has no tracepoints, or this process may not use them.
    pub fn trace_block(&self, extents: &BTreeSet<Extent>) -> Result<BlockTrace, HostError> {
        BlockTrace::start(Arc::clone(&self.sysfs), extents, false)
    }

    /// Starts to measure how a device serves all of its I/O.
    ///
    /// # Errors
    /// As [`Host::trace_block`], and if `device` is no block device.
    pub fn trace_service(&self, device: &Path) -> Result<BlockTrace, HostError> {
        let extents = Extent::find(&*self.sysfs, &qemu::Part::whole(device))?;
        BlockTrace::start(Arc::clone(&self.sysfs), &extents.into_iter().collect(), true)
    }

    /// Other programs that may set the same knobs.
    #[must_use]
    pub fn other_writers(&self) -> Vec<OtherWriter> {
        writers::find(&*self.sysfs)
    }

    /// The control API of the data plane at `socket`.
    fn control(&self, socket: &Path) -> ControlClient {
        ControlClient::new(socket).with_interrupt(self.interrupted.clone())
    }

    /// What ends waits for VMs; `grace`: how long from the signal on what puts something back may take.
    fn interrupt(&self, grace: Duration) -> Interrupt {
        Interrupt::new(self.interrupted.clone(), grace)
    }

    /// Fails once the user wants the work to end.
    fn check_interrupted(&self) -> Result<(), InterruptedError> {
        match &self.interrupted {
            Some(interrupted) if interrupted.load(Ordering::Relaxed) => Err(InterruptedError),
            _ => Ok(()),
        }
    }

    fn step(&self, step: impl FnOnce() -> Step) -> Result<(), HostError> {
        let Some(observer) = &self.observer else {
            return Ok(());
        };
        let step = step();
        match observer(&step) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(HostError::Interrupted { step: Box::new(step) }),
        }
    }
}
