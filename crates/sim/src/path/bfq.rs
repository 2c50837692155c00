//! bfq as the kernel has it (`block/bfq-iosched.c`, Linux 6.17): which queue is in service, for how
//! long, and whether the device idles for it.
//!
//! A *queue* is a process's; its requests are served while it is *in service*: until its budget or its time
//! (`timeout_sync`) is used up, or it has no more requests. Where somebody's share must be protected (queues of
//! different weights, or more than one group with requests), the device *idles* for a queue that has become
//! empty, up to `slice_idle`; meanwhile a few requests of others may be *injected*. `low_latency` *raises*
//! the weight of queues that look interactive or soft real-time.
//!
//! Processes of one group whose first requests come within 180 ms of each other share a queue, for good
//! (`bfq_do_early_stable_merge`); here all of a group with one I/O priority do, as tasks start together.
//!
//! Function by function the kernel's, with its names and constants. Left out: asynchronous queues, the idle
//! class, merging of queues that work close to each other (not done for flash with queueing), splitting.
//! Time that the kernel counts in jiffies is counted so (250 a second).

mod arrival;
mod device;
mod service;
mod sorted;

use rtvirtio_spec::settings::Bfq as Parameters;

use self::sorted::Sorted;
use super::request::{Elevator, Request};
use super::wf2q::Hierarchy;

/// ns in a jiffy: 250 a second, as Debian's kernels have.
pub(super) const JIFFY: u64 = 4_000_000;
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
/// `BFQQ_SEEK_THR`, sectors.
const SEEK: u32 = 8 * 100;
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
/// The weight of a process without an I/O priority of its own.
const DEFAULT_WEIGHT: u32 = 40;
/// What a device has had at once that deep writers used: one of the benchmarks' is 64 deep.
const SEASONED_DEPTH: u32 = 64;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// It has had a request.
    exists: bool,
    requests: Sorted,
    /// Where its last one ended.
    last_position: u32,
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
    /// How long it has been doing I/O, and for how much of that it had none, ns.
    io_start: u64,
    idle_time: u64,
    inject_limit: u32,
    decrease_time: i64,
    last_service_time: u64,
    waker: Option<usize>,
    tentative_waker: Option<usize>,
    waker_detections: u32,
    waker_since: u64,
    /// Queues that it wakes, the one that was busy last first (`woken_list`).
    woken: Vec<usize>,
    /// Several processes have it.
    shared: bool,
}

/// The scheduler.
#[derive(Debug)]
pub(super) struct Bfq {
    slice_idle: u64,
    timeout: i64,
    low_latency: bool,
    user_max_budget: u64,
    hierarchy: Hierarchy,
    queues: Vec<Queue>,
    /// Each process's queue, and how many requests it has, queued or in the driver (`bic->requests`).
    queue_of: Vec<usize>,
    outstanding: Vec<u32>,
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
    /// Whether the device queues; none: it is not known yet.
    hw_tag: Option<bool>,
    hw_tag_samples: u32,
    max_in_driver: u32,
    // The device's rate.
    peak_rate: u64,
    rate_samples: u64,
    sequential_samples: u64,
    sectors_dispatched: u64,
    last_max_sectors: u64,
    last_position: u32,
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
        let mut owners: Vec<(Process, u32)> = Vec::new();
        let queue_of: Vec<_> = processes
            .iter()
            .map(|process| {
                let queue = owners.iter().position(|(owner, _)| owner == process);
                let queue = queue.unwrap_or(owners.len());
                if queue == owners.len() {
                    owners.push((*process, 0));
                }
                owners[queue].1 += 1;
                queue
            })
            .collect();
        let weight = |p: &Process| u32::from(8 - p.level.min(7)) * 10;
        let queues: Vec<_> = owners.iter().map(|(p, _)| (p.group, p.class, weight(p))).collect();
        let mut bfq = Self {
            slice_idle: u64::from(parameters.slice_idle_us) * 1000,
            timeout: jiffies(i64::from(parameters.timeout_sync_ms)),
            low_latency: parameters.low_latency,
            user_max_budget: u64::from(parameters.max_budget),
            hierarchy: Hierarchy::new(groups, &queues),
            queues: owners.iter().map(|&(_, processes)| Queue::new(processes > 1)).collect(),
            outstanding: vec![0; queue_of.len()],
            queue_of,
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
            max_budget: 0,
            budgets_assigned: 0,
            hw_tag: None,
            hw_tag_samples: 0,
            max_in_driver: 0,
            peak_rate: REFERENCE_RATE * 2 / 3,
            rate_samples: 0,
            sequential_samples: 0,
            sectors_dispatched: 0,
            last_max_sectors: 0,
            last_position: 0,
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
            last_empty_occupied: 0,
            now: 0,
            jiffy: 0,
        };
        // As when the parameters are written (bfq_max_budget_store, bfq_timeout_sync_store).
        bfq.max_budget = match bfq.user_max_budget {
            0 => bfq.budget_of_rate(),
            budget => budget,
        };
        bfq
    }

    /// It has been at work before: `hw_tag` stays once it is set, and `max_rq_in_driver` does not fall. `peak_rate` does,
    /// beside a writer with a limit, so it is not known: that of the start is about the mean of such and a writer without.
    pub(super) const fn season(mut self) -> Self {
        self.hw_tag = Some(true);
        self.max_in_driver = SEASONED_DEPTH;
        self.budgets_assigned = STATS_MIN_BUDGETS;
        self
    }

    /// `bfq_init_bfqq`.
    fn create(&mut self, q: usize) {
        let budget = 2 * self.current_max_budget() / 3;
        let queue = &mut self.queues[q];
        queue.max_budget = budget;
        queue.io_start = self.now;
        queue.last_end = self.now;
        queue.raised_since = self.jiffy;
        queue.soft_rt_next_start = self.jiffy;
        queue.decrease_time = self.jiffy;
    }

    /// `bfq_calc_max_budget`.
    const fn budget_of_rate(&self) -> u64 {
        let timeout_ms = self.timeout as u64 * JIFFY / 1_000_000;
        (self.peak_rate * 1000 * timeout_ms) >> RATE_SHIFT
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
        self.queues[q].requests.next().map(|r| u64::from(r.sectors))
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
        raised || self.asymmetric(Some(q)) || self.all_busy() == 1
    }

    fn idling_boosts(&self, q: usize) -> bool {
        let sequential = !seeky(self.queues[q].seek_history)
            && self.queues[q].io_bound
            && self.queues[q].has_short_think_time;
        self.hw_tag == Some(false) && sequential && self.raised_busy == 0
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
        if self.queues[q].raised_for != SOFT_RT_RAISE {
            self.queues[q].soft_rt_next_start = self.jiffy;
        }
        self.hierarchy.entities[q].raise = 1;
        self.queues[q].raised_for = 0;
        self.queues[q].raised_since = self.jiffy;
    }

    /// A soft real-time queue counts as interactive again, or not at all if that time is over.
    fn end_soft_rt(&mut self, q: usize) {
        let duration = self.raise_duration();
        if self.queues[q].raise_at_switch + duration < self.jiffy {
            self.end_raise(q);
            return;
        }
        self.hierarchy.entities[q].raise = RAISE;
        self.queues[q].raised_for = duration;
        self.queues[q].raised_since = self.queues[q].raise_at_switch;
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
        if let Some(waker) = self.queues[q].waker {
            self.wakes_last(waker, q);
        }
    }

    /// `q` is first of those that `waker` wakes.
    fn wakes_last(&mut self, waker: usize, q: usize) {
        let woken = &mut self.queues[waker].woken;
        woken.retain(|&other| other != q);
        woken.insert(0, q);
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
}

impl Queue {
    fn new(shared: bool) -> Self {
        Self {
            exists: false,
            requests: Sorted::default(),
            last_position: 0,
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
            max_budget: 0,
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
            io_start: 0,
            idle_time: 0,
            inject_limit: 0,
            decrease_time: 0,
            last_service_time: 0,
            waker: None,
            tentative_waker: None,
            waker_detections: 0,
            waker_since: 0,
            woken: Vec::new(),
            shared,
        }
    }
}

/// `BFQQ_SEEKY`.
const fn seeky(history: u32) -> bool {
    history.count_ones() > 19
}

impl Elevator for Bfq {
    /// `bfq_limit_depth`: tags by the queue's share of the weights; of writes fewer, to keep some for reads.
    fn admits(&self, process: u32, write: bool) -> bool {
        let part = match (write, self.raised_busy > 0) {
            (false, _) => 1.0,
            (true, false) => 0.75,
            (true, true) => 0.375,
        };
        !self.hierarchy.over_limit(self.queue_of[process as usize], (TAGS * part) as u64)
    }

    fn insert(&mut self, now: u64, request: Request) {
        self.at(now);
        let q = self.queue_of[request.process as usize];
        self.outstanding[request.process as usize] += 1;
        self.hierarchy.allocate(q, 1);
        let is_new = !std::mem::replace(&mut self.queues[q].exists, true);
        if is_new {
            self.create(q);
        }
        if self.queues[q].just_created && (self.burst_size > 0 || self.all_busy() == 0) {
            self.handle_burst(q);
        }
        self.update_think_time(q, is_new);
        self.update_has_short_think_time(q);
        let queue = &mut self.queues[q];
        // The first request of all is not far from anything (`get_sdist`).
        let far = !is_new && request.position.abs_diff(queue.last_position) > SEEK;
        queue.last_position = request.position + request.sectors;
        queue.seek_history = queue.seek_history << 1 | u32::from(far && request.sectors < LARGE);
        if queue.seek_history == u32::MAX
            && queue.raised_for == SOFT_RT_RAISE
            && self.raise_of(q) > 1
        {
            self.end_soft_rt(q);
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
            self.waited = self.queues[q].requests.next().map(|r| r.id);
        }
        self.queues[q].dispatched += 1;
        self.update_peak_rate(sectors);
        let request = self.queues[q].requests.take(now)?;
        self.last_position = request.position + request.sectors;
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
        self.queued > 0
    }

    fn completed(&mut self, now: u64, request: &Request, _started: u64) -> bool {
        self.at(now);
        let q = self.queue_of[request.process as usize];
        self.outstanding[request.process as usize] -= 1;
        self.hierarchy.allocate(q, -1);
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
        self.last_completed = (!self.queues[q].shared).then_some(q);
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
            self.recount_weight(q);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_one_group_and_priority_share_a_queue() {
        let process = |group, level| Process { group, class: 1, level };
        let processes = [process(1, 4), process(2, 4), process(1, 4), process(1, 0)];
        let bfq = Bfq::new(Parameters::DEFAULT, &[(0, 100), (0, 100)], &processes);
        assert_eq!(bfq.queue_of, [0, 1, 0, 2]);
        assert_eq!(bfq.queues.iter().map(|q| q.shared).collect::<Vec<_>>(), [true, false, false]);
    }
}
