//! Front ends that mean harm, and the queues of others on the same thread.

use super::*;

/// How long the queues of others may wait for the watchdog before they count as blocked for ever. It
/// looks every 5 ms; how soon it acts is what `bench-dataplane-isolation` measures.
const FREED: Duration = Duration::from_secs(20);

/// A pool with the data plane's watchdog.
fn watched<T>(pool: &Pool, act: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut before = HashMap::new();
            while !stop.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
                pool.unblock_stuck_iothreads(&mut before);
            }
        });
        let _stop = Stop(&stop);
        act()
    })
}

/// An eventfd that blocks whoever writes to it.
fn full() -> OwnedFd {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    event
}

/// Another front end's queue on the thread is served within a time.
#[track_caller]
fn is_served(queue: &mut Guarded) {
    let start = Instant::now();
    queue.fill();
    queue.publish();
    queue.drain();
    assert!(start.elapsed() < FREED, "{:?}", start.elapsed());
}

#[test]
fn full_call_eventfd_is_emptied_and_others_are_served() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let device = device(ram(), 2);
    let mut good = Guarded::new(Shape::of(0));
    let good_key = pool.start(good.setup(&device), id).unwrap();
    let mut bad = Guarded::new(Shape::of(1));
    bad.call = full();
    let bad_key = pool.start(bad.setup(&device), id).unwrap();
    watched(&pool, || {
        for _ in 0..5 {
            // Full again, for the next call to block.
            let _ = rustix::io::ioctl_fionbio(&bad.call, true);
            let _ = rustix::io::write(&bad.call, &(u64::MAX - 1).to_ne_bytes());
            let _ = rustix::io::ioctl_fionbio(&bad.call, false);
            bad.driver.enable_calls();
            bad.fill();
            bad.publish();
            is_served(&mut good);
            while bad.driver.outstanding() > 0 {
                bad.reap();
            }
        }
        pool.stop(bad_key).unwrap();
    });
    pool.stop(good_key).unwrap();
}

#[test]
fn thread_without_a_cpu_while_it_calls_loses_no_call() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device(ram(), 1)), id).unwrap();
    // A new queue calls once.
    std::thread::sleep(Duration::from_millis(50));
    let _ = rustix::io::read(&queue.call, &mut [0; 8]);
    // As one looks that has written to its driver's eventfd and not come back from it yet.
    let (stats, _) = pool.thread(id).unwrap();
    stats.set_calling(Some(key));
    rustix::io::write(&queue.call, &1u64.to_ne_bytes()).unwrap();
    let mut before = HashMap::new();
    for _ in 0..3 {
        assert!(pool.unblock_stuck_iothreads(&mut before));
    }
    let mut count = [0; 8];
    let read = rustix::io::read(&queue.call, &mut count);
    stats.set_calling(None);
    pool.stop(key).unwrap();
    assert_eq!((read, u64::from_ne_bytes(count)), (Ok(8), 1), "the call is lost");
}

#[test]
fn full_eventfd_as_a_new_call_or_error_holds_nobody_up() {
    let Some(pool) = pool() else { return };
    let [id, other] = threads(&pool);
    let device = device(ram(), 2);
    let mut good = Guarded::new(Shape::of(0));
    let good_key = pool.start(good.setup(&device), id).unwrap();
    let mut bad = Guarded::new(Shape::of(2));
    let setup = bad.setup(&device);
    let stats = Arc::clone(&setup.stats);
    let bad_key = pool.start(setup, id).unwrap();
    watched(&pool, || {
        let call = Call::new(full(), device.caller()).unwrap();
        pool.edit(bad_key, move |q| q.set_call(Some(call))).unwrap();
        is_served(&mut good);

        // While it moves away, with something to call for.
        let call = full();
        let clone = Call::new(call.try_clone().unwrap(), device.caller()).unwrap();
        bad.fill();
        bad.publish();
        pool.edit(bad_key, move |q| q.set_call(Some(clone))).unwrap();
        pool.move_queue(bad_key, other).unwrap();
        pool.move_queue(bad_key, id).unwrap();
        is_served(&mut good);

        let error = Call::new(full(), device.caller()).unwrap();
        pool.edit(bad_key, move |q| q.set_error(Some(error))).unwrap();
        let (_, available, _) = bad.driver.addresses();
        let index = bad.driver.guest().u16(available + 2);
        index.store(index.load(Relaxed).wrapping_add(1000), Relaxed);
        rustix::io::write(&bad.kick, &1u64.to_ne_bytes()).unwrap();
        is_served(&mut good);
        // It may have its turn after that.
        let start = Instant::now();
        while !stats.is_broken() {
            assert!(start.elapsed() < LOST);
            std::thread::yield_now();
        }
        assert!(pool.stop(bad_key).unwrap().broken().is_some());
    });
    pool.stop(good_key).unwrap();
}

#[test]
fn broken_ring_stays_broken_and_costs_nothing_and_others_are_served() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let device = device(ram(), 2);
    let mut good = Guarded::new(Shape::of(0));
    let good_key = pool.start(good.setup(&device), id).unwrap();
    let mut bad = Guarded::new(Shape::of(2));
    let error = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let told = Some(error.try_clone().unwrap());
    let bad_key = pool.start(QueueSetup { error: told, ..bad.setup(&device) }, id).unwrap();
    bad.fill();
    bad.publish();
    bad.drain();
    let (_, available, _) = bad.driver.addresses();
    let index = bad.driver.guest().u16(available + 2);
    index.store(index.load(Relaxed).wrapping_add(1000), Relaxed);
    rustix::io::write(&bad.kick, &1u64.to_ne_bytes()).unwrap();
    let start = Instant::now();
    while rustix::io::read(&error, &mut [0; 8]).is_err() {
        assert!(start.elapsed() < LOST, "the front end is not told");
    }
    is_served(&mut good);
    let (_, tid) = pool.thread(id).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_rests(tid, "a broken queue");
    let stopped = pool.stop(bad_key).unwrap();
    assert_eq!(
        stopped.broken(),
        Some(crate::Broken::Ring(rtvirtio_virtq::ring::RingError::AvailableJump))
    );
    is_served(&mut good);
    pool.stop(good_key).unwrap();
}

#[test]
fn queue_whose_kick_cannot_be_waited_for_is_served_and_so_are_others() {
    let Some(pool) = pool() else { return };
    let [id, other] = threads(&pool);
    let device = device(ram(), 4);
    let mut good = Guarded::new(Shape::of(0));
    let good_key = pool.start(good.setup(&device), id).unwrap();
    let (_, tid) = pool.thread(id).unwrap();
    // None: the driver is to be polled. A file: a poll of it ends at once, and well.
    for (part, kick) in [(1, None), (2, Some(OwnedFd::from(tempfile::tempfile().unwrap())))] {
        let mut bad = Guarded::new(Shape::of(part));
        let key = pool.start(QueueSetup { kick, ..bad.setup(&device) }, id).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        // It looks every 100 µs and sleeps in between; what that costs is its machine's wake-ups.
        let (window, limit) = (Duration::from_millis(500), Duration::from_millis(350));
        let before = sleeps(tid);
        let spent = min_cpu_time(tid, window, limit);
        let slept = sleeps(tid) - before;
        assert!(slept > 500, "{slept} sleeps in 500 ms, part {part}");
        assert!(spent < limit, "{spent:?} of 500 ms, part {part}");
        for to in [id, other, id] {
            pool.move_queue(key, to).unwrap();
            // The thread waits by now; nobody reads what is written to the kick.
            std::thread::sleep(Duration::from_millis(20));
            is_served(&mut bad);
            is_served(&mut good);
        }
        // Not if it is disabled.
        pool.edit(key, |q| q.set_enabled(false)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_rests(tid, "a disabled queue");
        pool.stop(key).unwrap();
    }
    pool.stop(good_key).unwrap();
}

#[test]
fn kick_whose_other_end_is_gone_costs_nothing() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let device = device(ram(), 1);
    let (_, tid) = pool.thread(id).unwrap();
    let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
    let pipe = rustix::pipe::pipe().unwrap().0;
    for kick in [OwnedFd::from(socket), pipe] {
        let queue = Guarded::new(Shape::of(0));
        let setup = QueueSetup { kick: Some(kick), ..queue.setup(&device) };
        let key = pool.start(setup, id).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert_rests(tid, "a kick without another end");
        pool.stop(key).unwrap();
    }
}
