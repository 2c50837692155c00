//! Calibration of a disk that is in use: in a file of its own, beside VMs that must not notice.
//!
//! - The file has no name: it is removed as it is made, so that nothing is left of it whatever ends
//!   this process. It is written whole before it is measured, for what a filesystem has allocated
//!   and not written is not what a disk does.
//! - The disk's scheduler and knobs stay as they are unless they may be probed; limits and weights are
//!   those of the calibration's own cgroups.
//! - `Neighbours` watches the VMs on the disk at their QEMUs. A probe that pushes the tail of one
//!   beyond twice what is normal for it is stopped at once, and tried again later. After each probe
//!   the disk is left to them for as long as the share says.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cases::{Case, Neighbour, Scale, SchemeSettings, Tier};
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::Host;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_observe::counters::Interval;
use rtvirtio_observe::session::Session;
use rtvirtio_spec::latency::Histogram;
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{Bfq, Scheduler};
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::{Bytes, Nanos, Percentile};

use crate::load::{Cgroups, Measurement};
use crate::testbed::{DeviceUnderTest, Testbed};

/// The least size of a file: much of a smaller one is in a disk's cache.
const LEAST_SIZE: u64 = 256 << 20;
/// Of the free space, the most that is taken unasked.
const MOST_OF_FREE: u64 = 4;
/// The size that is taken if there is room.
const USUAL_SIZE: u64 = 2 << 30;
/// A piece of the file as it is written.
const PIECE: usize = 4 << 20;
/// How direct I/O is aligned, on any disk.
const ALIGNMENT: usize = 4096;
/// How often the neighbours are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How long they are watched before the first probe.
const NORMAL: Duration = Duration::from_secs(5);
/// By how much a tail must be above its normal to count.
const NOTICED: Nanos = Nanos::from_micros(500);
/// Requests that show a 90th percentile, and a 99th.
const FEW: u64 = 100;
const MANY: u64 = 1000;
/// How often a probe is tried, and the first wait between two tries.
const TRIES: u32 = 3;
const BACKOFF: Duration = Duration::from_secs(5);
/// Requests a second of others that make a disk one in use; a filesystem that notes what was written
/// issues a few.
const IN_USE: f64 = 20.0;

/// A file for measurements, without a name.
#[derive(Debug)]
pub struct WorkFile {
    file: File,
    size: Bytes,
}

impl WorkFile {
    /// A file in `directory`, of `size`, or of a size that leaves room.
    ///
    /// # Errors
    /// There is too little room, or no file can be made there.
    pub fn create(directory: &Path, size: Option<Bytes>) -> Result<Self> {
        let context = || format!("a file for the measurement in {}", directory.display());
        let space = rustix::fs::statvfs(directory).with_context(context)?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let size = match size {
            Some(size) => {
                ensure!(
                    size.get() < free,
                    "{} has {} free, not {size}",
                    directory.display(),
                    Bytes::new(free)
                );
                size.get()
            }
            None => USUAL_SIZE.min(free / MOST_OF_FREE),
        };
        let size = size / PIECE as u64 * PIECE as u64;
        ensure!(
            size >= LEAST_SIZE,
            "a calibration needs a file of at least {} in {}, where {} are free (--size takes more than a \
             quarter of it)",
            Bytes::new(LEAST_SIZE),
            directory.display(),
            Bytes::new(free)
        );
        let file = tempfile::tempfile_in(directory).with_context(context)?;
        let whole = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&file, whole, 0, size).with_context(context)?;
        Ok(Self { file, size: Bytes::new(size) })
    }

    /// Its size.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        self.size
    }

    /// By which name a process of this one's opens it, as long as this lives.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        let (pid, fd) = (std::process::id(), self.file.as_raw_fd());
        Path::new("/proc").join(pid.to_string()).join("fd").join(fd.to_string())
    }

    /// Writes all of it, taking `share` of the time.
    ///
    /// # Errors
    /// The filesystem does no direct I/O, has no room, or the user interrupts.
    fn fill(&self, share: f64, interrupted: &Interrupted) -> Result<()> {
        let direct = File::options()
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(self.path())
            .context("open it for direct I/O, which this filesystem does not do")?;
        // Aligned within a buffer that is longer; not zeroes, which some disks do not store.
        let mut buffer = vec![0_u8; PIECE + ALIGNMENT];
        let start = buffer.as_ptr().align_offset(ALIGNMENT);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for chunk in buffer.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        let piece = &buffer[start..start + PIECE];
        let pieces = self.size.get() / PIECE as u64;
        let mut progress = Progress::new(20, Duration::from_secs(5));
        let (begin, mut done) = (Instant::now(), 0);
        for step in 1..=20 {
            let until = pieces * step / 20;
            let each = begin.elapsed() / (done.max(1) as u32) * (until - done) as u32;
            progress.start("calibrate: writing the file that is measured", each);
            while done < until {
                if interrupted.load(Ordering::Relaxed) {
                    return Err(InterruptedError.into());
                }
                let at = Instant::now();
                (&direct).write_all(piece).context("write the file that is measured")?;
                done += 1;
                rest(at.elapsed(), share, interrupted)?;
            }
            progress.finish(each);
        }
        Ok(direct.sync_all()?)
    }
}

/// Waits so that work of this length has had `share` of the time.
fn rest(worked: Duration, share: f64, interrupted: &Interrupted) -> Result<(), InterruptedError> {
    wait(worked.mul_f64(1.0 / share - 1.0), interrupted)
}

/// A tail of a neighbour and how many requests it is of.
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

/// What a neighbour's disk does when nobody measures, and did since a probe began.
#[derive(Debug, Default)]
struct Watched {
    normal: Histogram,
    probe: Histogram,
}

impl Watched {
    /// Why a probe has to stop: its tail, and what is normal.
    fn is_disturbed(&self, tolerated: f64) -> Option<(Tail, Tail)> {
        let now = tail(&self.probe, None)?;
        let normal = tail(&self.normal, Some(now.percentile))?;
        let now = tail(&self.probe, Some(normal.percentile))?;
        let normal_ns = normal.value.get() as f64;
        let limit = (normal_ns * tolerated).max(normal_ns + NOTICED.get() as f64);
        (now.value.get() as f64 > limit).then_some((now, normal))
    }
}

/// The VMs that use the disk.
struct Neighbours {
    session: Session,
    /// Kernel name of the disk.
    disk: String,
    watched: BTreeMap<(u32, String), Watched>,
    /// How many times its normal a tail may be.
    tolerated: f64,
    /// Whether anybody used the disk when it was last looked at.
    in_use: bool,
}

/// A probe that was stopped for a neighbour's sake, however often it was tried.
#[derive(Debug, thiserror::Error)]
#[error(
    "it disturbed a VM ({0}); calibrate in a quieter hour, or let it be disturbed more (--tolerate)"
)]
pub struct GaveUp(String);

impl Neighbours {
    fn new(host: Host, disk: &str, tolerated: f64) -> Result<Self> {
        let mut session = Session::new(host);
        session.refresh()?;
        session.look();
        let (disk, watched) = (disk.to_owned(), BTreeMap::new());
        Ok(Self { session, disk, watched, tolerated, in_use: false })
    }

    /// Looks at them; `is_probe`: while something is measured.
    fn look(&mut self, is_probe: bool) -> Option<String> {
        let (looks, _) = self.session.look();
        let _ = self.session.refresh();
        let mut disturbed = None;
        for look in looks {
            let Some(last) = look.last.as_ref().filter(|last| last.requests() > 0) else {
                continue;
            };
            if !look.below.iter().any(|(name, _)| *name == self.disk) {
                continue;
            }
            let key = (look.pid, look.disk.name().to_owned());
            let watched = self.watched.entry(key).or_default();
            let Interval { histogram, .. } = last;
            if !is_probe {
                watched.normal.merge(histogram);
                continue;
            }
            watched.probe.merge(histogram);
            if let Some((now, normal)) = watched.is_disturbed(self.tolerated) {
                disturbed.get_or_insert_with(|| {
                    format!(
                        "{}/{}: p{} was {} instead of {}",
                        look.vm,
                        look.disk.name(),
                        normal.percentile,
                        now.value,
                        normal.value
                    )
                });
            }
        }
        disturbed
    }

    /// Watches them while nothing is measured; whether anybody uses the disk.
    fn watch(&mut self, time: Duration, interrupted: &Interrupted) -> Result<bool> {
        let end = Instant::now() + time;
        let before = requests_completed(&self.disk);
        let begin = Instant::now();
        while Instant::now() < end {
            wait(LOOK.min(end.saturating_duration_since(Instant::now())), interrupted)?;
            self.look(false);
        }
        let requests = requests_completed(&self.disk).saturating_sub(before);
        self.in_use = requests as f64 / begin.elapsed().as_secs_f64().max(0.1) > IN_USE;
        Ok(self.in_use)
    }

    /// Does `work` while the neighbours are watched; why it was stopped if it was.
    fn guard<T: Send>(
        &mut self,
        interrupted: &Interrupted,
        work: impl FnOnce(&Interrupted) -> Result<T>,
    ) -> Result<Result<T, String>> {
        for watched in self.watched.values_mut() {
            watched.probe = Histogram::new();
        }
        self.look(false);
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
                    if let Some(why) = self.look(true) {
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

/// Requests that a disk has completed; 0 if it is not to be read.
fn requests_completed(disk: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/block/{disk}/stat")).unwrap_or_default();
    let fields: Vec<u64> = text.split_whitespace().filter_map(|f| f.parse().ok()).collect();
    fields.first().unwrap_or(&0) + fields.get(4).unwrap_or(&0)
}

/// How a disk in use is measured.
#[derive(Debug, Clone, Copy)]
pub struct Manners {
    /// The share of the disk's time that is taken while others use it, above 0 and up to 1.
    pub share: f64,
    /// How many times its normal the tail of a VM may be.
    pub tolerated: f64,
    /// Whether the disk's scheduler and knobs are changed for probes.
    pub probes_schedulers: bool,
}

/// A disk in use, measured in a file of its own.
pub struct DiskInUse {
    testbed: Testbed,
    file: WorkFile,
    /// What the disk has, if it is to keep it.
    scheduler: Option<Scheduler>,
    share: f64,
    neighbours: Mutex<Neighbours>,
}

impl DiskInUse {
    /// Takes a file in `directory` for measurements of the disk that it lies on.
    ///
    /// # Errors
    /// The directory lies on no disk of this host, or on several; there is no room; the user
    /// interrupts.
    pub fn new(
        host: Host,
        directory: &Path,
        size: Option<Bytes>,
        manners: Manners,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let stack = host.storage(directory)?;
        let leaf = match stack.leaves.as_slice() {
            [leaf] => leaf.clone(),
            _ => bail!("{} does not lie on one disk of this host: {stack}", directory.display()),
        };
        let mut neighbours = Neighbours::new(host, &leaf.name, manners.tolerated)?;
        let mut testbed = Testbed::new(&leaf.node(), &leaf.name)?;
        let Manners { share, probes_schedulers, .. } = manners;
        let scheduler = if probes_schedulers {
            None
        } else {
            testbed.keep_device_knobs();
            Some(scheduler_of(&leaf.name)?)
        };
        let file = WorkFile::create(directory, size)?;
        let in_use = neighbours.watch(NORMAL, interrupted)?;
        file.fill(if in_use { share } else { 1.0 }, interrupted)?;
        Ok(Self { testbed, file, scheduler, share, neighbours: Mutex::new(neighbours) })
    }

    /// The disk that is measured, and how large the file is.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("{} in a file of {}", self.testbed.device().path.display(), self.file.size())
    }
}

/// The scheduler that a disk has, with its parameters.
fn scheduler_of(disk: &str) -> Result<Scheduler> {
    let queue = Path::new("/sys/block").join(disk).join("queue");
    let read = |file: &str| {
        let file = queue.join(file);
        std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))
    };
    let offered = read("scheduler")?;
    let chosen = offered.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    let number = |file: &str| -> Result<u32> {
        let text = read(&format!("iosched/{file}"))?;
        text.trim().parse().with_context(|| format!("{file} of {disk} is {text:?}"))
    };
    Ok(match chosen.map(|(name, _)| name) {
        Some("none") => Scheduler::None,
        Some("mq-deadline") => Scheduler::MqDeadline,
        Some("kyber") => Scheduler::Kyber,
        Some("bfq") => Scheduler::Bfq(Bfq {
            slice_idle_us: number("slice_idle_us")?,
            timeout_sync_ms: number("timeout_sync")?,
            low_latency: number("low_latency")? != 0,
            max_budget: number("max_budget")?,
        }),
        _ => bail!("{disk} has a scheduler that rtvirtio does not know: {}", offered.trim()),
    })
}

impl DeviceUnderTest for DiskInUse {
    fn testbed(&self) -> &Testbed {
        &self.testbed
    }

    fn scale(&self) -> Scale {
        Scale::ONE
    }

    fn measured_at(&self) -> MeasuredAt {
        MeasuredAt::Host
    }

    fn scheduler(&self) -> Option<Scheduler> {
        self.scheduler
    }

    fn is_in_use(&self) -> bool {
        self.neighbours.lock().unwrap_or_else(PoisonError::into_inner).in_use
    }

    fn specification(
        &self,
        case: Case,
        tier: Tier,
        neighbour: Neighbour,
        window: Nanos,
    ) -> Specification {
        self.testbed.specification(case, tier, neighbour, window)
    }

    fn measure(
        &self,
        specification: &Specification,
        scheme: &SchemeSettings,
        window: Duration,
        interrupted: &Interrupted,
    ) -> Result<Measurement> {
        let path = self.file.path();
        let place = Cgroups { device: &path, mount: self.testbed.cgroup_mount() };
        let mut neighbours = self.neighbours.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last = String::new();
        for attempt in 0..TRIES {
            let begin = Instant::now();
            let measured = neighbours.guard(interrupted, |stop| {
                self.testbed.measure_at(&place, specification, scheme, window, stop)
            })?;
            let took = begin.elapsed();
            // A second tells whether anybody uses the disk.
            let in_use = neighbours.watch(Duration::from_secs(1), interrupted)?;
            match measured {
                Ok(measured) => {
                    if in_use {
                        let pause = took.mul_f64(1.0 / self.share - 1.0);
                        neighbours.watch(pause, interrupted)?;
                    }
                    return Ok(measured);
                }
                Err(why) => {
                    last = why;
                    neighbours.watch(BACKOFF * 2_u32.pow(attempt), interrupted)?;
                }
            }
        }
        Err(GaveUp(last).into())
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

    #[test]
    fn neighbour_is_disturbed_at_twice_its_normal_and_not_by_little() {
        let disturbed = |normal: (u64, u64), probe: (u64, u64)| {
            let watched = Watched {
                normal: histogram(normal.0, normal.1),
                probe: histogram(probe.0, probe.1),
            };
            watched.is_disturbed(2.0).is_some()
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
    fn work_file_has_no_name_and_leaves_room() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = WorkFile::create(directory.path(), Some(Bytes::new(LEAST_SIZE))).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), LEAST_SIZE);
        let huge = WorkFile::create(directory.path(), Some(Bytes::new(1 << 60))).unwrap_err();
        assert!(huge.to_string().contains("free, not"), "{huge}");
        let small = WorkFile::create(directory.path(), Some(Bytes::new(4096))).unwrap_err();
        assert!(small.to_string().contains("at least"), "{small}");
    }

    #[test]
    fn interrupted_filling_ends() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = WorkFile::create(directory.path(), Some(Bytes::new(LEAST_SIZE))).unwrap();
        let interrupted = Interrupted::new(true);
        assert!(file.fill(1.0, &interrupted).is_err());
    }
}
