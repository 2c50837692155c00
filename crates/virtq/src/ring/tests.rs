//! Tests of the rings: what well-behaved drivers get, in any order of events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use crate::Segment;
use proptest::prelude::*;

use super::driver::{Buffer, Driver, GUEST, Guest, Options};
use super::*;

mod crash;
mod hostile;

/// Guest memory for requests' data, in front of the ring.
const DATA: u64 = GUEST;
const DATA_SIZE: u64 = 0x1_0000;

pub(super) fn driver(options: Options) -> Driver {
    let guest = Guest::new((DATA_SIZE + Driver::bytes(options.size)).next_multiple_of(4096));
    Driver::new(guest, DATA + DATA_SIZE, options)
}

pub(super) fn ring(driver: &Driver) -> Ring {
    Ring::new(driver.config(), driver.guest().memory(), None).unwrap()
}

/// A request of so many buffers, whose lengths name it: the last one is written.
pub(super) fn request(tag: u32, count: usize) -> Vec<Buffer> {
    let buffer = |index: usize| Buffer {
        address: DATA + 16 * index as u64,
        length: tag + 1,
        writable: index + 1 == count,
    };
    (0..count).map(buffer).collect()
}

fn host(driver: &Driver, address: u64) -> *mut u8 {
    driver.guest().memory().guest(address, 1).unwrap().base()
}

const SPLIT: Options =
    Options { size: 8, packed: false, event_idx: false, indirect: true, in_order: false };
const PACKED: Options = Options { packed: true, ..SPLIT };

/// A device that gathers buffers gives those back that it does not need.
#[test]
fn requests_that_were_taken_go_back_in_reverse_and_come_again() {
    for options in [SPLIT, PACKED, Options { event_idx: true, ..SPLIT }] {
        let mut driver = driver(options);
        let mut ring = ring(&driver);
        let mut chain = Chain::default();
        // So often that a packed ring wraps in the midst of it.
        for round in 0..20 {
            let ids: Vec<u16> = (0..3)
                .map(|i| driver.add(&request(round + i, 1 + i as usize % 2), false).unwrap())
                .collect();
            driver.publish();
            for id in &ids {
                assert_eq!(ring.next(&mut chain), Ok(true));
                assert_eq!(chain.id, *id);
            }
            ring.finish(ids[0], 1);
            let all = ring.base();
            ring.untake(ids[2]);
            ring.untake(ids[1]);
            assert_eq!(ring.in_flight(), 0);
            assert!(ring.is_pending() && ring.base() != all);
            let _ = ring.publish();
            for id in &ids[1..] {
                assert_eq!(ring.next(&mut chain), Ok(true), "round {round}");
                assert_eq!(chain.id, *id);
                ring.finish(*id, 1);
            }
            assert_eq!(ring.base() & 0xffff, all & 0xffff);
            let _ = ring.publish();
            for id in &ids {
                assert_eq!(driver.take(), Some((*id, 1)), "round {round}");
            }
        }
    }
}

#[test]
fn next_chain_of_three_is_translated_and_sorted() {
    for (options, indirect) in [(SPLIT, false), (SPLIT, true), (PACKED, false), (PACKED, true)] {
        let mut driver = driver(options);
        let mut ring = ring(&driver);
        let mut chain = Chain::default();
        assert_eq!(ring.next(&mut chain), Ok(false));
        let buffers = [
            Buffer { address: DATA + 5, length: 16, writable: false },
            Buffer { address: DATA + 4096, length: 512, writable: true },
            Buffer { address: DATA + 64, length: 1, writable: true },
        ];
        let id = driver.add(&buffers, indirect).unwrap();
        assert!(!ring.is_pending(), "not published");
        driver.publish();
        assert!(ring.is_pending());
        assert_eq!(ring.next(&mut chain), Ok(true));
        assert_eq!(chain.id, id);
        let read: Vec<_> = chain.readable.iter().map(|s| (s.base(), s.len())).collect();
        let written: Vec<_> = chain.writable.iter().map(|s| (s.base(), s.len())).collect();
        assert_eq!(read, [(host(&driver, DATA + 5), 16)]);
        assert_eq!(written, [(host(&driver, DATA + 4096), 512), (host(&driver, DATA + 64), 1)]);
        assert_eq!((ring.in_flight(), ring.next(&mut chain)), (1, Ok(false)));

        ring.finish(id, 513);
        assert_eq!(driver.take(), None, "not published");
        assert!(ring.publish(), "the driver has not asked for silence");
        assert!(!ring.publish(), "nothing new");
        assert_eq!(driver.take(), Some((id, 513)));
        assert_eq!(ring.in_flight(), 0);
    }
}

#[test]
fn base_after_requests_is_the_next_entry() {
    let mut driver = driver(Options { size: 4, ..SPLIT }).starting_at(65534);
    let mut ring = ring(&driver);
    assert_eq!(ring.base(), 65534);
    turn(&mut driver, &mut ring, 3);
    assert_eq!(ring.base(), 1);

    // Three descriptors of four are one lap and one descriptor after five requests.
    let mut driver = self::driver(Options { size: 4, ..PACKED });
    let mut ring = self::ring(&driver);
    assert_eq!(ring.base(), 0x8000_8000);
    turn(&mut driver, &mut ring, 5);
    assert_eq!(ring.base(), 0x0001_0001);
    // A successor goes on there.
    let config = RingConfig { base: ring.base(), ..driver.config() };
    let mut ring = Ring::new(config, driver.guest().memory(), None).unwrap();
    turn(&mut driver, &mut ring, 5);
    assert_eq!(ring.base(), 0x8002_8002);
}

#[test]
fn packed_base_of_0_is_first_lap_of_new_ring_and_second_of_another() {
    let mut driver = driver(Options { size: 4, ..PACKED });
    let config = RingConfig { base: 0, ..driver.config() };
    let mut ring = Ring::new(config, driver.guest().memory(), None).unwrap();
    assert_eq!(ring.base(), 0x8000_8000);
    // Four requests of three descriptors are three laps.
    turn(&mut driver, &mut ring, 4);
    assert_eq!(ring.base(), 0);
    let mut ring = Ring::new(config, driver.guest().memory(), None).unwrap();
    assert_eq!(ring.base(), 0);
    turn(&mut driver, &mut ring, 5);
}

/// So many requests, one after the other.
fn turn(driver: &mut Driver, ring: &mut Ring, count: u32) {
    let mut chain = Chain::default();
    for tag in 0..count {
        let id = driver.add(&request(tag, 1), false).unwrap();
        driver.publish();
        assert_eq!(ring.next(&mut chain), Ok(true));
        ring.finish(chain.id, tag);
        let _ = ring.publish();
        assert_eq!(driver.take(), Some((id, tag)));
    }
}

#[test]
fn publish_event_index_calls_once_it_is_passed() {
    for packed in [false, true] {
        let mut driver = driver(Options { packed, event_idx: true, ..SPLIT });
        let mut ring = ring(&driver);
        let mut chain = Chain::default();
        for tag in 0..3 {
            driver.add(&request(tag, 1), false).unwrap();
        }
        driver.publish();
        assert!(!driver.enable_calls(), "wants to know of the first");
        let ids = [(); 3].map(|()| {
            assert_eq!(ring.next(&mut chain), Ok(true));
            chain.id
        });
        ring.finish(ids[0], 0);
        assert!(ring.publish());
        ring.finish(ids[1], 0);
        assert!(!ring.publish(), "already told");
        driver.take().unwrap();
        driver.take().unwrap();
        assert!(!driver.enable_calls());
        ring.finish(ids[2], 0);
        assert!(ring.publish());
    }
}

#[test]
fn what_was_flushed_is_called_for_by_the_next_publication() {
    for packed in [false, true] {
        let mut driver = driver(Options { packed, event_idx: true, ..SPLIT });
        let mut ring = ring(&driver);
        let mut singles = [Single::EMPTY; 8];
        // Twice the ring, so that an index in the lap before is passed, too.
        for round in 0..4 {
            for tag in 0..5 {
                driver.add(&request(tag, 1), false).unwrap();
            }
            driver.publish();
            assert!(!driver.enable_calls(), "wants to know of the first");
            assert_eq!(ring.next_singles(&mut singles), 5);
            for (at, single) in singles[..5].iter().enumerate() {
                ring.finish(single.id, 1);
                ring.flush();
                assert_eq!(driver.take(), Some((single.id, 1)), "round {round}: {at} is shown");
            }
            assert!(ring.publish(), "round {round}");
            assert!(!ring.publish(), "round {round}: already told");
        }
    }
}

#[test]
fn singles_end_before_what_is_none_which_next_takes() {
    for options in [SPLIT, PACKED] {
        let mut driver = driver(options);
        let mut ring = ring(&driver);
        let (mut singles, mut chain) = ([Single::EMPTY; 8], Chain::default());
        let readable = Buffer { address: DATA, length: 100, writable: false };
        let ids = [
            driver.add(&[readable], false).unwrap(),
            driver.add(&request(7, 2), false).unwrap(),
            driver.add(&request(8, 1), true).unwrap(),
            driver.add(&request(9, 1), false).unwrap(),
        ];
        assert_eq!(ring.next_singles(&mut singles), 0, "not published");
        driver.publish();
        assert_eq!(ring.next_singles(&mut singles), 1);
        assert_eq!((singles[0].id, singles[0].is_writable), (ids[0], false));
        assert_eq!(singles[0].segment.base(), host(&driver, DATA));
        for id in &ids[1..3] {
            assert_eq!(ring.next_singles(&mut singles), 0);
            assert_eq!(ring.next(&mut chain), Ok(true));
            assert_eq!(chain.id, *id);
        }
        assert_eq!(ring.next_singles(&mut singles), 1);
        assert_eq!((ring.in_flight(), singles[0].segment.len()), (4, 10));
        // They go back as others do.
        ring.untake(ids[3]);
        assert_eq!(ring.next_singles(&mut singles[..1]), 1);
        assert_eq!(singles[0].id, ids[3]);
    }
}

#[test]
fn publish_calls_disabled_is_silent() {
    for packed in [false, true] {
        let mut driver = driver(Options { packed, ..SPLIT });
        let mut ring = ring(&driver);
        driver.disable_calls();
        driver.add(&request(0, 1), false).unwrap();
        driver.publish();
        let mut chain = Chain::default();
        assert_eq!(ring.next(&mut chain), Ok(true));
        ring.finish(chain.id, 0);
        assert!(!ring.publish());
    }
}

#[test]
fn kick_follows_the_notification_state() {
    for (packed, event_idx) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut driver = driver(Options { packed, event_idx, ..SPLIT });
        let mut ring = ring(&driver);
        let mut chain = Chain::default();
        assert!(!ring.enable_notification());
        driver.add(&request(0, 1), false).unwrap();
        assert!(driver.publish(), "asked for");
        ring.disable_notification();
        assert_eq!(ring.next(&mut chain), Ok(true));
        driver.add(&request(1, 1), false).unwrap();
        assert!(!driver.publish(), "polled");
        assert!(ring.enable_notification(), "it came in the meantime");
    }
}

#[test]
fn set_memory_ring_in_the_new_table_goes_on() {
    for options in [SPLIT, PACKED] {
        let mut driver = driver(options);
        let mut ring = ring(&driver);
        turn(&mut driver, &mut ring, 3);
        let same = Memory::new(vec![Arc::clone(driver.guest().region())]).unwrap();
        ring.set_memory(Arc::new(same)).unwrap();
        turn(&mut driver, &mut ring, 11);
        assert_eq!(ring.set_memory(Arc::new(Memory::default())), Err(RingError::Unmapped));
        assert_eq!(ring.next(&mut Chain::default()), Err(RingError::Unmapped));
        assert!(!ring.is_pending());
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Add { buffers: usize, indirect: bool },
    Available,
    Next,
    Singles(usize),
    Finish(usize),
    Flush,
    Publish,
    Take,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..5_usize, any::<bool>()).prop_map(|(buffers, indirect)| Step::Add { buffers, indirect }),
        2 => Just(Step::Available),
        3 => Just(Step::Next),
        2 => (1..40_usize).prop_map(Step::Singles),
        1 => Just(Step::Flush),
        3 => any::<usize>().prop_map(Step::Finish),
        2 => Just(Step::Publish),
        3 => Just(Step::Take),
    ]
}

fn options() -> impl Strategy<Value = Options> {
    let size = prop_oneof![Just(2_u16), Just(4), Just(8), Just(256), Just(1024)];
    (size, 2..=1024_u16, any::<(bool, bool)>()).prop_map(|(split, odd, (packed, event_idx))| {
        let size = if packed { odd } else { split };
        Options { size, packed, event_idx, indirect: true, in_order: false }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Every request that is made available comes out of `next` once, in order, as it was, and
    /// goes back to the driver once, with what was written.
    #[test]
    fn requests_any_interleaving_are_conserved(
        options in options(),
        steps in prop::collection::vec(step(), 1..400),
        start in any::<u16>(),
        inflight in any::<bool>(),
    ) {
        let mut driver = driver(options);
        if !options.packed {
            driver = driver.starting_at(start);
        }
        let region = inflight.then(|| inflight_region(options));
        let queue = region.as_ref().and_then(|region| region.queue(1));
        let mut ring = Ring::new(driver.config(), driver.guest().memory(), queue).unwrap();
        let mut chain = Chain::default();
        let mut added = VecDeque::new();
        let mut available = VecDeque::new();
        let mut begun = Vec::new();
        let mut finished = VecDeque::new();
        let mut used = VecDeque::new();
        let mut tag = 0;
        // Then whatever is left, to the end.
        let end = [Step::Available, Step::Next, Step::Finish(0), Step::Publish, Step::Take];
        let end = std::iter::repeat_n(end, 2 * usize::from(options.size)).flatten();
        for step in steps.into_iter().chain(end) {
            match step {
                Step::Add { buffers, indirect } => {
                    if let Some(id) = driver.add(&request(tag, buffers), indirect) {
                        added.push_back((id, tag, buffers, indirect));
                        tag = (tag + 1) % 1000;
                    }
                }
                Step::Available => {
                    driver.publish();
                    available.append(&mut added);
                }
                Step::Next => {
                    prop_assert_eq!(ring.is_pending(), !available.is_empty());
                    let taken = ring.next(&mut chain).unwrap();
                    prop_assert_eq!(taken, !available.is_empty());
                    if let Some((id, tag, buffers, _)) = available.pop_front() {
                        prop_assert_eq!(chain.id, id);
                        prop_assert_eq!(chain.readable.len(), buffers - 1);
                        prop_assert_eq!(chain.writable.len(), 1);
                        prop_assert_eq!(chain.writable[0].len(), tag as usize + 1);
                        begun.push((id, tag));
                    }
                }
                Step::Singles(most) => {
                    let mut singles = [Single::EMPTY; 40];
                    let taken = ring.next_singles(&mut singles[..most]);
                    let is_single = |&&(_, _, buffers, indirect): &&(_, _, usize, bool)| buffers == 1 && !indirect;
                    let expected = available.iter().take(most).take_while(is_single).count();
                    prop_assert_eq!(taken, if inflight { 0 } else { expected });
                    for (single, (id, tag, ..)) in singles[..taken].iter().zip(available.drain(..taken)) {
                        prop_assert_eq!((single.id, single.is_writable), (id, true));
                        prop_assert_eq!(single.segment.len(), tag as usize + 1);
                        begun.push((id, tag));
                    }
                }
                Step::Finish(index) if !begun.is_empty() => {
                    let (id, tag) = begun.swap_remove(index % begun.len());
                    ring.finish(id, tag);
                    finished.push_back((id, tag));
                }
                Step::Finish(_) => {}
                Step::Flush => {
                    ring.flush();
                    used.append(&mut finished);
                }
                Step::Publish => {
                    let _ = ring.publish();
                    used.append(&mut finished);
                }
                Step::Take => prop_assert_eq!(driver.take(), used.pop_front()),
            }
            prop_assert_eq!(usize::from(ring.in_flight()), begun.len());
        }
        prop_assert_eq!(driver.outstanding(), 0);
    }
}

pub(super) fn inflight_region(options: Options) -> Arc<Inflight> {
    let (fd, size) = Inflight::create(2, options.size, options.packed).unwrap();
    Inflight::map(fd, 0, size, 2, options.size, options.packed).unwrap()
}

/// A device and a driver that sleep when there is nothing to do: a lost kick or call would leave
/// both asleep.
fn sleepers(options: Options) {
    const REQUESTS: u32 = 20_000;
    const PATIENCE: Duration = Duration::from_secs(20);
    let mut driver = driver(options);
    let mut ring = ring(&driver);
    let (kick, kicked): (SyncSender<()>, Receiver<()>) = sync_channel(1);
    let (call, called) = sync_channel(1);
    let device = std::thread::spawn(move || {
        let mut chain = Chain::default();
        let mut done = 0;
        while done < REQUESTS {
            ring.disable_notification();
            while ring.next(&mut chain).unwrap() {
                ring.finish(chain.id, 0);
                done += 1;
                if done % 3 == 0 && ring.publish() {
                    let _ = call.try_send(());
                }
            }
            if ring.publish() {
                let _ = call.try_send(());
            }
            if done < REQUESTS && !ring.enable_notification() {
                kicked.recv_timeout(PATIENCE).expect("a kick was lost");
            }
        }
    });
    let (mut asked, mut back) = (0, 0);
    while back < REQUESTS {
        driver.disable_calls();
        while asked < REQUESTS && driver.add(&request(asked % 100, 2), false).is_some() {
            asked += 1;
            if asked % 2 == 0 && driver.publish() {
                let _ = kick.try_send(());
            }
        }
        if driver.publish() {
            let _ = kick.try_send(());
        }
        while driver.take().is_some() {
            back += 1;
        }
        if driver.outstanding() > 0 && !driver.enable_calls() {
            called.recv_timeout(PATIENCE).expect("a call was lost");
        }
    }
    device.join().unwrap();
}

#[test]
fn notifications_two_threads_that_sleep_are_never_lost() {
    for (packed, event_idx) in [(false, false), (false, true), (true, false), (true, true)] {
        sleepers(Options { packed, event_idx, ..SPLIT });
    }
}

#[test]
fn used_writes_are_logged_where_the_front_end_says() {
    let mut driver = driver(SPLIT);
    let log = crate::memory::tests::log(4096);
    let memory = Arc::new(driver.guest().memory().with_log(Some(Arc::clone(&log.log))));
    let mut ring = Ring::new(driver.config(), memory, None).unwrap();
    turn(&mut driver, &mut ring, 1);
    assert_eq!(log.pages(), Vec::<u64>::new(), "not asked for");
    ring.set_log(Some(5 * 4096 - 8));
    turn(&mut driver, &mut ring, 1);
    // The index in one page; the second entry, at 12 + 8, in the next.
    assert_eq!(log.pages(), [4, 5]);
}

#[test]
fn packed_used_writes_are_logged_where_they_are() {
    let mut driver = driver(PACKED);
    let log = crate::memory::tests::log(4096);
    let memory = Arc::new(driver.guest().memory().with_log(Some(Arc::clone(&log.log))));
    let config = RingConfig { log: Some(0), ..driver.config() };
    let mut ring = Ring::new(config, memory, None).unwrap();
    turn(&mut driver, &mut ring, 1);
    assert_eq!(log.pages(), [driver.addresses().0 / 4096]);
}
