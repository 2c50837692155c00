//! kyber: reads and writes have tokens each; a direction gets fewer while the device is congested and it is well within
//! its latency goal, more if it misses that.
//!
//! After its author's description (O. Sandoval, *blk-mq: introduce Kyber multiqueue I/O scheduler*, linux-block, April
//! 2017) and its two parameters, the latency goals (kernel Documentation/block/kyber-iosched.rst).

use std::collections::VecDeque;

use super::request::{Elevator, Request};

/// Latency goals of reads and synchronous writes (`read_lat_nsec`, `write_lat_nsec`).
const GOALS: [u64; 2] = [2_000_000, 10_000_000];
/// Tokens of each direction at the start, and at most.
const TOKENS: [u32; 2] = [256, 128];
/// Requests of one direction in a row.
const BATCHES: [u32; 2] = [16, 8];
/// Latencies that make a percentile, or as many as come in a second.
const SAMPLES: usize = 500;
const SECOND: u64 = 1_000_000_000;
/// Between a completion and the next look at the latencies, ns.
const INTERVAL: u64 = 100_000_000;
/// Steps in which latencies are told apart, parts of the goal; longer than twice the goal is one.
const STEPS: f64 = 4.0;

/// Latencies of one direction, as parts of its goal.
#[derive(Debug, Default)]
struct Latencies {
    parts: Vec<f64>,
    since: Option<u64>,
}

impl Latencies {
    fn add(&mut self, now: u64, latency: u64, goal: u64) {
        self.since.get_or_insert(now);
        self.parts.push(latency as f64 / goal as f64);
    }

    /// A quantile, rounded up to the next step, and a new start; none while there are too few.
    fn quantile(&mut self, now: u64, q: f64) -> Option<f64> {
        let is_due = self.since.is_some_and(|since| now >= since + SECOND);
        if self.parts.is_empty() || self.parts.len() < SAMPLES && !is_due {
            return None;
        }
        let at = ((self.parts.len() as f64 * q).ceil() as usize).clamp(1, self.parts.len()) - 1;
        let part = *self.parts.select_nth_unstable_by(at, f64::total_cmp).1;
        self.parts.clear();
        self.since = None;
        Some((part * STEPS).ceil().clamp(1.0, 2.0 * STEPS) / STEPS)
    }
}

/// Reads, or writes.
#[derive(Debug)]
struct Direction {
    waiting: VecDeque<Request>,
    tokens: u32,
    in_device: u32,
    /// From arrival to end, and in the device alone.
    whole: Latencies,
    device: Latencies,
    /// The last p99 of the former that no change has used.
    p99: Option<f64>,
}

impl Direction {
    fn new(tokens: u32) -> Self {
        Self {
            waiting: VecDeque::new(),
            tokens,
            in_device: 0,
            whole: Latencies::default(),
            device: Latencies::default(),
            p99: None,
        }
    }

    fn take(&mut self) -> Option<Request> {
        let request = (self.in_device < self.tokens).then(|| self.waiting.pop_front()).flatten()?;
        self.in_device += 1;
        Some(request)
    }
}

/// The scheduler. Direction 0 reads, 1 writes.
#[derive(Debug)]
pub(super) struct Kyber {
    directions: [Direction; 2],
    current: usize,
    batched: u32,
    look_at: Option<u64>,
}

impl Default for Kyber {
    fn default() -> Self {
        Self { directions: TOKENS.map(Direction::new), current: 0, batched: 0, look_at: None }
    }
}

impl Elevator for Kyber {
    fn insert(&mut self, _now: u64, request: Request) {
        self.directions[usize::from(request.write)].waiting.push_back(request);
    }

    fn dispatch(&mut self, _now: u64) -> Option<Request> {
        let other = 1 - self.current;
        for (direction, batched) in [(self.current, self.batched), (other, 0), (self.current, 0)] {
            if batched < BATCHES[direction]
                && let Some(request) = self.directions[direction].take()
            {
                (self.current, self.batched) = (direction, batched + 1);
                return Some(request);
            }
        }
        None
    }

    fn has_work(&self) -> bool {
        self.directions.iter().any(|d| !d.waiting.is_empty())
    }

    fn completed(&mut self, now: u64, request: &Request, started: u64) -> bool {
        let index = usize::from(request.write);
        let direction = &mut self.directions[index];
        direction.in_device -= 1;
        direction.whole.add(now, now - request.at, GOALS[index]);
        direction.device.add(now, now - started, GOALS[index]);
        self.look_at.get_or_insert(now + INTERVAL);
        self.has_work()
    }

    fn timer_at(&self) -> Option<u64> {
        self.look_at
    }

    /// The device is congested if one request in ten misses its goal in the device alone.
    fn timer(&mut self, now: u64) {
        self.look_at = None;
        let mut is_congested = false;
        for direction in &mut self.directions {
            is_congested |= direction.device.quantile(now, 0.9).is_some_and(|part| part > 1.0);
        }
        for (direction, most) in self.directions.iter_mut().zip(TOKENS) {
            let p99 = direction.whole.quantile(now, 0.99);
            direction.p99 = p99.or(direction.p99);
            // Enough samples of one direction may come long before those of the other.
            let used = if is_congested { direction.p99.take() } else { p99.filter(|&p| p > 1.0) };
            if let Some(part) = used {
                direction.tokens = ((f64::from(direction.tokens) * part) as u32).clamp(1, most);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Request =
        Request { id: 0, process: 0, position: 0, sectors: 8, write: false, at: 0 };

    /// So many reads end, each `latency` after its arrival, within 200 ms; tokens of reads and writes then.
    fn tokens_after(kyber: &mut Kyber, request: Request, latency: u64) -> [u32; 2] {
        let mut now = SECOND;
        for _ in 0..SAMPLES {
            now += 100_000;
            kyber.insert(now - latency, Request { at: now - latency, ..request });
            let taken = kyber.dispatch(now - latency).unwrap();
            kyber.completed(now, &taken, now - latency);
        }
        kyber.timer(now);
        [0, 1].map(|d| kyber.directions[d].tokens)
    }

    #[test]
    fn direction_within_its_goal_gives_tokens_up_while_the_other_misses_its_own() {
        let mut kyber = Kyber::default();
        let write = Request { write: true, ..READ };
        assert_eq!(tokens_after(&mut kyber, write, 1_000_000), TOKENS);
        // Reads that take 3 ms miss 2 ms by half; writes of 1 ms are far within 10.
        assert_eq!(tokens_after(&mut kyber, READ, 3_000_000), [256, 32]);
    }

    #[test]
    fn directions_take_turns_by_batches() {
        let mut kyber = Kyber::default();
        for _ in 0..40 {
            kyber.insert(0, READ);
            kyber.insert(0, Request { write: true, ..READ });
        }
        let order: Vec<_> = std::iter::from_fn(|| kyber.dispatch(0)).map(|r| r.write).collect();
        assert_eq!(order.len(), 80);
        assert!(order[..16].iter().all(|write| !write) && order[16..24].iter().all(|write| *write));
    }
}
