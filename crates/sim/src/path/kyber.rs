//! kyber (kernel `block/kyber-iosched.c`): reads and writes have tokens each; a direction gets fewer if the
//! device is congested while it is well within its latency goal, more if it misses that.

use std::collections::VecDeque;

use super::request::{Elevator, Request};

/// Latency goals of reads and synchronous writes (`read_lat_nsec`, `write_lat_nsec`).
const TARGETS: [u64; 2] = [2_000_000, 10_000_000];
/// Tokens at the start, and at most (`kyber_depth`).
const DEPTHS: [u32; 2] = [256, 128];
/// Requests of one direction in a row (`kyber_batch_size`).
const BATCHES: [u32; 2] = [16, 8];
/// Latencies are counted in quarters of the goal, the last bucket is for all that are longer.
const BUCKETS: usize = 8;
/// Buckets within the goal.
const GOOD: i32 = 4;
/// Samples that a percentile needs, or a second (`calculate_percentile`).
const SAMPLES: u32 = 500;
const SECOND: u64 = 1_000_000_000;
/// Between a completion and the next look at the latencies: HZ / 10.
const LOOK: u64 = 100_000_000;

/// Latencies of one kind of one direction.
#[derive(Debug, Default)]
struct Latencies {
    buckets: [u32; BUCKETS],
    /// A second after the first sample.
    due: u64,
}

impl Latencies {
    fn add(&mut self, latency: u64, target: u64) {
        let bucket = latency.saturating_sub(1) / (target / 4);
        self.buckets[(bucket as usize).min(BUCKETS - 1)] += 1;
    }

    /// The bucket of a percentile, and a new start; none while there are too few.
    fn percentile(&mut self, now: u64, percent: u32) -> Option<i32> {
        let samples: u32 = self.buckets.iter().sum();
        if samples == 0 {
            return None;
        }
        if self.due == 0 {
            self.due = now + SECOND;
        }
        if samples < SAMPLES && now < self.due {
            return None;
        }
        self.due = 0;
        let mut left = (samples * percent).div_ceil(100);
        let mut bucket = 0;
        while bucket < BUCKETS - 1 && self.buckets[bucket] < left {
            left -= self.buckets[bucket];
            bucket += 1;
        }
        self.buckets = [0; BUCKETS];
        Some(bucket as i32)
    }
}

/// A direction.
#[derive(Debug)]
struct Domain {
    waiting: VecDeque<Request>,
    depth: u32,
    taken: u32,
    total: Latencies,
    io: Latencies,
    p99: Option<i32>,
}

/// The scheduler. Direction 0 reads, 1 writes.
#[derive(Debug)]
pub(super) struct Kyber {
    domains: [Domain; 2],
    current: usize,
    batched: u32,
    look_at: Option<u64>,
}

impl Default for Kyber {
    fn default() -> Self {
        let domain = |depth| Domain {
            waiting: VecDeque::new(),
            depth,
            taken: 0,
            total: Latencies::default(),
            io: Latencies::default(),
            p99: None,
        };
        Self { domains: DEPTHS.map(domain), current: 0, batched: 0, look_at: None }
    }
}

impl Kyber {
    fn take(&mut self) -> Option<Request> {
        let domain = &mut self.domains[self.current];
        if domain.taken >= domain.depth {
            return None;
        }
        let request = domain.waiting.pop_front()?;
        domain.taken += 1;
        self.batched += 1;
        Some(request)
    }
}

impl Elevator for Kyber {
    fn insert(&mut self, _now: u64, request: Request) {
        self.domains[usize::from(request.write)].waiting.push_back(request);
    }

    fn dispatch(&mut self, _now: u64) -> Option<Request> {
        if self.batched < BATCHES[self.current]
            && let Some(request) = self.take()
        {
            return Some(request);
        }
        for _ in 0..self.domains.len() {
            self.batched = 0;
            self.current = (self.current + 1) % self.domains.len();
            if let Some(request) = self.take() {
                return Some(request);
            }
        }
        None
    }

    fn has_work(&self) -> bool {
        self.domains.iter().any(|d| !d.waiting.is_empty())
    }

    fn completed(&mut self, now: u64, request: &Request, started: u64) -> bool {
        let direction = usize::from(request.write);
        let domain = &mut self.domains[direction];
        domain.taken -= 1;
        domain.total.add(now - request.at, TARGETS[direction]);
        domain.io.add(now - started, TARGETS[direction]);
        self.look_at.get_or_insert(now + LOOK);
        self.has_work()
    }

    fn timer_at(&self) -> Option<u64> {
        self.look_at
    }

    /// `kyber_timer_fn`.
    fn timer(&mut self, now: u64) {
        self.look_at = None;
        let mut congested = false;
        for domain in &mut self.domains {
            congested |= domain.io.percentile(now, 90).is_some_and(|bucket| bucket >= GOOD);
        }
        for (domain, most) in self.domains.iter_mut().zip(DEPTHS) {
            let mut p99 = domain.total.percentile(now, 99);
            if congested {
                // Windows of the two directions differ: the last one is remembered, but used once.
                p99 = p99.or(domain.p99.take());
            } else if p99.is_some() {
                domain.p99 = p99;
            }
            if let Some(bucket) = p99
                && (congested || bucket >= GOOD)
            {
                domain.depth = (domain.depth * (bucket as u32 + 1) / 4).clamp(1, most);
            }
        }
    }
}
