//! Raw images and block devices.
//!
//! Reads, writes and flushes take one of three ways, chosen when the file is opened:
//! - io_uring: entries in the ring of the IOThread that starts them;
//! - inline, on file systems in memory (tmpfs, ramfs, hugetlbfs): there io_uring would hand each
//!   request to a worker thread, while a system call is done in a microsecond;
//! - threads, where io_uring is switched off.
//!
//! What is rare goes to helper threads in all of them: discards, write-zeroes, and requests whose
//! memory or place direct I/O does not take as it is, which are bounced through aligned memory.

mod aligned;
mod header;
mod image;
mod lock;
mod threads;
mod transfer;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use io_uring::{IoUring, opcode, types};
use rtvirtio_units::Bytes;
use rustix::io::Errno;

pub(crate) use aligned::Aligned;
pub use image::{ImageError, open};
pub(crate) use image::{last_error, set_flags};
pub use lock::{Access, Lock, LockError, Lockable};

use crate::{Engine, Geometry, Operation, Outcome, Request, ResizeError, Segment, SubmitContext};
use image::Image;
use threads::{Job, Threads};

/// Linux transfers at most so many bytes in a call (`MAX_RW_COUNT`).
const MAX_BYTES: usize = 0x7fff_f000;
/// Linux takes at most so many segments in a call (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;

/// A read, write or flush as a submission queue entry: a macro, since `io_uring` keeps the trait
/// of its two types of file to itself.
macro_rules! entry {
    ($file:expr, $request:expr) => {{
        let (file, request): (_, &Request<'_>) = ($file, $request);
        let count = request.segments.len().min(MAX_SEGMENTS) as u32;
        let vectors = request.segments.as_ptr().cast::<libc::iovec>();
        match (request.operation, request.segments, request.buffer) {
            (Operation::Read, [one], None) => {
                opcode::Read::new(file, one.base(), bytes(one)).offset(request.offset).build()
            }
            (Operation::Read, [one], Some(buffer)) => {
                opcode::ReadFixed::new(file, one.base(), bytes(one), buffer)
                    .offset(request.offset)
                    .build()
            }
            (Operation::Read, ..) => {
                opcode::Readv::new(file, vectors, count).offset(request.offset).build()
            }
            (Operation::Write { durable }, [one], None) => {
                opcode::Write::new(file, one.base(), bytes(one))
                    .offset(request.offset)
                    .rw_flags(write_flags(durable))
                    .build()
            }
            (Operation::Write { durable }, [one], Some(buffer)) => {
                opcode::WriteFixed::new(file, one.base(), bytes(one), buffer)
                    .offset(request.offset)
                    .rw_flags(write_flags(durable))
                    .build()
            }
            (Operation::Write { durable }, ..) => opcode::Writev::new(file, vectors, count)
                .offset(request.offset)
                .rw_flags(write_flags(durable))
                .build(),
            (Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. }, ..) => {
                opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build()
            }
        }
    }};
}

fn bytes(segment: &Segment) -> u32 {
    segment.len().min(MAX_BYTES) as u32
}

const fn write_flags(durable: bool) -> i32 {
    if durable { libc::RWF_DSYNC } else { 0 }
}

/// Where the disk's bytes are.
#[derive(Debug)]
pub enum FileSource {
    /// A file or block device to open.
    Path(PathBuf),
    /// One that somebody else opened and handed over.
    Fd(OwnedFd),
}

/// How requests reach the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Aio {
    /// Inline for files in memory, else io_uring where the kernel lets it, else threads.
    #[default]
    Auto,
    /// io_uring.
    IoUring,
    /// Threads of the engine's own.
    Threads,
}

/// What to open, and how.
#[derive(Debug)]
pub struct FileConfig {
    /// The file.
    pub source: FileSource,
    /// Whether to go around the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the user wrote out that the format is raw: the header is not looked at.
    pub explicit_raw: bool,
    /// How requests reach the file.
    pub aio: Aio,
    /// Bytes of the logical block that the guest sees: 512, 1024, 2048 or 4096. By default a block device's
    /// own, and 512 of a file, whatever its file system asks of direct I/O.
    pub block_size: Option<u32>,
}

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file is not what was asked for.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// io_uring was asked for and is not to be had.
    #[error(
        "io_uring is not available: allow it (sysctl kernel.io_uring_disabled=0) or set aio to \"threads\" or \"auto\""
    )]
    IoUring(#[source] std::io::Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SubmitMethod {
    Ring,
    Inline,
    Threads,
}

/// A disk in a file or block device.
#[derive(Debug)]
pub struct FileEngine {
    image: Arc<Image>,
    threads: Threads,
    way: SubmitMethod,
}

impl FileEngine {
    /// Opens and checks the file. It is not locked yet: see [`Self::lock`].
    ///
    /// # Errors
    /// [`FileError`], with the remedy.
    pub fn open(config: FileConfig) -> Result<Self, FileError> {
        let aio = config.aio;
        let image = Arc::new(Image::open(config)?);
        let way = match aio {
            Aio::Auto if image.in_memory() => SubmitMethod::Inline,
            Aio::Threads => SubmitMethod::Threads,
            Aio::Auto | Aio::IoUring => match IoUring::new(1) {
                Ok(_) => SubmitMethod::Ring,
                Err(error) if aio == Aio::Auto && is_switched_off(&error) => SubmitMethod::Threads,
                Err(error) => return Err(FileError::IoUring(error)),
            },
        };
        Ok(Self { threads: Threads::new(Arc::clone(&image)), image, way })
    }

    /// The file, to be locked.
    #[must_use]
    pub fn lockable(&self) -> Lockable {
        let access = if self.image.read_only() { Access::Read } else { Access::Write };
        Lockable::new(Arc::clone(self.image.fd()), access)
    }

    /// Takes QEMU's locks for as long as the result lives.
    ///
    /// # Errors
    /// [`LockError`]: somebody else uses the file, or it cannot be locked.
    pub fn lock(&self) -> Result<Lock, LockError> {
        self.lockable().lock()
    }

    /// What requests take: `io_uring`, `inline` or `threads`; to be shown to people.
    #[must_use]
    pub const fn aio_name(&self) -> &'static str {
        match self.way {
            SubmitMethod::Ring => "io_uring",
            SubmitMethod::Inline => "inline",
            SubmitMethod::Threads => "threads",
        }
    }
}

/// By sysctl or a seccomp list, or never built in.
fn is_switched_off(error: &std::io::Error) -> bool {
    let error = Errno::from_io_error(error);
    matches!(error, Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS))
}

impl Engine for FileEngine {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        (self.way == SubmitMethod::Ring).then(|| self.image.fd().as_fd())
    }

    fn written_block(&self) -> u32 {
        self.image.unit().max(self.image.geometry().logical_block)
    }

    fn writes_zeroes(&self, unmap: bool) -> bool {
        self.image.writes_zeroes(unmap)
    }

    fn start(&self, request: &Request<'_>, lent: &mut SubmitContext<'_, '_>) -> Outcome {
        let read_only = self.image.read_only();
        let simple = match request.operation {
            Operation::Read => self.image.takes(request.offset, request.segments),
            Operation::Flush if read_only => return Outcome::Done(Ok(())),
            _ if read_only => return Outcome::Done(Err(Errno::ROFS)),
            Operation::Write { .. } => self.image.takes(request.offset, request.segments),
            Operation::Flush => true,
            Operation::Discard | Operation::WriteZeroes { .. } => false,
        };
        match self.way {
            SubmitMethod::Ring if simple => {
                // The kernel looks for a flush's file only when a worker has come to it: a number in
                // the table may be nobody's then, the queue having moved. A descriptor is looked
                // up at once.
                let entry = match lent.file.filter(|_| request.operation != Operation::Flush) {
                    Some(index) => entry!(types::Fixed(index), request),
                    None => entry!(types::Fd(self.image.fd().as_raw_fd()), request),
                };
                let entry = entry.user_data(request.token.0);
                // SAFETY: the file lives as long as the engine and the segments until the result
                // is known; both outlast the request, by the trait's contract.
                match unsafe { lent.submission.push(&entry) } {
                    Ok(()) => Outcome::Started,
                    Err(_) => Outcome::Busy,
                }
            }
            SubmitMethod::Inline if simple => Outcome::Done(self.image.perform(request)),
            _ => match self.threads.submit(Job::new(request, lent.completions)) {
                Ok(()) => Outcome::Started,
                Err(error) => Outcome::Done(Err(error)),
            },
        }
    }

    fn refuse_beyond(&self, capacity: Bytes) {
        self.image.refuse_beyond(capacity);
    }

    fn check_size(&self, size: Bytes) -> Result<(), ResizeError> {
        self.image.check_new_size(size)
    }

    /// Looks at the file's size again, or sets that of a regular file. Shrinking drops what is
    /// cut off; requests that reach beyond the new end fail.
    fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        self.image.resize(capacity)
    }
}
