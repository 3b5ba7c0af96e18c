//! The facts about a run: the header on the console, and `model.json` for the report page.

use super::environment::Environment;
use super::loaded::LoadedModel;
use super::memory::{ModelCommand, SecondWeights};
use super::step_time::StepProducts;
use crate::actor::optimizer::update_flop;
use crate::error::shell_quote;
use crate::interpreter::InterpreterKind;
use crate::metrics::{format_count, format_number};
use crate::model::names::ParameterSpec;
use crate::ops::muon::measure_flop_rate;
use crate::ops::packed_weights::BlockType;
use crate::recipe::Recipe;
use crate::rollout::RolloutSettings;
use crate::settings::Choice;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Returns the contents of `model.json`: the model's name, family, device and size.
pub fn model_facts(loaded: &LoadedModel, recipe: &Recipe, device_name: &str) -> Value {
    let parameters = &loaded.actor.parameters;
    let count = |only_trainable: bool| -> usize {
        (0..parameters.len())
            .filter(|&index| !only_trainable || loaded.trainable.get(index).copied().unwrap_or(true))
            .map(|index| parameters.specs[index].element_count())
            .sum()
    };
    let config = loaded.config();
    let path = recipe.model.path.as_deref();
    let folder = path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    json!({
        "name": folder,
        "model_type": config.family.name(),
        "device": device_name,
        "layers": config.num_hidden_layers,
        "parameters": count(false),
        "learning": count(true),
    })
}

/// Returns the header's line about the work of the command: label and text.
fn work_line(environment: &Environment, command: ModelCommand) -> (&'static str, String) {
    let recipe = environment.recipe();
    let RolloutSettings { prompts_per_step, samples_per_prompt, .. } = &recipe.rollout;
    let prompts = format_count(*prompts_per_step as u64, "prompt");
    let samples = format!("{prompts} × {samples_per_prompt}");
    match command {
        ModelCommand::Train => {
            let (cold, train) = (recipe.cold_start.steps, recipe.train.steps);
            let whole = |steps: u64| format_number(steps as f64);
            if train == 0 && cold > 0 {
                return ("steps", format!("{} of SFT", whole(cold)));
            }
            let cold =
                if cold > 0 { format!("{} of SFT warm-up, then ", whole(cold)) } else { String::new() };
            let noun = if *samples_per_prompt == 1 { "sample" } else { "samples" };
            ("steps", format!("{cold}{} of reinforcement learning, {samples} {noun} each", whole(train)))
        }
        ModelCommand::Eval => {
            let problems: usize =
                environment.validation_prompts().iter().map(|(_, problems)| problems.len()).sum();
            let problems = format_count(problems as u64, "held-out problem");
            ("sampled", format!("{problems} × {}", recipe.eval.samples))
        }
        ModelCommand::CheckMismatch(SecondWeights::Changed) => (
            "compared",
            "the file's log-probabilities with this model's log-probabilities of the same tokens".to_owned(),
        ),
        ModelCommand::CheckMismatch(SecondWeights::Rounded(_)) => (
            "compared",
            format!("the log-probabilities of rollout and training, over {samples} trajectories"),
        ),
        ModelCommand::Rollout | ModelCommand::Chat | ModelCommand::Serve => {
            ("sampled", format!("{samples}, as in one training step"))
        }
    }
}

/// Returns the work of Muon in an update of the policy, as text: operations, and on a CPU the time, measured
/// with a small matrix. `None` without Muon.
pub fn muon_cost(
    recipe: &Recipe,
    specs: &[ParameterSpec],
    trainable: &[bool],
    is_cpu: bool,
) -> Option<String> {
    let settings =
        if recipe.train.steps > 0 { &recipe.train.optimizer } else { &recipe.cold_start.optimizer };
    let is_trainable = |index: usize| trainable.get(index).copied().unwrap_or(true);
    let trained = specs.iter().enumerate().filter(|(index, _)| is_trainable(*index));
    let flop = update_flop(settings, trained.map(|(_, spec)| spec));
    if flop == 0.0 {
        return None;
    }
    let seconds = if is_cpu { flop / measure_flop_rate() } else { 0.0 };
    let time = match seconds {
        0.0 => String::new(),
        short if short < 0.1 => ", under 0.1 s".to_owned(),
        seconds => format!(", about {seconds:.1} s"),
    };
    Some(format!("{:.1} GFLOP an update{time}", flop / 1e9))
}

/// Returns the files whose problems the command samples, if the task reads files.
fn data(recipe: &Recipe, command: ModelCommand) -> Option<(&'static str, String)> {
    let task = &recipe.task;
    let held_out = task.validation_file.iter().chain(&task.validation_files);
    let files: Vec<_> = match command {
        ModelCommand::Eval => held_out.collect(),
        ModelCommand::Train if sft_file(recipe, command).is_some() => {
            sft_file(recipe, command).into_iter().chain(&recipe.cold_start.validation_file).collect()
        }
        ModelCommand::Train => task.train_file.iter().chain(held_out).collect(),
        ModelCommand::Chat | ModelCommand::Serve | ModelCommand::CheckMismatch(SecondWeights::Changed) => {
            vec![]
        }
        ModelCommand::Rollout | ModelCommand::CheckMismatch(SecondWeights::Rounded(_)) => {
            task.train_file.iter().collect()
        }
    };
    let files: Vec<String> = files.into_iter().map(|file| file.display().to_string()).collect();
    (!files.is_empty()).then(|| ("data", files.join(", ")))
}

/// Returns the file of the rows if the run is SFT on a file alone. Such a run does not use the task.
fn sft_file(recipe: &Recipe, command: ModelCommand) -> Option<&PathBuf> {
    let is_sft_alone =
        command == ModelCommand::Train && recipe.train.steps == 0 && recipe.cold_start.steps > 0;
    recipe.cold_start.train_file.as_ref().filter(|_| is_sft_alone)
}

/// Returns the lines of the console header: model, task, data, work, device, threads, folder, and the sandbox
/// if there is one.
pub fn lines(
    loaded: &LoadedModel,
    environment: &Environment,
    device_name: &str,
    command: ModelCommand,
    folder: &Path,
) -> Vec<String> {
    let recipe = environment.recipe();
    let facts = model_facts(loaded, recipe, device_name);
    let number = |key: &str| facts[key].as_f64().unwrap_or(0.0);
    let name = facts["name"].as_str().map(|name| format!("{name}, ")).unwrap_or_default();
    let layers = format_count(number("layers") as u64, "layer");
    let trainable = match number("learning") {
        _ if !command.trains() => String::new(),
        _ if !recipe.trains() => ", none trainable".to_owned(),
        all if all == number("parameters") => ", all trainable".to_owned(),
        some => format!(", {} trainable", format_number(some)),
    };
    let kind = facts["model_type"].as_str().unwrap_or_default();
    let parameters = format_number(number("parameters"));
    let tool = match (&environment.interpreter, recipe.interpreter.kind) {
        (None, _) => "",
        (Some(_), InterpreterKind::Embedded) => ", with the embedded Python tool",
        (Some(_), InterpreterKind::CPython) => ", with the machine's Python as its tool",
    };
    let mesh = loaded.mesh();
    let mut threads = loaded.actor.execution.threads.count().to_string();
    if mesh.ranks() > 1 {
        threads += &format!(" in each of {} processes", mesh.ranks());
    }
    if mesh.sequence_ranks() > 1 {
        threads += &format!(", {} per sequence-parallel group", mesh.sequence_ranks());
    }
    if let Some(copies) = mesh.replica_group() {
        threads += &format!(", {} copies of the weights", copies.ranks());
    }
    let blocks: Vec<&str> = loaded.actor.parameters.block_types().into_iter().map(BlockType::name).collect();
    let packed = if blocks.is_empty() { String::new() } else { format!(", packed in {}", blocks.join(", ")) };
    let model = ("model", format!("{name}{kind}, {layers}, {parameters} parameters{packed}{trainable}"));
    let task = ("task", format!("{}{tool}", environment.task.name()));
    let is_of_file = command == ModelCommand::CheckMismatch(SecondWeights::Changed);
    let task = Some(task).filter(|_| !is_of_file && sft_file(recipe, command).is_none());
    let parameters = &loaded.actor.parameters;
    let muon = match command.trains() {
        true => muon_cost(recipe, &parameters.specs, &loaded.trainable, parameters.device().is_cpu()),
        false => None,
    };
    let muon = muon.map(|cost| ("muon", cost));
    let products = StepProducts {
        recipe,
        config: loaded.config(),
        specs: &parameters.specs,
        blocks: parameters.block_types().first().copied(),
        has_adapter: parameters.adapter().is_some(),
        recomputes_layers: loaded.actor.execution.recompute_layers,
    };
    // A GPU and several processes have other rates.
    let is_measured = command.trains() && parameters.device().is_cpu() && mesh.ranks() == 1;
    let step = if is_measured {
        loaded.actor.execution.threads.run_on_all(|| products.time()).ok().flatten()
    } else {
        None
    };
    let step = step.map(|time| ("a step", time));
    let rest = [Some(work_line(environment, command)), step, muon].into_iter().flatten().chain([
        ("device", device_name.to_owned()),
        ("threads", threads),
        ("folder", folder.display().to_string()),
    ]);
    // Every command that may run generated code shows the sandbox.
    let confinement = environment.sandbox_description().map(|confinement| ("sandbox", confinement));
    let head = [model].into_iter().chain(task).chain(data(recipe, command)).chain(rest);
    head.chain(confinement.filter(|_| !is_of_file))
        .map(|(label, text)| format!("{label:<8} {text}"))
        .collect()
}

/// Returns a command line of this program. Its first word is the path that started this process.
pub fn command_line(arguments: &[&str]) -> String {
    let program = std::env::args().next().unwrap_or_else(|| "rloss".to_owned());
    let words = std::iter::once(program.as_str()).chain(arguments.iter().copied());
    words.map(shell_quote).collect::<Vec<_>>().join(" ")
}
