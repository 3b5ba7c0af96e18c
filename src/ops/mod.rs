//! Tensor operations: one op a file, its formula in the doc, forward and backward together.
