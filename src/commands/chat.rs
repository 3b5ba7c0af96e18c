//! `rloss chat MODEL|RECIPE|RUN`: a chat with a model in the terminal, with the recipe's tool if there is
//! one.

use crate::bounded_file;
use crate::chat::{Chat, Texts, TurnReader};
use crate::commands::arguments::{locate_recipe_or_model, recipe_help};
use crate::engine::Engine;
use crate::harmony::{Message, Role};
use crate::metrics::{Console, format_count, sanitize_line, sanitize_terminal};
use crate::panics::lock;
use crate::recipe::{KeyScope, Plan, resolve_for};
use crate::rollout::{Hooks, Prompt, Rollout, RolloutPlan, TurnPosition};
use crate::run::environment::Environment;
use crate::run::memory::ModelCommand;
use crate::run::sampling::Sampling;
use crate::run::sampling_folder::print_text;
use crate::run::signals::AnswerInterrupt;
use crate::run::source::pin_model;
use crate::run::startup::{Started, start};
use crate::run::trust::ask_consent;
use crate::tasks::{Problem, Reward, Task, Transcript, ValidationSet};
use crate::trajectory::{Outcome, Trajectory};
use anyhow::{Context, Result};
use clap::Args;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Arguments of `rloss chat`.
#[derive(Args, Debug, Clone)]
pub struct ChatArgs {
    #[arg(help = format!("A model folder or a GGUF file, or one of these: {}", recipe_help()))]
    recipe: PathBuf,
    /// Replace a recipe's value, such as --set eval.temperature=0
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Start the programs named in another user's run folder
    #[arg(long)]
    trust: bool,
}

const HELP: &str =
    "A line is a message; /new forgets the conversation, /quit or Ctrl-D leaves. Ctrl-C ends an answer.\n";

/// The recipe for a chat with a model folder. It has no tool, and allows answers of ordinary length.
const TALK: &str = "task.name = \"arithmetic_single\"
rollout = { turns_max = 1, prompt_tokens_max = 8192, response_tokens_max = 1024 }
eval.temperature = 0.7
";

/// Reads lines and answers each, until the input ends. The tool runs in the recipe's sandbox. The recipe's
/// `turns_max` and `response_tokens_max` limit an answer.
///
/// # Errors
/// [`crate::error::BadInput`] before the first line is read; errors of the rollout.
pub fn run(args: &ChatArgs) -> Result<()> {
    let console = Console::plain();
    let at_terminal = std::io::stdin().is_terminal();
    let ChatArgs { recipe, sets, trust } = args;
    let (plan, _) = open_model(("rloss chat", recipe, TALK), sets, *trust, &console)?;
    // At a terminal, progress shows how much of the model has been read.
    let started = start(plan, ModelCommand::Chat, &Console::stderr(u64::from(at_terminal)))?;
    let Started { loaded, environment, .. } = &started;
    print_warnings(environment, &console);
    if let Some(confinement) = environment.sandbox_description() {
        console.print(&format!("the Python tool: {confinement}"));
    }
    if at_terminal {
        console.print(HELP.trim_end());
    }
    let sampling = Sampling { actor: &loaded.actor, environment };
    let policy = sampling.policy_without_ablations()?;
    let engine = sampling.engine(policy, 0, &environment.recipe().rollout)?;
    // Without a terminal, a signal ends the program as usual.
    let interrupt = at_terminal.then(AnswerInterrupt::listen).transpose()?;
    let mut talk = Talk {
        sampling,
        engine: &engine,
        messages: vec![],
        answers: 0,
        at_terminal,
        interrupt,
        interrupts: 0,
    };
    let ask = || if at_terminal { print_text("\n> ") } else { Ok(()) };
    ask()?;
    for line in bounded_file::lines(std::io::stdin().lock()) {
        match String::from_utf8_lossy(&line.context("reading standard input")?).trim() {
            "" => {}
            "/quit" => return Ok(()),
            "/new" => talk.messages.clear(),
            text if at_terminal && is_command(text) => console.print(HELP.trim_end()),
            text => {
                if is_command(text) {
                    console.print(&format!(
                        "{text} is not a command when input is not a terminal; it is sent as a message"
                    ));
                }
                print_text(&talk.answer(text)?)?;
            }
        }
        ask()?;
    }
    // Ctrl-D leaves the cursor behind the prompt.
    if at_terminal {
        print_text("\n")?
    }
    Ok(())
}

/// Returns whether a line looks like a command, such as /help.
fn is_command(line: &str) -> bool {
    line.strip_prefix('/').is_some_and(|word| !word.is_empty() && word.chars().all(char::is_alphanumeric))
}

/// Prints the warnings of the recipe and, for random weights, one about the model.
pub(super) fn print_warnings(environment: &Environment, console: &Console) {
    environment.plan.warnings.iter().for_each(|warning| console.print(&format!("warning: {warning}")));
    if environment.recipe().model.path.is_none() {
        console.print("warning: this recipe's model is random and untrained; name a run's folder");
    }
}

/// Resolves a recipe, a run, a model folder or a GGUF file for the command `name`. `usual` is the text of the
/// recipe for a model folder or a GGUF file. Returns the plan and the number of the last training step.
///
/// # Errors
/// [`crate::error::BadInput`] if the user does not consent to another user's programs, and for a recipe with
/// mistakes.
pub(super) fn open_model(
    (name, path, usual): (&str, &Path, &str),
    sets: &[String],
    trust: bool,
    console: &Console,
) -> Result<(Plan, u64)> {
    let Some(source) = locate_recipe_or_model(path)? else {
        let sets = [&[format!("model.path={}", path.display())], sets].concat();
        return Ok((resolve_for(KeyScope::Chat, Path::new(name), usual, &sets)?, 0));
    };
    let mut plan = source.resolve_for(KeyScope::Chat, sets)?;
    let step = pin_model(&mut plan, &source, sets)?;
    ask_consent(&source, &plan.recipe, sets, trust, console)?;
    Ok((plan, step))
}

/// The conversation so far.
struct Talk<'a> {
    sampling: Sampling<'a>,
    engine: &'a Engine<'a>,
    /// Messages without the system prompt.
    messages: Vec<Message>,
    /// Number of answers given. Each answer has its own random stream.
    answers: u64,
    at_terminal: bool,
    /// Catches Ctrl-C; `None` without a terminal.
    interrupt: Option<AnswerInterrupt>,
    /// Number of answers that Ctrl-C ended.
    interrupts: u64,
}

/// Interval between two updates of the terminal.
const REDRAW_INTERVAL: Duration = Duration::from_millis(50);

/// An answer on the terminal while it is sampled. Text is shown as soon as it is final, calls and replies
/// when their turn is over. Until the first text, a line counts the tokens.
struct LiveAnswer<'a> {
    chat: &'a Chat,
    counts: bool,
    state: Mutex<LiveState<'a>>,
}

struct LiveState<'a> {
    reader: TurnReader<'a>,
    turn: u64,
    tokens: u64,
    /// Number of the answer's messages that are shown.
    messages: usize,
    /// Texts of this turn that are shown.
    shown: Texts,
    /// The header above the line that is being written.
    header: Option<&'static str>,
    drawn: Instant,
}

impl<'a> LiveAnswer<'a> {
    fn new(chat: &'a Chat) -> Self {
        let live = Self {
            chat,
            counts: std::io::stderr().is_terminal(),
            state: Mutex::new(LiveState {
                reader: TurnReader::chat(chat, vec![]),
                turn: 0,
                tokens: 0,
                messages: 0,
                shown: Texts::default(),
                header: None,
                drawn: Instant::now(),
            }),
        };
        live.count("… reading the prompt");
        live
    }

    /// Takes the next token. `messages` are those of the turns before.
    fn push(&self, turn: u64, token: u32, messages: &[Message]) {
        let mut state = lock(&self.state);
        if turn != state.turn {
            self.end_turn(&mut state, messages);
            state.turn = turn;
        }
        state.tokens += 1;
        state.reader.push(token);
        if state.drawn.elapsed() >= REDRAW_INTERVAL {
            let texts = state.reader.certain();
            self.show(&mut state, texts);
            if state.header.is_none() {
                self.count(&format!("… {}", format_count(state.tokens, "token")));
            }
            state.drawn = Instant::now();
        }
    }

    /// Shows the rest. `messages` are all messages of the answer.
    fn finish(&self, messages: &[Message]) {
        let mut state = lock(&self.state);
        self.end_turn(&mut state, messages);
    }

    fn end_turn(&self, state: &mut LiveState<'a>, messages: &[Message]) {
        let texts = state.reader.last();
        self.show(state, texts);
        match state.header.take() {
            Some(_) => write_terminal("\n"),
            None => self.count(""),
        }
        let is_text = |message: &&Message| {
            message.role == Role::Assistant
                && matches!(message.recipient.as_deref(), None | Some("assistant"))
        };
        let others = messages.iter().skip(state.messages).filter(|message| !is_text(message));
        others.for_each(|message| write_terminal(&text_of(message)));
        state.messages = messages.len();
        (state.reader, state.shown) = (TurnReader::chat(self.chat, vec![]), Texts::default());
    }

    /// Shows the part of `texts` that is not on the terminal yet.
    fn show(&self, state: &mut LiveState<'a>, texts: Texts) {
        let Texts { content, reasoning } = &texts;
        for (header, now, before) in [
            ("assistant, analysis", reasoning, &state.shown.reasoning),
            ("assistant", content, &state.shown.content),
        ] {
            let Some(new) = now.strip_prefix(before.as_str()).filter(|new| !new.is_empty()) else { continue };
            if state.header != Some(header) {
                let before = if state.header.is_some() { "\n" } else { "" };
                self.count("");
                write_terminal(&format!("{before}{}\n  ", console::style(header).bold()));
                state.header = Some(header);
            }
            write_terminal(&sanitize_terminal(new).replace('\n', "\n  "));
        }
        state.shown = texts;
    }

    /// Writes `text` in place of the line that counts tokens.
    fn count(&self, text: &str) {
        if self.counts {
            // A failed write is ignored, because the count is only a display.
            let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
        }
    }
}

/// Writes to the terminal. A failed write is ignored: the terminal is gone, and the next prompt reports it.
fn write_terminal(text: &str) {
    let _ = print_text(text);
}

impl Talk<'_> {
    /// Answers `text`. Returns the text that is still to be printed: the whole answer, or at a terminal what
    /// was not shown live. A conversation that no longer fits the context restarts with `text`.
    fn answer(&mut self, text: &str) -> Result<String> {
        let mut shown = String::new();
        // GPT-OSS's template drops the thoughts before an answer.
        if matches!(self.environment().chat, Chat::Harmony(_))
            && self.messages.last().is_some_and(|last| last.channel.as_deref() == Some("final"))
        {
            self.messages.retain(|message| !message.is_thought());
        }
        self.messages.push(Message::user(text));
        let mut prompt = self.prompt();
        if self.messages.len() > 1 && self.sampler(&self.plan()).check(&prompt).is_err() {
            self.messages.drain(..self.messages.len() - 1);
            prompt = self.prompt();
            shown += "(the conversation no longer fits the model's context: it starts again)\n";
        }
        self.answers += 1;
        let plan = self.plan();
        if let Err(error) = self.sampler(&plan).check(&prompt) {
            self.messages.clear();
            let remedy = match self.environment().system_prompt.is_empty() {
                true => "",
                false => "; --set chat.system_message=false leaves out the system message",
            };
            return Ok(format!("{shown}({}{remedy})\n", sanitize_line(&format!("{error:#}"))));
        }
        print_text(&std::mem::take(&mut shown))?;
        let live = self.at_terminal.then(|| LiveAnswer::new(&self.environment().chat));
        let show = |position: TurnPosition, token: u32, messages: &[Message]| {
            if let Some(live) = &live {
                live.push(position.turn, token, messages);
            }
        };
        let stop = || self.interrupt.as_ref().is_some_and(AnswerInterrupt::is_requested);
        self.interrupt.iter().for_each(AnswerInterrupt::begin);
        let rollouts = self.sampler(&plan).run(&prompt, 1, Hooks { sampled: &show, ..Hooks::until(&stop) });
        self.interrupt.iter().for_each(AnswerInterrupt::end);
        let Some(rollouts) = rollouts? else {
            live.iter().for_each(|live| live.finish(&[]));
            self.messages.pop();
            self.interrupts += 1;
            return Ok(shown + ended_note(self.interrupts));
        };
        let given = self.environment().system_prompt.len() + self.messages.len();
        let trajectory = rollouts.trajectories().next().context("no answer")?;
        let all = rollouts.messages.iter().flatten().next().context("no answer")?;
        let new = all.get(given..).unwrap_or_default();
        match &live {
            Some(live) => live.finish(new),
            None => new.iter().for_each(|message| shown += &text_of(message)),
        }
        shown += &self.ending(trajectory);
        self.messages.extend_from_slice(new);
        Ok(shown)
    }

    fn environment(&self) -> &Environment {
        self.sampling.environment
    }

    fn prompt(&self) -> [Prompt; 1] {
        let (id, answer) = ("chat".to_owned(), serde_json::Value::Null);
        [Prompt { index: 0, problem: Problem { id, messages: self.messages.clone(), answer } }]
    }

    fn plan(&self) -> RolloutPlan {
        self.environment().evaluation_rollout(self.answers)
    }

    fn sampler<'s>(&'s self, plan: &'s RolloutPlan) -> Rollout<'s> {
        Rollout { task: self, ..self.sampling.rollout(self.engine, plan) }
    }

    /// Returns why the answer was cut off, if it was.
    fn ending(&self, trajectory: &Trajectory) -> String {
        let rollout = &self.environment().recipe().rollout;
        let why = match trajectory.outcome {
            Outcome::Finished => return String::new(),
            Outcome::TruncatedLength => {
                let sampled = trajectory.sampled_tokens();
                let limit = match sampled >= rollout.response_tokens_max {
                    true => format!("rollout.response_tokens_max = {}", rollout.response_tokens_max),
                    false => format!(
                        "the model's context of {} tokens; /new forgets the conversation",
                        self.sampling.actor.model.context_tokens_max()
                    ),
                };
                format!("cut off after {}, by {limit}", format_count(sampled as u64, "token"))
            }
            Outcome::TurnsExhausted => {
                format!("one more tool call than rollout.turns_max = {} allows", rollout.turns_max)
            }
            Outcome::Malformed => "the model's last turn is malformed".to_owned(),
            Outcome::TaskFailed => "the task's program failed".to_owned(),
        };
        let sampled = trajectory.tokens.get(trajectory.prompt_tokens..).unwrap_or_default();
        let whole = self.environment().chat.vocabulary().decode(sampled);
        format!("({why}; raw output: {})\n", sanitize_line(&whole))
    }
}

/// Returns the note after an answer that Ctrl-C ended. `nth` counts such answers from 1.
fn ended_note(nth: u64) -> &'static str {
    match nth {
        1 => "(ended; your message is forgotten. Ctrl-C at the prompt, or Ctrl-D, leaves the chat)\n",
        _ => "(ended)\n",
    }
}

/// Formats a message below its header, with control sequences removed from both.
fn text_of(message: &Message) -> String {
    let role = match message.role {
        Role::Assistant => "assistant",
        Role::Tool => message.name.as_deref().unwrap_or("tool"),
        Role::User => "user",
        Role::System | Role::Developer => "system",
    };
    let channel = message.channel.as_deref().filter(|channel| *channel != "final");
    let to = message.recipient.as_deref().filter(|to| *to != "assistant").map(|to| format!("to {to}"));
    let notes: Vec<&str> = channel.into_iter().chain(to.as_deref()).collect();
    let head = [&[role][..], &notes].concat().join(", ");
    let body: Vec<String> =
        sanitize_terminal(&message.content).lines().map(|line| format!("  {line}\n")).collect();
    format!("{}\n{}", console::style(sanitize_line(&head)).bold(), body.concat())
}

/// The run's task, except that the user's lines replace its problems and nothing is rewarded.
impl Task for Talk<'_> {
    fn name(&self) -> &str {
        "chat"
    }

    fn training_problem(&self, _seed: u64, _index: u64) -> Problem {
        let [Prompt { problem, .. }] = self.prompt();
        problem
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &[]
    }

    fn uses_python(&self) -> bool {
        self.environment().task.uses_python()
    }

    fn answers_calls(&self) -> bool {
        self.environment().task.answers_calls()
    }

    fn tool_reply(&self, problem: &Problem, transcript: &Transcript) -> Result<Option<String>> {
        self.environment().task.tool_reply(problem, transcript)
    }

    fn reward(&self, _problem: &Problem, _transcript: &Transcript) -> Result<Reward> {
        Ok(Reward::new(0.0, false))
    }
}
