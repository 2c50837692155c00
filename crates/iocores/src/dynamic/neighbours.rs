//! IOThreads and vCPUs on the same CPUs: who is in whose way, and who is far from whom.

use super::*;

/// What was asked for in each of the last periods, of what was in the one with most, if the load is steady.
const STILL: f64 = 0.85;

/// What of the time in which it has work an IOThread must wait for its CPU more than another one does, where vCPUs are
/// on both, to spread these.
const UNEVEN: f64 = 0.15;

/// Load of the queues whose drivers are on other CPUs, to fetch these drivers.
const FAR: f64 = 0.05;

/// vCPUs that were placed are left alone for so long.
const AFTER_PLACING: Nanos = Nanos::from_millis(2_000);

impl Dynamic {
    /// Has drivers go to the CPUs of their queues' IOThreads, where vCPUs share all CPUs with IOThreads that have
    /// work: a driver elsewhere has to be interrupted for each call, and finds none of its data in its CPU's cache.
    pub(super) fn gather_vcpus(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        if !self.is_steady(regret::ENOUGH, STILL)
            || !self.may_place(view, |thread, _| thread.busy >= HEADROOM)
        {
            return None;
        }
        let mut at = Vec::new();
        let mut far = 0.0;
        for (queue, vcpu, to) in self.homes(view) {
            let of = find(&view.snapshot.vcpus, vcpu, |of| of.id);
            let on = of.and_then(|of| of.cpu);
            if queue.busy >= LOADED && on.is_some_and(|cpu| cpu != to) {
                far += queue.busy;
                at.push((vcpu, to));
            }
        }
        if far < FAR {
            return None;
        }
        let situation = self.situation(view, false);
        if self.back_off[Kind::Gather as usize].holds(view.now, &situation) {
            return None;
        }
        at.sort_unstable();
        self.placed = Some(view.now);
        self.try_out(view, Kind::Gather, Undo::Move(Vec::new()), false);
        let reason = format!(
            "drivers of {} queues with {} % of an IOThread are on other CPUs than theirs",
            at.len(),
            percent(far),
        );
        Some(vec![decision(Action::PlaceVcpus { at }, reason)])
    }

    /// Spreads the vCPUs where they share all CPUs with IOThreads in which queues wait, and one waits for its CPU for longer
    /// than another one: whose queues would wait for longer too. The scheduler leaves them where the last idle CPU
    /// was. If it puts them back, that is not done again soon.
    pub(super) fn spread_vcpus(&mut self, view: &View<'_>) -> Option<Vec<Decision>> {
        if !self.may_place(view, |_, queues| queues.iter().any(QueueLoad::waits)) {
            return None;
        }
        let cpus = view.vcpus();
        let on = |of: &&ThreadLoad| of.cpu.is_some_and(|cpu| cpus.contains(&cpu));
        let share = |of: &ThreadLoad| of.waited / (of.ran + of.waited).max(f64::EPSILON);
        let waits = || view.period.threads.iter().filter(on).map(share);
        let (least, most) = (waits().fold(1.0, f64::min), waits().fold(0.0, f64::max));
        let situation = self.situation(view, false);
        let tried = self.back_off[Kind::Spread as usize].holds(view.now, &situation);
        if most - least < UNEVEN || tried {
            return None;
        }
        let homes: BTreeMap<_, _> =
            self.homes(view).into_iter().map(|(_, vcpu, to)| (vcpu, to)).collect();
        let mut turns = cpus.iter().copied().cycle();
        let mut place = |vcpu: &Vcpu| match homes.get(&vcpu.id) {
            Some(home) => Some((vcpu.id, *home)),
            None => Some((vcpu.id, turns.next()?)),
        };
        let at: Vec<_> = view.snapshot.vcpus.iter().filter_map(&mut place).collect();
        if at.is_empty() {
            return None;
        }
        let reason = format!(
            "beside vCPUs, one IOThread with work waits {} % of the time for its CPU and another one {} %",
            percent(most),
            percent(least),
        );
        self.placed = Some(view.now);
        self.back_off[Kind::Spread as usize].seen(view.now, situation);
        Some(vec![decision(Action::PlaceVcpus { at }, reason)])
    }

    /// Whether vCPUs may be moved and share all CPUs with IOThreads that have so much work, nothing is being tried,
    /// and none was placed just now.
    fn may_place(
        &self,
        view: &View<'_>,
        works: impl Fn(&ThreadLoad, &[QueueLoad]) -> bool,
    ) -> bool {
        let rested = |at: Nanos| view.now.saturating_sub(at) >= AFTER_PLACING;
        if !self.limits.borrow || !self.placed.is_none_or(rested) || !self.is_settled(view) {
            return false;
        }
        let mut cpus = view.vcpus();
        let groups = place::groups(view.period);
        let working = view.period.threads.iter().filter(|of| works(of, &groups[&of.id]));
        for thread in working {
            thread.cpu.map(|cpu| cpus.remove(&cpu));
        }
        cpus.is_empty()
    }

    /// Queues of which the driver is known, and the CPUs of their IOThreads, if vCPUs run there.
    fn homes(&mut self, view: &View<'_>) -> Vec<(QueueLoad, VcpuId, CpuId)> {
        let cpus = view.vcpus();
        let home = |(queue, vcpu): (&QueueId, &VcpuId)| {
            let queue = find(&view.period.queues, *queue, |of| of.id)?;
            let cpu = view.period.thread(queue.thread)?.cpu?;
            cpus.contains(&cpu).then_some((*queue, *vcpu, cpu))
        };
        self.drivers.find().iter().filter_map(home).collect()
    }
}
