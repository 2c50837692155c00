//! The block layer's tracepoints, on a loop device and on zram, against what the submitter sees.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_host::qemu::Part;
use rtvirtio_host::{BlockTrace, Extent, Host, HostError};
use rtvirtio_spec::latency::Histogram;
use rtvirtio_units::{Bytes, Nanos, Percentile};

const MIB: u64 = 1 << 20;

fn skipped(test: &str, reason: impl std::fmt::Display) {
    // Not println: what a passing test prints is hidden.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {reason}");
}

fn extent(node: &Path, offset: u64, size: u64) -> Extent {
    let (offset, size) = (Bytes::new(offset), Some(Bytes::new(size)));
    Host::new("/").extents(&Part { file: node.to_owned(), offset, size }).unwrap()[0]
}

fn is_denied(error: &HostError) -> bool {
    matches!(error, HostError::Trace { .. } | HostError::Read { .. })
}

/// `count` requests of `length` bytes within 1 MiB from `offset`, past the page cache, one after
/// the other: their latencies.
fn submit(node: &Path, write: bool, offset: u64, length: usize, count: u64) -> Histogram {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file: File =
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(node).unwrap();
    let mut memory = vec![0; length + 4096];
    let aligned = memory.as_ptr().align_offset(4096);
    let buffer = &mut memory[aligned..aligned + length];
    let mut latencies = Histogram::new();
    for i in 0..count {
        let at = offset + i * length as u64 % MIB;
        let start = Instant::now();
        let done =
            if write { file.write_all_at(buffer, at) } else { file.read_exact_at(buffer, at) };
        latencies.record(Nanos::new(start.elapsed().as_nanos() as u64), 1);
        done.unwrap();
    }
    latencies
}

/// What the trace sees until `count` requests are there, and 200 ms longer.
fn seen(trace: &BlockTrace, count: u64) -> BTreeMap<Extent, Histogram> {
    let mut all = BTreeMap::<Extent, Histogram>::new();
    let total = |all: &BTreeMap<_, Histogram>| all.values().map(Histogram::count).sum::<u64>();
    let end = Instant::now() + Duration::from_secs(10);
    let mut take = || {
        let latencies = trace.take().unwrap();
        assert_eq!(latencies.lost, 0);
        for (extent, histogram) in latencies.of {
            all.entry(extent).or_default().merge(&histogram);
        }
        total(&all)
    };
    while take() < count && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(Duration::from_millis(200));
    take();
    all
}

/// Each request once, none longer than its submitter saw it, and most of that time seen.
fn assert_agree(host: &Histogram, submitter: &Histogram) {
    let said = format!("host {host:?}, submitter {submitter:?}");
    assert_eq!(host.count(), submitter.count());
    let bin = |ns: Nanos| ns.scale(65.0 / 64.0);
    let at = |h: &Histogram, p| h.quantile(Percentile::new(p).unwrap()).unwrap().value;
    for p in [50.0, 90.0, 99.0] {
        assert!(at(host, p) <= bin(at(submitter, p)), "p{p}: {said}");
    }
    assert!(host.max() <= bin(submitter.max()), "{said}");
    // Not of the mean: a submitter that once waits for a CPU waits longer than all its requests take.
    assert!(at(host, 50.0) >= at(submitter, 50.0).scale(0.1), "{said}");
}

#[test]
fn two_ranges_of_a_loop_device_are_told_apart() {
    const NAME: &str = "two_ranges_of_a_loop_device_are_told_apart";
    let device = match crate::make_loop() {
        Ok(device) => device,
        Err(reason) => return skipped(NAME, reason),
    };
    let (small, large) = (extent(&device.node, 2 * MIB, MIB), extent(&device.node, 4 * MIB, MIB));
    let trace = match Host::new("/").trace_block(&BTreeSet::from([small, large])) {
        Ok(trace) => trace,
        Err(error) if is_denied(&error) => return skipped(NAME, error),
        Err(error) => panic!("{error}"),
    };
    let node = &device.node;
    let (reads, writes) = thread::scope(|scope| {
        let reads = scope.spawn(|| submit(node, false, 2 * MIB, 4096, 1000));
        let writes = scope.spawn(|| submit(node, true, 4 * MIB, 512 << 10, 200));
        // Between the two, and nobody's.
        scope.spawn(|| submit(node, true, 3 * MIB, 4096, 300));
        (reads.join().unwrap(), writes.join().unwrap())
    });
    let seen = seen(&trace, 1200);
    assert_eq!(seen.len(), 2);
    assert_agree(&seen[&small], &reads);
    assert_agree(&seen[&large], &writes);
    // How much of it the host sees depends on who else wants a CPU; 512 KiB take longer than 4.
    let p50 = |h: &Histogram| h.quantile(Percentile::new(50.0).unwrap()).unwrap().value;
    assert!(p50(&seen[&large]) > p50(&seen[&small]), "{seen:?}");
}

/// A disk in memory whose driver takes bios; removed when dropped.
struct Zram(String);

impl Zram {
    fn make() -> io::Result<Self> {
        let number = fs::read_to_string("/sys/class/zram-control/hot_add")?.trim().to_owned();
        let zram = Self(number);
        fs::write(format!("/sys/block/zram{}/disksize", zram.0), "4M")?;
        Ok(zram)
    }

    fn node(&self) -> PathBuf {
        format!("/dev/zram{}", self.0).into()
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let _ = fs::write("/sys/class/zram-control/hot_remove", &self.0);
    }
}

#[test]
fn driver_without_requests_is_measured_too() {
    const NAME: &str = "driver_without_requests_is_measured_too";
    let zram = match Zram::make() {
        Ok(zram) => zram,
        Err(error) => return skipped(NAME, format!("needs zram and root: {error}")),
    };
    let end = Instant::now() + Duration::from_secs(5);
    while !zram.node().exists() && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    if !zram.node().exists() {
        return skipped(NAME, "needs a /dev in which the kernel makes nodes");
    }
    let extent = extent(&zram.node(), MIB, MIB);
    let trace = match Host::new("/").trace_block(&BTreeSet::from([extent])) {
        Ok(trace) => trace,
        Err(error) if is_denied(&error) => return skipped(NAME, error),
        Err(error) => panic!("{error}"),
    };
    submit(&zram.node(), true, 0, 4096, 50);
    let writes = submit(&zram.node(), true, MIB, 4096, 100);
    let seen = seen(&trace, 100);
    assert_agree(&seen[&extent], &writes);
}

/// Unmounted when dropped.
struct Mounted(tempfile::TempDir);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn image_files_of_one_filesystem_are_told_apart() {
    const NAME: &str = "image_files_of_one_filesystem_are_told_apart";
    let device = match crate::make_loop() {
        Ok(device) => device,
        Err(reason) => return skipped(NAME, reason),
    };
    let node = device.node.to_str().unwrap();
    let mounted = Mounted(tempfile::tempdir().unwrap());
    for command in [
        &["mkfs.ext4", "-q", "-E", "nodiscard", node][..],
        &["mount", "-t", "ext4", node, mounted.0.path().to_str().unwrap()],
    ] {
        let done = std::process::Command::new(command[0]).args(&command[1..]).status();
        if !done.is_ok_and(|status| status.success()) {
            return skipped(NAME, format!("no {}", command[0]));
        }
    }
    let images = ["a.raw", "b.raw"].map(|name| mounted.0.path().join(name));
    for image in &images {
        let file = File::create(image).unwrap();
        (&file).write_all(&vec![7; 2 * MIB as usize]).unwrap();
        file.sync_all().unwrap();
    }
    let host = Host::new("/");
    let all = images.clone().map(|image| host.extents(&Part::whole(image)).unwrap());
    assert!(all.iter().all(|extents| !extents.is_empty()));
    let of_first: BTreeSet<Extent> = all[0].iter().copied().collect();
    let trace = match host.trace_block(&of_first) {
        Ok(trace) => trace,
        Err(error) if is_denied(&error) => return skipped(NAME, error),
        Err(error) => panic!("{error}"),
    };
    submit(&images[1], false, 0, 4096, 200);
    let submitted = submit(&images[0], false, 0, 4096, 300);
    let seen = seen(&trace, 300);
    let mut first = Histogram::new();
    seen.values().for_each(|histogram| first.merge(histogram));
    assert_agree(&first, &submitted);
    // Everybody else's, as a guard sees them.
    drop(trace);
    let others: BTreeSet<Extent> = Extent::others(&all[0]).into_iter().collect();
    let trace = host.trace_block(&others).unwrap();
    submit(&images[0], false, 0, 4096, 200);
    submit(&images[1], false, 0, 4096, 100);
    let seen = self::seen(&trace, 100);
    assert_eq!(seen.values().map(Histogram::count).sum::<u64>(), 100);
}
