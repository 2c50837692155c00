//! A virtio-blk request: from a descriptor chain to what an engine is to do (virtio 1.2, section
//! 5.2.6). Framing is the driver's: header, data and status may be cut into descriptors anywhere.

use rtvirtio_engine::{Geometry, Operation, Segment};
use rustix::io::Errno;

use rtvirtio_virtq::ring::Chain;

/// Bytes of a sector, always.
pub(crate) const SECTOR: u64 = 512;
/// Bytes that GET_ID returns.
pub(crate) const ID_BYTES: usize = 20;

const HEADER: usize = 16;
const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;
const UNMAP: u32 = 1;

/// The status byte (virtio 1.2, section 5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// VIRTIO_BLK_S_OK.
    Ok = 0,
    /// VIRTIO_BLK_S_IOERR.
    IoError = 1,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported = 2,
}

impl From<Result<(), Errno>> for Status {
    fn from(result: Result<(), Errno>) -> Self {
        match result {
            Ok(()) => Self::Ok,
            Err(Errno::OPNOTSUPP) => Self::Unsupported,
            Err(_) => Self::IoError,
        }
    }
}

/// What a chain asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Something for the engine.
    Start {
        /// What.
        operation: Operation,
        /// First byte; the range lies within the disk.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Nothing: it is answered at once.
    Answer(Status),
}

/// A parsed request. `data` is what the engine reads or writes.
#[derive(Debug)]
pub(crate) struct Parsed {
    /// What to do.
    pub(crate) action: Action,
    /// Where the status byte goes; none: the answer is no byte.
    pub(crate) status: Option<Segment>,
    /// Bytes that the device writes to the chain: its used length.
    pub(crate) written: u32,
    /// How the driver marks it: the header's field `ioprio`.
    pub(crate) ioprio: u32,
}

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Of the engine, now.
    pub(crate) geometry: Geometry,
    /// Whether writes are refused.
    pub(crate) read_only: bool,
    /// The most sectors of a discard or write-zeroes segment.
    pub(crate) discard_sectors: u32,
    /// Whether a write must be durable when it completes: the write cache is off.
    pub(crate) write_through: bool,
    /// The disk's serial number.
    pub(crate) id: [u8; ID_BYTES],
}

/// Parses a chain and leaves its data segments in `data`. `None`: there is no status byte, so
/// the driver cannot be told anything.
pub(crate) fn parse(chain: &mut Chain, limits: &Limits, data: &mut Vec<Segment>) -> Option<Parsed> {
    data.clear();
    let status = Some(take_last_byte(&mut chain.writable)?);
    let answer = |status_code, written| {
        Some(Parsed { action: Action::Answer(status_code), status, written, ioprio: 0 })
    };
    let mut header = [0; HEADER];
    let taken = take_front(&mut chain.readable, &mut header);
    if taken < HEADER {
        return answer(Status::IoError, 1);
    }
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
    let ioprio = word(4);
    let geometry = &limits.geometry;
    match word(0) {
        T_IN => {
            std::mem::swap(data, &mut chain.writable);
            let length = total(data);
            let written = u32::try_from(length + 1).unwrap_or(u32::MAX);
            match range(sector, length, geometry) {
                Some(_) if length == 0 => answer(Status::Ok, 1),
                Some(offset) => Some(Parsed {
                    action: Action::Start { operation: Operation::Read, offset, length },
                    status,
                    written,
                    ioprio,
                }),
                None => answer(Status::IoError, 1),
            }
        }
        T_OUT => {
            std::mem::swap(data, &mut chain.readable);
            data.retain(|segment| !segment.is_empty());
            let length = total(data);
            match range(sector, length, geometry) {
                Some(_) if length == 0 => answer(Status::Ok, 1),
                Some(offset) if !limits.read_only => Some(Parsed {
                    action: Action::Start {
                        operation: Operation::Write { durable: limits.write_through },
                        offset,
                        length,
                    },
                    status,
                    written: 1,
                    ioprio,
                }),
                _ => answer(Status::IoError, 1),
            }
        }
        T_FLUSH => Some(Parsed {
            action: Action::Start { operation: Operation::Flush, offset: 0, length: 0 },
            status,
            written: 1,
            ioprio,
        }),
        T_GET_ID => {
            let mut id = &limits.id[..];
            for segment in &chain.writable {
                let n = segment.len().min(id.len());
                // SAFETY: the segment lies in guest memory that the ring's memory table maps.
                unsafe { std::ptr::copy_nonoverlapping(id.as_ptr(), segment.base(), n) };
                id = &id[n..];
            }
            let written = (ID_BYTES - id.len()) as u32 + 1;
            std::mem::swap(data, &mut chain.writable);
            answer(Status::Ok, written)
        }
        kind @ (T_DISCARD | T_WRITE_ZEROES) => answer_range(kind, chain, limits).map_or_else(
            |code| answer(code, 1),
            |action| Some(Parsed { action, status, written: 1, ioprio }),
        ),
        _ => answer(Status::Unsupported, 1),
    }
}

/// Discard and write zeroes: exactly one segment (`max_discard_seg` is 1).
fn answer_range(kind: u32, chain: &mut Chain, limits: &Limits) -> Result<Action, Status> {
    let geometry = &limits.geometry;
    let mut raw = [0; 16];
    if total(&chain.readable) != 16 || take_front(&mut chain.readable, &mut raw) != 16 {
        return Err(Status::Unsupported);
    }
    let half = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    let (sector, sectors, flags) =
        (u64::from(half(0)) | u64::from(half(4)) << 32, half(8), half(12));
    // Section 5.2.6.2: reserved bits, and unmap of a discard, are unsupported.
    if flags & !UNMAP != 0 || (kind == T_DISCARD && flags != 0) || !geometry.discard {
        return Err(Status::Unsupported);
    }
    if limits.read_only || sectors > limits.discard_sectors {
        return Err(Status::IoError);
    }
    let length = u64::from(sectors) * SECTOR;
    let offset = range(sector, length, geometry).ok_or(Status::IoError)?;
    let operation = match kind {
        T_DISCARD => Operation::Discard,
        _ => Operation::WriteZeroes { unmap: flags & UNMAP != 0, durable: limits.write_through },
    };
    if length == 0 {
        Ok(Action::Answer(Status::Ok))
    } else {
        Ok(Action::Start { operation, offset, length })
    }
}

/// The first byte of a range that lies within the disk and on its logical blocks.
fn range(sector: u64, length: u64, geometry: &Geometry) -> Option<u64> {
    let offset = sector.checked_mul(SECTOR)?;
    within(offset, length, geometry).then_some(offset)
}

/// Whether a range lies within the disk and on its logical blocks.
pub(crate) fn within(offset: u64, length: u64, geometry: &Geometry) -> bool {
    let block = u64::from(geometry.logical_block).max(SECTOR);
    let ends_within = offset.checked_add(length).is_some_and(|end| end <= geometry.capacity.get());
    ends_within && (offset | length).is_multiple_of(block)
}

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| segment.len() as u64).sum()
}

/// Copies from the front of the segments and drops what it took; the bytes copied.
fn take_front(segments: &mut Vec<Segment>, into: &mut [u8]) -> usize {
    let mut taken = 0;
    let mut whole = 0;
    for segment in segments.iter_mut() {
        let n = segment.len().min(into.len() - taken);
        // SAFETY: the segment lies in guest memory that the ring's memory table maps, and `into`
        // has room for n bytes from `taken`. The guest may write meanwhile: whichever bytes this
        // sees are checked afterwards, and not read again.
        unsafe { std::ptr::copy_nonoverlapping(segment.base(), into[taken..].as_mut_ptr(), n) };
        segment.advance(n);
        taken += n;
        if !segment.is_empty() {
            break;
        }
        whole += 1;
    }
    segments.drain(..whole);
    taken
}

/// Takes the last byte of the segments.
fn take_last_byte(segments: &mut Vec<Segment>) -> Option<Segment> {
    while segments.last().is_some_and(Segment::is_empty) {
        segments.pop();
    }
    let last = segments.pop()?;
    let rest = last.len() - 1;
    if rest > 0 {
        segments.push(Segment::new(last.base(), rest));
    }
    Some(Segment::new(last.base().wrapping_add(rest), 1))
}

#[cfg(test)]
mod tests;
