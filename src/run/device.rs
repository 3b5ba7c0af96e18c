//! The device of a command: the one that the recipe requests, if that device supports the recipe.

use super::adapter::names_head;
use super::memory::{AvailableMemory, MemoryChoices, ModelCommand, SecondWeights};
use super::source::precision;
use super::target::TargetMachine;
use crate::dist::{Mesh, PackedWeightPlacement};
use crate::model::config::Config;
use crate::model::settings::{DeviceKind, Dtype};
use crate::ops::cuda::{Gpu, gpu_count, open_gpu};
use crate::ops::sink_attention::kernels::HEAD_DIMS;
use crate::recipe::{Plan, Recipe};
use candle_core::Device;

/// The number of values that a GPU kernel loads at a time. A row's width must be a multiple of it.
const VECTOR_WIDTH: usize = 8;

/// The device of a command.
pub struct ComputeDevice {
    pub device: Device,
    /// The device's name, for the console's header and the run folder.
    pub name: String,
    /// Free memory of the GPU. `None` on the CPU.
    pub available: Option<AvailableMemory>,
}

impl ComputeDevice {
    /// Returns the choices of a command on this device, before it knows the available memory.
    pub fn memory_choices(&self) -> MemoryChoices {
        MemoryChoices { gpu_sequences: self.available.is_some().then_some(1), ..MemoryChoices::default() }
    }

    /// Returns the CPU of this machine, or to plan for `target`.
    ///
    /// # Errors
    /// When this processor lacks the instructions that the recipe's precision needs.
    fn cpu(plan: &Plan, target: Option<&TargetMachine>) -> Result<Self, Vec<String>> {
        if target.is_none() && !precision(&plan.recipe).is_supported() {
            let reason = "needs AVX-512 BF16 instructions, which this processor does not have; write \"bf16\", which only \
                    rounds the weights, or \"f32\"";
            return Err(vec![plan.mistake("model.dtype", reason.to_owned()).to_string()]);
        }
        Ok(Self { device: Device::Cpu, name: "cpu".to_owned(), available: None })
    }

    /// Returns whether the command computes on the CPU.
    pub fn is_cpu(&self) -> bool {
        self.available.is_none()
    }

    /// Returns a GPU of another machine, for which a command only plans.
    fn planned(target: &TargetMachine) -> candle_core::Result<Self> {
        Ok(Self { device: Device::Cpu, name: target.gpu.clone(), available: Some(target.gpu_memory()) })
    }

    /// Returns the GPU that `plan` requests.
    fn gpu(plan: &Plan, mesh: &Mesh) -> candle_core::Result<Self> {
        // A launcher may make only one GPU visible to each process. Then the index has no offset.
        let rank_offset = if gpu_count() > 1 { mesh.local_rank } else { 0 };
        let index = plan.recipe.parallel.device_index + rank_offset;
        let Gpu { device, name, free_bytes } = open_gpu(index)?;
        let available = AvailableMemory { bytes: free_bytes, limit: format!("free on GPU {index} ({name})") };
        Ok(Self { device, name: format!("GPU {index}, {name}"), available: Some(available) })
    }
}

/// Chooses the device that the recipe requests for `command`, on this machine or to plan for `target`. With
/// `"auto"`, the CPU replaces a GPU that cannot be used, with a warning in the plan.
///
/// # Errors
/// The reasons why the requested GPU cannot be used.
pub(super) fn choose_device(
    plan: &mut Plan,
    config: &Config,
    mesh: &Mesh,
    command: ModelCommand,
    target: Option<&TargetMachine>,
) -> Result<ComputeDevice, Vec<String>> {
    let device_kind = plan.recipe.device;
    let has_gpus = cfg!(feature = "cuda") || target.is_some();
    if device_kind == DeviceKind::Cpu || (device_kind == DeviceKind::Auto && !has_gpus) {
        return ComputeDevice::cpu(plan, target);
    }
    // A machine of several GPUs has a build with NCCL.
    let processes = match target {
        Some(target) => (target.gpus, true),
        None => (mesh.ranks(), mesh.exchanges_on_devices()),
    };
    let mut obstacles = list_gpu_obstacles(plan, config, processes);
    // Such a comparison reads layers on demand, which no GPU supports.
    if command == ModelCommand::CheckMismatch(SecondWeights::Changed) {
        obstacles.push(("device", "a comparison with changed weights works only on the CPU".to_owned()));
    }
    obstacles.extend(truncation_obstacle(&plan.recipe, command));
    let message = |(key, reason): (&str, String)| {
        plan.mistake(key, format!("{reason}, or use the CPU with device = \"cpu\"")).to_string()
    };
    let messages = match obstacles.is_empty() {
        true => match target.map_or_else(|| ComputeDevice::gpu(plan, mesh), ComputeDevice::planned) {
            Ok(compute_device) => return Ok(compute_device),
            Err(error) => {
                // Only the first line is used, because the other lines may be a backtrace.
                let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
                vec![plan.mistake("device", reason).to_string()]
            }
        },
        false => obstacles.into_iter().map(message).collect(),
    };
    if device_kind == DeviceKind::Cuda {
        return Err(messages);
    }
    plan.warnings.push(format!("the run uses the CPU: {}", messages.join("; ")));
    ComputeDevice::cpu(plan, target)
}

/// Returns the first key that truncates the samples of training, with the reason why no GPU trains on them.
fn truncation_obstacle(recipe: &Recipe, command: ModelCommand) -> Option<(&'static str, String)> {
    let computes_log_probs = match command {
        ModelCommand::Train => recipe.train.steps > 0,
        ModelCommand::CheckMismatch(second) => second != SecondWeights::Changed,
        _ => false,
    };
    let rollout = &recipe.rollout;
    let keys = [
        ("rollout.top_p", rollout.top_p < 1.0, "1"),
        ("rollout.top_k", rollout.top_k > 0, "0"),
        ("rollout.min_p", rollout.min_p > 0.0, "0"),
    ];
    let mut set = keys.into_iter().filter(|(_, is_set, _)| *is_set && computes_log_probs);
    let (key, _, off) = set.next()?;
    let others: String = set.map(|(key, _, off)| format!(", {key} = {off}")).collect();
    let reason = "no GPU kernel computes training's log-probs over the kept tokens yet";
    Some((key, format!("{reason}; write {off}{others}")))
}

/// Lists the recipe's settings that no GPU supports, as pairs of a key and the reason.
fn list_gpu_obstacles(
    plan: &Plan,
    config: &Config,
    (ranks, exchanges_on_devices): (usize, bool),
) -> Vec<(&'static str, String)> {
    let recipe = &plan.recipe;
    let mut obstacles = vec![];
    let mut add = |key, reason: &str| obstacles.push((key, reason.to_owned()));
    if recipe.model.dtype != Dtype::Bf16 {
        add("model.dtype", "a GPU supports only bf16; write \"bf16\"");
    }
    let model_key = match recipe.model.architecture {
        Some(_) => [
            "model.architecture.head_dim",
            "model.architecture.hidden_size",
            "model.architecture.intermediate_size",
        ],
        None => ["model.path"; 3],
    };
    if !HEAD_DIMS.contains(&config.head_dim) {
        let [one, other] = HEAD_DIMS;
        let reason = format!(
            "the head size is {}, but the GPU's attention kernels need {one} or {other}; use a model with that head size",
            config.head_dim
        );
        add(model_key[0], &reason);
    }
    for (key, size) in [(model_key[1], config.hidden_size), (model_key[2], config.intermediate_size)] {
        if !size.is_multiple_of(VECTOR_WIDTH) {
            add(
                key,
                &format!(
                    "{size} is not a multiple of {VECTOR_WIDTH}, which GPU kernels need; use a multiple"
                ),
            );
        }
    }
    if recipe.policy.distill.is_some() {
        let reason = "no GPU kernel compares the policy with a teacher yet; remove [policy.distill]";
        add("policy.distill.teacher", reason);
    }
    let targets = recipe.adapter.iter().flat_map(|adapter| &adapter.targets);
    if targets.into_iter().any(|pattern| names_head(pattern)) {
        add("adapter.targets", "no GPU kernel adapts the head yet; leave lm_head.weight out");
    }
    let ablations = &recipe.arms;
    let without_kernel = [
        ("arms.router_noise", ablations.router_noise > 0.0),
        ("arms.router_noise_rollout", ablations.router_noise_rollout > 0.0),
        ("arms.router_noise_train", ablations.router_noise_train > 0.0),
        ("arms.rollout_bf16", ablations.rollout_bf16),
        ("arms.rollout_mxfp4", ablations.rollout_mxfp4),
        ("arms.rollout_mantissa_bits", ablations.rollout_mantissa_bits > 0),
    ];
    for (key, _) in without_kernel.into_iter().filter(|(_, is_enabled)| *is_enabled) {
        add(key, "no GPU kernel has this ablation; disable it");
    }
    if ranks > 1 {
        let parallel = &recipe.parallel;
        if recipe.device == DeviceKind::Auto {
            add("device", "with several processes, every process needs a GPU; write \"cuda\"");
        } else if !exchanges_on_devices {
            let reason = "GPUs of several processes exchange weights by NCCL; build with --features cuda,nccl, \
                          and start the processes with torchrun";
            add("device", reason);
        }
        if parallel.packed_weights == PackedWeightPlacement::Sharded {
            add("parallel.packed_weights", "each GPU holds all packed weights; write \"whole\"");
        }
    }
    obstacles
}
