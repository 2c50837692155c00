//! Classes of one flow, and what they share: its turns and its limit.

use super::*;

/// The marked task of a disk that has more under way than it is promised, beside what nobody marked, such as the journal of
/// its file system.
#[test]
fn excess_of_a_marked_task_does_not_starve_what_is_unmarked() {
    let mut world = World::new(reference(), Nanos::from_micros(30));
    let flow = world.scheduler.add_flow(share(100));
    let marked = world.scheduler.add_class(flow, promise(10_000, 300.0, 2)).unwrap();
    let unmarked = world.scheduler.add_class(flow, None).unwrap();
    world.add_to(marked, Load::Backlogged { depth: 64, bytes: 4096 });
    let of_unmarked = world.add_to(unmarked, paced(100));
    world.add(share(100), None, DEEP_WRITER);
    let outcomes = run_for(&mut world, SECOND, Nanos::from_millis(10_000));
    let rate = outcomes[of_unmarked].rate(Nanos::from_millis(10_000));
    assert!(rate > 95.0, "{rate} requests/s of 100");
}

/// A promise in bytes and a limit in requests, so that nothing shows beforehand that the one exceeds the other.
#[test]
fn promise_beyond_the_limit_delays_the_rest_of_its_flow_for_a_bounded_time() {
    let mut world = World::new(reference(), Nanos::ZERO);
    let limited = Share { limit: Some(rate(500.0, 1)), ..share(100) };
    let flow = world.scheduler.add_flow(limited);
    let promised = world.scheduler.add_class(flow, promise(10_000, 1_000.0, 2)).unwrap();
    let other = world.scheduler.add_class(flow, None).unwrap();
    world.add_to(promised, paced(1_000));
    let of_other = world.add_to(other, Load::Backlogged { depth: 1, bytes: 4096 });
    let outcomes = run_for(&mut world, SECOND, Nanos::from_millis(30_000));
    let other = &outcomes[of_other];
    assert!((25..=31).contains(&other.responses.len()), "{} requests", other.responses.len());
    let longest = *other.responses.iter().max().unwrap();
    assert!(longest < Nanos::from_millis(1_200), "{longest}");
}

#[test]
fn limited_flow_has_not_waited_before_its_time_comes() {
    let ms = Nanos::from_millis;
    let mut scheduler = Scheduler::new(device(steady(1, 250)));
    let slow = Share { limit: Some(rate(5.0, 1)), ..share(100) };
    let slow = scheduler.add_flow(slow);
    let slow = scheduler.add_class(slow, None).unwrap();
    let task = scheduler.add_flow(share(100));
    let task = scheduler.add_class(task, promise(10_000, 1000.0, 8)).unwrap();
    started(&mut scheduler, slow, 1, ms(1_000))
        .into_iter()
        .for_each(|running| scheduler.complete(running, ms(1_001)));
    // The next one is due 200 ms after the first: a promised request that comes then goes first.
    assert!(scheduler.submit(slow, (1, Kind::Write, Bytes::from_kib(4)), ms(1_002)));
    assert!(scheduler.next(ms(1_002)).is_none());
    assert!(scheduler.submit(task, (2, Kind::Read, Bytes::from_kib(4)), ms(1_300)));
    assert_eq!(scheduler.next(ms(1_300)).map(|started| started.ticket), Some(2));
}

/// A request takes longer than a second of the limit, and a promised one comes after each.
#[test]
fn slow_limit_is_kept_beside_a_promise() {
    let mut world = World::new(reference(), Nanos::ZERO);
    let limit = Rate { iops: None, bandwidth: Some(BytesPerSecond::new(64 << 10)), burst: 1 };
    let flow = world.scheduler.add_flow(Share { limit: Some(limit), ..share(100) });
    let promised = world.scheduler.add_class(flow, promise(10_000, 5.0, 1)).unwrap();
    let other = world.scheduler.add_class(flow, None).unwrap();
    world.add_to(promised, Load::Paced { every: Nanos::from_millis(500), bytes: 512 });
    let of_other = world.add_to(other, Load::Backlogged { depth: 1, bytes: 128 << 10 });
    let outcomes = run_for(&mut world, SECOND, Nanos::from_millis(60_000));
    let bytes = outcomes[of_other].bytes;
    assert!((2 << 20..=4 << 20).contains(&bytes), "{bytes} of {} bytes", 60 * (64 << 10));
}

/// A flow that its limit holds back has no more than its weight's part once others leave it less than the limit.
#[test]
fn what_a_limit_kept_from_a_flow_is_not_made_up_for() {
    let seconds = |s: u64| Nanos::from_millis(1_000 * s);
    let mut world = World::new(steady(4, 250), Nanos::ZERO);
    let limit = Some(rate(800.0, 4));
    let limited = world.add(Share { limit, ..share(100) }, None, DEEP_WRITER);
    world.add(share(1), None, DEEP_WRITER);
    let flow = world.scheduler.add_flow(share(1_000));
    let late = world.scheduler.add_class(flow, None).unwrap();
    world.add_later(late, DEEP_WRITER, seconds(5));
    let alone = run_for(&mut world, SECOND, seconds(3))[limited].rate(seconds(3));
    assert!((780.0..=805.0).contains(&alone), "{alone} of 800 requests/s");
    // 2,832 requests/s by 100 : 1 : 1,000.
    let beside = run_for(&mut world, seconds(6), seconds(4))[limited].rate(seconds(4));
    assert!((240.0..=275.0).contains(&beside), "{beside} of 257 requests/s");
}
