//! Child processes that stay where they are put and do not outlive their owner.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

/// Makes the program of `command` enter the cgroup whose `cgroup.procs` is given, and die with
/// this process (`PR_SET_PDEATHSIG`). Ctrl-C is this process's to handle.
pub fn confine(command: &mut Command, procs: Option<&Path>) -> Result<()> {
    let open = |procs: &Path| {
        let file = OpenOptions::new().write(true).open(procs);
        file.with_context(|| format!("open {}", procs.display()))
    };
    let cgroup = procs.map(open).transpose()?;
    command.process_group(0);
    let enter = move || {
        if let Some(cgroup) = &cgroup {
            // "0" is the writing process itself (cgroup-v1/cgroups.rst, cgroup-v2.rst).
            rustix::io::write(cgroup, b"0")?;
        }
        // SAFETY: prctl with PR_SET_PDEATHSIG reads its integer arguments only.
        let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec `enter` makes two system calls and allocates nothing.
    unsafe { command.pre_exec(enter) };
    Ok(())
}
