//! Scratch disks: a loop device over an emulated SSD (a file of a FUSE file
//! system that is never attached to the mount tree) or over a plain file.
//!
//! A killed server leaves no mount, file or attached device: the loop device
//! clears itself when its last user is gone, the FUSE file system is detached
//! from the start, the plain file is unlinked while open. The empty loop
//! device that it may leave is removed by the next start.
//!
//! The server is a process of its own ([`serve`]), so that the load under
//! test and the device never share a fate or a priority; [`ScratchDisk`] is
//! its owner's end. It lives until its standard input ends, and then undoes what a killed owner's
//! testbed has left. Until then a line there, `slower N`, makes an emulated SSD's service times N
//! times what its model says, for benchmarks of a device that changes; `slower 1` undoes it.

mod disk;
mod fuse;
mod loop_device;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rtvirtio_cases::Scale;
pub use rtvirtio_engine::SsdConfig;
use rtvirtio_host::interrupt::{Interrupted, InterruptedError, wait};
use rtvirtio_units::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::random::Random;

pub use disk::Disk;

/// What lies under a scratch disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// The emulated SSD of this reference name.
    Ssd(String),
    /// A plain file in this directory.
    Raw(PathBuf),
}

impl FromStr for Backing {
    type Err = anyhow::Error;

    /// `ssd:NAME` or `file:DIRECTORY`.
    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            Some(("ssd", name)) => Self::ssd(name),
            Some(("file", directory)) if !directory.is_empty() => Ok(Self::Raw(directory.into())),
            _ => bail!("`{text}` is neither ssd:NAME nor file:DIRECTORY"),
        }
    }
}

impl Backing {
    /// An emulated SSD.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn ssd(name: &str) -> Result<Self> {
        name.parse::<SsdConfig>()?;
        Ok(Self::Ssd(name.to_owned()))
    }

    /// The same disk, slower; a plain file is as it is.
    #[must_use]
    pub fn slower(self, scale: Scale) -> Self {
        match self {
            Self::Ssd(name) if scale != Scale::ONE => Self::Ssd(format!("{name}*{scale}")),
            same => same,
        }
    }

    /// How results name it: `ref-4x250`, `ref-4x250*2` (two times slower), `raw`.
    #[must_use]
    pub fn label(&self) -> &str {
        match self {
            Self::Ssd(name) => name,
            Self::Raw(_) => "raw",
        }
    }
}

/// How often somebody who waits looks whether the user has interrupted it.
const STEP: Duration = Duration::from_millis(100);
/// How often it is said how much of a file is written.
const TELL_EVERY: Duration = Duration::from_secs(2);
/// So much of a file is written before it is waited for that it is on the disk, so that the user can interrupt the wait.
const PART: u64 = 32 << 20;

/// Before the number in a line that makes a device slower.
const SLOWER: &str = "slower ";

/// The first line that a server prints.
#[derive(Debug, Serialize, Deserialize)]
struct Ready {
    device: PathBuf,
}

/// Serves a scratch disk and prints its node once it is ready. With `owned`,
/// the node is one JSON line and the disk goes when standard input ends (its
/// owner may be killed) or says what nobody understands; else it stays until SIGINT or SIGTERM.
///
/// # Errors
/// Without root, FUSE or a free loop device, with the remedy; if a plain file is interrupted while it is written.
pub fn serve(
    backing: &Backing,
    size: Bytes,
    seed: u64,
    owned: bool,
    interrupted: &Interrupted,
) -> Result<()> {
    match backing {
        Backing::Ssd(name) => eprintln!("Making a scratch disk ({name}, {size}): up to 10 s"),
        Backing::Raw(directory) => {
            eprintln!("Writing a scratch disk of {size} in {}", directory.display());
        }
    }
    let (file, slow_down) = match backing {
        Backing::Ssd(name) => {
            let config: SsdConfig = name.parse()?;
            // Its memory is what a host that runs out of it should do without first.
            let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
            let (file, slow_down) = fuse::open_emulated(name, config, size, seed)?;
            (file, Some(slow_down))
        }
        Backing::Raw(directory) => (open_raw(directory, size, interrupted)?, None),
    };
    let device = loop_device::LoopDevice::attach(file.as_fd(), interrupted)?;
    if owned {
        let ready = Ready { device: device.path().to_owned() };
        println!("{}", serde_json::to_string(&ready)?);
        std::io::stdout().flush()?;
        let (read, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if read.send(line).is_err() {
                    return;
                }
            }
        });
        while !interrupted.load(Ordering::Relaxed) {
            let line = match lines.recv_timeout(STEP) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let times = line.strip_prefix(SLOWER).and_then(|times| times.parse().ok());
            let (Some(times), Some(slow_down)) = (times, &slow_down) else {
                eprintln!("scratch: {line:?} is not understood");
                break;
            };
            slow_down(times);
        }
    } else {
        println!("{} ({}, {size}); Ctrl-C removes it", device.path().display(), backing.label());
        while wait(Duration::from_secs(3600), interrupted).is_ok() {}
    }
    if owned {
        // An owner that was killed has left its testbed too; this process has outlived it.
        if let Err(error) = rtvirtio_calibrate::testbed::recover_killed() {
            eprintln!("warning: clean-up: {error:#}; the next run tries again");
        }
    }
    // The device before the file: its last flush goes through the file.
    drop(device);
    drop(file);
    Ok(())
}

/// A file without holes that has no name any more: it goes with its last user. Nothing compresses it.
///
/// # Errors
/// If the directory does not take it, or the user interrupts.
pub fn open_raw(directory: &Path, size: Bytes, interrupted: &Interrupted) -> Result<File> {
    // The name is part of the device's identity: one directory, one identity, so that a
    // benchmark can go on with the profile that it has.
    let path = directory.join(".rtvirtio-scratch");
    if let Err(e) = std::fs::remove_file(&path)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        return Err(e).with_context(|| format!("remove {}", path.display()));
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .with_context(|| format!("create {}", path.display()))?;
    std::fs::remove_file(&path)?;
    // Blocks are allocated and written now: a hole would make first writes slower than later ones.
    let mut random = Random::new(size.get());
    let mut chunk = vec![0; 1 << 20];
    let mut left = size.get();
    let mut told = Instant::now();
    while left > 0 {
        if interrupted.load(Ordering::Relaxed) {
            return Err(InterruptedError.into());
        }
        chunk.chunks_exact_mut(8).for_each(|w| w.copy_from_slice(&random.next().to_le_bytes()));
        let n = left.min(chunk.len() as u64) as usize;
        (&file).write_all(&chunk[..n]).with_context(|| {
            format!("fill {} bytes in {} (name another directory)", size.get(), directory.display())
        })?;
        left -= n as u64;
        if left.is_multiple_of(PART) {
            file.sync_data().with_context(|| format!("write {} to disk", path.display()))?;
        }
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            let done = size.get() - left;
            eprintln!("{} of {size} written", Bytes::new(done));
        }
    }
    file.sync_all()?;
    Ok(file)
}

/// Where other processes open a file of this one that has no name.
pub fn path_of(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// A running scratch disk; dropping it removes the disk.
#[derive(Debug)]
pub struct ScratchDisk {
    server: Child,
    device: PathBuf,
    label: String,
}

impl ScratchDisk {
    /// Starts a server: `scratch …` is a verb of the running program, `rtvirtio-lab`.
    ///
    /// # Errors
    /// What the server said on its way down; if the user interrupts.
    pub fn start(
        backing: &Backing,
        size: Bytes,
        seed: u64,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("scratch").arg("--json").arg("--size-mib").arg((size.get() >> 20).to_string());
        command.arg("--seed").arg(seed.to_string());
        match backing {
            Backing::Ssd(name) => command.arg("--ssd").arg(name),
            Backing::Raw(directory) => command.arg("--raw").arg(directory),
        };
        let mut server = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            // Ctrl-C is its owner's to handle.
            .process_group(0)
            .spawn()
            .context("start the scratch disk")?;
        let stdout = server.stdout.take().context("the scratch disk has no standard output")?;
        let Some(line) = first_line(stdout, interrupted)? else {
            // It may be in the middle of a file, and does not hear the user itself.
            let _ = kill_process(Pid::from_child(&server), Signal::TERM);
            let _ = server.wait();
            return Err(InterruptedError.into());
        };
        let Ok(ready) = serde_json::from_str::<Ready>(&line) else {
            let status = server.wait()?;
            let why = match status.signal() {
                Some(9) => "; has the kernel killed it for want of memory (dmesg)?",
                _ => "",
            };
            bail!("the scratch disk did not start ({status}){why}");
        };
        Ok(Self { server, device: ready.device, label: backing.label().to_owned() })
    }

    /// Its node, such as `/dev/loop0`.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// How results name it.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// An emulated SSD's requests take `times` as long from now on, to within the time that its
    /// server takes to read a line; 1 undoes it.
    ///
    /// # Errors
    /// If the server has gone.
    pub fn slow_down(&mut self, times: u16) -> Result<()> {
        let stdin = self.server.stdin.as_mut().context("the scratch disk has gone")?;
        writeln!(stdin, "{SLOWER}{times}").context("tell the scratch disk")
    }
}

impl Drop for ScratchDisk {
    fn drop(&mut self) {
        // Its standard input ends, so it takes the disk down and leaves.
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}

/// The first line that a server prints; `None` if the user interrupts before.
fn first_line(stdout: ChildStdout, interrupted: &Interrupted) -> Result<Option<String>> {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        // Nobody waits for it any more if the user has interrupted.
        let _ = tell.send(read.map(|_| line));
    });
    loop {
        match told.recv_timeout(STEP) {
            Ok(line) => return Ok(Some(line?)),
            Err(RecvTimeoutError::Disconnected) => bail!("the scratch disk's reader failed"),
            Err(RecvTimeoutError::Timeout) if interrupted.load(Ordering::Relaxed) => {
                return Ok(None);
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_whole_and_has_no_name_and_an_interrupted_one_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let (size, interrupted) = (Bytes::new(3 << 20), Interrupted::new(false));
        let file = open_raw(directory.path(), size, &interrupted).unwrap();
        assert_eq!(file.metadata().unwrap().len(), size.get());
        interrupted.store(true, Ordering::Relaxed);
        let error = open_raw(directory.path(), size, &interrupted).unwrap_err();
        assert!(error.is::<InterruptedError>(), "{error:#}");
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn server_that_says_nothing_is_waited_for_until_the_user_interrupts() {
        let run = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap()
        };
        let interrupted = Interrupted::new(false);
        let mut says = run("echo ready; echo more");
        let line = first_line(says.stdout.take().unwrap(), &interrupted).unwrap();
        assert_eq!(line.as_deref(), Some("ready\n"));
        let _ = says.wait();
        let mut silent = run("exec sleep 60");
        interrupted.store(true, Ordering::Relaxed);
        let line = first_line(silent.stdout.take().unwrap(), &interrupted).unwrap();
        assert_eq!(line, None);
        let _ = silent.kill();
        let _ = silent.wait();
    }

    #[test]
    fn backing_is_an_ssd_that_there_is_or_a_directory() {
        let read = |text: &str| text.parse::<Backing>();
        assert_eq!(read("ssd:ref-8x80").unwrap(), Backing::Ssd("ref-8x80".to_owned()));
        assert_eq!(read("file:/var/tmp").unwrap(), Backing::Raw("/var/tmp".into()));
        for text in ["ssd:", "ssd:x", "file:", "/var/tmp", ""] {
            assert!(read(text).is_err(), "{text:?}");
        }
    }
}
