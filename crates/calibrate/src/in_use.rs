//! Calibration of a disk that is in use: in a file or volume of its own, beside VMs that must not notice.
//!
//! - The file has no name: it is removed as it is made, so that nothing is left of it whatever ends
//!   this process. It is written whole before it is measured, for what a filesystem has allocated
//!   and not written is not what a disk does. A volume that holds nothing takes the place of the file on a
//!   disk without a filesystem.
//! - The disk's scheduler and knobs stay as they are unless they may be probed; limits and weights are
//!   those of the calibration's own cgroups.
//! - [`neighbours`](crate::neighbours) watches those who use the disk. A probe that disturbs one is stopped at once.
//!   After each probe the disk is left to them for as long as the share says.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cases::{Case, Neighbour, Scale, SchemeSettings, Tier};
use rtvirtio_cli::input;
use rtvirtio_cli::progress::Progress;
use rtvirtio_host::Host;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_host::qemu::Part;
use rtvirtio_host::storage::Leaf;
use rtvirtio_spec::run::MeasuredAt;
use rtvirtio_spec::settings::{Bfq, Scheduler};
use rtvirtio_spec::specification::Specification;
use rtvirtio_units::{Bytes, Nanos};

use crate::calibration::idles;
use crate::device;
use crate::load::{Cgroups, Measurement, fio};
use crate::neighbours::{GaveUp, NeighbourTarget, Neighbours, OtherLoad};
use crate::observed::disk_of;
use crate::testbed::{DeviceUnderTest, Testbed, Work};

/// The least size of a file: much of a smaller one is in a disk's cache.
const MIN_SIZE: u64 = 256 << 20;
/// Of the free space, the most that is taken unasked.
const MAX_OF_FREE: u64 = 4;
/// The size that is taken if there is room.
const USUAL_SIZE: u64 = 2 << 30;
/// A piece of the file as it is written.
const PIECE: usize = 4 << 20;
/// How direct I/O is aligned, on any disk.
const ALIGNMENT: usize = 4096;
/// A piece of it beside others, who wait for no more than this.
const SMALL_PIECE: usize = 128 << 10;
/// How long they are watched before the first probe.
const NORMAL: Duration = Duration::from_secs(5);
/// How long after each.
const GLANCE: Duration = Duration::from_secs(1);
/// How long the disk is left alone after a probe that disturbed somebody; twice as long after the next.
const BACKOFF: Duration = Duration::from_secs(5);
const MAX_BACKOFFS: u32 = 4;

/// Where a disk in use is measured.
#[derive(Debug, Clone)]
pub enum Location {
    /// In a file that is made in this directory.
    Directory(PathBuf),
    /// In this volume (partition, LVM volume, other block device), whose data is overwritten.
    Volume(PathBuf),
}

impl Location {
    /// The location that `path` names: a block device is a volume, a file stands for its directory.
    ///
    /// # Errors
    /// It is not there, or is something else.
    pub fn find(path: &Path) -> Result<Self> {
        let found = input::canonicalize(path).and_then(|path| Ok((path.metadata()?, path)));
        let (metadata, path) = found.with_context(|| path.display().to_string())?;
        let kind = metadata.file_type();
        if kind.is_block_device() {
            return Ok(Self::Volume(path));
        }
        if kind.is_dir() {
            return Ok(Self::Directory(path));
        }
        ensure!(kind.is_file(), "{} is no directory, file or volume", path.display());
        let directory = path.parent().context("a file lies in a directory")?;
        Ok(Self::Directory(directory.to_owned()))
    }

    /// A path that lies on the disk.
    #[must_use]
    pub fn path(&self) -> &Path {
        let (Self::Directory(path) | Self::Volume(path)) = self;
        path
    }
}

/// A file for measurements, without a name, or a volume.
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
            None => USUAL_SIZE.min(free / MAX_OF_FREE),
        };
        let size = size / PIECE as u64 * PIECE as u64;
        ensure!(
            size >= MIN_SIZE,
            "a calibration needs a file of at least {} in {}, where {} are free (--size takes more than a \
             quarter of it)",
            Bytes::new(MIN_SIZE),
            directory.display(),
            Bytes::new(free)
        );
        let file = tempfile::tempfile_in(directory).with_context(context)?;
        let whole = rustix::fs::FallocateFlags::empty();
        match rustix::fs::fallocate(&file, whole, 0, size) {
            // Not every file system has it (NFS before 4.2). All of the file is written before it is measured, by which its blocks
            // are allocated, too.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(size).with_context(context)?,
            allocated => allocated.with_context(context)?,
        }
        Ok(Self { file, size: Bytes::new(size) })
    }

    /// The volume `device`, of which the first `size` bytes are used.
    ///
    /// # Errors
    /// Somebody uses the volume, or it is too small.
    pub fn on_volume(device: &Path, size: Option<Bytes>) -> Result<Self> {
        let mut file = device::claim(device)?;
        let whole = file.seek(SeekFrom::End(0))?;
        let wanted = size.map_or(USUAL_SIZE.min(whole), Bytes::get);
        ensure!(
            (MIN_SIZE..=whole).contains(&wanted),
            "{} has {}: a calibration needs {} there",
            device.display(),
            Bytes::new(whole),
            Bytes::new(wanted.max(MIN_SIZE))
        );
        Ok(Self { file, size: Bytes::new(wanted / PIECE as u64 * PIECE as u64) })
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

    /// Writes all of it, taking `share` of the time where others use the disk.
    ///
    /// # Errors
    /// The filesystem does no direct I/O, has no room, or the user interrupts.
    fn fill(&self, share: Option<f64>, interrupted: &Interrupted) -> Result<()> {
        let piece_size = if share.is_some() { SMALL_PIECE } else { PIECE };
        let opened = File::options().write(true).custom_flags(libc::O_DIRECT).open(self.path());
        let direct = opened.map_err(|error| {
            let what = not_opened(error.kind());
            anyhow::Error::from(error).context(what)
        })?;
        // Aligned within a buffer that is longer; not zeroes, which some disks do not store.
        let mut buffer = vec![0_u8; PIECE + ALIGNMENT];
        let start = buffer.as_ptr().align_offset(ALIGNMENT);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for chunk in buffer.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        let piece = &buffer[start..start + piece_size];
        let pieces = self.size.get() / piece_size as u64;
        let mut progress = Progress::new(20, Duration::from_secs(5));
        let (begin, mut done) = (Instant::now(), 0);
        for step in 1..=20 {
            let until = pieces * step / 20;
            let each = begin.elapsed().mul_f64((until - done) as f64 / done.max(1) as f64);
            progress.start("calibrate: writing what is measured", each);
            while done < until {
                if interrupted.load(Ordering::Relaxed) {
                    return Err(InterruptedError.into());
                }
                let at = Instant::now();
                (&direct).write_all(piece).context("write the file that is measured")?;
                done += 1;
                rest(at.elapsed(), share.unwrap_or(1.0), interrupted)?;
            }
            progress.finish(each);
        }
        Ok(direct.sync_all()?)
    }
}

/// What is said of a file or volume that cannot be opened for direct I/O.
const fn not_opened(kind: io::ErrorKind) -> &'static str {
    match kind {
        // open(2)
        io::ErrorKind::InvalidInput => "open it for direct I/O, which this filesystem does not do",
        _ => "open what is measured, to write it",
    }
}

/// Waits so that work of this length has had `share` of the time.
fn rest(worked: Duration, share: f64, interrupted: &Interrupted) -> Result<(), InterruptedError> {
    wait(worked.mul_f64(1.0 / share - 1.0), interrupted)
}

/// How a disk in use is measured.
#[derive(Debug, Clone)]
pub struct Manners {
    /// The share of the disk's time that is taken while others use it, 0.001 to 1.
    pub share: f64,
    /// How many times its normal the tail of a neighbour without a target may be.
    pub tolerated: f64,
    /// What neighbours' requests may take.
    pub targets: Vec<NeighbourTarget>,
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
    state: Mutex<State>,
}

struct State {
    neighbours: Neighbours,
    /// What they had the disk do during the last measurement, or after it if it was stopped.
    others: Option<OtherLoad>,
    /// Measurements that were stopped, one after the other.
    stopped: u32,
}

impl DiskInUse {
    /// Takes a file or volume for measurements of the disk that it lies on. What is said goes to `events`.
    ///
    /// # Errors
    /// The location lies on no disk of this host, or on several; there is no room, or somebody uses the volume; a
    /// target is of a VM that does not run; there is no fio; the user interrupts.
    pub fn new(
        host: Host,
        location: &Location,
        size: Option<Bytes>,
        manners: Manners,
        interrupted: &Interrupted,
        events: &mut Vec<String>,
    ) -> Result<Self> {
        let leaf = disk_of(&host, location.path())?;
        let Manners { share, tolerated, targets, probes_schedulers } = manners;
        // Before anything is made.
        let mut neighbours = Neighbours::new(host.clone(), &leaf.name, (targets, tolerated))?;
        let unknown = neighbours.unknown_targets();
        ensure!(
            unknown.is_empty(),
            "no VM that runs has a disk on {} by the name of {} (rtvirtio top lists them)",
            leaf.name,
            unknown.join(", ")
        );
        fio::check()?;
        let mut testbed = Testbed::new(&leaf.node(), &leaf.name)?;
        let scheduler = if probes_schedulers {
            testbed.scheduler()
        } else {
            testbed.keep_device_knobs();
            Some(scheduler_of(&host, &leaf)?)
        };
        let file = match location {
            Location::Directory(directory) => WorkFile::create(directory, size)?,
            Location::Volume(device) => WorkFile::on_volume(device, size)?,
        };
        match host.extents(&Part::whole(file.path())) {
            Ok(own) => neighbours.tell_apart(&own, events),
            Err(error) => {
                events.push(format!("users of the disk other than VMs are not watched: {error}"))
            }
        }
        let mut progress = Progress::new(1, NORMAL);
        progress.start("calibrate: watching those who use the disk", NORMAL);
        neighbours.watch(NORMAL, interrupted)?;
        drop(progress);
        file.fill(neighbours.load().map(|_| share), interrupted)?;
        let state = Mutex::new(State { others: neighbours.load(), neighbours, stopped: 0 });
        Ok(Self { testbed, file, scheduler, share, state })
    }

    /// The disk that is measured, how large the file is, and who uses it.
    #[must_use]
    pub fn describe(&self) -> String {
        let (device, size) = (self.testbed.device().path.display(), self.file.size());
        match self.others() {
            None => format!("{device}, measured in {size} of it; nobody else uses the disk now"),
            Some(others) => format!(
                "{device}, measured in {size} of it; others have the disk do {:.0} requests a second of {}",
                others.iops, others.block_size
            ),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses to measure a disk under a scheduler that idles: no run would tell what the disk does by itself, which every
/// prediction starts from.
fn check_does_not_idle(disk: &str, scheduler: Scheduler) -> Result<()> {
    ensure!(
        !idles(scheduler),
        "{disk} has the scheduler bfq, which idles between requests, so that what is measured makes no profile: \
         write 0 to /sys/block/{disk}/queue/iosched/slice_idle, or have calibrate change the scheduler for its probes \
         (calibrate --in LOCATION --probe-schedulers)"
    );
    Ok(())
}

/// The scheduler that a disk has, with its parameters.
///
/// # Errors
/// Nothing can be measured under it, or it is not known.
pub(crate) fn scheduler_of(host: &Host, leaf: &Leaf) -> Result<Scheduler> {
    if host.has_no_scheduler(&leaf.node())? {
        return Ok(Scheduler::None);
    }
    let disk = &leaf.name;
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
    let scheduler = match chosen.map(|(name, _)| name) {
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
    };
    check_does_not_idle(disk, scheduler)?;
    Ok(scheduler)
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

    fn has_iocost(&self) -> bool {
        self.testbed.has_iocost()
    }

    fn is_used_by_others(&self) -> bool {
        true
    }

    fn others(&self) -> Option<OtherLoad> {
        self.state().others
    }

    fn tolerated(&self) -> Option<Nanos> {
        let state = self.state();
        state.others.and_then(|_| state.neighbours.tolerate())
    }

    fn owed(&self, work: Work) -> Duration {
        let owed = work.owed(self.share);
        if self.others().is_none() || owed.is_zero() { Duration::ZERO } else { owed.max(GLANCE) }
    }

    fn rest(&self, work: Work, interrupted: &Interrupted) -> Result<()> {
        let pause = self.owed(work);
        if pause.is_zero() {
            return Ok(());
        }
        self.state().neighbours.watch(pause, interrupted)
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
        let (size, mount) = (Some(self.file.size), self.testbed.cgroup_mount());
        let place = Cgroups { device: &path, size, mount };
        let mut guard = self.state();
        let State { neighbours, others, stopped } = &mut *guard;
        let before = neighbours.load();
        let measured = neighbours.guard(interrupted, |stop| {
            self.testbed.measure_at(&place, specification, scheme, window, stop)
        })?;
        match measured {
            Ok(measured) => {
                *stopped = 0;
                neighbours.watch(GLANCE, interrupted)?;
                *others = neighbours.load_during(before);
                Ok(measured)
            }
            Err(why) => {
                let pause = BACKOFF * 2_u32.pow((*stopped).min(MAX_BACKOFFS));
                *stopped += 1;
                neighbours.watch(pause, interrupted)?;
                // Whoever came during the measurement is known only now.
                *others = neighbours.load().or(*others);
                Err(GaveUp(why).into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_file_has_no_name_and_leaves_room() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = WorkFile::create(directory.path(), Some(Bytes::new(MIN_SIZE))).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), MIN_SIZE);
        let huge = WorkFile::create(directory.path(), Some(Bytes::new(1 << 60))).unwrap_err();
        assert!(huge.to_string().contains("free, not"), "{huge}");
        let small = WorkFile::create(directory.path(), Some(Bytes::new(4096))).unwrap_err();
        assert!(small.to_string().contains("at least"), "{small}");
    }

    #[test]
    fn file_stands_for_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("db.qcow2");
        std::fs::write(&file, "").unwrap();
        for path in [directory.path(), &file] {
            let found = Location::find(path).unwrap();
            assert!(matches!(&found, Location::Directory(found) if found == directory.path()));
        }
        assert!(
            Location::find(Path::new("/dev/null"))
                .unwrap_err()
                .to_string()
                .contains("no directory")
        );
        let missing = Location::find(&directory.path().join("missing")).unwrap_err().to_string();
        assert!(missing.contains("missing"), "{missing}");
    }

    #[test]
    fn filesystem_is_blamed_for_what_is_its_fault_alone() {
        let said = |error: i32| not_opened(io::Error::from_raw_os_error(error).kind());
        assert!(said(libc::EINVAL).contains("this filesystem does not do"));
        for error in [libc::EACCES, libc::EPERM, libc::EROFS, libc::EMFILE] {
            assert!(!said(error).contains("filesystem"), "{error}");
        }
    }

    #[test]
    fn interrupted_filling_ends() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = WorkFile::create(directory.path(), Some(Bytes::new(MIN_SIZE))).unwrap();
        let interrupted = Interrupted::new(true);
        assert!(file.fill(None, &interrupted).is_err());
    }

    #[test]
    fn disk_whose_scheduler_idles_is_refused_with_what_to_do() {
        let of = |scheduler| check_does_not_idle("sda", scheduler);
        let error = of(Scheduler::Bfq(Bfq::DEFAULT)).unwrap_err().to_string();
        assert!(error.contains("write 0 to /sys/block/sda/queue/iosched/slice_idle"), "{error}");
        assert!(error.contains("--probe-schedulers"), "{error}");
        let quiet = Scheduler::Bfq(Bfq { slice_idle_us: 0, ..Bfq::DEFAULT });
        for scheduler in [Scheduler::None, Scheduler::MqDeadline, Scheduler::Kyber, quiet] {
            of(scheduler).unwrap();
        }
    }
}
