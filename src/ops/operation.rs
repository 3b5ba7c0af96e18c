//! The trait of an op with gradients: its forward on a CPU and on a GPU, and its backward.

use super::cpu::Element;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail,
};

/// A tensor in host memory, as an argument of a forward.
#[derive(Clone, Copy)]
pub struct HostArgument<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
}

impl<'a> HostArgument<'a> {
    /// Returns its shape.
    pub fn shape(&self) -> &'a Shape {
        self.layout.shape()
    }

    /// Returns its values.
    ///
    /// # Errors
    /// When they are not contiguous or not f32.
    pub fn values(&self) -> Result<&'a [f32]> {
        self.elements()
    }

    /// Returns its ids.
    ///
    /// # Errors
    /// When they are not contiguous or not u32.
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

/// A tensor in GPU memory, as an argument of a forward.
pub type DeviceArgument<'a> = (&'a CudaStorage, &'a Layout);

/// An op of `N` tensors, 1 to 3.
pub trait Operation<const N: usize>: Send + Sync + 'static {
    /// Its name in messages.
    const NAME: &'static str;

    /// Computes the result on a CPU.
    ///
    /// # Errors
    /// When the types or shapes of `inputs` are not the op's.
    fn cpu(&self, inputs: [HostArgument; N]) -> Result<(CpuStorage, Shape)>;

    /// Computes the result on a GPU.
    ///
    /// # Errors
    /// When the types, shapes or layouts of `inputs` are not the kernels'; when the op has no GPU forward.
    fn cuda(&self, _: [DeviceArgument; N]) -> Result<(CudaStorage, Shape)> {
        bail!("no cuda implementation for {}", Self::NAME)
    }

    /// Computes the gradients of `inputs` from `gradient`, the contiguous gradient of `output`. `None`
    /// means that the graph gets no gradient for that input.
    ///
    /// # Errors
    /// When the op has no backward.
    fn backward(&self, _: [&Tensor; N], _output: &Tensor, _gradient: &Tensor) -> Result<[Option<Tensor>; N]> {
        bail!("no gradient of {}", Self::NAME)
    }
}

/// An operation wrapped for candle's graph.
pub(super) struct CandleOp<O, const N: usize>(pub O);

/// Converts an array to one of `N` values; fails if the lengths differ.
fn exactly<T, const N: usize, const M: usize>(given: [T; M]) -> Result<[T; N]> {
    <[T; N]>::try_from(Vec::from(given))
        .or_else(|given| bail!("an op of {N} tensors is given {}", given.len()))
}

/// Returns the gradients of `N` inputs when the graph gets only the first one's.
pub fn first_input_gradient<const N: usize>(first: Option<Tensor>) -> [Option<Tensor>; N] {
    let mut gradients = [const { None }; N];
    gradients[0] = first;
    gradients
}

impl<O: Operation<N>, const N: usize> CandleOp<O, N> {
    fn cpu<const M: usize>(&self, inputs: [(&CpuStorage, &Layout); M]) -> Result<(CpuStorage, Shape)> {
        self.0.cpu(exactly(inputs.map(|(storage, layout)| HostArgument { storage, layout }))?)
    }

    fn cuda<const M: usize>(&self, inputs: [DeviceArgument; M]) -> Result<(CudaStorage, Shape)> {
        self.0.cuda(exactly(inputs)?)
    }

    pub(super) fn backward<const M: usize>(
        &self,
        inputs: [&Tensor; M],
        output: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; M]> {
        exactly(self.0.backward(exactly(inputs)?, output, &gradient.contiguous()?)?)
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
