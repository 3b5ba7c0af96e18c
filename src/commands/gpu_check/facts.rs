//! Facts about this GPU's tensor cores on which the equality of rows depends.
//!
//! A product is deterministic. An element depends only on its own row, column and accumulator, and not on its
//! position. Products of zero do not change it.

use super::Verdicts;
use super::instruction::{DEPTH, INSTRUCTIONS, Instruction, Operands};
use crate::random::{Purpose, stream};
use anyhow::Result;
use candle_core::cuda_backend::CudaDevice;
use half::bf16;
use rand::Rng;
use rand::seq::SliceRandom;

/// Trials per fact.
const TRIALS: usize = 512;
/// Launches of one set of products.
const LAUNCHES: usize = 20;

type CheckResult = Result<Result<String, String>>;

pub(super) fn run(gpu: &CudaDevice, verdicts: &mut Verdicts) -> Result<()> {
    for on in &INSTRUCTIONS {
        let mut fact = |what: &str, check: fn(&Instruction, &CudaDevice) -> CheckResult| {
            verdicts.check(&format!("{}: {what}", on.name), || check(on, gpu));
        };
        fact("the sums round", sums_round);
        fact("the same product, on any warp of any launch", same_everywhere);
        fact("only its own row, column and accumulator", own_products_only);
        fact("products of zero are as good as absent", zeros_are_invisible);
        fact("the same in any row and column", same_in_any_place);
    }
    Ok(())
}

fn all_of(trials: usize, wrong: usize) -> Result<String, String> {
    if wrong == 0 { Ok(format!("{trials} of {trials}")) } else { Err(format!("{wrong} of {trials} differ")) }
}

/// Checks that sums round. Without it the other facts would prove nothing, because exact sums agree in any
/// order.
fn sums_round(on: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(1, Purpose::Evaluation, &[]);
    let problem = Operands::random(on, &mut rng);
    let seen = on.run(gpu, std::slice::from_ref(&problem))?.remove(0);
    let (mut inexact, mut far) = (0, 0);
    for row in 0..on.rows {
        for column in 0..on.columns {
            let at = row * on.columns + column;
            let products = (0..DEPTH)
                .map(|k| problem.a[row * DEPTH + k].to_f64() * problem.b[column * DEPTH + k].to_f64());
            let terms: Vec<f64> = products.chain([problem.c[at] as f64]).collect();
            let exact: f64 = terms.iter().sum();
            let size = terms.iter().fold(0f64, |m, x| m.max(x.abs()));
            let seen = f32::from_bits(seen[at]) as f64;
            inexact += usize::from(seen != exact);
            // Terms may be truncated at the last place of the largest one.
            far += usize::from((seen - exact).abs() > size * f64::powi(2.0, -18));
        }
    }
    let elements = on.rows * on.columns;
    Ok(if far == 0 && inexact * 4 > elements {
        Ok(format!("{inexact} of {elements} elements are not exact, all are close"))
    } else {
        Err(format!("{far} of {elements} elements are far off, {inexact} are not exact"))
    })
}

fn same_everywhere(on: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(2, Purpose::Evaluation, &[]);
    let problem = Operands::random(on, &mut rng);
    let problems = vec![problem; TRIALS];
    let first = on.run(gpu, &problems[..1])?.remove(0);
    let mut wrong = 0;
    for _ in 0..LAUNCHES {
        wrong += on.run(gpu, &problems)?.iter().filter(|&d| *d != first).count();
    }
    Ok(all_of(TRIALS * LAUNCHES, wrong))
}

/// Compares element `places[i]` of the i-th product of two lists.
fn compare(
    on: &Instruction,
    gpu: &CudaDevice,
    before: &[Operands],
    after: &[Operands],
    places: &[(usize, usize)],
) -> CheckResult {
    let (a, b) = (on.run(gpu, before)?, on.run(gpu, after)?);
    let at = |i: usize| places[i].0 * on.columns + places[i].1;
    let wrong = (0..places.len()).filter(|&i| a[i][at(i)] != b[i][at(i)]).count();
    Ok(all_of(places.len(), wrong))
}

fn own_products_only(on: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(3, Purpose::Evaluation, &[]);
    let (mut before, mut after, mut places) = (vec![], vec![], vec![]);
    for trial in 0..TRIALS {
        let mut one = Operands::random(on, &mut rng);
        let mut other = Operands::random(on, &mut rng);
        if trial % 4 == 0 {
            // NaN and infinity must not leak from other rows and columns either.
            other.a.fill(bf16::NAN);
            other.b.fill(bf16::INFINITY);
            other.c.fill(f32::NAN);
        }
        let (row, column) = (rng.random_range(0..on.rows), rng.random_range(0..on.columns));
        other.row_of_a(row).copy_from_slice(one.row_of_a(row));
        other.column_of_b(column).copy_from_slice(one.column_of_b(column));
        other.c[row * on.columns + column] = one.c[row * on.columns + column];
        before.push(one);
        after.push(other);
        places.push((row, column));
    }
    compare(on, gpu, &before, &after, &places)
}

fn zeros_are_invisible(on: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(4, Purpose::Evaluation, &[]);
    let (mut before, mut after, mut places) = (vec![], vec![], vec![]);
    let mut accumulators = 0;
    for trial in 0..TRIALS {
        let mut one = Operands::random(on, &mut rng);
        let (row, column) = (rng.random_range(0..on.rows), rng.random_range(0..on.columns));
        // A masked key has probability 0, and its value may be any finite number. Every fourth trial masks
        // all keys.
        let masked: Vec<bool> = (0..DEPTH).map(|_| trial % 4 == 0 || rng.random_bool(0.5)).collect();
        for k in (0..DEPTH).filter(|&k| masked[k]) {
            one.row_of_a(row)[k] = bf16::ZERO;
        }
        let mut other = one.clone();
        for k in (0..DEPTH).filter(|&k| masked[k]) {
            other.column_of_b(column)[k] = if trial % 2 == 0 { bf16::ZERO } else { bf16::MAX };
        }
        if trial % 4 == 0 {
            accumulators += 1;
        }
        before.push(one);
        after.push(other);
        places.push((row, column));
    }
    let results = on.run(gpu, &before)?;
    let kept = (0..TRIALS).step_by(4).filter(|&i| {
        let at = places[i].0 * on.columns + places[i].1;
        results[i][at] == before[i].c[at].to_bits()
    });
    let kept = kept.count();
    Ok(compare(on, gpu, &before, &after, &places)?.and_then(|seen| {
        let accumulators_kept = format!("{kept} of {accumulators} accumulators kept where all are zero");
        if kept == accumulators { Ok(format!("{seen}; {accumulators_kept}")) } else { Err(accumulators_kept) }
    }))
}

fn same_in_any_place(on: &Instruction, gpu: &CudaDevice) -> CheckResult {
    let mut rng = stream(5, Purpose::Evaluation, &[]);
    let (mut before, mut after, mut moves) = (vec![], vec![], vec![]);
    for _ in 0..TRIALS / 8 {
        let mut one = Operands::random(on, &mut rng);
        let (mut rows, mut columns): (Vec<usize>, Vec<usize>) =
            ((0..on.rows).collect(), (0..on.columns).collect());
        rows.shuffle(&mut rng);
        columns.shuffle(&mut rng);
        let mut other = one.clone();
        for (to, &from) in rows.iter().enumerate() {
            other.row_of_a(to).copy_from_slice(one.row_of_a(from));
        }
        for (to, &from) in columns.iter().enumerate() {
            other.column_of_b(to).copy_from_slice(one.column_of_b(from));
        }
        for (to, &from) in rows.iter().enumerate() {
            for (to_column, &from_column) in columns.iter().enumerate() {
                other.c[to * on.columns + to_column] = one.c[from * on.columns + from_column];
            }
        }
        before.push(one);
        after.push(other);
        moves.push((rows, columns));
    }
    let (a, b) = (on.run(gpu, &before)?, on.run(gpu, &after)?);
    let mut wrong = 0;
    for (i, (rows, columns)) in moves.iter().enumerate() {
        for (to, &from) in rows.iter().enumerate() {
            for (to_column, &from_column) in columns.iter().enumerate() {
                let moved = b[i][to * on.columns + to_column];
                wrong += usize::from(moved != a[i][from * on.columns + from_column]);
            }
        }
    }
    Ok(all_of(moves.len() * on.rows * on.columns, wrong))
}
