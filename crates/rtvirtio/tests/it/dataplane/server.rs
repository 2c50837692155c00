//! The server under test, and its disk.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::scratch_disk::RTVIRTIO;

/// Long enough for a start or an end on a busy machine.
const ENOUGH: Duration = Duration::from_secs(10);
/// A disk: the first quarter for a file system, the rest for fio.
pub(crate) const DISK_BYTES: u64 = 1 << 30;

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `rtvirtio serve`.
    Ours,
    /// qemu-storage-daemon.
    Qsd,
}

impl Kind {
    pub(crate) fn under_test() -> Self {
        match std::env::var("RTVIRTIO_TEST_SERVER").as_deref() {
            Err(_) | Ok("" | "rtvirtio") => Self::Ours,
            Ok("qsd") => Self::Qsd,
            Ok(other) => panic!("RTVIRTIO_TEST_SERVER={other}: rtvirtio or qsd"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "rtvirtio",
            Self::Qsd => "qemu-storage-daemon",
        })
    }
}

/// A sparse file that servers serve.
pub(crate) struct Image {
    directory: TempDir,
}

impl Image {
    pub(crate) fn make() -> Self {
        let image = Self { directory: tempfile::tempdir().unwrap() };
        File::create_new(image.path()).unwrap().set_len(DISK_BYTES).unwrap();
        image
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("disk.raw")
    }

    /// For sockets and logs.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }
}

/// A running server of one disk with 4 queues; killed when dropped.
pub(crate) struct Server {
    kind: Kind,
    child: Child,
    name: String,
    directory: PathBuf,
    image: PathBuf,
    /// The `cgroup.procs` to enter, if not to stay in the test's.
    procs: Option<PathBuf>,
}

impl Server {
    pub(crate) const QUEUES: u16 = 4;
    pub(crate) const IOTHREADS: [&'static str; 2] = ["iot0", "iot1"];
    /// The disk's name in the control API.
    pub(crate) const DEVICE: &'static str = "disk";

    /// Starts the server under test; returns once it listens.
    pub(crate) fn start(image: &Image) -> Self {
        Self::start_named(image, "server")
    }

    /// The same, for more than one server of an image.
    pub(crate) fn start_named(image: &Image, name: &str) -> Self {
        Self::start_in(None, image, name)
    }

    /// The same in the cgroup of this `cgroup.procs`.
    pub(crate) fn start_in(procs: Option<PathBuf>, image: &Image, name: &str) -> Self {
        let (kind, directory) = (Kind::under_test(), image.directory().to_owned());
        let (name, image) = (name.to_owned(), image.path());
        let child = Self::spawn(kind, &directory, &name, &image, procs.as_deref());
        let mut server = Self { kind, child, name, directory, image, procs };
        server.wait_until_it_listens();
        server
    }

    fn spawn(
        kind: Kind,
        directory: &Path,
        name: &str,
        image: &Path,
        procs: Option<&Path>,
    ) -> Child {
        let path = |suffix: &str| directory.join(format!("{name}.{suffix}"));
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(procs) = procs {
            command.args(["sh", "-c", r#"echo $$ >"$0" && exec "$@""#]).arg(procs);
        }
        match kind {
            Kind::Ours => {
                let text = Self::configuration(image, &path("sock"), &path("control"));
                std::fs::write(path("toml"), text).unwrap();
                command.args([RTVIRTIO, "serve"]).arg(path("toml"));
            }
            Kind::Qsd => {
                // Two daemons may serve one image while a guest moves between them.
                let file = format!(
                    "driver=file,node-name=disk,filename={},cache.direct=on,aio=io_uring,\
                     discard=unmap,locking=off",
                    image.display()
                );
                let export = format!(
                    "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
                     writable=on,num-queues={}",
                    path("sock").display(),
                    Self::QUEUES
                );
                command.args(["qemu-storage-daemon", "--blockdev", &file, "--export", &export]);
            }
        }
        let log = File::options().append(true).create(true).open(path("log")).unwrap();
        let output = log.try_clone().unwrap();
        command.stdin(Stdio::null()).stdout(output).stderr(log).spawn().unwrap()
    }

    fn configuration(image: &Path, socket: &Path, control: &Path) -> String {
        let [first, second] = Self::IOTHREADS;
        // A session's lock, not a daemon's: during a migration the image has two daemons.
        format!(
            "version = 1
[control]
socket = '{}'
[[iothread]]
name = '{first}'
[[iothread]]
name = '{second}'
[[device]]
name = '{}'
vm = 'guest'
socket = '{}'
queues = {}
serial = 'dataplane-test'
engine = {{ type = 'file', path = '{}', lock = 'session' }}
",
            control.display(),
            Self::DEVICE,
            socket.display(),
            Self::QUEUES,
            image.display(),
        )
    }

    /// Where front ends connect.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(format!("{}.sock", self.name))
    }

    /// The control socket; qemu-storage-daemon has no such.
    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join(format!("{}.control", self.name))
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// What it said, in all its lives.
    pub(crate) fn log(&self) -> String {
        let path = self.directory.join(format!("{}.log", self.name));
        let text = std::fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    }

    /// By the kernel's list of sockets: a connection, if only to see, would be a session.
    fn wait_until_it_listens(&mut self) {
        /// __SO_ACCEPTCON of linux/net.h, in the column Flags.
        const LISTENS: &str = "00010000";
        let (start, socket) = (Instant::now(), self.socket().display().to_string());
        let listens = || {
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            sockets.lines().any(|l| l.ends_with(&socket) && l.split(' ').any(|w| w == LISTENS))
        };
        while !listens() {
            self.check();
            assert!(start.elapsed() < ENOUGH, "{} does not listen: {}", self.kind, self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// It still runs.
    #[track_caller]
    pub(crate) fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} ended, {status}: {}", self.kind, self.log());
        }
    }

    /// kill −9; returns when it is dead.
    pub(crate) fn kill(&mut self) {
        self.check();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts a dead one again, and does not wait.
    pub(crate) fn start_again(&mut self) {
        self.child =
            Self::spawn(self.kind, &self.directory, &self.name, &self.image, self.procs.as_deref());
    }

    /// SIGTERM; how it ended.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.check();
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < ENOUGH, "{} ignores SIGTERM: {}", self.kind, self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{} said: {}", self.kind, self.log());
        }
    }
}
