//! `rtvirtio watch` of a data plane whose RAM disk libblkio loads; the cgroup hierarchy is the
//! host's, and no root is needed beyond what reading it needs.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::{has_io_uring, skipped};
use rtvirtio_host::Host;
use serde_json::Value;

use crate::scratch_disk::{RTVIRTIO, alone, lab, rtvirtio, said};

const SPECIFICATION: &str = r#"version = 1
[device.ssd]
path = "/dev/null"
profile = "p.json"
[[vm]]
name = "plc"
cgroup = "rtvirtio-test-no-such-vm"
[[vm.disk]]
name = "root"
device = "ssd"
[[vm.task]]
name = "control"
target = { percentile = 99, latency_ms = 1000 }
"#;

struct Running(Child);

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(arguments);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn device_of_the_data_plane_is_watched_with_the_target_of_its_task() {
    if Host::new("/").cgroup_version().is_err() {
        return skipped("needs a cgroup hierarchy with the io controller");
    }
    if !has_io_uring() {
        return;
    }
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (control, socket) = (path("control"), path("root.sock"));
    let configuration = format!(
        "version = 1\n[control]\nsocket = '{control}'\n[[iothread]]\nname = 'iot0'\n[[iothread]]\n\
         name = 'iot1'\n[[device]]\nname = 'root'\nvm = 'plc'\nsocket = '{socket}'\nqueues = 2\n\
         engine = {{ type = 'ram', size = '64M' }}\n[[device]]\nname = 'idle'\nvm = 'other'\n\
         socket = '{}'\nengine = {{ type = 'ram', size = '1M' }}\n",
        path("idle.sock")
    );
    std::fs::write(path("serve.toml"), configuration).unwrap();
    std::fs::write(path("spec.toml"), SPECIFICATION).unwrap();
    let _server = Running::start(&[RTVIRTIO, "serve", &path("serve.toml")]);
    let start = Instant::now();
    while !Path::new(&control).exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let lab = lab();
    let verify = [&lab, "bench", "dataplane", "verify", "--socket", &socket, "--queues", "2"];
    let _client = Running::start(&[&verify as &[_], &["--seconds", "30"]].concat());
    let (spec, state) = (path("spec.toml"), directory.path());
    let watch = ["watch", &spec, "--dataplane", &control, "--duration", "3"];
    let output = rtvirtio(state, &[&watch as &[_], &["--json"]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let looks: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let events = looks[0]["events"].to_string();
    assert!(events.contains("plc/root: watched in the data plane"), "{events}");
    let rows = looks.last().unwrap()["data_plane"].as_array().unwrap();
    let [idle, root] = rows.as_slice() else { panic!("two devices: {rows:?}") };

    assert_eq!(root["vm"], "plc");
    assert_eq!(root["measured_at"], "data-plane");
    assert_eq!(root["target"]["percentile"], 99.0);
    assert_eq!(root["connected"], true);
    assert_eq!(root["iothreads"], serde_json::json!(["iot0", "iot1"]));
    assert_eq!(root["misses"], 0);
    let requests = root["requests"].as_u64().unwrap();
    assert!(requests > 1000, "{root}");
    assert!(root["iops"].as_f64().unwrap() > 300.0, "{root}");
    // p50 and p99 of at least 1,000 requests; none may pass the tail of those above it.
    let tail = |i: usize| root["tails"][i]["value"].as_u64();
    assert!(tail(0).unwrap() > 0 && tail(0) <= tail(1), "{root}");

    assert_eq!((&idle["connected"], &idle["requests"]), (&false.into(), &0.into()));
    assert_eq!((&idle["tails"][0], &idle["target"]), (&Value::Null, &Value::Null));

    let output = rtvirtio(state, &[&watch[..4], &["--duration", "1"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().rfind(|l| l.contains("data plane p50")).unwrap_or_default();
    assert!(line.contains("plc") && line.contains("root"), "{text}");
    assert!(
        line.contains("target p99 1000.00 ms") && line.contains("in flight, iot0 iot1"),
        "{text}"
    );
}
