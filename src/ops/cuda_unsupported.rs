//! The twin of `cuda/` in a build without feature `cuda`: everything is refused.

use super::sink_attention::Attention;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};

/// No value of it exists here.
pub enum DeviceLse {}

fn refuse<T>() -> Result<T> {
    bail!("this build is for CPUs; for a GPU build with --features cuda, or put the tensors on Device::Cpu")
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
