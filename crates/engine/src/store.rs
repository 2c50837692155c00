//! A disk's content in anonymous memory: zero until written.
//!
//! Guest memory and store may be written at any time by others (the guest, another IOThread), as
//! on a real disk whose requests overlap: bytes are copied between raw pointers, never seen
//! through references.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rtvirtio_units::Bytes;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Segment;

const PAGE: u64 = 4096;
/// Growing in place needs address space, not memory: this many times the first capacity is set
/// aside for it.
const ROOM: u64 = 16;

/// Bytes in anonymous memory.
#[derive(Debug)]
pub(crate) struct Store {
    base: NonNull<u8>,
    reserved: usize,
    capacity: AtomicU64,
    /// Where the disk ends by the last change of its size, behind which all bytes are zero.
    resizing: Mutex<u64>,
}

// SAFETY: the mapping belongs to the store alone and lives as long as it; its bytes are reached
// by raw copies only.
unsafe impl Send for Store {}
// SAFETY: as above; racing copies give each reader some mixture of old and new bytes, as a disk does.
unsafe impl Sync for Store {}

impl Store {
    pub(crate) fn new(capacity: Bytes) -> Result<Self, Errno> {
        let size = round_up(capacity.get().max(1)).ok_or(Errno::NOMEM)?;
        let roomy = size.saturating_mul(ROOM);
        let (base, reserved) = match map(roomy) {
            Ok(base) => (base, roomy),
            // Limits on address space, or overcommit that counts it: no room to grow.
            Err(_) => (map(size)?, size),
        };
        let store = Self {
            base,
            reserved: reserved as usize,
            capacity: AtomicU64::new(capacity.get()),
            resizing: Mutex::new(capacity.get()),
        };
        // Both only help: fewer TLB misses, and no disk content in a core dump.
        let _ = store.advise(0, reserved, Advice::LinuxHugepage);
        let _ = store.advise(0, reserved, Advice::LinuxDontDump);
        Ok(store)
    }

    pub(crate) fn capacity(&self) -> Bytes {
        Bytes::new(self.capacity.load(Ordering::Relaxed))
    }

    /// How far it can grow.
    pub(crate) const fn max_capacity(&self) -> u64 {
        self.reserved as u64
    }

    /// Changes the capacity; what is cut off is gone, and reads as zeroes when it comes back.
    pub(crate) fn resize(&self, capacity: Bytes) -> Result<(), Errno> {
        let new = capacity.get();
        if new > self.reserved as u64 {
            return Err(Errno::FBIG);
        }
        let mut end = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        self.capacity.store(new, Ordering::Relaxed);
        let old = std::mem::replace(&mut *end, new);
        if new < old {
            self.zero(new, old - new, true)?;
        }
        Ok(())
    }

    /// It ends there at the latest, until its size is changed.
    pub(crate) fn refuse_beyond(&self, capacity: Bytes) {
        self.capacity.fetch_min(capacity.get(), Ordering::Relaxed);
    }

    /// It ends again where the last change of its size has left it.
    pub(crate) fn admit_all(&self) {
        let end = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        self.capacity.store(*end, Ordering::Relaxed);
    }

    /// Takes the memory now, so that no request waits for a page.
    pub(crate) fn populate(&self) -> Result<(), Errno> {
        let size = round_up(self.capacity().get()).ok_or(Errno::NOMEM)?;
        self.advise(0, size, Advice::LinuxPopulateWrite)
    }

    /// Where `length` bytes at `offset` are. The bound is the mapping, not the capacity: a
    /// request that a resize overtakes still finds memory.
    fn at(&self, offset: u64, length: u64) -> Result<NonNull<u8>, Errno> {
        if offset.checked_add(length).is_none_or(|end| end > self.reserved as u64) {
            return Err(Errno::IO);
        }
        // SAFETY: the offset lies within the mapping, or at its end.
        Ok(unsafe { self.base.add(offset as usize) })
    }

    /// Copies from the store into the segments.
    pub(crate) fn read(&self, offset: u64, segments: &[Segment]) -> Result<(), Errno> {
        let mut at = offset;
        for segment in segments {
            let from = self.at(at, segment.len() as u64)?;
            // SAFETY: `from` has so many bytes, the caller's segment too, and they are different
            // mappings.
            unsafe { from.as_ptr().copy_to_nonoverlapping(segment.base(), segment.len()) };
            at += segment.len() as u64;
        }
        Ok(())
    }

    /// Copies from the segments into the store.
    pub(crate) fn write(&self, offset: u64, segments: &[Segment]) -> Result<(), Errno> {
        let mut at = offset;
        for segment in segments {
            let to = self.at(at, segment.len() as u64)?;
            // SAFETY: as in `read`.
            unsafe { store(to.as_ptr(), segment.base(), segment.len()) };
            at += segment.len() as u64;
        }
        Ok(())
    }

    /// Zeroes the range; with `unmap`, gives its whole pages back.
    pub(crate) fn zero(&self, offset: u64, length: u64, unmap: bool) -> Result<(), Errno> {
        let end = offset.checked_add(length).ok_or(Errno::IO)?;
        self.at(offset, length)?;
        let first_page = round_up(offset).ok_or(Errno::IO)?;
        let last_page = end - end % PAGE;
        if unmap && first_page < last_page {
            self.fill(offset, first_page - offset)?;
            self.advise(first_page, last_page - first_page, Advice::LinuxDontNeed)?;
            self.fill(last_page, end - last_page)
        } else {
            self.fill(offset, length)
        }
    }

    fn fill(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let at = self.at(offset, length)?;
        // SAFETY: `at` has so many bytes.
        unsafe { at.as_ptr().write_bytes(0, length as usize) };
        Ok(())
    }

    fn advise(&self, offset: u64, length: u64, advice: Advice) -> Result<(), Errno> {
        let at = self.at(offset, length)?;
        // SAFETY: the range lies within the store's own private anonymous mapping, of which no
        // reference exists.
        unsafe { rustix::mm::madvise(at.as_ptr().cast(), length as usize, advice) }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the mapping is the store's own, and nobody has a pointer into it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.reserved) };
    }
}

/// Copies past the caches where it can: what is written to a disk is seldom read at once, and the
/// lines that it would replace need not be fetched first.
///
/// # Safety
/// Both ranges have so many bytes and do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn store(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    /// A cache line.
    const LINE: usize = 64;
    const VECTOR: usize = size_of::<__m128i>();

    if !to.addr().is_multiple_of(LINE) || !bytes.is_multiple_of(LINE) {
        // SAFETY: as the caller promises.
        return unsafe { to.copy_from_nonoverlapping(from, bytes) };
    }
    for line in (0..bytes).step_by(LINE) {
        let vectors: [__m128i; LINE / VECTOR] = std::array::from_fn(|i| {
            let from = from.wrapping_add(line + i * VECTOR).cast();
            // SAFETY: within the range; an unaligned load.
            unsafe { _mm_loadu_si128(from) }
        });
        for (i, vector) in vectors.into_iter().enumerate() {
            let to = to.wrapping_add(line + i * VECTOR).cast();
            // SAFETY: within the range, and aligned since its start is.
            unsafe { _mm_stream_si128(to, vector) };
        }
    }
    // Streamed stores are not ordered with the used ring's: whoever is told that the write is
    // done must find it.
    // SAFETY: every x86-64 has SSE.
    unsafe { _mm_sfence() };
}

/// Copies.
///
/// # Safety
/// Both ranges have so many bytes and do not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn store(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: as the caller promises.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
}

fn map(size: u64) -> Result<NonNull<u8>, Errno> {
    let size = usize::try_from(size).map_err(|_| Errno::NOMEM)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let base = unsafe { rustix::mm::mmap_anonymous(null_mut(), size, protection, flags) }?;
    NonNull::new(base.cast()).ok_or(Errno::NOMEM)
}

/// The next multiple of the page size.
fn round_up(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_behind_the_new_end_while_it_is_set_is_gone() {
        let store = Store::new(Bytes::new(8192)).unwrap();
        store.refuse_beyond(Bytes::new(4096));
        assert_eq!(store.capacity(), Bytes::new(4096));
        // A request that had been admitted before.
        let mut bytes = [7_u8; 512];
        let segment = [Segment::new(bytes.as_mut_ptr(), 512)];
        store.write(4096, &segment).unwrap();
        store.resize(Bytes::new(4096)).unwrap();
        store.resize(Bytes::new(8192)).unwrap();
        store.read(4096, &segment).unwrap();
        assert_eq!(bytes, [0; 512]);
        // A change that was refused leaves the end where it was.
        store.refuse_beyond(Bytes::new(512));
        store.admit_all();
        assert_eq!(store.capacity(), Bytes::new(8192));
    }

    #[test]
    fn stored_ranges_of_any_length_and_alignment_are_exact_and_no_longer() {
        let from: Vec<u8> = (0..512_usize).map(|i| (i % 251) as u8 + 1).collect();
        for (at, skip, bytes) in
            [(0, 0, 256), (64, 3, 128), (0, 0, 64), (1, 0, 64), (64, 0, 65), (8, 1, 0), (0, 5, 63)]
        {
            let store = Store::new(Bytes::new(4096)).unwrap();
            let to = store.base.as_ptr().wrapping_add(at);
            // SAFETY: each side has 512 bytes, more than are copied.
            unsafe { super::store(to, from.as_ptr().wrapping_add(skip), bytes) };
            let mut found = vec![0; 512];
            let all = [Segment::new(found.as_mut_ptr(), found.len())];
            store.read(0, &all).unwrap();
            assert!(found[..at].iter().all(|&byte| byte == 0), "{at} {skip} {bytes}: before");
            assert_eq!(found[at..at + bytes], from[skip..skip + bytes], "{at} {skip} {bytes}");
            assert!(
                found[at + bytes..].iter().all(|&byte| byte == 0),
                "{at} {skip} {bytes}: after"
            );
        }
    }
}
