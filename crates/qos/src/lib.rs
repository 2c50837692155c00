//! The data plane's request scheduler: which request of which VM a shared device gets next.
//!
//! # Terms
//! A *flow* is a VM's disk on the device; it has a weight and may have a limit. Its requests belong
//! to *classes*, the tasks that can be told apart; a class may have a *promise*: a rate, with a
//! burst, whose requests have a *deadline* after they arrive. A request within its class's rate is
//! *promised*; all others are *background*, those of a class that exceeds its rate as well.
//! *Cost* is what a request takes of one of the device's *channels*, the requests that it serves at
//! a time, in ns; it follows from the [`Device`]'s service curve.
//!
//! # Algorithm
//! mClock's tags (Gulati et al., OSDI 2010) with deadlines in the place of its first:
//!
//! 1. *Promised.* A class has a virtual clock that each promised request moves on by its cost over
//!    that of the rate ([`Rate::channels`]), so that larger requests than were declared use the
//!    promise up sooner; a pause sets it to no more than a burst behind. A head request at or behind the clock is eligible, and the eligible one with the
//!    earliest deadline is first (earliest eligible deadline first).
//! 2. *Background.* Else the flow that has had least cost for its weight (start-time fair queueing),
//!    among those within their limits. Requests of a promise that are served here do not move its
//!    clock. A limit counts promised requests too, and does not hold them: where these leave others of
//!    the flow less than a request a second, they have one.
//!
//! Promised requests may fill the device twice over, so that it does not pause between them.
//! Background requests wait while all channels are taken and one request more is on the device (an
//! end takes a while to be noticed), and may be no more there than a bound that falls while promises
//! are missed, and rises while they are kept. A promise is missed if responses are late, or if a class
//! does not come to its rate and would if its requests were served sooner; whether it would is found
//! out by experiment (`demand`). Where promises need nearly all of the device,
//! even one at a time would take a channel from them for long: then there is a time between two that
//! grows and halves, up to 50 ms. So an eligible request that finds the
//! device full of background waits for the first of as many channels, and for no request longer than
//! [`MAX_TRANSFER`], in which large ones are to be split.
//!
//! # Properties (tests of the same name)
//! - `work_is_conserved_and_requests_too`: while a channel is free, nothing waits but what a limit or
//!   the bound holds; each request is started once, whatever the order of calls.
//! - `reservation_is_kept`: whatever the others ask for, each class gets the rate that it was
//!   promised, if all promises together fit the device.
//! - `deadlines_are_met_within_a_feasible_set`: to within one service time of each channel.
//! - `nobody_starves`: a flow with a weight is served even if promises exceed the device.
//! - `wait_is_bounded`: a promised request starts at once, or after one transfer, if all others are
//!   background; the device then has no more than one of those before it.
//! - `tasks_keep_rate_and_tail_beside_a_deep_writer_that_gets_what_they_leave`: on the reference
//!   device.
//! - `closed_loops_have_their_rate_whatever_time_guests_take_between_two_requests`, and
//!   `classes_that_ask_for_less_than_their_rate_cost_the_writer_little`.
//! - `weights_divide_what_is_left`, `limit_is_not_exceeded`,
//!   `excess_of_a_promise_costs_only_its_own`,
//!   `excess_of_a_class_costs_neither_its_flows_other_class_nor_other_flows`,
//!   `excess_of_a_marked_task_does_not_starve_what_is_unmarked`,
//!   `promise_beyond_the_limit_delays_the_rest_of_its_flow_for_a_bounded_time`,
//!   `limited_flow_has_not_waited_before_its_time_comes`, `slow_limit_is_kept_beside_a_promise`,
//!   `what_a_limit_kept_from_a_flow_is_not_made_up_for`.
//! - `changed_promise_weight_and_limit_hold_from_then_on`: for what waits, too.
//!
//! Which promises fit a device: [`admission`].
//!
//! Pure: the caller passes the time, ns of a clock that does not go back.

pub mod admission;
mod demand;
mod depth;
mod experiment;
mod heap;
mod scheduler;

#[cfg(test)]
mod tests;

use rtvirtio_units::{Bytes, BytesPerSecond, Iops, Nanos, Weight};

pub use scheduler::{ClassId, FlowId, Running, Scheduler, Started};

/// The largest transfer that should be started at once: larger ones are split, so that none holds a
/// channel long.
pub const MAX_TRANSFER: Bytes = Bytes::new(128 << 10);

/// What a request does to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Makes writes durable.
    Flush,
    /// Discards, or zeroes a range: no bytes are transferred.
    Discard,
}

impl Kind {
    /// All, in the order of the accounts.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Discard];
}

/// A device as the scheduler sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Requests that it serves at a time, at least 1.
    pub channels: u32,
    /// What a request takes of a channel before its bytes.
    pub request: Nanos,
    /// What each KiB takes further.
    pub kib: Nanos,
    /// What a flush or discard takes.
    pub flush: Nanos,
}

impl Device {
    /// What a request takes of a channel.
    #[must_use]
    pub fn cost(&self, kind: Kind, bytes: Bytes) -> Nanos {
        match kind {
            Kind::Read | Kind::Write => {
                let transfer = u128::from(bytes.get()) * u128::from(self.kib.get()) / 1024;
                self.request.saturating_add(Nanos::new(transfer as u64))
            }
            Kind::Flush | Kind::Discard => self.flush,
        }
    }
}

/// So many requests and bytes a second; at least one of both is given, and neither is zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Requests a second.
    pub iops: Option<Iops>,
    /// Bytes a second.
    pub bandwidth: Option<BytesPerSecond>,
    /// Requests (or [`MAX_TRANSFER`]s) that may come at once, at least 1.
    pub burst: u32,
}

impl Rate {
    /// What a second of it takes of the device, as channels: requests of `bandwidth / iops` bytes, of
    /// 4 KiB if there is no bandwidth, of [`MAX_TRANSFER`] if there are no iops.
    #[must_use]
    pub fn channels(&self, device: &Device) -> f64 {
        let iops = self.iops.map(Iops::get);
        let kib = self.bandwidth.map(|rate| rate.get() as f64 / 1024.0);
        let cost = |bytes| device.cost(Kind::Read, bytes).as_secs_f64();
        match (iops, kib) {
            (Some(iops), None) => iops * cost(PAGE),
            (None, Some(kib)) => kib * 1024.0 / MAX_TRANSFER.get() as f64 * cost(MAX_TRANSFER),
            (iops, kib) => {
                iops.unwrap_or(0.0) * device.request.as_secs_f64()
                    + kib.unwrap_or(0.0) * device.kib.as_secs_f64()
            }
        }
    }
}

/// What a request moves if a rate says nothing of bytes.
const PAGE: Bytes = Bytes::new(4096);

/// What a class is promised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promise {
    /// How long after its arrival a request within the rate should have ended.
    pub deadline: Nanos,
    /// Within this.
    pub rate: Rate,
}

/// A flow's part of what promises leave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// In proportion to this.
    pub weight: Weight,
    /// But no more than this, promised requests among it.
    pub limit: Option<Rate>,
}

/// What a class has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Account {
    /// Requests that have ended.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What they cost by the service curve, ns of a channel.
    pub cost: u64,
}

/// What a device did, and how long it took. Less `alone` times what a response takes beyond its
/// service, `used` is `cost` if the device is as fast as its service curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Time that channels had a request, summed over channels, ns.
    pub used: u64,
    /// What the requests that have ended cost by the service curve, ns of a channel.
    pub cost: u64,
    /// Requests that have ended.
    pub requests: u64,
    /// Of these, flushes and discards, of which a service curve says little.
    pub flushes: u64,
    /// Those that ended while none waited for a channel, so that nobody used the rest of their
    /// response.
    pub alone: u64,
}

/// Whether a class that has less than its promised rate would take more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Demand {
    /// Nobody knows: it has its rate, or asks for hardly anything.
    #[default]
    Unknown,
    /// It is being tried.
    Tried,
    /// It would, and background gives way to it.
    More,
    /// It would not.
    NoMore,
}

/// How a promise was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Responses {
    /// Promised requests that ended within the deadline.
    pub in_time: u64,
    /// Those that did not.
    pub late: u64,
    /// Of these, those that would have, had the device not stalled meanwhile.
    pub late_in_stalls: u64,
}

/// A time in which a device, or the host of those who look after it, ended nothing of what it had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// When it began, on the caller's clock.
    pub begin: Nanos,
    /// How long it took: 50 ms at least, and ten times the service of the request that ended it.
    pub length: Nanos,
    /// Requests that were on the device.
    pub in_flight: u32,
}

/// The stalls of a device so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stalls {
    /// How many.
    pub count: u64,
    /// How long all of them were, ns.
    pub time: u64,
    /// How long the longest was, ns.
    pub longest: u64,
    /// The last.
    pub last: Option<Stall>,
}
