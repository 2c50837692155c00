//! `rtvirtio serve` without rights: all that it can do still works, and it has none left.
//!
//! That a forbidden system call ends it is shown in the data plane's own tests (tests/sandbox.rs),
//! by processes that install the same list.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::{has_io_uring, skipped};
use rustix::process::{Pid, Signal, geteuid, kill_process};

use crate::scratch_disk::{RTVIRTIO, lab};

const ENOUGH: Duration = Duration::from_secs(60);

/// A daemon with a disk of each engine; killed when dropped.
struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the daemon said: {}", self.said());
        }
    }
}

impl Daemon {
    const DEVICES: [&'static str; 4] = ["ram", "file", "threads", "ssd"];

    /// Started, and listening; root becomes `user`.
    fn start(user: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let engine = |name: &str| match name {
            "ram" => "{ type = 'ram', size = '16M' }".to_owned(),
            "ssd" => "{ type = 'ssd', size = '16M', ssd = 'ref-8x80' }".to_owned(),
            name => {
                let path = at(&format!("{name}.raw"));
                fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
                let aio = if name == "threads" { "threads" } else { "auto" };
                format!("{{ type = 'file', aio = '{aio}', path = '{}' }}", path.display())
            }
        };
        let mut text = format!(
            "version = 1\n[service]\nuser = '{user}'\n[control]\nsocket = '{}'\n\
             [[iothread]]\nname = 'iot0'\n[[iothread]]\nname = 'iot1'\n",
            at("control").display()
        );
        for name in Self::DEVICES {
            text += &format!(
                "[[device]]\nname = '{name}'\nvm = 'vm'\nqueues = 4\nsocket = '{}'\nengine = {}\n",
                at(&format!("{name}.sock")).display(),
                engine(name)
            );
        }
        fs::write(at("serve.toml"), text).unwrap();
        let log = fs::File::create(at("log")).unwrap();
        let mut command = Command::new(RTVIRTIO);
        command.arg("serve").arg(at("serve.toml")).stdin(Stdio::null()).stderr(log);
        let mut daemon = Self { child: command.spawn().unwrap(), directory };
        let start = Instant::now();
        while !daemon.said().contains("serving") {
            assert_eq!(daemon.child.try_wait().unwrap(), None, "{}", daemon.said());
            assert!(start.elapsed() < ENOUGH, "it does not serve: {}", daemon.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn said(&self) -> String {
        fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    /// Runs `rtvirtio ctl`, which must succeed.
    fn ctl(&mut self, arguments: &[&str]) -> String {
        let mut command = Command::new(RTVIRTIO);
        command.args(["ctl", "--socket", "control"]).args(arguments).current_dir(self.path());
        self.succeeds(command.output().unwrap(), arguments)
    }

    /// Verifies a device by libblkio.
    fn verify(&mut self, device: &str) {
        let socket = self.path().join(format!("{device}.sock"));
        let mut command = Command::new(lab());
        command.args(["bench", "dataplane", "verify", "--seconds", "0.5", "--mebibytes", "8"]);
        let output = command.arg("--socket").arg(socket).output().unwrap();
        self.succeeds(output, &[device]);
    }

    #[track_caller]
    fn succeeds(&mut self, output: Output, what: &[&str]) -> String {
        let ended = self.child.try_wait().unwrap();
        assert_eq!(ended, None, "{what:?} ended the daemon: {}", self.said());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// SIGTERM ends it with 0.
    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}: {}", self.said());
                return;
            }
            assert!(start.elapsed() < ENOUGH, "it ignores SIGTERM");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Fields of the status of each of its threads.
fn threads(pid: u32) -> Vec<Vec<(String, String)>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let fields = |text: String| {
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
    };
    tasks.map(|t| fields(fs::read_to_string(t.unwrap().path().join("status")).unwrap())).collect()
}

/// No thread of a daemon is root's, has a capability or can make any system call.
#[track_caller]
pub(crate) fn has_no_rights(pid: u32) {
    for thread in &threads(pid) {
        let field = |key: &str| {
            let found = thread.iter().find(|(k, _)| k == key);
            found.unwrap_or_else(|| panic!("no {key}")).1.as_str()
        };
        let name = field("Name");
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(field(set), "0000000000000000", "{set} of {name}");
        }
        assert_eq!((field("NoNewPrivs"), field("Seccomp")), ("1", "2"), "{name}");
        let ids = [field("Uid"), field("Gid")];
        assert!(
            ids.iter().all(|ids| ids.split_whitespace().all(|id| id != "0")),
            "{name}: {ids:?}"
        );
        if geteuid().is_root() {
            assert_eq!((field("CapBnd"), field("Groups")), ("0000000000000000", ""), "{name}");
        }
    }
}

#[test]
fn daemon_without_rights_serves_and_is_controlled() {
    if !has_io_uring() {
        return;
    }
    let mut daemon = Daemon::start("nobody");
    if geteuid().is_root() {
        has_no_rights(daemon.child.id());
    } else {
        skipped("user and capabilities: only root can give them up");
    }
    for device in Daemon::DEVICES {
        daemon.verify(device);
    }

    let image = daemon.path().join("later.raw");
    fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    daemon.ctl(&["iothread", "create", "iot2"]);
    daemon.ctl(&["iothread", "pin", "iot2", "0"]);
    let later = ["device", "add", "later", "--vm", "vm", "--listen", "later.sock"];
    daemon.ctl(&[&later[..], &["--image", "later.raw", "--queues", "4"]].concat());
    daemon.verify("later");
    daemon.ctl(&["device", "resize", "later", "32M"]);
    daemon.ctl(&["mapping", "move", "later", "0", "iot2"]);
    daemon.verify("later");
    daemon.ctl(&["device", "remove", "later"]);
    daemon.ctl(&["iothread", "remove", "iot2"]);
    assert!(daemon.ctl(&["metrics"]).contains("rtvirtio_"));
    assert!(daemon.ctl(&["snapshot"]).contains("iot1"));

    if geteuid().is_root() {
        has_no_rights(daemon.child.id());
    }
    daemon.end();
}

#[test]
fn user_who_is_not_there_is_an_error_that_says_what_to_do() {
    if !geteuid().is_root() {
        return skipped("only root becomes another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    fs::write(&path, "version = 1\n[[iothread]]\nname = 'iot0'\n").unwrap();
    let serve = ["serve", "--user", "no-such-user"];
    let output = Command::new(RTVIRTIO).args(serve).arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("there is no user \"no-such-user\": make one"), "{said}");
}
