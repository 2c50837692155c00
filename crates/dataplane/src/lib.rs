//! The data plane: vhost-user-blk devices whose virtqueues are served by a pool of IOThreads that
//! all devices share.

mod call;
pub mod control;
pub mod device;
mod fixed;
mod iothread;
mod mailbox;
pub mod memory;
pub mod monitor;
pub mod plane;
mod pool;
pub mod protocol;
mod queue;
mod request;
pub mod ring;
pub mod sandbox;
pub mod schedule;
pub mod server;
pub mod session;
pub mod stats;
pub mod vcpus;

pub use call::{Call, CallError, Caller};
pub use fixed::FixedBuffers;
pub use iothread::{IoThreadStats, Polling};
pub use pool::{MoveError, Pool, PoolError, ThreadId};
pub use queue::{Broken, Queue, QueueKey, QueueSetup, SlotsSetup};
