//! Which probes are made, in which order, until there are enough.

use rtvirtio_spec::profile::{IoCostFit, Response};
use rtvirtio_units::Bytes;

use super::*;

pub(super) const CAPACITY: Capacity = Capacity {
    iops_4k: 16_000.0,
    write_throughput: BytesPerSecond::from_megabytes(370),
    response_4k: RESPONSE,
    response_128k: RESPONSE,
};
const RESPONSE: Response = Response {
    mean: Nanos::from_micros(300),
    p50: Nanos::from_micros(290),
    p99: Nanos::from_micros(560),
    p999: Nanos::from_micros(700),
};

/// A probe of 5.2 s whose tasks delivered this part of their rates, each request in 1 ms.
fn run(setting: ProbeSetting, delivered: f64) -> ProbeRun {
    let (_, vms, writer) = setting;
    let task = |vm, iops: f64| {
        let mut histogram = Histogram::new();
        histogram.record(Nanos::from_millis(1), (iops * 5.2 * delivered) as u64);
        ProbeTask { vm, iops, histogram }
    };
    let of_vm = |vm| [100.0, 500.0, 1500.0].map(|iops| task(vm, iops));
    let cap = match writer {
        Writer::Capped(part) => Some(BytesPerSecond::new((370e6 * part) as u64)),
        _ => None,
    };
    ProbeRun {
        setting,
        seconds: 5.2,
        cap,
        writer_throughput: BytesPerSecond::default(),
        tasks: (0..u32::from(vms)).flat_map(of_vm).collect(),
        canary: Nanos::from_micros(100),
        others: None,
    }
}

/// All probes of a calibration whose tasks deliver `delivered`, at most `most` of them.
fn all(depth: Depth, delivered: f64, most: usize) -> Vec<ProbeRun> {
    let mut runs = Vec::new();
    while let Some(setting) =
        next(depth, &Room::whole(None), &runs, &CAPACITY).filter(|_| runs.len() < most)
    {
        runs.push(run(setting, delivered));
    }
    runs
}

#[test]
fn quick_calibration_ends_once_a_bound_beside_a_capped_writer_has_its_runs() {
    let runs = all(Depth::Quick, 1.0, 100);
    let capped = runs.iter().filter(|r| matches!(r.setting.2, Writer::Capped(_))).count();
    // 12 task-runs a probe, of which 59 are needed; the base before, a scheduler after.
    assert_eq!((capped, runs.len()), (5, 8));
    assert!(matches!(runs[0].setting, (Scheduler::None, 1, Writer::Absent)));
    let (tasks, vms) = fit::scores(&runs, &CAPACITY, Regime::Bursting);
    assert_eq!((tasks.len(), vms.len()), (60, 20));
    assert_eq!(lack(Regime::Bursting, &tasks, &vms, TOGETHER), None);
}

#[test]
fn calibration_that_is_cut_short_has_a_bound_on_one_task_in_both_regimes_that_plans_choose() {
    // The base, and as many probes of each as 19 runs take at 12 a probe.
    let runs = all(Depth::Full, 1.0, 2 + 2 + 2);
    for regime in CHOSEN_REGIMES {
        let (tasks, vms) = fit::scores(&runs, &CAPACITY, regime);
        assert_eq!(lack(regime, &tasks, &vms, 1), None, "{regime:?}");
        assert!(lack(regime, &tasks, &vms, TOGETHER).is_some(), "{regime:?}");
    }
}

#[test]
fn probes_go_on_where_tasks_deliver_too_little_to_show_a_percentile() {
    // L shows nothing at half its rate: eight task-runs a probe, but VM-runs count too.
    assert_eq!(all(Depth::Quick, 0.5, 100).len(), 8);
    // At a hundredth nothing does: they go on until the time is up.
    assert_eq!(all(Depth::Quick, 0.01, 50).len(), 50);
}

#[test]
fn full_calibration_has_a_bound_in_every_regime_that_a_plan_may_choose() {
    let runs = all(Depth::Full, 1.0, 100);
    for regime in [Regime::Bursting, Regime::Flowing, Regime::Flooded] {
        let (tasks, vms) = fit::scores(&runs, &CAPACITY, regime);
        assert_eq!(lack(regime, &tasks, &vms, TOGETHER), None, "{regime:?}");
    }
    assert!(runs.len() <= 24, "{}", runs.len());
}

#[test]
fn device_that_keeps_its_scheduler_is_probed_under_no_other() {
    for (kept, most) in [(Scheduler::None, 20), (Scheduler::Bfq(Bfq::DEFAULT), 40)] {
        let mut runs = Vec::new();
        while let Some(setting) = next(Depth::Full, &Room::whole(Some(kept)), &runs, &CAPACITY) {
            assert_eq!(setting.0, kept);
            runs.push(run(setting, 1.0));
            assert!(runs.len() <= most, "{kept}: goes on for ever");
        }
        assert!(runs.len() >= 12, "{kept}: {}", runs.len());
    }
}

#[test]
fn beside_others_probes_are_as_small_as_they_leave_room_for() {
    let room = Room { vms: 2, caps: 0.2, may_flood: false, ..Room::whole(None) };
    let mut runs = Vec::new();
    while let Some(setting) = next(Depth::Full, &room, &runs, &CAPACITY) {
        let (_, vms, writer) = setting;
        assert!(vms <= 2 && writer != Writer::Unlimited, "{setting:?}");
        assert!(
            !matches!(writer, Writer::Capped(part) if part > 0.2 * super::room::LARGEST_CAP + 1e-9)
        );
        runs.push(run(setting, 1.0));
        assert!(runs.len() <= 60, "goes on for ever");
    }
    for regime in [Regime::Bursting, Regime::Flowing] {
        let (tasks, vms) = fit::scores(&runs, &CAPACITY, regime);
        assert_eq!(lack(regime, &tasks, &vms, TOGETHER), None, "{regime:?}");
    }
    let text = room.describe(Depth::Full).unwrap();
    assert!(text.contains("2 VMs") && text.contains("3.0 %"), "{text}");
}

#[test]
fn probe_that_disturbs_others_comes_after_the_rest_and_is_dropped_in_the_end() {
    let mut room = Room { may_flood: false, ..Room::whole(Some(Scheduler::None)) };
    let mut runs: Vec<ProbeRun> = BASE.settings.iter().map(|&setting| run(setting, 1.0)).collect();
    let first = next(Depth::Full, &room, &runs, &CAPACITY).unwrap();
    room.stop(first);
    let second = next(Depth::Full, &room, &runs, &CAPACITY).unwrap();
    assert_ne!(first, second);
    for _ in 1..TRIES {
        room.stop(first);
    }
    for _ in 0..60 {
        let Some(setting) = next(Depth::Full, &room, &runs, &CAPACITY) else { return };
        assert_ne!(setting, first);
        runs.push(run(setting, 1.0));
    }
    panic!("goes on for ever");
}

#[test]
fn fit_of_probes_beside_others_is_a_profile() {
    for iops in [500.0, 8_000.0, 15_000.0] {
        let runs: Vec<ProbeRun> = all(Depth::Quick, 1.0, 100)
            .into_iter()
            .zip([1.0, 0.5, 1.4].into_iter().cycle())
            .map(|(run, part)| {
                let (block_size, read_fraction) = (Bytes::from_kib(4), 0.7);
                let others = OtherLoad { iops: iops * part, block_size, read_fraction };
                ProbeRun { others: Some(others), ..run }
            })
            .collect();
        let identity = DeviceIdentity {
            kind: "loop".to_owned(),
            model: "disk".to_owned(),
            serial: None,
            size: Bytes::new(1 << 30),
            rotational: false,
        };
        let (kernel, date) = ("6.18".to_owned(), "2026-11-27T00:00:00Z".to_owned());
        let profile = fit::fit(identity, kernel, MeasuredAt::Host, date, CAPACITY, &runs);
        profile.check().unwrap();
    }
}

#[test]
fn resumed_calibration_makes_the_same_probes_as_one_that_was_not_interrupted() {
    let whole = all(Depth::Full, 1.0, 100);
    for kept in 0..whole.len() {
        let runs = &whole[..kept];
        assert_eq!(
            next(Depth::Full, &Room::whole(None), runs, &CAPACITY),
            Some(whole[kept].setting)
        );
    }
}

#[test]
fn what_a_profile_lacks_says_how_many_probes_it_takes() {
    let lacks = lack(Regime::Bursting, &[0.0; 24], &[0.0; 8], TOGETHER).unwrap();
    assert_eq!((lacks.has, lacks.needs, lacks.probes), (24, 59, 3));
    let text = lacks.to_string();
    assert!(text.contains("24 of the 59 runs") && text.contains("3 more probes"), "{text}");
    // 19 whole VMs do as well as 59 tasks.
    assert_eq!(lack(Regime::Bursting, &[0.0; 20], &[0.0; 19], TOGETHER), None);
}

/// A calibration of a device with iocost, under which tails are so many ms beside so many VMs, and tasks have this part of their rates.
fn under_iocost(tail: impl Fn(u8) -> u64, delivered: impl Fn(u8) -> f64) -> Vec<ProbeRun> {
    let room = Room { has_iocost: true, ..Room::whole(None) };
    let mut runs: Vec<ProbeRun> = Vec::new();
    while let Some(setting) = next(Depth::Full, &room, &runs, &CAPACITY) {
        let mut done = run(setting, 1.0);
        if let (Scheduler::IoCost(cost), vms, _) = setting {
            // Three times 300 µs, and a third more than that.
            assert_eq!((cost.read_latency_us, cost.write_latency_us), (900, 400));
            done = run(setting, delivered(vms));
            for task in &mut done.tasks {
                let n = task.histogram.count();
                task.histogram = Histogram::new();
                task.histogram.record(Nanos::from_millis(tail(vms)), n);
            }
            done.writer_throughput = BytesPerSecond::from_megabytes(120);
        }
        runs.push(done);
        assert!(runs.len() < 80, "goes on for ever");
    }
    runs
}

fn fitted(runs: &[ProbeRun]) -> Profile {
    let identity = DeviceIdentity {
        kind: "loop".to_owned(),
        model: "disk".to_owned(),
        serial: None,
        size: Bytes::new(1 << 30),
        rotational: false,
    };
    let (kernel, date) = ("6.18".to_owned(), "2026-11-27T00:00:00Z".to_owned());
    let profile = fit::fit(identity, kernel, MeasuredAt::Host, date, CAPACITY, runs);
    profile.check().unwrap();
    assert!(missing(&profile, Depth::Full).is_empty(), "{:?}", missing(&profile, Depth::Full));
    profile
}

/// What iocost is known to do: by the part of the device that VMs use, the wait, ms.
fn waits(profile: &Profile) -> Vec<(f64, f64)> {
    let of =
        |fit: &IoCostFit| ((fit.utilisation * 1e3).round() / 1e3, fit.wait.as_millis_f64().round());
    profile.structural.iocost.iter().map(of).collect()
}

#[test]
fn iocost_is_fitted_beside_each_number_of_vms() {
    let runs = under_iocost(|vms| [2, 2, 6, 16][usize::from(vms) - 1], |_| 1.0);
    let (tasks, vms) = fit::scores(&runs, &CAPACITY, Regime::Controlled);
    assert_eq!(lack(Regime::Controlled, &tasks, &vms, TOGETHER), None);
    let profile = fitted(&runs);
    // A VM uses 2,100 of 16,000 requests a second. The tasks alone take 1 ms.
    assert_eq!(waits(&profile), [(0.131, 1.0), (0.263, 1.0), (0.394, 5.0), (0.525, 15.0)]);
    let most = profile.structural.iocost.last().unwrap();
    // Four VMs use 0.525 of the device, so the writer had 120 of 176 MB/s.
    assert!((0.6..0.75).contains(&most.left), "{most:?}");
    let wait = |used| profile.structural.iocost(most.setting, used).map(|fit| fit.wait);
    assert_eq!(wait(0.5), Some(most.wait));
    assert_eq!(wait(0.6), None);
    assert_eq!(wait(0.0), wait(0.13));
    let bound = profile.residuals.structural[&Regime::Controlled].last().unwrap().exp();
    assert!(bound < 1.2, "{bound}");
}

#[test]
fn iocost_is_not_to_be_chosen_beside_vms_that_do_not_come_to_their_rates() {
    let runs = under_iocost(|_| 2, |vms| if vms == 4 { 0.7 } else { 1.0 });
    assert_eq!(runs.iter().filter(|run| run.setting.1 == 4 && !run.delivers()).count(), 1);
    let profile = fitted(&runs);
    assert_eq!(waits(&profile), [(0.131, 1.0), (0.263, 1.0), (0.394, 1.0)]);
    assert!(fitted(&under_iocost(|_| 2, |_| 0.7)).structural.iocost.is_empty());
}

#[test]
fn iocost_that_starves_fewer_vms_is_not_to_be_chosen_beside_more() {
    let runs = under_iocost(|_| 2, |vms| if vms == 2 { 0.03 } else { 1.0 });
    assert_eq!(waits(&fitted(&runs)), [(0.131, 1.0)]);
    // It is tried once beside two, and no more beside three and four then.
    let beside = |vms| {
        let under = |run: &&ProbeRun| matches!(run.setting.0, Scheduler::IoCost(_));
        runs.iter().filter(under).filter(|run| run.setting.1 == vms).count()
    };
    assert_eq!([beside(2), beside(3), beside(4)], [1, 0, 1]);
}
