//! Disks that share a device by a schedule, under the verifier.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::scratch_disk::{RTVIRTIO, eventually};

/// Two disks on two IOThreads: one with a promise on an emulated SSD, one with a limit of 200
/// requests a second.
fn configuration(directory: &Path) -> String {
    let socket = |name: &str| directory.join(name).display().to_string();
    format!(
        "version = 1\n\
         [[iothread]]\nname = \"iot0\"\n[[iothread]]\nname = \"iot1\"\n\
         [[schedule]]\nname = \"device\"\nchannels = 4\nrequest_ns = 212500\nkib_ns = 9375\n\
         [[device]]\nname = \"a\"\nvm = \"a\"\nsocket = \"{}\"\nqueues = 4\n\
         engine = {{ type = \"ssd\", size = \"64M\", ssd = \"ref-4x250\" }}\n\
         qos = {{ schedule = \"device\", deadline_us = 10000, iops = 1500, burst = 2 }}\n\
         [[device]]\nname = \"b\"\nvm = \"b\"\nsocket = \"{}\"\nqueues = 2\n\
         engine = {{ type = \"ram\", size = \"64M\" }}\n\
         qos = {{ schedule = \"device\", weight = 10, max_iops = 200 }}\n",
        socket("a.sock"),
        socket("b.sock"),
    )
}

#[test]
fn scheduled_disks_keep_their_content_and_their_limits() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    std::fs::write(&path, configuration(directory.path())).unwrap();
    let mut server = Command::new("setpriv");
    server.args(["--pdeathsig", "KILL", RTVIRTIO, "serve"]).arg(&path);
    let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let listens = || directory.path().join("b.sock").exists();
    eventually("the last disk's socket", Duration::from_secs(10), listens);
    let start = Instant::now();
    let verify = |name: &str, queues: &str| {
        let mut command = Command::new(RTVIRTIO);
        command.args(["bench", "dataplane", "verify", "--seconds", "4", "--mebibytes", "1"]);
        command.args(["--depth", "4", "--queues", queues]);
        command.arg("--socket").arg(directory.path().join(name));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [a, b] = [verify("a.sock", "4"), verify("b.sock", "2")].map(|child| {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let kinds = ["reads", "writes", "zeroes", "discards", "flushes"];
        kinds.iter().map(|kind| report[kind].as_u64().unwrap()).sum::<u64>()
    });
    let most = start.elapsed().as_secs_f64() * 200.0 + 8.0;
    assert!(b > 100 && (b as f64) < most, "{b} requests, at most {most}");
    assert!(a > 2 * b, "{a} and {b} requests");
    let id = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
}
