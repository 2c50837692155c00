//! What is registered with an IOThread's ring: the disks' files and the guests' memory.
//!
//! All of it is an economy: what cannot be registered is used unregistered.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::IoUring;
use io_uring::types::CloneBuffersFlags;
use rtvirtio_engine::Segment;

use crate::fixed::FixedBuffers;
use crate::queue::Queue;

/// Files that a ring may have.
const FILES: u32 = 1024;
/// Buffers that a ring may have (the kernel's limit, io_uring/rsrc.c).
const BUFFERS: u32 = 1 << 14;

/// What of a queue is registered.
#[derive(Default)]
pub(super) struct Registered {
    /// Index of its disk's file.
    pub(super) file: Option<u32>,
    /// Its memory, and the index of its first buffer.
    buffers: Option<(Arc<FixedBuffers>, u16)>,
}

impl Registered {
    /// The registered buffer that holds all of a segment.
    pub(super) fn buffer(&self, segment: &Segment) -> Option<u16> {
        let (buffers, first) = self.buffers.as_ref()?;
        buffers.find(segment).map(|at| first + at)
    }
}

/// Ranges of a table's slots, by what holds them.
struct Table {
    size: u32,
    /// By address of what is registered: first slot, slots, users.
    held: HashMap<usize, (u32, u32, usize)>,
}

enum Claim {
    New(u32),
    Shared(u32),
}

impl Table {
    fn new(size: u32) -> Self {
        Self { size, held: HashMap::new() }
    }

    /// The slots of `what`, shared if it has some already.
    fn claim(&mut self, what: usize, slots: u32) -> Option<Claim> {
        if let Some((first, _, users)) = self.held.get_mut(&what) {
            *users += 1;
            return Some(Claim::Shared(*first));
        }
        let mut ranges: Vec<(u32, u32)> = self.held.values().map(|&(at, n, _)| (at, n)).collect();
        ranges.sort_unstable();
        let mut first = 0;
        for (at, n) in ranges {
            if first + slots <= at {
                break;
            }
            first = at + n;
        }
        if first + slots > self.size {
            return None;
        }
        self.held.insert(what, (first, slots, 1));
        Some(Claim::New(first))
    }

    /// The slots that are free now, if that was the last user.
    fn release(&mut self, what: usize) -> Option<(u32, u32)> {
        let (first, slots, users) = self.held.get_mut(&what)?;
        *users -= 1;
        let freed = (*first, *slots);
        if *users > 0 {
            return None;
        }
        self.held.remove(&what);
        Some(freed)
    }
}

/// The tables of one ring.
pub(super) struct Resources {
    files: Table,
    buffers: Table,
}

impl Resources {
    pub(super) fn new(ring: &IoUring) -> Self {
        let submitter = ring.submitter();
        let files = submitter.register_files_sparse(FILES).map_or(0, |()| FILES);
        let buffers = submitter.register_buffers_sparse(BUFFERS).map_or(0, |()| BUFFERS);
        Self { files: Table::new(files), buffers: Table::new(buffers) }
    }

    /// Registers what a queue uses.
    pub(super) fn add(&mut self, ring: &IoUring, queue: &Queue) -> Registered {
        Registered { file: self.add_file(ring, queue), buffers: self.add_buffers(ring, queue) }
    }

    fn add_file(&mut self, ring: &IoUring, queue: &Queue) -> Option<u32> {
        let disk = queue.disk()?;
        let device = Arc::as_ptr(disk) as usize;
        let fd = disk.engine().file()?.as_raw_fd();
        match self.files.claim(device, 1)? {
            Claim::Shared(at) => Some(at),
            Claim::New(at) if ring.submitter().register_files_update(at, &[fd]).is_ok() => Some(at),
            Claim::New(_) => {
                self.files.release(device);
                None
            }
        }
    }

    fn add_buffers(&mut self, ring: &IoUring, queue: &Queue) -> Option<(Arc<FixedBuffers>, u16)> {
        let buffers = queue.buffers()?;
        let (what, slots) = (Arc::as_ptr(buffers) as usize, buffers.len() as u32);
        let first = match self.buffers.claim(what, slots)? {
            Claim::Shared(first) => first,
            Claim::New(first) => {
                let replace = CloneBuffersFlags::DST_REPLACE;
                let submitter = ring.submitter();
                let source = buffers.source();
                if submitter
                    .register_buffers_clone_offset(source, 0, first, slots, replace)
                    .is_err()
                {
                    self.buffers.release(what);
                    return None;
                }
                first
            }
        };
        Some((Arc::clone(buffers), first as u16))
    }

    /// A queue leaves with what was registered for it. What is still in flight keeps its own
    /// reference in the kernel.
    pub(super) fn remove(&mut self, ring: &IoUring, queue: &Queue, registered: Registered) {
        if registered.file.is_some()
            && let Some(disk) = queue.disk()
            && let Some((at, _)) = self.files.release(Arc::as_ptr(disk) as usize)
        {
            let _ = ring.submitter().register_files_update(at, &[-1]);
        }
        if let Some((buffers, _)) = registered.buffers
            && let Some((first, slots)) = self.buffers.release(Arc::as_ptr(&buffers) as usize)
        {
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            let nothing = vec![none; slots as usize];
            let tags = vec![0; slots as usize];
            // SAFETY: empties slots that no later request names.
            let _ =
                unsafe { ring.submitter().register_buffers_update(first, &nothing, Some(&tags)) };
        }
    }
}
