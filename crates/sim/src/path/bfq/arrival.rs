//! bfq: a request comes. Think time, wakers, bursts of new queues, raised weights, preemption.

use super::{
    BURST_INTERVAL, Bfq, DEFAULT_WEIGHT, LARGE_BURST, LONG_AGO, MIN_IDLE, RAISE, Reason,
    SOFT_RT_FACTOR, SOFT_RT_RAISE, jiffies,
};
use crate::path::request::Request;

impl Bfq {
    pub(super) fn update_think_time(&mut self, q: usize, is_new: bool) {
        let queue = &mut self.queues[q];
        if queue.dispatched > 0 || queue.busy {
            return;
        }
        // Of a new queue the end of its last request is 1 ns ahead, and so long ago.
        let since = if is_new { u64::MAX } else { self.now - queue.last_end };
        let elapsed = since.min(2 * self.slice_idle);
        queue.think_samples = (7 * queue.think_samples + 256) / 8;
        queue.think_total = (7 * queue.think_total + 256 * elapsed) / 8;
        queue.think_mean = (queue.think_total + 128) / queue.think_samples;
    }

    pub(super) fn update_has_short_think_time(&mut self, q: usize) {
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

    pub(super) fn reset_inject_limit(&mut self, q: usize) {
        self.waited = None;
        let queue = &mut self.queues[q];
        queue.last_service_time = 0;
        queue.inject_limit = u32::from(!queue.has_short_think_time);
        queue.decrease_time = self.jiffy;
    }

    /// `bfq_check_waker`.
    pub(super) fn check_waker(&mut self, q: usize) {
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
            queue.tentative_waker = None;
            if let Some(before) = queue.waker.replace(last) {
                self.queues[before].woken.retain(|&other| other != q);
            }
            self.wakes_last(last, q);
        }
    }

    /// `bfq_update_io_intensity`.
    fn update_io_intensity(&mut self, q: usize) {
        let queue = &mut self.queues[q];
        let time = self.now - queue.io_start;
        if queue.requests.is_empty() && queue.dispatched == 0 {
            queue.idle_time += self.now - queue.last_end;
        }
        if queue.just_created {
            return;
        }
        queue.io_bound = queue.idle_time * 5 <= time;
        if time > 200_000_000 {
            queue.io_start = self.now - time / 2;
            queue.idle_time /= 2;
        }
    }

    pub(super) fn add_request(&mut self, q: usize, request: Request) {
        let old_raise = self.raise_of(q);
        let mut interactive = false;
        self.queued += 1;
        if self.outstanding[request.process as usize] == 1 {
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
        self.update_io_intensity(q);
        let head = self.last_position;
        let is_next = self.queues[q].requests.add(request, head);
        if !self.queues[q].busy {
            interactive = self.idle_to_busy(q, old_raise);
        } else if is_next && self.in_service != Some(q) {
            self.requeue_with_budget(q);
        }
        if self.low_latency && (old_raise == 1 || self.raise_of(q) == 1 || interactive) {
            self.queues[q].raised_since = self.jiffy;
        }
    }

    /// `bfq_handle_burst`.
    pub(super) fn handle_burst(&mut self, q: usize) {
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
    pub(super) fn idle_to_busy(&mut self, q: usize, old_raise: u32) -> bool {
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
    pub(super) fn is_above(&self, q: usize, serving: usize) -> bool {
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

    pub(super) fn update_budget_for_activation(&mut self, q: usize, arrived_in_time: bool) -> bool {
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
    pub(super) fn raise_on_arrival(
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
    pub(super) fn enqueued(&mut self, q: usize, sectors: u32) {
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
}
