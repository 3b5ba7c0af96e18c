//! A random packed batch: ragged rows, holes, one empty row and one fully masked row.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rloss::policy::loss::{Loss, LossFunction, LossInput};
use rloss::policy::{Aggregation, BatchSize, Normalizer, PolicySettings, Sequences};
use rloss::random::{Purpose, stream};
use rloss::settings::Choice;

#[derive(Clone)]
pub struct Fixture {
    pub cu_seqlens: Vec<usize>,
    pub mask: Vec<bool>,
    pub log_prob: Vec<f32>,
    pub old_log_prob: Vec<f32>,
    /// The same for all tokens of a sequence.
    pub advantages: Vec<f32>,
    pub weights: Vec<f32>,
    /// The selection of a loss that selects tokens: every third valid token.
    pub selected: Vec<bool>,
}

pub fn rng(seed: u64) -> ChaCha8Rng {
    stream(seed, Purpose::Problem, &[])
}

/// Log ratios a finite difference may step around: none is near a clip of [`objectives`].
const LOG_RATIOS: [f32; 7] = [0.0, 0.0625, -0.09375, 0.5, -0.625, 1.5, -1.75];

impl Fixture {
    pub fn new(seed: u64) -> Self {
        let rng = &mut rng(seed);
        let mut batch = Self {
            cu_seqlens: vec![0],
            mask: Vec::new(),
            log_prob: Vec::new(),
            old_log_prob: Vec::new(),
            advantages: Vec::new(),
            weights: Vec::new(),
            selected: Vec::new(),
        };
        for row in 0..8 {
            let length = if row == 3 { 0 } else { rng.random_range(2..12) };
            let advantage = rng.random_range(-2.0..2.0);
            for token in 0..length {
                // The last token is always valid, so that only row 5 is fully masked.
                let valid = row != 5 && (token + 1 == length || rng.random_bool(0.7));
                // Multiples of 2^-12, so that a step of 2^-10 is exact in f32.
                let log_prob = -(rng.random_range(1..8192) as f32) / 4096.0;
                let log_ratio = LOG_RATIOS[rng.random_range(0..LOG_RATIOS.len())];
                batch.selected.push(valid && batch.mask.len().is_multiple_of(3));
                batch.mask.push(valid);
                batch.log_prob.push(if valid { log_prob } else { f32::NAN });
                batch.old_log_prob.push(if valid { log_prob - log_ratio } else { f32::INFINITY });
                batch.advantages.push(if valid { advantage } else { f32::NAN });
                batch.weights.push(if valid { rng.random_range(0.25..2.0) } else { f32::NAN });
            }
            batch.cu_seqlens.push(batch.mask.len());
        }
        batch
    }

    pub fn sequences(&self) -> Sequences<'_> {
        Sequences::new(&self.cu_seqlens, &self.mask).expect("sequences")
    }

    pub fn input(&self) -> LossInput<'_> {
        LossInput {
            sequences: self.sequences(),
            log_prob: &self.log_prob,
            old_log_prob: &self.old_log_prob,
            advantages: &self.advantages,
            weights: Some(&self.weights),
            selected: Some(&self.selected),
        }
    }

    /// The sequences `rows` alone.
    pub fn part(&self, rows: std::ops::Range<usize>) -> Self {
        let (from, to) = (self.cu_seqlens[rows.start], self.cu_seqlens[rows.end]);
        Self {
            cu_seqlens: self.cu_seqlens[rows.start..=rows.end].iter().map(|c| c - from).collect(),
            mask: self.mask[from..to].to_vec(),
            log_prob: self.log_prob[from..to].to_vec(),
            old_log_prob: self.old_log_prob[from..to].to_vec(),
            advantages: self.advantages[from..to].to_vec(),
            weights: self.weights[from..to].to_vec(),
            selected: self.selected[from..to].to_vec(),
        }
    }
}

/// Every loss that a recipe can name, with its name.
pub fn objectives() -> Vec<(&'static str, Box<dyn LossFunction>)> {
    let settings = PolicySettings { clip_low: 0.2, clip_high: 0.28, dual_clip: 3.0, ..Default::default() };
    Loss::all().into_iter().map(|loss| (loss.name(), (loss.build)(&settings).expect("settings"))).collect()
}

pub const AGGREGATIONS: [Aggregation; 5] = [
    Aggregation::TokenMean,
    Aggregation::TokenSum,
    Aggregation::SequenceMeanTokenMean,
    Aggregation::SequenceMeanTokenSum,
    Aggregation::Constant,
];

/// The fixed length by which `Aggregation::Constant` divides here.
pub const CONSTANT_TOKENS: usize = 16;

/// The normalizer of `sequences`, which are the whole batch.
pub fn whole_batch(aggregation: Aggregation, sequences: &Sequences) -> Normalizer {
    Normalizer::new(aggregation, BatchSize::from_sequences(sequences, CONSTANT_TOKENS)).expect("a normalizer")
}

/// Where the sequences start, and where the last one ends.
pub fn starts(sequences: &Sequences) -> Vec<usize> {
    std::iter::once(0).chain(sequences.token_ranges().map(|row| row.end)).collect()
}
