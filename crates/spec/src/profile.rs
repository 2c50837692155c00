//! A device's profile: who it is, what was measured of it, and the models
//! fitted to that.

use rtvirtio_units::Bytes;
use serde::{Deserialize, Serialize};

/// The profile format that this version writes and reads.
pub const PROFILE_VERSION: u32 = 1;

/// What identifies a device across boots. Two devices with equal identity
/// share a profile; a profile is refused for any other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceIdentity {
    /// Kernel driver family: `loop`, `nvme`, `sd`, `vd`, …
    pub kind: String,
    /// Model, or the backing file's name for a loop device.
    pub model: String,
    /// Serial number or WWID, if it has one; a loop device has none.
    pub serial: Option<String>,
    /// Size.
    pub size: Bytes,
    /// Whether the kernel takes it for a rotational disk.
    pub rotational: bool,
}
