//! Training prompts: a question and one to three instructions, which are drawn from the checkable ones.
//!
//! One response can always follow all drawn instructions. Kinds that determine the same aspect of a response
//! are never drawn together. A kind that requires another language is never drawn with a kind that refers to
//! English words.

mod kinds;
mod phrase;

use kinds::{KINDS, Kind};
use rand::Rng;
use rand::seq::SliceRandom;
use serde::Serialize;
use serde_json::Value;

/// Maximum number of instructions in a composed prompt.
pub const INSTRUCTIONS_MAX: usize = 3;
/// Maximum number of characters of a composed instruction.
pub const INSTRUCTION_CHARS_MAX: usize = 160;

/// A composed prompt in IFEval's row format: `kwargs[i]` belongs to `instruction_id_list[i]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComposedPrompt {
    /// The question, a blank line, and the instructions in plain English.
    pub prompt: String,
    pub instruction_id_list: Vec<&'static str>,
    pub kwargs: Vec<Value>,
}

/// Appends one to [`INSTRUCTIONS_MAX`] instructions to `question`. Depends only on the question and the
/// random stream.
///
/// Among the 25 kinds, `detectable_format:constrained_response` is never drawn: its three answers do not fit
/// a maths question.
pub fn compose(question: &str, rng: &mut impl Rng) -> ComposedPrompt {
    let wanted = rng.random_range(1..=INSTRUCTIONS_MAX);
    let mut order: Vec<&Kind> = KINDS.iter().collect();
    order.shuffle(rng);
    let mut chosen: Vec<&Kind> = Vec::with_capacity(wanted);
    for kind in order {
        if chosen.len() < wanted && chosen.iter().all(|other| kind.is_compatible(other)) {
            chosen.push(kind);
        }
    }
    let mut composed =
        ComposedPrompt { prompt: String::new(), instruction_id_list: Vec::new(), kwargs: Vec::new() };
    let mut phrases = Vec::with_capacity(wanted);
    for kind in chosen {
        let (kwargs, phrase) = phrase::draw_instruction(kind.id, question, rng);
        composed.instruction_id_list.push(kind.id);
        composed.kwargs.push(kwargs);
        phrases.push(phrase);
    }
    composed.prompt = format!("{}\n\n{}", question.trim_end(), phrases.join(" "));
    composed
}
