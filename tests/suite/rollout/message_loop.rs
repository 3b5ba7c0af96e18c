//! The message loop under forced tokens.
