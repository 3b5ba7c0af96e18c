//! How the forward asks for weights, and the weights of a whole model: in this process's memory, or made a layer at a
//! time.

use super::config::Config;
use super::expert_ranks::ExpertRanks;
use super::held::{Embedding, Weight};
use super::layer::{FeedForward, Layer, Projection};
use super::layers_in_turn::LayersInTurn;
use super::names::EMBEDDING;
use super::pieces::GatheredLayers;
use crate::dist::Mesh;
use crate::ops::Parameter;
use crate::ops::product::Precision;
use anyhow::{Context, Result, bail};
use candle_core::Device;
use std::sync::Arc;

/// Where the forward takes weights from, a layer at a time: from memory, from disk, or gathered from shards.
pub trait WeightSource: Send + Sync {
    /// `[V, H]`, or `[H, V]` where it is the head too.
    fn embedding(&self) -> Result<Embedding>;
    /// The weights of layer `index`.
    fn layer(&self, index: usize) -> Result<Layer>;
    /// `[H]`.
    fn final_norm(&self) -> Result<Parameter>;
    /// What reads the trunk's last hidden states.
    fn head(&self) -> Result<Head>;
    /// Bytes that a walk over all of it reads: what decides how work is shared out.
    fn bytes(&self) -> u64;
    /// Where it multiplies.
    fn device(&self) -> Result<Device> {
        Ok(self.final_norm()?.values().device().clone())
    }
    /// Whether every layer's tensors lie where they lie from walk to walk.
    fn is_resident(&self) -> bool {
        false
    }
    /// The ranks that must make every walk together, one walk at a time, where layers are gathered from them or rows travel.
    fn walked_by(&self) -> Option<&Arc<Mesh>> {
        None
    }
}

/// What reads the trunk's last hidden states.
#[derive(Clone)]
pub enum Head {
    /// `[H, V]`: scores of the next token.
    LanguageModel(Projection),
    /// `[H, 1]` and `[1]`: one value a token.
    Value(Projection),
}

/// The name of the value head's matrix; a model with a tensor of this name is a critic.
pub(super) const VALUE_HEAD: &str = "score.weight";

/// A model's weights in this process.
#[derive(Clone)]
pub struct Weights {
    embedding: Embedding,
    layers: Layers,
    final_norm: Parameter,
    head: Head,
    bytes: u64,
    /// Where rows travel to their experts.
    expert_ranks: Option<Arc<ExpertRanks>>,
    /// How a CPU makes the dense products of the layers and of the head.
    precision: Precision,
}

/// Where the layers are; what is outside of them is in memory.
#[derive(Clone)]
pub(super) enum Layers {
    Resident(Vec<Layer>),
    InTurn(Box<LayersInTurn>),
    /// In pieces over ranks.
    Gathered(Arc<GatheredLayers>),
}

impl Weights {
    /// The weights of `config` that `find` knows by name, `bytes` in all, but for `layers` that are made in turn; with a value head in
    /// place of the language model's for a critic.
    ///
    /// # Errors
    /// Those of `find`, which is asked for each tensor once.
    pub(super) fn new(
        config: &Config,
        is_critic: bool,
        bytes: u64,
        layers: Option<Layers>,
        find: &dyn Fn(&str) -> Result<Weight>,
    ) -> Result<Self> {
        let layer = |index| config.family.layer(index, find);
        let layers = match layers {
            Some(layers) => layers,
            None => Layers::Resident((0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?),
        };
        let tied = config.tie_word_embeddings;
        let embedding = find(EMBEDDING)?;
        Ok(Self {
            embedding: embedding.clone().embedding(tied)?,
            layers,
            final_norm: find("model.norm.weight")?.parameter()?,
            head: if is_critic {
                let bias = find("score.bias")?.parameter()?;
                Head::Value(find(VALUE_HEAD)?.projection(Some(bias))?)
            } else if tied {
                Head::LanguageModel(embedding.projection(None)?)
            } else {
                Head::LanguageModel(find("lm_head.weight")?.projection(None)?)
            },
            bytes,
            expert_ranks: None,
            precision: Precision::F32,
        })
    }

    /// The same, whose dense products a CPU makes so, those of the head over a vocabulary among them.
    pub(super) fn multiplying(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The same, whose experts are those of this rank alone: rows travel to the others'.
    ///
    /// # Errors
    /// When the layers are not in memory.
    pub(super) fn over_ranks(mut self, ranks: &Arc<ExpertRanks>) -> Result<Self> {
        let Layers::Resident(layers) = &mut self.layers else { bail!("layers that are not in memory") };
        for layer in layers {
            if let FeedForward::Experts(experts) = &mut layer.feed_forward {
                experts.ranks = Some(ranks.clone());
            }
        }
        self.expert_ranks = Some(ranks.clone());
        Ok(self)
    }
}

impl WeightSource for Weights {
    fn embedding(&self) -> Result<Embedding> {
        Ok(self.embedding.clone())
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        let layer = match &self.layers {
            Layers::Resident(layers) => {
                layers.get(index).cloned().with_context(|| format!("no layer {index}"))?
            }
            Layers::InTurn(layers) => layers.layer(index)?,
            Layers::Gathered(layers) => layers.layer(index)?,
        };
        Ok(if self.precision == Precision::F32 { layer } else { layer.multiplying(self.precision) })
    }

    fn final_norm(&self) -> Result<Parameter> {
        Ok(self.final_norm.clone())
    }

    fn head(&self) -> Result<Head> {
        Ok(match self.head.clone() {
            Head::LanguageModel(head) => Head::LanguageModel(head.multiplying(self.precision)),
            head @ Head::Value(_) => head,
        })
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn is_resident(&self) -> bool {
        matches!(self.layers, Layers::Resident(_)) && self.expert_ranks.is_none()
    }

    fn walked_by(&self) -> Option<&Arc<Mesh>> {
        match (&self.layers, &self.expert_ranks) {
            (Layers::Gathered(layers), _) => Some(layers.mesh()),
            (Layers::Resident(_) | Layers::InTurn(_), ranks) => ranks.as_ref().map(|ranks| ranks.mesh()),
        }
    }
}

/// The same weights, not learning: the first walk of a pass that recomputes its layers.
pub struct Frozen<'a>(pub &'a dyn WeightSource);

impl WeightSource for Frozen<'_> {
    fn embedding(&self) -> Result<Embedding> {
        Ok(self.0.embedding()?.without_gradient())
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        Ok(self.0.layer(index)?.without_gradient())
    }

    fn final_norm(&self) -> Result<Parameter> {
        Ok(self.0.final_norm()?.without_gradient())
    }

    fn head(&self) -> Result<Head> {
        Ok(match self.0.head()? {
            Head::LanguageModel(weight) => Head::LanguageModel(weight.without_gradient()),
            Head::Value(head) => Head::Value(head.without_gradient()),
        })
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn walked_by(&self) -> Option<&Arc<Mesh>> {
        self.0.walked_by()
    }
}
