//! The functions that programs find here in place of the C library's, as its header files declare them.
//!
//! Only calls that carry their offset. `read` and `write` move the position of the open file, which other
//! descriptors, threads and processes may share; the kernel moves it under a lock that a ring does not
//! take. `fsync` always goes to a worker of the kernel on a ring, which is longer than the plain call.
//! `open`, `dup`, `close`, `fork` and others need not be known of, since nothing is remembered that they would
//! change (see [`crate::hints`], [`crate::identity`] and [`crate::process`]).

use std::ffi::{c_int, c_ulong, c_void};
use std::time::Instant;

use libc::{iovec, off64_t, size_t, ssize_t};

use crate::next::{Symbol, address};
use crate::short::{Call, Direction, Memory, Outcome};
use crate::statistics::{self, Way};
use crate::{process, short};

type Positional = unsafe extern "C-unwind" fn(c_int, *mut c_void, size_t, off64_t) -> ssize_t;
type Checked = unsafe extern "C-unwind" fn(c_int, *mut c_void, size_t, off64_t, size_t) -> ssize_t;
type Vectored = unsafe extern "C-unwind" fn(c_int, *const iovec, c_int, off64_t) -> ssize_t;
type Flagged = unsafe extern "C-unwind" fn(c_int, *const iovec, c_int, off64_t, c_int) -> ssize_t;
type Prctl = unsafe extern "C-unwind" fn(c_int, ...) -> c_int;

/// The next definition of a function, as a pointer of its type.
macro_rules! next {
    ($symbol:ident as $kind:ty) => {
        // SAFETY: the C library's function of that name, which has that type, or null, which is `None`.
        unsafe { std::mem::transmute::<*mut c_void, Option<$kind>>(address(Symbol::$symbol)) }
    };
}

fn fail(errno: c_int) -> ssize_t {
    // SAFETY: the C library's, always there.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the calling thread's own.
    unsafe { place.write(errno) };
    -1
}

/// Does a call by the short path or the plain one, as is best.
///
/// No frame here has a destructor: the plain call may unwind them, if the thread is cancelled.
///
/// # Safety
/// The memory is what the program passed.
unsafe fn transfer(call: &Call, plain: impl FnOnce() -> Option<ssize_t>) -> ssize_t {
    let began = statistics::began();
    // SAFETY: by the caller's promise.
    let (result, way) = match unsafe { short::attempt(call) } {
        Outcome::Done(bytes, way) => (bytes as ssize_t, way),
        Outcome::TooLarge => (fail(libc::EFBIG), Way::Spun),
        Outcome::Plain(way) => {
            let asked = (way == Way::WithoutToken).then(Instant::now);
            let result = plain().unwrap_or_else(|| fail(libc::ENOSYS));
            if let Some(asked) = asked {
                short::learn(asked.elapsed());
            }
            (result, way)
        }
    };
    statistics::ended(began, way);
    result
}

macro_rules! positional {
    ($($name:ident: $direction:ident, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// As of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            buffer: *mut c_void,
            count: size_t,
            offset: off64_t,
        ) -> ssize_t {
            let memory = Memory::Buffer(buffer, count);
            let call = Call { direction: Direction::$direction, fd, memory, offset };
            let plain = || {
                let next = next!($name as Positional)?;
                // SAFETY: by the caller's promise.
                Some(unsafe { next(fd, buffer, count, offset) })
            };
            // SAFETY: by the caller's promise.
            unsafe { transfer(&call, plain) }
        }
    )*};
}

positional! {
    pread: Read, "pread(2)";
    pread64: Read, "pread(2) of programs with 64-bit offsets";
    pwrite: Write, "pwrite(2)";
    pwrite64: Write, "pwrite(2) of programs with 64-bit offsets";
}

macro_rules! checked {
    ($($name:ident: $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// As of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            buffer: *mut c_void,
            count: size_t,
            offset: off64_t,
            size: size_t,
        ) -> ssize_t {
            // What is more than the buffer holds ends the program, in the plain call; a call of no
            // bytes is always plain.
            let count_if_fits = if count <= size { count } else { 0 };
            let memory = Memory::Buffer(buffer, count_if_fits);
            let call = Call { direction: Direction::Read, fd, memory, offset };
            let plain = || {
                let next = next!($name as Checked)?;
                // SAFETY: by the caller's promise.
                Some(unsafe { next(fd, buffer, count, offset, size) })
            };
            // SAFETY: by the caller's promise.
            unsafe { transfer(&call, plain) }
        }
    )*};
}

checked! {
    __pread_chk: "pread(2) of programs that were compiled with `_FORTIFY_SOURCE`";
    __pread64_chk: "pread(2) of such programs with 64-bit offsets";
}

/// Of a count of segments, whose type is signed.
fn segments(at: *const iovec, count: c_int) -> Memory {
    Memory::Segments(at, usize::try_from(count).unwrap_or(0))
}

macro_rules! vectored {
    ($($name:ident: $direction:ident, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// As of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            vectors: *const iovec,
            count: c_int,
            offset: off64_t,
        ) -> ssize_t {
            let memory = segments(vectors, count);
            let call = Call { direction: Direction::$direction, fd, memory, offset };
            let plain = || {
                let next = next!($name as Vectored)?;
                // SAFETY: by the caller's promise.
                Some(unsafe { next(fd, vectors, count, offset) })
            };
            // SAFETY: by the caller's promise.
            unsafe { transfer(&call, plain) }
        }
    )*};
}

vectored! {
    preadv: Read, "preadv(2)";
    preadv64: Read, "preadv(2) of programs with 64-bit offsets";
    pwritev: Write, "pwritev(2)";
    pwritev64: Write, "pwritev(2) of programs with 64-bit offsets";
}

macro_rules! flagged {
    ($($name:ident: $direction:ident, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// As of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            fd: c_int,
            vectors: *const iovec,
            count: c_int,
            offset: off64_t,
            flags: c_int,
        ) -> ssize_t {
            // Whoever passes flags knows what is wanted; a call of no segments is always plain.
            let memory = segments(vectors, if flags == 0 { count } else { 0 });
            let call = Call { direction: Direction::$direction, fd, memory, offset };
            let plain = || {
                let next = next!($name as Flagged)?;
                // SAFETY: by the caller's promise.
                Some(unsafe { next(fd, vectors, count, offset, flags) })
            };
            // SAFETY: by the caller's promise.
            unsafe { transfer(&call, plain) }
        }
    )*};
}

flagged! {
    preadv2: Read, "preadv2(2)";
    preadv64v2: Read, "preadv2(2) of programs with 64-bit offsets";
    pwritev2: Write, "pwritev2(2)";
    pwritev64v2: Write, "pwritev2(2) of programs with 64-bit offsets";
}

/// prctl(2), for what precedes a sandbox: from then on all calls are plain, since its filter may end the
/// program for a system call that it does not know.
///
/// # Safety
/// As of the C library's function of this name.
// The C library's is variadic. What was not passed is a register's or the stack's leftover here, is passed
// on as such, and is not looked at by the kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    if matches!(option, libc::PR_SET_NO_NEW_PRIVS | libc::PR_SET_SECCOMP) {
        process::disarm();
    }
    match next!(prctl as Prctl) {
        // SAFETY: by the caller's promise.
        Some(next) => unsafe { next(option, second, third, fourth, fifth) },
        None => fail(libc::ENOSYS) as c_int,
    }
}

/// Whether the process may call anything: no filter of system calls is on it.
pub(crate) fn is_unfiltered() -> bool {
    let unused: c_ulong = 0;
    // SAFETY: looks at a number of the process's.
    let filter = next!(prctl as Prctl)
        .map(|next| unsafe { next(libc::PR_GET_SECCOMP, unused, unused, unused, unused) });
    filter == Some(0)
}
