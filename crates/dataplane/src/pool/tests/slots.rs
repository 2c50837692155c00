//! The slots of processes, served beside virtqueues.

use std::sync::atomic::AtomicU32;

use rtvirtio_completion::slots::{Direction, SLOT_BYTES, SLOTS, SlotMemory};

use super::*;
use crate::queue::SlotsSetup;

/// A process: what it does is done here, by its side of the memory.
struct Client {
    memory: Arc<SlotMemory>,
    broken: OwnedFd,
    stats: Arc<QueueStats>,
}

impl Client {
    fn new() -> Self {
        let (memory, _) = SlotMemory::create().unwrap();
        let broken = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        Self { memory: Arc::new(memory), broken, stats: Arc::new(QueueStats::new()) }
    }

    fn setup(&self, device: &Arc<Device>) -> SlotsSetup {
        SlotsSetup {
            device: Arc::clone(device),
            memory: Arc::clone(&self.memory),
            error: self.broken.try_clone().unwrap(),
            stats: Arc::clone(&self.stats),
        }
    }

    /// Reads or writes by the first slot that is free; what came of it.
    fn ask(&self, way: Direction, offset: u64, data: &mut [u8]) -> i32 {
        let slots = self.memory.slots();
        let (index, ticket) = slots.claim(0).unwrap();
        let at = self.memory.data(index).as_ptr();
        let length = data.len().min(SLOT_BYTES);
        if way == Direction::Write {
            // SAFETY: the slot's data, which is this request's.
            unsafe { at.copy_from_nonoverlapping(data.as_ptr(), length) };
        }
        slots.tell(index, way, offset, data.len() as u32);
        let slot = slots.get(index).unwrap();
        let result = slot.watch(ticket, Some(LOST)).expect("it comes back");
        if way == Direction::Read {
            // SAFETY: as above.
            unsafe { at.copy_to_nonoverlapping(data.as_mut_ptr(), length) };
        }
        assert_eq!(slot.take(ticket), Some(result));
        result
    }

    /// Writes a block and reads it again.
    #[track_caller]
    fn verify(&self, block: u64, seed: u64) {
        let word = (block << 32 | seed).to_ne_bytes();
        let mut written = word.repeat(BLOCK / 8);
        let mut read = vec![0; BLOCK];
        let offset = block * BLOCK as u64;
        assert_eq!(self.ask(Direction::Write, offset, &mut written), BLOCK as i32);
        assert_eq!(self.ask(Direction::Read, offset, &mut read), BLOCK as i32);
        assert!(read == written, "block {block}, {seed}");
    }

    fn is_told_broken(&self) -> bool {
        let mut fds = [PollFd::new(&self.broken, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
    }

    /// A word of the memory, wherever that is: what no client does.
    fn word(&self, byte: usize) -> &AtomicU32 {
        assert!(byte < 128 + 64 * SLOTS && byte.is_multiple_of(4));
        let start = std::ptr::from_ref(self.memory.slots()).cast::<u8>().cast_mut();
        // SAFETY: within the slots.
        let at = unsafe { start.add(byte) };
        // SAFETY: an aligned word of memory that is there as long as this, and accessed by atomics only.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }
}

#[test]
fn slots_of_two_processes_and_a_virtqueue_are_served_by_one_thread() {
    if !has_io_uring() {
        return;
    }
    for engine in [ram(), file(Aio::IoUring), file(Aio::Threads), ssd("ref-8x80")] {
        let Some(pool) = pool() else { return };
        let [id] = threads(&pool);
        let device = device(engine, 1);
        let mut queue = Guarded::new(Shape::of(0));
        let queue_key = pool.start(queue.setup(&device), id).unwrap();
        let clients = [Client::new(), Client::new()];
        let keys = clients.each_ref().map(|c| pool.start_slots(c.setup(&device), id).unwrap());
        std::thread::scope(|scope| {
            for (at, client) in clients.iter().enumerate() {
                for thread in 0..3 {
                    let first = BLOCKS * (1 + at as u64) + thread * 16;
                    scope.spawn(move || {
                        for i in 0..200 {
                            client.verify(first + i % 16, i);
                        }
                    });
                }
            }
            queue.fill();
            queue.publish();
            queue.drain();
        });
        for (key, client) in keys.into_iter().zip(&clients) {
            assert_eq!(pool.stop(key).unwrap().in_flight(), 0);
            let stats = client.stats.snapshot();
            let bytes = 3 * 200 * BLOCK as u64;
            assert_eq!((stats.operations.reads, stats.operations.writes), (600, 600));
            assert_eq!((stats.read_bytes.get(), stats.written_bytes.get()), (bytes, bytes));
            assert_eq!((stats.errors, stats.in_flight), (0, 0));
        }
        pool.stop(queue_key).unwrap();
    }
}

#[test]
fn thread_that_sleeps_is_woken_by_the_bell_and_waiters_that_sleep_by_it() {
    let Some(pool) = pool() else { return };
    let interrupt =
        Polling { completion: rtvirtio_spec::serve::Completion::Interrupt, ..Polling::default() };
    let id = pool.add_thread("iot", interrupt).unwrap();
    let client = Client::new();
    let key = pool.start_slots(client.setup(&device(ssd("ref-4x250"), 1)), id).unwrap();
    for i in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        client.verify(i, i);
    }
    let stats = client.stats.snapshot();
    // Each found the thread asleep, and its client slept before the disk answered.
    assert!(stats.kicks >= 20, "{}", stats.kicks);
    assert!(stats.calls >= 20, "{}", stats.calls);
    pool.stop(key).unwrap();
}

#[test]
fn slots_move_between_threads_while_they_are_used() {
    let Some(pool) = pool() else { return };
    let ids: [_; 2] = threads(&pool);
    let client = Client::new();
    let key = pool.start_slots(client.setup(&device(file(Aio::IoUring), 1)), ids[0]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0.. {
                if stop.load(Relaxed) {
                    break;
                }
                client.verify(i % BLOCKS, i);
            }
        });
        let _stop = Stop(&stop);
        for i in 1..=500 {
            pool.move_queue(key, ids[i % 2]).unwrap();
        }
    });
    assert!(client.stats.snapshot().operations.writes > 0);
    pool.stop(key).unwrap();
}

#[test]
fn request_that_is_wrong_is_answered_with_an_error_and_others_go_on() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let client = Client::new();
    let key = pool.start_slots(client.setup(&device(ram(), 1)), id).unwrap();
    let disk = 8 * 64 * 4096;
    for (offset, bytes) in [
        (disk, 4096),
        (disk - 2048, 4096),
        (u64::MAX, 4096),
        (u64::MAX - 511, 512),
        (i64::MAX as u64, 4096),
        (1, 512),
        (0, 511),
        (0, 0),
        (0, SLOT_BYTES + 512),
        (0, u32::MAX as usize),
    ] {
        for way in [Direction::Read, Direction::Write] {
            let slots = client.memory.slots();
            let (index, ticket) = slots.claim(0).unwrap();
            slots.tell(index, way, offset, bytes as u32);
            let result = slots.get(index).unwrap().wait(ticket, Some(LOST));
            assert_eq!(result, Some(-libc::EIO), "{way:?} {offset} {bytes}");
        }
    }
    // Something that is neither.
    let slots = client.memory.slots();
    let (index, ticket) = slots.claim(7).unwrap();
    slots.get(index).unwrap().about();
    client.word(128 + 64 * index + 16).store(4096, Relaxed);
    client.word(128 + 64 * index + 20).store(77, Relaxed);
    slots.doorbell().ring(index);
    let result = slots.get(index).unwrap().wait(ticket, Some(LOST));
    assert_eq!(result, Some(-libc::EOPNOTSUPP));
    client.verify(0, 1);
    assert!(!client.is_told_broken());
    assert_eq!(client.stats.snapshot().errors, 21);
    pool.stop(key).unwrap();
}

/// What is no request at all: a free slot that rings, one that rings again while its request is in flight.
#[test]
fn slots_that_are_broken_stay_so_and_others_are_served() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let device = device(ssd("ref-4x250*40"), 1);
    let good = Client::new();
    let good_key = pool.start_slots(good.setup(&device), id).unwrap();
    for twice in [false, true] {
        let bad = Client::new();
        let key = pool.start_slots(bad.setup(&device), id).unwrap();
        let slots = bad.memory.slots();
        let (first, ticket) = slots.claim(9).unwrap();
        slots.tell(first, Direction::Write, 0, 4096);
        if twice {
            // Not with the first: two rings before an answer are one.
            let start = Instant::now();
            while bad.stats.snapshot().in_flight == 0 {
                assert!(start.elapsed() < LOST);
                std::thread::yield_now();
            }
            slots.doorbell().ring(first);
        } else {
            slots.doorbell().ring(33);
        }
        let start = Instant::now();
        while !bad.is_told_broken() {
            assert!(start.elapsed() < LOST);
            std::thread::yield_now();
        }
        good.verify(2, 3);
        // What is in flight ends.
        let queue = pool.stop(key).unwrap();
        let number = if twice { first } else { 33 };
        let why = queue.broken().unwrap().to_string();
        assert_eq!(why, format!("slot {number} rang without a request"));
        assert_eq!(slots.get(first).unwrap().take(ticket), Some(4096));
    }
    pool.stop(good_key).unwrap();
}

#[test]
fn garbage_in_slots_costs_its_client_alone() {
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let device = device(ram(), 1);
    let good = Client::new();
    let good_key = pool.start_slots(good.setup(&device), id).unwrap();
    let mut random = 1_u64;
    let mut random = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as u32
    };
    let mut broken = 0;
    for round in 0..100 {
        let bad = Client::new();
        let key = pool.start_slots(bad.setup(&device), id).unwrap();
        for _ in 0..2_000 {
            // Words, states among them, bits of the doorbell, and fields that would be right elsewhere.
            let byte = random() as usize % ((128 + 64 * SLOTS) / 4) * 4;
            let value = match random() % 4 {
                0 => 1,
                1 => 4096,
                2 => u32::MAX,
                _ => random() << 1 | random() & 1,
            };
            bad.word(byte).store(value, Relaxed);
            if random() % 8 == 0 {
                bad.memory.slots().doorbell().ring(random() as usize % SLOTS);
            }
        }
        // Garbage may have written to any block.
        good.verify(round, round);
        let queue = pool.stop(key).unwrap();
        assert_eq!(queue.in_flight(), 0);
        broken += u32::from(queue.broken().is_some());
    }
    assert!(broken > 50, "{broken}");
    pool.stop(good_key).unwrap();
}
