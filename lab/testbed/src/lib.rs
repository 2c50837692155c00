//! What experiments run on: disks, guests, servers, clients, and what is seen of a machine meanwhile. Nothing here judges.
//!
//! - [`scratch`]: a disk to try things on. [`curve`]: what its requests cost.
//! - [`guests`]: real virtual machines for a load. [`device`]: a device under test, whose VMs are cgroups or guests.
//! - [`server`], [`client`]: block servers as child processes, and libblkio in a VM's place.
//! - [`load`]: random requests at a fixed depth. [`tasks`], [`neighbour`]: tasks that are due at times of their own, and who
//!   shares the device with them; [`trial`]: one server with such VMs for one window.
//! - [`scenario`]: scenarios of the simulator, played for real.
//! - [`verify`]: a load whose content tells where and when it was written. [`resets`]: a front end that stops its rings.
//! - [`control`]: clients of the control API that ask for much. [`watcher`]: `rtvirtio watch`.
//! - [`readers`]: threads that read beside threads that compute.
//! - [`work_directory`]: directories of which nothing stays.
//! - [`window`], [`cpu`], [`wakes`], [`awake`], [`random`]: what threads of a measurement look at, who used which CPU, how late
//!   threads wake, CPUs that do not halt, numbers.

// First: its macro is used by the others.
#[macro_use]
mod named;

pub mod awake;
pub mod client;
pub mod control;
pub mod cpu;
pub mod curve;
pub mod device;
pub mod guests;
pub mod load;
pub mod neighbour;
pub mod random;
pub mod readers;
pub mod resets;
pub mod scenario;
pub mod scratch;
pub mod server;
pub mod tasks;
pub mod trial;
pub mod verify;
pub mod wakes;
pub mod watcher;
pub mod window;
pub mod work_directory;
