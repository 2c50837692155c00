//! What a learned model is asked: a load as numbers of fixed names and order.
//!
//! The paper's inputs (RT-VirtIO, Table I) and what the training's grid is wider
//! by: schedulers, the host's and the guest's bfq parameters, limits, neighbours
//! without a rate. Training makes its rows by this very function.
//!
//! Terms: a stream is *rated* if it declares its requests per second. 1 KiB is
//! 1,024 bytes. What a scheduler has no such parameter for is 0.
//!
//! Properties (tests of the same name): `features_of_a_load_are_as_by_hand`,
//! `features_are_finite_whatever_is_declared`.

use rtvirtio_spec::profile::Regime;
use rtvirtio_spec::settings::{Bfq, Scheduler};
use rtvirtio_units::Percentile;

use crate::paper::GuestBfq;
use crate::{DeviceLoad, Stream, VmLoad};

/// The features' names, in order. A model's description repeats them, so a change here makes older
/// models' files unusable, by name.
pub const FEATURES: [&str; 25] = [
    // VMs on the device, those without a target among them.
    "vms",
    // Streams of the task's VM, the task among them.
    "vm_tasks",
    // The task's rate, requests/s; 0: as many as it can.
    "task_iops",
    "task_block_kib",
    // 0 to 1.
    "task_read_fraction",
    // Requests that the task keeps in flight.
    "task_depth",
    // -log10(1 - p) of the percentile that is asked for: p99 is 2, p99.9 is 3.
    "percentile_nines",
    // What the rated streams of the task's VM, and of all VMs, ask for.
    "vm_kib_per_s",
    "host_kib_per_s",
    // The VM's weight over the sum of all VMs'.
    "vm_weight",
    // One of the four is 1.
    "host_none",
    "host_mq_deadline",
    "host_kyber",
    "host_bfq",
    // bfq on the host.
    "host_slice_idle_ms",
    "host_timeout_sync_ms",
    // 0 or 1.
    "host_low_latency",
    // Automatic: 8192, what bfq starts with.
    "host_max_budget_kib",
    // bfq in the task's guest.
    "guest_slice_idle_ms",
    "guest_timeout_sync_ms",
    // Whether the VM has a cap, and the cap; 0 without one.
    "vm_capped",
    "vm_cap_kib_per_s",
    // How many other VMs have caps, and the sum of these.
    "others_capped",
    "others_cap_kib_per_s",
    // In flight in all streams without a rate but the task itself: depth x block.
    "background_kib",
];

/// What bfq takes for an automatic `max_budget`: 16,384 sectors (`bfq_default_max_budget`, kernel
/// `block/bfq-iosched.c`), the paper's B_max.
const AUTOMATIC_BUDGET_KIB: f64 = 8192.0;

fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}

/// What the rated streams of `vm` ask for, KiB/s.
fn rated_demand(vm: &VmLoad) -> f64 {
    let of = |s: &Stream| s.iops.unwrap_or(0.0) * kib(s.block_size.get());
    vm.streams.iter().map(of).sum()
}

/// The features of stream `task` of VM `vm`, of whose tail `percentile` is asked, in the order of
/// [`FEATURES`]. `guest` is bfq in that VM; `None`: another scheduler, or nothing known.
///
/// # Panics
/// If `vm` or `task` is not of `load`.
#[must_use]
pub fn features(
    load: &DeviceLoad,
    guest: Option<GuestBfq>,
    vm: usize,
    task: usize,
    percentile: Percentile,
) -> [f64; FEATURES.len()] {
    let own = &load.vms[vm];
    let stream = &own.streams[task];
    let weight = |v: &VmLoad| f64::from(v.settings.weight.get());
    let total: f64 = load.vms.iter().map(weight).sum();
    let is = |name| f64::from(u8::from(load.scheduler.name() == name));
    let host = match load.scheduler {
        Scheduler::Bfq(bfq) => Some(bfq),
        _ => None,
    };
    let of_host = |value: fn(Bfq) -> f64| host.map_or(0.0, value);
    let budget = |bfq: Bfq| match bfq.max_budget {
        0 => AUTOMATIC_BUDGET_KIB,
        sectors => f64::from(sectors) / 2.0,
    };
    let others = load.vms.iter().enumerate().filter(|&(i, _)| i != vm).map(|(_, v)| v);
    let caps: Vec<f64> = others.filter_map(VmLoad::cap).collect();
    let unrated = load.vms.iter().enumerate().flat_map(|(i, v)| {
        let streams = v.streams.iter().enumerate();
        streams.filter(move |&(j, s)| (i, j) != (vm, task) && s.iops.is_none()).map(|(_, s)| s)
    });
    let own_cap = own.cap();
    [
        load.vms.len() as f64,
        own.streams.len() as f64,
        stream.iops.unwrap_or(0.0),
        kib(stream.block_size.get()),
        stream.read_fraction,
        f64::from(stream.depth),
        -(1.0 - percentile.fraction()).log10(),
        rated_demand(own),
        load.vms.iter().map(rated_demand).sum(),
        weight(own) / total,
        is("none"),
        is("mq-deadline"),
        is("kyber"),
        is("bfq"),
        of_host(|b| f64::from(b.slice_idle_us) / 1000.0),
        of_host(|b| f64::from(b.timeout_sync_ms)),
        of_host(|b| f64::from(u8::from(b.low_latency))),
        of_host(budget),
        guest.map_or(0.0, |g| f64::from(g.slice_idle_us) / 1000.0),
        guest.map_or(0.0, |g| f64::from(g.timeout_sync_ms)),
        f64::from(u8::from(own_cap.is_some())),
        own_cap.unwrap_or(0.0) / 1024.0,
        caps.len() as f64,
        caps.iter().sum::<f64>() / 1024.0,
        unrated.map(|s| f64::from(s.depth) * kib(s.block_size.get())).sum(),
    ]
}

/// The feature of `name` in `row`.
///
/// # Panics
/// If there is none of that name.
fn of(row: &[f64; FEATURES.len()], name: &str) -> f64 {
    row[FEATURES.iter().position(|f| *f == name).expect("a name of FEATURES")]
}

/// What dominates the tails under a row's load, as far as its features tell: by it a model's scores
/// are kept apart ([`crate::conformal`]).
#[must_use]
pub fn regime(row: &[f64; FEATURES.len()]) -> Regime {
    let is_capped = of(row, "others_capped") > 0.0 || of(row, "vm_capped") > 0.0;
    let is_flooded = of(row, "background_kib") > 0.0 && of(row, "others_capped") == 0.0;
    match (of(row, "host_slice_idle_ms") > 0.0, is_flooded) {
        (true, true) => Regime::IdlingFlooded,
        (true, false) => Regime::Idling,
        (false, true) => Regime::Flooded,
        (false, false) if is_capped => Regime::Bursting,
        (false, false) => Regime::Flowing,
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::settings::{Limits, VmSettings};
    use rtvirtio_units::{Bytes, BytesPerSecond, Weight};

    use super::*;

    fn task(iops: f64) -> Stream {
        Stream { iops: Some(iops), block_size: Bytes::from_kib(4), read_fraction: 0.7, depth: 1 }
    }

    /// A VM of two tasks and weight 300 beside a writer of weight 100.
    fn load(scheduler: Scheduler, cap: Option<u64>) -> DeviceLoad {
        let limits = cap.map(|mb| Limits::bps(BytesPerSecond::from_megabytes(mb)));
        let weight = Weight::new(300).unwrap();
        let plc = VmSettings { weight, ..VmSettings::default() };
        let writer = VmSettings { limits: limits.unwrap_or_default(), ..VmSettings::default() };
        let vms = vec![
            VmLoad { streams: vec![task(100.0), task(1500.0)], settings: plc },
            VmLoad { streams: vec![Stream::UNDECLARED[1]], settings: writer },
        ];
        DeviceLoad { scheduler, vms }
    }

    fn p999() -> Percentile {
        Percentile::new(99.9).unwrap()
    }

    #[test]
    fn features_of_a_load_are_as_by_hand() {
        let bfq = Bfq { slice_idle_us: 2000, timeout_sync_ms: 64, ..Bfq::DEFAULT };
        let guest = GuestBfq { slice_idle_us: 8000, timeout_sync_ms: 124 };
        let load = load(Scheduler::Bfq(bfq), Some(20));
        let row = features(&load, Some(guest), 0, 1, p999());
        let expected = [
            ("vms", 2.0),
            ("vm_tasks", 2.0),
            ("task_iops", 1500.0),
            ("task_block_kib", 4.0),
            ("task_read_fraction", 0.7),
            ("task_depth", 1.0),
            ("percentile_nines", 3.0),
            ("vm_kib_per_s", 6400.0),
            ("host_kib_per_s", 6400.0),
            ("vm_weight", 0.75),
            ("host_none", 0.0),
            ("host_mq_deadline", 0.0),
            ("host_kyber", 0.0),
            ("host_bfq", 1.0),
            ("host_slice_idle_ms", 2.0),
            ("host_timeout_sync_ms", 64.0),
            ("host_low_latency", 1.0),
            ("host_max_budget_kib", 8192.0),
            ("guest_slice_idle_ms", 8.0),
            ("guest_timeout_sync_ms", 124.0),
            ("vm_capped", 0.0),
            ("vm_cap_kib_per_s", 0.0),
            ("others_capped", 1.0),
            ("others_cap_kib_per_s", 19531.25),
            // 64 requests of 128 KiB.
            ("background_kib", 8192.0),
        ];
        for ((value, name), (expected_name, expected)) in row.iter().zip(FEATURES).zip(expected) {
            assert_eq!(name, expected_name);
            assert!((value - expected).abs() < 1e-9, "{name}: {value}, not {expected}");
        }
    }

    #[test]
    fn features_are_finite_whatever_is_declared() {
        let mut load = load(Scheduler::Kyber, None);
        load.vms[0].streams[0].iops = None;
        let row = features(&load, None, 0, 0, p999());
        assert!(row.iter().all(|x| x.is_finite()), "{row:?}");
        // The task itself is no background of its own.
        assert!((of(&row, "background_kib") - 8192.0).abs() < 1e-9);
        assert_eq!((of(&row, "task_iops"), of(&row, "host_kyber")), (0.0, 1.0));
        assert_eq!((of(&row, "host_max_budget_kib"), of(&row, "guest_slice_idle_ms")), (0.0, 0.0));
    }

    #[test]
    fn regime_of_features_is_that_of_the_load() {
        let idling = Scheduler::Bfq(Bfq::DEFAULT);
        let quiet = Scheduler::Bfq(Bfq { slice_idle_us: 0, ..Bfq::DEFAULT });
        let of = |scheduler, cap| regime(&features(&load(scheduler, cap), None, 0, 0, p999()));
        assert_eq!(of(quiet, None), Regime::Flooded);
        assert_eq!(of(Scheduler::None, Some(20)), Regime::Bursting);
        assert_eq!(of(idling, None), Regime::IdlingFlooded);
        assert_eq!(of(idling, Some(20)), Regime::Idling);
        let mut alone = load(quiet, None);
        alone.vms.pop();
        assert_eq!(regime(&features(&alone, None, 0, 0, p999())), Regime::Flowing);
    }
}
