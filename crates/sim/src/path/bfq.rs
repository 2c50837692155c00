//! bfq as the kernel has it (`block/bfq-iosched.c`, Linux 6.1 and later): which queue is in service, for how
//! long, and whether the device idles for it.
//!
//! A *queue* is a process's; its requests are served while it is *in service*: until its budget or its time
//! (`timeout_sync`) is used up, or it has no more requests. Where somebody's share must be protected (queues of
//! different weights, or more than one group with requests), the device *idles* for a queue that has become
//! empty, up to `slice_idle`; meanwhile a few requests of others may be *injected*. `low_latency` *raises*
//! the weight of queues that look interactive or soft real-time.
//!
//! Function by function the kernel's, with its names and constants. Left out: asynchronous queues, the idle
//! class, merging of queues that work close to each other (not done for flash with queueing), seek distances
//! (offsets are random, so a request of less than 32 KiB is `seeky`, a longer one is not), the sort by sector
//! and its expiry within a queue. Time that the kernel counts in jiffies is counted so (250 a second).

use std::collections::VecDeque;

use rtvirtio_spec::settings::Bfq as Parameters;

use super::request::{Elevator, Request};
use super::wf2q::Hierarchy;

/// ns in a jiffy: 250 a second, as Debian's kernels have.
const JIFFY: u64 = 4_000_000;
/// ms in jiffies, rounded up as `msecs_to_jiffies` does.
const fn jiffies(ms: i64) -> i64 {
    (ms * 1_000_000 + JIFFY as i64 - 1) / JIFFY as i64
}
/// Long ago (`bfq_smallest_from_now`).
const LONG_AGO: i64 = i64::MIN / 4;

/// `bfq_default_max_budget`, sectors.
const DEFAULT_MAX_BUDGET: u64 = 16 * 1024;
/// `bfq_stats_min_budgets`.
const STATS_MIN_BUDGETS: u32 = 194;
/// `BFQ_MIN_TT`, ns.
const MIN_THINK_TIME: u64 = 2_000_000;
/// `bfq_timeout`, ms: what a queue that is slow is charged by, whatever `timeout_sync` is.
const TIMEOUT_MS: u64 = 124;
/// `BFQQ_SECT_THR_NONROT`: a random request shorter than this is seeky, one of this length is large.
const LARGE: u32 = 64;
/// `BFQ_RATE_SHIFT`.
const RATE_SHIFT: u32 = 16;
/// `ref_rate` of flash, sectors/µs << `RATE_SHIFT`.
const REFERENCE_RATE: u64 = 33_000;
/// `ref_wr_duration` of flash, jiffies.
const REFERENCE_RAISE: i64 = jiffies(2_500);
/// `max_service_from_wr`, sectors.
const MAX_SERVICE_RAISED: u64 = 120_000;
/// `bfq_wr_coeff`; of soft real-time queues a hundred times that.
const RAISE: u32 = 30;
const SOFT_RT_FACTOR: u32 = 100;
/// `bfq_wr_rt_max_time`, `bfq_wr_min_idle_time`, jiffies.
const SOFT_RT_RAISE: i64 = jiffies(300);
const MIN_IDLE: i64 = jiffies(2_000);
/// `bfq_wr_max_softrt_rate`, sectors/s.
const MAX_SOFT_RT_RATE: u64 = 7_000;
/// `bfq_large_burst_thresh`, `bfq_burst_interval`.
const LARGE_BURST: u32 = 8;
const BURST_INTERVAL: i64 = jiffies(180);
/// `bfq_requests_within_timer`.
const REQUESTS_WITHIN_TIMER: u32 = 120;
/// The weight of a process without an I/O priority of its own.
const DEFAULT_WEIGHT: u32 = 40;
/// Tags of the scheduler (`nr_requests` of a device with 128 or more).
const TAGS: f64 = 256.0;

/// Why a queue stops being in service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    TooIdle,
    BudgetTimeout,
    BudgetExhausted,
    NoMoreRequests,
    Preempted,
}

/// A process, as bfq sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Process {
    /// Its group; 0 is the root.
    pub(super) group: usize,
    /// 0 real-time, 1 best-effort.
    pub(super) class: u8,
    /// 0 to 7.
    pub(super) level: u8,
}

#[derive(Debug)]
struct Queue {
    requests: VecDeque<Request>,
    dispatched: u32,
    busy: bool,
    wait_request: bool,
    /// It ended for lack of requests, and may go on as if it had not.
    non_blocking_wait: bool,
    has_short_think_time: bool,
    io_bound: bool,
    in_large_burst: bool,
    in_burst_list: bool,
    just_created: bool,
    soft_rt_update: bool,
    /// In `weight_counts`, under this weight.
    counted_weight: Option<u32>,
    /// Counted in its group's queues with pending requests.
    pending: bool,
    max_budget: u64,
    /// When its time is over; once it is empty, since when.
    budget_timeout: i64,
    last_end: u64,
    think_samples: u64,
    think_total: u64,
    think_mean: u64,
    seek_history: u32,
    raised_since: i64,
    raised_for: i64,
    raise_at_switch: i64,
    soft_rt_next_start: i64,
    last_idle_backlogged: i64,
    service_from_backlogged: u64,
    service_raised: u64,
    requests_within_timer: u32,
    inject_limit: u32,
    decrease_time: i64,
    last_service_time: u64,
    waker: Option<usize>,
    tentative_waker: Option<usize>,
    waker_detections: u32,
    waker_since: u64,
}

/// The scheduler.
#[derive(Debug)]
pub(super) struct Bfq {
    slice_idle: u64,
    timeout: i64,
    timeout_ms: u64,
    low_latency: bool,
    user_max_budget: u64,
    hierarchy: Hierarchy,
    queues: Vec<Queue>,
    /// Queues with pending requests by group.
    pending: Vec<u32>,
    groups_with_pending: u32,
    weight_counts: Vec<(u32, u32)>,
    busy: [u32; 2],
    raised_busy: u32,
    in_service: Option<usize>,
    queued: u32,
    in_driver: u32,
    idle_timer: Option<u64>,
    last_budget_start: u64,
    last_idling_start: u64,
    max_budget: u64,
    budgets_assigned: u32,
    // Whether the device queues.
    hw_tag: bool,
    hw_tag_samples: u32,
    max_in_driver: u32,
    // The device's rate.
    peak_rate: u64,
    rate_samples: u64,
    sequential_samples: u64,
    sectors_dispatched: u64,
    last_max_sectors: u64,
    first_dispatch: u64,
    last_dispatch: u64,
    delta_from_first: u64,
    last_completion: u64,
    last_completed: Option<usize>,
    // Bursts of new queues.
    burst_group: Option<usize>,
    burst_size: u32,
    large_burst: bool,
    last_in_burst: i64,
    // The effect of injection.
    wait_dispatch: bool,
    waited: Option<u32>,
    injected: bool,
    /// Some queue has a waker.
    wakers: bool,
    last_empty_occupied: u64,
    /// Time of the call, and its jiffy.
    now: u64,
    jiffy: i64,
}

impl Bfq {
    /// `groups[g]` are (parent, weight) of group g + 1; 0 is the root.
    pub(super) fn new(
        parameters: Parameters,
        groups: &[(usize, u32)],
        processes: &[Process],
    ) -> Self {
        let weight = |p: &Process| u32::from(8 - p.level.min(7)) * 10;
        let queues: Vec<_> = processes.iter().map(|p| (p.group, p.class, weight(p))).collect();
        let user_max_budget = u64::from(parameters.max_budget);
        let max_budget = if user_max_budget == 0 { DEFAULT_MAX_BUDGET } else { user_max_budget };
        Self {
            slice_idle: u64::from(parameters.slice_idle_us) * 1000,
            timeout: jiffies(i64::from(parameters.timeout_sync_ms)),
            timeout_ms: u64::from(parameters.timeout_sync_ms),
            low_latency: parameters.low_latency,
            user_max_budget,
            hierarchy: Hierarchy::new(groups, &queues),
            queues: processes.iter().map(|_| Queue::new()).collect(),
            pending: vec![0; groups.len() + 1],
            groups_with_pending: 0,
            weight_counts: Vec::new(),
            busy: [0; 2],
            raised_busy: 0,
            in_service: None,
            queued: 0,
            in_driver: 0,
            idle_timer: None,
            last_budget_start: 0,
            last_idling_start: 0,
            max_budget,
            budgets_assigned: 0,
            hw_tag: true,
            hw_tag_samples: 0,
            max_in_driver: 0,
            peak_rate: REFERENCE_RATE * 2 / 3,
            rate_samples: 0,
            sequential_samples: 0,
            sectors_dispatched: 0,
            last_max_sectors: 0,
            first_dispatch: 0,
            last_dispatch: 0,
            delta_from_first: 0,
            last_completion: 0,
            last_completed: None,
            burst_group: None,
            burst_size: 0,
            large_burst: false,
            last_in_burst: LONG_AGO,
            wait_dispatch: false,
            waited: None,
            injected: false,
            wakers: false,
            last_empty_occupied: 0,
            now: 0,
            jiffy: 0,
        }
    }

    fn at(&mut self, now: u64) {
        self.now = now;
        self.jiffy = (now / JIFFY) as i64;
    }

    const fn all_busy(&self) -> u32 {
        self.busy[0] + self.busy[1]
    }

    fn raise_of(&self, q: usize) -> u32 {
        self.hierarchy.entities[q].raise
    }

    fn budget_left(&self, q: usize) -> i64 {
        let e = &self.hierarchy.entities[q];
        e.budget as i64 - e.service as i64
    }

    fn next_sectors(&self, q: usize) -> Option<u64> {
        self.queues[q].requests.front().map(|r| u64::from(r.sectors))
    }

    const fn current_max_budget(&self) -> u64 {
        if self.budgets_assigned < STATS_MIN_BUDGETS { DEFAULT_MAX_BUDGET } else { self.max_budget }
    }

    const fn min_budget(&self) -> u64 {
        self.current_max_budget() / 32
    }

    fn raise_duration(&self) -> i64 {
        let duration = REFERENCE_RATE * REFERENCE_RAISE as u64 / self.peak_rate;
        (duration as i64).clamp(jiffies(3_000), jiffies(25_000))
    }

    // ---- Whether to idle -------------------------------------------------------------------------

    /// `bfq_asymmetric_scenario`.
    fn asymmetric(&self, q: Option<usize>) -> bool {
        let own = q.and_then(|q| self.queues[q].counted_weight);
        let least = self.weight_counts.iter().map(|&(weight, _)| weight).min();
        let is_least = own.is_some() && own == least;
        let varied = !is_least && self.weight_counts.len() > 1;
        let classes = self.busy[0] > 0 && self.busy[1] > 0;
        varied || classes || self.groups_with_pending > 1
    }

    fn needs_idling(&self, q: usize) -> bool {
        let raised = self.raise_of(q) > 1
            && (self.raised_busy < self.all_busy()
                || self.in_driver >= self.queues[q].dispatched + 4);
        raised || self.asymmetric(Some(q))
    }

    fn idling_boosts(&self, q: usize) -> bool {
        let sequential = !seeky(self.queues[q].seek_history)
            && self.queues[q].io_bound
            && self.queues[q].has_short_think_time;
        !self.hw_tag && sequential && self.raised_busy == 0
    }

    fn better_to_idle(&self, q: usize) -> bool {
        self.slice_idle > 0 && (self.idling_boosts(q) || self.needs_idling(q))
    }

    fn must_idle(&self, q: usize) -> bool {
        self.queues[q].requests.is_empty() && self.better_to_idle(q)
    }

    /// `bfq_arm_slice_timer`.
    fn arm_idle_timer(&mut self, q: usize) {
        self.queues[q].wait_request = true;
        let mut length = self.slice_idle;
        if seeky(self.queues[q].seek_history) && self.raise_of(q) == 1 && !self.asymmetric(Some(q))
        {
            length = length.min(MIN_THINK_TIME);
        } else if self.raise_of(q) > 1 {
            length = length.max(20_000_000);
        }
        self.last_idling_start = self.now;
        self.idle_timer = Some(self.now + length);
    }

    // ---- Weights ---------------------------------------------------------------------------------

    fn count_weight(&mut self, q: usize) {
        let weight = self.hierarchy.entities[q].weight;
        self.queues[q].counted_weight = Some(weight);
        match self.weight_counts.iter_mut().find(|(w, _)| *w == weight) {
            Some((_, count)) => *count += 1,
            None => self.weight_counts.push((weight, 1)),
        }
    }

    fn uncount_weight(&mut self, q: usize) {
        let Some(weight) = self.queues[q].counted_weight.take() else { return };
        if let Some(at) = self.weight_counts.iter().position(|&(w, _)| w == weight) {
            self.weight_counts[at].1 -= 1;
            if self.weight_counts[at].1 == 0 {
                self.weight_counts.swap_remove(at);
            }
        }
    }

    /// It is not busy and has nothing in the driver.
    fn end_pending(&mut self, q: usize) {
        if std::mem::take(&mut self.queues[q].pending) {
            let group = self.hierarchy.group_of(q);
            self.pending[group] -= 1;
            if self.pending[group] == 0 {
                self.groups_with_pending -= 1;
            }
        }
        self.uncount_weight(q);
    }

    fn begin_pending(&mut self, q: usize) {
        if !std::mem::replace(&mut self.queues[q].pending, true) {
            let group = self.hierarchy.group_of(q);
            self.pending[group] += 1;
            if self.pending[group] == 1 {
                self.groups_with_pending += 1;
            }
        }
    }

    fn end_raise(&mut self, q: usize) {
        if self.queues[q].busy {
            self.raised_busy -= 1;
        }
        self.hierarchy.entities[q].raise = 1;
        self.queues[q].raised_for = 0;
        self.queues[q].raised_since = self.jiffy;
    }

    /// Gives the queue its weight at once (`__bfq_entity_update_weight_prio`).
    fn update_weight(&mut self, q: usize) {
        self.hierarchy.update_weight(q);
        self.recount_weight(q);
    }

    /// What its weight is counted under follows its weight; raised ones are not counted.
    fn recount_weight(&mut self, q: usize) {
        let weight = self.hierarchy.entities[q].weight;
        let counts = self.queues[q].pending && self.raise_of(q) == 1;
        if self.queues[q].counted_weight != counts.then_some(weight) {
            self.uncount_weight(q);
            if counts {
                self.count_weight(q);
            }
        }
    }

    fn add_busy(&mut self, q: usize) {
        let recovers = std::mem::take(&mut self.queues[q].non_blocking_wait);
        self.hierarchy.activate(q, recovers);
        self.queues[q].busy = true;
        self.busy[usize::from(self.hierarchy.entities[q].class)] += 1;
        self.begin_pending(q);
        self.recount_weight(q);
        if self.raise_of(q) > 1 {
            self.raised_busy += 1;
        }
    }

    fn del_busy(&mut self, q: usize, expiration: bool) {
        self.queues[q].busy = false;
        self.busy[usize::from(self.hierarchy.entities[q].class)] -= 1;
        if self.queues[q].dispatched == 0 {
            self.end_pending(q);
        }
        if self.raise_of(q) > 1 {
            self.raised_busy -= 1;
        }
        self.hierarchy.deactivate(q, expiration);
    }

    // ---- A request comes ---------------------------------------------------------------------------

    fn update_think_time(&mut self, q: usize) {
        let queue = &mut self.queues[q];
        if queue.dispatched > 0 || queue.busy {
            return;
        }
        let elapsed = (self.now - queue.last_end).min(2 * self.slice_idle);
        queue.think_samples = (7 * queue.think_samples + 256) / 8;
        queue.think_total = (7 * queue.think_total + 256 * elapsed) / 8;
        queue.think_mean = (queue.think_total + 128) / queue.think_samples;
    }

    fn update_has_short_think_time(&mut self, q: usize) {
        if self.slice_idle == 0 {
            return;
        }
        let queue = &mut self.queues[q];
        let long = queue.think_samples > 80 && queue.think_mean > self.slice_idle / 2;
        let changed = queue.has_short_think_time == long;
        queue.has_short_think_time = !long;
        if changed
            && queue.last_service_time == 0
            && (queue.decrease_time + jiffies(100) <= self.jiffy || long)
        {
            self.reset_inject_limit(q);
        }
    }

    fn reset_inject_limit(&mut self, q: usize) {
        self.waited = None;
        let queue = &mut self.queues[q];
        queue.last_service_time = 0;
        queue.inject_limit = u32::from(!queue.has_short_think_time);
        queue.decrease_time = self.jiffy;
    }

    /// `bfq_check_waker`.
    fn check_waker(&mut self, q: usize) {
        let Some(last) = self.last_completed else { return };
        let queue = &mut self.queues[q];
        if last == q || queue.has_short_think_time || self.now - self.last_completion >= 4_000_000 {
            return;
        }
        if queue.tentative_waker != Some(last)
            || self.now > queue.waker_since + 128 * self.slice_idle
        {
            queue.tentative_waker = Some(last);
            queue.waker_detections = 1;
            queue.waker_since = self.now;
        } else {
            queue.waker_detections += 1;
        }
        if queue.waker_detections == 3 {
            self.wakers = true;
            queue.waker = Some(last);
            queue.tentative_waker = None;
        }
    }

    fn add_request(&mut self, q: usize, request: Request) {
        let old_raise = self.raise_of(q);
        let mut interactive = false;
        self.queued += 1;
        if self.queues[q].requests.is_empty() {
            self.check_waker(q);
            if self.queues[q].decrease_time + jiffies(1_000) <= self.jiffy {
                self.reset_inject_limit(q);
            }
            let queue = &self.queues[q];
            if self.in_service == Some(q)
                && (self.in_driver == 0 || (queue.last_service_time > 0 && self.injected))
                && queue.decrease_time + jiffies(10) <= self.jiffy
            {
                self.last_empty_occupied = self.now;
                self.wait_dispatch = true;
                if self.in_driver == 0 {
                    self.injected = false;
                }
            }
        }
        self.queues[q].requests.push_back(request);
        if !self.queues[q].busy {
            interactive = self.idle_to_busy(q, old_raise);
        }
        if self.low_latency && (old_raise == 1 || self.raise_of(q) == 1 || interactive) {
            self.queues[q].raised_since = self.jiffy;
        }
    }

    /// `bfq_handle_burst`.
    fn handle_burst(&mut self, q: usize) {
        if self.queues[q].in_burst_list || self.queues[q].in_large_burst {
            return;
        }
        let group = self.hierarchy.group_of(q);
        if self.last_in_burst + BURST_INTERVAL < self.jiffy || self.burst_group != Some(group) {
            self.large_burst = false;
            for queue in &mut self.queues {
                queue.in_burst_list = false;
            }
            self.burst_size = 0;
            if self.all_busy() == 0 {
                self.queues[q].in_burst_list = true;
                self.burst_size = 1;
            }
            self.burst_group = Some(group);
        } else if self.large_burst {
            self.queues[q].in_large_burst = true;
        } else {
            self.burst_size += 1;
            self.queues[q].in_burst_list = true;
            if self.burst_size == LARGE_BURST {
                self.large_burst = true;
                for queue in &mut self.queues {
                    queue.in_large_burst |= std::mem::take(&mut queue.in_burst_list);
                }
            }
        }
        self.last_in_burst = self.jiffy;
    }

    /// `bfq_bfqq_handle_idle_busy_switch`. Returns whether the queue is taken for interactive.
    fn idle_to_busy(&mut self, q: usize, old_raise: u32) -> bool {
        let default = self.hierarchy.entities[q].plain_weight == DEFAULT_WEIGHT;
        let queue = &self.queues[q];
        let idle_for_long = queue.dispatched == 0 && queue.budget_timeout + MIN_IDLE < self.jiffy;
        let arrived_in_time = self.now <= queue.last_end + self.slice_idle * 3;
        let in_burst = queue.in_large_burst;
        let soft_rt = queue.seek_history != u32::MAX
            && !in_burst
            && queue.soft_rt_next_start < self.jiffy
            && queue.dispatched == 0
            && default;
        let interactive = !in_burst && idle_for_long && default;
        let deserves = self.low_latency && (old_raise > 1 || interactive || soft_rt);
        let wants_to_preempt = self.update_budget_for_activation(q, arrived_in_time);
        let queue = &mut self.queues[q];
        if !queue.just_created
            && idle_for_long
            && queue.budget_timeout + jiffies(10_000) < self.jiffy
        {
            queue.in_burst_list = false;
            queue.in_large_burst = false;
        }
        queue.just_created = false;
        if !queue.io_bound {
            if arrived_in_time {
                queue.requests_within_timer += 1;
                queue.io_bound = queue.requests_within_timer >= REQUESTS_WITHIN_TIMER;
            } else {
                queue.requests_within_timer = 0;
            }
        }
        if self.low_latency {
            self.raise_on_arrival(q, old_raise, deserves, interactive, in_burst, soft_rt);
        }
        let queue = &mut self.queues[q];
        queue.last_idle_backlogged = self.jiffy;
        queue.service_from_backlogged = 0;
        queue.soft_rt_update = false;
        self.add_busy(q);
        if let Some(serving) = self.in_service
            && ((wants_to_preempt && self.raise_of(q) >= self.raise_of(serving))
                || self.is_above(q, serving)
                || !self.better_to_idle(serving))
            && self.hierarchy.next_may_preempt()
        {
            self.expire(serving, false, Reason::Preempted);
        }
        interactive
    }

    /// `bfq_bfqq_higher_class_or_weight`.
    fn is_above(&self, q: usize, serving: usize) -> bool {
        let (e, s) = (&self.hierarchy.entities[q], &self.hierarchy.entities[serving]);
        if e.class < s.class {
            return true;
        }
        if self.hierarchy.group_of(q) == self.hierarchy.group_of(serving) {
            e.weight > s.weight
        } else {
            self.hierarchy.outer_weight(q) > self.hierarchy.outer_weight(serving)
        }
    }

    fn update_budget_for_activation(&mut self, q: usize, arrived_in_time: bool) -> bool {
        let left = self.budget_left(q);
        let max_budget = self.queues[q].max_budget;
        let next = self.next_sectors(q).unwrap_or(0);
        let recovers = self.queues[q].non_blocking_wait && arrived_in_time && left > 0;
        let entity = &mut self.hierarchy.entities[q];
        entity.service = 0;
        if recovers {
            entity.budget = (left as u64).min(max_budget);
        } else {
            entity.budget = max_budget.max(next);
            self.queues[q].non_blocking_wait = false;
        }
        recovers
    }

    /// `bfq_update_bfqq_wr_on_rq_arrival`.
    fn raise_on_arrival(
        &mut self,
        q: usize,
        old_raise: u32,
        deserves: bool,
        interactive: bool,
        in_burst: bool,
        soft_rt: bool,
    ) {
        let duration = self.raise_duration();
        let least = 2 * self.min_budget();
        let jiffy = self.jiffy;
        let queue = &mut self.queues[q];
        let entity = &mut self.hierarchy.entities[q];
        if old_raise == 1 && deserves {
            if interactive {
                queue.service_raised = 0;
                entity.raise = RAISE;
                queue.raised_for = duration;
            } else {
                queue.raise_at_switch = LONG_AGO;
                entity.raise = RAISE * SOFT_RT_FACTOR;
                queue.raised_for = SOFT_RT_RAISE;
            }
            entity.budget = entity.budget.min(least);
        } else if old_raise > 1 {
            if interactive {
                entity.raise = RAISE;
                queue.raised_for = duration;
            } else if in_burst {
                entity.raise = 1;
            } else if soft_rt {
                if queue.raised_for != SOFT_RT_RAISE {
                    queue.raise_at_switch = queue.raised_since;
                    queue.raised_for = SOFT_RT_RAISE;
                    entity.raise = RAISE * SOFT_RT_FACTOR;
                }
                queue.raised_since = jiffy;
            }
        }
    }

    /// `bfq_rq_enqueued`.
    fn enqueued(&mut self, q: usize, sectors: u32) {
        if self.in_service != Some(q) || !self.queues[q].wait_request {
            return;
        }
        let timeout = self.queues[q].budget_timeout <= self.jiffy;
        let small = self.queues[q].requests.len() == 1 && sectors < 32;
        if small && self.idling_boosts(q) && !timeout {
            return;
        }
        self.queues[q].wait_request = false;
        self.idle_timer = None;
        if timeout {
            self.expire(q, false, Reason::BudgetTimeout);
        }
    }

    // ---- Service -----------------------------------------------------------------------------------

    fn set_in_service(&mut self) -> Option<usize> {
        // bfq_get_next_queue's check, before it walks down.
        if self.all_busy() == 0 {
            return None;
        }
        let q = self.hierarchy.select()?;
        self.budgets_assigned = (self.budgets_assigned * 7 + 256) / 8;
        let raise = self.raise_of(q);
        let queue = &mut self.queues[q];
        if queue.raised_since < self.jiffy
            && raise > 1
            && queue.raised_for == SOFT_RT_RAISE
            && queue.budget_timeout < self.jiffy
        {
            if queue.budget_timeout > queue.raised_since {
                queue.raised_since += self.jiffy - queue.budget_timeout;
            } else {
                queue.raised_since = self.jiffy;
            }
        }
        let entity = &self.hierarchy.entities[q];
        let times = if queue.raised_for == SOFT_RT_RAISE {
            1
        } else {
            i64::from(entity.weight / entity.plain_weight)
        };
        queue.budget_timeout = self.jiffy + self.timeout * times;
        self.last_budget_start = self.now;
        self.in_service = Some(q);
        Some(q)
    }

    /// `bfq_bfqq_is_slow`: whether, and for how many ms it was in service.
    fn is_slow(&self, q: usize, compensate: bool) -> (bool, u64) {
        let until = if compensate { self.last_idling_start } else { self.now };
        let us = until.saturating_sub(self.last_budget_start) / 1000;
        let slow = seeky(self.queues[q].seek_history);
        if us < 1000 {
            return (slow, MIN_THINK_TIME / 1_000_000);
        }
        if us > 20_000 {
            return (self.hierarchy.entities[q].service < self.max_budget / 2, us / 1000);
        }
        (slow, us / 1000)
    }

    /// `bfq_bfqq_charge_time`.
    fn charge_time(&mut self, q: usize, ms: u64) {
        let service = self.hierarchy.entities[q].service;
        let mut charge = service;
        if ms > 0 && ms < TIMEOUT_MS {
            charge = self.max_budget * ms / TIMEOUT_MS;
        }
        let charge = charge.max(service);
        let entity = &mut self.hierarchy.entities[q];
        entity.budget = entity.budget.max(charge);
        self.served(q, charge - service);
    }

    fn served(&mut self, q: usize, sectors: u64) {
        if self.raise_of(q) > 1 {
            self.queues[q].service_raised += sectors;
        }
        self.queues[q].service_from_backlogged += sectors;
        self.hierarchy.serve(q, sectors);
    }

    fn soft_rt_next_start(&self, q: usize) -> i64 {
        let queue = &self.queues[q];
        let second = 1_000_000_000 / JIFFY;
        let by_rate = second * queue.service_from_backlogged / MAX_SOFT_RT_RATE;
        let idle = (self.slice_idle / JIFFY) as i64;
        queue
            .soft_rt_next_start
            .max(queue.last_idle_backlogged + by_rate as i64)
            .max(self.jiffy + idle + 4)
    }

    /// `bfq_bfqq_expire`.
    fn expire(&mut self, q: usize, compensate: bool, reason: Reason) {
        let (slow, ms) = self.is_slow(q, compensate);
        let raised = self.raise_of(q) > 1;
        let entity = &self.hierarchy.entities[q];
        let left = self.budget_left(q);
        if !raised
            && (slow || (reason == Reason::BudgetTimeout && left >= (entity.budget / 3) as i64))
        {
            self.charge_time(q, ms);
        }
        let entity = &self.hierarchy.entities[q];
        if reason == Reason::TooIdle && entity.service <= 2 * entity.budget / 10 {
            self.queues[q].io_bound = false;
        }
        if self.low_latency && !raised {
            self.queues[q].raised_since = self.jiffy;
        }
        if self.low_latency && self.queues[q].requests.is_empty() {
            if self.queues[q].dispatched > 0 {
                self.queues[q].soft_rt_update = true;
            } else if self.raise_of(q) != RAISE {
                self.queues[q].soft_rt_next_start = self.soft_rt_next_start(q);
            }
        }
        self.injected = false;
        self.wait_dispatch = false;
        self.waited = None;
        self.recalc_budget(q, reason);
        self.leave_service(q, reason);
        if !self.queues[q].busy
            && reason != Reason::BudgetTimeout
            && reason != Reason::BudgetExhausted
        {
            // Its service stays: if the next request comes in time, it goes on with this budget.
            self.queues[q].non_blocking_wait = true;
        } else {
            self.hierarchy.entities[q].service = 0;
        }
    }

    /// `__bfq_bfqq_recalc_budget`.
    fn recalc_budget(&mut self, q: usize, reason: Reason) {
        let least = self.min_budget();
        let raised = self.raise_of(q) > 1;
        let mut budget = if raised { 2 * least } else { self.queues[q].max_budget };
        if !raised {
            budget = match reason {
                Reason::TooIdle if self.queues[q].dispatched > 0 => {
                    (budget * 2).min(self.max_budget)
                }
                Reason::TooIdle if budget > 5 * least => budget - 4 * least,
                Reason::TooIdle => least,
                Reason::BudgetTimeout => (budget * 2).min(self.max_budget),
                Reason::BudgetExhausted => (budget * 4).min(self.max_budget),
                Reason::NoMoreRequests => self.hierarchy.entities[q].service.max(least),
                Reason::Preempted => return,
            };
        }
        if self.budgets_assigned >= STATS_MIN_BUDGETS && self.user_max_budget == 0 {
            budget = budget.min(self.max_budget);
        }
        self.queues[q].max_budget = budget;
        if let Some(next) = self.next_sectors(q) {
            self.hierarchy.entities[q].budget = budget.max(next);
        }
    }

    /// `__bfq_bfqq_expire`.
    fn leave_service(&mut self, q: usize, reason: Reason) {
        if self.queues[q].requests.is_empty()
            && !(reason == Reason::Preempted && self.needs_idling(q))
        {
            if self.queues[q].dispatched == 0 {
                self.queues[q].budget_timeout = self.jiffy;
            }
            self.del_busy(q, true);
        } else {
            self.hierarchy.requeue(q, true, true);
        }
        self.queues[q].wait_request = false;
        self.idle_timer = None;
        self.in_service = None;
        self.hierarchy.reset_in_service(q);
    }

    fn may_expire_for_timeout(&self, q: usize) -> bool {
        let queue = &self.queues[q];
        let budget = self.hierarchy.entities[q].budget;
        (!queue.wait_request || self.budget_left(q) >= (budget / 3) as i64)
            && queue.budget_timeout <= self.jiffy
    }

    /// `bfq_select_queue`.
    fn select_queue(&mut self) -> Option<usize> {
        let mut current = self.in_service;
        if let Some(q) = current
            && self.may_expire_for_timeout(q)
            && !self.must_idle(q)
        {
            self.expire(q, false, Reason::BudgetTimeout);
            current = None;
        }
        loop {
            let q = match current {
                Some(q) => q,
                None => self.set_in_service()?,
            };
            let reason = if let Some(sectors) = self.next_sectors(q) {
                if sectors as i64 <= self.budget_left(q) {
                    if self.queues[q].wait_request {
                        self.queues[q].wait_request = false;
                        self.idle_timer = None;
                    }
                    return Some(q);
                }
                Reason::BudgetExhausted
            } else {
                if self.queues[q].wait_request
                    || (self.queues[q].dispatched > 0 && self.better_to_idle(q))
                {
                    return self.inject(q);
                }
                Reason::NoMoreRequests
            };
            self.expire(q, false, reason);
            current = None;
        }
    }

    /// Whose request may be served while `q` is idled for.
    fn inject(&mut self, q: usize) -> Option<usize> {
        let fits = |o: usize| {
            self.next_sectors(o).is_some_and(|sectors| sectors as i64 <= self.budget_left(o))
        };
        if let Some(waker) = self.queues[q].waker
            && self.queues[waker].busy
            && fits(waker)
        {
            return Some(waker);
        }
        // A queue that waits for this one's requests.
        let blocked = |o: &usize| self.queues[*o].waker == Some(q);
        if self.wakers
            && let Some(blocked) = (0..self.queues.len()).find(blocked)
            && self.queues[blocked].busy
            && !self.queues[blocked].has_short_think_time
            && fits(blocked)
        {
            return Some(blocked);
        }
        let raised = self.raise_of(q) > 1;
        let short = self.queues[q].has_short_think_time;
        if self.idling_boosts(q) || (raised && self.raised_busy <= 1 && short) {
            return None;
        }
        let limit = self.queues[q].inject_limit;
        if self.in_driver >= limit {
            return None;
        }
        let always = !raised || !short;
        let found = self.hierarchy.active_queues().find(|&o| {
            let large = self.queues[o].requests.front().is_some_and(|r| r.sectors >= LARGE);
            let limit = if large { limit.min(1) } else { limit };
            (always || self.raise_of(o) > 1) && fits(o) && self.in_driver < limit
        })?;
        self.injected = true;
        Some(found)
    }

    /// `bfq_update_wr_data`.
    fn update_raise(&mut self, q: usize) {
        if self.raise_of(q) > 1 {
            let queue = &self.queues[q];
            if queue.in_large_burst {
                self.end_raise(q);
            } else if queue.raised_since + queue.raised_for < self.jiffy {
                if queue.raised_for != SOFT_RT_RAISE
                    || queue.raise_at_switch + self.raise_duration() < self.jiffy
                {
                    self.end_raise(q);
                } else {
                    // Back to interactive.
                    self.hierarchy.entities[q].raise = RAISE;
                    self.queues[q].raised_for = self.raise_duration();
                    self.queues[q].raised_since = self.queues[q].raise_at_switch;
                }
            }
            if self.raise_of(q) > 1
                && self.queues[q].raised_for != SOFT_RT_RAISE
                && self.queues[q].service_raised > MAX_SERVICE_RAISED
            {
                self.end_raise(q);
            }
        }
        let entity = &self.hierarchy.entities[q];
        if (entity.weight > entity.plain_weight) != (entity.raise > 1) {
            self.update_weight(q);
        }
    }

    // ---- The device --------------------------------------------------------------------------------

    fn reset_rate(&mut self, sectors: Option<u64>) {
        match sectors {
            Some(sectors) => {
                self.last_dispatch = self.now;
                self.first_dispatch = self.now;
                self.rate_samples = 1;
                self.sequential_samples = 0;
                self.sectors_dispatched = sectors;
                self.last_max_sectors = sectors;
            }
            None => self.rate_samples = 0,
        }
    }

    /// `bfq_update_rate_reset`.
    fn update_rate_and_reset(&mut self, sectors: Option<u64>) {
        if self.rate_samples >= 32 && self.delta_from_first >= 300_000_000 {
            let observed = self.last_completion.saturating_sub(self.first_dispatch);
            self.delta_from_first = self.delta_from_first.max(observed);
            let us = (self.delta_from_first / 1000).max(1);
            let rate = (self.sectors_dispatched << RATE_SHIFT) / us;
            let sequential = self.sequential_samples >= (3 * self.rate_samples) >> 2;
            if (sequential || rate > self.peak_rate) && rate <= 20 << RATE_SHIFT {
                let weight = 9 * self.sequential_samples / self.rate_samples;
                let divisor = 10 - (weight * self.delta_from_first / 1_000_000_000).min(8);
                self.peak_rate = (self.peak_rate * (divisor - 1) / divisor + rate / divisor).max(1);
                if self.user_max_budget == 0 {
                    self.max_budget = (self.peak_rate * 1000 * self.timeout_ms) >> RATE_SHIFT;
                }
            }
        }
        self.reset_rate(sectors);
    }

    /// `bfq_update_peak_rate`.
    fn update_peak_rate(&mut self, sectors: u64) {
        if self.rate_samples == 0 {
            self.reset_rate(Some(sectors));
        } else if self.now - self.last_dispatch > 100_000_000 && self.in_driver == 0 {
            self.update_rate_and_reset(Some(sectors));
        } else {
            self.rate_samples += 1;
            if (self.in_driver > 0 || self.now - self.last_completion < MIN_THINK_TIME)
                && sectors >= u64::from(LARGE)
            {
                self.sequential_samples += 1;
            }
            self.sectors_dispatched += sectors;
            self.last_max_sectors = if self.rate_samples.is_multiple_of(32) {
                sectors
            } else {
                self.last_max_sectors.max(sectors)
            };
            self.delta_from_first = self.now - self.first_dispatch;
            if self.delta_from_first >= 1_000_000_000 {
                self.update_rate_and_reset(Some(sectors));
            }
        }
        self.last_dispatch = self.now;
    }

    /// `bfq_update_hw_tag`.
    fn update_hw_tag(&mut self) {
        self.max_in_driver = self.max_in_driver.max(self.in_driver);
        if self.in_driver + self.queued <= 3 {
            return;
        }
        if let Some(q) = self.in_service {
            let queue = &self.queues[q];
            let own = queue.dispatched + queue.requests.len() as u32;
            if queue.has_short_think_time && own < 3 && self.in_driver < 3 {
                return;
            }
        }
        self.hw_tag_samples += 1;
        if self.hw_tag_samples <= 32 {
            return;
        }
        self.hw_tag = self.max_in_driver > 3;
        self.max_in_driver = 0;
        self.hw_tag_samples = 0;
    }

    /// `bfq_update_inject_limit`.
    fn update_inject_limit(&mut self, q: usize) {
        let time = self.now - self.last_empty_occupied;
        let (alone, most) = (self.in_driver == 1, self.max_in_driver);
        let jiffy = self.jiffy;
        let queue = &mut self.queues[q];
        let old = queue.inject_limit;
        if queue.last_service_time > 0 && self.injected {
            let threshold = queue.last_service_time * 3 / 2;
            if time >= threshold && old > 0 {
                queue.inject_limit -= 1;
                queue.decrease_time = jiffy;
            } else if time < threshold && old <= most {
                queue.inject_limit += 1;
            }
        }
        if (queue.last_service_time == 0 && alone) || time < queue.last_service_time {
            if queue.last_service_time == 0 {
                queue.inject_limit = old.max(1);
            }
            queue.last_service_time = time;
        } else if !self.injected && alone {
            queue.last_service_time = time;
        }
        self.waited = None;
        self.injected = false;
    }
}

impl Queue {
    fn new() -> Self {
        Self {
            requests: VecDeque::new(),
            dispatched: 0,
            busy: false,
            wait_request: false,
            non_blocking_wait: false,
            has_short_think_time: true,
            io_bound: true,
            in_large_burst: false,
            in_burst_list: false,
            just_created: true,
            soft_rt_update: false,
            counted_weight: None,
            pending: false,
            max_budget: 2 * DEFAULT_MAX_BUDGET / 3,
            budget_timeout: LONG_AGO,
            last_end: 0,
            think_samples: 0,
            think_total: 0,
            think_mean: 0,
            seek_history: 1,
            raised_since: 0,
            raised_for: 0,
            raise_at_switch: LONG_AGO,
            soft_rt_next_start: 0,
            last_idle_backlogged: 0,
            service_from_backlogged: 0,
            service_raised: 0,
            requests_within_timer: 0,
            inject_limit: 0,
            decrease_time: 0,
            last_service_time: 0,
            waker: None,
            tentative_waker: None,
            waker_detections: 0,
            waker_since: 0,
        }
    }
}

/// `BFQQ_SEEKY`.
const fn seeky(history: u32) -> bool {
    history.count_ones() > 19
}

impl Elevator for Bfq {
    /// `bfq_limit_depth`: tags by the queue's share of the weights; of writes fewer, to keep some for reads.
    fn admits(&self, process: u32, write: bool, held: u32) -> bool {
        if held == 0 {
            return true;
        }
        let part = match (write, self.raised_busy > 0) {
            (false, _) => 1.0,
            (true, false) => 0.75,
            (true, true) => 0.375,
        };
        // Rounded to the nearest.
        let limit = (TAGS * part * self.hierarchy.share(process as usize) + 0.5) as u32;
        held < limit.max(1)
    }

    fn insert(&mut self, now: u64, request: Request) {
        self.at(now);
        let q = request.process as usize;
        if self.queues[q].just_created && (self.burst_size > 0 || self.all_busy() == 0) {
            self.handle_burst(q);
        }
        self.update_think_time(q);
        self.update_has_short_think_time(q);
        let queue = &mut self.queues[q];
        queue.seek_history = queue.seek_history << 1 | u32::from(request.sectors < LARGE);
        if queue.seek_history == u32::MAX
            && queue.raised_for == SOFT_RT_RAISE
            && self.raise_of(q) > 1
        {
            self.end_raise(q);
        }
        self.add_request(q, request);
        self.enqueued(q, request.sectors);
    }

    fn dispatch(&mut self, now: u64) -> Option<Request> {
        self.at(now);
        if self.all_busy() == 0 {
            return None;
        }
        let q = self.select_queue()?;
        let sectors = self.next_sectors(q)?;
        self.served(q, sectors);
        if self.in_service == Some(q) && std::mem::take(&mut self.wait_dispatch) {
            self.waited = self.queues[q].requests.front().map(|r| r.id);
        }
        self.queues[q].dispatched += 1;
        self.update_peak_rate(sectors);
        let request = self.queues[q].requests.pop_front()?;
        self.queued -= 1;
        if self.in_service == Some(q) {
            self.update_raise(q);
        } else if self.queues[q].requests.is_empty() {
            // An injected request was its last.
            self.del_busy(q, false);
            let entity = &mut self.hierarchy.entities[q];
            entity.budget = 0;
            entity.service = 0;
        } else {
            self.requeue_with_budget(q);
        }
        self.in_driver += 1;
        Some(request)
    }

    fn has_work(&self) -> bool {
        self.all_busy() > 0
    }

    fn completed(&mut self, now: u64, request: &Request, _started: u64) -> bool {
        self.at(now);
        let q = request.process as usize;
        if self.waited == Some(request.id) {
            self.update_inject_limit(q);
        }
        self.update_hw_tag();
        self.in_driver -= 1;
        self.queues[q].dispatched -= 1;
        let idle = self.queues[q].dispatched == 0;
        if idle && !self.queues[q].busy {
            self.queues[q].budget_timeout = self.jiffy;
            self.end_pending(q);
        }
        self.queues[q].last_end = now;
        let us = (now - self.last_completion) / 1000;
        if us > MIN_THINK_TIME / 1000
            && (self.last_max_sectors << RATE_SHIFT) / us < 1 << (RATE_SHIFT - 10)
        {
            self.update_rate_and_reset(None);
        }
        self.last_completion = now;
        self.last_completed = Some(q);
        if self.queues[q].soft_rt_update
            && idle
            && self.queues[q].requests.is_empty()
            && self.raise_of(q) != RAISE
        {
            self.queues[q].soft_rt_next_start = self.soft_rt_next_start(q);
        }
        if self.in_service == Some(q) {
            if self.must_idle(q) {
                if idle {
                    self.arm_idle_timer(q);
                }
                return false;
            } else if self.may_expire_for_timeout(q) {
                self.expire(q, false, Reason::BudgetTimeout);
            } else if self.queues[q].requests.is_empty() && (idle || !self.better_to_idle(q)) {
                self.expire(q, false, Reason::NoMoreRequests);
            }
        }
        self.in_driver == 0 && self.queued > 0
    }

    fn timer_at(&self) -> Option<u64> {
        self.idle_timer
    }

    /// `bfq_idle_slice_timer_body`.
    fn timer(&mut self, now: u64) {
        self.at(now);
        self.idle_timer = None;
        let Some(q) = self.in_service else { return };
        self.queues[q].wait_request = false;
        if self.queues[q].budget_timeout <= self.jiffy {
            self.expire(q, true, Reason::BudgetTimeout);
        } else if self.queues[q].requests.is_empty() {
            self.expire(q, true, Reason::TooIdle);
        }
    }
}

impl Bfq {
    /// `bfq_updated_next_req`: what is not in service gets a budget that its next request fits in.
    fn requeue_with_budget(&mut self, q: usize) {
        let next = self.next_sectors(q).unwrap_or(0);
        let budget = self.queues[q].max_budget.max(next).max(self.hierarchy.entities[q].service);
        if self.hierarchy.entities[q].budget != budget {
            self.hierarchy.entities[q].budget = budget;
            self.hierarchy.requeue(q, false, false);
        }
    }
}
