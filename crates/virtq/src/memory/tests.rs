//! Tests of the memory table.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

fn file(size: u64) -> OwnedFd {
    let file = memfd_create(c"memory", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size).unwrap();
    file
}

fn region(guest: u64, size: u64) -> Arc<Region> {
    let spec = RegionSpec { guest, size, front_end: guest + 0x1_0000_0000, offset: 0 };
    Arc::new(Region::map(spec, file(size)).unwrap())
}

fn spec(size: u64, offset: u64) -> RegionSpec {
    RegionSpec { guest: 0, size, front_end: 0, offset }
}

fn byte(segment: Segment) -> &'static AtomicU8 {
    // SAFETY: mapped for as long as the tests use it.
    unsafe { AtomicU8::from_ptr(segment.base()) }
}

/// A log whose content a test can look at.
pub(crate) struct Log {
    pub(crate) log: Arc<DirtyLog>,
    view: Mapping,
}

pub(crate) fn log(size: u64) -> Log {
    let file = file(size);
    let view = Mapping::new(file.as_fd(), 0, size).unwrap();
    Log { log: Arc::new(DirtyLog::map(file, 0, size).unwrap()), view }
}

impl Log {
    /// The pages that are dirty.
    pub(crate) fn pages(&self) -> Vec<u64> {
        let bit = |page: &u64| {
            let part = Segment::new(self.view.base().wrapping_add((page / 8) as usize), 1);
            byte(part).load(Ordering::SeqCst) & 1 << (page % 8) != 0
        };
        (0..self.view.len() as u64 * 8).filter(bit).collect()
    }
}

#[test]
fn guest_within_a_region_is_whole() {
    let memory = Memory::new(vec![region(0x8000, 0x2000), region(0x1000, 0x3000)]).unwrap();
    let part = memory.guest(0x8010, 0x1ff0).unwrap();
    assert_eq!(part.len(), 0x1ff0);
    assert_eq!(memory.guest(0x3fff, 1).unwrap().len(), 1);
}

#[test]
fn guest_across_regions_is_its_first_part() {
    let memory = Memory::new(vec![region(0x1000, 0x1000), region(0x2000, 0x1000)]).unwrap();
    assert_eq!(memory.guest(0x1ff0, 0x20).unwrap().len(), 0x10);
    assert_eq!(memory.guest(0x2000, 0x10).unwrap().len(), 0x10);
}

#[test]
fn guest_outside_is_none() {
    let memory = Memory::new(vec![region(0x1000, 0x1000)]).unwrap();
    for address in [0, 0xfff, 0x2000, u64::MAX] {
        assert!(memory.guest(address, 1).is_none(), "{address:#x}");
    }
    assert!(Memory::default().guest(0, 1).is_none());
}

#[test]
fn front_end_must_be_whole() {
    let memory = Memory::new(vec![region(0x1000, 0x1000)]).unwrap();
    assert_eq!(memory.front_end(0x1_0000_1ff0, 0x10).unwrap().len(), 0x10);
    assert!(memory.front_end(0x1_0000_1ff0, 0x11).is_none());
    assert!(memory.front_end(0x1000, 1).is_none());
    assert!(memory.front_end(u64::MAX, u64::MAX).is_none());
}

#[test]
fn regions_that_overlap_are_refused() {
    let overlap = Memory::new(vec![region(0x2000, 0x1000), region(0x1000, 0x2000)]);
    assert_eq!(overlap.unwrap_err(), MemoryError::Overlap);
}

#[test]
fn with_and_without_share_the_other_regions() {
    let (first, second) = (region(0x1000, 0x1000), region(0x2000, 0x1000));
    let one = Memory::new(vec![Arc::clone(&first)]).unwrap();
    let two = one.with(Arc::clone(&second)).unwrap();
    assert_eq!(two.regions().len(), 2);
    assert_eq!(two.with(region(0x2fff, 1)).unwrap_err(), MemoryError::Overlap);
    let back = two.without(second.spec()).unwrap();
    assert_eq!(back.guest(0x1000, 1).unwrap().base(), first.segment().base());
    assert!(back.guest(0x2000, 1).is_none());
    assert_eq!(back.without(second.spec()).unwrap_err(), MemoryError::NoSuchRegion);
}

#[test]
fn region_bad_place_is_refused() {
    let refused = |spec, file| Region::map(spec, file).unwrap_err();
    assert_eq!(refused(spec(0, 0), file(4096)), MemoryError::Empty);
    let beyond = RegionSpec { guest: u64::MAX - 4094, ..spec(4096, 0) };
    assert_eq!(refused(beyond, file(4096)), MemoryError::Overflow);
    assert_eq!(refused(spec(4096, u64::MAX), file(4096)), MemoryError::Overflow);
    let short = MemoryError::TooShort { file: 4096, end: 4097 };
    assert_eq!(refused(spec(4096, 1), file(4096)), short);
    // The last page of all addresses is one.
    let last = RegionSpec { guest: u64::MAX - 4095, ..spec(4096, 0) };
    let memory = Memory::new(vec![Arc::new(Region::map(last, file(4096)).unwrap())]).unwrap();
    assert_eq!(memory.guest(u64::MAX, 1).unwrap().len(), 1);
}

#[test]
fn region_of_no_regular_file_is_refused() {
    let device: OwnedFd = std::fs::File::open("/dev/zero").unwrap().into();
    assert_eq!(Region::map(spec(4096, 0), device).unwrap_err(), MemoryError::NotAFile);
    let (end, _other) = std::io::pipe().unwrap();
    assert_eq!(Region::map(spec(4096, 0), end.into()).unwrap_err(), MemoryError::NotAFile);
}

#[test]
fn region_offset_within_a_page_is_mapped_there() {
    let file = file(8192);
    let whole = Mapping::new(file.as_fd(), 0, 8192).unwrap();
    let part = Region::map(spec(5000, 100), file).unwrap();
    byte(part.segment()).store(7, Ordering::SeqCst);
    let there = Segment::new(whole.base().wrapping_add(100), 1);
    assert_eq!(byte(there).load(Ordering::SeqCst), 7);
}

#[test]
fn file_cut_short_under_us_breaks_its_region_only() {
    let shrinking = file(8192);
    let spec = RegionSpec { guest: 0, size: 8192, front_end: 0, offset: 0 };
    let broken = Region::map(spec, shrinking.try_clone().unwrap()).unwrap();
    let other = region(0x1_0000, 4096);
    let memory = Memory::new(vec![Arc::new(broken), other]).unwrap();
    byte(memory.guest(0, 1).unwrap()).store(1, Ordering::SeqCst);
    byte(memory.guest(0x1_0000, 1).unwrap()).store(2, Ordering::SeqCst);
    assert!(!memory.is_broken());
    let before = sigbus::broken_count();

    ftruncate(&shrinking, 4096).unwrap();
    let gone = memory.guest(5000, 1).unwrap();
    assert_eq!(byte(gone).load(Ordering::SeqCst), 0);
    byte(gone).store(9, Ordering::SeqCst);
    assert!(memory.is_broken());
    assert!(sigbus::broken_count() > before);
    assert_eq!(byte(memory.guest(0x1_0000, 1).unwrap()).load(Ordering::SeqCst), 2);
    let still: Vec<bool> = memory.regions().map(|region| region.is_broken()).collect();
    assert_eq!(still, [true, false]);
}

#[test]
fn log_ranges_mark_every_page_they_touch() {
    let log = log(4096);
    log.log.mark(4095, 2);
    log.log.mark(6 * 4096, 4 * 4096);
    log.log.mark(20 * 4096, 0);
    assert_eq!(log.pages(), [0, 1, 6, 7, 8, 9]);
    // Beyond the log, and across the end of all addresses.
    log.log.mark(u64::MAX, u64::MAX);
    log.log.mark(32767 * 4096, u64::MAX);
    assert_eq!(log.pages(), [0, 1, 6, 7, 8, 9, 32767]);
}

#[test]
fn log_write_marks_the_guest_address_of_a_segment() {
    let log = log(4096);
    let memory = Memory::new(vec![region(0x4000, 0x1000), region(0x8000, 0x2000)]).unwrap();
    memory.log_write(memory.guest(0x8fff, 2).unwrap());
    let logged = memory.with_log(Some(Arc::clone(&log.log)));
    assert_eq!(log.pages(), Vec::<u64>::new());
    logged.log_write(logged.guest(0x8fff, 2).unwrap());
    assert_eq!(log.pages(), [8, 9]);
}

#[test]
fn file_that_is_not_in_memory_is_refused() {
    // Files of tests are on a disk, unless /tmp is a tmpfs.
    let file = tempfile::tempfile().unwrap();
    file.set_len(0x1000).unwrap();
    let kind = rustix::fs::fstatfs(&file).unwrap().f_type;
    if kind == 0x0102_1994 {
        use std::io::Write as _;
        // Past the test harness, which would hide it; its thread is named after the test.
        let (thread, place) = (std::thread::current(), std::env::temp_dir());
        let (name, place) = (thread.name().unwrap_or_default(), place.display());
        let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {place} is in memory");
        return;
    }
    let refused = Region::map(spec(0x1000, 0), file.into()).unwrap_err();
    assert_eq!(refused, MemoryError::NotInMemory);
}

#[test]
fn pages_that_a_region_has_are_its_populated_parts() {
    const MIB: u64 = 1 << 20;
    let file = file(64 * MIB);
    for at in [8 * MIB, 20 * MIB] {
        rustix::io::pwrite(&file, &vec![1; 2 * MIB as usize], at).unwrap();
    }
    // Behind a part that is not shared.
    let region = Region::map(RegionSpec { offset: MIB, ..spec(63 * MIB, MIB) }, file).unwrap();
    let base = region.segment().base() as usize;
    let parts: Vec<_> = region
        .populated()
        .map(|part| ((part.base() as usize - base) as u64 / MIB, part.len() as u64 / MIB))
        .collect();
    assert_eq!(parts, [(7, 2), (19, 2)]);
}
