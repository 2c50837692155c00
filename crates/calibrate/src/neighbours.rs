//! Those who use the disk that is measured, and must not notice.
//!
//! VMs are watched at their QEMUs, and everybody who uses the disk in the host's block layer, which
//! tells them from the measurement by the sectors of its file. What each does while nothing is
//! measured is its normal. A neighbour is disturbed when its target is broken, or, without a target or
//! with one that it does not keep on its own, when its tail is a given factor above its normal.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_host::{Extent, Host};
use rtvirtio_observe::host_disks::HostCounters;
use rtvirtio_observe::host_latency::HostLatency;
use rtvirtio_observe::session::Session;
use rtvirtio_observe::vms::Disk;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_units::{Bytes, Nanos, Percentile};
use serde::{Deserialize, Serialize};

/// How often the neighbours are looked at.
const LOOK: Duration = Duration::from_millis(250);
/// By how much a tail must be above its normal to count.
const NOTICED: Nanos = Nanos::from_micros(500);
/// Requests that show a 90th percentile, and a 99th.
const FEW: u64 = 100;
const MANY: u64 = 1000;
/// Requests above a target that are no chance.
const NO_CHANCE: u64 = 2;
/// Requests a second of others that make a disk one in use; a filesystem that notes what was written
/// issues a few.
const IN_USE: f64 = 20.0;

/// What others have a device do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OtherLoad {
    /// Requests per second.
    pub iops: f64,
    /// Their mean size.
    pub block_size: Bytes,
    /// Fraction of reads, 0 to 1.
    pub read_fraction: f64,
}

impl OtherLoad {
    /// What lies in the middle of two.
    fn between(self, other: Self) -> Self {
        let iops = f64::midpoint(self.iops, other.iops);
        let weighted = |of: fn(&Self) -> f64| {
            (of(&self) * self.iops + of(&other) * other.iops) / (self.iops + other.iops).max(1e-9)
        };
        Self {
            iops,
            block_size: Bytes::new(weighted(|load| load.block_size.get() as f64) as u64),
            read_fraction: weighted(|load| load.read_fraction),
        }
    }
}

/// How long a neighbour's requests may take while the disk is measured.
#[derive(Debug, Clone, PartialEq)]
pub struct NeighbourTarget {
    /// Whose; `None`: everybody's on the disk.
    pub vm: Option<String>,
    /// Which disk of the VM, by any of its names; `None`: each.
    pub disk: Option<String>,
    /// Which percentile.
    pub percentile: Percentile,
    /// At most so long.
    pub latency: Nanos,
}

/// A probe that was stopped for a neighbour's sake.
#[derive(Debug, thiserror::Error)]
#[error(
    "it disturbed a neighbour ({0}); calibrate in a quieter hour, let it be disturbed more (--tolerate), or \
     say what it may take (--target)"
)]
pub struct GaveUp(pub String);

/// A percentile of a neighbour's requests.
#[derive(Debug, Clone, Copy)]
struct Tail {
    percentile: f64,
    value: Nanos,
}

/// The highest percentile that so many requests show; `None`: too few.
fn tail(histogram: &Histogram, percentile: Option<f64>) -> Option<Tail> {
    let highest = match histogram.count() {
        n if n >= MANY => 99.0,
        n if n >= FEW => 90.0,
        _ => return None,
    };
    let percentile = percentile.map_or(highest, |asked| asked.min(highest));
    let value = histogram.quantile(Percentile::new(percentile).ok()?)?.value;
    Some(Tail { percentile, value })
}

/// Requests that took longer.
fn above(histogram: &Histogram, latency: Nanos) -> u64 {
    histogram.bins().filter(|(value, _)| *value > latency).map(|(_, count)| count).sum()
}

/// What a neighbour does when nobody measures, and did since a probe began.
#[derive(Debug, Default)]
struct Watched {
    target: Option<(Percentile, Nanos)>,
    normal: Histogram,
    normal_seconds: f64,
    probe: Histogram,
    /// Requests and seconds of the probe's last looks: a load has a beginning.
    last: VecDeque<(u64, f64)>,
}

/// So many, of [`LOOK`] each.
const LAST_LOOKS: usize = 4;

impl Watched {
    /// Its target, if it keeps it when nobody measures.
    fn kept_target(&self) -> Option<(Percentile, Nanos)> {
        let keeps = |&(percentile, latency): &(Percentile, Nanos)| {
            let allowed = self.normal.count() as f64 * (1.0 - percentile.fraction());
            above(&self.normal, latency) as f64 <= allowed
        };
        self.target.filter(keeps)
    }

    /// What a tail may be whose normal is this.
    fn limit(normal: Nanos, tolerated: f64) -> Nanos {
        normal.scale(tolerated).max(normal.saturating_add(NOTICED))
    }

    /// The longest that its requests may take.
    fn tolerates(&self, tolerated: f64) -> Option<Nanos> {
        let by_normal = || Some(Self::limit(tail(&self.normal, None)?.value, tolerated));
        self.kept_target().map_or_else(by_normal, |(_, latency)| Some(latency))
    }

    /// Why a probe has to stop.
    fn disturbance(&self, tolerated: f64) -> Option<String> {
        if let Some((percentile, latency)) = self.kept_target() {
            let (late, n) = (above(&self.probe, latency), self.probe.count());
            let is_broken =
                late >= NO_CHANCE && late as f64 > n as f64 * (1.0 - percentile.fraction());
            return is_broken.then(|| format!("{late} of {n} requests took more than {latency}"));
        }
        let now = tail(&self.probe, None)?;
        let normal = tail(&self.normal, Some(now.percentile))?;
        let now = tail(&self.probe, Some(normal.percentile))?;
        let is_slow = now.value > Self::limit(normal.value, tolerated);
        is_slow
            .then(|| format!("p{} was {} instead of {}", now.percentile, now.value, normal.value))
    }
}

/// What a look is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing is measured.
    Normal,
    /// Something is.
    Probe,
    /// The end of a probe, which is neither.
    Between,
}

/// Everybody who uses the disk.
const EVERYBODY: &str = "all users of the disk";

/// The VMs and others that use the disk.
pub(crate) struct Neighbours {
    session: Session,
    counters: HostCounters,
    on_host: HostLatency<()>,
    /// Kernel name of the disk.
    disk: String,
    targets: Vec<NeighbourTarget>,
    /// By process of a VM and name of its disk; 0: everybody.
    watched: BTreeMap<(u32, String), Watched>,
    /// How many times its normal a tail may be.
    tolerated: f64,
    /// What they had the disk do when they were last watched; `None`: nothing to speak of.
    load: Option<OtherLoad>,
}

impl Neighbours {
    /// The VMs on `disk`. Others are watched from [`Self::tell_apart`] on.
    pub(crate) fn new(
        host: Host,
        disk: &str,
        (targets, tolerated): (Vec<NeighbourTarget>, f64),
    ) -> Result<Self> {
        let on_host = HostLatency::new(host.clone(), |()| EVERYBODY.to_owned());
        let counters = HostCounters::new(host.sysfs());
        let mut session = Session::new(host);
        session.refresh()?;
        session.look();
        Ok(Self {
            session,
            counters,
            on_host,
            disk: disk.to_owned(),
            targets,
            watched: BTreeMap::new(),
            tolerated,
            load: None,
        })
    }

    /// Everybody is watched but in the sectors `own`, which are measured.
    pub(crate) fn tell_apart(&mut self, own: &[Extent], events: &mut Vec<String>) {
        self.on_host.measure(&[((), Extent::others(own))].into(), events);
    }

    /// Targets of VMs that do not run, or have no such disk here: nobody would be kept by them.
    pub(crate) fn unknown_targets(&self) -> Vec<String> {
        let is_here = |target: &NeighbourTarget, disk: &Disk| {
            let named = target.disk.as_ref().is_none_or(|name| disk.is_called(name));
            let leaves = disk.storage.iter().flat_map(|stack| &stack.leaves);
            named && leaves.into_iter().any(|leaf| leaf.name == self.disk)
        };
        let is_unknown = |target: &&NeighbourTarget| {
            let Some(vm) = &target.vm else { return false };
            let vms = self.session.vms().filter(|found| found.name == *vm);
            !vms.flat_map(|found| &found.disks).any(|disk| is_here(target, disk))
        };
        let name = |target: &NeighbourTarget| {
            let disk = target.disk.iter().map(|disk| format!("/{disk}"));
            target.vm.iter().cloned().chain(disk).collect::<String>()
        };
        self.targets.iter().filter(is_unknown).map(name).collect()
    }

    /// What they have the disk do; `None`: nothing to speak of.
    pub(crate) const fn load(&self) -> Option<OtherLoad> {
        self.load
    }

    /// The longest that a request of the most delicate of them may take.
    pub(crate) fn tolerate(&self) -> Option<Nanos> {
        self.watched.values().filter_map(|watched| watched.tolerates(self.tolerated)).min()
    }

    /// Looks at them; what disturbs one.
    fn look(&mut self, phase: Phase) -> Option<String> {
        let mut seen: Vec<((u32, String), String, Histogram, f64)> = Vec::new();
        let (looks, _) = self.session.look();
        let _ = self.session.refresh();
        for look in looks {
            let Some(last) = look.last.filter(|last| last.requests() > 0) else { continue };
            if !look.below.iter().any(|(name, _)| *name == self.disk) {
                continue;
            }
            let key = (look.pid, look.disk.name().to_owned());
            if let std::collections::btree_map::Entry::Vacant(entry) =
                self.watched.entry(key.clone())
            {
                let meant = |target: &&NeighbourTarget| {
                    let is_disk = |name: &String| look.disk.is_called(name);
                    target.vm.as_ref() == Some(&look.vm) && target.disk.as_ref().is_none_or(is_disk)
                };
                let of_all = |target: &&NeighbourTarget| target.vm.is_none();
                let target = self.targets.iter().find(meant);
                let target = target.or_else(|| self.targets.iter().find(of_all));
                let target = target.map(|t| (t.percentile, t.latency));
                entry.insert(Watched { target, ..Watched::default() });
            }
            let name = format!("{}/{}", look.vm, look.disk.name());
            seen.push((key, name, last.histogram, last.seconds));
        }
        if let Some((histogram, seconds)) =
            self.on_host.take(Instant::now(), &mut Vec::new()).remove(&())
            && histogram.count() > 0
        {
            let key = (0, EVERYBODY.to_owned());
            let of_all = self.targets.iter().find(|target| target.vm.is_none());
            let target = of_all.map(|target| (target.percentile, target.latency));
            self.watched
                .entry(key.clone())
                .or_insert_with(|| Watched { target, ..Watched::default() });
            seen.push((key, EVERYBODY.to_owned(), histogram, seconds));
        }
        let mut disturbed = None;
        for (key, name, histogram, seconds) in seen {
            let Some(watched) = self.watched.get_mut(&key) else { continue };
            match phase {
                Phase::Normal => {
                    watched.normal.merge(&histogram);
                    watched.normal_seconds += seconds;
                }
                Phase::Probe => {
                    watched.probe.merge(&histogram);
                    watched.last.push_back((histogram.count(), seconds));
                    if watched.last.len() > LAST_LOOKS {
                        watched.last.pop_front();
                    }
                    let why = watched.disturbance(self.tolerated);
                    disturbed = disturbed.or_else(|| why.map(|why| format!("{name}: {why}")));
                }
                Phase::Between => {}
            }
        }
        disturbed
    }

    /// Watches them while nothing is measured.
    pub(crate) fn watch(&mut self, time: Duration, interrupted: &Interrupted) -> Result<()> {
        let end = Instant::now() + time;
        self.look(Phase::Between);
        self.counters.disk(&self.disk);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait(LOOK.min(left), interrupted)?;
            self.look(Phase::Normal);
        }
        let activity = self.counters.disk(&self.disk).filter(|activity| activity.iops > IN_USE);
        self.load = activity.map(|activity| OtherLoad {
            iops: activity.iops,
            block_size: Bytes::new((activity.bandwidth / activity.iops) as u64),
            read_fraction: activity.reads,
        });
        Ok(())
    }

    /// What was left of their rates at the end of the last probe, 0 to 1.
    fn slowdown(&self) -> f64 {
        let (mut before, mut during) = (0.0, 0.0);
        for watched in self.watched.values() {
            let (count, seconds) = watched
                .last
                .iter()
                .fold((0, 0.0), |(n, s), (count, seconds)| (n + count, s + seconds));
            if seconds > 0.2 && watched.normal_seconds > 0.2 {
                before += watched.normal.count() as f64 / watched.normal_seconds;
                during += count as f64 / seconds;
            }
        }
        if before > 0.0 { (during / before).min(1.0) } else { 1.0 }
    }

    /// What they had the disk do during the last probe, from what they did before and do after it.
    pub(crate) fn load_during(&self, before: Option<OtherLoad>) -> Option<OtherLoad> {
        let load = match (before, self.load) {
            (Some(before), Some(after)) => before.between(after),
            (one, other) => one.or(other)?,
        };
        Some(OtherLoad { iops: load.iops * self.slowdown(), ..load })
    }

    /// Does `work` while they are watched; why it was stopped if it was.
    pub(crate) fn guard<T: Send>(
        &mut self,
        interrupted: &Interrupted,
        work: impl FnOnce(&Interrupted) -> Result<T>,
    ) -> Result<Result<T, String>> {
        for watched in self.watched.values_mut() {
            (watched.probe, watched.last) = (Histogram::new(), VecDeque::new());
        }
        self.look(Phase::Normal);
        let (stop, is_done) = (Interrupted::new(false), AtomicBool::new(false));
        let (result, disturbed) = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut since = Instant::now();
                while !is_done.load(Ordering::Relaxed) {
                    if interrupted.load(Ordering::Relaxed) {
                        stop.store(true, Ordering::Relaxed);
                    }
                    std::thread::sleep(Duration::from_millis(50));
                    if since.elapsed() < LOOK {
                        continue;
                    }
                    since = Instant::now();
                    if let Some(why) = self.look(Phase::Probe) {
                        stop.store(true, Ordering::Relaxed);
                        return Some(why);
                    }
                }
                None
            });
            let result = work(&stop);
            is_done.store(true, Ordering::Relaxed);
            (result, watcher.join().unwrap_or(None))
        });
        match (result, disturbed) {
            _ if interrupted.load(Ordering::Relaxed) => Err(InterruptedError.into()),
            (Ok(done), _) => Ok(Ok(done)),
            (Err(_), Some(why)) => Ok(Err(why)),
            (Err(error), None) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(each: u64, n: u64) -> Histogram {
        let mut histogram = Histogram::new();
        histogram.record(Nanos::from_micros(each), n);
        histogram
    }

    fn watched(normal: (u64, u64), probe: (u64, u64)) -> Watched {
        Watched {
            normal: histogram(normal.0, normal.1),
            probe: histogram(probe.0, probe.1),
            ..Watched::default()
        }
    }

    #[test]
    fn neighbour_is_disturbed_at_twice_its_normal_and_not_by_little() {
        let disturbed = |normal: (u64, u64), probe: (u64, u64)| {
            watched(normal, probe).disturbance(2.0).is_some()
        };
        assert!(!disturbed((1000, 5000), (1900, 5000)));
        assert!(disturbed((1000, 5000), (2300, 5000)));
        // Of a disk that takes 100 µs, 300 µs are not to be noticed.
        assert!(!disturbed((100, 5000), (300, 5000)));
        assert!(disturbed((100, 5000), (700, 5000)));
        // A few requests show a 90th percentile, and fewer nothing.
        assert!(disturbed((1000, 5000), (2300, 150)));
        assert!(!disturbed((1000, 5000), (2300, 50)));
        assert!(!disturbed((1000, 50), (2300, 5000)));
    }

    #[test]
    fn target_decides_where_the_neighbour_keeps_it() {
        let target = Some((Percentile::new(99.9).unwrap(), Nanos::from_millis(5)));
        // Eight times its normal, and within its target.
        let within = Watched { target, ..watched((500, 5000), (4000, 5000)) };
        assert_eq!(within.disturbance(2.0), None);
        assert_eq!(within.tolerates(2.0), Some(Nanos::from_millis(5)));
        // One in a thousand may be late, and one alone is chance.
        let mut late = Watched { target, ..watched((500, 5000), (500, 4000)) };
        late.probe.merge(&histogram(6000, 4));
        assert_eq!(late.disturbance(2.0), None);
        late.probe.merge(&histogram(6000, 1));
        assert!(late.disturbance(2.0).unwrap().starts_with("5 of 4005 requests took more than 5"));
        let one = Watched { target, ..watched((500, 5000), (6000, 1)) };
        assert_eq!(one.disturbance(2.0), None);
        // Of a target that is broken anyway nobody can be kept from breaking it.
        let broken = Watched { target, ..watched((6000, 5000), (7000, 5000)) };
        assert_eq!(broken.disturbance(2.0), None);
        assert_eq!(broken.tolerates(2.0).map(|t| t.get() / 1_000_000), Some(12));
    }

    #[test]
    fn load_between_two_watches_is_weighted_by_requests() {
        let load = |iops, kib, read_fraction| OtherLoad {
            iops,
            block_size: Bytes::from_kib(kib),
            read_fraction,
        };
        let between = load(300.0, 4, 1.0).between(load(100.0, 128, 0.0));
        assert_eq!((between.iops, between.read_fraction), (200.0, 0.75));
        assert_eq!(between.block_size, Bytes::from_kib(35));
    }
}
