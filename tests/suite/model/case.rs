//! A model folder with what PyTorch and transformers computed on it, and how far this crate is from that.
//!
//! `scripts/make_fixtures.py` says what such a folder holds.

use crate::cli::text_of;
use crate::tiny::load;
use crate::tiny::{self, Gradients, Learned, learned, values as floats};
use candle_core::Tensor;
use rloss::actor::forward_backward::{ColumnLoss, PassOutput, PassSettings};
use rloss::actor::micro_batch::{MicroBatch, Sequence};
use rloss::actor::optimizer::Optimizer;
use rloss::actor::{Columns, OptimizerKind, OptimizerSettings, PolicyColumns};
use rloss::checkpoint::peft::AdapterFolder;
use rloss::checkpoint::save::{CompanionFiles, SHARD_BYTES_MAX, save};
use rloss::model::attention::PackedAttention;
use rloss::model::cache::SequenceCache;
use rloss::model::config::{Config, WeightFormat};
use rloss::model::decoder_stack::{self, DecoderStack};
use rloss::model::forward::{ForwardOptions, Model};
use rloss::model::names::{Layout, ParameterSpec};
use rloss::model::parameters::Parameters;
use rloss::model::policy_view::PolicyView;
use rloss::ops::{self, SequenceRows};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Of the largest logit.
pub const LOGITS_BAR: f64 = 2e-5;
/// Of a tensor's largest value, for gradients and for what one step changes.
pub const GRADIENT_BAR: f64 = 1e-4;
/// Of a log-probability, over the largest logit or 1; of the loss, over itself.
pub const LOG_PROB_BAR: f64 = 2e-5;

#[derive(Deserialize)]
struct Row {
    tokens: Vec<u32>,
    mask: Vec<u8>,
}

#[derive(Deserialize)]
struct Rows {
    rows: Vec<Row>,
    logprobs: Vec<Vec<f32>>,
    loss: f64,
    sgd_lr: f64,
    adamw: Option<AdamW>,
}

#[derive(Clone, Copy, Deserialize)]
struct AdamW {
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
}

pub struct Case {
    pub model: Model,
    pub parameters: Parameters,
    rows: Rows,
    expected: HashMap<String, Tensor>,
    /// Adapters in PEFT's form that hold gradients and values after a step; by kind.
    adapters: HashMap<&'static str, HashMap<String, Vec<f32>>>,
}

/// The worst of a kind of difference, relative as its bar says, and the tensor it was met in.
#[derive(Debug, Clone, Default)]
pub struct Worst {
    pub difference: f64,
    pub place: String,
}

impl Worst {
    fn note(&mut self, difference: f64, place: &str) {
        if difference > self.difference || difference.is_nan() {
            *self = Worst { difference, place: place.into() };
        }
    }
}

/// How far a case is from transformers.
#[derive(Debug, Default)]
pub struct Figures {
    /// Over the largest logit.
    pub logits: Worst,
    /// Through the KV cache, token by token, over the largest logit.
    pub decode: Worst,
    /// Over the largest logit or 1.
    pub log_probs: Worst,
    /// Over itself.
    pub loss: Worst,
    /// Over the tensor's largest value.
    pub gradients: Worst,
    /// Over the largest change of the tensor.
    pub sgd: Worst,
    /// The same; 0 where there is nothing to compare with.
    pub adamw: Worst,
}

impl Figures {
    fn bars(&self) -> [(&'static str, &Worst, f64); 7] {
        [
            ("logits", &self.logits, LOGITS_BAR),
            ("decode", &self.decode, LOGITS_BAR),
            ("log-probs", &self.log_probs, LOG_PROB_BAR),
            ("loss", &self.loss, LOG_PROB_BAR),
            ("gradients", &self.gradients, GRADIENT_BAR),
            ("SGD step", &self.sgd, GRADIENT_BAR),
            ("AdamW step", &self.adamw, GRADIENT_BAR),
        ]
    }

    /// Panics unless all are within their bars.
    pub fn check(&self, name: &str) {
        for (kind, worst, bar) in self.bars() {
            let Worst { difference, place } = worst;
            assert!(*difference <= bar, "{name}: {kind} differs by {difference:e} at {place}, bar {bar:e}");
        }
    }
}

/// `|kind|difference|place` of each.
impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let mut bars = self.bars().into_iter();
        bars.try_for_each(|(kind, worst, _)| write!(f, "|{kind}|{:.1e}|{}", worst.difference, worst.place))
    }
}

/// max|a − b| over max|b|; where `b` is all zero, `a` must be too.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().all(|v| v.is_finite()), "not finite");
    let difference = a.iter().zip(b).map(|(&a, &b)| (a as f64 - b as f64).abs()).fold(0.0, f64::max);
    let size = b.iter().map(|&b| (b as f64).abs()).fold(0.0, f64::max);
    if difference == 0.0 { 0.0 } else { difference / size }
}

impl Case {
    pub fn read(folder: &Path) -> Self {
        let config = Config::read(folder).unwrap();
        let mut parameters = crate::tiny::parameters(&config, load(folder, &config).unwrap()).unwrap();
        parameters.set_trainable(&vec![true; parameters.len()]).unwrap();
        Self::of(folder, config, parameters, HashMap::new())
    }

    /// A case of `scripts/parity.py adapters` in `folder` on the model in `base`: the adapter alone learns.
    pub fn adapted(base: &Path, folder: &Path) -> Self {
        let config = Config::read(base).unwrap();
        let mut parameters = crate::tiny::parameters(&config, load(base, &config).unwrap()).unwrap();
        let specs = parameters.specs.clone();
        let open = |kind: &str| AdapterFolder::open(&folder.join(kind), &specs).unwrap();
        let named = |kind: &'static str| {
            let adapter = open(kind);
            let names = adapter.lora.factor_specs(&specs).unwrap().into_iter().map(|spec| spec.name);
            (kind, names.zip(adapter.read_values(&specs).unwrap()).collect())
        };
        let adapters = ["grad", "sgd", "adamw"].map(named).into();
        let adapter = open("adapter");
        parameters.attach_adapter(adapter.lora.clone(), adapter.read_values(&specs).unwrap()).unwrap();
        let learns: Vec<bool> = (0..parameters.len()).map(|index| index >= specs.len()).collect();
        parameters.set_trainable(&learns).unwrap();
        Self::of(folder, config, parameters, adapters)
    }

    fn of(
        folder: &Path,
        config: Config,
        parameters: Parameters,
        adapters: HashMap<&'static str, HashMap<String, Vec<f32>>>,
    ) -> Self {
        let text = text_of(folder.join("rows.json"));
        let context = config.max_position_embeddings;
        Self {
            model: Model::new(config, context),
            parameters,
            rows: serde_json::from_str(&text).unwrap(),
            expected: crate::tiny::load_safetensors(folder.join("expected.safetensors")),
            adapters,
        }
    }

    /// Saves the model in f32, for transformers to load.
    pub fn save(&self, folder: &Path) {
        let tensor = |spec: &ParameterSpec| Ok(tiny::named(&self.parameters, &spec.name).clone());
        std::fs::create_dir_all(folder).unwrap();
        save(
            folder,
            &self.model.config,
            WeightFormat::F32,
            &CompanionFiles::default(),
            SHARD_BYTES_MAX,
            tensor,
        )
        .unwrap();
    }

    /// Every figure of the case. The gradient is taken with layers recomputed, as a run does by default.
    pub fn figures(mut self) -> Figures {
        let mut figures = Figures::default();
        self.compare_logits(&mut figures);
        let output = self.forward_backward(true, ForwardOptions::default());
        let log_probs = &output.columns.log_probs;
        let loss = -log_probs.iter().map(|&l| l as f64).sum::<f64>() / log_probs.len() as f64;
        figures.loss.note((loss - self.rows.loss).abs() / self.rows.loss.abs(), "loss");
        let learning = |(index, _): &(usize, &ParameterSpec)| self.parameters.is_trained(*index);
        for (index, spec) in self.parameters.specs.iter().enumerate().filter(learning) {
            let gradient = output.gradients.values[index].as_ref().unwrap();
            figures.gradients.note(relative(gradient, &self.expected_values("grad", index)), &spec.name);
        }
        let sgd = OptimizerSettings { kind: OptimizerKind::Sgd, ..OptimizerSettings::default() };
        figures.sgd = self.compare_step("sgd", &sgd, self.rows.sgd_lr);
        if let Some(AdamW { lr, betas: [beta1, beta2], eps, weight_decay }) = self.rows.adamw {
            let adamw = OptimizerSettings { lr, beta1, beta2, eps, weight_decay, ..Default::default() };
            figures.adamw = self.compare_step("adamw", &adamw, lr);
        }
        figures
    }

    /// What one step changes against what it changed in PyTorch; the weights are put back.
    fn compare_step(&mut self, kind: &str, settings: &OptimizerSettings, lr: f64) -> Worst {
        let before: Vec<Vec<f32>> =
            (0..self.parameters.len()).map(|i| floats(self.parameters.values(i).unwrap())).collect();
        let gradients = Gradients::of(&self.parameters);
        let mut optimizer = Optimizer::new(settings, &mut self.parameters, false).unwrap();
        assert_eq!(gradients, Gradients::of(&self.parameters), "a fresh optimizer leaves gradients alone");
        optimizer.update(&self.parameters, &settings.for_update(lr, None)).unwrap();
        let mut worst = Worst::default();
        let learns: Vec<bool> = (0..before.len()).map(|index| self.parameters.is_trained(index)).collect();
        for (index, before) in before.iter().enumerate().filter(|(index, _)| learns[*index]) {
            let change =
                |after: &[f32]| -> Vec<f32> { after.iter().zip(before).map(|(a, b)| a - b).collect() };
            let (after, after_torch) =
                (floats(self.parameters.values(index).unwrap()), self.expected_values(kind, index));
            let name = &self.parameters.specs[index].name;
            worst.note(relative(&change(&after), &change(&after_torch)), name);
            tiny::set(&self.parameters, index, before);
        }
        worst
    }

    /// Tensor `kind.NAME` of what PyTorch computed, in working layout.
    fn expected_values(&self, kind: &str, index: usize) -> Vec<f32> {
        let spec = &self.parameters.specs[index];
        if let Some(adapter) = self.adapters.get(kind) {
            return adapter[&spec.name].clone();
        }
        if spec.layout == Layout::PerExpert {
            let one = |expert| {
                let tensor = &self.expected[&format!("{kind}.{}", spec.name_of_expert(expert))];
                assert_eq!(tensor.dims(), [spec.stored_shape[2], spec.stored_shape[1]], "{}", spec.name);
                floats(&tensor.t().unwrap())
            };
            return (0..spec.stored_shape[0]).flat_map(one).collect();
        }
        let tensor = &self.expected[&format!("{kind}.{}", spec.name)];
        assert_eq!(tensor.dims(), spec.stored_shape, "{}", spec.name);
        match spec.layout {
            Layout::Transposed => floats(&tensor.t().unwrap()),
            _ => floats(tensor),
        }
    }

    fn compare_logits(&self, figures: &mut Figures) {
        let vocabulary = self.model.config.vocab_size;
        let packed = self.packed_logits();
        let mut start = 0;
        for (i, row) in self.rows.rows.iter().enumerate() {
            let place = format!("row {i}");
            let expected = floats(&self.expected[&format!("logits.{i}")]);
            let end = start + row.tokens.len() * vocabulary;
            let logits = &packed[start..end];
            figures.logits.note(relative(logits, &expected), &place);
            let decoded = self.decoded_logits(&row.tokens);
            figures.decode.note(relative(&decoded, &expected), &place);
            let largest = expected.iter().fold(1f64, |m, v| m.max(v.abs() as f64));
            for (t, next) in row.tokens.iter().enumerate().skip(1) {
                let mut z = logits[(t - 1) * vocabulary..t * vocabulary].to_vec();
                let log_prob = z[*next as usize] - ops::log_prob::row_stats(&mut z, 1.0).log_sum_exp;
                let difference = (log_prob as f64 - self.rows.logprobs[i][t] as f64).abs();
                figures.log_probs.note(difference / largest, &format!("{place} token {t}"));
            }
            start = end;
        }
    }

    /// Logits of every token of all rows in one packed batch.
    pub fn packed_logits(&self) -> Vec<f32> {
        let policy = PolicyView::without_ablations(&self.model, &self.parameters).unwrap();
        let tokens: Vec<u32> = self.rows.rows.iter().flat_map(|r| r.tokens.iter().copied()).collect();
        let positions = self.rows.rows.iter().flat_map(|r| 0..r.tokens.len() as u32).collect();
        let mut cu_seqlens = vec![0];
        self.rows
            .rows
            .iter()
            .for_each(|r| cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + r.tokens.len()));
        let rotation = self.model.rotation(positions);
        let attention =
            &mut PackedAttention { sequence_rows: Arc::new(SequenceRows::from_cu_seqlens(&cu_seqlens)) };
        let rows = &mut rloss::model::forward::Rows { rotation, attention, replay: None };
        let x = policy
            .decoder_stack()
            .forward(&Arc::new(tokens), rows, &mut decoder_stack::keep_nothing)
            .unwrap();
        self.head(&policy.decoder_stack(), &x)
    }

    /// Logits of every token of one row, one token at a time through the KV cache.
    fn decoded_logits(&self, tokens: &[u32]) -> Vec<f32> {
        let policy = PolicyView::without_ablations(&self.model, &self.parameters).unwrap();
        let mut cache = SequenceCache::new(&self.model.config);
        let step = |token: &u32| {
            let fed = policy.decoder_stack().forward_cached(
                vec![*token],
                &mut [&mut cache],
                &[1],
                &mut decoder_stack::keep_nothing,
            );
            self.head(&policy.decoder_stack(), &fed.unwrap())
        };
        tokens.iter().flat_map(step).collect()
    }

    /// Gradients of the mean cross-entropy over the counted tokens of all rows.
    pub fn forward_backward(&self, recompute_layers: bool, forward: ForwardOptions) -> Learned<PassOutput> {
        let sequences: Vec<Sequence> = self
            .rows
            .rows
            .iter()
            .map(|r| Sequence {
                tokens: r.tokens.clone(),
                mask: r.mask.iter().map(|&m| m == 1).collect(),
                kept_tokens: vec![],
            })
            .collect();
        let settings = PassSettings {
            temperature: 1.0,
            load_balance_coefficient: 0.0,
            keeps_routed_experts: true,
            forward,
        };
        let of = (&self.model, &MicroBatch::split(&sequences, usize::MAX)[0], settings, recompute_layers);
        let loss = |columns: &PolicyColumns| {
            let n = columns.log_probs.len();
            Ok(PolicyColumns { log_probs: vec![-1.0 / n as f32; n], ..columns.zeros() })
        };
        let loss = ColumnLoss { gradient: &loss, skips_zeros: false };
        learned(&self.parameters, of, |pass| pass.forward_backward(&loss, &|| ()))
    }

    /// Logits of the rows of `x`, plain.
    fn head(&self, stack: &DecoderStack, x: &Tensor) -> Vec<f32> {
        let rows = Arc::new((0..x.dim(0).unwrap() as u32).collect());
        let tied = self.model.config.tie_word_embeddings;
        let name = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let head = self.parameters.index_of(name).unwrap();
        let head = self.parameters.weight(head).unwrap();
        floats(&head.matmul(&stack.final_norm_rows(x, &rows).unwrap(), None).unwrap())
    }
}
