//! What the device's side of a ring costs per request: `next`, `finish` and `publish`, in batches
//! of 32 requests of three descriptors, as a block driver makes them.

use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rtvirtio_virtq::ring::{Chain, Inflight, Positions, Ring};
use rustix::fs::{MemfdFlags, memfd_create};

const BATCH: u64 = 32;

/// What is kept for a successor.
#[derive(Clone, Copy)]
enum Kept {
    Nothing,
    Inflight,
    Position,
}

/// The time that the device takes for at least so many requests.
fn requests(options: Options, indirect: bool, kept: Kept, count: u64) -> Duration {
    let guest = Guest::new(1 << 20);
    let mut driver = Driver::new(guest.clone(), GUEST + (1 << 16), options);
    let (config, memory) = (driver.config(), guest.memory());
    let mut ring = match kept {
        Kept::Nothing => Ring::new(config, memory, None),
        Kept::Inflight => {
            let (fd, size) = Inflight::create(1, options.size, options.packed).unwrap();
            let region = Inflight::map(fd, 0, size, 1, options.size, options.packed).unwrap();
            Ring::new(config, memory, region.queue(0))
        }
        Kept::Position => {
            let file = memfd_create(c"positions", MemfdFlags::CLOEXEC).unwrap();
            let positions = Positions::map(file.as_fd(), 1).unwrap();
            Ring::with_position(config, memory, positions.queue(0, config.base).unwrap())
        }
    }
    .unwrap();
    let buffers = [
        Buffer { address: GUEST, length: 16, writable: false },
        Buffer { address: GUEST + 4096, length: 4096, writable: true },
        Buffer { address: GUEST + 16, length: 1, writable: true },
    ];
    let mut chain = Chain::default();
    let mut ids = Vec::with_capacity(BATCH as usize);
    let mut spent = Duration::ZERO;
    for _ in 0..count.div_ceil(BATCH) {
        for _ in 0..BATCH {
            driver.add(&buffers, indirect).unwrap();
        }
        driver.publish();
        let start = Instant::now();
        while ring.next(&mut chain).unwrap() {
            black_box(&chain);
            ids.push(chain.id);
        }
        for id in ids.drain(..) {
            ring.finish(id, 4097);
        }
        black_box(ring.publish());
        spent += start.elapsed();
        while driver.take().is_some() {}
    }
    spent.mul_f64(count as f64 / (count.div_ceil(BATCH) * BATCH) as f64)
}

fn bench(criterion: &mut Criterion) {
    let split =
        Options { size: 256, packed: false, event_idx: true, indirect: true, in_order: false };
    let packed = Options { packed: true, ..split };
    let cases = [
        ("split", split, false, Kept::Nothing),
        ("split, indirect", split, true, Kept::Nothing),
        ("split, in-flight region", split, false, Kept::Inflight),
        ("packed", packed, false, Kept::Nothing),
        ("packed, indirect", packed, true, Kept::Nothing),
        ("packed, in-flight region", packed, false, Kept::Inflight),
        ("packed, position", packed, false, Kept::Position),
    ];
    let mut group = criterion.benchmark_group("ring");
    group.throughput(Throughput::Elements(1));
    for (name, options, indirect, kept) in cases {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|count| requests(options, indirect, kept, count));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().noise_threshold(0.05);
    targets = bench
}
criterion_main!(benches);
