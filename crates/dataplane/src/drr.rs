//! Which queue has the next turn, and how much of it: deficit round robin by estimated time.
//!
//! Disks and network devices share IOThreads, and what is one request to the one takes as long as many to the other. So a
//! turn is counted in nanoseconds of an IOThread, which each kind of work estimates for itself ([`cost`]).
//!
//! Terms. A *turn* is what one queue starts before the next one may: up to [`QUANTUM_NS`]. The last request or frame
//! is started whole, so a turn may be *overdrawn*; a queue that did so *owes*, and is passed over until the quanta that
//! it would have had have paid for it. What it did not use is not saved up. A *round* gives each queue in the line one
//! chance.
//!
//! Queues stand in a line. Whoever had its chance goes to the end of it, a queue that wakes up joins it
//! there, owing nothing, and one that leaves makes a gap that closes.
//!
//! Sparse queues. A driver that sends a request now and then should not wait for a turn of each of the busy queues. A queue is *sparse*
//! when it joins the line, and when it has had a chance and needed less than [`SPARSE_NS`] of it, as in FQ-CoDel's list of new flows
//! (RFC 8290, section 4.1). Where others have had [`SPARSE_NS`] since the last look, and a sparse queue has something pending, it
//! has a turn ahead of the line. Until its next chance these turns are [`SPARSE_NS`] together, and they are taken from that
//! chance: nobody has more than a quantum for a chance.
//!
//! Stuck guard. A queue that has been passed over [`STUCK`] times running with something pending is
//! served whatever it owes, and the rest of that is forgotten: else one request of a gigabyte would
//! keep its queue out for thousands of turns.
//!
//! Reserved queues. A queue that is promised something ([`Reservation`], `frames::promise`) has a second way to a turn: between any two
//! turns of the line each reserved queue has one, in the order in which they are due, if it has something pending and anything left of what
//! is reserved for it, and for no longer than that lasts. What is reserved comes back with time, by the caller's clock. What
//! exceeds it has its turns in the line. A frame is *due* when it has waited for as long as is promised; it has waited since a look at which
//! its queue had nothing pending, or nothing left.
//!
//! The bound. Between two turns of a queue that has something pending, each other queue in the line has at most
//! one turn of the line: 12.8 µs less a nanosecond, and one request or frame. If the queue itself owes, at most
//! 1 + [`STUCK`] turns. If the other queue is sparse before its chance and after it, it has [`SPARSE_NS`] and one request or frame
//! each time. What only waits for nobody else is served at once, owing or not. Reserved queues add what is reserved for
//! them in that time, and one frame each for each turn of the line. A reserved queue with something left waits for one turn of the line, and
//! one of each other reserved queue.
//!
//! Properties (tests of the same name): `nobody_is_starved`, `something_pending_is_always_served`,
//! `overdraft_is_paid_back`, `sparse_queue_waits_for_one_turn`, `sparse_turns_are_taken_from_the_next_chance`,
//! `turns_of_disks_and_nics_cost_the_same`, `reserved_queue_waits_for_one_turn_of_the_line`,
//! `reserved_queues_have_no_more_than_is_reserved`.

use std::collections::VecDeque;

pub(crate) use rtvirtio_frames::cost::QUANTUM_NS;
use rtvirtio_frames::promise::Reservation;

/// What work costs an IOThread, estimated. The scale is that of memory: a request to a disk counts for what one to RAM
/// takes. By io_uring it takes some three times as long, in a batch for which the kernel is entered once.
pub(crate) mod cost {
    pub(crate) use rtvirtio_frames::cost::{NOTE_NS, PORT_FRAME_NS, pieces_ns, port_ns, tap_ns};

    /// Of a request to a disk, with 4 KiB: 32 are a turn.
    pub(crate) const REQUEST_NS: i64 = 400;

    /// Of a request's bytes, without those that [`REQUEST_NS`] has: 128 KiB are a turn.
    pub(crate) fn transfer_ns(bytes: u64) -> i64 {
        let copied = i64::try_from(bytes / 1024 * 100).unwrap_or(i64::MAX);
        (copied - REQUEST_NS).max(0)
    }
}

/// How often running a queue that owes is passed over at most.
const STUCK: u8 = 32;

/// What a sparse queue may have ahead of the line until its next chance; as much of others' turns is between two looks for one, ns.
const SPARSE_NS: i64 = QUANTUM_NS / 4;

/// What is left of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TurnBudget {
    /// Requests or frames that may be taken: any number, but of a queue that is to stop.
    pub(crate) requests: u32,
    /// Nanoseconds; less than none if it is overdrawn.
    pub(crate) ns: i64,
}

impl TurnBudget {
    /// Whether another request may be started.
    pub(crate) const fn is_left(self) -> bool {
        self.requests > 0 && self.ns > 0
    }
}

/// A queue in the line.
#[derive(Debug, Clone, Copy)]
struct Place<K> {
    key: K,
    /// Nanoseconds that are left of its last turn; never more than none.
    credit: i64,
    /// How often running it has been passed over.
    passed: u8,
    /// Nanoseconds that it may have ahead of the line until its next chance: of a sparse queue.
    ahead: i64,
}

/// A queue to which something is promised, whether it is in the line or not.
#[derive(Debug, Clone, Copy)]
struct Reserved<K> {
    key: K,
    promise: Reservation,
    /// What is left of what is reserved, ns: up to a burst, and less than none if its last frame took more.
    left: f64,
    /// When that was.
    at: u64,
    /// The last look at which nothing waited that is promised.
    clear_at: u64,
    /// Whether it has had a turn since the line's last one.
    had: bool,
}

/// Whose turn it is.
#[derive(Debug, Clone, Copy)]
enum Whose {
    /// Of the last one in the line.
    Line { ns: i64 },
    /// Of a sparse queue, wherever it is in the line, which has begun with so many ns.
    Sparse { index: usize, ns: i64 },
    /// Of a reserved queue, which has begun with so many ns.
    Reserved { index: usize, ns: i64, begun: u64 },
}

/// A turn of promised frames that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromisedTurn {
    /// No frame of it was there before, ns.
    pub(crate) since: u64,
    /// How long each was promised to wait at most, ns.
    pub(crate) within: u64,
}

/// The line of the queues that are looked at.
#[derive(Debug)]
pub(crate) struct Turns<K> {
    line: VecDeque<Place<K>>,
    reserved: Vec<Reserved<K>>,
    whose: Whose,
    /// What turns of the line have had since it was looked for sparse queues, ns.
    since_look: i64,
}

/// How far a round has come.
#[derive(Debug)]
pub(crate) struct Round {
    /// Queues that have yet to have their chance.
    left: usize,
    /// Whether somebody was served.
    served: bool,
    /// Whether somebody was passed over.
    owing: bool,
}

impl<K: Copy + PartialEq> Turns<K> {
    pub(crate) const fn new() -> Self {
        let whose = Whose::Line { ns: 0 };
        Self { line: VecDeque::new(), reserved: Vec::new(), whose, since_look: 0 }
    }

    /// Something is promised to a queue from `time` on, ns.
    pub(crate) fn reserve(&mut self, key: K, promise: Reservation, time: u64) {
        let left = promise.burst as f64;
        let queue = Reserved { key, promise, left, at: time, clear_at: time, had: false };
        self.reserved.push(queue);
    }

    /// It leaves for good.
    pub(crate) fn unreserve(&mut self, key: K) {
        self.reserved.retain(|queue| queue.key != key);
    }

    /// Whether something is promised to any queue.
    pub(crate) const fn has_reserved(&self) -> bool {
        !self.reserved.is_empty()
    }

    /// Whether something is promised to this one.
    pub(crate) fn is_reserved(&self, key: K) -> bool {
        self.reserved.iter().any(|queue| queue.key == key)
    }

    /// Until `time` there was nothing to do for any.
    pub(crate) fn rested(&mut self, time: u64) {
        for queue in &mut self.reserved {
            (queue.clear_at, queue.had) = (time, false);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.line.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// In the order of their next turns.
    pub(crate) fn keys(&self) -> impl Iterator<Item = K> {
        self.line.iter().map(|place| place.key)
    }

    /// The queue at a place of the line, from 0.
    pub(crate) fn at(&self, place: usize) -> Option<K> {
        self.line.get(place).map(|place| place.key)
    }

    /// A queue that is not in the line joins it.
    pub(crate) fn join(&mut self, key: K) {
        self.line.push_back(Place { key, credit: 0, passed: 0, ahead: SPARSE_NS });
    }

    /// Queues leave unless `stays` says otherwise.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(K) -> bool) {
        self.line.retain(|place| stays(place.key));
    }

    /// A chance for each queue that is in the line now, and for reserved ones.
    pub(crate) fn round(&self) -> Round {
        Round { left: self.line.len(), served: false, owing: false }
    }

    /// Each reserved queue may have a turn again.
    fn line_has_turn(&mut self) {
        self.reserved.iter_mut().for_each(|queue| queue.had = false);
    }

    /// Who is next in this round, at `time`, of those with something pending; nobody: it is over. What is left
    /// of the share when the turn ends is told to [`Self::end_turn`].
    pub(crate) fn next(
        &mut self,
        round: &mut Round,
        time: u64,
        mut is_pending: impl FnMut(K) -> bool,
    ) -> Option<(K, TurnBudget)> {
        if self.reserved.is_empty() {
            return self.next_in_line(round, is_pending);
        }
        let mut turn = self.next_reserved(time, &mut is_pending);
        if turn.is_none() {
            turn = self.next_in_line(round, &mut is_pending);
            self.line_has_turn();
            if turn.is_some() || round.served {
                return turn;
            }
            // Those that have had one wait for nobody.
            turn = self.next_reserved(time, &mut is_pending);
        }
        round.served |= turn.is_some();
        turn
    }

    fn next_in_line(
        &mut self,
        round: &mut Round,
        mut is_pending: impl FnMut(K) -> bool,
    ) -> Option<(K, TurnBudget)> {
        if let Some(turn) = self.next_sparse(&mut is_pending) {
            round.served = true;
            return Some(turn);
        }
        loop {
            if round.left == 0 {
                if round.served || !std::mem::take(&mut round.owing) {
                    return None;
                }
                // All that could be served owe: they pay until one does not. It cannot last: each is
                // passed over so many times at most.
                round.left = self.line.len();
            }
            round.left -= 1;
            let mut place = self.line.pop_front()?;
            let is_pending = is_pending(place.key) && !self.has_reservation_left(place.key);
            let credit = place.credit + QUANTUM_NS;
            if is_pending && (credit > 0 || place.passed >= STUCK) {
                self.line.push_back(Place { credit: 0, passed: 0, ahead: 0, ..place });
                round.served = true;
                let ns = if credit > 0 { credit } else { QUANTUM_NS };
                self.whose = Whose::Line { ns };
                return Some((place.key, TurnBudget { requests: u32::MAX, ns }));
            }
            place.credit = credit.min(0);
            place.ahead = if is_pending || place.credit < 0 { 0 } else { SPARSE_NS };
            place.passed = if is_pending { place.passed + 1 } else { 0 };
            round.owing |= is_pending;
            self.line.push_back(place);
        }
    }

    /// What is reserved for a queue it has before the next turn of the line.
    fn has_reservation_left(&self, key: K) -> bool {
        self.reserved.iter().any(|queue| queue.key == key && queue.left > 0.0)
    }

    /// A sparse queue with something pending, if it is time to look for one.
    fn next_sparse(&mut self, mut is_pending: impl FnMut(K) -> bool) -> Option<(K, TurnBudget)> {
        if self.since_look < SPARSE_NS {
            return None;
        }
        let found = self.line.iter().position(|place| {
            place.ahead > 0 && is_pending(place.key) && !self.has_reservation_left(place.key)
        });
        let Some((index, place)) = found.and_then(|index| Some((index, self.line.get(index)?)))
        else {
            self.since_look = 0;
            return None;
        };
        self.whose = Whose::Sparse { index, ns: place.ahead };
        Some((place.key, TurnBudget { requests: u32::MAX, ns: place.ahead }))
    }

    fn next_reserved(
        &mut self,
        time: u64,
        mut is_pending: impl FnMut(K) -> bool,
    ) -> Option<(K, TurnBudget)> {
        let mut next: Option<(u64, usize)> = None;
        for (index, queue) in self.reserved.iter_mut().enumerate() {
            let back = time.saturating_sub(queue.at) as f64 * queue.promise.share;
            queue.left = (queue.left + back).min(queue.promise.burst as f64);
            queue.at = queue.at.max(time);
            if queue.left <= 0.0 || !is_pending(queue.key) {
                queue.clear_at = time;
            } else if !queue.had {
                let due = queue.clear_at.saturating_add(queue.promise.within);
                next = Some(next.map_or((due, index), |other| other.min((due, index))));
            }
        }
        let (_, index) = next?;
        let queue = self.reserved.get_mut(index)?;
        queue.had = true;
        let ns = queue.left.ceil() as i64;
        self.whose = Whose::Reserved { index, ns, begun: time };
        Some((queue.key, TurnBudget { requests: u32::MAX, ns }))
    }

    /// What was left at the end of the last turn; what was promised of it.
    pub(crate) fn end_turn(&mut self, left: TurnBudget) -> Option<PromisedTurn> {
        let (index, ns, begun) = match self.whose {
            Whose::Reserved { index, ns, begun } => (index, ns, begun),
            Whose::Line { ns } => {
                self.since_look += ns - left.ns;
                if let Some(place) = self.line.back_mut() {
                    place.credit = left.ns.min(0);
                    // It ended because nothing was left to do, after little.
                    let is_sparse = left.is_left() && ns - left.ns < SPARSE_NS;
                    place.ahead = if is_sparse { SPARSE_NS } else { 0 };
                }
                return None;
            }
            Whose::Sparse { index, ns } => {
                if let Some(place) = self.line.get_mut(index) {
                    let used = ns - left.ns;
                    // Who starts nothing is not asked again: it would keep others waiting for nothing.
                    place.ahead = if used > 0 { left.ns } else { 0 };
                    place.credit -= used;
                }
                return None;
            }
        };
        let queue = self.reserved.get_mut(index)?;
        queue.left -= (ns - left.ns) as f64;
        let turn = PromisedTurn { since: queue.clear_at, within: queue.promise.within };
        if left.is_left() {
            // Whatever is there has come since.
            queue.clear_at = begun;
        }
        Some(turn)
    }
}

#[cfg(test)]
mod tests;
