//! Queues that move among threads while they are served.

use super::tricky::Tricky;
use super::*;

/// Waits until this many requests have left the ring.
fn until_in_flight(stats: &QueueStats, count: u64) {
    let start = Instant::now();
    while stats.snapshot().in_flight < count {
        assert!(start.elapsed() < LOST);
        std::thread::yield_now();
    }
}

#[test]
fn completion_follows_its_queue_over_a_thread_that_started_nothing() {
    let Some(pool) = pool() else { return };
    let [a, b, c] = threads(&pool);
    let device = device(ssd("ref-4x250*100"), 1);
    let mut queue = Guarded::new(Shape { depth: 4, ..Shape::of(0) });
    let setup = queue.setup(&device);
    let stats = Arc::clone(&setup.stats);
    let key = pool.start(setup, a).unwrap();
    queue.fill();
    queue.publish();
    until_in_flight(&stats, 4);
    pool.move_queue(key, b).unwrap();
    pool.move_queue(key, c).unwrap();
    queue.drain();
    // And back to where it came from.
    pool.move_queue(key, a).unwrap();
    queue.run_requests(8);
    pool.stop(key).unwrap();
}

#[test]
fn thread_that_completions_come_by_ends_and_none_is_lost() {
    let Some(pool) = pool() else { return };
    let is_caught = (0..20).any(|_| thread_ends_with_completions_to_come(&pool));
    assert!(is_caught, "too slow a machine for this test");
}

/// Whether they were still to come.
fn thread_ends_with_completions_to_come(pool: &Pool) -> bool {
    let [a, b, c] = threads(pool);
    let device = device(ssd("ref-4x250*100"), 1);
    let mut queue = Guarded::new(Shape { depth: 4, ..Shape::of(0) });
    let setup = queue.setup(&device);
    let stats = Arc::clone(&setup.stats);
    let key = pool.start(setup, a).unwrap();
    queue.fill();
    queue.publish();
    until_in_flight(&stats, 4);
    pool.move_queue(key, b).unwrap();
    pool.move_queue(key, c).unwrap();
    // On the way from a to c; it started nothing itself.
    pool.remove_thread(b).unwrap();
    let is_caught = stats.snapshot().in_flight == 4;
    // It has to wait for the four that it started.
    pool.remove_thread(a).unwrap();
    queue.drain();
    queue.run_requests(8);
    pool.stop(key).unwrap();
    pool.remove_thread(c).unwrap();
    is_caught
}

/// A disk that answers late keeps a thread that is removed at work, and the thread that it forwards to may be removed before
/// that.
#[test]
fn completion_of_a_thread_that_was_removed_follows_its_queue_past_another_one() {
    let Some(pool) = pool() else { return };
    let [a, b, c] = threads(&pool);
    let late = END_TIME + Duration::from_secs(2);
    let every = std::num::NonZeroU64::new(1).unwrap();
    let faults = Faults { stall: Some((every, late)), ..Faults::default() };
    let config = "ref-8x80".parse().unwrap();
    let engine = SsdEngine::start(config, Bytes::new(DISK), 1, faults).unwrap();
    let device = device(Arc::new(engine), 1);
    let mut queue = Guarded::new(Shape { depth: 4, ..Shape::of(0) });
    let setup = queue.setup(&device);
    let stats = Arc::clone(&setup.stats);
    let key = pool.start(setup, a).unwrap();
    queue.fill();
    queue.publish();
    until_in_flight(&stats, 4);
    pool.move_queue(key, b).unwrap();
    // It is not waited for until all has ended that it started.
    pool.remove_thread(a).unwrap();
    pool.move_queue(key, c).unwrap();
    pool.remove_thread(b).unwrap();
    assert_eq!(stats.snapshot().in_flight, 4, "too slow a machine for this test");
    queue.drain();
    pool.stop(key).unwrap();
    pool.remove_thread(c).unwrap();
}

/// Moves queues at random, as fast as it goes, until all have made their requests.
fn move_at_full_speed(engines: &[Arc<dyn Engine>], requests: u64) {
    let devices = engines.iter().map(|engine| device(Arc::clone(engine), 2));
    move_devices_at_full_speed(devices, requests);
}

/// Devices have two queues each.
pub(super) fn move_devices_at_full_speed(
    devices: impl Iterator<Item = Arc<Device>>,
    requests: u64,
) {
    let Some(pool) = pool() else { return };
    let ids: [_; 3] = threads(&pool);
    let (stop, moves) = (AtomicBool::new(false), AtomicU64::new(0));
    let queues: Vec<_> = devices
        .flat_map(|device| {
            [0, 1].map(|part| (Guarded::new(Shape::of(part + 1)), Arc::clone(&device)))
        })
        .map(|(queue, device)| (pool.start(queue.setup(&device), ids[0]).unwrap(), queue))
        .collect();
    let keys: Vec<QueueKey> = queues.iter().map(|&(key, _)| key).collect();
    std::thread::scope(|scope| {
        let workers: Vec<_> = queues
            .into_iter()
            .map(|(_, mut queue)| scope.spawn(move || queue.run_requests(requests)))
            .collect();
        let (pool, stop, moves, keys) = (&pool, &stop, &moves, &keys);
        let mover = scope.spawn(move || {
            let mut random = Guarded::new(Shape::of(5));
            while !stop.load(Relaxed) {
                let key = keys[random.random(keys.len() as u64) as usize];
                let pause = pool.move_queue(key, ids[random.random(3) as usize]).unwrap();
                assert!(pause < LOST);
                moves.fetch_add(1, Relaxed);
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Relaxed);
        mover.join().unwrap();
        assert!(ended.iter().all(Result::is_ok));
    });
    for key in keys {
        assert_eq!(pool.stop(key).unwrap().in_flight(), 0);
    }
    assert!(moves.load(Relaxed) > 100, "{moves:?} moves");
    for id in ids {
        pool.remove_thread(id).unwrap();
    }
}

#[test]
fn moves_at_full_speed_lose_repeat_and_misplace_nothing() {
    if !has_io_uring() {
        return;
    }
    move_at_full_speed(&[ram(), file(Aio::IoUring), file(Aio::Threads)], 10_000);
}

#[test]
fn moves_while_completions_are_in_flight_lose_repeat_and_misplace_nothing() {
    move_at_full_speed(&[ssd("ref-4x250"), ssd("ref-4x250")], 5_000);
}

#[test]
fn moves_of_short_transfers_lose_repeat_and_misplace_nothing() {
    if !has_io_uring() {
        return;
    }
    move_at_full_speed(&[Tricky::new(512, false), Tricky::new(1024, false)], 3_000);
}

#[test]
fn moves_race_stop_start_edits_and_ending_threads() {
    let Some(pool) = pool() else { return };
    let ids: [_; 2] = threads(&pool);
    let stop = AtomicBool::new(false);
    let key = std::sync::Mutex::new(None);
    let (moved, removed) = (AtomicU64::new(0), AtomicU64::new(0));
    let (pool, stop, key) = (&pool, &stop, &key);
    std::thread::scope(|scope| {
        // A thread that comes and goes.
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let id = pool.add_thread("brief", Polling::default()).unwrap();
                if let Some(key) = *key.lock().unwrap() {
                    let _ = pool.move_queue(key, id);
                    let _ = pool.move_queue(key, ids[0]);
                }
                let start = Instant::now();
                while let Err(error) = pool.remove_thread(id) {
                    assert!(matches!(error, PoolError::InUse { .. }), "{error}");
                    assert!(start.elapsed() < LOST);
                    if let Some(key) = *key.lock().unwrap() {
                        let _ = pool.move_queue(key, ids[1]);
                    }
                }
                removed.fetch_add(1, Relaxed);
            }
        });
        scope.spawn(|| {
            for turn in 0.. {
                if stop.load(Relaxed) {
                    break;
                }
                let key = *key.lock().unwrap();
                let Some(key) = key else { continue };
                match pool.move_queue(key, ids[turn % 2]) {
                    Ok(_) => {
                        moved.fetch_add(1, Relaxed);
                    }
                    Err(MoveError::Busy | MoveError::Pool(PoolError::NoQueue)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let _stop = Stop(stop);
        // The front end: starts, changes memory and call, stops with requests in flight.
        for round in 0..100 {
            let mut queue = Guarded::new(Shape::of(round % 4));
            let device = device(ssd("ref-4x250"), 4);
            let started = pool.start(queue.setup(&device), ids[(round % 2) as usize]).unwrap();
            *key.lock().unwrap() = Some(started);
            for _ in 0..3 {
                queue.fill();
                queue.publish();
                let memory = queue.driver.guest().memory();
                pool.edit(started, move |q| q.set_memory(memory, None)).unwrap().unwrap();
                let call = Call::new(queue.call.try_clone().unwrap(), device.caller()).unwrap();
                pool.edit(started, move |q| q.set_call(Some(call))).unwrap();
                queue.wait(Duration::from_millis(1));
                queue.reap();
            }
            queue.fill();
            queue.publish();
            let stopped = pool.stop(started).unwrap();
            assert_eq!((stopped.in_flight(), stopped.broken()), (0, None));
            *key.lock().unwrap() = None;
            queue.reap();
            // What was not taken before the stop is taken by a start from there.
            let config =
                rtvirtio_virtq::ring::RingConfig { base: stopped.base(), ..queue.driver.config() };
            let ring = Ring::new(config, queue.driver.guest().memory(), None).unwrap();
            let again = pool.start(QueueSetup { ring, ..queue.setup(&device) }, ids[0]).unwrap();
            *key.lock().unwrap() = Some(again);
            queue.drain();
            pool.stop(again).unwrap();
            *key.lock().unwrap() = None;
        }
    });
    assert!(moved.load(Relaxed) > 0 && removed.load(Relaxed) > 0);
    for id in ids {
        pool.remove_thread(id).unwrap();
    }
}

#[test]
fn second_move_says_busy_while_the_first_is_under_way() {
    let Some(pool) = pool() else { return };
    let [a, b] = threads(&pool);
    let queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device(ram(), 1)), a).unwrap();
    let (go, hold) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(|| pool.edit(key, move |_| hold.recv().unwrap_or(())).unwrap());
        while !pool.is_busy(key) {
            std::thread::yield_now();
        }
        assert!(matches!(pool.move_queue(key, b), Err(MoveError::Busy)));
        go.send(()).unwrap();
    });
    assert!(!pool.is_busy(key));
    pool.move_queue(key, b).unwrap();
    pool.stop(key).unwrap();
}
