//! Vocabularies: encode text to token ids and decode token ids to text. They read any byte-level BPE
//! `tokenizer.json` of Hugging Face.
//!
//! Text of a user, a tool or a model is always encoded as ordinary text, so it can never become a control
//! token.

mod byte_level;
mod embedded_vocabulary;
mod limits;
mod pattern;
mod pre_tokenizer;

pub use embedded_vocabulary::embedded_json;
pub(crate) use limits::VOCABULARY_VALUES_MAX;
pub(crate) use pre_tokenizer::BoundedPreTokenizer;

use crate::bad_input;
use crate::bounded_file::{self, TOKENIZER_BYTES_MAX};
use crate::panics::catch_panic;
use anyhow::{Result, anyhow};
use byte_level::{ByteDecoder, alphabet, to_byte_level};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, AddedVocabulary, DecoderWrapper, Model, NormalizerWrapper, OffsetType, PostProcessorWrapper,
    PreTokenizer, TokenizerImpl,
};

/// A tokenizer whose model is BPE. The crate's `Tokenizer` holds any model, so it first parses the vocabulary
/// into a JSON tree. This type skips the tree.
pub(crate) type BpeTokenizer =
    TokenizerImpl<BPE, NormalizerWrapper, BoundedPreTokenizer, PostProcessorWrapper, DecoderWrapper>;

/// A byte-level BPE vocabulary. Clones share the tables.
#[derive(Clone)]
pub struct Vocabulary(Arc<Tables>);

struct Tables {
    inner: BpeTokenizer,
    /// The added tokens, of which text contains all but the special ones.
    ordinary: AddedVocabulary,
    json: Vec<u8>,
    pad: Option<u32>,
    /// Bytes of all tokens, concatenated; token `id` is `bytes[ends[id - 1]..ends[id]]`.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Whether each id is a special token.
    special: Vec<bool>,
    /// Length of the longest token in bytes.
    token_bytes_max: usize,
}

impl Vocabulary {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) that names the file. It is returned when the file cannot be read,
    /// is not a byte-level BPE tokenizer, or would encode ordinary text as a special token.
    pub fn from_file(path: &Path) -> Result<Self> {
        let source_name = path.display().to_string();
        let json = bounded_file::read(path, TOKENIZER_BYTES_MAX).map_err(|e| {
            bad_input!(
                "{source_name}: {e}; a checkpoint folder needs the tokenizer.json that came with the model"
            )
        })?;
        Self::from_bytes(json, &source_name)
    }

    /// Reads the bytes of a `tokenizer.json`. Error messages name the file `source_name`.
    ///
    /// # Errors
    /// Errors of [`Self::from_file`].
    pub fn from_bytes(json: Vec<u8>, source_name: &str) -> Result<Self> {
        let refusal = |why: &str| {
            let why = start_of(why, ERROR_CHARS_MAX);
            bad_input!(
                "{source_name}: not a Hugging Face tokenizer.json: {why}; use the tokenizer.json of the model"
            )
        };
        let added = limits::check(&json).map_err(|why| refusal(&why.to_string()))?;
        // The crate panics on truncated or invalid files.
        let parsed = catch_panic(|| serde_json::from_slice::<BpeTokenizer>(&json));
        let parsed = parsed.map_err(|why| refusal(&why))?;
        let inner = parsed.map_err(|e| match has_other_model(&json) {
            true => bad_input!("{source_name}: model.type must be BPE, of the byte-level kind"),
            false => refusal(&e.to_string()),
        })?;
        // The crate gives an added token the next free id, whatever the file says.
        if let Some(token) = added.iter().find(|token| added_id(&inner, &token.content) != Some(token.id)) {
            let (id, content) = (token.id, start_of(&token.content, TEXT_CHARS_SHOWN_MAX));
            return Err(bad_input!(
                "{source_name}: the added token {content:?} cannot have the id {id}: ids begin at 0 and have no gaps, and an entry of \
                 model.vocab keeps its id"
            ));
        }
        Self::from_tokenizer(inner, json, source_name)
    }

    /// Returns the vocabulary of `inner`, which `json` describes in the format of `tokenizer.json`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) with `source_name` if the tokenizer is not byte-level BPE, or
    /// would encode ordinary text as a special token.
    pub(crate) fn from_tokenizer(mut inner: BpeTokenizer, json: Vec<u8>, source_name: &str) -> Result<Self> {
        // Padding and truncation of the file are ignored: the encoding of a text always has all its tokens
        // and no others.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| anyhow!("{source_name}: {e}"))?;
        // The post-processor and the decoder are not used.
        inner.with_post_processor(None::<PostProcessorWrapper>);
        inner.with_decoder(None::<DecoderWrapper>);
        if inner.get_model().dropout.is_some_and(|p| p != 0.0) {
            return Err(bad_input!("{source_name}: model.dropout makes ids random; set it to null"));
        }
        let BPE { continuing_subword_prefix, end_of_word_suffix, .. } = inner.get_model();
        if [continuing_subword_prefix, end_of_word_suffix].into_iter().flatten().any(|mark| !mark.is_empty())
        {
            return Err(bad_input!(
                "{source_name}: model.continuing_subword_prefix and model.end_of_word_suffix are not byte-level; set them to null"
            ));
        }
        let added = inner.get_added_tokens_decoder().into_values();
        let controls = added.filter(|token| !token.special && is_control_spelling(&token.content));
        let controls: Vec<AddedToken> = controls.map(|token| token.special(true)).collect();
        inner.add_special_tokens(controls).map_err(|e| anyhow!("{source_name}: {e}"))?;
        let mut ordinary = inner.get_added_vocabulary().clone();
        ordinary.set_encode_special_tokens(true);
        let pad = ["<|pad|>", "<|endoftext|>"].iter().find_map(|name| added_id(&inner, name));
        check_bytes(&inner, source_name)?;
        let (bytes, ends, special) = token_table(&inner, source_name)?;
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let token_bytes_max = ends.iter().zip(starts).map(|(end, start)| end - start).max().unwrap_or(0);
        let tables = Tables { inner, ordinary, json, pad, bytes, ends, special, token_bytes_max };
        let tokenizer = Self(Arc::new(tables));
        tokenizer.check_special_tokens_unforgeable(source_name)?;
        Ok(tokenizer)
    }

    /// Returns the bytes of the `tokenizer.json`, for checkpoint folders.
    pub fn json_bytes(&self) -> &[u8] {
        &self.0.json
    }

    /// Returns the tokenizer as the crate writes it.
    #[cfg(test)]
    pub(crate) fn tokenizer_json(&self) -> String {
        serde_json::to_string(&self.0.inner).unwrap()
    }

    /// Returns whether text has about one token a byte, as in the embedded vocabularies.
    pub fn is_of_bytes(&self) -> bool {
        self.vocab_size() < 512
    }

    /// Returns the number of ids, which is the highest id plus one. Added tokens are included.
    pub fn vocab_size(&self) -> usize {
        self.0.ends.len()
    }

    /// Returns the id of the added token spelled `name`.
    pub fn added_id(&self, name: &str) -> Option<u32> {
        added_id(&self.0.inner, name)
    }

    /// Returns the ids of the added tokens spelled `names`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) with `source_name`, the missing names and the `remedy`.
    pub fn added_ids<const N: usize>(
        &self,
        names: [&'static str; N],
        source_name: &str,
        remedy: &str,
    ) -> Result<[u32; N]> {
        let missing: Vec<&str> = names.into_iter().filter(|name| self.added_id(name).is_none()).collect();
        if missing.is_empty() {
            return Ok(names.map(|name| self.added_id(name).unwrap_or_default()));
        }
        Err(bad_input!("{source_name}: no added token {}; {remedy}", missing.join(", ")))
    }

    /// Returns the id of `<|pad|>`, or else of `<|endoftext|>`; `None` if the vocabulary has neither.
    pub fn pad_id(&self) -> Option<u32> {
        self.0.pad
    }

    /// Returns whether `id` is a special token: a control token, padding, or a reserved token.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns whether a text of `bytes` bytes may fit in `tokens` tokens. If false, the text cannot fit, and
    /// the caller need not tokenise it.
    pub fn may_fit(&self, bytes: usize, tokens: usize) -> bool {
        bytes <= tokens.saturating_mul(self.0.token_bytes_max)
    }

    /// Encodes `text` and recognises special tokens in it. The author of the text must be trusted: special
    /// tokens can imitate another role's message.
    ///
    /// # Errors
    /// The errors of [`Self::encode_text`].
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.0.inner.encode_fast(text, false).map_err(|e| cannot_tokenise(text, &*e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes `text` as ordinary text. The spelling of an added token becomes this token, as in the
    /// `tokenizers` library, but the spelling of a special token becomes ordinary tokens.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput) with the start of the text, when the regular expressions of the
    /// tokenizer take too many steps for it.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_ordinary(text).map_err(|e| cannot_tokenise(text, &*e))
    }

    /// Returns the id of the ordinary entry spelled `text`, even if no merge produces the entry. Embedded
    /// vocabularies have words of templates that no merge produces.
    pub fn entry_id(&self, text: &str) -> Option<u32> {
        self.0.inner.get_model().token_to_id(&to_byte_level(text)).filter(|&id| !self.is_special(id))
    }

    /// Returns the bytes of a token. For a special token these are its spelling. Returns `None` for an id
    /// without a token.
    ///
    /// A character may span several tokens, so join the bytes of tokens before decoding them as UTF-8.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.0.ends.get(id)?;
        let start = if id == 0 { 0 } else { *self.0.ends.get(id - 1)? };
        self.0.bytes.get(start..end).filter(|bytes| !bytes.is_empty())
    }

    /// Decodes `ids`. Special tokens become their spelling. Invalid UTF-8 and ids without a token become
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id).unwrap_or("\u{fffd}".as_bytes()));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Normalises, splits and merges `text`. Unlike [`Self::encode_with_special`], it finds no special
    /// tokens.
    fn encode_ordinary(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let inner = &self.0.inner;
        let mut pieces = self.0.ordinary.extract_and_normalize(inner.get_normalizer(), text);
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| inner.get_model().tokenize(piece.get()))?;
        Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// Checks that no ordinary text is encoded as a special token.
    fn check_special_tokens_unforgeable(&self, source_name: &str) -> Result<()> {
        for token in self.0.inner.get_added_tokens_decoder().values() {
            if self.encode_text(&token.content)?.iter().any(|&id| self.is_special(id)) {
                return Err(bad_input!(
                    "{source_name}: the ordinary text {:?} is encoded as the special token itself, so any text could forge \
                     this token; remove special tokens from model.vocab and model.merges",
                    start_of(&token.content, TEXT_CHARS_SHOWN_MAX)
                ));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

/// Returns whether a `tokenizer.json` names a model other than BPE.
fn has_other_model(json: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        r#type: String,
    }
    serde_json::from_slice::<File>(json).is_ok_and(|file| file.model.r#type != "BPE")
}

fn added_id(inner: &BpeTokenizer, name: &str) -> Option<u32> {
    inner.get_added_vocabulary().get_vocab().get(name).copied()
}

/// Checks that each byte has a token.
fn check_bytes(inner: &BpeTokenizer, source_name: &str) -> Result<()> {
    let is_known = |c: &char| inner.get_model().token_to_id(c.encode_utf8(&mut [0; 4])).is_some();
    match alphabet().iter().filter(|c| !is_known(c)).count() {
        0 => Ok(()),
        missing => Err(bad_input!(
            "{source_name}: {missing} of the 256 bytes have no token of their own; only byte-level BPE vocabularies can be used"
        )),
    }
}

/// Returns the error of a text that the tokenizer cannot split.
fn cannot_tokenise(text: &str, why: &dyn std::error::Error) -> anyhow::Error {
    let (start, bytes) = (start_of(text, TEXT_CHARS_SHOWN_MAX), text.len());
    bad_input!(
        "cannot tokenise the text of {bytes} bytes that begins with {start:?}: {why}; shorten it, or use the tokenizer.json that \
         was published with the model"
    )
}

/// Maximum number of characters of a text that an error shows.
const TEXT_CHARS_SHOWN_MAX: usize = 60;
/// Maximum number of characters of an error of the crate, which may have a text of the file.
const ERROR_CHARS_MAX: usize = 1000;

fn start_of(text: &str, chars_max: usize) -> &str {
    text.char_indices().nth(chars_max).map_or(text, |(end, _)| &text[..end])
}

/// Maximum number of ids. Ids are indices into tables. Real vocabularies are far smaller.
const VOCABULARY_TOKENS_MAX: usize = 1 << 23;

/// Returns the bytes of all tokens, the end of each token in them, and whether each token is special.
fn token_table(inner: &BpeTokenizer, source_name: &str) -> Result<(Vec<u8>, Vec<usize>, Vec<bool>)> {
    let (model, added) = (inner.get_model(), inner.get_added_tokens_decoder());
    // Ids may have gaps, so tokens are counted. A copy of the whole vocabulary would take more time.
    let only_added = added.keys().filter(|id| model.id_to_token(**id).is_none()).count();
    let mut left = model.get_vocab_size() + only_added;
    let ids_max = VOCABULARY_TOKENS_MAX.min(4 * left + (1 << 16));
    let decoder = ByteDecoder::new();
    let (mut bytes, mut ends, mut special) = (vec![], Vec::with_capacity(left), Vec::with_capacity(left));
    for id in 0..ids_max as u32 {
        if left == 0 {
            break;
        }
        let mut is_special = false;
        if let Some(token) = added.get(&id) {
            left -= 1;
            bytes.extend_from_slice(token.content.as_bytes());
            is_special = token.special || is_control_spelling(&token.content);
        } else if let Some(entry) = model.id_to_token(id) {
            left -= 1;
            decoder.decode_into(&entry, &mut bytes);
        }
        ends.push(bytes.len());
        special.push(is_special);
    }
    if left > 0 {
        return Err(bad_input!(
            "{source_name}: each token must have an id of its own, and ids must be below {ids_max}"
        ));
    }
    Ok((bytes, ends, special))
}

/// Returns whether a token is spelled like a control token. Such tokens are special even if the file says
/// otherwise.
fn is_control_spelling(content: &str) -> bool {
    content.starts_with("<|") && content.ends_with("|>")
}
