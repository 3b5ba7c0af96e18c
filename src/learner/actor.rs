//! The actor: a model that samples and is trained.

use crate::dist::{Mesh, RolloutWeightPlacement};
use crate::model::cache::CacheCapacity;
use crate::model::forward::Model;
use crate::model::parameters::Parameters;
use crate::ops::threads::Threads;
use std::sync::Arc;

/// How this process computes, as chosen at startup. All actors share it.
pub struct Execution {
    pub threads: Threads,
    /// Whether the backward pass recomputes layers.
    pub recompute_layers: bool,
    /// Capacity of the GPU's KV cache.
    pub cache_capacity: CacheCapacity,
    /// Tokens whose keys and values are kept for later requests.
    pub prefix_tokens_max: usize,
    /// How each process holds the weights while it samples.
    pub rollout_weights: RolloutWeightPlacement,
}

/// A model with its weights. Actors over one base share the base's weights, the model and the execution.
pub struct Actor {
    pub model: Arc<Model>,
    pub parameters: Parameters,
    pub execution: Arc<Execution>,
}

impl Actor {
    /// Returns the processes of the run.
    pub fn mesh(&self) -> &Arc<Mesh> {
        self.parameters.mesh()
    }
}
