//! Frames to a TAP of the host, those of a turn by one system call, and from it, each by one.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use rtvirtio_frames::ethernet::{HEADER_BYTES, TAG_BYTES};
use rtvirtio_frames::features;
use rtvirtio_frames::header::{BYTES, Header, MAX_FRAME_BYTES};
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::{Chain, Ring};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;

use super::buffers::{Buffers, Gathered};
use super::{Gate, MAX_PARTS, Pass, Served, read_header, take};
use crate::drr::{TurnBudget, cost};
use crate::nic::Nic;
use crate::stats::{Dropped, Op, QueueStats};
use crate::tap::{Batch, Tap};

/// To the TAP.
pub(super) struct TapTransmit {
    nic: Arc<Nic>,
    tap: Arc<Tap>,
    batch: Batch,
}

impl TapTransmit {
    pub(super) fn new(nic: &Arc<Nic>, tap: Arc<Tap>) -> Self {
        Self { nic: Arc::clone(nic), tap, batch: Batch::new(MAX_PARTS) }
    }

    pub(super) fn serve(
        &mut self,
        ring: &mut Ring,
        chain: &mut Chain,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
    ) -> Served {
        let negotiated = self.nic.driver_features();
        let mut is_unpublished = false;
        let pass = loop {
            if !share.is_left() {
                break Ok(Pass::More);
            }
            if !gate.is_open() {
                break Ok(Pass::Empty);
            }
            match take(ring, chain, share) {
                Ok(true) => {}
                Ok(false) => break Ok(Pass::Empty),
                Err(error) => break Err(error),
            }
            is_unpublished = true;
            stats.start(1);
            if !self.batch.has_room(chain.readable.len()) {
                self.send(ring, stats);
            }
            let bytes = self.add(chain, negotiated);
            gate.pass(bytes);
            share.requests -= 1;
            share.ns -= cost::tap_ns(bytes);
        };
        // Also if the driver has broken the ring behind them.
        self.send(ring, stats);
        Ok((pass?, is_unpublished))
    }

    /// Adds a frame to those that are sent next; its length without the header, 0 of one that is malformed.
    fn add(&mut self, chain: &mut Chain, negotiated: u64) -> usize {
        let mut header = [0; BYTES];
        let has_header = read_header(&mut chain.readable, &mut header);
        let length: usize = chain.readable.iter().map(Segment::len).sum();
        let fits = (HEADER_BYTES..=MAX_FRAME_BYTES).contains(&length);
        match Header(header).from_driver(negotiated) {
            Ok(header) if has_header && fits && chain.readable.len() <= MAX_PARTS => {
                // SAFETY: guest memory, which the ring's memory keeps mapped.
                unsafe { self.batch.add(chain.id, &header, &chain.readable, length) };
                length
            }
            _ => {
                self.batch.add_malformed(chain.id);
                0
            }
        }
    }

    /// Sends what has been added, and gives it back to the ring in the order in which it was taken.
    fn send(&mut self, ring: &mut Ring, stats: &QueueStats) {
        // SAFETY: guest memory, which the ring's memory keeps mapped.
        for frame in unsafe { self.batch.write(&self.tap) } {
            match frame.outcome {
                Ok(()) => stats.count(Op::Write, frame.bytes as u64),
                // As on a wire: it is gone, and counted.
                Err(reason) => stats.drop_frame(Op::Write, reason),
            }
            ring.finish(frame.id, 0);
        }
        self.batch.clear();
    }
}

/// From the TAP.
pub(super) struct TapReceive {
    nic: Arc<Nic>,
    tap: Arc<Tap>,
    buffers: Buffers,
    /// Scratch.
    parts: Vec<Segment>,
    /// Where the end of a frame goes for which the buffers are too small.
    spill: Box<[u8]>,
    /// Whether the TAP may have a frame.
    ready: bool,
    /// Whether it cannot be waited for.
    failed: bool,
}

impl TapReceive {
    pub(super) fn new(nic: &Arc<Nic>, tap: Arc<Tap>) -> Self {
        Self {
            nic: Arc::clone(nic),
            tap,
            buffers: Buffers::new(),
            parts: Vec::with_capacity(MAX_PARTS + 2),
            spill: vec![0; MAX_FRAME_BYTES].into(),
            ready: true,
            failed: false,
        }
    }

    pub(super) fn is_pending(&self, ring_is_pending: impl FnOnce() -> bool) -> bool {
        self.ready && (!self.buffers.is_empty() || ring_is_pending())
    }

    pub(super) fn waits_for_driver(&self, ring_is_pending: bool) -> bool {
        self.buffers.is_empty() && !ring_is_pending
    }

    /// What is waited for when buffers are there and no frame.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        (!self.ready && !self.failed).then(|| self.tap.as_fd())
    }

    pub(super) const fn link_event(&mut self, failed: bool) {
        (self.ready, self.failed) = (true, failed);
    }

    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        self.buffers.give_back(ring);
    }

    pub(super) fn serve(
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
            0 => usize::from(self.nic.mtu()) + HEADER_BYTES + TAG_BYTES,
            _ => MAX_FRAME_BYTES,
        };
        let mut is_unpublished = false;
        while share.is_left() {
            // A frame that needs less than the longest one has may fit all the same.
            let wanted = BYTES + longest;
            let _: Gathered = self.buffers.gather(
                ring,
                wanted,
                is_mergeable,
                share,
                stats,
                &mut is_unpublished,
            )?;
            if self.buffers.is_empty() || !gate.is_open() {
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
            share.ns -= cost::tap_ns(received);
            let fits = (BYTES + HEADER_BYTES..=self.buffers.bytes()).contains(&received);
            match header.for_driver(negotiated) {
                Ok(header) if fits => {
                    self.buffers.deliver(received, header, ring, memory);
                    is_unpublished = true;
                    stats.count(Op::Read, (received - BYTES) as u64);
                }
                Ok(_) => stats.drop_frame(Op::Read, Dropped::TooLong),
                // Of another session's offloads.
                Err(_) => stats.drop_frame(Op::Read, Dropped::Malformed),
            }
        }
        Ok((Pass::More, is_unpublished))
    }

    /// Reads a frame behind where its header will be; bytes with the header.
    fn receive(&mut self, header: &mut Header) -> Result<usize, Errno> {
        self.parts.clear();
        self.parts.push(Segment::new(header.0.as_mut_ptr(), BYTES));
        self.parts.extend(self.buffers.segments(BYTES));
        self.parts.push(Segment::new(self.spill.as_mut_ptr(), self.spill.len()));
        // SAFETY: header and spill are this process's own, the rest is guest memory that the ring's
        // memory keeps mapped.
        unsafe { self.tap.receive(&self.parts) }
    }
}
