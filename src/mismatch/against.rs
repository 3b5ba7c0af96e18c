//! Another engine's rows: `{"tokens": [u32], "logprobs": [null or f32, one a token], "temperature": f32}`, one a line.

use super::compare::Gap;
use super::explain::{Explanation, Observed, Reference};
use super::output::Line;
use crate::bad_input;
use crate::bounded_file::{self, ROWS_BYTES_MAX};
use crate::harmony::{HarmonyTokenizer, ParseMode, StreamParser};
use crate::train::batch::{MicroBatch, Sequence};
use anyhow::Result;
use serde::Deserialize;
use std::path::Path;

/// A log-prob may lie so far above 0 by rounding.
const ABOVE_ZERO_MAX: f32 = 1e-3;

/// One row that can be compared.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    /// Line in the file, from 1.
    pub line: usize,
    pub tokens: Vec<u32>,
    /// `None` where the engine gave none. The first token's is not looked at: nothing predicts it.
    pub log_probs: Vec<Option<f32>>,
    pub temperature: f64,
}

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRows {
    pub rows: Vec<TokenRow>,
    /// Rows that cannot be compared, each named with its reason.
    pub bad: Vec<String>,
}

/// Other keys, which some exports carry, are not read.
#[derive(Deserialize)]
struct RawRow {
    tokens: Vec<u64>,
    logprobs: Vec<Option<f64>>,
    temperature: Option<f64>,
    /// In this project's own trajectories: false where the token was not sampled and its log-prob stands for none.
    mask: Option<Vec<bool>>,
}

/// Reads `path` for a model of `vocab_size` tokens and contexts of `context_tokens_max`.
///
/// # Errors
/// [`crate::error::BadInput`] when the file cannot be read or holds no row that can be compared.
pub fn read(path: &Path, vocab_size: usize, context_tokens_max: usize) -> Result<TokenRows> {
    let shown = path.display();
    let text = bounded_file::read_text(path, ROWS_BYTES_MAX)
        .map_err(|e| bad_input!("{shown}: cannot be read: {e}; name a JSONL file"))?;
    let (mut rows, mut bad) = (vec![], vec![]);
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match read_row(line, vocab_size, context_tokens_max) {
            Ok((tokens, log_probs, temperature)) => {
                rows.push(TokenRow { line: index + 1, tokens, log_probs, temperature });
            }
            Err(what) => bad.push(format!("{shown}: row {}: {what}", index + 1)),
        }
    }
    if rows.is_empty() {
        let what = if bad.is_empty() { format!("{shown}: holds no rows") } else { bad.join("\n") };
        return Err(bad_input!("{what}\nnothing can be compared; write one row a line: {EXAMPLE}"));
    }
    Ok(TokenRows { rows, bad })
}

const EXAMPLE: &str = r#"{"tokens": [1, 5], "logprobs": [null, -0.7], "temperature": 1.0}"#;

type Values = (Vec<u32>, Vec<Option<f32>>, f64);

fn read_row(line: &str, vocab_size: usize, context_tokens_max: usize) -> Result<Values, String> {
    let raw: RawRow = serde_json::from_str(line).map_err(|e| {
        // Not JSON, but what some writers make of a number that is none.
        match ["NaN", "Infinity"].iter().any(|word| line.contains(word)) {
            true => "a log-prob is NaN or infinite; write null where there is none".to_owned(),
            false => format!("not a row: {e}; write it like {EXAMPLE}"),
        }
    })?;
    let count = raw.tokens.len();
    if count == 0 {
        return Err("no tokens; leave the row out".into());
    }
    if raw.logprobs.len() != count {
        let given = raw.logprobs.len();
        return Err(format!(
            "{count} tokens but {given} logprobs; give one a token, null where there is none"
        ));
    }
    if count > context_tokens_max + 1 {
        return Err(format!("{count} tokens are more than the model's context of {context_tokens_max}"));
    }
    if let Some((at, token)) = raw.tokens.iter().enumerate().find(|(_, token)| **token >= vocab_size as u64) {
        return Err(format!(
            "token {at} is {token}, but vocab_size = {vocab_size}; was another tokenizer used?"
        ));
    }
    let mask = raw.mask.unwrap_or_else(|| vec![true; count]);
    if mask.len() != count {
        return Err(format!("{count} tokens but a mask of {}; give one value a token", mask.len()));
    }
    let given = raw.logprobs.iter().zip(&mask);
    let log_probs: Vec<Option<f32>> =
        given.map(|(l, &sampled)| l.filter(|_| sampled).map(|l| l as f32)).collect();
    let impossible = |l: f32| !l.is_finite() || l > ABOVE_ZERO_MAX;
    if let Some(at) = (1..count).find(|&i| log_probs[i].is_some_and(impossible)) {
        let value = log_probs[at].unwrap_or(f32::NAN);
        return Err(format!("the log-prob of token {at} is {value}, which no probability has"));
    }
    let temperature = raw.temperature.unwrap_or(1.0);
    if !(temperature.is_finite() && temperature > 0.0) {
        return Err(format!("temperature = {temperature}; it must be above 0"));
    }
    Ok((raw.tokens.iter().map(|&token| token as u32).collect(), log_probs, temperature))
}

/// What a comparison with the rows found.
pub struct Comparison {
    /// The failing link over all tokens, then by position.
    pub lines: Vec<Line>,
    pub verdict: String,
    pub explanation: Explanation,
}

/// Compares `rows` with the model.
///
/// # Errors
/// [`crate::error::BadInput`] when no row holds a log-prob after its first token.
pub fn compare(
    reference: Reference,
    tokenizer: &HarmonyTokenizer,
    rows: &[TokenRow],
    micro_batch_tokens: usize,
    clip: (f64, f64),
) -> Result<Comparison> {
    let (observed, rows_of_batches) = observe(rows, micro_batch_tokens);
    if observed.log_probs.is_empty() {
        return Err(bad_input!(
            "no row holds a log-prob after its first token, so there is nothing to compare"
        ));
    }
    let explanation = reference.explain(&observed)?;
    let targets = targets(&observed);
    let window = reference.model.config.sliding_window;
    let mut lines = vec![];
    for (name, keep) in [
        ("rollout_equals_training", Box::new(|_| true) as Box<dyn Fn(usize) -> bool>),
        ("… positions within the window", Box::new(|position| position <= window)),
        ("… positions past the window", Box::new(|position| position > window)),
    ] {
        lines.extend(line(name, &*keep, &targets, &observed, &explanation, clip)?);
    }
    if let Some(first) = lines.first_mut() {
        first.cause = Some(explanation.cause.words());
    }
    let verdict = verdict(&explanation, &ill_formed(tokenizer, rows_of_batches));
    Ok(Comparison { lines, verdict, explanation })
}

/// Packs the rows, those of one temperature together.
fn observe(rows: &[TokenRow], micro_batch_tokens: usize) -> (Observed, Vec<&TokenRow>) {
    let mut order: Vec<&TokenRow> = rows.iter().collect();
    order.sort_by(|a, b| a.temperature.total_cmp(&b.temperature));
    let mut observed = Observed { batches: vec![], log_probs: vec![] };
    for rows in order.chunk_by(|a, b| a.temperature == b.temperature) {
        let sequence = |row: &&TokenRow| Sequence {
            tokens: row.tokens.clone(),
            mask: row.log_probs.iter().enumerate().map(|(i, l)| i > 0 && l.is_some()).collect(),
        };
        let sequences: Vec<Sequence> = rows.iter().map(sequence).filter(|s| s.mask.contains(&true)).collect();
        let batches = MicroBatch::split(&sequences, micro_batch_tokens);
        observed.batches.extend(batches.into_iter().map(|batch| (batch, rows[0].temperature)));
        let given = rows.iter().flat_map(|row| row.log_probs.iter().skip(1));
        observed.log_probs.extend(given.flatten());
    }
    (observed, order)
}

/// Position of every target in its row, and the start of every row's targets.
struct Targets {
    positions: Vec<usize>,
    cu_seqlens: Vec<usize>,
}

fn targets(observed: &Observed) -> Targets {
    let mut found = Targets { positions: vec![], cu_seqlens: vec![0] };
    for (batch, _) in &observed.batches {
        let before = found.positions.len();
        found.positions.extend(batch.rows.iter().map(|&row| batch.positions[row as usize] as usize + 1));
        found.cu_seqlens.extend(batch.cu_targets.iter().skip(1).map(|end| before + end));
    }
    found
}

/// The figures over the targets at the positions that `keep` says; `None` when there are none.
fn line(
    name: &str,
    keep: &dyn Fn(usize) -> bool,
    targets: &Targets,
    observed: &Observed,
    explanation: &Explanation,
    clip: (f64, f64),
) -> Result<Option<Line>> {
    let (mut theirs, mut ours, mut cu_seqlens) = (vec![], vec![], vec![0]);
    for row in targets.cu_seqlens.windows(2) {
        for target in (row[0]..row[1]).filter(|&target| keep(targets.positions[target])) {
            theirs.push(observed.log_probs[target]);
            ours.push(explanation.computed[target]);
        }
        if cu_seqlens.last() != Some(&theirs.len()) {
            cu_seqlens.push(theirs.len());
        }
    }
    if theirs.is_empty() {
        return Ok(None);
    }
    let gap = Gap { cu_seqlens: &cu_seqlens, training: &ours, rollout: &theirs, old: &theirs, clip };
    let mut metrics = vec![("mismatch/tokens".to_owned(), Some(theirs.len() as f64))];
    metrics.extend(gap.metrics()?.into_iter().map(|(name, value)| (name, Some(value))));
    Ok(Some(Line { name: name.to_owned(), metrics, cause: None }))
}

/// Rows that are no well-formed Harmony conversation, with the reason. A row of one token says nothing.
fn ill_formed(tokenizer: &HarmonyTokenizer, rows: Vec<&TokenRow>) -> Vec<(usize, String)> {
    let check = |row: &TokenRow| -> Result<()> {
        let mut parser = StreamParser::new(tokenizer, None, ParseMode::Strict);
        row.tokens.iter().try_for_each(|&token| parser.push(token))?;
        parser.finish().map(drop)
    };
    let longer = rows.into_iter().filter(|row| row.tokens.len() > 1);
    let mut found: Vec<_> =
        longer.filter_map(|row| Some((row.line, format!("{:#}", check(row).err()?)))).collect();
    found.sort();
    found
}

fn verdict(explanation: &Explanation, ill_formed: &[(usize, String)]) -> String {
    let Explanation { cause, gap, left, bf16_gap, .. } = explanation;
    let mut text = format!("{}. Median |Δlogp| {gap:.2e}", cause.words());
    if left < gap {
        text.push_str(&format!(", {left:.2e} with this cause taken into account"));
    }
    text.push_str(&format!("; this model in bf16 is {bf16_gap:.2e} from itself."));
    if let Some((row, what)) = ill_formed.first() {
        let count = ill_formed.len();
        text.push_str(&format!(
            " Rows that are no well-formed Harmony conversation: {count} (the first is row {row}: {what})."
        ));
    }
    text
}
