//! `device`: where a run computes.

use crate::choice::choice;

choice! {
    /// Where a run computes.
    pub enum DeviceKind {
        /// A GPU where there is one, the program was built for it, and it can compute what the recipe asks for; else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// An NVIDIA GPU of compute capability 9.0, one a process: with `model.dtype = "bf16"` and heads 64 wide.
        Cuda = "cuda",
    }
}
