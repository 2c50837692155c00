//! What a guest may write into its ring to break it.

use std::sync::atomic::Ordering::SeqCst;

use rtvirtio_virtq::ring::driver::GUEST;

use super::front_end::{DATA, FrontEnd, HEADER, STATUS};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;
/// Of an indirect descriptor.
const INDIRECT: u64 = GUEST + 0x8_f000;

/// A class of content, and what writes and offers it.
pub(crate) type Content = (&'static str, fn(&FrontEnd));

/// Every class: the head comes back, or the queue is broken.
pub(crate) const CONTENTS: [Content; 12] = [
    ("cycle", |f| chain(f, &[(0, HEADER, 16, NEXT, 1), (1, DATA, 512, NEXT | WRITE, 0)])),
    ("next beyond the table", |f| chain(f, &[(0, HEADER, 16, NEXT, FrontEnd::SIZE)])),
    ("head beyond the table", |f| f.offer(FrontEnd::SIZE, 1)),
    ("head 65535", |f| f.offer(u16::MAX, 1)),
    ("nested indirect", |f| {
        f.driver.guest().u64(INDIRECT).store(INDIRECT, SeqCst);
        f.driver.guest().u64(INDIRECT + 8).store(16 | u64::from(TABLE) << 32, SeqCst);
        chain(f, &[(0, INDIRECT, 16, TABLE, 0)]);
    }),
    ("length 4294967295", |f| with_data(f, DATA, u32::MAX)),
    ("address wraps", |f| with_data(f, u64::MAX - 511, 4096)),
    ("avail jumps", |f| f.offer(0, FrontEnd::SIZE + 1)),
    ("zero length", |f| with_data(f, DATA, 0)),
    ("readable status", |f| chain(f, &[(0, HEADER, 16, NEXT, 1), (1, STATUS, 1, 0, 0)])),
    ("no status", |f| chain(f, &[(0, HEADER, 16, 0, 0)])),
    ("readable behind writable", |f| {
        chain(f, &[(0, HEADER, 16, NEXT | WRITE, 1), (1, STATUS, 1, 0, 0)]);
    }),
];

/// Writes descriptors of (index, address, length, flags, next), and offers descriptor 0.
fn chain(front: &FrontEnd, descriptors: &[(u16, u64, u32, u16, u16)]) {
    for &(index, address, length, flags, next) in descriptors {
        front.driver.set_descriptor(index, address, length, flags, next);
    }
    front.offer(0, 1);
}

/// A read whose data goes there.
fn with_data(front: &FrontEnd, address: u64, length: u32) {
    let header = (0, HEADER, 16, NEXT, 1);
    chain(front, &[header, (1, address, length, NEXT | WRITE, 2), (2, STATUS, 1, WRITE, 0)]);
}
