//! Virtqueues, the device's side: split and packed (virtio 1.2, sections 2.7 and 2.8).
//!
//! A ring belongs to one thread at a time. Everything in it that the driver can write is read
//! once, checked, and never read again. What is wrong breaks the ring: from then on it gives out
//! nothing, while requests that are in flight can still be finished.
//!
//! Finished requests are written to the ring at once and shown to the driver together, by one
//! store, so that a batch costs one notification and no driver sees half of it.
//!
//! A driver on another CPU has written what a request lies in, and each of its cache lines takes as long to come over as
//! a small frame takes in all. [`Ring::next_singles`] therefore takes several requests at once: its loads do not depend on
//! each other, so the lines come together, and the caller prefetches the buffers of all before it looks into the first.
//!
//! - [`chain`]: a request's descriptors, checked and translated
//! - `split`, `packed`: the two layouts
//! - [`inflight`]: what a successor needs to go on after a crash
//! - [`positions`]: the little of it that a device needs which uses buffers in order

use std::sync::Arc;

use crate::memory::{Memory, sigbus};

pub mod chain;
mod descriptor;
pub mod inflight;
mod packed;
mod part;
pub mod positions;
mod split;

#[cfg(any(test, feature = "test-utils"))]
pub mod driver;
#[cfg(test)]
mod kill;
#[cfg(test)]
mod tests;

pub use chain::{Chain, Single};
pub use inflight::{Inflight, InflightError, InflightQueue};
pub use positions::{Positions, QueuePosition};

use packed::Packed;
use part::Part;
use split::Split;

/// The most entries of a ring.
pub const MAX_SIZE: u16 = 1024;

/// How many chains ahead descriptors and buffers are fetched.
const DESCRIPTORS_AHEAD: u16 = 8;
const BUFFERS_AHEAD: u16 = 4;

/// Where a ring lies and how it is used.
#[derive(Debug, Clone, Copy)]
pub struct RingConfig {
    /// Entries: 2 to 1024, a power of two if split.
    pub size: u16,
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER: requests finish in the order in which they were made available.
    pub in_order: bool,
    /// Descriptor table (packed: descriptor ring), a front end's virtual address.
    pub descriptors: u64,
    /// Available ring (packed: driver event suppression).
    pub driver: u64,
    /// Used ring (packed: device event suppression).
    pub device: u64,
    /// As SET_VRING_BASE gives it.
    pub base: u32,
    /// Guest address to log writes to the used ring at (VHOST_VRING_F_LOG). Packed: whether to
    /// log; they are logged where they are.
    pub log: Option<u64>,
}

impl RingConfig {
    /// Whether a ring of one memory is still there in another: all of it, and in the same file, by
    /// which a server that comes after a crash knows it.
    #[must_use]
    pub fn stays(&self, before: &Memory, after: &Memory) -> bool {
        let file = |memory: &Memory| memory.front_end_file(self.descriptors);
        let is_whole =
            if self.packed { Packed::lies_in(self, after) } else { Split::lies_in(self, after) };
        is_whole && file(before) == file(after)
    }
}

/// Why a ring is broken. It stays so until it is set up anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RingError {
    /// The size is out of range, or of a split ring and no power of two.
    #[error("not a valid ring size")]
    Size,
    /// The base's index is not in the packed ring.
    #[error("the base is not in the ring")]
    Base,
    /// Part of the ring is not in the guest's memory.
    #[error("part of the ring is not in guest memory")]
    Unmapped,
    /// Part of the ring is not aligned.
    #[error("part of the ring is not aligned")]
    Misaligned,
    /// The front end took away memory that it had shared.
    #[error("guest memory is gone")]
    MemoryGone,
    /// More requests available than the ring has entries.
    #[error("the available index jumps")]
    AvailableJump,
    /// The head of a chain is not in the descriptor table.
    #[error("the head is out of range")]
    HeadRange,
    /// The head of a chain is that of a request in flight.
    #[error("the head is in flight")]
    HeadBusy,
    /// A chain goes on outside the descriptor table.
    #[error("a descriptor is out of range")]
    DescriptorRange,
    /// A chain has more descriptors than its table.
    #[error("the descriptors form a loop")]
    Loop,
    /// More than [`chain::MAX_DESCRIPTORS`].
    #[error("too many descriptors")]
    TooManyDescriptors,
    /// More than [`chain::MAX_SEGMENTS`].
    #[error("too many segments")]
    TooManySegments,
    /// An indirect descriptor that has not been negotiated.
    #[error("indirect descriptors were not negotiated")]
    IndirectRefused,
    /// An indirect descriptor in an indirect table.
    #[error("an indirect descriptor is nested")]
    IndirectNested,
    /// A chain goes on behind an indirect descriptor.
    #[error("an indirect descriptor has a next one")]
    IndirectWithNext,
    /// An indirect table's length is zero, no multiple of 16, or too large.
    #[error("the length of an indirect table")]
    IndirectLength,
    /// A descriptor of no bytes.
    #[error("a descriptor has no bytes")]
    ZeroLength,
    /// A buffer that ends beyond the last address.
    #[error("a buffer ends beyond the last address")]
    AddressOverflow,
    /// A buffer or an indirect table that is not in the guest's memory.
    #[error("a buffer is not in guest memory")]
    NotMemory,
    /// A buffer that the device reads behind one that it writes.
    #[error("a readable descriptor after a writable one")]
    ReadableAfterWritable,
    /// More bytes in a chain than 32 bits count.
    #[error("a request has too many bytes")]
    TooLong,
    /// A packed ring's buffer ID is not below the ring's size.
    #[error("the buffer ID is out of range")]
    BufferIdRange,
    /// A packed ring's buffer ID is that of a request in flight.
    #[error("the buffer ID is in flight")]
    BufferIdBusy,
    /// More descriptors in flight than the packed ring has.
    #[error("more descriptors in flight than the ring has")]
    Overrun,
    /// The in-flight region is of another version.
    #[error("the in-flight region has an unknown version")]
    InflightVersion,
    /// The in-flight region is for rings of another size or layout.
    #[error("the in-flight region does not fit the ring")]
    InflightSize,
    /// The in-flight region has an index outside itself or twice.
    #[error("the in-flight region is corrupt")]
    InflightIndex,
}

/// A virtqueue.
#[derive(Debug)]
pub struct Ring {
    config: RingConfig,
    memory: Arc<Memory>,
    layout: Layout,
    error: Option<RingError>,
    /// The region that held the last buffer.
    near: usize,
    /// [`sigbus::broken_count`] when the memory was last looked at.
    broken: usize,
    in_flight: u16,
    /// The next publication calls the driver in any case.
    call: bool,
}

#[derive(Debug)]
enum Layout {
    Split(Split),
    Packed(Packed),
}

/// What is kept of a ring for the server that comes after a crash.
#[derive(Debug)]
enum Kept {
    Nothing,
    Inflight(InflightQueue),
    Position(QueuePosition),
}

/// Calls the same method of either layout.
macro_rules! either {
    ($layout:expr, $ring:ident => $call:expr) => {
        match $layout {
            Layout::Split($ring) => $call,
            Layout::Packed($ring) => $call,
        }
    };
}

impl Ring {
    /// Sets a ring up. With an in-flight region of an earlier server, what that one had begun is
    /// given by [`Ring::next`] first, in the order in which it had come.
    ///
    /// # Errors
    /// [`RingError`]: the ring does not lie within the memory, or the in-flight region is corrupt.
    pub fn new(
        config: RingConfig,
        memory: Arc<Memory>,
        inflight: Option<InflightQueue>,
    ) -> Result<Self, RingError> {
        Self::with(config, memory, inflight.map_or(Kept::Nothing, Kept::Inflight))
    }

    /// Sets up a ring of a device that uses its buffers in the order in which they were made
    /// available. A packed one goes on where an earlier server was when it crashed; what that one
    /// had taken and not finished comes again. A split one needs no position: it begins behind
    /// what its used index says was used, whatever base the front end believes in (Cloud
    /// Hypervisor's is the available index), so that no buffer is passed over.
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub fn with_position(
        config: RingConfig,
        memory: Arc<Memory>,
        position: QueuePosition,
    ) -> Result<Self, RingError> {
        Self::with(config, memory, Kept::Position(position))
    }

    fn with(config: RingConfig, memory: Arc<Memory>, kept: Kept) -> Result<Self, RingError> {
        let size = config.size;
        if !(2..=MAX_SIZE).contains(&size) || !config.packed && !size.is_power_of_two() {
            return Err(RingError::Size);
        }
        // Before the look at the regions' own marks, so that none is missed.
        let broken = sigbus::broken_count();
        if memory.is_broken() {
            return Err(RingError::MemoryGone);
        }
        // The earlier server may have ended between showing a request finished and calling.
        let call = !matches!(kept, Kept::Nothing);
        let layout = if config.packed {
            Layout::Packed(Packed::new(&config, &memory, kept)?)
        } else {
            Layout::Split(Split::new(&config, &memory, kept)?)
        };
        Ok(Self { config, memory, layout, error: None, near: 0, broken, in_flight: 0, call })
    }

    /// How it was set up.
    #[must_use]
    pub const fn config(&self) -> &RingConfig {
        &self.config
    }

    /// Why it is broken, if it is.
    #[must_use]
    pub const fn error(&self) -> Option<RingError> {
        self.error
    }

    /// Takes the next request that the driver has made available.
    ///
    /// # Errors
    /// [`RingError`]: what the driver wrote is no valid chain; the ring is broken from now on.
    #[inline]
    pub fn next(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        if sigbus::broken_count() != self.broken {
            self.broken = sigbus::broken_count();
            if self.memory.is_broken() {
                return Err(self.mark_broken(RingError::MemoryGone));
            }
        }
        let taken =
            either!(&mut self.layout, ring => ring.next(&self.memory, &mut self.near, chain));
        match taken {
            Ok(taken) => {
                self.in_flight += u16::from(taken);
                Ok(taken)
            }
            Err(error) => Err(self.mark_broken(error)),
        }
    }

    /// Takes the next requests as long as each has a single descriptor whose buffer lies in one piece, as nearly all
    /// frames do; how many. If those are fewer than there is room for, the next request is of another kind, is not valid, or
    /// is not there yet: [`Ring::next`] says which.
    #[inline]
    pub fn next_singles(&mut self, singles: &mut [Single]) -> usize {
        if self.error.is_some() || sigbus::broken_count() != self.broken {
            return 0;
        }
        let (memory, near) = (&*self.memory, &mut self.near);
        let taken = either!(&mut self.layout, ring => ring.next_singles(memory, near, singles));
        self.in_flight += taken as u16;
        taken
    }

    /// Has the CPU fetch what the chains after the next one lie in. A driver on another CPU has written them last: each would
    /// be waited for otherwise. Nothing is taken, and nothing that is read here is relied on.
    #[inline]
    pub fn prefetch(&self) {
        if self.error.is_none() {
            let address = either!(&self.layout, ring => ring.prefetch());
            let mut near = self.near;
            if let Some(segment) = address.and_then(|at| self.memory.guest_near(&mut near, at, 1)) {
                segment.prefetch();
            }
        }
    }

    #[cold]
    const fn mark_broken(&mut self, error: RingError) -> RingError {
        self.error = Some(error);
        error
    }

    /// Gives a request back with the bytes written to its writable part; seen by the driver with
    /// the next [`Ring::publish`]. An ID that is not in flight is ignored.
    #[inline]
    pub fn finish(&mut self, id: u16, written: u32) {
        self.finish_one(id, written, true);
    }

    /// The same of a request that is one with those which finish next, up to the first by [`Ring::finish`]: the buffers of a
    /// frame. A server that comes after a crash shows the driver all of them or none.
    #[inline]
    pub fn finish_with_next(&mut self, id: u16, written: u32) {
        self.finish_one(id, written, false);
    }

    #[inline]
    fn finish_one(&mut self, id: u16, written: u32, is_last: bool) {
        let known = match &mut self.layout {
            // It shows nothing before all have finished.
            Layout::Split(ring) => ring.finish(&self.memory, id, written),
            Layout::Packed(ring) => ring.finish(id, written, is_last),
        };
        debug_assert!(known, "{id} is not in flight");
        self.in_flight -= u16::from(known);
    }

    /// Gives back the request that was taken last, as if it had not been: the next [`Ring::next`] gives
    /// it again. Several go back in the reverse of the order in which they were taken. With an in-flight
    /// region nothing goes back.
    pub fn untake(&mut self, id: u16) {
        let known = either!(&mut self.layout, ring => ring.untake(id));
        debug_assert!(known, "{id} is not in flight, or in an in-flight region");
        self.in_flight -= u16::from(known);
    }

    /// Shows the driver what has finished, and does not look whether it wants to be called: what it wants is said by the
    /// next [`Ring::publish`], which has to follow.
    #[inline]
    pub fn flush(&mut self) {
        either!(&mut self.layout, ring => ring.flush(&self.memory));
    }

    /// Descriptors that the driver has been shown since [`Ring::publish`] last looked whether it wants to be called, or chains of
    /// a split ring.
    #[must_use]
    pub fn shown(&self) -> u16 {
        either!(&self.layout, ring => ring.shown())
    }

    /// Shows the driver what has finished. Whether it wants to be called.
    ///
    /// With an in-flight region the first call says so even if nothing has finished: an earlier
    /// server may have died between the two.
    #[must_use]
    #[inline]
    pub fn publish(&mut self) -> bool {
        let call = either!(&mut self.layout, ring => ring.publish(&self.memory));
        std::mem::take(&mut self.call) | call
    }

    /// Asks the driver for kicks; whether requests came in the meantime (then look again).
    #[must_use]
    pub fn enable_notification(&mut self) -> bool {
        if self.error.is_some() {
            return false;
        }
        either!(&mut self.layout, ring => ring.enable_notification(&self.memory))
    }

    /// Asks the driver not to kick: the ring is being polled.
    pub fn disable_notification(&mut self) {
        if self.error.is_none() {
            either!(&mut self.layout, ring => ring.disable_notification(&self.memory));
        }
    }

    /// Whether a request is available now. Of a broken ring none is.
    #[must_use]
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.error.is_none() && either!(&self.layout, ring => ring.is_pending())
    }

    /// Requests that are available now, as far as a look at one place says: of a packed ring one, if
    /// there is any. The driver's word: no more than the ring has entries, and those that an earlier
    /// server had begun.
    #[must_use]
    pub fn backlog(&self) -> u32 {
        match self.error {
            None => either!(&self.layout, ring => ring.backlog()),
            Some(_) => 0,
        }
    }

    /// As GET_VRING_BASE returns it. Split: the next entry of the available ring. Packed: the next
    /// descriptor to take and, in the upper half, the next one to use; each with its wrap counter
    /// in the topmost bit.
    #[must_use]
    pub const fn base(&self) -> u32 {
        either!(&self.layout, ring => ring.base())
    }

    /// Requests given by [`Ring::next`] and not yet finished.
    #[must_use]
    pub const fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Requests that an earlier server had begun and that [`Ring::next`] has yet to give.
    /// [`Ring::base`] counts them as taken.
    #[must_use]
    pub const fn recovering(&self) -> u16 {
        either!(&self.layout, ring => ring.recovering())
    }

    /// Goes on in another memory table; the ring's own addresses stay what they were to the front
    /// end.
    ///
    /// # Errors
    /// The ring does not lie within that memory: it is broken from now on.
    pub fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), RingError> {
        let moved = either!(&mut self.layout, ring => ring.set_memory(&self.config, &memory));
        match moved {
            Ok(()) => {
                self.memory = memory;
                self.near = 0;
                self.broken = self.broken.wrapping_sub(1);
                Ok(())
            }
            // The old memory is kept, since the ring still points into it.
            Err(error) => Err(self.mark_broken(error)),
        }
    }

    /// Where writes to the used ring are logged from now on.
    pub const fn set_log(&mut self, log: Option<u64>) {
        self.config.log = log;
        either!(&mut self.layout, ring => ring.set_log(log));
    }
}

/// Whether an index that moves from `old` to `new` passes the one after `event` (virtio 1.2,
/// 2.7.10: `vring_need_event`).
#[inline]
const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
