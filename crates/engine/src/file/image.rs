//! A raw image or block device: what it is, and synchronous requests to it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rtvirtio_units::Bytes;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::aligned::Aligned;
use super::header;
use super::transfer::{Cursor, Direction, transfer};
use super::{FileConfig, FileSource};
use crate::{Geometry, Operation, Request, ResizeError, Segment, SizeError};

/// Bytes bounced at a time.
const BOUNCE: usize = 256 << 10;

/// `BLKDISCARD` and `BLKGETSIZE64` of `linux/fs.h`.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;

/// `st_type`s of file systems that live in memory, of `linux/magic.h`.
const IN_MEMORY: [i64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It cannot be opened.
    #[error("open {path}")]
    Open {
        /// Where it should be.
        path: PathBuf,
        /// Why not.
        #[source]
        source: Errno,
    },
    /// A system call about it failed.
    #[error("{0} the image")]
    Call(&'static str, #[source] Errno),
    /// It is a directory, pipe, socket or character device.
    #[error("the image is neither a regular file nor a block device")]
    NotADisk,
    /// A descriptor that was handed over does not allow what is asked.
    #[error(
        "the file was handed over without the access that is needed: open it for reading{}, not for appending",
        if *.read_only { "" } else { " and writing" }
    )]
    Access {
        /// Whether reading would have been enough.
        read_only: bool,
    },
    /// Its header is of another format.
    #[error(
        "the image looks like {0}; only raw images are served: convert it (qemu-img convert -O raw), \
         or, if its guest wrote that header, say format = \"raw\""
    )]
    NotRaw(&'static str),
    /// Its file system has no direct I/O.
    #[error("the image's file system has no direct I/O: set direct = false, or move the image")]
    NotDirect(#[source] Errno),
    /// Its size is not a whole number of blocks.
    #[error(
        "the image's {size} bytes are not a multiple of its block of {block}: {}",
        if *.is_device { "set a smaller block_size, or none".to_owned() }
        else { format!("enlarge it (truncate --size=%{block} IMAGE)") }
    )]
    Size {
        /// Bytes.
        size: u64,
        /// Bytes of a logical block, or of what its file system writes at least.
        block: u32,
        /// Whether it is a block device.
        is_device: bool,
    },
    /// It has not one block.
    #[error(
        "the image has {size} bytes, less than one block of {block}: {}",
        if *.is_device { "the block device has no medium, or is not set up yet" }
        else { "give it the size that the disk is to have (truncate --size=10G IMAGE)" }
    )]
    Empty {
        /// Bytes.
        size: u64,
        /// Bytes of a logical block, or of what its file system writes at least.
        block: u32,
        /// Whether it is a block device.
        is_device: bool,
    },
    /// No block size that a driver takes.
    #[error("block_size is {0}: must be 512, 1024, 2048 or 4096")]
    BlockSize(u32),
}

fn call(name: &'static str) -> impl FnOnce(Errno) -> ImageError {
    move |source| ImageError::Call(name, source)
}

/// Opens an image, to be served by this process or another user's.
///
/// # Errors
/// [`ImageError::Open`].
pub fn open(path: &Path, read_only: bool) -> Result<OwnedFd, ImageError> {
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // Non-blocking, so that a pipe is refused instead of waited for.
    let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|source| ImageError::Open { path: path.to_owned(), source })
}

/// An open image.
#[derive(Debug)]
pub(super) struct Image {
    fd: Arc<OwnedFd>,
    capacity: AtomicU64,
    read_only: bool,
    is_device: bool,
    in_memory: bool,
    /// What the guest sees: a property of the image, whatever host serves it.
    logical_block: u32,
    physical_block: u32,
    /// What the file is read and written in, at multiples of that: more than a logical block where direct I/O
    /// asks for it, as on XFS with reflinks. Parts of it are written by a helper thread, which reads the rest.
    unit: u32,
    /// Held by whoever does that: two writes may be of one unit. Disks that share a file have no unit in common
    /// ([`crate::Engine::written_block`]). Writes of whole units do not wait for it: a guest that has one of these and a write
    /// of a part of the same unit in flight at once may find all of the unit as either of the two leaves it.
    rewriting: Mutex<()>,
    /// What direct I/O asks of addresses in memory; 1 without.
    memory_alignment: u32,
    discard: bool,
    /// Of a block device: whether it zeroes ranges by itself. Where it does not, the kernel writes the zeroes
    /// (`blkdev_issue_zeroout`, block/blk-lib.c).
    device_zeroes: bool,
    /// What is known of `FALLOC_FL_ZERO_RANGE` on a file.
    zero_range: AtomicU8,
}

/// Nothing is known of `FALLOC_FL_ZERO_RANGE` yet.
const UNKNOWN: u8 = 0;
/// It works: the range is marked, not written.
const WORKS: u8 = 1;
/// It does not.
const MISSING: u8 = 2;

impl Image {
    pub(super) fn open(config: FileConfig) -> Result<Self, ImageError> {
        let FileConfig { source, direct, read_only, explicit_raw, block_size, .. } = config;
        if let Some(size) = block_size
            && !(size.is_power_of_two() && (512..=4096).contains(&size))
        {
            return Err(ImageError::BlockSize(size));
        }
        let fd = match source {
            FileSource::Fd(fd) => fd,
            FileSource::Path(path) => open(&path, read_only)?,
        };
        let stat = rustix::fs::fstat(&fd).map_err(call("stat"))?;
        let is_device = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return Err(ImageError::NotADisk),
        };
        set_flags(&fd, direct, read_only)?;

        let file_system = rustix::fs::fstatfs(&fd).map_err(call("stat the file system of"))?;
        let in_memory = !is_device && IN_MEMORY.contains(&file_system.f_type);
        let alignment = Alignment::of(&fd, is_device, direct && !in_memory)?;
        let physical_block = if is_device {
            rustix::fs::ioctl_blkpbszget(&fd).map_err(call("ask the physical block size of"))?
        } else {
            4096
        };
        let size = size_of(&fd, is_device).map_err(call("ask the size of"))?;
        // An image is partitioned for its block, so the host's file system does not decide.
        let by_default = if is_device { alignment.device_block } else { 512 };
        let logical_block = block_size.unwrap_or(by_default);
        let image = Self {
            fd: Arc::new(fd),
            capacity: AtomicU64::new(size),
            read_only,
            is_device,
            in_memory,
            logical_block,
            physical_block: physical_block.max(alignment.offset).max(logical_block),
            unit: alignment.offset,
            rewriting: Mutex::default(),
            memory_alignment: alignment.memory,
            discard: false,
            device_zeroes: is_device && device_zeroes(&stat),
            zero_range: AtomicU8::new(UNKNOWN),
        };
        image.check_size(size)?;
        if !explicit_raw && let Some(format) = image.foreign_format()? {
            return Err(ImageError::NotRaw(format));
        }
        let discard = !read_only && image.can_discard();
        Ok(Self { discard, ..image })
    }

    pub(super) const fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    pub(super) const fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether its file system lives in memory.
    pub(super) const fn in_memory(&self) -> bool {
        self.in_memory
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            capacity: Bytes::new(self.capacity.load(Ordering::Relaxed)),
            logical_block: self.logical_block,
            physical_block: self.physical_block,
            read_only: self.read_only,
            discard: self.discard,
        }
    }

    pub(super) fn resize(&self, capacity: Option<Bytes>) -> std::io::Result<Bytes> {
        if let Some(capacity) = capacity {
            self.check_new_size(capacity).map_err(std::io::Error::other)?;
            rustix::fs::ftruncate(&self.fd, capacity.get())?;
        }
        let size = size_of(&self.fd, self.is_device)?;
        self.check_size(size).map_err(std::io::Error::other)?;
        self.capacity.store(size, Ordering::Relaxed);
        Ok(Bytes::new(size))
    }

    /// Whether it may be told to have that size.
    pub(super) fn check_new_size(&self, size: Bytes) -> Result<(), ResizeError> {
        if self.read_only {
            Err(ResizeError::ReadOnly)
        } else if self.is_device {
            Err(ResizeError::BlockDevice)
        } else {
            SizeError::check(size, self.block(), i64::MAX as u64)
        }
    }

    /// Bytes of which there is a whole number.
    fn block(&self) -> u32 {
        self.logical_block.max(self.unit)
    }

    fn check_size(&self, size: u64) -> Result<(), ImageError> {
        let (block, is_device) = (self.block(), self.is_device);
        if size < u64::from(block) {
            Err(ImageError::Empty { size, block, is_device })
        } else if !size.is_multiple_of(block.into()) {
            Err(ImageError::Size { size, block, is_device })
        } else {
            Ok(())
        }
    }

    /// Bytes that are written at a time at least.
    pub(super) const fn unit(&self) -> u32 {
        self.unit
    }

    /// Whether the file takes these segments as they are, at that place.
    pub(super) fn takes(&self, offset: u64, segments: &[Segment]) -> bool {
        let (memory, unit) = (self.memory_alignment as usize, self.unit as usize);
        memory == 1
            || offset.is_multiple_of(unit as u64)
                && segments
                    .iter()
                    .all(|s| s.base().addr().is_multiple_of(memory) && s.len().is_multiple_of(unit))
    }

    fn in_units(&self, offset: u64, length: u64) -> bool {
        (offset | length).is_multiple_of(self.unit.into())
    }

    /// Does a request, and waits for it.
    pub(super) fn perform(&self, request: &Request<'_>) -> Result<(), Errno> {
        let &Request { operation, offset, length, segments, .. } = request;
        match operation {
            Operation::Read if self.takes(offset, segments) => {
                transfer(&self.fd, Direction::Read, offset, segments)
            }
            Operation::Write { durable } if self.takes(offset, segments) => {
                transfer(&self.fd, Direction::Write { durable }, offset, segments)
            }
            Operation::Read => self.bounce(Direction::Read, offset, length, segments),
            Operation::Write { durable } => {
                self.bounce(Direction::Write { durable }, offset, length, segments)
            }
            Operation::Flush => self.flush(),
            Operation::Discard => self.discard(offset, length),
            Operation::WriteZeroes { unmap, durable } => {
                self.write_zeroes(offset, length, unmap)?;
                // Neither `fallocate` nor a plain write promises that.
                if durable { self.flush() } else { Ok(()) }
            }
        }
    }

    fn flush(&self) -> Result<(), Errno> {
        if self.in_memory { Ok(()) } else { rustix::fs::fdatasync(&self.fd) }
    }

    /// Reads or writes by way of aligned memory, in whole units: of one that is written in part, the rest is
    /// read before.
    fn bounce(
        &self,
        direction: Direction,
        offset: u64,
        length: u64,
        segments: &[Segment],
    ) -> Result<(), Errno> {
        let unit = u64::from(self.unit);
        let (first, end) = (offset - offset % unit, offset + length);
        let last = end.next_multiple_of(unit);
        let most = (last - first).min((BOUNCE as u64).max(unit)) as usize;
        let buffer = Aligned::new(most, self.buffer_alignment())?;
        let whole = buffer.segment(most);
        let part = |from: u64, to: u64| {
            Segment::new(whole.base().wrapping_add(from as usize), (to - from) as usize)
        };
        let writes = matches!(direction, Direction::Write { .. });
        let _alone = (writes && !self.in_units(offset, length))
            .then(|| self.rewriting.lock().unwrap_or_else(PoisonError::into_inner));
        let mut cursor = Cursor::new(segments);
        let mut at = first;
        while at < last {
            let piece = (last - at).min(most as u64);
            // What is asked for of this piece.
            let (from, to) = (offset.max(at) - at, end.min(at + piece) - at);
            if writes {
                let (head, tail) = (from > 0, to < piece);
                if head || tail && piece <= unit {
                    transfer(&self.fd, Direction::Read, at, &[part(0, unit)])?;
                }
                if tail && piece > unit {
                    let rest = part(piece - unit, piece);
                    transfer(&self.fd, Direction::Read, at + piece - unit, &[rest])?;
                }
                cursor.copy_to(part(from, to));
            }
            transfer(&self.fd, direction, at, &[part(0, piece)])?;
            if !writes {
                cursor.copy_from(part(from, to));
            }
            at += piece;
        }
        Ok(())
    }

    fn buffer_alignment(&self) -> usize {
        self.unit.max(self.memory_alignment).max(4096) as usize
    }

    /// A hint: where the file system cannot after all, nothing is done.
    fn discard(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let result = if self.is_device && !self.in_units(offset, length) {
            Ok(())
        } else if self.is_device {
            discard_device(&self.fd, offset, length)
        } else {
            self.fallocate(FallocateFlags::PUNCH_HOLE, offset, length)
        };
        match result {
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => result,
        }
    }

    /// On block devices too `fallocate` zeroes, and says when the device cannot do it by itself.
    fn write_zeroes(&self, offset: u64, length: u64, unmap: bool) -> Result<(), Errno> {
        match self.mark_zeroes(offset, length, unmap) {
            Err(Errno::OPNOTSUPP) => self.write_out_zeroes(offset, length),
            result => result,
        }
    }

    /// Without a write of them, if file system or device can do that.
    fn mark_zeroes(&self, offset: u64, length: u64, unmap: bool) -> Result<(), Errno> {
        // Whoever writes a unit in part has read the rest of it, and writes that back.
        let _alone = (!self.in_units(offset, length))
            .then(|| self.rewriting.lock().unwrap_or_else(PoisonError::into_inner));
        // A block device takes its own blocks only.
        let marks = !self.is_device || self.in_units(offset, length);
        if unmap && marks {
            match self.fallocate(FallocateFlags::PUNCH_HOLE, offset, length) {
                Err(Errno::OPNOTSUPP) => {}
                result => return result,
            }
        }
        if marks && self.zero_range.load(Ordering::Relaxed) != MISSING {
            match self.fallocate(FallocateFlags::ZERO_RANGE, offset, length) {
                Err(Errno::OPNOTSUPP) => self.zero_range.store(MISSING, Ordering::Relaxed),
                Ok(()) => {
                    self.zero_range.store(WORKS, Ordering::Relaxed);
                    return Ok(());
                }
                error => return error,
            }
        }
        Err(Errno::OPNOTSUPP)
    }

    fn write_out_zeroes(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let most = length.min(BOUNCE as u64) as usize;
        let zeroes = Aligned::new(most, self.buffer_alignment())?;
        let mut done = 0;
        while done < length {
            let piece = zeroes.segment((length - done).min(most as u64) as usize);
            let (at, bytes) = (offset + done, piece.len() as u64);
            let write = Direction::Write { durable: false };
            if self.in_units(at, bytes) {
                transfer(&self.fd, write, at, &[piece])?;
            } else {
                self.bounce(write, at, bytes, &[piece])?;
            }
            done += bytes;
        }
        Ok(())
    }

    /// Whether zeroing a range takes a write of its bytes, as far as is known: the first such request tells of
    /// a file.
    pub(super) fn writes_zeroes(&self, unmap: bool) -> bool {
        if self.is_device {
            !self.device_zeroes
        } else {
            !(unmap && self.discard) && self.zero_range.load(Ordering::Relaxed) != WORKS
        }
    }

    /// The end may come nearer, and only by [`Self::resize`] farther.
    pub(super) fn refuse_beyond(&self, capacity: Bytes) {
        if !self.read_only && !self.is_device {
            self.capacity.fetch_min(capacity.get(), Ordering::Relaxed);
        }
    }

    fn fallocate(&self, what: FallocateFlags, offset: u64, length: u64) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&self.fd, what | FallocateFlags::KEEP_SIZE, offset, length)
        })
    }

    /// Asks for what does nothing wherever it is supported.
    fn can_discard(&self) -> bool {
        let result = if self.is_device {
            // Support is checked first, then the alignment.
            discard_device(&self.fd, 1, 512)
        } else {
            // A hole behind the end.
            let end = self.capacity.load(Ordering::Relaxed).next_multiple_of(4096);
            self.fallocate(FallocateFlags::PUNCH_HOLE, end, 4096)
        };
        !matches!(result, Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY))
    }

    fn foreign_format(&self) -> Result<Option<&'static str>, ImageError> {
        let size = self.capacity.load(Ordering::Relaxed);
        let length = size.min(u64::from(self.unit.max(4096))) as usize;
        let buffer = Aligned::new(length, self.buffer_alignment()).map_err(call("read"))?;
        let whole = buffer.segment(length);
        transfer(&self.fd, Direction::Read, 0, &[whole]).map_err(call("read"))?;
        Ok(header::foreign_format(buffer.bytes()))
    }
}

/// What requests must be multiples of.
struct Alignment {
    offset: u32,
    memory: u32,
    /// A block device's own block; 512 of a file.
    device_block: u32,
}

impl Alignment {
    fn of(fd: &OwnedFd, is_device: bool, direct: bool) -> Result<Self, ImageError> {
        let device_block = if is_device {
            rustix::fs::ioctl_blksszget(fd).map_err(call("ask the block size of"))?
        } else {
            512
        };
        if !direct {
            let offset = if is_device { device_block } else { 1 };
            return Ok(Self { offset, memory: 1, device_block });
        }
        let wanted = StatxFlags::DIOALIGN;
        // A kernel before 6.1 does not tell; nor do some file systems.
        let told = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, wanted)
            .ok()
            .filter(|s| s.stx_mask & wanted.bits() != 0);
        let (offset, memory) = match told {
            Some(s) if s.stx_dio_offset_align == 0 => {
                return Err(ImageError::NotDirect(Errno::INVAL));
            }
            Some(s) => (s.stx_dio_offset_align, s.stx_dio_mem_align),
            None if is_device => (device_block, device_block),
            None => Self::probe(fd)?,
        };
        let offset = offset.max(device_block);
        if !offset.is_power_of_two() || !memory.is_power_of_two() {
            return Err(ImageError::NotDirect(Errno::INVAL));
        }
        Ok(Self { offset, memory, device_block })
    }

    /// The least block that can be read.
    fn probe(fd: &OwnedFd) -> Result<(u32, u32), ImageError> {
        let buffer = Aligned::new(4096, 4096).map_err(call("read"))?;
        for block in [512, 4096] {
            // At an address that is aligned to no more than the block.
            let mut piece = buffer.segment(4096);
            if block < 4096 {
                piece = Segment::new(piece.base().wrapping_add(block), block);
            }
            match Cursor::new(&[piece]).step(fd, Direction::Read, 0) {
                Ok(_) => return Ok((block as u32, block as u32)),
                Err(Errno::INVAL) => {}
                Err(error) => return Err(ImageError::Call("read", error)),
            }
        }
        Err(ImageError::NotDirect(Errno::INVAL))
    }
}

/// Checks what a descriptor may do, and sets how it does it.
pub(crate) fn set_flags(fd: &OwnedFd, direct: bool, read_only: bool) -> Result<(), ImageError> {
    let flags = rustix::fs::fcntl_getfl(fd).map_err(call("ask the flags of"))?;
    let fits = match flags & OFlags::ACCMODE {
        OFlags::RDWR => true,
        access => read_only && access == OFlags::RDONLY,
    };
    if !fits || flags.intersects(OFlags::APPEND | OFlags::PATH) {
        return Err(ImageError::Access { read_only });
    }
    // Without NONBLOCK: io_uring would answer EAGAIN where it should wait.
    let mut wanted = flags - (OFlags::NONBLOCK | OFlags::DIRECT);
    if direct {
        wanted |= OFlags::DIRECT;
    }
    match rustix::fs::fcntl_setfl(fd, wanted) {
        Err(error) if direct => Err(ImageError::NotDirect(error)),
        result => result.map_err(call("set the flags of")),
    }
}

fn size_of(fd: &OwnedFd, is_device: bool) -> Result<u64, Errno> {
    if !is_device {
        return rustix::fs::fstat(fd).map(|stat| stat.st_size as u64);
    }
    let mut size = 0_u64;
    // SAFETY: BLKGETSIZE64 writes a u64, which outlives the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64, &raw mut size) };
    if result == 0 { Ok(size) } else { Err(last_error()) }
}

/// Whether a block device zeroes ranges by itself, as its request queue says
/// (Documentation/ABI/stable/sysfs-block). If nothing says so, it does not.
fn device_zeroes(stat: &rustix::fs::Stat) -> bool {
    let number = stat.st_rdev;
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    // A partition's queue is its disk's.
    ["queue", "../queue"].iter().any(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/write_zeroes_max_bytes");
        let most = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
        most.is_some_and(|most: u64| most > 0)
    })
}

fn discard_device(fd: &OwnedFd, offset: u64, length: u64) -> Result<(), Errno> {
    let range = [offset, length];
    // SAFETY: BLKDISCARD reads two u64, which outlive the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// What the last call into the C library failed with.
pub(crate) fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::file::Aio;

    /// Who has read what lies beside its own bytes writes that back, over zeroes that had come meanwhile.
    #[test]
    fn zeroes_wait_for_who_writes_another_part_of_their_unit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(FileConfig {
            source: FileSource::Path(file.path().to_owned()),
            direct: false,
            read_only: false,
            explicit_raw: true,
            block_size: None,
            aio: Aio::Threads,
        });
        // As on a disk with sectors of 4 KiB.
        let image = Image { unit: 4096, ..image.unwrap() };
        let (told, has_ended) = mpsc::channel();
        std::thread::scope(|scope| {
            let writing = image.rewriting.lock().unwrap();
            for unmap in [false, true] {
                let (told, image) = (told.clone(), &image);
                scope.spawn(move || told.send(image.write_zeroes(0, 2048, unmap)).unwrap());
            }
            assert!(has_ended.recv_timeout(Duration::from_millis(50)).is_err());
            // Whole units wait for nobody.
            image.write_zeroes(4096, 8192, true).unwrap();
            drop(writing);
            for _ in 0..2 {
                has_ended.recv_timeout(Duration::from_secs(10)).unwrap().unwrap();
            }
        });
    }
}
