//! The features of a block device that are offered, and those that are not, with the reason
//! (virtio 1.2, 5.2.3).

use rtvirtio_vhost::protocol::features::{self, Declined, declined};

/// VIRTIO_BLK_F_SEG_MAX
pub const BLK_SEG_MAX: u64 = 1 << 2;
/// VIRTIO_BLK_F_RO
pub const BLK_RO: u64 = 1 << 5;
/// VIRTIO_BLK_F_BLK_SIZE
pub const BLK_SIZE: u64 = 1 << 6;
/// VIRTIO_BLK_F_FLUSH
pub const BLK_FLUSH: u64 = 1 << 9;
/// VIRTIO_BLK_F_TOPOLOGY
pub const BLK_TOPOLOGY: u64 = 1 << 10;
/// VIRTIO_BLK_F_CONFIG_WCE
pub const BLK_CONFIG_WCE: u64 = 1 << 11;
/// VIRTIO_BLK_F_MQ
pub const BLK_MQ: u64 = 1 << 12;
/// VIRTIO_BLK_F_DISCARD
pub const BLK_DISCARD: u64 = 1 << 13;
/// VIRTIO_BLK_F_WRITE_ZEROES
pub const BLK_WRITE_ZEROES: u64 = 1 << 14;

/// Offered by every disk; the others depend on what it is made of.
pub const ALWAYS: u64 =
    features::ALWAYS | BLK_SEG_MAX | BLK_SIZE | BLK_FLUSH | BLK_TOPOLOGY | BLK_CONFIG_WCE | BLK_MQ;

/// The features of a block device that are not offered.
pub const DECLINED: &[Declined] = &[
    declined(0, "VIRTIO_BLK_F_BARRIER", "legacy: flushes have replaced barriers"),
    declined(1, "VIRTIO_BLK_F_SIZE_MAX", "a segment of any length is served"),
    declined(4, "VIRTIO_BLK_F_GEOMETRY", "no disk here has cylinders; firmware makes up its own"),
    declined(7, "VIRTIO_BLK_F_SCSI", "legacy: no SCSI commands behind a block device"),
    declined(15, "VIRTIO_BLK_F_LIFETIME", "the engines do not know the wear of their medium"),
    declined(16, "VIRTIO_BLK_F_SECURE_ERASE", "no engine can promise that nothing is left"),
    declined(17, "VIRTIO_BLK_F_ZONED", "raw images and plain disks have no zones"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_of_a_block_device_are_offered_or_declined_with_a_reason() {
        let declined = DECLINED.iter().fold(0, |bits, declined| bits | 1 << declined.bit);
        let offered = (ALWAYS | BLK_RO | BLK_DISCARD | BLK_WRITE_ZEROES) & ((1 << 24) - 1);
        assert_eq!(offered & declined, 0);
        // 3, 8 and 18 to 23 mean nothing to a block device.
        let nameless = 1 << 3 | 1 << 8 | 0b11_1111 << 18;
        assert_eq!(offered | declined | nameless, (1 << 24) - 1);
        assert!(DECLINED.iter().all(|declined| !declined.reason.is_empty()));
    }

    #[test]
    fn offered_features_have_the_numbers_of_the_specification() {
        assert_eq!(ALWAYS, 0x5_7400_1e44);
    }
}
