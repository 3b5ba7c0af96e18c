//! `rloss check-mismatch [RECIPE]`: the same tokens by two paths, every gap, and its likely cause.

use crate::atomic_file::write_file;
use crate::error::{EXIT_BAD_INPUT, EXIT_DONE};
use crate::metrics::sanitize_terminal;
use crate::mismatch::links::Proof;
use crate::mismatch::measure::Measure;
use crate::mismatch::output::{Line, gaps_table, links_table, to_json};
use crate::mismatch::{against, arms, explain::Reference};
use crate::recipe::{Arms, Plan, RecipeSource, locate, resolve};
use crate::rollout::{Prompt, RolloutSettings};
use crate::run::collect::{pin_model, show};
use crate::run::workbench::Workbench;
use crate::train::accumulate::Learner;
use crate::trajectory::Trajectory;
use anyhow::{Context, Result};
use clap::Args;
use std::io::Write;
use std::path::{Path, PathBuf};

const QUICKSTART: &str = include_str!("../../recipes/quickstart.toml");

/// What `rloss check-mismatch` takes.
#[derive(Args, Debug, Clone)]
#[command(after_help = arms::help())]
pub struct CheckMismatchArgs {
    /// A recipe file, or a run folder (its resolved recipe and last checkpoint) [default: the quickstart's recipe]
    recipe: Option<PathBuf>,
    /// Replace a recipe's value, such as --set train.seed=1
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Folder for mismatch.json [default: the run folder, or runs/<recipe's name>-mismatch]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Arms to measure: a comma starts another row, a plus combines in one
    #[arg(long, value_name = "A,B+C")]
    arms: Option<String>,
    /// Compare another engine's rows: {"tokens": [...], "logprobs": [null or number a token], "temperature": 1.0}
    #[arg(long, value_name = "FILE", conflicts_with = "arms")]
    against: Option<PathBuf>,
}

impl CheckMismatchArgs {
    fn plan(&self, more: &[String]) -> Result<Plan> {
        let sets: Vec<String> = self.sets.iter().chain(more).cloned().collect();
        let Some(argument) = &self.recipe else {
            return Ok(resolve(Path::new("quickstart.toml"), QUICKSTART, &sets)?);
        };
        let source = locate(argument)?;
        let mut plan = source.resolve(&sets)?;
        // A model that a --set names is the one that is checked.
        pin_model(&mut plan, &source, &sets)?;
        Ok(plan)
    }

    fn out(&self) -> Result<PathBuf> {
        if let Some(out) = &self.out {
            return Ok(out.clone());
        }
        let named = |stem: &str| PathBuf::from("runs").join(format!("{stem}-mismatch"));
        Ok(match &self.recipe {
            None => named("quickstart"),
            Some(argument) => match locate(argument)? {
                RecipeSource::Run(folder) => folder,
                source => named(&source.stem()),
            },
        })
    }
}

/// Prints what it finds and writes `mismatch.json`. Exit code 2 when a row of `--against` was bad.
///
/// # Errors
/// [`crate::error::BadInput`] before any work.
pub fn run(args: &CheckMismatchArgs) -> Result<u8> {
    let out = args.out()?;
    let plan = args.plan(&[])?;
    let rows = arms::rows(args.arms.as_deref().unwrap_or_default(), &plan.recipe.arms);
    let rows = if args.arms.is_some() { rows } else { vec![] };
    let arms: Vec<(String, Arms)> = rows
        .into_iter()
        .map(|row| Ok((row.name, args.plan(&row.sets)?.recipe.arms)))
        .collect::<Result<_>>()?;
    let bench = Workbench::open(plan)?;
    let (lines, verdict, code) = match &args.against {
        Some(file) => check_against(&bench, file)?,
        None => check_arms(&bench, &arms)?,
    };
    show(&format!("{}\n", sanitize_terminal(&verdict)))?;
    std::fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let file = out.join("mismatch.json");
    write_file(&file, &to_json(&lines, &verdict))?;
    show(&format!("{}\n", file.display()))?;
    Ok(code)
}

fn check_against(bench: &Workbench, file: &Path) -> Result<(Vec<Line>, String, u8)> {
    let config = &bench.model.config;
    let found = against::read(file, config.vocab_size, bench.model.context_tokens_max())?;
    for bad in &found.bad {
        // A closed stderr is nobody to report to.
        let _ = writeln!(std::io::stderr(), "error: {}", sanitize_terminal(bad));
    }
    let tokens = bench.recipe().train.micro_batch_tokens;
    let compared = against::compare(reference(bench), &bench.tokenizer, &found.rows, tokens, clip(bench))?;
    show(&format!("{}\n", gaps_table("link", &compared.lines)))?;
    let code = if found.bad.is_empty() { EXIT_DONE } else { EXIT_BAD_INPUT };
    Ok((compared.lines, compared.verdict, code))
}

fn check_arms(bench: &Workbench, rows: &[(String, Arms)]) -> Result<(Vec<Line>, String, u8)> {
    let trajectories = sample(bench)?;
    let trajectories: Vec<&Trajectory> = trajectories.iter().collect();
    let recipe = bench.recipe();
    let Workbench { threads, model, parameters, .. } = bench;
    let proof = Proof {
        learner: Learner { threads, model, parameters },
        rollout: &bench.rollout_policy()?,
        training: bench.training_forward(),
        temperature: recipe.rollout.temperature,
        micro_batch_tokens: recipe.train.micro_batch_tokens,
    };
    let links = proof.links(&trajectories)?;
    let mut lines: Vec<Line> = links.iter().map(Line::of_link).collect();
    show(&format!("{}\n", links_table(&lines)))?;

    let measure = Measure::new(
        reference(bench),
        &trajectories,
        &recipe.arms,
        recipe.train.seed,
        recipe.rollout.temperature,
        clip(bench),
        recipe.train.micro_batch_tokens,
    )?;
    let mut gaps = vec![measure.line("the recipe as it is", &recipe.arms)?];
    for (name, arms) in rows {
        gaps.push(measure.line(name, arms)?);
    }
    show(&format!("{}\n", gaps_table("arm", &gaps)))?;
    let broken: Vec<&str> = links.iter().filter(|link| !link.holds()).map(|link| link.name).collect();
    let tokens = links.last().map_or(0, |link| link.tokens);
    let verdict = if broken.is_empty() {
        format!("rollout and training agree to the last bit on {tokens} sampled tokens")
    } else {
        format!("rollout and training differ; links that fail: {}", broken.join(", "))
    };
    lines.extend(gaps);
    Ok((lines, verdict, EXIT_DONE))
}

/// One training step's rollouts.
fn sample(bench: &Workbench) -> Result<Vec<Trajectory>> {
    let recipe = bench.recipe();
    let prompts: Vec<Prompt> = (0..recipe.rollout.prompts_per_step as u64)
        .map(|index| Prompt { index, problem: bench.task.training_problem(recipe.train.seed, index) })
        .collect();
    let settings = RolloutSettings::training(recipe, bench.preamble.clone(), 0);
    let policy = bench.rollout_policy()?;
    let samples = recipe.rollout.samples_per_prompt;
    let rollouts = bench.rollout(&policy, &settings).groups(&prompts, samples, &|_| (), &|| false)?;
    let rollouts = rollouts.context("the rollout ended early")?;
    Ok(rollouts.groups.into_iter().flat_map(|group| group.trajectories).collect())
}

fn reference(bench: &Workbench) -> Reference<'_> {
    let Workbench { threads, model, parameters, .. } = bench;
    Reference { threads, model, parameters }
}

fn clip(bench: &Workbench) -> (f64, f64) {
    (bench.recipe().policy.clip_low, bench.recipe().policy.clip_high)
}
