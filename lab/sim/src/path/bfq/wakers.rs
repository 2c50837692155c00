//! Which queue's requests make another one's begin: a *waker*. Its requests are let in while the device idles for the
//! queue that it wakes, which would else wait for what can not come.
//!
//! As described in the kernel's history (P. Valente, *block, bfq: detect wakers and unconditionally inject their I/O*,
//! linux-block, June 2019): a queue that thinks for long and begins three times shortly after the end of a request of
//! the same other queue is woken by that.

/// So soon after the other's end, ns.
const SOON: u64 = 4_000_000;
/// So many times.
const TIMES: u32 = 3;
/// Within so many times as long as the device idles.
const WITHIN: u64 = 128;

#[derive(Debug, Clone, Default)]
struct Woken {
    by: Option<usize>,
    candidate: Option<usize>,
    times: u32,
    since: u64,
}

/// Who wakes whom.
#[derive(Debug)]
pub(super) struct Wakers {
    woken: Vec<Woken>,
    /// Those that each queue wakes, the one that began last first.
    wakes: Vec<Vec<usize>>,
    /// Whose request ended last, and when; none of a queue that several processes share.
    last_end: (Option<usize>, u64),
}

impl Wakers {
    pub(super) fn new(queues: usize) -> Self {
        let wakes = vec![Vec::new(); queues];
        Self { woken: vec![Woken::default(); queues], wakes, last_end: (None, 0) }
    }

    pub(super) const fn ended(&mut self, now: u64, queue: Option<usize>) {
        self.last_end = (queue, now);
    }

    /// A process of `queue`, which thinks for long, issues its first request.
    pub(super) fn note(&mut self, now: u64, queue: usize, slice_idle: u64) {
        let (Some(last), at) = self.last_end else { return };
        if last == queue || now >= at + SOON {
            return;
        }
        let woken = &mut self.woken[queue];
        if woken.candidate != Some(last) || now > woken.since + WITHIN * slice_idle {
            (woken.candidate, woken.times, woken.since) = (Some(last), 0, now);
        }
        woken.times += 1;
        if woken.times == TIMES {
            woken.candidate = None;
            if let Some(before) = woken.by.replace(last) {
                self.wakes[before].retain(|&other| other != queue);
            }
            self.began(queue);
        }
    }

    /// The queue has requests again.
    pub(super) fn began(&mut self, queue: usize) {
        if let Some(waker) = self.woken[queue].by {
            let wakes = &mut self.wakes[waker];
            wakes.retain(|&other| other != queue);
            wakes.insert(0, queue);
        }
    }

    /// The queue that wakes this one, and the one that this one has woken last.
    pub(super) fn partners(&self, queue: usize) -> impl Iterator<Item = usize> + '_ {
        self.woken[queue].by.into_iter().chain(self.wakes[queue].first().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_that_begins_three_times_after_anothers_end_is_woken_by_it() {
        let mut wakers = Wakers::new(3);
        for time in 0..3 {
            let now = time * 10_000_000;
            assert_eq!(wakers.partners(1).count(), 0);
            wakers.ended(now, Some(0));
            wakers.note(now + SOON - 1, 1, 8_000_000);
        }
        assert_eq!(wakers.partners(1).collect::<Vec<_>>(), [0]);
        assert_eq!(wakers.partners(0).collect::<Vec<_>>(), [1]);
        // One that comes later, or after another's end, is not.
        wakers.ended(0, Some(0));
        wakers.note(SOON, 2, 8_000_000);
        assert_eq!(wakers.partners(2).count(), 0);
    }
}
