//! The few file operations that this room needs of a host's kernel.
//!
//! Terms: a *path* is always absolute as the host sees it (`/sys/block/…`);
//! [`RealSysfs`] puts its root in front. [`Sysfs`] is a trait because a tree
//! of plain files cannot model a kernel, which resets a scheduler's
//! parameters when another one is selected.
//!
//! Properties: `write_to_missing_file_creates_nothing`, `text_that_is_not_utf8_is_read`,
//! `device_number_text_round_trips`.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

pub use crate::fiemap::FileExtent;

/// A block device's number, `MAJOR:MINOR` as in `/sys/dev/block` and in cgroup files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceNumber {
    major: u32,
    minor: u32,
}

impl DeviceNumber {
    /// The device `major:minor`.
    #[must_use]
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// As the kernel holds it (`dev_t`), and writes it into a trace.
    pub(crate) const fn kernel(self) -> u32 {
        self.major << 20 | self.minor
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A text is not `MAJOR:MINOR`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device number MAJOR:MINOR")]
pub struct DeviceNumberError(String);

impl FromStr for DeviceNumber {
    type Err = DeviceNumberError;
    fn from_str(text: &str) -> Result<Self, DeviceNumberError> {
        let parsed = text.split_once(':').and_then(|(major, minor)| {
            Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
        });
        parsed.ok_or_else(|| DeviceNumberError(text.to_owned()))
    }
}

impl TryFrom<String> for DeviceNumber {
    type Error = DeviceNumberError;
    fn try_from(text: String) -> Result<Self, DeviceNumberError> {
        text.parse()
    }
}

impl From<DeviceNumber> for String {
    fn from(number: DeviceNumber) -> Self {
        number.to_string()
    }
}

/// A kernel's file tree.
pub trait Sysfs: fmt::Debug + Send + Sync {
    /// The file's text, with its newline. What of it is not UTF-8 reads as U+FFFD.
    ///
    /// # Errors
    /// What the kernel says.
    fn read(&self, path: &Path) -> io::Result<String>;

    /// Writes `text` in one call to a file that exists.
    ///
    /// # Errors
    /// What the kernel says.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Whether there is a file or directory at `path`.
    fn exists(&self, path: &Path) -> bool;

    /// The names in a directory, sorted.
    ///
    /// # Errors
    /// What the kernel says.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Where a symbolic link points.
    ///
    /// # Errors
    /// What the kernel says.
    fn link(&self, path: &Path) -> io::Result<PathBuf>;

    /// A file's inode. A cgroup's is its id, which the kernel never reuses within a boot.
    ///
    /// # Errors
    /// What the kernel says.
    fn inode(&self, path: &Path) -> io::Result<u64>;

    /// The path without symbolic links.
    ///
    /// # Errors
    /// What the kernel says.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf>;

    /// The number of the block device that `path` leads to, through symbolic
    /// links; `None` if it is no block device.
    ///
    /// # Errors
    /// What the kernel says.
    fn device_number(&self, path: &Path) -> io::Result<Option<DeviceNumber>>;

    /// Where the data of a file lies on its filesystem's device.
    ///
    /// # Errors
    /// What the kernel says.
    fn file_extents(&self, path: &Path) -> io::Result<Vec<FileExtent>>;

    /// Makes a directory; making one in a cgroup hierarchy makes a cgroup.
    ///
    /// # Errors
    /// What the kernel says.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory or cgroup.
    ///
    /// # Errors
    /// What the kernel says.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Sends SIGKILL to a process found in a cgroup.
    ///
    /// # Errors
    /// What the kernel says.
    fn kill(&self, pid: u32) -> io::Result<()>;
}

/// The kernel's own tree under a root.
#[derive(Debug, Clone)]
pub struct RealSysfs {
    root: PathBuf,
}

impl RealSysfs {
    /// The tree under `root`, `/` in production.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

impl Sysfs for RealSysfs {
    fn read(&self, path: &Path) -> io::Result<String> {
        // Users name processes and mount points, which a kernel's file then shows beside all others:
        // one that is not UTF-8 must not hide them.
        Ok(String::from_utf8_lossy(&fs::read(self.at(path))?).into_owned())
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // No O_CREAT: a knob that is not there must stay an error.
        let mut file = fs::OpenOptions::new().write(true).open(self.at(path))?;
        // One write(2): the kernel parses each call on its own.
        let written = file.write(text.as_bytes())?;
        if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn exists(&self, path: &Path) -> bool {
        self.at(path).exists()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.at(path))? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn link(&self, path: &Path) -> io::Result<PathBuf> {
        fs::read_link(self.at(path))
    }

    fn inode(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::metadata(self.at(path))?.ino())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        let found = fs::canonicalize(self.at(path))?;
        let below = found.strip_prefix(&self.root).unwrap_or(&found);
        Ok(Path::new("/").join(below))
    }

    fn device_number(&self, path: &Path) -> io::Result<Option<DeviceNumber>> {
        let metadata = fs::metadata(self.at(path))?;
        if !metadata.file_type().is_block_device() {
            return Ok(None);
        }
        let number = metadata.rdev();
        Ok(Some(DeviceNumber::new(rustix::fs::major(number), rustix::fs::minor(number))))
    }

    fn file_extents(&self, path: &Path) -> io::Result<Vec<FileExtent>> {
        crate::fiemap::extents(&self.at(path))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(self.at(path))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(self.at(path))
    }

    fn kill(&self, pid: u32) -> io::Result<()> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
        kill_process(pid, Signal::KILL).map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_to_missing_file_creates_nothing() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = RealSysfs::new(root.path());
        assert!(sysfs.write(Path::new("/knob"), "1").is_err());
        assert!(!sysfs.exists(Path::new("/knob")));
    }

    #[test]
    fn text_that_is_not_utf8_is_read() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("comm"), b"gr\xc3\n").unwrap();
        let sysfs = RealSysfs::new(root.path());
        assert_eq!(sysfs.read(Path::new("/comm")).unwrap(), "gr\u{fffd}\n");
    }

    #[test]
    fn device_number_text_round_trips() {
        let number: DeviceNumber = "259:3".parse().unwrap();
        assert_eq!(number, DeviceNumber::new(259, 3));
        assert_eq!(number.to_string(), "259:3");
        assert!("259".parse::<DeviceNumber>().is_err());
        assert!("a:b".parse::<DeviceNumber>().is_err());
    }
}
