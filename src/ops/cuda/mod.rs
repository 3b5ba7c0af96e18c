//! Ops on an NVIDIA GPU, compiled with feature `cuda`: the same formulas, bf16 in and out, sums in f32.
//!
//! A row's bits depend on the row alone here too, on one kind of GPU and with one set of kernels; they are not the CPU's.
//! The kernels are `kernels/*.cu`; docs/KERNELS.md explains them.

mod arguments;
mod device;
#[cfg(feature = "flash-attn")]
mod flash_attention;
mod launch;
mod log_prob;
mod modules;
#[cfg(test)]
mod on_device;
mod optimizer;
mod paged;
mod primitive_checks;
mod rms_norm;
mod sampling;
mod sink_attention;
mod swiglu;

pub use device::open;
#[cfg(feature = "flash-attn")]
pub use flash_attention::fa2_without_the_fix;
pub use launch::{Timer, kernel_set};
pub use log_prob::{logits_gradient, row_stats};
pub use modules::unload_kernels;
pub use paged::{KvPages, KvPool, sink_attention_paged};
pub use primitive_checks::run_primitive_check;
pub use sink_attention::{DeviceLse, Gradients, Inputs, Outputs, Prepared};

pub(super) use optimizer::{accumulate, adamw, adamw_8bit, round_into, scale, sgd, sum_of_squares};
pub(super) use paged::sink_attention_cached;
pub(super) use rms_norm::{rms_norm_backward, rms_norm_forward};
pub(super) use sampling::{draw_tokens, token_log_probs};
pub(super) use sink_attention::{sink_attention_backward, sink_attention_forward};
pub(super) use swiglu::{swiglu_backward, swiglu_forward};
