//! Frames that are written to a TAP together.
//!
//! A write of each frame enters the kernel for each. An io_uring takes as many as a turn has by one system call, which is worth a
//! fifth to a half for frames of up to 1500 bytes; of a single one it costs more than `writev`. A short frame is copied behind its header
//! first: the kernel takes longer to read a list of two pieces. It has done with each frame when the call returns, as with a
//! write: nothing of a guest's stays in flight.

use std::ops::Range;
use std::os::fd::AsRawFd as _;

use io_uring::{IoUring, opcode, types};
use rtvirtio_frames::header::{BYTES, Header};
use rtvirtio_virtq::Segment;

use super::Tap;
use crate::stats::Dropped;

/// Frames that are collected for one system call.
pub(crate) struct Batch {
    /// `None`: the host has no memory or descriptors for one, and each frame has a call of its own.
    ring: Option<IoUring>,
    frames: Vec<Frame>,
    /// Of the frames, each with its header first.
    parts: Vec<Segment>,
    /// Of each its header, and the frame behind it if it is short.
    starts: Box<[[u8; BYTES + Self::SHORT]; Self::FRAMES]>,
}

/// A frame of a batch.
pub(crate) struct Frame {
    /// Of the chain that it came in.
    pub(crate) id: u16,
    /// Without the header.
    pub(crate) bytes: usize,
    /// Whether it has been sent, or why not.
    pub(crate) outcome: Result<(), Dropped>,
    /// Where its parts are; none: there is nothing to be sent.
    parts: Range<usize>,
}

impl Batch {
    /// The most frames: more than a turn has time for.
    const FRAMES: usize = 32;
    /// Bytes of the longest frame that is copied.
    const SHORT: usize = 256;

    /// Of frames that have up to `max_parts` parts each.
    pub(crate) fn new(max_parts: usize) -> Self {
        Self {
            ring: IoUring::new(Self::FRAMES as u32).ok(),
            frames: Vec::with_capacity(Self::FRAMES),
            parts: Vec::with_capacity(max_parts + 1),
            starts: Box::new([[0; BYTES + Self::SHORT]; Self::FRAMES]),
        }
    }

    /// Whether another frame of so many parts may be added.
    pub(crate) fn has_room(&self, parts: usize) -> bool {
        self.frames.len() < Self::FRAMES && self.parts.len() + 1 + parts <= self.parts.capacity()
    }

    /// Adds a frame of so many bytes, for which there is room.
    ///
    /// # Safety
    /// Its parts are mapped.
    pub(crate) unsafe fn add(&mut self, id: u16, header: &Header, parts: &[Segment], bytes: usize) {
        let start = &mut self.starts[self.frames.len()];
        start[..BYTES].copy_from_slice(&header.0);
        let first = self.parts.len();
        if bytes <= Self::SHORT {
            let mut to = BYTES;
            for part in parts {
                let length = part.len().min(start.len() - to);
                // SAFETY: the caller's promise; whatever the guest writes to it meanwhile are bytes of its frame.
                unsafe { std::ptr::copy(part.base(), start[to..].as_mut_ptr(), length) };
                to += length;
            }
            self.parts.push(Segment::new(start.as_mut_ptr(), to));
        } else {
            self.parts.push(Segment::new(start.as_mut_ptr(), BYTES));
            self.parts.extend_from_slice(parts);
        }
        let parts = first..self.parts.len();
        self.frames.push(Frame { id, bytes, outcome: Ok(()), parts });
    }

    /// Adds one that is not sent, so that it goes back in its place.
    pub(crate) fn add_malformed(&mut self, id: u16) {
        self.frames.push(Frame { id, bytes: 0, outcome: Err(Dropped::Malformed), parts: 0..0 });
    }

    /// Writes them, in order. What has become of each stays until [`Self::clear`].
    ///
    /// # Safety
    /// The frames' parts are mapped.
    pub(crate) unsafe fn write(&mut self, tap: &Tap) -> &[Frame] {
        let parts = &self.parts;
        let outcome = |is_sent: bool| if is_sent { Ok(()) } else { Err(Dropped::Link) };
        let mut left = self.frames.iter().filter(|frame| !frame.parts.is_empty()).count();
        let Some(ring) = self.ring.as_mut().filter(|_| left > 1) else {
            for frame in self.frames.iter_mut().filter(|frame| !frame.parts.is_empty()) {
                // SAFETY: the caller's promise; the header is the batch's own.
                frame.outcome = outcome(unsafe { tap.send(&parts[frame.parts.clone()]) }.is_ok());
            }
            return &self.frames;
        };
        let mut submission = ring.submission();
        for (index, frame) in self.frames.iter().enumerate() {
            let parts = &parts[frame.parts.clone()];
            if parts.is_empty() {
                continue;
            }
            let fd = types::Fd(tap.0.as_raw_fd());
            // A TAP has no position.
            let write = match parts {
                [whole] => opcode::Write::new(fd, whole.base(), whole.len() as u32)
                    .offset(u64::MAX)
                    .build(),
                _ => opcode::Writev::new(fd, parts.as_ptr().cast(), parts.len() as u32)
                    .offset(u64::MAX)
                    .build(),
            };
            let write = write.user_data(index as u64);
            // SAFETY: the caller vouches for what the parts point to. They stay as they are until all writes have ended, below.
            let pushed = unsafe { submission.push(&write) };
            debug_assert!(pushed.is_ok(), "there is room for a batch");
        }
        drop(submission);
        while left > 0 {
            // After a signal, or if the kernel has no memory for a request just now, the rest is tried again.
            let _ = ring.submit_and_wait(left);
            for ended in ring.completion() {
                self.frames[ended.user_data() as usize].outcome = outcome(ended.result() >= 0);
                left -= 1;
            }
        }
        &self.frames
    }

    pub(crate) fn clear(&mut self) {
        self.frames.clear();
        self.parts.clear();
    }
}
