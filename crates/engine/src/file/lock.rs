//! Locks on QEMU's byte ranges, so that QEMU, qemu-img and this data plane refuse each other's
//! images in use.
//!
//! QEMU (`block/file-posix.c`) gives each permission two bytes: 100 + i is read-locked by whoever
//! holds permission i, 200 + i by whoever does not share it. Having locked its own, one asks
//! whether somebody else has locked the counterparts. The locks are of the open file description
//! (`F_OFD_SETLK`): they end with it, whatever happens to the process.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::io::Errno;

const HELD: i64 = 100;
const NOT_SHARED: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

const NAMES: [(i64, &str); 3] =
    [(CONSISTENT_READ, "consistent read"), (WRITE, "write"), (RESIZE, "resize")];

/// What the disk's user does with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads, and wants nobody to write.
    Read,
    /// Reads and writes, and wants nobody else to write or resize.
    Write,
}

impl Access {
    const fn held(self) -> &'static [i64] {
        match self {
            Self::Read => &[CONSISTENT_READ],
            Self::Write => &[CONSISTENT_READ, WRITE],
        }
    }

    const fn not_shared(self) -> &'static [i64] {
        match self {
            Self::Read => &[WRITE],
            Self::Write => &[WRITE, RESIZE],
        }
    }
}

/// Why a file could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else holds a permission that this use does not share.
    #[error(
        "another process holds the \"{0}\" lock: is the image in use by QEMU, qemu-img or another rtvirtio?"
    )]
    Held(&'static str),
    /// Somebody else does not share a permission that this use needs.
    #[error(
        "another process does not share the \"{0}\" lock: is the image in use by QEMU, qemu-img or another rtvirtio?"
    )]
    NotShared(&'static str),
    /// The same open file description serves another disk of this process: its locks are that one's own.
    #[error(
        "it is the very descriptor that another disk of this data plane has: open the image once more"
    )]
    Twice,
    /// The file system cannot lock.
    #[error("the file cannot be locked")]
    Failed(#[source] Errno),
}

/// A file that can be locked.
#[derive(Debug, Clone)]
pub struct Lockable {
    file: Arc<OwnedFd>,
    access: Access,
}

impl Lockable {
    /// An open file, for this use.
    #[must_use]
    pub const fn new(file: Arc<OwnedFd>, access: Access) -> Self {
        Self { file, access }
    }

    /// Takes QEMU's locks for as long as the result lives; one lock at a time.
    ///
    /// # Errors
    /// [`LockError`]: somebody else uses the file, or it cannot be locked.
    pub fn lock(&self) -> Result<Lock, LockError> {
        Lock::acquire(&self.file, self.access)
    }
}

/// A file locked; dropping it releases the bytes that it locked.
#[derive(Debug)]
#[must_use]
pub struct Lock {
    file: Arc<OwnedFd>,
    access: Access,
}

impl Lock {
    /// Locks the file's open file description for `access`: at most one lock per description.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn acquire(file: &Arc<OwnedFd>, access: Access) -> Result<Self, LockError> {
        {
            let mut held = HELD_HERE.lock().unwrap_or_else(PoisonError::into_inner);
            held.retain(|(other, _)| other.strong_count() > 0);
            let writes = |other: Access| access == Access::Write || other == Access::Write;
            let mut others = held.iter().filter(|(_, other)| writes(*other));
            if others.any(|(other, _)| other.upgrade().is_some_and(|o| is_same(&o, file))) {
                return Err(LockError::Twice);
            }
            held.push((Arc::downgrade(file), access));
        }
        let lock = Self { file: Arc::clone(file), access };
        // From here on, an error drops `lock`, which releases what it has. First lock, then
        // look: of two at the same time, at least one sees the other.
        for byte in lock.bytes() {
            set(file, libc::F_RDLCK, byte).map_err(LockError::Failed)?;
        }
        for &permission in access.held() {
            if is_locked_by_another(file, NOT_SHARED + permission).map_err(LockError::Failed)? {
                return Err(LockError::NotShared(name(permission)));
            }
        }
        for &permission in access.not_shared() {
            if is_locked_by_another(file, HELD + permission).map_err(LockError::Failed)? {
                return Err(LockError::Held(name(permission)));
            }
        }
        Ok(lock)
    }

    fn bytes(&self) -> impl Iterator<Item = i64> + use<> {
        let held = self.access.held().iter().map(|i| HELD + i);
        held.chain(self.access.not_shared().iter().map(|i| NOT_SHARED + i))
    }
}

/// What is locked by this process: the kernel tells only other descriptions' locks.
static HELD_HERE: Mutex<Vec<(Weak<OwnedFd>, Access)>> = Mutex::new(Vec::new());

/// Whether two descriptors are of one open file description: then they have one file position. Nobody uses
/// that of an image.
fn is_same(a: &OwnedFd, b: &OwnedFd) -> bool {
    use rustix::fs::{SeekFrom, fstat, seek};

    let identity = |fd| fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).ok();
    if identity(a).is_none() || identity(a) != identity(b) {
        return false;
    }
    let position = |fd| seek(fd, SeekFrom::Current(0)).ok();
    let Some(before) = position(a) else { return false };
    let follows = [1, 2].into_iter().all(|step| {
        let to = before.wrapping_add(step * 512) & (i64::MAX as u64);
        seek(a, SeekFrom::Start(to)).is_ok() && position(b) == Some(to)
    });
    let _ = seek(a, SeekFrom::Start(before));
    follows
}

impl Drop for Lock {
    fn drop(&mut self) {
        let mut held = HELD_HERE.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|(other, _)| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(&self.file)));
        // Of one description all have the same locks: they are released with the last.
        let has_others = |(other, _): &(Weak<OwnedFd>, Access)| {
            other.upgrade().is_some_and(|other| is_same(&other, &self.file))
        };
        if held.iter().any(has_others) {
            return;
        }
        for byte in self.bytes() {
            let _ = set(&self.file, libc::F_UNLCK, byte);
        }
    }
}

fn name(permission: i64) -> &'static str {
    NAMES.iter().find(|(i, _)| *i == permission).map_or("unknown", |(_, name)| name)
}

fn one_byte(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

fn set(file: &OwnedFd, kind: i32, byte: i64) -> Result<(), Errno> {
    let lock = one_byte(kind, byte);
    // SAFETY: `lock` outlives the call, which only reads it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 { Ok(()) } else { Err(super::image::last_error()) }
}

/// Whether a write lock would meet another's lock.
fn is_locked_by_another(file: &OwnedFd, byte: i64) -> Result<bool, Errno> {
    let mut lock = one_byte(libc::F_WRLCK, byte);
    // SAFETY: `lock` outlives the call, which reads and writes it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result == 0 {
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    } else {
        Err(super::image::last_error())
    }
}
