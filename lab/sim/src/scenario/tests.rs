use super::*;

fn size() -> Size {
    Size { vms: 16, queues: 2, depth: 8, rate: Iops::new(1_000.0).unwrap(), compute: 4.0 }
}

fn make(kind: PhaseKind, seed: u64) -> Scenario {
    Scenario::generate(&[kind], Nanos::from_millis(10_000), &size(), seed).unwrap()
}

#[test]
fn each_kind_can_be_played_and_is_the_same_for_the_same_seed() {
    for kind in PhaseKind::DISKS.into_iter().chain(PhaseKind::NETWORK) {
        for seed in 0..20 {
            let scenario = make(kind, seed);
            assert_eq!(scenario.check(), Ok(()), "{kind}");
            assert_eq!(scenario, make(kind, seed));
        }
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    assert_ne!(make(PhaseKind::Bursts, 1), make(PhaseKind::Bursts, 2));
}

#[test]
fn scenario_is_read_back_from_json() {
    let scenario = make(PhaseKind::Mixed, 3);
    let text = serde_json::to_string(&scenario).unwrap();
    assert_eq!(serde_json::from_str::<Scenario>(&text).unwrap(), scenario);
    assert!(serde_json::from_str::<Scenario>("{\"seed\": 1, \"colour\": 2}").is_err());
}

#[test]
fn phases_do_what_they_are_called() {
    let full = |s: &Stream| matches!(s.load, Load::Depth(8));
    let streams =
        |kind| make(kind, 5).vms.into_iter().flat_map(|vm| vm.streams).collect::<Vec<_>>();
    assert_eq!(streams(PhaseKind::OneHot).iter().filter(|s| full(s)).count(), 1);
    assert_eq!(streams(PhaseKind::AllHot).iter().filter(|s| full(s)).count(), 32);
    assert!(!streams(PhaseKind::Idle).iter().any(full));
    // 2 of 16 VMs, 2 queues each.
    let large = streams(PhaseKind::SmallLarge);
    assert_eq!(large.iter().filter(|s| s.block == Bytes::from_kib(256)).count(), 4);
    // 10 s of 100 ms on and 100 ms off.
    assert_eq!(streams(PhaseKind::Flapping).len(), 32 * 50);
    for stream in streams(PhaseKind::Bursts) {
        assert!(stream.span.length() <= Nanos::from_millis(5_000));
    }
    let wanted = |kind| -> f64 {
        make(kind, 5).vms.iter().flat_map(|vm| &vm.burners).map(|burner| burner.share).sum()
    };
    assert!((wanted(PhaseKind::Compute) - 4.0).abs() < 1e-9);
    assert!((wanted(PhaseKind::AllHot) - 1.0).abs() < 1e-9);
    let plugged = make(PhaseKind::Hotplug, 5).vms.iter().map(|vm| vm.plugged.len()).sum::<usize>();
    assert!(plugged > 16, "{plugged}");
}

#[test]
fn disk_that_stays_over_a_change_of_phase_is_not_unplugged() {
    let kinds = [PhaseKind::Idle, PhaseKind::AllHot];
    let scenario = Scenario::generate(&kinds, Nanos::from_millis(1_000), &size(), 1).unwrap();
    let whole = Span { start: Nanos::ZERO, stop: Nanos::from_millis(2_000) };
    assert!(scenario.vms.iter().all(|vm| vm.plugged == [whole]));
}

#[test]
fn scenario_that_cannot_be_played_is_refused() {
    let good = make(PhaseKind::AllHot, 1);
    let refused = |change: fn(&mut Scenario)| {
        let mut scenario = good.clone();
        change(&mut scenario);
        scenario.check().unwrap_err()
    };
    assert_eq!(refused(|s| s.vms[3].streams[0].queue = 2), ScenarioError::NoQueue(3));
    assert_eq!(refused(|s| s.vms[3].plugged.clear()), ScenarioError::NoQueue(3));
    let overlap = |s: &mut Scenario| {
        let stream = s.vms[1].streams[0];
        s.vms[1].streams.push(stream);
    };
    assert_eq!(refused(overlap), ScenarioError::Overlap(1, 0));
    assert_eq!(
        refused(|s| s.vms[0].streams[0].block = Bytes::new(0)),
        ScenarioError::OutOfRange("a block size")
    );
    assert_eq!(
        refused(|s| s.vms[0].burners[0].share = f64::NAN),
        ScenarioError::OutOfRange("a compute thread's share")
    );
    assert_eq!(
        refused(|s| s.phases[0].span.start = Nanos::new(1)),
        ScenarioError::OutOfRange("a phase's time")
    );
    assert_eq!(refused(|s| s.vms.clear()), ScenarioError::OutOfRange("the number of VMs"));
    let size = Size { vms: 0, ..size() };
    assert!(Scenario::generate(&[PhaseKind::Idle], MAX_LENGTH, &size, 1).is_err());
}
