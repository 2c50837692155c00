//! A profile from watching a disk that is in use, without a request of one's own.
//!
//! The block layer's tracepoints tell how long each request took and how many were under way
//! meanwhile. From that come: response times, of requests that found the disk idle; capacity, as the
//! most that it completed a second in any state that it was in for long enough (what it can do beyond
//! that was not seen: the least that it can do); and tails, window by window, each a run of the load
//! that was there. What was not seen is not made up: without large requests a 128 KiB request is taken
//! to cost as much as 32 of 4 KiB, the most that it can, and no regime but that without a capped
//! writer has a bound.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::Host;
use rtvirtio_host::block_trace::{MAX_UNDER_WAY, Service, SizeClass};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_host::storage::Leaf;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::profile::{Capacity, Profile, ProfileSource, Response};
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_units::{Bytes, BytesPerSecond, Nanos, Percentile};

use crate::calibration::{ObservedWindow, fit_observed};
use crate::in_use::scheduler_of;
use crate::load::{CanaryThread, canary_summary};
use crate::neighbours::OtherLoad;

/// A window's tail is one run.
const WINDOW: Duration = Duration::from_secs(5);
/// Completions in a state without which its rate is chance.
const ENOUGH: u64 = 1000;
/// Requests of a size without which it was not seen.
const SEEN: u64 = 200;
/// 4 KiB in 128 KiB.
const SMALL_IN_LARGE: f64 = 32.0;
const SMALL: f64 = 4096.0;
const LARGE: f64 = 131_072.0;

/// Watches the disk `leaf` for `time`.
///
/// # Errors
/// This process may not use the tracepoints, the disk was hardly used, or the user interrupts.
pub fn observe(
    host: &Host,
    leaf: &Leaf,
    time: Duration,
    interrupted: &Interrupted,
) -> Result<Profile> {
    let node = leaf.node();
    let identity = host.identity(&node)?;
    let scheduler = scheduler_of(host, leaf)?;
    let trace = host.trace_service(&node)?;
    let count = (time.as_secs_f64() / WINDOW.as_secs_f64()).ceil() as usize;
    let mut progress = Progress::new(count, time);
    let mut whole = Service::default();
    let (mut windows, mut lost) = (Vec::new(), 0);
    for _ in 0..count {
        progress.start("calibrate: watching the disk", WINDOW);
        let canary = CanaryThread::start();
        let begin = Instant::now();
        wait(WINDOW, interrupted)?;
        let seen = trace.take()?;
        lost += seen.lost;
        let seconds = begin.elapsed().as_secs_f64();
        let late = canary_summary(&canary.lateness()).p99;
        if let Some(service) = seen.service {
            whole.merge(&service);
            windows.push((service, seconds, late));
        }
        progress.finish(WINDOW);
    }
    if lost > 0 {
        progress.note(&format!("calibrate: {lost} records of the block layer were lost"));
    }
    let seen = whole.small.all.count() + whole.large.all.count();
    ensure!(
        whole.small.all.count() >= ENOUGH,
        "{} did {seen} requests meanwhile, and {} of up to 16 KiB: too few to tell what it does; watch it for \
         longer or when it is used, or measure it (calibrate --in DIRECTORY)",
        leaf.name,
        whole.small.all.count()
    );
    let capacity = capacity(&whole)?;
    let runs = windows.iter().filter_map(|(service, seconds, late)| {
        let class = |class: &SizeClass| class.all.count() as f64 / seconds;
        let n = service.large.all.count();
        let others = (n > 0).then(|| OtherLoad {
            iops: class(&service.large),
            block_size: Bytes::new(service.large.bytes / n),
            read_fraction: service.large.reads as f64 / n as f64,
        });
        let (small, iops) = (service.small.all.clone(), class(&service.small));
        let canary = *late;
        (small.count() > 0).then_some(ObservedWindow {
            seconds: *seconds,
            iops,
            small,
            others,
            canary,
        })
    });
    let date = jiff::Timestamp::now().to_string();
    let profile = fit_observed(
        (identity, host.kernel_release()?, MeasuredAt::Host, date),
        capacity,
        scheduler,
        runs.collect(),
    );
    Ok(Profile { firmware: host.firmware(&node), source: ProfileSource::Observed, ..profile })
}

/// The disk that a file or directory lies on.
///
/// # Errors
/// It lies on none of this host, or on several.
pub fn disk_of(host: &Host, path: &Path) -> Result<Leaf> {
    let stack = host.storage(path)?;
    match stack.leaves.as_slice() {
        [leaf] => Ok(leaf.clone()),
        _ => bail!("{} does not lie on one disk of this host: {stack}", path.display()),
    }
}

/// What the device was seen to be able to do.
fn capacity(service: &Service) -> Result<Capacity> {
    let rate = |n: &usize| {
        let seconds = service.time[*n].as_secs_f64();
        (service.done[*n] >= ENOUGH && seconds > 0.0).then(|| service.done[*n] as f64 / seconds)
    };
    let most = (1..=MAX_UNDER_WAY).filter_map(|n| rate(&n)).fold(0.0, f64::max);
    let all = service.small.all.count() + service.large.all.count();
    let seconds: f64 = service.time.iter().map(|time| time.as_secs_f64()).sum();
    // It did at least what it did.
    let most = most.max(all as f64 / seconds.max(1e-3));
    let of_class = |class: &SizeClass| {
        let alone = &class.alone;
        if alone.count() >= SEEN { alone.clone() } else { class.all.clone() }
    };
    let small = of_class(&service.small);
    let n = service.large.all.count();
    if n < SEEN {
        let iops_4k = most;
        let write_throughput = iops_4k * LARGE / SMALL_IN_LARGE;
        let longer = Nanos::from_secs_f64((LARGE - SMALL) / write_throughput);
        let response_4k = response(&small)?;
        let Response { mean, p50, p99, p999 } = response_4k;
        let [mean, p50, p99, p999] = [mean, p50, p99, p999].map(|time| time.saturating_add(longer));
        let response_128k = Response { mean, p50, p99, p999 };
        let write_throughput = BytesPerSecond::new(write_throughput as u64);
        return Ok(Capacity { iops_4k, write_throughput, response_4k, response_128k });
    }
    let large = of_class(&service.large);
    // Device time is taken to be as the responses of requests that found the device idle.
    let (small_s, large_s) = (small.mean().as_secs_f64(), large.mean().as_secs_f64());
    let part = n as f64 / all as f64;
    let mean_s = small_s * (1.0 - part) + large_s * part;
    let size = service.large.bytes as f64 / n as f64;
    Ok(Capacity {
        iops_4k: most * mean_s / small_s.max(1e-9),
        write_throughput: BytesPerSecond::new((most * mean_s / large_s.max(1e-9) * size) as u64),
        response_4k: response(&small)?,
        response_128k: response(&large)?,
    })
}

fn response(histogram: &Histogram) -> Result<Response> {
    let at = |p: f64| -> Result<Nanos> {
        let quantile = histogram.quantile(Percentile::new(p)?);
        Ok(quantile.map_or(histogram.max(), |quantile| quantile.value))
    };
    Ok(Response { mean: histogram.mean(), p50: at(50.0)?, p99: at(99.0)?, p999: at(99.9)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(us: u64, n: u64, bytes: u64) -> SizeClass {
        let mut class = SizeClass::default();
        class.all.record(Nanos::from_micros(us), n);
        class.alone.record(Nanos::from_micros(us), n);
        class.bytes = n * bytes;
        class
    }

    /// Four channels of 250 µs, used at one half.
    fn half_used() -> Service {
        let mut service = Service::default();
        service.small = class(250, 80_000, 4096);
        for (n, (seconds, rate)) in
            [(0.13, 0.0), (0.26, 4_000.0), (0.27, 8_000.0), (0.18, 12_000.0), (0.16, 16_000.0)]
                .into_iter()
                .enumerate()
        {
            service.time[n] = Nanos::from_secs_f64(seconds * 10.0);
            service.done[n] = (rate * seconds * 10.0) as u64;
        }
        service
    }

    #[test]
    fn capacity_is_the_most_that_was_completed_in_a_state() {
        let found = capacity(&half_used()).unwrap();
        assert!((found.iops_4k / 16_000.0 - 1.0).abs() < 0.01, "{found:?}");
        // Nothing large was seen: the least that it can be.
        assert!((found.write_throughput.get() as f64 / 65.5e6 - 1.0).abs() < 0.01, "{found:?}");
        assert!(found.response_128k.mean > found.response_4k.mean);
    }

    #[test]
    fn large_requests_cost_what_they_take() {
        let mut service = half_used();
        service.large = class(1_000, 4_000, 128 << 10);
        let found = capacity(&service).unwrap();
        // Each takes four times as long as a small one.
        let per_second = found.write_throughput.get() as f64 / LARGE;
        assert!((found.iops_4k / per_second - 4.0).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn state_that_was_hardly_visited_does_not_count() {
        let mut service = half_used();
        (service.time[9], service.done[9]) = (Nanos::from_micros(1), 500);
        let found = capacity(&service).unwrap();
        assert!(found.iops_4k < 17_000.0, "{found:?}");
    }
}
