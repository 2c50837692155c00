//! What the threads of a process share: settings, tokens, counters, and whether the short path is open.
//!
//! Made by the library's constructor, before any code of the program's own runs, from what `rtvirtio-run` has put
//! into the environment; without that the library does nothing. Whether the path is open, the counters, and the
//! process's slots, lie on a page that a forked child gets as zeroes: so the child's path is closed from its first instruction on,
//! however it was forked, until the handler of fork(2) has opened it anew. A child by `vfork` shares
//! this memory with its parent, and has no ring.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock};

use rtvirtio_completion::{Costs, Mode, Tokens};
use rtvirtio_units::Nanos;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::net::SocketAddrUnix;

use crate::statistics::{self, Counters, Form};
use crate::{calls, next, slots, thread};

/// What `rtvirtio-run` says in the environment: the mode, ...
const MODE: &str = "RTVIRTIO_RUN";
/// ... what waiting costs here (`pauses,look,wake,gap`; ns but for the first), ...
const COSTS: &str = "RTVIRTIO_RUN_COSTS";
/// ... how to say the statistics, if at all, ...
const STATS: &str = "RTVIRTIO_RUN_STATS";
/// ... and where a data plane has slots for this process, if it does.
const SLOTS: &str = "RTVIRTIO_RUN_SLOTS";

/// What `rtvirtio-run` says.
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) costs: Costs,
    pub(crate) slots: Option<SocketAddrUnix>,
    stats: Option<Form>,
}

/// What a thread needs to make its own.
pub(crate) struct Shared {
    pub(crate) settings: &'static Settings,
    pub(crate) tokens: Arc<Tokens>,
}

/// What a forked child gets as zeroes.
struct Page {
    open: AtomicBool,
    counters: Counters,
    slots: slots::Place,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();
static SHARED: AtomicPtr<Shared> = AtomicPtr::new(null_mut());
static PAGE: AtomicPtr<Page> = AtomicPtr::new(null_mut());
/// The program is about to sandbox itself, or has.
static SANDBOXED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// pthread_atfork(3), which the crate libc leaves out for glibc.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

/// Settings, if the short path is open.
pub(crate) fn armed() -> Option<&'static Shared> {
    if !page()?.open.load(Ordering::Acquire) {
        return None;
    }
    shared()
}

/// Closes the short path, in children too.
pub(crate) fn disarm() {
    SANDBOXED.store(true, Ordering::Relaxed);
    if let Some(page) = page() {
        page.open.store(false, Ordering::Relaxed);
    }
}

pub(crate) fn counters() -> Option<&'static Counters> {
    Some(&page()?.counters)
}

/// Where the process's slots are.
pub(crate) fn slots() -> Option<&'static slots::Place> {
    Some(&page()?.slots)
}

fn page() -> Option<&'static Page> {
    // SAFETY: null or mapped by `map`, for good.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

fn shared() -> Option<&'static Shared> {
    // SAFETY: null or leaked by `open`.
    unsafe { SHARED.load(Ordering::Acquire).as_ref() }
}

extern "C" fn constructor() {
    next::resolve_all();
    let (Some(settings), Some(page)) = (settings(), map()) else { return };
    let settings = SETTINGS.get_or_init(|| settings);
    PAGE.store(page, Ordering::Release);
    if settings.stats.is_some() {
        statistics::start();
    }
    if !may_open(settings) {
        return;
    }
    let Ok(tokens) = Tokens::apart() else { return };
    thread::prepare();
    slots::own();
    // SAFETY: a function for the children.
    if unsafe { pthread_atfork(None, None, Some(forked)) } == 0 {
        open(Shared { settings, tokens: Arc::new(tokens) });
    }
}

/// Whether there is a short path for this process at all.
fn may_open(settings: &Settings) -> bool {
    let is_plain = settings.mode == Mode::Interrupt && settings.slots.is_none();
    // The constructors of the program's libraries run before this one, and may have announced a sandbox.
    !is_plain && !SANDBOXED.load(Ordering::Relaxed) && calls::is_unfiltered()
}

extern "C" fn destructor() {
    if let Some(&Settings { mode, stats: Some(form), .. }) = SETTINGS.get() {
        statistics::say(mode, form);
    }
}

/// In a forked child, whose only thread this is.
unsafe extern "C" fn forked() {
    slots::forked();
    let Some(&Shared { settings, ref tokens }) = shared() else { return };
    if SANDBOXED.load(Ordering::Relaxed) {
        return;
    }
    if tokens.renew() {
        open_page();
    } else if let Ok(tokens) = Tokens::apart() {
        // The parent had other threads, so the C library's fork(3) has left the heap whole, and this may allocate.
        open(Shared { settings, tokens: Arc::new(tokens) });
    }
}

fn open(shared: Shared) {
    // Never freed: it stays until the process ends, a child's parent's included.
    SHARED.store(Box::into_raw(Box::new(shared)), Ordering::Release);
    open_page();
}

fn open_page() {
    if let Some(page) = page() {
        page.open.store(true, Ordering::Release);
    }
}

fn map() -> Option<*mut Page> {
    let length = size_of::<Page>();
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new memory, at a place that the kernel chooses.
    let at =
        unsafe { rustix::mm::mmap_anonymous(null_mut(), length, protection, MapFlags::PRIVATE) };
    let at = at.ok()?;
    // SAFETY: the memory mapped above. If it fails there is no path at all, and the page is left.
    unsafe { rustix::mm::madvise(at, length, Advice::LinuxWipeOnFork) }.ok()?;
    // All zeroes are a `Page`.
    Some(at.cast())
}

fn settings() -> Option<Settings> {
    let mode = std::env::var(MODE).ok()?.parse().ok()?;
    let costs = costs(&std::env::var(COSTS).ok()?)?;
    let stats = match std::env::var(STATS) {
        Ok(form) => Some(form.parse().ok()?),
        Err(_) => None,
    };
    let slots = match std::env::var_os(SLOTS) {
        Some(path) => Some(SocketAddrUnix::new(path).ok()?),
        None => None,
    };
    Some(Settings { mode, costs, slots, stats })
}

fn costs(text: &str) -> Option<Costs> {
    let numbers: Vec<u64> = text.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let [pauses, look, wake, gap] = numbers[..] else { return None };
    let [look, wake, gap] = [look, wake, gap].map(Nanos::new);
    // Without a pause between two looks at the clock a thread that spins would never look for its completion.
    let pauses = u32::try_from(pauses).ok().filter(|&pauses| pauses > 0)?;
    Some(Costs { pauses, look, wake, gap })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_read_as_they_are_written_and_nothing_else_is() {
        let read = costs("5,225,20000,40000").unwrap();
        assert_eq!((read.pauses, read.look, read.gap), (5, Nanos::new(225), Nanos::new(40_000)));
        let wrong = ["", "5,225,20000", "5,225,20000,x", "5,225,20000,1,2", "-1,2,3,4", "0,2,3,4"];
        for wrong in wrong {
            assert!(costs(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn library_does_nothing_unless_it_is_told_to() {
        assert!(armed().is_none() && counters().is_none());
        disarm();
        assert!(armed().is_none());
        // Nor does a constructor that comes later open it.
        let costs = costs("5,225,20000,40000").unwrap();
        assert!(!may_open(&Settings { mode: Mode::Poll, costs, slots: None, stats: None }));
    }
}
