//! How the forward asks for weights, and weights that lie in this process's memory.

use super::config::Config;
use super::layer::{Layer, Projection};
use crate::ops::Parameter;
use anyhow::{Context, Result};

/// Where the forward takes weights from, a layer at a time. Resident weights answer from memory; a sharded source gathers.
pub trait WeightSource: Send + Sync {
    /// `[V, H]`.
    fn embedding(&self) -> Result<Parameter>;
    /// The weights of layer `index`.
    fn layer(&self, index: usize) -> Result<Layer>;
    /// `[H]`.
    fn final_norm(&self) -> Result<Parameter>;
    /// What reads the trunk's last hidden states.
    fn head(&self) -> Result<Head>;
    /// Bytes that a walk over all of it reads: what decides how work is shared out.
    fn bytes(&self) -> u64;
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
    bytes: u64,
}

impl Resident {
    /// The weights of `config` that `find` knows by name; with a value head in place of the language model's for a critic.
    ///
    /// # Errors
    /// Those of `find`, which is asked for each tensor once.
    pub(super) fn new(
        config: &Config,
        is_critic: bool,
        bytes: u64,
        find: &dyn Fn(&str) -> Result<Parameter>,
    ) -> Result<Self> {
        let layer = |index| config.family.layer(index, find);
        Ok(Self {
            embedding: find("model.embed_tokens.weight")?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            final_norm: find("model.norm.weight")?,
            head: if is_critic {
                Head::Value(Projection::Dense { weight: find(VALUE_HEAD)?, bias: Some(find("score.bias")?) })
            } else {
                Head::LanguageModel(find("lm_head.weight")?)
            },
            bytes,
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

    fn bytes(&self) -> u64 {
        self.bytes
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

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}
