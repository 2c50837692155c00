//! `rtvirtio-run --slots`: programs on a disk that `rtvirtio serve` owns, by one IOThread.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rtvirtio_completion::slots::{FileIdentity, Offer, SLOTS, SlotMemory};
use rtvirtio_engine::testing::has_io_uring;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;

use super::{ENOUGH, counted, directory, has, program, say};
use crate::scratch_disk::{RTVIRTIO, built, eventually, said};

/// A data plane with one IOThread and one disk, in a directory; killed when dropped.
struct DataPlane {
    child: Child,
    directory: PathBuf,
}

impl DataPlane {
    /// Serves a new file of the directory, of so many bytes. None, and the test is skipped, where its IOThread gets no ring.
    fn start(directory: &TempDir, name: &str, bytes: u64) -> Option<Self> {
        let disk = directory.path().canonicalize().unwrap().join(name);
        File::create_new(&disk).unwrap().set_len(bytes).unwrap();
        Self::serve(directory, &disk)
    }

    fn serve(directory: &TempDir, disk: &Path) -> Option<Self> {
        if !has_io_uring() {
            return None;
        }
        let directory = directory.path().canonicalize().unwrap();
        let (at, disk) = (directory.display(), disk.display());
        let configuration = format!(
            "version = 1
[control]
socket = '{at}/control'
[[iothread]]
name = 'only'
[[device]]
name = 'disk'
vm = 'none'
socket = '{at}/vhost'
slots = '{at}/slots'
engine = {{ type = 'file', path = '{disk}', format = 'raw' }}
"
        );
        fs::write(directory.join("serve.toml"), configuration).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", RTVIRTIO, "serve"]).arg(directory.join("serve.toml"));
        let log = File::create(directory.join("serve.log")).unwrap();
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        let data_plane = Self { child, directory };
        eventually("a start", ENOUGH, || data_plane.log().contains("serving 1 devices"));
        Some(data_plane)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("slots")
    }

    /// `rtvirtio-run --slots` of a program, with statistics as JSON.
    fn run(&self, mode: &str, program: &Path) -> Command {
        let mut command = Command::new(built("rtvirtio-run"));
        command.args(["--mode", mode, "--stats", "--json", "--slots"]).arg(self.socket());
        command.arg("--").arg(program).stdin(Stdio::null());
        command
    }

    fn ctl(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(RTVIRTIO);
        command.args(["ctl", "--socket"]).arg(self.directory.join("control")).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}: {}", said(&output), self.log());
        String::from_utf8(output.stdout).unwrap()
    }

    /// What the control API says of the disk's slots.
    fn slots(&self) -> Value {
        let snapshot: Value = serde_json::from_str(&self.ctl(&["snapshot", "--json"])).unwrap();
        snapshot["devices"][0]["slots"].clone()
    }

    fn clients(&self) -> Vec<Value> {
        self.slots()["clients"].as_array().unwrap().clone()
    }

    fn client(&self, process: u32) -> Option<Value> {
        self.clients().into_iter().find(|client| client["process"] == process)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("serve.log")).unwrap_or_default()
    }

    /// What it has for its clients: descriptors, mappings and threads.
    fn holds(&self) -> (usize, usize, usize) {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let maps = fs::read_to_string(proc.join("maps")).unwrap();
        let mappings = maps.lines().filter(|line| line.contains("rtvirtio-slots")).count();
        let threads = fs::read_dir(proc.join("task")).unwrap().filter(|task| {
            let name = fs::read_to_string(task.as_ref().unwrap().path().join("comm"));
            name.is_ok_and(|name| name.trim() == "client")
        });
        let descriptors = fs::read_dir(proc.join("fd")).unwrap().filter(|fd| {
            let target = fs::read_link(fd.as_ref().unwrap().path());
            // A client's own is an eventfd; its memory and its socket are told by the others.
            target.is_ok_and(|target| target.to_string_lossy().contains("eventfd"))
        });
        (descriptors.count(), mappings, threads.count())
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the processes counted that went by slots.
fn by_slots(output: &Output) -> u64 {
    counted(output, "slots_spun") + counted(output, "slots_parked")
}

/// fio in one process, of which `threads` read, write and verify a part each; from `offset` on.
fn fio(command: &mut Command, disk: &Path, offset: &str, more: &[&str]) {
    command.args(["--ioengine=psync", "--direct=1", "--rw=randrw", "--bsrange=4k-64k"]);
    command.args([
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--size=8M",
        "--thread",
        "--numjobs=2",
    ]);
    command.args(["--name=job", "--offset_increment=8M", "--allow_file_create=0"]);
    command.arg(format!("--offset={offset}")).arg(format!("--filename={}", disk.display()));
    command.args(more);
}

/// A program that is killed when the value goes.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn two_processes_share_one_poller_and_verify_and_kill_9_of_one_frees_its_slots() {
    let test = "two_processes_share_one_poller_and_verify_and_kill_9_of_one_frees_its_slots";
    let Some(directory) = directory(test) else { return };
    if !has(test, "fio") {
        return;
    }
    let Some(data_plane) = DataPlane::start(&directory, "disk", 64 << 20) else { return };
    let disk = data_plane.directory.join("disk");
    let before = data_plane.holds();
    assert_eq!(data_plane.clients(), Vec::<Value>::new());
    let mut both = ["adaptive", "poll"].map(|mode| {
        let offset = if mode == "poll" { "32M" } else { "0" };
        let mut command = data_plane.run(mode, Path::new("fio"));
        fio(&mut command, &disk, offset, &["--time_based", "--runtime=120"]);
        Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    });
    let [stays, dies] = both.each_ref().map(|child| child.0.id());
    let writes = |process| {
        data_plane.client(process).and_then(|client| client["writes"].as_u64()).unwrap_or(0)
    };
    eventually("both write", ENOUGH, || writes(stays) > 100 && writes(dies) > 100);
    let clients = data_plane.clients();
    assert_eq!(clients.len(), 2);
    for client in &clients {
        assert_eq!((&client["iothread"], &client["slots"]), (&"only".into(), &63.into()));
    }
    let text = data_plane.ctl(&["snapshot"]);
    assert!(text.contains("turned out") && text.contains(&dies.to_string()), "{text}");

    let Running(child) = &mut both[1];
    assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("one client", ENOUGH, || data_plane.clients().len() == 1);
    assert!(data_plane.client(dies).is_none());
    let seen = writes(stays);
    eventually("the other goes on", ENOUGH, || writes(stays) > seen + 100);

    // It ends as it should: all that it wrote was right.
    let [Running(child), _] = &mut both;
    rustix::process::kill_process(Pid::from_child(child), Signal::INT).unwrap();
    let mut lines = String::new();
    let stderr = child.stderr.take().unwrap();
    let said: Vec<String> = BufReader::new(stderr).lines().map(Result::unwrap).collect();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.lines().for_each(|line| lines += &(line.unwrap() + "\n"));
    child.wait().unwrap();
    assert!(!lines.contains("verify:") && lines.contains("err= 0"), "{lines}{said:?}");
    eventually("no client", ENOUGH, || data_plane.clients().is_empty());
    assert_eq!(data_plane.slots()["broken"], 0);
    eventually("nothing left", ENOUGH, || data_plane.holds() == before);
}

#[test]
fn what_goes_by_slots_is_counted_and_verifies() {
    let test = "what_goes_by_slots_is_counted_and_verifies";
    let Some(directory) = directory(test) else { return };
    if !has(test, "fio") {
        return;
    }
    let Some(data_plane) = DataPlane::start(&directory, "disk", 64 << 20) else { return };
    let disk = data_plane.directory.join("disk");
    // Interrupt too: its threads sleep on their slots.
    for mode in super::MODES {
        let mut command = data_plane.run(mode, Path::new("fio"));
        fio(&mut command, &disk, "0", &[]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{mode}: {}", said(&output));
        assert!(by_slots(&output) > 200, "{mode}: {}", said(&output));
        assert_eq!(counted(&output, "refused"), 0, "{mode}: {}", said(&output));
        if mode == "interrupt" {
            // A few have ended before their thread could sleep.
            let parked = counted(&output, "slots_parked");
            assert!(parked > counted(&output, "slots_spun"), "{}", said(&output));
        }
    }
    // What was written by slots is in the file.
    let mut command = Command::new("fio");
    fio(&mut command, &disk, "0", &["--verify_only"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    // Another file does not go by them.
    let other = directory.path().join("other");
    File::create_new(&other).unwrap().set_len(64 << 20).unwrap();
    let mut command = data_plane.run("poll", Path::new("fio"));
    fio(&mut command, &other, "0", &[]);
    let output = command.output().unwrap();
    assert!(output.status.success() && by_slots(&output) == 0, "{}", said(&output));
}

/// A loop device over a file, detached when the value goes.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Option<Self> {
        let mut command = Command::new("losetup");
        let output =
            command.args(["--find", "--show", "--direct-io=on"]).arg(file).output().ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| Self(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).output();
    }
}

#[test]
fn block_device_is_known_by_whatever_name_it_was_opened() {
    let test = "block_device_is_known_by_whatever_name_it_was_opened";
    let Some(directory) = directory(test) else { return };
    if !has(test, "fio") {
        return;
    }
    let (file, other) = (directory.path().join("file"), directory.path().join("other"));
    File::create_new(&file).unwrap().set_len(64 << 20).unwrap();
    let Some(device) = Loop::over(&file) else {
        say(&format!("SKIPPED {test}: needs losetup, and the right to use it"));
        return;
    };
    let number = rustix::fs::stat(&device.0).unwrap().st_rdev;
    let kind = rustix::fs::FileType::BlockDevice;
    rustix::fs::mknodat(rustix::fs::CWD, &other, kind, 0o600.into(), number).unwrap();
    let Some(data_plane) = DataPlane::serve(&directory, &device.0) else { return };
    let mut command = data_plane.run("adaptive", Path::new("fio"));
    fio(&mut command, &other, "0", &[]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(by_slots(&output) > 200, "{}", said(&output));
    // The file behind it is another one.
    let mut command = data_plane.run("adaptive", Path::new("fio"));
    fio(&mut command, &file, "32M", &[]);
    let output = command.output().unwrap();
    assert!(output.status.success() && by_slots(&output) == 0, "{}", said(&output));
}

/// An operator's changes while a process verifies: its slots go with queue 0, and share the disk's schedule.
#[test]
fn slots_follow_queue_0_and_the_disks_schedule() {
    let test = "slots_follow_queue_0_and_the_disks_schedule";
    let Some(directory) = directory(test) else { return };
    if !has(test, "fio") {
        return;
    }
    let Some(data_plane) = DataPlane::start(&directory, "disk", 64 << 20) else { return };
    let disk = data_plane.directory.join("disk");
    let mut command = data_plane.run("adaptive", Path::new("fio"));
    fio(&mut command, &disk, "0", &["--time_based", "--runtime=120"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (process, mut child) = (child.id(), Running(child));
    let writes = || {
        let client = data_plane.client(process);
        client.and_then(|client| client["writes"].as_u64()).unwrap_or(0)
    };
    let goes_on = || {
        let seen = writes();
        eventually("it goes on", ENOUGH, || writes() > seen + 50);
    };
    goes_on();
    data_plane.ctl(&["iothread", "create", "second"]);
    for to in ["second", "only", "second"] {
        data_plane.ctl(&["mapping", "move", "disk", "0", to]);
        assert_eq!(data_plane.client(process).unwrap()["iothread"], to);
        goes_on();
    }
    // Nothing of it is left there.
    data_plane.ctl(&["iothread", "remove", "only"]);
    goes_on();
    let curve = ["--channels", "4", "--request-ns", "1000", "--kib-ns", "100"];
    data_plane.ctl(&[&["schedule", "set", "data"], &curve[..]].concat());
    data_plane.ctl(&["qos", "disk", "--schedule", "data"]);
    goes_on();
    let qos = || {
        let snapshot: Value =
            serde_json::from_str(&data_plane.ctl(&["snapshot", "--json"])).unwrap();
        snapshot["devices"][0]["qos"]["writes"]["requests"].as_u64().unwrap_or(0)
    };
    assert!(qos() > 20, "the schedule has seen {} writes", qos());
    data_plane.ctl(&["qos", "disk", "--off"]);
    goes_on();
    rustix::process::kill_process(Pid::from_child(&child.0), Signal::INT).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(child.0.stdout.as_mut().unwrap(), &mut text).unwrap();
    assert!(!text.contains("verify:") && text.contains("err= 0"), "{text}");
}

/// The parts of the C program, whose file is the disk.
#[test]
fn programs_behave_on_slots_as_without() {
    let test = "programs_behave_on_slots_as_without";
    for (part, code, at_least) in [
        ("threads", 0, 500),
        ("signals", 0, 500),
        ("descriptors", 0, 1),
        ("cancellation", 0, 50),
        ("limit", 0, 50),
        ("sandbox", 0, 20),
        ("exec", 7, 0),
    ] {
        let Some(directory) = directory(test) else { return };
        let Some(data_plane) = DataPlane::start(&directory, "pages", 256 * 4096) else { return };
        for mode in ["poll", "adaptive"] {
            let mut command = data_plane.run(mode, program());
            let output = command.arg(part).arg(&data_plane.directory).output().unwrap();
            assert_eq!(output.status.code(), Some(code), "{part}, {mode}: {}", said(&output));
            assert!(by_slots(&output) >= at_least, "{part}, {mode}: {}", said(&output));
        }
        eventually("no client", ENOUGH, || data_plane.clients().is_empty());
        assert_eq!(data_plane.slots()["broken"], 0, "{part}");
    }
}

/// Processes that fork are each a client of their own.
#[test]
fn child_has_slots_of_its_own_and_its_parents_go_with_the_parent() {
    let test = "child_has_slots_of_its_own_and_its_parents_go_with_the_parent";
    let Some(directory) = directory(test) else { return };
    if !has(test, "python3") {
        return;
    }
    let Some(data_plane) = DataPlane::start(&directory, "disk", 1 << 20) else { return };
    let script = "
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
buffer = mmap.mmap(-1, 4096)
def round_trip(n):
    buffer[:] = bytes([n]) * 4096
    assert os.pwritev(fd, [buffer], n * 4096) == 4096
    buffer[:] = bytes(4096)
    assert os.preadv(fd, [buffer], n * 4096) == 4096
    assert buffer[:] == bytes([n]) * 4096
round_trip(1)
if os.fork() == 0:
    round_trip(2)
    print(os.getpid(), flush=True)
    sys.stdin.read()
    round_trip(3)
    os._exit(0)
print(os.getpid(), flush=True)
import signal
signal.pause()
";
    let mut command = data_plane.run("adaptive", Path::new("python3"));
    command.args(["-c", script]).arg(data_plane.directory.join("disk"));
    let mut parent = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(parent.0.stdout.take().unwrap()).lines();
    let mut pid = || lines.next().unwrap().unwrap().parse::<u32>().unwrap();
    let (one, other) = (pid(), pid());
    let child = if one == parent.0.id() { other } else { one };
    assert_eq!(data_plane.clients().len(), 2);
    let stdin = parent.0.stdin.take();
    drop(parent);
    eventually("the child alone", ENOUGH, || {
        data_plane.clients().len() == 1 && data_plane.client(child).is_some()
    });
    // It does what is left for it, and goes.
    drop(stdin);
    eventually("no client", ENOUGH, || data_plane.clients().is_empty());
}

#[test]
fn data_plane_that_is_killed_or_ends_is_not_noticed() {
    let test = "data_plane_that_is_killed_or_ends_is_not_noticed";
    if !has(test, "fio") {
        return;
    }
    for (mode, signal) in
        [("adaptive", Signal::KILL), ("poll", Signal::KILL), ("adaptive", Signal::TERM)]
    {
        let Some(directory) = directory(test) else { return };
        let Some(mut data_plane) = DataPlane::start(&directory, "disk", 64 << 20) else { return };
        let disk = data_plane.directory.join("disk");
        let mut command = data_plane.run(mode, Path::new("fio"));
        fio(&mut command, &disk, "0", &["--time_based", "--runtime=4"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let process = child.id();
        eventually("it writes", ENOUGH, || {
            data_plane.client(process).is_some_and(|client| client["writes"].as_u64() > Some(50))
        });
        rustix::process::kill_process(Pid::from_child(&data_plane.child), signal).unwrap();
        let ended = data_plane.child.wait().unwrap();
        assert_eq!(ended.success(), signal == Signal::TERM, "{}", data_plane.log());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{mode}: {}", said(&output));
        assert!(by_slots(&output) > 50, "{mode}: {}", said(&output));
        let others = counted(&output, "spun") + counted(&output, "parked");
        let others = others + counted(&output, "without_token") + counted(&output, "passed");
        assert!(others > 50, "{mode}: {}", said(&output));
    }
}

#[test]
fn socket_without_slots_is_refused_before_the_program_is_tried() {
    let directory = TempDir::new().unwrap();
    let run = |socket: &Path| {
        let mut command = Command::new(built("rtvirtio-run"));
        let output = command.arg("--slots").arg(socket).args(["--", "true"]).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        String::from_utf8(output.stderr).unwrap()
    };
    let nobody = run(&directory.path().join("nobody"));
    assert!(nobody.contains("start rtvirtio serve with slots"), "{nobody}");
    let path = directory.path().join("other");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let other = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let other_said = run(&path);
    other.join().unwrap();
    assert!(other_said.contains("has no slots for this program"), "{other_said}");
}

/// A client that is no library of ours.
struct Hostile {
    stream: UnixStream,
    memory: SlotMemory,
    offer: Offer,
}

impl Hostile {
    fn connect(data_plane: &DataPlane) -> Self {
        let stream = UnixStream::connect(data_plane.socket()).unwrap();
        stream.set_read_timeout(Some(ENOUGH)).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; Offer::BYTES];
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(&stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        assert_eq!(received.bytes, Offer::BYTES);
        let file: OwnedFd = control
            .drain()
            .find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            })
            .unwrap();
        // It is sealed: nobody takes pages away under the data plane.
        assert_eq!(rustix::fs::ftruncate(&file, 4096), Err(rustix::io::Errno::PERM));
        let memory = SlotMemory::map(&file).unwrap();
        Self { stream, memory, offer: Offer::from_bytes(&bytes).unwrap() }
    }

    /// Writes to words of the slots' lines and rings, at random.
    fn write_garbage(&self, random: &mut impl FnMut() -> u32) {
        let start = std::ptr::from_ref(self.memory.slots()).cast::<u8>().cast_mut();
        for _ in 0..500 {
            let byte = random() as usize % ((128 + 64 * SLOTS) / 4) * 4;
            let value = match random() % 4 {
                0 => 1,
                1 => 4096,
                2 => u32::MAX,
                _ => random() << 1 | random() & 1,
            };
            // SAFETY: within the slots.
            let at = unsafe { start.add(byte) };
            // SAFETY: an aligned word that is there as long as the mapping, accessed by atomics only.
            let word = unsafe { AtomicU32::from_ptr(at.cast()) };
            // Not "write": its offset might be where the other one verifies.
            if value & 0x3 != 2 {
                word.store(value, Ordering::Relaxed);
            }
            self.memory.slots().doorbell().ring(random() as usize % SLOTS);
        }
    }

    /// Whether its connection ends, which is when all that it had in flight has ended.
    fn turned_out(mut self) -> bool {
        let ended = match std::io::Read::read(&mut self.stream, &mut [0]) {
            // What it said has not been read.
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
            Ok(bytes) => bytes == 0,
        };
        ended && self.memory.slots().has_ended()
    }
}

#[test]
fn client_that_lies_is_turned_out_and_others_verify() {
    let test = "client_that_lies_is_turned_out_and_others_verify";
    let Some(directory) = directory(test) else { return };
    if !has(test, "fio") {
        return;
    }
    let Some(data_plane) = DataPlane::start(&directory, "disk", 64 << 20) else { return };
    let disk = data_plane.directory.join("disk");
    let before = data_plane.holds();
    let mut command = data_plane.run("adaptive", Path::new("fio"));
    fio(&mut command, &disk, "16M", &["--time_based", "--runtime=3"]);
    let good = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let process = good.id();
    eventually("it writes", ENOUGH, || {
        data_plane.client(process).is_some_and(|client| client["writes"].as_u64() > Some(50))
    });
    let mut seed = 1_u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as u32
    };
    for _ in 0..20 {
        let hostile = Hostile::connect(&data_plane);
        let status = rustix::fs::stat(&disk).unwrap();
        assert_eq!(Some(hostile.offer.file), FileIdentity::of(&status));
        hostile.write_garbage(&mut random);
        assert!(hostile.turned_out());
    }
    // One that talks is turned out too, but has broken nothing.
    let mut talks = Hostile::connect(&data_plane);
    std::io::Write::write_all(&mut talks.stream, b"x").unwrap();
    assert!(talks.turned_out());
    let output = good.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(by_slots(&output) > 50, "{}", said(&output));
    eventually("no client", ENOUGH, || data_plane.clients().is_empty());
    assert_eq!(data_plane.slots()["broken"], 20);
    eventually("nothing left", ENOUGH, || data_plane.holds() == before);
}

#[test]
fn more_processes_than_a_disk_takes_are_refused_until_one_leaves() {
    let test = "more_processes_than_a_disk_takes_are_refused_until_one_leaves";
    let Some(directory) = directory(test) else { return };
    let Some(data_plane) = DataPlane::start(&directory, "disk", 1 << 20) else { return };
    let mut clients: Vec<_> = (0..64).map(|_| Hostile::connect(&data_plane)).collect();
    assert_eq!(data_plane.clients().len(), 64);
    let mut stream = UnixStream::connect(data_plane.socket()).unwrap();
    assert_eq!(std::io::Read::read(&mut stream, &mut [0]).unwrap(), 0);
    clients.truncate(63);
    eventually("one has left", ENOUGH, || data_plane.clients().len() == 63);
    eventually("another is let in", ENOUGH, || {
        let mut stream = UnixStream::connect(data_plane.socket()).unwrap();
        std::io::Read::read(&mut stream, &mut [0; Offer::BYTES]).is_ok_and(|n| n > 0)
    });
    say(&format!("{test}: 64 clients"));
}
