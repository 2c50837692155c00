//! Which CPU a thread is on: when it wakes up, when a CPU has nothing to do, and every now and then.

use rand::RngExt as _;

use super::{Cpus, State, Waker, bit};
use crate::events::{Event, Events};

/// Who has run within this time is not pulled by an idle CPU (`sysctl_sched_migration_cost`), ns.
const HOT: u64 = 500_000;
/// By what a CPU's load is to be more than another's (`imbalance_pct`).
const IMBALANCE: f64 = 1.17;
/// Loads are evened out each so many times 10 ms in the mean (`balance_interval` times `busy_factor`: 32 to 64 ms).
const EVERY: u32 = 5;
/// Doublings of what is moved at most.
const MAX_FAILED: u32 = 10;

/// How often a CPU that became idle found a thread to take (`update_newidle_stats`, Linux 6.18.5 and 6.12.65).
#[derive(Debug)]
pub(super) struct Pulls {
    calls: u32,
    found: u32,
    /// Of 1,024.
    ratio: u32,
}

impl Default for Pulls {
    fn default() -> Self {
        Self { calls: 512, found: 256, ratio: 512 }
    }
}

impl Pulls {
    #[cfg(test)]
    pub(super) const fn always() -> Self {
        Self { calls: 0, found: 0, ratio: 1_024 }
    }

    #[cfg(test)]
    pub(super) const fn ratio(&self) -> u32 {
        self.ratio
    }

    fn count(&mut self, found: bool) {
        self.calls += 1;
        self.found += u32::from(found);
        if self.calls >= 1_024 {
            self.ratio = self.found;
            self.calls /= 2;
            self.found /= 2;
        }
    }
}

impl Cpus {
    /// Where a thread goes that wakes up (`select_task_rq_fair`).
    pub(super) fn cpu_for(&mut self, thread: u32) -> usize {
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
        if idle == 0 {
            return last;
        }
        if idle & bit(recent) != 0 {
            return recent;
        }
        // The next one, so that not all meet at the first, and no further than is looked.
        let above = idle & !(bit(last) - 1);
        let next = (if above != 0 { above } else { idle }).trailing_zeros() as usize;
        let n = self.cpus.len();
        if (next + n - last) % n <= self.scan { next } else { last }
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

    /// A CPU that becomes idle takes a thread that waits elsewhere (`sched_balance_newidle`); but it looks the less often, the
    /// less often it found one.
    pub(super) fn pull(&mut self, cpu: usize, events: &mut Events<Event>) {
        if self.loaded == 0 {
            return;
        }
        let looks = self.random.random_range(0..1_024) <= 1 + self.cpus[cpu].pulls.ratio;
        let took = looks && self.take_longest(cpu, events);
        self.cpus[cpu].pulls.count(took);
    }

    /// The longest queue gives the one that has waited longest.
    fn take_longest(&mut self, cpu: usize, events: &mut Events<Event>) -> bool {
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
        let Some((_, thread)) = best else { return false };
        self.migrate(thread, cpu, events);
        true
    }

    /// Who has waited longest there of those that may run here, and have not run just now.
    pub(super) fn longest_wait(&self, there: usize, here: usize, now: u64) -> Option<u32> {
        let may = self.cpus[there].ready.iter().copied().filter(|&t| self.may_go(t, here, now));
        may.min_by_key(|&t| (self.threads[t as usize].since, t))
    }

    /// Whether a thread that waits may go to another CPU, and has not just run (`can_migrate_task`).
    fn may_go(&self, thread: u32, to: usize, now: u64) -> bool {
        let t = &self.threads[thread as usize];
        t.allowed & bit(to) != 0 && (t.left_at == 0 || now - t.left_at >= HOT)
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
                let to = self.cpu_for(thread);
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

    /// Evens out the CPUs' loads; to be called every 10 ms.
    pub(crate) fn balance(&mut self, events: &mut Events<Event>) {
        self.set_scan(events.now);
        if self.random.random_range(0..EVERY) > 0 {
            return;
        }
        for _ in 0..self.cpus.len() {
            if self.loaded == 0 || !self.give(events) {
                return;
            }
        }
    }

    /// Of the CPU with the most load a thread goes to the one with the least (`sched_balance_rq`): one that makes the
    /// difference smaller, or after it was in vain a few times, less much larger. Whether one did.
    fn give(&mut self, events: &mut Events<Event>) -> bool {
        let now = events.now;
        let loads: Vec<f64> = (0..self.cpus.len()).map(|cpu| self.pass(cpu, now)).collect();
        let by_load = |a: &usize, b: &usize| loads[*a].total_cmp(&loads[*b]);
        let loaded = (0..loads.len()).filter(|&cpu| self.loaded & bit(cpu) != 0);
        let Some(from) = loaded.max_by(by_load) else { return false };
        let ready = &self.cpus[from].ready;
        let allowed = ready.iter().fold(0, |mask, &t| mask | self.threads[t as usize].allowed);
        let others = (0..loads.len()).filter(|&cpu| cpu != from && allowed & bit(cpu) != 0);
        let Some(to) = others.min_by(by_load) else { return false };
        if loads[from] <= IMBALANCE * loads[to] {
            self.failed = 0;
            return false;
        }
        let most = (loads[from] - loads[to]) / 2.0 * f64::from(1_u32 << self.failed);
        let ready = self.cpus[from].ready.iter().copied();
        let mut may: Vec<u32> = ready.filter(|&t| self.may_go(t, to, now)).collect();
        may.retain(|&thread| self.pass_thread(thread, now) <= most);
        // Who has run least lately is the last of the list.
        let Some(thread) = may.into_iter().min_by_key(|&t| (self.threads[t as usize].left_at, t))
        else {
            self.failed = (self.failed + 1).min(MAX_FAILED);
            return false;
        };
        self.failed = 0;
        self.migrate(thread, to, events);
        true
    }
}
