//! What several processes hold together of the store: weights gathered as a walk takes them, and whole tensors for a file.

use super::{BLOCK_STATES, MASTER, Parameters, VALUES, Values};
use crate::dist::wire::f32_bytes;
use crate::dist::wire::f32_values;
use crate::dist::{CUT, Mesh, in_order, piece};
use crate::model::expert_ranks::{ExpertRanks, experts_of};
use crate::model::held::{Held, PackedPiece, Weight};
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::pieces::{self, GatheredLayers, Part, PartHeld, Uses};
use crate::model::rounding::WeightRounding;
use crate::model::weights::{Layers, VALUE_HEAD, Weights};
use crate::ops::cpu::{host_codes, host_values, on_host};
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

impl Parameters {
    /// Tensor `index` as a gathering sees it.
    fn part(&self, index: usize) -> Result<Part> {
        let held = match &self.entries[index].values {
            Values::Piece(values) => PartHeld::Piece(values.as_tensor().clone()),
            Values::PackedPiece(piece) => PartHeld::Packed(piece.clone()),
            _ => PartHeld::Whole(self.of_place(index)?),
        };
        Ok(Part { index, spec: self.specs[index].clone(), held, learns: self.learns(index) })
    }

    /// The weights, rounded, for walks that all ranks make together, one at a time: everything is gathered at once but the experts, of
    /// which each rank has its own, their adapters with them. Experts that every rank has whole, packed, need no others.
    ///
    /// # Errors
    /// When a rank does not come in time, and those of [`WeightRounding::apply`].
    pub fn by_expert(&self, rounding: WeightRounding) -> Result<Weights> {
        let is_here =
            |(index, spec): (usize, &ParameterSpec)| spec.is_of_experts() && self.packed(index).is_some();
        if self.specs.iter().enumerate().any(is_here) {
            return self.rounded(&rounding);
        }
        let config = &self.config;
        let ranks = ExpertRanks::new(self.mesh.clone(), config.num_local_experts, config.hidden_size);
        let weights = self.weights(None, &|index| {
            let spec = &self.specs[index];
            let (spec, held) = match spec.is_per_expert() {
                true => self.own_experts(index, &ranks)?,
                false => (spec.clone(), self.of_place(index)?),
            };
            Ok(rounding.apply(&spec, held)?.frozen())
        })?;
        weights.over_ranks(&Arc::new(ranks))
    }

    /// This rank's experts of tensor `index`, for which every rank must ask.
    fn own_experts(&self, index: usize, ranks: &ExpertRanks) -> Result<(ParameterSpec, Held)> {
        let part = self.part(index)?;
        let (experts, own) = (self.config.num_local_experts, ranks.own());
        let spec = part.spec.of_experts(own.len());
        // Of a tensor of so many bytes those that a rank's experts take.
        let of = |bytes: usize| {
            move |rank: usize| {
                let own = experts_of(experts, rank, self.mesh.ranks());
                own.start * (bytes / experts)..own.end * (bytes / experts)
            }
        };
        let held = match &part.held {
            PartHeld::Whole(held) => held.experts(own)?,
            PartHeld::Piece(values) => {
                let bytes = spec_bytes(&part.spec);
                let values = exchanged(&self.mesh, &part, f32_bytes(&host_values(values)?), of(bytes))?;
                let values: Vec<f32> = f32_values(&values).collect();
                Held::Plain(Tensor::from_vec(values, spec.working_shape(), &Device::Cpu)?)
            }
            PartHeld::Packed(piece) => {
                let bytes = exchanged(&self.mesh, &part, piece.bytes(), of(piece.whole_bytes()))?;
                piece.made_of_experts(own.len(), bytes)
            }
        };
        Ok((spec, held))
    }

    /// The weights with layers that are gathered in turn. What lies outside the layers, and the adapters, is gathered at once.
    pub(super) fn gathered(&self, uses: Uses) -> Result<Weights> {
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
        let found = outside.iter().zip(held).map(|(part, held)| Ok((part.index, uses.weight(part, held)?)));
        let found: HashMap<usize, Weight> = found.collect::<Result<_>>()?;
        let weight = |index: usize| {
            found.get(&index).cloned().with_context(|| format!("{} is in a layer", self.specs[index].name))
        };
        let adapters = self.adapters(&weight)?;
        let (mesh, config) = (self.mesh.clone(), self.config.clone());
        let layers = GatheredLayers::new(mesh, config, layers, adapters, uses);
        let layers = Some(Layers::Gathered(Arc::new(layers)));
        let find = |name: &str| weight(self.place(name)?);
        let is_critic = self.index.contains_key(VALUE_HEAD);
        Ok(self.multiplied(Weights::new(&self.config, is_critic, self.bytes(), layers, &find)?))
    }

    /// What the optimizer keeps of tensor `index` under `kind`, its [`MASTER`] or its [`VALUES`]: all of it, gathered where it is
    /// cut, and then flat but for the values; on the host. Every rank must ask, or the leader, while the others [`Self::answer`].
    ///
    /// # Errors
    /// When there is no such thing, or a rank does not come in time.
    pub fn whole(&self, index: usize, kind: &str) -> Result<Tensor> {
        if let Values::PackedPiece(piece) = &self.entries[index].values {
            self.ask_for(index, kind)?;
            return self.gathered_packed(index, piece)?.decoded(&self.specs[index]);
        }
        let own = &on_host(self.own(index, kind)?)?;
        if !self.is_cut(index) {
            return Ok(own.clone());
        }
        self.ask_for(index, kind)?;
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

    fn ask_for(&self, index: usize, kind: &str) -> Result<()> {
        let of_critic = self.index.contains_key(VALUE_HEAD);
        self.mesh.ask(Asked::Tensor { of_critic, index, kind: kind.to_owned() })
    }

    /// Packed tensor `index`, of which every rank has a `piece` and must ask.
    pub(super) fn gathered_packed(&self, index: usize, piece: &PackedPiece) -> Result<Held> {
        let what = format!("all of {}", self.specs[index].name);
        let parts = self.mesh.all_gather(&what, piece.bytes().to_vec())?;
        let bytes = in_order(index, parts.len()).map(|rank| &parts[rank][..]).collect::<Vec<_>>().concat();
        Ok(piece.made_whole(bytes))
    }

    /// The type of what is kept of tensor `index` under `kind`, and how many values it has for the whole tensor.
    ///
    /// # Errors
    /// When there is no such thing.
    pub fn kept(&self, index: usize, kind: &str) -> Result<(DType, usize)> {
        let values = self.specs[index].element_count();
        let length = if BLOCK_STATES.contains(&kind) { values.div_ceil(CUT) } else { values };
        let dtype = self.own(index, kind)?.dtype();
        // A GPU's bf16 is f32 on the host.
        Ok((if dtype == DType::U8 { dtype } else { DType::F32 }, length))
    }

    /// What is here of it.
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
    /// where it is not cut.
    pub fn own_part(&self, index: usize, kind: &str, length: usize) -> Range<usize> {
        if !self.is_cut(index) {
            return 0..length;
        }
        self.part_of(index, kind, self.mesh.rank(), self.mesh.ranks())
    }

    /// Those that `rank` of `ranks` holds of a tensor that is cut.
    pub fn part_of(&self, index: usize, kind: &str, rank: usize, ranks: usize) -> Range<usize> {
        let own = piece(self.specs[index].element_count(), index, rank, ranks);
        let by = if BLOCK_STATES.contains(&kind) { CUT } else { 1 };
        own.start.div_ceil(by)..own.end.div_ceil(by)
    }
}

/// Bytes of `part` after an exchange: `own` are this rank's, and rank r then has those of the range `of(r)`.
fn exchanged(mesh: &Mesh, part: &Part, own: &[u8], of: impl Fn(usize) -> Range<usize>) -> Result<Vec<u8>> {
    let common = |a: &Range<usize>, b: &Range<usize>| {
        let start = a.start.max(b.start);
        start..a.end.min(b.end).max(start)
    };
    let (rank, ranks) = (mesh.rank(), mesh.ranks());
    let (held, wanted) = (part.bytes_of(mesh, rank), of(rank));
    let parts = (0..ranks).map(|to| {
        let sent = common(&held, &of(to));
        let sent = if sent.is_empty() { 0..0 } else { sent.start - held.start..sent.end - held.start };
        Arc::new(own[sent].to_vec())
    });
    let comes = |from: usize| common(&part.bytes_of(mesh, from), &wanted);
    let lengths: Vec<usize> = (0..ranks).map(|from| comes(from).len()).collect();
    let came =
        mesh.start(&format!("experts of {}", part.spec.name), &mesh.everyone(), parts.collect(), &lengths)?;
    let came = came.wait()?;
    Ok(in_order(part.index, ranks).map(|from| &came[from][..]).collect::<Vec<_>>().concat())
}

fn spec_bytes(spec: &ParameterSpec) -> usize {
    spec.element_count() * size_of::<f32>()
}

/// What the leader asks the other ranks for while it writes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Asked {
    /// Their pieces of a tensor.
    Tensor { of_critic: bool, index: usize, kind: String },
    /// Their own file in `folder`, of the name that `stem` begins.
    File { folder: PathBuf, stem: String, of_critic: bool },
}
