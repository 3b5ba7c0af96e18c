//! Measures ablations (`[arms]`) on the same tokens.
//!
//! The tokens come from one rollout. If an ablation changes the rollout's forward pass, the rollout's
//! log-probs of these tokens are computed again with the ablation. A rollout with the ablation would have
//! stored the same values, because an ablation changes each row independently of the other rows.

use super::compare::LogProbPair;
use super::diagnose::{UnmodifiedModel, Verdict};
use super::engine_log_probs::EngineLogProbs;
use super::output::ResultLine;
use super::search::SearchSettings;
use crate::actor::micro_batch::{MicroBatch, Sequence};
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
use std::time::Duration;

/// The tokens and settings that all ablations share.
pub struct AblationMeasurement<'a> {
    unmodified_model: UnmodifiedModel<'a>,
    seed: u64,
    temperature: f64,
    clip: (f64, f64),
    /// The ablations that were active when the tokens were sampled.
    sampling_ablations: Ablations,
    observed: EngineLogProbs,
    cu_seqlens: Vec<usize>,
    /// The model's log-probs without ablations.
    unmodified: Vec<f32>,
    /// Time limit of each search for a cause; `None` means that all causes are tried.
    search_limit: Option<Duration>,
}

impl<'a> AblationMeasurement<'a> {
    /// Computes the log-probs of `trajectories` without ablations. `sampling_ablations` and `temperature` are
    /// those of the rollout that sampled the trajectories.
    pub fn new(
        unmodified_model: UnmodifiedModel<'a>,
        trajectories: &[&Trajectory],
        sampling_ablations: &Ablations,
        seed: u64,
        temperature: f64,
        clip: (f64, f64),
        micro_batch_tokens: usize,
    ) -> Result<Self> {
        let sequences: Vec<Sequence> = trajectories.iter().map(|t| Sequence::from(*t)).collect();
        let (mut log_probs, mut cu_seqlens) = (vec![], vec![0]);
        for t in trajectories {
            let sampled = t.log_probs.iter().zip(&t.mask).skip(1).filter(|(_, sampled)| **sampled);
            log_probs.extend(sampled.map(|(log_prob, _)| *log_prob));
            cu_seqlens.push(log_probs.len());
        }
        let batches = MicroBatch::split(&sequences, micro_batch_tokens);
        let policy = PolicyView::without_ablations(unmodified_model.model, unmodified_model.parameters)?;
        let stage = start_stage(&unmodified_model, "without ablations", &batches, 1);
        let on_tokens = |tokens| stage.advance_tokens(tokens);
        let unmodified = policy.all_log_probs(unmodified_model.threads, &batches, temperature, &on_tokens)?;
        stage.finish();
        let observed = EngineLogProbs::from_samples(batches, temperature, log_probs);
        let sampling_ablations = sampling_ablations.clone();
        Ok(Self {
            unmodified_model,
            seed,
            temperature,
            clip,
            sampling_ablations,
            observed,
            cu_seqlens,
            unmodified,
            search_limit: None,
        })
    }

    /// Limits the time of each search for a cause; zero means that only the verdict is given.
    pub fn with_search_limit(self, search_limit: Option<Duration>) -> Self {
        Self { search_limit, ..self }
    }

    /// Returns the statistics of one combination of ablations.
    ///
    /// # Errors
    /// When an ablation does not fit the model, or a forward pass fails.
    pub fn measure(&self, name: &str, ablations: &Ablations) -> Result<ResultLine> {
        let UnmodifiedModel { threads, model, parameters, .. } = self.unmodified_model;
        let rollout = PolicyView::for_rollout(model, parameters, ablations, self.seed)?;
        let training = PolicyView::for_training(model, parameters, ablations, self.seed)?;
        let batches: Vec<MicroBatch> =
            self.observed.batches.iter().map(|batch| batch.micro_batch.clone()).collect();
        let old_forward = ForwardOptions::for_old_log_probs(ablations, self.seed);
        let stage =
            start_stage(&self.unmodified_model, name, &batches, 2 + usize::from(old_forward.is_some()));
        let on_tokens = |tokens| stage.advance_tokens(tokens);
        let ([mut stored, computed], divergence) =
            compare_forwards(threads, [&rollout, &training], &batches, self.temperature, &on_tokens)?;
        if self.has_rollout_of_samples(ablations) {
            stored.clone_from(&self.observed.log_probs);
        }
        let old = match old_forward {
            Some(forward) => {
                let old_policy = PolicyView { forward, ..training };
                old_policy.all_log_probs(threads, &batches, self.temperature, &on_tokens)?
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
        let mut cause = self.cause(ablations, [&stored, &computed], &divergence)?;
        if ablations.second_forward_old_logprobs && !same_bits(&old, &computed) {
            cause.push_str("; the old log-probs of the second forward pass differ, so the ratio is not 1");
        }
        Ok(ResultLine { name: name.to_owned(), metrics, cause: Some(cause) })
    }

    /// Returns whether the tokens were sampled with the rollout settings of `ablations`.
    fn has_rollout_of_samples(&self, ablations: &Ablations) -> bool {
        let rollout_settings = |ablations: &Ablations| {
            (ablations.rollout_noise(), ablations.rollout_mantissa_limit(), ablations.rollout_mxfp4)
        };
        rollout_settings(ablations) == rollout_settings(&self.sampling_ablations)
    }

    /// Returns the likely cause as text. It is derived from the log-probs alone.
    fn cause(
        &self,
        ablations: &Ablations,
        sides: [&Vec<f32>; 2],
        divergence: &PassDivergence,
    ) -> Result<String> {
        let mut causes = vec![];
        for (side, log_probs) in ["rollout", "training"].iter().zip(sides) {
            if same_bits(&self.unmodified, log_probs) {
                continue;
            }
            let observed =
                EngineLogProbs { batches: self.observed.batches.clone(), log_probs: log_probs.clone() };
            let search = SearchSettings { limit: self.search_limit, ..SearchSettings::silent() };
            let diagnosis = self.unmodified_model.diagnose(&observed, &search)?;
            causes.push(match diagnosis.verdict {
                Verdict::Unknown(_) if divergence.routing_agreement < 1.0 => format!(
                    "{side}: the router chooses other experts (agreement {:.3}), which rounding does not explain: router noise",
                    divergence.routing_agreement
                ),
                verdict => format!("{side}: {}", verdict.to_text()),
            });
        }
        if causes.is_empty() {
            let changes_backward = ablations.no_sink_gradient || ablations.freeze_attention;
            return Ok(if changes_backward {
                "both forward passes have the same bits; this ablation changes only the backward pass"
                    .to_owned()
            } else {
                "none: both forward passes have the same bits".to_owned()
            });
        }
        Ok(causes.join("; "))
    }
}

/// How two forward passes differ inside the model.
#[derive(Default)]
struct PassDivergence {
    /// Fraction of (token, layer) pairs with the same set of experts in both forward passes.
    routing_agreement: f64,
    /// First layer, from 0, whose output differs in any bit.
    first_layer: Option<usize>,
}

/// Runs both forward passes over the same batches. Returns their log-probabilities, and where the passes
/// diverge. Calls `on_tokens` after each layer with [`PolicyView::layer_tokens`] of the batch.
///
/// # Errors
/// When a forward pass fails.
fn compare_forwards(
    threads: &Threads,
    [a, b]: [&PolicyView; 2],
    batches: &[MicroBatch],
    temperature: f64,
    on_tokens: &(dyn Fn(f64) + Sync),
) -> Result<([Vec<f32>; 2], PassDivergence)> {
    let (mut log_probs, mut divergence) = ([vec![], vec![]], PassDivergence::default());
    let (mut same_pairs, mut pairs) = (0usize, 0usize);
    let top_k = a.model.config.num_experts_per_tok.max(1);
    for batch in batches {
        let (a_trace, b_trace) = threads.run_on_all(|| -> Result<_> {
            Ok((trace_layers(a, batch, on_tokens)?, trace_layers(b, batch, on_tokens)?))
        })?;
        for ((policy, normed), log_probs) in
            [(a, &a_trace.0), (b, &b_trace.0)].into_iter().zip(&mut log_probs)
        {
            log_probs.extend(policy.log_probs(normed, batch, temperature)?);
        }
        for (layer, (a, b)) in a_trace.1.iter().zip(&b_trace.1).enumerate() {
            let a_experts = a.routed_experts.chunks_exact(top_k);
            for (a, b) in a_experts.zip(b.routed_experts.chunks_exact(top_k)) {
                same_pairs += usize::from(a.iter().all(|expert| b.contains(expert)));
                pairs += 1;
            }
            if divergence.first_layer.is_none_or(|first| layer < first) && !same_bits(&a.hidden, &b.hidden) {
                divergence.first_layer = Some(layer);
            }
        }
    }
    divergence.routing_agreement = if pairs == 0 { 1.0 } else { same_pairs as f64 / pairs as f64 };
    Ok((log_probs, divergence))
}

/// The output of one layer.
struct LayerTrace {
    /// Routed experts, `[T, K]`; empty for a model without experts.
    routed_experts: Vec<u32>,
    /// The layer's output, `[T, H]`.
    hidden: Vec<f32>,
}

/// Runs `batch` through `policy`. Returns the head's input and the output of each layer.
fn trace_layers(
    policy: &PolicyView,
    batch: &MicroBatch,
    on_tokens: &(dyn Fn(f64) + Sync),
) -> Result<(Tensor, Vec<LayerTrace>)> {
    let (mut layers, share) = (vec![], policy.layer_tokens(batch));
    let normed = policy.head_input(batch, &mut |_, _, output: &LayerOutput| {
        let routed_experts =
            output.routed_experts().map(|experts| experts.flatten_all()?.to_vec1()).transpose()?;
        let hidden = to_host(&output.hidden)?.flatten_all()?.to_vec1()?;
        layers.push(LayerTrace { routed_experts: routed_experts.unwrap_or_default(), hidden });
        on_tokens(share);
        Ok(())
    })?;
    Ok((normed, layers))
}

/// Starts a stage of the progress display for `passes` passes over `batches`. The stage counts tokens.
fn start_stage(
    unmodified_model: &UnmodifiedModel,
    name: &str,
    batches: &[MicroBatch],
    passes: usize,
) -> Progress {
    let tokens: usize = batches.iter().map(|batch| batch.tokens.len()).sum();
    unmodified_model.console.start_token_stage(name, (tokens * passes) as u64)
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
