//! What is in flight, in memory that outlives this process (vhost-user specification, "Inflight
//! I/O tracking"): after a crash, the server's successor does it again.
//!
//! The front end holds the memory, so its content is as hostile as a ring's: it is read when a
//! ring is set up and only written from then on.
//!
//! Behind the last queue's part there is room for a note to ourselves: whether the guest has turned
//! the write cache off. No front end says it again to a server that was started anew. Areas of
//! other back ends may end before it.
//!
//! A kill may come between any two stores. They are all made with Release, which keeps them in
//! order; the next process sees a prefix of them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::memory::{Mapping, MemoryError};

use super::{MAX_SIZE, Part, RingError};

mod packed;
mod split;

pub(super) use packed::PackedInflight;
pub(super) use split::SplitInflight;

/// The most queues of a region.
pub const MAX_QUEUES: u16 = 1024;

/// Queues begin at multiples of this, as QEMU's and DPDK's do.
const ALIGNMENT: usize = 64;
/// Bytes of the note.
const NOTE: u64 = ALIGNMENT as u64;
/// What it says if the write cache is off.
const WRITE_THROUGH: u64 = u64::from_le_bytes(*b"rtv-wthr");
// Of both layouts' headers.
const VERSION: usize = 8;
const DESC_NUM: usize = 10;

/// Why an in-flight region is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InflightError {
    /// None, or more than [`MAX_QUEUES`].
    #[error("{0} queues")]
    Queues(u16),
    /// None, or more than [`MAX_SIZE`].
    #[error("queues of {0} entries")]
    QueueSize(u16),
    /// It cannot hold its queues.
    #[error("{size} bytes cannot hold {needed}")]
    TooShort {
        /// As the front end says.
        size: u64,
        /// For its queues.
        needed: u64,
    },
    /// It does not begin at a multiple of 8.
    #[error("the offset is not a multiple of 8")]
    Misaligned,
    /// It cannot be mapped.
    #[error("cannot map the region")]
    Memory(#[source] MemoryError),
    /// It cannot be made.
    #[error("cannot make the region")]
    System(#[source] Errno),
}

/// The in-flight region of a device.
#[derive(Debug)]
pub struct Inflight {
    mapping: Mapping,
    queues: u16,
    queue_size: u16,
    packed: bool,
}

impl Inflight {
    /// Makes a region for GET_INFLIGHT_FD: the file, and its size.
    ///
    /// # Errors
    /// Numbers out of range, or no memory.
    pub fn create(
        queues: u16,
        queue_size: u16,
        packed: bool,
    ) -> Result<(OwnedFd, u64), InflightError> {
        let needed = needed(queues, queue_size, packed)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create(c"rtvirtio-inflight", flags).map_err(InflightError::System)?;
        let size = needed + NOTE;
        ftruncate(&fd, size).map_err(InflightError::System)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(InflightError::System)?;
        let mapping = Mapping::new(fd.as_fd(), 0, needed).map_err(InflightError::Memory)?;
        let region = Arc::new(Self { mapping, queues, queue_size, packed });
        for index in 0..queues {
            if let Some(queue) = region.queue(index) {
                queue.part.store_u16(DESC_NUM, queue_size, Ordering::Release);
            }
        }
        Ok((fd, size))
    }

    /// Maps the region of SET_INFLIGHT_FD; the descriptor is closed.
    ///
    /// # Errors
    /// Numbers out of range, or a file that does not hold them.
    pub fn map(
        fd: OwnedFd,
        offset: u64,
        size: u64,
        queues: u16,
        queue_size: u16,
        packed: bool,
    ) -> Result<Arc<Self>, InflightError> {
        let needed = needed(queues, queue_size, packed)?;
        if size < needed {
            return Err(InflightError::TooShort { size, needed });
        }
        if !offset.is_multiple_of(8) {
            return Err(InflightError::Misaligned);
        }
        let size = if size - needed >= NOTE { needed + NOTE } else { needed };
        let mapping = Mapping::new(fd.as_fd(), offset, size).map_err(InflightError::Memory)?;
        Ok(Arc::new(Self { mapping, queues, queue_size, packed }))
    }

    fn note(&self) -> Option<Part> {
        let at = usize::from(self.queues) * stride(self.queue_size, self.packed);
        let base = self.mapping.base().wrapping_add(at);
        (at < self.mapping.len()).then(|| Part::new(base, NOTE as usize))
    }

    /// Whether the guest had turned the write cache off when it was last noted.
    #[must_use]
    pub fn is_write_through(&self) -> bool {
        self.note().is_some_and(|note| note.load_u64(0, Ordering::Acquire) == WRITE_THROUGH)
    }

    /// Notes whether the write cache is off.
    pub fn set_write_through(&self, on: bool) {
        if let Some(note) = self.note() {
            note.store_u64(0, if on { WRITE_THROUGH } else { 0 }, Ordering::Release);
        }
    }

    /// A queue's part; `None` if there is no such queue.
    #[must_use]
    pub fn queue(self: &Arc<Self>, index: u16) -> Option<InflightQueue> {
        if index >= self.queues {
            return None;
        }
        let length = stride(self.queue_size, self.packed);
        let base = self.mapping.base().wrapping_add(usize::from(index) * length);
        Some(InflightQueue { part: Part::new(base, length), region: Arc::clone(self) })
    }
}

/// A queue's part of an in-flight region.
#[derive(Debug)]
pub struct InflightQueue {
    part: Part,
    // Keeps the mapping.
    region: Arc<Inflight>,
}

impl InflightQueue {
    /// Whether it has been used. Checks that it fits the ring.
    fn open(&self, size: u16, packed: bool) -> Result<bool, RingError> {
        let entries = self.part.load_u16(DESC_NUM, Ordering::Acquire);
        let version = self.part.load_u16(VERSION, Ordering::Acquire);
        if self.region.packed != packed || size > self.region.queue_size {
            return Err(RingError::InflightSize);
        }
        match version {
            0 => Ok(false),
            1 if entries == self.region.queue_size => Ok(true),
            1 => Err(RingError::InflightSize),
            _ => Err(RingError::InflightVersion),
        }
    }

    /// Declares it in use: the last store of its first set-up.
    fn declare(&self) {
        self.part.store_u16(DESC_NUM, self.region.queue_size, Ordering::Release);
        self.part.store_u16(VERSION, 1, Ordering::Release);
    }
}

fn needed(queues: u16, queue_size: u16, packed: bool) -> Result<u64, InflightError> {
    if queues == 0 || queues > MAX_QUEUES {
        return Err(InflightError::Queues(queues));
    }
    if queue_size == 0 || queue_size > MAX_SIZE {
        return Err(InflightError::QueueSize(queue_size));
    }
    Ok(u64::from(queues) * stride(queue_size, packed) as u64)
}

fn stride(queue_size: u16, packed: bool) -> usize {
    let (header, entry) =
        if packed { (packed::HEADER, packed::ENTRY) } else { (split::HEADER, split::ENTRY) };
    (header + entry * usize::from(queue_size)).next_multiple_of(ALIGNMENT)
}
