//! A driver's receive buffers: taken before a frame is there, filled, and given back unused.

use std::collections::VecDeque;

use rtvirtio_frames::header::{BYTES, Header};
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::{Chain, Ring, RingError, Single};

use super::{MAX_PARTS, take};
use crate::copy::copy;
use crate::drr::{TurnBudget, cost};
use crate::stats::{Dropped, Op, QueueStats};

/// Buffers that are held.
const MAX_HELD: usize = 256;

/// Requests that are taken ahead of their use.
const AHEAD: usize = 32;
/// Of these, those that are taken from a ring together: few, since a CPU fetches some 20 cache lines at a time, and each of
/// them lies in two or three.
const TOGETHER: usize = 8;

/// Requests of one descriptor that were taken ahead of their use: while the CPU fetches what they lie in from the driver's
/// CPU, it does what was taken before.
pub(super) struct Ahead {
    /// Round and round. They stay where they were written: what is copied right after it was written has to be in the cache
    /// first, behind all that was stored before.
    singles: [Single; AHEAD],
    first: usize,
    count: usize,
}

impl Ahead {
    pub(super) const fn new() -> Self {
        Self { singles: [Single::EMPTY; AHEAD], first: 0, count: 0 }
    }

    /// Takes more if there is room for [`TOGETHER`], `most` in all; each is given to `prefetch`.
    #[inline]
    pub(super) fn fill(&mut self, ring: &mut Ring, most: usize, prefetch: impl Fn(&Single)) {
        if self.count > AHEAD - TOGETHER {
            return;
        }
        let wanted = most.saturating_sub(self.count).min(TOGETHER);
        let from = (self.first + self.count) % AHEAD;
        let to = (from + wanted).min(AHEAD);
        let singles = &mut self.singles[from..to];
        let taken = ring.next_singles(singles);
        singles.iter().take(taken).for_each(prefetch);
        self.count += taken;
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The next one.
    #[inline]
    pub(super) fn front(&self) -> Option<&Single> {
        if self.count > 0 { self.singles.get(self.first) } else { None }
    }

    /// It is used.
    #[inline]
    pub(super) const fn pop(&mut self) {
        self.first = (self.first + 1) % AHEAD;
        self.count -= 1;
    }

    /// All go back to the ring.
    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        while let Some(count) = self.count.checked_sub(1) {
            self.count = count;
            ring.untake(self.singles[(self.first + count) % AHEAD].id);
        }
    }
}

/// A buffer of the driver's.
struct Held {
    chain: Chain,
    bytes: usize,
}

/// Buffers that were taken and not used.
pub(super) struct Buffers {
    /// In the order of the ring.
    held: VecDeque<Held>,
    /// Chains whose memory is used again.
    spare: Vec<Chain>,
    /// Of all that are held.
    bytes: usize,
    /// Segments of these.
    pieces: usize,
}

/// What came of looking for buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gathered {
    /// They are there.
    Enough,
    /// The driver has made too few available.
    TooFew,
    /// However many it made available, the frame would not fit.
    NeverEnough,
    /// Following what it made available has taken all of the turn.
    TurnOver,
}

impl Buffers {
    pub(super) fn new() -> Self {
        let (held, spare) = (VecDeque::with_capacity(MAX_HELD), Vec::with_capacity(MAX_HELD));
        Self { held, spare, bytes: 0, pieces: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Bytes of those that are held.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Their pieces, behind the first `skip` bytes.
    pub(super) fn segments(&self, skip: usize) -> impl Iterator<Item = Segment> {
        let all = self.held.iter().flat_map(|held| &held.chain.writable);
        all.scan(skip, |skip, segment| {
            let mut segment = *segment;
            let skipped = segment.len().min(*skip);
            *skip -= skipped;
            segment.advance(skipped);
            Some(segment)
        })
        .filter(|segment| !segment.is_empty())
    }

    /// Takes buffers until a frame of `wanted` bytes, virtio header among them, fits. Of one that is not mergeable
    /// there is one. What following them takes is of the turn's `share`, of which something is left. `is_unpublished` is set
    /// if a useless one went back.
    pub(super) fn gather(
        &mut self,
        ring: &mut Ring,
        wanted: usize,
        is_mergeable: bool,
        share: &mut TurnBudget,
        stats: &QueueStats,
        is_unpublished: &mut bool,
    ) -> Result<Gathered, RingError> {
        while self.bytes < wanted {
            if !self.held.is_empty() && !is_mergeable || self.held.len() == MAX_HELD {
                return Ok(Gathered::NeverEnough);
            }
            if share.ns <= 0 {
                return Ok(Gathered::TurnOver);
            }
            ring.prefetch();
            let mut chain = self.spare.pop().unwrap_or_default();
            if !take(ring, &mut chain, share)? {
                self.spare.push(chain);
                // A driver that has nothing back can add nothing: the frame would be waited with for ever.
                let are_all = ring.in_flight() >= ring.config().size;
                return Ok(if are_all { Gathered::NeverEnough } else { Gathered::TooFew });
            }
            let bytes = chain.writable.iter().map(Segment::len).sum();
            if bytes < BYTES || self.pieces + chain.writable.len() > MAX_PARTS {
                // No header fits, or no system call takes so many.
                if !self.held.is_empty() {
                    // Buffers are used in their order: those before it come first.
                    ring.untake(chain.id);
                    self.spare.push(chain);
                    return Ok(Gathered::NeverEnough);
                }
                ring.finish(chain.id, 0);
                stats.start(1);
                stats.drop_frame(Op::Read, Dropped::Malformed);
                self.spare.push(chain);
                *is_unpublished = true;
                share.ns -= cost::NOTE_NS;
                continue;
            }
            self.bytes += bytes;
            self.pieces += chain.writable.len();
            self.held.push_back(Held { chain, bytes });
        }
        Ok(Gathered::Enough)
    }

    /// Writes parts of a frame one behind the other, behind its virtio header.
    pub(super) fn fill(&self, parts: impl Iterator<Item = Segment>) {
        let mut parts = parts.filter(|part| !part.is_empty());
        let Some(mut part) = parts.next() else { return };
        let mut skip = BYTES;
        for segment in self.held.iter().flat_map(|held| &held.chain.writable) {
            let mut to = *segment;
            let skipped = skip.min(to.len());
            to.advance(skipped);
            skip -= skipped;
            while !to.is_empty() {
                let length = to.len().min(part.len());
                // SAFETY: `to` is guest memory, which the ring's memory keeps mapped; whoever fills vouches for
                // the parts.
                unsafe { copy(part.base(), to.base(), length) };
                to.advance(length);
                part.advance(length);
                if part.is_empty() {
                    match parts.next() {
                        Some(next) => part = next,
                        None => return,
                    }
                }
            }
        }
    }

    /// Gives the driver a frame of `length` bytes, virtio header among them, in as many buffers as it
    /// takes.
    pub(super) fn deliver(
        &mut self,
        length: usize,
        header: Header,
        ring: &mut Ring,
        memory: &Memory,
    ) {
        let (mut left, mut buffers) = (length, 0_u16);
        for held in &self.held {
            left = left.saturating_sub(held.bytes);
            buffers += 1;
            if left == 0 {
                break;
            }
        }
        let header = header.in_buffers(buffers);
        write_header(&header, self.held.iter().flat_map(|held| &held.chain.writable));
        let mut left = length;
        for buffer in 1..=buffers {
            let Some(Held { chain, bytes }) = self.held.pop_front() else { break };
            let used = bytes.min(left);
            left -= used;
            self.bytes -= bytes;
            self.pieces -= chain.writable.len();
            if memory.log().is_some() {
                log(&chain, used, memory);
            }
            // A server that comes after a kill shows all of a frame or nothing of it.
            if buffer < buffers {
                ring.finish_with_next(chain.id, used as u32);
            } else {
                ring.finish(chain.id, used as u32);
            }
            self.spare.push(chain);
        }
    }

    /// All go back to the ring.
    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        while let Some(Held { chain, bytes }) = self.held.pop_back() {
            ring.untake(chain.id);
            self.bytes -= bytes;
            self.pieces -= chain.writable.len();
            self.spare.push(chain);
        }
    }
}

/// Writes the virtio header of a frame to the pieces of its buffers, unless it is there already.
///
/// It is there nearly always: headers of complete frames are alike, and a driver that sends from the buffers that it received in
/// leaves the header as it is. Then both CPUs keep the cache line. A store would have to take it from the driver's CPU, for which
/// all later stores wait. PREFETCHW does not help: it has no effect on a line that both CPUs hold as shared (AMD Zen 4).
#[inline]
pub(super) fn write_header<'a>(header: &Header, pieces: impl IntoIterator<Item = &'a Segment>) {
    let mut rest = &header.0[..];
    for piece in pieces {
        let length = piece.len().min(rest.len());
        if length == BYTES {
            let to = piece.base().cast::<[u8; BYTES]>();
            // SAFETY: guest memory, which the ring's memory keeps mapped. If the driver changes it meanwhile, that is what it gets.
            if unsafe { to.read_unaligned() } != header.0 {
                // SAFETY: as above.
                unsafe { to.write_unaligned(header.0) };
            }
            return;
        }
        // SAFETY: as above.
        unsafe { copy(rest.as_ptr(), piece.base(), length) };
        rest = &rest[length..];
        if rest.is_empty() {
            return;
        }
    }
}

/// Notes what was written, for a migration.
pub(super) fn log(chain: &Chain, mut used: usize, memory: &Memory) {
    for segment in &chain.writable {
        let length = used.min(segment.len());
        if length > 0 {
            memory.log_write(Segment::new(segment.base(), length));
        }
        used -= length;
    }
}
