//! What came of putting a host back.

use std::fmt;
use std::path::PathBuf;

use rtvirtio_spec::settings::Knob;
use rtvirtio_units::{DeviceName, VmName};
use serde::Serialize;

use crate::sysfs::DeviceNumber;

/// Files beside `iosched/` that a change of scheduler resets.
pub(crate) const QUEUE_FILES: [&str; 2] = ["nr_requests", "wbt_lat_usec"];

/// What was not restored because it is not there any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "skipped", rename_all = "snake_case")]
pub enum Skipped {
    /// A device is gone, or another one has its number.
    Device {
        /// Its name when it was changed.
        device: DeviceName,
        /// Its `MAJOR:MINOR`.
        number: DeviceNumber,
    },
    /// A cgroup is gone, another one has its path, or the io controller was turned off for it.
    Cgroup {
        /// Its path below the io controller's mount.
        cgroup: PathBuf,
    },
    /// A VM's QEMU is gone.
    Vm {
        /// The VM.
        vm: VmName,
    },
    /// A VM's guest was booted again.
    Guest {
        /// The VM.
        vm: VmName,
    },
    /// A data plane is gone, or was started again.
    DataPlane {
        /// Its control socket.
        control: PathBuf,
    },
    /// A disk of the data plane is gone, or others use the schedule by now.
    DataPlaneKnob {
        /// What is as it was.
        knob: Knob,
    },
    /// A guest's disk is gone, or another one has its name.
    GuestDisk {
        /// The VM.
        vm: VmName,
        /// The disk's name within the guest.
        node: String,
    },
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { device, number } => write!(f, "device {device} ({number})"),
            Self::Cgroup { cgroup } => write!(f, "cgroup {}", cgroup.display()),
            Self::Vm { vm } => write!(f, "the QEMU of VM {vm}"),
            Self::Guest { vm } => write!(f, "the guest of VM {vm}, which was booted again"),
            Self::DataPlane { control } => {
                write!(f, "the data plane at {}, or as it was then", control.display())
            }
            Self::DataPlaneKnob { knob } => write!(f, "{knob}"),
            Self::GuestDisk { vm, node } => write!(f, "disk {node} in the guest of VM {vm}"),
        }
    }
}

/// What a restoration did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Restoration {
    /// Each file that was written, with the text; a VM's own as a place (`plc:/sys/…`).
    pub restored: Vec<(PathBuf, String)>,
    /// What is not there any more.
    pub skipped: Vec<Skipped>,
    /// What could not be restored, and why; empty unless within an error.
    pub failures: Vec<String>,
}

impl Restoration {
    pub(crate) fn skip(&mut self, skipped: Skipped) {
        if !self.skipped.contains(&skipped) {
            self.skipped.push(skipped);
        }
    }
}
