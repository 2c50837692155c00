//! What an IOThread allocates for requests: nothing, once it has seen the queue's depth. And the monitor
//! for a look between decisions: nothing, while no queue comes or goes.
//!
//! A binary of its own, since it counts the allocations of a thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_dataplane::device::{Device, DeviceConfig, Limits};

use rtvirtio_dataplane::plane::{HandedFds, Plane, Registry};
use rtvirtio_dataplane::stats::QueueStats;
use rtvirtio_dataplane::{Call, FixedBuffers, Polling, Pool, QueueSetup};
use rtvirtio_engine::Engine;
use rtvirtio_engine::file::{Aio, FileConfig, FileEngine, FileSource};
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::testing::{has_io_uring, skipped};
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_virtq::ring::Ring;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// The system's, counting what marked threads do.
struct Counting;

static COUNTED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if IS_COUNTED.get() {
        COUNTED.fetch_add(1, Relaxed);
    }
}

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DISK: u64 = 16 << 20;
const REQUESTS: u64 = 100_000;
const WARM_UP: u64 = 5_000;
const BATCH: u64 = 32;
const PAGE: u64 = 4096;
const HEADERS: u64 = GUEST;
const STATUS: u64 = GUEST + PAGE;
const DATA: u64 = GUEST + 16 * PAGE;
const RING: u64 = GUEST + (1 << 20);

/// A guest whose driver does batches of `BATCH` requests, half reads and half writes.
struct Load {
    guest: Arc<Guest>,
    driver: Driver,
    kick: rustix::fd::OwnedFd,
    call: rustix::fd::OwnedFd,
    page: u64,
}

impl Load {
    fn run(&mut self, requests: u64) {
        let mut left = requests / BATCH;
        while left > 0 {
            self.batch();
            left -= 1;
        }
    }

    fn batch(&mut self) {
        for slot in 0..BATCH {
            self.page = (self.page + 7) % (DISK / PAGE);
            let (header, status) = (HEADERS + slot * 16, STATUS + slot);
            let is_write = slot % 2 == 1;
            // virtio_blk_req: type, reserved, sector.
            self.guest.u32(header).store(u32::from(is_write), Relaxed);
            self.guest.u64(header + 8).store(self.page * PAGE / 512, Relaxed);
            self.guest.write(status, &[0xff]);
            let buffers = [
                Buffer { address: header, length: 16, writable: false },
                Buffer { address: DATA + slot * PAGE, length: PAGE as u32, writable: !is_write },
                Buffer { address: status, length: 1, writable: true },
            ];
            self.driver.add(&buffers, true).expect("room");
        }
        if self.driver.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        }
        let (mut done, start) = (0, Instant::now());
        while done < BATCH {
            while self.driver.take().is_some() {
                done += 1;
            }
            if done < BATCH && !self.driver.enable_calls() {
                assert!(start.elapsed() < Duration::from_secs(10), "{done} of {BATCH} came back");
                let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
                let limit = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
                if poll(&mut fds, Some(&limit)).unwrap() > 0 {
                    rustix::io::read(&self.call, &mut [0; 8]).unwrap();
                }
            }
        }
        for slot in 0..BATCH {
            assert_eq!(self.guest.read(STATUS + slot, 1), [0], "request {slot}");
        }
    }
}

/// What the IOThread allocates and frees while `REQUESTS` requests are served.
fn allocations(engine: Arc<dyn Engine>, packed: bool, fixed: bool) -> u64 {
    let pool = Pool::default();
    let thread = pool.add_thread("counted", Polling::default()).unwrap();
    let device = Device::new(DeviceConfig {
        name: "disk".to_owned(),
        engine,
        queues: 1,
        read_only: false,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule: None,
    });
    let guest = Guest::new(4 << 20);
    let options = Options { size: 128, packed, event_idx: true, indirect: true, in_order: false };
    let driver = Driver::new(Arc::clone(&guest), RING, options);
    let ring = Ring::new(driver.config(), guest.memory(), None).unwrap();
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let (kick, call) = (event(), event());
    let register = || FixedBuffers::register(&guest.memory(), false).unwrap().unwrap();
    let buffers = fixed.then(|| Arc::new(register()));
    let device = Arc::new(device.unwrap());
    let setup = QueueSetup {
        call: Some(Call::new(call.try_clone().unwrap(), device.caller()).unwrap()),
        device,
        memory: guest.memory(),
        buffers,
        ring,
        size: options.size,
        kick: Some(kick.try_clone().unwrap()),
        error: None,
        enabled: true,
        stats: Arc::new(QueueStats::new()),
    };
    let key = pool.start(setup, thread).unwrap();
    let mut load = Load { guest, driver, kick, call, page: 0 };
    load.run(WARM_UP);
    // Messages allocate: these two are not counted, and nobody sends another.
    pool.edit(key, |_| IS_COUNTED.set(true)).unwrap();
    // What follows the edit on its thread is over when a request is.
    load.run(BATCH);
    COUNTED.store(0, Relaxed);
    load.run(REQUESTS);
    let counted = COUNTED.load(Relaxed);
    pool.edit(key, |_| IS_COUNTED.set(false)).unwrap();
    pool.stop(key).unwrap();
    counted
}

fn file() -> Option<(tempfile::TempDir, Arc<dyn Engine>)> {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path: &Path = &directory.path().join("disk.raw");
    std::fs::write(path, vec![0; DISK as usize]).unwrap();
    let engine = FileEngine::open(FileConfig {
        source: FileSource::Path(path.to_owned()),
        direct: true,
        read_only: false,
        explicit_raw: true,
        block_size: None,
        aio: Aio::IoUring,
    });
    match engine {
        Ok(engine) => Some((directory, Arc::new(engine))),
        Err(error) => {
            skipped(format_args!("its part on {}: {error}", path.display()));
            None
        }
    }
}

/// Of the nine looks between two decisions.
fn look_allocations() -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::new(Arc::new(|_, _| ())).unwrap();
    for name in ["iot0", "iot1"] {
        let raw = serde_json::from_value(serde_json::json!({ "name": name })).unwrap();
        registry.add_iothread(rtvirtio_spec::serve::IoThread::new(raw).unwrap()).unwrap();
    }
    let device = serde_json::json!({
        "name": "disk", "vm": "vm", "queues": 8, "socket": directory.path().join("disk.sock"),
        "engine": { "type": "ram", "size": 1 << 20 },
    });
    registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default()).unwrap();
    let limits = rtvirtio_iocores::Limits {
        cpus: vec![],
        min_iothreads: 2,
        max_iothreads: 2,
        borrow: false,
    };
    let mut probe = registry.probe(limits);
    let mut looks = (1..).map(|look| Nanos::from_millis(10 * look));
    // It decides at the 11th, 21st and 31st.
    looks.by_ref().take(21).for_each(|time| probe.look(time));
    COUNTED.store(0, Relaxed);
    IS_COUNTED.set(true);
    looks.by_ref().take(9).for_each(|time| probe.look(time));
    IS_COUNTED.set(false);
    COUNTED.load(Relaxed)
}

/// One test: the counter is one.
#[test]
fn requests_and_looks_at_them_allocate_nothing() {
    if !has_io_uring() {
        return;
    }
    assert_eq!(look_allocations(), 0, "the monitor");
    for packed in [false, true] {
        let ram = RamEngine::new(Bytes::new(DISK), Duration::ZERO).unwrap();
        assert_eq!(allocations(Arc::new(ram), packed, false), 0, "RAM, packed: {packed}");
        let Some((_directory, engine)) = file() else { return };
        for fixed in [false, true] {
            let engine = Arc::clone(&engine);
            let what = format!("file, packed: {packed}, fixed buffers: {fixed}");
            assert_eq!(allocations(engine, packed, fixed), 0, "{what}");
        }
    }
}
