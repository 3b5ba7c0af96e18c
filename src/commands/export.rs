//! `rloss export RUN`: exports a run for other programs. `--out FOLDER` writes its adapter, alone or merged
//! into its base. `--gguf FILE` writes the model or its adapter for llama.cpp.

use crate::bad_input;
use crate::checkpoint::gguf::GgufFormat;
use crate::metrics::{Console, format_number, sanitize_terminal};
use crate::model::settings::DeviceKind;
use crate::recipe::{KeyScope, RecipeSource, locate, resolve_for};
use crate::run::export;
use crate::run::memory::ModelCommand;
use crate::run::sampling_folder::print_text;
use crate::run::source::pin_model;
use crate::run::startup::{Started, start};
use crate::settings::Choice;
use crate::tasks::{TaskName, TaskSettings};
use crate::tinker::saved_folder;
use anyhow::{Context, Result};
use clap::Args;
use std::path::{Path, PathBuf};

/// Arguments of `rloss export`.
#[derive(Args, Debug, Clone)]
pub struct ExportArgs {
    /// A run folder (its last checkpoint) or a checkpoint; for --out, the run must have an adapter. Or a path
    /// that a Tinker client saved: tinker://RUN/weights/NAME
    run: PathBuf,
    /// The folder of saved paths, as `rloss serve --train` has it
    #[arg(long, default_value = "tinker-store")]
    store: PathBuf,
    /// Write a whole model, with the adapter merged into its weights, in checkpoint.dtype or --type
    #[arg(long)]
    merged: bool,
    /// Replace a recipe's value, such as --set checkpoint.dtype=f32
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Do not measure what rounding the merged model changes
    #[arg(long, requires = "merged", conflicts_with = "gguf")]
    no_compare: bool,
    /// The folder to write
    #[arg(long, required_unless_present = "gguf", conflicts_with = "gguf")]
    out: Option<PathBuf>,
    /// Write a GGUF file for llama.cpp, Ollama or LM Studio: the adapter, or with --merged a whole model
    #[arg(long, value_name = "FILE")]
    gguf: Option<PathBuf>,
    /// The type of matrices in the GGUF file: f32, bf16, f16, q8_0, or mxfp4 for the experts of GPT-OSS
    #[arg(long = "type", value_name = "TYPE", requires = "gguf", default_value = "bf16", value_parser = parse_matrix_type)]
    format: GgufFormat,
}

/// The task of an export: one without files, programs and a tool.
const TASK: &str = "arithmetic_single";

/// Above this share of what training changed, a rounding error is warned of.
const ROUNDING_SHARE_MAX: f64 = 0.2;

fn percent(share: f64) -> String {
    format!("{}%", format_number(100.0 * share))
}

/// The recipe of a saved path.
const SAVED_RECIPE: &str = "task.name = \"arithmetic_single\"\n";

/// Parses `--type`.
fn parse_matrix_type(word: &str) -> Result<GgufFormat, String> {
    GgufFormat::from_name(word).ok_or_else(|| {
        let known: Vec<&str> = GgufFormat::all().into_iter().map(Choice::name).collect();
        format!("known: {}", known.join(", "))
    })
}

/// Writes the folder or the file, and prints its contents. For a merged model, also prints the rounding
/// error.
///
/// # Errors
/// [`crate::error::BadInput`] before anything is written.
pub fn run(args: &ExportArgs) -> Result<()> {
    let Some(out) = args.out.as_ref().or(args.gguf.as_ref()) else {
        return Err(bad_input!("give a folder with --out, or a file with --gguf"));
    };
    export::refuse_existing(out)?;
    let saved = args.run.to_str().filter(|path| path.starts_with("tinker://"));
    let (source, mut plan) = match saved {
        None => {
            let source = locate(&args.run)?;
            let plan = source.resolve_for(KeyScope::Export, &args.sets)?;
            (Some(source), plan)
        }
        Some(path) => {
            let folder = saved_folder(&args.store, path)?;
            let sets = [&[format!("model.path={}", folder.display())], &args.sets[..]].concat();
            (None, resolve_for(KeyScope::Export, Path::new("rloss export"), SAVED_RECIPE, &sets)?)
        }
    };
    // An export needs no task, so it starts none of the recipe's programs, which nobody has consented to.
    let name = TaskName::from_name(TASK).context("the task of an export")?;
    plan.recipe.task = TaskSettings { name, ..TaskSettings::default() };
    plan.recipe.tools = None;
    // It merges on the CPU, and compares with the folder that it reads back there.
    plan.recipe.device = DeviceKind::Cpu;
    // Nor does it sample, so the memory plan has no kept prompts.
    plan.recipe.rollout.prefix_tokens_max = 0;
    if let Some(source) = &source {
        pin_model(&mut plan, source, &args.sets)?;
    }
    let path_text = out.display().to_string();
    let path_text = sanitize_terminal(&path_text);
    if args.gguf.is_some() && !args.merged && export::write_gguf_adapter(&plan.recipe, out)? {
        return print_text(&format!(
            "{path_text}: the adapter, for llama.cpp (--lora); --merged writes a whole model\n"
        ));
    }
    if args.gguf.is_some() {
        let console = Console::stderr(plan.recipe.logging.console_every_steps);
        let Started { loaded, environment, .. } = start(plan, ModelCommand::Chat, &console)?;
        export::write_gguf_file(&loaded, &environment, args.format, args.merged, out, &console)?;
        let adapter = if args.merged { " with its adapter merged" } else { "" };
        return print_text(&format!("{path_text}: the model{adapter}, {}\n", args.format));
    }
    let run = source.as_ref().and_then(RecipeSource::run);
    if !args.merged {
        export::export_adapter(&plan.recipe, run, out)?;
        return print_text(&format!("{path_text}: the adapter, in PEFT's format\n"));
    }
    let console = Console::stderr(plan.recipe.logging.console_every_steps);
    let Started { loaded, environment, .. } = start(plan, ModelCommand::Chat, &console)?;
    let recipe = environment.recipe();
    let compares = run.filter(|_| !args.no_compare);
    let trajectories = compares.map(export::last_trajectories).transpose()?.flatten();
    let cost = export::export_merged_model(&loaded, recipe, (run, trajectories.as_deref()), out, &console)?;
    let dtype = recipe.checkpoint.dtype;
    if let Some(share) = cost.map(|cost| cost.share()).filter(|share| *share > ROUNDING_SHARE_MAX) {
        console.print(&format!(
            "warning: rounding to {dtype} changes {} of what training changed; {}",
            percent(share),
            "--set checkpoint.dtype=f32 keeps it, or give other programs the adapter, without --merged"
        ));
    }
    print_text(&match cost {
        Some(cost) if cost.largest == 0.0 => format!(
            "{path_text}: the model with its adapter merged, {dtype}; merging changes no log-probability of {} sampled tokens\n",
            cost.tokens
        ),
        Some(cost) => format!(
            "{path_text}: the model with its adapter merged, {dtype}; compared with the unmerged adapter, the log-probabilities of \
             {} sampled tokens change by {:.2e} at most, and by {:.2e} in the mean, {} of what training changed\n",
            cost.tokens,
            cost.largest,
            cost.mean,
            percent(cost.share())
        ),
        None => format!(
            "{path_text}: the model with its adapter merged, {dtype}; the rounding error is not measured{}\n",
            if args.no_compare { "" } else { ", because the run stores no trajectories" }
        ),
    })
}
