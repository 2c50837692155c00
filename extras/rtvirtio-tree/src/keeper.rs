//! The parent of the process that serves the tree: it sees to it that no mount outlives that process.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_host::interrupt::{Interrupted, InterruptedError};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::server::{READY, SOURCE, UNMOUNTED};

/// How soon a signal is seen.
const LOOK: Duration = Duration::from_millis(50);
/// How long the server may take to unmount; then it is killed.
const GRACE: Duration = Duration::from_secs(1);

/// Where a tree can be mounted: an empty directory on which nothing is mounted. Its absolute path.
///
/// # Errors
/// With what to do about it. Nothing has changed.
pub(crate) fn check(directory: &Path) -> Result<PathBuf> {
    let shown = directory.display();
    let metadata = match fs::metadata(directory) {
        Err(error) if is_dead(&error) => {
            bail!("on {shown} is a mount whose server has gone: `umount -l {shown}`")
        }
        other => other.with_context(|| format!("{shown}: name a directory"))?,
    };
    ensure!(metadata.is_dir(), "{shown} is not a directory");
    let directory = directory.canonicalize().with_context(|| shown.to_string())?;
    let found = rustix::fs::statx(CWD, &directory, AtFlags::empty(), StatxFlags::BASIC_STATS)
        .with_context(|| shown.to_string())?;
    let is_mounted = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    ensure!(!is_mounted, "something is mounted on {shown} already");
    let mut entries = fs::read_dir(&directory).with_context(|| shown.to_string())?;
    ensure!(entries.next().is_none(), "{shown} is not empty: a mount would hide what is in it");
    OpenOptions::new().read(true).write(true).open("/dev/fuse").context(
        "open /dev/fuse: the tree needs FUSE (`modprobe fuse`; in a container, --device /dev/fuse)",
    )?;
    Ok(directory)
}

/// Mounts the tree of the data plane at `socket` on a directory that [`check`] has seen, and keeps it
/// until it ends. `ready` is told the server's process id.
///
/// # Errors
/// [`InterruptedError`] after a signal, or why the tree has ended. It is unmounted.
pub(crate) fn keep(
    socket: &Path,
    directory: &Path,
    interrupted: &Interrupted,
    ready: impl FnOnce(u32) -> Result<()>,
) -> Result<()> {
    let mut server = Server::start(socket, directory)?;
    let words = server.words()?;
    let (mut ready, mut said) = (Some(ready), String::new());
    loop {
        match words.recv_timeout(LOOK) {
            Ok(word) => match ready.take() {
                Some(ready) if word == READY => ready(server.child.id())?,
                _ => said += &format!("{word}\n"),
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        ensure!(!interrupted.load(Ordering::Relaxed), InterruptedError);
    }
    let status = server.end()?;
    match said.trim_end() {
        UNMOUNTED => Ok(()),
        "" => bail!("the tree's server has ended: {status}"),
        why => bail!("{why}"),
    }
}

/// The process that serves the tree; ended, and its mount gone, when dropped.
struct Server {
    child: Child,
    directory: PathBuf,
}

impl Server {
    fn start(socket: &Path, directory: &Path) -> Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .arg("--serve")
            .arg("--socket")
            .arg(socket)
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is its parent's to handle.
            .process_group(0)
            .spawn()
            .context("start the tree's server")?;
        Ok(Self { child, directory: directory.to_owned() })
    }

    /// Its lines, until it ends.
    fn words(&mut self) -> Result<Receiver<String>> {
        let (sender, words) = mpsc::channel();
        let stdout = self.child.stdout.take().context("its output")?;
        std::thread::Builder::new().name("words".to_owned()).spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        })?;
        Ok(words)
    }

    /// Has it unmount and end, or ends it and unmounts.
    fn end(&mut self) -> io::Result<ExitStatus> {
        drop(self.child.stdin.take());
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            if start.elapsed() > GRACE {
                self.child.kill()?;
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self.child.wait()?;
        // Another tree may be there by now, and be served.
        if fs::read_dir(&self.directory).is_err_and(|error| is_dead(&error)) {
            detach(&self.directory);
        }
        Ok(status)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Whether a mount has no server.
fn is_dead(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Takes a tree's mount away, whoever still uses it; nothing if there is none.
pub(super) fn detach(directory: &Path) {
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    if !is_tree(&mounts, directory) {
        return;
    }
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    if rustix::mount::unmount(directory, flags).is_ok() {
        return;
    }
    // Without the right to: as it was mounted.
    for program in ["fusermount3", "fusermount"] {
        let mut command = Command::new(program);
        command.args(["-u", "-z", "-q", "--"]).arg(directory).stdin(Stdio::null());
        if command.status().is_ok_and(|status| status.success()) {
            return;
        }
    }
}

/// Whether what is mounted on `directory` last is a tree (`Documentation/filesystems/proc.rst`, 3.5).
fn is_tree(mountinfo: &[u8], directory: &Path) -> bool {
    let mut escaped = Vec::new();
    for &byte in directory.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
            byte => escaped.push(byte),
        }
    }
    let lines = mountinfo.split(|byte| *byte == b'\n');
    let mut mounts = lines.filter_map(|line| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let dash = fields.iter().position(|field| *field == b"-")?;
        (*fields.get(4)? == escaped).then_some(*fields.get(dash + 2)?)
    });
    mounts.next_back() == Some(SOURCE.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_is_told_from_other_mounts() {
        let mounts = b"\
            22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
            40 22 0:50 / /mnt/a rw,nosuid - fuse rtvirtio-tree rw,user_id=0\n\
            41 22 0:51 / /mnt/a\\040b\\134 rw,nosuid shared:3 - fuse rtvirtio-tree rw\n\
            42 22 0:52 / /mnt/c rw - fuse rtvirtio-tree rw\n\
            43 42 0:53 / /mnt/c rw - tmpfs other rw\n";
        let is_tree = |path: &str| super::is_tree(mounts, Path::new(path));
        assert!(is_tree("/mnt/a"));
        assert!(is_tree("/mnt/a b\\"));
        // Something is above it.
        assert!(!is_tree("/mnt/c"));
        assert!(!is_tree("/") && !is_tree("/mnt") && !is_tree("/mnt/b"));
    }

    #[test]
    fn place_that_cannot_have_a_mount_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let said = |path: &Path| check(path).unwrap_err().to_string();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(said(&file).ends_with("is not a directory"));
        assert!(said(directory.path()).ends_with("a mount would hide what is in it"));
        assert!(said(Path::new("/proc")).ends_with("/proc already"));
        assert!(said(&file.join("x")).ends_with("name a directory"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
