//! Maps a token's text to its id, if exactly one id has that text.

use crate::vocabulary::Vocabulary;
use std::collections::HashMap;
use std::sync::OnceLock;

/// A table from text to token id. It is built on first use.
pub struct TokenTexts {
    pub(super) tokenizer: Vocabulary,
    /// `None` where several ids have the same bytes.
    ids: OnceLock<HashMap<Vec<u8>, Option<u32>>>,
}

impl TokenTexts {
    pub fn new(tokenizer: Vocabulary) -> Self {
        Self { tokenizer, ids: OnceLock::new() }
    }

    /// Returns the id of the token whose bytes are those of `text`. If `text` has vLLM's optional form
    /// `token_id:N`, the id is N.
    ///
    /// # Errors
    /// When no id or several ids have these bytes, or the text has replacement characters for lost bytes.
    pub(super) fn id(&self, text: &str) -> Result<u64, String> {
        if let Some(id) = text.strip_prefix("token_id:").and_then(|id| id.parse().ok()) {
            return Ok(id);
        }
        match self.ids().get(text.as_bytes()) {
            Some(Some(id)) => Ok(u64::from(*id)),
            Some(None) => Err(format!("{text:?} is the text of several tokens; make the engine write ids")),
            None => Err(format!(
                "no token of this model's tokenizer has the text {text:?}; make the engine write ids"
            )),
        }
    }

    fn ids(&self) -> &HashMap<Vec<u8>, Option<u32>> {
        self.ids.get_or_init(|| {
            let mut ids = HashMap::new();
            for id in 0..self.tokenizer.vocab_size() as u32 {
                let Some(bytes) = self.tokenizer.token_bytes(id) else { continue };
                ids.entry(bytes.to_vec()).and_modify(|other| *other = None).or_insert(Some(id));
            }
            ids
        })
    }
}
