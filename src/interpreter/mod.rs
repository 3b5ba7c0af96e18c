//! The Python tool.
