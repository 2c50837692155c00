//! Survives memory that goes away under us.
//!
//! A front end that truncates a file it has shared makes every access beyond the new end raise
//! SIGBUS, which ends a process. The handler here replaces the mapping by private zero pages and
//! remembers that it is broken; the access is repeated and succeeds, and whoever serves the VM
//! finds out later. Any other SIGBUS gets the action that was there before ours.
//!
//! The handler may interrupt anything, so what it reads is lock-free: a table of address ranges
//! that grows by blocks and never shrinks.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

use super::MemoryError;

const BLOCK: usize = 512;
const BLOCKS: usize = 128;

struct Entry {
    // 0: free. Written last when the range begins and first when it ends.
    start: AtomicUsize,
    end: AtomicUsize,
    broken: AtomicBool,
}

struct Block([Entry; BLOCK]);

static TABLE: [AtomicPtr<Block>; BLOCKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; BLOCKS];
/// Mappings broken since the process began.
static BROKEN: AtomicUsize = AtomicUsize::new(0);
/// Held by whoever adds or removes a range.
static WRITER: Mutex<()> = Mutex::new(());
static INSTALLED: OnceLock<Result<Previous, Errno>> = OnceLock::new();

struct Previous(libc::sigaction);

/// How many mappings have been broken since the process began: as long as it stays the same,
/// none of anybody's has to be looked at.
#[must_use]
#[inline]
pub fn broken_count() -> usize {
    BROKEN.load(Ordering::Relaxed)
}

/// Guards a range of addresses.
pub(super) struct Guard(&'static Entry);

impl Guard {
    pub(super) fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Acquire)
    }

    /// Ends the guard. Once only.
    pub(super) fn release(&self) {
        self.0.start.store(0, Ordering::Release);
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guard(broken: {})", self.is_broken())
    }
}

/// Guards a mapping of this process's.
pub(super) fn guard(start: usize, length: usize) -> Result<Guard, MemoryError> {
    if let Err(errno) = INSTALLED.get_or_init(install) {
        return Err(MemoryError::System(*errno));
    }
    let _writer = WRITER.lock().unwrap_or_else(PoisonError::into_inner);
    for slot in &TABLE {
        if slot.load(Ordering::Relaxed).is_null() {
            slot.store(Box::into_raw(new_block()), Ordering::Release);
        }
        let block = slot.load(Ordering::Relaxed);
        // SAFETY: not null: a block that is never freed.
        let block: &'static Block = unsafe { &*block };
        let Some(entry) = block.0.iter().find(|e| e.start.load(Ordering::Relaxed) == 0) else {
            continue;
        };
        entry.broken.store(false, Ordering::Relaxed);
        entry.end.store(start + length, Ordering::Relaxed);
        entry.start.store(start, Ordering::Release);
        return Ok(Guard(entry));
    }
    Err(MemoryError::TooManyMappings)
}

fn new_block() -> Box<Block> {
    let entry = |_| Entry {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    };
    Box::new(Block(std::array::from_fn(entry)))
}

fn install() -> Result<Previous, Errno> {
    // SAFETY: all zeroes is a valid sigaction: the default one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let mut previous = action;
    action.sa_sigaction = handle as *const () as usize;
    // On the alternate stack, where the standard library's stack overflow handler runs too.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is async-signal-safe, and both structures are valid.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut previous) };
    if result == 0 {
        Ok(Previous(previous))
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let info = unsafe { &*info };
    let code = info.si_code;
    // SAFETY: all bits are an address; only a fault's, whose code is positive, is used.
    let address = unsafe { info.si_addr() } as usize;
    if code > 0 && replace(address) {
        return;
    }
    // SAFETY: plain data; a previous one of all zeroes is the default action.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // `get` of an initialised OnceLock is one atomic load.
    if let Some(Ok(found)) = INSTALLED.get() {
        previous = found.0;
    }
    // SAFETY: async-signal-safe, with valid arguments.
    unsafe { libc::sigaction(signal, &raw const previous, std::ptr::null_mut()) };
    if code <= 0 {
        // Sent by a process, so that no access is going to repeat it.
        // SAFETY: async-signal-safe; delivered when this handler has returned.
        unsafe { libc::raise(signal) };
    }
}

/// Puts zeroes where the address is guarded; whether it is.
fn replace(address: usize) -> bool {
    for slot in &TABLE {
        let block = slot.load(Ordering::Acquire);
        if block.is_null() {
            return false;
        }
        // SAFETY: not null: a block that is never freed.
        let block: &'static Block = unsafe { &*block };
        for entry in &block.0 {
            let start = entry.start.load(Ordering::Acquire);
            let end = entry.end.load(Ordering::Acquire);
            // The second look tells a range from the halves of two that followed each other.
            if start == 0
                || !(start..end).contains(&address)
                || entry.start.load(Ordering::Acquire) != start
            {
                continue;
            }
            // SAFETY: the range is a mapping whose owner waits for the faulting access, so it
            // stays mapped; mmap is a bare system call.
            let mapped = unsafe {
                libc::mmap(
                    start as *mut libc::c_void,
                    end - start,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if mapped == libc::MAP_FAILED {
                return false;
            }
            entry.broken.store(true, Ordering::Release);
            BROKEN.fetch_add(1, Ordering::Release);
            return true;
        }
    }
    false
}
