//! Network devices and networks in a plane that is served.

use rtvirtio_vhost::protocol::Header;

use super::*;

/// A network with two devices, of which the second has two pairs of queues, and a disk of the first one's VM.
const NETWORK: &str = r#"
version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "iot1"
[[network]]
name = "lan"
[[device]]
name = "root"
vm = "a"
socket = "DIR/root.sock"
engine = { type = "ram", size = "1M" }
mapping = [{ iothread = "iot0" }]
[[nic]]
name = "a"
vm = "a"
socket = "DIR/a.sock"
network = "lan"
mapping = [{ iothread = "iot0" }]
[[nic]]
name = "b"
vm = "b"
socket = "DIR/b.sock"
network = "lan"
queues = 2
mapping = [{ iothread = "iot0" }]
"#;

/// What a configuration says, served, and what happens from the first; none, and the test is skipped, where IOThreads get no
/// rings.
fn served(text: &str) -> Option<(Registry, broadcast::Receiver<Event>)> {
    served_with(text, Arc::new(|_, _| ()))
}

fn served_with(text: &str, report: Arc<Report>) -> Option<(Registry, broadcast::Receiver<Event>)> {
    if !has_io_uring() {
        return None;
    }
    let configuration = rtvirtio_spec::serve::parse("serve.toml", text).unwrap();
    let opened = Opened::open(&configuration, &mut Default::default(), None, &|_| ()).unwrap();
    let registry = Registry::new(report).unwrap();
    let events = registry.events();
    registry.add_all(&configuration, opened).unwrap();
    Some((registry, events))
}

#[test]
fn queues_of_a_nic_are_seen_and_moved_as_those_of_a_disk() {
    let directory = tempfile::tempdir().unwrap();
    let text = NETWORK.replace("DIR", directory.path().to_str().unwrap());
    let Some((registry, _)) = served(&text) else { return };
    let iothread = |text: &str| IoThreadName::new(text).unwrap();
    let device = |text: &str| DiskName::new(text).unwrap();

    let watched = registry.core().look();
    let seen =
        watched.queues.iter().map(|of| (of.id, of.device.as_str(), of.index, of.vm, of.kind));
    let (disk, port) = (QueueKind::Disk, QueueKind::Switch);
    let expected = [(0, "root", 0, 1, disk), (1, "a", 0, 1, port), (2, "a", 1, 1, port)];
    assert_eq!(seen.clone().take(3).collect::<Vec<_>>(), expected);
    assert_eq!(
        seen.skip(3).map(|of| (of.0, of.3)).collect::<Vec<_>>(),
        [3, 4, 5, 6].map(|id| (id, 2))
    );
    assert!(watched.threads.iter().all(|thread| !thread.locked));

    // A move is of this queue alone; a session that comes later starts it there.
    let moves = || {
        registry.move_queue(&device("b"), 2, &iothread("iot1"))?;
        registry.move_queue(&device("b"), 4, &iothread("iot1"))
    };
    let refused = moves().unwrap_err();
    assert!(matches!(refused, PlaneError::NoQueue { queues: 4, queue: 4, .. }), "{refused}");
    let mapping = registry.mapping(&device("b")).unwrap();
    let names = ["iot0", "iot0", "iot1", "iot0"].map(iothread);
    assert_eq!(mapping.by_queue(), names);
    let observed = registry.observe();
    assert_eq!(observed.nics[1].state.queues[2].iothread, iothread("iot1"));
    assert_eq!(registry.configuration().nics[1].mapping, mapping);
    let state = observed.iothreads.iter().map(|thread| thread.queues).collect::<Vec<_>>();
    assert_eq!(state, [6, 1]);
    assert_eq!(observed.moves, 1);

    // An IOThread goes when its last queue has gone.
    let used = registry.remove_iothread(&iothread("iot1")).unwrap_err();
    assert!(matches!(used, PlaneError::IoThreadInUse { queues: 1, .. }), "{used}");
    registry.set_mapping(&device("b"), &[Entry::round_robin(iothread("iot0"))]).unwrap();
    registry.remove_iothread(&iothread("iot1")).unwrap();
    // Names are of one device of either kind.
    let taken = json!({ "name": "b", "vm": "c", "socket": directory.path().join("c.sock"),
        "engine": { "type": "ram", "size": 1 << 20 } });
    let taken = registry.add_device(serde_json::from_value(taken).unwrap(), HandedFds::default());
    assert!(matches!(taken, Err(PlaneError::DeviceExists(_))), "{taken:?}");
    let twice = text.replace("name = \"root\"", "name = \"a\"");
    let twice = rtvirtio_spec::serve::parse("serve.toml", &twice).unwrap_err().to_string();
    assert!(twice.contains("nic \"a\""), "{twice}");
}

#[test]
fn front_end_of_a_nic_and_rings_that_its_driver_breaks_are_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let text = NETWORK.replace("DIR", directory.path().to_str().unwrap());
    let Some((registry, events)) = served(&text) else { return };
    let mut rig = Rig { registry, events, directory };
    let device = DiskName::new("a").unwrap();
    let mut begun = Vec::new();
    while !matches!(begun.last(), Some(Event::PolicySet { .. })) {
        begun.push(rig.event());
    }
    assert!(begun.contains(&Event::DeviceAdded { device: device.clone() }), "{begun:?}");

    let front = UnixStream::connect(rig.directory.path().join("a.sock")).unwrap();
    assert_eq!(rig.event(), Event::FrontEndConnected { device: device.clone() });
    drop(front);
    assert_eq!(rig.event(), Event::FrontEndDisconnected { device: device.clone() });

    // While it runs, and once: neither the watchdog nor the session's end tells again.
    for runs_on in [true, false] {
        let (nic, host) = rig.registry.nic(&device);
        let mut session = Session::new(nic, host);
        let guest = give_ring(&mut session, 1);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        session.handle(Message::SetProtocolFeatures(TOLD_OF_CHANGES), vec![]).unwrap();
        session.handle(Message::SetBackendReqFd, vec![theirs.into()]).unwrap();
        break_ring(&guest);
        kick(&mut session, 1);
        let reason = "the available index jumps".to_owned();
        let broken = Event::QueueBroken { device: device.clone(), queue: 1, reason };
        // CONFIG_CHANGE_MSG, version 1, no body: the front end looks at the status then.
        let mut header = [0; HEADER_SIZE];
        let changed = Header { request: 2, flags: 1, size: 0 };
        if runs_on {
            assert_eq!(rig.event(), broken);
            ours.read_exact(&mut header).unwrap();
            let status = session.handle(Message::GetStatus, vec![]);
            assert!(matches!(status, Ok(Answer::U64(64))), "{status:?}");
            std::thread::sleep(Duration::from_millis(250));
            drop(session);
        } else {
            let (_, host) = rig.registry.nic(&device);
            while !host.is_broken(1) {
                std::hint::spin_loop();
            }
            drop(session);
            assert_eq!(rig.event(), broken);
            ours.read_exact(&mut header).unwrap();
        }
        assert_eq!(Header::from_bytes(header), changed);
        assert_eq!(ours.read(&mut header).unwrap(), 0, "it is told once");
        assert_eq!(rig.events.try_recv(), Err(TryRecvError::Empty));
    }
    rig.registry.remove_nic(&device).unwrap();
    assert_eq!(rig.event(), Event::DeviceRemoved { device });
}

/// A network device of which one direction is promised something, and an IOThread beside its own.
const PROMISED: &str = r#"
version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "iot1"
[[network]]
name = "lan"
[[nic]]
name = "plc"
vm = "plc"
socket = "SOCKET"
network = "lan"
mapping = [{ iothread = "iot0" }]
tx = { max_frames = 20000, burst_ms = 1, within_us = 200 }
"#;

/// Adds a disk whose queue is on this IOThread.
fn add_disk(registry: &Registry, socket: &str, iothread: &str) -> Result<(), PlaneError> {
    let device = json!({
        "name": "disk",
        "vm": "vm",
        "socket": socket,
        "engine": { "type": "ram", "size": 1 << 20 },
        "mapping": [{ "iothread": iothread }],
    });
    registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default())
}

/// A disk that comes to an IOThread of a promised network device, as a new one or by a move, would take what is promised.
#[test]
fn disk_that_would_break_a_promise_is_refused_whichever_way_it_comes() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let Some((registry, _)) = served(&PROMISED.replace("SOCKET", &path("plc.sock"))) else {
        return;
    };
    let iothread = |name: &str| IoThreadName::new(name).unwrap();
    let disk_on = |name: &str| add_disk(&registry, &path("disk.sock"), name);
    let is_refused = |result: Result<(), PlaneError>| {
        let error = result.unwrap_err();
        let (text, hint) = (error.to_string(), error.hint().unwrap_or_default());
        assert!(text.contains("\"iot0\" cannot keep what nic \"plc\" is promised (tx)"), "{text}");
        assert!(hint.contains("within_us = "), "{hint}");
    };
    is_refused(disk_on("iot0"));
    disk_on("iot1").unwrap();
    is_refused(registry.move_queue(&disk(), 0, &iothread("iot0")).map(drop));
    let entry = serde_json::from_value(json!([{ "iothread": "iot0" }])).unwrap();
    let entries: Vec<Entry> = entry;
    is_refused(registry.set_mapping(&disk(), &entries));
    assert_eq!(registry.mapping(&disk()).unwrap().iothread(0), Some(&iothread("iot1")));
    // Nor does the promised queue go to where a disk is, while the other one may.
    let plc = DiskName::new("plc").unwrap();
    let error = registry.move_queue(&plc, 1, &iothread("iot1")).unwrap_err().to_string();
    assert!(error.contains("\"iot1\" cannot keep what nic \"plc\" is promised (tx)"), "{error}");
    registry.move_queue(&plc, 0, &iothread("iot1")).unwrap();
    assert_eq!(registry.mapping(&plc).unwrap().by_queue(), ["iot1", "iot0"].map(iothread));
    let observed = registry.observe();
    let queues: Vec<_> = observed.nics[0].state.queues.iter().map(|queue| queue.promised).collect();
    let promised = rtvirtio_spec::control::PromisedFrames {
        within_ns: Nanos::from_micros(200),
        kept: 0,
        late: 0,
    };
    assert_eq!(queues, [None, Some(promised)]);
}

/// Queues that are on their way come there or go back: what comes meanwhile has to fit at both ends.
#[test]
fn disk_that_comes_while_promised_queues_move_is_refused_where_they_were_and_where_they_go() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let Some((registry, _)) = served(&PROMISED.replace("SOCKET", &path("plc.sock"))) else {
        return;
    };
    let (registry, socket) = (&registry, &path("disk.sock"));
    let iothread = |name: &str| IoThreadName::new(name).unwrap();
    let plc = &DiskName::new("plc").unwrap();
    let pool = &registry.core().pool;
    let thread = registry.core().state().iothreads[&iothread("iot0")].id;
    let other = serve_slots(pool, thread);
    let (nic, host) = registry.nic(plc);
    let mut session = Session::new(nic, Arc::clone(&host));
    let _guest = give_ring(&mut session, 1);
    kick(&mut session, 1);
    let key = host.queues.key(1).unwrap();
    let (begun, is_begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let came = std::thread::scope(move |scope| {
        // The move waits until the IOThread goes on.
        scope.spawn(move || {
            let wait = move |_: &mut Queue| {
                begun.send(()).unwrap();
                let _ = released.recv();
            };
            pool.edit(other, wait).unwrap();
        });
        is_begun.recv().unwrap();
        let to = [Entry::round_robin(iothread("iot1"))];
        let moving = scope.spawn(move || registry.set_mapping(plc, &to));
        while !pool.is_busy(key) {
            assert!(!moving.is_finished(), "it was to wait");
            std::thread::sleep(Duration::from_millis(1));
        }
        let came = ["iot0", "iot1"].map(|name| (name, add_disk(registry, socket, name)));
        release.send(()).unwrap();
        moving.join().unwrap().unwrap();
        came
    });
    for (name, result) in came {
        let text = result.unwrap_err().to_string();
        let words = format!("\"{name}\" cannot keep what nic \"plc\" is promised (tx)");
        assert!(text.contains(&words), "{text}");
    }
    pool.stop(other).unwrap();
    assert_eq!(registry.mapping(plc).unwrap().by_queue(), ["iot1"; 2].map(iothread));
    add_disk(registry, socket, "iot1").unwrap_err();
    add_disk(registry, socket, "iot0").unwrap();
}

/// As where a guest's memory is its own and not shared. Buffers to receive into are something, though no frame comes.
#[test]
fn driver_of_a_nic_that_kicks_an_empty_ring_is_told_of_once_and_one_that_has_filled_it_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let text = NETWORK.replace("DIR", directory.path().to_str().unwrap());
    let said = Arc::new(std::sync::Mutex::new(Vec::new()));
    let of_report = Arc::clone(&said);
    let report = Arc::new(move |device: &str, notice: Notice<'_>| {
        if let Notice::EmptyRing { queue } = notice {
            of_report.lock().unwrap().push((device.to_owned(), queue));
        }
    });
    let Some((registry, _)) = served_with(&text, report) else { return };
    let device = DiskName::new("a").unwrap();
    let (nic, host) = registry.nic(&device);
    let mut session = Session::new(nic, host);
    let guest = give_ring(&mut session, 1);
    // The ring for receiving lies behind that for sending, with one buffer in it.
    let address = VringAddress {
        index: 0,
        descriptors: (1 << 30) + 0x4000,
        available: (1 << 30) + 0x5000,
        used: (1 << 30) + 0x6000,
        log: None,
    };
    for message in
        [Message::SetVringNum(VringState { index: 0, num: 16 }), Message::SetVringAddr(address)]
    {
        session.handle(message, vec![]).unwrap();
    }
    // Address, length, VIRTQ_DESC_F_WRITE, next; then the available index.
    let descriptor =
        [&0x8000_u64.to_le_bytes()[..], &1526_u32.to_le_bytes(), &[2, 0, 0, 0]].concat();
    rustix::io::pwrite(&guest, &descriptor, 0x4000).unwrap();
    rustix::io::pwrite(&guest, &1_u16.to_le_bytes(), 0x5002).unwrap();
    let kicks = [0, 1].map(|index| {
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let set = Message::SetVringKick(VringFd { index, fd: true });
        session.handle(set, vec![kick.try_clone().unwrap()]).unwrap();
        kick
    });
    let kick_both = || {
        for kick in &kicks {
            rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
        }
    };
    // Front ends kick once when they start a ring, and each IOThread that it comes to hears of that.
    kick_both();
    for name in ["iot1", "iot0"] {
        registry.move_queue(&device, 1, &IoThreadName::new(name).unwrap()).unwrap();
    }
    std::thread::sleep(EMPTY_TIME + Duration::from_millis(500));
    assert!(said.lock().unwrap().is_empty(), "{said:?}");
    let start = Instant::now();
    while said.lock().unwrap().is_empty() {
        kick_both();
        std::thread::sleep(Duration::from_millis(10));
        assert!(start.elapsed() < Duration::from_secs(20), "nobody is told");
    }
    assert_eq!(*said.lock().unwrap(), [("a".to_owned(), 1)]);
}

/// On one IOThread the two would be too much, as they are while only one of them has moved.
#[test]
fn promised_queues_that_change_places_go_together_or_not_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let rate = "{ max_frames = 1100000, burst_ms = 0, within_us = 1000000 }";
    let socket = directory.path().join("plc.sock");
    let text = format!(
        r#"version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "iot1"
[[network]]
name = "lan"
[[nic]]
name = "plc"
vm = "plc"
socket = "{}"
network = "lan"
mapping = [{{ iothread = "iot0", vqs = [0] }}, {{ iothread = "iot1", vqs = [1] }}]
rx = {rate}
tx = {rate}
"#,
        socket.display()
    );
    let Some((registry, _)) = served(&text) else { return };
    let plc = DiskName::new("plc").unwrap();
    let set = |names: [&str; 2]| {
        let entries = (0..)
            .zip(names)
            .map(|(queue, name): (u16, _)| json!({ "iothread": name, "vqs": [queue] }));
        let entries: Vec<Entry> = serde_json::from_value(entries.collect()).unwrap();
        registry.set_mapping(&plc, &entries)
    };
    let names = || {
        let mapping = registry.mapping(&plc).unwrap();
        mapping.by_queue().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    set(["iot1", "iot0"]).unwrap();
    assert_eq!(names(), ["iot1", "iot0"]);
    let one = registry.move_queue(&plc, 0, &IoThreadName::new("iot0").unwrap());
    assert!(one.unwrap_err().to_string().contains("cannot keep what nic \"plc\" is promised"));
    set(["iot0", "iot0"]).unwrap_err();
    assert_eq!(names(), ["iot1", "iot0"]);
}

/// A disk beside it, or too short a time, and a limit alone always fits.
#[test]
fn rates_of_a_nic_change_if_its_iothread_can_keep_them_and_else_nothing_does() {
    use rtvirtio_spec::control::QueueDirection::{Receive, Transmit};
    use rtvirtio_spec::serve::NicRate;

    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let text = format!(
        r#"version = 1
[[iothread]]
name = "iot0"
[[network]]
name = "lan"
[[nic]]
name = "plc"
vm = "plc"
socket = "{}"
network = "lan"
rx = {{ max_mbit = 100 }}
"#,
        path("plc.sock")
    );
    let Some((registry, _)) = served(&text) else { return };
    let plc = DiskName::new("plc").unwrap();
    let rate =
        |direction, value| NicRate::new(direction, serde_json::from_value(value).unwrap()).unwrap();
    let promise = |within: u64| {
        rate(Transmit, json!({ "max_frames": 20000, "burst_ms": 1, "within_us": within }))
    };
    let set = |direction, rate| registry.set_nic_rate(&plc, direction, rate);
    let now = || {
        let nic = registry.configuration().nics.remove(0);
        let queues = registry.observe().nics[0].state.queues.clone();
        let within = |index: usize| queues[index].promised.map(|promised| promised.within_ns);
        assert_eq!([0, 1].map(within), [nic.rx, nic.tx].map(|rate| rate.and_then(|r| r.within)));
        (nic.rx, nic.tx)
    };
    let limited = rate(Receive, json!({ "max_mbit": 100 }));
    assert_eq!(now(), (Some(limited), None));
    set(Transmit, Some(promise(300))).unwrap();
    set(Receive, None).unwrap();
    assert_eq!(now(), (None, Some(promise(300))));
    let refused = |result: Result<(), PlaneError>| {
        let error = result.unwrap_err();
        let (text, hint) = (error.to_string(), error.hint().unwrap_or_default());
        assert!(text.contains("\"iot0\" cannot keep what nic \"plc\" is promised (tx)"), "{text}");
        assert!(
            text.contains("µs is the shortest") && hint.contains("within_us = "),
            "{text} {hint}"
        );
        text
    };
    let text = refused(set(Transmit, Some(promise(1))));
    assert_eq!(now(), (None, Some(promise(300))));
    // What is said to fit does.
    let least = text.split(" µs is the shortest").next().unwrap().rsplit(' ').next().unwrap();
    set(Transmit, Some(promise(least.parse().unwrap()))).unwrap();
    let add_disk = || {
        let device = json!({
            "name": "disk",
            "vm": "vm",
            "socket": path("disk.sock"),
            "engine": { "type": "ram", "size": 1 << 20 },
        });
        registry.add_device(serde_json::from_value(device).unwrap(), HandedFds::default())
    };
    refused(add_disk());
    set(Transmit, None).unwrap();
    add_disk().unwrap();
    refused(set(Transmit, Some(promise(least.parse().unwrap()))));
    assert_eq!(now(), (None, None));
    set(Transmit, Some(promise(10_000))).unwrap();
    let nobody = DiskName::new("nobody").unwrap();
    let error = registry.set_nic_rate(&nobody, Receive, None).unwrap_err();
    assert_eq!(error.to_string(), "there is no nic \"nobody\"");
}

#[test]
fn nics_and_networks_come_and_go_and_keep_to_the_rules_of_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let text = NETWORK.replace("DIR", directory.path().to_str().unwrap());
    let Some((registry, _)) = served(&text) else { return };
    let socket = |name: &str| directory.path().join(format!("{name}.sock"));
    let add = |name: &str, more: serde_json::Value| {
        let mut nic = json!({ "name": name, "vm": name, "socket": socket(name) });
        nic.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        registry.add_nic(serde_json::from_value(nic).unwrap(), HandedFds::default())
    };
    let lan = json!({ "network": "lan" });
    add("c", lan.clone()).unwrap();
    let observed = registry.observe();
    let names: Vec<_> = observed.nics.iter().map(|nic| nic.state.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let added = registry.configuration();
    assert_eq!((added.nics.len(), added.nics[2].name.as_str()), (3, "c"));
    let mac = rtvirtio_spec::serve::mac_text(added.nics[2].mac);

    // What a file may not say, a request may not, and nothing is left of it.
    let of_a = json!({ "network": "lan", "socket": socket("a") });
    for (name, more, words) in [
        ("c", lan.clone(), "there is a device \"c\" already"),
        ("root", lan.clone(), "there is a device \"root\" already"),
        ("d", of_a, "is that of device"),
        ("d", json!({ "network": "lan", "socket": socket("root") }), "is that of device \"root\""),
        ("d", json!({ "network": "lan", "mac": mac }), "\"c\""),
        ("d", json!({ "network": "wan" }), "there is no network \"wan\""),
        ("d", json!({ "network": "lan", "trust": "other" }), "trust"),
        ("d", json!({ "tap": "tap0" }), "0 of its queues were handed over"),
        ("d", json!({ "stream": directory.path().join("nobody") }), "cannot connect d"),
        ("d", json!({ "stream": socket("a") }), "is the socket of device \"a\" of this data plane"),
        ("d", json!({ "stream": socket("root") }), "is the socket of device \"root\""),
        ("d", json!({ "stream": socket("d") }), "is the socket of nic \"d\""),
        ("d", json!({ "network": "lan", "mapping": [{ "iothread": "iot9" }] }), "iot9"),
    ] {
        let error = add(name, more.clone()).unwrap_err();
        let text = match &error {
            PlaneError::Io { what, source } => format!("{what}: {source}"),
            error => error.to_string(),
        };
        assert!(text.contains(words), "{name} {more}: {text}");
        assert_eq!(registry.configuration(), added, "{name} {more}");
        assert!(!socket("d").exists(), "{name} {more}");
    }

    // A network goes when its last device has gone, and comes back under its name.
    let name = |text: &str| Name::new(text).unwrap();
    let device = |text: &str| DiskName::new(text).unwrap();
    let lan_of = |max_broadcast| rtvirtio_spec::serve::Network { name: name("lan"), max_broadcast };
    let exists = registry.add_network(lan_of(1)).unwrap_err();
    assert_eq!(exists.to_string(), "there is a network \"lan\" already");
    for left in ["a", "b", "c"] {
        let used = registry.remove_network(&name("lan")).unwrap_err();
        assert!(used.to_string().starts_with("network \"lan\" has "), "{used}");
        registry.remove_nic(&device(left)).unwrap();
        let gone = registry.remove_nic(&device(left)).unwrap_err();
        assert!(matches!(gone, PlaneError::NoNic(_)), "{gone}");
        assert!(!socket(left).exists());
    }
    assert!(registry.observe().nics.is_empty());
    registry.remove_network(&name("lan")).unwrap();
    let gone = registry.remove_network(&name("lan")).unwrap_err();
    assert_eq!(gone.to_string(), "there is no network \"lan\"");
    assert!(add("c", lan.clone()).unwrap_err().to_string().contains("there is no network \"lan\""));
    registry.add_network(lan_of(7)).unwrap();
    // Their IOThreads' last queues are gone too.
    registry.remove_iothread(&IoThreadName::new("iot1").unwrap()).unwrap();
    for _ in 0..20 {
        add("c", lan.clone()).unwrap();
        registry.remove_nic(&device("c")).unwrap();
    }
    add("c", lan).unwrap();
    assert_eq!(registry.configuration().networks, [lan_of(7)]);
}
