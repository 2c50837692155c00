//! The data plane: vhost-user-blk devices whose virtqueues are served by a pool of IOThreads that
//! all devices share.

pub mod control;
pub mod memory;
pub mod plane;
pub mod ring;
pub mod stats;
