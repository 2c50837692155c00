//! A switch's ports, as they come and go, and what their senders have on its way.

use rtvirtio_frames::forwarding;
use rtvirtio_spec::serve::MAX_PAIRS;
use rtvirtio_units::Bytes;
use rtvirtio_vhost::Backend as _;

use super::frames::Port;
use super::switch::{ALL, Net, PLAIN, between, mac, plain};
use super::*;
use crate::nic::{Link, Nic, NicConfig};
use crate::switch::{PortReceiver, PortSender};

/// Who has a port's number next gets nothing that was for the one before, however late it comes.
#[test]
fn frames_for_a_port_that_has_gone_reach_nobody_else() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let Link::Port { switch, .. } = net.nics[0].attached() else { panic!("no port") };
    let mut sender = PortSender::claim(switch, 0, 0).unwrap();
    let claim = || {
        let mut receiver = PortReceiver::claim(switch, 1, 0).unwrap();
        receiver.set_open(true);
        receiver
    };
    let send = |sender: &mut PortSender| {
        sender.next().unwrap().length = 60;
        assert_eq!(sender.send(Some(forwarding::Destination::Port(1))), (1, 0));
    };
    let before = claim();
    send(&mut sender);
    assert_eq!(switch.ports(), 2);
    drop(before);
    switch.remove_port(1);
    assert_eq!(switch.ports(), 1);
    assert_eq!(switch.add_port(plain(8), 1), Ok(1));
    let mut after = claim();
    // A sender in the middle of a turn knows only what there was at its beginning.
    send(&mut sender);
    assert_eq!(sender.post(), 0);
    assert!(after.take().is_none());
    while sender.take_ended().is_some() {}
    assert_eq!(sender.in_flight(), 0);
    sender.look();
    send(&mut sender);
    assert_eq!(sender.post(), 0);
    let delivery = after.take().unwrap();
    after.release(delivery);
    assert!(sender.take_ended().is_some());
}

/// However many pairs ports have that come one after the other, there are no more numbers than ports at a time.
#[test]
fn port_with_more_pairs_has_the_number_of_one_that_has_gone() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let Link::Port { switch, .. } = net.nics[0].attached() else { panic!("no port") };
    let mut sender = PortSender::claim(switch, 0, 0).unwrap();
    for pairs in (1..=MAX_PAIRS).chain([1]) {
        switch.remove_port(1);
        assert_eq!(switch.add_port(plain(8), pairs), Ok(1));
        assert_eq!(switch.ports(), 2);
        // The last pair is served alone. A sender that has not seen the port come sends nothing to it.
        let mut receiver = PortReceiver::claim(switch, 1, pairs - 1).unwrap();
        receiver.set_open(true);
        for has_looked in [false, true] {
            sender.next().unwrap().length = usize::from(pairs);
            assert_eq!(sender.send(Some(forwarding::Destination::Port(1))), (1, 0));
            assert_eq!(sender.post(), 0);
            let delivery = receiver.take();
            assert_eq!(delivery.is_some(), has_looked);
            if let Some(delivery) = delivery {
                assert_eq!(receiver.frame(&delivery).unwrap().length, usize::from(pairs));
                receiver.release(delivery);
            }
            assert!(sender.take_ended().is_some());
            sender.look();
        }
    }
}

/// A port that comes has frames of a sender that was there before it, without a pause of that one.
#[test]
fn frames_go_to_ports_that_come_while_others_are_served() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let Link::Port { switch, .. } = net.nics[0].attached() else { panic!("no port") };
    let mut sender = net.start(0, 1, false, 0);
    let mut first = net.start(1, 0, false, 1);
    let slots = first.port.offer(0..8, 1526);
    for round in 0..4_u8 {
        let number = switch.add_port(plain(9), 1).unwrap();
        assert_eq!(number, 2, "the number is free again");
        let nic = Nic::new(NicConfig {
            name: "late".to_owned(),
            mac: mac(9),
            mtu: 1500,
            limits: [None; 2],
            promises: [None; 2],
            link: Link::Port { switch: Arc::clone(switch), number, pairs: 1 },
            memory: Bytes::new(1 << 30),
            positions: None,
        });
        nic.negotiated(ALL);
        let mut port = Port::new(round % 2 == 1);
        let setup = port.setup(&Arc::new(nic), 0);
        let key = net.pool.start_nic(setup, net.threads[usize::from(round / 2)]).unwrap();
        let late = port.offer(0..2, 1526);
        let sent = between(0, 9, round, 100);
        sender.port.send(0, PLAIN, &sent);
        assert_eq!(port.receive(&late).0, sent);
        sender.port.take();
        net.pool.stop(key).unwrap();
        switch.remove_port(number);
        // Nobody has the address any more.
        let lost = sender.stats.drops().total();
        sender.port.send(1, PLAIN, &sent);
        sender.port.take();
        assert_eq!(sender.stats.drops().total(), lost + 1);
        sender.port.send(2, PLAIN, &between(0, 1, round, 60));
        assert_eq!(first.port.receive(&slots).0, between(0, 1, round, 60));
        sender.port.take();
    }
    for queue in [sender, first] {
        assert_eq!(net.pool.stop(queue.key).unwrap().broken(), None);
    }
}

/// A turn that could take nothing is none: its IOThread would look for it all the time.
#[test]
fn sender_with_all_that_it_may_send_on_its_way_has_no_work() {
    let Some(net) = Net::new(&[ALL, ALL]) else { return };
    let Link::Port { switch, .. } = net.nics[0].attached() else { panic!("no port") };
    let mut sender = PortSender::claim(switch, 0, 0).unwrap();
    let mut receiver = PortReceiver::claim(switch, 1, 0).unwrap();
    receiver.set_open(true);
    assert!(PortSender::claim(switch, 0, 0).is_none(), "one has it");
    let mut sent = 0;
    while let Some(frame) = sender.next() {
        frame.length = 60;
        assert_eq!(sender.send(Some(forwarding::Destination::Port(1))), (1, 0));
        sent += 1;
    }
    assert!(sender.is_full() && !sender.has_ended());
    assert_eq!((sender.post(), sender.in_flight()), (0, sent));
    // In their order, whichever is released first.
    let [first, second] = [receiver.take().unwrap(), receiver.take().unwrap()];
    receiver.release(second);
    assert!(!sender.has_ended());
    receiver.release(first);
    assert!(sender.take_ended().is_some() && sender.take_ended().is_some());
    assert!(sender.take_ended().is_none() && !sender.is_full());
    // All that is left is released when the receiver goes.
    drop(receiver);
    while sender.take_ended().is_some() {}
    assert_eq!(sender.in_flight(), 0);
}
