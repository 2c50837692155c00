//! What is done, and when: regret, relief, return, CPUs.

use super::*;
use crate::place::{FairShare, Turns};
use crate::sample::ThreadLoad;

/// What must have been asked for in each period, of what was in the one with most, if what IOThreads ran is to tell how
/// many are needed.
const STEADY: f64 = 0.75;

impl Dynamic {
    /// Undoes what has not helped, if that is known now.
    pub(super) fn regret(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let due = self.trial.as_ref().is_some_and(Trial::due);
        if due { self.judge(view) } else { None }
    }

    /// Closes the books on the last action: it helped, or it is undone.
    fn judge(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let trial = self.trial.as_ref()?;
        let (kind, undo) = (trial.kind, trial.undo.clone());
        let (situation, at) = (trial.situation, trial.at);
        // A removal harms only those that are busier for it than it was bet.
        let may_harm =
            kind != Kind::Remove || view.window.unlocked().any(|thread| thread.busy > HEADROOM);
        let verdict = trial.verdict(&self.weights);
        if !may_harm || !verdict.harmed() {
            self.back_off[kind as usize].not_seen(&situation);
            if kind == Kind::Add && verdict.helped() {
                let now = self.situation(view, false);
                self.worth.seen(view.now, now);
            }
            self.trial = None;
            return None;
        }
        let why = format!(
            "undone: utility was {:.3} before and {:.3} after it ({} ago, sigma {:.3})",
            verdict.before,
            verdict.after,
            view.now.saturating_sub(at),
            verdict.sigma,
        );
        let undone = match undo {
            Undo::Remove(cpus) if self.may_remove(view.now) => {
                let added = |cpu: Option<CpuId>| cpu.is_some_and(|cpu| cpus.contains(&cpu));
                let added = view.window.unlocked().filter(|thread| added(thread.cpu));
                let spare = view.window.threads.len().saturating_sub(self.limits.min_iothreads);
                let gone: Vec<_> = added.map(|thread| thread.id).take(spare).collect();
                let queues = gone.iter().map(|thread| view.groups[thread].len()).sum::<usize>();
                if queues > self.budget.left_to_balance(view.snapshot) && !self.budget.is_fresh() {
                    return None;
                }
                self.remove(view, &gone, &why)
            }
            Undo::Add(count) if self.may_add(view.now, false) => {
                let room = self.limits.max_iothreads.saturating_sub(view.window.threads.len());
                let cpu = self.candidates(view).first().copied().filter(|_| room.min(count) > 0);
                let split = self.widest_split(view);
                cpu.zip(split).map(|(cpu, split)| self.add(view, vec![(cpu, split, why)], false))
            }
            Undo::Move(moves) => Some(self.move_back(view, &moves, &why)),
            Undo::Cpus(cpus) => {
                let there = |cpu: &CpuId| view.window.cpu(*cpu).is_some();
                let cpus: BTreeSet<_> = cpus.into_iter().filter(there).collect();
                (!cpus.is_empty()).then(|| vec![self.set_vcpus(cpus, why)])
            }
            // Not yet: it was changed too recently.
            Undo::Remove(_) | Undo::Add(_) => return None,
        };
        let mut decisions = undone?;
        let part = |of: &Decision| matches!(of.action, Action::MoveQueue { .. });
        if matches!(kind, Kind::Add) && decisions.iter().all(part) {
            // Queues go first; the rest at the next decision.
            return Some(decisions);
        }
        // What undoes it is not itself on trial.
        self.trial = None;
        self.undone = Some(view.now);
        let periods = self.back_off[kind as usize].seen(view.now, situation);
        for decision in &mut decisions {
            decision.reason += &format!("; not again at this load for {periods} periods");
        }
        Some(decisions)
    }

    fn move_back(
        &mut self,
        view: &View<'_>,
        moves: &[(QueueId, ThreadId)],
        why: &str,
    ) -> Vec<Decision> {
        let threads = view.unlocked(&[]);
        let mut decisions = Vec::new();
        for &(queue, to) in moves {
            let is = view.window.queues.iter().find(|of| of.id == queue);
            let may = |of: &&QueueLoad| {
                of.thread != to && threads.contains_key(&of.thread) && threads.contains_key(&to)
            };
            if is.filter(may).is_some() && self.budget.may_move(queue) && self.budget.left() > 0 {
                self.budget.moves(queue, view.now);
                decisions.push(decision(Action::MoveQueue { queue, to }, why));
            }
        }
        decisions
    }

    /// Takes queues from pressed IOThreads, if that helps.
    pub(super) fn relieve(
        &mut self,
        view: &View<'_>,
        pressed: &[Overloaded],
    ) -> Option<Vec<Decision>> {
        let now = view.now;
        let mut new: Vec<(&Overloaded, Split, f64)> = Vec::new();
        for pressed in pressed {
            let queues = &view.groups[&pressed.thread];
            let split = self.split(queues);
            let goes = |of: &&QueueLoad| split.go.iter().any(|queue| queue.id == of.id);
            let (go, stay): (Vec<_>, Vec<_>) = queues.iter().partition(goes);
            let stands = |part: &[&QueueLoad]| part.iter().any(|queue| queue.backlogged);
            let least = split.load.min(split.stays);
            if split.go.is_empty() || (least < LOADED && !(stands(&go) && stands(&stay))) {
                continue;
            }
            // A part in which a queue stands takes what it gets; of others it is not known.
            let grows =
                |part: &[&QueueLoad], load: f64| if stands(part) { 1.0 - load } else { 0.0 };
            let worth = match grows(&go, split.load) + grows(&stay, split.stays) {
                0.0 => least,
                more => more.min(1.0),
            };
            let worth = self.weights.io * worth;
            // Either part may go: the queue that fills an IOThread stays, and others leave it.
            let may = |of: &&QueueLoad| of.busy >= LOADED && self.budget.may_move(of.id);
            let rest: Vec<_> = stay.iter().copied().filter(may).copied().collect();
            let room = self.room(view, pressed, &split.go);
            if let Some((to, go)) = room.or_else(|| self.room(view, pressed, &rest)) {
                // What is only busy for a moment is not worth a move.
                let load = |queue: &QueueLoad| self.loads.get(&queue.id).copied().unwrap_or(0.0);
                if pressed.stands || queues.iter().map(load).sum::<f64>() >= SATURATED {
                    return Some(self.balance(view, pressed, &to, &go));
                }
                continue;
            }
            // Without a queue that stands it is a bet: one at a time.
            if worth >= self.weights.core && (pressed.stands || new.is_empty()) {
                new.push((pressed, split, worth));
            }
        }
        let urgent = new.iter().any(|(pressed, ..)| pressed.urgent);
        let threads = view.window.threads.len();
        let room = self.limits.max_iothreads.saturating_sub(threads);
        if new.is_empty() || room == 0 || !self.may_add(now, urgent) {
            return None;
        }
        // Those before have to have helped.
        if self.trial.as_ref().is_some_and(|trial| trial.kind == Kind::Add && trial.ready()) {
            let undone = self.judge(view);
            if undone.is_some() || self.trial.is_some() {
                return undone;
            }
        }
        let situation = self.situation(view, urgent);
        if self.back_off[Kind::Add as usize].holds(now, &situation) {
            return None;
        }
        let candidates = self.candidates(view);
        let vcpus = view.vcpus();
        let mut idle = view.period.vcpus_idle();
        let awake = view.period.awake_ran;
        let mut shared: BTreeSet<_> =
            view.window.threads.iter().filter_map(|thread| thread.cpu).collect();
        let chased = self.undone.is_some_and(|at| now.saturating_sub(at) < AFTER_REMOVAL);
        let mut moves =
            if chased { self.budget.left_to_balance(view.snapshot) } else { self.budget.left() };
        let room = room.min(candidates.len());
        let mut new = self.fan_out(view, new, room);
        new.truncate(room);
        let mut parts = new.len();
        let mut adds = Vec::new();
        let mut along = self.budget.left_to_spread(view.snapshot);
        let mut gone = BTreeSet::new();
        for ((pressed, mut split, worth), cpu) in new.into_iter().zip(candidates) {
            // What both parts would gain at most is gained; what vCPUs do not leave idle is lost. Where that is their last
            // CPU without an IOThread they share them all, and those that sleep lose nothing.
            shared.insert(cpu);
            let most = if vcpus.is_subset(&shared) { awake.min(1.0) } else { 1.0 };
            let lost = if vcpus.contains(&cpu) { (1.0 - idle).clamp(0.0, most) } else { 0.0 };
            if worth - self.weights.compute * lost < self.weights.core || moves == 0 {
                break;
            }
            split.go.truncate(moves.div_ceil(parts));
            moves -= split.go.len();
            parts -= 1;
            let reason = format!(
                "{}; {} queues with {} % of an IOThread go to one of their own, {} % stay; \
                 vCPUs leave {idle:.2} CPUs idle; IOThread {} of at most {}",
                pressed.why,
                split.go.len(),
                percent(load(&split.go)),
                percent(split.stays),
                threads + adds.len() + 1,
                self.limits.max_iothreads,
            );
            idle -= if vcpus.contains(&cpu) { 1.0 } else { 0.0 };
            // Or those that become busy later would all be with the part that stays.
            let may_move = |queue| self.budget.may_move(queue) && !gone.contains(&queue);
            let mut others =
                place::idle_that_go(&view.groups[&pressed.thread], &split.go, may_move);
            others.truncate(along.min(moves));
            along -= others.len();
            moves -= others.len();
            gone.extend(others.iter().map(|queue| queue.id));
            split.go.append(&mut others);
            adds.push((cpu, split, reason));
        }
        if adds.is_empty() {
            return None;
        }
        if let Some((at, before)) = &self.removed
            && now.saturating_sub(*at) < MISTAKE_PERIODS
            && (Situation { io: before.io, backlogged: 0, urgent: false, ..situation }).like(before)
        {
            self.back_off[Kind::Remove as usize].seen(now, *before);
        }
        Some(self.add(view, adds, urgent))
    }

    /// Splits pressed IOThreads in more than two parts, a queue that stands in each: as many as
    /// there is `room` for, and as bring the number to its limit with a second addition.
    fn fan_out<'a>(
        &self,
        view: &View<'_>,
        new: Vec<(&'a Overloaded, Split, f64)>,
        room: usize,
    ) -> Vec<(&'a Overloaded, Split, f64)> {
        let each = (room / new.len().max(1) + 1).min(self.max_split);
        let stands = |queue: &QueueLoad| self.backlogged.get(queue.id) >= STREAK;
        let mut parts = Vec::new();
        for (pressed, split, worth) in new {
            let queues = &view.groups[&pressed.thread];
            let backlogged = queues.iter().filter(|queue| stands(queue)).count();
            if each.min(backlogged) <= 2 {
                parts.push((pressed, split, worth));
                continue;
            }
            let may_move = |queue| self.budget.may_move(queue);
            let of = place::parts_that_go(queues, each.min(backlogged), may_move);
            let of = of.into_iter().filter(|part| part.go.iter().any(stands));
            parts.extend(of.map(|part| (pressed, part, worth)));
        }
        parts
    }

    /// Which of these queues another IOThread has room for.
    fn room(
        &self,
        view: &View<'_>,
        pressed: &Overloaded,
        part: &[QueueLoad],
    ) -> Option<(ThreadLoad, Vec<QueueLoad>)> {
        let situation = self.situation(view, pressed.urgent);
        if self.back_off[Kind::Move as usize].holds(view.now, &situation) {
            return None;
        }
        let from = view.window.thread(pressed.thread)?;
        let others = view.window.unlocked().filter(|thread| thread.id != from.id);
        let to = *others.min_by(|a, b| a.busy.total_cmp(&b.busy))?;
        let held: f64 = view.groups[&to.id].iter().map(|queue| self.smooth(queue)).sum();
        // Of one that is not full, what the other would be busier by is nothing gained.
        let mut room = SATURATED.min(from.busy) - held.max(to.busy);
        let mut left = self.budget.left_to_balance(view.snapshot);
        let mut go = Vec::new();
        for queue in part {
            let load = self.smooth(queue);
            if load <= room && left > 0 {
                room -= load;
                left -= 1;
                go.push(*queue);
            }
        }
        let some = load(&go) >= 2.0 * LOADED || go.iter().any(|queue| queue.backlogged);
        some.then_some((to, go))
    }

    /// Moves queues of a pressed IOThread, on trial.
    fn balance(
        &mut self,
        view: &View<'_>,
        pressed: &Overloaded,
        to: &ThreadLoad,
        go: &[QueueLoad],
    ) -> Vec<Decision> {
        if self.trial.is_none() {
            let back = go.iter().map(|queue| (queue.id, queue.thread)).collect();
            self.try_out(view, Kind::Move, Undo::Move(back), pressed.urgent);
        }
        self.hand_over(view, pressed, to, go)
    }

    fn hand_over(
        &mut self,
        view: &View<'_>,
        pressed: &Overloaded,
        to: &ThreadLoad,
        go: &[QueueLoad],
    ) -> Vec<Decision> {
        let reason = format!(
            "{}; IOThread {} is {} % busy and gets {} queues with {} %",
            pressed.why,
            to.id.0,
            percent(to.busy),
            go.len(),
            percent(load(go)),
        );
        let mut decisions = Vec::new();
        for queue in go {
            self.budget.moves(queue.id, view.now);
            let action = Action::MoveQueue { queue: queue.id, to: to.id };
            decisions.push(decision(action, reason.clone()));
        }
        decisions
    }

    /// Where relief has found no room for what queues had, moves a queue from the IOThread whose queues get least to
    /// the one where it gets most. If that is full, nothing is gained in sum, but by the queue that waits longest: so
    /// there is nothing to regret. If not, what is left of it is gained, on trial.
    pub(super) fn even_out(
        &mut self,
        view: &View<'_>,
        pressed: &[Overloaded],
    ) -> Option<Vec<Decision>> {
        if pressed.is_empty() || !self.may_even(view) {
            return None;
        }
        // Of the whole period, in which a load that comes and goes is seen on average.
        let groups = place::groups(view.period);
        let share = |thread: &ThreadId| FairShare::of(&groups[thread], SATURATED);
        let from = pressed.iter().map(|of| (of, share(&of.thread)));
        let (from, gets) = from.min_by(|a, b| a.1.with(0).total_cmp(&b.1.with(0)))?;
        let others = view.period.unlocked().filter(|thread| thread.id != from.thread);
        let others = others.map(|thread| (thread, share(&thread.id)));
        let (to, would) = others.max_by(|a, b| a.1.with(1).total_cmp(&b.1.with(1)))?;
        let situation = self.situation(view, from.urgent);
        let (here, there) = (load(&groups[&from.thread]), load(&groups[&to.id]));
        let fills = there < SATURATED && from.urgent && gets.is_contended();
        if !(fills || would.with(1) > MIN_IMBALANCE * gets.with(0))
            || self.budget.left_to_balance(view.snapshot) == 0
            || self.back_off[Kind::Move as usize].holds(view.now, &situation)
        {
            return None;
        }
        let may = |of: &&QueueLoad| {
            // Loads that are all met would only change places.
            (there >= SATURATED || fills || there + of.busy < here)
                && self.may_go(of.id, from.thread)
        };
        let queue = *FairShare::takers(&groups[&from.thread]).find(may)?;
        self.gone.insert((queue.id, from.thread));
        if fills {
            return Some(self.balance(view, from, to, &[queue]));
        }
        Some(self.hand_over(view, from, to, &[queue]))
    }

    /// A load that comes and goes leaves no IOThread full over a period, but while it is there its queues are served by
    /// turns: each waits for as many others as wait beside it. One goes from where requests wait longest to where they
    /// would still wait less. Whoever wants less gets it in either place, so that there is nothing to regret.
    pub(super) fn even_turns(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let groups = place::groups(view.period);
        let not_full = view.period.unlocked().filter(|thread| thread.busy < SATURATED);
        let turns = not_full.map(|thread| (thread.id, Turns::of(&groups[&thread.id])));
        let turns: Vec<_> = turns.collect();
        let by_delay = |a: &&(ThreadId, Turns), b: &&(ThreadId, Turns)| a.1.delay.cmp(&b.1.delay);
        let &(from, longest) = turns.iter().max_by(by_delay)?;
        let &(to, least) = turns.iter().min_by_key(|(_, turns)| turns.with_one_more())?;
        if longest.queues < least.queues + 2
            || least.with_one_more() >= longest.delay
            || self.budget.left_to_balance(view.snapshot) == 0
            || !self.may_even(view)
        {
            return None;
        }
        let may = |of: &&QueueLoad| of.waits() && self.may_go(of.id, from);
        // Of VMs that have more queues here than there, as these mostly become busy together.
        let surplus = |of: &&QueueLoad| {
            let queues = |id| groups[&id].iter().filter(|queue| queue.vm == of.vm).count() as i64;
            queues(from) - queues(to)
        };
        let queue = groups[&from].iter().filter(may).max_by_key(surplus)?.id;
        self.gone.insert((queue, from));
        self.budget.moves(queue, view.now);
        let reason = format!(
            "beside {} queues requests wait {} in IOThread {}, beside {} {} in IOThread {}",
            longest.queues, longest.delay, from.0, least.queues, least.delay, to.0,
        );
        Some(vec![decision(Action::MoveQueue { queue, to }, reason)])
    }

    /// Whether queues may be evened out: what is split at once, by a few samples, is mended as soon as a period has
    /// shown it.
    fn may_even(&self, view: &View<'_>) -> bool {
        let is_split = self.trial.as_ref().is_some_and(|trial| trial.kind == Kind::Add)
            && self.may_add(view.now, true);
        is_split || self.is_settled(view)
    }

    /// Spreads the idle queues of each VM, of which one that becomes busy has all busy at once. The last of all, and
    /// with half of the moves that there may be: others need them more.
    pub(super) fn spread(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let mut left = self.budget.left_to_spread(view.snapshot);
        // Not where one that is needless is about to go.
        let is_needed = self.spare.1.back().is_some_and(|spare| spare.count == 0);
        if view.window.threads.len() < 2 || left == 0 || !is_needed || !self.is_settled(view) {
            return None;
        }
        let unlocked = view.window.unlocked();
        let mut held: BTreeMap<ThreadId, (bool, usize)> =
            unlocked.map(|thread| (thread.id, (thread.busy >= HEADROOM, 0))).collect();
        let mut queues = Vec::with_capacity(view.window.queues.len());
        for queue in &view.window.queues {
            if let Some((_, count)) = held.get_mut(&queue.thread) {
                *count += 1;
                queues.push((queue.vm, queue.thread, queue.id));
            }
        }
        queues.sort_unstable();
        let mut others: BTreeMap<(ThreadId, ThreadId), Vec<QueueId>> = BTreeMap::new();
        let is_idle = |queue| self.loads.get(&queue).is_some_and(|&load| load < IDLE);
        let mut moves = Vec::new();
        for vm in queues.chunk_by(|a, b| a.0 == b.0) {
            let crowds = vm.chunk_by(|a, b| a.1 == b.1);
            let Some(crowd) = crowds.max_by_key(|queues| queues.len()) else { continue };
            if crowd.len() < 2 || left == 0 {
                continue;
            }
            let here = |thread: &ThreadId| vm.iter().filter(|queue| queue.1 == *thread).count();
            let to = held.iter().min_by_key(|(thread, held)| (here(thread), **held));
            let Some(to) = to.map(|(&thread, _)| thread) else { continue };
            let from = crowd[0].1;
            let may = |queue: &QueueId| is_idle(*queue) && self.may_go(*queue, from);
            let queue = crowd.iter().map(|queue| queue.2).find(may);
            let Some(queue) = queue.filter(|_| crowd.len() >= here(&to) + 2) else { continue };
            // Not at the price of numbers: against another one, if no fewer queues are there.
            if held[&to].1 < held[&from].1 {
                held.entry(from).and_modify(|held| held.1 -= 1);
                held.entry(to).and_modify(|held| held.1 += 1);
            } else if let Some(other) =
                others.get_mut(&(to, from)).filter(|_| left > 1).and_then(Vec::pop)
            {
                left -= 1;
                moves.push((other, to, from));
            } else {
                others.entry((from, to)).or_default().push(queue);
                continue;
            }
            left -= 1;
            moves.push((queue, from, to));
        }
        let mut decide = |(queue, from, to): (QueueId, ThreadId, ThreadId)| {
            self.gone.insert((queue, from));
            self.budget.moves(queue, view.now);
            let reason =
                format!("idle beside others of its VM, of which IOThread {} has fewer", to.0);
            decision(Action::MoveQueue { queue, to }, reason)
        };
        (!moves.is_empty()).then(|| moves.into_iter().map(&mut decide).collect())
    }

    /// Whether it is not being seen what the last action brings.
    pub(super) fn is_settled(&self, view: &View<'_>) -> bool {
        let is_new = |at: Nanos| view.now.saturating_sub(at) < AFTER_REMOVAL;
        self.trial.is_none() && !self.added.is_some_and(|(at, _)| is_new(at))
    }

    /// Whether a queue may leave an IOThread, and is not still there after it was to.
    fn may_go(&self, queue: QueueId, from: ThreadId) -> bool {
        self.budget.may_move(queue) && !self.gone.contains(&(queue, from))
    }

    /// How many IOThreads the period could have done without.
    pub(super) fn could_spare(&self, view: &View<'_>) -> usize {
        let period = View { groups: place::groups(view.period), window: view.period, ..*view };
        // What more a full IOThread with several queues would have done is not known; but what
        // vCPUs would do that wait, unless these wait for what the IOThread brings.
        let is_worth = self.worth.holds(view.now, &self.situation(view, false));
        let waited = if is_worth { 0.0 } else { period.window.awake_waited };
        let full = |queues: &Vec<QueueLoad>| {
            let loaded = queues.iter().filter(|queue| queue.busy >= LOADED);
            load(queues) >= 0.95 && loaded.count() > 1
        };
        let unlocked = period.unlocked(&[]);
        if waited < MIN_BALANCE_GAIN.1 && unlocked.values().any(full) {
            return 0;
        }
        let threads = period.window.threads.len();
        // Beside vCPUs, work takes longer than it runs, and not those that run beside all are beside each. But a load that
        // comes and goes needs, while it is there, more than it runs on average.
        let recent = self.history.iter().rev().take(regret::ENOUGH);
        let on_cpu =
            if self.is_steady(regret::ENOUGH, STEADY) { Period::on_cpu(recent) } else { 1.0 };
        let mut count = threads.saturating_sub(self.limits.min_iothreads).min(unlocked.len());
        while count > 0 {
            let gone = self.removal_candidates(&period, count);
            let queues = gone.iter().flat_map(|thread| &unlocked[thread]).copied().collect();
            let ran = |thread: &ThreadId| period.window.thread(*thread).map_or(0.0, |of| of.ran);
            let ran: f64 = gone.iter().map(ran).sum();
            // The last core must pay, not all of them together. That vCPUs would do as much instead is a bet, for what they
            // wait for may be what I/O brings: one core at a time.
            let saved = REMOVABLE_LOAD * self.weights.core;
            let gained = if count == 1 { self.weights.compute * waited.min(ran) } else { 0.0 };
            // On average fewer may do where it comes and goes within a period.
            let bursts = self.bursts_beyond((threads - count) as f64, on_cpu);
            let pays = |drained: place::Drained| {
                let excess = (drained.excess * on_cpu).max(bursts);
                self.weights.io * excess.min(ran) <= saved + gained
            };
            if place::drain(queues, &period.unlocked(&gone), 1.0 / on_cpu).is_some_and(pays) {
                break;
            }
            count /= 2;
        }
        count
    }

    /// What the period's samples asked for beyond so many IOThreads, in IOThreads' worth of the period.
    fn bursts_beyond(&self, threads: f64, on_cpu: f64) -> f64 {
        let beyond = self.bursts.iter().map(|busy| (busy * on_cpu - threads).max(0.0));
        beyond.sum::<f64>() / self.bursts.len().max(1) as f64
    }

    /// Removes the IOThreads that were not needed for a while.
    pub(super) fn give_back(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let least = |periods: usize, of: fn(&Spare) -> usize| {
            self.spare.1.iter().rev().take(periods).map(of).min().unwrap_or(0)
        };
        let needless = least(NEEDLESS_PERIODS, |spare| spare.count);
        let unused = least(NEEDLESS_UNUSED, |spare| spare.unused);
        let (count, periods) = if needless >= unused {
            (needless, NEEDLESS_PERIODS)
        } else {
            (unused, NEEDLESS_UNUSED)
        };
        // One that has just been added may have to wait for its load.
        let is_new = self.spare.1.len() < NEEDLESS_PERIODS;
        if count == 0 || is_new || !self.may_remove(view.now) {
            return None;
        }
        let recent: Vec<_> = self.history.iter().rev().take(periods).copied().collect();
        let mean = Period::mean(&recent);
        if self.back_off[Kind::Remove as usize].holds(view.now, &self.situation(view, false)) {
            return None;
        }
        if let Some((at, before)) = self.added
            && view.now.saturating_sub(at) < MISTAKE_PERIODS
        {
            self.back_off[Kind::Add as usize].seen(view.now, before);
        }
        let gone = self.removal_candidates(view, count);
        let threads = view.window.threads.len();
        let reason = format!(
            "{threads} IOThreads were {} % busy in all, for {periods} periods {count} fewer would have done",
            percent(mean.busy),
        );
        self.remove(view, &gone, &reason)
    }

    /// Takes the CPU of an IOThread from vCPUs, or gives it back to them.
    pub(super) fn share_cpus(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        let sample = view.period;
        let vcpus = view.vcpus();
        let lendable = self.lendable(view);
        let mut missed = BTreeMap::new();
        let mut found = None;
        // vCPUs that sleep wait for each other when they wake up on CPUs that are full.
        let room = MIN_BALANCE_GAIN.1.min(sample.vcpus_ran - sample.awake_ran);
        for thread in sample.unlocked() {
            let Some(cpu) = thread.cpu.and_then(|cpu| sample.cpu(cpu)) else { continue };
            if vcpus.contains(&cpu.id) {
                let used = (1.0 - cpu.idle - thread.ran).max(0.0);
                let elsewhere = sample.vcpus_idle() - cpu.idle;
                let lost = (used - (elsewhere - room).max(0.0)).max(0.0);
                let other = |other: &&CpuId| {
                    sample.threads.iter().all(|thread| thread.cpu != Some(**other))
                };
                let refused = self.refused.contains(&cpu.id);
                if !refused
                    && thread.waited - lost >= MIN_BALANCE_GAIN.0
                    && vcpus.iter().any(|cpu| other(&cpu))
                {
                    let reason = format!(
                        "IOThread {} waits {} % for CPU {}, of which vCPUs use {} %; \
                         they would lose {} %",
                        thread.id.0,
                        percent(thread.waited),
                        cpu.id,
                        percent(used),
                        percent(lost),
                    );
                    found = found.or(Some((cpu.id, true, lost, reason)));
                }
            } else if lendable.contains(&cpu.id) {
                let gained = sample.vcpus_waited.min(1.0 - thread.ran) - thread.busy;
                if gained < MIN_BALANCE_GAIN.1 {
                    continue;
                }
                let periods = self.missed.get(&cpu.id).map_or(1, |periods| periods + 1);
                missed.insert(cpu.id, periods);
                if periods >= NEEDLESS_PERIODS {
                    let reason = format!(
                        "IOThread {} uses {} % of CPU {}, vCPUs wait for {:.2} CPUs",
                        thread.id.0,
                        percent(thread.ran),
                        cpu.id,
                        sample.vcpus_waited,
                    );
                    found = found.or(Some((cpu.id, false, 0.0, reason)));
                }
            }
        }
        self.missed = missed;
        // Where an IOThread has gone, the others may need a CPU for themselves at once, if that costs nothing: the same bet.
        let trial = self.trial.as_ref().map(|trial| trial.kind);
        let is_over =
            self.removed.is_none_or(|(at, _)| view.now.saturating_sub(at) >= AFTER_ADDITION);
        let may = |take: bool, lost: f64| {
            trial.is_none() || (is_over && take && lost == 0.0 && trial == Some(Kind::Remove))
        };
        let (cpu, take, lost, reason) = found.filter(|_| self.limits.borrow)?;
        if !may(take, lost) {
            return None;
        }
        if self.back_off[Kind::Cpus as usize].holds(view.now, &self.situation(view, false)) {
            return None;
        }
        let mut cpus = vcpus.clone();
        if take {
            cpus.remove(&cpu);
        } else {
            cpus.insert(cpu);
            self.missed.remove(&cpu);
        }
        if trial.is_none() {
            let undo = Undo::Cpus(vcpus.into_iter().collect());
            self.try_out(view, Kind::Cpus, undo, false);
        }
        Some(vec![self.set_vcpus(cpus, reason)])
    }
}
