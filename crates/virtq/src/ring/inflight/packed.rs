//! The layout for packed rings: `struct QueueRegionPacked`.
//!
//! Requests are lists of entries, linked as the free entries are. A driver's descriptors are
//! copied, since the device overwrites them with used ones.

use std::sync::atomic::Ordering::{Acquire, Release};

use crate::ring::RingError;
use crate::ring::descriptor::{Descriptor, Position};

use super::InflightQueue;

pub(super) const HEADER: usize = 32;
pub(super) const ENTRY: usize = 32;

// Of the header.
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
/// used_idx, old_used_idx, used_wrap_counter, old_used_wrap_counter and two bytes of padding. In
/// one store: an index and its wrap counter must not part, and after a batch of a whole lap only
/// the counter tells the old from the new.
const USED: usize = 16;
// Of an entry.
const BUSY: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LENGTH: usize = 20;
const ADDRESS: usize = 24;

const AVAILABLE_AND_USED: u16 = 1 << 7 | 1 << 15;

#[derive(Debug)]
pub(in crate::ring) struct PackedInflight {
    queue: InflightQueue,
    /// The links, so that nothing has to be read that the front end can write.
    next: Vec<u16>,
    /// By buffer ID: the request's first and last entry.
    requests: Vec<(u16, u16)>,
    /// First free entry, by the last request begun or batch published.
    free: u16,
    /// The request that is being taken: first, last and next entry, and their number.
    taking: (u16, u16, u16, u16),
    /// Requests finished and not yet published: their first and last entries, since a driver may
    /// use an ID again too early.
    batch: Vec<(u16, u16)>,
    used: Position,
    counter: u64,
}

impl PackedInflight {
    /// Opens a ring's part, and what an earlier server had begun, in its order. `base` is where a
    /// ring without an earlier server begins; `flags` looks at a descriptor of the ring.
    pub(in crate::ring) fn open(
        queue: InflightQueue,
        size: u16,
        base: Position,
        flags: impl Fn(Position) -> u16,
    ) -> Result<(Self, Vec<Vec<Descriptor>>), RingError> {
        let known = queue.open(size, true)?;
        let entries = queue.region.queue_size;
        let mut opened = Self {
            queue,
            next: vec![0; usize::from(entries)],
            requests: vec![(0, 0); usize::from(size)],
            free: 0,
            taking: (0, 0, 0, 0),
            batch: Vec::with_capacity(usize::from(size)),
            used: base,
            counter: 0,
        };
        if known {
            let found = opened.recover(size, flags)?;
            return Ok((opened, found));
        }
        let part = opened.queue.part;
        for index in 0..entries {
            // The list ends behind the last entry.
            let next = index + 1;
            opened.next[usize::from(index)] = next;
            part.store_u8(entry(index) + BUSY, 0, Release);
            part.store_u16(entry(index) + NEXT, next, Release);
        }
        part.store_u16(FREE_HEAD, 0, Release);
        part.store_u16(OLD_FREE_HEAD, 0, Release);
        opened.store_used(base, base);
        opened.queue.declare();
        Ok((opened, Vec::new()))
    }

    fn recover(
        &mut self,
        size: u16,
        flags: impl Fn(Position) -> u16,
    ) -> Result<Vec<Vec<Descriptor>>, RingError> {
        let part = self.queue.part;
        let word = part.load_u64(USED, Acquire).to_le_bytes();
        let position = |index: usize, wrap: usize| {
            Position::new(u16::from_le_bytes([word[index], word[index + 1]]), word[wrap] != 0)
        };
        let (new, mut old) = (position(0, 4), position(2, 5));
        if new.index() >= size || old.index() >= size {
            return Err(RingError::InflightIndex);
        }
        // The driver has been shown the batch: its book-keeping is to be finished. Whatever else was under
        // way has not happened.
        let is_shown = new != old && flags(old) & AVAILABLE_AND_USED != old.available_flags();
        self.free = part.load_u16(if is_shown { FREE_HEAD } else { OLD_FREE_HEAD }, Acquire);
        if is_shown {
            old = new;
        }
        let entries = self.queue.region.queue_size;
        for (index, next) in self.next.iter_mut().enumerate() {
            *next = part.load_u16(entry(index as u16) + NEXT, Acquire);
        }
        // The free list: what is marked in it was freed, or was not yet taken.
        let mut seen = vec![false; usize::from(entries)];
        let mut index = self.free;
        let mut free = Vec::new();
        while index != entries {
            visit(&mut seen, index)?;
            free.push(index);
            index = self.next[usize::from(index)];
        }
        let mut found = Vec::new();
        let mut total = 0;
        for head in 0..entries {
            if seen[usize::from(head)] || part.load_u8(entry(head) + BUSY, Acquire) == 0 {
                continue;
            }
            let request = self.request(head, &mut seen)?;
            total += request.len();
            if total > usize::from(size) {
                return Err(RingError::InflightIndex);
            }
            found.push((part.load_u64(entry(head) + COUNTER, Acquire), request));
        }
        // The driver may make all descriptors available that are not in flight: each needs a free entry,
        // or the first one without would be written behind the region.
        if free.len() + total < usize::from(size) {
            return Err(RingError::InflightIndex);
        }
        // All of it is in order: from here on the region is written.
        part.store_u16(OLD_FREE_HEAD, self.free, Release);
        part.store_u16(FREE_HEAD, self.free, Release);
        self.store_used(old, old);
        self.used = old;
        for index in free {
            part.store_u8(entry(index) + BUSY, 0, Release);
        }
        found.sort_by_key(|(counter, _)| *counter);
        if let Some((last, _)) = found.last() {
            self.counter = last.wrapping_add(1);
        }
        Ok(found.into_iter().map(|(_, request)| request).collect())
    }

    /// The descriptors of a request in flight.
    fn request(&mut self, head: u16, seen: &mut [bool]) -> Result<Vec<Descriptor>, RingError> {
        let part = self.queue.part;
        let last = part.load_u16(entry(head) + LAST, Acquire);
        let count = part.load_u16(entry(head) + NUM, Acquire);
        if count == 0 {
            return Err(RingError::InflightIndex);
        }
        let mut request = Vec::new();
        let mut index = head;
        let mut end = head;
        // Bounded: no entry is visited twice.
        for _ in 0..count {
            visit(seen, index)?;
            let offset = entry(index);
            request.push(Descriptor {
                address: part.load_u64(offset + ADDRESS, Acquire),
                length: part.load_u32(offset + LENGTH, Acquire),
                id: part.load_u16(offset + ID, Acquire),
                flags: part.load_u16(offset + FLAGS, Acquire),
            });
            end = index;
            index = self.next[usize::from(index)];
        }
        let id = request.last().map_or(u16::MAX, |descriptor| descriptor.id);
        let place = self.requests.get_mut(usize::from(id)).ok_or(RingError::InflightIndex)?;
        if end != last {
            return Err(RingError::InflightIndex);
        }
        *place = (head, last);
        Ok(request)
    }

    fn store_used(&self, new: Position, old: Position) {
        let [new_low, new_high] = new.index().to_le_bytes();
        let [old_low, old_high] = old.index().to_le_bytes();
        let bytes = [
            new_low,
            new_high,
            old_low,
            old_high,
            u8::from(new.wrap()),
            u8::from(old.wrap()),
            0,
            0,
        ];
        self.queue.part.store_u64(USED, u64::from_le_bytes(bytes), Release);
    }

    pub(in crate::ring) const fn used(&self) -> Position {
        self.used
    }

    /// A descriptor of a request, whose first one it may be. Until [`PackedInflight::begin`] the
    /// entries are still free.
    #[inline]
    pub(in crate::ring) fn take(&mut self, first: bool, descriptor: Descriptor) {
        if first {
            self.taking = (self.free, self.free, self.free, 0);
        }
        let (_, last, index, count) = &mut self.taking;
        let (offset, part) = (entry(*index), &self.queue.part);
        part.store_u16(offset + ID, descriptor.id, Release);
        part.store_u16(offset + FLAGS, descriptor.flags, Release);
        part.store_u32(offset + LENGTH, descriptor.length, Release);
        part.store_u64(offset + ADDRESS, descriptor.address, Release);
        *last = *index;
        *index = self.next[usize::from(*index)];
        *count += 1;
    }

    /// The request is in flight.
    #[inline]
    pub(in crate::ring) fn begin(&mut self, id: u16) {
        let (head, last, free, count) = self.taking;
        let (offset, part) = (entry(head), &self.queue.part);
        part.store_u64(offset + COUNTER, self.counter, Release);
        self.counter = self.counter.wrapping_add(1);
        part.store_u16(offset + LAST, last, Release);
        part.store_u16(offset + NUM, count, Release);
        part.store_u8(offset + BUSY, 1, Release);
        part.store_u16(FREE_HEAD, free, Release);
        // From here on it is.
        part.store_u16(OLD_FREE_HEAD, free, Release);
        self.free = free;
        self.requests[usize::from(id)] = (head, last);
    }

    /// Put into the ring.
    #[inline]
    pub(in crate::ring) fn finish(&mut self, id: u16) {
        self.batch.push(self.requests[usize::from(id)]);
    }

    /// Frees the batch's entries, provisionally.
    #[inline]
    pub(in crate::ring) fn before_publish(&mut self, used: Position) {
        let part = self.queue.part;
        for &(head, last) in &self.batch {
            part.store_u16(entry(last) + NEXT, self.free, Release);
            self.next[usize::from(last)] = self.free;
            part.store_u16(FREE_HEAD, head, Release);
            self.free = head;
        }
        self.store_used(used, self.used);
        self.used = used;
    }

    /// The driver sees the batch.
    #[inline]
    pub(in crate::ring) fn after_publish(&mut self) {
        let part = self.queue.part;
        for (head, _) in self.batch.drain(..) {
            part.store_u8(entry(head) + BUSY, 0, Release);
        }
        part.store_u16(OLD_FREE_HEAD, self.free, Release);
        self.store_used(self.used, self.used);
    }
}

/// Marks an entry; an error if there is none, or it has been marked.
fn visit(seen: &mut [bool], index: u16) -> Result<(), RingError> {
    match seen.get_mut(usize::from(index)) {
        Some(seen) if !*seen => {
            *seen = true;
            Ok(())
        }
        _ => Err(RingError::InflightIndex),
    }
}

const fn entry(index: u16) -> usize {
    HEADER + ENTRY * index as usize
}
