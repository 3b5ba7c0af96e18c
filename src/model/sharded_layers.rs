//! Layers of which each rank holds a shard, and which are gathered when a pass comes to them.

use super::config::Config;
use super::layer::Layer;
use super::matrix::{Adapter, Tensors};
use super::names::ParameterSpec;
use super::storage::{Stored, on_device};
use super::weights::Layers;
use crate::dist::{Mesh, PendingExchange, ranks_in_shard_order, replicate};
use crate::ops::Parameter;
use crate::ops::parameter::GradientSink;
use crate::ops::weight::Weight;
use anyhow::{Context, Result};
use candle_core::{Device, Var};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// An error between processes as an op returns it.
pub fn within_op(error: anyhow::Error) -> candle_core::Error {
    candle_core::Error::Msg(format!("{error:#}"))
}

/// A tensor of the store as a gathering sees it.
#[derive(Clone)]
pub(super) struct Part {
    /// Its place in the store.
    pub index: usize,
    /// Of the whole.
    pub spec: ParameterSpec,
    pub stored: Stored,
    /// Whether gradients reach it.
    pub is_trained: bool,
}

/// Begins to gather the sharded ones of `parts`, in one exchange.
pub(super) fn start(mesh: &Mesh, what: &str, parts: &[Part]) -> Result<PendingExchange> {
    let (mut own, mut lengths) = (vec![], vec![0; mesh.ranks()]);
    for part in parts.iter().filter(|part| part.stored.is_sharded()) {
        part.stored.append_shard(&mut own)?;
        for (rank, length) in lengths.iter_mut().enumerate() {
            *length += part.stored.shard_of(&part.spec, part.index, rank, mesh).len();
        }
    }
    mesh.start(what, &mesh.all_ranks(), replicate(own, mesh.ranks()), &lengths)
}

/// The tensors of `parts` from what came: the sharded ones assembled, the others as they are.
pub(super) fn finish(mesh: &Mesh, parts: &[Part], started: PendingExchange) -> Result<Vec<Weight>> {
    let came = started.wait()?;
    let mut read = vec![0; came.len()];
    let assemble = |part: &Part| {
        if !part.stored.is_sharded() {
            return part.stored.whole(&part.spec).cloned();
        }
        let shards = ranks_in_shard_order(part.index, came.len()).map(|rank| {
            let start = read[rank];
            read[rank] += part.stored.shard_of(&part.spec, part.index, rank, mesh).len();
            &came[rank][start..read[rank]]
        });
        part.stored.assembled(&part.spec, shards.collect::<Vec<_>>().concat())
    };
    parts.iter().map(assemble).collect()
}

/// A model's sharded layers, one of which is gathered for as long as a pass is at it; the one that comes next is on its way
/// meanwhile. Every rank must take the same layers in the same order.
pub(super) struct ShardedLayers {
    pub mesh: Arc<Mesh>,
    pub config: Config,
    pub layers: Vec<Vec<Part>>,
    pub adapters: HashMap<String, Adapter>,
    pub uses: Uses,
    /// The layer that is on its way.
    pub ahead: Mutex<Option<(usize, PendingExchange)>>,
}

/// The use of gathered tensors.
#[derive(Clone)]
pub(super) struct Uses {
    /// Where gradients go, in passes that train.
    pub sink: Option<Arc<dyn GradientSink>>,
    /// Where they multiply.
    pub device: Device,
}

impl Uses {
    /// `weight`, gathered, as a layer takes it.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn weight(&self, part: &Part, weight: Weight) -> Result<Weight> {
        let weight = on_device(&weight, &self.device, &part.spec)?;
        Ok(match (&self.sink, weight) {
            (Some(sink), Weight::Dense(gathered)) if part.is_trained => {
                // A variable, so that the graph records what is computed from it.
                let variable = Var::from_tensor(gathered.values())?;
                let trained = Parameter::trained(variable.as_tensor(), sink.clone(), part.index);
                Weight::Dense(trained.in_precision(gathered.precision()))
            }
            (_, weight) => weight.without_gradient(),
        })
    }
}

impl ShardedLayers {
    fn start(&self, index: usize) -> Result<PendingExchange> {
        start(&self.mesh, &format!("weights of layer {index}"), &self.layers[index])
    }
}

impl Layers for ShardedLayers {
    fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>> {
        let parts = self.layers.get(index).with_context(|| format!("no layer {index}"))?;
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match ahead.take() {
            Some((layer, started)) if layer == index => started,
            _ => self.start(index)?,
        };
        if let Some(next) = next {
            *ahead = Some((next, self.start(next)?));
        }
        drop(ahead);
        let gathered = parts.iter().zip(finish(&self.mesh, parts, started)?);
        let weights = gathered.map(|(part, weight)| Ok((&*part.spec.name, self.uses.weight(part, weight)?)));
        let weights: HashMap<&str, Weight> = weights.collect::<Result<_>>()?;
        let find = |name: &str| weights.get(name).cloned().with_context(|| format!("no tensor {name}"));
        let tensors = Tensors { find: &find, adapters: &self.adapters, ranks: None };
        (self.config.family.layer)(&tensors.layer(index))
    }

    fn mesh(&self) -> Option<&Arc<Mesh>> {
        Some(&self.mesh)
    }
}
