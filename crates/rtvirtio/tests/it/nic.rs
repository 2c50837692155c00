//! A guest of QEMU with a network device of `rtvirtio serve`, on a TAP in a network namespace.

use std::io::{IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtvirtio_engine::testing::has_io_uring;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;

use crate::dataplane::server::rtvirtio;
use crate::in_guest::{Machine, image};
use crate::scratch_disk::{RTVIRTIO, said};

const TEST: &str = "guest_talks_over_a_tap_and_goes_on_when_the_daemon_is_killed";
/// Set within the namespace.
const INSIDE: &str = "RTVIRTIO_TEST_NIC_INSIDE";
const ENOUGH: Duration = Duration::from_secs(60);
/// Of the guest, which is emulated.
const PATIENCE: Duration = Duration::from_secs(120);
const BYTES: usize = 8 << 20;
/// While the daemon is killed, and how often it is.
const CONNECTIONS: usize = 20;
const KILLS: &str = "RTVIRTIO_TEST_NIC_KILLS";
const BETWEEN_KILLS: Duration = Duration::from_secs(2);
/// In the guest: the driver lets go of its device and takes it again.
const REBIND: &str = "device=$(basename $(readlink -f /sys/class/net/eth0/device)); \
    cd /sys/bus/virtio/drivers/virtio_net && echo $device >unbind && echo $device >bind && \
    ip link set eth0 up && ip address add 10.77.0.2/24 dev eth0";
/// Gives the standard input to the daemon as a descriptor that was kept, if one was.
const HAND_OVER: &str = "if [ -n \"$KEPT\" ]; then exec 3<&0 </dev/null; export LISTEN_FDS=1 \
    LISTEN_PID=$$ LISTEN_FDNAMES=\"$KEPT\"; fi; exec \"$@\"";
const ENTER: &str = "mount -t sysfs sys /sys && ip link set lo up && \
    ip tuntap add dev tap0 mode tap vnet_hdr && ip address add 10.77.0.1/24 dev tap0 && \
    ip link set tap0 up && ip tuntap add dev tap8 mode tap vnet_hdr multi_queue && \
    ip link set tap8 up && exec \"$@\"";

/// Keeps a descriptor for the daemon, as systemd does for a service (`FileDescriptorStoreMax=`).
pub(crate) struct Store {
    socket: UnixDatagram,
    directory: tempfile::TempDir,
    kept: Option<(String, OwnedFd)>,
}

impl Store {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(directory.path().join("notify")).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, directory, kept: None }
    }

    /// Does what the daemon has asked for.
    fn look(&mut self) {
        loop {
            let mut text = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut text)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let Ok(received) = recvmsg(&self.socket, &mut parts, &mut ancillary, flags) else {
                return;
            };
            let fds = ancillary.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fd = fds.flatten().next();
            let text = String::from_utf8(text[..received.bytes].to_vec()).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("");
            if text.contains("FDSTOREREMOVE=1") {
                self.kept.take_if(|(kept, _)| kept == name);
            } else if text.contains("FDSTORE=1") {
                self.kept = Some((name.to_owned(), fd.unwrap()));
            }
        }
    }
}

/// `rtvirtio serve`, with its control socket in a directory.
pub(crate) struct Daemon<'a> {
    pub(crate) child: Child,
    directory: &'a Path,
}

impl<'a> Daemon<'a> {
    /// Starts it with one IOThread and these NICs, and with what is kept for it.
    pub(crate) fn start(directory: &'a Path, store: &mut Store, nics: &str) -> Self {
        let text = format!(
            "version = 1\n[control]\nsocket = '{}/control'\n[[iothread]]\nname = 'iot0'\n{nics}",
            directory.display()
        );
        let path = directory.join("serve.toml");
        std::fs::write(&path, text).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "sh", "-c", HAND_OVER, "sh"]).arg(rtvirtio());
        command.arg("serve").arg(path).env("NOTIFY_SOCKET", store.directory.path().join("notify"));
        command.stdin(Stdio::null());
        if let Some((name, fd)) = &store.kept {
            command.stdin(fd.try_clone().unwrap()).env("KEPT", name);
        }
        let child = command.spawn().unwrap();
        drop(command);
        let mut daemon = Self { child, directory };
        let begun = Instant::now();
        while !daemon.ctl(&["nic", "list"]).status.success() {
            assert_eq!(daemon.child.try_wait().unwrap(), None, "it has ended");
            assert!(begun.elapsed() < ENOUGH, "{}", said(&daemon.ctl(&["nic", "list"])));
            std::thread::sleep(Duration::from_millis(20));
            store.look();
        }
        store.look();
        daemon
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> std::process::Output {
        let socket = self.directory.join("control");
        Command::new(RTVIRTIO)
            .args(["ctl", "--socket"])
            .arg(socket)
            .args(arguments)
            .output()
            .unwrap()
    }

    fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// Ends it as its service manager does.
    pub(crate) fn end(&mut self) {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    /// One of its NICs, by the order of their names.
    pub(crate) fn nic(&self, index: usize) -> Value {
        let output = self.ctl(&["nic", "list", "--json"]);
        let all: Value = serde_json::from_slice(&output.stdout).unwrap();
        all[index].clone()
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes that name their place.
fn pattern() -> Vec<u8> {
    (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
fn guest_talks_over_a_tap_and_goes_on_when_the_daemon_is_killed() {
    if std::env::var_os(INSIDE).is_some() {
        return for_each_ring();
    }
    if image(TEST).is_none() || !has_io_uring() {
        return;
    }
    let skip = |why: &str| {
        let _ = writeln!(std::io::stderr(), "SKIPPED {TEST}: {why}");
    };
    if !rustix::process::geteuid().is_root() {
        return skip("needs root");
    }
    if !Path::new("/dev/net/tun").exists() {
        return skip("needs /dev/net/tun");
    }
    if Command::new("ip").arg("-V").output().is_err() {
        return skip("needs ip (package iproute2)");
    }
    let output = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare", "--net", "--mount", "sh", "-c", ENTER, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args([&format!("nic::{TEST}"), "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("1 passed"), "{}", said(&output));
    for line in said(&output).lines().filter(|line| line.starts_with("packed=")) {
        eprintln!("{line}");
    }
}

fn for_each_ring() {
    for packed in [false, true] {
        talk(packed);
    }
}

fn talk(packed: bool) {
    // In memory, as where sockets belong.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut store = Store::new();
    let nic = format!(
        "[[nic]]\nname = 'net0'\nvm = 'test'\nsocket = '{}/net0'\ntap = 'tap0'\n",
        directory.path().display()
    );
    let mut daemon = Daemon::start(directory.path(), &mut store, &nic);
    assert_eq!(store.kept.as_ref().map(|(name, _)| name.as_str()), Some("rtvirtio-tap-tap0-0"));
    let arguments = [
        "-object".to_owned(),
        "memory-backend-memfd,id=memory,size=384M,share=on".to_owned(),
        "-machine".to_owned(),
        "memory-backend=memory".to_owned(),
        "-m".to_owned(),
        "384".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=nic,path={},reconnect-ms=20", directory.path().join("net0").display()),
        "-netdev".to_owned(),
        "vhost-user,id=net,chardev=nic".to_owned(),
        "-device".to_owned(),
        // As docs/data-plane.md has it: a guest that sees its link down forgets its neighbours.
        format!(
            "virtio-net-pci,netdev=net,status=off,packed={}",
            if packed { "on" } else { "off" }
        ),
    ];
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let machine = Machine::boot(&image(TEST).unwrap(), &[], &arguments);
    machine.expect(
        0,
        "while read -r m; do insmod /lib/modules/$m; done </lib/modules/network; \
         ip link set eth0 up && ip address add 10.77.0.2/24 dev eth0",
    );
    machine.expect(0, "ping -c 3 -W 5 10.77.0.1");

    // Both ways, and what arrives is what was sent: segments of many frames, checksums left to each other.
    let sent = pattern();
    let out = TcpListener::bind("10.77.0.1:7001").unwrap();
    let back = TcpListener::bind("10.77.0.1:7002").unwrap();
    std::thread::scope(|scope| {
        let to_guest = scope.spawn(|| out.accept().unwrap().0.write_all(&sent).unwrap());
        let said =
            machine.shell("nc 10.77.0.1 7001 </dev/null >/tmp/data; wc -c </tmp/data", PATIENCE);
        to_guest.join().unwrap();
        assert_eq!(said.stdout.trim(), BYTES.to_string(), "{}", said.stderr);
        let from_guest = scope.spawn(|| {
            let mut all = Vec::new();
            back.accept().unwrap().0.read_to_end(&mut all).unwrap();
            all
        });
        machine.shell("nc 10.77.0.1 7002 </tmp/data", PATIENCE);
        assert!(from_guest.join().unwrap() == sent, "other bytes came back");
    });
    drop((out, back));
    let seen = daemon.nic(0);
    let of = |queue: usize, key: &str| seen["queues"][queue][key].as_u64().unwrap();
    assert_eq!((seen["connected"].as_bool(), seen["mtu"].as_u64()), (Some(true), Some(1500)));
    for queue in [0, 1] {
        assert!(of(queue, "bytes") as usize > BYTES && of(queue, "dropped") == 0, "{seen}");
        // Several frames of 1500 bytes go as one.
        assert!((of(queue, "frames") as usize) < BYTES / 1400 * 2, "{seen}");
    }
    // The driver is called for batches.
    assert!(of(1, "calls") < of(1, "frames"), "{seen}");
    let socket = directory.path().join("control");
    let top = Command::new(RTVIRTIO)
        .args(["top", "-n", "1", "--interval", "1", "--dataplane"])
        .arg(socket)
        .output()
        .unwrap();
    assert!(said(&top).contains("test/net0") && said(&top).contains("tap0"), "{}", said(&top));
    let metrics = said(&daemon.ctl(&["metrics"]));
    assert!(metrics.contains("rtvirtio_nic_frames_total{"), "{metrics}");

    // A connection outlives the daemon. Of a packed ring QEMU does not know where it was; the daemon
    // has kept that.
    let kept = directory.path().join("net0.positions");
    assert!(kept.exists());
    let listener = TcpListener::bind("10.77.0.1:7003").unwrap();
    let said = machine.shell(
        &format!(
            "for i in $(seq {CONNECTIONS}); do nc 10.77.0.1 7003 -e cat </dev/null >/dev/null 2>&1 & done"
        ),
        ENOUGH,
    );
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let mut streams: Vec<TcpStream> = (0..CONNECTIONS)
        .map(|_| {
            let (stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(ENOUGH)).unwrap();
            stream
        })
        .collect();
    let kills = std::env::var(KILLS).map_or(3, |kills| kills.parse().unwrap());
    let done = AtomicBool::new(false);
    let (restarts, pauses): (Vec<Duration>, Vec<Duration>) = std::thread::scope(|scope| {
        let done = &done;
        let talks: Vec<_> =
            streams.iter_mut().map(|stream| scope.spawn(|| talk_on(stream, done))).collect();
        let mut killed = Vec::new();
        for _ in 0..kills {
            std::thread::sleep(BETWEEN_KILLS);
            daemon.child.kill().unwrap();
            daemon.child.wait().unwrap();
            let begun = Instant::now();
            let carrier = std::fs::read_to_string("/sys/class/net/tap0/carrier").unwrap();
            assert_eq!(carrier.trim(), "1", "the link was to stay up");
            daemon = Daemon::start(directory.path(), &mut store, &nic);
            killed.push(begun.elapsed());
        }
        std::thread::sleep(BETWEEN_KILLS);
        done.store(true, Ordering::Relaxed);
        (killed, talks.into_iter().map(|talk| talk.join().unwrap()).collect())
    });
    eprintln!(
        "packed={packed}: {kills} kills, {CONNECTIONS} connections, none lost; the longest pause {:?}, \
         the longest restart {:?}",
        pauses.iter().max().copied().unwrap_or_default(),
        restarts.iter().max().copied().unwrap_or_default()
    );
    let stream = &mut streams[0];
    // Nor does it matter that the daemon ends by itself, as in an update; nor that the guest starts anew.
    daemon.end();
    assert_eq!(kept.exists(), packed, "a split ring has no position to keep");
    // By hand, with nothing kept.
    store.kept = None;
    daemon = Daemon::start(directory.path(), &mut store, &nic);
    echo(stream, 200);
    // A driver that sets the device up anew begins anew, and goes on from there.
    machine.expect(0, REBIND);
    machine.expect(0, "ping -c 3 -W 5 10.77.0.1");
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    daemon = Daemon::start(directory.path(), &mut store, &nic);
    machine.expect(0, "ping -c 3 -W 5 10.77.0.1");
    if !packed {
        // It goes, its TAP is let go of by all, and it comes back on what is handed over.
        crate::scratch_disk::said(&daemon.ctl(&["nic", "remove", "net0"]));
        let mut until = |is_kept: bool| {
            let begun = Instant::now();
            while store.kept.is_some() != is_kept {
                // Who keeps the TAP keeps it busy.
                assert!(begun.elapsed() < ENOUGH, "the TAP is kept: {}", !is_kept);
                std::thread::sleep(Duration::from_millis(5));
                store.look();
            }
        };
        until(false);
        let listen = directory.path().join("net0").display().to_string();
        let add = ["nic", "add", "net0", "--vm", "test", "--tap", "tap0", "--listen", &listen];
        let output = daemon.ctl(&add);
        assert!(output.status.success(), "{}", crate::scratch_disk::said(&output));
        until(true);
        machine.expect(0, "ping -c 3 -W 20 10.77.0.1");
        // A queue for each of as many pairs as there may be.
        let listen = directory.path().join("wide").display().to_string();
        let wide = ["nic", "add", "wide", "--vm", "wide", "--tap", "tap8", "--queues", "8"];
        let output = daemon.ctl(&[&wide[..], &["--listen", &listen]].concat());
        assert!(output.status.success(), "{}", crate::scratch_disk::said(&output));
        assert_eq!(daemon.nic(1)["queues"].as_array().unwrap().len(), 16);
        // The kernel would give some of its frames to whoever joins it.
        let listen = directory.path().join("other").display().to_string();
        let other = ["nic", "add", "other", "--vm", "other", "--tap", "tap8", "--listen", &listen];
        let said = crate::scratch_disk::said(&daemon.ctl(&other));
        assert!(said.contains("attach to tap8: is it in use"), "{said}");
        assert!(daemon.ctl(&["nic", "remove", "wide"]).status.success());
        assert!(!directory.path().join("wide").exists());
        let twice = daemon.ctl(&add);
        assert!(!twice.status.success(), "{}", crate::scratch_disk::said(&twice));
        assert_eq!(daemon.nic(0)["link"], "tap0");
    }
    drop((streams, machine));
    while daemon.nic(0)["connected"] == true {
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.end();
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        1,
        "more than its configuration is left"
    );
}

/// Talks until it is told to end; the longest time that an answer took.
fn talk_on(stream: &mut TcpStream, done: &AtomicBool) -> Duration {
    let mut longest = Duration::ZERO;
    let mut round = 0_u8;
    while !done.load(Ordering::Relaxed) {
        round = round.wrapping_add(1);
        let begun = Instant::now();
        echo(stream, round);
        longest = longest.max(begun.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    longest
}

/// The guest sends back what it is sent.
fn echo(stream: &mut TcpStream, byte: u8) {
    let sent = vec![byte; 10_000];
    stream.write_all(&sent).unwrap();
    let mut found = vec![0; sent.len()];
    stream.read_exact(&mut found).unwrap();
    assert_eq!(found, sent);
}
