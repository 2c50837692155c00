//! `struct virtio_net_hdr` (virtio 1.2, 5.1.6): what comes before each frame in a virtqueue.
//!
//! A driver's header says of what its frame still needs: a checksum, segmentation. It is copied before it
//! is looked at, for the driver may change it meanwhile, and only what was negotiated goes on; whether
//! it fits the frame says the kernel, which checks it for every TAP (`virtio_net_hdr_to_skb`).

use crate::features;

/// Bytes of the header with VIRTIO_F_VERSION_1.
pub const BYTES: usize = 12;
/// Bytes of an Ethernet header, without which there is no frame.
pub const ETHERNET: usize = 14;
/// The longest frame with segmentation offload: 64 KiB of IP and the Ethernet header (virtio 1.2, 5.1.6.3.1:
/// 65,550 bytes with a virtio header of 12 bytes less these), and a VLAN tag.
pub const MAX_FRAME_BYTES: usize = 65_535 + ETHERNET + 4;

/// VIRTIO_NET_HDR_F_NEEDS_CSUM
const NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_GSO_NONE, _TCPV4, _TCPV6, and the bit _ECN.
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

impl Header {
    /// A frame that is complete.
    pub const COMPLETE: Self = Self([0; BYTES]);

    /// The header of a driver's frame, of what it has `negotiated` alone.
    ///
    /// # Errors
    /// [`HeaderError`]: the frame cannot be sent as it is.
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

    /// Says in how many buffers the frame lies.
    #[must_use]
    pub const fn in_buffers(mut self, buffers: u16) -> Self {
        let bytes = buffers.to_le_bytes();
        (self.0[10], self.0[11]) = (bytes[0], bytes[1]);
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

    #[test]
    fn announcement_is_a_rarp_request_of_the_guest() {
        let frame = announcement([2, 0, 0, 0, 0, 7]);
        assert_eq!(frame[..14], [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 7, 0x80, 0x35]);
        assert_eq!((frame[21], frame[27], frame[37]), (3, 7, 7));
    }
}
