//! Directories for the sockets, logs and files of a measurement.
//!
//! A measurement that is killed cannot remove its own, so the next one does.

use std::fs::{DirEntry, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

const PREFIX: &str = "rtvirtio-lab-";
/// A directory that is younger than this may not be locked yet.
const YOUNG: Duration = Duration::from_secs(60);

/// A directory that is removed with everything in it when this is dropped, or by the next one that is made if this process
/// is killed.
#[derive(Debug)]
pub struct WorkDirectory {
    directory: tempfile::TempDir,
    /// Says that somebody uses it, for as long as this process lives.
    _lock: File,
}

impl WorkDirectory {
    /// A new one, where temporary files are.
    ///
    /// # Errors
    ///
    /// What the system says, with the directory's name: `TMPDIR` may name one that is not there.
    pub fn new() -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir())
    }

    fn new_in(parent: &Path) -> io::Result<Self> {
        let named = |e: io::Error| {
            let what =
                format!("make a directory in {} (TMPDIR names another): {e}", parent.display());
            io::Error::new(e.kind(), what)
        };
        for entry in parent.read_dir().map_err(named)?.flatten() {
            // Whoever is in the way of that is in nobody else's.
            let _ = remove_abandoned(&entry);
        }
        let directory =
            tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent).map_err(named)?;
        let lock = File::open(directory.path())?;
        flock(&lock, FlockOperation::NonBlockingLockShared)?;
        Ok(Self { directory, _lock: lock })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes a directory that a process of this user has left.
fn remove_abandoned(entry: &DirEntry) -> io::Result<()> {
    let is_named = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
    if !is_named || !entry.file_type()?.is_dir() {
        return Ok(());
    }
    let metadata = entry.metadata()?;
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    let is_young = metadata.modified()?.elapsed().is_ok_and(|age| age < YOUNG);
    if !is_own || is_young {
        return Ok(());
    }
    let lock = File::open(entry.path())?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    std::fs::remove_dir_all(entry.path())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn make_old(path: &Path) {
        let old = SystemTime::now() - 2 * YOUNG;
        File::open(path).unwrap().set_modified(old).unwrap();
    }

    #[test]
    fn temporary_directory_that_is_not_there_is_named() {
        let gone = tempfile::tempdir().unwrap().path().join("gone");
        let error = WorkDirectory::new_in(&gone).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains(gone.to_str().unwrap()), "{error}");
    }

    #[test]
    fn what_a_killed_process_left_goes_and_what_is_used_or_young_or_anothers_stays() {
        let parent = tempfile::tempdir().unwrap();
        let used = WorkDirectory::new_in(parent.path()).unwrap();
        std::fs::write(used.path().join("log"), "").unwrap();
        let [left, young, other] =
            ["rtvirtio-lab-left", "rtvirtio-lab-young", "other"].map(|name| {
                let path = parent.path().join(name);
                std::fs::create_dir_all(path.join("within")).unwrap();
                path
            });
        let outside = tempfile::tempdir().unwrap();
        let link = parent.path().join("rtvirtio-lab-link");
        std::os::unix::fs::symlink(outside.path(), &link).unwrap();
        for path in [used.path(), &left, &other, outside.path()] {
            make_old(path);
        }
        let next = WorkDirectory::new_in(parent.path()).unwrap();
        assert!(!left.exists());
        assert!(young.exists() && other.exists() && link.is_symlink() && outside.path().exists());
        assert!(used.path().join("log").exists());
        let paths = [used.path().to_owned(), next.path().to_owned()];
        drop((used, next));
        assert!(paths.iter().all(|path| !path.exists()));
    }
}
