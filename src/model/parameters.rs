//! The one store of what a model consists of: every tensor under one name and one index, with its values, whether it learns,
//! its gradient and what its optimizer keeps.

mod cut;
mod place;

pub use cut::Asked;

use super::adapter::Lora;
use super::config::Config;
use super::held::{Held, Loaded, PackedPiece, Weight};
use super::layer::Adapter;
use super::layers_in_turn::{LayersInTurn, TensorSource, WeightChange, adapted};
use super::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use super::pieces::Uses;
use super::rounding::WeightRounding;
use super::weights::{Layers, VALUE_HEAD, Weights};
use crate::dist::{Mesh, piece};
use crate::ops::Parameter;
use crate::ops::cpu::{host_values, on_host};
use crate::ops::parameter::GradientSink;
use crate::ops::product::Precision;
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor, Var};
use place::placed;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What an optimizer keeps of a tensor, by name: f32, or codes of 8 bits with their scales.
pub type OptimizerState = BTreeMap<&'static str, Tensor>;

/// The state under which an optimizer keeps the digits that the working weights do not have.
pub const MASTER: &str = "master";
/// The states that have one value a block of [`crate::dist::CUT`] of the tensor's: the scales of 8-bit moments.
pub const BLOCK_STATES: [&str; 2] = ["first_scales", "second_scales"];
/// Names the working values where [`Parameters::whole`] is asked for them.
pub const VALUES: &str = "values";

/// Every tensor of a model, in [`parameter_specs`] order, or in [`value_model_specs`] order for a critic.
pub struct Parameters {
    config: Config,
    pub specs: Vec<ParameterSpec>,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
    /// Where the layers are, for a model that is too large to hold them.
    stored: Option<LayersInTurn>,
    /// Which matrices have an adapter beside them, whose factors are the last tensors.
    adapter: Option<Lora>,
    /// The processes among which what learns is cut.
    mesh: Arc<Mesh>,
    /// Where the model computes.
    device: Device,
    /// How a CPU makes its dense products.
    precision: Precision,
}

/// One tensor.
struct Entry {
    values: Values,
    /// Present where it learns.
    gradient: Option<Tensor>,
    state: OptimizerState,
}

/// A tensor's values.
#[derive(Clone)]
enum Values {
    Plain(Var),
    /// This rank's piece of values that all ranks hold together, flat.
    Piece(Var),
    /// Packed values never learn.
    Packed(Held),
    /// This rank's piece of packed values that all ranks hold together.
    PackedPiece(PackedPiece),
    /// Part of a layer that stays on disk, bytes.
    Stored(u64),
}

impl Parameters {
    /// Takes the f32 values of every tensor of `config` in working layout, one after the other, in file order.
    ///
    /// # Errors
    /// Those of `values`, and when names or sizes are not those of `config`.
    pub fn new(
        config: &Config,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Vec<f32>)>>,
    ) -> Result<Self> {
        Self::of(config, parameter_specs(config), plain(values))
    }

    /// The same of tensors that may be packed.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn loaded(
        config: &Config,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Loaded)>>,
    ) -> Result<Self> {
        Self::of(config, parameter_specs(config), values)
    }

    /// The same with the layers left in `source`, `changes` made of every tensor as it is read; nothing of it can learn.
    ///
    /// # Errors
    /// As [`Self::new`], and those of reading what lies outside the layers.
    pub fn with_stored_layers(
        config: &Config,
        source: Arc<dyn TensorSource>,
        changes: Vec<WeightChange>,
    ) -> Result<Self> {
        let stored = LayersInTurn { source, config: config.clone(), changes, adapters: HashMap::new() };
        let loaded = parameter_specs(config).into_iter().map(|spec| {
            let values = match spec.layer {
                Some(_) => Loaded::Stored(stored.source.resident_bytes(&spec)),
                None => Loaded::Packed(stored.tensor(&spec)?),
            };
            Ok((spec, values))
        });
        let parameters = Self::loaded(config, loaded)?;
        Ok(Self { stored: Some(stored), ..parameters })
    }

    /// The same for a model with a value head.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_value_head(
        config: &Config,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Loaded)>>,
    ) -> Result<Self> {
        Self::of(config, value_model_specs(config), values)
    }

    fn of(
        config: &Config,
        specs: Vec<ParameterSpec>,
        values: impl IntoIterator<Item = Result<(ParameterSpec, Loaded)>>,
    ) -> Result<Self> {
        let mut entries = Vec::with_capacity(specs.len());
        let mut mesh = Mesh::single();
        for found in values {
            let (spec, values) = found?;
            let expected =
                specs.get(entries.len()).with_context(|| format!("{} is one too many", spec.name))?;
            ensure!(spec == *expected, "tensor {} where {} was expected", spec.name, expected.name);
            let values = match values {
                Loaded::Values(values) => {
                    ensure!(values.len() == spec.element_count(), "{}: {} values", spec.name, values.len());
                    Values::Plain(Var::from_vec(values, spec.working_shape(), &Device::Cpu)?)
                }
                Loaded::Piece(shared, values) => {
                    let size =
                        piece(spec.element_count(), entries.len(), shared.rank(), shared.ranks()).len();
                    ensure!(values.len() == size, "{}: a piece of {} values", spec.name, values.len());
                    mesh = shared;
                    Values::Piece(Var::from_vec(values, size, &Device::Cpu)?)
                }
                Loaded::Packed(held) => Values::Packed(held),
                Loaded::PackedPiece(shared, piece) => {
                    mesh = shared;
                    Values::PackedPiece(piece)
                }
                Loaded::Stored(bytes) => Values::Stored(bytes),
            };
            entries.push(Entry { values, gradient: None, state: OptimizerState::new() });
        }
        ensure!(entries.len() == specs.len(), "{} tensors, expected {}", entries.len(), specs.len());
        let index = specs.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        Ok(Self {
            config: config.clone(),
            specs,
            entries,
            index,
            stored: None,
            adapter: None,
            mesh,
            device: Device::Cpu,
            precision: Precision::F32,
        })
    }

    /// The same, whose passes the processes of `mesh` make together: what learns will be cut among them.
    pub fn shared_by(self, mesh: &Arc<Mesh>) -> Self {
        Self { mesh: mesh.clone(), ..self }
    }

    /// The processes among which what learns is cut.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Puts an adapter beside its matrices: the values of its factors, in the order of [`Lora::specs`]. Nothing learns until
    /// [`Self::learn`] says so.
    ///
    /// # Errors
    /// When there is an adapter already, or the values are not its factors'.
    pub fn adapt(&mut self, lora: Lora, values: Vec<Vec<f32>>) -> Result<()> {
        ensure!(self.adapter.is_none(), "the model has an adapter already");
        let specs = lora.specs(&self.specs)?;
        ensure!(specs.len() == values.len(), "{} factors, expected {}", values.len(), specs.len());
        for (spec, values) in specs.iter().zip(values) {
            ensure!(values.len() == spec.element_count(), "{}: {} values", spec.name, values.len());
            self.index.insert(spec.name.clone(), self.entries.len());
            let values = Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?;
            let (values, state) = placed(&values, spec, &self.device)?;
            self.entries.push(Entry { values: Values::Plain(values), gradient: None, state });
        }
        let base = self.specs.len();
        self.specs.extend(specs);
        for entry in &mut self.entries[..base] {
            (entry.gradient, entry.state) = (None, OptimizerState::new());
        }
        self.adapter = Some(lora);
        Ok(())
    }

    /// The adapter beside the model's matrices, if there is one.
    pub fn adapter(&self) -> Option<&Lora> {
        self.adapter.as_ref()
    }

    /// The model without its adapter; no value is copied, and none learns.
    pub fn without_adapter(&self) -> Self {
        let base = self.specs.iter().position(|spec| spec.role == TensorRole::AdapterFactor);
        let specs = self.specs[..base.unwrap_or(self.len())].to_vec();
        let same = |entry: &Entry| Entry {
            values: entry.values.clone(),
            gradient: None,
            state: OptimizerState::new(),
        };
        Self {
            config: self.config.clone(),
            entries: self.entries[..specs.len()].iter().map(same).collect(),
            index: specs.iter().enumerate().map(|(index, spec)| (spec.name.clone(), index)).collect(),
            specs,
            stored: self.stored.clone(),
            adapter: None,
            mesh: self.mesh.clone(),
            device: self.device.clone(),
            precision: self.precision,
        }
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of all values as they lie in memory, or would: also of what is in pieces.
    pub fn bytes(&self) -> u64 {
        let of = |(entry, spec): (&Entry, &ParameterSpec)| match &entry.values {
            Values::Plain(values) | Values::Piece(values) => {
                (spec.element_count() * values.dtype().size_in_bytes()) as u64
            }
            Values::Packed(held) => held.bytes(),
            Values::PackedPiece(piece) => piece.whole_bytes() as u64,
            Values::Stored(bytes) => *bytes,
        };
        self.entries.iter().zip(&self.specs).map(of).sum()
    }

    /// Place of the tensor named `name`.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    /// The values of tensor `index` as the model computes with them; of one that is cut, this rank's, flat.
    ///
    /// # Errors
    /// When they are packed.
    pub fn values(&self, index: usize) -> Result<&Tensor> {
        match &self.entries[index].values {
            Values::Plain(values) | Values::Piece(values) => Ok(values.as_tensor()),
            Values::Packed(_) | Values::PackedPiece(_) | Values::Stored(_) => {
                bail!("{} is packed", self.specs[index].name)
            }
        }
    }

    /// Whether tensor `index` is cut over the ranks, and not packed.
    pub fn is_cut(&self, index: usize) -> bool {
        matches!(self.entries[index].values, Values::Piece(_))
    }

    /// The values of tensor `index`, however they are held; one that is cut is gathered, for which every rank must ask.
    ///
    /// # Errors
    /// When they are on disk, or a rank does not come in time.
    pub fn of_place(&self, index: usize) -> Result<Held> {
        match &self.entries[index].values {
            Values::Plain(values) => Ok(Held::Plain(values.as_tensor().clone())),
            Values::Piece(_) => Held::Plain(self.whole(index, VALUES)?).on(&self.device, &self.specs[index]),
            Values::Packed(held) => Ok(held.clone()),
            Values::PackedPiece(piece) => {
                self.gathered_packed(index, piece)?.on(&self.device, &self.specs[index])
            }
            Values::Stored(_) => bail!("{} is on disk", self.specs[index].name),
        }
    }

    /// The values of tensor `index` where they are packed, and whole on this rank.
    pub fn packed(&self, index: usize) -> Option<Held> {
        match &self.entries[index].values {
            Values::Packed(held) => Some(held.clone()),
            _ => None,
        }
    }

    /// The values of tensor `index` where they are packed, as they lie here, for another store that shares them.
    pub fn shared(&self, index: usize) -> Option<Loaded> {
        match &self.entries[index].values {
            Values::Packed(held) => Some(Loaded::Packed(held.clone())),
            Values::PackedPiece(piece) => Some(Loaded::PackedPiece(self.mesh.clone(), piece.clone())),
            _ => None,
        }
    }

    /// Whether the ranks hold any packed tensor together.
    pub fn has_packed_pieces(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.values, Values::PackedPiece(_)))
    }

    /// Whether the ranks hold any tensor together.
    fn has_pieces(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.values, Values::Piece(_) | Values::PackedPiece(_)))
    }

    /// Those of the tensor of `spec`, wherever they are: in memory or on disk.
    ///
    /// # Errors
    /// When there is none, and [`crate::error::BadInput`] when a file was changed meanwhile.
    pub fn found(&self, spec: &ParameterSpec) -> Result<Held> {
        let index = self.position(&spec.name).with_context(|| format!("no tensor {}", spec.name))?;
        match (&self.entries[index].values, &self.stored) {
            (Values::Stored(_), Some(stored)) => stored.tensor(spec),
            _ => self.of_place(index),
        }
    }

    /// The values with all their digits: what an optimizer keeps of them, or they themselves.
    ///
    /// # Errors
    /// When they are packed.
    pub fn master(&self, index: usize) -> Result<&Tensor> {
        match self.entries[index].state.get(MASTER) {
            Some(master) => Ok(master),
            None => self.values(index),
        }
    }

    /// Makes those tensors learn that `trainable` marks (all of [`Self::len`]); their gradients are 0. Where several processes
    /// share the work each keeps its piece of them from now on.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn learn(&mut self, trainable: &[bool]) -> Result<()> {
        ensure!(trainable.len() == self.len(), "{} marks for {} tensors", trainable.len(), self.len());
        for (index, &learns) in trainable.iter().enumerate() {
            if learns
                && self.mesh.ranks() > 1
                && let Values::Plain(values) = &self.entries[index].values
            {
                let own = piece(values.elem_count(), index, self.mesh.rank(), self.mesh.ranks());
                let values = host_values(&on_host(self.master(index)?)?)?[own.clone()].to_vec();
                self.entries[index].values = Values::Piece(Var::from_vec(values, own.len(), &Device::Cpu)?);
            }
            let zeros = |values: &Tensor| Tensor::zeros(values.shape(), DType::F32, values.device());
            let gradient = if learns { Some(zeros(self.values(index)?)?) } else { None };
            let entry = &mut self.entries[index];
            entry.gradient = gradient;
            let is_piece = matches!(entry.values, Values::Piece(_));
            entry.state.retain(|name, _| learns && !is_piece && *name == MASTER);
        }
        Ok(())
    }

    /// How often a pass uses tensor `index`: twice for an embedding that is the head too.
    pub fn uses(&self, index: usize) -> usize {
        let is_head_too = self.config.tie_word_embeddings && !self.index.contains_key(VALUE_HEAD);
        if is_head_too && self.specs[index].role == TensorRole::Embedding { 2 } else { 1 }
    }

    /// Whether tensor `index` learns.
    pub fn learns(&self, index: usize) -> bool {
        self.entries[index].gradient.is_some()
    }

    /// The gradient of tensor `index`, where it learns: the sum of the last batch that ran through [`crate::train`]; of one that
    /// is cut, this rank's piece.
    pub fn gradient(&self, index: usize) -> Option<&Tensor> {
        self.entries[index].gradient.as_ref()
    }

    /// All gradients, in order.
    pub fn gradients(&self) -> impl Iterator<Item = Option<&Tensor>> {
        self.entries.iter().map(|entry| entry.gradient.as_ref())
    }

    /// What the optimizer keeps of tensor `index`.
    pub fn state(&self, index: usize) -> &OptimizerState {
        &self.entries[index].state
    }

    /// Gives tensor `index` what an optimizer keeps of it.
    pub fn set_state(&mut self, index: usize, state: OptimizerState) {
        self.entries[index].state = state;
    }

    /// The weights without gradients: what rollout and recomputed forwards use.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn frozen(&self) -> Result<Weights> {
        self.weights(self.stored.clone(), &|index| Ok(self.of_place(index)?.frozen()))
    }

    /// The weights after `rounding`, without gradients.
    ///
    /// # Errors
    /// Those of [`WeightRounding::apply`].
    pub fn rounded(&self, rounding: &WeightRounding) -> Result<Weights> {
        let stored = self.stored.clone().map(|mut stored| {
            stored.changes.push(rounding.change());
            stored
        });
        self.weights(stored, &|index| Ok(rounding.apply(&self.specs[index], self.of_place(index)?)?.frozen()))
    }

    /// The weights after `change`, without gradients. Layers are changed as a walk takes them: decoded to be changed, all of
    /// them at once would be many times the packed model.
    ///
    /// # Errors
    /// Those of `change`, of what lies outside the layers.
    pub fn changed(&self, change: WeightChange) -> Result<Weights> {
        let mut layers = match &self.stored {
            Some(stored) => stored.clone(),
            None => {
                let of_layers = self.specs.iter().enumerate().filter(|(_, spec)| spec.layer.is_some());
                let held = of_layers.map(|(index, spec)| Ok((spec.name.clone(), self.of_place(index)?)));
                let source = Arc::new(held.collect::<Result<HashMap<String, Held>>>()?);
                LayersInTurn {
                    source,
                    config: self.config.clone(),
                    changes: vec![],
                    adapters: HashMap::new(),
                }
            }
        };
        layers.changes.push(change.clone());
        self.weights(Some(layers), &|index| Ok(change(&self.specs[index], self.of_place(index)?)?.frozen()))
    }

    /// The weights whose gradients go to `sink`, for those that learn. Layers that are cut are gathered as a walk takes them, so
    /// that every rank must make the same walks.
    ///
    /// # Errors
    /// When a tensor of the architecture is missing.
    pub fn learning(&self, sink: &Arc<dyn GradientSink>) -> Result<Weights> {
        if self.has_pieces() {
            return self.gathered(Uses { sink: Some(sink.clone()), ..Uses::frozen(&self.device) });
        }
        self.weights(self.stored.clone(), &|index| {
            Ok(match self.learns(index) {
                true => Weight::Plain(Parameter::learning(self.values(index)?, sink.clone(), index)),
                false => self.of_place(index)?.frozen(),
            })
        })
    }

    /// The weights without gradients for passes that all ranks make together: as [`Self::frozen`], with layers that are cut
    /// gathered as a walk takes them.
    ///
    /// # Errors
    /// As [`Self::learning`].
    pub fn passing(&self) -> Result<Weights> {
        match self.has_pieces() {
            true => self.gathered(Uses::frozen(&self.device)),
            false => self.frozen(),
        }
    }

    fn weights(
        &self,
        in_turn: Option<LayersInTurn>,
        weight: &dyn Fn(usize) -> Result<Weight>,
    ) -> Result<Weights> {
        let adapters = self.adapters(weight)?;
        let layers = in_turn
            .map(|layers| Layers::InTurn(Box::new(LayersInTurn { adapters: adapters.clone(), ..layers })));
        let find = |name: &str| Ok(adapted(weight(self.place(name)?)?, adapters.get(name)));
        let is_critic = self.index.contains_key(VALUE_HEAD);
        Ok(self.multiplied(Weights::new(&self.config, is_critic, self.bytes(), layers, &find)?))
    }

    fn place(&self, name: &str) -> Result<usize> {
        self.position(name).with_context(|| format!("no tensor {name}"))
    }

    /// The adapters of all matrices that have one, by the matrix's name.
    fn adapters(&self, weight: &dyn Fn(usize) -> Result<Weight>) -> Result<HashMap<String, Adapter>> {
        let mut adapters = HashMap::new();
        for (lora, target) in self.adapter.iter().flat_map(|lora| lora.targets.iter().map(move |t| (lora, t)))
        {
            let [a, b] = Lora::factors(target);
            let factor = |name: &str| weight(self.place(name)?)?.parameter();
            adapters.insert(target.clone(), Adapter { a: factor(&a)?, b: factor(&b)?, scale: lora.scale() });
        }
        Ok(adapters)
    }
}

/// Values that may learn.
fn plain(
    values: impl IntoIterator<Item = Result<(ParameterSpec, Vec<f32>)>>,
) -> impl Iterator<Item = Result<(ParameterSpec, Loaded)>> {
    values.into_iter().map(|found| {
        let (spec, values) = found?;
        Ok((spec, Loaded::Values(values)))
    })
}
