//! The message loop of one trajectory. It adds sampled tokens, inserts tool replies and user messages, and
//! enforces limits.
//!
//! Rules, in the order of their checks:
//! - Only a stop token ends an answer. In Harmony, `<|end|>` closes a `final` message, but does not stop
//!   sampling.
//! - A turn is the sampled tokens between two insertions. A call in the last allowed turn is not executed
//!   ([`Outcome::TurnsExhausted`]). If the last turn is malformed, the outcome is [`Outcome::Malformed`].
//! - When no token or no context is left, the outcome is [`Outcome::TruncatedLength`]. The outcome is the
//!   same if the next insertion would leave no space for a sampled token; then nothing is inserted. A call is
//!   not executed if its reply would not fit.
//! - A call to an unknown tool (neither `python` nor a tool of the task) gets an error reply in the name of
//!   that tool. A malformed call gets an error reply in the name of the Python tool. If there is no tool to
//!   reply, the outcome is [`Outcome::Malformed`].
//! - If a turn ends in several calls, they are answered in order, and their replies are inserted together.
//! - Sampled tokens never change. This includes the stop token before another user message.

use super::Rollout;
use super::prompt::RenderedPrompt;
use super::sampler::TokenPosition;
use crate::chat::{Call, ChatTurnParser, PYTHON};
use crate::harmony::{Message, TurnEnd, TurnStep};
use crate::interpreter::SessionId;
use crate::ops::logits::SampledToken;
use crate::random::stream;
use crate::tasks::{Problem, Reward, Transcript};
use crate::trajectory::{CallOutcome, Outcome, Trajectory, Turn};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::time::Instant;

/// Reward of a trajectory whose task failed to grade it.
const FAILED: Reward = Reward::new(0.0, false);

/// The next action of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextAction {
    /// Sample another token.
    Sample,
    /// Execute the tool calls.
    Call,
    /// Ask the task for another user message, which may take long.
    Turn,
    /// Do nothing, because the conversation has ended.
    Finish,
}

/// A trajectory in progress.
pub(super) struct Conversation<'a> {
    rollout: &'a Rollout<'a>,
    problem: &'a Problem,
    prompt: u64,
    sample: u64,
    session: SessionId,
    pub(super) tokens: Vec<u32>,
    prompt_tokens: usize,
    mask: Vec<bool>,
    log_probs: Vec<f32>,
    /// Routed experts of the tokens that were fed to the model, if they are kept.
    routed_experts: Vec<Vec<u16>>,
    turns: Vec<Turn>,
    turn_start: usize,
    sampled: usize,
    parser: ChatTurnParser,
    rng: ChaCha8Rng,
    /// Messages after the prompt.
    messages: Vec<Message>,
    calls_answered: usize,
    tool_s: f64,
    outcome: Option<Outcome>,
}

impl<'a> Conversation<'a> {
    /// Starts sample `sample` of a prompt. `routed_experts` holds those of the prompt's tokens, if they
    /// are kept.
    pub(super) fn new(
        rollout: &'a Rollout<'a>,
        prompt: &RenderedPrompt<'a>,
        sample: u64,
        session: SessionId,
        routed_experts: Vec<Vec<u16>>,
    ) -> Self {
        let prompt_tokens = prompt.tokens.len();
        let mut conversation = Self {
            rollout,
            problem: prompt.problem,
            prompt: prompt.index,
            sample,
            session,
            tokens: prompt.tokens.clone(),
            prompt_tokens,
            mask: vec![false; prompt_tokens],
            log_probs: vec![0.0; prompt_tokens],
            routed_experts,
            turns: Vec::new(),
            turn_start: prompt_tokens,
            sampled: 0,
            parser: rollout.chat.turn_parser(),
            rng: stream(0, rollout.plan.purpose, &[]),
            messages: Vec::new(),
            calls_answered: 0,
            tool_s: 0.0,
            outcome: None,
        };
        conversation.open_turn();
        conversation
    }

    fn open_turn(&mut self) {
        self.turn_start = self.tokens.len();
        self.parser = self.rollout.chat.turn_parser();
        let stream_key = [self.rollout.plan.step, self.prompt, self.sample, self.turns.len() as u64];
        self.rng = stream(self.rollout.plan.seed, self.rollout.plan.purpose, &stream_key);
    }

    /// Records the routed experts of the next token that was fed to the model.
    pub(super) fn record_experts(&mut self, experts: Vec<u16>) {
        self.routed_experts.push(experts);
    }

    /// Returns the position of the next token.
    pub(super) fn position(&self) -> TokenPosition {
        TokenPosition {
            prompt: self.prompt,
            sample: self.sample,
            turn: self.turns.len() as u64,
            token: self.tokens.len() - self.turn_start,
        }
    }

    /// Returns the number in [0, 1) that selects the next token. Each turn has its own random stream, so the
    /// number depends only on the token's position.
    pub(super) fn draw_uniform(&mut self) -> f64 {
        self.rng.random()
    }

    /// Appends the next token and returns the next action.
    pub(super) fn push_token(&mut self, drawn: SampledToken) -> NextAction {
        self.tokens.push(drawn.token);
        self.mask.push(true);
        self.log_probs.push(drawn.log_prob);
        self.sampled += 1;
        match self.parser.push(drawn.token) {
            TurnStep::Continues | TurnStep::MessageEnded if self.is_exhausted() => {
                self.close_turn(vec![]);
                self.end(Outcome::TruncatedLength)
            }
            TurnStep::Continues | TurnStep::MessageEnded => NextAction::Sample,
            TurnStep::Ended(end) => self.end_turn(end),
        }
    }

    /// Returns whether no further token may be sampled.
    fn is_exhausted(&self) -> bool {
        self.sampled >= self.rollout.plan.settings.response_tokens_max
            || self.tokens.len() >= self.rollout.context_tokens_max()
    }

    /// Returns whether the current turn is the last allowed one.
    fn is_last_turn(&self) -> bool {
        self.turns.len() + 1 >= self.rollout.plan.settings.turns_max
    }

    fn end_turn(&mut self, end: TurnEnd) -> NextAction {
        match end {
            TurnEnd::Returned => self.handle_return(),
            TurnEnd::Called | TurnEnd::Malformed | TurnEnd::Truncated => self.handle_call(end),
        }
    }

    fn handle_call(&mut self, end: TurnEnd) -> NextAction {
        if self.is_last_turn() || self.is_exhausted() {
            let (calls, outcome) = match end {
                TurnEnd::Called => (vec![], Outcome::TurnsExhausted),
                _ => (vec![CallOutcome::MalformedCall], Outcome::Malformed),
            };
            let outcome = if self.is_last_turn() { outcome } else { Outcome::TruncatedLength };
            self.close_turn(calls);
            return self.end(outcome);
        }
        let needs_thread = |call: &Call| match call {
            Call::Ready(message) => self.calls_python(message) || self.rollout.task.answers_calls(),
            Call::Malformed { .. } => false,
        };
        if self.parser.calls().iter().any(needs_thread) { NextAction::Call } else { self.run_calls() }
    }

    /// Returns whether a call is addressed to the Python tool.
    fn calls_python(&self, call: &Message) -> bool {
        self.rollout.interpreter.is_some() && call.recipient.as_deref() == Some(PYTHON)
    }

    /// Answers the pending calls and blocks until the last reply. A tool thread must call it if a call
    /// executes something.
    pub(super) fn run_calls(&mut self) -> NextAction {
        let (mut outcomes, mut replies) = (vec![], vec![]);
        // The task reads the conversation up to its call. The other messages of the turn are added when the
        // turn is closed.
        let before = self.messages.len();
        let mut ended = None;
        for call in self.parser.calls() {
            let answer = match call {
                Call::Ready(call) => {
                    let name = call.recipient.clone().unwrap_or_default();
                    self.messages.push(call);
                    self.reply(&name).map(|(outcome, text)| (outcome, name, text))
                }
                Call::Malformed { recipient, reply } => {
                    let author = recipient.or_else(|| self.rollout.interpreter.map(|_| PYTHON.to_string()));
                    let author = author.ok_or(Outcome::Malformed);
                    author.map(|author| (CallOutcome::MalformedCall, author, reply))
                }
            };
            match answer {
                Ok((outcome, author, text)) => {
                    outcomes.push(outcome);
                    let reply = Message::tool(&author, None, text);
                    self.messages.push(reply.clone());
                    replies.push(reply);
                }
                Err(outcome) => {
                    if outcome == Outcome::Malformed {
                        outcomes.push(CallOutcome::MalformedCall);
                    }
                    ended = Some(outcome);
                    break;
                }
            }
        }
        self.messages.truncate(before);
        self.close_turn(outcomes);
        if let Some(outcome) = ended {
            return self.end(outcome);
        }
        let channel = self.messages.last().and_then(|message| message.channel.clone());
        replies.iter_mut().for_each(|reply| reply.channel.clone_from(&channel));
        self.insert(replies, Outcome::Malformed)
    }

    /// Returns the reply to the last message, a call to `name`. `Err` holds the outcome that ends the
    /// trajectory.
    fn reply(&mut self, name: &str) -> Result<(CallOutcome, String), Outcome> {
        let unknown = || (CallOutcome::UnknownRecipient, format!("Error: there is no tool named {name:?}."));
        let Some(call) = self.messages.last() else { return Ok(unknown()) };
        if let Some(interpreter) = self.rollout.interpreter.filter(|_| name == PYTHON) {
            let reply = interpreter.call(self.session, &call.content);
            self.tool_s += reply.seconds;
            self.calls_answered += 1;
            return Ok((reply.outcome, reply.text));
        }
        if !self.rollout.task.answers_calls() {
            return Ok(unknown());
        }
        let started = Instant::now();
        let reply = self.rollout.task.tool_reply(self.problem, &self.transcript(Outcome::Finished));
        self.tool_s += started.elapsed().as_secs_f64();
        match reply {
            Ok(Some(text)) => {
                self.calls_answered += 1;
                Ok((CallOutcome::Answered, text))
            }
            Ok(None) => Ok(unknown()),
            Err(_) => Err(Outcome::TaskFailed),
        }
    }

    fn handle_return(&mut self) -> NextAction {
        self.close_turn(vec![]);
        if self.rollout.task.may_take_long() { NextAction::Turn } else { self.request_user_turn() }
    }

    /// Asks the task for the next user message and blocks until the task answers. A tool thread must call it
    /// if the answer may take long.
    pub(super) fn request_user_turn(&mut self) -> NextAction {
        let next = self.rollout.task.next_user_message(self.problem, &self.transcript(Outcome::Finished));
        match next {
            Err(_) => self.end(Outcome::TaskFailed),
            Ok(None) => self.end(Outcome::Finished),
            Ok(Some(_)) if self.turns.len() >= self.rollout.plan.settings.turns_max => {
                self.end(Outcome::TurnsExhausted)
            }
            Ok(Some(_)) if self.is_exhausted() => self.end(Outcome::TruncatedLength),
            Ok(Some(message)) => self.insert(vec![message], Outcome::TaskFailed),
        }
    }

    /// Records the turn and moves its messages from the parser to the conversation.
    fn close_turn(&mut self, calls: Vec<CallOutcome>) {
        self.turns.push(Turn { start: self.turn_start, end: self.tokens.len(), calls });
        let parser = std::mem::replace(&mut self.parser, self.rollout.chat.turn_parser());
        self.messages.extend(parser.finish());
    }

    /// Appends messages and the header of the assistant's next turn. All of these tokens are masked.
    /// `encoding_failure` is the outcome if a message cannot be encoded.
    fn insert(&mut self, messages: Vec<Message>, encoding_failure: Outcome) -> NextAction {
        let tokens_left = self.rollout.context_tokens_max().saturating_sub(self.tokens.len());
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        if !self.rollout.chat.vocabulary().may_fit(bytes, tokens_left) {
            return self.end(Outcome::TruncatedLength);
        }
        let Ok(rendered) = self.rollout.chat.render_continuation(&messages) else {
            return self.end(encoding_failure);
        };
        let tokens = self.tokens.len() + rendered.len();
        if tokens >= self.rollout.context_tokens_max() {
            return self.end(Outcome::TruncatedLength);
        }
        self.tokens.extend(rendered);
        self.mask.resize(tokens, false);
        self.log_probs.resize(tokens, 0.0);
        self.messages.extend(messages);
        self.open_turn();
        NextAction::Sample
    }

    fn end(&mut self, outcome: Outcome) -> NextAction {
        self.outcome = Some(outcome);
        NextAction::Finish
    }

    fn transcript(&self, outcome: Outcome) -> Transcript<'_> {
        Transcript { messages: &self.messages, outcome, calls_answered: self.calls_answered }
    }

    /// Grades the conversation. Returns the trajectory and all messages after the prompt. If the task fails
    /// to grade it, the reward is 0.
    pub(super) fn finish(mut self) -> (Trajectory, Vec<Message>) {
        let Rollout { task, interpreter, .. } = *self.rollout;
        if let Some(interpreter) = interpreter {
            interpreter.close(self.session);
        }
        let mut outcome = self.outcome.unwrap_or(Outcome::TaskFailed);
        let reward = if outcome == Outcome::TaskFailed {
            FAILED
        } else {
            task.reward(self.problem, &self.transcript(outcome)).unwrap_or_else(|_| {
                outcome = Outcome::TaskFailed;
                FAILED
            })
        };
        if self.rollout.plan.settings.keep_routes {
            // The last token was not fed to the model.
            self.routed_experts.resize(self.tokens.len(), Vec::new());
        }
        let mut messages = self.rollout.system_prompt.to_vec();
        messages.extend_from_slice(&self.problem.messages);
        messages.append(&mut self.messages);
        let trajectory = Trajectory {
            step: self.rollout.plan.step,
            prompt: self.prompt,
            sample: self.sample,
            problem_id: self.problem.id.clone(),
            tokens: self.tokens,
            prompt_tokens: self.prompt_tokens,
            mask: self.mask,
            log_probs: self.log_probs,
            routed_experts: self.routed_experts,
            turns: self.turns,
            outcome,
            reward: reward.value,
            success: reward.success,
            rewards: reward.named,
            tool_s: self.tool_s,
        };
        (trajectory, messages)
    }
}
