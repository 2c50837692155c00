//! A VM: a process of the kernel in memory, whose monitor and guest agent are real sockets, and in
//! whose guest there is another kernel in memory.
//!
//! Like QEMU, each socket serves one client at a time. How it misbehaves is up to the test.

use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use rtvirtio_units::{DiskName, IoThreadName};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::qemu::{Wire, refusal};

/// How an agent or a monitor treats its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// As it should.
    Fair,
    /// From the first command that contains this on, it does nothing and says nothing.
    DeadFrom(&'static str),
    /// From that command on, it does what it is told and does not say so.
    MuteFrom(&'static str),
    /// It does what it is told, and takes its time: well below what one answer may take.
    Slow,
    /// It says that IOThreads poll as they are told, and has them do what they did.
    KeepsPolling,
    /// It sets what it is told and reads something else.
    ReadsOtherwise,
}

pub(super) struct State {
    pub(super) agent: Manner,
    pub(super) monitor: Manner,
    /// What the guest says of its disks.
    pub(super) claims: Value,
    /// The id of QEMU's device for the disk.
    pub(super) id: String,
    pub(super) serial: String,
    pub(super) poll_max: u64,
    is_over: bool,
    /// Requests, without those that only read.
    pub(super) written: Vec<String>,
}

pub(super) struct Machine {
    directory: TempDir,
    name: String,
    pid: u32,
    pub(super) kernel: Arc<FakeSysfs>,
    state: Arc<Mutex<State>>,
}

/// As `qemu-ga` answers with one virtio-blk disk.
fn claim(node: &str, slot: u64) -> Value {
    json!({"name": node, "partition": false, "address": {
        "bus-type": "virtio", "bus": 0, "target": 0, "unit": 0, "dev": node,
        "pci-controller": {"domain": 0, "bus": 0, "slot": slot, "function": 0}}})
}

impl Machine {
    /// Starts the VM `name` with a disk `root` under `mq-deadline` and an IOThread `io0`.
    pub(super) fn start(host: &FakeSysfs, name: &str, pid: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kernel = FakeSysfs::bare();
        kernel.add_disk("vda", DeviceNumber::new(253, 0), 1 << 20);
        kernel.put("/proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n");
        let queue = Path::new("/sys/block/vda/queue");
        kernel.write(&queue.join("scheduler"), "mq-deadline").unwrap();
        kernel.write(&queue.join("iosched/read_expire"), "77").unwrap();
        kernel.write(&queue.join("nr_requests"), "32").unwrap();
        let state = State {
            agent: Manner::Fair,
            monitor: Manner::Fair,
            claims: json!([
                {"name": "/dev/vda1", "partition": true, "dependencies": ["/dev/vda"]},
                claim("/dev/vda", 4),
                claim("/dev/vdb", 5),
            ]),
            id: "root".to_owned(),
            serial: String::new(),
            poll_max: 32_768,
            is_over: false,
            written: Vec::new(),
        };
        let machine = Self {
            directory,
            name: name.to_owned(),
            pid,
            kernel: Arc::new(kernel),
            state: Arc::new(Mutex::new(state)),
        };
        machine.run_in(host, 100);
        let (state, kernel) = (Arc::clone(&machine.state), Arc::clone(&machine.kernel));
        serve(&machine.socket("agent"), &machine.state, move |wire| agent(wire, &state, &kernel));
        let state = Arc::clone(&machine.state);
        serve(&machine.socket("qmp"), &machine.state, move |wire| monitor(wire, &state));
        machine
    }

    /// Lets the host's kernel show the process.
    fn run_in(&self, host: &FakeSysfs, started: u64) {
        let socket = |kind| self.socket(kind).display().to_string();
        let command_line = [
            "/usr/bin/qemu-system-x86_64",
            "-name",
            &format!("guest={},debug-threads=on", self.name),
            "-qmp",
            &format!("unix:{},server=on,wait=off", socket("qmp")),
            "-object",
            "iothread,id=io0",
            "-chardev",
            &format!("socket,id=agent,path={},server=on,wait=off", socket("agent")),
            "-device",
            "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        ];
        let text: String = command_line.iter().map(|a| format!("{a}\0")).collect();
        host.put(&format!("/proc/{}/cmdline", self.pid), &text);
        let zeros = "0 ".repeat(18);
        let stat = format!("{} (qemu (x) y) S {zeros}{started} 0\n", self.pid);
        host.put(&format!("/proc/{}/stat", self.pid), &stat);
    }

    /// Lets the process end.
    pub(super) fn end(&self, host: &FakeSysfs) {
        host.put(&format!("/proc/{}/cmdline", self.pid), "");
        host.put(&format!("/proc/{}/stat", self.pid), "");
    }

    /// Lets the guest go on in another process, as one that was saved and restored does.
    pub(super) fn resume_as(&mut self, host: &FakeSysfs, pid: u32) {
        self.end(host);
        self.pid = pid;
        self.run_in(host, 300);
        let file = format!("/proc/{pid}/cmdline");
        let command_line = host.read(Path::new(&file)).unwrap();
        host.put(&file, &format!("{command_line}-incoming\0defer\0"));
        // It polls as its command line says.
        self.with(|s| s.poll_max = 32_768);
    }

    /// The same process id, another process.
    pub(super) fn start_again(&self, host: &FakeSysfs) {
        self.run_in(host, 200);
    }

    /// Boots the guest again.
    pub(super) fn reboot(&self) {
        let boot_id = "99999999-2222-3333-4444-555555555555\n";
        self.kernel.put("/proc/sys/kernel/random/boot_id", boot_id);
        self.kernel.write(Path::new("/sys/block/vda/queue/scheduler"), "kyber").unwrap();
    }

    pub(super) fn socket(&self, kind: &str) -> PathBuf {
        self.directory.path().join(kind)
    }

    pub(super) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        work(&mut self.state.lock().unwrap())
    }

    /// All that can be set in it.
    pub(super) fn snapshot(&self) -> String {
        format!("{}\npoll {}", self.kernel.snapshot(), self.with(|s| s.poll_max))
    }

    pub(super) fn topology(&self) -> (VmName, GuestTopology) {
        let disks = [DiskName::new("root").unwrap()].into();
        let iothreads = [IoThreadName::new("io0").unwrap()].into();
        (vm(&self.name), GuestTopology { disks, iothreads })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.with(|s| s.is_over = true);
        // Whoever waits for a client gets one.
        for kind in ["agent", "qmp"] {
            let _ = UnixStream::connect(self.socket(kind));
        }
    }
}

fn serve(socket: &Path, state: &Arc<Mutex<State>>, play: impl Fn(&mut Wire) + Send + 'static) {
    let listener = UnixListener::bind(socket).unwrap();
    let state = Arc::clone(state);
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            if state.lock().unwrap().is_over {
                return;
            }
            play(&mut Wire::over(stream));
        }
    });
}

/// Whether a request is carried out and whether it is answered. A peer that stopped to answer
/// does not begin again by itself.
fn obey(manner: &mut Manner, request: &str) -> (bool, bool) {
    match *manner {
        Manner::DeadFrom(word) if request.contains(word) => {
            *manner = Manner::DeadFrom("");
            (false, false)
        }
        Manner::MuteFrom(word) if request.contains(word) => {
            *manner = Manner::MuteFrom("");
            (true, false)
        }
        _ => (true, true),
    }
}

fn agent(wire: &mut Wire, state: &Mutex<State>, kernel: &FakeSysfs) {
    let mut files: BTreeMap<u64, (String, String)> = BTreeMap::new();
    while let Some(request) = wire.hear() {
        let command = request["execute"].as_str().unwrap();
        let (is_done, is_said) = obey(&mut state.lock().unwrap().agent, &request.to_string());
        if !is_done {
            continue;
        }
        if state.lock().unwrap().agent == Manner::Slow {
            thread::sleep(Duration::from_millis(200));
        }
        let arguments = &request["arguments"];
        let handle = arguments["handle"].as_u64().unwrap_or_default();
        let refused = |why: &str| refusal("GenericError", why);
        let answer = match command {
            "guest-sync-delimited" => json!({"return": arguments["id"]}),
            "guest-get-disks" => json!({"return": state.lock().unwrap().claims}),
            "guest-file-open" => {
                let path = arguments["path"].as_str().unwrap();
                if kernel.read(Path::new(path)).is_ok() {
                    let handle = files.keys().max().map_or(1000, |h| h + 1);
                    files.insert(handle, (path.to_owned(), String::new()));
                    json!({"return": handle})
                } else {
                    refused("failed to open file: No such file or directory")
                }
            }
            "guest-file-read" => {
                let text = kernel.read(Path::new(&files[&handle].0)).unwrap();
                json!({"return": {"count": text.len(), "buf-b64": encode(&text), "eof": true}})
            }
            "guest-file-write" => {
                let text = decode(arguments["buf-b64"].as_str().unwrap());
                let count = text.len();
                files.get_mut(&handle).unwrap().1 = text;
                json!({"return": {"count": count, "eof": false}})
            }
            "guest-file-flush" => {
                let (path, text) = &files[&handle];
                state.lock().unwrap().written.push(format!("{path} {text}"));
                match kernel.write(Path::new(path), text) {
                    Ok(()) => json!({"return": {}}),
                    Err(error) => refused(&format!("failed to flush file: {error}")),
                }
            }
            "guest-file-close" => {
                files.remove(&handle);
                json!({"return": {}})
            }
            _ => refusal("CommandNotFound", "The command has not been found"),
        };
        if is_said {
            if command == "guest-sync-delimited" {
                wire.say(b"\xff");
            }
            wire.say_json(&answer);
        }
    }
}

fn monitor(wire: &mut Wire, state: &Mutex<State>) {
    wire.say_json(&json!({"QMP": {"version": {}, "capabilities": []}}));
    while let Some(request) = wire.hear() {
        let mut state = state.lock().unwrap();
        let (is_done, is_said) = obey(&mut state.monitor, &request.to_string());
        if !is_done {
            continue;
        }
        let path = request["arguments"]["path"].as_str().unwrap_or_default();
        let property = request["arguments"]["property"].as_str().unwrap_or_default();
        let device =
            |id: &str, slot: u64| json!({"qdev_id": id, "bus": 0, "slot": slot, "function": 0});
        let result = match (request["execute"].as_str().unwrap(), path, property) {
            ("query-iothreads", ..) => json!([{
                "id": "io0", "thread-id": 1, "poll-max-ns": state.poll_max, "poll-grow": 0, "poll-shrink": 0,
            }]),
            ("query-pci", ..) => {
                json!([{"bus": 0, "devices": [device(&state.id, 4), device("log", 5)]}])
            }
            ("qom-get", "/machine/peripheral/log", "serial") => json!(""),
            ("qom-get", _, "serial") if path == format!("/machine/peripheral/{}", state.id) => {
                json!(state.serial)
            }
            ("qom-get", _, "poll-max-ns") if state.monitor == Manner::ReadsOtherwise => json!(5),
            ("qom-get", "/objects/io0", "poll-max-ns") => json!(state.poll_max),
            ("qom-set", "/objects/io0", "poll-max-ns") => {
                let value = request["arguments"]["value"].as_u64().unwrap();
                state.written.push(format!("poll {value}"));
                if state.monitor != Manner::KeepsPolling {
                    state.poll_max = value;
                }
                json!({})
            }
            ("qmp_capabilities", ..) => json!({}),
            _ => {
                let mut answer = refusal("DeviceNotFound", "not found");
                answer["id"] = request["id"].clone();
                wire.say_json(&answer);
                continue;
            }
        };
        if is_said {
            wire.say_json(&json!({"return": result, "id": request["id"]}));
        }
    }
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn encode(text: &str) -> String {
    let mut out = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let bits =
            chunk.iter().fold(0_u32, |b, c| b << 8 | u32::from(*c)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i)) as usize & 63];
            out.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

fn decode(text: &str) -> String {
    let mut out = Vec::new();
    for chunk in text.trim_end_matches('=').as_bytes().chunks(4) {
        let digit = |c: &u8| DIGITS.iter().position(|d| d == c).unwrap() as u32;
        let bits = chunk.iter().fold(0, |b, c| b << 6 | digit(c)) << (6 * (4 - chunk.len()));
        out.extend(&bits.to_be_bytes()[1..chunk.len()]);
    }
    String::from_utf8(out).unwrap()
}

#[test]
fn base64_of_a_guest_is_right() {
    for (text, coded) in [("", ""), ("n", "bg=="), ("no", "bm8="), ("none\n", "bm9uZQo=")] {
        assert_eq!((encode(text).as_str(), decode(coded).as_str()), (coded, text));
    }
}
