//! Real knobs of a real loop device: plan, apply, verify, rollback, and what
//! is left after Ctrl-C and kill −9.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_calibrate::observed::{disk_of, observe};
use rtvirtio_calibrate::testbed::take_host;
use rtvirtio_engine::testing::has_io_uring;
use rtvirtio_host::Host;
use rtvirtio_host::interrupt::Interrupted;
use rtvirtio_spec::profile::Profile;
use rtvirtio_testbed::client::{Client, Endpoint, Queue, Shape};
use serde_json::Value;

use crate::scratch_disk::{
    Disk, Groups, RTVIRTIO, can_run, eventually, lab, left_behind, output, rtvirtio, said,
};

/// A profile of a 2 GiB ref-4x250 scratch disk, as `calibrate` wrote it.
const PROFILE: &str = include_str!("ref-4x250.json");

struct Setup {
    directory: tempfile::TempDir,
    disk: Disk,
    groups: Groups,
}

impl Setup {
    /// A disk, two cgroups and a specification with a target of `latency_ms`.
    fn new(latency_ms: f64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let disk = Disk::start();
        let groups = Groups::make(&["plc", "backup"]);
        let text = format!(
            r#"
version = 1
[device.data]
path = "{}"
profile = "profile.json"
[[vm]]
name = "plc"
cgroup = "{}"
vcpus = 1
[[vm.disk]]
name = "root"
device = "data"
[[vm.task]]
name = "control"
iops = 500
target = {{ percentile = 99.9, latency_ms = {latency_ms} }}
[[vm]]
name = "backup"
cgroup = "{}"
[[vm.disk]]
name = "root"
device = "data"
"#,
            disk.node.display(),
            groups.path("plc"),
            groups.path("backup"),
        );
        std::fs::write(directory.path().join("spec.toml"), text).unwrap();
        std::fs::write(directory.path().join("profile.json"), PROFILE).unwrap();
        Self { directory, disk, groups }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    fn run(&self, arguments: &[&str]) -> std::process::Output {
        rtvirtio(&self.directory.path().join("state"), arguments)
    }

    fn expect(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
        said(&output)
    }

    /// Everything that a plan may touch.
    fn knobs(&self) -> String {
        let host = rtvirtio_host::Host::new("/");
        let plan = std::fs::read_to_string(self.path("plan.json")).unwrap();
        let plan = serde_json::from_str(&plan).unwrap();
        let topology = rtvirtio_host::Topology::of_plan(&plan);
        format!("{:?} {}", host.observe(&topology).unwrap(), self.disk.queue("scheduler"))
    }
}

#[test]
fn plan_apply_verify_rollback_on_a_real_device() {
    let Some(_host) = can_run("plan_apply_verify_rollback_on_a_real_device") else { return };
    let s = Setup::new(10.0);
    let (spec, plan) = (s.path("spec.toml"), s.path("plan.json"));
    s.expect(2, &["plan", &spec, "-o", &plan]);
    let before = s.knobs();
    s.expect(2, &["verify", &plan]);
    s.expect(0, &["apply", &plan]);
    assert_ne!(s.knobs(), before);
    s.expect(0, &["verify", &plan]);
    let text = s.expect(0, &["plan", &spec, "--qemu"]);
    assert!(text.contains("plc/root: 1 IOThread for 1 queue"), "{text}");
    assert!(text.contains(r#""iothread-vq-mapping":[{"iothread":"iothread1","vqs":[0]}]"#));
    let complaint = s.expect(1, &["apply", &plan]);
    assert!(complaint.contains("hint: "), "a stale plan must be refused: {complaint}");
    s.expect(0, &["rollback"]);
    assert_eq!(s.knobs(), before);
    assert!(s.expect(0, &["rollback"]).contains("apply: nothing to roll back"));
}

/// A learned model that says 10 ms of everything, with scores of 0.1, of a device of 1 GiB.
const CONSTANT: &[u8] = include_bytes!("../../../model/tests/data/constant.onnx");

/// [`CONSTANT`], said to be of the scratch disk's 2 GiB.
fn constant_of_the_disk() -> Vec<u8> {
    let (trained, disk) = (b"\"size\": 1073741824", b"\"size\": 2147483648");
    let mut bytes = CONSTANT.to_vec();
    let place = bytes.windows(trained.len()).position(|window| window == trained).unwrap();
    bytes[place..][..disk.len()].copy_from_slice(disk);
    bytes
}

#[test]
fn plan_by_another_model_says_whose_word_it_is() {
    let Some(_host) = can_run("plan_by_another_model_says_whose_word_it_is") else { return };
    let s = Setup::new(20.0);
    let (spec, onnx) = (s.path("spec.toml"), s.path("profile.onnx"));
    let task = |model: &str, code: i32| -> Value {
        let output = s.run(&["plan", &spec, "--json", "--model", model]);
        assert_eq!(output.status.code(), Some(code), "{model}: {}", said(&output));
        let mut plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        plan["tasks"][0].take()
    };
    assert_eq!(task("structural", 2)["model"], "structural");
    // It knows no caps, and of the writer that it must do all it can.
    let analytical = task("analytical", 3);
    assert_eq!(
        (&analytical["model"], &analytical["fallback"]),
        (&"analytical".into(), &Value::Null)
    );
    let complaint = s.expect(1, &["plan", &spec, "--model", "mlp"]);
    assert!(complaint.contains("profile.onnx") && complaint.contains("train one"), "{complaint}");
    std::fs::write(&onnx, CONSTANT).unwrap();
    let complaint = s.expect(1, &["plan", &spec, "--model", "mlp"]);
    assert!(complaint.contains("trained on another device"), "{complaint}");
    let text = s.expect(2, &["plan", &spec, "--model", &onnx]);
    let said = "plc/control: the structural model: the learned one is of loop ref-4x250 of 1 GiB";
    assert!(text.contains("Where another model stands in") && text.contains(said), "{text}");
    std::fs::write(&onnx, constant_of_the_disk()).unwrap();
    for model in ["mlp", &onnx] {
        let learned = task(model, 2);
        assert_eq!((&learned["model"], &learned["fallback"]), (&"learned".into(), &Value::Null));
        assert_eq!(
            (&learned["predicted"], &learned["bound"]),
            (&10_000_000.into(), &11_051_709.into())
        );
    }
    std::fs::write(&onnx, b"no model").unwrap();
    let complaint = s.expect(1, &["plan", &spec, "--model", &onnx]);
    assert!(complaint.contains("not an ONNX model") && complaint.contains("hint: "), "{complaint}");
}

/// A data plane with two disks on the device, without schedules.
struct Plane {
    server: std::process::Child,
    control: String,
}

impl Plane {
    fn start(s: &Setup) -> Self {
        let control = s.path("control.sock");
        let mut text = format!(
            "version = 1\n[control]\nsocket = \"{control}\"\n[[iothread]]\nname = \"iot0\"\n"
        );
        for (vm, offset) in [("plc", "0"), ("backup", "512M")] {
            let name = format!("{vm}-root");
            text += &format!(
                "[[device]]\nname = \"{name}\"\nvm = \"{vm}\"\nsocket = \"{}\"\nqueues = 1\n\
                 engine = {{ type = \"file\", path = \"{}\", direct = true, format = \"raw\", \
                 lock = \"off\", offset = \"{offset}\", size = \"512M\" }}\n",
                s.path(&name),
                s.disk.node.display(),
            );
        }
        std::fs::write(s.path("serve.toml"), text).unwrap();
        let mut server = Command::new("setpriv");
        server.args(["--pdeathsig", "KILL", RTVIRTIO, "serve"]).arg(s.path("serve.toml"));
        let server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let there = || Path::new(&control).exists();
        eventually("the control socket", Duration::from_secs(60), there);
        Self { server, control }
    }

    /// The VMs are its own now; the specification, which says so.
    fn serves(&self, s: &Setup) -> String {
        let text = std::fs::read_to_string(s.path("spec.toml")).unwrap();
        let head = format!("[data_plane]\ncontrol = \"{}\"\n[device.data]", self.control);
        let text = text.replace("[device.data]", &head);
        let text = text.replace("[[vm]]\n", "[[vm]]\nbackend = \"vhost-user\"\n");
        let (first, second) = text.split_once("name = \"root\"").unwrap();
        let second = second.replace("name = \"root\"", "name = \"backup-root\"");
        let text = format!("{first}name = \"plc-root\"{second}");
        std::fs::write(s.path("spec.toml"), &text).unwrap();
        text
    }

    fn snapshot(&self, s: &Setup) -> Value {
        let text = s.expect(0, &["ctl", "--socket", &self.control, "snapshot", "--json"]);
        let json = &text[text.find('{').unwrap()..=text.rfind('}').unwrap()];
        serde_json::from_str(json).unwrap()
    }

    fn stop(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
        std::fs::remove_file(&self.control).unwrap();
    }
}

#[test]
fn plan_is_applied_to_the_data_plane_verified_and_rolled_back() {
    const TEST: &str = "plan_is_applied_to_the_data_plane_verified_and_rolled_back";
    let Some(_host) = can_run(TEST) else { return };
    if !has_io_uring() {
        return;
    }
    let s = Setup::new(10.0);
    let mut plane = Plane::start(&s);
    let text = plane.serves(&s);
    let (spec, plan) = (s.path("spec.toml"), s.path("plan.json"));
    let qos = || {
        let snapshot = plane.snapshot(&s);
        let device = |i: usize| snapshot["devices"][i]["qos"]["settings"].clone();
        (device(1), device(0), snapshot["schedules"].as_array().map_or(0, Vec::len))
    };

    let said = s.expect(2, &["plan", &spec, "-o", &plan]);
    assert!(said.contains("plc-root: qos on the data plane"), "{said}");
    let before = s.knobs();
    s.expect(0, &["apply", &plan]);
    let (promised, shares, schedules) = qos();
    assert_eq!((&promised["deadline_us"], &promised["iops"]), (&10_000.into(), &500.into()));
    assert_eq!((&shares["deadline_us"], schedules), (&Value::Null, 1));
    assert_eq!(s.disk.queue("scheduler").trim(), "[none] mq-deadline kyber bfq");
    s.expect(0, &["verify", &plan]);
    s.expect(0, &["plan", &spec]);
    s.expect(0, &["ctl", "--socket", &plane.control, "qos", "plc-root", "--off"]);
    assert!(s.expect(2, &["verify", &plan]).contains("plc-root: qos on the data plane"));
    s.expect(0, &["rollback"]);
    assert_eq!(s.knobs(), before);
    assert_eq!(qos(), (Value::Null, Value::Null, 0));

    // A device that is not there, and a data plane that is gone, change nothing.
    std::fs::write(&spec, text.replace("backup-root", "other")).unwrap();
    let said = s.expect(1, &["plan", &spec]);
    assert!(said.contains("has no device other") && said.contains("hint: "), "{said}");
    std::fs::write(&spec, &text).unwrap();
    s.expect(0, &["apply", &plan]);
    plane.stop();
    let said = s.expect(0, &["rollback"]);
    assert!(said.contains("the data plane at"), "{said}");
    let said = s.expect(1, &["apply", &plan]);
    assert!(said.contains("cannot connect to the data plane"), "{said}");
    // One that was started since keeps what is its own.
    let mut plane = Plane::start(&s);
    s.expect(0, &["apply", &plan]);
    plane.stop();
    let mut plane = Plane::start(&s);
    s.expect(0, &["rollback"]);
    plane.stop();
}

#[test]
fn unconfirmed_apply_reverts_by_itself() {
    let Some(_host) = can_run("unconfirmed_apply_reverts_by_itself") else { return };
    let s = Setup::new(10.0);
    let (spec, plan) = (s.path("spec.toml"), s.path("plan.json"));
    s.expect(2, &["plan", &spec, "-o", &plan]);
    let before = s.knobs();
    s.expect(0, &["apply", &plan, "--confirm-timeout", "1"]);
    assert_ne!(s.knobs(), before);
    eventually("the revert", Duration::from_secs(60), || s.knobs() == before);
    s.expect(0, &["apply", &plan, "--confirm-timeout", "3"]);
    s.expect(0, &["confirm"]);
    std::thread::sleep(Duration::from_secs(4));
    assert_ne!(s.knobs(), before);
    s.expect(0, &["rollback"]);
}

/// A process in a cgroup, as a VM that runs and does nothing.
struct Idler(std::process::Child);

impl Idler {
    fn start(group: &str) -> Self {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let mount = rtvirtio_host::Host::new("/").cgroup_version().unwrap().mount().to_owned();
        std::fs::write(mount.join(group).join("cgroup.procs"), child.id().to_string()).unwrap();
        Self(child)
    }
}

impl Drop for Idler {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn watch_plans_for_a_vm_that_comes_and_its_kill_is_rolled_back() {
    let test = "watch_plans_for_a_vm_that_comes_and_its_kill_is_rolled_back";
    let Some(_host) = can_run(test) else { return };
    let s = Setup::new(10.0);
    s.expect(2, &["plan", &s.path("spec.toml"), "-o", &s.path("plan.json")]);
    let before = s.knobs();
    let _plc = Idler::start(&s.groups.path("plc"));
    let mut watch = Command::new(RTVIRTIO)
        .args(["watch", &s.path("spec.toml"), "--control", "--json"])
        .env("RTVIRTIO_STATE_DIR", s.path("state"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut changes = Changes(BufReader::new(watch.stdout.take().unwrap()).lines());
    assert_eq!(changes.next()["reason"], "start");
    // Changes are 10 s apart.
    std::thread::sleep(Duration::from_secs(10));
    let backup = Idler::start(&s.groups.path("backup"));
    let came = std::time::Instant::now();
    let planned = changes.next();
    assert_eq!((&planned["reason"], &planned["unmet"]), (&"came: backup".into(), &0.into()));
    assert!(planned["caps"]["backup"].as_u64().unwrap() > 1_000_000, "{planned}");
    assert!(came.elapsed() < Duration::from_secs(5), "{:?}", came.elapsed());
    watch.kill().unwrap();
    watch.wait().unwrap();
    assert_ne!(s.knobs(), before);
    s.expect(0, &["rollback"]);
    assert_eq!(s.knobs(), before);
    drop(backup);
}

/// Changes that a `watch --control --json` tells of.
struct Changes(std::io::Lines<BufReader<std::process::ChildStdout>>);

impl Changes {
    fn next(&mut self) -> Value {
        loop {
            let look = self.0.next().unwrap().unwrap();
            let look: Value = serde_json::from_str(&look).unwrap();
            if !look["change"].is_null() {
                return look["change"].clone();
            }
        }
    }
}

#[test]
fn watch_plans_again_for_a_device_that_is_slower_than_its_profile() {
    let test = "watch_plans_again_for_a_device_that_is_slower_than_its_profile";
    let Some(_host) = can_run(test) else { return };
    if !has_io_uring() {
        return;
    }
    let s = Setup::new(20.0);
    let mut profile: Value = serde_json::from_str(PROFILE).unwrap();
    let capacity = &mut profile["capacity"];
    for rate in ["iops_4k", "write_throughput"] {
        capacity[rate] = ((capacity[rate].as_f64().unwrap() * 3.0) as u64).into();
    }
    for response in ["response_4k", "response_128k"] {
        for (_, time) in capacity[response].as_object_mut().unwrap() {
            *time = (time.as_u64().unwrap() / 3).into();
        }
    }
    std::fs::write(s.path("profile.json"), profile.to_string()).unwrap();
    let mut plane = Plane::start(&s);
    plane.serves(&s);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| read_until(Path::new(&s.path("plc-root")), &stop));
        let connected = || plane.snapshot(&s)["devices"][1]["connected"] == true;
        eventually("the front end", Duration::from_secs(60), connected);
        let mut watch = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", RTVIRTIO, "watch", &s.path("spec.toml"), "--control"])
            .arg("--json")
            .env("RTVIRTIO_STATE_DIR", s.path("state"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut changes = Changes(BufReader::new(watch.stdout.take().unwrap()).lines());
        let started = changes.next();
        assert_eq!((&started["reason"], &started["failed"]), (&"start".into(), &Value::Null));
        let request = || plane.snapshot(&s)["schedules"][0]["request_ns"].as_u64().unwrap();
        let by_profile = request();
        let again = changes.next();
        let reason = again["reason"].as_str().unwrap();
        let is_slower = reason.starts_with("data takes ");
        assert!(is_slower && reason.ends_with("times as long as its profile says"), "{again}");
        assert_eq!(again["failed"], Value::Null, "{again}");
        assert!(request() as f64 > 1.25 * by_profile as f64, "{by_profile} ns: {again}");
        watch.kill().unwrap();
        watch.wait().unwrap();
    });
    s.expect(0, &["rollback"]);
    plane.stop();
}

/// Ends a load, also when its test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// A front end that reads 4 KiB here and there, 8 at a time.
fn read_until(socket: &Path, stop: &AtomicBool) {
    const DEPTH: usize = 8;
    let shape = Shape { queues: 1, depth: DEPTH, buffer: 4096 };
    let mut client = Client::connect(Endpoint::Socket(socket), shape).unwrap();
    let blocks = client.capacity() / 4096;
    client.run([()], |queue, ()| {
        let mut at = 0;
        let mut submit = |queue: &mut Queue, slot| {
            at = (at + 7919) % blocks;
            queue.read(slot, at * 4096, 4096);
        };
        (0..DEPTH).for_each(|slot| submit(queue, slot));
        while queue.flying() > 0 {
            let ended = queue.wait(Duration::from_secs(20), |queue, request| {
                assert_eq!(request.result, 0);
                if !stop.load(Relaxed) {
                    submit(queue, request.slot);
                }
            });
            assert!(ended.unwrap() > 0, "no read ends");
        }
    });
}

#[test]
fn impossible_target_is_named_and_not_applied() {
    let Some(_host) = can_run("impossible_target_is_named_and_not_applied") else { return };
    let s = Setup::new(0.1);
    let (spec, plan) = (s.path("spec.toml"), s.path("plan.json"));
    let text = s.expect(3, &["plan", &spec, "-o", &plan]);
    assert!(text.contains("plc/control: even with background VMs at"), "{text}");
    assert!(text.contains("would be promised"), "{text}");
    let before = s.knobs();
    assert!(s.expect(1, &["apply", &plan]).contains("--force"));
    assert_eq!(s.knobs(), before);
    s.expect(0, &["apply", &plan, "--force"]);
    s.expect(0, &["rollback"]);
}

#[test]
fn profile_of_another_device_is_refused() {
    let Some(_host) = can_run("profile_of_another_device_is_refused") else { return };
    let s = Setup::new(10.0);
    let other = PROFILE.replace("\"ref-4x250\"", "\"ref-8x80\"");
    std::fs::write(s.path("profile.json"), other).unwrap();
    let complaint = s.expect(1, &["plan", &s.path("spec.toml")]);
    assert!(complaint.contains("ref-8x80") && complaint.contains("hint: "), "{complaint}");
}

#[test]
fn calibrate_refuses_what_is_no_scratch_disk() {
    let Some(_host) = can_run("calibrate_refuses_what_is_no_scratch_disk") else { return };
    let directory = tempfile::tempdir().unwrap();
    let output = rtvirtio(directory.path(), &["calibrate", "/dev/null"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("not a scratch disk"), "{}", said(&output));
}

/// An ext4 on a scratch disk, mounted while this lives.
struct Mounted {
    directory: tempfile::TempDir,
    disk: Disk,
}

impl Mounted {
    fn new() -> Self {
        let mounted = Self { directory: tempfile::tempdir().unwrap(), disk: Disk::start() };
        let node = mounted.disk.node.to_str().unwrap();
        for (program, arguments) in [
            ("mkfs.ext4", &["-q", "-E", "nodiscard", node][..]),
            ("mount", &[node, mounted.directory.path().to_str().unwrap()]),
        ] {
            let output = Command::new(program).args(arguments).output().unwrap();
            assert!(output.status.success(), "{program}: {}", said(&output));
        }
        mounted
    }

    /// Free blocks of the filesystem, once nothing of it is to be written any more.
    fn free(&self) -> u64 {
        rustix::fs::syncfs(std::fs::File::open(self.directory.path()).unwrap()).unwrap();
        rustix::fs::statvfs(self.directory.path()).unwrap().f_bfree
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.path()).output();
    }
}

#[test]
fn calibration_of_a_disk_in_use_leaves_nothing_even_when_it_is_killed() {
    const TEST: &str = "calibration_of_a_disk_in_use_leaves_nothing_even_when_it_is_killed";
    let Some(_host) = can_run(TEST) else { return };
    let mounted = Mounted::new();
    let state = tempfile::tempdir().unwrap();
    let precious = mounted.directory.path().join("precious");
    std::fs::write(&precious, "somebody's data").unwrap();
    let (free, scheduler) = (mounted.free(), mounted.disk.queue("scheduler"));
    let profile = state.path().join("profiles/disk.json");
    let (within, profile) = (mounted.directory.path().to_str().unwrap(), profile.to_str().unwrap());
    let arguments = ["calibrate", "--in", within, "--size", "256", "-o", profile, "--limit", "1"];

    // In the middle of the file, and of a probe of the device.
    for after in [300, 8_000] {
        let mut child = Command::new(RTVIRTIO)
            .args(arguments)
            .env("RTVIRTIO_STATE_DIR", state.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(after));
        child.kill().unwrap();
        child.wait().unwrap();
        // What cleans up after it does not need long.
        let begin = Instant::now();
        while Host::new("/").cgroup_of(Path::new("rtvirtio/bench")).unwrap().is_some()
            || mounted.free() != free
        {
            assert!(begin.elapsed() < Duration::from_secs(20), "killed after {after} ms");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(mounted.disk.queue("scheduler"), scheduler);
        let entries = std::fs::read_dir(within).unwrap().count();
        assert_eq!(entries, 2, "lost+found and somebody's data");
    }

    // What it measured beside others, who may do something else by now, it has not kept.
    let known: Profile = serde_json::from_str(PROFILE).unwrap();
    let partial = Path::new(profile).with_added_extension("rtvirtio-partial");
    assert!(!partial.exists());
    let output = rtvirtio(state.path(), &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("the device alone"), "not measured anew: {}", said(&output));
    let found: Profile = serde_json::from_slice(&std::fs::read(profile).unwrap()).unwrap();
    // Of the disk, not of the file; measured under the scheduler that it has.
    assert_eq!(found.device.size.get(), 2 << 30);
    assert!(found.probes.iter().all(|probe| probe.scheduler.to_string() == "none"));
    let ratio =
        found.capacity.write_throughput.get() as f64 / known.capacity.write_throughput.get() as f64;
    assert!((0.5..1.5).contains(&ratio), "{:?}", found.capacity);
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "somebody's data");
    assert_eq!(mounted.free(), free);
    let nowhere = rtvirtio(state.path(), &["calibrate", "--in", "/dev/shm", "-o", profile]);
    assert!(said(&nowhere).contains("in memory"), "{}", said(&nowhere));
    let both = rtvirtio(state.path(), &["calibrate", "/dev/null", "--in", within]);
    assert_eq!(both.status.code(), Some(1));
    drop(mounted);
    assert_eq!(left_behind(), [""; 0]);
}

#[test]
fn second_demo_or_benchmark_is_told_of_the_first_before_it_makes_a_disk() {
    const TEST: &str = "second_demo_or_benchmark_is_told_of_the_first_before_it_makes_a_disk";
    let Some(_host) = can_run(TEST) else { return };
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out").display().to_string();
    let (_, _taken) = take_host().unwrap();
    for verb in ["demo", "bench"] {
        let arguments = [verb, "--guests", "cgroup", "--out", &out];
        let second = output(&lab(), directory.path(), &arguments);
        let text = said(&second);
        if text.contains("cannot run the demo yet") {
            // Not println: what a passing test prints is hidden.
            let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {text}");
            continue;
        }
        assert_eq!(second.status.code(), Some(1), "{verb}: {text}");
        assert!(text.contains("another rtvirtio benchmark or calibration is running"), "{text}");
        assert!(!text.contains("Making a scratch disk"), "{verb}: {text}");
    }
}

#[test]
fn disk_that_is_watched_has_a_profile_without_a_request() {
    const TEST: &str = "disk_that_is_watched_has_a_profile_without_a_request";
    let Some(_host) = can_run(TEST) else { return };
    let (host, mounted) = (Host::new("/"), Mounted::new());
    let work = mounted.directory.path().join("work");
    let mut fio = Command::new("fio")
        .args(["--name=work", "--direct=1", "--ioengine=psync", "--rw=randread", "--bs=4k"])
        .args(["--size=64m", "--time_based", "--runtime=60", "--numjobs=4", "--thread"])
        .args(["--output=/dev/null"])
        .arg(format!("--filename={}", work.display()))
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let disk = disk_of(&host, mounted.directory.path()).unwrap();
    let found = observe(&host, &disk, Duration::from_secs(10), &Interrupted::new(false));
    fio.kill().unwrap();
    fio.wait().unwrap();
    let found = match found {
        Err(error) if format!("{error:#}").contains("tracefs") => {
            // Not println: what a passing test prints is hidden.
            let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {error:#}");
            return;
        }
        found => found.unwrap(),
    };
    found.check().unwrap();
    let known: Profile = serde_json::from_str(PROFILE).unwrap();
    let ratio = found.capacity.iops_4k / known.capacity.iops_4k;
    assert!((0.3..1.5).contains(&ratio), "{:?}", found.capacity);
    assert!(found.capacity.response_4k.mean < found.capacity.response_128k.mean);
}

#[test]
fn profile_is_taken_to_another_device_of_its_model_alone() {
    let Some(_host) = can_run("profile_is_taken_to_another_device_of_its_model_alone") else {
        return;
    };
    let s = Setup::new(10.0);
    let node = s.disk.node.to_str().unwrap().to_owned();
    let theirs = PROFILE.replace("\"serial\": null", "\"serial\": \"S3CR3T\"");
    assert_ne!(theirs, PROFILE);
    std::fs::write(s.path("theirs.json"), theirs).unwrap();
    std::fs::write(s.path("other.json"), PROFILE.replace("\"ref-4x250\"", "\"ref-8x80\"")).unwrap();
    s.expect(0, &["profile", "export", &s.path("theirs.json"), "-o", &s.path("shared.json")]);
    let shared = std::fs::read_to_string(s.path("shared.json")).unwrap();
    assert!(!shared.contains("S3CR3T"), "{shared}");
    let import = |from: &str, code| {
        let (from, to) = (s.path(from), s.path("imported.json"));
        s.expect(code, &["profile", "import", &from, "--device", &node, "-o", &to])
    };
    assert!(import("other.json", 1).contains("another model or size class"));
    import("theirs.json", 0);
    assert!(import("theirs.json", 1).contains("is there already"));
    std::fs::copy(s.path("imported.json"), s.path("profile.json")).unwrap();
    let planned = s.expect(2, &["plan", &s.path("spec.toml")]);
    assert!(planned.contains("measured on another device of its model"), "{planned}");
    let shown = s.expect(0, &["profile", "show", &s.path("profile.json")]);
    assert!(shown.contains("S3CR3T") && shown.contains("capacity"), "{shown}");
}

#[test]
fn watch_reads_its_specification_again_at_sighup() {
    let Some(_host) = can_run("watch_reads_its_specification_again_at_sighup") else { return };
    let s = Setup::new(10.0);
    let mut child = Command::new(RTVIRTIO)
        .args(["watch", &s.path("spec.toml"), "--json"])
        .env("RTVIRTIO_STATE_DIR", s.path("state"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut until = |text: &str| {
        let found = lines.by_ref().take(20).map_while(Result::ok).find(|line| line.contains(text));
        found.unwrap_or_else(|| panic!("{text:?} is not said"))
    };
    until("at_s");
    let pid = rustix::process::Pid::from_child(&child);
    let hang_up = || rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    hang_up();
    until("the specification was read again");
    std::fs::write(s.path("spec.toml"), "version = ").unwrap();
    hang_up();
    until("cannot be read again, and the old one holds");
    // It goes on.
    until("at_s");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(child.wait().unwrap().success());
}

/// Starts a benchmark of one long cell and waits until it does I/O.
fn start_bench(out: &Path) -> std::process::Child {
    std::fs::create_dir_all(out).unwrap();
    let profile = out.join("profile-given.json");
    std::fs::write(&profile, PROFILE).unwrap();
    let child = Command::new(lab())
        .args(["bench", "--cases", "2xL", "--schemes", "hand", "--repetitions", "1"])
        .args(["--window", "60", "--profile", profile.to_str().unwrap()])
        .args(["--out", out.to_str().unwrap()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = || {
        let mount = rtvirtio_host::Host::new("/").cgroup_version().unwrap().mount().to_owned();
        let procs = mount.join("rtvirtio/bench/vm1/cgroup.procs");
        std::fs::read_to_string(procs).is_ok_and(|text| !text.trim().is_empty())
    };
    eventually("the load", Duration::from_secs(60), started);
    child
}

#[test]
fn interrupted_and_killed_benchmarks_leave_nothing() {
    let Some(_host) = can_run("interrupted_and_killed_benchmarks_leave_nothing") else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut child = start_bench(directory.path());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(left_behind(), Vec::<String>::new());

    let mut child = start_bench(directory.path());
    child.kill().unwrap();
    child.wait().unwrap();
    // The disk's server outlives its owner, and clears all that it left.
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let left = left_behind();
        if left.is_empty() {
            break;
        }
        assert!(Instant::now() < end, "{left:?} is there after a minute");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn killed_disk_server_leaves_a_device_that_the_next_start_removes() {
    let test = "killed_disk_server_leaves_a_device_that_the_next_start_removes";
    let Some(_host) = can_run(test) else { return };
    let mut disk = Disk::start();
    disk.kill();
    drop(Disk::start());
    assert_eq!(left_behind(), Vec::<String>::new());
}
