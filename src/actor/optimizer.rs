//! AdamW, AdamW with 8-bit moments, SGD and Muon: the optimizer state of each trainable tensor, and the
//! updates.

use super::{OptimizerKind, OptimizerSettings as Settings, Schedule};
use crate::model::names::{ParameterSpec, TensorRole};
use crate::model::parameters::{BLOCK_STATES, CODES, MASTER, MOMENTS, OptimizerState, Parameters};
use crate::ops::adamw_8bit::{self, Moment, adamw_8bit};
use crate::ops::muon::{self, Muon, muon};
use crate::ops::optimizer::{AdamW, adamw, round_to_bf16, sgd, update_momentum};
use crate::ops::product::Precision;
use anyhow::{Context, Result};
use candle_core::{DType, Shape, Tensor};

/// The momentum buffer of SGD and Muon.
const MOMENTUM: &str = "momentum";

/// Returns whether Muon updates the tensor: the matrices of the layers, as its author and Moonlight advise.
/// All other tensors have AdamW: embedding, head, and vectors.
fn is_orthogonalized(settings: &Settings, spec: &ParameterSpec) -> bool {
    let is_hidden_matrix =
        matches!(spec.role, TensorRole::InputProjection | TensorRole::OutputProjection | TensorRole::Router);
    settings.kind == OptimizerKind::Muon && is_hidden_matrix
}

/// Returns whether [`OptimizerKind::AdamW8Bit`] stores the tensor's moments in 8 bits. Small tensors have f32
/// moments. So have those of which an expert would share a block with the next, such as the biases of
/// GPT-OSS: a rank can then hold any of the experts.
fn has_8bit_moments(spec: &ParameterSpec) -> bool {
    let expert_values = match spec.is_expert_parameter() {
        true => spec.stored_shape.iter().skip(1).product(),
        false => adamw_8bit::BLOCK,
    };
    spec.element_count() >= adamw_8bit::VALUES_MIN && expert_values.is_multiple_of(adamw_8bit::BLOCK)
}

/// The rule by which an optimizer updates one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    AdamW,
    AdamW8Bit,
    Sgd,
    SgdWithMomentum,
    Muon,
}

impl Rule {
    /// Returns the rule for the tensor of `spec`.
    fn new(settings: &Settings, spec: &ParameterSpec) -> Self {
        match settings.kind {
            OptimizerKind::Muon if is_orthogonalized(settings, spec) => Self::Muon,
            OptimizerKind::AdamW8Bit if has_8bit_moments(spec) => Self::AdamW8Bit,
            OptimizerKind::AdamW | OptimizerKind::AdamW8Bit | OptimizerKind::Muon => Self::AdamW,
            OptimizerKind::Sgd if settings.momentum > 0.0 => Self::SgdWithMomentum,
            OptimizerKind::Sgd => Self::Sgd,
        }
    }

    /// Lists the state buffers of a tensor: name, type and shape of each. `shape` is the shape of the
    /// tensor's shard in this process.
    fn buffers(self, shape: &Shape) -> Vec<(&'static str, DType, Shape)> {
        match self {
            Self::AdamW => MOMENTS.map(|name| (name, DType::F32, shape.clone())).into(),
            Self::AdamW8Bit => {
                let blocks = Shape::from(shape.elem_count().div_ceil(adamw_8bit::BLOCK));
                let codes = CODES.map(|name| (name, DType::U8, shape.clone()));
                let scales = BLOCK_STATES.map(|name| (name, DType::F32, blocks.clone()));
                codes.into_iter().chain(scales).collect()
            }
            Self::SgdWithMomentum | Self::Muon => vec![(MOMENTUM, DType::F32, shape.clone())],
            Self::Sgd => vec![],
        }
    }

    /// Updates this process's shard of a tensor. For Muon, the process holds the whole tensor.
    fn step(self, tensor: &TrainedTensor, rates: &Rates) -> Result<()> {
        let TrainedTensor { master, gradient, .. } = *tensor;
        let moment = |i: usize| {
            anyhow::Ok(Moment { codes: tensor.buffer(CODES[i])?, scales: tensor.buffer(BLOCK_STATES[i])? })
        };
        match self {
            Self::AdamW => {
                let moments = [tensor.buffer(MOMENTS[0])?, tensor.buffer(MOMENTS[1])?];
                adamw(master, moments, gradient, &rates.adamw)?;
            }
            Self::AdamW8Bit => adamw_8bit(master, [moment(0)?, moment(1)?], gradient, &rates.adamw)?,
            Self::Sgd => sgd(master, gradient, rates.adamw.shrink, rates.lr)?,
            Self::SgdWithMomentum => {
                let momentum = tensor.buffer(MOMENTUM)?;
                update_momentum(momentum, gradient, rates.momentum)?;
                sgd(master, momentum, rates.adamw.shrink, rates.lr)?;
            }
            Self::Muon => muon(master, tensor.buffer(MOMENTUM)?, gradient, &rates.muon)?,
        }
        Ok(())
    }
}

/// A tensor with a gradient, as far as this process holds it.
struct TrainedTensor<'a> {
    parameters: &'a Parameters,
    index: usize,
    /// The weights in full precision.
    master: &'a Tensor,
    gradient: &'a Tensor,
}

impl<'a> TrainedTensor<'a> {
    fn buffer(&self, name: &str) -> Result<&'a Tensor> {
        let state = self.parameters.state(self.index);
        state.get(name).with_context(|| format!("the optimizer has no {name}"))
    }
}

/// The hyper-parameters of one update. Each update may have others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateSettings {
    /// The learning rate.
    pub lr: f64,
    /// The decay of AdamW's moments.
    pub betas: [f64; 2],
    /// ε of AdamW.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
    /// Maximum of the global gradient norm; 0 means no clipping.
    pub grad_norm_max: f64,
    /// An update with a larger norm is skipped; `None` means no limit.
    pub norm_limit: Option<f64>,
}

impl Settings {
    /// Returns the learning rate of step `step` (from 1) of `steps`: a linear warm-up, followed by the
    /// schedule. The schedule ends at the last step, or at `schedule_steps`.
    pub fn learning_rate(&self, step: u64, steps: u64) -> f64 {
        let s = self;
        let done = step - 1;
        if done < s.warmup_steps {
            return s.lr * step as f64 / s.warmup_steps as f64;
        }
        let steps = s.schedule_steps.unwrap_or(steps);
        let span = steps.saturating_sub(s.warmup_steps).saturating_sub(1).max(1) as f64;
        let progress = ((done - s.warmup_steps) as f64 / span).min(1.0);
        let final_fraction = s.lr_final_fraction;
        let fraction = match s.schedule {
            Schedule::Constant => 1.0,
            Schedule::Linear => 1.0 + (final_fraction - 1.0) * progress,
            Schedule::Cosine => {
                let cosine = (std::f64::consts::PI * progress).cos();
                final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + cosine)
            }
        };
        s.lr * fraction
    }

    /// Returns the hyper-parameters of an update with learning rate `lr`.
    pub fn for_update(&self, lr: f64, norm_limit: Option<f64>) -> UpdateSettings {
        let &Self { beta1, beta2, eps, weight_decay, grad_norm_max, .. } = self;
        UpdateSettings { lr, betas: [beta1, beta2], eps, weight_decay, grad_norm_max, norm_limit }
    }
}

/// The hyper-parameters of one update, as the ops take them.
struct Rates {
    lr: f32,
    momentum: f32,
    adamw: AdamW,
    muon: Muon,
}

impl Rates {
    /// Returns the rates of update number `updates`, from 1.
    fn new(settings: &Settings, update: &UpdateSettings, updates: u64) -> Self {
        let &UpdateSettings { lr, betas: [beta1, beta2], eps, weight_decay, .. } = update;
        let (t, shrink) = (updates as i32, (1.0 - lr * weight_decay) as f32);
        let adamw = AdamW {
            shrink,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            rate: (lr / (1.0 - beta1.powi(t))) as f32,
            root_correction: (1.0 - beta2.powi(t)).sqrt() as f32,
            eps: eps as f32,
        };
        let muon = Muon {
            shrink,
            rate: lr as f32,
            momentum: settings.muon_momentum as f32,
            one_minus_momentum: (1.0 - settings.muon_momentum) as f32,
        };
        Self { lr: lr as f32, momentum: settings.momentum as f32, adamw, muon }
    }
}

/// Returns whether a tensor with bf16 values on a CPU has an f32 master beside it, if products have
/// `precision`. An adapter's factors stay in f32. Products in bf16 round a matrix themselves.
pub fn has_master(spec: &ParameterSpec, precision: Precision) -> bool {
    let rounds_itself = precision == Precision::Bf16Dot && spec.is_rounded_in_use();
    spec.role != TensorRole::AdapterFactor && !rounds_itself
}

/// Returns the number of bytes of optimizer state that this process needs for a tensor of which it holds
/// `local_values` values.
pub fn state_bytes(settings: &Settings, spec: &ParameterSpec, local_values: usize) -> u64 {
    let bytes = |(_, dtype, shape): (_, DType, Shape)| (dtype.size_in_bytes() * shape.elem_count()) as u64;
    Rule::new(settings, spec).buffers(&Shape::from(local_values)).into_iter().map(bytes).sum()
}

/// Returns the number of bytes that the update of a tensor needs temporarily, on a GPU or a CPU.
pub fn update_bytes(settings: &Settings, spec: &ParameterSpec, on_gpu: bool) -> u64 {
    let shape = spec.working_shape();
    match is_orthogonalized(settings, spec) {
        true if on_gpu => muon::device_scratch_bytes(&shape),
        true => muon::scratch_bytes(&shape),
        false => 0,
    }
}

/// Returns the floating-point operations of Muon's iterations in one update of the tensors of `specs`.
pub fn update_flop<'a>(settings: &Settings, specs: impl Iterator<Item = &'a ParameterSpec>) -> f64 {
    let shapes =
        specs.filter(|spec| is_orthogonalized(settings, spec)).filter_map(ParameterSpec::matrix_shape);
    shapes.map(|[count, rows, columns]| count as f64 * muon::iteration_flop((rows, columns))).sum()
}

/// An optimizer over the trainable tensors. [`Parameters`] stores its state.
#[derive(Debug, Clone)]
pub struct Optimizer {
    pub settings: Settings,
    /// Number of updates so far.
    pub updates: u64,
}

impl Optimizer {
    /// Creates an optimizer with zero state in `parameters`. If the store has a tensor in bf16, the state
    /// [`MASTER`] holds its weights in f32. Every other tensor is its own master weight.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(settings: &Settings, parameters: &mut Parameters, round_to_bf16: bool) -> Result<Self> {
        let optimizer = Self { settings: settings.clone(), updates: 0 };
        for index in 0..parameters.len() {
            let mut state = OptimizerState::new();
            if parameters.is_trained(index) {
                let (values, master) = (parameters.values(index)?, parameters.master(index)?);
                let has_master = match values.device().is_cpu() {
                    true => {
                        round_to_bf16 && has_master(&parameters.specs[index], parameters.backend.precision)
                    }
                    // On a GPU, matrices are bf16 and vectors are f32.
                    false => values.dtype() == DType::BF16,
                };
                if has_master {
                    let exact = match (master.dtype(), master.elem_count()) {
                        // On a GPU candle cannot convert an empty shard.
                        (_, 0) => Tensor::zeros(master.shape(), DType::F32, master.device())?,
                        // A copy that is tracked would keep the former master alive.
                        (DType::F32, _) => master.detach().copy()?,
                        _ => master.detach().to_dtype(DType::F32)?,
                    };
                    state.insert(MASTER, exact);
                }
                let rule = Rule::new(settings, &parameters.specs[index]);
                for (name, dtype, shape) in rule.buffers(values.shape()) {
                    state.insert(name, Tensor::zeros(shape, dtype, values.device())?);
                }
            }
            parameters.set_state(index, state);
            optimizer.write_working_weights(parameters, index)?;
        }
        Ok(optimizer)
    }

    /// Updates the weights of `parameters` from their gradients.
    ///
    /// # Errors
    /// When a tensor cannot be written, or the state belongs to another optimizer.
    pub fn update(&mut self, parameters: &Parameters, update: &UpdateSettings) -> Result<()> {
        self.updates += 1;
        let rates = Rates::new(&self.settings, update, self.updates);
        for index in 0..parameters.len() {
            let Some(gradient) = parameters.gradient(index) else { continue };
            let rule = Rule::new(&self.settings, &parameters.specs[index]);
            let master = parameters.master(index)?;
            rule.step(&TrainedTensor { parameters, index, master, gradient }, &rates)?;
            self.write_working_weights(parameters, index)?;
        }
        Ok(())
    }

    /// Rounds the master weight of tensor `index` into the weight that the model uses. Does nothing for a
    /// tensor without a master weight.
    fn write_working_weights(&self, parameters: &Parameters, index: usize) -> Result<()> {
        match parameters.state(index).get(MASTER) {
            Some(master) => Ok(round_to_bf16(parameters.values(index)?, master)?),
            None => Ok(()),
        }
    }

    /// Rounds all master weights into the weights that the model uses. Must be called after loading a
    /// checkpoint.
    ///
    /// # Errors
    /// When a weight cannot be written.
    pub fn write_weights(&self, parameters: &mut Parameters) -> Result<()> {
        (0..parameters.len()).try_for_each(|index| self.write_working_weights(parameters, index))
    }
}
