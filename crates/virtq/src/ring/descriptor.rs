//! Descriptors of a packed ring, and places in it (virtio 1.2, section 2.8).

use super::chain::DESCRIPTOR;

pub(super) const AVAILABLE: u16 = 1 << 7;
pub(super) const USED: u16 = 1 << 15;

/// A place in the ring, and in which of two alternating laps.
///
/// It is one word. A load that is wider than the store before it, such as one of two halves that were stored one by one,
/// waits until all stores before it are in the cache, among them those to lines that the driver's CPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position(u32);

/// Set in the first lap and every other one.
const WRAP: u32 = 1 << 16;

impl Position {
    pub(super) const fn new(index: u16, wrap: bool) -> Self {
        Self(index as u32 | if wrap { WRAP } else { 0 })
    }

    pub(super) const fn index(self) -> u16 {
        self.0 as u16
    }

    pub(super) const fn wrap(self) -> bool {
        self.0 & WRAP != 0
    }

    /// From what a driver, a front end or a file says: the wrap counter is the topmost bit.
    pub(super) const fn from_bits(bits: u16) -> Self {
        Self::new(bits & 0x7fff, bits >> 15 != 0)
    }

    pub(super) const fn bits(self) -> u16 {
        self.index() | (self.wrap() as u16) << 15
    }

    /// So many descriptors further, at most the ring's size.
    pub(super) const fn after(self, count: u16, size: u16) -> Self {
        let index = self.index() + count;
        if index < size {
            Self::new(index, self.wrap())
        } else {
            Self::new(index - size, !self.wrap())
        }
    }

    /// So many descriptors back, at most the ring's size.
    pub(super) const fn before(self, count: u16, size: u16) -> Self {
        if count <= self.index() {
            Self::new(self.index() - count, self.wrap())
        } else {
            Self::new(self.index() + size - count, !self.wrap())
        }
    }

    /// Descriptors from here to there, less than two laps of the ring.
    pub(super) const fn distance(self, to: Self, size: u16) -> u16 {
        let from = self.index() + if self.wrap() { 0 } else { size };
        let to = to.index() + if to.wrap() { 0 } else { size };
        if to >= from { to - from } else { 2 * size + to - from }
    }

    /// The flags of a descriptor that the driver has made available here.
    pub(super) const fn available_flags(self) -> u16 {
        if self.wrap() { AVAILABLE } else { USED }
    }

    /// The flags of a descriptor that the device has used here.
    pub(super) const fn used_flags(self) -> u16 {
        if self.wrap() { AVAILABLE | USED } else { 0 }
    }

    pub(super) const fn offset(self) -> usize {
        self.index() as usize * DESCRIPTOR
    }
}

/// A descriptor as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) id: u16,
    pub(super) flags: u16,
}

impl Descriptor {
    #[inline]
    pub(super) const fn new(address: u64, word: u64) -> Self {
        Self { address, length: word as u32, id: (word >> 32) as u16, flags: (word >> 48) as u16 }
    }
}
