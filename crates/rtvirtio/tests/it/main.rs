//! Integration tests of the workspace and its binary.

mod cli;
mod guest;
mod guest_knobs;
mod lifecycle;
mod readme;
mod rooms;
mod scratch_disk;
