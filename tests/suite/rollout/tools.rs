//! Tools that sleep, fail and are attacked.
