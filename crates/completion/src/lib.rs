//! Waiting for completions: near polling while CPUs are idle, near interrupts while they are not.
//!
//! Problem. A thread that sleeps until its request has ended pays for a wake-up, which on a fast
//! device is longer than the request. One that spins pays with a CPU, and where there are more
//! threads than CPUs it delays the very threads that would make its request end.
//!
//! Approach. Spinning needs a token, and there are only as many as there are CPUs with nothing
//! else to do ([`Tokens`]); who has none parks at once. A token holder gives up when the wait gets
//! longer than such waits are, when parking would be about as good, and for a while when the
//! clock shows that something else ran in its place ([`Gate`], [`Spinner`]). What is waited on is
//! one cache line a request ([`Slot`]), so the completing side pays for a wake-up only where
//! somebody sleeps. Processes share slots with the one poller of their disk ([`slots`]), which they
//! tell by one word ([`Doorbell`]).
//!
//! # Terms
//! To *park* is to sleep in the kernel until woken. A *look* asks once whether a completion is
//! there. A *gap* is time that passed between two looks of a spinning thread and that looking does
//! not explain: it was not on its CPU. *Costs* are those of this machine, measured at start
//! ([`Costs::calibrate`]).
//!
//! # Properties (tests of the same name)
//! - [`Slot`], on every interleaving (loom, `make loom`): `no_wake_up_is_lost`,
//!   `result_is_seen_after_done`, `request_is_completed_once`, `late_completion_is_refused_after_reuse`.
//! - `dead_waiter_does_not_hold_up_the_completer`, `dead_completer_is_given_up` (tests/killed.rs).
//! - [`Doorbell`], likewise: `no_ring_is_missed`.
//! - [`Spinner`], on scripted times: `spins_only_with_a_token`, `gives_up_at_four_times_the_latency`,
//!   `does_not_spin_where_parking_is_as_good`, `gap_parks_at_once_and_holds_off`,
//!   `follows_a_change_of_load_within_50_ms`, `every_token_is_given_back`.
//! - [`Tokens`], on written files: `there_are_as_many_tokens_as_idle_cpus`,
//!   `tasks_of_other_cpus_do_not_count`, `quota_of_the_cgroup_bounds_tokens`.

mod adaptive_poll_time;
mod clock;
mod costs;
mod doorbell;
mod gate;
mod slot;
pub mod slots;
mod source;
mod spinner;
mod tokens;

pub use adaptive_poll_time::AdaptivePollTime;
pub use costs::Costs;
pub use doorbell::Doorbell;
pub use gate::{Entry, Gate};
pub use slot::{NotPending, Slot, Ticket, Wakes};
pub use spinner::{Mode, Spinner, SpinnerStats, UnknownMode};
pub use tokens::Tokens;
