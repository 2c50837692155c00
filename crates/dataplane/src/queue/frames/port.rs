//! Frames from a switch: one copy from guest to guest, by the receiver's IOThread.

use std::sync::Arc;

use rtvirtio_frames::ethernet::{HEADER_BYTES, MAX_HEAD_BYTES, TAG_BYTES};
use rtvirtio_frames::features;
use rtvirtio_frames::forwarding::Egress;
use rtvirtio_frames::header::{BYTES, Header, MAX_FRAME_BYTES};
use rtvirtio_frames::offload::{MAX_HEADERS, Segments, complete_checksum};
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::Ring;
use rustix::fd::BorrowedFd;

use super::buffers::{Ahead, Buffers, Gathered, write_header};
use super::{Gate, Pass, Served};
use crate::copy::copy;
use crate::drr::{TurnBudget, cost};
use crate::nic::Nic;
use crate::stats::{Dropped, Op, QueueStats};
use crate::switch::{Delivery, Frame, PortReceiver};

/// How long a frame waits for its receiver's driver to have buffers, ns. For so long its sender's chain is in
/// flight.
const MAX_WAIT_NS: u64 = 1_000_000;

/// Frames that a receiver's driver sees together: it goes on with these while others are delivered.
const BATCH: u64 = 32;
/// Of a frame, what is prefetched: what is read first of it is also all of a small one.
pub(super) const START_BYTES: usize = BYTES + MAX_HEAD_BYTES;

/// From the switch.
pub(super) struct PortReceive {
    nic: Arc<Nic>,
    port: PortReceiver,
    buffers: Buffers,
    /// The frame that is next.
    current: Option<Current>,
    /// Where a frame is made complete that the driver cannot take as it is.
    scratch: Box<[u8]>,
    /// Buffers that are next in the ring, unless some of [`Self::buffers`] are.
    ahead: Ahead,
    /// Until when the next frame waits for the driver to have buffers, if it does, or for its time.
    waits_until: Option<u64>,
    /// When the first frame was sent that the last turn gave to the driver, if it gave it any.
    first_posted: Option<u64>,
}

/// What came of [`PortReceive::deliver_plain`].
enum Plain {
    /// Frames are the driver's.
    Delivered,
    /// Nothing waits.
    Nothing,
    /// The next frame is not that simple.
    Other,
}

enum Current {
    /// As it is in its sender's memory.
    Whole(Delivery),
    /// As the driver gets it, in [`PortReceive::scratch`].
    Copied { length: usize, header: Header, posted: u64 },
    /// To be cut, from there.
    Cut { length: usize, segments: Segments, posted: u64 },
}

/// What the driver is given next.
struct Piece {
    /// With the virtio header.
    bytes: usize,
    /// Of its sender's memory.
    pieces: usize,
    posted: u64,
}

impl PortReceive {
    pub(super) fn new(nic: &Arc<Nic>, port: PortReceiver) -> Self {
        Self {
            nic: Arc::clone(nic),
            port,
            buffers: Buffers::new(),
            current: None,
            scratch: vec![0; MAX_FRAME_BYTES].into(),
            ahead: Ahead::new(),
            waits_until: None,
            first_posted: None,
        }
    }

    pub(super) const fn waits_until(&self) -> Option<u64> {
        self.waits_until
    }

    pub(super) const fn first_posted(&self) -> Option<u64> {
        self.first_posted
    }

    pub(super) const fn look_again(&mut self) {
        self.waits_until = None;
    }

    pub(super) fn is_pending(&self, ring_is_pending: impl FnOnce() -> bool) -> bool {
        if self.waits_until.is_some() {
            return ring_is_pending();
        }
        self.current.is_some()
            || !self.port.is_empty()
            || self.port.is_starved() && ring_is_pending()
    }

    pub(super) fn waits_for_driver(&self) -> bool {
        self.waits_until.is_some() || self.port.is_starved()
    }

    pub(super) fn link(&self) -> BorrowedFd<'_> {
        self.port.fd()
    }

    pub(super) fn link_event(&self) {
        self.port.answer();
    }

    pub(super) fn set_waiting(&self, waits: bool) {
        if waits { self.port.wait() } else { self.port.stop_waiting() }
    }

    pub(super) fn set_open(&mut self, is_open: bool) {
        self.port.set_open(is_open);
        if !is_open && let Some(Current::Whole(delivery)) = self.current.take() {
            self.port.release(delivery);
            self.port.wake();
        }
    }

    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        self.buffers.give_back(ring);
        self.ahead.give_back(ring);
    }

    pub(super) fn serve(
        &mut self,
        ring: &mut Ring,
        memory: &Memory,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
        time: u64,
    ) -> Served {
        let served = self.serve_frames(ring, memory, share, stats, gate, time);
        // A driver whose buffers are all held here has no more to offer, and would not be looked at again.
        if self.port.is_starved() && !(self.buffers.is_empty() && self.ahead.is_empty()) {
            self.port.set_starved(false);
        }
        self.port.wake();
        served
    }

    /// Whoever has waited for too long has done so since the turn began, at `time`.
    fn serve_frames(
        &mut self,
        ring: &mut Ring,
        memory: &Memory,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
        time: u64,
    ) -> Served {
        (self.waits_until, self.first_posted) = (None, None);
        if self.port.is_starved() && ring.is_pending() {
            self.port.set_starved(false);
        }
        let negotiated = self.nic.driver_features();
        let is_mergeable = negotiated & features::MRG_RXBUF != 0;
        let mut is_unpublished = false;
        while share.is_left() {
            match self.deliver_plain(ring, memory, share, stats, gate) {
                Plain::Delivered => {
                    is_unpublished = true;
                    continue;
                }
                Plain::Nothing => return Ok((Pass::Empty, is_unpublished)),
                Plain::Other => {}
            }
            let Some(piece) = self.next_piece(negotiated, share, stats) else {
                return Ok((Pass::Empty, is_unpublished));
            };
            self.ahead.give_back(ring);
            let gathered = self.buffers.gather(
                ring,
                piece.bytes,
                is_mergeable,
                share,
                stats,
                &mut is_unpublished,
            );
            let is_open = gate.is_open();
            match gathered? {
                Gathered::NeverEnough => {
                    self.drop_current(Dropped::TooLong, share, stats);
                    continue;
                }
                Gathered::Enough if is_open => {}
                Gathered::Enough => {
                    self.hold_back(time, negotiated, share, stats);
                    return Ok((Pass::Empty, is_unpublished));
                }
                _ if time >= piece.posted.saturating_add(MAX_WAIT_NS) => {
                    let reason = if is_open { Dropped::NoBuffers } else { Dropped::Limit };
                    // Until there are buffers, nobody waits for them again.
                    self.port.set_starved(is_open);
                    self.drop_current(reason, share, stats);
                    continue;
                }
                Gathered::TurnOver => break,
                Gathered::TooFew => {
                    self.waits_until = Some(piece.posted.saturating_add(MAX_WAIT_NS));
                    return Ok((Pass::Empty, is_unpublished));
                }
            }
            stats.start(1);
            self.first_posted.get_or_insert(piece.posted);
            share.ns -= cost::pieces_ns(piece.pieces);
            self.deliver(&piece, negotiated, ring, memory);
            is_unpublished = true;
            let bytes = piece.bytes - BYTES;
            stats.count(Op::Read, bytes as u64);
            gate.pass(bytes);
            share.requests -= 1;
            share.ns -= cost::port_ns(bytes);
        }
        Ok((Pass::More, is_unpublished))
    }

    /// Delivers the next frames as long as each is as nearly all are: complete, without a tag to be put in, and no longer than
    /// the next buffer, which is a single descriptor's.
    fn deliver_plain(
        &mut self,
        ring: &mut Ring,
        memory: &Memory,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
    ) -> Plain {
        if self.current.is_some() || !self.buffers.is_empty() {
            return Plain::Other;
        }
        if self.port.waiting() == 0 {
            return Plain::Nothing;
        }
        if self.port.is_trunk() || !gate.is_open() {
            return Plain::Other;
        }
        let longest = self.longest();
        let (mut frames, mut total) = (0_u64, 0);
        let Self { port, first_posted, ahead, .. } = self;
        port.deliver(|frame| {
            // Those beyond this turn's frames are fetched for the next one.
            ahead.fill(ring, usize::MAX, |buffer| {
                buffer.segment.prefetch_start_to_write(START_BYTES);
            });
            let bytes = frame.length;
            let Some(buffer) = ahead.front() else { return false };
            let is_plain = frame.header == Header::COMPLETE
                && bytes <= longest
                && buffer.is_writable
                && buffer.segment.len() >= BYTES + bytes;
            // How long the others have taken is known by now.
            if !is_plain || frames > 0 && !(share.is_left() && gate.is_open()) {
                return false;
            }
            write_plain(buffer.segment, frame);
            first_posted.get_or_insert(frame.posted);
            if memory.log().is_some() {
                memory.log_write(Segment::new(buffer.segment.base(), BYTES + bytes));
            }
            ring.finish(buffer.id, (BYTES + bytes) as u32);
            ahead.pop();
            (frames, total) = (frames + 1, total + bytes as u64);
            if frames.is_multiple_of(BATCH) {
                ring.flush();
            }
            gate.pass(bytes);
            share.requests -= 1;
            share.ns -= cost::port_ns(bytes) + cost::pieces_ns(frame.rest().len());
            true
        });
        if frames == 0 {
            return Plain::Other;
        }
        ring.flush();
        stats.start(frames);
        stats.count_frames(Op::Read, frames, total);
        Plain::Delivered
    }

    /// The longest frame that is not to be cut, its virtio header not counted.
    fn longest(&self) -> usize {
        usize::from(self.nic.mtu()) + HEADER_BYTES + TAG_BYTES
    }

    /// A frame that was taken is the current one, unless it cannot be delivered.
    fn start(
        &mut self,
        delivery: Delivery,
        negotiated: u64,
        share: &mut TurnBudget,
        stats: &QueueStats,
    ) {
        match self.begin(delivery, negotiated, share) {
            Ok(current) => self.current = Some(current),
            Err(reason) => {
                stats.start(1);
                stats.drop_frame(Op::Read, reason);
                share.ns -= cost::NOTE_NS;
            }
        }
    }

    /// The next piece of the current frame, or of the next one that can be delivered.
    fn next_piece(
        &mut self,
        negotiated: u64,
        share: &mut TurnBudget,
        stats: &QueueStats,
    ) -> Option<Piece> {
        loop {
            match &self.current {
                Some(Current::Whole(delivery)) => {
                    let frame = self.port.frame(delivery)?;
                    let (egress, posted) = (self.egress(frame), frame.posted);
                    let bytes = BYTES + tagged_bytes(frame, egress);
                    let pieces = frame.rest().len();
                    return Some(Piece { bytes, pieces, posted });
                }
                Some(Current::Copied { length, posted, .. }) => {
                    return Some(Piece { bytes: BYTES + length, pieces: 0, posted: *posted });
                }
                Some(Current::Cut { length, segments, posted }) => {
                    let bytes = segments.next_bytes(&self.scratch[..*length]);
                    if bytes > 0 {
                        return Some(Piece { bytes: BYTES + bytes, pieces: 0, posted: *posted });
                    }
                    self.current = None;
                }
                None => {
                    let delivery = self.port.take()?;
                    self.start(delivery, negotiated, share, stats);
                    if self.current.is_none() && !share.is_left() {
                        return None;
                    }
                }
            }
        }
    }

    fn egress(&self, frame: &Frame) -> Egress {
        self.port.egress(frame.origin)
    }

    /// Looks at a frame: whether the driver can take it as it is.
    fn begin(
        &mut self,
        delivery: Delivery,
        negotiated: u64,
        share: &mut TurnBudget,
    ) -> Result<Current, Dropped> {
        let Some(frame) = self.port.frame(&delivery) else { return Err(Dropped::Malformed) };
        let egress = self.egress(frame);
        let length = tagged_bytes(frame, egress);
        let longest = self.longest();
        let is_whole = frame.header.for_driver(negotiated).is_ok();
        let is_too_long =
            length > MAX_FRAME_BYTES || length > longest && frame.header.segmented().is_none();
        if is_too_long || is_whole {
            if is_too_long {
                self.port.release(delivery);
                return Err(Dropped::TooLong);
            }
            return Ok(Current::Whole(delivery));
        }
        let (header, posted) = (frame.header.with_tag_of(egress), frame.posted);
        let length = self.copy_out(delivery, share);
        let whole = &mut self.scratch[..length];
        if header.segmented().is_some() {
            let segments = Segments::new(whole, &header).map_err(|_| Dropped::Malformed)?;
            // The first is the longest.
            if segments.next_bytes(whole) > longest {
                return Err(Dropped::TooLong);
            }
            return Ok(Current::Cut { length, segments, posted });
        }
        complete_checksum(whole, &header).map_err(|_| Dropped::Malformed)?;
        Ok(Current::Copied { length, header: Header::COMPLETE, posted })
    }

    /// Takes a frame out of its sender's memory to [`Self::scratch`], as it leaves, and releases it; its length.
    fn copy_out(&mut self, delivery: Delivery, share: &mut TurnBudget) -> usize {
        let mut at = 0;
        if let Some(frame) = self.port.frame(&delivery) {
            let mut tagged = [0; HEADER_BYTES + 2];
            for part in parts(frame, self.egress(frame), &mut tagged) {
                let length = part.len().min(self.scratch.len() - at);
                // SAFETY: the part is the frame's or its sender's memory, which is mapped while it is not released.
                unsafe { copy(part.base(), self.scratch[at..].as_mut_ptr(), length) };
                at += length;
            }
            // It is copied twice, once from its sender's pieces.
            share.ns -= cost::port_ns(at) + cost::pieces_ns(frame.rest().len());
        }
        self.port.release(delivery);
        at
    }

    /// The limit does not let the current frame pass yet: it waits for its time here. Its sender, whose ring has its frames back in
    /// their order, has it back, and what is behind it when that has waited for as long as a frame may.
    fn hold_back(
        &mut self,
        time: u64,
        negotiated: u64,
        share: &mut TurnBudget,
        stats: &QueueStats,
    ) {
        if let Some(Current::Whole(delivery)) =
            self.current.take_if(|current| matches!(current, Current::Whole(_)))
            && let Some(frame) = self.port.frame(&delivery)
        {
            let told = frame.header.with_tag_of(self.egress(frame)).for_driver(negotiated);
            let (header, posted) = (told.unwrap_or(Header::COMPLETE), frame.posted);
            let length = self.copy_out(delivery, share);
            self.current = Some(Current::Copied { length, header, posted });
        }
        let until = |posted: u64| posted.saturating_add(MAX_WAIT_NS);
        let mut next = self.port.next_posted();
        while share.is_left() && next.is_some_and(|posted| until(posted) <= time) {
            if let Some(delivery) = self.port.take() {
                self.port.release(delivery);
                stats.start(1);
                stats.drop_frame(Op::Read, Dropped::Limit);
                share.ns -= cost::NOTE_NS;
            }
            next = self.port.next_posted();
        }
        // One that comes now is found in time.
        self.waits_until = Some(until(next.unwrap_or(time)));
    }

    /// Gives the driver the piece that is next, for which there are buffers.
    fn deliver(&mut self, piece: &Piece, negotiated: u64, ring: &mut Ring, memory: &Memory) {
        let mut header = Header::COMPLETE;
        match self.current.take() {
            Some(Current::Whole(delivery)) => {
                if let Some(frame) = self.port.frame(&delivery) {
                    let egress = self.egress(frame);
                    let told = frame.header.with_tag_of(egress).for_driver(negotiated);
                    header = told.unwrap_or(Header::COMPLETE);
                    let mut tagged = [0; HEADER_BYTES + 2];
                    self.buffers.fill(parts(frame, egress, &mut tagged));
                }
                self.port.release(delivery);
            }
            Some(Current::Copied { length, header: told, .. }) => {
                header = told;
                self.buffers.fill([part(&self.scratch[..length])].into_iter());
            }
            Some(Current::Cut { length, mut segments, posted }) => {
                let mut space = [0; MAX_HEADERS];
                if let Some((headers, data)) = segments.next(&self.scratch[..length], &mut space) {
                    self.buffers.fill([part(headers), part(&self.scratch[data])].into_iter());
                }
                self.current = Some(Current::Cut { length, segments, posted });
            }
            None => {}
        }
        self.buffers.deliver(piece.bytes, header, ring, memory);
    }

    /// The current frame, or what is left of it, is lost.
    fn drop_current(&mut self, reason: Dropped, share: &mut TurnBudget, stats: &QueueStats) {
        if let Some(Current::Whole(delivery)) = self.current.take() {
            self.port.release(delivery);
        }
        stats.start(1);
        stats.drop_frame(Op::Read, reason);
        share.ns -= cost::NOTE_NS;
    }
}

impl Drop for PortReceive {
    fn drop(&mut self) {
        if let Some(Current::Whole(delivery)) = self.current.take() {
            self.port.release(delivery);
        }
    }
}

/// Bytes of a frame as it leaves.
const fn tagged_bytes(frame: &Frame, egress: Egress) -> usize {
    match egress {
        Egress::Untagged => frame.length,
        Egress::Tagged(_) => frame.length + TAG_BYTES,
    }
}

trait WithTagOf {
    /// Of the frame as it leaves.
    fn with_tag_of(self, egress: Egress) -> Self;
}

impl WithTagOf for Header {
    fn with_tag_of(self, egress: Egress) -> Self {
        match egress {
            Egress::Untagged => self,
            Egress::Tagged(_) => self.with_tag(true),
        }
    }
}

/// Writes a complete frame and its virtio header to a buffer that is long enough.
#[inline]
fn write_plain(mut buffer: Segment, frame: &Frame) {
    write_header(&Header::COMPLETE.in_buffers(1), [&buffer]);
    buffer.advance(BYTES);
    let head = frame.head.bytes();
    if head.len() == MAX_HEAD_BYTES {
        // SAFETY: guest memory, which the ring's memory keeps mapped, and a length that the compiler knows.
        unsafe { std::ptr::copy(head.as_ptr(), buffer.base(), MAX_HEAD_BYTES) };
    } else {
        // SAFETY: as above.
        unsafe { copy(head.as_ptr(), buffer.base(), head.len()) };
    }
    buffer.advance(head.len());
    for part in frame.rest() {
        let length = part.len().min(buffer.len());
        // SAFETY: as above; the part is its sender's memory, which is mapped while the frame is not released.
        unsafe { copy(part.base(), buffer.base(), length) };
        buffer.advance(length);
    }
}

/// Bytes of this process that are only read.
const fn part(bytes: &[u8]) -> Segment {
    Segment::new(bytes.as_ptr().cast_mut(), bytes.len())
}

/// The pieces of a frame as it leaves; `tagged` is where its beginning is put together, if it has a tag.
fn parts<'a>(
    frame: &'a Frame,
    egress: Egress,
    tagged: &'a mut [u8; HEADER_BYTES + 2],
) -> impl Iterator<Item = Segment> {
    let (first, second) = match egress {
        Egress::Untagged => (Segment::EMPTY, part(frame.head.bytes())),
        Egress::Tagged(tag) => {
            let (first, second) = frame.head.with_tag(tag);
            *tagged = first;
            (part(tagged), part(second))
        }
    };
    [first, second].into_iter().chain(frame.rest().iter().copied())
}
