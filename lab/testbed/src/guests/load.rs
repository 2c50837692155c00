//! A load in guests: each VM's fio runs within its guest.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use rtvirtio_calibrate::load::{Job, Place, Process, fio};
use rtvirtio_cases::IoPriority;
use rtvirtio_spec::specification::Vm;

use super::{COMMAND, Guest, Guests};

/// Where a guest's fio works.
const DIRECTORY: &str = "/tmp";
/// Keeps fio from spinning (`scripts/guest-sleep.c`).
const SLEEP: &str = "/lib/fio-sleep.so";
/// How long the end of a load that is given up may keep the others waiting.
const KILL: Duration = Duration::from_millis(500);

impl Place for Guests {
    fn start(
        &self,
        directory: &Path,
        vm: &Vm,
        ioprio: Option<&IoPriority>,
        times: (Duration, Duration),
    ) -> Result<Job<'_>> {
        self.guest(&vm.name)?.start(directory, vm, ioprio, times)
    }
}

impl Place for Guest {
    fn start(
        &self,
        directory: &Path,
        vm: &Vm,
        ioprio: Option<&IoPriority>,
        (runtime, ramp): (Duration, Duration),
    ) -> Result<Job<'_>> {
        let node = |disk: &_| Ok(self.node(disk)?.to_owned());
        // The host's scheduler sees QEMU's priority, not the guest's.
        let job = fio::job_file(vm, node, None, None, (runtime, ramp))?;
        self.set_io_priority(ioprio)?;
        let name = &vm.name;
        self.write(&format!("{DIRECTORY}/{name}.fio"), &job)?;
        let arguments = fio::arguments(name).join(" ");
        let shell =
            format!("cd {DIRECTORY} && LD_PRELOAD={SLEEP} exec fio {arguments} 2>{name}.err");
        let pid = self.spawn("/bin/sh", &["-c", &shell], COMMAND)?;
        Ok(Job::new(vm, directory, Box::new(InGuest { guest: self, pid, ended: false })))
    }
}

/// fio as a process of a guest.
struct InGuest<'a> {
    guest: &'a Guest,
    pid: i64,
    ended: bool,
}

impl Process for InGuest<'_> {
    fn ended(&mut self) -> Result<Option<i64>> {
        self.guest.check()?;
        let code = self.guest.ended(self.pid)?;
        self.ended |= code.is_some();
        Ok(code)
    }

    /// A question costs the guest's CPU.
    fn poll_interval(&self) -> Duration {
        Duration::from_millis(200)
    }

    fn fetch(&self, files: &[String], directory: &Path) -> Result<()> {
        for name in files {
            self.guest.fetch(&format!("{DIRECTORY}/{name}"), &directory.join(name))?;
        }
        Ok(())
    }

    fn now(&self) -> Result<Duration> {
        self.guest.now()
    }

    fn terminate(&self) -> Result<()> {
        self.guest.spawn("/bin/kill", &["-TERM", &self.pid.to_string()], COMMAND)?;
        Ok(())
    }
}

impl Drop for InGuest<'_> {
    /// A guest under load may need seconds to answer. Its answer is not needed, and each VM has such a job.
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.guest.spawn("/bin/kill", &["-KILL", &self.pid.to_string()], KILL);
        }
    }
}
