//! Going on where an earlier server was when it was killed, of which a packed ring itself says little.

use std::sync::atomic::Ordering;

use crate::Segment;

use super::super::descriptor::{AVAILABLE, Descriptor, Position, USED};
use super::super::positions::{Finished, Left, QueuePosition};
use super::{NEXT, Part, flags, used_word};

/// Whether a device has used any descriptor since the driver set the ring up, cleared. In odd laps
/// a used descriptor is marked as such; in even ones it has no mark at all, but still the address
/// that the driver had written. At the end of an even lap, when the driver has made all of the ring
/// available again, there is no telling: a new ring looks like that, and begins there.
fn is_in_use(descriptors: &Part, size: u16) -> bool {
    (0..size).map(|index| Position::new(index, true)).any(|place| {
        let flags = flags(descriptors, place);
        let address = descriptors.load_u64(place.offset(), Ordering::Relaxed);
        flags & USED != 0 || flags & AVAILABLE == 0 && address != 0
    })
}

/// Whether what is used from one place to another goes on behind the ring's first descriptor in an odd lap.
pub(super) const fn crosses_into_odd_lap(from: Position, to: Position) -> bool {
    !from.wrap() && to.wrap() && to.index() > 0
}

/// Marks the first descriptor as used in an odd lap, before the driver is shown what was used up to behind it. It may have no mark
/// of its own there: it goes on a chain that begins in the lap before, or is shown by another one's ID. The driver passes
/// over it, and without the mark a ring all of which is available again would look like a new one ([`is_in_use`]).
pub(super) fn mark(descriptors: &Part, log: impl Fn(Segment)) {
    let at = Position::new(0, true);
    descriptors.store_u16(at.offset() + 14, at.used_flags(), Ordering::Release);
    log(descriptors.segment(at.offset() + 14, 2));
}

/// Goes on from what an earlier server has left: where, and whether the entry is still right. `None`:
/// the ring has been set up anew since, or is another.
pub(super) fn go_on(
    descriptors: &Part,
    size: u16,
    left: Left,
    kept: &QueuePosition,
    base: u32,
    log: impl Fn(Segment),
) -> Option<(Position, bool)> {
    let Left { position, finished, told } = left;
    if told == kept.told() {
        // A reset leaves the base where rings begin.
        let begins = matches!(base, 0 | 0x8000 | 0x8000_8000);
        if begins && !is_in_use(descriptors, size) {
            return None;
        }
        return Some((resume(descriptors, size, position, &finished, log), true));
    }
    // Without a server QEMU serves a ring itself, from where it was told last: it drops what the guest
    // sends, if it finds any there (virtio_net_drop_tx_queue_data). What lies before that is dropped too.
    let end = finished.iter().fold(position, |at, request| at.after(request.count, size));
    let dropped = available_until(descriptors, size, end, told)?;
    if end != told && flags(descriptors, told) & (AVAILABLE | USED) != told.used_flags() {
        return None;
    }
    resume(descriptors, size, position, &finished, &log);
    resume(descriptors, size, end, &dropped, &log);
    Some((kept.told(), false))
}

/// The requests that the driver has made available from one place to another; `None` if others than
/// such lie between them.
fn available_until(
    descriptors: &Part,
    size: u16,
    from: Position,
    to: Position,
) -> Option<Vec<Finished>> {
    let distance = from.distance(to, size);
    if distance > size {
        return None;
    }
    let (mut requests, mut at, mut total) = (Vec::new(), from, 0);
    // The last one may go beyond it: whoever was told a place does not know that it is within a chain.
    while total < distance {
        if flags(descriptors, at) & (AVAILABLE | USED) != at.available_flags() {
            return None;
        }
        let mut count = 0;
        let id = loop {
            let place = at.after(count, size);
            let word = descriptors.load_u64(place.offset() + 8, Ordering::Acquire);
            (count, total) = (count + 1, total + 1);
            if total > size {
                return None;
            }
            let Descriptor { id, flags, .. } = Descriptor::new(0, word);
            if flags & NEXT == 0 {
                break id;
            }
        };
        requests.push(Finished { written: 0, id, count });
        at = at.after(count, size);
    }
    Some(requests)
}

/// Shows the driver what an earlier server had finished from `first` on, unless it has been shown.
/// Where the next request is used.
fn resume(
    descriptors: &Part,
    size: u16,
    first: Position,
    finished: &[Finished],
    log: impl Fn(Segment),
) -> Position {
    let mut at = first;
    let mut words = Vec::with_capacity(finished.len());
    for &Finished { written, id, count } in finished {
        words.push((at, used_word(at, id, written)));
        at = at.after(count, size);
    }
    if flags(descriptors, first) & (AVAILABLE | USED) == first.available_flags() {
        if crosses_into_odd_lap(first, at) {
            mark(descriptors, &log);
        }
        // The first one last, as when a batch is published.
        for (position, word) in words.into_iter().rev() {
            let offset = position.offset() + 8;
            descriptors.store_u64(offset, word, Ordering::Release);
            log(descriptors.segment(offset, 8));
        }
    }
    at
}
