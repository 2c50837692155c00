//! The data plane under real front ends: QEMU, User Mode Linux, libvirt.
//!
//! A test is written over a [`server::Server`]: `rtvirtio serve`, or with
//! `RTVIRTIO_TEST_SERVER=qsd` qemu-storage-daemon, which shows that a failure is not the
//! harness's; a path names another build of `rtvirtio`. Guests run under TCG, so none of this needs KVM; libvirt needs root.
//!
//! How often something is repeated is in [`counts::Counts`]: few times in `cargo test`, as often
//! as a release asks with `RTVIRTIO_ENDURANCE=FILE` (`make bench EXPERIMENT=dataplane-endurance`), and then
//! each test adds what it did to FILE.

mod control;
mod counts;
mod crash;
mod device;
mod footprint;
pub(crate) mod front_end;
mod hostile;
mod hung;
mod io_cores;
mod ioprio;
mod isolation;
mod libvirt;
mod log;
mod migration;
mod neighbours;
mod qemu;
mod qmp;
mod rings;
mod sandbox;
mod schedule;
pub(crate) mod server;
mod slow;
mod uml;
mod verify;
mod vm;
