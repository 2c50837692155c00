//! IOThreads and vCPUs on the same CPUs: who is in whose way.

use super::*;

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
}
