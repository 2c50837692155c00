//! Any bytes as frames of a guest: no panic, what is checked fits, and what is cut or completed stays in the frame.

#![no_main]

use libfuzzer_sys::{arbitrary, fuzz_target};
use rtvirtio_frames::ethernet::Head;
use rtvirtio_frames::forwarding::{Forwarding, Port, Vlans};
use rtvirtio_frames::header::{BYTES, Header};
use rtvirtio_frames::offload::{MAX_HEADERS, MIN_SEGMENT, Segments, complete_checksum};

#[derive(arbitrary::Arbitrary, Debug)]
struct Sent {
    port: u8,
    negotiated: u64,
    taken: u64,
    header: [u8; BYTES],
    frame: Vec<u8>,
}

fuzz_target!(|sent: Vec<Sent>| {
    let port = |last: u8, vlans, anti_spoofing| Port {
        mac: [2, 0, 0, 0, 0, last],
        vlans,
        anti_spoofing,
    };
    let switch = Forwarding::new(vec![
        port(1, Vlans::Untagged, true),
        port(2, Vlans::Untagged, false),
        port(3, Vlans::Access(10), false),
        port(4, Vlans::Trunk(vec![10, 20]), false),
    ]);
    for (now, Sent { port, negotiated, taken, header, mut frame }) in (0..).zip(sent) {
        let Some(mut head) = Head::new(&frame) else { continue };
        let _ = head.flow();
        let fitting = Header(header).from_driver(negotiated);
        let Ok(header) = fitting.and_then(|header| header.fitting(&head, frame.len())) else {
            continue;
        };
        let number = u16::from(port % 4);
        if let Ok(origin) = switch.admit(number, &mut head, now) {
            if let Ok(destination) = switch.destination(origin, &head, now) {
                assert_ne!(destination, rtvirtio_frames::forwarding::Destination::Port(number));
            }
            assert!(switch.flooded(origin, false).all(|to| to != number));
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
});
