//! Frames to a switch: where each goes is said by the sender's IOThread, and all of it but its beginning stays where it is.

use std::sync::Arc;

use rtvirtio_frames::ethernet::{MAX_HEAD_BYTES, TAG_BYTES};
use rtvirtio_frames::forwarding::{Destination, LastFrame, Refused};
use rtvirtio_frames::header::{BYTES, Header, MAX_FRAME_BYTES};
use rtvirtio_frames::limit::Limit;
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::ring::Ring;
use rustix::fd::BorrowedFd;

use super::buffers::Ahead;
use super::port::START_BYTES;
use super::{Gate, Pass, Served, read_header, take};
use crate::clock::now;
use crate::copy::copy;
use crate::drr::{TurnBudget, cost};
use crate::nic::Nic;
use crate::stats::{Dropped, Op, QueueStats};
use crate::switch::{Frame, PortSender};

const fn seconds(ns: u64) -> u32 {
    (ns / 1_000_000_000) as u32
}

/// To the switch.
pub(super) struct PortTransmit {
    nic: Arc<Nic>,
    port: PortSender,
    broadcast: Arc<Limit>,
    /// Frames that are next in the ring, during a turn.
    ahead: Ahead,
}

impl PortTransmit {
    pub(super) fn new(nic: &Arc<Nic>, port: PortSender) -> Self {
        let broadcast = port.broadcast();
        Self { nic: Arc::clone(nic), port, broadcast, ahead: Ahead::new() }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.port.has_ended()
    }

    /// Whether a turn would find something to do, if the ring has a frame that may pass, or not.
    pub(super) fn is_pending(&self, has_frame: impl FnOnce() -> bool) -> bool {
        self.has_ended() || !self.port.is_full() && has_frame()
    }

    pub(super) const fn in_flight(&self) -> u16 {
        self.port.in_flight() as u16
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

    /// Gives back to the ring what has arrived by `time`, ns.
    pub(super) fn reap(&mut self, ring: &mut Ring, stats: &QueueStats, time: u64) -> bool {
        let (mut has_ended, mut frames, mut bytes) = (false, 0, 0);
        // How many the turn of that time had posted.
        let (mut ended, mut posted) = (0, 0);
        while let Some(frame) = self.port.take_ended() {
            frames += u64::from(frame.length > 0);
            bytes += frame.length as u64;
            if frame.posted != posted {
                stats.end_frames(ended, time.saturating_sub(posted));
                (ended, posted) = (0, frame.posted);
            }
            ended += 1;
            ring.finish(frame.id, 0);
            has_ended = true;
        }
        if has_ended {
            stats.count_frames(Op::Write, frames, bytes);
            stats.end_frames(ended, time.saturating_sub(posted));
        }
        has_ended
    }

    pub(super) fn serve(
        &mut self,
        ring: &mut Ring,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
        time: u64,
    ) -> Served {
        let mut is_unpublished = self.reap(ring, stats, time);
        self.port.look();
        let (mut pass, mut last) = (Pass::More, LastFrame::default());
        while share.is_left() {
            if !gate.is_open() || self.port.is_full() {
                pass = Pass::Empty;
                break;
            }
            let most = gate.most(share, cost::PORT_FRAME_NS).min(self.port.room());
            self.ahead.fill(ring, most, |frame| frame.segment.prefetch_start(START_BYTES));
            let Some(frame) = self.port.next() else { continue };
            if let Some(single) = self.ahead.front() {
                frame.id = single.id;
                frame.rest = if single.is_writable { Segment::EMPTY } else { single.segment };
                frame.chain.readable.clear();
                self.ahead.pop();
                self.send(share, stats, gate, time, &mut last);
                continue;
            }
            match take(ring, &mut frame.chain, share) {
                Ok(true) => {
                    (frame.id, frame.rest) = (frame.chain.id, Segment::EMPTY);
                    self.send(share, stats, gate, time, &mut last);
                }
                Ok(false) => {
                    pass = Pass::Empty;
                    break;
                }
                Err(error) => {
                    stats.lose(Dropped::NoBuffers, self.port.post());
                    return Err(error);
                }
            }
        }
        self.ahead.give_back(ring);
        stats.lose(Dropped::NoBuffers, self.port.post());
        if self.has_ended() {
            is_unpublished |= self.reap(ring, stats, now());
        }
        Ok((pass, is_unpublished))
    }

    /// Sends the frame whose chain the next slot has, or counts why it goes nowhere.
    #[inline]
    fn send(
        &mut self,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
        time: u64,
        last: &mut LastFrame,
    ) {
        stats.start(1);
        let (bytes, destination) = match self.forward(time, last) {
            Ok((bytes, destination)) => (bytes, Some(destination)),
            Err(reason) => {
                stats.drop_frame(Op::Write, reason);
                (0, None)
            }
        };
        let (taken, refused) = self.port.send(destination);
        gate.pass(bytes);
        match (taken, refused) {
            _ if destination.is_none() => {}
            (0, 0) => stats.drop_frame(Op::Write, Dropped::NoReceiver),
            (0, _) => stats.drop_frame(Op::Write, Dropped::NoBuffers),
            (_, 0) => {}
            (_, refused) => stats.lose(Dropped::NoBuffers, refused),
        }
        share.requests -= 1;
        // Its bytes are copied by its receivers.
        share.ns -= cost::PORT_FRAME_NS + i64::from(taken + refused) * cost::NOTE_NS;
    }

    /// Says where the next frame goes; its length.
    #[inline]
    fn forward(
        &mut self,
        time: u64,
        last: &mut LastFrame,
    ) -> Result<(usize, Destination), Dropped> {
        let next = self.port.next_with_ports();
        let (number, forwarding, frame) = next.ok_or(Dropped::Malformed)?;
        frame.posted = time;
        let header = read_start(frame).ok_or(Dropped::Malformed)?;
        let rest: usize = frame.rest().iter().map(Segment::len).sum();
        let length = frame.head.bytes().len() + rest;
        if length > MAX_FRAME_BYTES {
            return Err(Dropped::Malformed);
        }
        frame.header = match Header(header) {
            header if header.is_complete() => Header::COMPLETE,
            header => {
                let header = header.from_driver(self.nic.driver_features());
                let fitting = header.and_then(|header| header.fitting(&frame.head, length));
                fitting.map_err(|_| Dropped::Malformed)?
            }
        };
        frame.length = length;
        let way = forwarding.forward(number, &mut frame.head, seconds(time), last);
        let (origin, destination) = way.map_err(dropped)?;
        frame.origin = origin;
        if frame.origin.tag.is_some() {
            frame.length -= TAG_BYTES;
            frame.header = frame.header.with_tag(false);
        }
        if !matches!(destination, Destination::Port(_)) {
            if self.broadcast.ready_at() > time {
                return Err(Dropped::Broadcast);
            }
            self.broadcast.pass(time, length);
        }
        Ok((length, destination))
    }
}

const fn dropped(refused: Refused) -> Dropped {
    match refused {
        Refused::Spoofed => Dropped::Spoofed,
        Refused::Vlan => Dropped::Vlan,
        Refused::NoReceiver => Dropped::NoReceiver,
    }
}

/// Reads the virtio header and the beginning of a frame off its chain; `None`: it is no frame.
#[inline]
fn read_start(frame: &mut Frame) -> Option<[u8; BYTES]> {
    if frame.rest.is_empty() {
        let mut header = [0; BYTES];
        let is_frame = read_header(&mut frame.chain.readable, &mut header) && read_head(frame);
        return is_frame.then_some(header);
    }
    // Nearly all lie so.
    let length = frame.rest.len().checked_sub(BYTES)?.min(MAX_HEAD_BYTES);
    // SAFETY: guest memory, which the ring's memory keeps mapped. It is read once.
    let header = unsafe { frame.rest.base().cast::<[u8; BYTES]>().read_unaligned() };
    frame.rest.advance(BYTES);
    let (from, to) = (frame.rest.base(), frame.head.buffer().as_mut_ptr());
    if length == MAX_HEAD_BYTES {
        // SAFETY: as above. Of a length that the compiler knows: it takes four registers.
        unsafe { std::ptr::copy(from, to, MAX_HEAD_BYTES) };
    } else {
        // SAFETY: as above.
        unsafe { copy(from, to, length) };
    }
    frame.rest.advance(length);
    frame.head.set_length(length).then_some(header)
}

/// Reads the beginning of a frame off its chain; false: it is no frame.
fn read_head(frame: &mut Frame) -> bool {
    let (mut read, mut used) = (0, 0);
    let buffer = frame.head.buffer();
    for segment in &mut frame.chain.readable {
        let length = segment.len().min(MAX_HEAD_BYTES - read);
        // SAFETY: guest memory, which the ring's memory keeps mapped. It is read once.
        unsafe { copy(segment.base(), buffer[read..].as_mut_ptr(), length) };
        read += length;
        segment.advance(length);
        if !segment.is_empty() {
            break;
        }
        used += 1;
        if read == MAX_HEAD_BYTES {
            break;
        }
    }
    frame.chain.readable.drain(..used);
    frame.head.set_length(read)
}
