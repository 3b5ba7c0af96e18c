//! Results of passes that processes exchange.

use super::forward_backward::PassOutput;
use super::micro_batch::MicroBatch;
use crate::dist::Mesh;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A [`PassOutput`] that can be serialised.
#[derive(Serialize, Deserialize)]
pub(super) struct PassRecord {
    head: Vec<Vec<f32>>,
    /// Routed experts of each layer.
    routed_experts: Vec<Vec<u32>>,
    top_k: usize,
    load_balance_loss: f64,
}

impl<const N: usize> PassOutput<N> {
    /// Copies the results to the host, so that they can be sent to other processes.
    ///
    /// # Errors
    /// When the experts cannot be read.
    pub(super) fn into_record(self) -> Result<PassRecord> {
        let Self { head, mut routed_experts, load_balance_loss, .. } = self;
        if N == 1 {
            // The experts of a critic are not used.
            routed_experts.clear();
        }
        let top_k = routed_experts.first().map_or(Ok(1), |experts| experts.dim(1))?;
        let to_host = |experts: &Tensor| Ok(experts.flatten_all()?.to_vec1()?);
        let routed_experts = routed_experts.iter().map(to_host).collect::<Result<_>>()?;
        Ok(PassRecord { head: head.into(), routed_experts, top_k, load_balance_loss })
    }

    /// Joins the outputs of the ranks of one sequence-parallel group into the output of `batch`.
    ///
    /// # Errors
    /// When there is no output, or the outputs do not fit the batch.
    pub(super) fn join(mut shards: Vec<PassRecord>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Self> {
        let first = shards.first().context("a group without ranks")?;
        let (layers, top_k, load_balance_loss) =
            (first.routed_experts.len(), first.top_k, first.load_balance_loss);
        let layer_experts = |layer: usize| {
            let experts: Vec<u32> =
                shards.iter().flat_map(|shard| shard.routed_experts[layer].iter().copied()).collect();
            let tokens = experts.len() / top_k;
            Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
        };
        let routed_experts = (0..layers).map(layer_experts).collect::<Result<_>>()?;
        let batch_shards = batch.shards(mesh)?;
        let mut head = [const { vec![] }; N];
        for (index, column) in head.iter_mut().enumerate() {
            let columns = shards.iter_mut().map(|shard| std::mem::take(&mut shard.head[index]));
            *column = match &batch_shards {
                None => columns.last().unwrap_or_default(),
                Some(batch_shards) => batch_shards.join_columns(&columns.collect::<Vec<_>>()),
            };
        }
        // With several ranks, no backward pass is skipped.
        Ok(Self { head, routed_experts, load_balance_loss, has_gradients: true })
    }
}
