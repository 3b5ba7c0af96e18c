//! Instructions for training prompts.
