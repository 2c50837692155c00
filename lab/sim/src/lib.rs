//! A simulator of hosts: VMs, their virtqueues, IOThreads, CPUs, disks, and the policies that ship.
//!
//! It answers what no test machine can: what a policy of [`rtvirtio_iocores`] does with 64 CPUs and 256
//! VMs. What runs in it is the policy itself (and, on emulated SSDs, the scheduler of `rtvirtio_qos`), not
//! a copy.
//!
//! Terms. A *scenario* says what VMs do ([`scenario`]), a *machine* where ([`Machine`]), *costs* how much
//! CPU time it takes ([`Costs`]; [`calibration`]: of a real machine). A *burst* is CPU time that a thread needs before others see what it did.
//!
//! Model. IOThreads loop as the data plane's do: batches, shares, adaptive polling, sleep, messages
//! (`world::iothread`). Each queue has a client that sleeps until it is called (`world::client`). Both, and
//! threads that compute, share CPUs by Linux's rules (`cpus`). Every 10 ms the policy is shown a snapshot, in
//! which a VM without its front end has no vCPUs, as for the data plane's monitor; what it
//! decides is done with the pauses that it has: a queue that moves is served by nobody until the other
//! IOThread reads its message.
//!
//! A queue of a network device on a TAP is one whose frames end when the IOThread has done its part. Those to a VM come by
//! themselves, the next ones when the VM has taken others, or at a rate; their sender is no part of the host.
//!
//! Left out, beside what `cpus` names: switches between VMs, frames that are dropped, caches and memory bandwidth (a request costs the same on every CPU and
//! after every move), the CPU time of the policy and its samples, interrupts of devices, the guest's own
//! kernel, that a thread takes time to be made, and that a wake-up costs less on the CPU of who wakes. A
//! completion that ends while its queue moves is seen by the new IOThread without a message of its own.
//!
//! Pure: time and seed are the caller's. Properties (tests of the same name):
//! `same_seed_same_outcome`, `each_request_ends_once_or_is_in_flight`,
//! `queue_at_a_fixed_rate_waits_as_m_d_1_says`, `one_iothread_ends_at_one_over_its_cost`,
//! `iothreads_that_share_a_cpu_have_half_of_it_each`, `moves_lose_nothing`,
//! `no_queue_waits_longer_than_the_shares_of_the_others`, `nothing_is_used_more_than_there_is`,
//! `frames_of_both_directions_take_what_they_cost`.

pub mod calibration;
mod costs;
mod cpus;
mod events;
mod machine;
mod meter;
mod outcome;
pub mod path;
pub mod scenario;
mod settled;
mod world;

pub use costs::{Costs, Interrupt};
pub use machine::{Backend, MAX_CPUS, Machine, SimError};
pub use outcome::{Outcome, PhaseOutcome, Point};
pub use settled::{Settled, settled};
pub use world::{Counts, Done, Simulation};
