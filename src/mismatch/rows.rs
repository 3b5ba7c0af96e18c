//! Reads another engine's rows from files of JSON, JSONL or gzip, one record at a time.

use super::formats::{EXAMPLE, RawRoutedExperts, RawRow, RecordFormat, TORCH_FILE, TokenTexts};
use crate::bad_input;
use crate::bounded_file;
use crate::model::config::Config;
use crate::ops::token_set::TokenSet;
use crate::trajectory::check_kept_tokens;
use crate::vocabulary::Vocabulary;
use anyhow::{Result, ensure};
use flate2::read::MultiGzDecoder;
use serde::de::{Deserializer as _, Error as _, SeqAccess, Visitor};
use serde_json::Value;
use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Maximum log-prob. Rounding can make a log-prob slightly larger than 0.
const LOG_PROB_MAX: f64 = 1e-3;
/// Maximum size of a record, in bytes of text.
const RECORD_BYTES_MAX: u64 = 64 << 20;
/// Maximum size of a file, in bytes of text.
const FILE_BYTES_MAX: u64 = 2 << 30;
/// Maximum number of bad rows. With more bad rows, reading stops, because the file then probably contains
/// something else.
const BAD_ROWS_MAX: usize = 100_000;
/// Maximum number of bad rows that are printed. `mismatch.json` has all of them.
const BAD_ROWS_PRINTED_MAX: usize = 10;

/// A valid row.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    /// Name of the row in messages: the number of its line or element in the file, from 1. If a record has
    /// several choices, the index of the choice follows. If there are several files, the name of the file
    /// comes first.
    pub name: String,
    pub tokens: Vec<u32>,
    /// One value per token; `None` if the engine gave no value. The first token's value is ignored, because
    /// nothing predicts that token.
    pub log_probs: Vec<Option<f32>>,
    /// A trainer's log-probs of the same tokens, if the file has them.
    pub trainer_log_probs: Option<Vec<Option<f32>>>,
    /// Temperature of the log-probs of sampled tokens.
    pub temperature: f64,
    /// Number of prompt tokens with raw log-probs, which are at temperature 1 and without filters.
    pub raw_tokens: usize,
    pub routed_experts: Option<EngineRoutedExperts>,
    /// The tokens that each token was drawn from; empty if the file has no such sets.
    pub kept_tokens: Vec<Option<TokenSet>>,
}

/// The engine's routed experts of the input tokens, `[token][layer][slot]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineRoutedExperts {
    pub layers: usize,
    /// Number of experts per token.
    pub slots: usize,
    pub experts: Vec<u32>,
}

impl EngineRoutedExperts {
    /// Returns the experts of the token at `position`, at `layer`.
    pub fn get(&self, position: usize, layer: usize) -> Option<&[u32]> {
        self.experts.get((position * self.layers + layer) * self.slots..)?.get(..self.slots)
    }
}

/// The rows of all files.
#[derive(Debug, Default)]
pub struct TokenRows {
    pub rows: Vec<TokenRow>,
    /// One line per file: its path, its format, and any conversion.
    pub formats: Vec<String>,
    /// Rows that cannot be compared, each with its name and the reason.
    pub bad_rows: Vec<String>,
}

impl TokenRows {
    /// Returns [`Self::bad_rows`] for printing: the first rows, and the number of the other rows.
    pub fn bad_row_messages(&self) -> Vec<String> {
        let more = self.bad_rows.len().saturating_sub(BAD_ROWS_PRINTED_MAX);
        let rest = (more > 0).then(|| format!("{more} more rows are bad"));
        self.bad_rows.iter().take(BAD_ROWS_PRINTED_MAX).cloned().chain(rest).collect()
    }
}

/// Reads rows for one model.
pub struct RowReader<'a> {
    config: &'a Config,
    context_tokens_max: usize,
    tokenizer: &'a Vocabulary,
    texts: TokenTexts,
    /// Temperature of rows that state no temperature.
    temperature: f64,
}

impl<'a> RowReader<'a> {
    /// Creates a reader for a model of `config` with contexts of `context_tokens_max` tokens. `temperature`
    /// applies to rows that state no temperature.
    pub fn new(
        config: &'a Config,
        context_tokens_max: usize,
        tokenizer: &'a Vocabulary,
        temperature: f64,
    ) -> Self {
        Self { config, context_tokens_max, tokenizer, texts: TokenTexts::new(tokenizer.clone()), temperature }
    }

    /// Reads all of `files`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read, or no file has a row that can be compared.
    pub fn read(&self, files: &[PathBuf]) -> Result<TokenRows> {
        let mut token_rows = TokenRows::default();
        for path in files {
            let mut file = FileState {
                format: None,
                rows_from_texts: 0,
                has_several: files.len() > 1,
                path,
                token_rows: &mut token_rows,
            };
            self.read_file(&mut file)?;
            let FileState { format: Some(format), rows_from_texts, .. } = file else { continue };
            let mut line = format!("{}: {}", path.display(), format.name);
            if rows_from_texts > 0 {
                let how = "the model's tokenizer gave them, and a text that fits several would be refused";
                line.push_str(&format!("; {rows_from_texts} rows have a text without ids: {how}"));
            }
            token_rows.formats.push(line);
        }
        if token_rows.rows.is_empty() {
            let paths = files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ");
            let problem = match token_rows.bad_rows.is_empty() {
                true => format!("{paths}: no rows found"),
                false => token_rows.bad_row_messages().join("\n"),
            };
            return Err(bad_input!(
                "{problem}\nno row can be compared; docs/AGAINST.md lists the formats; the simplest is one row per line: {EXAMPLE}"
            ));
        }
        Ok(token_rows)
    }

    fn read_file(&self, file: &mut FileState) -> Result<()> {
        let path = file.path.display().to_string();
        let failed = |e: io::Error| bad_input!("{path}: cannot be read: {e}; use a file of JSON or JSONL");
        let mut start = BufReader::new(bounded_file::open(file.path, FILE_BYTES_MAX).map_err(failed)?);
        let magic = start.fill_buf().map_err(failed)?;
        let compressed = magic.starts_with(&[0x1f, 0x8b]);
        ensure!(!magic.starts_with(b"PK") && !magic.starts_with(&[0x80]), bad_input!("{path}: {TORCH_FILE}"));
        let text: Box<dyn Read> =
            if compressed { Box::new(MultiGzDecoder::new(start)) } else { Box::new(start) };
        let mut text = BufReader::new(text.take(FILE_BYTES_MAX + 1));
        if text.fill_buf().map_err(failed)?.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[') {
            let (mut number, bytes_left) = (0, Cell::new(RECORD_BYTES_MAX));
            let mut add_element = |value: Value| {
                number += 1;
                bytes_left.set(RECORD_BYTES_MAX);
                self.add_record(file, number, value);
                file.check_bad_row_limit()
            };
            let reader = RecordReader { text: &mut text, bytes_left: &bytes_left };
            let result = serde_json::Deserializer::from_reader(reader)
                .deserialize_seq(ElementVisitor(&mut add_element));
            if let Err(e) = result {
                file.add_bad_row(number + 1, format!("not JSON from here on: {e}"));
            }
        } else {
            self.read_lines(file, &mut text).map_err(failed)?;
        }
        if text.get_ref().limit() == 0 {
            return Err(bad_input!(
                "{path}: more than {} GiB of text; use a part of the file",
                FILE_BYTES_MAX >> 30
            ));
        }
        Ok(())
    }

    /// Reads one record per line, or one record that has several lines.
    fn read_lines(&self, file: &mut FileState, text: &mut impl BufRead) -> io::Result<()> {
        let mut line = vec![];
        for number in 1.. {
            line.clear();
            if text.take(RECORD_BYTES_MAX + 1).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            if line.len() as u64 > RECORD_BYTES_MAX {
                text.skip_until(b'\n')?;
                file.add_bad_row(
                    number,
                    format!("longer than {} MiB; split the record", RECORD_BYTES_MAX >> 20),
                );
                continue;
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let mut parsed = serde_json::from_slice::<Value>(&line);
            // A record of several lines begins with a line that is incomplete JSON.
            let is_first = file.format.is_none() && file.token_rows.bad_rows.is_empty();
            if is_first && parsed.as_ref().is_err_and(serde_json::Error::is_eof) {
                text.take(RECORD_BYTES_MAX).read_to_end(&mut line)?;
                parsed = serde_json::from_slice(&line);
            }
            match parsed {
                Ok(value) => self.add_record(file, number, value),
                Err(e) => file.add_bad_row(number, parse_error_text(&line, &e)),
            }
            file.check_bad_row_limit().map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Adds the rows of one record. A record or row that cannot be compared becomes a bad row.
    fn add_record(&self, file: &mut FileState, number: usize, value: Value) {
        let raw_rows = match self.raw_rows(file, value) {
            Ok(raw_rows) => raw_rows,
            Err(reason) => return file.add_bad_row(number, reason),
        };
        let has_several = raw_rows.len() > 1;
        for (index, raw) in raw_rows.into_iter().enumerate() {
            let name = file.row_name(number, has_several.then_some(index));
            file.rows_from_texts += usize::from(raw.from_texts);
            match self.row(raw, name.clone()) {
                Ok(row) => file.token_rows.rows.push(row),
                Err(reason) => file.add_bad_row(name, reason),
            }
        }
    }

    /// Returns the rows of one record, without checks. All records of a file must have one format.
    fn raw_rows(&self, file: &mut FileState, value: Value) -> Result<Vec<RawRow>, String> {
        let format = RecordFormat::recognize(&value)?;
        let first = file.format.get_or_insert(format).name;
        if first != format.name {
            let name = format.name;
            return Err(format!(
                "a record of {name}, but the file began with {first}; use one format per file"
            ));
        }
        format.rows(value, &self.texts)
    }

    /// Checks `raw` and returns it as a valid row.
    ///
    /// # Errors
    /// The reason why the row cannot be compared with this model.
    fn row(&self, raw: RawRow, name: String) -> Result<TokenRow, String> {
        let (count, vocab_size) = (raw.tokens.len(), self.config.vocab_size);
        if count == 0 {
            return Err("no tokens; remove the row".into());
        }
        if count > self.context_tokens_max + 1 {
            let max = self.context_tokens_max;
            return Err(format!("{count} tokens are more than the model's context of {max}"));
        }
        let is_out_of_vocabulary = |(_, token): &(usize, &u64)| **token >= vocab_size as u64;
        if let Some((index, token)) = raw.tokens.iter().enumerate().find(is_out_of_vocabulary) {
            return Err(format!(
                "token {index} is {token}, but vocab_size = {vocab_size}; was another tokenizer used?"
            ));
        }
        let temperature = raw.temperature.unwrap_or(self.temperature);
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(format!("temperature = {temperature}; it must be above 0"));
        }
        let tokens: Vec<u32> = raw.tokens.iter().map(|&token| token as u32).collect();
        self.check_texts(&tokens, &raw.texts)?;
        let log_probs = check_log_probs(&raw.log_probs, count, "logprobs")?;
        let trainer = raw.trainer_log_probs.map(|values| check_log_probs(&values, count, "trainer_logprobs"));
        if count > 1 && log_probs.iter().skip(1).all(Option::is_none) {
            return Err("all log-probs after the first are null; request them from the engine".into());
        }
        let routed_experts =
            raw.routed_experts.map(|experts| self.check_routed_experts(experts, count)).transpose()?;
        check_kept_tokens(&raw.kept_tokens, &tokens)?;
        let largest = raw.kept_tokens.iter().flatten().filter_map(|set| set.ids().pop()).max();
        if let Some(token) = largest.filter(|&token| token as usize >= vocab_size) {
            return Err(format!("`kept_tokens` has the token {token}, but vocab_size = {vocab_size}"));
        }
        Ok(TokenRow {
            name,
            tokens,
            log_probs,
            trainer_log_probs: trainer.transpose()?,
            temperature,
            raw_tokens: raw.raw_tokens,
            routed_experts,
            kept_tokens: raw.kept_tokens,
        })
    }

    /// Checks that the texts of tokens in the file are those of this tokenizer. Ignores texts with lost
    /// bytes. Also ignores empty texts, which some engines write for special tokens.
    fn check_texts(&self, tokens: &[u32], texts: &[(usize, String)]) -> Result<(), String> {
        for (index, text) in texts {
            let bytes = tokens.get(*index).and_then(|&token| self.tokenizer.token_bytes(token));
            let Some(bytes) = bytes else { continue };
            let is_lossy = text.is_empty() || text.contains('\u{fffd}') || text.starts_with("bytes:");
            if std::str::from_utf8(bytes).is_ok() && !is_lossy && bytes != text.as_bytes() {
                return Err(format!(
                    "token {index} is {}, whose text is {:?} here but {text:?} in the file; the file comes from another tokenizer",
                    tokens[*index],
                    String::from_utf8_lossy(bytes)
                ));
            }
        }
        Ok(())
    }

    /// Checks that the routed experts of `raw` fit the model and a row of `count` tokens. The last token may
    /// have no experts.
    fn check_routed_experts(
        &self,
        raw: RawRoutedExperts,
        count: usize,
    ) -> Result<EngineRoutedExperts, String> {
        let RawRoutedExperts { experts, shape } = raw;
        let (layers, slots) = (self.config.num_hidden_layers, self.config.num_experts_per_tok);
        if slots == 0 {
            return Err("the row has routed experts, but this model has no experts".to_owned());
        }
        let tokens = experts.len() / (layers * slots);
        let fits = tokens * layers * slots == experts.len() && (tokens + 1 == count || tokens == count);
        if !fits || shape.is_some_and(|shape| shape != [tokens, layers, slots]) {
            return Err(format!(
                "routed experts have the shape {}, but {} tokens × {layers} layers × {slots} slots were expected",
                shape.map_or(format!("[{}]", experts.len()), |shape| format!("{shape:?}")),
                count - 1
            ));
        }
        let max = self.config.num_local_experts;
        match experts.iter().find(|&&expert| expert as usize >= max) {
            Some(expert) => Err(format!("routed expert {expert}, but the model has only {max} experts")),
            None => Ok(EngineRoutedExperts { layers, slots, experts }),
        }
    }
}

/// Checks that `values` are `count` possible log-probs. Messages call the values `key`.
fn check_log_probs(values: &[Option<f64>], count: usize, key: &str) -> Result<Vec<Option<f32>>, String> {
    if values.len() != count {
        let given = values.len();
        return Err(format!(
            "{count} tokens but {given} {key}; give one value per token, or null where there is none"
        ));
    }
    let is_impossible = |l: f64| !l.is_finite() || l > LOG_PROB_MAX;
    let impossible = values.iter().enumerate().skip(1).find(|(_, l)| l.is_some_and(is_impossible));
    if let Some((index, Some(value))) = impossible {
        return Err(format!(
            "the log-prob of token {index} is {value}, which is not the logarithm of a probability"
        ));
    }
    Ok(values.iter().map(|l| l.map(|l| l as f32)).collect())
}

/// The state of a file that is being read.
struct FileState<'a> {
    /// The format of the records; `None` before the first one.
    format: Option<&'static RecordFormat>,
    /// Number of rows whose ids were derived from texts.
    rows_from_texts: usize,
    /// Whether several files are read. If so, the names of rows include the file.
    has_several: bool,
    path: &'a Path,
    token_rows: &'a mut TokenRows,
}

impl FileState<'_> {
    /// Returns the name of the row at record `number`. `choice` is the row's index if the record has several
    /// rows.
    fn row_name(&self, number: usize, choice: Option<usize>) -> String {
        let number = choice.map_or(number.to_string(), |choice| format!("{number}.{choice}"));
        match self.path.file_name().filter(|_| self.has_several) {
            Some(file) => format!("{}:{number}", file.to_string_lossy()),
            None => number,
        }
    }

    fn add_bad_row(&mut self, row: impl std::fmt::Display, reason: String) {
        self.token_rows.bad_rows.push(format!("{}: row {row}: {reason}", self.path.display()));
    }

    fn check_bad_row_limit(&self) -> Result<(), String> {
        match self.token_rows.bad_rows.len() > BAD_ROWS_MAX {
            true => Err(format!("more than {BAD_ROWS_MAX} rows are bad")),
            false => Ok(()),
        }
    }
}

/// Returns the reason why a line cannot be parsed.
fn parse_error_text(line: &[u8], error: &serde_json::Error) -> String {
    // Some programs write NaN and Infinity, which are not JSON.
    let text = String::from_utf8_lossy(line);
    match ["NaN", "Infinity"].iter().any(|word| text.contains(word)) {
        true => "a log-prob is NaN or infinite; write null where there is none".to_owned(),
        false => format!("not a row: {error}; write it like {EXAMPLE}"),
    }
}

/// Limits the number of bytes of each record. The caller resets `bytes_left` after each record.
struct RecordReader<'a, R> {
    text: R,
    bytes_left: &'a Cell<u64>,
}

impl<R: Read> Read for RecordReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(buffer)?;
        let bytes_left = self.bytes_left.get().checked_sub(count as u64);
        self.bytes_left.set(bytes_left.ok_or_else(|| {
            io::Error::other(format!("a record longer than {} MiB; split the record", RECORD_BYTES_MAX >> 20))
        })?);
        Ok(count)
    }
}

/// Passes each element of an array to a function. Stops at the first error of the function.
struct ElementVisitor<'a>(&'a mut dyn FnMut(Value) -> Result<(), String>);

impl<'de> Visitor<'de> for ElementVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an array of records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(value) = elements.next_element()? {
            (self.0)(value).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}
