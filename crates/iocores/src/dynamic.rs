//! The number of IOThreads and the place of each queue follow the load.
//!
//! # Terms
//! A queue's *load* is what it takes of an IOThread's time, 0 to 1. An IOThread is *pressed* if it
//! is ≥ [`HEADROOM`] busy and a queue of it stands in 3 samples, or its requests wait more than
//! [`DELAY`] on average, or more than a quarter of what they take: with drivers that have few in
//! flight it sleeps now and then, as they do while theirs wait.
//!
//! # Algorithm
//! Every [`PERIOD`], the first of these that has something to do:
//! 1. *Bounds.* The number comes back within [`Limits`].
//! 2. *Regret.* What was done last is undone if it lowered the utility ([`crate::utility`]) by more
//!    than 3 % and 2 sigma: up to 5 periods of such a load before it against 5 after it in which no
//!    less was asked for. That kind of action is then not tried at such a load for 20 to 600
//!    periods. An addition that raised it as clearly is, as long, not doubted for what vCPUs wait.
//! 3. *CPUs.* Where borrowing is allowed, vCPUs leave the CPU of an IOThread that waits for it if
//!    what they lose is less than what it gains, and come back if for a second they waited for more
//!    than it used. Those that sleep must find some room to wake up to elsewhere.
//! 4. *Relief.* The queues of a pressed IOThread are split in two parts of about the same load. If
//!    what both would gain is worth less than an I/O core, no further IOThread helps: one queue
//!    fills this one. Otherwise the smaller part goes where there is room, or to a new IOThread:
//!    several of these at once if several are pressed. Where more than 4 IOThreads are allowed and
//!    more queues stand, there are more parts, so that two additions can reach the largest number.
//!    Where no IOThread has room, a queue moves if it gets a fifth more on another one than the least gets now; or,
//!    on trial, one of two that wait to an IOThread that is not full; or, of a load that comes and goes, one from where
//!    requests wait to where they would wait less beside fewer. An added IOThread gets half of the idle queues too.
//! 5. *Return.* IOThreads go if for one second the others could have done their work, or vCPUs
//!    waited that could do as much instead: to within [`REMOVABLE_LOAD`] of what one core is worth; after half
//!    a second if they had no work. Work is what they ran, beside vCPUs too, unless the load comes and goes.
//!    That is a bet if the others are then more than 60 % busy, and regret keeps the books.
//! 6. *Neighbours.* Where vCPUs share all CPUs with IOThreads that have work, drivers go to the CPUs of their queues'
//!    IOThreads if the load is steady ([`crate::drivers`] says who these are); and where queues wait and one IOThread waits
//!    for its CPU for longer than another, the other vCPUs go to the CPUs by turns: the scheduler leaves them where the
//!    last idle CPU was. They may leave again. The one is on trial, and done every 2 s if they do; the other not again for
//!    20 to 600 periods at such a load.
//! 7. *Spread.* Idle queues of one VM go to different IOThreads, if none of these is needless and none gets more queues
//!    than others for it: they mostly become busy together.
//!
//! I/O CPUs are those on which no vCPU runs. With `borrow`, vCPUs and IOThreads have them in common:
//! vCPUs are taken off one before an IOThread comes there, and get it when that has gone. The last
//! one without an IOThread is not taken from them: they then share them all with the IOThreads. A
//! CPU that the vCPUs use is only taken if they leave enough idle for that to pay. One that could
//! not be taken or given when it was asked for is not asked for again while the VMs are the same.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rtvirtio_units::{CpuId, Nanos};

use crate::drivers::Drivers;
use crate::place::{self, LOADED, Split, load};
use crate::sample::{DELAY, QueueLoad, Sample, ThreadLoad, find};
use crate::utility::Weights;
use crate::{
    Action, Cpu, Decision, Limits, Policy, QueueId, QueueKind, SAMPLE, Snapshot, ThreadId, Vcpu,
    VcpuId, VmId,
};

mod budget;
mod neighbours;
mod regret;
mod rules;

use budget::Budget;
use regret::{BackOff, Kind, Period, Situation, Trial, Undo};

/// The control period.
const PERIOD: Nanos = Nanos::from_millis(100);

/// Samples in a row that make a signal.
const STREAK: u32 = 3;

/// An IOThread that is so busy is full.
const SATURATED: f64 = 0.85;

/// One that is less busy has room: what waits there waits for something else, such as a limit.
const HEADROOM: f64 = 0.60;

/// Of what requests take, what they wait for their turn without pressing their IOThread.
const WAIT: f64 = 0.25;

/// Of what a core is worth, what may be lost by giving some back.
const REMOVABLE_LOAD: f64 = 0.6;

/// A queue goes from a full IOThread to another one if it gets so many times as much there.
const MIN_IMBALANCE: f64 = 1.2;

/// A queue with less of an IOThread is idle: next to nothing for a second.
const IDLE: f64 = 0.001;

/// After an addition, nothing is added or removed.
const AFTER_ADDITION: Nanos = Nanos::from_millis(200);

/// After a removal, nothing is removed, nor added but for what stands or waits.
const AFTER_REMOVAL: Nanos = Nanos::from_millis(1_000);

/// A removal that is made good for by an addition so soon, at the same load, was wrong; and an addition that is given
/// back so soon.
const MISTAKE_PERIODS: Nanos = Nanos::from_millis(2_000);

/// Periods for which a core must have been needless.
const NEEDLESS_PERIODS: usize = 10;

/// And for which it must have been unused: less than [`UNUSED`] busy.
const NEEDLESS_UNUSED: usize = 3;
const UNUSED: f64 = 0.05;

/// Periods that are remembered.
const HISTORY: usize = 20;

/// Samples of a period that are remembered: more than it has.
const BURSTS: usize = 32;

/// What of a CPU must be gained by taking it from vCPUs, and by giving it back.
const MIN_BALANCE_GAIN: (f64, f64) = (0.1, 0.2);

/// See the module.
#[derive(Debug)]
pub(crate) struct Dynamic {
    limits: Limits,
    weights: Weights,
    /// The last [`STREAK`] samples are between these.
    recent: VecDeque<Snapshot>,
    /// The last decision's.
    period: Option<Snapshot>,
    /// What IOThreads together were busy in each sample of this period, at most [`BURSTS`] of them.
    bursts: Vec<f64>,
    /// The last periods.
    history: VecDeque<Period>,
    /// Samples in a row in which it stood.
    backlogged: Streaks,
    /// Loads, over some periods: half of each is the last one's.
    loads: BTreeMap<QueueId, f64>,
    /// How many IOThreads each of the last periods could have done without, with this many.
    spare: (usize, VecDeque<Spare>),
    /// When one was, and at what load.
    added: Option<(Nanos, Situation)>,
    removed: Option<(Nanos, Situation)>,
    undone: Option<Nanos>,
    drivers: Drivers,
    /// When vCPUs were placed last.
    placed: Option<Nanos>,
    budget: Budget,
    /// An IOThread's queues may go to so many at once.
    max_split: usize,
    trial: Option<Trial>,
    back_off: [BackOff; 6],
    /// Loads at which a further IOThread has shown what it is worth, whatever vCPUs wait.
    worth: BackOff,
    /// Where vCPUs were to run by the last decision.
    asked: Option<BTreeSet<CpuId>>,
    /// CPUs that were not given or taken when that was asked for.
    refused: BTreeSet<CpuId>,
    /// Of these VMs.
    vms: Vec<VmId>,
    /// Queues that were to leave an IOThread for nothing but to be spread or served alike, and are still there: a
    /// move may fail, or only be advised.
    gone: BTreeSet<(QueueId, ThreadId)>,
    /// Periods in a row in which vCPUs could have used it better.
    missed: BTreeMap<CpuId, usize>,
}

/// How many IOThreads there could have been fewer.
#[derive(Debug, Clone, Copy)]
struct Spare {
    count: usize,
    /// Of these, so many as did nothing.
    unused: usize,
}

/// An IOThread that is pressed.
struct Overloaded {
    thread: ThreadId,
    /// Its queues are worse off than busy.
    urgent: bool,
    /// Some stand.
    stands: bool,
    why: String,
}

/// What a decision is made of.
struct View<'a> {
    now: Nanos,
    snapshot: &'a Snapshot,
    /// The last samples.
    window: &'a Sample,
    /// Queues by IOThread in the last samples, and in the period.
    groups: BTreeMap<ThreadId, Vec<QueueLoad>>,
    period: &'a Sample,
}

impl View<'_> {
    fn unlocked(&self, except: &[ThreadId]) -> BTreeMap<ThreadId, Vec<QueueLoad>> {
        let unlocked = self.window.unlocked().filter(|thread| !except.contains(&thread.id));
        unlocked.map(|thread| (thread.id, self.groups[&thread.id].clone())).collect()
    }

    fn vcpus(&self) -> BTreeSet<CpuId> {
        let vcpus = self.snapshot.cpus.iter().filter(|cpu| cpu.vcpus);
        vcpus.map(|cpu| cpu.id).collect()
    }
}

/// How many IOThreads' worth of time those in both were busy.
fn busy_between(before: &Snapshot, after: &Snapshot) -> f64 {
    let elapsed = after.now.saturating_sub(before.now).as_secs_f64();
    let busy = after.threads.iter().filter_map(|thread| {
        let was = find(&before.threads, thread.id, |of| of.id)?;
        Some((thread.busy.saturating_sub(was.busy).as_secs_f64() / elapsed).min(1.0))
    });
    busy.sum()
}

/// For how long an IOThread's requests or frames of a kind waited on average, and whether that is much of what they take.
fn waits(queues: &[QueueLoad], kind: QueueKind, seconds: f64) -> (Nanos, bool) {
    let of_kind = || queues.iter().filter(|queue| queue.kind == kind);
    let requests: u64 = of_kind().fold(0, |sum, queue| sum.saturating_add(queue.requests));
    let waited = of_kind().fold(Nanos::ZERO, |sum, of| sum.saturating_add(of.waited));
    let busy: f64 = of_kind().map(|queue| queue.busy).sum();
    let delay = Nanos::new(waited.get() / requests.max(1));
    let took = busy * seconds / requests.max(1) as f64;
    (delay, delay.as_secs_f64() > WAIT * took)
}

fn percent(share: f64) -> f64 {
    (100.0 * share).round()
}

fn decision(action: Action, reason: impl Into<String>) -> Decision {
    Decision { action, reason: reason.into() }
}

/// How many samples in a row something was so of a queue.
#[derive(Debug, Default)]
struct Streaks {
    of: Vec<(QueueId, u32)>,
    /// Scratch, kept for its memory.
    next: Vec<(QueueId, u32)>,
}

impl Streaks {
    /// A sample: everything there is, by id, and whether it was so.
    fn note(&mut self, sample: impl Iterator<Item = (QueueId, bool)>) {
        self.next.clear();
        for (at, (id, is_so)) in sample.enumerate() {
            // Mostly they are where they were.
            let here = self.of.get(at).filter(|(of, _)| *of == id);
            let before = here.map_or_else(|| self.get(id), |(_, streak)| *streak);
            self.next.push((id, if is_so { before.saturating_add(1) } else { 0 }));
        }
        std::mem::swap(&mut self.of, &mut self.next);
    }

    fn get(&self, id: QueueId) -> u32 {
        find(&self.of, id, |(of, _)| *of).map_or(0, |(_, streak)| *streak)
    }
}

impl Policy for Dynamic {
    fn step(&mut self, snapshot: &Snapshot) -> Vec<Decision> {
        let now = snapshot.now;
        if self.recent.back().is_some_and(|last| now <= last.now) {
            return Vec::new();
        }
        self.note(snapshot);
        let start = self.period.get_or_insert_with(|| snapshot.clone());
        // A sample that comes a little early is still the last of its period.
        if now.saturating_sub(start.now) < PERIOD.saturating_sub(Nanos::new(SAMPLE.get() / 2)) {
            return Vec::new();
        }
        let first = self.recent.front().unwrap_or(snapshot);
        let (Some(period), Some(window)) =
            (Sample::between(start, snapshot), Sample::between(first, snapshot))
        else {
            return Vec::new();
        };
        start.clone_from(snapshot);
        let groups = place::groups(&window);
        let decisions =
            self.decide(&View { now, snapshot, window: &window, groups, period: &period });
        self.bursts.clear();
        decisions
    }
}

impl Dynamic {
    pub(crate) fn new(mut limits: Limits, weights: Weights) -> Self {
        limits.min_iothreads = limits.min_iothreads.max(1);
        limits.max_iothreads = limits.max_iothreads.max(limits.min_iothreads);
        let most = limits.max_iothreads.min(limits.cpus.len());
        Self {
            budget: Budget::new(most),
            max_split: (2..most).find(|max_split| max_split * max_split >= most).unwrap_or(2),
            limits,
            weights,
            recent: VecDeque::new(),
            period: None,
            bursts: Vec::new(),
            history: VecDeque::new(),
            backlogged: Streaks::default(),
            loads: BTreeMap::new(),
            spare: (0, VecDeque::new()),
            added: None,
            removed: None,
            undone: None,
            drivers: Drivers::default(),
            placed: None,
            trial: None,
            back_off: Default::default(),
            worth: BackOff::default(),
            asked: None,
            refused: BTreeSet::new(),
            vms: Vec::new(),
            gone: BTreeSet::new(),
            missed: BTreeMap::new(),
        }
    }

    /// Takes a sample into account; allocates nothing that it has not had before.
    fn note(&mut self, snapshot: &Snapshot) {
        if self.limits.borrow {
            self.drivers.note(snapshot);
        }
        if let Some(last) = self.recent.back() {
            if self.bursts.len() < BURSTS {
                self.bursts.push(busy_between(last, snapshot));
            }
            self.backlogged.note(snapshot.queues.iter().map(|queue| (queue.id, queue.backlogged)));
        }
        let full = self.recent.len() > STREAK as usize;
        let mut kept = if full { self.recent.pop_front() } else { None }.unwrap_or_default();
        kept.clone_from(snapshot);
        self.recent.push_back(kept);
    }

    fn decide(&mut self, view: &View<'_>) -> Vec<Decision> {
        self.budget.pass(view.now);
        let period = Period::of(view.period);
        if let Some(trial) = &mut self.trial {
            trial.sample(period, Period::of(view.window));
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(period);
        let threads = view.window.threads.len();
        if self.spare.0 != threads {
            self.spare = (threads, VecDeque::new());
        }
        let vms = view.snapshot.vms.iter().map(|vm| vm.id);
        if !vms.clone().eq(self.vms.iter().copied()) {
            // Others may run elsewhere, and who goes takes his CPUs with him, which is no refusal.
            self.vms = vms.collect();
            self.refused.clear();
            self.asked = None;
            self.gone.clear();
        }
        let is_at = |queue, thread| {
            find(&view.window.queues, queue, |of| of.id).is_some_and(|of| of.thread == thread)
        };
        self.gone.retain(|&(queue, thread)| is_at(queue, thread));
        if let Some(asked) = self.asked.take() {
            self.refused.extend(asked.symmetric_difference(&view.vcpus()));
        }
        if self.trial.as_ref().is_some_and(|trial| trial.forgotten(view.now)) {
            self.trial = None;
        }
        let smooth = |queue: &QueueLoad| {
            let before = self.loads.get(&queue.id).copied().unwrap_or(queue.busy);
            (queue.id, (before + queue.busy) / 2.0)
        };
        self.loads = view.period.queues.iter().map(smooth).collect();
        let pressed = self.find_pressed(view);
        let count = self.could_spare(view);
        let unused = view.period.unlocked().filter(|thread| thread.busy < UNUSED).count();
        self.spare.1.push_back(Spare { count, unused: unused.min(count) });
        if self.spare.1.len() > NEEDLESS_PERIODS {
            self.spare.1.pop_front();
        }
        self.keep_bounds(view)
            .or_else(|| self.regret(view))
            .or_else(|| self.share_cpus(view))
            .or_else(|| self.relieve(view, &pressed))
            .or_else(|| self.even_out(view, &pressed))
            .or_else(|| self.even_turns(view))
            .or_else(|| self.give_back(view))
            .or_else(|| self.gather_vcpus(view))
            .or_else(|| self.spread_vcpus(view))
            .or_else(|| self.spread(view))
            .unwrap_or_default()
    }

    /// CPUs that IOThreads have, or had, and that vCPUs may be given.
    fn lendable(&self, view: &View<'_>) -> BTreeSet<CpuId> {
        let has_vms = view.snapshot.cpus.iter().any(|cpu| cpu.vcpus);
        let lendable = |cpu: &&Cpu| {
            !cpu.vcpus && self.limits.cpus.contains(&cpu.id) && !self.refused.contains(&cpu.id)
        };
        let cpus = view.snapshot.cpus.iter().filter(|_| has_vms && self.limits.borrow);
        cpus.filter(lendable).map(|cpu| cpu.id).collect()
    }

    /// Has vCPUs run on these CPUs alone.
    fn set_vcpus(&mut self, cpus: BTreeSet<CpuId>, reason: impl Into<String>) -> Decision {
        let action = Action::SetVcpuCpus { cpus: cpus.iter().copied().collect() };
        self.asked = Some(cpus);
        decision(action, reason)
    }

    /// Whether an IOThread may be added now.
    fn may_add(&self, now: Nanos, urgent: bool) -> bool {
        let dwell = if urgent { AFTER_ADDITION } else { AFTER_REMOVAL };
        let passed = |at: Nanos, dwell| now.saturating_sub(at) >= dwell;
        self.added.is_none_or(|(at, _)| passed(at, AFTER_ADDITION))
            && self.removed.is_none_or(|(at, _)| passed(at, dwell))
    }

    fn may_remove(&self, now: Nanos) -> bool {
        self.may_add(now, false)
    }

    /// The last periods of a load like the present one, with this number of IOThreads.
    fn before(&self, view: &View<'_>) -> Vec<Period> {
        let now = Period::of(view.window);
        let like = |at: &&Period| {
            at.progress.cores == now.progress.cores
                && (at.demand - now.demand).abs() <= 0.2 * now.demand
        };
        let alike: Vec<_> =
            self.history.iter().rev().filter(like).take(regret::ENOUGH).copied().collect();
        // A load that has just come is judged by the last samples.
        if alike.is_empty() { vec![now] } else { alike }
    }

    /// Whether in each of so many last periods at least this part was asked for of what was in any, so that it is no load
    /// that comes and goes.
    fn is_steady(&self, periods: usize, part: f64) -> bool {
        let last = self.history.iter().rev().take(periods).map(|period| period.demand);
        let most = last.clone().fold(0.0, f64::max);
        last.len() == periods && last.into_iter().all(|demand| demand >= part * most)
    }

    /// The present load.
    fn situation(&self, view: &View<'_>, urgent: bool) -> Situation {
        let loaded = view.window.queues.iter().filter(|queue| queue.busy >= LOADED).count();
        let backlogged = self.backlogged.of.iter().filter(|(_, streak)| *streak >= STREAK).count();
        Situation { io: Period::mean(&self.before(view)).io, loaded, backlogged, urgent }
    }

    /// Opens the books on an action.
    fn try_out(&mut self, view: &View<'_>, kind: Kind, undo: Undo, urgent: bool) {
        let situation = self.situation(view, urgent);
        self.trial = Some(Trial::new(kind, view.now, undo, situation, self.before(view)));
    }

    /// The load of a queue, if not just this moment's.
    fn smooth(&self, queue: &QueueLoad) -> f64 {
        self.loads.get(&queue.id).map_or(queue.busy, |load| load.max(queue.busy))
    }

    fn find_pressed(&self, view: &View<'_>) -> Vec<Overloaded> {
        let mut found = Vec::new();
        for thread in view.window.unlocked() {
            let queues = &view.groups[&thread.id];
            let stand = |queue: &&QueueLoad| self.backlogged.get(queue.id) >= STREAK;
            let stand = queues.iter().filter(stand).count();
            // Each kind by itself: requests that wait are not made good for by a thousand frames that do not.
            let waits = QueueKind::ALL.map(|kind| waits(queues, kind, view.window.seconds));
            let delay = waits.iter().map(|(delay, _)| *delay).max().unwrap_or_default();
            let is_urgent = stand > 0 || delay > DELAY;
            if thread.busy >= HEADROOM && (is_urgent || waits.iter().any(|(_, is_long)| *is_long)) {
                let why = format!(
                    "IOThread {}: {} % busy, {stand} of {} queues stand, requests wait {delay}",
                    thread.id.0,
                    percent(thread.busy),
                    queues.len(),
                );
                let stands = stand > 0;
                found.push(Overloaded { thread: thread.id, urgent: is_urgent, stands, why });
            }
        }
        found
    }

    fn keep_bounds(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let (threads, now) = (view.window.threads.len(), view.now);
        let Limits { min_iothreads, max_iothreads, .. } = self.limits;
        if threads < min_iothreads && self.may_add(now, true) {
            let cpu = *self.candidates(view).first()?;
            let reason = format!("{threads} IOThreads, at least {min_iothreads}");
            let split = self.widest_split(view).unwrap_or_default();
            return Some(self.add(view, vec![(cpu, split, reason)], false));
        }
        if threads > max_iothreads && self.may_remove(now) {
            let reason = format!("{threads} IOThreads, at most {max_iothreads}");
            return self.remove(view, &self.removal_candidates(view, 1), &reason);
        }
        None
    }

    /// The queues of the IOThread with most load, in two parts.
    fn widest_split(&self, view: &View<'_>) -> Option<Split> {
        let threads = view.window.unlocked();
        let most = threads.max_by(|a, b| a.busy.total_cmp(&b.busy))?;
        Some(self.split(&view.groups[&most.id]))
    }

    fn split(&self, queues: &[QueueLoad]) -> Split {
        let mut split = place::split(queues, |queue| self.budget.may_move(queue));
        split.go.truncate(self.budget.left());
        split.load = load(&split.go);
        split
    }

    /// Where IOThreads can be added, the best first.
    fn candidates(&self, view: &View<'_>) -> Vec<CpuId> {
        let taken: BTreeSet<_> =
            view.window.threads.iter().filter_map(|thread| thread.cpu).collect();
        let vcpus = view.vcpus();
        let mut seen = BTreeSet::new();
        let free = |cpu: &&CpuId| !taken.contains(*cpu) && seen.insert(**cpu);
        let mut free: Vec<_> = self.limits.cpus.iter().filter(free).copied().collect();
        free.retain(|cpu| self.limits.borrow || !vcpus.contains(cpu));
        free.sort_by_key(|cpu| vcpus.contains(cpu));
        free
    }

    /// Adds IOThreads, with some of the queues of others.
    fn add(
        &mut self,
        view: &View<'_>,
        new: Vec<(CpuId, Split, String)>,
        urgent: bool,
    ) -> Vec<Decision> {
        let before = view.vcpus();
        let mut vcpus = before.clone();
        let mut taken: BTreeSet<_> =
            view.window.threads.iter().filter_map(|thread| thread.cpu).collect();
        let mut decisions = Vec::new();
        let mut cpus = Vec::new();
        for (cpu, split, reason) in new {
            taken.insert(cpu);
            // One without an IOThread must be left.
            if vcpus.difference(&taken).next().is_some() {
                vcpus.remove(&cpu);
            }
            for queue in &split.go {
                self.budget.moves(queue.id, view.now);
            }
            cpus.push(cpu);
            let queues = split.go.iter().map(|queue| queue.id).collect();
            decisions.push(decision(Action::AddThread { cpu, queues }, reason));
        }
        if vcpus.is_subset(&taken) {
            // None is: they share them all.
            vcpus.append(&mut self.lendable(view));
        }
        if vcpus != before {
            let reason = format!("vCPUs have {} CPUs instead of {}", vcpus.len(), before.len());
            decisions.insert(0, self.set_vcpus(vcpus, reason));
        }
        self.added = Some((view.now, self.situation(view, urgent)));
        self.try_out(view, Kind::Add, Undo::Remove(cpus), urgent);
        decisions
    }

    /// The IOThreads that are missed least: those with the least load, of these the newest.
    fn removal_candidates(&self, view: &View<'_>, count: usize) -> Vec<ThreadId> {
        let mut by_load: Vec<_> = view.window.unlocked().map(|thread| thread.id).collect();
        let parts = |thread: &ThreadId| (load(&view.groups[thread]) * 1e3) as u64;
        by_load.sort_by_key(|thread| (parts(thread), std::cmp::Reverse(*thread)));
        by_load.truncate(count);
        by_load
    }

    /// Removes IOThreads; or moves some of their queues away, if these are too many for once.
    fn remove(&mut self, view: &View<'_>, gone: &[ThreadId], why: &str) -> Option<Vec<Decision>> {
        let queues: Vec<_> = gone.iter().flat_map(|thread| &view.groups[thread]).copied().collect();
        if gone.is_empty() || !queues.iter().all(|queue| self.budget.may_move(queue.id)) {
            return None;
        }
        let left = self.budget.left();
        let all = queues.len();
        let some = queues.iter().take(left).copied().collect();
        let moves = place::drain(some, &view.unlocked(gone), 1.0)?.moves;
        for &(queue, _) in &moves {
            self.budget.moves(queue, view.now);
        }
        if all > left {
            let reason = format!("{why}; {all} queues go first, {left} now");
            let moved = |(queue, to)| decision(Action::MoveQueue { queue, to }, reason.clone());
            return Some(moves.into_iter().map(moved).collect());
        }
        let mut decisions = Vec::new();
        let mut vcpus = view.vcpus();
        let before = vcpus.len();
        let lendable = self.lendable(view);
        for &thread in gone {
            let its = |(queue, _): &&(QueueId, ThreadId)| {
                view.groups[&thread].iter().any(|of| of.id == *queue)
            };
            let moves = moves.iter().filter(its).copied().collect();
            decisions.push(decision(Action::RemoveThread { thread, moves }, why));
            let cpu = view.window.thread(thread).and_then(|thread| thread.cpu);
            vcpus.extend(cpu.filter(|cpu| lendable.contains(cpu)));
        }
        if vcpus.len() > before {
            let reason = format!("vCPUs get {} CPUs back", vcpus.len() - before);
            decisions.push(self.set_vcpus(vcpus, reason));
        }
        self.removed = Some((view.now, self.situation(view, false)));
        self.try_out(view, Kind::Remove, Undo::Add(gone.len()), false);
        self.spare.1.clear();
        Some(decisions)
    }
}
