//! DPPO with the KL divergence of the sampled token against all others: [`super::dppo`].

use super::LossEntry;
use super::dppo::{BinaryDivergence, DppoBounds};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "dppo_kl",
    meaning: "Tokens leave the loss where the KL divergence of their probability exceeds `clip_low` or `clip_high`.",
    make: |settings| DppoBounds::make(BinaryDivergence::Kl, settings),
    ..LossEntry::DEFAULT
};
