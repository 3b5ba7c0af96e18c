//! The teacher of distillation in a memory plan.

use super::weights::on_demand_bytes;
use super::{MemoryItem, MemoryPlanInput, PassShape};
use crate::model::config::Config;
use crate::model::names::parameter_specs;
use crate::model::storage::StoredFormat;

/// The teacher in a memory plan.
#[derive(Debug, Clone, Copy)]
pub struct TeacherInput<'a> {
    pub config: &'a Config,
    /// Storage format of each tensor. `None` if the policy is its own teacher; the reference has its weights.
    pub formats: Option<&'a [StoredFormat]>,
    /// Bytes of the teacher's adapter.
    pub adapter_bytes: u64,
    /// Whether each layer is read from disk when it is needed.
    pub on_disk: bool,
    /// Number of tokens that the teacher's system prompt adds to each sequence.
    pub added_tokens: usize,
}

impl TeacherInput<'_> {
    /// Returns the bytes of all weights, in memory or on disk.
    fn all_bytes(&self, formats: &[StoredFormat]) -> u64 {
        let specs = parameter_specs(self.config);
        let weights = specs.iter().zip(formats).map(|(spec, format)| spec.resident_bytes(*format));
        weights.sum::<u64>() + self.adapter_bytes
    }
}

impl MemoryPlanInput<'_> {
    /// Returns the memory of the teacher's own weights.
    pub(super) fn teacher_item(&self) -> Option<MemoryItem> {
        let teacher = self.teacher?;
        let formats = teacher.formats?;
        Some(match teacher.on_disk {
            false => MemoryItem::new("teacher's weights", teacher.all_bytes(formats)),
            true => MemoryItem::new(
                "teacher's weights, one layer at a time",
                on_demand_bytes(teacher.config, formats) + teacher.adapter_bytes,
            ),
        })
    }

    /// Returns the bytes of the weights that decide whether passes run in parallel: those of the larger
    /// model.
    pub(super) fn largest_weight_bytes(&self) -> u64 {
        let teacher = self.teacher.and_then(|teacher| Some(teacher.all_bytes(teacher.formats?)));
        self.weight_bytes().max(teacher.unwrap_or(0))
    }

    /// Returns the peak bytes of the teacher's pass over the tokens of `pass`, which ends before the policy's
    /// pass begins.
    pub(super) fn teacher_pass_bytes(&self, pass: &PassShape) -> u64 {
        let Some(teacher) = self.teacher else { return 0 };
        let rollout = &self.recipe.rollout;
        // Samples of one prompt share its tokens.
        let prompts = rollout.prompts_per_step.min(pass.tokens);
        let tokens = pass.tokens + prompts * teacher.added_tokens;
        let has_adapter = teacher.adapter_bytes > 0;
        PassShape { config: teacher.config, tokens, has_adapter, teacher: None, ..*pass }.head_input_bytes()
    }
}
