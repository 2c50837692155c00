//! The ways in which an IOThread waits, side by side: requests and the progress of threads that
//! compute, with as many of those as there are CPUs, and with none.
//!
//! One queue, reads of 4 KiB, one at a time; the driver sleeps until it is called, as a guest does
//! that halts. Two layouts: *placed*, the driver on the first CPU, the IOThread on the last and a thread
//! that computes on each, as where vCPUs and IOThreads are pinned; and *free*, all where the scheduler
//! puts them, anew in each window. There, beside threads that compute, a driver that shares a CPU with
//! the IOThread is thirty times as fast as one that does not, so it takes many windows.
//!
//! Windows of all ways are interleaved; means, and 95 % intervals of their ratios to `interrupt` and to
//! `poll` (normal, from the windows' spread). `cargo bench --features test-utils --bench waits --
//! [WINDOWS] [MILLISECONDS]`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_dataplane::device::{Device, DeviceConfig, Limits};
use rtvirtio_dataplane::stats::QueueStats;
use rtvirtio_dataplane::{Call, Polling, Pool, QueueSetup};
use rtvirtio_engine::Engine;
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::ssd::{Faults, SsdEngine};
use rtvirtio_spec::serve::{Completion, CorePolicy};
use rtvirtio_units::Bytes;
use rtvirtio_virtq::ring::Ring;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

const DISK: u64 = 16 << 20;
const PAGE: u64 = 4096;
const DATA: u64 = GUEST + PAGE;
const RING: u64 = GUEST + (1 << 19);
/// The ways, of which the first two are what the others are compared with.
const WAYS: [(&str, Completion, CorePolicy); 4] = [
    ("interrupt", Completion::Interrupt, CorePolicy::Shared),
    ("poll", Completion::Poll, CorePolicy::Shared),
    ("adaptive, shared", Completion::Adaptive, CorePolicy::Shared),
    ("adaptive, auto", Completion::Adaptive, CorePolicy::Auto),
];

/// A guest's driver with one request at a time.
struct Load {
    guest: Arc<Guest>,
    driver: Driver,
    kick: OwnedFd,
    call: OwnedFd,
    page: u64,
}

impl Load {
    fn request(&mut self) {
        self.page = (self.page + 7) % (DISK / PAGE);
        // virtio_blk_req: type, reserved, sector.
        self.guest.u32(GUEST).store(0, Relaxed);
        self.guest.u64(GUEST + 8).store(self.page * PAGE / 512, Relaxed);
        self.guest.write(GUEST + 16, &[0xff]);
        let at = |address, length, writable| Buffer { address, length, writable };
        let buffers = [at(GUEST, 16, false), at(DATA, PAGE as u32, true), at(GUEST + 16, 1, true)];
        self.driver.add(&buffers, true).expect("room");
        if self.driver.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("an eventfd");
        }
        while self.driver.take().is_none() {
            if !self.driver.enable_calls() {
                let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
                let _ = poll(&mut fds, None);
                let _ = rustix::io::read(&self.call, &mut [0; 8]);
            }
        }
        assert_eq!(self.guest.read(GUEST + 16, 1), [0]);
    }
}

/// What a window brought, each second.
#[derive(Clone, Copy)]
struct Rates {
    requests: f64,
    turns: f64,
    /// CPUs, of all threads.
    cpus: f64,
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Has a thread, or the calling one, run on this CPU alone, if any.
fn place(thread: Option<Pid>, cpu: Option<usize>) {
    if let Some(cpu) = cpu {
        let mut set = CpuSet::new();
        set.set(cpu);
        sched_setaffinity(thread, &set).expect("one of our own CPUs");
    }
}

/// One window of one way. `cpus`: of the driver, of threads that compute, and of the IOThread, if they
/// are placed.
fn window(
    engine: &Arc<dyn Engine>,
    way: usize,
    burners: usize,
    cpus: Option<&[usize]>,
    time: Duration,
) -> Rates {
    let (_, completion, core) = WAYS[way];
    let pool = Pool::default();
    let polling = Polling { completion, core, ..Polling::default() };
    let thread = pool.add_thread("iot", polling).expect("an IOThread");
    let (_, tid) = pool.thread(thread).expect("it was added");
    place(Pid::from_raw(tid), cpus.and_then(|cpus| cpus.last().copied()));
    place(None, cpus.and_then(|cpus| cpus.first().copied()));
    let device = Device::new(DeviceConfig {
        name: "disk".to_owned(),
        engine: Arc::clone(engine),
        queues: 1,
        read_only: false,
        serial: [0; 20],
        write_cache: true,
        limits: Limits::default(),
        schedule: None,
    });
    let guest = Guest::new(1 << 20);
    let options =
        Options { size: 64, packed: false, event_idx: true, indirect: true, in_order: false };
    let driver = Driver::new(Arc::clone(&guest), RING, options);
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let (kick, call) = (event(), event());
    let device = Arc::new(device.expect("a device"));
    let called = call.try_clone().expect("a descriptor");
    let setup = QueueSetup {
        call: Some(Call::new(called, device.caller()).expect("an eventfd")),
        device,
        memory: guest.memory(),
        buffers: None,
        ring: Ring::new(driver.config(), guest.memory(), None).expect("a ring"),
        size: options.size,
        kick: Some(kick.try_clone().expect("a descriptor")),
        error: None,
        enabled: true,
        stats: Arc::new(QueueStats::new()),
    };
    let key = pool.start(setup, thread).expect("the IOThread is there");
    let mut load = Load { guest, driver, kick, call, page: 0 };
    let (stop, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    let rates = std::thread::scope(|scope| {
        for burner in 0..burners {
            let (stop, turns) = (&stop, &turns);
            scope.spawn(move || {
                place(None, cpus.map(|cpus| cpus[burner % cpus.len()]));
                while !stop.load(Relaxed) {
                    for step in 0..1_000 {
                        std::hint::black_box(step);
                    }
                    turns.fetch_add(1, Relaxed);
                }
            });
        }
        let settle = Instant::now();
        while settle.elapsed() < time / 4 {
            load.request();
        }
        let (start, cpu, before) = (Instant::now(), cpu_time(), turns.load(Relaxed));
        let mut requests = 0_u64;
        while start.elapsed() < time {
            load.request();
            requests += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        let turns = turns.load(Relaxed) - before;
        let cpus = (cpu_time() - cpu).as_secs_f64() / seconds;
        stop.store(true, Relaxed);
        Rates { requests: requests as f64 / seconds, turns: turns as f64 / seconds, cpus }
    });
    pool.stop(key).expect("it was started");
    rates
}

/// Of windows: the mean, and its standard error relative to it.
fn mean(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (n - 1.0) / n).sqrt() / mean.max(f64::MIN_POSITIVE))
}

/// The ratio of two means, and the ends of its interval.
fn ratio(of: &[f64], to: &[f64]) -> String {
    let ((of, of_error), (to, to_error)) = (mean(of), mean(to));
    let ratio = of / to.max(f64::MIN_POSITIVE);
    let half = 1.96 * of_error.hypot(to_error) * ratio;
    format!("{ratio:5.2} ({:.2}-{:.2})", (ratio - half).max(0.0), ratio + half)
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|text| text.parse::<u64>().ok());
    let windows: usize = numbers.next().unwrap_or(8).max(2) as usize;
    let time = Duration::from_millis(numbers.next().unwrap_or(250));
    let all = sched_getaffinity(None).expect("our own CPUs");
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu)).collect();
    let ssd = "ref-8x80".parse().expect("a model");
    let ssd = SsdEngine::start(ssd, Bytes::new(DISK), 1, Faults::default()).expect("an engine");
    let ram = RamEngine::new(Bytes::new(DISK), Duration::ZERO).expect("RAM");
    let engines: [(&str, Arc<dyn Engine>); 2] = [("ram", Arc::new(ram)), ("ssd", Arc::new(ssd))];
    println!("{windows} windows of {time:?}, {} CPUs", cpus.len());
    for (layout, cpus) in [("placed", Some(cpus.as_slice())), ("free", None)] {
        for (name, engine) in &engines {
            for burners in [0, all.count() as usize] {
                println!("{layout}, {name}, {burners} threads that compute");
                println!(
                    "  {:18} {:>8} {:>19} {:>19} {:>19}  CPUs",
                    "", "IOPS", "of interrupt", "of poll", "compute"
                );
                let mut found: [Vec<Rates>; WAYS.len()] = Default::default();
                for round in 0..windows {
                    for at in 0..WAYS.len() {
                        let way = (at + round) % WAYS.len();
                        // The first IOThread that adapts measures wake-ups across CPUs.
                        sched_setaffinity(None, &all).expect("our own CPUs");
                        found[way].push(window(engine, way, burners, cpus, time));
                    }
                }
                let of = |way: usize, value: fn(&Rates) -> f64| -> Vec<f64> {
                    found[way].iter().map(value).collect()
                };
                for (way, (name, ..)) in WAYS.iter().enumerate() {
                    let requests = of(way, |r| r.requests);
                    let turns = if burners > 0 {
                        ratio(&of(way, |r| r.turns), &of(0, |r| r.turns))
                    } else {
                        "-".to_owned()
                    };
                    println!(
                        "  {name:18} {:8.0} {:>19} {:>19} {turns:>19}  {:4.2}",
                        mean(&requests).0,
                        ratio(&requests, &of(0, |r| r.requests)),
                        ratio(&requests, &of(1, |r| r.requests)),
                        mean(&of(way, |r| r.cpus)).0,
                    );
                }
            }
        }
    }
}
