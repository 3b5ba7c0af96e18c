//! The model families. A new one is a file of this folder, with an `ENTRY`, and its line in the list below.

use super::config::{Config, LayerType};
use super::config_json::Keys;
use super::layer::Layer;
use super::matrix::LayerTensors;
use super::names::ParameterSpec;
use crate::chat::Format;
use crate::settings::{Choice, registered};
use anyhow::Result;
use serde_json::Value;
use std::sync::Arc;

registered! {
    /// Families of models, under the names that `model_type` has in `config.json`.
    pub struct Family(FamilyEntry) default gpt_oss;
    mod gpt_oss;
    mod qwen2;
}

/// A family, as `model_type` names it.
pub struct FamilyEntry {
    /// `model_type`.
    pub name: &'static str,
    /// For the recipe's page.
    pub meaning: &'static str,
    /// The name of its causal language model in transformers.
    pub architecture: &'static str,
    /// How its conversations are written.
    pub chat: Format,
    /// Whether a token chooses experts.
    pub has_experts: bool,
    /// Whether attention has sinks.
    pub has_sinks: bool,
    /// Whether layers may attend to a window.
    pub has_windows: bool,
    /// Whether the embedding may be the head too.
    pub may_tie_embeddings: bool,
    /// The attention of so many layers, where `config.json` does not list it.
    pub layer_types: fn(usize) -> Vec<LayerType>,
    /// Reads `config.json`.
    pub(super) read: fn(&mut Keys) -> Config,
    /// The keys of `config.json` that it has beside those of every family, or writes in another way.
    pub(super) own_keys: fn(&Config) -> Value,
    /// The tensors of a layer, in file order.
    pub(super) layer_specs: fn(&Config, usize) -> Vec<ParameterSpec>,
    /// The layer made of its tensors.
    pub(super) layer: fn(&LayerTensors) -> Result<Arc<dyn Layer>>,
}

impl Family {
    /// A half-sentence that lists those there are.
    pub(super) fn known() -> String {
        let words: Vec<String> =
            Self::all().into_iter().map(|family| format!("{:?}", family.name())).collect();
        format!("known: {}", words.join(", "))
    }
}
