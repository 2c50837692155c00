//! What a controller and a namespace say of themselves: the answers to Identify, 4096 bytes that may
//! hold anything.
//!
//! Fields: NVM Express Base Specification 2.0, figure "Identify Controller Data Structure"; NVM Command
//! Set Specification 1.0, figures "Identify Namespace Data Structure" and "LBA Format Data Structure".

/// Bytes of an answer.
pub(super) const BYTES: usize = 4096;
/// Least and most bits of a logical block's size that are served: 512 and 4096 bytes.
const SHIFTS: std::ops::RangeInclusive<u8> = 9..=12;
/// The unit of [`Controller::max_bytes`] is the controller's least page, of 4096 bytes or more.
const PAGE: u64 = 4096;

/// Why a namespace cannot be a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// It has no blocks, or more than can be counted in bytes.
    #[error("the namespace says that it has {blocks} blocks of 2^{shift} bytes")]
    Size {
        /// Logical blocks.
        blocks: u64,
        /// Bits of a block's size.
        shift: u8,
    },
    /// Blocks of a size that is not served.
    #[error(
        "the namespace's logical blocks have 2^{0} bytes: format it with 512 or 4096 (nvme format --block-size=4096)"
    )]
    Block(u8),
    /// Blocks with metadata.
    #[error(
        "the namespace has {0} bytes of metadata with each block: format it without (nvme format --lbaf=...)"
    )]
    Metadata(u16),
}

/// How a namespace's blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Format {
    /// Bits of a logical block's size.
    pub(super) block_shift: u8,
    /// Whether a block that is deallocated by a write-zeroes reads as zeroes.
    pub(super) zeroes_when_deallocated: bool,
}

/// A namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Namespace {
    pub(super) format: Format,
    /// Bytes.
    pub(super) capacity: u64,
    pub(super) write_protected: bool,
}

impl Namespace {
    pub(super) fn parse(answer: &[u8; BYTES]) -> Result<Self, FormatError> {
        let blocks = le(answer, 0, 8);
        let flbas = answer[26];
        // Bits 3:0, and 6:5 above them where there are more than 16 formats.
        let high = if answer[25] >= 16 { flbas >> 5 & 3 } else { 0 };
        let at = 128 + 4 * usize::from(high << 4 | flbas & 0xf);
        let metadata = le(answer, at, 2) as u16;
        let shift = answer[at + 2];
        if !SHIFTS.contains(&shift) {
            return Err(FormatError::Block(shift));
        }
        if metadata != 0 {
            return Err(FormatError::Metadata(metadata));
        }
        let capacity =
            blocks.checked_mul(1 << shift).filter(|&bytes| bytes > 0 && bytes <= i64::MAX as u64);
        let capacity = capacity.ok_or(FormatError::Size { blocks, shift })?;
        // DLFEAT: deallocated blocks read as zeroes (bits 2:0), and a write-zeroes deallocates.
        let zeroes_when_deallocated = answer[33] & 0xf == 0b1001;
        let format = Format { block_shift: shift, zeroes_when_deallocated };
        Ok(Self { format, capacity, write_protected: answer[99] & 1 != 0 })
    }
}

/// A controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Controller {
    /// The most bytes that a command may transfer.
    pub(super) max_bytes: u64,
    /// Whether completed writes may be lost with the power, until a flush.
    pub(super) write_cache: bool,
    pub(super) discard: bool,
    pub(super) write_zeroes: bool,
}

impl Controller {
    pub(super) fn parse(answer: &[u8; BYTES]) -> Self {
        // MDTS, a power of two; 0: no limit.
        let max_bytes = match answer[77] {
            0 => u64::MAX,
            power => {
                PAGE.checked_shl(power.into()).filter(|&bytes| bytes >= PAGE).unwrap_or(u64::MAX)
            }
        };
        // ONCS and VWC.
        let optional = le(answer, 520, 2);
        Self {
            max_bytes,
            write_cache: answer[525] & 1 != 0,
            discard: optional & 1 << 2 != 0,
            write_zeroes: optional & 1 << 3 != 0,
        }
    }
}

fn le(answer: &[u8; BYTES], at: usize, bytes: usize) -> u64 {
    answer[at..at + bytes].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};

    use super::*;

    /// A namespace of 0x1000 blocks, whose format 2 has 4096 bytes and which uses format `used`.
    fn namespace(used: u8) -> [u8; BYTES] {
        let mut answer = [0; BYTES];
        answer[1] = 0x10;
        answer[25] = 2;
        answer[26] = used;
        // 512 bytes; 512 with 8 of metadata; 4096.
        answer[128..140].copy_from_slice(&[0, 0, 9, 0, 8, 0, 9, 0, 0, 0, 12, 0]);
        answer
    }

    #[test]
    fn namespace_is_what_the_used_format_says() {
        let small = Namespace::parse(&namespace(0)).unwrap();
        let format = Format { block_shift: 9, zeroes_when_deallocated: false };
        assert_eq!(small, Namespace { format, capacity: 0x20_0000, write_protected: false });
        // Bit 4 is about metadata, of which there is none.
        let large = Namespace::parse(&namespace(0x12)).unwrap();
        assert_eq!((large.format.block_shift, large.capacity), (12, 0x100_0000));
        let mut protected = namespace(0);
        protected[99] = 1;
        protected[33] = 0b1001;
        let found = Namespace::parse(&protected).unwrap();
        assert!(found.write_protected && found.format.zeroes_when_deallocated);
        // Reads as ones, or is not deallocated.
        for features in [0b1010, 0b0001] {
            protected[33] = features;
            assert!(!Namespace::parse(&protected).unwrap().format.zeroes_when_deallocated);
        }
    }

    #[test]
    fn format_beyond_the_sixteenth_is_found_by_its_high_bits() {
        // Index 0x21: bits 6:5 are 2.
        let mut answer = namespace(0b0100_0001);
        answer[128 + 4 * 0x21 + 2] = 12;
        // Fewer formats than 17: these bits mean nothing, and format 1 has metadata.
        assert_eq!(Namespace::parse(&answer), Err(FormatError::Metadata(8)));
        answer[25] = 63;
        assert_eq!(Namespace::parse(&answer).unwrap().format.block_shift, 12);
    }

    #[test]
    fn namespace_that_is_no_disk_is_refused() {
        assert_eq!(Namespace::parse(&[0; BYTES]), Err(FormatError::Block(0)));
        assert_eq!(Namespace::parse(&[0xff; BYTES]), Err(FormatError::Block(0xff)));
        assert_eq!(Namespace::parse(&namespace(1)), Err(FormatError::Metadata(8)));
        assert_eq!(Namespace::parse(&namespace(3)), Err(FormatError::Block(0)));
        let mut none = namespace(0);
        none[1] = 0;
        assert_eq!(Namespace::parse(&none), Err(FormatError::Size { blocks: 0, shift: 9 }));
        let mut endless = namespace(0);
        endless[..8].fill(0xff);
        let error = FormatError::Size { blocks: u64::MAX, shift: 9 };
        assert_eq!(Namespace::parse(&endless), Err(error));
        // 2^63 bytes: more than a file offset.
        endless[..8].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0x40, 0]);
        assert!(Namespace::parse(&endless).is_err());
    }

    #[test]
    fn controller_says_its_limits_and_what_it_can_do() {
        let mut answer = [0; BYTES];
        let nothing = Controller {
            max_bytes: u64::MAX,
            write_cache: false,
            discard: false,
            write_zeroes: false,
        };
        assert_eq!(Controller::parse(&answer), nothing);
        answer[77] = 7;
        answer[520] = 0b1100;
        answer[525] = 7;
        let all =
            Controller { max_bytes: 524_288, write_cache: true, discard: true, write_zeroes: true };
        assert_eq!(Controller::parse(&answer), all);
        answer[520] = 0b0100;
        answer[525] = 6;
        assert_eq!(
            Controller::parse(&answer),
            Controller { write_cache: false, write_zeroes: false, ..all }
        );
        // Powers that do not fit.
        for power in [52, 63, 64, 255] {
            answer[77] = power;
            assert_eq!(Controller::parse(&answer).max_bytes, u64::MAX, "{power}");
        }
    }

    #[test]
    fn any_bytes_are_refused_or_a_disk_within_bounds() {
        let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(7);
        let (mut answer, mut taken) = ([0; BYTES], 0);
        for _ in 0..20_000 {
            random.fill_bytes(&mut answer);
            Controller::parse(&answer);
            // Else nearly none has a size that is served.
            let used =
                128 + 4 * (usize::from(answer[26] & 0xf) | usize::from(answer[26] >> 5 & 3) << 4);
            answer[used..used + 2].fill(0);
            answer[used + 2] &= 15;
            answer[6..8].fill(0);
            answer[25] |= 16;
            if let Ok(Namespace { format, capacity, .. }) = Namespace::parse(&answer) {
                taken += 1;
                assert!((9..=12).contains(&format.block_shift));
                assert!(capacity > 0 && capacity.is_multiple_of(1 << format.block_shift));
            }
        }
        assert!(taken > 1000, "{taken}");
    }
}
