//! Tests of the plans of devices that the data plane serves.

use rtvirtio_spec::profile::Response;
use rtvirtio_spec::settings::Knob;
use rtvirtio_spec::specification::parse;

use super::*;
use crate::tests::profile::profile;
use crate::tests::{planned, planned_on};

const HEAD: &str = "version = 1\n[data_plane]\ncontrol = \"/run/x.sock\"\n\
    [device.data]\npath = \"/dev/loop7\"\nprofile = \"p.json\"\n";

/// VMs of one task each: name, IOPS, target in ms; 0: none.
fn plan_of(vms: &[(&str, &str, f64)]) -> rtvirtio_spec::plan::Plan {
    planned(&specification_of(vms))
}

fn specification_of(vms: &[(&str, &str, f64)]) -> rtvirtio_spec::specification::Specification {
    parse("test.toml", &specification_text(vms)).unwrap()
}

fn specification_text(vms: &[(&str, &str, f64)]) -> String {
    let mut text = HEAD.to_owned();
    for (name, load, latency) in vms {
        text += &format!(
            "[[vm]]\nname = \"{name}\"\nbackend = \"vhost-user\"\n\
             [[vm.disk]]\nname = \"disk-{name}\"\ndevice = \"data\"\n"
        );
        if *latency > 0.0 {
            text += &format!(
                "[[vm.task]]\nname = \"t\"\n{load}\n\
                 target = {{ percentile = 99.9, latency_ms = {latency} }}\n"
            );
        }
    }
    text
}

fn response(mean_us: u64, p999_us: u64) -> Response {
    let us = Nanos::from_micros;
    Response { mean: us(mean_us), p50: us(mean_us), p99: us(p999_us), p999: us(p999_us) }
}

#[test]
fn service_curve_of_a_profile_is_the_device_that_it_is_of() {
    // ref-4x250 as it was measured through FUSE and loop (docs/results/strict/profile.json).
    let capacity = Capacity {
        iops_4k: 16_025.5,
        write_throughput: BytesPerSecond::new(375_980_032),
        response_4k: Response { p99: Nanos::from_micros(600), ..response(343, 1_483) },
        response_128k: Response { p99: Nanos::from_micros(2_800), ..response(1_538, 3_621) },
    };
    let Curve { device, spread, spread_decade, overhead, jitter, jitter_decade } =
        service_curve(&capacity);
    assert_eq!(device.channels, 4);
    let near = |found: Nanos, us: f64| (found.as_secs_f64() * 1e6 / us - 1.0).abs() < 0.05;
    assert!(near(device.request, 212.5) && near(device.kib, 9.375), "{device:?}");
    assert!(near(overhead, 82.0) && near(jitter, 794.0), "{overhead} {jitter}");
    assert!((2.4..2.5).contains(&spread), "{spread}");
    assert!(near(jitter_decade, 742.0), "{jitter_decade}");
    assert!((0.55..0.58).contains(&spread_decade), "{spread_decade}");
    // What nobody should measure does no harm.
    let zero = Capacity { iops_4k: 1.0, write_throughput: BytesPerSecond::new(1), ..capacity };
    assert_eq!(service_curve(&zero).device.channels, 1);
}

/// 55 µs of the 110 that a small request takes are overhead, and the device serves five in 50 µs each.
#[test]
fn spread_is_of_the_service_where_a_cache_ends_large_writes_sooner_than_that() {
    for mean_us in [20, 55, 56] {
        let us = Nanos::from_micros;
        let capacity = Capacity {
            iops_4k: 100_000.0,
            write_throughput: BytesPerSecond::from_megabytes(1_000),
            response_4k: Response { p99: us(300), ..response(110, 400) },
            response_128k: Response { p99: us(200), ..response(mean_us, 300) },
        };
        let Curve { device, spread, spread_decade, overhead, jitter, .. } =
            service_curve(&capacity);
        assert_eq!((device.channels, overhead), (5, us(55)));
        // 245 and 100 µs of 50.
        assert!((4.8..5.0).contains(&spread), "{mean_us}: {spread}");
        assert!((1.9..2.1).contains(&spread_decade), "{mean_us}: {spread_decade}");
        assert!((us(95)..us(105)).contains(&jitter), "{mean_us}: {jitter}");
    }
}

#[test]
fn each_vm_gets_a_promise_as_long_as_they_fit() {
    let plan = plan_of(&[("b", "iops = 1500", 15.0), ("a", "iops = 500", 10.0), ("bg", "", 0.0)]);
    assert!(plan.meets_all(), "{:?}", plan.tasks);
    assert!(plan.vms.is_empty(), "no cgroup is touched");
    let set = plan.data_plane.as_ref().unwrap();
    let qos = |disk: &str| &set.disks[&DiskName::new(disk).unwrap()];
    assert_eq!(qos("disk-a").deadline_us, Some(10_000));
    assert_eq!((qos("disk-b").iops, qos("disk-b").burst), (Some(1_500), Some(2)));
    assert_eq!(qos("disk-bg").deadline_us, None);
    let knobs: Vec<&Knob> = plan.changes.iter().map(|change| &change.knob).collect();
    assert!(matches!(
        knobs[..],
        [
            Knob::Schedule { .. },
            Knob::Qos { .. },
            Knob::Qos { .. },
            Knob::Qos { .. },
            Knob::Scheduler { .. }
        ]
    ));
    for task in &plan.tasks {
        let bound = task.bound.unwrap();
        assert!(task.predicted <= bound && bound <= task.target, "{task:?}");
    }
    let cost = &plan.cost[0];
    let left = cost.background_planned.get() as f64 / cost.background_alone.get() as f64;
    assert!((left + cost.utilisation - 1.0).abs() < 1e-6 && (0.8..0.9).contains(&left), "{cost:?}");
}

#[test]
fn rarer_percentile_has_a_longer_bound_and_is_refused_where_that_is_too_long() {
    let of = |percentile: &str, latency| {
        let percentile = format!("percentile = {percentile}");
        let text = specification_text(&[("a", "iops = 500", latency)]);
        planned(&parse("test.toml", &text.replace("percentile = 99.9", &percentile)).unwrap())
    };
    let [often, rarely] = ["99.9", "99.99"].map(|percentile| of(percentile, 20.0).tasks[0].clone());
    assert!(often.unmet.is_none() && rarely.unmet.is_none(), "{rarely:?}");
    assert!(often.predicted < rarely.predicted && often.bound < rarely.bound, "{rarely:?}");
    // Long enough for 99.9 %, and not for 99.99 %.
    let between = often.predicted.as_millis_f64().midpoint(rarely.predicted.as_millis_f64());
    assert!(of("99.9", between).meets_all());
    assert!(!of("99.99", between).meets_all());
}

#[test]
fn task_that_its_guest_marks_has_a_promise_of_its_own() {
    let text = format!(
        "{HEAD}[[vm]]\nname = \"plc\"\nbackend = \"vhost-user\"\n\
         [[vm.disk]]\nname = \"root\"\ndevice = \"data\"\n\
         [[vm.task]]\nname = \"control\"\nrecognise = \"ioprio:rt/0\"\niops = 100\n\
         target = {{ percentile = 99.9, latency_ms = 5 }}\n\
         [[vm.task]]\nname = \"log\"\niops = 50\nblock_size = \"1m\"\n\
         target = {{ percentile = 99.9, latency_ms = 40 }}\n"
    );
    let plan = planned(&parse("test.toml", &text).unwrap());
    assert!(plan.meets_all(), "{:?}", plan.tasks);
    let qos = &plan.data_plane.as_ref().unwrap().disks[&DiskName::new("root").unwrap()];
    assert_eq!((qos.deadline_us, qos.iops), (Some(40_000), Some(400)));
    let [task] = &qos.tasks[..] else { panic!("{qos:?}") };
    assert_eq!((task.deadline_us, task.iops), (Some(5_000), Some(100)));
    assert!(
        plan.reasons.iter().any(|r| matches!(r, Reason::SplitRequests { .. })),
        "{:?}",
        plan.reasons
    );
}

/// A VM's disk with tasks of so many requests a second: how each is marked, and its target in ms; 0: none.
fn plan_of_tasks(tasks: &[(&str, u32, u32)]) -> rtvirtio_spec::plan::Plan {
    let mut text = format!(
        "{HEAD}[[vm]]\nname = \"plc\"\nbackend = \"vhost-user\"\n\
         [[vm.disk]]\nname = \"root\"\ndevice = \"data\"\n"
    );
    for (i, (ioprio, iops, latency)) in tasks.iter().enumerate() {
        text += &format!("[[vm.task]]\nname = \"t{i}\"\niops = {iops}\n");
        if !ioprio.is_empty() {
            text += &format!("recognise = \"ioprio:{ioprio}\"\n");
        }
        if *latency > 0 {
            text += &format!("target = {{ percentile = 99.9, latency_ms = {latency} }}\n");
        }
    }
    planned(&parse("test.toml", &text).unwrap())
}

#[test]
fn marked_task_without_a_target_counts_as_one_that_is_not_marked() {
    // The data plane knows no priority without a promise: all 400 requests are the disk's own.
    let plan = plan_of_tasks(&[("", 100, 40), ("be/7", 300, 0)]);
    assert!(plan.meets_all(), "{:?}", plan.tasks);
    let qos = &plan.data_plane.as_ref().unwrap().disks[&DiskName::new("root").unwrap()];
    assert_eq!((qos.deadline_us, qos.iops), (Some(40_000), Some(400)));
    assert!(qos.tasks.is_empty(), "{qos:?}");
    // Beside a promise to that very priority it is of that.
    let plan = plan_of_tasks(&[("", 100, 40), ("be/7", 300, 0), ("be/7", 50, 80)]);
    let qos = &plan.data_plane.as_ref().unwrap().disks[&DiskName::new("root").unwrap()];
    assert_eq!((qos.iops, qos.tasks[0].iops), (Some(100), Some(350)));
}

#[test]
fn as_many_priorities_are_promised_as_the_data_plane_tells_apart() {
    let marks: Vec<String> = (0..MAX_TASKS).map(|level| format!("rt/{level}")).collect();
    let mut tasks: Vec<_> = marks.iter().map(|mark| (mark.as_str(), 10, 100)).collect();
    // Neither the disk's own promise nor a priority without one takes the place of a task's.
    tasks.extend([("", 10, 100), ("idle", 10, 0)]);
    let plan = plan_of_tasks(&tasks);
    assert!(plan.meets_all(), "{:?}", plan.tasks);
    let qos = &plan.data_plane.as_ref().unwrap().disks[&DiskName::new("root").unwrap()];
    assert_eq!((qos.iops, qos.tasks.len()), (Some(20), MAX_TASKS));
    assert!(Qos::new(qos.clone()).is_ok(), "{qos:?}");
    tasks.push(("be/0", 10, 100));
    let plan = plan_of_tasks(&tasks);
    let cause = &plan.tasks[0].unmet.as_ref().unwrap().cause;
    assert!(matches!(cause, Cause::TooManyPriorities { .. }), "{cause:?}");
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let names: Vec<String> = (0..12).map(|i| format!("vm{i:02}")).collect();
    let vms: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, n)| (n.as_str(), "iops = 1500", 10.0 + i as f64))
        .collect();
    let plan = plan_of(&vms);
    let unmet: Vec<_> = plan.tasks.iter().filter(|task| task.unmet.is_some()).collect();
    assert_eq!(unmet.len(), 2, "{unmet:?}");
    assert_eq!(unmet[0].vm.as_str(), "vm10");
    let reason = unmet[0].why_unmet().unwrap();
    assert!(reason.contains("% of its rates would fit"), "{reason}");
    let qos =
        |disk: &str| plan.data_plane.as_ref().unwrap().disks[&DiskName::new(disk).unwrap()].iops;
    assert_eq!((qos("disk-vm09"), qos("disk-vm10")), (Some(1_500), None));

    let plan = plan_of(&[("a", "iops = 100", 0.2), ("b", "iops = 100", 30.0), ("c", "", 5.0)]);
    let said = |vm: usize| plan.tasks[vm].why_unmet().unwrap_or_default();
    assert!(said(0).contains("the shortest deadline that can be kept is"), "{}", said(0));
    assert!(said(1).contains("declares no iops"), "{}", said(1));
    assert_eq!(said(2), "");
}

#[test]
fn target_that_the_devices_stalls_alone_exceed_is_unmet_and_promised_all_the_same() {
    // ref-stall: 20 ms every 5 s. Of 100 requests a second they meet one in 500, of 1,500 one in 7,500.
    let mut profile = profile();
    profile.structural.stalls = Some(StallFit { per_second: 0.2, length: Nanos::from_millis(20) });
    let specification = specification_of(&[
        ("a", "iops = 100", 10.0),
        ("b", "iops = 1500", 10.0),
        ("c", "iops = 100", 40.0),
        // Longer than a stall, but not than what a request takes beside one.
        ("d", "iops = 100", 20.5),
    ]);
    let plan = planned_on(&specification, &profile);
    let unmet: Vec<_> =
        plan.tasks.iter().filter(|t| t.unmet.is_some()).map(|t| t.vm.as_str()).collect();
    assert_eq!(unmet, ["a", "d"]);
    let of = |vm: &str| plan.tasks.iter().find(|t| t.vm.as_str() == vm).unwrap();
    let stalled = Nanos::from_millis(20);
    assert!((stalled..Nanos::from_millis(40)).contains(&of("c").bound.unwrap()), "{:?}", of("c"));
    assert!(of("b").bound.unwrap() < stalled, "{:?}", of("b"));
    let a = of("a");
    assert!(matches!(a.unmet.as_ref().unwrap().cause, Cause::Stalls { .. }), "{:?}", a.unmet);
    assert!(a.bound.unwrap() > Nanos::from_millis(20) && a.delivered > 0.99, "{a:?}");
    assert!(a.why_unmet().unwrap().contains("stalls for up to 20.00 ms"), "{:?}", a.why_unmet());
    // It is protected as if there were none.
    let qos = &plan.data_plane.as_ref().unwrap().disks[&DiskName::new("disk-a").unwrap()];
    assert_eq!((qos.deadline_us, qos.iops), (Some(10_000), Some(100)));
    assert!(planned(&specification).meets_all());
}

#[test]
fn rate_below_one_a_second_counts_as_it_is_and_is_promised_as_one() {
    let [tenth, one] = ["iops = 0.1", "iops = 1"].map(|load| plan_of(&[("a", load, 10.0)]));
    let part = tenth.cost[0].utilisation / one.cost[0].utilisation;
    assert!((0.09..0.11).contains(&part), "{part}");
    assert!(tenth.meets_all(), "{:?}", tenth.tasks);
    let qos = &tenth.data_plane.as_ref().unwrap().disks[&DiskName::new("disk-a").unwrap()];
    assert_eq!(qos.iops, Some(1));
    // The data plane takes what is planned.
    assert!(Qos::new(qos.clone()).is_ok(), "{qos:?}");
}
