//! Packed virtqueues (virtio 1.2, section 2.8).

use std::sync::atomic::{Ordering, fence};

use crate::memory::Memory;

use super::chain::{Builder, DESCRIPTOR, INDIRECT, NEXT, WRITE};
use super::descriptor::{AVAILABLE, Descriptor, Position, USED};
use super::inflight::PackedInflight;
use super::positions::{Finished, Identity, QueuePosition};
use super::{BUFFERS_AHEAD, Chain, Kept, Part, RingConfig, RingError, Single, need_event};

mod recovery;

use recovery::{crosses_into_odd_lap, go_on, mark};

// Event suppression structure: the descriptor's offset and wrap counter, then the flags.
const EVENT: usize = 4;
const EVENT_ENABLE: u32 = 0;
const EVENT_DISABLE: u32 = 1;
const EVENT_DESCRIPTOR: u32 = 2;

#[derive(Debug)]
pub(super) struct Packed {
    descriptors: Part,
    driver: Part,
    device: Part,
    size: u16,
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    /// The next descriptor to take.
    available: Position,
    /// Where the next request is used.
    used: Position,
    /// Where the first of the requests is used that the driver has not been shown.
    first: Position,
    /// These requests. They are written to the ring together, so that a driver that looks at it meanwhile does not take
    /// its cache lines away each time.
    finished: Vec<Finished>,
    /// Their descriptors. Of a width of its own, as the next two are: beside `size` a compiler loads both as one word, which
    /// waits for the store before it ([`Position`]).
    batch: u32,
    /// Descriptors that were shown since it was last looked whether the driver wants to be called; at most the ring's size.
    shown: u32,
    /// Descriptors taken and not yet used.
    taken: u32,
    /// By buffer ID: the descriptors of the request that is in flight under it, or 0.
    busy: Vec<u16>,
    /// Requests that an earlier server had begun, the next one last.
    resubmit: Vec<Vec<Descriptor>>,
    inflight: Option<PackedInflight>,
    /// Where it is, for a successor; not beside an in-flight region.
    position: Option<QueuePosition>,
    /// What the driver has been told about kicks; `None` if that is not known.
    notification: Option<bool>,
    log: bool,
}

struct Parts {
    descriptors: Part,
    driver: Part,
    device: Part,
}

impl Parts {
    fn translate(config: &RingConfig, memory: &Memory) -> Result<Self, RingError> {
        let size = usize::from(config.size);
        Ok(Self {
            descriptors: Part::translate(memory, config.descriptors, DESCRIPTOR * size, 16)?,
            driver: Part::translate(memory, config.driver, EVENT, 4)?,
            device: Part::translate(memory, config.device, EVENT, 4)?,
        })
    }
}

impl Packed {
    pub(super) fn lies_in(config: &RingConfig, memory: &Memory) -> bool {
        Parts::translate(config, memory).is_ok()
    }

    pub(super) fn new(config: &RingConfig, memory: &Memory, kept: Kept) -> Result<Self, RingError> {
        let Parts { descriptors, driver, device } = Parts::translate(config, memory)?;
        let size = config.size;
        // A server drains its ring before it gives the base away, so that both halves are the
        // same; and some front ends know the first only.
        let mut available = Position::from_bits(config.base as u16);
        if available.index() >= size {
            return Err(RingError::Base);
        }
        // Some say 0 for a ring that has just begun, as if it were split (User Mode Linux). Where a
        // ring is at 0 in its second lap, the first has left marks.
        let first = descriptors.load_u16(14, Ordering::Acquire);
        if config.base == 0 && first & (AVAILABLE | USED) == 0 {
            available = Position::new(0, true);
        }
        let mut used = available;
        let mut taken = 0;
        let mut resubmit = Vec::new();
        let mut position = None;
        let inflight = match kept {
            Kept::Nothing => None,
            Kept::Position(mut queue) => {
                // Also where the base is another by now, since the ring has been served meanwhile: of one that was larger.
                if queue.told().index() >= size {
                    return Err(RingError::Base);
                }
                let identity = Identity::new(memory, config.descriptors, size);
                let log = |segment| {
                    if config.log.is_some() {
                        memory.log_write(segment);
                    }
                };
                let left = queue.left(identity);
                match left
                    .and_then(|left| go_on(&descriptors, size, left, &queue, config.base, log))
                {
                    Some((at, true)) => {
                        (used, available) = (at, at);
                        queue.publish(at);
                    }
                    Some((at, false)) => {
                        (used, available) = (at, at);
                        queue.begin(identity, at);
                    }
                    None => queue.begin(identity, used),
                }
                position = Some(queue);
                None
            }
            Kept::Inflight(queue) => {
                let (inflight, found) = PackedInflight::open(queue, size, available, |position| {
                    flags(&descriptors, position)
                })?;
                used = inflight.used();
                let descriptors = found.iter().map(|request| request.len() as u16).sum();
                available = used.after(descriptors, size);
                taken = descriptors.into();
                resubmit = found;
                resubmit.reverse();
                Some(inflight)
            }
        };
        if inflight.is_some() {
            // All these are the device's, but some may look used: those of a batch whose first one
            // was not shown. The driver looks at them when that one is.
            let mut position = used;
            for _ in 0..taken {
                let flags = position.available_flags();
                descriptors.store_u16(position.offset() + 14, flags, Ordering::Release);
                if config.log.is_some() {
                    memory.log_write(descriptors.segment(position.offset() + 14, 2));
                }
                position = position.after(1, size);
            }
        }
        Ok(Self {
            descriptors,
            driver,
            device,
            size,
            event_idx: config.event_idx,
            indirect: config.indirect,
            in_order: config.in_order,
            available,
            used,
            first: used,
            finished: Vec::with_capacity(usize::from(size)),
            batch: 0,
            shown: 0,
            taken,
            busy: vec![0; usize::from(size)],
            resubmit,
            inflight,
            position,
            notification: None,
            log: config.log.is_some(),
        })
    }

    pub(super) fn set_memory(
        &mut self,
        config: &RingConfig,
        memory: &Memory,
    ) -> Result<(), RingError> {
        let Parts { descriptors, driver, device } = Parts::translate(config, memory)?;
        (self.descriptors, self.driver, self.device) = (descriptors, driver, device);
        Ok(())
    }

    pub(super) const fn set_log(&mut self, log: Option<u64>) {
        self.log = log.is_some();
    }

    #[inline]
    pub(super) fn next(
        &mut self,
        memory: &Memory,
        near: &mut usize,
        chain: &mut Chain,
    ) -> Result<bool, RingError> {
        if !self.resubmit.is_empty() {
            return self.next_again(memory, near, chain);
        }
        // Acquire: the rest of the chain and its data are visible with the head's flags, which
        // the driver writes last.
        let word = self.descriptors.load_u64(self.available.offset() + 8, Ordering::Acquire);
        if !self.is_available((word >> 48) as u16) {
            return Ok(false);
        }
        let mut builder = Builder::new(memory, near, chain);
        let mut position = self.available;
        let mut word = word;
        let mut count = 0;
        let id = loop {
            let address = self.descriptors.load_u64(position.offset(), Ordering::Relaxed);
            let descriptor = Descriptor::new(address, word);
            // What is in flight, or finished and not published, has not been given back.
            if self.taken + self.batch + u32::from(count) == u32::from(self.size) {
                return Err(RingError::Overrun);
            }
            if let Some(inflight) = &mut self.inflight {
                inflight.take(count == 0, descriptor);
            }
            count += 1;
            if !self.add(&mut builder, descriptor)? {
                break descriptor.id;
            }
            position = position.after(1, self.size);
            word = self.descriptors.load_u64(position.offset() + 8, Ordering::Relaxed);
        };
        self.begin(id, count)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(id);
        }
        self.available = self.available.after(count, self.size);
        self.taken += u32::from(count);
        chain.id = id;
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
        let room = u32::from(self.size).saturating_sub(self.taken + self.batch) as usize;
        let mut taken = 0;
        for single in singles.iter_mut().take(room) {
            // Acquire: the rest of the descriptor and its data are visible with its flags, which the driver writes last.
            let offset = self.available.offset();
            let word = self.descriptors.load_u64(offset + 8, Ordering::Acquire);
            if !self.is_available((word >> 48) as u16) {
                break;
            }
            let address = self.descriptors.load_u64(offset, Ordering::Relaxed);
            let Descriptor { address, length, id, flags } = Descriptor::new(address, word);
            let Some(busy) = self.busy.get_mut(usize::from(id)).filter(|count| **count == 0) else {
                break;
            };
            let Some(found) = Single::new(memory, near, id, (address, length, flags)) else {
                break;
            };
            (*busy, *single) = (1, found);
            self.available = self.available.after(1, self.size);
            taken += 1;
        }
        self.taken += taken as u32;
        taken
    }

    /// The address of a buffer further on, if each chain until there has one descriptor.
    #[inline]
    pub(super) fn prefetch(&self) -> Option<u64> {
        let position = self.available.after(BUFFERS_AHEAD.min(self.size), self.size);
        Some(self.descriptors.load_u64(position.offset(), Ordering::Relaxed))
    }

    /// The request that was taken last is as if it had not been.
    pub(super) fn untake(&mut self, id: u16) -> bool {
        let count = match self.busy.get_mut(usize::from(id)) {
            Some(count) if *count != 0 && self.inflight.is_none() => std::mem::take(count),
            _ => return false,
        };
        self.available = self.available.before(count, self.size);
        self.taken -= u32::from(count);
        true
    }

    /// The next request of those that an earlier server had begun.
    #[cold]
    fn next_again(
        &mut self,
        memory: &Memory,
        near: &mut usize,
        chain: &mut Chain,
    ) -> Result<bool, RingError> {
        let Some(request) = self.resubmit.pop() else { return Ok(false) };
        let mut builder = Builder::new(memory, near, chain);
        for descriptor in &request {
            self.add(&mut builder, *descriptor)?;
        }
        // Not empty: `PackedInflight::open` checked.
        chain.id = request.last().map_or(0, |descriptor| descriptor.id);
        self.begin(chain.id, request.len() as u16)?;
        Ok(true)
    }

    /// Adds a descriptor of the ring; whether another one follows.
    #[inline]
    fn add(&self, builder: &mut Builder<'_>, descriptor: Descriptor) -> Result<bool, RingError> {
        let Descriptor { address, length, flags, .. } = descriptor;
        let more = flags & NEXT != 0;
        if flags & INDIRECT == 0 {
            builder.add(address, length, flags)?;
            return Ok(more);
        }
        if !self.indirect {
            return Err(RingError::IndirectRefused);
        }
        if more {
            return Err(RingError::IndirectWithNext);
        }
        let table = builder.table(address, length)?;
        // All of the table: its entries have no NEXT.
        for index in 0..table.count {
            let (address, word) = builder.entry(&table, index)?;
            let Descriptor { length, flags, .. } = Descriptor::new(address, word);
            if flags & INDIRECT != 0 {
                return Err(RingError::IndirectNested);
            }
            builder.add(address, length, flags)?;
        }
        Ok(false)
    }

    #[inline]
    fn begin(&mut self, id: u16, count: u16) -> Result<(), RingError> {
        match self.busy.get_mut(usize::from(id)) {
            None => Err(RingError::BufferIdRange),
            Some(0) => {
                self.busy[usize::from(id)] = count;
                Ok(())
            }
            Some(_) => Err(RingError::BufferIdBusy),
        }
    }

    #[inline]
    pub(super) fn finish(&mut self, id: u16, written: u32, is_last: bool) -> bool {
        let count = match self.busy.get_mut(usize::from(id)) {
            Some(count) if *count != 0 => std::mem::take(count),
            _ => return false,
        };
        let request = Finished { written, id, count };
        if let Some(position) = &mut self.position {
            position.finish(self.first, request, is_last);
        }
        self.finished.push(request);
        if let Some(inflight) = &mut self.inflight {
            inflight.finish(id);
        }
        self.used = self.used.after(count, self.size);
        self.batch += u32::from(count);
        self.taken -= u32::from(count);
        true
    }

    #[inline]
    fn store(&self, memory: &Memory, position: Position, word: u64, order: Ordering) {
        let offset = position.offset() + 8;
        self.descriptors.store_u64(offset, word, order);
        if self.log {
            memory.log_write(self.descriptors.segment(offset, 8));
        }
    }

    /// Shows the driver what has finished.
    #[inline]
    pub(super) fn flush(&mut self, memory: &Memory) {
        let Some((&first, rest)) = self.finished.split_first() else { return };
        if self.position.is_some() && crosses_into_odd_lap(self.first, self.used) {
            mark(&self.descriptors, |segment| {
                if self.log {
                    memory.log_write(segment);
                }
            });
        }
        let mut shown = first;
        if self.in_order && self.finished.iter().all(|request| request.written == 0) {
            // One used descriptor, with the last one's ID, stands for all of them (virtio 1.2, section 2.8.8). The driver's cache
            // lines with the others are left to it.
            shown = *rest.last().unwrap_or(&first);
        } else {
            let mut at = self.first.after(first.count, self.size);
            for &Finished { id, written, count } in rest {
                // Not seen before the first one is.
                self.store(memory, at, used_word(at, id, written), Ordering::Relaxed);
                at = at.after(count, self.size);
            }
        }
        self.finished.clear();
        if let Some(inflight) = &mut self.inflight {
            inflight.before_publish(self.used);
        }
        // Release: the batch's other entries and the data read are visible before.
        let word = used_word(self.first, shown.id, shown.written);
        self.store(memory, self.first, word, Ordering::Release);
        self.first = self.used;
        if let Some(inflight) = &mut self.inflight {
            inflight.after_publish();
        }
        if let Some(position) = &mut self.position {
            position.publish(self.used);
        }
        self.shown = (self.shown + std::mem::take(&mut self.batch)).min(self.size.into());
    }

    pub(super) const fn shown(&self) -> u16 {
        self.shown as u16
    }

    #[inline]
    pub(super) fn publish(&mut self, memory: &Memory) -> bool {
        self.flush(memory);
        let shown = std::mem::take(&mut self.shown) as u16;
        if shown == 0 {
            return false;
        }

        // Between the store of the used descriptor and the load of what the driver wants to be
        // told: a driver that stores its wish, fences and then looks at the descriptor sees it
        // used, or we see its wish.
        fence(Ordering::SeqCst);
        let event = self.driver.load_u32(0, Ordering::Relaxed);
        match event >> 16 & 3 {
            EVENT_ENABLE => true,
            EVENT_DESCRIPTOR if self.event_idx => {
                let event = Position::from_bits(event as u16);
                let mut index = event.index();
                if event.wrap() != self.used.wrap() {
                    // In the lap before.
                    index = index.wrapping_sub(self.size);
                }
                need_event(index, self.used.index(), self.used.index().wrapping_sub(shown))
            }
            _ => false,
        }
    }

    pub(super) fn enable_notification(&mut self, memory: &Memory) -> bool {
        let flags = if self.event_idx { EVENT_DESCRIPTOR } else { EVENT_ENABLE };
        self.notify(memory, flags << 16 | u32::from(self.available.bits()));
        self.notification = Some(true);
        // The driver's other half: make the descriptor available, fence, load what we have just
        // stored. Whichever fence comes second, its side sees the other's store: the driver
        // kicks, or we find its request here.
        fence(Ordering::SeqCst);
        self.is_pending()
    }

    pub(super) fn disable_notification(&mut self, memory: &Memory) {
        if self.notification != Some(false) {
            self.notify(memory, EVENT_DISABLE << 16);
            self.notification = Some(false);
        }
    }

    fn notify(&self, memory: &Memory, event: u32) {
        // One store: the driver sees the flags and the descriptor that they speak of together.
        self.device.store_u32(0, event, Ordering::Relaxed);
        if self.log {
            memory.log_write(self.device.segment(0, EVENT));
        }
    }

    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        let offset = self.available.offset() + 8;
        !self.resubmit.is_empty()
            || self
                .is_available((self.descriptors.load_u64(offset, Ordering::Relaxed) >> 48) as u16)
    }

    #[inline]
    const fn is_available(&self, flags: u16) -> bool {
        flags & (AVAILABLE | USED) == self.available.available_flags()
    }

    pub(super) fn backlog(&self) -> u32 {
        (self.resubmit.len() as u32).max(u32::from(self.is_pending()))
    }

    pub(super) const fn base(&self) -> u32 {
        self.available.bits() as u32 | (self.used.bits() as u32) << 16
    }

    pub(super) const fn recovering(&self) -> u16 {
        self.resubmit.len() as u16
    }
}

/// What the driver finds of a request that was used at `position`.
#[inline]
fn used_word(position: Position, id: u16, written: u32) -> u64 {
    let flags = position.used_flags() | if written == 0 { 0 } else { WRITE };
    u64::from(written) | u64::from(id) << 32 | u64::from(flags) << 48
}

fn flags(descriptors: &Part, position: Position) -> u16 {
    (descriptors.load_u64(position.offset() + 8, Ordering::Acquire) >> 48) as u16
}
