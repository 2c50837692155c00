//! Which cells there are, and in which order they run.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64Mcg;

use super::{CellKey, Io, Mode, Target};

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// What the acceptance asks for: T of 1, 2, 8, 32 and C of 0, n, 2n for n CPUs; 128 KiB at the
    /// corners of these; on the emulated device the modes that are compared there.
    Acceptance,
    /// T of 1 to 32 and C of 0, n/2, n, 2n: every mode on every target.
    Full,
}

/// The cells of one repetition, in the order of tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Matrix {
    io: Vec<(Io, usize)>,
}

impl Matrix {
    /// On so many CPUs.
    pub(super) fn new(extent: Extent, cpus: usize) -> Self {
        let (threads, mut compute): (&[usize], _) = match extent {
            Extent::Acceptance => (&[1, 2, 8, 32], vec![0, cpus, 2 * cpus]),
            Extent::Full => (&[1, 2, 4, 8, 16, 32], vec![0, cpus / 2, cpus, 2 * cpus]),
        };
        // On one CPU n/2 is 0.
        compute.dedup();
        let acceptance = extent == Extent::Acceptance;
        let compared = [Mode::Pread, Mode::Interrupt, Mode::Poll, Mode::Adaptive];
        let mut io = Vec::new();
        for target in Target::ALL {
            let modes: &[Mode] =
                if acceptance && target == Target::Emulated { &compared } else { &Mode::ALL };
            for &compute in &compute {
                for &threads in threads {
                    let corner = [1, 32].contains(&threads) && [0, 2 * cpus].contains(&compute);
                    if acceptance && target == Target::File128k && !corner {
                        continue;
                    }
                    let of = |&mode| (Io { target, mode, threads }, compute);
                    io.extend(modes.iter().map(of));
                }
            }
        }
        Self { io }
    }

    /// Only the cells that `keep` says, by I/O side and compute threads.
    pub(super) fn retain(&mut self, keep: impl Fn(&Io, usize) -> bool) {
        self.io.retain(|(io, compute)| keep(io, *compute));
    }

    /// Whether there is nothing to measure.
    pub(super) fn is_empty(&self) -> bool {
        self.io.is_empty()
    }

    /// Every cell of so many repetitions, in the order in which they run.
    pub(super) fn keys(&self, repetitions: u32, seed: u64) -> Vec<CellKey> {
        let mut random = Pcg64Mcg::seed_from_u64(seed);
        let mut keys = Vec::new();
        for repetition in 0..repetitions {
            let mut places: Vec<Vec<CellKey>> = self
                .io
                .chunk_by(|(a, b), (c, d)| (a.target, a.threads, b) == (c.target, c.threads, d))
                .map(|place| {
                    let key = |&(io, compute)| CellKey { io: Some(io), compute, repetition };
                    place.iter().map(key).collect()
                })
                .collect();
            let mut compute: Vec<usize> = self.io.iter().map(|(_, compute)| *compute).collect();
            compute.sort_unstable();
            compute.dedup();
            let alone = compute.into_iter().filter(|&compute| compute > 0);
            places.extend(alone.map(|compute| vec![CellKey { io: None, compute, repetition }]));
            places.shuffle(&mut random);
            for mut place in places {
                place.shuffle(&mut random);
                keys.append(&mut place);
            }
        }
        keys
    }
}
