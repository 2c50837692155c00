//! What a virtqueue has done: counters and latency histograms.
//!
//! Terms: *wait* is from the kick or the poll that found a request to its start in the engine,
//! *service* from there to its completion; `wait + service = response`. Of frames the clock is looked at once a turn: all that
//! a turn takes have waited since its round began, and their service ends when they are shown to the driver, or, of those
//! that another queue has, when that has let go of them.
//!
//! One thread writes (the queue's IOThread), any may read at any time. A write is a load and a
//! store, no locked instruction: there is no second writer, and a queue that moves takes its
//! statistics along by message, which orders the two writers. A reader sees each number whole;
//! two numbers may be a request apart.
//!
//! Histograms are log-linear: [`SUB_BUCKETS`] per power of two of nanoseconds, so a value is known
//! to within 1/16, from [`MIN_NS`] to [`BEYOND_NS`], with a bucket below and one above. Three of
//! them take 11 KiB.
//!
//! Properties (tests of the same name): `bucket_of_each_edge_is_its_own`,
//! `percentile_is_known_to_a_sixteenth`, `histograms_fit_in_16_kib`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use rtvirtio_spec::control::{DropCounts, LatencySummary, OperationCounts};
use rtvirtio_units::{Bytes, Nanos};

/// Buckets per power of two.
pub const SUB_BUCKETS: usize = 1 << SUB_BITS;
/// Latencies below share a bucket.
pub const MIN_NS: u64 = 1 << MIN_BITS;
/// Latencies from here on, about 68.7 s, share a bucket.
pub const BEYOND_NS: u64 = 1 << BEYOND_BITS;

const SUB_BITS: u32 = 4;
const MIN_BITS: u32 = 8;
const BEYOND_BITS: u32 = 36;
const BUCKETS: usize = (BEYOND_BITS - MIN_BITS) as usize * SUB_BUCKETS + 2;

/// The bucket that holds `ns`.
const fn bucket(ns: u64) -> usize {
    if ns < MIN_NS {
        return 0;
    }
    if ns >= BEYOND_NS {
        return BUCKETS - 1;
    }
    let power = ns.ilog2();
    let sub = (ns >> (power - SUB_BITS)) as usize & (SUB_BUCKETS - 1);
    1 + (power - MIN_BITS) as usize * SUB_BUCKETS + sub
}

/// The first nanosecond that is beyond a bucket; `None` for the last.
const fn end(bucket: usize) -> Option<u64> {
    if bucket >= BUCKETS - 1 {
        return None;
    }
    // Bucket b ends where bucket b + 1 starts, which is sub-bucket b % 16 of power b / 16.
    let power = MIN_BITS + (bucket / SUB_BUCKETS) as u32;
    let sub = (bucket % SUB_BUCKETS) as u64;
    Some((SUB_BUCKETS as u64 + sub) << (power - SUB_BITS))
}

/// Adds to a number that only this thread writes.
fn add(number: &AtomicU64, by: u64) {
    number.store(number.load(Relaxed).wrapping_add(by), Relaxed);
}

/// What a driver asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// VIRTIO_BLK_T_IN
    Read,
    /// VIRTIO_BLK_T_OUT
    Write,
    /// VIRTIO_BLK_T_FLUSH
    Flush,
    /// VIRTIO_BLK_T_DISCARD
    Discard,
    /// VIRTIO_BLK_T_WRITE_ZEROES
    WriteZeroes,
    /// VIRTIO_BLK_T_GET_ID, and what the device does not know.
    Other,
}

const OPS: usize = 6;

/// Why a frame of a network device was not handed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// It is none, or its header asks for what was not negotiated or cannot be.
    Malformed,
    /// Its sender's address is another's.
    Spoofed,
    /// It is of a VLAN that its port is not in.
    Vlan,
    /// Its sender has sent too many to all.
    Broadcast,
    /// Nobody has its address.
    NoReceiver,
    /// Its receiver's driver had no buffers, or too few for it, or has no queue that is served.
    NoBuffers,
    /// Its receiver's buffers, or its MTU, are too small for it.
    TooLong,
    /// Its receiver's limit on a rate let it wait for too long.
    Limit,
    /// The TAP or socket did not take it.
    Link,
}

const REASONS: usize = 9;

/// A latency histogram that one thread writes.
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

impl Histogram {
    const fn new() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
        }
    }

    fn record(&self, ns: u64) {
        self.record_all(1, ns);
    }

    /// So many of `ns` each.
    fn record_all(&self, count: u64, ns: u64) {
        if count == 0 {
            return;
        }
        add(&self.buckets[bucket(ns)], count);
        add(&self.sum_ns, count.saturating_mul(ns));
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
    }

    fn snapshot(&self) -> Latencies {
        Latencies {
            buckets: self.buckets.iter().map(|b| b.load(Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Relaxed),
            max_ns: self.max_ns.load(Relaxed),
        }
    }
}

/// The statistics of one virtqueue. What [`Self::progress`] reads comes first, in two cache lines.
#[repr(C, align(64))]
pub struct QueueStats {
    started: AtomicU64,
    /// What `started` will be when all is taken that was available when the IOThread last looked.
    seen: AtomicU64,
    busy_ns: AtomicU64,
    waited_ns: AtomicU64,
    finished: [AtomicU64; OPS],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    errors: AtomicU64,
    kicks: AtomicU64,
    /// Of these, those of a ring that was not empty.
    filled_kicks: AtomicU64,
    calls: AtomicU64,
    broken: AtomicBool,
    drops: [AtomicU64; REASONS],
    promised: AtomicU64,
    late: AtomicU64,
    wait: Histogram,
    service: Histogram,
    response: Histogram,
}

impl Default for QueueStats {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for QueueStats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueStats").field("started", &self.started).finish_non_exhaustive()
    }
}

impl QueueStats {
    /// All zero.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            started: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            finished: [const { AtomicU64::new(0) }; OPS],
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            kicks: AtomicU64::new(0),
            filled_kicks: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            drops: [const { AtomicU64::new(0) }; REASONS],
            promised: AtomicU64::new(0),
            late: AtomicU64::new(0),
            wait: Histogram::new(),
            service: Histogram::new(),
            response: Histogram::new(),
        }
    }

    /// `requests` were taken from the ring; each ends by one [`Self::record`] or [`Self::fail`].
    pub fn start(&self, requests: u64) {
        add(&self.started, requests);
    }

    /// So many requests are available and not taken.
    pub fn see(&self, available: u32) {
        let started = self.started.load(Relaxed);
        self.seen.store(started.wrapping_add(u64::from(available)), Relaxed);
    }

    /// Its IOThread was busy for it, for so many ns.
    pub fn busy(&self, ns: u64) {
        add(&self.busy_ns, ns);
    }

    /// Requests have waited for their IOThread, for so many ns in all.
    pub fn waited(&self, ns: u64) {
        add(&self.waited_ns, ns);
    }

    /// A request has succeeded. `bytes` count for reads and writes.
    pub fn record(&self, op: Op, bytes: u64, wait: Nanos, service: Nanos) {
        self.count(op, bytes);
        self.wait.record(wait.get());
        self.service.record(service.get());
        self.response.record(wait.saturating_add(service).get());
    }

    /// A request has succeeded, and nobody took the time.
    pub fn count(&self, op: Op, bytes: u64) {
        add(&self.finished[op as usize], 1);
        match op {
            Op::Read => add(&self.read_bytes, bytes),
            Op::Write => add(&self.written_bytes, bytes),
            Op::Flush | Op::Discard | Op::WriteZeroes | Op::Other => {}
        }
    }

    /// So many frames of so many bytes in all have passed.
    pub(crate) fn count_frames(&self, op: Op, frames: u64, bytes: u64) {
        add(&self.finished[op as usize], frames);
        let total = if op == Op::Read { &self.read_bytes } else { &self.written_bytes };
        add(total, bytes);
    }

    /// A request has ended with an error: its time is in no histogram.
    pub fn fail(&self, op: Op) {
        add(&self.finished[op as usize], 1);
        add(&self.errors, 1);
    }

    /// A turn has taken so many frames, each of which had waited for so many ns. Which those are is not known when they
    /// end: there is no histogram of responses.
    pub fn take_frames(&self, frames: u64, wait_ns: u64) {
        self.waited(frames.saturating_mul(wait_ns));
        self.wait.record_all(frames, wait_ns);
    }

    /// So many frames were handed on, or dropped, so many ns after the turn began that took them.
    pub fn end_frames(&self, frames: u64, service_ns: u64) {
        self.service.record_all(frames, service_ns);
    }

    /// A frame was not handed on.
    pub fn drop_frame(&self, op: Op, reason: Dropped) {
        self.fail(op);
        self.lose(reason, 1);
    }

    /// Of a frame for many so many were not handed on.
    pub fn lose(&self, reason: Dropped, frames: u32) {
        add(&self.drops[reason as usize], frames.into());
    }

    /// Frames that were promised a time were handed on, all of them late or none.
    pub fn promise(&self, frames: u32, are_late: bool) {
        add(&self.promised, frames.into());
        if are_late {
            add(&self.late, frames.into());
        }
    }

    /// Promised frames, and those of them that were late.
    #[must_use]
    pub fn promised_and_late(&self) -> (u64, u64) {
        // In this order: there are never more late ones than all.
        let late = self.late.load(Relaxed);
        (self.promised.load(Relaxed), late)
    }

    /// Frames that were not handed on.
    #[must_use]
    pub fn drops(&self) -> DropCounts {
        let of = |reason: Dropped| self.drops[reason as usize].load(Relaxed);
        DropCounts {
            malformed: of(Dropped::Malformed),
            spoofed: of(Dropped::Spoofed),
            vlan: of(Dropped::Vlan),
            broadcast: of(Dropped::Broadcast),
            no_receiver: of(Dropped::NoReceiver),
            no_buffers: of(Dropped::NoBuffers),
            too_long: of(Dropped::TooLong),
            limit: of(Dropped::Limit),
            link: of(Dropped::Link),
        }
    }

    /// The driver kicked.
    pub fn kick(&self) {
        add(&self.kicks, 1);
    }

    /// And its ring was not empty.
    pub(crate) fn kick_filled(&self) {
        add(&self.filled_kicks, 1);
    }

    /// Kicks of an empty ring, and a number that rises with each kick of one that is not and with each request that
    /// is taken.
    pub(crate) fn empty_kicks(&self) -> (u64, u64) {
        let filled = self.filled_kicks.load(Relaxed);
        let empty = self.kicks.load(Relaxed).saturating_sub(filled);
        (empty, filled + self.started.load(Relaxed))
    }

    /// The driver was called.
    pub fn call(&self) {
        add(&self.calls, 1);
    }

    /// The driver broke its ring, or set it up anew.
    pub fn set_broken(&self, broken: bool) {
        self.broken.store(broken, Relaxed);
    }

    /// Whether the driver broke its ring.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Relaxed)
    }

    /// Responses as they are now.
    #[must_use]
    pub fn responses(&self) -> Latencies {
        self.response.snapshot()
    }

    /// What is worth a look a hundred times a second.
    #[must_use]
    pub fn progress(&self) -> Progress {
        // As in a snapshot: in flight is never negative.
        let requests = self.finished.iter().map(|n| n.load(Relaxed)).sum();
        Progress {
            requests,
            bytes: self.read_bytes.load(Relaxed).wrapping_add(self.written_bytes.load(Relaxed)),
            waited: Nanos::new(self.waited_ns.load(Relaxed)),
            busy: Nanos::new(self.busy_ns.load(Relaxed)),
            calls: self.calls.load(Relaxed),
            // Before what was started: what is taken in between is no backlog.
            seen: self.seen.load(Relaxed),
            started: self.started.load(Relaxed),
        }
    }

    /// All numbers as they are now.
    #[must_use]
    pub fn snapshot(&self) -> QueueSnapshot {
        // What has finished is read before what was started: in flight is never negative.
        let finished = self.finished.each_ref().map(|n| n.load(Relaxed));
        let done: u64 = finished.iter().sum();
        let [reads, writes, flushes, discards, write_zeroes, others] = finished;
        QueueSnapshot {
            operations: OperationCounts { reads, writes, flushes, discards, write_zeroes, others },
            in_flight: self.started.load(Relaxed).saturating_sub(done),
            read_bytes: Bytes::new(self.read_bytes.load(Relaxed)),
            written_bytes: Bytes::new(self.written_bytes.load(Relaxed)),
            errors: self.errors.load(Relaxed),
            kicks: self.kicks.load(Relaxed),
            calls: self.calls.load(Relaxed),
            busy: Nanos::new(self.busy_ns.load(Relaxed)),
            wait: self.wait.snapshot(),
            service: self.service.snapshot(),
            response: self.response.snapshot(),
        }
    }
}

/// A virtqueue's counters at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Requests that have ended.
    pub requests: u64,
    /// Bytes of successful reads and writes.
    pub bytes: u64,
    /// What requests have waited for their IOThread, in all: without what they waited for their
    /// time on a device that is shared by a schedule.
    pub waited: Nanos,
    /// What of its IOThreads' time at work was for it.
    pub busy: Nanos,
    /// Calls of its driver.
    pub calls: u64,
    /// Requests that were available when its IOThread last looked, as counted by `started`.
    pub seen: u64,
    /// Requests that were taken.
    pub started: u64,
}

impl Progress {
    /// Requests taken and not ended.
    #[must_use]
    pub const fn in_flight(self) -> u64 {
        self.started.saturating_sub(self.requests)
    }

    /// Whether something that was available at an earlier time is still not taken.
    #[must_use]
    pub const fn is_standing(self, before: Self) -> bool {
        before.seen > self.started
    }
}

/// [`QueueStats`] at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueSnapshot {
    /// Requests that have ended, by operation.
    pub operations: OperationCounts,
    /// Requests that were taken and have not ended.
    pub in_flight: u64,
    /// Bytes of successful reads.
    pub read_bytes: Bytes,
    /// Bytes of successful writes.
    pub written_bytes: Bytes,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Kicks by the driver.
    pub kicks: u64,
    /// Calls of the driver.
    pub calls: u64,
    /// What of its IOThreads' time at work was for it.
    pub busy: Nanos,
    /// From kick to start.
    pub wait: Latencies,
    /// From start to completion.
    pub service: Latencies,
    /// Both.
    pub response: Latencies,
}

/// A histogram at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Latencies {
    /// Requests by bucket; empty if there is none.
    buckets: Vec<u64>,
    sum_ns: u64,
    max_ns: u64,
}

impl Latencies {
    /// Requests in all.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Sum of all latencies.
    #[must_use]
    pub const fn sum(&self) -> Nanos {
        Nanos::new(self.sum_ns)
    }

    /// Buckets with requests, in rising order: the bucket's end, the last one's start.
    pub fn buckets(&self) -> impl Iterator<Item = (Nanos, u64)> {
        let end_of = |bucket| Nanos::new(end(bucket).unwrap_or(BEYOND_NS));
        let counts = self.buckets.iter().enumerate().filter(|&(_, &count)| count > 0);
        counts.map(move |(bucket, &count)| (end_of(bucket), count))
    }

    /// Requests below each of `ends`, which rise and are edges of buckets, such as powers of two.
    #[must_use]
    pub fn below(&self, ends: &[Nanos]) -> Vec<u64> {
        let mut buckets = self.buckets.iter().enumerate().peekable();
        let mut seen = 0;
        let mut below = Vec::with_capacity(ends.len());
        for limit in ends {
            while let Some((_, count)) =
                buckets.next_if(|(b, _)| end(*b).is_some_and(|end| end <= limit.get()))
            {
                seen += count;
            }
            below.push(seen);
        }
        below
    }

    /// The end of the bucket that holds the quantile (nearest rank), at most the largest latency;
    /// zero without requests.
    fn quantile(&self, count: u64, fraction: f64) -> Nanos {
        // The nudge keeps 10,000 × 0.999 at rank 9,990.
        let rank = ((count as f64 * fraction - 1e-6).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, requests) in self.buckets.iter().enumerate() {
            seen += requests;
            if seen >= rank {
                return Nanos::new(end(bucket).unwrap_or(u64::MAX).min(self.max_ns));
            }
        }
        Nanos::new(self.max_ns)
    }

    /// For people and the control API.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        let count = self.count();
        let mean = self.sum_ns.checked_div(count).unwrap_or(0);
        LatencySummary {
            count,
            mean_ns: Nanos::new(mean),
            p50_ns: self.quantile(count, 0.5),
            p99_ns: self.quantile(count, 0.99),
            p999_ns: self.quantile(count, 0.999),
            p9999_ns: self.quantile(count, 0.9999),
            max_ns: Nanos::new(self.max_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_of_each_edge_is_its_own() {
        assert_eq!((bucket(0), bucket(255), bucket(256), bucket(271)), (0, 0, 1, 1));
        // 16 buckets of 16 ns from 256 ns, then of 32 ns from 512 ns.
        assert_eq!((bucket(272), bucket(511), bucket(512), bucket(543)), (2, 16, 17, 17));
        assert_eq!((bucket((1 << 36) - 1), bucket(1 << 36), bucket(u64::MAX)), (448, 449, 449));
        assert_eq!(
            (end(0), end(1), end(16), end(17)),
            (Some(256), Some(272), Some(512), Some(544))
        );
        assert_eq!((end(448), end(449)), (Some(1 << 36), None));
        for b in 0..449 {
            let end = end(b).unwrap();
            assert_eq!((bucket(end - 1), bucket(end)), (b, b + 1));
        }
    }

    #[test]
    fn histograms_fit_in_16_kib() {
        assert!(size_of::<QueueStats>() <= 16 << 10, "{}", size_of::<QueueStats>());
    }

    #[test]
    fn percentile_is_known_to_a_sixteenth() {
        let stats = QueueStats::new();
        for us in 1..=10_000 {
            stats.record(Op::Read, 0, Nanos::ZERO, Nanos::from_micros(us));
        }
        let found = stats.snapshot().service.summary();
        assert_eq!((found.count, found.mean_ns.get()), (10_000, 5_000_500));
        let expected = [
            (found.p50_ns, 5_000_000),
            (found.p99_ns, 9_900_000),
            (found.p999_ns, 9_990_000),
            (found.p9999_ns, 9_999_000),
        ];
        for (found, expected) in expected {
            let found = found.get();
            assert!((expected..=expected / 16 * 17).contains(&found), "{found} for {expected}");
        }
        assert_eq!(found.max_ns, Nanos::from_millis(10));
    }

    #[test]
    fn frames_of_a_turn_have_one_time_each() {
        let stats = QueueStats::new();
        stats.take_frames(16, 300);
        stats.take_frames(4, 5_000);
        stats.end_frames(20, 2_000);
        let found = stats.snapshot();
        assert_eq!((found.wait.count(), found.wait.sum().get()), (20, 16 * 300 + 4 * 5_000));
        assert_eq!((found.service.count(), found.service.sum().get()), (20, 40_000));
        assert_eq!(found.wait.below(&[512, 8192].map(Nanos::new)), [16, 20]);
        assert_eq!((found.response.count(), stats.progress().waited.get()), (0, 24_800));
    }

    #[test]
    fn requests_are_counted_by_operation_and_outcome() {
        let stats = QueueStats::new();
        stats.start(5);
        stats.record(Op::Read, 4096, Nanos::new(1000), Nanos::new(3000));
        stats.record(Op::Write, 512, Nanos::new(1000), Nanos::new(1000));
        stats.record(Op::Flush, 7, Nanos::ZERO, Nanos::new(1));
        stats.fail(Op::Write);
        stats.kick();
        stats.call();
        let found = stats.snapshot();
        let operations = OperationCounts { reads: 1, writes: 2, flushes: 1, ..Default::default() };
        assert_eq!(found.operations, operations);
        assert_eq!((found.in_flight, found.errors), (1, 1));
        assert_eq!((found.read_bytes.get(), found.written_bytes.get()), (4096, 512));
        assert_eq!((found.kicks, found.calls), (1, 1));
        assert_eq!((found.response.count(), found.response.sum().get()), (3, 6001));
    }

    #[test]
    fn queue_stands_while_something_seen_before_is_not_taken() {
        let stats = QueueStats::new();
        stats.start(10);
        stats.see(3);
        let before = stats.progress();
        assert_eq!((before.in_flight(), before.is_standing(before)), (10, true));
        stats.start(2);
        stats.see(100);
        assert!(stats.progress().is_standing(before));
        stats.start(1);
        assert!(!stats.progress().is_standing(before), "the three are taken, others came");
        stats.see(0);
        stats.busy(5);
        stats.waited(7);
        let now = stats.progress();
        assert!(!now.is_standing(now));
        assert_eq!((now.busy.get(), now.waited.get()), (5, 7));
    }

    #[test]
    fn requests_below_a_power_of_two_are_those_of_its_buckets() {
        let stats = QueueStats::new();
        for ns in [10, 1000, 1023, 1024, 5000, u64::MAX] {
            stats.record(Op::Read, 0, Nanos::new(ns), Nanos::ZERO);
        }
        let found = stats.snapshot().wait;
        assert_eq!(found.below(&[1024, 2048, 8192].map(Nanos::new)), [3, 4, 5]);
        let buckets: Vec<_> = found.buckets().map(|(end, count)| (end.get(), count)).collect();
        // 1000 and 1023 are in the last 32 ns below 1024, 5000 in 256 ns from 4864.
        let expected = [(256, 1), (1024, 2), (1088, 1), (5120, 1), (1 << 36, 1)];
        assert_eq!(buckets, expected);
        assert_eq!((found.count(), Latencies::default().summary().p99_ns), (6, Nanos::ZERO));
    }
}
