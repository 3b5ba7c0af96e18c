//! Ops on an NVIDIA GPU, for the feature `cuda`. They compute the formulas of the CPU ops with bf16 inputs
//! and outputs and f32 sums.
//!
//! For one kind of GPU and one kernel set, the bits of a row depend only on the row. They differ from the
//! bits on a CPU. The kernels are in `kernels/*.cu`, and docs/KERNELS.md explains them.

mod accumulate;
mod arguments;
mod decode;
mod device;
mod dispatch;
mod embedding;
mod expert_swiglu;
#[cfg(feature = "flash-attn")]
mod flash_attention;
mod gather_memory;
mod graph;
mod head;
mod head_parts;
mod joined_product;
mod launch;
mod load_balance;
mod log_prob;
mod low_rank;
mod modules;
mod muon;
#[cfg(test)]
mod on_device;
mod optimizer;
mod packed_attention;
mod paged_attention;
mod primitive_checks;
mod product;
mod rms_norm;
mod rope;
mod router;
mod sampling;
mod second_stream;
mod shared_keys;
mod silu_and_mul;
mod sink_attention;
mod swiglu;

pub use decode::{DecodeBatch, DecodeStep, DecodeTable, overwrite, upload};
pub use device::{
    DeviceMemory, Gpu, device_memory, free_memory, gpu_count, open, open_gpu, reset_memory_peaks,
};
#[cfg(feature = "flash-attn")]
pub use flash_attention::fa2_without_sinks;
pub use gather_memory::{ExchangeMemory, GatherMemory, address_of, record_event, wait_for_event};
pub use graph::RecordedGraph;
pub use head_parts::{pack_heads, unpack_heads};
pub use launch::kernel_set;
pub use log_prob::{logits_gradient, row_stats};
pub use modules::unload_kernels;
pub use paged_attention::{KvPages, KvPool, PagedPass, kv_pages};
pub use primitive_checks::run_primitive_check;
pub use second_stream::SecondStream;
pub use sink_attention::{DeviceLaunchPlan, DeviceLse, Gradients, Inputs, Outputs};

pub(super) use accumulate::{add_tensor, copy_argument};
pub(super) use dispatch::{
    combine_and_add, combine_backward, combine_forward, dispatch_backward, dispatch_forward, sort_by_expert,
};
pub(super) use embedding::{add_columns, add_rows, sum_rows, take_columns, take_rows};
pub(super) use expert_swiglu::{expert_swiglu, packed_expert_swiglu};
pub(super) use head::{head_backward, head_forward, head_logits};
pub(super) use joined_product::joined_product;
pub(super) use load_balance::{load_balance_backward, load_balance_forward};
pub(super) use low_rank::{low_rank_backward, low_rank_forward};
pub(super) use muon::muon;
pub(super) use optimizer::{adamw, adamw_8bit, round_into, scale, sgd, sum_of_squares, update_momentum};
pub(super) use packed_attention::{sink_attention_backward, sink_attention_forward};
pub(super) use product::{
    add_bias_gradient, add_weight_gradient, packed_forward, packed_input_gradient, product_and_add,
    product_forward, product_input_gradient,
};
pub(super) use rms_norm::{rms_norm_backward, rms_norm_forward, sum_norm};
pub(super) use rope::{rope_backward, rope_forward, rope_keys_backward, rope_keys_forward};
pub(super) use router::{route, select_experts, top_k_softmax_backward, top_k_softmax_forward};
pub(super) use sampling::{draw_tokens, token_log_probs};
pub(super) use silu_and_mul::{silu_and_mul_backward, silu_and_mul_forward};
pub(super) use swiglu::{swiglu_backward, swiglu_forward};
