//! ssd.
