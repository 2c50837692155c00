//! A file of the kernel's that is read again and again, from its start.
//!
//! In somebody else's program descriptors are not ours to have. It may close them all and give their numbers
//! to files of its own, and it may count on getting the lowest number that is free. There a source lies
//! *apart*: under a high number; before each use it is asked whether it is still the file that was opened;
//! and it is read by a bare system call, in which a thread cannot be cancelled.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::process::Resource;

/// Sources apart have numbers from here on, or from half of what the process may have: the kernel's table of a
/// process grows with its highest number.
const APART: u64 = 1_000;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Source {
    file: ManuallyDrop<File>,
    /// Device and inode, if it lies apart.
    apart: Option<(u64, u64)>,
}

impl Source {
    pub(crate) fn open(path: &Path, apart: bool) -> std::io::Result<Self> {
        let file = File::open(path)?;
        if !apart {
            return Ok(Self { file: ManuallyDrop::new(file), apart: None });
        }
        let most = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let number = APART.min(most / 2) as i32;
        let file = File::from(rustix::io::fcntl_dupfd_cloexec(&file, number)?);
        let identity = identity(&file).ok_or(std::io::ErrorKind::NotFound)?;
        Ok(Self { file: ManuallyDrop::new(file), apart: Some(identity) })
    }

    /// Reads from the start; `None`: it cannot be read, or is no longer there.
    pub(crate) fn read<'b>(&self, buffer: &'b mut [u8]) -> Option<&'b [u8]> {
        if !self.is_there() {
            return None;
        }
        let read = rustix::io::pread(self.file.as_fd(), &mut *buffer, 0).ok()?;
        buffer.get(..read)
    }

    fn is_there(&self) -> bool {
        self.apart.is_none() || self.apart == identity(&self.file)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if self.is_there() {
            // SAFETY: dropped here only.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

fn identity(file: &File) -> Option<(u64, u64)> {
    let status = rustix::fs::fstat(file).ok()?;
    Some((status.st_dev, status.st_ino))
}

#[cfg(all(test, not(rtvirtio_loom)))]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};

    use super::*;

    #[test]
    fn source_apart_leaves_the_low_numbers_and_what_took_its_place_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&path, "1 2").unwrap();
        std::fs::write(&other, "x").unwrap();
        let source = Source::open(&path, true).unwrap();
        let number = source.file.as_raw_fd();
        assert!(number >= 500, "{number}");
        let mut buffer = [0; 8];
        assert_eq!(source.read(&mut buffer), Some(&b"1 2"[..]));

        // The program closes it, and has a file of its own there.
        let file = File::open(&other).unwrap();
        // SAFETY: the number is known to the source only, which bears it.
        let taken = unsafe { libc::dup2(file.as_raw_fd(), number) };
        assert_eq!(taken, number);
        assert_eq!(source.read(&mut buffer), None);
        drop(source);
        // SAFETY: made above.
        let kept = unsafe { File::from_raw_fd(taken) };
        assert!(identity(&kept).is_some());
    }
}
