//! Drivers and front ends that do what they must not: the ring breaks, with the right name, and
//! nothing else does.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use crate::memory::{Mapping, Region, RegionSpec};

use super::*;
use crate::ring::chain::{INDIRECT, NEXT, WRITE};

/// A descriptor: address, length and, of a split ring, flags and next, of a packed one, ID and
/// flags.
type Raw = (u64, u32, u16, u16);

/// Makes a split ring's descriptors available as they are, from their first one.
fn available(driver: &Driver, heads: &[u16]) {
    let (_, available, _) = driver.addresses();
    for (slot, head) in heads.iter().enumerate() {
        driver.guest().u16(available + 4 + 2 * slot as u64).store(*head, Ordering::Relaxed);
    }
    driver.guest().u16(available + 2).store(heads.len() as u16, Ordering::Release);
}

/// What becomes of a split ring with these descriptors, of which the first is a head.
fn refused(descriptors: &[Raw]) -> RingError {
    let driver = driver(SPLIT);
    for (index, &(address, length, flags, next)) in descriptors.iter().enumerate() {
        driver.set_descriptor(index as u16, address, length, flags, next);
    }
    available(&driver, &[0]);
    broken(&mut ring(&driver))
}

/// The error that a ring breaks with, and that it stays so.
fn broken(ring: &mut Ring) -> RingError {
    let mut chain = Chain::default();
    assert_eq!(ring.next_singles(&mut [Single::EMPTY; 4]), 0, "that it is not valid says `next`");
    let error = ring.next(&mut chain).unwrap_err();
    assert_eq!(ring.next(&mut chain), Err(error), "it stays broken");
    assert_eq!(ring.error(), Some(error));
    assert!(!ring.is_pending());
    assert!(!ring.enable_notification());
    assert!(!ring.publish());
    assert_eq!(ring.in_flight(), 0);
    error
}

/// Entries of an indirect table at [`DATA`] + 4096, with a descriptor of it.
fn refused_table(entries: &[Raw]) -> RingError {
    let driver = driver(SPLIT);
    let table = DATA + 4096;
    for (index, &(address, length, flags, next)) in entries.iter().enumerate() {
        let word = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
        driver.guest().u64(table + 16 * index as u64).store(address, Ordering::Relaxed);
        driver.guest().u64(table + 16 * index as u64 + 8).store(word, Ordering::Relaxed);
    }
    driver.set_descriptor(0, table, 16 * entries.len() as u32, INDIRECT, 0);
    available(&driver, &[0]);
    broken(&mut ring(&driver))
}

#[test]
fn chain_that_loops_is_refused() {
    assert_eq!(refused(&[(DATA, 1, NEXT, 0)]), RingError::Loop);
    assert_eq!(refused(&[(DATA, 1, NEXT, 1), (DATA, 1, NEXT, 0)]), RingError::Loop);
    let looped = [(DATA, 1, NEXT, 1), (DATA, 1, NEXT, 0)];
    assert_eq!(refused_table(&looped), RingError::Loop);
}

#[test]
fn index_beyond_the_table_is_refused() {
    assert_eq!(refused(&[(DATA, 1, NEXT, 8)]), RingError::DescriptorRange);
    assert_eq!(refused(&[(DATA, 1, NEXT, 65535)]), RingError::DescriptorRange);
    assert_eq!(refused_table(&[(DATA, 1, NEXT, 1)]), RingError::DescriptorRange);
}

#[test]
fn head_beyond_the_table_is_refused() {
    let driver = driver(SPLIT);
    available(&driver, &[8]);
    assert_eq!(broken(&mut ring(&driver)), RingError::HeadRange);
}

#[test]
fn available_index_that_jumps_is_refused() {
    let driver = driver(SPLIT);
    let (_, available, _) = driver.addresses();
    for index in [9, 65535] {
        driver.guest().u16(available + 2).store(index, Ordering::Relaxed);
        assert_eq!(broken(&mut ring(&driver)), RingError::AvailableJump);
    }
}

#[test]
fn head_in_flight_that_comes_again_is_refused() {
    let driver = driver(SPLIT);
    driver.set_descriptor(3, DATA, 1, WRITE, 0);
    available(&driver, &[3, 3]);
    let mut ring = ring(&driver);
    let mut chain = Chain::default();
    assert_eq!(ring.next(&mut chain), Ok(true));
    assert_eq!(ring.next(&mut chain), Err(RingError::HeadBusy));
    // What is in flight still ends.
    ring.finish(3, 1);
    assert!(ring.publish());
    assert_eq!(ring.in_flight(), 0);
    let (_, _, used) = driver.addresses();
    assert_eq!(driver.guest().u16(used + 2).load(Ordering::Relaxed), 1);
    assert_eq!(ring.next(&mut chain), Err(RingError::HeadBusy));
}

#[test]
fn descriptor_without_bytes_is_refused() {
    assert_eq!(refused(&[(DATA, 0, 0, 0)]), RingError::ZeroLength);
    assert_eq!(refused(&[(DATA, 1, NEXT, 1), (DATA, 0, WRITE, 0)]), RingError::ZeroLength);
    assert_eq!(refused_table(&[(DATA, 0, 0, 0)]), RingError::ZeroLength);
}

#[test]
fn buffer_outside_memory_is_refused() {
    assert_eq!(refused(&[(0, 1, 0, 0)]), RingError::NotMemory);
    assert_eq!(refused(&[(DATA, u32::MAX, 0, 0)]), RingError::NotMemory);
    assert_eq!(refused(&[(u64::MAX, 1, 0, 0)]), RingError::NotMemory);
    let end = GUEST + driver(SPLIT).guest().region().spec().size;
    assert_eq!(refused(&[(end - 1, 2, 0, 0)]), RingError::NotMemory);
}

#[test]
fn buffer_that_wraps_is_refused() {
    assert_eq!(refused(&[(u64::MAX, 2, 0, 0)]), RingError::AddressOverflow);
    assert_eq!(refused(&[(u64::MAX - 31, 48, INDIRECT, 0)]), RingError::AddressOverflow);
}

#[test]
fn length_of_all_beyond_32_bits_is_refused() {
    // Memory that is large enough: the sum is what is wrong.
    let guest = Guest::new(1 << 32);
    let driver = Driver::new(guest, DATA, SPLIT);
    driver.set_descriptor(0, DATA, u32::MAX - 0x10_0000, NEXT, 1);
    driver.set_descriptor(1, DATA, 0x10_0001, 0, 0);
    available(&driver, &[0]);
    assert_eq!(broken(&mut ring(&driver)), RingError::TooLong);
    driver.set_descriptor(1, DATA, 0x10_0000, 0, 0);
    let mut chain = Chain::default();
    assert_eq!(ring(&driver).next(&mut chain), Ok(true));
    assert_eq!(chain.readable.iter().map(Segment::len).sum::<usize>(), 0xffff_ffff);
}

#[test]
fn readable_after_writable_is_refused() {
    let both = [(DATA, 1, NEXT | WRITE, 1), (DATA, 1, 0, 0)];
    assert_eq!(refused(&both), RingError::ReadableAfterWritable);
    assert_eq!(refused_table(&both), RingError::ReadableAfterWritable);
}

#[test]
fn indirect_that_is_nested_is_refused() {
    assert_eq!(refused_table(&[(DATA, 16, INDIRECT, 0)]), RingError::IndirectNested);
}

#[test]
fn indirect_with_a_next_one_is_refused() {
    let both = [(DATA, 16, INDIRECT | NEXT, 1), (DATA, 1, 0, 0)];
    assert_eq!(refused(&both), RingError::IndirectWithNext);
}

#[test]
fn indirect_table_of_a_bad_length_is_refused() {
    for length in [0, 8, 17, 1025 * 16, u32::MAX, u32::MAX - 15] {
        assert_eq!(refused(&[(DATA, length, INDIRECT, 0)]), RingError::IndirectLength);
    }
}

#[test]
fn indirect_not_negotiated_is_refused() {
    let driver = driver(Options { indirect: false, ..SPLIT });
    driver.set_descriptor(0, DATA, 16, INDIRECT, 0);
    available(&driver, &[0]);
    assert_eq!(broken(&mut ring(&driver)), RingError::IndirectRefused);
}

#[test]
fn descriptors_beyond_the_limit_are_refused() {
    let mut entries: Vec<_> = (1..=1024).map(|next| (DATA, 1, NEXT, next)).collect();
    entries[1023].2 = 0;
    let driver = driver(SPLIT);
    let table = DATA + 4096;
    for (index, &(address, length, flags, next)) in entries.iter().enumerate() {
        let word = length | u64::from(flags) << 32 | (next as u64) << 48;
        driver.guest().u64(table + 16 * index as u64).store(address, Ordering::Relaxed);
        driver.guest().u64(table + 16 * index as u64 + 8).store(word, Ordering::Relaxed);
    }
    // As many as there may be, from a table at an odd address too.
    driver.set_descriptor(1, table, 1024 * 16, INDIRECT, 0);
    available(&driver, &[1]);
    let mut chain = Chain::default();
    assert_eq!(ring(&driver).next(&mut chain), Ok(true));
    assert_eq!(chain.readable.len(), 1024);
    let bytes = driver.guest().read(table, 1024 * 16);
    driver.guest().write(table + 3, &bytes);
    driver.set_descriptor(1, table + 3, 1024 * 16, INDIRECT, 0);
    assert_eq!(ring(&driver).next(&mut chain), Ok(true));
    assert_eq!(chain.readable.len(), 1024);
    // And one in front of them.
    driver.set_descriptor(0, DATA, 1, NEXT, 1);
    available(&driver, &[0]);
    assert_eq!(broken(&mut ring(&driver)), RingError::TooManyDescriptors);
}

#[test]
fn buffer_across_regions_is_several_segments() {
    let memory = driver(SPLIT).guest().memory();
    let size = memory.regions().next().unwrap().spec().size;
    let end = GUEST + size;
    let (file, other) = (Guest::new(4096), GUEST + size);
    let fd = file.file().try_clone_to_owned().unwrap();
    let spec = RegionSpec { guest: other, size: 4096, front_end: 0, offset: 0 };
    let other = Arc::new(Region::map(spec, fd).unwrap());

    let driver = driver(SPLIT);
    let memory = Arc::new(driver.guest().memory().with(other).unwrap());
    driver.set_descriptor(0, end - 10, 30, 0, 0);
    available(&driver, &[0]);
    let mut ring = Ring::new(driver.config(), memory, None).unwrap();
    let mut chain = Chain::default();
    assert_eq!(ring.next(&mut chain), Ok(true));
    assert_eq!(chain.readable.iter().map(Segment::len).collect::<Vec<_>>(), [10, 20]);
}

#[test]
fn ring_outside_memory_or_misaligned_is_refused() {
    let driver = driver(SPLIT);
    let new = |config| Ring::new(config, driver.guest().memory(), None).unwrap_err();
    let good = driver.config();
    let nowhere = RingConfig { device: u64::MAX, ..good };
    assert_eq!(new(nowhere), RingError::Unmapped);
    assert_eq!(new(RingConfig { descriptors: GUEST, ..good }), RingError::Unmapped);
    let odd = RingConfig { descriptors: good.descriptors + 8, ..good };
    assert_eq!(new(odd), RingError::Misaligned);
    assert_eq!(new(RingConfig { driver: good.driver + 1, ..good }), RingError::Misaligned);
    assert_eq!(new(RingConfig { device: good.device + 2, ..good }), RingError::Misaligned);
    for size in [0, 1, 6, 1025, 2048] {
        assert_eq!(new(RingConfig { size, ..good }), RingError::Size, "{size}");
    }
    let packed = RingConfig { packed: true, size: 7, base: 7, ..good };
    assert_eq!(new(packed), RingError::Base);
}

#[test]
fn memory_taken_away_breaks_the_ring() {
    let mut driver = driver(SPLIT);
    let mut ring = ring(&driver);
    turn(&mut driver, &mut ring, 1);
    rustix::fs::ftruncate(driver.guest().file(), 0).unwrap();
    let mut chain = Chain::default();
    // The access that finds out reads zeroes; what comes of it is an error at once or next time.
    let _ = ring.next(&mut chain);
    assert!(ring.next(&mut chain).is_err());
    let config = driver.config();
    let again = Ring::new(config, driver.guest().memory(), None).unwrap_err();
    assert_eq!(again, RingError::MemoryGone);
}

/// Writes a packed ring's descriptors, available in the first lap.
fn packed_descriptors(driver: &Driver, descriptors: &[Raw]) {
    let (ring, _, _) = driver.addresses();
    for (index, &(address, length, id, flags)) in descriptors.iter().enumerate() {
        let at = ring + 16 * index as u64;
        let word = u64::from(length) | u64::from(id) << 32 | u64::from(flags | 1 << 7) << 48;
        driver.guest().u64(at).store(address, Ordering::Relaxed);
        driver.guest().u64(at + 8).store(word, Ordering::Relaxed);
    }
}

#[test]
fn packed_ring_bad_chains_are_refused() {
    let cases: [(&[Raw], RingError); 8] = [
        (&[(DATA, 1, 0, NEXT); 8], RingError::Overrun),
        (&[(DATA, 1, 8, 0)], RingError::BufferIdRange),
        (&[(DATA, 0, 0, 0)], RingError::ZeroLength),
        (&[(0, 1, 0, 0)], RingError::NotMemory),
        (&[(DATA, 15, 0, INDIRECT)], RingError::IndirectLength),
        (&[(DATA, 16, 0, INDIRECT | NEXT)], RingError::IndirectWithNext),
        (&[(DATA, 1, 0, NEXT | WRITE), (DATA, 1, 0, 0)], RingError::ReadableAfterWritable),
        (&[(u64::MAX, 2, 0, 0)], RingError::AddressOverflow),
    ];
    for (descriptors, error) in cases {
        for inflight in [false, true] {
            let driver = driver(PACKED);
            packed_descriptors(&driver, descriptors);
            let region = inflight_region(PACKED);
            let queue = if inflight { region.queue(0) } else { None };
            let mut ring = Ring::new(driver.config(), driver.guest().memory(), queue).unwrap();
            let _ = ring.publish();
            assert_eq!(broken(&mut ring), error);
        }
    }
}

#[test]
fn packed_ring_buffer_id_in_flight_is_refused() {
    let driver = driver(PACKED);
    packed_descriptors(&driver, &[(DATA, 1, 3, 0), (DATA, 1, 3, 0)]);
    let mut ring = ring(&driver);
    let mut chain = Chain::default();
    assert_eq!(ring.next(&mut chain), Ok(true));
    assert_eq!(ring.next(&mut chain), Err(RingError::BufferIdBusy));
    ring.finish(3, 1);
    assert!(ring.publish());
}

#[test]
fn packed_ring_more_in_flight_than_it_has_is_refused() {
    let driver = driver(PACKED);
    let all: Vec<_> = (0..8).map(|id| (DATA, 1, id, 0)).collect();
    packed_descriptors(&driver, &all);
    let mut ring = ring(&driver);
    let mut chain = Chain::default();
    while ring.in_flight() < 8 {
        assert_eq!(ring.next(&mut chain), Ok(true));
    }
    // The first one again, in the next lap.
    let at = driver.addresses().0 + 14;
    driver.guest().u16(at).store(1 << 15, Ordering::Release);
    assert_eq!(ring.next(&mut chain), Err(RingError::Overrun));
}

#[test]
fn packed_ring_reuse_before_publication_is_refused() {
    let driver = driver(PACKED);
    let region = inflight_region(PACKED);
    let all: Vec<_> = (0..8).map(|id| (DATA, 1, id, 0)).collect();
    packed_descriptors(&driver, &all);
    let mut ring = Ring::new(driver.config(), driver.guest().memory(), region.queue(0)).unwrap();
    let mut chain = Chain::default();
    while ring.in_flight() < 8 {
        assert_eq!(ring.next(&mut chain), Ok(true));
    }
    ring.finish(0, 1);
    let at = driver.addresses().0 + 14;
    driver.guest().u16(at).store(1 << 15, Ordering::Release);
    assert_eq!(ring.next(&mut chain), Err(RingError::Overrun));
}

/// An in-flight region of one queue of 8 entries, and a view of it.
fn region(packed: bool) -> (Arc<Inflight>, Mapping) {
    let (fd, size) = Inflight::create(1, 8, packed).unwrap();
    let view = Mapping::new(fd.as_fd(), 0, size).unwrap();
    (Inflight::map(fd, 0, size, 1, 8, packed).unwrap(), view)
}

fn poke(view: &Mapping, offset: usize, value: u16) {
    Part::new(view.base(), view.len()).store_u16(offset, value, Ordering::SeqCst);
}

fn opened(packed: bool, region: &Arc<Inflight>) -> Result<Ring, RingError> {
    let driver = driver(Options { packed, ..SPLIT });
    Ring::new(driver.config(), driver.guest().memory(), region.queue(0))
}

#[test]
fn inflight_region_of_another_shape_is_refused() {
    for packed in [false, true] {
        let (region, view) = region(packed);
        assert!(region.queue(1).is_none());
        assert_eq!(opened(!packed, &region).unwrap_err(), RingError::InflightSize);
        opened(packed, &region).unwrap();
        poke(&view, 10, 9);
        assert_eq!(opened(packed, &region).unwrap_err(), RingError::InflightSize);
        poke(&view, 8, 2);
        assert_eq!(opened(packed, &region).unwrap_err(), RingError::InflightVersion);

        let (fd, size) = Inflight::create(2, 8, packed).unwrap();
        // 64 bytes behind the queues may be missing.
        let needed = size - 64;
        let short = Inflight::map(fd, 0, needed - 1, 2, 8, packed).unwrap_err();
        assert_eq!(short, InflightError::TooShort { size: needed - 1, needed });
    }
    assert_eq!(Inflight::create(0, 8, false).unwrap_err(), InflightError::Queues(0));
    assert_eq!(Inflight::create(1, 1025, false).unwrap_err(), InflightError::QueueSize(1025));
}

#[test]
fn inflight_split_list_outside_is_refused() {
    let (region, view) = region(false);
    opened(false, &region).unwrap();
    // One was published and is not accounted for; the list begins nowhere.
    poke(&view, 14, 65535);
    poke(&view, 12, 8);
    assert_eq!(opened(false, &region).unwrap_err(), RingError::InflightIndex);
}

#[test]
fn inflight_split_of_a_ring_set_up_anew_is_forgotten() {
    let (region, view) = region(false);
    opened(false, &region).unwrap();
    poke(&view, 16 + 16, 1);
    poke(&view, 14, 500);
    let ring = opened(false, &region).unwrap();
    assert_eq!((ring.recovering(), ring.base()), (0, 0));
}

#[test]
fn inflight_packed_corrupt_lists_are_refused() {
    let entry = |index: usize| 32 + 32 * index;
    // Offset and value: a free list that loops, one that leads outside, a head that is free
    // nowhere and in flight nowhere, an index outside the ring.
    for (offset, value) in [(entry(7) + 2, 0), (entry(3) + 2, 9), (14, 9), (16, 8), (18, 8)] {
        let (region, view) = region(true);
        opened(true, &region).unwrap();
        poke(&view, offset, value);
        assert_eq!(opened(true, &region).unwrap_err(), RingError::InflightIndex, "{offset}");
    }
    // An entry in flight, outside the free list, that has no descriptors, too many, another end,
    // or an ID out of range.
    for (count, last, id) in [(0, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 8)] {
        let (region, view) = region(true);
        opened(true, &region).unwrap();
        poke(&view, 14, 1);
        poke(&view, entry(0), 1);
        poke(&view, entry(0) + 6, count);
        poke(&view, entry(0) + 4, last);
        poke(&view, entry(0) + 16, id);
        assert_eq!(opened(true, &region).unwrap_err(), RingError::InflightIndex);
    }
}

#[test]
fn inflight_packed_short_free_list_is_refused_before_anything_is_written() {
    let entry = |index: usize| 32 + 32 * index;
    // The free list ends at once, after each number of entries but all, and beside a request in flight.
    for free in 0..8 {
        for busy in [false, true] {
            let (region, view) = region(true);
            opened(true, &region).unwrap();
            if free == 0 {
                poke(&view, 14, 8);
            } else {
                poke(&view, 14, u16::from(busy));
                poke(&view, entry(free - 1 + usize::from(busy)) + 2, 8);
            }
            if busy {
                // Of one descriptor, in entry 0, which is in no list.
                poke(&view, entry(0), 1);
                poke(&view, entry(0) + 6, 1);
            }
            let enough = free + usize::from(busy) >= 8;
            let bytes = || {
                let part = Part::new(view.base(), view.len());
                (0..view.len()).map(|at| part.load_u8(at, Ordering::SeqCst)).collect::<Vec<_>>()
            };
            let before = bytes();
            match opened(true, &region) {
                Ok(_) => assert!(enough, "{free} free entries, busy: {busy}"),
                Err(error) => {
                    assert!(!enough, "{free} free entries, busy: {busy}");
                    assert_eq!(error, RingError::InflightIndex);
                    assert_eq!(bytes(), before, "a region that is refused is left as it is");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "behind its part")]
fn field_behind_its_part_is_never_reached() {
    let mut memory = [0_u64; 2];
    Part::new(memory.as_mut_ptr().cast(), 8).store_u64(8, 1, Ordering::SeqCst);
}
