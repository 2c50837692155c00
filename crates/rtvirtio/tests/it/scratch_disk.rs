//! What the tests that need root share: a scratch disk, cgroups, leftovers.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rtvirtio_host::{Host, HostError};

/// The binary under test.
pub(crate) const RTVIRTIO: &str = env!("CARGO_BIN_EXE_rtvirtio");

/// Another binary of the workspace, which cargo puts beside it: `cargo test --workspace` builds all of them, as each
/// has a test of its own.
pub(crate) fn built(name: &str) -> String {
    let path = Path::new(RTVIRTIO).with_file_name(name);
    assert!(path.exists(), "{} is not built: cargo build --workspace", path.display());
    path.display().to_string()
}

/// The laboratory's binary.
pub(crate) fn lab() -> String {
    built("rtvirtio-lab")
}

/// One at a time: there is one host.
static HOST: Mutex<()> = Mutex::new(());

/// Whether this machine can run what `test` needs; if not, says so by name.
/// Written past the test harness, which would hide it.
pub(crate) fn can_run(test: &str) -> Option<MutexGuard<'static, ()>> {
    let skip = |why: &str| {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
        None
    };
    if !rustix::process::geteuid().is_root() {
        return skip("needs root");
    }
    for node in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(node).exists() {
            return skip(&format!("needs {node}"));
        }
    }
    if Host::new("/").cgroup_version().is_err() {
        return skip("needs a cgroup hierarchy with the io controller");
    }
    if !std::process::Command::new("fio")
        .arg("--version")
        .output()
        .is_ok_and(|o| o.status.success())
    {
        return skip("needs fio");
    }
    let alone = alone();
    static REFUSED: OnceLock<Option<String>> = OnceLock::new();
    match REFUSED.get_or_init(refused) {
        Some(why) => skip(why),
        None => Some(alone),
    }
}

/// What this machine refuses to root, as a container may: found out by making a cgroup and a small scratch disk. What else goes
/// wrong is a failure.
fn refused() -> Option<String> {
    // Where the knobs of disks are.
    if let Err(error) = rustix::fs::access("/sys/block", rustix::fs::Access::WRITE_OK) {
        return Some(format!("needs to write below /sys/block: {error}"));
    }
    let state = tempfile::tempdir().expect("a directory");
    let host = Host::new("/").with_state_directory(state.path());
    let group = PathBuf::from(format!("rtvirtio/test-{}", std::process::id()));
    match host.create_cgroup(&group) {
        Err(HostError::Cgroup { action, path, source }) if is_refusal(&source) => {
            return Some(format!("needs to {action} cgroup {}: {source}", path.display()));
        }
        made => drop(made.expect("a cgroup")),
    }
    host.remove_cgroup(&group).expect("the cgroup goes");
    let mut scratch = Command::new(lab());
    // It goes at the end of its standard input.
    scratch.args(["scratch", "--json", "--size-mib", "16"]).stdin(Stdio::null());
    let output = scratch.output().expect("the binary runs");
    if output.status.success() {
        return None;
    }
    let text = said(&output);
    // A node that does not appear, and what the kernel does not have or does not give this process.
    let is_refused = text.contains("a container's own /dev?")
        || [libc::EPERM, libc::EACCES, libc::ENODEV, libc::ENOSYS]
            .iter()
            .any(|errno| text.contains(&format!("(os error {errno})")));
    assert!(is_refused, "{text}");
    let why = text.lines().find_map(|line| line.strip_prefix("error: "));
    Some(format!("needs a scratch disk: {}", why.unwrap_or(&text)))
}

/// Whether a cgroup cannot be made here: its hierarchy is read-only, or has a container's processes in its root.
fn is_refusal(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, ResourceBusy};
    matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem | ResourceBusy)
}

/// Whether root may mount here, which it may not in most containers.
pub(crate) fn may_mount() -> bool {
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "mount", "-t", "tmpfs", "none", "/tmp"]);
    unshare.output().is_ok_and(|output| output.status.success())
}

/// Until it is dropped, no other test here uses the host or loads it.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    HOST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the binary with its state in `state`.
pub(crate) fn rtvirtio(state: &Path, arguments: &[&str]) -> Output {
    output(RTVIRTIO, state, arguments)
}

/// Runs a binary with its state in `state`.
pub(crate) fn output(program: &str, state: &Path, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .env("RTVIRTIO_STATE_DIR", state)
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs")
}

/// What the run printed, for messages.
pub(crate) fn said(output: &Output) -> String {
    format!(
        "{:?}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// A served scratch disk, gone when dropped.
pub(crate) struct Disk {
    server: Child,
    pub(crate) node: PathBuf,
}

impl Disk {
    pub(crate) fn start() -> Self {
        let mut server = Command::new(lab())
            .args(["scratch", "--json", "--ssd", "ref-4x250", "--size-mib", "2048"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut line = String::new();
        let stdout = server.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let ready: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        let node = ready["device"].as_str().expect("a device").into();
        Self { server, node }
    }

    /// A file of the disk's queue, such as `scheduler`.
    pub(crate) fn queue(&self, file: &str) -> String {
        let name = self.node.file_name().expect("a name").to_string_lossy().into_owned();
        let path = format!("/sys/block/{name}/queue/{file}");
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    pub(crate) fn kill(&mut self) {
        self.server.kill().expect("it runs");
        self.server.wait().expect("it ends");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}

/// Cgroups below `rtvirtio/`, removed when dropped.
pub(crate) struct Groups {
    host: Host,
    root: PathBuf,
    _state: tempfile::TempDir,
}

impl Groups {
    pub(crate) fn make(names: &[&str]) -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let host = Host::new("/").with_state_directory(state.path());
        let root = PathBuf::from(format!("rtvirtio/test-{}", std::process::id()));
        for name in names {
            host.create_cgroup(&root.join(name)).expect("a cgroup");
        }
        Self { host, root, _state: state }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.root.join(name).display().to_string()
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let _ = self.host.remove_cgroup(&self.root);
    }
}

/// Loop devices of scratch disks, cgroups and processes of benchmarks that are there now.
pub(crate) fn left_behind() -> Vec<String> {
    let mut left = Vec::new();
    for entry in std::fs::read_dir("/sys/block").expect("sysfs").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let number: Option<u32> = name.strip_prefix("loop").and_then(|n| n.parse().ok());
        if number.is_some_and(|n| (100..200).contains(&n)) {
            left.push(name);
        }
    }
    let mount = Host::new("/").cgroup_version().expect("cgroups").mount().to_owned();
    let bench = mount.join("rtvirtio/bench");
    if bench.exists() {
        left.push(bench.display().to_string());
    }
    if std::fs::read_to_string("/proc/mounts").expect("procfs").contains("rtvirtio") {
        left.push("a mount".to_owned());
    }
    left
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, within: Duration, condition: impl Fn() -> bool) {
    let end = Instant::now() + within;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not happen within {within:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
