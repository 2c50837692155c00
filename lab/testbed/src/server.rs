//! Servers under test, as child processes that never outlive the benchmark.

use std::fs::File;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rtvirtio_calibrate::confine::confine;
use rtvirtio_host::interrupt::{Interrupted, wait};

use crate::curve::Curve;

/// How long a server may take to listen.
const START: Duration = Duration::from_secs(10);
/// How long one may take to say that it serves.
const NOTIFY: Duration = Duration::from_secs(30);
/// How long a server may take to end.
const END: Duration = Duration::from_secs(10);

/// The disk that a server serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// Memory of the server: reads give zeroes or what was written.
    Ram {
        /// Size.
        bytes: u64,
        /// CPU that each request burns, µs.
        cpu_us: u64,
    },
    /// A file, direct.
    File(PathBuf),
}

named! {
    /// A server.
    pub enum ServerKind {
        /// `rtvirtio serve`.
        Rtvirtio = "rtvirtio",
        /// `rtvirtio serve` with guest memory as fixed buffers.
        RtvirtioFixed = "rtvirtio-fixed",
        /// `qemu-storage-daemon`.
        Qsd = "qsd",
        /// A server that runs already, at a socket.
        Socket = "socket",
        /// None: io_uring on the file, from the client.
        File = "file",
    }
}

impl ServerKind {
    /// Whether it is this project's.
    pub const fn is_ours(self) -> bool {
        matches!(self, Self::Rtvirtio | Self::RtvirtioFixed)
    }
}

/// How a server is to be started.
#[derive(Debug, Clone)]
pub struct Setup<'a> {
    /// Which.
    pub kind: ServerKind,
    /// The disk.
    pub backing: &'a Backing,
    /// Queues of the disk.
    pub queues: usize,
    /// IOThreads; qemu-storage-daemon's export has one in any case.
    pub iothreads: usize,
    /// The `rtvirtio` that serves.
    pub program: &'a Path,
    /// Where socket, configuration and messages go.
    pub directory: &'a Path,
}

impl Setup<'_> {
    /// The command line, and the configuration for its file, if it has one.
    ///
    /// # Errors
    /// If the server is not one that can be started, or cannot serve this disk.
    pub fn command(&self) -> Result<(Vec<String>, Option<String>)> {
        let socket = self.socket();
        match self.kind {
            ServerKind::Rtvirtio | ServerKind::RtvirtioFixed => {
                let path = self.configuration();
                let program = self.program.display().to_string();
                let command = vec![program, "serve".to_owned(), path.display().to_string()];
                Ok((command, Some(self.toml(&socket))))
            }
            ServerKind::Qsd => Ok((self.qsd(&socket)?, None)),
            ServerKind::Socket | ServerKind::File => {
                bail!("{} cannot be started", self.kind.name())
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("disk.sock")
    }

    fn configuration(&self) -> PathBuf {
        self.directory.join("serve.toml")
    }

    fn toml(&self, socket: &Path) -> String {
        let engine = match self.backing {
            Backing::Ram { bytes, cpu_us } => {
                format!("type = \"ram\", size = {bytes}, cpu_us = {cpu_us}")
            }
            Backing::File(path) => whole(path),
        };
        let fixed = if self.kind == ServerKind::RtvirtioFixed { "on" } else { "off" };
        Configuration::new(None, std::iter::repeat_n(None, self.iothreads))
            .disk(("disk", "bench"), socket, self.queues, engine)
            .with(format_args!("fixed_buffers = \"{fixed}\"\n"))
            .text()
    }

    fn qsd(&self, socket: &Path) -> Result<Vec<String>> {
        let node = match self.backing {
            Backing::Ram { cpu_us: 1.., .. } => {
                bail!("qemu-storage-daemon has no disk that costs CPU")
            }
            Backing::Ram { bytes, .. } => {
                format!("driver=null-co,node-name=f0,size={bytes},read-zeroes=on")
            }
            Backing::File(path) => format!(
                "driver=file,node-name=f0,filename={},cache.direct=on,aio=io_uring,discard=unmap",
                escaped(path)
            ),
        };
        let export = qsd_export(("e0", "f0", "t0"), socket, self.queues);
        let arguments = [
            "qemu-storage-daemon",
            "--object",
            "iothread,id=t0",
            "--blockdev",
            &node,
            "--export",
            &export,
        ];
        Ok(arguments.map(str::to_owned).to_vec())
    }

    /// Starts it and waits until it listens.
    ///
    /// # Errors
    /// If it is not installed, ends, or does not listen; if interrupted.
    pub fn start(&self, interrupted: &Interrupted) -> Result<Server> {
        let (command, configuration) = self.command()?;
        if let Some(text) = configuration {
            std::fs::write(self.configuration(), text)?;
        }
        Server::start(&command, &self.socket(), self.directory, interrupted)
    }
}

/// The `rtvirtio` that is measured: the one that was built or installed with this program.
///
/// # Errors
/// If it is not there.
pub fn rtvirtio() -> Result<PathBuf> {
    let lab = std::env::current_exe().context("find out where this program lies")?;
    let rtvirtio = lab.with_file_name("rtvirtio");
    ensure!(
        rtvirtio.exists(),
        "{} is not there: build it with this one (make build) or install it beside",
        rtvirtio.display()
    );
    Ok(rtvirtio)
}

/// Whether the kernel gives this process an io_uring, without which `rtvirtio serve` serves nothing.
///
/// # Errors
/// It does not.
pub fn try_ring() -> std::io::Result<()> {
    io_uring::IoUring::new(1).map(drop)
}

/// As QEMU reads it: a comma ends a value, unless doubled.
pub fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// qemu-storage-daemon's `--export` of a node on an IOThread.
pub fn qsd_export(
    (id, node, iothread): (&str, &str, &str),
    socket: &Path,
    queues: usize,
) -> String {
    format!(
        "type=vhost-user-blk,id={id},node-name={node},addr.type=unix,addr.path={},writable=on,\
         num-queues={queues},iothread={iothread}",
        escaped(socket)
    )
}

/// What `rtvirtio serve` is told, as text.
#[derive(Debug)]
pub struct Configuration(String);

fn quoted(path: &Path) -> serde_json::Value {
    path.display().to_string().into()
}

impl Configuration {
    /// IOThreads `iot0` and so on, each on its CPU if one is said.
    pub fn new(control: Option<&Path>, cpus: impl IntoIterator<Item = Option<u32>>) -> Self {
        let mut text = "version = 1\n".to_owned();
        if let Some(socket) = control {
            text += &format!("[control]\nsocket = {}\n", quoted(socket));
        }
        for (number, cpu) in cpus.into_iter().enumerate() {
            text += &format!("[[iothread]]\nname = \"iot{number}\"\n");
            text += &cpu.map_or_else(String::new, |cpu| format!("cpus = [{cpu}]\n"));
        }
        Self(text)
    }

    /// Further lines, of their own table or of the last device.
    pub fn with(mut self, lines: impl std::fmt::Display) -> Self {
        self.0 += &lines.to_string();
        self
    }

    /// A schedule `device`.
    pub fn schedule(self, curve: &Curve) -> Self {
        let Curve { channels, request_ns, kib_ns, flush_ns } = curve;
        self.with(format_args!(
            "[[schedule]]\nname = \"device\"\nchannels = {channels}\nrequest_ns = {request_ns}\n\
             kib_ns = {kib_ns}\nflush_ns = {flush_ns}\n"
        ))
    }

    /// A disk of a VM, made by this engine.
    pub fn disk(
        self,
        (name, vm): (&str, &str),
        socket: &Path,
        queues: usize,
        engine: impl std::fmt::Display,
    ) -> Self {
        self.with(format_args!(
            "[[device]]\nname = \"{name}\"\nvm = \"{vm}\"\nsocket = {}\nqueues = {queues}\n\
             engine = {{ {engine} }}\n",
            quoted(socket)
        ))
    }

    /// All of it.
    #[must_use]
    pub fn text(self) -> String {
        self.0
    }
}

/// The part of a file or device that is a disk: others have other parts.
pub fn part(path: &Path, offset: u64, size: u64) -> String {
    format!(
        "type = \"file\", path = {}, direct = true, format = \"raw\", lock = \"off\", \
         offset = {offset}, size = {size}",
        quoted(path)
    )
}

/// A disk that is a file, direct.
pub fn whole(path: &Path) -> String {
    format!("type = \"file\", path = {}, direct = true", quoted(path))
}

/// Has `program serve` serve a configuration, which is written to `directory`, while `work` is done; `socket` is the
/// one that it makes last.
///
/// # Errors
/// If it does not start, ends, or does not end well; those of `work`.
pub fn serve<T>(
    program: &Path,
    toml: &str,
    directory: &Path,
    socket: &Path,
    interrupted: &Interrupted,
    work: impl FnOnce(&Server) -> Result<T>,
) -> Result<T> {
    Server::serving(program, toml, directory, socket, interrupted)?.during(work)
}

/// A running server; dropping it kills it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    name: String,
    socket: PathBuf,
    messages: PathBuf,
}

impl Server {
    /// Starts `program serve` with a configuration, which is written to `directory`; `socket` is the one that it
    /// makes last.
    pub fn serving(
        program: &Path,
        toml: &str,
        directory: &Path,
        socket: &Path,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let configuration = directory.join("serve.toml");
        std::fs::write(&configuration, toml)?;
        let command = [program, Path::new("serve"), &configuration];
        let command = command.map(|part| part.display().to_string());
        Self::start(&command, socket, directory, interrupted)
    }

    /// Starts `command` and waits until it listens at `socket`. It dies with this thread.
    ///
    /// # Errors
    /// If it is not installed, ends, or does not listen; if interrupted.
    pub fn start(
        command: &[String],
        socket: &Path,
        directory: &Path,
        interrupted: &Interrupted,
    ) -> Result<Self> {
        let (name, arguments) = command.split_first().context("no server to start")?;
        // A server that was killed leaves its socket.
        let _ = std::fs::remove_file(socket);
        let messages = directory.join("server.err");
        let mut command = Command::new(name);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(&messages)?);
        confine(&mut command, None)?;
        let child = command.spawn().map_err(|e| {
            let qsd = e.kind() == std::io::ErrorKind::NotFound && name == "qemu-storage-daemon";
            let hint = if qsd { " (install QEMU 10's qemu-utils: make guest)" } else { "" };
            anyhow!("start {name}: {e}{hint}")
        })?;
        let mut server = Self { child, name: name.clone(), socket: socket.to_owned(), messages };
        let deadline = Instant::now() + START;
        // A look, and no connection: whatever serves one client only is not kept busy.
        while !listens(socket) {
            server.check()?;
            if Instant::now() > deadline {
                bail!("{name} does not listen at {}: {}", socket.display(), server.said());
            }
            wait(Duration::from_millis(5), interrupted)?;
        }
        Ok(server)
    }

    /// As [`Server::serving`], and how long it took until it said that it serves (`sd_notify(3)`).
    ///
    /// # Errors
    /// The same, and if it does not say so.
    pub fn timed(
        program: &Path,
        toml: &str,
        directory: &Path,
        socket: &Path,
        interrupted: &Interrupted,
    ) -> Result<(Self, Duration)> {
        let notify = directory.join("notify");
        let listener = UnixDatagram::bind(&notify)?;
        // It may write as another user.
        let all = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        std::fs::set_permissions(&notify, all)?;
        listener.set_read_timeout(Some(NOTIFY))?;
        let configuration = directory.join("serve.toml");
        std::fs::write(&configuration, toml)?;
        let command = [
            "env".to_owned(),
            format!("NOTIFY_SOCKET={}", notify.display()),
            program.display().to_string(),
            "serve".to_owned(),
            configuration.display().to_string(),
        ];
        let began = Instant::now();
        let listener = std::thread::spawn(move || -> Result<(String, Instant)> {
            let mut text = [0; 256];
            let read = listener.recv(&mut text).context("the daemon says no word")?;
            Ok((String::from_utf8_lossy(&text[..read]).into_owned(), Instant::now()))
        });
        let server = Self::start(&command, socket, directory, interrupted)?;
        let Ok(heard) = listener.join() else { bail!("the listener for the daemon's word failed") };
        let (word, at) = heard?;
        ensure!(word.contains("READY=1"), "it said {word:?} instead of READY=1");
        std::fs::remove_file(notify)?;
        Ok((server, at - began))
    }

    /// Does `work`, and ends the server.
    ///
    /// # Errors
    /// If it ends before or does not end well, which says more than that `work` has lost it; those of `work`.
    pub fn during<T>(mut self, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let done = work(&self);
        self.check()?;
        let done = done?;
        self.terminate()?;
        Ok(done)
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// An error with what it said, if it has ended.
    ///
    /// # Errors
    /// If it has.
    pub fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}): {}", self.name, self.said()),
        }
    }

    /// The end of what it said.
    fn said(&self) -> String {
        let text = std::fs::read(&self.messages).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(600)..]).trim().to_owned()
    }

    /// Kills it at once (SIGKILL).
    ///
    /// # Errors
    /// If it has ended by itself.
    pub fn kill(mut self) -> Result<()> {
        self.check()?;
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Asks it to end (SIGTERM), which it must do with 0.
    ///
    /// # Errors
    /// If it ended before, does not end, or ends with another code.
    pub fn terminate(mut self) -> Result<()> {
        self.check()?;
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let deadline = Instant::now() + END;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("{} ended ({status}): {}", self.name, self.said()),
                None if Instant::now() > deadline => bail!("{} ignores SIGTERM", self.name),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Whether a socket of this path listens, without connecting to it.
fn listens(path: &Path) -> bool {
    // Flags 00010000 (__SO_ACCEPTCON), type 0001 (SOCK_STREAM): net/unix/af_unix.c.
    let Ok(sockets) = std::fs::read_to_string("/proc/net/unix") else { return path.exists() };
    let path = path.to_string_lossy();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some("00010000") && line.ends_with(&*path)
    })
}

/// The process that listens at a socket.
///
/// # Errors
/// If none does.
pub fn listener(socket: &Path) -> Result<u32> {
    let stream =
        UnixStream::connect(socket).with_context(|| format!("connect {}", socket.display()))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    Ok(peer.pid.as_raw_nonzero().get() as u32)
}

/// QEMU's version, or why it is not there.
///
/// # Errors
/// If `qemu-storage-daemon` is not installed or older than 9.
pub fn qsd_version() -> Result<String> {
    let missing = "qemu-storage-daemon is missing (make guest installs it, in qemu-utils)";
    let output = Command::new("qemu-storage-daemon").arg("--version").output().context(missing)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version =
        text.lines().next().unwrap_or_default().trim_start_matches("qemu-storage-daemon version ");
    let major: u32 = version.split('.').next().and_then(|v| v.parse().ok()).unwrap_or(0);
    anyhow::ensure!(
        major >= 9,
        "qemu-storage-daemon is {version}; 9 or later is needed (make guest)"
    );
    Ok(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup<'a>(kind: ServerKind, backing: &'a Backing) -> Setup<'a> {
        let (program, directory) = (Path::new("/bin/rtvirtio"), Path::new("/tmp/b,c"));
        Setup { kind, backing, queues: 4, iothreads: 2, program, directory }
    }

    #[test]
    fn configuration_of_ours_names_engine_threads_and_buffers() {
        let backing = Backing::Ram { bytes: 64 << 20, cpu_us: 100 };
        let (command, text) = setup(ServerKind::Rtvirtio, &backing).command().unwrap();
        assert_eq!(command, ["/bin/rtvirtio", "serve", "/tmp/b,c/serve.toml"]);
        assert_eq!(
            text.unwrap(),
            "version = 1\n[[iothread]]\nname = \"iot0\"\n[[iothread]]\nname = \"iot1\"\n\
             [[device]]\nname = \"disk\"\nvm = \"bench\"\nsocket = \"/tmp/b,c/disk.sock\"\n\
             queues = 4\nengine = { type = \"ram\", size = 67108864, cpu_us = 100 }\n\
             fixed_buffers = \"off\"\n"
        );
    }

    #[test]
    fn qsd_has_the_same_file_direct_and_commas_doubled() {
        let backing = Backing::File("/tmp/a,b".into());
        let (command, text) = setup(ServerKind::Qsd, &backing).command().unwrap();
        assert_eq!(text, None);
        assert_eq!(
            command[4],
            "driver=file,node-name=f0,filename=/tmp/a,,b,cache.direct=on,aio=io_uring,discard=unmap"
        );
        assert!(command[6].contains("addr.path=/tmp/b,,c/disk.sock,writable=on,num-queues=4"));
    }

    #[test]
    fn qsd_without_an_engine_that_costs_cpu_is_refused() {
        let backing = Backing::Ram { bytes: 1 << 20, cpu_us: 1 };
        assert!(setup(ServerKind::Qsd, &backing).command().is_err());
    }
}
