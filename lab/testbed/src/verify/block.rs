//! A block's content: it tells its place, its generation and the run, under a
//! CRC-32C. A block that is whole but elsewhere, stale, or another run's is as
//! wrong as one whose bits changed.
//!
//! Layout, little-endian: magic, block, generation, seed (8 bytes each), filler that
//! follows from them, CRC-32C of all before it in the last 4 bytes.

use std::fmt;

use crate::load::BLOCK;
use crate::random::Random;

const MAGIC: u64 = u64::from_le_bytes(*b"rtv-data");
const HEADER: usize = 32;
const CRC: usize = BLOCK - 4;

/// Where and when a block was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Its number on the disk.
    pub block: u64,
    /// The write, counted by its queue.
    pub generation: u64,
    /// The run.
    pub seed: u64,
}

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Zeroes only.
    Zeroes,
    /// What a verifier wrote.
    Tagged(Tag),
    /// Neither.
    Garbage,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeroes => write!(f, "zeroes"),
            Self::Tagged(tag) => {
                write!(f, "block {} of generation {}, seed {}", tag.block, tag.generation, tag.seed)
            }
            Self::Garbage => write!(f, "neither zeroes nor a whole tagged block"),
        }
    }
}

impl Tag {
    /// Writes the block.
    ///
    /// # Panics
    /// If `block` is not 4 KiB.
    pub fn fill(self, block: &mut [u8]) {
        assert_eq!(block.len(), BLOCK);
        let header = [MAGIC, self.block, self.generation, self.seed];
        for (word, value) in block.chunks_exact_mut(8).zip(header) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        let mut filler = Random::new(self.block ^ self.generation.rotate_left(32) ^ self.seed);
        for word in block[HEADER..].chunks_exact_mut(8) {
            word.copy_from_slice(&filler.next().to_le_bytes());
        }
        let crc = crc32c::crc32c(&block[..CRC]);
        block[CRC..].copy_from_slice(&crc.to_le_bytes());
    }
}

/// What a block of 4 KiB holds.
pub(super) fn look(block: &[u8]) -> Seen {
    let word = |index: usize| {
        block.get(index * 8..index * 8 + 8).and_then(|w| w.try_into().ok()).map(u64::from_le_bytes)
    };
    if block.iter().all(|&byte| byte == 0) {
        return Seen::Zeroes;
    }
    let whole = block.len() == BLOCK
        && word(0) == Some(MAGIC)
        && crc32c::crc32c(&block[..CRC]).to_le_bytes() == block[CRC..];
    match (whole, word(1), word(2), word(3)) {
        (true, Some(block), Some(generation), Some(seed)) => {
            Seen::Tagged(Tag { block, generation, seed })
        }
        _ => Seen::Garbage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: Tag = Tag { block: 7, generation: 3, seed: 9 };

    #[test]
    fn filled_block_is_seen_as_its_tag() {
        let mut block = [0; BLOCK];
        assert_eq!(look(&block), Seen::Zeroes);
        TAG.fill(&mut block);
        assert_eq!(look(&block), Seen::Tagged(TAG));
    }

    #[test]
    fn any_changed_bit_is_garbage() {
        let mut block = [0; BLOCK];
        TAG.fill(&mut block);
        for at in [0, 8, 16, 24, 32, 2000, CRC - 1, CRC, BLOCK - 1] {
            block[at] ^= 0x10;
            assert_eq!(look(&block), Seen::Garbage, "byte {at}");
            block[at] ^= 0x10;
        }
        assert_eq!(look(&block[..512]), Seen::Garbage);
    }
}
