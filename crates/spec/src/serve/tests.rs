use rtvirtio_units::{BytesPerSecond, CpuId, Iops, Weight};

use super::*;

mod iothreads;
mod networks;

const EXAMPLE: &str = r#"version = 1

[service]
user = "rtvirtio"

[control]
socket = "/run/rtvirtio/control.sock"
group = 36

[[iothread]]
name = "iot0"
cpus = [1, 0, 1]
poll_max_us = 50

[[iothread]]
name = "iot1"

[[device]]
name = "vm0-root"
vm = "vm0"
socket = "/run/rtvirtio/vm0-root.sock"
queues = 4
serial = "root of vm0"
engine = { type = "file", path = "/img/a", lock = "session" }
mapping = [{ iothread = "iot1", vqs = [0, 1, 2] }, { iothread = "iot0", vqs = [3] }]

[[device]]
name = "vm1-a-name-that-is-rather-long"
vm = "vm1"
socket_activation = "vm1"
queues = 3
read_only = true
write_cache = false
fixed_buffers = "off"
engine = { type = "ssd", size = "64M", ssd = "ref-4x250*2", cpu_kib_ns = 5, fault = { error_every = 100 } }

[[device]]
name = "vm1-scratch"
vm = "vm1"
socket = "/run/rtvirtio/vm1-scratch.sock"
engine = { type = "ram", size = 1048576, cpu_us = 100, cpu_kib_ns = 40 }
qos = { schedule = "data", weight = 200, deadline_us = 10000, iops = 1500, burst = 4, max_bandwidth = "30M" }

[[schedule]]
name = "data"
channels = 4
request_ns = 212500
kib_ns = 9375
"#;

fn name(text: &str) -> IoThreadName {
    IoThreadName::new(text).unwrap()
}

fn owners(device: &Device) -> Vec<&str> {
    device.mapping.by_queue().iter().map(IoThreadName::as_str).collect()
}

#[test]
fn slots_are_read_and_written_back() {
    let with =
        EXAMPLE.replace("queues = 4", "queues = 4\nslots = \"/run/rtvirtio/vm0-root.slots\"");
    let found = parse("serve.toml", &with).unwrap();
    let slots = found.devices.iter().map(|device| device.slots.clone());
    let expected = [Some("/run/rtvirtio/vm0-root.slots".into()), None, None];
    assert_eq!(slots.collect::<Vec<_>>(), expected);
    let wire = wire::Device::from(&found.devices[0]);
    assert_eq!(wire.slots, expected[0]);
}

#[test]
fn example_is_read_as_written() {
    let found = parse("serve.toml", EXAMPLE).unwrap();
    let service = Service { user: Some("rtvirtio".into()), group: None, sandbox: true };
    assert_eq!(found.service, service);
    let control = Control { socket: "/run/rtvirtio/control.sock".into(), group: Some(36) };
    assert_eq!(found.control, Some(control));
    assert_eq!(
        found.iothreads,
        [
            IoThread {
                name: name("iot0"),
                cpus: [0, 1].map(CpuId::new).into(),
                polling: Polling {
                    completion: Completion::Adaptive,
                    core: CorePolicy::Shared,
                    max: Nanos::from_micros(50),
                    grow: 2,
                    shrink: 2,
                },
                trust: None,
            },
            IoThread {
                name: name("iot1"),
                cpus: Vec::new(),
                polling: Polling {
                    completion: Completion::Adaptive,
                    core: CorePolicy::Shared,
                    max: Nanos::new(65_536),
                    grow: 2,
                    shrink: 2,
                },
                trust: None,
            },
        ]
    );
    let [root, ssd, ram] = found.devices.as_slice() else { panic!("three devices") };
    assert_eq!((root.name.as_str(), root.vm.as_str(), root.queues()), ("vm0-root", "vm0", 4));
    assert_eq!(root.listen, Listen::Path("/run/rtvirtio/vm0-root.sock".into()));
    assert_eq!(
        (root.read_only, root.write_cache, root.serial.as_str()),
        (false, true, "root of vm0")
    );
    // The guest may have a balloon.
    assert_eq!(root.fixed_buffers, FixedBuffers::Off);
    assert_eq!(
        root.engine,
        Engine::File(FileEngine {
            path: "/img/a".into(),
            direct: true,
            aio: Aio::Auto,
            lock: ImageLock::Session,
            raw: false,
            block_size: None,
            slice: None,
        })
    );
    assert_eq!(owners(root), ["iot1", "iot1", "iot1", "iot0"]);
    let written_out = EXAMPLE.replace("lock = \"session\"", "format = \"raw\"");
    let Engine::File(file) = &parse("serve.toml", &written_out).unwrap().devices[0].engine else {
        panic!("a file")
    };
    assert!(file.raw);

    assert_eq!(ssd.listen, Listen::Activated(Name::new("vm1").unwrap()));
    assert_eq!(
        (ssd.read_only, ssd.write_cache, ssd.serial.as_str()),
        (true, false, "vm1-a-name-that-is-r")
    );
    assert_eq!(ssd.fixed_buffers, FixedBuffers::Off);
    assert_eq!(
        ssd.engine,
        Engine::Ssd(SsdEngine {
            size: Bytes::new(67_108_864),
            model: "ref-4x250*2".to_owned(),
            seed: 1,
            faults: Faults { error_every: 100, ..Faults::default() },
            cpu: CpuCost { request: Nanos::ZERO, kib: Nanos::new(5) },
        })
    );
    assert_eq!(owners(ssd), ["iot0", "iot1", "iot0"]);

    assert_eq!(ram.queues(), 1);
    let cpu = CpuCost { request: Nanos::from_micros(100), kib: Nanos::new(40) };
    let engine = Engine::Ram { size: Bytes::new(1_048_576), cpu };
    assert_eq!(ram.engine, engine);

    let promise = Promise {
        deadline: Nanos::from_millis(10),
        rate: Rate { iops: Iops::new(1_500.0).ok(), bandwidth: None, burst: 4 },
    };
    let bandwidth = Some(BytesPerSecond::new(30 << 20));
    let qos = Qos {
        schedule: Name::new("data").unwrap(),
        weight: Weight::new(200).unwrap(),
        promise: Some(promise),
        limit: Some(Rate { iops: None, bandwidth, burst: 1 }),
        tasks: Vec::new(),
    };
    assert_eq!((&root.qos, &ram.qos), (&None, &Some(qos)));
    let schedule = Schedule {
        name: Name::new("data").unwrap(),
        channels: 4,
        request: Nanos::new(212_500),
        kib: Nanos::new(9_375),
        flush: Nanos::new(212_500),
    };
    assert_eq!(found.schedules, [schedule]);
}

#[test]
fn configuration_is_written_and_read_back() {
    let nic = "
[[nic]]
name = 'vm0-net'
vm = 'vm0'
socket = '/run/rtvirtio/vm0-net.sock'
tap = 'vm0'
queues = 2
tx = { max_frames = 5000, max_mbit = 100 }

[iocores]
policy = 'dynamic'
cpus = [3, 2]

[[iothread]]
name = 'poller'
completion = 'poll'
";
    for text in [EXAMPLE.to_owned(), EXAMPLE.to_owned() + nic] {
        let read = parse("serve.toml", &text).unwrap();
        let written = to_toml(&wire::Configuration::from(&read)).unwrap();
        assert_eq!(parse("written.toml", &written).unwrap(), read, "{written}");
    }
}

#[test]
fn device_is_written_and_read_back() {
    let found = parse("serve.toml", EXAMPLE).unwrap();
    let iothreads = found.iothreads.clone();
    let schedules: Vec<Name> = found.schedules.into_iter().map(|s| s.name).collect();
    for device in found.devices {
        let text = serde_json::to_string(&wire::Device::from(&device)).unwrap();
        let read: wire::Device = serde_json::from_str(&text).unwrap();
        assert_eq!(Device::new(read, &iothreads, &schedules).unwrap(), device, "{text}");
    }
}

#[test]
fn namespace_is_read_written_and_read_back_and_has_no_key_of_a_file() {
    let engine = |table: &str| {
        let (from, to) = ("{ type = \"file\", path = \"/img/a\", lock = \"session\" }", table);
        assert_eq!(EXAMPLE.matches(from).count(), 1);
        parse("serve.toml", &EXAMPLE.replace(from, to)).map(|found| found.devices[0].clone())
    };
    let plain = engine("{ type = \"nvme\", path = \"/dev/ng0n1\" }").unwrap();
    let expected =
        NvmeEngine { path: "/dev/ng0n1".into(), poll: false, lock: ImageLock::Always, slice: None };
    assert_eq!(plain.engine, Engine::Nvme(expected.clone()));
    let part = "{ type = \"nvme\", path = \"/dev/ng0n1\", poll = true, lock = \"off\", offset = 4096, size = \"1M\" }";
    let part = engine(part).unwrap();
    let slice = Some(Slice { offset: Bytes::new(4096), size: Bytes::new(1 << 20) });
    let expected = NvmeEngine { poll: true, lock: ImageLock::Off, slice, ..expected };
    assert_eq!(part.engine, Engine::Nvme(expected));
    let iothreads = parse("serve.toml", EXAMPLE).unwrap().iothreads;
    for device in [plain, part] {
        let text = serde_json::to_string(&wire::Device::from(&device)).unwrap();
        let read: wire::Device = serde_json::from_str(&text).unwrap();
        assert_eq!(Device::new(read, &iothreads, &[]).unwrap(), device, "{text}");
    }
    for (keys, words) in [
        ("", "an engine of type \"nvme\" needs the key `path`"),
        ("path = \"ng0n1\"", "\"ng0n1\" is no absolute path"),
        ("path = \"/dev/ng0n1\", direct = true", "an engine of type \"nvme\" has no key `direct`"),
        ("path = \"/dev/ng0n1\", aio = \"auto\"", "has no key `aio`"),
        ("path = \"/dev/ng0n1\", format = \"raw\"", "has no key `format`"),
        ("path = \"/dev/ng0n1\", cpu_us = 1", "has no key `cpu_us`"),
        ("path = \"/dev/ng0n1\", size = 512", "needs the key `offset`"),
    ] {
        let comma = if keys.is_empty() { "" } else { "," };
        let error = engine(&format!("{{ type = \"nvme\"{comma} {keys} }}")).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("serve.toml:24:") && text.contains(words), "{keys}: {text}");
        assert!(error.hint().contains("/dev/ng0n1"), "{keys}: {}", error.hint());
    }
}

#[test]
fn sizes_have_a_unit_or_none() {
    let size = |text: &str| text.parse::<wire::Size>().ok().map(|s| s.0.get());
    assert_eq!([size("512"), size("4k"), size("64M")], [Some(512), Some(4096), Some(67_108_864)]);
    assert_eq!([size("1G"), size("2T")], [Some(1 << 30), Some(1 << 41)]);
    for wrong in ["", "M", "-1", "+1", "1.5G", "64MB", "16777216T", "1 M"] {
        assert_eq!(size(wrong), None, "{wrong}");
    }
}

/// Each edit of the example, and the line and the words that the complaint must have.
#[test]
fn each_fault_is_named_with_its_line_and_a_hint() {
    let long = format!("socket = \"/{}\"", "a".repeat(107));
    let faults = [
        ("version = 1", "version = 2", 1, "version is 2"),
        ("version = 1", "version = \"1\"", 1, "invalid type"),
        ("version = 1", "", 1, "missing field `version`"),
        ("group = 36", "grupp = 36", 8, "unknown key \"grupp\""),
        ("\"/run/rtvirtio/control.sock\"", "\"control.sock\"", 7, "is no path of a socket"),
        ("[1, 0, 1]", "[1024]", 12, "iothread \"iot0\": CPU 1024 is beyond 1023"),
        (
            "poll_max_us = 50",
            "poll_max_us = 1000001",
            13,
            "poll_max_us is 1000001, outside 0 to 1000000",
        ),
        ("poll_max_us = 50", "poll_grow = 1", 13, "poll_grow is 1, outside 2 to 1024"),
        (
            "\"iot1\"\n\n",
            "\"iot0\"\n\n",
            16,
            "a second iothread, schedule, device or nic has this name",
        ),
        ("name = \"vm0-root\"", "name = \"a/b\"", 19, "'/' is not allowed in a name"),
        (
            "name = \"vm1-scratch\"",
            "name = \"vm0-root\"",
            38,
            "a second iothread, schedule, device or nic",
        ),
        ("vm = \"vm0\"", "", 18, "missing field `vm`"),
        ("socket = \"/run/rtvirtio/vm0-root.sock\"", &long, 21, "is no path of a socket"),
        ("socket = \"/run/rtvirtio/vm0-root.sock\"", "", 18, "one of socket and socket_activation"),
        ("vm0-root.sock", "vm1-scratch.sock", 40, "is that of device \"vm0-root\" too"),
        ("vm0-root.sock", "control.sock", 21, "is that of the control API too"),
        ("vm0-root.sock", "", 21, "is no path of a socket"),
        ("serial = \"root of vm0\"", "slots = \"a/b\"", 23, "is no path of a socket"),
        (
            "serial = \"root of vm0\"",
            "slots = \"/run/rtvirtio/control.sock\"",
            23,
            "is that of the control API too",
        ),
        (
            "serial = \"root of vm0\"",
            "slots = \"/run/rtvirtio/vm0-root.sock\"",
            23,
            "is that of device \"vm0-root\" too",
        ),
        (
            "serial = \"root of vm0\"\nengine = { type = \"file\",",
            "slots = \"/a\"\nengine = { type = \"file\", offset = 0, size = 512,",
            23,
            "all of a file or block device",
        ),
        ("read_only = true", "slots = \"/a\"", 32, "all of a file or block device"),
        (
            "socket_activation = \"vm1\"",
            "socket_activation = \"vm1\"\nsocket = \"/a\"",
            30,
            "one of socket",
        ),
        ("queues = 4", "queues = 65", 22, "queues is 65, outside 1 to 64"),
        ("queues = 4", "queues = 0", 22, "queues is 0"),
        ("queues = 4", "queues = -1", 22, "invalid value: integer `-1`"),
        ("queues = 4", "queues = 5", 25, "missing vq 4 IOThread assignment"),
        (
            "queues = 4",
            "queues = 3",
            25,
            "vq index 3 for IOThread \"iot0\" must be less than num_queues 3",
        ),
        (
            "iothread = \"iot1\", ",
            "iothread = \"iot9\", ",
            25,
            "IOThread \"iot9\" object does not exist",
        ),
        ("\"root of vm0\"", "\"a serial of 21 bytes!\"", 23, "is not 1 to 20 characters"),
        ("\"root of vm0\"", "\"\\u0007\"", 23, "is not 1 to 20 characters"),
        ("\"/img/a\"", "\"img/a\"", 24, "is no absolute path"),
        ("path = \"/img/a\", ", "", 24, "needs the key `path`"),
        ("lock = \"session\"", "size = 512", 24, "needs the key `offset`"),
        ("lock = \"session\"", "offset = 512", 24, "needs the key `size`"),
        ("lock = \"session\"", "offset = 1, size = 512", 24, "offset 1 is no multiple of 512"),
        ("lock = \"session\"", "seed = 1", 24, "has no key `seed`"),
        ("lock = \"session\"", "poll = true", 24, "has no key `poll`"),
        ("lock = \"session\"", "format = \"qcow2\"", 24, "unknown variant `qcow2`"),
        ("ssd = \"ref-4x250*2\", ", "", 35, "needs the key `ssd`"),
        ("ref-4x250*2", "../x", 35, "is no name of a model"),
        ("error_every", "eror_every", 35, "unknown key \"eror_every\""),
        ("\"64M\"", "\"64MB\"", 35, "a size such as"),
        ("1048576", "1000", 41, "size 1000 is no multiple of 512"),
        ("1048576", "0", 41, "size is 0, outside 512 to 1099511627776"),
        ("cpu_us = 100", "cpu_us = 1000001", 41, "cpu_us is 1000001"),
        ("cpu_kib_ns = 40", "cpu_kib_ns = 1000001", 41, "cpu_kib_ns is 1000001"),
        ("lock = \"session\"", "cpu_kib_ns = 1", 24, "has no key `cpu_kib_ns`"),
        ("schedule = \"data\"", "schedule = \"dat\"", 42, "there is no schedule \"dat\""),
        ("deadline_us = 10000, ", "", 42, "a promise has deadline_us and one of iops"),
        ("iops = 1500, burst = 4, ", "", 42, "a promise has deadline_us and one of iops"),
        ("iops = 1500, ", "", 42, "burst is the burst of a rate"),
        ("deadline_us = 10000", "deadline_us = 0", 42, "deadline_us is 0, outside 1 to 60000000"),
        ("weight = 200", "weight = 1001", 42, "weight is 1001, outside 1 to 1000"),
        ("max_bandwidth = \"30M\"", "max_iops = 0", 42, "max_iops is 0"),
        ("iops = 1500", "iops = 100000001", 42, "iops is 100000001, outside 1 to 100000000"),
        ("iops = 1500", "iops = 0", 42, "iops is 0, outside 1 to 100000000"),
        ("max_bandwidth = \"30M\"", "max_iops = 1000000000", 42, "max_iops is 1000000000"),
        ("max_bandwidth = \"30M\"", "max_bandwidth = \"9000000T\"", 42, "max_bandwidth is 9"),
        ("channels = 4", "channels = 0", 46, "schedule \"data\": channels is 0"),
        ("channels = 4\n", "", 44, "missing field `channels`"),
        ("kib_ns = 9375", "kib_ns = 10000000001", 48, "kib_ns is 10000000001"),
    ];
    for (from, to, line, words) in faults {
        assert_eq!(EXAMPLE.matches(from).count().min(1), 1, "{from} is in the example");
        let error = parse("serve.toml", &EXAMPLE.replacen(from, to, 1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words), "{to}: {text}");
        assert!(text.starts_with(&format!("serve.toml:{line}:")), "{to}: {text}, not line {line}");
        assert!(!error.hint().is_empty());
    }
}

#[test]
fn qos_as_large_as_it_may_be_is_written_and_read_back_and_larger_is_refused() {
    let qos = |iops: u64, max_iops: u64, bandwidth: u64, task: u64| {
        let raw = serde_json::json!({
            "schedule": "d", "deadline_us": 1, "iops": iops, "bandwidth": bandwidth,
            "max_iops": max_iops, "max_bandwidth": bandwidth,
            "tasks": [{ "ioprio": "rt/0", "deadline_us": 1, "iops": task }],
        });
        Qos::new(serde_json::from_value(raw).unwrap())
    };
    let (iops, bytes) = (100_000_000, i64::MAX as u64);
    let largest = qos(iops - 1, iops, bytes, 1).unwrap();
    let rate = &largest.promise.as_ref().unwrap().rate;
    assert_eq!(rate.iops.unwrap().get(), 1e8 - 1.0);
    assert_eq!(largest.limit.as_ref().unwrap().iops.unwrap().get(), 1e8);
    assert_eq!(largest.tasks[0].promise.rate.iops.unwrap().get(), 1.0);
    let text = toml::to_string(&wire::Qos::from(&largest)).unwrap();
    assert_eq!(Qos::new(toml::from_str(&text).unwrap()).unwrap(), largest);
    for (refused, key) in [
        (qos(iops + 1, iops, bytes, iops), "iops"),
        (qos(iops, iops + 1, bytes, iops), "max_iops"),
        (qos(iops, iops, bytes + 1, iops), "bandwidth"),
        (qos(iops, iops, bytes, iops + 1), "iops"),
    ] {
        match refused {
            Err(Fault::OutOfRange { key: found, .. }) => assert_eq!(found, key),
            other => panic!("{key}: {other:?}"),
        }
    }
}

#[test]
fn promise_beyond_its_own_limit_is_refused() {
    let qos = |more: serde_json::Value| {
        let mut raw = serde_json::json!({ "schedule": "d", "deadline_us": 1000, "iops": 300 });
        raw.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Qos::new(serde_json::from_value(raw).unwrap())
    };
    let task = serde_json::json!([{ "ioprio": "rt/0", "deadline_us": 1000, "iops": 300 }]);
    for fits in [
        serde_json::json!({ "max_iops": 300 }),
        serde_json::json!({ "max_iops": 600, "tasks": task }),
        serde_json::json!({ "max_bandwidth": 4096, "tasks": task }),
    ] {
        assert!(qos(fits.clone()).is_ok(), "{fits}");
    }
    for (more, words) in [
        (serde_json::json!({ "max_iops": 299 }), "300, is more than max_iops lets through, 299"),
        (serde_json::json!({ "max_iops": 599, "tasks": task }), "600, is more than max_iops"),
        (
            serde_json::json!({ "bandwidth": 8192, "max_bandwidth": 4096 }),
            "8192, is more than max_bandwidth",
        ),
    ] {
        let fault = qos(more.clone()).unwrap_err();
        assert!(fault.to_string().contains(words), "{more}: {fault}");
    }
}

#[test]
fn tasks_are_read_back_and_refused_when_two_are_one_or_there_are_too_many() {
    let qos = |tasks: serde_json::Value| {
        let raw = serde_json::json!({ "schedule": "data", "tasks": tasks });
        serde_json::from_value::<wire::Qos>(raw).map(Qos::new)
    };
    let task =
        |ioprio: String| serde_json::json!({ "ioprio": ioprio, "deadline_us": 5, "iops": 7 });
    let all = |n: u32| (0..n).map(|i| task(format!("{}/{}", ["rt", "be"][i as usize / 8], i % 8)));
    let eight = qos(all(8).collect()).unwrap().unwrap();
    assert_eq!(eight.tasks[1].ioprio.to_string(), "rt/1");
    assert_eq!(Qos::new(wire::Qos::from(&eight)), Ok(eight));
    assert_eq!(qos(all(9).collect()).unwrap(), Err(Fault::TooManyTasks(9)));
    let twice = all(1).chain(all(1)).collect();
    assert_eq!(qos(twice).unwrap(), Err(Fault::DuplicateTask("rt/0".parse().unwrap())));
    let half = serde_json::json!([{ "ioprio": "idle", "iops": 5 }]);
    assert_eq!(qos(half).unwrap(), Err(Fault::HalfPromise));
    let none = serde_json::json!([{ "ioprio": "idle" }]);
    assert_eq!(qos(none).unwrap(), Err(Fault::HalfPromise));
    let error = qos([task("rt/8".to_owned())].into_iter().collect()).unwrap_err().to_string();
    assert!(error.contains("not an I/O priority"), "{error}");
}

#[test]
fn file_as_a_whole_is_refused_when_it_is_too_much_or_too_little() {
    let fault = |text: &str| *parse("serve.toml", text).unwrap_err().fault;
    assert_eq!(fault("version = 1"), Fault::NoIoThread);
    assert_eq!(fault(&"#".repeat((4 << 20) + 1)), Fault::TooLarge(4_194_305));
    assert_eq!(fault("a.b.c.d.e.f.g.h.i = 1"), Fault::KeyTooDeep);
    let iothreads = |n: usize| {
        let tables = (0..n).map(|i| format!("[[iothread]]\nname = \"t{i}\"\n"));
        format!("version = 1\n{}", tables.collect::<String>())
    };
    assert!(parse("serve.toml", &iothreads(64)).is_ok());
    assert_eq!(fault(&iothreads(65)), Fault::TooManyIoThreads(65));
    let devices = |n: usize| {
        let tables = (0..n).map(|i| {
            format!(
                "[[device]]\nname = \"d{i}\"\nvm = \"v\"\nsocket = \"/s{i}\"\nengine = {{ type = \"ram\", size = 512 }}\n"
            )
        });
        iothreads(1) + &tables.collect::<String>()
    };
    assert_eq!(parse("serve.toml", &devices(1024)).unwrap().devices.len(), 1024);
    assert_eq!(fault(&devices(1025)), Fault::TooManyDevices(1025));
}

#[test]
fn devices_share_iothreads_with_those_of_their_trust_domain_only() {
    let text = r#"version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "b0"
trust = "b"
[[iothread]]
name = "b1"
trust = "b"
[[device]]
name = "ours"
vm = "ours"
socket = "/run/ours.sock"
queues = 2
engine = { type = "ram", size = "1M" }
[[device]]
name = "theirs"
vm = "theirs"
trust = "b"
socket = "/run/theirs.sock"
queues = 3
engine = { type = "ram", size = "1M" }
"#;
    let found = parse("serve.toml", text).unwrap();
    assert_eq!(owners(&found.devices[0]), ["iot0", "iot0"]);
    assert_eq!(owners(&found.devices[1]), ["b0", "b1", "b0"]);
    let refused = |from: &str, to: &str| {
        assert_eq!(text.matches(from).count(), 1, "{from}");
        let error = parse("serve.toml", &text.replace(from, to)).unwrap_err();
        assert!(!error.hint().is_empty());
        error.to_string()
    };
    let mapped = "queues = 3\nmapping = [{ iothread = \"b0\" }, { iothread = \"iot0\" }]";
    assert!(refused("queues = 3", mapped).contains("iothread iot0 is of another trust domain"));
    let mapped = "queues = 2\nmapping = [{ iothread = \"b1\" }]";
    assert!(refused("queues = 2", mapped).contains("iothread b1 is of another trust domain"));
    let nobody = refused("vm = \"theirs\"\ntrust = \"b\"", "vm = \"theirs\"\ntrust = \"c\"");
    assert!(nobody.contains("there is no iothread of trust = \"c\""), "{nobody}");
    let nobody = refused("name = \"iot0\"", "name = \"iot0\"\ntrust = \"a\"");
    assert!(nobody.contains("there is no iothread without trust"), "{nobody}");
    let policy = "version = 1\n[iocores]\npolicy = \"round-robin\"\n";
    let policy = refused("version = 1\n", policy);
    assert!(policy.contains("the policy round-robin moves queues"), "{policy}");
}

#[test]
fn block_size_and_max_memory_are_read_and_bounded() {
    let with = |engine: &str, device: &str| {
        let from = "serial = \"root of vm0\"\nengine = { type = \"file\",";
        assert_eq!(EXAMPLE.matches(from).count(), 1);
        let to = format!("{device}\nengine = {{ type = \"file\", {engine}");
        parse("serve.toml", &EXAMPLE.replace(from, &to)).map(|found| found.devices[0].clone())
    };
    let device = with("block_size = 4096,", "max_memory = \"8G\"").unwrap();
    assert_eq!(device.max_memory, Some(Bytes::new(8 << 30)));
    let Engine::File(file) = &device.engine else { panic!("a file") };
    assert_eq!(file.block_size, Some(4096));
    for wrong in [0, 511, 1000, 8192] {
        let error = with(&format!("block_size = {wrong},"), "").unwrap_err();
        assert!(error.to_string().contains(&format!("block_size is {wrong}")), "{error}");
        assert!(error.hint().contains("4096"));
    }
    assert!(with("", "max_memory = 4096").unwrap_err().to_string().contains("max_memory is 4096"));
    let ram = EXAMPLE.replace("type = \"ram\",", "type = \"ram\", block_size = 512,");
    assert!(parse("serve.toml", &ram).unwrap_err().to_string().contains("has no key `block_size`"));
}
