//! A loop device that clears itself (kernel `include/uapi/linux/loop.h`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// An attached loop device; gone once this and every other user are.
pub(super) struct LoopDevice {
    _open: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches `backing` with direct I/O to a free loop device.
    pub(super) fn attach(backing: BorrowedFd<'_>) -> Result<Self> {
        const REMEDY: &str = "a scratch disk needs root and the loop driver (modprobe loop)";
        let control = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/loop-control")
            .context("open /dev/loop-control")
            .context(REMEDY)?;
        // Another process may take the free one first: ask again then.
        for _ in 0..16 {
            // SAFETY: the request takes no argument; the fd is open.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error()).context("find a free loop device");
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let node = OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .with_context(|| format!("open {}", path.display()))?;
            match configure(&node, backing) {
                Ok(()) => return Ok(Self { _open: node, path }),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(e).with_context(|| format!("configure {}", path.display())),
            }
        }
        anyhow::bail!("every free loop device was taken by another process")
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn configure(node: &File, backing: BorrowedFd<'_>) -> io::Result<()> {
    let info = LoopInfo64 {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
    let fd = backing.as_raw_fd() as u32;
    let config = LoopConfig { fd, block_size: 0, info, reserved: [0; 8] };
    // SAFETY: `config` has the layout of struct loop_config and outlives the call.
    let result = unsafe { libc::ioctl(node.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
