//! The trait of differentiable ops: the forward pass on a CPU and on a GPU, and the backward pass.

use super::cpu::Element;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail,
};

/// A tensor in host memory, as an argument of a forward pass.
#[derive(Clone, Copy)]
pub struct HostArgument<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
}

impl<'a> HostArgument<'a> {
    /// Returns the shape of the tensor.
    pub fn shape(&self) -> &'a Shape {
        self.layout.shape()
    }

    /// Returns the values of the tensor.
    ///
    /// # Errors
    /// When the values are not contiguous or not f32.
    pub fn values(&self) -> Result<&'a [f32]> {
        self.elements()
    }

    /// Returns the ids in the tensor.
    ///
    /// # Errors
    /// When the ids are not contiguous or not u32.
    pub fn ids(&self) -> Result<&'a [u32]> {
        self.elements()
    }

    fn elements<T: Element>(&self) -> Result<&'a [T]> {
        let Some((start, end)) = self.layout.contiguous_offsets() else {
            bail!("argument is not contiguous")
        };
        match T::slice(self.storage) {
            Some(elements) => Ok(&elements[start..end]),
            None => {
                let found = candle_core::backend::BackendStorage::dtype(self.storage);
                bail!("argument has dtype {found:?}, expected {}", T::NAME.to_uppercase())
            }
        }
    }
}

/// A tensor in GPU memory, as an argument of a forward pass.
pub type DeviceArgument<'a> = (&'a CudaStorage, &'a Layout);

/// A differentiable op with `N` input tensors. `N` is 1, 2 or 3.
pub trait Operation<const N: usize>: Send + Sync + 'static {
    /// The name of the op in messages.
    const NAME: &'static str;

    /// Computes the result on a CPU.
    ///
    /// # Errors
    /// When the op does not support the types or shapes of `inputs`.
    fn cpu(&self, inputs: [HostArgument; N]) -> Result<(CpuStorage, Shape)>;

    /// Computes the result on a GPU.
    ///
    /// # Errors
    /// When the kernels do not support the types, shapes or layouts of `inputs`, or when the op has no
    /// forward pass on a GPU.
    fn cuda(&self, _: [DeviceArgument; N]) -> Result<(CudaStorage, Shape)> {
        bail!("no cuda implementation for {}", Self::NAME)
    }

    /// Computes the gradients of `inputs` from `gradient`, the contiguous gradient of `output`. `None` means
    /// that the graph gets no gradient for the input.
    ///
    /// # Errors
    /// When the op has no backward pass.
    fn backward(&self, _: [&Tensor; N], _output: &Tensor, _gradient: &Tensor) -> Result<[Option<Tensor>; N]> {
        bail!("no gradient of {}", Self::NAME)
    }
}

/// An [`Operation`] wrapped as an op of candle's graph.
pub(super) struct CandleOp<O, const N: usize>(pub O);

/// Converts an array of `M` values to an array of `N` values. Fails if the lengths differ.
fn into_array<T, const N: usize, const M: usize>(given: [T; M]) -> Result<[T; N]> {
    <[T; N]>::try_from(Vec::from(given)).or_else(|given| bail!("an op of {N} tensors got {}", given.len()))
}

/// Returns the gradients of `N` inputs of which only the first has a gradient in the graph.
pub fn first_input_gradient<const N: usize>(first: Option<Tensor>) -> [Option<Tensor>; N] {
    let mut gradients = [const { None }; N];
    gradients[0] = first;
    gradients
}

impl<O: Operation<N>, const N: usize> CandleOp<O, N> {
    fn cpu<const M: usize>(&self, inputs: [(&CpuStorage, &Layout); M]) -> Result<(CpuStorage, Shape)> {
        self.0.cpu(into_array(inputs.map(|(storage, layout)| HostArgument { storage, layout }))?)
    }

    fn cuda<const M: usize>(&self, inputs: [DeviceArgument; M]) -> Result<(CudaStorage, Shape)> {
        self.0.cuda(into_array(inputs)?)
    }

    pub(super) fn backward<const M: usize>(
        &self,
        inputs: [&Tensor; M],
        output: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; M]> {
        into_array(self.0.backward(into_array(inputs)?, output, &gradient.contiguous()?)?)
    }
}

impl<O: Operation<N>, const N: usize> CustomOp1 for CandleOp<O, N> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        self.cpu([(x, xl)])
    }

    fn cuda_fwd(&self, x: &CudaStorage, xl: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda([(x, xl)])
    }

    fn bwd(&self, x: &Tensor, output: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = self.backward([x], output, gradient)?;
        Ok(dx)
    }
}

impl<O: Operation<N>, const N: usize> CustomOp2 for CandleOp<O, N> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        y: &CpuStorage,
        yl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu([(x, xl), (y, yl)])
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        xl: &Layout,
        y: &CudaStorage,
        yl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda([(x, xl), (y, yl)])
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        output: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dy] = self.backward([x, y], output, gradient)?;
        Ok((dx, dy))
    }
}

impl<O: Operation<N>, const N: usize> CustomOp3 for CandleOp<O, N> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        y: &CpuStorage,
        yl: &Layout,
        z: &CpuStorage,
        zl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.cpu([(x, xl), (y, yl), (z, zl)])
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        xl: &Layout,
        y: &CudaStorage,
        yl: &Layout,
        z: &CudaStorage,
        zl: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda([(x, xl), (y, yl), (z, zl)])
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        z: &Tensor,
        output: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dy, dz] = self.backward([x, y, z], output, gradient)?;
        Ok((dx, dy, dz))
    }
}
