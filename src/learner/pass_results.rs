//! The results of passes, exchanged between processes.

use super::forward_backward::PassOutput;
use super::micro_batch::MicroBatch;
use crate::dist::Mesh;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A [`PassOutput`] in serializable form.
#[derive(Serialize, Deserialize)]
pub(super) struct PassRecord {
    head: Vec<Vec<f32>>,
    /// Routed experts of each layer.
    routes: Vec<Vec<u32>>,
    top_k: usize,
    load_balance: f64,
}

impl<const N: usize> PassOutput<N> {
    /// Copies the results to the host, to send them to other processes.
    ///
    /// # Errors
    /// When the experts cannot be read.
    pub(super) fn into_record(self) -> Result<PassRecord> {
        let Self { head, mut routes, load_balance } = self;
        if N == 1 {
            // A critic's experts are not used.
            routes.clear();
        }
        let top_k = routes.first().map_or(Ok(1), |routes| routes.dim(1))?;
        let experts = |routes: &Tensor| Ok(routes.flatten_all()?.to_vec1()?);
        let routes = routes.iter().map(experts).collect::<Result<_>>()?;
        Ok(PassRecord { head: head.into(), routes, top_k, load_balance })
    }

    /// Joins the outputs of the ranks of one sequence-parallel group into the output of `batch`.
    ///
    /// # Errors
    /// When there is no output, or the outputs do not fit the batch.
    pub(super) fn join(mut parts: Vec<PassRecord>, batch: &MicroBatch, mesh: &Arc<Mesh>) -> Result<Self> {
        let first = parts.first().context("a group without ranks")?;
        let (layers, top_k, load_balance) = (first.routes.len(), first.top_k, first.load_balance);
        let experts = |layer: usize| {
            let experts: Vec<u32> =
                parts.iter().flat_map(|part| part.routes[layer].iter().copied()).collect();
            let tokens = experts.len() / top_k;
            Ok(Tensor::from_vec(experts, (tokens, top_k), &Device::Cpu)?)
        };
        let routes = (0..layers).map(experts).collect::<Result<_>>()?;
        let split = batch.shards(mesh)?;
        let mut head = [const { vec![] }; N];
        for (index, column) in head.iter_mut().enumerate() {
            let own = parts.iter_mut().map(|part| std::mem::take(&mut part.head[index]));
            *column = match &split {
                None => own.last().unwrap_or_default(),
                Some(split) => split.join_columns(&own.collect::<Vec<_>>()),
            };
        }
        Ok(Self { head, routes, load_balance })
    }
}
