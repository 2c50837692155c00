//! What holds for every engine, on every kind of file; and, where [`nvme`](crate::nvme) says so, on
//! namespaces of an NVMe device.

use std::any::Any;
use std::path::PathBuf;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_engine::file::{Aio, FileConfig, FileEngine};
use rtvirtio_engine::ram::RamEngine;
use rtvirtio_engine::ssd::{Faults, SsdEngine};
use rtvirtio_engine::{Cost, Operation, Segment};
use rtvirtio_units::Bytes;

use crate::driver::{Driver, Memory};
use crate::nvme::Namespaces;
use crate::scratch::{Image, Loop, config};
use crate::testing::has_io_uring;

const SIZE: u64 = 1 << 20;

/// Runs `check` over all of them, each new and of 1 MiB of zeroes.
fn on_every_engine(check: impl Fn(&str, &mut Driver)) {
    if let Some(namespaces) = Namespaces::named() {
        return namespaces.on_each(SIZE, check);
    }
    // Each is driven by a ring, those too that need none.
    if !has_io_uring() {
        return;
    }
    let ram = RamEngine::new(Bytes::new(SIZE), Duration::ZERO).unwrap();
    check("ram", &mut Driver::new(Box::new(ram)));
    let ssd = "ref-8x80".parse().unwrap();
    let ssd = SsdEngine::start(ssd, Bytes::new(SIZE), 1, Faults::default()).unwrap();
    check("ssd", &mut Driver::new(Box::new(ssd)));
    let cost = Cost { request: Duration::from_micros(20), kib: Duration::from_nanos(40) };
    let costly = RamEngine::new(Bytes::new(SIZE), cost).unwrap();
    check("ram that costs", &mut Driver::new(Box::new(costly)));
    let costly =
        SsdEngine::start("ref-8x80".parse().unwrap(), Bytes::new(SIZE), 1, Faults::default());
    check("ssd that costs", &mut Driver::new(Box::new(costly.unwrap().with_cost(cost))));
    for place in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        on_every_way(place, &check, || {
            let image = Image::below(place, SIZE);
            Some((image.path.clone(), Box::new(image)))
        });
    }
    for block in [512, 4096] {
        on_every_way(&format!("device of {block}"), &check, || {
            let device = Loop::new(SIZE, block)?;
            Some((device.path.clone(), Box::new(device)))
        });
    }
}

/// Runs `check` over a file that `make` makes anew each time, in every way to reach it. What comes
/// with its path is kept meanwhile.
fn on_every_way(
    what: &str,
    check: impl Fn(&str, &mut Driver),
    make: impl Fn() -> Option<(PathBuf, Box<dyn Any>)>,
) {
    for direct in [false, true] {
        for aio in [Aio::Auto, Aio::IoUring, Aio::Threads] {
            let Some((path, _kept)) = make() else { return };
            let engine = FileEngine::open(FileConfig { direct, aio, ..config(&path) }).unwrap();
            check(&format!("{what}, direct {direct}, {aio:?}"), &mut Driver::new(Box::new(engine)));
        }
    }
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i / 512 + i) as u8 ^ seed).collect()
}

#[test]
fn read_returns_what_was_written_in_any_segments() {
    on_every_engine(|name, disk| {
        let block = disk.engine.geometry().logical_block as usize;
        let data = pattern(12 * block, 1);
        disk.write(block as u64, &data, &[4 * block, block, 7 * block]).unwrap();
        assert_eq!(disk.read(block as u64, &[2 * block, 10 * block]).unwrap(), data, "{name}");
        assert_eq!(disk.read(block as u64, &[12 * block]).unwrap(), data, "{name}");
        assert_eq!(disk.read(0, &[block]).unwrap(), vec![0; block], "{name}");
    });
}

#[test]
fn flush_and_durable_write_succeed_with_and_without_a_registered_file() {
    on_every_engine(|name, disk| {
        for _ in 0..2 {
            let data = pattern(4096, 2);
            disk.write_at(4096, &data, &[4096], 0, true).unwrap();
            disk.write_at(8192, &data, &[2048, 2048], 4096, true).unwrap();
            disk.range(Operation::Flush, 0, 0).unwrap();
            assert_eq!(disk.read(8192, &[4096]).unwrap(), data, "{name}");
            disk.unregister_file();
        }
    });
}

#[test]
fn fixed_buffer_reads_and_writes_its_part() {
    on_every_engine(|name, disk| {
        let mut memory = Memory::new(&[16384], 0);
        let data = pattern(16384, 3);
        memory.fill(&data);
        let whole = memory.segments()[0];
        disk.register(whole);
        let mut part = whole;
        part.advance(4096);
        let part = [Segment::new(part.base(), 8192)];
        disk.run(Operation::Write { durable: false }, 4096, 8192, &part, Some(0)).unwrap();
        memory.fill(&[0; 16384]);
        disk.run(Operation::Read, 4096, 8192, &part, Some(0)).unwrap();
        assert_eq!(memory.content()[4096..12288], data[4096..12288], "{name}");
        assert_eq!(memory.content()[12288..], [0; 4096], "{name}");
    });
}

#[test]
fn misaligned_memory_is_read_and_written_all_the_same() {
    on_every_engine(|name, disk| {
        // More than is bounced at a time, in pieces of no block's size.
        let lengths = [100, 300_000, 7, 228_376];
        let data = pattern(528_483, 4);
        let data = &data[..lengths.iter().sum::<usize>() / 4096 * 4096];
        let lengths = [100, 300_000, 7, data.len() - 300_107];
        disk.write_at(8192, data, &lengths, 3, false).unwrap();
        assert_eq!(disk.read_at(8192, &lengths, 1).unwrap(), data, "{name}");
        assert_eq!(disk.read(8192, &[data.len()]).unwrap(), data, "{name}");
    });
}

#[test]
fn zeroed_range_reads_zero_and_its_neighbours_stay() {
    on_every_engine(|name, disk| {
        let block = u64::from(disk.engine.geometry().logical_block);
        let data = pattern(128 << 10, 5);
        for unmap in [false, true] {
            disk.write(0, &data, &[data.len()]).unwrap();
            disk.range(Operation::WriteZeroes { unmap, durable: unmap }, 4096 + block, 65536)
                .unwrap();
            let mut expected = data.clone();
            let start = 4096 + block as usize;
            expected[start..start + 65536].fill(0);
            assert_eq!(disk.read(0, &[data.len()]).unwrap(), expected, "{name}, unmap {unmap}");
        }
    });
}

#[test]
fn discarded_range_is_old_or_zero_and_its_neighbours_stay() {
    on_every_engine(|name, disk| {
        assert!(disk.engine.geometry().discard, "{name}");
        let data = pattern(64 << 10, 6);
        disk.write(0, &data, &[data.len()]).unwrap();
        disk.range(Operation::Discard, 8192, 16384).unwrap();
        let read = disk.read(0, &[data.len()]).unwrap();
        assert_eq!(read[..8192], data[..8192], "{name}");
        assert_eq!(read[24576..], data[24576..], "{name}");
        let middle = &read[8192..24576];
        assert!(middle == &data[8192..24576] || middle.iter().all(|b| *b == 0), "{name}");
    });
}

#[test]
fn many_requests_in_flight_each_reach_their_place_and_end_once() {
    on_every_engine(|name, disk| {
        // Each writes 4 KiB of its own number, then reads it; the driver's queue has 64 entries.
        for operation in [Operation::Write { durable: false }, Operation::Read] {
            let mut memory: Vec<_> = (0..64).map(|_| Memory::new(&[4096], 0)).collect();
            if operation != Operation::Read {
                (0_u8..).zip(&mut memory).for_each(|(i, m)| m.fill(&[i; 4096]));
            }
            let segments: Vec<_> = memory.iter_mut().map(Memory::segments).collect();
            for (token, segments) in (0..).zip(&segments) {
                disk.run_later(token, operation, token * 4096, 4096, segments);
            }
            disk.finish_all();
            for (i, memory) in (0_u8..).zip(&memory) {
                assert!(memory.content() == [i; 4096], "{name}, request {i}");
            }
        }
    });
}

#[test]
fn random_requests_leave_what_a_vector_holds() {
    on_every_engine(|name, disk| {
        let mut random = Pcg64Mcg::seed_from_u64(7);
        let mut model = vec![0_u8; SIZE as usize];
        let block = u64::from(disk.engine.geometry().logical_block);
        for step in 0..1000 {
            let offset = random.random_range(0..SIZE / block) * block;
            let most = ((SIZE - offset) / block).min(32);
            let length = (random.random_range(1..=most) * block) as usize;
            let range = offset as usize..offset as usize + length;
            let first = random.random_range(1..=length);
            let lengths = if first == length { vec![length] } else { vec![first, length - first] };
            let off = if random.random_bool(0.2) { random.random_range(0..600) } else { 0 };
            match random.random_range(0..50) {
                0..25 => {
                    let data = pattern(length, step as u8);
                    disk.write_at(offset, &data, &lengths, off, step % 200 == 0).unwrap();
                    model[range].copy_from_slice(&data);
                }
                25..46 => {
                    let read = disk.read_at(offset, &lengths, off).unwrap();
                    assert!(read == model[range], "{name}, step {step}");
                }
                46..49 => {
                    let unmap = random.random_bool(0.5);
                    disk.range(
                        Operation::WriteZeroes { unmap, durable: !unmap },
                        offset,
                        length as u64,
                    )
                    .unwrap();
                    model[range].fill(0);
                }
                _ => disk.range(Operation::Flush, 0, 0).unwrap(),
            }
        }
        assert!(disk.read(0, &[SIZE as usize]).unwrap() == model, "{name}");
    });
}
