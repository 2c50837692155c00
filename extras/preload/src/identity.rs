//! What a descriptor is, asked of the kernel.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use rtvirtio_completion::slots::FileIdentity;
use rustix::fs::OFlags;

use crate::short::Direction;

/// What direct I/O goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) identity: FileIdentity,
    /// Whether it was opened for the direction that was asked about.
    pub(crate) is_open_for: bool,
}

/// Whether a call on `fd` may take the ring: direct I/O on a regular file or block device.
pub(crate) fn is_for_the_ring(fd: c_int, direction: Direction) -> bool {
    look(fd, direction).is_some()
}

/// The regular file or block device on which a call on `fd` would do direct I/O. `None`: it is something else.
///
/// Two system calls, which leave `errno` alone. The descriptor's flags belong to the open file, which
/// other processes may have too: only the kernel knows them.
pub(crate) fn look(fd: c_int, direction: Direction) -> Option<File> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the number is only looked up, and only during this call; that it may be nobody's, or soon
    // somebody else's, is what is asked.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd).ok()?;
    if !flags.contains(OFlags::DIRECT) {
        return None;
    }
    // To append twice is not to append once. Synchronous writes complete in a worker of the kernel: to look
    // for that is not short.
    let unfit = OFlags::APPEND | OFlags::SYNC | OFlags::DSYNC;
    if direction == Direction::Write && flags.intersects(unfit) {
        return None;
    }
    let other = match direction {
        Direction::Read => OFlags::WRONLY,
        Direction::Write => OFlags::RDONLY,
    };
    // O_DIRECT of a pipe means something else.
    let identity = FileIdentity::of(&rustix::fs::fstat(fd).ok()?)?;
    Some(File { identity, is_open_for: flags & OFlags::RWMODE != other })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn pipe_in_packet_mode_is_not_for_the_ring() {
        let mut ends = [0; 2];
        // SAFETY: the array takes the two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_DIRECT) }, 0);
        for end in ends {
            assert!(!is_for_the_ring(end, Direction::Read));
            // SAFETY: made above, and used no more.
            unsafe { libc::close(end) };
        }
    }

    #[test]
    fn buffered_file_and_unused_numbers_are_not_for_the_ring() {
        let file: File = tempfile::tempfile().unwrap();
        assert!(!is_for_the_ring(file.as_raw_fd(), Direction::Read));
        assert!(!is_for_the_ring(-1, Direction::Read));
        assert!(!is_for_the_ring(c_int::MAX, Direction::Write));
    }
}
