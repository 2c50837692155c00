//! A guest's memory, as its front end shares it over vhost-user.
//!
//! Addresses come in two kinds: the guest's physical ones, in descriptors, and the front end's
//! virtual ones, in SET_VRING_ADDR. Both are hostile, and so are the files behind the memory: one
//! that shrinks while it is in use breaks its region, not this process ([`sigbus`]).

use std::sync::Arc;

use crate::Segment;
use rtvirtio_units::Bytes;
use rustix::io::Errno;

pub mod log;
pub mod mapping;
pub mod region;
pub mod sigbus;

#[cfg(test)]
pub(crate) mod tests;

pub use log::DirtyLog;
pub use mapping::Mapping;
pub use region::{Region, RegionSpec};

/// The most regions of a table: as many slots as KVM has, which is what front ends can fill.
pub const MAX_REGIONS: usize = 509;

/// Why memory is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A region without a byte.
    #[error("the region is empty")]
    Empty,
    /// A region that ends beyond the last address.
    #[error("the region ends beyond the last address")]
    Overflow,
    /// The descriptor is no regular file (a memfd is one).
    #[error("the descriptor is no regular file")]
    NotAFile,
    /// A page fault there waits for a disk, or for a server that may never answer.
    #[error(
        "the file is not in memory (memfd, tmpfs or hugetlbfs): give the guest memory-backend-memfd, or a file \
         in /dev/shm or /dev/hugepages"
    )]
    NotInMemory,
    /// More than the device allows.
    #[error("the guest shares {total} of memory, and the device allows {limit} (max_memory)")]
    TooMuch {
        /// Of all regions.
        total: Bytes,
        /// What the device allows.
        limit: Bytes,
    },
    /// The file ends before the region does.
    #[error("the file has {file} bytes, the region ends at {end}")]
    TooShort {
        /// Bytes of the file.
        file: u64,
        /// The region's end in it.
        end: u64,
    },
    /// The kernel refused.
    #[error("cannot map the memory")]
    System(#[source] Errno),
    /// More mappings in this process than are guarded.
    #[error("too many mappings")]
    TooManyMappings,
    /// Two regions have a guest address in common.
    #[error("two regions overlap")]
    Overlap,
    /// More than [`MAX_REGIONS`].
    #[error("more than {MAX_REGIONS} regions")]
    TooManyRegions,
    /// There is no such region.
    #[error("no such region")]
    NoSuchRegion,
}

/// The memory table of one device: regions that do not overlap, by guest address.
#[derive(Debug, Default)]
pub struct Memory {
    regions: Vec<Arc<Region>>,
    log: Option<Arc<DirtyLog>>,
}

impl Memory {
    /// A table.
    ///
    /// # Errors
    /// Regions that overlap, or too many.
    pub fn new(mut regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        if regions.len() > MAX_REGIONS {
            return Err(MemoryError::TooManyRegions);
        }
        regions.sort_unstable_by_key(|region| region.spec().guest);
        let overlap = |pair: &[Arc<Region>]| {
            // A region does not end beyond the last address: no overflow.
            pair[1].spec().guest - pair[0].spec().guest < pair[0].spec().size
        };
        if regions.windows(2).any(overlap) {
            return Err(MemoryError::Overlap);
        }
        Ok(Self { regions, log: None })
    }

    /// The table with one more region.
    ///
    /// # Errors
    /// As [`Memory::new`].
    pub fn with(&self, region: Arc<Region>) -> Result<Self, MemoryError> {
        let regions = self.regions.iter().cloned().chain([region]).collect();
        Ok(Self::new(regions)?.with_log(self.log.clone()))
    }

    /// The table without the region of that place; its offset in the file is not looked at.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without(&self, spec: &RegionSpec) -> Result<Self, MemoryError> {
        let place = |spec: &RegionSpec| (spec.guest, spec.size, spec.front_end);
        let index = self
            .regions
            .iter()
            .position(|region| place(region.spec()) == place(spec))
            .ok_or(MemoryError::NoSuchRegion)?;
        let mut regions = self.regions.clone();
        regions.remove(index);
        Ok(Self { regions, log: self.log.clone() })
    }

    /// The same memory, with writes to it logged from now on, or no longer.
    #[must_use]
    pub fn with_log(&self, log: Option<Arc<DirtyLog>>) -> Self {
        Self { regions: self.regions.clone(), log }
    }

    /// The regions, by guest address.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Arc<Region>> {
        self.regions.iter()
    }

    /// The log of what is written.
    #[must_use]
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    /// Device and inode of the file that a front end's address lies in.
    pub(crate) fn front_end_file(&self, address: u64) -> Option<(u64, u64)> {
        let holds = |region: &&Arc<Region>| region.front_end(address, 1).is_some();
        self.regions.iter().find(holds).map(|region| region.file())
    }

    /// Whether the front end took away memory that it had shared.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|region| region.is_broken())
    }

    /// The first contiguous part of `length` bytes at the guest physical `address`: all of them
    /// unless they cross from one region into the next. `None` where there is no memory.
    #[must_use]
    pub fn guest(&self, address: u64, length: u64) -> Option<Segment> {
        self.guest_near(&mut 0, address, length)
    }

    /// [`Memory::guest`], with the index of the region that served the last call as a guess.
    #[inline]
    pub(crate) fn guest_near(
        &self,
        near: &mut usize,
        address: u64,
        length: u64,
    ) -> Option<Segment> {
        if let Some(segment) = self.regions.get(*near).and_then(|r| r.guest(address, length)) {
            return Some(segment);
        }
        let after = self.regions.partition_point(|region| region.spec().guest <= address);
        *near = after.checked_sub(1)?;
        self.regions[*near].guest(address, length)
    }

    /// `length` contiguous bytes at the front end's virtual `address`.
    #[must_use]
    pub fn front_end(&self, address: u64, length: u64) -> Option<Segment> {
        self.regions.iter().find_map(|region| region.front_end(address, length))
    }

    /// Marks what was written to as dirty, if the front end keeps a log (live migration). Call it
    /// after the write and before the driver is told of it.
    pub fn log_write(&self, segment: Segment) {
        let Some(log) = &self.log else { return };
        let base = segment.base() as usize;
        if let Some(address) = self.regions.iter().find_map(|region| region.guest_of(base)) {
            log.mark(address, segment.len() as u64);
        }
    }

    /// Marks bytes at a guest address as dirty, if the front end keeps a log.
    pub fn log_guest(&self, address: u64, length: u64) {
        if let Some(log) = &self.log {
            log.mark(address, length);
        }
    }
}
