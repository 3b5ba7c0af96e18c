//! `rloss check RECIPE|RUN`: checks a recipe and prints its plan. Nothing is trained or sampled.

use crate::bad_input;
use crate::commands::arguments::RecipeArgs;
use crate::dist::{Mesh, RolloutWeightPlacement};
use crate::harmony::Message;
use crate::interpreter::SessionId;
use crate::learner::CriticSettings;
use crate::metrics::{Console, format_count, sanitize_terminal};
use crate::model::names::parameter_specs;
use crate::model::rounding::WeightRounding;
use crate::model::settings::AdapterSettings;
use crate::recipe::{Plan, locate, resolve};
use crate::run::data_inputs::problems_per_step;
use crate::run::environment::Environment;
use crate::run::header::muon_cost;
use crate::run::memory::{
    AvailableMemory, MemoryPlan, MemoryPlanInput, ModelCommand, SecondWeights, WeightPlacement,
    available_memory, gigabytes,
};
use crate::run::processes::{check_division, check_optimizers};
use crate::run::sampling_folder::print_text;
use crate::run::source::pin_model;
use crate::run::startup::Startup;
use crate::run::step_time::StepProducts;
use crate::run::target::TargetMachine;
use crate::run::trust::{ask_consent, program_lines};
use crate::settings::Entry;
use crate::tasks::{Problem, Reward, RewardFailure, Task, ToolsSettings, Transcript, shown_answer};
use crate::trainer::TrainingData;
use crate::trajectory::Outcome;
use anyhow::Result;
use clap::Args;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Arguments of `rloss check`.
#[derive(Args, Debug, Clone)]
pub struct CheckArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Show every key with its value, not only those that differ from the defaults
    #[arg(long)]
    all: bool,
    /// Plan the memory of one of N processes that train together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    processes: u32,
    /// Plan for another machine, such as "8 x H200, 1500 GB": its GPUs and the host's memory
    #[arg(long = "for", value_name = "MACHINE", conflicts_with_all = ["processes", "no_run"])]
    target: Option<TargetMachine>,
    /// Show the recipe and the programs that it names; start no program, and plan no memory
    #[arg(long, conflicts_with = "processes")]
    no_run: bool,
}

/// An answer that stands in for the model's answer, because no model is loaded.
const ANSWER: &str = "I do not know.";

/// Prints the recipe (all keys, or those that differ from the defaults) and its warnings. Then prints the
/// first prompt, a dialogue with the task, and the memory plan of each command. Nothing is trained, sampled
/// or written, and no weights are read.
///
/// # Errors
/// [`crate::error::BadInput`] with every mistake in the recipe, its model and its task. Also when training
/// does not fit in memory. If the recipe does not train: when sampling does not fit.
pub fn run(args: &CheckArgs) -> Result<()> {
    let CheckArgs { recipe: args, all, processes, no_run, target } = args;
    let processes = &target.as_ref().map_or(*processes, |target| target.gpus as u32);
    let source = locate(&args.recipe)?;
    let mut plan = source.resolve(&args.sets)?;
    pin_model(&mut plan, &source, &args.sets)?;
    if *no_run {
        print_text(&sanitize_terminal(&format_recipe(&plan, *all)?))?;
        let lines: String = program_lines(&plan.recipe).iter().map(|line| format!("\n{line}")).collect();
        return print_text(&format!("{lines}\n"));
    }
    ask_consent(&source, &plan.recipe, &args.sets, args.trust, &Console::plain())?;
    // The first failure of the task becomes the error of this command.
    let task = plan.recipe.task.command.join(" ");
    let server = plan.recipe.tools.as_ref().map(|tools| tools.mcp.command.join(" ")).unwrap_or_default();
    let program =
        [task, server].into_iter().filter(|command| !command.is_empty()).collect::<Vec<_>>().join(" or ");
    let mut startup = notify_if_slow(&program, || {
        let alone = (&Mesh::single(), None);
        Startup::open_for(plan, ModelCommand::Train, alone, target.as_ref(), &Console::silent())
    })?;
    let host = target.as_ref().map(TargetMachine::host_memory).or_else(available_memory);
    let available = startup.available_memory(host.clone());
    if *processes > 1 {
        check_division(&startup.environment.plan, *processes as usize)?;
        check_optimizers(&startup.environment.plan, *processes as usize)?;
    }
    startup.choose_sharding(*processes as usize, available.as_ref());
    print_text(&sanitize_terminal(&format_recipe(&startup.environment.plan, *all)?))?;
    print_text(&sanitize_terminal(&template_facts(&startup.environment)))?;
    let problem = notify_if_slow(&program, || startup.first_problem());
    if startup.environment.plan.recipe.trains() {
        notify_if_slow(&program, || TrainingData::open(&startup.data_inputs()))?;
    }
    if startup.environment.plan.recipe.task.is_agent() {
        print_text(&sanitize_terminal(&first_episode(&problem)))?;
        return print_memory_plan(&startup, *processes, available.as_ref(), host.as_ref());
    }
    print_text(&rows_per_step(&startup.environment))?;
    print_text(&sanitize_terminal(&first_prompt(&startup, &problem)?))?;
    print_text(&sanitize_terminal(&sample_program(&startup.environment)))?;
    print_text(&sanitize_terminal(&notify_if_slow(&program, || {
        sample_dialogue(startup.environment.task.as_ref(), &problem)
    })?))?;
    print_memory_plan(&startup, *processes, available.as_ref(), host.as_ref())
}

/// Returns what was found of a model's own chat template; nothing without one.
fn template_facts(environment: &Environment) -> String {
    let facts = environment.chat.template_facts();
    if facts.is_empty() {
        return String::new();
    }
    let date = environment.plan.recipe.chat.current_date.as_deref();
    let date = date.filter(|_| environment.chat.template_reads("strftime_now"));
    let date = date.map(|date| format!("  its date is {date} in the whole run\n")).unwrap_or_default();
    let lines: String = facts.iter().map(|fact| format!("  {fact}\n")).collect();
    format!("\nThe model's own chat template renders conversations:\n\n{lines}{date}")
}

/// Time after which the user is told that a program is slow.
const SLOW_PROGRAM_DELAY: Duration = Duration::from_secs(2);

/// Runs `work`. If it is slow and waits for the user's `program`, prints a line that says so. An empty
/// `program` means that there is none.
fn notify_if_slow<T>(program: &str, work: impl FnOnce() -> T) -> T {
    let (done, ended) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if ended.recv_timeout(SLOW_PROGRAM_DELAY) == Err(RecvTimeoutError::Timeout) && !program.is_empty()
            {
                let line = format!("waiting for an answer from {program}");
                let _ = writeln!(std::io::stderr(), "{}", sanitize_terminal(&line));
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Formats the recipe's warnings and its keys: all keys, or those that differ from the defaults.
fn format_recipe(plan: &Plan, all: bool) -> Result<String> {
    let warnings: String = plan.warnings.iter().map(|warning| format!("\nwarning: {warning}\n")).collect();
    if all {
        return Ok(format!("{}{warnings}", plan.to_toml()));
    }
    let mut defaults = resolve(Path::new("defaults"), "", &[])?.recipe;
    // The keys of a table that the recipe adds are compared with the defaults of this table.
    const ADDED: [&str; 3] = ["adapter", "tools", "critic"];
    defaults.adapter = plan.recipe.adapter.as_ref().map(|_| AdapterSettings::default());
    defaults.tools = plan.recipe.tools.as_ref().map(|_| ToolsSettings::default());
    defaults.critic = plan.recipe.critic.as_ref().map(|_| CriticSettings::default());
    let entries = plan.recipe.entries().into_iter().zip(defaults.entries());
    let lines: String = entries
        .filter_map(|(own, default)| match &own {
            Entry::Table { path, present: true, .. } if ADDED.contains(&&**path) => {
                Some(format!("[{path}]\n"))
            }
            Entry::Key { path, value: Some(value), .. } if own != default => {
                Some(format!("{path} = {value}\n"))
            }
            _ => None,
        })
        .collect();
    Ok(format!("Keys that differ from the defaults (--all shows every key):\n\n{lines}{warnings}"))
}

/// Describes the first episode of an agent. Its program is not started, because it needs a model to play.
fn first_episode(problem: &Problem) -> String {
    format!(
        "\nFirst episode: {}, \"problem\": {}\nThe program of task.command plays it; this command does not start the program.\n",
        problem.id, problem.answer
    )
}

/// Describes how many rows of the task's files a step uses up. Empty if the task generates its problems.
fn rows_per_step(environment: &Environment) -> String {
    let (Some(rows), recipe) = (environment.task.training_rows(), environment.recipe()) else {
        return String::new();
    };
    let each = problems_per_step(recipe);
    format!(
        "\nData: {}, and {} with too long prompts. A step uses up {each}: an epoch is {:.1} steps, and the run {:.2} epochs.\n",
        format_count(rows as u64, "training row"),
        environment.long_problems,
        rows as f64 / each as f64,
        (recipe.train.steps * each) as f64 / rows as f64,
    )
}

fn first_prompt(startup: &Startup, problem: &Problem) -> Result<String> {
    let (text, tokens) = startup.prompt(problem)?;
    let tokens = format_count(tokens as u64, "token");
    Ok(format!(
        "\nFirst prompt of {} in the order of training, {tokens}:\n\n{text}\n",
        startup.environment.task.name()
    ))
}

/// Runs a program of an answer, and shows what is inserted after it. Empty if programs do not run.
fn sample_program(environment: &Environment) -> String {
    let form = environment.recipe().interpreter.form;
    let Some((interpreter, answer)) = environment.interpreter.as_ref().zip(form.example("print(6 * 7)"))
    else {
        return String::new();
    };
    let reply = interpreter.call(SessionId(0), "print(6 * 7)\n");
    interpreter.close(SessionId(0));
    let inserted = form.output_text(answer.as_bytes(), &reply.text);
    format!("\nA program in an answer, and what is inserted after it:\n\n{answer}{inserted}")
}

/// Runs a short conversation with the task: a wrong answer, the task's replies, and the reward.
fn sample_dialogue(task: &dyn Task, problem: &Problem) -> Result<String> {
    let failed =
        |error: anyhow::Error| bad_input!("the task {}, problem {}: {error:#}", task.name(), problem.id);
    let mut messages = vec![Message::assistant("final", ANSWER)];
    fn transcript(messages: &[Message]) -> Transcript<'_> {
        Transcript::new(messages, Outcome::Finished)
    }
    let mut lines = vec![("model", ANSWER.to_owned())];
    if let Some(next) = task.next_user_message(problem, &transcript(&messages)).map_err(failed)? {
        lines.extend([("user", next.content.clone()), ("model", ANSWER.to_owned())]);
        messages.extend([next, Message::assistant("final", ANSWER)]);
    }
    match task.reward(problem, &transcript(&messages)) {
        // Reward functions may fail on some answers, which are then dropped.
        Err(error) if error.is::<RewardFailure>() => {
            let end = "training drops such answers, and ends if three steps have no others";
            lines.push(("reward", format!("failed: {error:#}; {end}")));
        }
        reward => {
            let Reward { value, success, named } = reward.map_err(failed)?;
            let success = if success { "success" } else { "no success" };
            let named: String = named.iter().map(|(name, value)| format!(", {name} {value}")).collect();
            lines.push(("reward", format!("{value}, {success}{named}")));
            lines.push(("answer", shown_answer(&problem.answer)));
        }
    }
    let lines: String = lines.iter().map(|(who, text)| format!("{who:<8}{text}\n")).collect();
    Ok(format!(
        "\nDialogue with the task {} for a wrong answer, then the reward and the reference answer:\n\n{lines}",
        task.name()
    ))
}

/// Prints the memory plan of training (of sampling, if the recipe does not train), and the peak memory of the
/// other commands.
fn print_memory_plan(
    startup: &Startup,
    processes: u32,
    available: Option<&AvailableMemory>,
    host: Option<&AvailableMemory>,
) -> Result<()> {
    let first =
        if startup.environment.plan.recipe.trains() { ModelCommand::Train } else { ModelCommand::Rollout };
    let subject = startup.memory_plan_input_for(first);
    let plan = MemoryPlan::new(&subject);
    let each = match processes {
        1 => String::new(),
        several => format!(" in each of {several} processes"),
    };
    print_text(&format!("\nPeak memory of `rloss {}`{each}:\n\n{plan}\n", first.name()))?;
    if let Some(note) = subject.blocks_note() {
        print_text(&format!("{note}\n\n"))?;
    }
    let (specs, is_cpu) = (parameter_specs(subject.config), subject.choices.gpu_sequences.is_none());
    let cost = muon_cost(subject.recipe, &specs, &subject.trainable.policy, is_cpu);
    if let Some(cost) = cost.filter(|_| first == ModelCommand::Train) {
        print_text(&format!("Muon: {cost}.\n\n"))?;
    }
    if is_cpu && processes == 1 && !subject.placement.layers_on_demand {
        let products = StepProducts {
            recipe: subject.recipe,
            config: subject.config,
            specs: &specs,
            blocks: subject.packed_block_type(),
            has_adapter: subject.trainable.adapter.is_some(),
            recomputes_layers: subject.recomputes_layers(),
        };
        if let Some(time) = startup.threads.run_on_all(|| products.time())? {
            print_text(&format!("A step takes {time}.\n\n"))?;
        }
    }
    let arms = SecondWeights::Rounded(WeightRounding::from_ablations(&startup.environment.plan.recipe.arms));
    let mismatch = ModelCommand::CheckMismatch(arms);
    let is_held_out = |(_, prompts): &(_, Vec<_>)| !prompts.is_empty();
    let has_held_out = startup.environment.validation_prompts().iter().any(is_held_out);
    if !has_held_out {
        print_text("`rloss eval`: the task has no held-out problems\n")?;
    }
    let eval = has_held_out.then_some(ModelCommand::Eval);
    for command in eval.into_iter().chain([ModelCommand::Rollout, mismatch, ModelCommand::Serve]) {
        // These commands run in a single process.
        let peak = MemoryPlan::new(&MemoryPlanInput {
            placement: WeightPlacement {
                processes: 1,
                rollout_weights: RolloutWeightPlacement::Whole,
                ..subject.placement
            },
            ..startup.memory_plan_input_for(command)
        })
        .peak_bytes();
        print_text(&format!("`rloss {}`: {}\n", command.name(), gigabytes(peak)))?;
    }
    if let Some(found) = available {
        print_text(&format!("Available memory: {} ({}).\n", gigabytes(found.bytes), found.limit))?;
    }
    if subject.choices.gpu_sequences.is_some() {
        print_text(&format!("Host memory of a process: {}.\n", gigabytes(subject.host_bytes())))?;
        startup.check_host_memory(host)?;
    }
    if let Some(warning) =
        plan.check_available(available, &subject.remedies(available.map_or(u64::MAX, |free| free.bytes)))?
    {
        print_text(&format!("warning: {warning}\n"))?;
    }
    Ok(())
}
