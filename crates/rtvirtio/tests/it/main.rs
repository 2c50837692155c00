//! Integration tests of the workspace and its binary.

mod readme;
mod rooms;
