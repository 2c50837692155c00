//! A profile made by hand, for the planner's tests and its benchmark.

use std::collections::BTreeMap;

use rtvirtio_spec::profile::{
    BasePoint, Capacity, DeviceIdentity, PROFILE_VERSION, PaperFit, Profile, ProfileSource, Regime,
    Residuals, Response, StructuralFit,
};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_units::{Bytes, BytesPerSecond, Nanos};

pub(super) fn identity() -> DeviceIdentity {
    DeviceIdentity {
        kind: "loop".to_owned(),
        model: "ref-4x250".to_owned(),
        serial: None,
        size: Bytes::from_kib(1 << 20),
        rotational: false,
    }
}

/// A device like ref-4x250, with a bound of 1.1 times the prediction.
pub(crate) fn profile() -> Profile {
    let response = Response {
        mean: Nanos::from_micros(320),
        p50: Nanos::from_micros(310),
        p99: Nanos::from_micros(550),
        p999: Nanos::from_micros(700),
    };
    let scores = |s: f64| Regime::ALL.map(|r| (r, vec![s; 40])).into();
    Profile {
        version: PROFILE_VERSION,
        device: identity(),
        kernel: "6.12".to_owned(),
        measured_at: MeasuredAt::Host,
        date: "2026-01-01T00:00:00Z".to_owned(),
        capacity: Capacity {
            iops_4k: 16_000.0,
            write_throughput: BytesPerSecond::from_megabytes(371),
            response_4k: response,
            response_128k: response,
        },
        structural: StructuralFit {
            base: vec![BasePoint {
                utilisation: 0.5,
                mean: Nanos::from_micros(330),
                p99: Nanos::from_micros(620),
                p999: Nanos::from_micros(900),
            }],
            scheduler_factor: [("none", 1.0), ("mq-deadline", 1.0), ("kyber", 1.0), ("bfq", 1.2)]
                .map(|(name, factor)| (name.to_owned(), factor))
                .into(),
            burst: Nanos::from_millis(90),
            stalls: None,
            regime_factor: BTreeMap::new(),
            iocost: Vec::new(),
        },
        paper: PaperFit {
            weight: 0.36,
            timeout_sync: 0.7,
            slice_idle: 0.5,
            throughput: BytesPerSecond::from_megabytes(245),
        },
        residuals: Residuals {
            structural: scores(1.1_f64.ln()),
            paper: scores(0.0),
            ..Residuals::default()
        },
        probes: Vec::new(),
        source: ProfileSource::Alone,
        firmware: None,
        measured_on: None,
        learned: None,
    }
}
