//! DPPO with the KL divergence between the old and the new probability of the sampled token: [`super::dppo`].

use super::LossEntry;
use super::dppo::{BinaryDivergence, DppoBounds};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "dppo_kl",
    meaning: "A token has no loss if its probability has moved too far in the direction of its advantage: the KL divergence from the old probability exceeds `clip_low` or `clip_high`.",
    build: |settings| DppoBounds::build(BinaryDivergence::Kl, settings),
    ..LossEntry::DEFAULT
};
