//! Queues of a network device on a stream socket, whose other end is the test's.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;

use rtvirtio_frames::features;
use rtvirtio_vhost::Backend as _;

use super::frames::{HEADER, Port, frame, is_due, move_about, nic_on};
use super::*;
use crate::nic::{Link, Nic};
use crate::socket::Socket;

const PLAIN: [u8; HEADER] = [0; HEADER];

/// A device, and the other end of its socket.
fn rig() -> (Arc<Nic>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_read_timeout(Some(LOST)).unwrap();
    let socket = Arc::new(Socket::new(ours.into()));
    (nic_on(Link::Socket(socket), features::MRG_RXBUF, [None; 2]), theirs)
}

fn with_length(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes(), frame].concat()
}

fn read_frame(peer: &mut UnixStream) -> Vec<u8> {
    let mut length = [0; 4];
    peer.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(length) as usize];
    peer.read_exact(&mut frame).unwrap();
    frame
}

#[test]
fn device_on_a_socket_offers_nothing_that_the_socket_cannot_carry() {
    let (nic, _peer) = rig();
    assert_eq!(nic.features() & features::OFFLOADS, 0);
    assert_ne!(nic.features() & features::MRG_RXBUF, 0);
    assert_eq!(nic.queues(), 2);
}

/// More than the socket holds: frames wait in the ring, one is cut off, and its rest comes before the next.
#[test]
fn frames_wait_for_a_peer_that_does_not_read() {
    let (nic, mut peer) = rig();
    let Some(pool) = pool() else { return };
    let [first, second] = threads(&pool);
    for packed in [false, true] {
        let mut port = Port::new(packed);
        let setup = port.setup(&nic, 1);
        let stats = Arc::clone(&setup.stats);
        let key = pool.start_nic(setup, first).unwrap();
        let sent: Vec<Vec<u8>> =
            (0..32).map(|number| frame(number, 9_000 + usize::from(number) * 1_009)).collect();
        for (slot, frame) in (0..).zip(&sent) {
            port.send(slot, PLAIN, frame);
        }
        // Until it can take no more, and then by another thread.
        std::thread::sleep(Duration::from_millis(50));
        assert!(stats.snapshot().operations.writes < 32, "the socket took them all");
        pool.move_queue(key, second).unwrap();
        for frame in &sent {
            assert!(read_frame(&mut peer) == *frame, "other bytes");
        }
        for _ in &sent {
            port.take();
        }
        // What is no frame is dropped, and leaves no trace.
        port.send(0, [1, 0, 0, 0, 0, 0, 14, 0, 6, 0, 0, 0], &frame(1, 100));
        port.send(1, PLAIN, &frame(2, 60));
        assert_eq!(read_frame(&mut peer), frame(2, 60));
        port.take();
        port.take();
        assert_eq!(stats.drops().malformed, 1);
        pool.stop(key).unwrap();
    }
}

/// Nothing follows a frame of which the socket takes a part at a time, and it may have to be finished by the next session.
#[test]
fn last_frame_is_finished_though_nothing_follows() {
    let (ours, mut peer) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    peer.set_read_timeout(Some(LOST)).unwrap();
    // The kernel's least (SOCK_MIN_SNDBUF) is less than a frame.
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    let link = Link::Socket(Arc::new(Socket::new(ours.into())));
    let nic = nic_on(link, features::MRG_RXBUF, [None; 2]);
    let Some(pool) = pool() else { return };
    let [thread] = threads(&pool);
    // The last one ends the turn of three, whose time they use up.
    for frames in [1, 2, 3, 4] {
        for round in 0..4_u8 {
            let mut port = Port::new(round % 2 == 0);
            let sent = frame(round, 60_000);
            (0..frames).for_each(|slot| port.send(slot, PLAIN, &sent));
            let key = pool.start_nic(port.setup(&nic, 1), thread).unwrap();
            if round == 3 && frames == 1 {
                // Another session comes before the peer reads.
                port.take();
                pool.stop(key).unwrap();
                let other = Port::new(true);
                let key = pool.start_nic(other.setup(&nic, 1), thread).unwrap();
                assert!(read_frame(&mut peer) == sent, "by the next session");
                pool.stop(key).unwrap();
                continue;
            }
            for number in 0..frames {
                assert!(read_frame(&mut peer) == sent, "{number} of {frames}, round {round}");
            }
            pool.stop(key).unwrap();
        }
    }
}

/// However the peer cuts them, and whether buffers come first.
#[test]
fn frames_of_the_peer_come_whole() {
    let (nic, mut peer) = rig();
    let Some(pool) = pool() else { return };
    let [first, second] = threads(&pool);
    for packed in [false, true] {
        let mut port = Port::new(packed);
        let key = pool.start_nic(port.setup(&nic, 0), first).unwrap();
        for round in 0..60_u8 {
            let sent = frame(round, [14, 60, 1514, 4000][usize::from(round) % 4]);
            let wanted = (sent.len() + HEADER).div_ceil(512) as u64;
            let bytes = with_length(&sent);
            let slots = if round % 2 == 0 { port.offer(0..wanted, 512) } else { HashMap::new() };
            // Nothing is read before there are buffers, and small pieces fill a socket soon.
            let cut = if round % 2 == 0 { [3, 700, bytes.len()] } else { [700; 3] };
            for piece in bytes.chunks(cut[usize::from(round) % 3]) {
                peer.write_all(piece).unwrap();
            }
            let slots = if round % 2 == 0 { slots } else { port.offer(0..wanted, 512) };
            assert_eq!(port.receive(&slots), (sent, wanted as u16), "round {round}");
            if round % 10 == 0 {
                pool.move_queue(key, if round % 20 == 0 { second } else { first }).unwrap();
            }
        }
        // Half of one outlives the queue.
        let sent = frame(9, 1000);
        let bytes = with_length(&sent);
        peer.write_all(&bytes[..500]).unwrap();
        let slots = port.offer(0..2, 512);
        std::thread::sleep(Duration::from_millis(10));
        let base = pool.stop(key).unwrap().base();
        let config = rtvirtio_virtq::ring::RingConfig { base, ..port.driver.config() };
        let ring = Ring::new(config, port.driver.guest().memory(), None).unwrap();
        let setup = crate::queue::NicQueueSetup { ring, ..port.setup(&nic, 0) };
        let key = pool.start_nic(setup, second).unwrap();
        peer.write_all(&bytes[500..]).unwrap();
        assert_eq!(port.receive(&slots), (sent, 2));
        pool.stop(key).unwrap();
    }
}

#[test]
fn peer_that_says_no_frame_or_goes_is_left_alone() {
    for bytes in [&[0_u8, 0, 0, 13][..], &[0xff; 64], &[0, 0, 0, 60, 1, 2]] {
        let (nic, mut peer) = rig();
        let Some(pool) = pool() else { return };
        let [thread] = threads(&pool);
        let (_, tid) = pool.thread(thread).unwrap();
        let mut receiver = Port::new(false);
        let mut sender = Port::new(false);
        let keys = [
            pool.start_nic(receiver.setup(&nic, 0), thread).unwrap(),
            pool.start_nic(sender.setup(&nic, 1), thread).unwrap(),
        ];
        receiver.offer(0..4, 1526);
        peer.write_all(bytes).unwrap();
        drop(peer);
        std::thread::sleep(Duration::from_millis(10));
        sender.send(0, PLAIN, &frame(1, 60));
        sender.take();
        assert_rests(tid, "without a peer");
        for key in keys {
            assert_eq!(pool.stop(key).unwrap().broken(), None);
        }
    }
}

#[test]
fn frames_keep_their_order_while_queues_of_a_socket_move() {
    let (nic, mut peer) = rig();
    let mut writes = peer.try_clone().unwrap();
    keep_order(&nic, &mut || read_frame(&mut peer), &mut |frame| {
        writes.write_all(&with_length(frame)).unwrap()
    });
}

/// Numbered frames both ways while both queues go from thread to thread: each comes once, in order, as it was sent. The peer reads
/// and writes.
pub(super) fn keep_order(
    nic: &Arc<Nic>,
    read: &mut (dyn FnMut() -> Vec<u8> + Send),
    write: &mut (dyn FnMut(&[u8]) + Send),
) {
    for packed in [false, true] {
        let Some(pool) = pool() else { return };
        let threads = threads(&pool);
        let (mut out, mut back) = (Port::new(packed), Port::new(packed));
        let keys = [(&out, 1), (&back, 0)]
            .map(|(port, index)| pool.start_nic(port.setup(nic, index), threads[0]).unwrap());
        let numbered = |number: u32| {
            let mut sent = frame(number as u8, 60 + number as usize % 1400);
            sent[14..18].copy_from_slice(&number.to_be_bytes());
            sent
        };
        let count = 4_000;
        let (moved, done) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let moves = scope.spawn(|| move_about(&pool, keys, threads, &moved, &done));
            // Also if this fails.
            let ends = Stop(&done);
            let reads = scope.spawn(|| {
                (0..count).for_each(|number| assert!(read() == numbered(number)));
            });
            // The socket holds what there is no buffer for.
            let writes = scope.spawn(|| (0..count).for_each(|number| write(&numbered(number))));
            let mut slots = back.offer(0..16, 1526);
            let (mut sent, mut ended, mut received) = (0, 0, 0);
            let mut last = Instant::now();
            while received < count || ended < count {
                if is_due(sent, &moved) && sent - ended < 8 {
                    out.send(u64::from(sent % 8), PLAIN, &numbered(sent));
                    sent += 1;
                }
                while out.driver.take().is_some() {
                    (ended, last) = (ended + 1, Instant::now());
                }
                if let Some((id, length)) = back.driver.take() {
                    let slot = slots.remove(&id).unwrap();
                    let guest = Arc::clone(back.driver.guest());
                    let frame = guest.read(Port::place(slot), length as usize).split_off(HEADER);
                    assert!(frame == numbered(received), "not frame {received}");
                    (received, last) = (received + 1, Instant::now());
                    slots.extend(back.offer(slot..slot + 1, 1526));
                }
                assert!(last.elapsed() < LOST, "{sent} sent, {ended} ended, {received} received");
            }
            reads.join().unwrap();
            writes.join().unwrap();
            drop(ends);
            moves.join().unwrap();
            assert!(moved.load(Relaxed) > 20);
        });
        keys.into_iter().for_each(|key| drop(pool.stop(key).unwrap()));
    }
}
