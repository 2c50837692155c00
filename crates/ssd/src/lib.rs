//! Model of a solid-state disk: when does a request complete?
//!
//! Terms: a *channel* serves one request at a time; *service time* is how long
//! it takes a channel, `wait + service = response`; a *stall* is a time in
//! which no channel makes progress (garbage collection, say).
//!
//! Algorithm: requests are assigned in the order of submission, each to the
//! channel that is free first (first come first served, G/G/c). The service
//! time is log-normal with the configured mean at 4 KiB, times
//! `1 + length_slope × (length / 4 KiB − 1)`; reads and writes alike. Stalls
//! come as a Poisson process; a service that meets one is longer by what
//! remains of the stall.
//!
//! Pure: the caller passes time and seed; same seed and same requests, same
//! completions.
//!
//! Properties (tests of the same name): `completion_never_precedes_service`,
//! `throughput_is_channels_over_mean_service`, `stall_delays_what_meets_it`,
//! `same_seed_gives_same_completions`.

use std::collections::VecDeque;
use std::str::FromStr;

use rand::SeedableRng;
use rand_distr::{Distribution, Exp, LogNormal};
use rand_pcg::Pcg64Mcg;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Times in which the device serves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stalls {
    /// Length of one.
    pub length: Nanos,
    /// Mean time between the ends and starts of two; exponential.
    pub mean_interval: Nanos,
}

/// What a device is like.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SsdConfig {
    /// Channels, 1 to 1024.
    pub channels: u16,
    /// Mean service time of 4 KiB.
    pub mean_service: Nanos,
    /// σ of the logarithm of the service time, 0 to 3.
    pub sigma: f64,
    /// Growth of the service time per further 4 KiB, 0 to 10.
    pub length_slope: f64,
    /// Stalls, if the device has them.
    pub stalls: Option<Stalls>,
}

/// Why a configuration or a name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SsdError {
    /// No reference device has this name.
    #[error(
        "no reference device {0:?} (there are ref-4x250, ref-8x80, ref-stall; NAME*N is one that is N times \
         slower, 1 to 100)"
    )]
    UnknownName(String),
    /// A field is out of its range.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
}

/// The names of the reference devices, fixed before the first comparison: a
/// change of one makes earlier results void.
pub const REFERENCE_NAMES: [&str; 3] = ["ref-4x250", "ref-8x80", "ref-stall"];

impl FromStr for SsdConfig {
    type Err = SsdError;

    /// The reference device of that name; `NAME*N` is one that is N times slower, 1 to 100.
    fn from_str(text: &str) -> Result<Self, SsdError> {
        let unknown = || SsdError::UnknownName(text.to_owned());
        let (name, slower) = match text.split_once('*') {
            None => (text, 1),
            Some((name, n)) => {
                let n = n.parse().ok().filter(|n| (1..=100_u32).contains(n));
                (name, n.ok_or_else(unknown)?)
            }
        };

        let reference = Self {
            channels: 4,
            mean_service: Nanos::from_micros(250),
            sigma: 0.3,
            length_slope: 0.15,
            stalls: None,
        };
        let device = match name {
            "ref-4x250" => reference,
            "ref-8x80" => Self { channels: 8, mean_service: Nanos::from_micros(80), ..reference },
            "ref-stall" => Self {
                stalls: Some(Stalls {
                    length: Nanos::from_millis(20),
                    mean_interval: Nanos::from_millis(5000),
                }),
                ..reference
            },
            _ => return Err(unknown()),
        };
        let times = |n: Nanos| n.scale(f64::from(slower));
        let stalls = device
            .stalls
            .map(|s| Stalls { length: times(s.length), mean_interval: times(s.mean_interval) });
        Ok(Self { mean_service: times(device.mean_service), stalls, ..device })
    }
}

/// A device at work.
#[derive(Debug)]
pub struct Ssd {
    config: SsdConfig,
    rng: Pcg64Mcg,
    service: LogNormal<f64>,
    /// All service times are so many times as long.
    slower: f64,
    /// When each channel is free next.
    free_at: Vec<Nanos>,
    /// Starts of stalls that a request may still meet, in order.
    stalls: VecDeque<Nanos>,
    stall_gap: Option<Exp<f64>>,
}

impl Ssd {
    /// A device that is idle at time zero.
    ///
    /// # Errors
    /// [`SsdError::OutOfRange`] names the field.
    pub fn new(config: SsdConfig, seed: u64) -> Result<Self, SsdError> {
        if !(1..=1024).contains(&config.channels) {
            return Err(SsdError::OutOfRange("channels"));
        }
        if config.mean_service == Nanos::ZERO {
            return Err(SsdError::OutOfRange("mean_service"));
        }
        if !(0.0..=3.0).contains(&config.sigma) {
            return Err(SsdError::OutOfRange("sigma"));
        }
        if !(0.0..=10.0).contains(&config.length_slope) {
            return Err(SsdError::OutOfRange("length_slope"));
        }
        // The mean of a log-normal is exp(µ + σ²/2); dividing by it leaves a factor of mean 1.
        let service = LogNormal::new(-config.sigma * config.sigma / 2.0, config.sigma)
            .map_err(|_| SsdError::OutOfRange("sigma"))?;
        let stall_gap = match config.stalls {
            // Stalls without a time between them would never let a request end.
            Some(Stalls { mean_interval: Nanos::ZERO, .. }) => {
                return Err(SsdError::OutOfRange("stalls.mean_interval"));
            }
            Some(s) => Some(
                Exp::new(1.0 / s.mean_interval.as_secs_f64())
                    .map_err(|_| SsdError::OutOfRange("stalls.mean_interval"))?,
            ),
            None => None,
        };
        Ok(Self {
            config,
            rng: Pcg64Mcg::seed_from_u64(seed),
            service,
            slower: 1.0,
            free_at: vec![Nanos::ZERO; usize::from(config.channels)],
            stalls: VecDeque::new(),
            stall_gap,
        })
    }

    /// Requests that are submitted from now on take `times` as long as the configuration says; 1
    /// undoes it. Stalls stay as they are.
    pub fn slow_down(&mut self, times: u16) {
        self.slower = f64::from(times.max(1));
    }

    /// Submits a request of `length` at `now` and says when it completes.
    /// `now` must not go back between calls.
    pub fn submit(&mut self, now: Nanos, length: Bytes) -> Nanos {
        let growth = 1.0 + self.config.length_slope * (length.get() as f64 / 4096.0 - 1.0).max(0.0);
        let factor = self.service.sample(&mut self.rng) * growth * self.slower;
        let service = self.config.mean_service.scale(factor);
        // At least one channel exists: `new` checks it.
        let channel = (0..self.free_at.len()).min_by_key(|&i| self.free_at[i]).unwrap_or(0);
        let start = self.free_at[channel].max(now);
        let end = self.through_stalls(now, start, service);
        self.free_at[channel] = end;
        end
    }

    /// When a service that starts at `start` ends, stalls included.
    fn through_stalls(&mut self, now: Nanos, start: Nanos, service: Nanos) -> Nanos {
        let plain_end = start.saturating_add(service);
        let (Some(gap), Some(stalls)) = (self.stall_gap, self.config.stalls) else {
            return plain_end;
        };
        // Channels differ in time, so a stall is forgotten only once it is behind `now`.
        while self.stalls.front().is_some_and(|s| s.saturating_add(stalls.length) < now) {
            if self.stalls.len() == 1 {
                break; // the next one's start is drawn from this one's end
            }
            self.stalls.pop_front();
        }
        let mut end = plain_end;
        let mut i = 0;
        loop {
            if i == self.stalls.len() {
                let from =
                    self.stalls.back().map_or(Nanos::ZERO, |s| s.saturating_add(stalls.length));
                let wait = Nanos::from_secs_f64(gap.sample(&mut self.rng));
                self.stalls.push_back(from.saturating_add(wait));
            }
            let stall = self.stalls[i];
            let stall_end = stall.saturating_add(stalls.length);
            if stall >= end {
                return end;
            }
            if stall_end > start {
                end = end.saturating_add(stall_end.saturating_sub(stall.max(start)));
            }
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(name: &str) -> Ssd {
        Ssd::new(name.parse().unwrap(), 7).unwrap()
    }

    #[test]
    fn completion_never_precedes_service() {
        let mut ssd = reference("ref-stall");
        for i in 0..10_000 {
            let now = Nanos::from_micros(i * 50);
            assert!(ssd.submit(now, Bytes::from_kib(4)) > now);
        }
    }

    #[test]
    fn throughput_is_channels_over_mean_service() {
        let mut ssd = reference("ref-4x250");
        let n = 100_000;
        let last = (0..n).map(|_| ssd.submit(Nanos::ZERO, Bytes::from_kib(4))).max().unwrap();
        // 4 channels / 250 µs = 16,000 requests a second.
        let rate = n as f64 / last.as_secs_f64();
        assert!((15_800.0..16_200.0).contains(&rate), "{rate}");
    }

    #[test]
    fn length_of_128k_takes_5_65_times_4k() {
        let mut ssd = reference("ref-4x250");
        let n = 100_000;
        let last = (0..n).map(|_| ssd.submit(Nanos::ZERO, Bytes::from_kib(128))).max().unwrap();
        let mean_service_us = last.as_secs_f64() * 4.0 / n as f64 * 1e6;
        assert!((1390.0..1435.0).contains(&mean_service_us), "{mean_service_us}");
    }

    #[test]
    fn device_that_is_slowed_down_takes_so_many_times_as_long_until_that_is_undone() {
        let (mut slow, mut same) = (reference("ref-4x250"), reference("ref-4x250"));
        let mut responses = |times: u16, at: u64| {
            let now = Nanos::from_millis(at);
            slow.slow_down(times);
            let response = |ssd: &mut Ssd| ssd.submit(now, Bytes::from_kib(4)).saturating_sub(now);
            (response(&mut slow).get() as f64, response(&mut same).get() as f64)
        };
        for (at, times) in [(0, 1), (10, 2), (20, 3), (30, 1)] {
            let (slowed, reference) = responses(times, at);
            // To within the rounding of each to a ns.
            assert!((slowed - reference * f64::from(times)).abs() <= 2.0, "{slowed} {reference}");
        }
    }

    #[test]
    fn stall_delays_what_meets_it() {
        let mut ssd = reference("ref-stall");
        let mut late = 0;
        let n = 500_000_u64; // 500 s at 1,000 a second
        for i in 0..n {
            let now = Nanos::from_millis(i);
            let response = ssd.submit(now, Bytes::from_kib(4)).saturating_sub(now);
            if response > Nanos::from_millis(3) {
                late += 1;
            }
        }
        // About 100 stalls, each meeting about 17 of the requests that come each ms.
        assert!((1000..2600).contains(&late), "{late}");
    }

    #[test]
    fn same_seed_gives_same_completions() {
        let (mut a, mut b) = (reference("ref-stall"), reference("ref-stall"));
        for i in 0..1000 {
            let now = Nanos::from_micros(i * 37);
            assert_eq!(a.submit(now, Bytes::from_kib(4)), b.submit(now, Bytes::from_kib(4)));
        }
    }

    #[test]
    fn config_out_of_range_is_refused() {
        let good: SsdConfig = "ref-4x250".parse().unwrap();
        let bad = SsdConfig { channels: 0, ..good };
        assert_eq!(Ssd::new(bad, 0).unwrap_err(), SsdError::OutOfRange("channels"));
        let bad = SsdConfig { sigma: f64::NAN, ..good };
        assert_eq!(Ssd::new(bad, 0).unwrap_err(), SsdError::OutOfRange("sigma"));
        let stalls = Stalls { length: Nanos::from_millis(20), mean_interval: Nanos::ZERO };
        let bad = SsdConfig { stalls: Some(stalls), ..good };
        assert_eq!(Ssd::new(bad, 0).unwrap_err(), SsdError::OutOfRange("stalls.mean_interval"));
        assert!("ref-9".parse::<SsdConfig>().is_err());
        let error = "ref-stall*101".parse::<SsdConfig>().unwrap_err().to_string();
        assert!(error.contains("N times slower, 1 to 100"), "{error}");
    }
}
