//! The same commands where libvirt holds the sockets: `virsh` passes them on.
//!
//! Each command is a process of its own, which has the request's deadline and is
//! killed when it is late, or the user interrupts. libvirt marks a domain whose monitor was used this
//! way as tainted (`custom-monitor`); that changes nothing about it.
//!
//! Properties: `virsh_that_hangs_is_killed`, `virsh_is_killed_by_the_users_signal`, `endless_output_is_refused`,
//! `domain_name_is_never_an_option`, `domain_is_asked_for_by_its_uuid`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::error::excerpt;
use super::peer::{Deadline, Peer};
use super::reply::refused;
use super::{Domain, Fault};
use crate::interrupt::Interrupt;

/// A domain of the local libvirt.
#[derive(Debug)]
pub(super) struct Virsh {
    pub(super) program: PathBuf,
    pub(super) domain: Domain,
    /// What ends its waits before their deadlines.
    pub(super) interrupt: Interrupt,
}

impl Virsh {
    pub(super) fn new(domain: Domain) -> Self {
        Self { program: "virsh".into(), domain, interrupt: Interrupt::default() }
    }

    /// The same, whose waits `interrupt` ends.
    pub(super) fn until(self, interrupt: &Interrupt) -> Self {
        Self { interrupt: interrupt.clone(), ..self }
    }

    /// The monitor's answer to `request`.
    pub(super) fn monitor(&self, request: &[u8], deadline: Deadline) -> Result<Vec<u8>, Fault> {
        self.run("qemu-monitor-command", &[], request, deadline)
    }

    /// The guest agent's answer to `request`.
    pub(super) fn agent(&self, request: &[u8], deadline: Deadline) -> Result<Vec<u8>, Fault> {
        // libvirt waits in whole seconds; the deadline of the process is exact.
        let seconds = deadline.left()?.as_secs().saturating_add(1).to_string();
        self.run("qemu-agent-command", &["--timeout", &seconds], request, deadline)
    }

    fn run(
        &self,
        verb: &str,
        options: &[&str],
        request: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<u8>, Fault> {
        let request = String::from_utf8_lossy(request);
        let mut arguments = vec![verb, "--domain", self.domain.argument()?];
        arguments.extend(options);
        arguments.push(request.trim_end());
        ask(&self.program, &arguments, deadline, &self.interrupt)
    }
}

/// What `virsh` of the local libvirt answers; `interrupt` ends the wait for it.
pub(super) fn ask(
    program: &Path,
    arguments: &[&str],
    deadline: Deadline,
    interrupt: &Interrupt,
) -> Result<Vec<u8>, Fault> {
    let (mut output, stdout) = pipe(interrupt)?;
    let (mut complaint, stderr) = pipe(interrupt)?;
    // None is begun after the signal.
    output.left(deadline)?;
    let child = Command::new(program)
        .args(["--quiet", "--connect", "qemu:///system"])
        .args(arguments)
        // Its messages are looked at.
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        // A terminal's signal is for this process, which may have settings to put back through it.
        .process_group(0)
        .spawn();
    let mut child = Killed(Some(child.map_err(Fault::Connect)?));
    let answer = output.rest(deadline)?;
    let complaint = complaint.rest(deadline)?;
    if child.succeeds(|| output.left(deadline))? {
        return Ok(answer);
    }
    Err(failure(excerpt(&complaint)))
}

/// What virsh complains of: mostly what the agent said.
fn failure(message: String) -> Fault {
    let passed_on = message.split_once("unable to execute QEMU agent command '");
    match passed_on.and_then(|(_, rest)| rest.split_once("': ")) {
        Some((_, description)) => refused("GenericError".to_owned(), description),
        None => Fault::Virsh { message },
    }
}

/// A pipe whose reading end keeps deadlines, and its writing end.
fn pipe(interrupt: &Interrupt) -> Result<(Peer, Stdio), Fault> {
    let (ours, theirs) = UnixStream::pair().map_err(Fault::Connection)?;
    let mut peer = Peer::over(ours);
    peer.interrupt = interrupt.clone();
    Ok((peer, Stdio::from(OwnedFd::from(theirs))))
}

/// How long a process may take to end once it is killed.
const DEATH: Duration = Duration::from_secs(1);

/// Killed when dropped.
struct Killed(Option<Child>);

impl Killed {
    /// Whether it succeeds; `left` tells how long it may still take.
    fn succeeds(
        &mut self,
        mut left: impl FnMut() -> Result<Duration, Fault>,
    ) -> Result<bool, Fault> {
        loop {
            // It is there until it is dropped.
            let Some(child) = &mut self.0 else { return Ok(false) };
            if let Some(status) = child.try_wait().map_err(Fault::Connection)? {
                return Ok(status.success());
            }
            thread::sleep(left()?.min(Duration::from_millis(1)));
        }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        let _ = child.kill();
        let end = Instant::now() + DEATH;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                // In the kernel it may wait for a server that answers no more, and dies once that does.
                let _ = thread::Builder::new().name("virsh".to_owned()).spawn(move || child.wait());
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
