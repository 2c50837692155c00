//! The structural model, found by measurement.
//!
//! A request's response is its *base* response (device service, queueing
//! behind the other depth-1 requests, software) plus the time for which
//! something blocks the device for it. *Blockings* recur: each has a rate and
//! a length.
//!
//! | blocking | rate | length |
//! | --- | --- | --- |
//! | a capped VM's burst | 1 / burst | cap × burst / throughput |
//! | bfq idling on other VMs' queues | 1 / (n·slice) | (n − 1)·slice |
//! | a stall of the device | measured | measured |
//! | an unlimited deep queue | always | depth × service / channels |
//!
//! Under iocost a deep queue without a limit is held back by its weight. What a request still waits
//! for it depends on the time that iocost takes to notice, which no law tells: the wait is a constant
//! of the profile for each setting, on top of the base response.
//!
//! *burst*: blk-throttle releases a cap in slices (`DFL_THROTL_SLICE_HD`,
//! HZ/10, kernel `block/blk-throttle.c`), so that a capped VM sends
//! cap × slice at once, each slice. *slice*: `timeout_sync`, or the time that
//! `max_budget` takes at depth 1 if that is less (bfq expires the queue in
//! service on either, kernel `block/bfq-iosched.c`).
//!
//! While a burst is worked off, those whom no cap holds back go on: where they use a part u of the device,
//! that takes ℓ / (1 − u), and a request that comes meanwhile waits for what is left of ℓ. So it is
//! r · (ℓ − x) / (1 − u) of all that wait longer than x (the fluid limit of a queue's busy period). That matters to
//! streams that keep several requests in flight; others meet a burst with one.
//!
//! A stream of rate λ and depth d has at most d requests waiting, so a blocking
//! of rate r and length ℓ makes a fraction `r · min(ℓ − x, d/λ)` of its
//! requests wait longer than x; a request that is blocked has otherwise the mean
//! base response, as the two are independent. Bursts of several capped VMs may
//! coincide, and are taken to. The tail at p is the t at which the fractions that
//! base and blockings keep longer than t sum to 1 − p. (A rare blocking is
//! invisible to a low percentile of a fast stream, and is not to one of a slow
//! stream.)
//!
//! Bursts come at the pace of a timer, and so do the requests of many tasks. A stream may keep step with them, so that
//! each burst meets one of its requests at the same time of its length, which may be its beginning. So a fraction
//! `r / λ` at least is taken to wait for all of a burst. (Of tasks of 100 requests a second beside a capped writer, p99
//! was up to 1 ms longer than it is where requests come at any time, and in others shorter by all of the burst.)
//!
//! Properties (tests of the same name): `tail_grows_with_percentile`,
//! `tail_grows_with_a_neighbours_cap`, `stream_in_step_with_bursts_waits_for_whole_ones`, `burst_lasts_longer_on_a_busy_device`, `idling_tail_is_other_vms_times_timeout`,
//! `flood_waits_for_the_whole_queue`.

use rtvirtio_spec::profile::{BasePoint, Capacity, Regime, Response, StructuralFit};
use rtvirtio_spec::settings::Scheduler;
use rtvirtio_units::{Nanos, Percentile};

use crate::{DeviceLoad, Estimate, Stream};

/// Utilisation above which the base response is not extrapolated further.
const SATURATED: f64 = 0.98;

/// Utilisation above which a burst is not taken to last longer still: the estimate of it is not that good.
const BUSY: f64 = 0.9;

/// Recurring times in which a request cannot be served.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Blocking {
    per_second: f64,
    seconds: f64,
    /// How many times as long as `seconds` it takes to work it off, as other requests come meanwhile.
    drain: f64,
    /// It comes at the pace of a timer, so that a stream may keep step with it.
    is_paced: bool,
}

impl Blocking {
    /// The fraction of a stream's requests that wait longer for it than this time, s. Each one may meet requests of
    /// `interval` s, and meets one where the stream keeps step with it, whose requests are so many `apart`, s.
    fn keeps_longer(&self, than: f64, interval: f64, apart: f64) -> f64 {
        let left = (self.seconds - than) * self.drain;
        let met = if self.is_paced && left > 0.0 { apart } else { 0.0 };
        self.per_second * left.clamp(0.0, interval).max(met)
    }
}

/// The model, fitted to one device.
#[derive(Debug, Clone, Copy)]
pub struct Structural<'a> {
    fit: &'a StructuralFit,
    capacity: &'a Capacity,
}

/// A [`DeviceLoad`] with all that its streams share worked out.
#[derive(Debug, Clone, PartialEq)]
pub struct Situation {
    regime: Regime,
    blockings: Vec<Blocking>,
    /// Wait behind an unlimited deep queue, s.
    flood: f64,
    /// What a tail has on top under iocost, s.
    wait: f64,
    scheduler_factor: f64,
    /// Fraction of the device that declared and capped loads use; more than 1 is an overload.
    pub utilisation: f64,
    /// Of that, what declared rates need that no cap holds back: more than 1 of it cannot all be delivered.
    pub declared: f64,
}

impl Situation {
    /// What dominates the tails.
    #[must_use]
    pub const fn regime(&self) -> Regime {
        self.regime
    }

    /// The same if nobody waited for a queue without a limit: to find what such waits add.
    #[must_use]
    pub fn without_queue(self) -> Self {
        Self { flood: 0.0, wait: 0.0, ..self }
    }
}

impl<'a> Structural<'a> {
    /// The model with the numbers of a profile.
    #[must_use]
    pub const fn new(fit: &'a StructuralFit, capacity: &'a Capacity) -> Self {
        Self { fit, capacity }
    }

    /// Device time that one request takes when the device is busy, s: what one
    /// more of them costs, all channels working.
    fn cost(&self, block_size: f64) -> f64 {
        let small = 1.0 / self.capacity.iops_4k;
        let large = 131_072.0 / self.capacity.write_throughput.get() as f64;
        // Linear in length between the two measured sizes, and beyond. Where a cache makes the large one the cheaper,
        // that would come down to nothing: what is longer still takes its bytes' part of the throughput.
        let slope = (large - small) / (131_072.0 - 4096.0);
        let cost = if slope < 0.0 && block_size > 131_072.0 {
            large * block_size / 131_072.0
        } else {
            small + slope * (block_size - 4096.0)
        };
        cost.max(small / 8.0)
    }

    /// The depth from which a queue without a rate or a limit fills the device: twice what is
    /// in flight at capacity (Little's law).
    fn deep(&self) -> f64 {
        2.0 * self.capacity.response_4k.mean.as_secs_f64() * self.capacity.iops_4k
    }

    /// What a request of `block_size` takes longer than one of 4 KiB on the idle device, s.
    fn longer(&self, block_size: f64, of: fn(&Response) -> Nanos) -> f64 {
        let (small, large) = (&self.capacity.response_4k, &self.capacity.response_128k);
        let slope = (of(large).as_secs_f64() - of(small).as_secs_f64()) / (131_072.0 - 4096.0);
        (slope * (block_size - 4096.0)).max(0.0)
    }

    /// What `load` means for every stream on the device.
    #[must_use]
    pub fn situation(&self, load: &DeviceLoad) -> Situation {
        let mut blockings = Vec::new();
        let mut bursts = 0.0;
        let deep = self.deep();
        let mut flood = 0.0;
        let mut utilisation = 0.0;
        let burst = self.fit.burst.as_secs_f64();
        // What those use whom no cap holds back.
        let mut others = 0.0;
        let mut declared = 0.0;
        for vm in &load.vms {
            let cap = vm.cap();
            let is_held = cap.is_some_and(|cap| cap < vm.demand());
            let is_unlimited = |s: &&Stream| s.iops.is_none() && f64::from(s.depth) >= deep;
            for s in &vm.streams {
                let block = s.block_size.get() as f64;
                let lone_rate = f64::from(s.depth) / self.base(0.0).mean.as_secs_f64();
                let rate = s.iops.unwrap_or(lone_rate).min(cap.unwrap_or(f64::INFINITY) / block);
                if !is_unlimited(&s) || cap.is_some() {
                    let used = rate * self.cost(block);
                    utilisation += used;
                    others += if is_held { 0.0 } else { used };
                    declared += if is_held || s.iops.is_none() { 0.0 } else { used };
                }
            }
            match cap {
                Some(cap) if is_held => {
                    let block =
                        vm.streams.iter().map(|s| s.block_size.get()).max().unwrap_or(4096) as f64;
                    let in_flight: u32 = vm.streams.iter().map(|s| s.depth).sum();
                    // No more at once than it keeps in flight.
                    let at_once = (cap * burst / block).min(f64::from(in_flight));
                    // Several capped VMs may be released together.
                    bursts += at_once * self.cost(block);
                }
                _ => {
                    for s in vm.streams.iter().filter(is_unlimited) {
                        flood += f64::from(s.depth) * self.cost(s.block_size.get() as f64);
                    }
                }
            }
        }
        if bursts > 0.0 {
            let drain = 1.0 / (1.0 - others.min(BUSY));
            let per_second = 1.0 / burst;
            blockings.push(Blocking { per_second, seconds: bursts, drain, is_paced: true });
        }
        if let Some(stalls) = self.fit.stalls {
            let seconds = stalls.length.as_secs_f64();
            let per_second = stalls.per_second;
            blockings.push(Blocking { per_second, seconds, drain: 1.0, is_paced: false });
        }
        let is_flooded = flood > 0.0;
        let is_controlled = is_flooded && matches!(load.scheduler, Scheduler::IoCost(_));
        let slice = self.idle_slice(load.scheduler);
        let regime = match (slice, is_flooded) {
            (None, false) if bursts > 0.0 => Regime::Bursting,
            (None, false) => Regime::Flowing,
            (None, true) if is_controlled => Regime::Controlled,
            (None, true) => Regime::Flooded,
            (Some(_), false) => Regime::Idling,
            (Some(_), true) => Regime::IdlingFlooded,
        };
        if let Some(slice) = slice {
            let vms = load.vms.iter().filter(|vm| !vm.streams.is_empty()).count().max(1) as f64;
            if vms > 1.0 {
                let (per_second, seconds) = (1.0 / (vms * slice), (vms - 1.0) * slice);
                blockings.push(Blocking { per_second, seconds, drain: 1.0, is_paced: false });
            }
            // A queue in service keeps the flood out for its slice.
            flood = 0.0;
        }
        let mut wait = 0.0;
        // Without a fit, iocost is taken not to hold the queue back.
        if is_flooded
            && let Scheduler::IoCost(setting) = load.scheduler
            && let Some(fit) = self.fit.iocost(setting, utilisation)
        {
            // iocost lets a whole queue through now and then, while its scale is high: such a wait is rarer than a probe
            // is long, so that it counts whether one was seen or not.
            wait = fit.wait.as_secs_f64().max(flood);
            flood = 0.0;
        }
        let name = load.scheduler.name();
        // Of a scheduler that was not measured no more is known than that the worst may be like it: a disk in use
        // is measured under the one that it has.
        let factors = &self.fit.scheduler_factor;
        let scheduler_factor = factors
            .get(name)
            .copied()
            .unwrap_or_else(|| factors.values().copied().fold(1.0, f64::max));
        Situation { regime, blockings, flood, wait, scheduler_factor, utilisation, declared }
    }

    /// How long bfq keeps one VM in service while it idles, s; `None` if it does not idle.
    fn idle_slice(&self, scheduler: Scheduler) -> Option<f64> {
        let Scheduler::Bfq(bfq) = scheduler else { return None };
        if bfq.slice_idle_us == 0 {
            return None;
        }
        let timeout = f64::from(bfq.timeout_sync_ms) / 1e3;
        if bfq.max_budget == 0 {
            return Some(timeout);
        }
        let requests = f64::from(bfq.max_budget) / 8.0; // sectors in 4 KiB
        Some(timeout.min(requests * self.capacity.response_4k.mean.as_secs_f64()))
    }

    /// Base tails at a utilisation: linear between the measured points, growing
    /// as 1 / (1 − u) beyond the last.
    fn base(&self, utilisation: f64) -> BasePoint {
        let points = &self.fit.base;
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            let r = self.capacity.response_4k;
            return BasePoint { utilisation, mean: r.mean, p99: r.p99, p999: r.p999 };
        };
        if utilisation <= first.utilisation {
            return BasePoint { utilisation, ..*first };
        }
        if utilisation >= last.utilisation {
            let growth = (1.0 - last.utilisation.min(SATURATED))
                / (1.0 - utilisation.min(SATURATED)).max(1e-3);
            let grown = |n: Nanos| n.scale(growth.max(1.0));
            return BasePoint {
                utilisation,
                mean: grown(last.mean),
                p99: grown(last.p99),
                p999: grown(last.p999),
            };
        }
        let above = points.iter().position(|p| p.utilisation > utilisation).unwrap_or(1).max(1);
        let (a, b) = (&points[above - 1], &points[above]);
        let t = (utilisation - a.utilisation) / (b.utilisation - a.utilisation);
        let between = |x: Nanos, y: Nanos| {
            Nanos::from_secs_f64(x.as_secs_f64() * (1.0 - t) + y.as_secs_f64() * t)
        };
        BasePoint {
            utilisation,
            mean: between(a.mean, b.mean),
            p99: between(a.p99, b.p99),
            p999: between(a.p999, b.p999),
        }
    }

    /// The estimate for `stream` at percentile `p`.
    #[must_use]
    pub fn estimate(&self, situation: &Situation, stream: &Stream, p: Percentile) -> Estimate {
        let base = self.base(situation.utilisation);
        let factor = situation.scheduler_factor;
        let beyond = 1.0 - p.fraction();
        let block = stream.block_size.get() as f64;
        // What every request has on top of its base response.
        let longer = self.longer(block, |r| r.p999) + situation.flood;
        let mean =
            base.mean.as_secs_f64() * factor + self.longer(block, |r| r.mean) + situation.flood;
        let blocked: f64 = situation
            .blockings
            .iter()
            .map(|b| (b.per_second * b.seconds).min(1.0))
            .sum::<f64>()
            .min(0.99);
        // A closed loop at its limit issues as fast as it is served.
        let most = f64::from(stream.depth) * (1.0 - blocked) / mean;
        let rate = stream.iops.unwrap_or(most).min(most);
        // Of more than the device can do, each stream gets its part at best, however long it is ready to wait.
        let part = 1.0 / situation.declared.max(1.0);
        let delivered = stream.iops.map_or(1.0, |wanted| (most / wanted).min(part));
        // A blocking may meet as many of its requests as it keeps in flight.
        let interval = f64::from(stream.depth) / rate;
        let base_tail = tail_of(&base, beyond) * factor + longer;
        let exceeding = |t: f64| -> f64 {
            let blocked =
                situation.blockings.iter().map(|b| b.keeps_longer(t - mean, interval, 1.0 / rate));
            beyond_of(&base, (t - longer) / factor) + blocked.sum::<f64>()
        };
        let longest = situation.blockings.iter().map(|b| b.seconds).fold(0.0, f64::max);
        // The fraction falls with t; 24 halvings leave less than 10^-7 of the longest blocking.
        let (mut low, mut high) = (base_tail, base_tail + longest);
        for _ in 0..24 {
            let middle = f64::midpoint(low, high);
            if exceeding(middle) > beyond { low = middle } else { high = middle }
        }
        let regime_factor = self.fit.regime_factor.get(&situation.regime).copied().unwrap_or(1.0);
        let tail = Nanos::from_secs_f64(high * regime_factor + situation.wait);
        Estimate { tail, delivered, regime: situation.regime }
    }
}

/// The base tail, s: linear in log(1 − p) through p99 and p99.9.
fn tail_of(base: &BasePoint, beyond: f64) -> f64 {
    let (p99, p999) = (base.p99.as_secs_f64(), base.p999.as_secs_f64());
    let decades = (0.01 / beyond).log10();
    (p99 + (p999 - p99) * decades).max(base.mean.as_secs_f64())
}

/// The fraction of base responses longer than `tail`, s: the inverse of [`tail_of`].
fn beyond_of(base: &BasePoint, tail: f64) -> f64 {
    let (p99, p999) = (base.p99.as_secs_f64(), base.p999.as_secs_f64());
    let decades = (tail - p99) / (p999 - p99).max(1e-9);
    (0.01 * 10_f64.powf(-decades)).min(1.0)
}

#[cfg(test)]
mod tests;
