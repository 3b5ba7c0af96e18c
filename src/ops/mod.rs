//! Tensor operations. Each op is one file with its formula, its forward pass and its backward pass.
//!
//! Forward passes are batch-invariant: **a row of the result has the same bits in every batch** and with any
//! number of threads. The order of the additions in a row depends only on the row. Backward passes also add
//! in a fixed order, so two runs give the same gradients. Shapes use these letters: `T` tokens, `H` hidden
//! size, `N` query heads, `M` key-value heads, `D` head size, `E` experts, `K` experts per token, `I`
//! intermediate size, `V` vocabulary, `R` rows.

pub mod adamw_8bit;
// Compiled in every build for its tests. In the program only GPU code uses it.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub mod argument;
pub mod buffer;
pub mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "cuda_stub.rs")]
pub mod cuda;
pub mod embedding;
pub mod experts;
pub mod fused;
pub mod graph;
pub mod head_adapter;
pub mod head_parts;
pub mod kv_cache;
pub mod linear;
pub mod load_balance;
pub mod log_prob;
pub mod logits;
pub mod low_rank;
pub mod math;
pub mod muon;
pub mod mxfp4;
pub mod operation;
pub mod optimizer;
pub mod packed_weights;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod skinny_gemm;
// Compiled in every build for its tests. In the program only GPU code uses it.
pub mod device_copies;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub mod page_allocator;
pub mod parameter;
mod prefetch;
pub mod product;
pub mod reverse_kl;
pub mod rms_norm;
pub mod rope;
pub mod round_mantissa;
pub mod router;
pub mod router_noise;
pub mod sequence_rows;
pub mod silu_and_mul;
pub mod sink_attention;
pub mod swiglu;
mod take_rows;
pub mod threads;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod tiles;
pub mod token_set;
mod truncation;
pub mod weight;

pub use embedding::{embedding, select_rows, tied_embedding};
pub use experts::{Dispatch, combine, dispatch, grouped_linear};
pub use linear::{linear, linear_f32};
pub use load_balance::load_balance;
pub use log_prob::{log_prob_and_entropy, log_prob_entropy_and_kl};
pub use logits::logits;
pub use low_rank::{TokenFactors, add_low_rank, add_low_rank_by_tokens};
pub use parameter::Parameter;
pub use rms_norm::rms_norm;
pub use rope::{rope, rope_keys_with_values};
pub use round_mantissa::round_mantissa;
pub use router::{route, top_k_softmax};
pub use router_noise::router_noise;
pub use sequence_rows::SequenceRows;
pub use silu_and_mul::silu_and_mul;
pub use sink_attention::{cached_sink_attention, sink_attention};
pub use swiglu::swiglu;
pub use take_rows::{take_rows, unsort};
