//! Pairs of queues of a network device, of which a driver uses some.

use std::os::fd::AsRawFd as _;

use rtvirtio_vhost::Backend as _;

use super::frames::{Wire, frame, nic_on, skipped};
use super::switch::ALL;
use super::*;
use crate::nic::Link;

/// The kernel chooses a queue by the hash of a flow that the guest has not sent anything of.
#[test]
fn frames_of_a_tap_go_to_queues_that_are_served() {
    let wire = match Wire::new(4) {
        Ok(wire) => wire,
        Err(why) => return skipped("frames_of_a_tap_go_to_queues_that_are_served", why),
    };
    let Wire { taps, socket } = wire;
    let link = Link::Taps(taps.into_iter().map(Arc::new).collect());
    let nic = nic_on(link, ALL, [None; 2]);
    let Link::Taps(taps) = nic.attached() else { panic!("no TAPs") };
    // SAFETY: all zeroes are a value of this.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    (address.sll_family, address.sll_protocol) = (libc::AF_PACKET as u16, 0x0800_u16.to_be());
    // SAFETY: a string of C's.
    address.sll_ifindex = unsafe { libc::if_nametoindex(c"tap0".as_ptr()) } as i32;
    // How many of 64 flows come by each queue.
    let spread = || {
        for flow in 0..64 {
            // UDP over IPv4.
            let mut frame = frame(0, 60);
            (frame[12], frame[13], frame[14], frame[17], frame[23]) = (8, 0, 0x45, 46, 17);
            (frame[35], frame[39]) = (flow, 26);
            // SAFETY: a frame and an address of these lengths.
            let sent = unsafe {
                let length = std::mem::size_of_val(&address) as libc::socklen_t;
                let to = (&raw const address).cast();
                libc::sendto(socket.as_raw_fd(), frame.as_ptr().cast(), 60, 0, to, length)
            };
            assert_eq!(sent, 60);
        }
        std::thread::sleep(Duration::from_millis(50));
        let mut space = vec![0; 2048];
        taps.iter()
            .map(|tap| {
                let part = [rtvirtio_virtq::Segment::new(space.as_mut_ptr(), space.len())];
                // SAFETY: the space is this test's own.
                std::iter::from_fn(|| unsafe { tap.receive(&part) }.ok()).count()
            })
            .collect::<Vec<_>>()
    };
    let is_even = |counts: &[usize]| counts.iter().all(|&count| (1..64).contains(&count));
    assert!(is_even(&spread()), "the kernel does not spread these flows");
    for (index, is_served) in [(0, true), (1, true), (2, false)] {
        nic.serves(index, is_served);
    }
    assert_eq!(spread(), [64, 0, 0, 0]);
    nic.serves(4, true);
    let counts = spread();
    assert!(is_even(&[counts[0], counts[2]]) && counts[1] + counts[3] == 0, "{counts:?}");
    // Twice the same changes nothing, and who has gone leaves all as they were.
    for (index, is_served) in [(4, true), (0, false), (4, false), (4, false)] {
        nic.serves(index, is_served);
    }
    assert!(is_even(&spread()));
}
