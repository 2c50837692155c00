//! Takes a host and a device for measurements, and gives them back.
//!
//! A [`Testbed`] owns what it changes: its own journal (apart from an operator's), the cgroups under
//! [`CGROUP_ROOT`], a lock against a second one. Dropping it puts the knobs back and removes the cgroups;
//! after a killed one the scratch disk's server, which outlives it, cleans up, or else the next testbed or
//! `rtvirtio rollback`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_cases::{Case, Neighbour, Scale, SchemeSettings, Tier};
use rtvirtio_cli::input;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_host::{ApplyOptions, Host, HostError, RollbackOutcome, Topology};
use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{Knobs, Scheduler, Settings, diff};
use rtvirtio_spec::specification::{Device, Specification};
use rtvirtio_units::{DeviceName, Nanos};

use crate::load::{CellLoad, Cgroups, FIO_FILES, Measurement, Place};
use crate::neighbours::OtherLoad;

/// Where a testbed's VMs have their cgroups.
pub const CGROUP_ROOT: &str = "rtvirtio/bench";
/// Where [`Host`] looks whether a device is measured, before it sets or puts back anything there.
const STATE: &str = "/run/rtvirtio-host/bench";
/// Where guests have their sockets.
pub const GUEST_FILES: &str = "/run/rtvirtio-host/bench/guests";

/// A device under test and what is set on it.
pub struct Testbed {
    host: Host,
    device: Device,
    label: String,
    mount: PathBuf,
    keeps_device_knobs: bool,
    /// Set if the device has no other.
    only_scheduler: Option<Scheduler>,
    schedulers: Vec<String>,
    _lock: File,
}

/// What a load was to a device.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// How long it issued requests.
    pub active: Duration,
    /// How long all of it took: the device was left to others for the rest.
    pub took: Duration,
    /// The part of the device that it used while it was active, 0 to 1.
    pub used: f64,
}

impl Work {
    /// How long others are still owed the device, of whose time a calibration takes this share.
    pub(crate) fn owed(self, share: f64) -> Duration {
        self.active.mul_f64(self.used / share).saturating_sub(self.took)
    }
}

/// What is measured: a device, and where the load on it runs.
pub trait DeviceUnderTest {
    /// The device, and what is set on it.
    fn testbed(&self) -> &Testbed;

    /// How slow loads run here.
    fn scale(&self) -> Scale;

    /// Where latency is taken.
    fn measured_at(&self) -> MeasuredAt;

    /// The scheduler that the device has, if it is to keep it.
    fn scheduler(&self) -> Option<Scheduler> {
        None
    }

    /// The kernel's names of the schedulers that the device can have.
    fn schedulers(&self) -> Vec<String> {
        self.testbed().schedulers.clone()
    }

    /// Whether iocost may be tried on it.
    fn has_iocost(&self) -> bool {
        false
    }

    /// Whether others use it. What an interrupted calibration measured beside them then says nothing of now.
    fn is_used_by_others(&self) -> bool {
        false
    }

    /// What others had the device do during the last measurement, or after it if it was stopped; `None`: nobody else
    /// uses it.
    fn others(&self) -> Option<OtherLoad> {
        None
    }

    /// How long a request of others may take; `None`: nobody else uses it.
    fn tolerated(&self) -> Option<Nanos> {
        None
    }

    /// How long the device is left to others after a load.
    fn owed(&self, work: Work) -> Duration {
        let _ = work;
        Duration::ZERO
    }

    /// Leaves the device to others after a load, for as long as they are still owed.
    ///
    /// # Errors
    /// If the user interrupts.
    fn rest(&self, work: Work, interrupted: &Interrupted) -> Result<()> {
        let _ = (work, interrupted);
        Ok(())
    }

    /// A case on this device.
    fn specification(
        &self,
        case: Case,
        tier: Tier,
        neighbour: Neighbour,
        window: Nanos,
    ) -> Specification;

    /// Applies the settings, runs the load, measures.
    ///
    /// # Errors
    /// If a knob cannot be set, fio fails, or the user interrupts; [`GaveUp`](crate::neighbours::GaveUp)
    /// if it was stopped for the sake of others.
    fn measure(
        &self,
        specification: &Specification,
        scheme: &SchemeSettings,
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement>;
}

impl Testbed {
    /// Takes `device`, which results call `label`. Cleans up after a killed run first.
    ///
    /// # Errors
    /// Without root, or while another testbed is in use.
    pub fn new(device: &Path, label: &str) -> Result<Self> {
        let (host, lock) = take_host()?;
        let mount = host.cgroup_version()?.mount().to_owned();
        let only_scheduler = host.has_no_scheduler(device)?.then_some(Scheduler::None);
        // Whether the kernel loads one may show only when it is set.
        let schedulers = host.schedulers(device, |_| true)?;
        let name = DeviceName::new("scratch")?;
        let device =
            Device { name, path: device.to_owned(), profile: PathBuf::from("profile.json") };
        Ok(Self {
            host,
            device,
            label: label.to_owned(),
            mount,
            keeps_device_knobs: false,
            only_scheduler,
            schedulers,
            _lock: lock,
        })
    }

    /// From now on results name the device so.
    pub fn set_label(&mut self, label: &str) {
        self.label = label.to_owned();
    }

    /// From now on the device's scheduler and its knobs stay as they are; those of cgroups are set.
    pub const fn keep_device_knobs(&mut self) {
        self.keeps_device_knobs = true;
    }

    /// How results name the device.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The device as specifications name it.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// What the device is.
    ///
    /// # Errors
    /// If it is gone.
    pub fn identity(&self) -> Result<DeviceIdentity> {
        Ok(self.host.identity(&self.device.path)?)
    }

    /// The device's firmware, if it tells.
    #[must_use]
    pub fn firmware(&self) -> Option<String> {
        self.host.firmware(&self.device.path)
    }

    /// The kernel's release.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn kernel_release(&self) -> Result<String> {
        Ok(self.host.kernel_release()?)
    }

    /// Where the cgroups are mounted.
    #[must_use]
    pub fn cgroup_mount(&self) -> &Path {
        &self.mount
    }

    /// Makes the specification's cgroups and says how everything is set.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn prepare(&self, specification: &Specification) -> Result<Knobs> {
        for vm in &specification.vms {
            self.host.create_cgroup(&vm.cgroup)?;
        }
        Ok(self.host.observe(&Topology::of_specification(specification))?)
    }

    /// Makes the specification's cgroups and applies the settings.
    ///
    /// # Errors
    /// If a knob cannot be set.
    pub fn set(&self, specification: &Specification, scheme: &SchemeSettings) -> Result<()> {
        let topology = Topology::of_specification(specification);
        let apply = || -> Result<()> {
            let observed = self.prepare(specification)?;
            let mut changes = diff(&observed, &scheme.settings.knobs());
            if self.keeps_device_knobs {
                changes.retain(|change| change.knob.vm().is_some());
            }
            self.host.apply(&topology, &observed, &changes, ApplyOptions::default())?;
            Ok(())
        };
        apply().or_else(|error| match error.downcast_ref() {
            // A plan has been applied while this waited for it.
            Some(HostError::Stale { .. }) => apply(),
            _ => Err(error),
        })
    }

    /// Applies the settings, runs the load at `place`, measures.
    ///
    /// # Errors
    /// If a knob cannot be set, fio fails, or the user interrupts.
    pub fn measure_at(
        &self,
        place: &dyn Place,
        specification: &Specification,
        scheme: &SchemeSettings,
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        self.set(specification, scheme)?;
        let load = CellLoad {
            specification,
            device: &self.device.path,
            ioprio: &scheme.ioprio,
            place,
            window,
        };
        load.run(interrupted)
    }

    /// The VMs' cgroups, as the place of a load.
    #[must_use]
    pub fn cgroups(&self) -> Cgroups<'_> {
        Cgroups { device: &self.device.path, size: None, mount: &self.mount }
    }
}

impl DeviceUnderTest for Testbed {
    fn testbed(&self) -> &Testbed {
        self
    }

    fn scale(&self) -> Scale {
        Scale::ONE
    }

    fn measured_at(&self) -> MeasuredAt {
        MeasuredAt::Host
    }

    fn scheduler(&self) -> Option<Scheduler> {
        self.only_scheduler
    }

    fn has_iocost(&self) -> bool {
        !self.keeps_device_knobs && self.host.has_iocost(&self.device.path).unwrap_or(false)
    }

    fn specification(
        &self,
        case: Case,
        tier: Tier,
        neighbour: Neighbour,
        window: Nanos,
    ) -> Specification {
        let (device, root) = (self.device.clone(), Path::new(CGROUP_ROOT));
        rtvirtio_cases::specification(case, tier, neighbour, window, device, root, Scale::ONE)
    }

    fn measure(
        &self,
        specification: &Specification,
        scheme: &SchemeSettings,
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        self.measure_at(&self.cgroups(), specification, scheme, window, interrupted)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if let Err(error) = clean_up(&self.host) {
            eprintln!("warning: clean-up: {error:#}; the next run tries again");
        }
    }
}

/// Takes the host for a benchmark, as long as the lock is kept: cleans up after a killed run first.
///
/// # Errors
/// Without root, or while somebody else has it.
pub fn take_host() -> Result<(Host, File)> {
    let Some(lock) = lock_testbed()? else {
        bail!("another rtvirtio benchmark or calibration is running on this host");
    };
    let host = input::host().with_state_directory(STATE);
    clean_up(&host).context("undo what a killed run left")?;
    Ok((host, lock))
}

/// Takes the lock that a testbed holds; `None` while another one does.
fn lock_testbed() -> Result<Option<File>> {
    let context = || format!("take {STATE} (who measures has to be root)");
    std::fs::create_dir_all(STATE).with_context(context)?;
    let lock = File::create(Path::new(STATE).join("in-use")).with_context(context)?;
    let flock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    Ok(rustix::fs::flock(&lock, flock).is_ok().then_some(lock))
}

/// Undoes what a killed testbed left: knobs, cgroups with their processes, files.
fn clean_up(host: &Host) -> Result<RollbackOutcome> {
    // Each on its own: one failure must not keep the others from being tried.
    let outcome = host.rollback();
    let cgroups = host.remove_cgroup(Path::new(CGROUP_ROOT));
    let files =
        [FIO_FILES, GUEST_FILES].map(|directory| match std::fs::remove_dir_all(directory) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        });
    cgroups?;
    files.into_iter().collect::<std::io::Result<()>>()?;
    Ok(outcome?)
}

/// Undoes what a killed calibration or benchmark left, unless one is running.
///
/// # Errors
/// If part of it cannot be undone.
pub fn recover_killed() -> Result<RollbackOutcome> {
    if !Path::new(STATE).exists() {
        return Ok(RollbackOutcome::Nothing);
    }
    match lock_testbed()? {
        Some(_lock) => clean_up(&Host::new("/").with_state_directory(STATE)),
        None => Ok(RollbackOutcome::Nothing),
    }
}

/// The same for a process that has only just been killed: the kernel may let go of its lock a moment
/// after its other files. Whoever else has taken the testbed by then has cleaned up.
///
/// # Errors
/// If part of it cannot be undone.
pub fn recover_just_killed() -> Result<RollbackOutcome> {
    const PATIENCE: Duration = Duration::from_secs(10);
    let begin = std::time::Instant::now();
    while lock_testbed()?.is_none() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
    recover_killed()
}

/// Settings without I/O priorities.
#[must_use]
pub const fn plain(settings: Settings) -> SchemeSettings {
    SchemeSettings { settings, ioprio: BTreeMap::new() }
}
