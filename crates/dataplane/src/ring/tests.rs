//! Tests of the rings.
