//! Random sets of VMs: a function of the seed, the device and the admission test, nothing else.
//!
//! A set has 2 to 6 VMs with 1 to 3 tasks each. A task keeps one request in flight, of 4 to 64 KiB,
//! 70 % reads; its rate and its target are log-uniform. All of a set's rates are then scaled to a
//! drawn *utilisation*, the share of the device's channels that the requests need; no rate leaves
//! what a task can do alone on the idle device and what a window can judge: where that is in the way,
//! a task is added. A third of the sets are *near*: their rates are 0.85 to 1.15 of the largest with
//! which the test still admits them, the *boundary*. So each set has its own source of random
//! numbers, and another test changes the near ones alone.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_qos::{Device, Kind};
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Of all sets.
const SEED: u64 = 20_261_123;
/// Sets of the campaign, of which each third is near the boundary.
pub(crate) const SETS: u32 = 60;
/// Most VMs of a set, and most tasks of a VM.
const VMS: usize = 6;
const TASKS: usize = 3;
/// Most tasks of a set.
pub(crate) const MAX_TASKS: usize = VMS * TASKS;
const BLOCKS_KIB: [u32; 5] = [4, 8, 16, 32, 64];
/// Of what is drawn, requests a second.
const RATES: (f64, f64) = (50.0, 1_500.0);
/// In a window of 20 s with 0.95 of this rate there are 1,000 requests, the fewest with a p99.
pub(crate) const MIN_RATE: f64 = 53.0;
const TARGETS_MS: (f64, f64) = (3.0, 40.0);
const UTILISATIONS: (f64, f64) = (0.6, 1.3);
const NEAR: (f64, f64) = (0.85, 1.15);
/// What a request takes on the idle device beside its cost.
const AROUND: Nanos = Nanos::from_micros(100);
/// Of a task's time, what its requests may take on the idle device.
const BUSY: f64 = 0.8;
/// Sets that are drawn for a near one, until one can be scaled to where it should be.
const ATTEMPTS: u32 = 1_000;

/// A task, and what it is promised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Its VM, from 0.
    pub vm: usize,
    /// Bytes of a request, KiB.
    pub block_kib: u32,
    /// Requests a second, a whole number.
    pub iops: f64,
    /// The target, µs.
    pub target_us: u64,
}

impl Task {
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes::from_kib(u64::from(self.block_kib))
    }

    /// What its requests need of the device's time, as channels.
    fn channels(&self, device: &Device) -> f64 {
        self.iops * device.cost(Kind::Read, self.bytes()).as_secs_f64()
    }

    /// The highest rate that it can have.
    fn most(&self, device: &Device) -> f64 {
        let request = device.cost(Kind::Read, self.bytes()).saturating_add(AROUND);
        (BUSY / request.as_secs_f64()).min(RATES.1).floor()
    }
}

/// A set.
#[derive(Debug, Clone, PartialEq)]
pub struct Set {
    /// From 0.
    pub(crate) number: u32,
    pub(crate) tasks: Vec<Task>,
    /// The largest factor on its rates with which it is admitted; none: with no factor.
    pub(crate) boundary: Option<f64>,
}

/// What the tasks need of the device, 1 for all channels at all times.
pub(crate) fn utilisation(device: &Device, tasks: &[Task]) -> f64 {
    let channels: f64 = tasks.iter().map(|task| task.channels(device)).sum();
    channels / f64::from(device.channels)
}

/// All sets.
pub(crate) fn sets(device: &Device, is_admitted: &dyn Fn(&[Task]) -> bool) -> Vec<Set> {
    let set = |number| {
        let mut random = Pcg64Mcg::seed_from_u64(SEED << 8 | u64::from(number));
        let draw = |random: &mut Pcg64Mcg| {
            let utilisation = random.random_range(UTILISATIONS.0..UTILISATIONS.1);
            let tasks = drawn(device, random);
            scaled_to(device, tasks, utilisation, random)
        };
        let near = |random: &mut Pcg64Mcg| {
            let tasks = draw(random);
            let factor = boundary(&tasks, is_admitted)? * random.random_range(NEAR.0..NEAR.1);
            let tasks = times(&tasks, factor);
            let fits = |task: &Task| (MIN_RATE..=task.most(device)).contains(&task.iops);
            let used = utilisation(device, &tasks);
            let is_within = (UTILISATIONS.0..=UTILISATIONS.1).contains(&used);
            (is_within && tasks.iter().all(fits)).then_some(tasks)
        };
        let tasks = if number % 3 == 2 {
            (0..ATTEMPTS).find_map(|_| near(&mut random))
        } else {
            Some(draw(&mut random))
        };
        // A test without such a boundary has no near sets.
        let tasks = tasks.unwrap_or_else(|| draw(&mut random));
        let boundary = boundary(&tasks, is_admitted);
        Set { number, tasks, boundary }
    };
    (0..SETS).map(set).collect()
}

fn log_uniform(random: &mut Pcg64Mcg, (low, high): (f64, f64)) -> f64 {
    low * (high / low).powf(random.random::<f64>())
}

fn drawn(device: &Device, random: &mut Pcg64Mcg) -> Vec<Task> {
    let vms = random.random_range(2..=VMS);
    let mut tasks = Vec::new();
    for vm in 0..vms {
        for _ in 0..random.random_range(1..=TASKS) {
            tasks.push(drawn_task(device, vm, random));
        }
    }
    tasks
}

fn drawn_task(device: &Device, vm: usize, random: &mut Pcg64Mcg) -> Task {
    let block_kib = BLOCKS_KIB[random.random_range(0..BLOCKS_KIB.len())];
    let target_us = log_uniform(random, TARGETS_MS) * 1e3;
    let mut task = Task { vm, block_kib, iops: 0.0, target_us: target_us as u64 };
    task.iops = log_uniform(random, (RATES.0, task.most(device)));
    task
}

/// The same tasks at rates that need `wanted` of the device, and more of them if they cannot.
fn scaled_to(
    device: &Device,
    mut tasks: Vec<Task>,
    wanted: f64,
    random: &mut Pcg64Mcg,
) -> Vec<Task> {
    loop {
        // Rates that have come to an end of their range leave the rest to the others.
        for _ in 0..64 {
            let factor = wanted / utilisation(device, &tasks);
            for task in &mut tasks {
                task.iops = (task.iops * factor).clamp(MIN_RATE, task.most(device));
            }
        }
        tasks.iter_mut().for_each(|task| task.iops = task.iops.round());
        if utilisation(device, &tasks) > wanted * 0.99 || tasks.len() == MAX_TASKS {
            tasks.sort_by_key(|task| task.vm);
            return tasks;
        }
        let of = |vm| tasks.iter().filter(|task| task.vm == vm).count();
        let vm = (0..VMS).find(|&vm| (1..TASKS).contains(&of(vm)) || of(vm) == 0).unwrap_or(0);
        tasks.push(drawn_task(device, vm, random));
    }
}

/// The same tasks at rates that are `factor` times as high, whole numbers.
fn times(tasks: &[Task], factor: f64) -> Vec<Task> {
    let scaled = |task: &Task| Task { iops: (task.iops * factor).round().max(1.0), ..task.clone() };
    tasks.iter().map(scaled).collect()
}

/// The largest factor on all rates with which the tasks are admitted, to 0.1 %.
fn boundary(tasks: &[Task], is_admitted: &dyn Fn(&[Task]) -> bool) -> Option<f64> {
    let (mut low, mut high) = (1.0 / 16.0, 16.0);
    if !is_admitted(&times(tasks, low)) {
        return None;
    }
    while high / low > 1.001 {
        let middle = f64::sqrt(low * high);
        if is_admitted(&times(tasks, middle)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference device's.
    const DEVICE: Device = Device {
        channels: 4,
        request: Nanos::new(212_500),
        kib: Nanos::new(9_375),
        flush: Nanos::new(250_000),
    };

    fn all() -> Vec<Set> {
        sets(&DEVICE, &|tasks| utilisation(&DEVICE, tasks) <= 0.9)
    }

    #[test]
    fn same_seed_gives_the_same_sets_and_another_test_changes_the_near_ones_alone() {
        assert_eq!(all(), all());
        let others = sets(&DEVICE, &|tasks| utilisation(&DEVICE, tasks) <= 0.8);
        for (one, other) in all().iter().zip(&others) {
            assert_eq!(one.tasks == other.tasks, one.number % 3 != 2, "{}", one.number);
        }
    }

    #[test]
    fn sets_have_the_sizes_rates_and_utilisations_that_were_asked_for() {
        let sets = all();
        assert_eq!(sets.len(), 60);
        for set in &sets {
            let used = utilisation(&DEVICE, &set.tasks);
            assert!((0.59..=1.31).contains(&used), "{}: {used}", set.number);
            let vms = set.tasks.iter().map(|task| task.vm).max().unwrap() + 1;
            assert!((2..=6).contains(&vms));
            for vm in 0..vms {
                let tasks = set.tasks.iter().filter(|task| task.vm == vm).count();
                assert!((1..=3).contains(&tasks), "{}: {tasks} tasks of VM {vm}", set.number);
            }
            for task in &set.tasks {
                assert!((MIN_RATE..=task.most(&DEVICE)).contains(&task.iops), "{task:?}");
                assert!((3_000..=40_000).contains(&task.target_us), "{task:?}");
                assert_eq!(task.iops.fract(), 0.0);
            }
        }
        let blocks = |kib| sets.iter().flat_map(|s| &s.tasks).any(|task| task.block_kib == kib);
        assert!(BLOCKS_KIB.into_iter().all(blocks));
    }

    #[test]
    fn utilisations_are_spread_and_near_sets_are_near_the_boundary_on_both_sides() {
        let sets = all();
        let used = |set: &Set| utilisation(&DEVICE, &set.tasks);
        let (near, spread): (Vec<&Set>, Vec<&Set>) = sets.iter().partition(|s| s.number % 3 == 2);
        // The boundary is at 0.9: 0.765 to 1.035, and rates are whole numbers.
        assert_eq!(near.len(), 20);
        assert!(near.iter().all(|set| (0.75..1.05).contains(&used(set))));
        assert!((5..=15).contains(&near.iter().filter(|set| used(set) <= 0.9).count()));
        let least = spread.iter().map(|set| used(set)).fold(2.0, f64::min);
        let most = spread.iter().map(|set| used(set)).fold(0.0, f64::max);
        assert!(least < 0.65 && most > 1.2, "{least} {most}");
    }

    #[test]
    fn boundary_is_the_largest_factor_that_is_admitted() {
        let task = Task { vm: 0, block_kib: 4, iops: 1_000.0, target_us: 10_000 };
        // 16,000 requests a second fill the device.
        let tasks = vec![task; 4];
        let found = boundary(&tasks, &|tasks| utilisation(&DEVICE, tasks) <= 0.5).unwrap();
        assert!((found - 2.0).abs() < 0.004, "{found}");
        assert_eq!(boundary(&tasks, &|_| false), None);
    }

    #[test]
    fn task_can_do_its_most_alone_on_the_idle_device() {
        let task = |block_kib| Task { vm: 0, block_kib, iops: 1.0, target_us: 1 };
        // 0.8 s of 0.35 ms would be 2,285; of 812.5 + 100 µs.
        assert_eq!(task(4).most(&DEVICE), 1_500.0);
        assert_eq!(task(64).most(&DEVICE), 876.0);
    }
}
