//! What several processes hold together of the store: weights gathered as a walk takes them, and whole tensors for a file.

use super::{BLOCK_STATES, MASTER, Parameters, VALUES, Values};
use crate::dist::wire::f32_bytes;
use crate::dist::{CUT, in_order, piece};
use crate::model::held::Weight;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::pieces::{self, GatheredLayers, Part, PartHeld};
use crate::model::tensor_file::f32_values;
use crate::model::weights::{Layers, VALUE_HEAD, Weights};
use crate::ops::cpu::{host_codes, host_values};
use crate::ops::parameter::GradientSink;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

impl Parameters {
    /// Tensor `index` as a gathering sees it.
    fn part(&self, index: usize) -> Result<Part> {
        let held = match &self.entries[index].values {
            Values::Piece(values) => PartHeld::Piece(values.as_tensor().clone()),
            _ => PartHeld::Whole(self.of_place(index)?),
        };
        Ok(Part::new(index, &self.specs[index], held, self.learns(index)))
    }

    /// The weights with layers that are gathered in turn. What lies outside the layers, and the adapters, is gathered at once.
    pub(super) fn gathered(&self, sink: Option<&Arc<dyn GradientSink>>) -> Result<Weights> {
        let is_factor = |spec: &ParameterSpec| spec.role == TensorRole::AdapterFactor;
        let mut layers: Vec<Vec<Part>> = vec![vec![]; self.config.num_hidden_layers];
        let mut outside = vec![];
        for (index, spec) in self.specs.iter().enumerate() {
            match spec.layer {
                Some(layer) if !is_factor(spec) => layers[layer].push(self.part(index)?),
                _ => outside.push(self.part(index)?),
            }
        }
        let held = pieces::finish(&self.mesh, &outside, pieces::start(&self.mesh, "weights", &outside)?)?;
        let found =
            outside.iter().zip(held).map(|(part, held)| Ok((part.index, pieces::weight(part, held, sink)?)));
        let found: HashMap<usize, Weight> = found.collect::<Result<_>>()?;
        let weight = |index: usize| {
            found.get(&index).cloned().with_context(|| format!("{} is in a layer", self.specs[index].name))
        };
        let adapters = self.adapters(&weight)?;
        let (mesh, sink) = (self.mesh.clone(), sink.cloned());
        let layers = GatheredLayers::new(mesh, self.config.clone(), layers, adapters, sink);
        let layers = Some(Layers::Gathered(Arc::new(layers)));
        let find = |name: &str| weight(self.place(name)?);
        Weights::new(&self.config, self.index.contains_key(VALUE_HEAD), self.bytes(), layers, &find)
    }

    /// What the optimizer keeps of tensor `index` under `kind`, its [`MASTER`] or its [`VALUES`]: all of it, gathered where it is
    /// cut, and then flat but for the values. Every rank must ask, or the leader, while the others [`Self::answer`].
    ///
    /// # Errors
    /// When there is no such thing, or a rank does not come in time.
    pub fn whole(&self, index: usize, kind: &str) -> Result<Tensor> {
        let own = self.own(index, kind)?;
        if !self.is_cut(index) {
            return Ok(own.clone());
        }
        self.mesh.ask(Asked {
            of_critic: self.index.contains_key(VALUE_HEAD),
            index,
            kind: kind.to_owned(),
        })?;
        let is_codes = own.dtype() == DType::U8;
        let bytes = if is_codes { host_codes(own)?.to_vec() } else { f32_bytes(&host_values(own)?).to_vec() };
        let parts = self.mesh.all_gather(&format!("all of {}", self.specs[index].name), bytes)?;
        let bytes = in_order(index, parts.len()).map(|rank| &parts[rank][..]).collect::<Vec<_>>().concat();
        if is_codes {
            let count = bytes.len();
            return Ok(Tensor::from_vec(bytes, count, &Device::Cpu)?);
        }
        let values: Vec<f32> = f32_values(&bytes).collect();
        Ok(match kind {
            VALUES | MASTER => Tensor::from_vec(values, self.specs[index].working_shape(), &Device::Cpu)?,
            _ => {
                let count = values.len();
                Tensor::from_vec(values, count, &Device::Cpu)?
            }
        })
    }

    /// The type of what is kept of tensor `index` under `kind`, and how many values it has for the whole tensor.
    ///
    /// # Errors
    /// When there is no such thing.
    pub fn kept(&self, index: usize, kind: &str) -> Result<(DType, usize)> {
        let values = self.specs[index].element_count();
        let length = if BLOCK_STATES.contains(&kind) { values.div_ceil(CUT) } else { values };
        Ok((self.own(index, kind)?.dtype(), length))
    }

    /// What is here of it.
    fn own(&self, index: usize, kind: &str) -> Result<&Tensor> {
        match kind {
            VALUES => self.values(index),
            MASTER => self.master(index),
            kind => self.state(index).get(kind).with_context(|| format!("the optimizer has no {kind}")),
        }
    }

    /// Gives what the leader asked, of these or of the `critic`'s tensors.
    ///
    /// # Errors
    /// As [`Self::whole`].
    pub fn answer(&self, critic: Option<&Parameters>, asked: &Asked) -> Result<()> {
        let of = if asked.of_critic { critic.unwrap_or(self) } else { self };
        of.whole(asked.index, &asked.kind).map(drop)
    }

    /// Of the values that are kept of tensor `index` under `kind`, `length` for the whole tensor, those that this rank holds: all
    /// where it is not cut.
    pub fn own_part(&self, index: usize, kind: &str, length: usize) -> Range<usize> {
        if !self.is_cut(index) {
            return 0..length;
        }
        let own = piece(self.specs[index].element_count(), index, self.mesh.rank(), self.mesh.ranks());
        let by = if BLOCK_STATES.contains(&kind) { CUT } else { 1 };
        own.start.div_ceil(by)..own.end.div_ceil(by)
    }
}

/// A tensor that the leader asks the other ranks for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Asked {
    of_critic: bool,
    index: usize,
    kind: String,
}
