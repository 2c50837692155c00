//! How IOThreads wait: each way serves, and costs what it says.

use rtvirtio_spec::serve::{Completion, CorePolicy};

use super::*;

fn ways() -> [(&'static str, Polling); 5] {
    let adaptive = Polling::default();
    let of = |completion| Polling { completion, ..adaptive };
    [
        ("interrupt", of(Completion::Interrupt)),
        ("poll", of(Completion::Poll)),
        ("shared", adaptive),
        ("auto", Polling { core: CorePolicy::Auto, ..adaptive }),
        ("dedicated", Polling { core: CorePolicy::Dedicated, ..adaptive }),
    ]
}

fn is_endless(name: &str) -> bool {
    ["poll", "dedicated"].contains(&name)
}

#[test]
fn each_way_to_wait_serves_and_sleeps_as_it_says() {
    let Some(pool) = pool() else { return };
    for (name, polling) in ways() {
        for engine in [ram(), ssd("ref-4x250")] {
            let id = pool.add_thread(name, polling).unwrap();
            pool.pin_thread(id, &[CpuId::new(0)]).unwrap();
            let (stats, tid) = pool.thread(id).unwrap();
            let mut queue = Guarded::new(Shape::of(0));
            let key = pool.start(queue.setup(&device(engine, 1)), id).unwrap();
            queue.run_requests(1_000);
            std::thread::sleep(Duration::from_millis(50));
            let (sleeps, polled) = (stats.sleeps.load(Relaxed), stats.poll_ns.load(Relaxed));
            if is_endless(name) {
                let before = cpu_time(tid);
                std::thread::sleep(Duration::from_millis(300));
                // It may have to share its CPU with other tests.
                let cpu = cpu_time(tid) - before;
                assert!(cpu > Duration::from_millis(20), "{name}: {cpu:?}");
                assert!(stats.poll_ns.load(Relaxed) > polled, "{name}");
                assert_eq!(stats.sleeps.load(Relaxed), sleeps, "{name}");
            } else {
                assert_rests(tid, name);
                assert_eq!(stats.poll_ns.load(Relaxed), polled, "{name}");
            }
            assert!(name != "interrupt" || polled == 0, "{polled} ns");
            // Kicked from its sleep, or found.
            queue.run_requests(100);
            // Without a queue nothing is looked at.
            pool.stop(key).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            assert_rests(tid, &format!("{name} without a queue"));
            pool.remove_thread(id).unwrap();
        }
    }
}

#[test]
fn thread_that_adapts_makes_room_for_those_that_compute() {
    let Some(pool) = pool() else { return };
    for core in [CorePolicy::Shared, CorePolicy::Auto] {
        // So long that it would poll all the time.
        let polling = Polling { core, max: Duration::from_secs(1), ..Polling::default() };
        let id = pool.add_thread("iot", polling).unwrap();
        let (stats, _) = pool.thread(id).unwrap();
        let mut queue = Guarded::new(Shape::of(0));
        let key = pool.start(queue.setup(&device(ssd("ref-4x250"), 1)), id).unwrap();
        let stop = AtomicBool::new(false);
        let (share, refused) = std::thread::scope(|scope| {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            for _ in 0..2 * cpus {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let _stop = Stop(&stop);
            // It has learned to poll for long, and knows of the others.
            queue.run_requests(500);
            let seen = || (stats.poll_ns.load(Relaxed), stats.poll_refused.load(Relaxed));
            let (start, before) = (Instant::now(), seen());
            while start.elapsed() < Duration::from_millis(500) {
                queue.run_requests(50);
            }
            let (time, after) = (start.elapsed().as_nanos() as f64, seen());
            ((after.0 - before.0) as f64 / time, after.1 - before.1)
        });
        pool.stop(key).unwrap();
        pool.remove_thread(id).unwrap();
        assert!(refused > 0, "{core}: nothing was refused");
        assert!(share < 0.02, "{core}: polled for {share} of the time");
    }
}

#[test]
fn threads_on_the_same_cpus_have_their_tokens_in_common() {
    let pool = Pool::default();
    let on = |cpus: &[u32]| {
        let cpus: Vec<_> = cpus.iter().copied().map(CpuId::new).collect();
        pool.tokens(&cpus).unwrap()
    };
    let (any, first) = (on(&[]), on(&[0]));
    assert!(Arc::ptr_eq(&any, &on(&[])) && Arc::ptr_eq(&first, &on(&[0])));
    assert!(!Arc::ptr_eq(&any, &first));
    drop((any, first));
    let _ = on(&[1]);
    assert_eq!(lock(&pool.state).tokens.len(), 1, "those that nobody has any more are gone");
}

#[test]
fn cpu_that_is_not_there_is_named_with_those_that_are_and_the_thread_stays_where_it_was() {
    let Some(pool) = pool() else { return };
    let id = pool.add_thread("iot", Polling::default()).unwrap();
    let (_, tid) = pool.thread(id).unwrap();
    let allowed = || rustix::thread::sched_getaffinity(rustix::thread::Pid::from_raw(tid)).unwrap();
    pool.pin_thread(id, &[CpuId::new(0)]).unwrap();
    // No host of the tests has the last that can be named.
    let absent = CpuId::new(1023);
    let refused = pool.pin_thread(id, &[absent]).unwrap_err();
    let PoolError::Pin(PinError::Cpus { asked, usable }) = &refused else { panic!("{refused:?}") };
    assert_eq!(asked, &[absent]);
    assert!(usable.contains(&CpuId::new(0)) && !usable.contains(&absent), "{usable:?}");
    let text = refused.to_string();
    assert!(text.contains("CPU 1023") && text.contains("may use CPU 0"), "{text}");
    let now = allowed();
    assert!(now.is_set(0) && now.count() == 1, "{now:?}");
    // Those that are there are used.
    pool.pin_thread(id, &[CpuId::new(0), absent]).unwrap();
}
