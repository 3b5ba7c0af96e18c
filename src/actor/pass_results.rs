//! Results of passes that processes exchange.

use super::columns::Columns;
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
    /// The head's columns.
    columns: Vec<Vec<f32>>,
    /// Routed experts of each layer.
    routed_experts: Vec<Vec<u32>>,
    top_k: usize,
    load_balance_loss: f64,
}

impl<C: Columns> PassOutput<C> {
    /// Copies the results to the host, so that they can be sent to other processes.
    ///
    /// # Errors
    /// When the experts cannot be read.
    pub(super) fn into_record(self) -> Result<PassRecord> {
        let Self { columns, routed_experts, load_balance_loss, .. } = self;
        let top_k = routed_experts.first().map_or(Ok(1), |experts| experts.dim(1))?;
        let to_host = |experts: &Tensor| Ok(experts.flatten_all()?.to_vec1()?);
        let routed_experts = routed_experts.iter().map(to_host).collect::<Result<_>>()?;
        Ok(PassRecord { columns: columns.into_rows(), routed_experts, top_k, load_balance_loss })
    }

    /// Joins the outputs of the ranks of one sequence-parallel group into the output of `batch`.
    ///
    /// # Errors
    /// When there is no output, or the outputs do not fit the batch.
    pub(super) fn join(mut shards: Vec<PassRecord>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Self> {
        let first = shards.first().context("a group without ranks")?;
        let (columns, layers) = (first.columns.len(), first.routed_experts.len());
        let (top_k, load_balance_loss) = (first.top_k, first.load_balance_loss);
        let layer_experts = |layer: usize| {
            let experts: Vec<u32> =
                shards.iter().flat_map(|shard| shard.routed_experts[layer].iter().copied()).collect();
            let tokens = experts.len() / top_k;
            Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
        };
        let routed_experts = (0..layers).map(layer_experts).collect::<Result<_>>()?;
        let batch_shards = batch.shards(mesh)?;
        let join = |index: usize| {
            let parts = shards.iter_mut().map(|shard| std::mem::take(&mut shard.columns[index]));
            match &batch_shards {
                None => parts.last().unwrap_or_default(),
                Some(batch_shards) => batch_shards.join_columns(&parts.collect::<Vec<_>>()),
            }
        };
        let columns = C::from_rows((0..columns).map(join).collect())?;
        // With several ranks, no backward pass is skipped.
        Ok(Self { columns, routed_experts, load_balance_loss, has_gradients: true })
    }
}
