//! One file a subcommand: it composes and computes nothing.
