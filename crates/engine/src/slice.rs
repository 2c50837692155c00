//! A part of another engine's disk, as a disk of its own: many disks on one block device.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rtvirtio_units::Bytes;
use rustix::io::Errno;

use crate::{
    Commands, Engine, Geometry, Operation, Outcome, Request, ResizeError, SubmitContext,
    TransferLimits,
};

/// Why there is no such part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// It reaches beyond the disk.
    #[error("{size} bytes from byte {offset} reach beyond the {capacity} that there are")]
    Beyond {
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
        /// Of the whole disk.
        capacity: u64,
    },
    /// It does not start and end with a block.
    #[error("byte {offset} or size {size} is not a multiple of the block of {block}")]
    Misaligned {
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
        /// Bytes that are written at a time.
        block: u32,
    },
}

/// A part of a disk. Nothing outside of it is read or written.
pub struct SliceEngine {
    whole: Arc<dyn Engine>,
    offset: u64,
    size: u64,
}

impl SliceEngine {
    /// `size` bytes of `whole` from byte `offset`.
    ///
    /// # Errors
    /// [`SliceError`].
    pub fn new(whole: Arc<dyn Engine>, offset: Bytes, size: Bytes) -> Result<Self, SliceError> {
        let (offset, size) = (offset.get(), size.get());
        let (capacity, block) = (whole.geometry().capacity.get(), whole.written_block());
        if size == 0 || offset.checked_add(size).is_none_or(|end| end > capacity) {
            return Err(SliceError::Beyond { offset, size, capacity });
        }
        let unit = u64::from(block);
        if !offset.is_multiple_of(unit) || !size.is_multiple_of(unit) {
            return Err(SliceError::Misaligned { offset, size, block });
        }
        Ok(Self { whole, offset, size })
    }
}

impl Engine for SliceEngine {
    fn geometry(&self) -> Geometry {
        Geometry { capacity: Bytes::new(self.size), ..self.whole.geometry() }
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.whole.file()
    }

    fn commands(&self) -> Option<Commands> {
        self.whole.commands()
    }

    fn transfer_limits(&self) -> TransferLimits {
        self.whole.transfer_limits()
    }

    fn written_block(&self) -> u32 {
        self.whole.written_block()
    }

    fn writes_zeroes(&self, unmap: bool) -> bool {
        self.whole.writes_zeroes(unmap)
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let offset = match request.operation {
            Operation::Flush => 0,
            // The caller has checked; what lies beyond is another's disk.
            _ if request.offset.checked_add(request.length).is_none_or(|end| end > self.size) => {
                return Outcome::Done(Err(Errno::IO));
            }
            _ => self.offset + request.offset,
        };
        self.whole.start(&Request { offset, ..*request }, lent)
    }

    fn check_size(&self, size: Bytes) -> Result<(), ResizeError> {
        if size.get() == self.size { Ok(()) } else { Err(ResizeError::Part) }
    }

    /// It stays as it is.
    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        let checked = capacity.map_or(Ok(()), |capacity| self.check_size(capacity));
        checked.map_err(std::io::Error::other)?;
        Ok(Bytes::new(self.size))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use io_uring::IoUring;

    use super::*;
    use crate::ram::RamEngine;
    use crate::testing::has_io_uring;
    use crate::{Completions, Segment, Token};

    struct Nobody;
    impl Completions for Nobody {
        fn complete(&self, _token: Token, _result: Result<(), Errno>) {}
    }

    fn whole() -> Arc<dyn Engine> {
        Arc::new(RamEngine::new(Bytes::new(8192), Duration::ZERO).unwrap())
    }

    fn slice(whole: &Arc<dyn Engine>, offset: u64, size: u64) -> Result<SliceEngine, SliceError> {
        SliceEngine::new(Arc::clone(whole), Bytes::new(offset), Bytes::new(size))
    }

    /// Reads or writes 512 bytes.
    fn request(engine: &dyn Engine, operation: Operation, offset: u64, data: &mut [u8]) -> Outcome {
        let mut ring = IoUring::new(1).unwrap();
        let completions: Arc<dyn Completions> = Arc::new(Nobody);
        let segments = [Segment::new(data.as_mut_ptr(), data.len())];
        let length = data.len() as u64;
        let (token, segments, buffer) = (Token(0), &segments[..], None);
        let scratch = Segment::EMPTY;
        let request = Request { token, operation, offset, length, segments, buffer, scratch };
        let submission = &mut ring.submission();
        let completions = &completions;
        engine.start(
            &request,
            &mut SubmitContext { submission, commands: None, file: None, completions },
        )
    }

    #[test]
    fn write_to_a_slice_is_found_at_its_place_in_the_whole() {
        if !has_io_uring() {
            return;
        }
        let whole = whole();
        let slice = slice(&whole, 4096, 1024).unwrap();
        assert_eq!(slice.geometry().capacity.get(), 1024);
        let mut data = [7; 512];
        let write = Operation::Write { durable: false };
        assert_eq!(request(&slice, write, 512, &mut data), Outcome::Done(Ok(())));
        data.fill(0);
        assert_eq!(request(&*whole, Operation::Read, 4608, &mut data), Outcome::Done(Ok(())));
        assert_eq!(data, [7; 512]);
    }

    #[test]
    fn request_beyond_a_slice_fails_and_touches_nothing() {
        if !has_io_uring() {
            return;
        }
        let whole = whole();
        let slice = slice(&whole, 0, 1024).unwrap();
        let mut data = [7; 512];
        let write = Operation::Write { durable: false };
        for offset in [1024, 768, u64::MAX] {
            let refused = Outcome::Done(Err(Errno::IO));
            assert_eq!(request(&slice, write, offset, &mut data), refused);
        }
        assert_eq!(request(&*whole, Operation::Read, 1024, &mut data), Outcome::Done(Ok(())));
        assert_eq!(data, [0; 512]);
    }

    #[test]
    fn slice_that_is_not_there_or_not_aligned_is_refused() {
        let whole = whole();
        for (offset, size) in [(8192, 512), (0, 8704), (512, 8192), (u64::MAX, 512), (0, 0)] {
            let error = slice(&whole, offset, size).err();
            assert!(matches!(error, Some(SliceError::Beyond { .. })), "{error:?}");
        }
        for (offset, size) in [(1, 512), (0, 100)] {
            let error = slice(&whole, offset, size).err();
            assert!(matches!(error, Some(SliceError::Misaligned { .. })), "{error:?}");
        }
    }
}
