//! Schedules: what a physical device is taken for, who shares it, and what of their promises was kept.

use rtvirtio_units::{Bytes, Name, Nanos};
use serde::{Deserialize, Serialize};

use crate::latency::upper_limit;
use crate::serve::{IoPriority, wire};

/// The schedule of a physical device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ScheduleState {
    /// Its name.
    pub name: Name,
    /// Requests that the device serves at a time.
    pub channels: u32,
    /// What a read or write takes of a channel before its bytes.
    pub request_ns: Nanos,
    /// What each KiB takes further.
    pub kib_ns: Nanos,
    /// What a flush or discard takes.
    pub flush_ns: Nanos,
    /// Requests that wait for their time.
    pub waiting: u64,
    /// Requests on the device.
    pub running: u32,
    /// Of those, requests that nothing promises.
    pub background: u32,
    /// How many of these may be there while promises are to be kept: fewer, the harder that is.
    pub background_bound: u32,
    /// How long these were withheld so far, to find out whether promised rates are wanted.
    #[serde(default)]
    pub withheld_ns: Nanos,
    /// What the device did since the schedule began, and how long it took.
    #[serde(default)]
    pub usage: DeviceUsage,
    /// Times in which it ended nothing of what it had.
    #[serde(default)]
    pub stalls: StallsState,
}

/// Times of 50 ms and more in which a device, or the host, ended nothing of what the device had: none of it is the
/// schedule's doing. A device whose requests take longer than 5 ms stalls from ten times that on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StallsState {
    /// How many there were.
    pub count: u64,
    /// How long all of them were.
    pub time_ns: Nanos,
    /// How long the longest was.
    pub longest_ns: Nanos,
    /// The last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<StallState>,
    /// How long nothing has ended by now; none: the device works, or has nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ongoing_ns: Option<Nanos>,
}

/// A stall.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StallState {
    /// When it began, since 1970, UTC.
    pub begin_ns: Nanos,
    /// How long it took.
    pub length_ns: Nanos,
    /// Requests that were on the device.
    pub in_flight: u32,
}

/// What a physical device did, and how long it took: both grow alike while it is as fast as its
/// service curve.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceUsage {
    /// Time that channels had a request, summed over channels.
    pub used_ns: Nanos,
    /// What the requests that have ended took of a channel, by the service curve.
    pub cost_ns: Nanos,
    /// Requests that have ended; a transfer of more than 128 KiB counts as several.
    pub requests: u64,
    /// Of these, flushes and discards.
    pub flushes: u64,
    /// Those that ended while none waited for a channel: their channel was held for all of their
    /// response, not for the service alone.
    pub alone: u64,
}

/// A device's part of the physical device, and what came of it since it got that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QosState {
    /// What is in force.
    pub settings: wire::Qos,
    /// Whether what no task of it asks for would be more if requests were served sooner.
    #[serde(default)]
    pub demand: Demand,
    /// What it has had, its tasks' requests among it.
    #[serde(flatten)]
    pub had: Had,
    /// What its tasks have had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskState>,
}

/// What the requests that a guest marks with a priority have had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TaskState {
    /// The priority.
    pub ioprio: IoPriority,
    /// Whether the task would ask for more if its requests were served sooner.
    #[serde(default)]
    pub demand: Demand,
    /// What they have had.
    #[serde(flatten)]
    pub had: Had,
}

/// Whether who has less than the promised rate would ask for more if requests were served sooner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Demand {
    /// Nobody knows: the rate comes about, or hardly anything is asked for.
    #[default]
    Unknown,
    /// Requests that nothing promises are withheld now and then to find out.
    Tried,
    /// It would: requests that nothing promises give way.
    More,
    /// It would not.
    NoMore,
}

/// What requests have had of a physical device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Had {
    /// Reads.
    pub reads: Consumption,
    /// Writes.
    pub writes: Consumption,
    /// Flushes.
    pub flushes: Consumption,
    /// Discards, and ranges that were zeroed.
    pub discards: Consumption,
    /// Requests within the promised rate that ended before the deadline.
    pub kept: u64,
    /// Those that did not.
    pub late: u64,
    /// Of these, those that would have, had the device not stalled meanwhile.
    #[serde(default)]
    pub late_in_stalls: u64,
}

impl Had {
    /// The share of requests within the promised rate that ended before the deadline, at least: at 95 %
    /// confidence, if each may be late by itself. `None`: there were none.
    #[must_use]
    pub fn kept_at_least(&self) -> Option<f64> {
        kept_at_least(self.kept, self.late)
    }

    /// How promises were kept, in short. `None`: nothing was promised, or asked for.
    #[must_use]
    pub fn promises(&self) -> Option<Promises> {
        let kept_at_least = self.kept_at_least()?;
        let (late, late_in_stalls) = (self.late, self.late_in_stalls);
        Some(Promises { promised: self.kept + late, late, late_in_stalls, kept_at_least })
    }
}

/// The share of promises that were kept, at least, at 95 % confidence; `None`: there were none.
pub(super) fn kept_at_least(kept: u64, late: u64) -> Option<f64> {
    let promised = (kept + late) as f64;
    (promised > 0.0).then(|| (1.0 - upper_limit(late) / promised).max(0.0))
}

/// How the requests within a promised rate ended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Promises {
    /// How many there were.
    pub promised: u64,
    /// Those that ended after the deadline.
    pub late: u64,
    /// Of these, those that a stall of the device alone made late.
    pub late_in_stalls: u64,
    /// [`Had::kept_at_least`].
    pub kept_at_least: f64,
}

impl std::fmt::Display for Promises {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { promised, late, late_in_stalls, kept_at_least } = self;
        write!(f, "{late} of {promised} promised requests late")?;
        if *late_in_stalls > 0 {
            write!(f, " ({late_in_stalls} by stalls)")?;
        }
        write!(f, ", ≥ {:.3} % kept", 100.0 * kept_at_least)
    }
}

/// What requests of a kind have had. A transfer of more than 128 KiB counts as several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Consumption {
    /// Requests that have ended.
    pub requests: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// What they took of a channel, by the schedule's service curve.
    pub cost_ns: Nanos,
}
