//! Applying a saved plan to what runs now, as at a boot.
//!
//! VMs that do not run are left out, and so are the own knobs of those that run
//! and cannot be reached, as while their guests boot: neither keeps the host and
//! the other VMs from their settings.
//!
//! Properties: `plan_applied_again_leaves_out_what_does_not_run_or_answer`.

use std::collections::BTreeMap;

use rtvirtio_spec::plan::Plan;
use rtvirtio_spec::settings::diff;
use rtvirtio_units::VmName;

use crate::guests::Connected;
use crate::{Applied, ApplyOptions, GuestFault, Host, HostError, Topology};

/// What of a plan was not applied.
#[derive(Debug, Default)]
pub struct SkippedVms {
    /// VMs that do not run.
    pub absent: Vec<VmName>,
    /// VMs that run and whose own knobs cannot be reached, and why: those knobs alone.
    pub unreached: BTreeMap<VmName, GuestFault>,
}

impl Host {
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
        // What a dead process left is not what the changes start from.
        let recovered = self.recover(&self.state.lock()?)?;
        let (mut topology, absent) = self.running(&Topology::of_plan(plan))?;
        let unreached = Connected::unreached(&*self.sysfs, &topology.guests)?;
        topology.guests.retain(|vm, _| !unreached.contains_key(vm));
        let mut wanted = plan.knobs();
        wanted.retain(|knob, _| match (knob.vm(), knob.device()) {
            (Some(vm), Some(_)) => !absent.contains(vm),
            (Some(vm), None) => topology.guests.contains_key(vm),
            (None, _) => true,
        });
        let observed = self.observe(&topology)?;
        let changes = diff(&observed, &wanted);
        let mut applied = self.apply(&topology, &observed, &changes, options)?;
        applied.recovered = recovered.or(applied.recovered);
        Ok((applied, SkippedVms { absent, unreached }))
    }
}
