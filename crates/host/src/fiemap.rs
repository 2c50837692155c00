//! Where a file's data lies on its filesystem's device: the ioctl `FS_IOC_FIEMAP` (kernel
//! `Documentation/filesystems/fiemap.rst`).
//!
//! Only filesystems whose answer is in bytes of their one device are asked, by
//! [`crate::storage`]; btrfs answers with addresses of its own.

// The ioctl's buffer is read and written by the kernel.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// A piece of a file that lies in one piece on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileExtent {
    /// Where it begins within the file, bytes.
    pub logical: u64,
    /// Where it begins on the device, bytes.
    pub physical: u64,
    /// Bytes.
    pub length: u64,
}

/// Extents that one call fetches.
const BATCH: usize = 64;
/// More than this are not fetched: a file so scattered is not worth the memory of following it.
const MAX_EXTENTS: usize = 1 << 17;

/// `struct fiemap` of `linux/fiemap.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Header {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
}

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Raw {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

#[repr(C)]
struct Request {
    header: Header,
    extents: [Raw; BATCH],
}

const FS_IOC_FIEMAP: Opcode = opcode::read_write::<Header>(b'f', 11);
/// `FIEMAP_EXTENT_LAST`.
const LAST: u32 = 1;
/// `FIEMAP_EXTENT_UNKNOWN`, `_DELALLOC`, `_ENCODED`, `_DATA_INLINE`, `_DATA_TAIL`: no address of
/// whole sectors.
const NOWHERE: u32 = 0x2 | 0x4 | 0x8 | 0x200 | 0x400;

/// The extents of the file at `path`, by their place in the file. What the filesystem has not
/// allocated yet is not there: `FIEMAP_FLAG_SYNC` would write out somebody's file for a look at it.
///
/// # Errors
/// It is not to be opened or no regular file, its filesystem does not tell, or it is in more than
/// 2^17 pieces.
pub(crate) fn extents(path: &Path) -> io::Result<Vec<FileExtent>> {
    // A QEMU's command line says which path: opening a FIFO would wait for whoever writes to it,
    // and a terminal would become this process's own.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut found = Vec::new();
    let mut start = 0_u64;
    loop {
        let header =
            Header { start, length: u64::MAX - start, count: BATCH as u32, ..Header::default() };
        let mut request = Request { header, extents: [Raw::default(); BATCH] };
        // SAFETY: the opcode is that of `struct fiemap`, with which the buffer begins.
        let call = unsafe { Updater::<FS_IOC_FIEMAP, Request>::new(&mut request) };
        // SAFETY: behind its header the buffer holds as many extents as that says.
        unsafe { ioctl(&file, call) }?;
        let mapped = request.extents.get(..request.header.mapped as usize).unwrap_or_default();
        for raw in mapped {
            if raw.flags & NOWHERE == 0 && raw.length > 0 {
                let Raw { logical, physical, length, .. } = *raw;
                found.push(FileExtent { logical, physical, length });
            }
        }
        if found.len() > MAX_EXTENTS {
            return Err(io::Error::other("it lies in too many pieces to be followed"));
        }
        match mapped.last() {
            Some(last) if last.flags & LAST == 0 => {
                let next = last.logical.saturating_add(last.length);
                if next <= start {
                    return Ok(found);
                }
                start = next;
            }
            _ => return Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn extents_of_what_is_no_file_are_an_error_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, 0o600.into(), 0).unwrap();
        for path in [pipe.as_path(), directory.path(), Path::new("/dev/null")] {
            let error = extents(path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{}: {error}", path.display());
        }
    }

    #[test]
    fn extents_of_a_real_file_cover_what_was_written() {
        let mut file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.write_all(&vec![7; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        match extents(file.path()) {
            Ok(found) => {
                let covered: u64 = found.iter().map(|extent| extent.length).sum();
                assert!(covered >= 1 << 20, "{found:?}");
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
                // Not println: what a passing test prints is hidden.
                let _ = writeln!(io::stderr(), "SKIPPED extents_of_a_real_file: {error}");
            }
        }
    }
}
