//! Expert parallelism: each rank holds some of the experts. Ranks send rows of hidden states to the ranks of
//! their experts, and receive the outputs.
//!
//! The bits of an expert's output for a row depend neither on the rank nor on the other rows. Outputs return
//! in the order in which rows were sent. So the sum over the experts of a token has the same bits as in one
//! process.

use crate::dist::serialization::f32_bytes;
use crate::dist::serialization::f32_values;
use crate::dist::{Mesh, expert_range};
use crate::ops::cpu::host_values;
use crate::ops::{self, Dispatch};
use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The placement of a layer's experts on ranks.
pub struct ExpertParallel {
    mesh: Arc<Mesh>,
    /// The number of experts of all ranks.
    pub(super) experts: usize,
    /// Number of values in one row.
    pub(super) width: usize,
}

/// Computes the outputs `[T·K, H]` of the experts of this rank for tokens `[T, H]`, sorted by the dispatch
/// plan.
pub type ExpertForward<'a> = &'a dyn Fn(&Tensor, &Dispatch) -> Result<Tensor>;

impl ExpertParallel {
    /// Places `experts` experts over the ranks of `mesh`. Each row has `width` values.
    pub fn new(mesh: Arc<Mesh>, experts: usize, width: usize) -> Self {
        Self { mesh, experts, width }
    }

    /// Returns the ranks that must run every pass together.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Returns the experts of this rank.
    pub fn local_experts(&self) -> Range<usize> {
        self.experts_of(self.mesh.rank())
    }

    /// Returns the experts of `rank`.
    pub(crate) fn experts_of(&self, rank: usize) -> Range<usize> {
        expert_range(self.experts, rank, self.mesh.ranks())
    }

    /// Returns the expert outputs `[T·K, H]` of tokens `h [T, H]`, sorted by `plan`. `products` computes the
    /// experts of this rank for the rows of all ranks. Every rank must call this method or
    /// [`Self::serve_on_host`].
    ///
    /// # Errors
    /// When a rank does not respond in time, or `products` fails.
    pub(super) fn forward_on_host(
        &self,
        h: &Tensor,
        plan: &Dispatch,
        products: ExpertForward,
    ) -> Result<Tensor> {
        let x = ops::dispatch(h, plan)?;
        let (rows, width) = x.dims2()?;
        ensure!(width == self.width, "rows have {width} values, but experts expect {}", self.width);
        let outputs = self.exchange_rows(&plan.counts(None)?, &host_values(&x.contiguous()?)?, products)?;
        let values: Vec<f32> = outputs.iter().flat_map(|bytes| f32_values(bytes)).collect();
        Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?)
    }

    /// Takes part in a pass in which this rank has no rows. Computes the expert outputs for rows of other
    /// ranks.
    ///
    /// # Errors
    /// Errors of [`Self::forward_on_host`].
    pub(super) fn serve_on_host(&self, products: ExpertForward) -> Result<()> {
        self.exchange_rows(&vec![0; self.experts], &[], products).map(drop)
    }

    /// Sends `counts[e]` of the rows `x` to each expert e. Returns the outputs by rank, in the order in which
    /// rows were sent.
    fn exchange_rows(&self, counts: &[usize], x: &[f32], products: ExpertForward) -> Result<Vec<Vec<u8>>> {
        let (ranks, own) = (self.mesh.ranks(), self.local_experts());
        let bytes_of = |counts: &[usize]| counts.iter().sum::<usize>() * self.width * size_of::<f32>();
        let of_rank = |rank: usize| &counts[self.experts_of(rank)];

        let counts =
            (0..ranks).map(|rank| Arc::new(of_rank(rank).iter().flat_map(|&n| n.to_le_bytes()).collect()));
        let received_counts =
            self.exchange("row counts of experts", counts.collect(), vec![8 * own.len(); ranks])?;
        let requested_rows: Vec<Vec<usize>> =
            received_counts.iter().map(|bytes| read_counts(bytes)).collect();

        let mut sent = f32_bytes(x);
        let rows = (0..ranks).map(|rank| {
            let (part, rest) = sent.split_at(bytes_of(of_rank(rank)));
            sent = rest;
            Arc::new(part.to_vec())
        });
        let lengths: Vec<usize> = requested_rows.iter().map(|counts| bytes_of(counts)).collect();
        let rows = self.exchange("rows of experts", rows.collect(), lengths.clone())?;

        let outputs = self.outputs_of_received(&requested_rows, &rows, products)?;
        let mut outputs = f32_bytes(&outputs);
        let answers = lengths.iter().map(|&length| {
            let (part, rest) = outputs.split_at(length);
            outputs = rest;
            Arc::new(part.to_vec())
        });
        let expected = (0..ranks).map(|rank| bytes_of(of_rank(rank))).collect();
        self.exchange("outputs of experts", answers.collect(), expected)
    }

    fn exchange(&self, what: &str, parts: Vec<Arc<Vec<u8>>>, lengths: Vec<usize>) -> Result<Vec<Vec<u8>>> {
        self.mesh.start(what, &self.mesh.all_ranks(), parts, &lengths)?.wait()
    }

    /// Computes the outputs of the received rows, in the order in which they were received.
    /// `requested_rows[rank]` holds the number of rows that `rank` sent to each expert of this rank.
    fn outputs_of_received(
        &self,
        requested_rows: &[Vec<usize>],
        rows: &[Vec<u8>],
        products: ExpertForward,
    ) -> Result<Vec<f32>> {
        let experts = requested_rows.iter().flat_map(|counts| (0u32..).zip(counts));
        let routes: Vec<u32> = experts.flat_map(|(e, &count)| std::iter::repeat_n(e, count)).collect();
        let count = routes.len();
        if count == 0 {
            return Ok(vec![]);
        }
        let x: Vec<f32> = rows.iter().flat_map(|bytes| f32_values(bytes)).collect();
        let x = Tensor::from_vec(x, (count, self.width), &Device::Cpu)?;
        let plan =
            Dispatch::new(&Tensor::from_vec(routes, (count, 1), &Device::Cpu)?, self.local_experts().len())?;
        let outputs = products(&x, &plan)?;
        // Restores the order in which rows were received. Multiplying by 1 changes no bits.
        let ones = Tensor::ones((count, 1), outputs.dtype(), &Device::Cpu)?;
        Ok(host_values(&ops::combine(&outputs, &ones, &plan)?)?.to_vec())
    }
}

fn read_counts(bytes: &[u8]) -> Vec<usize> {
    bytes.as_chunks().0.iter().map(|bytes| usize::from_le_bytes(*bytes)).collect()
}
