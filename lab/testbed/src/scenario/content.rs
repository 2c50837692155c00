//! What requests write, and what reads must find: content that tells where and when it was written.
//!
//! A *slot* is a request at a time with a part of the disk of its own, its *area*, so what a read must
//! find is known without a lock. Each sector of an area has a *generation*: how often it was written. Its
//! content follows from seed, place and generation: 64 words, each one more than the one before, so it is
//! made and compared at the speed of memory, and every byte counts. Generation 0 is zeroes.

use std::fmt;

use crate::random::Random;

/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;

/// A request that did not do what it was to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("VM {vm}, queue {queue}: {what}")]
pub struct Unverified {
    /// Its disk's.
    pub vm: usize,
    /// Of the disk.
    pub queue: usize,
    /// What it did.
    pub what: String,
}

/// What a read found instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wrong {
    /// On the disk.
    pub sector: u64,
    pub generation: u32,
    found: Found,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Zeroes,
    /// What an earlier write left.
    Stale(u32),
    Else,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sector, generation, found } = self;
        write!(f, "sector {sector} should be of write {generation}, and holds ")?;
        match found {
            Found::Zeroes => f.write_str("zeroes"),
            Found::Stale(generation) => write!(f, "that of write {generation}"),
            Found::Else => f.write_str("neither that nor any before it"),
        }
    }
}

/// A slot's area.
#[derive(Debug)]
pub(super) struct Area {
    /// Tells disks and runs apart.
    seed: u64,
    /// The first sector on the disk.
    first: u64,
    generations: Vec<u32>,
}

impl Area {
    pub(super) fn new(seed: u64, first: u64, sectors: usize) -> Self {
        Self { seed, first, generations: vec![0; sectors] }
    }

    pub(super) const fn sectors(&self) -> usize {
        self.generations.len()
    }

    /// Byte on the disk of a sector of the area.
    pub(super) const fn offset(&self, sector: usize) -> u64 {
        (self.first + sector as u64) * SECTOR as u64
    }

    /// The first word of a sector.
    const fn word(&self, sector: usize, generation: u32) -> u64 {
        let place = (self.first + sector as u64).rotate_left(32) ^ generation as u64;
        Random::new(self.seed ^ place).next()
    }

    /// Fills `buffer` with what is written next from `sector` on.
    pub(super) fn fill(&mut self, sector: usize, buffer: &mut [u8]) {
        for (at, bytes) in buffer.chunks_exact_mut(SECTOR).enumerate() {
            let sector = sector + at;
            let generation = self.generations[sector].wrapping_add(1).max(1);
            self.generations[sector] = generation;
            let mut word = self.word(sector, generation);
            for bytes in bytes.chunks_exact_mut(8) {
                bytes.copy_from_slice(&word.to_le_bytes());
                word = word.wrapping_add(1);
            }
        }
    }

    /// Whether `buffer` holds what was written last from `sector` on.
    pub(super) fn check(&self, sector: usize, buffer: &[u8]) -> Result<(), Wrong> {
        for (at, bytes) in buffer.chunks_exact(SECTOR).enumerate() {
            let generation = self.generations[sector + at];
            if !self.holds(sector + at, generation, bytes) {
                return Err(self.wrong(sector + at, bytes));
            }
        }
        Ok(())
    }

    fn holds(&self, sector: usize, generation: u32, bytes: &[u8]) -> bool {
        let (mut word, step) = match generation {
            0 => (0, 0),
            generation => (self.word(sector, generation), 1),
        };
        let mut differs = 0;
        for bytes in bytes.as_chunks::<8>().0 {
            differs |= u64::from_le_bytes(*bytes) ^ word;
            word = word.wrapping_add(step);
        }
        differs == 0
    }

    fn wrong(&self, sector: usize, bytes: &[u8]) -> Wrong {
        let generation = self.generations[sector];
        let stale = (1..generation).rev().take(10_000).find(|&g| self.holds(sector, g, bytes));
        let found = match stale {
            Some(generation) => Found::Stale(generation),
            None if self.holds(sector, 0, bytes) => Found::Zeroes,
            None => Found::Else,
        };
        Wrong { sector: self.first + sector as u64, generation, found }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_last_is_right_and_all_else_is_wrong_by_name() {
        let mut area = Area::new(1, 800, 16);
        let mut sectors = vec![0; 4 * SECTOR];
        assert_eq!(area.check(4, &sectors), Ok(()));
        area.fill(4, &mut sectors);
        assert_eq!(area.check(4, &sectors), Ok(()));
        let first = sectors.clone();
        area.fill(5, &mut sectors[SECTOR..2 * SECTOR]);
        assert_eq!(area.check(4, &sectors), Ok(()));
        let wrong = area.check(4, &first).unwrap_err();
        assert_eq!(wrong.to_string(), "sector 805 should be of write 2, and holds that of write 1");
        let wrong = area.check(4, &[0; SECTOR]).unwrap_err();
        assert_eq!(wrong.to_string(), "sector 804 should be of write 1, and holds zeroes");
        // Another place's.
        let wrong = area.check(6, &sectors[3 * SECTOR..]).unwrap_err();
        assert!(wrong.to_string().ends_with("neither that nor any before it"), "{wrong}");
    }

    #[test]
    fn any_changed_byte_is_wrong_and_other_seeds_write_otherwise() {
        let mut area = Area::new(1, 0, 1);
        let mut sector = [0; SECTOR];
        area.fill(0, &mut sector);
        for at in [0, 7, 8, 255, 504, 511] {
            sector[at] ^= 1;
            assert!(area.check(0, &sector).is_err(), "byte {at}");
            sector[at] ^= 1;
        }
        let mut other = Area::new(2, 0, 1);
        other.fill(0, &mut [0; SECTOR]);
        assert!(other.check(0, &sector).is_err());
    }
}
