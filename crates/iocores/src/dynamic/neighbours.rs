//! IOThreads and vCPUs on the same CPUs: who is in whose way, and who is far.

use std::cmp::Reverse;

use super::*;
use crate::sample::ThreadLoad;

/// A call that takes so many times as long as the cheapest has interrupted another CPU.
const FAR: f64 = 1.8;

/// What such calls must take of an IOThread, of a queue and of all that are exchanged.
const DEAR: (f64, f64) = (0.004, 0.02);

/// Queues that change places have loads within this factor, or one IOThread would get more than it gives.
const ALIKE: f64 = 1.5;

/// What was asked for in each of the last periods, of what was in the one with most, if the load is steady.
const STILL: f64 = 0.85;

/// What of a CPU an IOThread must wait for more than another one does, where vCPUs are on both, to spread these.
const UNEVEN: f64 = 0.15;

impl Dynamic {
    /// Whether nothing is being tried, and about as much was asked for in each of the last periods: what helps a load
    /// that comes and goes is over before it is known.
    fn is_steady(&self, view: &View<'_>) -> bool {
        let last: Vec<f64> =
            self.history.iter().rev().take(regret::ENOUGH).map(|period| period.demand).collect();
        let most = last.iter().copied().fold(0.0, f64::max);
        let is_near = |demand: &f64| *demand >= STILL * most;
        last.len() == regret::ENOUGH && last.iter().all(is_near) && self.is_settled(view)
    }

    /// Spreads the vCPUs where they share all CPUs with IOThreads that are full, and one waits for its CPU for longer
    /// than another one: whose queues would wait for longer too. The scheduler leaves them where the last idle CPU
    /// was. If it puts them back, that is not done again soon.
    pub(super) fn spread_vcpus(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let vcpus = view.vcpus();
        let full = view.period.threads.iter().filter(|thread| thread.busy >= HOT);
        let beside = full.filter(|of| of.cpu.is_some_and(|cpu| vcpus.contains(&cpu)));
        let mut waits: Vec<f64> = beside.map(|thread| thread.waited).collect();
        waits.sort_by(f64::total_cmp);
        let (least, most) = (*waits.first()?, *waits.last()?);
        let is_all = self.limits.borrow && waits.len() == vcpus.len();
        if !is_all || most - least < UNEVEN || !self.is_steady(view) {
            return None;
        }
        let situation = self.situation(view, false);
        if self.back_off[Kind::Spread as usize].holds(view.now, &situation) {
            return None;
        }
        self.back_off[Kind::Spread as usize].seen(view.now, situation);
        let reason = format!(
            "beside vCPUs, one IOThread waits {} % of the time for its CPU and another one {} %",
            percent(most),
            percent(least),
        );
        let cpus = vcpus.into_iter().collect();
        Some(vec![decision(Action::SpreadVcpus { cpus }, reason)])
    }

    /// Exchanges queues of about the same load of two IOThreads that are busy and have vCPUs on their CPUs, on trial, if
    /// calls of their drivers are dear: each of these is on another CPU, which has to be interrupted for every call, and
    /// where there are two CPUs that is the other IOThread's.
    pub(super) fn bring_home(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        if !self.is_steady(view) {
            return None;
        }
        let vcpus = view.vcpus();
        let seconds = view.period.seconds;
        let share = |queue: &QueueLoad| queue.called.as_secs_f64() / seconds;
        let mut far: Vec<(ThreadId, Vec<QueueLoad>)> = Vec::new();
        let is_beside = |of: &&ThreadLoad| of.cpu.is_some_and(|cpu| vcpus.contains(&cpu));
        for thread in view.period.unlocked().filter(is_beside).filter(|of| of.busy >= ROOM) {
            let is_far = |queue: &&QueueLoad| {
                share(queue) >= DEAR.0
                    && queue.call().is_some_and(|call| call >= FAR * self.near)
                    && self.budget.may_move(queue.id)
            };
            let mut its: Vec<_> =
                view.period.queues_of(thread.id).filter(is_far).copied().collect();
            its.sort_by_key(|queue| (Reverse(queue.called), queue.id));
            far.push((thread.id, its));
        }
        let called = |its: &[QueueLoad]| its.iter().map(|queue| queue.called).max();
        far.sort_by_key(|(_, its)| Reverse(called(its)));
        let [(one, its), (other, others), ..] = &far[..] else { return None };
        let mut others = others.clone();
        let mut pairs = Vec::new();
        for &queue in its.iter().take(self.budget.left_to_balance(view.snapshot) / 2) {
            let is_alike =
                |of: &QueueLoad| of.busy <= ALIKE * queue.busy && queue.busy <= ALIKE * of.busy;
            if let Some(at) = others.iter().position(is_alike) {
                pairs.push([(queue, *other), (others.remove(at), *one)]);
            }
        }
        let moves = || pairs.iter().flatten();
        let dear: f64 = moves().map(|(queue, _)| share(queue)).sum();
        let situation = self.situation(view, false);
        if dear < DEAR.1 || self.back_off[Kind::Home as usize].holds(view.now, &situation) {
            return None;
        }
        let back = moves().map(|(queue, _)| (queue.id, queue.thread)).collect();
        self.try_out(view, Kind::Home, Undo::Move(back), false);
        let reason = format!(
            "calls of the drivers of {} queues take {} % of an IOThread: these are on other CPUs",
            2 * pairs.len(),
            percent(dear),
        );
        let mut decisions = Vec::new();
        for &(queue, to) in moves() {
            self.budget.moves(queue.id, view.now);
            decisions.push(decision(Action::MoveQueue { queue: queue.id, to }, reason.clone()));
        }
        Some(decisions)
    }
}
