//! Vocabularies: encoding of text to ids and back, over any byte-level BPE `tokenizer.json` of Hugging Face.
//!
//! Text is always ordinary text: text of a user, a tool or a model can never become a control token.

mod byte_level;
mod embedded_vocabulary;
mod limits;

pub use embedded_vocabulary::embedded_json;

use crate::bad_input;
use crate::bounded_file::{self, TOKENIZER_BYTES_MAX};
use crate::panics::catch_panic;
use anyhow::{Result, anyhow};
use byte_level::{ByteDecoder, alphabet, to_byte_level};
use std::path::Path;
use std::sync::Arc;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizedString, Normalizer, OffsetType, PostProcessorWrapper,
    PreTokenizedString, PreTokenizer, Tokenizer,
};

/// A byte-level BPE vocabulary. A clone shares the tables.
#[derive(Clone)]
pub struct Vocabulary(Arc<Tables>);

struct Tables {
    inner: Tokenizer,
    json: Vec<u8>,
    pad: Option<u32>,
    /// Bytes of all tokens, concatenated; token `id` is `bytes[ends[id - 1]..ends[id]]`.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Whether the id is a special token.
    special: Vec<bool>,
    /// The id of each single byte.
    byte_ids: Vec<u32>,
    /// Length of the longest token in bytes.
    token_bytes_max: usize,
}

impl Vocabulary {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`BadInput`](crate::error::BadInput), naming the file, when it cannot be read, is no byte-level BPE
    /// tokenizer, or would let ordinary text become a special token.
    pub fn from_file(path: &Path) -> Result<Self> {
        let place = path.display().to_string();
        let json = bounded_file::read(path, TOKENIZER_BYTES_MAX).map_err(|e| {
            bad_input!("{place}: {e}; a checkpoint folder needs the tokenizer.json that came with the model")
        })?;
        Self::from_bytes(json, &place)
    }

    /// Reads the bytes of a `tokenizer.json`; error messages name it `place`.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_bytes(json: Vec<u8>, place: &str) -> Result<Self> {
        let refused =
            |why: &str| bad_input!("{place}: not a Hugging Face tokenizer.json: {why}; take the model's own");
        limits::check(&json).map_err(|why| refused(&why.to_string()))?;
        // The crate panics on truncated or invalid files.
        let parsed = catch_panic(|| Tokenizer::from_bytes(&json)).map_err(|why| refused(&why))?;
        let mut inner = parsed.map_err(|e| refused(&e.to_string()))?;
        // Ignore padding and truncation in the file: encoding always gives all tokens of a text and no
        // others.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| anyhow!("{place}: {e}"))?;
        // The post-processor and the decoder are not used.
        inner.with_post_processor(None::<PostProcessorWrapper>);
        inner.with_decoder(None::<DecoderWrapper>);
        match inner.get_model() {
            ModelWrapper::BPE(bpe) if bpe.dropout.is_none_or(|p| p == 0.0) => {}
            ModelWrapper::BPE(_) => {
                return Err(bad_input!("{place}: model.dropout makes ids random; set it to null"));
            }
            _ => return Err(bad_input!("{place}: model.type must be BPE, of the byte-level kind")),
        }
        let pad = ["<|pad|>", "<|endoftext|>"].iter().find_map(|name| added_id(&inner, name));
        let byte_ids = find_bytes(&inner, place)?;
        let (bytes, ends, special) = token_table(&inner, place)?;
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let token_bytes_max = ends.iter().zip(starts).map(|(end, start)| end - start).max().unwrap_or(0);
        let tables = Tables { inner, json, pad, bytes, ends, special, byte_ids, token_bytes_max };
        let tokenizer = Self(Arc::new(tables));
        tokenizer.refuse_forgeable(place)?;
        Ok(tokenizer)
    }

    /// Returns the source `tokenizer.json`, for checkpoint folders.
    pub fn json_bytes(&self) -> &[u8] {
        &self.0.json
    }

    /// Returns the number of ids, added tokens included: the highest id plus one.
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
    /// [`BadInput`](crate::error::BadInput) with `place`, the missing names and the `remedy`.
    pub fn added_ids<const N: usize>(
        &self,
        names: [&'static str; N],
        place: &str,
        remedy: &str,
    ) -> Result<[u32; N]> {
        let missing: Vec<&str> = names.into_iter().filter(|name| self.added_id(name).is_none()).collect();
        if missing.is_empty() {
            return Ok(names.map(|name| self.added_id(name).unwrap_or_default()));
        }
        Err(bad_input!("{place}: no added token {}; {remedy}", missing.join(", ")))
    }

    /// Returns `<|pad|>`, or else `<|endoftext|>`, if the vocabulary has one.
    pub fn pad_id(&self) -> Option<u32> {
        self.0.pad
    }

    /// Whether `id` is a special token: a control token, padding, or a reserved one.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Whether a text of `bytes` bytes may fit in `tokens` tokens. If false, it cannot, and need not be
    /// tokenised.
    pub fn may_fit(&self, bytes: usize, tokens: usize) -> bool {
        bytes <= tokens.saturating_mul(self.0.token_bytes_max)
    }

    /// Encodes `text` with special tokens recognised: for texts of a trusted author, such as an engine's
    /// prompt.
    ///
    /// # Errors
    /// When the tokenizer's pattern fails on the text.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.0.inner.encode_fast(text, false).map_err(|e| anyhow!("cannot tokenise: {e}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes `text` as ordinary text: a special token's spelling in it becomes ordinary tokens.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        // Every byte has a token, so no step should fail; encoding by bytes is still correct.
        self.encode_ordinary(text)
            .unwrap_or_else(|_| text.bytes().map(|b| self.0.byte_ids[usize::from(b)]).collect())
    }

    /// Returns the ordinary entry spelled `text`, whether or not merges produce it. Embedded vocabularies
    /// hold template words that no merge produces.
    pub fn entry_id(&self, text: &str) -> Option<u32> {
        self.0.inner.get_model().token_to_id(&to_byte_level(text)).filter(|&id| !self.is_special(id))
    }

    /// Returns the bytes of a token, or a special token's spelling; `None` for an id without a token.
    ///
    /// A character may span tokens: join the bytes of several tokens before decoding them as UTF-8.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.0.ends.get(id)?;
        let start = if id == 0 { 0 } else { *self.0.ends.get(id - 1)? };
        self.0.bytes.get(start..end).filter(|bytes| !bytes.is_empty())
    }

    /// Decodes `ids`, with special tokens spelled out. Invalid UTF-8 and ids without a token become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id).unwrap_or("\u{fffd}".as_bytes()));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Normalises, splits and merges, without the search for added tokens of [`Self::encode_with_special`].
    fn encode_ordinary(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let inner = &self.0.inner;
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = inner.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        let model = inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get()))?;
        Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// Refuses a vocabulary whose merges produce special tokens: ordinary text could then forge them.
    fn refuse_forgeable(&self, place: &str) -> Result<()> {
        for token in self.0.inner.get_added_tokens_decoder().values() {
            if self.encode_text(&token.content).iter().any(|&id| self.is_special(id)) {
                return Err(bad_input!(
                    "{place}: the ordinary text {:?} is encoded as the special token itself, so that any text could \
                     forge it; take special tokens out of model.vocab and model.merges",
                    token.content
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

fn added_id(inner: &Tokenizer, name: &str) -> Option<u32> {
    inner.get_added_vocabulary().get_vocab().get(name).copied()
}

fn find_bytes(inner: &Tokenizer, place: &str) -> Result<Vec<u32>> {
    let model = inner.get_model();
    let find = |c: char| model.token_to_id(c.encode_utf8(&mut [0; 4]));
    let ids: Vec<u32> = alphabet().into_iter().filter_map(find).collect();
    if ids.len() == 256 {
        return Ok(ids);
    }
    Err(bad_input!(
        "{place}: {} of the 256 bytes have no token of their own; only byte-level BPE vocabularies can be used",
        256 - ids.len()
    ))
}

/// Largest number of ids, which are indices into tables; real vocabularies are far smaller.
const VOCABULARY_TOKENS_MAX: usize = 1 << 23;

/// Returns the bytes of all tokens, the end of each, and whether it is special.
fn token_table(inner: &Tokenizer, place: &str) -> Result<(Vec<u8>, Vec<usize>, Vec<bool>)> {
    let added = inner.get_added_tokens_decoder();
    let mut entries: Vec<(String, u32)> = inner.get_vocab(true).into_iter().collect();
    entries.sort_unstable_by_key(|(_, id)| *id);
    let size = entries.last().map_or(0, |(_, id)| *id as usize + 1);
    if size > VOCABULARY_TOKENS_MAX {
        return Err(bad_input!(
            "{place}: the highest id is {}; ids must be below {VOCABULARY_TOKENS_MAX}",
            size - 1
        ));
    }
    let decoder = ByteDecoder::new();
    let (mut bytes, mut ends, mut special) = (Vec::new(), Vec::with_capacity(size), vec![false; size]);
    for (entry, id) in entries {
        let id = id as usize;
        ends.resize(id.max(ends.len()), bytes.len());
        match added.get(&(id as u32)) {
            Some(token) => {
                bytes.extend_from_slice(token.content.as_bytes());
                special[id] = token.special || is_control_spelling(&token.content);
            }
            None => decoder.decode_into(&entry, &mut bytes),
        }
        ends.resize(id + 1, bytes.len());
    }
    Ok((bytes, ends, special))
}

/// Whether a token is spelled like a control token: those are special whatever the file says.
fn is_control_spelling(content: &str) -> bool {
    content.starts_with("<|") && content.ends_with("|>")
}
