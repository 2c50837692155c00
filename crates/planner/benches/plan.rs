//! How long a plan takes, and how that grows with the number of VMs.

use std::collections::BTreeMap;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rtvirtio_model::learned::Learned;
use rtvirtio_planner::{FoundDevice, Model, plan};
use rtvirtio_spec::settings::Knobs;
use rtvirtio_spec::specification::{Specification, parse};
use rtvirtio_units::BytesPerSecond;

#[path = "../src/tests/profile.rs"]
mod profile;

const MLP: &[u8] = include_bytes!("../../model/tests/data/mlp.onnx");
const BOOSTING: &[u8] = include_bytes!("../../model/tests/data/boosting.onnx");

/// `vms` VMs of three tasks on `devices` devices; every fifth VM is background.
fn specification(vms: usize, devices: usize) -> Specification {
    let mut text = "version = 1\n".to_owned();
    for d in 0..devices {
        text += &format!("[device.d{d}]\npath = \"/dev/d{d}\"\nprofile = \"p\"\n");
    }
    for v in 0..vms {
        let d = v % devices;
        text +=
            &format!("[[vm]]\nname = \"vm{v}\"\n[[vm.disk]]\nname = \"data\"\ndevice = \"d{d}\"\n");
        if v / devices % 5 == 4 {
            continue;
        }
        let target = 10 + v / devices;
        for (task, iops) in [("light", 100), ("medium", 500), ("heavy", 1500)] {
            text += &format!(
                "[[vm.task]]\nname = \"{task}\"\niops = {iops}\n\
                 target = {{ percentile = 99.9, latency_ms = {target} }}\n"
            );
        }
    }
    parse("bench.toml", &text).expect("the specification is well-formed")
}

fn plans(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    group.sample_size(10).noise_threshold(0.05);
    let mut profile = profile::profile();
    // Twenty VMs on one device need more than the tests' one has.
    profile.capacity.iops_4k = 60_000.0;
    profile.capacity.write_throughput = BytesPerSecond::from_megabytes(1500);
    for scores in profile.residuals.structural.values_mut() {
        scores.resize(100, 0.1);
    }
    for (vms, devices) in [(4, 1), (20, 1), (100, 5), (1000, 50)] {
        let specification = specification(vms, devices);
        let found: BTreeMap<_, _> = specification
            .devices
            .iter()
            .map(|d| {
                (
                    d.name.clone(),
                    FoundDevice {
                        profile: &profile,
                        identity: profile.device.clone(),
                        model: Model::Structural,
                        schedulers: None,
                    },
                )
            })
            .collect();
        let id = BenchmarkId::from_parameter(format!("{vms} VMs on {devices} devices"));
        group.bench_function(id, |b| {
            b.iter(|| plan(black_box(&specification), &found, &Knobs::new()));
        });
    }
    // Learned models, on what they were trained for.
    let (profile, specification) = (profile::profile(), specification(4, 1));
    for (name, bytes) in [("perceptron", MLP), ("boosting", BOOSTING)] {
        let learned = Learned::from_bytes(bytes).expect("the tests' models can be asked");
        let model = Model::Learned(&learned);
        let identity = profile.device.clone();
        let found = FoundDevice { profile: &profile, identity, model, schedulers: None };
        let found = [(specification.devices[0].name.clone(), found)].into();
        let id = BenchmarkId::from_parameter(format!("4 VMs on 1 device, {name}"));
        group.bench_function(id, |b| {
            b.iter(|| plan(black_box(&specification), &found, &Knobs::new()));
        });
    }
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
