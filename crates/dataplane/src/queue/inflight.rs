//! A request from its start to its end: how much of it is done, and how much is started at once.

use rtvirtio_engine::{Operation, SCRATCH_BYTES, Segment};
use rtvirtio_qos::Running;

use crate::drr::{QUANTUM_NS, cost};
use rtvirtio_virtq::memory::Memory;

/// A request in flight. Free if `operation` is `None`.
#[derive(Default)]
pub(super) struct InflightRequest {
    pub(super) operation: Option<Operation>,
    /// First byte of what is still to do.
    pub(super) offset: u64,
    /// Bytes still to do.
    pub(super) length: u64,
    pub(super) segments: Vec<Segment>,
    /// Segments that are done.
    pub(super) done: usize,
    /// Bytes that are started at once, and the segment that they end before.
    pub(super) part: u64,
    pub(super) part_end: usize,
    /// Its place on the device, by the schedule.
    pub(super) running: Option<Running>,
    pub(super) status: Option<Segment>,
    /// For the engine.
    pub(super) scratch: [u64; SCRATCH_BYTES / 8],
    pub(super) written: u32,
    /// How the driver marks it.
    pub(super) ioprio: u32,
    /// Bytes in all.
    pub(super) bytes: u64,
    /// When the round that found it began, and when its turn or batch did or room was found for it,
    /// ns of [`now`](crate::clock::now).
    pub(super) popped: u64,
    pub(super) started: u64,
}

impl InflightRequest {
    /// Bytes that are done.
    pub(super) const fn done_bytes(&self) -> u64 {
        self.bytes - self.length
    }

    /// What its part takes of a turn, ns, beside the request itself. A range that is discarded or zeroed seldom costs its bytes: it ends
    /// the turn at most.
    pub(super) fn cost(&self) -> i64 {
        match self.operation {
            Some(Operation::Read | Operation::Write { .. }) => cost::transfer_ns(self.part),
            _ => cost::transfer_ns(self.part).min(QUANTUM_NS),
        }
    }

    /// Starts no more than `most` bytes at once.
    pub(super) fn divide(&mut self, most: u64) {
        if self.length <= most {
            (self.part, self.part_end) = (self.length, self.segments.len());
            return;
        }
        (self.part, self.part_end) = (0, self.done);
        while let Some(segment) = self.segments.get_mut(self.part_end) {
            let room = most - self.part;
            if room == 0 {
                break;
            }
            if segment.len() as u64 > room {
                let mut rest = *segment;
                rest.advance(room as usize);
                *segment = Segment::new(segment.base(), room as usize);
                self.segments.insert(self.part_end + 1, rest);
            }
            self.part += self.segments[self.part_end].len() as u64;
            self.part_end += 1;
        }
        if self.segments.is_empty() {
            self.part = most;
        }
    }

    /// `bytes` of the transfer are done, fewer than were asked for; `memory` was written to.
    pub(super) fn advance(&mut self, mut bytes: u64, memory: Option<&Memory>) {
        self.offset += bytes;
        self.length -= bytes;
        self.part -= bytes;
        while let Some(segment) = self.segments.get_mut(self.done) {
            let n = bytes.min(segment.len() as u64);
            if let Some(memory) = memory {
                memory.log_write(Segment::new(segment.base(), n as usize));
            }
            segment.advance(n as usize);
            bytes -= n;
            if !segment.is_empty() {
                break;
            }
            self.done += 1;
        }
    }
}
