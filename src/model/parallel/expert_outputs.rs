//! The outputs of a layer's experts, and the choice between the ways in which ranks exchange rows.
//!
//! On a CPU, rows pass through host memory. Between GPUs, a pass that began with the numbers of rows of all
//! ranks gathers few rows, or sends each row to the rank of its expert. A pass of training sends rows.

use super::expert_exchange::PassRows;
use super::expert_parallel::{ExpertForward, ExpertParallel};
use crate::ops::{self, Dispatch};
use anyhow::Result;
use candle_core::Tensor;

/// The rows of this rank, and their experts.
pub struct RoutedRows<'a> {
    /// `[T, H]`; bf16 on a GPU.
    pub h: &'a Tensor,
    /// u32 `[T, K]`.
    pub routed_experts: &'a Tensor,
    pub plan: &'a Dispatch,
}

/// The expert outputs of a rank's tokens.
pub enum ExpertOutputs {
    /// `[T·K, H]`, sorted by the dispatch plan.
    Sorted(Tensor),
    /// `[N, H]` in another order, and the row of each (token, slot) in it, u32 `[T·K]`. Only on a GPU, and
    /// without gradients.
    InRows { outputs: Tensor, rows: Tensor },
}

impl ExpertOutputs {
    /// Returns the residual stream `x [T, H]` plus the sum of the outputs of each token, weighted by
    /// `weights [T, K]`.
    ///
    /// # Errors
    /// When shapes disagree.
    pub fn combine_and_add(&self, weights: &Tensor, plan: &Dispatch, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Sorted(outputs) => ops::fused::combine_and_add(outputs, weights, plan, x)?,
            Self::InRows { outputs, rows } => ops::fused::combine_rows_and_add(outputs, weights, rows, x)?,
        })
    }
}

impl ExpertParallel {
    /// Returns the expert outputs of the rows `own`. `products` computes the experts of this rank for the
    /// rows of all ranks. `pass` has the numbers of rows of all ranks, if the pass began with them. Every
    /// rank must call this method or [`Self::serve`].
    ///
    /// # Errors
    /// When a rank does not respond in time, or `products` fails.
    pub fn outputs(
        &self,
        pass: Option<&PassRows>,
        own: &RoutedRows,
        products: ExpertForward,
    ) -> Result<ExpertOutputs> {
        match pass {
            Some(pass) => self.forward_on_device(pass, own, products),
            None if own.h.device().is_cuda() => {
                self.sent_outputs(own.h, own.plan, products).map(ExpertOutputs::Sorted)
            }
            None => self.forward_on_host(own.h, own.plan, products).map(ExpertOutputs::Sorted),
        }
    }

    /// Takes part in a pass in which this rank has no rows. Computes the expert outputs for rows of other
    /// ranks.
    ///
    /// # Errors
    /// Errors of [`Self::outputs`].
    pub fn serve(&self, pass: Option<&PassRows>, products: ExpertForward) -> Result<()> {
        match pass {
            Some(pass) => self.serve_on_device(pass, products),
            None => self.serve_on_host(products),
        }
    }
}
