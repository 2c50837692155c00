//! The service curve that a schedule is told: the model's own for an emulated SSD, measured for a
//! file.
//!
//! Measured are the rate of small requests, the bandwidth of large ones, and the response of a small
//! one that is alone. By Little's law rate × response is how many the device serves at a time: its
//! channels. A request costs channels / rate, of which what grows with its length is `kib_ns`. A flush
//! is charged as a small request.

use rtvirtio_spec::profile::Capacity;
use serde::{Deserialize, Serialize};

use crate::scratch::SsdConfig;

/// Bytes of the small requests that are measured.
pub const SMALL: usize = 4 << 10;
/// And of large ones.
pub const LARGE: usize = 128 << 10;

/// What a device's requests cost, as in `[[schedule]]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Curve {
    /// Requests that it serves at a time.
    pub channels: u64,
    /// What one takes beside its bytes, ns.
    pub request_ns: u64,
    /// And each KiB, ns.
    pub kib_ns: u64,
    /// What a flush takes, ns.
    pub flush_ns: u64,
}

/// What is measured of a device.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// 4 KiB requests a second at depth 64, 70 % reads.
    pub iops: f64,
    /// Of 128 KiB writes at depth 64, bytes a second.
    pub bandwidth: f64,
    /// Of a 4 KiB request that is alone, s.
    pub response: f64,
}

impl Curve {
    /// The emulated SSD's own.
    #[must_use]
    pub fn of_ssd(model: SsdConfig) -> Self {
        let slope = model.mean_service.scale(model.length_slope);
        Self {
            channels: model.channels.into(),
            request_ns: model.mean_service.saturating_sub(slope).get(),
            kib_ns: slope.get() / 4,
            flush_ns: model.mean_service.get(),
        }
    }

    /// What calibration says of a device.
    #[must_use]
    pub fn of_profile(capacity: &Capacity) -> Self {
        let device = rtvirtio_planner::service_curve(capacity).device;
        Self {
            channels: device.channels.into(),
            request_ns: device.request.get().max(1),
            kib_ns: device.kib.get(),
            flush_ns: device.flush.get().max(1),
        }
    }

    /// By what was measured of a device.
    #[must_use]
    pub fn of_rates(Rates { iops, bandwidth, response }: Rates) -> Self {
        let channels = (iops * response).floor().clamp(1.0, 1024.0);
        let small = channels / iops * 1e9;
        let large = channels * LARGE as f64 / bandwidth * 1e9;
        let kib = (large - small).max(0.0) / ((LARGE - SMALL) >> 10) as f64;
        let request = (small - kib * (SMALL >> 10) as f64).max(1.0);
        Self {
            channels: channels as u64,
            request_ns: request.round() as u64,
            kib_ns: kib.round() as u64,
            flush_ns: small.round() as u64,
        }
    }

    /// Of the device's time, what so many 4 KiB requests a second need.
    #[must_use]
    pub fn needed(&self, iops: f64) -> f64 {
        let small = self.request_ns + self.kib_ns * (SMALL >> 10) as u64;
        iops * small as f64 / 1e9 / self.channels as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curve_of_the_reference_ssd_is_its_model() {
        let curve = Curve::of_ssd("ref-4x250".parse().unwrap());
        let expected = Curve { channels: 4, request_ns: 212_500, kib_ns: 9_375, flush_ns: 250_000 };
        assert_eq!(curve, expected);
        // 250 µs of 4 channels: 16,000 a second are all of it.
        assert!((curve.needed(4_000.0) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn curve_of_rates_gives_back_what_they_came_from() {
        // 4 channels; 4 KiB take 250 µs: 16,000 a second. 128 KiB take 1,412.5 µs: 2,831.86 a second.
        let bandwidth = 4.0 / 1_412.5e-6 * 131_072.0;
        let rates = Rates { iops: 16_000.0, bandwidth, response: 255e-6 };
        let expected = Curve { channels: 4, request_ns: 212_500, kib_ns: 9_375, flush_ns: 250_000 };
        assert_eq!(Curve::of_rates(rates), expected);
    }

    #[test]
    fn curve_of_a_device_that_is_as_quick_with_large_requests_has_no_slope() {
        let rates = Rates { iops: 1_000.0, bandwidth: 1e9, response: 0.0005 };
        let expected = Curve { channels: 1, request_ns: 1_000_000, kib_ns: 0, flush_ns: 1_000_000 };
        assert_eq!(Curve::of_rates(rates), expected);
    }
}
