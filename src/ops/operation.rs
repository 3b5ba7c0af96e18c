//! The trait of differentiable ops: the forward pass on a CPU and on a GPU, and the backward pass.

use super::cpu::Element;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, Layout, Result, Shape, Storage, Tensor, bail};

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

/// The gradients with respect to `N` input tensors. `None` for a tensor without gradient.
pub type InputGradients<const N: usize> = Result<[Option<Tensor>; N]>;

/// A differentiable op with `N` input tensors.
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

/// Computes the result of `op`, without a record for the backward pass.
///
/// # Errors
/// When the inputs are on several devices. Errors of the op.
pub(super) fn run<O: Operation<N>, const N: usize>(op: &O, inputs: [&Tensor; N]) -> Result<Tensor> {
    let opened = inputs.map(Tensor::storage_and_layout);
    let on_host = opened.iter().map(|(storage, layout)| match &**storage {
        Storage::Cpu(storage) => Some(HostArgument { storage, layout }),
        _ => None,
    });
    let on_gpu = opened.iter().map(|(storage, layout)| match &**storage {
        Storage::Cuda(storage) => Some((storage, *layout)),
        _ => None,
    });
    let (storage, shape) = if let Some(inputs) = all(on_host) {
        op.cpu(inputs).map(|(storage, shape)| (Storage::Cpu(storage), shape))?
    } else if let Some(inputs) = all(on_gpu) {
        op.cuda(inputs).map(|(storage, shape)| (Storage::Cuda(storage), shape))?
    } else {
        bail!("{}: the inputs are on several devices", O::NAME)
    };
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}

/// Returns the `N` values, if there are as many and none is absent.
fn all<T, const N: usize>(values: impl Iterator<Item = Option<T>>) -> Option<[T; N]> {
    values.collect::<Option<Vec<T>>>()?.try_into().ok()
}

/// Returns the gradients of `N` inputs of which only the first has a gradient in the graph.
pub fn first_input_gradient<const N: usize>(first: Option<Tensor>) -> [Option<Tensor>; N] {
    let mut gradients = [const { None }; N];
    gradients[0] = first;
    gradients
}
