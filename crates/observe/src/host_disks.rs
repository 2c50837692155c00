//! What the host's disks do, and how long a VM's threads wait for a CPU: counters that anybody may
//! read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rtvirtio_host::sysfs::Sysfs;
use rtvirtio_units::Nanos;
use serde::Serialize;

/// What a disk did between two looks (kernel `Documentation/block/stat.rst`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct DiskActivity {
    /// Share of the time in which it had a request, 0 to 1. A disk that serves many at a time may
    /// have room at 1.
    pub busy: f64,
    /// Reads and writes completed per second.
    pub iops: f64,
    /// Bytes read and written per second.
    pub bandwidth: f64,
    /// The reads' part of `iops`, 0 to 1.
    pub reads: f64,
    /// Mean time from a request's insertion to its completion; `None`: there was none.
    pub mean: Option<Nanos>,
    /// Requests under way, on average.
    pub depth: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    reads: u64,
    requests: u64,
    sectors: u64,
    request_ms: u64,
    busy_ms: u64,
}

/// Reads the counters of disks and threads.
#[derive(Debug)]
pub struct HostCounters {
    sysfs: Arc<dyn Sysfs>,
    disks: BTreeMap<String, (Counts, Instant)>,
    /// Of each process, its threads' waits at the last look.
    waits: BTreeMap<u32, BTreeMap<String, (u64, Instant)>>,
}

impl HostCounters {
    /// Counters of which nothing has been read.
    #[must_use]
    pub fn new(sysfs: Arc<dyn Sysfs>) -> Self {
        Self { sysfs, disks: BTreeMap::new(), waits: BTreeMap::new() }
    }

    /// What the disk of this kernel name did since the last look at it; `None` at the first, and if
    /// it is gone.
    pub fn disk(&mut self, name: &str) -> Option<DiskActivity> {
        let text = self.sysfs.read(&Path::new("/sys/block").join(name).join("stat")).ok()?;
        let fields: Vec<u64> = text.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        let field = |i: usize| fields.get(i).copied().unwrap_or(0);
        let counts = Counts {
            reads: field(0),
            requests: field(0) + field(4),
            sectors: field(2) + field(6),
            request_ms: field(3) + field(7),
            busy_ms: field(9),
        };
        let now = Instant::now();
        let (before, at) = self.disks.insert(name.to_owned(), (counts, now))?;
        Some(activity(before, counts, (now - at).as_secs_f64()))
    }

    /// The largest share of the time in which one of the process's threads other than its virtual
    /// CPUs waited for a CPU, since the last look; 0 at the first.
    pub fn cpu_wait(&mut self, pid: u32) -> f64 {
        let tasks = Path::new("/proc").join(pid.to_string()).join("task");
        let mut worst = 0.0_f64;
        let before = self.waits.remove(&pid).unwrap_or_default();
        let mut waits = BTreeMap::new();
        for thread in self.sysfs.list(&tasks).unwrap_or_default() {
            let read = |file: &str| self.sysfs.read(&tasks.join(&thread).join(file)).ok();
            // QEMU names its vCPUs' threads `CPU 0/KVM`, `CPU 0/TCG`.
            let Some(name) = read("comm").filter(|name| !name.starts_with("CPU ")) else {
                continue;
            };
            // Documentation/scheduler/sched-stats.rst: time on a CPU, time waiting, slices.
            let waited = read("schedstat")
                .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
            let Some(waited) = waited else { continue };
            let now = Instant::now();
            let thread = format!("{thread} {name}");
            if let Some((before, at)) = before.get(&thread) {
                let seconds = (now - *at).as_secs_f64().max(1e-3);
                worst = worst.max(waited.saturating_sub(*before) as f64 / 1e9 / seconds);
            }
            waits.insert(thread, (waited, now));
        }
        self.waits.insert(pid, waits);
        worst.min(1.0)
    }

    /// Forgets the threads of all other processes.
    pub fn keep(&mut self, pids: &BTreeSet<u32>) {
        self.waits.retain(|pid, _| pids.contains(pid));
    }
}

fn activity(before: Counts, now: Counts, seconds: f64) -> DiskActivity {
    let seconds = seconds.max(1e-3);
    // Counters of 32 bits wrap on old kernels: such a look says nothing.
    let since = |now: u64, before: u64| now.saturating_sub(before);
    let requests = since(now.requests, before.requests);
    let request_ms = since(now.request_ms, before.request_ms);
    DiskActivity {
        busy: (since(now.busy_ms, before.busy_ms) as f64 / 1e3 / seconds).min(1.0),
        iops: requests as f64 / seconds,
        bandwidth: since(now.sectors, before.sectors) as f64 * 512.0 / seconds,
        reads: since(now.reads, before.reads) as f64 / (requests as f64).max(1.0),
        mean: (requests > 0)
            .then(|| Nanos::from_secs_f64(request_ms as f64 / 1e3 / requests as f64)),
        depth: request_ms as f64 / 1e3 / seconds,
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_host::fake::FakeSysfs;

    use super::*;

    #[test]
    fn activity_is_what_was_counted_between_two_looks() {
        let before = Counts { reads: 50, requests: 100, sectors: 0, request_ms: 50, busy_ms: 1000 };
        let now =
            Counts { reads: 550, requests: 2100, sectors: 16_000, request_ms: 4050, busy_ms: 2000 };
        let found = activity(before, now, 2.0);
        assert_eq!((found.busy, found.iops, found.depth), (0.5, 1000.0, 2.0));
        assert_eq!((found.bandwidth, found.reads), (4_096_000.0, 0.25));
        assert_eq!(found.mean, Some(Nanos::from_millis(2)));
        assert_eq!(activity(now, before, 2.0), DiskActivity::default());
    }

    #[test]
    fn first_look_and_a_disk_that_is_gone_say_nothing() {
        let sysfs = Arc::new(FakeSysfs::bare());
        sysfs.put("/sys/block/sda/stat", "1 0 8 2 3 0 24 9 0 7 11\n");
        let mut counters = HostCounters::new(Arc::clone(&sysfs) as Arc<dyn Sysfs>);
        assert_eq!(counters.disk("sda"), None);
        assert!(counters.disk("sda").is_some());
        assert_eq!(counters.disk("sdb"), None);
    }

    #[test]
    fn virtual_cpus_that_wait_are_not_the_disks_threads() {
        let sysfs = Arc::new(FakeSysfs::bare());
        for (thread, name) in [("8", "CPU 0/KVM"), ("9", "IO iothread0")] {
            sysfs.put(&format!("/proc/7/task/{thread}/comm"), name);
            sysfs.put(&format!("/proc/7/task/{thread}/schedstat"), "5 0 1\n");
        }
        let mut counters = HostCounters::new(Arc::clone(&sysfs) as Arc<dyn Sysfs>);
        assert_eq!(counters.cpu_wait(7), 0.0);
        sysfs.put("/proc/7/task/8/schedstat", "5 9000000000 1\n");
        assert_eq!(counters.cpu_wait(7), 0.0);
        sysfs.put("/proc/7/task/9/schedstat", "5 9000000000 1\n");
        assert_eq!(counters.cpu_wait(7), 1.0);
    }

    #[test]
    fn threads_and_processes_that_ended_are_forgotten() {
        let sysfs = Arc::new(FakeSysfs::bare());
        let mut counters = HostCounters::new(Arc::clone(&sysfs) as Arc<dyn Sysfs>);
        for name in ["worker", "IO iothread0"] {
            sysfs.put("/proc/7/task/9/comm", name);
            sysfs.put("/proc/7/task/9/schedstat", "5 0 1\n");
            counters.cpu_wait(7);
            assert_eq!(counters.waits[&7].len(), 1);
        }
        counters.keep(&BTreeSet::from([8]));
        assert!(counters.waits.is_empty());
    }
}
