//! Guest memory as fixed buffers of io_uring: pinned once, so that a request need not pin its
//! pages (`Documentation` of IORING_REGISTER_BUFFERS).
//!
//! Pinning takes long and rings are per IOThread, so the memory is registered once with a ring of
//! its own, by whoever sets the device up, and the IOThreads' rings clone it from there
//! (IORING_REGISTER_CLONE_BUFFERS, Linux 6.12).
//!
//! Pinned memory cannot be ballooned, overcommitted or merged, and counts against
//! RLIMIT_MEMLOCK: a device says whether it wants this.

use std::os::fd::{AsRawFd, RawFd};

use io_uring::IoUring;
use rtvirtio_engine::Segment;

use rtvirtio_virtq::memory::Memory;

/// The most bytes of one buffer (io_uring/rsrc.c).
const CHUNK: u64 = 1 << 30;

/// The most buffers of a table (`UIO_MAXIOV`): a ring has 16 times as many for all tables.
const MAX_CHUNKS: usize = 1024;

/// A memory table that is registered.
pub struct FixedBuffers {
    ring: IoUring,
    /// By address.
    chunks: Vec<Segment>,
}

// SAFETY: the segments are only compared with; the ring is only cloned from; no method changes
// anything.
unsafe impl Sync for FixedBuffers {}

impl FixedBuffers {
    /// Registers memory: all of it, or (`populated`) the parts that had pages when they were shared. Pages that
    /// are missing are made by registering, and charged to this process. Takes some 0.1 s per GiB. `None`: there
    /// is nothing to register.
    ///
    /// # Errors
    /// EPERM or ENOMEM: more than RLIMIT_MEMLOCK; EINVAL or ENOSYS: an old kernel.
    pub fn register(memory: &Memory, populated: bool) -> std::io::Result<Option<Self>> {
        let parts: Vec<Segment> = match populated {
            true => memory.regions().flat_map(|region| region.populated()).collect(),
            false => memory.regions().map(|region| region.segment()).collect(),
        };
        let mut chunks = Vec::new();
        for mut rest in parts {
            while !rest.is_empty() && chunks.len() < MAX_CHUNKS {
                let length = (rest.len() as u64).min(CHUNK) as usize;
                chunks.push(Segment::new(rest.base(), length));
                rest.advance(length);
            }
        }
        if chunks.is_empty() {
            return Ok(None);
        }
        chunks.sort_unstable_by_key(|chunk| chunk.base() as usize);
        let ring = IoUring::new(1)?;
        let vectors: Vec<libc::iovec> = chunks
            .iter()
            .map(|s| libc::iovec { iov_base: s.base().cast(), iov_len: s.len() })
            .collect();
        // SAFETY: the kernel pins the pages; they stay pinned when they are unmapped.
        unsafe { ring.submitter().register_buffers(&vectors)? };
        Ok(Some(Self { ring, chunks }))
    }

    /// Buffers.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The ring to clone from.
    pub(crate) fn source(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// The buffer that holds all of a segment.
    pub(crate) fn find(&self, segment: &Segment) -> Option<u16> {
        let start = segment.base() as usize;
        let at =
            self.chunks.partition_point(|chunk| chunk.base() as usize <= start).checked_sub(1)?;
        let chunk = self.chunks[at];
        let fits = start - chunk.base() as usize + segment.len() <= chunk.len();
        fits.then_some(at as u16)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_engine::testing::{has_io_uring, skipped};
    use rtvirtio_vhost::session::testing::memory as guest;
    use rtvirtio_virtq::memory::{Region, RegionSpec};

    use super::*;

    #[test]
    fn what_a_region_has_no_pages_for_is_not_registered_and_gets_none() {
        const MIB: u64 = 1 << 20;
        if !has_io_uring() {
            return;
        }
        let file = guest(64 * MIB);
        for at in [8 * MIB, 20 * MIB] {
            rustix::io::pwrite(&file, &vec![1; 2 * MIB as usize], at).unwrap();
        }
        let spec = |size, offset| RegionSpec { guest: 0, size, front_end: 1 << 30, offset };
        // Behind a part that is not shared.
        let region = Region::map(spec(63 * MIB, MIB), file.try_clone().unwrap()).unwrap();
        let base = region.segment().base() as usize;
        let memory = Memory::new(vec![Arc::new(region)]).unwrap();
        let buffers = match FixedBuffers::register(&memory, true) {
            Ok(buffers) => buffers.unwrap(),
            Err(error) => return skipped(format_args!("memory cannot be registered: {error}")),
        };
        let pages = rustix::fs::fstat(&file).unwrap().st_blocks * 512 / MIB as i64;
        assert_eq!(pages, 4);
        let at = |mib: u64, len| Segment::new((base + (mib * MIB) as usize) as *mut u8, len);
        assert_eq!(buffers.find(&at(7, 4096)), Some(0));
        assert_eq!(buffers.find(&at(20, MIB as usize)), Some(1));
        for outside in [at(0, 1), at(9, 1), at(8, 2 * MIB as usize), at(62, 4096)] {
            assert_eq!(buffers.find(&outside), None);
        }
        // Nothing to register is no error.
        let nothing = guest(MIB);
        let empty = Memory::new(vec![Arc::new(Region::map(spec(MIB, 0), nothing).unwrap())]);
        assert!(FixedBuffers::register(&empty.unwrap(), true).unwrap().is_none());
    }
}
