//! Expert parallelism between GPUs: rows of hidden states and expert outputs are exchanged in GPU memory, in
//! bf16.
//!
//! A pass of few rows, such as decode, gathers the rows of all ranks on every rank. Each rank returns one
//! output for each (token, slot); those of other ranks' experts are undefined, and are not read. So the sizes
//! do not depend on the routed experts, and the host waits for nothing. With R ranks, this moves R times the
//! bytes of the outputs. A pass of many rows sends each row only to the rank of its expert. The host must
//! know the number of rows first, and waits once a layer. Training sends rows in every pass.
//!
//! Either way the owner of a token adds its outputs in slot order, by the kernel of one GPU.

use super::device_exchange::{ExchangeRows, exchange_rows, gather_rows};
use super::expert_outputs::{ExpertOutputs, RoutedRows};
use super::expert_parallel::{ExpertForward, ExpertParallel};
use crate::dist::replicate;
use crate::ops::graph::{apply, is_recording, is_tracked};
use crate::ops::{self, Dispatch};
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use std::ops::Range;

/// Maximum of ranks × rows of a rank, up to which rows are gathered. With 4 experts a token and 2,880 values
/// a row, a rank receives 12 MB of outputs a layer at most: 26 µs by NVLink, about the wait of a host.
pub const GATHERED_ROWS_MAX: usize = 512;

/// The rows of all ranks in a pass.
pub struct PassRows {
    /// The number of rows of each rank.
    counts: Vec<usize>,
    top_k: usize,
    /// The numbers of this rank's (token, slot) pairs, u32 `[T·K]`.
    slots: Tensor,
    /// The number of experts, u32 `[T·K]`.
    experts: Tensor,
}

impl PassRows {
    /// Returns whether the pass gathers rows. All ranks choose alike.
    fn are_gathered(&self) -> bool {
        self.counts.len() * self.counts.iter().max().unwrap_or(&0) <= GATHERED_ROWS_MAX
    }
}

impl ExpertParallel {
    /// Starts a pass in which this rank has `rows` rows with `top_k` experts each. Every rank must call this
    /// method before the pass.
    ///
    /// # Errors
    /// When a rank does not respond in time.
    pub(crate) fn start_pass(&self, rows: usize, top_k: usize, device: &Device) -> Result<PassRows> {
        let ranks = self.mesh().ranks();
        let parts = replicate(rows.to_le_bytes().to_vec(), ranks);
        let received =
            self.mesh().start("rows of a pass", &self.mesh().all_ranks(), parts, &vec![8; ranks])?;
        let count = |bytes: &Vec<u8>| bytes.first_chunk().map(|bytes| usize::from_le_bytes(*bytes));
        let counts =
            received.wait()?.iter().map(count).collect::<Option<_>>().context("a rank sent no count")?;
        let pairs = rows * top_k;
        let slots = Tensor::arange(0, pairs as u32, device)?;
        let experts = Tensor::from_vec(vec![self.experts as u32; pairs], pairs, device)?;
        Ok(PassRows { counts, top_k, slots, experts })
    }

    /// Returns the expert outputs of the rows `own`. `products` computes the experts of this rank for tokens
    /// of all ranks. Every rank must call this method or [`Self::serve_on_device`].
    ///
    /// # Errors
    /// When an exchange fails, or `products` fails.
    pub(super) fn forward_on_device(
        &self,
        pass: &PassRows,
        own: &RoutedRows,
        products: ExpertForward,
    ) -> Result<ExpertOutputs> {
        Ok(match pass.are_gathered() {
            true => ExpertOutputs::InRows {
                outputs: self.gathered_outputs(pass, own, products)?,
                rows: self.owner_rows(pass, own.routed_experts)?,
            },
            false => ExpertOutputs::InRows {
                outputs: self.sent_outputs(own.h, own.plan, products)?,
                rows: own.plan.row_of()?,
            },
        })
    }

    /// Takes part in a pass in which this rank has no rows.
    ///
    /// # Errors
    /// Errors of [`Self::forward_on_device`].
    pub(super) fn serve_on_device(&self, pass: &PassRows, products: ExpertForward) -> Result<()> {
        let device = pass.slots.device();
        let h = Tensor::zeros((0, self.width), DType::BF16, device)?;
        let routed_experts = Tensor::zeros((0, pass.top_k), DType::U32, device)?;
        let plan = Dispatch::new(&routed_experts, self.experts)?;
        let own = RoutedRows { h: &h, routed_experts: &routed_experts, plan: &plan };
        match pass.are_gathered() {
            true => self.gathered_outputs(pass, &own, products).map(drop),
            false => self.sent_outputs(&h, &plan, products).map(drop),
        }
    }

    /// Gathers the rows of all ranks. Returns an output of each rank for each (token, slot), `[R·T·K, H]`.
    fn gathered_outputs(&self, pass: &PassRows, own: &RoutedRows, products: ExpertForward) -> Result<Tensor> {
        let (mesh, ranks) = (self.mesh(), self.mesh().ranks());
        let [h, routed_experts] =
            gather_rows(mesh, "rows of experts", [own.h, own.routed_experts], &pass.counts)?;
        let plan = Dispatch::new(&routed_experts, self.experts)?;
        let outputs = match self.local_experts() {
            // With more ranks than experts, a rank may have none.
            none if none.is_empty() => {
                Tensor::zeros((plan.row_of()?.dim(0)?, self.width), h.dtype(), h.device())?
            }
            _ => products(&h, &plan.of_experts(self.local_experts()))?,
        };
        let outputs = ops::take_rows(&outputs, &plan.row_of()?)?;
        let slots = pass.counts.iter().map(|count| count * pass.top_k);
        let pairs = own.h.dim(0)? * pass.top_k;
        exchange_rows(mesh, "outputs of experts", &outputs, &consecutive(slots), &vec![pairs; ranks])
    }

    /// Returns the row of each (token, slot) in [`Self::gathered_outputs`], u32 `[T·K]`. There is at least
    /// one token.
    ///
    /// Rank r has the experts from ⌊E·r / R⌋ on. So expert e is on rank ⌊((e + 1)·R - 1) / E⌋.
    fn owner_rows(&self, pass: &PassRows, routed_experts: &Tensor) -> Result<Tensor> {
        let ranks = self.mesh().ranks() as f64;
        let pairs = routed_experts.elem_count();
        let owners = routed_experts.flatten_all()?.affine(ranks, ranks - 1.0)?.div(&pass.experts)?;
        Ok(owners.affine(pairs as f64, 0.0)?.add(&pass.slots)?)
    }

    /// Sends each row to the rank of its expert, which returns the output. Returns the outputs of this rank's
    /// rows, `[T·K, H]`, sorted by expert. Every rank must call this method.
    ///
    /// The backward pass sends gradients the same ways back. An expert's rank adds the gradients of its
    /// weights rank after rank, as one GPU adds those of one micro-batch after another.
    ///
    /// # Errors
    /// When an exchange fails, or `products` fails.
    pub(super) fn sent_outputs(
        &self,
        h: &Tensor,
        plan: &Dispatch,
        products: ExpertForward,
    ) -> Result<Tensor> {
        let (mesh, ranks) = (self.mesh(), self.mesh().ranks());
        let starts = plan.starts()?.unsqueeze(0)?;
        let [starts] = gather_rows(mesh, "row counts of experts", [&starts], &vec![1; ranks])?;
        let starts: Vec<Vec<u32>> = starts.to_vec2()?;
        let count = |rank: usize, experts: Range<usize>| {
            (starts[rank][experts.end] - starts[rank][experts.start]) as usize
        };
        let count_of = |rank: usize, expert: usize| count(rank, expert..expert + 1);
        // Rows of this rank for each rank, and rows of each rank for this one.
        let sent: Vec<usize> = (0..ranks).map(|rank| count(mesh.rank(), self.experts_of(rank))).collect();
        let requested: Vec<usize> = (0..ranks).map(|rank| count(rank, self.local_experts())).collect();

        let sorted = ops::dispatch(h, plan)?;
        let exchange = |name: &'static str, sent: &[usize], received: &[usize]| {
            let (sent, received) = (sent.to_vec(), received.to_vec());
            ExchangeRows { mesh: mesh.clone(), name, sent, received }
        };
        let rows = apply([&sorted], exchange("rows of experts", &sent, &requested))?;
        let local = self.local_experts();
        let experts_of_rank = |rank: usize| {
            let rows = local.clone().map(move |expert| (expert, count_of(rank, expert)));
            rows.flat_map(|(expert, rows)| std::iter::repeat_n((expert - local.start) as u32, rows))
        };
        let routed_experts: Vec<u32> = (0..ranks).flat_map(experts_of_rank).collect();
        let outputs = match routed_experts.len() {
            // All ranks record the exchange of outputs, or none does.
            0 if is_tracked(&rows) || !is_recording() => rows,
            0 => Var::from_tensor(&rows)?.into_inner(),
            count => {
                let routed_experts = Tensor::from_vec(routed_experts, (count, 1), rows.device())?;
                let counts =
                    (0..ranks).map(|rank| local.clone().map(|expert| count_of(rank, expert)).collect());
                let plan = Dispatch::new(&routed_experts, local.len())?.with_sources(counts.collect())?;
                ops::unsort(&products(&rows, &plan)?, &plan)?
            }
        };
        Ok(apply([&outputs], exchange("outputs of experts", &requested, &sent))?)
    }
}

/// Returns consecutive ranges with the lengths `lengths`, from 0 on.
fn consecutive(lengths: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let ranges = lengths.scan(0, |end, length| {
        *end += length;
        Some(*end - length..*end)
    });
    ranges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::Mesh;

    #[test]
    fn every_expert_has_the_rank_that_holds_it() {
        for (experts, ranks) in
            [(4, 1), (4, 2), (4, 3), (5, 3), (3, 4), (32, 8), (128, 8), (128, 128), (7, 5)]
        {
            let parallel = ExpertParallel::new(Mesh::without_connection(0, ranks), experts, 8);
            // Token t has the experts t and (t + 1) mod E.
            let pairs: Vec<u32> =
                (0..experts).flat_map(|t| [t, (t + 1) % experts]).map(|e| e as u32).collect();
            let count = pairs.len();
            let routed_experts = Tensor::from_vec(pairs.clone(), (experts, 2), &Device::Cpu).unwrap();
            let pass = PassRows {
                counts: vec![experts; ranks],
                top_k: 2,
                slots: Tensor::arange(0, count as u32, &Device::Cpu).unwrap(),
                experts: Tensor::full(experts as u32, count, &Device::Cpu).unwrap(),
            };
            let rows = parallel.owner_rows(&pass, &routed_experts).unwrap().to_vec1::<u32>().unwrap();
            for (slot, (row, expert)) in rows.into_iter().zip(pairs).enumerate() {
                let owner = row as usize / count;
                assert_eq!(row as usize, owner * count + slot);
                assert!(
                    parallel.experts_of(owner).contains(&(expert as usize)),
                    "{expert} of {experts}, {ranks}"
                );
            }
        }
    }

    #[test]
    fn passes_of_few_rows_are_gathered_by_all_ranks_alike() {
        let pass = |counts: &[usize]| {
            let none = Tensor::arange(0u32, 0, &Device::Cpu).unwrap();
            PassRows { counts: counts.to_vec(), top_k: 2, slots: none.clone(), experts: none }
        };
        assert!(pass(&[256, 0]).are_gathered() && pass(&[1; 8]).are_gathered());
        assert!(!pass(&[257, 0]).are_gathered() && !pass(&[0, 1, 129, 1]).are_gathered());
    }
}
