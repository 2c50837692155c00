//! Where a queue's requests come from: a virtqueue of a guest, or the slots of a process of this host.
//!
//! Of both is true: what the other side writes is read once and checked, what cannot be a request
//! breaks the source, a request that is only wrong is answered, and what has finished is shown
//! together.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rtvirtio_completion::slots::{
    Direction, ProtocolViolation, SLOT_BYTES, SLOTS, SlotMemory, SlotRequest,
};
use rtvirtio_completion::{Doorbell, Ticket, Wakes};
use rtvirtio_engine::{Operation, Segment};
use rustix::fd::OwnedFd;

use super::Broken;
use crate::request::{Action, Limits, Parsed, Status, parse, within};
use rtvirtio_virtq::ring::{Chain, Ring};

/// What says that there may be something new where nobody looks.
pub(crate) enum Kick<'a> {
    /// An fd becomes readable.
    Fd(&'a OwnedFd),
    /// A futex is no longer this number.
    Futex(&'a AtomicU32, u32),
}

/// See the module's text.
pub(super) enum Source {
    Ring {
        ring: Ring,
        /// The request that was taken last.
        chain: Chain,
    },
    Slots(Slots),
}

/// Slots, the poller's side.
pub(super) struct Slots {
    memory: Arc<SlotMemory>,
    /// Those that have rung and have not been looked at.
    due: u64,
    /// Of requests that are in flight.
    tickets: [Option<Ticket>; SLOTS],
    /// Which was taken last, and what it is.
    taken: (usize, SlotRequest),
    /// What has finished and is not shown yet: which, and bytes or a negated error number.
    finished: Vec<(usize, Ticket, i32)>,
}

impl Slots {
    pub(super) fn new(memory: Arc<SlotMemory>) -> Self {
        let nothing = SlotRequest { way: None, offset: 0, length: 0 };
        Self {
            memory,
            due: 0,
            tickets: [None; SLOTS],
            taken: (0, nothing),
            finished: Vec::with_capacity(SLOTS),
        }
    }

    fn doorbell(&self) -> &Doorbell {
        self.memory.slots().doorbell()
    }

    fn next(&mut self) -> Result<Option<u16>, ProtocolViolation> {
        if self.due == 0 {
            self.due = self.doorbell().answer();
        }
        if self.due == 0 {
            return Ok(None);
        }
        let index = self.due.trailing_zeros() as usize;
        self.due &= self.due - 1;
        let (ticket, wanted) = self.memory.slots().take(index)?;
        let place = self.tickets.get_mut(index).ok_or(ProtocolViolation(index))?;
        // It rang again while its request is in flight: the data would be used twice.
        if place.is_some() {
            return Err(ProtocolViolation(index));
        }
        *place = Some(ticket);
        self.taken = (index, wanted);
        Ok(Some(index as u16))
    }

    /// What the request that was taken last asks for.
    fn parsed(&self, limits: &Limits, data: &mut Vec<Segment>) -> Parsed {
        let (index, SlotRequest { way, offset, length }) = self.taken;
        let bytes = u64::from(length);
        data.clear();
        let fits = length as usize <= SLOT_BYTES && within(offset, bytes, &limits.geometry);
        let operation = match way {
            Some(Direction::Read) => Ok(Operation::Read),
            Some(Direction::Write) if limits.read_only => Err(Status::IoError),
            Some(Direction::Write) => Ok(Operation::Write { durable: limits.write_through }),
            None => Err(Status::Unsupported),
        };
        let action = match operation {
            Err(status) => Action::Answer(status),
            Ok(_) if !fits || length == 0 => Action::Answer(Status::IoError),
            Ok(operation) => {
                data.push(Segment::new(self.memory.data(index).as_ptr(), length as usize));
                Action::Start { operation, offset, length: bytes }
            }
        };
        Parsed { action, status: None, written: 0, ioprio: 0 }
    }

    fn finish(&mut self, index: usize, result: i32) {
        let ticket = self.tickets.get_mut(index).and_then(Option::take);
        debug_assert!(ticket.is_some(), "slot {index} is not in flight");
        self.finished.extend(ticket.map(|ticket| (index, ticket, result)));
    }

    /// Whether somebody slept.
    fn publish(&mut self) -> bool {
        let slots = self.memory.slots();
        let mut wakes = Wakes::default();
        for (index, ticket, result) in self.finished.drain(..) {
            if let Some(slot) = slots.get(index) {
                // A client that has changed its slot meanwhile waits for nothing.
                let _ = wakes.complete(slot, ticket, result);
            }
        }
        !wakes.is_empty()
    }
}

impl Source {
    /// Takes the next request; its place among those in flight.
    pub(super) fn next(&mut self) -> Result<Option<u16>, Broken> {
        match self {
            Self::Ring { ring, chain } => Ok(ring.next(chain)?.then_some(chain.id)),
            Self::Slots(slots) => Ok(slots.next()?),
        }
    }

    /// Pieces of memory of the request that was taken last.
    pub(super) fn pieces(&self) -> usize {
        match self {
            Self::Ring { chain, .. } => chain.pieces(),
            Self::Slots(_) => 1,
        }
    }

    /// What the request that was taken last asks for. `None`: its driver cannot be told anything.
    pub(super) fn parse(&mut self, limits: &Limits, data: &mut Vec<Segment>) -> Option<Parsed> {
        match self {
            Self::Ring { chain, .. } => parse(chain, limits, data),
            Self::Slots(slots) => Some(slots.parsed(limits, data)),
        }
    }

    /// Gives a request back, to be shown by [`Self::publish`]. Its status has been written, if it has a
    /// place for that: `written` bytes in all. `bytes` are those of the transfer.
    pub(super) fn finish(&mut self, head: u16, written: u32, bytes: u64, status: Status) {
        match self {
            Self::Ring { ring, .. } => ring.finish(head, written),
            Self::Slots(slots) => {
                let result = match status {
                    Status::Ok => i32::try_from(bytes).unwrap_or(i32::MAX),
                    Status::IoError => -libc::EIO,
                    Status::Unsupported => -libc::EOPNOTSUPP,
                };
                slots.finish(head.into(), result);
            }
        }
    }

    /// Shows what has finished; whether the other side is to be called by its fd, and whether it was
    /// woken here.
    pub(super) fn publish(&mut self) -> (bool, bool) {
        match self {
            Self::Ring { ring, .. } => (ring.publish(), false),
            Self::Slots(slots) => (false, slots.publish()),
        }
    }

    pub(super) fn is_pending(&self) -> bool {
        match self {
            Self::Ring { ring, .. } => ring.is_pending(),
            Self::Slots(slots) => slots.due != 0 || slots.doorbell().is_signaled(),
        }
    }

    /// Requests that can be taken, as far as a look at one place says.
    pub(super) fn backlog(&self) -> u32 {
        match self {
            Self::Ring { ring, .. } => ring.backlog(),
            Self::Slots(slots) => slots.due.count_ones(),
        }
    }

    pub(super) fn enable_notification(&mut self) -> bool {
        match self {
            Self::Ring { ring, .. } => ring.enable_notification(),
            Self::Slots(slots) => slots.due != 0 || slots.doorbell().sleep(),
        }
    }

    pub(super) fn disable_notification(&mut self) {
        match self {
            Self::Ring { ring, .. } => ring.disable_notification(),
            Self::Slots(slots) => slots.doorbell().wake_up(),
        }
    }

    /// Requests of an earlier server: of a virtqueue.
    pub(super) const fn recovering(&self) -> u16 {
        match self {
            Self::Ring { ring, .. } => ring.recovering(),
            Self::Slots(_) => 0,
        }
    }

    /// Of slots: what the poller waits at.
    pub(super) fn futex(&self) -> Option<Kick<'_>> {
        match self {
            Self::Ring { .. } => None,
            Self::Slots(slots) => Some(Kick::Futex(slots.doorbell().futex(), Doorbell::SILENT)),
        }
    }

    /// The virtqueue's ring, if it is one.
    pub(super) const fn ring(&mut self) -> Option<&mut Ring> {
        match self {
            Self::Ring { ring, .. } => Some(ring),
            Self::Slots(_) => None,
        }
    }

    /// As GET_VRING_BASE returns it, of a virtqueue.
    pub(super) const fn base(&self) -> u32 {
        match self {
            Self::Ring { ring, .. } => ring.base(),
            Self::Slots(_) => 0,
        }
    }
}
