//! The model families: what one value, chosen by `model_type`, decides.

use super::config::{Config, LayerType};
use super::gpt_oss;
use super::held::Weight;
use super::layer::Layer;
use super::names::ParameterSpec;
use super::qwen2;
use crate::chat::Chat;
use crate::chat::chatml::ChatMl;
use crate::harmony::HarmonyTokenizer;
use crate::settings::{Choice, choice};
use anyhow::Result;
use std::path::Path;

choice! {
    /// Families of models, under the names that `model_type` has in `config.json`.
    pub enum Family {
        /// Experts, attention sinks, windows in every other layer; conversations in Harmony.
        GptOss = "gpt_oss",
        /// Dense Qwen2 and Qwen2.5; conversations in ChatML.
        Qwen2 = "qwen2",
    }
}

impl Family {
    /// The name of its causal language model in transformers.
    pub fn architecture(self) -> &'static str {
        match self {
            Family::GptOss => "GptOssForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
        }
    }

    /// A half-sentence that lists those there are.
    pub(super) fn known() -> String {
        let words: Vec<String> =
            Self::all().into_iter().map(|family| format!("{:?}", family.name())).collect();
        format!("known: {}", words.join(", "))
    }

    /// Whether a token chooses experts.
    pub fn has_experts(self) -> bool {
        match self {
            Family::GptOss => true,
            Family::Qwen2 => false,
        }
    }

    /// Its layers' attention, where `config.json` does not list it.
    pub fn layer_types(self, num_hidden_layers: usize) -> Vec<LayerType> {
        match self {
            Family::GptOss => LayerType::alternating(num_hidden_layers),
            Family::Qwen2 => vec![LayerType::Full; num_hidden_layers],
        }
    }

    /// Whether attention has sinks.
    pub fn has_sinks(self) -> bool {
        match self {
            Family::GptOss => true,
            Family::Qwen2 => false,
        }
    }

    /// The tensors of layer `layer`, in file order.
    pub(super) fn layer_specs(self, config: &Config, layer: usize) -> Vec<ParameterSpec> {
        match self {
            Family::GptOss => gpt_oss::layer_specs(config, layer),
            Family::Qwen2 => qwen2::layer_specs(config, layer),
        }
    }

    /// Layer `layer` of the tensors that `find` knows by name.
    pub(super) fn layer(self, layer: usize, find: &dyn Fn(&str) -> Result<Weight>) -> Result<Layer> {
        match self {
            Family::GptOss => gpt_oss::layer(layer, find),
            Family::Qwen2 => qwen2::layer(layer, find),
        }
    }

    /// Its conversations, over the vocabulary in a `tokenizer.json`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file cannot be read or lacks the template's control tokens.
    pub fn chat(self, file: &Path) -> Result<Chat> {
        Ok(match self {
            Family::GptOss => Chat::Harmony(HarmonyTokenizer::from_file(file)?),
            Family::Qwen2 => Chat::ChatMl(ChatMl::from_file(file)?),
        })
    }

    /// Its conversations, over the vocabulary inside the binary.
    ///
    /// # Errors
    /// None in practice: tests read both.
    pub fn embedded_chat(self) -> Result<Chat> {
        Ok(match self {
            Family::GptOss => Chat::Harmony(HarmonyTokenizer::embedded()?),
            Family::Qwen2 => Chat::ChatMl(ChatMl::embedded()?),
        })
    }
}
