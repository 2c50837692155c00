//! Virtqueues, the device's side: split and packed (virtio 1.2, sections 2.7 and 2.8).
//!
//! A ring belongs to one thread at a time. Everything in it that the driver can write is read
//! once, checked, and never read again.

use std::sync::Arc;

use rtvirtio_engine::Segment;

use crate::memory::Memory;

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
    /// Descriptor table (packed: descriptor ring), a front end's virtual address.
    pub descriptors: u64,
    /// Available ring (packed: driver event suppression).
    pub driver: u64,
    /// Used ring (packed: device event suppression).
    pub device: u64,
    /// As SET_VRING_BASE gives it.
    pub base: u32,
    /// Guest address to log writes to the used ring at (VHOST_VRING_F_LOG).
    pub log: Option<u64>,
}

/// One request's descriptors, translated. Reused from request to request.
#[derive(Debug, Default)]
pub struct Chain {
    /// What [`Ring::finish`] wants back: head of the chain, or buffer ID; below the ring's size.
    pub id: u16,
    /// What the device reads.
    pub readable: Vec<Segment>,
    /// What the device writes.
    pub writable: Vec<Segment>,
}

/// Why a ring is broken. It stays so until it is set up anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Part of the ring is not in the guest's memory.
    #[error("part of the ring is not in guest memory")]
    Unmapped,
}

/// A virtqueue.
#[derive(Debug)]
pub struct Ring {}

impl Ring {
    /// Sets a ring up. With an in-flight region of an earlier server, what that one had begun is
    /// given by [`Ring::next`] first, in the order in which it had come.
    ///
    /// # Errors
    /// [`RingError`]: the ring does not lie within the memory.
    pub fn new(_config: RingConfig, _memory: Arc<Memory>) -> Result<Self, RingError> {
        Err(RingError::Unmapped)
    }

    /// Takes the next request that the driver has made available.
    ///
    /// # Errors
    /// [`RingError`]: what the driver wrote is no valid chain; the ring is broken from now on.
    pub fn next(&mut self, _chain: &mut Chain) -> Result<bool, RingError> {
        Ok(false)
    }

    /// Gives a request back with the bytes written to its writable part; seen by the driver with
    /// the next [`Ring::publish`].
    pub fn finish(&mut self, _id: u16, _written: u32) {}

    /// Shows the driver what has finished. Whether it wants to be called.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        false
    }

    /// Asks the driver for kicks; whether requests came in the meantime (then look again).
    #[must_use]
    pub fn enable_notification(&mut self) -> bool {
        false
    }

    /// Asks the driver not to kick: the ring is being polled.
    pub fn disable_notification(&mut self) {}

    /// Whether a request is available now.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        false
    }

    /// As GET_VRING_BASE returns it.
    #[must_use]
    pub const fn base(&self) -> u32 {
        0
    }
}
