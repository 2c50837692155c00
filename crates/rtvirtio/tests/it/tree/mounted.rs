//! A data plane of one RAM disk, and its tree on a directory.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::scratch_disk::{RTVIRTIO, alone, built, may_mount};

/// Long enough on a busy machine.
pub(crate) const ENOUGH: Duration = Duration::from_secs(60);
/// Nobody's number.
pub(crate) const NOBODY: &str = "65534";

/// Past the test harness, which would hide it.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Whether this machine can run what `test` needs; if not, says so by name. One at a time, and not beside
/// tests that look for mounts that others have left.
pub(crate) fn can_mount(test: &str) -> Option<MutexGuard<'static, ()>> {
    let why = if !rustix::process::geteuid().is_root() {
        "needs root"
    } else if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        "needs /dev/fuse"
    } else if !may_mount() {
        "needs the right to mount"
    } else {
        return has_io_uring().then(alone);
    };
    say(&format!("SKIPPED {test}: {why}"));
    None
}

pub(crate) fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Whether there is such a process, and not only its exit status.
pub(crate) fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Whether no thread of it goes on after a SIGSTOP.
pub(crate) fn has_stopped(pid: u32) -> bool {
    fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(|task| {
        let stat = fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

/// `rtvirtio serve`; killed when dropped.
pub(crate) struct DataPlane {
    child: Child,
    directory: TempDir,
}

impl DataPlane {
    /// As nobody, with IOThreads iot0 and iot1 and the device `root` of 2 queues.
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Nobody goes through it.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let at = |name: &str| directory.path().join(name);
        let text = format!(
            "version = 1\n[service]\nuser = 'nobody'\n[control]\nsocket = '{}'\n[[iothread]]\nname = \
             'iot0'\n[[iothread]]\nname = 'iot1'\n[[device]]\nname = 'root'\nvm = 'plc'\nsocket = \
             '{}'\nqueues = 2\nengine = {{ type = 'ram', size = '64M' }}\n",
            at("control").display(),
            at("root.sock").display()
        );
        fs::write(at("serve.toml"), text).unwrap();
        let log = File::create(at("serve.log")).unwrap();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", RTVIRTIO, "serve"])
            .arg(at("serve.toml"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut data_plane = Self { child, directory };
        let start = Instant::now();
        while !data_plane.said().contains("serving") {
            assert_eq!(data_plane.child.try_wait().unwrap(), None, "{}", data_plane.said());
            assert!(start.elapsed() < ENOUGH, "it does not serve: {}", data_plane.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        data_plane
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn said(&self) -> String {
        fs::read_to_string(self.path("serve.log")).unwrap_or_default()
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(RTVIRTIO);
        command.args(["ctl", "--socket"]).arg(self.path("control")).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", crate::scratch_disk::said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What writes to the tree can change of it.
    pub(crate) fn settings(&self) -> Value {
        let snapshot: Value = serde_json::from_str(&self.ctl(&["--json", "snapshot"])).unwrap();
        let pick = |of: &Value, keys: &[&str]| -> Value {
            keys.iter().map(|key| of[*key].clone()).collect()
        };
        let all = |of: &Value, keys: &[&str]| -> Value {
            of.as_array().unwrap().iter().map(|one| pick(one, keys)).collect()
        };
        let devices = snapshot["devices"].as_array().unwrap();
        let queues: Value = devices.iter().map(|d| all(&d["queues"], &["iothread"])).collect();
        Value::from_iter([
            all(&snapshot["iothreads"], &["name", "cpus", "locked"]),
            all(&snapshot["devices"], &["name"]),
            queues,
        ])
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the data plane said: {}", self.said());
        }
    }
}

/// Who mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    Root,
    Nobody,
}

impl User {
    /// A command of that user.
    pub(crate) fn command(self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if self == Self::Nobody {
            command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
        }
        command
    }

    /// Whether that user can mount; says why not.
    pub(crate) fn can_mount(self, test: &str) -> bool {
        let works = |arguments: &[&str]| {
            let status = self.command().args(arguments).stdout(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        let why = if self == Self::Root {
            return true;
        } else if !works(&["fusermount3", "--version"]) {
            "needs fusermount3"
        } else if !works(&["test", "-r", "/dev/fuse", "-a", "-w", "/dev/fuse"]) {
            "needs a /dev/fuse that nobody can open"
        } else if !works(&[RTVIRTIO, "--version"]) {
            "needs a binary that nobody can run"
        } else {
            return true;
        };
        say(&format!("SKIPPED {test} as a user: {why}"));
        false
    }
}

/// `rtvirtio-tree`; killed when dropped, and unmounted if that fails to.
pub(crate) struct Mount {
    pub(crate) child: Child,
    pub(crate) server: u32,
    directory: PathBuf,
    log: PathBuf,
}

impl Mount {
    pub(crate) fn start(of: &DataPlane) -> Self {
        Self::start_as(User::Root, of)
    }

    pub(crate) fn start_as(user: User, of: &DataPlane) -> Self {
        let directory = of.path("tree");
        if !directory.exists() {
            fs::create_dir(&directory).unwrap();
        }
        if user == User::Nobody {
            let nobody = NOBODY.parse().ok();
            std::os::unix::fs::chown(&directory, nobody, nobody).unwrap();
        }
        let log = of.path("tree.log");
        let mut child = user
            .command()
            .args([&built("rtvirtio-tree"), "--json", "--socket"])
            .arg(of.path("control"))
            .arg(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said = || fs::read_to_string(&log).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{}", said()));
        assert_eq!(ready["directory"], directory.to_str().unwrap());
        let server = ready["server_pid"].as_u64().unwrap() as u32;
        let mount = Self { child, server, directory, log };
        assert!(mount.is_there());
        mount
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    #[track_caller]
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// As a shell's `echo text >name`.
    pub(crate) fn echo(&self, text: &str, name: &str) -> std::io::Result<()> {
        let mut file =
            File::options().write(true).create(true).truncate(true).open(self.path(name))?;
        file.write_all(format!("{text}\n").as_bytes())
    }

    /// The same, which must succeed.
    #[track_caller]
    pub(crate) fn write(&self, text: &str, name: &str) {
        self.echo(text, name).unwrap_or_else(|e| panic!("{text} >{name}: {e}: {}", self.why()));
    }

    pub(crate) fn why(&self) -> String {
        fs::read_to_string(self.path("error")).unwrap_or_default()
    }

    /// Names in a directory, sorted.
    #[track_caller]
    pub(crate) fn list(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry.unwrap().file_name().into_string().unwrap()
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort_unstable();
        names
    }

    pub(crate) fn is_there(&self) -> bool {
        is_mounted(&self.directory)
    }

    /// How long it takes until it is unmounted and both processes have ended, and how it ended.
    #[track_caller]
    pub(crate) fn ends(&mut self) -> (Duration, ExitStatus) {
        let start = Instant::now();
        let mut unmounted = None;
        loop {
            if !self.is_there() {
                unmounted.get_or_insert(start.elapsed());
            }
            let status = self.child.try_wait().unwrap();
            if let (Some(unmounted), Some(status), false) = (unmounted, status, runs(self.server)) {
                return (unmounted, status);
            }
            assert!(start.elapsed() < ENOUGH, "{unmounted:?} {status:?}: {}", self.said());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let start = Instant::now();
        while self.is_there() && start.elapsed() < ENOUGH {
            std::thread::sleep(Duration::from_millis(10));
        }
        if self.is_there() {
            let _ = Command::new("umount").arg("-l").arg(&self.directory).status();
        }
    }
}

pub(crate) fn is_mounted(directory: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4) == directory.to_str())
}
