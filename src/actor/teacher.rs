//! The teacher of distillation: a frozen model that reads the policy's samples.
//!
//! Before a pass of the policy, the teacher runs over the same tokens and keeps only the input of its head.
//! The policy's head then compares both distributions, chunk by chunk ([`mod@crate::ops::reverse_kl`]).

use super::Actor;
use super::forward_backward::{Pass, PassSettings};
use super::micro_batch::{MicroBatch, Sequence};
use crate::bad_input;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::weights::Weights;
use crate::ops::reverse_kl::TeacherRows;
use anyhow::{Context, Result};
use std::sync::Arc;

/// Another beginning of the policy's sequences, which the teacher reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptChange {
    /// The tokens that every sequence of the policy begins with.
    pub policy: Vec<u32>,
    /// The tokens that the teacher reads in their place.
    pub teacher: Vec<u32>,
}

impl PromptChange {
    /// Returns the number of tokens by which the teacher's sequences are longer.
    pub fn added_tokens(&self) -> usize {
        self.teacher.len().saturating_sub(self.policy.len())
    }

    /// Returns the teacher's sequence for `sequence`. Its trained tokens are those of `sequence`.
    fn apply(&self, sequence: &Sequence) -> Result<Sequence> {
        let begins = sequence.tokens.starts_with(&self.policy);
        let is_prompt = begins && !sequence.mask[..self.policy.len()].contains(&true);
        if !is_prompt {
            return Err(bad_input!(
                "policy.distill.system_prompt: a trajectory does not begin with the system prompt of [chat], so it cannot be \
                 replaced for the teacher; use trajectories that this recipe samples, or remove the key"
            ));
        }
        let rest = self.policy.len();
        Ok(Sequence {
            tokens: [&self.teacher, &sequence.tokens[rest..]].concat(),
            mask: [&vec![false; self.teacher.len()], &sequence.mask[rest..]].concat(),
            kept_tokens: vec![],
        })
    }
}

/// A teacher.
#[derive(Clone, Copy)]
pub struct Teacher<'a> {
    /// The frozen model.
    pub actor: &'a Actor,
    /// `None` if the teacher reads the policy's prompts.
    pub prompt: Option<&'a PromptChange>,
}

impl<'a> Teacher<'a> {
    /// Prepares the teacher's passes over `batches`, the policy's micro-batches of `sequences`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a sequence does not begin with the policy's system prompt.
    pub fn passes(&self, sequences: &[&Sequence], batches: &[MicroBatch]) -> Result<TeacherPasses<'a>> {
        let packed = |micro_batch: &MicroBatch| -> Result<MicroBatch> {
            let Some(prompt) = self.prompt else {
                return Ok(MicroBatch { replay: None, ..micro_batch.clone() });
            };
            let sequences = sequences[micro_batch.sequences.clone()].iter();
            let sequences = sequences.map(|sequence| prompt.apply(sequence).map(Arc::new));
            let sequences = sequences.collect::<Result<Vec<Arc<Sequence>>>>()?;
            // Without a limit, all sequences are in one micro-batch.
            let mut packed = MicroBatch::split_with_prefixes(&sequences, usize::MAX, |_| usize::MAX);
            packed.pop().context("a micro-batch without sequences")
        };
        let batches = batches.iter().map(packed).collect::<Result<_>>()?;
        let weights = self.actor.parameters.pass_weights(None)?;
        Ok(TeacherPasses { model: &self.actor.model, weights, batches })
    }
}

/// The teacher's passes over one batch.
pub struct TeacherPasses<'a> {
    model: &'a Model,
    weights: Weights,
    /// One for each micro-batch of the policy, with the same targets.
    batches: Vec<MicroBatch>,
}

impl TeacherPasses<'_> {
    /// Returns the bytes of the teacher's weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes
    }

    /// Runs the teacher over micro-batch `index`. Returns a row for each target.
    ///
    /// # Errors
    /// When a sequence is longer than the teacher's context, or a layer cannot be read.
    pub fn rows(&self, index: usize) -> Result<TeacherRows> {
        // Ablations do not apply to the teacher. The temperature belongs to the policy's head.
        let settings = PassSettings::new(1.0, ForwardOptions::default());
        let batch = self.batches.get(index).context("a micro-batch without a teacher's pass")?;
        let (model, weights) = (self.model, &self.weights);
        Pass { model, weights, batch, settings, recompute_layers: false, teacher: None }.teacher_rows()
    }
}
