//! `rtvirtio ctl` against a server that answers as told; needs no root.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use rtvirtio_engine::testing::has_io_uring;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

use crate::scratch_disk::{RTVIRTIO, eventually, rtvirtio, said};

/// What came with one request.
struct Asked {
    head: String,
    body: Value,
    fds: Vec<OwnedFd>,
}

/// Reads a request and its descriptors.
fn read(stream: &mut UnixStream) -> Asked {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 64 << 10];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        recvmsg(&*stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).unwrap().bytes;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let text = String::from_utf8(bytes[..received].to_vec()).unwrap();
    // Head and body of a small request come in one piece.
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    Asked { head: head.to_owned(), body: serde_json::from_str(body).unwrap_or(Value::Null), fds }
}

/// Runs `ctl` with these arguments against a server that gives these answers, one after the other.
fn ctl_asks(arguments: &[&str], answers: &[(u16, &str)]) -> (Output, Vec<Asked>) {
    ctl_to(Stdio::piped(), arguments, answers)
}

/// The same, its standard output being `stdout`.
fn ctl_to(
    stdout: impl Into<Stdio>,
    arguments: &[&str],
    answers: &[(u16, &str)],
) -> (Output, Vec<Asked>) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let answer =
        |&(status, answer): &(u16, &str)| format!("HTTP/1.0 {status} Status\r\n\r\n{answer}");
    let answers: Vec<String> = answers.iter().map(answer).collect();
    let server = thread::spawn(move || {
        let answer = |answer: &String| {
            let mut stream = listener.accept().unwrap().0;
            let asked = read(&mut stream);
            stream.write_all(answer.as_bytes()).unwrap();
            asked
        };
        answers.iter().map(answer).collect()
    });
    let mut command = Command::new(RTVIRTIO);
    command.arg("ctl").arg("--socket").arg(&socket).args(arguments).stdout(stdout);
    let output = command.output().unwrap();
    (output, server.join().unwrap())
}

/// The same with one answer.
fn ctl(arguments: &[&str], status: u16, answer: &str) -> (Output, Asked) {
    let (output, mut asked) = ctl_asks(arguments, &[(status, answer)]);
    (output, asked.remove(0))
}

fn done(arguments: &[&str], answer: &str) -> (String, Asked) {
    let (output, asked) = ctl(arguments, 200, answer);
    assert!(output.status.success(), "{}", said(&output));
    (String::from_utf8(output.stdout).unwrap(), asked)
}

#[test]
fn each_change_is_asked_for_as_the_api_has_it() {
    for (arguments, first, body) in [
        (&["device", "remove", "d0"] as &[_], "DELETE /v1/devices/d0 ", Value::Null),
        (&["iothread", "remove", "a"], "DELETE /v1/iothreads/a ", Value::Null),
        (&["iothread", "lock", "a"], "PUT /v1/iothreads/a/lock ", json!({ "locked": true })),
        (&["iothread", "unlock", "a"], "PUT /v1/iothreads/a/lock ", json!({ "locked": false })),
        (
            &["iothread", "pin", "a", "0,2-3"],
            "PUT /v1/iothreads/a/cpus ",
            json!({ "cpus": [0, 2, 3] }),
        ),
        (&["iothread", "pin", "a", "any"], "PUT /v1/iothreads/a/cpus ", json!({ "cpus": [] })),
        (
            &["iothread", "create", "a", "--cpus", "1", "--poll-max-us", "50"],
            "POST /v1/iothreads ",
            json!({ "name": "a", "cpus": [1], "poll_max_us": 50 }),
        ),
        (
            &["iothread", "create", "a", "--completion", "adaptive", "--core", "auto"],
            "POST /v1/iothreads ",
            json!({ "name": "a", "cpus": [], "completion": "adaptive", "core": "auto" }),
        ),
        (
            &["nic", "set", "n", "tx", "--max-frames", "20000", "--within-us", "300"],
            "PUT /v1/nics/n/tx ",
            json!({ "max_frames": 20000, "within_us": 300 }),
        ),
        (
            &["nic", "set", "n", "rx", "--max-mbit", "100", "--burst-ms", "0"],
            "PUT /v1/nics/n/rx ",
            json!({ "max_mbit": 100, "burst_ms": 0 }),
        ),
        (&["nic", "set", "n", "rx", "--off"], "DELETE /v1/nics/n/rx ", Value::Null),
        (&["nic", "remove", "n"], "DELETE /v1/nics/n ", Value::Null),
        (&["network", "remove", "lan"], "DELETE /v1/networks/lan ", Value::Null),
        (
            &["network", "add", "lan", "--max-broadcast", "7"],
            "POST /v1/networks ",
            json!({ "name": "lan", "max_broadcast": 7 }),
        ),
    ] {
        let (_, asked) = done(arguments, "");
        assert!(asked.head.starts_with(first), "{arguments:?}: {}", asked.head);
        assert_eq!((asked.body, asked.fds.len()), (body, 0));
    }
}

#[test]
fn answers_are_shown() {
    let (text, asked) = done(&["mapping", "move", "d0", "1", "iot1"], r#"{"pause_ns":42000}"#);
    assert!(asked.head.starts_with("PUT /v1/mapping/d0/1 "), "{}", asked.head);
    assert_eq!(asked.body, json!({ "iothread": "iot1" }));
    assert_eq!(text, "nobody served the queue for 42.0 µs\n");

    let (text, asked) = done(&["device", "resize", "d0", "1G"], r#"{"capacity":1073741824}"#);
    assert_eq!((asked.body, text.as_str()), (json!({ "size": 1_073_741_824 }), "d0 has 1 GiB\n"));

    let mapping = r#"{"mapping":[{"iothread":"a","vqs":[0,1]}]}"#;
    let (text, _) = done(&["mapping", "get", "d0"], mapping);
    assert_eq!(text, "queues = 2\nmapping = [\n  { iothread = \"a\", vqs = [0, 1] },\n]\n");
    let (text, _) = done(&["--json", "mapping", "get", "d0"], mapping);
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found, json!([{ "iothread": "a", "vqs": [0, 1] }]));

    let summary = json!({ "count": 1000, "mean_ns": 1, "p50_ns": 5000, "p99_ns": 9000, "p999_ns": 9, "p9999_ns": 9, "max_ns": 9 });
    let snapshot = json!({
        "time_ns": 1,
        "iothreads": [{ "name": "iot0", "cpus": [0, 1], "locked": true, "tid": 1, "queues": 1,
            "polling": { "max_ns": 1, "grow": 2, "shrink": 0 },
            "busy_ns": 250, "poll_ns": 250, "sleep_ns": 500, "cpu_ns": 1_000_000 }],
        "devices": [{ "name": "d0", "vm": "vm0", "socket": "/s", "connected": true, "capacity": 1 << 20,
            "read_only": false, "queues": [{ "index": 0, "iothread": "iot0", "state": "running",
                "in_flight": 3, "reads": 1000, "writes": 7, "flushes": 0, "discards": 0,
                "write_zeroes": 0, "others": 0, "read_bytes": 0, "written_bytes": 0, "errors": 0,
                "kicks": 0, "calls": 0,
                "wait": summary, "service": summary, "response": summary }] }],
    });
    let (text, _) = done(&["snapshot"], &snapshot.to_string());
    for words in
        ["locked", "0-1", "25.0 %", "50.0 %", "connected", "1 MiB", "running", "5.0 µs", "9.0 µs"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn policy_is_asked_for_in_part_and_decisions_are_shown() {
    let state = json!({
        "policy": "dynamic", "cpus": [3, 1], "min_iothreads": 1, "max_iothreads": 2, "running": false,
        "failure": "index out of bounds", "last_decision": 7,
    });
    let (text, asked) = done(&["policy"], &state.to_string());
    assert!(asked.head.starts_with("GET /v1/policy "), "{}", asked.head);
    let expected = "policy      dynamic: FAILED and ended: index out of bounds\n\
                    cpus        3, 1\niothreads   1 to 2\ndecisions   7\n";
    assert_eq!(text, expected);
    let set = ["policy", "advise", "--cpus", "6-7,2", "--min-iothreads", "2", "--borrow", "true"];
    let (_, asked) = done(&set, &state.to_string());
    assert!(asked.head.starts_with("PUT /v1/policy "), "{}", asked.head);
    let wanted =
        json!({ "policy": "advise", "cpus": [6, 7, 2], "min_iothreads": 2, "borrow": true });
    assert_eq!(asked.body, wanted);
    let (_, asked) = done(&["policy", "static"], &state.to_string());
    assert_eq!(asked.body, json!({ "policy": "static" }));

    let decision = json!({
        "number": 7, "time_ns": 1_700_000_000_123_000_000_u64, "policy": "dynamic",
        "action": { "kind": "add_iothread", "iothread": "auto1", "cpu": 3, "count": 1,
            "queues": [{ "device": "d0", "queue": 1 }] },
        "reason": "IOThread 1 is 97 % busy", "outcome": "done", "took_ns": 5000,
        "before": { "iops": 1000.4, "wait_ns": 5000, "cores": 0.97 },
        "after": { "iops": 1900.0, "wait_ns": 2000, "cores": 1.5 },
    });
    let (text, asked) = done(&["decisions", "--after", "6"], &json!([decision]).to_string());
    assert!(asked.head.starts_with("GET /v1/decisions?after=6 "), "{}", asked.head);
    let expected = "7 2023-11-14T22:13:20.123Z dynamic: add auto1 on CPU 3 for 1 queues (done): \
                    IOThread 1 is 97 % busy\n  before: 1000 IOPS, wait 5.0 µs, 0.97 cores; \
                    after: 1900 IOPS, wait 2.0 µs, 1.50 cores\n";
    assert_eq!(text, expected);
    let (text, _) = done(&["decisions", "--json"], &json!([decision]).to_string());
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!([decision]));
}

#[test]
fn followed_decision_is_printed_at_once_and_its_effect_later() {
    let load = |iops: f64| json!({ "iops": iops, "wait_ns": 5000, "cores": 1.0 });
    let mut decision = json!({
        "number": 3, "time_ns": 1_700_000_000_000_000_000_u64, "policy": "dynamic",
        "action": { "kind": "gone" }, "reason": "1", "outcome": "done", "took_ns": 5000,
        "before": load(1000.0),
    });
    let made = "data: {\"event\":\"decision\",\"number\":3,\"action\":\"a\",\"reason\":\"1\",\"outcome\":\"done\"}";
    let events = format!("{made}\n\ndata: {{\"event\":\"decision_measured\",\"number\":3}}\n\n");
    let made = json!([decision]).to_string();
    decision["after"] = load(2000.0);
    let measured = json!([decision]).to_string();
    let answers = [&*events, "[]", &made, &measured];
    let (output, asked) = ctl_asks(&["decisions", "--follow"], &answers.map(|of| (200, of)));
    assert!(output.status.success(), "{}", said(&output));
    let paths = asked.iter().map(|asked| asked.head.split(' ').nth(1).unwrap());
    let expected =
        ["/v1/events", "/v1/decisions?after=0", "/v1/decisions?after=0", "/v1/decisions?after=2"];
    assert_eq!(paths.collect::<Vec<_>>(), expected);
    let expected = "3 2023-11-14T22:13:20.000Z dynamic: something that is no longer there (done): 1\n  \
                    effect of 3: before: 1000 IOPS, wait 5.0 µs, 1.00 cores; \
                    after: 2000 IOPS, wait 5.0 µs, 1.00 cores\n";
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

#[test]
fn events_are_lines_for_people_or_json() {
    let events = ": ready\n\ndata: {\"event\":\"queue_moved\",\"device\":\"d0\",\"queue\":1,\"from\":\"a\",\"to\":\"b\",\"pause_ns\":5000}\n\n";
    let (text, _) = done(&["events"], events);
    assert_eq!(text, "d0: queue 1 moved from a to b in 5.0 µs\n");
    let (text, _) = done(&["events", "--json"], events);
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["event"], "queue_moved");
}

#[test]
fn device_add_hands_image_and_socket_over() {
    let directory = tempfile::tempdir().unwrap();
    let (image, listen) = (directory.path().join("image"), directory.path().join("d0.sock"));
    std::fs::write(&image, "the image").unwrap();
    let (image, listen) = (image.to_str().unwrap(), listen.to_str().unwrap());
    let add = ["device", "add", "d0", "--vm", "vm0", "--image", image, "--listen", listen];
    let arguments = [&add as &[_], &["--buffered", "--queues", "2", "--iothreads", "a,b"]].concat();
    let (_, mut asked) = done(&arguments, "");
    assert!(asked.head.starts_with("POST /v1/devices "), "{}", asked.head);
    assert_eq!(asked.body["fds"], json!(["image", "socket"]));
    let device = &asked.body["device"];
    assert_eq!((&device["queues"], &device["socket"]), (&json!(2), &json!(listen)));
    assert_eq!(device["mapping"], json!([{ "iothread": "a" }, { "iothread": "b" }]));
    assert_eq!(device["engine"]["direct"], json!(false));
    let socket = UnixListener::from(asked.fds.pop().unwrap());
    let mut text = String::new();
    std::fs::File::from(asked.fds.pop().unwrap()).read_to_string(&mut text).unwrap();
    assert_eq!(text, "the image");
    // Whoever may ask the data plane may connect, as to the sockets that are the data plane's own.
    let made = std::fs::metadata(listen).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&made) & 0o777, 0o660);
    // It listens: a front end can connect before anybody accepts.
    UnixStream::connect(listen).unwrap();
    socket.accept().unwrap();
}

#[test]
fn device_add_of_a_part_of_an_image_says_where_it_is_and_how_it_is_locked() {
    let directory = tempfile::tempdir().unwrap();
    let (image, listen) = (directory.path().join("image"), directory.path().join("d0.sock"));
    std::fs::write(&image, "the image").unwrap();
    let (image, listen) = (image.to_str().unwrap(), listen.to_str().unwrap());
    let add = ["device", "add", "d0", "--vm", "v", "--buffered", "--image", image, "--listen"];
    let engine = |more: &[&str]| {
        let (_, asked) = done(&[&add as &[_], &[listen], more].concat(), "");
        let engine = &asked.body["device"]["engine"];
        (engine["offset"].clone(), engine["size"].clone(), engine["lock"].clone())
    };
    let part = engine(&["--offset", "1M", "--size", "64K", "--no-lock"]);
    assert_eq!(part, (json!(1_048_576), json!(65_536), json!("off")));
    std::fs::remove_file(listen).unwrap();
    assert_eq!(engine(&["--lock-session"]), (Value::Null, Value::Null, json!("session")));
    std::fs::remove_file(listen).unwrap();
    assert_eq!(engine(&[]), (Value::Null, Value::Null, json!("always")));
    // A part has a beginning and a size, and there is one way to lock.
    for (wrong, words) in [
        (&["--offset", "1M"] as &[_], "--size"),
        (&["--no-lock", "--lock-session"], "cannot be used with"),
    ] {
        let all = [&["ctl", "--socket", "/nonexistent/s"], &add as &[_], &[listen], wrong].concat();
        let output = rtvirtio(Path::new("/x"), &all);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains(words), "{}", said(&output));
    }
}

#[test]
fn nic_add_says_where_its_frames_go_and_hands_its_socket_over() {
    let directory = tempfile::tempdir().unwrap();
    let listen = directory.path().join("n0.sock");
    let listen = listen.to_str().unwrap();
    let add = ["nic", "add", "n0", "--vm", "vm0", "--listen", listen];
    let nic = |more: &[&str]| {
        let (_, asked) = done(&[&add as &[_], more].concat(), "");
        assert!(asked.head.starts_with("POST /v1/nics "), "{}", asked.head);
        assert_eq!((&asked.body["fds"], asked.fds.len()), (&json!(["socket"]), 1));
        std::fs::remove_file(listen).unwrap();
        asked.body["nic"].clone()
    };
    let usual = json!({ "name": "n0", "vm": "vm0", "socket": listen, "queues": 1 });
    let with = |more: Value| {
        let mut all = usual.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let found =
        nic(&["--network", "lan", "--trunk", "10,20", "--no-anti-spoofing", "--mtu", "9000"]);
    let lan = json!({ "network": "lan", "trunk": [10, 20], "anti_spoofing": false, "mtu": 9000 });
    assert_eq!(found, with(lan));
    let found = nic(&["--network", "lan", "--vlan", "7", "--queues", "2", "--iothreads", "a,b"]);
    let mapping = json!([{ "iothread": "a" }, { "iothread": "b" }]);
    assert_eq!(
        found,
        with(json!({ "network": "lan", "vlan": 7, "queues": 2, "mapping": mapping }))
    );
    assert_eq!(nic(&["--stream", "/run/passt"]), with(json!({ "stream": "/run/passt" })));
    let dgram = json!({ "dgram": { "local": "/run/l", "remote": "/run/r" } });
    assert_eq!(nic(&["--dgram", "/run/l", "/run/r"]), with(dgram));
    for (wrong, words) in [
        (&[] as &[_], "<--tap <NAME>|--network <NAME>|--stream <PATH>|--dgram"),
        (&["--network", "lan", "--tap", "tap0"], "cannot be used with"),
        (&["--stream", "/run/passt", "--vlan", "7"], "--network"),
        (&["--network", "lan", "--queues", "9"], "--queues is 1 to 8"),
        (&["--tap", "rtv-not-there"], "ip tuntap add dev rtv-not-there mode tap"),
    ] {
        let all = [&["ctl", "--socket", "/nonexistent/s"], &add as &[_], wrong].concat();
        let output = rtvirtio(Path::new("/x"), &all);
        assert_eq!(output.status.code(), Some(1), "{wrong:?}");
        assert!(said(&output).contains(words), "{wrong:?}: {}", said(&output));
        assert!(!Path::new(listen).exists());
    }
}

#[test]
fn device_add_that_is_refused_leaves_no_socket() {
    let directory = tempfile::tempdir().unwrap();
    let listen = directory.path().join("d0.sock");
    let add = ["device", "add", "d0", "--vm", "v", "--ram", "--size", "1M", "--listen"];
    let arguments = [&add as &[_], &[listen.to_str().unwrap()]].concat();
    let refusal = r#"{"error":"there is a device \"d0\" already","hint":"choose another name"}"#;
    let (output, asked) = ctl(&arguments, 409, refusal);
    assert_eq!(asked.body["device"]["engine"], json!({ "type": "ram", "size": 1_048_576 }));
    let complaint = said(&output);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    let words = "error: there is a device \"d0\" already\nhint: choose another name";
    assert!(complaint.contains(words), "{complaint}");
    assert!(!listen.exists());
}

#[test]
fn absent_data_plane_is_named_with_a_hint() {
    let output = rtvirtio(Path::new("/x"), &["ctl", "--socket", "/nonexistent/s", "snapshot"]);
    let complaint = said(&output);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    assert!(
        complaint.contains("cannot connect to the data plane at /nonexistent/s"),
        "{complaint}"
    );
    assert!(complaint.contains("hint: start it: rtvirtio serve"), "{complaint}");
}

#[test]
fn metrics_are_no_json() {
    let arguments = ["ctl", "--socket", "/nonexistent/s", "metrics", "--json"];
    let output = rtvirtio(Path::new("/x"), &arguments);
    let complaint = said(&output);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    assert!(complaint.contains("--json cannot be used with `ctl metrics`"), "{complaint}");
    assert!(output.stdout.is_empty(), "{complaint}");
}

#[test]
fn what_was_shown_to_nobody_failed_and_what_was_changed_was_done() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let policy = r#"{"policy": "static", "cpus": [], "min_iothreads": 1, "max_iothreads": 1, "running": false, "last_decision": 0}"#;
    for (arguments, answer, code) in [
        (&["iothread", "list"] as &[_], "[]", 1),
        (&["device", "list"], "[]", 1),
        (&["--json", "mapping", "get", "d0"], r#"{"mapping": []}"#, 1),
        (&["metrics"], "rtvirtio_up 1\n", 1),
        (&["--json", "policy"], policy, 1),
        (&["--json", "policy", "static"], policy, 0),
        (&["--json", "mapping", "move", "d0", "0", "a"], r#"{"pause_ns": 1000}"#, 0),
        (&["--json", "device", "resize", "d0"], r#"{"capacity": 1048576}"#, 0),
    ] {
        let (output, _) = ctl_to(full(), arguments, &[(200, answer)]);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", said(&output));
        assert!(said(&output).contains("write standard output: No space"), "{}", said(&output));
    }
}

#[test]
fn listing_that_nobody_reads_any_more_ends_as_by_sigpipe() {
    let events = "data: {\"event\":\"device_added\",\"device\":\"d0\"}\n\n";
    for (arguments, answer) in [
        (&["--json", "events"] as &[_], events),
        (&["events"], events),
        (&["metrics"], "rtvirtio_up 1\n"),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (output, _) = ctl_to(writer, arguments, &[(200, answer)]);
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: {}", said(&output));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
    // What was changed was done, whoever reads of it.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let moved = ["mapping", "move", "d0", "0", "a"];
    let (output, _) = ctl_to(writer, &moved, &[(200, r#"{"pause_ns": 1000}"#)]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("the exit code says what was done"), "{}", said(&output));
}

/// A server with its files in a directory; killed when dropped.
struct Served(std::process::Child);

impl Served {
    fn start(directory: &Path, file: &str) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(RTVIRTIO).args(["serve", "--no-sandbox"]);
        let server = Self(command.arg(directory.join(file)).spawn().unwrap());
        let socket = directory.join("control.sock");
        eventually("an answer", Duration::from_secs(60), || UnixStream::connect(&socket).is_ok());
        server
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Each is refused by what is wrong with it, and nothing is changed.
#[test]
fn numbers_and_images_that_cannot_be_are_refused_in_their_own_words() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let text = format!(
        "version = 1\n[control]\nsocket = '{}'\n[[iothread]]\nname = 'iot0'\n[[schedule]]\nname = 'data'\n\
         channels = 4\nrequest_ns = 212500\nkib_ns = 9375\n[[device]]\nname = 'ram'\nvm = 'db'\n\
         socket = '{}'\nengine = {{ type = 'ram', size = '4M' }}\n[[device]]\nname = 'file'\nvm = 'db'\n\
         socket = '{}'\nengine = {{ type = 'file', path = '{}', format = 'raw' }}\n",
        path("control.sock"),
        path("ram.sock"),
        path("file.sock"),
        path("disk.raw")
    );
    std::fs::write(path("serve.toml"), text).unwrap();
    std::fs::write(path("disk.raw"), vec![0; 1 << 20]).unwrap();
    std::fs::write(path("empty.raw"), "").unwrap();
    std::fs::write(path("small.raw"), "less than a sector").unwrap();
    let ctl = |arguments: &[&str]| {
        let mut command = Command::new(RTVIRTIO);
        command.args(["ctl", "--socket", &path("control.sock")]).args(arguments).output().unwrap()
    };
    let _server = Served::start(directory.path(), "serve.toml");
    let before = ctl(&["configuration"]).stdout;
    let qos = ["qos", "ram", "--schedule", "data"];
    let promise = [&qos[..], &["--deadline-us", "1", "--iops", "1000000000"]].concat();
    let limit = [&qos[..], &["--max-iops", "100000001"]].concat();
    let listen = path("new.sock");
    let add = ["device", "add", "new", "--vm", "web", "--listen", &listen];
    let (empty, small, disk) = (path("empty.raw"), path("small.raw"), path("disk.raw"));
    let cases: [(&[&str], &[&str]); 13] = [
        (&promise, &["iops is 1000000000, outside 1 to 100000000"]),
        (&limit, &["max_iops is 100000001, outside 1 to 100000000"]),
        (&[&add[..], &["--image", &empty]].concat(), &["has 0 bytes", "truncate --size=10G IMAGE"]),
        (&[&add[..], &["--image", &small]].concat(), &["less than one block", "truncate"]),
        (
            &[&add[..], &["--image", &disk, "--queues", "0"]].concat(),
            &["queues is 0, outside 1 to 64"],
        ),
        (&["device", "resize", "file", "0", "--shrink"], &["size of 0 bytes", "ctl device remove"]),
        (&["device", "resize", "ram", "0", "--shrink"], &["size of 0 bytes", "ctl device remove"]),
        (&["device", "resize", "file", "513"], &["size of 513 bytes", "ask for"]),
        (&["device", "resize", "ram", "513"], &["size of 513 bytes", "ask for 1024"]),
        (
            &["device", "resize", "file", "18446744073709551615"],
            &["size of 18446744073709551615 bytes"],
        ),
        (
            &["device", "resize", "ram", "18446744073709551615"],
            &["size of 18446744073709551615 bytes"],
        ),
        (&["iothread", "create", "x", "--cpus", "1023"], &["CPU 1023", "this process may use CPU"]),
        (&["iothread", "pin", "iot0", "1023"], &["CPU 1023", "this process may use CPU"]),
    ];
    for (arguments, wanted) in cases {
        let output = ctl(arguments);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        for words in wanted {
            assert!(text.contains(words), "{arguments:?}: {words}: {text}");
        }
        for words in ["num_queues", "Invalid argument", "not a multiple of its block"] {
            assert!(!text.contains(words), "{arguments:?}: {words}: {text}");
        }
    }
    assert_eq!(ctl(&["configuration"]).stdout, before);
    assert_eq!(std::fs::metadata(path("disk.raw")).unwrap().len(), 1 << 20);
}

/// What `ctl` has changed is there again after a kill, by the configuration that was printed before.
#[test]
fn configuration_that_is_printed_has_what_ctl_has_changed() {
    if !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let text = format!(
        "version = 1\n[control]\nsocket = '{}'\n[[iothread]]\nname = 'iot0'\n[[schedule]]\nname = 'data'\n\
         channels = 4\nrequest_ns = 212500\nkib_ns = 9375\n[[device]]\nname = 'first'\nvm = 'db'\n\
         socket = '{}'\nengine = {{ type = 'ram', size = '4M' }}\n",
        path("control.sock"),
        path("first.sock")
    );
    std::fs::write(path("serve.toml"), text).unwrap();
    std::fs::write(path("disk.raw"), vec![0; 1 << 20]).unwrap();
    let ctl = |arguments: &[&str]| {
        let mut command = Command::new(RTVIRTIO);
        command.args(["ctl", "--socket", &path("control.sock")]).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let server = Served::start(directory.path(), "serve.toml");
    ctl(&["iothread", "create", "iot1"]);
    let second = ["device", "add", "second", "--vm", "web", "--queues", "2"];
    let at = ["--listen", &path("second.sock"), "--image", &path("disk.raw")];
    ctl(&[&second[..], &at[..]].concat());
    ctl(&["mapping", "move", "second", "0", "iot1"]);
    ctl(&["qos", "second", "--schedule", "data", "--iops", "100", "--deadline-us", "5000"]);
    ctl(&["device", "resize", "first", "8M"]);
    let printed = ctl(&["configuration"]);
    std::fs::write(path("new.toml"), &printed).unwrap();
    drop(server);
    let _server = Served::start(directory.path(), "new.toml");
    assert_eq!(ctl(&["configuration"]), printed);
    let snapshot: Value = serde_json::from_str(&ctl(&["--json", "snapshot"])).unwrap();
    let devices = snapshot["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2, "{snapshot}");
    assert_eq!(devices[0]["capacity"], 8 << 20);
    assert_eq!(devices[1]["queues"][0]["iothread"], "iot1");
    assert_eq!(devices[1]["qos"]["settings"]["iops"], 100, "{snapshot}");
    // A front end finds it where it was.
    UnixStream::connect(path("second.sock")).unwrap();
}
