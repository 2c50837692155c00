//! Which block device may be taken for a measurement.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Where the loop devices of scratch disks are noted, one file each: its server holds the lock of that file.
pub const SCRATCH_DISKS: &str = "/run/rtvirtio-host/scratch";

/// Whether `device` is a scratch disk that is served now: its data is nobody's.
#[must_use]
pub fn is_scratch(device: &Path) -> bool {
    let shared = rustix::fs::FlockOperation::NonBlockingLockShared;
    let note = device.file_name().map(|name| Path::new(SCRATCH_DISKS).join(name));
    note.and_then(|note| File::open(note).ok())
        .is_some_and(|note| rustix::fs::flock(&note, shared) == Err(rustix::io::Errno::WOULDBLOCK))
}

/// How long udev may look at a device that has changed.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where the kernel lists whole disks.
const SYS_BLOCK: &str = "/sys/block";

/// Opens a block device exclusively: fails while it is mounted, or otherwise in use.
///
/// A VM's QEMU opens its disk without `O_EXCL`, and so does the kernel for a loop device. So no process may
/// have it open, nor a partition of it, nor the disk that it is a partition of, and no loop device may lie there.
///
/// # Errors
/// With the remedy.
pub fn claim(device: &Path) -> Result<File> {
    let metadata = std::fs::metadata(device)?;
    ensure!(metadata.file_type().is_block_device(), "{} is not a block device", device.display());
    // O_EXCL on a block device: refused while a file system, RAID or LVM holds it (open(2)).
    let claimed = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(device)
        .with_context(|| format!("{} is in use (mounted?)", device.display()))?;
    // A scratch disk's server has it open.
    if is_scratch(device) {
        return Ok(claimed);
    }
    let numbers = overlapping(metadata.rdev());
    let end = Instant::now() + PATIENCE;
    let user = || user_of(&numbers).or_else(|| loop_on(Path::new(SYS_BLOCK), &numbers));
    while let Some(user) = user() {
        ensure!(Instant::now() < end, "{} is in use: {user}", device.display());
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(claimed)
}

/// The numbers of a device, of its partitions, and of the disk that it is a partition of.
fn overlapping(number: u64) -> BTreeSet<u64> {
    let name = format!("{}:{}", libc::major(number), libc::minor(number));
    let read = |directory: &Path| {
        let text = std::fs::read_to_string(directory.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
    };
    let mut numbers = BTreeSet::from([number]);
    let Ok(directory) = std::fs::canonicalize(Path::new("/sys/dev/block").join(name)) else {
        return numbers;
    };
    if directory.join("partition").exists() {
        numbers.extend(directory.parent().and_then(read));
    }
    let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
    let partitions =
        entries.map(|entry| entry.path()).filter(|path| path.join("partition").exists());
    numbers.extend(partitions.filter_map(|path| read(&path)));
    numbers
}

/// A process other than this one that has one of the devices open, in words.
fn user_of(numbers: &BTreeSet<u64>) -> Option<String> {
    let own = std::process::id();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|&pid| pid != own).find_map(|pid| {
        let process = Path::new("/proc").join(pid.to_string());
        let has_it = std::fs::read_dir(process.join("fd")).ok()?.flatten().any(|entry| {
            let path = entry.path();
            // Nothing else is touched: to stat a file of a network's dead server takes for ever.
            std::fs::read_link(&path).is_ok_and(|target| target.starts_with("/dev"))
                && std::fs::metadata(&path).is_ok_and(|metadata| {
                    metadata.file_type().is_block_device() && numbers.contains(&metadata.rdev())
                })
        });
        let name = || std::fs::read_to_string(process.join("comm")).unwrap_or_default();
        has_it.then(|| format!("process {pid} ({}) has it open", name().trim()))
    })
}

/// A loop device whose backing file is one of the devices, in words. The kernel has that open, and no process.
fn loop_on(sys_block: &Path, numbers: &BTreeSet<u64>) -> Option<String> {
    let disks = std::fs::read_dir(sys_block).ok()?.flatten();
    let names = disks.filter_map(|entry| entry.file_name().into_string().ok());
    let host = rtvirtio_cli::input::host();
    names.filter(|name| name.starts_with("loop")).find_map(|name| {
        let attribute = sys_block.join(&name).join("loop/backing_file");
        let path = std::fs::read(attribute).ok()?;
        let path = Path::new(OsStr::from_bytes(path.strip_suffix(b"\n").unwrap_or(&path)));
        // Its name says nothing: a node of a device may be anywhere but behind a server, which may be gone.
        if host.beyond_reach(path).is_some() {
            return None;
        }
        let metadata = std::fs::metadata(path).ok()?;
        let lies_on_it =
            metadata.file_type().is_block_device() && numbers.contains(&metadata.rdev());
        let node = Path::new("/dev").join(name);
        let node = node.display();
        lies_on_it.then(|| {
            format!(
                "the loop device {node} lies on it (`losetup --detach {node}`, if nobody needs it)"
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn loop_device_is_found_by_the_number_of_what_it_lies_on() {
        let directory = tempfile::tempdir().unwrap();
        let node = directory.path().join("a disk\\012");
        let number = libc::makedev(7, 250);
        let kind = rustix::fs::FileType::BlockDevice;
        let mode = rustix::fs::Mode::RUSR;
        if let Err(why) = rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, number) {
            // Past the test harness, which would hide it; its thread is named after the test.
            let thread = std::thread::current();
            let (mut stderr, name) = (std::io::stderr(), thread.name().unwrap_or_default());
            let _ = writeln!(stderr, "SKIPPED {name}: needs the right to make a node: {why}");
            return;
        }
        let sys = directory.path().join("block");
        // Another disk, a loop device without a file, one of a file, and one whose file has gone.
        std::fs::create_dir_all(sys.join("sda")).unwrap();
        std::fs::create_dir_all(sys.join("loop0")).unwrap();
        for (name, file) in [
            ("loop1", directory.path().to_str().unwrap()),
            ("loop2", "/gone (deleted)"),
            ("loop3", node.to_str().unwrap()),
        ] {
            let attributes = sys.join(name).join("loop");
            std::fs::create_dir_all(&attributes).unwrap();
            std::fs::write(attributes.join("backing_file"), format!("{file}\n")).unwrap();
        }
        let user = loop_on(&sys, &BTreeSet::from([libc::makedev(7, 249), number])).unwrap();
        assert!(user.starts_with("the loop device /dev/loop3 lies on it"), "{user}");
        assert_eq!(loop_on(&sys, &BTreeSet::from([libc::makedev(7, 249)])), None);
        assert_eq!(loop_on(&sys.join("none"), &BTreeSet::from([number])), None);
    }
}
