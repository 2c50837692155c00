//! Whether a limit lets its rate through, on a machine that others use too.

use std::time::{Duration, Instant};

use rtvirtio_frames::limit::Rate;

use super::frames::skipped;
use crate::key::QueueKey;
use crate::monitor::SchedStat;
use crate::nic::Terms;
use crate::pool::{Pool, ThreadId};
use crate::stats::QueueStats;

/// Frames or bits that pass within a second, as a part of what may: once `step` has kept the queues busy for long enough to
/// have used up the burst. Time in which this thread, or one of the IOThreads, waited for a CPU is no part of the second, and the best
/// of some tries is told: a machine that stops for a while passes fewer. Between two tries is seen what it passes without the limit;
/// `None`: it was seldom clearly more.
pub(super) fn passed(
    rate: Rate,
    (pool, threads): (&Pool, &[ThreadId]),
    queues: &[(QueueKey, &QueueStats)],
    mut step: impl FnMut(),
) -> Option<f64> {
    let tids = threads.iter().filter_map(|thread| Some(pool.thread(*thread)?.1));
    // SAFETY: takes nothing.
    let tids: Vec<i32> = tids.chain([unsafe { libc::gettid() }]).collect();
    let waits = tids.iter().map(|tid| SchedStat::of_thread(*tid)).collect::<Vec<_>>();
    let look = || {
        let seen = queues.iter().map(|(_, stats)| stats.progress());
        let seen = seen.fold([0, 0], |all, of| [all[0] + of.requests, all[1] + of.bytes]);
        let waited: u64 = waits.iter().map(|wait| wait.read().waited.get()).sum();
        (seen, waited, Instant::now())
    };
    let mut keep_busy = |time: Duration| {
        let begun = Instant::now();
        while begun.elapsed() < time {
            step();
        }
    };
    // Of the rate, in a second, and how much of that second the threads had CPUs.
    let mut measure = || {
        keep_busy(Duration::from_millis(50));
        let (before, waited, begun) = look();
        keep_busy(Duration::from_secs(1));
        let (after, waited_since, ended) = look();
        let seconds = ended.duration_since(begun).as_secs_f64();
        let frames = rate.frames.map(|rate| (after[0] - before[0]) as f64 / seconds / rate);
        let bits = rate.bits.map(|rate| 8.0 * (after[1] - before[1]) as f64 / seconds / rate);
        let of_rate = frames.into_iter().chain(bits).fold(0.0, f64::max);
        (of_rate, 1.0 - (waited_since - waited) as f64 / 1e9 / seconds)
    };
    let set = |terms: &Terms| {
        for (key, _) in queues {
            let terms = terms.clone();
            pool.edit(*key, move |queue| queue.set_terms(terms)).unwrap();
        }
    };
    let (mut best, mut judged) = (0.0_f64, 0);
    for _ in 0..4 {
        let (of_rate, served) = measure();
        assert!(of_rate <= 1.03, "{of_rate} of {rate:?}");
        best = best.max(of_rate / served.max(0.5));
        if best >= 0.97 {
            return Some(best);
        }
        set(&Terms::new(None, None));
        let (without, served_without) = measure();
        set(&Terms::new(Some(rate), None));
        judged += u32::from(without > 1.2 && served.min(served_without) > 0.5);
    }
    (judged >= 3).then_some(best)
}

pub(super) fn judge(test: &str, found: Option<f64>, rate: Rate) {
    match found {
        Some(found) => assert!(found >= 0.97, "{found} of {rate:?}"),
        None => skipped(test, format!("others had the CPUs while {rate:?} was tried")),
    }
}

pub(super) const RATES: [Rate; 6] = [
    Rate { frames: Some(1e3), bits: None, burst: 5_000_000 },
    Rate { frames: Some(5e4), bits: None, burst: 5_000_000 },
    Rate { frames: Some(1e5), bits: None, burst: 5_000_000 },
    Rate { frames: None, bits: Some(1e7), burst: 5_000_000 },
    Rate { frames: Some(1e6), bits: Some(5e8), burst: 5_000_000 },
    Rate { frames: None, bits: Some(1e9), burst: 5_000_000 },
];
