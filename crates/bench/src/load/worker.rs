//! One VM's fio: a process of the host in the VM's cgroup, or one within its guest.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rtvirtio_cases::IoPriority;
use rtvirtio_host::interrupt::{Interrupted, wait};
use rtvirtio_model::Stream;
use rtvirtio_spec::specification::Vm;
use rtvirtio_units::VmName;

use super::fio;
use crate::guests::{COMMAND, Guest};

/// Where a guest's fio works.
const IN_GUEST: &str = "/tmp";

/// Keeps fio from spinning (`scripts/guest-sleep.c`).
const SLEEP: &str = "/lib/fio-sleep.so";
/// How long the end of a load that is given up may keep the others waiting.
const KILL: Duration = Duration::from_millis(500);

/// Where fio runs.
pub(crate) enum Place<'a> {
    /// On the host: the device, and the `cgroup.procs` to enter.
    Host { device: &'a Path, procs: PathBuf },
    /// In the VM's guest.
    Guest(&'a Guest),
}

/// A running fio that does not outlive its owner.
pub(crate) struct Worker<'a> {
    pub(crate) vm: VmName,
    directory: PathBuf,
    files: Vec<String>,
    running: Running<'a>,
}

enum Running<'a> {
    Host(Child),
    Guest { guest: &'a Guest, pid: i64, ended: bool },
}

impl<'a> Worker<'a> {
    /// Starts a VM's tasks, or an undeclared VM's streams, for `runtime` after `ramp`.
    pub(crate) fn start(
        place: Place<'a>,
        directory: &Path,
        vm: &Vm,
        ioprio: Option<&IoPriority>,
        (runtime, ramp): (Duration, Duration),
    ) -> Result<Self> {
        let running = match place {
            Place::Host { device, procs } => {
                let node = |_: &_| Ok(device.display().to_string());
                let job = fio::job_file(vm, node, ioprio, runtime, ramp)?;
                Running::Host(fio::spawn(directory, &vm.name, &job, &procs)?)
            }
            Place::Guest(guest) => {
                // The host's scheduler sees QEMU's priority, not the guest's.
                let node = |disk: &_| Ok(guest.node(disk)?.to_owned());
                let job = fio::job_file(vm, node, None, runtime, ramp)?;
                guest.set_io_priority(ioprio)?;
                let name = &vm.name;
                guest.write(&format!("{IN_GUEST}/{name}.fio"), &job)?;
                let arguments = fio::arguments(name).join(" ");
                let shell = format!(
                    "cd {IN_GUEST} && LD_PRELOAD={SLEEP} exec fio {arguments} 2>{name}.err"
                );
                let pid = guest.spawn("/bin/sh", &["-c", &shell], COMMAND)?;
                Running::Guest { guest, pid, ended: false }
            }
        };
        let files = fio::files(vm, streams(vm));
        Ok(Self { vm: vm.name.clone(), directory: directory.to_owned(), files, running })
    }

    /// fio's JSON, there once [`Worker::finish`] has returned.
    pub(crate) fn output(&self) -> PathBuf {
        self.directory.join(format!("{}.json", self.vm))
    }

    /// Its exit code if it has ended; a signal counts as a code.
    pub(crate) fn ended(&mut self) -> Result<Option<i64>> {
        match &mut self.running {
            Running::Host(child) => {
                let status = child.try_wait()?;
                Ok(status.map(|s| s.code().map_or(-1, i64::from)))
            }
            Running::Guest { guest, pid, ended } => {
                guest.check()?;
                let code = guest.ended(*pid)?;
                *ended |= code.is_some();
                Ok(code)
            }
        }
    }

    /// An error that says why it ended too early, if it has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(code) => bail!("{}", self.failure(&format!("ended early with code {code}"))),
        }
    }

    /// Waits until it has ended, which it does not before `expected`, and fetches its files.
    pub(crate) fn finish(
        &mut self,
        expected: Instant,
        deadline: Instant,
        interrupted: &Interrupted,
    ) -> Result<()> {
        wait(expected.saturating_duration_since(Instant::now()), interrupted)?;
        // A question costs a guest's CPU.
        let poll = match self.running {
            Running::Host(_) => Duration::from_millis(20),
            Running::Guest { .. } => Duration::from_millis(200),
        };
        let code = loop {
            if let Some(code) = self.ended()? {
                break code;
            }
            ensure!(Instant::now() < deadline, "fio of {} does not end", self.vm);
            wait(poll, interrupted)?;
        };
        if let Running::Guest { guest, .. } = self.running {
            for name in &self.files {
                guest
                    .fetch(&format!("{IN_GUEST}/{name}"), &self.directory.join(name))
                    .with_context(|| format!("VM {}", self.vm))?;
            }
        }
        // 128 is fio's code for "terminated by a signal it handled".
        ensure!(code == 0 || code == 128, self.failure(&format!("failed with code {code}")));
        Ok(())
    }

    /// The clock that its logs go by, since the epoch.
    pub(crate) fn now(&self) -> Result<Duration> {
        match &self.running {
            Running::Host(_) => Ok(SystemTime::now().duration_since(UNIX_EPOCH)?),
            Running::Guest { guest, .. } => guest.now(),
        }
    }

    /// Makes it write its logs and end.
    pub(crate) fn terminate(&self) -> Result<()> {
        match &self.running {
            Running::Host(child) => {
                if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                }
            }
            Running::Guest { guest, pid, .. } => {
                guest.spawn("/bin/kill", &["-TERM", &pid.to_string()], COMMAND)?;
            }
        }
        Ok(())
    }

    fn failure(&self, what: &str) -> String {
        format!("fio of {} {what}: {}", self.vm, fio::complaint(&self.output()))
    }
}

/// How many jobs fio runs for a VM.
pub(crate) fn streams(vm: &Vm) -> usize {
    if vm.tasks.is_empty() { Stream::UNDECLARED.len() } else { vm.tasks.len() }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        match &mut self.running {
            Running::Host(child) => {
                if matches!(child.try_wait(), Ok(None)) {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
            // A guest under load may need seconds to answer. Its answer is not needed, and each VM has
            // such a worker.
            Running::Guest { guest, pid, ended: false } => {
                let _ = guest.spawn("/bin/kill", &["-KILL", &pid.to_string()], KILL);
            }
            Running::Guest { .. } => {}
        }
    }
}
