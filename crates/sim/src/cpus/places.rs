//! Which CPU a thread is on: when it wakes up, when a CPU has nothing to do, and every now and then.

use super::{Cpus, State, Waker, bit};
use crate::events::{Event, Events};

/// Who has run within this time is not pulled by an idle CPU (`sysctl_sched_migration_cost`), ns.
const HOT: u64 = 500_000;
/// How much more a CPU's load may be than another's before a thread that wakes up leaves it for the one of
/// who wakes it (`wake_affine_weight`; half of `imbalance_pct`, 117).
const BIAS: f64 = 1.08;
/// By what a CPU's load is to be more than another's (`imbalance_pct`).
const IMBALANCE: f64 = 1.17;
/// After so many balances a difference of one thread is evened out, as about every 60 ms in Linux.
const EVEN_OUT: u32 = 6;

impl Cpus {
    /// Where a thread goes that another one wakes up (`select_task_rq_fair`).
    pub(super) fn cpu_for(&mut self, thread: u32, from: Option<u32>, now: u64) -> usize {
        let t = &mut self.threads[thread as usize];
        let (last, allowed) = (t.cpu as usize, t.allowed);
        let recent = std::mem::replace(&mut t.recent, t.cpu) as usize;
        let idle = self.idle & allowed;
        if idle & bit(last) != 0 {
            return last;
        }
        if allowed & bit(last) == 0 {
            return if idle == 0 { self.shortest(allowed) } else { idle.trailing_zeros() as usize };
        }
        let near = from.map_or(last, |from| self.threads[from as usize].cpu as usize);
        let mut target = last;
        if near != last && allowed & bit(near) != 0 {
            let own = self.pass_thread(thread, now);
            let [there, here] =
                [near, last].map(|cpu| (self.pass(cpu, now), self.cpus[cpu].busy.value));
            // Of the group's load; what all have in common is left out.
            let own = own * here.1;
            if there.0 * there.1 + own < BIAS * (here.0 * here.1 - own) {
                target = near;
            }
        }
        if idle == 0 {
            return target;
        }
        if idle & bit(recent) != 0 {
            return recent;
        }
        // The next one, so that not all meet at the first, and no further than is looked.
        let above = idle & !(bit(target) - 1);
        let next = (if above != 0 { above } else { idle }).trailing_zeros() as usize;
        let n = self.cpus.len();
        if (next + n - target) % n <= self.scan { next } else { target }
    }

    /// Says how many CPUs a thread that wakes up looks at for an idle one: the busier all are, the fewer
    /// (`update_idle_cpu_scan`); to be called every 10 ms.
    pub(super) fn set_scan(&mut self, now: u64) {
        let n = self.cpus.len() as f64;
        let mut sum = 0.0;
        for cpu in 0..self.cpus.len() {
            self.pass(cpu, now);
            sum += self.cpus[cpu].busy.value;
        }
        let mean = sum / n;
        self.scan = (n * (1.0 - (IMBALANCE * mean).powi(2)).max(0.0)) as usize;
    }

    /// The CPU among these with the fewest threads.
    fn shortest(&self, mut among: u128) -> usize {
        let mut best = (usize::MAX, among.trailing_zeros() as usize);
        while among != 0 {
            let cpu = among.trailing_zeros() as usize;
            among &= among - 1;
            best = best.min((self.length(cpu), cpu));
        }
        best.1
    }

    fn length(&self, cpu: usize) -> usize {
        self.cpus[cpu].ready.len() + usize::from(self.cpus[cpu].current.is_some())
    }

    /// An idle CPU takes a thread that waits elsewhere.
    pub(super) fn pull(&mut self, cpu: usize, events: &mut Events<Event>) {
        let mut best: Option<(usize, u32)> = None;
        let mut loaded = self.loaded;
        while loaded != 0 {
            let other = loaded.trailing_zeros() as usize;
            loaded &= loaded - 1;
            let length = self.cpus[other].ready.len();
            if best.is_none_or(|(longest, _)| length > longest)
                && let Some(thread) = self.longest_wait(other, cpu, events.now)
            {
                best = Some((length, thread));
            }
        }
        if let Some((_, thread)) = best {
            self.migrate(thread, cpu, events);
        }
    }

    /// Who has waited longest there of those that may run here, and have not run just now.
    pub(super) fn longest_wait(&self, there: usize, here: usize, now: u64) -> Option<u32> {
        let may = self.cpus[there].ready.iter().copied().filter(|&t| {
            let t = &self.threads[t as usize];
            t.allowed & bit(here) != 0 && (t.left_at == 0 || now - t.left_at >= HOT)
        });
        may.min_by_key(|&t| (self.threads[t as usize].since, t))
    }

    /// Moves a thread that waits to another CPU.
    pub(super) fn migrate(&mut self, thread: u32, to: usize, events: &mut Events<Event>) {
        let from = self.threads[thread as usize].cpu as usize;
        self.count(from, events.now);
        let lag = self.lag(from, thread);
        self.pass_thread(thread, events.now);
        self.pass(from, events.now);
        self.take(from, thread);
        let t = &mut self.threads[thread as usize];
        t.state = State::Asleep;
        t.lag = lag;
        t.waited += events.now - t.since;
        let deadline = t.deadline - t.virtual_time;
        self.place(thread, to, (deadline, 0), events);
    }

    /// A thread may run on these CPUs from now on.
    pub(crate) fn allow(&mut self, thread: u32, allowed: u128, events: &mut Events<Event>) {
        let (cpu, state, was) = {
            let t = &self.threads[thread as usize];
            (t.cpu as usize, t.state, u32::from(t.is_movable()))
        };
        self.threads[thread as usize].allowed = allowed;
        if state == State::Ready {
            // Whether it may move may have changed.
            let is = u32::from(self.threads[thread as usize].is_movable());
            let c = &mut self.cpus[cpu];
            c.movable = c.movable - was + is;
            if c.movable > 0 {
                self.loaded |= bit(cpu);
            } else {
                self.loaded &= !bit(cpu);
            }
        }
        if allowed & bit(cpu) != 0 {
            return;
        }
        match state {
            State::Asleep | State::Coming => {}
            State::Delayed => self.leave(thread, events),
            State::Ready => {
                let to = self.cpu_for(thread, None, events.now);
                self.migrate(thread, to, events);
            }
            State::Running => {
                self.leave(thread, events);
                let left = self.threads[thread as usize].left;
                self.wake(thread, left.max(1), Waker::Timer, events);
            }
        }
    }

    /// A thread runs there when it does next; one that runs stays where it is.
    pub(crate) fn go_to(&mut self, thread: u32, cpu: usize, events: &mut Events<Event>) {
        let t = &mut self.threads[thread as usize];
        match t.state {
            State::Asleep => t.cpu = cpu as u8,
            State::Ready if t.cpu as usize != cpu => self.migrate(thread, cpu, events),
            State::Coming | State::Delayed | State::Ready | State::Running => {}
        }
    }

    /// Evens out the lengths of the CPUs' queues; to be called every 10 ms.
    pub(crate) fn balance(&mut self, events: &mut Events<Event>) {
        self.balances += 1;
        self.set_scan(events.now);
        for _ in 0..self.cpus.len() {
            let is_due = self.balances >= EVEN_OUT;
            if self.loaded == 0 || !self.give(if is_due { 1 } else { 2 }, events) {
                return;
            }
        }
    }

    /// The longest queue gives one to the shortest, if it is so much longer; whether it did.
    fn give(&mut self, least: usize, events: &mut Events<Event>) -> bool {
        let loaded = (0..self.cpus.len()).filter(|&cpu| self.loaded & bit(cpu) != 0);
        let longest = loaded.max_by_key(|&cpu| (self.length(cpu), usize::MAX - cpu));
        let Some(from) = longest else { return false };
        let c = &self.cpus[from];
        let movable = c.ready.iter().chain(&c.current).copied();
        let movable = movable.filter(|&t| self.threads[t as usize].is_movable());
        // Who moves is whose last move is longest ago, or the same one would move to and fro.
        let thread = movable.min_by_key(|&t| (self.threads[t as usize].moved, t));
        let Some(thread) = thread.filter(|thread| c.current != Some(*thread)) else { return false };
        let to = self.shortest(self.threads[thread as usize].allowed & !bit(from));
        if self.length(from) < self.length(to) + least {
            return false;
        }
        if least == 1 {
            self.balances = 0;
        }
        self.threads[thread as usize].moved = events.now;
        self.migrate(thread, to, events);
        true
    }
}
