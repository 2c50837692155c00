//! Which block device may be taken for a measurement.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
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

/// Where the kernel lists disks and partitions by their numbers.
const SYS_DEV_BLOCK: &str = "/sys/dev/block";

/// What a calibration has to itself, as long as this lives.
#[derive(Debug)]
pub struct Claim {
    _files: Vec<File>,
}

/// Claims all that a calibration changes or floods of a device that it has to itself. Of a partition it is the whole disk,
/// whose scheduler and limits probes set, so that nobody may use another partition. Of what lies on other devices (a volume of
/// LVM, an array, dm-crypt) it is the disks below, which probes flood, so that nobody may use what else lies on them.
///
/// # Errors
/// As [`claim`].
pub fn claim_disk(device: &Path) -> Result<Claim> {
    let metadata = std::fs::metadata(device)?;
    let is_block = metadata.file_type().is_block_device();
    let disk = is_block.then(|| disk_of_partition(Path::new(SYS_DEV_BLOCK), metadata.rdev()));
    let claimed = match disk.flatten() {
        None => claim(device)?,
        Some(disk) => {
            refuse_read_only(device, metadata.rdev())?;
            claim(&disk).with_context(|| {
                format!(
                    "{} is a partition, and probes change the scheduler of all of {} (beside its other users: calibrate --in)",
                    device.display(),
                    disk.display()
                )
            })?
        }
    };
    let mut files = vec![claimed];
    let others = sharing(Path::new(SYS_DEV_BLOCK), metadata.rdev());
    files.extend(claim_sharing(&others).with_context(|| {
        format!(
            "{} lies on disks that others lie on too, and probes flood these (beside their other users: calibrate --in)",
            device.display()
        )
    })?);
    Ok(Claim { _files: files })
}

/// What lies on the disks below a device, and is neither below it nor a part of it.
#[derive(Debug, Default, PartialEq)]
struct Sharing {
    numbers: BTreeSet<u64>,
    /// The nodes of those on which nothing lies: all others are held by what lies on them.
    tops: BTreeSet<PathBuf>,
}

/// What shares disks with the device `number`, or with the disk that it is a partition of; nothing if that lies on no others:
/// whoever claims a disk has all of it.
fn sharing(sys_dev_block: &Path, number: u64) -> Sharing {
    let Ok(directory) = std::fs::canonicalize(sys_dev_block.join(name_of(number))) else {
        return Sharing::default();
    };
    let own = disk_directory(&directory).unwrap_or(directory);
    // Down to the whole disks.
    let (mut below, mut left) = (BTreeSet::new(), linked(&own, "slaves"));
    while let Some(next) = left.pop() {
        if below.insert(next.clone()) {
            left.extend(linked(&next, "slaves"));
            left.extend(disk_directory(&next));
        }
    }
    // And up to all that sits on them.
    let on = |directory: &PathBuf| {
        linked(directory, "holders").into_iter().chain(partitions(directory)).collect::<Vec<_>>()
    };
    let is_own =
        |directory: &PathBuf| *directory == own || directory.parent() == Some(own.as_path());
    let mut others = BTreeSet::new();
    let mut left: Vec<PathBuf> = below.iter().flat_map(on).collect();
    while let Some(next) = left.pop() {
        if !is_own(&next) && !below.contains(&next) && others.insert(next.clone()) {
            left.extend(on(&next));
        }
    }
    let tops = others.iter().filter(|directory| on(directory).is_empty());
    Sharing {
        numbers: others.iter().filter_map(|directory| number_of(directory)).collect(),
        tops: tops.filter_map(|directory| node_of(directory)).collect(),
    }
}

/// Opens all that shares the disks exclusively, and sees that no process uses any of it.
fn claim_sharing(others: &Sharing) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for node in &others.tops {
        match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(node) {
            Ok(file) => files.push(file),
            // There is nothing that could be used.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENOMEDIUM)) => {}
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(error)
                    .with_context(|| format!("{} is in use (mounted?)", node.display()));
            }
            Err(error) => {
                let what = || format!("see whether {} is in use", node.display());
                return Err(error).with_context(what);
            }
        }
    }
    if !others.numbers.is_empty() {
        let numbers = Numbers { block: others.numbers.clone(), generic: BTreeSet::new() };
        wait_for_users(&numbers, |user| format!("one of them is in use: {user}"))?;
    }
    Ok(files)
}

/// The directories that links in a device's directory `kind` lead to.
fn linked(directory: &Path, kind: &str) -> Vec<PathBuf> {
    entries(&directory.join(kind)).filter_map(|link| std::fs::canonicalize(link).ok()).collect()
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// The directories of a disk's partitions.
fn partitions(disk: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    entries(disk).filter(|path| path.join("partition").exists())
}

/// The directory of the disk that a partition lies on; `None`: it is no partition.
fn disk_directory(directory: &Path) -> Option<PathBuf> {
    let disk = directory.parent().filter(|_| directory.join("partition").exists());
    disk.map(Path::to_owned)
}

/// The node of a device, from its directory in sysfs.
fn node_of(directory: &Path) -> Option<PathBuf> {
    // sysfs has `!` for the `/` of names such as cciss/c0d0.
    Some(Path::new("/dev").join(directory.file_name()?.to_str()?.replace('!', "/")))
}

/// The number of a device, from its directory in sysfs.
fn number_of(directory: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(directory.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The node of the disk that a partition lies on; `None`: it is no partition.
fn disk_of_partition(sys_dev_block: &Path, number: u64) -> Option<PathBuf> {
    let partition = std::fs::canonicalize(sys_dev_block.join(name_of(number))).ok()?;
    node_of(&disk_directory(&partition)?)
}

/// A device's name in [`SYS_DEV_BLOCK`].
fn name_of(number: u64) -> String {
    format!("{}:{}", libc::major(number), libc::minor(number))
}

/// Opens a block device exclusively: fails while it is mounted, or otherwise in use.
///
/// A VM's QEMU opens its disk without `O_EXCL`, and so does the kernel for a loop device. So no process may
/// have it open, nor a partition of it, nor the disk that it is a partition of, nor the disk's generic device, through which
/// a VM may be given all of it; and no loop device may lie there.
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
    refuse_read_only(device, metadata.rdev())?;
    // A scratch disk's server has it open.
    if is_scratch(device) {
        return Ok(claimed);
    }
    let numbers = overlapping(Path::new(SYS_DEV_BLOCK), metadata.rdev());
    wait_for_users(&numbers, |user| format!("{} is in use: {user}", device.display()))?;
    Ok(claimed)
}

/// Waits until nobody uses any of the devices, as long as udev may look at one. `say` tells who does.
fn wait_for_users(numbers: &Numbers, say: impl Fn(String) -> String) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let user = || user_of(numbers).or_else(|| loop_on(Path::new(SYS_BLOCK), &numbers.block));
    while let Some(user) = user() {
        ensure!(Instant::now() < end, say(user));
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn refuse_read_only(device: &Path, number: u64) -> Result<()> {
    let entry = Path::new(SYS_DEV_BLOCK).join(name_of(number));
    ensure!(!is_read_only(&entry), "{} is read-only, and would be written to", device.display());
    Ok(())
}

/// Whether the kernel lets nobody write to a disk or partition.
fn is_read_only(entry: &Path) -> bool {
    std::fs::read_to_string(entry.join("ro")).is_ok_and(|text| text.trim() == "1")
}

/// The numbers of all devices through which the data of one is reached.
#[derive(Debug, PartialEq)]
struct Numbers {
    /// Of the device, of its partitions, and of the disk that it is a partition of.
    block: BTreeSet<u64>,
    /// Of the disk's generic devices, which take commands past the block layer and its claims: `/dev/sg0` and
    /// `/dev/ng0n1` are character devices.
    generic: BTreeSet<u64>,
}

fn overlapping(sys_dev_block: &Path, number: u64) -> Numbers {
    let mut numbers = Numbers { block: BTreeSet::from([number]), generic: BTreeSet::new() };
    let Ok(directory) = std::fs::canonicalize(sys_dev_block.join(name_of(number))) else {
        return numbers;
    };
    let disk = disk_directory(&directory);
    numbers.block.extend(disk.as_deref().and_then(number_of));
    let disk = disk.as_deref().unwrap_or(&directory);
    numbers.block.extend(partitions(&directory).filter_map(|path| number_of(&path)));
    let of_scsi = entries(&disk.join("device/scsi_generic"));
    numbers.generic.extend(of_scsi.filter_map(|path| number_of(&path)));
    // ng0n1 lies beside nvme0n1.
    let name = disk.file_name().and_then(OsStr::to_str);
    let of_nvme = name.and_then(|name| name.strip_prefix("nvme"));
    let of_nvme = of_nvme.map(|rest| disk.with_file_name(format!("ng{rest}")));
    numbers.generic.extend(of_nvme.and_then(|path| number_of(&path)));
    numbers
}

/// A process other than this one that has one of the devices open, in words.
fn user_of(numbers: &Numbers) -> Option<String> {
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
                    let (kind, number) = (metadata.file_type(), metadata.rdev());
                    (kind.is_block_device() && numbers.block.contains(&number))
                        || (kind.is_char_device() && numbers.generic.contains(&number))
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
    fn disk_is_reached_by_its_partitions_and_its_generic_devices() {
        let sys = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = sys.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for (path, number) in [
            ("nvme0/nvme0n1", "259:0"),
            ("nvme0/nvme0n1/nvme0n1p1", "259:1"),
            ("nvme0/ng0n1", "240:0"),
            ("nvme0/ng0n2", "240:1"),
            ("host0/sda", "8:0"),
            ("host0/sda/device/scsi_generic/sg3", "21:3"),
        ] {
            put(&format!("{path}/dev"), &format!("{number}\n"));
        }
        put("nvme0/nvme0n1/nvme0n1p1/partition", "1\n");
        put("host0/sda/ro", "1\n");
        let by_number = sys.path().join("dev");
        std::fs::create_dir(&by_number).unwrap();
        for (name, path) in
            [("259:0", "nvme0/nvme0n1"), ("259:1", "nvme0/nvme0n1/nvme0n1p1"), ("8:0", "host0/sda")]
        {
            std::os::unix::fs::symlink(sys.path().join(path), by_number.join(name)).unwrap();
        }
        let found = |major, minor| overlapping(&by_number, libc::makedev(major, minor));
        let numbers = |of: &[(u32, u32)]| {
            of.iter().map(|&(major, minor)| libc::makedev(major, minor)).collect::<BTreeSet<u64>>()
        };
        let nvme = Numbers { block: numbers(&[(259, 0), (259, 1)]), generic: numbers(&[(240, 0)]) };
        assert_eq!(found(259, 0), nvme);
        assert_eq!(found(259, 1), nvme);
        let scsi = Numbers { block: numbers(&[(8, 0)]), generic: numbers(&[(21, 3)]) };
        assert_eq!(found(8, 0), scsi);
        let gone = Numbers { block: numbers(&[(8, 16)]), generic: BTreeSet::new() };
        assert_eq!(found(8, 16), gone);
        let disk = |major, minor| disk_of_partition(&by_number, libc::makedev(major, minor));
        assert_eq!(disk(259, 1), Some("/dev/nvme0n1".into()));
        assert_eq!((disk(259, 0), disk(8, 0), disk(8, 16)), (None, None, None));
        assert!(is_read_only(&by_number.join("8:0")) && !is_read_only(&by_number.join("259:0")));
    }

    #[test]
    fn what_shares_the_disks_below_is_found_and_nothing_else() {
        let sys = tempfile::tempdir().unwrap();
        let by_number = sys.path().join("dev");
        std::fs::create_dir(&by_number).unwrap();
        let devices = [
            ("sda", "8:0"),
            ("sda/sda1", "8:1"),
            ("sda/sda2", "8:2"),
            ("sda/sda3", "8:3"),
            ("sdb", "8:16"),
            ("sdb/sdb1", "8:17"),
            ("sdb/sdb2", "8:18"),
            ("sdc", "8:32"),
            ("dm-0", "253:0"),
            ("dm-1", "253:1"),
            ("dm-2", "253:2"),
            ("md0", "9:0"),
            ("md0/md0p1", "259:1"),
            ("md0/md0p2", "259:2"),
        ];
        for (path, number) in devices {
            let directory = sys.path().join(path);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("dev"), format!("{number}\n")).unwrap();
            if path.contains('/') {
                std::fs::write(directory.join("partition"), "1\n").unwrap();
            }
            std::os::unix::fs::symlink(&directory, by_number.join(number)).unwrap();
        }
        let link = |from: &str, kind: &str, to: &str| {
            let links = sys.path().join(from).join(kind);
            std::fs::create_dir_all(&links).unwrap();
            let to = sys.path().join(to);
            std::os::unix::fs::symlink(&to, links.join(to.file_name().unwrap())).unwrap();
        };
        // Two volumes of a group on two disks, one with dm-crypt on it, and an array beside them.
        for (upper, lower) in [
            ("dm-0", "sda/sda1"),
            ("dm-1", "sda/sda1"),
            ("dm-1", "sdb/sdb1"),
            ("dm-2", "dm-1"),
            ("md0", "sda/sda3"),
            ("md0", "sdc"),
        ] {
            link(upper, "slaves", lower);
            link(lower, "holders", upper);
        }
        let found = |major, minor| sharing(&by_number, libc::makedev(major, minor));
        let expected = |numbers: &[(u32, u32)], tops: &[&str]| Sharing {
            numbers: numbers.iter().map(|&(major, minor)| libc::makedev(major, minor)).collect(),
            tops: tops.iter().map(|name| Path::new("/dev").join(name)).collect(),
        };
        // sdb2 is on no disk of dm-0's.
        let numbers = [(8, 2), (8, 3), (9, 0), (259, 1), (259, 2), (253, 1), (253, 2)];
        let tops = ["sda2", "md0p1", "md0p2", "dm-2"];
        assert_eq!(found(253, 0), expected(&numbers, &tops));
        // What it lies on itself is no other's, on both disks.
        let numbers = [(8, 2), (8, 3), (9, 0), (259, 1), (259, 2), (253, 0), (8, 18)];
        let tops = ["sda2", "md0p1", "md0p2", "dm-0", "sdb2"];
        assert_eq!(found(253, 2), expected(&numbers, &tops));
        // The claim of an array has its partitions, and that of a partition the whole array.
        let numbers = [(8, 1), (8, 2), (253, 0), (253, 1), (253, 2)];
        let tops = ["sda2", "dm-0", "dm-2"];
        assert_eq!(found(9, 0), expected(&numbers, &tops));
        assert_eq!(found(259, 1), expected(&numbers, &tops));
        // The claim of a disk has all that lies there.
        for (major, minor) in [(8, 0), (8, 1), (8, 32), (8, 64)] {
            assert_eq!(found(major, minor), Sharing::default(), "{major}:{minor}");
        }
    }

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
