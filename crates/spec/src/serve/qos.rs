//! What a disk is promised on the physical device that it shares, and the devices' schedules.

use rtvirtio_units::{BytesPerSecond, Iops, Name, Nanos, Weight};

use super::check::{Misplaced, at, in_range};
use super::error::Fault;
use super::{IoPriority, wire};

/// Most channels of a device.
pub const MAX_CHANNELS: u64 = 65_536;
/// Longest that one request may be said to take, ns.
const MAX_COST_NS: u64 = 10_000_000_000;
/// Longest deadline, µs.
const MAX_DEADLINE_US: u64 = 60_000_000;
/// Largest burst.
const MAX_BURST: u64 = 65_536;
/// Highest rate of requests.
const MAX_IOPS: u64 = Iops::MAX.get() as u64;
/// Highest rate of bytes: TOML's integers end there.
const MAX_BANDWIDTH: u64 = i64::MAX as u64;
/// Most tasks of a disk.
pub const MAX_TASKS: usize = 8;
/// Weights, as those of bfq.
const MAX_WEIGHT: u64 = 1_000;

/// A physical device whose disks share a schedule: what it can do.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Unique name.
    pub name: Name,
    /// Requests that it serves at a time, 1 to [`MAX_CHANNELS`].
    pub channels: u32,
    /// What a read or write takes of a channel before its bytes.
    pub request: Nanos,
    /// What each KiB takes further.
    pub kib: Nanos,
    /// What a flush or discard takes.
    pub flush: Nanos,
}

/// A disk's part of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Qos {
    /// The schedule of the device.
    pub schedule: Name,
    /// Its part of what promises leave, 1 to 1000.
    pub weight: Weight,
    /// What it is promised, if anything.
    pub promise: Option<Promise>,
    /// The most that it gets.
    pub limit: Option<Rate>,
    /// Of its requests, those with a promise of their own: at most [`MAX_TASKS`], each once. All
    /// promises together are the disk's; a guest that marks more than it should exceeds only its
    /// own.
    pub tasks: Vec<Task>,
}

/// A guest's task, recognised by how it marks its requests: a hint that nobody can trust.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// What it marks them with.
    pub ioprio: IoPriority,
    /// What it is promised.
    pub promise: Promise,
}

/// What a disk is promised.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// How long a request within the rate may take.
    pub deadline: Nanos,
    /// Within this.
    pub rate: Rate,
}

/// So many requests and bytes a second: one of both at least.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    /// Requests a second.
    pub iops: Option<Iops>,
    /// Bytes a second.
    pub bandwidth: Option<BytesPerSecond>,
    /// Requests that may come at once, 1 to 65536.
    pub burst: u32,
}

/// The rate of three keys; `None` if neither of the first two is there.
fn rate(
    (iops_key, iops): (&'static str, Option<u64>),
    (bandwidth_key, bandwidth): (&'static str, Option<wire::Size>),
    (burst_key, burst): (&'static str, Option<u32>),
) -> Result<Option<Rate>, Fault> {
    let iops = iops.map(|n| {
        let outside = Fault::OutOfRange { key: iops_key, found: n, low: 1, high: MAX_IOPS };
        // Exact as far as the limit.
        Iops::new(n as f64).map_err(|_| outside)
    });
    let iops = iops.transpose()?;
    let bytes = bandwidth.map(|size| size.0.get());
    let bytes = bytes.map(|n| in_range(bandwidth_key, n, 512, MAX_BANDWIDTH)).transpose()?;
    let burst = burst.map(|n| in_range(burst_key, n.into(), 1, MAX_BURST)).transpose()?;
    if iops.is_none() && bytes.is_none() {
        return match burst {
            Some(_) => Err(Fault::BurstAlone(burst_key)),
            None => Ok(None),
        };
    }
    Ok(Some(Rate {
        iops,
        bandwidth: bytes.map(BytesPerSecond::new),
        burst: burst.unwrap_or(1) as u32,
    }))
}

/// The promise of four keys, if any of them is there.
fn promise(
    deadline_us: Option<u64>,
    iops: Option<u64>,
    bandwidth: Option<wire::Size>,
    burst: Option<u32>,
) -> Result<Option<Promise>, Fault> {
    let deadline = deadline_us.map(|us| in_range("deadline_us", us, 1, MAX_DEADLINE_US));
    let promised = rate(("iops", iops), ("bandwidth", bandwidth), ("burst", burst))?;
    match (deadline.transpose()?, promised) {
        (None, None) => Ok(None),
        (Some(us), Some(rate)) => Ok(Some(Promise { deadline: Nanos::from_micros(us), rate })),
        _ => Err(Fault::HalfPromise),
    }
}

/// Whether a limit lets through what is promised within it: the data plane keeps promises, and would break the limit.
fn check_limit<'a>(
    limit: &Rate,
    promises: impl Iterator<Item = &'a Promise> + Clone,
) -> Result<(), Fault> {
    let iops =
        promises.clone().filter_map(|promise| promise.rate.iops).map(|iops| iops.get() as u64);
    let bytes = promises.filter_map(|promise| promise.rate.bandwidth).map(|rate| rate.get());
    let iops = iops.fold(0, u64::saturating_add);
    let bytes = bytes.fold(0, u64::saturating_add);
    let limits = [
        ("max_iops", iops, limit.iops.map(|iops| iops.get() as u64)),
        ("max_bandwidth", bytes, limit.bandwidth.map(|rate| rate.get())),
    ];
    for (key, promised, limit) in limits {
        if let Some(limit) = limit.filter(|&limit| promised > limit) {
            return Err(Fault::PromiseBeyondLimit { key, promised, limit });
        }
    }
    Ok(())
}

impl Schedule {
    /// Checks one.
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(raw: wire::Schedule) -> Result<Self, Fault> {
        Self::located(raw).map_err(|(_, fault)| fault)
    }

    pub(super) fn located(raw: wire::Schedule) -> Result<Self, Misplaced> {
        let channels = in_range("channels", raw.channels.into(), 1, MAX_CHANNELS);
        at(&["channels"], channels)?;
        at(&["request_ns"], in_range("request_ns", raw.request_ns, 1, MAX_COST_NS))?;
        at(&["kib_ns"], in_range("kib_ns", raw.kib_ns, 0, MAX_COST_NS))?;
        let flush = raw.flush_ns.unwrap_or(raw.request_ns);
        at(&["flush_ns"], in_range("flush_ns", flush, 1, MAX_COST_NS))?;
        Ok(Self {
            name: raw.name,
            channels: raw.channels,
            request: Nanos::new(raw.request_ns),
            kib: Nanos::new(raw.kib_ns),
            flush: Nanos::new(flush),
        })
    }
}

impl Qos {
    pub(super) fn located(raw: wire::Qos, schedules: &[Name]) -> Result<Self, Misplaced> {
        if !schedules.contains(&raw.schedule) {
            return Err((&["qos", "schedule"], Fault::NoSchedule(raw.schedule)));
        }
        Self::new(raw).map_err(|fault| (&["qos"] as &[_], fault))
    }

    /// Checks one; whether there is such a schedule is not known here.
    ///
    /// # Errors
    /// [`Fault`]: which rule it breaks.
    pub fn new(raw: wire::Qos) -> Result<Self, Fault> {
        let weight = raw.weight.unwrap_or(100);
        let own = promise(raw.deadline_us, raw.iops, raw.bandwidth, raw.burst)?;
        if raw.tasks.len() > MAX_TASKS {
            return Err(Fault::TooManyTasks(raw.tasks.len()));
        }
        let mut tasks: Vec<Task> = Vec::with_capacity(raw.tasks.len());
        for wire::Task { ioprio, deadline_us, iops, bandwidth, burst } in raw.tasks {
            if tasks.iter().any(|task| task.ioprio == ioprio) {
                return Err(Fault::DuplicateTask(ioprio));
            }
            let promise = promise(deadline_us, iops, bandwidth, burst)?;
            tasks.push(Task { ioprio, promise: promise.ok_or(Fault::HalfPromise)? });
        }
        let limit = rate(
            ("max_iops", raw.max_iops),
            ("max_bandwidth", raw.max_bandwidth),
            ("max_burst", raw.max_burst),
        )?;
        if let Some(limit) = &limit {
            check_limit(limit, own.iter().chain(tasks.iter().map(|task| &task.promise)))?;
        }
        let found = u64::from(weight);
        let weight = Weight::new(weight).map_err(|_| Fault::OutOfRange {
            key: "weight",
            found,
            low: 1,
            high: MAX_WEIGHT,
        })?;
        Ok(Self { schedule: raw.schedule, weight, promise: own, limit, tasks })
    }
}

/// As `Device::new` reads it back.
impl From<&Qos> for wire::Qos {
    fn from(qos: &Qos) -> Self {
        let promise = qos.promise.as_ref();
        let iops = |rate: &Rate| rate.iops.map(|iops| iops.get() as u64);
        let bandwidth =
            |rate: &Rate| rate.bandwidth.map(|n| wire::Size(rtvirtio_units::Bytes::new(n.get())));
        let us = |time: Nanos| time.get() / 1_000;
        Self {
            schedule: qos.schedule.clone(),
            weight: Some(qos.weight.get().into()),
            deadline_us: promise.map(|p| us(p.deadline)),
            iops: promise.and_then(|p| iops(&p.rate)),
            bandwidth: promise.and_then(|p| bandwidth(&p.rate)),
            burst: promise.map(|p| p.rate.burst),
            max_iops: qos.limit.as_ref().and_then(iops),
            max_bandwidth: qos.limit.as_ref().and_then(bandwidth),
            max_burst: qos.limit.as_ref().map(|rate| rate.burst),
            tasks: qos
                .tasks
                .iter()
                .map(|Task { ioprio, promise }| wire::Task {
                    ioprio: *ioprio,
                    deadline_us: Some(us(promise.deadline)),
                    iops: iops(&promise.rate),
                    bandwidth: bandwidth(&promise.rate),
                    burst: Some(promise.rate.burst),
                })
                .collect(),
        }
    }
}
