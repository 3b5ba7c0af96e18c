//! Where the store is: in host memory, or on a GPU, where matrices are bf16 and all else f32.

use super::{MASTER, OptimizerState, Parameters, Values};
use crate::dist::wire::f32_values;
use crate::model::held::Held;
use crate::model::names::ParameterSpec;
use crate::model::weights::Weights;
use crate::ops::cpu::{edit, edit_codes, host_values, on_host};
use crate::ops::product::Precision;
use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor, Var};

impl Parameters {
    /// The same on `device`. On a GPU matrices are bf16; what they had beyond that is kept as their [`MASTER`]. What is in pieces stays
    /// in host memory with all that an optimizer keeps of it, and goes to the GPU as it is gathered.
    ///
    /// # Errors
    /// When its memory does not suffice, and for what is on disk.
    pub fn placed_on(mut self, device: &Device) -> Result<Self> {
        self.device = device.clone();
        if device.is_cpu() {
            return Ok(self);
        }
        for (entry, spec) in self.entries.iter_mut().zip(&self.specs) {
            match &entry.values {
                Values::Plain(values) => {
                    let (values, master) = placed(values.as_tensor(), spec, device)?;
                    (entry.values, entry.state) = (Values::Plain(values), master);
                }
                Values::Packed(held) => entry.values = Values::Packed(held.on(device, spec)?),
                Values::Piece(_) | Values::PackedPiece(_) => {}
                Values::Stored(_) => bail!("{} is on disk", spec.name),
            }
        }
        Ok(self)
    }

    /// The same, whose dense products a CPU makes so.
    pub fn multiplying(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// `weights`, multiplied as it is said here.
    pub(super) fn multiplied(&self, weights: Weights) -> Weights {
        weights.multiplying(self.precision)
    }

    /// The same where `other` is, and multiplied as that is.
    ///
    /// # Errors
    /// As [`Self::placed_on`].
    pub fn placed_beside(self, other: &Self) -> Result<Self> {
        Ok(self.placed_on(&other.device)?.multiplying(other.precision))
    }

    /// Where the model computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Writes `bytes`, little-endian f32 or codes of 8 bits, over what [`Self::own`] gives.
    ///
    /// # Errors
    /// When there is no such thing, or not so many values.
    pub fn overwrite(&mut self, index: usize, kind: &str, bytes: &[u8]) -> Result<()> {
        let target = self.own(index, kind)?;
        let is_codes = target.dtype() == DType::U8;
        if target.device().is_cpu() {
            match is_codes {
                true => edit_codes(target, |codes| {
                    codes.copy_from_slice(bytes);
                    Ok(())
                }),
                false => edit(target, |values| {
                    values.iter_mut().zip(f32_values(bytes)).for_each(|(to, value)| *to = value);
                    Ok(())
                }),
            }?;
            return Ok(());
        }
        let shape = target.shape().clone();
        let written = match is_codes {
            true => Tensor::from_slice(bytes, shape, &self.device)?,
            false => Tensor::from_vec(f32_values(bytes).collect::<Vec<f32>>(), shape, &Device::Cpu)?
                .to_dtype(target.dtype())?
                .to_device(&self.device)?,
        };
        let entry = &mut self.entries[index];
        match (entry.state.get_mut(kind), &entry.values) {
            (Some(kept), _) => *kept = written,
            (None, Values::Plain(values)) => values.set(&written)?,
            (None, _) => bail!("{} is packed", self.specs[index].name),
        }
        Ok(())
    }
}

/// f32 `values` as they lie on `device`, and there what bf16 does not hold of them.
pub(super) fn placed(
    values: &Tensor,
    spec: &ParameterSpec,
    device: &Device,
) -> Result<(Var, OptimizerState)> {
    let Held::Plain(working) = Held::Plain(values.clone()).on(device, spec)? else {
        bail!("{} is packed", spec.name)
    };
    let mut state = OptimizerState::new();
    if working.dtype() == DType::BF16 && !same_values(&on_host(&working)?, values)? {
        state.insert(MASTER, values.to_device(device)?);
    }
    Ok((Var::from_tensor(&working)?, state))
}

fn same_values(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(host_values(a)?[..] == host_values(b)?[..])
}
