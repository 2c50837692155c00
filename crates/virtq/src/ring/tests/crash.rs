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
