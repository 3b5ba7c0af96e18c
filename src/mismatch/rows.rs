//! Reads another engine's rows from files: JSON, JSONL or gzip, one record at a time.

use super::formats::{EXAMPLE, RawRow, RecordFormat, TORCH_FILE, TokenTexts};
use crate::bad_input;
use crate::bounded_file;
use crate::model::config::Config;
use crate::vocabulary::Vocabulary;
use anyhow::Result;
use flate2::read::MultiGzDecoder;
use serde::de::{Deserializer as _, Error as _, SeqAccess, Visitor};
use serde_json::Value;
use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Maximum log-prob above 0; rounding can exceed 0 slightly.
const ABOVE_ZERO_MAX: f64 = 1e-3;
/// Maximum size of a record and of a file, in bytes of text.
const RECORD_BYTES_MAX: u64 = 64 << 20;
const FILE_BYTES_MAX: u64 = 2 << 30;
/// Maximum number of bad rows that are stored; a file with more has other content.
const BAD_ROWS_MAX: usize = 100_000;
/// Maximum number of bad rows that are printed; `mismatch.json` has all.
const BAD_ROWS_PRINTED_MAX: usize = 10;

/// A valid row.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    /// Line or element in the file, from 1, and the choice if a record has several. With several files, the
    /// file's name comes first.
    pub name: String,
    pub tokens: Vec<u32>,
    /// `None` if the engine gave no value. The first token's is ignored: nothing predicts it.
    pub log_probs: Vec<Option<f32>>,
    /// A trainer's log-probs, if the file has both.
    pub trainer_log_probs: Option<Vec<Option<f32>>>,
    /// Temperature of the sampled tokens' log-probs.
    pub temperature: f64,
    /// Number of prompt tokens with raw log-probs: at temperature 1, over the whole vocabulary.
    pub raw_tokens: usize,
    pub routes: Option<ChosenExperts>,
}

/// The engine's routed experts, `[token][layer × slot]`, for the input tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenExperts {
    pub layers: usize,
    pub slots: usize,
    pub experts: Vec<u32>,
}

impl ChosenExperts {
    /// Returns the experts of the token at `position`, at `layer`.
    pub fn at(&self, position: usize, layer: usize) -> Option<&[u32]> {
        self.experts.get((position * self.layers + layer) * self.slots..)?.get(..self.slots)
    }
}

/// The rows of all files.
#[derive(Debug, Default)]
pub struct TokenRows {
    pub rows: Vec<TokenRow>,
    /// The formats that were read, as text, with any conversion.
    pub formats: Vec<String>,
    /// Rows that cannot be compared, each with its name and the reason.
    pub bad_rows: Vec<String>,
}

impl TokenRows {
    /// Returns [`Self::bad_rows`] for printing: the first rows, and the number of the others.
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
    /// Temperature of rows that state none.
    temperature: f64,
}

impl<'a> RowReader<'a> {
    /// Creates a reader for a model of `config` with contexts of `context_tokens_max`. `temperature` applies
    /// to rows that state none.
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
    /// [`crate::error::BadInput`] when a file cannot be read, or none holds a row that can be compared.
    pub fn read(&self, files: &[PathBuf]) -> Result<TokenRows> {
        let mut found = TokenRows::default();
        for path in files {
            let has_several = files.len() > 1;
            let mut file = FileState { shape: None, from_texts: 0, has_several, path, found: &mut found };
            self.read_file(&mut file)?;
            let (shape, from_texts) = (file.shape, file.from_texts);
            if let Some(shape) = shape {
                let mut formats = format!("{}: {}", path.display(), shape.name);
                if from_texts > 0 {
                    let how = "each id was found from its text, which leaves no doubt";
                    formats.push_str(&format!("; text without ids in {from_texts} rows: {how}"));
                }
                found.formats.push(formats);
            }
        }
        if found.rows.is_empty() {
            let shown = files.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ");
            let what = match found.bad_rows.is_empty() {
                true => format!("{shown}: holds no rows"),
                false => found.bad_row_messages().join("\n"),
            };
            return Err(bad_input!(
                "{what}\nno row can be compared; docs/MISMATCH.md lists the formats; the simplest is one row a line: {EXAMPLE}"
            ));
        }
        Ok(found)
    }

    fn read_file(&self, file: &mut FileState) -> Result<()> {
        let shown = file.path.display().to_string();
        let failed = |e: io::Error| bad_input!("{shown}: cannot be read: {e}; name a file of JSON or JSONL");
        let mut start = BufReader::new(bounded_file::open(file.path, FILE_BYTES_MAX).map_err(failed)?);
        let magic = start.fill_buf().map_err(failed)?;
        let compressed = magic.starts_with(&[0x1f, 0x8b]);
        if magic.starts_with(b"PK") || magic.starts_with(&[0x80]) {
            return Err(bad_input!("{shown}: {TORCH_FILE}"));
        }
        let text: Box<dyn Read> =
            if compressed { Box::new(MultiGzDecoder::new(start)) } else { Box::new(start) };
        let mut text = BufReader::new(text.take(FILE_BYTES_MAX + 1));
        if text.fill_buf().map_err(failed)?.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'[') {
            let (mut at, left) = (0, Cell::new(RECORD_BYTES_MAX));
            let mut add_element = |value: Value| {
                at += 1;
                left.set(RECORD_BYTES_MAX);
                self.add_record(file, at, value);
                file.check_bad_row_limit()
            };
            let records = Records { text: &mut text, left: &left };
            let read =
                serde_json::Deserializer::from_reader(records).deserialize_seq(Elements(&mut add_element));
            if let Err(e) = read {
                file.add_bad_row(at + 1, format!("not JSON from here on: {e}"));
            }
        } else {
            self.read_lines(file, &mut text).map_err(failed)?;
        }
        if text.get_ref().limit() == 0 {
            return Err(bad_input!(
                "{shown}: more than {} GiB of text; name a part of it",
                FILE_BYTES_MAX >> 30
            ));
        }
        Ok(())
    }

    /// Reads one record a line, or one record over all lines.
    fn read_lines(&self, file: &mut FileState, text: &mut impl BufRead) -> io::Result<()> {
        let mut line = vec![];
        for number in 1.. {
            line.clear();
            if text.take(RECORD_BYTES_MAX + 1).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            if line.len() as u64 > RECORD_BYTES_MAX {
                text.skip_until(b'\n')?;
                file.add_bad_row(number, format!("longer than {} MiB; split it", RECORD_BYTES_MAX >> 20));
                continue;
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let mut parsed = serde_json::from_slice::<Value>(&line);
            // A record of many lines begins with an incomplete line.
            let first = file.shape.is_none() && file.found.bad_rows.is_empty();
            if first && parsed.as_ref().is_err_and(serde_json::Error::is_eof) {
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

    /// Adds the rows of one record, or the reason why it has none.
    fn add_record(&self, file: &mut FileState, number: usize, value: Value) {
        let raws = match self.raw_rows(file, value) {
            Ok(raws) => raws,
            Err(what) => return file.add_bad_row(number, what),
        };
        let has_several = raws.len() > 1;
        for (index, raw) in raws.into_iter().enumerate() {
            let name = file.name(number, has_several.then_some(index));
            file.from_texts += usize::from(raw.from_texts);
            match self.row(raw, name.clone()) {
                Ok(row) => file.found.rows.push(row),
                Err(what) => file.found.bad_rows.push(format!("{}: row {name}: {what}", file.path.display())),
            }
        }
    }

    fn raw_rows(&self, file: &mut FileState, value: Value) -> Result<Vec<RawRow>, String> {
        let shape = RecordFormat::of(&value)?;
        let first = file.shape.get_or_insert(shape).name;
        if first != shape.name {
            let name = shape.name;
            return Err(format!("one of {name}, but the file began with {first}; use one format a file"));
        }
        shape.rows(value, &self.texts)
    }

    /// Checks `raw` and returns it as a row, if it can be compared with this model.
    fn row(&self, raw: RawRow, name: String) -> Result<TokenRow, String> {
        let (count, vocab_size) = (raw.tokens.len(), self.config.vocab_size);
        if count == 0 {
            return Err("no tokens; leave the row out".into());
        }
        if count > self.context_tokens_max + 1 {
            let max = self.context_tokens_max;
            return Err(format!("{count} tokens are more than the model's context of {max}"));
        }
        let is_out_of_vocabulary = |(_, token): &(usize, &u64)| **token >= vocab_size as u64;
        if let Some((at, token)) = raw.tokens.iter().enumerate().find(is_out_of_vocabulary) {
            return Err(format!(
                "token {at} is {token}, but vocab_size = {vocab_size}; was another tokenizer used?"
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
            return Err("all log-probs after the first are null; ask the engine for them".into());
        }
        let routes = raw.routes.map(|routes| self.routes(routes.experts, routes.shape, count)).transpose()?;
        let (trainer_log_probs, raw_tokens) = (trainer.transpose()?, raw.raw_tokens);
        Ok(TokenRow { name, tokens, log_probs, trainer_log_probs, temperature, raw_tokens, routes })
    }

    /// Checks that ids and texts belong to one tokenizer. Texts with lost bytes and blank special tokens are
    /// ignored.
    fn check_texts(&self, tokens: &[u32], texts: &[(usize, String)]) -> Result<(), String> {
        for (at, text) in texts {
            let bytes = tokens.get(*at).and_then(|&token| self.tokenizer.token_bytes(token));
            let Some(bytes) = bytes else { continue };
            let is_lossy = text.is_empty() || text.contains('\u{fffd}') || text.starts_with("bytes:");
            if std::str::from_utf8(bytes).is_ok() && !is_lossy && bytes != text.as_bytes() {
                return Err(format!(
                    "token {at} is {}, which is {:?} here and {text:?} in the file; it comes from another tokenizer",
                    tokens[*at],
                    String::from_utf8_lossy(bytes)
                ));
            }
        }
        Ok(())
    }

    fn routes(
        &self,
        experts: Vec<u32>,
        shape: Option<[usize; 3]>,
        count: usize,
    ) -> Result<ChosenExperts, String> {
        let (layers, slots) = (self.config.num_hidden_layers, self.config.num_experts_per_tok);
        let tokens = experts.len() / (layers * slots);
        let fits = tokens * layers * slots == experts.len() && (tokens + 1 == count || tokens == count);
        if !fits || shape.is_some_and(|shape| shape != [tokens, layers, slots]) {
            return Err(format!(
                "routed experts of shape {}, where {} tokens × {layers} layers × {slots} were expected",
                shape.map_or(format!("[{}]", experts.len()), |shape| format!("{shape:?}")),
                count - 1
            ));
        }
        let max = self.config.num_local_experts;
        match experts.iter().find(|&&expert| expert as usize >= max) {
            Some(expert) => Err(format!("routed expert {expert}, but the model has {max}")),
            None => Ok(ChosenExperts { layers, slots, experts }),
        }
    }
}

/// Checks that `values` are possible log-probs.
fn check_log_probs(values: &[Option<f64>], count: usize, what: &str) -> Result<Vec<Option<f32>>, String> {
    if values.len() != count {
        let given = values.len();
        return Err(format!("{count} tokens but {given} {what}; give one a token, null where there is none"));
    }
    let impossible = |l: f64| !l.is_finite() || l > ABOVE_ZERO_MAX;
    let found = values.iter().enumerate().skip(1).find(|(_, l)| l.is_some_and(impossible));
    if let Some((at, Some(value))) = found {
        return Err(format!("the log-prob of token {at} is {value}, which no probability has"));
    }
    Ok(values.iter().map(|l| l.map(|l| l as f32)).collect())
}

/// A file and its state while it is read.
struct FileState<'a> {
    shape: Option<&'static RecordFormat>,
    from_texts: usize,
    has_several: bool,
    path: &'a Path,
    found: &'a mut TokenRows,
}

impl FileState<'_> {
    fn name(&self, number: usize, choice: Option<usize>) -> String {
        let number = choice.map_or(number.to_string(), |choice| format!("{number}.{choice}"));
        match self.path.file_name().filter(|_| self.has_several) {
            Some(file) => format!("{}:{number}", file.to_string_lossy()),
            None => number,
        }
    }

    fn add_bad_row(&mut self, number: usize, what: String) {
        self.found.bad_rows.push(format!("{}: row {number}: {what}", self.path.display()));
    }

    fn check_bad_row_limit(&self) -> Result<(), String> {
        match self.found.bad_rows.len() > BAD_ROWS_MAX {
            true => Err(format!("more than {BAD_ROWS_MAX} rows are bad")),
            false => Ok(()),
        }
    }
}

/// Returns why a line cannot be parsed.
fn parse_error_text(line: &[u8], error: &serde_json::Error) -> String {
    // Some writers emit these for a value that is not a number; they are not JSON.
    let text = String::from_utf8_lossy(line);
    match ["NaN", "Infinity"].iter().any(|word| text.contains(word)) {
        true => "a log-prob is NaN or infinite; write null where there is none".to_owned(),
        false => format!("not a row: {error}; write it like {EXAMPLE}"),
    }
}

/// Limits each record to `left` bytes. The consumer of a record resets `left`.
struct Records<'a, R> {
    text: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Records<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(buffer)?;
        let left = self.left.get().checked_sub(count as u64);
        self.left.set(left.ok_or_else(|| {
            io::Error::other(format!("a record longer than {} MiB; split it", RECORD_BYTES_MAX >> 20))
        })?);
        Ok(count)
    }
}

/// Passes the elements of an array to a function, until it refuses one.
struct Elements<'a>(&'a mut dyn FnMut(Value) -> Result<(), String>);

impl<'de> Visitor<'de> for Elements<'_> {
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
