//! A request's descriptors: checked, translated and sorted into what the device reads and writes.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::Segment;

use crate::memory::Memory;

use super::{Part, RingError};

/// Descriptors of one request, those in an indirect table included.
///
/// It is the largest size of a ring, and not the `seg_max` that the device announces (126). Drivers that do not
/// negotiate that feature send up to a ring's size, and QEMU's device takes as many. What a request costs other VMs does
/// not depend on it: transfers are divided, and each part is a turn of its own.
pub const MAX_DESCRIPTORS: u16 = 1024;
/// Segments of one request: a descriptor that crosses regions has several.
pub const MAX_SEGMENTS: usize = 2048;

/// Bytes of a descriptor.
pub(super) const DESCRIPTOR: usize = 16;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// One request's descriptors, translated. Reused from request to request.
#[derive(Debug, Default)]
pub struct Chain {
    /// What [`Ring::finish`](super::Ring::finish) wants back: head of the chain, or buffer ID;
    /// below the ring's size.
    pub id: u16,
    /// What the device reads.
    pub readable: Vec<Segment>,
    /// What the device writes.
    pub writable: Vec<Segment>,
}

impl Chain {
    /// How many pieces of memory it has, which is what following it takes time for.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.readable.len() + self.writable.len()
    }
}

/// A request of one descriptor, whose buffer lies in one piece.
#[derive(Debug, Clone, Copy)]
pub struct Single {
    /// As [`Chain::id`].
    pub id: u16,
    /// Whether the device writes it.
    pub is_writable: bool,
    /// The buffer.
    pub segment: Segment,
}

impl Single {
    /// None: a place for one.
    pub const EMPTY: Self = Self { id: 0, is_writable: false, segment: Segment::EMPTY };

    /// `None`: it goes on in another descriptor, table or region, or is not valid, which [`Builder::add`] tells apart.
    #[inline]
    pub(super) fn new(
        memory: &Memory,
        near: &mut usize,
        id: u16,
        (address, length, flags): (u64, u32, u16),
    ) -> Option<Self> {
        if flags & (NEXT | INDIRECT) != 0 || length == 0 {
            return None;
        }
        let segment = memory.guest_near(near, address, length.into())?;
        let is_whole = segment.len() == length as usize;
        is_whole.then_some(Self { id, is_writable: flags & WRITE != 0, segment })
    }
}

/// Builds a chain, descriptor by descriptor.
pub(super) struct Builder<'a> {
    pub(super) memory: &'a Memory,
    /// Index of the region that held the last descriptor.
    pub(super) near: &'a mut usize,
    chain: &'a mut Chain,
    bytes: u64,
    descriptors: u16,
}

impl<'a> Builder<'a> {
    #[inline]
    pub(super) fn new(memory: &'a Memory, near: &'a mut usize, chain: &'a mut Chain) -> Self {
        chain.readable.clear();
        chain.writable.clear();
        Self { memory, near, chain, bytes: 0, descriptors: 0 }
    }

    /// Adds a descriptor that describes a buffer.
    #[inline]
    pub(super) fn add(&mut self, address: u64, length: u32, flags: u16) -> Result<(), RingError> {
        if self.descriptors == MAX_DESCRIPTORS {
            return Err(RingError::TooManyDescriptors);
        }
        self.descriptors += 1;
        let mut left = u64::from(length);
        if left == 0 {
            return Err(RingError::ZeroLength);
        }
        // So that a request's bytes, and what is written of them, fit 32 bits.
        self.bytes += left;
        if self.bytes > u64::from(u32::MAX) {
            return Err(RingError::TooLong);
        }
        address.checked_add(left - 1).ok_or(RingError::AddressOverflow)?;
        let segments = if flags & WRITE != 0 {
            &mut self.chain.writable
        } else if self.chain.writable.is_empty() {
            &mut self.chain.readable
        } else {
            return Err(RingError::ReadableAfterWritable);
        };
        let mut address = address;
        loop {
            let segment =
                self.memory.guest_near(self.near, address, left).ok_or(RingError::NotMemory)?;
            if segments.len() == MAX_SEGMENTS {
                return Err(RingError::TooManySegments);
            }
            segments.push(segment);
            left -= segment.len() as u64;
            if left == 0 {
                return Ok(());
            }
            address += segment.len() as u64;
        }
    }

    /// Opens an indirect table.
    pub(super) fn table(&mut self, address: u64, length: u32) -> Result<Table, RingError> {
        let count = length / DESCRIPTOR as u32;
        if !length.is_multiple_of(DESCRIPTOR as u32)
            || count == 0
            || count > u32::from(MAX_DESCRIPTORS)
        {
            return Err(RingError::IndirectLength);
        }
        address.checked_add(u64::from(length - 1)).ok_or(RingError::AddressOverflow)?;
        let part = self
            .memory
            .guest_near(self.near, address, u64::from(length))
            .ok_or(RingError::NotMemory)?;
        Ok(Table { address, count: count as u16, part })
    }

    /// Reads an entry of an indirect table: its two words.
    #[inline]
    pub(super) fn entry(&mut self, table: &Table, index: u16) -> Result<(u64, u64), RingError> {
        debug_assert!(index < table.count);
        let offset = usize::from(index) * DESCRIPTOR;
        let mut part = table.part;
        if offset + DESCRIPTOR <= part.len() {
            part.advance(offset);
        } else {
            // The table goes on in another region.
            let address = table.address + offset as u64;
            part = self
                .memory
                .guest_near(self.near, address, DESCRIPTOR as u64)
                .filter(|part| part.len() == DESCRIPTOR)
                .ok_or(RingError::NotMemory)?;
        }
        Ok((read(part, 0), read(part, 8)))
    }
}

/// An indirect table.
pub(super) struct Table {
    address: u64,
    pub(super) count: u16,
    part: Segment,
}

/// Reads a word of an indirect table, which need not be aligned.
#[inline]
fn read(part: Segment, offset: usize) -> u64 {
    if (part.base() as usize).is_multiple_of(8) {
        return Part::new(part.base(), part.len()).load_u64(offset, Ordering::Relaxed);
    }
    let mut word = [0; 8];
    for (index, byte) in word.iter_mut().enumerate() {
        let pointer = part.base().wrapping_add(offset + index);
        // SAFETY: `entry` checked that the descriptor lies within the part, which is mapped.
        *byte = unsafe { AtomicU8::from_ptr(pointer) }.load(Ordering::Relaxed);
    }
    u64::from_le_bytes(word)
}
