//! Compares the memory plan with the memory that processes hold.

use super::*;
use crate::actor::OptimizerKind;
use crate::actor::optimizer::Optimizer;
use crate::dist::Mesh;
use crate::dist::{PackedWeightPlacement, RolloutWeightPlacement, shard_range};
use crate::engine::FORWARD_TOKENS_MAX;
use crate::learner::TrainSettings;
use crate::metrics::Console;
use crate::model::config::Config;
use crate::model::init::{InitSettings, init};
use crate::model::parameters::{Backend, Parameters};
use crate::model::storage::StoredFormat;
use crate::model::storage::TensorStorage;
use crate::ops::packed_weights::PackedMatrix;
use crate::ops::page_allocator::PAGE_POSITIONS;
use crate::ops::sink_attention::kernels::CHUNK_KEYS;
use crate::ops::weight::Weight;
use crate::recipe::{Recipe, resolve};
use crate::run::source::ModelSource;
use crate::run::startup::Startup;
use candle_core::{DType, Device, Tensor};
use std::path::Path;
use std::sync::Arc;

#[test]
fn each_process_uses_the_planned_bytes_exactly() {
    let plan = resolve(Path::new("a.toml"), "", &[]).unwrap();
    let config = ModelSource::open(&plan.recipe).unwrap().config;
    let settings = InitSettings { embedding_std: 1.0, head_scale: 1.0, sink: 0.0 };
    let values = init(&config, &settings, 0).unwrap();
    let trainable = vec![true; values.len()];
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8Bit] {
        let mut recipe = plan.recipe.clone();
        recipe.cold_start.steps = 0;
        recipe.train.optimizer.kind = kind;
        let mut alone = 0;
        for processes in [1, 2, 4, 8] {
            let mut weight = [0; 3];
            for rank in 0..processes {
                let mesh = Mesh::without_connection(rank, processes);
                let tensors = values
                    .iter()
                    .map(|(spec, values)| Ok((spec.clone(), TensorStorage::variable(spec, values.clone())?)));
                let backend = Backend { mesh, ..Backend::default() };
                let mut parameters = Parameters::load(&config, &backend, tensors).unwrap();
                parameters.set_trainable(&trainable).unwrap();
                Optimizer::new(&recipe.train.optimizer, &mut parameters, false).unwrap();
                let bytes = |tensor: &candle_core::Tensor| {
                    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
                };
                let indices = 0..parameters.len();
                let bytes_of_rank = [
                    indices.clone().map(|i| bytes(parameters.values(i).unwrap())).sum::<u64>(),
                    indices.clone().filter_map(|i| parameters.gradient(i)).map(bytes).sum(),
                    indices.flat_map(|i| parameters.state(i).values()).map(bytes).sum(),
                ];
                weight = [
                    weight[0].max(bytes_of_rank[0]),
                    weight[1].max(bytes_of_rank[1]),
                    weight[2].max(bytes_of_rank[2]),
                ];
            }
            let input = MemoryPlanInput {
                command: ModelCommand::Train,
                recipe: &recipe,
                config: &config,
                formats: &vec![StoredFormat::F32; values.len()],
                trainable: TrainableInput { policy: trainable.clone(), critic: None, adapter: None },
                tokenizer_bytes: 0,
                tools: ToolInput { python_workers: 0, reply_chars_max: None },
                threads: 1,
                placement: WeightPlacement::whole(processes),
                choices: MemoryChoices::default(),
                sft_row_tokens_max: None,
                teacher: None,
            };
            let plan = MemoryPlan::new(&input);
            let planned = ["weights", "gradients", "optimizer"]
                .map(|name| plan.resident.iter().find(|part| part.name == name).unwrap().bytes);
            assert_eq!(planned, weight, "{kind:?} on {processes}");
            let all: u64 = weight.iter().sum();
            alone = alone.max(all);
            // Blocks and small tensors are not divided, so shards are not exactly equal.
            assert!(all as f64 <= 1.05 * alone as f64 / processes as f64, "{all} of {alone} on {processes}");
        }
    }
}

/// Returns a tensor of zeros in the format that a weight has in memory if it is stored as `format` on disk.
fn zeros(spec: &ParameterSpec, format: StoredFormat) -> Weight {
    match (spec.packed_format(format), spec.matrix_shape()) {
        (Some(format), Some(shape)) => {
            Weight::Packed(Arc::new(PackedMatrix::from_bytes(format, shape, vec![0; format.bytes(shape)])))
        }
        _ => Weight::dense(&Tensor::zeros(spec.working_shape(), DType::F32, &Device::Cpu).unwrap()),
    }
}

#[test]
fn a_second_set_of_weights_is_planned_if_an_ablation_makes_one() {
    let plan = resolve(Path::new("a.toml"), "", &[]).unwrap();
    let specs = parameter_specs(&ModelSource::open(&plan.recipe).unwrap().config);
    let (mut copied, mut shared) = (0, 0);
    for format in [StoredFormat::F32, StoredFormat::Bf16, StoredFormat::Mxfp4] {
        for (mxfp4, bits) in
            [(false, None), (true, None), (false, Some(7)), (true, Some(7)), (false, Some(1))]
        {
            for spec in &specs {
                let weight = zeros(spec, format);
                let rounding = WeightRounding { mxfp4, bits };
                let planned = rounding.copy_bytes(spec, format);
                let rounded = match (&weight, rounding.apply(spec, weight.clone()).unwrap()) {
                    (Weight::Dense(a), Weight::Dense(b)) if a.values().id() == b.values().id() => 0,
                    (Weight::Packed(a), Weight::Packed(b)) if Arc::ptr_eq(a, &b) => 0,
                    (_, rounded) => rounded.bytes(),
                };
                // MXFP4 converted from bf16 is smaller than planned, because the plan counts the bf16 size.
                let exact = !(mxfp4 && format == StoredFormat::Bf16 && spec.is_expert_matrix());
                assert!(
                    if exact { planned == rounded } else { planned >= rounded },
                    "{} {rounding:?}: {planned}, {rounded}",
                    spec.name
                );
                *(if rounded > 0 { &mut copied } else { &mut shared }) += 1;
            }
        }
    }
    assert!(copied > 50 && shared > 50, "{copied} copied, {shared} shared");
}

#[test]
fn the_placement_of_rollout_weights_depends_on_memory() {
    let shape =
        "hidden_size = 1024\nintermediate_size = 1024\nnum_hidden_layers = 24\nnum_local_experts = 16\n";
    // Small updates, so that sampling sets the peak.
    let rest = "[rollout]\nturns_max = 1\n[train]\nmicro_batch_tokens = 1024\n";
    let text = format!("[model.architecture]\n{shape}[task]\nname = \"format_rules\"\n{rest}");
    let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
    let mut startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
    let mut planned = |processes, bytes: Option<u64>| {
        let available = bytes.map(|bytes| AvailableMemory { bytes, limit: String::new() });
        startup.choose_sharding(processes, available.as_ref());
        let warned =
            startup.environment.plan.warnings.drain(..).any(|text| text.contains("parallel.rollout_weights"));
        let input = startup.memory_plan_input();
        assert_eq!(warned, input.placement.rollout_weights != RolloutWeightPlacement::Whole);
        (input.placement.rollout_weights, MemoryPlan::new(&input).peak_bytes())
    };
    let (how, whole) = planned(4, None);
    assert_eq!(how, RolloutWeightPlacement::Whole);
    assert_eq!(planned(4, Some(whole)), (RolloutWeightPlacement::Whole, whole));
    let (how, by_expert) = planned(4, Some(whole - 1));
    assert_eq!(how, RolloutWeightPlacement::ByExpert);
    // Other processes have three quarters of the experts' 3.6 GB.
    assert!(whole > by_expert + 2_700_000_000, "{whole}, {by_expert}");
    // If no option fits, the smallest one is planned, and rejected later.
    assert_eq!(planned(4, Some(by_expert - 1)), (RolloutWeightPlacement::ByExpert, by_expert));
    // A single process gathers nothing, even with little memory.
    assert_eq!(planned(1, Some(1)).0, RolloutWeightPlacement::Whole);
    // Unsharded packed experts are complete on every process, whatever `rollout_weights` is.
    startup.choose_sharding(4, None);
    let input = startup.memory_plan_input();
    let formats = vec![StoredFormat::Bf16; input.formats.len()];
    let trainable: Vec<bool> =
        parameter_specs(input.config).iter().map(|spec| !spec.is_expert_parameter()).collect();
    let sampling = |rollout_weights| {
        let input = MemoryPlanInput {
            placement: WeightPlacement { rollout_weights, ..input.placement },
            formats: &formats,
            trainable: TrainableInput { policy: trainable.clone(), ..input.trainable.clone() },
            ..input.clone()
        };
        MemoryPlan::new(&input).phases.into_iter().find(|(name, _)| *name == "sampling").unwrap().1
    };
    assert_eq!(sampling(RolloutWeightPlacement::ByExpert), sampling(RolloutWeightPlacement::Whole));
}

#[test]
fn packed_weights_are_sharded_if_memory_needs_it() {
    let text = "[model.architecture]\nhidden_size = 256\nintermediate_size = 256\nnum_local_experts = 8\n\
                num_hidden_layers = 6\n[adapter]\n[task]\nname = \"format_rules\"\n[rollout]\nturns_max = 1\n";
    let plan = resolve(Path::new("a.toml"), text, &[]).unwrap();
    let mut startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
    let specs = parameter_specs(&startup.source.config);
    startup.source.formats = specs
        .iter()
        .map(|spec| if spec.is_expert_matrix() { StoredFormat::Mxfp4 } else { StoredFormat::Bf16 })
        .collect();
    let weights = |input: &MemoryPlanInput| {
        let resident = MemoryPlan::new(input).resident;
        resident.iter().find(|part| part.name == "weights").unwrap().bytes
    };
    let alone = {
        startup.choose_sharding(1, None);
        weights(&startup.memory_plan_input())
    };
    for processes in [2, 3, 8] {
        startup.choose_sharding(processes, None);
        assert_eq!(
            startup.memory_plan_input().placement.packed_weights,
            PackedWeightPlacement::Whole,
            "memory is not known"
        );
        let peak = MemoryPlan::new(&startup.memory_plan_input()).peak_bytes();
        startup.choose_sharding(processes, Some(&AvailableMemory { bytes: peak, limit: String::new() }));
        assert_eq!(
            startup.memory_plan_input().placement.packed_weights,
            PackedWeightPlacement::Whole,
            "it suffices"
        );
        startup.environment.plan.warnings.clear();
        startup.choose_sharding(processes, Some(&AvailableMemory { bytes: 1, limit: String::new() }));
        assert!(
            startup
                .environment
                .plan
                .warnings
                .iter()
                .any(|said| said.contains("parallel.packed_weights = \"cut\""))
        );
        let input = startup.memory_plan_input();
        assert_eq!(input.placement.packed_weights, PackedWeightPlacement::Sharded);
        // Bytes that the process `rank` actually holds.
        let weight = |rank: usize| -> u64 {
            let mesh = Mesh::without_connection(rank, processes);
            let factors: u64 = (specs.len()..)
                .zip(&input.trainable.adapter.as_ref().unwrap().specs)
                .map(|(index, spec)| {
                    shard_range(spec.element_count(), index, rank, processes).len() as u64 * 4
                })
                .sum();
            let base = specs.iter().zip(input.formats).enumerate().map(|(index, (spec, format))| {
                let stored =
                    TensorStorage::from_weight(zeros(spec, *format)).into_shard(spec, index, &mesh).unwrap();
                match stored.weight(spec).unwrap() {
                    Weight::Packed(matrix) if stored.is_sharded => matrix.shard_bytes().unwrap().len() as u64,
                    weight => weight.bytes(),
                }
            });
            base.sum::<u64>() + factors
        };
        let most = (0..processes).map(weight).max().unwrap();
        // Other commands hold packed weights unsharded, so this remedy does not apply to them.
        assert!(!MemoryPlanInput { command: ModelCommand::Rollout, ..input.clone() }.can_shard_packed());
        let planned = weights(&input);
        // The largest shard of the factors and the largest shard of the base may be on different processes.
        assert!(
            planned >= most && planned as f64 <= 1.01 * most as f64,
            "{planned} for {most} on {processes}"
        );
        assert!(
            planned < alone * 6 / 5 / processes as u64 + (1 << 20),
            "{planned} of {alone} on {processes}"
        );
    }
}

#[test]
fn bug_f8_the_plan_counted_a_bit_per_token_of_the_vocabulary_for_each_kept_token() {
    let kept = |keys: &str, command: ModelCommand, vocab_size: usize| {
        // A task without the Python tool, which the test's binary cannot start.
        let text = format!(
            "task.name = \"format_rules\"\nrollout.turns_max = 1\nrollout.prompts_per_step = 3\n\
             rollout.samples_per_prompt = 5\nrollout.response_tokens_max = 7\n{keys}"
        );
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, command, &Console::silent()).unwrap();
        let input = startup.memory_plan_input();
        let config = Config { vocab_size, ..input.config.clone() };
        let input = MemoryPlanInput { config: &config, ..input };
        let offered = input.remedies(0).iter().any(|remedy| remedy.change == "rollout.top_k = 256");
        (input.token_set_bytes(), offered)
    };
    let tokens = 3 * 5 * 7;
    let (train, top_p) = (ModelCommand::Train, "rollout.top_p = 0.9");
    assert_eq!(kept("", train, 272), (0, false));
    assert_eq!(kept(top_p, train, 272), (tokens * (96 + 1 + 34), false));
    assert_eq!(kept("rollout.min_p = 0.1", ModelCommand::Rollout, 272).0, tokens * (96 + 1 + 34));
    assert_eq!(kept(top_p, ModelCommand::Eval, 272).0, 0);
    assert_eq!(kept(top_p, train, 151_936), (tokens * (96 + 1 + 512 * 4), true));
    // An id takes three or four bytes, until one bit per id is less.
    assert_eq!(kept("rollout.top_k = 4", train, 272), (tokens * (96 + 1 + 12), false));
    assert_eq!(kept("rollout.top_k = 20\nrollout.top_p = 0.9", train, 272).0, tokens * (96 + 1 + 34));
    assert_eq!(kept("rollout.top_k = 20", train, 151_936), (tokens * (96 + 1 + 80), false));
}

#[test]
fn sampling_beside_the_update_has_a_copy_of_the_trained_weights_and_both_phases() {
    let plan = |text: &str| {
        let text = format!("task.name = \"format_rules\"\npolicy.old_logprob = \"rollout\"\n{text}");
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        let alone = MemoryPlan::new(&input);
        input.placement.processes = 2;
        (alone, MemoryPlan::new(&input))
    };
    let bytes = |plan: &MemoryPlan, name: &str| {
        plan.resident.iter().find(|item| item.name == name).map_or(0, |item| item.bytes)
    };
    let phase = |plan: &MemoryPlan, name: &str| {
        plan.phases.iter().find(|phase| phase.0 == name).map(|(_, items)| total_bytes(items))
    };
    let beside = "sampling beside the update";
    let (without, _) = plan("");
    assert_eq!(phase(&without, beside), None);
    assert_eq!(
        (bytes(&without, "weights that sample ahead"), bytes(&without, "samples of later steps")),
        (0, 0)
    );
    let (ahead, on_two) = plan("rollout.lag_steps = 2");
    assert_eq!(bytes(&ahead, "weights that sample ahead"), bytes(&ahead, "weights"));
    let both = phase(&ahead, "sampling").unwrap() + phase(&ahead, "update").unwrap();
    assert_eq!(phase(&ahead, beside), Some(both));
    // Several processes sample before the update, by the weights in place.
    assert_eq!((phase(&on_two, beside), bytes(&on_two, "weights that sample ahead")), (None, 0));
    assert!(bytes(&on_two, "samples of later steps") > 0);
    // A frozen tensor is shared.
    let (frozen, _) = plan("rollout.lag_steps = 2\ntrain.freeze = [\"*.mlp.experts.*\"]");
    assert!(bytes(&frozen, "weights that sample ahead") < bytes(&frozen, "weights"));
}

#[test]
fn two_samplings_in_flight_are_planned_if_memory_holds_both() {
    let check = |text: &str, check: &dyn Fn(&MemoryPlanInput)| {
        let text = format!("task.name = \"format_rules\"\npolicy.old_logprob = \"rollout\"\n{text}");
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        check(&startup.memory_plan_input());
    };
    check("rollout.lag_steps = 1", &|input| {
        let both = MemoryPlanInput {
            choices: MemoryChoices { two_samplings: true, ..input.choices },
            ..input.clone()
        };
        let (one, two) = (MemoryPlan::new(input), MemoryPlan::new(&both));
        let bytes = |plan: &MemoryPlan, name: &str| {
            plan.resident.iter().find(|item| item.name == name).map_or(0, |item| item.bytes)
        };
        let phase = |plan: &MemoryPlan, name: &str| {
            plan.phases.iter().find(|phase| phase.0 == name).map_or(0, |(_, items)| total_bytes(items))
        };
        let copy = "weights that sample ahead";
        assert_eq!(bytes(&two, copy), 2 * bytes(&one, copy));
        assert!(bytes(&two, "threads") > bytes(&one, "threads"));
        let items = 2 * phase(&one, "sampling") + phase(&one, "update");
        assert_eq!(phase(&two, "sampling beside the update"), items);
        assert!(input.fits_two_samplings(None));
        let memory = |bytes: f64| AvailableMemory { bytes: bytes as u64, limit: "free".to_owned() };
        let peak = two.peak_bytes() as f64;
        assert!(input.fits_two_samplings(Some(&memory(peak / 0.89))));
        assert!(!input.fits_two_samplings(Some(&memory(peak / 0.91))));
        let on_gpu = MemoryPlanInput {
            choices: MemoryChoices { gpu_sequences: Some(4), ..input.choices },
            ..input.clone()
        };
        assert!(!on_gpu.fits_two_samplings(None));
        let of_two = MemoryPlanInput {
            placement: WeightPlacement { processes: 2, ..input.placement },
            ..input.clone()
        };
        assert!(!of_two.fits_two_samplings(None));
    });
    for text in ["", "rollout.lag_steps = 1\nrollout.step_tokens_max = 8"] {
        check(text, &|input| assert!(!input.fits_two_samplings(None), "{text}"));
    }
}

#[test]
fn the_teachers_weights_and_logits_are_planned_and_stay_on_disk_if_memory_needs_it() {
    let text = "[task]\nname = \"format_rules\"\n[rollout]\nturns_max = 1\n";
    let plan = resolve(Path::new("a.toml"), text, &[]).unwrap();
    let mut startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
    startup.choose_sharding(1, None);
    let config = Config { hidden_size: 512, num_hidden_layers: 6, ..startup.source.config.clone() };
    let specs = parameter_specs(&config);
    let formats: Vec<StoredFormat> = specs
        .iter()
        .map(|spec| if spec.is_expert_matrix() { StoredFormat::Mxfp4 } else { StoredFormat::F32 })
        .collect();
    let teacher = |on_disk| {
        let formats = Some(&formats[..]);
        TeacherInput { config: &config, formats, adapter_bytes: 0, on_disk, added_tokens: 3 }
    };
    let input = startup.memory_plan_input();
    let planned = |teacher| MemoryPlan::new(&MemoryPlanInput { teacher, ..input.clone() });
    let bytes = |plan: &MemoryPlan, name: &str| {
        plan.resident.iter().find(|item| item.name == name).map(|item| item.bytes)
    };
    let in_memory = planned(Some(teacher(false)));
    let held = |layer: &dyn Fn(Option<usize>) -> bool| -> u64 {
        let of_layer = specs.iter().zip(&formats).filter(|(spec, _)| layer(spec.layer));
        of_layer.map(|(spec, format)| zeros(spec, *format).bytes()).sum()
    };
    assert_eq!(bytes(&in_memory, "teacher's weights"), Some(held(&|_| true)));
    let on_disk = planned(Some(teacher(true)));
    let one_layer = held(&|layer| layer.is_none() || layer == Some(0));
    assert_eq!(bytes(&on_disk, "teacher's weights, one layer at a time"), Some(one_layer));
    let update =
        |plan: &MemoryPlan| plan.phases.iter().find(|(name, _)| *name == "update").unwrap().1[0].bytes;
    // A pass of the policy holds the teacher's rows and logits; each has the teacher's width.
    let pass = PassShape {
        config: input.config,
        tokens: 1000,
        targets: 1000,
        has_adapter: false,
        on_gpu: false,
        teacher: Some(&config),
        sequence_ranks: 1,
    };
    let rows = 1000 * 512 * 4;
    let without = PassShape { teacher: None, ..pass }.forward_backward_bytes(true);
    assert!(pass.forward_backward_bytes(true) >= without + rows);
    assert!(update(&in_memory) > update(&planned(None)));
    // The policy as its own teacher has the weights of the reference.
    let own = TeacherInput { config: input.config, formats: None, ..teacher(false) };
    assert_eq!(bytes(&planned(Some(own)), "teacher's weights"), None);
}

#[test]
fn a_gpu_has_a_copy_of_the_trained_weights_and_both_phases_if_it_samples_beside_the_update() {
    let plan = |text: &str, processes: usize| {
        let text = format!("task.name = \"format_rules\"\npolicy.old_logprob = \"rollout\"\n{text}");
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        (input.choices.gpu_sequences, input.placement.processes) = (Some(4), processes);
        MemoryPlan::new(&input)
    };
    let bytes = |plan: &MemoryPlan, name: &str| {
        plan.resident.iter().find(|item| item.name == name).map_or(0, |item| item.bytes)
    };
    let phase = |plan: &MemoryPlan, name: &str| {
        plan.phases.iter().find(|phase| phase.0 == name).map(|(_, items)| total_bytes(items))
    };
    let (copy, beside) = ("weights that sample ahead", "sampling beside the update");
    let (table, lag) = ("rotary embedding's table", "rollout.lag_steps = 1\n");
    let (without, ahead, on_two) = (plan("", 1), plan(lag, 1), plan(lag, 2));
    for before in [&without, &on_two] {
        assert_eq!((bytes(before, copy), phase(before, beside)), (0, None));
    }
    assert_eq!(bytes(&ahead, copy), bytes(&ahead, "weights"));
    assert_eq!(bytes(&ahead, table), 2 * bytes(&without, table));
    let both = phase(&ahead, "sampling").unwrap() + phase(&ahead, "update").unwrap();
    assert_eq!(phase(&ahead, beside), Some(both));
    assert_eq!(ahead.peak_bytes(), ahead.resident_bytes() + both);
    // Muon's products have memory of their own, and one moment takes less than two.
    let muon = "train.optimizer.kind = \"muon\"\n";
    let (orthogonal, beside_sampling) = (plan(muon, 1), plan(&format!("{lag}{muon}"), 1));
    assert_eq!(phase(&without, "optimizer"), None);
    let products = phase(&orthogonal, "optimizer").unwrap();
    assert!(products > 0 && bytes(&orthogonal, "optimizer") < bytes(&without, "optimizer"));
    let sampling = phase(&beside_sampling, "sampling").unwrap();
    assert_eq!(phase(&beside_sampling, "optimizer"), Some(sampling + products));
    let frozen = plan(&format!("{lag}train.freeze = [\"*.mlp.experts.*\"]"), 1);
    assert!(bytes(&frozen, copy) < bytes(&frozen, "weights"));
}

/// The plan of several GPUs had shards in host memory.
#[test]
fn several_gpus_hold_shards_and_gather_weights() {
    const PROCESSES: u64 = 2;
    let plan = |recompute: bool, processes: u64| {
        let text = format!(
            "task.name = \"format_rules\"\nmodel.architecture.hidden_size = 512\ncold_start.steps = 0\n\
             train.recompute_layers = {recompute}"
        );
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        (input.choices.gpu_sequences, input.placement.processes) = (Some(4), processes as usize);
        MemoryPlan::new(&input)
    };
    let (one, two, two_kept) = (plan(true, 1), plan(true, PROCESSES), plan(false, PROCESSES));
    let bytes =
        |plan: &MemoryPlan, name: &str| plan.resident.iter().find(|item| item.name == name).unwrap().bytes;
    for name in ["weights", "gradients", "optimizer"] {
        let (whole, shard) = (bytes(&one, name), bytes(&two, name));
        assert!(
            shard * PROCESSES >= whole && shard * PROCESSES < whole * 11 / 10,
            "{name}: {shard} of {whole}"
        );
    }
    let item = |plan: &MemoryPlan, phase: &str, name: &str| {
        let (_, items) = plan.phases.iter().find(|(other, _)| *other == phase).unwrap();
        items.iter().find(|item| item.name == name).map_or(0, |item| item.bytes)
    };
    let gathered = "gathered weights, exchanged gradients";
    assert_eq!([item(&one, "sampling", "weights, gathered"), item(&one, "update", gathered)], [0, 0]);
    assert!(item(&two, "sampling", "weights, gathered") >= bytes(&one, "weights"));
    assert!(item(&two, "update", gathered) > 0);
    // Without recomputation, the graph holds the weights of all layers when the backward pass begins.
    assert!(item(&two_kept, "update", gathered) >= item(&two, "sampling", "weights, gathered"));
    assert!(two_kept.peak_bytes() > two.peak_bytes(), "{two_kept}\n{two}");
}

/// Several GPUs that share sequences have a part of the rows each, and the exchanged heads beside them.
#[test]
fn gpus_that_share_sequences_have_their_rows_and_the_exchanged_heads() {
    let update = |sequence: usize, gpu_sequences: Option<usize>, recompute: bool| {
        let text = format!(
            "task.name = \"format_rules\"\nparallel.sequence = {sequence}\ncold_start.steps = 0\n\
             train.recompute_layers = {recompute}\nmodel.architecture.num_attention_heads = 8\n\
             model.architecture.num_key_value_heads = 2"
        );
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        (input.choices.gpu_sequences, input.placement.processes) = (gpu_sequences, 4);
        let plan = MemoryPlan::new(&input);
        let (_, items) = plan.phases.iter().find(|(name, _)| *name == "update").unwrap();
        (items[0].bytes, input.local_micro_batch_tokens(), input.micro_batch_tokens())
    };
    for gpu_sequences in [None, Some(4)] {
        for recompute in [true, false] {
            let (whole, all, micro_batch) = update(1, gpu_sequences, recompute);
            let (split, local, _) = update(4, gpu_sequences, recompute);
            assert_eq!((all, local), (micro_batch, micro_batch.div_ceil(4)));
            // More than a quarter: queries, keys, values and attention's output are there twice.
            assert!(split > whole / 4 && split < whole * 2 / 3, "{split} of {whole}");
        }
    }
}

/// The plan had the longest prompt and response in place of the longest row, which may be shorter or longer.
#[test]
fn an_sft_run_is_planned_for_its_longest_row() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.jsonl");
    let row =
        |tokens: usize| format!("{{\"tokens\": {:?}, \"mask\": {:?}}}\n", vec![1; tokens], vec![1; tokens]);
    std::fs::write(&file, row(20) + &row(150) + &row(30)).unwrap();
    let tokens = |more: &str| {
        let text = format!(
            "task.name = \"format_rules\"\n[cold_start]\nsteps = 1\ntrain_file = {:?}\n{more}[train]\nmicro_batch_tokens = 100\n",
            file.display().to_string()
        );
        let plan = resolve(Path::new("a.toml"), &text, &[]).unwrap();
        let startup = Startup::open(plan, ModelCommand::Train, &Console::silent()).unwrap();
        let recipe = Recipe {
            train: TrainSettings { steps: 0, ..startup.environment.plan.recipe.train.clone() },
            ..startup.environment.plan.recipe.clone()
        };
        let input = startup.memory_plan_input();
        (
            MemoryPlanInput { recipe: &recipe, ..input.clone() }.micro_batch_tokens(),
            input.micro_batch_tokens(),
        )
    };
    assert_eq!(tokens("batch_size = 2\n").0, 150);
    let (sft, rl) = tokens("batch_size = 1\n");
    // With reinforcement learning, the longest sequence has a prompt and a response.
    assert!(sft == 150 && rl > 150, "{sft}, {rl}");
}

/// The plan had two sums for each row of a part of split attention, which has eight. It had the logits of the
/// drawn rows for a server, which scores the rows of prompts too.
#[test]
fn a_gpus_parts_of_attention_and_scored_rows_are_planned() {
    let plan = |command| {
        let text = "task.name = \"format_rules\"\nmodel.architecture.max_position_embeddings = 4096\n\
                    rollout.sequences_max = 3\nrollout.response_tokens_max = 3000";
        let plan = resolve(Path::new("a.toml"), text, &[]).unwrap();
        let startup = Startup::open(plan, command, &Console::silent()).unwrap();
        let mut input = startup.memory_plan_input();
        input.choices.gpu_sequences = Some(4);
        let item = |name: &str| {
            let (_, items) = input.gpu_phases(4).swap_remove(0);
            items.iter().find(|item| item.name == name).unwrap().bytes
        };
        let Config { num_attention_heads: heads, head_dim, .. } = *input.config;
        let parts = 3 * input.longest_sequence().div_ceil(CHUNK_KEYS);
        assert!(
            parts >= 18 && item("partial attention results") >= (parts * heads * (head_dim + 8) * 4) as u64
        );
        let tables = 4 * input.longest_sequence().div_ceil(PAGE_POSITIONS) * 4;
        assert!(item("page tables and rows of decode") > tables as u64);
        input.sampled_rows_max()
    };
    assert_eq!([plan(ModelCommand::Rollout), plan(ModelCommand::Serve)], [3, FORWARD_TOKENS_MAX]);
}
