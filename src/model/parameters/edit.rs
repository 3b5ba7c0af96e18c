//! Overwrites values of the store with values of a checkpoint.

use super::Parameters;
use crate::dist::serialization::f32_values;
use crate::ops::cpu::{change, edit_codes};
use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};

impl Parameters {
    /// Overwrites the values of the tensor that [`Self::local_state`] returns. `bytes` are the new values:
    /// little-endian f32, or 8-bit codes.
    ///
    /// # Errors
    /// When the tensor does not exist, or the number of values differs.
    pub fn overwrite(&mut self, index: usize, kind: &str, bytes: &[u8]) -> Result<()> {
        let target = self.local_state(index, kind)?;
        let is_codes = target.dtype() == DType::U8;
        if target.device().is_cpu() {
            match is_codes {
                true => edit_codes(target, |codes| {
                    codes.copy_from_slice(bytes);
                    Ok(())
                }),
                false => change(target, |values| {
                    values.iter_mut().zip(f32_values(bytes)).for_each(|(to, value)| *to = value);
                }),
            }?;
            return Ok(());
        }
        let shape = target.shape().clone();
        let written = match is_codes {
            true => Tensor::from_slice(bytes, shape, self.device())?,
            false => Tensor::from_vec(f32_values(bytes).collect::<Vec<f32>>(), shape, &Device::Cpu)?
                .to_dtype(target.dtype())?
                .to_device(self.device())?,
        };
        match self.entries[index].state.get_mut(kind) {
            Some(kept) => *kept = written,
            // The variable is set in place, because passes track this variable.
            None => Var::from_tensor(self.values(index)?)?.set(&written)?,
        }
        Ok(())
    }
}
