//! What the disks of a campaign lie on.

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use rtvirtio_units::Bytes;

use super::configuration::DISK;
use crate::scratch::{self, Backing, ScratchDisk};

/// The device or file, as long as the value lives. A killed benchmark leaves none.
pub enum Disk {
    /// An emulated SSD.
    Ssd(ScratchDisk),
    /// A file without a name.
    File(File),
}

impl Disk {
    pub(crate) fn make(on: &Backing) -> Result<Self> {
        let size = Bytes::new(DISK * 5);
        match on {
            Backing::Ssd(_) => Ok(Self::Ssd(ScratchDisk::start(on, size, 1)?)),
            Backing::Raw(directory) => {
                ensure!(directory.is_dir(), "{} is no directory", directory.display());
                eprintln!("Writing a file of {size} in {}", directory.display());
                Ok(Self::File(scratch::open_raw(directory, size)?))
            }
        }
    }

    /// Where servers open it: a file by this process, since it has no name of its own.
    pub(crate) fn path(&self) -> PathBuf {
        match self {
            Self::Ssd(disk) => disk.device().to_owned(),
            Self::File(file) => scratch::path_of(file),
        }
    }
}
