//! Frames of a network device: from a virtqueue to a TAP, and back.
//!
//! - *Transmit*: a chain is a frame. Its header is copied and checked, and both go to the TAP by one call:
//!   nothing is in flight when a turn ends.
//! - *Receive*: buffers are taken from the ring before a frame is there, for a frame cannot be read in
//!   parts. Those that it does not fill are held for the next; when the queue stops they go back to the
//!   ring as if they had never been taken.
//!
//! A frame to or from a TAP takes the kernel 1 to 2 µs whatever its length, so a turn has fewer of
//! them than it has requests to a disk ([`COST`]).
//!
//! A limit on a rate is back pressure: chains are not taken from a driver that is ahead of its rate, and
//! the TAP is not read. The IOThread comes back when the next frame may pass.
//!
//! Who has no buffers loses no frame here: they wait in the TAP's own queue, whose length is the host's to
//! set (`txqueuelen`).

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rtvirtio_net::features;
use rtvirtio_net::header::{BYTES, ETHERNET, Header, MAX_FRAME_BYTES};
use rtvirtio_net::limit::Limit;
use rtvirtio_net::tap::Tap;
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::{Chain, Ring, RingError};
use rustix::io::Errno;

use super::Pass;
use crate::clock::now;
use crate::drr::TurnBudget;
use crate::nic::Nic;
use crate::stats::{Op, QueueStats};

/// The bytes of a turn that a frame takes at least: 16 frames are a turn, some 25 µs.
const COST: i64 = 16 << 10;
/// Buffers that are held, and pieces of one call (`IOV_MAX` less header and spill).
const MAX_HELD: usize = 256;
const MAX_PARTS: usize = 1000;

/// What a queue of a network device does.
pub(super) struct Frames {
    direction: Direction,
    limit: Option<Limit>,
    /// When the next frame may pass, while one may not, ns of [`now`].
    held_until: Option<u64>,
}

enum Direction {
    Transmit(Transmit),
    Receive(Box<Receive>),
}

/// A turn's outcome, and whether something is to be shown to the driver.
type Served = Result<(Pass, bool), RingError>;

impl Frames {
    /// Of the virtqueue `index`; `None`: the device has none.
    pub(super) fn new(nic: &Arc<Nic>, index: u16) -> Option<Self> {
        let tap = Arc::clone(nic.tap(index)?);
        let limit = nic.limit(index).map(Limit::new);
        let nic = Arc::clone(nic);
        let direction = match index % 2 {
            0 => Direction::Receive(Box::new(Receive {
                nic,
                tap,
                held: VecDeque::with_capacity(MAX_HELD),
                spare: Vec::new(),
                bytes: 0,
                parts: Vec::with_capacity(MAX_PARTS + 2),
                spill: vec![0; MAX_FRAME_BYTES].into(),
                ready: true,
                failed: false,
            })),
            _ => {
                Direction::Transmit(Transmit { nic, tap, parts: Vec::with_capacity(MAX_PARTS + 2) })
            }
        };
        Some(Self { direction, limit, held_until: None })
    }

    /// When the next frame may pass, if one may not now, ns.
    pub(super) const fn held_until(&self) -> Option<u64> {
        self.held_until
    }

    /// It may by now.
    pub(super) const fn release(&mut self) {
        self.held_until = None;
    }

    pub(super) const fn is_transmit(&self) -> bool {
        matches!(self.direction, Direction::Transmit(_))
    }

    /// A turn.
    pub(super) fn serve(
        &mut self,
        ring: &mut Ring,
        chain: &mut Chain,
        memory: &Memory,
        share: &mut TurnBudget,
        stats: &QueueStats,
    ) -> Served {
        let mut gate = Gate { limit: self.limit.as_mut(), time: 0, closed: None };
        let served = match &mut self.direction {
            Direction::Transmit(transmit) => transmit.serve(ring, chain, share, stats, &mut gate),
            Direction::Receive(receive) => receive.serve(ring, memory, share, stats, &mut gate),
        };
        self.held_until = gate.closed;
        served
    }

    /// Whether a turn would find something to do, if the ring has so much.
    pub(super) fn is_pending(&self, ring_is_pending: bool) -> bool {
        self.held_until.is_none()
            && match &self.direction {
                Direction::Transmit(_) => ring_is_pending,
                Direction::Receive(receive) => {
                    receive.ready && (ring_is_pending || !receive.held.is_empty())
                }
            }
    }

    /// Whether it is the driver that is waited for.
    pub(super) fn waits_for_driver(&self, ring_is_pending: bool) -> bool {
        self.held_until.is_none()
            && match &self.direction {
                Direction::Transmit(_) => true,
                Direction::Receive(receive) => receive.held.is_empty() && !ring_is_pending,
            }
    }

    /// What is waited for when buffers are there and no frame.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        match &self.direction {
            Direction::Receive(receive) if !receive.ready && !receive.failed => {
                Some(receive.tap.as_fd())
            }
            _ => None,
        }
    }

    /// The link has something, or has failed.
    pub(super) fn link_event(&mut self, failed: bool) {
        if let Direction::Receive(receive) = &mut self.direction {
            (receive.ready, receive.failed) = (true, failed);
        }
    }

    /// Buffers that are held go back to the ring.
    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        if let Direction::Receive(receive) = &mut self.direction {
            while let Some(Held { chain, bytes }) = receive.held.pop_back() {
                ring.untake(chain.id);
                receive.bytes -= bytes;
                receive.spare.push(chain);
            }
        }
    }
}

/// Where frames pass in a turn, one by one.
struct Gate<'a> {
    limit: Option<&'a mut Limit>,
    /// Of the last look at the clock, ns; 0: none yet.
    time: u64,
    /// Until when it is closed, if it is.
    closed: Option<u64>,
}

impl Gate<'_> {
    /// Whether another frame may pass.
    fn is_open(&mut self) -> bool {
        let Some(limit) = &self.limit else { return true };
        let ready_at = limit.ready_at();
        if ready_at > self.time {
            self.time = now();
        }
        self.closed = (ready_at > self.time).then_some(ready_at);
        self.closed.is_none()
    }

    fn pass(&mut self, bytes: usize) {
        if let Some(limit) = &mut self.limit {
            limit.pass(self.time, bytes);
        }
    }
}

fn cost(bytes: usize) -> i64 {
    (bytes as i64).max(COST)
}

/// To the TAP.
pub(super) struct Transmit {
    nic: Arc<Nic>,
    tap: Arc<Tap>,
    /// Scratch.
    parts: Vec<Segment>,
}

impl Transmit {
    fn serve(
        &mut self,
        ring: &mut Ring,
        chain: &mut Chain,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
    ) -> Served {
        let negotiated = self.nic.driver_features();
        let mut is_unpublished = false;
        while share.is_left() {
            if !gate.is_open() || !ring.next(chain)? {
                return Ok((Pass::Empty, is_unpublished));
            }
            is_unpublished = true;
            stats.start(1);
            let sent = self.send(chain, negotiated);
            match sent {
                Some(bytes) => stats.count(Op::Write, bytes as u64),
                // As on a wire: it is gone, and counted.
                None => stats.fail(Op::Write),
            }
            ring.finish(chain.id, 0);
            gate.pass(sent.unwrap_or(0));
            share.requests -= 1;
            share.bytes -= cost(sent.unwrap_or(0));
        }
        Ok((Pass::More, is_unpublished))
    }

    /// Sends a frame; its length without the header. `None`: it is none, or the TAP does not take it.
    fn send(&mut self, chain: &Chain, negotiated: u64) -> Option<usize> {
        let mut header = [0; BYTES];
        let (mut of_header, mut length) = (0, 0);
        self.parts.clear();
        self.parts.push(Segment::EMPTY);
        for segment in &chain.readable {
            let mut segment = *segment;
            while of_header < BYTES && !segment.is_empty() {
                // SAFETY: a byte of guest memory, which the ring's memory keeps mapped. The driver may
                // change it at any time: it is read once.
                header[of_header] = unsafe { segment.base().read_volatile() };
                of_header += 1;
                segment.advance(1);
            }
            if !segment.is_empty() {
                length += segment.len();
                self.parts.push(segment);
            }
        }
        let fits = (ETHERNET..=MAX_FRAME_BYTES).contains(&length) && self.parts.len() <= MAX_PARTS;
        if of_header < BYTES || !fits {
            return None;
        }
        let mut header = Header(header).from_driver(negotiated).ok()?;
        self.parts[0] = Segment::new(header.0.as_mut_ptr(), BYTES);
        // SAFETY: the header is on the stack, the rest is guest memory that the ring's memory keeps mapped.
        unsafe { self.tap.send(&self.parts) }.ok().map(|_| length)
    }
}

/// A buffer of the driver's.
struct Held {
    chain: Chain,
    bytes: usize,
}

/// From the TAP.
pub(super) struct Receive {
    nic: Arc<Nic>,
    tap: Arc<Tap>,
    /// In the order of the ring.
    held: VecDeque<Held>,
    /// Chains whose memory is used again.
    spare: Vec<Chain>,
    /// That are held.
    bytes: usize,
    /// Scratch.
    parts: Vec<Segment>,
    /// Where the end of a frame goes for which the buffers are too small.
    spill: Box<[u8]>,
    /// Whether the TAP may have a frame.
    ready: bool,
    /// Whether it cannot be waited for.
    failed: bool,
}

impl Receive {
    fn serve(
        &mut self,
        ring: &mut Ring,
        memory: &Memory,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
    ) -> Served {
        let negotiated = self.nic.driver_features();
        let is_mergeable = negotiated & features::MRG_RXBUF != 0;
        let segmented = features::GUEST_TSO4 | features::GUEST_TSO6;
        let longest = match negotiated & segmented {
            0 => usize::from(self.nic.mtu()) + ETHERNET + 4,
            _ => MAX_FRAME_BYTES,
        };
        let mut is_unpublished = false;
        while share.is_left() {
            is_unpublished |= self.gather(ring, BYTES + longest, is_mergeable, stats)?;
            if self.held.is_empty() || !gate.is_open() {
                return Ok((Pass::Empty, is_unpublished));
            }
            let mut header = Header::COMPLETE;
            let received = match self.receive(&mut header) {
                Ok(bytes) => bytes,
                Err(errno) => {
                    (self.ready, self.failed) = (false, errno != Errno::AGAIN);
                    return Ok((Pass::Empty, is_unpublished));
                }
            };
            stats.start(1);
            gate.pass(received.saturating_sub(BYTES));
            share.requests -= 1;
            share.bytes -= cost(received);
            let fits = (BYTES + ETHERNET..=self.bytes).contains(&received);
            match header.for_driver(negotiated) {
                Ok(header) if fits => {
                    self.deliver(received, header, ring, memory);
                    is_unpublished = true;
                    stats.count(Op::Read, (received - BYTES) as u64);
                }
                // Of another session's offloads, or longer than the driver's buffers.
                _ => stats.fail(Op::Read),
            }
        }
        Ok((Pass::More, is_unpublished))
    }

    /// Takes buffers until a frame of `wanted` bytes fits, or there is none. Whether a useless one went
    /// back.
    fn gather(
        &mut self,
        ring: &mut Ring,
        wanted: usize,
        is_mergeable: bool,
        stats: &QueueStats,
    ) -> Result<bool, RingError> {
        let mut is_unpublished = false;
        let mut pieces: usize = self.held.iter().map(|held| held.chain.writable.len()).sum();
        while self.bytes < wanted
            && (is_mergeable || self.held.is_empty())
            && self.held.len() < MAX_HELD
        {
            let mut chain = self.spare.pop().unwrap_or_default();
            if !ring.next(&mut chain)? {
                self.spare.push(chain);
                break;
            }
            let bytes = chain.writable.iter().map(Segment::len).sum();
            pieces += chain.writable.len();
            if bytes < BYTES || pieces > MAX_PARTS {
                // No header fits, or no call takes so many.
                ring.finish(chain.id, 0);
                pieces -= chain.writable.len();
                stats.start(1);
                stats.fail(Op::Read);
                self.spare.push(chain);
                is_unpublished = true;
                // A driver that has nothing else gets a turn's worth of this.
                if self.held.is_empty() {
                    continue;
                }
                break;
            }
            self.bytes += bytes;
            self.held.push_back(Held { chain, bytes });
        }
        Ok(is_unpublished)
    }

    /// Reads a frame behind where its header will be; bytes with the header.
    fn receive(&mut self, header: &mut Header) -> Result<usize, Errno> {
        self.parts.clear();
        self.parts.push(Segment::new(header.0.as_mut_ptr(), BYTES));
        let mut skip = BYTES;
        for held in &self.held {
            for segment in &held.chain.writable {
                let mut segment = *segment;
                let skipped = skip.min(segment.len());
                segment.advance(skipped);
                skip -= skipped;
                if !segment.is_empty() {
                    self.parts.push(segment);
                }
            }
        }
        self.parts.push(Segment::new(self.spill.as_mut_ptr(), self.spill.len()));
        // SAFETY: header and spill are this process's own, the rest is guest memory that the ring's
        // memory keeps mapped.
        unsafe { self.tap.receive(&self.parts) }
    }

    /// Gives the driver a frame of `received` bytes in as many buffers as it takes.
    fn deliver(&mut self, received: usize, header: Header, ring: &mut Ring, memory: &Memory) {
        let (mut left, mut buffers) = (received, 0_u16);
        for held in &self.held {
            left = left.saturating_sub(held.bytes);
            buffers += 1;
            if left == 0 {
                break;
            }
        }
        let header = header.in_buffers(buffers);
        if let Some(first) = self.held.front() {
            let places =
                first.chain.writable.iter().flat_map(|segment| {
                    (0..segment.len()).map(|at| segment.base().wrapping_add(at))
                });
            for (place, byte) in places.zip(header.0) {
                // SAFETY: a byte of guest memory, which the ring's memory keeps mapped.
                unsafe { place.write_volatile(byte) };
            }
        }
        let mut left = received;
        for _ in 0..buffers {
            let Some(Held { chain, bytes }) = self.held.pop_front() else { break };
            let used = bytes.min(left);
            left -= used;
            self.bytes -= bytes;
            if memory.log().is_some() {
                log(&chain, used, memory);
            }
            ring.finish(chain.id, used as u32);
            self.spare.push(chain);
        }
    }
}

/// Notes what was written, for a migration.
fn log(chain: &Chain, mut used: usize, memory: &Memory) {
    for segment in &chain.writable {
        let length = used.min(segment.len());
        if length > 0 {
            memory.log_write(Segment::new(segment.base(), length));
        }
        used -= length;
    }
}
