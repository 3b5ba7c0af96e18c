//! Advantages, importance ratios, losses, divergences: pure functions of tensors.
