//! Where the packed rings of a device are, in a file of the server's own that outlives it.
//!
//! A split ring says how far its device has got: it is the used index. A packed ring says it
//! nowhere, and a front end learns it when the ring is stopped, which a server that is killed does
//! not do. An in-flight region would tell; but front ends have none for network devices.
//!
//! A device that uses buffers in the order in which they were made available needs less than such a
//! region holds: the next descriptor to use, and the requests that have finished since the driver
//! was last shown any. The successor shows them, if the ring does not have them yet, and takes what
//! comes behind them, so that no request is done twice and none is left out.
//!
//! A queue's part of the file names the ring that it is about by the file that the ring's memory is
//! of, its address and its size. Memory of another guest, or of the same one after its front end was
//! started anew, is another file. A front end that has put a snapshot in its place sets another base
//! than before. A driver that has reset the device while there was no server has
//! cleared the ring, in which then no descriptor has been used.
//!
//! A kill may come between any two stores. They are all made with Release, which keeps them in
//! order; the next process sees a prefix of them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use rustix::fs::{FallocateFlags, fallocate, ftruncate};

use crate::memory::mapping::page_size;
use crate::memory::{Mapping, Memory, MemoryError};

use super::descriptor::Position;
use super::{MAX_SIZE, Part};

// Of a queue's part: the ring it is about, whose size is 0 if it is about none.
const DEVICE: usize = 0;
const INODE: usize = 8;
const ADDRESS: usize = 16;
/// With [`VERSION`] behind its 16 bits.
const SIZE: usize = 24;
/// The base as the front end has set it.
const TOLD: usize = 40;
/// The next descriptor to use, and behind its 16 bits the number of requests in the list.
const STATE: usize = 32;
/// Requests that have finished since: bytes written (32 bits), buffer ID (16), descriptors (16).
const LIST: usize = 64;
/// Of this layout.
const VERSION: u64 = 1;
const STRIDE: usize = LIST + 8 * MAX_SIZE as usize;

/// The positions of a device's packed rings.
#[derive(Debug)]
pub struct Positions {
    mapping: Mapping,
    queues: u16,
}

impl Positions {
    /// Maps the file, which is given the length that it has to have. What a server before this one
    /// has left in it stays.
    ///
    /// # Errors
    /// The file is not in memory, or cannot be made so long.
    pub fn map(file: BorrowedFd<'_>, queues: u16) -> Result<Arc<Self>, MemoryError> {
        page_size(file)?;
        let length = STRIDE as u64 * u64::from(queues);
        // All of it: a full file system says so here, and not at a store.
        ftruncate(file, length).map_err(MemoryError::System)?;
        fallocate(file, FallocateFlags::empty(), 0, length).map_err(MemoryError::System)?;
        Ok(Arc::new(Self { mapping: Mapping::new(file, 0, length)?, queues }))
    }

    /// Whether a file is empty, or may have been made by [`Self::map`].
    ///
    /// # Errors
    /// It cannot be read.
    pub fn is_one(file: BorrowedFd<'_>) -> rustix::io::Result<bool> {
        let length = rustix::fs::fstat(file)?.st_size.cast_unsigned();
        let queues = length / STRIDE as u64;
        if length != queues * STRIDE as u64 || queues > u16::MAX.into() {
            return Ok(false);
        }
        for queue in 0..queues {
            let mut size = [0; 8];
            let at = queue * STRIDE as u64 + SIZE as u64;
            let read = rustix::io::pread(file, &mut size, at)?;
            let size = u64::from_ne_bytes(size);
            if read < 8 || size != 0 && size >> 16 != VERSION {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn part(&self, index: u16) -> Option<Part> {
        let base = self.mapping.base().wrapping_add(usize::from(index) * STRIDE);
        (index < self.queues).then(|| Part::new(base, STRIDE))
    }

    /// A queue's part; `None` if there is no such queue. `told` is the base as the front end has set
    /// it: after a crash it sets the same again, unless it knows better.
    #[must_use]
    pub fn queue(self: &Arc<Self>, index: u16, told: u32) -> Option<QueuePosition> {
        let part = self.part(index)?;
        Some(QueuePosition { part, told, finished: 0, _file: Arc::clone(self) })
    }

    /// The front end knows where the queue is, or it is to begin anew.
    pub fn forget(&self, index: u16) {
        if let Some(part) = self.part(index) {
            part.store_u64(SIZE, 0, Release);
        }
    }

    /// Whether a successor would learn anything from it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        (0..self.queues).filter_map(|i| self.part(i)).any(|part| part.load_u64(SIZE, Acquire) != 0)
    }
}

/// A queue's part of the file.
#[derive(Debug)]
pub struct QueuePosition {
    part: Part,
    told: u32,
    /// Requests in the list. Of the width in which it is loaded to be shifted: a load that is wider than the store before it
    /// waits until that is in the cache, behind all that was stored before.
    finished: u64,
    // Keeps the mapping.
    _file: Arc<Positions>,
}

/// A ring, as far as servers can tell one from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    /// Device and inode of the file that its memory is of.
    file: (u64, u64),
    /// Of its descriptors, the front end's.
    address: u64,
    size: u16,
}

impl Identity {
    /// Of the ring at the front end's `address`, which lies in this memory.
    pub(super) fn new(memory: &Memory, address: u64, size: u16) -> Self {
        Self { file: memory.front_end_file(address).unwrap_or_default(), address, size }
    }
}

/// A request that has finished, and that the driver may not have been shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Finished {
    pub(super) written: u32,
    pub(super) id: u16,
    /// Its descriptors.
    pub(super) count: u16,
}

/// What an earlier server has left of a ring.
#[derive(Debug)]
pub(super) struct Left {
    /// Where the first request was used that the driver may not have been shown.
    pub(super) position: Position,
    /// It, and those that have finished behind it.
    pub(super) finished: Vec<Finished>,
    /// Where the front end said that the ring was, when that server began.
    pub(super) told: Position,
}

impl QueuePosition {
    /// Where the front end says that the ring is.
    pub(super) const fn told(&self) -> Position {
        Position::from_bits(self.told as u16)
    }

    /// What an earlier server has left of this ring. `None`: nothing, or nothing that can be of it.
    pub(super) fn left(&self, ring: Identity) -> Option<Left> {
        let load = |offset| self.part.load_u64(offset, Acquire);
        let of = Identity {
            file: (load(DEVICE), load(INODE)),
            address: load(ADDRESS),
            size: load(SIZE) as u16,
        };
        if of != ring || load(SIZE) >> 16 != VERSION {
            return None;
        }
        let state = load(STATE);
        let (position, length) = (Position::from_bits(state as u16), (state >> 16) as u16);
        if position.index() >= ring.size || length > ring.size {
            return None;
        }
        let entry = |index: u16| {
            let word = load(LIST + 8 * usize::from(index));
            let [id, count] = [(word >> 32) as u16, (word >> 48) as u16];
            Finished { written: word as u32, id, count }
        };
        let finished: Vec<_> = (0..length).map(entry).collect();
        let descriptors: u64 = finished.iter().map(|request| u64::from(request.count)).sum();
        let whole = finished.iter().all(|request| request.count != 0);
        let told = Position::from_bits(load(TOLD) as u16);
        let left = Left { position, finished, told };
        let is_within = told.index() < ring.size;
        (whole && is_within && descriptors <= ring.size.into()).then_some(left)
    }

    /// From here on it is about this ring, which is at `position`.
    pub(super) fn begin(&mut self, ring: Identity, position: Position) {
        let store = |offset, value| self.part.store_u64(offset, value, Release);
        store(SIZE, 0);
        store(DEVICE, ring.file.0);
        store(INODE, ring.file.1);
        store(ADDRESS, ring.address);
        store(TOLD, self.told.into());
        self.publish(position);
        self.part.store_u64(SIZE, VERSION << 16 | u64::from(ring.size), Release);
    }

    fn store_state(&self, position: Position) {
        let state = u64::from(position.bits()) | self.finished << 16;
        self.part.store_u64(STATE, state, Release);
    }

    /// A request has finished; the first that the driver has not been shown is at `first`. Before
    /// the ring knows. If it is not the last of those that are one, it does not count until that has.
    #[inline]
    pub(super) fn finish(&mut self, first: Position, request: Finished, is_last: bool) {
        let Finished { written, id, count } = request;
        let word = u64::from(written) | u64::from(id) << 32 | u64::from(count) << 48;
        self.part.store_u64(LIST + 8 * self.finished as usize, word, Release);
        self.finished += 1;
        if is_last {
            self.store_state(first);
        }
    }

    /// The driver has been shown all that has finished; the next request is used at `position`.
    #[inline]
    pub(super) fn publish(&mut self, position: Position) {
        self.finished = 0;
        self.store_state(position);
    }
}
