//! Network devices, networks, and what is promised of them.

use super::*;

const NICS: &str = r#"version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "iot1"
[[nic]]
name = "net0"
vm = "db"
socket = "/run/rtvirtio/net0"
tap = "tap0"
mac = "52:54:00:12:34:56"
mtu = 9000
queues = 2
tx = { max_frames = 50000, max_mbit = 100, burst_ms = 1 }
[[nic]]
name = "net1"
vm = "db"
socket = "/run/rtvirtio/net1"
tap = "tap1"
"#;

#[test]
fn network_devices_are_read_with_their_faults() {
    let found = parse("serve.toml", NICS).unwrap();
    let [first, second] = &found.nics[..] else { panic!("{found:?}") };
    let tap = NicLink::Tap("tap0".to_owned());
    assert_eq!((&first.link, first.pairs, first.mtu), (&tap, 2, Some(9000)));
    assert_eq!(mac_text(first.mac), "52:54:00:12:34:56");
    // Two virtqueues a pair, over all IOThreads.
    let iothreads: Vec<&str> = first.mapping.by_queue().iter().map(|n| n.as_str()).collect();
    assert_eq!(iothreads, ["iot0", "iot1", "iot0", "iot1"]);
    let tx = NicRate {
        frames: Some(50_000),
        bits: Some(100_000_000),
        burst: Nanos::from_millis(1),
        within: None,
    };
    assert_eq!((first.rx, first.tx), (None, Some(tx)));
    assert_eq!((second.pairs, second.mtu), (1, None));
    // One of its own, that stays.
    assert_eq!((second.mac[..3].to_vec(), second.mac[0] & 1), (vec![0x52, 0x54, 0], 0));
    assert_eq!(parse("serve.toml", NICS).unwrap().nics[1].mac, second.mac);
    assert_ne!(first.mac, second.mac);
    for (from, to, line, words) in [
        ("\"net1\"\nvm", "\"net0\"\nvm", 16, "has this name"),
        ("tap = \"tap1\"", "tap = \"tap0\"", 19, "is that of nic \"net0\" too"),
        ("rtvirtio/net1", "rtvirtio/net0", 18, "is that of nic \"net0\" too"),
        ("\"tap0\"", "\"../tap\"", 10, "is no name of a network device"),
        ("\"tap0\"", "\"a-name-of-16-byt\"", 10, "is no name of a network device"),
        ("12:34:56\"", "12:34\"", 11, "is no address of a device"),
        ("\"52:54", "\"01:54", 11, "is no address of a device"),
        ("\"52:54", "\"5:254", 11, "is no address of a device"),
        ("\"52:54", "\"+2:54", 11, "is no address of a device"),
        ("12:34:56\"", "12:34:+6\"", 11, "is no address of a device"),
        ("mtu = 9000", "mtu = 67", 12, "mtu is 67, outside 68 to 65535"),
        ("queues = 2", "queues = 9", 13, "queues is 9, outside 1 to 8"),
        ("max_frames = 50000, max_mbit = 100, ", "", 14, "tx has neither max_frames nor"),
        ("max_frames = 50000", "max_frames = 0", 14, "max_frames is 0, outside 1"),
        ("burst_ms = 1 ", "burst_ms = 1001 ", 14, "burst_ms is 1001, outside 0 to 1000"),
        ("burst_ms = 1 ", "within_us = 0 ", 14, "within_us is 0, outside 1 to 1000000"),
        ("max_frames = 50000, max_mbit = 100, burst_ms = 1", "within_us = 1", 14, "tx has neither"),
        ("queues = 2", "queue = 2", 13, "unknown key \"queue\""),
        ("socket = \"/run/rtvirtio/net1\"", "socket = \"net1\"", 18, "is no path of a socket"),
    ] {
        let error = parse("serve.toml", &NICS.replacen(from, to, 1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words), "{to}: {text}");
        assert!(text.starts_with(&format!("serve.toml:{line}:")), "{to}: {text}, not line {line}");
        assert!(!error.hint().is_empty());
    }
}

const PROMISES: &str = r#"version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "iot1"
[[network]]
name = "lan"
[[nic]]
name = "plc"
vm = "plc"
socket = "/run/rtvirtio/plc"
network = "lan"
mapping = [{ iothread = "iot0" }]
tx = { max_frames = 20000, burst_ms = 1, within_us = 300 }
rx = { max_frames = 20000, burst_ms = 1, within_us = 300 }
[[nic]]
name = "web"
vm = "web"
socket = "/run/rtvirtio/web"
network = "lan"
mapping = [{ iothread = "iot1" }]
[[device]]
name = "root"
vm = "web"
socket = "/run/rtvirtio/root"
engine = { type = "ram", size = "1M" }
mapping = [{ iothread = "iot1" }]
"#;

#[test]
fn promise_that_its_iothread_cannot_keep_is_refused_with_what_would_fit() {
    let found = parse("serve.toml", PROMISES).unwrap();
    let within = |rate: Option<NicRate>| rate.and_then(|rate| rate.within);
    let all: Vec<_> = found.nics.iter().map(|nic| [within(nic.rx), within(nic.tx)]).collect();
    assert_eq!(all, [[Some(Nanos::from_micros(300)); 2], [None; 2]]);
    let written = to_toml(&wire::Configuration::from(&found)).unwrap();
    assert_eq!(parse("written.toml", &written).unwrap(), found, "{written}");
    let refused = |text: &str| {
        let error = parse("serve.toml", text).unwrap_err();
        (error.to_string(), error.hint())
    };
    // Too short even alone: what is said to fit does.
    let short = PROMISES.replacen("within_us = 300", "within_us = 100", 1);
    let (text, hint) = refused(&short);
    let begin = "serve.toml:14:6: nic \"plc\": iothread \"iot0\" cannot keep what nic \"plc\" is promised (tx): ";
    let least = text.strip_prefix(begin).and_then(|rest| rest.split_once(" µs is the shortest"));
    let (least, _) = least.unwrap_or_else(|| panic!("{text}"));
    assert!(hint.contains(&format!("within_us = {least} ")), "{hint}");
    let longer = short.replacen("within_us = 100", &format!("within_us = {least}"), 1);
    assert!(parse("serve.toml", &longer).is_ok(), "{longer}");
    let least: u64 = least.parse().unwrap();
    let shorter = short.replacen("within_us = 100", &format!("within_us = {}", least - 1), 1);
    refused(&shorter);
    // What fits alone, beside a disk; and beside so many frames at once.
    let beside = longer.replace(
        "engine = { type = \"ram\", size = \"1M\" }\nmapping = [{ iothread = \"iot1\" }]",
        "engine = { type = \"ram\", size = \"1M\" }\nmapping = [{ iothread = \"iot0\" }]",
    );
    assert_ne!(beside, longer);
    let (text, hint) = refused(&beside);
    assert!(
        text.contains("µs is the shortest") && hint.contains("without disks"),
        "{text}: {hint}"
    );
    let (text, _) = refused(&PROMISES.replacen("burst_ms = 1", "burst_ms = 1000", 1));
    assert!(text.contains("µs is the shortest"), "{text}");
    // More than there is of an IOThread.
    let (text, hint) = refused(&PROMISES.replacen("max_frames = 20000", "max_frames = 2000000", 1));
    assert!(text.contains(" % of its time would be promised, and 50 % can be: "), "{text}");
    let most = text.split(": ").last().and_then(|rest| rest.split_once(" frames/s would fit"));
    let (most, _) = most.unwrap_or_else(|| panic!("{text}"));
    // So many fit within the time that is promised, and not one more.
    let most: u64 = most.parse().unwrap();
    let with =
        |frames: u64| PROMISES.replacen("max_frames = 20000", &format!("max_frames = {frames}"), 1);
    assert!(parse("serve.toml", &with(most)).is_ok(), "{most}");
    refused(&with(most + 1));
    assert!(hint.contains(&format!("max_frames = {most}")), "{hint}");
    // The second of two that fit alone, by the key that is too much.
    let second = PROMISES.replacen(
        "network = \"lan\"\nmapping = [{ iothread = \"iot1\" }]",
        "network = \"lan\"\nmapping = [{ iothread = \"iot0\" }]\nrx = { max_frames = 400000, within_us = 9000 }",
        1,
    );
    let (text, _) = refused(&second);
    assert!(text.starts_with("serve.toml:16:"), "{text}");
    assert!(text.contains("nic \"web\": iothread \"iot0\" cannot keep what nic \"plc\""), "{text}");
}

const NETWORKS: &str = r#"version = 1
[[iothread]]
name = "iot0"
[[iothread]]
name = "iot1"
trust = "b"
[[network]]
name = "lan"
max_broadcast = 50
[[network]]
name = "storage"
[[nic]]
name = "net0"
vm = "db"
socket = "/run/rtvirtio/net0"
network = "lan"
vlan = 10
mac = "52:54:00:12:34:56"
[[nic]]
name = "net1"
vm = "web"
socket = "/run/rtvirtio/net1"
network = "lan"
trunk = [20, 10]
anti_spoofing = false
"#;

#[test]
fn networks_are_read_with_their_faults() {
    let found = parse("serve.toml", NETWORKS).unwrap();
    let networks: Vec<_> =
        found.networks.iter().map(|n| (n.name.as_str(), n.max_broadcast)).collect();
    assert_eq!(networks, [("lan", 50), ("storage", 1000)]);
    let links: Vec<String> = found.nics.iter().map(|nic| nic.link.to_string()).collect();
    assert_eq!(links, ["lan vlan 10", "lan trunk 10,20"]);
    let text = NETWORKS.replacen(
        "network = \"lan\"\nvlan = 10",
        "dgram = { local = \"/run/a\", remote = \"/run/b\" }",
        1,
    );
    let on_sockets = parse("serve.toml", &text).unwrap();
    let (local, remote) = ("/run/a".into(), "/run/b".into());
    assert_eq!(on_sockets.nics[0].link, NicLink::Dgram { local, remote });
    assert_eq!(on_sockets.nics[0].link.to_string(), "/run/b");
    let written = to_toml(&wire::Configuration::from(&on_sockets)).unwrap();
    assert_eq!(parse("written.toml", &written).unwrap(), on_sockets, "{written}");
    let protected = |nic: &Nic| matches!(&nic.link, NicLink::Network(port) if port.anti_spoofing);
    assert_eq!(found.nics.iter().map(protected).collect::<Vec<_>>(), [true, false]);
    let written = to_toml(&wire::Configuration::from(&found)).unwrap();
    assert_eq!(parse("written.toml", &written).unwrap(), found, "{written}");
    for (from, to, line, words) in [
        ("\"storage\"", "\"lan\"", 11, "has this name"),
        ("max_broadcast = 50", "max_broadcast = 0", 9, "max_broadcast is 0, outside 1"),
        ("network = \"lan\"\nvlan", "network = \"wan\"\nvlan", 16, "there is no network \"wan\""),
        ("network = \"lan\"\nvlan = 10", "", 12, "one of tap, stream, dgram and network"),
        ("network = \"lan\"\nvlan", "vlan", 16, "of a nic in a network"),
        ("vlan = 10", "tap = \"tap0\"", 16, "one of tap, stream, dgram and network"),
        ("network = \"lan\"\nvlan", "tap = \"tap0\"\nvlan", 17, "of a nic in a network"),
        ("network = \"lan\"\nvlan = 10", "stream = \"passt\"", 16, "is no path of a socket"),
        (
            "network = \"lan\"\nvlan = 10",
            "stream = \"/a\"\nqueues = 2",
            17,
            "queues is 2, outside 1 to 1",
        ),
        (
            "network = \"lan\"\nvlan = 10",
            "dgram = { local = \"/a\", remote = \"b\" }",
            16,
            "\"b\" is no path of a socket",
        ),
        (
            "network = \"lan\"\nvlan = 10",
            "dgram = { local = \"/a\", remote = \"/a\" }",
            16,
            "are the same socket",
        ),
        (
            "network = \"lan\"\nvlan = 10",
            "dgram = { local = \"/run/rtvirtio/net0\", remote = \"/b\" }",
            16,
            "is that of nic \"net0\" too",
        ),
        (
            "network = \"lan\"\nvlan = 10",
            "dgram = { local = \"/a\", remote = \"/b\" }\nqueues = 2",
            17,
            "queues is 2, outside 1 to 1",
        ),
        (
            "network = \"lan\"\nvlan = 10",
            "stream = \"/run//rtvirtio/./net0\"",
            16,
            "is the socket of nic \"net0\" of this data plane",
        ),
        (
            "vlan = 10",
            "dgram = { local = \"/a\", remote = \"/b\" }",
            17,
            "one of tap, stream, dgram and network",
        ),
        ("vlan = 10", "vlan = 4095", 17, "a VLAN is 4095, outside 1 to 4094"),
        ("vlan = 10", "vlan = 10\ntrunk = [20]", 18, "one of vlan and trunk"),
        ("[20, 10]", "[20, 20]", 24, "each once"),
        ("[20, 10]", "[]", 24, "each once"),
        ("[20, 10]", "[0]", 24, "a VLAN is 0"),
        ("trunk = [20, 10]", "mac = \"52:54:00:12:34:56\"", 24, "is that of nic \"net0\" too"),
        ("trunk = [20, 10]", "trust = \"b\"", 23, "of another trust domain"),
    ] {
        let error = parse("serve.toml", &NETWORKS.replacen(from, to, 1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words), "{to}: {text}");
        assert!(text.starts_with(&format!("serve.toml:{line}:")), "{to}: {text}, not line {line}");
        assert!(!error.hint().is_empty());
    }
}
