//! How the forward asks for weights, and weights that lie in this process's memory.

use super::config::Config;
use super::layer::{Layer, Projection};
use super::names::EMBEDDING;
use crate::ops::Parameter;
use anyhow::{Context, Result};

/// Where the forward takes weights from, a layer at a time. Resident weights answer from memory; a sharded source gathers.
pub trait WeightSource: Send + Sync {
    /// `[V, H]`, or `[H, V]` where it is the head too.
    fn embedding(&self) -> Result<Parameter>;
    /// The weights of layer `index`.
    fn layer(&self, index: usize) -> Result<Layer>;
    /// `[H]`.
    fn final_norm(&self) -> Result<Parameter>;
    /// What reads the trunk's last hidden states.
    fn head(&self) -> Result<Head>;
}

/// What reads the trunk's last hidden states.
#[derive(Clone)]
pub enum Head {
    /// `[H, V]`: scores of the next token.
    LanguageModel(Parameter),
    /// `[H, 1]` and `[1]`: one value a token.
    Value(Projection),
}

/// The name of the value head's matrix; a model with a tensor of this name is a critic.
pub(super) const VALUE_HEAD: &str = "score.weight";

/// Weights that all lie in this process's memory.
#[derive(Clone)]
pub struct Resident {
    embedding: Parameter,
    layers: Vec<Layer>,
    final_norm: Parameter,
    head: Head,
}

impl Resident {
    /// The weights of `config` that `find` knows by name; with a value head in place of the language model's for a critic.
    ///
    /// # Errors
    /// Those of `find`, which is asked for each tensor once.
    pub(super) fn new(
        config: &Config,
        is_critic: bool,
        find: &dyn Fn(&str) -> Result<Parameter>,
    ) -> Result<Self> {
        let layer = |index| config.family.layer(index, find);
        let embedding = find(EMBEDDING)?;
        Ok(Self {
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            final_norm: find("model.norm.weight")?,
            head: if is_critic {
                Head::Value(Projection::Dense { weight: find(VALUE_HEAD)?, bias: Some(find("score.bias")?) })
            } else if config.tie_word_embeddings {
                Head::LanguageModel(embedding.clone())
            } else {
                Head::LanguageModel(find("lm_head.weight")?)
            },
            embedding,
        })
    }
}

impl WeightSource for Resident {
    fn embedding(&self) -> Result<Parameter> {
        Ok(self.embedding.clone())
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        self.layers.get(index).cloned().with_context(|| format!("no layer {index}"))
    }

    fn final_norm(&self) -> Result<Parameter> {
        Ok(self.final_norm.clone())
    }

    fn head(&self) -> Result<Head> {
        Ok(self.head.clone())
    }
}

/// The same weights, not learning: the first walk of a pass that recomputes its layers.
pub struct Frozen<'a>(pub &'a dyn WeightSource);

impl WeightSource for Frozen<'_> {
    fn embedding(&self) -> Result<Parameter> {
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
}
