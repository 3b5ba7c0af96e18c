//! The store of the tensors of a model. Each tensor has a name, an index, values, a gradient and optimizer
//! state.

mod edit;
mod shards;

pub use shards::{ShardRequest, state_range};

use super::adapter::Lora;
use super::config::Config;
use super::layers_on_demand::{LayersOnDemand, TensorSource, WeightChange};
use super::matrix::{Adapter, LowRankFactors, ModelTensors};
use super::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use super::storage::{TensorStorage, copy_to_device};
use super::weights::{LayerSource, NamedTensors, VALUE_HEAD, Weights};
use crate::dist::Mesh;
use crate::ops::cpu::{host_values, to_host};
use crate::ops::cuda::SecondStream;
use crate::ops::packed_weights::BlockType;
use crate::ops::parameter::{GradientSink, Parameter};
use crate::ops::product::Precision;
use crate::ops::weight::Weight;
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor, Var};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The optimizer states of one tensor, by name. They are f32 values, or 8-bit codes with their scales.
pub type OptimizerState = BTreeMap<&'static str, Tensor>;

/// The name of the state with the f32 master values of weights that are bf16 in the model.
pub const MASTER: &str = "master";
/// AdamW's first and second moments.
pub const MOMENTS: [&str; 2] = ["first", "second"];
/// AdamW's moments as 8-bit codes; [`BLOCK_STATES`] holds their scales.
pub const CODES: [&str; 2] = ["first_codes", "second_codes"];
/// The names of the states with one value per block of [`crate::dist::SHARD_ALIGNMENT`] elements. These are
/// the scales of 8-bit moments.
pub const BLOCK_STATES: [&str; 2] = ["first_scales", "second_scales"];
/// The `kind` of the working values in [`Parameters::gather`].
pub const VALUES: &str = "values";

/// All tensors of a model, in [`parameter_specs`] order. The tensors of a critic are in [`value_model_specs`]
/// order.
pub struct Parameters {
    config: Config,
    pub specs: Vec<ParameterSpec>,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
    /// The layers, if they are read from disk.
    on_disk: Option<LayersOnDemand>,
    /// The adapter, if the model has one. Its factors are the last tensors.
    adapter: Option<Lora>,
    pub backend: Backend,
}

/// The device, the processes and the precision with which a model computes.
#[derive(Clone)]
pub struct Backend {
    pub device: Device,
    /// All processes of the run.
    pub mesh: Arc<Mesh>,
    /// The precision of dense matmuls on a CPU.
    pub precision: Precision,
}

impl Default for Backend {
    fn default() -> Self {
        Self { device: Device::Cpu, mesh: Mesh::single(), precision: Precision::F32 }
    }
}

/// One tensor of the store.
struct Entry {
    stored: TensorStorage,
    /// The gradient, if the tensor is trained.
    gradient: Option<Tensor>,
    state: OptimizerState,
}

impl Entry {
    fn new(stored: TensorStorage) -> Self {
        Self { stored, gradient: None, state: OptimizerState::new() }
    }
}

impl Parameters {
    /// Builds the store from the tensors of `config` in file order, and places them on `backend`.
    ///
    /// # Errors
    /// When `tensors` fails, when names or sizes differ from those of `config`, or when a device has too
    /// little memory.
    pub fn load(
        config: &Config,
        backend: &Backend,
        tensors: impl IntoIterator<Item = Result<(ParameterSpec, TensorStorage)>>,
    ) -> Result<Self> {
        Self::from_specs(config, parameter_specs(config), backend.clone(), tensors)
    }

    /// Builds a store whose layers stay on disk in `source`. `changes` are applied to each tensor when it is
    /// read. No tensor can be trained.
    ///
    /// # Errors
    /// Errors of [`Self::load`], and when a tensor outside the layers cannot be read.
    pub fn keep_on_disk(
        config: &Config,
        backend: &Backend,
        source: Arc<dyn TensorSource>,
        changes: Vec<WeightChange>,
    ) -> Result<Self> {
        let layers =
            LayersOnDemand { changes, precision: backend.precision, ..LayersOnDemand::new(source, config) };
        let tensors = parameter_specs(config).into_iter().map(|spec| {
            let stored = match spec.layer {
                Some(_) => TensorStorage::on_disk(),
                None => TensorStorage::from_weight(layers.tensor(&spec)?),
            };
            Ok((spec, stored))
        });
        let parameters = Self::load(config, backend, tensors)?;
        Ok(Self { on_disk: Some(layers), ..parameters })
    }

    /// Builds the store of a critic, a model with a value head, as [`Self::load`] does.
    ///
    /// # Errors
    /// Errors of [`Self::load`].
    pub fn with_value_head(
        config: &Config,
        backend: &Backend,
        tensors: impl IntoIterator<Item = Result<(ParameterSpec, TensorStorage)>>,
    ) -> Result<Self> {
        Self::from_specs(config, value_model_specs(config), backend.clone(), tensors)
    }

    fn from_specs(
        config: &Config,
        specs: Vec<ParameterSpec>,
        backend: Backend,
        tensors: impl IntoIterator<Item = Result<(ParameterSpec, TensorStorage)>>,
    ) -> Result<Self> {
        let mut entries = Vec::with_capacity(specs.len());
        for found in tensors {
            let (spec, stored) = found?;
            let expected =
                specs.get(entries.len()).with_context(|| format!("{} is one too many", spec.name))?;
            ensure!(spec == *expected, "tensor {} where {} was expected", spec.name, expected.name);
            entries.push(entry(&spec, stored, &backend)?);
        }
        ensure!(entries.len() == specs.len(), "{} tensors, expected {}", entries.len(), specs.len());
        let index = specs.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        Ok(Self { config: config.clone(), specs, entries, index, on_disk: None, adapter: None, backend })
    }

    /// Returns all processes of the run.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.backend.mesh
    }

    /// Returns the processes that share a copy of the weights with this one.
    pub fn shard_mesh(&self) -> &Arc<Mesh> {
        self.backend.mesh.shard_group()
    }

    /// Returns the device of the model.
    pub fn device(&self) -> &Device {
        &self.backend.device
    }

    /// Adds an adapter. `values` are the values of its factors, in the order of [`Lora::factor_specs`]. No
    /// tensor is trained until [`Self::set_trainable`] is called.
    ///
    /// # Errors
    /// When the model has an adapter already, or the values do not match the factors.
    pub fn attach_adapter(&mut self, lora: Lora, values: Vec<Vec<f32>>) -> Result<()> {
        ensure!(self.adapter.is_none(), "the model has an adapter already");
        let specs = lora.factor_specs(&self.specs)?;
        ensure!(specs.len() == values.len(), "{} factors, expected {}", values.len(), specs.len());
        let base = self.specs.len();
        for entry in &mut self.entries[..base] {
            (entry.gradient, entry.state) = (None, OptimizerState::new());
        }
        for (spec, values) in specs.iter().zip(values) {
            self.index.insert(spec.name.clone(), self.entries.len());
            self.entries.push(entry(spec, TensorStorage::variable(spec, values)?, &self.backend)?);
        }
        self.specs.extend(specs);
        self.adapter = Some(lora);
        Ok(())
    }

    /// Returns the adapter, if the model has one.
    pub fn adapter(&self) -> Option<&Lora> {
        self.adapter.as_ref()
    }

    /// Returns a store without the adapter. It shares all values, and none of its tensors is trained.
    pub fn without_adapter(&self) -> Self {
        let base = self.specs.iter().position(|spec| spec.role == TensorRole::AdapterFactor);
        let specs = self.specs[..base.unwrap_or(self.len())].to_vec();
        let entries = &self.entries[..specs.len()];
        Self {
            config: self.config.clone(),
            entries: entries.iter().map(|entry| Entry::new(entry.stored.clone())).collect(),
            index: specs.iter().enumerate().map(|(index, spec)| (spec.name.clone(), index)).collect(),
            specs,
            on_disk: self.on_disk.clone(),
            adapter: None,
            backend: self.backend.clone(),
        }
    }

    /// Returns a store with the current weights, which later updates do not change. It copies the trained
    /// tensors and shares the others. None of its tensors is trained. On a GPU, `second` is the stream that
    /// uses the store.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn snapshot(&self, second: Option<&SecondStream>) -> Result<Self> {
        let copy = |(entry, spec): (&Entry, &ParameterSpec)| -> Result<Entry> {
            let is_trained = entry.gradient.is_some();
            let weight = entry.stored.weight(spec);
            let weight = match (weight, second) {
                (Ok(weight), Some(second)) if is_trained => {
                    weight.with_device_tensor(|values| second.copy(values))
                }
                (Ok(weight), Some(second)) => weight.with_device_tensor(|values| second.share(values)),
                (Ok(Weight::Dense(dense)), None) if is_trained => {
                    dense.values().copy().map(|values| Weight::Dense(dense.with_values(&values)))
                }
                _ => return Ok(Entry::new(entry.stored.clone())),
            };
            Ok(Entry::new(entry.stored.with_weight(weight?)))
        };
        let entries = || self.entries.iter().zip(&self.specs).map(copy).collect::<Result<_>>();
        let device = second.map_or(self.device(), SecondStream::device).clone();
        Ok(Self {
            config: self.config.clone(),
            specs: self.specs.clone(),
            entries: if let Some(second) = second { second.hand_over(entries)? } else { entries()? },
            index: self.index.clone(),
            on_disk: self.on_disk.clone(),
            adapter: self.adapter.clone(),
            backend: Backend { device, ..self.backend.clone() },
        })
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the memory of all tensors, in bytes, as if no tensor were sharded or on disk.
    pub fn bytes(&self) -> u64 {
        let of = |(entry, spec): (&Entry, &ParameterSpec)| match (entry.stored.weight(spec), &self.on_disk) {
            (Ok(Weight::Dense(dense)), _) => {
                (spec.element_count() * dense.values().dtype().size_in_bytes()) as u64
            }
            (Ok(packed), _) => packed.bytes(),
            (Err(_), Some(layers)) => layers.source.resident_bytes(spec),
            (Err(_), None) => 0,
        };
        self.entries.iter().zip(&self.specs).map(of).sum()
    }

    /// Returns the types of GGUF blocks that stay packed in memory, in order.
    pub fn block_types(&self) -> BTreeSet<BlockType> {
        let weights =
            self.entries.iter().zip(&self.specs).filter_map(|(of, spec)| of.stored.weight(spec).ok());
        weights.filter_map(|weight| weight.block_type()).collect()
    }

    /// Returns the index of the tensor named `name`.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// Returns the index of the tensor `name`.
    ///
    /// # Errors
    /// When there is no such tensor.
    fn index_or_error(&self, name: &str) -> Result<usize> {
        self.index_of(name).with_context(|| format!("no tensor {name}"))
    }

    /// Returns the trainable values of tensor `index`, in working precision. For a sharded tensor, returns
    /// the flat shard of this rank.
    ///
    /// # Errors
    /// When the tensor cannot be trained: it is packed or on disk.
    pub fn values(&self, index: usize) -> Result<&Tensor> {
        let spec = &self.specs[index];
        match self.entries[index].stored.weight(spec)? {
            Weight::Dense(dense) if dense.values().is_variable() => Ok(dense.values()),
            _ => bail!("{} cannot be trained", spec.name),
        }
    }

    /// Returns whether tensor `index` is sharded and dense.
    pub fn is_sharded(&self, index: usize) -> bool {
        let stored = &self.entries[index].stored;
        stored.is_sharded && stored.is_variable()
    }

    /// Returns tensor `index`, so that another store can share it. Returns `None` if the tensor is on disk or
    /// can be trained.
    pub fn share(&self, index: usize) -> Option<TensorStorage> {
        let stored = &self.entries[index].stored;
        (!stored.is_variable() && !stored.is_on_disk()).then(|| stored.clone())
    }

    /// Returns the whole weight of tensor `index`, without gradient. A sharded tensor is gathered, so every
    /// rank must call this method.
    ///
    /// # Errors
    /// When the tensor is on disk, or a rank does not respond in time.
    pub fn weight(&self, index: usize) -> Result<Weight> {
        let (spec, stored) = (&self.specs[index], &self.entries[index].stored);
        let weight = match stored.is_sharded {
            false => stored.whole_weight(spec)?.clone(),
            true => copy_to_device(&self.gather_weight(index)?, self.device(), spec)?,
        };
        Ok(weight.without_gradient())
    }

    /// Returns the weight of the tensor of `spec`, from memory or disk.
    ///
    /// # Errors
    /// When there is no such tensor; [`crate::error::BadInput`] when a file changed since it was opened.
    pub fn read_weight(&self, spec: &ParameterSpec) -> Result<Weight> {
        let index = self.index_or_error(&spec.name)?;
        match &self.on_disk {
            Some(layers) if self.entries[index].stored.is_on_disk() => layers.tensor(spec),
            _ => self.weight(index),
        }
    }

    /// Returns the values of tensor `index` in full precision: the master values of the optimizer, or the
    /// working values if there are no master values.
    ///
    /// # Errors
    /// When the tensor cannot be trained.
    pub fn master(&self, index: usize) -> Result<&Tensor> {
        if let Some(master) = self.entries[index].state.get(MASTER) { Ok(master) } else { self.values(index) }
    }

    /// Makes tensor `i` trainable if `trained[i]` is true, and frozen otherwise. Sets the gradients of
    /// trainable tensors to 0. `trained` has [`Self::len`] values. If there are several processes, each then
    /// keeps only its shard of the trainable tensors.
    ///
    /// # Errors
    /// When a tensor cannot be trained, or memory runs out.
    pub fn set_trainable(&mut self, trained: &[bool]) -> Result<()> {
        ensure!(trained.len() == self.len(), "{} marks for {} tensors", trained.len(), self.len());
        let mesh = self.shard_mesh().clone();
        for (index, &is_trained) in trained.iter().enumerate() {
            if is_trained && mesh.ranks() > 1 && !self.entries[index].stored.is_sharded {
                let master = to_host(self.master(index)?)?;
                let values = host_values(&master)?;
                let own = self.specs[index].shard_range(index, mesh.rank(), mesh.sharding());
                let shard = TensorStorage::from_shard(values[own].to_vec())?;
                self.entries[index] = entry(&self.specs[index], shard, &self.backend)?;
            }
            let zeros = |values: &Tensor| Tensor::zeros(values.shape(), DType::F32, values.device());
            let gradient = if is_trained { Some(zeros(self.values(index)?)?) } else { None };
            let entry = &mut self.entries[index];
            entry.gradient = gradient;
            entry.state.retain(|name, _| is_trained && *name == MASTER);
        }
        Ok(())
    }

    /// Returns the number of uses of tensor `index` in a pass: 2 for a tied embedding, which is also the LM
    /// head, otherwise 1.
    pub fn use_count(&self, index: usize) -> usize {
        let is_head_too = self.config.tie_word_embeddings && !self.is_critic();
        if is_head_too && self.specs[index].role == TensorRole::Embedding { 2 } else { 1 }
    }

    /// Returns whether the model has a value head instead of the LM head.
    pub fn is_critic(&self) -> bool {
        self.index.contains_key(VALUE_HEAD)
    }

    /// Returns whether tensor `index` is trained.
    pub fn is_trained(&self, index: usize) -> bool {
        self.entries[index].gradient.is_some()
    }

    /// Returns the gradient of tensor `index`, if the tensor is trained. It is the sum over the last batch
    /// that [`crate::learner`] ran. For a sharded tensor, returns the shard of this rank.
    pub fn gradient(&self, index: usize) -> Option<&Tensor> {
        self.entries[index].gradient.as_ref()
    }

    /// Returns all gradients, in order.
    pub fn gradients(&self) -> impl Iterator<Item = Option<&Tensor>> {
        self.entries.iter().map(|entry| entry.gradient.as_ref())
    }

    /// Returns the optimizer state of tensor `index`.
    pub fn state(&self, index: usize) -> &OptimizerState {
        &self.entries[index].state
    }

    /// Sets the optimizer state of tensor `index`.
    pub fn set_state(&mut self, index: usize, state: OptimizerState) {
        self.entries[index].state = state;
    }

    /// Returns the whole weights without gradients, for rollout and comparisons. `change`, if given, is
    /// applied to each tensor. Every rank gets all weights.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing, or `change` fails.
    pub fn frozen_weights(&self, change: Option<&WeightChange>) -> Result<Weights> {
        if let Some(layers) = &self.on_disk {
            let mut layers = layers.clone();
            layers.changes.extend(change.cloned());
            return self.weights(Some(layers), &|index| self.changed_weight(index, change));
        }
        let base = self.specs.iter().enumerate().filter(|(_, spec)| spec.role != TensorRole::AdapterFactor);
        let base = base.map(|(index, spec)| Ok((spec.name.clone(), self.changed_weight(index, change)?)));
        let base = base.collect::<Result<Vec<_>>>()?;
        let adapters = self.adapters(&|name| self.changed_weight(self.index_or_error(name)?, change))?;
        let tensors = NamedTensors::new(base, adapters);
        Weights::in_memory(&self.config, self.is_critic(), self.bytes(), tensors)
    }

    /// Returns the weights as [`Self::frozen_weights`] does, but applies `change` to a layer when a pass
    /// reaches the layer. Changed layers are dense, so memory holds one changed layer at a time.
    ///
    /// # Errors
    /// When `change` fails, or a tensor outside the layers cannot be read.
    pub fn on_demand_weights(&self, change: WeightChange) -> Result<Weights> {
        let mut layers = match &self.on_disk {
            Some(layers) => layers.clone(),
            None => {
                let of_layers = self.specs.iter().enumerate().filter(|(_, spec)| spec.layer.is_some());
                let weights = of_layers.map(|(index, spec)| Ok((spec.name.clone(), self.weight(index)?)));
                let source = Arc::new(weights.collect::<Result<HashMap<String, Weight>>>()?);
                let precision = self.backend.precision;
                LayersOnDemand { precision, ..LayersOnDemand::new(source, &self.config) }
            }
        };
        layers.changes.push(change.clone());
        self.weights(Some(layers), &|index| self.changed_weight(index, Some(&change)))
    }

    /// Returns the weights for passes that all ranks run together. `sink`, if given, gets the gradients of
    /// trained tensors. Sharded layers are gathered when a pass reaches them, so every rank must run the same
    /// passes.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn pass_weights(&self, sink: Option<&Arc<dyn GradientSink>>) -> Result<Weights> {
        if self.entries.iter().any(|entry| entry.stored.is_sharded) {
            return self.layer_gathered_weights(sink);
        }
        self.weights(self.on_disk.clone(), &|index| match sink {
            Some(sink) if self.is_trained(index) => {
                let variable = Parameter::with_gradient_sink(self.values(index)?, sink.clone(), index);
                Ok(Weight::Dense(variable.with_precision(self.backend.precision)))
            }
            _ => self.weight(index),
        })
    }

    /// Returns the weight of tensor `index` for sampling: with `change` applied, and with bf16 copies.
    fn changed_weight(&self, index: usize, change: Option<&WeightChange>) -> Result<Weight> {
        let weight = self.weight(index)?;
        match change {
            None => Ok(weight.with_bf16_copies()),
            Some(change) => self.apply_change(change, &self.specs[index], weight),
        }
    }

    fn apply_change(&self, change: &WeightChange, spec: &ParameterSpec, weight: Weight) -> Result<Weight> {
        let changed = change(spec, weight)?.without_gradient();
        Ok(changed.with_precision(self.backend.precision).with_bf16_copies())
    }

    fn weights(
        &self,
        layers: Option<LayersOnDemand>,
        weight: &dyn Fn(usize) -> Result<Weight>,
    ) -> Result<Weights> {
        let find = |name: &str| weight(self.index_or_error(name)?);
        let adapters = &self.adapters(&find)?;
        let layers = layers.map(|layers| -> Arc<dyn LayerSource> {
            Arc::new(LayersOnDemand { adapters: adapters.clone(), ..layers })
        });
        let tensors = ModelTensors { find: &find, adapters, expert_parallel: None };
        Weights::new(&self.config, self.is_critic(), self.bytes(), layers, tensors)
    }

    /// Returns the adapters by the names of the adapted matrices.
    fn adapters(&self, find: &dyn Fn(&str) -> Result<Weight>) -> Result<HashMap<String, Adapter>> {
        let tensors = ModelTensors { find, adapters: &HashMap::new(), expert_parallel: None };
        let of = |(lora, target): (&Lora, &String)| {
            let [a, b] = Lora::factor_names(target);
            let (a, b) = (tensors.vector(&a)?, tensors.vector(&b)?);
            Ok((target.clone(), Adapter::Whole(LowRankFactors { a, b, scale: lora.scale() })))
        };
        self.adapter.iter().flat_map(|lora| lora.targets.iter().map(move |t| (lora, t))).map(of).collect()
    }
}

/// Returns the entry of `stored` on `backend`. On a GPU matrices become bf16. If this rounds values, the
/// exact values become the state [`MASTER`].
fn entry(spec: &ParameterSpec, stored: TensorStorage, backend: &Backend) -> Result<Entry> {
    if stored.is_on_disk() {
        ensure!(backend.device.is_cpu(), "{} is on disk", spec.name);
        return Ok(Entry::new(stored));
    }
    let weight = stored.weight(spec)?.clone().with_precision(backend.precision);
    if backend.device.is_cpu() {
        return Ok(Entry::new(stored.with_weight(weight)));
    }
    let working = copy_to_device(&weight, &backend.device, spec)?;
    let (Weight::Dense(values), Weight::Dense(placed), true) = (&weight, &working, weight.is_variable())
    else {
        return Ok(Entry::new(stored.with_weight(working.with_precision(backend.precision))));
    };
    let (values, placed) = (values.values(), placed.values());
    let variable =
        Parameter::variable(Var::from_tensor(placed)?.as_tensor()).with_precision(backend.precision);
    let mut entry = Entry::new(stored.with_weight(Weight::Dense(variable)));
    if placed.dtype() == DType::BF16 && host_values(&to_host(placed)?)?[..] != host_values(values)?[..] {
        entry.state.insert(MASTER, values.to_device(&backend.device)?);
    }
    Ok(entry)
}
