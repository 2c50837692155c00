//! Copies from guests' memory and to it, as short and as long as frames are.

/// Copies bytes of which the driver may change those that are its own at any time.
///
/// # Safety
/// Both places are mapped, and one of them at least is this process's own or another guest's.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // Guests overlap with themselves only, and what comes of that is theirs. A call of memmove takes longer than a
    // short copy, which is read whole before any of it is written, as by memmove.
    match length {
        // SAFETY: the caller's promise.
        8..=16 => unsafe { copy_ends::<8>(from, to, length) },
        // SAFETY: the caller's promise.
        17..=32 => unsafe { copy_ends::<16>(from, to, length) },
        // SAFETY: the caller's promise.
        33..=64 => unsafe { copy_ends::<32>(from, to, length) },
        // SAFETY: the caller's promise.
        LONG.. if from.addr() % 16 != to.addr() % 16 => unsafe { copy_long(from, to, length) },
        // SAFETY: the caller's promise.
        _ => unsafe { std::ptr::copy(from, to, length) },
    }
}

/// Bytes from which on a copy between places that differ in their lowest four bits is [`copy_long`]'s.
const LONG: usize = 2048;
/// A cache line.
const LINE: usize = 64;

/// Copies at least [`LONG`] bytes, by vectors. For so many of them the memmove of many a glibc takes `rep movsb` where the CPU says that
/// this is fast (FSRM). On AMD's Zen 4 it is six times slower than vectors if source and target lie nearly, but not quite, alike within
/// their pages (glibc bug 30994), which is for guests to choose, and as fast if their lowest four bits are the same.
///
/// # Safety
/// As [`copy`].
#[inline(never)]
unsafe fn copy_long(from: *const u8, to: *mut u8, length: usize) {
    let copy_line = |at: usize| {
        // SAFETY: the caller's promise: a line ends within the `length` bytes.
        unsafe { std::ptr::copy(from.wrapping_add(at), to.wrapping_add(at), LINE) };
    };
    copy_line(0);
    // A store that lies in one cache line is faster, and a load is not.
    let mut at = LINE - to.addr() % LINE;
    while at + LINE <= length {
        copy_line(at);
        at += LINE;
    }
    copy_line(length - LINE);
}

/// Copies the first and the last `N` of between `N` and 2 `N` bytes.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_ends<const N: usize>(from: *const u8, to: *mut u8, length: usize) {
    let rest = length - N;
    let from = [from, from.wrapping_add(rest)].map(<*const u8>::cast::<[u8; N]>);
    let to = [to, to.wrapping_add(rest)].map(<*mut u8>::cast::<[u8; N]>);
    // SAFETY: the first bytes of what the caller promises.
    let first = unsafe { from[0].read_unaligned() };
    // SAFETY: the last bytes of it.
    let last = unsafe { from[1].read_unaligned() };
    // SAFETY: the first bytes of where the caller promises that they may go.
    unsafe { to[0].write_unaligned(first) };
    // SAFETY: the last bytes of that.
    unsafe { to[1].write_unaligned(last) };
}

#[cfg(test)]
mod tests {
    use rtvirtio_frames::header::MAX_FRAME_BYTES;

    use super::{LONG, copy};

    #[test]
    fn copies_of_any_length_are_whole_and_touch_nothing_else() {
        let from: Vec<u8> = (1..=251).cycle().take(MAX_FRAME_BYTES).collect();
        let lengths = (0..=130).chain(LONG - 1..=LONG + 130).chain([MAX_FRAME_BYTES]);
        for (length, at) in lengths.flat_map(|length| [10, 64, 127].map(|at| (length, at))) {
            let mut to = vec![0; length + 200];
            // SAFETY: both are longer.
            unsafe { copy(from.as_ptr(), to[at..].as_mut_ptr(), length) };
            assert_eq!(to[at..at + length], from[..length], "{length}");
            assert!(to[..at].iter().chain(&to[at + length..]).all(|&byte| byte == 0), "{length}");
        }
    }

    #[test]
    fn copies_within_a_buffer_read_before_they_write() {
        for length in 0..=130 {
            for moved in 1..=40 {
                let mut bytes: Vec<u8> = (0..=255).collect();
                let mut expected = bytes.clone();
                expected.copy_within(20..20 + length, 20 + moved);
                let base = bytes.as_mut_ptr().wrapping_add(20);
                // SAFETY: both places are within the buffer.
                unsafe { copy(base, base.wrapping_add(moved), length) };
                assert_eq!(bytes, expected, "{length} {moved}");
            }
        }
    }
}
