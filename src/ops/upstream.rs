//! A scalar whose gradient is handed in, for candle's own walk, which checks and benchmarks take: it begins at scalars.
//!
//! `upstream(y, g)` is 0 with `dy = g`: calling `backward` on it carries the gradient `g` through the graph below `y`. A pass hands
//! its gradients to [`super::graph::differentiate`].

use super::cuda::zero;
use super::graph::apply_1;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

/// A scalar 0 that sends `gradient` into `y` when differentiated.
///
/// # Errors
/// When shapes differ.
pub fn upstream(y: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    if y.dims() != gradient.dims() {
        bail!("upstream: value {:?}, gradient {:?}", y.dims(), gradient.dims());
    }
    apply_1(y, Upstream { gradient: gradient.detach() })
}

struct Upstream {
    gradient: Tensor,
}

impl CustomOp1 for Upstream {
    fn name(&self) -> &'static str {
        "upstream"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, y: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        zero(y)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if grad.device().is_cuda() {
            // Whatever the scale: to read it the host would wait for the device. A product with 1 changes no bit.
            return self.gradient.broadcast_mul(&grad.to_dtype(self.gradient.dtype())?).map(Some);
        }
        let scale = grad.to_scalar::<f32>()?;
        if scale == 1.0 {
            Ok(Some(self.gradient.clone()))
        } else {
            Ok(Some((&self.gradient * scale as f64)?))
        }
    }
}
