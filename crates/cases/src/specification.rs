//! A case as a specification.

use std::path::Path;

use rtvirtio_spec::specification::{
    Backend, Device, Disk, Load, Recognise, Specification, Target, Task, Vm,
};
use rtvirtio_units::{Bytes, Confidence, DeviceName, DiskName, Nanos, TaskName, VmName};

use crate::case::Case;
use crate::judge::judged_percentile;
use crate::scale::Scale;
use crate::tier::{Neighbour, Tier};

/// The name of the neighbour's VM.
pub const BACKGROUND_VM: &str = "background";

/// How sure a bound must be, in every case.
const CONFIDENCE: f64 = 0.95;

/// VMs `vm0` (most urgent) to `vm3` with tasks `light`, `medium`, `heavy` as the
/// mix has them, then the neighbour's VM, all on `device` as disk `data`; each
/// in its own cgroup below `cgroup_root`.
///
/// A target's percentile is the one that is judged when the task delivers its
/// full rate for `window` (p99 if even that has too few samples). All of it is as slow as `scale`
/// says.
///
/// # Panics
/// Never: the names and numbers are all constants in range.
#[must_use]
pub fn specification(
    case: Case,
    tier: Tier,
    neighbour: Neighbour,
    window: Nanos,
    device: Device,
    cgroup_root: &Path,
    scale: Scale,
) -> Specification {
    let ranked = (0..case.vms()).map(|rank| {
        let tasks = case.mix().kinds().iter().map(|&kind| {
            let latency = tier.target(case, rank, kind).expect("the rank is of this case");
            let load = scale.load(kind.load());
            let rate = load.iops.map_or(0.0, rtvirtio_units::Iops::get);
            let samples = (rate * window.as_secs_f64()).floor() as u64;
            let target = Target {
                percentile: judged_percentile(samples).unwrap_or(crate::judge::p99()),
                latency: scale.time(latency),
                confidence: Confidence::new(CONFIDENCE).expect("0.95 is a confidence"),
            };
            task(kind.task_name(), load, Some(target))
        });
        vm(&format!("vm{rank}"), tasks.collect(), &device.name, cgroup_root)
    });
    let mut vms: Vec<Vm> = ranked.collect();
    if neighbour == Neighbour::Writer {
        let load = Load {
            iops: None,
            block_size: Bytes::from_kib(128),
            read_fraction: 0.0,
            queue_depth: 64,
        };
        let name = TaskName::new("write").expect("a constant name");
        vms.push(vm(BACKGROUND_VM, vec![task(name, load, None)], &device.name, cgroup_root));
    }
    Specification { data_plane: None, devices: vec![device], vms }
}

fn disk_name() -> DiskName {
    DiskName::new("data").expect("a constant name")
}

fn task(name: TaskName, load: Load, target: Option<Target>) -> Task {
    Task { name, disk: disk_name(), recognise: Recognise::Unrecognised, load, target }
}

fn vm(name: &str, tasks: Vec<Task>, device: &DeviceName, cgroup_root: &Path) -> Vm {
    Vm {
        name: VmName::new(name).expect("a constant name"),
        backend: Backend::Kernel,
        cgroup: cgroup_root.join(name),
        vcpus: None,
        guest_agent: false,
        disks: vec![Disk { name: disk_name(), device: device.clone(), queues: None }],
        tasks,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn device() -> Device {
        Device {
            name: DeviceName::new("scratch").unwrap(),
            path: "/dev/loop7".into(),
            profile: "scratch.json".into(),
        }
    }

    pub(crate) fn strict(case: &str, neighbour: Neighbour) -> Specification {
        let case = case.parse().unwrap();
        let window = Nanos::from_millis(30_000);
        let root = Path::new("rtvirtio");
        specification(case, Tier::Strict, neighbour, window, device(), root, Scale::ONE)
    }

    #[test]
    fn specification_of_the_largest_case_has_all_vms_and_tasks() {
        let s = strict("4xL+M+H", Neighbour::Writer);
        let names: Vec<_> = s.vms.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["vm0", "vm1", "vm2", "vm3", "background"]);
        let tasks: Vec<_> = s.vms[2].tasks.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(tasks, ["light", "medium", "heavy"]);
        assert_eq!(s.vms[3].cgroup, Path::new("rtvirtio/vm3"));
        assert_eq!(s.vms[0].disks[0].name.as_str(), "data");
        assert_eq!(s.vms[0].device_of(&s.vms[0].tasks[0]).as_str(), "scratch");
    }

    #[test]
    fn window_of_30_s_judges_p99_for_light_and_p999_for_the_others() {
        let s = strict("1xL+M+H", Neighbour::None);
        let targets: Vec<_> = s.vms[0].tasks.iter().map(|t| t.target.unwrap()).collect();
        let percentiles: Vec<_> = targets.iter().map(|t| t.percentile.get()).collect();
        assert_eq!(percentiles, [99.0, 99.9, 99.9]);
        let latencies: Vec<_> = targets.iter().map(|t| t.latency.as_millis_f64()).collect();
        assert_eq!(latencies, [15.0, 10.0, 10.0]);
    }

    #[test]
    fn longer_window_judges_a_higher_percentile() {
        let case = "1xL+M+H".parse().unwrap();
        // 100 s of L are 10,000 requests: 10 beyond p99.9. 100 s of H: 150,000, 15 beyond p99.99.
        let window = Nanos::from_millis(100_000);
        let (tier, none) = (Tier::Paper, Neighbour::None);
        let root = Path::new("r");
        let s = specification(case, tier, none, window, device(), root, Scale::ONE);
        let percentiles: Vec<_> =
            s.vms[0].tasks.iter().map(|t| t.target.unwrap().percentile.get()).collect();
        assert_eq!(percentiles, [99.9, 99.9, 99.99]);
    }

    #[test]
    fn scale_divides_rates_and_multiplies_targets() {
        let case = "1xL+M+H".parse().unwrap();
        let window = Nanos::from_millis(30_000);
        let (tier, none, root) = (Tier::Strict, Neighbour::None, Path::new("r"));
        let s = specification(case, tier, none, window, device(), root, Scale::new(4));
        let heavy = &s.vms[0].tasks[2];
        assert_eq!(heavy.load.iops.unwrap().get(), 375.0);
        let target = heavy.target.unwrap();
        assert_eq!(target.latency, Nanos::from_millis(40));
        // 11,250 samples: 11 beyond p99.9.
        assert_eq!(target.percentile.get(), 99.9);
    }

    #[test]
    fn neighbour_is_a_background_vm_that_writes_without_a_target() {
        assert_eq!(strict("1xM", Neighbour::None).vms.len(), 1);
        let s = strict("1xM", Neighbour::Writer);
        let background = &s.vms[1];
        assert!(background.is_background() && !s.vms[0].is_background());
        assert_eq!(background.tasks[0].name.as_str(), "write");
        let load = background.tasks[0].load;
        assert_eq!((load.block_size.get(), load.queue_depth), (131_072, 64));
        assert_eq!((load.iops, load.read_fraction), (None, 0.0));
    }
}
