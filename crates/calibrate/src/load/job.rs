//! One VM's fio: where it runs, and what its end brings.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cases::IoPriority;
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_model::Stream;
use rtvirtio_spec::specification::Vm;
use rtvirtio_units::{Bytes, VmName};

use super::fio;

/// Where VMs are, and fio with them.
pub trait Place {
    /// Starts a VM's tasks, or an undeclared VM's streams, for `runtime` after `ramp`. What fio leaves is in
    /// `directory` once [`Job::finish`] has returned.
    ///
    /// # Errors
    /// If fio does not start.
    fn start(
        &self,
        directory: &Path,
        vm: &Vm,
        ioprio: Option<&IoPriority>,
        runtime_and_ramp: (Duration, Duration),
    ) -> Result<Job<'_>>;
}

/// A running fio that does not outlive its owner: ended when dropped.
pub trait Process {
    /// Its exit code if it has ended; a signal counts as a code.
    ///
    /// # Errors
    /// If what it runs in has gone.
    fn ended(&mut self) -> Result<Option<i64>>;

    /// How often it may be asked whether it has ended.
    fn poll_interval(&self) -> Duration;

    /// Copies `files`, which it has left, into `directory`.
    ///
    /// # Errors
    /// If one is not there.
    fn fetch(&self, files: &[String], directory: &Path) -> Result<()>;

    /// The clock that its logs go by, since the epoch.
    ///
    /// # Errors
    /// If it cannot be asked.
    fn now(&self) -> Result<Duration>;

    /// Makes it write its logs and end.
    ///
    /// # Errors
    /// If it cannot be reached.
    fn terminate(&self) -> Result<()>;
}

/// A VM's running fio.
pub struct Job<'a> {
    vm: VmName,
    directory: PathBuf,
    files: Vec<String>,
    process: Box<dyn Process + 'a>,
}

impl<'a> Job<'a> {
    /// The fio that `process` runs for `vm`, whose files belong into `directory`.
    #[must_use]
    pub fn new(vm: &Vm, directory: &Path, process: Box<dyn Process + 'a>) -> Self {
        let files = fio::files(vm, streams(vm));
        Self { vm: vm.name.clone(), directory: directory.to_owned(), files, process }
    }

    /// Its VM.
    #[must_use]
    pub const fn vm(&self) -> &VmName {
        &self.vm
    }

    /// fio's JSON, there once [`Job::finish`] has returned.
    #[must_use]
    pub fn output(&self) -> PathBuf {
        self.directory.join(format!("{}.json", self.vm))
    }

    /// An error that says why it ended too early, if it has ended.
    ///
    /// # Errors
    /// That one.
    pub fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            None => Ok(()),
            Some(code) => bail!("{}", self.failure(&format!("ended early with code {code}"))),
        }
    }

    /// Waits until it has ended, which it does not before `expected`, and fetches its files.
    ///
    /// # Errors
    /// If it fails, has not ended at `deadline`, or the user interrupts.
    pub fn finish(
        &mut self,
        expected: Instant,
        deadline: Instant,
        interrupted: &Interrupted,
    ) -> Result<()> {
        wait(expected.saturating_duration_since(Instant::now()), interrupted)?;
        let code = loop {
            if let Some(code) = self.process.ended()? {
                break code;
            }
            ensure!(Instant::now() < deadline, "fio of {} does not end", self.vm);
            wait(self.process.poll_interval(), interrupted)?;
        };
        let fetched = self.process.fetch(&self.files, &self.directory);
        fetched.with_context(|| format!("VM {}", self.vm))?;
        // 128 is fio's code for "terminated by a signal it handled".
        ensure!(code == 0 || code == 128, self.failure(&format!("failed with code {code}")));
        Ok(())
    }

    /// The clock that its logs go by, since the epoch.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub fn now(&self) -> Result<Duration> {
        self.process.now()
    }

    /// Makes it write its logs and end.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub fn terminate(&self) -> Result<()> {
        self.process.terminate()
    }

    fn failure(&self, what: &str) -> String {
        format!("fio of {} {what}: {}", self.vm, fio::complaint(&self.output()))
    }
}

/// How many jobs fio runs for a VM.
#[must_use]
pub fn streams(vm: &Vm) -> usize {
    if vm.tasks.is_empty() { Stream::UNDECLARED.len() } else { vm.tasks.len() }
}

/// VMs that are cgroups of this host: fio runs in them.
#[derive(Debug, Clone, Copy)]
pub struct Cgroups<'a> {
    /// Where all their disks are.
    pub device: &'a Path,
    /// How much of it is theirs; `None`: all.
    pub size: Option<Bytes>,
    /// Where cgroups are mounted: `cgroup` of a VM is below it.
    pub mount: &'a Path,
}

impl Place for Cgroups<'_> {
    fn start(
        &self,
        directory: &Path,
        vm: &Vm,
        ioprio: Option<&IoPriority>,
        (runtime, ramp): (Duration, Duration),
    ) -> Result<Job<'_>> {
        let procs = self.mount.join(&vm.cgroup).join("cgroup.procs");
        let node = |_: &_| Ok(self.device.display().to_string());
        let job = fio::job_file(vm, node, self.size, ioprio, (runtime, ramp))?;
        let child = OnHost(fio::spawn(directory, &vm.name, &job, &procs)?);
        Ok(Job::new(vm, directory, Box::new(child)))
    }
}

/// fio as a process of this host.
struct OnHost(Child);

impl Process for OnHost {
    fn ended(&mut self) -> Result<Option<i64>> {
        let status = self.0.try_wait()?;
        Ok(status.map(|s| s.code().map_or(-1, i64::from)))
    }

    fn poll_interval(&self) -> Duration {
        Duration::from_millis(20)
    }

    /// They are there.
    fn fetch(&self, _: &[String], _: &Path) -> Result<()> {
        Ok(())
    }

    fn now(&self) -> Result<Duration> {
        Ok(SystemTime::now().duration_since(UNIX_EPOCH)?)
    }

    fn terminate(&self) -> Result<()> {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        Ok(())
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
