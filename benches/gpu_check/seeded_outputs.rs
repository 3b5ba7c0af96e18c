//! Compares each op's outputs for seeded inputs with the outputs of the emulated driver. This is the first
//! check on a new GPU.
//!
//! Values may differ by twice the error of plain bf16 ([`super::cpu_reference`]). Masked elements must be
//! zero. Counts and positions must be equal.

use super::Verdicts;
use super::bitwise_equality::training_bits;
use super::cpu_reference::{TENSORS, decode_bits, error_bound};
#[cfg(test)]
use super::model_ops::Tolerance;
use super::model_ops::{self, Output};
use super::problem::{AttentionProblem, AttentionShape, reference_attention};
use anyhow::{Context, Result, bail};
use candle_core::Device;
use half::bf16;
use rloss::ops::cuda::KvPool;
use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

/// The expected outputs. `gpu_check --write-seeded FILE`, on the emulated driver, writes the file.
const EXPECTED: &str = include_str!("../../kernels/seeded_outputs.txt");

/// Outputs by name. The words of an output are bits of f32 numbers, or counts.
type Outputs = HashMap<String, Vec<u32>>;

fn shapes() -> [AttentionShape; 4] {
    [
        AttentionShape::new("window", (2, 1), Some(3), &[1, 6, 0, 3]),
        AttentionShape::new("no window", (2, 2), None, &[5]).with_extremes(4.0, &[2.0, -3.0]),
        AttentionShape::new("heads of 128, window", (2, 1), Some(3), &[1, 6, 0, 3]).with_head_dim(128),
        AttentionShape::new("heads of 128", (2, 2), None, &[5])
            .with_extremes(4.0, &[2.0, -3.0])
            .with_head_dim(128),
    ]
}

/// Returns the name of an attention tensor in the file.
fn tensor_name(tensor: &str, shape: &AttentionShape, kernels: &str) -> String {
    join_words(&format!("{tensor}, {}, {kernels}", shape.name))
}

/// Replaces the spaces in a name, because spaces separate words in the file.
fn join_words(name: &str) -> String {
    name.replace(' ', "_")
}

/// The name of the output of [`append_to_cache`].
const CACHE_ROWS: &str = "rows_in_a_cache";

/// Runs all ops on the device.
fn run_ops(device: &Device) -> Result<Outputs> {
    let mut outputs = Outputs::new();
    for shape in shapes() {
        for kernels in shape.kernel_sets() {
            let attention = decode_bits(training_bits(&AttentionProblem::new(&shape, 17), device, kernels)?);
            for (tensor, get) in TENSORS {
                let words = get(&attention).iter().map(|&x| (x as f32).to_bits()).collect();
                outputs.insert(tensor_name(tensor, &shape, kernels.name), words);
            }
        }
    }
    outputs.insert(CACHE_ROWS.into(), append_to_cache(device)?);
    for output in model_ops::seeded_outputs(device)? {
        outputs.insert(join_words(&output.name), output.values.into_iter().map(f32::to_bits).collect());
    }
    Ok(outputs)
}

/// Appends numbered rows to a cache. Returns, for each row of the cache's memory, the number (from 1) of the
/// appended row that it contains.
fn append_to_cache(device: &Device) -> Result<Vec<u32>> {
    let gpu = device.as_cuda_device()?;
    let (width, pages) = (2 * 64, 3);
    let cache = KvPool::new(gpu, 1, 64, pages)?;
    let mut sequences = [cache.new_sequence(), cache.new_sequence()];
    let mut row = 0;
    for counts in [[60, 1], [7, 0], [1, 3]] {
        let tokens: usize = counts.iter().sum();
        let values: Vec<bf16> =
            (0..tokens * width).map(|i| bf16::from_f32((row + i / width + 1) as f32)).collect();
        let kv = gpu.clone_htod(&values)?;
        cache.append(&kv.as_view(), &mut sequences.each_mut(), &counts)?;
        row += tokens;
    }
    let memory = cache.values()?;
    memory
        .chunks(width)
        .map(|row| {
            if row.iter().any(|x| x != &row[0]) {
                bail!("a row of the cache mixes several appended rows");
            }
            Ok(row[0].to_f32() as u32)
        })
        .collect()
}

/// Writes the file of expected outputs.
///
/// # Errors
/// When an op fails or the file cannot be written.
pub(super) fn write(device: &Device, path: &Path) -> Result<()> {
    let outputs = run_ops(device)?;
    let mut names: Vec<&String> = outputs.keys().collect();
    names.sort();
    let mut text = String::from(
        "# Seeded outputs of every op on the emulated driver. `gpu_check seeded` compares a GPU with them.\n",
    );
    for name in names {
        let words = &outputs[name];
        writeln!(text, "{name} {}", words.len())?;
        for line in words.chunks(16) {
            // A bf16 number stored as f32 has zeros in its lower half. They are omitted.
            let word = |w: &u32| if w & 0xffff == 0 { format!("{:x}_", w >> 16) } else { format!("{w:x}") };
            writeln!(text, "{}", line.iter().map(word).collect::<Vec<_>>().join(" "))?;
        }
    }
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> Result<Outputs> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut outputs = Outputs::new();
    while let Some(line) = lines.next() {
        let (name, count) = line.split_once(' ').with_context(|| format!("no name and count: {line}"))?;
        let count: usize = count.parse()?;
        let mut words = vec![];
        while words.len() < count {
            for word in lines.next().context("it ends within an output")?.split(' ') {
                let parsed = match word.strip_suffix('_') {
                    Some(upper) => u32::from_str_radix(upper, 16).map(|w| w << 16),
                    None => u32::from_str_radix(word, 16),
                };
                words.push(parsed.with_context(|| format!("no word: {word}"))?);
            }
        }
        outputs.insert(name.into(), words);
    }
    Ok(outputs)
}

fn decode_f32(words: &[u32]) -> Vec<f64> {
    words.iter().map(|&w| f32::from_bits(w) as f64).collect()
}

pub(super) fn run(device: &Device, verdicts: &mut Verdicts) -> Result<()> {
    let expected = parse(EXPECTED).context("kernels/seeded_outputs.txt")?;
    let expected_words =
        |name: &str| expected.get(name).with_context(|| format!("kernels/seeded_outputs.txt: no {name}"));
    for shape in shapes() {
        let problem = AttentionProblem::new(&shape, 17);
        let (exact, plain) = (reference_attention(&problem, false), reference_attention(&problem, true));
        for kernels in shape.kernel_sets() {
            let outputs = training_bits(&problem, device, kernels).map(decode_bits);
            for (tensor, get) in TENSORS {
                let name = tensor_name(tensor, &shape, kernels.name);
                verdicts.check(&format!("seeded: {name}"), || {
                    let outputs = outputs.as_ref().map_err(|e| anyhow::anyhow!("{e:#}"))?;
                    let expected = decode_f32(expected_words(&name)?);
                    // Every query, key and value of these shapes takes part, so no element is masked.
                    Ok(compare(get(outputs), &expected, error_bound(get(&plain), get(&exact)), false))
                });
            }
        }
    }
    match model_ops::seeded_outputs(device) {
        Err(error) => verdicts.print_row("seeded: ops of models", Err(format!("stopped: {error:#}"))),
        Ok(outputs) => {
            for output in outputs {
                let name = join_words(&output.name);
                verdicts.check(&format!("seeded: {name}"), || {
                    Ok(compare_within_tolerance(&output, &decode_f32(expected_words(&name)?)))
                });
            }
        }
    }
    verdicts.check("seeded: rows in a cache", || {
        let rows = append_to_cache(device)?;
        let same = &rows == expected_words(CACHE_ROWS)?;
        Ok(if same { Ok(format!("{} rows", rows.len())) } else { Err(format!("{rows:?}")) })
    });
    Ok(())
}

/// Checks that differences are at most twice the output's tolerance, because both sides have an error.
fn compare_within_tolerance(output: &Output, expected: &[f64]) -> Result<String, String> {
    let largest = expected.iter().fold(0f64, |size, x| size.max(x.abs()));
    let values: Vec<f64> = output.values.iter().map(|&x| x.into()).collect();
    let bound = 2.0 * output.tolerance.max_error(largest as f32, largest as f32) as f64;
    compare(&values, expected, bound, output.has_masked)
}

/// Checks that differences are at most `bound`. With `has_masked`, what is zero on the emulator must be zero.
/// Otherwise a sum may cancel on the emulator and not on tensor cores, which truncate.
fn compare(values: &[f64], expected: &[f64], bound: f64, has_masked: bool) -> Result<String, String> {
    if values.len() != expected.len() {
        return Err(format!("{} values, {} on the emulator", values.len(), expected.len()));
    }
    let mut largest: f64 = 0.0;
    for (i, (&a, &b)) in values.iter().zip(expected).enumerate() {
        let within = (a - b).abs() <= bound && (!has_masked || b != 0.0 || a == 0.0);
        if !within {
            return Err(format!("value {i}: {a:.6e}, on the emulator {b:.6e}, allowed {bound:.1e}"));
        }
        largest = largest.max((a - b).abs());
    }
    let share = if bound > 0.0 { largest / bound } else { 0.0 };
    Ok(format!("{} values; largest difference / allowed difference = {share:.2}", values.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_every_output_and_each_rule_can_fail() {
        let expected = parse(EXPECTED).unwrap();
        let model_outputs = model_ops::seeded_outputs(&Device::Cpu).unwrap();
        let attention_outputs =
            shapes().iter().map(|shape| shape.kernel_sets().len() * TENSORS.len()).sum::<usize>();
        assert_eq!(expected.len(), attention_outputs + 1 + model_outputs.len());
        for output in &model_outputs {
            compare_within_tolerance(output, &decode_f32(&expected[&join_words(&output.name)]))
                .unwrap_or_else(|e| panic!("{}: {e}", output.name));
        }
        for shape in shapes() {
            let problem = AttentionProblem::new(&shape, 17);
            let exact = reference_attention(&problem, false);
            for (kernels, (tensor, get)) in shape.kernel_sets().iter().flat_map(|k| TENSORS.map(|t| (k, t))) {
                let words = &expected[&tensor_name(tensor, &shape, kernels.name)];
                let bound = error_bound(get(&reference_attention(&problem, true)), get(&exact));
                // The emulator's outputs must also be within this bound of the formulas' results.
                compare(&decode_f32(words), get(&exact), bound, false)
                    .unwrap_or_else(|e| panic!("{tensor}, {}: {e}", shape.name));
            }
        }
        assert!(compare(&[1.0, 0.0], &[1.0, 0.0], 0.1, true).is_ok());
        assert!(compare(&[1.0, 0.01], &[1.0, 0.0], 0.1, true).is_err(), "masked");
        assert!(compare(&[1.2], &[1.0], 0.1, false).is_err());
        assert!(compare(&[f64::NAN], &[1.0], 0.1, false).is_err());
        assert!(compare(&[], &[1.0], 0.1, false).is_err());
    }

    #[test]
    fn a_sum_that_cancels_only_on_the_emulator_passes() {
        assert!(compare(&[1.0, 1e-9], &[1.0, 0.0], 0.1, false).is_ok());
        assert!(compare(&[1.0, 0.2], &[1.0, 0.0], 0.1, false).is_err());
    }

    #[test]
    fn the_outputs_with_masked_elements_are_those_with_zeros() {
        let expected = parse(EXPECTED).unwrap();
        for output in model_ops::seeded_outputs(&Device::Cpu).unwrap() {
            let values = decode_f32(&expected[&join_words(&output.name)]);
            let zeros = values.iter().filter(|&&x| x == 0.0).count();
            // One of its sums cancels in bf16.
            let cancelled = usize::from(output.name == "product and residual");
            let has_zeros = zeros > cancelled;
            let is_exact = matches!(output.tolerance, Tolerance::BitEqual);
            assert!(
                output.has_masked == has_zeros || is_exact && !output.has_masked,
                "{}: {zeros} zeros of {}",
                output.name,
                values.len()
            );
        }
    }
}
