//! Compares another engine's rows with this model. Gives a verdict, the location of the mismatch, and an
//! answer as text.

use super::causes::Cause;
use super::compare::LogProbPair;
use super::diagnose::{Diagnosis, UnmodifiedModel, Verdict, join_causes};
use super::distance::DifferenceStats;
use super::engine_log_probs::{EngineBatch, EngineLogProbs};
use super::expert_comparison::ExpertComparison;
use super::locate::{LocationResult, TargetPositions, locate};
use super::output::ResultLine;
use super::rounding::is_within_f32;
use super::rows::TokenRow;
use super::search::SearchSettings;
use crate::actor::micro_batch::{MicroBatch, Sequence};
use crate::bad_input;
use crate::chat::Chat;
use crate::metrics::format_number;
use crate::model::config::LayerType;
use anyhow::Result;
use serde_json::{Value, json};

/// The comparison of one side (engine or trainer) with the model.
pub struct Comparison {
    /// Statistics of all tokens, of the tokens within the sliding window, and of the tokens past it.
    pub lines: Vec<ResultLine>,
    /// The answer, as one paragraph.
    pub answer: String,
    pub diagnosis: Diagnosis,
    pub location_result: LocationResult,
    pub target_positions: TargetPositions,
    /// The engine's log-prob of each target.
    pub engine_log_probs: Vec<f32>,
    /// Present if the rows have routed experts.
    pub routed_experts: Option<ExpertComparison>,
}

impl Comparison {
    /// Returns the comparison's part of `mismatch.json`.
    pub fn to_json(&self) -> Value {
        let Diagnosis { verdict, stats, remaining, f32_bound, bf16_bound, within_bf16, .. } = &self.diagnosis;
        let Diagnosis { without_effect, search, .. } = &self.diagnosis;
        let stats_json = |stats: &DifferenceStats| {
            let named = stats.with_names().into_iter().filter(|(name, _)| *name != "effective_sample_share");
            Value::Object(named.map(|(k, v)| (k.to_owned(), json!(v))).collect())
        };
        let causes = verdict.causes().iter();
        let causes = causes.map(|cause| json!({"causes": [cause.name], "words": cause.description()}));
        json!({
            "verdict": verdict.kind(),
            "differs": verdict.differs(),
            "explanations": causes.collect::<Vec<_>>(),
            "logprob_abs_diff": stats_json(stats),
            "left": remaining.as_ref().map(stats_json),
            "f32_rounding": stats_json(f32_bound),
            "bf16_rounding": stats_json(bf16_bound),
            "within_bf16_rounding": within_bf16,
            "ties_of_routing": self.diagnosis.ties,
            "causes_without_effect_on_these_rows": without_effect,
            "search": search.as_ref().map(|search| json!({
                "causes": search.causes,
                "tried": search.tried,
                "ended_by_limit": search.ended_by_limit,
            })),
            "moved": {
                "tokens": self.location_result.differing,
                "of": self.location_result.targets,
                "place": self.location_result.location.as_ref().map(|location| &location.description),
            },
            "routes": self.routed_experts.as_ref().map(ExpertComparison::to_json),
        })
    }
}

/// Compares `rows` with the model.
///
/// # Errors
/// [`crate::error::BadInput`] when no row has a log-prob after its first token.
pub fn compare(
    unmodified_model: UnmodifiedModel,
    chat: &Chat,
    rows: &[TokenRow],
    micro_batch_tokens: usize,
    clip: (f64, f64),
    search: &SearchSettings,
) -> Result<Comparison> {
    let (observed, row_of_target) = pack_rows(rows, micro_batch_tokens);
    if observed.log_probs.is_empty() {
        return Err(bad_input!(
            "no row has a log-prob after its first token; request log-probs from the engine"
        ));
    }
    let mut diagnosis = unmodified_model.diagnose(&observed, search)?;
    let names = rows.iter().map(|row| row.name.clone()).collect();
    let experts = std::mem::take(&mut diagnosis.routed_experts);
    let target_positions = TargetPositions::collect(&observed, names, row_of_target, experts);
    let location_result = locate(&target_positions, &diagnosis.differences, threshold(&diagnosis));
    let config = &unmodified_model.model.config;
    let window = config.sliding_window;
    let mut lines = vec![];
    let position_ranges: [(_, &dyn Fn(usize) -> bool); 3] = [
        ("all positions", &|_| true),
        ("… positions within the window", &|position| position <= window),
        ("… positions past the window", &|position| position > window),
    ];
    let has_windows = config.layer_types.contains(&LayerType::Sliding);
    for (name, keep) in position_ranges.into_iter().take(if has_windows { 3 } else { 1 }) {
        lines.extend(stats_line(name, keep, &target_positions, &observed, &diagnosis, clip)?);
    }
    if let Some(first) = lines.first_mut() {
        first.cause = Some(diagnosis.verdict.to_text());
    }
    let routed_experts = ExpertComparison::from_rows(rows, &target_positions, &diagnosis.differences);
    let mut answer = answer(&diagnosis, (&location_result, &target_positions), &lines);
    if let Some(comparison) = &routed_experts {
        answer.push_str(&comparison.to_text());
    }
    let malformed_rows = malformed_rows(chat, rows);
    if let Some((row, reason)) = malformed_rows.first() {
        let count = malformed_rows.len();
        answer.push_str(&format!(
            " Number of rows that are not a well-formed {} conversation: {count} (the first is row {row}: {reason}).",
            chat.name()
        ));
    }
    let engine_log_probs = observed.log_probs;
    Ok(Comparison {
        lines,
        answer,
        diagnosis,
        location_result,
        target_positions,
        engine_log_probs,
        routed_experts,
    })
}

/// Returns the sides of `rows` with their names: the engine's rows and, if the file has a trainer's
/// log-probs, the trainer's rows.
pub fn split_sides(rows: Vec<TokenRow>) -> Vec<(&'static str, Vec<TokenRow>)> {
    if rows.iter().all(|row| row.trainer_log_probs.is_none()) {
        return vec![("rollout", rows)];
    }
    let trainer_row =
        |row: &TokenRow| row.trainer_log_probs.clone().map(|log_probs| TokenRow { log_probs, ..row.clone() });
    let trainer = rows.iter().filter_map(trainer_row).collect();
    vec![("inference", rows), ("trainer", trainer)]
}

/// Compares the file's two sides with each other; `None` if the file has only one side.
///
/// # Errors
/// When a log-prob is NaN.
pub fn compare_sides(rows: &[TokenRow], clip: (f64, f64)) -> Result<Option<ResultLine>> {
    let (mut inference, mut trainer, mut cu_seqlens) = (vec![], vec![], vec![0]);
    for row in rows {
        let Some(trainer_log_probs) = &row.trainer_log_probs else { continue };
        let pairs = row.log_probs.iter().zip(trainer_log_probs).skip(1);
        for (inference_value, trainer_value) in pairs.filter_map(|(i, t)| Some(((*i)?, (*t)?))) {
            inference.push(inference_value);
            trainer.push(trainer_value);
        }
        if cu_seqlens.last() != Some(&inference.len()) {
            cu_seqlens.push(inference.len());
        }
    }
    if inference.is_empty() {
        return Ok(None);
    }
    let pair = LogProbPair {
        cu_seqlens: &cu_seqlens,
        training: &trainer,
        rollout: &inference,
        old: &inference,
        clip,
    };
    Ok(Some(ResultLine {
        name: "inference against trainer".to_owned(),
        metrics: pair_metrics(&pair)?,
        cause: None,
    }))
}

/// Packs the rows into batches, each with one temperature. Also returns, for each target, the index of its
/// row in `rows`.
fn pack_rows(rows: &[TokenRow], micro_batch_tokens: usize) -> (EngineLogProbs, Vec<usize>) {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by(|&a, &b| rows[a].temperature.total_cmp(&rows[b].temperature));
    let (mut observed, mut row_of_target) = (EngineLogProbs::default(), vec![]);
    for same_temperature in order.chunk_by(|&a, &b| rows[a].temperature == rows[b].temperature) {
        let sequence = |row: &TokenRow| Sequence {
            tokens: row.tokens.clone(),
            mask: row.log_probs.iter().enumerate().map(|(i, l)| i > 0 && l.is_some()).collect(),
            kept_tokens: row.kept_tokens.clone(),
        };
        let all = same_temperature.iter().map(|&row| sequence(&rows[row]));
        let sequences: Vec<Sequence> = all.filter(|s| s.mask.contains(&true)).collect();
        let mut sampled = vec![];
        for &row in same_temperature {
            let values = rows[row].log_probs.iter().enumerate().skip(1);
            for (at, value) in values.filter_map(|(at, value)| Some((at, (*value)?))) {
                observed.log_probs.push(value);
                sampled.push(at >= rows[row].raw_tokens);
                row_of_target.push(row);
            }
        }
        let mut sampled = sampled.into_iter();
        let temperature = rows[same_temperature[0]].temperature;
        for micro_batch in MicroBatch::split(&sequences, micro_batch_tokens) {
            let sampled = sampled.by_ref().take(micro_batch.targets.len()).collect();
            observed.batches.push(EngineBatch { micro_batch, temperature, sampled });
        }
    }
    (observed, row_of_target)
}

/// Returns the difference, in nats, above which a target counts as different. It is four times the p90 of a
/// rounding bound, but at least 1e-4. The bound is that of f32 if the median is as small as f32 rounding,
/// else that of bf16.
fn threshold(diagnosis: &Diagnosis) -> f64 {
    let f32_like = diagnosis.stats.median <= 4.0 * diagnosis.f32_bound.median.max(1e-6);
    let bound = if f32_like { &diagnosis.f32_bound } else { &diagnosis.bf16_bound };
    (4.0 * bound.p90).max(1e-4)
}

/// Returns the line `name` with statistics of the targets whose position `keep` accepts; `None` if there are
/// none.
fn stats_line(
    name: &str,
    keep: &dyn Fn(usize) -> bool,
    target_positions: &TargetPositions,
    observed: &EngineLogProbs,
    diagnosis: &Diagnosis,
    clip: (f64, f64),
) -> Result<Option<ResultLine>> {
    let (mut engine, mut model, mut cu_seqlens, mut current_row) = (vec![], vec![], vec![0], None);
    let floor = |log_prob: f32| log_prob.max(-1e4);
    for target in
        (0..target_positions.positions.len()).filter(|&target| keep(target_positions.positions[target]))
    {
        if current_row.is_some_and(|row| row != target_positions.rows[target]) {
            cu_seqlens.push(engine.len());
        }
        current_row = Some(target_positions.rows[target]);
        engine.push(floor(observed.log_probs[target]));
        model.push(floor(diagnosis.unmodified_log_probs[target]));
    }
    if engine.is_empty() {
        return Ok(None);
    }
    cu_seqlens.push(engine.len());
    let pair =
        LogProbPair { cu_seqlens: &cu_seqlens, training: &model, rollout: &engine, old: &engine, clip };
    Ok(Some(ResultLine { name: name.to_owned(), metrics: pair_metrics(&pair)?, cause: None }))
}

/// Returns the metrics of a line: the number of tokens, followed by the statistics of the mismatch.
fn pair_metrics(pair: &LogProbPair) -> Result<Vec<(String, Option<f64>)>> {
    let mut metrics = vec![("mismatch/tokens".to_owned(), Some(pair.rollout.len() as f64))];
    metrics.extend(pair.metrics()?.into_iter().map(|(name, value)| (name, Some(value))));
    Ok(metrics)
}

/// Returns the names of the rows that are not a well-formed conversation, each with the reason. Rows with one
/// token are ignored.
fn malformed_rows(chat: &Chat, rows: &[TokenRow]) -> Vec<(String, String)> {
    rows.iter()
        .filter(|row| row.tokens.len() > 1)
        .filter_map(|row| Some((row.name.clone(), format!("{:#}", chat.check(&row.tokens).err()?))))
        .collect()
}

/// Returns the answer as one paragraph: the verdict, the size of the mismatch, and its location.
fn answer(
    diagnosis: &Diagnosis,
    (location_result, target_positions): (&LocationResult, &TargetPositions),
    lines: &[ResultLine],
) -> String {
    let number = |value: f64| format_number(value);
    let stats = &diagnosis.stats;
    let (tokens, max) = (location_result.targets, number(stats.max));
    let mut text = match &diagnosis.verdict {
        Verdict::Agrees => {
            let max_without_ties = diagnosis.remaining.map_or(stats.max, |remaining| remaining.max);
            format!(
                "Agrees: {} tokens differ by at most {} nats, which f32 rounding explains.",
                tokens - diagnosis.ties,
                number(max_without_ties)
            )
        }
        Verdict::Rounding => format!(
            "No mistake found: over {tokens} tokens the mismatch has the size of bf16 rounding in this model, up to a few \
             times its figures."
        ),
        Verdict::Explained(cause) => format!("Cause found: {}.", cause.description()),
        Verdict::OneOf(causes) => format!(
            "Cause not decided: each of these alone explains the mismatch: {}. To decide between them: {}.",
            join_causes(causes),
            causes[0].deciding_experiment
        ),
        Verdict::Unknown(partial_causes) => {
            let mut text = "Cause unknown: no known cause explains the mismatch.".to_owned();
            if let [first, rest @ ..] = partial_causes.as_slice() {
                text.push_str(&format!(" Nearest: {}", first.description()));
                if let Some(second) = rest.first() {
                    text.push_str(&format!("; then: {}", second.description()));
                }
                text.push_str(&format!(". To decide: {}.", first.deciding_experiment));
            }
            text.push_str(
                " Check that the ids of the prompt are those that the engine saw: its template, system message and last \
                 newline.",
            );
            text
        }
        Verdict::Unfinished(partial_causes) => {
            let is_searched = diagnosis.search.is_some_and(|search| search.tried > 0);
            let mut text = if is_searched {
                "Cause not found yet.".to_owned()
            } else {
                "The log-probs differ by more than rounding.".to_owned()
            };
            if !partial_causes.is_empty() {
                text.push_str(&format!(" Nearest so far: {}.", join_causes(partial_causes)));
            }
            text
        }
    };
    if let Some(search) = diagnosis.search.filter(|search| search.ended_by_limit) {
        text.push_str(&match search.tried {
            0 => " No cause was searched for.".to_owned(),
            tried => format!(
                " The search for a cause ended early: {tried} of {} causes were tried.",
                search.causes
            ),
        });
    }
    text.push_str(&format!(
        " |Δlogp| has median {}, mean {}, 99% {}, maximum {max}; bf16 rounding of this model alone gives {} (median) and {} (maximum).",
        number(stats.median),
        number(stats.mean),
        number(stats.p99),
        number(diagnosis.bf16_bound.median),
        number(diagnosis.bf16_bound.max),
    ));
    if let Some(remaining) = &diagnosis.remaining
        && matches!(diagnosis.verdict, Verdict::Explained(_) | Verdict::OneOf(_))
    {
        text.push_str(&format!(
            " Computed with this cause, only rounding is left: {} (median) and {} (maximum).",
            number(remaining.median),
            number(remaining.max)
        ));
        let mut remedies: Vec<_> = diagnosis.verdict.causes().iter().filter_map(Cause::remedy).collect();
        remedies.dedup();
        text.push_str(&format!(" Remedy: {}.", remedies.join("; or ")));
    }
    if diagnosis.ties > 0 {
        text.push_str(&format!(
            " {} of the tokens differ because two experts have nearly equal scores: f32 rounding decides between them.",
            diagnosis.ties
        ));
    }
    if diagnosis.verdict.differs() && diagnosis.within_bf16 {
        text.push_str(" By its size alone the mismatch could be bf16 rounding.");
    }
    // A found cause says more than where it has the largest effect.
    if !matches!(diagnosis.verdict, Verdict::Agrees | Verdict::Explained(_)) {
        text.push_str(&describe_location(diagnosis, location_result, lines));
    }
    if diagnosis.verdict.differs() {
        text.push_str(&describe_largest(&diagnosis.differences, target_positions));
    }
    text
}

/// Returns the sentence about the largest difference.
fn describe_largest(differences: &[f64], targets: &TargetPositions) -> String {
    let by_size = |&a: &usize, &b: &usize| differences[a].abs().total_cmp(&differences[b].abs());
    let Some(at) = (0..differences.len()).max_by(by_size) else { return String::new() };
    let (row, position) = (&targets.names[targets.rows[at]], targets.positions[at]);
    format!(" Largest: row {row} token {position}, engine - model = {:+.3}.", differences[at])
}

/// Returns the text that says how many tokens differ, and which.
fn describe_location(
    diagnosis: &Diagnosis,
    location_result: &LocationResult,
    lines: &[ResultLine],
) -> String {
    let share = 100.0 * location_result.differing as f64 / location_result.targets as f64;
    let usual = if diagnosis.verdict == Verdict::Rounding { " usually makes" } else { "" };
    let mut text = format!(" {share:.3}% of the tokens differ by more than rounding{usual}");
    if let Some(location) = &location_result.location {
        text.push_str(&format!(
            ": {} ({:.0}% of these {} differ, {:.1}% of the others)",
            location.description,
            100.0 * location.differing_inside,
            location.targets,
            100.0 * location.differing_outside
        ));
    } else if location_result.differing > 0 && share < 50.0 {
        let first: Vec<String> = location_result
            .first_differing
            .iter()
            .map(|(row, position, difference)| format!("row {row} token {position} ({difference:+.3})"))
            .collect();
        text.push_str(&format!(", scattered: {}", first.join(", ")));
    }
    text.push('.');
    let mean = |name: &str| {
        let stats_line = lines.iter().find(|stats_line| stats_line.name.contains(name))?;
        let key = "mismatch/logprob_abs_diff_mean";
        stats_line.metrics.iter().find(|(name, _)| name == key).and_then(|(_, v)| *v)
    };
    if let (Some(within), Some(past), false) =
        (mean("within"), mean("past"), is_within_f32(&diagnosis.stats, &diagnosis.f32_bound))
    {
        text.push_str(&format!(
            " Mean |Δlogp| is {} within the window and {} past it.",
            format_number(within),
            format_number(past)
        ));
    }
    text
}
