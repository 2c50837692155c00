//! The paper's analytical model (RT-VirtIO, Eq. 1–5, Tables I and III).
//!
//! Units as in the paper: KB, KB/s, seconds; 1 KB is taken as 1,000 bytes in
//! throughput and 4 in a 4 KiB request. SW ≈ 0; A is what is issued in one
//! second; SI_default is 8 ms; φ is normalised over the VMs present;
//! B_max = 8,192 KB; E(TS) is in seconds.
//!
//! Two readings of E(SI). *Printed*: (1 − λ)·SI/SI_default, in a denominator,
//! so that a smaller slice_idle raises the latency. The text says that it
//! lowers it: *corrected* takes (1 − λ)·SI_default/SI, equal at the default.
//! At SI = 0 the printed one is infinite and the corrected one leaves E(TS).

use rtvirtio_spec::profile::PaperFit;
use rtvirtio_spec::settings::{Bfq, Scheduler};
use rtvirtio_units::{BytesPerSecond, Nanos};

use crate::{DeviceLoad, Stream};

/// B_max, KB (Table I).
const B_MAX: f64 = 8192.0;

/// Table III, host part, with Table I's T_agg of 245 MB/s.
pub const TABLE_III: PaperFit = PaperFit {
    weight: 0.36,
    timeout_sync: 0.7,
    slice_idle: 0.5,
    throughput: BytesPerSecond::from_megabytes(245),
};

/// Table III's λ of the guest's bfq, for both parameters.
pub const TABLE_III_GUEST: f64 = 1e-6;

/// How E(SI) is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// As the formula is printed.
    Printed,
    /// As the text describes it.
    Corrected,
}

/// bfq's parameters in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestBfq {
    /// Guest `slice_idle`, µs.
    pub slice_idle_us: u32,
    /// Guest `timeout_sync`, ms.
    pub timeout_sync_ms: u32,
}

fn effect_of_slice_idle(lambda: f64, slice_idle_us: u32, reading: Reading) -> f64 {
    let ratio = f64::from(slice_idle_us) / f64::from(Bfq::DEFAULT.slice_idle_us);
    match reading {
        Reading::Printed => (1.0 - lambda) * ratio,
        Reading::Corrected => (1.0 - lambda) / ratio,
    }
}

/// A, KB issued in one second; a stream without a rate issues what the device takes.
fn issued(stream: &Stream, throughput: f64) -> f64 {
    stream.iops.map_or(throughput, |iops| iops * stream.block_size.get() as f64 / 1024.0)
}

struct HostTerms {
    /// (A + B_max − L_min) / (E(SI)·φ·T_agg), to be divided by λ^φ.
    own: f64,
    /// (ΣA + B_max) / (E(SI)·T_agg).
    others: f64,
    /// TS in seconds, to be multiplied by λ^TS.
    timeout: f64,
}

fn host_terms(load: &DeviceLoad, vm: usize, slice_idle: f64, t: f64, r: Reading) -> HostTerms {
    // The paper knows bfq only; under another scheduler nothing idles.
    let bfq = match load.scheduler {
        Scheduler::Bfq(bfq) => bfq,
        _ => Bfq { slice_idle_us: 0, timeout_sync_ms: 0, ..Bfq::DEFAULT },
    };
    let total: f64 = load.vms.iter().map(|v| f64::from(v.settings.weight.get())).sum();
    let phi = f64::from(load.vms[vm].settings.weight.get()) / total;
    let e = effect_of_slice_idle(slice_idle, bfq.slice_idle_us, r);
    let a = |i: usize| -> f64 { load.vms[i].streams.iter().map(|s| issued(s, t)).sum() };
    let smallest = load.vms[vm].streams.iter().map(|s| s.block_size.get()).min().unwrap_or(4096);
    let others: f64 = (0..load.vms.len()).filter(|&i| i != vm).map(a).sum();
    HostTerms {
        own: (a(vm) + B_MAX - smallest as f64 / 1024.0) / (e * phi * t),
        others: (others + B_MAX) / (e * t),
        timeout: f64::from(bfq.timeout_sync_ms) / 1000.0,
    }
}

/// The host part, Eq. 2 and 3, of any task of VM `vm`: the paper's tail for a
/// VM seen as a cgroup. Saturates where the reading is infinite.
///
/// # Panics
/// If `vm` is not of `load`.
#[must_use]
pub fn host_part(fit: &PaperFit, load: &DeviceLoad, vm: usize, reading: Reading) -> Nanos {
    let t = fit.throughput.get() as f64 / 1000.0;
    let terms = host_terms(load, vm, fit.slice_idle, t, reading);
    Nanos::from_secs_f64(terms.own / fit.weight + terms.others + fit.timeout_sync * terms.timeout)
}

/// The guest part, Eq. 4 and 5, of task `task` of VM `vm`, all tasks of equal weight.
///
/// # Panics
/// If `vm` or `task` is not of `load`.
#[must_use]
pub fn guest_part(
    fit: &PaperFit,
    guest: GuestBfq,
    load: &DeviceLoad,
    vm: usize,
    task: usize,
    reading: Reading,
) -> Nanos {
    let t_host = fit.throughput.get() as f64 / 1000.0;
    let total: f64 = load.vms.iter().map(|v| f64::from(v.settings.weight.get())).sum();
    let phi = f64::from(load.vms[vm].settings.weight.get()) / total;
    let streams = &load.vms[vm].streams;
    let t_guest = fit.weight * phi * t_host;
    let t_task = fit.weight * t_guest / streams.len() as f64;
    let e = effect_of_slice_idle(TABLE_III_GUEST, guest.slice_idle_us, reading);
    let own =
        issued(&streams[task], t_host) + B_MAX - streams[task].block_size.get() as f64 / 1024.0;
    let others: f64 =
        (0..streams.len()).filter(|&i| i != task).map(|i| issued(&streams[i], t_host)).sum();
    let timeout = TABLE_III_GUEST * f64::from(guest.timeout_sync_ms) / 1000.0;
    Nanos::from_secs_f64(own / (e * t_task) + (others + B_MAX) / (e * t_guest) + timeout)
}

/// One measurement to fit λ to.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The load and its settings.
    pub load: DeviceLoad,
    /// Whose tail.
    pub vm: usize,
    /// The measured tail.
    pub tail: Nanos,
}

/// λ by least squares on the host part in `reading`, for a device of `throughput`.
///
/// For a given λ^SI the tail is linear in 1/λ^φ and λ^TS, which are solved for;
/// λ^SI is searched in steps of 0.01. λ^φ stays within 0.01..=100 and λ^TS
/// within 0..=100. Samples on which the reading is infinite are left out;
/// without any, Table III's λ are kept.
#[must_use]
pub fn fit(samples: &[Sample], throughput: BytesPerSecond, reading: Reading) -> PaperFit {
    let t = throughput.get() as f64 / 1000.0;
    let start = PaperFit { throughput, ..TABLE_III };
    let mut best = (f64::INFINITY, start);
    for step in 0..100 {
        let slice_idle = f64::from(step) / 100.0;
        let rows: Vec<_> = samples
            .iter()
            .map(|s| (host_terms(&s.load, s.vm, slice_idle, t, reading), s.tail.as_secs_f64()))
            .filter(|(terms, _)| terms.own.is_finite() && terms.others.is_finite())
            .collect();
        // Normal equations of y − others = u·own + v·timeout.
        let (mut oo, mut ot, mut tt, mut oy, mut ty) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (terms, tail) in &rows {
            let y = tail - terms.others;
            oo += terms.own * terms.own;
            ot += terms.own * terms.timeout;
            tt += terms.timeout * terms.timeout;
            oy += terms.own * y;
            ty += terms.timeout * y;
        }
        let determinant = oo * tt - ot * ot;
        if rows.is_empty() || determinant.abs() < 1e-18 {
            continue;
        }
        let u = ((oy * tt - ty * ot) / determinant).clamp(0.01, 100.0);
        let v = ((ty - u * ot) / tt).clamp(0.0, 100.0);
        let error: f64 = rows
            .iter()
            .map(|(terms, tail)| (u * terms.own + terms.others + v * terms.timeout - tail).powi(2))
            .sum();
        if error < best.0 {
            let fitted = PaperFit { weight: 1.0 / u, timeout_sync: v, slice_idle, throughput };
            best = (error, fitted);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::settings::VmSettings;
    use rtvirtio_units::Bytes;

    use super::*;
    use crate::VmLoad;

    fn four_heavy(bfq: Bfq) -> DeviceLoad {
        let task = |iops| Stream {
            iops: Some(iops),
            block_size: Bytes::from_kib(4),
            read_fraction: 0.7,
            depth: 1,
        };
        let streams = vec![task(100.0), task(500.0), task(1500.0)];
        let vm = VmLoad { streams, settings: VmSettings::default() };
        DeviceLoad { scheduler: Scheduler::Bfq(bfq), vms: vec![vm; 4] }
    }

    #[test]
    fn host_part_of_four_heavy_vms_is_1_86_s() {
        // (8400 + 8192 − 4) / (0.5·0.36·0.25·245000) + (25200 + 8192) / (0.5·245000) + 0.7·0.124.
        for reading in [Reading::Printed, Reading::Corrected] {
            let tail = host_part(&TABLE_III, &four_heavy(Bfq::DEFAULT), 0, reading);
            assert!((tail.as_millis_f64() - 1864.0).abs() < 1.0, "{tail}");
        }
    }

    #[test]
    fn smaller_slice_idle_raises_the_printed_and_lowers_the_corrected() {
        let load = four_heavy(Bfq { slice_idle_us: 4000, ..Bfq::DEFAULT });
        let at_default = Nanos::from_millis(1864);
        assert!(host_part(&TABLE_III, &load, 0, Reading::Printed) > at_default);
        assert!(host_part(&TABLE_III, &load, 0, Reading::Corrected) < at_default);
    }

    #[test]
    fn slice_idle_of_zero_leaves_the_timeout_in_the_corrected_reading() {
        let load = four_heavy(Bfq { slice_idle_us: 0, ..Bfq::DEFAULT });
        let tail = host_part(&TABLE_III, &load, 0, Reading::Corrected);
        assert!((tail.as_millis_f64() - 86.8).abs() < 0.01, "{tail}");
    }

    #[test]
    fn guest_part_falls_with_the_vms_weight() {
        let guest = GuestBfq { slice_idle_us: 8000, timeout_sync_ms: 124 };
        let mut load = four_heavy(Bfq::DEFAULT);
        let equal = guest_part(&TABLE_III, guest, &load, 0, 2, Reading::Printed);
        load.vms[0].settings.weight = rtvirtio_units::Weight::MAX;
        assert!(guest_part(&TABLE_III, guest, &load, 0, 2, Reading::Printed) < equal);
    }

    #[test]
    fn fit_recovers_the_lambdas_it_was_made_with() {
        let truth = PaperFit { weight: 0.8, timeout_sync: 2.0, slice_idle: 0.3, ..TABLE_III };
        let mut samples = Vec::new();
        for (timeout_sync_ms, weight) in [(32, 100), (64, 300), (124, 700)] {
            for slice_idle_us in [2000, 4000, 8000] {
                let mut load = four_heavy(Bfq { timeout_sync_ms, slice_idle_us, ..Bfq::DEFAULT });
                load.vms[0].settings.weight = rtvirtio_units::Weight::new(weight).unwrap();
                let tail = host_part(&truth, &load, 0, Reading::Corrected);
                samples.push(Sample { load, vm: 0, tail });
            }
        }
        let found = fit(&samples, truth.throughput, Reading::Corrected);
        assert!((found.weight - 0.8).abs() < 0.01, "{found:?}");
        assert!((found.timeout_sync - 2.0).abs() < 0.01, "{found:?}");
        assert!((found.slice_idle - 0.3).abs() < 0.011, "{found:?}");
    }
}
