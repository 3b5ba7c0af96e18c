//! The language model's head `[H, V]`, plain or packed, as what reads it multiplies by it.

use super::cpu::host_values;
use super::packed::PackedMatrix;
use super::parameter::Parameter;
use super::product::{Means, Precision, Spread, backward_product, forward_product};
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

    /// How a CPU multiplies by it.
    pub(super) fn means(&self) -> Means {
        Spread::Pool.by(match self {
            HeadMatrix::Plain(weight) => weight.precision(),
            HeadMatrix::Packed(_) => Precision::F32,
        })
    }

    /// `out = h · W` for rows `h [m, H]`.
    ///
    /// # Errors
    /// When the values cannot be read.
    pub(super) fn product(&self, out: &mut [f32], h: &[f32]) -> Result<()> {
        let (k, n) = self.shape()?;
        match self {
            HeadMatrix::Plain(weight) => {
                forward_product(
                    self.means(),
                    out,
                    h,
                    &host_values(weight.values())?,
                    (h.len() / k, k, n),
                    false,
                );
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
                backward_product(self.means(), dh, dz, &host_values(weight.values())?, (dz.len() / n, n, k));
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
