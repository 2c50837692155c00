//! One cell: a specification's VMs as cgroups or as guests in them, a scheme's
//! settings, a load, a verdict.
//!
//! A [`Testbed`] owns what it changes: its own journal (apart from an
//! operator's), the cgroups under `rtvirtio/bench`, the guests, a lock against
//! a second one. Dropping it puts the knobs back and removes the cgroups; after a killed one the
//! scratch disk's server, which outlives it, cleans up, or else the next.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rtvirtio_cases::{Case, Neighbour, Scale, SchemeSettings, Tier, judge};
use rtvirtio_host::{ApplyOptions, Host, RollbackOutcome, Topology};
use rtvirtio_planner::Predicted;
use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::run::{Cell, CellKey, MeasuredAt, Prediction, RUN_VERSION, TaskResult};
use rtvirtio_spec::settings::{Knobs, diff};
use rtvirtio_spec::specification::{Device, Specification};
use rtvirtio_units::{DeviceName, Nanos, VmName};

use crate::guests::{self, Accelerator, GuestImage, Guests, Scheduled, Served, with_own_disks};
use crate::load::{CellLoad, Interrupted, Measurement};
use crate::qos::curve::Curve;

/// Where a testbed's VMs have their cgroups.
pub const CGROUP_ROOT: &str = "rtvirtio/bench";
const STATE: &str = "/run/rtvirtio/bench";
/// Where fio's job files and logs lie while a cell runs.
pub(crate) const FIO_FILES: &str = "/run/rtvirtio/bench/fio";
/// Where guests have their sockets.
pub(crate) const GUEST_FILES: &str = "/run/rtvirtio/bench/guests";

/// A cell whose canary was later than this, times the testbed's scale, at its 99th percentile does
/// not count: its tails may be the CPU's. Fixed before the first comparison.
pub const CANARY_LIMIT: Nanos = Nanos::from_millis(1);

/// A device under test and what is set on it.
pub struct Testbed {
    host: Host,
    device: Device,
    label: String,
    mount: PathBuf,
    guests: Option<Guests>,
    _lock: File,
}

impl Testbed {
    /// Takes `device`, which results call `label`. Cleans up after a killed run first.
    ///
    /// # Errors
    /// Without root, or while another testbed is in use.
    pub fn new(device: &Path, label: &str) -> Result<Self> {
        let (host, lock) = take_host()?;
        let mount = host.cgroup_version()?.mount().to_owned();
        let name = DeviceName::new("scratch")?;
        let device =
            Device { name, path: device.to_owned(), profile: PathBuf::from("profile.json") };
        Ok(Self { host, device, label: label.to_owned(), mount, guests: None, _lock: lock })
    }

    /// Boots a guest for each VM of `case` and for the one that writes; from now on cells run in
    /// them, all of it as slow as [`Testbed::scale`] says.
    ///
    /// # Errors
    /// As [`Guests::boot_all`].
    pub fn boot_guests(
        &mut self,
        image: &GuestImage,
        accelerator: Accelerator,
        case: Case,
        interrupted: &Interrupted,
    ) -> Result<()> {
        self.boot(image, accelerator, case, None, interrupted)
    }

    /// The same with disks that `program serve`, the data plane, serves from the device, which has
    /// this service curve: each disk with targets is promised its tasks' rates. Guests that run are
    /// ended first.
    ///
    /// # Errors
    /// As [`Testbed::boot_guests`], and if the server does not start.
    pub fn boot_guests_on_data_plane(
        &mut self,
        image: &GuestImage,
        accelerator: Accelerator,
        case: Case,
        (program, curve): (&Path, Curve),
        interrupted: &Interrupted,
    ) -> Result<()> {
        self.boot(image, accelerator, case, Some((program, curve)), interrupted)
    }

    fn boot(
        &mut self,
        image: &GuestImage,
        accelerator: Accelerator,
        case: Case,
        data_plane: Option<(&Path, Curve)>,
        interrupted: &Interrupted,
    ) -> Result<()> {
        self.guests = None;
        let all = self.specification(case, Tier::Strict, Neighbour::Writer, Nanos::ZERO);
        let all = with_own_disks(all);
        self.prepare(&all)?;
        std::fs::create_dir_all(GUEST_FILES)?;
        let place = guests::Place {
            device: self.device.path.clone(),
            size: self.identity()?.size,
            cgroup_mount: self.mount.clone(),
            directory: GUEST_FILES.into(),
        };
        let mut guests = Guests::new(image, accelerator, &all, place)?;
        if let Some((program, curve)) = data_plane {
            let scheduled = Scheduled { curve, specification: &all };
            guests.serve_disks(program, &scheduled, interrupted)?;
        }
        guests.boot_all(interrupted)?;
        self.guests = Some(guests);
        Ok(())
    }

    /// Whether VMs are guests.
    #[must_use]
    pub const fn guests_run(&self) -> bool {
        self.guests.is_some()
    }

    /// The guests, if VMs are guests.
    pub(crate) const fn guests(&self) -> Option<&Guests> {
        self.guests.as_ref()
    }

    /// What the data plane has done so far, if it serves the guests' disks.
    ///
    /// # Errors
    /// If it does not say.
    pub fn served(&self) -> Result<Option<Served>> {
        self.guests.as_ref().map_or(Ok(None), Guests::served)
    }

    /// Ends a VM's guest, for [`Guests::start`] to start it again.
    pub(crate) fn stop_guest(&mut self, vm: &VmName) {
        if let Some(guests) = &mut self.guests {
            guests.stop(vm);
        }
    }

    /// How slow the evaluation runs here.
    #[must_use]
    pub fn scale(&self) -> Scale {
        self.guests.as_ref().map_or(Scale::ONE, |g| g.accelerator().scale())
    }

    /// A case on this testbed.
    #[must_use]
    pub fn specification(
        &self,
        case: Case,
        tier: Tier,
        neighbour: Neighbour,
        window: Nanos,
    ) -> Specification {
        let (device, root) = (self.device.clone(), Path::new(CGROUP_ROOT));
        let scale = self.scale();
        let specification =
            rtvirtio_cases::specification(case, tier, neighbour, window, device, root, scale);
        match self.guests {
            Some(_) => with_own_disks(specification),
            None => specification,
        }
    }

    /// Where latency is taken.
    #[must_use]
    pub const fn measured_at(&self) -> MeasuredAt {
        match self.guests {
            Some(_) => MeasuredAt::Guest,
            None => MeasuredAt::Host,
        }
    }

    /// The device as specifications name it.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// How results name the device.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// What the device is.
    ///
    /// # Errors
    /// If it is gone.
    pub fn identity(&self) -> Result<DeviceIdentity> {
        Ok(self.host.identity(&self.device.path)?)
    }

    /// The kernel's release.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn kernel_release(&self) -> Result<String> {
        Ok(self.host.kernel_release()?)
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

    /// Applies the settings, runs the load, measures.
    ///
    /// # Errors
    /// If a knob cannot be set, fio fails, or the user interrupts.
    pub fn measure(
        &self,
        specification: &Specification,
        scheme: &SchemeSettings,
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        let observed = self.prepare(specification)?;
        let changes = diff(&observed, &scheme.settings.knobs());
        let topology = Topology::of_specification(specification);
        self.host.apply(&topology, &observed, &changes, ApplyOptions::default())?;
        let load = CellLoad {
            specification,
            device: &self.device.path,
            ioprio: &scheme.ioprio,
            cgroup_mount: &self.mount,
            guests: self.guests.as_ref(),
            window,
        };
        load.run(interrupted)
    }
}

/// Takes the host for a benchmark, as long as the lock is kept: cleans up after a killed run first.
pub(crate) fn take_host() -> Result<(Host, File)> {
    let Some(lock) = lock_testbed()? else {
        bail!("another rtvirtio benchmark or calibration is running on this host");
    };
    let host = Host::new("/").with_state_directory(STATE);
    clean_up(&host).context("undo what a killed run left")?;
    Ok((host, lock))
}

/// Takes the lock that a testbed holds; `None` while another one does.
fn lock_testbed() -> Result<Option<File>> {
    std::fs::create_dir_all(STATE)
        .with_context(|| format!("create {STATE} (a benchmark needs root)"))?;
    let lock = File::create(Path::new(STATE).join("in-use"))?;
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

impl Drop for Testbed {
    fn drop(&mut self) {
        self.guests = None;
        if let Err(error) = clean_up(&self.host) {
            eprintln!("warning: clean-up: {error:#}; the next run tries again");
        }
    }
}

/// What a cell is judged against and labelled with.
pub struct CellContext<'a> {
    /// Which cell it is.
    pub key: CellKey,
    /// What the VMs do.
    pub specification: &'a Specification,
    /// What was set.
    pub scheme: &'a SchemeSettings,
    /// Predicts each task at a percentile, if the scheme predicts.
    pub predict: &'a dyn Fn(&Specification) -> Vec<Predicted>,
    /// Name of the device.
    pub device: String,
    /// Where its latencies are taken.
    pub measured_at: MeasuredAt,
    /// How slow the evaluation runs.
    pub scale: Scale,
    /// Length of the window.
    pub window: Duration,
    /// When it started, RFC 3339.
    pub started: String,
}

impl CellContext<'_> {
    /// Judges a measurement by the pass rule.
    #[must_use]
    pub fn judge(&self, measurement: Measurement) -> Cell {
        let window_s = self.window.as_secs_f64();
        let mut judged_specification = self.specification.clone();
        let mut tasks = Vec::new();
        for vm in &mut judged_specification.vms {
            for task in &mut vm.tasks {
                let measured =
                    measurement.tasks.iter().find(|m| m.vm == vm.name && m.task == task.name);
                let (Some(measured), Some(target), Some(iops)) =
                    (measured, &mut task.target, task.load.iops)
                else {
                    continue;
                };
                let verdict = judge(&measured.histogram, window_s, iops, target.latency);
                if let Some(judged) = verdict.judged {
                    target.percentile = judged.percentile;
                }
                tasks.push(TaskResult {
                    vm: vm.name.clone(),
                    task: task.name.clone(),
                    measured_at: self.measured_at,
                    requested_iops: iops.get(),
                    delivered_iops: measured.histogram.count() as f64 / window_s,
                    judged: verdict.judged,
                    target: Some(target.latency),
                    prediction: None,
                    passed: verdict.passed(),
                    histogram: measured.histogram.clone(),
                    timeline: measured.timeline.clone(),
                });
            }
        }
        // The prediction is for the percentile that could be judged; the model saw no result. It
        // knows nothing of I/O priorities.
        let predicts = self.scheme.ioprio.is_empty();
        for Predicted { promise, paper, paper_bound } in
            if predicts { (self.predict)(&judged_specification) } else { Vec::new() }
        {
            let found = tasks.iter_mut().find(|t| t.vm == promise.vm && t.task == promise.task);
            if let Some(task) = found {
                task.prediction = Some(Prediction {
                    percentile: promise.percentile,
                    predicted: promise.predicted,
                    bound: promise.bound,
                    paper,
                    paper_bound,
                });
            }
        }
        let limit = self.scale.time(CANARY_LIMIT);
        let late = measurement.canary.p99 > limit;
        Cell {
            version: RUN_VERSION,
            key: self.key.clone(),
            started: self.started.clone(),
            device: self.device.clone(),
            window_s,
            settings: self.scheme.settings.clone(),
            ioprio: self.scheme.ioprio.iter().map(|(v, p)| (v.clone(), p.to_string())).collect(),
            passed: !tasks.is_empty() && tasks.iter().all(|t| t.passed),
            attempts: 1,
            noise_floor: None,
            tasks,
            background: measurement.background,
            canary: measurement.canary,
            machine: measurement.machine,
            discarded: late.then(|| format!("canary p99 {} above {limit}", measurement.canary.p99)),
        }
    }
}

/// Settings without I/O priorities.
#[must_use]
pub fn plain(settings: rtvirtio_spec::settings::Settings) -> SchemeSettings {
    SchemeSettings { settings, ioprio: BTreeMap::new() }
}
