//! What a device's kernels ask of a tensor, in plain Rust: tested without a GPU.

use candle_core::{DType, Layout, Result, bail};

/// A tensor as a check sees it.
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a> {
    /// The op, in messages.
    pub op: &'static str,
    /// Its own name there.
    pub name: &'a str,
    /// Its element type.
    pub dtype: DType,
    /// Its shape, strides and offset.
    pub layout: &'a Layout,
}

impl Argument<'_> {
    /// Refuses another element type or shape, or a layout that the kernels cannot walk.
    ///
    /// # Errors
    /// As said, each with what it is, what it should be, and how to get there.
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
        // 16 bytes, what a copy moves; the kernels' f32 arguments are read one by one.
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
