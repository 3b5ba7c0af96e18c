//! Experts over ranks: each rank has the weights of some experts, and rows of hidden states travel to them and back.
//!
//! A row's product with its expert is the same bits wherever it is made and whatever rows lie beside it, and the products come
//! back in the order in which the rows were sent; so the token's sum in slot order is that of one process.

use crate::dist::Mesh;
use crate::dist::wire::f32_bytes;
use crate::dist::wire::f32_values;
use crate::ops::cpu::host_values;
use crate::ops::{self, Dispatch};
use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The experts that `rank` of `ranks` has: even stretches, in order.
pub fn experts_of(experts: usize, rank: usize, ranks: usize) -> Range<usize> {
    experts * rank / ranks..experts * (rank + 1) / ranks
}

/// Which rank has which of a layer's experts.
pub struct ExpertRanks {
    mesh: Arc<Mesh>,
    experts: usize,
    /// Values of a row.
    width: usize,
}

/// The products of this rank's experts with rows `[R, H]`, sorted by the plan.
pub type Products<'a> = &'a dyn Fn(&Tensor, &Dispatch) -> Result<Tensor>;

impl ExpertRanks {
    /// `experts` of a layer whose rows have `width` values, over the ranks of `mesh`.
    pub fn new(mesh: Arc<Mesh>, experts: usize, width: usize) -> Self {
        Self { mesh, experts, width }
    }

    /// The ranks that must make every pass together.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// Those of this rank.
    pub fn own(&self) -> Range<usize> {
        self.of(self.mesh.rank())
    }

    fn of(&self, rank: usize) -> Range<usize> {
        experts_of(self.experts, rank, self.mesh.ranks())
    }

    /// The products of rows `x [T·K, H]`, sorted by `plan`, with their experts, in the same order. `products` makes those of this
    /// rank's experts, for the rows of all ranks. Every rank must ask, or [`Self::answer`].
    ///
    /// # Errors
    /// When a rank does not come in time, and those of `products`.
    pub fn products(&self, x: &Tensor, plan: &Dispatch, products: Products) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        ensure!(width == self.width, "rows of {width} values, experts take {}", self.width);
        let back = self.exchanged(&plan.counts(None)?, &host_values(&x.contiguous()?)?, products)?;
        let values: Vec<f32> = back.iter().flat_map(|bytes| f32_values(bytes)).collect();
        Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?)
    }

    /// This rank's part where it has no rows of its own.
    ///
    /// # Errors
    /// As [`Self::products`].
    pub fn answer(&self, products: Products) -> Result<()> {
        self.exchanged(&vec![0; self.experts], &[], products).map(drop)
    }

    /// Sends rows `x`, so many of each expert, and returns what the ranks gave for them, in their order.
    fn exchanged(&self, counts: &[usize], x: &[f32], products: Products) -> Result<Vec<Vec<u8>>> {
        let (ranks, own) = (self.mesh.ranks(), self.own());
        let bytes_of = |counts: &[usize]| counts.iter().sum::<usize>() * self.width * size_of::<f32>();
        let of_rank = |rank: usize| &counts[self.of(rank)];

        let told =
            (0..ranks).map(|rank| Arc::new(of_rank(rank).iter().flat_map(|&n| n.to_le_bytes()).collect()));
        let came = self.exchange("numbers of experts' rows", told.collect(), vec![8 * own.len(); ranks])?;
        let asked: Vec<Vec<usize>> = came.iter().map(|bytes| numbers(bytes)).collect();

        let mut sent = f32_bytes(x);
        let rows = (0..ranks).map(|rank| {
            let (part, rest) = sent.split_at(bytes_of(of_rank(rank)));
            sent = rest;
            Arc::new(part.to_vec())
        });
        let lengths: Vec<usize> = asked.iter().map(|counts| bytes_of(counts)).collect();
        let rows = self.exchange("experts' rows", rows.collect(), lengths.clone())?;

        let made = self.made(&asked, &rows, products)?;
        let mut made = f32_bytes(&made);
        let answers = lengths.iter().map(|&length| {
            let (part, rest) = made.split_at(length);
            made = rest;
            Arc::new(part.to_vec())
        });
        let expected = (0..ranks).map(|rank| bytes_of(of_rank(rank))).collect();
        self.exchange("experts' products", answers.collect(), expected)
    }

    fn exchange(&self, what: &str, parts: Vec<Arc<Vec<u8>>>, lengths: Vec<usize>) -> Result<Vec<Vec<u8>>> {
        self.mesh.start(what, &self.mesh.all_ranks(), parts, &lengths)?.wait()
    }

    /// The products of the rows that came, in the order in which they came: `asked` has each rank's number for each of this rank's
    /// experts.
    fn made(&self, asked: &[Vec<usize>], rows: &[Vec<u8>], products: Products) -> Result<Vec<f32>> {
        let experts = asked.iter().flat_map(|counts| (0u32..).zip(counts));
        let routes: Vec<u32> = experts.flat_map(|(e, &count)| std::iter::repeat_n(e, count)).collect();
        let count = routes.len();
        if count == 0 {
            return Ok(vec![]);
        }
        let x: Vec<f32> = rows.iter().flat_map(|bytes| f32_values(bytes)).collect();
        let x = Tensor::from_vec(x, (count, self.width), &Device::Cpu)?;
        let plan = Dispatch::new(&Tensor::from_vec(routes, (count, 1), &Device::Cpu)?, self.own().len())?;
        let made = products(&ops::dispatch(&x, &plan)?, &plan)?;
        // Back into the order of arrival; times 1 changes no bit that the sum of a token's slots would show.
        let ones = Tensor::ones((count, 1), made.dtype(), &Device::Cpu)?;
        Ok(host_values(&ops::combine(&made, &ones, &plan)?)?.to_vec())
    }
}

fn numbers(bytes: &[u8]) -> Vec<usize> {
    bytes.as_chunks().0.iter().map(|bytes| usize::from_le_bytes(*bytes)).collect()
}
