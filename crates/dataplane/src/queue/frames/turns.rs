//! Single turns: what a driver, another guest or a stranger can have a queue do in one of them is bounded.

use std::os::unix::net::UnixDatagram;

use rtvirtio_frames::ethernet::IPV4;
use rtvirtio_frames::forwarding::{Port, Vlans};
use rtvirtio_frames::header::Header;
use rtvirtio_frames::limit::Rate;
use rtvirtio_units::Bytes;
use rtvirtio_vhost::Backend as _;
use rtvirtio_virtq::ring::driver::{Buffer, Driver, GUEST, Guest, Options};

use super::buffers::{Buffers, Gathered};
use super::*;
use crate::drr::{QUANTUM_NS, cost};
use crate::nic::{NicConfig, Terms};
use crate::socket::Socket;
use crate::switch::Switch;

/// Where a guest's buffers begin, behind the ring.
const BUFFERS: u64 = GUEST + (1 << 19);

fn nic(mac: [u8; 6], link: Link) -> Arc<Nic> {
    let nic = Nic::new(NicConfig {
        name: "nic".to_owned(),
        mac,
        mtu: 1500,
        limits: [None; 2],
        promises: [None; 2],
        link,
        memory: Bytes::new(1 << 30),
        positions: None,
    });
    nic.negotiated(rtvirtio_frames::features::ALWAYS);
    Arc::new(nic)
}

/// A queue and its driver.
struct ByHand {
    driver: Driver,
    memory: Arc<Memory>,
    ring: Ring,
    frames: Frames,
    stats: QueueStats,
}

impl ByHand {
    fn new(nic: &Arc<Nic>, index: u16, size: u16) -> Self {
        let options =
            Options { size, packed: false, event_idx: true, indirect: false, in_order: false };
        let driver = Driver::new(Guest::new(4 << 20), GUEST, options);
        let memory = driver.guest().memory();
        let ring = Ring::new(driver.config(), Arc::clone(&memory), None).unwrap();
        let frames = Frames::new(nic, index, true).unwrap();
        Self { driver, memory, ring, frames, stats: QueueStats::new() }
    }

    /// Makes so many buffers available, all of the same memory.
    fn add(&mut self, count: u16, length: u32, writable: bool) {
        let buffer = Buffer { address: BUFFERS, length, writable };
        (0..count).for_each(|_| _ = self.driver.add(&[buffer], false).unwrap());
        self.driver.publish();
    }

    /// A turn of so many frames and so long, ns.
    fn turn(&mut self, requests: u32, ns: i64) -> Pass {
        self.turn_at(now(), requests, ns)
    }

    /// The same, which begins at this time.
    fn turn_at(&mut self, time: u64, requests: u32, ns: i64) -> Pass {
        let Self { memory, ring, frames, stats, .. } = self;
        let mut share = TurnBudget { requests, ns };
        let served = frames.serve(ring, &mut Chain::default(), memory, &mut share, stats, time);
        let (pass, _) = served.unwrap();
        let _ = ring.publish();
        pass
    }

    fn is_pending(&self) -> bool {
        self.frames.is_pending(|| self.ring.is_pending())
    }
}

/// A directory with a device on a datagram socket, and its peer.
fn on_socket() -> (tempfile::TempDir, Arc<Nic>, UnixDatagram) {
    let directory = tempfile::tempdir().unwrap();
    let [local, remote] = ["local", "remote"].map(|name| directory.path().join(name));
    let socket = Arc::new(Socket::bind(&local, &remote, 0o600).unwrap());
    let peer = UnixDatagram::bind(remote).unwrap();
    peer.connect(local).unwrap();
    peer.set_nonblocking(true).unwrap();
    (directory, nic([2, 0, 0, 0, 0, 1], Link::Socket(socket)), peer)
}

#[test]
fn buffers_without_room_for_a_header_end_a_turn() {
    let (_directory, nic, peer) = on_socket();
    let mut queue = ByHand::new(&nic, 0, 1024);
    queue.add(1023, BYTES as u32 - 1, true);
    queue.add(1, 1526, true);
    peer.send(&[1; 60]).unwrap();
    for turn in 1..=4 {
        queue.turn(64, 250 * cost::NOTE_NS);
        assert_eq!(queue.stats.drops().malformed, 250 * turn);
        assert!(queue.is_pending(), "the rest is looked at in other turns");
    }
    queue.turn(64, QUANTUM_NS);
    assert_eq!(queue.stats.drops().malformed, 1023);
    assert_eq!(queue.stats.snapshot().operations.reads, 1023 + 1);
    assert!(!queue.is_pending());
}

#[test]
fn useless_buffer_is_used_behind_those_before_it() {
    let options =
        Options { size: 4, packed: false, event_idx: true, indirect: false, in_order: false };
    let mut driver = Driver::new(Guest::new(4 << 20), GUEST, options);
    let memory = driver.guest().memory();
    let mut ring = Ring::new(driver.config(), Arc::clone(&memory), None).unwrap();
    let ids = [100, 4, 60].map(|length| {
        let buffer = Buffer { address: BUFFERS, length, writable: true };
        driver.add(&[buffer], false).unwrap()
    });
    driver.publish();
    let (mut buffers, stats, mut is_unpublished) = (Buffers::new(), QueueStats::new(), false);
    let mut gather = |buffers: &mut Buffers, ring: &mut Ring, wanted| {
        let mut share = TurnBudget { requests: 1, ns: QUANTUM_NS };
        buffers.gather(ring, wanted, true, &mut share, &stats, &mut is_unpublished).unwrap()
    };
    assert_eq!(gather(&mut buffers, &mut ring, 150), Gathered::NeverEnough);
    assert_eq!(gather(&mut buffers, &mut ring, 90), Gathered::Enough);
    buffers.deliver(90, Header::COMPLETE, &mut ring, &memory);
    assert_eq!(gather(&mut buffers, &mut ring, 50), Gathered::Enough);
    buffers.deliver(50, Header::COMPLETE, &mut ring, &memory);
    let _ = ring.publish();
    let used = [(); 3].map(|()| driver.take().unwrap());
    assert_eq!(used, [(ids[0], 90), (ids[1], 0), (ids[2], 50)]);
    assert_eq!(stats.drops().malformed, 1);
}

/// The address of a device in [`on_switch`].
const fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 2, number]
}

/// Two devices of a network.
fn on_switch() -> [Arc<Nic>; 2] {
    devices(1e6)
}

/// Devices of a network with this limit on broadcasts.
fn devices<const N: usize>(max_broadcast: f64) -> [Arc<Nic>; N] {
    let switch = Switch::new(max_broadcast);
    std::array::from_fn(|number| {
        let mac = mac(number as u8);
        let port = Port { mac, vlans: Vlans::Untagged, anti_spoofing: true };
        let number = switch.add_port(port, 1).unwrap();
        nic(mac, Link::Port { switch: Arc::clone(&switch), number, pairs: 1 })
    })
}

/// A frame with its virtio header from the first of [`on_switch`] to the second.
fn frame(length: usize) -> Vec<u8> {
    let mut frame = vec![0; BYTES + length];
    frame[BYTES..BYTES + 6].copy_from_slice(&mac(1));
    frame[BYTES + 6..BYTES + 12].copy_from_slice(&mac(0));
    frame[BYTES + 12..BYTES + 14].copy_from_slice(&IPV4.to_be_bytes());
    frame
}

/// The first sends so many of this length.
fn send(transmit: &mut ByHand, count: u16, length: usize) {
    let frame = frame(length);
    transmit.driver.guest().write(BUFFERS, &frame);
    transmit.add(count, frame.len() as u32, false);
    transmit.turn(u32::MAX, 1 << 30);
}

#[test]
fn chain_that_no_frame_fits_before_is_followed_for_a_turn_and_no_longer() {
    let [sender, receiver] = on_switch();
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 1024));
    let piece = |length| Buffer { address: BUFFERS, length, writable: true };
    // A buffer that is too short for the frames, and one that may not be held beside it.
    receive.driver.add(&[piece(20)], false).unwrap();
    receive.driver.add(&[piece(1); MAX_PARTS], false).unwrap();
    receive.driver.publish();
    send(&mut transmit, 200, 60);
    for turn in 1..10 {
        receive.turn(u32::MAX, QUANTUM_NS);
        let dropped = receive.stats.drops().too_long;
        assert!((turn..=2 * turn).contains(&dropped), "{dropped} in {turn} turns");
        assert!(receive.is_pending(), "the rest is looked at in other turns");
    }
    while receive.is_pending() {
        receive.turn(u32::MAX, QUANTUM_NS);
    }
    assert_eq!(receive.stats.drops().too_long, 200);
    transmit.turn(0, 0);
}

#[test]
fn pieces_of_buffers_are_charged_to_whoever_receives() {
    let [sender, receiver] = on_switch();
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 1024));
    send(&mut transmit, 3, 60);
    let piece = Buffer { address: BUFFERS, length: 1, writable: true };
    (0..3).for_each(|_| _ = receive.driver.add(&[piece; 300], false).unwrap());
    receive.driver.publish();
    for turn in 1..=3 {
        // Less than what following one takes.
        receive.turn(u32::MAX, cost::pieces_ns(300) / 2);
        assert_eq!(receive.stats.snapshot().operations.reads, turn);
    }
    transmit.turn(0, 0);
}

/// Buffers that are held here are the driver's all the same: it need not offer others.
#[test]
fn driver_whose_buffers_are_all_held_is_not_taken_for_one_without() {
    let [sender, receiver] = on_switch();
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let (mut transmit, mut receive) = (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 16));
    receive.add(1, 100, true);
    send(&mut transmit, 1, 200);
    receive.turn(u32::MAX, QUANTUM_NS);
    std::thread::sleep(std::time::Duration::from_millis(2));
    receive.turn(u32::MAX, QUANTUM_NS);
    assert_eq!(receive.stats.drops().no_buffers, 1);
    // The next one is short enough.
    send(&mut transmit, 1, 60);
    receive.turn(u32::MAX, QUANTUM_NS);
    assert_eq!((receive.stats.drops().no_buffers, transmit.stats.drops().total()), (1, 0));
    assert_eq!(receive.driver.take().map(|(_, length)| length), Some((BYTES + 60) as u32));
    transmit.turn(0, 0);
}

#[test]
fn frame_in_singles_and_in_chains_arrives_in_order_and_whole() {
    let [sender, receiver] = on_switch();
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 256));
    // So many that they are taken ahead more than once, of lengths about that of a head.
    let lengths: Vec<usize> = (0..100).map(|at| 14 + at * 7 % 130).collect();
    let (mut frames, mut addresses) = (Vec::new(), Vec::new());
    let places = |at: usize| BUFFERS + 256 * at as u64;
    for (at, &length) in lengths.iter().enumerate() {
        let mut frame = frame(length);
        frame[BYTES + 14..].fill(at as u8);
        transmit.driver.guest().write(places(at), &frame);
        let whole = Buffer { address: places(at), length: frame.len() as u32, writable: false };
        let header = Buffer { length: BYTES as u32, ..whole };
        let rest = Buffer {
            address: whole.address + BYTES as u64,
            length: length as u32,
            writable: false,
        };
        let chain = if at % 9 == 5 { vec![header, rest] } else { vec![whole] };
        transmit.driver.add(&chain, false).unwrap();
        frames.push(frame);
        // Before some there are shorter ones: a frame may lie in several.
        let short = if at % 11 == 3 { &[40, 40][..] } else { &[] };
        let mut address = places(at);
        for &length in short.iter().chain(&[176]) {
            let buffer = Buffer { address, length, writable: true };
            addresses.push((receive.driver.add(&[buffer], false).unwrap(), address));
            address += u64::from(length);
        }
    }
    transmit.driver.publish();
    receive.driver.publish();
    while transmit.is_pending() || receive.is_pending() {
        transmit.turn(u32::MAX, QUANTUM_NS);
        receive.turn(u32::MAX, QUANTUM_NS);
    }
    assert_eq!((transmit.stats.drops().total(), receive.stats.drops().total()), (0, 0));
    assert_eq!(receive.stats.snapshot().operations.reads, 100);
    let mut received = Vec::new();
    while let Some((id, written)) = receive.driver.take() {
        let (_, address) = addresses.iter().find(|(buffer, _)| *buffer == id).unwrap();
        received.extend(receive.driver.guest().read(*address, written as usize));
    }
    let mut rest = &received[..];
    for frame in frames {
        let (arrived, others) = rest.split_at(frame.len());
        assert_eq!(arrived[BYTES..], frame[BYTES..]);
        rest = others;
    }
    assert!(rest.is_empty());
    assert_eq!(std::iter::from_fn(|| transmit.driver.take()).count(), 100);
    // What is taken ahead goes back when the queue stops.
    let taken = receive.ring.base();
    receive.frames.give_back(&mut receive.ring);
    assert_eq!(receive.ring.in_flight(), 0);
    assert!(receive.ring.base() <= taken);
}

#[test]
fn queue_that_starts_again_has_no_other_burst_of_broadcasts() {
    // One in ten seconds.
    let [sender, _other] = devices::<2>(0.1);
    let mut frame = frame(60);
    frame[BYTES..BYTES + 6].fill(0xff);
    for dropped in [1, 2] {
        let mut transmit = ByHand::new(&sender, 1, 256);
        transmit.driver.guest().write(BUFFERS, &frame);
        transmit.add(2, frame.len() as u32, false);
        transmit.turn(u32::MAX, 1 << 30);
        assert_eq!(transmit.stats.drops().broadcast, dropped);
    }
}

#[test]
fn frames_before_a_broadcast_that_find_no_room_are_counted_too() {
    let [one, receiver, other] = devices::<3>(1e6);
    let (mut one, mut other) = (ByHand::new(&one, 1, 512), ByHand::new(&other, 1, 512));
    let receive = ByHand::new(&receiver, 0, 256);
    // As many batches as may wait for it, which nobody takes.
    for _ in 0..256 {
        send(&mut one, 1, 60);
    }
    let mut frame = frame(60);
    frame[BYTES + 6..BYTES + 12].copy_from_slice(&mac(2));
    other.driver.guest().write(BUFFERS, &frame);
    other.add(3, frame.len() as u32, false);
    frame[BYTES..BYTES + 6].fill(0xff);
    let broadcast = Buffer { address: BUFFERS + 256, length: frame.len() as u32, writable: false };
    other.driver.guest().write(broadcast.address, &frame);
    other.driver.add(&[broadcast], false).unwrap();
    other.driver.publish();
    other.turn(u32::MAX, 1 << 30);
    assert_eq!(other.stats.drops().no_buffers, 3 + 1);
    assert_eq!(one.stats.drops().total(), 0);
    drop(receive);
    one.turn(0, 0);
}

#[test]
fn segments_that_cannot_be_cut_end_a_turn() {
    let [sender, receiver] = on_switch();
    // The receiver's driver has negotiated no offload.
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 256));
    // TCP, in segments of a byte, which nobody cuts.
    let mut frame = frame(1054);
    (frame[0], frame[1], frame[4], frame[6], frame[8]) = (1, 1, 1, 34, 16);
    (frame[BYTES + 14], frame[BYTES + 23], frame[BYTES + 46]) = (0x45, 6, 0x50);
    transmit.driver.guest().write(BUFFERS, &frame);
    transmit.add(200, frame.len() as u32, false);
    transmit.turn(256, 1 << 30);
    assert_eq!(transmit.stats.drops().total(), 0);
    receive.add(256, 1526, true);
    // Time for ten of them: each is copied before it is found out.
    let each = cost::port_ns(1054) + cost::NOTE_NS;
    let mut before = 0;
    for _ in 0..4 {
        receive.turn(64, 10 * each);
        let dropped = receive.stats.drops().malformed;
        assert!((before + 9..=before + 11).contains(&dropped), "{dropped} after {before}");
        assert!(receive.is_pending(), "the rest is looked at in other turns");
        before = dropped;
    }
    while receive.is_pending() {
        receive.turn(64, QUANTUM_NS);
    }
    assert_eq!(receive.stats.drops().malformed, 200);
    assert!(transmit.frames.reap(&mut transmit.ring, &transmit.stats, now()));
}

/// What is dropped counts as what is delivered.
#[test]
fn datagrams_of_strangers_end_a_turn() {
    let (directory, nic, peer) = on_socket();
    let stranger = UnixDatagram::unbound().unwrap();
    stranger.connect(directory.path().join("local")).unwrap();
    stranger.set_nonblocking(true).unwrap();
    // What the kernel lets wait, at least.
    (0..8).for_each(|_| _ = stranger.send(&[1; 60]).unwrap());
    peer.send(&[2; 60]).unwrap();
    let mut queue = ByHand::new(&nic, 0, 64);
    queue.add(1, 1526, true);
    for turn in 1..=2 {
        assert_eq!(queue.turn(4, QUANTUM_NS), Pass::More);
        assert_eq!(queue.stats.drops().spoofed, 4 * turn);
        assert!(queue.is_pending());
    }
    queue.turn(4, QUANTUM_NS);
    let seen = queue.stats.snapshot();
    assert_eq!((seen.operations.reads, seen.errors), (9, 8));
}

/// As many pieces as a frame to another guest has, they are charged to whoever copies them, if that is not straight to a buffer too.
#[test]
fn pieces_of_a_frame_that_is_completed_are_charged() {
    let [sender, receiver] = on_switch();
    // The receiver's driver has negotiated no offload.
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 1024), ByHand::new(&receiver, 0, 256));
    let mut frame = frame(400);
    (frame[0], frame[6], frame[8]) = (1, 34, 16);
    transmit.driver.guest().write(BUFFERS, &frame);
    let piece = |address, length| Buffer { address, length, writable: false };
    let mut pieces = vec![piece(BUFFERS, frame.len() as u32 - 299)];
    pieces.extend((1..300).rev().map(|left| piece(BUFFERS + frame.len() as u64 - left, 1)));
    (0..3).for_each(|_| _ = transmit.driver.add(&pieces, false).unwrap());
    transmit.driver.publish();
    transmit.turn(u32::MAX, 1 << 30);
    receive.add(16, 1526, true);
    for turn in 0..=3 {
        // Less than what copying one takes, after which nothing is left for its delivery.
        receive.turn(u32::MAX, cost::pieces_ns(290) / 2);
        assert_eq!(receive.stats.snapshot().operations.reads, turn);
    }
    transmit.turn(0, 0);
}

/// What a slow receiver is sent holds its senders up for no longer than what a receiver without buffers is.
#[test]
fn frames_that_a_limit_holds_back_go_back_to_their_sender() {
    let [sender, receiver] = on_switch();
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 256));
    let rate = Rate { frames: Some(10.0), bits: None, burst: 0 };
    receive.frames.set_terms(Terms::new(Some(rate), None));
    receive.add(64, 1526, true);
    send(&mut transmit, 40, 60);
    let begun = now();
    receive.turn(u32::MAX, QUANTUM_NS);
    assert_eq!(receive.stats.snapshot().operations.reads, 1);
    assert!(!receive.is_pending());
    let until = |receive: &ByHand| receive.frames.held_until().unwrap();
    while transmit.frames.in_flight() > 0 {
        assert!(until(&receive) < begun + 20_000_000, "it looks again in time");
        std::thread::sleep(std::time::Duration::from_nanos(until(&receive).saturating_sub(now())));
        receive.frames.release();
        receive.turn(u32::MAX, QUANTUM_NS);
        transmit.turn(0, 0);
    }
    assert_eq!(receive.stats.drops().limit, 38);
    // The first of those that were held back comes when its time has come.
    let mut taken = vec![receive.driver.take().unwrap()];
    while taken.len() < 2 {
        taken.extend(receive.driver.take());
        assert!(now() < begun + 1_000_000_000, "it never comes");
        let left = receive.frames.held_until().map_or(0, |until| until.saturating_sub(now()));
        std::thread::sleep(std::time::Duration::from_nanos(left));
        receive.frames.release();
        receive.turn(u32::MAX, QUANTUM_NS);
    }
    assert!(now() >= begun + 100_000_000);
    assert_eq!([taken[0].1, taken[1].1], [(BYTES + 60) as u32; 2]);
}

#[test]
fn segments_that_are_longer_than_the_receivers_mtu_are_no_frames_of_its() {
    let [sender, receiver] = on_switch();
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let (mut transmit, mut receive) =
        (ByHand::new(&sender, 1, 256), ByHand::new(&receiver, 0, 256));
    receive.add(200, 1530, true);
    for (size, arrives) in [(1464_u16, true), (1465, false), (9000, false)] {
        // TCP, in segments of so many bytes with headers of 54, for an MTU of 1500 and a tag.
        let mut frame = frame(20_000);
        (frame[0], frame[1], frame[6], frame[8]) = (1, 1, 34, 16);
        frame[4..6].copy_from_slice(&size.to_le_bytes());
        (frame[BYTES + 14], frame[BYTES + 23], frame[BYTES + 46]) = (0x45, 6, 0x50);
        transmit.driver.guest().write(BUFFERS, &frame);
        transmit.add(1, frame.len() as u32, false);
        transmit.turn(256, 1 << 30);
        receive.turn(u32::MAX, 1 << 30);
        let arrived = std::iter::from_fn(|| receive.driver.take()).count();
        assert_eq!(arrived, if arrives { 14 } else { 0 }, "{size}");
    }
    assert_eq!(receive.stats.drops().too_long, 2);
    transmit.turn(0, 0);
}

/// A stream has no frames' ends: what a peer sends byte by byte is read as often.
#[test]
fn bytes_of_a_frame_that_is_not_whole_end_a_turn() {
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let nic = nic([2, 0, 0, 0, 0, 1], Link::Socket(Arc::new(Socket::new(ours.into()))));
    let mut queue = ByHand::new(&nic, 0, 64);
    queue.add(8, 4096, true);
    let frame = [&1500_u32.to_be_bytes()[..], &[1; 1500]].concat();
    for byte in &frame[..frame.len() - 1] {
        std::io::Write::write_all(&mut theirs, &[*byte]).unwrap();
        // Time for one look.
        assert_eq!(queue.turn(64, 1), Pass::More);
        assert!(queue.is_pending());
    }
    std::io::Write::write_all(&mut theirs, &frame[frame.len() - 1..]).unwrap();
    queue.turn(64, QUANTUM_NS);
    assert_eq!(queue.stats.snapshot().operations.reads, 1);
}

#[test]
fn frame_of_a_socket_that_the_buffers_are_too_few_for_is_no_work() {
    let (_directory, nic, peer) = on_socket();
    nic.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let mut queue = ByHand::new(&nic, 0, 64);
    queue.add(1, 100, true);
    peer.send(&[1; 200]).unwrap();
    assert_eq!(queue.turn(64, QUANTUM_NS), Pass::Empty);
    assert!(
        !queue.is_pending(),
        "nothing can be done before the driver has made another available"
    );
    assert!(queue.frames.waits_for_driver(queue.ring.is_pending()));
    queue.add(2, 100, true);
    assert!(queue.is_pending());
    queue.turn(64, QUANTUM_NS);
    assert_eq!(queue.stats.snapshot().operations.reads, 1);
}

/// Neither a ring that the driver does not fill nor one that is full of chains is ever full of buffers.
#[test]
fn frame_of_a_socket_that_the_buffers_stay_too_few_for_is_dropped_in_time() {
    for (chains, pieces) in [(1, 1), (2, 2)] {
        let (_directory, nic, peer) = on_socket();
        nic.negotiated(rtvirtio_frames::features::MRG_RXBUF);
        let mut queue = ByHand::new(&nic, 0, 4);
        let piece = Buffer { address: BUFFERS, length: 100, writable: true };
        (0..chains).for_each(|_| _ = queue.driver.add(&vec![piece; pieces], false).unwrap());
        queue.driver.publish();
        for frame in [&[1; 1000][..], &[2; 1000], &[3; 60]] {
            peer.send(frame).unwrap();
        }
        let begun = now();
        queue.turn_at(begun, 64, QUANTUM_NS);
        let until = queue.frames.held_until().unwrap();
        assert!((begun + 1_000_000..begun + 200_000_000).contains(&until), "{until} at {begun}");
        queue.turn_at(until - 1, 64, QUANTUM_NS);
        assert_eq!(queue.stats.drops().total(), 0);
        assert_eq!(queue.frames.held_until(), Some(until));
        assert!(!queue.is_pending(), "until then nothing can be done");
        queue.frames.release();
        assert!(queue.is_pending());
        // The second does not wait for another time.
        queue.turn_at(until, 64, QUANTUM_NS);
        assert_eq!((queue.stats.drops().no_buffers, queue.stats.drops().total()), (2, 2));
        assert_eq!(queue.driver.take().map(|(_, length)| length), Some((BYTES + 60) as u32));
        assert_eq!(queue.frames.held_until(), None);
    }
}

/// Each buffer has to hold a frame then (virtio 1.2, 5.1.6.3.1), and the header says that it lies in one.
#[test]
fn driver_without_mergeable_buffers_has_each_frame_in_one() {
    let (_directory, nic, peer) = on_socket();
    nic.negotiated(rtvirtio_vhost::protocol::features::VERSION_1);
    let mut queue = ByHand::new(&nic, 0, 64);
    queue.add(2, 300, true);
    for length in [200, 400, 60] {
        peer.send(&vec![1; length]).unwrap();
    }
    queue.turn(64, QUANTUM_NS);
    let used = std::iter::from_fn(|| queue.driver.take()).map(|(_, length)| length);
    assert_eq!(used.collect::<Vec<_>>(), [212, 72]);
    let header = queue.driver.guest().read(BUFFERS, BYTES);
    assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!((queue.stats.drops().too_long, queue.stats.drops().total()), (1, 1));
}

#[test]
fn driver_that_adds_buffers_again_is_waited_for_again() {
    let (_directory, nic, peer) = on_socket();
    nic.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let mut queue = ByHand::new(&nic, 0, 64);
    queue.add(1, 100, true);
    peer.send(&[1; 200]).unwrap();
    let begun = now();
    queue.turn_at(begun, 64, QUANTUM_NS);
    let until = queue.frames.held_until().unwrap();
    queue.turn_at(until, 64, QUANTUM_NS);
    assert_eq!(queue.stats.drops().no_buffers, 1);
    peer.send(&[2; 200]).unwrap();
    queue.add(1, 50, true);
    queue.turn_at(until, 64, QUANTUM_NS);
    assert_eq!(queue.frames.held_until(), Some(2 * until - begun));
    queue.add(1, 100, true);
    queue.turn_at(until + 1, 64, QUANTUM_NS);
    assert_eq!((queue.stats.drops().total(), queue.frames.held_until()), (1, None));
    assert_eq!(queue.stats.snapshot().operations.reads, 2);
}

/// Its time passes while the queue is disabled, when nobody looks.
#[test]
fn frame_that_waits_for_buffers_is_looked_at_when_its_queue_is_enabled_again() {
    let (_directory, nic, peer) = on_socket();
    nic.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let [sender, receiver] = on_switch();
    receiver.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let mut transmit = ByHand::new(&sender, 1, 256);
    let mut queues = [ByHand::new(&nic, 0, 64), ByHand::new(&receiver, 0, 64)];
    queues.iter_mut().for_each(|queue| queue.add(1, 100, true));
    let frames = |transmit: &mut ByHand| {
        peer.send(&[1; 200]).unwrap();
        send(transmit, 1, 200);
    };
    let begun = now();
    frames(&mut transmit);
    for queue in &mut queues {
        queue.turn_at(begun, 64, QUANTUM_NS);
        assert!(queue.frames.held_until().is_some() && !queue.is_pending());
        queue.frames.set_open(false);
        queue.frames.set_open(true);
    }
    frames(&mut transmit);
    assert_eq!(queues.each_ref().map(ByHand::is_pending), [true; 2]);
    drop(queues);
    transmit.turn(0, 0);
}

/// A peer may send frames that are longer than all of a ring.
#[test]
fn frame_of_a_socket_that_all_buffers_are_too_few_for_is_dropped() {
    let (_directory, nic, peer) = on_socket();
    nic.negotiated(rtvirtio_frames::features::MRG_RXBUF);
    let mut queue = ByHand::new(&nic, 0, 4);
    queue.add(4, 100, true);
    peer.send(&[1; 1000]).unwrap();
    peer.send(&[2; 60]).unwrap();
    queue.turn(64, QUANTUM_NS);
    assert_eq!(queue.stats.drops().too_long, 1);
    assert_eq!(queue.driver.take().map(|(_, length)| length), Some((BYTES + 60) as u32));
}
