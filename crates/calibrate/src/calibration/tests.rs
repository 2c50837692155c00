//! Which probes are made, in which order, until there are enough.

use rtvirtio_cases::SchemeSettings;
use rtvirtio_spec::profile::{IoCostFit, Response};
use rtvirtio_spec::settings::Knob;
use rtvirtio_units::{Bytes, DeviceName};

use super::*;
use crate::load::Measurement;
use crate::testbed::Testbed;

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
    // At half its rate L still shows a percentile.
    assert_eq!(all(Depth::Quick, 0.5, 100).len(), 8);
    // At less it does not: eight task-runs a probe, and no run of a whole VM.
    assert_eq!(all(Depth::Quick, 0.3, 100).len(), 11);
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

/// A device that others may use, of whose time a calibration then has a fifth. Nothing is measured on it.
struct Shared {
    others: Option<OtherLoad>,
}

impl DeviceUnderTest for Shared {
    fn testbed(&self) -> &Testbed {
        unreachable!("nothing is measured")
    }

    fn scale(&self) -> Scale {
        Scale::ONE
    }

    fn measured_at(&self) -> MeasuredAt {
        MeasuredAt::Host
    }

    fn schedulers(&self) -> Vec<String> {
        ["none", "mq-deadline"].map(str::to_owned).to_vec()
    }

    fn has_iocost(&self) -> bool {
        true
    }

    fn others(&self) -> Option<OtherLoad> {
        self.others
    }

    fn tolerated(&self) -> Option<Nanos> {
        self.others.map(|_| Nanos::from_millis(5))
    }

    fn owed(&self, work: Work) -> Duration {
        self.others.map_or(Duration::ZERO, |_| work.owed(0.2))
    }

    fn specification(&self, _: Case, _: Tier, _: Neighbour, _: Nanos) -> Specification {
        unreachable!("nothing is measured")
    }

    fn measure(
        &self,
        _: &Specification,
        _: &SchemeSettings,
        _: Duration,
        _: &Interrupted,
    ) -> Result<Measurement> {
        unreachable!("nothing is measured")
    }
}

/// Others who use half of the device.
fn others() -> OtherLoad {
    OtherLoad { iops: 8_000.0, block_size: Bytes::from_kib(4), read_fraction: 0.7 }
}

#[test]
fn neighbours_that_come_during_a_calibration_are_given_room() {
    let mut device = Shared { others: None };
    let mut room = Room::beside_others(&device, &CAPACITY);
    let (flood, base) = ((Scheduler::None, 4, Writer::Unlimited), BASE.settings[0]);
    assert!(room.has_iocost && room.fit(flood).is_some(), "{room:?}");
    room.stop(base);
    assert!(!room.give_way(&device, &CAPACITY));
    device.others = Some(others());
    assert!(room.give_way(&device, &CAPACITY));
    let found = Room::beside_others(&device, &CAPACITY);
    assert_eq!(room, Room { stopped: vec![(base, 1)], ..found });
    assert!(room.vms == 2 && room.caps < 0.3 && !room.has_iocost, "{room:?}");
    assert_eq!(room.fit(flood), None);
    assert!(!room.give_way(&device, &CAPACITY));
}

#[test]
fn expected_time_is_that_within_the_limit_and_counts_rests() {
    let (alone, beside) = (Shared { others: None }, Shared { others: Some(others()) });
    let long = Duration::from_secs(3600);
    let whole = planned(&alone, Depth::Full, long, &[]);
    // What idles is of bfq, which this device cannot have.
    assert_eq!(whole, (1 + 29, duration(&alone, Depth::Full)));
    // What is kept is not measured again.
    let kept = [Kept::Capacity(CAPACITY), Kept::Probe(run(BASE.settings[0], 1.0))];
    let rest = planned(&alone, Depth::Full, long, &kept);
    assert_eq!(rest, (28, 28 * Duration::from_millis(7_700)));
    // Of a load that uses half of the device a fifth of the time is 2.5 times its length: 12 runs of 2.5 s, and as many
    // probes of 6.5 s as begin within four minutes.
    let limited = planned(&beside, Depth::Full, Duration::from_secs(240), &[]);
    let time = 12 * Duration::from_millis(6_250) + 11 * Duration::from_millis(16_250);
    assert_eq!(limited, (1 + 11, time));
}

/// Whose profile a test has: a device, its kernel, where and when it was measured.
fn of_a_disk() -> (DeviceIdentity, String, MeasuredAt, String) {
    let identity = DeviceIdentity {
        kind: "loop".to_owned(),
        model: "disk".to_owned(),
        serial: None,
        size: Bytes::new(1 << 30),
        rotational: false,
    };
    (identity, "6.18".to_owned(), MeasuredAt::Host, "2026-11-27T00:00:00Z".to_owned())
}

fn profile_of(runs: &[ProbeRun]) -> Profile {
    let (device, kernel, measured_at, date) = of_a_disk();
    fit::fit(device, kernel, measured_at, date, CAPACITY, runs)
}

#[test]
fn what_is_kept_is_removed_only_once_a_profile_that_can_be_used_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("profile.json");
    let partial = kept::path_beside(&output);
    let kept = || {
        let (device, kernel, measured_at, _) = of_a_disk();
        Some(KeptFile::open(&partial, Kept::Device(device, kernel, measured_at)).unwrap().0)
    };
    let profile = profile_of(&all(Depth::Quick, 1.0, 100));
    // Where a directory lies no file can be written.
    std::fs::create_dir(&output).unwrap();
    assert!(finish(&profile, &output, kept()).is_err());
    assert!(partial.exists());
    std::fs::remove_dir(&output).unwrap();
    let idling = run((Scheduler::Bfq(Bfq::DEFAULT), 4, Writer::Absent), 1.0);
    let error = finish(&profile_of(&[idling]), &output, kept()).unwrap_err().to_string();
    assert!(error.contains("lacks the base of all predictions"), "{error}");
    let broken = Profile { version: 0, ..profile.clone() };
    let error = finish(&broken, &output, kept()).unwrap_err().to_string();
    assert!(error.contains("no profile is written"), "{error}");
    assert!(partial.exists() && !output.exists());
    finish(&profile, &output, kept()).unwrap();
    assert!(!partial.exists());
    input::profile(&output).unwrap();
}

#[test]
fn score_of_a_vm_is_one_of_all_three_tasks() {
    // L shows no percentile.
    let residuals = profile_of(&all(Depth::Quick, 0.3, 100)).residuals;
    assert!(!residuals.structural.is_empty());
    assert_eq!(residuals.structural_vms, BTreeMap::new());
    // Of a disk that was watched there is one task a run: a bound on three comes from more of those.
    let mut small = Histogram::new();
    small.record(Nanos::from_millis(1), 5_000);
    let window = |_| ObservedWindow {
        seconds: 5.0,
        iops: 1_000.0,
        small: small.clone(),
        others: None,
        canary: Nanos::from_micros(100),
    };
    let windows = (0..60).map(window).collect();
    let observed = fit_observed(of_a_disk(), CAPACITY, Scheduler::None, windows);
    assert_eq!(observed.residuals.structural_vms, BTreeMap::new());
    let lacking = missing(&observed, Depth::Full);
    assert!(lacking.iter().all(|lacks| lacks.regime != Regime::Flowing), "{lacking:?}");
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
        profile_of(&runs).check().unwrap();
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
    let profile = profile_of(runs);
    profile.check().unwrap();
    assert!(missing(&profile, Depth::Full).is_empty(), "{:?}", missing(&profile, Depth::Full));
    profile
}

#[test]
fn scheduler_that_the_kernel_lacks_is_left_out_and_the_profile_is_whole_without_it() {
    let found = Room::of(&Shared { others: None });
    assert_eq!(found.absent, ["kyber", "bfq"]);
    let none = Room { absent: vec!["mq-deadline", "kyber", "bfq"], ..Room::whole(None) };
    for room in [found, none] {
        let mut runs: Vec<ProbeRun> = Vec::new();
        while let Some(setting) = next(Depth::Full, &room, &runs, &CAPACITY) {
            assert!(!room.absent.contains(&setting.0.name()), "{setting:?}");
            runs.push(run(setting, 1.0));
            assert!(runs.len() <= 40, "goes on for ever");
        }
        fitted(&runs);
        assert!(room.describe_absent().unwrap().ends_with("kyber, bfq"));
    }
    // What keeps its scheduler is probed under no other anyway.
    let kept = Room { absent: vec!["bfq"], ..Room::whole(Some(Scheduler::None)) };
    assert_eq!(kept.describe_absent(), None);
}

#[test]
fn scheduler_that_the_kernel_refuses_is_left_out_from_then_on() {
    let refusal = |kind: std::io::ErrorKind| {
        let knob = Box::new(Knob::Scheduler { device: DeviceName::new("scratch").unwrap() });
        let (file, wanted) = ("/sys/block/sda/queue/scheduler".into(), "bfq".to_owned());
        anyhow::Error::from(HostError::WriteRefused { knob, file, wanted, source: kind.into() })
    };
    assert!(lacks_scheduler(&refusal(std::io::ErrorKind::InvalidInput)));
    // Where nothing can be written no scheduler is missing.
    assert!(!lacks_scheduler(&refusal(std::io::ErrorKind::ReadOnlyFilesystem)));
    let mut room = Room::whole(None);
    assert!(room.lack(Scheduler::Bfq(QUIET)));
    assert!(!room.lack(Scheduler::None), "without it there is no profile");
    let runs: Vec<ProbeRun> = BASE.settings.iter().map(|&setting| run(setting, 1.0)).collect();
    for stage in stages(Depth::Full) {
        let settings = stage.settings.iter().filter_map(|&setting| room.fit(setting));
        assert!(settings.into_iter().all(|(scheduler, ..)| scheduler.name() != "bfq"));
    }
    assert!(next(Depth::Full, &room, &runs, &CAPACITY).is_some());
    // It is not tried again because others come.
    assert!(room.give_way(&Shared { others: Some(others()) }, &CAPACITY));
    assert_eq!(room.absent, ["bfq"]);
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

/// M has some 2,750 requests in a probe, of which p99.9 would be two or three; those of four VMs show it.
#[test]
fn percentile_that_no_task_shows_alone_is_scored_by_those_of_all_vms() {
    let mut runs = all(Depth::Full, 1.0, usize::MAX);
    let bursting = |run: &ProbeRun| matches!(run.setting.2, Writer::Capped(_));
    let scores =
        |runs: &[ProbeRun]| profile_of(runs).residuals.structural[&Regime::Bursting].clone();
    let number = runs.iter().filter(|run| bursting(run)).count();
    assert_eq!(scores(&runs).len(), number * (4 * TOGETHER + 1));
    let before = *scores(&runs).last().unwrap();
    // One in 500, of M alone.
    for task in runs.iter_mut().filter(|run| bursting(run)).flat_map(|run| &mut run.tasks) {
        if task.iops == 500.0 {
            task.histogram.record(Nanos::from_millis(100), 5);
        }
    }
    let after = *scores(&runs).last().unwrap();
    assert!(after > before + 1.0, "{before} {after}");
}

#[test]
fn lateness_of_a_regime_is_that_of_its_worst_probe_and_no_part_of_measured_scores() {
    let mut runs = all(Depth::Full, 1.0, usize::MAX);
    let before = profile_of(&runs).residuals;
    let late = Nanos::from_millis(3);
    let worst = runs.iter_mut().find(|run| matches!(run.setting.2, Writer::Capped(_))).unwrap();
    worst.canary = late;
    let after = profile_of(&runs).residuals;
    assert_eq!(after.lateness[&Regime::Bursting], late);
    assert_eq!(after.lateness[&Regime::Flowing], before.lateness[&Regime::Flowing]);
    assert_eq!(after.as_measured, before.as_measured);
    assert!(
        after.structural[&Regime::Bursting].last() > before.structural[&Regime::Bursting].last()
    );
}

#[test]
fn summary_of_a_profile_that_others_made_has_nothing_that_a_terminal_obeys() {
    let mut profile = profile_of(&all(Depth::Quick, 1.0, 100));
    profile.device.model = "\u{1b}[2Jdisk".to_owned();
    profile.kernel = "6.1.0\r".to_owned();
    let text = summary(&profile);
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    assert!(text.contains("\\u{1b}[2Jdisk"), "{text}");
}
