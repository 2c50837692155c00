//! Cgroups that rtvirtio makes for a benchmark's VMs, under `rtvirtio/`.
//!
//! On v2 a cgroup has `io.*` files only if each of its ancestors lists `io` in
//! `cgroup.subtree_control` (`cgroup-v2.rst`). Which ancestors above
//! `rtvirtio/` were changed for that is noted in the state directory, and
//! undone when the last cgroup under `rtvirtio/` is removed.
//!
//! Properties: `cgroup_on_v2_enables_io_and_restores_it`,
//! `remove_kills_what_is_left_in_the_cgroup`, `cgroup_outside_rtvirtio_is_refused`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::cgroup::{CgroupVersion, relative};
use crate::journal::state;
use crate::sysfs::Sysfs;
use crate::{Host, HostError};

/// The one directory under the mount in which rtvirtio makes cgroups.
const OWN: &str = "rtvirtio";
/// How long killed processes may take to end.
const KILL_WAIT: Duration = Duration::from_secs(5);
/// Its own lock: a benchmark makes cgroups while its knobs are applied.
const LOCK: &str = "cgroups.lock";
/// Long enough for another removal, killing included.
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// How often a parent may vanish while a cgroup is being made.
const ATTEMPTS: u32 = 20;

impl Host {
    /// Makes the cgroup `path` (below the io controller's mount, within
    /// `rtvirtio/`, such as `rtvirtio/RUN/VM`) with its missing parents, and
    /// returns its directory. One that exists is kept as it is.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn create_cgroup(&self, path: &Path) -> Result<PathBuf, HostError> {
        let path = own(path)?;
        let version = self.cgroup_version()?;
        let _lock = self.state.lock_within(LOCK, LOCK_WAIT, None)?;
        let mut attempt = 1;
        loop {
            match self.create_tree(&version, &path) {
                // One with another state directory removed a parent that was empty.
                Err(HostError::Cgroup { source, .. })
                    if source.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS =>
                {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    fn create_tree(&self, version: &CgroupVersion, path: &Path) -> Result<PathBuf, HostError> {
        let mut directory = version.mount().to_path_buf();
        for component in path {
            if matches!(version, CgroupVersion::V2 { .. }) {
                self.enable_io(version, &directory)?;
            }
            directory.push(component);
            match self.sysfs.create_dir(&directory) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(cgroup_error("create", &directory)(e));
                }
                _ => {}
            }
        }
        Ok(directory)
    }

    /// Kills what is left in the cgroup `path` and below, removes it, and
    /// removes its parents within `rtvirtio/` that are empty now. One that is
    /// not there is no error.
    ///
    /// # Errors
    /// [`HostError::CgroupBusy`] if processes survive for 5 s, or if the kernel refuses.
    pub fn remove_cgroup(&self, path: &Path) -> Result<(), HostError> {
        let mut path = own(path)?;
        let version = self.cgroup_version()?;
        let _lock = self.state.lock_within(LOCK, LOCK_WAIT, None)?;
        self.remove_tree(&version.mount().join(&path))?;
        while path.pop() && path.components().next().is_some() {
            let directory = version.mount().join(&path);
            if self.sysfs.exists(&directory) && self.sysfs.remove_dir(&directory).is_err() {
                // Another VM's cgroup is in it.
                return Ok(());
            }
        }
        self.disable_io()
    }

    fn remove_tree(&self, directory: &Path) -> Result<(), HostError> {
        let sysfs = &*self.sysfs;
        if !sysfs.exists(directory) {
            return Ok(());
        }
        for name in sysfs.list(directory).unwrap_or_default() {
            let child = directory.join(name);
            if sysfs.exists(&child.join("cgroup.procs")) {
                self.remove_tree(&child)?;
            }
        }
        let start = Instant::now();
        loop {
            // A process may fork while it is being killed: read anew each time.
            let left = processes(sysfs, directory);
            for pid in &left {
                // Ended meanwhile, or a zombie: the list tells.
                let _ = sysfs.kill(*pid);
            }
            if left.is_empty() {
                match sysfs.remove_dir(directory) {
                    Ok(()) => return Ok(()),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                    Err(e) if e.kind() != io::ErrorKind::ResourceBusy => {
                        return Err(cgroup_error("remove", directory)(e));
                    }
                    Err(_) => {}
                }
            }
            if start.elapsed() >= KILL_WAIT {
                let path = directory.to_path_buf();
                let count = processes(sysfs, directory).len();
                return Err(HostError::CgroupBusy { path, count, waited: KILL_WAIT });
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn enable_io(&self, version: &CgroupVersion, directory: &Path) -> Result<(), HostError> {
        let file = directory.join("cgroup.subtree_control");
        let error = || cgroup_error("enable io in", directory);
        let text = self.sysfs.read(&file).map_err(error())?;
        if text.split_whitespace().any(|c| c == "io") {
            return Ok(());
        }
        let is_own = directory.starts_with(version.mount().join(OWN));
        if !is_own {
            let mut noted = self.noted()?;
            noted.push(directory.to_path_buf());
            self.note(&noted)?;
        }
        self.sysfs.write(&file, "+io").map_err(error())
    }

    fn disable_io(&self) -> Result<(), HostError> {
        let noted = self.noted()?;
        if noted.is_empty() {
            return Ok(());
        }
        for directory in noted.iter().rev() {
            let file = directory.join("cgroup.subtree_control");
            // EBUSY: somebody else's cgroups use it by now, so it stays.
            if let Err(e) = self.sysfs.write(&file, "-io")
                && e.kind() != io::ErrorKind::ResourceBusy
                && e.kind() != io::ErrorKind::NotFound
            {
                return Err(cgroup_error("disable io in", directory)(e));
            }
        }
        self.note(&[])
    }

    fn note_file(&self) -> PathBuf {
        self.state.0.join("subtree_control.json")
    }

    /// Directories in which io was enabled, outermost first.
    fn noted(&self) -> Result<Vec<PathBuf>, HostError> {
        let file = self.note_file();
        match fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|source| HostError::JournalDamaged { file, source }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(state("read", &file)(e)),
        }
    }

    fn note(&self, directories: &[PathBuf]) -> Result<(), HostError> {
        let file = self.note_file();
        let write = || {
            if directories.is_empty() {
                return fs::remove_file(&file);
            }
            fs::create_dir_all(&self.state.0)?;
            let staged = file.with_extension("json.tmp");
            fs::write(&staged, serde_json::to_vec(directories)?)?;
            fs::rename(staged, &file)
        };
        write().map_err(state("write", &file))
    }
}

fn own(path: &Path) -> Result<PathBuf, HostError> {
    let path = relative(path)?;
    let below = path.strip_prefix(OWN).is_ok_and(|p| p.components().next().is_some());
    if below { Ok(path) } else { Err(HostError::BadCgroupPath { path }) }
}

fn processes(sysfs: &dyn Sysfs, directory: &Path) -> Vec<u32> {
    let text = sysfs.read(&directory.join("cgroup.procs")).unwrap_or_default();
    // 0 is a process of another pid namespace, which cannot be killed from here.
    text.lines().filter_map(|l| l.trim().parse().ok()).collect()
}

fn cgroup_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    move |source| HostError::Cgroup { action, path: path.to_path_buf(), source }
}
