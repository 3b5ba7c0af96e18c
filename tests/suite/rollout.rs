//! Rollout: one forward with training, independence of batches and threads, the message loop, tools.

mod accounting;
mod exact;
mod mcp;
mod message_loop;
mod own_templates;
mod partial;
mod programs;
mod tools;

use crate::harmony::encode_with_special;
use crate::tiny;
use anyhow::Result;
use rloss::chat::{Chat, ToolForm};
use rloss::engine::{Engine, EngineLimits};
use rloss::harmony::{HarmonyTokenizer, Message};
use rloss::interpreter::{Interpreter, Reply, SessionId};
use rloss::model::cache::CacheCapacity;
use rloss::model::config::Config;

use rloss::model::parameters::Parameters;
use rloss::model::policy_view::PolicyView;
use rloss::ops::threads::Threads;
use rloss::random::Purpose;
use rloss::rollout::{Hooks, Prompt, Rollout, RolloutPlan, RolloutSettings, Rollouts, TurnPosition};
use rloss::tasks::{Problem, Reward, Task, Transcript, ValidationSet};
use rloss::trajectory::{CallOutcome, Outcome};

/// A tiny model with all that a rollout reads beside task and tool.
struct World {
    parameters: Parameters,
    policy: PolicyView<'static>,
    tokenizer: HarmonyTokenizer,
    chat: Chat,
    threads: &'static Threads,
    plan: RolloutPlan,
}

impl World {
    fn new(config: Config, threads: usize) -> Self {
        let (model, parameters) = tiny::model(config, 11);
        // A test's model may live as long as the test program.
        let policy = PolicyView::without_ablations(Box::leak(Box::new(model)), &parameters).unwrap();
        let tokenizer = HarmonyTokenizer::from_embedded().unwrap();
        let settings = RolloutSettings { turns_max: 4, prompt_tokens_max: 120, ..RolloutSettings::default() };
        let plan = RolloutPlan { settings, seed: 5, purpose: Purpose::Sampling, step: 3 };
        let chat = Chat::Harmony(tokenizer.clone());
        Self {
            parameters,
            policy,
            tokenizer,
            chat,
            threads: Box::leak(Box::new(Threads::new(threads).unwrap())),
            plan,
        }
    }

    /// The quickstart's model, with room for long conversations.
    fn roomy() -> Self {
        Self::new(Config { max_position_embeddings: 2048, ..tiny::config(false) }, 2)
    }

    fn rollout<'a>(&'a self, task: &'a dyn Task, interpreter: Option<&'a dyn Interpreter>) -> Rollout<'a> {
        self.rollout_of(task, interpreter, 3)
    }

    /// [`Self::rollout`] by an engine that calls its weights `version`.
    fn rollout_of<'a>(
        &'a self,
        task: &'a dyn Task,
        interpreter: Option<&'a dyn Interpreter>,
        version: u64,
    ) -> Rollout<'a> {
        // A test's engine may live as long as the test program.
        let limits = EngineLimits {
            sequences_max: self.plan.settings.sequences_max,
            cuda_graphs: false,
            cache_capacity: CacheCapacity::default(),
            prefix_tokens_max: 0,
        };
        let threads = self.threads;
        let engine = Engine::new(threads, self.policy.clone(), version, limits).unwrap();
        Rollout {
            engine: Box::leak(Box::new(engine)),
            chat: &self.chat,
            task,
            reward_min: -1.0,
            on_failure: Default::default(),
            reply_chars_max: None,
            interpreter,
            form: ToolForm::Call,
            system_prompt: &[],
            plan: &self.plan,
        }
    }
}

fn sample(rollout: Rollout, prompts: &[Prompt], samples: usize) -> Rollouts {
    rollout
        .run(prompts, samples, Hooks { keeps_parts: true, ..Hooks::until(&|| false) })
        .unwrap()
        .expect("nobody stopped it")
}

/// Questions of different lengths; success is a final message that says `ok`.
struct Questions {
    /// The user's further messages.
    follow_ups: Vec<String>,
}

impl Questions {
    fn new() -> Self {
        Self { follow_ups: vec![] }
    }

    fn prompts(n: usize) -> Vec<Prompt> {
        numbered((0..n).map(|i| Problem {
            id: format!("questions/{i}"),
            messages: vec![Message::user(format!("What is {}?", "1+".repeat(i % 7) + "1"))],
            answer: serde_json::Value::Null,
        }))
    }
}

impl Task for Questions {
    fn name(&self) -> &str {
        "questions"
    }

    fn training_problem(&self, _: u64, index: u64) -> Problem {
        Self::prompts(index as usize + 1).remove(index as usize).problem
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &[]
    }

    fn uses_python(&self) -> bool {
        true
    }

    fn next_user_message(&self, _: &Problem, transcript: &Transcript) -> Result<Option<Message>> {
        let returned = transcript.messages.iter().filter(|m| m.channel.as_deref() == Some("final")).count();
        let follow_up = returned.checked_sub(1).and_then(|i| self.follow_ups.get(i));
        Ok(follow_up.map(Message::user))
    }

    fn reward(&self, _: &Problem, transcript: &Transcript) -> Result<Reward> {
        let text = transcript.final_text();
        anyhow::ensure!(text != Some("ungradable"), "cannot grade that");
        let success = text == Some("ok") && transcript.outcome == Outcome::Finished;
        Ok(Reward::new(if success { 1.0 } else { -1.0 }, success))
    }
}

/// A tool that answers by rule.
struct Scripted<F>(F);

impl<F: Fn(SessionId, &str) -> (CallOutcome, String) + Send + Sync> Interpreter for Scripted<F> {
    fn call(&self, session: SessionId, code: &str) -> Reply {
        let (outcome, text) = self.0(session, code);
        Reply { text, outcome, seconds: 0.25 }
    }

    fn close(&self, _: SessionId) {}

    fn sandbox_description(&self) -> String {
        "scripted".into()
    }
}

fn echo() -> Scripted<impl Fn(SessionId, &str) -> (CallOutcome, String) + Send + Sync> {
    Scripted(|_, code: &str| (CallOutcome::Answered, format!("<{code}>")))
}

/// Forces tokens, `[turn][token]` for every sample; log-probabilities are the model's.
struct Script(Vec<Vec<u32>>);

impl Script {
    fn new(world: &World, turns: &[&str]) -> Self {
        Self(turns.iter().map(|turn| encode_with_special(&world.tokenizer, turn)).collect())
    }
}

impl Script {
    fn turn(&self, position: TurnPosition) -> Vec<u32> {
        self.0.get(position.turn as usize).expect("no more turns than scripted").clone()
    }
}

fn play(rollout: Rollout, script: &Script, prompts: &[Prompt], samples: usize) -> Result<Rollouts> {
    let forced = |position| script.turn(position);
    let hooks = Hooks { forced: &forced, keeps_parts: true, ..Hooks::until(&|| false) };
    Ok(rollout.run(prompts, samples, hooks)?.expect("nobody stopped it"))
}

/// Problems numbered from 0.
fn numbered(problems: impl IntoIterator<Item = Problem>) -> Vec<Prompt> {
    (0..).zip(problems).map(|(index, problem)| Prompt { index, problem }).collect()
}
