//! A guest as a test's machine: programs of this machine in it, and its shell.
//!
//! It runs under TCG, which works everywhere, and needs no root.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use cargo_metadata::Message;
use rtvirtio_testbed::guests::{Accelerator, Guest, GuestImage};
use tempfile::TempDir;

use crate::archive::{self, GuestFile};

/// Where `make test` has the guests' image made: beside what cargo builds.
pub(crate) fn image_directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("guest")
}

/// Whether `make test` leaves a test that boots guests to `make test-guests`; then that is said.
pub(crate) fn leaves_guests(test: &str) -> bool {
    let leaves = std::env::var_os("RTVIRTIO_TEST_WITHOUT_GUESTS").is_some();
    if leaves {
        let _ = writeln!(std::io::stderr(), "LEFT TO make test-guests: {test}");
    }
    leaves
}

/// The image; without it, or without QEMU, `test` is skipped by name.
pub(crate) fn image(test: &str) -> Option<GuestImage> {
    if leaves_guests(test) {
        return None;
    }
    let found = GuestImage::find(&image_directory());
    let qemu = Command::new("qemu-system-x86_64").arg("--version").output();
    let why = match (&found, qemu) {
        (Err(error), _) => error.to_string(),
        (_, Err(error)) => format!("qemu-system-x86_64: {error}"),
        (Ok(_), Ok(_)) => return found.ok(),
    };
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
    None
}

/// A program of this machine for a guest, without its debug information, at `path` there, and its
/// libraries where the loader looks last: what the guest has goes first.
pub(crate) fn program(source: &Path, path: &str) -> Result<Vec<GuestFile>, String> {
    let run = |command: &mut Command| {
        let name = command.get_program().to_string_lossy().into_owned();
        let output = command.output().map_err(|e| format!("needs {name}: {e}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(output.stdout) } else { Err(format!("{name}: {said}")) }
    };
    let stripped = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
    run(Command::new("strip").arg("-o").arg(stripped.path()).arg(source))?;
    let file = |path: String, source: &Path| {
        let content = std::fs::read(source).map_err(|e| format!("{}: {e}", source.display()))?;
        Ok::<_, String>(GuestFile { path, content, is_executable: true })
    };
    let mut files = vec![file(path.to_owned(), stripped.path())?];
    // NAME => PATH (ADDRESS); the loader itself has no arrow and is the guest's.
    for line in String::from_utf8_lossy(&run(Command::new("ldd").arg(source))?).lines() {
        if let [name, "=>", library, ..] = line.split_whitespace().collect::<Vec<_>>()[..] {
            files.push(file(format!("/usr/lib/{name}"), Path::new(library))?);
        }
    }
    Ok(files)
}

/// A crate's integration tests, built as `make test` builds them: then there is nothing to build
/// here.
pub(crate) fn crate_tests(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--workspace", "--all-features", "--locked", "--test", "it", "--no-run"]);
    cargo.args(["--message-format", "json", "--target-dir"]).arg(target);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let output = cargo.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let manifest = Path::new(name).join("Cargo.toml");
    let executable = |message: std::io::Result<Message>| match message.unwrap() {
        Message::CompilerArtifact(a) if a.manifest_path.ends_with(&manifest) => {
            a.executable.map(PathBuf::from)
        }
        _ => None,
    };
    Message::parse_stream(&output.stdout[..]).find_map(executable).expect("the crate's tests")
}

/// A running guest.
pub(crate) struct Machine {
    guest: Guest,
    _directory: TempDir,
}

/// What a script of the guest's shell printed, and its exit code.
pub(crate) struct Said {
    pub(crate) code: Option<i64>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Machine {
    /// Boots the image with `files` added, and `arguments` added to QEMU's.
    pub(crate) fn boot(image: &GuestImage, files: &[GuestFile], arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let initramfs = directory.path().join("initramfs");
        archive::extend(&image.initramfs, files, &initramfs).unwrap();
        let image = GuestImage { initramfs, ..image.clone() };
        let never = AtomicBool::new(false);
        let at = directory.path();
        let guest = Guest::boot(&image, Accelerator::Tcg, at, "test", arguments, &never).unwrap();
        Self { guest, _directory: directory }
    }

    /// Runs a script in the guest's shell (busybox), as root.
    pub(crate) fn shell(&self, script: &str, timeout: Duration) -> Said {
        let output = self.guest.run("/bin/sh", &["-c", script], timeout).unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { code: output.code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// What a script prints that ends with `code` within 20 s.
    #[track_caller]
    pub(crate) fn expect(&self, code: i64, script: &str) -> String {
        let Said { code: found, stdout, stderr } = self.shell(script, Duration::from_secs(20));
        assert_eq!(found, Some(code), "{script}\n{stdout}\n{stderr}");
        stdout + &stderr
    }

    /// Writes a file of the guest.
    pub(crate) fn write(&self, path: &str, text: &str) {
        self.guest.write(path, text).unwrap();
    }
}
