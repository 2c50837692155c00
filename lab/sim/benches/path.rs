//! How fast the two-tier path is simulated: requests a second through bfq in the guest and bfq on the host, and
//! how that changes with the number of queues.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rtvirtio_sim::path::{Condition, Length, Service, Task, Vm, run};
use rtvirtio_spec::settings::{Bfq, Limits, Scheduler};
use rtvirtio_ssd::SsdConfig;
use rtvirtio_units::{Bytes, Nanos, Weight};

/// The paper's three tasks in each of `vms` VMs, on a device that has `vms` times the reference's channels.
fn condition(vms: u16, guest: Option<Scheduler>, host: Scheduler) -> Condition {
    let reference: SsdConfig = "ref-4x250".parse().expect("a reference device");
    let task = |iops| Task {
        iops: Some(iops),
        block_size: Bytes::new(4096),
        read_fraction: 0.7,
        queue_depth: 1,
        deadline: None,
    };
    let vm = Vm {
        weight: Weight::DEFAULT,
        limits: Limits::default(),
        priority: None,
        guest,
        tasks: vec![task(100.0), task(500.0), task(1500.0)],
    };
    Condition {
        device: SsdConfig { channels: 4 * vms.div_ceil(4), ..reference },
        service: Service::Kernel { scheduler: host },
        nesting: 1,
        seasoned: false,
        transport: Nanos::from_micros(110),
        software: Nanos::from_micros(40),
        vms: vec![vm; usize::from(vms)],
        warm_up: Nanos::ZERO,
        length: Length::fixed(Nanos::from_millis(10_000)),
        seed: 1,
    }
}

fn path(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("path");
    group.sample_size(10).noise_threshold(0.05);
    let bfq = Scheduler::Bfq(Bfq::DEFAULT);
    let quiet = Scheduler::Bfq(Bfq { slice_idle_us: 0, ..Bfq::DEFAULT });
    let mut measure = |name: &str, condition: Condition| {
        let requests = run(&condition).expect("a condition").requests;
        group.throughput(Throughput::Elements(requests));
        let id = BenchmarkId::new(name, condition.vms.len());
        group.bench_with_input(id, &condition, |b, c| b.iter(|| run(c)));
    };
    for vms in [4, 64, 256] {
        measure("bfq in bfq", condition(vms, Some(bfq), quiet));
    }
    measure("bfq in bfq, idling", condition(4, Some(bfq), bfq));
    measure("bfq", condition(4, None, quiet));
    measure("none", condition(4, None, Scheduler::None));
}

criterion_group!(benches, path);
criterion_main!(benches);
