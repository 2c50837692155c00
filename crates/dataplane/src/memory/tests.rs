//! Tests of the memory table.
