//! The language model's head `[H, V]`, plain or packed, as what reads it multiplies by it.

use super::cpu::host_values;
use super::packed::PackedMatrix;
use super::parameter::Parameter;
use super::product::{Matrix, forward_product, product};
use candle_core::{Result, Tensor, bail};
use std::sync::Arc;

/// The head's matrix.
#[derive(Clone)]
pub enum HeadMatrix {
    Plain(Parameter),
    Packed(Arc<PackedMatrix>),
}

impl HeadMatrix {
    /// `(H, V)`.
    ///
    /// # Errors
    /// When it is no matrix.
    pub fn shape(&self) -> Result<(usize, usize)> {
        match self {
            HeadMatrix::Plain(weight) => weight.values().dims2(),
            HeadMatrix::Packed(weight) => match weight.shape() {
                [1, input, output] => Ok((input, output)),
                shape => bail!("a head of shape {shape:?}"),
            },
        }
    }

    /// `out = h · W` for rows `h [m, H]`.
    ///
    /// # Errors
    /// When the values cannot be read.
    pub(super) fn product(&self, out: &mut [f32], h: &[f32]) -> Result<()> {
        let (k, n) = self.shape()?;
        match self {
            HeadMatrix::Plain(weight) => {
                forward_product(out, h, &host_values(weight.values())?, (h.len() / k, k, n), false);
            }
            HeadMatrix::Packed(weight) => weight.forward(0, out, h, false)?,
        }
        Ok(())
    }

    /// `dh = dz · Wᵀ` for rows `dz [m, V]`.
    ///
    /// # Errors
    /// When the values cannot be read.
    pub(super) fn input_gradient(&self, dh: &mut [f32], dz: &[f32]) -> Result<()> {
        let (k, n) = self.shape()?;
        match self {
            HeadMatrix::Plain(weight) => {
                let w = host_values(weight.values())?;
                product(dh, Matrix::rows(dz, n), Matrix::transposed(&w, n), (dz.len() / n, n, k), false);
            }
            HeadMatrix::Packed(weight) => weight.input_gradient(0, dh, dz)?,
        }
        Ok(())
    }

    /// The matrix where a GPU's products read it.
    ///
    /// # Errors
    /// When it is packed.
    pub(super) fn on_device(&self) -> Result<&Tensor> {
        match self {
            HeadMatrix::Plain(weight) => Ok(weight.values()),
            HeadMatrix::Packed(_) => bail!("a packed head has no form on a GPU yet; take dense weights"),
        }
    }

    /// The tensor that learns, if any, for candle to record what is computed from it.
    pub(super) fn plain(&self) -> Option<&Tensor> {
        match self {
            HeadMatrix::Plain(weight) => Some(weight.values()),
            HeadMatrix::Packed(_) => None,
        }
    }
}
