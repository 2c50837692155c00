//! Requests of the control API, well formed or not, in any order, to a data plane that does them: each is
//! answered, an error in JSON with its words, and what there is afterwards is within its bounds.

#![no_main]

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use rtvirtio_dataplane::control::ControlServer;
use rtvirtio_dataplane::plane::{Plane, Registry};
use rtvirtio_spec::serve::Control;

#[derive(Arbitrary, Debug)]
enum Request {
    AddIoThread { name: u8, cpus: Vec<u16>, trust: Option<u8>, poll_max_us: Option<u32> },
    RemoveIoThread(u8),
    Pin(u8, Vec<u16>),
    LockIoThread(u8, bool),
    AddDevice { name: u8, socket: u8, queues: u8, size: u32, qos: Option<Qos>, trust: Option<u8> },
    RemoveDevice(u8),
    Resize(u8, Option<u64>, bool),
    SetMapping(u8, Vec<(u8, Vec<u8>)>),
    Move(u8, u16, u8),
    SetSchedule { name: u8, channels: u32, request_ns: u64, kib_ns: u64 },
    RemoveSchedule(u8),
    SetQos(u8, Qos),
    RemoveQos(u8),
    SetPolicy { policy: u8, cpus: Vec<u16>, min: Option<u32>, max: Option<u32> },
    Get(u8),
    /// Anything at all in the place of a path, a method or a body.
    Wild { method: u8, path: Vec<u8>, body: Vec<u8> },
    /// Bytes that need be no request.
    Raw(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
struct Qos {
    schedule: u8,
    weight: Option<u32>,
    deadline_us: Option<u64>,
    iops: Option<u64>,
    max_iops: Option<u64>,
}

/// What serves, once for all inputs.
struct Served {
    socket: PathBuf,
    directory: PathBuf,
    registry: Arc<Registry>,
    _server: ControlServer,
}

fn served() -> &'static Served {
    static SERVED: OnceLock<Served> = OnceLock::new();
    SERVED.get_or_init(|| {
        let directory = std::env::temp_dir().join(format!("rtvirtio-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let socket = directory.join("control");
        let registry = Arc::new(Registry::new(Arc::new(|_, _| ())).unwrap());
        let control = Control { socket: socket.clone(), group: None };
        let plane = Arc::clone(&registry) as Arc<dyn Plane>;
        let _server = ControlServer::start(&control, plane).unwrap();
        Served { socket, directory, registry, _server }
    })
}

/// One of few names, so that requests meet.
fn name(which: u8) -> String {
    let names = ["a", "b", "c", "d-1", "", "a/b", "é", "x\"y", "..", "iot0"];
    names[usize::from(which) % names.len()].to_owned()
}

impl Qos {
    fn json(&self) -> String {
        let part = |key: &str, value: Option<u64>| {
            value.map_or(String::new(), |value| format!(",\"{key}\":{value}"))
        };
        format!(
            "{{\"schedule\":{:?}{}{}{}{}}}",
            name(self.schedule),
            part("weight", self.weight.map(Into::into)),
            part("deadline_us", self.deadline_us),
            part("iops", self.iops),
            part("max_iops", self.max_iops),
        )
    }
}

impl Request {
    /// Method, path and body.
    fn parts(&self, directory: &std::path::Path) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let of = |method: &str, path: String, body: String| {
            (method.into(), path.into_bytes(), body.into_bytes())
        };
        let optional = |key: &str, value: Option<String>| {
            value.map_or(String::new(), |value| format!(",\"{key}\":{value}"))
        };
        let named = |which: &Option<u8>| which.map(|which| format!("{:?}", name(which)));
        match self {
            Self::AddIoThread { name: n, cpus, trust, poll_max_us } => {
                let more = optional("trust", named(trust))
                    + &optional("poll_max_us", poll_max_us.map(|us| us.to_string()));
                let body = format!("{{\"name\":{:?},\"cpus\":{cpus:?}{more}}}", name(*n));
                of("POST", "/v1/iothreads".into(), body)
            }
            Self::RemoveIoThread(n) => of("DELETE", format!("/v1/iothreads/{}", name(*n)), "".into()),
            Self::Pin(n, cpus) => {
                let path = format!("/v1/iothreads/{}/cpus", name(*n));
                of("PUT", path, format!("{{\"cpus\":{cpus:?}}}"))
            }
            Self::LockIoThread(n, locked) => {
                let path = format!("/v1/iothreads/{}/lock", name(*n));
                of("PUT", path, format!("{{\"locked\":{locked}}}"))
            }
            Self::AddDevice { name: n, socket, queues, size, qos, trust } => {
                let socket = directory.join(format!("{}.sock", name(*socket)));
                // A few MiB at most: all of it is memory.
                let size = u64::from(size % (4 << 20)) & !(if size % 7 == 0 { 0 } else { 511 });
                let more = optional("qos", qos.as_ref().map(Qos::json))
                    + &optional("trust", named(trust));
                let body = format!(
                    "{{\"device\":{{\"name\":{:?},\"vm\":\"vm\",\"socket\":{:?},\"queues\":{queues},\
                     \"engine\":{{\"type\":\"ram\",\"size\":{size}}}{more}}},\"fds\":[]}}",
                    name(*n),
                    socket.display().to_string()
                );
                of("POST", "/v1/devices".into(), body)
            }
            Self::RemoveDevice(n) => of("DELETE", format!("/v1/devices/{}", name(*n)), "".into()),
            Self::Resize(n, size, shrink) => {
                let size = size.map(|size| size % (16 << 20)).map(|size| size.to_string());
                let body = format!("{{\"shrink\":{shrink}{}}}", optional("size", size));
                of("PATCH", format!("/v1/devices/{}", name(*n)), body)
            }
            Self::SetMapping(n, entries) => {
                let entry = |(iothread, vqs): &(u8, Vec<u8>)| {
                    format!("{{\"iothread\":{:?},\"vqs\":{vqs:?}}}", name(*iothread))
                };
                let entries: Vec<_> = entries.iter().map(entry).collect();
                let body = format!("{{\"mapping\":[{}]}}", entries.join(","));
                of("PUT", format!("/v1/mapping/{}", name(*n)), body)
            }
            Self::Move(n, queue, to) => {
                let body = format!("{{\"iothread\":{:?}}}", name(*to));
                of("PUT", format!("/v1/mapping/{}/{queue}", name(*n)), body)
            }
            Self::SetSchedule { name: n, channels, request_ns, kib_ns } => {
                let body = format!(
                    "{{\"channels\":{channels},\"request_ns\":{request_ns},\"kib_ns\":{kib_ns}}}"
                );
                of("PUT", format!("/v1/schedules/{}", name(*n)), body)
            }
            Self::RemoveSchedule(n) => {
                of("DELETE", format!("/v1/schedules/{}", name(*n)), "".into())
            }
            Self::SetQos(n, qos) => {
                of("PUT", format!("/v1/devices/{}/qos", name(*n)), qos.json())
            }
            Self::RemoveQos(n) => of("DELETE", format!("/v1/devices/{}/qos", name(*n)), "".into()),
            Self::SetPolicy { policy, cpus, min, max } => {
                let policies = ["static", "round-robin", "dynamic", "advise", "iocm", "spdk", "x"];
                let policy = policies[usize::from(*policy) % policies.len()];
                let more = optional("min_iothreads", min.map(|n| n.to_string()))
                    + &optional("max_iothreads", max.map(|n| n.to_string()));
                let body = format!("{{\"policy\":{policy:?},\"cpus\":{cpus:?}{more}}}");
                of("PUT", "/v1/policy".into(), body)
            }
            Self::Get(which) => {
                let paths =
                    ["snapshot", "devices", "iothreads", "mapping/a", "policy", "decisions", "x"];
                let path = paths[usize::from(*which) % paths.len()];
                of("GET", format!("/v1/{path}"), "".into())
            }
            Self::Wild { method, path, body } => {
                let methods: [&[u8]; 6] = [b"GET", b"PUT", b"POST", b"PATCH", b"DELETE", b"X"];
                let method = methods[usize::from(*method) % methods.len()].to_vec();
                let mut target = b"/v1/".to_vec();
                target.extend(path.iter().filter(|byte| byte.is_ascii_graphic()));
                // A reader of events reads for ever.
                if target.starts_with(b"/v1/events") {
                    target = b"/v1/event".to_vec();
                }
                (method, target, body.clone())
            }
            Self::Raw(_) => unreachable!("not in parts"),
        }
    }
}

fuzz_target!(|requests: Vec<Request>| {
    let served = served();
    for request in requests.iter().take(32) {
        let mut stream = UnixStream::connect(&served.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut answer = Vec::new();
        if let Request::Raw(bytes) = request {
            let _ = stream.write_all(bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut answer);
            continue;
        }
        let (method, path, body) = request.parts(&served.directory);
        let head = format!(" HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        let text = [&method, &b" "[..], &path, head.as_bytes(), &body].concat();
        let _ = stream.write_all(&text);
        stream.read_to_end(&mut answer).expect("an answer");
        let text = String::from_utf8(answer).expect("UTF-8");
        let status: u16 = text
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3)?.parse().ok())
            .unwrap_or_else(|| panic!("{request:?}: {text:?}"));
        assert!((200..600).contains(&status), "{request:?}: {text}");
        // Not even what cannot be done is a fault of the server's own but by the kernel.
        let is_failure = text.contains("the change failed");
        assert!(!is_failure, "{request:?}: {text}");
        if status == 400 && text.ends_with("\r\n\r\n") {
            // Of hyper: the path is no target.
            continue;
        }
        if status >= 400 {
            let (_, body) = text.split_once("\r\n\r\n").expect("a body");
            assert!(body.contains("\"error\":"), "{request:?}: {text}");
        }
    }
    // The next input meets what it can meet.
    let found = served.registry.observe();
    assert!(found.devices.len() <= 16 && found.iothreads.len() <= 128);
});
