//! bfq: which queue is in service, for how long, what it is charged, and whose requests are injected.

use super::{
    Bfq, JIFFY, LARGE, MAX_SERVICE_RAISED, MAX_SOFT_RT_RATE, MIN_THINK_TIME, Reason, SOFT_RT_RAISE,
    STATS_MIN_BUDGETS, TIMEOUT_MS, seeky,
};

impl Bfq {
    pub(super) fn set_in_service(&mut self) -> Option<usize> {
        // bfq_get_next_queue's check, before it walks down.
        if self.all_busy() == 0 {
            return None;
        }
        let q = self.hierarchy.select()?;
        self.budgets_assigned = (self.budgets_assigned * 7 + 256) / 8;
        let raise = self.raise_of(q);
        let queue = &mut self.queues[q];
        queue.requests.begin_service();
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
    pub(super) fn is_slow(&self, q: usize, compensate: bool) -> (bool, u64) {
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
    pub(super) fn charge_time(&mut self, q: usize, ms: u64) {
        let service = self.hierarchy.entities[q].service;
        let charge = (self.max_budget * ms.min(TIMEOUT_MS) / TIMEOUT_MS).max(service);
        let entity = &mut self.hierarchy.entities[q];
        entity.budget = entity.budget.max(charge);
        self.served(q, charge - service);
    }

    pub(super) fn served(&mut self, q: usize, sectors: u64) {
        if self.raise_of(q) > 1 {
            self.queues[q].service_raised += sectors;
        }
        self.queues[q].service_from_backlogged += sectors;
        self.hierarchy.serve(q, sectors);
    }

    pub(super) fn soft_rt_next_start(&self, q: usize) -> i64 {
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
    pub(super) fn expire(&mut self, q: usize, compensate: bool, reason: Reason) {
        let (slow, ms) = self.is_slow(q, compensate);
        let raised = self.raise_of(q) > 1;
        let entity = &self.hierarchy.entities[q];
        let left = self.budget_left(q);
        if !raised
            && (slow || (reason == Reason::BudgetTimeout && left >= (entity.budget / 3) as i64))
        {
            self.charge_time(q, ms);
        }
        if self.low_latency && !raised {
            self.queues[q].raised_since = self.jiffy;
        }
        if self.low_latency && self.queues[q].requests.is_empty() {
            if self.queues[q].dispatched > 0 {
                self.queues[q].soft_rt_update = true;
            } else {
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
    pub(super) fn recalc_budget(&mut self, q: usize, reason: Reason) {
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
    pub(super) fn leave_service(&mut self, q: usize, reason: Reason) {
        if self.queues[q].requests.is_empty()
            && !(reason == Reason::Preempted && self.needs_idling(q))
        {
            if self.queues[q].dispatched == 0 {
                self.queues[q].budget_timeout = self.jiffy;
            }
            self.del_busy(q, true);
        } else {
            self.hierarchy.requeue(q, true, true);
            self.recount_weight(q);
        }
        self.queues[q].wait_request = false;
        self.idle_timer = None;
        self.in_service = None;
        self.hierarchy.reset_in_service(q);
    }

    pub(super) fn may_expire_for_timeout(&self, q: usize) -> bool {
        let queue = &self.queues[q];
        let budget = self.hierarchy.entities[q].budget;
        (!queue.wait_request || self.budget_left(q) >= (budget / 3) as i64)
            && queue.budget_timeout <= self.jiffy
    }

    /// `bfq_select_queue`.
    pub(super) fn select_queue(&mut self) -> Option<usize> {
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
    pub(super) fn inject(&mut self, q: usize) -> Option<usize> {
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
        if let Some(&blocked) = self.queues[q].woken.first()
            && self.queues[blocked].busy
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
            let large = self.queues[o].requests.next().is_some_and(|r| r.sectors >= LARGE);
            let limit = if large { limit.min(1) } else { limit };
            (always || self.raise_of(o) > 1) && fits(o) && self.in_driver < limit
        })?;
        self.injected = true;
        Some(found)
    }

    /// `bfq_update_wr_data`.
    pub(super) fn update_raise(&mut self, q: usize) {
        if self.raise_of(q) > 1 {
            let queue = &self.queues[q];
            if queue.in_large_burst {
                self.end_raise(q);
            } else if queue.raised_since + queue.raised_for < self.jiffy {
                if queue.raised_for == SOFT_RT_RAISE {
                    self.end_soft_rt(q);
                } else {
                    self.end_raise(q);
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
}
