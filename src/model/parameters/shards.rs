//! Tensors that several processes hold together: weights gathered as a pass comes to them, and whole tensors for a file.

use super::{BLOCK_STATES, MASTER, Parameters, VALUES};
use crate::dist::wire::{f32_bytes, f32_values};
use crate::dist::{Mesh, SHARD_ALIGNMENT, ranks_in_shard_order, shard_range};
use crate::model::expert_ranks::{ExpertRanks, experts_of};
use crate::model::layers_on_demand::WeightChange;
use crate::model::matrix::Tensors;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::sharded_layers::{Part, ShardedLayers, Uses, finish, start};
use crate::model::weights::Weights;
use crate::ops::cpu::{host_codes, host_values, on_host};
use crate::ops::parameter::GradientSink;
use crate::ops::weight::Weight;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

impl Parameters {
    /// Tensor `index` as a gathering sees it.
    fn part(&self, index: usize) -> Part {
        let stored = self.entries[index].stored.clone();
        Part { index, spec: self.specs[index].clone(), stored, is_trained: self.is_trained(index) }
    }

    /// The weights after `change`, for passes that all ranks make together, one at a time: everything is gathered at once but the
    /// experts, of which each rank has its own, their adapters with them. Experts that every rank has whole, packed, need no others.
    ///
    /// # Errors
    /// When a rank does not come in time, and those of `change`.
    pub fn by_expert(&self, change: &WeightChange) -> Result<Weights> {
        let is_here = |(index, spec): (usize, &ParameterSpec)| {
            spec.is_of_experts() && self.shared(index).is_some_and(|stored| !stored.is_sharded())
        };
        if self.specs.iter().enumerate().any(is_here) {
            return self.frozen(Some(change));
        }
        let (config, precision) = (&self.config, self.backend.precision);
        let ranks =
            Arc::new(ExpertRanks::new(self.mesh().clone(), config.num_local_experts, config.hidden_size));
        let find = |name: &str| {
            let index = self.place(name)?;
            if !self.specs[index].is_per_expert() {
                return self.changed_weight(index, Some(change));
            }
            let (spec, weight) = self.own_experts(index, &ranks)?;
            Ok(change(&spec, weight)?.without_gradient().in_precision(precision))
        };
        let adapters = &self.adapters(&find)?;
        let tensors = Tensors { find: &find, adapters, ranks: Some(&ranks) };
        Weights::new(config, self.is_critic(), self.bytes(), None, tensors)
    }

    /// This rank's experts of tensor `index`, for which every rank must ask.
    fn own_experts(&self, index: usize, ranks: &ExpertRanks) -> Result<(ParameterSpec, Weight)> {
        let part = self.part(index);
        let (experts, own) = (self.config.num_local_experts, ranks.own());
        let spec = part.spec.of_experts(own.len());
        if !part.stored.is_sharded() {
            return Ok((spec, part.stored.whole(&part.spec)?.experts(own)?));
        }
        // Bytes of one expert.
        let one = part.stored.exchanged_bytes(&part.spec) / experts;
        let bytes = exchanged(self.mesh(), &part, |rank| {
            let own = experts_of(experts, rank, self.mesh().ranks());
            own.start * one..own.end * one
        })?;
        let weight = part.stored.assembled(&spec, bytes)?;
        Ok((spec, weight))
    }

    /// The weights with layers that are gathered as a pass comes to them. What lies outside the layers, and the adapters, is gathered
    /// at once.
    pub(super) fn gathered_by_layer(&self, sink: Option<&Arc<dyn GradientSink>>) -> Result<Weights> {
        let uses = Uses { sink: sink.cloned(), device: self.device().clone() };
        let mut layers: Vec<Vec<Part>> = vec![vec![]; self.config.num_hidden_layers];
        let mut outside = vec![];
        for (index, spec) in self.specs.iter().enumerate() {
            match spec.layer {
                Some(layer) if spec.role != TensorRole::AdapterFactor => layers[layer].push(self.part(index)),
                _ => outside.push(self.part(index)),
            }
        }
        let mesh = self.mesh();
        let gathered = finish(mesh, &outside, start(mesh, "weights", &outside)?)?;
        let weights = outside.iter().zip(gathered).map(|(part, weight)| {
            let weight = uses.weight(part, weight)?;
            Ok((part.spec.name.as_str(), weight))
        });
        let weights: HashMap<&str, Weight> = weights.collect::<Result<_>>()?;
        let find = |name: &str| weights.get(name).cloned().with_context(|| format!("{name} is in a layer"));
        let adapters = &self.adapters(&find)?;
        let (mesh, config) = (mesh.clone(), self.config.clone());
        let ahead = Mutex::default();
        let layers = ShardedLayers { mesh, config, layers, adapters: adapters.clone(), uses, ahead };
        let tensors = Tensors { find: &find, adapters, ranks: None };
        Weights::new(&self.config, self.is_critic(), self.bytes(), Some(Arc::new(layers)), tensors)
    }

    /// The whole of tensor `index` under `kind`: its [`MASTER`], its [`VALUES`] or a state of its optimizer. It is on the
    /// host, gathered where it is sharded, and then flat but for the values. Every rank must ask, or the leader, while the others [`Self::answer`].
    ///
    /// # Errors
    /// When there is no such thing, or a rank does not come in time.
    pub fn whole(&self, index: usize, kind: &str) -> Result<Tensor> {
        let (spec, stored) = (&self.specs[index], &self.entries[index].stored);
        if !stored.is_variable() {
            if stored.is_sharded() {
                self.ask_for(index, kind)?;
            }
            return Ok(self.weight(index)?.decoded(&spec.working_shape())?);
        }
        let own = &on_host(self.own(index, kind)?)?;
        if !stored.is_sharded() {
            return Ok(own.clone());
        }
        self.ask_for(index, kind)?;
        let is_codes = own.dtype() == DType::U8;
        let bytes = if is_codes { host_codes(own)?.to_vec() } else { f32_bytes(&host_values(own)?).to_vec() };
        let bytes = self.gathered(index, bytes)?;
        if is_codes {
            let count = bytes.len();
            return Ok(Tensor::from_vec(bytes, count, &Device::Cpu)?);
        }
        let values: Vec<f32> = f32_values(&bytes).collect();
        Ok(match kind {
            VALUES | MASTER => Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?,
            _ => {
                let count = values.len();
                Tensor::from_vec(values, count, &Device::Cpu)?
            }
        })
    }

    fn ask_for(&self, index: usize, kind: &str) -> Result<()> {
        self.mesh().request(Asked::Tensor { of_critic: self.is_critic(), index, kind: kind.to_owned() })
    }

    /// The bytes of all ranks' shards of tensor `index`, of which `own` are this rank's; every rank must ask.
    fn gathered(&self, index: usize, own: Vec<u8>) -> Result<Vec<u8>> {
        let parts = self.mesh().all_gather(&format!("all of {}", self.specs[index].name), own)?;
        Ok(ranks_in_shard_order(index, parts.len()).map(|rank| &parts[rank][..]).collect::<Vec<_>>().concat())
    }

    /// The whole of tensor `index`, which is sharded; every rank must ask.
    pub(super) fn gathered_weight(&self, index: usize) -> Result<Weight> {
        let stored = &self.entries[index].stored;
        if stored.is_variable() {
            return Ok(Weight::dense(&self.whole(index, VALUES)?).in_precision(self.backend.precision));
        }
        let mut own = vec![];
        stored.append_shard(&mut own)?;
        stored.assembled(&self.specs[index], self.gathered(index, own)?)
    }

    /// The type of what is kept of tensor `index` under `kind`, and how many values it has for the whole tensor.
    ///
    /// # Errors
    /// When there is no such thing.
    pub fn kept(&self, index: usize, kind: &str) -> Result<(DType, usize)> {
        let values = self.specs[index].element_count();
        let length = if BLOCK_STATES.contains(&kind) { values.div_ceil(SHARD_ALIGNMENT) } else { values };
        let dtype = self.own(index, kind)?.dtype();
        // A GPU's bf16 is f32 on the host.
        Ok((if dtype == DType::U8 { dtype } else { DType::F32 }, length))
    }

    /// The part of tensor `index` under `kind` that is here.
    ///
    /// # Errors
    /// When there is no such thing.
    pub fn own(&self, index: usize, kind: &str) -> Result<&Tensor> {
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
        let Asked::Tensor { of_critic, index, kind } = asked else {
            bail!("a file was asked of one who writes none")
        };
        let of = if *of_critic { critic.unwrap_or(self) } else { self };
        of.whole(*index, kind).map(drop)
    }

    /// Of the values that are kept of tensor `index` under `kind`, `length` for the whole tensor, those that this rank holds: all
    /// where it is not sharded.
    pub fn own_part(&self, index: usize, kind: &str, length: usize) -> Range<usize> {
        if !self.is_sharded(index) {
            return 0..length;
        }
        self.part_of(index, kind, self.mesh().rank(), self.mesh().ranks())
    }

    /// Those that `rank` of `ranks` holds of a tensor that is sharded.
    pub fn part_of(&self, index: usize, kind: &str, rank: usize, ranks: usize) -> Range<usize> {
        let own = shard_range(self.specs[index].element_count(), index, rank, ranks);
        let by = if BLOCK_STATES.contains(&kind) { SHARD_ALIGNMENT } else { 1 };
        own.start.div_ceil(by)..own.end.div_ceil(by)
    }
}

/// Bytes of `part`, a sharded tensor, after an exchange: rank r then has those of the range `of(r)`.
fn exchanged(mesh: &Mesh, part: &Part, of: impl Fn(usize) -> Range<usize>) -> Result<Vec<u8>> {
    let mut own = vec![];
    part.stored.append_shard(&mut own)?;
    let common = |a: &Range<usize>, b: &Range<usize>| {
        let start = a.start.max(b.start);
        start..a.end.min(b.end).max(start)
    };
    let (rank, ranks) = (mesh.rank(), mesh.ranks());
    let shard_of = |rank: usize| part.stored.shard_of(&part.spec, part.index, rank, mesh);
    let (held, wanted) = (shard_of(rank), of(rank));
    let parts = (0..ranks).map(|to| {
        let sent = common(&held, &of(to));
        let sent = if sent.is_empty() { 0..0 } else { sent.start - held.start..sent.end - held.start };
        Arc::new(own[sent].to_vec())
    });
    let comes = |from: usize| common(&shard_of(from), &wanted);
    let lengths: Vec<usize> = (0..ranks).map(|from| comes(from).len()).collect();
    let came =
        mesh.start(&format!("experts of {}", part.spec.name), &mesh.all_ranks(), parts.collect(), &lengths)?;
    let came = came.wait()?;
    Ok(ranks_in_shard_order(part.index, ranks).map(|from| &came[from][..]).collect::<Vec<_>>().concat())
}

/// A request of rank 0 to the other ranks while it writes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Asked {
    /// Their shards of a tensor.
    Tensor { of_critic: bool, index: usize, kind: String },
    /// Their own file in `folder`, of the name that `stem` begins.
    File { folder: PathBuf, stem: String, of_critic: bool },
}
