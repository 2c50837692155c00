//! Queues of a network device on a datagram socket, whose peer is the test's.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};

use rtvirtio_frames::features;
use rtvirtio_frames::header::MAX_FRAME_BYTES;

use super::frames::{HEADER, Port, frame, nic_on};
use super::stream::keep_order;
use super::*;
use crate::nic::{Link, Nic};
use crate::socket::Socket;

const PLAIN: [u8; HEADER] = [0; HEADER];

/// A device on a socket, and where its peer is to be.
struct Rig {
    directory: tempfile::TempDir,
    nic: Arc<Nic>,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [local, remote] = ["local", "remote"].map(|name| directory.path().join(name));
        let socket = Socket::bind(&local, &remote, 0o600).unwrap();
        let nic = nic_on(Link::Socket(Arc::new(socket)), features::MRG_RXBUF, [None; 2]);
        Self { directory, nic }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A socket of somebody's, for a device that is or is not its peer.
    fn bind(&self, name: &str) -> UnixDatagram {
        let path = self.at(name);
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(LOST)).unwrap();
        socket.set_write_timeout(Some(LOST)).unwrap();
        socket
    }

    fn send(&self, from: &UnixDatagram, datagram: &[u8]) {
        send_to(from, datagram, &self.at("local"));
    }
}

fn send_to(from: &UnixDatagram, datagram: &[u8], to: &Path) {
    assert_eq!(from.send_to(datagram, to).unwrap(), datagram.len());
}

fn read(peer: &UnixDatagram) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 17];
    let length = peer.recv(&mut buffer).unwrap();
    buffer.truncate(length);
    buffer
}

#[test]
fn datagram_is_a_frame() {
    let rig = Rig::new();
    let peer = rig.bind("remote");
    let Some(pool) = pool() else { return };
    let [first, second] = threads(&pool);
    for packed in [false, true] {
        let (mut sender, mut receiver) = (Port::new(packed), Port::new(packed));
        let keys = [
            pool.start_nic(receiver.setup(&rig.nic, 0), first).unwrap(),
            pool.start_nic(sender.setup(&rig.nic, 1), second).unwrap(),
        ];
        for (round, length) in (0..).zip([14, 60, 1514, 4000, 60_000]) {
            let sent = frame(round, length);
            sender.send(0, PLAIN, &sent);
            assert!(read(&peer) == sent, "{length} bytes");
            sender.take();
            let wanted = (length + HEADER).div_ceil(4096) as u64;
            let slots = receiver.offer(0..wanted, 4096);
            rig.send(&peer, &sent);
            assert!(receiver.receive(&slots) == (sent, wanted as u16), "{length} bytes");
        }
        keys.into_iter().for_each(|key| drop(pool.stop(key).unwrap()));
    }
}

/// What a stranger may send at all is decided by the socket's permissions; what is sent is the peer's alone.
#[test]
fn datagrams_of_strangers_and_such_that_are_no_frames_are_dropped() {
    let rig = Rig::new();
    let (peer, stranger) = (rig.bind("remote"), rig.bind("stranger"));
    let (unnamed, abstract_name) = (UnixDatagram::unbound().unwrap(), rig.at("remote"));
    let abstract_name =
        SocketAddr::from_abstract_name(abstract_name.as_os_str().as_encoded_bytes());
    let abstract_one = UnixDatagram::bind_addr(&abstract_name.unwrap()).unwrap();
    let other = tempfile::tempdir().unwrap();
    // A name of which the peer's is the beginning, and one of as many bytes as there are: no NUL is behind it.
    let longer = rig.bind("remote2");
    let room = 108 - other.path().as_os_str().len() - 1;
    let longest = {
        let address = other.path().join("x".repeat(room));
        let kind = rustix::net::SocketType::DGRAM;
        let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(&address).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        UnixDatagram::from(socket)
    };
    let Some(pool) = pool() else { return };
    let [thread] = threads(&pool);
    let mut port = Port::new(false);
    let setup = port.setup(&rig.nic, 0);
    let stats = Arc::clone(&setup.stats);
    let key = pool.start_nic(setup, thread).unwrap();
    let slots = port.offer(0..1, 4096);
    for from in [&stranger, &unnamed, &abstract_one, &longer, &longest] {
        rig.send(from, &frame(1, 60));
    }
    rig.send(&peer, &[]);
    rig.send(&peer, &[7; 13]);
    rig.send(&peer, &frame(2, MAX_FRAME_BYTES + 1));
    // More than the device's memory for it.
    rustix::net::sockopt::set_socket_send_buffer_size(&peer, 1 << 20).unwrap();
    if peer.send_to(&vec![3; 300_000], rig.at("local")).is_err() {
        rig.send(&peer, &frame(3, MAX_FRAME_BYTES + 1));
    }
    rig.send(&peer, &frame(4, 60));
    assert_eq!(port.receive(&slots), (frame(4, 60), 1));
    let drops = stats.drops();
    assert_eq!((drops.spoofed, drops.malformed, drops.too_long), (5, 2, 2));
    assert_eq!(drops.total(), 9);
    assert_eq!(pool.stop(key).unwrap().broken(), None);
}

/// Nothing wakes the IOThread but the time for which it waits.
#[test]
fn driver_that_adds_no_buffers_does_not_hold_up_frames_that_fit() {
    let rig = Rig::new();
    let peer = rig.bind("remote");
    let Some(pool) = pool() else { return };
    let [thread] = threads(&pool);
    for packed in [false, true] {
        let mut port = Port::new(packed);
        let setup = port.setup(&rig.nic, 0);
        let stats = Arc::clone(&setup.stats);
        let key = pool.start_nic(setup, thread).unwrap();
        let slots = port.offer(0..1, 100);
        rig.send(&peer, &frame(1, 200));
        rig.send(&peer, &frame(2, 60));
        assert_eq!(port.receive(&slots), (frame(2, 60), 1));
        assert_eq!((stats.drops().no_buffers, stats.drops().total()), (1, 1));
        assert_eq!(pool.stop(key).unwrap().broken(), None);
    }
}

/// In every way of being away; the first frame is the peer's, before the device has sent one to it.
#[test]
fn peer_may_come_late_and_again() {
    let rig = Rig::new();
    let Some(pool) = pool() else { return };
    let [thread] = threads(&pool);
    let (_, tid) = pool.thread(thread).unwrap();
    let (mut sender, mut receiver) = (Port::new(false), Port::new(true));
    let setup = sender.setup(&rig.nic, 1);
    let stats = Arc::clone(&setup.stats);
    let keys = [
        pool.start_nic(receiver.setup(&rig.nic, 0), thread).unwrap(),
        pool.start_nic(setup, thread).unwrap(),
    ];
    let mut lost = 0;
    for life in 0..3 {
        // Nothing is there, then a socket that nobody has, then one of another kind.
        let other_kind = (life == 2).then(|| {
            std::fs::remove_file(rig.at("remote")).unwrap();
            std::os::unix::net::UnixListener::bind(rig.at("remote")).unwrap()
        });
        for slot in 0..8 {
            sender.send(slot, PLAIN, &frame(1, 60));
        }
        (0..8).for_each(|_| _ = sender.take());
        lost += 8;
        assert_eq!((stats.drops().link, stats.drops().total()), (lost, lost), "life {life}");
        assert_rests(tid, "without a peer");
        drop(other_kind);
        let peer = rig.bind("remote");
        let slots = receiver.offer(0..1, 4096);
        rig.send(&peer, &frame(2, 60));
        assert_eq!(receiver.receive(&slots), (frame(2, 60), 1), "life {life}");
        sender.send(0, PLAIN, &frame(3, 60));
        assert_eq!(read(&peer), frame(3, 60), "life {life}");
        sender.take();
    }
    keys.into_iter().for_each(|key| assert_eq!(pool.stop(key).unwrap().broken(), None));
}

/// A peer that has room for no more, though the socket could be written to, is asked now and then; others are served meanwhile.
#[test]
fn frames_wait_for_a_peer_that_does_not_read_and_nobody_for_them() {
    let rig = Rig::new();
    let peer = rig.bind("remote");
    let Some(pool) = pool() else { return };
    let [first, second] = threads(&pool);
    let (_, tid) = pool.thread(first).unwrap();
    let other = Rig::new();
    let others_peer = other.bind("remote");
    let mut others = Port::new(false);
    let others_key = pool.start_nic(others.setup(&other.nic, 1), first).unwrap();
    for packed in [false, true] {
        let mut port = Port::new(packed);
        let setup = port.setup(&rig.nic, 1);
        let stats = Arc::clone(&setup.stats);
        let key = pool.start_nic(setup, first).unwrap();
        // More bytes than a socket may have on its way, however many datagrams the kernel lets one have.
        let sent: Vec<Vec<u8>> = (0..32).map(|number| frame(number, 20_000)).collect();
        for (slot, frame) in (0..).zip(&sent) {
            port.send(slot, PLAIN, frame);
        }
        std::thread::sleep(Duration::from_millis(50));
        assert!(stats.snapshot().operations.writes < 32, "the socket took them all");
        assert_rests(tid, "while the peer does not read");
        others.send(0, PLAIN, &frame(1, 60));
        assert_eq!(read(&others_peer), frame(1, 60));
        others.take();
        pool.move_queue(key, if packed { first } else { second }).unwrap();
        for frame in &sent {
            assert!(read(&peer) == *frame, "other bytes");
        }
        sent.iter().for_each(|_| _ = port.take());
        assert_eq!(stats.drops().total(), 0);
        // While one waits for the peer, the queue stops, and what has waited is the next server's.
        for slot in 0..32 {
            port.send(slot, PLAIN, &sent[0]);
        }
        std::thread::sleep(Duration::from_millis(20));
        pool.stop(key).unwrap();
        peer.set_nonblocking(true).unwrap();
        while peer.recv(&mut [0; 1]).is_ok() {}
        peer.set_nonblocking(false).unwrap();
    }
    pool.stop(others_key).unwrap();
}

#[test]
fn frames_keep_their_order_while_queues_of_a_datagram_socket_move() {
    let rig = Rig::new();
    let peer = rig.bind("remote");
    let local = rig.at("local");
    keep_order(&rig.nic, &mut || read(&peer), &mut |frame| send_to(&peer, frame, &local));
}

#[test]
fn socket_is_removed_with_its_device_and_one_that_was_left_is_replaced() {
    let rig = Rig::new();
    let Rig { directory, nic } = rig;
    let [local, remote] = ["local", "remote"].map(|name| directory.path().join(name));
    let bind = || Socket::bind(&local, &remote, 0o620);
    let in_use = bind().unwrap_err();
    assert!(in_use.to_string().ends_with("is in use"), "{in_use}");
    drop(nic);
    assert!(!local.exists());
    // A server that was killed.
    drop(UnixDatagram::bind(&local).unwrap());
    let socket = bind().unwrap();
    drop(socket);
    // Of one that was killed just now the kernel lets go a little later.
    let dying = UnixDatagram::bind(&local).unwrap();
    let socket = std::thread::scope(|scope| {
        let socket = scope.spawn(bind);
        std::thread::sleep(Duration::from_millis(50));
        drop(dying);
        socket.join().unwrap().unwrap()
    });
    let mode = std::fs::metadata(&local).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o620);
    drop(socket);
    assert!(!local.exists());
    std::fs::write(&local, "precious").unwrap();
    assert!(bind().is_err());
    assert_eq!(std::fs::read(&local).unwrap(), b"precious");
}
