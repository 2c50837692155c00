//! The layout for split rings: `struct QueueRegionSplit`.

use std::sync::atomic::Ordering::{Acquire, Release};

use crate::ring::RingError;

use super::InflightQueue;

pub(super) const HEADER: usize = 16;
pub(super) const ENTRY: usize = 16;

// Of the header.
const LAST_BATCH_HEAD: usize = 12;
const USED_INDEX: usize = 14;
// Of an entry.
const BUSY: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

#[derive(Debug)]
pub(in crate::ring) struct SplitInflight {
    queue: InflightQueue,
    size: u16,
    /// Finished and not yet published.
    batch: Vec<u16>,
    last_batch_head: u16,
    counter: u64,
}

impl SplitInflight {
    pub(in crate::ring) fn new(queue: InflightQueue, size: u16) -> Result<Self, RingError> {
        queue.open(size, false)?;
        let batch = Vec::with_capacity(usize::from(size));
        Ok(Self { queue, size, batch, last_batch_head: 0, counter: 0 })
    }

    /// What an earlier server had begun, in its order; `None` if there was no such server, or it
    /// served another ring. `used` is the used ring's index.
    pub(in crate::ring) fn recover(&mut self, used: u16) -> Result<Option<Vec<u16>>, RingError> {
        let part = self.queue.part;
        let entries = self.queue.region.queue_size;
        let published = part.load_u16(USED_INDEX, Acquire);
        // Published by the last batch, whose entries may still be marked.
        let batch = used.wrapping_sub(published);
        if !self.queue.open(self.size, false)? || batch > entries {
            // New, or the ring has been set up anew since: a reset frees the driver's requests.
            for index in 0..entries {
                part.store_u8(entry(index) + BUSY, 0, Release);
            }
            part.store_u16(LAST_BATCH_HEAD, 0, Release);
            part.store_u16(USED_INDEX, used, Release);
            self.queue.declare();
            return Ok(None);
        }
        self.last_batch_head = part.load_u16(LAST_BATCH_HEAD, Acquire);
        let mut head = self.last_batch_head;
        let mut published = vec![false; usize::from(entries)];
        for _ in 0..batch {
            *published.get_mut(usize::from(head)).ok_or(RingError::InflightIndex)? = true;
            head = part.load_u16(entry(head) + NEXT, Acquire);
        }
        let mut found = Vec::new();
        for index in 0..entries {
            if published[usize::from(index)] || part.load_u8(entry(index) + BUSY, Acquire) == 0 {
                continue;
            }
            if index >= self.size {
                return Err(RingError::InflightIndex);
            }
            found.push((part.load_u64(entry(index) + COUNTER, Acquire), index));
        }
        // All of it is in order: from here on the region is written.
        for index in (0..entries).filter(|&index| published[usize::from(index)]) {
            part.store_u8(entry(index) + BUSY, 0, Release);
        }
        if batch != 0 {
            part.store_u16(USED_INDEX, used, Release);
        }
        found.sort_unstable();
        if let Some((last, _)) = found.last() {
            self.counter = last.wrapping_add(1);
        }
        Ok(Some(found.into_iter().map(|(_, head)| head).collect()))
    }

    /// Taken from the available ring.
    #[inline]
    pub(in crate::ring) fn begin(&mut self, head: u16) {
        let part = &self.queue.part;
        part.store_u64(entry(head) + COUNTER, self.counter, Release);
        self.counter = self.counter.wrapping_add(1);
        part.store_u8(entry(head) + BUSY, 1, Release);
    }

    /// Put into the used ring.
    #[inline]
    pub(in crate::ring) fn finish(&mut self, head: u16) {
        self.batch.push(head);
    }

    /// Links the batch, so that it is known if the used index is stored and nothing else.
    #[inline]
    pub(in crate::ring) fn before_publish(&mut self) {
        let part = &self.queue.part;
        for &head in &self.batch {
            part.store_u16(entry(head) + NEXT, self.last_batch_head, Release);
            part.store_u16(LAST_BATCH_HEAD, head, Release);
            self.last_batch_head = head;
        }
    }

    /// The used index has been stored.
    #[inline]
    pub(in crate::ring) fn after_publish(&mut self, used: u16) {
        let part = &self.queue.part;
        for head in self.batch.drain(..) {
            part.store_u8(entry(head) + BUSY, 0, Release);
        }
        part.store_u16(USED_INDEX, used, Release);
    }
}

const fn entry(index: u16) -> usize {
    HEADER + ENTRY * index as usize
}
