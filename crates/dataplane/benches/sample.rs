//! What the monitor's look costs, which it takes every 10 ms: 64 queues of 16 disks on 8 IOThreads.
//! Every tenth one reads the kernel's times, and the policy decides.

use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

use rtvirtio_dataplane::plane::{HandedFds, Plane, Registry};
use rtvirtio_iocores::{Limits, SAMPLE};
use rtvirtio_spec::serve::IoThread;
use rtvirtio_units::{CpuId, Nanos};
use serde_json::json;

const IOTHREADS: u32 = 8;
const DISKS: u32 = 16;

fn look(criterion: &mut Criterion) {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::new(Arc::new(|_, _| ())).unwrap();
    for iothread in 0..IOTHREADS {
        let raw = serde_json::from_value(json!({ "name": format!("iot{iothread}") })).unwrap();
        registry.add_iothread(IoThread::new(raw).unwrap()).unwrap();
    }
    for disk in 0..DISKS {
        let device = json!({
            "name": format!("disk{disk}"), "vm": format!("vm{disk}"), "queues": 4,
            "socket": directory.path().join(format!("{disk}.sock")),
            "engine": { "type": "ram", "size": 1 << 20 },
        });
        let device = serde_json::from_value(device).unwrap();
        registry.add_device(device, HandedFds::default()).unwrap();
    }
    let limits = Limits {
        cpus: (0..IOTHREADS).map(CpuId::new).collect(),
        min_iothreads: IOTHREADS as usize,
        max_iothreads: IOTHREADS as usize,
        borrow: false,
    };
    let mut probe = registry.probe(limits);
    let mut time = Nanos::ZERO;
    criterion.bench_function("look, 64 queues, 8 IOThreads", |bencher| {
        bencher.iter(|| {
            time = time.saturating_add(SAMPLE);
            probe.look(time);
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().noise_threshold(0.05).measurement_time(Duration::from_secs(5));
    targets = look
}
criterion_main!(benches);
