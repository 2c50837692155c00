//! `struct virtio_net_hdr` (virtio 1.2, 5.1.6): what comes before each frame in a virtqueue.
//!
//! A driver's header says of what its frame still needs: a checksum, segmentation. It is copied before it
//! is looked at, for the driver may change it meanwhile, and only what was negotiated goes on; whether
//! it fits the frame says the kernel, which checks it for every TAP (`virtio_net_hdr_to_skb`).

use crate::ethernet::{ARP, HEADER_BYTES, Head, IPV4, IPV6, TAG_BYTES};
use crate::features;

/// Bytes of the header with VIRTIO_F_VERSION_1.
pub const BYTES: usize = 12;
/// The longest frame with segmentation offload: 64 KiB of IP and the Ethernet header (virtio 1.2, 5.1.6.3.1:
/// 65,550 bytes with a virtio header of 12 bytes less these), and a VLAN tag.
pub const MAX_FRAME_BYTES: usize = 65_535 + HEADER_BYTES + TAG_BYTES;

/// VIRTIO_NET_HDR_F_NEEDS_CSUM
const NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_GSO_NONE, _TCPV4, _TCPV6, and the bit _ECN.
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;

/// A header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header(pub [u8; BYTES]);

/// Why a frame is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The driver asks for segmentation that it has not negotiated, or that there is none of.
    #[error("segmentation that was not negotiated")]
    Segmentation,
    /// The driver leaves a checksum to the device, and has not negotiated that.
    #[error("a checksum is missing")]
    Checksum,
    /// What it says of the frame does not fit that.
    #[error("a header that does not fit its frame")]
    Misfit,
}

/// What a frame is that is to be cut into segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
}

impl Header {
    /// A frame that is complete.
    pub const COMPLETE: Self = Self([0; BYTES]);

    /// Whether its driver leaves nothing to the device, whatever was negotiated: how many buffers it says, and where a
    /// checksum would be, means nothing then.
    #[must_use]
    #[inline]
    pub const fn is_complete(&self) -> bool {
        self.0[0] & NEEDS_CSUM == 0 && self.0[1] == GSO_NONE
    }

    /// The header of a driver's frame, of what it has `negotiated` alone.
    ///
    /// # Errors
    /// [`HeaderError`]: the frame cannot be sent as it is.
    #[inline]
    pub const fn from_driver(mut self, negotiated: u64) -> Result<Self, HeaderError> {
        let needs_checksum = self.0[0] & NEEDS_CSUM != 0;
        if needs_checksum && negotiated & features::CSUM == 0 {
            return Err(HeaderError::Checksum);
        }
        // DATA_VALID and RSC_INFO are the device's to say.
        self.0[0] &= NEEDS_CSUM;
        let wanted = match self.0[1] & !GSO_ECN {
            GSO_NONE => {
                self.0[1] = GSO_NONE;
                0
            }
            GSO_TCPV4 => features::HOST_TSO4,
            GSO_TCPV6 => features::HOST_TSO6,
            _ => return Err(HeaderError::Segmentation),
        };
        let ecn = if self.0[1] & GSO_ECN != 0 { features::HOST_ECN } else { 0 };
        if wanted & !negotiated != 0 || ecn & !negotiated != 0 {
            return Err(HeaderError::Segmentation);
        }
        // A segment needs a new checksum (5.1.6.2.1).
        if wanted != 0 && !needs_checksum {
            return Err(HeaderError::Checksum);
        }
        // The number of buffers is of frames that are received.
        (self.0[10], self.0[11]) = (0, 0);
        Ok(self)
    }

    /// The header of a frame from the host, for a driver that has `negotiated` these features.
    ///
    /// # Errors
    /// [`HeaderError`]: the driver cannot take the frame. The host has it for an earlier one.
    #[inline]
    pub const fn for_driver(mut self, negotiated: u64) -> Result<Self, HeaderError> {
        let needs_checksum = self.0[0] & NEEDS_CSUM != 0;
        if negotiated & features::GUEST_CSUM == 0 {
            if needs_checksum {
                return Err(HeaderError::Checksum);
            }
            // Nor is it told that a checksum was looked at.
            self.0[0] = 0;
        }
        let wanted = match self.0[1] & !GSO_ECN {
            GSO_NONE => 0,
            GSO_TCPV4 => features::GUEST_TSO4,
            GSO_TCPV6 => features::GUEST_TSO6,
            _ => return Err(HeaderError::Segmentation),
        };
        let ecn = if self.0[1] & GSO_ECN != 0 { features::GUEST_ECN } else { 0 };
        if wanted & !negotiated != 0 || ecn & !negotiated != 0 {
            return Err(HeaderError::Segmentation);
        }
        Ok(self)
    }

    /// Whether the frame's checksum is left to whoever has it.
    #[must_use]
    #[inline]
    pub const fn needs_checksum(&self) -> bool {
        self.0[0] & NEEDS_CSUM != 0
    }

    /// From where on the checksum sums up, and where behind that it is: bytes.
    #[must_use]
    #[inline]
    pub const fn checksum(&self) -> (u16, u16) {
        (self.u16(6), self.u16(8))
    }

    /// What is to be cut into segments, if it is.
    #[must_use]
    #[inline]
    pub const fn segmented(&self) -> Option<Kind> {
        match self.0[1] & !GSO_ECN {
            GSO_TCPV4 => Some(Kind::Tcp4),
            GSO_TCPV6 => Some(Kind::Tcp6),
            _ => None,
        }
    }

    /// Bytes of data of each segment but the last.
    #[must_use]
    #[inline]
    pub const fn segment_bytes(&self) -> u16 {
        self.u16(4)
    }

    /// Checks what [`Self::from_driver`] has left against a frame of `length` bytes, where no kernel does it
    /// (`virtio_net_hdr_to_skb`), and says how long its headers are where the driver has not.
    ///
    /// # Errors
    /// [`HeaderError::Misfit`]
    #[inline]
    pub fn fitting(mut self, head: &Head, length: usize) -> Result<Self, HeaderError> {
        let (start, offset) = self.checksum();
        let (start, offset) = (usize::from(start), usize::from(offset));
        if !self.needs_checksum() {
            // Nothing is to be done, wherever it is said to be.
            self.0[2..10].fill(0);
            return Ok(self);
        }
        // A checksum is two bytes of the sender's choice, which whoever completes it writes when the switch has looked at addresses, tag
        // and sender of ARP: it lies behind these.
        let (payload, ethertype) = head.payload();
        if start < payload || ethertype == ARP || start + offset + 2 > length {
            return Err(HeaderError::Misfit);
        }
        let Some(kind) = self.segmented() else {
            self.0[2..6].fill(0);
            return Ok(self);
        };
        let (expected, ip) = match kind {
            Kind::Tcp4 => (IPV4, 20),
            Kind::Tcp6 => (IPV6, 40),
        };
        // The offset of TCP's checksum, and its header.
        let headers = start + 20;
        let fits = ethertype == expected && start >= payload + ip && offset == 16;
        if !fits || headers > length || self.segment_bytes() == 0 {
            return Err(HeaderError::Misfit);
        }
        let told = usize::from(self.u16(2));
        if !(headers..=length).contains(&told) {
            self.put(2, headers as u16);
        }
        Ok(self)
    }

    /// Of the same frame with a tag that has been put in, or taken out.
    #[must_use]
    #[inline]
    pub fn with_tag(mut self, is_in: bool) -> Self {
        if self.needs_checksum() {
            let tag = TAG_BYTES as u16;
            let moved =
                |at: u16| if is_in { at.saturating_add(tag) } else { at.saturating_sub(tag) };
            self.put(6, moved(self.u16(6)));
            if self.segmented().is_some() {
                self.put(2, moved(self.u16(2)));
            }
        }
        self
    }

    #[inline]
    const fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    #[inline]
    const fn put(&mut self, at: usize, value: u16) {
        [self.0[at], self.0[at + 1]] = value.to_le_bytes();
    }

    /// Says in how many buffers the frame lies.
    #[must_use]
    #[inline]
    pub const fn in_buffers(mut self, buffers: u16) -> Self {
        self.put(10, buffers);
        self
    }
}

/// A request of RARP for whom `mac` is (RFC 903), which tells switches where the guest is now, padded to the
/// least length of a frame: what QEMU sends after a migration (`net/announce.c`).
#[must_use]
pub fn announcement(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // RARP; Ethernet, IPv4, their lengths, request reverse.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: u64 = features::ALWAYS;

    fn header(flags: u8, gso: u8) -> Header {
        let mut bytes = [0; BYTES];
        (bytes[0], bytes[1]) = (flags, gso);
        Header(bytes)
    }

    #[test]
    fn only_what_was_negotiated_goes_on() {
        assert_eq!(header(1, 1).from_driver(ALL), Ok(header(1, 1)));
        assert_eq!(header(1, 0x84).from_driver(ALL), Ok(header(1, 0x84)));
        assert_eq!(header(1, 0).from_driver(0), Err(HeaderError::Checksum));
        assert_eq!(
            header(1, 1).from_driver(ALL & !features::HOST_TSO4),
            Err(HeaderError::Segmentation)
        );
        assert_eq!(
            header(1, 0x81).from_driver(ALL & !features::HOST_ECN),
            Err(HeaderError::Segmentation)
        );
        // UFO and USO are not offered; a segment without a checksum cannot be.
        assert_eq!(header(1, 3).from_driver(ALL), Err(HeaderError::Segmentation));
        assert_eq!(header(0, 1).from_driver(ALL), Err(HeaderError::Checksum));
        // What is the device's to say is dropped.
        assert_eq!(header(0xfe, 0x80).from_driver(ALL & !features::HOST_ECN), Ok(header(0, 0)));
    }

    #[test]
    fn driver_is_given_what_it_negotiated_alone() {
        assert_eq!(header(1, 1).for_driver(ALL), Ok(header(1, 1)));
        assert_eq!(header(2, 0).for_driver(0), Ok(header(0, 0)));
        assert_eq!(header(1, 0).for_driver(0), Err(HeaderError::Checksum));
        assert_eq!(header(1, 4).for_driver(features::GUEST_CSUM), Err(HeaderError::Segmentation));
        assert_eq!(header(1, 5).for_driver(ALL), Err(HeaderError::Segmentation));
    }

    #[test]
    fn buffers_are_little_endian() {
        assert_eq!(Header::COMPLETE.in_buffers(0x0102).0[10..], [2, 1]);
    }

    proptest! {
        /// Whatever a driver writes.
        #[test]
        fn no_bit_goes_on_that_was_not_negotiated(bytes: [u8; BYTES], negotiated: u64) {
            if let Ok(Header(found)) = Header(bytes).from_driver(negotiated) {
                prop_assert!(found[0] & !NEEDS_CSUM == 0);
                prop_assert!(found[0] == 0 || negotiated & features::CSUM != 0);
                prop_assert!([0, 1, 4, 0x81, 0x84].contains(&found[1]));
                prop_assert!(found[1] & 0x7f != 1 || negotiated & features::HOST_TSO4 != 0);
                prop_assert!(found[1] & 0x7f != 4 || negotiated & features::HOST_TSO6 != 0);
            }
        }
    }

    proptest! {
        /// A complete frame's header is looked at no further, which must not say anything else.
        #[test]
        fn complete_header_is_what_the_checks_make_of_it(
            bytes: [u8; BYTES], flags: u8, segmentation in 0..2_u8, negotiated: u64,
        ) {
            let mut header = Header(bytes);
            (header.0[0], header.0[1]) = (flags, segmentation);
            let checked = header.from_driver(negotiated);
            let fitting = checked.and_then(|header| header.fitting(&tcp(64), 64));
            if header.is_complete() {
                prop_assert_eq!(fitting, Ok(Header::COMPLETE));
            } else {
                prop_assert_ne!(fitting, Ok(Header::COMPLETE));
            }
        }
    }

    proptest! {
        /// What forwarding is decided by is not changed by a checksum that is completed behind that, whatever tag the frame has by then.
        #[test]
        fn checksum_changes_nothing_that_was_looked_at(
            mut frame in proptest::collection::vec(any::<u8>(), 14..100),
            ethertype in prop::sample::select(vec![IPV4, IPV6, ARP, 0x8100, 0x88a8]),
            inner in prop::sample::select(vec![IPV4, ARP]),
            start in 0..60_u16,
            offset in 0..30_u16,
            takes_tag: bool,
        ) {
            frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
            if let Some(behind) = frame.get_mut(16..18) {
                behind.copy_from_slice(&inner.to_be_bytes());
            }
            let mut head = Head::new(&frame).unwrap();
            let mut header = header(NEEDS_CSUM, 0);
            header.put(6, start);
            header.put(8, offset);
            let Ok(mut header) = header.fitting(&head, frame.len()) else { return Ok(()) };
            if takes_tag && head.take_tag().is_some() {
                frame.drain(12..16);
                header = header.with_tag(false);
            }
            let before = frame.clone();
            crate::offload::complete_checksum(&mut frame, &header).unwrap();
            let (payload, carried) = head.payload();
            prop_assert_eq!(&frame[..payload.min(frame.len())], &before[..payload.min(before.len())]);
            prop_assert!(carried != ARP);
        }
    }

    /// Of TCP over IPv4 without options.
    fn tcp(length: usize) -> Head {
        let mut frame = vec![0; length];
        frame[12..14].copy_from_slice(&IPV4.to_be_bytes());
        frame[14] = 0x45;
        Head::new(&frame).unwrap()
    }

    fn with(flags: u8, gso: u8, words: [u16; 4]) -> Header {
        let mut found = header(flags, gso);
        (2..).step_by(2).zip(words).for_each(|(at, word)| found.put(at, word));
        found
    }

    #[test]
    fn header_that_does_not_fit_its_frame_goes_no_further() {
        let misfit = Err(HeaderError::Misfit);
        for (words, fits) in [
            ([54, 1448, 34, 16], true),
            // The length of the headers is told, or put right.
            ([0, 1448, 34, 16], true),
            ([0, 0, 34, 16], false),
            ([0, 1448, 33, 16], false),
            ([0, 1448, 34, 6], false),
            ([0, 1448, 981, 16], false),
            ([0, 1448, u16::MAX, 16], false),
        ] {
            let found = with(1, 1, words).fitting(&tcp(1000), 1000);
            match fits {
                true => assert_eq!(found, Ok(with(1, 1, [54, words[1], words[2], words[3]]))),
                false => assert_eq!(found, misfit, "{words:?}"),
            }
        }
        // Behind any number of tags there may be the sender of ARP.
        let mut arp = [0; 64];
        arp[12..22].copy_from_slice(&[0x81, 0, 0, 0, 0x81, 0, 0, 0, 8, 6]);
        let arp = Head::new(&arp).unwrap();
        assert_eq!(with(1, 0, [0, 0, 22, 8]).fitting(&arp, 64), misfit);
        // Of another kind than the frame.
        assert_eq!(with(1, 4, [0, 1448, 54, 16]).fitting(&tcp(1000), 1000), misfit);
        assert_eq!(with(1, 0, [9, 9, 34, 65_000]).fitting(&tcp(60), 60), misfit);
        assert_eq!(with(1, 0, [9, 9, 34, 6]).fitting(&tcp(60), 60), Ok(with(1, 0, [0, 0, 34, 6])));
        assert_eq!(with(0, 0, [9; 4]).fitting(&tcp(60), 60), Ok(Header::COMPLETE));
    }

    #[test]
    fn places_move_with_a_tag() {
        let before = with(1, 1, [54, 1448, 34, 16]);
        let tagged = with(1, 1, [58, 1448, 38, 16]);
        assert_eq!((before.with_tag(true), tagged.with_tag(false)), (tagged, before));
        assert_eq!(Header::COMPLETE.with_tag(true), Header::COMPLETE);
    }

    #[test]
    fn announcement_is_a_rarp_request_of_the_guest() {
        let frame = announcement([2, 0, 0, 0, 0, 7]);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 0x80, 0x35]);
        assert_eq!((frame[21], frame[27], frame[37]), (3, 7, 7));
    }
}
