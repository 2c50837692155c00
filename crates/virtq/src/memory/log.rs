//! The dirty log of a live migration (VHOST_USER_SET_LOG_BASE): a bit for each page of the guest's
//! memory, which the front end takes and clears while we set.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use super::{Mapping, MemoryError};

/// Bytes of guest memory per bit (VHOST_LOG_PAGE).
pub const PAGE: u64 = 4096;

/// A log, mapped.
#[derive(Debug)]
pub struct DirtyLog(Mapping);

impl DirtyLog {
    /// Maps a log of `size` bytes; the descriptor is closed.
    ///
    /// # Errors
    /// As [`Mapping::new`].
    pub fn map(fd: OwnedFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        Ok(Self(Mapping::new(fd.as_fd(), offset, size)?))
    }

    /// Marks the pages of a range of guest memory. What lies beyond the log is left out: the
    /// front end chose its size.
    pub fn mark(&self, address: u64, length: u64) {
        let Some(last) = length.checked_sub(1) else { return };
        let pages = self.0.len() as u64 * 8;
        let first = address / PAGE;
        let last = (address.saturating_add(last) / PAGE).min(pages - 1);
        let mut page = first;
        while page <= last {
            let count = (8 - page % 8).min(last - page + 1);
            let mask = (0xff_u8 >> (8 - count)) << (page % 8);
            self.byte((page / 8) as usize).fetch_or(mask, Ordering::SeqCst);
            page += count;
        }
    }

    fn byte(&self, index: usize) -> &AtomicU8 {
        debug_assert!(index < self.0.len());
        // SAFETY: within the mapping, which lives as long as `self`; the front end uses atomic
        // operations on it too.
        unsafe { AtomicU8::from_ptr(self.0.base().wrapping_add(index)) }
    }
}
