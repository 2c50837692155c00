//! An in-flight region that an earlier server left, or that a front end has changed since: a ring is
//! set up from it or refused, ends each request once, and writes nothing outside its own queue's part.

#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rtvirtio_virtq::ring::{Chain, Inflight, Ring};

/// Of the guest: the ring, and a page for its buffers.
const MEMORY: u64 = 1 << 18;
const BUFFERS: u64 = GUEST + MEMORY - 4096;
/// Queues of the region. The one in the middle is used.
const QUEUES: u16 = 3;

#[derive(Debug, Arbitrary)]
struct Input {
    packed: bool,
    /// Entries of the region: not only powers of two, and more than the ring has.
    entries: u8,
    size: u8,
    steps: Vec<Step>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// The driver makes requests of so many descriptors.
    Add(u8),
    /// The device takes one.
    Next,
    /// It ends one of those it has.
    Finish(u8),
    Publish,
    /// Another server: the ring is set up again.
    Restart,
    /// A header's field: of 2 bytes, at multiples of that.
    Header(u8, u16),
    /// A field of an entry.
    Entry(u8, u8, u16),
    /// A byte anywhere in the part.
    Byte(u16, u8),
}

fuzz_target!(|input: Input| {
    let packed = input.packed;
    let size = match packed {
        true => u16::from(input.size % 127) + 2,
        false => 2 << (input.size % 7),
    };
    let entries = size.max(u16::from(input.entries));
    let (fd, length) = Inflight::create(QUEUES, entries, packed).unwrap();
    let file = File::from(fd);
    let region = Inflight::map(file.try_clone().unwrap().into(), 0, length, QUEUES, entries, packed);
    let region = region.unwrap();
    // The parts are of one size, and the note follows them.
    let part = (length - 64) / u64::from(QUEUES);
    let (header, entry) = if packed { (32, 32) } else { (16, 16) };
    // What is not the used queue's is never written.
    let others = || {
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes.drain(part as usize..2 * part as usize);
        bytes
    };
    let before = others();
    let guest = Guest::new(MEMORY);
    let options = Options { size, packed, event_idx: true, indirect: true, in_order: false };
    let mut driver = Driver::new(Arc::clone(&guest), GUEST, options);
    let open = |driver: &Driver, base| {
        let config = rtvirtio_virtq::ring::RingConfig { base, ..driver.config() };
        Ring::new(config, guest.memory(), region.queue(1))
    };
    let Ok(mut ring) = open(&driver, driver.config().base) else { return };
    let mut chain = Chain::default();
    let mut begun: Vec<u16> = Vec::new();
    let poke = |at: u64, bytes: &[u8]| {
        let at = at.min(part - bytes.len() as u64);
        file.write_all_at(bytes, part + at).unwrap();
    };
    for step in &input.steps {
        match *step {
            Step::Add(descriptors) => {
                let count = 1 + usize::from(descriptors) % 8;
                let buffer = Buffer { address: BUFFERS, length: 16, writable: true };
                let _ = driver.add(&vec![buffer; count], descriptors >= 128);
                driver.publish();
            }
            Step::Next => {
                if let Ok(true) = ring.next(&mut chain) {
                    assert!(chain.id < size && !begun.contains(&chain.id), "{}", chain.id);
                    begun.push(chain.id);
                }
            }
            Step::Finish(index) if !begun.is_empty() => {
                ring.finish(begun.swap_remove(usize::from(index) % begun.len()), 1);
            }
            Step::Finish(_) => {}
            Step::Publish => {
                let _ = ring.publish();
            }
            Step::Restart => {
                let Ok(again) = open(&driver, ring.base()) else { return };
                ring = again;
                begun.clear();
            }
            Step::Header(field, value) => {
                poke(u64::from(field % (header / 2)) * 2, &value.to_le_bytes());
            }
            Step::Entry(index, field, value) => {
                let at = u64::from(u16::from(index) % entries) * u64::from(entry);
                let field = u64::from(field % (entry / 2)) * 2;
                poke(u64::from(header) + at + field, &value.to_le_bytes());
            }
            Step::Byte(at, value) => poke(u64::from(at) % part, &[value]),
        }
        assert_eq!(usize::from(ring.in_flight()), begun.len());
        assert!(others() == before, "{step:?} wrote outside its queue's part");
    }
});
