//! A server that is killed between any two of its stores, and its successor's successor.
//!
//! The driver must get every request back once: it panics if one comes back that is not away.

use super::*;

/// What a run is made of: the sizes of requests, and where the driver's indices begin.
struct Scenario {
    options: Options,
    start: u16,
    requests: &'static [usize],
}

/// One server after the other; each makes as many stores as `lives` says, the last one all.
/// Whether the lives sufficed for all of them to end by a kill.
fn run(scenario: &Scenario, lives: &[u64]) -> bool {
    let mut driver = driver(scenario.options);
    if !scenario.options.packed {
        driver = driver.starting_at(scenario.start);
    }
    let config = driver.config();
    let region = inflight_region(scenario.options);
    let mut lives = lives.iter().copied();
    let mut to_add = scenario.requests.iter().enumerate().peekable();
    let mut back = Vec::new();
    let mut ids = std::collections::BTreeMap::new();
    let mut killed = true;
    let mut order = 0x9e37_79b9_u32;
    let mut chain = Chain::default();
    loop {
        let life = lives.next();
        kill::after(life);
        let mut ring = Ring::new(config, driver.guest().memory(), region.queue(0)).unwrap();
        let mut begun: Vec<u16> = Vec::new();
        let mut calls = u32::from(ring.publish());
        let mut turns = 0;
        while !kill::dead() && (back.len() < scenario.requests.len() || ring.in_flight() != 0) {
            turns += 1;
            assert!(turns < 1000, "a request is lost: {back:?}");
            while let Some(&(tag, &buffers)) = to_add.peek() {
                let Some(id) = driver.add(&request(tag as u32, buffers), buffers == 5) else {
                    break;
                };
                ids.insert(id, tag);
                to_add.next();
            }
            driver.publish();
            while !kill::dead() && ring.next(&mut chain).unwrap() {
                assert_eq!(chain.writable[0].len(), ids[&chain.id] + 1, "another request's data");
                begun.push(chain.id);
            }
            // Two in three of what is in flight, in any order.
            for _ in 0..begun.len().div_ceil(3) * 2 {
                if kill::dead() || begun.is_empty() {
                    break;
                }
                order = order.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let id = begun.swap_remove(order as usize % begun.len());
                ring.finish(id, 7);
            }
            calls += u32::from(ring.publish());
            while let Some((id, written)) = driver.take() {
                assert_eq!(written, 7);
                back.push(ids.remove(&id).unwrap());
            }
        }
        if !kill::dead() {
            kill::after(None);
            assert!(calls > 0, "the driver may not know of what the last server finished");
            killed &= life.is_none() && lives.next().is_none();
            break;
        }
    }
    back.sort_unstable();
    assert_eq!(back, (0..scenario.requests.len()).collect::<Vec<_>>());
    assert_eq!(driver.outstanding(), 0);
    killed
}

const REQUESTS: [usize; 14] = [1, 3, 2, 1, 5, 1, 4, 3, 2, 2, 1, 1, 3, 1];

fn every_store(scenario: &Scenario) {
    let mut stores = 0;
    while run(scenario, &[stores + 1]) {
        stores += 1;
    }
    assert!(stores > 100, "{stores}");
}

fn every_store_twice(scenario: &Scenario) {
    let mut first = 1;
    while run(scenario, &[first]) {
        let mut second = 1;
        while second < 60 && run(scenario, &[first, second]) {
            second += 1;
        }
        first += 1;
    }
}

fn split() -> Scenario {
    Scenario { options: SPLIT, start: 65530, requests: &REQUESTS }
}

fn packed(size: u16) -> Scenario {
    Scenario { options: Options { size, ..PACKED }, start: 0, requests: &REQUESTS }
}

#[test]
fn kill_of_a_split_ring_at_any_store_loses_and_repeats_nothing() {
    every_store(&split());
    every_store(&Scenario { options: Options { event_idx: true, ..SPLIT }, ..split() });
}

#[test]
fn kill_of_a_packed_ring_at_any_store_loses_and_repeats_nothing() {
    for size in [4, 7, 8, 32] {
        every_store(&packed(size));
    }
}

#[test]
fn kill_of_the_successor_too_loses_and_repeats_nothing() {
    every_store_twice(&split());
    every_store_twice(&packed(7));
    every_store_twice(&packed(8));
}

#[test]
fn recovery_keeps_the_order_and_comes_before_new_requests() {
    for options in [SPLIT, PACKED] {
        let mut driver = driver(options);
        let region = inflight_region(options);
        let config = driver.config();
        let open =
            |driver: &Driver| Ring::new(config, driver.guest().memory(), region.queue(0)).unwrap();
        let mut ring = open(&driver);
        assert!(ring.publish(), "nobody knows what the one before did");
        assert!(!ring.publish());
        let mut chain = Chain::default();
        let ids: Vec<u16> = (0..3)
            .map(|tag| {
                driver.add(&request(tag, 2), false).unwrap();
                driver.publish();
                assert_eq!(ring.next(&mut chain), Ok(true));
                chain.id
            })
            .collect();
        ring.finish(ids[1], 0);
        let _ = ring.publish();
        drop(ring);

        let fourth = driver.add(&request(3, 1), false).unwrap();
        driver.publish();
        let mut ring = open(&driver);
        assert_eq!((ring.recovering(), ring.in_flight()), (2, 0));
        assert!(ring.is_pending());
        let next: Vec<u16> = (0..3)
            .map(|_| {
                assert_eq!(ring.next(&mut chain), Ok(true));
                chain.id
            })
            .collect();
        assert_eq!(next, [ids[0], ids[2], fourth]);
        assert_eq!((ring.recovering(), ring.in_flight()), (0, 3));
    }
}

/// As [`run`], for a device that uses its buffers in order, keeps a position only, takes several requests at once where it
/// can and shows some before the turn ends. Whether the life sufficed for a kill.
fn run_in_order(options: Options, lives: &[u64]) -> bool {
    const REQUESTS: [usize; 30] =
        [1, 3, 2, 1, 2, 1, 3, 3, 2, 2, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1];
    const TURN: usize = 3;
    // Where nothing is written, a single used descriptor says so of several requests.
    let written = if options.in_order { 0 } else { 7 };
    let all = lives.len();
    let mut driver = driver(options);
    let config = driver.config();
    let positions = positions();
    let mut lives = lives.iter().copied();
    let mut to_add = (0..REQUESTS.len()).peekable();
    let mut ids = VecDeque::new();
    let (mut done, mut back) = (Vec::new(), Vec::new());
    let (mut killed, mut starts) = (0, 0);
    let (mut chain, mut singles) = (Chain::default(), [Single::EMPTY; 2]);
    loop {
        kill::after(lives.next());
        let memory = driver.guest().memory();
        let position = positions.queue(0, TOLD).unwrap();
        let mut ring = Ring::with_position(config, memory, position).unwrap();
        starts += usize::from(ring.base() & 0xffff == 0x8000);
        let mut calls = u32::from(ring.publish());
        let mut turns = 0;
        while !kill::dead() && back.len() < REQUESTS.len() {
            turns += 1;
            assert!(turns < 1000, "a request is lost: {back:?}");
            while let Some(&tag) = to_add.peek() {
                let Some(id) = driver.add(&request(tag as u32, REQUESTS[tag]), false) else {
                    break;
                };
                ids.push_back((id, tag));
                to_add.next();
            }
            driver.publish();
            let mut taken = Vec::new();
            while !kill::dead() && taken.len() < TURN {
                let count = ring.next_singles(&mut singles[..(TURN - taken.len()).min(2)]);
                let of = |single: &Single| (single.id, single.segment.len() - 1);
                taken.extend(singles[..count].iter().map(of));
                if count == 0 {
                    if !ring.next(&mut chain).unwrap() {
                        break;
                    }
                    taken.push((chain.id, chain.writable[0].len() - 1));
                }
            }
            // The last one waits for the next turn, as a buffer does that a device holds.
            let held = (taken.len() > 1 && back.len() % 2 == 0).then(|| taken.pop()).flatten();
            for (id, tag) in taken {
                if kill::dead() {
                    break;
                }
                // Doing it and noting that it is done are two steps.
                done.push(tag);
                ring.finish(id, written);
                if tag % 4 == 1 {
                    ring.flush();
                }
            }
            if let Some((id, _)) = held
                && !kill::dead()
            {
                ring.untake(id);
            }
            calls += u32::from(ring.publish());
            while let Some(taken) = driver.take() {
                assert_eq!(taken.1, written);
                let id = taken.0;
                assert_eq!(ids.front().map(|(id, _)| *id), Some(id), "out of order");
                back.push(ids.pop_front().unwrap().1);
            }
        }
        if !kill::dead() {
            kill::after(None);
            assert!(calls > 0, "the driver may not know of what the last server finished");
            break;
        }
        killed += 1;
    }
    assert_eq!(back, (0..REQUESTS.len()).collect::<Vec<_>>());
    assert_eq!(driver.outstanding(), 0);
    // Where a packed ring may be new, what had finished there and was not shown is not known; of a split one it never is.
    let again = if options.packed { killed + TURN * (starts - 1) } else { TURN * killed };
    assert!(done.len() - back.len() <= again, "{done:?}");
    done.sort_unstable();
    done.dedup();
    assert_eq!(done, back, "left out");
    killed == all
}

/// The base as a front end sets it again and again.
const TOLD: u32 = 0x8000_8000;

pub(super) fn positions() -> Arc<Positions> {
    let file = rustix::fs::memfd_create(c"positions", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    Positions::map(std::os::fd::AsFd::as_fd(&file), 1).unwrap()
}

#[test]
fn kill_of_a_device_that_keeps_its_position_loses_no_request() {
    let sizes = [(true, 4), (true, 7), (true, 8), (true, 32), (false, 4), (false, 32)];
    let sizes = sizes.into_iter().flat_map(|(packed, size)| {
        [true, false].map(|in_order| Options { size, packed, in_order, ..PACKED })
    });
    for options in sizes {
        let mut life = 1;
        while run_in_order(options, &[life]) {
            life += 1;
        }
        assert!(life > 60, "{life}");
        // And its successor.
        for first in (1..life).step_by(3) {
            let mut second = 1;
            while second < 40 && run_in_order(options, &[first, second]) {
                second += 1;
            }
        }
    }
}

/// What was used last begins in an even lap and ends in an odd one, and behind it all is available: the ring would look new but
/// for a mark.
#[test]
fn ring_that_is_available_up_to_its_end_goes_on_after_a_kill() {
    // A chain of two, and two requests that a single used descriptor stands for.
    for (in_order, last) in [(false, &[2][..]), (true, &[2]), (true, &[1, 1])] {
        let mut driver = driver(Options { size: 4, in_order, ..PACKED });
        let (positions, config) = (positions(), driver.config());
        let with = |driver: &Driver| {
            let position = positions.queue(0, TOLD).unwrap();
            Ring::with_position(config, driver.guest().memory(), position).unwrap()
        };
        let mut ring = with(&driver);
        let mut chain = Chain::default();
        for turn in [&[1; 4][..], &[1; 3], last] {
            for &buffers in turn {
                driver.add(&request(0, buffers), false).unwrap();
            }
            driver.publish();
            while ring.next(&mut chain).unwrap() {
                ring.finish(chain.id, 0);
            }
            let _ = ring.publish();
            assert_eq!(std::iter::from_fn(|| driver.take()).count(), turn.len());
        }
        // Up to the ring's end.
        for _ in 0..3 {
            driver.add(&request(0, 1), false).unwrap();
        }
        driver.publish();
        drop(ring);
        let mut ring = with(&driver);
        let mut served = 0;
        while ring.next(&mut chain).unwrap() {
            ring.finish(chain.id, 0);
            served += 1;
        }
        let _ = ring.publish();
        let back = std::iter::from_fn(|| driver.take()).count();
        assert_eq!((served, back), (3, 3), "in order: {in_order}, {last:?}");
    }
}

/// A frame lies in several buffers: one that is cut off would be taken for another's beginning.
#[test]
fn kill_shows_all_requests_that_are_one_or_none_of_them() {
    for (stores, publishes_each) in (1..).flat_map(|stores| [(stores, false), (stores, true)]) {
        let mut driver = driver(PACKED);
        let (positions, config) = (positions(), driver.config());
        let with = |driver: &Driver| {
            let position = positions.queue(0, TOLD).unwrap();
            Ring::with_position(config, driver.guest().memory(), position).unwrap()
        };
        for tag in 0..6 {
            driver.add(&request(tag, 1), false).unwrap();
        }
        driver.publish();
        let mut ring = with(&driver);
        let mut chain = Chain::default();
        kill::after(Some(stores));
        for buffer in 1..=6 {
            assert_eq!(ring.next(&mut chain), Ok(true));
            if buffer % 3 > 0 {
                ring.finish_with_next(chain.id, 1);
            } else {
                ring.finish(chain.id, 1);
            }
            if publishes_each && buffer == 3 {
                let _ = ring.publish();
            }
        }
        let _ = ring.publish();
        let is_dead = kill::dead();
        kill::after(None);
        drop(ring);
        let mut ring = with(&driver);
        let shown = std::iter::from_fn(|| driver.take()).count();
        assert_eq!(shown % 3, 0, "{shown} of 6 are shown after {stores} stores");
        let left = std::iter::from_fn(|| ring.next(&mut chain).unwrap().then_some(())).count();
        assert_eq!(shown + left, 6, "after {stores} stores");
        if !is_dead {
            assert!(stores > 12 && shown == 6);
            break;
        }
    }
}

/// Some front ends that connect again set the available index as the base: what is between is not passed over.
#[test]
fn split_ring_with_a_position_begins_behind_what_is_used() {
    let mut driver = driver(SPLIT);
    let positions = positions();
    let with = |driver: &Driver, base| {
        let config = RingConfig { base, ..driver.config() };
        let position = positions.queue(0, TOLD).unwrap();
        Ring::with_position(config, driver.guest().memory(), position).unwrap()
    };
    let mut ring = with(&driver, 0);
    let ids = [0, 1, 2].map(|tag| driver.add(&request(tag, 1), false).unwrap());
    driver.publish();
    let mut chain = Chain::default();
    assert_eq!(ring.next(&mut chain), Ok(true));
    ring.finish(ids[0], 1);
    let _ = ring.publish();
    assert_eq!(ring.next(&mut chain), Ok(true));
    drop(ring);
    let mut ring = with(&driver, 3);
    for id in &ids[1..] {
        assert_eq!(ring.next(&mut chain), Ok(true));
        assert_eq!(chain.id, *id);
    }
    assert_eq!(ring.next(&mut chain), Ok(false));
}

/// What is kept is of one ring: another one begins at its base.
#[test]
fn position_of_another_ring_is_not_taken() {
    let mut driver = driver(PACKED);
    let positions = positions();
    let with = |driver: &Driver, base| {
        let config = RingConfig { base, ..driver.config() };
        let memory = driver.guest().memory();
        Ring::with_position(config, memory, positions.queue(0, TOLD).unwrap()).unwrap()
    };
    let start = driver.config().base;
    let mut ring = with(&driver, start);
    let mut chain = Chain::default();
    for tag in 0..3 {
        let id = driver.add(&request(tag, 1), false).unwrap();
        driver.publish();
        assert_eq!(ring.next(&mut chain), Ok(true));
        ring.finish(id, 1);
        let _ = ring.publish();
        assert!(driver.take().is_some());
    }
    let there = ring.base();
    drop(ring);
    assert!(positions.is_used());
    assert_eq!(with(&driver, start).base(), there);
    // A front end that sets another base knows better.
    let told = |base, told| {
        let config = RingConfig { base, ..driver.config() };
        let position = positions.queue(0, told).unwrap();
        Ring::with_position(config, driver.guest().memory(), position).unwrap().base()
    };
    assert_eq!(told(start, there), start);
    assert_eq!(with(&driver, there).base(), there);
    // Of another guest.
    let other = self::driver(PACKED);
    assert_eq!(with(&other, start).base(), start);
    assert_eq!(with(&driver, start).base(), start, "it is the other's now");
    // The front end was told.
    positions.forget(0);
    assert!(!positions.is_used());
    assert_eq!(with(&driver, there).base(), there);
    assert_eq!(with(&driver, start).base(), there, "kept");
    // The driver has reset the device.
    let (descriptors, _, _) = driver.addresses();
    for index in 0..8 {
        driver.guest().write(descriptors + 16 * index, &[0; 16]);
    }
    assert_eq!(with(&driver, start).base(), start);
    // It has not where the front end still sets another base than that of a new ring.
    let stopped = 0x8005_8005;
    positions.forget(0);
    assert_eq!(told(there, stopped), there);
    assert_eq!(told(stopped, stopped), there);
}

/// QEMU serves the ring of a device whose server is away, from where it was told last.
#[test]
fn what_a_front_end_drops_meanwhile_is_not_waited_for() {
    for before in 0..16 {
        let mut driver = driver(PACKED);
        let positions = positions();
        let start = driver.config();
        let with = |driver: &Driver, base| {
            let config = RingConfig { base, ..start };
            let position = positions.queue(0, base).unwrap();
            Ring::with_position(config, driver.guest().memory(), position).unwrap()
        };
        let mut chain = Chain::default();
        let mut ring = with(&driver, start.base);
        for tag in 0..before {
            driver.add(&request(tag, 1), false).unwrap();
            driver.publish();
            assert_eq!(ring.next(&mut chain), Ok(true));
            ring.finish(chain.id, 0);
            let _ = ring.publish();
            assert!(driver.take().is_some());
        }
        drop(ring);
        let mut sent = Vec::new();
        for tag in 0..3 {
            sent.push(driver.add(&request(tag, 1 + tag as usize % 2), false).unwrap());
        }
        driver.publish();
        let mut front_end = Ring::new(start, driver.guest().memory(), None).unwrap();
        let mut base = start.base;
        while front_end.next(&mut chain) == Ok(true) {
            front_end.finish(chain.id, 0);
            let _ = front_end.publish();
            base = front_end.base();
        }
        let mut ring = with(&driver, base);
        // What it has not dropped is still there.
        while ring.next(&mut chain).unwrap() {
            ring.finish(chain.id, 0);
        }
        let _ = ring.publish();
        for id in sent {
            assert_eq!(driver.take(), Some((id, 0)), "after {before}");
        }
        driver.add(&request(7, 1), false).unwrap();
        driver.publish();
        assert_eq!(ring.next(&mut chain), Ok(true), "after {before}");
    }
}

/// The file is the server's own; but who finds nonsense in it does not fall.
#[test]
fn position_that_cannot_be_is_not_taken() {
    let file = rustix::fs::memfd_create(c"positions", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let driver = driver(PACKED);
    let (descriptors, _, _) = driver.addresses();
    // Used, so that the ring itself does not speak against it.
    driver.guest().write(descriptors + 14, &[0x80, 0x80]);
    // The position and the number of requests that have finished, and those requests' descriptors.
    for (position, length, counts) in [
        (0x8008_u16, 0_u16, [0_u8, 0]),
        (0xffff, 0, [0, 0]),
        (0x8000, 0xffff, [1, 1]),
        (0x8000, 9, [1, 1]),
        (0x8000, 2, [0, 3]),
        (0x8000, 2, [5, 5]),
    ] {
        let positions = Positions::map(std::os::fd::AsFd::as_fd(&file), 1).unwrap();
        let with = || {
            let memory = driver.guest().memory();
            Ring::with_position(driver.config(), memory, positions.queue(0, TOLD).unwrap()).unwrap()
        };
        drop(with());
        let [first, second] = counts;
        let list = [0, 0, 0, 0, 0, 0, first, 0, 0, 0, 0, 0, 0, 0, second, 0];
        rustix::io::pwrite(&file, &list, 64).unwrap();
        let state = [position.to_le_bytes(), length.to_le_bytes()].concat();
        rustix::io::pwrite(&file, &state, 32).unwrap();
        assert_eq!(with().base(), driver.config().base, "{position:#x} {length} {counts:?}");
    }
}

/// A front end says where a ring is, and later makes it smaller than that.
#[test]
fn place_beyond_the_ring_is_never_looked_at() {
    let file = rustix::fs::memfd_create(c"positions", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let driver = driver(PACKED);
    let (descriptors, _, _) = driver.addresses();
    // Used, so that the ring itself does not speak against it.
    driver.guest().write(descriptors + 14, &[0x80, 0x80]);
    let positions = Positions::map(std::os::fd::AsFd::as_fd(&file), 1).unwrap();
    let with = |base, told| {
        let config = RingConfig { base, ..driver.config() };
        let queue = positions.queue(0, told).unwrap();
        Ring::with_position(config, driver.guest().memory(), queue).map(|ring| ring.base())
    };
    let beyond = u32::from(PACKED.size) | 0x8000;
    for told in [beyond, beyond << 16 | 0x7fff, 0xffff] {
        assert_eq!(with(0x8000, told), Err(RingError::Base));
    }
    // What is kept may say so too: it is a file.
    let base = driver.config().base;
    for told in [beyond as u16, 0xffff, 0x7fff] {
        with(base, TOLD).unwrap();
        rustix::io::pwrite(&file, &told.to_le_bytes(), 40).unwrap();
        assert_eq!(with(base, TOLD), Ok(base), "{told:#x}");
    }
}
