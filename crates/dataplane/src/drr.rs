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
//! there, owing nothing, and one that leaves makes a gap that closes: nobody is overtaken.
//!
//! Stuck guard. A queue that has been passed over [`STUCK`] times running with something pending is
//! served whatever it owes, and the rest of that is forgotten: else one request of a gigabyte would
//! keep its queue out for thousands of turns.
//!
//! The bound. Between two turns of a queue that has something pending, each other queue has at most
//! one turn: 25.6 µs less a nanosecond, and one request or frame. If the queue itself owes, at most
//! 1 + [`STUCK`] turns. What only waits for nobody else is served at once, owing or not.
//!
//! Properties (tests of the same name): `nobody_is_starved`, `something_pending_is_always_served`,
//! `overdraft_is_paid_back`, `turns_of_disks_and_nics_cost_the_same`.

use std::collections::VecDeque;

/// A turn, ns.
pub(crate) const QUANTUM_NS: i64 = 25_600;

/// What work costs an IOThread, estimated. The scale is that of memory: a request to a disk counts for what one to RAM
/// takes. By io_uring it takes some three times as long, in a batch for which the kernel is entered once.
pub(crate) mod cost {
    /// Of a request to a disk, with 4 KiB: 64 are a turn.
    pub(crate) const REQUEST_NS: i64 = 400;
    /// Of a frame to or from a TAP, which is a system call (1.1 to 2.2 µs were measured).
    pub(crate) const TAP_FRAME_NS: i64 = 1_600;
    /// Of a frame of a switch, at each of its two queues.
    pub(crate) const PORT_FRAME_NS: i64 = 250;
    /// Of telling a queue of a frame, or of dropping one.
    pub(crate) const NOTE_NS: i64 = 60;

    /// Of following a chain and copying by its pieces. A driver's own chains have a few of them, which the others' costs
    /// include; one that means harm has a thousand, of a byte each.
    pub(crate) const fn pieces_ns(pieces: usize) -> i64 {
        const INCLUDED: usize = 16;
        const PIECE_NS: i64 = 10;
        pieces.saturating_sub(INCLUDED) as i64 * PIECE_NS
    }

    /// Of a request's bytes, without those that [`REQUEST_NS`] has: 256 KiB are a turn.
    pub(crate) fn transfer_ns(bytes: u64) -> i64 {
        let copied = i64::try_from(bytes / 1024 * 100).unwrap_or(i64::MAX);
        (copied - REQUEST_NS).max(0)
    }

    /// Of a frame's bytes by a system call.
    pub(crate) const fn tap_ns(bytes: usize) -> i64 {
        TAP_FRAME_NS + bytes as i64 * 80 / 1024
    }

    /// Of a frame's bytes by a copy.
    pub(crate) const fn port_ns(bytes: usize) -> i64 {
        PORT_FRAME_NS + bytes as i64 * 60 / 1024
    }
}

/// How often running a queue that owes is passed over at most.
const STUCK: u8 = 16;

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
}

/// The line of the queues that are looked at.
#[derive(Debug)]
pub(crate) struct Turns<K> {
    line: VecDeque<Place<K>>,
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
        Self { line: VecDeque::new() }
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
        self.line.push_back(Place { key, credit: 0, passed: 0 });
    }

    /// Queues leave unless `stays` says otherwise.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(K) -> bool) {
        self.line.retain(|place| stays(place.key));
    }

    /// A chance for each queue that is in the line now.
    pub(crate) fn round(&self) -> Round {
        Round { left: self.line.len(), served: false, owing: false }
    }

    /// Who is next in this round, of those with something pending; nobody: it is over. What is left
    /// of the share when the turn ends is told to [`Self::end_turn`].
    pub(crate) fn next(
        &mut self,
        round: &mut Round,
        mut is_pending: impl FnMut(K) -> bool,
    ) -> Option<(K, TurnBudget)> {
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
            let is_pending = is_pending(place.key);
            let credit = place.credit + QUANTUM_NS;
            if is_pending && (credit > 0 || place.passed >= STUCK) {
                self.line.push_back(Place { credit: 0, passed: 0, ..place });
                round.served = true;
                let ns = if credit > 0 { credit } else { QUANTUM_NS };
                return Some((place.key, TurnBudget { requests: u32::MAX, ns }));
            }
            place.credit = credit.min(0);
            place.passed = if is_pending { place.passed + 1 } else { 0 };
            round.owing |= is_pending;
            self.line.push_back(place);
        }
    }

    /// What was left at the end of the last turn.
    pub(crate) fn end_turn(&mut self, left: TurnBudget) {
        if let Some(place) = self.line.back_mut() {
            place.credit = left.ns.min(0);
        }
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
        /// What others have had since its last turn, or since something is pending: turns and ns.
        others: BTreeMap<usize, [u64; 2]>,
        /// Whether it owed anything then.
        owed: bool,
    }

    const REQUEST: u64 = cost::REQUEST_NS as u64;
    const QUANTUM: u64 = QUANTUM_NS as u64;

    /// An IOThread's line, without rings.
    struct Rig {
        turns: Turns<usize>,
        drivers: Vec<Driver>,
    }

    impl Rig {
        fn new(sizes: Vec<Vec<u64>>) -> Self {
            let mut turns = Turns::new();
            (0..sizes.len()).for_each(|key| turns.join(key));
            let driver = |sizes| Driver {
                sizes,
                next: 0,
                is_pending: true,
                others: BTreeMap::new(),
                owed: false,
            };
            Self { turns, drivers: sizes.into_iter().map(driver).collect() }
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
            let (key, mut share) = self.turns.next(round, |key| drivers[key].is_pending)?;
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
            self.turns.end_turn(share);
            self.count_from_here(key);
            let waiting: Vec<usize> =
                self.turns.keys().filter(|&k| k != key && self.drivers[k].is_pending).collect();
            for other in waiting {
                let others = self.drivers[other].others.entry(key).or_default();
                *others = [others[0] + 1, others[1] + had[1]];
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
                        }
                        rig.count_from_here(key);
                        round = rig.turns.round();
                    }
                    Step::Toggle(_) | Step::Sleep(_) => {}
                }
                for driver in &rig.drivers {
                    let most = if driver.owed { 17 } else { 1 };
                    for &[turns, ns] in driver.others.values() {
                        prop_assert!(turns <= most, "{turns}");
                        // In each turn a quantum less a nanosecond, and one request.
                        prop_assert!(ns < turns * (QUANTUM + largest), "{ns}");
                    }
                }
            }
        }

        #[test]
        fn queue_that_owes_nothing_is_never_passed_over(sizes in sizes(64), turns in 1_usize..200) {
            // A power of two of them fills a turn: none is overdrawn.
            let rounded = |size: u64| (size / REQUEST).next_power_of_two() * REQUEST;
            let sizes: Vec<_> = sizes.iter().map(|all| vec![rounded(all[0])]).collect();
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
            // Of up to 16 quanta, all of it.
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

    #[test]
    fn request_of_a_mebibyte_costs_four_turns() {
        let mebibyte = (cost::REQUEST_NS + cost::transfer_ns(1 << 20)) as u64;
        let mut rig = Rig::new(vec![vec![mebibyte], vec![REQUEST]]);
        let mut order = String::new();
        for _ in 0..9 {
            let mut round = rig.turns.round();
            while let Some((key, had)) = rig.turn(&mut round) {
                order.push(if key == 0 { 'L' } else { 's' });
                assert_eq!(had, if key == 0 { [1, mebibyte] } else { [64, QUANTUM] });
            }
        }
        assert_eq!(order, "LssssLssssLs");
    }

    #[test]
    fn what_is_owed_beyond_the_guard_is_forgotten() {
        let mut rig = Rig::new(vec![vec![1 << 30], vec![REQUEST]]);
        let mut order = String::new();
        for _ in 0..35 {
            let mut round = rig.turns.round();
            while let Some((key, _)) = rig.turn(&mut round) {
                order.push(if key == 0 { 'L' } else { 's' });
            }
        }
        let sixteen = "s".repeat(16);
        assert_eq!(order, format!("Ls{sixteen}Ls{sixteen}Ls"));
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

    #[test]
    fn chain_of_many_pieces_costs_more_than_one_of_a_few() {
        assert_eq!((cost::pieces_ns(0), cost::pieces_ns(16)), (0, 0));
        // Three of the longest are a turn.
        assert!((QUANTUM_NS / 3..QUANTUM_NS / 2).contains(&cost::pieces_ns(1024)));
    }
}
