//! Any bytes as frames of a guest: no panic, what is checked fits, and what is cut or completed stays in the frame. Between ports of all
//! kinds, which come and go, a frame goes to other ports of its VLAN alone, and nobody sends under another's address.

#![no_main]

use libfuzzer_sys::{arbitrary, fuzz_target};
use rtvirtio_frames::ethernet::{ARP, HEADER_BYTES, Head, MAX_HEAD_BYTES, Mac, TAG_BYTES, is_group, is_link_local};
use rtvirtio_frames::forwarding::{
    Destination, Egress, Forwarding, LastFrame, Origin, Port, Refused, Vlans,
};
use rtvirtio_frames::header::{BYTES, Header};
use rtvirtio_frames::offload::{MAX_HEADERS, MIN_SEGMENT, Segments, complete_checksum};

/// The most ports. Some are there at first.
const PORTS: u8 = 8;
const AT_FIRST: u8 = 6;
/// The VLAN in a tag.
const VLAN: u16 = 0xfff;

#[derive(arbitrary::Arbitrary, Debug)]
struct Sent {
    port: u8,
    negotiated: u64,
    taken: u64,
    header: [u8; BYTES],
    frame: Vec<u8>,
    change: Change,
}

/// What is made of a frame and of the switch before it is sent. Addresses that meet are rare among any bytes.
#[derive(arbitrary::Arbitrary, Debug)]
struct Change {
    /// Seconds since the frame before.
    later: u16,
    /// A port that comes or goes, if it is not 0.
    port: u8,
    /// Addresses of the frame, if they are not 0.
    to: u8,
    from: u8,
    tag: Option<u16>,
    /// The sender of ARP.
    arp: Option<u8>,
}

const fn mac(last: u8) -> Mac {
    [2, 0, 0, 0, 0, last]
}

/// Those of ports, some that nobody has, and groups.
const fn address(which: u8) -> Mac {
    match which % 16 {
        13 => [0xff; 6],
        14 => [1, 0x80, 0xc2, 0, 0, 14],
        15 => [0x33, 0x33, 0, 0, 0, 1],
        last => mac(last),
    }
}

/// One with an address that no other number has.
fn port(number: u8, kind: u8) -> Port {
    let (vlans, anti_spoofing) = match kind % 6 {
        0 => (Vlans::Untagged, true),
        1 => (Vlans::Untagged, false),
        2 => (Vlans::Access(10), false),
        3 => (Vlans::Trunk(vec![10, 20]), false),
        4 => (Vlans::Access(20), true),
        _ => (Vlans::Trunk(vec![20, 30]), true),
    };
    Port { mac: mac(number + 1), vlans, anti_spoofing }
}

fn is_in(port: &Port, vlan: u16) -> bool {
    match &port.vlans {
        Vlans::Untagged => vlan == 0,
        Vlans::Access(own) => *own == vlan,
        Vlans::Trunk(vlans) => vlans.contains(&vlan),
    }
}

impl Change {
    fn of_frame(&self, frame: &mut Vec<u8>) {
        if frame.len() < HEADER_BYTES {
            return;
        }
        if self.to > 0 {
            frame[..6].copy_from_slice(&address(self.to));
        }
        if self.from > 0 {
            frame[6..12].copy_from_slice(&address(self.from));
        }
        if let Some(sender) = self.arp {
            frame.resize(frame.len().max(HEADER_BYTES + 28), 0);
            frame[12..14].copy_from_slice(&ARP.to_be_bytes());
            frame[22..28].copy_from_slice(&address(sender));
        }
        if let Some(tag) = self.tag {
            let vlan = [0_u16, 10, 20, 30][usize::from(tag % 4)];
            let [high, low] = ((tag & 0xe000) | vlan).to_be_bytes();
            drop(frame.splice(12..12, [0x81, 0, high, low]));
        }
    }
}

/// What a frame says, byte by byte, with zeroes behind its end.
struct Facts {
    to: Mac,
    from: Mac,
    tag: Option<u16>,
    /// The sender, if it is ARP.
    arp: Option<Mac>,
}

impl Facts {
    fn of(frame: &[u8]) -> Self {
        let byte = |at: usize| frame.get(at).copied().unwrap_or(0);
        let number = |at: usize| u16::from_be_bytes([byte(at), byte(at + 1)]);
        let mac = |at: usize| -> Mac { std::array::from_fn(|i| byte(at + i)) };
        let tag = matches!(number(12), 0x8100 | 0x88a8).then(|| number(14));
        // What it carries begins behind its tags. Nobody is the sender of what is not looked at.
        let (mut kind, mut payload) = (number(12), 14);
        while matches!(kind, 0x8100 | 0x88a8) && payload <= MAX_HEAD_BYTES {
            kind = number(payload + 2);
            payload += TAG_BYTES;
        }
        let is_arp = kind == ARP || payload > MAX_HEAD_BYTES;
        let is_read = payload + 14 <= MAX_HEAD_BYTES;
        let arp = is_arp.then(|| if is_read { mac(payload + 8) } else { [0; 6] });
        Self { to: mac(0), from: mac(6), tag, arp }
    }
}

/// What holds of a frame that was let in, and of where it goes.
fn check(
    switch: &Forwarding,
    ports: &[Option<Port>],
    frame: &Facts,
    origin: Origin,
    destination: Destination,
) {
    let port = ports[usize::from(origin.port)].as_ref().expect("the port is there");
    let vlan = origin.vlan;
    let in_vlan: Vec<(u16, &Port)> = (0..)
        .zip(ports)
        .filter_map(|(number, port)| Some((number, port.as_ref()?)))
        .filter(|(_, port)| is_in(port, vlan))
        .collect();
    let owner = |mac| in_vlan.iter().find(|(_, port)| port.mac == mac).map(|(number, _)| *number);

    assert!(is_in(port, vlan));
    match port.vlans {
        Vlans::Untagged => assert_eq!(origin.tag, None),
        Vlans::Access(_) => assert_eq!((origin.tag, frame.tag), (None, None)),
        Vlans::Trunk(_) => {
            assert_eq!(origin.tag, frame.tag);
            assert_eq!(origin.tag.map(|tag| tag & VLAN), Some(vlan));
        }
    }
    assert!(!is_group(frame.from));
    assert!(owner(frame.from).is_none_or(|owner| owner == origin.port), "another's address");
    if port.anti_spoofing {
        assert_eq!(frame.from, port.mac);
        assert!(frame.arp.is_none_or(|sender| sender == port.mac));
    }

    assert!(!is_link_local(frame.to));
    let goes: Vec<u16> = match destination {
        Destination::Port(to) => vec![to],
        Destination::Group => switch.flooded(origin, false).collect(),
        Destination::Unknown => switch.flooded(origin, true).collect(),
    };
    let others = || in_vlan.iter().filter(|(number, _)| *number != origin.port);
    assert!(goes.iter().all(|to| others().any(|(number, _)| number == to)), "{goes:?}");
    match (destination, owner(frame.to)) {
        (Destination::Port(to), Some(owner)) => assert_eq!(to, owner),
        // It was learned, of a port that others may be behind.
        (Destination::Port(to), None) => {
            assert!(ports[usize::from(to)].as_ref().is_some_and(|port| !port.anti_spoofing));
        }
        (Destination::Group, _) => {
            assert!(is_group(frame.to));
            assert_eq!(goes, others().map(|(number, _)| *number).collect::<Vec<_>>());
        }
        (Destination::Unknown, owner) => {
            assert_eq!(owner, None);
            let open = others().filter(|(_, port)| !port.anti_spoofing);
            assert_eq!(goes, open.map(|(number, _)| *number).collect::<Vec<_>>());
        }
    }
    for to in goes {
        let is_trunk = matches!(&ports[usize::from(to)], Some(Port { vlans: Vlans::Trunk(_), .. }));
        match switch.egress(to, origin) {
            Egress::Tagged(tag) => assert!(is_trunk && tag & VLAN == vlan),
            Egress::Untagged => assert!(!is_trunk),
        }
    }
}

fuzz_target!(|sent: Vec<Sent>| {
    let mut ports: Vec<_> = (0..AT_FIRST).map(|number| Some(port(number, number))).collect();
    let mut switch = Forwarding::new(ports.iter().flatten().cloned().collect());
    ports.resize(usize::from(PORTS), None);
    let mut now = 0_u32;
    // Of one port at one time.
    let mut last = (0, LastFrame::default());
    for Sent { port: number, negotiated, taken, header, mut frame, change } in sent {
        let number = u16::from(number % PORTS);
        if change.port > 0 {
            let changed = change.port % PORTS;
            let place = &mut ports[usize::from(changed)];
            *place = place.is_none().then(|| port(changed, change.port / PORTS));
            switch = switch.with_port(changed.into(), place.clone());
            if place.is_none() {
                switch.forget(changed.into());
            }
        }
        now = now.wrapping_add(change.later.into());
        if last.0 != number || change.port > 0 || change.later > 0 {
            last = (number, LastFrame::default());
        }
        change.of_frame(&mut frame);
        let Some(mut head) = Head::new(&frame) else { continue };
        let _ = head.flow();
        let fitting = Header(header).from_driver(negotiated);
        let Ok(header) = fitting.and_then(|header| header.fitting(&head, frame.len())) else {
            continue;
        };
        let mut alone = head;
        let found = switch.forward(number, &mut head, now, &mut last.1);
        // What is remembered of the frame before changes nothing.
        let expected = switch
            .admit(number, &mut alone, now)
            .and_then(|origin| Ok((origin, switch.destination(origin, &alone, now)?)));
        assert_eq!(found, expected);
        assert_eq!(head.bytes(), alone.bytes());
        let facts = Facts::of(&frame);
        match (found, &ports[usize::from(number)]) {
            (Ok((origin, destination)), _) => {
                assert_eq!(origin.port, number);
                check(&switch, &ports, &facts, origin, destination);
            }
            (Err(refused), None) => assert_eq!(refused, Refused::NoReceiver),
            // What a device sends under its own address is not.
            (Err(Refused::Spoofed), Some(own)) => {
                let is_anothers = facts.arp.is_some_and(|sender| sender != own.mac);
                assert!(facts.from != own.mac || own.anti_spoofing && is_anothers);
            }
            (Err(_), Some(_)) => {}
        }
        if header.for_driver(taken).is_err() {
            if header.segmented().is_some() {
                let mut space = [0; MAX_HEADERS];
                let Ok(mut segments) = Segments::new(&frame, &header) else { continue };
                let (mut count, mut bytes) = (0, 0);
                while let Some((headers, data)) = segments.next(&frame, &mut space) {
                    assert!(!headers.is_empty() && data.end <= frame.len());
                    (count, bytes) = (count + 1, bytes + data.len());
                }
                assert!(count <= frame.len() / usize::from(MIN_SEGMENT) + 1);
                assert!(bytes < frame.len());
            } else {
                // It was said to fit.
                complete_checksum(&mut frame, &header).unwrap();
            }
        }
    }
    for (mac, vlan, number) in switch.learned(now) {
        let port = ports[usize::from(number)].as_ref().expect("a port that has gone is forgotten");
        assert!(!port.anti_spoofing && is_in(port, vlan) && !is_group(mac));
    }
});
