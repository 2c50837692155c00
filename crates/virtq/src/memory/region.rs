//! One piece of a guest's memory: addresses of two kinds and the file that holds it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::Segment;
use rustix::fs::{SeekFrom, fstat, seek};

use super::{Mapping, MemoryError};

/// Where a region lies: a vhost-user memory region description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// The front end's virtual address.
    pub front_end: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

/// A region, mapped.
#[derive(Debug)]
pub struct Region {
    spec: RegionSpec,
    mapping: Mapping,
    /// Device and inode of its file.
    file: (u64, u64),
    /// Its parts that had pages when it was mapped: the first byte, and the one behind the last.
    populated: Vec<(u64, u64)>,
}

/// The most populated parts of a region that are told apart; what follows them counts as empty.
const MAX_PARTS: usize = 256;
/// A smaller part is not worth a registered buffer.
const MIN_PART: u64 = 1 << 20;

/// The parts of a file's range that have pages, from the range's start on. Where the file system cannot say
/// (hugetlbfs, whose pages are set aside with the file), all of it.
fn populated(fd: BorrowedFd<'_>, offset: u64, size: u64) -> Vec<(u64, u64)> {
    let end = offset + size;
    let (mut parts, mut at) = (Vec::new(), offset);
    while at < end && parts.len() < MAX_PARTS {
        let first = match seek(fd, SeekFrom::Data(at)) {
            Ok(first) if first < end => first.max(at),
            _ => break,
        };
        let last = seek(fd, SeekFrom::Hole(first)).map_or(end, |hole| hole.min(end));
        if last <= first {
            break;
        }
        if last - first >= MIN_PART {
            parts.push((first - offset, last - offset));
        }
        at = last;
    }
    parts
}

impl Region {
    /// Maps a region; the descriptor is closed.
    ///
    /// # Errors
    /// The place overflows, or the file is of the wrong kind or too short.
    pub fn map(spec: RegionSpec, fd: OwnedFd) -> Result<Self, MemoryError> {
        // The last byte has an address; the one behind it need not have one.
        let last = spec.size.checked_sub(1).ok_or(MemoryError::Empty)?;
        for start in [spec.guest, spec.front_end] {
            start.checked_add(last).ok_or(MemoryError::Overflow)?;
        }
        let mapping = Mapping::new(fd.as_fd(), spec.offset, spec.size)?;
        let populated = populated(fd.as_fd(), spec.offset, spec.size);
        let stat = fstat(&fd).map_err(MemoryError::System)?;
        Ok(Self { spec, mapping, file: (stat.st_dev, stat.st_ino), populated })
    }

    /// Where it lies.
    #[must_use]
    pub const fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    /// Device and inode of its file.
    pub(super) const fn file(&self) -> (u64, u64) {
        self.file
    }

    /// All of it.
    #[must_use]
    pub const fn segment(&self) -> Segment {
        Segment::new(self.mapping.base(), self.mapping.len())
    }

    /// Its parts that had pages when it was mapped.
    pub fn populated(&self) -> impl Iterator<Item = Segment> {
        self.populated.iter().map(|&(first, last)| self.part(first, last - first))
    }

    /// Whether its file was cut short. What it held is gone: it reads as zeroes, and nobody else
    /// sees what is written.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.mapping.is_broken()
    }

    /// As many of `length` bytes at a guest address as it holds, unless that is none.
    #[inline]
    pub(super) fn guest(&self, address: u64, length: u64) -> Option<Segment> {
        let offset = address.checked_sub(self.spec.guest)?;
        let left = self.spec.size.checked_sub(offset).filter(|left| *left != 0)?;
        Some(self.part(offset, left.min(length)))
    }

    /// `length` bytes at the front end's address, if it holds them all.
    pub(super) fn front_end(&self, address: u64, length: u64) -> Option<Segment> {
        let offset = address.checked_sub(self.spec.front_end)?;
        let left = self.spec.size.checked_sub(offset)?;
        (length <= left).then(|| self.part(offset, length))
    }

    /// The guest address of a byte of this process.
    pub(super) fn guest_of(&self, base: usize) -> Option<u64> {
        let offset = base.checked_sub(self.mapping.base() as usize)? as u64;
        (offset < self.spec.size).then(|| self.spec.guest + offset)
    }

    fn part(&self, offset: u64, length: u64) -> Segment {
        // Both are below the size, which is that of a mapping: they fit usize.
        Segment::new(self.mapping.base().wrapping_add(offset as usize), length as usize)
    }
}
