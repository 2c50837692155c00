//! A guest's memory, as its front end shares it over vhost-user.
//!
//! Addresses come in two kinds: the guest's physical ones, in descriptors, and the front end's
//! virtual ones, in SET_VRING_ADDR. Both are hostile.

use rtvirtio_engine::Segment;

/// The memory table of one device: regions that do not overlap.
#[derive(Debug, Default)]
pub struct Memory {}

impl Memory {
    /// The first contiguous part of `length` bytes at the guest physical `address`: all of them
    /// unless they cross from one region into the next. `None` where there is no memory.
    #[must_use]
    pub fn guest(&self, _address: u64, _length: u64) -> Option<Segment> {
        None
    }

    /// `length` contiguous bytes at the front end's virtual `address`.
    #[must_use]
    pub fn front_end(&self, _address: u64, _length: u64) -> Option<Segment> {
        None
    }

    /// Marks what was written to as dirty, if the front end keeps a log (live migration).
    pub fn log_write(&self, _segment: Segment) {}
}
