//! Layers that are sharded over ranks (ZeRO-3) and gathered when a pass reaches them.

use super::device_exchange::PendingDeviceGather;
use super::expert_parallel::ExpertParallel;
use crate::dist::{Mesh, PendingExchange, expert_range, replicate};
use crate::model::config::Config;
use crate::model::layer::Layer;
use crate::model::matrix::{Adapter, ModelTensors};
use crate::model::names::ParameterSpec;
use crate::model::storage::{TensorStorage, copy_to_device};
use crate::model::weights::LayerSource;
use crate::ops::Parameter;
use crate::ops::graph::is_tracked;
use crate::ops::parameter::GradientSink;
use crate::ops::weight::Weight;
use anyhow::{Context, Result, bail};
use candle_core::{Device, Var};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Converts an error of an exchange between processes into an error of an op.
pub fn to_op_error(error: anyhow::Error) -> candle_core::Error {
    candle_core::Error::Msg(format!("{error:#}"))
}

/// A tensor of the store that can be gathered.
#[derive(Clone)]
pub(crate) struct GatherPart {
    /// The index of the tensor in the store.
    pub index: usize,
    /// The spec of the whole tensor.
    pub spec: ParameterSpec,
    pub stored: TensorStorage,
    /// Whether the tensor gets gradients.
    pub is_trained: bool,
}

/// Tensors whose shards are being gathered.
pub(crate) enum PendingGather {
    /// Through host memory.
    Host(PendingExchange),
    /// In the memory of the GPUs.
    Device(PendingDeviceGather),
}

/// Starts to gather the sharded tensors of `parts` on `device`.
pub(crate) fn start_gather(
    mesh: &Mesh,
    what: &str,
    parts: &[GatherPart],
    device: &Device,
) -> Result<PendingGather> {
    match device.is_cpu() {
        true => start_host_gather(mesh, what, parts).map(PendingGather::Host),
        false => PendingDeviceGather::start(mesh, what, parts, device).map(PendingGather::Device),
    }
}

fn start_host_gather(mesh: &Mesh, what: &str, parts: &[GatherPart]) -> Result<PendingExchange> {
    let (mut own, mut lengths) = (vec![], vec![0; mesh.ranks()]);
    for part in parts.iter().filter(|part| part.stored.is_sharded) {
        part.stored.append_shard(&mut own)?;
        for (rank, length) in lengths.iter_mut().enumerate() {
            *length += part.stored.shard_range(&part.spec, part.index, rank, mesh).len();
        }
    }
    mesh.start(what, &mesh.all_ranks(), replicate(own, mesh.ranks()), &lengths)
}

/// Returns the weights of `parts`. Sharded tensors are assembled from the exchange; other tensors are
/// unchanged.
pub(crate) fn finish_gather(
    mesh: &Mesh,
    parts: &[GatherPart],
    started: PendingGather,
) -> Result<Vec<Weight>> {
    let received = match started {
        PendingGather::Device(gather) => return gather.finish(parts),
        PendingGather::Host(exchange) => exchange.wait()?,
    };
    let mut read = vec![0; received.len()];
    let assemble = |part: &GatherPart| {
        if !part.stored.is_sharded {
            return part.stored.whole_weight(&part.spec).cloned();
        }
        let shards = (0..received.len()).map(|rank| {
            let start = read[rank];
            read[rank] += part.stored.shard_range(&part.spec, part.index, rank, mesh).len();
            &received[rank][start..read[rank]]
        });
        part.stored.assemble(&part.spec, shards.collect::<Vec<_>>().concat())
    };
    parts.iter().map(assemble).collect()
}

/// The sharded layers of a model. Memory holds one gathered layer, and the exchange of the next layer runs
/// while a pass uses the current one. Every rank must request the same layers in the same order.
pub(crate) struct ShardedLayers {
    pub mesh: Arc<Mesh>,
    pub config: Config,
    pub layers: Vec<Vec<GatherPart>>,
    /// The experts of this rank in each layer, if tensors are sharded by expert. They are not gathered.
    pub experts: Vec<Vec<GatherPart>>,
    /// The placement of experts on ranks, if tensors are sharded by expert.
    pub expert_parallel: Option<Arc<ExpertParallel>>,
    pub adapters: HashMap<String, Adapter>,
    pub target: GatherTarget,
    /// The index of the layer whose exchange is running, and the exchange.
    pub pending: Mutex<Option<(usize, PendingGather)>>,
}

/// The destination of gathered tensors: the sink of their gradients, and their device.
#[derive(Clone)]
pub(crate) struct GatherTarget {
    /// The destination of gradients; `None` in passes without gradients.
    pub sink: Option<Arc<dyn GradientSink>>,
    /// The device that computes with the tensors.
    pub device: Device,
}

impl GatherTarget {
    /// Copies the gathered `weight` to the device. If the tensor is trained, the graph tracks it.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn weight(&self, part: &GatherPart, weight: Weight) -> Result<Weight> {
        let weight = copy_to_device(&weight, &self.device, &part.spec)?;
        Ok(match (&self.sink, weight) {
            (Some(sink), Weight::Dense(gathered)) if part.is_trained => {
                // The graph must record ops on the tensor. A tensor gathered on a GPU is a view of a
                // variable.
                let variable = match is_tracked(gathered.values()) {
                    true => gathered.values().clone(),
                    false => Var::from_tensor(gathered.values())?.into_inner(),
                };
                let trained = Parameter::with_gradient_sink(&variable, sink.clone(), part.index);
                Weight::Dense(trained.with_precision(gathered.precision()))
            }
            (_, weight) => weight.without_gradient(),
        })
    }
}

impl ShardedLayers {
    /// Returns this rank's experts of `part`, which are its shard.
    fn own_experts(&self, part: &GatherPart) -> Result<Weight> {
        let Weight::Dense(own) = part.stored.weight(&part.spec)? else {
            bail!("{}: packed experts are not sharded by expert", part.spec.name)
        };
        let experts = expert_range(self.config.num_local_experts, self.mesh.rank(), self.mesh.ranks());
        let spec = part.spec.with_expert_count(experts.len());
        let values = own.values().reshape(spec.working_shape())?;
        let own = Parameter::variable(&values).with_precision(own.precision());
        self.target.weight(&GatherPart { spec, ..part.clone() }, Weight::Dense(own))
    }

    fn start(&self, index: usize) -> Result<PendingGather> {
        let name = format!("weights of layer {index}");
        start_gather(&self.mesh, &name, &self.layers[index], &self.target.device)
    }
}

impl LayerSource for ShardedLayers {
    fn layer(&self, index: usize, next: Option<usize>) -> Result<Arc<dyn Layer>> {
        let parts = self.layers.get(index).with_context(|| format!("no layer {index}"))?;
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match pending.take() {
            Some((layer, started)) if layer == index => started,
            _ => self.start(index)?,
        };
        if let Some(next) = next {
            *pending = Some((next, self.start(next)?));
        }
        drop(pending);
        let gathered = parts.iter().zip(finish_gather(&self.mesh, parts, started)?);
        let weights =
            gathered.map(|(part, weight)| Ok((&*part.spec.name, self.target.weight(part, weight)?)));
        let own = self.experts[index].iter().map(|part| Ok((&*part.spec.name, self.own_experts(part)?)));
        let weights: HashMap<&str, Weight> = weights.chain(own).collect::<Result<_>>()?;
        let find = |name: &str| weights.get(name).cloned().with_context(|| format!("no tensor {name}"));
        let expert_parallel = self.expert_parallel.as_ref();
        let tensors = ModelTensors { find: &find, adapters: &self.adapters, expert_parallel };
        (self.config.family.layer)(&tensors.layer(index))
    }

    fn mesh(&self) -> Option<&Arc<Mesh>> {
        Some(&self.mesh)
    }
}
