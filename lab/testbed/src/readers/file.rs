//! The file that is read: written once, direct, without a name.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_units::Bytes;
use rustix::fs::OFlags;

use crate::scratch::{open_raw, path_of};

/// Size of the file, MiB.
const FILE_MIB: u64 = 512;
/// `statfs`'s types of file systems in memory (`linux/magic.h`): tmpfs, ramfs, hugetlbfs.
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];

/// A file for direct reads. It has no name, so nothing is left of it however the process ends.
#[derive(Debug)]
pub struct TestFile {
    file: File,
}

impl TestFile {
    /// Writes one of `FILE_MIB` to a directory's disk.
    ///
    /// # Errors
    /// If the directory is in memory, has no room, or does not do direct I/O; if the user interrupts.
    pub fn make(directory: &Path, interrupted: &Interrupted) -> Result<Self> {
        let at = directory.display();
        let kind = rustix::fs::statfs(directory).map(|of| of.f_type as u64);
        ensure!(
            !IN_MEMORY.contains(&kind.with_context(|| format!("look at {at}"))?),
            "{at} is in memory: there is no device to wait for (name a --directory on a disk)"
        );
        let file = open_raw(directory, Bytes::new(FILE_MIB << 20), interrupted)
            .with_context(|| format!("make a file in {at} (name another --directory)"))?;
        let mut direct = OpenOptions::new();
        direct.read(true).custom_flags(OFlags::DIRECT.bits() as i32);
        let file = direct.open(path_of(&file)).with_context(|| {
            format!("{at} does not do direct I/O (name a --directory on another file system)")
        })?;
        Ok(Self { file })
    }

    /// Blocks of so many bytes.
    #[must_use]
    pub const fn blocks(block: usize) -> u64 {
        (FILE_MIB << 20) / block as u64
    }

    /// It.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }
}
