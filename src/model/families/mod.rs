//! The model families. Each family is a file of this folder with an `ENTRY`, and a line in the list below.

use super::config::{Config, LayerType};
use super::config_json::ConfigReader;
use super::layer::Layer;
use super::matrix::LayerTensors;
use super::names::ParameterSpec;
use crate::bad_input;
use crate::chat::ChatFormat;
use crate::settings::{Choice, registry};
use anyhow::Result;
use serde_json::Value;
use std::sync::Arc;

registry! {
    /// Families of models. Their names are the values of `model_type` in `config.json`.
    pub struct Family(FamilyEntry) default gpt_oss;
    mod gpt_oss;
    mod qwen2;
    mod qwen3;
    mod qwen3_moe;
}

/// A family of models.
pub struct FamilyEntry {
    /// The value of `model_type` in `config.json`.
    pub name: &'static str,
    /// The documentation on the page of recipes.
    pub meaning: &'static str,
    /// The class of the causal language model in transformers.
    pub architecture: &'static str,
    /// The value of `general.architecture` in a GGUF file.
    pub gguf: &'static str,
    /// The pre-tokenizer of the published tokenizers of the family, by its name in GGUF.
    pub gguf_pre_tokenizer: &'static str,
    /// The format of conversations.
    pub chat: ChatFormat,
    /// Whether layers have experts.
    pub has_experts: bool,
    /// Whether attention has sinks.
    pub has_sinks: bool,
    /// Whether layers may have a sliding window.
    pub has_windows: bool,
    /// Whether the SwiGLU of experts has a clamp.
    pub has_swiglu_limit: bool,
    /// Whether the experts may be stored in MXFP4.
    pub has_mxfp4: bool,
    /// Whether the embedding and the LM head may share a matrix.
    pub may_tie_embeddings: bool,
    /// Returns the layer types of a model with the given number of layers. Used if `config.json` does not
    /// list them.
    pub layer_types: fn(usize) -> Vec<LayerType>,
    /// Reads `config.json`.
    pub(super) read: fn(&mut ConfigReader) -> Config,
    /// Returns the keys of `config.json` that only this family writes.
    pub(super) own_keys: fn(&Config) -> Value,
    /// Returns the tensors of a layer, in file order.
    pub(super) layer_specs: fn(&Config, usize) -> Vec<ParameterSpec>,
    /// Builds a layer from its tensors.
    pub(super) layer: fn(&LayerTensors) -> Result<Arc<dyn Layer>>,
}

impl Family {
    /// Returns a phrase with the names of the supported families.
    pub(super) fn supported_names() -> String {
        let words: Vec<String> =
            Self::all().into_iter().map(|family| format!("{:?}", family.name())).collect();
        format!("known: {}", words.join(", "))
    }

    /// Returns the family of a GGUF file with this `general.architecture`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that lists the supported architectures.
    pub fn from_gguf(architecture: &str) -> Result<Self> {
        Self::all().into_iter().find(|family| family.gguf == architecture).ok_or_else(|| {
            let known: Vec<&str> = Self::all().into_iter().map(|family| family.gguf).collect();
            bad_input!(
                "general.architecture = {architecture:?} is not supported; known: {}",
                known.join(", ")
            )
        })
    }
}
