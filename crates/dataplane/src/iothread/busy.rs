//! For which queues an IOThread was busy.
//!
//! A loop with one queue awake is for that queue. With several, what lies between two looks at the
//! clock is for the queue that was served or shown to its driver between them; what comes before
//! the first of them (submitting what was started before, reaping, messages) is for the queues whose
//! requests were started or have ended, request by request. That costs a look for each queue that
//! has a turn, and one more; with one queue awake nothing.

use super::{IoThread, get, get_mut};
use crate::clock::now;
use crate::key::TableKey;

/// How far a loop's time is accounted for.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// Up to here, ns.
    until: u64,
    /// Whether more than one queue was awake when it served.
    several: bool,
    /// The queue that had its turn or was shown to its driver last.
    shown: Option<TableKey>,
}

impl Busy {
    /// When it was last looked at the clock, ns.
    pub(super) const fn until(&self) -> u64 {
        self.until
    }

    /// A queue has had its turn: what passes until another one is shown to its driver is for it.
    pub(super) const fn turn_of(&mut self, key: TableKey) {
        self.shown = Some(key);
    }
}

impl IoThread {
    /// A loop begins.
    pub(super) fn begin(&mut self, began: u64) {
        self.busy = Busy { until: began, several: false, shown: None };
    }

    /// The queues are about to be served, after something was reaped or read, or nothing. Says for
    /// each what is pending, too.
    pub(super) fn before_turns(&mut self, reaped: bool) {
        // Promises need the time too: what is reserved comes back with it.
        self.busy.several = self.awake.len() > 1 || self.awake.has_reserved();
        if !self.busy.several {
            return;
        }
        let mut all = 0;
        for entry in self.awake.keys().filter_map(|key| get(&self.served, key)) {
            entry.queue.look();
            all += u64::from(entry.work);
        }
        if !reaped || all == 0 {
            return;
        }
        let now = now();
        let spent = now.saturating_sub(self.busy.until);
        for key in self.awake.keys() {
            if let Some(entry) = get_mut(&mut self.served, key) {
                let work = std::mem::take(&mut entry.work);
                entry.queue.stats().busy(spent * u64::from(work) / all);
            }
        }
        self.busy.until = now;
    }

    /// A queue has had its turn, in which it started so many requests.
    pub(super) fn after_turn(&mut self, key: TableKey, started: u32, is_spent: bool) {
        if let Some(entry) = get_mut(&mut self.served, key) {
            entry.work += started;
            if is_spent && !self.busy.several {
                entry.queue.look();
            }
        }
        if self.busy.several {
            self.account(key, now());
        }
    }

    /// A queue's driver was shown what has finished; its clock said `at`.
    pub(super) fn after_show(&mut self, key: TableKey, at: u64) {
        if self.busy.several {
            let before = self.busy.shown.replace(key);
            self.account(before.unwrap_or(key), at);
        }
    }

    /// The loop ends.
    pub(super) fn end(&mut self, ended: u64) {
        if self.busy.several {
            if let Some(key) = self.busy.shown {
                self.account(key, ended);
            }
        } else if let Some(key) = self.awake.at(0) {
            self.account(key, ended);
            if let Some(entry) = get_mut(&mut self.served, key) {
                entry.work = 0;
            }
        }
    }

    fn account(&mut self, key: TableKey, until: u64) {
        if let Some(entry) = get(&self.served, key) {
            entry.queue.stats().busy(until.saturating_sub(self.busy.until));
        }
        self.busy.until = until;
    }
}
