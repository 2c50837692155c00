mod books;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard};

use rtvirtio_spec::control::{
    Activity, Consumption, Decision, Demand, DeviceUsage, Event, Had, IoThreadState, Load, Outcome,
    PolicyAction, PolicyState, QosState, QueueName, ScheduleState, StallsState,
};
use rtvirtio_spec::mapping::{Entry, Mapping};
use rtvirtio_spec::serve::{Device, IoCores, IoThread, Policy, Qos, Schedule, wire};
use rtvirtio_units::{Bytes, CpuId, DiskName, IoThreadName, Name, Nanos};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tokio::sync::broadcast;

use self::books::{Books, nice};
use super::*;
use crate::plane::{
    EVENTS_KEPT, HandedFds, Observation, ObservedDevice, ObservedQueue, PlaneError,
};
use crate::stats::{Op, QueueStats};

/// A server with two IOThreads and no device.
struct Served {
    books: Arc<Books>,
    server: ControlServer,
    _directory: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let control = Control { socket: directory.path().join("control.sock"), group: None };
        let books = Books::new();
        let plane: Arc<dyn Plane> = books.clone();
        let server = ControlServer::start(&control, plane).unwrap();
        Self { books, server, _directory: directory }
    }

    fn raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> String {
        let mut stream = UnixStream::connect(self.server.path()).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::empty();
        let sent = sendmsg(&stream, &[IoSlice::new(bytes)], &mut control, flags).unwrap();
        // The server may refuse before it has read all.
        let _ = stream.write_all(&bytes[sent..]);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    fn with_fds(
        &self,
        method: &str,
        path: &str,
        body: &str,
        fds: &[BorrowedFd<'_>],
    ) -> (u16, String) {
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}");
        let answer = self.raw(head.as_bytes(), fds);
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let (status, body) = self.with_fds(method, path, &text, &[]);
        (status, serde_json::from_str(&body).unwrap_or(Value::Null))
    }

    fn add(&self, name: &str) {
        let (status, body) = self.ask("POST", "/v1/devices", &json!({ "device": ram(name) }));
        assert_eq!((status, body), (201, Value::Null));
    }
}

fn ram(name: &str) -> Value {
    let engine = json!({ "type": "ram", "size": "1M" });
    json!({ "name": name, "vm": "vm0", "socket": "/s", "queues": 2, "engine": engine })
}

#[test]
fn socket_is_private_and_gone_at_the_end() {
    let served = Served::new();
    let path = served.server.path().to_owned();
    let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    drop(served.server);
    assert!(!path.exists());
}

/// The umask would take the group's right to write, without which nobody connects.
#[test]
fn socket_of_a_group_is_open_to_it_and_to_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let group = rustix::process::getegid().as_raw();
    let control = Control { socket: directory.path().join("s"), group: Some(group) };
    let _server = ControlServer::start(&control, Books::new()).unwrap();
    let mode = std::fs::symlink_metadata(&control.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o660);
}

/// What is added by a change, such as an IOThread, inherits the nice value.
#[test]
fn requests_are_heard_by_a_nice_thread_and_changes_made_by_another() {
    let served = Served::new();
    assert_eq!(served.ask("GET", "/v1/snapshot", &Value::Null).0, 200);
    let (status, _) = served.ask("PUT", "/v1/iothreads/iot0/lock", &json!({ "locked": true }));
    assert_eq!(status, 204);
    let state = served.books.state();
    assert_eq!(state.locked, nice());
    assert!(state.looked >= nice().max(10), "{}", state.looked);
}

#[test]
fn stale_socket_is_replaced_and_a_served_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let control = Control { socket: directory.path().join("s"), group: None };
    drop(UnixListener::bind(&control.socket).unwrap());
    let first = ControlServer::start(&control, Books::new()).unwrap();
    let second = ControlServer::start(&control, Books::new());
    assert!(matches!(second, Err(ControlError::InUse(_))), "{second:?}");
    drop(first);
    File::create(&control.socket).unwrap();
    let third = ControlServer::start(&control, Books::new());
    assert!(matches!(third, Err(ControlError::NotASocket(_))), "{third:?}");
    assert!(control.socket.exists(), "it is not ours");
}

#[test]
fn devices_and_iothreads_are_listed_changed_and_removed() {
    let served = Served::new();
    let (status, body) =
        served.ask("POST", "/v1/iothreads", &json!({ "name": "iot2", "cpus": [1] }));
    assert_eq!((status, body), (201, Value::Null));
    served.add("d0");
    let (status, found) = served.ask("GET", "/v1/snapshot", &Value::Null);
    assert_eq!(status, 200);
    assert_eq!(found["devices"][0]["queues"][1]["iothread"], "iot1");
    assert_eq!(found["devices"][0]["queues"][1]["state"], "running");
    assert_eq!(found["iothreads"][2]["cpus"], json!([1]));
    assert!(found["time_ns"].as_u64().unwrap() > 1_700_000_000_000_000_000);
    assert_eq!(served.ask("GET", "/v1/devices", &Value::Null).1, found["devices"]);
    assert_eq!(served.ask("GET", "/v1/iothreads", &Value::Null).1, found["iothreads"]);

    let resized = served.ask("PATCH", "/v1/devices/d0", &json!({ "size": "2M" }));
    assert_eq!(resized, (200, json!({ "capacity": 2_097_152 })));
    let pin = json!({ "cpus": [3, 2, 3] });
    assert_eq!(served.ask("PUT", "/v1/iothreads/iot2/cpus", &pin).0, 204);
    let lock = json!({ "locked": true });
    assert_eq!(served.ask("PUT", "/v1/iothreads/iot2/lock", &lock).0, 204);
    let iothread = &served.ask("GET", "/v1/iothreads", &Value::Null).1[2];
    assert_eq!((&iothread["cpus"], &iothread["locked"]), (&json!([2, 3]), &json!(true)));

    let in_use = served.ask("DELETE", "/v1/iothreads/iot1", &Value::Null);
    assert_eq!((in_use.0, &in_use.1["error"]), (409, &json!("iothread \"iot1\" has 1 queues")));
    assert_eq!(served.ask("DELETE", "/v1/iothreads/iot2", &Value::Null).0, 204);
    assert_eq!(served.ask("DELETE", "/v1/devices/d0", &Value::Null).0, 204);
    assert_eq!(served.ask("DELETE", "/v1/devices/d0", &Value::Null).0, 404);
}

#[test]
fn mapping_is_set_whole_and_by_queue() {
    let served = Served::new();
    served.add("d0");
    let both = |a: &str, b: &str| json!({ "mapping": [{ "iothread": a, "vqs": [0] }, { "iothread": b, "vqs": [1] }] });
    assert_eq!(served.ask("GET", "/v1/mapping/d0", &Value::Null), (200, both("iot0", "iot1")));
    let set = served.ask("PUT", "/v1/mapping/d0", &both("iot1", "iot0"));
    assert_eq!(set, (200, both("iot1", "iot0")));
    let moved = served.ask("PUT", "/v1/mapping/d0/1", &json!({ "iothread": "iot1" }));
    assert_eq!(moved, (200, json!({ "pause_ns": 42 })));
    let whole = json!({ "mapping": [{ "iothread": "iot1", "vqs": [0, 1] }] });
    assert_eq!(served.ask("GET", "/v1/mapping/d0", &Value::Null), (200, whole));

    let missing = json!({ "mapping": [{ "iothread": "iot1", "vqs": [0] }] });
    let (status, body) = served.ask("PUT", "/v1/mapping/d0", &missing);
    let words = "missing vq 1 IOThread assignment in iothread-vq-mapping";
    assert_eq!((status, &body["error"]), (422, &json!(words)));
    assert!(body["hint"].as_str().unwrap().contains("add 1 to the vqs"));
    let no_queue = served.ask("PUT", "/v1/mapping/d0/2", &json!({ "iothread": "iot1" }));
    assert_eq!(no_queue.0, 404);
}

#[test]
fn schedules_are_made_changed_and_removed_and_devices_join_and_leave_them() {
    let served = Served::new();
    served.add("d0");
    let curve = json!({ "channels": 4, "request_ns": 200_000, "kib_ns": 9_000 });
    assert_eq!(served.ask("PUT", "/v1/schedules/nvme0", &curve), (201, Value::Null));
    let curve = json!({ "channels": 8, "request_ns": 100_000, "kib_ns": 0, "flush_ns": 50_000 });
    assert_eq!(served.ask("PUT", "/v1/schedules/nvme0", &curve), (204, Value::Null));
    let qos = json!({
        "schedule": "nvme0", "weight": 200, "deadline_us": 10_000, "iops": 1_500, "burst": 2
    });
    assert_eq!(served.ask("PUT", "/v1/devices/d0/qos", &qos), (204, Value::Null));
    let mut born_with_it = ram("d1");
    born_with_it["qos"] = json!({ "schedule": "nvme0" });
    let added = served.ask("POST", "/v1/devices", &json!({ "device": born_with_it }));
    assert_eq!(added, (201, Value::Null));

    let found = served.ask("GET", "/v1/snapshot", &Value::Null).1;
    let expected = json!([{
        "name": "nvme0", "channels": 8, "request_ns": 100_000, "kib_ns": 0, "flush_ns": 50_000,
        "waiting": 0, "running": 0, "background": 0, "background_bound": 9,
        "withheld_ns": 1_600_000_000u64,
        "usage": {
            "used_ns": 3_000_000_000u64, "cost_ns": 1_500_000_000, "requests": 0, "flushes": 0,
            "alone": 0,
        },
        "stalls": {
            "count": 2, "time_ns": 600_000_000, "longest_ns": 500_000_000,
            "ongoing_ns": 70_000_000,
        },
    }]);
    assert_eq!(found["schedules"], expected);
    assert_eq!(found["devices"][0]["qos"]["settings"], qos);
    assert_eq!(found["devices"][0]["qos"]["late"], 1);
    assert_eq!(found["devices"][1]["qos"]["settings"]["schedule"], "nvme0");
    let (_, text) = served.with_fds("GET", "/metrics", "", &[]);
    for line in [
        "rtvirtio_schedule_background_bound{schedule=\"nvme0\"} 9.0",
        "rtvirtio_schedule_background_withheld_seconds_total{schedule=\"nvme0\"} 1.6",
        "rtvirtio_schedule_channel_time_seconds_total{schedule=\"nvme0\",of=\"used\"} 3.0",
        "rtvirtio_schedule_channel_time_seconds_total{schedule=\"nvme0\",of=\"charged\"} 1.5",
        "rtvirtio_promised_responses_total{vm=\"vm0\",device=\"d0\",outcome=\"kept\"} 7.0",
        "rtvirtio_promised_responses_total{vm=\"vm0\",device=\"d0\",outcome=\"late\"} 1.0",
        "rtvirtio_channel_time_seconds_total{vm=\"vm0\",device=\"d0\",kind=\"read\"} 0.5",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }

    let (status, body) = served.ask("DELETE", "/v1/schedules/nvme0", &Value::Null);
    assert_eq!(
        (status, &body["error"]),
        (409, &json!("schedule \"nvme0\" is that of device \"d0\""))
    );
    for device in ["d0", "d1", "d0"] {
        let path = format!("/v1/devices/{device}/qos");
        assert_eq!(served.ask("DELETE", &path, &Value::Null), (204, Value::Null));
    }
    let found = served.ask("GET", "/v1/devices", &Value::Null).1;
    assert_eq!(found[0]["qos"], Value::Null);
    assert_eq!(served.ask("DELETE", "/v1/schedules/nvme0", &Value::Null).0, 204);
    assert_eq!(served.ask("DELETE", "/v1/schedules/nvme0", &Value::Null).0, 404);
}

fn decision(number: u64) -> Decision {
    Decision {
        number,
        time_ns: Nanos::new(7),
        policy: Policy::Dynamic,
        action: PolicyAction::MoveQueue {
            queue: QueueName { device: DiskName::new("d0").unwrap(), queue: 1 },
            from: IoThreadName::new("iot0").unwrap(),
            to: IoThreadName::new("iot1").unwrap(),
        },
        reason: "IOThread 1 is full".to_owned(),
        outcome: Outcome::Failed,
        error: Some("it is being moved".to_owned()),
        took_ns: Nanos::new(9),
        before: Load { iops: 1.5, wait_ns: Nanos::new(3), cores: 0.25 },
        after: None,
    }
}

#[test]
fn policy_is_set_in_part_and_decisions_are_read_from_a_number_on() {
    let served = Served::new();
    let found = served.ask("GET", "/v1/policy", &Value::Null);
    let expected = json!({
        "policy": "static", "cpus": [], "min_iothreads": 1, "max_iothreads": 1, "borrow": false, "running": false,
        "last_decision": 0,
    });
    assert_eq!(found, (200, expected));
    let set = json!({ "policy": "dynamic", "cpus": [3, 1], "min_iothreads": 2 });
    let (status, found) = served.ask("PUT", "/v1/policy", &set);
    assert_eq!((status, &found["cpus"], &found["max_iothreads"]), (200, &json!([3, 1]), &json!(2)));
    let (_, found) = served.ask("PUT", "/v1/policy", &json!({ "policy": "advise" }));
    assert_eq!((&found["policy"], &found["min_iothreads"]), (&json!("advise"), &json!(2)));

    served.books.state().decisions = (1..=3).map(decision).collect();
    let (status, found) = served.ask("GET", "/v1/decisions?after=1", &Value::Null);
    assert_eq!((status, found.as_array().unwrap().len()), (200, 2));
    let expected = json!({
        "number": 2, "time_ns": 7, "policy": "dynamic", "reason": "IOThread 1 is full",
        "action": {
            "kind": "move_queue", "device": "d0", "queue": 1, "from": "iot0", "to": "iot1"
        },
        "outcome": "failed", "error": "it is being moved", "took_ns": 9,
        "before": { "iops": 1.5, "wait_ns": 3, "cores": 0.25 },
    });
    assert_eq!(found[0], expected);
    assert_eq!(serde_json::from_value::<Decision>(expected).unwrap(), decision(2));
    assert_eq!(served.ask("GET", "/v1/decisions", &Value::Null).1.as_array().unwrap().len(), 3);
}

#[test]
fn thousand_malformed_requests_change_nothing() {
    let served = Served::new();
    let set = json!({ "policy": "dynamic", "cpus": [3, 1] });
    let (_, before) = served.ask("PUT", "/v1/policy", &set);
    let bodies = [
        "",
        "{",
        "null",
        "[]",
        "\"dynamic\"",
        "{\"policy\":1}",
        "{\"policy\":\"fast\"}",
        "{\"policy\":\"spdk\",\"cpus\":[]}",
        "{\"policy\":\"spdk\",\"cpus\":[1,1]}",
        "{\"policy\":\"spdk\",\"cpus\":[99999]}",
        "{\"policy\":\"spdk\",\"max_iothreads\":3}",
        "{\"policy\":\"spdk\",\"min_iothreads\":0}",
        "{\"policy\":\"spdk\",\"min_iothreads\":-1}",
        "{\"policy\":\"spdk\",\"borrow\":1}",
        "{\"policy\":\"spdk\",\"x\":1}",
        "{\"policy\":\"spdk\",\"cpus\":[4294967296]}",
        "{\"policy\":\"spdk\"}x",
        "\u{7f}",
    ];
    let queries = ["after", "after=", "after=-1", "after=x", "after=1&after=2", "before=1", "%00"];
    for n in 0..1_000 {
        let (status, answer) = match n % 3 {
            0 => served.with_fds("PUT", "/v1/policy", bodies[n / 3 % bodies.len()], &[]),
            1 => {
                let query = queries[n / 3 % queries.len()];
                served.with_fds("GET", &format!("/v1/decisions?{query}"), "", &[])
            }
            _ => served.with_fds(["POST", "DELETE", "PATCH"][n / 3 % 3], "/v1/policy", "{}", &[]),
        };
        assert!([400, 405, 422].contains(&status), "{n}: {status} {answer}");
        let body: Value = serde_json::from_str(&answer).unwrap();
        assert!(body["error"].is_string(), "{n}: {answer}");
    }
    assert_eq!(served.ask("GET", "/v1/policy", &Value::Null).1, before);
    assert_eq!(served.ask("GET", "/v1/decisions", &Value::Null), (200, json!([])));
}

#[test]
fn reader_of_events_that_does_not_read_holds_up_nobody() {
    let served = Served::new();
    let mut idle = UnixStream::connect(served.server.path()).unwrap();
    idle.write_all(b"GET /v1/events HTTP/1.0\r\n\r\n").unwrap();
    let mut first = [0; 1];
    idle.read_exact(&mut first).unwrap();
    // More than the socket and the stream hold.
    let reason = "x".repeat(500);
    for number in 0..20_000 {
        let (action, reason) = ("move".to_owned(), reason.clone());
        served.books.say(Event::Decision { number, action, reason, outcome: Outcome::Done });
    }
    let (status, found) = served.ask("PUT", "/v1/policy", &json!({ "policy": "round-robin" }));
    assert_eq!((status, &found["policy"]), (200, &json!("round-robin")));
}

#[test]
fn wrong_requests_get_an_error_body() {
    let served = Served::new();
    let name = "a".repeat(65);
    let curve = |channels| json!({ "channels": channels, "request_ns": 1, "kib_ns": 0 });
    for (method, path, body, status, words) in [
        ("GET", "/v2", json!(null), 404, "there is no such path"),
        ("PUT", "/v1/snapshot", json!(null), 405, "does not have this method"),
        ("POST", "/v1/devices", json!(null), 400, "the body"),
        ("POST", "/v1/devices", json!({ "device": ram("a"), "x": 1 }), 400, "unknown field `x`"),
        ("POST", "/v1/devices", json!({ "device": ram("a/b") }), 400, "not allowed in a name"),
        ("POST", "/v1/devices", json!({ "device": ram("a"), "fds": ["image"] }), 400, "0 came"),
        ("DELETE", &format!("/v1/devices/{name}"), json!(null), 400, "use 64 characters at most"),
        ("DELETE", "/v1/devices/..%2fa", json!(null), 400, "not allowed in a name"),
        ("GET", "/v1/mapping/%FF", json!(null), 400, "UTF-8"),
        ("PUT", "/v1/nics/%FF/rx", json!({ "max_frames": 1 }), 400, "UTF-8"),
        ("PUT", "/v1/mapping/a/x", json!({ "iothread": "iot0" }), 400, "a queue is a number"),
        ("PUT", "/v1/iothreads/iot0/cpus", json!({ "cpus": [1024] }), 422, "beyond 1023"),
        ("POST", "/v1/iothreads", json!({ "name": "iot0" }), 409, "already"),
        ("PUT", "/v1/schedules/s", json!({ "channels": 1 }), 400, "missing field `request_ns`"),
        ("PUT", "/v1/schedules/s", curve(0), 422, "channels is 0, outside 1 to 65536"),
        ("PUT", "/v1/schedules/a%20b", curve(1), 400, "not allowed in a name"),
        ("PUT", "/v1/devices/d/qos", json!({ "schedule": "s", "iops": 1 }), 422, "a promise has"),
        ("PUT", "/v1/devices/d/qos", json!({ "schedule": "s", "x": 1 }), 400, "unknown field `x`"),
        ("PUT", "/v1/devices/d/qos", json!({ "schedule": "s" }), 404, "no schedule \"s\""),
        ("PUT", "/v1/nics/n/tx", json!({ "max_frames": 1 }), 404, "no nic \"n\""),
        ("PUT", "/v1/nics/n/tx", json!({ "within_us": 1 }), 422, "tx has neither max_frames"),
        ("PUT", "/v1/nics/n/rx", json!({ "max_frames": 0 }), 422, "max_frames is 0, outside 1"),
        ("PUT", "/v1/nics/n/rx", json!({ "max_frames": 1, "x": 1 }), 400, "unknown field `x`"),
        ("PUT", "/v1/nics/n/to", json!({ "max_frames": 1 }), 400, "a direction is rx or tx"),
        ("DELETE", "/v1/nics/n/rx", json!(null), 404, "no nic \"n\""),
        ("DELETE", "/v1/devices/d/qos", json!(null), 404, "no device \"d\""),
    ] {
        let (found, body) = served.ask(method, path, &body);
        let error = body["error"].as_str().unwrap_or_default();
        assert!(found == status && error.contains(words), "{method} {path}: {found} {body}");
    }
    let answer = served.raw(b"nonsense\r\n\r\n", &[]);
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
    let body: Value = serde_json::from_str(body).unwrap();
    assert_eq!(body, json!({ "error": "this is no HTTP request: 400 Bad Request" }));
    let chunked =
        "PUT /v1/policy HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n";
    let answer = served.raw(chunked.as_bytes(), &[]);
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("the body"), "{answer}");
}

/// As `nc -N` and `socat` do at the end of their input.
#[test]
fn client_that_sends_nothing_more_has_its_answer_and_an_incomplete_request_its_end() {
    let served = Served::new();
    let ask = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(served.server.path()).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for _ in 0..20 {
        let answer = ask(b"GET /v1/snapshot HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let since = Instant::now();
    for bytes in
        [&b""[..], b"GET /v1/snap", b"POST /v1/devices HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
    {
        let answer = ask(bytes);
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
}

#[test]
fn every_route_is_in_the_reference_and_every_one_there_is_served() {
    use rtvirtio_spec::reference::ROUTES;
    let served = Served::new();
    let written: std::collections::BTreeSet<&str> = include_str!("routes.rs")
        .split(".route(\"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .filter(|path| path.starts_with('/'))
        .collect();
    assert_eq!(written, ROUTES.iter().map(|route| route.path).collect());
    for path in written {
        for method in ["get", "post", "put", "patch", "delete"] {
            let known = ROUTES.iter().any(|route| (route.path, route.method) == (path, method));
            // Its answer does not end.
            if (method, path) == ("get", "/v1/events") {
                assert!(known);
                continue;
            }
            let place = path.replace(['{', '}'], "");
            let (status, body) = served.ask(&method.to_uppercase(), &place, &json!(null));
            let missing = status == 405 || body["error"] == "there is no such path";
            assert_eq!(known, !missing, "{method} {path}: {status} {body}");
        }
    }
}

#[test]
fn large_body_is_refused() {
    let served = Served::new();
    let (status, _) = served.with_fds("POST", "/v1/devices", &" ".repeat(MAX_BODY + 1), &[]);
    assert_eq!(status, 413);
}

/// Its length is enough: no byte of the body is sent.
#[test]
fn large_body_is_refused_before_it_comes() {
    let served = Served::new();
    for length in [MAX_BODY + 1, 1 << 40] {
        let head =
            format!("POST /v1/devices HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        let answer = served.raw(head.as_bytes(), &[]);
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(answer.contains("of which 65536 bytes are read at most"), "{answer}");
    }
}

/// More than there are places for, in their bodies and in their heads. A reader of events, whose request is whole, stays.
#[test]
fn half_sent_requests_keep_nobody_from_being_answered() {
    let served = Served::new();
    let connect = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(served.server.path()).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    let mut events = connect(b"GET /v1/events HTTP/1.0\r\n\r\n");
    let mut read_events = |words: &str| {
        let mut text = String::new();
        while !text.contains(words) {
            let mut chunk = [0; 4096];
            let n = events.read(&mut chunk).unwrap();
            assert!(n > 0, "{text}");
            text.push_str(std::str::from_utf8(&chunk[..n]).unwrap());
        }
    };
    read_events("ready");
    let body = b"POST /v1/devices HTTP/1.0\r\nContent-Length: 10\r\n\r\n{";
    let head = b"GET /v1/snapshot HTTP/1.0\r\nX: ";
    let in_body: Vec<UnixStream> = (0..MAX_CONNECTIONS).map(|_| connect(body)).collect();
    let in_head: Vec<UnixStream> = (0..MAX_CONNECTIONS).map(|_| connect(head)).collect();
    for _ in 0..3 {
        assert_eq!(served.ask("GET", "/v1/snapshot", &Value::Null).0, 200);
    }
    served.add("d0");
    read_events("device_added");
    // Those that have waited for longest gave way, and were not waited for: whose time is up is told so.
    let gave_way = in_body.iter().filter(|stream| {
        stream.set_nonblocking(true).unwrap();
        (&**stream).read(&mut [0]).is_ok_and(|length| length == 0)
    });
    assert!(gave_way.count() > 0);
    drop(in_head);
}

#[test]
fn body_that_does_not_come_is_not_waited_for_and_nothing_is_changed() {
    let served = Served::new();
    let head = "POST /v1/devices HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{";
    let answer = served.raw(head.as_bytes(), &[]);
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("nothing was changed"), "{answer}");
}

#[test]
fn descriptors_reach_the_device_that_they_came_with() {
    let served = Served::new();
    let (image, socket) = (tempfile::tempfile().unwrap(), UnixStream::pair().unwrap().0);
    let body = json!({ "device": ram("d0"), "fds": ["socket", "image"] }).to_string();
    let fds = [socket.as_fd(), image.as_fd()];
    assert_eq!(served.with_fds("POST", "/v1/devices", &body, &fds).0, 201);
    let handed = std::mem::take(&mut served.books.state().handed);
    let is_same = |a: &std::os::fd::OwnedFd, b: &dyn AsRawFd| {
        let inode = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
        inode(a.as_raw_fd()) == inode(b.as_raw_fd())
    };
    assert!(is_same(&handed.image.unwrap(), &image));
    assert!(is_same(&handed.socket.unwrap(), &socket));

    let twice = json!({ "device": ram("d1"), "fds": ["image", "image"] }).to_string();
    assert_eq!(served.with_fds("POST", "/v1/devices", &twice, &fds).0, 400);

    // Queues of a TAP are several, and of a network device; an image is not.
    let nic = json!({ "name": "n0", "vm": "v", "socket": "/run/n0", "tap": "tap0", "queues": 2 });
    let of = |uses: [&str; 3]| json!({ "nic": nic, "fds": uses }).to_string();
    let fds = vec![socket.as_fd(), image.as_fd(), image.as_fd()];
    let body = of(["socket", "tap", "tap"]);
    assert_eq!(served.with_fds("POST", "/v1/nics", &body, &fds).0, 201);
    let handed = std::mem::take(&mut served.books.state().handed);
    assert!(is_same(&handed.socket.unwrap(), &socket));
    assert_eq!((handed.taps.len(), handed.image.is_none()), (2, true));
    for (path, body) in [
        ("/v1/nics", of(["socket", "tap", "image"])),
        ("/v1/nics", of(["socket", "socket", "tap"])),
        (
            "/v1/devices",
            json!({ "device": ram("d1"), "fds": ["image", "socket", "tap"] }).to_string(),
        ),
    ] {
        assert_eq!(served.with_fds("POST", path, &body, &fds).0, 400, "{body}");
    }
}

#[test]
fn surplus_descriptors_are_closed() {
    let served = Served::new();
    let file = tempfile::tempfile().unwrap();
    let fds = vec![file.as_fd(); 16];
    let body = json!({ "device": ram("d0"), "fds": ["image"] }).to_string();
    let (status, answer) = served.with_fds("POST", "/v1/devices", &body, &fds);
    assert!(status == 400 && answer.contains("names 1 descriptors, and 9 came"), "{answer}");
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let copies = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|l| l == link)).count()
    };
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while copies() > 1 && std::time::Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(copies(), 1);
}

#[test]
fn events_arrive_in_order_after_the_first_comment() {
    let served = Served::new();
    let mut stream = UnixStream::connect(served.server.path()).unwrap();
    stream.write_all(b"GET /v1/events HTTP/1.0\r\n\r\n").unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut text = String::new();
    let mut read_until = |words: &str, text: &mut String| {
        while !text.contains(words) {
            let mut chunk = [0; 4096];
            let n = stream.read(&mut chunk).unwrap();
            assert!(n > 0, "{text}");
            text.push_str(std::str::from_utf8(&chunk[..n]).unwrap());
        }
    };
    read_until("ready", &mut text);
    served.add("d0");
    let moved = served.ask("PUT", "/v1/mapping/d0/0", &json!({ "iothread": "iot1" }));
    assert_eq!(moved.0, 200);
    read_until("queue_moved", &mut text);
    read_until("\n\n", &mut text);
    let events: Vec<Event> =
        text.lines().filter_map(|l| serde_json::from_str(l.strip_prefix("data:")?).ok()).collect();
    let name = |text: &str| IoThreadName::new(text).unwrap();
    let device = DiskName::new("d0").unwrap();
    assert_eq!(
        events,
        [
            Event::DeviceAdded { device: device.clone() },
            Event::QueueMoved {
                device,
                queue: 0,
                from: name("iot0"),
                to: name("iot1"),
                pause_ns: Nanos::new(42)
            },
        ]
    );
}

#[test]
fn metrics_are_in_seconds_and_empty_histograms_are_left_out() {
    let served = Served::new();
    served.add("d0");
    let curve = json!({ "channels": 4, "request_ns": 1, "kib_ns": 0 });
    assert_eq!(served.ask("PUT", "/v1/schedules/s", &curve).0, 201);
    let stats = Arc::clone(&served.books.state().devices[&DiskName::new("d0").unwrap()].2[1]);
    stats.start(1);
    stats.busy(500_000_000);
    stats.record(Op::Read, 4096, Nanos::new(1 << 20), Nanos::new(1 << 21));
    let (status, text) = served.with_fds("GET", "/metrics", "", &[]);
    assert_eq!(status, 200);
    let queue = "vm=\"vm0\",device=\"d0\",queue=\"1\"";
    for line in [
        format!("rtvirtio_requests_total{{{queue},operation=\"read\"}} 1.0"),
        format!("rtvirtio_transferred_bytes_total{{{queue},operation=\"read\"}} 4096.0"),
        // A bucket does not hold its upper edge: 2^20 ns is in the next one.
        format!("rtvirtio_wait_seconds_bucket{{le=\"0.001048576\",{queue}}} 0"),
        format!("rtvirtio_wait_seconds_bucket{{le=\"0.002097152\",{queue}}} 1"),
        format!("rtvirtio_response_seconds_bucket{{le=\"+Inf\",{queue}}} 1"),
        format!("rtvirtio_response_seconds_sum{{{queue}}} 0.003145728"),
        format!("rtvirtio_service_seconds_count{{{queue}}} 1"),
        "rtvirtio_iothread_time_seconds_total{iothread=\"iot0\",activity=\"busy\"} 1.5".to_owned(),
        "rtvirtio_iothread_lock_seconds_total{iothread=\"iot1\"} 0.25".to_owned(),
        "rtvirtio_iothread_runqueue_seconds_total{iothread=\"iot1\"} 0.125".to_owned(),
        "rtvirtio_iothreads 2.0".to_owned(),
        "rtvirtio_policy{policy=\"static\"} 1.0".to_owned(),
        "rtvirtio_policy{policy=\"dynamic\"} 0.0".to_owned(),
        "rtvirtio_decisions_total{kind=\"move_queue\",outcome=\"done\"} 3.0".to_owned(),
        "rtvirtio_queue_moves_total 4.0".to_owned(),
        "rtvirtio_schedule_stalls_total{schedule=\"s\"} 2.0".to_owned(),
        "rtvirtio_schedule_stall_time_seconds_total{schedule=\"s\"} 0.6".to_owned(),
        "rtvirtio_schedule_stalled_seconds{schedule=\"s\"} 0.07".to_owned(),
        format!("rtvirtio_queue_busy_seconds_total{{{queue}}} 0.5"),
        "rtvirtio_capacity_bytes{vm=\"vm0\",device=\"d0\"} 1048576.0".to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    assert!(!text.contains("wait_seconds_count{vm=\"vm0\",device=\"d0\",queue=\"0\"}"), "{text}");
    assert!(text.ends_with("# EOF\n"));
}
