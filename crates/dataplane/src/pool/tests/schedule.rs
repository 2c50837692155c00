//! Disks whose requests wait for the schedule of the device that they share.

use rtvirtio_qos::{MAX_TRANSFER, Promise, Rate, Share};
use rtvirtio_units::{BytesPerSecond, Iops, Nanos, Weight};

use rtvirtio_vhost::Backend as _;

use super::moves::move_devices_at_full_speed;
use super::*;
use crate::schedule::{ClassStatus, Schedule};

/// Of a device of so many channels that take 250 µs.
fn schedule(channels: u32) -> Arc<Schedule> {
    let request = Nanos::from_micros(250);
    Schedule::new(rtvirtio_qos::Device { channels, request, kib: Nanos::ZERO, flush: request })
}

fn rate(iops: f64) -> Rate {
    Rate { iops: Iops::new(iops).ok(), bandwidth: None, burst: 1 }
}

fn share(weight: u32, limit: Option<f64>) -> Share {
    Share { weight: Weight::new(weight).unwrap(), limit: limit.map(rate) }
}

fn promise(iops: f64) -> Promise {
    Promise { deadline: Nanos::from_millis(5), rate: rate(iops) }
}

#[test]
fn scheduled_requests_complete_once_on_every_engine() {
    let Some(pool) = pool() else { return };
    let ids: [_; 2] = threads(&pool);
    // One device for all, as far as the schedule knows; smaller than what is asked for.
    let schedule = schedule(4);
    let engines = [ram(), file(Aio::IoUring), file(Aio::Threads), ssd("ref-4x250")];
    std::thread::scope(|scope| {
        for (at, engine) in engines.into_iter().enumerate() {
            let promised = (at % 2 == 0).then(|| promise(1_000.0));
            let member = schedule.join(share(100, None), promised);
            let device = device_in(member, engine, 2);
            for part in 0..2 {
                let (pool, device) = (&pool, Arc::clone(&device));
                scope.spawn(move || {
                    let mut queue = Guarded::new(Shape::of(part + 2));
                    let key = pool.start(queue.setup(&device), ids[part as usize]).unwrap();
                    queue.run_requests(1_000);
                    let stopped = pool.stop(key).unwrap();
                    assert_eq!((stopped.in_flight(), stopped.broken()), (0, None), "engine {at}");
                });
            }
        }
    });
    for id in ids {
        pool.remove_thread(id).unwrap();
    }
}

#[test]
fn moves_of_scheduled_queues_lose_repeat_and_misplace_nothing() {
    if !has_io_uring() {
        return;
    }
    let schedule = schedule(2);
    let engines = [ram(), file(Aio::IoUring), ssd("ref-4x250")];
    let devices = engines
        .into_iter()
        .map(|engine| device_in(schedule.join(share(1, None), Some(promise(500.0))), engine, 2));
    move_devices_at_full_speed(devices, 2_000);
}

#[test]
fn limited_disk_is_slow_its_neighbour_is_not_and_both_stop() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let schedule = schedule(64);
    let times = [Some(200.0), None].map(|limit| {
        let device = device_in(schedule.join(share(1, limit), None), ram(), 1);
        let mut queue = Guarded::new(Shape::of(0));
        let key = pool.start(queue.setup(&device), id).unwrap();
        let start = Instant::now();
        queue.run_requests(100);
        let time = start.elapsed();
        pool.stop(key).unwrap();
        time
    });
    // 100 to 116 requests, the first of which need not wait.
    assert!(times[0] >= Duration::from_millis(99 * 5), "{times:?}");
    assert!(times[1] * 4 < times[0], "{times:?}");
}

/// Requests that are under way, most of them in the schedule: a rate of one in 100 s.
fn held(pool: &Pool, schedule: &Arc<Schedule>, on: ThreadId) -> (Guarded, Arc<Device>, QueueKey) {
    let device = device_in(schedule.join(share(1, Some(0.01)), None), ram(), 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), on).unwrap();
    queue.fill();
    queue.publish();
    let start = Instant::now();
    while queue.reap() + schedule.status().waiting as u64 != 16 || queue.done != 1 {
        assert!(start.elapsed() < LOST);
        std::thread::yield_now();
    }
    (queue, device, key)
}

#[test]
fn limit_that_is_changed_holds_nothing_that_waited_for_the_old_one() {
    let Some(pool) = pool() else { return };
    let [a, b] = threads(&pool);
    let schedule = schedule(4);
    let (mut queue, device, key) = held(&pool, &schedule, a);
    pool.move_queue(key, b).unwrap();
    let start = Instant::now();
    assert!(device.member().unwrap().set(share(1, Some(100.0)), None, &[]));
    queue.drain();
    let time = start.elapsed();
    assert!((Duration::from_millis(139)..LOST).contains(&time), "{time:?}");
    assert_eq!(schedule.status().waiting, 0);
    pool.stop(key).unwrap();
}

#[test]
fn disk_that_leaves_its_schedule_waits_for_no_limit_of_it() {
    let Some(pool) = pool() else { return };
    let [a] = threads(&pool);
    let schedule = schedule(4);
    let (mut queue, device, key) = held(&pool, &schedule, a);
    let before = device.set_member(None).unwrap();
    before.lift_limit();
    let watched = Arc::downgrade(&before);
    drop(before);
    let start = Instant::now();
    pool.edit_drained(key, Queue::join).unwrap();
    assert!(start.elapsed() < LOST);
    assert!(watched.upgrade().is_none(), "it is still in the schedule");
    queue.drain();
    queue.run_requests(100);
    assert_eq!(schedule.status().running, 0);
    pool.stop(key).unwrap();
}

#[test]
fn request_whose_queue_moves_while_it_waits_for_a_limit_starts() {
    let Some(pool) = pool() else { return };
    let [a, b] = threads(&pool);
    let device = device_in(schedule(4).join(share(1, Some(20.0)), None), ram(), 1);
    let mut queue = Guarded::new(Shape { depth: 2, ..Shape::of(0) });
    let key = pool.start(queue.setup(&device), a).unwrap();
    for _ in 0..4 {
        queue.fill();
        queue.publish();
        std::thread::sleep(Duration::from_millis(5));
        pool.move_queue(key, b).unwrap();
        queue.drain();
        pool.move_queue(key, a).unwrap();
    }
    pool.stop(key).unwrap();
}

#[test]
fn requests_are_a_tasks_by_how_they_are_marked_and_marking_all_exceeds_only_its_own() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let schedule = schedule(4);
    let ioprio = |text: &str| text.parse().unwrap();
    let member = schedule.join(share(1, None), Some(promise(1_000.0))).unwrap();
    let member = member.with_task(ioprio("rt/0"), promise(1.0));
    let member = member.with_task(ioprio("be/4"), promise(1.0));
    let device = device_in(Some(member), ram(), 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    for (field, requests) in [(0x2000, 40), (0x4004, 20), (0, 10), (0x2001, 5), (0x1_2000, 5)] {
        queue.ioprio = field;
        let before = queue.done;
        while queue.done < before + requests {
            queue.run_requests(1);
        }
    }
    let made = queue.done;
    pool.stop(key).unwrap();
    let member = device.member().unwrap();
    let (all, tasks) = member.status();
    let of = |status: &ClassStatus| status.accounts.iter().map(|a| a.requests).sum::<u64>();
    let [(_, rt), (_, be)] = &tasks[..] else { panic!("{tasks:?}") };
    assert_eq!(of(&all), made);
    assert!(of(rt) >= 40 && of(be) >= 20 && of(rt) + of(be) + 20 <= made, "{tasks:?} of {made}");
    // One a second, or some more on a slow machine: the rest had no promise.
    let promised = |status: &ClassStatus| status.responses.in_time + status.responses.late;
    assert!((1..10).contains(&promised(rt)) && (1..10).contains(&promised(be)), "{tasks:?}");
    assert!(promised(&all) - promised(rt) - promised(be) >= 1);
    // Values change in place; other tasks do not.
    assert!(member.set(
        share(1, None),
        None,
        &[(ioprio("rt/0"), promise(2.0)), (ioprio("be/4"), promise(3.0))]
    ));
    assert!(!member.set(share(1, None), None, &[(ioprio("rt/0"), promise(2.0))]));
}

#[test]
fn changes_and_moves_at_full_speed_lose_repeat_and_misplace_nothing() {
    const QUEUES: u16 = 2;
    let Some(pool) = pool() else { return };
    let pool = &pool;
    let ids: [_; 3] = threads(pool);
    let schedules = &[schedule(2), schedule(8)];
    let engines = [ram(), file(Aio::IoUring) as Arc<dyn Engine>, ssd("ref-4x250")];
    let mut workers = Vec::new();
    let mut disks = Vec::new();
    for engine in engines {
        let device = device_in(None, engine, QUEUES);
        let queues = [0, 1].map(|part| Guarded::new(Shape::of(part + 1)));
        let keys = queues.each_ref().map(|queue| pool.start(queue.setup(&device), ids[0]).unwrap());
        workers.extend(queues);
        disks.push((device, keys));
    }
    let (disks, stop) = (&disks, &AtomicBool::new(false));
    let [moved, set, joined] = &[const { AtomicU64::new(0) }; 3];
    std::thread::scope(|scope| {
        let workers: Vec<_> = workers
            .into_iter()
            .map(|mut queue| scope.spawn(move || queue.run_requests(3_000)))
            .collect();
        scope.spawn(move || {
            let mut random = Guarded::new(Shape::of(5));
            while !stop.load(Relaxed) {
                let (_, keys) = &disks[random.random(3) as usize];
                match pool
                    .move_queue(keys[random.random(2) as usize], ids[random.random(3) as usize])
                {
                    Ok(_) => moved.fetch_add(1, Relaxed),
                    Err(MoveError::Busy) => 0,
                    Err(error) => panic!("{error}"),
                };
            }
        });
        scope.spawn(move || {
            let mut random = Guarded::new(Shape::of(6));
            while !stop.load(Relaxed) {
                let (device, keys) = &disks[random.random(3) as usize];
                let share = share(
                    1 + random.random(1_000) as u32,
                    (random.random(2) == 0).then(|| 500.0 + random.random(5_000) as f64),
                );
                let promise =
                    (random.random(2) == 0).then(|| promise(1.0 + random.random(500) as f64));
                let to = &schedules[random.random(2) as usize];
                match random.random(8) {
                    0 => to.set_device(rtvirtio_qos::Device {
                        channels: 1 + random.random(8) as u32,
                        ..to.status().device
                    }),
                    1 | 2 => {
                        let member = random.random(3) > 0;
                        let member = member.then(|| to.join(share, promise).unwrap());
                        if let Some(before) = device.set_member(member) {
                            before.lift_limit();
                        }
                        for &key in keys {
                            pool.edit_drained(key, Queue::join).unwrap();
                        }
                        joined.fetch_add(1, Relaxed);
                    }
                    _ => {
                        if let Some(member) = device.member() {
                            assert!(member.set(share, promise, &[]));
                            set.fetch_add(1, Relaxed);
                        }
                    }
                }
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Relaxed);
        assert!(ended.iter().all(Result::is_ok));
    });
    for (_, keys) in disks {
        for &key in keys {
            assert_eq!(pool.stop(key).unwrap().in_flight(), 0);
        }
    }
    let counts = [moved, set, joined].map(|count| count.load(Relaxed));
    assert!(counts.iter().all(|&count| count > 50), "{counts:?}");
    for id in ids {
        pool.remove_thread(id).unwrap();
    }
    // Now all threads have said what ended.
    for schedule in schedules {
        let status = schedule.status();
        assert_eq!((status.waiting, status.running, status.background), (0, 0, 0));
    }
}

/// RAM that remembers the longest transfer and how many there were.
struct Watching(Arc<dyn Engine>, AtomicU64, AtomicU64);

impl Engine for Watching {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let segments: u64 = request.segments.iter().map(|segment| segment.len() as u64).sum();
        assert_eq!(segments, request.length);
        self.1.fetch_max(request.length, Relaxed);
        self.2.fetch_add(1, Relaxed);
        self.0.start(request, lent)
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.0.resize(capacity)
    }
}

#[test]
fn large_transfer_is_split_where_segments_do_not_end() {
    let scheduled = schedule(1).join(share(1, None), None);
    let Some(pool) = pool() else { return };
    large_transfer_is_split(&pool, scheduled, 1 << 20, MAX_TRANSFER.get());
    large_transfer_is_split(&pool, None, 3 << 20, crate::queue::MAX_PART_BYTES);
}

/// A write and a read of so many bytes, which are started by no more than `most`.
#[track_caller]
fn large_transfer_is_split(pool: &Pool, member: Option<Member>, length: u32, most: u64) {
    let [id] = threads(pool);
    let disk = Bytes::new(2 * u64::from(length));
    let ram = Arc::new(RamEngine::new(disk, Duration::ZERO).unwrap());
    let engine = Arc::new(Watching(ram, AtomicU64::new(0), AtomicU64::new(0)));
    let device = device_in(member, Arc::clone(&engine) as Arc<dyn Engine>, 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    let guest = Arc::clone(queue.driver.guest());
    let data = BUFFERS + 4096;
    let content: Vec<u8> = (0..length).map(|i| (i / 512 % 251) as u8).collect();
    for kind in [1u8, 0] {
        let mut header = [0; 16];
        header[0] = kind;
        guest.write(BUFFERS, &header);
        guest.write(BUFFERS + 16, &[0xff]);
        let zeroes = vec![0; length as usize];
        guest.write(data, if kind == 1 { &content } else { &zeroes });
        let at = |address, length, writable| Buffer { address, length, writable };
        // The first part ends within the second segment, and the disk's first half within a part.
        let (reads, first) = (kind == 0, 1536);
        let buffers = [
            at(BUFFERS, 16, false),
            at(data, first, reads),
            at(data + u64::from(first), length - first, reads),
            at(BUFFERS + 16, 1, true),
        ];
        queue.driver.add(&buffers, false).unwrap();
        queue.publish();
        let written = queue.take_one();
        assert_eq!(guest.read(BUFFERS + 16, 1), [0]);
        assert_eq!(written, if reads { length + 1 } else { 1 });
        assert!(guest.read(data, length as usize) == content);
    }
    assert_eq!(engine.1.load(Relaxed), most);
    assert_eq!(engine.2.load(Relaxed), 2 * u64::from(length) / most);
    pool.stop(key).unwrap();
}

/// Queue 0's driver makes one request of these buffers.
fn one_request(queue: &mut Guarded, kind: u8, data: &[Buffer]) -> u8 {
    let guest = Arc::clone(queue.driver.guest());
    let mut header = [0; 16];
    header[0] = kind;
    guest.write(BUFFERS, &header);
    guest.write(BUFFERS + 16, &[0xff]);
    let at = |address, length, writable| Buffer { address, length, writable };
    let buffers = [&[at(BUFFERS, 16, false)], data, &[at(BUFFERS + 16, 1, true)]].concat();
    queue.driver.add(&buffers, false).unwrap();
    queue.publish();
    queue.take_one();
    guest.read(BUFFERS + 16, 1)[0]
}

#[test]
fn divided_request_is_served_from_its_first_part_on() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let part = Duration::from_millis(20);
    let engine = Arc::new(RamEngine::new(Bytes::new(DISK), part).unwrap());
    let device = device_in(schedule(4).join(share(1, None), None), engine, 1);
    let mut queue = Guarded::new(Shape::of(0));
    let setup = queue.setup(&device);
    let stats = Arc::clone(&setup.stats);
    let key = pool.start(setup, id).unwrap();
    let length = 4 * MAX_TRANSFER.get() as u32;
    let data = [Buffer { address: BUFFERS + 4096, length, writable: true }];
    assert_eq!(one_request(&mut queue, 0, &data), 0);
    pool.stop(key).unwrap();
    let service = stats.snapshot().service.sum();
    assert!(service.get() > 3 * 20_000_000, "{service:?}");
}

/// RAM that remembers the most bytes that were started in one turn of the IOThread.
struct InATurn {
    ram: RamEngine,
    thread: Arc<crate::thread_stats::IoThreadStats>,
    /// The turn, its bytes, and the most of any.
    turn: std::sync::Mutex<(u64, u64, u64)>,
}

impl Engine for InATurn {
    fn geometry(&self) -> Geometry {
        self.ram.geometry()
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let now = self.thread.turns.load(Relaxed);
        let (turn, bytes, most) = &mut *self.turn.lock().unwrap();
        if *turn != now {
            (*turn, *bytes) = (now, 0);
        }
        *bytes += request.length;
        *most = (*most).max(*bytes);
        self.ram.start(request, lent)
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.ram.resize(capacity)
    }
}

#[test]
fn request_of_half_a_gigabyte_lets_others_have_their_turns() {
    let longest = crate::queue::MAX_PART_BYTES;
    let Some(pool) = pool() else { return };
    // A turn has less, and its last part is started whole.
    let most = most_in_a_turn(&pool, None);
    assert!((longest..2 * longest).contains(&most), "{most} bytes in one turn");
    let most = most_in_a_turn(&pool, schedule(4).join(share(1, None), None));
    assert!((MAX_TRANSFER.get()..2 * longest).contains(&most), "{most} bytes in a scheduled turn");
}

/// The most of a request that is started in one turn.
fn most_in_a_turn(pool: &Pool, member: Option<Member>) -> u64 {
    const PIECE: u32 = 1 << 20;
    const PIECES: u64 = 512;
    let [id] = threads(pool);
    let ram = RamEngine::new(Bytes::new(PIECES * u64::from(PIECE)), Duration::ZERO).unwrap();
    let (thread, _) = pool.thread(id).unwrap();
    let engine = Arc::new(InATurn { ram, thread, turn: std::sync::Mutex::default() });
    let large = device_in(member, Arc::clone(&engine) as Arc<dyn Engine>, 1);
    let mut others = Guarded::new(Shape::of(0));
    let key = pool.start(others.setup(&device(super::ram(), 1)), id).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                others.run_requests(16);
            }
        });
        let mut queue = Guarded::new(Shape { depth: 256, ..Shape::of(2) });
        let of_large = pool.start(queue.setup(&large), id).unwrap();
        // Every descriptor is of the same MiB of memory.
        let data = [Buffer { address: BUFFERS + 4096, length: PIECE, writable: true }];
        assert_eq!(one_request(&mut queue, 0, &data.repeat(PIECES as usize)), 0);
        stop.store(true, Relaxed);
        pool.stop(of_large).unwrap();
    });
    pool.stop(key).unwrap();
    let (.., most) = *engine.turn.lock().unwrap();
    most
}

/// RAM whose first request has the driver turn its write cache off.
struct TurnsOff {
    ram: Arc<dyn Engine>,
    device: std::sync::OnceLock<std::sync::Weak<Device>>,
    durable: std::sync::Mutex<Vec<bool>>,
}

impl Engine for TurnsOff {
    fn geometry(&self) -> Geometry {
        self.ram.geometry()
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let durable = matches!(request.operation, Operation::Write { durable: true });
        self.durable.lock().unwrap().push(durable);
        let device = self.device.get().and_then(std::sync::Weak::upgrade).unwrap();
        assert!(device.write_config(32, &[0], u64::MAX, None));
        self.ram.start(request, lent)
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.ram.resize(capacity)
    }
}

/// However many the IOThread takes at one go.
#[test]
fn write_behind_the_end_of_its_cache_is_durable() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let engine = Arc::new(TurnsOff {
        ram: ram(),
        device: std::sync::OnceLock::new(),
        durable: std::sync::Mutex::default(),
    });
    let disk = device(Arc::clone(&engine) as Arc<dyn Engine>, 1);
    engine.device.set(Arc::downgrade(&disk)).unwrap();
    let mut queue = Guarded::new(Shape::of(0));
    let guest = Arc::clone(queue.driver.guest());
    let mut header = [0; 16];
    header[0] = 1;
    guest.write(BUFFERS, &header);
    let at = |address, length, writable| Buffer { address, length, writable };
    let buffers =
        [at(BUFFERS, 16, false), at(BUFFERS + 4096, 512, false), at(BUFFERS + 16, 1, true)];
    // Both are there before it starts.
    (0..2).for_each(|_| _ = queue.driver.add(&buffers, false).unwrap());
    queue.publish();
    let key = pool.start(queue.setup(&disk), id).unwrap();
    (0..2).for_each(|_| _ = queue.take_one());
    pool.stop(key).unwrap();
    assert_eq!(*engine.durable.lock().unwrap(), [false, true]);
}

#[test]
fn zeroes_that_are_written_out_are_charged_and_divided() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let ram = Arc::new(RamEngine::new(Bytes::new(DISK), Duration::ZERO).unwrap());
    assert!(ram.writes_zeroes(false) && !ram.writes_zeroes(true));
    let engine = Arc::new(Zeroing(Watching(ram, AtomicU64::new(0), AtomicU64::new(0))));
    let schedule = schedule(4);
    let member = schedule.join(share(1, None), None);
    let device = device_in(member, Arc::clone(&engine) as Arc<dyn Engine>, 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    let data = BUFFERS + 4096;
    let range = |unmap: u8| {
        let mut range = [0; 16];
        range[8..12].copy_from_slice(&((DISK / 512) as u32).to_le_bytes());
        range[12] = unmap;
        range
    };
    let buffer = [Buffer { address: data, length: 16, writable: false }];
    queue.driver.guest().write(data, &range(0));
    assert_eq!(one_request(&mut queue, 13, &buffer), 0);
    // The schedule is told of what has ended once the driver has seen it.
    let had = || device.member().unwrap().status().0.had();
    let begun = Instant::now();
    while had().writes.bytes.get() < DISK {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", had());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(engine.0.1.load(Relaxed), MAX_TRANSFER.get());
    // What is only given back is not.
    queue.driver.guest().write(data, &range(1));
    assert_eq!(one_request(&mut queue, 13, &buffer), 0);
    pool.stop(key).unwrap();
    assert_eq!(had().writes.bytes.get(), DISK);
}

/// The same for write-zeroes, which have no segments.
struct Zeroing(Watching);

impl Engine for Zeroing {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn writes_zeroes(&self, unmap: bool) -> bool {
        self.0.0.writes_zeroes(unmap)
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        if let Operation::WriteZeroes { unmap: false, .. } = request.operation {
            self.0.1.fetch_max(request.length, Relaxed);
        }
        self.0.0.start(request, lent)
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.0.resize(capacity)
    }
}

#[test]
fn discarded_range_is_not_charged_as_bytes() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    // The whole disk would take minutes of this rate.
    let limit = Rate { iops: None, bandwidth: Some(BytesPerSecond::new(4096)), burst: 1 };
    let share = Share { limit: Some(limit), ..share(1, None) };
    let device = device_in(schedule(4).join(share, None), ram(), 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    let guest = Arc::clone(queue.driver.guest());
    let mut header = [0; 16];
    header[0] = 11;
    guest.write(BUFFERS, &header);
    let mut range = [0; 16];
    range[8..12].copy_from_slice(&((DISK / 512) as u32).to_le_bytes());
    guest.write(BUFFERS + 16, &range);
    let start = Instant::now();
    for _ in 0..2 {
        guest.write(BUFFERS + 32, &[0xff]);
        let at = |address, length, writable| Buffer { address, length, writable };
        let buffers = [at(BUFFERS, 32, false), at(BUFFERS + 32, 1, true)];
        queue.driver.add(&buffers, false).unwrap();
        queue.publish();
        while queue.driver.take().is_none() {
            queue.wait(Duration::from_millis(20));
            assert!(start.elapsed() < LOST);
        }
        assert_eq!(guest.read(BUFFERS + 32, 1), [0]);
    }
    pool.stop(key).unwrap();
}
