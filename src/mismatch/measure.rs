//! Measures ablations (`[arms]`) on the same tokens.
//!
//! The tokens come from one rollout. If an ablation changes the rollout's forward, the rollout's log-probs
//! are recomputed on these tokens. They equal the values which that rollout would have stored, because every
//! perturbation acts on each row alone.

use super::compare::LogProbPair;
use super::diagnose::{UnmodifiedModel, Verdict};
use super::engine_log_probs::EngineLogProbs;
use super::output::ResultLine;
use super::search::SearchSettings;
use crate::learner::micro_batch::{MicroBatch, Sequence};
use crate::metrics::Progress;
use crate::model::ablations::Ablations;
use crate::model::forward::ForwardOptions;
use crate::model::layer::LayerOutput;
use crate::model::policy_view::PolicyView;
use crate::ops::cpu::to_host;
use crate::ops::threads::Threads;
use crate::trajectory::Trajectory;
use anyhow::{Context, Result};
use candle_core::Tensor;

/// The tokens and settings that all ablations share.
pub struct AblationMeasurement<'a> {
    reference: UnmodifiedModel<'a>,
    seed: u64,
    temperature: f64,
    clip: (f64, f64),
    /// The ablations under which the tokens were sampled.
    sampled_under: Ablations,
    observed: EngineLogProbs,
    cu_seqlens: Vec<usize>,
    /// The model's log-probs without ablations.
    unmodified: Vec<f32>,
}

impl<'a> AblationMeasurement<'a> {
    /// Prepares the measurement of `trajectories`, sampled under `arms` at `temperature`.
    pub fn new(
        reference: UnmodifiedModel<'a>,
        trajectories: &[&Trajectory],
        arms: &Ablations,
        seed: u64,
        temperature: f64,
        clip: (f64, f64),
        micro_batch_tokens: usize,
    ) -> Result<Self> {
        let sequence = |t: &&Trajectory| Sequence { tokens: t.tokens.clone(), mask: t.mask.clone() };
        let sequences: Vec<Sequence> = trajectories.iter().map(sequence).collect();
        let (mut log_probs, mut cu_seqlens) = (vec![], vec![0]);
        for t in trajectories {
            let sampled = t.logprobs.iter().zip(&t.mask).skip(1).filter(|(_, sampled)| **sampled);
            log_probs.extend(sampled.map(|(log_prob, _)| *log_prob));
            cu_seqlens.push(log_probs.len());
        }
        let batches = MicroBatch::split(&sequences, micro_batch_tokens);
        let policy = PolicyView::without_ablations(reference.model, reference.parameters)?;
        let stage = stage(&reference, "without ablations", &batches, 1);
        let on_tokens = |tokens| stage.advance_tokens(tokens);
        let unmodified = policy.all_log_probs(reference.threads, &batches, temperature, &on_tokens)?;
        stage.finish();
        let observed = EngineLogProbs::from_samples(batches, temperature, log_probs);
        let sampled_under = arms.clone();
        Ok(Self { reference, seed, temperature, clip, sampled_under, observed, cu_seqlens, unmodified })
    }

    /// Returns the figures of one combination of ablations.
    ///
    /// # Errors
    /// When an ablation does not fit the model, or a forward fails.
    pub fn measure(&self, name: &str, arms: &Ablations) -> Result<ResultLine> {
        let UnmodifiedModel { threads, model, parameters, .. } = self.reference;
        let rollout = PolicyView::for_rollout(model, parameters, arms, self.seed)?;
        let training = PolicyView::for_training(model, parameters, arms, self.seed)?;
        let batches: Vec<MicroBatch> =
            self.observed.batches.iter().map(|batch| batch.micro_batch.clone()).collect();
        let second = ForwardOptions::for_old_log_probs(arms, self.seed);
        let stage = stage(&self.reference, name, &batches, 2 + usize::from(second.is_some()));
        let on_tokens = |tokens| stage.advance_tokens(tokens);
        let ([mut stored, computed], divergence) =
            compare_forwards(threads, [&rollout, &training], &batches, self.temperature, &on_tokens)?;
        if self.is_sampled_alike(arms) {
            stored.clone_from(&self.observed.log_probs);
        }
        let old = match second {
            Some(forward) => {
                let second = PolicyView { forward, ..training };
                second.all_log_probs(threads, &batches, self.temperature, &on_tokens)?
            }
            None => stored.clone(),
        };
        stage.finish();
        let pair = LogProbPair {
            cu_seqlens: &self.cu_seqlens,
            training: &computed,
            rollout: &stored,
            old: &old,
            clip: self.clip,
        };
        let mut metrics: Vec<_> =
            pair.metrics().context(name.to_owned())?.into_iter().map(|(k, v)| (k, Some(v))).collect();
        metrics.push(("mismatch/routing_agreement".into(), Some(divergence.routing_agreement)));
        metrics.push(("mismatch/first_divergent_layer".into(), divergence.first_layer.map(|l| l as f64)));
        let mut cause = self.cause(arms, [&stored, &computed], &divergence)?;
        if arms.second_forward_old_logprobs && !same_bits(&old, &computed) {
            cause.push_str("; the second forward gives other old log-probs, so the ratio is not 1");
        }
        Ok(ResultLine { name: name.to_owned(), metrics, cause: Some(cause) })
    }

    /// Returns whether the tokens were sampled with the rollout settings of `arms`.
    fn is_sampled_alike(&self, arms: &Ablations) -> bool {
        let side =
            |arms: &Ablations| (arms.rollout_noise(), arms.rollout_mantissa_limit(), arms.rollout_mxfp4);
        side(arms) == side(&self.sampled_under)
    }

    /// Returns the likely cause, derived from the log-probs alone.
    fn cause(&self, arms: &Ablations, sides: [&Vec<f32>; 2], divergence: &Divergence) -> Result<String> {
        let mut causes = vec![];
        for (side, log_probs) in ["rollout", "training"].iter().zip(sides) {
            if same_bits(&self.unmodified, log_probs) {
                continue;
            }
            let observed =
                EngineLogProbs { batches: self.observed.batches.clone(), log_probs: log_probs.clone() };
            let found = self.reference.diagnose(&observed, &SearchSettings::silent())?;
            causes.push(match found.verdict {
                Verdict::Unknown(_) if divergence.routing_agreement < 1.0 => format!(
                    "{side}: the router chooses other experts (agreement {:.3}) and no rounding explains it: router noise",
                    divergence.routing_agreement
                ),
                verdict => format!("{side}: {}", verdict.to_text()),
            });
        }
        if causes.is_empty() {
            let backward = arms.no_sink_gradient || arms.freeze_attention;
            return Ok(if backward {
                "both forwards have the same bits; this ablation changes only the backward".to_owned()
            } else {
                "none: both forwards have the same bits".to_owned()
            });
        }
        Ok(causes.join("; "))
    }
}

/// Where two forward passes diverge.
#[derive(Default)]
struct Divergence {
    /// Share of (token, layer) pairs with the same set of experts.
    routing_agreement: f64,
    /// First layer, from 0, whose output differs in any bit.
    first_layer: Option<usize>,
}

/// Runs both forwards over the same batches. Returns their log-probabilities and where they diverge. Calls
/// `on_tokens` after each layer with its share of the batch's tokens.
///
/// # Errors
/// When a forward fails.
fn compare_forwards(
    threads: &Threads,
    [a, b]: [&PolicyView; 2],
    batches: &[MicroBatch],
    temperature: f64,
    on_tokens: &(dyn Fn(f64) + Sync),
) -> Result<([Vec<f32>; 2], Divergence)> {
    let (mut log_probs, mut divergence) = ([vec![], vec![]], Divergence::default());
    let (mut same, mut all) = (0usize, 0usize);
    let top_k = a.model.config.num_experts_per_tok.max(1);
    for batch in batches {
        let (x, y) = threads.run_on_all(|| -> Result<_> {
            Ok((layers(a, batch, on_tokens)?, layers(b, batch, on_tokens)?))
        })?;
        for ((policy, normed), log_probs) in [(a, &x.0), (b, &y.0)].into_iter().zip(&mut log_probs) {
            log_probs.extend(policy.log_probs(normed, batch, temperature)?);
        }
        for (layer, (x, y)) in x.1.iter().zip(&y.1).enumerate() {
            for (x, y) in x.routes.chunks_exact(top_k).zip(y.routes.chunks_exact(top_k)) {
                same += usize::from(x.iter().all(|expert| y.contains(expert)));
                all += 1;
            }
            if divergence.first_layer.is_none_or(|first| layer < first) && !same_bits(&x.hidden, &y.hidden) {
                divergence.first_layer = Some(layer);
            }
        }
    }
    divergence.routing_agreement = if all == 0 { 1.0 } else { same as f64 / all as f64 };
    Ok((log_probs, divergence))
}

/// The output of one layer.
struct LayerTrace {
    /// Routed experts, `[T, K]`; empty for a model without experts.
    routes: Vec<u32>,
    /// The layer's output, `[T, H]`.
    hidden: Vec<f32>,
}

/// Runs `batch` through `policy`; returns the head's input and the output of each layer.
fn layers(
    policy: &PolicyView,
    batch: &MicroBatch,
    on_tokens: &(dyn Fn(f64) + Sync),
) -> Result<(Tensor, Vec<LayerTrace>)> {
    let (mut layers, share) = (vec![], policy.layer_tokens(batch));
    let normed = policy.head_input(batch, &mut |_, _, output: &LayerOutput| {
        let routes = output.routed_experts().map(|routes| routes.flatten_all()?.to_vec1()).transpose()?;
        let hidden = to_host(&output.hidden)?.flatten_all()?.to_vec1()?;
        layers.push(LayerTrace { routes: routes.unwrap_or_default(), hidden });
        on_tokens(share);
        Ok(())
    })?;
    Ok((normed, layers))
}

/// Starts a progress stage of `passes` passes over `batches`, counted in tokens.
fn stage(reference: &UnmodifiedModel, name: &str, batches: &[MicroBatch], passes: usize) -> Progress {
    let tokens: usize = batches.iter().map(|batch| batch.tokens.len()).sum();
    reference.console.work_tokens(name, (tokens * passes) as u64)
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
