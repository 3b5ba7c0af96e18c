//! The twin of `cuda/` in a build without feature `cuda`: everything is refused.

use super::adamw_8bit::Moment;
use super::embedding::ById;
use super::load_balance::LoadBalance;
use super::logits::Drawn;
use super::optimizer::AdamW;
use super::packed::PackedMatrix;
use super::parameter::Gradient;
use super::rope::Rotation;
use super::sink_attention::Attention;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Result, Shape, Tensor, bail};

type Computed = Result<(CudaStorage, Shape)>;

/// No value of it exists here.
pub enum DeviceLse {}

/// No value of it exists here.
#[derive(Debug, Clone)]
pub enum KvPages {}

impl KvPages {
    pub fn len(&self) -> usize {
        match *self {}
    }

    pub fn forget_before(&mut self, _: usize, _: usize) {
        match *self {}
    }
}

/// No step is made here.
#[derive(Default)]
pub struct DecodeStep(());

impl DecodeStep {
    pub fn add_layer(&mut self, _: Attention, _: &mut [&mut KvPages]) -> Result<()> {
        refuse()
    }
}

/// None is made here.
pub struct DecodeBatch;

impl DecodeBatch {
    pub fn new(_: &Device, _: &DecodeStep) -> Result<Self> {
        refuse()
    }

    pub fn fits(&self, _: &DecodeStep) -> bool {
        false
    }

    pub fn load(&mut self, _: &DecodeStep) -> Result<()> {
        refuse()
    }

    pub fn attend(&self, _: usize, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Tensor> {
        refuse()
    }
}

/// None is made here.
pub struct Recorded;

impl Recorded {
    pub fn of(_: &Device, _: impl FnOnce() -> Result<()>) -> Result<Self> {
        refuse()
    }

    pub fn launch(&self) -> Result<()> {
        refuse()
    }
}

pub fn overwrite(_: &Tensor, _: &Tensor) -> Result<()> {
    refuse()
}

pub fn upload(_: &Tensor, _: &[u32]) -> Result<()> {
    refuse()
}

pub fn kv_pages(_: &CudaDevice, _: usize, _: usize) -> Result<KvPages> {
    refuse()
}

pub fn unload_kernels() {}

/// No GPU is opened here.
pub struct Gpu {
    pub device: Device,
    pub name: String,
    pub free_bytes: u64,
}

/// What no process has here.
pub struct DeviceMemory {
    pub used_max: u64,
    pub reserved_max: u64,
}

pub fn device_memory(_: &CudaDevice) -> Result<DeviceMemory> {
    refuse()
}

pub fn forget_memory_peaks(_: &CudaDevice) -> Result<()> {
    refuse()
}

pub fn gpu_count() -> usize {
    0
}

pub fn usable(_: usize) -> Result<Gpu> {
    bail!("this build is for CPUs; build with --features cuda")
}

fn refuse<T>() -> Result<T> {
    bail!("this build is for CPUs; for a GPU build with --features cuda, or put the tensors on Device::Cpu")
}

pub(super) fn head_logits(_: &Tensor, _: &Tensor, _: f32) -> Result<[Tensor; 2]> {
    refuse()
}

pub(super) fn head_forward(_: (&CudaStorage, &Layout), _: &Tensor, _: &[u32], _: f32) -> Computed {
    refuse()
}

pub(super) fn head_backward(
    _: [&Tensor; 3],
    _: &[u32],
    _: f32,
    _: Option<&Gradient>,
    _: bool,
) -> Result<Option<Tensor>> {
    refuse()
}

pub(super) fn sort_by_expert(_: (&CudaStorage, &Layout), _: usize) -> Computed {
    refuse()
}

pub(super) fn dispatch_forward(_: (&CudaStorage, &Layout), _: &Tensor) -> Computed {
    refuse()
}

pub(super) fn dispatch_backward(_: &Tensor, _: &Tensor, _: usize) -> Result<Tensor> {
    refuse()
}

pub(super) fn combine_forward(
    _: (&CudaStorage, &Layout),
    _: (&CudaStorage, &Layout),
    _: &Tensor,
) -> Computed {
    refuse()
}

pub(super) fn combine_backward(_: [&Tensor; 3], _: &Tensor) -> Result<(Tensor, Tensor)> {
    refuse()
}

pub(super) fn product_forward(
    _: &'static str,
    _: (&CudaStorage, &Layout),
    _: (&CudaStorage, &Layout),
    _: Option<(&CudaStorage, &Layout)>,
    _: Option<&Tensor>,
    _: DType,
) -> Computed {
    refuse()
}

pub(super) fn product_input_gradient(
    _: &'static str,
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
) -> Result<Tensor> {
    refuse()
}

pub(super) fn packed_forward(
    _: &'static str,
    _: (&CudaStorage, &Layout),
    _: &PackedMatrix,
    _: Option<(&CudaStorage, &Layout)>,
    _: Option<&Tensor>,
) -> Computed {
    refuse()
}

pub(super) fn packed_input_gradient(
    _: &'static str,
    _: &Tensor,
    _: &PackedMatrix,
    _: Option<&Tensor>,
) -> Result<Tensor> {
    refuse()
}

pub(super) fn add_weight_gradient(
    _: &'static str,
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
) -> Result<()> {
    refuse()
}

pub(super) fn add_bias_gradient(_: &'static str, _: &Tensor, _: &Tensor, _: Option<&Tensor>) -> Result<()> {
    refuse()
}

pub(super) fn low_rank_forward(
    _: (&CudaStorage, &Layout),
    _: (&CudaStorage, &Layout),
    _: [&Tensor; 2],
    _: f32,
    _: Option<&Tensor>,
) -> Computed {
    refuse()
}

pub(super) fn low_rank_backward(
    _: [&Tensor; 2],
    _: [&Tensor; 2],
    _: [Option<&Gradient>; 2],
    _: f32,
    _: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    refuse()
}

pub(super) fn swiglu_forward(_: (&CudaStorage, &Layout), _: f32, _: f32) -> Computed {
    refuse()
}

pub(super) fn swiglu_backward(_: &Tensor, _: &Tensor, _: f32, _: f32) -> Result<Tensor> {
    refuse()
}

pub(super) fn rms_norm_forward(_: (&CudaStorage, &Layout), _: (&CudaStorage, &Layout), _: f32) -> Computed {
    refuse()
}

pub(super) fn rms_norm_backward(_: [&Tensor; 3], _: f32, _: bool) -> Result<(Tensor, Option<Tensor>)> {
    refuse()
}

pub(super) fn sink_attention_forward(
    _: &Attention,
    _: &[usize],
    _: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, Shape, DeviceLse)> {
    refuse()
}

pub(super) fn sink_attention_backward(
    _: &Attention,
    _: &[usize],
    _: &DeviceLse,
    _: [&Tensor; 5],
) -> Result<[Tensor; 3]> {
    refuse()
}

pub(super) fn sink_attention_cached(
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: &mut [&mut KvPages],
    _: &[usize],
    _: &Attention,
) -> Result<Tensor> {
    refuse()
}

pub(super) fn add_tensor(_: &Tensor, _: &Tensor) -> Result<()> {
    refuse()
}

pub(super) fn copied(_: (&CudaStorage, &Layout)) -> Computed {
    refuse()
}

pub(super) fn add_columns(_: &Tensor, _: &Tensor, _: &ById) -> Result<()> {
    refuse()
}

pub(super) fn add_rows(_: &Tensor, _: &Tensor, _: &ById) -> Result<()> {
    refuse()
}

pub(super) fn sum_rows(_: &Tensor, _: &ById, _: usize) -> Result<Tensor> {
    refuse()
}

pub(super) fn take_columns(_: (&CudaStorage, &Layout), _: &[u32]) -> Computed {
    refuse()
}

pub(super) fn take_rows(_: (&CudaStorage, &Layout), _: &[u32]) -> Computed {
    refuse()
}

pub(super) fn load_balance_backward(_: &LoadBalance, _: &Tensor, _: &Tensor) -> Result<Tensor> {
    refuse()
}

pub(super) fn load_balance_forward(_: &LoadBalance, _: (&CudaStorage, &Layout)) -> Computed {
    refuse()
}

pub(super) fn rope_backward(_: &Tensor, _: &Rotation) -> Result<Tensor> {
    refuse()
}

pub(super) fn rope_forward(_: (&CudaStorage, &Layout), _: &Rotation) -> Computed {
    refuse()
}

pub(super) fn rope_keys_backward(_: &Tensor, _: &Rotation) -> Result<[Tensor; 2]> {
    refuse()
}

pub(super) fn rope_keys_forward(
    _: (&CudaStorage, &Layout),
    _: (&CudaStorage, &Layout),
    _: &Rotation,
) -> Computed {
    refuse()
}

pub(super) fn route(_: (&CudaStorage, &Layout), _: usize) -> Computed {
    refuse()
}

pub(super) fn top_k_softmax_backward(_: &Tensor, _: &Tensor, _: &Tensor, _: usize) -> Result<Tensor> {
    refuse()
}

pub(super) fn top_k_softmax_forward(_: (&CudaStorage, &Layout), _: &Tensor) -> Computed {
    refuse()
}

pub(super) fn silu_gated_backward(_: [&Tensor; 3]) -> Result<[Tensor; 2]> {
    refuse()
}

pub(super) fn silu_gated_forward(_: (&CudaStorage, &Layout), _: (&CudaStorage, &Layout)) -> Computed {
    refuse()
}

pub(super) fn draw_tokens(_: &Tensor, _: &Tensor, _: &[(usize, f64)], _: bool) -> Result<Vec<Option<Drawn>>> {
    refuse()
}

pub(super) fn token_log_probs(_: &Tensor, _: &Tensor, _: &[(usize, u32)]) -> Result<Vec<f32>> {
    refuse()
}

pub(super) fn adamw(_: &Tensor, _: [&Tensor; 2], _: &Tensor, _: &AdamW) -> Result<()> {
    refuse()
}

pub(super) fn adamw_8bit(
    _: &Tensor,
    _: [Moment; 2],
    _: &Tensor,
    _: &AdamW,
    _: &[[f32; 256]; 4],
) -> Result<()> {
    refuse()
}

pub(super) fn sgd(_: &Tensor, _: &Tensor, _: f32, _: f32) -> Result<()> {
    refuse()
}

pub(super) fn accumulate(_: &Tensor, _: &Tensor, _: f32) -> Result<()> {
    refuse()
}

pub(super) fn scale(_: &Tensor, _: f32) -> Result<()> {
    refuse()
}

pub(super) fn round_into(_: &Tensor, _: &Tensor) -> Result<()> {
    refuse()
}

pub(super) fn sum_of_squares(_: &Tensor) -> Result<f64> {
    refuse()
}
