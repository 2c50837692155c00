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
//! its owner's end. It lives until its standard input ends.

mod fuse;
mod loop_device;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rtvirtio_engine::SsdConfig;
use rtvirtio_units::Bytes;
use serde::{Deserialize, Serialize};

/// What lies under a scratch disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// The emulated SSD of this reference name.
    Ssd(String),
    /// A plain file in this directory.
    Raw(PathBuf),
}

impl Backing {
    /// How results name it: `ref-4x250`, `raw`.
    #[must_use]
    pub fn label(&self) -> &str {
        match self {
            Self::Ssd(name) => name,
            Self::Raw(_) => "raw",
        }
    }
}

/// The first line that a server prints.
#[derive(Debug, Serialize, Deserialize)]
struct Ready {
    device: PathBuf,
}

/// Serves a scratch disk until standard input ends: prints its device node as
/// one JSON line once it is ready.
///
/// # Errors
/// Without root, FUSE or a free loop device, with the remedy.
pub fn serve(backing: &Backing, size: Bytes, seed: u64) -> Result<()> {
    let file = match backing {
        Backing::Ssd(name) => {
            let config: SsdConfig = name.parse()?;
            fuse::open_emulated(name, config, size, seed)?
        }
        Backing::Raw(directory) => open_raw(directory, size)?,
    };
    let device = loop_device::LoopDevice::attach(file.as_fd())?;
    let ready = Ready { device: device.path().to_owned() };
    println!("{}", serde_json::to_string(&ready)?);
    std::io::stdout().flush()?;
    let mut sink = [0; 64];
    let mut stdin = std::io::stdin().lock();
    while stdin.read(&mut sink).is_ok_and(|n| n > 0) {}
    // The device before the file: its last flush goes through the file.
    drop(device);
    drop(file);
    Ok(())
}

fn open_raw(directory: &Path, size: Bytes) -> Result<File> {
    let path = directory.join(format!(".rtvirtio-scratch-{}", std::process::id()));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .with_context(|| format!("create {}", path.display()))?;
    std::fs::remove_file(&path)?;
    // Blocks are allocated and written now: a hole would make first writes slower than later ones.
    let chunk = vec![0x5a; 1 << 20];
    let mut left = size.get();
    while left > 0 {
        let n = left.min(chunk.len() as u64) as usize;
        (&file).write_all(&chunk[..n]).with_context(|| {
            format!("fill {} bytes in {} (--raw-dir names another place)", size.get(), directory.display())
        })?;
        left -= n as u64;
    }
    file.sync_all()?;
    Ok(file)
}

/// A running scratch disk; dropping it removes the disk.
#[derive(Debug)]
pub struct ScratchDisk {
    server: Child,
    device: PathBuf,
    label: String,
}

impl ScratchDisk {
    /// Starts a server: `program scratch …` is this program's own verb.
    ///
    /// # Errors
    /// What the server said on its way down.
    pub fn start(program: &Path, backing: &Backing, size: Bytes, seed: u64) -> Result<Self> {
        let mut command = Command::new(program);
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
            .spawn()
            .context("start the scratch disk")?;
        let mut line = String::new();
        if let Some(stdout) = server.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let Ok(ready) = serde_json::from_str::<Ready>(&line) else {
            let status = server.wait()?;
            bail!("the scratch disk did not start ({status})");
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
}

impl Drop for ScratchDisk {
    fn drop(&mut self) {
        // Its standard input ends, so it takes the disk down and leaves.
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}
