//! The `rtvirtio-tree` binary: IOcm's sysfs tree of a data plane, as a FUSE file system.
//!
//! A script or monitor that was written for IOcm looks at IOThreads ("workers"), devices and virtqueues
//! as files and moves a device by writing to one. Here the files are made of the control API's
//! snapshot, and a write is one request to it: the data plane knows nothing of the tree, which is a
//! client like `ctl`. docs/tree.md has all files and how they differ from IOcm's.
//!
//! - [`files`]: directories and files, and what is in each. - [`view`]: a snapshot, and the tree's
//!   numbers in it. - [`change`]: what a write asks for. - [`mount`]: all that as a file system.
//! - [`server`]: the process that answers the kernel. - [`keeper`]: its parent.
//!
//! Two processes, so that whichever is killed, the other one takes the mount away; a mount without its
//! server gives ENOTCONN to everybody who comes across it, until somebody unmounts it. The server sees
//! the end of its parent by a pipe, the parent that of the server, and the server that of the data plane
//! by the event stream, which it reads all the time.
//!
//! What others may cost: a read costs the data plane at most one snapshot in 100 ms ([`view::FRESH`]), or
//! in 10 ms ([`view::FRESH_WHOLE`]) if it is of all of it, and a fifth of its control thread's time; what
//! open files refer to is bounded ([`view::MAX_HELD`]), and an older one gives ESTALE.
//!
//! Properties (tests of the same name): `numbers_stay_and_are_not_used_again`,
//! `snapshot_is_shared_while_it_is_fresh`, `snapshot_that_takes_long_is_taken_less_often`,
//! `views_that_are_held_are_bounded`, `wrong_text_is_refused_with_its_errno`,
//! `device_whose_move_is_refused_is_moved_later`, and with a mount, in crates/rtvirtio/tests/it/tree.rs:
//! `read_only_user_can_look_and_not_write`, `mount_goes_with_each_of_its_processes`,
//! `wrong_writes_change_nothing`.

mod arguments;
mod change;
mod files;
mod keeper;
mod mount;
mod server;
mod view;

use std::process::ExitCode;

fn main() -> ExitCode {
    rtvirtio_cli::main::<arguments::Args>()
}
