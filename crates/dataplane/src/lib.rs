//! The data plane: vhost-user-blk devices whose virtqueues are served by a pool of IOThreads that
//! all devices share.

pub mod device;
pub mod memory;
pub mod protocol;
pub mod ring;
pub mod server;
pub mod session;
