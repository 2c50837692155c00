//! Applying a saved plan to the VMs that run now.
//!
//! VMs that do not run are left out; at a boot, so are the own knobs of those that run
//! and cannot be reached, as while their guests boot: neither keeps the host and
//! the other VMs from their settings.
//!
//! Properties: `plan_applied_again_leaves_out_what_does_not_run_or_answer`,
//! `plan_is_applied_and_verified_without_vms_that_are_off`,
//! `plans_applied_again_at_the_same_time_lose_nothing`.

use std::collections::BTreeMap;

use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::settings::{Knob, diff};
use rtvirtio_units::VmName;

use crate::apply::LOCK_WAIT;
use crate::guests::Connected;
use crate::{Applied, ApplyOptions, Drift, GuestFault, Host, HostError, Topology};

/// What of a plan was not applied.
#[derive(Debug, Default)]
pub struct SkippedVms {
    /// VMs that do not run.
    pub absent: Vec<VmName>,
    /// VMs that run by now and did not when the plan was made.
    pub started: Vec<VmName>,
    /// VMs that run and whose own knobs cannot be reached, and why: those knobs alone.
    pub unreached: BTreeMap<VmName, GuestFault>,
}

impl Host {
    /// Applies the plan's changes but for those of VMs that do not run any more, or did not when it
    /// was made; all or none.
    ///
    /// # Errors
    /// As [`Host::apply`].
    pub fn apply_plan(
        &self,
        plan: &Plan,
        options: ApplyOptions,
    ) -> Result<(Applied, SkippedVms), HostError> {
        let (mut topology, absent) = self.running(&Topology::of_plan(plan))?;
        let was_off = |vm: &VmName| plan.observed.keys().all(|knob| knob.vm() != Some(vm));
        let started: Vec<VmName> = topology.vms.keys().filter(|vm| was_off(vm)).cloned().collect();
        for vm in &started {
            topology.vms.remove(vm);
            topology.uses.remove(vm);
            topology.guests.remove(vm);
        }
        let is_left_out =
            |knob: &Knob| knob.vm().is_some_and(|vm| absent.contains(vm) || started.contains(vm));
        let mut observed = plan.observed.clone();
        observed.retain(|knob, _| !is_left_out(knob));
        let mut changes = plan.changes.clone();
        changes.retain(|change| !is_left_out(&change.knob));
        let applied = self.apply(&topology, &observed, &changes, options)?;
        Ok((applied, SkippedVms { absent, started, unreached: BTreeMap::new() }))
    }

    /// What of the plan's settings does not hold, and the VMs that do not run, of which nothing is
    /// looked at.
    ///
    /// # Errors
    /// As [`Host::verify`].
    pub fn verify_plan(&self, plan: &Plan) -> Result<(Vec<Drift>, Vec<VmName>), HostError> {
        let (topology, absent) = self.running(&Topology::of_plan(plan))?;
        let mut wanted = plan.knobs();
        wanted.retain(|knob, _| knob.vm().is_none_or(|vm| !absent.contains(vm)));
        Ok((self.verify(&topology, &wanted)?, absent))
    }

    /// Applies the plan's settings to the knobs found now, whatever the plan saw, all or none but
    /// for what is left out.
    ///
    /// # Errors
    /// As [`Host::apply`]; a VM that is reached at first and no more after that is one.
    pub fn reapply(
        &self,
        plan: &Plan,
        options: ApplyOptions,
    ) -> Result<(Applied, SkippedVms), HostError> {
        // Held to the end: hooks of VMs that start together come at the same time, and each would
        // find the other at work, or its own changes to start from what the other has changed.
        let lock = self.state.lock_within("lock", LOCK_WAIT, self.interrupted.as_deref())?;
        // What a dead process left is not what the changes start from.
        let recovered = self.recover(&lock)?;
        let (mut topology, absent) = self.running(&Topology::of_plan(plan))?;
        let unreached = Connected::unreached(self, &topology.guests)?;
        topology.guests.retain(|vm, _| !unreached.contains_key(vm));
        let mut wanted = plan.knobs();
        wanted.retain(|knob, _| match (knob.vm(), knob.device()) {
            (Some(vm), Some(_)) => !absent.contains(vm),
            (Some(vm), None) => topology.guests.contains_key(vm),
            (None, _) => true,
        });
        let observed = self.observe(&topology)?;
        let changes = diff(&observed, &wanted);
        let applied = self.apply_locked(&lock, &topology, &observed, &changes, options)?;
        let applied = Applied { recovered, ..applied };
        Ok((applied, SkippedVms { absent, started: Vec::new(), unreached }))
    }
}
