//! Synchronous reads and writes of segments. The C library's calls, not `rustix`'s: those take
//! slices, and a guest's memory is never a Rust reference.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

use super::image::last_error;
use super::{MAX_SEGMENTS, write_flags};
use crate::Segment;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write { durable: bool },
}

/// Reads or writes all segments. A file that ends before they do is an error.
pub(super) fn transfer(
    fd: &OwnedFd,
    direction: Direction,
    offset: u64,
    segments: &[Segment],
) -> Result<(), Errno> {
    let mut cursor = Cursor::new(segments);
    let mut at = offset;
    while !cursor.is_at_end() {
        match cursor.step(fd, direction, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(bytes) => {
                cursor.advance(bytes);
                at += bytes as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A place in segments.
pub(super) struct Cursor<'a> {
    /// What is left, of the first of them without [`Self::within`].
    segments: &'a [Segment],
    within: usize,
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(segments: &'a [Segment]) -> Self {
        Self { segments, within: 0 }
    }

    fn is_at_end(&mut self) -> bool {
        self.advance(0);
        self.segments.is_empty()
    }

    /// Moves on, and past segments that have no more bytes.
    fn advance(&mut self, bytes: usize) {
        self.within += bytes;
        while let [first, rest @ ..] = self.segments
            && self.within >= first.len()
        {
            self.within -= first.len();
            self.segments = rest;
        }
    }

    /// What is left of the segment at the cursor.
    fn current(&self) -> Option<Segment> {
        let mut first = *self.segments.first()?;
        first.advance(self.within);
        Some(first)
    }

    /// One system call: the rest of a segment, or as many whole ones as it takes. It says how
    /// many bytes; the cursor stays.
    pub(super) fn step(
        &self,
        fd: &OwnedFd,
        direction: Direction,
        offset: u64,
    ) -> Result<usize, Errno> {
        let (fd, at) = (fd.as_raw_fd(), offset as libc::off_t);
        let one = self.current().unwrap_or(Segment::new(std::ptr::null_mut(), 0));
        let (base, length) = (one.base().cast::<libc::c_void>(), one.len());
        let is_one = self.within > 0 || self.segments.len() <= 1;
        let vectors = self.segments.as_ptr().cast::<libc::iovec>();
        let count = self.segments.len().min(MAX_SEGMENTS) as libc::c_int;
        let bytes = match direction {
            // SAFETY: the caller's segments are mapped memory; what is in it may change at any
            // time, and the kernel does not mind.
            Direction::Read if is_one => unsafe { libc::pread(fd, base, length, at) },
            // SAFETY: as above; a Segment is a `struct iovec`, and `count` of them are there.
            Direction::Read => unsafe { libc::preadv(fd, vectors, count, at) },
            // SAFETY: as above.
            Direction::Write { durable: false } if is_one => unsafe {
                libc::pwrite(fd, base, length, at)
            },
            Direction::Write { durable } => {
                let rest = libc::iovec { iov_base: base, iov_len: length };
                let (vectors, count) = if is_one { (&raw const rest, 1) } else { (vectors, count) };
                // SAFETY: as above; `rest` outlives the call.
                unsafe { libc::pwritev2(fd, vectors, count, at, write_flags(durable)) }
            }
        };
        usize::try_from(bytes).map_err(|_| last_error())
    }

    /// Fills `target` from the segments and moves on.
    pub(super) fn copy_to(&mut self, target: Segment) {
        self.copy(target, |segment, target, length| {
            // SAFETY: both have so many bytes, and `target` is the engine's own memory.
            unsafe { segment.copy_to_nonoverlapping(target, length) };
        });
    }

    /// Fills the segments from `source` and moves on.
    pub(super) fn copy_from(&mut self, source: Segment) {
        self.copy(source, |segment, source, length| {
            // SAFETY: both have so many bytes, and `source` is the engine's own memory.
            unsafe { segment.copy_from_nonoverlapping(source, length) };
        });
    }

    fn copy(&mut self, mut other: Segment, piece: impl Fn(*mut u8, *mut u8, usize)) {
        while !other.is_empty() && !self.is_at_end() {
            let Some(here) = self.current() else { return };
            let length = here.len().min(other.len());
            piece(here.base(), other.base(), length);
            other.advance(length);
            self.advance(length);
        }
    }
}
