//! Disks whose requests are commands, on the rings that IOThreads have for those, without an NVMe
//! device: the data is in RAM, and the command is an io_uring request of no effect. What a device itself does is
//! tested in a guest that has one (crates/rtvirtio/tests/it/nvme.rs).

use std::fs::File;
use std::os::fd::AsRawFd;

use rtvirtio_engine::{Commands, TransferLimits};
use rtvirtio_spec::serve::Completion;

use super::moves::move_devices_at_full_speed;
use super::*;

/// RAM that answers by commands.
struct ByCommand {
    ram: RamEngine,
    kind: Commands,
    /// Synchronised by each command that interrupts: a worker of the kernel's tells its end.
    file: File,
    most: TransferLimits,
    /// Of transfers, discards and write-zeroes.
    longest: [AtomicU64; 3],
    started: AtomicU64,
}

impl ByCommand {
    fn new(kind: Commands, most: TransferLimits) -> Arc<Self> {
        Arc::new(Self {
            ram: RamEngine::new(Bytes::new(DISK), Duration::ZERO).unwrap(),
            kind,
            file: tempfile::tempfile().unwrap(),
            most,
            longest: Default::default(),
            started: AtomicU64::new(0),
        })
    }
}

impl Engine for ByCommand {
    fn geometry(&self) -> Geometry {
        self.ram.geometry()
    }

    fn commands(&self) -> Option<Commands> {
        Some(self.kind)
    }

    fn transfer_limits(&self) -> TransferLimits {
        self.most
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let segments: u64 = request.segments.iter().map(|segment| segment.len() as u64).sum();
        let of = match request.operation {
            Operation::Discard => 1,
            Operation::WriteZeroes { .. } => 2,
            _ => {
                assert_eq!(segments, request.length);
                0
            }
        };
        let commands = lent.commands.as_mut().expect("the thread has a ring for commands");
        let entry = match self.kind {
            Commands::Interrupt => opcode::Fsync::new(types::Fd(self.file.as_raw_fd())).build(),
            Commands::Polled => opcode::Nop::new().build(),
        };
        let entry = entry.user_data(request.token.0).into();
        // SAFETY: it refers to no memory, and the file is open as long as the engine.
        if unsafe { commands.push(&entry) }.is_err() {
            return Outcome::Busy;
        }
        self.longest[of].fetch_max(request.length, Relaxed);
        self.started.fetch_add(1, Relaxed);
        let done = self.ram.start(request, lent);
        assert_eq!(done, Outcome::Done(Ok(())));
        Outcome::Started
    }

    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.ram.resize(capacity)
    }
}

fn both() -> [Arc<dyn Engine>; 2] {
    [Commands::Interrupt, Commands::Polled].map(|kind| -> Arc<dyn Engine> {
        // A block takes three commands.
        ByCommand::new(kind, TransferLimits { transfer: 1536, ..TransferLimits::default() })
    })
}

#[test]
fn commands_complete_once_on_threads_that_sleep_and_that_poll() {
    let Some(pool) = pool() else { return };
    let waits = [Completion::Interrupt, Completion::Adaptive, Completion::Poll];
    let ids = waits.map(|completion| {
        let polling = Polling { completion, ..Polling::default() };
        pool.add_thread(&completion.to_string(), polling).unwrap()
    });
    std::thread::scope(|scope| {
        for engine in both() {
            let device = device(engine, 3);
            for (part, id) in (0..).zip(ids) {
                let (pool, device) = (&pool, Arc::clone(&device));
                scope.spawn(move || {
                    let mut queue = Guarded::new(Shape::of(part));
                    let key = pool.start(queue.setup(&device), id).unwrap();
                    queue.run_requests(300);
                    // After a rest, one by one: each wakes the thread, and its end does.
                    for _ in 0..10 {
                        std::thread::sleep(Duration::from_millis(2));
                        queue.run_requests(1);
                    }
                    let stopped = pool.stop(key).unwrap();
                    assert_eq!((stopped.in_flight(), stopped.broken()), (0, None));
                });
            }
        }
    });
    for id in ids {
        pool.remove_thread(id).unwrap();
    }
}

#[test]
fn moves_while_commands_are_in_flight_lose_repeat_and_misplace_nothing() {
    move_devices_at_full_speed(both().into_iter().map(|engine| device(engine, 2)), 2_000);
}

/// One request through a queue, of these pieces of memory between header and status.
fn request(queue: &mut Guarded, kind: u8, header: [u8; 16], data: &[Buffer]) {
    let guest = Arc::clone(queue.driver.guest());
    let header = [&[kind], &header[1..]].concat();
    guest.write(BUFFERS, &header);
    guest.write(BUFFERS + 16, &[0xff]);
    let at = |address, length, writable| Buffer { address, length, writable };
    let mut buffers = vec![at(BUFFERS, 16, false)];
    buffers.extend_from_slice(data);
    buffers.push(at(BUFFERS + 16, 1, true));
    queue.driver.add(&buffers, false).unwrap();
    queue.publish();
    let start = Instant::now();
    while queue.driver.take().is_none() {
        assert!(start.elapsed() < LOST);
        queue.wait(Duration::from_millis(20));
    }
    assert_eq!(guest.read(BUFFERS + 16, 1), [0], "kind {kind}");
}

#[test]
fn request_longer_than_its_engine_takes_is_cut_in_order() {
    const LENGTH: u32 = 1 << 20;
    let Some(pool) = pool() else { return };
    let [id] = threads(&pool);
    let most = TransferLimits { transfer: 12 << 10, discard: 600 << 10, zeroes: 5 << 9 };
    let engine = ByCommand::new(Commands::Interrupt, most);
    let device = device(Arc::clone(&engine) as Arc<dyn Engine>, 1);
    let mut queue = Guarded::new(Shape::of(0));
    let key = pool.start(queue.setup(&device), id).unwrap();
    let guest = Arc::clone(queue.driver.guest());
    let data = BUFFERS + 4096;
    let content: Vec<u8> = (0..LENGTH).map(|i| (i / 512 % 251) as u8).collect();
    let pieces = |writable| {
        // The first ends within a part, and the last part is short.
        let at = |address, length| Buffer { address, length, writable };
        [at(data, 1536), at(data + 1536, LENGTH - 1536)]
    };
    let begun = || engine.started.swap(0, Relaxed);

    guest.write(data, &content);
    request(&mut queue, 1, [0; 16], &pieces(false));
    // 85 of 12 KiB and 4 KiB.
    assert_eq!(begun(), 86);
    guest.write(data, &[0; LENGTH as usize]);
    request(&mut queue, 0, [0; 16], &pieces(true));
    assert_eq!(begun(), 86);
    assert!(guest.read(data, LENGTH as usize) == content);

    // 100 blocks from block 7 are zeroed: 5 at a time.
    let range = |first: u8, blocks: u32| {
        let mut range = [0; 16];
        range[0] = first;
        range[8..12].copy_from_slice(&blocks.to_le_bytes());
        range
    };
    let place = BUFFERS + 64;
    let described = [Buffer { address: place, length: 16, writable: false }];
    guest.write(place, &range(7, 100));
    request(&mut queue, 13, [0; 16], &described);
    assert_eq!(begun(), 20);
    request(&mut queue, 0, [0; 16], &pieces(true));
    begun();
    let mut expected = content;
    expected[7 * 512..107 * 512].fill(0);
    assert!(guest.read(data, LENGTH as usize) == expected);

    // All of it is discarded: 600 KiB and 424.
    guest.write(place, &range(0, LENGTH / 512));
    request(&mut queue, 11, [0; 16], &described);
    assert_eq!(begun(), 2);
    let longest = engine.longest.each_ref().map(|longest| longest.load(Relaxed));
    assert_eq!(longest, [12 << 10, 600 << 10, 5 << 9]);
    assert_eq!(pool.stop(key).unwrap().broken(), None);
}
