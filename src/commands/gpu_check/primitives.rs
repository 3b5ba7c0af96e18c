//! Every instruction that the kernels use by name, against the output of its host twin.

use super::Verdicts;
use crate::ops::cuda::run_primitive_check;
use anyhow::{Context, Result, bail};
use candle_core::cuda_backend::CudaDevice;

/// The expected outputs, written by the host twins' program in `tests/cuda_host` and checked by CI.
const EXPECTED: &str = include_str!("../../../kernels/primitive_checks.txt");

/// Allowed relative error of `ex2.approx` and `lg2.approx`, for both sides together.
const APPROXIMATE: f32 = 1.0 / (1 << 21) as f32;

struct Check {
    kernel: &'static str,
    shape: (usize, usize),
    rule: &'static str,
    words: Vec<u32>,
}

pub(super) fn run(gpu: &CudaDevice, verdicts: &mut Verdicts) -> Result<()> {
    let (input, checks) = parse(EXPECTED).context("kernels/primitive_checks.txt")?;
    for check in &checks {
        verdicts.check(check.kernel, || {
            let words = run_primitive_check(gpu, check.kernel, check.shape, &input, check.words.len())?;
            Ok(check.compare(&words))
        });
    }
    Ok(())
}

impl Check {
    fn compare(&self, words: &[u32]) -> Result<String, String> {
        let mut wrong = (0..words.len()).filter(|&i| !agree(self.rule, words[i], self.words[i]));
        match wrong.next() {
            None => Ok(format!("{} words, {}", words.len(), self.rule)),
            Some(i) => Err(format!(
                "{} of {} words differ, the first at {i}: {:#010x}, by the host twin {:#010x}",
                1 + wrong.count(),
                words.len(),
                words[i],
                self.words[i]
            )),
        }
    }
}

fn agree(rule: &str, seen: u32, expected: u32) -> bool {
    let (a, b) = (f32::from_bits(seen), f32::from_bits(expected));
    match rule {
        "relative" => seen == expected || (a - b).abs() <= APPROXIMATE * b.abs(),
        "absolute" => seen == expected || (a - b).abs() <= APPROXIMATE * b.abs().max(1.0),
        _ => seen == expected,
    }
}

/// Returns the input words, and the checks with their expected outputs.
fn parse(text: &'static str) -> Result<(Vec<u32>, Vec<Check>)> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let (mut input, mut checks) = (vec![], vec![]);
    while let Some(line) = lines.next() {
        let head: Vec<&'static str> = line.split_whitespace().collect();
        let (shape, words, rule) = match head[..] {
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
            kernel => checks.push(Check { kernel, shape, rule, words: values }),
        }
    }
    Ok((input, checks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_words_can_be_read_and_every_rule_bites() {
        let (input, checks) = parse(EXPECTED).unwrap();
        assert!(input.len() > 1000 && checks.len() >= 18, "{} words, {} checks", input.len(), checks.len());
        for check in &checks {
            assert!(check.compare(&check.words).is_ok());
            let mut other = check.words.clone();
            other[0] ^= 1 << 12;
            assert!(check.compare(&other).is_err(), "{}", check.kernel);
        }
        assert!(agree("relative", 1f32.to_bits() + 3, 1f32.to_bits()));
        assert!(agree("absolute", 1e-7f32.to_bits(), 0) && !agree("relative", 1e-7f32.to_bits(), 0));
    }
}
