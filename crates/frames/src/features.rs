//! The features of a network device (virtio 1.2, 5.1.3): what is offered, and what is not, with the
//! reason.

/// VIRTIO_NET_F_CSUM: the driver may leave checksums to the device.
pub const CSUM: u64 = 1 << 0;
/// VIRTIO_NET_F_GUEST_CSUM: the device may leave them to the driver.
pub const GUEST_CSUM: u64 = 1 << 1;
/// VIRTIO_NET_F_MTU
pub const MTU: u64 = 1 << 3;
/// VIRTIO_NET_F_MAC
pub const MAC: u64 = 1 << 5;
/// VIRTIO_NET_F_GUEST_TSO4
pub const GUEST_TSO4: u64 = 1 << 7;
/// VIRTIO_NET_F_GUEST_TSO6
pub const GUEST_TSO6: u64 = 1 << 8;
/// VIRTIO_NET_F_GUEST_ECN
pub const GUEST_ECN: u64 = 1 << 9;
/// VIRTIO_NET_F_HOST_TSO4
pub const HOST_TSO4: u64 = 1 << 11;
/// VIRTIO_NET_F_HOST_TSO6
pub const HOST_TSO6: u64 = 1 << 12;
/// VIRTIO_NET_F_HOST_ECN
pub const HOST_ECN: u64 = 1 << 13;
/// VIRTIO_NET_F_MRG_RXBUF: a frame may lie in several buffers.
pub const MRG_RXBUF: u64 = 1 << 15;
/// VIRTIO_NET_F_STATUS
pub const STATUS: u64 = 1 << 16;
/// VIRTIO_NET_F_MQ
pub const MQ: u64 = 1 << 22;

/// What one side leaves to the other: checksums and segments.
pub const OFFLOADS: u64 =
    CSUM | GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | HOST_TSO4 | HOST_TSO6 | HOST_ECN;
/// Offered by every device whose link knows [`OFFLOADS`]; [`MQ`] by one with several pairs of queues.
pub const ALWAYS: u64 = OFFLOADS | MTU | MAC | MRG_RXBUF | STATUS;

/// The features that are not offered: bit, name, reason.
pub const DECLINED: &[(u8, &str, &str)] = &[
    (2, "VIRTIO_NET_F_CTRL_GUEST_OFFLOADS", "the control queue is the front end's"),
    (6, "VIRTIO_NET_F_GSO", "legacy: the HOST_TSO bits have replaced it"),
    (10, "VIRTIO_NET_F_GUEST_UFO", "Linux 6.2 took UFO out of its TAPs"),
    (14, "VIRTIO_NET_F_HOST_UFO", "the same"),
    (17, "VIRTIO_NET_F_CTRL_VQ", "the front end has the control queue, and offers it itself"),
    (18, "VIRTIO_NET_F_CTRL_RX", "the same"),
    (19, "VIRTIO_NET_F_CTRL_VLAN", "the same"),
    (20, "VIRTIO_NET_F_CTRL_RX_EXTRA", "the same"),
    (21, "VIRTIO_NET_F_GUEST_ANNOUNCE", "the device announces the guest itself (SEND_RARP)"),
    (23, "VIRTIO_NET_F_CTRL_MAC_ADDR", "the front end has the control queue"),
    (53, "VIRTIO_NET_F_NOTF_COAL", "the same; completions are shown in batches anyway"),
    (54, "VIRTIO_NET_F_GUEST_USO4", "TAPs before Linux 6.2 do not segment UDP"),
    (55, "VIRTIO_NET_F_GUEST_USO6", "the same"),
    (56, "VIRTIO_NET_F_HOST_USO", "the same"),
    (57, "VIRTIO_NET_F_HASH_REPORT", "no hash is calculated"),
    (59, "VIRTIO_NET_F_GUEST_HDRLEN", "the header's length is not needed"),
    (60, "VIRTIO_NET_F_RSS", "the host's TAP chooses the queue"),
    (61, "VIRTIO_NET_F_RSC_EXT", "frames are not joined here"),
    (62, "VIRTIO_NET_F_STANDBY", "there is no primary device to stand by for"),
    (63, "VIRTIO_NET_F_SPEED_DUPLEX", "a TAP has neither"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_of_a_network_device_are_offered_or_declined_with_a_reason() {
        let declined = DECLINED.iter().fold(0, |bits, (bit, ..)| bits | 1_u64 << bit);
        let offered = ALWAYS | MQ;
        assert_eq!(offered & declined, 0);
        // 4 means nothing any more.
        assert_eq!((offered | declined | 1 << 4) & ((1 << 24) - 1), (1 << 24) - 1);
        assert!(DECLINED.iter().all(|(_, name, reason)| !name.is_empty() && !reason.is_empty()));
    }

    #[test]
    fn offered_features_have_the_numbers_of_the_specification() {
        assert_eq!(ALWAYS | MQ, 0x41_bbab);
    }
}
