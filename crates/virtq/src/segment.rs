//! A piece of a guest's memory.

/// A contiguous piece of a guest's memory, mapped in this process: a `struct iovec`.
///
/// The guest may write to it at any time, so it is never a Rust reference.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Segment(libc::iovec);

// SAFETY: a pointer and a length without an owner; whoever uses the pointer states why it is valid.
unsafe impl Send for Segment {}

impl Segment {
    /// No bytes.
    pub const EMPTY: Self = Self::new(std::ptr::null_mut(), 0);

    /// `length` bytes at `base`.
    #[must_use]
    pub const fn new(base: *mut u8, length: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: length })
    }

    /// Its first byte.
    #[must_use]
    pub const fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// Has the CPU fetch its first cache line, where it can be asked to.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which no address makes fault.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(self.base().cast());
        }
    }

    /// Has the CPU fetch the cache lines of its first `bytes` to read them, where it can be asked to.
    #[inline]
    pub fn prefetch_start(&self, bytes: usize) {
        for line in self.lines(bytes) {
            Self::new(line, 1).prefetch();
        }
    }

    /// The same to write them: a line that another CPU has is taken from it at once, and not when it is written.
    #[inline]
    pub fn prefetch_start_to_write(&self, bytes: usize) {
        for line in self.lines(bytes) {
            // As an instruction of its own: the intrinsic prefetches to read unless the whole program may use PRFCHW.
            // Every CPU of 64 bits knows it, or does nothing.
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a hint, which no address makes fault.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = line;
        }
    }

    /// A byte of each cache line that its first `bytes` lie in.
    #[inline]
    fn lines(&self, bytes: usize) -> impl Iterator<Item = *mut u8> {
        const LINE: usize = 64;
        let within = self.base() as usize % LINE;
        let base = self.base().wrapping_sub(within);
        let end = within + bytes.min(self.len());
        (0..end).step_by(LINE).map(move |at| base.wrapping_add(at))
    }

    /// Drops the first `bytes`; all of them if there are fewer.
    #[inline]
    pub fn advance(&mut self, bytes: usize) {
        let bytes = bytes.min(self.len());
        *self = Self::new(self.base().wrapping_add(bytes), self.len() - bytes);
    }
}

impl Default for Segment {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p}+{}", self.base(), self.len())
    }
}
