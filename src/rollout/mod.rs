//! Rollout: continuous batching over token ids, sampling, the message loop.
