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
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// One queue's driver: what its requests cost, in ns, over and over.
    #[derive(Debug, Clone)]
    struct Driver {
        sizes: Vec<u64>,
        next: usize,
        is_pending: bool,
        /// What others have had since its last turn, or since something is pending.
        others: BTreeMap<usize, Had>,
        /// Whether it owed anything then.
        owed: bool,
    }

    #[derive(Debug, Clone, Copy, Default)]
    struct Had {
        /// Of the line.
        turns: u64,
        ns: u64,
        /// Ahead of it.
        sparse_ns: u64,
        /// How often it has joined the line.
        joins: u64,
    }

    const REQUEST: u64 = cost::REQUEST_NS as u64;
    const SPARSE: u64 = SPARSE_NS as u64;
    const QUANTUM: u64 = QUANTUM_NS as u64;

    /// An IOThread's line, without rings, and its clock: a turn takes what it costs.
    struct Rig {
        turns: Turns<usize>,
        drivers: Vec<Driver>,
        time: u64,
        /// Of the last turn.
        promised: Option<PromisedTurn>,
    }

    impl Rig {
        fn new(sizes: Vec<Vec<u64>>) -> Self {
            let mut turns = Turns::new();
            (0..sizes.len()).for_each(|key| turns.join(key));
            // They have been busy all along.
            turns.line.iter_mut().for_each(|place| place.ahead = 0);
            let driver = |sizes| Driver {
                sizes,
                next: 0,
                is_pending: true,
                others: BTreeMap::new(),
                owed: false,
            };
            let drivers = sizes.into_iter().map(driver).collect();
            Self { turns, drivers, time: 0, promised: None }
        }

        /// Counts from here what others have.
        fn count_from_here(&mut self, key: usize) {
            let owes = |place: &Place<usize>| place.key == key && place.credit < 0;
            self.drivers[key].owed = self.turns.line.iter().any(owes);
            self.drivers[key].others.clear();
        }

        /// The next turn of a round: who had it, and its requests and ns.
        fn turn(&mut self, round: &mut Round) -> Option<(usize, [u64; 2])> {
            let drivers = &self.drivers;
            let (key, mut share) =
                self.turns.next(round, self.time, |key| drivers[key].is_pending)?;
            let driver = &mut self.drivers[key];
            let mut had = [0; 2];
            // As a queue does with its share.
            while share.is_left() {
                let cost = driver.sizes[driver.next % driver.sizes.len()];
                driver.next += 1;
                share.requests -= 1;
                share.ns -= cost as i64;
                had = [had[0] + 1, had[1] + cost];
            }
            self.promised = self.turns.end_turn(share);
            self.time += had[1];
            self.count_from_here(key);
            let waiting: Vec<usize> =
                self.turns.keys().filter(|&k| k != key && self.drivers[k].is_pending).collect();
            for other in waiting {
                let others = self.drivers[other].others.entry(key).or_default();
                if matches!(self.turns.whose, Whose::Sparse { .. }) {
                    others.sparse_ns += had[1];
                } else {
                    others.turns += 1;
                    others.ns += had[1];
                }
            }
            Some((key, had))
        }
    }

    /// What requests cost, up to so many of those of 4 KiB.
    fn sizes(most: u64) -> impl Strategy<Value = Vec<Vec<u64>>> {
        let size = prop_oneof![Just(REQUEST), (1..=most).prop_map(|times| times * REQUEST)];
        prop::collection::vec(prop::collection::vec(size, 1..4), 1..6)
    }

    /// There is no clock: what a queue owes is at most what its last turn was overdrawn by, however long it has
    /// had turns.
    #[test]
    fn what_is_owed_does_not_grow_with_time() {
        let largest = 4 << 30;
        let mut rig = Rig::new(vec![vec![largest], vec![REQUEST], vec![1, largest]]);
        for _ in 0..200_000 {
            let mut round = rig.turns.round();
            while rig.turn(&mut round).is_some() {}
            let owed = rig.turns.line.iter().map(|place| -place.credit).max();
            assert!(owed.is_some_and(|owed| owed <= largest as i64), "{owed:?}");
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Turn,
        /// A message cuts the round short.
        Cut,
        /// Something is pending at the queue, or nothing any more.
        Toggle(usize),
        /// The queue leaves the line, or joins it.
        Sleep(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            12 => Just(Step::Turn),
            2 => Just(Step::Cut),
            2 => (0_usize..6).prop_map(Step::Toggle),
            1 => (0_usize..6).prop_map(Step::Sleep),
        ];
        prop::collection::vec(step, 1..400)
    }

    proptest! {
        #[test]
        fn nobody_is_starved(sizes in sizes(16 << 10), steps in steps()) {
            let largest = *sizes.iter().flatten().max().unwrap();
            let mut rig = Rig::new(sizes);
            let mut round = rig.turns.round();
            for step in steps {
                match step {
                    Step::Turn if rig.turn(&mut round).is_none() => round = rig.turns.round(),
                    Step::Turn => {}
                    Step::Cut => round = rig.turns.round(),
                    Step::Toggle(key) if key < rig.drivers.len() => {
                        rig.drivers[key].is_pending ^= true;
                        rig.count_from_here(key);
                    }
                    Step::Sleep(key) if key < rig.drivers.len() => {
                        if rig.turns.keys().any(|other| other == key) {
                            rig.turns.retain(|other| other != key);
                        } else {
                            rig.turns.join(key);
                            for driver in &mut rig.drivers {
                                driver.others.entry(key).or_default().joins += 1;
                            }
                        }
                        rig.count_from_here(key);
                        round = rig.turns.round();
                    }
                    Step::Toggle(_) | Step::Sleep(_) => {}
                }
                for driver in &rig.drivers {
                    let most = if driver.owed { 1 + u64::from(STUCK) } else { 1 };
                    for had in driver.others.values() {
                        prop_assert!(had.turns <= most, "{had:?}");
                        // In each turn a quantum less a nanosecond, and one request.
                        prop_assert!(had.ns <= had.turns * (QUANTUM - 1 + largest), "{had:?}");
                        // Before each chance, and after the last.
                        let times = most + 1 + had.joins;
                        prop_assert!(had.sparse_ns <= times * (SPARSE - 1 + largest), "{had:?}");
                    }
                }
            }
        }

        #[test]
        fn queue_that_owes_nothing_is_never_passed_over(sizes in sizes(64), turns in 1_usize..200) {
            // A power of two of them fills a turn: none is overdrawn.
            let rounded = |size: u64| (size / REQUEST).next_power_of_two() * REQUEST;
            let sizes: Vec<_> =
                sizes.iter().map(|all| vec![rounded(all[0]).min(QUANTUM)]).collect();
            let queues = sizes.len();
            let mut rig = Rig::new(sizes);
            let mut order = Vec::new();
            while order.len() < turns {
                let mut round = rig.turns.round();
                while let Some((key, had)) = rig.turn(&mut round) {
                    prop_assert!(had[1] <= QUANTUM, "{had:?}");
                    order.push(key);
                }
            }
            prop_assert!(order.iter().enumerate().all(|(at, &key)| key == at % queues), "{order:?}");
        }

        #[test]
        fn something_pending_is_always_served(sizes in sizes(16 << 10), steps in steps()) {
            let mut rig = Rig::new(sizes);
            for step in steps {
                match step {
                    Step::Toggle(key) | Step::Sleep(key) => {
                        if let Some(driver) = rig.drivers.get_mut(key) {
                            driver.is_pending ^= true;
                        }
                    }
                    Step::Turn | Step::Cut => {}
                }
                let any = rig.drivers.iter().any(|driver| driver.is_pending);
                let mut round = rig.turns.round();
                prop_assert_eq!(rig.turn(&mut round).is_some(), any);
            }
        }

        #[test]
        fn overdraft_is_paid_back(sizes in sizes(1 << 10), rounds in 1_usize..300) {
            // Of up to as many quanta as it may be passed over, all of it.
            let largest = *sizes.iter().flatten().max().unwrap();
            let mut rig = Rig::new(sizes);
            let mut had = vec![0; rig.drivers.len()];
            for _ in 0..rounds {
                let mut round = rig.turns.round();
                while let Some((key, [_, ns])) = rig.turn(&mut round) {
                    had[key] += ns;
                }
            }
            let (least, most) = (had.iter().min().unwrap(), had.iter().max().unwrap());
            prop_assert!(most - least <= QUANTUM + largest, "{had:?}");
        }
    }

    /// Floods' queues, and one at the end of the line that has something to do for one turn when it is asked for.
    fn sparse(floods: usize) -> (Rig, usize) {
        let mut rig = Rig::new(vec![vec![REQUEST]; floods + 1]);
        rig.drivers[floods].is_pending = false;
        let mut round = rig.turns.round();
        while rig.turn(&mut round).is_some() {}
        (rig, floods)
    }

    #[test]
    fn sparse_queue_waits_for_one_turn() {
        for floods in 1..8 {
            let (mut rig, queue) = sparse(floods);
            for gap in [0, 1, floods, 3 * floods] {
                let mut round = rig.turns.round();
                for _ in 0..gap {
                    if rig.turn(&mut round).is_none() {
                        round = rig.turns.round();
                    }
                }
                // It comes while a turn lasts.
                rig.drivers[queue].is_pending = true;
                let mut waited = 0;
                loop {
                    match rig.turn(&mut round) {
                        None => round = rig.turns.round(),
                        Some((key, [_, ns])) if key == queue => {
                            // It may be at the front of the line.
                            assert!(ns == SPARSE || waited == 0, "{ns} after {waited}");
                            break;
                        }
                        Some((_, [_, ns])) => waited += ns,
                    }
                }
                assert!(waited <= QUANTUM, "{floods} {gap}: {waited} ns");
                rig.drivers[queue].is_pending = false;
                for _ in 0..3 * floods {
                    if rig.turn(&mut round).is_none() {
                        round = rig.turns.round();
                    }
                }
            }
        }
    }

    /// Who has more to do than a sparse queue would have has no more than others.
    #[test]
    fn sparse_turns_are_taken_from_the_next_chance() {
        let (mut rig, queue) = sparse(3);
        rig.drivers[queue].is_pending = true;
        let mut had = [0; 4];
        for _ in 0..100 {
            let mut round = rig.turns.round();
            while let Some((key, [_, ns])) = rig.turn(&mut round) {
                had[key] += ns;
            }
        }
        let (least, most) = (had.iter().min().unwrap(), had.iter().max().unwrap());
        assert!(most - least <= QUANTUM, "{had:?}");
    }

    /// A queue whose turn came to nothing, as one whose device does not start it, does not keep the line waiting.
    #[test]
    fn sparse_queue_that_starts_nothing_is_not_asked_again() {
        let mut turns = Turns::new();
        [0, 1].into_iter().for_each(|key| turns.join(key));
        let mut order = Vec::new();
        while order.len() < 6 {
            let mut round = turns.round();
            while let Some((key, mut left)) = turns.next(&mut round, 0, |_| true) {
                left.ns -= if key == 0 { left.ns } else { 0 };
                turns.end_turn(left);
                order.push(key);
            }
        }
        assert!(order.windows(3).all(|three| three.contains(&0)), "{order:?}");
    }

    #[test]
    fn request_of_a_mebibyte_costs_eight_turns() {
        let mebibyte = (cost::REQUEST_NS + cost::transfer_ns(1 << 20)) as u64;
        let mut rig = Rig::new(vec![vec![mebibyte], vec![REQUEST]]);
        let mut order = String::new();
        for _ in 0..17 {
            let mut round = rig.turns.round();
            while let Some((key, had)) = rig.turn(&mut round) {
                order.push(if key == 0 { 'L' } else { 's' });
                assert_eq!(had, if key == 0 { [1, mebibyte] } else { [32, QUANTUM] });
            }
        }
        assert_eq!(order, "LssssssssLssssssssLs");
    }

    #[test]
    fn what_is_owed_beyond_the_guard_is_forgotten() {
        let mut rig = Rig::new(vec![vec![1 << 30], vec![REQUEST]]);
        let mut order = String::new();
        for _ in 0..67 {
            let mut round = rig.turns.round();
            while let Some((key, _)) = rig.turn(&mut round) {
                order.push(if key == 0 { 'L' } else { 's' });
            }
        }
        let passed = "s".repeat(STUCK.into());
        assert_eq!(order, format!("Ls{passed}Ls{passed}Ls"));
    }

    #[test]
    fn queue_alone_does_not_wait_for_its_debt() {
        let mut rig = Rig::new(vec![vec![1 << 30]]);
        for _ in 0..3 {
            let mut round = rig.turns.round();
            assert_eq!(rig.turn(&mut round), Some((0, [1, 1 << 30])));
            assert_eq!(rig.turn(&mut round), None);
        }
    }

    /// A victim waits as long for a flood of requests as for one of frames, whatever their size.
    #[test]
    fn turns_of_disks_and_nics_cost_the_same() {
        let disk = |bytes| cost::REQUEST_NS + cost::transfer_ns(bytes);
        let floods = [disk(4 << 10), disk(256 << 10), cost::tap_ns(60), cost::tap_ns(1514)]
            .into_iter()
            .chain([cost::tap_ns(65_549), cost::port_ns(60), cost::port_ns(65_549)]);
        for flood in floods {
            let mut rig = Rig::new(vec![vec![flood as u64], vec![REQUEST]]);
            let mut round = rig.turns.round();
            let (key, [frames, ns]) = rig.turn(&mut round).unwrap();
            assert_eq!(key, 0);
            assert!((QUANTUM..QUANTUM + flood as u64).contains(&ns), "{frames} of {flood} ns");
        }
    }

    /// Of so much of the time, and so many ns at once.
    fn reservation(share: f64, burst: i64) -> Reservation {
        Reservation { share, burst, within: 300_000 }
    }

    #[test]
    fn reserved_queues_have_their_turns_in_the_order_in_which_they_are_due() {
        let mut rig = Rig::new(vec![vec![REQUEST]; 3]);
        let within = |within| Reservation { within, ..reservation(0.1, 4_000) };
        for (key, promise) in [(1, within(900_000)), (2, within(100_000))] {
            rig.turns.reserve(key, promise, 0);
        }
        let mut round = rig.turns.round();
        let turns = std::iter::from_fn(|| rig.turn(&mut round).map(|(key, [_, ns])| (key, ns)));
        let turns: Vec<_> = turns.take(4).collect();
        // What is reserved first, then a turn of the line, and what has come back since.
        assert_eq!(turns, [(2, 4_000), (1, 4_000), (0, QUANTUM), (2, 2_400)]);
    }

    /// What waits since when is known from the looks at which nothing did.
    #[test]
    fn promised_frames_are_no_older_than_the_last_look_that_found_none() {
        let mut rig = Rig::new(vec![vec![REQUEST], vec![REQUEST]]);
        let turn = |rig: &mut Rig| {
            let mut round = rig.turns.round();
            let key = rig.turn(&mut round).map(|(key, _)| key);
            (key, rig.promised.map(|turn| turn.since))
        };
        rig.turns.reserve(1, reservation(0.5, 100_000), 0);
        rig.drivers[1].is_pending = false;
        assert_eq!(turn(&mut rig), (Some(0), None));
        rig.drivers[1].is_pending = true;
        assert_eq!(turn(&mut rig), (Some(1), Some(0)));
        // It ended with the reservation: the same frames may wait on. The line is next.
        let ended = rig.time;
        rig.time += 10_000_000;
        assert_eq!(turn(&mut rig), (Some(0), None));
        assert_eq!(turn(&mut rig), (Some(1), Some(0)));
        rig.turns.rested(ended);
        rig.time += 10_000_000;
        assert_eq!(turn(&mut rig), (Some(1), Some(ended)));
        // It ended because nothing was left: what comes then has come since the turn began.
        rig.drivers[1].sizes = vec![1];
        let begun = rig.time;
        rig.turns.rested(begun);
        let drivers = &rig.drivers;
        let mut round = rig.turns.round();
        let pending = |key: usize| drivers[key].is_pending;
        let (key, mut share) = rig.turns.next(&mut round, begun + 10_000_000, pending).unwrap();
        assert_eq!(key, 1);
        share.requests -= 1;
        share.ns -= 1;
        rig.turns.end_turn(share);
        assert_eq!(rig.turns.reserved[0].clear_at, begun + 10_000_000);
    }

    /// A promise of a tenth to some queues, which want whatever they can have in frames of any size, as all others do.
    fn reserved(sizes: Vec<Vec<u64>>, count: usize, burst: i64) -> Rig {
        let mut rig = Rig::new(sizes);
        for key in 0..count.min(rig.drivers.len()) {
            rig.turns.reserve(key, reservation(0.1, burst), 0);
        }
        rig
    }

    proptest! {
        #[test]
        fn reserved_queue_waits_for_one_turn_of_the_line(
            sizes in sizes(64), count in 1..4_usize, burst in 1..100_000_i64, steps in steps(),
        ) {
            let largest = *sizes.iter().flatten().max().unwrap();
            let mut rig = reserved(sizes, count, burst);
            // Since when the queue 0 waits with something left, turns of the line and of each reserved queue.
            let mut waited = BTreeMap::<Option<usize>, u32>::new();
            let mut round = rig.turns.round();
            for step in steps {
                match step {
                    Step::Turn => match rig.turn(&mut round) {
                        None => round = rig.turns.round(),
                        Some((0, _)) => waited.clear(),
                        Some((key, [_, ns])) => {
                            let is_reserved = rig.promised.is_some();
                            let most = if is_reserved { burst as u64 } else { QUANTUM };
                            prop_assert!(ns < most + 1 + largest, "{ns}");
                            *waited.entry(is_reserved.then_some(key)).or_default() += 1;
                        }
                    },
                    Step::Cut => round = rig.turns.round(),
                    Step::Toggle(key) => {
                        if let Some(driver) = rig.drivers.get_mut(key) {
                            driver.is_pending ^= true;
                        }
                    }
                    Step::Sleep(_) => {}
                }
                let has_left = rig.turns.reserved[0].left > 0.0;
                if !rig.drivers[0].is_pending || !has_left {
                    waited.clear();
                }
                for (of, turns) in &waited {
                    // Others that are due earlier have one before the line's turn and one after it.
                    let most = if of.is_none() { 1 } else { 2 };
                    prop_assert!(*turns <= most, "{of:?} had {turns}");
                }
            }
        }

        #[test]
        fn reserved_queues_have_no_more_than_is_reserved(
            sizes in sizes(64), count in 1..4_usize, burst in 1..100_000_i64, turns in 1..500,
        ) {
            let largest = *sizes.iter().flatten().max().unwrap();
            let queues = sizes.len();
            let mut rig = reserved(sizes, count, burst);
            let (mut had, mut of_line) = (vec![0; queues], vec![0_u64; queues]);
            for _ in 0..turns {
                let mut round = rig.turns.round();
                while let Some((key, [_, ns])) = rig.turn(&mut round) {
                    if rig.promised.is_some() { had[key] += ns } else { of_line[key] += ns }
                    let most = burst as f64 + rig.time as f64 * 0.1 + largest as f64;
                    prop_assert!(had[key] as f64 <= most + 1.0, "{} of {most}", had[key]);
                }
            }
            // The others share the rest, evenly.
            let others = &of_line[count.min(queues)..];
            let (least, most) = (others.iter().min(), others.iter().max());
            if let (Some(least), Some(most)) = (least, most) {
                prop_assert!(most - least <= QUANTUM + largest, "{of_line:?}");
            }
        }
    }
}
