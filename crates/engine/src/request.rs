//! What an engine is asked to do, and what it answers: the types between the
//! data plane and its engines.
//!
//! The caller keeps a request's segments in place until it is told the result;
//! an engine tells each result exactly once, by one of four ways: at once
//! ([`Outcome::Done`]), by a completion queue entry of the caller's io_uring
//! whose user data is the token, by one of the caller's ring for commands
//! ([`CommandRing`](crate::CommandRing)), or through [`Completions`].

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use io_uring::squeue::{Entry128, SubmissionQueue};
use rtvirtio_units::Bytes;
use rtvirtio_virtq::Segment;
use rustix::io::Errno;

/// Names a request to whoever started it. Engines pass it on unread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Fills the segments.
    Read,
    /// Stores the segments.
    Write {
        /// Whether they must be on stable storage when it completes (write-through).
        durable: bool,
    },
    /// All completed writes are on stable storage when it completes.
    Flush,
    /// The range's content no longer matters.
    Discard,
    /// The range reads as zeroes.
    WriteZeroes {
        /// Whether its space may be given back.
        unmap: bool,
        /// Whether the zeroes must be on stable storage when it completes (virtio 1.3, section 5.2.6.2:
        /// in writethrough mode a device commits write zeroes as it does writes).
        durable: bool,
    },
}

/// A request. Its range lies within the engine's capacity: the caller checked.
#[derive(Debug)]
pub struct Request<'a> {
    /// Who asks.
    pub token: Token,
    /// What for.
    pub operation: Operation,
    /// First byte; 0 for a flush.
    pub offset: u64,
    /// Bytes; of a read or write, the sum of the segments; 0 for a flush.
    pub length: u64,
    /// Of a read or write; they stay in place until the result is known.
    pub segments: &'a [Segment],
    /// The ring's registered buffer that holds the only segment, if there is one.
    pub buffer: Option<u16>,
    /// [`SCRATCH_BYTES`] at a multiple of 8 for the engine to use, of a discard; it stays in place
    /// until the result is known.
    pub scratch: Segment,
}

/// The largest offset into a file (`loff_t`).
const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// A size that a disk is to have, and cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a size of {size} bytes is no multiple of the disk's block of {block} from {block} to {max}"
)]
pub struct SizeError {
    /// Bytes.
    pub size: u64,
    /// Bytes that are written at a time.
    pub block: u32,
    /// The largest size.
    pub max: u64,
}

impl SizeError {
    pub(crate) fn check(size: Bytes, block: u32, max: u64) -> Result<(), ResizeError> {
        let (size, block) = (size.get(), block.max(1));
        let max = max - max % u64::from(block);
        if (u64::from(block)..=max).contains(&size) && size.is_multiple_of(block.into()) {
            Ok(())
        } else {
            Err(ResizeError::Size(Self { size, block, max }))
        }
    }
}

/// Why a disk keeps its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// Disks of that kind do not have it.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// It is read only.
    #[error("the disk is read-only: resize the image (truncate), then ask without a size")]
    ReadOnly,
    /// It is a block device.
    #[error(
        "a block device is resized by what it is made with (lvresize, for example): do that, then ask without a size"
    )]
    BlockDevice,
    /// It is a namespace.
    #[error("a namespace is resized by whoever manages the NVMe device: then ask without a size")]
    Namespace,
    /// It is a part of an image.
    #[error("the disk is a part of an image, whose size is in the configuration")]
    Part,
}

/// Bytes of [`Request::scratch`].
pub const SCRATCH_BYTES: usize = 16;

/// What starting a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has completed.
    Done(Result<(), Errno>),
    /// Its result comes later. In a completion queue entry a read or write may be short, unless it is
    /// of a ring for commands: the caller starts the rest anew.
    Started,
    /// The submission queue is full: nothing has happened, submit and start it again.
    Busy,
}

/// Takes the results of requests that end elsewhere than in the caller's io_uring.
pub trait Completions: Send + Sync {
    /// The request has ended. Called from any thread; does not block.
    fn complete(&self, token: Token, result: Result<(), Errno>);
}

/// What the IOThread that starts a request lends to the engine.
pub struct SubmitContext<'a, 'ring> {
    /// The thread's submission queue.
    pub submission: &'a mut SubmissionQueue<'ring>,
    /// That of its ring for commands, if the engine needs one ([`Engine::commands`]).
    pub commands: Option<&'a mut SubmissionQueue<'ring, Entry128>>,
    /// Index of the engine's file among the ring's registered files, if it is registered.
    pub file: Option<u32>,
    /// Where results go that come by no completion queue entry.
    pub completions: &'a Arc<dyn Completions>,
}

/// What a disk can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Its size, a multiple of 512 bytes.
    pub capacity: Bytes,
    /// Least unit and alignment of a request, in bytes: a power of two from 512.
    pub logical_block: u32,
    /// Unit that the device writes without reading, in bytes.
    pub physical_block: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether it can discard and write zeroes.
    pub discard: bool,
}

/// How it is learned that commands have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commands {
    /// The device interrupts.
    Interrupt,
    /// Somebody looks at the device (`IORING_SETUP_IOPOLL`).
    Polled,
}

/// The most bytes that a request may have when it is started, multiples of the logical block: the caller
/// cuts longer ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferLimits {
    /// Of a read or write.
    pub transfer: u64,
    /// Of a discard.
    pub discard: u64,
    /// Of a write-zeroes.
    pub zeroes: u64,
}

impl Default for TransferLimits {
    /// As long as the disk.
    fn default() -> Self {
        Self { transfer: u64::MAX, discard: u64::MAX, zeroes: u64::MAX }
    }
}

impl TransferLimits {
    /// Of a request that does this.
    #[must_use]
    pub const fn of(&self, operation: Operation) -> u64 {
        match operation {
            Operation::Read | Operation::Write { .. } => self.transfer,
            Operation::Flush => u64::MAX,
            Operation::Discard => self.discard,
            Operation::WriteZeroes { .. } => self.zeroes,
        }
    }
}

/// A block engine.
///
/// It is shared by all IOThreads that serve the disk's virtqueues.
pub trait Engine: Send + Sync {
    /// What the disk can do, now: its capacity changes when it is resized.
    fn geometry(&self) -> Geometry;

    /// The file that the IOThreads should register with their rings.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether requests go to a ring for commands, and to which.
    fn commands(&self) -> Option<Commands> {
        None
    }

    /// What it takes at once; never changes.
    fn transfer_limits(&self) -> TransferLimits {
        TransferLimits::default()
    }

    /// Bytes that are written at a time at least: two disks on one engine have none of these in common.
    fn written_block(&self) -> u32 {
        self.geometry().logical_block
    }

    /// Whether a write-zeroes (`unmap`: one that may give the space back) takes a write of its bytes, by the
    /// engine or by the kernel below it, as far as is known now. Then it is charged and divided as a write.
    fn writes_zeroes(&self, _unmap: bool) -> bool {
        false
    }

    /// Starts a request. On a hot path: no allocation, no lock that another thread holds long.
    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome;

    /// From now on the disk ends here at the latest, until it is resized: what is about to be cut off is to
    /// have nothing in flight, since a write that ends behind the end of a file makes the file longer.
    fn refuse_beyond(&self, _capacity: Bytes) {}

    /// Whether the disk may be told to have that size: nothing changes. That there is room for it is not known
    /// before [`Self::resize`].
    ///
    /// # Errors
    /// [`ResizeError`].
    fn check_size(&self, size: Bytes) -> Result<(), ResizeError> {
        SizeError::check(size, self.written_block(), MAX_FILE_BYTES)
    }

    /// Looks at the size again, or changes it, and returns the new capacity.
    ///
    /// # Errors
    /// The engine cannot have that size.
    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes>;
}
