//! What can be changed while requests wait and run. They keep their place and their arrival; what
//! has begun ends as it began.
//!
//! A clock that stands ahead by an old rate is set to now, so that nobody waits for what does not
//! hold any more; one that a change leaves alone stays, so that no change gives a burst for nothing.
//! After a change the caller asks what to start, and looks at [`Scheduler::wake_at`] again.

use rtvirtio_units::Nanos;

use super::{ClassId, EXTRA_DEPTH, FlowId, Pace, Promised, Scheduler};
use crate::demand::Demand;
use crate::{Device, Promise, Share};

impl Scheduler {
    /// The device has turned out to be another, or its service curve to be wrong.
    pub fn set_device(&mut self, device: Device) {
        self.device = Device { channels: device.channels.max(1), ..device };
        self.depth.set_max(self.device.channels.saturating_add(EXTRA_DEPTH));
        // What a rate is of the device has changed with it; clocks stay.
        for class in self.classes.iter_mut().flatten() {
            class.promise = class.promise.map(|old| Promised::of(old.promise, &self.device));
        }
    }

    /// Gives a flow another weight or limit. False: there is no such flow.
    pub fn set_share(&mut self, flow: FlowId, share: Share, now: Nanos) -> bool {
        let Some(Some(of)) = self.flows.get_mut(flow.0 as usize) else { return false };
        of.weight = u64::from(share.weight.get());
        self.set_limit(flow, share.limit.map(Pace::of), now)
    }

    /// Frees a flow of its limit: what waits need not any longer. False: there is no such flow.
    pub fn lift_limit(&mut self, flow: FlowId, now: Nanos) -> bool {
        self.set_limit(flow, None, now)
    }

    fn set_limit(&mut self, flow: FlowId, limit: Option<Pace>, now: Nanos) -> bool {
        let now = now.get();
        let Some(Some(of)) = self.flows.get_mut(flow.0 as usize) else { return false };
        if limit != of.limit {
            of.limit = limit;
            of.clock = of.clock.min(now);
            of.clock_of_others = of.clock_of_others.min(now);
            // What the old limit kept from it is not made up for.
            of.start = of.start.max(self.virtual_time);
        }
        self.queue_flow(flow.0, now);
        true
    }

    /// Gives a class another promise, or none. False: there is no such class.
    pub fn set_promise(&mut self, class: ClassId, promise: Option<Promise>, now: Nanos) -> bool {
        let now = now.get();
        let Some(Some(of)) = self.classes.get_mut(class.0 as usize) else { return false };
        let promise = promise.map(|promise| Promised::of(promise, &self.device));
        if promise == of.promise {
            return true;
        }
        self.promises -= u32::from(of.promise.is_some());
        self.promises += u32::from(promise.is_some());
        of.promise = promise;
        of.clock = of.clock.min(now);
        of.demand = Demand::default();
        of.demand.begin(now);
        self.rank(class.0, now);
        true
    }
}
