//! What several processes send each other in a step, from recipe and config alone: bytes that come to each of them.

use super::weights::{Pieced, whole_bytes};
use super::{Stage, Subject, gathered_bytes};
use crate::dist::RolloutWeights;
use crate::metrics::Table;

const F32: u64 = 4;
/// A link between GPUs of one node, NVLink 4: 900 GB/s both ways.
const NODE_BYTES_PER_S: f64 = 450e9;
/// A network card of 400 Gb/s.
const NETWORK_BYTES_PER_S: f64 = 50e9;

/// Bytes that come to one process in a step of reinforcement learning with one update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Passes that a process makes over its micro-batches, all of which are at their longest.
    pub passes: u64,
    /// What is exchanged, and its bytes.
    pub parts: Vec<(&'static str, u64)>,
}

impl Traffic {
    /// That of `subject`.
    pub fn new(subject: &Subject) -> Self {
        let (recipe, config, ranks) = (subject.recipe, subject.config, subject.processes as u64);
        let sharing = if ranks > 1 { recipe.parallel.sequence as u64 } else { 1 };
        let learning = subject.learning(Stage::Reinforcement);
        let gradients = gathered_bytes(&learning);
        let pieced = subject.pieced();
        let all = whole_bytes(&pieced);
        let layers: u64 = pieced.iter().filter(|one| one.layer().is_some()).map(Pieced::bytes).sum();
        let trajectories = (recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt) as u64;
        let longest = subject.longest() as u64;
        let rows = (recipe.train.micro_batch_tokens as u64).max(longest);
        let batches = (trajectories * longest).div_ceil(rows);
        let passes = batches.div_ceil(ranks / sharing);
        // Of what all hold together a process has its part already.
        let others = |bytes: u64| bytes - bytes / ranks;
        // Forward, its repetition and backward move queries, keys, values and the mix of every layer.
        let width = 2 * config.num_attention_heads + 2 * config.num_key_value_heads;
        let values = rows.div_ceil(sharing) * (width * config.head_dim * config.num_hidden_layers) as u64;
        let heads = 3 * F32 * (values - values / sharing);
        let [weights, rows] = sampling(subject, all);
        Self {
            passes,
            parts: vec![
                ("weights, for sampling", weights),
                ("rows to experts and back", rows),
                ("weights, layer by layer", passes * others(all + layers)),
                ("gradients", passes * others(gradients)),
                ("heads of split sequences", passes * heads),
            ],
        }
    }

    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Weights and rows that come to a process of `subject` while it samples, of `all` bytes that are in pieces.
fn sampling(subject: &Subject, all: u64) -> [u64; 2] {
    let (rollout, config, ranks) = (&subject.recipe.rollout, subject.config, subject.processes as u64);
    let others = |bytes: u64| bytes - bytes / ranks;
    let own = (rollout.prompts_per_step as u64).div_ceil(ranks) * rollout.samples_per_prompt as u64;
    let longest = subject.longest() as u64;
    match subject.held_while_sampling() {
        RolloutWeights::Auto | RolloutWeights::Whole => [others(all), 0],
        RolloutWeights::ByExpert => {
            let of_experts: u64 =
                subject.pieced().iter().filter(|one| one.spec.is_per_expert()).map(Pieced::bytes).sum();
            // A row goes to its expert, and its product comes back.
            let rows = own * longest * (config.num_experts_per_tok * config.num_hidden_layers) as u64;
            [
                others(all - of_experts) + of_experts / ranks,
                2 * others(rows * config.hidden_size as u64 * F32),
            ]
        }
    }
}

impl std::fmt::Display for Traffic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table =
            Table::new(["what comes to a process in a step", "GB", "s by NVLink", "s by 400 Gb/s"]);
        let mut row = |what: &str, bytes: u64| {
            let seconds = |rate: f64| format!("{:.2}", bytes as f64 / rate);
            table.row([
                what.to_owned(),
                super::plain_gigabytes(bytes),
                seconds(NODE_BYTES_PER_S),
                seconds(NETWORK_BYTES_PER_S),
            ]);
        };
        self.parts.iter().filter(|(_, bytes)| *bytes > 0).for_each(|(what, bytes)| row(what, *bytes));
        row("together", self.bytes());
        write!(f, "{table}")
    }
}
