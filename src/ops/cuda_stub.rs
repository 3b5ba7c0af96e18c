//! Stubs of `cuda/` for builds without the feature `cuda`. Every function returns an error.

use super::adamw_8bit::Moment;
use super::embedding::TokensById;
use super::experts::Dispatch;
use super::head_parts::HeadSplit;
use super::load_balance::LoadBalance;
use super::logits::SampledToken;
use super::muon::Muon;
use super::operation::DeviceArgument;
use super::optimizer::AdamW;
use super::packed_weights::PackedMatrix;
use super::parameter::GradientTarget;
use super::rope::Rotation;
use super::sink_attention::{Attention, KeySharing};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Result, Shape, Tensor, bail};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Storage and shape of a result.
type OpOutput = (CudaStorage, Shape);

/// Declares stubs of functions of `cuda/`, given their argument and result types. The stubs return an error.
macro_rules! refused {
    ($visibility:vis, $($name:ident($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        $($visibility fn $name($(_: $argument),*) -> Result<$result> {
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

    pub fn attend(&self, _: usize, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Tensor> {
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
    overwrite(&Tensor, &Tensor) -> ();
    upload(&Tensor, &[u32]) -> ();
    kv_pages(&CudaDevice, usize, usize, usize, usize) -> KvPages;
    device_memory(&CudaDevice) -> DeviceMemory;
    reset_memory_peaks(&CudaDevice) -> ();
    address_of(&Tensor) -> u64;
    pack_heads(DeviceArgument, &HeadSplit) -> CudaStorage;
    unpack_heads(&CudaStorage, usize, &HeadSplit) -> CudaStorage;
    record_event(&Device) -> Arc<dyn Any + Send + Sync>;
    wait_for_event(&Device, &(dyn Any + Send + Sync)) -> ();
}

refused! { pub(super),
    head_logits(&Tensor, &Tensor, f32) -> [Tensor; 2];
    head_forward(DeviceArgument, &Tensor, &[u32], f32) -> OpOutput;
    head_backward([&Tensor; 3], &[u32], f32, Option<&GradientTarget>, bool) -> Option<Tensor>;
    sort_by_expert(DeviceArgument, usize) -> OpOutput;
    dispatch_forward(DeviceArgument, &Tensor) -> OpOutput;
    dispatch_backward(&Tensor, &Tensor, usize) -> Tensor;
    combine_forward(DeviceArgument, DeviceArgument, &Tensor) -> OpOutput;
    combine_and_add([&Tensor; 3], &Tensor) -> Tensor;
    expert_swiglu(&Tensor, &Tensor, Option<&Tensor>, &Dispatch, (f32, f32)) -> Tensor;
    packed_expert_swiglu(&Tensor, &PackedMatrix, Option<&Tensor>, &Dispatch, (f32, f32)) -> Tensor;
    joined_product(&Tensor, &[(&Tensor, Option<&Tensor>)]) -> Vec<Tensor>;
    combine_backward([&Tensor; 3], &Tensor) -> (Tensor, Tensor);
    product_forward(
        &'static str, DeviceArgument, DeviceArgument, Option<DeviceArgument>, Option<&Tensor>, DType,
    ) -> OpOutput;
    product_and_add(&'static str, [&Tensor; 3], Option<&Tensor>) -> Tensor;
    product_input_gradient(&'static str, &Tensor, &Tensor, Option<&Tensor>) -> Tensor;
    packed_forward(
        &'static str, DeviceArgument, &PackedMatrix, Option<DeviceArgument>, Option<&Tensor>,
    ) -> OpOutput;
    packed_input_gradient(&'static str, &Tensor, &PackedMatrix, Option<&Tensor>) -> Tensor;
    add_weight_gradient(&'static str, &Tensor, &Tensor, &Tensor, Option<&Tensor>) -> ();
    add_bias_gradient(&'static str, &Tensor, &Tensor, Option<&Tensor>) -> ();
    low_rank_forward(DeviceArgument, DeviceArgument, [&Tensor; 2], f32, Option<&Tensor>) -> OpOutput;
    low_rank_backward(
        [&Tensor; 2], [&Tensor; 2], [Option<&GradientTarget>; 2], f32, Option<&Tensor>,
    ) -> Option<Tensor>;
    swiglu_forward(DeviceArgument, f32, f32) -> OpOutput;
    swiglu_backward(&Tensor, &Tensor, f32, f32) -> Tensor;
    sum_norm([&Tensor; 3], f32) -> [Tensor; 2];
    rms_norm_forward(DeviceArgument, DeviceArgument, f32) -> OpOutput;
    rms_norm_backward([&Tensor; 3], f32, bool) -> (Tensor, Option<Tensor>);
    sink_attention_forward(&Attention, &[usize], [DeviceArgument; 3]) -> (CudaStorage, Shape, DeviceLse);
    sink_attention_backward(
        &Attention, &[usize], &DeviceLse, [&Tensor; 5], Option<&dyn KeySharing>,
    ) -> [Tensor; 3];
    add_tensor(&Tensor, &Tensor) -> ();
    copy_argument(DeviceArgument) -> OpOutput;
    add_columns(&Tensor, &Tensor, &TokensById) -> ();
    add_rows(&Tensor, &Tensor, &TokensById) -> ();
    sum_rows(&Tensor, &TokensById, usize) -> Tensor;
    take_columns(DeviceArgument, &[u32]) -> OpOutput;
    take_rows(DeviceArgument, &[u32]) -> OpOutput;
    load_balance_backward(&LoadBalance, &Tensor, &Tensor) -> Tensor;
    load_balance_forward(&LoadBalance, DeviceArgument) -> OpOutput;
    rope_backward(&Tensor, &Rotation) -> Tensor;
    rope_forward(DeviceArgument, &Rotation) -> OpOutput;
    rope_keys_backward(&Tensor, &Rotation) -> [Tensor; 2];
    rope_keys_forward(DeviceArgument, DeviceArgument, &Rotation) -> OpOutput;
    route(DeviceArgument, usize) -> OpOutput;
    select_experts(&Tensor, usize) -> Option<[Tensor; 3]>;
    top_k_softmax_backward(&Tensor, &Tensor, &Tensor, usize) -> Tensor;
    top_k_softmax_forward(DeviceArgument, &Tensor) -> OpOutput;
    silu_and_mul_backward([&Tensor; 3]) -> [Tensor; 2];
    silu_and_mul_forward(DeviceArgument, DeviceArgument) -> OpOutput;
    draw_tokens(&Tensor, &Tensor, &[(usize, f64)], bool) -> Vec<Option<SampledToken>>;
    token_log_probs(&Tensor, &Tensor, &[(usize, u32)]) -> Vec<f32>;
    adamw(&Tensor, [&Tensor; 2], &Tensor, &AdamW) -> ();
    adamw_8bit(&Tensor, [Moment; 2], &Tensor, &AdamW, &[[f32; 256]; 4]) -> ();
    sgd(&Tensor, &Tensor, f32, f32) -> ();
    update_momentum(&Tensor, &Tensor, f32) -> ();
    scale(&Tensor, f32) -> ();
    round_into(&Tensor, &Tensor) -> ();
    sum_of_squares(&Tensor) -> f64;
    muon(&Tensor, &Tensor, &Tensor, &Muon) -> ();
}
