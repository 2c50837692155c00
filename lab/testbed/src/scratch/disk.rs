//! What the disks of a campaign lie on.

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_units::Bytes;

use super::{Backing, ScratchDisk, open_raw, path_of};

/// The device or file, as long as the value lives. A killed benchmark leaves none.
pub enum Disk {
    /// An emulated SSD.
    Ssd(ScratchDisk),
    /// A file without a name.
    File(File),
}

impl Disk {
    /// Makes one of such a size.
    ///
    /// # Errors
    /// As [`ScratchDisk::start`]; a directory that is none, or has no room.
    pub fn make(on: &Backing, size: Bytes, interrupted: &Interrupted) -> Result<Self> {
        match on {
            Backing::Ssd(_) => Ok(Self::Ssd(ScratchDisk::start(on, size, 1, interrupted)?)),
            Backing::Raw(directory) => {
                ensure!(directory.is_dir(), "{} is no directory", directory.display());
                eprintln!("Writing a file of {size} in {}", directory.display());
                Ok(Self::File(open_raw(directory, size, interrupted)?))
            }
        }
    }

    /// Where servers open it: a file by this process, since it has no name of its own.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Ssd(disk) => disk.device().to_owned(),
            Self::File(file) => path_of(file),
        }
    }
}
