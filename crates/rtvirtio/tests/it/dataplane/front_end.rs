//! A front end without manners: raw vhost-user messages, and a driver that may write anything.

use std::fs::File;
use std::io::IoSlice;
use std::io::Read as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rtvirtio_virtq::ring::RingConfig;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;

use super::server::rtvirtio;

const ENOUGH: Duration = Duration::from_secs(60);
/// A request's data, header and status.
pub(crate) const DATA: u64 = GUEST + (1 << 19);
pub(crate) const HEADER: u64 = DATA + 0x1_0000;
pub(crate) const STATUS: u64 = HEADER + 16;

/// `rtvirtio serve` of some disks on one IOThread.
pub(crate) struct Daemon {
    child: Child,
    directory: TempDir,
}

impl Daemon {
    /// `disks`: names, and what follows `engine = `.
    pub(crate) fn start(disks: &[(&str, String)]) -> Self {
        Self::start_with(disks, None)
    }

    /// The same; one of the disks is in a trust domain of its own, with an IOThread.
    pub(crate) fn start_with(disks: &[(&str, String)], apart: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        let mut text = format!(
            "version = 1\n[control]\nsocket = '{}'\n[[iothread]]\nname = 'iot0'\n",
            control.display()
        );
        if apart.is_some() {
            text += "[[iothread]]\nname = 'iot1'\ntrust = 'apart'\n";
        }
        for (name, engine) in disks {
            let socket = directory.path().join(name);
            let trust = if apart == Some(name) { "trust = 'apart'\n" } else { "" };
            text += &format!(
                "[[device]]\nname = '{name}'\nvm = 'vm-{name}'\nsocket = '{}'\nqueues = 1\n\
                 {trust}engine = {engine}\n",
                socket.display()
            );
        }
        let path = directory.path().join("serve.toml");
        std::fs::write(&path, text).unwrap();
        let log = File::create(directory.path().join("log")).unwrap();
        // As systemd says that standard error is the journal.
        let stream = log.metadata().unwrap();
        let stream = format!("{}:{}", stream.st_dev(), stream.st_ino());
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .env("JOURNAL_STREAM", stream)
            .arg(rtvirtio())
            .arg("serve")
            .arg(path)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut daemon = Self { child, directory };
        let start = Instant::now();
        for (name, _) in disks {
            while UnixStream::connect(daemon.socket(name)).is_err() {
                daemon.is_alive();
                assert!(start.elapsed() < ENOUGH, "{}", daemon.log());
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        daemon
    }

    pub(crate) fn socket(&self, disk: &str) -> PathBuf {
        self.directory.path().join(disk)
    }

    /// `rtvirtio ctl`.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(rtvirtio());
        command.arg("ctl").arg("--socket").arg(self.directory.path().join("control"));
        command.args(arguments).current_dir(self.directory.path());
        command
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let process = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(process, signal).unwrap();
    }

    /// From now on its files may have no more bytes.
    pub(crate) fn limit_file_sizes(&self, bytes: u64) {
        let limit = rustix::process::Rlimit { current: Some(bytes), maximum: None };
        let process = rustix::process::Pid::from_child(&self.child);
        rustix::process::prlimit(Some(process), rustix::process::Resource::Fsize, limit).unwrap();
    }

    /// How it ended, and what it said.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> (std::process::ExitStatus, String) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, self.log());
            }
            assert!(start.elapsed() < ENOUGH, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    #[track_caller]
    pub(crate) fn is_alive(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("it ended, {status}: {}", self.log());
        }
    }

    fn proc(&self, what: &str) -> PathBuf {
        Path::new("/proc").join(self.child.id().to_string()).join(what)
    }

    /// What its descriptors are of, sorted.
    pub(crate) fn fds(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.proc("fd")).unwrap();
        let kind = |entry: std::fs::DirEntry| {
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            // Sockets have numbers.
            if target.starts_with("/") {
                target
            } else {
                target
                    .with_extension("")
                    .to_string_lossy()
                    .split(':')
                    .next()
                    .unwrap_or_default()
                    .into()
            }
        };
        let mut fds: Vec<_> = entries.map(|entry| kind(entry.unwrap())).collect();
        fds.sort_unstable();
        fds
    }

    /// KiB.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    fn cpu_time(&self) -> Duration {
        let threads = std::fs::read_dir(self.proc("task")).unwrap();
        let one = |path: PathBuf| {
            let text = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
        };
        Duration::from_nanos(threads.map(|entry| one(entry.unwrap().path())).sum())
    }

    /// Does something to each of its threads.
    pub(crate) fn run_on(&self, each: impl Fn(rustix::process::Pid)) {
        for entry in std::fs::read_dir(self.proc("task")).unwrap() {
            let name = entry.unwrap().file_name();
            let tid = name.to_str().and_then(|tid| tid.parse().ok()).unwrap();
            each(rustix::process::Pid::from_raw(tid).unwrap());
        }
    }

    /// Uses less than a quarter of a CPU, in one of five windows at least.
    ///
    /// The time for which a hypervisor takes the CPU away counts as the daemon's.
    #[track_caller]
    pub(crate) fn is_quiet(&self) {
        let window = Duration::from_millis(400);
        std::thread::sleep(window / 2);
        let mut spent = Duration::MAX;
        for _ in 0..5 {
            let before = self.cpu_time();
            std::thread::sleep(window);
            spent = spent.min(self.cpu_time().saturating_sub(before));
            if spent < window / 4 {
                return;
            }
        }
        panic!("{spent:?} of {window:?}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("it said: {}", self.log());
        }
    }
}

/// Sends a message; whether it was taken.
pub(crate) fn send(
    stream: &UnixStream,
    header: [u32; 3],
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> bool {
    let head: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let pieces = [IoSlice::new(&head), IoSlice::new(body)];
    sendmsg(stream, &pieces, &mut control, SendFlags::NOSIGNAL).is_ok()
}

/// 64-bit words as the protocol has them.
pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A message that is acknowledged; whether the server does as it is asked.
fn asks(stream: &UnixStream, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    assert!(send(stream, [request, 1 | 8, body.len() as u32], body, fds));
    let mut reply = [0; 20];
    (&*stream).read_exact(&mut reply).is_ok() && reply[12..] == [0; 8]
}

#[track_caller]
fn ask(stream: &UnixStream, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
    assert!(asks(stream, request, body, fds), "message {request}");
}

/// Connects with these features of the device, and of the protocol beside acknowledged messages, and shares the
/// guest's memory.
pub(crate) fn open(socket: &Path, features: u64, protocol: u64, guest: &Guest) -> UnixStream {
    const VERSION_1: u64 = 1 << 32;
    const INDIRECT: u64 = 1 << 28;
    const PROTOCOL: u64 = 1 << 30;
    const REPLY_ACK: u64 = 1 << 3;
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(ENOUGH)).unwrap();
    assert!(send(&stream, [16, 1, 8], &words(&[REPLY_ACK | protocol]), &[]));
    ask(&stream, 2, &words(&[VERSION_1 | INDIRECT | PROTOCOL | features]), &[]);
    ask(&stream, 3, &[], &[]);
    let spec = guest.region().spec();
    let table = words(&[1, spec.guest, spec.size, spec.front_end, 0]);
    ask(&stream, 5, &table, &[guest.file()]);
    stream
}

/// Has a ring served. `false`: the server refuses it.
pub(crate) fn start(
    stream: &UnixStream,
    index: u64,
    driver: &Driver,
    events: [BorrowedFd<'_>; 3],
) -> bool {
    start_at(stream, index, &driver.config(), events)
}

/// The same from the base of a configuration.
pub(crate) fn start_at(
    stream: &UnixStream,
    index: u64,
    config: &RingConfig,
    [kick, call, error]: [BorrowedFd<'_>; 3],
) -> bool {
    let ask = |request, of: &[u64], fds: &[BorrowedFd<'_>]| ask(stream, request, &words(of), fds);
    ask(8, &[index | u64::from(config.size) << 32], &[]);
    ask(10, &[index | u64::from(config.base) << 32], &[]);
    ask(9, &[index, config.descriptors, config.device, config.driver, 0], &[]);
    ask(13, &[index], &[call]);
    ask(14, &[index], &[error]);
    if !asks(stream, 12, &words(&[index]), &[kick]) {
        return false;
    }
    ask(18, &[index | 1 << 32], &[]);
    true
}

/// How a front end is to be set up.
pub(crate) struct Setup {
    pub(crate) packed: bool,
    /// Entries of its ring.
    pub(crate) size: u16,
    /// Bytes of its guest's memory.
    pub(crate) memory: u64,
    /// What its driver is called by; none: an eventfd.
    pub(crate) call: Option<OwnedFd>,
    /// Its in-flight region, of one queue.
    pub(crate) inflight: Option<File>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { packed: false, size: FrontEnd::SIZE, memory: 1 << 20, call: None, inflight: None }
    }
}

/// A connected front end with one ring.
pub(crate) struct FrontEnd {
    pub(crate) stream: UnixStream,
    pub(crate) driver: Driver,
    pub(crate) kick: OwnedFd,
    call: OwnedFd,
    error: OwnedFd,
}

impl FrontEnd {
    pub(crate) const SIZE: u16 = 16;

    /// Up to a ring that is served.
    pub(crate) fn connect(socket: &Path) -> Self {
        Self::connect_with(socket, Setup::default()).expect("a ring that is served")
    }

    /// The same, set up in another way. `None`: the server refuses the ring.
    pub(crate) fn connect_with(socket: &Path, setup: Setup) -> Option<Self> {
        const PACKED: u64 = 1 << 34;
        const INFLIGHT: u64 = 1 << 12;
        let Setup { packed, size, memory, call, inflight } = setup;
        let guest = Guest::new(memory);
        let options = Options { size, packed, event_idx: false, indirect: true, in_order: false };
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let stream = open(socket, if packed { PACKED } else { 0 }, INFLIGHT, &guest);
        let driver = Driver::new(guest, GUEST, options);
        let call = call.unwrap_or_else(event);
        let front = Self { stream, driver, kick: event(), call, error: event() };
        if let Some(region) = &inflight {
            let bytes = region.metadata().unwrap().len();
            let queues = u32::from(size) << 16 | 1;
            let body = [words(&[bytes, 0]), u64::from(queues).to_le_bytes().to_vec()].concat();
            ask(&front.stream, 32, &body, &[region.as_fd()]);
        }
        let events = [front.kick.as_fd(), front.call.as_fd(), front.error.as_fd()];
        start(&front.stream, 0, &front.driver, events).then_some(front)
    }

    pub(crate) fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Puts a head into the available ring, and kicks.
    pub(crate) fn offer(&self, head: u16, count: u16) {
        let (_, available, _) = self.driver.addresses();
        let guest = self.driver.guest();
        let index = guest.u16(available + 2).load(SeqCst);
        guest.u16(available + 4 + 2 * u64::from(index % Self::SIZE)).store(head, SeqCst);
        guest.u16(available + 2).store(index.wrapping_add(count), SeqCst);
        self.kick();
    }

    /// Whether a head came back, or the server said that the ring is broken.
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome_within(ENOUGH)
    }

    /// The same, without waiting longer.
    pub(crate) fn outcome_within(&self, time: Duration) -> Outcome {
        let (_, _, used) = self.driver.addresses();
        let start = Instant::now();
        loop {
            if rustix::io::read(&self.error, &mut [0; 8]).is_ok() {
                return Outcome::Broken;
            }
            if self.driver.guest().u16(used + 2).load(SeqCst) > 0 {
                return Outcome::Returned;
            }
            if start.elapsed() > time {
                return Outcome::Neither;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A request with this many bytes of data; its status.
    #[track_caller]
    pub(crate) fn request(&mut self, kind: u32, sector: u64, bytes: u32) -> u8 {
        self.start(kind, sector, bytes);
        self.finish(ENOUGH).expect("it hangs")
    }

    pub(crate) fn start(&mut self, kind: u32, sector: u64, bytes: u32) {
        self.start_at(kind, sector, &[(DATA, bytes)]);
    }

    /// The same with data in these places.
    pub(crate) fn start_at(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) {
        let guest = Arc::clone(self.driver.guest());
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        guest.write(HEADER, &header);
        guest.write(STATUS, &[0xff]);
        let at = |address, length, writable| Buffer { address, length, writable };
        let mut buffers = vec![at(HEADER, 16, false)];
        let data = data.iter().filter(|(_, bytes)| *bytes > 0);
        buffers.extend(data.map(|&(address, bytes)| at(address, bytes, kind == 0)));
        buffers.push(at(STATUS, 1, true));
        self.driver.add(&buffers, false).expect("room");
        self.driver.publish();
        self.kick();
    }

    /// The status of what was started, once it has ended.
    pub(crate) fn finish(&mut self, within: Duration) -> Option<u8> {
        let start = Instant::now();
        while self.driver.take().is_none() {
            if start.elapsed() > within {
                return None;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Some(self.driver.guest().read(STATUS, 1)[0])
    }
}

/// What became of a chain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Returned,
    Broken,
    Neither,
}
