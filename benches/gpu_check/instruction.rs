//! Runs one tensor-core instruction on given operands.

use anyhow::Result;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;
use rand::Rng;
use rloss::ops::cuda::run_primitive_check;

/// Number of products in the sum of each element.
pub(super) const DEPTH: usize = 16;

/// A tensor-core instruction that computes `d = a b + c`, with `a [rows, 16]` and `b [16, columns]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Instruction {
    pub name: &'static str,
    function: &'static str,
    pub rows: usize,
    pub columns: usize,
    threads: usize,
    /// Number of warps or warpgroups per block. Each computes one product.
    per_block: usize,
    /// Number of ways in which a product is computed.
    ways: usize,
}

pub(super) const INSTRUCTIONS: [Instruction; 2] = [
    Instruction {
        name: "mma.sync 16x8x16",
        function: "check_product_mma",
        rows: 16,
        columns: 8,
        threads: 128,
        per_block: 4,
        ways: 1,
    },
    Instruction {
        name: "wgmma 64x64x16",
        function: "check_product_wgmma",
        rows: 64,
        columns: 64,
        threads: 128,
        per_block: 1,
        ways: 1,
    },
];

/// A product of 64 rows and 256 columns, in the ways [`WAYS`].
pub(super) const ALL_WAYS: Instruction = Instruction {
    name: "products of 64x256x16",
    function: "check_product_shapes",
    rows: 64,
    columns: 256,
    threads: 128,
    per_block: 1,
    ways: WAYS.len(),
};

/// The instructions of `check_product_shapes`. Exchanged: the columns of b are the instruction's rows, and
/// the rows of a are its columns.
pub(super) const WAYS: [&str; 8] = [
    "wgmma m64n8k16",
    "wgmma m64n16k16",
    "wgmma m64n64k16",
    "wgmma m64n128k16",
    "wgmma m64n256k16",
    "wgmma m64n8k16, a and b exchanged",
    "wgmma m64n64k16, a and b exchanged",
    "mma.sync m16n8k16",
];

/// The operands of one product. `b` is stored transposed, as `[columns][16]`.
#[derive(Debug, Clone)]
pub(super) struct Operands {
    pub a: Vec<bf16>,
    pub b: Vec<bf16>,
    pub c: Vec<f32>,
}

impl Operands {
    /// Draws operands with magnitudes from about 2^-8 to 2^8, so that sums are rounded.
    pub fn random(instruction: &Instruction, rng: &mut impl Rng) -> Self {
        let mut draw = || rng.random_range(-1f32..1.0) * f32::powi(2.0, rng.random_range(-8..=8));
        let a = (0..instruction.rows * DEPTH).map(|_| bf16::from_f32(draw())).collect();
        let b = (0..instruction.columns * DEPTH).map(|_| bf16::from_f32(draw())).collect();
        let c = (0..instruction.rows * instruction.columns).map(|_| draw()).collect();
        Self { a, b, c }
    }

    pub fn row_of_a(&mut self, row: usize) -> &mut [bf16] {
        &mut self.a[row * DEPTH..(row + 1) * DEPTH]
    }

    pub fn column_of_b(&mut self, column: usize) -> &mut [bf16] {
        &mut self.b[column * DEPTH..(column + 1) * DEPTH]
    }
}

impl Instruction {
    /// Computes one product for each of `problems` in a single launch. Returns the bits of each result,
    /// `[ways][rows][columns]`.
    pub fn run(&self, gpu: &CudaDevice, problems: &[Operands]) -> Result<Vec<Vec<u32>>> {
        let mut input = vec![];
        for problem in problems {
            for pair in problem.a.chunks(2).chain(problem.b.chunks(2)) {
                input.push(pair[0].to_bits() as u32 | (pair[1].to_bits() as u32) << 16);
            }
            input.extend(problem.c.iter().map(|x| x.to_bits()));
        }
        let elements = self.ways * self.rows * self.columns;
        let blocks = problems.len().div_ceil(self.per_block);
        let output = run_primitive_check(
            gpu,
            self.function,
            (blocks, self.threads),
            &input,
            problems.len() * elements,
        )?;
        Ok(output.chunks(elements).map(<[u32]>::to_vec).collect())
    }
}
