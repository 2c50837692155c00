//! In words where a disk's time goes: its limits, the device, the wait for a CPU, or the way
//! between.

use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::host_disks::DiskActivity;

/// Of a limit, what is as good as at it.
const AT_LIMIT: f64 = 0.9;
/// A disk that is busy for more of the time has little room, or many requests.
const BUSY: f64 = 0.9;
/// More of the time than this, and a thread's wait for a CPU is to be seen in its requests.
const WAITING: f64 = 0.1;
/// Of QEMU's latency, what makes the host's the most of it.
const DOMINANT: f64 = 0.6;
/// Fewer requests per second tell nothing.
const FEW: f64 = 1.0;

/// The most that may be done in a second; `None`: as much as can be.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RateLimit {
    /// Requests.
    pub iops: Option<f64>,
    /// Bytes.
    pub bandwidth: Option<f64>,
}

impl RateLimit {
    /// The stricter of each.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        let least = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Self {
            iops: least(self.iops, other.iops),
            bandwidth: least(self.bandwidth, other.bandwidth),
        }
    }
}

/// What is known of a disk's last seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence<'a> {
    /// Requests per second at QEMU.
    pub iops: f64,
    /// Bytes per second at QEMU.
    pub bandwidth: f64,
    /// Mean latency at QEMU.
    pub at_qemu: Option<Nanos>,
    /// QEMU's own limits.
    pub limits: RateLimit,
    /// The cgroup's limits on the disk below, the least of reads' and writes'.
    pub cgroup_limits: RateLimit,
    /// The disk below that is busiest.
    pub disk: Option<(&'a str, DiskActivity)>,
    /// Share of the time in which the busiest waiting thread of QEMU waited for a CPU.
    pub cpu_wait: f64,
}

/// Where the time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Where {
    /// There is next to no I/O.
    Idle,
    /// QEMU's limit holds it.
    QemuLimit,
    /// Its cgroup's limit holds it.
    CgroupLimit,
    /// In the disk below, which has no room.
    BusyDevice,
    /// In the disk below, which has room.
    Device,
    /// QEMU's thread waits for a CPU.
    Cpu,
    /// Between QEMU and the disk: a queue, a filesystem, an image format.
    Between,
    /// It cannot be told.
    Unknown,
}

/// Where the time goes, by the first rule that holds.
#[must_use]
pub fn judge(evidence: &Evidence<'_>) -> Where {
    let at = |rate: f64, limit: Option<f64>| limit.is_some_and(|limit| rate >= AT_LIMIT * limit);
    let held =
        |limit: RateLimit| at(evidence.iops, limit.iops) || at(evidence.bandwidth, limit.bandwidth);
    if evidence.iops < FEW {
        return Where::Idle;
    }
    if held(evidence.limits) {
        return Where::QemuLimit;
    }
    if held(evidence.cgroup_limits) {
        return Where::CgroupLimit;
    }
    let (Some(at_qemu), Some((_, disk))) = (evidence.at_qemu, evidence.disk) else {
        return if evidence.cpu_wait > WAITING { Where::Cpu } else { Where::Unknown };
    };
    let on_host = disk.mean.map_or(0.0, |mean| mean.get() as f64);
    if on_host >= DOMINANT * at_qemu.get() as f64 {
        return if disk.busy >= BUSY { Where::BusyDevice } else { Where::Device };
    }
    if evidence.cpu_wait > WAITING { Where::Cpu } else { Where::Between }
}

/// The sentence that goes with it.
#[must_use]
pub fn explain(found: Where, evidence: &Evidence<'_>) -> String {
    let disk = evidence.disk.map_or("its disk", |(name, _)| name);
    let activity = evidence.disk.map(|(_, activity)| activity).unwrap_or_default();
    let time = |time: Option<Nanos>| time.map_or("-".to_owned(), |time| time.to_string());
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    match found {
        Where::Idle => "idle".to_owned(),
        Where::QemuLimit => "held by its limit in QEMU".to_owned(),
        Where::CgroupLimit => format!("held by its cgroup's limit on {disk}"),
        Where::BusyDevice => format!(
            "in the device: {disk} is busy {} of the time with {:.1} requests, {} each",
            percent(activity.busy),
            activity.depth,
            time(activity.mean)
        ),
        Where::Device => format!(
            "in the device: {disk} takes {} a request, {} of the time busy",
            time(activity.mean),
            percent(activity.busy)
        ),
        Where::Cpu => format!(
            "waiting for a CPU: a thread of its QEMU waits {} of the time",
            percent(evidence.cpu_wait)
        ),
        Where::Between => format!(
            "between QEMU ({}) and {disk} ({}): queue, image format or filesystem",
            time(evidence.at_qemu),
            time(activity.mean)
        ),
        Where::Unknown => "cannot be told from here".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence() -> Evidence<'static> {
        let activity = DiskActivity {
            busy: 0.5,
            iops: 1000.0,
            mean: Some(Nanos::from_micros(900)),
            depth: 0.9,
            ..DiskActivity::default()
        };
        Evidence {
            iops: 1000.0,
            bandwidth: 4e6,
            at_qemu: Some(Nanos::from_millis(1)),
            disk: Some(("sda", activity)),
            ..Evidence::default()
        }
    }

    #[test]
    fn each_cause_is_named() {
        let with = |change: fn(&mut Evidence<'static>)| {
            let mut evidence = evidence();
            change(&mut evidence);
            let found = judge(&evidence);
            assert!(!explain(found, &evidence).is_empty());
            found
        };
        let slow = |e: &mut Evidence<'static>| e.at_qemu = Some(Nanos::from_millis(20));
        assert_eq!(with(|_| ()), Where::Device);
        assert_eq!(with(|e| e.iops = 0.1), Where::Idle);
        assert_eq!(with(|e| e.limits.iops = Some(1050.0)), Where::QemuLimit);
        assert_eq!(with(|e| e.limits.iops = Some(2000.0)), Where::Device);
        assert_eq!(with(|e| e.cgroup_limits.bandwidth = Some(4.1e6)), Where::CgroupLimit);
        assert_eq!(
            with(|e| {
                let Some((_, disk)) = &mut e.disk else { return };
                disk.busy = 0.99;
            }),
            Where::BusyDevice
        );
        assert_eq!(with(|e| e.disk = None), Where::Unknown);
        assert_eq!(with(slow), Where::Between);
        assert_eq!(
            with(|e| {
                e.at_qemu = Some(Nanos::from_millis(20));
                e.cpu_wait = 0.4;
            }),
            Where::Cpu
        );
    }
}
