//! Fits a command into memory: chooses how weights are sharded, and whether layers are read from disk on
//! demand.

use super::Preflight;
use crate::bad_input;
use crate::checkpoint::load::ModelFolder;
use crate::dist::{PackedWeights, RolloutWeights};
use crate::model::config::Config;
use crate::model::layers_on_demand::LayersOnDemand;
use crate::model::weights::Layers;
use crate::run::memory::{Available, MemoryPlan, Subject, gigabytes};
use anyhow::Result;
use std::sync::Arc;
use std::time::Instant;

/// Where to see the plan.
const TO_SEE: &str = "`rloss check` prints the plan";

impl Preflight {
    /// Returns the memory to plan for: the GPU's if a GPU computes, else the `host`'s.
    pub fn available(&self, host: Option<Available>) -> Option<Available> {
        self.place.available.clone().or(host)
    }

    /// Plans for `processes`. For keys that are `"auto"`, takes the first option that fits `available`
    /// memory. Unsharded packed weights come before sharded ones, and sampling with less communication before
    /// sampling with more.
    pub fn plan_for(&mut self, processes: usize, available: Option<&Available>) {
        self.processes = processes;
        if self.gpu_sequences.is_some() {
            self.gpu_sequences = available.map(|found| self.subject().sequences_that_fit(found));
            return;
        }
        let asked = self.plan.recipe.parallel.clone();
        let fits = |&(rollout_weights, packed_weights): &(RolloutWeights, PackedWeights)| {
            let peak = MemoryPlan::new(&Subject { rollout_weights, packed_weights, ..self.subject() });
            available.is_none_or(|found| peak.peak_bytes() <= found.bytes)
        };
        let ways = match processes {
            1 => vec![(RolloutWeights::Whole, PackedWeights::Whole)],
            _ => self.ways_to_shard(),
        };
        let Some(&(sampling, packed)) = ways.iter().find(|way| fits(way)).or(ways.last()) else { return };
        if asked.rollout_weights == RolloutWeights::Auto && sampling != RolloutWeights::Whole {
            self.plan.warnings.push(format!(
                "memory is too small for all weights in each process while it samples; using parallel.rollout_weights = \"{sampling}\""
            ));
        }
        if asked.packed_weights == PackedWeights::Auto && packed == PackedWeights::Sharded {
            self.plan.warnings.push(format!(
                "memory is too small for all packed weights in each process; using parallel.packed_weights = \"{packed}\""
            ));
        }
        (self.rollout_weights, self.packed_weights) = (sampling, packed);
    }

    /// Returns the options that the recipe allows for holding weights on several processes, in order of
    /// preference.
    fn ways_to_shard(&self) -> Vec<(RolloutWeights, PackedWeights)> {
        let asked = &self.plan.recipe.parallel;
        let subject = self.subject();
        let packed = match asked.packed_weights {
            PackedWeights::Auto if subject.can_cut_packed() => {
                vec![PackedWeights::Whole, PackedWeights::Sharded]
            }
            PackedWeights::Auto => vec![PackedWeights::Whole],
            asked => vec![asked],
        };
        let sampling = |packed_weights: PackedWeights| match asked.rollout_weights {
            RolloutWeights::Auto => {
                let travels = Subject { packed_weights, ..subject.clone() }.has_travelling_experts();
                let by_expert = travels.then_some(RolloutWeights::ByExpert);
                [RolloutWeights::Whole].into_iter().chain(by_expert).collect()
            }
            asked => vec![asked],
        };
        let with = |packed: PackedWeights| sampling(packed).into_iter().map(move |way| (way, packed));
        packed.into_iter().flat_map(with).collect()
    }

    /// Refuses a plan that exceeds `available` memory, and warns when it nearly does. If the command can
    /// stream weights, a model that is too large stays on disk, with a warning that names the cost.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the keys to change.
    pub fn admit(&mut self, host: Option<Available>) -> Result<()> {
        if self.gpu_sequences.is_some()
            && let Some(host) = host.as_ref()
            && self.subject().host_bytes() > host.bytes
        {
            let (needed, there) = (gigabytes(self.subject().host_bytes()), gigabytes(host.bytes));
            return Err(bad_input!(
                "{needed} of host memory are needed beside the GPU's, {there} are {}; use a larger machine",
                host.bound
            ));
        }
        let available = self.available(host);
        let available = available.as_ref();
        self.plan_for(self.processes, available);
        let whole = MemoryPlan::new(&self.subject()).peak_bytes();
        if available.is_some_and(|available| whole > available.bytes)
            && self.intent.streams()
            && self.gpu_sequences.is_none()
            && let Some(files) = &self.source.weights
        {
            self.streamed = true;
            self.plan.warnings.push(said_of_streaming(whole, files, &self.source.config)?);
        }
        let subject = self.subject();
        let admitted = MemoryPlan::new(&subject).admit(available, &subject.remedies());
        let warning = admitted.map_err(|error| match self.gpu_sequences {
            Some(_) => bad_input!("{error}; {}. {TO_SEE}", subject.one_sequence()),
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
