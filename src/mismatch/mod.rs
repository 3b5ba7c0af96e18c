//! Mismatch between two policies that should be one.
