//! What the disks of a campaign lie on.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Result, bail};
use rtvirtio_units::Bytes;

use super::configuration::DISK;
use crate::scratch::{self, Backing, ScratchDisk};

/// Where a campaign's disks are to lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum On {
    /// The emulated SSD of this reference name.
    Ssd(String),
    /// A file in this directory, which is written before and has no name any more.
    File(PathBuf),
}

impl std::str::FromStr for On {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("ssd", name)) => {
                name.parse::<scratch::SsdConfig>().map_err(|e| e.to_string())?;
                Ok(Self::Ssd(name.to_owned()))
            }
            Some(("file", directory)) if !directory.is_empty() => Ok(Self::File(directory.into())),
            _ => Err(format!("`{text}` is neither ssd:NAME nor file:DIRECTORY")),
        }
    }
}

impl On {
    /// How results name it.
    pub(crate) fn label(&self) -> &str {
        match self {
            Self::Ssd(name) => name,
            Self::File(_) => "file",
        }
    }
}

/// The device or file, as long as the value lives. A killed benchmark leaves none.
pub enum Disk {
    /// An emulated SSD.
    Ssd(ScratchDisk),
    /// A file without a name.
    File(File),
}

impl Disk {
    pub(crate) fn make(on: &On) -> Result<Self> {
        let size = Bytes::new(DISK * 5);
        match on {
            On::Ssd(name) => {
                let backing = Backing::Ssd(name.clone());
                Ok(Self::Ssd(ScratchDisk::start(&backing, size, 1)?))
            }
            On::File(directory) => {
                if !directory.is_dir() {
                    bail!("{} is no directory", directory.display());
                }
                eprintln!("Writing a file of {size} in {}", directory.display());
                Ok(Self::File(scratch::open_raw(directory, size)?))
            }
        }
    }

    /// Where servers open it: a file by this process, since it has no name of its own.
    pub(crate) fn path(&self) -> PathBuf {
        match self {
            Self::Ssd(disk) => disk.device().to_owned(),
            Self::File(file) => {
                format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_an_ssd_that_there_is_or_a_directory() {
        assert_eq!("ssd:ref-8x80".parse(), Ok(On::Ssd("ref-8x80".to_owned())));
        assert_eq!("file:/var/tmp".parse(), Ok(On::File("/var/tmp".into())));
        for text in ["ssd:", "ssd:x", "file:", "/var/tmp", ""] {
            assert!(text.parse::<On>().is_err(), "{text:?}");
        }
    }
}
