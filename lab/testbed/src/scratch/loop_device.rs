//! A loop device that clears itself (kernel `include/uapi/linux/loop.h`).
//!
//! Each is a new one with a number of its own, and is removed at the end: a
//! loop device outlives what is attached to it, and so would the scheduler and
//! the knobs that were set on it. Its number is noted in the state directory,
//! so that the next start removes what a killed server left.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use linux_raw_sys::loop_device::{
    LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LOOP_CONFIGURE, LOOP_CTL_ADD, LOOP_CTL_REMOVE,
    loop_config,
};
use rtvirtio_calibrate::device::{SCRATCH_DISKS, is_scratch};
use rtvirtio_host::interrupt::{Interrupted, wait};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Numbers tried for a new device: above those that others ask for.
const NUMBERS: std::ops::Range<i32> = 100..200;

/// How long others may hold a lock: a start that removes what killed servers left needs a second for each device that is still
/// in use.
const LOCK_WAIT: Duration = Duration::from_secs(60);
/// How often it is tried.
const STEP: Duration = Duration::from_millis(20);

/// An attached loop device; gone once this and every other user are.
pub(super) struct LoopDevice {
    number: i32,
    open: Option<File>,
    path: PathBuf,
    /// Held locked for as long as this lives.
    note: File,
}

impl LoopDevice {
    /// Attaches `backing` with direct I/O to a new loop device.
    pub(super) fn attach(backing: BorrowedFd<'_>, interrupted: &Interrupted) -> Result<Self> {
        let control = control()?;
        std::fs::create_dir_all(SCRATCH_DISKS)?;
        // One start at a time: a device that another one has only just added looks like one that was left.
        let turn = File::open(SCRATCH_DISKS)?;
        lock(&turn, Path::new(SCRATCH_DISKS), LOCK_WAIT, interrupted)?;
        sweep(&control);
        for number in NUMBERS {
            match request(&control, LOOP_CTL_ADD, number) {
                Ok(()) => {}
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => continue,
                Err(e) => return Err(e).context("add a loop device"),
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let noted = note(number);
            // From here on Drop removes it.
            let mut device = Self { number, open: None, path, note: File::create(&noted)? };
            // Who looks whether the disk is served holds it for that moment.
            lock(&device.note, &noted, LOCK_WAIT, interrupted)?;
            let node = OpenOptions::new().read(true).write(true).open(&device.path);
            let node = node.with_context(|| {
                // The kernel makes it in a host's /dev before the request returns.
                let remedy = match device.path.exists() {
                    true => "",
                    false => " (a container's own /dev? -v /dev:/dev, or run on the host)",
                };
                format!("open {}{remedy}", device.path.display())
            })?;
            configure(&node, backing)
                .with_context(|| format!("configure {}", device.path.display()))?;
            device.open = Some(node);
            return Ok(device);
        }
        bail!("loop devices {NUMBERS:?} are all in use")
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        drop(self.open.take());
        // Another user may still hold it open: the next start removes it then.
        if control().is_ok_and(|c| remove(&c, self.number)) {
            let _ = std::fs::remove_file(note(self.number));
        }
    }
}

/// Takes the lock of a file for as long as it is open, within a time: whoever has it may have been stopped.
fn lock(file: &File, path: &Path, within: Duration, interrupted: &Interrupted) -> Result<()> {
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < within => wait(STEP, interrupted)?,
            Err(Errno::WOULDBLOCK) => bail!(
                "another process has held {} for {within:?}: does a scratch disk hang that starts? \
                 (who: fuser {0})",
                path.display()
            ),
            Err(Errno::INTR) => {}
            locked => return locked.with_context(|| format!("lock {}", path.display())),
        }
    }
}

fn note(number: i32) -> PathBuf {
    Path::new(SCRATCH_DISKS).join(format!("loop{number}"))
}

fn control() -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/loop-control")
        .context("open /dev/loop-control")
        .context("a scratch disk needs root and the loop driver (modprobe loop)")
}

fn request(control: &File, request: u32, number: i32) -> io::Result<()> {
    // SAFETY: both requests take an integer by value; the fd is open.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), request.into(), number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Removes a device, waiting a little for its last user; true once it is gone.
fn remove(control: &File, number: i32) -> bool {
    for _ in 0..50 {
        match request(control, LOOP_CTL_REMOVE, number) {
            Ok(()) => return true,
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => return true,
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(20)),
        }
    }
    false
}

/// Removes devices that killed servers left: unattached ones that are noted here.
fn sweep(control: &File) {
    for number in NUMBERS {
        let attached = Path::new("/sys/block").join(format!("loop{number}/loop/backing_file"));
        let note = note(number);
        let is_left =
            note.exists() && !attached.exists() && !is_scratch(Path::new(&format!("loop{number}")));
        if is_left && remove(control, number) {
            let _ = std::fs::remove_file(&note);
        }
    }
}

fn configure(node: &File, backing: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a struct of numbers, of which each may be 0.
    let mut config: loop_config = unsafe { std::mem::zeroed() };
    config.fd = backing.as_raw_fd() as u32;
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR as u32 | LO_FLAGS_DIRECT_IO as u32;
    // SAFETY: the request takes such a struct, which outlives the call.
    let result = unsafe { libc::ioctl(node.as_raw_fd(), LOOP_CONFIGURE.into(), &raw const config) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rtvirtio_host::interrupt::InterruptedError;

    use super::*;

    #[test]
    fn lock_that_another_process_keeps_is_not_waited_for_for_ever() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [first, second] = [(); 2].map(|()| File::open(file.path()).unwrap());
        let (within, interrupted) = (Duration::from_millis(100), Interrupted::new(false));
        let take = |file: &File, path: &Path| lock(file, path, within, &interrupted);
        take(&first, file.path()).unwrap();
        let begun = Instant::now();
        let error = take(&second, file.path()).unwrap_err();
        assert!(begun.elapsed() >= within);
        let path = file.path().display();
        let words = format!("another process has held {path} for 100ms");
        assert!(error.to_string().starts_with(&words), "{error:#}");
        assert!(error.to_string().contains(&format!("fuser {path}")), "{error:#}");
        interrupted.store(true, Ordering::Relaxed);
        assert!(take(&second, file.path()).unwrap_err().is::<InterruptedError>());
        drop(first);
        take(&second, file.path()).unwrap();
    }
}
