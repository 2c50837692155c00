//! The server under test, and its disk.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::scratch_disk::{RTVIRTIO, said};

/// Long enough for a start or an end on a busy machine.
const ENOUGH: Duration = Duration::from_secs(60);
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
            Ok(path) if path.contains('/') => Self::Ours,
            Ok(other) => panic!("RTVIRTIO_TEST_SERVER={other}: rtvirtio, its path, or qsd"),
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

/// The `rtvirtio` under test; of another build if RTVIRTIO_TEST_SERVER is a path.
pub(crate) fn rtvirtio() -> PathBuf {
    let other = std::env::var_os("RTVIRTIO_TEST_SERVER").map(PathBuf::from);
    other.filter(|path| path.components().count() > 1).unwrap_or_else(|| RTVIRTIO.into())
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

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("disk.raw")
    }

    /// For sockets and logs.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }
}

/// How a server is started, the first time and after its death.
struct Launch {
    kind: Kind,
    name: String,
    directory: PathBuf,
    image: PathBuf,
    /// The `cgroup.procs` to enter, if not to stay in the test's.
    procs: Option<PathBuf>,
    /// The user to become; none: as where nothing says.
    user: Option<&'static str>,
    /// Lines of the device's configuration.
    device: &'static str,
}

/// A running server of one disk with 4 queues; killed when dropped.
pub(crate) struct Server {
    child: Child,
    launch: Launch,
}

impl Launch {
    fn path(&self, suffix: &str) -> PathBuf {
        self.directory.join(format!("{}.{suffix}", self.name))
    }

    fn spawn(&self) -> Child {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(procs) = &self.procs {
            command.args(["sh", "-c", r#"echo $$ >"$0" && exec "$@""#]).arg(procs);
        }
        std::fs::write(self.path("toml"), self.configuration()).unwrap();
        match self.kind {
            Kind::Ours => {
                command.arg(rtvirtio()).arg("serve").arg(self.path("toml"));
            }
            Kind::Qsd => {
                // Two daemons may serve one image while a guest moves between them.
                let file = format!(
                    "driver=file,node-name=disk,filename={},cache.direct=on,aio=io_uring,\
                     discard=unmap,locking=off",
                    self.image.display()
                );
                let export = format!(
                    "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
                     writable=on,num-queues={}",
                    self.path("sock").display(),
                    Server::QUEUES
                );
                command.args(["qemu-storage-daemon", "--blockdev", &file, "--export", &export]);
            }
        }
        let log = File::options().append(true).create(true).open(self.path("log")).unwrap();
        let output = log.try_clone().unwrap();
        command.stdin(Stdio::null()).stdout(output).stderr(log).spawn().unwrap()
    }

    fn configuration(&self) -> String {
        let [first, second] = Server::IOTHREADS;
        // A session's lock, not a daemon's: during a migration the image has two daemons.
        let service = self.user.map(|user| format!("[service]\nuser = '{user}'\n"));
        format!(
            "version = 1
{}[control]
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
serial = '{}'
engine = {{ type = 'file', path = '{}', lock = 'session' }}
{}
",
            service.unwrap_or_default(),
            self.path("control").display(),
            Server::DEVICE,
            self.path("sock").display(),
            Server::QUEUES,
            Server::SERIAL,
            self.image.display(),
            self.device,
        )
    }
}

impl Server {
    pub(crate) const QUEUES: u16 = 4;
    pub(crate) const IOTHREADS: [&'static str; 2] = ["iot0", "iot1"];
    /// The disk's name in the control API.
    pub(crate) const DEVICE: &'static str = "disk";
    pub(crate) const SERIAL: &'static str = "dataplane-test";

    /// Starts the server under test; returns once it listens.
    pub(crate) fn start(image: &Image) -> Self {
        Self::start_named(image, "server")
    }

    /// The same, for more than one server of an image.
    pub(crate) fn start_named(image: &Image, name: &str) -> Self {
        Self::launch(image, name, None, None, "")
    }

    /// The same in the cgroup of this `cgroup.procs`.
    pub(crate) fn start_in(procs: Option<PathBuf>, image: &Image, name: &str) -> Self {
        Self::launch(image, name, procs, None, "")
    }

    /// The same with these lines in the device's configuration.
    pub(crate) fn start_with(image: &Image, device: &'static str) -> Self {
        Self::launch(image, "server", None, None, device)
    }

    /// The same as this user; root starts it.
    pub(crate) fn start_as(user: &'static str, image: &Image) -> Self {
        Self::launch(image, "server", None, Some(user), "")
    }

    fn launch(
        image: &Image,
        name: &str,
        procs: Option<PathBuf>,
        user: Option<&'static str>,
        device: &'static str,
    ) -> Self {
        let (kind, directory) = (Kind::under_test(), image.directory().to_owned());
        let (name, image) = (name.to_owned(), image.path());
        let launch = Launch { kind, name, directory, image, procs, user, device };
        let mut server = Self { child: launch.spawn(), launch };
        server.wait_until_it_listens();
        server
    }

    /// Where front ends connect.
    pub(crate) fn socket(&self) -> PathBuf {
        self.launch.path("sock")
    }

    /// The control socket; qemu-storage-daemon has no such.
    pub(crate) fn control(&self) -> PathBuf {
        self.launch.path("control")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kind(&self) -> Kind {
        self.launch.kind
    }

    /// What `rtvirtio mapping` prints of its configuration.
    pub(crate) fn mapping(&self, format: &str) -> String {
        let output = Command::new(rtvirtio())
            .arg("mapping")
            .arg(self.launch.path("toml"))
            .args(["--device", Self::DEVICE, "--format", format])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What `rtvirtio ctl` says.
    #[track_caller]
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        let output = Command::new(rtvirtio())
            .args(["ctl", "--socket"])
            .arg(self.control())
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What it said, in all its lives.
    pub(crate) fn log(&self) -> String {
        let text = std::fs::read(self.launch.path("log")).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    }

    /// By the kernel's list of sockets: a connection, if only to see, would be a session.
    fn wait_until_it_listens(&mut self) {
        let (start, socket) = (Instant::now(), self.socket());
        while !Sockets::of(&socket).listens {
            self.check();
            assert!(start.elapsed() < ENOUGH, "{} does not listen: {}", self.kind(), self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// It still runs.
    #[track_caller]
    pub(crate) fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} ended, {status}: {}", self.kind(), self.log());
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
        self.child = self.launch.spawn();
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
            assert!(start.elapsed() < ENOUGH, "{} ignores SIGTERM: {}", self.kind(), self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What the kernel's list has of a path.
pub(crate) struct Sockets {
    pub(crate) listens: bool,
    /// A front end is connected.
    pub(crate) connected: bool,
}

impl Sockets {
    pub(crate) fn of(path: &Path) -> Self {
        /// __SO_ACCEPTCON of linux/net.h, in the column Flags; SS_CONNECTED, in the column St.
        const LISTENS: &str = "00010000";
        const CONNECTED: &str = "03";
        let (path, all) = (path.display().to_string(), std::fs::read_to_string("/proc/net/unix"));
        let all = all.unwrap();
        let has = |word| {
            all.lines().any(|line| line.ends_with(&path) && line.split(' ').any(|w| w == word))
        };
        Self { listens: has(LISTENS), connected: has(CONNECTED) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{} said: {}", self.kind(), self.log());
        }
    }
}
