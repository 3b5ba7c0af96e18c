//! The plan of memory: what a command will take at most, from recipe and config alone, before any work.
//!
//! What stays for the whole run (weights, gradients, optimizer, critic, reference) lies beside the largest of the phases
//! that follow one another: sampling, the policy's update, the critic's. [`MemoryPlan::admit`] compares it with what there is.

mod gpu;
mod machine;
mod passes;
mod remedies;
mod traffic;
mod weights;

pub use machine::{Available, available, least};
pub use passes::PassShape;
pub use remedies::Remedy;
pub use traffic::Traffic;

use crate::bad_input;
use crate::dist::shard_range;
use crate::dist::{PackedWeights, RolloutWeights};
use crate::learner::OptimizerSettings;
use crate::learner::batch_runner::side_by_side;
use crate::learner::gradients::exchange_bytes_max;
use crate::learner::optimizer::state_bytes;
use crate::metrics::Table;
use crate::model::cache::SequenceCache;
use crate::model::config::{Config, Form};
use crate::model::names::{ParameterSpec, TensorRole, parameter_specs, value_model_specs};
use crate::model::rounding::WeightRounding;
use crate::policy::KlPlace;
use crate::recipe::Recipe;
use crate::rollout::{FORWARD_TOKENS_MAX, engines};
use anyhow::Result;
use weights::{Pieced, in_turn, whole_bytes};

/// What the program itself takes: code, tokenizer, task data, threads.
const PROGRAM_BYTES: u64 = 64 << 20;
/// A plan above this share of what there is is worth a warning.
const WARNED_SHARE: f64 = 0.9;
/// Tokens that frame a tool's reply.
const REPLY_FRAME_TOKENS: usize = 32;

/// What passes that run side by side may keep of their layers for the backward, unless the recipe says whether they do.
const KEPT_BYTES_MAX: u64 = 1 << 30;

/// The weights of a pass.
#[derive(Debug, Clone, Copy)]
pub struct PassWeights {
    pub bytes: u64,
    /// Whether matrices have adapters.
    pub adapted: bool,
    /// Whether packed weights are in pieces.
    pub packed_pieces: bool,
}

/// Whether a pass computes its layers again in the backward: as the recipe says, or as its weights and so many threads of so many
/// processes make it worth. It changes no bit.
pub fn recomputes_layers(
    recipe: &Recipe,
    config: &Config,
    weights: PassWeights,
    threads: usize,
    processes: usize,
) -> bool {
    recipe.train.recompute_layers.unwrap_or_else(|| {
        let tokens = recipe.train.micro_batch_tokens;
        let pass = PassShape { config, tokens, targets: tokens, adapted: weights.adapted, on_gpu: false };
        // An adapter's base is gathered only where it is cut.
        let gathered = !weights.adapted || weights.packed_pieces;
        let kept = match processes {
            1 => passes_at_once(weights.bytes, threads).saturating_mul(pass.both_ways(false)),
            // The graph of all layers holds them all.
            _ => pass.both_ways(false) + if gathered { weights.bytes } else { 0 },
        };
        kept > KEPT_BYTES_MAX
    })
}

fn passes_at_once(weight_bytes: u64, threads: usize) -> u64 {
    if side_by_side(weight_bytes) { threads as u64 } else { 1 }
}

/// What a command does with the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    Train,
    Rollout,
    Eval,
    CheckMismatch(OtherWeights),
}

/// What `check-mismatch` holds beside the model's own weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherWeights {
    /// Those that the arms sample with.
    Rounded(WeightRounding),
    /// Those that a known mistake makes, which may explain another engine's log-probs: a layer at a time.
    Changed,
}

impl Intent {
    /// The command's name.
    pub fn name(self) -> &'static str {
        match self {
            Intent::Train => "train",
            Intent::Rollout => "rollout",
            Intent::Eval => "eval",
            Intent::CheckMismatch(_) => "check-mismatch",
        }
    }

    /// Whether anything learns.
    pub fn learns(self) -> bool {
        self == Intent::Train
    }

    /// Whether the command goes on with a model that is larger than memory: few walks over many tokens are worth it.
    pub fn streams(self) -> bool {
        matches!(self, Intent::Eval | Intent::CheckMismatch(_))
    }
}

/// All that a plan is made from.
#[derive(Clone)]
pub struct Subject<'a> {
    pub intent: Intent,
    pub recipe: &'a Recipe,
    pub config: &'a Config,
    /// The form that each of the policy's tensors has where it does not learn.
    pub forms: &'a [Form],
    /// Which of the policy's tensors the recipe lets learn.
    pub trainable: Vec<bool>,
    /// The same of the critic's, where there is one.
    pub critic_trainable: Option<Vec<bool>>,
    /// Where an adapter learns, or came with the model.
    pub adapter: Option<AdapterPart>,
    pub uses_python: bool,
    pub threads: usize,
    /// Whether the layers stay on disk and are read one after the other.
    pub streamed: bool,
    /// Processes that make the run together; the plan is that of one of them.
    pub processes: usize,
    /// What of the learning weights each of them holds while it samples.
    pub rollout_weights: RolloutWeights,
    /// What of the packed ones each of them holds.
    pub packed_weights: PackedWeights,
    /// Where a GPU computes, whose memory the plan is then of: of how many sequences it holds keys and values.
    pub gpu_sequences: Option<usize>,
}

/// What an adapter adds.
#[derive(Debug, Clone)]
pub struct AdapterPart {
    /// Its factors.
    pub specs: Vec<ParameterSpec>,
    /// Which of them learn.
    pub trainable: Vec<bool>,
    /// Whether a cold start trains the whole model before.
    pub after_cold_start: bool,
}

impl AdapterPart {
    fn bytes(&self) -> u64 {
        plain_bytes(&self.specs)
    }
}

/// A tensor that learns, with its place in the store.
type Learning = (usize, ParameterSpec);

/// Those of `specs`, the first of which has the place `first`, that `trainable` marks.
fn marked(specs: impl IntoIterator<Item = ParameterSpec>, trainable: &[bool], first: usize) -> Vec<Learning> {
    (first..).zip(specs).zip(trainable).filter(|(_, learns)| **learns).map(|(found, _)| found).collect()
}

/// Bytes of `learning` in f32, all of it.
fn gathered_bytes(learning: &[Learning]) -> u64 {
    learning.iter().map(|(_, spec)| spec.resident_bytes(Form::F32)).sum()
}

/// Bytes of `specs` in f32.
fn plain_bytes(specs: &[ParameterSpec]) -> u64 {
    specs.iter().map(|spec| spec.resident_bytes(Form::F32)).sum()
}

/// The stages of training.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    ColdStart,
    Reinforcement,
}

/// One line of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

/// What a command takes at most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// What stays.
    pub resident: Vec<MemoryPart>,
    /// What comes and goes: the parts of each phase, one phase at a time.
    pub phases: Vec<(&'static str, Vec<MemoryPart>)>,
}

fn sum(parts: &[MemoryPart]) -> u64 {
    parts.iter().map(|part| part.bytes).sum()
}

impl MemoryPlan {
    /// The plan of `subject`.
    pub fn new(subject: &Subject) -> Self {
        match subject.gpu_sequences {
            None => Self { resident: subject.resident(), phases: subject.phases() },
            Some(sequences) => {
                Self { resident: subject.gpu_resident(), phases: subject.gpu_phases(sequences) }
            }
        }
    }

    /// What stays for the whole run.
    pub fn resident_bytes(&self) -> u64 {
        sum(&self.resident)
    }

    /// The most at any time.
    pub fn peak_bytes(&self) -> u64 {
        self.resident_bytes() + self.phases.iter().map(|(_, parts)| sum(parts)).max().unwrap_or(0)
    }

    /// Refuses a plan of more than `available`, naming what would help and by how much; returns a warning for one that nearly
    /// fills it.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there is not enough.
    pub fn admit(&self, available: Option<&Available>, remedies: &[Remedy]) -> Result<Option<String>> {
        let Some(Available { bytes, bound }) = available else { return Ok(None) };
        let peak = self.peak_bytes();
        let compared = format!("{} of memory are needed, {} are {bound}", gigabytes(peak), gigabytes(*bytes));
        if peak > *bytes {
            let help = what_helps(remedies);
            return Err(bad_input!("{compared}; what would help: {help}. `rloss check` prints the plan"));
        }
        Ok((peak as f64 > WARNED_SHARE * *bytes as f64).then(|| format!("{compared}; it may not suffice")))
    }
}

/// Remedies as a line.
fn what_helps(remedies: &[Remedy]) -> String {
    let help: Vec<String> = remedies.iter().map(Remedy::to_string).collect();
    if help.is_empty() { "take a larger machine".to_owned() } else { help.join("; ") }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new(["memory", "what", "GB"]);
        let stays = [("stays", &self.resident)];
        let phases = self.phases.iter().map(|(name, parts)| (*name, parts));
        for (name, parts) in stays.into_iter().chain(phases) {
            for part in parts.iter().filter(|part| part.bytes > 0) {
                table.row([name.to_owned(), part.name.to_owned(), plain_gigabytes(part.bytes)]);
            }
            table.row([name.to_owned(), "together".to_owned(), plain_gigabytes(sum(parts))]);
        }
        table.row(["peak".to_owned(), String::new(), plain_gigabytes(self.peak_bytes())]);
        write!(f, "{table}")
    }
}

/// `error`, with what takes a GPU's memory and what would help where that ran out.
pub fn told_of_memory(error: anyhow::Error, memory: &str) -> anyhow::Error {
    match format!("{error:#}").contains("CUDA_ERROR_OUT_OF_MEMORY") {
        true => error.context(format!("the GPU's memory ran out, of which this was planned:\n\n{memory}\n")),
        false => error,
    }
}

/// `1.50 GB`.
pub fn gigabytes(bytes: u64) -> String {
    format!("{} GB", plain_gigabytes(bytes))
}

fn plain_gigabytes(bytes: u64) -> String {
    // A GPU's plan has no program in it that fills the first places.
    let places = if bytes < 50_000_000 { 4 } else { 2 };
    format!("{:.places$}", bytes as f64 / 1e9)
}

impl Subject<'_> {
    /// The plan and what would make it smaller, in words.
    pub fn words(&self) -> String {
        format!("{}\nwhat would help: {}", MemoryPlan::new(self), what_helps(&self.remedies()))
    }

    /// What of the policy learns in `stage`.
    fn learning(&self, stage: Stage) -> Vec<Learning> {
        match &self.adapter {
            Some(adapter) if stage == Stage::Reinforcement || !adapter.after_cold_start => {
                marked(adapter.specs.clone(), &adapter.trainable, self.forms.len())
            }
            _ => marked(parameter_specs(self.config), &self.trainable, 0),
        }
    }

    /// What of the policy learns in any stage.
    fn ever_learning(&self) -> Vec<Learning> {
        let mut found = self.learning(Stage::Reinforcement);
        if self.adapter.as_ref().is_some_and(|adapter| adapter.after_cold_start) {
            found.extend(self.learning(Stage::ColdStart));
        }
        found
    }

    /// The sum of `bytes` over `learning`, given each tensor and how many of its values are here: those of the process that has
    /// most.
    fn share(&self, learning: &[Learning], bytes: impl Fn(&ParameterSpec, usize) -> u64) -> u64 {
        let of = |rank: usize| -> u64 {
            let here = |spec: &ParameterSpec, index: usize| {
                shard_range(spec.element_count(), index, rank, self.processes).len()
            };
            learning.iter().map(|(index, spec)| bytes(spec, here(spec, *index))).sum()
        };
        (0..self.processes).map(of).max().unwrap_or(0)
    }

    /// Bytes in f32 of what is here of `learning`.
    fn plain_share(&self, learning: &[Learning]) -> u64 {
        self.share(learning, |_, here| here as u64 * size_of::<f32>() as u64)
    }

    /// What an optimizer keeps here of the tensors `learning`.
    fn optimizer(&self, settings: &OptimizerSettings, learning: &[Learning]) -> u64 {
        let rounds_weights = self.recipe.model.dtype.is_bf16();
        self.share(learning, |spec, here| {
            // An adapter stays in f32.
            let has_master = rounds_weights && spec.role != TensorRole::AdapterFactor;
            let master = if has_master { (here * size_of::<f32>()) as u64 } else { 0 };
            master + state_bytes(settings, spec.element_count(), here)
        })
    }

    /// What a process gathers in a pass: of `learning` and the packed weights in pieces a layer at a time where it `recomputes`, else
    /// all of them, as its graph holds all layers; and the gradients that are exchanged.
    fn gathered(&self, learning: &[Learning], recomputes: bool) -> u64 {
        let largest = learning.iter().map(|(_, spec)| spec.resident_bytes(Form::F32)).max().unwrap_or(0);
        let pieced: Vec<Pieced> =
            learning.iter().cloned().map(Pieced::learning).chain(self.packed_pieces()).collect();
        // As a layer comes it is there twice, and the next one is on its way.
        let weights = if recomputes { in_turn(&pieced) } else { whole_bytes(&pieced).max(in_turn(&pieced)) };
        weights + largest + exchange_bytes_max(gathered_bytes(learning)).max(2 * largest)
    }

    fn resident(&self) -> Vec<MemoryPart> {
        let recipe = self.recipe;
        let weights = match self.streamed {
            true => MemoryPart { name: "weights, a layer at a time", bytes: self.streamed_weights() },
            false => MemoryPart { name: "weights", bytes: self.own_weight_bytes() },
        };
        let mut parts = vec![MemoryPart { name: "program", bytes: PROGRAM_BYTES }, weights];
        let mut part = |name, bytes| parts.push(MemoryPart { name, bytes });
        if self.intent.learns() {
            // Gradients and optimizer of the stage that takes more of them.
            let stages = [
                (Stage::ColdStart, recipe.cold_start.steps, &recipe.cold_start.optimizer),
                (Stage::Reinforcement, recipe.train.steps, &recipe.train.optimizer),
            ];
            let kept = stages.into_iter().filter(|(_, steps, _)| *steps > 0).map(|(stage, _, optimizer)| {
                let learning = self.learning(stage);
                (self.plain_share(&learning), self.optimizer(optimizer, &learning))
            });
            let (gradients, optimizer) = kept.max_by_key(|(a, b)| a + b).unwrap_or_default();
            part("gradients", gradients);
            part("optimizer", optimizer);
            if let (Some(critic), Some(trainable)) = (&recipe.critic, &self.critic_trainable) {
                let learning = self.critic_learning(trainable);
                let all = self.critic_weights(trainable).saturating_sub(gathered_bytes(&learning));
                part("critic's weights", all + self.plain_share(&learning));
                part("critic's gradients", self.plain_share(&learning));
                part("critic's optimizer", self.optimizer(&critic.optimizer, &learning));
            }
            // Without its adapter the model itself is the reference.
            if recipe.policy.kl.place != KlPlace::None && self.adapter.is_none() {
                // What learns is cut, in the reference too.
                let learning = self.learning(Stage::Reinforcement);
                let all = self.plain_weights().saturating_sub(gathered_bytes(&learning));
                part("reference", all + self.plain_share(&learning));
            }
        }
        match self.intent {
            Intent::CheckMismatch(OtherWeights::Rounded(rounding)) => {
                part("weights, rounded", self.rounded_weights(rounding));
            }
            Intent::CheckMismatch(OtherWeights::Changed) => part("weights, changed", self.changed_weights()),
            // Arms round the weights of training's samples alone, while they are drawn.
            Intent::Train | Intent::Rollout | Intent::Eval => {}
        }
        parts
    }

    /// What of the critic learns: its tensors, or its head and its adapter's factors.
    fn critic_learning(&self, trainable: &[bool]) -> Vec<Learning> {
        let factors = self.adapter.iter().flat_map(|adapter| adapter.specs.iter().cloned());
        marked(value_model_specs(self.config).into_iter().chain(factors), trainable, 0)
    }

    /// Tokens of the longest sequence: prompt, samples and tool replies, within the context.
    fn longest(&self) -> usize {
        let rollout = &self.recipe.rollout;
        let replies = if self.uses_python { rollout.turns_max.saturating_sub(1) } else { 0 };
        let reply = self.recipe.interpreter.output_chars_max + REPLY_FRAME_TOKENS;
        let tokens = rollout.prompt_tokens_max + rollout.response_tokens_max + replies * reply;
        tokens.min(self.config.max_position_embeddings)
    }

    fn phases(&self) -> Vec<(&'static str, Vec<MemoryPart>)> {
        let recipe = self.recipe;
        let mut phases = vec![];
        let steps = if self.intent.learns() { recipe.train.steps } else { 1 };
        if steps > 0 {
            phases.push(("sampling", self.sampling()));
        }
        let trajectories = match self.intent {
            Intent::Eval | Intent::Rollout => return phases,
            _ => recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt,
        };
        let tokens = recipe.train.micro_batch_tokens.max(self.longest()).min(trajectories * self.longest());
        let tokens = if self.processes > 1 { tokens.div_ceil(recipe.parallel.sequence) } else { tokens };
        let pass = PassShape {
            config: self.config,
            tokens,
            targets: tokens,
            adapted: self.adapter.is_some(),
            on_gpu: false,
        };
        // Processes whose passes meet make them one after the other.
        let meets = self.processes > 1;
        let at_once = if meets { 1 } else { passes_at_once(self.weight_bytes(), self.threads) };
        if matches!(self.intent, Intent::CheckMismatch(_)) {
            phases.push(("comparison", vec![MemoryPart { name: "activations", bytes: pass.forward() }]));
            return phases;
        }
        let weights = PassWeights {
            bytes: self.weight_bytes(),
            adapted: self.adapter.is_some(),
            packed_pieces: !self.packed_pieces().is_empty(),
        };
        let recomputes = recomputes_layers(recipe, self.config, weights, self.threads, self.processes);
        let bytes = at_once * pass.both_ways(recomputes);
        let name = if recomputes { "activations, recomputed" } else { "activations, all kept" };
        let critic = self.critic_trainable.as_ref().map(|trainable| self.critic_learning(trainable));
        let learning = [self.ever_learning(), critic.unwrap_or_default()];
        let gathered = learning.iter().map(|learning| self.gathered(learning, recomputes)).max().unwrap_or(0);
        let gathered = if meets { gathered } else { 0 };
        let gathered = MemoryPart { name: "gathered, and gradients on their way", bytes: gathered };
        phases.push(("update", vec![MemoryPart { name, bytes }, gathered]));
        phases
    }

    /// Prompts of a rollout, and samples of each.
    pub fn sampled(&self) -> (usize, usize) {
        let recipe = self.recipe;
        match self.intent {
            Intent::Eval => (recipe.eval.problems_max, recipe.eval.samples),
            _ => (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt),
        }
    }

    /// Caches of all sequences at their longest, one forward of new tokens, and the logits drawn from.
    fn sampling(&self) -> Vec<MemoryPart> {
        let (recipe, config) = (self.recipe, self.config);
        let (prompts, samples) = self.sampled();
        let prompts = prompts.div_ceil(self.processes);
        let cut = self.processes > 1 && self.intent.learns();
        let gathered = cut.then(|| self.gathered_for_sampling());
        let together = self.held_while_sampling() != RolloutWeights::Whole;
        let rounded = match self.intent {
            // What is gathered in parts is rounded as it comes.
            Intent::Train if together => 0,
            Intent::Train | Intent::Rollout => self.rounded_weights(WeightRounding::of(&recipe.arms)),
            Intent::Eval | Intent::CheckMismatch(_) => 0,
        };
        let engines = if together { 1 } else { engines(self.weight_bytes(), self.threads) };
        let sequences = (recipe.rollout.sequences_max * engines).min(prompts.saturating_mul(samples));
        let tokens = FORWARD_TOKENS_MAX.min(sequences * self.longest());
        // Each row drawn from is copied once by the thread that draws.
        let drawn = (self.threads * config.vocab_size * size_of::<f32>()) as u64;
        let targets = sequences.div_ceil(engines);
        let adapted = self.adapter.is_some();
        let forward = PassShape { config, tokens, targets, adapted, on_gpu: false }.forward();
        let parts = vec![
            MemoryPart {
                name: "keys and values",
                bytes: sequences as u64 * SequenceCache::bytes(config, self.longest()),
            },
            MemoryPart { name: "one forward and its logits", bytes: engines as u64 * forward + drawn },
            MemoryPart { name: "weights, rounded", bytes: rounded },
        ];
        parts.into_iter().chain(gathered).collect()
    }
}

#[cfg(test)]
mod tests;
