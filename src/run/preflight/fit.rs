//! Fits a command into memory: chooses how weights are sharded, and whether layers are read from disk on
//! demand.

use super::Preflight;
use crate::bad_input;
use crate::checkpoint::load::ModelFolder;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::config::Config;
use crate::model::layers_on_demand::LayersOnDemand;
use crate::model::weights::LayerSource;
use crate::run::memory::{AvailableMemory, MemoryPlan, PlanInput, gigabytes};
use anyhow::Result;
use std::sync::Arc;
use std::time::Instant;

/// Where to see the plan.
const TO_SEE: &str = "`rloss check` prints the plan";

impl Preflight {
    /// Returns the memory to plan for: the GPU's if a GPU computes, else the `host`'s.
    pub fn available_memory(&self, host: Option<AvailableMemory>) -> Option<AvailableMemory> {
        self.compute_device.available.clone().or(host)
    }

    /// Plans for `processes`. For keys that are `"auto"`, takes the first option that fits `available`
    /// memory. Unsharded packed weights come before sharded ones, and sampling with less communication before
    /// sampling with more. On the CPU, keeps all activations for the backward if they fit too.
    pub fn choose_sharding(&mut self, processes: usize, available: Option<&AvailableMemory>) {
        self.processes = processes;
        if self.gpu_sequences.is_some() {
            self.gpu_sequences = available.map(|found| self.plan_input().sequence_capacity(found));
            return;
        }
        let requested = self.plan.recipe.parallel.clone();
        let fits = |&(rollout_weights, packed_weights): &(RolloutWeightPlacement, PackedWeightPlacement)| {
            let peak = MemoryPlan::new(&PlanInput { rollout_weights, packed_weights, ..self.plan_input() });
            available.is_none_or(|found| peak.peak_bytes() <= found.bytes)
        };
        let ways = match processes {
            1 => vec![(RolloutWeightPlacement::Whole, PackedWeightPlacement::Whole)],
            _ => self.sharding_options(),
        };
        let Some(&(sampling, packed)) = ways.iter().find(|way| fits(way)).or(ways.last()) else { return };
        if requested.rollout_weights == RolloutWeightPlacement::Auto
            && sampling != RolloutWeightPlacement::Whole
        {
            self.plan.warnings.push(format!(
                "memory is too small for all weights in each process while it samples; using parallel.rollout_weights = \"{sampling}\""
            ));
        }
        if requested.packed_weights == PackedWeightPlacement::Auto && packed == PackedWeightPlacement::Sharded
        {
            self.plan.warnings.push(format!(
                "memory is too small for all packed weights in each process; using parallel.packed_weights = \"{packed}\""
            ));
        }
        (self.rollout_weights, self.packed_weights) = (sampling, packed);
        self.recompute_layers = available.map(|available| self.plan_input().recomputes_within(available));
    }

    /// Returns the options that the recipe allows for holding weights on several processes, in order of
    /// preference.
    fn sharding_options(&self) -> Vec<(RolloutWeightPlacement, PackedWeightPlacement)> {
        let requested = &self.plan.recipe.parallel;
        let subject = self.plan_input();
        let packed = match requested.packed_weights {
            PackedWeightPlacement::Auto if subject.can_shard_packed() => {
                vec![PackedWeightPlacement::Whole, PackedWeightPlacement::Sharded]
            }
            PackedWeightPlacement::Auto => vec![PackedWeightPlacement::Whole],
            requested => vec![requested],
        };
        let sampling = |packed_weights: PackedWeightPlacement| match requested.rollout_weights {
            RolloutWeightPlacement::Auto => {
                let travels = PlanInput { packed_weights, ..subject.clone() }.has_remote_experts();
                let by_expert = travels.then_some(RolloutWeightPlacement::ByExpert);
                [RolloutWeightPlacement::Whole].into_iter().chain(by_expert).collect()
            }
            requested => vec![requested],
        };
        let with = |packed: PackedWeightPlacement| sampling(packed).into_iter().map(move |way| (way, packed));
        packed.into_iter().flat_map(with).collect()
    }

    /// Refuses a plan that exceeds `available` memory, and warns when it nearly does. If the command can
    /// stream weights, a model that is too large stays on disk, with a warning that names the cost.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the keys to change.
    pub fn check_memory(&mut self, host: Option<AvailableMemory>) -> Result<()> {
        if self.gpu_sequences.is_some()
            && let Some(host) = host.as_ref()
            && self.plan_input().host_bytes() > host.bytes
        {
            let (needed, there) = (gigabytes(self.plan_input().host_bytes()), gigabytes(host.bytes));
            return Err(bad_input!(
                "{needed} of host memory are needed beside the GPU's, {there} are {}; use a larger machine",
                host.bound
            ));
        }
        let available = self.available_memory(host);
        let available = available.as_ref();
        self.choose_sharding(self.processes, available);
        let whole = MemoryPlan::new(&self.plan_input()).peak_bytes();
        if available.is_some_and(|available| whole > available.bytes)
            && self.command.can_stream()
            && self.gpu_sequences.is_none()
            && let Some(files) = &self.source.weights
        {
            self.streamed = true;
            self.plan.warnings.push(said_of_streaming(whole, files, &self.source.config)?);
        }
        let subject = self.plan_input();
        let admitted = MemoryPlan::new(&subject).check_available(available, &subject.remedies());
        let warning = admitted.map_err(|error| match self.gpu_sequences {
            Some(_) => bad_input!("{error}; {}. {TO_SEE}", subject.describe_sequence_cache()),
            None => bad_input!("{error}. {TO_SEE}"),
        })?;
        self.plan.warnings.extend(warning);
        Ok(())
    }
}

/// Returns a warning with the cost of streaming weights from disk, estimated by timing the first layer.
fn said_of_streaming(needed: u64, files: &Arc<ModelFolder>, config: &Config) -> Result<String> {
    let layers = LayersOnDemand::new(files.clone(), config);
    let begun = Instant::now();
    layers.layer(0, None)?;
    let seconds = begun.elapsed().as_secs_f64() * config.num_hidden_layers as f64;
    Ok(format!(
        "{} of memory are needed for all weights; each layer is read from disk when it is needed, about \
         {seconds:.1} s per forward",
        gigabytes(needed)
    ))
}
