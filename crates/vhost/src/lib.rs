//! The vhost-user protocol, the back end's side: what a front end (QEMU, Cloud Hypervisor, libblkio)
//! says over its socket, and the virtqueues that run because of it.
//!
//! What a device is, a disk for instance, is behind [`Backend`]; what serves its virtqueues is
//! behind [`session::QueueHost`]. So nothing here knows of disks, IOThreads or schedules.

pub mod backend;
pub mod protocol;
pub mod server;
pub mod session;

pub use backend::{Backend, Link};
