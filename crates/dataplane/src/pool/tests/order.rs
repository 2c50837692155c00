//! A flow's frames from guest to guest, in their order, whatever happens to its queues.

use rtvirtio_virtq::memory::{Memory, Region, RegionSpec};
use rtvirtio_virtq::ring::driver::FRONT_END;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::frames::{HEADER, Port};
use super::switch::{ALL, Net, PLAIN, Random, between};
use super::*;

/// Frames on their way at a time.
const WINDOW: u64 = 16;
/// Where the region lies that comes and goes, and its pages, one for a frame.
const ADDED: u64 = GUEST + (1 << 30);
const PAGE: u64 = 4096;
const PAGES: u64 = WINDOW;
/// Frames between two changes of memory.
const UNCHANGED: u32 = 2000;

/// Memory that a guest is given and that is taken from it while its device is served.
struct HotPlug {
    file: OwnedFd,
    /// Without it and with it.
    tables: [Arc<Memory>; 2],
    /// IDs of the frames in it that are not back.
    away: Vec<u16>,
    is_there: bool,
}

impl HotPlug {
    fn new(guest: &Guest) -> Self {
        let file = memfd_create(c"added", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, PAGES * PAGE).unwrap();
        let front_end = FRONT_END + (1 << 30);
        let spec = RegionSpec { guest: ADDED, size: PAGES * PAGE, front_end, offset: 0 };
        let added = Region::map(spec, file.try_clone().unwrap()).unwrap();
        let both = vec![Arc::clone(guest.region()), Arc::new(added)];
        let tables = [guest.memory(), Arc::new(Memory::new(both).unwrap())];
        Self { file, tables, away: Vec::new(), is_there: false }
    }

    /// Sends a frame from it.
    fn send(&mut self, port: &mut Port, number: u32, frame: &[u8]) {
        let at = u64::from(number) % PAGES * PAGE;
        let bytes = [&PLAIN[..], frame].concat();
        rustix::io::pwrite(&self.file, &bytes, at).unwrap();
        let length = bytes.len() as u32;
        let buffer = Buffer { address: ADDED + at, length, writable: false };
        self.away.push(port.driver.add(&[buffer], number.is_multiple_of(4)).unwrap());
        port.publish();
    }

    fn change(&mut self, net: &Net, key: QueueKey) {
        self.is_there = !self.is_there;
        let memory = Arc::clone(&self.tables[usize::from(self.is_there)]);
        net.pool.edit(key, move |queue| queue.set_memory(memory, None)).unwrap().unwrap();
    }
}

/// What frames carry a part of, each from another place.
fn noise() -> Vec<u8> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    (0..0x1_0000).map(|_| random.below(256) as u8).collect()
}

/// A flow of numbered frames, while both queues go from thread to thread and memory comes and goes: each comes once, in order,
/// as it was sent. `RTVIRTIO_TEST_FRAMES=10000000` of them, with a move each 20 ms.
#[test]
fn flow_keeps_its_order_while_queues_move_and_memory_changes() {
    let asked: Option<u32> =
        std::env::var("RTVIRTIO_TEST_FRAMES").ok().map(|frames| frames.parse().unwrap());
    let frames = asked.unwrap_or(20_000);
    let (pause, min_moves) = match asked {
        Some(_) => (Duration::from_millis(20), 0),
        None => (Duration::from_micros(500), 200),
    };
    let noise = noise();
    for packed in [false, true] {
        let Some(net) = Net::new(&[ALL, ALL]) else { return };
        let mut sender = net.start(0, 1, packed, 0);
        let mut receiver = net.start(1, 0, packed, 1);
        let mut plug = HotPlug::new(sender.port.driver.guest());
        let mut changes = 0;
        let moves = AtomicU64::new(0);
        let done = AtomicBool::new(false);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let (net, done, moves) = (&net, &done, &moves);
            let keys = [sender.key, receiver.key];
            scope.spawn(move || {
                let mut at = 0_usize;
                while !done.load(Relaxed) {
                    at += 1;
                    match net.pool.move_queue(keys[at % 2], net.threads[at / 2 % 2]) {
                        Ok(_) => drop(moves.fetch_add(1, Relaxed)),
                        // Its memory is being changed.
                        Err(MoveError::Busy) => {}
                        Err(error) => panic!("{error}"),
                    }
                    std::thread::sleep(pause);
                }
            });
            // Also if this fails.
            let _ends = Stop(done);
            let mut slots = receiver.port.offer(0..2 * WINDOW, 1526);
            let (mut sent, mut received, mut in_flight) = (0_u32, 0_u32, 0_u64);
            let mut last = Instant::now();
            let expected = |number: u32| {
                let mut frame = between(0, 1, 0, 60 + number as usize % 1000);
                frame[14..18].copy_from_slice(&number.to_be_bytes());
                let at = number.wrapping_mul(0x9e37_79b9) as usize % (noise.len() - 1100);
                let rest = frame.len() - 18;
                frame[18..].copy_from_slice(&noise[at..at + rest]);
                frame
            };
            while received < frames || moves.load(Relaxed) < min_moves {
                // No more than there are buffers: nothing may be lost.
                while in_flight < WINDOW && u64::from(sent - received) < WINDOW {
                    let frame = expected(sent);
                    if plug.is_there && sent / UNCHANGED % 2 == 1 {
                        plug.send(&mut sender.port, sent, &frame);
                    } else {
                        sender.port.send(u64::from(sent) % WINDOW, PLAIN, &frame);
                    }
                    (sent, in_flight) = (sent + 1, in_flight + 1);
                }
                while let Some((id, _)) = sender.port.driver.take() {
                    in_flight -= 1;
                    plug.away.retain(|away| *away != id);
                }
                // It comes while others' frames are on their way, and goes when none of its own is.
                let is_wanted = sent / UNCHANGED % 2 == 1;
                if plug.is_there != is_wanted && plug.away.is_empty() {
                    plug.change(net, sender.key);
                    changes += 1;
                }
                assert!(
                    last.elapsed() < LOST,
                    "{sent} sent, {received} received, {in_flight} not back"
                );
                let Some((id, length)) = receiver.port.driver.take() else {
                    std::thread::yield_now();
                    continue;
                };
                last = Instant::now();
                let slot = slots.remove(&id).unwrap();
                let guest = Arc::clone(receiver.port.driver.guest());
                let frame = guest.read(Port::place(slot), length as usize).split_off(HEADER);
                assert!(
                    frame == expected(received),
                    "{received} is another, or not as it was sent"
                );
                received += 1;
                slots.extend(receiver.port.offer(slot..slot + 1, 1526));
            }
            assert!(changes > 8, "{changes}");
        });
        let drops = sender.stats.drops().total() + receiver.stats.drops().total();
        assert_eq!(drops, 0);
        let moves = moves.load(Relaxed);
        eprintln!(
            "packed={packed}: {frames} frames, {moves} moves, {changes} changes of memory, none lost, {:?}",
            begun.elapsed()
        );
        net.pool.stop(sender.key).unwrap();
        net.pool.stop(receiver.key).unwrap();
    }
}
