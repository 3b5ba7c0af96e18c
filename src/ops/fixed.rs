//! PROTOTYPE: gradient sums in 64-bit fixed point over fixed blocks of rows.

use super::product::{GemmThreads, StridedMatrix, product};
use super::tiles;
use multiversion::multiversion;
use rayon::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};

/// Rows of a block; 0 means off (today's chain of f32); [`REFERENCE`] means f64 sums.
static BLOCK: AtomicUsize = AtomicUsize::new(0);
/// Blocks by the rows of the micro-batch instead of those of a sequence.
static BY_MICRO_BATCH: AtomicBool = AtomicBool::new(false);
/// Only vectors: norms, biases, sinks.
static VECTORS_ONLY: AtomicBool = AtomicBool::new(false);
pub const REFERENCE: usize = usize::MAX;
/// Outputs of at least this many values use tiles that round in registers.
pub static TILES_MIN: AtomicUsize = AtomicUsize::new(1 << 17);
/// Largest block value in units, as a power of 2; what sums stay below: 2^62 after 2^12 blocks.
const LIMIT: i32 = 50;
/// The unit is this many powers of 2 below the largest block value of the step before.
const BELOW: i32 = 40;

pub fn set(block: usize, by_micro_batch: bool, vectors_only: bool) {
    BLOCK.store(block, Relaxed);
    BY_MICRO_BATCH.store(by_micro_batch, Relaxed);
    VECTORS_ONLY.store(vectors_only, Relaxed);
}

pub fn vectors_on() -> bool {
    BLOCK.load(Relaxed) != 0
}

pub fn on() -> bool {
    vectors_on() && !VECTORS_ONLY.load(Relaxed)
}

pub fn is_reference() -> bool {
    BLOCK.load(Relaxed) == REFERENCE
}

/// The blocks of a pass.
#[derive(Default, Clone)]
pub struct PassBlocks {
    rows: Arc<Vec<Range<usize>>>,
    block_of_row: Arc<Vec<u32>>,
    targets: Arc<Vec<Range<usize>>>,
}

thread_local! {
    static PASS: RefCell<PassBlocks> = RefCell::default();
    /// Sums by block of a gradient that goes through the graph, by its tensor.
    static STASH: RefCell<HashMap<String, Vec<f32>>> = RefCell::default();
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Cuts where (sequence, position / block) changes.
fn cut(keys: impl Iterator<Item = (usize, usize)>) -> Vec<Range<usize>> {
    let keys: Vec<_> = keys.collect();
    let mut start = 0;
    keys.chunk_by(|a, b| a == b)
        .map(|same| {
            start += same.len();
            start - same.len()..start
        })
        .collect()
}

/// Sets the blocks of the pass on this thread: the sequence and position of each row and of each target.
pub fn begin_pass(rows: &[(usize, usize)], targets: &[(usize, usize)]) {
    let block = BLOCK.load(Relaxed);
    if block == 0 {
        return;
    }
    let block = if block == REFERENCE { 512 } else { block };
    let by_micro_batch = BY_MICRO_BATCH.load(Relaxed);
    let key = |(i, &(sequence, position)): (usize, &(usize, usize))| {
        if by_micro_batch { (0, i / block) } else { (sequence, position / block) }
    };
    let rows_cut = cut(rows.iter().enumerate().map(key));
    let targets_cut = cut(targets.iter().enumerate().map(key));
    let mut block_of_row = vec![0; rows.len()];
    for (i, range) in rows_cut.iter().enumerate() {
        block_of_row[range.clone()].fill(i as u32);
    }
    PASS.set(PassBlocks {
        rows: Arc::new(rows_cut),
        block_of_row: Arc::new(block_of_row),
        targets: Arc::new(targets_cut),
    });
}

fn covers(blocks: &[Range<usize>], rows: usize) -> bool {
    blocks.last().map_or(0, |last| last.end) == rows
}

/// The blocks of `rows` rows: those of the pass, or of its targets.
pub fn blocks(rows: usize) -> Arc<Vec<Range<usize>>> {
    let pass = PASS.with_borrow(Clone::clone);
    if covers(&pass.rows, rows) {
        pass.rows
    } else if covers(&pass.targets, rows) {
        pass.targets
    } else {
        panic!("no blocks for {rows} rows")
    }
}

pub fn target_blocks(rows: usize) -> Arc<Vec<Range<usize>>> {
    let pass = PASS.with_borrow(Clone::clone);
    assert!(covers(&pass.targets, rows), "targets");
    pass.targets
}

/// Blocks of rows that are added as vectors: single rows for the reference.
pub fn vector_blocks(rows: usize) -> Arc<Vec<Range<usize>>> {
    if is_reference() { Arc::new((0..rows).map(|i| i..i + 1).collect()) } else { blocks(rows) }
}

/// The blocks of sorted rows, by their tokens.
pub fn blocks_of_tokens(tokens: &[u32]) -> Vec<Range<usize>> {
    let block_of = PASS.with_borrow(|pass| pass.block_of_row.clone());
    let single = is_reference();
    cut(tokens.iter().enumerate().map(|(i, &token)| {
        if single { (0, i) } else { (0, block_of[token as usize] as usize) }
    }))
}

pub fn stash(tensor: &candle_core::Tensor, sums: Vec<f32>) {
    STASH.with_borrow_mut(|stash| stash.insert(format!("{:?}", tensor.id()), sums));
}

pub fn unstash(tensor: &candle_core::Tensor) -> Option<Vec<f32>> {
    STASH.with_borrow_mut(|stash| stash.remove(&format!("{:?}", tensor.id())))
}

/// One parameter's sum.
pub struct Sum {
    pub units: Mutex<Vec<i64>>,
    pub reference: Mutex<Vec<f64>>,
    pub exponent: AtomicI32,
    /// Bits of the largest absolute block value.
    pub max: AtomicU32,
    pub blocks: AtomicUsize,
}

pub static SUMS: RwLock<Vec<Option<Arc<Sum>>>> = RwLock::new(Vec::new());

pub fn sum_of(parameter: usize, len: usize) -> Arc<Sum> {
    let found = |sums: &Vec<Option<Arc<Sum>>>| sums.get(parameter).cloned().flatten();
    if let Some(sum) = found(&SUMS.read().unwrap()) {
        if is_reference() && sum.reference.lock().unwrap().len() != len {
            *sum.reference.lock().unwrap() = vec![0.0; len];
        }
        if !is_reference() && sum.units.lock().unwrap().len() != len {
            *sum.units.lock().unwrap() = vec![0; len];
        }
        return sum;
    }
    let mut sums = SUMS.write().unwrap();
    if sums.len() <= parameter {
        sums.resize(parameter + 1, None);
    }
    if sums[parameter].is_none() {
        sums[parameter] = Some(Arc::new(Sum {
            units: Mutex::default(),
            reference: Mutex::default(),
            exponent: AtomicI32::new(30),
            max: AtomicU32::new(0),
            blocks: AtomicUsize::new(0),
        }));
    }
    drop(sums);
    sum_of(parameter, len)
}

pub fn power(exponent: i32) -> f32 {
    2f32.powi(exponent)
}

/// Where a block is added.
pub enum Target<'a> {
    Units(&'a mut [i64], f32, &'a AtomicU32),
    Reference(&'a mut [f64]),
}

impl<'a> Target<'a> {
    /// Splits into parts of `len` values.
    pub fn parts(self, len: usize) -> Vec<Target<'a>> {
        match self {
            Target::Units(units, scale, max) => {
                units.chunks_exact_mut(len).map(|part| Target::Units(part, scale, max)).collect()
            }
            Target::Reference(sums) => sums.chunks_exact_mut(len).map(Target::Reference).collect(),
        }
    }

    /// Adds the blocks' products of `x [rows, k]` transposed and `dy [rows, n]`.
    pub fn product(
        &mut self,
        spread: GemmThreads,
        x: &[f32],
        dy: &[f32],
        (k, rows, n): (usize, usize, usize),
        blocks: &[Range<usize>],
    ) {
        if rows == 0 {
            return;
        }
        assert!(covers(blocks, rows), "blocks of a product");
        match self {
            Target::Reference(out) => reference_product(out, x, dy, (k, rows, n)),
            Target::Units(out, scale, max) => {
                if n > 1 && k > 1 && k * n >= TILES_MIN.load(Relaxed) && tiles::has_fixed() {
                    let (a, b) = (StridedMatrix::from_transpose(x, k), StridedMatrix::rows(dy, n));
                    let threads = spread.threads(k * n * rows);
                    let found = tiles::product_fixed(threads, out, a, b, (k, rows, n), blocks, *scale);
                    max.fetch_max(found, Relaxed);
                    return;
                }
                let mut scratch = SCRATCH.take();
                scratch.resize(k * n, 0.0);
                for block in blocks {
                    let (a, b) = (&x[block.start * k..block.end * k], &dy[block.start * n..block.end * n]);
                    let (a, b) = (StridedMatrix::from_transpose(a, k), StridedMatrix::rows(b, n));
                    product(spread, &mut scratch, a, b, (k, block.len(), n), false);
                    max.fetch_max(add_units(out, &scratch, *scale), Relaxed);
                }
                SCRATCH.set(scratch);
            }
        }
    }

    pub fn vector(&mut self, values: &[f32]) {
        match self {
            Target::Units(out, scale, max) => {
                max.fetch_max(add_units(out, values, *scale), Relaxed);
            }
            Target::Reference(out) => out.iter_mut().zip(values).for_each(|(o, &v)| *o += f64::from(v)),
        }
    }

    /// Adds values at every `stride`-th place from `first` on.
    pub fn strided(&mut self, values: &[f32], first: usize, stride: usize) {
        match self {
            Target::Units(out, scale, max) => {
                let mut most = 0;
                for (i, &v) in values.iter().enumerate() {
                    most = most.max(v.to_bits() & 0x7fff_ffff);
                    out[first + i * stride] += (v * *scale).round_ties_even() as i64;
                }
                max.fetch_max(most, Relaxed);
            }
            Target::Reference(out) => {
                values.iter().enumerate().for_each(|(i, &v)| out[first + i * stride] += f64::from(v));
            }
        }
    }
}

/// Calls `add` with the sum of a parameter, locked.
pub static REFERENCE_STRIDE: AtomicUsize = AtomicUsize::new(1);

pub fn with(parameter: usize, len: usize, blocks: usize, add: impl FnOnce(Target)) {
    if is_reference() && parameter % REFERENCE_STRIDE.load(Relaxed) != 0 {
        return;
    }
    let sum = sum_of(parameter, len);
    if is_reference() {
        return add(Target::Reference(&mut sum.reference.lock().unwrap()));
    }
    sum.blocks.fetch_add(blocks, Relaxed);
    let scale = power(sum.exponent.load(Relaxed));
    add(Target::Units(&mut sum.units.lock().unwrap(), scale, &sum.max))
}

/// Adds `values` in units of `1 / scale`; returns the bits of the largest absolute value.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub fn add_units(out: &mut [i64], values: &[f32], scale: f32) -> u32 {
    let mut max = 0u32;
    for (out, &v) in out.iter_mut().zip(values) {
        max = max.max(v.to_bits() & 0x7fff_ffff);
        // SAFETY: prototype; values beyond the range are found by their maximum.
        *out = out.wrapping_add(unsafe { (v * scale).round_ties_even().to_int_unchecked::<i64>() });
    }
    max
}

/// Adds the f64 product.
fn reference_product(out: &mut [f64], x: &[f32], dy: &[f32], (k, rows, n): (usize, usize, usize)) {
    out.par_chunks_mut(n).enumerate().for_each(|(i, out)| {
        let column: Vec<f64> = (0..rows).map(|t| f64::from(x[t * k + i])).collect();
        for (part, out) in out.chunks_mut(256).enumerate() {
            accumulate(out, &column, &dy[part * 256..], n);
        }
    });
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn accumulate(out: &mut [f64], column: &[f64], dy: &[f32], n: usize) {
    for (t, &x) in column.iter().enumerate() {
        let dy = &dy[t * n..t * n + out.len()];
        out.iter_mut().zip(dy).for_each(|(o, &d)| *o = x.mul_add(f64::from(d), *o));
    }
}

/// Writes a sum into the gradient and clears it. Returns whether it may have overflowed.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
fn take_units(gradient: &mut [f32], units: &mut [i64], unit: f64) {
    for (g, u) in gradient.iter_mut().zip(units) {
        *g = (*u as f64 * unit) as f32;
        *u = 0;
    }
}

/// The state of a sum at the end of a step.
pub struct Finished {
    pub exponent: i32,
    pub max: f32,
    pub blocks: usize,
    pub overflow: bool,
    pub hash: u64,
}

/// Writes a parameter's sum into its gradient, clears it and sets the unit of the next step.
pub fn finish(parameter: usize, gradient: &mut [f32], hash: bool) -> Option<Finished> {
    let sum = SUMS.read().unwrap().get(parameter).cloned().flatten()?;
    let mut units = sum.units.lock().unwrap();
    if sum.blocks.load(Relaxed) == 0 {
        return None;
    }
    let exponent = sum.exponent.load(Relaxed);
    let (max, blocks) = (sum.max.swap(0, Relaxed), sum.blocks.swap(0, Relaxed));
    let digest = if hash { u64::from_le_bytes(blake3::hash(bytemuck::cast_slice(&units)).as_bytes()[..8].try_into().unwrap()) } else { 0 };
    let unit = 2f64.powi(-exponent);
    gradient
        .par_chunks_mut(1 << 16)
        .zip(units.par_chunks_mut(1 << 16))
        .for_each(|(gradient, units)| take_units(gradient, units, unit));
    let max = f32::from_bits(max);
    let log = if max > 0.0 && max.is_finite() { max.log2().ceil() as i32 } else { -40 };
    let overflow = !max.is_finite() || log + exponent > LIMIT || blocks > 1 << 12;
    if !(BELOW - 4..=BELOW + 4).contains(&(log + exponent)) {
        sum.exponent.store((BELOW - log).clamp(-60, 100), Relaxed);
    }
    Some(Finished { exponent, max, blocks, overflow, hash: digest })
}
