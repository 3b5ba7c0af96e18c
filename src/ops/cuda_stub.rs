//! Stubs of `cuda/` for builds without the feature `cuda`. Every function returns an error.

use super::rope::Rotation;
use super::sink_attention::Attention;
use candle_core::{CudaStorage, Device, Result, Tensor, bail};
use std::ops::Range;

/// Declares stubs of functions of `cuda/`, which return an error. Their types stand in `cuda/` alone: a stub
/// takes any arguments, a type parameter for each.
macro_rules! refused {
    ($visibility:vis, $($name:ident($($argument:ident),*);)*) => {
        $($visibility fn $name<$($argument,)* R>($(_: $argument),*) -> Result<R> {
            refuse()
        })*
    };
}

/// Stub without values.
pub enum DeviceLse {}

/// Stub without values.
#[derive(Debug, Clone)]
pub enum KvPages {}

impl KvPages {
    pub fn len(&self) -> usize {
        match *self {}
    }

    pub fn id(&self) -> u64 {
        match *self {}
    }
}

/// Stub without values.
pub enum PagedPass {}

impl PagedPass {
    pub fn new(_: &mut [&mut KvPages], _: &[usize], _: &Attention) -> Result<Self> {
        refuse()
    }

    pub fn attend(&self, _: usize, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<(Tensor, Tensor)> {
        match *self {}
    }
}

/// Stub without values.
pub enum DecodeStep {}

/// Stub without values.
pub enum DecodeTable {}

impl DecodeTable {
    pub fn new(_: &KvPages, _: usize, _: usize) -> Result<Self> {
        refuse()
    }

    pub fn step(&mut self, _: Attention, _: &mut [&mut KvPages], _: usize) -> Result<DecodeStep> {
        match *self {}
    }
}

/// Stub that is never constructed.
pub struct DecodeBatch;

impl DecodeBatch {
    pub fn new(_: &Device, _: &[DecodeStep]) -> Result<Self> {
        refuse()
    }

    pub fn has_shape_of(&self, _: &[DecodeStep]) -> bool {
        false
    }

    pub fn load(&mut self, _: &[DecodeStep]) -> Result<usize> {
        refuse()
    }

    pub fn attend(
        &self,
        _: &[DecodeTable],
        _: (usize, usize),
        _: [&Tensor; 3],
        _: &Rotation,
        _: Option<&Tensor>,
    ) -> Result<Tensor> {
        refuse()
    }
}

/// Stub that is never constructed.
pub struct RecordedGraph;

impl RecordedGraph {
    pub fn record(_: &Device, _: impl FnOnce() -> Result<()>) -> Result<Self> {
        refuse()
    }

    pub fn launch(&self) -> Result<()> {
        refuse()
    }
}

pub fn unload_kernels() {}

/// Stub that is never constructed.
pub enum SecondStream {}

impl SecondStream {
    pub fn open(_: &Device) -> Result<Self> {
        refuse()
    }

    pub fn device(&self) -> &Device {
        match *self {}
    }

    pub fn hand_over<R>(&self, _: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        match *self {}
    }

    pub fn copy(&self, _: &Tensor) -> Result<Tensor> {
        match *self {}
    }

    pub fn share(&self, _: &Tensor) -> Result<Tensor> {
        match *self {}
    }
}

/// Stub that is never constructed.
pub struct GatherMemory {
    pub values: Tensor,
    pub address: u64,
    pub part_bytes: usize,
}

impl GatherMemory {
    pub fn new(_: &Tensor, _: usize, _: usize, _: usize) -> Result<Self> {
        refuse()
    }
}

/// Stub that is never constructed.
pub struct ExchangeMemory {
    pub values: CudaStorage,
    pub sent: Vec<(u64, usize)>,
    pub received: Vec<(u64, usize)>,
}

impl ExchangeMemory {
    pub fn new(_: &CudaStorage, _: &[Range<usize>], _: &[usize], _: usize) -> Result<Self> {
        refuse()
    }
}

/// Stub: no GPU is ever opened.
pub struct Gpu {
    pub device: Device,
    pub name: String,
    pub free_bytes: u64,
}

/// Stub that is never constructed.
pub struct DeviceMemory {
    pub used_max: u64,
    pub reserved_max: u64,
}

pub fn gpu_count() -> usize {
    0
}

pub fn open_gpu(_: usize) -> Result<Gpu> {
    bail!("this build is for CPUs; build with --features cuda")
}

fn refuse<T>() -> Result<T> {
    bail!("this build is for CPUs; build with --features cuda, or put the tensors on Device::Cpu")
}

refused! { pub,
    overwrite(A, B); upload(A, B); kv_pages(A, B, C, D, E); device_memory(A); reset_memory_peaks(A);
    address_of(A); pack_heads(A, B); unpack_heads(A, B, C); record_event(A); wait_for_event(A, B);
}

refused! { pub(super),
    head_logits(A, B, C); head_forward(A, B, C, D); head_backward(A, B, C, D, E); sort_by_expert(A, B);
    dispatch_forward(A, B); dispatch_backward(A, B, C); combine_forward(A, B, C); combine_and_add(A, B);
    expert_swiglu(A, B, C, D, E); packed_expert_swiglu(A, B, C, D, E); joined_product(A, B);
    combine_backward(A, B); product_forward(A, B, C, D, E, F); product_and_add(A, B, C);
    product_input_gradient(A, B, C, D); packed_forward(A, B, C, D, E); packed_input_gradient(A, B, C, D);
    add_weight_gradient(A, B, C, D, E); add_bias_gradient(A, B, C, D); low_rank_forward(A, B, C, D, E);
    low_rank_backward(A, B, C, D, E); swiglu_forward(A, B, C); swiglu_backward(A, B, C, D); sum_norm(A, B);
    rms_norm_forward(A, B, C); rms_norm_backward(A, B, C); sink_attention_forward(A, B, C);
    sink_attention_backward(A, B, C, D, E); add_tensor(A, B); copy_argument(A); add_columns(A, B, C);
    add_rows(A, B, C); sum_rows(A, B, C); take_columns(A, B); take_rows(A, B); load_balance_backward(A, B, C);
    load_balance_forward(A, B); rope_backward(A, B); rope_forward(A, B); rope_keys_backward(A, B);
    rope_keys_forward(A, B, C); route(A, B); select_experts(A, B); top_k_softmax_backward(A, B, C, D);
    top_k_softmax_forward(A, B); silu_and_mul_backward(A); silu_and_mul_forward(A, B);
    draw_tokens(A, B, C, D); token_log_probs(A, B, C); adamw(A, B, C, D); adamw_8bit(A, B, C, D, E);
    sgd(A, B, C, D); update_momentum(A, B, C); scale(A, B); round_into(A, B); sum_of_squares(A);
    muon(A, B, C, D);
}
