//! Which of cuBLASLt's algorithms leave a row its bits: tried on this GPU for every dense product of a model, and written down for
//! `model.dense_products`.

use super::GpuCheckArgs;
use super::model_ops::Rule;
use super::row_ops::numbers;
use crate::atomic_file::write_file;
use crate::model::names::dense_shapes;
use crate::ops::cuda::{CublasLt, Gpu, LtProduct};
use crate::ops::dense_record::{DenseChoice, DenseRecord, DenseShape, LtAlgorithm, ROWS_MAX};
use crate::ops::{Parameter, linear_by};
use crate::random::{Purpose, stream};
use crate::recipe::locate;
use crate::run::source::{model_config, pin_model};
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use half::bf16;
use rand::Rng;
use rand::seq::SliceRandom;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Rows for which the library is asked what it would take.
const ASKED_ROWS: [usize; 4] = [ROWS_MAX, 256, 16, 1];
/// Rows whose values are compared with exact ones.
const EXACT_ROWS: [usize; 6] = [0, 1, 129, 1024, 2047, ROWS_MAX - 1];
/// As near as a sum in f32 comes that is rounded once: parts of it that were rounded on the way are farther off.
const NEAR: Rule = Rule::Rounded(1e-4);
/// First rows of stretches; a row then has other places among others.
const FIRST_ROWS: [usize; 5] = [0, 1, 63, 777, 2050];
/// By how many places all rows are moved.
const MOVED: usize = 1365;

/// Writes the record for the model of `args` to `path`.
///
/// # Errors
/// [`crate::error::BadInput`] for a recipe without such a model, those of the device and of the disk.
pub(super) fn write(gpu: &Gpu, args: &GpuCheckArgs, path: &Path) -> Result<()> {
    let recipe = args.recipe.as_deref().context("--write-cublaslt needs --recipe")?;
    let source = locate(recipe)?;
    let mut plan = source.resolve(&args.sets)?;
    pin_model(&mut plan, &source, &args.sets)?;
    let config = model_config(&plan.recipe)?;
    let library = CublasLt::open(&gpu.device)?;
    let mut choices = BTreeMap::new();
    for shape in dense_shapes(&config) {
        let (choice, proposed) = choose(&library, &gpu.device, shape)?;
        match &choice {
            DenseChoice::Lt(_) => println!("| {shape} | cuBLASLt | one of {proposed} proposed |"),
            DenseChoice::Own(why) => println!("| {shape} | own kernel | {why} |"),
        }
        choices.insert(shape, choice);
    }
    let record = DenseRecord { device: gpu.name.clone(), cublaslt: CublasLt::version(), choices };
    write_file(path, &record.to_toml())
}

/// The first that qualifies of those proposed, whose number comes with it.
fn choose(library: &Arc<CublasLt>, device: &Device, shape: DenseShape) -> Result<(DenseChoice, usize)> {
    let mut proposed: Vec<LtAlgorithm> = vec![];
    for rows in ASKED_ROWS {
        for algorithm in library.proposed(shape, rows)? {
            if !proposed.contains(&algorithm) {
                proposed.push(algorithm);
            }
        }
    }
    let trial = Trial::new(device, shape)?;
    let mut refused = vec![];
    for (index, &algorithm) in proposed.iter().enumerate() {
        let product = LtProduct::new(library, shape, algorithm);
        match trial.fault(&product).unwrap_or_else(|error| Some(format!("{error:#}"))) {
            None => return Ok((DenseChoice::Lt(algorithm), proposed.len())),
            Some(fault) => refused.push(format!("{}: {fault}", index + 1)),
        }
    }
    let why = match refused.is_empty() {
        true => "cuBLASLt proposes nothing".to_owned(),
        false => format!("of {} proposed, {}", proposed.len(), refused.join("; ")),
    };
    Ok((DenseChoice::Own(why), proposed.len()))
}

/// What a product multiplies.
struct Factors {
    /// `[ROWS_MAX, k]`.
    x: Tensor,
    weight: Parameter,
    bias: Option<Parameter>,
}

impl Factors {
    /// On `device`; a `bias` is f32.
    fn on(device: &Device, [x, weight]: [&Tensor; 2], bias: Option<&Tensor>) -> Result<Self> {
        let there = |x: &Tensor| -> Result<Parameter> { Ok(Parameter::frozen(&x.to_device(device)?)) };
        let bias = bias.map(there).transpose()?;
        Ok(Self { x: x.to_device(device)?, weight: there(weight)?, bias })
    }

    /// What `product` gives for `x`, rows one after the other.
    fn multiplied(&self, product: &LtProduct, x: &Tensor) -> Result<Vec<bf16>> {
        let y = linear_by(x, &self.weight, self.bias.as_ref(), product)?;
        Ok(y.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()?)
    }
}

/// One product on numbers that show what its algorithm does.
struct Trial {
    n: usize,
    plain: Factors,
    /// Rows [`EXACT_ROWS`] of the plain product.
    exact: Vec<Vec<f32>>,
    cancelling: Factors,
}

impl Trial {
    fn new(device: &Device, shape: DenseShape) -> Result<Self> {
        let DenseShape { k, n, bias } = shape;
        let (x, weight) = (numbers(1, ROWS_MAX, k, 1.0)?, numbers(2, k, n, 0.3)?);
        let bias =
            if bias { Some(numbers(3, 1, n, 1.0)?.to_dtype(DType::F32)?.flatten_all()?) } else { None };
        let doubles =
            |x: &Tensor| -> Result<Vec<f64>> { Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?) };
        let (of_x, of_weight) = (doubles(&x)?, doubles(&weight)?);
        let of_bias = bias.as_ref().map_or(Ok(vec![0.0; n]), doubles)?;
        let exact = EXACT_ROWS.map(|row| {
            let mut sums = of_bias.clone();
            for (x, weights) in of_x[row * k..].iter().zip(of_weight.chunks_exact(n)) {
                sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += x * weight);
            }
            sums.into_iter().map(|sum| sum as f32).collect()
        });
        let plain = Factors::on(device, [&x, &weight], bias.as_ref())?;
        Ok(Self { n, plain, exact: exact.to_vec(), cancelling: cancelling(device, shape)? })
    }

    /// Why `product` does not qualify.
    fn fault(&self, product: &LtProduct) -> Result<Option<String>> {
        let n = self.n;
        let plain = self.plain.multiplied(product, &self.plain.x)?;
        for (&row, exact) in EXACT_ROWS.iter().zip(&self.exact) {
            if let Some(far) = far_off(&plain[row * n..][..n], exact) {
                return Ok(Some(far));
            }
        }
        let x = &self.cancelling.x;
        let all = self.cancelling.multiplied(product, x)?;
        if all.iter().filter(|value| value.to_f32() != 0.0).count() * 2 < all.len() {
            return Ok(Some("most sums are exact, so that rows show nothing".to_owned()));
        }
        for rows in counts() {
            let last = ROWS_MAX - rows;
            for first in FIRST_ROWS.into_iter().filter(|&first| first < last).chain([last]) {
                let seen = self.cancelling.multiplied(product, &x.narrow(0, first, rows)?.copy()?)?;
                if !same_bits(&seen, &all[first * n..][..rows * n]) {
                    return Ok(Some(format!("at M = {rows} a row has other bits than at M = {ROWS_MAX}")));
                }
            }
        }
        let moved = Tensor::cat(&[x.narrow(0, MOVED, ROWS_MAX - MOVED)?, x.narrow(0, 0, MOVED)?], 0)?;
        let moved = self.cancelling.multiplied(product, &moved)?;
        let (to_end, to_start) = all.split_at(MOVED * n);
        let same = same_bits(&moved, &[to_start, to_end].concat());
        Ok((!same).then(|| format!("at M = {ROWS_MAX} a row has other bits at another place")))
    }
}

/// Numbers of many sizes, whose products cancel in pairs far from each other: a sum is what rounding leaves of it, and so says in which
/// order it was made. Of others bf16 would hide most of that.
fn cancelling(device: &Device, DenseShape { k, n, bias }: DenseShape) -> Result<Factors> {
    let mut rng = stream(4, Purpose::Evaluation, &[]);
    let mut places: Vec<usize> = (0..k).collect();
    places.shuffle(&mut rng);
    let mut number = || {
        let size = rng.random_range(1.0f32..2.0) * 2f32.powi(rng.random_range(-6..=6));
        bf16::from_f32(if rng.random() { size } else { -size })
    };
    let (mut x, mut weight) = (vec![bf16::ZERO; ROWS_MAX * k], vec![bf16::ZERO; k * n]);
    for pair in places.chunks_exact(2) {
        for row in x.chunks_exact_mut(k) {
            row[pair[0]] = number();
            row[pair[1]] = row[pair[0]];
        }
        for column in 0..n {
            weight[pair[0] * n + column] = number();
            weight[pair[1] * n + column] = -weight[pair[0] * n + column];
        }
    }
    let x = Tensor::from_vec(x, (ROWS_MAX, k), &Device::Cpu)?;
    let weight = Tensor::from_vec(weight, (k, n), &Device::Cpu)?;
    let bias = bias.then(|| Tensor::zeros(n, DType::F32, &Device::Cpu)).transpose()?;
    Factors::on(device, [&x, &weight], bias.as_ref())
}

/// Numbers of rows at which rows are compared: around every power of two, where libraries change what they do.
fn counts() -> impl Iterator<Item = usize> {
    let around = (3..ROWS_MAX.ilog2()).flat_map(|power| [(1 << power) - 1, 1 << power, (1 << power) + 1]);
    [1, 2, 3].into_iter().chain(around).chain([ROWS_MAX - 1, ROWS_MAX])
}

fn same_bits(a: &[bf16], b: &[bf16]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// A value of a row that is farther from the exact one than its type makes it.
fn far_off(got: &[bf16], exact: &[f32]) -> Option<String> {
    let largest = exact.iter().fold(0f32, |size, x| size.max(x.abs()));
    got.iter().zip(exact).find_map(|(got, &exact)| {
        let near = (got.to_f32() - exact).abs() <= NEAR.allowed(exact, largest);
        (!near).then(|| format!("a value is {got:.6e}, exactly {exact:.6e}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_rows_are_those_where_a_library_may_change() {
        let counts: Vec<usize> = counts().collect();
        assert_eq!(counts[..9], [1, 2, 3, 7, 8, 9, 15, 16, 17]);
        assert_eq!(counts[counts.len() - 5..], [2047, 2048, 2049, 4095, 4096]);
    }

    #[test]
    fn what_is_no_rounding_is_far_off() {
        let exact = [1.0, -3.0, 0.004];
        let rounded = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        assert_eq!(far_off(&rounded(&exact), &exact), None);
        for (index, value) in [(0, 1.02), (1, -3.1), (2, 0.005), (2, f32::NAN)] {
            let mut other = exact;
            other[index] = value;
            assert!(far_off(&rounded(&other), &exact).is_some(), "{value}");
        }
    }
}
