//! What a step costs: a snapshot taken in, and a decision every tenth.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rtvirtio_iocores::{
    Cpu, Kind, Limits, Queue, QueueId, REFRESH, Snapshot, Thread, ThreadId, Vm, VmId, policy,
};
use rtvirtio_units::{CpuId, Nanos};

/// Queues of unlike load on busy IOThreads, at the `at`th sample.
fn fill(snapshot: &mut Snapshot, at: u64) {
    let sum = |share: u64| Nanos::from_micros(at * share);
    snapshot.now = Nanos::from_millis(10 * at);
    if at.is_multiple_of(REFRESH) {
        snapshot.measured = snapshot.now;
    }
    for thread in &mut snapshot.threads {
        // 90 % busy.
        (thread.busy, thread.ran) = (sum(9_000), sum(9_000));
    }
    for queue in &mut snapshot.queues {
        let share = 50 + u64::from(queue.id.0 % 7) * 100;
        (queue.busy, queue.waited) = (sum(share), sum(share));
        queue.requests = at * share / 10;
        queue.bytes = queue.requests * 4096;
    }
}

fn snapshot(threads: u32, queues: u32) -> Snapshot {
    let thread = |id| Thread {
        id: ThreadId(id),
        cpu: Some(CpuId::new(id)),
        locked: false,
        busy: Nanos::ZERO,
        poll: Nanos::ZERO,
        sleep: Nanos::ZERO,
        ran: Nanos::ZERO,
        waited: Nanos::ZERO,
    };
    let queue = |id| Queue::new(QueueId(id), VmId(id / 4), ThreadId(id % threads));
    let cpu = |id| Cpu { id: CpuId::new(id), idle: Nanos::ZERO, vcpus: id >= 2 * threads };
    let vm = |id| Vm::new(VmId(id));
    Snapshot {
        now: Nanos::ZERO,
        measured: Nanos::ZERO,
        threads: (0..threads).map(thread).collect(),
        queues: (0..queues).map(queue).collect(),
        vms: (0..queues / 4).map(vm).collect(),
        vcpus: Vec::new(),
        cpus: (0..3 * threads).map(cpu).collect(),
    }
}

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("step");
    for (threads, queues) in [(2, 64), (64, 1_000)] {
        let name = format!("{queues} queues, {threads} IOThreads");
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            let mut snapshot = snapshot(threads, queues);
            let limits = Limits {
                cpus: (0..2 * threads).map(CpuId::new).collect(),
                min_iothreads: 1,
                max_iothreads: 2 * threads as usize,
                borrow: false,
            };
            let mut policy = policy(Kind::Dynamic, limits);
            let mut at = 0;
            b.iter(|| {
                at += 1;
                fill(&mut snapshot, at);
                black_box(policy.step(black_box(&snapshot)))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
