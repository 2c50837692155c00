//! A thread's signals, held back for a while.

use std::mem::MaybeUninit;

/// Bytes of the kernel's set of signals.
const SET: usize = size_of::<u64>();

/// The calling thread's signals, blocked until this is dropped: all of them, those of the C library's own too,
/// one of which can unwind the thread. The C library's functions would leave those out.
pub(crate) struct Signals {
    before: u64,
}

impl Signals {
    pub(crate) fn block() -> Self {
        let (all, mut before) = (u64::MAX, MaybeUninit::<u64>::zeroed());
        // SAFETY: two sets of the kernel's size. The call cannot fail, so `errno` stays.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, &mut before, SET)
        };
        // SAFETY: zeroed, and written by the kernel.
        Self { before: unsafe { before.assume_init() } }
    }

    /// Takes back the signals that a failed write has raised.
    pub(crate) fn take_back(&self) {
        let raised = [libc::SIGPIPE, libc::SIGXFSZ];
        let set: u64 = raised.iter().map(|signal| 1 << (signal - 1)).sum();
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let unasked = std::ptr::null_mut::<libc::siginfo_t>();
        for _ in raised {
            // SAFETY: a set of the kernel's size, and a time.
            unsafe { libc::syscall(libc::SYS_rt_sigtimedwait, &set, unasked, &now, SET) };
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<u64>();
        // SAFETY: a set of the kernel's size. The call cannot fail, so `errno` stays.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &self.before, none, SET)
        };
    }
}
