use std::collections::BTreeMap;

use rtvirtio_spec::profile::{Response, StallFit};
use rtvirtio_spec::settings::{Bfq, Limits, VmSettings};
use rtvirtio_units::{Bytes, BytesPerSecond};

use super::*;
use crate::VmLoad;

fn capacity() -> Capacity {
    let response = Response {
        mean: Nanos::from_micros(320),
        p50: Nanos::from_micros(310),
        p99: Nanos::from_micros(550),
        p999: Nanos::from_micros(700),
    };
    Capacity {
        iops_4k: 16_000.0,
        write_throughput: BytesPerSecond::from_megabytes(371),
        response_4k: response,
        response_128k: response,
    }
}

fn fit() -> StructuralFit {
    StructuralFit {
        base: vec![BasePoint {
            utilisation: 0.1,
            mean: Nanos::from_micros(320),
            p99: Nanos::from_micros(600),
            p999: Nanos::from_micros(900),
        }],
        scheduler_factor: BTreeMap::new(),
        burst: Nanos::from_millis(100),
        stalls: None,
        regime_factor: BTreeMap::new(),
        iocost: Vec::new(),
    }
}

fn task(iops: f64) -> Stream {
    Stream { iops: Some(iops), block_size: Bytes::from_kib(4), read_fraction: 0.7, depth: 1 }
}

fn vm(streams: &[Stream], limits: Limits) -> VmLoad {
    VmLoad { streams: streams.to_vec(), settings: VmSettings { limits, ..Default::default() } }
}

fn four(scheduler: Scheduler, writer: Option<Limits>) -> DeviceLoad {
    let tasks = [task(100.0), task(500.0), task(1500.0)];
    let mut vms = vec![vm(&tasks, Limits::default()); 4];
    if let Some(limits) = writer {
        vms.push(vm(&[Stream::UNDECLARED[1]], limits));
    }
    DeviceLoad { scheduler, vms }
}

fn tail_ms(load: &DeviceLoad, stream: &Stream, p: f64) -> f64 {
    let (fit, capacity) = (fit(), capacity());
    let model = Structural::new(&fit, &capacity);
    let situation = model.situation(load);
    model.estimate(&situation, stream, Percentile::new(p).unwrap()).tail.as_millis_f64()
}

fn capped(mb: u64) -> Option<Limits> {
    Some(Limits::bps(BytesPerSecond::from_megabytes(mb)))
}

#[test]
fn burst_of_30_mb_waits_for_3_mb_of_device_time() {
    // 3 MB at 371 MB/s are 8.09 ms; p99.9 sees all but 0.1 ms of it.
    let tail = tail_ms(&four(Scheduler::None, capped(30)), &task(500.0), 99.9);
    assert!((8.2..11.0).contains(&tail), "{tail}");
}

#[test]
fn burst_is_invisible_to_p99_of_a_fast_stream() {
    // One of 150 requests a burst is 0.67 %.
    let fast = tail_ms(&four(Scheduler::None, capped(30)), &task(1500.0), 99.0);
    let slow = tail_ms(&four(Scheduler::None, capped(30)), &task(100.0), 99.0);
    assert!(fast < 2.0, "{fast}");
    assert!(slow > 7.0, "{slow}");
}

#[test]
fn tail_grows_with_percentile() {
    let load = four(Scheduler::None, capped(20));
    let tails = [99.0, 99.5, 99.9, 99.99].map(|p| tail_ms(&load, &task(100.0), p));
    assert!(tails.is_sorted(), "{tails:?}");
}

#[test]
fn tail_grows_with_a_neighbours_cap() {
    let tails =
        [5, 10, 20, 40].map(|mb| tail_ms(&four(Scheduler::None, capped(mb)), &task(500.0), 99.9));
    assert!(tails.is_sorted(), "{tails:?}");
}

/// 100 requests a second may come with each of the 10 bursts, so that one of ten waits for a whole one.
#[test]
fn stream_in_step_with_bursts_waits_for_whole_ones() {
    let load = four(Scheduler::None, capped(30));
    let of = |iops, p| tail_ms(&load, &task(iops), p);
    // 3 MB at 371 MB/s.
    let whole = of(1500.0, 99.9);
    assert!((8.3..9.0).contains(&whole), "{whole}");
    for (iops, p) in [(10.0, 50.0), (100.0, 90.1), (100.0, 99.0), (500.0, 99.0)] {
        assert!((of(iops, p) - whole).abs() < 0.01, "{iops} {p}: {} of {whole}", of(iops, p));
    }
    // More bursts than the percentile looks at: it is no matter of luck.
    assert!(of(100.0, 89.0) < 2.0, "{}", of(100.0, 89.0));
    // Stalls of the device come at any time.
    let mut fit = fit();
    fit.stalls = Some(StallFit { per_second: 0.2, length: Nanos::from_millis(20) });
    let capacity = capacity();
    let model = Structural::new(&fit, &capacity);
    let situation = model.situation(&four(Scheduler::None, None));
    let percentile = Percentile::new(99.9).unwrap();
    let stalled = model.estimate(&situation, &task(100.0), percentile).tail.as_millis_f64();
    assert!(stalled < 18.0, "{stalled}");
}

/// What is left of the device for a burst decides how many requests of a deep stream meet it, not how long the longest
/// waits.
#[test]
fn burst_lasts_longer_on_a_busy_device() {
    let tail = |vms: usize, p| {
        let mut load = four(Scheduler::None, capped(8));
        load.vms.drain(vms..4);
        tail_ms(&load, &Stream { depth: 16, ..task(2000.0) }, p)
    };
    let growth = |p| tail(4, p) / tail(1, p);
    assert!(growth(99.0) > 1.2 && growth(99.9) < 1.2, "{} {}", growth(99.0), growth(99.9));
}

#[test]
fn idling_tail_is_other_vms_times_timeout() {
    let idling = |timeout_sync_ms| Scheduler::Bfq(Bfq { timeout_sync_ms, ..Bfq::DEFAULT });
    for (timeout, expected) in [(32, 96.0), (64, 192.0), (124, 372.0)] {
        let tail = tail_ms(&four(idling(timeout), None), &task(500.0), 99.9);
        assert!((tail - expected).abs() < 0.05 * expected, "{timeout}: {tail}");
    }
}

#[test]
fn idling_slice_is_cut_by_max_budget() {
    // 64 sectors are 8 requests of 0.32 ms: 2.56 ms a VM, three others.
    let scheduler = Scheduler::Bfq(Bfq { max_budget: 64, ..Bfq::DEFAULT });
    let tail = tail_ms(&four(scheduler, None), &task(100.0), 99.0);
    assert!((7.0..11.0).contains(&tail), "{tail}");
}

#[test]
fn flood_waits_for_the_whole_queue() {
    // 64 × 128 KiB at 371 MB/s are 22.6 ms; 44 requests a second are left of 1,500.
    let (fit, capacity) = (fit(), capacity());
    let model = Structural::new(&fit, &capacity);
    let load = four(Scheduler::None, Some(Limits::default()));
    let situation = model.situation(&load);
    let e = model.estimate(&situation, &task(1500.0), Percentile::new(99.9).unwrap());
    assert!((22.0..25.5).contains(&e.tail.as_millis_f64()), "{e:?}");
    assert!((0.025..0.035).contains(&e.delivered), "{e:?}");
    assert_eq!(e.regime, Regime::Flooded);
}

#[test]
fn bursts_of_two_capped_vms_add() {
    let mut load = four(Scheduler::None, capped(10));
    load.vms.push(load.vms[4].clone());
    let two = tail_ms(&load, &task(500.0), 99.9);
    let one_of_20 = tail_ms(&four(Scheduler::None, capped(20)), &task(500.0), 99.9);
    assert!((two - one_of_20).abs() < 0.1, "{two} {one_of_20}");
}

#[test]
fn large_requests_take_their_own_time() {
    let (fit, mut capacity) = (fit(), capacity());
    capacity.response_128k.p999 = Nanos::from_millis(4);
    let model = Structural::new(&fit, &capacity);
    let large = Stream { block_size: Bytes::from_kib(128), ..task(100.0) };
    let load =
        DeviceLoad { scheduler: Scheduler::None, vms: vec![vm(&[large], Limits::default())] };
    let tail = model.estimate(&model.situation(&load), &large, Percentile::new(99.9).unwrap()).tail;
    // 0.9 ms of base and the 3.3 ms that 128 KiB take longer.
    assert!((4.1..4.4).contains(&tail.as_millis_f64()), "{tail}");
}

#[test]
fn stall_is_seen_by_a_percentile_that_it_reaches() {
    let mut fit = fit();
    fit.stalls = Some(StallFit { per_second: 0.2, length: Nanos::from_millis(20) });
    let capacity = capacity();
    let model = Structural::new(&fit, &capacity);
    let situation = model.situation(&four(Scheduler::None, None));
    let tail = |iops, p: f64| {
        let p = Percentile::new(p).unwrap();
        model.estimate(&situation, &task(iops), p).tail.as_millis_f64()
    };
    // 20 ms every 5 s: 0.4 % of time, of which p99 sees nothing and p99.9 of a
    // slow stream all but 5 ms.
    assert!(tail(100.0, 99.0) < 2.0);
    assert!((14.0..18.0).contains(&tail(100.0, 99.9)));
    assert!(tail(1500.0, 99.9) < 2.0);
}

#[test]
fn overload_shows_in_utilisation() {
    let (fit, capacity) = (fit(), capacity());
    let load = DeviceLoad {
        scheduler: Scheduler::None,
        vms: vec![vm(&[task(8000.0)], Limits::default()); 3],
    };
    let situation = Structural::new(&fit, &capacity).situation(&load);
    assert!((situation.utilisation - 1.5).abs() < 1e-9);
}

/// A writer, capped or not, is what the device slows; the rates of the others are what it has to deliver.
#[test]
fn of_rates_beyond_the_device_a_part_is_delivered_and_background_is_none_of_them() {
    let (fit, capacity) = (fit(), capacity());
    let model = Structural::new(&fit, &capacity);
    let many = |vms| {
        let vms = vec![vm(&[task(50.0)], Limits::default()); vms];
        DeviceLoad { scheduler: Scheduler::None, vms }
    };
    let delivered = |vms| {
        let situation = model.situation(&many(vms));
        model.estimate(&situation, &task(50.0), Percentile::new(99.9).unwrap()).delivered
    };
    // Of 16,000 requests a second.
    assert_eq!(delivered(300), 1.0);
    assert!((delivered(400) - 0.8).abs() < 1e-9, "{}", delivered(400));
    for writer in [None, Some(Limits::default()), capped(1), capped(300)] {
        let declared = model.situation(&four(Scheduler::None, writer)).declared;
        assert!((declared - 0.525).abs() < 1e-9, "{writer:?}: {declared}");
    }
}

#[test]
fn iocost_adds_its_wait_or_a_queue_that_it_lets_through() {
    use rtvirtio_spec::profile::IoCostFit;
    use rtvirtio_spec::settings::IoCost;

    let setting = IoCost {
        bps: BytesPerSecond::from_megabytes(371),
        iops: 16_000,
        read_latency_us: 2_000,
        write_latency_us: 2_000,
        vrate: IoCost::ANY_SCALE,
    };
    let load = |writer| four(Scheduler::IoCost(setting), writer);
    let capacity = capacity();
    let known = |ms| {
        let wait = Nanos::from_millis(ms);
        let measured = IoCostFit { setting, utilisation: 0.9, wait, left: 0.9 };
        StructuralFit { iocost: vec![measured], ..fit() }
    };
    let tail = |fit: &StructuralFit, load: &DeviceLoad| {
        let model = Structural::new(fit, &capacity);
        let situation = model.situation(load);
        let p999 = Percentile::new(99.9).unwrap();
        let estimate = model.estimate(&situation, &task(500.0), p999);
        (estimate.regime, estimate.tail.as_millis_f64(), estimate.delivered)
    };
    let (alone, base, _) = tail(&known(40), &load(None));
    assert_eq!(alone, Regime::Flowing);
    // 64 requests of 128 KiB take 22.6 ms.
    for (ms, expected) in [(40, 40.0), (3, 22.6)] {
        let (regime, with, delivered) = tail(&known(ms), &load(Some(Limits::default())));
        assert_eq!(regime, Regime::Controlled);
        let wait = with - base;
        assert!((wait - expected).abs() < 0.1 && delivered == 1.0, "{wait} {delivered}");
    }
    // Without a fit it is as if nobody held the writer back.
    let (_, unknown, _) = tail(&fit(), &load(Some(Limits::default())));
    let flooded = tail_ms(&four(Scheduler::None, Some(Limits::default())), &task(500.0), 99.9);
    assert!((unknown - flooded).abs() < 0.01, "{unknown} {flooded}");
}

#[test]
fn scheduler_that_was_not_measured_is_no_better_than_the_worst_that_was() {
    let capacity = capacity();
    let tail = |fit: &StructuralFit, scheduler| {
        let load = four(scheduler, None);
        let model = Structural::new(fit, &capacity);
        let percentile = Percentile::new(99.9).unwrap();
        model.estimate(&model.situation(&load), &task(1500.0), percentile).tail
    };
    let measured = [("none".to_owned(), 1.3), ("kyber".to_owned(), 1.1)];
    let fit = StructuralFit { scheduler_factor: measured.into(), ..fit() };
    let known = tail(&fit, Scheduler::None);
    assert_eq!(tail(&fit, Scheduler::MqDeadline), known);
    assert!(tail(&fit, Scheduler::Kyber) < known);
}

/// An array with a cache for writes: 2,000 requests of 4 KiB a second, and 3,052 of 128 KiB.
#[test]
fn request_that_is_longer_than_a_cheap_large_one_costs_its_bytes() {
    let write_throughput = BytesPerSecond::from_megabytes(400);
    let capacity = Capacity { iops_4k: 2_000.0, write_throughput, ..capacity() };
    let fit = fit();
    let model = Structural::new(&fit, &capacity);
    for (kib, us) in [(4, 500.0), (128, 327.7), (1024, 2_621.4), (16_384, 41_943.0)] {
        let cost = model.cost(f64::from(kib) * 1024.0) * 1e6;
        assert!((cost / us - 1.0).abs() < 1e-3, "{kib} KiB: {cost} of {us}");
    }
}
