//! The input of a memory plan: what a run computes, and how.

use super::{AvailableMemory, MemoryPlan, ModelCommand, TeacherInput, WARNING_FRACTION, f32_bytes};
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::config::Config;
use crate::model::names::ParameterSpec;
use crate::model::storage::StoredFormat;
use crate::recipe::Recipe;

/// The input of a memory plan.
#[derive(Clone)]
pub struct MemoryPlanInput<'a> {
    pub command: ModelCommand,
    pub recipe: &'a Recipe,
    pub config: &'a Config,
    /// Storage format of each of the policy's tensors. It holds while the tensor is frozen.
    pub formats: &'a [StoredFormat],
    pub trainable: TrainableInput,
    /// Memory of the tokenizer, from [`super::tokenizer_bytes`].
    pub tokenizer_bytes: u64,
    pub tools: ToolInput,
    pub threads: usize,
    pub placement: WeightPlacement,
    pub choices: MemoryChoices,
    /// Tokens of the longest row of an SFT file, if the command reads one.
    pub sft_row_tokens_max: Option<usize>,
    /// The teacher of distillation, if the command distills.
    pub teacher: Option<TeacherInput<'a>>,
}

/// The trainable tensors in a memory plan.
#[derive(Debug, Clone)]
pub struct TrainableInput {
    /// Trainable flags of the policy's tensors.
    pub policy: Vec<bool>,
    /// Trainable flags of the critic's tensors. `None` without a critic.
    pub critic: Option<Vec<bool>>,
    /// The adapter that is trained, or that is part of the model.
    pub adapter: Option<AdapterInput>,
}

/// The sizes of the tools in a memory plan.
#[derive(Debug, Clone, Copy)]
pub struct ToolInput {
    /// Number of worker processes of the Python tool. 0 without the tool.
    pub python_workers: usize,
    /// Maximum number of characters of all replies to the calls of a turn. `None` without tools.
    pub reply_chars_max: Option<usize>,
}

/// How the processes of a run hold the weights.
#[derive(Debug, Clone, Copy)]
pub struct WeightPlacement {
    /// Number of processes of the run. The plan is for one process.
    pub processes: usize,
    /// How each process holds the trainable weights while it samples.
    pub rollout_weights: RolloutWeightPlacement,
    /// How each process holds the packed weights.
    pub packed_weights: PackedWeightPlacement,
    /// Whether layers stay on disk and are read on demand.
    pub layers_on_demand: bool,
}

impl WeightPlacement {
    /// Returns the placement of all weights in the memory of each of `processes` processes.
    pub fn whole(processes: usize) -> Self {
        Self {
            processes,
            rollout_weights: RolloutWeightPlacement::Whole,
            packed_weights: PackedWeightPlacement::Whole,
            layers_on_demand: false,
        }
    }
}

/// The choices that depend on the available memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryChoices {
    /// Number of sequences in the GPU's KV cache. If set, the plan is for the GPU's memory. `None` on the
    /// CPU: the plan is for the host's memory.
    pub gpu_sequences: Option<usize>,
    /// Whether the backward pass recomputes layers. `None` if the available memory is unknown. The recipe's
    /// key overrides this value.
    pub recompute_layers: Option<bool>,
    /// Whether two samplings of training may be in flight.
    pub two_samplings: bool,
}

/// The adapter in a memory plan.
#[derive(Debug, Clone)]
pub struct AdapterInput {
    /// Names and shapes of the factors.
    pub specs: Vec<ParameterSpec>,
    /// Trainable flags, one per factor.
    pub trainable: Vec<bool>,
    /// Whether the adapter is attached after an SFT warm-up, which trains the whole model.
    pub after_cold_start: bool,
}

impl AdapterInput {
    /// Returns the bytes of the factors.
    pub(super) fn bytes(&self) -> u64 {
        f32_bytes(&self.specs)
    }
}

impl MemoryPlanInput<'_> {
    /// Returns the peak of the memory plan.
    pub fn peak_bytes(&self) -> u64 {
        MemoryPlan::new(self).peak_bytes()
    }

    /// Returns whether the peak leaves a part of the available memory unused, so that no warning is due.
    pub(super) fn fits_without_warning(&self, available: &AvailableMemory) -> bool {
        self.peak_bytes() as f64 <= WARNING_FRACTION * available.bytes as f64
    }
}
