//! Frames of a network device: from the driver to its link, and from there to the driver. The link is a TAP of
//! the host (`tap`), a socket (`socket`) or a port of a switch (`port_transmit`, `port`).
//!
//! A frame is at most 64 KiB and may lie in several of the driver's buffers, which are taken before a frame is
//! there and given back when the queue stops (`buffers`).
//!
//! A turn ends by what its frames cost the IOThread, estimated ([`crate::drr::cost`]).

use std::sync::Arc;

use rtvirtio_frames::header::BYTES;
use rtvirtio_frames::limit::Limit;
use rtvirtio_frames::promise::Reservation;
use rtvirtio_virtq::Segment;
use rtvirtio_virtq::memory::Memory;
use rtvirtio_virtq::ring::{Chain, Ring, RingError};
use rustix::event::PollFlags;
use rustix::fd::BorrowedFd;

use super::Pass;
use crate::clock::now;
use crate::copy::copy;
use crate::drr::{TurnBudget, cost};
use crate::nic::{Link, Nic, Terms};
use crate::stats::QueueStats;
use crate::switch::{PortReceiver, PortSender};

mod buffers;
mod port;
mod port_transmit;
mod socket;
mod tap;
#[cfg(test)]
mod turns;

use port::PortReceive;
use port_transmit::PortTransmit;
use socket::{SocketReceive, SocketTransmit};
use tap::{TapReceive, TapTransmit};

/// Pieces of one frame (`IOV_MAX` less header and spill).
const MAX_PARTS: usize = 1000;

/// What a queue of a network device does.
pub(super) struct Frames {
    direction: Direction,
    terms: Terms,
    /// When the next frame may pass, while one may not or was not taken by the link, ns of [`now`].
    held_until: Option<u64>,
    /// When its last turn began that left frames because of the limit, or for want of buffers, ns of [`now`].
    blocked_at: u64,
}

enum Direction {
    TapTransmit(Box<TapTransmit>),
    TapReceive(Box<TapReceive>),
    SocketTransmit(SocketTransmit),
    SocketReceive(SocketReceive),
    PortTransmit(Box<PortTransmit>),
    PortReceive(Box<PortReceive>),
}

/// A turn's outcome, and whether something is to be shown to the driver.
type Served = Result<(Pass, bool), RingError>;

impl Frames {
    /// Of the virtqueue `index`; `None`: the device has none, or it is served.
    pub(super) fn new(nic: &Arc<Nic>, index: u16, is_enabled: bool) -> Option<Self> {
        let (pair, is_receive) = (index / 2, index.is_multiple_of(2));
        let direction = match nic.attached() {
            Link::Taps(taps) => {
                let tap = Arc::clone(taps.get(usize::from(pair))?);
                match is_receive {
                    true => Direction::TapReceive(Box::new(TapReceive::new(nic, tap))),
                    false => Direction::TapTransmit(Box::new(TapTransmit::new(nic, tap))),
                }
            }
            Link::Socket(_) if pair > 0 => return None,
            Link::Socket(socket) => {
                let socket = Arc::clone(socket);
                match is_receive {
                    true => Direction::SocketReceive(SocketReceive::new(nic, socket)),
                    false => Direction::SocketTransmit(SocketTransmit::new(nic, socket)),
                }
            }
            Link::Port { switch, number, .. } => match is_receive {
                true => {
                    let port = PortReceiver::claim(switch, *number, pair)?;
                    Direction::PortReceive(Box::new(PortReceive::new(nic, port)))
                }
                false => {
                    let port = PortSender::claim(switch, *number, pair)?;
                    Direction::PortTransmit(Box::new(PortTransmit::new(nic, port)))
                }
            },
        };
        let terms = nic.terms(index);
        let mut frames = Self { direction, terms, held_until: None, blocked_at: 0 };
        frames.set_open(is_enabled);
        Some(frames)
    }

    /// When the next frame may pass or is to be tried again, or waits for buffers no longer, if one waits; ns.
    pub(super) fn held_until(&self) -> Option<u64> {
        let starved = match &self.direction {
            Direction::SocketReceive(receive) => receive.waits_until(),
            Direction::PortReceive(receive) => receive.waits_until(),
            _ => None,
        };
        [self.held_until, starved].into_iter().flatten().min()
    }

    pub(super) const fn reservation(&self) -> Option<Reservation> {
        self.terms.promise
    }

    /// Its device's have been changed. What was held back by the limit before is looked at anew.
    pub(super) fn set_terms(&mut self, terms: Terms) {
        self.terms = terms;
        self.release();
    }

    /// Since when the first frame of the last turn was there, ns of [`now`]: a port's senders have said when they sent it, and of
    /// others it is known when there was none (`seen`). Time in which the limit or the driver held it back is no wait.
    pub(super) fn waited_since(&self, seen: u64) -> u64 {
        match &self.direction {
            Direction::PortReceive(receive) => match receive.first_posted() {
                Some(posted) if posted > self.blocked_at => posted.min(seen),
                _ => seen,
            },
            _ => seen,
        }
    }

    /// It may by now.
    pub(super) fn release(&mut self) {
        self.held_until = None;
        self.look_again();
    }

    /// What waits for buffers is looked at anew.
    fn look_again(&mut self) {
        match &mut self.direction {
            Direction::SocketReceive(receive) => receive.look_again(),
            Direction::PortReceive(receive) => receive.look_again(),
            _ => {}
        }
    }

    pub(super) const fn is_transmit(&self) -> bool {
        match self.direction {
            Direction::TapTransmit(_)
            | Direction::SocketTransmit(_)
            | Direction::PortTransmit(_) => true,
            Direction::TapReceive(_) | Direction::SocketReceive(_) | Direction::PortReceive(_) => {
                false
            }
        }
    }

    /// Whether what a turn takes ends later, when its receiver has it.
    pub(super) const fn are_lent(&self) -> bool {
        matches!(self.direction, Direction::PortTransmit(_))
    }

    /// A turn, which has begun at `time`, ns of [`now`].
    pub(super) fn serve(
        &mut self,
        ring: &mut Ring,
        chain: &mut Chain,
        memory: &Memory,
        share: &mut TurnBudget,
        stats: &QueueStats,
        time: u64,
    ) -> Served {
        let mut gate = Gate { limit: self.terms.limit.as_deref(), time: 0, closed: None };
        let served = match &mut self.direction {
            Direction::TapTransmit(transmit) => {
                transmit.serve(ring, chain, share, stats, &mut gate)
            }
            Direction::TapReceive(receive) => receive.serve(ring, memory, share, stats, &mut gate),
            Direction::SocketTransmit(transmit) => {
                transmit.serve(ring, chain, share, stats, &mut gate)
            }
            Direction::SocketReceive(receive) => {
                receive.serve(ring, memory, share, stats, &mut gate, time)
            }
            Direction::PortTransmit(transmit) => {
                transmit.serve(ring, share, stats, &mut gate, time)
            }
            Direction::PortReceive(receive) => {
                receive.serve(ring, memory, share, stats, &mut gate, time)
            }
        };
        self.held_until = gate.closed;
        if self.terms.promise.is_some() && self.held_until().is_some() {
            self.blocked_at = time;
        }
        served
    }

    /// Gives back to the ring what has arrived, of a queue that takes nothing more; whether there was something.
    pub(super) fn reap(&mut self, ring: &mut Ring, stats: &QueueStats, time: u64) -> bool {
        match &mut self.direction {
            Direction::PortTransmit(transmit) => transmit.reap(ring, stats, time),
            _ => false,
        }
    }

    /// Whether a turn would find something to do. The ring is looked at only where that decides: each look takes a cache
    /// line away from the driver's CPU, which writes it.
    pub(super) fn is_pending(&self, ring_is_pending: impl FnOnce() -> bool) -> bool {
        let is_open = self.held_until.is_none();
        match &self.direction {
            Direction::TapTransmit(_) => is_open && ring_is_pending(),
            Direction::TapReceive(receive) => is_open && receive.is_pending(ring_is_pending),
            Direction::SocketTransmit(transmit) => {
                transmit.is_pending(is_open, is_open && ring_is_pending())
            }
            Direction::SocketReceive(receive) => is_open && receive.is_pending(ring_is_pending),
            Direction::PortTransmit(transmit) => {
                transmit.is_pending(|| is_open && ring_is_pending())
            }
            Direction::PortReceive(receive) => is_open && receive.is_pending(ring_is_pending),
        }
    }

    /// Whether frames have arrived that are to go back to the ring.
    pub(super) fn has_ended(&self) -> bool {
        matches!(&self.direction, Direction::PortTransmit(transmit) if transmit.has_ended())
    }

    /// Frames that somebody else has.
    pub(super) fn in_flight(&self) -> u16 {
        match &self.direction {
            Direction::PortTransmit(transmit) => transmit.in_flight(),
            _ => 0,
        }
    }

    /// Whether it is the driver that is waited for.
    pub(super) fn waits_for_driver(&self, ring_is_pending: bool) -> bool {
        let is_open = self.held_until.is_none();
        match &self.direction {
            Direction::TapTransmit(_) | Direction::PortTransmit(_) => is_open,
            Direction::TapReceive(receive) => is_open && receive.waits_for_driver(ring_is_pending),
            Direction::SocketTransmit(transmit) => is_open && !transmit.is_blocked(),
            Direction::SocketReceive(receive) => {
                is_open && receive.waits_for_driver(ring_is_pending)
            }
            Direction::PortReceive(receive) => is_open && receive.waits_for_driver(),
        }
    }

    /// What is waited for beside the driver, and for what.
    pub(super) fn link(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let (fd, flags) = match &self.direction {
            Direction::TapTransmit(_) => (None, PollFlags::OUT),
            Direction::TapReceive(receive) => (receive.link(), PollFlags::IN),
            Direction::SocketTransmit(transmit) => (transmit.link(), PollFlags::OUT),
            Direction::SocketReceive(receive) => (receive.link(), PollFlags::IN),
            Direction::PortTransmit(transmit) => (Some(transmit.link()), PollFlags::IN),
            Direction::PortReceive(receive) => (Some(receive.link()), PollFlags::IN),
        };
        Some((fd?, flags))
    }

    /// The link has something, or has failed.
    pub(super) fn link_event(&mut self, failed: bool) {
        match &mut self.direction {
            Direction::TapTransmit(_) => {}
            Direction::TapReceive(receive) => receive.link_event(failed),
            Direction::SocketTransmit(transmit) => transmit.link_event(),
            Direction::SocketReceive(receive) => receive.link_event(),
            Direction::PortTransmit(transmit) => transmit.link_event(),
            Direction::PortReceive(receive) => receive.link_event(),
        }
    }

    /// Whoever has something for it from now on has to wake it, or not.
    pub(super) fn set_waiting(&self, waits: bool) {
        match &self.direction {
            Direction::PortTransmit(transmit) => transmit.set_waiting(waits),
            Direction::PortReceive(receive) => receive.set_waiting(waits),
            // The kernel says so.
            _ => {}
        }
    }

    /// Whether frames for it are taken: of a queue that is not served they would stay with their senders.
    pub(super) fn set_open(&mut self, is_open: bool) {
        // The time of what waited may have come while nobody looked.
        self.look_again();
        if let Direction::PortReceive(receive) = &mut self.direction {
            receive.set_open(is_open);
        }
    }

    /// Buffers that are held go back to the ring.
    pub(super) fn give_back(&mut self, ring: &mut Ring) {
        match &mut self.direction {
            Direction::TapTransmit(_)
            | Direction::SocketTransmit(_)
            | Direction::PortTransmit(_) => {}
            Direction::TapReceive(receive) => receive.give_back(ring),
            Direction::SocketReceive(receive) => receive.give_back(ring),
            Direction::PortReceive(receive) => receive.give_back(ring),
        }
    }
}

/// Where frames pass in a turn, one by one.
struct Gate<'a> {
    limit: Option<&'a Limit>,
    /// Of the last look at the clock, ns; 0: none yet.
    time: u64,
    /// Until when it is closed, if it is.
    closed: Option<u64>,
}

impl Gate<'_> {
    /// Whether another frame may pass.
    #[inline]
    fn is_open(&mut self) -> bool {
        self.limit.is_none_or(|limit| self.is_open_for(limit))
    }

    #[inline(never)]
    fn is_open_for(&mut self, limit: &Limit) -> bool {
        let ready_at = limit.ready_at();
        // Also of a limit that nothing has passed: its first frames are charged as of now.
        if ready_at >= self.time {
            self.time = now();
        }
        self.closed = (ready_at > self.time).then_some(ready_at);
        self.closed.is_none()
    }

    /// How many frames may pass, as far as is known, that cost so much each.
    fn most(&self, share: &TurnBudget, frame_ns: i64) -> usize {
        // The limit may close behind each.
        let frames = if self.limit.is_some() { 1 } else { share.ns / frame_ns + 1 };
        (frames as usize).min(share.requests as usize)
    }

    /// Closes it for so many ns.
    fn close(&mut self, ns: u64) {
        self.time = now();
        self.closed = Some(self.time + ns);
    }

    #[inline]
    fn pass(&mut self, bytes: usize) {
        if let Some(limit) = self.limit {
            limit.pass(self.time, bytes);
        }
    }
}

/// Takes the next chain from the ring, and charges the turn with what following its pieces took, whatever comes of it.
fn take(ring: &mut Ring, chain: &mut Chain, share: &mut TurnBudget) -> Result<bool, RingError> {
    let is_taken = ring.next(chain)?;
    if is_taken {
        share.ns -= cost::pieces_ns(chain.pieces());
    }
    Ok(is_taken)
}

/// Reads the virtio header off a chain's beginning; false: it is shorter.
fn read_header(segments: &mut Vec<Segment>, header: &mut [u8; BYTES]) -> bool {
    let (mut read, mut used) = (0, 0);
    for segment in &mut *segments {
        let length = segment.len().min(BYTES - read);
        // SAFETY: the segment is guest memory, which the ring's memory keeps mapped. The driver may change it at any
        // time: it is read once.
        unsafe { copy(segment.base(), header[read..].as_mut_ptr(), length) };
        read += length;
        segment.advance(length);
        if !segment.is_empty() {
            break;
        }
        used += 1;
        if read == BYTES {
            break;
        }
    }
    segments.drain(..used);
    read == BYTES
}
