//! What a thread has of its own: a ring and a spinner, made when it first needs them.
//!
//! They lie on pages of private memory that a forked child gets as zeroes (`MADV_WIPEONFORK`): so a child
//! sees by one word that what its thread had was its parent's, however it was forked. Making them neither
//! allocates nor locks, since it may happen in a signal handler.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rtvirtio_completion::Spinner;
use rtvirtio_completion::slots::SLOTS;
use rtvirtio_units::Nanos;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::process::Shared;
use crate::ring::Ring;

/// Zero in a new page and in a forked child's.
const NEW: u32 = 0;
/// All is there.
const READY: u32 = 1;
/// There is neither a ring to be had nor are there slots: all calls are plain.
const WITHOUT: u32 = 2;

/// Keys below this number need no memory to be set (glibc's first block of keys).
const FIRST_KEYS: libc::pthread_key_t = 32;

thread_local! {
    /// Without a destructor, which would be registered, and that allocates.
    static PAGE: Cell<*mut Page> = const { Cell::new(null_mut()) };
}

/// The key by which a thread's page is freed when it ends, plus one; 0: there is none.
static KEY: AtomicU32 = AtomicU32::new(0);

/// What a thread has.
pub(crate) struct Thread {
    /// If the kernel has rings for the library.
    pub(crate) ring: Option<Ring>,
    pub(crate) spinner: Spinner,
    /// The slot that it had last, and how it waits for slots: what these are like, a ring may not be.
    pub(crate) slot: usize,
    pub(crate) slot_spinner: Spinner,
}

/// The start of a thread's memory; the ring's two pages follow.
pub(crate) struct Page {
    state: AtomicU32,
    /// A call of this thread is using the rest.
    occupied: AtomicBool,
    /// How long the last plain call took, ns, that the spinner has not been told; 0: none.
    lasted: AtomicU64,
    /// Set if `state` is [`READY`].
    thread: UnsafeCell<MaybeUninit<Thread>>,
}

/// Bytes of a page, and of those that hold a [`Page`].
fn sizes() -> (usize, usize) {
    // SAFETY: no conditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = usize::try_from(page).unwrap_or(4096);
    (page, size_of::<Page>().next_multiple_of(page))
}

/// The calling thread's page, if it has one.
pub(crate) fn page() -> Option<&'static Page> {
    let at = PAGE.with(Cell::get);
    // SAFETY: null, or mapped by `map`: zeroes, which are a `Page`. It stays until the thread ends.
    unsafe { at.as_ref() }
}

/// A page for the calling thread, which has none; `None`: there is no memory, or it could not be freed again.
pub(crate) fn new_page() -> Option<&'static Page> {
    let at = map()?;
    PAGE.with(|page| page.set(at));
    page()
}

fn map() -> Option<*mut Page> {
    let key = KEY.load(Ordering::Relaxed).checked_sub(1)?;
    let (page, own) = sizes();
    let length = own + 2 * page;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new memory, at a place that the kernel chooses.
    let at =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), length, protection, MapFlags::PRIVATE) };
    let at = at.ok()?;
    // SAFETY: the memory mapped above.
    let wiped = unsafe { rustix::mm::madvise(at, length, Advice::LinuxWipeOnFork) };
    // SAFETY: the key is ours; its values are pages.
    if wiped.is_ok() && unsafe { libc::pthread_setspecific(key, at) } == 0 {
        return Some(at.cast());
    }
    // SAFETY: the memory mapped above, which nobody knows of.
    let _ = unsafe { rustix::mm::munmap(at, length) };
    None
}

/// Prepares for the end of threads. Without it no thread gets a page.
pub(crate) fn prepare() {
    let mut key = 0;
    // SAFETY: `key` takes the new key, and `free` its values.
    let made = unsafe { libc::pthread_key_create(&mut key, Some(free)) } == 0;
    if made && key < FIRST_KEYS {
        KEY.store(key + 1, Ordering::Relaxed);
    }
}

/// Frees the page of a thread that ends. The kernel frees the ring a moment later, and keeps its pages
/// until then.
unsafe extern "C" fn free(at: *mut c_void) {
    PAGE.with(|page| page.set(null_mut()));
    // SAFETY: the value of the key is a page, made by `map`.
    let page = unsafe { &*at.cast::<Page>() };
    if page.state.load(Ordering::Relaxed) == READY {
        // SAFETY: it is there, and the thread, whose last act this is, is not using it.
        let thread = unsafe { &mut *page.thread.get() };
        // SAFETY: as before; it is not used again.
        unsafe { thread.assume_init_drop() };
    }
    let (page, own) = sizes();
    // SAFETY: all of what `map` mapped; nothing refers to it any more.
    let _ = unsafe { rustix::mm::munmap(at, own + 2 * page) };
}

impl Page {
    /// Whether the rest is the caller's now, until [`Self::vacate`].
    pub(crate) fn occupy(&self) -> bool {
        !self.occupied.swap(true, Ordering::Acquire)
    }

    pub(crate) fn vacate(&self) {
        self.occupied.store(false, Ordering::Release);
    }

    /// A plain call took so long. Touches nothing else: the thread's signals are not blocked.
    pub(crate) fn set_lasted(&self, lasted: Nanos) {
        self.lasted.store(lasted.get(), Ordering::Relaxed);
    }

    /// What was set last, once.
    pub(crate) fn lasted(&self) -> Option<Nanos> {
        Some(self.lasted.swap(0, Ordering::Relaxed)).filter(|&ns| ns > 0).map(Nanos::new)
    }

    /// What the thread has, made if need be; `None`: nothing that would make a call short.
    ///
    /// # Safety
    /// The caller occupies the page, and lets go of the result before it is vacated.
    #[allow(clippy::mut_from_ref)] // Held by `occupied`.
    pub(crate) unsafe fn thread(&self, shared: &Shared) -> Option<&mut Thread> {
        // SAFETY: the caller occupies the page, so there is no other reference.
        let thread = unsafe { &mut *self.thread.get() };
        match self.state.load(Ordering::Relaxed) {
            // SAFETY: it was written below, by this process: a child finds NEW.
            READY => return Some(unsafe { thread.assume_init_mut() }),
            NEW => {}
            _ => return None,
        }
        let (page, own) = sizes();
        let start = NonNull::from(self).cast::<u8>();
        // SAFETY: within the memory that `map` mapped.
        let indices = unsafe { start.add(own) };
        // SAFETY: within the memory that `map` mapped.
        let entries = unsafe { indices.add(page) };
        // SAFETY: two pages, the ring's alone until the thread's end: zeroes, since no ring was there.
        let ring = unsafe { Ring::new(indices, entries) }.ok();
        let settings = shared.settings;
        if ring.is_none() && settings.slots.is_none() {
            self.state.store(WITHOUT, Ordering::Relaxed);
            return None;
        }
        let spinner = || Spinner::new(Arc::clone(&shared.tokens), settings.mode, settings.costs);
        // Threads begin to look at different slots.
        let slot = std::ptr::from_ref(self).addr() / page % SLOTS;
        let (spinner, slot_spinner) = (spinner(), spinner());
        let thread = thread.write(Thread { ring, spinner, slot, slot_spinner });
        self.state.store(READY, Ordering::Relaxed);
        Some(thread)
    }
}
