//! Supervised examples: the task's demonstrations, or conversations and tokens from JSON lines.

use crate::actor::micro_batch::Sequence;
use crate::bad_input;
use crate::chat::ConversationRenderer;
use crate::harmony::MaskedTokens;
use crate::random::Purpose;
use crate::tasks::Task;
use crate::tasks::rows::{self, EpochOrder};
use anyhow::Result;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The source of supervised examples.
pub enum Examples {
    /// Rows of a file, shuffled again in each epoch.
    Rows { sequences: Arc<[Sequence]>, order: EpochOrder },
    /// The task's own demonstrations.
    Demonstrations,
}

impl From<MaskedTokens> for Sequence {
    fn from(rendered: MaskedTokens) -> Self {
        let MaskedTokens { tokens, mask } = rendered;
        Sequence { tokens, mask, kept_tokens: vec![] }
    }
}

/// The rows of a file.
pub struct SftRows {
    pub sequences: Vec<Sequence>,
    /// A warning about keys that have no meaning here.
    pub warning: Option<String>,
}

/// Reads up to `rows_max` JSON lines. Each line is `{"messages": [...]}` or `{"tokens": [...], "mask":
/// [...]}`.
///
/// # Errors
/// [`crate::error::BadInput`] that names the file and the row.
pub fn read_rows(renderer: &ConversationRenderer, path: &Path, rows_max: Option<usize>) -> Result<SftRows> {
    let format = "{\"messages\": [...]} or {\"tokens\": [...], \"mask\": [...]}";
    let unused = RefCell::new(BTreeSet::new());
    let sequences = rows::read(path, rows_max, format, |row| {
        unused.borrow_mut().append(&mut renderer.unused_keys(row)?);
        renderer.render_row(row).map(Sequence::from).map_err(|e| format!("{e:#}"))
    })?;
    let keys = unused.into_inner().into_iter().collect::<Vec<_>>().join(", ");
    let path = path.display();
    let warning =
        (!keys.is_empty()).then(|| format!("{path}: keys without a meaning here are not read: {keys}"));
    Ok(SftRows { sequences, warning })
}

impl Examples {
    /// Returns the examples of `rows`; without rows, the task's demonstrations.
    pub fn new(rows: Option<Arc<[Sequence]>>) -> Self {
        match rows {
            Some(sequences) => {
                let order = EpochOrder::new(sequences.len(), Purpose::Shuffle);
                Examples::Rows { sequences, order }
            }
            None => Examples::Demonstrations,
        }
    }

    /// Returns the examples `start..start + count`. The sequence of examples is endless.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the task has no demonstrations.
    pub fn batch(
        &self,
        renderer: &ConversationRenderer,
        task: &dyn Task,
        seed: u64,
        start: u64,
        count: usize,
    ) -> Result<Vec<Sequence>> {
        (start..start + count as u64)
            .map(|index| match self {
                Examples::Rows { sequences, order } => Ok(sequences[order.row(seed, index)].clone()),
                Examples::Demonstrations => {
                    let demonstration = task.demonstration(seed, index).ok_or_else(|| {
                        bad_input!(
                            "cold_start.train_file: the task {} has no demonstrations; name a JSONL file, or set cold_start.steps = 0",
                            task.name()
                        )
                    })?;
                    renderer.render_demonstration(&demonstration.messages).map(Sequence::from)
                }
            })
            .collect()
    }
}
