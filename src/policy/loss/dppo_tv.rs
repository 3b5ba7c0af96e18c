//! DPPO with the total variation of the sampled token against all others: [`super::dppo`].

use super::LossEntry;
use super::dppo::{BinaryDivergence, DppoBounds};

pub(super) const ENTRY: LossEntry = LossEntry {
    name: "dppo_tv",
    meaning: "Tokens leave the loss where the total variation of their probability exceeds `clip_low` or `clip_high`.",
    make: |settings| DppoBounds::make(BinaryDivergence::Tv, settings),
    ..LossEntry::DEFAULT
};
