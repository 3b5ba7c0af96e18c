//! The device of a command: what the recipe asks for, and whether a GPU can do it.

use super::memory::AvailableMemory;
use super::source::precision;
use crate::dist::Mesh;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement};
use crate::model::config::Config;
use crate::model::settings::{DeviceKind, Dtype};
use crate::ops::cuda::{Gpu, gpu_count, open_gpu};
use crate::recipe::Plan;
use candle_core::Device;

/// The head width of the GPU's attention kernels.
const HEAD_DIM: usize = 64;
/// The number of values that a GPU kernel moves at a time; a row's width must be a multiple.
const VECTOR: usize = 8;

/// The device of a command.
pub struct ComputeDevice {
    pub device: Device,
    /// Name of the device, for the console's header and the run folder.
    pub name: String,
    /// Free memory of the GPU; `None` on the CPU.
    pub available: Option<AvailableMemory>,
}

impl ComputeDevice {
    fn cpu() -> Self {
        Self { device: Device::Cpu, name: "cpu".to_owned(), available: None }
    }

    /// Returns the GPU that the plan names.
    fn gpu(plan: &Plan, mesh: &Mesh) -> candle_core::Result<Self> {
        // A launcher may show each process only its own GPU.
        let rank_offset = if gpu_count() > 1 { mesh.local_rank() } else { 0 };
        let index = plan.recipe.parallel.device_index + rank_offset;
        let Gpu { device, name, free_bytes } = open_gpu(index)?;
        let available = AvailableMemory { bytes: free_bytes, limit: format!("free on GPU {index} ({name})") };
        Ok(Self { device, name: format!("GPU {index}, {name}"), available: Some(available) })
    }
}

/// Chooses the device that `plan` asks for. With `"auto"`, a GPU that cannot be used is replaced by the CPU,
/// with a warning in the plan.
///
/// # Errors
/// The reasons why the requested GPU cannot be used, one mistake each.
pub(super) fn choose(
    plan: &mut Plan,
    config: &Config,
    mesh: &Mesh,
    streams_layers: bool,
) -> Result<ComputeDevice, Vec<String>> {
    let compute_device = device(plan, config, mesh, streams_layers)?;
    if compute_device.device.is_cpu() && !precision(&plan.recipe).is_supported() {
        let what = "needs the instructions of AVX-512 BF16, which this processor lacks; write \"bf16\", which only \
                    rounds the weights, or \"f32\"";
        return Err(vec![plan.mistake("model.dtype", what.to_owned()).to_string()]);
    }
    Ok(compute_device)
}

/// Chooses by the key `device` alone, without checking the processor's instructions.
fn device(
    plan: &mut Plan,
    config: &Config,
    mesh: &Mesh,
    streams_layers: bool,
) -> Result<ComputeDevice, Vec<String>> {
    let device_kind = plan.recipe.device;
    if device_kind == DeviceKind::Cpu || (device_kind == DeviceKind::Auto && cfg!(not(feature = "cuda"))) {
        return Ok(ComputeDevice::cpu());
    }
    let mut found = list_gpu_obstacles(plan, config, mesh);
    if streams_layers {
        found.push(("device", "comparing with changed weights works only on the CPU".to_owned()));
    }
    let mistake = |(key, what): (&str, String)| {
        plan.mistake(key, format!("{what}, or compute on the CPU with device = \"cpu\"")).to_string()
    };
    let found = match found.is_empty() {
        true => match ComputeDevice::gpu(plan, mesh) {
            Ok(compute_device) => return Ok(compute_device),
            Err(error) => {
                // Later lines may be a backtrace.
                let text = error.to_string();
                let why = text.lines().next().unwrap_or_default().to_owned();
                vec![plan.mistake("device", why).to_string()]
            }
        },
        false => found.into_iter().map(mistake).collect(),
    };
    if device_kind == DeviceKind::Cuda {
        return Err(found);
    }
    plan.warnings.push(format!("the CPU computes: {}", found.join("; ")));
    Ok(ComputeDevice::cpu())
}

/// Lists what a GPU cannot do: pairs of a recipe key and the reason.
fn list_gpu_obstacles(plan: &Plan, config: &Config, mesh: &Mesh) -> Vec<(&'static str, String)> {
    let recipe = &plan.recipe;
    let mut found = vec![];
    if recipe.model.dtype != Dtype::Bf16 {
        found.push(("model.dtype", "a GPU computes only in bf16; write \"bf16\"".to_owned()));
    }
    let model_key = match recipe.model.architecture {
        Some(_) => [
            "model.architecture.head_dim",
            "model.architecture.hidden_size",
            "model.architecture.intermediate_size",
        ],
        None => ["model.path"; 3],
    };
    if config.head_dim != HEAD_DIM {
        let what = format!(
            "the head size is {}, but the GPU's attention needs {HEAD_DIM}; use such a model",
            config.head_dim
        );
        found.push((model_key[0], what));
    }
    for (key, size) in [(model_key[1], config.hidden_size), (model_key[2], config.intermediate_size)] {
        if !size.is_multiple_of(VECTOR) {
            found.push((
                key,
                format!("{size} is not a multiple of {VECTOR}, as GPU kernels need; use a multiple"),
            ));
        }
    }
    let arms = &recipe.arms;
    let kernels_lack = [
        ("arms.router_noise", arms.router_noise > 0.0),
        ("arms.router_noise_rollout", arms.router_noise_rollout > 0.0),
        ("arms.router_noise_train", arms.router_noise_train > 0.0),
        ("arms.rollout_bf16", arms.rollout_bf16),
        ("arms.rollout_mxfp4", arms.rollout_mxfp4),
        ("arms.rollout_mantissa_bits", arms.rollout_mantissa_bits > 0),
    ];
    for (key, _) in kernels_lack.into_iter().filter(|(_, on)| *on) {
        found.push((key, "no GPU kernel has this ablation; turn it off".to_owned()));
    }
    if mesh.ranks() > 1 {
        let parallel = &recipe.parallel;
        if recipe.device == DeviceKind::Auto {
            found.push(("device", "with several processes, each needs a GPU; write \"cuda\"".to_owned()));
        }
        if parallel.sequence > 1 {
            found.push(("parallel.sequence", "GPUs have no sequence parallelism yet; write 1".to_owned()));
        }
        if parallel.rollout_weights == RolloutWeightPlacement::ByExpert {
            let what = "each GPU samples with all weights; write \"whole\"";
            found.push(("parallel.rollout_weights", what.to_owned()));
        }
        if parallel.packed_weights == PackedWeightPlacement::Sharded {
            let what = "each GPU holds all packed weights; write \"whole\"";
            found.push(("parallel.packed_weights", what.to_owned()));
        }
    }
    found
}
