//! The choice of a policy loss.

use anyhow::Result;

use super::{CispoClip, ClipRange, LossInput, PolicyLoss, PpoClip, cispo, geo_mean, gspo, ppo, reinforce};
use crate::policy::aggregation::Normalizer;

/// A policy loss with its settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    Ppo(PpoClip),
    Gspo(ClipRange),
    Cispo(CispoClip),
    GeoMean(ClipRange),
    Reinforce,
}

impl Objective {
    /// A micro-batch's share of the loss. `batch_sequences`, the number of sequences of the whole batch, is
    /// [`geo_mean`]'s denominator; the others read `normalizer`.
    pub fn loss(
        &self,
        input: &LossInput,
        normalizer: &Normalizer,
        batch_sequences: usize,
    ) -> Result<PolicyLoss> {
        match self {
            Objective::Ppo(clip) => ppo(input, clip, normalizer),
            Objective::Gspo(range) => gspo(input, range, normalizer),
            Objective::Cispo(clip) => cispo(input, clip, normalizer),
            Objective::GeoMean(range) => geo_mean(input, range, batch_sequences),
            Objective::Reinforce => reinforce(input, normalizer),
        }
    }
}
