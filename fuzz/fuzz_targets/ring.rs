//! Any content of a ring and of an in-flight region, changed while it is in use: no panic, no
//! endless loop, no byte written outside what the ring may write, and no segment outside the
//! guest's memory.

#![no_main]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use rtvirtio_virtq::memory::{Memory, Region, RegionSpec};
use rtvirtio_virtq::ring::driver::{FRONT_END, GUEST, Guest};
use rtvirtio_virtq::ring::{Chain, Inflight, Ring, RingConfig};

/// Data and indirect tables, then descriptors, driver area and device area, a page each.
const DESCRIPTORS: u64 = 4096;
const DRIVER: u64 = 2 * 4096;
const DEVICE: u64 = 3 * 4096;
const SIZE: u64 = 4 * 4096;
/// A descriptor table fills no more than its page.
const ENTRIES: u16 = 256;

#[derive(Debug, Arbitrary)]
struct Input {
    size: u8,
    packed: bool,
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    inflight: bool,
    base: u32,
    content: Vec<Content>,
    region: Vec<(u16, u8)>,
    steps: Vec<Step>,
}

/// Something that a driver writes.
#[derive(Debug, Arbitrary)]
enum Content {
    /// A descriptor or an entry of an indirect table, in the memory more often than not.
    Descriptor { slot: u8, table: bool, address: u16, length: u16, flags: u8, last: u16 },
    /// A descriptor of any kind.
    Wild { slot: u8, address: u64, word: u64 },
    /// An entry of the available ring or of the used ring, an index, flags or event.
    Field { offset: u16, value: u16, device: bool },
    /// What a driver does: an entry and the index behind it.
    Available { index: u16, head: u8 },
}

#[derive(Debug, Arbitrary)]
enum Step {
    Write(Content),
    Next,
    Finish(u8, u32),
    Publish,
    Enable,
    Disable,
    Pending,
    SetMemory,
    Restart,
    /// As a network device gives a buffer back that no frame has filled.
    Untake,
}

fn write(guest: &Guest, packed: bool, content: &Content) {
    match *content {
        Content::Descriptor { slot, table, address, length, flags, last } => {
            let at = GUEST + 16 * u64::from(slot) + if table { 0 } else { DESCRIPTORS };
            let (address, flags) = (GUEST + u64::from(address), u64::from(flags));
            let word = if packed {
                // The two topmost of the flags are those of availability.
                let flags = flags & 7 | (flags & 8) << 4 | (flags & 16) << 11;
                u64::from(length) | u64::from(last) << 32 | flags << 48
            } else {
                u64::from(length) | (flags & 7) << 32 | u64::from(last) << 48
            };
            guest.u64(at).store(address, Ordering::Relaxed);
            guest.u64(at + 8).store(word, Ordering::Relaxed);
        }
        Content::Wild { slot, address, word } => {
            let at = GUEST + DESCRIPTORS + 16 * u64::from(slot);
            guest.u64(at).store(address, Ordering::Relaxed);
            guest.u64(at + 8).store(word, Ordering::Relaxed);
        }
        Content::Field { offset, value, device } => {
            let area = if device { DEVICE } else { DRIVER };
            let at = GUEST + area + u64::from(offset % 2048) * 2;
            guest.u16(at).store(value, Ordering::Relaxed);
        }
        Content::Available { index, head } => {
            let at = GUEST + DRIVER + 4 + 2 * u64::from(index % ENTRIES);
            guest.u16(at).store(u16::from(head), Ordering::Relaxed);
            guest.u16(GUEST + DRIVER + 2).store(index.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

/// What the ring may not write: the data, the driver's area, a split ring's descriptors, and what
/// is behind a packed ring's device area.
fn foreign(guest: &Guest, packed: bool) -> Vec<u8> {
    let mut bytes = guest.read(GUEST, 4096);
    bytes.extend(guest.read(GUEST + DRIVER, 4096));
    if packed {
        bytes.extend(guest.read(GUEST + DEVICE + 4, 4092));
    } else {
        bytes.extend(guest.read(GUEST + DESCRIPTORS, 4096));
    }
    bytes
}

fuzz_target!(|input: Input| {
    let guest = Guest::new(SIZE);
    let packed = input.packed;
    let mut size = u16::from(input.size) + 1;
    if !packed && input.base & 1 << 31 == 0 {
        size = size.next_power_of_two();
    }
    // Beyond the ring's region another one, so that buffers can cross.
    let other = Guest::new(4096);
    let spec = RegionSpec { guest: GUEST + SIZE, size: 4096, front_end: 0, offset: 0 };
    let fd = other.file().try_clone_to_owned().unwrap();
    let beyond = Arc::new(Region::map(spec, fd).unwrap());
    let memory = Arc::new(guest.memory().with(beyond).unwrap());
    let config = RingConfig {
        size,
        packed,
        event_idx: input.event_idx,
        indirect: input.indirect,
        in_order: input.in_order,
        descriptors: FRONT_END + DESCRIPTORS,
        driver: FRONT_END + DRIVER,
        device: FRONT_END + DEVICE,
        base: input.base,
        log: None,
    };
    for content in &input.content {
        write(&guest, packed, content);
    }
    let region = input.inflight.then(|| {
        let (fd, length) = Inflight::create(1, ENTRIES, packed).unwrap();
        let file: std::fs::File = fd.into();
        for (offset, value) in &input.region {
            use std::os::unix::fs::FileExt;
            let offset = u64::from(*offset) % length;
            file.write_all_at(&[*value], offset).unwrap();
        }
        Inflight::map(file.into(), 0, length, 1, ENTRIES, packed).unwrap()
    });
    let open = || {
        let queue = region.as_ref().and_then(|region| region.queue(0));
        Ring::new(config, Arc::clone(&memory), queue)
    };
    let Ok(mut ring) = open() else { return };
    let mut chain = Chain::default();
    let mut begun: Vec<u16> = Vec::new();
    // In the order in which they were taken; none: it has finished.
    let mut taken: Vec<Option<u16>> = Vec::new();
    let mut before = foreign(&guest, packed);
    for step in &input.steps {
        match step {
            Step::Write(content) => {
                write(&guest, packed, content);
                before = foreign(&guest, packed);
            }
            Step::Next => {
                if let Ok(true) = ring.next(&mut chain) {
                    assert!(chain.id < size && !begun.contains(&chain.id));
                    begun.push(chain.id);
                    taken.push(Some(chain.id));
                    check(&memory, &chain);
                }
            }
            Step::Finish(index, written) if !begun.is_empty() => {
                let id = begun.swap_remove(usize::from(*index) % begun.len());
                taken.iter_mut().filter(|of| **of == Some(id)).for_each(|of| *of = None);
                ring.finish(id, *written);
            }
            Step::Finish(..) => {}
            Step::Publish => {
                let _ = ring.publish();
            }
            Step::Enable => {
                let _ = ring.enable_notification();
            }
            Step::Disable => ring.disable_notification(),
            Step::Pending => assert!(!ring.is_pending() || ring.error().is_none()),
            Step::SetMemory => {
                let _ = ring.set_memory(Arc::clone(&memory));
            }
            Step::Restart => {
                let Ok(again) = open() else { return };
                ring = again;
                begun.clear();
                taken.clear();
            }
            Step::Untake => {
                // The last one alone, which is in flight yet; with a region none.
                if let (Some(Some(id)), false) = (taken.last().copied(), input.inflight) {
                    ring.untake(id);
                    taken.pop();
                    begun.retain(|other| *other != id);
                }
            }
        }
        assert_eq!(usize::from(ring.in_flight()), begun.len());
        assert_eq!(foreign(&guest, packed), before, "{step:?} wrote where it may not");
        assert!(other.read(GUEST, 4096).iter().all(|byte| *byte == 0));
    }
});

/// The segments are in the guest's memory, and no longer than is said.
fn check(memory: &Memory, chain: &Chain) {
    let mut bytes = 0;
    for segment in chain.readable.iter().chain(&chain.writable) {
        let start = segment.base() as usize;
        let inside = |region: &Arc<Region>| {
            let all = region.segment();
            let base = all.base() as usize;
            (base..=base + all.len()).contains(&start) && start + segment.len() <= base + all.len()
        };
        assert!(!segment.is_empty() && memory.regions().any(inside), "{segment:?}");
        bytes += segment.len();
    }
    assert!((1..=u32::MAX as usize).contains(&bytes));
}
