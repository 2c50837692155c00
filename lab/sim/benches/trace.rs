//! How fast it simulates: requests a second of one core.

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use rtvirtio_iocores::{Kind, Limits, policy};
use rtvirtio_sim::scenario::{PhaseKind, Scenario, Size};
use rtvirtio_sim::{Machine, Simulation};
use rtvirtio_units::{Iops, Nanos};

fn requests(machine: &Machine, scenario: &Scenario, kind: Kind) -> u64 {
    let limits = Limits {
        cpus: machine.io_cpus(),
        min_iothreads: 1,
        max_iothreads: machine.cpus.into(),
        borrow: true,
    };
    let mut policy = policy(kind, limits);
    let mut simulation =
        Simulation::new(machine, scenario, &mut *policy).expect("both are in range");
    simulation.run_until(scenario.length());
    simulation.counts().ended
}

/// Half a second of 64 CPUs and 256 VMs.
fn trace(c: &mut Criterion) {
    let mut group = c.benchmark_group("trace");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    let size = Size {
        vms: 256,
        queues: 2,
        depth: 16,
        rate: Iops::new(5_000.0).expect("in range"),
        compute: 32.0,
    };
    let mut machine = Machine::new(64, 8);
    machine.costs.request = Nanos::from_micros(20);
    for phase in [PhaseKind::Compute, PhaseKind::AllHot, PhaseKind::Mixed] {
        let scenario = Scenario::generate(&[phase], Nanos::from_millis(500), &size, 1)
            .expect("the size is in range");
        for kind in [Kind::Static, Kind::Dynamic] {
            group.throughput(Throughput::Elements(requests(&machine, &scenario, kind)));
            group.bench_function(format!("{phase}/{kind}"), |b| {
                b.iter(|| requests(&machine, &scenario, kind));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, trace);
criterion_main!(benches);
