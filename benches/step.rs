//! One GRPO step from end to end: rollout, loss, gradients, update. `cargo bench --bench step -- --hidden
//! 512 ...`
//!
//! Prints one JSON line: wall and processor seconds of rollout and update, the machine's best rates in the
//! same run, and the share of them that was used. Everything but shapes is at the recipe's defaults.
//! Responses have a fixed length: tokens that would end one are replaced, and peers are configured not to
//! stop.

#[path = "../src/allocator.rs"]
mod allocator;
mod machine;
mod models;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use models::{TINY, config, random};
use rand::Rng;
use rloss::actor::{Actor, Execution, Forward, GradientNorm, PassSettings};
use rloss::dist::{Mesh, RolloutWeightPlacement};
use rloss::harmony::Message;
use rloss::metrics::{Console, Timings};
use rloss::model::cache::CacheCapacity;
use rloss::model::config::{Config, LayerType};
use rloss::model::forward::ForwardOptions;
use rloss::model::parameters::Backend;
use rloss::model::policy_view::PolicyView;
use rloss::model::storage::StoredFormat;
use rloss::ops::product::Precision;
use rloss::ops::threads::Threads;
use rloss::random::{Purpose, stream};
use rloss::recipe::Recipe;
use rloss::rollout::{Hooks, Prompt, Rollout, RolloutPlan, RolloutProgress, RolloutSettings, TurnPosition};
use rloss::run::memory::{
    MemoryChoices, MemoryPlanInput, ModelCommand, ToolInput, TrainableInput, WeightPlacement,
    available_memory,
};
use rloss::tasks::{Problem, Reward, Task, Transcript, ValidationSet};
use rloss::trainer::gradient_norms::GradientNormLimits;
use rloss::trainer::observer::Stages;
use rloss::trainer::step::PolicyStep;
use rloss::trajectory::Group;
use serde_json::json;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The shapes; the defaults are "tiny" of docs/BENCHMARKS.md.
#[derive(Parser)]
struct Shapes {
    #[arg(long, default_value_t = 64)]
    hidden: usize,
    #[arg(long, default_value_t = 4)]
    layers: usize,
    #[arg(long, default_value_t = 4)]
    heads: usize,
    #[arg(long, default_value_t = 2)]
    kv: usize,
    #[arg(long, default_value_t = 16)]
    head_dim: usize,
    #[arg(long, default_value_t = 64)]
    inter: usize,
    #[arg(long, default_value_t = 8)]
    experts: usize,
    #[arg(long, default_value_t = 2)]
    topk: usize,
    #[arg(long, default_value_t = 320)]
    vocab: usize,
    #[arg(long, default_value_t = 8)]
    prompts: u64,
    #[arg(long, default_value_t = 8)]
    samples: usize,
    #[arg(long, default_value_t = 64)]
    prompt_tokens: usize,
    #[arg(long, default_value_t = 64)]
    response_tokens: usize,
    #[arg(long, default_value_t = 4)]
    steps: u64,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Gives each prompt of the update another first token, so that samples of a group share no prompt.
    #[arg(long)]
    separate_prompts: bool,
    /// Uses the processor's bf16 dot products.
    #[arg(long)]
    bf16_dot: bool,
    /// Flag that cargo passes to every benchmark.
    #[arg(long)]
    bench: bool,
}

impl Shapes {
    /// Returns the multiply-adds of one row's products: through the layers, and through the head.
    fn multiply_adds(&self) -> (usize, usize) {
        let attention = 2 * self.hidden * (self.heads + self.kv) * self.head_dim;
        let experts = self.hidden * self.experts + 3 * self.topk * self.hidden * self.inter;
        (self.layers * (attention + experts), self.hidden * self.vocab)
    }

    /// Returns the multiply-adds of the products of forward and backward, each counted once, without
    /// recomputation and attention. The backward has two products for each one of the forward.
    fn useful(&self, forward: &Forward) -> usize {
        let (of_row, of_target) = self.multiply_adds();
        3 * (forward.tokens * of_row + forward.columns.log_probs.len() * of_target)
    }

    fn config(&self) -> Config {
        Config {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv,
            head_dim: self.head_dim,
            intermediate_size: self.inter,
            num_local_experts: self.experts,
            num_experts_per_tok: self.topk,
            sliding_window: 16,
            layer_types: LayerType::alternate(self.layers),
            ..config(TINY)
        }
    }
}

/// First text id: lower ids are control tokens. Ids from [`TEXT_END`] on are outside the vocabulary.
const TEXT: u32 = 16;
const TEXT_END: u32 = 272;

/// Maximum number of sequences that decode together.
const SEQUENCES_MAX: usize = 64;

/// Returns random text, so that no response ends early.
fn random_text(turn: TurnPosition, tokens: usize) -> Vec<u32> {
    let mut random = stream(0, Purpose::Sampling, &[turn.prompt, turn.sample, turn.turn]);
    (0..tokens).map(|_| random.random_range(TEXT..TEXT_END)).collect()
}

/// A task with prompts of one length.
struct Numbers {
    characters: usize,
}

impl Task for Numbers {
    fn name(&self) -> &str {
        "numbers"
    }

    fn training_problem(&self, _: u64, index: u64) -> Problem {
        Problem {
            id: format!("numbers/{index}"),
            messages: vec![Message::user(format!("{index:0width$}", width = self.characters))],
            answer: serde_json::Value::Null,
        }
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &[]
    }

    fn uses_python(&self) -> bool {
        false
    }

    fn reward(&self, _: &Problem, _: &Transcript) -> Result<Reward> {
        Ok(Reward::new(0.0, false))
    }
}

/// Returns the system's resource usage of this process.
fn usage() -> libc::rusage {
    // SAFETY: the struct is plain numbers, and the call fills all of it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    }
}

/// Returns this process's processor seconds so far, and its minor page faults.
fn processor_and_faults() -> (f64, i64) {
    let usage = usage();
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    (seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_minflt)
}

/// Resources that a stage of a step used.
#[derive(Clone, Copy)]
struct Spent {
    seconds: f64,
    processor: f64,
    faults: i64,
}

fn time<R>(run: impl FnOnce() -> Result<R>) -> Result<(R, Spent)> {
    let (start, (processor, faults)) = (Instant::now(), processor_and_faults());
    let result = run()?;
    let seconds = start.elapsed().as_secs_f64();
    let (processor_end, faults_end) = processor_and_faults();
    Ok((result, Spent { seconds, processor: processor_end - processor, faults: faults_end - faults }))
}

/// Returns whether a run of these shapes recomputes activations on this machine.
fn recomputes_layers(shapes: &Shapes, config: &Config, tensors: usize, threads: &Threads) -> bool {
    let mut recipe = Recipe::default();
    recipe.cold_start.steps = 0;
    (recipe.rollout.prompt_tokens_max, recipe.rollout.response_tokens_max) =
        (shapes.prompt_tokens, shapes.response_tokens);
    (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt) =
        (shapes.prompts as usize, shapes.samples);
    (recipe.eval.every_steps, recipe.eval.before_training) = (0, false);
    let plan = MemoryPlanInput {
        command: ModelCommand::Train,
        recipe: &recipe,
        config,
        formats: &vec![StoredFormat::F32; tensors],
        trainable: TrainableInput { policy: vec![true; tensors], critic: None, adapter: None },
        tokenizer_bytes: 0,
        tools: ToolInput { python_workers: 0, reply_chars_max: None },
        threads: threads.count(),
        placement: WeightPlacement::whole(1),
        choices: MemoryChoices::default(),
        sft_row_tokens_max: None,
        teacher: None,
    };
    available_memory().is_some_and(|available| plan.needs_recomputation(&available))
}

/// Returns the seconds per decode step from the first to the last forward that sampled for all of `batch`.
fn decode_step(stamps: &[(Instant, u64)], batch: usize) -> Result<f64> {
    let full = |&&(_, sampled): &&(Instant, u64)| sampled >= batch as u64;
    let (first, last) = (stamps.iter().find(full), stamps.last());
    let ((begun, before), (ended, after)) =
        first.copied().zip(last.copied()).context("nothing was sampled")?;
    let steps = after.saturating_sub(before) as f64 / batch as f64;
    Ok(ended.duration_since(begun).as_secs_f64() / steps)
}

fn main() -> Result<()> {
    allocator::retain_freed_memory();
    // As in src/main.rs.
    // SAFETY: no other thread has been started yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    let shapes = Shapes::parse();
    let start_bytes = usage().ru_maxrss * 1024;
    let config = shapes.config();
    let threads = Threads::new(shapes.threads)?;
    let chat = config.family.chat.from_embedded()?;
    // Under mpirun several processes share the update; each of them samples everything.
    let mesh = Mesh::connect()?;
    let precision = if shapes.bf16_dot { Precision::Bf16Dot } else { Precision::F32 };
    ensure!(precision.is_supported(), "this processor has no dot products of bf16");
    let backend = Backend { mesh: mesh.clone(), precision, ..Backend::default() };
    let (model, mut parameters) = random(config, &backend);
    parameters.set_trainable(&vec![true; parameters.len()])?;
    let recipe = Recipe::default();
    let (policy, train, optimizer_settings) = (&recipe.policy, &recipe.train, &recipe.train.optimizer);
    let recompute_layers = recomputes_layers(&shapes, &model.config, parameters.len(), &threads);
    let execution = Execution {
        threads,
        recompute_layers,
        micro_batch_tokens: train.micro_batch_tokens,
        cache_capacity: CacheCapacity::default(),
        prefix_tokens_max: 0,
        rollout_weights: RolloutWeightPlacement::Auto,
    };
    let mut actor = Actor::new(Arc::new(model), parameters, Arc::new(execution));
    actor.start_optimizer(optimizer_settings, shapes.bf16_dot)?;
    let around = chat.render_prompt(&[Message::user(String::new())])?.len();
    let characters = shapes.prompt_tokens.checked_sub(around).context("--prompt-tokens is too small")?;
    let task = Numbers { characters };
    let (mut rollouts, mut updates, mut both_ways, mut decodes) = (vec![], vec![], vec![], vec![]);
    let mut useful = 0;
    let timings = Timings::new();
    let batch = SEQUENCES_MAX.min(shapes.prompts as usize * shapes.samples);
    // The first step is not counted, here or for peers: it touches fresh memory.
    for step in 0..=shapes.steps {
        let settings = RolloutSettings {
            turns_max: 1,
            response_tokens_max: shapes.response_tokens,
            prompt_tokens_max: shapes.prompt_tokens,
            sequences_max: SEQUENCES_MAX,
            tool_calls_concurrent_max: 1,
            cuda_graphs: false,
            ..RolloutSettings::default()
        };
        let plan = RolloutPlan::for_training(&settings, 0, step);
        let prompts: Vec<Prompt> = (0..shapes.prompts)
            .map(|i| step * shapes.prompts + i)
            .map(|index| Prompt { index, problem: task.training_problem(0, index) })
            .collect();
        let stamps = Mutex::new(vec![]);
        let (mut groups, rollout): (Vec<Group>, _) = time(|| {
            let policy = PolicyView::without_ablations(&actor.model, &actor.parameters)?;
            let plan = &plan;
            let rollout = Rollout {
                engine: &actor.engine(&actor.execution.threads, policy, step, (SEQUENCES_MAX, false))?,
                chat: &chat,
                task: &task,
                reward_min: 0.0,
                on_failure: Default::default(),
                reply_chars_max: None,
                interpreter: None,
                form: rloss::chat::ToolForm::Call,
                system_prompt: &[],
                plan,
            };
            let forced = |turn| random_text(turn, shapes.response_tokens);
            let note = |progress: RolloutProgress| {
                let mut stamps = stamps.lock().unwrap_or_else(PoisonError::into_inner);
                stamps.push((Instant::now(), progress.sampled_tokens));
            };
            let drawn = rollout.run(
                &prompts,
                shapes.samples,
                Hooks { progress: &note, forced: &forced, keeps_parts: true, ..Hooks::until(&|| false) },
            )?;
            Ok(drawn.context("nobody stopped it")?.groups)
        })?;
        for (sample, trajectory) in groups.iter_mut().flat_map(|g| g.trajectories.iter_mut().enumerate()) {
            trajectory.reward = (sample % 2) as f32;
            let tokens = shapes.prompt_tokens + shapes.response_tokens;
            ensure!(trajectory.tokens.len() == tokens, "a response of another length");
        }
        if shapes.separate_prompts {
            let trajectories = groups.iter_mut().flat_map(|group| &mut group.trajectories);
            trajectories.zip(TEXT..TEXT_END).for_each(|(trajectory, token)| trajectory.tokens[0] = token);
        }
        let ((update_gradients, of_update), update) = time(|| {
            let step = PolicyStep {
                step: step.max(1),
                reference: None,
                teacher: None,
                policy,
                train,
                kl_coefficient: 0.0,
                pass: PassSettings {
                    temperature: 1.0,
                    load_balance_coefficient: 0.0,
                    keeps_routed_experts: true,
                    forward: ForwardOptions::default(),
                },
                old_log_prob_forward: None,
                response_tokens_max: shapes.response_tokens,
                reward_min: -1.0,
                reward_weights: const { &std::collections::BTreeMap::new() },
                norm_limits: GradientNormLimits::default(),
                stages: Stages { timings: &timings, console: &Console::silent() },
            };
            let (batch, ..) = step.prepare(&groups.iter().collect::<Vec<_>>(), &actor, None)?;
            let (update, gradients) =
                time(|| step.gradients(&batch, &mut actor)?.context("no token counts"))?;
            let mismatch = batch.mismatch_metrics(&update.forward, shapes.topk)?;
            let gap = mismatch.get("mismatch/log_ppl_abs_diff_max");
            ensure!(shapes.separate_prompts || gap == Some(0.0), "rollout and training differ: {gap:?}");
            let norm = actor.optim_step(&optimizer_settings.for_update(optimizer_settings.lr, None))?;
            ensure!(matches!(norm, GradientNorm::Applied(_)), "an update was skipped: {norm:?}");
            Ok((gradients, shapes.useful(&update.forward)))
        })?;
        useful = of_update;
        if step > 0 {
            rollouts.push(rollout);
            updates.push(update);
            both_ways.push(update_gradients);
            decodes.push(decode_step(&stamps.into_inner().unwrap_or_else(PoisonError::into_inner), batch)?);
        }
    }
    let peak_bytes = usage().ru_maxrss * 1024;
    mesh.disconnect();
    if !mesh.is_rank_zero() {
        return Ok(());
    }
    let Actor { parameters, execution, .. } = &actor;
    let rates = || (machine::read_rate(), machine::product_rate());
    let (read_rate, product_rate) = execution.threads.run_on_all(rates);
    let (of_row, of_head) = shapes.multiply_adds();
    let of_step = (batch * (of_row + of_head)) as f64 / product_rate;
    // A step reads only a few rows of the embedding.
    let read = parameters.bytes() as f64 - 4.0 * (shapes.vocab * shapes.hidden) as f64;
    let rounded = |x: f64| (x * 1e4).round() / 1e4;
    let each = |of: &dyn Fn(&Spent) -> f64, spent: &[Spent]| -> Vec<f64> {
        spent.iter().map(|s| rounded(of(s))).collect()
    };
    let steps: Vec<f64> =
        rollouts.iter().zip(&updates).map(|(r, u)| rounded(r.seconds + u.seconds)).collect();
    let seconds = |s: &Spent| s.seconds;
    let processor = |s: &Spent| s.processor;
    let peer = match (shapes.bf16_dot, shapes.separate_prompts) {
        (false, false) => "rloss",
        (false, true) => "rloss, apart",
        (true, false) => "rloss, bf16_dot",
        (true, true) => "rloss, bf16_dot, apart",
    };
    println!(
        "{}",
        json!({
            "peer": peer,
            "ranks": mesh.ranks(),
            "step_s": steps,
            "rollout_s": each(&seconds, &rollouts),
            "update_s": each(&seconds, &updates),
            "rollout_processor_s": each(&processor, &rollouts),
            "update_processor_s": each(&processor, &updates),
            "page_faults": rollouts.iter().zip(&updates).map(|(r, u)| r.faults + u.faults).collect::<Vec<_>>(),
            "forward_backward_s": each(&seconds, &both_ways),
            "decode_step_s": decodes,
            "decode_batch": batch,
            "decode_bound_s": of_step.max(read / read_rate),
            "read_gb_s": rounded(read_rate / 1e9),
            "product_gflop_s": rounded(2.0 * product_rate / 1e9),
            "product_share": each(&|spent| useful as f64 / spent.seconds / product_rate, &both_ways),
            "start_bytes": start_bytes,
            "parameter_bytes": parameters.bytes(),
            "peak_bytes": peak_bytes,
            "generated_tokens": shapes.prompts * (shapes.samples * shapes.response_tokens) as u64,
        })
    );
    Ok(())
}
