//! Frames to a unix socket and from it. It knows no offloads: none are offered to the driver.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use rtvirtio_frames::ethernet::HEADER_BYTES;
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
use crate::socket::{Next, Outgoing, Socket, is_short_of_memory};
use crate::stats::{Dropped, Op, QueueStats};

/// How long a datagram that the peer had no room for waits before it is sent again, ns: at first, and at most. Each time in a row
/// takes twice as long. A peer that reads has the next frames after no more than twice the time that it took for those
/// before, and one that never reads again costs the IOThread no more than 200 calls a second.
const RETRY_NS: u64 = 20_000;
const MAX_RETRY_NS: u64 = 5_000_000;

/// How long a frame waits for a driver that has made buffers available, but too few for it, to add others, ns. A driver that the
/// host lets run adds some within a millisecond, and a vCPU of an overcommitted host may not run for some tens of these. Frames
/// behind it that would fit come before TCP sends them again, which it does after 200 ms at the earliest (Linux's `TCP_RTO_MIN`).
const MAX_WAIT_NS: u64 = 100_000_000;

/// To the socket.
pub(super) struct SocketTransmit {
    nic: Arc<Nic>,
    socket: Arc<Socket>,
    /// Scratch.
    parts: Vec<Segment>,
    /// Whether the socket takes no more until it says so.
    is_blocked: bool,
    /// Whether the socket has not taken all of the last frame.
    has_rest: bool,
    /// Whether the rest of the last frame waits until the gate opens: the kernel had no memory for it, which makes no socket
    /// say that it takes no more.
    rest_is_held: bool,
    /// How long a datagram, or a rest, waits that is not taken, ns.
    retry_ns: u64,
}

impl SocketTransmit {
    pub(super) fn new(nic: &Arc<Nic>, socket: Arc<Socket>) -> Self {
        let parts = Vec::with_capacity(MAX_PARTS + 1);
        // An earlier session may have left some.
        let has_rest = !socket.outgoing().is_empty();
        let nic = Arc::clone(nic);
        Self {
            nic,
            socket,
            parts,
            is_blocked: false,
            has_rest,
            rest_is_held: false,
            retry_ns: RETRY_NS,
        }
    }

    /// Whether a turn would find something to do, if the ring has a frame that may pass, or not.
    pub(super) const fn is_pending(&self, is_open: bool, has_frame: bool) -> bool {
        let has_rest = self.has_rest && (is_open || !self.rest_is_held);
        !self.is_blocked && (is_open && has_frame || has_rest)
    }

    pub(super) const fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// What is waited for when the socket takes no more.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.is_blocked.then(|| self.socket.as_fd())
    }

    pub(super) const fn link_event(&mut self) {
        self.is_blocked = false;
    }

    pub(super) fn serve(
        &mut self,
        ring: &mut Ring,
        chain: &mut Chain,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
    ) -> Served {
        let socket = Arc::clone(&self.socket);
        let mut outgoing = socket.outgoing();
        let served = self.serve_frames(&mut outgoing, ring, chain, share, stats, gate);
        self.has_rest = !outgoing.is_empty();
        served
    }

    /// A socket that takes no more is back pressure: frames stay in the ring.
    fn serve_frames(
        &mut self,
        outgoing: &mut Outgoing,
        ring: &mut Ring,
        chain: &mut Chain,
        share: &mut TurnBudget,
        stats: &QueueStats,
        gate: &mut Gate<'_>,
    ) -> Served {
        let negotiated = self.nic.driver_features();
        let socket = Arc::clone(&self.socket);
        let mut is_unpublished = false;
        while share.is_left() {
            let flushed = socket.flush(outgoing);
            self.rest_is_held = flushed.is_err_and(is_short_of_memory);
            match flushed {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    self.is_blocked = true;
                    return Ok((Pass::Empty, is_unpublished));
                }
                Err(_) if self.rest_is_held => {
                    self.hold(gate);
                    return Ok((Pass::Empty, is_unpublished));
                }
                // There is nobody any more to have the rest.
                Err(_) => outgoing.discard(),
            }
            if !gate.is_open() || !take(ring, chain, share)? {
                return Ok((Pass::Empty, is_unpublished));
            }
            let sent = self.send(outgoing, chain, negotiated);
            if sent == Err(None) {
                ring.untake(chain.id);
                match socket.says_when_writable() {
                    true => self.is_blocked = true,
                    false => self.hold(gate),
                }
                return Ok((Pass::Empty, is_unpublished));
            }
            self.retry_ns = RETRY_NS;
            is_unpublished = true;
            stats.start(1);
            match sent {
                Ok(bytes) => stats.count(Op::Write, bytes as u64),
                Err(reason) => stats.drop_frame(Op::Write, reason.unwrap_or(Dropped::Link)),
            }
            ring.finish(chain.id, 0);
            let sent = sent.unwrap_or(0);
            gate.pass(sent);
            share.requests -= 1;
            share.ns -= cost::tap_ns(sent);
        }
        Ok((Pass::More, is_unpublished))
    }

    fn hold(&mut self, gate: &mut Gate<'_>) {
        gate.close(self.retry_ns);
        self.retry_ns = (2 * self.retry_ns).min(MAX_RETRY_NS);
    }

    /// Sends a frame; its length. `None`: the socket takes none now.
    fn send(
        &mut self,
        outgoing: &mut Outgoing,
        chain: &mut Chain,
        negotiated: u64,
    ) -> Result<usize, Option<Dropped>> {
        let malformed = Err(Some(Dropped::Malformed));
        let mut header = [0; BYTES];
        if !read_header(&mut chain.readable, &mut header) {
            return malformed;
        }
        let length: usize = chain.readable.iter().map(Segment::len).sum();
        let fits = (HEADER_BYTES..=MAX_FRAME_BYTES).contains(&length);
        let is_complete = Header(header).from_driver(negotiated & !features::OFFLOADS).is_ok();
        if !fits || !is_complete || chain.readable.len() > MAX_PARTS {
            return malformed;
        }
        self.parts.clear();
        self.parts.push(Segment::EMPTY);
        self.parts.extend_from_slice(&chain.readable);
        // SAFETY: the pieces are guest memory, which the ring's memory keeps mapped.
        match unsafe { self.socket.send(outgoing, &mut self.parts, length) } {
            Ok(()) => Ok(length),
            Err(Errno::AGAIN) => Err(None),
            // No buffer of the socket's holds it.
            Err(Errno::MSGSIZE) => Err(Some(Dropped::TooLong)),
            Err(_) => Err(Some(Dropped::Link)),
        }
    }
}

/// From the socket.
pub(super) struct SocketReceive {
    nic: Arc<Nic>,
    socket: Arc<Socket>,
    buffers: Buffers,
    /// Whether the socket, or what was received of it, may have a frame.
    is_ready: bool,
    /// Whether there is no peer, or one that says what is no frame.
    has_failed: bool,
    /// Whether the driver has made too few buffers available for the next frame.
    is_short: bool,
    shortage: Shortage,
}

/// For how long frames wait for which the driver has made buffers available, but too few.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shortage {
    /// None waits.
    None,
    /// The next one waits until then, ns of [`crate::clock::now`].
    Until(u64),
    /// One has waited for too long. Others do not wait before the driver has added buffers, or has taken a frame.
    Expired,
}

impl SocketReceive {
    pub(super) fn new(nic: &Arc<Nic>, socket: Arc<Socket>) -> Self {
        let buffers = Buffers::new();
        let nic = Arc::clone(nic);
        Self {
            nic,
            socket,
            buffers,
            is_ready: true,
            has_failed: false,
            is_short: false,
            shortage: Shortage::None,
        }
    }

    /// Until when the next frame waits for the driver to add buffers, if it does; ns.
    pub(super) const fn waits_until(&self) -> Option<u64> {
        match self.shortage {
            Shortage::Until(until) if self.is_short => Some(until),
            _ => None,
        }
    }

    /// The next turn finds out whether the next frame waits for buffers any longer.
    pub(super) const fn look_again(&mut self) {
        self.is_short = false;
    }

    pub(super) fn is_pending(&self, ring_is_pending: impl FnOnce() -> bool) -> bool {
        self.is_ready && (!self.wants_buffers() || ring_is_pending())
    }

    fn wants_buffers(&self) -> bool {
        self.buffers.is_empty() || self.is_short
    }

    pub(super) fn waits_for_driver(&self, ring_is_pending: bool) -> bool {
        // What a driver adds while a frame waits for it is found when it is asked for kicks.
        self.is_short || self.buffers.is_empty() && !ring_is_pending
    }

    /// What is waited for when buffers are there and no frame.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_ready && !self.has_failed).then(|| self.socket.as_fd())
    }

    pub(super) const fn link_event(&mut self) {
        self.is_ready = true;
    }

    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        (self.is_short, self.shortage) = (false, Shortage::None);
        self.buffers.give_back(ring);
    }

    /// Whether the next frame, for which there are too few buffers in a turn that has begun at `time`, waits for others.
    fn waits_for_more(&mut self, time: u64) -> bool {
        // A driver without any is back pressure: nothing could be given to it.
        if self.buffers.is_empty() {
            return true;
        }
        match self.shortage {
            Shortage::None => {
                self.shortage = Shortage::Until(time.saturating_add(MAX_WAIT_NS));
                true
            }
            Shortage::Until(until) if time < until => true,
            Shortage::Until(_) | Shortage::Expired => {
                self.shortage = Shortage::Expired;
                false
            }
        }
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
        self.is_short = false;
        if self.shortage == Shortage::Expired && ring.is_pending() {
            self.shortage = Shortage::None;
        }
        let is_mergeable = self.nic.driver_features() & features::MRG_RXBUF != 0;
        let socket = Arc::clone(&self.socket);
        let mut incoming = socket.incoming();
        let mut is_unpublished = false;
        while share.is_left() {
            let length = match incoming.next() {
                Next::Frame(length) => length,
                Next::Incomplete if !self.has_failed => match socket.receive(&mut incoming) {
                    Ok(None) => {
                        // A peer can have a frame's bytes come one by one.
                        if matches!(incoming.next(), Next::Incomplete) {
                            share.ns -= cost::tap_ns(0);
                        }
                        continue;
                    }
                    Ok(Some(reason)) => {
                        stats.start(1);
                        stats.drop_frame(Op::Read, reason);
                        share.requests -= 1;
                        share.ns -= cost::tap_ns(0);
                        continue;
                    }
                    Err(errno) => {
                        (self.is_ready, self.has_failed) = (false, errno != Errno::AGAIN);
                        return Ok((Pass::Empty, is_unpublished));
                    }
                },
                Next::Incomplete | Next::Invalid => {
                    (self.is_ready, self.has_failed) = (false, true);
                    return Ok((Pass::Empty, is_unpublished));
                }
            };
            let wanted = BYTES + length;
            let gathered = self.buffers.gather(
                ring,
                wanted,
                is_mergeable,
                share,
                stats,
                &mut is_unpublished,
            )?;
            if gathered == Gathered::TurnOver {
                break;
            }
            self.is_short = gathered == Gathered::TooFew && self.waits_for_more(time);
            if self.is_short || !gate.is_open() {
                return Ok((Pass::Empty, is_unpublished));
            }
            stats.start(1);
            if gathered == Gathered::Enough {
                self.shortage = Shortage::None;
                let frame = incoming.frame(length);
                let frame = Segment::new(frame.as_ptr().cast_mut(), frame.len());
                self.buffers.fill([frame].into_iter());
                self.buffers.deliver(wanted, Header::COMPLETE, ring, memory);
                is_unpublished = true;
                stats.count(Op::Read, length as u64);
            } else {
                let reason = match gathered {
                    Gathered::TooFew => Dropped::NoBuffers,
                    _ => Dropped::TooLong,
                };
                stats.drop_frame(Op::Read, reason);
            }
            incoming.consume(length);
            gate.pass(length);
            share.requests -= 1;
            share.ns -= cost::tap_ns(length);
        }
        Ok((Pass::More, is_unpublished))
    }
}
