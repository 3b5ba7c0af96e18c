//! Fits a command into memory. Chooses how weights are sharded, and whether layers are read from disk on
//! demand.

use super::Startup;
use crate::bad_input;
use crate::checkpoint::load::ModelFolder;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::config::Config;
use crate::model::layers_on_demand::LayersOnDemand;
use crate::model::weights::LayerSource;
use crate::run::memory::{
    AvailableMemory, MemoryPlan, MemoryPlanInput, ModelCommand, WeightPlacement, gigabytes,
};
use anyhow::Result;
use std::sync::Arc;
use std::time::Instant;

/// The end of messages about memory.
const PLAN_HINT: &str = "`rloss check` prints the plan";

impl Startup {
    /// Returns the memory to plan for: the GPU's memory on a GPU, otherwise the `host`'s memory.
    pub fn available_memory(&self, host: Option<AvailableMemory>) -> Option<AvailableMemory> {
        self.compute_device.available.clone().or(host)
    }

    /// Plans for `processes` processes. On GPUs, selects how each holds the weights while it samples, as on
    /// CPUs, and sets the number of sequences in the KV cache.
    ///
    /// On the CPU, selects for keys with the value `"auto"` the first option that fits in the `available`
    /// memory. Unsharded packed weights come before sharded ones, and sampling with less communication comes
    /// before sampling with more. All activations are saved for the backward pass if they fit too. Then two
    /// samplings may be in flight if they fit.
    pub fn choose_sharding(&mut self, processes: usize, available: Option<&AvailableMemory>) {
        (self.placement.processes, self.choices.two_samplings) = (processes, false);
        if self.choices.gpu_sequences.is_some() {
            self.choose_on_gpus(available);
            return;
        }
        let requested = self.environment.plan.recipe.parallel.clone();
        let fits = |&(rollout_weights, packed_weights): &(RolloutWeightPlacement, PackedWeightPlacement)| {
            let placement = WeightPlacement { rollout_weights, packed_weights, ..self.placement };
            let peak = MemoryPlanInput { placement, ..self.memory_plan_input() }.peak_bytes();
            available.is_none_or(|memory| peak <= memory.bytes)
        };
        let options = match self.memory_plan_input().shard_ranks() {
            1 => vec![(RolloutWeightPlacement::Whole, PackedWeightPlacement::Whole)],
            _ => self.sharding_options(),
        };
        let fitting = options.iter().find(|option| fits(option)).or(options.last());
        let Some(&(rollout, packed)) = fitting else { return };
        self.warn_about_rollout_weights(rollout);
        if requested.packed_weights == PackedWeightPlacement::Auto && packed == PackedWeightPlacement::Sharded
        {
            self.environment.plan.warnings.push(format!(
                "the memory is too small for all packed weights in each process; using parallel.packed_weights = \"{packed}\""
            ));
        }
        (self.placement.rollout_weights, self.placement.packed_weights) = (rollout, packed);
        let needs_recomputation =
            |startup: &Self| available.map(|memory| startup.memory_plan_input().needs_recomputation(memory));
        self.choices.recompute_layers = needs_recomputation(self);
        let peak = self.peak_bytes();
        let is_too_large = available.is_some_and(|available| peak > available.bytes);
        if let Some(teacher) =
            self.teacher.as_mut().filter(|teacher| is_too_large && teacher.source.is_some())
        {
            teacher.on_disk = true;
            self.environment.plan.warnings.push(format!(
                "the run needs {} of memory with the teacher's weights; each of its layers is read from disk when it is needed",
                gigabytes(peak)
            ));
            self.choices.recompute_layers = needs_recomputation(self);
        }
        self.choices.two_samplings = self.memory_plan_input().fits_two_samplings(available);
    }

    /// Selects the first option for sampling that fits in the `available` memory of each GPU, and the number
    /// of sequences in its KV cache.
    fn choose_on_gpus(&mut self, available: Option<&AvailableMemory>) {
        let options = match self.memory_plan_input().shard_ranks() {
            1 => vec![RolloutWeightPlacement::Whole],
            _ => self.rollout_options(self.placement.packed_weights),
        };
        for rollout in options {
            self.placement.rollout_weights = rollout;
            self.choices.gpu_sequences =
                available.map(|memory| self.memory_plan_input().sequence_capacity(memory));
            let peak = self.peak_bytes();
            if available.is_none_or(|memory| peak <= memory.bytes) {
                break;
            }
        }
        self.warn_about_rollout_weights(self.placement.rollout_weights);
        if self.memory_plan_input().samples_by_expert() && self.environment.plan.recipe.rollout.cuda_graphs {
            let text = "GPUs that exchange rows of experts do not record decode as CUDA graphs; \
                        rollout.cuda_graphs has no effect";
            self.environment.plan.warnings.push(text.to_owned());
        }
    }

    /// Warns if the recipe leaves the weights for sampling to the plan, and not all fit.
    fn warn_about_rollout_weights(&mut self, rollout: RolloutWeightPlacement) {
        let requested = self.environment.plan.recipe.parallel.rollout_weights;
        if requested == RolloutWeightPlacement::Auto && rollout != RolloutWeightPlacement::Whole {
            self.environment.plan.warnings.push(format!(
                "the memory is too small for all weights in each process during sampling; using parallel.rollout_weights = \"{rollout}\""
            ));
        }
    }

    /// Returns the options that the recipe allows for sampling on several processes, in order of preference.
    fn rollout_options(&self, packed_weights: PackedWeightPlacement) -> Vec<RolloutWeightPlacement> {
        match self.environment.plan.recipe.parallel.rollout_weights {
            RolloutWeightPlacement::Auto => {
                let placement = WeightPlacement { packed_weights, ..self.placement };
                let input = MemoryPlanInput { placement, ..self.memory_plan_input() };
                let by_expert = input.has_remote_experts().then_some(RolloutWeightPlacement::ByExpert);
                [RolloutWeightPlacement::Whole].into_iter().chain(by_expert).collect()
            }
            requested => vec![requested],
        }
    }

    /// Returns the options that the recipe allows for the weights on several processes, in order of
    /// preference.
    fn sharding_options(&self) -> Vec<(RolloutWeightPlacement, PackedWeightPlacement)> {
        let requested = &self.environment.plan.recipe.parallel;
        let input = self.memory_plan_input();
        let packed_options = match requested.packed_weights {
            PackedWeightPlacement::Auto if input.can_shard_packed() => {
                vec![PackedWeightPlacement::Whole, PackedWeightPlacement::Sharded]
            }
            PackedWeightPlacement::Auto => vec![PackedWeightPlacement::Whole],
            requested => vec![requested],
        };
        let pairs = |packed: PackedWeightPlacement| {
            self.rollout_options(packed).into_iter().map(move |rollout| (rollout, packed))
        };
        packed_options.into_iter().flat_map(pairs).collect()
    }

    fn peak_bytes(&self) -> u64 {
        self.memory_plan_input().peak_bytes()
    }

    /// Lowers the number of sequences that are sampled at the same time, if the plan fits into the
    /// `available` memory then. Answers keep their bits; requests wait for longer.
    fn lower_sequences(&mut self, available: Option<&AvailableMemory>) {
        let Some(AvailableMemory { bytes, limit }) = available else { return };
        let (before, needed) = (self.environment.recipe().rollout.sequences_max, self.peak_bytes());
        let halves = std::iter::successors(Some(before), |sequences| Some(sequences / 2));
        for sequences in halves.take_while(|&sequences| sequences > 0) {
            self.environment.plan.recipe.rollout.sequences_max = sequences;
            if self.peak_bytes() > *bytes {
                continue;
            }
            if sequences < before {
                self.environment.plan.warnings.push(format!(
                    "rollout.sequences_max is {sequences}: {before} sequences at a time would need {} of memory, but {} \
                     are {limit}",
                    gigabytes(needed),
                    gigabytes(*bytes)
                ));
            }
            return;
        }
        self.environment.plan.recipe.rollout.sequences_max = before;
    }

    /// Checks the host memory that a process of a GPU needs.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] if it is too small.
    pub fn check_host_memory(&self, host: Option<&AvailableMemory>) -> Result<()> {
        let needed = self.memory_plan_input().host_bytes();
        match host.filter(|host| self.choices.gpu_sequences.is_some() && needed > host.bytes) {
            None => Ok(()),
            Some(host) => Err(bad_input!(
                "needs {} of host memory in addition to the GPU's, but {} are {}; use a larger machine",
                gigabytes(needed),
                gigabytes(host.bytes),
                host.limit
            )),
        }
    }

    /// Checks the plan against the available memory. Warns if the plan nearly fills it. If the command can
    /// read layers on demand, a model that is too large stays on disk, with a warning about the cost.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] if the memory is too small. The message names the keys to change.
    pub fn check_memory(&mut self, host: Option<AvailableMemory>) -> Result<()> {
        self.check_host_memory(host.as_ref())?;
        let available = self.available_memory(host);
        let available = available.as_ref();
        self.choose_sharding(self.placement.processes, available);
        if self.command == ModelCommand::Serve && self.choices.gpu_sequences.is_none() {
            self.lower_sequences(available);
        }
        let peak = self.peak_bytes();
        // Reading layers on demand is fast enough only for few forward passes over many tokens.
        if available.is_some_and(|available| peak > available.bytes)
            && matches!(self.command, ModelCommand::Eval | ModelCommand::CheckMismatch(_))
            && self.choices.gpu_sequences.is_none()
            && let Some(files) = &self.source.weights
        {
            self.placement.layers_on_demand = true;
            self.environment.plan.warnings.push(on_demand_warning(peak, files, &self.source.config)?);
        }
        let input = self.memory_plan_input();
        let result = MemoryPlan::new(&input).check_available(
            available,
            &input.remedies(available.map_or(u64::MAX, |available| available.bytes)),
        );
        let warning = result.map_err(|error| match self.choices.gpu_sequences {
            Some(_) => bad_input!("{error}; {}. {PLAN_HINT}", input.describe_sequence_cache()),
            None => bad_input!("{error}. {PLAN_HINT}"),
        })?;
        self.environment.plan.warnings.extend(warning);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::ExpertPlacement;
    use crate::metrics::Console;
    use crate::recipe::resolve;
    use std::path::Path;

    /// Returns a run of `processes` GPUs with 16 experts of 11 million values in 16 layers.
    fn on_gpus(processes: usize, rest: &str) -> Startup {
        let shape =
            "hidden_size = 4096\nintermediate_size = 864\nnum_hidden_layers = 16\nnum_local_experts = 16\n";
        // Small updates, so that sampling sets the peak.
        let text = format!(
            "[model.architecture]\n{shape}[task]\nname = \"format_rules\"\n[rollout]\nturns_max = 1\n\
             prompt_tokens_max = 60\nresponse_tokens_max = 100\n\
             [train]\nrecompute_layers = true\n[train.optimizer]\nkind = \"sgd\"\nmomentum = 0\n{rest}"
        );
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let mut startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        (startup.choices.gpu_sequences, startup.placement.processes) = (Some(1), processes);
        startup
    }

    /// Plans for `gigabytes` on each GPU. Returns the placement, the number of sequences, the peak in GB, and
    /// whether the plan warned that it chose the placement, and that decode is not recorded.
    fn planned(startup: &mut Startup, gigabytes: f64) -> (RolloutWeightPlacement, usize, f64, [bool; 2]) {
        let available = AvailableMemory { bytes: (gigabytes * 1e9) as u64, limit: String::new() };
        startup.choose_sharding(startup.placement.processes, Some(&available));
        let warnings: Vec<String> = startup.environment.plan.warnings.drain(..).collect();
        let warned = ["too small for all weights", "record"]
            .map(|word| warnings.iter().any(|text| text.contains(word)));
        let peak = MemoryPlan::new(&startup.memory_plan_input()).peak_bytes() as f64 / 1e9;
        (startup.placement.rollout_weights, startup.choices.gpu_sequences.unwrap(), peak, warned)
    }

    #[test]
    fn gpus_sample_by_expert_if_whole_weights_do_not_fit() {
        let mut startup = on_gpus(8, "");
        let (how, sequences, whole, warned) = planned(&mut startup, 80.0);
        assert_eq!((how, warned), (RolloutWeightPlacement::Whole, [false, false]));
        assert!(sequences > 1, "{sequences} sequences");
        // Whole weights need 5.4 GB of experts.
        let (how, fewer, by_expert, warned) = planned(&mut startup, 8.0);
        assert_eq!((how, warned), (RolloutWeightPlacement::ByExpert, [true, true]));
        assert!(whole > 8.0 && by_expert <= 8.0 && fewer >= 1, "{whole} and {by_expert} GB");
        // If no option fits, the smallest is planned, and refused later.
        assert_eq!(planned(&mut startup, 0.1).0, RolloutWeightPlacement::ByExpert);
        // A GPU alone has all weights.
        let mut alone = on_gpus(1, "");
        assert_eq!(planned(&mut alone, 0.1).0, RolloutWeightPlacement::Whole);
        // What the recipe says holds.
        let mut asked = on_gpus(8, "[parallel]\nrollout_weights = \"by_expert\"\n");
        let (how, _, _, warned) = planned(&mut asked, 80.0);
        assert_eq!((how, warned), (RolloutWeightPlacement::ByExpert, [false, true]));
        let mut asked = on_gpus(8, "[parallel]\nrollout_weights = \"whole\"\n");
        assert_eq!(planned(&mut asked, 8.0).0, RolloutWeightPlacement::Whole);
    }

    /// The plan of several GPUs had no CUDA graphs, although each GPU with whole weights records decode.
    #[test]
    fn several_gpus_with_whole_weights_have_cuda_graphs_in_their_plan() {
        let has_graphs = |processes, placement: &str| {
            let mut startup = on_gpus(processes, &format!("[parallel]\nrollout_weights = \"{placement}\"\n"));
            planned(&mut startup, 80.0);
            let plan = MemoryPlan::new(&startup.memory_plan_input());
            plan.resident.iter().any(|item| item.name == "CUDA graph" && item.bytes > 0)
        };
        assert!(has_graphs(1, "whole") && has_graphs(2, "whole") && has_graphs(8, "auto"));
        assert!(!has_graphs(2, "by_expert"));
    }

    /// A 1.5B file was refused for 37 GB, because 64 sequences of 9,216 tokens were planned.
    #[test]
    fn a_server_samples_fewer_sequences_at_a_time_if_memory_is_short() {
        let text = "[task]\nname = \"arithmetic_single\"\n[rollout]\nturns_max = 1\nprompt_tokens_max = 900\n\
                    sequences_max = 64";
        let open = |sequences: usize| {
            let sets = [format!("rollout.sequences_max={sequences}")];
            let plan = resolve(Path::new("a.toml"), text, &sets).unwrap();
            Startup::open(plan, ModelCommand::Serve, &Console::silent()).unwrap()
        };
        let serve_with = |bytes: u64| {
            let mut startup = open(64);
            let available = AvailableMemory { bytes, limit: "free".into() };
            let error = startup.check_memory(Some(available)).err().map(|error| error.to_string());
            let plan = &startup.environment.plan;
            let warned = plan.warnings.iter().any(|warning| warning.contains("rollout.sequences_max is"));
            (error, plan.recipe.rollout.sequences_max, warned)
        };
        for (sequences, warned) in [(64, false), (16, true), (1, true)] {
            assert_eq!(serve_with(open(sequences).peak_bytes()), (None, sequences, warned));
        }
        let (error, sequences, warned) = serve_with(open(1).peak_bytes() - 1);
        assert!(error.unwrap().contains("remedies: ") && (sequences, warned) == (64, false));
    }

    /// 8 GPUs have two of 16 experts each. In training they hold received rows instead of gathered experts.
    #[test]
    fn gpus_that_train_by_expert_gather_no_experts() {
        let mut plans = vec![];
        for experts in [ExpertPlacement::Gathered, ExpertPlacement::ByExpert] {
            let mut startup = on_gpus(8, "");
            startup.environment.plan.recipe.parallel.experts = experts;
            let input = startup.memory_plan_input();
            let plan = MemoryPlan::new(&input);
            let item = |name: &str| {
                let (_, items) = plan.phases.iter().find(|(phase, _)| *phase == "update").unwrap();
                items.iter().find(|item| item.name == name).map_or(0, |item| item.bytes)
            };
            let items = ["gathered weights, exchanged gradients", "rows of experts, exchanged"].map(item);
            let resident: u64 = plan.resident.iter().map(|item| item.bytes).sum();
            plans.push((items, resident));
        }
        let [gathered, by_expert] = &plans[..] else { panic!("two plans") };
        // Experts are most of the weights.
        assert!(by_expert.0[0] * 2 < gathered.0[0], "{plans:?}");
        assert!(gathered.0[1] == 0 && by_expert.0[1] > 0, "{plans:?}");
        // Shards have the same size: 16 experts are divided evenly.
        assert!(by_expert.1.abs_diff(gathered.1) < gathered.1 / 100, "{plans:?}");
    }
}
