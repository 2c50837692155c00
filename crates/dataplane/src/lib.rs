//! The data plane: vhost-user-blk and vhost-user-net devices whose virtqueues are served by a pool of
//! IOThreads that all devices share.

mod call;
mod clock;
pub mod control;
mod copy;
pub mod device;
mod drr;
mod fixed;
mod iothread;
mod key;
mod mailbox;
pub mod monitor;
pub mod nic;
pub mod plane;
mod pool;
mod queue;
mod request;
pub mod sandbox;
pub mod schedule;
mod socket;
pub mod stats;
mod switch;
mod tap;
mod thread_stats;
pub mod vcpus;

pub use call::{Call, CallError, Caller};
pub use fixed::FixedBuffers;
pub use iothread::{PinError, Polling, try_ring};
pub use key::QueueKey;
pub use pool::{MoveError, Pool, PoolError, ThreadId};
pub use queue::{Broken, Queue, QueueSetup, SlotsSetup};
pub use tap::{Tap, TapError, mtu as tap_mtu};
pub use thread_stats::IoThreadStats;
