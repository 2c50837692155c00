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
use rustix::fs::{Gid, OFlags, Uid};
use rustix::io::Errno;

use crate::sandbox::Identity;

/// Behind the socket's name.
const SUFFIX: &str = ".positions";
const MODE: u32 = 0o600;

/// Why the positions cannot be kept, with the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PositionsError {
    /// A store to it may wait for a disk.
    #[error(
        "{} is on a file system that is not in memory: put the nic's socket on one that is, as /run is", path.display()
    )]
    NotInMemory {
        /// The file.
        path: PathBuf,
    },
    /// Others may write it, or could have.
    #[error(
        "{} is not a file of this user's alone: remove it, and start again", path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// Something else has its name.
    #[error(
        "{} is there, and keeps no positions of virtqueues: move it away, or give the nic another socket", path.display()
    )]
    Other {
        /// The file.
        path: PathBuf,
    },
    /// It cannot be made.
    #[error("make {}: {source}: see to it that this user may, and that there is room", path.display())]
    Make {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: Errno,
    },
    /// It cannot be mapped.
    #[error("map {}: {source}", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: MemoryError,
    },
}

/// The file, open.
#[derive(Debug)]
pub(super) struct PositionsFile {
    path: PathBuf,
    pub(super) positions: Arc<Positions>,
}

impl PositionsFile {
    /// Opens or makes that of the device with this socket, of so many virtqueues. It is the property
    /// of `owner`, if one is given.
    ///
    /// # Errors
    /// It is not in memory, is somebody else's, or cannot be made.
    pub(super) fn open(
        socket: &Path,
        queues: u16,
        owner: Option<&Identity>,
    ) -> Result<Self, PositionsError> {
        let mut path = OsString::from(socket);
        path.push(SUFFIX);
        let path = PathBuf::from(path);
        let file = match open(&path, owner) {
            Ok(file) => file,
            Err(Errno::PERM | Errno::LOOP) => return Err(PositionsError::Foreign { path }),
            Err(source) => return Err(PositionsError::Make { path, source }),
        };
        match Positions::is_one(file.as_fd()) {
            Ok(true) => {}
            Ok(false) => return Err(PositionsError::Other { path }),
            Err(source) => return Err(PositionsError::Make { path, source }),
        }
        let is_new = file.metadata().is_ok_and(|metadata| metadata.len() == 0);
        match Positions::map(file.as_fd(), queues) {
            Ok(positions) => Ok(Self { path, positions }),
            Err(error) => {
                if is_new {
                    let _ = std::fs::remove_file(&path);
                }
                Err(match error {
                    MemoryError::NotInMemory => PositionsError::NotInMemory { path },
                    MemoryError::System(source) => PositionsError::Make { path, source },
                    source => PositionsError::Map { path, source },
                })
            }
        }
    }
}

/// The file, which nobody else may write, or could have.
fn open(path: &Path, owner: Option<&Identity>) -> Result<File, Errno> {
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
    let own = [Some(rustix::process::geteuid().as_raw()), owner.map(Identity::uid)];
    let is_private = metadata.mode() & 0o077 == 0 && metadata.nlink() == 1;
    if !metadata.is_file() || !own.contains(&Some(metadata.uid())) || !is_private {
        return Err(Errno::PERM);
    }
    if let Some(owner) = owner {
        let (user, group) = (Uid::from_raw(owner.uid()), Gid::from_raw(owner.gid()));
        rustix::fs::fchown(&file, Some(user), Some(group))?;
    }
    Ok(file)
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
        let opened = PositionsFile::open(&socket, 2, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, MODE);
        drop(opened);
        assert!(!path.exists());

        // What others may write is not believed, and not removed.
        let target = directory.path().join("other");
        std::fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(PositionsFile::open(&socket, 2, None).is_err());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        std::fs::set_permissions(&path, open).unwrap();
        let refused = PositionsFile::open(&socket, 2, None).err();
        assert_eq!(refused, Some(PositionsError::Foreign { path: path.clone() }));
        // Nor what has another name.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "kept").unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, private).unwrap();
        std::fs::hard_link(&path, directory.path().join("linked")).unwrap();
        assert!(PositionsFile::open(&socket, 2, None).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "kept");
    }

    #[test]
    fn what_has_the_files_name_by_chance_is_left_as_it_is() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let socket = directory.path().join("net0");
        let path = directory.path().join("net0.positions");
        let length = {
            let _opened = PositionsFile::open(&socket, 2, None).unwrap();
            std::fs::metadata(&path).unwrap().len() as usize
        };
        for content in [vec![7; 1 << 20], vec![7; length], b"kept".to_vec()] {
            std::fs::write(&path, &content).unwrap();
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(&path, private).unwrap();
            let refused = PositionsFile::open(&socket, 2, None).err();
            assert_eq!(refused, Some(PositionsError::Other { path: path.clone() }));
            assert!(std::fs::read(&path).unwrap() == content);
        }
        // One of another number of queues is taken over.
        std::fs::remove_file(&path).unwrap();
        std::mem::forget(PositionsFile::open(&socket, 16, None).unwrap());
        PositionsFile::open(&socket, 2, None).unwrap();
    }

    #[test]
    fn file_outside_memory_is_refused_with_a_remedy_of_its_own() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let socket = directory.path().join("net0");
        let Some(refused) = PositionsFile::open(&socket, 2, None).err() else {
            return rtvirtio_engine::testing::skipped("the sources are in memory here");
        };
        let path = directory.path().join("net0.positions");
        assert_eq!(refused, PositionsError::NotInMemory { path: path.clone() });
        let text = refused.to_string();
        assert!(text.contains("socket") && text.contains("/run"), "{text}");
        assert!(!text.contains("memory-backend"), "{text}");
        assert!(!path.exists());
    }
}
