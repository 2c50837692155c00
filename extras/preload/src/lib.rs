//! The library that `rtvirtio-run` loads into programs: their positional direct I/O takes a short path.
//!
//! Problem. A thread that calls `pread` on a fast device sleeps until the device's interrupt wakes it up,
//! and the wake-up may take longer than the device does.
//!
//! Approach. Calls that say where in the file they read or write (`pread`, `pwrite` and their vectored
//! and 64-bit forms) on descriptors with `O_DIRECT` are submitted to a ring of the calling thread's own,
//! and the thread looks for the completion itself for as long as the `completion` room gives it leave to.
//! Without leave the call is the plain one, which is then the cheapest.
//!
//! The plain call stays the authority: whatever the ring does not answer with exactly what was asked for
//! (an error, a short transfer, a request that would have had to wait for something else than the device)
//! is asked again of the C library, and that answer is the program's. Such a repetition does no harm, since
//! a positional transfer can be done twice; appending writes, of which that is not true, never take the
//! ring.
//!
//! Where a data plane on this host owns the disk and has *slots* for the process, a call on that disk is left to
//! its thread, which polls for all processes: it goes through memory that both have mapped, and the waiting
//! thread looks, or sleeps, in the same way (`slots`).
//!
//! # Terms
//! A *short* call went by the ring or a slot; a *plain* one is the C library's. *Next* is the definition of a
//! function behind ours, the C library's or another preloaded library's.
//!
//! # Properties
//! - Descriptors are not tracked. Before each short call the kernel is asked what the number is
//!   (`identity`); what is remembered (`hints`) can only make a call plain. So a descriptor that was
//!   closed and reused behind our back is taken for what it is.
//! - The ring has no descriptor and is private memory (`ring`): a program that closes all descriptors, or
//!   looks for the lowest free one, meets nothing of ours, and a forked child cannot touch its parent's ring.
//! - While a request is in flight its thread's signals are blocked: the program's buffer cannot be left by a
//!   handler that jumps, and no handler finds a ring half used (`short`).
//! - In a forked child everything is plain until `process` has made the child's own state; a child that
//!   shares memory with its parent (`vfork`) has no ring, by the kernel's own check.
//! - Nothing on the path allocates or locks.
//! - A panic would end the program, so there is nothing that indexes or unwraps on the path.

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
compile_error!("the library replaces functions of the GNU C library on 64-bit Linux");

mod calls;
mod hints;
mod identity;
mod next;
mod process;
mod ring;
mod short;
mod signals;
mod slots;
mod statistics;
mod thread;
