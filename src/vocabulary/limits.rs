//! Limits of a `tokenizer.json`. The file lists steps, such as normalizers and pre-tokenizers, and the
//! `tokenizers` crate runs all of them. Even a small file can have steps that lengthen a text without bound.
//! Such steps are refused before the crate reads the file.

use anyhow::{Result, bail, ensure};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Maximum number of values and keys of a section that lists steps. The longest known section has about 50.
const STEP_VALUES_MAX: usize = 1000;
/// Maximum total bytes of the strings of a section that lists steps, patterns included. The longest known
/// section has about 1 KiB.
const STEP_BYTES_MAX: usize = 16 << 10;
/// Maximum number of values and keys of the vocabulary, and of the added tokens. The vocabulary of GPT-OSS
/// has 2 million.
pub(crate) const VOCABULARY_VALUES_MAX: usize = 8_000_000;
/// Maximum total bytes of all regular expressions.
const PATTERN_BYTES_MAX: usize = 4096;
/// Maximum number of counted repetitions, such as `x{900}`. Each compiles to at most 10 MB.
const REPETITIONS_MAX: usize = 8;
/// Maximum number of added tokens. GPT-OSS has about 1,100.
const ADDED_TOKENS_MAX: usize = 10_000;
/// Maximum number of steps of one section.
const STEPS_MAX: usize = 16;

/// Allowed normalizers. They lengthen a text no more than one Unicode normalization does.
const NORMALIZERS: &str = "Sequence NFC NFD NFKC NFKD Lowercase StripAccents Strip";
const NORMALIZER_KEYS: &str = "type normalizers strip_left strip_right";
/// Allowed pre-tokenizers. They split a text without changing it. The exception is `ByteLevel`: it may double
/// the length of the text, so it is allowed only once.
const PRE_TOKENIZERS: &str = "Sequence Split ByteLevel Digits Punctuation Whitespace WhitespaceSplit \
    CharDelimiterSplit UnicodeScripts BertPreTokenizer";
const PRE_TOKENIZER_KEYS: &str = "type pretokenizers pattern Regex String behavior invert add_prefix_space \
    trim_offsets use_regex individual_digits delimiter";

/// The sections of a `tokenizer.json` that are checked.
#[derive(Deserialize)]
struct TokenizerSections {
    normalizer: Option<Steps>,
    pre_tokenizer: Option<Steps>,
    post_processor: Option<Steps>,
    decoder: Option<Steps>,
    added_tokens: Option<Vec<TokenId>>,
    #[serde(rename = "model")]
    _model: Option<SectionCounter>,
}

/// An added token of the file.
#[derive(Deserialize)]
pub(super) struct TokenId {
    pub(super) id: u32,
    pub(super) content: String,
}

/// Checks that the steps of the file take bounded time and memory. Returns the added tokens. The crate
/// reports other errors.
///
/// # Errors
/// The message names the value that exceeds its limit, and the limit.
pub(super) fn check(json: &[u8]) -> Result<Vec<TokenId>> {
    let parsed: TokenizerSections = serde_json::from_slice(json)?;
    let TokenizerSections { normalizer, pre_tokenizer, post_processor, decoder, .. } = &parsed;
    let tokens = parsed.added_tokens.as_ref().map_or(0, Vec::len);
    ensure!(tokens <= ADDED_TOKENS_MAX, "it has {tokens} added tokens; the limit is {ADDED_TOKENS_MAX}");
    let sections = [
        ("normalizer", normalizer, Some((NORMALIZERS, NORMALIZER_KEYS))),
        ("pre_tokenizer", pre_tokenizer, Some((PRE_TOKENIZERS, PRE_TOKENIZER_KEYS))),
        ("post_processor", post_processor, None),
        ("decoder", decoder, None),
    ];
    let (mut pattern_bytes, mut repetitions) = (0, 0);
    for (section, steps, allowed) in sections {
        let Some(Steps(steps)) = steps else { continue };
        if steps.types.len() > STEPS_MAX {
            bail!("{section} has {} steps; the limit is {STEPS_MAX}", steps.types.len());
        }
        if let Some((types, keys)) = allowed {
            if let Some(other) = steps.types.iter().find(|name| !types.split(' ').any(|known| known == *name))
            {
                bail!(
                    "{section} {other:?} may lengthen a text without bound; the steps of byte-level BPE are {}",
                    types.replace(' ', ", ")
                );
            }
            if let Some(other) = steps.keys.iter().find(|key| !keys.split(' ').any(|known| known == *key)) {
                bail!("{section} has the key {other:?}, which no step of byte-level BPE has");
            }
        }
        let count = |names: &[String], wanted: &str| names.iter().filter(|name| *name == wanted).count();
        if count(&steps.types, "ByteLevel").max(count(&steps.keys, "add_prefix_space")) > 1 {
            bail!("{section} has \"ByteLevel\" more than once; each one may double the length of a text");
        }
        pattern_bytes += steps.pattern_bytes;
        repetitions += steps.repetitions;
    }
    if pattern_bytes > PATTERN_BYTES_MAX || repetitions > REPETITIONS_MAX {
        bail!(
            "its regular expressions have {pattern_bytes} bytes and {repetitions} counted repetitions; at most \
             {PATTERN_BYTES_MAX} and {REPETITIONS_MAX} are allowed"
        );
    }
    Ok(parsed.added_tokens.unwrap_or_default())
}

/// A section that lists steps.
struct Steps(SectionContents);

/// A section whose values are counted and not kept.
struct SectionCounter;

impl<'de> Deserialize<'de> for Steps {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut contents = SectionContents {
            values_left: STEP_VALUES_MAX,
            bytes_left: STEP_BYTES_MAX,
            ..SectionContents::default()
        };
        SectionVisitor { contents: &mut contents, keeps: true, key: "" }.deserialize(from)?;
        Ok(Self(contents))
    }
}

impl<'de> Deserialize<'de> for SectionCounter {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut contents = SectionContents {
            values_left: VOCABULARY_VALUES_MAX,
            bytes_left: usize::MAX,
            ..SectionContents::default()
        };
        SectionVisitor { contents: &mut contents, keeps: false, key: "" }.deserialize(from)?;
        Ok(Self)
    }
}

/// The contents of a section.
#[derive(Default)]
struct SectionContents {
    values_left: usize,
    bytes_left: usize,
    /// Values of all keys named `type`.
    types: Vec<String>,
    keys: Vec<String>,
    /// Total length of the values of all keys named `Regex`, in bytes.
    pattern_bytes: usize,
    repetitions: usize,
}

/// Visits one value under `key`. If `keeps` is true, it stores the keys and the values of `type`.
struct SectionVisitor<'a> {
    contents: &'a mut SectionContents,
    keeps: bool,
    key: &'a str,
}

impl SectionVisitor<'_> {
    fn count<E: Error>(&mut self, bytes: usize) -> Result<(), E> {
        let left = (self.contents.values_left.checked_sub(1), self.contents.bytes_left.checked_sub(bytes));
        let (Some(values), Some(bytes)) = left else {
            return Err(E::custom("a section is longer than that of any byte-level BPE tokenizer"));
        };
        (self.contents.values_left, self.contents.bytes_left) = (values, bytes);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for SectionVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for SectionVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(mut self) -> Result<(), E> {
        self.count(0)
    }

    fn visit_bool<E: Error>(mut self, _: bool) -> Result<(), E> {
        self.count(0)
    }

    fn visit_i64<E: Error>(mut self, _: i64) -> Result<(), E> {
        self.count(0)
    }

    fn visit_u64<E: Error>(mut self, _: u64) -> Result<(), E> {
        self.count(0)
    }

    fn visit_f64<E: Error>(mut self, _: f64) -> Result<(), E> {
        self.count(0)
    }

    fn visit_str<E: Error>(mut self, text: &str) -> Result<(), E> {
        self.count(text.len())?;
        match self.key {
            "type" if self.keeps => self.contents.types.push(text.to_owned()),
            "Regex" => {
                self.contents.pattern_bytes += text.len();
                let is_repetition =
                    |pair: &[u8]| pair[0] == b'{' && (pair[1].is_ascii_digit() || pair[1] == b',');
                self.contents.repetitions +=
                    text.as_bytes().windows(2).filter(|pair| is_repetition(pair)).count();
            }
            _ => {}
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut values: A) -> Result<(), A::Error> {
        self.count(0)?;
        let Self { contents, keeps, key } = self;
        while values.next_element_seed(SectionVisitor { contents: &mut *contents, keeps, key })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        self.count(0)?;
        while let Some(key) = entries.next_key::<String>()? {
            self.count(key.len())?;
            let visitor = SectionVisitor { contents: &mut *self.contents, keeps: self.keeps, key: &key };
            entries.next_value_seed(visitor)?;
            if self.keeps {
                self.contents.keys.push(key);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(section: &str, steps: &str) -> String {
        check(format!("{{\"{section}\": {steps}}}").as_bytes())
            .map_or_else(|e| e.to_string(), |_| String::new())
    }

    /// Returns `{"type": "Sequence", NAME: [STEP, ...]}` with `count` steps.
    fn sequence(name: &str, step: &str, count: usize) -> String {
        format!("{{\"type\": \"Sequence\", \"{name}\": [{}]}}", vec![step; count].join(","))
    }

    #[test]
    fn steps_that_lengthen_a_text_without_bound_are_refused() {
        let long = "x".repeat(100);
        let replace =
            format!("{{\"type\": \"Replace\", \"pattern\": {{\"String\": \"x\"}}, \"content\": \"{long}\"}}");
        for (section, steps, word) in [
            ("normalizer", sequence("normalizers", &replace, 8), "\"Replace\" may lengthen"),
            ("normalizer", "{\"type\": \"Prepend\", \"prepend\": \"x\"}".into(), "\"Prepend\" may lengthen"),
            ("normalizer", "{\"type\": \"ByteLevel\"}".into(), "\"ByteLevel\" may lengthen"),
            // The crate also recognises steps by their keys alone.
            ("normalizer", "{\"prepend\": \"x\"}".into(), "the key \"prepend\""),
            ("normalizer", "{\"type\": \"Strip\", \"prepend\": \"x\"}".into(), "the key \"prepend\""),
            ("normalizer", sequence("normalizers", "{\"type\": \"NFC\"}", 17), "18 steps"),
            ("normalizer", format!("{{\"type\": \"{}\"}}", "x".repeat(1 << 20)), "longer than that of any"),
            (
                "pre_tokenizer",
                "{\"type\": \"Metaspace\", \"replacement\": \"_\"}".into(),
                "\"Metaspace\" may lengthen",
            ),
            ("pre_tokenizer", sequence("pretokenizers", "{\"type\": \"ByteLevel\"}", 2), "more than once"),
            (
                "pre_tokenizer",
                sequence("pretokenizers", "{\"add_prefix_space\": false}", 2),
                "more than once",
            ),
            (
                "pre_tokenizer",
                format!(
                    "{{\"type\": \"Split\", \"pattern\": {{\"Regex\": \"{}\"}}}}",
                    "(?=\\\\w{900})".repeat(9)
                ),
                "9 counted repetitions",
            ),
            (
                "decoder",
                format!("{{\"type\": \"Replace\", \"pattern\": {{\"Regex\": \"{}\"}}}}", "x".repeat(5000)),
                "have 5000 bytes",
            ),
            ("post_processor", format!("[{}0]", "0,".repeat(1001)), "longer than that of any"),
            ("model", format!("[{}0]", "0,".repeat(8_000_001)), "longer than that of any"),
        ] {
            let text = said(section, &steps);
            assert!(text.contains(word), "{section}: {word:?} is not in {text:?}");
        }
    }

    #[test]
    fn the_steps_of_published_tokenizers_are_taken() {
        let split = |pattern: &str| {
            format!(
                "{{\"type\": \"Split\", \"pattern\": {{\"Regex\": \"{pattern}\"}}, \"behavior\": \"Isolated\", \"invert\": false}}"
            )
        };
        let bytes = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": false}";
        let steps = format!(
            "{{\"type\": \"Sequence\", \"pretokenizers\": [{}, {}, {{\"type\": \"Digits\", \"individual_digits\": true}}, {bytes}]}}",
            split("\\\\p{N}{1,3}"),
            split("[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\s+(?!\\\\S)")
        );
        assert_eq!(said("pre_tokenizer", &steps), "");
        assert_eq!(said("normalizer", "{\"type\": \"NFC\"}"), "");
        assert_eq!(said("normalizer", "null"), "");
        assert_eq!(said("decoder", bytes), "");
    }
}
