//! Which block device may be taken for a measurement.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

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

/// Opens a block device exclusively: fails while it is mounted or otherwise in use.
///
/// # Errors
/// With the remedy.
pub fn claim(device: &Path) -> Result<File> {
    let metadata = std::fs::metadata(device)?;
    ensure!(metadata.file_type().is_block_device(), "{} is not a block device", device.display());
    // O_EXCL on a block device: refused while a file system, RAID or LVM holds it (open(2)).
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(device)
        .with_context(|| format!("{} is in use (mounted?)", device.display()))
}
