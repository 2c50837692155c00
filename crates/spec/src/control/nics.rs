//! Network devices: what is served, what has passed and what was dropped.

use std::path::PathBuf;

use rtvirtio_units::{Bytes, IoThreadName, Name, Nanos, VmName};
use serde::{Deserialize, Serialize};

use super::{LatencySummary, kept_at_least};

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NicState {
    /// Its name.
    pub name: Name,
    /// Its VM.
    pub vm: VmName,
    /// Its socket's path.
    pub socket: PathBuf,
    /// Whether a front end is connected.
    pub connected: bool,
    /// What its frames go to: a TAP such as `tap0`, the path of a socket, or a network of the data plane's own, such as `lan vlan 10`.
    pub link: String,
    /// Its address, such as `52:54:00:12:34:56`.
    pub mac: String,
    /// The longest packet, bytes.
    pub mtu: u16,
    /// Its queues, from queue 0.
    pub queues: Vec<NicQueueState>,
}

/// Which way frames go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum QueueDirection {
    /// To the guest.
    Receive,
    /// From the guest.
    Transmit,
}

impl QueueDirection {
    /// As a configuration and the control API's paths name it.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Self::Receive => "rx",
            Self::Transmit => "tx",
        }
    }
}

/// A virtqueue of a network device. Counters are since the device's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NicQueueState {
    /// Which.
    pub index: u16,
    /// Its number, which no other queue ever has.
    #[serde(default)]
    pub id: u32,
    /// Which way its frames go.
    pub direction: QueueDirection,
    /// Its IOThread.
    pub iothread: IoThreadName,
    /// Frames that were handed on.
    pub frames: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Frames that were not.
    pub dropped: u64,
    /// The same by their reasons.
    #[serde(default)]
    pub drops: DropCounts,
    /// Frames within the rate of a promise that were handed on within its time, and later; none: nothing is promised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<PromisedFrames>,
    /// Kicks by the driver.
    pub kicks: u64,
    /// Calls of the driver.
    pub calls: u64,
    /// What of its IOThread's time was for it.
    pub busy_ns: Nanos,
    /// From when its IOThread found that there were frames to the turn that took them.
    #[serde(default)]
    pub wait: LatencySummary,
    /// From there to when they had been handed on; where another device of a network receives them, until that has them.
    #[serde(default)]
    pub service: LatencySummary,
}

/// How what is promised to a virtqueue of a network device was kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PromisedFrames {
    /// How long a frame was to wait for its IOThread at most.
    pub within_ns: Nanos,
    /// Frames that did not wait longer.
    pub kept: u64,
    /// Frames that may have: of frames that were handed on together all count as the first.
    pub late: u64,
}

impl PromisedFrames {
    /// The share that was kept, at least, at 95 % confidence. `None`: there was no promised frame.
    #[must_use]
    pub fn kept_at_least(&self) -> Option<f64> {
        kept_at_least(self.kept, self.late)
    }
}

/// As a table shows it: `3 of 20000 over 300 µs, ≥ 99.961 % kept`.
impl std::fmt::Display for PromisedFrames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { within_ns, kept, late } = self;
        write!(f, "{late} of {} over {} µs", kept + late, within_ns.get() / 1_000)?;
        match self.kept_at_least() {
            Some(kept) => write!(f, ", ≥ {:.3} % kept", 100.0 * kept),
            None => Ok(()),
        }
    }
}

/// Why frames were not handed on. Each was counted where that was found: at the sender's transmit queue, or at
/// the receiver's receive queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DropCounts {
    /// It was no frame, or its header asked for what was not negotiated or cannot be.
    pub malformed: u64,
    /// Its sender's address was another's.
    pub spoofed: u64,
    /// It was of a VLAN that its port is not in.
    pub vlan: u64,
    /// Its sender had sent too many to all.
    pub broadcast: u64,
    /// Nobody had its address.
    pub no_receiver: u64,
    /// Its receiver's driver had no buffers, or too few for it for too long, or no queue that was served.
    pub no_buffers: u64,
    /// Its receiver's buffers, or its MTU, were too small for it.
    pub too_long: u64,
    /// Its receiver's limit on a rate let it wait for too long.
    pub limit: u64,
    /// The host's TAP, or the peer of its socket, did not take it.
    pub link: u64,
}

impl DropCounts {
    /// By name.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u64); 9] {
        [
            ("malformed", self.malformed),
            ("spoofed", self.spoofed),
            ("vlan", self.vlan),
            ("broadcast", self.broadcast),
            ("no_receiver", self.no_receiver),
            ("no_buffers", self.no_buffers),
            ("too_long", self.too_long),
            ("limit", self.limit),
            ("link", self.link),
        ]
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promised_frames_are_told_with_what_was_kept_at_least() {
        let mut promised =
            PromisedFrames { within_ns: Nanos::from_micros(300), kept: 19_997, late: 3 };
        // 7.75 of 20,000 may be late (Poisson).
        assert_eq!(promised.to_string(), "3 of 20000 over 300 µs, ≥ 99.961 % kept");
        (promised.kept, promised.late) = (0, 0);
        assert_eq!(promised.to_string(), "0 of 0 over 300 µs");
        assert_eq!(promised.kept_at_least(), None);
    }
}
