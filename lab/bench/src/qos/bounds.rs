//! What `rtvirtio plan` says of a case's tasks on the data plane, to be held against what they did.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use rtvirtio_cases::{Case, Neighbour, Scale, Tier};
use rtvirtio_planner::{FoundDevice, Model};
use rtvirtio_spec::profile::Profile;
use rtvirtio_spec::settings::Knobs;
use rtvirtio_spec::specification::{Backend, Device};
use rtvirtio_units::{DeviceName, DiskName, Nanos};

use super::cell::Task;

/// The bounds of a case's tasks by the profile of its device.
pub(super) struct Bounds(Vec<(String, Option<Nanos>)>);

impl Bounds {
    /// Of the percentiles that are judged in such a window.
    ///
    /// # Errors
    /// The profile is not one that a plan can be made with.
    pub(super) fn of(case: Case, tier: Tier, window: Duration, profile: &Profile) -> Result<Self> {
        let device = Device {
            name: DeviceName::new("scratch")?,
            path: "/dev/scratch".into(),
            profile: "profile.json".into(),
        };
        let window = Nanos::from_secs_f64(window.as_secs_f64());
        let (neighbour, root) = (Neighbour::Writer, Path::new(""));
        let mut specification = rtvirtio_cases::specification(
            case,
            tier,
            neighbour,
            window,
            device.clone(),
            root,
            Scale::ONE,
        );
        specification.data_plane = Some(PathBuf::from("/run/rtvirtio/control.sock"));
        for vm in &mut specification.vms {
            // A data plane's disks have one name each.
            let name = DiskName::new(vm.name.as_str())?;
            vm.backend = Backend::VhostUser;
            vm.disks.iter_mut().for_each(|disk| disk.name = name.clone());
            vm.tasks.iter_mut().for_each(|task| task.disk = name.clone());
        }
        let identity = profile.device.clone();
        let model = Model::Structural;
        let found = FoundDevice { profile, identity, model, schedulers: None };
        let found = [(device.name, found)];
        let plan = rtvirtio_planner::plan(&specification, &found.into(), &Knobs::default())?;
        let bound = |promise: rtvirtio_spec::plan::TaskPromise| {
            (format!("{}.{}", promise.vm, promise.task), promise.bound)
        };
        Ok(Self(plan.tasks.into_iter().map(bound).collect()))
    }

    /// Notes a task's bound.
    pub(super) fn note(&self, task: &mut Task) {
        let own = self.0.iter().find(|(name, _)| *name == task.name);
        task.bound_us = own.and_then(|(_, bound)| Some(bound.as_ref()?.get() as f64 / 1e3));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_the_tasks_at_the_percentile_that_is_judged() {
        let profile = include_str!("../../../../docs/results/strict/profile.json");
        let profile: Profile = serde_json::from_str(profile).unwrap();
        let case: Case = "2xM+H".parse().unwrap();
        let bounds = |seconds| {
            let window = Duration::from_secs(seconds);
            let of = Bounds::of(case, Tier::Strict, window, &profile).unwrap().0;
            of.into_iter().map(|(name, bound)| (name, bound.unwrap())).collect::<Vec<_>>()
        };
        let (short, long) = (bounds(20), bounds(220));
        let mut names: Vec<&str> = short.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["vm0.heavy", "vm0.medium", "vm1.heavy", "vm1.medium"]);
        assert!(
            long.iter().zip(&short).all(|(long, short)| long.1 >= short.1),
            "{long:?} {short:?}"
        );
        assert!(
            long.iter().zip(&short).any(|(long, short)| long.1 > short.1),
            "{long:?} {short:?}"
        );
    }
}
