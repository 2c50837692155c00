//! Bodies of requests, and of their answers.

use rtvirtio_units::{Bytes, CpuId, IoThreadName, Name, Nanos};
use serde::{Deserialize, Serialize};

use crate::mapping::Entry;
use crate::serve::wire;

/// What a file descriptor sent along is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Handed {
    /// The image file or block device, open as the device needs it.
    Image,
    /// A listening unix socket.
    Socket,
    /// A queue of a network device's TAP, attached to it. Several are in the order of its pairs.
    Tap,
}

/// `POST /v1/devices`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AddDevice {
    /// The device, as in a configuration.
    pub device: wire::Device,
    /// What the descriptors that come with the request are for, in their order.
    #[serde(default)]
    pub fds: Vec<Handed>,
}

/// `POST /v1/nics`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AddNic {
    /// The network device, as in a configuration.
    pub nic: wire::Nic,
    /// What the descriptors that come with the request are for, in their order.
    #[serde(default)]
    pub fds: Vec<Handed>,
}

/// `POST /v1/networks`: a network, as in a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AddNetwork(pub wire::Network);

/// `PATCH /v1/devices/{device}`: looks at the size again, or changes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// The new size; none: what the file now has.
    #[serde(default)]
    pub size: Option<wire::Size>,
    /// Whether it may be smaller: what is cut off is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shrink: bool,
}

/// The answer to [`Resize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Resized {
    /// The size, bytes.
    pub capacity: Bytes,
}

/// `PUT /v1/schedules/{name}`: makes a schedule, or changes the service curve of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ScheduleCurve {
    /// Requests that the device serves at a time.
    pub channels: u32,
    /// What a read or write takes of a channel before its bytes, ns.
    pub request_ns: u64,
    /// What each KiB takes further, ns.
    pub kib_ns: u64,
    /// What a flush or discard takes, ns; as long as `request_ns` if nothing says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_ns: Option<u64>,
}

impl ScheduleCurve {
    /// As in a configuration.
    #[must_use]
    pub fn named(self, name: Name) -> wire::Schedule {
        let Self { channels, request_ns, kib_ns, flush_ns } = self;
        wire::Schedule { name, channels, request_ns, kib_ns, flush_ns }
    }
}

/// `PUT /v1/devices/{device}/qos`: joins a schedule, or changes what holds there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct SetQos(pub wire::Qos);

/// `PUT /v1/nics/{nic}/{direction}`: what holds for it from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct SetNicRate(pub wire::NicRate);

/// `POST /v1/iothreads`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct AddIoThread(pub wire::IoThread);

/// `PUT /v1/iothreads/{iothread}/cpus`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PinIoThread {
    /// The CPUs; none: any.
    pub cpus: Vec<CpuId>,
}

/// `PUT /v1/iothreads/{iothread}/lock`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// Whether policy leaves its queues alone.
    pub locked: bool,
}

/// A device's mapping: `PUT /v1/mapping/{device}`, and the answer to `GET`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SetMapping {
    /// QEMU's `iothread-vq-mapping`.
    pub mapping: Vec<Entry>,
}

/// `PUT /v1/mapping/{device}/{queue}`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveQueue {
    /// Where to.
    pub iothread: IoThreadName,
}

/// The answer to [`MoveQueue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Moved {
    /// How long nobody served the queue.
    pub pause_ns: Nanos,
}

/// The body of an answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ErrorBody {
    /// What is wrong.
    pub error: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}
