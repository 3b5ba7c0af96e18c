//! The model families: what one value, chosen by `model_type`, decides.

use super::config::Config;
use super::gpt_oss;
use super::held::Weight;
use super::layer::Layer;
use super::names::ParameterSpec;
use crate::harmony::HarmonyTokenizer;
use anyhow::Result;
use std::path::Path;

/// A family of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    GptOss,
}

impl Family {
    const ALL: [Family; 1] = [Family::GptOss];

    /// Its name in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::GptOss => "gpt_oss",
        }
    }

    /// The name of its causal language model in transformers.
    pub fn architecture(self) -> &'static str {
        match self {
            Family::GptOss => "GptOssForCausalLM",
        }
    }

    /// The family called `model_type`.
    pub fn of(model_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.model_type() == model_type)
    }

    /// A half-sentence that lists those there are.
    pub(super) fn known() -> String {
        format!("known: {}", Self::ALL.map(|family| format!("{:?}", family.model_type())).join(", "))
    }

    /// The tensors of layer `layer`, in file order.
    pub(super) fn layer_specs(self, config: &Config, layer: usize) -> Vec<ParameterSpec> {
        match self {
            Family::GptOss => gpt_oss::layer_specs(config, layer),
        }
    }

    /// Layer `layer` of the tensors that `find` knows by name.
    pub(super) fn layer(self, layer: usize, find: &dyn Fn(&str) -> Result<Weight>) -> Result<Layer> {
        match self {
            Family::GptOss => gpt_oss::layer(layer, find),
        }
    }

    /// The tokenizer of its conversations.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file lacks the template's control tokens.
    pub fn tokenizer(self, file: &Path) -> Result<HarmonyTokenizer> {
        match self {
            Family::GptOss => HarmonyTokenizer::from_file(file),
        }
    }
}
