//! Tensors of which each rank holds a piece, and the layers that are gathered when it is their turn.

use super::config::Config;
use super::held::{Held, PackedPiece, Weight};
use super::layer::{Adapter, Layer};
use super::layers_in_turn::adapted;
use super::names::ParameterSpec;
use crate::dist::wire::{f32_bytes, f32_values};
use crate::dist::{Mesh, Started, in_order, piece, to_each};
use crate::ops::Parameter;
use crate::ops::cpu::host_values;
use crate::ops::parameter::GradientSink;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor, Var};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What failed between processes, as an op says it.
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
    pub held: PartHeld,
    pub learns: bool,
}

/// What of it is here.
#[derive(Clone)]
pub(super) enum PartHeld {
    /// This rank's values.
    Piece(Tensor),
    /// This rank's bytes of what is packed.
    Packed(PackedPiece),
    /// All of it, on every rank.
    Whole(Held),
}

impl Part {
    /// The bytes of it that `rank` holds for others.
    pub fn bytes_of(&self, mesh: &Mesh, rank: usize) -> Range<usize> {
        let piece = |count: usize| piece(count, self.index, rank, mesh.ranks());
        match &self.held {
            PartHeld::Whole(_) => 0..0,
            PartHeld::Piece(_) => {
                let values = piece(self.spec.element_count());
                values.start * size_of::<f32>()..values.end * size_of::<f32>()
            }
            PartHeld::Packed(own) => piece(own.whole_bytes()),
        }
    }
}

/// Begins to gather those of `parts` that lie in pieces, in one exchange.
pub(super) fn start(mesh: &Mesh, what: &str, parts: &[Part]) -> Result<Started> {
    let (mut own, mut lengths) = (vec![], vec![0; mesh.ranks()]);
    for part in parts {
        match &part.held {
            PartHeld::Whole(_) => continue,
            PartHeld::Piece(values) => own.extend_from_slice(f32_bytes(&host_values(values)?)),
            PartHeld::Packed(piece) => own.extend_from_slice(piece.bytes()),
        }
        for (rank, length) in lengths.iter_mut().enumerate() {
            *length += part.bytes_of(mesh, rank).len();
        }
    }
    mesh.start(what, &mesh.everyone(), to_each(own, mesh.ranks()), &lengths)
}

/// The tensors of `parts` from what came: those in pieces made whole, and the others as they are.
pub(super) fn finish(mesh: &Mesh, parts: &[Part], started: Started) -> Result<Vec<Held>> {
    let came = started.wait()?;
    let mut read = vec![0; came.len()];
    parts
        .iter()
        .map(|part| {
            let in_order = in_order(part.index, came.len()).map(|rank| {
                let start = read[rank];
                read[rank] += part.bytes_of(mesh, rank).len();
                &came[rank][start..read[rank]]
            });
            match &part.held {
                PartHeld::Whole(held) => Ok(held.clone()),
                PartHeld::Piece(_) => {
                    let mut values: Vec<f32> = Vec::with_capacity(part.spec.element_count());
                    in_order.for_each(|bytes| values.extend(f32_values(bytes)));
                    Ok(Held::Plain(Tensor::from_vec(values, part.spec.working_shape(), &Device::Cpu)?))
                }
                PartHeld::Packed(piece) => Ok(piece.made_whole(in_order.collect::<Vec<_>>().concat())),
            }
        })
        .collect()
}

/// A model's layers in pieces, one of which is made whole for as long as a walk is at it; the one that comes next is on its way
/// meanwhile. Every rank must take the same layers in the same order.
pub(super) struct GatheredLayers {
    mesh: Arc<Mesh>,
    config: Config,
    layers: Vec<Vec<Part>>,
    adapters: HashMap<String, Adapter>,
    uses: Uses,
    walk: Mutex<Walk>,
}

/// What gathered layers are for.
#[derive(Clone)]
pub(super) struct Uses {
    /// Where gradients go, in passes that learn.
    pub sink: Option<Arc<dyn GradientSink>>,
    /// Where they multiply.
    pub device: Device,
}

impl Uses {
    /// The weights as they are, which do not learn.
    pub fn frozen(device: &Device) -> Self {
        Self { sink: None, device: device.clone() }
    }

    /// `held`, gathered, as a layer takes it.
    ///
    /// # Errors
    /// When the device's memory does not suffice.
    pub fn weight(&self, part: &Part, held: Held) -> Result<Weight> {
        let held = held.on(&self.device, &part.spec)?;
        Ok(match (&self.sink, held) {
            (Some(sink), Held::Plain(values)) if part.learns => {
                // A variable, so that the graph records what is computed from it.
                let values = Var::from_tensor(&values)?;
                Weight::Plain(Parameter::learning(values.as_tensor(), sink.clone(), part.index))
            }
            (_, held) => held.frozen(),
        })
    }
}

/// Where a walk is.
#[derive(Default)]
struct Walk {
    last: Option<usize>,
    ahead: Option<(usize, Started)>,
}

impl GatheredLayers {
    pub fn new(
        mesh: Arc<Mesh>,
        config: Config,
        layers: Vec<Vec<Part>>,
        adapters: HashMap<String, Adapter>,
        uses: Uses,
    ) -> Self {
        Self { mesh, config, layers, adapters, uses, walk: Mutex::default() }
    }

    /// The ranks that must make every walk together.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Layer `index`, gathered.
    pub fn layer(&self, index: usize) -> Result<Layer> {
        let parts = self.layers.get(index).with_context(|| format!("no layer {index}"))?;
        let mut walk = self.walk.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match walk.ahead.take() {
            Some((ahead, started)) if ahead == index => started,
            _ => self.start(index)?,
        };
        // A walk goes up, and a backward one down from where the last ended; the next begins at 0.
        let up = walk.last.is_none_or(|last| last < index || (index == 0 && last != 1));
        let next = if up { index + 1 } else { index.wrapping_sub(1) };
        walk.last = Some(index);
        if next < self.layers.len() {
            walk.ahead = Some((next, self.start(next)?));
        }
        drop(walk);
        let held = finish(&self.mesh, parts, started)?;
        let weights: HashMap<&str, Weight> = parts
            .iter()
            .zip(held)
            .map(|(part, held)| Ok((part.spec.name.as_str(), self.uses.weight(part, held)?)))
            .collect::<Result<_>>()?;
        self.config.family.layer(index, &|name| {
            let weight = weights.get(name).with_context(|| format!("no tensor {name}"))?;
            Ok(adapted(weight.clone(), self.adapters.get(name)))
        })
    }

    fn start(&self, index: usize) -> Result<Started> {
        start(&self.mesh, &format!("weights of layer {index}"), &self.layers[index])
    }
}
