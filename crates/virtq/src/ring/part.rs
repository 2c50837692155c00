//! Memory that somebody else writes too: every access is atomic, none is repeated.
//!
//! All fields are little-endian. In test builds the stores can be stopped after a number of them,
//! as a kill would.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::Segment;

use crate::memory::Memory;

use super::RingError;

/// A piece of shared memory. Whoever has one keeps its mapping alive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    base: *mut u8,
    length: usize,
}

// SAFETY: a pointer to shared memory that is accessed by atomic operations only.
unsafe impl Send for Part {}

macro_rules! access {
    ($load:ident, $store:ident, $integer:ty, $atomic:ty) => {
        #[inline]
        pub(super) fn $load(&self, offset: usize, order: Ordering) -> $integer {
            let pointer = self.at::<$integer>(offset).cast();
            // SAFETY: within the part and aligned, as `at` says.
            <$integer>::from_le(unsafe { <$atomic>::from_ptr(pointer) }.load(order))
        }

        #[inline]
        #[allow(dead_code, reason = "not every width is stored")]
        pub(super) fn $store(&self, offset: usize, value: $integer, order: Ordering) {
            #[cfg(test)]
            if !super::kill::alive() {
                return;
            }
            let pointer = self.at::<$integer>(offset).cast();
            // SAFETY: within the part and aligned, as `at` says.
            unsafe { <$atomic>::from_ptr(pointer) }.store(value.to_le(), order);
        }
    };
}

impl Part {
    /// Memory of this process, aligned for every field in it.
    pub(super) const fn new(base: *mut u8, length: usize) -> Self {
        Self { base, length }
    }

    /// Has the CPU fetch what is at an offset.
    #[inline]
    pub(super) fn prefetch(&self, offset: usize) {
        if offset < self.length {
            Segment::new(self.base.wrapping_add(offset), 1).prefetch();
        }
    }

    /// Part of a ring, at a front end's virtual address.
    pub(super) fn translate(
        memory: &Memory,
        address: u64,
        length: usize,
        alignment: usize,
    ) -> Result<Self, RingError> {
        let segment = memory.front_end(address, length as u64).ok_or(RingError::Unmapped)?;
        if !(segment.base() as usize).is_multiple_of(alignment) {
            return Err(RingError::Misaligned);
        }
        Ok(Self::new(segment.base(), length))
    }

    /// Where a field is, which lies within the part at a multiple of its size: offsets come from
    /// indices that have been checked or masked. An index that was not would reach memory behind the part,
    /// another VM's perhaps, so that is asserted in every build.
    #[inline]
    fn at<T>(&self, offset: usize) -> *mut u8 {
        assert!(offset + size_of::<T>() <= self.length, "a field lies behind its part");
        let pointer = self.base.wrapping_add(offset);
        debug_assert!((pointer as usize).is_multiple_of(size_of::<T>()));
        pointer
    }

    /// What lies there, for the dirty log.
    pub(super) fn segment(&self, offset: usize, length: usize) -> Segment {
        assert!(offset + length <= self.length, "a segment lies behind its part");
        Segment::new(self.base.wrapping_add(offset), length)
    }

    access!(load_u8, store_u8, u8, AtomicU8);
    access!(load_u16, store_u16, u16, AtomicU16);
    access!(load_u32, store_u32, u32, AtomicU32);
    access!(load_u64, store_u64, u64, AtomicU64);
}
