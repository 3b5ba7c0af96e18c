//! Compares every instruction that the kernels use with its host emulation: the same function in C++, run on
//! the CPU.

use super::Verdicts;
use anyhow::{Context, Result, bail};
use candle_core::cuda_backend::CudaDevice;
use rloss::ops::cuda::run_primitive_check;

/// The outputs of the host emulation. The program in `tests/cuda_host` writes the file, and CI checks it.
const EXPECTED: &str = include_str!("../../kernels/primitive_checks.txt");

/// Maximum relative difference for `ex2.approx` and `lg2.approx`. It includes the error of the GPU and that
/// of the emulation.
const RELATIVE_ERROR_MAX: f32 = 1.0 / (1 << 21) as f32;

/// A check of one instruction.
struct Check {
    kernel: &'static str,
    /// Number of blocks, and number of threads per block.
    launch: (usize, usize),
    /// The rule by which words are compared: `exact`, `relative` or `absolute`.
    rule: &'static str,
    /// The output of the host emulation.
    expected: Vec<u32>,
}

pub(super) fn run(gpu: &CudaDevice, verdicts: &mut Verdicts) -> Result<()> {
    let (input, checks) = parse(EXPECTED).context("kernels/primitive_checks.txt")?;
    for check in &checks {
        verdicts.check(check.kernel, || {
            let output = run_primitive_check(gpu, check.kernel, check.launch, &input, check.expected.len())?;
            Ok(check.compare(&output))
        });
    }
    Ok(())
}

impl Check {
    fn compare(&self, output: &[u32]) -> Result<String, String> {
        let mut differing = (0..output.len()).filter(|&i| !agrees(self.rule, output[i], self.expected[i]));
        match differing.next() {
            None => Ok(format!("{} words, {}", output.len(), self.rule)),
            Some(i) => Err(format!(
                "{} of {} words differ, the first at {i}: {:#010x}, in the host emulation {:#010x}",
                1 + differing.count(),
                output.len(),
                output[i],
                self.expected[i]
            )),
        }
    }
}

/// Returns whether a word of the output agrees with the expected word according to `rule`.
fn agrees(rule: &str, word: u32, expected: u32) -> bool {
    let (a, b) = (f32::from_bits(word), f32::from_bits(expected));
    match rule {
        "relative" => word == expected || (a - b).abs() <= RELATIVE_ERROR_MAX * b.abs(),
        "absolute" => word == expected || (a - b).abs() <= RELATIVE_ERROR_MAX * b.abs().max(1.0),
        _ => word == expected,
    }
}

/// Parses the file into the input words and the checks.
fn parse(text: &'static str) -> Result<(Vec<u32>, Vec<Check>)> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let (mut input, mut checks) = (vec![], vec![]);
    while let Some(line) = lines.next() {
        let head: Vec<&'static str> = line.split_whitespace().collect();
        let (launch, words, rule) = match head[..] {
            ["input", words] => ((0, 0), words, ""),
            [_, blocks, threads, words, rule @ ("exact" | "relative" | "absolute")] => {
                ((blocks.parse()?, threads.parse()?), words, rule)
            }
            _ => bail!("not a check: {line}"),
        };
        let count: usize = words.parse()?;
        let mut values = Vec::with_capacity(count);
        while values.len() < count {
            let line = lines.next().context("it ends within a check")?;
            for word in line.split_whitespace() {
                values.push(u32::from_str_radix(word, 16).with_context(|| format!("no word: {word}"))?);
            }
        }
        match head[0] {
            "input" => input = values,
            kernel => checks.push(Check { kernel, launch, rule, expected: values }),
        }
    }
    Ok((input, checks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_words_can_be_read_and_every_rule_can_fail() {
        let (input, checks) = parse(EXPECTED).unwrap();
        assert!(input.len() > 1000 && checks.len() >= 18, "{} words, {} checks", input.len(), checks.len());
        for check in &checks {
            assert!(check.compare(&check.expected).is_ok());
            let mut other = check.expected.clone();
            other[0] ^= 1 << 12;
            assert!(check.compare(&other).is_err(), "{}", check.kernel);
        }
        assert!(agrees("relative", 1f32.to_bits() + 3, 1f32.to_bits()));
        assert!(agrees("absolute", 1e-7f32.to_bits(), 0) && !agrees("relative", 1e-7f32.to_bits(), 0));
    }
}
