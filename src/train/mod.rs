//! Training: pack, forward and backward, clip, optimizer, checkpoint.
