//! Queues of network devices on one switch: guests that talk to each other.

use rtvirtio_frames::ethernet::IPV4;
use rtvirtio_frames::features;
use rtvirtio_frames::forwarding::{self, Vlans};
use rtvirtio_frames::limit::Rate;
use rtvirtio_frames::promise::Reservation;
use rtvirtio_vhost::Backend as _;

use super::frames::{HEADER, Port, frame};
use super::*;
use crate::nic::{Link, Nic, NicConfig};
use crate::queue::NicQueueSetup;
use crate::switch::Switch;

pub(super) const ALL: u64 = features::ALWAYS;
/// Frames for more than one, per second.
const MAX_BROADCAST: f64 = 1000.0;
/// Of frames that carry nothing to be looked at.
pub(super) const PLAIN: [u8; HEADER] = [0; HEADER];

/// Of the device at a port.
pub(super) fn mac(port: u16) -> [u8; 6] {
    [2, 0, 0, 0, 0, port as u8 + 1]
}

/// A port without VLANs.
pub(super) fn plain(port: u16) -> forwarding::Port {
    forwarding::Port { mac: mac(port), vlans: Vlans::Untagged, anti_spoofing: true }
}

/// A switch, and a device with these features at each of its ports.
pub(super) struct Net {
    pub(super) nics: Vec<Arc<Nic>>,
    pub(super) pool: Pool,
    pub(super) threads: [ThreadId; 2],
}

/// Limits and promises of a device, of what it receives and transmits.
pub(super) type Terms = ([Option<Rate>; 2], [Option<Reservation>; 2]);

impl Net {
    /// As [`pool`].
    pub(super) fn new(negotiated: &[u64]) -> Option<Self> {
        Self::with(negotiated, &plain)
    }

    fn with(negotiated: &[u64], port: &dyn Fn(u16) -> forwarding::Port) -> Option<Self> {
        Self::with_pairs(1, negotiated, port)
    }

    fn with_pairs(
        pairs: u16,
        negotiated: &[u64],
        port: &dyn Fn(u16) -> forwarding::Port,
    ) -> Option<Self> {
        Self::with_terms(pairs, negotiated, port, &|_| ([None; 2], [None; 2]))
    }

    pub(super) fn with_terms(
        pairs: u16,
        negotiated: &[u64],
        port: &dyn Fn(u16) -> forwarding::Port,
        terms: &dyn Fn(u16) -> Terms,
    ) -> Option<Self> {
        let numbers = 0..negotiated.len() as u16;
        let switch = Switch::new(MAX_BROADCAST);
        for number in numbers.clone() {
            assert_eq!(switch.add_port(port(number), pairs), Ok(number));
        }
        let nics = numbers.zip(negotiated).map(|(number, features)| {
            let link = Link::Port { switch: Arc::clone(&switch), number, pairs };
            let (limits, promises) = terms(number);
            let nic = Nic::new(NicConfig {
                name: format!("nic{number}"),
                mac: mac(number),
                mtu: 1500,
                limits,
                promises,
                link,
                memory: Bytes::new(1 << 30),
                positions: None,
            });
            nic.negotiated(*features);
            Arc::new(nic)
        });
        let pool = pool()?;
        let threads = threads(&pool);
        Some(Self { nics: nics.collect(), pool, threads })
    }

    /// Starts a device's queue at a thread.
    pub(super) fn start(&self, nic: usize, index: u16, packed: bool, thread: usize) -> Running {
        self.start_port(Port::new(packed), nic, index, thread)
    }

    pub(super) fn start_port(&self, port: Port, nic: usize, index: u16, thread: usize) -> Running {
        let setup = port.setup(&self.nics[nic], index);
        let stats = Arc::clone(&setup.stats);
        let key = self.pool.start_nic(setup, self.threads[thread]).unwrap();
        Running { port, key, stats }
    }
}

/// A queue that is served.
pub(super) struct Running {
    pub(super) port: Port,
    pub(super) key: QueueKey,
    pub(super) stats: Arc<QueueStats>,
}

/// A frame from one port's device to another's, that names itself.
pub(super) fn between(from: u16, to: u16, number: u8, length: usize) -> Vec<u8> {
    let mut frame = frame(number, length);
    frame[..6].copy_from_slice(&mac(to));
    frame[6..12].copy_from_slice(&mac(from));
    frame
}

#[test]
fn frames_go_from_guest_to_guest_whoever_serves_them() {
    for (packed, other) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
        let Some(net) = Net::new(&[ALL, ALL]) else { return };
        let mut sender = net.start(0, 1, packed, 0);
        let mut receiver = net.start(1, 0, packed, other);
        for round in 0..200_u8 {
            let length = [60, 64, 65, 1514, 14][usize::from(round) % 5];
            let sent = between(0, 1, round, length);
            let wanted = (length + HEADER).div_ceil(256);
            let slots = receiver.port.offer(0..wanted as u64, 256);
            if round % 10 == 5 {
                // Both sleep by now.
                std::thread::sleep(Duration::from_millis(5));
            }
            sender.port.send(u64::from(round) % 4, PLAIN, &sent);
            let (received, buffers) = receiver.port.receive(&slots);
            assert_eq!(received, sent, "round {round}");
            assert_eq!(usize::from(buffers), wanted);
            assert_eq!(sender.port.take().1, 0);
        }
        let (sent, received) = (sender.stats.snapshot(), receiver.stats.snapshot());
        assert_eq!((sent.operations.writes, sent.errors, sent.in_flight), (200, 0, 0));
        assert_eq!((received.operations.reads, received.read_bytes), (200, sent.written_bytes));
        net.pool.stop(sender.key).unwrap();
        net.pool.stop(receiver.key).unwrap();
    }
}

#[test]
fn frames_that_go_nowhere_are_counted_by_why() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let mut sender = net.start(0, 1, false, 0);
    let mut spoofed = between(0, 1, 1, 100);
    spoofed[11] ^= 0x40;
    let mut to_nobody = between(0, 1, 1, 100);
    to_nobody[5] ^= 0x40;
    let misfit = [1, 1, 0, 0, 0xff, 5, 0xff, 0xff, 16, 0, 0, 0];
    for (slot, (header, frame)) in (0..).zip([
        (PLAIN, vec![1; 10]),
        (misfit, between(0, 1, 1, 100)),
        (PLAIN, spoofed),
        (PLAIN, to_nobody),
        // Its queue is not there.
        (PLAIN, between(0, 1, 1, 100)),
    ]) {
        sender.port.send(slot, header, &frame);
        assert_eq!(sender.port.take().1, 0);
    }
    let drops = sender.stats.drops();
    assert_eq!((drops.malformed, drops.spoofed, drops.no_receiver, drops.no_buffers), (2, 1, 1, 1));
    assert_eq!((drops.total(), sender.stats.snapshot().errors), (5, 5));
    net.pool.stop(sender.key).unwrap();
}

#[test]
fn receiver_without_buffers_costs_its_own_frames_only() {
    let Some(net) = Net::new(&[ALL, ALL, ALL]) else { return };
    let mut sender = net.start(0, 1, false, 0);
    let dead = net.start(1, 0, false, 1);
    let mut alive = net.start(2, 0, true, 1);
    for round in 0..50_u8 {
        let slots = alive.port.offer(0..1, 1526);
        sender.port.send(0, PLAIN, &between(0, 1, round, 1000));
        let sent = between(0, 2, round, 1000);
        sender.port.send(1, PLAIN, &sent);
        assert_eq!(alive.port.receive(&slots).0, sent, "round {round}");
        sender.port.take();
        sender.port.take();
    }
    assert_eq!(alive.stats.drops().total(), 0);
    assert!(sender.stats.drops().no_buffers + dead.stats.drops().no_buffers == 50);
    // With buffers it is there again.
    let mut dead = dead;
    let slots = dead.port.offer(0..4, 1526);
    let begun = Instant::now();
    loop {
        sender.port.send(0, PLAIN, &between(0, 1, 99, 500));
        sender.port.take();
        if dead.stats.snapshot().read_bytes > Bytes::new(0) {
            break;
        }
        assert!(begun.elapsed() < LOST, "it was to get frames again");
    }
    assert_eq!(dead.port.receive(&slots).0, between(0, 1, 99, 500));
    for queue in [sender, dead, alive] {
        net.pool.stop(queue.key).unwrap();
    }
}

/// Whoever stops, breaks or is disabled first: nobody waits for the other, and no chain stays away.
#[test]
fn queues_stop_with_frames_between_them() {
    for first in 0..3 {
        let Some(net) = Net::new(&[ALL, ALL]) else { return };
        let mut sender = net.start(0, 1, true, 0);
        let receiver = net.start(1, 0, false, 1);
        for slot in 0..8 {
            sender.port.send(slot, PLAIN, &between(0, 1, 1, 1000));
        }
        match first {
            0 => drop(net.pool.stop(receiver.key).unwrap()),
            1 => net.pool.edit(receiver.key, |queue| queue.set_enabled(false)).unwrap(),
            _ => drop(net.pool.stop(sender.key).unwrap()),
        }
        // One that has stopped before it took any has none to give back.
        let taken = if first == 2 { sender.stats.snapshot().operations.writes } else { 8 };
        for _ in 0..taken {
            sender.port.take();
        }
        if first < 2 {
            net.pool.stop(sender.key).unwrap();
        }
        if first > 0 {
            net.pool.stop(receiver.key).unwrap();
        }
    }
}

/// The last frames come back one after the other, from receivers that have no buffers.
#[test]
fn sender_that_is_not_served_hears_of_each_frame_that_comes_back() {
    for (breaks, moves) in [(false, false), (false, true), (true, false)] {
        let Some(net) = Net::new(&[ALL, ALL, ALL]).map(Arc::new) else { return };
        let mut sender = net.start(0, 1, true, 0);
        let receivers = [1, 2].map(|port| net.start(port, 0, false, 1));
        // Each waits for a millisecond.
        sender.port.send(0, PLAIN, &between(0, 1, 1, 100));
        std::thread::sleep(Duration::from_micros(600));
        sender.port.send(1, PLAIN, &between(0, 2, 1, 100));
        let edit = move |queue: &mut Queue| match breaks {
            true => _ = queue.broken_cell().set(Broken::NoStatus),
            false => queue.set_enabled(false),
        };
        net.pool.edit(sender.key, edit).unwrap();
        if moves {
            net.pool.move_queue(sender.key, net.threads[1]).unwrap();
        }
        let (told, has_stopped) = std::sync::mpsc::channel();
        let (all, key) = (Arc::clone(&net), sender.key);
        std::thread::spawn(move || told.send(all.pool.stop(key).is_ok()));
        assert_eq!(has_stopped.recv_timeout(LOST), Ok(true), "{breaks} {moves}");
        let _ = receivers.map(|receiver| net.pool.stop(receiver.key).unwrap());
    }
}

/// TCP over IPv4 that is to be cut into `size` bytes of data each, and its header.
fn tcp(data: &[u8], size: u16) -> ([u8; HEADER], Vec<u8>) {
    let mut frame = between(0, 1, 0, 54);
    frame[12..14].copy_from_slice(&IPV4.to_be_bytes());
    frame[14..54].fill(0);
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&(40 + data.len() as u16).to_be_bytes());
    frame[23] = 6;
    frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    frame[46] = 0x50;
    // The pseudo header's sum.
    let sum = 2 * 0x0a00_u32 + 3 + 6 + 20 + data.len() as u32;
    frame[50..52].copy_from_slice(&(sum as u16).to_be_bytes());
    frame.extend(data);
    let mut header = [0; HEADER];
    (header[0], header[6], header[8]) = (1, 34, 16);
    if size > 0 {
        header[1] = 1;
        header[4..6].copy_from_slice(&size.to_le_bytes());
    }
    (header, frame)
}

/// Whether the sum over pseudo header and TCP is what it has to be.
fn has_right_checksum(frame: &[u8]) -> bool {
    let words = |bytes: &[u8]| -> u32 {
        bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | w.get(1).map_or(0, |&b| b.into())).sum()
    };
    let tcp = &frame[34..];
    let mut sum = words(&frame[26..34]) + 6 + tcp.len() as u32 + words(tcp);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum == 0xffff
}

#[test]
fn what_a_receiver_cannot_take_is_completed_and_cut_for_it() {
    let data: Vec<u8> = (0..4000_u32).map(|i| (i * 7) as u8).collect();
    // All, a checksum but no segments, and neither; with and without mergeable buffers.
    let none = ALL & !(features::GUEST_CSUM | features::GUEST_TSO4);
    for receives in [ALL, ALL & !features::GUEST_TSO4, none, none & !features::MRG_RXBUF] {
        let Some(net) = Net::new(&[ALL, receives]) else { return };
        let mut sender = net.start(0, 1, false, 0);
        let mut receiver = net.start(1, 0, true, 1);
        let (header, sent) = tcp(&data, 1448);
        let slots = receiver.port.offer(0..6, 2000);
        sender.port.send(0, header, &sent);
        if receives == ALL {
            assert_eq!(receiver.port.receive(&slots), (sent, 3));
        } else {
            let mut all: Vec<u8> = Vec::new();
            for length in [1448, 1448, 1104] {
                let (segment, buffers) = receiver.port.receive(&slots);
                assert_eq!((segment.len(), buffers), (54 + length, 1));
                assert!(has_right_checksum(&segment), "{receives:x}");
                all.extend(&segment[54..]);
            }
            assert!(all == data, "other data");
        }
        sender.port.take();
        let (header, sent) = tcp(&data[..500], 0);
        let slots = receiver.port.offer(6..12, 2000);
        sender.port.send(1, header, &sent);
        // What was offered before and not used comes first.
        let (id, length) = receiver.port.take();
        let at = slots.get(&id).copied().unwrap_or_else(|| u64::from(id));
        let guest = Arc::clone(receiver.port.driver.guest());
        let at = if receives == ALL { 3 } else { at.min(3) };
        let received = guest.read(Port::place(at), length as usize).split_off(HEADER);
        match receives & features::GUEST_CSUM {
            0 => assert!(has_right_checksum(&received), "{receives:x}"),
            _ => assert_eq!(received, sent),
        }
        for queue in [sender, receiver] {
            net.pool.stop(queue.key).unwrap();
        }
    }
}

#[test]
fn tags_go_in_and_out_between_trunk_and_access() {
    let net = Net::with(&[ALL, ALL], &|port| forwarding::Port {
        mac: mac(port),
        vlans: if port == 0 { Vlans::Trunk(vec![10]) } else { Vlans::Access(10) },
        anti_spoofing: true,
    });
    let Some(net) = net else { return };
    let (mut out, mut back) = (net.start(0, 1, false, 0), net.start(0, 0, false, 0));
    let (mut other_out, mut other_back) = (net.start(1, 1, false, 1), net.start(1, 0, false, 1));
    for length in [60, 62, 64, 66, 300] {
        let plain = between(0, 1, 7, length);
        let tagged = [&plain[..12], &[0x81, 0, 0, 10], &plain[12..]].concat();
        let slots = other_back.port.offer(0..1, 2000);
        out.port.send(0, PLAIN, &tagged);
        assert_eq!(other_back.port.receive(&slots).0, plain);
        out.port.take();
        let plain = between(1, 0, 8, length);
        let tagged = [&plain[..12], &[0x81, 0, 0, 10], &plain[12..]].concat();
        let slots = back.port.offer(0..1, 2000);
        other_out.port.send(0, PLAIN, &plain);
        assert_eq!(back.port.receive(&slots).0, tagged);
        other_out.port.take();
    }
    // Where the checksum is moves along.
    let (header, plain) = tcp(&[5; 100], 0);
    let tagged = [&plain[..12], &[0x81, 0, 0, 10], &plain[12..]].concat();
    let mut of_tagged = header;
    of_tagged[6] += 4;
    let slots = other_back.port.offer(0..1, 2000);
    out.port.send(0, of_tagged, &tagged);
    assert_eq!(other_back.port.receive(&slots).0, plain);
    let told = other_back.port.driver.guest().read(Port::place(0), HEADER);
    assert_eq!(told[..10], header[..10]);
    out.port.take();
    for queue in [out, back, other_out, other_back] {
        net.pool.stop(queue.key).unwrap();
    }
}

#[test]
fn queues_of_a_switch_rest_and_are_woken() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let (_, tid) = net.pool.thread(net.threads[0]).unwrap();
    let mut sender = net.start(0, 1, false, 0);
    let mut receiver = net.start(1, 0, false, 0);
    assert_rests(tid, "with nothing");
    let slots = receiver.port.offer(0..1, 1526);
    sender.port.send(0, PLAIN, &between(0, 1, 1, 60));
    assert_eq!(receiver.port.receive(&slots).0, between(0, 1, 1, 60));
    sender.port.take();
    assert_rests(tid, "with nothing again");
    // Of a receiver without buffers, which is given up once.
    sender.port.send(0, PLAIN, &between(0, 1, 1, 60));
    sender.port.take();
    assert_rests(tid, "with a driver without buffers");
    net.pool.stop(sender.key).unwrap();
    net.pool.stop(receiver.key).unwrap();
}

/// What a policy is shown: the IOThread's frames, their bytes, their waits, and nothing that waits for others.
#[test]
fn buffers_and_frames_that_a_limit_holds_back_are_no_backlog() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let mut sender = net.start(0, 1, false, 0);
    let mut receiver = net.start(1, 0, false, 1);
    let slots = receiver.port.offer(0..16, 1526);
    // Each looks at what it has.
    let backlog = |queue: &Running| {
        net.pool.edit(queue.key, |_| ()).unwrap();
        let now = queue.stats.progress();
        now.seen.saturating_sub(now.started)
    };
    for number in 0..10 {
        sender.port.send(u64::from(number), PLAIN, &between(0, 1, number, 100));
    }
    for _ in 0..10 {
        receiver.port.receive(&slots);
        sender.port.take();
    }
    assert_eq!((backlog(&receiver), backlog(&sender)), (0, 0), "six buffers are left");
    let progress = [&sender, &receiver].map(|queue| queue.stats.progress());
    assert!(progress.iter().all(|of| (of.requests, of.bytes, of.in_flight()) == (10, 1_000, 0)));
    for queue in [&sender, &receiver] {
        let seen = queue.stats.snapshot();
        assert_eq!((seen.wait.count(), seen.service.count()), (10, 10));
        let service = seen.service.summary();
        assert!(seen.busy.get() > 0, "{seen:?}");
        assert!((1..LOST.as_nanos() as u64).contains(&service.max_ns.get()), "{service:?}");
        net.pool.stop(queue.key).unwrap();
    }

    let rate = rtvirtio_frames::limit::Rate { frames: Some(1.0), bits: None, burst: 0 };
    let link = Link::Port { switch: switch_of(&net), number: 0, pairs: 1 };
    let nic = super::frames::nic_on(link, ALL, [Some(rate); 2]);
    let mut port = Port::new(false);
    let setup = port.setup(&nic, 1);
    let stats = Arc::clone(&setup.stats);
    let key = net.pool.start_nic(setup, net.threads[0]).unwrap();
    for slot in 0..8 {
        port.send(slot, PLAIN, &between(0, 1, 1, 100));
    }
    port.take();
    // Once a turn has found out.
    let begun = Instant::now();
    loop {
        net.pool.edit(key, |_| ()).unwrap();
        let now = stats.progress();
        assert!(now.started < 8 && begun.elapsed() < LOST, "{now:?}");
        if now.started > 0 && now.seen <= now.started {
            break;
        }
    }
    net.pool.stop(key).unwrap();
}

fn switch_of(net: &Net) -> Arc<Switch> {
    let Link::Port { switch, .. } = net.nics[0].attached() else { panic!("no port") };
    Arc::clone(switch)
}

/// UDP over IPv4, of a flow.
fn udp(flow: u16, number: u8) -> Vec<u8> {
    let mut frame = between(0, 1, number, 100);
    frame[12..14].copy_from_slice(&IPV4.to_be_bytes());
    frame[14] = 0x45;
    frame[20..22].fill(0);
    frame[23] = 17;
    frame[26..38].fill(7);
    frame[34..36].copy_from_slice(&flow.to_be_bytes());
    frame
}

/// Flows are spread over the receiver's queues that are served; each keeps to one, and those of a queue that is disabled go to
/// another.
#[test]
fn flows_are_spread_over_the_pairs_that_are_enabled() {
    let Some(net) = Net::with_pairs(2, &[ALL | features::MQ; 2], &plain) else { return };
    assert_eq!((net.nics[0].queues(), net.nics[0].queue_num()), (4, 2));
    let mut senders = [net.start(0, 1, false, 0), net.start(0, 3, true, 1)];
    let mut receivers = [net.start(1, 0, false, 1), net.start(1, 2, true, 0)];
    let mut slots = receivers.each_mut().map(|queue| queue.port.offer(0..8, 1526));
    let mut seen = [0, 0];
    for enabled in [2, 1] {
        if enabled == 1 {
            net.pool.edit(receivers[1].key, |queue| queue.set_enabled(false)).unwrap();
        }
        for flow in 0..16 {
            let mut places = Vec::new();
            for number in 0..4 {
                let sender = &mut senders[usize::from(flow % 2)];
                sender.port.send(0, PLAIN, &udp(flow, number));
                let begun = Instant::now();
                let (at, id, length) = loop {
                    let take = |at: usize, queue: &mut Running| {
                        queue.port.driver.take().map(|(id, length)| (at, id, length))
                    };
                    let [first, second] = &mut receivers;
                    if let Some(taken) = take(0, first).or_else(|| take(1, second)) {
                        break taken;
                    }
                    assert!(begun.elapsed() < LOST, "flow {flow} is lost");
                };
                let slot = slots[at].remove(&id).unwrap();
                let guest = Arc::clone(receivers[at].port.driver.guest());
                let frame = guest.read(Port::place(slot), length as usize).split_off(HEADER);
                assert_eq!(frame, udp(flow, number));
                slots[at].extend(receivers[at].port.offer(slot..slot + 1, 1526));
                places.push(at);
                sender.port.take();
            }
            assert!(places.iter().all(|at| *at == places[0]), "flow {flow}: {places:?}");
            assert!(enabled == 2 || places[0] == 0);
            seen[places[0]] += 1;
        }
    }
    assert!(seen[0] > 16 && seen[1] > 0, "{seen:?}");
    for queue in senders.into_iter().chain(receivers) {
        net.pool.stop(queue.key).unwrap();
    }
}

/// As front ends do that enable a ring when all of them are set up.
#[test]
fn queue_that_is_enabled_later_is_woken_too() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let mut sender = net.start(0, 1, false, 0);
    let mut port = Port::new(true);
    let setup = NicQueueSetup { enabled: false, ..port.setup(&net.nics[1], 0) };
    let key = net.pool.start_nic(setup, net.threads[1]).unwrap();
    let slots = port.offer(0..4, 1526);
    sender.port.send(0, PLAIN, &between(0, 1, 1, 60));
    sender.port.take();
    net.pool.edit(key, |queue| queue.set_enabled(true)).unwrap();
    // Longer than queues stay awake.
    std::thread::sleep(Duration::from_millis(20));
    sender.port.send(0, PLAIN, &between(0, 1, 2, 60));
    assert_eq!(port.receive(&slots).0, between(0, 1, 2, 60));
    sender.port.take();
    assert_eq!(sender.stats.drops().no_buffers, 1);
    net.pool.stop(sender.key).unwrap();
    net.pool.stop(key).unwrap();
}

#[test]
fn broadcasts_go_to_all_and_too_many_do_not() {
    let Some(net) = Net::new(&[ALL; 4]) else { return };
    let mut sender = net.start(0, 1, true, 0);
    let mut receivers: Vec<_> = (1..4).map(|nic| net.start(nic, 0, true, nic % 2)).collect();
    for round in 0..20 {
        let mut frame = between(0, 0, round, 100);
        frame[..6].fill(0xff);
        let slots: Vec<_> =
            receivers.iter_mut().map(|receiver| receiver.port.offer(0..1, 1526)).collect();
        sender.port.send(0, PLAIN, &frame);
        for (receiver, slots) in receivers.iter_mut().zip(&slots) {
            assert_eq!(receiver.port.receive(slots).0, frame);
        }
        sender.port.take();
    }
    net.pool.stop(sender.key).unwrap();
    receivers.into_iter().for_each(|receiver| drop(net.pool.stop(receiver.key).unwrap()));
}

#[test]
fn sender_of_too_many_broadcasts_loses_the_rest() {
    let Some(net) = Net::new(&[ALL; 2]) else { return };
    let mut sender = net.start(0, 1, true, 0);
    let mut frame = between(0, 0, 1, 60);
    frame[..6].fill(0xff);
    // A second of the rate and a tenth of one may come at once: by far not so many.
    const MANY: u64 = 20 * MAX_BROADCAST as u64;
    for number in 0..MANY {
        sender.port.send(number % 32, PLAIN, &frame);
        if number >= 31 {
            sender.port.take();
        }
    }
    for _ in 0..31 {
        sender.port.take();
    }
    let drops = sender.stats.drops();
    // Nobody is there to take those that may pass.
    assert!(drops.broadcast > 0 && drops.no_buffers > 0, "{drops:?}");
    assert_eq!(drops.total(), MANY);
    net.pool.stop(sender.key).unwrap();
}

/// Numbers that look random (Marsaglia, xorshift64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A frame and its header of which some parts are right.
fn hostile(random: &mut Random) -> ([u8; HEADER], Vec<u8>) {
    let length = [13, 14, 18, 60, 64, 65, 1514, 9000][random.below(8) as usize];
    let (mut header, mut frame) = match random.below(3) {
        0 => tcp(&vec![7; length], random.below(3000) as u16),
        _ => (PLAIN, between(0, 1 + random.below(3) as u16, 1, length.max(14))),
    };
    frame.truncate(frame.len().min(length + 54));
    for _ in 0..random.below(4) {
        match random.below(4) {
            0 => header[random.below(12) as usize] = random.below(256) as u8,
            1 => {
                let at = random.below(frame.len() as u64) as usize;
                frame[at] = random.below(256) as u8;
            }
            2 => frame.truncate(random.below(frame.len() as u64 + 1) as usize),
            _ => frame.iter_mut().take(6).for_each(|byte| *byte = random.below(256) as u8),
        }
        if frame.is_empty() {
            frame.push(0);
        }
    }
    (header, frame)
}

/// Whatever a driver sends: each of its chains comes back, no receiver is given what it has not negotiated, and another
/// sender's frames arrive.
#[test]
fn frames_that_mean_harm_harm_nobody_else() {
    let none = ALL & !(features::GUEST_CSUM | features::GUEST_TSO4 | features::GUEST_TSO6);
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    for packed in [false, true] {
        let Some(net) = Net::new(&[ALL, ALL, none, none & !features::MRG_RXBUF]) else { return };
        let mut bad = net.start(0, 1, packed, 0);
        let mut good = net.start(1, 1, packed, 1);
        let mut receivers: Vec<_> =
            [1, 2, 3].map(|nic| (net.start(nic, 0, packed, nic % 2), HashMap::new())).into();
        for (receiver, slots) in &mut receivers {
            slots.extend(receiver.port.offer(0..32, 0x4000));
        }
        for round in 0..4_000_u32 {
            let (header, frame) = hostile(&mut random);
            bad.port.send(u64::from(round % 4), header, &frame);
            assert_eq!(bad.port.take().1, 0);
            let is_good = round % 10 == 0;
            if is_good {
                good.port.send(0, PLAIN, &between(1, 2, 0x5a, 200));
                good.port.take();
            }
            for (nic, (receiver, slots)) in (1..).zip(&mut receivers) {
                // Its sender may know that it has arrived before the receiver does.
                let mut is_awaited = is_good && nic == 2;
                let begun = Instant::now();
                loop {
                    assert!(begun.elapsed() < LOST, "round {round}");
                    let Some((id, length)) = receiver.port.driver.take() else {
                        if is_awaited {
                            continue;
                        }
                        break;
                    };
                    let slot = slots.remove(&id).unwrap();
                    let guest = Arc::clone(receiver.port.driver.guest());
                    let bytes = guest.read(Port::place(slot), length as usize);
                    assert!(bytes.len() >= HEADER + 14, "{length}");
                    assert_eq!(bytes[10..12], [1, 0], "all fit into one");
                    if nic > 1 {
                        assert_eq!((bytes[0], bytes[1]), (0, 0), "not negotiated");
                    }
                    assert_ne!(bytes[HEADER + 6..HEADER + 12], mac(2), "spoofed");
                    is_awaited &= bytes[HEADER + 14..] != [0x5a; 186];
                    slots.extend(receiver.port.offer(slot..slot + 1, 0x4000));
                }
            }
        }
        assert_eq!(good.stats.drops().total(), 0);
        assert!(
            bad.stats.drops().total() > 0 && bad.stats.snapshot().written_bytes > Bytes::new(0)
        );
        for queue in [bad, good].into_iter().chain(receivers.into_iter().map(|(queue, _)| queue)) {
            assert_eq!(net.pool.stop(queue.key).unwrap().broken(), None);
        }
    }
}
