//! The file that is read: written once, direct, without a name.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rustix::fs::OFlags;

use crate::dataplane::load::Random;

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
    /// Writes one of [`FILE_MIB`] to a directory's disk, without holes and not compressible.
    ///
    /// # Errors
    /// If the directory is in memory, has no room, or does not do direct I/O; if interrupted.
    pub(crate) fn make(directory: &Path, interrupted: &Interrupted) -> Result<Self> {
        let at = directory.display();
        let mut file = tempfile::tempfile_in(directory)
            .with_context(|| format!("make a file in {at} (name another --directory)"))?;
        let kind = rustix::fs::fstatfs(&file)?.f_type as u64;
        ensure!(
            !IN_MEMORY.contains(&kind),
            "{at} is in memory: there is no device to wait for (name a --directory on a disk)"
        );
        let mut random = Random::new(FILE_MIB);
        let mut chunk = vec![0_u8; 1 << 20];
        for _ in 0..FILE_MIB {
            wait(std::time::Duration::ZERO, interrupted)?;
            chunk.chunks_exact_mut(8).for_each(|word| {
                word.copy_from_slice(&random.next().to_le_bytes());
            });
            file.write_all(&chunk).map_err(|error| match error.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => anyhow::Error::from(error)
                    .context(format!(
                        "{at} has no room for {FILE_MIB} MiB (free some, or name another --directory)"
                    )),
                _ => anyhow::Error::from(error).context(format!("write a file in {at}")),
            })?;
        }
        file.sync_all().with_context(|| format!("write a file in {at}"))?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = OFlags::DIRECT.bits() as i32;
        let file =
            OpenOptions::new().read(true).custom_flags(direct).open(path).with_context(|| {
                format!("{at} does not do direct I/O (name a --directory on another file system)")
            })?;
        Ok(Self { file })
    }

    /// Blocks of so many bytes.
    pub(crate) const fn blocks(block: usize) -> u64 {
        (FILE_MIB << 20) / block as u64
    }

    pub(crate) const fn file(&self) -> &File {
        &self.file
    }
}
