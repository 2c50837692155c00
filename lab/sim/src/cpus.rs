//! Host CPUs: threads that are ready share them.
//!
//! Algorithm: Linux's EEVDF (kernel/sched/fair.c, 6.12 to 6.18), as far as threads of one weight notice it.
//!
//! - *Who runs.* A thread on a CPU has a virtual run time and, a slice later, a deadline. Of those that have
//!   had no more than the mean (*eligible*), the one with the earliest deadline runs (`pick_eevdf`).
//! - *For how long.* Who gets a CPU keeps it until its deadline while it is eligible (`RUN_TO_PARITY`); so
//!   one that wakes up takes it at once only if it has had less. The scheduler looks at ticks, and when a
//!   thread comes.
//! - *Who sleeps* keeps what it has not had, up to a tick or two slices (`entity_lag`). One that has had too
//!   much stays on its CPU's queue until the mean has come up with it (`DELAY_DEQUEUE`); woken before that,
//!   it is ready there, wherever else is room.
//! - *Who wakes up* goes to its last CPU if that is idle, or no other is that it looks at (`select_idle_sibling`): it
//!   looks at the fewer CPUs the busier all are, of two that are used more than 60 % in the mean, at none (`SIS_UTIL`).
//!   Whoever wakes it chooses, at that moment; an idle CPU, or one that is to give way, is interrupted, which takes
//!   time.
//! - *Who waits* is taken by a CPU that becomes idle, or is idle at a tick of its own, but not if it has run
//!   within half a millisecond (`task_hot`); a CPU that becomes idle looks the less often, the less often it found one
//!   (`newidle_ratio`). Every now and then the CPU with the most load gives one to that with the least.
//!
//! Left out: several groups and their limits, caches (but of a thread that is woken from another CPU) and hyperthreads,
//! interrupts of devices, and what a switch costs a thread that only computes and has no end. So is that a thread may be
//! drawn to the CPU of who wakes it (`wake_affine`): where CPUs are full, who sleeps is still on its queue and stays (in
//! a trace of two full CPUs, Linux 6.18, each of 3,137 wake-ups from the other CPU in 250 ms did).
//!
//! Properties (tests of the same name): `two_that_never_sleep_share_a_cpu_half_and_half`,
//! `thread_that_wakes_waits_for_the_slice_of_one_that_has_just_begun`,
//! `thread_that_wakes_takes_the_cpu_at_once_if_it_has_had_less`, `thread_that_gave_way_goes_on_for_what_that_cost`,
//! `slice_that_is_over_ends_when_a_thread_comes`, `thread_that_had_too_much_is_woken_where_it_was`,
//! `thread_that_has_just_run_is_not_pulled`, `other_cpu_has_to_be_interrupted_if_it_is_idle_or_gives_way`,
//! `busier_cpus_are_searched_less_for_an_idle_one`,
//! `idle_cpu_takes_what_waits_elsewhere`, `cpu_looks_the_less_often_the_less_often_it_finds_a_thread`,
//! `loads_are_evened_out_among_cpus_that_threads_may_run_on`,
//! `three_on_two_cpus_have_two_thirds_each`, `times_of_a_cpu_add_up`.

use rand::SeedableRng as _;
use rand_pcg::Pcg64Mcg;
use rtvirtio_units::Nanos;

use crate::costs::Costs;
use crate::events::{Event, Events};

mod places;

use places::Pulls;

/// A burst without end.
pub(crate) const ENDLESS: u64 = u64::MAX;
/// Between two ticks (`CONFIG_HZ` is 250), ns.
const TICK: u64 = 4_000_000;
/// Of loads, ns.
const HALF_LIFE: f64 = 32e6;

/// Whose a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// An IOThread's place.
    Io(u32),
    /// A queue's place: its client.
    Client(u32),
    /// A compute thread's place.
    Burner(u32),
}

/// How much was on a queue lately: half of it is of the last 32 ms (`kernel/sched/pelt.c`).
#[derive(Debug, Default, Clone, Copy)]
struct Load {
    value: f64,
    /// Up to when.
    at: u64,
}

impl Load {
    /// So many were there since it was last looked at; what it is now.
    fn pass(&mut self, there: f64, now: u64) -> f64 {
        let left = (-((now - self.at) as f64) / HALF_LIFE).exp2();
        self.value = self.value * left + there * (1.0 - left);
        self.at = now;
        self.value
    }
}

/// Who wakes a thread.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Waker {
    Thread(u32),
    /// A device, or whoever posts a message: from elsewhere.
    Device,
    /// The thread's own timer, on its own CPU.
    Timer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asleep,
    /// Asleep, and still on its CPU's queue, since it has had too much.
    Delayed,
    /// On its way to an idle CPU.
    Coming,
    Ready,
    Running,
}

#[derive(Debug)]
struct Thread {
    who: Who,
    allowed: u128,
    cpu: u8,
    /// Where it was before it was last woken.
    recent: u8,
    state: State,
    /// Virtual run time by its CPU's clock.
    virtual_time: i64,
    deadline: i64,
    /// Virtual run time up to which nobody takes its CPU.
    protected: i64,
    /// What it had not had when it left a CPU's queue; negative: had too much.
    lag: i64,
    /// CPU time left of its burst.
    left: u64,
    ran: u64,
    waited: u64,
    /// How often it got a CPU.
    turns: u64,
    /// Whether it had to give way, and has not gone on yet.
    gave_way: bool,
    /// When it became ready.
    since: u64,
    /// When it last left a CPU.
    left_at: u64,
    load: Load,
}

impl Thread {
    /// Whether it may run on more than one CPU.
    const fn is_movable(&self) -> bool {
        self.allowed & (self.allowed - 1) != 0
    }

    /// Whether it is on its CPU's queue.
    const fn is_queued(&self) -> bool {
        matches!(self.state, State::Delayed | State::Ready | State::Running)
    }
}

#[derive(Debug, Default)]
struct Cpu {
    current: Option<u32>,
    ready: Vec<u32>,
    /// Asleep, but on its queue; none while there is no current thread.
    delayed: Vec<u32>,
    /// Threads on their way here.
    coming: u32,
    /// Until when the current thread's time is counted; of an idle CPU, since when it is.
    counted: u64,
    /// The event that counts.
    stamp: u32,
    idle: u64,
    /// Mean virtual time when it was last not idle.
    virtual_time: i64,
    /// Ready threads that may run elsewhere.
    movable: u32,
    /// Somebody else may be to run as soon as the current one says how it goes on.
    preempt: bool,
    /// When it notices that somebody else may be to run.
    looks_at: Option<u64>,
    load: Load,
    /// How much of the time it ran something.
    busy: Load,
    pulls: Pulls,
}

/// All CPUs and threads.
#[derive(Debug)]
pub(crate) struct Cpus {
    cpus: Vec<Cpu>,
    threads: Vec<Thread>,
    /// Those that run nothing, and to which nothing is on its way.
    idle: u128,
    /// Those where a thread waits that may run elsewhere.
    loaded: u128,
    slice: i64,
    /// Of these what it costs to be woken on another CPU.
    costs: Costs,
    /// Since loads were even, or a thread moved, so many balances were in vain.
    failed: u32,
    random: Pcg64Mcg,
    /// CPUs at which a thread that wakes up looks for an idle one.
    scan: usize,
}

const fn bit(cpu: usize) -> u128 {
    1 << cpu
}

impl Cpus {
    pub(crate) fn new(cpus: u16, slice: u64, costs: Costs) -> Self {
        let cpus: Vec<Cpu> = (0..cpus).map(|_| Cpu::default()).collect();
        let idle = (0..cpus.len()).fold(0, |mask, cpu| mask | bit(cpu));
        let (slice, scan) = (slice as i64, cpus.len());
        let random = Pcg64Mcg::seed_from_u64(1);
        Self { cpus, threads: Vec::new(), idle, loaded: 0, slice, costs, failed: 0, random, scan }
    }

    /// A thread that sleeps; `allowed` holds at least one CPU that there is.
    pub(crate) fn spawn(&mut self, who: Who, allowed: u128) -> u32 {
        self.threads.push(Thread {
            who,
            allowed,
            cpu: allowed.trailing_zeros() as u8,
            recent: allowed.trailing_zeros() as u8,
            state: State::Asleep,
            virtual_time: 0,
            deadline: 0,
            protected: 0,
            lag: 0,
            left: 0,
            ran: 0,
            waited: 0,
            turns: 0,
            gave_way: false,
            since: 0,
            left_at: 0,
            load: Load::default(),
        });
        self.threads.len() as u32 - 1
    }

    pub(crate) fn who(&self, thread: u32) -> Who {
        self.threads[thread as usize].who
    }

    pub(crate) fn is_asleep(&self, thread: u32) -> bool {
        matches!(self.threads[thread as usize].state, State::Asleep | State::Delayed)
    }

    /// Where a thread was last, and how often it got a CPU so far.
    pub(crate) fn turns(&self, thread: u32) -> (usize, u64) {
        let t = &self.threads[thread as usize];
        (t.cpu.into(), t.turns)
    }

    /// On a CPU, and ready without one, ns so far.
    pub(crate) fn times(&self, thread: u32, now: u64) -> (u64, u64) {
        let t = &self.threads[thread as usize];
        match t.state {
            State::Asleep | State::Delayed | State::Coming => (t.ran, t.waited),
            State::Ready => (t.ran, t.waited + (now - t.since)),
            State::Running => (t.ran + (now - self.cpus[t.cpu as usize].counted), t.waited),
        }
    }

    /// How long a CPU has been idle.
    pub(crate) fn idle(&self, cpu: usize, now: u64) -> u64 {
        let c = &self.cpus[cpu];
        c.idle + if c.current.is_none() { now - c.counted } else { 0 }
    }

    /// A thread that sleeps has a burst to run. If another CPU is to run it, it learns of that a while later, if
    /// it is idle ([`Event::Wake`] is then for [`Self::arrive`]) or what it runs gives way. What the interrupt
    /// costs the thread that wakes it, ns.
    pub(crate) fn wake(
        &mut self,
        thread: u32,
        burst: u64,
        waker: Waker,
        events: &mut Events<Event>,
    ) -> u64 {
        let t = &mut self.threads[thread as usize];
        debug_assert!(matches!(t.state, State::Asleep | State::Delayed));
        t.left = burst;
        let is_delayed = t.state == State::Delayed;
        let cpu = if is_delayed { t.cpu as usize } else { self.cpu_for(thread) };
        let is_far = match waker {
            Waker::Thread(from) => self.threads[from as usize].cpu as usize != cpu,
            Waker::Device => true,
            Waker::Timer => false,
        };
        let Costs { far, idle, busy, .. } = self.costs;
        if is_far {
            debug_assert!(burst != ENDLESS, "who has no end has a timer");
            self.threads[thread as usize].left += far.get();
        }
        if is_far && !is_delayed && self.idle & bit(cpu) != 0 && idle.delay > Nanos::ZERO {
            self.assign(thread, cpu, events.now);
            let t = &mut self.threads[thread as usize];
            t.state = State::Coming;
            t.left += idle.receiver.get();
            self.cpus[cpu].coming += 1;
            self.idle &= !bit(cpu);
            events.after(idle.delay.get(), Event::Wake { thread });
            return idle.sender.get();
        }
        let delay = if is_far { busy.delay.get() } else { 0 };
        let is_interrupted = if is_delayed {
            self.requeue(thread, cpu, delay, events)
        } else {
            self.place(thread, cpu, (self.slice, delay), events)
        };
        if !is_interrupted {
            return 0;
        }
        self.threads[thread as usize].left += busy.receiver.get();
        busy.sender.get()
    }

    /// A thread has come to the CPU that was idle.
    pub(crate) fn arrive(&mut self, thread: u32, events: &mut Events<Event>) {
        let t = &self.threads[thread as usize];
        if t.state != State::Coming {
            return;
        }
        let cpu = t.cpu as usize;
        let may = t.allowed & bit(cpu) != 0;
        let to = if may { cpu } else { self.cpu_for(thread) };
        self.no_longer_coming(cpu);
        self.place(thread, to, (self.slice, 0), events);
    }

    fn no_longer_coming(&mut self, cpu: usize) {
        let c = &mut self.cpus[cpu];
        c.coming -= 1;
        if c.coming == 0 && c.current.is_none() {
            self.idle |= bit(cpu);
        }
    }

    /// A thread that is asleep on a queue is ready there.
    fn requeue(&mut self, thread: u32, cpu: usize, delay: u64, events: &mut Events<Event>) -> bool {
        self.count(cpu, events.now);
        let (sum, n) = self.sum(cpu);
        self.cpus[cpu].delayed.retain(|&other| other != thread);
        let slice = self.slice;
        let t = &mut self.threads[thread as usize];
        if t.virtual_time * n < sum {
            // What it has not had since is not its own (`DELAY_ZERO`).
            t.virtual_time = sum / n;
            t.deadline = t.virtual_time + slice;
        }
        self.wait(thread, cpu, delay, events)
    }

    /// Says that as many were on a CPU's queue as are, up to now; its load.
    fn pass(&mut self, cpu: usize, now: u64) -> f64 {
        let c = &mut self.cpus[cpu];
        let there = c.ready.len() + c.delayed.len() + usize::from(c.current.is_some());
        c.busy.pass(there.min(1) as f64, now);
        c.load.pass(there as f64, now)
    }

    /// The same of a thread.
    fn pass_thread(&mut self, thread: u32, now: u64) -> f64 {
        let t = &mut self.threads[thread as usize];
        let is_queued = t.is_queued();
        t.load.pass(f64::from(u8::from(is_queued)), now)
    }

    /// A thread that is on no queue belongs to a CPU from now on, and so does its load.
    fn assign(&mut self, thread: u32, cpu: usize, now: u64) {
        let before = self.threads[thread as usize].cpu as usize;
        if before != cpu {
            let load = self.pass_thread(thread, now);
            self.pass(before, now);
            self.pass(cpu, now);
            let left = &mut self.cpus[before].load.value;
            *left = (*left - load).max(0.0);
            self.cpus[cpu].load.value += load;
            self.threads[thread as usize].cpu = cpu as u8;
        }
    }

    /// Sum of virtual times and number of those on a CPU's queue.
    fn sum(&self, cpu: usize) -> (i64, i64) {
        let c = &self.cpus[cpu];
        let all = c.ready.iter().chain(&c.delayed).chain(&c.current);
        all.fold((0, 0), |(sum, n), &t| (sum + self.threads[t as usize].virtual_time, n + 1))
    }

    /// Counts the current thread's time.
    fn count(&mut self, cpu: usize, now: u64) {
        let c = &mut self.cpus[cpu];
        if let Some(current) = c.current {
            let ran = now - c.counted;
            c.counted = now;
            let t = &mut self.threads[current as usize];
            t.virtual_time += ran as i64;
            t.ran += ran;
            if t.left != ENDLESS {
                t.left = t.left.saturating_sub(ran);
            }
        }
    }

    /// Puts a thread that is on no CPU's queue on one, with a deadline so much after its virtual time. Who
    /// runs there learns of it after `delay`; whether it has to.
    fn place(
        &mut self,
        thread: u32,
        cpu: usize,
        (deadline, delay): (i64, u64),
        events: &mut Events<Event>,
    ) -> bool {
        let now = events.now;
        self.count(cpu, now);
        let (sum, n) = self.sum(cpu);
        let t = &mut self.threads[thread as usize];
        t.virtual_time = match n {
            0 => self.cpus[cpu].virtual_time,
            // The mean comes nearer by its own coming.
            n => sum / n - t.lag * (n + 1) / n,
        };
        t.deadline = t.virtual_time + deadline;
        self.assign(thread, cpu, now);
        self.pass_thread(thread, now);
        self.pass(cpu, now);
        if self.cpus[cpu].current.is_some() {
            return self.wait(thread, cpu, delay, events);
        }
        let c = &mut self.cpus[cpu];
        c.idle += now - c.counted;
        self.idle &= !bit(cpu);
        self.run(thread, cpu, events);
        self.arm(cpu, events);
        false
    }

    /// A thread gets a CPU without a current thread.
    fn run(&mut self, thread: u32, cpu: usize, events: &Events<Event>) {
        let t = &mut self.threads[thread as usize];
        t.state = State::Running;
        t.turns += 1;
        t.protected = t.deadline;
        if std::mem::take(&mut t.gave_way) && t.left != ENDLESS {
            t.left += self.costs.resume.get();
        }
        let c = &mut self.cpus[cpu];
        c.counted = events.now;
        c.current = Some(thread);
    }

    /// A thread is ready where another one runs, which learns of it after `delay`, if it is to give way;
    /// whether it is, and was not yet.
    fn wait(&mut self, thread: u32, cpu: usize, delay: u64, events: &mut Events<Event>) -> bool {
        let t = &mut self.threads[thread as usize];
        t.state = State::Ready;
        t.since = events.now;
        let is_movable = t.is_movable();
        let c = &mut self.cpus[cpu];
        c.ready.push(thread);
        c.movable += u32::from(is_movable);
        if c.movable > 0 {
            self.loaded |= bit(cpu);
        }
        let Some(current) = c.current else { return false };
        self.renew(current);
        let t = &self.threads[current as usize];
        let gives_way = t.virtual_time >= t.protected || self.pick(cpu) == Some(thread);
        let is_at_end = t.left == 0;
        let c = &mut self.cpus[cpu];
        if gives_way && delay > 0 {
            let is_new = c.looks_at.is_none();
            c.looks_at.get_or_insert(events.now + delay);
            self.arm(cpu, events);
            return is_new;
        }
        match (gives_way, is_at_end) {
            (false, _) => self.arm(cpu, events),
            (true, true) => c.preempt = true,
            (true, false) => self.choose(cpu, events),
        }
        false
    }

    /// Takes a thread that waits off its CPU's queue.
    fn take(&mut self, cpu: usize, thread: u32) {
        let is_movable = self.threads[thread as usize].is_movable();
        let c = &mut self.cpus[cpu];
        if let Some(at) = c.ready.iter().position(|&other| other == thread) {
            c.ready.swap_remove(at);
            c.movable -= u32::from(is_movable);
        }
        if c.movable == 0 {
            self.loaded &= !bit(cpu);
        }
    }

    /// What a thread has not had, by the mean of its CPU, within bounds.
    fn lag(&self, cpu: usize, thread: u32) -> i64 {
        let (sum, n) = self.sum(cpu);
        let lag = sum / n.max(1) - self.threads[thread as usize].virtual_time;
        let most = (2 * self.slice).max(TICK as i64);
        lag.clamp(-most, most)
    }

    /// Whose turn it is: who runs, if that is protected and has not had more than the mean, or else the
    /// earliest deadline.
    fn pick(&self, cpu: usize) -> Option<u32> {
        let (sum, n) = self.sum(cpu);
        let is_eligible = |t: &u32| self.threads[*t as usize].virtual_time * n <= sum;
        let c = &self.cpus[cpu];
        let current = c.current.filter(is_eligible);
        let is_protected = |t: &u32| {
            let t = &self.threads[*t as usize];
            t.virtual_time < t.protected
        };
        current.filter(is_protected).or_else(|| {
            let others = c.ready.iter().chain(&c.delayed).copied().filter(is_eligible);
            others.chain(current).min_by_key(|&t| (self.threads[t as usize].deadline, t))
        })
    }

    /// Runs the thread whose turn it is. There is one that is ready, or current.
    fn choose(&mut self, cpu: usize, events: &mut Events<Event>) {
        let now = events.now;
        (self.cpus[cpu].preempt, self.cpus[cpu].looks_at) = (false, None);
        if let Some(current) = self.cpus[cpu].current {
            self.renew(current);
        }
        let best = loop {
            let Some(best) = self.pick(cpu) else { return self.arm(cpu, events) };
            if self.threads[best as usize].state != State::Delayed {
                break best;
            }
            self.pass_thread(best, now);
            self.pass(cpu, now);
            self.cpus[cpu].delayed.retain(|&other| other != best);
            let t = &mut self.threads[best as usize];
            (t.state, t.lag) = (State::Asleep, 0);
        };
        if self.cpus[cpu].current != Some(best) {
            self.take(cpu, best);
            if let Some(old) = self.cpus[cpu].current.take() {
                let t = &mut self.threads[old as usize];
                t.state = State::Ready;
                (t.since, t.left_at) = (now, now);
                t.gave_way = true;
                let is_movable = t.is_movable();
                let c = &mut self.cpus[cpu];
                c.ready.push(old);
                c.movable += u32::from(is_movable);
                if c.movable > 0 {
                    self.loaded |= bit(cpu);
                }
            }
            let t = &mut self.threads[best as usize];
            t.waited += now - t.since;
            self.run(best, cpu, events);
        }
        self.arm(cpu, events);
    }

    /// Has the CPU's next event come: the end of a burst, or a tick while others wait.
    fn arm(&mut self, cpu: usize, events: &mut Events<Event>) {
        let c = &mut self.cpus[cpu];
        c.stamp = c.stamp.wrapping_add(1);
        let Some(current) = c.current else { return };
        let mut ns = self.threads[current as usize].left;
        if !c.ready.is_empty() || !c.delayed.is_empty() {
            ns = ns.min(TICK - events.now % TICK);
        }
        if let Some(at) = c.looks_at {
            ns = ns.min(at.saturating_sub(events.now));
        }
        if ns != ENDLESS {
            events.after(ns, Event::Cpu { cpu: cpu as u8, stamp: c.stamp });
        }
    }

    /// A CPU's event: the thread whose burst has ended, which goes on ([`Self::burst`]) or sleeps
    /// ([`Self::sleep`]) at once.
    pub(crate) fn ends(&mut self, cpu: u8, stamp: u32, events: &mut Events<Event>) -> Option<u32> {
        let cpu = cpu as usize;
        if self.cpus[cpu].stamp != stamp {
            return None;
        }
        let current = self.cpus[cpu].current?;
        self.count(cpu, events.now);
        let t = &self.threads[current as usize];
        if t.left == 0 {
            // It may be a tick as well.
            let is_tick = events.now.is_multiple_of(TICK);
            self.cpus[cpu].preempt |= is_tick && t.virtual_time >= t.protected;
            return Some(current);
        }
        if self.cpus[cpu].looks_at.is_some_and(|at| at <= events.now) {
            self.choose(cpu, events);
        } else {
            self.tick(cpu, current, events);
        }
        None
    }

    /// A tick while others wait: the slice may be over, and an idle CPU is told to look.
    fn tick(&mut self, cpu: usize, current: u32, events: &mut Events<Event>) {
        let t = &self.threads[current as usize];
        if t.virtual_time < t.protected {
            self.arm(cpu, events);
        } else {
            self.choose(cpu, events);
        }
        let mut idle = self.idle;
        while idle != 0 && self.loaded & bit(cpu) != 0 {
            let here = idle.trailing_zeros() as usize;
            idle &= idle - 1;
            if let Some(thread) = self.longest_wait(cpu, here, events.now) {
                self.migrate(thread, here, events);
            }
        }
    }

    /// A thread that has had its slice gets a later deadline.
    fn renew(&mut self, thread: u32) {
        let slice = self.slice;
        let t = &mut self.threads[thread as usize];
        if t.virtual_time >= t.deadline {
            t.deadline = t.virtual_time + slice;
        }
    }

    /// The thread that runs goes on with a burst of `ns`.
    pub(crate) fn burst(&mut self, thread: u32, ns: u64, events: &mut Events<Event>) {
        let t = &mut self.threads[thread as usize];
        debug_assert_eq!(t.state, State::Running);
        // An event at the same time could come again and again.
        t.left = ns.max(1);
        let cpu = t.cpu as usize;
        self.count(cpu, events.now);
        if self.cpus[cpu].preempt { self.choose(cpu, events) } else { self.arm(cpu, events) }
    }

    /// The burst ends after `ns` more on a CPU, if not sooner.
    pub(crate) fn cut(&mut self, thread: u32, ns: u64, events: &mut Events<Event>) {
        let t = &self.threads[thread as usize];
        let (cpu, is_running) = (t.cpu as usize, t.state == State::Running);
        if is_running {
            self.count(cpu, events.now);
        }
        let t = &mut self.threads[thread as usize];
        if t.left > ns {
            t.left = ns.max(1);
            if is_running {
                self.arm(cpu, events);
            }
        }
    }

    /// The thread leaves its CPU until it is woken.
    pub(crate) fn sleep(&mut self, thread: u32, events: &mut Events<Event>) {
        let t = &self.threads[thread as usize];
        let cpu = t.cpu as usize;
        if t.state == State::Running {
            self.count(cpu, events.now);
            let (sum, n) = self.sum(cpu);
            if self.threads[thread as usize].virtual_time * n > sum {
                let t = &mut self.threads[thread as usize];
                t.state = State::Delayed;
                t.left_at = events.now;
                let c = &mut self.cpus[cpu];
                c.delayed.push(thread);
                c.current = None;
                return self.vacate(cpu, events);
            }
        }
        self.leave(thread, events);
    }

    /// Takes a thread off its CPU's queue, whatever it does there.
    fn leave(&mut self, thread: u32, events: &mut Events<Event>) {
        let t = &self.threads[thread as usize];
        let (cpu, state) = (t.cpu as usize, t.state);
        self.count(cpu, events.now);
        let lag = self.lag(cpu, thread);
        let (sum, n) = self.sum(cpu);
        self.pass_thread(thread, events.now);
        self.pass(cpu, events.now);
        let t = &mut self.threads[thread as usize];
        t.state = State::Asleep;
        match state {
            State::Asleep => {}
            State::Coming => self.no_longer_coming(cpu),
            State::Delayed => {
                t.lag = lag;
                self.cpus[cpu].delayed.retain(|&other| other != thread);
            }
            State::Ready => {
                t.lag = lag;
                t.waited += events.now - t.since;
                self.take(cpu, thread);
            }
            State::Running => {
                t.lag = lag;
                t.left_at = events.now;
                self.cpus[cpu].current = None;
                self.cpus[cpu].virtual_time = sum / n.max(1);
                self.vacate(cpu, events);
            }
        }
    }

    /// Finds something to run for a CPU without a current thread.
    fn vacate(&mut self, cpu: usize, events: &mut Events<Event>) {
        if !self.cpus[cpu].ready.is_empty() {
            return self.choose(cpu, events);
        }
        // Nobody else is left whose time they had.
        self.pass(cpu, events.now);
        for thread in std::mem::take(&mut self.cpus[cpu].delayed) {
            self.pass_thread(thread, events.now);
            let t = &mut self.threads[thread as usize];
            (t.state, t.lag) = (State::Asleep, 0);
            let c = &mut self.cpus[cpu];
            c.virtual_time = c.virtual_time.max(t.virtual_time);
        }
        let c = &mut self.cpus[cpu];
        c.counted = events.now;
        c.stamp = c.stamp.wrapping_add(1);
        (c.preempt, c.looks_at) = (false, None);
        if c.coming == 0 {
            self.idle |= bit(cpu);
            self.pull(cpu, events);
        }
    }
}

#[cfg(test)]
mod tests;
