//! Two guests of QEMU on a network of `rtvirtio serve`: no TAP, no bridge, no root.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;

use crate::in_guest::{Machine, image};
use crate::nic::{Daemon, Store};
use crate::scratch_disk::said;

const TEST: &str = "guests_talk_over_a_network_and_go_on_when_the_daemon_is_killed";
/// Of guests, which are emulated.
const PATIENCE: Duration = Duration::from_secs(120);
const BYTES: usize = 8 << 20;
/// A guest that leaves nothing to the device, and takes nothing that is not complete.
const NO_OFFLOADS: &str = "csum=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,\
    host_tso4=off,host_tso6=off,host_ecn=off,mrg_rxbuf=off";

/// Boots a guest with a device of the daemon at a socket, and an address.
fn boot(test: &str, socket: &Path, mac: &str, device: &str, address: &str) -> Machine {
    let arguments = [
        "-object".to_owned(),
        "memory-backend-memfd,id=memory,size=384M,share=on".to_owned(),
        "-machine".to_owned(),
        "memory-backend=memory".to_owned(),
        "-m".to_owned(),
        "384".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=nic,path={},reconnect-ms=20", socket.display()),
        "-netdev".to_owned(),
        "vhost-user,id=net,chardev=nic".to_owned(),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=net,mac={mac},{device}"),
    ];
    boot_with(test, &arguments, address)
}

fn boot_with(test: &str, arguments: &[String], address: &str) -> Machine {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let machine = Machine::boot(&image(test).unwrap(), &[], &arguments);
    machine.expect(
        0,
        &format!(
            "while read -r m; do insmod /lib/modules/$m; done </lib/modules/network; \
             ip link set eth0 up && ip address add {address}/24 dev eth0"
        ),
    );
    machine
}

/// Each has the other's bytes as they were sent. Whoever reads keeps its own end open: busybox's nc ends with the other
/// side's.
fn send_to_each_other(
    first: &Machine,
    first_address: &str,
    second: &Machine,
    second_address: &str,
) {
    let sum =
        first.expect(0, &format!("head -c {BYTES} /dev/urandom >/tmp/data; md5sum </tmp/data"));
    for (from, to, address) in [(first, second, second_address), (second, first, first_address)] {
        to.expect(
            0,
            "[ -e /tmp/open ] || mkfifo /tmp/open; \
             (nc -l -p 7001 <>/tmp/open >/tmp/got; mv /tmp/got /tmp/data) >/dev/null 2>&1 &",
        );
        let said = from.shell(&format!("sleep 1; nc {address} 7001 </tmp/data"), PATIENCE);
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let found = to.shell(
            "for i in $(seq 100); do [ -e /tmp/got ] || break; sleep 0.2; done; md5sum </tmp/data",
            PATIENCE,
        );
        assert_eq!(found.stdout, sum, "other bytes came");
    }
}

/// QEMU has a device of its own on the other end, and a socket that it listens at.
#[test]
fn guest_talks_over_a_socket_to_a_device_of_qemu() {
    const TEST: &str = "guest_talks_over_a_socket_to_a_device_of_qemu";
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let link = directory.path().join("link");
    let netdev = format!("stream,id=net,server=on,addr.type=unix,addr.path={}", link.display());
    let link = format!("stream = '{}'", link.display());
    let (mut store, nic) = (Store::new(), nic_on(directory.path(), &link));
    talk_to_qemu(TEST, &netdev, "10.79.0", directory.path(), &mut store, &nic);
}

/// The same by datagrams, and a successor of a killed daemon has them too.
#[test]
fn guest_talks_by_datagrams_to_a_device_of_qemu() {
    const TEST: &str = "guest_talks_by_datagrams_to_a_device_of_qemu";
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let [local, remote] = ["local", "remote"].map(|name| directory.path().join(name));
    let netdev = format!(
        "dgram,id=net,local.type=unix,local.path={},remote.type=unix,remote.path={}",
        remote.display(),
        local.display()
    );
    let link =
        format!("dgram = {{ local = '{}', remote = '{}' }}", local.display(), remote.display());
    let (mut store, nic) = (Store::new(), nic_on(directory.path(), &link));
    let talked = talk_to_qemu(TEST, &netdev, "10.81.0", directory.path(), &mut store, &nic);
    let Some((daemon, guest, _peer)) = talked else { return };
    assert_eq!(daemon.nic(0)["link"], remote.to_str().unwrap());
    // A limit comes and goes while the guest runs: four frames, and one a second.
    said(&daemon.ctl(&["nic", "set", "net0", "tx", "--max-frames", "1", "--burst-ms", "0"]));
    let printed = said(&daemon.ctl(&["configuration"]));
    assert!(printed.contains("max_frames = 1\n"), "{printed}");
    let pings = "for i in 1 2 3 4; do ping -c 1 -W 20 10.81.0.2 & done; wait";
    let begun = Instant::now();
    guest.expect(0, pings);
    assert!(begun.elapsed() > Duration::from_millis(2_900), "{:?}", begun.elapsed());
    let refused =
        daemon.ctl(&["nic", "set", "net0", "tx", "--max-frames", "1000", "--within-us", "1"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && why.contains("is the shortest that can be kept there"),
        "{why}"
    );
    assert_eq!(said(&daemon.ctl(&["configuration"])), printed, "nothing has changed");
    said(&daemon.ctl(&["nic", "set", "net0", "tx", "--off"]));
    guest.expect(0, "ping -c 3 -W 5 10.81.0.2");
    // By SIGKILL: the socket is left.
    drop(daemon);
    assert!(local.exists());
    let mut daemon = Daemon::start(directory.path(), &mut store, &nic);
    guest.expect(0, "ping -c 3 -W 5 10.81.0.2");
    daemon.end();
    assert!(!local.exists());
}

/// A device with this link.
fn nic_on(directory: &Path, link: &str) -> String {
    let socket = directory.join("nic");
    format!("[[nic]]\nname = 'net0'\nvm = 'test'\nsocket = '{}'\n{link}\n", socket.display())
}

/// A guest whose device is the daemon's, and a peer whose device QEMU has on such a network back end, have sent each other bytes.
fn talk_to_qemu<'a>(
    test: &str,
    netdev: &str,
    network: &str,
    directory: &'a Path,
    store: &mut Store,
    nic: &str,
) -> Option<(Daemon<'a>, Machine, Machine)> {
    image(test)?;
    if !has_io_uring() {
        return None;
    }
    let [first, second] = [1, 2].map(|host| format!("{network}.{host}"));
    let device = "virtio-net-pci,netdev=net,mac=52:54:00:00:00:02";
    let qemu = ["-netdev", netdev, "-device", device].map(str::to_owned);
    let peer = boot_with(test, &qemu, &second);
    let daemon = Daemon::start(directory, store, nic);
    let guest = boot(test, &directory.join("nic"), "52:54:00:00:00:01", "packed=on", &first);
    guest.expect(0, &format!("ping -c 3 -W 5 {second}"));
    send_to_each_other(&guest, &first, &peer, &second);
    let seen = daemon.nic(0);
    assert_eq!(seen["queues"][0]["dropped"], 0, "{seen}");
    assert_eq!(seen["queues"][1]["dropped"], 0, "{seen}");
    Some((daemon, guest, peer))
}

/// passt gives a guest the host's network without any right; here, as it maps its gateway's address, a listener of the
/// host's own.
#[test]
fn guest_reaches_the_host_by_passt() {
    const TEST: &str = "guest_reaches_the_host_by_passt";
    if image(TEST).is_none() || !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    // Of root it becomes the user nobody.
    std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
    let link = directory.path().join("passt");
    let mut passt = Command::new("setpriv");
    passt.args([
        "--pdeathsig",
        "KILL",
        "passt",
        "--foreground",
        "--one-off",
        "--quiet",
        "--socket",
    ]);
    passt.arg(&link).args(["--address", "10.80.0.2", "--netmask", "24", "--gateway", "10.80.0.1"]);
    passt.args(["--tcp-ports", "none", "--udp-ports", "none"]);
    let found = Command::new("passt").arg("--version").output().is_ok();
    let child = passt.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = match child {
        Ok(child) if found => child,
        _ => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: needs passt");
            return;
        }
    };
    let begun = Instant::now();
    while !link.exists() {
        if begun.elapsed() > Duration::from_secs(10) {
            let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: passt does not start here");
            let _ = child.kill();
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let socket = directory.path().join("nic");
    let nic = format!(
        "[[nic]]\nname = 'net0'\nvm = 'test'\nsocket = '{}'\nstream = '{}'\n",
        socket.display(),
        link.display()
    );
    let mut store = Store::new();
    let daemon = Daemon::start(directory.path(), &mut store, &nic);
    let guest = boot(TEST, &socket, "52:54:00:00:00:01", "packed=off", "10.80.0.2");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let received = std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let mut all = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut all).unwrap();
            all
        });
        let said = guest.shell(
            &format!("head -c 1000000 /dev/zero | tr '\\0' x | nc 10.80.0.1 {port}"),
            PATIENCE,
        );
        if said.code != Some(0) {
            // Nobody else comes.
            drop(TcpStream::connect(("127.0.0.1", port)));
        }
        received.join().unwrap()
    });
    assert_eq!((received.len(), received.iter().all(|byte| *byte == b'x')), (1_000_000, true));
    drop((guest, daemon));
    // It ends with its only client.
    let _ = child.kill();
    child.wait().unwrap();
}

#[test]
fn guests_talk_over_a_network_and_go_on_when_the_daemon_is_killed() {
    if image(TEST).is_none() || !has_io_uring() {
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = |name: &str| directory.path().join(name);
    let nic = |name: &str, mac: &str| {
        let socket = socket(name);
        format!(
            "[[nic]]\nname = '{name}'\nvm = '{name}'\nsocket = '{}'\nnetwork = 'lan'\nmac = '{mac}'\n",
            socket.display()
        )
    };
    let (first_mac, second_mac) = ("52:54:00:00:00:01", "52:54:00:00:00:02");
    // More than it takes: what is promised is counted, and holds nothing back.
    let promise = "{ max_frames = 100000, within_us = 50000 }";
    let network = format!(
        "[[network]]\nname = 'lan'\n{}tx = {promise}\nrx = {promise}\n",
        nic("first", first_mac)
    );
    let nics = format!("{network}{}", nic("second", second_mac));
    let mut store = Store::new();
    // The second one comes while the first one is served.
    let mut daemon = Daemon::start(directory.path(), &mut store, &network);
    let first = boot(TEST, &socket("first"), first_mac, "packed=on", "10.78.0.1");
    let add = |daemon: &Daemon<'_>| {
        let listen = socket("second").display().to_string();
        let add = ["nic", "add", "second", "--vm", "second", "--network", "lan"];
        said(&daemon.ctl(&[&add[..], &["--mac", second_mac, "--listen", &listen]].concat()));
    };
    add(&daemon);
    let second = boot(TEST, &socket("second"), second_mac, NO_OFFLOADS, "10.78.0.2");
    first.expect(0, "ping -c 3 -W 5 10.78.0.2");

    // Both ways: from one that leaves checksums and segments to the device to one that takes neither, and back; while
    // queues go from IOThread to IOThread.
    let is_done = AtomicBool::new(false);
    let dropped = || {
        // A guest that the host does not let run for a while has no buffers meanwhile.
        let mut starved = 0;
        let mut of = |nic: usize, queue: usize| {
            let mut drops = daemon.nic(nic)["queues"][queue]["drops"].clone();
            let without = drops.as_object_mut().unwrap().remove("no_buffers");
            starved += without.unwrap().as_u64().unwrap();
            drops
        };
        (format!("{:?}", [of(0, 0), of(0, 1), of(1, 0), of(1, 1)]), starved)
    };
    let before = dropped();
    said(&daemon.ctl(&["iothread", "create", "iot1"]));
    let moves = std::thread::scope(|scope| {
        let (daemon, is_done) = (&daemon, &is_done);
        let moves = scope.spawn(move || {
            let mut moves = 0;
            while !is_done.load(Relaxed) {
                let (nic, queue) =
                    [("first", "1"), ("second", "0"), ("first", "0"), ("second", "1")][moves % 4];
                let to = ["iot1", "iot0"][moves / 4 % 2];
                let moved = daemon.ctl(&["mapping", "move", nic, queue, to]);
                assert!(moved.status.success(), "{}", said(&moved));
                moves += 1;
            }
            moves
        });
        let send = || send_to_each_other(&first, "10.78.0.1", &second, "10.78.0.2");
        let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(send));
        is_done.store(true, Relaxed);
        sent.unwrap();
        moves.join().unwrap()
    });
    assert!(moves > 20, "{moves}");
    // What each sent before the other was there is lost, and nothing since.
    let after = dropped();
    assert_eq!(after.0, before.0);
    assert!(
        after.1 - before.1 <= BYTES as u64 / 1460 / 100,
        "{} found no buffers",
        after.1 - before.1
    );
    // A policy does so too.
    for queue in ["0", "1"] {
        said(&daemon.ctl(&["mapping", "move", "first", queue, "iot1"]));
        said(&daemon.ctl(&["mapping", "move", "second", queue, "iot1"]));
    }
    said(&daemon.ctl(&["policy", "round-robin"]));
    let begun = Instant::now();
    loop {
        let list = said(&daemon.ctl(&["nic", "list"]));
        if [list.matches("iot0").count(), list.matches("iot1").count()] == [2, 2] {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{list}");
    }
    said(&daemon.ctl(&["policy", "static"]));
    let frames = |nic: usize, queue: usize| daemon.nic(nic)["queues"][queue]["frames"].as_u64();
    // Of 64 KiB as one, and cut for the other.
    assert!(frames(0, 1).unwrap() < BYTES as u64 / 1400, "{}", daemon.nic(0));
    assert!(frames(1, 0).unwrap() > BYTES as u64 / 1460, "{}", daemon.nic(1));
    assert_eq!(daemon.nic(0)["link"], "lan");

    // Under another's address nothing goes.
    let set = |mac: &str| {
        first.expect(0, &format!("ip link set eth0 address {mac} && ip link set eth0 up"));
    };
    set("52:54:00:00:00:99");
    first.expect(1, "ping -c 1 -W 2 10.78.0.2");
    set(first_mac);
    first.expect(0, "ping -c 3 -W 5 10.78.0.2");
    let list = said(&daemon.ctl(&["nic", "list"]));
    assert!(list.contains("spoofed") && list.contains(" over 50000 µs, ≥ "), "{list}");
    for queue in 0..2 {
        let promised = &daemon.nic(0)["queues"][queue]["promised"];
        assert!(promised["kept"].as_u64().unwrap() > 0, "{promised}");
    }
    let metrics = said(&daemon.ctl(&["metrics"]));
    assert!(metrics.contains("reason=\"spoofed\""), "{metrics}");
    for name in ["nic_wait", "nic_service"] {
        let series = format!(
            "rtvirtio_{name}_seconds_count{{vm=\"second\",nic=\"second\",queue=\"0\",direction=\"receive\"}} "
        );
        let count = metrics.lines().find_map(|line| line.strip_prefix(&series));
        assert!(
            count.is_some_and(|count| count.parse::<u64>().unwrap() > 1_000),
            "{series} {metrics}"
        );
    }
    assert!(metrics.contains("rtvirtio_nic_promised_frames_total{"), "{metrics}");
    assert!(metrics.contains("rtvirtio_nic_promised_kept_lower_limit_ratios{"), "{metrics}");

    // A connection outlives the daemon.
    second.expect(0, "nc -l -p 7002 <>/tmp/open >/tmp/lines 2>/dev/null &");
    first.expect(
        0,
        "sleep 1; (for i in $(seq 60); do echo $i; sleep 0.1; done | nc 10.78.0.2 7002) >/dev/null 2>&1 &",
    );
    for _ in 0..2 {
        std::thread::sleep(Duration::from_secs(2));
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
        daemon = Daemon::start(directory.path(), &mut store, &nics);
    }
    let lines = second.shell(
        "for i in $(seq 150); do [ $(tail -n 1 /tmp/lines) = 60 ] && break; sleep 0.2; done; cat /tmp/lines",
        PATIENCE,
    );
    let expected: String = (1..=60).map(|line| format!("{line}\n")).collect();
    assert_eq!(lines.stdout, expected);

    // Its device goes and comes back: the guest waits for it, and nobody else notices.
    let refused = daemon.ctl(&["network", "remove", "lan"]);
    assert!(!refused.status.success());
    assert!(said(&refused).contains("has 2 nics"), "{}", said(&refused));
    said(&daemon.ctl(&["nic", "remove", "second"]));
    first.expect(1, "ping -c 1 -W 2 10.78.0.2");
    add(&daemon);
    first.expect(0, "ping -c 3 -W 30 10.78.0.2");
    let configuration = said(&daemon.ctl(&["configuration"]));
    assert_eq!(configuration.matches("network = \"lan\"").count(), 2, "{configuration}");
}
