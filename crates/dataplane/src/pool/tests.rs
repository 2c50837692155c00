//! The pool at work: IOThreads, engines and drivers as they are, over real memory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use io_uring::{opcode, types};
use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileSource};
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::ssd::{Faults, SsdEngine};
use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_engine::{Engine, Geometry, Operation, Outcome, Request, SubmitContext};
use rtvirtio_units::Bytes;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::*;
use crate::device::{Device, DeviceConfig, Limits};
use crate::schedule::Member;
use crate::stats::QueueStats;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rtvirtio_virtq::ring::{Chain, Inflight, Ring};

mod commands;
mod dgram;
mod frames;
mod hostile;
mod moves;
mod order;
mod pairs;
mod ports;
mod promises;
mod rates;
mod schedule;
mod slots;
mod stream;
mod switch;
mod tricky;
mod turns;
mod waits;

/// A block of the tests' requests.
const BLOCK: usize = 4096;
/// Blocks of a queue's part of its disk: no two queues touch one block.
const BLOCKS: u64 = 64;
/// Of a disk: for eight queues.
const DISK: u64 = 8 * BLOCKS * BLOCK as u64;
/// Where a guest's buffers begin, behind the ring.
const BUFFERS: u64 = GUEST + (1 << 19);
/// A request that has not come back by then is lost.
const LOST: Duration = Duration::from_secs(10);

fn device(engine: Arc<dyn Engine>, queues: u16) -> Arc<Device> {
    device_in(None, engine, queues)
}

fn device_in(schedule: Option<Member>, engine: Arc<dyn Engine>, queues: u16) -> Arc<Device> {
    let config = DeviceConfig {
        name: "disk".into(),
        engine,
        queues,
        read_only: false,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule,
    };
    Arc::new(Device::new(config).unwrap())
}

fn ram() -> Arc<dyn Engine> {
    Arc::new(RamEngine::new(Bytes::new(DISK), Duration::ZERO).unwrap())
}

/// 250 µs a request; `ref-4x250*N`: N times as long.
fn ssd(name: &str) -> Arc<dyn Engine> {
    let config = name.parse().unwrap();
    Arc::new(SsdEngine::start(config, Bytes::new(DISK), 1, Faults::default()).unwrap())
}

fn file(aio: Aio) -> Arc<FileEngine> {
    // Not in /dev/shm or another file system in memory, where io_uring is not taken.
    let file = tempfile::tempfile().unwrap();
    file.set_len(DISK).unwrap();
    let source = FileSource::Fd(file.into());
    let config = FileConfig {
        source,
        direct: false,
        read_only: false,
        explicit_raw: true,
        block_size: None,
        aio,
    };
    Arc::new(FileEngine::open(config).unwrap())
}

/// A pool, if there are rings for its IOThreads; else the test is skipped.
fn pool() -> Option<Pool> {
    has_io_uring().then(Pool::default)
}

fn threads<const N: usize>(pool: &Pool) -> [ThreadId; N] {
    std::array::from_fn(|at| pool.add_thread(&format!("iot{at}"), Polling::default()).unwrap())
}

/// One queue's driver. What it writes to a block names the queue, the block and the count of its
/// writes, in each of its words, and each read looks for the last.
struct Guarded {
    driver: Driver,
    kick: OwnedFd,
    call: OwnedFd,
    /// First block on the disk.
    first: u64,
    /// By block: what was written last, and whether a request is on its way.
    blocks: Vec<(u64, bool)>,
    /// By place in memory: the block and whether it is read.
    slots: Vec<Option<(u64, bool)>>,
    by_id: HashMap<u16, usize>,
    random: u64,
    writes: u64,
    done: u64,
    /// What its requests are marked with.
    ioprio: u32,
}

/// What a queue is tried with.
#[derive(Clone, Copy)]
struct Shape {
    /// Which eighth of the disk.
    part: u64,
    depth: usize,
    packed: bool,
    indirect: bool,
}

impl Shape {
    const fn of(part: u64) -> Self {
        Self { part, depth: 16, packed: part % 2 == 1, indirect: part % 4 >= 2 }
    }
}

impl Guarded {
    fn new(shape: Shape) -> Self {
        let guest = Guest::new(4 << 20);
        let size = (shape.depth as u16 * 4).next_power_of_two();
        let Shape { packed, indirect, .. } = shape;
        let options = Options { size, packed, event_idx: true, indirect, in_order: false };
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        assert!(Driver::bytes(size) < BUFFERS - GUEST);
        Self {
            driver: Driver::new(guest, GUEST, options),
            kick: event(),
            call: event(),
            first: shape.part * BLOCKS,
            blocks: vec![(0, false); BLOCKS as usize],
            slots: vec![None; shape.depth],
            by_id: HashMap::new(),
            random: shape.part + 1,
            writes: 0,
            done: 0,
            ioprio: 0,
        }
    }

    fn setup(&self, device: &Arc<Device>) -> QueueSetup {
        let memory = self.driver.guest().memory();
        let config = self.driver.config();
        QueueSetup {
            device: Arc::clone(device),
            ring: Ring::new(config, Arc::clone(&memory), None).unwrap(),
            memory,
            buffers: None,
            size: config.size,
            kick: Some(self.kick.try_clone().unwrap()),
            call: Some(Call::new(self.call.try_clone().unwrap(), device.caller()).unwrap()),
            error: None,
            enabled: true,
            stats: Arc::new(QueueStats::new()),
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % below
    }

    const fn place(slot: usize) -> u64 {
        BUFFERS + slot as u64 * 2 * BLOCK as u64
    }

    fn content(&self, block: u64) -> Vec<u8> {
        let count = self.blocks[block as usize].0;
        let word = if count == 0 { 0 } else { count << 20 | (self.first + block) };
        word.to_le_bytes().repeat(BLOCK / 8)
    }

    /// Makes as many requests as there is room for; whether any.
    fn fill(&mut self) -> bool {
        let mut any = false;
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let block = self.random(BLOCKS);
            if self.blocks[block as usize].1 {
                continue;
            }
            let read = self.random(2) == 0;
            let guest = Arc::clone(self.driver.guest());
            let data = Self::place(slot);
            let header = data + BLOCK as u64;
            let mut bytes = [0; 16];
            bytes[0] = u8::from(!read);
            bytes[4..8].copy_from_slice(&self.ioprio.to_le_bytes());
            bytes[8..].copy_from_slice(&((self.first + block) * 8).to_le_bytes());
            guest.write(header, &bytes);
            guest.write(header + 16, &[0xff]);
            if read {
                guest.write(data, &[0xee; BLOCK]);
            } else {
                self.writes += 1;
                self.blocks[block as usize].0 = self.writes;
                guest.write(data, &self.content(block));
            }
            let half = BLOCK as u32 / 2;
            let at = |address, length, writable| Buffer { address, length, writable };
            let buffers = [
                at(header, 16, false),
                at(data, half, read),
                at(data + u64::from(half), half, read),
                at(header + 16, 1, true),
            ];
            let indirect = self.driver.config().indirect && self.random(2) == 0;
            let id = self.driver.add(&buffers, indirect).expect("room");
            self.blocks[block as usize].1 = true;
            self.slots[slot] = Some((block, read));
            assert_eq!(self.by_id.insert(id, slot), None);
            any = true;
        }
        any
    }

    fn publish(&mut self) {
        if self.driver.publish() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Takes what has come back, and looks at it; how many.
    fn reap(&mut self) -> u64 {
        let before = self.done;
        // The driver panics at one that it did not ask for, or has already.
        while let Some((id, written)) = self.driver.take() {
            let slot = self.by_id.remove(&id).unwrap();
            let (block, read) = self.slots[slot].take().unwrap();
            let data = Self::place(slot);
            let guest = self.driver.guest();
            assert_eq!(guest.read(data + BLOCK as u64 + 16, 1), [0], "block {block} {read}");
            assert_eq!(written, if read { BLOCK as u32 + 1 } else { 1 });
            if read {
                assert!(guest.read(data, BLOCK) == self.content(block), "block {block} is wrong");
            }
            self.blocks[block as usize].1 = false;
            self.done += 1;
        }
        self.done - before
    }

    /// Waits to be called, unless something has come back.
    fn wait(&mut self, timeout: Duration) {
        if self.driver.enable_calls() {
            return;
        }
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.as_nanos() as i64 };
        let mut ready = [PollFd::new(&self.call, PollFlags::IN)];
        if poll(&mut ready, Some(&timeout)) == Ok(1) {
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
    }

    /// The used length of the next request that comes back.
    #[track_caller]
    fn take_one(&mut self) -> u32 {
        let start = Instant::now();
        loop {
            match self.driver.take() {
                Some((_, written)) => return written,
                None => self.wait(Duration::from_millis(20)),
            }
            assert!(start.elapsed() < LOST, "the request is lost");
        }
    }

    /// Everything that was asked for comes back.
    #[track_caller]
    fn drain(&mut self) {
        let start = Instant::now();
        self.reap();
        while self.driver.outstanding() > 0 {
            assert!(start.elapsed() < LOST, "{} requests are lost", self.driver.outstanding());
            self.wait(Duration::from_millis(20));
            self.reap();
        }
    }

    /// Makes so many requests, and gets all of them back.
    fn run_requests(&mut self, requests: u64) {
        let (until, mut last) = (self.done + requests, Instant::now());
        while self.done < until {
            if self.fill() {
                self.publish();
            }
            self.wait(Duration::from_millis(20));
            if self.reap() > 0 {
                last = Instant::now();
            }
            assert!(last.elapsed() < LOST, "{} requests are lost", self.driver.outstanding());
        }
        self.drain();
    }
}

/// Ends the other threads of a test, even by a panic.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// How often a thread has gone to sleep of its own accord.
fn sleeps(tid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Processor time of a thread of this process, by its kernel number.
fn cpu_time(tid: i32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

/// Least processor time that a thread has taken in one of up to five windows, each of which begins
/// after the other has ended; the first below the limit ends it.
///
/// The kernel books the time for which a hypervisor takes the CPU away to the thread that ran, so
/// that one window says little on a machine that others use too.
fn min_cpu_time(tid: i32, window: Duration, limit: Duration) -> Duration {
    let mut least = Duration::MAX;
    for _ in 0..5 {
        let before = cpu_time(tid);
        std::thread::sleep(window);
        least = least.min(cpu_time(tid) - before);
        if least < limit {
            break;
        }
    }
    least
}

/// A thread that has nothing to do takes less than a quarter of a CPU.
fn assert_rests(tid: i32, what: &str) {
    let (window, limit) = (Duration::from_millis(300), Duration::from_millis(75));
    let spent = min_cpu_time(tid, window, limit);
    assert!(spent < limit, "{what}: {spent:?} of {window:?}");
}

#[test]
fn requests_complete_once_on_every_engine() {
    let Some(pool) = pool() else { return };
    let ids: [_; 2] = threads(&pool);
    let engines: [(&str, Arc<dyn Engine>); 4] = [
        ("ram", ram()),
        ("io_uring", file(Aio::IoUring)),
        ("threads", file(Aio::Threads)),
        ("ssd", ssd("ref-4x250")),
    ];
    std::thread::scope(|scope| {
        for (name, engine) in engines {
            let device = device(engine, 2);
            for part in 0..2 {
                let (pool, device) = (&pool, Arc::clone(&device));
                scope.spawn(move || {
                    let mut queue = Guarded::new(Shape::of(part + 2));
                    let setup = queue.setup(&device);
                    let stats = Arc::clone(&setup.stats);
                    let key = pool.start(setup, ids[part as usize]).unwrap();
                    queue.run_requests(1000);
                    let stopped = pool.stop(key).unwrap();
                    assert_eq!((stopped.in_flight(), stopped.broken()), (0, None), "{name}");
                    let seen = stats.snapshot();
                    assert_eq!(seen.in_flight, 0, "{name}");
                });
            }
        }
    });
    for id in ids {
        pool.remove_thread(id).unwrap();
    }
}

#[test]
fn requests_of_a_later_batch_have_waited_for_those_before() {
    let cpu = Duration::from_micros(100);
    let engine = Arc::new(RamEngine::new(Bytes::new(DISK), cpu).unwrap());
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let mut queue = Guarded::new(Shape::of(0));
    // Two batches of 8 in the first pass.
    queue.fill();
    queue.publish();
    let setup = queue.setup(&device(engine, 1));
    let stats = Arc::clone(&setup.stats);
    let key = pool.start(setup, id).unwrap();
    queue.drain();
    pool.stop(key).unwrap();
    let found = stats.snapshot();
    let sums = [&found.wait, &found.service, &found.response].map(|times| times.sum().get());
    assert!(sums[0] >= 8 * 8 * 100_000, "{sums:?}");
    assert_eq!(sums[0] + sums[1], sums[2]);
}

/// What the requests of two queues waited for in all, ns. Each has 16 of 100 µs, in two batches.
fn waited_by_two(pool: &Pool, id: ThreadId) -> u64 {
    let cpu = Duration::from_micros(100);
    let disk = device(Arc::new(RamEngine::new(Bytes::new(DISK), cpu).unwrap()), 2);
    let mut queues = [0, 1].map(|part| Guarded::new(Shape::of(part)));
    let setups = queues.each_ref().map(|queue| queue.setup(&disk));
    let stats = setups.each_ref().map(|setup| Arc::clone(&setup.stats));
    let keys = setups.map(|setup| pool.start(setup, id).unwrap());
    let (entered, enter) = mpsc::channel();
    let (held, hold) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let edit = move |_: &mut Queue| {
            entered.send(()).unwrap();
            hold.recv().unwrap();
        };
        scope.spawn(|| pool.edit(keys[0], edit).unwrap());
        enter.recv().unwrap();
        scope.spawn(|| pool.edit(keys[1], |_| ()).unwrap());
        for queue in &mut queues {
            queue.fill();
            queue.publish();
        }
        // It wakes the other queue too, if it is there in time.
        std::thread::sleep(Duration::from_millis(20));
        held.send(()).unwrap();
    });
    queues.iter_mut().for_each(Guarded::drain);
    for key in keys {
        pool.stop(key).unwrap();
    }
    let waited: u64 = stats.iter().map(|stats| stats.progress().waited.get()).sum();
    let sums: u64 = stats.iter().map(|stats| stats.snapshot().wait.sum().get()).sum();
    assert_eq!(waited, sums);
    waited
}

#[test]
fn requests_found_together_have_waited_for_the_other_queues_turn() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    // Of each queue the second batch waits for the first one's 0.8 ms, and one queue's 16 wait for
    // the other's 1.6 ms.
    let expected = 2 * 8 * 800_000 + 16 * 1_600_000;
    assert!((0..10).any(|_| waited_by_two(&pool, id) >= expected));
}

#[test]
fn busy_time_is_of_the_queue_that_it_was_spent_on() {
    let cpu = Duration::from_micros(50);
    let heavy = device(Arc::new(RamEngine::new(Bytes::new(DISK), cpu).unwrap()), 1);
    let light = device(ram(), 1);
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let mut queues = [0, 1].map(|part| Guarded::new(Shape::of(part)));
    let setups = [queues[0].setup(&heavy), queues[1].setup(&light)];
    let stats = setups.each_ref().map(|setup| Arc::clone(&setup.stats));
    let keys = setups.map(|setup| pool.start(setup, id).unwrap());
    std::thread::scope(|scope| {
        for queue in &mut queues {
            scope.spawn(|| queue.run_requests(1000));
        }
    });
    // Alone on the thread, all of it is for one.
    queues[0].run_requests(100);
    // A turn's time is known after its requests have ended: not before the queues have stopped.
    for key in keys {
        pool.stop(key).unwrap();
    }
    let [heavy, light] = stats.each_ref().map(|stats| stats.progress());
    assert!(heavy.busy.get() >= 1100 * 50_000, "{heavy:?}");
    assert!(light.busy.get() > 0 && light.requests >= 1000 && heavy.requests >= 1100);
    let all = pool.thread(id).unwrap().0.busy_ns.load(Relaxed);
    assert!(heavy.busy.get() + light.busy.get() <= all, "{heavy:?} {light:?} {all}");
    assert!(stats.iter().all(|stats| !stats.progress().is_standing(stats.progress())));
}

#[test]
fn backlog_is_what_the_driver_has_made_available_and_nobody_has_taken() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    for (part, expected) in [(0, 16), (1, 1)] {
        // Split, and packed, where one place says no more than that there is something.
        let mut queue = Guarded::new(Shape::of(part));
        let setup = queue.setup(&device(ram(), 1));
        let stats = Arc::clone(&setup.stats);
        let key = pool.start(setup, id).unwrap();
        let (entered, enter) = mpsc::channel();
        let (held, hold) = mpsc::channel::<()>();
        let seen = std::thread::scope(|scope| {
            let edit = move |queue: &mut Queue| {
                entered.send(()).unwrap();
                hold.recv().unwrap();
                queue.look();
                queue.stats().progress()
            };
            let edited = scope.spawn(|| pool.edit(key, edit).unwrap());
            enter.recv().unwrap();
            queue.fill();
            queue.publish();
            held.send(()).unwrap();
            edited.join().unwrap()
        });
        assert_eq!((seen.seen, seen.started), (expected, 0));
        queue.drain();
        pool.stop(key).unwrap();
        assert!(!stats.progress().is_standing(seen));
    }
}

#[test]
fn kicks_before_a_queue_is_enabled_are_not_lost() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let device = device(ram(), 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(QueueSetup { enabled: false, ..queue.setup(&device) }, id).unwrap();
    queue.fill();
    queue.publish();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(queue.reap(), 0, "it is not enabled");
    pool.edit(key, |queue| queue.set_enabled(true)).unwrap();
    queue.drain();
    // And from disabled to enabled again, while it runs.
    pool.edit(key, |queue| queue.set_enabled(false)).unwrap();
    queue.fill();
    queue.publish();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(queue.reap(), 0);
    pool.edit(key, |queue| queue.set_enabled(true)).unwrap();
    queue.drain();
    pool.stop(key).unwrap();
}

#[test]
fn driver_is_called_when_its_queue_starts_as_an_earlier_server_may_not_have() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device(ram(), 1)), id).unwrap();
    let mut ready = [PollFd::new(&queue.call, PollFlags::IN)];
    let timeout = Timespec { tv_sec: LOST.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut ready, Some(&timeout)), Ok(1));
    pool.stop(key).unwrap();
}

#[test]
fn stop_waits_for_what_is_in_flight() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    // 25 ms a request, four at a time.
    let device = device(ssd("ref-4x250*100"), 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    queue.fill();
    queue.publish();
    std::thread::sleep(Duration::from_millis(5));
    let stopped = pool.stop(key).unwrap();
    assert_eq!(stopped.in_flight(), 0);
    // All of them are there, without a further wait.
    assert_eq!((queue.reap(), stopped.base()), (16, 16));
    assert!(matches!(pool.stop(key), Err(PoolError::NoQueue)));
}

/// QEMU disables a queue before it asks for its base, which counts as taken what an earlier server had begun.
#[test]
fn disabled_queue_that_stops_ends_what_an_earlier_server_had_begun() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    for (part, base) in [(0, 3), (1, 0x800c_800c)] {
        let mut queue = Guarded::new(Shape::of(part));
        let setup = queue.setup(&device(ram(), 1));
        let (config, memory) = (*setup.ring.config(), Arc::clone(&setup.memory));
        let (fd, bytes) = Inflight::create(1, config.size, config.packed).unwrap();
        let area = Inflight::map(fd, 0, bytes, 1, config.size, config.packed).unwrap();
        queue.fill();
        queue.publish();
        let mut killed = Ring::new(config, Arc::clone(&memory), area.queue(0)).unwrap();
        let mut chain = Chain::default();
        for _ in 0..3 {
            assert_eq!(killed.next(&mut chain), Ok(true));
        }
        drop(killed);
        let ring = Ring::new(config, memory, area.queue(0)).unwrap();
        let key = pool.start(QueueSetup { ring, enabled: false, ..setup }, id).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(queue.reap(), 0, "it is not enabled");
        let stopped = pool.stop(key).unwrap();
        assert_eq!((queue.reap(), stopped.base()), (3, base));
    }
}

/// Whoever has kept a key of a queue that has stopped does nothing to the one that has its place now.
#[test]
fn key_of_a_queue_that_has_stopped_is_of_no_other_one() {
    let Some(pool) = pool() else { return };
    let [id, to] = threads(&pool);
    let device = device(ram(), 1);
    let queue = Guarded::new(Shape::of(0));
    let start = || pool.start(queue.setup(&device), id).unwrap();
    let stale = start();
    pool.stop(stale).unwrap();
    let key = start();
    assert_eq!(key.table(), stale.table(), "tables stay small");
    let is_gone = |error: PoolError| matches!(error, PoolError::NoQueue);
    assert!(pool.edit(stale, |_| ()).is_err_and(is_gone));
    assert!(pool.edit_drained(stale, |_| ()).is_err_and(is_gone));
    assert!(pool.stop(stale).is_err_and(is_gone));
    let moved = pool.move_queue(stale, to);
    assert!(matches!(moved, Err(MoveError::Pool(PoolError::NoQueue))), "{moved:?}");
    pool.remove_thread(to).unwrap();
    // Nor is its driver's eventfd emptied for a call of the other's.
    std::thread::sleep(Duration::from_millis(50));
    let _ = rustix::io::read(&queue.call, &mut [0; 8]);
    rustix::io::write(&queue.call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let (stats, _) = pool.thread(id).unwrap();
    let mut before = HashMap::new();
    for (calling, room) in [(stale, Err(Errno::AGAIN)), (key, Ok(8))] {
        stats.set_calling(Some(calling));
        assert!(pool.unblock_stuck_iothreads(&mut before));
        assert!(pool.unblock_stuck_iothreads(&mut before));
        assert_eq!(rustix::io::write(&queue.call, &1_u64.to_ne_bytes()), room);
    }
    stats.set_calling(None);
    let (_, available, _) = queue.driver.addresses();
    queue.driver.guest().u16(available + 2).store(1000, Relaxed);
    rustix::io::write(&queue.kick, &1_u64.to_ne_bytes()).unwrap();
    while pool.broken(key).is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(pool.broken(stale), None);
    pool.stop(key).unwrap();
}

#[test]
fn queue_that_rests_beside_a_busy_one_stops_at_once() {
    let Some(pool) = pool().map(Arc::new) else { return };
    let [id] = threads(&pool);
    let over = Arc::new(AtomicBool::new(false));
    let _stop = Stop(&over);
    std::thread::spawn({
        let (pool, over) = (Arc::clone(&pool), Arc::clone(&over));
        move || {
            let mut busy = Guarded::new(Shape::of(0));
            let key = pool.start(busy.setup(&device(ram(), 1)), id).unwrap();
            while !over.load(Relaxed) {
                busy.run_requests(100);
            }
            pool.stop(key).unwrap();
        }
    });
    for _ in 0..50 {
        let mut queue = Guarded::new(Shape::of(1));
        let key = pool.start(queue.setup(&device(ram(), 1)), id).unwrap();
        queue.run_requests(20);
        // It has long been put to sleep.
        std::thread::sleep(Duration::from_millis(3));
        let (stopped, stop) = mpsc::channel();
        let pool = Arc::clone(&pool);
        std::thread::spawn(move || stopped.send(pool.stop(key).map(drop)));
        stop.recv_timeout(LOST).expect("it does not stop").unwrap();
    }
}

#[test]
fn thread_ends_only_when_it_serves_nothing() {
    let Some(pool) = pool() else { return };
    let [a, b] = threads(&pool);
    let queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device(ram(), 1)), a).unwrap();
    assert!(matches!(pool.remove_thread(a), Err(PoolError::InUse { queues: 1 })));
    pool.move_queue(key, b).unwrap();
    pool.remove_thread(a).unwrap();
    assert!(matches!(pool.remove_thread(a), Err(PoolError::NoThread)));
    assert!(matches!(pool.move_queue(key, a), Err(MoveError::Pool(PoolError::NoThread))));
    assert!(matches!(pool.remove_thread(b), Err(PoolError::InUse { queues: 1 })));
    pool.stop(key).unwrap();
    pool.remove_thread(b).unwrap();
    let again = Guarded::new(Shape::of(0)).setup(&device(ram(), 1));
    assert!(matches!(pool.start(again, b), Err(PoolError::NoThread)));
}

#[test]
fn used_length_of_a_read_that_fails_names_no_byte_of_its_data() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let faults = Faults { error_every: std::num::NonZeroU64::new(1), ..Faults::default() };
    let config = "ref-8x80".parse().unwrap();
    let engine = SsdEngine::start(config, Bytes::new(DISK), 1, faults).unwrap();
    let device = device(Arc::new(engine), 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    let guest = Arc::clone(queue.driver.guest());
    let (data, header) = (Guarded::place(0), Guarded::place(0) + BLOCK as u64);
    guest.write(header, &[0; 16]);
    guest.write(header + 16, &[0xff]);
    let at = |address, length, writable| Buffer { address, length, writable };
    let buffers = [at(header, 16, false), at(data, 512, true), at(header + 16, 1, true)];
    queue.driver.add(&buffers, false).unwrap();
    queue.publish();
    let written = queue.take_one();
    assert_eq!((guest.read(header + 16, 1), written), (vec![1], 1));
    pool.stop(key).unwrap();
}

#[test]
fn thread_without_a_ring_says_what_would_help() {
    let refused = |errno: i32| {
        // A filter is its thread's own, and that of the threads which it starts.
        let filtered = std::thread::spawn(move || {
            let rules = std::collections::BTreeMap::from([(libc::SYS_io_uring_setup, vec![])]);
            let refuse = SeccompAction::Errno(errno as u32);
            let target: TargetArch = std::env::consts::ARCH.try_into().unwrap();
            let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, target).unwrap();
            let program: BpfProgram = filter.try_into().unwrap();
            seccompiler::apply_filter(&program).unwrap();
            Pool::default().add_thread("iot", Polling::default()).unwrap_err().to_string()
        });
        filtered.join().unwrap()
    };
    for errno in [libc::EPERM, libc::ENOSYS] {
        let text = refused(errno);
        assert!(text.contains("kernel.io_uring_disabled") && text.contains("seccomp"), "{text}");
    }
    let text = refused(libc::ENOMEM);
    assert!(text.contains("RLIMIT_MEMLOCK"), "{text}");
}
