//! Reads the tokenizer of a GGUF file: from its lists, and in the format of `tokenizer.json`, which
//! checkpoints store.

use super::file::MetadataValue;
use super::metadata::Metadata;
use crate::bad_input;
use crate::panics::catch_panic;
use crate::vocabulary::{BoundedPreTokenizer, BpeTokenizer, VOCABULARY_VALUES_MAX, Vocabulary};
use anyhow::Result;
use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, NormalizerWrapper};

/// The numbers of token kinds in `tokenizer.ggml.token_type`.
pub(super) const NORMAL: i32 = 1;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;
pub(super) const UNUSED: i32 = 5;

/// A pre-tokenizer of GGUF: the steps of a tokenizer before its merges.
pub(super) struct PreTokenizer {
    /// The name in `tokenizer.ggml.pre`.
    pub(super) name: &'static str,
    /// The regular expression that splits a text.
    pub(super) pattern: &'static str,
    /// Whether a text is normalized to NFC before the split.
    normalizes: bool,
    /// Whether merges are skipped for a part of the text that is itself an entry of the vocabulary.
    ignores_merges: bool,
}

pub(super) const PRE_TOKENIZERS: [PreTokenizer; 2] = [
    PreTokenizer {
        name: "qwen2",
        pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizes: true,
        ignores_merges: false,
    },
    PreTokenizer {
        name: "gpt-4o",
        pattern: r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizes: false,
        ignores_merges: true,
    },
];

impl Metadata<'_> {
    /// Returns the tokenizer. Its two forms are built on two threads, because a vocabulary has hundreds of
    /// thousands of entries.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the tokenizer is damaged or is not supported.
    pub(super) fn vocabulary(&self) -> Result<Vocabulary> {
        let lists = self.tokenizer_lists()?;
        let build = || catch_panic(|| lists.build()).and_then(|built| built);
        let (json, tokenizer) = rayon::join(|| serde_json::to_vec(&lists.to_json()), build);
        let source_name = self.place.display().to_string();
        let tokenizer = tokenizer.map_err(|why| {
            bad_input!("{source_name}: its tokenizer is damaged: {why:.500}; fetch the file again")
        })?;
        Vocabulary::from_tokenizer(tokenizer, json?, &source_name)
    }

    /// Returns the lists of the tokenizer, of matching lengths.
    fn tokenizer_lists(&self) -> Result<TokenizerLists<'_>> {
        let refused = |what: String| bad_input!("{}: {what}", self.place.display());
        let (model, pre) = (self.word("tokenizer.ggml.model"), self.word("tokenizer.ggml.pre"));
        let pre_tokenizer = PRE_TOKENIZERS.iter().find(|known| pre == Some(known.name));
        let (Some("gpt2"), Some(pre_tokenizer)) = (model, pre_tokenizer) else {
            let known: Vec<&str> = PRE_TOKENIZERS.iter().map(|known| known.name).collect();
            return Err(refused(format!(
                "its tokenizer is {:?} with the pre-tokenizer {:?}; only \"gpt2\" with {} is supported; use the model's Hugging Face folder",
                model.unwrap_or("absent"),
                pre.unwrap_or("absent"),
                known.join(" or ")
            )));
        };
        let lists =
            ["tokens", "token_type", "merges"].map(|key| self.values.get(&format!("tokenizer.ggml.{key}")));
        let [
            Some(MetadataValue::Texts(tokens)),
            Some(MetadataValue::Integers(kinds)),
            Some(MetadataValue::Texts(merges)),
        ] = lists
        else {
            return Err(refused(
                "tokenizer.ggml.tokens, token_type or merges is absent or has the wrong type; fetch the file again".into(),
            ));
        };
        if tokens.len() != kinds.len() {
            return Err(refused(format!(
                "the tokenizer has {} tokens, but {} token types; fetch the file again",
                tokens.len(),
                kinds.len()
            )));
        }
        // The limit of a `tokenizer.json`, which checkpoints of this model have.
        if 2 * tokens.len() + 3 * merges.len() > VOCABULARY_VALUES_MAX {
            return Err(refused(
                "the tokenizer is longer than that of any model; fetch the file again".into(),
            ));
        }
        Ok(TokenizerLists { pre_tokenizer, tokens, kinds, merges })
    }
}

/// The lists of a tokenizer in the metadata.
struct TokenizerLists<'a> {
    pre_tokenizer: &'static PreTokenizer,
    tokens: &'a [String],
    kinds: &'a [i32],
    merges: &'a [String],
}

impl<'a> TokenizerLists<'a> {
    /// Returns the entries of the vocabulary: each token that is in use, with its id. Added tokens are
    /// entries too. Otherwise readers of `tokenizer.json` would renumber the other tokens.
    fn entries(&self) -> impl Iterator<Item = (&'a String, u32)> + use<'a> {
        let tokens = (0..).zip(self.tokens.iter().zip(self.kinds));
        tokens.filter(|(_, (_, kind))| **kind != UNUSED).map(|(id, (token, _))| (token, id))
    }

    /// Returns the added tokens: id, content, and whether the token is special.
    fn added(&self) -> impl Iterator<Item = (usize, &'a String, bool)> + use<'a> {
        let tokens = self.tokens.iter().zip(self.kinds).enumerate();
        let added = tokens.filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind));
        added.map(|(id, (token, kind))| (id, token, *kind == CONTROL))
    }

    /// Returns the tokenizer in the format of `tokenizer.json`.
    fn to_json(&self) -> TokenizerJson<'_> {
        let added = self.added().map(|(id, token, special)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            })
        });
        TokenizerJson {
            version: "1.0",
            added_tokens: added.collect(),
            normalizer: self.pre_tokenizer.normalizer(),
            pre_tokenizer: self.pre_tokenizer.steps(),
            post_processor: byte_level(),
            decoder: byte_level(),
            model: BpeJson {
                kind: "BPE",
                ignore_merges: self.pre_tokenizer.ignores_merges,
                vocab: self,
                merges: MergesJson(self.merges),
            },
        }
    }

    /// Builds the tokenizer that [`Self::to_json`] describes. Parsing the text would take three times as
    /// long.
    ///
    /// # Errors
    /// The reason why the lists are no tokenizer.
    fn build(&self) -> Result<BpeTokenizer, String> {
        let vocab: Vocab = self.entries().map(|(token, id)| (token.clone(), id)).collect();
        let parts = |merge: &String| match merge.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => Err(format!("the merge {merge:?} has one part")),
        };
        let merges: Merges = self.merges.iter().map(parts).collect::<Result<_, _>>()?;
        let model = BPE::builder().vocab_and_merges(vocab, merges);
        let model = model.ignore_merges(self.pre_tokenizer.ignores_merges).build();
        let mut tokenizer = BpeTokenizer::new(model.map_err(|e| e.to_string())?);
        let normalizer: Option<NormalizerWrapper> = parsed(self.pre_tokenizer.normalizer())?;
        let steps: BoundedPreTokenizer = parsed(self.pre_tokenizer.steps())?;
        tokenizer.with_pre_tokenizer(Some(steps));
        tokenizer.with_normalizer(normalizer).map_err(|e| e.to_string())?;
        let added = self.added();
        let added = added.map(|(_, token, special)| AddedToken::from(token, special).normalized(false));
        tokenizer.add_tokens(added).map_err(|e| e.to_string())?;
        Ok(tokenizer)
    }
}

fn parsed<T: DeserializeOwned>(step: Json) -> Result<T, String> {
    serde_json::from_value(step).map_err(|e| e.to_string())
}

fn byte_level() -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

impl PreTokenizer {
    fn normalizer(&self) -> Json {
        if self.normalizes { json!({"type": "NFC"}) } else { Json::Null }
    }

    fn steps(&self) -> Json {
        let split = json!({"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [split, byte_level()]})
    }
}

/// A `tokenizer.json`. It is written without intermediate values.
#[derive(Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: BpeJson<'a>,
}

#[derive(Serialize)]
struct BpeJson<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    ignore_merges: bool,
    #[serde(serialize_with = "serialize_entries")]
    vocab: &'a TokenizerLists<'a>,
    merges: MergesJson<'a>,
}

fn serialize_entries<S: Serializer>(lists: &TokenizerLists, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(lists.entries())
}

/// The merges, each as a list of its two parts.
struct MergesJson<'a>(&'a [String]);

impl Serialize for MergesJson<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|merge| merge.splitn(2, ' ').collect::<Vec<_>>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::gguf::GgufModel;
    use std::path::Path;

    #[test]
    fn the_tokenizer_is_the_one_that_its_json_describes() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/gpt_oss.gguf");
        let vocabulary = GgufModel::open(&fixture).unwrap().vocabulary;
        let from_json = Vocabulary::from_bytes(vocabulary.json_bytes().to_vec(), "tokenizer.json").unwrap();
        assert_eq!(vocabulary.tokenizer_json(), from_json.tokenizer_json());
        for known in &PRE_TOKENIZERS {
            let tokens = ["a", "b", "ab", "b a", "<s>", "<u>", "gone"].map(String::from);
            let kinds = [NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, USER_DEFINED, UNUSED];
            let merges = ["a b".to_owned()];
            let lists =
                TokenizerLists { pre_tokenizer: known, tokens: &tokens, kinds: &kinds, merges: &merges };
            let json = serde_json::to_vec(&lists.to_json()).unwrap();
            let mut parsed: BpeTokenizer = serde_json::from_slice(&json).unwrap();
            let mut built = lists.build().unwrap();
            for tokenizer in [&mut parsed, &mut built] {
                tokenizer.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
                tokenizer.with_decoder(None::<tokenizers::DecoderWrapper>);
            }
            let text = |tokenizer: &BpeTokenizer| serde_json::to_string(tokenizer).unwrap();
            assert_eq!(text(&built), text(&parsed), "{}", known.name);
            assert!(text(&built).contains(r#"["a","b"]"#));
        }
    }
}
