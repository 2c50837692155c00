//! Memory that direct I/O takes.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use rustix::io::Errno;

use crate::Segment;

/// Zeroed bytes at an aligned address.
pub(crate) struct Aligned {
    base: NonNull<u8>,
    layout: Layout,
    length: usize,
}

impl Aligned {
    pub(crate) fn new(length: usize, alignment: usize) -> Result<Self, Errno> {
        let layout = Layout::from_size_align(length.max(1), alignment).map_err(|_| Errno::INVAL)?;
        // SAFETY: the layout has a size above zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(Errno::NOMEM)?;
        Ok(Self { base, layout, length })
    }

    /// The first `length` bytes, or all if there are fewer.
    pub(crate) fn segment(&self, length: usize) -> Segment {
        Segment::new(self.base.as_ptr(), length.min(self.length))
    }

    /// All bytes. No request may be writing to them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: they are initialised (zeroes first), and nothing writes to them while they are
        // borrowed: requests through [`Self::segment`] are synchronous.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
