//! Locks, against ourselves and against QEMU's own tools.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rtvirtio_engine::file::{FileConfig, FileEngine, LockError};

use crate::scratch::{Image, Loop, config, open};
use crate::testing::skipped;

fn read_only(path: &Path) -> FileEngine {
    FileEngine::open(FileConfig { read_only: true, ..config(path) }).unwrap()
}

/// Whether QEMU is here; says so if not.
fn has_qemu() -> bool {
    let is_missing = |tool: &&str| Command::new(tool).arg("--version").output().is_err();
    let missing = ["qemu-system-x86_64", "qemu-io", "qemu-img"].into_iter().find(is_missing);
    if let Some(tool) = missing {
        skipped(format_args!("needs {tool} (packages qemu-system-x86, qemu-utils)"));
    }
    missing.is_none()
}

/// Writes with qemu-io, and says what it complained of.
fn qemu_io_writes(path: &Path) -> Result<(), String> {
    let mut command = Command::new("qemu-io");
    let output = command.args(["-f", "raw", "-c", "write 0 512"]).arg(path).output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    if output.status.success() { Ok(()) } else { Err(complaint) }
}

/// A virtual machine with the image as its disk; it does not run.
#[derive(Debug)]
struct Qemu(Child);

impl Qemu {
    /// It, or what it complained of.
    fn start(path: &Path, read_only: bool) -> Result<Self, String> {
        let is = if read_only { "on" } else { "off" };
        let drive = format!("if=none,id=d,format=raw,read-only={is},file={}", path.display());
        let child = Command::new("qemu-system-x86_64")
            .args(["-machine", "q35", "-accel", "tcg", "-S", "-display", "none", "-nodefaults"])
            .args(["-drive", &drive, "-device", "virtio-blk-pci,drive=d", "-qmp", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut qemu = Self(child.unwrap());
        // It greets early, and answers once its devices are there.
        let _ = qemu.0.stdin.as_mut().unwrap().write_all(b"{\"execute\":\"qmp_capabilities\"}\n");
        let mut lines = BufReader::new(qemu.0.stdout.take().unwrap()).lines();
        if lines.any(|line| line.unwrap().contains("\"return\"")) {
            return Ok(qemu);
        }
        let mut complaint = String::new();
        qemu.0.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
        Err(complaint)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn writer_excludes_writers_and_readers_until_it_is_dropped() {
    let image = Image::new(1 << 20);
    let (first, second) = (open(&image.path).unwrap(), open(&image.path).unwrap());
    let lock = first.lock().unwrap();
    assert!(matches!(second.lock(), Err(LockError::NotShared("write"))));
    assert!(matches!(read_only(&image.path).lock(), Err(LockError::Held("write"))));
    drop(lock);
    let lock = second.lock().unwrap();
    assert!(first.lock().is_err());
    // The lock outlives the engine that it came from.
    drop(second);
    assert!(first.lock().is_err());
    drop(lock);
    drop(first.lock().unwrap());
}

#[test]
fn failed_lock_leaves_none_behind() {
    let image = Image::new(1 << 20);
    let (reader, writer) = (read_only(&image.path), open(&image.path).unwrap());
    let lock = reader.lock().unwrap();
    assert!(matches!(writer.lock(), Err(LockError::NotShared("write"))));
    // The writer's own bytes would refuse another reader.
    let _other = read_only(&image.path).lock().unwrap();
    drop(lock);
}

#[test]
fn qemu_refuses_what_we_write() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(1 << 20);
    let engine = open(&image.path).unwrap();
    let lock = engine.lock().unwrap();
    for complaint in
        [qemu_io_writes(&image.path).unwrap_err(), Qemu::start(&image.path, false).unwrap_err()]
    {
        assert!(complaint.contains("Failed to get \"write\" lock"), "{complaint}");
    }
    let complaint = Qemu::start(&image.path, true).unwrap_err();
    assert!(complaint.contains("Failed to get shared \"write\" lock"), "{complaint}");
    let mut resize = Command::new("qemu-img");
    let resize = resize.args(["resize", "-f", "raw"]).arg(&image.path).arg("2M").output().unwrap();
    assert!(!resize.status.success(), "{resize:?}");
    drop(lock);
    qemu_io_writes(&image.path).unwrap();
}

#[test]
fn qemu_reads_what_we_read_and_writes_it_not() {
    if !has_qemu() {
        return;
    }
    let image = Image::new(1 << 20);
    let engine = read_only(&image.path);
    let _lock = engine.lock().unwrap();
    Qemu::start(&image.path, true).unwrap();
    for complaint in
        [qemu_io_writes(&image.path).unwrap_err(), Qemu::start(&image.path, false).unwrap_err()]
    {
        assert!(complaint.contains("Failed to get \"write\" lock"), "{complaint}");
    }
}

fn what_qemu_writes_is_refused(path: &Path) {
    let engine = open(path).unwrap();
    let qemu = Qemu::start(path, false).unwrap();
    assert!(matches!(engine.lock(), Err(LockError::NotShared("write"))));
    assert!(matches!(read_only(path).lock(), Err(LockError::Held("write"))));
    drop(qemu);
    drop(engine.lock().unwrap());
    let _qemu = Qemu::start(path, true).unwrap();
    let _lock = read_only(path).lock().unwrap();
    assert!(matches!(engine.lock(), Err(LockError::NotShared("write"))));
}

#[test]
fn we_refuse_what_qemu_writes_and_read_what_it_reads() {
    if has_qemu() {
        what_qemu_writes_is_refused(&Image::new(1 << 20).path);
    }
}

#[test]
fn block_device_is_locked_as_a_file_is() {
    if has_qemu()
        && let Some(device) = Loop::new(1 << 20, 512)
    {
        what_qemu_writes_is_refused(&device.path);
    }
}

#[test]
fn description_that_is_locked_already_is_not_locked_again() {
    use rtvirtio_engine::file::{Access, FileSource, Lock};
    use std::sync::Arc;

    let image = Image::new(1 << 20);
    let fd = |file: &std::fs::File| Arc::new(file.try_clone().unwrap().into());
    let file = image.file();
    let held = Lock::acquire(&fd(&file), Access::Write).unwrap();
    for access in [Access::Read, Access::Write] {
        assert!(matches!(Lock::acquire(&fd(&file), access), Err(LockError::Twice)));
    }
    let engine = FileEngine::open(rtvirtio_engine::file::FileConfig {
        source: FileSource::Fd(file.try_clone().unwrap().into()),
        ..crate::scratch::config(&image.path)
    });
    assert!(matches!(engine.unwrap().lock(), Err(LockError::Twice)));
    drop(held);
    // Two that read harm nobody, and a lock is free when its holder is gone.
    let one = Lock::acquire(&fd(&file), Access::Read).unwrap();
    let two = Lock::acquire(&fd(&file), Access::Read).unwrap();
    assert!(matches!(Lock::acquire(&fd(&file), Access::Write), Err(LockError::Twice)));
    // The description has the same locks for both.
    drop(one);
    let another = Arc::new(image.file().into());
    assert!(Lock::acquire(&another, Access::Write).is_err(), "the other one still reads");
    drop(two);
    drop(Lock::acquire(&another, Access::Write).unwrap());
    drop(Lock::acquire(&fd(&file), Access::Write).unwrap());
}
