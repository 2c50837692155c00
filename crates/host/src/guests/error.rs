//! Why a VM's own knobs cannot be reached, and what an operator can do about it.

use std::error::Error;

use rtvirtio_units::{DiskName, IoThreadName};

use crate::qemu::{Fault, QemuError};

/// Why a VM's own knobs cannot be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestFault {
    /// There is no such process.
    #[error("no QEMU of its name runs")]
    NotRunning,
    /// The name does not say which process it is.
    #[error("more than one QEMU has its name: processes {} and {}", pids[0], pids[1])]
    SameName {
        /// Two of them.
        pids: [u32; 2],
    },
    /// QEMU was started without a monitor that others can use.
    #[error("its QEMU (process {pid}) has no QMP socket")]
    NoMonitor {
        /// The process.
        pid: u32,
    },
    /// QEMU was started without a port for the guest's agent.
    #[error("its QEMU (process {pid}) has no port for a guest agent")]
    NoAgent {
        /// The process.
        pid: u32,
    },
    /// A monitor or an agent did not answer, or not as it should.
    #[error("{}", chain(.0))]
    Peer(Box<QemuError>),
    /// QEMU has no such disk, or none that could be told from others.
    #[error(
        "QEMU shows no disk with the id {disk} or ua-{disk} that has a serial number or a PCI address"
    )]
    UnknownDisk {
        /// The disk.
        disk: DiskName,
    },
    /// No disk in the guest is QEMU's, or several claim to be.
    #[error("{count} disks in the guest have the serial number or PCI address of disk {disk}")]
    NotOneNode {
        /// The disk.
        disk: DiskName,
        /// How many claim to be it.
        count: usize,
    },
    /// The guest says something that cannot be.
    #[error("the guest says {found:?}, which is not {expected}")]
    NotPlain {
        /// What it says, cut short.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// QEMU has no such IOThread.
    #[error("its QEMU has no IOThread {iothread}")]
    UnknownIoThread {
        /// The IOThread.
        iothread: IoThreadName,
    },
}

impl From<QemuError> for GuestFault {
    fn from(error: QemuError) -> Self {
        Self::Peer(Box::new(error))
    }
}

/// An error with its causes on one line.
fn chain(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

impl GuestFault {
    /// Whether the user did not want to wait for an answer.
    pub(crate) fn is_of_user(&self) -> bool {
        matches!(self, Self::Peer(error) if matches!(error.fault, Fault::Interrupted))
    }

    /// What an operator can do about it.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NotRunning => {
                "start the VM (`-name` must be its name in the specification), or make a new plan without it"
            }
            Self::SameName { .. } => "give each VM a name of its own",
            Self::NoMonitor { .. } => {
                "start it with -qmp unix:PATH,server=on,wait=off, or make a new plan"
            }
            Self::NoAgent { .. } => {
                "start it with a virtserialport named org.qemu.guest_agent.0, or leave guest_agent out"
            }
            Self::Peer(error) => return error.hint(),
            Self::UnknownDisk { .. } => {
                "the disk's name must be the id of its -device in QEMU, where libvirt puts `ua-` before it; give the device a serial"
            }
            Self::NotOneNode { .. } => "give each disk a serial of its own in QEMU",
            Self::NotPlain { .. } => "look at the guest: its agent does not tell the truth",
            Self::UnknownIoThread { .. } => "make a new plan: the VM was started anew",
        })
    }
}
