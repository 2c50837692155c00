//! bfq: what it learns of the device. Its rate, whether it queues, what injection costs.

use super::{Bfq, LARGE, MIN_THINK_TIME, RATE_SHIFT};

impl Bfq {
    pub(super) fn reset_rate(&mut self, sectors: Option<u64>) {
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
    pub(super) fn update_rate_and_reset(&mut self, sectors: Option<u64>) {
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
                    self.max_budget = self.budget_of_rate();
                }
            }
        }
        self.reset_rate(sectors);
    }

    /// `bfq_update_peak_rate`.
    pub(super) fn update_peak_rate(&mut self, sectors: u64) {
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
    pub(super) fn update_hw_tag(&mut self) {
        self.max_in_driver = self.max_in_driver.max(self.in_driver);
        if self.hw_tag == Some(true) || self.in_driver + self.queued <= 3 {
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
        self.hw_tag = Some(self.max_in_driver > 3);
        self.max_in_driver = 0;
        self.hw_tag_samples = 0;
    }

    /// `bfq_update_inject_limit`.
    pub(super) fn update_inject_limit(&mut self, q: usize) {
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
