//! Checks of a tensor's type, shape and layout before a kernel reads it. Plain Rust, tested without a GPU.

use candle_core::{DType, Layout, Result, bail};

/// A tensor's type and layout, as a check reads them.
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a> {
    /// The op's name in messages.
    pub op: &'static str,
    /// The argument's name in messages.
    pub name: &'a str,
    /// The element type.
    pub dtype: DType,
    /// The shape, strides and offset.
    pub layout: &'a Layout,
}

impl Argument<'_> {
    /// Checks the element type, the shape, and that the kernels can read the layout.
    ///
    /// # Errors
    /// When one of them differs. The message has the actual value, the required value and the remedy.
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
        // A kernel copies bf16 in units of 16 bytes; it reads f32 one by one.
        if dtype == DType::BF16 && layout.start_offset() % 8 != 0 {
            let offset = layout.start_offset();
            bail!(
                "{op}: {name} {dims:?} starts {offset} elements into its storage, no multiple of 8; call \
                 force_contiguous() first"
            );
        }
        Ok(())
    }
}
