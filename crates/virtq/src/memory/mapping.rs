//! A file of the front end's, mapped to be shared with it and guarded against its being cut short.

use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::{MemoryError, sigbus};

/// File systems whose pages are memory (statfs(2)): tmpfs, of which memfd files are, ramfs and hugetlbfs.
/// Touching others would make an IOThread wait for a disk, another process or another machine.
const IN_MEMORY: [u32; 3] = [0x0102_1994, 0x8584_58f6, HUGETLBFS];
/// hugetlbfs, whose mappings are of whole huge pages.
const HUGETLBFS: u32 = 0x9584_58f6;
const PAGE: u64 = 4096;

/// The size of a file's pages.
///
/// # Errors
/// They are not memory.
pub(crate) fn page_size(fd: BorrowedFd<'_>) -> Result<u64, MemoryError> {
    let system = fstatfs(fd).map_err(MemoryError::System)?;
    let kind = system.f_type as u32;
    if !IN_MEMORY.contains(&kind) {
        return Err(MemoryError::NotInMemory);
    }
    Ok(if kind == HUGETLBFS { system.f_bsize as u64 } else { PAGE })
}

/// A shared mapping.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    length: usize,
    // What munmap needs: whole pages.
    mapped: *mut u8,
    mapped_length: usize,
    guard: sigbus::Guard,
}

// SAFETY: the mapping is shared memory, accessed only through raw pointers and atomics; the value
// itself is not changed after its construction.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `size` bytes of a file.
    ///
    /// # Errors
    /// It is empty, not in the file, or the file is of the wrong kind.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, size: u64) -> Result<Self, MemoryError> {
        if size == 0 {
            return Err(MemoryError::Empty);
        }
        let end = offset.checked_add(size).ok_or(MemoryError::Overflow)?;
        let stat = fstat(fd).map_err(MemoryError::System)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(MemoryError::NotAFile);
        }
        let file = u64::try_from(stat.st_size).unwrap_or(0);
        if file < end {
            return Err(MemoryError::TooShort { file, end });
        }
        let page = page_size(fd)?;
        let start = offset & !(page - 1);
        let length = (end - start).checked_next_multiple_of(page).ok_or(MemoryError::Overflow)?;
        let mapped_length = usize::try_from(length).map_err(|_| MemoryError::Overflow)?;

        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let mapped = unsafe {
            mmap(std::ptr::null_mut(), mapped_length, protection, MapFlags::SHARED, fd, start)
        }
        .map_err(MemoryError::System)?;
        // A guest's memory is neither small nor ours: keep it out of core dumps. Best effort.
        // SAFETY: the range has just been mapped, and its content is not changed.
        let _ = unsafe { madvise(mapped, mapped_length, Advice::LinuxDontDump) };
        let guard = sigbus::guard(mapped as usize, mapped_length).inspect_err(|_| {
            // SAFETY: nobody has been told of the mapping yet.
            let _ = unsafe { munmap(mapped, mapped_length) };
        })?;
        let base = mapped.cast::<u8>().wrapping_add((offset - start) as usize);
        Ok(Self { base, length: size as usize, mapped: mapped.cast(), mapped_length, guard })
    }

    /// Its first byte.
    #[must_use]
    pub const fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Never: an empty mapping is refused.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether its file was cut short: it has been replaced by private zeroes.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.guard.is_broken()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First, so that the handler maps nothing at an address that may soon be another's.
        self.guard.release();
        // SAFETY: whoever holds a pointer into the mapping holds a reference to its owner too.
        let result: Result<(), Errno> = unsafe { munmap(self.mapped.cast(), self.mapped_length) };
        debug_assert!(result.is_ok());
    }
}
