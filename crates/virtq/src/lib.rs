//! Virtqueues, as a device sees them: split and packed rings in a guest's memory (virtio 1.2, 2.7
//! and 2.8), and the region in which requests in flight are noted for the next server.
//!
//! The driver may write to all of it at any time. Nothing here trusts what it reads there: an index
//! or an address is read once and checked, and a ring that cannot be is broken, for good.

pub mod memory;
pub mod ring;
mod segment;

pub use segment::Segment;
