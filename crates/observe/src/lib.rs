//! Which VMs run on a host, what their disks are made of, and what these do, without a word of
//! configuration.
//!
//! - [`vms`]: QEMU processes and libvirt domains with their cgroups, and their disks by every name
//!   that an operator may use;
//! - [`counters`]: a disk's rates and latencies where QEMU serves the guest's requests;
//! - [`host_disks`]: what the disks below do, and which threads of a VM wait for a CPU;
//! - [`host_latency`]: what of a disk's latency is the host's block layer and the device;
//! - [`session`]: all of it, again and again, while VMs come and go;
//! - [`diagnosis`]: in words where a disk's time goes.

#![deny(unsafe_code)]

pub mod counters;
pub mod diagnosis;
pub mod host_disks;
pub mod host_latency;
pub mod session;
pub mod vms;
