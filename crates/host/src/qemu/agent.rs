//! The agent in a guest (`qemu-ga`): its files, its programs, its clock, its disks.
//!
//! The guest decides what is answered, and when: nothing here is believed beyond
//! its form. The agent does one command after the other and gives no ids, so a
//! late answer could be taken for the next one's. Therefore a conversation
//! starts with a *sync*: a number of our own, whose answer follows a byte 0xFF
//! that no JSON contains; all before it is dropped. After any request that was
//! not answered, the next one starts with a sync again.
//!
//! Properties: `stale_answer_before_the_sync_is_dropped`,
//! `late_answer_is_not_the_next_ones`, `disabled_command_has_a_fault_of_its_own`,
//! `write_file_closes_the_handle_on_error`, `file_is_closed_by_an_agent_that_wakes_up_late`,
//! `file_is_closed_after_the_users_signal`,
//! `file_larger_than_asked_for_is_refused`.

use std::collections::BTreeSet;
use std::mem;
use std::path::Path;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use qapi::qga::{
    GuestAgentInfo, GuestExec, GuestExecCaptureOutput, GuestExecStatus, GuestFileRead,
    GuestFileWrite, guest_exec, guest_exec_status, guest_file_close, guest_file_flush,
    guest_file_open, guest_file_read, guest_file_write, guest_get_disks, guest_get_time,
    guest_info, guest_sync_delimited,
};
use qapi::{Command, Empty};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::peer::{Deadline, Peer};
use super::virsh::Virsh;
use super::{Address, Fault, PciAddress, QemuError, reply};
use crate::interrupt::Interrupt;

/// Comes before the answer to a sync, and resets the agent's parser before the request.
const SENTINEL: u8 = 0xff;
/// The most sentinels of earlier clients that are skipped.
const MAX_STALE: usize = 1_000;
/// What one read takes at most; in base64 it is far below the largest message.
const READ: usize = 1 << 20;
/// What one write carries at most: through virsh it is an argument, of which the
/// kernel takes 128 KiB.
const WRITE: usize = 48 << 10;
/// How long closing a file may take once the deadline has passed.
const CLOSE_BY_SOCKET: Duration = Duration::from_millis(10);
const CLOSE_BY_VIRSH: Duration = Duration::from_secs(1);
/// The same after the user's signal: libvirt passes on what it was asked for although virsh is killed then.
const CLOSE_AFTER_SIGNAL: Duration = Duration::from_millis(150);
/// The pauses between looks at a running program.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// What became of a program in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecStatus {
    /// It runs.
    Running,
    /// It ended; the agent forgets it with this answer.
    Exited {
        /// Its exit code; `None`: a signal ended it.
        code: Option<i64>,
        /// Its standard output.
        stdout: Vec<u8>,
        /// Its standard error.
        stderr: Vec<u8>,
    },
}

/// How a program in the guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its exit code; `None`: a signal ended it.
    pub code: Option<i64>,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

/// A disk or partition as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestDisk {
    /// Its node in the guest, such as `/dev/vda`.
    pub node: String,
    /// Whether it is a partition.
    pub is_partition: bool,
    /// Its serial number, where the guest knows one (from udev): the way to tell
    /// which disk of QEMU's it is.
    pub serial: Option<String>,
    /// The PCI address of its controller, where it has one.
    pub pci: Option<PciAddress>,
}

#[derive(Debug)]
enum Transport {
    Socket(Conversation),
    Libvirt(Virsh),
}

/// A guest's agent. Each method has one deadline for all that it asks.
#[derive(Debug)]
pub struct Agent {
    address: Address,
    transport: Transport,
}

impl Agent {
    /// Connects to the agent's socket at `path` and sees that the agent answers.
    ///
    /// # Errors
    /// If nobody listens. QEMU does before the guest has booted: then, and if
    /// another client holds the socket, the agent does not answer in time.
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Self, QemuError> {
        let address = Address::Socket(path.as_ref().to_owned());
        Self::at_until(&address, timeout, &Interrupt::default())
    }

    /// The agent at `address`, reached within `timeout`; `interrupt` ends this, and later waits.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub(crate) fn at_until(
        address: &Address,
        timeout: Duration,
        interrupt: &Interrupt,
    ) -> Result<Self, QemuError> {
        let path = match address {
            Address::Socket(path) => path,
            Address::Domain(domain) => {
                return Ok(Self::through(Virsh::new(domain.clone()).until(interrupt)));
            }
        };
        let deadline = Deadline::after(timeout);
        // An earlier client's sync must not be taken for ours.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        match Peer::connect(path, deadline, interrupt) {
            Ok(peer) => Self::open(address.clone(), peer, now.as_micros() as i64, deadline),
            Err(fault) => Err(QemuError { peer: address.clone(), command: "connect", fault }),
        }
    }

    /// The agent of a libvirt domain, by name or UUID. Nothing is asked yet.
    #[must_use]
    pub fn libvirt(domain: &str) -> Self {
        Self::through(Virsh::new(domain.into()))
    }

    pub(super) fn through(virsh: Virsh) -> Self {
        let address = Address::Domain(virsh.domain.clone());
        Self { address, transport: Transport::Libvirt(virsh) }
    }

    /// An agent that says `bytes`, whatever it is asked; its first sync is number 1.
    ///
    /// # Errors
    /// If the sync is not among them.
    #[cfg(any(test, feature = "test-utils"))]
    pub fn replay(bytes: &[u8]) -> Result<Self, QemuError> {
        let peer = Peer::over(super::peer::Replay(std::io::Cursor::new(bytes.to_vec())));
        let deadline = Deadline::after(Duration::from_secs(60));
        Self::open(Address::Socket("replay".into()), peer, 0, deadline)
    }

    fn open(
        address: Address,
        peer: Peer,
        last_sync: i64,
        deadline: Deadline,
    ) -> Result<Self, QemuError> {
        let mut conversation = Conversation { peer, last_sync, in_step: false };
        match conversation.sync(deadline) {
            Ok(()) => Ok(Self { address, transport: Transport::Socket(conversation) }),
            Err(fault) => {
                Err(QemuError { peer: address, command: guest_sync_delimited::NAME, fault })
            }
        }
    }

    /// Whom it is reached by.
    #[must_use]
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The commands that the agent has and allows.
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout`.
    pub fn enabled_commands(&mut self, timeout: Duration) -> Result<BTreeSet<String>, QemuError> {
        let info: GuestAgentInfo = self.ask(&guest_info {}, Deadline::after(timeout))?;
        let enabled = info.supported_commands.into_iter().filter(|c| c.enabled);
        Ok(enabled.map(|c| c.name).collect())
    }

    /// Reads a file of the guest.
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout` (1 s through libvirt: the
    /// file is closed in any case); [`Fault::TooLong`] if the file has more than
    /// `limit` bytes.
    pub fn read_file(
        &mut self,
        path: &str,
        limit: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, QemuError> {
        let deadline = Deadline::after(timeout);
        self.with_file(path, "r", deadline, |agent, handle| {
            let mut bytes = Vec::new();
            loop {
                // One more than the limit tells whether there is more.
                let count = (limit - bytes.len()).saturating_add(1).min(READ);
                let command = guest_file_read { handle, count: Some(count as i64) };
                let read: GuestFileRead = agent.ask(&command, deadline)?;
                // An agent that sends nothing and promises more is not asked again.
                let is_end = read.eof || read.buf_b64.is_empty();
                bytes.extend(read.buf_b64);
                if bytes.len() > limit {
                    return Err(agent.error::<guest_file_read>(Fault::TooLong { limit }));
                }
                if is_end {
                    return Ok(bytes);
                }
            }
        })
    }

    /// Writes a file of the guest, from its beginning; what it held is gone. A
    /// kernel's file gets texts of up to 4 KiB in one write(2).
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout` (1 s through libvirt: the
    /// file is closed in any case). What a kernel's file refuses is
    /// [`Fault::Refused`] by `guest-file-flush`.
    pub fn write_file(
        &mut self,
        path: &str,
        text: &str,
        timeout: Duration,
    ) -> Result<(), QemuError> {
        let deadline = Deadline::after(timeout);
        self.with_file(path, "w", deadline, |agent, handle| {
            for chunk in text.as_bytes().chunks(WRITE) {
                let command = guest_file_write { handle, buf_b64: chunk.to_vec(), count: None };
                let written: GuestFileWrite = agent.ask(&command, deadline)?;
                if usize::try_from(written.count) != Ok(chunk.len()) {
                    let found = format!("{} bytes", written.count);
                    let fault = Fault::Unexpected { found, expected: "all that was to be written" };
                    return Err(agent.error::<guest_file_write>(fault));
                }
            }
            agent.ask::<_, Empty>(&guest_file_flush { handle }, deadline).map(drop)
        })
    }

    /// Starts a program in the guest; gives its process id there. Its output is
    /// kept for [`Self::exec_status`].
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout`; [`Fault::Disabled`] where
    /// the guest does not allow it, as some distributions do not.
    pub fn exec(
        &mut self,
        program: &str,
        arguments: &[&str],
        timeout: Duration,
    ) -> Result<i64, QemuError> {
        self.start(program, arguments, Deadline::after(timeout))
    }

    /// What became of the program with process id `pid`.
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout`.
    pub fn exec_status(&mut self, pid: i64, timeout: Duration) -> Result<ExecStatus, QemuError> {
        self.look(pid, Deadline::after(timeout))
    }

    /// Runs a program in the guest to its end.
    ///
    /// # Errors
    /// As [`Self::exec`]. A program that is late goes on running.
    pub fn run(
        &mut self,
        program: &str,
        arguments: &[&str],
        timeout: Duration,
    ) -> Result<Output, QemuError> {
        let deadline = Deadline::after(timeout);
        let pid = self.start(program, arguments, deadline)?;
        let mut pause = FIRST_PAUSE;
        loop {
            if let ExecStatus::Exited { code, stdout, stderr } = self.look(pid, deadline)? {
                return Ok(Output { code, stdout, stderr });
            }
            let left = deadline.left().map_err(|f| self.error::<guest_exec_status>(f))?;
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The guest's clock, in nanoseconds since 1970 UTC.
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout`.
    pub fn time(&mut self, timeout: Duration) -> Result<i64, QemuError> {
        self.ask(&guest_get_time {}, Deadline::after(timeout))
    }

    /// The guest's disks and partitions.
    ///
    /// # Errors
    /// [`QemuError`], at most a moment after `timeout`; [`Fault::Disabled`] with
    /// an agent before 5.2 or without udev.
    pub fn disks(&mut self, timeout: Duration) -> Result<Vec<GuestDisk>, QemuError> {
        #[derive(Deserialize)]
        struct Reply {
            name: String,
            partition: bool,
            address: Option<AddressReply>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct AddressReply {
            serial: Option<String>,
            pci_controller: Option<PciAddress>,
        }
        let reply: Vec<Reply> = self.ask(&guest_get_disks {}, Deadline::after(timeout))?;
        let disk = |r: Reply| {
            let (serial, pci) = r.address.map_or((None, None), |a| (a.serial, a.pci_controller));
            GuestDisk { node: r.name, is_partition: r.partition, serial, pci }
        };
        Ok(reply.into_iter().map(disk).collect())
    }

    fn start(
        &mut self,
        program: &str,
        arguments: &[&str],
        deadline: Deadline,
    ) -> Result<i64, QemuError> {
        let command = guest_exec {
            path: program.to_owned(),
            arg: Some(arguments.iter().map(|a| (*a).to_owned()).collect()),
            env: None,
            input_data: None,
            capture_output: Some(GuestExecCaptureOutput::flag(true)),
        };
        let started: GuestExec = self.ask(&command, deadline)?;
        Ok(started.pid)
    }

    fn look(&mut self, pid: i64, deadline: Deadline) -> Result<ExecStatus, QemuError> {
        let status: GuestExecStatus = self.ask(&guest_exec_status { pid }, deadline)?;
        Ok(if status.exited {
            let stdout = status.out_data.unwrap_or_default();
            let stderr = status.err_data.unwrap_or_default();
            ExecStatus::Exited { code: status.exitcode, stdout, stderr }
        } else {
            ExecStatus::Running
        })
    }

    /// Opens a file of the guest, works with it and closes it, whatever happened.
    /// Only a file whose opening is answered too late, or after the user's signal, stays open in
    /// the guest.
    fn with_file<T>(
        &mut self,
        path: &str,
        mode: &str,
        deadline: Deadline,
        work: impl FnOnce(&mut Self, i64) -> Result<T, QemuError>,
    ) -> Result<T, QemuError> {
        let command = guest_file_open { path: path.to_owned(), mode: Some(mode.to_owned()) };
        let handle: i64 = self.ask(&command, deadline)?;
        let done = work(self, handle);
        let closed = self.close(handle, deadline);
        let done = done?;
        closed.map(|()| done)
    }

    fn close(&mut self, handle: i64, deadline: Deadline) -> Result<(), QemuError> {
        let command = guest_file_close { handle };
        let is_waited_for = match &mut self.transport {
            Transport::Socket(conversation) => conversation.peer.left(deadline).is_ok(),
            Transport::Libvirt(virsh) => deadline.left().is_ok() && !virsh.interrupt.is_over(),
        };
        if is_waited_for {
            return self.ask::<_, Empty>(&command, deadline).map(drop);
        }
        let closed = match &mut self.transport {
            // An agent that wakes up later comes to it then; nobody waits for the answer.
            Transport::Socket(conversation) => reply::request(&command, None).and_then(|request| {
                conversation.in_step = false;
                conversation.peer.send_anyway(&request, Deadline::after(CLOSE_BY_SOCKET))
            }),
            Transport::Libvirt(virsh) => {
                let interrupt = mem::take(&mut virsh.interrupt);
                let time = if interrupt.is_over() { CLOSE_AFTER_SIGNAL } else { CLOSE_BY_VIRSH };
                let closed = by_virsh::<_, Empty>(virsh, &command, Deadline::after(time));
                virsh.interrupt = interrupt;
                closed.map(drop)
            }
        };
        closed.map_err(|fault| self.error::<guest_file_close>(fault))
    }

    fn ask<C: Command, R: DeserializeOwned>(
        &mut self,
        command: &C,
        deadline: Deadline,
    ) -> Result<R, QemuError> {
        let answer = match &mut self.transport {
            Transport::Socket(conversation) => conversation.exchange(command, deadline),
            Transport::Libvirt(virsh) => by_virsh(virsh, command, deadline),
        };
        answer.map_err(|fault| self.error::<C>(fault))
    }

    fn error<C: Command>(&self, fault: Fault) -> QemuError {
        QemuError { peer: self.address.clone(), command: C::NAME, fault }
    }
}

fn by_virsh<C: Command, R: DeserializeOwned>(
    virsh: &Virsh,
    command: &C,
    deadline: Deadline,
) -> Result<R, Fault> {
    let line = virsh.agent(&reply::request(command, None)?, deadline)?;
    reply::message(&line)?.result()
}

/// A conversation over the agent's socket.
#[derive(Debug)]
struct Conversation {
    peer: Peer,
    /// The number of the last sync.
    last_sync: i64,
    /// Whether the next message answers the next request.
    in_step: bool,
}

impl Conversation {
    fn sync(&mut self, deadline: Deadline) -> Result<(), Fault> {
        self.last_sync = self.last_sync.wrapping_add(1);
        let mut request = vec![SENTINEL];
        request.extend(reply::request(&guest_sync_delimited { id: self.last_sync }, None)?);
        self.peer.send(&request, deadline)?;
        for _ in 0..MAX_STALE {
            self.peer.skip_past(SENTINEL, deadline)?;
            let line = self.peer.line(deadline)?;
            // An answer that broke off leaves its sentinel before the next one's.
            let last = line.rsplit(|b| *b == SENTINEL).next().unwrap_or_default();
            let answer = reply::message(last).and_then(reply::Message::result::<i64>);
            if answer.is_ok_and(|id| id == self.last_sync) {
                self.in_step = true;
                return Ok(());
            }
        }
        Err(Fault::Flood { limit: MAX_STALE })
    }

    fn exchange<C: Command, R: DeserializeOwned>(
        &mut self,
        command: &C,
        deadline: Deadline,
    ) -> Result<R, Fault> {
        if !self.in_step {
            self.sync(deadline)?;
        }
        let request = reply::request(command, None)?;
        self.in_step = false;
        self.peer.send(&request, deadline)?;
        let line = self.peer.line(deadline)?;
        let message = reply::message(&line)?;
        self.in_step = true;
        message.result()
    }
}
