//! An IOThread's turns: who is served, for how long, and when drivers see what has ended.
//!
//! Whose turn it is, and how much of it, says the line (`drr`). What ends a round early, and why, is told at [`super`].

use super::{IDLE_BEFORE_NOTIFY_NS, IoThread, Served, get, get_mut};
use crate::clock::now;
use crate::drr::{PromisedTurn, QUANTUM_NS, TurnBudget};
use crate::key::TableKey;
use crate::queue::Pass;

impl IoThread {
    /// Runs a round of turns, which ends early at a message, or once it has lasted for a turn and there is
    /// something to submit or to reap. Returns whether there was something to do. `reaped`: something was
    /// reaped or read before.
    pub(super) fn serve(&mut self, time: u64, reaped: bool) -> bool {
        let mut worked = false;
        self.before_turns(reaped);
        let mut round = self.awake.round();
        while let Some((key, share)) =
            self.awake.next(&mut round, self.busy.until().max(time), |key| {
                get(&self.served, key).is_some_and(Served::is_pending)
            })
        {
            worked = true;
            let (left, started) = self.serve_one(key, share, time);
            let promised = self.awake.end_turn(left);
            self.busy.turn_of(key);
            // Others' turns are not waited for: a driver may go on with what has ended while these last.
            self.show(key);
            self.after_turn(key, started, !left.is_left());
            if let Some(turn) = promised {
                self.after_promised_turn(key, turn, started);
            }
            let has_lasted = self.busy.until().saturating_sub(time) >= QUANTUM_NS.unsigned_abs();
            if self.mail.is_signaled()
                || has_lasted && self.has_events()
                || self.awake.has_reserved() && self.is_interrupted()
            {
                break;
            }
        }
        if worked {
            self.rearm_idle_queues(time);
        }
        worked
    }

    /// A turn of promised frames has ended: its driver sees them at once, and they are counted.
    fn after_promised_turn(&mut self, key: TableKey, turn: PromisedTurn, frames: u32) {
        // It may have slept: its kick has not been read yet.
        self.wake(key);
        self.show(key);
        if let Some(entry) = get_mut(&mut self.served, key)
            && frames > 0
        {
            let since = entry.queue.waited_since(turn.since);
            let is_late = now().saturating_sub(since) > turn.within;
            entry.queue.stats().promise(frames, is_late);
        }
    }

    /// Whether something is to be submitted, or has ended or come.
    pub(super) fn has_events(&mut self) -> bool {
        self.has_deferred()
            || !self.ring.submission().is_empty()
            || !self.ring.completion().is_empty()
            || !self.commands.is_submitted()
            || self.commands.has_ended()
    }

    /// Whether a round is to end early where something is promised: what has come may be a promised frame.
    fn is_interrupted(&mut self) -> bool {
        if self.has_events() {
            return true;
        }
        let (served, awake, time) = (&self.served, &self.awake, self.busy.until());
        self.held.iter().any(|&key| {
            let until = || get(served, key)?.queue.held_until();
            awake.is_reserved(key) && until().is_none_or(|until| until <= time)
        })
    }

    /// Gives one queue its share; what is left of it, and how many requests were started.
    fn serve_one(&mut self, key: TableKey, mut share: TurnBudget, time: u64) -> (TurnBudget, u32) {
        let Some(entry) = get_mut(&mut self.served, key) else { return (share, 0) };
        entry.busy_at = time;
        if entry.stopping.is_some() {
            share.requests = share.requests.min(entry.queue.recovering().into());
        }
        let most = share.requests;
        // Other queues may have had their turns since.
        let begun = self.busy.until().max(time);
        let pass = self.with_queue(key, |queue, turn| queue.serve(turn, &mut share, time, begun));
        if pass == Some(Pass::Full) {
            // Room for the rest.
            self.submit();
            self.with_queue(key, |queue, turn| queue.serve(turn, &mut share, time, begun));
        }
        self.listen_to_link(key);
        self.hold(key);
        (share, most - share.requests)
    }

    /// A queue is looked at when its time comes, if it waits for one.
    fn hold(&mut self, key: TableKey) {
        if get(&self.served, key).is_some_and(|entry| entry.queue.held_until().is_some())
            && !self.held.contains(&key)
        {
            self.held.push(key);
        }
    }

    /// Queues whose time has come are looked at again; those that wait for none, or have left, are held no longer.
    pub(super) fn release(&mut self, time: u64) {
        let mut at = 0;
        while let Some(&key) = self.held.get(at) {
            let until = get(&self.served, key).and_then(|entry| entry.queue.held_until());
            let Some(until) = until else {
                self.held.swap_remove(at);
                continue;
            };
            if until <= time
                && let Some(entry) = get_mut(&mut self.served, key)
            {
                if entry.queue.release(time) {
                    self.wake(key);
                }
                self.show(key);
            }
            at += 1;
        }
    }

    /// Among busy queues, those that have been idle for a while are waited for instead; one that
    /// has stopped is to be given back.
    fn rearm_idle_queues(&mut self, time: u64) {
        let (served, asleep) = (&mut self.served, &mut self.asleep);
        self.awake.retain(|key| {
            let Some(entry) = get_mut(served, key) else { return false };
            let drowsy = time.saturating_sub(entry.busy_at) > IDLE_BEFORE_NOTIFY_NS;
            if drowsy && !entry.queue.is_unpublished() && !entry.has_stopped() {
                entry.sleep();
            }
            if entry.needs_kick_rearm() {
                asleep.push(key);
            }
            entry.awake
        });
        self.arm_pending_kicks();
    }

    /// Shows drivers what has finished; gives back queues that have stopped.
    pub(super) fn publish(&mut self) {
        let mut stopped = false;
        for place in 0..self.awake.len() {
            let Some(key) = self.awake.at(place) else { break };
            self.show(key);
            stopped |= get(&self.served, key).is_some_and(Served::has_stopped);
        }
        if stopped {
            self.give_back();
        }
    }

    pub(super) fn show(&mut self, key: TableKey) {
        if let Some(entry) = get_mut(&mut self.served, key)
            && entry.queue.is_unpublished()
        {
            if let Some(at) = entry.queue.publish(&self.stats) {
                self.after_show(key, at);
            }
            self.hold(key);
        }
    }

    fn give_back(&mut self) {
        for key in self.awake.keys().collect::<Vec<_>>() {
            let done = get_mut(&mut self.served, key)
                .filter(|entry| entry.has_stopped())
                .and_then(|entry| entry.stopping.take());
            if let Some(back) = done
                && let Some(mut queue) = self.detach_queue(key)
            {
                queue.give_back();
                let _ = back.send(queue);
            }
        }
    }
}
