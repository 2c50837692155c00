//! What is behind a virtio network device: the header of its frames, and TAP devices.
//!
//! - [`header`]: `struct virtio_net_hdr`, as drivers write it and as they may be given it
//! - [`features`]: the virtio features of a network device, offered and declined
//! - [`limit`]: a limit on a rate of frames and bits
//! - [`tap`]: TAP devices of the host

pub mod features;
pub mod header;
pub mod limit;
pub mod tap;
