//! Split virtqueues (virtio 1.2, section 2.7).

use std::sync::atomic::{Ordering, fence};

use crate::memory::Memory;

use super::chain::{Builder, DESCRIPTOR, INDIRECT, NEXT};
use super::inflight::SplitInflight;
use super::{
    BUFFERS_AHEAD, Chain, DESCRIPTORS_AHEAD, Kept, Part, RingConfig, RingError, Single, need_event,
};

// Offsets in the available ring and in the used ring.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ENTRIES: usize = 4;
const AVAILABLE_ENTRY: usize = 2;
const USED_ENTRY: usize = 8;

/// VIRTQ_AVAIL_F_NO_INTERRUPT.
const NO_INTERRUPT: u16 = 1;
/// VIRTQ_USED_F_NO_NOTIFY.
const NO_NOTIFY: u16 = 1;

#[derive(Debug)]
pub(super) struct Split {
    descriptors: Part,
    available: Part,
    used: Part,
    size: u16,
    event_idx: bool,
    indirect: bool,
    /// The next entry of the available ring.
    next_available: u16,
    /// The available ring's index as last read: entries before it are known to be there.
    seen_available: u16,
    /// Entries of the available ring, read together: the driver writes others in the same cache line, and each look at it
    /// while it does takes the line from its CPU.
    heads: Heads,
    /// The next entry of the used ring.
    next_used: u16,
    /// The used ring's index as the driver knows it.
    published: u16,
    /// What it was when it was last looked whether the driver wants to be called.
    called: u16,
    /// By head: given out and not finished.
    busy: Vec<bool>,
    /// Heads that an earlier server had begun, the next one last.
    resubmit: Vec<u16>,
    inflight: Option<SplitInflight>,
    log: Option<u64>,
}

/// Entries of the available ring that were read.
#[derive(Debug)]
struct Heads {
    /// The first one.
    from: u16,
    count: u16,
    heads: [u16; HEADS],
}

/// A cache line of entries.
const HEADS: usize = 32;

struct Parts {
    descriptors: Part,
    available: Part,
    used: Part,
}

impl Heads {
    #[inline]
    fn get(&self, index: u16) -> Option<u16> {
        let at = index.wrapping_sub(self.from);
        if at < self.count { self.heads.get(usize::from(at)).copied() } else { None }
    }
}

impl Parts {
    fn translate(config: &RingConfig, memory: &Memory) -> Result<Self, RingError> {
        let size = usize::from(config.size);
        // With the event index behind the entries, whether or not it is used (legacy drivers
        // leave room for it too).
        let available = ENTRIES + AVAILABLE_ENTRY * size + 2 * usize::from(config.event_idx);
        let used = ENTRIES + USED_ENTRY * size + 2 * usize::from(config.event_idx);
        Ok(Self {
            descriptors: Part::translate(memory, config.descriptors, DESCRIPTOR * size, 16)?,
            available: Part::translate(memory, config.driver, available, 2)?,
            used: Part::translate(memory, config.device, used, 4)?,
        })
    }
}

impl Split {
    pub(super) fn lies_in(config: &RingConfig, memory: &Memory) -> bool {
        Parts::translate(config, memory).is_ok()
    }

    pub(super) fn new(config: &RingConfig, memory: &Memory, kept: Kept) -> Result<Self, RingError> {
        let Parts { descriptors, available, used } = Parts::translate(config, memory)?;
        // The device's own field, but the only record of what an earlier server has published.
        let published = used.load_u16(INDEX, Ordering::Acquire);
        let mut next_available = config.base as u16;
        let mut resubmit = Vec::new();
        let inflight = match kept {
            Kept::Nothing => None,
            Kept::Position(_) => {
                next_available = published;
                None
            }
            Kept::Inflight(queue) => {
                let mut inflight = SplitInflight::new(queue, config.size)?;
                if let Some(heads) = inflight.recover(published)? {
                    // Whatever the front end believes: what has been taken from the available
                    // ring is what is used plus what is in flight.
                    next_available = published.wrapping_add(heads.len() as u16);
                    resubmit = heads;
                    resubmit.reverse();
                }
                Some(inflight)
            }
        };
        Ok(Self {
            descriptors,
            available,
            used,
            size: config.size,
            event_idx: config.event_idx,
            indirect: config.indirect,
            next_available,
            seen_available: next_available,
            heads: Heads { from: next_available, count: 0, heads: [0; HEADS] },
            next_used: published,
            published,
            called: published,
            busy: vec![false; usize::from(config.size)],
            resubmit,
            inflight,
            log: config.log,
        })
    }

    pub(super) fn set_memory(
        &mut self,
        config: &RingConfig,
        memory: &Memory,
    ) -> Result<(), RingError> {
        let Parts { descriptors, available, used } = Parts::translate(config, memory)?;
        (self.descriptors, self.available, self.used) = (descriptors, available, used);
        Ok(())
    }

    pub(super) const fn set_log(&mut self, log: Option<u64>) {
        self.log = log;
    }

    #[inline]
    pub(super) fn next(
        &mut self,
        memory: &Memory,
        near: &mut usize,
        chain: &mut Chain,
    ) -> Result<bool, RingError> {
        let again = self.resubmit.last().copied();
        let head = match again {
            Some(head) => head,
            None => match self.available_head()? {
                Some(head) => head,
                None => return Ok(false),
            },
        };
        match self.busy.get(usize::from(head)) {
            None => return Err(RingError::HeadRange),
            Some(true) => return Err(RingError::HeadBusy),
            Some(false) => {}
        }
        chain.id = head;
        self.walk(head, &mut Builder::new(memory, near, chain))?;

        self.busy[usize::from(head)] = true;
        if again.is_some() {
            // Marked by the server that began it, with the place in the order that it keeps.
            self.resubmit.pop();
        } else {
            self.next_available = self.next_available.wrapping_add(1);
            if let Some(inflight) = &mut self.inflight {
                inflight.begin(head);
            }
        }
        Ok(true)
    }

    /// As [`super::Ring::next_singles`]. With an in-flight region there are none: each request is noted in it.
    #[inline]
    pub(super) fn next_singles(
        &mut self,
        memory: &Memory,
        near: &mut usize,
        singles: &mut [Single],
    ) -> usize {
        if !self.resubmit.is_empty() || self.inflight.is_some() {
            return 0;
        }
        let mut taken = 0;
        for single in singles {
            let Ok(Some(head)) = self.available_head() else { break };
            let Some(busy) = self.busy.get_mut(usize::from(head)).filter(|busy| !**busy) else {
                break;
            };
            let offset = usize::from(head) * DESCRIPTOR;
            let (length, flags, _) =
                fields(self.descriptors.load_u64(offset + 8, Ordering::Relaxed));
            let address = self.descriptors.load_u64(offset, Ordering::Relaxed);
            let Some(found) = Single::new(memory, near, head, (address, length, flags)) else {
                break;
            };
            (*busy, *single) = (true, found);
            self.next_available = self.next_available.wrapping_add(1);
            taken += 1;
        }
        taken
    }

    /// Fetches a descriptor further on; the address of the buffer of one that is nearer.
    #[inline]
    pub(super) fn prefetch(&self) -> Option<u64> {
        let descriptor = |ahead: u16| {
            let head = self.heads.get(self.next_available.wrapping_add(ahead))?;
            (head < self.size).then_some(usize::from(head) * DESCRIPTOR)
        };
        if let Some(further) = descriptor(DESCRIPTORS_AHEAD) {
            self.descriptors.prefetch(further);
        }
        Some(self.descriptors.load_u64(descriptor(BUFFERS_AHEAD)?, Ordering::Relaxed))
    }

    /// The request that was taken last is as if it had not been.
    pub(super) fn untake(&mut self, id: u16) -> bool {
        match self.busy.get_mut(usize::from(id)) {
            Some(busy) if *busy && self.inflight.is_none() => *busy = false,
            _ => return false,
        }
        self.next_available = self.next_available.wrapping_sub(1);
        true
    }

    /// The head of the next available chain.
    #[inline]
    fn available_head(&mut self) -> Result<Option<u16>, RingError> {
        if self.next_available == self.seen_available {
            // Acquire: the entries, descriptors and data behind the index are visible with it.
            let index = self.available.load_u16(INDEX, Ordering::Acquire);
            if index.wrapping_sub(self.next_available) > self.size {
                return Err(RingError::AvailableJump);
            }
            self.seen_available = index;
            if index == self.next_available {
                return Ok(None);
            }
        }
        let Some(head) = self.heads.get(self.next_available) else {
            self.read_heads();
            return Ok(self.heads.get(self.next_available));
        };
        Ok(Some(head))
    }

    /// Reads entries that are there, from the next one on.
    fn read_heads(&mut self) {
        let from = self.next_available;
        let count = self.seen_available.wrapping_sub(from).min(HEADS as u16);
        let mut index = from;
        for head in self.heads.heads.iter_mut().take(count.into()) {
            let slot = usize::from(index & (self.size - 1));
            *head = self.available.load_u16(ENTRIES + AVAILABLE_ENTRY * slot, Ordering::Relaxed);
            index = index.wrapping_add(1);
        }
        (self.heads.from, self.heads.count) = (from, count);
    }

    /// Adds the descriptors of a chain, whose head is in the table.
    #[inline]
    fn walk(&self, head: u16, builder: &mut Builder<'_>) -> Result<(), RingError> {
        let mut index = head;
        for _ in 0..self.size {
            let offset = usize::from(index) * DESCRIPTOR;
            let (length, flags, next) =
                fields(self.descriptors.load_u64(offset + 8, Ordering::Relaxed));
            let address = self.descriptors.load_u64(offset, Ordering::Relaxed);
            if flags & INDIRECT != 0 {
                if !self.indirect {
                    return Err(RingError::IndirectRefused);
                }
                if flags & NEXT != 0 {
                    return Err(RingError::IndirectWithNext);
                }
                return walk_table(address, length, builder);
            }
            builder.add(address, length, flags)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            if next >= self.size {
                return Err(RingError::DescriptorRange);
            }
            index = next;
        }
        Err(RingError::Loop)
    }

    #[inline]
    pub(super) fn finish(&mut self, memory: &Memory, id: u16, written: u32) -> bool {
        match self.busy.get_mut(usize::from(id)) {
            Some(busy) if *busy => *busy = false,
            _ => return false,
        }
        let slot = usize::from(self.next_used & (self.size - 1));
        let offset = ENTRIES + USED_ENTRY * slot;
        let entry = u64::from(written) << 32 | u64::from(id);
        // The used ring is aligned to 4 bytes only. Relaxed: the index follows.
        self.used.store_u32(offset, entry as u32, Ordering::Relaxed);
        self.used.store_u32(offset + 4, (entry >> 32) as u32, Ordering::Relaxed);
        self.log(memory, offset, USED_ENTRY);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.finish(id);
        }
        true
    }

    /// Shows the driver what has finished.
    #[inline]
    pub(super) fn flush(&mut self, memory: &Memory) {
        if self.next_used == self.published {
            return;
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.before_publish();
        }
        // Release: the entries, and the data read, are visible before the index.
        self.used.store_u16(INDEX, self.next_used, Ordering::Release);
        if let Some(inflight) = &mut self.inflight {
            inflight.after_publish(self.next_used);
        }
        self.log(memory, INDEX, 2);
        self.published = self.next_used;
    }

    pub(super) const fn shown(&self) -> u16 {
        self.published.wrapping_sub(self.called)
    }

    #[inline]
    pub(super) fn publish(&mut self, memory: &Memory) -> bool {
        self.flush(memory);
        if self.called == self.published {
            return false;
        }
        let old = std::mem::replace(&mut self.called, self.published);

        // Between the store of the index and the load of what the driver wants to be told: a
        // driver that stores its wish, fences and then looks at the index sees ours, or we see
        // its wish.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let offset = ENTRIES + AVAILABLE_ENTRY * usize::from(self.size);
            let event = self.available.load_u16(offset, Ordering::Relaxed);
            need_event(event, self.published, old)
        } else {
            self.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
        }
    }

    pub(super) fn enable_notification(&mut self, memory: &Memory) -> bool {
        if self.event_idx {
            let offset = ENTRIES + USED_ENTRY * usize::from(self.size);
            self.used.store_u16(offset, self.next_available, Ordering::Relaxed);
            self.log(memory, offset, 2);
        } else {
            self.used.store_u16(FLAGS, 0, Ordering::Relaxed);
            self.log(memory, FLAGS, 2);
        }
        // The driver's other half: store the available index, fence, load what we have just
        // stored. Whichever fence comes second, its side sees the other's store: the driver
        // kicks, or we find its request here.
        fence(Ordering::SeqCst);
        self.is_pending()
    }

    pub(super) fn disable_notification(&mut self, memory: &Memory) {
        // With event indices there is nothing to do: the driver kicks when its index passes the
        // one that was asked for, which stays behind.
        if !self.event_idx {
            self.used.store_u16(FLAGS, NO_NOTIFY, Ordering::Relaxed);
            self.log(memory, FLAGS, 2);
        }
    }

    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.next_available != self.seen_available
            || !self.resubmit.is_empty()
            || self.available.load_u16(INDEX, Ordering::Relaxed) != self.next_available
    }

    pub(super) fn backlog(&self) -> u32 {
        let index = self.available.load_u16(INDEX, Ordering::Relaxed);
        let available = index.wrapping_sub(self.next_available).min(self.size);
        u32::from(available) + self.resubmit.len() as u32
    }

    pub(super) const fn base(&self) -> u32 {
        self.next_available as u32
    }

    pub(super) const fn recovering(&self) -> u16 {
        self.resubmit.len() as u16
    }

    #[inline]
    fn log(&self, memory: &Memory, offset: usize, length: usize) {
        if let Some(log) = self.log {
            memory.log_guest(log.saturating_add(offset as u64), length as u64);
        }
    }
}

/// Length, flags and next of a descriptor's second word.
#[inline]
const fn fields(word: u64) -> (u32, u16, u16) {
    (word as u32, (word >> 32) as u16, (word >> 48) as u16)
}

fn walk_table(address: u64, length: u32, builder: &mut Builder<'_>) -> Result<(), RingError> {
    let table = builder.table(address, length)?;
    let mut index = 0;
    for _ in 0..table.count {
        let (address, word) = builder.entry(&table, index)?;
        let (length, flags, next) = fields(word);
        if flags & INDIRECT != 0 {
            return Err(RingError::IndirectNested);
        }
        builder.add(address, length, flags)?;
        if flags & NEXT == 0 {
            return Ok(());
        }
        if next >= table.count {
            return Err(RingError::DescriptorRange);
        }
        index = next;
    }
    Err(RingError::Loop)
}
