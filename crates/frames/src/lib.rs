//! Frames of virtio network devices, as bytes: nothing here has a file, a clock or a thread.
//!
//! All of it comes from a guest, which may write anything.
//!
//! - [`features`]: the virtio features of a network device, offered and declined
//! - [`header`]: `struct virtio_net_hdr`, as drivers write it and as they may be given it
//! - [`limit`]: a limit on a rate of frames and bits
//! - [`cost`]: what frames cost the IOThread that serves them
//! - [`promise`]: how long frames within a limit wait at most, and whether that can be kept
//! - [`ethernet`]: what a frame begins with
//! - [`forwarding`]: which ports of a switch a frame goes to
//! - [`offload`]: checksums and segments for a driver that cannot take what another one left to the device

pub mod cost;
pub mod ethernet;
pub mod features;
pub mod forwarding;
pub mod header;
pub mod limit;
pub mod offload;
pub mod promise;
