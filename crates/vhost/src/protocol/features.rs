//! The features that are offered to front ends, and those that are not, with the reason.

/// VHOST_F_LOG_ALL: what is written to the guest's memory is logged (live migration).
pub const LOG_ALL: u64 = 1 << 26;
/// VIRTIO_F_INDIRECT_DESC
pub const RING_INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX
pub const RING_EVENT_IDX: u64 = 1 << 29;
/// VHOST_USER_F_PROTOCOL_FEATURES
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// VIRTIO_F_VERSION_1
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_RING_PACKED
pub const RING_PACKED: u64 = 1 << 34;
/// VIRTIO_F_IN_ORDER: buffers are used in the order in which they were made available; of network devices.
pub const IN_ORDER: u64 = 1 << 35;

/// Offered by every device, whatever it is; what else is offered says its
/// [`Backend`](crate::Backend).
pub const ALWAYS: u64 =
    LOG_ALL | RING_INDIRECT_DESC | RING_EVENT_IDX | PROTOCOL_FEATURES | VERSION_1 | RING_PACKED;

/// VHOST_USER_PROTOCOL_F_MQ
pub const PROTOCOL_MQ: u64 = 1 << 0;
/// VHOST_USER_PROTOCOL_F_LOG_SHMFD
pub const PROTOCOL_LOG_SHMFD: u64 = 1 << 1;
/// VHOST_USER_PROTOCOL_F_RARP: of network devices.
pub const PROTOCOL_RARP: u64 = 1 << 2;
/// VHOST_USER_PROTOCOL_F_NET_MTU: of network devices.
pub const PROTOCOL_NET_MTU: u64 = 1 << 4;
/// VHOST_USER_PROTOCOL_F_REPLY_ACK
pub const PROTOCOL_REPLY_ACK: u64 = 1 << 3;
/// VHOST_USER_PROTOCOL_F_BACKEND_REQ
pub const PROTOCOL_BACKEND_REQ: u64 = 1 << 5;
/// VHOST_USER_PROTOCOL_F_CONFIG
pub const PROTOCOL_CONFIG: u64 = 1 << 9;
/// VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD
pub const PROTOCOL_INFLIGHT_SHMFD: u64 = 1 << 12;
/// VHOST_USER_PROTOCOL_F_RESET_DEVICE
pub const PROTOCOL_RESET_DEVICE: u64 = 1 << 13;
/// VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS
pub const PROTOCOL_CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
/// VHOST_USER_PROTOCOL_F_STATUS
pub const PROTOCOL_STATUS: u64 = 1 << 16;

/// The protocol features that are offered for a device of any kind.
pub const PROTOCOL_OFFERED: u64 = PROTOCOL_MQ
    | PROTOCOL_LOG_SHMFD
    | PROTOCOL_REPLY_ACK
    | PROTOCOL_BACKEND_REQ
    | PROTOCOL_CONFIG
    | PROTOCOL_INFLIGHT_SHMFD
    | PROTOCOL_RESET_DEVICE
    | PROTOCOL_CONFIGURE_MEM_SLOTS
    | PROTOCOL_STATUS;

/// A feature that is not offered.
#[derive(Debug, Clone, Copy)]
pub struct Declined {
    /// Its bit.
    pub bit: u8,
    /// Its name in the specification.
    pub name: &'static str,
    /// Why not.
    pub reason: &'static str,
}

/// A feature that is not offered.
#[must_use]
pub const fn declined(bit: u8, name: &'static str, reason: &'static str) -> Declined {
    Declined { bit, name, reason }
}

/// The virtio features of any device that are not offered, but for those of network devices, which say so themselves.
pub const DECLINED: &[Declined] = &[
    declined(24, "VIRTIO_F_NOTIFY_ON_EMPTY", "legacy: EVENT_IDX has replaced it"),
    declined(27, "VIRTIO_F_ANY_LAYOUT", "legacy: part of VERSION_1"),
    declined(33, "VIRTIO_F_ACCESS_PLATFORM", "no IOTLB: the guest's physical addresses are used"),
    declined(
        35,
        "VIRTIO_F_IN_ORDER",
        "of network devices, which offer it; requests complete out of order, and waiting would cost latency",
    ),
    declined(36, "VIRTIO_F_ORDER_PLATFORM", "for hardware: CPUs share coherent memory with us"),
    declined(37, "VIRTIO_F_SR_IOV", "no PCI functions of its own"),
    declined(38, "VIRTIO_F_NOTIFICATION_DATA", "a kick through an eventfd carries no data"),
    declined(39, "VIRTIO_F_NOTIF_CONFIG_DATA", "the same"),
    declined(40, "VIRTIO_F_RING_RESET", "the front end resets a ring by stopping it, unasked"),
    declined(41, "VIRTIO_F_ADMIN_VQ", "no group of devices to administer"),
];

/// The protocol features that are not offered, but for those of network devices, which say so themselves.
pub const PROTOCOL_DECLINED: &[Declined] = &[
    declined(2, "RARP", "of network devices, which offer it"),
    declined(4, "MTU", "of network devices, which offer it"),
    declined(6, "CROSS_ENDIAN", "guests have the host's byte order, or use VERSION_1"),
    declined(7, "CRYPTO_SESSION", "crypto devices only"),
    declined(8, "PAGEFAULT", "postcopy migration: requests would wait for pages of another host"),
    declined(10, "BACKEND_SEND_FD", "no file descriptor is ever sent to a front end's channel"),
    declined(11, "HOST_NOTIFIER", "for hardware doorbells"),
    declined(14, "INBAND_NOTIFICATIONS", "IOThreads wait on eventfds, not on the socket"),
    declined(17, "XEN_MMAP", "no Xen grants"),
    declined(18, "SHARED_OBJECT", "graphics only"),
    declined(19, "DEVICE_STATE", "all state of a stopped device is in its rings and the disk"),
    declined(20, "GET_VRING_BASE_INFLIGHT", "requests in flight are drained, never handed over"),
    declined(21, "GPA_ADDRESSES", "only needed with an IOTLB"),
    declined(22, "SHMEM", "no device here has shared memory regions"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(declined: &[Declined]) -> u64 {
        declined.iter().fold(0, |bits, declined| bits | 1 << declined.bit)
    }

    #[test]
    fn features_of_virtio_are_offered_or_declined_with_a_reason() {
        assert_eq!(ALWAYS & bits(DECLINED), 0);
        // Bits 0 to 23 are the device's, 25 and 31 mean nothing, nor do those from 42 on.
        let others = 0xff_ffff | (1 << 25) | (1 << 31);
        assert_eq!(ALWAYS | bits(DECLINED) | others, (1 << 42) - 1);
        assert!(DECLINED.iter().all(|declined| !declined.reason.is_empty()));
    }

    #[test]
    fn protocol_features_known_are_offered_or_declined_with_a_reason() {
        assert_eq!(PROTOCOL_OFFERED & bits(PROTOCOL_DECLINED), 0);
        assert_eq!(PROTOCOL_OFFERED | bits(PROTOCOL_DECLINED), (1 << 23) - 1);
        assert!(PROTOCOL_DECLINED.iter().all(|declined| !declined.reason.is_empty()));
    }

    #[test]
    fn offered_features_have_the_numbers_of_the_specification() {
        // virtio 1.2, 6, and VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES.
        assert_eq!(ALWAYS, 0x5_7400_0000);
        // Bits 0, 1, 3, 5, 9, 12, 13, 15 and 16.
        assert_eq!(PROTOCOL_OFFERED, 0x1_b22b);
    }
}
