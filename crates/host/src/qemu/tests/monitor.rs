//! [`Monitor`] over a socket.

use std::collections::BTreeMap;
use std::sync::mpsc;

use qapi::qmp::{query_name, query_status, stop};
use rtvirtio_units::{BytesPerSecond, Nanos};

use super::*;
use crate::qemu::{Address, Block, Histogram, IoThread, Monitor, PciAddress, Status, Throttle};

const DISK: &str = "/machine/peripheral/d0/virtio-backend";

/// As QEMU 10.0.2 greets.
fn greeting() -> Value {
    json!({"QMP": {
        "version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "Debian"},
        "capabilities": ["oob"],
    }})
}

fn event() -> Value {
    json!({"event": "RTC_CHANGE", "data": {"offset": 1}, "timestamp": {"seconds": 1, "microseconds": 2}})
}

/// Greets and negotiates as QEMU does.
fn negotiate(wire: &mut Wire) {
    wire.say_json(&greeting());
    let request = wire.hear().unwrap();
    assert_eq!(request["execute"], "qmp_capabilities");
    wire.say_json(&json!({"return": {}, "id": request["id"]}));
}

/// A monitor whose `answer` gets each request; it adds the id.
fn serve(mut answer: impl FnMut(&str, &Value) -> Value + Send + 'static) -> Place {
    peer(move |wire| {
        negotiate(wire);
        while let Some(request) = wire.hear() {
            wire.say_json(&event());
            let mut reply = answer(request["execute"].as_str().unwrap(), &request["arguments"]);
            reply["id"] = request["id"].clone();
            wire.say_json(&reply);
        }
    })
}

/// A monitor that negotiates and then plays `play` to the first request, whose id it gets.
fn after_first_request(play: impl FnOnce(&mut Wire, u64) + Send + 'static) -> Monitor {
    let place = peer(move |wire| {
        negotiate(wire);
        let id = wire.hear().unwrap()["id"].as_u64().unwrap();
        play(wire, id);
    });
    Monitor::connect(&place.socket, ENOUGH).unwrap()
}

fn fault(mut monitor: Monitor) -> Fault {
    monitor.execute(&query_status {}, ENOUGH).unwrap_err().fault
}

/// A QEMU with one IOThread, one throttled disk and one histogram.
fn qemu() -> Place {
    let mut properties: BTreeMap<String, Value> = BTreeMap::from([
        ("/objects/io0 poll-max-ns".to_owned(), json!(32768)),
        ("/objects/tg0 limits".to_owned(), json!({"bps-total": 0, "iops-total": 0, "bps-read": 0})),
    ]);
    let mut limits = (json!(0), json!(0));
    let mut boundaries = json!(null);
    serve(move |command, arguments| {
        let property = || {
            let (path, name) = (&arguments["path"], &arguments["property"]);
            format!("{} {}", path.as_str().unwrap(), name.as_str().unwrap())
        };
        match command {
            "query-version" => json!({"return": greeting()["QMP"]["version"]}),
            "query-status" => json!({"return": {"running": true, "status": "running"}}),
            "query-iothreads" => json!({"return": [{
                "id": "io0", "thread-id": 4242, "poll-max-ns": properties["/objects/io0 poll-max-ns"],
                "poll-grow": 0, "poll-shrink": 0, "aio-max-batch": 0,
            }]}),
            "qom-set" if properties.contains_key(&property()) => {
                properties.insert(property(), arguments["value"].clone());
                json!({"return": {}})
            }
            "qom-get" => json!({"return": properties[&property()]}),
            "block_set_io_throttle" if arguments["id"] == DISK => {
                limits = (arguments["bps"].clone(), arguments["iops"].clone());
                json!({"return": {}})
            }
            "query-block" => json!({"return": [
                {"io-status": "ok", "device": "", "locked": false, "removable": false,
                 "inserted": {"iops_rd": 0, "bps": limits.0, "iops": limits.1, "ro": false,
                              "node-name": "root", "drv": "raw", "file": "/dev/vg/plc",
                              "image": {"format": "of the future"}},
                 "qdev": DISK, "type": "unknown"},
                {"device": "ide1-cd0", "locked": false, "removable": true, "tray_open": false,
                 "qdev": "/machine/unattached/device[24]", "type": "unknown"},
            ]}),
            "block-latency-histogram-set" if arguments["id"] == DISK => {
                boundaries = arguments["boundaries"].clone();
                json!({"return": {}})
            }
            "query-blockstats" => {
                assert_eq!(arguments["query-nodes"], false);
                let mut stats = json!({"rd_bytes": 4096, "wr_bytes": 0});
                if boundaries.is_array() {
                    let histogram = json!({"boundaries": boundaries, "bins": [7, 1, 0]});
                    stats["rd_latency_histogram"] = histogram.clone();
                    stats["wr_latency_histogram"] = histogram;
                }
                json!({"return": [{"device": "", "qdev": DISK, "stats": stats}]})
            }
            _ => refusal("DeviceNotFound", "Device not found"),
        }
    })
}

fn connect(place: &Place) -> Monitor {
    Monitor::connect(&place.socket, ENOUGH).unwrap()
}

#[test]
fn good_peer_is_understood() {
    let place = qemu();
    let mut monitor = connect(&place);
    assert_eq!(monitor.version(ENOUGH).unwrap().to_string(), "10.0.2");
    let status = Status { running: true, status: "running".to_owned() };
    assert_eq!(monitor.status(ENOUGH).unwrap(), status);
    let iothread = IoThread {
        id: "io0".to_owned(),
        thread_id: 4242,
        poll_max: Nanos::new(32_768),
        poll_grow: 0,
        poll_shrink: 0,
    };
    assert_eq!(monitor.iothreads(ENOUGH).unwrap(), [iothread]);
    let disk = Block {
        qom_path: Some(DISK.to_owned()),
        device: String::new(),
        node: Some("root".to_owned()),
        driver: Some("raw".to_owned()),
        file: Some("/dev/vg/plc".to_owned()),
        throttle: Throttle::default(),
    };
    let blocks = monitor.blocks(ENOUGH).unwrap();
    assert_eq!(blocks[0], disk);
    assert_eq!((&blocks[1].file, blocks[1].device.as_str()), (&None, "ide1-cd0"));
}

#[test]
fn what_is_set_is_read_back() {
    let place = qemu();
    let mut monitor = connect(&place);
    monitor.set_poll_max("io0", Nanos::ZERO, ENOUGH).unwrap();
    assert_eq!(monitor.iothreads(ENOUGH).unwrap()[0].poll_max, Nanos::ZERO);
    let throttle =
        Throttle { bandwidth: Some(BytesPerSecond::from_megabytes(10)), iops: Some(500) };
    monitor.set_throttle(DISK, throttle, ENOUGH).unwrap();
    assert_eq!(monitor.blocks(ENOUGH).unwrap()[0].throttle, throttle);
    monitor.set_throttle(DISK, Throttle::default(), ENOUGH).unwrap();
    monitor.set_throttle_group("tg0", throttle, ENOUGH).unwrap();
    let error = monitor.set_throttle("d0", throttle, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Refused { ref class, .. } if class == "DeviceNotFound"));
    assert_eq!(error.command, "block_set_io_throttle");
    assert_eq!(error.peer, Address::Socket(place.socket.clone()));
}

#[test]
fn disks_are_told_apart_by_serial_or_pci_address() {
    // As QEMU 10.0.2 says it, with a disk behind a bridge.
    let device = |id: &str, slot: u64| {
        json!({"bus": 0, "slot": slot, "function": 0, "qdev_id": id, "irq": 11,
               "class_info": {"class": 256}, "id": {"device": 4097, "vendor": 6900}, "regions": []})
    };
    let mut bridge = device("", 3);
    let mut behind = device("log", 5);
    behind["bus"] = json!(1);
    bridge["pci_bridge"] = json!({"bus": {"number": 0, "secondary": 1}, "devices": [behind]});
    let mut empty = device("pcie.1", 4);
    empty["pci_bridge"] = json!({"bus": {"number": 0, "secondary": 2}});
    let buses = json!([{"bus": 0, "devices": [device("root", 2), bridge, empty]}]);
    let place = serve(move |command, arguments| match (command, &arguments["path"]) {
        ("query-pci", _) => json!({"return": buses}),
        ("qom-get", path) if path == "/machine/peripheral/root" => json!({"return": "R1"}),
        ("qom-get", path) if path == "/machine/peripheral/log" => json!({"return": ""}),
        _ => refusal("DeviceNotFound", "Device 'x' not found"),
    });
    let mut monitor = connect(&place);
    let found = monitor.pci_devices(ENOUGH).unwrap();
    let at = |bus, slot| PciAddress { domain: 0, bus, slot, function: 0 };
    assert_eq!((found["root"], found["log"], found.len()), (at(0, 2), at(1, 5), 3));
    assert_eq!(monitor.serial("root", ENOUGH).unwrap().as_deref(), Some("R1"));
    assert_eq!(monitor.serial("log", ENOUGH).unwrap(), None);
    let fault = monitor.serial("x", ENOUGH).unwrap_err().fault;
    assert!(matches!(fault, Fault::Refused { .. }), "{fault}");
}

#[test]
fn value_that_is_not_taken_is_an_error() {
    let place = serve(|command, _| match command {
        "qom-get" => json!({"return": 5}),
        _ => json!({"return": {}}),
    });
    let error = connect(&place).set_poll_max("io0", Nanos::ZERO, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::ReadBackDiffers { .. }), "{error}");
    let text = error.to_string();
    assert!(text.ends_with("qom-set: set to Nanos(0), reads Nanos(5)"), "{text}");
}

#[test]
fn latency_histograms_are_set_and_read() {
    let place = qemu();
    let mut monitor = connect(&place);
    let boundaries = [Nanos::from_millis(1), Nanos::from_millis(10)];
    monitor.set_latency_histogram(DISK, &boundaries, ENOUGH).unwrap();
    let found = monitor.latency_histograms(DISK, ENOUGH).unwrap();
    let expected = Histogram { boundaries: boundaries.to_vec(), bins: vec![7, 1, 0] };
    assert_eq!(found.read, Some(expected));
    assert_eq!(found.flush, None);
    monitor.set_latency_histogram(DISK, &[], ENOUGH).unwrap();
    assert_eq!(monitor.latency_histograms(DISK, ENOUGH).unwrap().read, None);
    let other = monitor.latency_histograms("d0", ENOUGH).unwrap_err();
    assert!(matches!(other.fault, Fault::Unexpected { .. }), "{other}");
    // The peer counts three bins whatever it is asked.
    monitor.set_latency_histogram(DISK, &boundaries[..1], ENOUGH).unwrap();
    let odd = monitor.latency_histograms(DISK, ENOUGH).unwrap_err();
    assert!(odd.to_string().contains("is not a histogram"), "{odd}");
}

#[test]
fn unknown_command_is_told_apart() {
    let place = serve(|_, _| refusal("CommandNotFound", "The command stop has not been found"));
    let error = connect(&place).execute(&stop {}, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Disabled { .. }), "{error}");
}

#[test]
fn no_peer_is_a_connect_fault() {
    let error = Monitor::connect("/nonexistent/plc.qmp", ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Connect(_)), "{error}");
    assert_eq!(error.to_string(), r#""/nonexistent/plc.qmp": connect: cannot connect"#);
    let long = format!("/{}", "x".repeat(200));
    let error = Monitor::connect(long, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Connect(_)), "{error}");
}

#[test]
fn peer_without_a_greeting_is_refused() {
    let place = peer(|wire| wire.say("{\"return\": {}}\n"));
    let error = Monitor::connect(&place.socket, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Unexpected { .. }), "{error}");
    let place = peer(|wire| wire.say("QEMU 10.0.2 monitor - type 'help'\n(qemu) "));
    let error = Monitor::connect(&place.socket, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::NotAnAnswer { .. }), "{error}");
}

#[test]
fn peer_that_hangs_keeps_the_deadline() {
    // In the greeting, as a QEMU that serves another client; in the negotiation; later.
    let place = peer(|_| thread::sleep(ENOUGH));
    late(|timeout| Monitor::connect(&place.socket, timeout));
    let place = peer(|wire| {
        wire.say_json(&greeting());
        thread::sleep(ENOUGH);
    });
    late(|timeout| Monitor::connect(&place.socket, timeout));
    let mut monitor = after_first_request(|_, _| thread::sleep(ENOUGH));
    late(|timeout| monitor.status(timeout));
}

#[test]
fn endless_line_is_refused() {
    let monitor = after_first_request(|wire, _| {
        wire.say("{\"return\": \"");
        wire.say_without_end([b'x'; 1 << 16])
    });
    assert!(matches!(fault(monitor), Fault::TooLong { .. }));
}

#[test]
fn answer_with_a_foreign_id_is_refused() {
    for id in [json!(999), json!("2"), json!(null), json!(-1), json!([])] {
        let monitor = after_first_request(move |wire, _| {
            wire.say_json(&json!({"return": {"running": true, "status": "running"}, "id": id}));
            thread::sleep(ENOUGH);
        });
        let fault = fault(monitor);
        assert!(matches!(fault, Fault::Unexpected { .. }), "{fault:?}");
    }
}

#[test]
fn late_answer_is_not_the_next_ones() {
    let (proceed, wait) = mpsc::channel::<()>();
    let place = peer(move |wire| {
        negotiate(wire);
        let first = wire.hear().unwrap();
        wait.recv().unwrap();
        wire.say_json(&json!({"return": {"name": "late"}, "id": first["id"]}));
        let second = wire.hear().unwrap();
        wire.say_json(&json!({"return": {"name": "next"}, "id": second["id"]}));
    });
    let mut monitor = connect(&place);
    late(|timeout| monitor.execute(&query_name {}, timeout));
    proceed.send(()).unwrap();
    let reply = monitor.execute(&query_name {}, ENOUGH).unwrap();
    assert_eq!(reply.name.as_deref(), Some("next"));
}

#[test]
fn invalid_utf8_is_refused() {
    let monitor = after_first_request(|wire, id| {
        let mut line =
            b"{\"return\": {\"running\": true, \"status\": \"\xc3\x28\"}, \"id\": ".to_vec();
        line.extend(format!("{id}}}\n").bytes());
        wire.say(line);
        thread::sleep(ENOUGH);
    });
    assert!(matches!(fault(monitor), Fault::NotAnAnswer { .. }));
}

#[test]
fn deep_nesting_is_refused() {
    for close in ["", "]"] {
        let mut monitor = after_first_request(move |wire, id| {
            let (open, close) = ("[".repeat(1 << 20), close.repeat(1 << 20));
            wire.say(format!("{{\"return\": {open}{close}, \"id\": {id}}}\n"));
            thread::sleep(ENOUGH);
        });
        // Its answer may be any JSON.
        let get = qapi::qmp::qom_get { path: String::new(), property: String::new() };
        let error = monitor.execute(&get, ENOUGH).unwrap_err();
        assert!(matches!(error.fault, Fault::NotAnAnswer { .. }), "{error}");
    }
}

#[test]
fn peer_that_closes_in_mid_answer_is_noticed() {
    let monitor = after_first_request(|wire, _| wire.say("{\"return\": {\"running\""));
    assert!(matches!(fault(monitor), Fault::Closed));
    let mut monitor = after_first_request(|_, _| {});
    assert!(monitor.status(ENOUGH).is_err());
    assert!(matches!(monitor.status(ENOUGH).unwrap_err().fault, Fault::Closed));
}

#[test]
fn ten_thousand_events_are_skipped() {
    let mut monitor = after_first_request(|wire, id| {
        for _ in 0..10_000 {
            wire.say_json(&event());
        }
        wire.say_json(&json!({"return": {"running": false, "status": "paused"}, "id": id}));
    });
    assert_eq!(monitor.status(ENOUGH).unwrap().status, "paused");
}

#[test]
fn endless_events_keep_the_deadline() {
    let mut monitor = after_first_request(|wire, _| wire.say_without_end(format!("{}\n", event())));
    let fault = keeps_deadline(|| monitor.status(SHORT)).unwrap_err().fault;
    // A fast machine skips the most that there may be before the deadline.
    assert!(matches!(fault, Fault::Late { .. } | Fault::Flood { .. }), "{fault:?}");
}

#[test]
fn replayed_bytes_are_read_without_a_socket() {
    let bytes = format!("{}\n{}\n", greeting(), json!({"return": {}, "id": 1}));
    let status = json!({"return": {"running": true, "status": "running"}, "id": 2});
    let mut monitor = Monitor::replay(format!("{bytes}{status}\n").as_bytes()).unwrap();
    assert!(monitor.status(ENOUGH).unwrap().running);
    assert!(Monitor::replay(b"").is_err());
}
