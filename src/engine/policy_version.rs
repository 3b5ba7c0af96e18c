//! Versions of the weights, which requests hold.

use crate::model::decoder_stack::DecoderStack;
use crate::model::forward::{ForwardOptions, Model};
use crate::model::policy_view::PolicyView;
use crate::model::weights::Weights;
use crate::ops::logits::{Logits, SamplingParameters};
use anyhow::Result;
use candle_core::Tensor;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A version of the weights. Clones are the same version; it lives until the last of them is dropped.
///
/// Its weights must not change. Those of trained parameters are taken from
/// [`crate::model::parameters::Parameters::snapshot`] if updates follow while the version is in use.
#[derive(Clone)]
pub struct PolicyVersion(Arc<Version>);

/// A version, and the number of its consecutive tokens in a forward.
pub(super) type VersionTokens = (PolicyVersion, usize);

struct Version {
    number: u64,
    /// A number that no other version of this process has or had.
    id: u64,
    model: Model,
    weights: Arc<Weights>,
    forward: ForwardOptions,
}

impl PolicyVersion {
    /// Returns a new version with the weights of `policy`. Completions name it by `number`.
    pub fn new(number: u64, policy: PolicyView) -> Self {
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let PolicyView { model, weights, forward } = policy;
        let id = 1 + LAST_ID.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(Version { number, id, model: model.clone(), weights, forward }))
    }

    /// Returns the number by which completions name the version.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Returns a number that no other version has or had.
    pub(super) fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns the policy.
    pub(super) fn policy(&self) -> PolicyView<'_> {
        let Version { model, weights, forward, .. } = &*self.0;
        PolicyView { model, weights: weights.clone(), forward: *forward }
    }

    /// Returns the model.
    pub(super) fn model(&self) -> &Model {
        &self.0.model
    }

    /// Returns the weights.
    pub(super) fn weights(&self) -> &Arc<Weights> {
        &self.0.weights
    }

    /// Returns the decoder stack of the version.
    pub(super) fn decoder_stack(&self) -> DecoderStack<'_> {
        self.decoder_stack_with(&self.0.weights)
    }

    /// Returns the decoder stack of the version with other weights.
    pub(super) fn decoder_stack_with<'a>(&'a self, weights: &'a Weights) -> DecoderStack<'a> {
        DecoderStack { model: &self.0.model, weights, forward: self.0.forward }
    }

    /// Returns whether one forward pass may have tokens of both versions: on a CPU, if they differ by
    /// adapters alone.
    pub(super) fn can_share_pass(&self, other: &Self) -> bool {
        let (own, others) = (&*self.0, &*other.0);
        self == other
            || own.weights.device().is_cpu()
                && own.model.is_same(&others.model)
                && own.forward == others.forward
                && own.weights.shares_base(&others.weights)
    }

    /// Returns the weights of a pass of `parts`, whose versions can share a pass.
    ///
    /// # Errors
    /// Errors of [`Weights::by_tokens`].
    pub(super) fn weights_by_tokens(parts: &[VersionTokens]) -> Result<Arc<Weights>> {
        Ok(match parts {
            [(version, _)] => version.0.weights.clone(),
            _ => {
                let weights = parts.iter().map(|(version, tokens)| (&*version.0.weights, *tokens));
                let weights: Vec<_> = weights.collect();
                Arc::new(Weights::by_tokens(&parts[0].0.model().config, &weights)?)
            }
        })
    }

    /// Returns the logits of rows `normed [R, H]` of `parts`, which can share a pass: the first rows belong
    /// to the first version.
    ///
    /// # Errors
    /// Errors of [`Weights::logits_by_rows`].
    pub(super) fn logits(
        parts: &[VersionTokens],
        normed: &Tensor,
        sampling: &SamplingParameters,
    ) -> Result<Logits> {
        let parts: Vec<_> = parts.iter().map(|(version, rows)| (&*version.0.weights, *rows)).collect();
        Weights::logits_by_rows(&parts, normed, sampling)
    }
}

/// Whether both are clones of one version.
impl PartialEq for PolicyVersion {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("PolicyVersion").field("number", &self.0.number).finish_non_exhaustive()
    }
}
