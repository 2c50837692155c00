//! The file in which the positions of a network device's packed rings outlive this process.
//!
//! It lies beside the device's socket, which is as private and in a directory that is there anyway.
//! A server that ends by itself leaves it only as long as a front end may come back to a ring that is
//! in it.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rtvirtio_virtq::memory::MemoryError;
use rtvirtio_virtq::ring::Positions;
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Behind the socket's name.
const SUFFIX: &str = ".positions";
const MODE: u32 = 0o600;

/// The file, open.
#[derive(Debug)]
pub(super) struct PositionsFile {
    path: PathBuf,
    pub(super) positions: Arc<Positions>,
}

impl PositionsFile {
    /// Opens or makes that of the device with this socket, of so many virtqueues.
    ///
    /// # Errors
    /// It is not in memory, is somebody else's, or cannot be made.
    pub(super) fn open(socket: &Path, queues: u16) -> Result<Self, MemoryError> {
        let mut path = OsString::from(socket);
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        let file = open(&path).map_err(MemoryError::System)?;
        match Positions::map(file.as_fd(), queues) {
            Ok(positions) => Ok(Self { path, positions }),
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                Err(error)
            }
        }
    }
}

/// The file, which nobody else may write, or could have.
fn open(path: &Path) -> Result<File, Errno> {
    let system = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(MODE)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .map_err(system)?;
    let metadata = file.metadata().map_err(system)?;
    let own = metadata.uid() == rustix::process::geteuid().as_raw();
    if own && metadata.is_file() && metadata.mode() & 0o077 == 0 {
        Ok(file)
    } else {
        Err(Errno::PERM)
    }
}

impl Drop for PositionsFile {
    fn drop(&mut self) {
        if !self.positions.is_used() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_goes_with_the_server_and_is_nobody_elses() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let socket = directory.path().join("net0");
        let path = directory.path().join("net0.positions");
        let opened = PositionsFile::open(&socket, 2).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, MODE);
        drop(opened);
        assert!(!path.exists());

        // What others may write is not believed, and not removed.
        let target = directory.path().join("other");
        std::fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(PositionsFile::open(&socket, 2).is_err());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        std::fs::set_permissions(&path, open).unwrap();
        let refused = PositionsFile::open(&socket, 2).err();
        assert_eq!(refused, Some(MemoryError::System(Errno::PERM)));
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "kept");
    }
}
