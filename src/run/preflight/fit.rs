//! Fits a command into memory. Chooses how weights are sharded, and whether layers are read from disk on
//! demand.

use super::Preflight;
use crate::bad_input;
use crate::checkpoint::load::ModelFolder;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::config::Config;
use crate::model::layers_on_demand::LayersOnDemand;
use crate::model::weights::LayerSource;
use crate::run::memory::{AvailableMemory, MemoryPlan, MemoryPlanInput, gigabytes};
use anyhow::Result;
use std::sync::Arc;
use std::time::Instant;

/// The end of messages about memory.
const PLAN_HINT: &str = "`rloss check` prints the plan";

impl Preflight {
    /// Returns the memory to plan for: the GPU's memory on a GPU, otherwise the `host`'s memory.
    pub fn available_memory(&self, host: Option<AvailableMemory>) -> Option<AvailableMemory> {
        self.compute_device.available.clone().or(host)
    }

    /// Plans for `processes` processes. On a GPU, sets only the number of sequences in the KV cache.
    ///
    /// On the CPU, selects for keys with the value `"auto"` the first option that fits in the `available`
    /// memory. Unsharded packed weights come before sharded ones, and sampling with less communication comes
    /// before sampling with more. All activations are saved for the backward pass if they fit too. Then two
    /// samplings may be in flight if they fit.
    pub fn choose_sharding(&mut self, processes: usize, available: Option<&AvailableMemory>) {
        (self.processes, self.two_samplings) = (processes, false);
        if self.gpu_sequences.is_some() {
            self.gpu_sequences = available.map(|memory| self.memory_plan_input().sequence_capacity(memory));
            return;
        }
        let requested = self.plan.recipe.parallel.clone();
        let fits = |&(rollout_weights, packed_weights): &(RolloutWeightPlacement, PackedWeightPlacement)| {
            let plan = MemoryPlan::new(&MemoryPlanInput {
                rollout_weights,
                packed_weights,
                ..self.memory_plan_input()
            });
            available.is_none_or(|memory| plan.peak_bytes() <= memory.bytes)
        };
        let options = match processes {
            1 => vec![(RolloutWeightPlacement::Whole, PackedWeightPlacement::Whole)],
            _ => self.sharding_options(),
        };
        let fitting = options.iter().find(|option| fits(option)).or(options.last());
        let Some(&(rollout, packed)) = fitting else { return };
        if requested.rollout_weights == RolloutWeightPlacement::Auto
            && rollout != RolloutWeightPlacement::Whole
        {
            self.plan.warnings.push(format!(
                "the memory is too small for all weights in each process during sampling; using parallel.rollout_weights = \"{rollout}\""
            ));
        }
        if requested.packed_weights == PackedWeightPlacement::Auto && packed == PackedWeightPlacement::Sharded
        {
            self.plan.warnings.push(format!(
                "the memory is too small for all packed weights in each process; using parallel.packed_weights = \"{packed}\""
            ));
        }
        (self.rollout_weights, self.packed_weights) = (rollout, packed);
        let needs_recomputation = |preflight: &Self| {
            available.map(|memory| preflight.memory_plan_input().needs_recomputation(memory))
        };
        self.recompute_layers = needs_recomputation(self);
        let peak = MemoryPlan::new(&self.memory_plan_input()).peak_bytes();
        let is_too_large = available.is_some_and(|available| peak > available.bytes);
        if let Some(teacher) = self.teacher.as_mut().filter(|teacher| is_too_large && teacher.has_files()) {
            teacher.on_disk = true;
            self.plan.warnings.push(format!(
                "the run needs {} of memory with the teacher's weights; each of its layers is read from disk when it is needed",
                gigabytes(peak)
            ));
            self.recompute_layers = needs_recomputation(self);
        }
        self.two_samplings = self.memory_plan_input().fits_two_samplings(available);
    }

    /// Returns the options that the recipe allows for the weights on several processes, in order of
    /// preference.
    fn sharding_options(&self) -> Vec<(RolloutWeightPlacement, PackedWeightPlacement)> {
        let requested = &self.plan.recipe.parallel;
        let input = self.memory_plan_input();
        let packed_options = match requested.packed_weights {
            PackedWeightPlacement::Auto if input.can_shard_packed() => {
                vec![PackedWeightPlacement::Whole, PackedWeightPlacement::Sharded]
            }
            PackedWeightPlacement::Auto => vec![PackedWeightPlacement::Whole],
            requested => vec![requested],
        };
        let rollout_options = |packed_weights: PackedWeightPlacement| match requested.rollout_weights {
            RolloutWeightPlacement::Auto => {
                let has_remote_experts =
                    MemoryPlanInput { packed_weights, ..input.clone() }.has_remote_experts();
                let by_expert = has_remote_experts.then_some(RolloutWeightPlacement::ByExpert);
                [RolloutWeightPlacement::Whole].into_iter().chain(by_expert).collect()
            }
            requested => vec![requested],
        };
        let pairs = |packed: PackedWeightPlacement| {
            rollout_options(packed).into_iter().map(move |rollout| (rollout, packed))
        };
        packed_options.into_iter().flat_map(pairs).collect()
    }

    /// Checks the plan against the available memory. Warns if the plan nearly fills it. If the command can
    /// read layers on demand, a model that is too large stays on disk, with a warning about the cost.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] if the memory is too small. The message names the keys to change.
    pub fn check_memory(&mut self, host: Option<AvailableMemory>) -> Result<()> {
        if self.gpu_sequences.is_some()
            && let Some(host) = host.as_ref()
            && self.memory_plan_input().host_bytes() > host.bytes
        {
            let (needed, present) = (gigabytes(self.memory_plan_input().host_bytes()), gigabytes(host.bytes));
            return Err(bad_input!(
                "needs {needed} of host memory in addition to the GPU's, but {present} are {}; use a larger machine",
                host.limit
            ));
        }
        let available = self.available_memory(host);
        let available = available.as_ref();
        self.choose_sharding(self.processes, available);
        let peak = MemoryPlan::new(&self.memory_plan_input()).peak_bytes();
        if available.is_some_and(|available| peak > available.bytes)
            && self.command.can_read_layers_on_demand()
            && self.gpu_sequences.is_none()
            && let Some(files) = &self.source.weights
        {
            self.layers_on_demand = true;
            self.plan.warnings.push(on_demand_warning(peak, files, &self.source.config)?);
        }
        let input = self.memory_plan_input();
        let result = MemoryPlan::new(&input).check_available(
            available,
            &input.remedies(available.map_or(u64::MAX, |available| available.bytes)),
        );
        let warning = result.map_err(|error| match self.gpu_sequences {
            Some(_) => bad_input!("{error}; {}. {PLAN_HINT}", input.describe_sequence_cache()),
            None => bad_input!("{error}. {PLAN_HINT}"),
        })?;
        self.plan.warnings.extend(warning);
        Ok(())
    }
}

/// Returns a warning about the cost of reading layers on demand. The cost is estimated from the time to read
/// the first layer.
fn on_demand_warning(needed: u64, files: &Arc<ModelFolder>, config: &Config) -> Result<String> {
    let layers = LayersOnDemand::new(files.clone(), config);
    let start = Instant::now();
    layers.layer(0, None)?;
    let seconds = start.elapsed().as_secs_f64() * config.num_hidden_layers as f64;
    Ok(format!(
        "all weights need {} of memory; each layer is read from disk when it is needed, about {seconds:.1} s per forward \
         pass",
        gigabytes(needed)
    ))
}
