//! Disks that share a device by a schedule, under the verifier.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use serde_json::Value;

use crate::scratch_disk::{RTVIRTIO, eventually, lab};

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

fn ctl(socket: &Path, args: &[&str]) -> std::process::Output {
    let mut command = Command::new(RTVIRTIO);
    command.args(["ctl", "--socket"]).arg(socket).args(args);
    command.output().unwrap()
}

#[test]
fn promises_change_by_command_while_the_verifier_runs() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    let control = directory.path().join("control.sock");
    let text = format!(
        "version = 1\n[control]\nsocket = \"{}\"\n\
         [[iothread]]\nname = \"iot0\"\n[[iothread]]\nname = \"iot1\"\n\
         [[device]]\nname = \"a\"\nvm = \"a\"\nsocket = \"{}\"\nqueues = 4\n\
         engine = {{ type = \"ssd\", size = \"64M\", ssd = \"ref-4x250\" }}\n",
        control.display(),
        directory.path().join("a.sock").display(),
    );
    std::fs::write(&path, text).unwrap();
    let mut server = Command::new("setpriv");
    server.args(["--pdeathsig", "KILL", RTVIRTIO, "serve"]).arg(&path);
    let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("the control socket", Duration::from_secs(60), || control.exists());
    let mut verify = Command::new(lab());
    verify.args(["bench", "dataplane", "verify", "--seconds", "6", "--mebibytes", "1"]);
    verify.args(["--depth", "4", "--queues", "4"]);
    verify.arg("--socket").arg(directory.path().join("a.sock"));
    let verify = verify.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let does = |args: &[&str]| {
        let output = ctl(&control, args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let refuses = |args: &[&str], words: &str| {
        let output = ctl(&control, args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{args:?}: {said}");
    };
    let qos = || -> Value {
        let snapshot: Value = serde_json::from_str(&does(&["snapshot", "--json"])).unwrap();
        snapshot["devices"][0]["qos"].clone()
    };
    let curve = ["--channels", "4", "--request-ns", "212500", "--kib-ns", "9375"];
    for name in ["one", "two"] {
        does(&[&["schedule", "set", name][..], &curve].concat());
    }
    let promise = ["--deadline-us", "10000", "--iops", "1000", "--burst", "4"];
    does(&[&["qos", "a", "--schedule", "one"][..], &promise].concat());
    let kept = || qos()["kept"].as_u64().unwrap_or(0) > 100;
    eventually("promised requests", Duration::from_secs(60), kept);
    does(&["qos", "a", "--schedule", "one", "--weight", "7", "--max-iops", "300"]);
    assert_eq!(qos()["settings"]["weight"], 7);
    assert!(qos()["kept"].as_u64().unwrap() > 100, "counts begin anew");
    let shown = does(&["snapshot"]);
    assert!(shown.contains("300 IOPS") && shown.contains("one"), "{shown}");
    refuses(&["qos", "a", "--schedule", "three"], "there is no schedule \"three\"");
    refuses(&["qos", "a", "--schedule", "one", "--iops", "5"], "a promise has deadline_us");
    refuses(&["qos", "a", "--weight", "5"], "--schedule");
    refuses(&["schedule", "remove", "one"], "is that of device \"a\"");
    assert_eq!(qos()["settings"]["max_iops"], 300);
    let too_much = ["qos", "a", "--schedule", "one", "--deadline-us", "10000", "--iops", "20000"];
    refuses(&too_much, "% of the device would be promised, and 97 % can be");
    let too_soon = ["qos", "a", "--schedule", "one", "--deadline-us", "300", "--iops", "10"];
    refuses(&too_soon, "the shortest deadline that can be kept is");
    assert_eq!(qos()["settings"]["weight"], 7, "a refusal changes nothing");
    does(&[&too_much[..], &["--force"]].concat());
    assert_eq!(qos()["settings"]["iops"], 20_000);
    does(&["qos", "a", "--schedule", "two", "--task", "rt/0,deadline-us=5000,iops=10"]);
    assert_eq!(qos()["tasks"][0]["ioprio"], "rt/0");
    does(&["schedule", "remove", "one"]);
    does(&["schedule", "set", "two", "--channels", "2", "--request-ns", "100", "--kib-ns", "0"]);
    does(&["qos", "a", "--off"]);
    assert_eq!(qos(), Value::Null);
    let socket = directory.path().join("b.sock").display().to_string();
    let added = ["device", "add", "b", "--vm", "b", "--listen", &socket, "--ram", "--size", "1M"];
    does(&[&added[..], &["--schedule", "two", "--max-bandwidth", "1M"]].concat());
    let listed = does(&["schedule", "list"]);
    assert!(listed.contains("two") && !listed.contains("one"), "{listed}");

    let output = verify.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let id = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
}

#[test]
fn scheduled_disks_keep_their_content_and_their_limits() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    std::fs::write(&path, configuration(directory.path())).unwrap();
    let mut server = Command::new("setpriv");
    server.args(["--pdeathsig", "KILL", RTVIRTIO, "serve"]).arg(&path);
    let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let listens = || directory.path().join("b.sock").exists();
    eventually("the last disk's socket", Duration::from_secs(60), listens);
    let start = Instant::now();
    let verify = |name: &str, queues: &str| {
        let mut command = Command::new(lab());
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

/// One request at a time on a disk each 200th of whose requests waits for 200 ms: what is late for that is told
/// apart from what the schedule makes late.
#[test]
fn stalls_of_a_disk_are_told_apart_from_the_schedules_own_lateness() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serve.toml");
    let [control, socket] = ["control.sock", "a.sock"].map(|name| directory.path().join(name));
    let text = format!(
        "version = 1\n[control]\nsocket = \"{}\"\n[[iothread]]\nname = \"iot0\"\n\
         [[schedule]]\nname = \"disk\"\nchannels = 4\nrequest_ns = 212500\nkib_ns = 9375\n\
         [[device]]\nname = \"a\"\nvm = \"a\"\nsocket = \"{}\"\n\
         engine = {{ type = \"ssd\", size = \"64M\", ssd = \"ref-4x250\", \
             fault = {{ stall_every = 200, stall_ms = 200 }} }}\n\
         qos = {{ schedule = \"disk\", deadline_us = 50000, iops = 3000, burst = 8 }}\n",
        control.display(),
        socket.display(),
    );
    std::fs::write(&path, text).unwrap();
    let log = std::fs::File::create(directory.path().join("log")).unwrap();
    let mut server = Command::new("setpriv");
    server.args(["--pdeathsig", "KILL", RTVIRTIO, "serve"]).arg(&path);
    let mut server = server.stdout(Stdio::null()).stderr(log).spawn().unwrap();
    eventually("the disk's socket", Duration::from_secs(60), || {
        socket.exists() && control.exists()
    });
    let mut verify = Command::new(lab());
    verify.args(["bench", "dataplane", "verify", "--seconds", "4", "--mebibytes", "1"]);
    verify.args(["--depth", "1", "--queues", "1"]);
    let output = verify.arg("--socket").arg(&socket).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let output = ctl(&control, &["snapshot", "--json"]);
    let snapshot: Value = serde_json::from_slice(&output.stdout).unwrap();
    let stalls = &snapshot["schedules"][0]["stalls"];
    let count = stalls["count"].as_u64().unwrap();
    assert!(count >= 3, "{stalls}");
    assert!(stalls["longest_ns"].as_u64().unwrap() >= 200_000_000, "{stalls}");
    assert!(stalls["time_ns"].as_u64().unwrap() >= 200_000_000 * count, "{stalls}");
    assert_eq!(stalls["last"]["in_flight"], 1, "{stalls}");
    let (began, now) = (&stalls["last"]["begin_ns"], &snapshot["time_ns"]);
    let ago = now.as_u64().unwrap() - began.as_u64().unwrap();
    assert!((200_000_000..60_000_000_000).contains(&ago), "{ago} ns ago");
    // Each made one promised request late, and no other.
    let qos = &snapshot["devices"][0]["qos"];
    let [late, excused] = ["late", "late_in_stalls"].map(|key| qos[key].as_u64().unwrap());
    assert!(excused > 0 && excused <= late, "{qos}");
    let shown = String::from_utf8(ctl(&control, &["snapshot"]).stdout).unwrap();
    assert!(shown.contains("by stalls)"), "{shown}");
    let told = || {
        let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
        log.contains("warning: disk: its device, or this host, ended nothing for")
    };
    eventually("a line in the log", Duration::from_secs(60), told);
    let id = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
}
