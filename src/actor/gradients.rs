//! Adds the gradients of a batch to the gradients of the parameters. Every pass adds in place to one set of
//! buffers, in batch order. Nothing here clears them: an actor's update does.
//!
//! Passes run in parallel, but only one pass at a time locks the buffer of a parameter. Pass `i + 1` waits
//! until pass `i` has added all of its gradients to that buffer. All passes add gradients in the same
//! parameter order, so they form a pipeline. The order of additions does not depend on the number of threads,
//! and no buffer is copied.
//!
//! With several processes, a pass first adds to a whole tensor of zeros. The ranks then exchange shards of
//! that tensor. Each rank adds the received shards to its own shard, in rank order. Micro-batches are
//! assigned to ranks in round-robin order, so rank order is batch order. On GPUs, shards are exchanged and
//! added in the memory of the GPUs. If experts are sharded by expert, a rank adds the gradients of its own
//! experts to its shard itself, and nothing is exchanged for them.
//!
//! If groups of processes share a copy of the weights each (`parallel.shard_size`), the passes of a group are
//! added as above. Before an update the sums of all copies are added, in the order of the copies
//! ([`super::replica_sum`]).

use crate::dist::serialization::f32_bytes;
use crate::dist::serialization::f32_values;
use crate::dist::{Mesh, PendingExchange, expert_range, shard_range};
use crate::metrics::Progress;
use crate::model::names::ParameterSpec;
use crate::model::parallel::device_exchange::PendingDeviceSum;
use crate::model::parallel::sharded_layers::to_op_error;
use crate::model::parameters::Parameters;
use crate::ops::cpu::{change, host_values};
use crate::ops::optimizer::{scale, sum_of_squares};
use crate::ops::parameter::GradientSink;
use anyhow::Result;
use candle_core::{DType, Device, Tensor, bail};
use rayon::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Minimum bytes of gradients in one exchange. Small tensors are sent together.
pub const EXCHANGE_BYTES_MIN: u64 = 4 << 20;
/// Maximum bytes of gradients in flight (sent and received). A larger tensor is sent in an exchange of its
/// own.
pub(super) const EXCHANGE_BYTES_MAX: u64 = 256 << 20;

/// Returns the maximum bytes in flight (sent and received) if one pass has gradients of `pass_bytes`.
pub fn exchange_bytes_max(pass_bytes: u64) -> u64 {
    EXCHANGE_BYTES_MAX.min(2 * pass_bytes)
}

/// The gradient buffers of the parameters, and the record of the passes of one batch that have added to each
/// buffer.
pub struct GradientSum {
    buffers: Vec<Option<Tensor>>,
    /// Number of times that one pass adds to each parameter. It is 2 for an embedding that is tied to the
    /// head, else 1. The gradient of the head comes before that of the embedding.
    additions_per_pass: Vec<usize>,
    order: Mutex<PassOrder>,
    additions_changed: Condvar,
    /// Present if tensors are sharded over ranks.
    reduction: Option<Reduction>,
}

/// The exchange of gradients of sharded tensors.
struct Reduction {
    mesh: Arc<Mesh>,
    specs: Vec<ParameterSpec>,
    /// The device on which passes add gradients.
    device: Device,
    /// Maximum bytes in flight.
    bytes_max: u64,
    in_flight: Mutex<InFlightGradients>,
}

/// Gradients that are not yet added to the buffers, in order.
#[derive(Default)]
struct InFlightGradients {
    /// Whole tensors that wait to be sent together, with the indices of their parameters.
    waiting: Vec<(usize, Tensor)>,
    waiting_bytes: u64,
    /// The pass that made the waiting tensors. An exchange holds tensors of one pass only. Otherwise tensors
    /// of two passes would be added in rank order instead of batch order.
    pass: usize,
    /// Exchanges in flight, with their number of bytes.
    exchanges: VecDeque<(u64, PendingSum)>,
}

/// Gradients whose shards are exchanged.
enum PendingSum {
    /// Through host memory, with the parameters.
    Host(Vec<usize>, PendingExchange),
    /// In the memory of the GPUs.
    Device(PendingDeviceSum),
}

/// The order of additions.
struct PassOrder {
    /// Number of additions to each parameter's buffer so far.
    additions: Vec<usize>,
    /// The first pass that failed before it had added all gradients.
    failed_pass: Option<usize>,
    /// The passes without gradients.
    skipped_passes: Vec<usize>,
}

impl PassOrder {
    /// Returns the number of passes before `pass` that add gradients. A pass counts until
    /// [`GradientSum::skip`] is called for it.
    fn passes_before(&self, pass: usize) -> usize {
        pass - self.skipped_passes.iter().filter(|skipped| **skipped < pass).count()
    }
}

/// The gradient sink of one pass.
struct PassGradientSink {
    sum: Arc<GradientSum>,
    pass: usize,
    /// The progress display, and the number of tokens by which each gradient advances it.
    progress: Option<(Progress, f64)>,
}

impl GradientSum {
    /// Begins a batch, whose passes add to the gradients of `parameters`.
    pub fn new(parameters: &Parameters) -> Arc<Self> {
        let buffers: Vec<Option<Tensor>> = parameters.gradients().map(Option::<&Tensor>::cloned).collect();
        let order = Mutex::new(PassOrder {
            additions: vec![0; buffers.len()],
            failed_pass: None,
            skipped_passes: vec![],
        });
        let additions_per_pass = (0..buffers.len()).map(|index| parameters.use_count(index)).collect();
        let mesh = parameters.shard_mesh();
        let sharding = mesh.sharding();
        let trainable = buffers.iter().zip(&parameters.specs).filter(|(buffer, _)| buffer.is_some());
        let trainable = trainable.filter(|(_, spec)| !spec.is_sharded_by_expert(sharding));
        let values: usize = trainable.map(|(_, spec)| spec.element_count()).sum();
        let reduction = (mesh.ranks() > 1).then(|| Reduction {
            mesh: mesh.clone(),
            specs: parameters.specs.clone(),
            device: parameters.device().clone(),
            bytes_max: exchange_bytes_max((values * size_of::<f32>()) as u64),
            in_flight: Mutex::default(),
        });
        Arc::new(Self { buffers, additions_per_pass, order, additions_changed: Condvar::new(), reduction })
    }

    /// Waits until every gradient has been added.
    ///
    /// # Errors
    /// When a rank does not answer within the time limit.
    pub fn finish(&self) -> candle_core::Result<()> {
        self.reduction.as_ref().map_or(Ok(()), |reduction| reduction.finish(&self.buffers))
    }

    /// Returns the gradient sink of pass `pass` (from 0) of the batch. The sink receives one gradient for
    /// each use of a parameter. All gradients of the pass together advance `progress` by its number of
    /// tokens.
    pub fn pass_sink(
        self: &Arc<Self>,
        pass: usize,
        progress: Option<(&Progress, f64)>,
    ) -> Arc<dyn GradientSink> {
        let trainable =
            self.buffers.iter().zip(&self.additions_per_pass).filter(|(buffer, _)| buffer.is_some());
        let additions: usize = trainable.map(|(_, additions)| additions).sum();
        let progress =
            progress.map(|(progress, tokens)| (progress.clone(), tokens / additions.max(1) as f64));
        Arc::new(PassGradientSink { sum: self.clone(), pass, progress })
    }

    /// Records that pass `pass` has no gradients, so that later passes do not wait for it.
    pub fn skip(&self, pass: usize) {
        self.order.lock().unwrap_or_else(PoisonError::into_inner).skipped_passes.push(pass);
        self.additions_changed.notify_all();
    }

    /// Marks pass `pass` as failed, so that later passes do not wait for it.
    pub fn fail(&self, pass: usize) {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        order.failed_pass = Some(order.failed_pass.map_or(pass, |first| first.min(pass)));
        drop(order);
        self.additions_changed.notify_all();
    }
}

impl GradientSink for PassGradientSink {
    fn add(
        &self,
        parameter: usize,
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let GradientSum { buffers, additions_per_pass, order, additions_changed, reduction, .. } = &*self.sum;
        if let Some((progress, tokens)) = &self.progress {
            progress.advance_tokens(*tokens);
        }
        let Some(buffer) = &buffers[parameter] else { bail!("parameter {parameter} is not trainable") };
        if let Some(shape) = reduction.as_ref().and_then(|reduction| reduction.own_experts(parameter)) {
            // GPUs run one pass at a time, so this pass is next. A rank whose experts have no rows adds
            // nothing.
            return add(&buffer.reshape(shape)?);
        }
        let lock = order.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier_pass_failed =
            |order: &PassOrder| order.failed_pass.is_some_and(|failed| failed < self.pass);
        let additions = additions_per_pass[parameter];
        let must_wait = |order: &mut PassOrder| {
            order.additions[parameter] / additions < order.passes_before(self.pass)
                && !earlier_pass_failed(order)
        };
        let lock = additions_changed.wait_while(lock, must_wait).unwrap_or_else(PoisonError::into_inner);
        if earlier_pass_failed(&lock) {
            bail!("an earlier micro-batch failed");
        }
        if lock.additions[parameter] / additions > lock.passes_before(self.pass) {
            bail!("one pass added more than {additions} gradients to parameter {parameter}");
        }
        drop(lock);
        match reduction {
            None => add(buffer)?,
            Some(reduction) => reduction.add(self.pass, parameter, buffers, add)?,
        }
        order.lock().unwrap_or_else(PoisonError::into_inner).additions[parameter] += 1;
        additions_changed.notify_all();
        Ok(())
    }
}

impl Reduction {
    /// Returns the shape of this rank's experts of a parameter that is sharded by expert.
    fn own_experts(&self, parameter: usize) -> Option<Vec<usize>> {
        let (spec, mesh) = (&self.specs[parameter], &self.mesh);
        let experts = *spec.working_shape().first().filter(|_| spec.is_sharded_by_expert(mesh.sharding()))?;
        let own = expert_range(experts, mesh.rank(), mesh.ranks());
        Some(spec.with_expert_count(own.len()).working_shape())
    }

    /// Calls `add` with a tensor of zeros. The resulting gradient waits to be sent. Sends the waiting tensors
    /// when they have at least [`EXCHANGE_BYTES_MIN`] bytes.
    fn add(
        &self,
        pass: usize,
        parameter: usize,
        buffers: &[Option<Tensor>],
        add: &mut dyn FnMut(&Tensor) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let whole = Tensor::zeros(self.specs[parameter].working_shape(), DType::F32, &self.device)?;
        add(&whole)?;
        let mut state = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        if state.pass != pass {
            self.send(&mut state, buffers)?;
            state.pass = pass;
        }
        state.waiting_bytes += (whole.elem_count() * size_of::<f32>()) as u64;
        state.waiting.push((parameter, whole));
        if state.waiting_bytes >= EXCHANGE_BYTES_MIN { self.send(&mut state, buffers) } else { Ok(()) }
    }

    /// Sends the shards of the waiting tensors in one exchange.
    fn send(&self, state: &mut InFlightGradients, buffers: &[Option<Tensor>]) -> candle_core::Result<()> {
        let (tensors, bytes) = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.waiting_bytes));
        let Some((first, _)) = tensors.first() else { return Ok(()) };
        self.drain(state, buffers, self.bytes_max.saturating_sub(2 * bytes))?;
        let label = format!("gradients from {} on", self.specs[*first].name);
        let started = match self.device.is_cpu() {
            true => self.send_on_host(&label, tensors)?,
            false => {
                let started = PendingDeviceSum::start(&self.mesh, &label, tensors, &self.device);
                PendingSum::Device(started.map_err(to_op_error)?)
            }
        };
        state.exchanges.push_back((2 * bytes, started));
        Ok(())
    }

    fn send_on_host(&self, label: &str, tensors: Vec<(usize, Tensor)>) -> candle_core::Result<PendingSum> {
        let (mesh, ranks) = (&self.mesh, self.mesh.ranks());
        let (mut parts, mut shard_bytes) = (vec![vec![]; ranks], 0);
        for (parameter, tensor) in &tensors {
            let values = host_values(tensor)?;
            for (rank, part) in parts.iter_mut().enumerate() {
                part.extend_from_slice(f32_bytes(
                    &values[shard_range(values.len(), *parameter, rank, ranks)],
                ));
            }
            let count = self.specs[*parameter].element_count();
            shard_bytes += shard_range(count, *parameter, mesh.rank(), ranks).len() * size_of::<f32>();
        }
        let parts = parts.into_iter().map(Arc::new).collect();
        let exchange =
            mesh.start(label, &mesh.all_ranks(), parts, &vec![shard_bytes; ranks]).map_err(to_op_error)?;
        Ok(PendingSum::Host(tensors.into_iter().map(|(parameter, _)| parameter).collect(), exchange))
    }

    /// Adds received shards to the buffers, in rank order, until at most `bytes_max` bytes are in flight.
    fn drain(
        &self,
        state: &mut InFlightGradients,
        buffers: &[Option<Tensor>],
        bytes_max: u64,
    ) -> candle_core::Result<()> {
        while state.exchanges.iter().map(|(bytes, _)| bytes).sum::<u64>() > bytes_max {
            let (parameters, exchange) = match state.exchanges.pop_front() {
                None => break,
                Some((_, PendingSum::Host(parameters, exchange))) => (parameters, exchange),
                Some((_, PendingSum::Device(pending))) => {
                    pending.add_to(|parameter| buffers[parameter].as_ref()).map_err(to_op_error)?;
                    continue;
                }
            };
            for part in exchange.wait().map_err(to_op_error)? {
                let mut values = f32_values(&part);
                for &parameter in &parameters {
                    let Some(buffer) = &buffers[parameter] else {
                        bail!("parameter {parameter} is not trainable")
                    };
                    change(buffer, |sum| sum.iter_mut().zip(&mut values).for_each(|(sum, x)| *sum += x))?;
                }
            }
        }
        Ok(())
    }

    fn finish(&self, buffers: &[Option<Tensor>]) -> candle_core::Result<()> {
        let mut state = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        self.send(&mut state, buffers)?;
        self.drain(&mut state, buffers, 0)
    }
}

/// A pass that panics is marked as failed, so that later passes do not wait for it.
impl Drop for PassGradientSink {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.sum.fail(self.pass);
        }
    }
}

/// Returns the norm of the gradient over all parameters.
///
/// # Errors
/// When a gradient cannot be read.
pub fn global_norm(parameters: &Parameters) -> Result<f64> {
    let gradients: Vec<&Tensor> = parameters.gradients().flatten().collect();
    let squares = gradients.par_iter().map(|gradient| sum_of_squares(gradient));
    let squares = squares.collect::<candle_core::Result<Vec<f64>>>()?;
    // The squared norms of the shards of all ranks, in rank order.
    let ranks = parameters.shard_mesh().all_gather_records("the gradient's norm", &squares)?;
    let tensor_sum = |index: usize| ranks.iter().map(|squares| squares[index]).sum::<f64>();
    Ok((0..squares.len()).map(tensor_sum).sum::<f64>().sqrt())
}

/// Sets all gradients to 0.
///
/// # Errors
/// When a gradient cannot be written.
pub fn clear(parameters: &Parameters) -> Result<()> {
    Ok(parameters.gradients().flatten().try_for_each(|gradient| scale(gradient, 0.0))?)
}

/// Scales all gradients down if their `norm` exceeds `norm_max`; a `norm_max` of 0 means no limit.
///
/// # Errors
/// When a gradient cannot be written.
pub fn clip(parameters: &Parameters, norm: f64, norm_max: f64) -> Result<()> {
    if norm_max > 0.0 && norm > norm_max {
        let factor = (norm_max / (norm + 1e-6)) as f32;
        parameters.gradients().flatten().try_for_each(|gradient| scale(gradient, factor))?;
    }
    Ok(())
}
