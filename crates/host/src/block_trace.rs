//! Latency on the host, per disk of a VM, from the block layer's tracepoints.
//!
//! A latency begins when a bio enters its device's queue (`block_bio_queue`) and
//! ends when all its sectors are done (`block_rq_complete`; `block_bio_complete`
//! for drivers without requests, such as device mapper). It holds the wait for a
//! free request, io.cost and io.latency, the I/O scheduler, the driver and the
//! device. It does **not** hold what comes before: the limits of io.max and
//! `blkio.throttle`, which hold a bio back before it is queued, QEMU, the guest.
//! What a limit costs is QEMU's latency less this one.
//!
//! The tracepoints name a device and sectors, and no cgroup. So a bio belongs to
//! the VM in whose [`Extent`] it lies. Reads and writes count, as at QEMU;
//! flushes and discards do not.
//!
//! How: each tracepoint is opened on each CPU (`rings`), its records are read
//! as tracefs describes them (`format`), and starts are matched with ends
//! (`matching`) by a thread that wakes up each 20 ms. Nothing is left on
//! the host: a tracefs that is not mounted is read through a mount that only this
//! process has, and all of it ends with the process.
//!
//! Cost, measured on two CPUs under Linux 6.18: the two records of a bio take 1.1 µs of the CPUs that
//! submit and complete it, the thread 0.9 µs; so at 10 thousand requests a second about 1 % of a
//! core each.
//!
//! Bios that are under way when a trace starts are not measured. Records that a
//! full ring lost are counted ([`Latencies::lost`]).
//!
//! Not seen: completions of a bio that its driver hands on to another device (NVMe
//! native multipath); these too show up as lost.

mod extent;
mod format;
mod matching;
mod rings;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rtvirtio_spec::latency::Histogram;
use rtvirtio_units::Nanos;
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::HostError;
use crate::sysfs::Sysfs;
pub use extent::Extent;
use format::{Event, Layout, Point};
use matching::Matcher;
use rings::Rings;
pub use service::{MAX_UNDER_WAY, Service, SizeClass};

/// How often the rings are read.
const PERIOD: Duration = Duration::from_millis(20);
/// A record may be written this long after its time.
const SETTLED: Nanos = Nanos::from_millis(10);
/// How often the CPUs are looked at: after so many periods.
const PERIODS: u32 = 50;
/// Where tracefs is mounted if it is.
const TRACEFS: &str = "/sys/kernel/tracing";
/// The CPUs that are online, such as `0-3,5`.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// What a trace saw since it was last asked.
#[derive(Debug, Default)]
pub struct Latencies {
    /// Latencies of the reads and writes in each extent that had any, to within 1/64.
    pub of: BTreeMap<Extent, Histogram>,
    /// Records that were lost, and bios that were given up because no end of them came: the
    /// histograms lack as many, or fewer. The kernel tells a loss with the same CPU's next record.
    pub lost: u64,
    /// How the device served, if that was asked for.
    pub service: Option<Service>,
}

impl Latencies {
    fn add(&mut self, other: Self) {
        for (extent, histogram) in other.of {
            self.of.entry(extent).or_default().merge(&histogram);
        }
        self.lost += other.lost;
        match (&mut self.service, other.service) {
            (Some(service), Some(later)) => service.merge(&later),
            (service, later) => *service = service.take().or(later),
        }
    }
}

/// A trace that runs; dropping it ends it.
pub struct BlockTrace {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for BlockTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockTrace").finish_non_exhaustive()
    }
}

struct Shared {
    seen: Mutex<Latencies>,
    /// Asked of the thread.
    stop: AtomicBool,
}

impl BlockTrace {
    /// Starts to measure I/O within `extents`, no two of which overlap.
    pub(crate) fn start(
        sysfs: Arc<dyn Sysfs>,
        extents: &BTreeSet<Extent>,
        with_service: bool,
    ) -> Result<Self, HostError> {
        let tracefs = Tracefs::open(&*sysfs)?;
        let layout = |point: Point| {
            let id = tracefs.read(&*sysfs, point, "id")?;
            Layout::parse(point, &id, &tracefs.read(&*sysfs, point, "format")?)
        };
        let layouts = Point::ALL.into_iter().map(layout).collect::<Result<Vec<_>, _>>()?;
        let online = crate::cgroup::read(&*sysfs, Path::new(ONLINE))?;
        let cpus = cpus(&online).ok_or_else(|| HostError::Format {
            file: ONLINE.into(),
            found: online.clone(),
            expected: "a list of CPUs",
        })?;
        let devices = extents.iter().map(|e| e.disk).collect();
        let trace = |action| move |source| HostError::Trace { action, source };
        let mut rings = Rings::open(layouts, &cpus, &devices, rings::RING)
            .map_err(trace("open the block layer's tracepoints"))?;
        let mut matcher =
            if with_service { Matcher::with_service(extents) } else { Matcher::new(extents) };
        let shared = Arc::new(Shared { seen: Mutex::default(), stop: AtomicBool::new(false) });
        let of_thread = Arc::clone(&shared);
        let work = move || {
            let mut pending = Vec::new();
            for period in 1_u32.. {
                std::thread::park_timeout(PERIOD);
                let settled = rings::now().saturating_sub(SETTLED);
                rings.drain(&mut pending);
                settle(&mut pending, settled, &mut matcher);
                of_thread.seen.lock().unwrap_or_else(PoisonError::into_inner).add(matcher.take());
                let is_stale = period % PERIODS == 0
                    && sysfs.read(Path::new(ONLINE)).is_ok_and(|now| now != online);
                if is_stale || of_thread.stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("block-trace".to_owned()).spawn(work);
        let thread = Some(thread.map_err(trace("start a thread for the tracepoints"))?);
        Ok(Self { shared, thread })
    }

    /// What was seen since the last time; the last 30 ms may come with the next.
    ///
    /// # Errors
    /// [`HostError::TraceStale`] once CPUs came or went, and all was taken: start another.
    pub fn take(&self) -> Result<Latencies, HostError> {
        let is_over = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        let mut seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = std::mem::take(&mut *seen);
        if is_over && seen.of.is_empty() && seen.lost == 0 {
            return Err(HostError::TraceStale);
        }
        Ok(seen)
    }
}

impl Drop for BlockTrace {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Hands on the events up to `settled` in the order of time: after it, a CPU may still write
/// records that belong in between.
fn settle(pending: &mut Vec<Event>, settled: Nanos, matcher: &mut Matcher) {
    // Stable: at one time, each ring's order stays.
    pending.sort_by_key(|e| e.at);
    let count = pending.partition_point(|e| e.at <= settled);
    for event in pending.drain(..count) {
        matcher.step(event);
    }
}

/// Where tracepoints are described.
enum Tracefs {
    Mounted,
    /// A mount that has no place in any tree, and ends with this descriptor (fsmount(2)).
    Detached(OwnedFd),
}

impl Tracefs {
    fn open(sysfs: &dyn Sysfs) -> Result<Self, HostError> {
        // Mounting it again would reset the options of the mount that is there.
        if sysfs.exists(&Path::new(TRACEFS).join("events")) {
            return Ok(Self::Mounted);
        }
        let mount = || {
            let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
                | MountAttrFlags::MOUNT_ATTR_NOSUID
                | MountAttrFlags::MOUNT_ATTR_NODEV
                | MountAttrFlags::MOUNT_ATTR_NOEXEC;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        };
        let failed = |e: rustix::io::Errno| HostError::Trace {
            action: "read tracefs",
            source: io::Error::from(e),
        };
        Ok(Self::Detached(mount().map_err(failed)?))
    }

    fn read(&self, sysfs: &dyn Sysfs, point: Point, file: &str) -> Result<String, HostError> {
        let path = Path::new(point.directory()).join(file);
        let text = match self {
            Self::Mounted => sysfs.read(&Path::new(TRACEFS).join(&path)),
            Self::Detached(root) => {
                openat(root, &path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                    .map_err(io::Error::from)
                    .and_then(|file| {
                        let mut text = String::new();
                        std::fs::File::from(file).read_to_string(&mut text)?;
                        Ok(text)
                    })
            }
        };
        text.map_err(|source| HostError::Read { file: Path::new(TRACEFS).join(path), source })
    }
}

/// The CPUs of a list such as `0-3,5`.
fn cpus(list: &str) -> Option<Vec<usize>> {
    /// The kernel's own limit is 8192.
    const MAX_CPUS: usize = 1 << 16;
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests;
