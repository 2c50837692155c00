//! The emulated SSD fails as it is told to.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rtvirtio_engine::Operation;
use rtvirtio_engine::ssd::{Faults, SsdEngine};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

use crate::driver::{Driver, Memory};
use crate::testing::has_io_uring;

/// None, and the test is skipped, where nothing drives it.
fn disk(faults: Faults) -> Option<Driver> {
    let ssd = "ref-8x80".parse().unwrap();
    let ssd = SsdEngine::start(ssd, Bytes::from_kib(1024), 1, faults).unwrap();
    has_io_uring().then(|| Driver::new(Box::new(ssd)))
}

#[test]
fn every_third_request_fails_with_an_error_and_does_nothing() {
    let faults = Faults { error_every: NonZeroU64::new(3), ..Faults::default() };
    let Some(mut disk) = disk(faults) else { return };
    for _ in 0..3 {
        assert_eq!(disk.write(0, &[1; 4096], &[4096]), Ok(()));
        assert_eq!(disk.read(0, &[4096]), Ok(vec![1; 4096]));
        assert_eq!(disk.write(0, &[2; 4096], &[4096]), Err(Errno::IO));
    }
    assert_eq!(disk.read(0, &[4096]), Ok(vec![1; 4096]));
}

#[test]
fn seed_shifts_which_request_fails() {
    let faults = Faults { error_every: NonZeroU64::new(3), seed: 2, ..Faults::default() };
    let Some(mut disk) = disk(faults) else { return };
    assert_eq!(disk.range(Operation::Flush, 0, 0), Err(Errno::IO));
    assert_eq!(disk.range(Operation::Flush, 0, 0), Ok(()));
}

#[test]
fn every_second_write_finds_no_space_and_reads_go_on() {
    let faults = Faults { no_space_every: NonZeroU64::new(2), ..Faults::default() };
    let Some(mut disk) = disk(faults) else { return };
    assert_eq!(disk.write(0, &[1; 4096], &[4096]), Ok(()));
    assert_eq!(disk.read(0, &[4096]), Ok(vec![1; 4096]));
    assert_eq!(
        disk.range(Operation::WriteZeroes { unmap: true, durable: false }, 0, 4096),
        Err(Errno::NOSPC)
    );
    assert_eq!(disk.read(0, &[4096]), Ok(vec![1; 4096]));
}

#[test]
fn short_request_moves_half_and_fails() {
    let faults = Faults { short_every: NonZeroU64::new(2), ..Faults::default() };
    let Some(mut disk) = disk(faults) else { return };
    assert_eq!(disk.write(0, &[1; 8192], &[8192]), Ok(()));
    assert_eq!(disk.write(0, &[2; 7168], &[1024, 6144]), Err(Errno::IO));
    let read = disk.read(0, &[8192]).unwrap();
    assert_eq!(read[..3584], [2; 3584]);
    assert_eq!(read[3584..], [1; 4608]);
    let mut memory = Memory::new(&[8192], 0);
    memory.fill(&[9; 8192]);
    let segments = memory.segments();
    assert_eq!(disk.run(Operation::Read, 0, 8192, &segments, None), Err(Errno::IO));
    assert_eq!(memory.content()[..3584], [2; 3584]);
    assert_eq!(memory.content()[4096..], [9; 4096]);
}

#[test]
fn stalled_request_ends_later_and_the_others_in_time() {
    let stall = NonZeroU64::new(2).map(|n| (n, Duration::from_secs(2)));
    let Some(mut disk) = disk(Faults { stall, ..Faults::default() }) else { return };
    for is_stalled in [false, true, false, true] {
        let before = Instant::now();
        disk.range(Operation::Flush, 0, 0).unwrap();
        assert_eq!(before.elapsed() >= Duration::from_secs(2), is_stalled);
    }
}

#[test]
fn drop_completes_what_is_in_flight() {
    let stall = NonZeroU64::new(1).map(|n| (n, Duration::from_secs(1000)));
    let Some(mut disk) = disk(Faults { stall, ..Faults::default() }) else { return };
    for token in 0..100 {
        disk.start(token, Operation::Flush, 0, 0, &[], None);
    }
    disk.drop_engine();
    for token in 0..100 {
        assert_eq!(disk.told(token), Ok(()));
    }
}
