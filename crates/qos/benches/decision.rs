//! What a decision costs: a request taken in, one chosen, one ended.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rtvirtio_qos::{Device, Kind, Promise, Rate, Scheduler, Share};
use rtvirtio_units::{Bytes, Iops, Nanos, Weight};

/// VMs that always have requests; each has a promise, which every other one exceeds.
fn backlogged(vms: u64) -> (Scheduler, Vec<rtvirtio_qos::ClassId>) {
    let mut scheduler = Scheduler::new(Device {
        channels: 64,
        request: Nanos::from_micros(10),
        kib: Nanos::new(100),
        flush: Nanos::from_micros(10),
    });
    let classes: Vec<_> = (0..vms)
        .map(|vm| {
            let weight = Weight::new(100 + (vm % 10) as u32).expect("in range");
            let flow = scheduler.add_flow(Share { weight, limit: None });
            // One decision a microsecond.
            let fair = 1e6 / vms as f64;
            let iops = Iops::new(if vm % 2 == 0 { 2.0 * fair } else { fair / 2.0 }).ok();
            let rate = Rate { iops, bandwidth: None, burst: 8 };
            let deadline = Nanos::from_micros(500 + vm);
            let promise = Promise { deadline, rate };
            scheduler.add_class(flow, Some(promise)).expect("the flow is there")
        })
        .collect();
    for (at, &class) in classes.iter().enumerate() {
        for request in 0..32 {
            let ticket = (at * 32 + request) as u64;
            scheduler.submit(class, (ticket, Kind::Read, Bytes::from_kib(4)), Nanos::ZERO);
        }
    }
    (scheduler, classes)
}

fn decisions(c: &mut Criterion) {
    let mut group = c.benchmark_group("decision");
    for vms in [1, 8, 64, 1_000] {
        group.bench_function(BenchmarkId::from_parameter(vms), |b| {
            let (mut scheduler, classes) = backlogged(vms);
            let mut now = Nanos::ZERO;
            b.iter(|| {
                now = now.saturating_add(Nanos::from_micros(1));
                let Some(started) = scheduler.next(black_box(now)) else { return };
                let class = classes[started.ticket as usize / 32];
                scheduler.complete(started.running, now);
                scheduler.submit(class, (started.ticket, Kind::Read, Bytes::from_kib(4)), now);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decisions);
criterion_main!(benches);
