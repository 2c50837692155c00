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
        let (key, mut share) = self.turns.next(round, self.time, |key| drivers[key].is_pending)?;
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
