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

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cases::{Case, Neighbour, Scale, Scheme, SchemeSettings, Tier, judge};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_host::{ApplyOptions, Host, RollbackOutcome, Topology};
use rtvirtio_planner::Predicted;
use rtvirtio_spec::latency::Quantile;
use rtvirtio_spec::profile::DeviceIdentity;
use rtvirtio_spec::run::{Cell, CellKey, MeasuredAt, Prediction, RUN_VERSION, TaskResult};
use rtvirtio_spec::settings::{Knobs, diff};
use rtvirtio_spec::specification::{Device, Specification, Vm};
use rtvirtio_units::{BytesPerSecond, DeviceName, Iops, Nanos, VmName};

use crate::guests::{self, Accelerator, GuestImage, Guests, Scheduled, Served, with_own_disks};
use crate::load::{CellLoad, MachineSample, Measurement, RAMP, TaskMeasurement, canary_summary};
use crate::qos::clients::Plan;
use crate::qos::configuration::Sharing;
use crate::qos::curve::Curve;
use crate::qos::neighbour::Neighbour::DeepWriter;
use crate::qos::trial::Trial;

/// Where a testbed's VMs have their cgroups.
pub const CGROUP_ROOT: &str = "rtvirtio/bench";
const STATE: &str = "/run/rtvirtio-host/bench";
/// Where fio's job files and logs lie while a cell runs.
pub(crate) const FIO_FILES: &str = "/run/rtvirtio-host/bench/fio";
/// Where guests have their sockets.
pub(crate) const GUEST_FILES: &str = "/run/rtvirtio-host/bench/guests";

/// A cell whose canary was later than this, times the testbed's scale, at its 99th percentile is
/// marked as disturbed: its tails may be the CPU's. Fixed before the first comparison.
pub const CANARY_LIMIT: Nanos = Nanos::from_millis(1);

/// The part of all CPUs that guests may take.
pub const GUESTS_CPU: f64 = 0.6;
/// The scale of the first trial of guests: a load that any host carries.
const TRIAL_SCALE: Scale = Scale::new(10);
/// Scales at which fio can issue the tasks' rates, which it takes as whole numbers, to within 2 %.
const SCALES: [u32; 10] = [1, 2, 3, 4, 5, 10, 20, 25, 50, 100];
/// Length of a trial's window.
const TRIAL: Duration = Duration::from_secs(3);
/// How long guests that do nothing are looked at.
const TRIAL_IDLE: Duration = Duration::from_secs(1);
/// How many trials there are at most.
const TRIALS: usize = 3;

/// The smallest scale at which a load fits into `room` cores that takes `busy` at `scale`, of which
/// `idle` do not depend on the load.
fn fitting_scale(scale: Scale, busy: f64, idle: f64, room: f64) -> Scale {
    let at_one = (busy - idle).max(0.0) * f64::from(scale.get());
    let left = (room - idle).max(0.05);
    let fits = |s: &&u32| f64::from(**s) >= at_one / left;
    Scale::new(*SCALES.iter().find(fits).unwrap_or(&100))
}

/// A device under test and what is set on it.
pub struct Testbed {
    host: Host,
    device: Device,
    label: String,
    mount: PathBuf,
    guests: Option<Guests>,
    /// How slow guests were found to have to run; `None`: their accelerator's.
    scale: Option<Scale>,
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
        Ok(Self {
            host,
            device,
            label: label.to_owned(),
            mount,
            guests: None,
            scale: None,
            _lock: lock,
        })
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
        let of_accelerator = || Some(self.guests.as_ref()?.accelerator().scale());
        self.scale.or_else(of_accelerator).unwrap_or(Scale::ONE)
    }

    /// Finds out how slow the evaluation has to run in the guests for the tasks of `case` to leave this
    /// host some room: at the scale that is returned, and set, they and a writer within the hand
    /// setting's cap take no more than [`GUESTS_CPU`] of its CPUs. A trial of a few seconds at a
    /// small part of the load tells what it costs; another one at the scale found confirms it.
    ///
    /// # Errors
    /// As [`Testbed::measure`]; without guests.
    pub fn find_scale(&mut self, case: Case, interrupted: &Interrupted) -> Result<Scale> {
        ensure!(self.guests_run(), "only guests are given a scale");
        let cpus = std::thread::available_parallelism()?.get() as f64;
        let room = GUESTS_CPU * cpus;
        let idle = MachineSample::now()?;
        wait(TRIAL_IDLE, interrupted)?;
        let idle = idle.since()?.busy_cores;
        let mut scale = TRIAL_SCALE;
        for _ in 0..TRIALS {
            self.scale = Some(scale);
            let window = Nanos::from(TRIAL);
            let specification = self.specification(case, Tier::Strict, Neighbour::Writer, window);
            // Its settings take no more of the capacity than a rate.
            let any = Iops::new(1000.0)?;
            let hand = Scheme::Hand.baseline_settings(&specification, any, scale);
            let hand = hand.unwrap_or_default();
            let busy = self.measure(&specification, &hand, TRIAL, interrupted)?.machine.busy_cores;
            eprintln!(
                "Trial at s = {scale}: {busy:.2} CPUs busy, {idle:.2} while guests do nothing."
            );
            let fits = fitting_scale(scale, busy, idle, room);
            if fits == scale || (scale != TRIAL_SCALE && busy <= room) {
                break;
            }
            scale = fits;
        }
        self.scale = Some(scale);
        Ok(scale)
    }

    /// From now on results name the device so.
    pub fn set_label(&mut self, label: &str) {
        self.label = label.to_owned();
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

    fn set(&self, specification: &Specification, scheme: &SchemeSettings) -> Result<()> {
        let observed = self.prepare(specification)?;
        let changes = diff(&observed, &scheme.settings.knobs());
        let topology = Topology::of_specification(specification);
        self.host.apply(&topology, &observed, &changes, ApplyOptions::default())?;
        Ok(())
    }

    /// Applies the settings, and has vhost-user clients do the specification's tasks on a data
    /// plane (`program serve`) whose disks lie on the device: each VM's disk is promised the
    /// rates of its tasks within its strictest target, the background VM takes what is left.
    ///
    /// # Errors
    /// If a knob cannot be set, the server or a client fails, or the user interrupts.
    pub fn measure_clients(
        &self,
        specification: &Specification,
        scheme: &SchemeSettings,
        (program, curve): (&Path, Curve),
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        self.set(specification, scheme)?;
        let (background, vms): (Vec<&Vm>, Vec<&Vm>) =
            specification.vms.iter().partition(|vm| vm.is_background());
        let plans: Vec<Vec<Plan>> =
            vms.iter().map(|vm| vm.tasks.iter().filter_map(Plan::of_task).collect()).collect();
        let trial = Trial {
            program,
            device: &self.device.path,
            sharing: Sharing::Schedule(curve),
            vms: &plans,
            background: background.first().map(|_| DeepWriter.background()),
            warm_up: RAMP,
            window,
            seed: 0,
        };
        let recorded = trial.record(interrupted)?;
        let tasks = vms.iter().zip(recorded.tasks).flat_map(|(vm, records)| {
            vm.tasks.iter().zip(records).map(|(task, record)| TaskMeasurement {
                vm: vm.name.clone(),
                task: task.name.clone(),
                timeline: record.timeline(),
                histogram: record.histogram,
            })
        });
        let moved = BytesPerSecond::new(recorded.background as u64);
        Ok(Measurement {
            tasks: tasks.collect(),
            background: background.first().map(|vm| (vm.name.clone(), moved)).into_iter().collect(),
            canary: recorded.canary,
            machine: recorded.machine,
        })
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
        self.set(specification, scheme)?;
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
    /// Length of each of its windows.
    pub window: Duration,
    /// When it started, RFC 3339.
    pub started: String,
}

impl CellContext<'_> {
    /// Judges the windows of a cell by the pass rule, all of them together. A tail's interval also
    /// spans what the windows show apart, since the machine's noise comes in spells.
    #[must_use]
    pub fn judge(&self, windows: Vec<Measurement>) -> Cell {
        let rounds = windows.len() as u32;
        let apart: Vec<Vec<TaskMeasurement>> = windows.iter().map(|w| w.tasks.clone()).collect();
        let mut length = self.window;
        let together = windows.into_iter().reduce(|mut all, window| {
            all.append(length, window, self.window);
            length += self.window;
            all
        });
        let Some(measurement) = together else { unreachable!("a cell has a window") };
        let window_s = length.as_secs_f64();
        let at_its_percentile = |judged: Quantile, measured: &TaskMeasurement| {
            let same = |t: &&TaskMeasurement| (&t.vm, &t.task) == (&measured.vm, &measured.task);
            let of_window = |tasks: &Vec<TaskMeasurement>| {
                let task = tasks.iter().find(same)?;
                Some(task.histogram.quantile(judged.percentile)?.value)
            };
            let values: Vec<Nanos> = apart.iter().filter_map(of_window).collect();
            Quantile {
                low: values.iter().copied().fold(judged.low, Nanos::min),
                high: values.iter().copied().fold(judged.high, Nanos::max),
                ..judged
            }
        };
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
                    judged: verdict.judged.map(|judged| at_its_percentile(judged, measured)),
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
        let canary = canary_summary(&measurement.canary);
        let late = canary.p99 > limit;
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
            rounds,
            noise_floor: None,
            tasks,
            background: measurement.background,
            canary,
            machine: measurement.machine,
            disturbed: late.then(|| format!("canary p99 {} above {limit}", canary.p99)),
        }
    }
}

/// Settings without I/O priorities.
#[must_use]
pub fn plain(settings: rtvirtio_spec::settings::Settings) -> SchemeSettings {
    SchemeSettings { settings, ioprio: BTreeMap::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_fits_the_load_into_the_room_that_idle_guests_leave() {
        let of = |busy, idle, room| fitting_scale(Scale::new(10), busy, idle, room).get();
        // 0.4 cores at a tenth: 4.0 in all, of which 1.0 fit; 0.45 do at the next scale that fio can issue.
        assert_eq!(of(0.6, 0.2, 1.2), 4);
        assert_eq!(of(0.75, 0.2, 1.2), 10);
        // A host that carries it as it is.
        assert_eq!(of(0.3, 0.2, 19.2), 1);
        // Idle guests take all: as slow as there is.
        assert_eq!(of(2.0, 1.2, 1.2), 100);
        // Less than idle is noise.
        assert_eq!(of(0.1, 0.2, 1.2), 1);
    }
}
