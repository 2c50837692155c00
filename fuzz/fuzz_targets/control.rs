//! Requests of the control API, well formed or not, in any order, to a data plane that does them, of disks, network devices and
//! networks: each is answered in HTTP and JSON, an error with its words, and what there is afterwards is within its bounds and goes
//! together.

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
use rtvirtio_host::dataplane::ControlClient;
use rtvirtio_spec::control::NicState;
use rtvirtio_spec::serve::{Control, NicLink, wire};
use rtvirtio_units::DiskName;

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
    AddNetwork { name: u8, max_broadcast: Option<u64> },
    RemoveNetwork(u8),
    AddNic(Nic),
    RemoveNic(u8),
    SetNicRate(u8, u8, Rate),
    RemoveNicRate(u8, u8),
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

#[derive(Arbitrary, Debug)]
struct Nic {
    name: u8,
    socket: u8,
    link: u8,
    vlan: Option<u16>,
    trunk: Option<Vec<u16>>,
    anti_spoofing: Option<bool>,
    mac: Option<u8>,
    mtu: Option<u16>,
    queues: Option<u8>,
    trust: Option<u8>,
    rx: Option<Rate>,
    tx: Option<Rate>,
}

#[derive(Arbitrary, Debug)]
struct Rate {
    max_frames: Option<u32>,
    max_mbit: Option<u16>,
    burst_ms: Option<u16>,
    within_us: Option<u16>,
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

/// An object of the members that there are.
fn object(members: &[(&str, Option<String>)]) -> String {
    let members = members.iter().filter_map(|(key, value)| {
        let value = value.as_ref()?;
        Some(format!("{key:?}:{value}"))
    });
    format!("{{{}}}", members.collect::<Vec<_>>().join(","))
}

impl Rate {
    fn json(&self) -> String {
        object(&[
            ("max_frames", self.max_frames.map(|n| n.to_string())),
            ("max_mbit", self.max_mbit.map(|n| n.to_string())),
            ("burst_ms", self.burst_ms.map(|n| n.to_string())),
            ("within_us", self.within_us.map(|n| n.to_string())),
        ])
    }
}

impl Nic {
    /// On a network or on datagrams, both, or nothing. Of TAPs, which are the host's, there are none here.
    fn json(&self, directory: &std::path::Path) -> String {
        let path = |name: String| format!("{:?}", directory.join(name).display().to_string());
        let (local, remote) = (path(format!("{}.dgram", name(self.socket))), path("peer".into()));
        let dgram = format!("{{\"local\":{local},\"remote\":{remote}}}");
        let network = format!("{:?}", name(self.link / 8));
        let (dgram, network) = match self.link % 8 {
            0 => (None, None),
            1 => (Some(dgram), Some(network)),
            2 => (Some(dgram), None),
            _ => (None, Some(network)),
        };
        object(&[
            ("name", Some(format!("{:?}", name(self.name)))),
            ("vm", Some("\"vm\"".into())),
            ("socket", Some(path(format!("{}.sock", name(self.socket))))),
            ("dgram", dgram),
            ("network", network),
            ("vlan", self.vlan.map(|vlan| vlan.to_string())),
            ("trunk", self.trunk.as_ref().map(|vlans| format!("{vlans:?}"))),
            ("anti_spoofing", self.anti_spoofing.map(|yes| yes.to_string())),
            ("mac", self.mac.map(|last| format!("\"02:00:00:00:00:{last:02x}\""))),
            ("mtu", self.mtu.map(|mtu| mtu.to_string())),
            ("queues", self.queues.map(|pairs| pairs.to_string())),
            ("trust", self.trust.map(|trust| format!("{:?}", name(trust)))),
            ("rx", self.rx.as_ref().map(Rate::json)),
            ("tx", self.tx.as_ref().map(Rate::json)),
        ])
    }
}

/// `rx`, `tx`, or what is neither.
const fn direction(which: u8) -> &'static str {
    match which % 8 {
        0 => "x",
        odd if odd % 2 == 1 => "rx",
        _ => "tx",
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
            Self::AddNetwork { name: n, max_broadcast } => {
                let more = max_broadcast.map(|frames| frames.to_string());
                let body = [("name", Some(format!("{:?}", name(*n)))), ("max_broadcast", more)];
                of("POST", "/v1/networks".into(), object(&body))
            }
            Self::RemoveNetwork(n) => of("DELETE", format!("/v1/networks/{}", name(*n)), "".into()),
            Self::AddNic(nic) => {
                let body = format!("{{\"nic\":{},\"fds\":[]}}", nic.json(directory));
                of("POST", "/v1/nics".into(), body)
            }
            Self::RemoveNic(n) => of("DELETE", format!("/v1/nics/{}", name(*n)), "".into()),
            Self::SetNicRate(n, way, rate) => {
                of("PUT", format!("/v1/nics/{}/{}", name(*n), direction(*way)), rate.json())
            }
            Self::RemoveNicRate(n, way) => {
                of("DELETE", format!("/v1/nics/{}/{}", name(*n), direction(*way)), "".into())
            }
            Self::SetPolicy { policy, cpus, min, max } => {
                let policies = ["static", "round-robin", "dynamic", "advise", "iocm", "spdk", "x"];
                let policy = policies[usize::from(*policy) % policies.len()];
                let more = optional("min_iothreads", min.map(|n| n.to_string()))
                    + &optional("max_iothreads", max.map(|n| n.to_string()));
                let body = format!("{{\"policy\":{policy:?},\"cpus\":{cpus:?}{more}}}");
                of("PUT", "/v1/policy".into(), body)
            }
            Self::Get(which) => {
                let paths = [
                    "/v1/snapshot",
                    "/v1/devices",
                    "/v1/iothreads",
                    "/v1/mapping/a",
                    "/v1/policy",
                    "/v1/decisions",
                    "/v1/x",
                    "/v1/nics",
                    "/v1/networks",
                    "/v1/configuration",
                    "/metrics",
                ];
                of("GET", paths[usize::from(*which) % paths.len()].into(), "".into())
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

/// What follows the JSON value that begins here (RFC 8259), if one does.
fn after_value(text: &str) -> Option<&str> {
    let text = text.trim_start();
    match text.chars().next()? {
        '{' => after_members(&text[1..], '}', |text| {
            after_value(after_string(text)?.trim_start().strip_prefix(':')?)
        }),
        '[' => after_members(&text[1..], ']', after_value),
        '"' => after_string(text),
        '-' | '0'..='9' => {
            let of_number = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
            let rest = text.trim_start_matches(of_number);
            text[..text.len() - rest.len()].parse::<f64>().ok()?;
            Some(rest)
        }
        _ => ["true", "false", "null"].iter().find_map(|word| text.strip_prefix(word)),
    }
}

fn after_members<'a>(
    text: &'a str,
    end: char,
    after_one: fn(&'a str) -> Option<&'a str>,
) -> Option<&'a str> {
    if let Some(rest) = text.trim_start().strip_prefix(end) {
        return Some(rest);
    }
    let mut rest = after_one(text)?.trim_start();
    while let Some(next) = rest.strip_prefix(',') {
        rest = after_one(next)?.trim_start();
    }
    rest.strip_prefix(end)
}

fn after_string(text: &str) -> Option<&str> {
    let mut rest = text.trim_start().strip_prefix('"')?.chars();
    loop {
        match rest.next()? {
            '"' => return Some(rest.as_str()),
            '\\' => match rest.next()? {
                'u' => {
                    for _ in 0..4 {
                        rest.next()?.to_digit(16)?;
                    }
                }
                escaped if !"\"\\/bfnrt".contains(escaped) => return None,
                _ => {}
            },
            '\0'..='\x1f' => return None,
            _ => {}
        }
    }
}

/// Status, type and body of an answer (RFC 9112).
fn answered(text: &str) -> Option<(u16, &str, &str)> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let (mut kind, mut length) = ("", 0);
    for line in lines {
        let (name, value) = line.split_once(": ")?;
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().ok()?,
            "content-type" => kind = value,
            _ => {}
        }
    }
    (length == body.len()).then_some((status, kind, body))
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
        let (status, kind, body) =
            answered(&text).unwrap_or_else(|| panic!("{request:?}: {text:?}"));
        assert!((200..600).contains(&status), "{request:?}: {text}");
        // Metrics are text, and all else that is said is JSON.
        if !body.is_empty() && (path != b"/metrics" || status != 200) {
            let is_json = after_value(body).is_some_and(|rest| rest.trim().is_empty());
            assert!(is_json && kind == "application/json", "{request:?}: {text}");
        }
        // Not even what cannot be done is a fault of the server's own but by the kernel.
        let is_failure = text.contains("the change failed");
        assert!(!is_failure, "{request:?}: {text}");
        if status == 400 && body.is_empty() {
            // Of hyper: the path is no target.
            continue;
        }
        if status >= 400 {
            assert!(body.contains("\"error\":"), "{request:?}: {text}");
        }
    }
    // The next input meets what it can meet.
    let found = served.registry.observe();
    assert!(found.devices.len() <= 16 && found.nics.len() <= 16 && found.iothreads.len() <= 128);
    // What is served goes together, and is what is said of it.
    let configuration = served.registry.configuration();
    for nic in &configuration.nics {
        if let NicLink::Network(port) = &nic.link {
            assert!(configuration.networks.iter().any(|network| network.name == port.network));
        }
        let others = configuration.nics.iter().filter(|other| other.name != nic.name);
        assert_eq!(nic.fits(others), Ok(()));
        let name = DiskName::from(nic.name.clone());
        assert!(configuration.devices.iter().all(|disk| disk.name != name));
    }
    let client = ControlClient::new(&served.socket);
    let nics: Vec<NicState> = client.get("/v1/nics").unwrap();
    assert_eq!(nics.len(), configuration.nics.len());
    let said: wire::Configuration = client.get("/v1/configuration").unwrap();
    assert_eq!((said.nic.len(), said.network.len()), (nics.len(), configuration.networks.len()));
    client.snapshot().unwrap();
});
