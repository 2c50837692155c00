//! A device under test, whose VMs are cgroups or guests in them.
//!
//! A [`Testbed`] is `calibrate`'s, and the guests that run on it.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use rtvirtio_calibrate::load::{
    CellLoad, MachineSample, Measurement, Place, RAMP, TaskMeasurement,
};
use rtvirtio_calibrate::testbed::{self as calibrate, CGROUP_ROOT, DeviceUnderTest, GUEST_FILES};
use rtvirtio_cases::{Case, Neighbour, Scale, Scheme, SchemeSettings, Tier};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::specification::{Specification, Vm};
use rtvirtio_units::{BytesPerSecond, Iops, Nanos, VmName};

use crate::cpu;
use crate::curve::Curve;
use crate::guests::{self, Accelerator, GuestImage, Guests, Scheduled, Served, with_own_disks};
use crate::neighbour::Neighbour::DeepWriter;
use crate::tasks::Plan;
use crate::trial::{Sharing, Trial};

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
/// The part of all CPUs from which on a trial sees no load, since others take what is left.
const ALL_BUSY: f64 = 0.95;
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

/// What there is for a load.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// CPUs that this process may use; others use them too.
    cpus: f64,
    /// CPUs' worth of time that its cgroup may have, if that is bounded.
    quota: Option<f64>,
}

impl Room {
    /// Whether a load leaves enough: with it `busy` CPUs are, without it `idle`.
    fn holds(&self, busy: f64, idle: f64) -> bool {
        let within = self.quota.is_none_or(|quota| busy - idle <= GUESTS_CPU * quota);
        busy <= GUESTS_CPU * self.cpus && within
    }

    /// The smallest scale at which it does, of a load with which `busy` CPUs are at `scale`.
    fn fitting_scale(&self, scale: Scale, busy: f64, idle: f64) -> Scale {
        let fits = |room| fitting_scale(scale, busy, idle, room).get();
        // What others do takes nothing from the quota.
        let of_quota = self.quota.map(|quota| fits(idle + GUESTS_CPU * quota));
        Scale::new(fits(GUESTS_CPU * self.cpus).max(of_quota.unwrap_or(1)))
    }
}

/// A device under test, whose VMs are cgroups or guests in them.
pub struct Testbed {
    // Before the testbed: guests end before their cgroups go.
    guests: Option<Guests>,
    /// How slow guests were found to have to run; `None`: their accelerator's.
    scale: Option<Scale>,
    testbed: calibrate::Testbed,
}

impl Testbed {
    /// Takes `device`, which results call `label`. Cleans up after a killed run first.
    ///
    /// # Errors
    /// Without root, or while another testbed is in use.
    pub fn new(device: &Path, label: &str) -> Result<Self> {
        let testbed = calibrate::Testbed::new(device, label)?;
        Ok(Self { guests: None, scale: None, testbed })
    }

    /// Boots a guest for each VM of `case` and for the one that writes; from now on cells run in
    /// them, all of it as slow as [`Testbed::scale`] says. Guests that run are ended first.
    ///
    /// With a `data_plane`, a program and the device's service curve, `program serve` serves their disks from
    /// the device: each disk with targets is promised its tasks' rates.
    ///
    /// # Errors
    /// As `Guests::boot_all`, and if the server does not start.
    pub fn boot_guests(
        &mut self,
        (image, accelerator): &(GuestImage, Accelerator),
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
            device: self.device().path.clone(),
            size: self.identity()?.size,
            cgroup_mount: self.cgroup_mount().to_owned(),
            directory: GUEST_FILES.into(),
        };
        let mut guests = Guests::new(image, *accelerator, &all, place)?;
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
    pub const fn guests(&self) -> Option<&Guests> {
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
    pub fn stop_guest(&mut self, vm: &VmName) {
        if let Some(guests) = &mut self.guests {
            guests.stop(vm);
        }
    }

    /// Finds out how slow the evaluation has to run in the guests for the tasks of `case` to leave this
    /// host some room: at the scale that is returned, and set, they and a writer within the hand
    /// setting's cap take no more than [`GUESTS_CPU`] of its CPUs, and of the CPU time that this
    /// process's cgroup may have. A trial of a few seconds at a
    /// small part of the load tells what it costs; another one at the scale found confirms it.
    ///
    /// # Errors
    /// As [`Testbed::measure`]; without guests, and where others leave no CPU idle.
    pub fn find_scale(&mut self, case: Case, interrupted: &Interrupted) -> Result<Scale> {
        ensure!(self.guests_run(), "only guests are given a scale");
        let cpus = cpu::usable()?.len() as f64;
        let room = Room { cpus, quota: cpu::quota() };
        let longest = TRIAL_IDLE + CellLoad::duration(TRIAL) * TRIALS as u32;
        eprintln!("Trials of what the load costs in the guests: up to {} s", longest.as_secs());
        let idle = MachineSample::now()?;
        wait(TRIAL_IDLE, interrupted)?;
        let idle = idle.since()?.busy_cores;
        ensure!(
            idle < ALL_BUSY * cpus,
            "{idle:.1} of {cpus} CPUs are busy while the guests do nothing, so that a trial tells nothing of what their \
             load costs: end what else runs here, and try again"
        );
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
            let fits = room.fitting_scale(scale, busy, idle);
            if fits == scale || (scale != TRIAL_SCALE && room.holds(busy, idle)) {
                break;
            }
            scale = fits;
        }
        self.scale = Some(scale);
        Ok(scale)
    }

    /// Has guests run as slow as [`Testbed::find_scale`] found before.
    pub const fn set_scale(&mut self, scale: Scale) {
        self.scale = Some(scale);
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
        let device = &self.device().path;
        let trial = Trial {
            vms: &plans,
            background: background.first().map(|_| DeepWriter.background()),
            warm_up: RAMP,
            ..Trial::new(program, device, Sharing::Schedule(curve), window)
        };
        let recorded = trial.record(interrupted)?;
        let tasks = vms.iter().zip(recorded.tasks).flat_map(|(vm, records)| {
            vm.tasks.iter().zip(records).map(|(task, record)| TaskMeasurement {
                vm: vm.name.clone(),
                task: task.name.clone(),
                timeline: record.timeline(),
                histogram: record.histogram.coarse(),
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
}

impl DeviceUnderTest for Testbed {
    fn testbed(&self) -> &calibrate::Testbed {
        &self.testbed
    }

    fn has_iocost(&self) -> bool {
        self.testbed.has_iocost()
    }

    fn scale(&self) -> Scale {
        let of_accelerator = || Some(self.guests.as_ref()?.accelerator().scale());
        self.scale.or_else(of_accelerator).unwrap_or(Scale::ONE)
    }

    fn measured_at(&self) -> MeasuredAt {
        match self.guests {
            Some(_) => MeasuredAt::Guest,
            None => MeasuredAt::Host,
        }
    }

    fn specification(
        &self,
        case: Case,
        tier: Tier,
        neighbour: Neighbour,
        window: Nanos,
    ) -> Specification {
        let (device, root) = (self.device().clone(), Path::new(CGROUP_ROOT));
        let scale = self.scale();
        let specification =
            rtvirtio_cases::specification(case, tier, neighbour, window, device, root, scale);
        match self.guests {
            Some(_) => with_own_disks(specification),
            None => specification,
        }
    }

    fn measure(
        &self,
        specification: &Specification,
        scheme: &SchemeSettings,
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        let cgroups = self.testbed.cgroups();
        let place: &dyn Place = self.guests.as_ref().map_or(&cgroups, |guests| guests);
        self.testbed.measure_at(place, specification, scheme, window, interrupted)
    }
}

impl Deref for Testbed {
    type Target = calibrate::Testbed;

    fn deref(&self) -> &calibrate::Testbed {
        &self.testbed
    }
}

impl DerefMut for Testbed {
    fn deref_mut(&mut self) -> &mut calibrate::Testbed {
        &mut self.testbed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_fits_into_the_quota_of_its_cgroup_whatever_others_do() {
        let scale = |quota, busy, idle| {
            Room { cpus: 16.0, quota }.fitting_scale(Scale::new(10), busy, idle).get()
        };
        // 0.3 CPUs at a tenth, beside others with 4: 3 in all, of 9.6.
        assert_eq!(scale(None, 4.3, 4.0), 1);
        // Of 1.2 of two CPUs' worth of time 3.0 fit at a third; no more than the CPUs themselves have room for.
        assert_eq!(scale(Some(2.0), 4.3, 4.0), 3);
        assert_eq!(scale(Some(16.0), 9.3, 9.0), scale(None, 9.3, 9.0));
        let holds = |quota, busy| Room { cpus: 16.0, quota }.holds(busy, 4.0);
        assert!(holds(None, 6.0) && holds(Some(4.0), 6.0) && !holds(Some(2.0), 6.0));
        assert!(!holds(Some(16.0), 9.7));
    }

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
