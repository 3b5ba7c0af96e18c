//! Checks properties of this GPU's tensor cores that the equality of rows depends on:
//!
//! - A product is deterministic.
//! - An element depends only on its row of A, its column of B and its accumulator, not on its position.
//! - Products of zero do not change an element.
//!
//! It also tells whether other instructions give an element the same bits. No kernel relies on it. It decides
//! which instructions a new kernel may use beside those of today.

use super::instruction::{ALL_WAYS, DEPTH, INSTRUCTIONS, Instruction, Operands, WAYS};
use super::{CheckResult, Verdicts};
use anyhow::Result;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;
use rand::Rng;
use rand::seq::SliceRandom;
use rloss::random::{Purpose, stream};

/// Number of trials for each property.
const TRIALS: usize = 512;
/// Number of launches of one set of products.
const LAUNCHES: usize = 20;

pub(super) fn run(gpu: &CudaDevice, verdicts: &mut Verdicts) {
    for instruction in &INSTRUCTIONS {
        let mut property = |name: &str, check: fn(&Instruction, &CudaDevice) -> CheckResult| {
            verdicts.check(&format!("{}: {name}", instruction.name), || check(instruction, gpu));
        };
        property("sums are rounded", check_rounding);
        property("the same product, on any warp of any launch", check_determinism);
        property("depends on its row, column and accumulator alone", check_independence);
        property("products of zero change nothing", check_zeros);
        property("the same in any row and column", check_permutations);
    }
    match compare_ways(gpu) {
        Ok(rows) => rows.iter().for_each(|(way, text)| print_fact(way, text)),
        Err(error) => verdicts.print_row(ALL_WAYS.name, Err(format!("stopped: {error:#}"))),
    }
}

/// Number of products that are computed in all ways.
const PRODUCTS: usize = 8;
/// The way that the kernels use, as an index of [`WAYS`].
const WAY_OF_KERNELS: usize = 2;

/// Returns, for each other way, its name and how many elements have the bits of [`WAY_OF_KERNELS`].
pub(super) fn compare_ways(gpu: &CudaDevice) -> Result<Vec<(&'static str, String)>> {
    let mut rng = stream(6, Purpose::Evaluation, &[]);
    let products: Vec<Operands> = (0..PRODUCTS).map(|_| Operands::random(&ALL_WAYS, &mut rng)).collect();
    let results = ALL_WAYS.run(gpu, &products)?;
    let others = (0..WAYS.len()).filter(|&way| way != WAY_OF_KERNELS);
    Ok(others.map(|way| (WAYS[way], count_differing(&results, way))).collect())
}

/// Compares the results of a way with those of [`WAY_OF_KERNELS`]. `results` has `[ways][rows][columns]` for
/// each product.
fn count_differing(results: &[Vec<u32>], way: usize) -> String {
    let elements = ALL_WAYS.rows * ALL_WAYS.columns;
    let of = |result: &Vec<u32>, way: usize| result[way * elements..(way + 1) * elements].to_vec();
    let pairs = results.iter().flat_map(|result| of(result, way).into_iter().zip(of(result, WAY_OF_KERNELS)));
    let differing = pairs.filter(|(a, b)| a != b).count();
    match differing {
        0 => format!("the same bits, {} elements", results.len() * elements),
        _ => format!("other bits: {differing} of {} elements differ", results.len() * elements),
    }
}

/// Prints the row of a fact, which neither passes nor fails.
fn print_fact(way: &str, text: &str) {
    println!("| fact: {way} beside {} | {text} | |", WAYS[WAY_OF_KERNELS]);
}

/// Returns the result of `trials` comparisons, `differing` of which failed.
fn verdict(trials: usize, differing: usize) -> Result<String, String> {
    match differing {
        0 => Ok(format!("{trials} of {trials}")),
        _ => Err(format!("{differing} of {trials} differ")),
    }
}

/// Checks that sums are rounded. Exact sums would be equal in any order, and then the other checks would
/// prove nothing.
fn check_rounding(instruction: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(1, Purpose::Evaluation, &[]);
    let problem = Operands::random(instruction, &mut rng);
    let results = instruction.run(gpu, std::slice::from_ref(&problem))?.remove(0);
    let (mut inexact, mut far) = (0, 0);
    for row in 0..instruction.rows {
        for column in 0..instruction.columns {
            let element = row * instruction.columns + column;
            let products = (0..DEPTH)
                .map(|k| problem.a[row * DEPTH + k].to_f64() * problem.b[column * DEPTH + k].to_f64());
            let terms: Vec<f64> = products.chain([problem.c[element] as f64]).collect();
            let exact: f64 = terms.iter().sum();
            let largest = terms.iter().fold(0f64, |m, x| m.max(x.abs()));
            let result = f32::from_bits(results[element]) as f64;
            inexact += usize::from(result != exact);
            // The hardware may truncate each term to the precision of the largest term.
            far += usize::from((result - exact).abs() > largest * f64::powi(2.0, -18));
        }
    }
    let elements = instruction.rows * instruction.columns;
    Ok(if far == 0 && inexact * 4 > elements {
        Ok(format!("{inexact} of {elements} elements are not exact, all are close"))
    } else {
        Err(format!("{far} of {elements} elements are far off, {inexact} are not exact"))
    })
}

/// Checks that a product has the same bits on every warp and in every launch.
fn check_determinism(instruction: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(2, Purpose::Evaluation, &[]);
    let problem = Operands::random(instruction, &mut rng);
    let problems = vec![problem; TRIALS];
    let first = instruction.run(gpu, &problems[..1])?.remove(0);
    let mut differing = 0;
    for _ in 0..LAUNCHES {
        differing += instruction.run(gpu, &problems)?.iter().filter(|&d| *d != first).count();
    }
    Ok(verdict(TRIALS * LAUNCHES, differing))
}

/// Runs two lists of products and compares one element of each pair. `positions[i]` is its row and column.
fn compare(
    instruction: &Instruction,
    gpu: &CudaDevice,
    before: &[Operands],
    after: &[Operands],
    positions: &[(usize, usize)],
) -> CheckResult {
    let (a, b) = (instruction.run(gpu, before)?, instruction.run(gpu, after)?);
    let element = |i: usize| positions[i].0 * instruction.columns + positions[i].1;
    let differing = (0..positions.len()).filter(|&i| a[i][element(i)] != b[i][element(i)]).count();
    Ok(verdict(positions.len(), differing))
}

/// Checks that an element stays the same if all other rows, columns and accumulators change.
fn check_independence(instruction: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(3, Purpose::Evaluation, &[]);
    let (mut before, mut after, mut positions) = (vec![], vec![], vec![]);
    for trial in 0..TRIALS {
        let mut first = Operands::random(instruction, &mut rng);
        let mut other = Operands::random(instruction, &mut rng);
        if trial % 4 == 0 {
            // NaN and infinity in other rows and columns must not change the element either.
            other.a.fill(bf16::NAN);
            other.b.fill(bf16::INFINITY);
            other.c.fill(f32::NAN);
        }
        let (row, column) = (rng.random_range(0..instruction.rows), rng.random_range(0..instruction.columns));
        other.row_of_a(row).copy_from_slice(first.row_of_a(row));
        other.column_of_b(column).copy_from_slice(first.column_of_b(column));
        other.c[row * instruction.columns + column] = first.c[row * instruction.columns + column];
        before.push(first);
        after.push(other);
        positions.push((row, column));
    }
    compare(instruction, gpu, &before, &after, &positions)
}

/// Changes factors that are multiplied by zero, and checks that the element stays the same.
fn check_zeros(instruction: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(4, Purpose::Evaluation, &[]);
    let (mut before, mut after, mut positions) = (vec![], vec![], vec![]);
    let mut accumulators = 0;
    for trial in 0..TRIALS {
        let mut first = Operands::random(instruction, &mut rng);
        let (row, column) = (rng.random_range(0..instruction.rows), rng.random_range(0..instruction.columns));
        // A masked key in attention has the probability 0, and its value may be any finite number. Every
        // fourth trial masks all keys.
        let masked: Vec<bool> = (0..DEPTH).map(|_| trial % 4 == 0 || rng.random_bool(0.5)).collect();
        for k in (0..DEPTH).filter(|&k| masked[k]) {
            first.row_of_a(row)[k] = bf16::ZERO;
        }
        let mut other = first.clone();
        for k in (0..DEPTH).filter(|&k| masked[k]) {
            other.column_of_b(column)[k] = if trial % 2 == 0 { bf16::ZERO } else { bf16::MAX };
        }
        if trial % 4 == 0 {
            accumulators += 1;
        }
        before.push(first);
        after.push(other);
        positions.push((row, column));
    }
    let results = instruction.run(gpu, &before)?;
    let unchanged = (0..TRIALS).step_by(4).filter(|&i| {
        let element = positions[i].0 * instruction.columns + positions[i].1;
        results[i][element] == before[i].c[element].to_bits()
    });
    let unchanged = unchanged.count();
    Ok(compare(instruction, gpu, &before, &after, &positions)?.and_then(|compared| {
        let text =
            format!("{unchanged} of {accumulators} accumulators unchanged where all products are zero");
        if unchanged == accumulators { Ok(format!("{compared}; {text}")) } else { Err(text) }
    }))
}

/// Checks that an element keeps its bits if rows and columns are permuted.
fn check_permutations(instruction: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(5, Purpose::Evaluation, &[]);
    let (mut before, mut after, mut permutations) = (vec![], vec![], vec![]);
    for _ in 0..TRIALS / 8 {
        let mut first = Operands::random(instruction, &mut rng);
        let (mut rows, mut columns): (Vec<usize>, Vec<usize>) =
            ((0..instruction.rows).collect(), (0..instruction.columns).collect());
        rows.shuffle(&mut rng);
        columns.shuffle(&mut rng);
        let mut other = first.clone();
        for (to, &from) in rows.iter().enumerate() {
            other.row_of_a(to).copy_from_slice(first.row_of_a(from));
        }
        for (to, &from) in columns.iter().enumerate() {
            other.column_of_b(to).copy_from_slice(first.column_of_b(from));
        }
        for (to, &from) in rows.iter().enumerate() {
            for (to_column, &from_column) in columns.iter().enumerate() {
                other.c[to * instruction.columns + to_column] =
                    first.c[from * instruction.columns + from_column];
            }
        }
        before.push(first);
        after.push(other);
        permutations.push((rows, columns));
    }
    let (a, b) = (instruction.run(gpu, &before)?, instruction.run(gpu, &after)?);
    let mut differing = 0;
    for (i, (rows, columns)) in permutations.iter().enumerate() {
        for (to, &from) in rows.iter().enumerate() {
            for (to_column, &from_column) in columns.iter().enumerate() {
                let permuted = b[i][to * instruction.columns + to_column];
                differing += usize::from(permuted != a[i][from * instruction.columns + from_column]);
            }
        }
    }
    Ok(verdict(permutations.len() * instruction.rows * instruction.columns, differing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_bits_of_a_way_are_counted() {
        let elements = ALL_WAYS.rows * ALL_WAYS.columns;
        let mut results = vec![vec![7; WAYS.len() * elements]; 2];
        assert_eq!(count_differing(&results, 7), format!("the same bits, {} elements", 2 * elements));
        results[1][7 * elements + 5] = 8;
        assert_eq!(
            count_differing(&results, 7),
            format!("other bits: 1 of {} elements differ", 2 * elements)
        );
        assert!(count_differing(&results, 0).starts_with("the same bits"));
        results[0][WAY_OF_KERNELS * elements] = 6;
        assert!(count_differing(&results, 0).starts_with("other bits: 1 of"));
    }
}
