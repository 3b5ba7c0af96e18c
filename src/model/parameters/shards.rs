//! Sharded tensors: gathers them when a pass reaches their layer, or for writing a file.

use super::{BLOCK_STATES, MASTER, Parameters, VALUES};
use crate::dist::serialization::{f32_bytes, f32_values};
use crate::dist::{SHARD_ALIGNMENT, expert_range};
use crate::model::layers_on_demand::WeightChange;
use crate::model::matrix::ModelTensors;
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::parallel::device_exchange::exchange_shards;
use crate::model::parallel::expert_parallel::ExpertParallel;
use crate::model::parallel::resharding::{ExchangedRanges, reshard};
use crate::model::parallel::sharded_layers::{
    GatherPart, GatherTarget, ShardedLayers, finish_gather, start_gather,
};
use crate::model::weights::Weights;
use crate::ops::cpu::{host_codes, host_values, to_host};
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
    /// Returns tensor `index` for gathering.
    fn part(&self, index: usize) -> GatherPart {
        let stored = self.entries[index].stored.clone();
        GatherPart { index, spec: self.specs[index].clone(), stored, is_trained: self.is_trained(index) }
    }

    /// Returns weights for expert parallelism, with `change` applied to each tensor. Each rank holds its own
    /// experts with their adapters, and all other tensors whole. All ranks run passes together, one at a
    /// time. If every rank already holds whole packed experts, each rank gets all weights instead.
    ///
    /// # Errors
    /// When a rank does not respond in time, or `change` fails.
    pub fn expert_parallel_weights(&self, change: &WeightChange) -> Result<Weights> {
        let is_here = |(index, spec): (usize, &ParameterSpec)| {
            spec.is_expert_parameter() && self.share(index).is_some_and(|stored| !stored.is_sharded)
        };
        if self.specs.iter().enumerate().any(is_here) {
            return self.frozen_weights(Some(change));
        }
        let config = &self.config;
        let ranks = Arc::new(self.expert_parallel());
        let find = |name: &str| {
            let index = self.index_or_error(name)?;
            if !self.specs[index].has_expert_axis() {
                return self.changed_weight(index, Some(change));
            }
            let (spec, weight) = self.own_experts(index, &ranks)?;
            self.apply_change(change, &spec, weight)
        };
        let adapters = &self.adapters(&find)?;
        let tensors = ModelTensors { find: &find, adapters, expert_parallel: Some(&ranks) };
        Weights::new(config, self.is_critic(), self.bytes(), None, tensors)
    }

    /// Returns the placement of experts on ranks.
    fn expert_parallel(&self) -> ExpertParallel {
        ExpertParallel::new(self.shard_mesh().clone(), self.config.num_local_experts, self.config.hidden_size)
    }

    /// Returns the experts of this rank in tensor `index`. Every rank must call this method.
    fn own_experts(&self, index: usize, ranks: &ExpertParallel) -> Result<(ParameterSpec, Weight)> {
        let part = self.part(index);
        let (experts, own) = (self.config.num_local_experts, ranks.local_experts());
        let spec = part.spec.with_expert_count(own.len());
        if !part.stored.is_sharded {
            return Ok((spec, part.stored.whole_weight(&part.spec)?.experts(own)?));
        }
        if self.device().is_cuda() {
            let weight = self.own_experts_on_device(&part, &spec, ranks)?;
            return Ok((spec, weight));
        }
        // Size of one expert, in bytes.
        let expert_bytes = part.stored.exchange_bytes(&part.spec) / experts;
        let bytes = reshard(self.shard_mesh(), &part, |rank| {
            let own = expert_range(experts, rank, self.shard_mesh().ranks());
            own.start * expert_bytes..own.end * expert_bytes
        })?;
        let weight = part.stored.assemble(&spec, bytes)?;
        Ok((spec, weight))
    }

    /// Returns the experts `spec` of this rank from the shards of `part` in the memory of the GPUs.
    fn own_experts_on_device(
        &self,
        part: &GatherPart,
        spec: &ParameterSpec,
        ranks: &ExpertParallel,
    ) -> Result<Weight> {
        let Weight::Dense(own) = part.stored.weight(&part.spec)? else {
            bail!("{}: packed shards are not exchanged between GPUs", part.spec.name)
        };
        let (mesh, count) = (self.shard_mesh(), part.spec.element_count());
        let width = count / self.config.num_local_experts;
        let shard_of = |rank| part.spec.shard_range(part.index, rank, mesh.sharding());
        let experts_of = |rank| {
            let experts = ranks.experts_of(rank);
            experts.start * width..experts.end * width
        };
        let ranges = ExchangedRanges::new(mesh, shard_of, experts_of);
        let name = format!("experts of {}", part.spec.name);
        let shape = spec.working_shape();
        let values = exchange_shards(mesh, &name, own.values(), &ranges.sent, &ranges.lengths, shape)?;
        Ok(Weight::Dense(own.with_values(&values)))
    }

    /// Returns weights whose layers are gathered when a pass reaches them. Adapters and tensors outside the
    /// layers are gathered immediately.
    pub(super) fn layer_gathered_weights(&self, sink: Option<&Arc<dyn GradientSink>>) -> Result<Weights> {
        let target = GatherTarget { sink: sink.cloned(), device: self.device().clone() };
        let mut layers: Vec<Vec<GatherPart>> = vec![vec![]; self.config.num_hidden_layers];
        let (mut experts, mut outside) = (layers.clone(), vec![]);
        let sharding = self.shard_mesh().sharding();
        for (index, spec) in self.specs.iter().enumerate() {
            match spec.layer {
                Some(layer) if self.is_sharded(index) && spec.is_sharded_by_expert(sharding) => {
                    experts[layer].push(self.part(index));
                }
                Some(layer) if spec.role != TensorRole::AdapterFactor => layers[layer].push(self.part(index)),
                _ => outside.push(self.part(index)),
            }
        }
        let mesh = self.shard_mesh();
        let started = start_gather(mesh, "weights", &outside, self.device())?;
        let gathered = finish_gather(mesh, &outside, started)?;
        let weights = outside.iter().zip(gathered).map(|(part, weight)| {
            let weight = target.weight(part, weight)?;
            Ok((part.spec.name.as_str(), weight))
        });
        let weights: HashMap<&str, Weight> = weights.collect::<Result<_>>()?;
        let find = |name: &str| weights.get(name).cloned().with_context(|| format!("{name} is in a layer"));
        let adapters = &self.adapters(&find)?;
        let (mesh, config) = (mesh.clone(), self.config.clone());
        let pending = Mutex::default();
        let by_expert = experts.iter().any(|parts| !parts.is_empty());
        let expert_parallel = by_expert.then(|| Arc::new(self.expert_parallel()));
        let layers = ShardedLayers {
            mesh,
            config,
            layers,
            experts,
            expert_parallel,
            adapters: adapters.clone(),
            target,
            pending,
        };
        let tensors = ModelTensors { find: &find, adapters, expert_parallel: None };
        Weights::new(&self.config, self.is_critic(), self.bytes(), Some(Arc::new(layers)), tensors)
    }

    /// Returns the values of tensor `index` that `kind` names: [`VALUES`], [`MASTER`] or another optimizer
    /// state. A sharded tensor is gathered. The result is in host memory. Gathered optimizer states are flat.
    /// Either every rank calls this method, or rank 0 calls it and the other ranks call [`Self::serve`].
    ///
    /// # Errors
    /// When there is no such tensor, or a rank does not respond in time.
    pub fn gather(&self, index: usize, kind: &str) -> Result<Tensor> {
        let (spec, stored) = (&self.specs[index], &self.entries[index].stored);
        if !stored.is_variable() {
            if stored.is_sharded {
                self.request_shards(index, kind)?;
            }
            return Ok(self.weight(index)?.decode(&spec.working_shape())?);
        }
        let own = &to_host(self.local_state(index, kind)?)?;
        if !stored.is_sharded {
            return Ok(own.clone());
        }
        self.request_shards(index, kind)?;
        let is_codes = own.dtype() == DType::U8;
        let bytes = if is_codes { host_codes(own)?.to_vec() } else { f32_bytes(&host_values(own)?).to_vec() };
        let bytes = self.gather_shards(index, bytes)?;
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

    fn request_shards(&self, index: usize, kind: &str) -> Result<()> {
        self.mesh().request(ShardRequest::Tensor {
            of_critic: self.is_critic(),
            index,
            kind: kind.to_owned(),
        })
    }

    /// Gathers the bytes of the shards of tensor `index`. `own` is the shard of this rank. Every rank must
    /// call this method.
    fn gather_shards(&self, index: usize, own: Vec<u8>) -> Result<Vec<u8>> {
        Ok(self.shard_mesh().all_gather(&format!("shards of {}", self.specs[index].name), own)?.concat())
    }

    /// Gathers the sharded tensor `index`. Every rank must call this method.
    pub(super) fn gather_weight(&self, index: usize) -> Result<Weight> {
        let stored = &self.entries[index].stored;
        if self.device().is_cuda() {
            let (mesh, parts) = (self.shard_mesh(), [self.part(index)]);
            let name = format!("weight {}", parts[0].spec.name);
            let gathered = finish_gather(mesh, &parts, start_gather(mesh, &name, &parts, self.device())?)?;
            return gathered.into_iter().next().context("no weight was gathered");
        }
        if stored.is_variable() {
            return Ok(Weight::dense(&self.gather(index, VALUES)?).with_precision(self.backend.precision));
        }
        let mut own = vec![];
        stored.append_shard(&mut own)?;
        stored.assemble(&self.specs[index], self.gather_shards(index, own)?)
    }

    /// Returns the dtype of the values of tensor `index` that `kind` names, and the number of these values in
    /// the whole tensor. For `kind` see [`Self::gather`].
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn state_shape(&self, index: usize, kind: &str) -> Result<(DType, usize)> {
        let values = self.specs[index].element_count();
        let length = if BLOCK_STATES.contains(&kind) { values.div_ceil(SHARD_ALIGNMENT) } else { values };
        let dtype = self.local_state(index, kind)?.dtype();
        // bf16 values of a GPU become f32 on the host.
        Ok((if dtype == DType::U8 { dtype } else { DType::F32 }, length))
    }

    /// Returns the values of tensor `index` that `kind` names, as far as this rank holds them. For `kind` see
    /// [`Self::gather`].
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn local_state(&self, index: usize, kind: &str) -> Result<&Tensor> {
        match kind {
            VALUES => self.values(index),
            MASTER => self.master(index),
            kind => self.state(index).get(kind).with_context(|| format!("the optimizer has no {kind}")),
        }
    }

    /// Serves a request of rank 0 for a tensor of this store or of `critic`. Ranks of other copies of the
    /// weights do nothing.
    ///
    /// # Errors
    /// Errors of [`Self::gather`].
    pub fn serve(&self, critic: Option<&Parameters>, request: &ShardRequest) -> Result<()> {
        let ShardRequest::Tensor { of_critic, index, kind } = request else {
            bail!("a request for a file reached a store of tensors")
        };
        if !self.mesh().shares_with_rank_zero() {
            return Ok(());
        }
        let store = if *of_critic { critic.unwrap_or(self) } else { self };
        store.gather(*index, kind).map(drop)
    }

    /// Returns the range that the values of [`Self::local_state`] have in the whole tensor. If the tensor is
    /// not sharded, the range is `0..length`.
    pub fn local_range(&self, index: usize, kind: &str, length: usize) -> Range<usize> {
        if !self.is_sharded(index) {
            return 0..length;
        }
        self.range_of_rank(index, kind, self.shard_mesh().rank())
    }

    /// Returns the range of values of a sharded tensor that `rank` holds. `kind` names the values
    /// ([`Self::gather`]).
    fn range_of_rank(&self, index: usize, kind: &str, rank: usize) -> Range<usize> {
        state_range(kind, self.specs[index].shard_range(index, rank, self.shard_mesh().sharding()))
    }
}

/// Returns the range that a range of `values` has in the state `kind`, which has one value per block or per
/// value.
pub fn state_range(kind: &str, values: Range<usize>) -> Range<usize> {
    let by = if BLOCK_STATES.contains(&kind) { SHARD_ALIGNMENT } else { 1 };
    values.start.div_ceil(by)..values.end.div_ceil(by)
}

/// A request of rank 0 to the other ranks while it writes a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ShardRequest {
    /// The shards of a tensor.
    Tensor { of_critic: bool, index: usize, kind: String },
    /// The state file of each rank in `folder`; its name begins with `stem`.
    File { folder: PathBuf, stem: String, of_critic: bool },
}
