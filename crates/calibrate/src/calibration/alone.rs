//! What a device does for one user: its capacity, and its service times.
//!
//! Where others use the device, what they take is added to what a load of ours gets. The depth rises
//! step by step, and not to where they would notice; so what is found is the least that the device can
//! do. From a response time at depth 1 the wait behind others is taken off: that of a queue with as many
//! servers as requests are in service at capacity (Erlang's C formula; the wait of other than
//! exponential service times as Kimura's approximation has it, by half of 1 + the squared coefficient
//! of variation).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::profile::{Capacity, Response};
use rtvirtio_spec::settings::{Scheduler, Settings};
use rtvirtio_spec::specification::{Load, Recognise, Target, Task};
use rtvirtio_units::{Bytes, BytesPerSecond, Confidence, Nanos, Percentile, TaskName};

use super::{TRIES, Writer, device_settings, load_duration, specification};
use crate::load::RAMP;
use crate::neighbours::{GaveUp, OtherLoad};
use crate::testbed::{DeviceUnderTest, Work, plain};

/// Length of a run on the device alone.
const WINDOW: Duration = Duration::from_millis(1500);

/// A device that does no more than so many times what it did at half the depth is saturated.
const SATURATED: f64 = 1.1;
/// Of what a neighbour tolerates so much is used.
const WITHIN: f64 = 0.8;
/// How often a response time is measured again beside others.
const REPEATED: u32 = 2;
/// Bytes of the two sizes that are measured.
const SMALL: f64 = 4096.0;
const LARGE: f64 = 131_072.0;

/// One load's run.
struct Run {
    histogram: Histogram,
    others: Option<OtherLoad>,
}

impl Run {
    /// Requests per second.
    fn rate(&self) -> f64 {
        self.histogram.count() as f64 / WINDOW.as_secs_f64()
    }

    /// All requests per second that the device served.
    fn total(&self) -> f64 {
        self.rate() + self.others.map_or(0.0, |others| others.iops)
    }
}

/// Depths at which a device is saturated: at once, or step by step beside others.
const fn depths(is_in_use: bool) -> &'static [u32] {
    if is_in_use { &[2, 4, 8, 16, 32, 64] } else { &[64] }
}

/// How long [`measure`] takes, about.
pub(super) fn duration(device: &dyn DeviceUnderTest) -> Duration {
    let runs = if device.others().is_some() { 2 * (1 + REPEATED) + 6 } else { 4 };
    load_duration(device, WINDOW) * runs
}

/// What the device does for one user.
///
/// # Errors
/// As [`DeviceUnderTest::measure`]; [`GaveUp`] if not even one request at a time can be measured.
pub(super) fn measure(device: &dyn DeviceUnderTest, interrupted: &Interrupted) -> Result<Capacity> {
    let load = |kib, read_fraction, queue_depth| Load {
        iops: None,
        block_size: Bytes::from_kib(kib),
        read_fraction,
        queue_depth,
    };
    let run = |load: Load, tries: u32| -> Result<(Run, Duration)> {
        let mut attempt = 1;
        loop {
            let begin = Instant::now();
            match run(device, load, interrupted) {
                Ok(run) => return Ok((run, begin.elapsed())),
                Err(error) if error.is::<GaveUp>() && attempt < tries => attempt += 1,
                Err(error) => return Err(error),
            }
        }
    };
    let active = WINDOW + RAMP;
    // What of the device one request at a time takes is known at the end, and rested for then: how long
    // each run took, and requests a second.
    let mut owed: Vec<(Load, Duration, f64)> = Vec::new();
    // Beside others the quickest of several: what they add comes and goes.
    let mut one = |load: Load| -> Result<Run> {
        let (mut least, took) = run(load, TRIES)?;
        owed.push((load, took, least.rate()));
        let again = if least.others.is_some() { REPEATED } else { 0 };
        for _ in 0..again {
            let again = run(load, 1).map(|(run, took)| {
                owed.push((load, took, run.rate()));
                run
            });
            match again {
                Ok(run) if run.histogram.mean() < least.histogram.mean() => least = run,
                Ok(_) => {}
                Err(error) if error.is::<GaveUp>() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(least)
    };
    let one_small = one(load(4, 0.7, 1))?;
    let one_large = one(load(128, 0.0, 1))?;
    let most = |kib, reads, one: &Run| -> Result<(f64, Option<OtherLoad>)> {
        let (mut most, mut mean) = ((one.rate(), one.others), one.histogram.mean());
        let weight = mean.as_secs_f64() / one_small.histogram.mean().as_secs_f64().max(1e-9);
        for &depth in depths(device.others().is_some()) {
            // Doubling the depth may double the response; a small request of others waits for all of
            // that but our own service.
            let doubled = mean.scale(2.0).saturating_sub(one.histogram.mean());
            let of_others = doubled.saturating_add(one_small.histogram.mean());
            let is_too_long = |limit: Nanos| of_others > limit.scale(WITHIN) && most.1.is_some();
            if device.tolerated().is_some_and(is_too_long) {
                break;
            }
            let run = match run(load(kib, reads, depth), 1) {
                Ok((run, took)) => {
                    // Of the most that was seen together so far.
                    let used = run.rate() / run.total().max(most.0).max(1.0);
                    device.rest(Work { active, took, used }, interrupted)?;
                    run
                }
                // What it did before somebody was disturbed is the least that it can do.
                Err(error) if error.is::<GaveUp>() => break,
                Err(error) => return Err(error),
            };
            // In small requests: a deep load takes from others what it has more.
            let done = |(own, others): (f64, Option<OtherLoad>)| {
                own * weight + others.map_or(0.0, |others| others.iops)
            };
            let (now, before) = (done((run.rate(), run.others)), done(most));
            let is_saturated = now < SATURATED * before;
            if now > before {
                most = (run.rate(), run.others);
            }
            mean = run.histogram.mean();
            if is_saturated {
                break;
            }
        }
        Ok(most)
    };
    let small = most(4, 0.7, &one_small)?;
    let large = most(128, 0.0, &one_large)?;
    let (iops_4k, write_throughput) = capacity(small, large);
    for (load, took, rate) in owed {
        let bytes = rate * load.block_size.get() as f64;
        let is_small = load.block_size.get() as f64 <= SMALL;
        let used = if is_small { rate / iops_4k } else { bytes / write_throughput };
        device.rest(Work { active, took, used }, interrupted)?;
    }
    let wait = one_small.others.map_or(0.0, |others| {
        let offered = others.iops * cost(others, iops_4k, write_throughput);
        wait(&one_small.histogram, iops_4k, offered)
    });
    Ok(Capacity {
        iops_4k,
        write_throughput: BytesPerSecond::new(write_throughput as u64),
        response_4k: response(&one_small.histogram, wait)?,
        response_128k: response(&one_large.histogram, wait)?,
    })
}

/// Runs one task alone.
fn run(device: &dyn DeviceUnderTest, load: Load, interrupted: &Interrupted) -> Result<Run> {
    let mut specification = specification(device, 1, Writer::Absent, WINDOW)?;
    let name = TaskName::new("alone")?;
    let Some(vm) = specification.vms.first_mut() else { bail!("a case has a VM") };
    let disk = vm.disks[0].name.clone();
    // Any target makes it a measured task.
    let target = Target {
        percentile: Percentile::new(99.0)?,
        latency: Nanos::from_millis(1),
        confidence: Confidence::new(0.95)?,
    };
    vm.tasks = vec![Task { name, disk, recognise: Recognise::Disk, load, target: Some(target) }];
    let scheduler = device.scheduler().unwrap_or(Scheduler::None);
    let settings = device_settings(&specification, scheduler, None);
    let settings = Settings([(device.testbed().device().name.clone(), settings)].into());
    let measured = device.measure(&specification, &plain(settings), WINDOW, interrupted)?;
    let task = measured.tasks.into_iter().next().context("fio measured nothing")?;
    Ok(Run { histogram: task.histogram, others: device.others() })
}

/// How much of the way from the small size to the large one a request is.
fn largeness(others: OtherLoad) -> f64 {
    ((others.block_size.get() as f64 - SMALL) / (LARGE - SMALL)).max(0.0)
}

/// Device time of one request of others, s: linear between the sizes that are measured.
fn cost(others: OtherLoad, iops: f64, throughput: f64) -> f64 {
    let (small, large) = (1.0 / iops, LARGE / throughput);
    small + (large - small) * largeness(others)
}

/// The part of the device that others use, 0 to 1.
pub(super) fn used_by(others: OtherLoad, capacity: &Capacity) -> f64 {
    let throughput = capacity.write_throughput.get() as f64;
    (others.iops * cost(others, capacity.iops_4k, throughput)).min(1.0)
}

/// 4 KiB requests and bytes in 128 KiB requests per second that the device serves, from what a load of
/// each size got and what others had beside it: the device's time is used up by both together.
fn capacity(
    (small, beside_small): (f64, Option<OtherLoad>),
    (large, beside_large): (f64, Option<OtherLoad>),
) -> (f64, f64) {
    let parts = |others: Option<OtherLoad>| {
        others
            .map_or((0.0, 0.0), |o| (o.iops * (1.0 - largeness(o)).max(0.0), o.iops * largeness(o)))
    };
    let (beside_small, beside_large) = (parts(beside_small), parts(beside_large));
    let (mut iops, mut throughput) = (small + beside_small.0, large * LARGE);
    // What is left to one size by the other one's requests; settles within a few rounds.
    for _ in 0..20 {
        let left = (1.0 - beside_small.1 * LARGE / throughput).max(0.1);
        iops = ((small + beside_small.0) / left).max(1.0);
        let left = (1.0 - beside_large.0 / iops).max(0.1);
        throughput = ((large + beside_large.1) * LARGE / left).max(1.0);
    }
    (iops, throughput)
}

/// The mean wait behind others of a request that comes alone, s. `offered` is the part of the
/// device that others use.
fn wait(responses: &Histogram, iops: f64, offered: f64) -> f64 {
    let mean = responses.mean().as_secs_f64();
    let servers = (mean * iops).round().clamp(1.0, 1024.0);
    let load = (offered * servers).min(servers * 0.95);
    // The Erlang B formula by its recursion, and C from it.
    let mut blocked = 1.0;
    for n in 1..=servers as u32 {
        blocked = load * blocked / (f64::from(n) + load * blocked);
    }
    let busy = load / servers;
    let waits = blocked / (1.0 - busy * (1.0 - blocked));
    let variation = (1.0 + squared_variation(responses).min(1.0)) / 2.0;
    let per_service = waits / (servers - load) * variation;
    mean * per_service / (1.0 + per_service)
}

/// The squared coefficient of variation.
fn squared_variation(histogram: &Histogram) -> f64 {
    let (mean, n) = (histogram.mean().as_secs_f64(), histogram.count() as f64);
    let squares: f64 = histogram
        .bins()
        .map(|(value, count)| (value.as_secs_f64() - mean).powi(2) * count as f64)
        .sum();
    squares / n.max(1.0) / (mean * mean).max(1e-18)
}

/// The mean is without the wait; the percentiles are as they were measured.
fn response(histogram: &Histogram, wait: f64) -> Result<Response> {
    let at = |p: f64| -> Result<Nanos> {
        let quantile = histogram.quantile(Percentile::new(p)?);
        Ok(quantile.context("the device completed nothing")?.value)
    };
    let mean = Nanos::from_secs_f64((histogram.mean().as_secs_f64() - wait).max(1e-9));
    Ok(Response { mean, p50: at(50.0)?, p99: at(99.0)?, p999: at(99.9)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn others(iops: f64, kib: u64) -> Option<OtherLoad> {
        Some(OtherLoad { iops, block_size: Bytes::from_kib(kib), read_fraction: 0.5 })
    }

    #[test]
    fn capacity_is_what_all_get_together() {
        let close = |(iops, bytes): (f64, f64), expected: (f64, f64)| {
            assert!((iops / expected.0 - 1.0).abs() < 0.01, "{iops} {expected:?}");
            assert!((bytes / expected.1 - 1.0).abs() < 0.01, "{bytes} {expected:?}");
        };
        let whole = (16_000.0, 2_800.0 * LARGE);
        close(capacity((16_000.0, None), (2_800.0, None)), whole);
        // Half of the device is used by small requests, a quarter by large ones.
        close(capacity((8_000.0, others(8_000.0, 4)), (1_400.0, others(8_000.0, 4))), whole);
        close(capacity((12_000.0, others(700.0, 128)), (2_100.0, others(700.0, 128))), whole);
        // Whatever is claimed, what comes out is a number.
        let (iops, bytes) = capacity((0.0, others(1e9, 1 << 20)), (0.0, others(1e9, 1 << 20)));
        assert!(iops.is_finite() && iops >= 1.0 && bytes.is_finite() && bytes >= 1.0);
    }

    #[test]
    fn wait_behind_others_is_that_of_the_queue() {
        let constant = |us: u64| {
            let mut histogram = Histogram::new();
            histogram.record(Nanos::from_micros(us), 1000);
            histogram
        };
        assert!(wait(&constant(250), 16_000.0, 0.0) < 1e-9);
        // M/M/4 at one half waits 0.087 service times, M/D/4 half as long.
        let waited = wait(&constant(250), 16_000.0, 0.5) / 250e-6;
        assert!((0.03..0.06).contains(&waited), "{waited}");
        // One server at one half, exponential times: half of the response is wait.
        let mut exponential = Histogram::new();
        for i in 0..1000 {
            let time = -(1.0 - (f64::from(i) + 0.5) / 1000.0).ln() * 1e-3;
            exponential.record(Nanos::from_secs_f64(time), 1);
        }
        let waited = wait(&exponential, 1_000.0, 0.5) / 1e-3;
        assert!((0.45..0.52).contains(&waited), "{waited}");
        assert!(wait(&constant(250), 16_000.0, 5.0).is_finite());
    }
}
