//! The steps of a tokenizer that split a text, with a bound for the steps of their regular expressions.

use super::pattern::{Bounded, SplitPattern, StepBudget};
use anyhow::ensure;
use serde::Deserialize;
use tokenizers::pattern::Invert;
use tokenizers::pre_tokenizers::split::SplitPattern as PatternText;
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    SplitDelimiterBehavior,
};

/// The expression of `ByteLevel`, which is GPT-2's.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The pre-tokenizer of a `tokenizer.json`.
#[derive(Deserialize)]
#[serde(try_from = "PreTokenizerWrapper")]
pub(crate) struct BoundedPreTokenizer {
    steps: Vec<SplitStep>,
    #[cfg(test)]
    whole: PreTokenizerWrapper,
}

enum SplitStep {
    /// Adds a space before a text without one, if `has_prefix_space`. Then splits it.
    Split { pattern: SplitPattern, behavior: SplitDelimiterBehavior, invert: bool, has_prefix_space: bool },
    /// A step without an expression of the file.
    Other(PreTokenizerWrapper),
}

impl TryFrom<PreTokenizerWrapper> for BoundedPreTokenizer {
    type Error = anyhow::Error;

    fn try_from(whole: PreTokenizerWrapper) -> Result<Self, Self::Error> {
        let mut steps = vec![];
        add_steps(&whole, &mut steps)?;
        let is_byte_level =
            |step: &SplitStep| matches!(step, SplitStep::Other(PreTokenizerWrapper::ByteLevel(_)));
        let has_bytes = steps.iter().any(is_byte_level);
        ensure!(has_bytes, "pre_tokenizer has no step \"ByteLevel\", so characters of a text would be lost");
        Ok(Self {
            steps,
            #[cfg(test)]
            whole,
        })
    }
}

fn add_steps(step: &PreTokenizerWrapper, steps: &mut Vec<SplitStep>) -> anyhow::Result<()> {
    let split = |expression: &str, behavior, invert, has_prefix_space| {
        let pattern = SplitPattern::new(expression)?;
        anyhow::Ok(SplitStep::Split { pattern, behavior, invert, has_prefix_space })
    };
    match step {
        PreTokenizerWrapper::Sequence(inner) => {
            inner.as_ref().iter().try_for_each(|step| add_steps(step, steps))?;
        }
        PreTokenizerWrapper::Split(step) => {
            let expression = match &step.pattern {
                PatternText::String(text) => &regex_syntax::escape(text),
                PatternText::Regex(expression) => expression,
            };
            steps.push(split(expression, step.behavior, step.invert, false)?);
        }
        PreTokenizerWrapper::ByteLevel(step) if step.use_regex => {
            steps.push(split(GPT2, SplitDelimiterBehavior::Isolated, false, step.add_prefix_space)?);
            steps.push(SplitStep::Other(step.use_regex(false).add_prefix_space(false).into()));
        }
        other => steps.push(SplitStep::Other(other.clone())),
    }
    Ok(())
}

impl PreTokenizer for BoundedPreTokenizer {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        let bytes = ordinary_parts(text, str::len);
        let budget = StepBudget::of_text(bytes);
        for step in &self.steps {
            match step {
                SplitStep::Other(step) => step.pre_tokenize(text)?,
                SplitStep::Split { pattern, behavior, invert, has_prefix_space } => {
                    text.split(|_, mut part| {
                        if *has_prefix_space && !part.get().starts_with(' ') {
                            part.prepend(" ");
                        }
                        let pattern = Bounded(pattern, &budget);
                        if *invert {
                            part.split(Invert(pattern), *behavior)
                        } else {
                            part.split(pattern, *behavior)
                        }
                    })?
                }
            }
        }
        // Now each character stands for a byte. A step may have added spaces.
        match ordinary_parts(text, |part| part.chars().count()) < bytes {
            true => Err("a step of its pre_tokenizer removes characters of the text".into()),
            false => Ok(()),
        }
    }
}

/// Returns the sum of `size` over the parts that are not added tokens.
fn ordinary_parts(text: &PreTokenizedString, size: impl Fn(&str) -> usize) -> usize {
    let parts = text.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    parts.iter().filter(|(.., tokens)| tokens.is_none()).map(|(part, ..)| size(part)).sum()
}

#[cfg(test)]
impl serde::Serialize for BoundedPreTokenizer {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.whole.serialize(to)
    }
}
