//! The proof's cases: random models and rollouts in which something could tell rollout and training apart.

use anyhow::{Context, Result, ensure};
use rand::Rng;
use rloss::actor::{Actor, Execution};
use rloss::chat::{ChatFormat, ToolForm};
use rloss::dist::RolloutWeightPlacement;
use rloss::engine::{Engine, EngineLimits};
use rloss::harmony::Message;
use rloss::interpreter::{Interpreter, Reply, SessionId};
use rloss::metrics::Console;
use rloss::mismatch::bitwise_equality::{EqualityCheck, EqualityChecks};
use rloss::model::cache::CacheCapacity;
use rloss::model::config::{Config, LayerType, Rope};
use rloss::model::families::Family;
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::init::{InitSettings, init};
use rloss::model::parameters::{Backend, Parameters};
use rloss::model::policy_view::PolicyView;
use rloss::model::settings::Yarn;
use rloss::model::storage::TensorStorage;
use rloss::ops::product::Precision;
use rloss::ops::threads::Threads;
use rloss::random::{Purpose, stream};
use rloss::rollout::{
    Hooks, Prompt, Rollout, RolloutPlan, RolloutSettings, SamplingParameters, TurnPosition,
};
use rloss::settings::Choice;
use rloss::tasks::{Problem, Reward, Task, Transcript, ValidationSet};
use rloss::trajectory::{CallOutcome, Trajectory};
use std::sync::Arc;

/// One case: a model, how it samples, and what its conversations look like.
pub struct Case {
    pub name: &'static str,
    config: Config,
    bf16_weights: bool,
    precision: Precision,
    sampling: SamplingParameters,
    /// Sequences that an engine decodes together.
    sequences_max: usize,
    samples: usize,
    turns: u64,
    /// Longest turn; each conversation's are of other lengths, so that sequences leave and enter.
    turn_tokens_max: usize,
    /// Its longest conversation has at least so many tokens, or the case does not show what it is for.
    longest_min: usize,
    /// Out of 100, the share of the sampled tokens that this case covers.
    share: usize,
}

fn base() -> Case {
    let yarn = Yarn {
        factor: 4.0,
        original_max_position_embeddings: 64,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
    };
    Case {
        name: "",
        config: Config {
            family: Family::default(),
            vocab_size: 272,
            hidden_size: 64,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            intermediate_size: 64,
            num_local_experts: 4,
            num_experts_per_tok: 2,
            sliding_window: 16,
            layer_types: LayerType::alternate(4),
            rope: Rope { theta: 10_000.0, yarn: Some(yarn) },
            rms_norm_eps: 1e-5,
            swiglu_limit: 7.0,
            tie_word_embeddings: false,
            max_position_embeddings: 2048,
            bos_token_id: None,
            eos_token_ids: vec![6],
            pad_token_id: Some(0),
        },
        bf16_weights: false,
        precision: Precision::F32,
        sampling: SamplingParameters::with_temperature(1.0),
        sequences_max: 16,
        samples: 4,
        turns: 2,
        turn_tokens_max: 60,
        longest_min: 0,
        share: 10,
    }
}

/// All cases; the shares make 100.
pub fn cases() -> Vec<Case> {
    let odd = Config {
        hidden_size: 100,
        num_attention_heads: 6,
        num_key_value_heads: 3,
        head_dim: 18,
        intermediate_size: 51,
        num_local_experts: 5,
        num_experts_per_tok: 3,
        sliding_window: 7,
        ..base().config
    };
    let odd_bf16 = odd.clone();
    let wide = Config {
        hidden_size: 2880,
        num_hidden_layers: 1,
        layer_types: LayerType::alternate(1),
        head_dim: 64,
        intermediate_size: 96,
        ..base().config
    };
    let small = Config {
        hidden_size: 512,
        num_hidden_layers: 8,
        layer_types: LayerType::alternate(8),
        num_attention_heads: 8,
        head_dim: 64,
        intermediate_size: 256,
        num_local_experts: 16,
        num_experts_per_tok: 4,
        sliding_window: 32,
        ..base().config
    };
    let chunked = Config {
        hidden_size: 32,
        num_hidden_layers: 2,
        layer_types: LayerType::alternate(2),
        sliding_window: 300,
        ..base().config
    };
    let dense = Config {
        family: Family::from_name("qwen2").unwrap(),
        num_local_experts: 0,
        num_experts_per_tok: 0,
        intermediate_size: 200,
        layer_types: vec![LayerType::Full; 4],
        swiglu_limit: 0.0,
        eos_token_ids: vec![IM_END],
        ..base().config
    };
    let dense_odd = Config {
        hidden_size: 100,
        num_attention_heads: 21,
        num_key_value_heads: 3,
        head_dim: 18,
        intermediate_size: 51,
        tie_word_embeddings: true,
        rope: Rope { theta: 1_000_000.0, yarn: None },
        ..dense.clone()
    };
    let qwen3 = Config {
        family: Family::from_name("qwen3").unwrap(),
        head_dim: 128,
        tie_word_embeddings: true,
        ..dense.clone()
    };
    let qwen3_moe = Config {
        family: Family::from_name("qwen3_moe").unwrap(),
        hidden_size: 100,
        intermediate_size: 51,
        num_local_experts: 16,
        num_experts_per_tok: 8,
        ..dense.clone()
    };
    vec![
        Case { name: "dense family", config: dense, turns: 3, share: 3, ..base() },
        Case { name: "dense family, tied, odd sizes", config: dense_odd, turns: 3, share: 3, ..base() },
        Case { name: "Qwen3, tied, heads of 128", config: qwen3, turns: 3, share: 2, ..base() },
        Case { name: "Qwen3 with experts", config: qwen3_moe, turns: 3, share: 2, ..base() },
        Case { name: "windows crossed many times", turns: 1, turn_tokens_max: 700, share: 10, ..base() },
        Case {
            name: "chunks of keys crossed",
            config: chunked,
            samples: 2,
            turns: 1,
            turn_tokens_max: 1800,
            longest_min: 1600,
            share: 12,
            ..base()
        },
        Case { name: "tool output inserted", turns: 5, share: 8, ..base() },
        Case { name: "groups share a prefill", samples: 16, share: 8, ..base() },
        Case { name: "sequences leave and enter", sequences_max: 3, samples: 2, share: 8, ..base() },
        Case {
            name: "temperature 0.6",
            sampling: SamplingParameters::with_temperature(0.6),
            share: 5,
            ..base()
        },
        Case {
            name: "temperature 1.7",
            sampling: SamplingParameters::with_temperature(1.7),
            share: 5,
            ..base()
        },
        Case {
            name: "top-p 0.9",
            sampling: SamplingParameters { top_p: 0.9, ..SamplingParameters::with_temperature(1.0) },
            share: 3,
            ..base()
        },
        Case {
            name: "top-k 20",
            sampling: SamplingParameters { top_k: 20, ..SamplingParameters::with_temperature(1.0) },
            share: 2,
            ..base()
        },
        Case {
            name: "min-p 0.05",
            sampling: SamplingParameters { min_p: 0.05, ..SamplingParameters::with_temperature(1.0) },
            share: 2,
            ..base()
        },
        Case {
            name: "top-p 0.9, top-k 20, min-p 0.05, temperature 0.6",
            sampling: SamplingParameters { temperature: 0.6, top_p: 0.9, top_k: 20, min_p: 0.05 },
            share: 3,
            ..base()
        },
        Case { name: "odd sizes", config: odd, ..base() },
        Case { name: "weights rounded to bf16", bf16_weights: true, share: 4, ..base() },
        Case {
            name: "dot products of bf16",
            config: odd_bf16,
            bf16_weights: true,
            precision: Precision::Bf16Dot,
            share: 4,
            ..base()
        },
        Case { name: "hidden size 2880", config: wide, share: 2, ..base() },
        Case { name: "small model", config: small.clone(), samples: 2, share: 2, ..base() },
        Case {
            name: "dot products of bf16, small model",
            config: small,
            samples: 2,
            bf16_weights: true,
            precision: Precision::Bf16Dot,
            share: 2,
            ..base()
        },
    ]
}

impl Case {
    /// How many of `tokens` sampled tokens this case covers.
    pub fn tokens(&self, tokens: usize) -> usize {
        tokens * self.share / 100
    }

    /// Whether this processor can compute it.
    pub fn is_here(&self) -> bool {
        self.precision.is_supported()
    }

    /// The links over at least `tokens` sampled tokens, each with fresh rollouts.
    pub fn links(&self, threads: &Threads, tokens: usize) -> Result<Vec<EqualityCheck>> {
        let (model, parameters) = self.model()?;
        let execution = Execution {
            threads: Threads::new(threads.count())?,
            recompute_layers: false,
            micro_batch_tokens: 1000,
            cache_capacity: CacheCapacity::default(),
            prefix_tokens_max: 0,
            rollout_weights: RolloutWeightPlacement::Auto,
        };
        let actor = Actor::new(Arc::new(model), parameters, Arc::new(execution));
        let policy = PolicyView::without_ablations(&actor.model, &actor.parameters)?;
        let mut links: Vec<EqualityCheck> = vec![];
        let (mut step, mut sampled) = (0, 0);
        while sampled < tokens {
            let trajectories = self.sample(threads, &policy, step)?;
            let trajectories: Vec<&Trajectory> = trajectories.iter().collect();
            let longest = trajectories.iter().map(|t| t.tokens.len()).max().unwrap_or(0);
            ensure!(
                longest >= self.longest_min,
                "{}: the longest of step {step} has {longest} tokens",
                self.name
            );
            let proof = EqualityChecks {
                actor: &actor,
                rollout: &policy,
                training: ForwardOptions::default(),
                temperature: self.sampling.temperature,
                console: &Console::silent(),
            };
            let found = proof.run_checks(&trajectories)?.to_vec();
            ensure!(
                trajectories.iter().all(|t| t.kept_tokens.is_empty() != self.sampling.truncates()),
                "{}: sets of kept tokens",
                self.name
            );
            sampled += found.last().map_or(0, |link| link.tokens);
            if links.is_empty() {
                links = found;
            } else {
                links.iter_mut().zip(&found).for_each(|(link, found)| add(link, found));
            }
            step += 1;
        }
        Ok(links)
    }

    fn model(&self) -> Result<(Model, Parameters)> {
        let settings = InitSettings { embedding_std: 0.5, head_scale: 0.5, sink: 1.0 };
        let mut tensors = init(&self.config, &settings, 11)?;
        if self.bf16_weights {
            let values = tensors.iter_mut().flat_map(|(_, values)| values);
            values.for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
        }
        let context = self.config.max_position_embeddings;
        let backend = Backend { precision: self.precision, ..Backend::default() };
        let tensors = tensors.into_iter().map(|(spec, values)| {
            let stored = TensorStorage::variable(&spec, values)?;
            Ok((spec, stored))
        });
        Ok((Model::new(self.config.clone(), context), Parameters::load(&self.config, &backend, tensors)?))
    }

    fn sample(&self, threads: &Threads, policy: &PolicyView, step: u64) -> Result<Vec<Trajectory>> {
        let SamplingParameters { temperature, top_p, top_k, min_p } = self.sampling;
        let settings = RolloutSettings {
            temperature,
            top_p,
            top_k,
            min_p,
            turns_max: self.turns as usize,
            response_tokens_max: 2000,
            prompt_tokens_max: 1000,
            sequences_max: self.sequences_max,
            tool_calls_concurrent_max: 16,
            ..RolloutSettings::default()
        };
        let plan = RolloutPlan { settings, seed: 5, purpose: Purpose::Sampling, step };
        let chat = self.config.family.chat.from_embedded()?;
        let limits = EngineLimits {
            sequences_max: self.sequences_max,
            cuda_graphs: true,
            cache_capacity: CacheCapacity::default(),
            prefix_tokens_max: 0,
        };
        let rollout = Rollout {
            engine: &Engine::new(threads, policy.clone(), step, limits)?,
            chat: &chat,
            task: &Questions,
            reward_min: 0.0,
            on_failure: Default::default(),
            reply_chars_max: None,
            interpreter: Some(&Repeat),
            form: ToolForm::Call,
            system_prompt: &[],
            plan: &plan,
        };
        let prompts = (0..4)
            .map(|i| Prompt { index: i, problem: Questions.training_problem(step, i) })
            .collect::<Vec<_>>();
        let talk = Talk { family: self.config.family, turns: self.turns, tokens_max: self.turn_tokens_max };
        // A forced token may not be among those that truncation keeps.
        let forced = |turn| if self.sampling.truncates() { vec![] } else { talk.turn(turn) };
        let rollouts = rollout.run(
            &prompts,
            self.samples,
            Hooks { forced: &forced, keeps_parts: true, ..Hooks::until(&|| false) },
        )?;
        let rollouts = rollouts.context("nobody stopped it")?;
        Ok(rollouts.groups.into_iter().flat_map(|group| group.trajectories).collect())
    }
}

/// Forces conversations: every turn but the last calls the tool, the last one answers, each at a length of its
/// own, with random text. Log-probs are the model's.
struct Talk {
    family: Family,
    turns: u64,
    tokens_max: usize,
}

// Ids of the embedded vocabularies.
const TO_PYTHON_CALL: [u32; 4] = [13, 3, 10, 2];
const FINAL: [u32; 3] = [3, 12, 2];
const CALL: u32 = 5;
const RETURN: u32 = 6;
const BYTES: u32 = 16;
const TOOL_CALL: u32 = 3;
const PYTHON_CODE: u32 = 8;
const CODE_END: u32 = 9;
const IM_END: u32 = 2;

impl Talk {
    /// What a turn begins with and what it ends in.
    fn frame(&self, last: bool) -> (&[u32], &[u32]) {
        match (self.family.chat, last) {
            (ChatFormat::Harmony, true) => (&FINAL, &[RETURN]),
            (ChatFormat::Harmony, false) => (&TO_PYTHON_CALL, &[CALL]),
            (ChatFormat::ChatMl, true) => (&[], &[IM_END]),
            (ChatFormat::ChatMl, false) => (&[TOOL_CALL, PYTHON_CODE], &[CODE_END, IM_END]),
            (ChatFormat::ThinkingChatMl, true) => (&[], &[IM_END]),
            // Two tokens more come before: those of thoughts.
            (ChatFormat::ThinkingChatMl, false) => (&[TOOL_CALL, PYTHON_CODE + 2], &[CODE_END + 2, IM_END]),
        }
    }
}

impl Talk {
    fn turn(&self, place: TurnPosition) -> Vec<u32> {
        let (opening, closing) = self.frame(place.turn + 1 == self.turns);
        let hash = (place.prompt * 31 + place.sample * 17 + place.turn * 7 + 3).wrapping_mul(0x9e37_79b9);
        let length = 6 + hash as usize % self.tokens_max;
        let mut random = stream(9, Purpose::Sampling, &[place.prompt, place.sample, place.turn]);
        let text = (opening.len()..length).map(|_| match self.family.chat {
            ChatFormat::Harmony => BYTES + random.random_range(32..127u32),
            // Digits: nothing that would end the text of a call or have to be escaped in it.
            _ => BYTES + 48 + random.random_range(0..10u32),
        });
        opening.iter().copied().chain(text).chain(closing.iter().copied()).collect()
    }
}

/// A tool that says a thing over and over: inserted text of many lengths.
struct Repeat;

impl Interpreter for Repeat {
    fn call(&self, _: SessionId, code: &str) -> Reply {
        Reply { text: "79 ".repeat(code.len() % 23), outcome: CallOutcome::Answered, seconds: 0.0 }
    }

    fn close(&self, _: SessionId) {}

    fn sandbox_description(&self) -> String {
        "none: nothing runs".into()
    }
}

struct Questions;

impl Task for Questions {
    fn name(&self) -> &str {
        "questions"
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        let n = (seed * 4 + index) as usize;
        Problem {
            id: format!("questions/{n}"),
            messages: vec![Message::user(format!("What is {}{n}?", "1+".repeat(n * 5 % 37)))],
            answer: serde_json::Value::Null,
        }
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &[]
    }

    fn uses_python(&self) -> bool {
        true
    }

    fn reward(&self, _: &Problem, _: &Transcript) -> Result<Reward> {
        Ok(Reward::new(0.0, false))
    }
}

/// Adds what the same link came to elsewhere.
fn add(link: &mut EqualityCheck, other: &EqualityCheck) {
    link.tokens += other.tokens;
    link.bit_equal += other.bit_equal;
    link.logprob_abs_diff_max = link.logprob_abs_diff_max.max(other.logprob_abs_diff_max);
}
