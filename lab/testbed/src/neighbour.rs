//! Who shares the device with the VMs.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rtvirtio_units::{Iops, Nanos};

use crate::client::{Client, Endpoint, MAX_DEPTH, Queue, Shape};
use crate::tasks::{Between, PATIENCE, Plan};
use crate::window::Phase;

const KIB: usize = 1 << 10;

named! {
    /// What the VM does that is not judged.
    #[derive(Default)]
    pub enum Neighbour {
        /// Random 128 KiB writes at depth 64, as in the cases.
        #[default]
        DeepWriter = "deep-writer",
        /// Random 128 KiB reads at depth 64.
        DeepReader = "deep-reader",
        /// Random 1 MiB writes at depth 16.
        LargeWriter = "large-writer",
        /// Random 4 KiB writes at depth 16, each followed by a flush.
        FlushStorm = "flush-storm",
        /// 64 random 128 KiB writes at once every 100 ms, or as soon as the ones before have ended.
        Burst = "burst",
        /// The cases' mix of 4 KiB requests at depth 32, by a VM that is promised 500 of them a second
        /// within 10 ms.
        Liar = "liar",
    }
}

impl Neighbour {
    /// The VM that does it.
    #[must_use]
    pub fn background(self) -> Background {
        let flood = |block, depth, read_fraction| Work::Flood { block, depth, read_fraction };
        let work = match self {
            Self::DeepWriter => flood(128 * KIB, 64, 0.0),
            Self::DeepReader => flood(128 * KIB, 64, 1.0),
            Self::LargeWriter => flood(1024 * KIB, 16, 0.0),
            Self::FlushStorm => Work::Flushes { block: 4 * KIB, depth: 16 },
            Self::Burst => {
                Work::Bursts { block: 128 * KIB, depth: 64, every: Duration::from_millis(100) }
            }
            Self::Liar => flood(4 * KIB, 32, 0.7),
        };
        Background { work, promise: (self == Self::Liar).then(modest) }
    }
}

/// What the liar says that it does.
fn modest() -> Plan {
    Plan {
        name: "modest".to_owned(),
        iops: Iops::new(500.0).expect("a rate in range"),
        block: 4 * KIB,
        read_fraction: 0.7,
        target: Nanos::from_millis(10),
        between: Between::Nothing,
    }
}

/// A background VM.
#[derive(Debug, Clone)]
pub struct Background {
    /// What it does.
    pub work: Work,
    /// What it has been promised, if anything.
    pub promise: Option<Plan>,
}

/// What a background VM does.
#[derive(Debug, Clone, Copy)]
pub enum Work {
    /// Random requests of `block` bytes, `depth` of them in flight.
    Flood {
        /// Bytes of a request.
        block: usize,
        /// In flight.
        depth: usize,
        /// Of the requests.
        read_fraction: f64,
    },
    /// Random writes, each followed by a flush.
    Flushes {
        /// Bytes of a write.
        block: usize,
        /// In flight.
        depth: usize,
    },
    /// `depth` random writes at once, so often.
    Bursts {
        /// Bytes of a write.
        block: usize,
        /// Writes of a burst.
        depth: usize,
        /// From one to the next.
        every: Duration,
    },
}

impl Work {
    const fn shape(self) -> Shape {
        let (Self::Flood { block, depth, .. }
        | Self::Flushes { block, depth }
        | Self::Bursts { block, depth, .. }) = self;
        Shape { queues: 1, depth, buffer: block }
    }

    /// Does it until the phase is over; `moved` counts bytes, flushes none.
    pub fn run(self, socket: &Path, phase: &Phase, moved: &AtomicU64) -> Result<()> {
        let _end = phase.ended_by_drop();
        let mut client = Client::connect(Endpoint::Socket(socket), self.shape())?;
        let places = client.capacity() / self.shape().buffer as u64;
        let work = |queue: &mut Queue, ()| self.keep_asking(queue, places, phase, moved);
        client.run([()], work).into_iter().collect()
    }

    fn keep_asking(
        self,
        queue: &mut Queue,
        places: u64,
        phase: &Phase,
        moved: &AtomicU64,
    ) -> Result<()> {
        let Shape { depth, buffer: block, .. } = self.shape();
        let mut random = Pcg64Mcg::seed_from_u64(7);
        let mut is_flush = [false; MAX_DEPTH];
        let mut ask = |queue: &mut Queue, slot: usize, is_flush: bool| {
            let place = random.random_range(0..places) * block as u64;
            match self {
                _ if is_flush => queue.flush(slot),
                Self::Flood { read_fraction, .. } if random.random::<f64>() < read_fraction => {
                    queue.read(slot, place, block);
                }
                _ => queue.write(slot, place, block),
            }
        };
        let mut due = Instant::now();
        while !phase.is_over() {
            // At the start, and for each burst.
            if queue.flying() == 0 {
                if let Self::Bursts { every, .. } = self {
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    due = (due + every).max(Instant::now());
                }
                (0..depth).for_each(|slot| ask(queue, slot, false));
            }
            let mut failed = 0;
            let ended = queue.wait(PATIENCE, |queue, ended| {
                failed = failed.min(ended.result);
                let was_flush = is_flush[ended.slot];
                if !was_flush {
                    moved.fetch_add(block as u64, Ordering::Relaxed);
                }
                match self {
                    Self::Bursts { .. } => {}
                    Self::Flood { .. } => ask(queue, ended.slot, false),
                    Self::Flushes { .. } => {
                        is_flush[ended.slot] = !was_flush;
                        ask(queue, ended.slot, !was_flush);
                    }
                }
            })?;
            ensure!(ended > 0, "the background VM got no answer within {} s", PATIENCE.as_secs());
            ensure!(failed == 0, "a request of the background VM failed: errno {}", -failed);
        }
        while queue.flying() > 0 && queue.wait(PATIENCE, |_, _| ())? > 0 {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_an_old_cell_has_the_deep_writer() {
        for neighbour in Neighbour::ALL {
            assert_eq!(neighbour.name().parse::<Neighbour>().unwrap(), neighbour);
            let json = format!("\"{}\"", neighbour.name());
            assert_eq!(serde_json::to_string(&neighbour).unwrap(), json);
        }
        assert!("".parse::<Neighbour>().unwrap_err().to_string().contains("flush-storm"));
        assert_eq!(Neighbour::default().name(), "deep-writer");
    }

    #[test]
    fn only_the_liar_has_a_promise_and_every_shape_fits_a_queue() {
        for neighbour in Neighbour::ALL {
            let Background { work, promise } = neighbour.background();
            assert_eq!(promise.is_some(), neighbour == Neighbour::Liar);
            assert!(work.shape().depth <= MAX_DEPTH);
        }
    }
}
