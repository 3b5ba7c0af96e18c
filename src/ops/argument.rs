//! Checks of the type, the shape and the layout of a tensor before a kernel reads it. The module is plain
//! Rust and is tested without a GPU.

use candle_core::{DType, Layout, Result, bail};

/// The type and the layout of a tensor, and the names of its op and of the tensor in messages.
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a> {
    /// The name of the op in messages.
    pub op: &'static str,
    /// The name of the argument in messages.
    pub name: &'a str,
    /// The element type.
    pub dtype: DType,
    /// The shape, strides and offset.
    pub layout: &'a Layout,
}

impl Argument<'_> {
    /// Checks the element type and the shape, and that kernels can read the layout.
    ///
    /// # Errors
    /// When a property differs from the required one. The message has the actual value, the required value
    /// and the remedy.
    pub fn check(&self, dtype: DType, shape: &[usize]) -> Result<()> {
        let Self { op, name, layout, .. } = *self;
        let dims = layout.dims();
        if dims != shape {
            bail!("{op}: {name} has shape {dims:?}, expected {shape:?}; give tensors of one batch");
        }
        if self.dtype != dtype {
            let was = self.dtype;
            bail!("{op}: {name} {dims:?} is {was:?}, expected {dtype:?} on a GPU; call to_dtype first");
        }
        if !layout.is_contiguous() {
            let strides = layout.stride();
            bail!(
                "{op}: {name} {dims:?} with strides {strides:?} is not contiguous; call contiguous() first"
            );
        }
        // Kernels copy bf16 values in units of 16 bytes, and read single f32 values.
        if dtype == DType::BF16 && layout.start_offset() % 8 != 0 {
            let offset = layout.start_offset();
            bail!(
                "{op}: {name} {dims:?} starts {offset} elements into its storage, not at a multiple of 8; call \
                 force_contiguous() first"
            );
        }
        Ok(())
    }
}
