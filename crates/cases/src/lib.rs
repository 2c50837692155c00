//! cases.
